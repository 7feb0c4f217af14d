#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README.md is short enough to be read: its lines, their length, its program, the steps and the rows of its status. And what commands it
shows, for the tests that run them (test/examples/test_readme_commands.py, library_alone.py).

    readme_text.py ROOT         checks the tree, prints FILE:LINE: what is wrong, exits 1 if anything is
    readme_text.py --self-test  checks the checker
"""
import os
import re
import sys

MOST_LINES, MOST_COLUMNS, MOST_PROGRAM = 100, 160, 25
STEPS, STATUS_ROWS = 5, 6
PROGRAMS = "apt-get|cc|gcc|git|meson|mpirun|mpiexec|ninja|python3|sh|sudo|torchrun|zero-bench|zero-run"
COMMAND = re.compile(rf"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:{PROGRAMS}|\./\S+)(?: .*)?")
COMMENT = re.compile(r"\s+#.*")


def read(root):
    with open(os.path.join(root, "README.md"), encoding="utf-8") as f:
        return f.read()


def program(text):
    """The first block of C, a program."""
    block = re.search(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block[1] if block else ""


def blocks(text):
    """(line number, lines) of each block that is indented by four, or fenced as of a shell; blocks of other languages are left out."""
    block, first, fence = [], 0, None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = re.match(r"```(\w*)$", line)
        if mark and fence is None:
            fence = mark[1]
        elif mark:
            fence = None
        inside = not mark and (fence in ("", "sh", "bash", "console") if fence is not None else line.startswith("    ") and line.strip())
        if inside:
            first = first or number
            block.append(line if fence is not None else line[4:])
        elif block:
            yield first, block
            block, first = [], 0


def commands(text):
    """(line number, command) of what a reader may type: a block is of commands when any of its lines is one, else it is a picture; and in a
    sentence what stands between backquotes and has arguments."""
    for first, lines in blocks(text):
        if any(COMMAND.fullmatch(line) for line in lines):
            yield from ((first + i, COMMENT.sub("", line).strip()) for i, line in enumerate(lines))
    for number, line in enumerate(re.sub(r"^```.*?^```$", lambda m: re.sub(r"[^\n]", "", m[0]), text, flags=re.DOTALL | re.MULTILINE).splitlines(), 1):
        if not line.startswith("    "):
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line) if " " in span and COMMAND.fullmatch(span))


def faults_of(text):
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        yield f"README.md:{len(lines)}: {len(lines)} lines; allowed: {MOST_LINES}"
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS:
            yield f"README.md:{number}: {len(line)} characters; allowed: {MOST_COLUMNS}"
    n = len(program(text).splitlines())
    if not 0 < n <= MOST_PROGRAM:
        yield f"README.md:1: its program has {n} lines; allowed: 1 to {MOST_PROGRAM}"
    steps = len(re.findall(r"^\d\. ", text, re.MULTILINE))
    if steps != STEPS:
        yield f"README.md:1: {steps} steps of wrapping; wanted: {STEPS}"
    status = re.search(r"^## Status\n+((?:\|.*\n)*)", text, re.MULTILINE)
    rows = len(status[1].splitlines()) - 2 if status else 0
    if rows != STATUS_ROWS:
        yield f"README.md:1: {rows} rows of status; wanted: {STATUS_ROWS}"


def self_test():
    good = ("# x\n\n```c\nint main(void)\n```\n" + "".join(f"{i}. a\n" for i in range(1, 6)) + "\n## Status\n| a | b |\n|---|---|\n" + "| c | d |\n" * 6)
    failures = [f"refused: {fault}" for fault in faults_of(good)]
    for bad in (good + "\n" * 101, good + "x" * 161, good.replace("int main(void)\n", "int a;\n" * 26), good.replace("```c", "```"),
                good.replace("3. a\n", ""), good + "| c | d |\n"):
        if len(list(faults_of(bad))) != 1:
            failures.append(f"{bad[-80:]!r}: {list(faults_of(bad))}")
    text = ("    a  picture\n      of it\n\n    sh a.sh     # what it does\n    ZERO_X=1 zero-run -n 2 ./a\n    odd\n\n`meson`, `cc a.c -o a`, `cfg.x`\n"
            "```c\n    sh not.sh `cc b.c`\n```\n```sh\nzero-bench plan\n```\n")
    found = list(commands(text))
    wanted = [(4, "sh a.sh"), (5, "ZERO_X=1 zero-run -n 2 ./a"), (6, "odd"), (13, "zero-bench plan"), (8, "cc a.c -o a")]
    return failures + ([] if found == wanted else [f"commands: {found}, wanted {wanted}"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else list(faults_of(read(sys.argv[1])))
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
