#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A library built without -Dasserts contains no condition of an assert, which the compiler would store as
text. A library built with them contains most.

    asserts.py ROOT true|false LIBZERO.SO    false: built without
"""
import os
import re
import sys

FLOORS = ("kernels", "comm", "shard", "zero")
ASSERT = re.compile(r"\bZR_ASSERT\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\);")


def conditions(root):
    """Returns the asserted conditions as the compiler would store them, except those too short to be
    recognized."""
    found = set()
    for floor in FLOORS:
        for folder, _, names in os.walk(os.path.join(root, floor)):
            for name in names:
                if name.endswith((".c", ".h")):
                    with open(os.path.join(folder, name), encoding="utf-8") as f:
                        found |= {re.sub(r"\s+", " ", text.strip()) for text in ASSERT.findall(f.read())}
    return {text for text in found if len(text) >= 10 and text != "condition"}


def held(root, library):
    """Returns those found in the library, and the number of all."""
    with open(library, "rb") as f:
        data = f.read()
    asked = conditions(root)
    return sorted(text for text in asked if text.encode() in data), len(asked)


def main(root, with_asserts, library):
    texts, n = held(root, library)
    print(f"{library} holds the text of {len(texts)} of {n} asserts")
    if n < 5:
        print("fewer asserts than there are: this looks for them in another way than they are written")
        return 1
    if with_asserts == "true":
        return 0 if 2 * len(texts) > n else 1
    print("\n".join(texts))
    return 1 if texts else 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
