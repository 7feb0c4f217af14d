#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that the READMEs name exists: files, folders, functions and other names of the code. So a reader
finds it, and a rename fails until the text follows.

    names_in_readmes.py ROOT         checks the tree, prints FILE:LINE: what is missing, exits 1 if anything is
    names_in_readmes.py --self-test  checks the checker
"""
import fnmatch
import os
import re
import sys

from tree_clean import tracked

# A file or folder. It has a known ending, or begins with one of the tree's folders or one next to the text.
PATH = re.compile(r"(?<![\w./:$<-])((?:[\w*.-]+/)+[\w*.-]*|[\w*-]+\.(?:c|h|cu|cuh|inc|py|map))(?![\w/])")
# Not a key of other programs' JSON, such as "zero_optimization".
NAME = re.compile(r"(?<![\w.\"-])((?:zr|zero|ZR|ZERO)_\w*\w)\b(?!\*)")
# In a picture: "core.c: begin, end; core_step.c: count_contribution".
FUNCTIONS = re.compile(r"([\w/]+\.[ch]): ((?:[a-z]\w*)(?:, [a-z]\w*)*)(?=;|\s*$|\)| \()")
PICTURE = re.compile(r"^    ")
# In a table of files: `core`, `core_order` stand for core.c, core.h and so on.
STEM = re.compile(r"`([\w*.]+)`")
TABLE_OF_FILES = re.compile(r"^\| file \|")
# A part that stands for any name, as in optimizer_NAME.h.
STANDS_FOR = re.compile(r"NAME|SERIAL|KEY$")
# A table of old and new names, where only those in the last column must exist.
RENAMED = re.compile(r"^#+ Renamed\b")
# Other projects' files, and files that a reader makes.
FOREIGN = {"llm.c", "mpi.h", "nccl.h", "program.c", "zero_to_fp32", "zero_to_fp32.py"}


class Tree:
    """files: path -> text, for every tracked file."""

    def __init__(self, files):
        self.files = files
        self.folders = {"/".join(path.split("/")[:n]) for path in files for n in range(1, path.count("/") + 1)}
        self.words = set()
        for path, text in files.items():
            if not path.endswith(".md"):
                self.words.update(re.findall(r"\w+", text))

    def find(self, name, beside=""):
        """Returns the paths that a name may mean in a text of folder beside."""
        name = name.rstrip("/")
        found = []
        for base in ("", beside + "/" if beside else ""):
            found += [p for p in self.all_paths() if fnmatch.fnmatchcase(p, base + name)]
        if not found and "/" not in name:
            found = [p for p in self.files if fnmatch.fnmatchcase(os.path.basename(p), name)]
        return found

    def all_paths(self):
        yield from self.files
        yield from self.folders

    def is_ours(self, name, beside):
        first = name.split("/")[0]
        return "/" not in name or first in self.folders or f"{beside}/{first}" in self.folders


def paths_in(tree, line, beside):
    for match in PATH.finditer(line):
        name = match[1].rstrip(".")
        if name not in FOREIGN and not STANDS_FOR.search(name) and tree.is_ours(name, beside) and not tree.find(name, beside):
            yield f"there is no {name}"


def names_in(tree, line):
    for match in NAME.finditer(line):
        if not STANDS_FOR.search(match[1]) and match[1] not in FOREIGN and match[1] not in tree.words:
            yield f"nothing is called {match[1]}"


def has_function(path, text, name):
    """Returns whether the file has the function: a .c file must define it, as a call is not what a reader
    looks for. A header declares or defines it."""
    definition = rf"^[a-z][^;{{}}()]*\b{name}\([^;{{}}]*\)\n\{{"
    return re.search(definition if path.endswith(".c") else rf"\b{name}\(", text, re.M) is not None


def functions_in(tree, line, beside):
    for match in FUNCTIONS.finditer(line):
        found = [p for p in tree.find(match[1], beside) if p in tree.files]
        for name in match[2].split(", "):
            if found and not any(has_function(p, tree.files[p], name) for p in found):
                yield f"{found[0]} has no {name}()"


def stems_in(tree, line, beside):
    for stem in STEM.findall(line.split("|")[1]):
        if not tree.find(stem, beside) and not tree.find(stem + ".*", beside):
            yield f"there is no {stem} in {beside or 'the root'}"


def faults_of(tree, path):
    beside, in_table, renamed = os.path.dirname(path), False, False
    for number, line in enumerate(tree.files[path].splitlines(), 1):
        if line.startswith("#"):
            renamed = bool(RENAMED.match(line))
        if renamed and line.startswith("|"):
            line = line.rstrip("| ").rpartition("|")[2]
        found = [*paths_in(tree, line, beside), *names_in(tree, line)]
        if PICTURE.match(line):
            found += functions_in(tree, line, beside)
        in_table = line.startswith("|") and (in_table or bool(TABLE_OF_FILES.match(line)))
        if in_table and not TABLE_OF_FILES.match(line):
            found += stems_in(tree, line, beside)
        yield from (f"{path}:{number}: {what}" for what in found)


def check(root):
    files = {}
    for path in tracked(root):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            files[path] = f.read()
    tree = Tree(files)
    for path in sorted(files):
        if path.endswith(".md"):
            yield from faults_of(tree, path)


def self_test():
    code = {"zero/wrap.c": "int zero_wrap(void)\n{\n}\n", "zero/zero.h": "zero_wrap ZERO_STAGE", "shard/core.c": "static int begin(int a)\n{\n}",
            "shard/engine/loop.c": "int zr_loop_push(const struct job *j,\n                 int n)\n{\n    wake(j);\n}\n", "shard/engine/wake.c": "void wake(int j)\n{\n    zr_loop_push(j);\n}\n",
            "shard/engine/README.md": "", "test/run.sh": ""}
    good = ("`zero/wrap.c` and `zero_wrap`, `shard/engine/`, `sh test/run.sh`, [it](engine/README.md), and/or, `zero_`", "see https://a.b/c/d.html, `ckpt/x`",
            "    zero_wrap      zero/wrap.c: zero_wrap; loop.c: zr_loop_push", "| file | subject |\n|---|---|\n| `core`, [`engine/`](engine/README.md) | it |",
            "`optimizer_NAME.h`, `zr_NAME_open`, `c*.c`, core.c: what it does", "    cc program.c; zero/wrap.c: opens a context", "#include <stdio.h>; `\"zero_rap\"`, `zero_to_fp32.py`",
            "## Renamed\n\n| before | now |\n|---|---|\n| `zero_rap` | `zero_wrap` |")
    bad = ("`zero/rap.c`", "`zero_rap`", "`engine/rap.h`", "rap.c", "    x   shard/core.c: end", "    x   shard/core.c: begin, end; loop.c: zr_loop_push",
           "    x   wake.c: wake, zr_loop_push", "    x   loop.c: wake",
           "| file | subject |\n|---|---|\n| `core`, `cores` | it |", "ZERO_STAGES", "`shard/rap/`", "## Renamed\n| `zero_wrap` | `zero_rap` |", "## Renamed\n\n## Added\n| `zero_rap` | it |")
    failures = []
    for text, wanted in [(t, 0) for t in good] + [(t, 1) for t in bad]:
        found = list(faults_of(Tree({**code, "shard/README.md": text}), "shard/README.md"))
        if len(found) != wanted:
            failures.append(f"{text!r}: {found}")
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else list(check(sys.argv[1]))
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
