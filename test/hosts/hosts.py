# SPDX-License-Identifier: Apache-2.0
"""Several hosts on this machine, for tests of what happens between hosts (README.md).

    with Hosts(2) as net:
        server, client = net.hosts
        listening = server.start([PYTHON, '-c', SERVER])
        listening.expect('ready')
        net.cut(server)

The hosts are namespaces that this process makes, and they end with it in any case. The kernel kills the
switch when the thread that started it ends, so start it on the main thread. For the other processes see
agent.py."""
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = sys.executable
LIMIT = int(os.environ.get('TEST_LIMIT', 60))
PATH = os.environ.get('PATH', '/usr/bin:/bin') + ':/usr/sbin:/sbin'  # has ip, which is not in every user's PATH
TOOLS = ('setpriv', 'unshare', 'nsenter', 'mount', 'hostname', 'ip')

ENDS_WITH_US = ['setpriv', '--pdeathsig', 'KILL']
UNSHARE = ['unshare', '--net', '--pid', '--uts', '--ipc', '--mount', '--fork', '--kill-child', '--mount-proc']
UNSHARE_ALL = [*UNSHARE, '--user', '--map-root-user']
CLONE_ALL = 0x10000000 | 0x40000000 | 0x20000000 | 0x04000000 | 0x08000000 | 0x00020000  # user, net, pid, uts, ipc, mount

# The parts of a switch and a host, tried once.
TRIAL = """
mount -t tmpfs tmpfs /run
mount -t sysfs -o ro sysfs /sys
mount --bind /etc/hosts /etc/hosts
ip link add name bridge0 type bridge
ip link add name port0 type veth peer name eth0
ip link set port0 master bridge0
"""


def kernel_refuses():
    """Returns why this process may not make namespaces, or None if it may."""
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        os._exit(ctypes.get_errno() if libc.unshare(CLONE_ALL) else 0)
    error = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f'namespaces may not be made here: unshare: {os.strerror(error)}' if error else None


def why_not():
    """Returns (why there can be no hosts here, whether a tool is missing), or (None, False) if there can be."""
    refused = kernel_refuses()
    if refused:
        return refused, False
    for tool in TOOLS:
        if not shutil.which(tool, path=PATH):
            return f'there is no {tool}', True
    tried = subprocess.run([*UNSHARE_ALL, *UNSHARE, 'sh', '-ec', TRIAL], capture_output=True, text=True, check=False, timeout=LIMIT,
                           env={**os.environ, 'PATH': PATH})
    return (f'no host can be made here: {tried.stderr.strip()}' if tried.returncode else None), False


def main():
    """unittest's main for a test that needs hosts. It skips the test (exit code 77) if there can be none. A
    missing tool is a failure if CHECKS_MUST_RUN is set, as by .ci/run."""
    why, lacks_tool = why_not()
    if why:
        print(why)
        sys.exit(1 if lacks_tool and os.environ.get('CHECKS_MUST_RUN') else 77)
    unittest.main(verbosity=1)


def environment(**more):
    """Returns this process's environment without an outer launcher's variables, and with the host's own
    folder for temporary files."""
    launchers = re.compile(r'(ZERO|OMPI|PMIX?|SLURM|TORCHELASTIC|MASTER)_.*|RANK|WORLD_SIZE|LOCAL_RANK')
    kept = {k: v for k, v in os.environ.items() if not launchers.fullmatch(k)}
    return {**kept, 'PATH': PATH, 'TMPDIR': '/run/tmp', **{k: str(v) for k, v in more.items()}}


def memory_file():
    """Makes a file in no folder. (tempfile first tests a folder with a named file, which would be left if
    this process were killed at that moment.)"""
    return os.fdopen(os.memfd_create('output'), 'w+b')


