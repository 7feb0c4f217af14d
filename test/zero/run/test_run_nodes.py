# SPDX-License-Identifier: Apache-2.0
"""test_run_nodes.py ZERO_RUN LATER: several zero-runs on loopback as the nodes of one job. LATER is a zero-run of another version. It also
waits half a minute instead of 200 ms for news of a killed rank. No test measures time, but a run that takes more than a minute fails."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ZERO_RUN, LATER = map(os.path.abspath, sys.argv[1:3])
del sys.argv[1:3]
LIMIT = int(os.environ.get('TEST_LIMIT', 60))
KEY = os.urandom(16).hex()
HOST = socket.gethostname()
WAIT = 'echo "pid $$"; exec sleep 1000'


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError('waited in vain')
        time.sleep(0.01)


def alive(pid):
    """Whether the process runs. Zombies count as ended, because their parent may never reap them."""
    try:
        with open(f'/proc/{pid}/stat') as f:
            return f.read().rsplit(')', 1)[1].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


class Node:
    """A zero-run in the background, with its output in a file."""

    def __init__(self, args, program=ZERO_RUN, **variables):
        env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_')}
        env.update({'ZERO_JOB_KEY': KEY, **variables})
        self.out, self.kept = tempfile.TemporaryFile('w+'), ''
        self.process = subprocess.Popen([program, *map(str, args)], stdout=self.out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                        env={k: v for k, v in env.items() if v is not None})

    def text(self):
        return self.kept if self.out.closed else os.pread(self.out.fileno(), 1 << 20, 0).decode()

    def lines(self):
        """Returns the output as lines, without the times that differ between runs."""
        return re.sub(r'\d+\.\d\d s after', 'T s after', self.text()).splitlines()

    def pids(self, n):
        wait_for(lambda: len(re.findall(r'pid (\d+)\n', self.text())) >= n)
        return [int(p) for p in re.findall(r'pid (\d+)\n', self.text())]

    def end(self):
        code = self.process.wait(LIMIT)
        self.kept = self.text()
        self.out.close()
        return code


class Job:
    """The nodes of one job. ranks: ranks of each node; code: a script for sh; each: options by node; at: where nodes meet (None: at a free port)."""

    def __init__(self, ranks, code, *options, each=None, at=None):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            at = at or f'127.0.0.1:{s.getsockname()[1]}'
        self.nodes = []
        for i, n in enumerate(ranks):
            own = (each or {}).get(i, {})
            meeting = ['--nnodes', own.get('nnodes', len(ranks)), '--node-rank', own.get('number', i), '--rdzv', at]
            self.nodes.append(Node([*meeting, '-n', n, *options, *own.get('options', []), 'sh', '-c', code], own.get('program', ZERO_RUN),
                                   **own.get('variables', {})))

    def ends(self):
        return [n.end() for n in self.nodes]

    def pids(self, *ranks):
        return [p for node, n in zip(self.nodes, ranks) for p in node.pids(n)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for n in self.nodes:
            if n.process.poll() is None:
                n.process.kill()
            n.end()


class Together(unittest.TestCase):
    def all_say(self, job, line):
        for node in job.nodes:
            self.assertIn(f'zero-run: {line}', node.lines())

    def gone(self, pids):
        wait_for(lambda: not any(alive(p) for p in pids))

    def test_ranks_of_unequal_nodes(self):
        names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ZERO_ATTEMPT MASTER_ADDR'
        code = 'echo ' + ' '.join('$' + n for n in names.split()) + '; echo same $MASTER_PORT $ZERO_JOB $ZERO_JOB_KEY'
        with Job([1, 3, 2], code) as job:
            self.assertEqual(job.ends(), [0, 0, 0])
            lines = sorted(line for n in job.nodes for line in n.lines() if ' same ' not in line)
            want = [(0, 0, 1, 0), (1, 0, 3, 1), (2, 1, 3, 1), (3, 2, 3, 1), (4, 0, 2, 2), (5, 1, 2, 2)]
            self.assertEqual(lines, [f'[{r}] {r} 6 {local} {size} {node} 0 127.0.0.1' for r, local, size, node in want])
            same = {line.split('] ')[1] for n in job.nodes for line in n.lines() if ' same ' in line}
            self.assertEqual(len(same), 1)
            self.assertTrue(same.pop().endswith(KEY))

    def test_as_torchrun_says_it(self):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        nodes = [Node(['--nnodes=2', f'--node-rank={i}', '--nproc-per-node=2', f'--rdzv-endpoint=127.0.0.1:{port}', '--max-restarts=1', 'sh', '-c',
                       'echo $RANK']) for i in (0, 1)]
        self.assertEqual([n.end() for n in nodes], [0, 0])
        self.assertEqual(sorted(nodes[1].lines()), ['[2] 2', '[3] 3'])

    def test_by_a_file(self):
        """Nodes meet in a folder, or at a path that does not exist yet, also after a restart. They leave no file, and ignore another job's."""
        code = 'echo $MASTER_ADDR $ZERO_RENDEZVOUS; test $ZERO_ATTEMPT = 1 || exit 3'
        with tempfile.TemporaryDirectory() as folder:
            for place in (folder, f'{folder}/rank'):
                others = f'{folder}/libzero-0123456789abcdef-0'
                with open(others, 'w', encoding='ascii') as file:
                    file.write('of another job')
                with Job([2, 1], code, '--restarts', 1, at=f'file://{place}') as job:
                    self.assertEqual(job.ends(), [0, 0])
                    self.all_say(job, 'restart 1 of 1: 3 ranks; no record tells of a step (T s after the failure)')
                    lines = [line for n in job.nodes for line in n.lines() if not line.startswith('zero-run: ')]
                    self.assertEqual(set(lines), {f'[{r}] {HOST} file://{place}' for r in range(3)})
                self.assertEqual(os.listdir(folder), [os.path.basename(others)])

    def test_one_node_needs_no_file(self):
        with Job([1], 'echo $MASTER_ADDR $ZERO_RENDEZVOUS', at='file:///no/such/folder') as job:
            self.assertEqual(job.ends(), [0])
            self.assertEqual(job.nodes[0].lines(), ['[0] 127.0.0.1'])

    def test_rank_0_can_listen_on_the_port(self):
        code = r"""exec python3 -c "
import os, socket, time
at = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))
if os.environ['RANK'] == '0':
    print(socket.create_server(at).accept()[0].recv(10).decode())
else:
    while True:
        try: s = socket.create_connection(at); break
        except ConnectionRefusedError: time.sleep(0.01)
    s.send(b'hello')
" """
        with Job([1, 1], code) as job:
            self.assertEqual(job.ends(), [0, 0])
            self.assertEqual(job.nodes[0].lines(), ['[0] hello'])

    def test_a_rank_that_is_killed(self):
        for node, rank in ((0, 1), (1, 2), (2, 4)):
            with Job([2, 2, 1], WAIT) as job:
                pids = job.pids(2, 2, 1)
                ranks = {int(r): int(p) for n in job.nodes for r, p in re.findall(r'\[(\d)\] pid (\d+)', n.text())}
                os.kill(ranks[rank], signal.SIGKILL)
                self.assertEqual(job.ends(), [137] * 3)
                self.all_say(job, f'rank {rank} on node {node} ({HOST}) was killed by signal 9 (Killed); ending all ranks')
                self.gone(pids)

    def test_a_rank_that_fails(self):
        with Job([1, 2], 'test $RANK = 2 && exit 5; ' + WAIT) as job:
            self.assertEqual(job.ends(), [5, 5])
            self.all_say(job, f'rank 2 on node 1 ({HOST}) exited with code 5; ending all ranks')

    def test_who_was_killed_is_the_cause(self):
        # Rank 0 fails because rank 1, on another node, is about to be killed. Node 0 learns of rank 0's failure first, because rank 1 runs
        # until node 0 has reaped rank 0.
        with tempfile.TemporaryDirectory() as d:
            code = f"""if test $RANK = 0; then echo $$ > {d}/new; mv {d}/new {d}/0; exit 1; fi
until test -e {d}/0; do sleep 0.01; done
while kill -0 $(cat {d}/0) 2> /dev/null; do sleep 0.01; done
kill -9 $$"""
            with Job([1, 1], code, each={i: {'program': LATER} for i in (0, 1)}) as job:
                self.assertEqual(job.ends(), [137, 137])
                self.all_say(job, f'rank 1 on node 1 ({HOST}) was killed by signal 9 (Killed); ending all ranks')

    def test_a_program_that_is_not_there_on_one_node(self):
        with Job([1, 1], WAIT, each={1: {'variables': {'PATH': '/nowhere'}}}) as job:
            self.assertEqual(job.ends(), [1, 127])
            self.assertIn('sh: no such program in PATH', job.nodes[1].text())
            self.all_say(job, f'node 1 ({HOST}) cannot run the program')

    def test_signals(self):
        # A rank that got the signal ends after all ranks got it.
        code = """trap '' TERM; trap 'touch %s/$RANK; echo int; until test $(ls %s | wc -l) = 4; do sleep 0.01; done; exit 3' INT
trap 'echo usr1' USR1; echo pid $$; while :; do sleep 0.02; done"""
        for node in (0, 1, 2):
            with tempfile.TemporaryDirectory() as d, Job([1, 2, 1], code % (d, d), '--restarts', 3) as job:
                pids = job.pids(1, 2, 1)
                job.nodes[node].process.send_signal(signal.SIGUSR1)
                wait_for(lambda: sum(n.text().count('usr1') for n in job.nodes) == 4)
                job.nodes[node].process.send_signal(signal.SIGINT)
                self.assertEqual(job.ends(), [3] * 3)
                self.assertEqual(sum(n.text().count('int\n') for n in job.nodes), 4)
                self.assertFalse(any('restart' in n.text() for n in job.nodes))
                self.gone(pids)

    def test_a_second_signal_ends_what_ignores_the_first(self):
        code = "trap 'echo int' INT; echo pid $$; while :; do sleep 0.02; done"
        with Job([1, 1], code) as job:
            pids = job.pids(1, 1)
            job.nodes[1].process.send_signal(signal.SIGINT)
            wait_for(lambda: all('int\n' in n.text() for n in job.nodes))
            job.nodes[1].process.send_signal(signal.SIGINT)
            codes = job.ends()
            self.assertEqual(codes[0], codes[1])
            self.assertEqual(codes[0], 130)
            self.gone(pids)


