#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests programs that use MPI themselves. They lend a communicator or leave MPI to the library, and each
mistake they can make gets a clear error.

    test_mpi_program.py KEY PROGRAM OTHER

OTHER is the folder of libzero with its module for the other MPI, or empty.
"""
import os
import shutil
import subprocess
import sys
import unittest

import under_mpi

KEY, PROGRAM, OTHER = sys.argv[1:4]
LAUNCHER = under_mpi.LAUNCHERS[KEY]
RANKS = 3


class Program(unittest.TestCase):
    def told(self, what, code=0, args=(), wrapper=(), **more):
        done = subprocess.run([*LAUNCHER, "-n", str(RANKS), *wrapper, PROGRAM, what, *args], env={**under_mpi.environment(), **more}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=under_mpi.SECONDS)
        if code is not None:
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.warned = [line for line in done.stderr.splitlines() if ": warning: " in line]
        return [line.split(": ", 1)[1] for line in done.stdout.splitlines() if line.startswith("rank ")]

    def every(self, told, text):
        self.assertEqual(len(told), RANKS, told)
        for line in told:
            self.assertIn(text, line)

    def test_lends(self):
        for what in ("lends", "reordered", "part"):
            self.every(self.told(what), "trained")

    def test_left_to_the_library(self):
        self.every(self.told("begun_here"), "trained")

    def test_wrapped(self):
        """Ranks meet without MPI, though each is the child of a wrapper."""
        self.every(self.told("without", ZERO_BACKEND="shm", wrapper=("sh", "-c", '"$@"; exit $?', "sh")), "trained")

    def test_too_weak(self):
        self.every(self.told("serialized"), "with MPI_THREAD_SERIALIZED, but MPI_THREAD_MULTIPLE is needed")

    @unittest.skipUnless(os.path.exists(f"{OTHER}/libzero-mpi.so"), "there is one MPI only")
    def test_other_mpi(self):
        """The program uses one MPI, and libzero is built for the other."""
        names = {"ompi": ("Open MPI v", "MPICH "), "mpich": ("MPICH ", "Open MPI ")}[KEY]
        told = self.told("lends", code=None, LD_LIBRARY_PATH=OTHER)
        self.assertEqual(len(told), RANKS, told)
        for line in told:
            self.assertRegex(line, "this process has loaded {}.* \\(.*\\), but libzero was built for {}.* \\(.*libzero-mpi.so\\)".format(*names))

    def test_null(self):
        self.every(self.told("null"), "mpi_comm points to MPI_COMM_NULL on this rank")

    def test_finalized_early(self):
        """The error comes at once and from every call that follows. The process may not get that far: MPICH
        4.0 may abort it."""
        told = self.told("early", code=None)
        if KEY == "ompi" or len(told) == RANKS:
            self.every(told, "the program called MPI_Finalize before zero_unwrap")
        self.every([line for line in self.warned if "MPI_Finalize" in line], "the program calls MPI_Finalize before zero_unwrap")

    def test_contradicts(self):
        """The configuration contradicts the communicator."""
        self.every(self.told("other_rank"), "of 3; they must be the same")
        self.every(self.told("lends", code=None, ZERO_BACKEND="shm"), "backend is shm, but mpi_comm is set; allowed: auto, mpi")

    def test_left_over(self):
        """Variables of another launcher are left over. No rank trains alone, with or without backend mpi."""
        other = {"ompi": ("PMI_RANK", "PMI_SIZE"), "mpich": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}[KEY]
        plain = dict(RANK="0", WORLD_SIZE="1")
        for more in (plain, {**plain, "ZERO_RANK": "0", "ZERO_WORLD_SIZE": "1", "ZERO_JOB": "left"}, {**plain, "LOCAL_WORLD_SIZE": "1"},
                     dict(zip(other, "01"))):
            for backend in ("auto", "mpi"):
                self.every(self.told("told", ZERO_BACKEND=backend, **more), "two launchers contradict each other")
        # torchrun's agents may be MPI's ranks, and ZERO_RANK may be set by the user, but not over MPI.
        agents = {**plain, "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(RANKS)}
        for more in (agents, dict(ZERO_RANK="0", ZERO_WORLD_SIZE="1")):
            self.every(self.told("told", ZERO_BACKEND="mpi", **more), "backend mpi works with the ranks of MPI_COMM_WORLD")
        self.every(self.told("told", ZERO_BACKEND="mpi", SLURM_PROCID="0", SLURM_NTASKS="2", SLURM_STEP_ID="0"), "trained")

    def test_not_what_mpi_says(self):
        """MPI_Comm_rank and MPI_Comm_size contradict the environment."""
        own, local = {"ompi": (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_LOCAL_RANK"),
                      "mpich": (("PMI_RANK", "PMI_SIZE"), "MPI_LOCALRANKID")}[KEY]
        for change, says in (((f"{own[0]}=0", f"{own[1]}=1", local), f"({own[1]} is 1)"),
                             ((*own, "ZERO_RANK=0", "ZERO_WORLD_SIZE=1"), "(ZERO_WORLD_SIZE is 1)"),
                             ((*own, "ZERO_RANK=0", "ZERO_WORLD_SIZE=1", "ZERO_JOB=left"), "(ZERO_WORLD_SIZE is 1)"),
                             ((*own, "RANK=0", "WORLD_SIZE=1", "LOCAL_WORLD_SIZE=1"), "(WORLD_SIZE is 1)"),
                             (own, "(no launcher's variables are set)")):
            told = self.told("told", args=change, ZERO_BACKEND="mpi")
            self.every(told, f"rank 0 of 1 {says} is rank ")
            self.every(told, f"of {RANKS} in MPI_COMM_WORLD: start all ranks by one mpirun")

    def test_late(self):
        """A rank that comes late to one context does not hold up the other contexts of the processes that
        wait for it."""
        self.every(self.told("late"), "trained")

    def test_other_order(self):
        """Two threads may wrap contexts in any order. If one thread does, each rank reports which context
        waits for which rank."""
        self.every(self.told("threads"), "trained")
        self.every(self.told("numbered"), "trained")
        late = r'1 of 3 ranks did not come to zero_wrap of the context "a" over {} in 3500 ms \(start_timeout_ms\): rank 1'
        waits = r'rank 1 waited 3500 ms \(start_timeout_ms\) in zero_wrap of the context "b" for rank 0 of {}'
        names = '{} cfg.launch.name is "a" on rank 0 and "b" on rank 1'
        for what, over, on_others, on_1 in (("crossed", "MPI_COMM_WORLD", names.format(";"), names.format(":")),
                                            ("crossed_user_comm", "mpi_comm", "", ", which has not come")):
            told = sorted(self.told(what))
            self.assertEqual(len(told), RANKS, told)
            for line in told[:2]:
                self.assertRegex(line, late.format(over) + on_others + "$")
            self.assertRegex(told[2], waits.format(over) + on_1 + "$")

    def test_again(self):
        """A zero_wrap to which a rank has not come names the rank. The next one works, over MPI_COMM_WORLD
        and over the program's communicator."""
        told = sorted(self.told("again"))
        self.assertEqual(told[8:], ["trained"] * 4 * RANKS, told)
        for line, over in zip(told, ("MPI_COMM_WORLD",) * 2 + ("mpi_comm",) * 2):
            self.assertIn(f'1 of 3 ranks did not come to zero_wrap of the context "a" over {over} in 2500 ms (start_timeout_ms): rank 2', line)
        for line, (rank, over) in zip(told[4:], ((1, "MPI_COMM_WORLD"), (1, "mpi_comm"), (2, "MPI_COMM_WORLD"), (2, "mpi_comm"))):
            self.assertIn(f'rank {rank} waited 2500 ms (start_timeout_ms) in zero_wrap of the context "a" for rank 0 of {over}, which has not', line)

    def test_forked(self):
        self.every(self.told("forked"), "MPI does not work in a forked child: it began in process ")

    def test_refused_on_one_rank(self):
        """Every rank gets the error, though ranks meet over MPI only because the environment says so."""
        self.every(self.told("refused", ZERO_BACKEND="mpi"), "stage is 7; allowed: 0, 1, 2, 3")


if __name__ == "__main__":
    if not shutil.which(LAUNCHER[0]):
        sys.exit(under_mpi.skip(f"there is no {LAUNCHER[0]}"))
    unittest.main(argv=sys.argv[:1])
