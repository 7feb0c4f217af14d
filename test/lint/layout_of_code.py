#!/usr/bin/env python3
"""Code is laid out as .clang-format says, and no line of a comment is longer than 110 characters: the formatter leaves comments as they are
written, since it would tear their tables. In headers that others include, a comment stands above a field, not behind it. Without clang-format 14, the version that the rules are written for, skipped (exit 77); where
CHECKS_MUST_RUN is set, as .ci/run does, that is a failure.

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
MOST_CHARACTERS = 110
# What programs include, and what the floors tell each other of.
FIELDS_HAVE_COMMENTS_ABOVE = {"zero/zero.h", "zero/zero_config.h", "comm/comm.h", "comm/group.h", "comm/mesh.h", "shard/core.h",
                              "shard/layout.h", "shard/options.h", "kernels/device.h", "shard/engine/engine.h"}


def formatter():
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path and re.search(rf"version {VERSION}\.", subprocess.run([path, "--version"], capture_output=True, text=True).stdout):
            return path
    return None


def comments_behind_fields(path, text):
    return [f"{path}:{text.count(chr(10), 0, s.start(1) + c.start()) + 1}: the comment belongs above its field"
            for s in re.finditer(r"^(?:typedef )?(?:struct|union)\b[^;\n]*\{\n(.*?)^\}", text, re.M | re.S)
            for c in re.finditer(r";[ \t]*(?:/\*|//)", s[1])]


def self_test():
    above = "struct a {\n    /* b */\n    int b;\n};\nint c; /* d */\n"
    behind = "struct a {\n    int b;\n    int c; /* d */\n};\n"
    found = comments_behind_fields("x.h", above) + comments_behind_fields("x.h", behind)
    return 0 if found == ["x.h:3: the comment belongs above its field"] else print(found) or 1


def main():
    if sys.argv[1] == "--self-test":
        return self_test()
    root = sys.argv[1]
    tool = formatter()
    if not tool:
        print(f"there is no clang-format {VERSION}")
        return 1 if os.environ.get("CHECKS_MUST_RUN") else 77
    files = [path for path in tracked(root) if re.fullmatch(r".*\.(c|h|cc|cu)", path)]
    long_ones = [f"{path}:{number}: {len(line)} characters" for path in files
                 for number, line in enumerate(open(os.path.join(root, path), encoding="utf-8").read().splitlines(), 1)
                 if len(line) > MOST_CHARACTERS and line.lstrip().startswith(("/* ", "* "))]
    behind = [place for path in files if path in FIELDS_HAVE_COMMENTS_ABOVE
              for place in comments_behind_fields(path, open(os.path.join(root, path), encoding="utf-8").read())]
    found = subprocess.run([tool, "--dry-run", "--Werror", *files], cwd=root, capture_output=True, text=True)
    for place in sorted(set(re.findall(r"^(\S+?:\d+):\d+: error", found.stderr, re.M))):
        print(place)
    print("\n".join(long_ones + behind))
    return 1 if found.returncode or long_ones or behind or not files else 0


if __name__ == "__main__":
    sys.exit(main())
