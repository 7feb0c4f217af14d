# SPDX-License-Identifier: Apache-2.0
"""Links between hosts that are cut while ranks live: packets are dropped, and nobody is told. A cut that is shorter than three fourths of timeout_ms is not noticed;
a longer one is found by beats, and every rank names the host behind it. How long that took is printed: a busy machine may make it longer.

    test_hosts_cut.py PROGRAM            which is talk.c"""
import time

import hosts
import library
from hosts import Hosts

PROGRAM, = library.take_paths(1)
SILENT = r'host {host} \("host{host}", ranks? {ranks}\) is silent: no heartbeat from rank \d+ \(\S+\) for \d+ ms, and one is due every \d+ ms: its network is cut, or it is stopped'


def talk(net, ranks, timeout_ms):
    """Ranks on hosts, which talk already."""
    commands = library.start([PROGRAM, timeout_ms], net, ranks)
    for command in commands:
        command.expect('^round 3$|^lost')
    return commands


class Cut(library.Ranks):
    def go_on(self, commands):
        """They come to a round that is far behind those of now: what was on its way is not enough for it."""
        last = int(commands[0].stdout.split()[-1])
        for command in commands:
            command.expect(f'^round {last + 10}$')
            self.assertNotRegex(command.stdout + command.stderr, 'lost|failed')

    def each_names(self, commands, ranks, cut):
        """Ranks of the host that was cut name rank 0's, the others the one that was cut."""
        for rank, command in enumerate(commands):
            silent = 0 if ranks[rank] == cut else cut
            its = ', '.join(str(r) for r, host in enumerate(ranks) if host == silent)
            found = command.expect(r'^lost rank (\d+) after (\d+) ms: .*$')
            print(f'rank {rank}: {found[0]}')
            self.assertEqual(ranks[int(found[1])], silent)
            self.assertRegex(found[0], SILENT.format(host=silent, ranks=its))
            self.assertEqual(command.end().returncode, 0)

    def test_for_a_second(self):
        """Also of the host of rank 0, over which all others talk."""
        with Hosts(3) as net:
            commands = talk(net, [0, 0, 1, 1, 2, 2], 20000)
            for cut in (1, 0):
                net.cut(net.hosts[cut])
                time.sleep(1)
                net.mend()
                self.go_on(commands)

    def test_for_good(self):
        """Nor does it help that it is mended when it was found."""
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
