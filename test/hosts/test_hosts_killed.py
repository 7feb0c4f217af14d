# SPDX-License-Identifier: Apache-2.0
"""Nothing is left of the hosts of hosts.py if the test that made them is killed, at any moment, or ends
normally: no process, interface, mount or file.

    test_hosts_killed.py           N_MOMENTS and SEED in the environment
    test_hosts_killed.py --hold    the process that is killed"""
import contextlib
import ctypes
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import hosts
from hosts import LIMIT, PYTHON, Hosts

N_MOMENTS = int(os.environ.get('N_MOMENTS', 8))
SEED = int(os.environ.get('SEED', time.time_ns()))
OUR_MOUNTS = re.compile(r'/(run|run/hosts|run/sys|sys|sys/fs/cgroup|proc|proc/sys/.*|dev/shm|etc/hosts)')
NAMESPACES = ('net', 'pid', 'mnt', 'user')

# A process that is hard to end: it has its own session, its parent is gone, and it ignores signals.
STUBBORN = 'trap "" HUP INT TERM; (setsid sh -c "trap \\"\\" HUP INT TERM; echo stubborn; exec sleep 1000" &) ; exec sleep 1000'


def hold():
    """Starts everything that hosts.py can start, until this process is killed."""
    with Hosts(2, networks=2) as net:
        print('hosts', flush=True)
        for host in net.hosts:
            host.start(['sh', '-c', STUBBORN]).expect('stubborn')
        with net.relay(net.hosts[0], delay_s=10):
            net.cut(net.hosts[1])
            print('all', flush=True)
            time.sleep(1000)


def adopt_orphans():
    """Makes this process the parent of all descendants that lose theirs."""
    PR_SET_CHILD_SUBREAPER = 36
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit('prctl failed')


def read(path):
    try:
        with open(path, 'rb') as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b''


def descendants():
    parents = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        stat = read(f'/proc/{pid}/stat').rpartition(b')')[2].split()
        if stat:
            parents[int(pid)] = int(stat[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def namespaces(pids, hold=None):
    """Returns the namespaces of some processes. An ExitStack can hold them: until it is closed they are not
    freed, so no new namespace on this machine gets the number of one."""
    seen = set()
    for pid in pids:
        for kind in NAMESPACES:
            try:
                descriptor = os.open(f'/proc/{pid}/ns/{kind}', os.O_RDONLY)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            seen.add(f'{kind}:[{os.fstat(descriptor).st_ino}]')
            if hold:
                hold.callback(os.close, descriptor)
            else:
                os.close(descriptor)
    return seen


def machine():
    """Returns what could be left on this machine."""
    mounts = sorted(line.split()[4] for line in read('/proc/self/mountinfo').decode().splitlines() if OUR_MOUNTS.fullmatch(line.split()[4]))
    names = {name for _, name in socket.if_nameindex() if name.startswith(('bridge', 'port', 'relay', 'via', 'eth'))}
    return mounts, names


class Killed(unittest.TestCase):
    def setUp(self):
        adopt_orphans()
        self.before = machine()
        self.held = contextlib.ExitStack()
        self.addCleanup(self.held.close)

    def made(self):
        """Returns the namespaces that descendants of this process have made. They are held until look() has
        searched them for processes."""
        return namespaces(descendants(), self.held) - namespaces([os.getpid()])

    def wait_for_all(self):
        """Waits until no descendant is left. What is still there after a while was forgotten."""
        end = time.monotonic() + LIMIT
        while True:
            try:
                pid = os.waitpid(-1, os.WNOHANG)[0]
            except ChildProcessError:
                return
            if not pid:
                self.assertLess(time.monotonic(), end, [read(f'/proc/{pid}/cmdline') for pid in descendants()])
                time.sleep(0.005)

    def look(self, made, folder):
        self.wait_for_all()
        everybody = [pid for pid in os.listdir('/proc') if pid.isdigit()]
        self.assertEqual(made & namespaces(everybody), set())
        self.held.close()
        self.assertEqual(machine(), self.before)
        self.assertEqual(os.listdir(folder), [])

    def kill_after(self, word, wait_s=0):
        """Kills a process that holds hosts, wait_s after it printed a word or after its start. Returns how
        many processes it had."""
        with tempfile.TemporaryDirectory() as folder:
            held = subprocess.Popen([PYTHON, os.path.abspath(__file__), '--hold'], stdout=subprocess.PIPE, env={**os.environ, 'TMPDIR': folder})
            text = b''
            while word and word not in text:
                self.assertTrue(select.select([held.stdout], [], [], LIMIT)[0], f'it did not come to {word}')
                more = os.read(held.stdout.fileno(), 1000)
                self.assertTrue(more, f'it ended before {word}')
                text += more
            time.sleep(wait_s)
            theirs = descendants()
            made = self.made()
            held.send_signal(signal.SIGKILL)
            self.assertEqual(held.wait(LIMIT), -signal.SIGKILL)
            held.stdout.close()
            self.look(made, folder)
            return len(theirs), len(made)

    def test_when_all_is_there(self):
        n_processes, n_namespaces = self.kill_after(b'all')
        self.assertGreaterEqual(n_processes, 15)
        self.assertGreaterEqual(n_namespaces, 1 + 3 * 3)

    def test_at_any_moment(self):
        print(f'SEED={SEED}')
        chance = random.Random(SEED)
        start = time.monotonic()
        self.kill_after(b'all')
        whole = time.monotonic() - start
        for _ in range(N_MOMENTS):
            self.kill_after(b'', chance.uniform(0, whole))

    def test_when_the_test_is_stopped_first(self):
        """A process that is stopped can be killed without running again."""
        with tempfile.TemporaryDirectory() as folder:
            held = subprocess.Popen([PYTHON, os.path.abspath(__file__), '--hold'], stdout=subprocess.PIPE, env={**os.environ, 'TMPDIR': folder})
            while held.stdout.readline() != b'all\n':  # a new command may not have asked yet to end with its parent
                self.assertIsNone(held.poll())
            made = self.made()
            for pid in descendants():
                with contextlib.suppress(ProcessLookupError):  # a short one has ended
                    os.kill(pid, signal.SIGSTOP)
            held.kill()
            held.wait(LIMIT)
            held.stdout.close()
            self.look(made, folder)

    def test_as_it_should(self):
        with tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = folder
            try:
                with Hosts(2) as net:
                    net.hosts[0].start(['sh', '-c', STUBBORN]).expect('stubborn')
                    made = self.made()
                # It was waited for already, so there is nothing left to wait for.
                with self.assertRaises(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
            finally:
                tempfile.tempdir = None
            self.look(made, folder)


if __name__ == '__main__':
    if sys.argv[1:] == ['--hold']:
        hold()
    else:
        hosts.main()