class Lost(unittest.TestCase):
    def test_node_0(self):
        with Job([1, 2, 1], WAIT, '--restarts', 3, '--min-ranks', 1) as job:
            pids = job.pids(1, 2, 1)
            job.nodes[0].process.kill()
            self.assertEqual(job.ends()[1:], [1, 1])
            for node, n in ((1, '2 ranks'), (2, '1 rank')):
                self.assertRegex(job.nodes[node].text(), rf'zero-run: node 0 \({HOST}\), which leads the job, is lost: .*; ending {n}\n')
            wait_for(lambda: not any(alive(p) for p in pids))

    def test_another_node(self):
        with Job([1, 2, 1], WAIT) as job:
            pids = job.pids(1, 2, 1)
            job.nodes[1].process.kill()
            codes = job.ends()
            self.assertEqual((codes[0], codes[2]), (1, 1))
            for node in (0, 2):
                self.assertRegex(job.nodes[node].text(), rf'zero-run: node 1 \({HOST}, ranks 1 to 2\) is lost: .*; ending all ranks\n')
            wait_for(lambda: not any(alive(p) for p in pids))

    def test_goes_on_without_it(self):
        code = 'echo "$ZERO_ATTEMPT: $RANK of $WORLD_SIZE"; test $ZERO_ATTEMPT = 1 && exit; ' + WAIT
        with Job([1, 2, 1], code, '--restarts', 2, '--min-ranks', 2, '--allow-batch-change') as job:
            job.pids(1, 2, 1)
            job.nodes[1].process.kill()
            codes = job.ends()
            self.assertEqual((codes[0], codes[2]), (0, 0), job.nodes[0].text())
            self.assertIn('[0] 1: 0 of 2', job.nodes[0].lines())
            self.assertIn('[1] 1: 1 of 2', job.nodes[2].lines())
            for node in (0, 2):
                self.assertRegex(job.nodes[node].text(), r'zero-run: restart 1 of 2: 2 ranks')

    def test_not_without_too_many(self):
        for options, why in (([], '2 of 4 ranks are left; --min-ranks M allows fewer'), (['--min-ranks', 3], '2 ranks are left, and --min-ranks is 3'),
                             (['--min-ranks', 2], "no rank's record says how many micro-batches")):
            with self.subTest(options=options), Job([2, 2], WAIT, '--restarts', 2, *options) as job:
                job.pids(2, 2)
                job.nodes[1].process.kill()
                self.assertEqual(job.nodes[0].end(), 1)
                self.assertIn('zero-run: no restart: ', job.nodes[0].text())
                self.assertIn(why, job.nodes[0].text().replace('of 4 ranks are left, and', 'X'))

    def test_a_silent_one(self):
        """A stopped node sends nothing and closes nothing. When it goes on, it ends its ranks."""
        with Job([1, 1, 1], WAIT, '--node-timeout', 5) as job:
            pids = job.pids(1, 1, 1)
            job.nodes[2].process.send_signal(signal.SIGSTOP)
            self.assertEqual([job.nodes[0].end(), job.nodes[1].end()], [1, 1])
            for node in (0, 1):
                self.assertRegex(job.nodes[node].text(), rf'zero-run: node 2 \({HOST}, ranks 2 to 2\) is lost: it is silent: no heartbeat')
            job.nodes[2].process.send_signal(signal.SIGCONT)
            self.assertEqual(job.nodes[2].end(), 1)
            self.assertIn(f'zero-run: node 0 ({HOST}), which leads the job, is lost: ', job.nodes[2].text())
            wait_for(lambda: not any(alive(p) for p in pids))


