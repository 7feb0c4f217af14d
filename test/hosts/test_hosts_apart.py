# SPDX-License-Identifier: Apache-2.0
"""Tests that the hosts of hosts.py are separate hosts for the library. What a process shares cannot be opened
from another host, by any name or number, and can be from its own. Otherwise a test of several hosts would
test only one."""
import errno
import os
import secrets
import socket
import subprocess
import unittest

import hosts
from hosts import PYTHON, Hosts

# Shares some memory in every way that has a name, prints the names, and waits for the end of its input. Its
# process number is one that no other host has used.
SHARE = """
import ctypes, json, os, socket, sys
name = sys.argv[1]
while True:
    child = os.fork()
    if child == 0 and os.getpid() > 200:
        break
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if child > 200:
        os._exit(0)
with open('/dev/shm/' + name, 'w') as shared:
    shared.write(name)
memory = os.memfd_create(name)
os.write(memory, name.encode())
libc = ctypes.CDLL(None, use_errno=True)
key = int(name[:7], 16) + 1
if libc.shmget(key, 4096, 0o1600) < 0:
    sys.exit('shmget: ' + os.strerror(ctypes.get_errno()))
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + name)
listener.listen()
print(json.dumps({'name': name, 'pid': os.getpid(), 'fd': memory, 'key': key}), flush=True)
sys.stdin.read()
"""

# Tries to open the memory in each way, and prints "opened" or the error.
OPEN = """
import ctypes, errno, json, os, socket, sys
shared = json.loads(sys.argv[1])
name, pid, fd = shared['name'], shared['pid'], shared['fd']
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), 'failed')
    return result
def is_it(opened):
    return os.pread(opened, 99, 0) == name.encode()
def by_proc():
    return is_it(os.open(f'/proc/{pid}/fd/{fd}', os.O_RDONLY))
def by_any_proc():
    for p in filter(str.isdigit, os.listdir('/proc')):
        if any(name in os.readlink(f'/proc/{p}/fd/{n}') for n in os.listdir(f'/proc/{p}/fd') if n == str(fd)):
            return True
    raise OSError(errno.ENOENT, 'nowhere')
def by_pidfd():
    return is_it(checked(libc.syscall(438, os.pidfd_open(pid), fd, 0)))  # pidfd_getfd
def by_signal():
    os.kill(pid, 0)
    return True
def by_shared_memory_name():
    return is_it(os.open('/dev/shm/' + name, os.O_RDONLY))
def by_key():
    return checked(libc.shmget(shared['key'], 0, 0)) >= 0
def by_abstract_socket():
    socket.socket(socket.AF_UNIX).connect(chr(0) + name)
    return True
for way in (by_proc, by_any_proc, by_pidfd, by_signal, by_shared_memory_name, by_key, by_abstract_socket):
    try:
        found = 'opened' if way() else 'another'
    except OSError as error:
        found = errno.errorcode[error.errno]
    print(way.__name__, found)
"""
WAYS = {'by_proc': 'ENOENT', 'by_any_proc': 'ENOENT', 'by_pidfd': 'ESRCH', 'by_signal': 'ESRCH', 'by_shared_memory_name': 'ENOENT', 'by_key': 'ENOENT',
        'by_abstract_socket': 'ECONNREFUSED'}
# Runs a shell command, if given, and waits until no process has a certain name, not even a zombie.
GONE = """
import os, subprocess, sys, time
subprocess.run(['sh', '-c', ''.join(sys.argv[2:])], check=True)
def called(pid):
    try:
        return open(f'/proc/{pid}/comm').read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
while sys.argv[1] in map(called, filter(str.isdigit, os.listdir('/proc'))):
    time.sleep(0.02)
"""
NAMESPACES = ('net', 'pid', 'uts', 'ipc', 'mnt')


def pairs(text):
    return dict(line.split() for line in text.splitlines())


class Apart(unittest.TestCase):
    def try_to_open(self, net):
        ours, other = net.hosts
        name = secrets.token_hex(8)
        sharing = ours.start([PYTHON, '-c', SHARE, name])
        shared = sharing.expect('^{.*}$')[0]
        self.assertEqual(pairs(ours.must([PYTHON, '-c', OPEN, shared])), dict.fromkeys(WAYS, 'opened'))
        self.assertEqual(pairs(other.must([PYTHON, '-c', OPEN, shared])), WAYS)
        self.assertFalse(os.path.exists('/dev/shm/' + name))
        self.assertEqual(sharing.end().returncode, 0)

    def test_memory(self):
        with Hosts(2) as net:
            self.try_to_open(net)

    def test_memory_of_containers(self):
        with Hosts(2, one_machine=True) as net:
            self.try_to_open(net)

    def test_identities(self):
        look = 'hostname; cat /proc/sys/kernel/random/boot_id; readlink ' + ' '.join(f'/proc/self/ns/{n}' for n in NAMESPACES)
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as boot_id:
            machine = [socket.gethostname(), boot_id.read().strip(), *(os.readlink(f'/proc/self/ns/{n}') for n in NAMESPACES)]
        for one_machine in (False, True):
            with Hosts(2, one_machine=one_machine) as net:
                seen = [machine, *(host.must(['sh', '-c', look]).split() for host in net.hosts)]
            self.assertEqual([s[0] for s in seen[1:]], ['host0', 'host1'])
            self.assertEqual(len({s[1] for s in seen}), 1 if one_machine else 3)
            for i in range(2, 2 + len(NAMESPACES)):
                self.assertEqual(len({s[i] for s in seen}), 3, seen)

    def test_folders(self):
        """Each host has its own folders for runtime and temporary files, and one folder is shared."""
        with Hosts(2) as net:
            a, b = net.hosts
            a.must(['sh', '-c', 'echo a >/run/a; echo a >"$(mktemp -d)/a"; echo a >/run/hosts/a'])
            self.assertEqual(a.must(['sh', '-c', 'cat /run/a $TMPDIR/*/a /run/hosts/a']).split(), ['a'] * 3)
            self.assertEqual(b.must(['sh', '-c', 'ls -d /run/a $TMPDIR/* 2>/dev/null; cat /run/hosts/a']).split(), ['a'])
        self.assertFalse(os.path.exists('/run/a'))

    def test_network(self):
        """Each host has only the networks between the hosts."""
        with Hosts(2, networks=2) as net:
            for host in net.hosts:
                seen = host.must(['ls', '/sys/class/net']).split()
                self.assertEqual([name for name in seen if name.startswith(('eth', 'en', 'w', 'bridge', 'port'))], ['eth0', 'eth1'])
                self.assertEqual(host.must(['ip', 'route', 'show', 'default']), '')
            code = 'import socket; print(sorted({a[4][0] for a in socket.getaddrinfo("host1", 1)}))'
            want = [net.hosts[1].address()] + ([net.hosts[1].address6()] if net.has_ipv6 else [])
            self.assertEqual(net.hosts[0].must([PYTHON, '-c', code]).strip(), str(want))


