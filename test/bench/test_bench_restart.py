# SPDX-License-Identifier: Apache-2.0
"""Training that is killed, and started again by zero-run, ends in the state of an uninterrupted run.

All processes of a rank are killed from outside after some steps, at a random moment. Attempt 0 does not end
by itself, so it is still there however late the kill comes. On several nodes a node's zero-run is also
killed, and the others go on.

    N_DEATHS=50 meson test -C BUILD 'bench restart' --verbose

prints how long it takes from a death to the next step (CI: N_DEATHS=1)."""
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TINY, ZERO_BENCH, ZERO_RUN, bench, train  # noqa: E402

LIMIT = int(os.environ.get('TEST_LIMIT', 200))
STEPS = 24
MODEL = 'gpt2-nano'
SEED = int(os.environ.get('SEED', time.time_ns() % 1000000))

# echo prints the rank's process group. Attempt 0 waits at its end for the kill.
RANK = 'echo "pid $RANK $$" >&2; "$@" || exit; test $ZERO_ATTEMPT != 0 || exec sleep 1000'


def clean():
    return {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}


def train_killed(world, victim, at, *args):
    """Returns zero-run's exit code and standard error, and the last line of a training in which a rank is
    killed after step `at` of attempt 0."""
    command = [ZERO_RUN, '-n', str(world), '--raw', '--restarts', '2', 'sh', '-c', RANK, 'sh', ZERO_BENCH, 'train', '--json', *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean()) as p:
        pids, line = {}, ''
        while len(pids) < world:
            pids.update(re.findall(r'^pid (\d+) (\d+)\n', p.stderr.readline()))
        for line in p.stdout:
            if f'"step":{at},' in line.replace(' ', '') and victim is not None:
                os.killpg(int(pids[str(victim)]), signal.SIGKILL)
                victim = None
        return p.wait(LIMIT), p.stderr.read(), line


class Restarts(unittest.TestCase):
    def test_the_same_state(self):
        draw = random.Random(SEED)
        for stage in (1, 3):
            with self.subTest(seed=SEED, stage=stage), tempfile.TemporaryDirectory() as d:
                at, victim = draw.randrange(1, STEPS), draw.randrange(4)
                args = [*TINY[:-1], os.path.abspath(__file__), f'--steps={STEPS}', f'--stage={stage}']
                _, summary = train(4, *args)
                code, err, last = train_killed(4, victim, at, *args, '--save', d, '--save-every=5', '--keep=2', '--load=latest')
                self.assertEqual(code, 0, err)
                # Either may be reported as the first to end: a rank's shell may be reaped after another rank
                # that has noticed the loss.
                self.assertRegex(err, r'zero-run: rank \d (was killed by signal 9|exited with code)')
                self.assertIn('restart 1 of 2: 4 ranks', err)
                self.assertEqual(json.loads(last)['state_sha256'], summary['state_sha256'])


    def test_two_without_a_new_step(self):
        # Attempt 0 takes six steps and fails. Later attempts take none.
        code = 'test $ZERO_ATTEMPT = 0 || exit 4; "$@"; exit 3'
        args = [*TINY[:-1], os.path.abspath(__file__), '--steps=6', '--stage=2']
        p = subprocess.run([ZERO_RUN, '-n', '2', '--restarts', '9', 'sh', '-c', code, 'sh', ZERO_BENCH, 'train', *args], capture_output=True, text=True,
                           timeout=LIMIT, env=clean(), check=False)
        self.assertEqual(p.returncode, 4, p.stderr)
        self.assertIn('restart 1 of 9: 2 ranks; step 6 was reached', p.stderr)
        self.assertIn('restart 2 of 9: 2 ranks; step 6 was reached', p.stderr)
        self.assertEqual(p.stderr.splitlines()[-1], 'zero-run: no restart: 2 restarts in a row reached no new step (the last one was 6)')


    def test_what_tells_of_steps_is_not_there(self):
        """That is reported, and the training goes on. A file of another kind in its place is left alone."""
        args = ['train', *TINY[:-1], os.path.abspath(__file__), '--steps=1']
        with tempfile.NamedTemporaryFile() as f:
            f.write(b'x' * 4096)
            f.flush()
            for value, why in (('nothing', 'it is not PATH:NUMBER'),
                               ('/no/such:0', 'the file cannot be opened (No such file or directory)'),
                               ('/dev/null:0', 'the file has no room for this rank'),
                               (f'{f.name}:64', 'the file has no room for this rank'),
                               (f'{f.name}:1', "the file is not zero-run's")):
                done = bench(*args, env={'ZERO_PROGRESS': value}, timeout=LIMIT)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(f'ZERO_PROGRESS is "{value}": {why}: zero-run cannot follow this rank\'s progress', done.stderr)
            with open(f.name, 'rb') as after:
                self.assertEqual(after.read(), b'x' * 4096)