class Restarts(unittest.TestCase):
    def test_all_nodes_again(self):
        code = 'echo "$ZERO_ATTEMPT: $RANK at $MASTER_PORT"; test $ZERO_ATTEMPT = 1 && exit; test $RANK = 2 && kill -9 $$; exec sleep 1000'
        with Job([1, 2], code, '--restarts', 1) as job:
            self.assertEqual(job.ends(), [0, 0])
            text = ''.join(n.text() for n in job.nodes)
            self.assertEqual(sorted(re.findall(r'1: (\d) at', text)), ['0', '1', '2'])
            ports = [set(re.findall(rf'{attempt}: \d at (\d+)', text)) for attempt in (0, 1)]
            self.assertEqual((len(ports[0]), len(ports[1])), (1, 1))
            self.assertNotEqual(ports[0], ports[1])
            for n in job.nodes:
                self.assertIn('zero-run: restart 1 of 1: 3 ranks; no record tells of a step (T s after the failure)', n.lines())

    def test_used_up(self):
        with Job([1, 1], 'exit $((4 + ZERO_ATTEMPT))', '--restarts', 1) as job:
            self.assertEqual(job.ends(), [5, 5])
            for n in job.nodes:
                self.assertEqual(n.lines()[-1], 'zero-run: no restart: the one restart is used up')


