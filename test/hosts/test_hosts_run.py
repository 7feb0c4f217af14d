# SPDX-License-Identifier: Apache-2.0
"""One zero-run job on the hosts of hosts.py: a zero-run on each host, with two ranks each.

    test_hosts_run.py PROGRAM ZERO_RUN

PROGRAM is zero/examples/minimal.c. The other ranks are Python programs that meet at MASTER_ADDR, like ranks
of any library."""
import os
import re
import sys
import time
import unittest

import hosts
from hosts import Hosts

PROGRAM, ZERO_RUN = map(os.path.abspath, sys.argv[1:3])
del sys.argv[1:3]  # the rest is unittest's
PORT = 29400
KEY = '0123456789abcdef' * 2

# Meets the other ranks of its attempt at rank 0's port, reports that, and waits for a signal. In attempt 1 it
# does not wait.
RANK = r"""
import os, signal, socket, sys, time
rank, world, attempt = (int(os.environ[v]) for v in ('RANK', 'WORLD_SIZE', 'ZERO_ATTEMPT'))
host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
def got(n, frame):
    print('got', signal.Signals(n).name)
    sys.exit(0)
signal.signal(signal.SIGUSR1, got)
if rank == 0:
    there = socket.create_server(('', port))
    others = [there.accept()[0] for _ in range(world - 1)]
    for o in others: o.send(b'all')
else:
    while True:
        try:
            to_0 = socket.create_connection((host, port))
            break
        except OSError:
            time.sleep(0.02)
    to_0.recv(3)
print(f'attempt {attempt}: rank {rank} of {world}, process {os.getpid()}')
if attempt == 0:
    while True: time.sleep(0.05)
"""


def start(net, *options, at=f'host0:{PORT}', program=(hosts.PYTHON, '-c', RANK)):
    return [host.start([ZERO_RUN, '--nnodes', len(net.hosts), '--node-rank', i, '--rdzv', at, '-n', 2, *options, *program], ZERO_JOB_KEY=KEY)
            for i, host in enumerate(net.hosts)]


def all_there(nodes, world, attempt=0):
    """Returns the process numbers of the ranks, as their hosts see them."""
    found = {}
    for i, node in enumerate(nodes):
        for local in range(2):
            rank = 2 * i + local
            found[rank] = int(node.expect(rf'^\[{rank}\] attempt {attempt}: rank {rank} of {world}, process (\d+)$')[1])
    return found


def kill(host, pid, signum=9):
    host.must(['sh', '-c', f'kill -{signum} {pid}'])


def zero_run_of(host, rank_process):
    return int(re.search(r'^PPid:\s+(\d+)$', host.must(['cat', f'/proc/{rank_process}/status']), re.MULTILINE)[1])


def gone(host, pids):
    """Waits until no process has one of these numbers, except for zombies."""
    end = time.monotonic() + hosts.LIMIT
    while host.must(['sh', '-c', ' '.join(f'cat /proc/{p}/stat 2>/dev/null;' for p in pids) + 'true']).replace(') Z ', ''):
        if time.monotonic() > end:
            raise AssertionError(f'{host.name}: {pids} are still there')
        time.sleep(0.05)


