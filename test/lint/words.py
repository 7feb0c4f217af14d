#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Code and comments use the field's words. Private words, which an outsider would have to learn, are refused.
CONTRIBUTING.md has the glossary, and says what to write instead. In the hot path (comm/ and shard/engine/) a
function name means one function.

    words.py ROOT         checks the tree, prints FILE:LINE: the word and what to write, exits 1 if anything is found
    words.py --self-test  checks the checker
"""
import os
import re
import sys

from tree_clean import CODE, tracked

# Refused as an identifier, or as a part of one between underscores.
IN_NAMES = {
    "told": "reported", "untold": "unreported", "tell": "report", "telling": "report", "hear": "remote failure",
    "star": "hub", "seat": "member", "seats": "members", "stranger": "unidentified", "strangers": "unidentified",
    "office": "fixture", "house": "lint", "breath": "", "deed": "op", "deeds": "ops",
}
# The same for words with another meaning elsewhere: zero_carry's and a digit's carry are not a job's.
IN_NAMES_UNDER = {"shard/": {"carry": "issue"}, "test/shard/": {"carry": "issue"}}
# Names of other projects, and a callback whose name in a header cannot change.
ALLOWED_NAMES = {"ftell"}
# In comments, messages and documents.
IN_TEXT = {
    r"strangers?": "unidentified connection", r"seats?": "member", r"(?:the|an?) office": "fixture", r"breath": "at the same time",
    r"(?:laws? of the|in) house": "lint", r"lays? (?:\w+ )?cards? open": "exchanges", r"(?:loop|model)'s hand": "thread",
}
HOT_PATH = ("comm/", "shard/engine/")
FUNCTION = re.compile(r"^static [^\n;={]*?\b(\w+)\([^;{]*\)\n\{", re.MULTILINE)
TEXT = re.compile(r"\b(" + "|".join(IN_TEXT) + r")\b")
NAME = re.compile(r"[A-Za-z_]\w*")
NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def instead(word, words):
    for pattern, better in words.items():
        if re.fullmatch(pattern, word):
            return f"; say {better}" if better else ""
    return ""


def words_of(path):
    words = dict(IN_NAMES)
    for folder, more in IN_NAMES_UNDER.items():
        words.update(more if path.startswith(folder) else {})
    return words


def names(text, words):
    """Yields (line, word) for each forbidden part of a name."""
    code = NOT_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    for number, line in enumerate(code.splitlines(), 1):
        for name in NAME.findall(line):
            if name not in ALLOWED_NAMES:
                yield from ((number, part) for part in name.lower().split("_") if part in words)


def faults_of(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        for match in TEXT.finditer(line):
            yield f"{path}:{number}: \"{match[1]}\"{instead(match[1], IN_TEXT)}"
    if CODE.match(path):
        words = words_of(path)
        for number, word in names(text, words):
            yield f"{path}:{number}: a name with \"{word}\"{instead(word, words)}"


def taken_names(texts):
    """texts: those of the hot path's files."""
    first = {}
    for path, text in texts:
        for match in FUNCTION.finditer(text):
            if first.setdefault(match[1], path) != path:
                yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]}() is also a function of {first[match[1]]}"


def check(root):
    hot = []
    for path in tracked(root):
        if path.endswith("lint/words.py") or not (CODE.match(path) or path.endswith(".md")):
            continue
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        yield from faults_of(path, text)
        if path.startswith(HOT_PATH) and path.endswith(".c"):
            hot.append((path, text))
    yield from taken_names(hot)


def self_test():
    bad = (("zero/a.c", "int n_told;"), ("comm/a.c", "/* from a stranger */"), ("comm/a.h", "struct zr_seat;"), ("README.md", "the house"
           " and in house"), ("shard/a.c", "enum { ZR_STAR };"), ("shard/a.c", "/* the loop's hand */"), ("shard/a.c", "zr_fail(\"a stranger\");"),
           ("shard/engine/a.c", "static int carry(void);"))
    good = (("zero/a.c", "int start, household; /* the outcome is told by handing it over */"), ("comm/a.c", "char *s = \"told\";"),
            ("kernels/a.c", "x = handle(handshake); zr_exact_carry(&sum);"), ("zero/a.c", "zero_carry(z);"))
    failures = [f"{path}: {line}: {list(faults_of(path, line))}" for path, line in bad if len(list(faults_of(path, line))) != 1]
    one = "static int issue(int a,\n                 int b)\n{\n}\n"
    if len(list(taken_names([("comm/a.c", one), ("comm/b.c", one)]))) != 1 or list(taken_names([("comm/a.c", one + "static int other(void);\n")])):
        failures.append("two functions of one name are not told apart from one")
    return failures + [f"{path}: {line}: refused" for path, line in good if list(faults_of(path, line))]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = self_test() if sys.argv[1] == "--self-test" else list(check(sys.argv[1]))
    print("\n".join(found) or "no fault")
    sys.exit(1 if found else 0)
