#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model whose masters and optimizer states are larger than the memory that its process may have. With
them in a file it trains, saves and goes on, with the bits of a run without a limit. With them in memory it is
refused. Where the machine allows it, a control group limits all memory, so that a process which needs more is killed.

    test_checkpoint_limit.py ZERO_BENCH
"""
import contextlib
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
# For weights, gradients, buffers and stacks of threads. A load has no room for a copy of anything.
LIMIT = 190 << 20
CONTROL_GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),  # memsw: memory and swap
                  ("/sys/fs/cgroup", "memory.max", "memory.swap.max"))


def write_setting(path, text):
    """Writes to a file that exists. Where the folder is no control group, open() would make an ordinary file."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


@contextlib.contextmanager
def control_group(limit):
    """Gives the folder of a new control group, or None where there can be none."""
    for parent, setting, swap in CONTROL_GROUPS:
        group = os.path.join(parent, f"zero-test-{os.getpid()}")
        try:
            os.mkdir(group)
        except OSError:
            continue
        try:
            write_setting(os.path.join(group, setting), str(limit))
        except OSError:
            os.rmdir(group)
            continue
        with contextlib.suppress(OSError):  # a kernel that counts swap
            write_setting(os.path.join(group, swap), str(limit if "memsw" in swap else 0))
        try:
            yield group
        finally:
            os.rmdir(group)
        return
    yield None


def limited(limit, group):
    """Limits a process to private memory, and to all memory if there is a control group."""
    def apply():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if group:
            write_setting(os.path.join(group, "cgroup.procs"), str(os.getpid()))
    return apply if limit else None


def run(limit, *args, group=None):
    return subprocess.run([BENCH, *args, *MODEL, "--dtype", "bf16", "--json"], capture_output=True, text=True, check=False,
                          timeout=600, preexec_fn=limited(limit, group), env={**os.environ, "OMP_NUM_THREADS": "2"})


def check(condition, what, done):
    if not condition:
        print(f"{what}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        sys.exit(1)


def state_of(done):
    check(done.returncode == 0, f"exit code {done.returncode}: {done.args}", done)
    return re.findall(r'"state_sha256":\s*"([0-9a-f]+)"', done.stdout)[-1]


def main():
    with tempfile.TemporaryDirectory() as root, control_group(LIMIT) as group:
        os.environ["ZERO_STATES_DIR"] = root
        data = os.path.join(root, "text")
        with open(data, "w", encoding="utf-8") as f:
            f.write("It was the best of times, it was the worst of times. " * 50)
        train = ["train", "--data", data, "--batch", "1", "--stage", "0", "--grad-sum-dtype", "bf16"]
        saving = ["--save", os.path.join(root, "run"), "--save-every", "1", "--load", "latest"]
        want = state_of(run(0, *train, "--steps", "5"))
        os.environ["ZERO_STATES"] = "device"
        done = run(LIMIT, *train, "--steps", "2")
        check(done.returncode != 0 and "cannot allocate" in done.stdout + done.stderr, "it fits without a file", done)
        os.environ["ZERO_STATES"] = "file"
        state_of(run(LIMIT, *train, *saving, "--steps", "2", group=group))
        # Masters that become remainders are converted, which takes more memory than a copy.
        for masters, steps in (("f32", 3), ("remainder", 4), ("f32", 5)):
            went_on = run(LIMIT, *train, *saving, "--masters", masters, "--steps", str(steps), group=group)
            last = state_of(went_on)
            check(f'"step":{steps},' in went_on.stdout and f'"step":{steps - 1},' not in went_on.stdout, "it did not go on",
                  went_on)
        check(last == want, "other bits than with states in memory", went_on)
        check(os.listdir(root) in (["run", "text"], ["text", "run"]), f"left behind: {os.listdir(root)}", went_on)
    print(f"{12 * N_PARAMS >> 20} MiB of states, {LIMIT >> 20} MiB of "
          f"{'all memory' if group else 'private memory, because no control group can be made here'}")


main()
