# SPDX-License-Identifier: Apache-2.0
"""What tests of the library over several hosts have in common: ranks that are started by hand. The first of their arguments are
paths; the rest is unittest's."""
import os
import sys
import time
import unittest

SEED = int(os.environ.get('SEED', time.time_ns()))
PORT = 29500
KEY = '0123456789abcdef' * 2
TIMEOUT_MS = 5000  # in which ranks start, on a busy machine
LONG_MS = 50000  # of a rank that others are to end
APART = 'shared memory needs all ranks on one host: rank 0 is on "host0", rank %d on "host1"'


def take_paths(n):
    """The first n arguments."""
    paths = [os.path.abspath(path) for path in sys.argv[1:n + 1]]
    del sys.argv[1:n + 1]
    return paths


def start(program, net, ranks, **variables):
    """A rank, which is the command program, on each host that ranks (host numbers) names; all of a job of that many. Of a variable that is a list each rank has its
    own, None is not set."""
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
        """Every rank has failed, with these words of rank who; those of it on others, too."""
        for rank, (code, errors) in enumerate(ends(commands)):
            self.assertEqual((code, len(errors.splitlines())), (1, 1), errors)
            self.assertTrue(errors.startswith(f'zero_wrap: {words}') or rank != who and errors.startswith(f'zero_wrap: rank {who}: {words}'), errors)

    def each_says(self, commands, *patterns):
        """Every rank has failed, with words of its own."""
        for (code, errors), pattern in zip(ends(commands), patterns, strict=True):
            self.assertEqual((code, len(errors.splitlines())), (1, 1), errors)
            self.assertRegex(errors, f'^zero_wrap: {pattern}')
