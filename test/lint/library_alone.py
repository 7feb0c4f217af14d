#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Uses the library without the rest of the project, as a reader of README.md would. In a copy of the tree,
README.md's build commands run unchanged after the first one has configured the build folder. They install the
library below a new home, and compile and start README.md's program.

Then the library is built again, shared and static, and programs are compiled by pkg-config against both and
run. Last, the tree is a Meson subproject of another project. That project's program links it statically and
runs on two ranks.

    library_alone.py ROOT MPI MESON...        MPI: the value of -Dmpi for the second build
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

from asserts import held
from installed import HEADERS, PROGRAM, over_mpi
from readme_text import commands, program, read
from symbols import declared, defined
from tree_clean import tracked

ANSWER = "0 1 2 3"
# How the library is optimized does not matter here, so it is built fast.
FAST = ["-Doptimization=0", "-Ddebug=false", "-Dgpu_arch=90"]
# README.md's commands that are run here, in this order. Installing packages needs root.
OF_README = ["meson setup", "meson install", "export", "cc program.c", "zero-run -n 4 ./program", "ZERO_CHECK=1 zero-run"]
ALONE = ["-Dbench=disabled", "-Dtests=disabled"]
EXAMPLE = "share/doc/libzero/zero/examples/minimal.c"
FLOORS = ("zero", "shard", "comm", "kernels", "bench")
TARGETS = {"source_hash.c", "zero", "zero-run", "zero-internal", "shard", "comm", "kernels", "kernels_avx2", "kernels_avx512", "kernels_profiler",
           "profiler_own", *(name + part for name in ("cuda_copy", "cuda_kernels", "cuda_norm") for part in ("", "_nvcc"))}
# Only if help2man is installed.
MAN_PAGE = "zero-run.1"
# Only if this machine has an MPI.
MODULE = "zero-mpi"
SUPERPROJECT = """
project('something larger', 'c', default_options: ['c_std=c11', 'warning_level=3', 'werror=true'])
libzero = dependency('libzero', version: '>= 0.1')
program = executable('program', 'program.c', dependencies: libzero)
test('alone', program)
test('two ranks', find_program('zero-run'), args: ['-n', '2', program])
"""


