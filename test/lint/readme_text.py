#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README.md is short enough to be read: its number of lines, their length, its program. Each of its figures
is on a page that the same paragraph links. Also finds the commands that it shows, for the tests that run them
(test/examples/test_readme_commands.py, library_alone.py).

    readme_text.py ROOT         checks the tree, prints FILE:LINE: what is wrong, exits 1 if anything is
    readme_text.py --self-test  checks the checker
"""
import os
import re
import sys

MAX_LINES, MAX_COLUMNS, MAX_PROGRAM = 140, 100, 45  # columns of prose; tables and code may be wider
PROGRAMS = "apt-get|cc|gcc|git|meson|mpirun|mpiexec|ninja|python3|sh|sudo|torchrun|zero-bench|zero-run"
COMMAND = re.compile(rf"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:{PROGRAMS}|\./\S+)(?: .*)?")
COMMENT = re.compile(r"\s+#.*")
# A measured number has three characters or more: "509", "3.39".
FIGURE = re.compile(r"(?<![\w.,/-])\d[\d.]*\d\b(?![\w-])")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+\.md)\)")


def read(root, page="README.md"):
    with open(os.path.join(root, page), encoding="utf-8") as f:
        return f.read()


def program(text):
    """Returns the first block of C, which is a program."""
    block = re.search(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block[1] if block else ""


def blocks(text):
    """Yields (line number, lines) of each block that is indented by four or fenced as shell. Blocks of other
    languages are skipped."""
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
    """Yields (line number, command) for commands that a reader may type. A block is of commands if any of its
    lines is one; otherwise it is a picture. In a sentence, a command is text between backquotes that has
    arguments."""
    for first, lines in blocks(text):
        if any(COMMAND.fullmatch(line) for line in lines):
            yield from ((first + i, COMMENT.sub("", line).strip()) for i, line in enumerate(lines))
    for number, line in enumerate(re.sub(r"^```.*?^```$", lambda m: re.sub(r"[^\n]", "", m[0]), text, flags=re.DOTALL | re.MULTILINE).splitlines(), 1):
        if not line.startswith("    "):
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line) if " " in span and COMMAND.fullmatch(span))


def prose(text):
    """Yields (line number, line) outside of code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def paragraphs(text):
    """Yields (line number, text) of each paragraph and list item, with the table that follows it."""
    found, after_blank = [], True
    for number, line in prose(text):
        if line and (line.startswith("- ") or after_blank and not line.startswith("|") or not found):
            found.append([number, ""])
        if line:
            found[-1][1] += line + "\n"
        after_blank = not line
    return found


def faults_of(text, pages):
    """pages: returns the text of a page that README.md links, by its path."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"README.md:{len(lines)}: {len(lines)} lines; allowed: {MAX_LINES}"
    for number, line in prose(text):
        if len(line) > MAX_COLUMNS and not line.startswith("|"):
            yield f"README.md:{number}: {len(line)} characters; allowed: {MAX_COLUMNS}"
    n = len(program(text).splitlines())
    if not 0 < n <= MAX_PROGRAM:
        yield f"README.md:1: its program has {n} lines; allowed: 1 to {MAX_PROGRAM}"
    for number, paragraph in paragraphs(text):
        linked = "\n".join(pages(path) for path in LINK.findall(paragraph))
        for figure in FIGURE.findall(LINK.sub("", paragraph)):
            if len(figure) >= 3 and figure not in FIGURE.findall(linked):
                yield f"README.md:{number}: {figure} is on no page that this paragraph links"


def self_test():
    good = "# x\n\n```c\nint main(void)\n```\n\nIt takes 2.05 GB ([page](a.md)):\n\n| a |\n|---|\n| 990 MB |\n\n- 509 in 3 GB ([b](b.md))\n- GPT-2 124M\n"
    pages = {"a.md": "2.05 GB, 990 MB", "b.md": "| 509 |"}.get
    failures = [f"refused: {fault}" for fault in faults_of(good, pages)]
    for bad in (good + "\n" * 141, good + "x" * 101, good.replace("int main(void)\n", "int a;\n" * 46), good.replace("```c", "```"),
                good.replace("2.05", "2.06"), good.replace("990", "991"), good.replace("b.md", "a.md")):
        if len(list(faults_of(bad, pages))) != 1:
            failures.append(f"{bad[-80:]!r}: {list(faults_of(bad, pages))}")
    text = ("    a  picture\n      of it\n\n    sh a.sh     # what it does\n    ZERO_X=1 zero-run -n 2 ./a\n    odd\n\n`meson`, `cc a.c -o a`, `cfg.x`\n"
            "```c\n    sh not.sh `cc b.c`\n```\n```sh\nzero-bench plan\n```\n")
    found = list(commands(text))
    wanted = [(4, "sh a.sh"), (5, "ZERO_X=1 zero-run -n 2 ./a"), (6, "odd"), (13, "zero-bench plan"), (8, "cc a.c -o a")]
    return failures + ([] if found == wanted else [f"commands: {found}, wanted {wanted}"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else list(faults_of(read(sys.argv[1]), lambda page: read(sys.argv[1], page)))
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
