# SPDX-License-Identifier: Apache-2.0
"""The library over the hosts of hosts.py: ranks are started by hand and meet over the network. No
communicator connects the CPUs of several hosts without MPI, so every rank ends with an error that names hosts
and ranks.

    test_hosts_library.py PROGRAM ZERO_RUN

PROGRAM is zero/examples/minimal.c. N_CUTS and SEED may be set in the environment."""
import os
import random
import time

import hosts
import library
from hosts import Hosts
from library import APART, LONG_MS, PORT, SEED, TIMEOUT_MS, ends

PROGRAM, ZERO_RUN = library.take_paths(2)
N_CUTS = int(os.environ.get('N_CUTS', 1))
RANK_0 = rf'\S+:{PORT}( \(.*\))?'  # where ranks look for it


def start(net, ranks, **variables):
    return library.start([PROGRAM], net, ranks, **variables)


class Library(library.Ranks):
    def test_one_host(self):
        """Works as without namespaces, by hand and by zero-run, and also over the address that other hosts
        use."""
        with Hosts(1) as net:
            outputs = []
            commands = start(net, [0, 0])
            self.assertEqual(ends(commands), [(0, '')] * 2)
            outputs.append(commands[0].stdout)
            outputs.append(net.hosts[0].must([ZERO_RUN, '-n', 2, '--raw', PROGRAM]))
            self.assertRegex(outputs[0], 'step 200 loss')
            self.assertEqual(outputs[0], outputs[1])

    def test_shared_memory_on_two_hosts(self):
        lie = {(0, 1): (1, 'host 0 has 1 rank (0), host 1 has 1 (1)'), (0, 0, 1, 1): (2, 'host 0 has 2 ranks (0, 1), host 1 has 2 (2, 3)'),
               (0, 1, 0): (1, 'host 0 has 2 ranks (0, 2), host 1 has 1 (1)')}
        with Hosts(2) as net:
            for ranks, (first_apart, where) in lie.items():
                for variables in ({}, {'ZERO_BACKEND': 'shm'}):
                    self.all_say(start(net, ranks, **variables), f'{APART % first_apart} ({where}); several hosts need backend ')

    def test_parts_of_a_host(self):
        """ZERO_HOST_ID splits a host, and joins no two."""
        with Hosts(2) as net:
            self.all_say(start(net, [0, 0, 0], ZERO_HOST_ID=['a', 'b', 'a']),
                         'shared memory needs all ranks on one host: ZERO_HOST_ID is "a" on rank 0 and "b" on rank 1, which makes it two hosts '
                         '(host 0 has 2 ranks (0, 2), host 1 has 1 (1)); several hosts need backend ')
            self.all_say(start(net, [0, 1], ZERO_HOST_ID='a'), APART % 1)
            self.assertEqual(ends(start(net, [0, 0], ZERO_HOST_ID='a')), [(0, '')] * 2)

    def test_containers_of_one_machine(self):
        with Hosts(2, one_machine=True) as net:
            self.all_say(start(net, [0, 0, 1], ZERO_BACKEND='shm'),
                         'shared memory needs all ranks in one process namespace: rank 0 ("host0") and rank 2 ("host1") are in different containers (')

    def test_without_a_key(self):
        with Hosts(2) as net:
            for rank, (code, errors) in enumerate(ends(start(net, [0, 1], ZERO_JOB_KEY=None, ZERO_LOG='off'))):
                self.assertEqual(code, 1)
                self.assertRegex(errors, rf"zero_wrap: rank {rank}: rank 0's address host0 \(.*\) can be reached by other hosts, and this job has no key")

    def test_by_a_file(self):
        """Rank 0, on any host, writes its address to a folder that hosts share. Nothing is left there."""
        for ranks in ([0, 0, 1], [1, 0]):
            with Hosts(2) as net:
                self.all_say(start(net, ranks, ZERO_BACKEND='shm', ZERO_RENDEZVOUS='file:///run/hosts'),
                             f'shared memory needs all ranks on one host: rank 0 is on "host{ranks[0]}", rank {len(ranks) - 1} on "host{ranks[-1]}"')
                self.assertEqual([name for name in os.listdir(net.run_folder) if name.startswith('libzero')], [])

    def test_by_a_file_without_a_key(self):
        """The rank on the other host gets the reason why the address in the file does not lead it to rank 0."""
        with Hosts(2) as net:
            commands = start(net, [0, 1], ZERO_JOB_KEY=None, ZERO_LOG='off', ZERO_RENDEZVOUS='file:///run/hosts/meet', ZERO_TIMEOUT_MS=1500)
            (_, zero), (_, one) = ends(commands)
            self.assertRegex(zero, r'1 of 2 ranks did not come to file:///run/hosts/meet \("host0": 127.0.0.1:\d+\) in 1500 ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)')
            self.assertRegex(one, r'file:///run/hosts/meet \("host0": 127.0.0.1:\d+\); without a key ranks meet on one host only: set ZERO_JOB_KEY')

    def test_slow_network(self):
        with Hosts(2) as net, net.relay(net.hosts[1], delay_s=0.1, loss=0.05) as relay:
            self.all_say(start(net, [0, 1], ZERO_BACKEND='shm'), APART % 1)
        self.assertGreater(relay.counts['coming']['passed'], 0)

    def test_cut_before_the_meeting(self):
        with Hosts(2) as net:
            net.cut(net.hosts[1])
            start_s = time.monotonic()
            first, second = ends(start(net, [0, 1], ZERO_TIMEOUT_MS=TIMEOUT_MS))
            self.assertGreaterEqual(time.monotonic() - start_s, TIMEOUT_MS / 1e3)
            self.assertEqual((first[0], second[0]), (1, 1))
            self.assertRegex(first[1], rf'^zero_wrap: 1 of 2 ranks did not come to {RANK_0} in {TIMEOUT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)\n$')
            self.assertRegex(second[1], rf'^zero_wrap: rank 1( \(.*\))? waited {TIMEOUT_MS} ms \(start_timeout_ms\) for rank 0 at {RANK_0}')

    def test_cut_during_the_meeting(self):
        """Cuts the network at any moment of the meeting. Both sides name the rank on the host that is gone."""
        print(f'SEED={SEED}')
        chance = random.Random(SEED)
        for _ in range(N_CUTS):
            with Hosts(3) as net, net.relay(net.hosts[1], delay_s=0.3):  # so that the meeting takes more than 2 s
                commands = start(net, [0, 1, 2], ZERO_TIMEOUT_MS=[TIMEOUT_MS, TIMEOUT_MS, LONG_MS])
                time.sleep(chance.uniform(0, 2))
                net.cut(net.hosts[1])
                first, second, third = ends(commands)
                self.assertRegex(first[1], rf'^zero_wrap: (exchange: )?1 of 3 ranks did not come (to {RANK_0} )?in {TIMEOUT_MS} ms \(start_timeout_ms\): rank 1( \(ZERO_WORLD_SIZE is 3\))?\n$')
                self.assertEqual(first, third)
                self.assertRegex(second[1], rf'^zero_wrap: (exchange: )?rank 1( \(.*\))? waited {TIMEOUT_MS} ms \(start_timeout_ms\) for rank 0\b')
                self.assertEqual((first[0], second[0]), (1, 1))

    def test_mended_before_the_deadline(self):
        """A cut that is shorter than the timeout is not noticed."""
        with Hosts(2) as net:
            net.cut(net.hosts[1])
            commands = start(net, [0, 1], ZERO_BACKEND='shm', ZERO_TIMEOUT_MS=LONG_MS)
            time.sleep(0.5)
            self.assertEqual([command.returncode for command in commands], [None, None])
            net.mend()
            self.all_say(commands, APART % 1)

    def test_a_host_that_dies_before_the_meeting(self):
        """A host dies silently. Rank 0 names the ranks that did not come, and reports that to those who came."""
        with Hosts(3) as net:
            net.cut(net.hosts[2])
            commands = start(net, [0, 1, 2], ZERO_TIMEOUT_MS=[TIMEOUT_MS, LONG_MS, LONG_MS])
            net.hosts[2].kill()
            first, second, third = ends(commands)
            self.assertEqual((first[0], third), (1, (255, 'host2: the host is gone\n')))
            self.assertRegex(first[1], rf'^zero_wrap: 1 of 3 ranks did not come to {RANK_0} in {TIMEOUT_MS} ms \(start_timeout_ms\): rank 2 \(ZERO_WORLD_SIZE is 3\)\n$')
            self.assertEqual(second, first)


if __name__ == '__main__':
    hosts.main()
