#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Things that must not be in the tree: paths of one machine, personal data, and mistakes of style that a
search can find.

    tree_clean.py ROOT         checks the tree, prints FILE:LINE: what is wrong, exits 1 if anything is
    tree_clean.py --self-test  checks the checker on lines that break each rule
"""
import os
import re
import subprocess
import sys

LIBRARY = re.compile(r"(kernels|comm|shard|zero)/(?!examples/).*\.(c|h|inc)$")
# Programs print and exit, the library does not. Only programs and tests link the simulated world and the
# verifier.
PROGRAM = re.compile(r"(zero/run|kernels/sim|comm/sim|shard/verify)/.*")
CODE = re.compile(r".*\.(c|h|cc|cpp|cu|cuh|inc)$")

# (what, which files, not which, the pattern). Written so that this file does not match itself.
RULES = (
    ("a path of one machine", re.compile(r".*"), None,
     re.compile(r"(?<![\w.}])/(home|root|Users|work)/\w+|/tmp/(bash_jobs|b-\w+)")),
    ("an address", re.compile(r".*"), None, re.compile(r"\b[\w.+-]+@[\w-]+\.(com|org|net|edu|io|dev|de|local)\b")),
    ("fast arithmetic", re.compile(r".*(meson\.build|\.sh|meson_options\.txt|\.ini)$"), None,
     re.compile(r"['\"\s=](-ffast[-]math|-Ofas[t]|-funsafe-math[-]optimizations|-ffinite-math[-]only)")),
    # Except in builds with asserts, which have to be requested.
    ("the library may not end the process", LIBRARY, re.compile(PROGRAM.pattern + r"|kernels/asserts\.h$"),
     re.compile(r"(?<![\w.>])(exit|_exit|_Exit|quick_exit|abort|assert)\s*\(")),
    ("the library may not print", LIBRARY, PROGRAM,
     re.compile(r"(?<![\w.>])(printf|puts|putchar|perror|vprintf)\s*\(|\bf?printf\s*\(\s*std|\b(stdout|stderr)\b")),
    # A literal is allowed: strings are blanked here before the search.
    ("an unbounded string call", LIBRARY, PROGRAM,
     re.compile(r"(?<![\w.>])((gets|strcat|sprintf|vsprintf)\s*\(|strcpy\s*\((?![^,]*, \"\"\)))")),
    # An access to protected memory cannot be found in another way: kernels/check/guard.c, and only while
    # cfg.debug.check is on.
    ("process-wide state of the C library", LIBRARY, re.compile(PROGRAM.pattern + r"|kernels/check/guard\.c$"),
     re.compile(r"(?<![\w.>])(setenv|putenv|unsetenv|setlocale|srand|rand|strtok|signal|sigaction)\s*\(")),
    # What a stage means is a row of the table of placements; ask what is whole and what is cut. A pipeline's stages are others.
    ("the stage's number decides something", LIBRARY, re.compile(r"shard/placement\.c$|shard/verify/verify_case\.c$|shard/pipeline/|shard/engine/walk\.c$|zero/schedule(_file)?\.c$"),
     re.compile(r"(\.|->)stage\s*([=!]=|[<>]=?|\?|&&|\|\|)|if\s*\(!?[\w>.-]*(\.|->)stage\s*\)|!\w+(\.|->)stage\b|switch\s*\(.*(\.|->)stage\b")),
)
# A pattern with almost no match has lost its files because folders were renamed.
LEAST = ((LIBRARY, 150), (PROGRAM, 15), (CODE, 300))
# The weights of small models, which tests read.
BINARY = re.compile(r"test/bench/llama/references/.*\.safetensors$")
COMMANDS = ("sh bench/run.sh", "sh test/run.sh")


def without_comments(text):
    """Returns C code with comments and strings blanked, and the same lines."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0]) if match[0].startswith("/") else '""'
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def faults_of(path, text):
    code = without_comments(text) if CODE.match(path) else text
    for what, files, but, pattern in RULES:
        if not files.match(path) or but is not None and but.match(path):
            continue
        on_code = files is LIBRARY
        for number, line in enumerate((code if on_code else text).splitlines(), 1):
            if pattern.search(line):
                yield f"{path}:{number}: {what}: {line.strip()[:100]}"


