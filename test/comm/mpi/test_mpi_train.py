#!/usr/bin/env python3
"""A training run over MPI ends in the very bits of the same run over shared memory, under each MPI's launcher; and what a user can do
wrong with the launcher is an error that says so.

    test_mpi_train.py KEY ZERO_BENCH ZERO_RUN OTHER_KEY
"""
import os
import re
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
PAUSED = ["train", "--seconds=4", "--layers=2", "--threads=1", "--stage=3", "--json"]


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
        """On one host all data go through shared memory; where each rank is a host of its own, over MPI."""
        apart = ["sh", "-c", 'export ZERO_HOST_ID=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; exec "$@"', "sh"]
        for n, arguments in ((3, ["--stage=3"]), (4, ["--stage=3", "--hybrid=hfsdp", "--shard-group=2", "--accum=2"])):
            want = self.train([RUN], n, arguments, ZERO_BACKEND="shm")
            for on_hosts in ([], apart):
                with self.subTest(n=n, arguments=arguments, on_hosts=on_hosts):
                    code, out, err = call([*LAUNCHER, "-n", str(n), *on_hosts, BENCH, *TRAIN, *arguments], ZERO_BACKEND="mpi", ZERO_LOG="stderr",
                                          ZERO_DETERMINISTIC="1")
                    self.assertEqual(code, 0, out + err)
                    self.assertEqual("shared inside hosts" in err, not on_hosts, err)
                    self.assertEqual(re.search(r"state sha256 (\w+)", out)[1], want)

    def test_paused(self):
        """All ranks stand still for longer than they wait for each other, as a suspended machine's do, and go on."""
        with tempfile.TemporaryDirectory() as folder:
            script = f'echo $$ > {folder}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; exec "$@"'
            ranks = subprocess.Popen([*LAUNCHER, "-n", "2", "sh", "-c", script, "sh", BENCH, *PAUSED],
                                     env={**under_mpi.environment(), "ZERO_BACKEND": "mpi", "ZERO_TIMEOUT_MS": "1000"}, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            while '"step"' not in ranks.stdout.readline() and ranks.poll() is None:
                pass  # until it trains
            pids = []
            for name in "01":
                with open(os.path.join(folder, name), encoding="ascii") as f:
                    pids.append(int(f.read()))
            for _ in range(2):
                for sig, seconds in ((signal.SIGSTOP, 1.5), (signal.SIGCONT, 0.3)):
                    for pid in pids:
                        os.kill(pid, sig)
                    time.sleep(seconds)
            out = ranks.communicate(timeout=under_mpi.SECONDS)[0]
            self.assertEqual(ranks.returncode, 0, out)

    SCATTERED = "the ranks of a host are not consecutive (host 0 has 2 ranks (0, "

    def test_same_bits_on_hosts(self):
        """One machine as several hosts: shared memory inside each, MPI between, and the bits of one; as the log says, sums by host or not."""
        whole = ["--stage=3", "--accum=2"]
        by_host, by_rank = "2 ranks on each of 2 hosts: shared memory inside a host", "sums are made rank by rank over MPI"
        hsdp = [*whole, "--hybrid=hsdp", "--shard-group=2"]
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
                self.assertNotIn("this job has no key", out + err)  # they have made one
                self.assertRegex(out, r"(?m)^total +(\S+ MB) +\1$")  # what the plan says, staging with it, is what there is
                self.assertEqual(re.search(r"state sha256 (\w+)", out)[1], self.train([RUN], n, arguments, ZERO_BACKEND="shm"))

    def test_no_launcher_of_an_mpi(self):
        """zero-run starts ranks that MPI knows nothing of."""
        code, out, err = call([RUN, "-n", "2", BENCH, *TRAIN], ZERO_BACKEND="mpi", ZERO_MPI=KEY)
        self.assertNotEqual(code, 0)
        self.assertIn("backend mpi needs ranks that one mpirun of Open MPI or one mpiexec of MPICH has started", out + err)

    def test_other_mpi(self):
        code, out, err = call([*LAUNCHER, "-n", "2", BENCH, *TRAIN], ZERO_BACKEND="mpi", ZERO_MPI=OTHER)
        self.assertNotEqual(code, 0)
        self.assertIn(f"mpi is {OTHER}, but this rank was started by", out + err)

    def test_rank_that_differs(self):
        """One rank at another stage: every rank is told."""
        script = f'if [ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 1 ]; then export ZERO_STAGE=2; fi; exec {BENCH} {" ".join(TRAIN)} --stage=3'
        code, out, err = call([*LAUNCHER, "-n", "3", "sh", "-c", script], ZERO_BACKEND="mpi")
        self.assertNotEqual(code, 0)
        self.assertIn("stage is 2 on rank 1 and 3 on rank 0", out + err)


if __name__ == "__main__":
    if not shutil.which(LAUNCHER[0]):
        sys.exit(under_mpi.skip(f"there is no {LAUNCHER[0]}"))
    unittest.main(argv=sys.argv[:1] + sys.argv[5:])
