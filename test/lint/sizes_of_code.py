#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A function has one task: outside test/ none is longer than 85 lines, and the median is shorter than 15, from the name to the
closing brace.

    sizes_of_code.py ROOT         checks the tree, prints what is too long and the lengths of functions, exits 1 if anything is
    sizes_of_code.py ROOT N       prints the N longest functions too
    sizes_of_code.py --self-test  checks the checker
"""
import os
import re
import statistics
import sys

from tree_clean import CODE, tracked

MAX_LINES = 85
MEDIAN_BELOW = 15
# By .clang-format's layout, the opening and the closing brace of a function have a line of their own.
NAME = re.compile(r"(\w+)\(")


def functions(text):
    """Yields (line, name, number of lines) of each function defined in a file."""
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        if line == "{" and number > 1:
            start = number
            while start > 1 and lines[start - 2][:1] in (" ", "\t"):
                start -= 1
            start -= 1
        elif line.startswith("}") and start:
            if line == "}":
                name = NAME.search(" ".join(lines[start - 1:number]))
                yield start, name[1] if name else "?", number - start + 1
            start = None


def is_source(path):
    return CODE.match(path) and not path.startswith("test/")


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        return f.read()


def check(texts, n_longest=0):
    lengths = []
    for path, text in texts:
        for line, name, n in functions(text):
            lengths.append((n, f"{path}:{line}: {name}"))
            if n > MAX_LINES:
                yield f"{path}:{line}: {name} has {n} lines; {MAX_LINES} are allowed"
    if not lengths:
        yield "no function was found"
        return
    median = statistics.median(n for n, _ in lengths)
    print(f"{len(lengths)} functions, median {median:g} lines, longest {max(lengths)[0]}")
    for n, where in sorted(lengths, reverse=True)[:n_longest]:
        print(f"{n:5} {where}")
    if median >= MEDIAN_BELOW:
        yield f"the median function has {median:g} lines; fewer than {MEDIAN_BELOW} are wanted"


def self_test():
    short = "static int a(void)\n{\n    return 1;\n}\n"
    long_ = "int b(int x,\n      int y)\n{\n" + "    x++;\n" * 20 + "}\n"
    if list(functions(short + "\n" + long_)) != [(1, "a", 4), (6, "b", 24)]:
        yield f"functions: {list(functions(short + chr(10) + long_))}"
    if list(functions("struct s {\n    int a;\n};\nstatic const int b[] = {\n    1};\n")):
        yield "data are taken for functions"
    for what, files, expected in (
        ("short ones", [("zero/a.c", short)], 0),
        ("a very long one", [("zero/a.c", short * 3 + "void c(void)\n{\n" + "    x++;\n" * MAX_LINES + "}\n")], 1),
        ("long functions", [("zero/a.c", long_ * 3 + short)], 1),
        ("nothing", [("zero/a.c", "")], 1),
    ):
        found = list(check(files))
        if len(found) != expected:
            yield f"{what}: {found}"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        found = list(self_test())
    else:
        root = sys.argv[1]
        found = list(check(((path, read(root, path)) for path in tracked(root) if is_source(path)),
                           int(sys.argv[2]) if len(sys.argv) == 3 else 0))
    print("\n".join(found) or "no fault")
    sys.exit(1 if found else 0)
