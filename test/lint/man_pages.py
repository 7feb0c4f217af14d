#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manual pages, which the build makes from the programs' --help, have every option and subcommand, and
are rendered without a warning.

    man_pages.py PROGRAM PAGE [PROGRAM PAGE...]
    man_pages.py                                 if the build has made none: skipped (exit code 77)

If CHECKS_MUST_RUN is set, as by .ci/run, pages that were not made or cannot be rendered are failures.
"""
import os
import re
import shutil
import subprocess
import sys

SKIPPED = 1 if os.environ.get("CHECKS_MUST_RUN") else 77
SUBCOMMAND = re.compile(r"^  ([a-z]+) +\S", re.MULTILINE)
OPTION = re.compile(r"^ +(?:-\w, )?(--[a-z][a-z0-9-]*)", re.MULTILINE)


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def helps(program):
    """Yields (subcommand or "", its help)."""
    text = output_of(program, "--help")
    yield "", text
    for subcommand in SUBCOMMAND.findall(text) if "SUBCOMMAND" in text else ():
        yield subcommand, output_of(program, subcommand, "--help")


def faults_of(program, page):
    with open(page, encoding="utf-8") as f:
        source = f.read()
    sections = dict(re.findall(r"^\.SH (?:SUBCOMMAND )?([A-Z]+)\n(.*?)(?=^\.SH |\Z)", source.replace("\\-", "-").replace("\\fB", ""), re.DOTALL | re.MULTILINE))
    n_options = 0
    for subcommand, text in helps(program):
        section = sections.get(subcommand.upper() or "DESCRIPTION")
        if section is None:
            yield f"{page}: {subcommand} has no section"
            continue
        for option in OPTION.findall(text):
            n_options += 1
            if not re.search(re.escape(option) + r"(?![\w-])", section):
                yield f"{page}: {subcommand} {option} is missing"
    if n_options < 5:
        yield f"{page}: {program} --help shows {n_options} options, so this test does not see them"
    rendered = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, check=False)
    if rendered.returncode != 0 or rendered.stderr:
        yield f"{page}: groff: exit code {rendered.returncode}\n{rendered.stderr}"
    if len(rendered.stdout.splitlines()) < 20:
        yield f"{page}: is empty when rendered"


def main(args):
    if not args or not shutil.which("groff"):
        print("skipped: " + ("there is no groff" if args else "the build made no manual pages, for want of help2man"))
        return SKIPPED
    faults = [fault for i in range(0, len(args), 2) for fault in faults_of(args[i], args[i + 1])]
    print("\n".join(faults) or "every option is there, and all is rendered")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
