#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds public structs and enums that changed without a change of ZERO_ABI_VERSION. The library compares the version with that of the
program, and so refuses a program that was built with another zero.h. public_layout.txt records the version, the layout of every public
struct and the values of every public enum. After a change of a layout, run --record.

    public_layout.py ROOT               prints which layouts changed since they were recorded, and exits 1 if any did
    public_layout.py ROOT --record      raises ZERO_ABI_VERSION if a layout changed without that, and records all of them
    public_layout.py ROOT --self-test   checks the checker on a copy of the headers
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

RECORD = "test/zero/public_layout.txt"
VERSION = "ZERO_ABI_VERSION"
CC = os.environ.get("CC", "cc").split()


def block(text, start):
    """Returns the text between the brace at start and its closing brace, and the position after that."""
    depth, end = 0, start
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return text[start + 1:end - 1], end


def fields(body):
    """Yields the names of a struct's fields; those of nested structs as outer.inner."""
    while body.strip(" \n;"):
        end = body.index(";")
        inner = []
        if "{" in body[:end]:
            nested, behind = block(body, body.index("{"))
            inner = list(fields(nested))
            end = body.index(";", behind)
            declaration = body[behind:end]
        else:
            declaration = body[:end]
        body = body[end + 1:]
        function = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", declaration)
        plain = re.sub(r"\[[^]]*\]", "", declaration)
        names = [function[1]] if function else [re.findall(r"\w+", part)[-1] for part in plain.split(",") if part.strip()]
        yield from names
        yield from (f"{name}.{field}" for name in names for field in inner)
        if not names:
            yield from inner


def program(text):
    """Returns a C program that prints the layouts in preprocessed headers, one line per field or value."""
    lines = ['#include "zero/zero.h"', "#include <stdio.h>", "int main(void) {", "if (sizeof(void *) != 8) return 77;",
             f'printf("{VERSION} 0x%x\\n", {VERSION});']
    for found in re.finditer(r"\b(struct|enum)\s*(\w*)\s*\{", text):
        kind, name = found[1], found[2]
        body = block(text, found.end() - 1)[0]
        if kind == "enum":
            lines += [f'printf("enum {name or "(unnamed)"} {value} %lld\\n", (long long){value});' for value in re.findall(r"\b(ZERO_\w+)\s*(?:=|,|$)", body)]
        elif name.startswith("zero_"):
            lines += [f'printf("struct {name} {field} %zu %zu\\n", __builtin_offsetof(struct {name}, {field}), sizeof ((struct {name} *)0)->{field});'
                      for field in fields(body)]
            lines.append(f'printf("struct {name} %zu\\n", sizeof(struct {name}));')
    return "\n".join([*lines, "}"])


def layout(root):
    """Returns the compiler's layouts, as lines."""
    header = os.path.join(root, "zero", "zero.h")
    text = subprocess.run([*CC, "-E", "-P", "-I", root, header], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
        with open(source, "w", encoding="utf-8") as f:
            f.write(program(text))
        subprocess.run([*CC, "-I", root, "-o", binary, source], check=True)
        told = subprocess.run([binary], capture_output=True, text=True, check=False)
    if told.returncode == 77:
        print("pointers have not 64 bits here")
        sys.exit(77)
    return told.stdout.splitlines()


def recorded(root):
    path = os.path.join(root, RECORD)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return f.read().splitlines()


def version(lines):
    """Returns the largest version, because a merged record may have two; 0 if there is none."""
    return max((int(line.split()[1], 16) for line in lines if line.startswith(VERSION)), default=0)


def changed(was, now):
    return sorted({" ".join(line.split()[:2]) for line in set(was) ^ set(now) if not line.startswith(VERSION)})


def check(root):
    was, now = recorded(root), layout(root)
    names, command = changed(was, now), "python3 test/zero/public_layout.py . --record"
    if names and version(was) == version(now):
        return [f"the layout of {name} changed: raise {VERSION} and record it; this does both: {command}" for name in names]
    return [] if was == now else [f"{VERSION} is 0x{version(now):x}, and the layout of another version is recorded; record it: {command}"]


def record(root):
    was, now = recorded(root), layout(root)
    if changed(was, now) and version(now) <= version(was):
        for header in glob.glob(os.path.join(root, "zero", "*.h")):
            with open(header, encoding="utf-8") as f:
                text = f.read()
            raised = re.sub(rf"(#define {VERSION}) \w+", rf"\1 0x{version(was) + 1:x}u", text)
            if raised != text:
                with open(header, "w", encoding="utf-8") as f:
                    f.write(raised)
        now = layout(root)
    with open(os.path.join(root, RECORD), "w", encoding="utf-8") as f:
        f.writelines(line + "\n" for line in now)


def self_test(root):
    body = "int a, b[2]; void (*call)(void *arg, int n);\nstruct { int x; struct { int y; } deep; } in; union { int p; float q; };"
    assert list(fields(body)) == ["a", "b", "call", "in", "in.x", "in.deep", "in.deep.y", "p", "q"], list(fields(body))
    changes = [("struct zero_tensor {\n", "struct zero_tensor {\n    int32_t added;\n", "struct zero_tensor"), ("ZERO_F32 = 1,", "ZERO_F32 = 9,", "enum zero_dtype")]
    with tempfile.TemporaryDirectory() as copy:
        os.makedirs(os.path.join(copy, os.path.dirname(RECORD)))
        shutil.copytree(os.path.join(root, "zero"), os.path.join(copy, "zero"))
        record(copy)
        before = version(recorded(copy))
        for old, new, _ in changes:
            assert sum(replace(path, old, new) for path in glob.glob(os.path.join(copy, "zero", "*.h"))) == 1, old
        faults = check(copy)
        assert all(any(f"the layout of {name} changed: raise {VERSION}" in fault for fault in faults) for _, _, name in changes), faults
        record(copy)
        assert check(copy) == [] and version(recorded(copy)) == before + 1
        with open(os.path.join(copy, RECORD), "a", encoding="utf-8") as f:
            f.write(f">>>>>>> merged\n{VERSION} 0x{before + 5:x}\n")
        assert check(copy)
        record(copy)
        assert check(copy) == [] and version(recorded(copy)) == before + 6


def replace(path, old, new):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(text.replace(old, new, 1))
    return old in text


if __name__ == "__main__":
    if len(sys.argv) == 2:
        faults = check(sys.argv[1])
        print("\n".join(faults) or "as recorded")
        sys.exit(1 if faults else 0)
    elif len(sys.argv) == 3 and sys.argv[2] in ("--record", "--self-test"):
        {"--record": record, "--self-test": self_test}[sys.argv[2]](sys.argv[1])
    else:
        sys.exit(__doc__)