class Command:
    """A command that runs on a host. Its output is kept in files, so it never waits for a reader."""

    def __init__(self, socket, command, env):
        self.name = f'{os.path.basename(socket)}: {" ".join(map(str, command))[:200]}'
        self.files = [memory_file(), memory_file()]
        self.process = subprocess.Popen([*ENDS_WITH_US, PYTHON, '-IS', f'{HERE}/on_host.py', socket, *map(str, command)],
                                        stdin=subprocess.PIPE, stdout=self.files[0], stderr=self.files[1], env=env)

    def text(self, stream):
        size = os.fstat(self.files[stream].fileno()).st_size
        return os.pread(self.files[stream].fileno(), size, 0).decode(errors='replace')

    @property
    def stdout(self):
        return self.text(0)

    @property
    def stderr(self):
        return self.text(1)

    @property
    def returncode(self):
        """None while it runs; 128 + N after signal N."""
        return self.process.poll()

    def fail(self, what):
        raise AssertionError(f'{self.name}: {what}\n--- it printed\n{self.stdout}--- and as errors\n{self.stderr}')

    def expect(self, pattern, limit=LIMIT):
        """Waits until its output matches a regular expression, and returns the match."""
        end = time.monotonic() + limit
        while True:
            over = self.process.poll() is not None or time.monotonic() > end
            found = re.search(pattern, self.stdout, re.MULTILINE)
            if found:
                return found
            if over:
                self.fail(f'no {pattern!r} within {limit} s' if self.process.poll() is None else f'ended, code {self.returncode}, without {pattern!r}')
            time.sleep(0.01)

    def say(self, line):
        """Writes a line to its standard input."""
        self.process.stdin.write(line.encode() + b'\n')
        self.process.stdin.flush()

    def end(self, limit=LIMIT):
        """Ends its input, waits for it, and returns itself. If it takes longer than limit, it is killed and
        the test fails."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self.fail(f'did not end within {limit} s')
        return self

    def kill(self):
        """Sends SIGKILL to it and its process group."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def forget(self):
        self.kill()
        for file in self.files:
            file.close()


class Host:
    """A place where commands run: a host, or the switch between them."""

    def __init__(self, net, name, number=None):
        self.net, self.name, self.number = net, name, number
        self.agent = None

    def address(self, network=0):
        return f'10.77.{network}.{self.number + 1}'

    def address6(self, network=0):
        """Returns its IPv6 address, which exists if the kernel has IPv6 (Hosts.has_ipv6)."""
        return f'fd77:{network + 1}::{self.number + 1}'

    def start(self, command, **variables):
        """Starts a command in the background, with more environment variables."""
        started = Command(f'{self.net.run_folder}/{self.name}', command, environment(**variables))
        self.net.commands.append(started)
        return started

    def run(self, command, limit=LIMIT, **variables):
        """Runs a command to its end, whatever its exit code. Returns returncode, stdout and stderr."""
        return self.start(command, **variables).end(limit)

    def must(self, command, limit=LIMIT, **variables):
        """Returns the output of a command that has to succeed."""
        done = self.run(command, limit, **variables)
        if done.returncode:
            done.fail(f'exit code {done.returncode}')
        return done.stdout

    def kill(self):
        """Ends all its processes, and soon its interfaces. Peers see its connections end. To make a host fall
        silent, cut it first."""
        self.agent.kill()

    def is_alive(self):
        return self.agent.returncode is None


class Relay:
    """relay.py, between a host and a bridge."""

    def __init__(self, process):
        self.process, self.n_told = process, 0
        self.counts = {}  # counted at its end: "leaving" the host and "coming" to it

    def set(self, delay_s=0, loss=0):
        """From now on frames are passed on delay_s later, and lost with the probability loss. If loss is a
        pair, the first is for frames that leave the host, the second for those that come to it. (1, 0) is a
        cut in one direction."""
        self.n_told += 1
        self.process.say(' '.join(map(str, [delay_s, *(loss if isinstance(loss, tuple) else (loss, loss))])))
        self.process.expect(f'^told {self.n_told}$')

    def end(self):
        self.process.end()
        self.counts.update(json.loads(self.process.expect('^{.*}$')[0]))


