#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No two static libraries that one program links define the same global name: the linker would take either
one without a message. The model's files are compiled once per dtype. A name in them without a suffix for the
dtype would run one dtype's code for both.

    same_names.py LIBRARY.A LIBRARY.A...  prints each name and the libraries that define it, exits 1 if there is any
    same_names.py --self-test             checks the checker
"""
import os
import subprocess
import sys
import tempfile

from symbols import defined


def faults_of(archives):
    """archives: path -> names."""
    owners = {}
    for path, names in archives.items():
        for name in names:
            owners.setdefault(name, []).append(os.path.basename(path))
    return [f"{name} is defined in {' and '.join(sorted(paths))}" for name, paths in sorted(owners.items()) if len(paths) > 1]


def self_test():
    texts = {"one": "int a(void) { return 1; } static int s(void) { return 2; } int c(void) { return s(); }",
             "two": "int a(void) { return 3; } static int s(void) { return 4; } int b(void) { return s(); }"}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            with open(f"{folder}/{name}.c", "w", encoding="utf-8") as f:
                f.write(text)
            subprocess.run([os.environ.get("CC", "cc"), "-c", f"{folder}/{name}.c", "-o", f"{folder}/{name}.o"], check=True)
            subprocess.run(["ar", "rc", f"{folder}/{name}.a", f"{folder}/{name}.o"], check=True)
        found = faults_of({f"{folder}/{name}.a": defined(f"{folder}/{name}.a") for name in texts})
    wanted = ["a is defined in one.a and two.a"]
    return [] if found == wanted else [f"found {found}, wanted {wanted}"]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else faults_of({path: defined(path) for path in sys.argv[1:]})
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
