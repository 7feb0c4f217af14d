# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts work like those of zero-run. zero/examples/minimal.c prints the same, and a training run ends in the same
bits, also after torchrun has restarted the ranks.

    test_torchrun.py PROGRAM ZERO_BENCH ZERO_RUN

Uses torchrun itself (torchrun --no-python) if torch can be imported, and otherwise a stand-in. The stand-in sets the variables in torchrun's
documentation, and listens at MASTER_PORT, where torchrun's agent has a store for the ranks. The last two tests always use the stand-in."""
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

PROGRAM, ZERO_BENCH, ZERO_RUN = map(os.path.abspath, sys.argv[1:4])
del sys.argv[1:4]  # the remaining arguments are for unittest
LIMIT = 2 * int(os.environ.get('TEST_LIMIT', 60))
KEY = os.urandom(16).hex()
HAS_TORCH = subprocess.run([sys.executable, '-c', 'import torch.distributed.run'], capture_output=True, check=False).returncode == 0
OF_LAUNCHERS = re.compile(r'(ZERO|OMPI|PMIX?|SLURM|TORCHELASTIC|MASTER)_.*|(ROLE_|GROUP_|LOCAL_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE')
TRAIN = [ZERO_BENCH, 'train', '--json', '--steps=3', '--layers=2', '--threads=1', '--stage=3']


def environment(**variables):
    """Returns this process's environment without variables of an outer launcher."""
    return {**{k: v for k, v in os.environ.items() if not OF_LAUNCHERS.fullmatch(k)}, **variables}


def free_port():
    """Returns a free port whose successor is free too; rank 0 listens there if the agent uses the port. Ephemeral ports are left out."""
    while True:
        port = random.randrange(12000, 20000)
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(('127.0.0.1', port))
            two.bind(('127.0.0.1', port + 1))
            return port


def end(ranks):
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, number)
        until = time.monotonic() + 5
        while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)


class Launched:
    """A finished job of one node. It has code, stdout, stderr and n_guests, the connections to the stand-in's store (None: torchrun's store).

    standalone: as with torchrun --standalone; else as with --master-port. store: the agent's store serves the ranks. is_there: something
    listens at MASTER_PORT (None: as store says). port: MASTER_PORT (None: a free one). A job with port, or without store, uses the stand-in."""

    def __init__(self, n, command, standalone=False, restarts=0, store=True, is_there=None, port=None, **variables):
        self.n, self.command, self.restarts, self.standalone, self.store = n, command, restarts, standalone, store
        self.port = port or free_port()
        self.variables, self.n_guests = variables, None
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            self.out, self.errors = out, errors
            if HAS_TORCH and store and port is None:
                self.code = self.by_torchrun()
            else:
                self.code = self.by_stand_in(store if is_there is None else is_there)
            self.stdout, self.stderr = (os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, errors))

    def by_torchrun(self):
        where = ['--standalone'] if self.standalone else ['--master-addr=127.0.0.1', f'--master-port={self.port}']
        agent = subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', '--no-python', f'--nproc-per-node={self.n}',
                                  f'--max-restarts={self.restarts}', *where, *self.command], env=environment(**self.variables),
                                 stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.errors, start_new_session=True)
        try:
            return agent.wait(LIMIT)
        finally:
            end([agent])

    def by_stand_in(self, is_there):
        self.run_id = str(uuid.uuid4()) if self.standalone else 'none'
        with contextlib.ExitStack() as held:
            store = held.enter_context(socket.create_server(('127.0.0.1', self.port))) if is_there else None
            for attempt in range(self.restarts + 1):
                code = self.attempt(attempt)
                if code == 0:
                    break
            if store:
                self.n_guests = self.guests(store)
        return code

    def attempt(self, attempt):
        """Runs the ranks. Ends all after the first failure and returns its code; 0 if none fails."""
        ranks = []
        try:
            for rank in range(self.n):
                ranks.append(subprocess.Popen(self.command, env=environment(**self.variables, **self.of_rank(rank, attempt)), stdin=subprocess.DEVNULL,
                                              stdout=self.out, stderr=self.errors, start_new_session=True))
            until = time.monotonic() + LIMIT
            while time.monotonic() < until:
                codes = [rank.poll() for rank in ranks]
                if any(codes):
                    return next(code for code in codes if code)
                if None not in codes:
                    return 0
                time.sleep(0.01)
            raise AssertionError(f'not over after {LIMIT} s: {self.command}')
        finally:
            end(ranks)

    def of_rank(self, rank, attempt):
        n = str(self.n)
        return {
            'RANK': str(rank), 'LOCAL_RANK': str(rank), 'ROLE_RANK': str(rank), 'GROUP_RANK': '0', 'ROLE_NAME': 'default',
            'WORLD_SIZE': n, 'LOCAL_WORLD_SIZE': n, 'ROLE_WORLD_SIZE': n, 'GROUP_WORLD_SIZE': '1',
            'MASTER_ADDR': 'localhost' if self.standalone else '127.0.0.1', 'MASTER_PORT': str(self.port),
            'TORCHELASTIC_RESTART_COUNT': str(attempt), 'TORCHELASTIC_MAX_RESTARTS': str(self.restarts), 'TORCHELASTIC_RUN_ID': self.run_id,
            'TORCHELASTIC_USE_AGENT_STORE': str(self.store), 'TORCH_NCCL_ASYNC_ERROR_HANDLING': '1', 'OMP_NUM_THREADS': '1',
        }

    @staticmethod
    def guests(store):
        store.setblocking(False)
        for n in range(1000):
            try:
                store.accept()[0].close()
            except BlockingIOError:
                return n
        return 1000


