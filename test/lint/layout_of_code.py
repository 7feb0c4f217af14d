#!/usr/bin/env python3
"""Code is laid out as .clang-format says. Skipped (exit 77) without clang-format 14, the version that it is written for.

    layout_of_code.py ROOT
"""
import os
import re
import shutil
import subprocess
import sys

from tree_clean import tracked

VERSION = 14


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
        return 77
    files = [path for path in tracked(root) if re.fullmatch(r".*\.(c|h|cc|cu)", path)]
    found = subprocess.run([tool, "--dry-run", "--Werror", *files], cwd=root, capture_output=True, text=True)
    for place in sorted(set(re.findall(r"^(\S+?:\d+):\d+: error", found.stderr, re.M))):
        print(place)
    return 1 if found.returncode or not files else 0


if __name__ == "__main__":
    sys.exit(main())
