#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang compiles each C file of the library and zero-bench without a warning. Uses this build's flags, and
checks syntax only.

    clang_too.py BUILD
"""
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

FLOORS = re.compile(r"(\.\./)*(zero|shard|comm|kernels|bench)/.*\.c$")
SKIPPED = 77
# Options that are followed by the name of a dependency file or an object.
WITH_VALUE = {"-MF", "-MQ", "-o"}


def command_of(clang, entry):
    words = shlex.split(entry["command"])
    kept, skip = [], False
    for word in words[next(i for i, word in enumerate(words) if word.startswith("-")):]:
        if not skip and word not in WITH_VALUE and word not in ("-MD", "-c", "-fopenmp", "-Werror"):
            kept.append(word)
        skip = word in WITH_VALUE
    return [clang, *kept, "-fsyntax-only", "-Werror", "-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument", "-Wno-unknown-pragmas"]


def main(build):
    clang = shutil.which("clang") or shutil.which("clang-14")
    if not clang:
        print("there is no clang here")
        return 1 if os.environ.get("CHECKS_MUST_RUN") else SKIPPED
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as f:
        entries = [entry for entry in json.load(f) if FLOORS.match(os.path.relpath(os.path.join(entry["directory"], entry["file"]), entry["directory"]))]
    entries = list({(entry["file"], "-DMODEL_BF16" in entry["command"]): entry for entry in entries}.values())
    if len(entries) < 150:
        print(f"compile_commands.json has {len(entries)} files of the library and zero-bench")
        return 1

    def compiled(entry):
        done = subprocess.run(command_of(clang, entry), cwd=entry["directory"], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [told for told in pool.map(compiled, entries) if told]
    print("\n".join(failures) or f"{len(entries)} files compiled by {clang}")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