def environment():
    """Returns an environment without the variables of an outer job, and without those of this project's
    tests."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "DESTDIR", "MESON_TESTTHREADS", "MESON_BUILD_ROOT", "MESON_SOURCE_ROOT"}
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith("ZERO_")}


def run(*command, env=None, cwd=None):
    done = subprocess.run(command, capture_output=True, text=True, env=env or environment(), cwd=cwd, check=False)
    if done.returncode != 0:
        print(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        sys.exit(1)
    return done.stdout


def copy_tree(root, to):
    for path in tracked(root):
        os.makedirs(os.path.dirname(os.path.join(to, path)), exist_ok=True)
        shutil.copy(os.path.join(root, path), os.path.join(to, path))


def targets_of(meson, build):
    return {target["name"]: target for target in json.loads(run(*meson, "introspect", "--targets", build))}


def check_archive(root, path):
    """The static library has every call, and no name that another library could have."""
    names = defined(path)
    yield from (f"{path}: {name} of zero/zero.h is missing" for name in sorted(declared(root) - names))
    yield from (f"{path}: {name} is neither zr_ nor zero_" for name in sorted(names)
                if not name.startswith(("zr_", "zero_")))
    members = run("ar", "t", path).split()
    yield from (f"{path}: {member} is there twice" for member in {m for m in members if members.count(m) > 1})


def compile_and_run(folder, name, libdir, flags):
    program = os.path.join(folder, name)
    with open(program + ".c", "w", encoding="utf-8") as f:
        f.write(PROGRAM)
    run(os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Werror", "-o", program, program + ".c", *flags)
    told = run(program, env={**environment(), "LD_LIBRARY_PATH": libdir}).strip()
    if told != ANSWER:
        yield f"the {name} program printed {told!r}, expected {ANSWER!r}"
    needs = "libzero" in run("readelf", "-d", program)
    if needs != (name == "shared"):
        yield f"the {name} program {'needs' if needs else 'does not need'} libzero.so"


def run_readme(root, folder, source):
    """Runs the commands in one shell, as a reader types them, unchanged. The home is an empty folder."""
    text = read(root)
    found = [command for _, command in commands(text) if any(command.startswith(start) for start in OF_README)]
    home = os.path.join(folder, "home")
    if len(found) != len(OF_README) or not all(map(str.startswith, found, OF_README)) or not set(ALONE) <= set(found[0].split()):
        yield f"README.md builds, installs and starts by {found}; that is not what is tested here"
        return
    os.mkdir(home)
    with open(os.path.join(source, "program.c"), "w", encoding="utf-8") as f:
        f.write(program(text))
    run("meson", "setup", "build", cwd=source)  # like sh bench/run.sh
    told = run("sh", "-euc", "\n".join(found), env={**environment(), "HOME": home}, cwd=source)
    if told.count("step 100: out is ") != 2:
        yield f"README.md's program printed {told!r}"


def check_install(root, folder, mpi, meson):
    source, prefix = (os.path.join(folder, name) for name in ("libzero", "prefix"))
    build = os.path.join(source, "build-both")
    run(*meson, "setup", build, source, f"--prefix={prefix}", "--libdir=lib", "-Ddefault_library=both", f"-Dmpi={mpi}", *ALONE, *FAST)
    run(*meson, "install", "-C", build)
    targets = set(targets_of(meson, build))
    extra = targets - TARGETS - {MODULE, MAN_PAGE}
    if extra:
        yield f"built besides the library: {sorted(extra)}"

    found = {os.path.relpath(os.path.join(at, name), prefix) for at, _, names in os.walk(prefix) for name in names}
    expected = {"bin/zero-run", "lib/libzero.so", "lib/libzero.so.0", "lib/libzero.a", "lib/pkgconfig/libzero.pc",
                *("share/doc/libzero/" + name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "test/README.md", "test/hosts/README.md")), EXAMPLE, EXAMPLE.replace("minimal", "pipelined"),
                *("share/doc/libzero/" + path for path in tracked(root)
                  if path.endswith(".md") and path.split("/")[0] in FLOORS or path.startswith("bench/results/")),
                *(f"share/man/man1/{page}" for page in targets & {MAN_PAGE}),
                *(f"lib/lib{module}.so" for module in targets & {MODULE}), *("include/" + header for header in HEADERS)}
    yield from (f"{path} is not installed" for path in sorted(expected - found))
    yield from (f"installed besides: {path}" for path in sorted(found - expected)
                if not re.fullmatch(r"lib/libzero\.so\.[\d.]+", path))

    libdir = os.path.join(prefix, "lib")
    yield from check_archive(root, os.path.join(libdir, "libzero.a"))
    yield from (f"{name} holds the text of an assert: {text}" for name in ("libzero.so", "libzero.a")
                for text in held(root, os.path.join(libdir, name))[0])
    env = {**environment(), "PKG_CONFIG_PATH": os.path.join(libdir, "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "libzero", env=env).split()
    if any(flag.startswith("-luv") for flag in flags):
        yield f"a program that links the shared library is told to link what that uses: {flags}"
    yield from compile_and_run(folder, "shared", libdir, flags)
    # Compiles the example as its own first lines say.
    example = os.path.join(folder, "minimal")
    run(os.environ.get("CC", "cc"), os.path.join(prefix, EXAMPLE), "-o", example, *flags, "-lm")
    run(os.path.join(prefix, "bin", "zero-run"), "-n", "2", example, env={**environment(), "ZERO_STAGE": "3", "LD_LIBRARY_PATH": libdir})
    with open(os.path.join(libdir, "pkgconfig", "libzero.pc"), encoding="utf-8") as f:
        yield from (f"libzero.pc has a path of this machine: {word}" for line in f if not line.startswith("prefix=") for word in line.split()
                    if re.search(r"(^|-L|-I|=)/", word))
    flags = run("pkg-config", "--static", "--cflags", "--libs", "libzero", env=env).split()
    if "-lcudart_static" in flags:  # from a toolkit that the linker does not find by itself
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        flags.append(f"-L{os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))}/lib64")
    yield from compile_and_run(folder, "static", libdir, ["-l:libzero.a" if flag == "-lzero" else flag for flag in flags])
    # One program finds the module next to the library, the other next to itself.
    if mpi != "disabled":
        module = os.path.join(libdir, "libzero-mpi.so")
        yield from over_mpi(mpi, os.path.join(folder, "shared"), module, {"LD_LIBRARY_PATH": libdir})
        yield from over_mpi(mpi, os.path.join(folder, "static"), shutil.copy(module, folder), {})


def check_subproject(folder, meson):
    above = os.path.join(folder, "above")
    os.makedirs(os.path.join(above, "subprojects"))
    os.symlink(os.path.join(folder, "libzero"), os.path.join(above, "subprojects", "libzero"))
    with open(os.path.join(above, "meson.build"), "w", encoding="utf-8") as f:
        f.write(SUPERPROJECT)
    with open(os.path.join(above, "program.c"), "w", encoding="utf-8") as f:
        f.write(PROGRAM)
    build = os.path.join(folder, "above-build")
    run(*meson, "setup", build, above, "--wrap-mode=forcefallback", "-Dlibzero:default_library=static", "-Dlibzero:cuda=disabled",
        *FAST[:2])
    targets = targets_of(meson, build)
    extra = set(targets) - TARGETS - {MODULE, "program"}
    if extra:
        yield f"built in a subproject besides the library: {sorted(extra)}"
    run(*meson, "compile", "-C", build)
    run(*meson, "test", "--no-rebuild", "-C", build)


def main(root, mpi, meson):
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(root, os.path.join(folder, "libzero"))
        failures = [*run_readme(root, folder, os.path.join(folder, "libzero")), *check_install(root, folder, mpi, meson), *check_subproject(folder, meson)]
    print("\n".join(failures) or "configured, built, installed, linked both ways, and as a subproject")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
