#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a program from the example that a text shows: zero/examples/minimal.c with its own example replaced.
Without PROGRAM, the output is the example alone.

    take_example.py TEXT [PROGRAM] OUT

TEXT is Markdown, of which the first block of C is used, or a header. In a header, the example is the indented
lines of the first comment after the license line.
"""
import re
import sys

FIRST, LAST = "static void must(int err)", "static void train(struct model *m)"


def of_markdown(text):
    return re.search(r"^```c\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def of_header(text):
    text = re.sub(r"\A/\* SPDX-License-Identifier: .* \*/\n", "", text)
    lines = [line[3:] for line in text.split("*/")[0].splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("    "))
    last = next(i for i, line in enumerate(lines) if i > first and re.match(r"\S", line))
    return "\n".join(line[4:] for line in lines[first:last]).rstrip() + "\n"


def into_program(source, example, program):
    for function in (FIRST, LAST):
        if function not in example:
            sys.exit(f"{source}: its example has no {function}:\n{example}")
    with open(program, encoding="utf-8") as f:
        before, rest = f.read().split(FIRST)
    return before + example + rest.split(LAST)[1].split("\n}\n", 1)[1]


def main(source, *program, out):
    with open(source, encoding="utf-8") as f:
        text = f.read()
    example = of_markdown(text) if source.endswith(".md") else of_header(text)
    with open(out, "w", encoding="utf-8") as f:
        f.write(into_program(source, example, *program) if program else example)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:-1], out=sys.argv[-1])
