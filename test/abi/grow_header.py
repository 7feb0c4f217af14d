#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""zero_config.h and zero_info.h of a later version, made of today's: every struct has one more field at its end, and those that lie
within others have one more in their reserved room.

    grow_header.py ZERO_CONFIG.H ZERO_INFO.H BESIDE... FOLDER    writes them there, and the headers beside them as they are
"""
import os
import re
import shutil
import sys

ADDED = "added"
NESTED = {"zero_bytes", "zero_traffic"}
OF_ONE_SIZE = {"zero_optim"}  # part of zero_config, and in arrays without a size of its own
CALLER_GIVES = {"zero_config", "zero_tensor", "zero_call", "zero_weight"}
CALLER_GETS = {"zero_plan_info", "zero_stats", "zero_step_info", "zero_action"}


def replaced_once(text, old, new):
    if text.count(old) != 1:
        sys.exit(f"{text.count(old)} times {old!r} in the headers, expected once")
    return text.replace(old, new)


def grow(text, expected):
    names = re.findall(r"^struct (\w+) \{$", text, re.MULTILINE)
    if set(names) != expected or len(names) != len(set(names)):
        sys.exit(f"a header defines {sorted(names)}: say here how a new one grows")
    for name in names:
        if name in NESTED | OF_ONE_SIZE:
            continue
        head, rest = text.split(f"struct {name} {{\n")
        body, tail = rest.split("\n};", 1)
        text = f"{head}struct {name} {{\n{body}\n    int64_t {ADDED};\n}};{tail}"
    return text


def grow_config(text):
    return replaced_once(grow(text, CALLER_GIVES | OF_ONE_SIZE | {"zero_update"}), "    X(size, sizeof(struct zero_config))",
                         f"    X({ADDED}, 77) X(size, sizeof(struct zero_config))")


def grow_info(text):
    text = grow(text, NESTED | CALLER_GETS)
    text = replaced_once(text, '    X(exchange, "exchange")\n', f'    X(exchange, "exchange") X({ADDED}, "added")\n')
    return re.sub(r"(struct zero_traffic \{.*?)    int64_t reserved\[(\d+)\];",
                  lambda m: f"{m[1]}    int64_t {ADDED}, reserved[{int(m[2]) - 1}];", text, count=1, flags=re.DOTALL)


def main(config, info, *beside, folder):
    for path, grown in ((config, grow_config), (info, grow_info)):
        with open(path, encoding="utf-8") as f:
            text = grown(f.read())
        with open(os.path.join(folder, os.path.basename(path)), "w", encoding="utf-8") as f:
            f.write(text)
    for path in beside:
        shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:-1], folder=sys.argv[-1]))
