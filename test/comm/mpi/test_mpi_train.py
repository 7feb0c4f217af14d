#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training run over MPI ends with the same bits as over shared memory, under each MPI's launcher. Mistakes
in using the launcher get a clear error.

    test_mpi_train.py KEY ZERO_BENCH ZERO_RUN OTHER_KEY
"""
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import under_mpi

KEY, BENCH, RUN, OTHER = sys.argv[1:5]
LAUNCHER = under_mpi.LAUNCHERS[KEY]
TRAIN = ["train", "--steps=3", "--layers=2", "--threads=1"]
PAUSED = ["train", "--steps=1000000", "--layers=2", "--threads=1", "--stage=3", "--json"]


# Ranks are stopped and continued one after the other, which takes some time on a busy machine.
WAIT_MS = 3000


def read_steps(out, n):
    """Reads output lines until n of them report steps."""
    while n:
        line = out.readline()
        if not line or b"zero-bench train: " in line:
            raise AssertionError(f"the ranks have ended: {line + out.read()}")
        n -= b'"step"' in line


def pause(pids, seconds, out):
    """Stops the processes for that many seconds, and reads what they wrote before."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    while select.select([out], [], [], 0)[0] and os.read(out.fileno(), 1 << 16):
        pass
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def call(command, **more):
    done = subprocess.run(command, env={**under_mpi.environment(), **more}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=under_mpi.SECONDS)
    return done.returncode, done.stdout, done.stderr


