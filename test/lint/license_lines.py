#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source file names its license in its first line, or in its second after "#!".

    license_lines.py ROOT         checks the tree, prints FILE: what is wrong, exits 1 if anything is
    license_lines.py ROOT --fix   puts the line into each file that lacks it
    license_lines.py --self-test  checks the checker
"""
import os
import re
import sys

from tree_clean import tracked

LICENSE = "SPDX-License-Identifier: Apache-2.0"
LINES = {"c": f"/* {LICENSE} */", "py": f"# {LICENSE}"}
STYLE = {"c": "c", "h": "c", "cc": "c", "cu": "c", "cuh": "c", "inc": "c", "py": "py", "sh": "py"}
# The only script without an ending.
SCRIPT = re.compile(r"\.ci/run$")


def style_of(path):
    return "py" if SCRIPT.search(path) else STYLE.get(path.rsplit(".", 1)[-1]) if "." in os.path.basename(path) else None


def place_of(text):
    """Returns where the line belongs: after "#!"."""
    return text.index("\n") + 1 if text.startswith("#!") else 0


def has_line(path, text):
    return text[place_of(text):].startswith(LINES[style_of(path)] + "\n")


def with_line(path, text):
    at = place_of(text)
    return text[:at] + LINES[style_of(path)] + "\n" + text[at:]


def faults_of(root, fix=False):
    faults = []
    for path in tracked(root):
        if not style_of(path):
            continue
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        if has_line(path, text):
            continue
        if fix:
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write(with_line(path, text))
        else:
            faults.append(f"{path}: its first line is to be {LINES[style_of(path)]}; license_lines.py ROOT --fix puts it there")
    return faults


def self_test():
    failures = []
    for path, text, wanted in [("a/b.c", "int a;\n", "/* SPDX-License-Identifier: Apache-2.0 */\nint a;\n"),
                               ("a.sh", "#!/bin/sh\nset -e\n", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\nset -e\n"),
                               (".ci/run", "#!/bin/bash\n", "#!/bin/bash\n# SPDX-License-Identifier: Apache-2.0\n"), ("b.py", "", "# SPDX-License-Identifier: Apache-2.0\n")]:
        made = with_line(path, text)
        if has_line(path, text) or made != wanted or not has_line(path, made):
            failures.append(f"{path}: {text!r} becomes {made!r}, wanted {wanted!r}")
    failures += [f"{path} is taken for a source file" for path in ("README.md", "LICENSE", "a/seeds/h", ".ci/packages", "meson.build") if style_of(path)]
    return failures


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--fix"]):
        sys.exit(__doc__)
    found = self_test() if sys.argv[1] == "--self-test" else faults_of(sys.argv[1], fix=len(sys.argv) == 3)
    print("\n".join(found) or "no fault")
    sys.exit(1 if found else 0)
