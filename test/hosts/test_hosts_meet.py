# SPDX-License-Identifier: Apache-2.0
"""How ranks on the hosts of hosts.py meet: over IPv4 and IPv6, by name and by address, by a chosen interface,
and what every rank reports if they cannot. Ranks that have met are recognized by their next error: shared
memory does not connect their hosts.

    test_hosts_meet.py PROGRAM            N_MEETINGS and SEED in the environment"""
import os
import random
import re

import hosts
import library
from hosts import PYTHON, Hosts
from library import APART, LONG_MS, PORT, SEED, TIMEOUT_MS, ends

PROGRAM = library.take_paths(1)[0]
N_MEETINGS = int(os.environ.get('N_MEETINGS', 5))
SHORT_MS = 1000  # for ranks that nobody joins, whenever they start

# Another program that has the port.
HOLD = 'import socket, sys; s = socket.create_server(("", int(sys.argv[1]))); print("ready", flush=True); sys.stdin.read()'


def start(net, ranks, **variables):
    return library.start([PROGRAM], net, ranks, **variables)


def at(address):
    """Returns the URL of a rendezvous there."""
    return f'tcp://[{address}]:{PORT}' if ':' in address else f'tcp://{address}:{PORT}'


def interfaces(host, networks):
    """Returns a host's addresses without loopback, as messages print them."""
    return ', '.join(f'eth{k} ({host.address(k)}, {host.address6(k)})' for k in range(networks))


