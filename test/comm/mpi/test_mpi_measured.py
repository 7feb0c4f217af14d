#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs zero-bench comm under each MPI's launcher. Checks its rows of libzero's and MPI's own collectives,
whose values are verified.

    test_mpi_measured.py KEY ZERO_BENCH [CLASS[.TEST]...]
"""
import json
import mmap
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

KEY, BENCH = sys.argv[1:3]
LAUNCHER = under_mpi.LAUNCHERS[KEY]
HOSTS = "export ZERO_HOST_ID=$((${OMPI_COMM_WORLD_RANK:-$PMI_RANK} / 2)); "  # two ranks on each host
OWN = {"all_gather": ["MPI_Allgather"], "reduce_scatter": ["MPI_Reduce_scatter", "MPI_Reduce_scatter_block", "MPI_Ireduce_scatter_block"], "agree": []}


def command(n, script, *arguments):
    return [*LAUNCHER, "-n", str(n), "sh", "-c", script + 'exec "$@"', "sh", BENCH, "comm", *arguments]


def comm(n, script, *arguments):
    return subprocess.run(command(n, script, *arguments), env=under_mpi.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=under_mpi.SECONDS)


def told(text, event):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


class Rows(unittest.TestCase):
    def check(self, n, script, *arguments, backends, shared):
        done = comm(n, script, "--rounds=2", "--bytes=1Ki:200Ki", "--factor=64", "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = told(done.stdout, "row")
        for size in {row["bytes"] for row in rows}:
            for op, own in OWN.items():
                there = [row for row in rows if (row["bytes"], row["op"]) == (size, op)]
                self.assertEqual([row["backend"] for row in there if row["path"]], [*backends, *own] if there else [])
                self.assertEqual([row["wrong"] for row in there if row["path"]], [0] * len(backends + own) if there else [])
                self.assertEqual({row["limit"] for row in there if row["path"]}, {row["busbw"] for row in there if not row["path"]} or {None})
        self.assertEqual({row["op"] for row in rows}, set(OWN))
        self.assertEqual({"shared inside hosts" in row["path"] for row in rows if row["backend"] == "mpi"}, {shared})

    def test_one_host(self):
        self.check(3, "", "--backend=shm,mpi", backends=["shm", "mpi"], shared=True)
        self.check(4, "", "--group=2", "--dtype=bf16", "--flat", backends=["shm", "mpi"], shared=False)

    def test_hosts(self):
        self.check(4, HOSTS, "--dtype=bf16", backends=["mpi"], shared=True)
        self.check(4, HOSTS, "--flat", backends=["mpi"], shared=False)

    def test_one_core(self):
        """With late ranks, libzero's gather is still being read when MPI's own would begin to overwrite that
        memory."""
        core = {min(os.sched_getaffinity(0))}
        for _ in range(2):
            done = subprocess.run(command(3, "", "--op=all_gather", "--backend=mpi", "--rounds=1", "--bytes=1Ki:1Mi", "--factor=2"),
                                  env=under_mpi.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=under_mpi.SECONDS,
                                  preexec_fn=lambda: os.sched_setaffinity(0, core))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_table(self):
        """Columns are as wide as their names. bf16 has rows too, with what they are compared to."""
        for dtype in ["f32", "bf16"]:
            done = comm(2, "", "--rounds=1", "--bytes=4Ki", "--backend=mpi", f"--dtype={dtype}")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual("# MPI has no bf16: its own sums are of as many elements of fp32" in done.stdout.splitlines(), dtype == "bf16")
            rows = [line for line in done.stdout.splitlines() if re.match("# op|[a-z]", line)]
            self.assertEqual(len({len(line) for line in rows}), 1, done.stdout)


class Wrong(unittest.TestCase):
    def test_found(self):
        """Overwrites rank 1's input while it is measured, in its arena, which ranks of its host map. The
        check must find both libzero's and MPI's results wrong."""
        for op in ["all_gather", "reduce_scatter"]:
            with self.subTest(op=op):
                for rounds in 40, 160, 640:  # on a busy machine few rounds may overlap with the overwriting
                    if self.found(op, rounds):
                        break
                else:
                    self.fail("nothing was overwritten in time")

    def found(self, op, rounds):
        """Returns whether all rounds were overwritten while they were measured."""
        n, size, spoilt = 4, 1 << 20, 100
        with tempfile.TemporaryDirectory() as folder:
            note = HOSTS + f"echo $$ > {folder}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; "
            ranks = subprocess.Popen(command(n, note, f"--op={op}", f"--bytes={size}", f"--rounds={rounds}", "--json"), env=under_mpi.environment(),
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
            try:
                self.spoil(ranks, os.path.join(folder, "1"), {"all_gather": size // n, "reduce_scatter": size + size // n}[op], spoilt)
            finally:
                out, err = self.end(ranks)
        wrong = {row["backend"]: row["wrong"] for row in told(out, "row") if row["path"]}
        most = 2 * spoilt * (n if op == "all_gather" else 1)  # some may come before the rounds, or after them
        self.assertEqual(list(wrong), ["mpi", *OWN[op]], out + err)
        if sum(wrong.values()):
            self.assertNotEqual(ranks.returncode, 0)
            self.assertIn(f"zero-bench comm: {sum(wrong.values())} elements were wrong", err)
        for backend, elements in wrong.items():
            self.assertLessEqual(elements, most, backend)
        return all(elements >= most // 2 for elements in wrong.values())

    def end(self, ranks):
        try:
            return ranks.communicate(timeout=under_mpi.SECONDS)
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGKILL)

    def arenas_of(self, pid_file):
        """Returns the process's file descriptors of arenas. Returns none until it has written its id and made
        a large one."""
        found = []
        try:
            with open(pid_file, encoding="ascii") as f:
                folder = f"/proc/{int(f.read())}/fd"
            listed = os.listdir(folder)
        except (FileNotFoundError, ValueError):  # not yet, or no longer there
            return found
        for fd in listed:
            path = f"{folder}/{fd}"
            try:
                found += [path] if "memfd:zero-mpi-arena" in os.readlink(path) and os.stat(path).st_size else []
            except FileNotFoundError:  # closed meanwhile
                pass
        return found

    def spoil(self, ranks, pid_file, at, n_floats):
        """Begins before anything is measured. On a busy machine rank 0's output may arrive here when all is
        over."""
        until = time.monotonic() + under_mpi.SECONDS
        arenas = []
        while not arenas and ranks.poll() is None and time.monotonic() < until:
            arenas = self.arenas_of(pid_file)
        self.assertLessEqual(len(arenas), 1)
        if not arenas:  # the ranks ended before the search
            return
        fd = os.open(arenas[0], os.O_RDWR)
        with mmap.mmap(fd, 0) as arena:
            os.close(fd)
            while ranks.poll() is None and time.monotonic() < until:
                arena[at:at + 4 * n_floats] = b"\xff" * (4 * n_floats)
                time.sleep(0.001)


if __name__ == "__main__":
    if not shutil.which(LAUNCHER[0]):
        sys.exit(under_mpi.skip(f"there is no {LAUNCHER[0]}"))
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