class Commands(unittest.TestCase):
    def test_ends(self):
        with Hosts(1) as net:
            host = net.hosts[0]
            self.assertEqual(host.run(['sh', '-c', 'exit 7']).returncode, 7)
            self.assertEqual(host.run(['sh', '-c', 'kill -9 $$']).returncode, 128 + 9)
            missing = host.run(['no-such-program'])
            self.assertEqual((missing.returncode, missing.stderr), (127, 'no-such-program: No such file or directory\n'))
            self.assertEqual(host.must(['sh', '-c', 'echo $A; pwd'], A=3).split(), ['3', os.getcwd()])
            with self.assertRaisesRegex(AssertionError, 'exit code 3\n--- it printed\nsaid\n'):
                host.must(['sh', '-c', 'echo said; exit 3'])

    def test_from_host_to_host(self):
        """Starts a command from one host on another, as a launcher does."""
        with Hosts(2) as net:
            words = [PYTHON, f'{hosts.HERE}/on_host.py', '--shell', 'host1', 'hostname;', 'A=4;', 'echo', '$A;', 'exit', '$((A + 1))']
            done = net.hosts[0].run(words)
            self.assertEqual((done.returncode, done.stdout), (5, 'host1\n4\n'))

    def test_time_limit(self):
        """A command that takes too long is killed on its host, with its children."""
        with Hosts(1) as net:
            host = net.hosts[0]
            command = host.start(['sh', '-c', 'echo begun; sleep 1000 & sleep 1000'])
            command.expect('^begun$')
            with self.assertRaisesRegex(AssertionError, 'did not end within 0.5 s\n--- it printed\nbegun\n'):
                command.end(limit=0.5)
            host.must([PYTHON, '-c', GONE, 'sleep'])

    def test_signals(self):
        with Hosts(1) as net:
            host = net.hosts[0]
            command = host.start(['sh', '-c', 'trap "echo got; exit 5" TERM; echo ready; while :; do sleep 0.05; done'])
            command.expect('^ready$')
            command.process.terminate()
            self.assertEqual((command.end().returncode, command.stdout), (5, 'ready\ngot\n'))

    def test_orphans(self):
        """Orphans do not become zombies."""
        with Hosts(1) as net:
            net.hosts[0].must([PYTHON, '-c', GONE, 'sleep', 'sleep 0 & sleep 0 &'])

    def test_a_host_that_is_killed(self):
        with Hosts(2) as net:
            gone, other = net.hosts
            command = gone.start(['sleep', '1000'])
            gone.kill()
            self.assertEqual(command.end().returncode, 255)
            self.assertEqual(gone.run(['true']).returncode, 255)
            for of_no_effect in (net.cut, net.cut_between):
                of_no_effect(gone)
            net.mend()
            other.must(['true'])


class Skipped(unittest.TestCase):
    """A test that needs hosts, where there can be none."""

    def run_main(self, before, prefix=(), **variables):
        code = f'import sys; sys.path.insert(0, {hosts.HERE!r}); import hosts; {before}; hosts.main()'
        env = {k: v for k, v in os.environ.items() if k != 'CHECKS_MUST_RUN'}
        done = subprocess.run([*prefix, PYTHON, '-c', code], capture_output=True, text=True, check=False, timeout=hosts.LIMIT, env={**env, **variables})
        return done.returncode, done.stdout + done.stderr

    def test_namespaces_are_not_allowed(self):
        none = ['unshare', '--user', '--map-root-user', 'sh', '-c', 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', 'sh']
        for variables in ({}, {'CHECKS_MUST_RUN': '1'}):
            code, text = self.run_main('pass', none, **variables)
            self.assertEqual((code, text), (77, f'namespaces may not be made here: unshare: {os.strerror(errno.ENOSPC)}\n'))

    def test_something_in_them_is_not_allowed(self):
        code, text = self.run_main('hosts.TRIAL = "mount -t no-such-file-system none /run"', CHECKS_MUST_RUN='1')
        self.assertEqual(code, 77)
        self.assertRegex(text, '^no host can be made here: mount: /run: ')

    def test_a_tool_is_missing(self):
        for variables, want in (({}, 77), ({'CHECKS_MUST_RUN': '1'}, 1)):
            self.assertEqual(self.run_main('hosts.TOOLS = ("no-such-tool",)', **variables), (want, 'there is no no-such-tool\n'))


if __name__ == '__main__':
    hosts.main()
