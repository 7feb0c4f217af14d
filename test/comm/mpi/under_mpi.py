#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a program as ranks of one MPI's own launcher on this machine, and exits with the launcher's code.

Without that launcher, or if the build found no such MPI, the test is skipped (exit 77). If CHECKS_MUST_RUN is
set, it fails instead.

    under_mpi.py KEY N PROGRAM ARGUMENT...
    under_mpi.py KEY --missing WHY          for a build without it

KEY is ompi or mpich. The launchers are known by names that belong to one MPI each, since mpirun may be
either. MPI_FOLDER in the environment is the folder of libzero and its module for that MPI, if programs do not
find them.
"""
import os
import shutil
import signal
import subprocess
import sys

LAUNCHERS = {"ompi": ["mpirun.openmpi", "--bind-to", "none", "--oversubscribe"], "mpich": ["mpiexec.hydra"]}
# Open MPI has to be allowed to run as root. UCX, which MPICH uses, is limited to shared memory. With tcp,
# MPI_Finalize did not return on one rank in some of ten runs; where UCX reads another process's memory, the
# death of that process ends this one.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl_base_warn_component_unused": "0",
    "UCX_TLS": "posix,sysv,self", "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# Variables that tests set themselves.
OURS = ("ZERO_TEST_SEED",)
SECONDS = 150


def environment():
    """Removes the variables of an outer job. Keeps sanitizers from reporting what MPI does not free."""
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