class Late(unittest.TestCase):
    def test_a_second_node_of_a_number(self):
        """A second node with the same number fails at once, and the job goes on."""
        with tempfile.TemporaryDirectory() as folder:
            go = os.path.join(folder, 'go')
            with Job([1, 1], f'echo pid $$; until test -e {go}; do sleep 0.1; done') as job:
                job.pids(1, 1)
                at = job.nodes[0].process.args[job.nodes[0].process.args.index('--rdzv') + 1]
                for number in (1, 0):
                    second = Node(['--nnodes', 2, '--node-rank', number, '--rdzv', at, '--rdzv-timeout', LIMIT, '-n', 1, 'echo', 'started'])
                    self.assertNotEqual(second.end(), 0)
                    self.assertEqual(len(second.lines()), 1, second.text())
                    if number:
                        self.assertRegex(second.text(), r'the job runs already, and node 1 is in it, at 127.0.0.1:\d+: node 1 was started twice')
                os.mkdir(go)
                self.assertEqual(job.ends(), [0, 0])
                self.assertNotIn('twice', ''.join(n.text() for n in job.nodes))

    def test_second_nodes_by_a_file(self):
        """Node 0 keeps its file while the job runs, so that two jobs in one folder cannot take each other's nodes."""
        with tempfile.TemporaryDirectory() as folder:
            go, at = os.path.join(folder, 'go'), f'file://{folder}'
            with Job([1, 1], f'echo pid $$; until test -e {go}; do sleep 0.1; done', at=at) as job:
                job.pids(1, 1)
                with Job([1, 1], 'echo started', '--rdzv-timeout', LIMIT, at=at) as second:
                    self.assertNotIn(0, second.ends())
                    self.assertRegex(second.nodes[0].text(), rf'^zero-run: another node 0 of this job is already there, on "{HOST}" \(.*\): jobs that meet in one '
                                     'folder at a time need a ZERO_JOB or a key of their own\n$')
                    self.assertRegex(second.nodes[1].text(), r'the job runs already, and node 1 is in it, at .*: node 1 was started twice')
                with Job([1, 1], 'echo started', at=at, each={i: {'variables': {'ZERO_JOB': 'other'}} for i in (0, 1)}) as other:
                    self.assertEqual(other.ends(), [0, 0])
                os.mkdir(go)
                self.assertEqual(job.ends(), [0, 0])
            os.rmdir(go)
            self.assertEqual(os.listdir(folder), [])

    def test_other_jobs(self):
        """Nodes with different ZERO_JOB belong to different jobs, even with equal keys."""
        with Job([1, 1], 'echo started', '--rdzv-timeout', 5, each={1: {'variables': {'ZERO_JOB': 'other'}}}) as job:
            self.assertNotIn(0, job.ends())
            self.assertIn('ZERO_JOB', job.nodes[1].text())

    def test_nobody_on_loopback(self):
        """A loopback address reaches this host only, and the error says so."""
        with Job([1, 1], 'echo started', '--rdzv-timeout', 1, each={0: {'program': '/bin/false'}}) as job:
            self.assertNotEqual(job.ends()[1], 0)
            self.assertRegex(job.nodes[1].text(), 'node 0 has not started, or has given up and left, or is on another host: a loopback address leads to')