class Train(unittest.TestCase):
    def train(self, launcher, n, arguments, **more):
        code, out, err = call([*launcher, "-n", str(n), BENCH, *TRAIN, *arguments], **more)
        self.assertEqual(code, 0, out + err)
        return re.search(r"state sha256 (\w+)", out)[1]

    def test_same_bits(self):
        """On one host all data go through shared memory. Where each rank is a host, all go over MPI."""
        apart = ["sh", "-c", 'export ZERO_HOST_ID=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; exec "$@"', "sh"]
        for n, arguments in ((3, ["--stage=3"]), (4, ["--stage=3", "--hybrid=hfsdp", "--dp-replicate=2", "--accum=2"])):
            want = self.train([RUN], n, arguments, ZERO_BACKEND="shm")
            for on_hosts in ([], apart):
                with self.subTest(n=n, arguments=arguments, on_hosts=on_hosts):
                    code, out, err = call([*LAUNCHER, "-n", str(n), *on_hosts, BENCH, *TRAIN, *arguments], ZERO_BACKEND="mpi", ZERO_LOG="stderr",
                                          ZERO_DETERMINISTIC="1")
                    self.assertEqual(code, 0, out + err)
                    self.assertEqual("shared inside hosts" in err, not on_hosts, err)
                    self.assertEqual(re.search(r"state sha256 (\w+)", out)[1], want)

    def test_paused(self):
        """All ranks stand still for longer than their timeout, as on a suspended machine, and then go on."""
        with tempfile.TemporaryDirectory() as folder:
            script = f'echo $$ > {folder}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; exec "$@"'
            env = {**under_mpi.environment(), "ZERO_BACKEND": "mpi", "ZERO_TIMEOUT_MS": str(WAIT_MS), "ZERO_START_TIMEOUT_MS": "120000"}
            with subprocess.Popen([*LAUNCHER, "-n", "2", "sh", "-c", script, "sh", BENCH, *PAUSED], env=env, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0) as ranks:
                try:
                    read_steps(ranks.stdout, 1)
                    pids = []
                    for name in "01":
                        with open(os.path.join(folder, name), encoding="ascii") as f:
                            pids.append(int(f.read()))
                    pause(pids, 1.5 * WAIT_MS / 1000, ranks.stdout)
                    read_steps(ranks.stdout, 20)
                finally:
                    os.killpg(ranks.pid, signal.SIGKILL)

    SCATTERED = "the ranks of a host are not consecutive (host 0 has 2 ranks (0, "

    def test_same_bits_on_hosts(self):
        """One machine poses as several hosts: shared memory inside each, MPI between them. The bits are those
        of one host, and the log says whether sums are made by host."""
        whole = ["--stage=3", "--accum=2"]
        by_host, by_rank = "2 ranks on each of 2 hosts: shared memory inside a host", "sums are made rank by rank over MPI"
        hsdp = [*whole, "--dp-replicate=2"]
        blocks, robin, uneven, mixed = "R / 2", "R % 2", "R / 3", "(R + 1) / 2 % 2"
        for host, n, arguments, said in ((blocks, 4, whole, by_host), (blocks, 4, [*whole, "--dtype=bf16"], by_host), (blocks, 3, whole, by_rank),
                                         (blocks, 4, hsdp, "shared memory among the 2 ranks of a group"), (robin, 4, whole, by_rank),
                                         (robin, 4, ["--stage=1"], by_rank), (robin, 4, hsdp, self.SCATTERED), (uneven, 4, whole, by_rank),
                                         (mixed, 4, whole, by_rank)):
            with self.subTest(host=host, n=n, arguments=arguments):
                script = f'R=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; export ZERO_HOST_ID=$(({host})); exec "$@"'
                code, out, err = call([*LAUNCHER, "-n", str(n), "sh", "-c", script, "sh", BENCH, *TRAIN, *arguments], ZERO_BACKEND="mpi",
                                      ZERO_LOG="stderr", ZERO_DETERMINISTIC="1")
                self.assertEqual(code, 0, out + err)
                self.assertIn(said, out + err)
                self.assertEqual(self.SCATTERED in out + err, host in (robin, mixed))
                self.assertIn("; where ranks meet, in: MPI\n", out + err)
                self.assertNotIn("this job has no key", out + err)  # the job has a generated key
                self.assertRegex(out, r"(?m)^total +(\S+ MB) +\1$")  # planned = allocated
                self.assertEqual(re.search(r"state sha256 (\w+)", out)[1], self.train([RUN], n, arguments, ZERO_BACKEND="shm"))

    def test_no_launcher_of_an_mpi(self):
        code, out, err = call([RUN, "-n", "2", BENCH, *TRAIN], ZERO_BACKEND="mpi")
        self.assertNotEqual(code, 0)
        self.assertIn("backend is mpi, but zero-run started this rank (ZERO_WORLD_SIZE is 2), and zero-run starts no MPI", out + err)
        script = 'for r in 0 1; do ZERO_RANK=$r "$@" & done; wait'
        code, out, err = call(["sh", "-c", script, "sh", BENCH, *TRAIN], ZERO_BACKEND="mpi", ZERO_WORLD_SIZE="2",
                              ZERO_RENDEZVOUS=f"file://{tempfile.gettempdir()}", ZERO_JOB_KEY=os.urandom(16).hex())
        self.assertEqual(err.count("backend mpi needs ranks that one mpirun of Open MPI or one mpiexec of MPICH has started"), 2, out + err)

    @unittest.skipUnless(shutil.which(under_mpi.LAUNCHERS[OTHER][0]), "there is one MPI only")
    def test_other_launcher(self):
        """Under the other MPI's launcher every rank would train alone."""
        code, out, err = call([*under_mpi.LAUNCHERS[OTHER], "-n", "2", BENCH, *TRAIN], ZERO_BACKEND="mpi")
        self.assertNotEqual(code, 0)
        names = {"ompi": ("MPICH's launcher", "Open MPI v"), "mpich": ("Open MPI's mpirun", "MPICH ")}[KEY]
        self.assertRegex(out + err, "this rank was started by {} \\(.*\\), but libzero was built for {}.*, which sees 1 rank".format(*names))

    def test_rank_that_differs(self):
        """One rank has another ZeRO stage: every rank gets the error."""
        script = f'if [ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 1 ]; then export ZERO_STAGE=2; fi; exec {BENCH} {" ".join(TRAIN)} --stage=3'
        code, out, err = call([*LAUNCHER, "-n", "3", "sh", "-c", script], ZERO_BACKEND="mpi")
        self.assertNotEqual(code, 0)
        self.assertIn("stage is 2 on rank 1 and 3 on rank 0", out + err)


if __name__ == "__main__":
    if not shutil.which(LAUNCHER[0]):
        sys.exit(under_mpi.skip(f"there is no {LAUNCHER[0]}"))
    unittest.main(argv=sys.argv[:1] + sys.argv[5:])
