#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Code has the layout of .clang-format, and no comment line is longer than 110 characters. The formatter does
not change comments, since it would destroy their tables. Without clang-format 14, the version that the rules
are written for, the test is skipped (exit 77). If CHECKS_MUST_RUN is set, as by .ci/run, that is a failure.
field_comments.py checks where comments are.

    layout_of_code.py ROOT
    layout_of_code.py --self-test  checks the checker's own rules
"""
import os
import re
import shutil
import subprocess
import sys

from tree_clean import tracked

VERSION = 14
MAX_CHARACTERS = 110


def formatter():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path and re.search(rf"version {VERSION}\.", subprocess.run([path, "--version"], capture_output=True, text=True).stdout):
            return path
    return None


def long_comments(path, text):
    return [f"{path}:{number}: {len(line)} characters" for number, line in enumerate(text.splitlines(), 1)
            if len(line) > MAX_CHARACTERS and line.lstrip().startswith(("/* ", "* "))]


def self_test():
    fits, long = "/* " + "a" * (MAX_CHARACTERS - 6) + " */\n", " * " + "b" * MAX_CHARACTERS + "\n"
    found = long_comments("x.h", fits + "int a;\n" + long + "c" * 200)
    return 0 if found == [f"x.h:3: {MAX_CHARACTERS + 3} characters"] else print(found) or 1


def main():
    if sys.argv[1] == "--self-test":
        return self_test()
    root = sys.argv[1]
    tool = formatter()
    if not tool:
        print(f"there is no clang-format {VERSION}")
        return 1 if os.environ.get("CHECKS_MUST_RUN") else 77
    files = [path for path in tracked(root) if re.fullmatch(r".*\.(c|h|cc|cu)", path)]
    long_ones = [place for path in files
                 for place in long_comments(path, open(os.path.join(root, path), encoding="utf-8").read())]
    found = subprocess.run([tool, "--dry-run", "--Werror", *files], cwd=root, capture_output=True, text=True)
    for place in sorted(set(re.findall(r"^(\S+?:\d+):\d+: error", found.stderr, re.M))):
        print(place)
    print("\n".join(long_ones))
    return 1 if found.returncode or long_ones or not files else 0


if __name__ == "__main__":
    sys.exit(main())
