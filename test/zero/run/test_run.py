# SPDX-License-Identifier: Apache-2.0
"""test_run.py ZERO_RUN PATIENT_ZERO_RUN: runs the launcher as a user does. Ranks are one-liners of sh or Python. No test measures time,
but a run that takes more than a minute fails."""
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest

ZERO_RUN = os.path.abspath(sys.argv.pop(1))
PATIENT = os.path.abspath(sys.argv.pop(1))  # gives ranks an hour where zero-run gives them two seconds
PYTHON = sys.executable
BUFFERED = ['env', '-u', 'PYTHONUNBUFFERED', PYTHON, '-c']  # buffers its output, as stdio does
LIMIT = int(os.environ.get("TEST_LIMIT", 60))

# A rank that writes its process id and waits for signals. It does not use print, because a signal handler may run while print flushes,
# and print is an error there.
WAITING = """
import os, signal, sys, time
def got(n, frame):
    os.write(1, f'got {signal.Signals(n).name}\\n'.encode())
    if n in ENDING: sys.exit(0)
for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2): signal.signal(n, got)
os.write(1, f'pid {os.getpid()}\\n'.encode())
while True: time.sleep(0.05)
"""


def run(*args, env=None, stdin=None, **more):
    return subprocess.run([ZERO_RUN, *map(str, args)], capture_output=True, text=True, timeout=LIMIT, env=env,
                          input=stdin, **more)


def ranks(text):
    """Returns the lines of each rank, in order."""
    out = {}
    for line in text.splitlines():
        rank, rest = re.fullmatch(r'\[(\d+)\] (.*)', line).groups()
        out.setdefault(int(rank), []).append(rest)
    return out


def stat_of(pid):
    """Returns the fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        with open(f'/proc/{pid}/stat') as f:
            return f.read().rsplit(')', 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it ended between open and read
        return ['X', '0']


def alive(pid):
    """Whether the process runs. Zombies count as ended, because their parent may never reap them."""
    return stat_of(pid)[0] not in 'ZX'


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError('waited in vain')
        time.sleep(0.01)


def when_all_wait(started):
    """Waits until there is output to read, and zero-run and its ranks sleep in several samples in a row, with equal memory use. Returns
    zero-run's memory in KiB."""
    looks = []

    def asleep():
        ranks_too = [p for p in os.listdir('/proc') if p.isdigit() and stat_of(p)[1] == str(started.pid)]
        with open(f'/proc/{started.pid}/status') as f:
            kib = int(re.search(r'VmRSS:\s+(\d+)', f.read()).group(1))
        unread = struct.unpack('i', fcntl.ioctl(started.stdout, termios.FIONREAD, b'    '))[0]
        idle = unread and len(ranks_too) > 1 and all(stat_of(p)[0] == 'S' for p in [started.pid, *ranks_too])
        looks.append((kib, unread) if idle else None)
        time.sleep(0.04)
        return looks[-1] and looks[-5:] == looks[-1:] * 5

    wait_for(asleep)
    return looks[-1][0]