def of_zero_run(n, command, **variables):
    done = subprocess.run([ZERO_RUN, '-n', str(n), '--raw', *command], env=environment(**variables), stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bits(text):
    return json.loads(re.search('^{"event":"summary".*}$', text, re.MULTILINE)[0])['state_sha256']


class Torchrun(unittest.TestCase):
    def launch(self, n, command, **more):
        """Runs a job that must succeed, and whose ranks must not connect to torchrun's store."""
        job = Launched(n, command, **more)
        self.assertEqual(job.code, 0, job.stdout + job.stderr)
        self.assertIn(job.n_guests, (None, 0))
        return job

    def test_program(self):
        for n, standalone in ((2, True), (4, False)):
            with self.subTest(n=n, standalone=standalone):
                job = self.launch(n, [PROGRAM], standalone=standalone, ZERO_JOB_KEY=KEY)
                self.assertEqual(job.stdout, of_zero_run(n, [PROGRAM]))
                self.assertIn('step 200 loss', job.stdout)
                if not HAS_TORCH:
                    self.assertEqual(job.stderr, '')

    def test_training(self):
        for n, arguments in ((3, []), (4, ['--hybrid=hfsdp', '--dp-replicate=2', '--accum=2'])):
            with self.subTest(n=n):
                job = self.launch(n, [*TRAIN, *arguments], ZERO_LOG='stderr')
                self.assertEqual(bits(job.stdout), bits(of_zero_run(n, [*TRAIN, *arguments])))
                self.assertIn(f'rank {n - 1} of {n}, found in: torchrun (WORLD_SIZE is {n}); where ranks meet, in: MASTER_ADDR', job.stderr)
                self.assertEqual(job.stderr.count('this job has no key'), 1)

    def test_started_again(self):
        """Rank 1 ends while the others wait for it. In the next attempt all ranks meet at the same address."""
        script = 'test $TORCHELASTIC_RESTART_COUNT$RANK = 01 && exit 3; exec "$0" "$@"'
        job = self.launch(3, ['sh', '-c', script, *TRAIN], restarts=1)
        self.assertEqual(bits(job.stdout), bits(of_zero_run(3, TRAIN)))

    def test_port_for_the_ranks(self):
        """If torchrun's store does not serve the ranks, rank 0 may listen at MASTER_PORT."""
        job = self.launch(2, [PROGRAM], store=False, ZERO_JOB_KEY=KEY)
        self.assertEqual((job.stdout, job.stderr), (of_zero_run(2, [PROGRAM]), ''))

    def test_port_in_use(self):
        """The port is taken: MASTER_PORT by a store that torchrun does not declare, or the next port after a declared store."""
        for store in (False, True):
            port = free_port()
            with self.subTest(store=store), socket.create_server(('127.0.0.1', port + 1)):
                job = Launched(2, [PROGRAM], store=store, is_there=True, port=port)
                self.assertEqual(job.code, 1)
                self.assertRegex(job.stderr, rf'(?m)^zero_wrap: rank 0 cannot listen at 127\.0\.0\.1:{port + store}\b.*: address already in use; choose another port$')


if __name__ == '__main__':
    print('by torchrun itself' if HAS_TORCH else 'by a stand-in for torchrun: torch cannot be imported')
    unittest.main(argv=sys.argv[:1])
