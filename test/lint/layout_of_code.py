#!/usr/bin/env python3
"""Code is laid out as .clang-format says, and no line of a comment is longer than 110 characters: the formatter leaves comments as they are
written, since it would tear their tables. Without clang-format 14, the version that the rules are written for, skipped (exit 77); where
CHECKS_MUST_RUN is set, as .ci/run does, that is a failure.

    layout_of_code.py ROOT
"""
import os
import re
import shutil
import subprocess
import sys

from tree_clean import tracked

VERSION = 14
MOST_CHARACTERS = 110


def formatter():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path and re.search(rf"version {VERSION}\.", subprocess.run([path, "--version"], capture_output=True, text=True).stdout):
            return path
    return None


def main():
    root = sys.argv[1]
    tool = formatter()
    if not tool:
        print(f"there is no clang-format {VERSION}")
        return 1 if os.environ.get("CHECKS_MUST_RUN") else 77
    files = [path for path in tracked(root) if re.fullmatch(r".*\.(c|h|cc|cu)", path)]
    long_ones = [f"{path}:{number}: {len(line)} characters" for path in files
                 for number, line in enumerate(open(os.path.join(root, path), encoding="utf-8").read().splitlines(), 1)
                 if len(line) > MOST_CHARACTERS and line.lstrip().startswith(("/* ", "* "))]
    found = subprocess.run([tool, "--dry-run", "--Werror", *files], cwd=root, capture_output=True, text=True)
    for place in sorted(set(re.findall(r"^(\S+?:\d+):\d+: error", found.stderr, re.M))):
        print(place)
    print("\n".join(long_ones))
    return 1 if found.returncode or long_ones or not files else 0


if __name__ == "__main__":
    sys.exit(main())
