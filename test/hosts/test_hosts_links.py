# SPDX-License-Identifier: Apache-2.0
"""The links between the hosts of hosts.py. Packets pass. A cut drops them without notice, and a TCP
connection continues when it is mended. A relay delays and loses as requested. No wait is expected to be
short."""
import json
import unittest

import hosts
from hosts import PYTHON, Hosts

PORT = 4000

# Sends back what comes over TCP.
ECHO = """
import socket, sys, threading
family = getattr(socket, sys.argv[1])
def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
listener = socket.create_server(('', int(sys.argv[2])), family=family)
print('ready', flush=True)
while True:
    threading.Thread(target=echo, args=[listener.accept()[0]], daemon=True).start()
"""

# Connects, and sends each line of its input. Prints what comes back, and when the other side closes.
TALK = """
import socket, sys, threading
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print('connected', flush=True)
def listen():
    try:
        while data := connection.recv(65536):
            print(data.decode(), end='', flush=True)
    except ConnectionResetError:
        pass
    print('closed', flush=True)
threading.Thread(target=listen, daemon=True).start()
for line in sys.stdin:
    connection.sendall(line.encode())
"""

# Prints datagrams as they come.
RECEIVE = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
receiver.bind(('', int(sys.argv[1])))
print('ready', flush=True)
while True:
    print(receiver.recv(99).decode(), flush=True)
"""
SEND = """
import socket, sys, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for text in sys.argv[3:]:
    sender.sendto(text.encode(), (sys.argv[1], int(sys.argv[2])))
    time.sleep(0.001)
"""

# Measures how long a byte takes there and back: the shortest of several times.
ROUND_TRIP = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(5):
    start = time.monotonic()
    connection.sendall(b'x')
    connection.recv(1)
    took.append(time.monotonic() - start)
print(min(took))
"""

# Sends bytes there and back, and compares them.
TRANSFER = """
import os, socket, sys, threading
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
data = os.urandom(int(sys.argv[3]))
threading.Thread(target=connection.sendall, args=[data]).start()
back = bytearray()
while len(back) < len(data):
    back += connection.recv(1 << 16)
print(back == data)
"""


def python(host, code, *args):
    return host.start([PYTHON, '-c', code, *args])


def echo_on(host, port=PORT, family='AF_INET'):
    python(host, ECHO, family, port).expect('^ready$')


def talk(host, other, port=PORT):
    talking = python(host, TALK, other, port)
    talking.expect('^connected$')
    return talking


class Packets(unittest.TestCase):
    def test_both_families(self):
        with Hosts(3) as net:
            server = net.hosts[0]
            echo_on(server, 1)
            addresses = [(server.name, 1), (server.address(), 1)]
            if net.has_ipv6:
                echo_on(server, 2, 'AF_INET6')
                addresses += [(server.name, 2), (server.address6(), 2)]
            for address, port in addresses:
                for host in net.hosts:
                    talking = talk(host, address, port)
                    talking.say('hello')
                    talking.expect('^hello$')

    def test_much(self):
        with Hosts(2) as net:
            echo_on(net.hosts[0])
            self.assertEqual(python(net.hosts[1], TRANSFER, 'host0', PORT, 16 << 20).end().stdout, 'True\n')


class Cuts(unittest.TestCase):
    def test_tcp_goes_on(self):
        with Hosts(2) as net:
            server, client = net.hosts
            echo_on(server)
            talking = talk(client, server.name)
            for cut in (server, client):
                talking.say(f'before {cut.name}')
                talking.expect(f'^before {cut.name}$')
                net.cut(cut)
                talking.say(f'during {cut.name}')
                with self.assertRaisesRegex(AssertionError, "no 'during"):
                    talking.expect(f'during {cut.name}', limit=0.5)
                # No process was notified: the interfaces are up, and the connection is unchanged.
                for host in net.hosts:
                    self.assertEqual(host.must(['cat', '/sys/class/net/eth0/operstate', '/sys/class/net/eth0/carrier']).split(), ['up', '1'])
                self.assertIsNone(talking.returncode)
                net.mend()
                talking.expect(f'^during {cut.name}$')

    def test_what_was_sent_is_dropped(self):
        with Hosts(2) as net:
            ours, other = net.hosts
            receiving = python(other, RECEIVE, PORT)
            receiving.expect('^ready$')
            for text, cut in (('before', None), ('during', other), ('during', ours), ('after', None)):
                if cut:
                    net.cut(cut)
                python(ours, SEND, other.name, PORT, text).end()
                net.mend()
            receiving.expect('^after$')
            self.assertEqual(receiving.stdout.split(), ['ready', 'before', 'after'])

    def test_a_host_that_dies(self):
        """The host's kernel closes its connections. If it was cut before, no other host hears of its end."""
        for silent in (False, True):
            with Hosts(2) as net:
                server, client = net.hosts
                echo_on(server)
                talking = talk(client, server.name)
                if silent:
                    net.cut(server)
                server.kill()
                if silent:
                    with self.assertRaisesRegex(AssertionError, "no 'closed'"):
                        talking.expect('closed', limit=0.5)
                else:
                    talking.expect('^closed$')

    def test_between_two_of_three(self):
        with Hosts(3) as net:
            middle, left, right = net.hosts
            for host in (middle, right):
                echo_on(host)
            links = {'cut': talk(left, right.name), 'left': talk(left, middle.name), 'right': talk(right, middle.name)}
            net.cut_between(left, right)
            for name, talking in links.items():
                talking.say('first')
                if name != 'cut':
                    talking.expect('^first$')
            with self.assertRaisesRegex(AssertionError, "no 'first'"):
                links['cut'].expect('first', limit=0.5)
            net.mend()
            links['cut'].expect('^first$')

    def test_one_of_two_networks(self):
        with Hosts(2, networks=2) as net:
            server, client = net.hosts
            echo_on(server)
            first, second = (talk(client, server.address(k)) for k in range(2))
            net.cut(server)
            first.say('first')
            second.say('second')
            second.expect('^second$')
            with self.assertRaisesRegex(AssertionError, "no 'first'"):
                first.expect('first', limit=0.5)
            net.mend()
            first.expect('^first$')


