#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of error codes in zero/when_it_goes_wrong.md is generated from ZERO_ERR_MAP of zero/types.h.

    error_page.py ROOT           exits 1 if the page differs from the map
    error_page.py ROOT --write   writes the table into the page
    error_page.py --self-test    checks this script

The table is between two comments, BEGIN and END below. The rest of the page is written by hand.
"""
import os
import re
import sys

PAGE, HEADER = "zero/when_it_goes_wrong.md", "zero/types.h"
BEGIN, END = "<!-- begin: codes, written by test/lint/error_page.py -->\n", "<!-- end: codes -->\n"
ENTRY = re.compile(r'X\((\w+),\s*(-\d+),\s*"([^"]+)",\s*((?:"[^"]+"\s*)+)\)')


def codes_of(header):
    """Returns (name, value, text, help) of each entry of the map."""
    found = re.search(r"#define ZERO_ERR_MAP\(X\)(.*?)\n\n", header.replace("\\\n", " \n"), re.DOTALL)
    for name, value, text, words in ENTRY.findall(found[1] if found else ""):
        yield name, value, text, "".join(re.findall(r'"([^"]+)"', words))


def table_of(header):
    rows = [f"| `ZERO_ERR_{name}` ({value}) | {text} | {words} |\n" for name, value, text, words in codes_of(header)]
    return "| code | text | what it means, and what to do |\n|---|---|---|\n" + "".join(rows) if rows else None


def written(page, header):
    """Returns the page with the header's table. Raises ValueError if that is impossible."""
    table = table_of(header)
    if table is None:
        raise ValueError(f"{HEADER} has no ZERO_ERR_MAP with entries X(name, value, text, help)")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"{PAGE} needs the lines {BEGIN.strip()} and {END.strip()}, once each")
    return page[:page.index(BEGIN)] + BEGIN + "\n" + table + "\n" + page[page.index(END):]


def main(root, write):
    path = os.path.join(root, PAGE)
    with open(path, encoding="utf-8") as f:
        page = f.read()
    with open(os.path.join(root, HEADER), encoding="utf-8") as f:
        header = f.read()
    try:
        wanted = written(page, header)
    except ValueError as fault:
        return str(fault)
    if write and wanted != page:
        with open(path, "w", encoding="utf-8") as f:
            f.write(wanted)
    elif wanted != page:
        return f"{PAGE}: the table differs from ZERO_ERR_MAP: run test/lint/error_page.py ROOT --write"
    return None


def self_test():
    header = ('#define ZERO_ERR_MAP(X)   \\\n    X(ARG, -1, "invalid argument", \\\n      "It is wrong. "   \\\n      "Read on.")\\\n'
              '    X(IO, -8, "input failed", "Look (there).")\n\nenum {};\n')
    row = "| `ZERO_ERR_ARG` (-1) | invalid argument | It is wrong. Read on. |\n| `ZERO_ERR_IO` (-8) | input failed | Look (there). |\n"
    page = f"before\n{BEGIN}old\n{END}after\n"
    good = written(page, header)
    failures = [] if row in good and good.startswith("before\n") and good.endswith(f"\n{END}after\n") and written(good, header) == good else [good]
    for bad_page, bad_header in ((page.replace(END, ""), header), (page + BEGIN, header), (END + BEGIN, header), (page, "no map\n\n")):
        try:
            failures.append(f"not refused: {written(bad_page, bad_header)}")
        except ValueError:
            pass
    return "\n".join(failures)


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        said = self_test()
    elif len(sys.argv) == 2 or sys.argv[2:] == ["--write"]:
        said = main(sys.argv[1], len(sys.argv) == 3)
    else:
        sys.exit(__doc__)
    print(said or "no fault")
    sys.exit(1 if said else 0)
