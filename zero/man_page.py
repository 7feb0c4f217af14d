#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the manual page of a program, from what it says of itself.

    man_page.py HELP2MAN VERSION PROGRAM NAME OUT

help2man makes a page of PROGRAM --help; NAME is the line of its section NAME. Where that help lists subcommands, each has a section made of
its own --help.
"""
import os
import re
import subprocess
import sys
import tempfile

SUBCOMMAND = re.compile(r"^  ([a-z]+) +(\S.*)$", re.MULTILINE)
# As argp gives it, with every option: more than a synopsis can take, and all of them are described below it.
USAGE = re.compile(r"^Usage: (.*(?:\n .*)*)\n", re.MULTILINE)
# A heading among options, which help2man takes for text.
GROUP = re.compile(r"^\.IP\n([A-Z][\w ,]*):$", re.MULTILINE)


def output_of(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def short_usage(text):
    """[OPTION...] in place of every option of a subcommand."""
    def shorten(match):
        words = re.sub(r"\[-[^]]*\]", "", match[1]).split()
        return "Usage: " + " ".join([*words[:2], "[OPTION...]", *(word for word in words[2:] if word != "[OPTION...]")]) + "\n\n"
    return USAGE.sub(shorten, text, count=1)


class Maker:
    def __init__(self, help2man, version, program, folder):
        self.help2man, self.version, self.program = help2man, version, program
        self.stand_in = os.path.join(folder, os.path.basename(program))

    def page(self, text, name):
        """Of a text: help2man asks a program for it, here one that says nothing else."""
        with open(self.stand_in, "w", encoding="utf-8") as f:
            f.write(f"#!/bin/sh\ncat <<'END_OF_HELP'\n{text}END_OF_HELP\n")
        os.chmod(self.stand_in, 0o755)
        return output_of(self.help2man, "--no-info", "--version-string", self.version, "--name", name, self.stand_in)

    def section(self, subcommand):
        page = self.page(short_usage(output_of(self.program, subcommand, "--help")), subcommand)
        synopsis, body = re.search(r"^\.SH SYNOPSIS\n(.*?)^\.SH DESCRIPTION\n(.*)", page, re.MULTILINE | re.DOTALL).groups()
        return f".SH SUBCOMMAND {subcommand.upper()}\n{synopsis}.PP\n" + GROUP.sub(r".SS \1", body)


def main(help2man, version, program, name, out):
    text = output_of(program, "--help")
    subcommands = SUBCOMMAND.findall(text) if "SUBCOMMAND" in text else []
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(help2man, version, program, folder)
        # Two blanks are how help2man knows that a description begins.
        page = maker.page(SUBCOMMAND.sub(r"  \1  \2", text) if subcommands else text, name)
        page += "".join(maker.section(subcommand) for subcommand, _ in subcommands)
    with open(out, "w", encoding="utf-8") as f:
        f.write(page)


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
