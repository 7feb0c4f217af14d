#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The symbols of the built libraries. The shared library has soname libzero.so.0 and shows exactly the calls
of zero/zero.h, each with its version from zero/libzero.map. The floors inside it have only names of the
project.

    symbols.py ROOT LIBZERO.SO [FLOOR.A ...] [MODULE.SO]

The MPI module (comm/mpi/mpi_shim.h) shows only its table, and has no soname, since nothing links it. None of
them has the flag STATIC_TLS: dlopen() has little room for such libraries, and refuses those that do not fit.
"""
import re
import subprocess
import sys

SONAME = "libzero.so.0"
MODULE_SHOWS = {"zero_mpi_shim_1"}
# Added by the linker or the compiler.
FOREIGN = re.compile(r"_init|_fini|__bss_start|_edata|_end|__(asan|odr_asan|tsan|ubsan|gcov|llvm)\w*.*")


def read(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def defined(library, *flags):
    """Returns the external names defined in it."""
    names = set()
    for line in read("nm", "--defined-only", "--extern-only", *flags, library).splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[1] != "A":  # A: the name of a version itself
            names.add(fields[2].split("@")[0])
    return {name for name in names if not FOREIGN.fullmatch(name)}


def versions(library):
    """Returns a library's symbol versions by name."""
    return dict(re.findall(r" [TtWwDdBbRrVv] (\w+)@@(\S+)$", read("nm", "--defined-only", "--extern-only", "-D",
                                                                 "--with-symbol-versions", library), re.MULTILINE))


def mapped(root):
    """Returns the versions of the map; a name with a wildcard is kept as it is."""
    with open(f"{root}/zero/libzero.map", encoding="utf-8") as f:
        text = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.DOTALL)
    return {name: version for version, body in re.findall(r"(\S+)\s*\{(.*?)\}", text, re.DOTALL)
            for name in re.findall(r"([^\s;:]+)\s*;", body.split("local:")[0])}


def declared(root):
    """Returns the calls of the public header."""
    with open(f"{root}/zero/zero.h", encoding="utf-8") as f:
        return set(re.findall(r"^ZERO_API\b[^;(]*?(\w+)\(", f.read(), re.MULTILINE))


def soname_of(library):
    return re.findall(r"\(SONAME\)[^\[]*\[([^\]]*)\]", read("readelf", "-d", library))


def check_tls(library):
    if re.search(r"\(FLAGS\).*\bSTATIC_TLS\b", read("readelf", "-d", library)):
        yield f"{library}: has the flag STATIC_TLS, so dlopen() may refuse it: a thread-local variable is of the model initial-exec or local-exec"


def check_module(module):
    yield from check_tls(module)
    shown = defined(module, "-D")
    if shown != MODULE_SHOWS:
        yield f"{module}: shows {sorted(shown)}, expected {sorted(MODULE_SHOWS)}"
    if soname_of(module):
        yield f"{module}: soname {soname_of(module)}, expected none"


def main(root, library, others):
    modules = [other for other in others if other.endswith(".so")]
    floors = [other for other in others if other not in modules]
    failures = []
    calls, shown = declared(root), defined(library, "-D")
    if len(calls) < 10:
        failures.append(f"zero/zero.h: found only {len(calls)} calls marked ZERO_API")
    failures += [f"{library}: shows {name}, which is no call of zero/zero.h" for name in sorted(shown - calls)]
    failures += [f"{library}: {name} of zero/zero.h is missing" for name in sorted(calls - shown)]

    in_map = mapped(root)
    failures += [f"zero/libzero.map: {name} is no call of zero/zero.h" for name in sorted(set(in_map) - calls)]
    failures += [f"zero/libzero.map: {name} of zero/zero.h is missing" for name in sorted(calls - set(in_map))]
    in_library = versions(library)
    failures += [f"{library}: {name} has version {in_library.get(name)}, zero/libzero.map says {in_map[name]}"
                 for name in sorted(in_map) if in_library.get(name) != in_map[name]]

    failures += check_tls(library)
    soname = soname_of(library)
    if soname != [SONAME]:
        failures.append(f"{library}: soname {soname}, expected {SONAME}")
    for floor in floors:
        failures += [f"{floor}: {name} is neither zr_ nor zero_" for name in sorted(defined(floor))
                     if not name.startswith(("zr_", "zero_"))]
    for module in modules:
        failures += check_module(module)
    print("\n".join(failures) or f"{len(shown)} calls, soname {SONAME}, {len(floors)} floors, {len(modules)} modules")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
