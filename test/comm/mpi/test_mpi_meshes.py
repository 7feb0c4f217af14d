#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All meshes of 2, 4 and 8 ranks train over MPI with the losses, norms and weights of shared memory on one
host. The machine poses as one or several hosts, so tensor and context parallelism, pipelines and data
parallelism go through shared memory, over MPI, or both.

    test_mpi_meshes.py KEY ZERO_BENCH ZERO_RUN

A sample is run, drawn from SEED (printed; by default the time). N_MESHES=all runs all of them, in about half
an hour.
"""
import os
import random
import shutil
import sys
import time
import unittest

import under_mpi

KEY = sys.argv.pop(1)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bench"))
import bench_program  # noqa: E402
from test_bench_context import FORMS, ORDERS, SIZES as ROWS, cp_args  # noqa: E402
from test_bench_meshes import MESHES, SIZES, axes, run_of, schedules  # noqa: E402

# A rank's host: all ranks on one; consecutive ranks together; neighbours apart; each rank alone.
HOSTS = ["0", "R / (N > 2 ? N / 2 : 1)", "R % 2", "R / 2 + R % 2", "R"]


def over_mpi(host, n, args):
    """Returns the losses and norms of each step, and the hash of the state."""
    script = f'R=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} N={n}; export ZERO_HOST_ID=$(({host})); exec "$@"'
    command = [*under_mpi.LAUNCHERS[KEY], "-n", str(n), "sh", "-c", script, "sh", bench_program.ZERO_BENCH, "train", "--json", "--steps=3", "--threads=1",
               "--deterministic=on", *args]
    done = bench_program.run(command, env={**under_mpi.environment(), "ZERO_BACKEND": "mpi"}, timeout=under_mpi.SECONDS)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    *steps, summary = bench_program.lines(done.stdout)
    assert summary["bytes"] == summary["planned_bytes"], command
    return [(s["loss"], s["grad_norm"]) for s in steps], summary["state_sha256"]


def sample(cases, n):
    """Returns the cases, or n of them, and what draws for them."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 10**9)
    print(f"SEED={seed}", flush=True)
    draw = random.Random(seed)
    return (cases if os.environ.get("N_MESHES") == "all" else draw.sample(cases, n)), draw


class Meshes(unittest.TestCase):
    def test_the_bits_of_one_host(self):
        cases, draw = sample([(mesh, stage, how) for mesh in MESHES if max(mesh[0], mesh[2]) > 1 for stage in range(4) for how in schedules(mesh[0])], 8)
        for mesh, stage, how in cases:
            host = draw.choice(HOSTS)
            how = [*how, f"--stage={stage}", draw.choice(["--prefetch=0", "--prefetch=2"])]
            with self.subTest(mesh=mesh, how=how, host=host):
                self.assertEqual(over_mpi(host, mesh[0] * mesh[1] * mesh[2], [*SIZES, *axes(*mesh), *how]), run_of(1, 8 // mesh[2], mesh[2]))


class Context(unittest.TestCase):
    def test_the_bits_of_one_host(self):
        cases, draw = sample([(cp, more, stage, form, order) for cp, more in ((2, []), (2, ["--tp=2"]), (2, ["--pp=2"]), (4, [])) for stage in range(4)
                              for form in FORMS for order in ORDERS], 4)
        for cp, more, stage, form, order in cases:
            host = draw.choice(HOSTS)
            args, n = [*ROWS, *cp_args(cp, form, order), *more, f"--stage={stage}", "--accum=2"], cp * (2 if more else 1)
            with self.subTest(args=args, host=host):
                steps, summary = bench_program.train(n, *args, "--steps=3")
                self.assertEqual(over_mpi(host, n, args), ([(s["loss"], s["grad_norm"]) for s in steps], summary["state_sha256"]))


if __name__ == "__main__":
    if not shutil.which(under_mpi.LAUNCHERS[KEY][0]):
        sys.exit(under_mpi.skip(f"there is no {under_mpi.LAUNCHERS[KEY][0]}"))
    unittest.main()
