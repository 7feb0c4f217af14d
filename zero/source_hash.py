#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a C file with a hash of the library's sources, by which ranks notice that their libraries differ.

    source_hash.py ROOT OUTPUT.c DEPFILE

The hash depends on the files' names below ROOT and their contents alone, so every build of the same sources has
the same one."""
import hashlib
import os
import sys

FLOORS = ("kernels", "comm", "shard", "zero")
# Programs, and what only tests and benches use.
NOT_IN_THE_LIBRARY = {"kernels/gemm", "kernels/sim", "comm/sim", "shard/verify", "zero/examples", "zero/run"}
SOURCES = (".c", ".h", ".inc", ".cu", ".cuh", ".map")


def sources_of(root):
    for floor in FLOORS:
        for folder, folders, files in os.walk(os.path.join(root, floor)):
            here = os.path.relpath(folder, root)
            folders[:] = [name for name in folders if f"{here}/{name}" not in NOT_IN_THE_LIBRARY]
            yield from (f"{here}/{name}" for name in files if name.endswith(SOURCES))


def main(root, output, depfile):
    digest = hashlib.sha256()
    names = sorted(sources_of(root))
    for name in names:
        with open(os.path.join(root, name), "rb") as file:
            content = file.read()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    with open(output, "w") as file:
        file.write('#include "zero/context.h"\n\n'
                   f"uint64_t zr_source_hash(void)\n{{\n    return UINT64_C(0x{digest.hexdigest()[:16]});\n}}\n")
    with open(depfile, "w") as file:
        inputs = " ".join(os.path.join(root, name).replace(" ", "\\ ") for name in names)
        file.write(f"{output}: {inputs}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