class Hosts:
    """n hosts, "host0" and so on, on each of the networks, with interfaces "eth0" and so on. With one_machine
    they are containers of this machine and have its boot id. Otherwise each has its own."""

    def __init__(self, n, networks=1, one_machine=False):
        self.networks, self.one_machine = networks, one_machine
        self.commands, self.relays, self.process = [], {}, None
        self.switch = Host(self, 'switch')
        self.hosts = [Host(self, f'host{i}', i) for i in range(n)]
        self.has_ipv6 = os.path.exists('/proc/net/if_inet6')

    def __enter__(self):
        try:
            self.start_switch()
            for host in self.hosts:
                self.start_host(host)
            for host in self.hosts:
                host.agent.expect('^ready$')
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def start_switch(self):
        """Starts the switch, which ends when this process does: by a signal, and because its standard input
        ends. The latter covers a process that ends before the switch has asked for the signal."""
        command = [*ENDS_WITH_US, *UNSHARE_ALL, 'sh', f'{HERE}/switch_up.sh', self.networks,
                   PYTHON, '-IS', f'{HERE}/agent.py', '/run/switch']
        self.output = memory_file()
        self.process = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=self.output, stderr=self.output, start_new_session=True,
                                        env={**os.environ, 'PATH': PATH})
        self.run_folder = f'/proc/{self.process.pid}/root/run'  # visible only in its mount namespace
        end = time.monotonic() + LIMIT
        while (text := os.pread(self.output.fileno(), 1 << 16, 0)) != b'ready\n':
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f'the switch did not start: {text.decode()}')
            time.sleep(0.005)
        with open(f'{self.run_folder}/etc_hosts', 'w', encoding='ascii') as names:
            names.write('127.0.0.1 localhost\n::1 localhost\n')
            for host in self.hosts:
                names.write(f'{host.address()} {host.name}\n' + (f'{host.address6()} {host.name}\n' if self.has_ipv6 else ''))

    def start_host(self, host):
        # The network interfaces are made from inside, with their other ends in the switch's namespace, which
        # is descriptor 9 meanwhile.
        up = ['sh', f'{HERE}/host_up.sh', host.number, self.networks, 'this' if self.one_machine else 'own',
              PYTHON, '-IS', f'{HERE}/agent.py', f'/run/hosts/{host.name}']
        host.agent = self.switch.start(['sh', '-c', 'exec 9</proc/self/ns/net; exec "$@"', 'sh', *UNSHARE, *up])

    def close(self):
        for command in reversed(self.commands):
            command.forget()
        if self.process:
            # When its input ends, process 1 of the switch ends. The kernel allows that when all other
            # processes there are gone.
            self.process.stdin.close()
            try:
                self.process.wait(LIMIT)
            finally:
                self.process.kill()
                self.process.wait()
                self.output.close()

    def port(self, host, network=0):
        """Returns the interface that connects the host to its bridge."""
        return self.relays.get((host, network), f'port{host.number}_{network}')

    def attach(self, host, network):
        if host.is_alive():
            self.switch.must(['sh', f'{HERE}/attach.sh', self.port(host, network), f'bridge{network}'])

    def set_port(self, host, network, *words):
        if host.is_alive():
            self.switch.must(['ip', 'link', 'set', self.port(host, network), *words])

    def cut(self, *hosts, network=0):
        """From now on traffic from and to these hosts is dropped: their ports are removed from the bridge.
        Their interfaces stay up, and no process is notified."""
        for host in hosts:
            self.set_port(host, network, 'nomaster')

    def cut_between(self, *hosts, network=0):
        """The bridge drops what these hosts send to each other. Traffic with other hosts passes. There is one
        such set per network."""
        for host in hosts:
            self.set_port(host, network, 'type', 'bridge_slave', 'isolated', 'on')

    def mend(self, network=0):
        """Undoes every cut of a network."""
        for host in self.hosts:
            self.attach(host, network)
            self.set_port(host, network, 'type', 'bridge_slave', 'isolated', 'off')

    @contextlib.contextmanager
    def relay(self, host, delay_s=0, loss=0, seed=0, network=0):
        """While it is open, traffic from and to host passes through a Relay. Frames on the way when it starts
        or ends may be lost."""
        inner, outer, port = self.port(host, network), f'relay{host.number}_{network}', f'via{host.number}_{network}'
        self.switch.must(['sh', '-ec', f"""
            ip link add name {outer} type veth peer name {port}
            ip link set {outer} addrgenmode none up
            ip link set {inner} nomaster"""])
        relay = Relay(self.switch.start([PYTHON, '-IS', f'{HERE}/relay.py', inner, outer, seed]))
        relay.set(delay_s, loss)
        self.relays[host, network] = port
        self.attach(host, network)
        yield relay
        relay.end()
        self.switch.must(['ip', 'link', 'delete', outer])
        del self.relays[host, network]
        self.attach(host, network)
