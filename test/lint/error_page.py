#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""zero/when_it_goes_wrong.md names every error of ZERO_ERR_MAP, with its text, and quotes messages as the sources have them, under the code
that the sources give them; and every message of the library that a user can bring about, and that does not say all itself, is there. So who
changes a message or an error, or adds one, hears of the page.

    error_page.py ROOT         checks the tree, prints FILE:LINE: what is wrong, exits 1 if anything is
    error_page.py --self-test  checks the checker

A row of a table whose first column is "message" quotes messages in that column, each between backquotes; ... in it is what varies. Where the
table has a column "code", that is the messages'.
"""
import os
import re
import sys

from tree_clean import tracked

PAGE, HEADER = "zero/when_it_goes_wrong.md", "zero/zero.h"
SOURCE = re.compile(r"(kernels|comm|shard|zero|bench)/.*\.(c|h|inc|cu|cuh)$")
STRING = r'"(?:\\.|[^"\\\n])*"'
# Literals side by side are one; a macro between two is of text, too.
TEXT = re.compile(rf"{STRING}(?:\s+(?:[A-Z][A-Za-z0-9_]*\s+)?{STRING})*(?:\s+[A-Z][A-Z0-9_]*(?=[,);]))?")
# zr_fail_more only puts a name before a message.
CODED = re.compile(r"\b(?!\w*_more\b)\w*fail\w*\(\s*(?:[\w>.-]+,\s*)?Z(?:R|ERO)_ERR_(\w+),\s*\Z")
FORMAT = re.compile(r"%[-0-9.*]*(?:hh|ll|[hlzjt])?[a-zA-Z]|%(?=\x01)")
VARIES = "\x01"
# Messages that have to be there: of the library, and those of libraries that only it can bring about left out.
LIBRARY = re.compile(r"(zero/(?!run/)|shard/(?!verify/|pipeline/)|comm/(?!sim/)|kernels/(check|cuda)/).*\.c$")
SAYS_ITSELF = re.compile(r"allowed|must be|is NULL|no memory|a (mutex|condition) could not be made")
OURS_ALONE = re.compile(
    r"arena|opens communicator|\bis not the shared memory of rank|operations (of one communicator|are under way)|reduce_scatter is|the rendezvous is"
    r"|works on the (cuda|host) device|has no places|unknown event|is not the loop's|norm is not known|uv_\w+_init|given up|have different layouts|the process ends")
LEAST_CODED = 14  # letters: below that, a part that is put before another message
LEAST = 8  # letters of a quotation: less could be anything


def texts_of(source):
    """(text with what varies as one character, code or None) of each string of a source."""
    source = re.sub(rf"/\*.*?\*/|({STRING})", lambda m: m[1] or " ", source, flags=re.DOTALL)
    for match in TEXT.finditer(source):
        text = "".join(token[1:-1] if token[0] == '"' else VARIES for token in re.findall(rf"{STRING}|\w+", match[0]))
        coded = CODED.search(source, max(0, match.start() - 200), match.start())
        yield FORMAT.sub(VARIES, text.replace('\\"', '"').replace("\\n", " ")), coded[1] if coded else None


def quotations(page):
    """(line number, quotation, code or None)."""
    column = None
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            column = None
        elif cells[0] == "message":
            column = cells.index("code") if "code" in cells else -1
        elif column is not None and not cells[0].startswith("---"):
            for quotation in re.findall(r"``(.+?)``|`([^`]+)`", cells[0]):
                yield number, "".join(quotation).strip(), cells[column].strip("`") if column >= 0 else None


def codes_of(quotation, texts):
    """Of every text that says it."""
    parts = quotation.split("...")
    pattern, longest = re.compile(".*?".join(re.escape(part) for part in parts)), max(parts, key=len)
    return {code for text, code in texts if longest in text and pattern.search(text)}


def missing(quoted, texts):
    """Of texts that have a code."""
    patterns = [re.compile(".*?".join(re.escape(part) for part in quotation.split("..."))) for quotation in quoted]
    for text, code in texts:
        if code and sum(c.isalpha() for c in text) >= LEAST_CODED and not SAYS_ITSELF.search(text) and not OURS_ALONE.search(text):
            if not any(pattern.search(text) for pattern in patterns):
                yield f"{PAGE}:1: {code} is missing: {text.replace(VARIES, '...')}"


def faults_of(page, header, sources):
    """sources: path -> text."""
    errors = re.findall(r'X\((\w+), -\d+, "([^"]+)"\)', re.search(r"#define ZERO_ERR_MAP\(X\)(.*?)\n\n", header, re.DOTALL)[1])
    for name, text in errors:
        if not re.search(rf"^\| `ZERO_ERR_{name}` \| `{re.escape(text)}` \|", page, re.MULTILINE):
            yield f"{PAGE}:1: ZERO_ERR_{name}, \"{text}\", has no row"
    texts_by_path = {path: list(texts_of(source)) for path, source in sources.items()}
    texts = [text for of_path in texts_by_path.values() for text in of_path]
    found = list(quotations(page))
    if not found:
        yield f"{PAGE}:1: quotes no message"
    for number, quotation, code in found:
        if sum(c.isalpha() for c in quotation) < LEAST:
            yield f"{PAGE}:{number}: too short to be looked for: {quotation}"
            continue
        codes = codes_of(quotation, texts)
        if not codes:
            yield f"{PAGE}:{number}: no source says: {quotation}"
        elif code and code not in codes and None not in codes:
            yield f"{PAGE}:{number}: is {', '.join(sorted(codes))}, not {code}: {quotation}"
    yield from missing([quotation for _, quotation, _ in found], [text for path, of_path in texts_by_path.items() if LIBRARY.match(path) for text in of_path])


def check(root):
    def read(path):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            return f.read()
    return list(faults_of(read(PAGE), read(HEADER), {path: read(path) for path in tracked(root) if SOURCE.match(path)}))


def self_test():
    header = '#define ZERO_ERR_MAP(X) \\\n    X(ARG, -1, "invalid argument") \\\n    X(IO, -8, "input failed")\n\n'
    source = ('return zr_fail(ZR_ERR_ARG, "stage is %d; "\n    "allowed: %" PRId64 "..%s" LAST, x);\n/* "a comment says so" */\n'
              'zr_warn(log, "file \\"%.80s\\" was never finished");\nzr_hub_fail(r, ZR_ERR_IO, "the file is damaged");')
    codes = "| `ZERO_ERR_ARG` | `invalid argument` |\n| `ZERO_ERR_IO` | `input failed` |\n\n"
    table = "| message | code | cure |\n|---|---|---|\n"
    good = codes + table + "| `stage is ...; allowed: ...` | ARG | `other things` |\n| `the file is damaged`, `file \"...\" was never` | IO | |\n"
    failures = [f"refused: {fault}" for fault in faults_of(good, header, {"zero/a.c": source})]
    bad = (good.replace("| `ZERO_ERR_IO`", "| `ZERO_ERR_XO`"), good.replace("input failed", "input fails"), good.replace("; allowed", ", allowed"),
           good.replace("ARG | `o", "IO | `o"), good + "| `a comment says so` | ARG | |\n", good + "| `file` | ARG | |\n", codes)
    for page in bad:
        sources = {"zero/run/a.c": source}
        if len(list(faults_of(page, header, sources))) != 1:
            failures.append(f"{page}: {list(faults_of(page, header, sources))}")
    found = list(faults_of(good.replace("`the file is damaged`, ", ""), header, {"zero/a.c": source, "test/a.c": 'fail(ZR_ERR_IO, "the file is not damaged");'}))
    if len(found) != 1:
        failures.append(f"a message that is missing: {found}")
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else check(sys.argv[1])
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