class Meet(library.Ranks):
    def test_any_way(self):
        """Two and three hosts with one and two ranks each. Each rank uses its own interface, or any."""
        print(f'SEED={SEED}')
        chance = random.Random(SEED)
        with Hosts(3, networks=2) as net:
            for _ in range(N_MEETINGS):
                ranks = chance.choice([[0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 0, 2, 1, 2]])
                k, is_6 = chance.randrange(2), net.has_ipv6 and chance.random() < 0.5
                number = net.hosts[0].address6(k) if is_6 else net.hosts[0].address(k)
                by_name = k == 0 and chance.random() < 0.5
                asked = []
                for host in ranks:
                    own = net.hosts[host].address6(k) if is_6 else net.hosts[host].address(k)
                    asked.append(chance.choice([None, f'eth{k}'] if by_name else [None, f'eth{k}', own]))
                print(ranks, number, 'by name' if by_name else 'by number', asked)
                self.all_say(start(net, ranks, ZERO_RENDEZVOUS=at('host0' if by_name else number), ZERO_INTERFACE=asked), APART % ranks.index(1))

    def test_name_and_one_family(self):
        """Rank 0 listens on one family only, or the other rank has only one. Ranks use the right one of the
        name's addresses."""
        with Hosts(2) as net:
            if not net.has_ipv6:
                self.skipTest('no IPv6')
            for asked in ([net.hosts[0].address(), None], [net.hosts[0].address6(), 'eth0'], ['eth0', net.hosts[1].address()]):
                self.all_say(start(net, [0, 1], ZERO_INTERFACE=asked), APART % 1)
            net.hosts[1].must(['ip', '-6', 'address', 'flush', 'dev', 'eth0'])
            self.all_say(start(net, [0, 1]), APART % 1)
            # An address of that family does not lead there either.
            self.each_says(start(net, [0, 1], ZERO_RENDEZVOUS=at(net.hosts[0].address6()), ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'1 of 2 ranks did not come to \[fd77:1::1\]:{PORT} \(on eth0 \(fd77:1::1\)\) in {SHORT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)\n',
                           rf"rank 1 waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at \[fd77:1::1\]:{PORT}; last: .*: this host has no IPv6 address to connect from: give rank 0's IPv4 address")

    def test_name_that_is_loopback(self):
        """A host's own name is loopback in its own /etc/hosts, as often happens."""
        with Hosts(2) as net:
            net.hosts[0].must(['sh', '-ec', 'sed "s/.* host0$/127.0.1.1 host0/" /etc/hosts >/run/own_hosts; mount --bind /run/own_hosts /etc/hosts'])
            for asked in (None, 'eth0'):
                self.all_say(start(net, [0, 0, 1], ZERO_INTERFACE=asked), APART % 2)

    def test_rank_0_without_ipv6(self):
        with Hosts(2) as net:
            if not net.has_ipv6:
                self.skipTest('no IPv6')
            net.hosts[0].must(['ip', '-6', 'address', 'flush', 'dev', 'eth0'])
            self.each_says(start(net, [0, 1], ZERO_RENDEZVOUS=at('fd77:1::1'), ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'1 of 2 ranks did not come to .* in {SHORT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\); '
                           'last: fd77:1::1 is not an address of this host, which has no IPv6 address, so rank 0 listens at all of its addresses\n',
                           rf'rank 1 \(fd77:1::2 on eth0\) waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at \[fd77:1::1\]:{PORT}; last: ')


class Refused(library.Ranks):
    def test_interfaces(self):
        """All ranks hear of the one with the wrong interface, though not from it."""
        with Hosts(2, networks=2) as net:
            if not net.has_ipv6:
                self.skipTest('no IPv6')
            for rank in (0, 1):
                for wrong in ('eth9', '10.77.0.9'):
                    self.all_say(start(net, [0, 1], ZERO_INTERFACE=[wrong if r == rank else None for r in (0, 1)]),
                                 f'ZERO_INTERFACE is "{wrong}": this host has {interfaces(net.hosts[rank], 2)}, lo (127.0.0.1, ::1)\n', rank)
            net.hosts[1].must(['ip', 'link', 'set', 'eth1', 'down'])
            self.all_say(start(net, [0, 1], ZERO_INTERFACE=[None, 'eth1']), 'ZERO_INTERFACE is "eth1", which is down or has no address: this host has eth0 ', 1)
            self.all_say(start(net, [0, 1], ZERO_RENDEZVOUS=at('10.77.0.1'), ZERO_INTERFACE=['eth1', None]),
                         'rank 0 listens on interface eth1 (10.77.1.1, fd77:2::1), but the others look for it at 10.77.0.1, which is on eth0: ')
            self.each_says(start(net, [0, 1], ZERO_RENDEZVOUS=at('10.77.0.1'), ZERO_INTERFACE=[None, 'fd77:1::2'], ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'1 of 2 ranks did not come to 10.77.0.1:{PORT} \(on eth0 \(10.77.0.1\)\) in {SHORT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)\n',
                           rf"rank 1 \(on fd77:1::2\) waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at 10.77.0.1:{PORT}; last: .*: interface fd77:1::2 has no IPv4 address to connect "
                           "from: give rank 0's IPv6 address")

    def test_missing_rank(self):
        """The message names what rank 0 listens on, and how others try to reach it."""
        with Hosts(2, networks=2) as net:
            if not net.has_ipv6:
                self.skipTest('no IPv6')
            self.each_says(start(net, [0], ZERO_WORLD_SIZE=2, ZERO_INTERFACE='eth1', ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'1 of 2 ranks did not come to host0:{PORT} \(on eth1 \(10.77.1.1, fd77:2::1\)\) in {SHORT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)\n')
            self.each_says(start(net, [0], ZERO_WORLD_SIZE=2, ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'1 of 2 ranks did not come to host0:{PORT} \(on {re.escape(interfaces(net.hosts[0], 2))}, lo .*\) in {SHORT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\)\n')
            self.each_says(start(net, [1], ZERO_WORLD_SIZE=2, ZERO_RANK=1, ZERO_RENDEZVOUS=at('10.77.1.1'), ZERO_INTERFACE='eth1', ZERO_TIMEOUT_MS=SHORT_MS),
                           rf'rank 1 \(10.77.1.2 on eth1\) waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at 10.77.1.1:{PORT}; last: connection refused: rank 0 has not started')

    def test_port_in_use(self):
        with Hosts(2) as net:
            other = net.hosts[0].start([PYTHON, '-c', HOLD, PORT])
            other.expect('^ready$')
            first, second = start(net, [0, 1], ZERO_RENDEZVOUS=at('10.77.0.1'), ZERO_TIMEOUT_MS=SHORT_MS)
            self.each_says([first, second], rf'rank 0 cannot listen at 10.77.0.1:{PORT} \(eth0\): address already in use; choose another port\n',
                           rf'rank 1 \(10.77.0.2 on eth0\) waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at 10.77.0.1:{PORT}; last: ')

    def test_no_such_host(self):
        with Hosts(2) as net:
            (code, errors), = ends(start(net, [1], ZERO_WORLD_SIZE=2, ZERO_RANK=1, ZERO_RENDEZVOUS=at('nowhere.invalid'), ZERO_TIMEOUT_MS=SHORT_MS))
            self.assertEqual(code, 1)
            self.assertRegex(errors, rf'^zero_wrap: rank 1 waited {SHORT_MS} ms \(start_timeout_ms\) for rank 0 at nowhere.invalid:{PORT}; last: (no address for "nowhere.invalid": |'
                                     'the address of "nowhere.invalid" is being looked up)')

    def test_who_comes(self):
        """Two processes with the same rank, and other keys. Messages say who they are, and from where."""
        with Hosts(3) as net:
            for _, errors in ends(start(net, [0, 1, 2], ZERO_RANK=[0, 1, 1], ZERO_TIMEOUT_MS=LONG_MS)):
                self.assertRegex(errors, r'rank 1 .*(10\.77\.0\.[23]|fd77:1::[23]).*(10\.77\.0\.[23]|fd77:1::[23])')
            first, second = ends(start(net, [0, 1], ZERO_JOB_KEY=[library.KEY, library.KEY[::-1]], ZERO_TIMEOUT_MS=TIMEOUT_MS))
            self.assertRegex(first[1], rf'^zero_wrap: 1 of 2 ranks did not come to .* in {TIMEOUT_MS} ms \(start_timeout_ms\): rank 1 \(ZERO_WORLD_SIZE is 2\); last: refused .*(10\.77\.0\.2|fd77:1::2)')
            self.assertRegex(second[1], rf'^zero_wrap: rank 1 .*for rank 0 at host0:{PORT}.*: .*of another job, or one with another key: ZERO_JOB_KEY and')

    def test_replicas(self):
        with Hosts(2) as net:
            hsdp = {'ZERO_DP_REPLICATE': 'auto', 'ZERO_STAGE': 3}
            for _, errors in ends(start(net, [0, 1, 1], ZERO_DP_REPLICATE=2, ZERO_STAGE=3)):
                self.assertRegex(errors, r'^zero_find_place: the axes of mesh .* do not divide the world of 3 ranks')
            self.all_say(start(net, [0, 1, 1], **hsdp), 'dp_replicate is auto, one replica per host, but hosts have unequal numbers of ranks')
            self.all_say(start(net, [0, 1, 0, 1], **hsdp), 'dp_replicate is auto, one replica per host, but the ranks of a host are not consecutive')


if __name__ == '__main__':
    hosts.main()
