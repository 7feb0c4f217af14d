#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The structs of zero/zero_config.h and zero/zero_info.h against those of the version that was released: programs that were built with it read and write
every field where it was then. A struct grows at its end, behind the padding that it ended with (else an old program's padding
would be taken for the field); one that lies within others grows into its reserved room.

    pinned_layout.py ROOT PINS            64-bit pointers only; prints what moved, exits 1 if anything did
    pinned_layout.py ROOT PINS --write    writes PINS anew: for a version that is not released yet
    pinned_layout.py --self-test          checks the checker
"""
import os
import re
import subprocess
import sys
import tempfile

SIZE = "(bytes)"


def fields_of(body, categories):
    body = re.sub(r"^\s*#.*$", "", body, flags=re.MULTILINE)
    names = []
    if "ZERO_MEM_MAP(ZERO_MEM_FIELD)" in body:
        names += categories
        body = body.replace("ZERO_MEM_MAP(ZERO_MEM_FIELD)", "")
    for declaration in body.split(";"):
        function = re.search(r"\(\*(\w+)\)\(", declaration)
        if function:
            names.append(function[1])
        elif declaration.strip():
            plain = re.sub(r"\[.*\]", "", declaration, flags=re.DOTALL)
            names += [re.findall(r"\w+", part)[-1] for part in plain.split(",")]
    return names


def structs(text):
    """Name and fields of every struct that a header defines, in its order."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.search(r"#define ZERO_MEM_MAP\(X\)(.*?[^\\])\n", text, re.DOTALL)
    categories = re.findall(r"X\((\w+),", found[1]) if found else []
    return [(name, fields_of(body, categories))
            for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.DOTALL | re.MULTILINE)]


def layout(root, headers=("zero/zero_config.h", "zero/zero_info.h")):
    """{struct: {field: (offset, bytes), SIZE: (bytes, bytes)}}, as the compiler has them."""
    known = []
    for header in headers:
        with open(os.path.join(root, header), encoding="utf-8") as f:
            known += structs(f.read())
    lines = [*(f'#include "{header}"' for header in headers), "#include <stdio.h>", "#include <stddef.h>", "int main(void) {"]
    for name, fields in known:
        for field in fields:
            lines.append(f'printf("{name} {field} %zu %zu\\n", offsetof(struct {name}, {field}), sizeof ((struct {name} *)0)->{field});')
        lines.append(f'printf("{name} {SIZE} %zu %zu\\n", sizeof(struct {name}), sizeof(struct {name}));')
    lines.append("}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
        with open(source, "w", encoding="utf-8") as f:
            f.write("\n".join(lines))
        subprocess.run([*os.environ.get("CC", "cc").split(), "-I", root, "-o", program, source], check=True)
        told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return read(told)


def read(text):
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, field, offset, size = line.split()
            found.setdefault(name, {})[field] = (int(offset), int(size))
    return found


def compare(pinned, now):
    for name, pins in pinned.items():
        if name not in now:
            yield f"struct {name} is gone"
            continue
        fields, end = now[name], pins[SIZE][0]
        room = [(at, at + n) for field, (at, n) in pins.items() if field.startswith("reserved")]
        for field, at in pins.items():
            if field != SIZE and not field.startswith("reserved") and fields.get(field) != at:
                yield f"{name}.{field} was {at[1]} bytes at {at[0]}; now: {fields.get(field, 'gone')}"
        for field, (at, n) in fields.items():
            inside = any(first <= at and at + n <= last for first, last in room)
            if field not in pins and not field.startswith("reserved") and at < end and not inside:
                yield f"{name}.{field} lies at {at}, within the {end} bytes that the struct had: put a reserved field before it"
        if room and fields[SIZE][0] != end:
            yield f"struct {name} has {fields[SIZE][0]} bytes, and had {end}: it lies within others, which would move"
        elif fields[SIZE][0] < end:
            yield f"struct {name} has {fields[SIZE][0]} bytes, and had {end}"


def self_test():
    pins = {"s": {"a": (0, 8), "b": (8, 4), SIZE: (16, 16)}, "in": {"a": (0, 8), "reserved": (8, 16), "total": (24, 8), SIZE: (32, 32)}}
    cases = [
        ("the same", {}, {}, None),
        ("grown behind the padding", {"reserved0": (12, 4), "c": (16, 4), SIZE: (24, 24)}, {}, None),
        ("grown", {"c": (16, 4), SIZE: (24, 24)}, {}, None),
        ("into the padding", {"c": (12, 4)}, {}, "s.c lies at 12"),
        ("moved", {"b": (12, 4)}, {}, "s.b was 4 bytes at 8"),
        ("wider", {"b": (8, 8)}, {}, "s.b was 4 bytes at 8"),
        ("room used", {}, {"c": (8, 8), "reserved": (16, 8)}, None),
        ("grown beside the room", {}, {"c": (32, 8), SIZE: (40, 40)}, "struct in has 40 bytes"),
        ("total moved", {}, {"total": (16, 8)}, "in.total was 8 bytes at 24"),
    ]
    failures = []
    for what, of_s, of_in, expected in cases:
        found = list(compare(pins, {"s": {**pins["s"], **of_s}, "in": {**pins["in"], **of_in}}))
        if len(found) != (expected is not None) or (expected and not found[0].startswith(expected)):
            failures.append(f"{what}: {found}, expected {expected}")
    if compare(pins, {"s": pins["s"]}) is None or list(compare(pins, {"s": pins["s"]})) != ["struct in is gone"]:
        failures.append("a struct that is gone is not missed")
    return failures


def main(root, path, write):
    now = layout(root)
    if write:
        with open(path, "w", encoding="utf-8") as f:
            f.write("# struct, field, offset, bytes; on machines with 64-bit pointers. See pinned_layout.py.\n")
            for name, fields in now.items():
                f.writelines(f"{name} {field} {at} {n}\n" for field, (at, n) in fields.items())
        return []
    if now["zero_config"]["size"][1] != 8:
        print("pointers have not 64 bits here")
        return []
    with open(path, encoding="utf-8") as f:
        return list(compare(read(f.read()), now))


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        faults = self_test()
    elif len(sys.argv) == 3 or (len(sys.argv) == 4 and sys.argv[3] == "--write"):
        faults = main(sys.argv[1], sys.argv[2], len(sys.argv) == 4)
    else:
        sys.exit(__doc__)
    if faults:
        faults.append("Of a version that is not released yet, the layout may change: run this with --write.")
    print("\n".join(faults) or "no field moved")
    sys.exit(1 if faults else 0)
