#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a program as ranks of one MPI's own launcher, on this machine. Its exit code is the launcher's; without that launcher, or where
the build has found no such MPI, the test is skipped (exit 77), or fails where CHECKS_MUST_RUN is set.

    under_mpi.py KEY N PROGRAM ARGUMENT...
    under_mpi.py KEY --missing WHY          for a build without it

MPI_FOLDER in the environment: where libzero and its module for that MPI are, if programs do not find them by themselves.
KEY: ompi or mpich. The names of the launchers are those that belong to one MPI each, whatever mpirun is.
"""
import os
import shutil
import signal
import subprocess
import sys

LAUNCHERS = {"ompi": ["mpirun.openmpi", "--bind-to", "none", "--oversubscribe"], "mpich": ["mpiexec.hydra"]}
# Open MPI as root; and of UCX, which MPICH is over, shared memory alone: where it has tcp too, MPI_Finalize did not come back on one rank in
# some of ten runs, and where it reads another process's memory it ends this one if that dies.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl_base_warn_component_unused": "0",
    "UCX_TLS": "posix,sysv,self", "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# What tests themselves set.
OURS = ("ZERO_TEST_SEED",)
SECONDS = 150


def environment():
    """Nothing of an outer job; and of a sanitizer no report of what MPI does not free."""
    outer = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "ZERO_")
    env = {name: value for name, value in os.environ.items() if name in OURS or not name.startswith(outer)}
    env["ASAN_OPTIONS"] = ":".join(filter(None, [env.get("ASAN_OPTIONS"), "detect_leaks=0"]))
    if "MPI_FOLDER" in env:  # before the folders that Meson adds
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [env["MPI_FOLDER"], env.get("LD_LIBRARY_PATH")]))
    return {**env, **SETTINGS}


def skip(why):
    print(why)
    return 1 if os.environ.get("CHECKS_MUST_RUN") else 77


def run(command):
    with subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            return child.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"not over after {SECONDS} s: {' '.join(command)}")
            os.killpg(child.pid, signal.SIGKILL)
            return 1


def main(key, n, *command):
    if n == "--missing":
        return skip(f"{key}: {command[0]}")
    launcher = LAUNCHERS[key]
    if not shutil.which(launcher[0]):
        return skip(f"there is no {launcher[0]}")
    return run([*launcher, "-n", n, *command])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
