# SPDX-License-Identifier: Apache-2.0
"""Cuts links between hosts while ranks live: packets are dropped without notice. A cut shorter than three
fourths of timeout_ms is not noticed. A longer one is found by heartbeats, and every rank names the host
behind it. The time this took is printed, since it may be longer on a busy machine.

    test_hosts_cut.py PROGRAM            PROGRAM is talk.c"""
import time

import hosts
import library
from hosts import Hosts

PROGRAM, = library.take_paths(1)
SILENT = r'host {host} \("host{host}", ranks? {ranks}\) is silent: no heartbeat from rank \d+ \(\S+\) for \d+ ms, and one is due every \d+ ms: its network is cut, or it is stopped'


def talk(net, ranks, timeout_ms):
    """Starts ranks that exchange messages on the hosts."""
    commands = library.start([PROGRAM, timeout_ms], net, ranks)
    for command in commands:
        command.expect('^round 3$|^lost')
    return commands


class Cut(library.Ranks):
    def go_on(self, commands):
        """Checks that they reach a much later round than the current one. Messages on the way would not be
        enough for that."""
        last = int(commands[0].stdout.split()[-1])
        for command in commands:
            command.expect(f'^round {last + 10}$')
            self.assertNotRegex(command.stdout + command.stderr, 'lost|failed')

    def each_names(self, commands, ranks, cut):
        """Ranks of the host that was cut name rank 0's host, and the others name the one that was cut."""
        for rank, command in enumerate(commands):
            silent = 0 if ranks[rank] == cut else cut
            its = ', '.join(str(r) for r, host in enumerate(ranks) if host == silent)
            found = command.expect(r'^lost rank (\d+) after (\d+) ms: .*$')
            print(f'rank {rank}: {found[0]}')
            self.assertEqual(ranks[int(found[1])], silent)
            self.assertRegex(found[0], SILENT.format(host=silent, ranks=its))
            self.assertEqual(command.end().returncode, 0)

    def test_for_a_second(self):
        """Also cuts the host of rank 0, which passes on all messages."""
        with Hosts(3) as net:
            commands = talk(net, [0, 0, 1, 1, 2, 2], 20000)
            for cut in (1, 0):
                net.cut(net.hosts[cut])
                time.sleep(1)
                net.mend()
                self.go_on(commands)

    def test_for_good(self):
        """Mending the link after the cut was found does not help."""
        with Hosts(3) as net:
            ranks = [0, 0, 1, 1, 2, 2]
            commands = talk(net, ranks, 4000)
            net.cut(net.hosts[1])
            for command in commands:
                command.expect('^lost ')
            net.mend()
            self.each_names(commands, ranks, 1)


if __name__ == '__main__':
    hosts.main()