class Run(unittest.TestCase):
    def ends(self, nodes, *codes):
        self.assertEqual([n.end().returncode for n in nodes], list(codes), [n.stderr for n in nodes])

    def all_say(self, nodes, pattern):
        for node in nodes:
            self.assertRegex(node.stderr, re.compile(f'^zero-run: {pattern}$', re.MULTILINE))

    def test_ranks_meet(self):
        with Hosts(2) as net:
            at = ['host0', net.hosts[0].address()] + ([f'[{net.hosts[0].address6()}]'] if net.has_ipv6 else [])
            for place in [f'{host}:{PORT}' for host in at] + ['file:///run/hosts', 'file:///run/hosts/meet']:
                # The library's ranks get as far as their backend, which reports what it knows of hosts.
                nodes = start(net, at=place, program=[PROGRAM])
                for node in nodes:
                    self.assertNotEqual(node.end().returncode, 0)
                    self.assertIn('shared memory needs all ranks on one host: rank 0 is on "host0", rank 2 on "host1"', node.stderr)
                self.assertEqual([name for name in os.listdir(net.run_folder) if name.startswith(('libzero', 'meet'))], [])

    def test_a_rank_is_killed(self):
        with Hosts(2) as net:
            nodes = start(net, '--restarts', 1)
            pids = all_there(nodes, 4)
            kill(net.hosts[1], pids[2])
            all_there(nodes, 4, 1)
            self.ends(nodes, 0, 0)
            self.all_say(nodes, r'rank 2 on node 1 \(host1\) was killed by signal 9 \(Killed\); ending all ranks')
            self.all_say(nodes, r'restart 1 of 1: 4 ranks; no record tells of a step \(.*\)')

    def test_a_node_is_killed(self):
        with Hosts(2) as net:
            nodes = start(net, '--restarts', 1, '--min-ranks', 2, '--allow-batch-change')
            pids = all_there(nodes, 4)
            kill(net.hosts[1], zero_run_of(net.hosts[1], pids[2]))
            all_there(nodes[:1], 2, 1)
            self.ends(nodes, 0, 137)
            self.all_say(nodes[:1], r'node 1 \(host1, ranks 2 to 3\) is lost: .*; ending all ranks')
            gone(net.hosts[1], [pids[2], pids[3]])

    def test_node_0_is_killed(self):
        with Hosts(2) as net:
            nodes = start(net, '--restarts', 1, '--min-ranks', 2)
            pids = all_there(nodes, 4)
            kill(net.hosts[0], zero_run_of(net.hosts[0], pids[0]))
            self.ends(nodes, 137, 1)
            self.all_say(nodes[1:], r'node 0 \(host0\), which leads the job, is lost: .*; ending 2 ranks')
            gone(net.hosts[0], [pids[0], pids[1]])

    def test_a_link_is_cut(self):
        """Both sides notice it, and end their ranks."""
        with Hosts(2) as net:
            nodes = start(net, '--node-timeout', 1)
            pids = all_there(nodes, 4)
            net.cut(net.hosts[1])
            self.ends(nodes, 1, 1)
            self.all_say(nodes[:1], r'node 1 \(host1, ranks 2 to 3\) is lost: it is silent: no heartbeat .*; ending all ranks')
            self.all_say(nodes[1:], r'node 0 \(host0\), which leads the job, is lost: it is silent: no heartbeat .*; ending 2 ranks')
            for i, host in enumerate(net.hosts):
                gone(host, [pids[2 * i], pids[2 * i + 1]])

    def test_goes_on_without_who_was_cut_off(self):
        with Hosts(2) as net:
            nodes = start(net, '--node-timeout', 1, '--restarts', 1, '--min-ranks', 2, '--allow-batch-change')
            all_there(nodes, 4)
            net.cut(net.hosts[1])
            all_there(nodes[:1], 2, 1)
            self.ends(nodes, 0, 1)

    def test_a_short_cut_is_none(self):
        with Hosts(2) as net:
            nodes = start(net, '--node-timeout', 30)
            pids = all_there(nodes, 4)
            net.cut(net.hosts[1])
            time.sleep(1)
            net.mend()
            kill(net.hosts[1], zero_run_of(net.hosts[1], pids[2]), 'USR1')  # the ranks of the other host get it too
            self.ends(nodes, 0, 0)
            for i, node in enumerate(nodes):
                self.assertEqual(len(re.findall('got SIGUSR1', node.stdout)), 2, i)

    def test_a_signal_that_passes_a_start_on_the_way(self):
        """Node 1 is asked to end when node 0 has sent it the next attempt, which has not arrived yet. Those
        ranks get the signal too."""
        code = """echo here $ZERO_ATTEMPT $$
test $ZERO_ATTEMPT = 0 && test $RANK -ge 2 && { until test -e /run/hosts/now; do sleep 0.02; done; exit 3; }
test $RANK -lt 2 && trap '' INT
exec sleep 1000"""
        with Hosts(2) as net, net.relay(net.hosts[1]) as relay:
            nodes = start(net, '--restarts', 1, program=['sh', '-c', code])
            pid = nodes[1].expect(r'^\[2\] here 0 (\d+)$')[1]
            zero_run = zero_run_of(net.hosts[1], pid)
            relay.set(delay_s=1)
            net.hosts[1].must(['touch', '/run/hosts/now'])
            end = time.monotonic() + hosts.LIMIT
            while 'restart 1 of 1' not in nodes[0].stderr and time.monotonic() < end:
                time.sleep(0.01)
            kill(net.hosts[1], zero_run, 'INT')
            self.ends(nodes, 130, 130)
            self.all_say(nodes, r'rank [23] on node 1 \(host1\) was killed by signal 2 \(Interrupt\); ending all ranks')

    def test_node_0_listens_on_another_interface(self):
        """Node 0 notices it at once, with the interface given by number and by name."""
        with Hosts(1, networks=2) as net:
            for at, place in ((f'10.77.0.1:{PORT}', '10.77.0.1'), (f'host0:{PORT}', r'host0 \(.*\)')):
                node = net.hosts[0].start([ZERO_RUN, '--nnodes', 2, '--node-rank', 0, '--rdzv', at, '-n', 2, 'true'], ZERO_JOB_KEY=KEY, ZERO_INTERFACE='eth1')
                self.ends([node], 1)
                self.all_say([node], rf'node 0 listens on interface eth1.*, but the others look for it at {place}, which is on eth0: .*')

    def test_node_0_is_not_where_rdzv_says(self):
        with Hosts(2) as net:
            nodes = start(net, '--rdzv-timeout', 1, at=f'host1:{PORT}')
            self.ends(nodes, 1, 1)
            self.all_say(nodes[:1], rf'1 of 2 nodes did not come to host1:{PORT} \(on eth0 \(.*\)\) in 1000 ms: node 1')
            self.all_say(nodes[1:], rf'node 1 \(.*\) waited 1000 ms for node 0 at host1:{PORT}.*')


if __name__ == '__main__':
    hosts.main()
