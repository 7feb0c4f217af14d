#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a random one of four ranks over MPI at a random moment of training, at every stage, in groups and
in meshes.

Where the launcher is told to let the other ranks live, each of them ends soon, with an error that names the
killed rank and its last call, and no process of the job is left. Otherwise the launcher ends the job.

    test_mpi_kills.py KEY ZERO_BENCH

N_LOST=50 in the environment is the full count. MOST_MS=2000 then limits the time in which every survivor has
to end. Without them a sample is killed, and the slowest time is printed only. SEED repeats the draws;
VERBOSE=1 shows the messages.
"""
import contextlib
import glob
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import under_mpi

KEY, BENCH = sys.argv[1], os.path.abspath(sys.argv[2])
WORLD = 4
LIVES_ON = {"ompi": ["--enable-recovery"], "mpich": ["-disable-auto-cleanup"]}[KEY]
KINDS = [["--stage=0"], ["--stage=1"], ["--stage=2"], ["--stage=3"], ["--stage=3", "--dp-replicate=2"],
         ["--stage=3", "--hybrid=hfsdp", "--dp-replicate=2"], ["--stage=3", "--tp=2"], ["--stage=1", "--pp=2", "--accum=4"],
         ["--stage=2", "--pp=2", "--tp=2", "--accum=4"]]
N_LOST = int(os.environ.get("N_LOST", 2))
MOST_MS = int(os.environ.get("MOST_MS", 60000))
SEED = int(os.environ.get("SEED", time.time()))
PATIENCE_S = 120  # for waits that have no other limit
# Each rank writes its process id and its errors to files of its own; the output goes to the launcher.
RANK = 'r=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; cd "$0"; echo $$ > $r.tmp; mv $r.tmp $r.pid; exec "$@" 2> $r.err'
# MPICH's launcher kills all ranks when a rank that it started directly is killed, even if told not to clean
# up. So a shell stands between, which ends well. The launcher also sends SIGUSR1 to ranks when a connection
# closes, so the shell ignores it.
GUARDED = 'r=$PMI_RANK; cd "$0"; trap "" USR1; "$@" 2> $r.err & echo $! > $r.tmp; mv $r.tmp $r.pid; wait; exit 0'


def until(what, fn, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while not fn():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not after {seconds} s")
        time.sleep(0.002)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_session(session):
    """Returns the session's live processes. A rank may have a session of its own."""
    found = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(stat) as f:
                fields = f.read().rsplit(") ", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.split("/")[2]))
    return found


class Job:
    """Four ranks that train in a folder until they are ended."""

    def __init__(self, options, script, kind, **more):
        self.folder = tempfile.mkdtemp(prefix="zero-mpi-kills-")
        train = [BENCH, "train", "--steps=1000000", "--layers=2", "--threads=1", *kind]
        command = [*under_mpi.LAUNCHERS[KEY], *options, "-n", str(WORLD), "sh", "-c", script, self.folder, *train]
        env = {**under_mpi.environment(), "ZERO_BACKEND": "mpi", "ZERO_RENDEZVOUS": f"file://{self.folder}/meet", **more}
        with open(f"{self.folder}/launcher", "wb") as said:
            self.launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        self.pid = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in [*filter(is_alive, self.pid), *in_session(self.launcher.pid)]:
            with contextlib.suppress(ProcessLookupError):  # the launcher also ends what is left
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        shutil.rmtree(self.folder)

    def read(self, name):
        try:
            with open(f"{self.folder}/{name}", errors="replace") as f:
                return f.read()
        except FileNotFoundError:
            return ""

    def await_steps(self):
        until("every rank's process", lambda: all(self.read(f"{r}.pid") for r in range(WORLD)))
        self.pid = [int(self.read(f"{r}.pid")) for r in range(WORLD)]
        until("the first step", lambda: "step " in self.read("launcher") or not all(map(is_alive, self.pid)))
        if not all(map(is_alive, self.pid)):
            raise AssertionError(f"it ended before anybody was killed: {self.told()}")

    def lose(self, victim, by=signal.SIGKILL):
        """Kills or stops a rank. Returns for each other rank after how many milliseconds it ended."""
        others = {r: self.pid[r] for r in range(WORLD) if r != victim}
        took = {}
        begin = time.monotonic()
        os.kill(self.pid[victim], by)

        def all_ended():
            for r, pid in others.items():
                if r not in took and not is_alive(pid):
                    took[r] = (time.monotonic() - begin) * 1000
            return len(took) == len(others)

        try:
            until("the other ranks' end", all_ended)
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.told()}") from None
        return took

    def told(self):
        return {name: self.read(name)[-1000:] for name in ["launcher", *(f"{r}.err" for r in range(WORLD))]}