class Relays(unittest.TestCase):
    def know(self, host, other):
        """Makes host learn the other's link address. That too takes frames, which a relay may lose."""
        host.must(['ip', 'neighbour', 'replace', other.address(), 'dev', 'eth0', 'lladdr', other.must(['cat', '/sys/class/net/eth0/address']).strip()])

    def round_trip_s(self, net):
        return float(python(net.hosts[1], ROUND_TRIP, 'host0', PORT).end().stdout)

    def test_delay(self):
        with Hosts(2) as net:
            echo_on(net.hosts[0])
            plain = self.round_trip_s(net)
            with net.relay(net.hosts[0], delay_s=0.05):
                slow = self.round_trip_s(net)
                with net.relay(net.hosts[1], delay_s=0.1):  # one from each host
                    slower = self.round_trip_s(net)
            print(f'round trips of {plain * 1e3:.3f} ms, {slow * 1e3:.1f} ms with 50 ms each way, {slower * 1e3:.1f} ms with 150 ms')
            self.assertGreaterEqual(slow, 0.1)
            self.assertGreaterEqual(slower, 0.3)

    def test_loss(self):
        """The number lost of 300 datagrams is within six standard deviations of the binomial distribution.
        They fit in the receiver's buffer, however slow it is."""
        n = 300
        for loss in (0, 0.1, 0.5):
            with Hosts(2) as net:
                receiving = python(net.hosts[1], RECEIVE, PORT)
                receiving.expect('^ready$')
                with net.relay(net.hosts[1], loss=loss, seed=1) as relay:
                    self.know(net.hosts[0], net.hosts[1])
                    python(net.hosts[0], SEND, net.hosts[1].address(), PORT, *range(n)).end()
                python(net.hosts[0], SEND, net.hosts[1].address(), PORT, 'last').end()
                receiving.expect('^last$')
                came = [int(text) for text in receiving.stdout.split() if text.isdigit()]
            print(f'{n - len(came)} of {n} lost, where {loss * n:.0f} are to be expected; the relay has counted {json.dumps(relay.counts)}')
            self.assertEqual(came, sorted(set(came)))
            self.assertLessEqual(abs(n - len(came) - loss * n), 6 * (n * loss * (1 - loss)) ** 0.5)
            self.assertGreaterEqual(relay.counts['coming']['passed'], len(came))
            self.assertGreaterEqual(relay.counts['coming']['lost'], n - len(came) if loss else 0)

    def test_one_direction(self):
        """One direction is lost: first what the host sends, then what it receives. TCP retransmits in both
        cases."""
        with Hosts(2) as net:
            ours, other = net.hosts
            receiving = [python(host, RECEIVE, PORT) for host in net.hosts]
            for command in receiving:
                command.expect('^ready$')
            echo_on(other)
            talking = talk(ours, other.name)
            with net.relay(ours) as relay:
                for text, loss in (('leaving', (1, 0)), ('coming', (0, 1))):
                    relay.set(loss=loss)
                    talking.say(text)
                    for sender, to in ((ours, other), (other, ours)):
                        self.know(sender, to)
                        python(sender, SEND, to.address(), PORT, text).end()
                    with self.assertRaisesRegex(AssertionError, f"no '{text}"):
                        talking.expect(f'{text}$', limit=0.5)
                    relay.set()
                    talking.expect(f'^{text}$')
                for sender, to in ((ours, other), (other, ours)):
                    python(sender, SEND, to.address(), PORT, 'last').end()
            for command in receiving:
                command.expect('^last$')
            self.assertEqual([command.stdout.split() for command in receiving], [['ready', 'leaving', 'last'], ['ready', 'coming', 'last']])

    def test_tcp_through_delay_and_loss(self):
        with Hosts(2) as net:
            echo_on(net.hosts[0])
            with net.relay(net.hosts[0], delay_s=0.002, loss=0.02) as relay:
                self.assertEqual(python(net.hosts[1], TRANSFER, 'host0', PORT, 1 << 20).end().stdout, 'True\n')
                net.cut(net.hosts[0])  # with the relay before the cut
                talking = python(net.hosts[1], TALK, 'host0', PORT)
                with self.assertRaisesRegex(AssertionError, "no 'connected'"):
                    talking.expect('connected', limit=0.5)
                net.mend()
                talking.expect('^connected$')
                talking.say('hello')
                talking.expect('^hello$')
            print(f'the relay has counted {json.dumps(relay.counts)}')
            self.assertGreater(relay.counts['coming']['passed'], 0)


if __name__ == '__main__':
    hosts.main()