class Started:
    """A zero-run in the background, with its output in a file."""

    def __init__(self, *args):
        self.out = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen([ZERO_RUN, *map(str, args)], stdout=self.out, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL)

    def text(self):
        at = os.pread(self.out.fileno(), 1 << 20, 0)
        return at.decode()

    def pids(self, n):
        wait_for(lambda: len(re.findall(r'pid (\d+)\n', self.text())) == n)
        return [int(p) for p in re.findall(r'pid (\d+)\n', self.text())]

    def end(self):
        return self.process.wait(LIMIT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.out.close()


def waiting(ending=''):
    names = ', '.join(f'signal.{n}' for n in ending.split())
    return [PYTHON, '-c', f'import signal\nENDING = [{names}]' + WAITING]


class Environment(unittest.TestCase):
    def see(self, n, variables, env=None, *options):
        code = f'import os; [print(v, os.environ.get(v)) for v in {variables!r}]'
        r = run(*options, '-n', n, PYTHON, '-c', code, env=env)
        self.assertEqual((r.returncode, r.stderr), (0, ''))
        return {k: dict(line.split(' ', 1) for line in v) for k, v in ranks(r.stdout).items()}

    def test_rank_variables(self):
        names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'ZERO_JOB',
                 'ZERO_JOB_KEY', 'ZERO_ATTEMPT', 'ZERO_RANK', 'ZERO_WORLD_SIZE', 'ZERO_LOCAL_RANK']
        seen = self.see(3, names, dict(os.environ, ZERO_ATTEMPT='7'))
        self.assertEqual(sorted(seen), [0, 1, 2])
        for r in range(3):
            self.assertEqual((seen[r]['RANK'], seen[r]['LOCAL_RANK'], seen[r]['WORLD_SIZE']), (str(r), str(r), '3'))
            self.assertEqual((seen[r]['ZERO_RANK'], seen[r]['ZERO_LOCAL_RANK'], seen[r]['ZERO_WORLD_SIZE']), (str(r), str(r), '3'))
            self.assertEqual((seen[r]['LOCAL_WORLD_SIZE'], seen[r]['GROUP_RANK'], seen[r]['ZERO_ATTEMPT']), ('3', '0', '0'))
            self.assertEqual(seen[r]['MASTER_ADDR'], '127.0.0.1')
            self.assertTrue(0 < int(seen[r]['MASTER_PORT']) < 65536)
        for name in ('MASTER_PORT', 'ZERO_JOB', 'ZERO_JOB_KEY'):
            self.assertEqual(len({seen[r][name] for r in range(3)}), 1)
        again = self.see(1, names)
        self.assertNotEqual(again[0]['ZERO_JOB'], seen[0]['ZERO_JOB'])
        self.assertNotEqual(again[0]['ZERO_JOB_KEY'], seen[0]['ZERO_JOB_KEY'])

    def test_key(self):
        # The key has 128 random bits, and is only in the environment of ranks, where other users cannot see it. A key from outside belongs to
        # another job.
        outside = dict(os.environ, ZERO_JOB_KEY='f' * 32, ZERO_JOB_KEY_FILE='/nowhere')
        seen = self.see(2, ['ZERO_JOB_KEY', 'ZERO_JOB_KEY_FILE'], outside)[1]
        self.assertRegex(seen['ZERO_JOB_KEY'], '^[0-9a-f]{32}$')
        self.assertNotEqual(seen['ZERO_JOB_KEY'], 'f' * 32)
        self.assertEqual(seen['ZERO_JOB_KEY_FILE'], 'None')
        lines = """
import os
own, parent = (open(f'/proc/{p}/cmdline', 'rb').read() for p in (os.getpid(), os.getppid()))
key = os.environ['ZERO_JOB_KEY'].encode()
print(key in own or key in parent, oct(os.stat('/proc/self/environ').st_mode)[-3:])
"""
        r = run('-n', 1, PYTHON, '-c', lines)
        self.assertEqual((r.returncode, r.stdout), (0, '[0] False 400\n'))

    def test_given_port(self):
        self.assertEqual(self.see(1, ['MASTER_PORT'], None, '--port', 23456)[0]['MASTER_PORT'], '23456')

    def test_other_launchers_are_forgotten(self):
        others = ['TORCHELASTIC_RUN_ID', 'TORCHELASTIC_USE_AGENT_STORE', 'GROUP_WORLD_SIZE', 'ROLE_RANK',
                  'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'PMI_RANK', 'PMI_SIZE', 'PMI_FD', 'PMI_PORT',
                  'MPI_LOCALRANKID', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'ZERO_RENDEZVOUS']
        kept = ['ZERO_STAGE', 'ZERO_RANKS', 'RANKING', 'SOMETHING', 'PMI_RANK_X']
        env = dict(os.environ, **{v: 'x' for v in others + kept}, RANK='77', WORLD_SIZE='99', MASTER_ADDR='far.away', ZERO_RANK='78',
                   ZERO_WORLD_SIZE='98', ZERO_LOCAL_RANK='76')
        seen = self.see(2, others + kept + ['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'ZERO_RANK', 'ZERO_WORLD_SIZE', 'ZERO_LOCAL_RANK'], env)[1]
        self.assertEqual({v: seen[v] for v in others}, {v: 'None' for v in others})
        self.assertEqual({v: seen[v] for v in kept}, {v: 'x' for v in kept})
        self.assertEqual((seen['RANK'], seen['WORLD_SIZE'], seen['MASTER_ADDR']), ('1', '2', '127.0.0.1'))
        self.assertEqual((seen['ZERO_RANK'], seen['ZERO_WORLD_SIZE'], seen['ZERO_LOCAL_RANK']), ('1', '2', '1'))

    def test_threads(self):
        env = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
        cores = len(os.sched_getaffinity(0))
        for n in (1, 2, 5):
            want = str(max(1, cores // n))
            self.assertEqual(self.see(n, ['OMP_NUM_THREADS'], env)[0]['OMP_NUM_THREADS'], want)
        env['OMP_NUM_THREADS'] = '7'
        self.assertEqual(self.see(2, ['OMP_NUM_THREADS'], env)[1]['OMP_NUM_THREADS'], '7')

    def test_gpu_variables(self):
        names = ['NCCL_LAUNCH_ORDER_IMPLICIT', 'CUDA_DEVICE_MAX_CONNECTIONS']
        env = {k: v for k, v in os.environ.items() if k not in names}
        self.assertEqual([self.see(2, names, env)[1][v] for v in names], ['1', '32'])
        env.update(NCCL_LAUNCH_ORDER_IMPLICIT='0', CUDA_DEVICE_MAX_CONNECTIONS='1')
        self.assertEqual([self.see(2, names, env)[1][v] for v in names], ['0', '1'])

    def test_rank_0_can_listen_on_the_port(self):
        code = """
import os, socket, time
at = ('127.0.0.1', int(os.environ['MASTER_PORT']))
if os.environ['RANK'] == '0':
    s = socket.create_server(at)   # with SO_REUSEADDR, as libuv does
    print(s.accept()[0].recv(10).decode())
else:
    while True:
        try: s = socket.create_connection(at); break
        except ConnectionRefusedError: time.sleep(0.01)
    s.send(b'hello')
"""
        r = run('-n', 2, PYTHON, '-c', code)
        self.assertEqual((r.returncode, r.stdout, r.stderr), (0, '[0] hello\n', ''))


class Output(unittest.TestCase):
    def test_prefix_and_streams(self):
        r = run('-n', 2, 'sh', '-c', 'echo out $RANK; echo err $RANK >&2; printf "no newline"')
        self.assertEqual(r.returncode, 0)
        self.assertEqual(ranks(r.stdout), {0: ['out 0', 'no newline'], 1: ['out 1', 'no newline']})
        self.assertEqual(ranks(r.stderr), {0: ['err 0'], 1: ['err 1']})

    def test_closed_standard_descriptors(self):
        # Ranks get /dev/null for descriptors that zero-run does not have, and none of zero-run's files.
        for closed, out in (('<&-', '[0] 1\n[1] 1\n'), ('>&-', ''), ('2>&-', '[0] 1\n[1] 1\n'), ('<&- >&- 2>&-', '')):
            for raw in ([], ['--raw']):
                code = 'test -e /dev/fd/0 && test -e /dev/fd/1 && test -e /dev/fd/2 && echo 1'
                r = subprocess.run(['sh', '-c', f'exec "$@" {closed}', 'sh', ZERO_RUN, *raw, '-n', '2', 'sh', '-c', code],
                                   capture_output=True, text=True, timeout=LIMIT)
                expected = out.replace('[0] ', '').replace('[1] ', '') if raw else out
                # Either rank may write first.
                self.assertEqual((r.returncode, sorted(r.stdout.splitlines())), (0, sorted(expected.splitlines())), closed)
                dropped = 'zero-run: standard output was closed: what ranks write there is dropped\n'
                self.assertEqual(r.stderr, dropped if closed == '>&-' else '', closed)

    def test_limit_on_files(self):
        with tempfile.TemporaryFile() as f:
            r = subprocess.run(['sh', '-c', 'ulimit -f 1; exec "$@"', 'sh', ZERO_RUN, '-n', '1', 'sh', '-c', 'seq 1 2000; exec sleep 1000'],
                               stdout=f, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
            self.assertRegex(r.stderr, r'zero-run: standard output: File too large: .* 512 bytes \(RLIMIT_FSIZE, ulimit -f\); ending 1 ')
            self.assertEqual((r.returncode, os.fstat(f.fileno()).st_size), (1, 512))

    def test_limit_on_descriptors(self):
        # Ranks may open as many descriptors as the hard limit allows, and at most 65536.
        r = subprocess.run(['sh', '-c', 'ulimit -Sn 200; ulimit -Hn 2000; exec "$@"', 'sh', ZERO_RUN, '-n', '1', 'sh', '-c', 'ulimit -n'],
                           capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual((r.returncode, r.stdout, r.stderr), (0, '[0] 2000\n', ''))

    def test_empty_lines_and_bytes(self):
        r = subprocess.run([ZERO_RUN, '-n', '1', 'sh', '-c', r'printf "\n\na\000b\377\r\n"'], capture_output=True,
                           timeout=LIMIT)
        self.assertEqual(r.stdout, b'[0] \n[0] \n[0] a\0b\xff\r\n')

    def test_raw(self):
        r = run('--raw', '-n', 2, 'sh', '-c', 'echo line; echo err >&2; printf end')
        self.assertEqual(sorted(r.stdout.replace('end', 'end\n').split()), ['end', 'end', 'line', 'line'])
        self.assertEqual(r.stderr, 'err\nerr\n')
        self.assertNotIn('[', r.stdout)

    def test_raw_inherits_the_very_descriptor(self):
        with tempfile.TemporaryFile() as f:
            mine = os.fstat(f.fileno()).st_ino
            subprocess.run([ZERO_RUN, '--raw', '-n', '1', 'stat', '-L', '-c', '%i', '/proc/self/fd/1'], stdout=f,
                           timeout=LIMIT)
            self.assertEqual(int(os.pread(f.fileno(), 100, 0)), mine)

    def test_stdout_can_be_opened_by_name(self):
        # /dev/stdout is a link to this, and any program that root runs can have removed it.
        r = run('-n', 1, 'sh', '-c', 'echo a > /proc/self/fd/1; echo b > /proc/self/fd/2')
        self.assertEqual((r.stdout, r.stderr), ('[0] a\n', '[0] b\n'))

    def test_no_interleaving(self):
        # Both streams of all ranks go to one pipe, in writes that cut lines anywhere.
        code = """
import os, random
rank = os.environ['RANK']; random.seed(rank)
for fd, name in ((1, 'o'), (2, 'e')):
    text = ''.join('%s%s %d %s\\n' % (name, rank, i, 'x' * random.randrange(300)) for i in range(4000)).encode()
    at = 0
    while at < len(text): at += os.write(fd, text[at:at + random.randrange(1, 3000)])
"""
        r = subprocess.run([ZERO_RUN, '-n', '4', PYTHON, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, timeout=LIMIT)
        lines = r.stdout.splitlines()
        self.assertEqual((r.returncode, len(lines)), (0, 4 * 2 * 4000))
        nexts = {}
        for line in lines:
            rank, name, number = re.fullmatch(r'\[(\d)\] ([oe]\d) (\d+) x*', line).groups()
            self.assertEqual(name[1], rank)
            self.assertEqual(int(number), nexts.get(name, 0))  # lines are in order
            nexts[name] = int(number) + 1

    def test_large_output_to_a_slow_reader(self):
        n = 24 << 20
        code = f"import os, sys; sys.stdout.write(('%s' % os.environ['RANK'] * 99 + chr(10)) * ({n} // 100))"
        with subprocess.Popen([ZERO_RUN, '-n', '2', PYTHON, '-c', code], stdout=subprocess.PIPE) as p:
            # All ranks and zero-run must wait for the reader. The memory of zero-run stays small although nobody reads.
            now = when_all_wait(p)
            self.assertLess(now, 32 << 10)  # KiB, with the overhead of sanitizers; ranks write 48 MiB
            self.assertIsNone(p.poll())
            text = p.stdout.read().decode()
        self.assertEqual(p.returncode, 0)
        lines = ranks(text)
        for r in (0, 1):
            self.assertEqual(lines[r], [str(r) * 99] * (n // 100))

    def test_long_line(self):
        # A line below the limit arrives whole. A longer one arrives in pieces, without losses.
        code = "import sys; sys.stdout.write('a' * 1000000 + chr(10) + 'b' * 3000000)"
        r = run('-n', 1, PYTHON, '-c', code)
        lines = ranks(r.stdout)[0]
        self.assertEqual(lines[0], 'a' * 1000000)
        self.assertEqual(''.join(lines[1:]), 'b' * 3000000)

    def test_reader_that_leaves(self):
        code = "import sys\nwhile True: sys.stdout.write('x' * 1000 + chr(10))"
        with subprocess.Popen([ZERO_RUN, '-n', '2', PYTHON, '-c', code], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as p:
            p.stdout.readline()
            p.stdout.close()
            self.assertEqual(p.wait(LIMIT), 128 + signal.SIGPIPE)
            self.assertIn('zero-run: standard output: Broken pipe; ending 2 other ranks\n', p.stderr.read())

    def test_stdin_goes_to_rank_0(self):
        r = run('-n', 3, 'cat', stdin='a\nb\n')
        self.assertEqual((r.returncode, r.stdout), (0, '[0] a\n[0] b\n'))
        r = run('-n', 2, 'sh', '-c', 'readlink /proc/self/fd/0', stdin='')
        self.assertEqual(ranks(r.stdout)[1], ['/dev/null'])

    def test_lines_come_as_they_are_written(self):
        # The rank does not flush, but its line arrives while it still runs.
        with Started('-n', 1, *BUFFERED, 'import time; print("pid 1"); time.sleep(1000)') as p:
            p.pids(1)
            self.assertIsNone(p.process.poll())

    def test_lines_before_a_crash_are_kept(self):
        code = "import os\nfor i in range(500): print('line', i)\nos.kill(os.getpid(), 11)"
        r = run('-n', 2, *BUFFERED, code)
        self.assertEqual(r.returncode, 128 + 11)
        self.assertIn([f'line {i}' for i in range(500)], ranks(r.stdout).values())

    def test_terminal_changes_nothing(self):
        # Any byte and long runs without a newline pass unchanged, and no output comes back as input.
        text = bytes(range(256)) * 400 + b'\n'
        code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 400 + b'\\n')"
        r = subprocess.run([ZERO_RUN, '-n', '1', PYTHON, '-c', code], capture_output=True, timeout=LIMIT)
        self.assertEqual(r.stdout, b''.join(b'[0] ' + line + b'\n' for line in text[:-1].split(b'\n')))
        code = "import os, select; print(os.isatty(1), os.isatty(2), select.select([1], [], [], 0)[0])"
        self.assertEqual(run('-n', 1, PYTHON, '-c', code).stdout, '[0] True False []\n')

    def test_terminal_is_dumb_where_ours_is_none(self):
        env = dict(os.environ, TERM='xterm')
        see = ['sh', '-c', 'echo $TERM; env | grep -c ^TERM=; stty size < /dev/fd/1']
        self.assertEqual(ranks(run('-n', 1, *see, env=env).stdout)[0], ['dumb', '1', '0 0'])
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 30, 90, 0, 0))
        with subprocess.Popen([ZERO_RUN, '-n', '1', *see], stdout=theirs, stderr=theirs, env=env) as p:
            os.close(theirs)
            text = b''
            while text.count(b'\n') < 3:
                text += os.read(ours, 1000)
            self.assertEqual(ranks(text.decode())[0], ['xterm', '1', '30 86'])
        os.close(ours)

    def test_no_more_terminals(self):
        # An unusable /dev/ptmx has the effect of the system's limit on pseudo-terminals.
        r = subprocess.run(['sh', '-c', 'exec "$@"', 'sh', 'unshare', '-m', 'sh', '-c',
                            'mount --bind /dev/null /dev/ptmx && exec "$@"', 'sh', ZERO_RUN, '-n', '3', 'sh', '-c',
                            'echo out; test -t 1 || echo pipe'], capture_output=True, text=True, timeout=LIMIT)
        if not r.stdout:
            self.skipTest('needs a mount namespace: ' + r.stderr)
        self.assertEqual(ranks(r.stdout), {i: ['out', 'pipe'] for i in range(3)})
        self.assertEqual(r.returncode, 0)
        self.assertEqual(len(r.stderr.splitlines()), 1)
        self.assertIn('zero-run: no pseudo-terminal for rank 0: ', r.stderr)

    def test_background_child_that_holds_the_pipe(self):
        with Started('-n', 1, 'sh', '-c', 'sleep 1000 & echo pid $!') as p:
            child = p.pids(1)[0]
            self.assertEqual(p.end(), 0)
            wait_for(lambda: not alive(child))


class Ending(unittest.TestCase):
    def test_success(self):
        r = run('-n', 4, 'true')
        self.assertEqual((r.returncode, r.stdout, r.stderr), (0, '', ''))

    def test_no_timer_has_to_fire(self):
        # A child closes the rank's output after zero-run has reaped the rank, and runs until the test has read everything.
        code = '(while kill -0 $$ 2> /dev/null; do :; done; exec > /dev/null 2>&1; read line) < "$1" &'
        with tempfile.TemporaryDirectory() as d:
            hold = os.path.join(d, 'hold')
            os.mkfifo(hold)
            held = os.open(hold, os.O_RDWR)
            for _ in range(3):
                r = subprocess.run([PATIENT, '-n', '2', 'sh', '-c', code, 'sh', hold], capture_output=True, timeout=LIMIT)
                self.assertEqual((r.returncode, r.stdout, r.stderr), (0, b'', b''))
            os.close(held)

    def test_exit_code(self):
        for raw in ([], ['--raw']):
            r = run(*raw, '-n', 4, 'sh', '-c', 'test $RANK != 1 || exit 3; exec sleep 1000')
            self.assertEqual((r.returncode, r.stdout), (3, ''))
            self.assertEqual(r.stderr, 'zero-run: rank 1 exited with code 3; ending 3 other ranks\n')

    def test_killed(self):
        r = run('-n', 2, 'sh', '-c', 'test $RANK = 0 || kill -9 $$; exec sleep 1000')
        self.assertEqual(r.returncode, 128 + 9)
        self.assertEqual(r.stderr, 'zero-run: rank 1 was killed by signal 9 (Killed); ending 1 other rank\n')

    def test_segmentation_fault_alone(self):
        r = run('-n', 1, 'sh', '-c', 'kill -SEGV $$')
        self.assertEqual(r.returncode, 128 + 11)
        killed, advice = r.stderr.splitlines()
        self.assertEqual(killed, 'zero-run: rank 0 was killed by signal 11 (Segmentation fault)')
        self.assertRegex(advice, '^zero-run: if it trains at stage 2 or 3, try ZERO_CHECK=1: ')

    def test_advice_after_a_crash(self):
        def told(code, **env):
            return 'try ZERO_CHECK=1' in run('-n', 1, 'sh', '-c', code, env={**os.environ, **env}).stderr
        self.assertTrue(told('kill -BUS $$'))
        self.assertTrue(told('exit 139'))  # a shell's exit code after its child crashed
        self.assertTrue(told('kill -SEGV $$', ZERO_STAGE='3', ZERO_CHECK='0'))
        self.assertFalse(told('kill -SEGV $$', ZERO_CHECK='1'))
        self.assertFalse(told('kill -SEGV $$', ZERO_STAGE='1'))
        self.assertFalse(told('kill -FPE $$'))
        self.assertFalse(told('exit 1'))

    def fail_rank_0(self, code, *options):
        """Ranks 1 and 2 run code. Once each has written its "pid", kills rank 0. Returns the output."""
        victim = 'test $RANK != 0 || { echo victim $$; exec sleep 1000; }; '
        with Started(*options, '-n', 3, 'sh', '-c', victim + code) as p:
            pids = p.pids(2)
            wait_for(lambda: 'victim' in p.text())
            os.kill(int(re.search(r'victim (\d+)', p.text()).group(1)), signal.SIGKILL)
            self.assertEqual(p.end(), 128 + 9)
            self.assertIn('rank 0 was killed by signal 9 (Killed); ending 2 other ranks', p.text())
            wait_for(lambda: not any(alive(pid) for pid in pids))
            return p.text()

    def test_others_that_ignore_sigterm(self):
        for options in ([], ['--raw']):
            self.fail_rank_0('trap "" TERM; echo pid $$; while :; do sleep 0.1; done', *options)

    def test_others_get_time_to_end(self):
        for options in ([], ['--raw']):
            text = self.fail_rank_0('trap "sleep 0.1; echo saved; exit 0" TERM; echo pid $$; while :; do sleep 0.05; done',
                                    *options)
            self.assertEqual(text.count('saved'), 2)

    def test_children_of_ranks_end_too(self):
        # SIGTERM ends the ranks at once, but their children ignore it.
        for options in ([], ['--raw']):
            self.fail_rank_0("sh -c 'trap \"\" TERM; echo pid $$; exec sleep 1000' & wait", *options)

    def test_output_before_the_failure_is_kept(self):
        r = run('-n', 1, 'sh', '-c', 'seq 1 20000; exit 9')
        self.assertEqual(r.returncode, 9)
        self.assertEqual(ranks(r.stdout)[0], [str(i) for i in range(1, 20001)])

    def test_one_report_only(self):
        r = run('-n', 8, 'sh', '-c', 'exit 6')
        self.assertEqual(r.returncode, 6)
        self.assertEqual(len(re.findall('exited with code 6', r.stderr)), 1)


    def test_what_has_left_the_group_ends_too(self):
        # timeout and setsid leave the process group of the rank.
        self.fail_rank_0("setsid -w sh -c 'echo pid $$; exec sleep 1000' & wait")

    def test_what_is_not_the_ranks_goes_on(self):
        # A process that a rank leaves behind goes on if the job ends well. So does one that a shell started before it became zero-run.
        daemon = 'setsid sleep 1000 > /dev/null 2>&1 & echo $!'
        for shell in (f'"$0" --raw -n 1 sh -c "{daemon.replace("$", chr(92) + "$")}"', f'{daemon}; exec "$0" -n 1 false'):
            r = subprocess.run(['sh', '-c', shell, ZERO_RUN], capture_output=True, text=True, timeout=LIMIT)
            pid = int(r.stdout)
            self.assertTrue(alive(pid), r.stderr)
            os.kill(pid, signal.SIGKILL)


class Signals(unittest.TestCase):
    def test_forwarded_to_all(self):
        for name in ('SIGUSR1', 'SIGUSR2', 'SIGHUP', 'SIGINT', 'SIGTERM'):
            with Started('-n', 3, *waiting()) as p:
                p.pids(3)
                p.process.send_signal(getattr(signal, name))
                wait_for(lambda: p.text().count('got ' + name) == 3)
                self.assertIsNone(p.process.poll())

    def test_graceful_end(self):
        with Started('-n', 3, *waiting('SIGTERM')) as p:
            p.pids(3)
            p.process.terminate()
            self.assertEqual(p.end(), 0)
            self.assertEqual(p.text().count('got SIGTERM'), 3)

    def test_ranks_that_die_of_it(self):
        with Started('-n', 2, 'sh', '-c', 'echo pid $$; exec sleep 1000') as p:
            pids = p.pids(2)
            p.process.send_signal(signal.SIGINT)
            self.assertEqual(p.end(), 128 + 2)
            self.assertRegex(p.text(), r'zero-run: rank \d was killed by signal 2 \(Interrupt\)')
            self.assertFalse(any(alive(pid) for pid in pids))

    def test_second_and_third(self):
        for n_signals in (2, 3):
            with Started('-n', 2, *waiting()) as p:
                pids = p.pids(2)
                for i in range(n_signals):
                    p.process.send_signal(signal.SIGINT)
                    wait_for(lambda: i > 0 or p.text().count('got SIGINT') == 2)
                    wait_for(lambda: i != 1 or 'second signal 2 (Interrupt); ending 2 ranks' in p.text())
                self.assertEqual(p.end(), 128 + 2)
                self.assertFalse(any(alive(pid) for pid in pids))

    def test_ranks_die_with_zero_run(self):
        for raw in ([], ['--raw']):
            with Started(*raw, '-n', 3, *waiting()) as p:
                pids = p.pids(3)
                self.assertTrue(all(alive(pid) for pid in pids))
                p.process.kill()
                p.process.wait()
                wait_for(lambda: not any(alive(pid) for pid in pids))

    def test_each_rank_leads_a_session(self):
        with Started('-n', 2, *waiting()) as p:
            for pid in p.pids(2):
                self.assertEqual(os.getsid(pid), pid)
                self.assertEqual(os.getpgid(pid), pid)


class Restarts(unittest.TestCase):
    """Restarts of programs without libzero, which leave no record of steps."""

    def see(self, n, restarts, code, *options, **more):
        r = run(*options, '--restarts', restarts, '-n', n, 'sh', '-c', code, **more)
        return r.returncode, r.stdout, re.sub(r'\d+\.\d\d s after', 'T s after', r.stderr).splitlines()

    def test_the_second_attempt_succeeds(self):
        for raw in ([], ['--raw']):
            code, out, err = self.see(2, 3, 'echo "rank $RANK, attempt $ZERO_ATTEMPT"; test $ZERO_ATTEMPT = 1 && exit; '
                                      'test $RANK = 0 || kill -9 $$; exec sleep 1000', *raw)
            self.assertEqual(code, 0)
            self.assertEqual(sorted(line.split('] ')[-1] for line in out.splitlines() if 'attempt 1' in line),
                             ['rank 0, attempt 1', 'rank 1, attempt 1'])
            self.assertEqual(err, ['zero-run: rank 1 was killed by signal 9 (Killed); ending 1 other rank',
                                   'zero-run: restart 1 of 3: 2 ranks; no record tells of a step (T s after the failure)'])

    def test_used_up(self):
        code, out, err = self.see(1, 1, 'echo $ZERO_ATTEMPT; exit $((3 + ZERO_ATTEMPT))')
        self.assertEqual((code, out), (4, '[0] 0\n[0] 1\n'))
        self.assertEqual(err, ['zero-run: rank 0 exited with code 3',
                               'zero-run: restart 1 of 1: 1 rank; no record tells of a step (T s after the failure)',
                               'zero-run: rank 0 exited with code 4',
                               'zero-run: no restart: the one restart is used up'])

    def test_two_without_a_step(self):
        code, out, err = self.see(2, 4, 'exit $((5 + ZERO_ATTEMPT))')
        self.assertEqual((code, len([line for line in err if ' restart ' in line and 'of 4' in line])), (7, 2))
        self.assertEqual(err[-1], 'zero-run: no restart: 2 restarts in a row reached no step, according to the records of libzero')

    def test_not_what_was_asked_to_end(self):
        with Started('--restarts', 3, '-n', 2, 'sh', '-c', 'echo pid $$; exec sleep 1000') as p:
            p.pids(2)
            p.process.send_signal(signal.SIGTERM)
            self.assertEqual(p.end(), 128 + 15)
            self.assertNotIn('restart', p.text())

    def test_not_what_cannot_run(self):
        code, out, err = self.see(1, 3, 'echo once; exit 127')
        self.assertEqual((code, out), (127, '[0] once\n'))
        self.assertEqual(err[1:], ['zero-run: no restart: the program cannot be started'])

    def test_not_without_a_reader(self):
        code = 'while echo $ZERO_ATTEMPT; do :; done'
        with subprocess.Popen([ZERO_RUN, '--restarts', '3', '-n', '2', 'sh', '-c', code], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as p:
            p.stdout.readline()
            p.stdout.close()
            self.assertEqual(p.wait(LIMIT), 128 + signal.SIGPIPE)
            self.assertNotIn('restart', p.stderr.read())

    def test_nothing_of_the_attempt_before_is_left(self):
        # Rank 1 leaves children behind, one of which ignores SIGTERM, and rank 0 ends only when it is killed. None of these processes may
        # run in attempt 1.
        code = r"""
if test $ZERO_ATTEMPT = 0; then
    test $RANK = 0 && { trap '' TERM; echo $$ > "$1/0"; while :; do sleep 0.05; done; }
    sh -c 'trap "" TERM; echo $$ > "$0/1"; while :; do sleep 0.05; done' "$1" &
    setsid sh -c 'echo $$ > "$0/2"; exec sleep 1000' "$1" > /dev/null 2>&1 &
    until test -s "$1/0" && test -s "$1/1" && test -s "$1/2"; do sleep 0.01; done
    exit 3
fi
test $RANK = 0 && kill -0 $(cat "$1/0") 2> /dev/null && echo rank 0 is there
test $RANK = 0 && kill -0 $(cat "$1/1") 2> /dev/null && echo the child is there
test $RANK = 0 && kill -0 $(cat "$1/2") 2> /dev/null && echo the child of another session is there
exit 0
"""
        for options in ([], ['--raw']):
            with tempfile.TemporaryDirectory() as d:
                r = run(*options, '--restarts', 1, '-n', 2, 'sh', '-c', code, 'sh', d)
                self.assertEqual((r.returncode, r.stdout), (0, ''), r.stderr)
                self.assertIn('restart 1 of 1', r.stderr)

    def test_not_beside_what_cannot_be_killed(self):
        # A process of another user, as sudo starts one. A setuid copy of setpriv stands in for sudo.
        setpriv = shutil.which('setpriv')
        if os.geteuid() != 0 or not setpriv:
            self.skipTest('needs root and setpriv')
        with tempfile.TemporaryDirectory() as d:
            os.chmod(d, 0o777)
            shutil.copy(setpriv, f'{d}/as_root')
            os.chmod(f'{d}/as_root', 0o4755)
            as_root = f'{d}/as_root --reuid 0 --regid 0 --clear-groups '
            code = as_root + f'setsid sh -c "echo \\$\\$ > {d}/pid; exec sleep 1000" > /dev/null 2>&1 &'
            if subprocess.run(['sh', '-c', f'{ZERO_RUN} --version && {as_root} true'], user=65534, capture_output=True).returncode != 0:
                self.skipTest('another user cannot run zero-run, or cannot become root')
            done, out, err = self.see(1, 1, f'{code} until test -s {d}/pid; do sleep 0.01; done; exit 3', user=65534)
            with open(f'{d}/pid') as f:
                pid = int(f.read())
            self.assertTrue(alive(pid))
            os.kill(pid, signal.SIGKILL)
            self.assertEqual((done, err), (3, ['zero-run: rank 0 exited with code 3', f'zero-run: processes of ranks that have not ended: 1 (pid {pid})',
                                               'zero-run: no restart: processes of the ranks have not ended, and might write to the same files']))

    def test_nothing_is_kept_open(self):
        # zero-run first closes its copies of what the rank inherits.
        code = 'sleep 0.5; n=$(ls /proc/$PPID/fd | wc -l); echo $MASTER_PORT $n; exit 3'
        _, out, _ = self.see(1, 2, code)
        seen = [line.split()[1:] for line in out.splitlines()]
        self.assertEqual(len(seen), 3)
        self.assertEqual(len({n for _, n in seen}), 1, out)
        self.assertEqual(len({port for port, _ in seen}), 3, out)
        _, out, _ = self.see(1, 2, code, '--port', 23456)
        self.assertEqual([line.split()[1] for line in out.splitlines()], ['23456'] * 3)

    def test_standard_input_is_read_once(self):
        code = 'if test $RANK = 0; then read line; echo "$line"; exit $((ZERO_ATTEMPT == 0)); fi; test $ZERO_ATTEMPT = 1 || exec sleep 1000'
        r = run('--restarts', 1, '-n', 2, 'sh', '-c', code, stdin='a\nb\n')
        self.assertEqual((r.returncode, r.stdout), (0, '[0] a\n[0] b\n'))


class BadInput(unittest.TestCase):
    def refused(self, code, message, *args, env=None):
        r = run(*args, env=env)
        self.assertEqual((r.returncode, r.stdout), (code, ''))
        self.assertEqual(len(r.stderr.splitlines()), 1, r.stderr)
        self.assertTrue(r.stderr.startswith('zero-run: '), r.stderr)
        self.assertIn(message, r.stderr)

    def test_usage(self):
        self.refused(2, 'unrecognized option \'--no-such\'', '--no-such', '-n', 2, 'true')
        self.refused(2, 'requires an argument', '-n')
        self.refused(2, '-n N is missing')
        self.refused(2, '-n N is missing', 'true')
        self.refused(2, 'no program to run', '-n', 2)
        self.refused(2, 'no program to run', '-n', 2, '--')
        for n in ('0', '-1', 'two', '', '2x', '4097', '99999999999999999999'):
            self.refused(2, f'-n is "{n}"; allowed: 1 to 4096', '-n', n, 'true')
        for port in ('0', '65536', 'http', '-5'):
            self.refused(2, f'--port is "{port}"; allowed: 1 to 65535', '-n', 2, '--port', port, 'true')
        for restarts in ('-1', 'many', '', '1000001'):
            self.refused(2, f'--restarts is "{restarts}"; allowed: 0 to 1000000', '-n', 2, '--restarts', restarts, 'true')

    def test_no_program(self):
        self.refused(127, 'no-such-program: no such program in PATH', '-n', 3, 'no-such-program')
        self.refused(127, './no/such: No such file', '-n', 3, './no/such')
        self.refused(126, '/: Is a directory', '-n', 3, '/')
        self.refused(127, 'no such program', '-n', 3, 'true', env={'PATH': '/nowhere'})
        with tempfile.TemporaryDirectory() as d:
            plain = os.path.join(d, 'plain')
            with open(plain, 'w') as f:
                f.write('exit 0\n')
            self.refused(126, 'plain: Permission denied', '-n', 2, plain)
            self.refused(126, 'plain: Permission denied', '-n', 2, 'plain', env={'PATH': d})
            os.chmod(plain, 0o755)
            self.assertEqual(run('-n', 2, plain).returncode, 0)  # a script without #! runs, as with execvp
            self.assertEqual(run('-n', 2, 'plain', env={'PATH': f'/nowhere:{d}'}).returncode, 0)
            self.assertEqual(run('-n', 2, 'plain', env={'PATH': '/nowhere:'}, cwd=d).returncode, 0)

    def test_arguments_are_the_programs(self):
        r = run('-n', 1, 'printf', '%s,', '-n', '--raw', '', 'a b', '--help')
        self.assertEqual((r.returncode, r.stdout), (0, '[0] -n,--raw,,a b,--help,\n'))

    def test_help_and_version(self):
        r = run('--help')
        self.assertEqual((r.returncode, r.stderr), (0, ''))
        for word in ('--ranks=N', '--raw', '--port=P', 'MASTER_PORT', 'OMP_NUM_THREADS', '141'):
            self.assertIn(word, r.stdout)
        self.assertRegex(run('--version').stdout, r'^zero-run \d+\.\d+\.\d+\n$')


if __name__ == '__main__':
    unittest.main(verbosity=1)
