#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model whose masters and optimizer states are larger than the memory that its process may have. With
them in a file it trains, saves and goes on, with the bits of a run without a limit. With them in memory it is
refused.

    test_checkpoint_limit.py ZERO_BENCH
"""
import json
import os
import re
import resource
import subprocess
import sys
import tempfile

BENCH = sys.argv[1]
# 25 million parameters in bf16: 12 bytes each of masters and states, and 4 bytes of weights and gradients, which are their own sums.
MODEL = ["--layers", "8", "--heads", "4", "--channels", "512", "--vocab", "256", "--context", "16"]
N_PARAMS = 25 << 20
# Private memory, for weights, gradients, a copy of the weights in a load, buffers and stacks of threads: less than the
# states take.
LIMIT = 240 << 20


def limited(limit):
    def apply():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return apply if limit else None


def run(limit, *args):
    return subprocess.run([BENCH, *args, *MODEL, "--dtype", "bf16", "--json"], capture_output=True, text=True, check=False,
                          timeout=600, preexec_fn=limited(limit), env={**os.environ, "OMP_NUM_THREADS": "2"})


def check(condition, what, done):
    if not condition:
        print(f"{what}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        sys.exit(1)


def state_of(done):
    check(done.returncode == 0, f"exit code {done.returncode}: {done.args}", done)
    return re.findall(r'"state_sha256":\s*"([0-9a-f]+)"', done.stdout)[-1]


def main():
    with tempfile.TemporaryDirectory() as root:
        os.environ["ZERO_STATES_DIR"] = root
        data = os.path.join(root, "text")
        with open(data, "w", encoding="utf-8") as f:
            f.write("It was the best of times, it was the worst of times. " * 50)
        train = ["train", "--data", data, "--batch", "1", "--stage", "0", "--grad-sum", "bf16"]
        saving = ["--save", os.path.join(root, "run"), "--save-every", "1", "--load", "latest"]
        want = state_of(run(0, *train, "--steps", "4"))
        os.environ["ZERO_STATES"] = "device"
        done = run(LIMIT, *train, "--steps", "2")
        check(done.returncode != 0 and "cannot allocate" in done.stdout + done.stderr, "it fits without a file", done)
        os.environ["ZERO_STATES"] = "file"
        state_of(run(LIMIT, *train, *saving, "--steps", "2"))
        went_on = run(LIMIT, *train, *saving, "--steps", "4")
        check(state_of(went_on) == want, "other bits than with states in memory", went_on)
        check('"step":3,' in went_on.stdout and '"step":2,' not in went_on.stdout, "it did not go on", went_on)
        check(os.listdir(root) in (["run", "text"], ["text", "run"]), f"left behind: {os.listdir(root)}", went_on)
    print(f"{12 * N_PARAMS >> 20} MiB of states, {LIMIT >> 20} MiB of memory")


main()
