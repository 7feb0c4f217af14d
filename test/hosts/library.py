# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of the library over several hosts: ranks that are started by hand. The first arguments are
paths; unittest gets the rest."""
import os
import sys
import time
import unittest

SEED = int(os.environ.get('SEED', time.time_ns()))
PORT = 29500
KEY = '0123456789abcdef' * 2
TIMEOUT_MS = 5000  # enough for ranks to start on a busy machine
LONG_MS = 50000  # of a rank that others have to end
APART = 'shared memory needs all ranks on one host: rank 0 is on "host0", rank %d on "host1"'


def take_paths(n):
    """Returns the first n arguments, and removes them."""
    paths = [os.path.abspath(path) for path in sys.argv[1:n + 1]]
    del sys.argv[1:n + 1]
    return paths


def start(program, net, ranks, **variables):
    """Starts a rank, running program, on each host in ranks (host numbers), as one job. A variable that is a
    list gives each rank its own value; None leaves it unset."""
    more = {'ZERO_JOB_KEY': KEY, 'ZERO_RENDEZVOUS': f'tcp://host0:{PORT}', 'ZERO_WORLD_SIZE': len(ranks), 'ZERO_RANK': list(range(len(ranks))),
            'ZERO_START_TIMEOUT_MS': variables.get('ZERO_TIMEOUT_MS'), **variables}
    started = []
    for rank, host in enumerate(ranks):
        own = {name: value[rank] if isinstance(value, list) else value for name, value in more.items()}
        started.append(net.hosts[host].start(program, **{name: value for name, value in own.items() if value is not None}))
    return started


def ends(commands):
    return [(c.returncode, c.stderr) for c in (command.end() for command in commands)]


class Ranks(unittest.TestCase):
    def all_say(self, commands, words, who=0):
        """Checks that every rank has failed with the message of rank who."""
        for rank, (code, errors) in enumerate(ends(commands)):
            self.assertEqual((code, len(errors.splitlines())), (1, 1), errors)
            self.assertTrue(errors.startswith(f'zero_wrap: {words}') or rank != who and errors.startswith(f'zero_wrap: rank {who}: {words}'), errors)

    def each_says(self, commands, *patterns):
        """Checks that every rank has failed with its own message."""
        for (code, errors), pattern in zip(ends(commands), patterns, strict=True):
            self.assertEqual((code, len(errors.splitlines())), (1, 1), errors)
            self.assertRegex(errors, f'^zero_wrap: {pattern}')
