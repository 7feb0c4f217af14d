#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a run that saves every step, with SIGKILL at random moments. It always continues from a committed
step, and ends with the result of an uninterrupted run. One rank has its masters and states in a file.

    test_checkpoint_kill.py ZERO_BENCH ZERO_RUN

N_KILLS and SEED in the environment set the number of kills and the draws.
"""
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

BENCH, RUN = sys.argv[1:3]
N_KILLS = int(os.environ.get("N_KILLS", "200"))
SEED = int(os.environ.get("SEED", str(time.time_ns())))
STEPS = 300
MODEL = ["--layers", "2", "--heads", "2", "--channels", "16", "--context", "16", "--batch", "1", "--json"]


def command(data, world, stage, steps, *more):
    start = [RUN, "-n", str(world)] if world > 1 else []
    return [*start, BENCH, "train", *MODEL, "--data", data, "--stage", str(stage), "--steps", str(steps), *more]


def events(text):
    for line in text.splitlines():
        found = re.search(r"\{.*\}", line)
        if found:
            try:
                yield json.loads(found[0])
            except ValueError:
                pass  # cut by the kill


def fail(what, text):
    print(f"SEED={SEED}: {what}\n{text[-3000:]}")
    sys.exit(1)


def finish(*args):
    done = subprocess.run(command(*args), capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        fail(f"exit code {done.returncode}: {args}", done.stdout + done.stderr)
    summary = [e for e in events(done.stdout) if e["event"] == "summary"]
    return summary[-1]["state_sha256"]


def adopt_orphans():
    """Makes this process the parent of ranks whose zero-run was killed, so that it can wait for them."""
    PR_SET_CHILD_SUBREAPER = 36
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("prctl failed")


def wait_for_orphans():
    """Waits for the ranks' end: one killed in a system call still completes that call, such as a rename."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def killed(args, rng, path):
    """Starts a run and kills it. The kill comes at any time after the start or, more often, after the run
    reported some steps. Even on a slow machine all of these but the last two are saved by then. Returns the
    reported steps."""
    with open(path, "w+", encoding="utf-8") as out:
        run = subprocess.Popen(command(*args), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.001, 0.1))
        else:
            n_steps = rng.choice([1, 2, 4, 5, 6, 8, 12, 20])
            while run.poll() is None and open(path, encoding="utf-8").read().count('"step":') < n_steps:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.03))
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait(timeout=60)
        wait_for_orphans()
        out.seek(0)
        return out.read()


def has_unnamed_files(folder):
    """Whether the file system has them. Where it does not, a kill may leave a file of states in the moment before it loses its name."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        return False
    return True


def main():
    rng = random.Random(SEED)
    adopt_orphans()
    kills = resumed = rounds = 0
    with tempfile.TemporaryDirectory() as root:
        data = os.path.join(root, "text")
        with open(data, "w", encoding="utf-8") as f:
            f.write("It was the best of times, it was the worst of times. " * 50)
        states = os.path.join(root, "states")
        os.mkdir(states)
        for world, stage, more, moments, where in ((2, 3, ["--save-async"], "q8", "device"), (1, 2, [], "f32", "file")):
            os.environ.update(ZERO_MOMENTS=moments, ZERO_STATES="device", ZERO_STATES_DIR=states)
            whole = finish(data, world, stage, STEPS)
            os.environ["ZERO_STATES"] = where
            folder = os.path.join(root, f"run{world}")
            saving = ["--save", folder, "--save-every", "1", "--keep", "2", "--load", "latest", *more]
            last = k = went_on = 0
            n, enough = N_KILLS // 2, False
            while not enough:
                k += 1
                text = killed((data, world, stage, STEPS, *saving), rng, os.path.join(root, "told"))
                kills += 1
                if "zero-bench train: " in re.sub(r"zero-bench train: rank \d+: skipped.*|.*was never finished.*", "", text):
                    fail("a run that was killed had failed before", text)
                steps = [e["step"] for e in events(text) if e["event"] == "step"]
                went_on += bool(steps and steps[0] > 1)
                # All of a few kills may come before the first save. Then more are made.
                enough = k >= n and (went_on > n // 4 or k >= 8 * n)
                # It continues there or later: what was reported as done before the last save may be repeated.
                if steps and steps[0] + 1 < last - 1:
                    fail(f"went on from step {steps[0]} after {last} were told as done", text)
                last = steps[-1] if steps else last
                if last < STEPS and not enough:
                    continue
                if finish(data, world, stage, STEPS, *saving) != whole:
                    fail("the run that went on ended elsewhere than the one that was not interrupted", text)
                # The next save removes what a kill left; the last run may not have had any to make.
                finish(data, world, stage, STEPS + 1, *saving)
                names = sorted(os.listdir(folder))
                if any(name.startswith(".") for name in names) or len(names) != 2:
                    fail(f"left behind: {names}", "")
                subprocess.run(["rm", "-rf", folder], check=True)
                last = 0
                rounds += 1
            if went_on <= n // 4:
                fail(f"of {k} runs {went_on} went on from a checkpoint: nothing was tested", "")
            resumed += went_on
            if has_unnamed_files(states) and os.listdir(states):
                fail(f"files of states were left behind: {os.listdir(states)}", "")
    print(f"SEED={SEED}: {kills} kills, {resumed} runs went on from a checkpoint, {rounds} ended as without interruption")


main()
