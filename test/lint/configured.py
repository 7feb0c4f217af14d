#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Configuring the tree reports what is too old, with the version found and the one needed. Without a usable
toolkit, the library is built with a stub that reports the same when it runs. The toolkits here only pose as
ones of other versions.

    configured.py ROOT MESON...
"""
import os
import re
import subprocess
import sys
import tempfile

from library_alone import ALONE, environment

NVCC = """#!/bin/sh
case $1 in
--version) echo 'nvcc: NVIDIA (R) Cuda compiler driver'
           echo 'Copyright (c) 2005-2025 NVIDIA Corporation'
           echo 'Cuda compilation tools, release {version}, V{version}.48' ;;
--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
*) echo '{complaint}' >&2; exit {code} ;;
esac
"""


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    os.chmod(path, mode)


def toolkit(folder, version, complaint="", nccl=None):
    """Makes a toolkit that can only be configured with; without nccl it has no such library either. Returns
    its folder of programs."""
    write(os.path.join(folder, "bin", "nvcc"), NVCC.format(version=version, complaint=complaint, code=1 if complaint else 0), 0o755)
    if nccl:
        write(os.path.join(folder, "include", "cuda_runtime_api.h"), "")
        major, minor, patch = nccl.split(".")
        write(os.path.join(folder, "include", "nccl.h"),
              f"#define NCCL_MAJOR {major}\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH {patch}\n")
        os.makedirs(os.path.join(folder, "lib64"))
        subprocess.run(["ar", "rc", os.path.join(folder, "lib64", "libcudart_static.a")], check=True)
    return os.path.join(folder, "bin")


class Tries:
    def __init__(self, root, meson, folder):
        self.root, self.meson, self.folder, self.failures, self.n = root, meson, folder, [], 0

    def setup(self, what, works, says, *options, **variables):
        """Configures a new folder, which works or fails and prints each of the texts. Returns the folder."""
        self.n += 1
        build = os.path.join(self.folder, f"build{self.n}")
        env = {**environment(), **variables}
        done = subprocess.run([*self.meson, "setup", build, self.root, *ALONE, *options], capture_output=True, text=True, env=env,
                              check=False)
        told = re.sub(r"\s+", " ", done.stdout + done.stderr)
        if (done.returncode == 0) != works:
            self.failures.append(f"{what}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        self.failures += [f"{what}: {text!r} is not said:\n{done.stdout}{done.stderr}" for text in says if text not in told]
        return build

    def stub(self, build, says):
        """Checks what the stub built there will print."""
        which = "kernels/libkernels.a.p/cuda_cuda_stub.c.o"
        done = subprocess.run(["ninja", "-C", build, which], capture_output=True, text=True, env=environment(), check=False)
        if done.returncode != 0:
            self.failures.append(f"{which}: {done.stdout}{done.stderr}")
            return
        with open(os.path.join(build, which), "rb") as f:
            if says.encode() not in f.read():
                self.failures.append(f"the stub does not say {says!r}")


def main(root, meson):
    with tempfile.TemporaryDirectory() as folder:
        tries = Tries(root, meson, folder)

        def path(name):
            return f"{os.path.join(folder, name, 'bin')}{os.pathsep}{os.environ['PATH']}"

        # An older toolkit: a stub, or an error if CUDA was requested.
        bin_old = toolkit(os.path.join(folder, "old"), "11.8")
        why = f"the CUDA toolkit of {bin_old}/nvcc is 11.8, and 12.8 or newer is needed"
        build = tries.setup("an older toolkit", True, [f"WARNING: no CUDA: {why}", f"CUDA : no: {why}", "NCCL : no: there is no CUDA"],
                            PATH=path("old"))
        tries.stub(build, why)
        tries.setup("an older toolkit that is insisted on", False, [f"ERROR: Problem encountered: CUDA: {why}"], "-Dcuda=enabled", PATH=path("old"))

        # A toolkit with missing parts, and one that does not accept this compiler.
        toolkit(os.path.join(folder, "part"), "13.0")
        tries.setup("a part of a toolkit", True, ["has nvcc, but not libcudart_static.a and cuda_runtime_api.h"], PATH=path("part"))
        toolkit(os.path.join(folder, "picky"), "13.0", complaint="unsupported GNU version", nccl="2.28.9")
        tries.setup("a toolkit for other compilers", True, ["nvcc does not compile an empty file: unsupported GNU version"],
                    PATH=path("picky"))

        # A toolkit that is new enough, but not for all default architectures, and an older NCCL.
        toolkit(os.path.join(folder, "new"), "12.9", nccl="2.18.3")
        tries.setup("an older NCCL", True,
                    ["WARNING: no NCCL: nccl.h is of NCCL 2.18.3, and 2.19 or newer is needed", "CUDA : 12.9 in",
                     "does not know compute capability 100: gpu_arch goes without it", "CUDA 12.8 (release 570) or newer"],
                    PATH=path("new"))
        tries.setup("compute capabilities that are not known", False, ["ERROR: Problem encountered: CUDA: CUDA 12.9 knows none"], "-Dgpu_arch=70,75",
                    "-Dcuda=enabled", PATH=path("new"))

        # An older library, which no stub could replace.
        write(os.path.join(folder, "pc", "libuv.pc"), "Name: libuv\nDescription: older\nVersion: 1.40.0\nLibs: -luv\n")
        tries.setup("an older libuv", False, ["libuv", ">= 1.44", "1.40.0"], "-Dcuda=disabled",
                    PKG_CONFIG_PATH=os.path.join(folder, "pc"))

        # MPI: a required one, an optional older one, and none.
        write(os.path.join(folder, "mpi", "ompi-c.pc"), "Name: ompi\nDescription: older\nVersion: 3.1.0\nlibdir=/nowhere\n")
        why = "ompi-c.pc is of 3.1.0, and 4.1 or newer is needed"
        tries.setup("an older MPI that is insisted on", False, [f"ERROR: Problem encountered: mpi is ompi, and there is none: {why}"], "-Dmpi=ompi",
                    "-Dcuda=disabled", PKG_CONFIG_PATH=os.path.join(folder, "mpi"))
        tries.setup("no MPI", True, ["MPI : no: it was configured with -Dmpi=disabled"], "-Dmpi=disabled", "-Dcuda=disabled")

    print("\n".join(tries.failures) or f"{tries.n} configurations said what there was to say")
    return 1 if tries.failures else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