class Kills(unittest.TestCase):
    def kill_one(self, draw, options, script, kind):
        before = set(glob.glob("/dev/shm/zero*"))
        with Job(options, script, kind) as job:
            job.await_steps()
            time.sleep(draw.uniform(0, 0.5))
            victim = draw.randrange(WORLD)
            took = job.lose(victim)
            told = job.told()
            what = f"{KEY} {' '.join(kind)}, rank {victim} killed: {told}"
            if os.environ.get("VERBOSE"):
                print(what, took)
            until(f"the launcher's end: {what}", lambda: job.launcher.poll() is not None)
            until(f"nothing is left: {what}", lambda: not in_session(job.launcher.pid))
            self.assertFalse([pid for pid in job.pid if is_alive(pid)], what)
        self.assertEqual(set(glob.glob("/dev/shm/zero*")) - before, set(), what)
        return victim, took, told, what

    def test_others_are_told(self):
        print(f"SEED={SEED}", flush=True)
        draw = random.Random(SEED)
        slowest = 0
        first = draw.randrange(len(KINDS))
        for i in range(N_LOST):
            victim, took, told, what = self.kill_one(draw, LIVES_ON, GUARDED if KEY == "mpich" else RANK, KINDS[(first + i) % len(KINDS)])
            for r, ms in took.items():
                slowest = max(slowest, ms)
                self.assertLessEqual(ms, MOST_MS, what)
                error = rf"(?m)^zero-bench train: rank {r}: rank {victim} was lost (during|after) \w+ seq \d+.*; its last call was zero_\w+"
                self.assertRegex(told[f"{r}.err"], error, what)
        print(f"{N_LOST} killed; the slowest of the others had ended after {slowest:.0f} ms", flush=True)

    def test_stopped(self):
        """Every other rank names the stopped one, whichever rank it waits for itself. So does rank 0, which
        compares the ranks' calls."""
        draw = random.Random(SEED)
        for victim in (0, draw.randrange(1, WORLD)):
            kind = draw.choice(KINDS)
            with Job(LIVES_ON, GUARDED if KEY == "mpich" else RANK, kind, ZERO_TIMEOUT_MS="2000", ZERO_START_TIMEOUT_MS="120000") as job:
                job.await_steps()
                took = job.lose(victim, signal.SIGSTOP)
                told = job.told()
            what = f"{KEY} {' '.join(kind)}, rank {victim} stopped: {told}"
            print(f"rank {victim} stopped; the others had ended after {max(took.values()):.0f} ms", flush=True)
            for r in took:
                error = rf"(?m)^zero-bench train: rank {r}: \w+ seq \d+.* waited \d+ ms \(timeout_ms\) for .*; rank {victim} is stopped, by SIGSTOP or a debugger; its last"
                self.assertRegex(told[f"{r}.err"], error, what)

    def test_launcher_ends_the_job(self):
        self.kill_one(random.Random(SEED), [], RANK, KINDS[3])


if __name__ == "__main__":
    if not shutil.which(under_mpi.LAUNCHERS[KEY][0]):
        sys.exit(under_mpi.skip(f"there is no {under_mpi.LAUNCHERS[KEY][0]}"))
    unittest.main(argv=sys.argv[:1])