class BadInput(unittest.TestCase):
    def refused(self, *words, ranks=(1, 1), options=(), each=None, nodes=None, at=None):
        """No node starts a rank. Each of nodes (None: all) prints one line, which matches words."""
        with Job(ranks, 'echo started', *options, each=each, at=at) as job:
            codes = job.ends()
            for i, n in enumerate(job.nodes):
                self.assertNotEqual(codes[i], 0)
                self.assertNotIn('] started', n.text())
                if nodes is None or i in nodes:
                    self.assertEqual(len(n.lines()), 1, n.text())
                    self.assertTrue(n.text().startswith('zero-run: '), n.text())
                    for word in words:
                        self.assertRegex(n.text(), word)

    def test_a_missing_node(self):
        each = {1: {'program': '/bin/false'}}
        self.refused(r'1 of 3 nodes did not come to 127.0.0.1:\d+ in 5000 ms: node 1', ranks=(1, 1, 1), options=['--rdzv-timeout', 5], each=each,
                     nodes=[0, 2])

    def test_nobody_at_the_file(self):
        """The errors name the path of the file, and leave no file behind."""
        with tempfile.TemporaryDirectory() as folder:
            at, options = f'file://{folder}/rank', ['--rdzv-timeout', 1]
            self.refused(rf'1 of 2 nodes did not come to {at} \(".*": .*\) in 1000 ms: node 1', options=options, each={1: {'program': '/bin/false'}},
                         nodes=[0], at=at)
            self.refused(rf'node 1.* waited 1000 ms for node 0 at {at}.*node 0 has not started', options=options, each={0: {'program': '/bin/false'}},
                         nodes=[1], at=at)
            self.assertEqual(os.listdir(folder), [])
        self.refused('its folder does not exist on this host', options=options, nodes=[1], at=at)

    def test_wrong_key(self):
        each = {1: {'variables': {'ZERO_JOB_KEY': 'ab' * 16}}}
        self.refused('ZERO_JOB_KEY', options=['--rdzv-timeout', 5], each=each)

    def test_no_key(self):
        each = {i: {'variables': {'ZERO_JOB_KEY': None}} for i in (0, 1)}
        self.refused('several nodes need a key, the same on all: set ZERO_JOB_KEY or ZERO_JOB_KEY_FILE', each=each)
        each = {i: {'variables': {'ZERO_JOB_KEY': 'xyz'}} for i in (0, 1)}
        self.refused('ZERO_JOB_KEY has 3 characters and is not a key', each=each)

    def test_two_with_one_number(self):
        self.refused('node 1 is there twice', ranks=(1, 1, 1), options=['--rdzv-timeout', 20], each={2: {'number': 1}}, nodes=[0])

    def test_differing_numbers_of_nodes(self):
        self.refused(r'node 1 at 127.0.0.1:\d+ has --nnodes 3, node 0 has --nnodes 2', options=['--rdzv-timeout', 20], each={1: {'nnodes': 3}})

    def test_another_version(self):
        self.refused(rf'node 1 \({HOST}\) has libzero 99\.9\.9, node 0 \({HOST}\) has libzero \d+\.\d+\.\d+: all nodes need the same',
                     each={1: {'program': LATER}})

    def test_other_options(self):
        for option, value in (('--restarts', 2), ('--min-ranks', 1), ('--port', 23456), ('--node-timeout', 7)):
            with self.subTest(option):
                self.refused(rf'{option} is {value} on node 1 \({HOST}\), and \d+ on node 0 \({HOST}\)', each={1: {'options': [option, value]}})

    def test_too_many_for_all(self):
        self.refused('--min-ranks is 4, and 2 nodes have 3 ranks', ranks=(1, 2), options=['--restarts', 1, '--min-ranks', 4])

    def test_usage(self):
        at = ['--rdzv', '127.0.0.1:29400']
        for args, words in ((['--nnodes', '2', *at], 'which of 2 nodes? --node-rank K is missing'),
                            (['--nnodes', '2', '--node-rank', '0'], 'where is node 0? --rdzv HOST:PORT is missing'),
                            (['--node-rank', '0'], 'on how many nodes? --nnodes N is missing'),
                            (at, 'on how many nodes? --nnodes N is missing'),
                            (['--nnodes', '2', '--node-rank', '2', *at], '--node-rank is 2; allowed with 2 nodes: 0 to 1'),
                            (['--nnodes', 'x'], '--nnodes is "x"; allowed: 1 to 1024'),
                            (['--nnodes', '2', '--node-rank', '-1'], '--node-rank is "-1"; allowed: 0 to 1023'),
                            (['--rdzv', 'nowhere'], '--rdzv is "nowhere"; allowed: HOST:PORT'),
                            (['--rdzv', 'a:0'], '--rdzv is "a:0"; allowed: HOST:PORT'),
                            (['--rdzv', '::1:29400'], 'allowed: HOST:PORT or [IPV6]:PORT, of node 0, or file:///PATH'),
                            (['--rdzv', 'file://a'], '--rdzv is "file://a"; allowed: HOST:PORT'),
                            (['--rdzv', 'file:///' + 1100 * 'a'], 'allowed: HOST:PORT'),
                            (['--rdzv-timeout', '0'], '--rdzv-timeout is "0"; allowed: 1 to 86400'),
                            (['--node-timeout', 'never'], '--node-timeout is "never"; allowed: 1 to 86400'),
                            (['--min-ranks', '0'], '--min-ranks is "0"; allowed: 1 to 4096')):
            n = Node([*args, '-n', 1, 'true'])
            self.assertEqual((n.end(), len(n.lines())), (2, 1), n.text())
            self.assertIn(words, n.text())

    def test_no_host_of_that_name(self):
        n = Node(['--nnodes', 2, '--node-rank', 1, '--rdzv', 'no.such.host.invalid:29400', '--rdzv-timeout', 1, '-n', 1, 'true'])
        self.assertNotEqual(n.end(), 0)
        self.assertIn('no.such.host.invalid', n.text())

    def test_no_such_interface(self):
        each = {1: {'variables': {'ZERO_INTERFACE': 'none9'}}}
        self.refused('"none9"', options=['--rdzv-timeout', 1], each=each, nodes=[1])

    def test_port_in_use(self):
        with socket.create_server(('127.0.0.1', 0)) as s:
            port = s.getsockname()[1]
            n = Node(['--nnodes', 2, '--node-rank', 0, '--rdzv', f'127.0.0.1:{port}', '--rdzv-timeout', 1, '-n', 1, 'true'])
            self.assertNotEqual(n.end(), 0)
            self.assertIn(f'node 0 cannot listen at 127.0.0.1:{port}', n.text())


if __name__ == '__main__':
    unittest.main(verbosity=1)