class Nodes:
    """Two nodes of two ranks each on this host, whose ranks share memory. Node 0's output is read as it
    comes."""

    def __init__(self, options, *args):
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        self.files = [tempfile.TemporaryFile('w+') for _ in range(2)]
        self.nodes = [subprocess.Popen([ZERO_RUN, '--nnodes=2', f'--node-rank={i}', f'--rdzv=127.0.0.1:{port}', '-n2', '--raw', *options, 'sh', '-c', RANK,
                                        'sh', ZERO_BENCH, 'train', '--json', *args], stderr=self.files[i], text=True, env=dict(clean(), ZERO_JOB_KEY=KEY),
                                       stdout=subprocess.DEVNULL if i else subprocess.PIPE) for i in range(2)]

    def errors(self, node):
        return os.pread(self.files[node].fileno(), 1 << 20, 0).decode()

    def steps(self):
        """Yields the training's lines as they come. The last is its summary."""
        yield from self.nodes[0].stdout

    def kill(self, what):
        """Kills a rank or a node's zero-run at once (2 or 3: node 1 has both ranks)."""
        if what == 'node 1':
            self.nodes[1].kill()
        else:
            pids = dict(re.findall(r'^pid (\d+) (\d+)$', self.errors(0) + self.errors(1), re.MULTILINE))
            os.killpg(int(pids[str(what)]), signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for n in self.nodes:
            n.kill()
            n.wait()
        self.nodes[0].stdout.close()
        for f in self.files:
            f.close()


KEY = os.urandom(16).hex()


def is_step(line, at):
    return f'"step":{at},' in line.replace(' ', '')


class OverNodes(unittest.TestCase):
    def killed(self, what, stage, at, options):
        """Checks that the job ends in the state of an uninterrupted run. Returns node 0's standard error."""
        with tempfile.TemporaryDirectory() as d:
            args = [*TINY[:-1], os.path.abspath(__file__), f'--steps={STEPS}', f'--stage={stage}']
            _, summary = train(4, *args)
            with Nodes(options, *args, '--save', d, '--save-every=5', '--keep=2', '--load=latest') as job:
                line = ''
                for line in job.steps():
                    if is_step(line, at) and what is not None:
                        job.kill(what)
                        what = None
                self.assertEqual(job.nodes[0].wait(LIMIT), 0, job.errors(0))
                self.assertEqual(json.loads(line)['state_sha256'], summary['state_sha256'])
                return job.errors(0)

    def test_a_rank_is_killed(self):
        draw = random.Random(SEED)
        err = self.killed(draw.randrange(4), draw.choice((1, 2, 3)), draw.randrange(1, STEPS), ['--restarts=2'])
        self.assertRegex(err, r'zero-run: restart 1 of 2: 4 ranks; step \d+ was reached')

    def test_a_node_is_killed_and_two_ranks_go_on(self):
        draw = random.Random(SEED + 1)
        err = self.killed('node 1', draw.choice((1, 2, 3)), draw.randrange(1, STEPS), ['--restarts=2', '--min-ranks=2'])
        self.assertRegex(err, r'zero-run: node 1 \(.*, ranks 2 to 3\) is lost: ')
        self.assertRegex(err, r'zero-run: restart 1 of 2: 2 ranks, grad_accum_steps 2; step \d+ was reached')


class Time(unittest.TestCase):
    """Measures the time from a rank's death to the next new step, with a checkpoint at each step. Only
    asserts that there is one. The bar (a median below 3 s on an idle machine) is for the reader."""

    def test_from_death_to_the_next_step(self):
        draw, n_deaths, took = random.Random(SEED + 2), int(os.environ.get('N_DEATHS', 1)), []
        with tempfile.TemporaryDirectory() as d:
            args = ['--model', MODEL, '--context=32', '--batch=1', '--data', os.path.abspath(__file__), '--steps=1000000', '--stage=3', '--save', d,
                    '--save-every=1', '--keep=1', '--load=latest']
            options = [f'--restarts={n_deaths}']
            command = [ZERO_RUN, '-n4', '--raw', *options, 'sh', '-c', RANK, 'sh', ZERO_BENCH, 'train', '--json', *args]
            with tempfile.TemporaryFile('w+') as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=clean()) as p:
                died_s, reached = None, 0
                limit = threading.Timer(LIMIT + 10 * n_deaths, p.kill)
                limit.start()
                for line in p.stdout:
                    step = re.search(r'"step": ?(\d+),', line)
                    if not step or int(step[1]) <= reached:
                        continue
                    reached = int(step[1])
                    if died_s is not None:
                        took.append(time.monotonic() - died_s)
                    if len(took) == n_deaths:
                        break
                    pids = re.findall(r'^pid (\d) (\d+)$', os.pread(err.fileno(), 1 << 20, 0).decode(), re.MULTILINE)[-4:]
                    died_s = time.monotonic()
                    os.killpg(int(draw.choice(pids)[1]), signal.SIGKILL)
                limit.cancel()
                p.terminate()
                p.stdout.read()
                p.wait(LIMIT)
                self.assertEqual(len(took), n_deaths, os.pread(err.fileno(), 1 << 20, 0).decode())
        print(f'{MODEL}, 4 ranks, {n_deaths} deaths: from death to the next step {statistics.median(took):.2f} s median, {max(took):.2f} s worst')


if __name__ == '__main__':
    print('SEED', SEED)
    unittest.main(verbosity=1)