def tracked(root):
    """Returns the files that git would commit. Without a clone, returns all files except build folders."""
    try:
        listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, check=True).stdout.decode()
        yield from (path for path in listed.split("\0") if path and os.path.exists(os.path.join(root, path)))
    except (OSError, subprocess.CalledProcessError):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [d for d in subfolders if d not in (".git", "__pycache__") and
                             not os.path.isdir(os.path.join(folder, d, "meson-info"))]
            yield from (os.path.relpath(os.path.join(folder, name), root) for name in names)


def check(root):
    paths = list(tracked(root))
    for pattern, least in LEAST:
        found = sum(1 for path in paths if pattern.match(path))
        if found < least:
            yield f"test/lint/tree_clean.py:1: {pattern.pattern} matches {found} files, expected at least {least}"
    for path in paths:
        with open(os.path.join(root, path), "rb") as f:
            data = f.read()
        if b"\0" in data:
            if not BINARY.match(path):
                yield f"{path}:1: not a text file"
            continue
        yield from faults_of(path, data.decode("utf-8", "replace"))
    readme = os.path.join(root, "README.md")
    text = ""
    if os.path.exists(readme):
        with open(readme, encoding="utf-8") as f:
            text = f.read()
    for command in COMMANDS:
        if command not in text:
            yield f"README.md:1: does not name the command {command}"
        if not os.path.exists(os.path.join(root, command.split()[1])):
            yield f"{command.split()[1]}:1: is missing"


def self_test():
    bad = (
        ("zero/a.c", "    ex" + "it(1);"),
        ("shard/a.c", "x = y; ab" + "ort();"),
        ("shard/engine/a.c", "    ex" + "it(1);"),
        ("comm/nccl/old/a.c", "fpri" + "ntf(std" + "err, \"x\");"),
        ("zero/checkpoint/a.c", "strc" + "py(a, b);"),
        ("kernels/check/a.c", "set" + "env(\"A\", \"b\", 1);"),
        ("kernels/a.c", "pri" + "ntf(\"%d\", 1);"),
        ("comm/a.c", "fpri" + "ntf(std" + "err, \"x\");"),
        ("comm/a.c", "strc" + "py(a, b);"),
        ("zero/a.c", "set" + "env(\"A\", \"b\", 1);"),
        ("shard/a.c", "spri" + "ntf(buf, \"x\");"),
        ("kernels/meson.build", "c_args: ['-ffast" + "-math']"),
        ("shard/a.c", "if (opt->st" + "age <= 1)"),
        ("zero/a.c", "x = o.st" + "age ? 1 : 0;"),
        ("README.md", "see /wo" + "rk/main for more"),
        ("test/a.sh", "cd /ho" + "me/someone"),
        ("bench/a.c", "/* ask some.one@" + "example.com */"),
    )
    good = (
        ("zero/a.c", "/* never calls ex" + "it() */ snpri" + "ntf(b, n, \"exit(1)\"); loop->ab" + "ort(c, 1);"),
        ("zero/run/run.c", "    ex" + "it(1);"),
        ("zero/run/run_exec.c", "pri" + "ntf(\"x\");"),
        ("kernels/a.c", "zr_ab" + "ort(x); static_as" + "sert(1, \"\"); on_ex" + "it(1);"),
        ("README.md", "never with -ffast" + "-math"),
        ("kernels/a.c", "/* rand" + "(x) */"),
        ("comm/a.c", "strc" + "py(a, \"none\");"),
        ("test/a.sh", "cd \"$root/home/x\""),
        ("zero/a.c", "o.st" + "age = c->st" + "age;"),
        ("shard/placement.c", "rows[i].st" + "age == st" + "age"),
    )
    failures = [f"{path}: {line}: not found" for path, line in bad if len(list(faults_of(path, "\n" + line))) != 1]
    failures += [f"{path}: {line}: refused" for path, line in good if list(faults_of(path, line))]
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = self_test() if sys.argv[1] == "--self-test" else list(check(sys.argv[1]))
    print("\n".join(found) or "no fault")
    sys.exit(1 if found else 0)
