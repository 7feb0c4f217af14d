# SPDX-License-Identifier: Apache-2.0
"""Runs every command that README.md shows, or finds it in one of the lists below, with the reason why it is
not run. A new command that is in neither fails.

    test_readme_commands.py ZERO_RUN ZERO_BENCH PROGRAM
"""
import os
import re
import shlex
import sys
import tempfile
import unittest

from clean_run import run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, 'test', 'lint'))
from readme_text import commands, read  # noqa: E402

ZERO_RUN, ZERO_BENCH, PROGRAM = map(os.path.abspath, sys.argv[1:4])
del sys.argv[1:4]  # the rest is unittest's

# Commands that start with one of these are not run here.
ELSEWHERE = {
    'sh test/run.sh': 'runs this test',
    'sh bench/run.sh': 'installs, builds, and trains for minutes; what it builds and calls is tested in test/bench/',
    'sh bench/report.sh': 'builds, and measures for minutes; test/bench/test_report_page.py makes the page of small runs',
    'meson ': 'the build: test/lint/library_alone.py runs it, in a copy of the tree',
    'export ': 'of the build: test/lint/library_alone.py runs it',
    'cc program.c ': 'of what was installed: test/lint/library_alone.py runs it',
    'apt-get install ': 'wants root; that .ci/packages, which CI installs, has what it names is tested below',
}
# Models that fit a test's machine and time: gpt2-124M on 4 ranks takes 9 GB.
SMALLER = {'gpt2-124M': 'gpt2-nano'}
# Text that the output must have, besides exit code 0.
SAYS = {
    'zero-run -n 4 ./program': r'^\[0\] step 100: out is (2\.9|3\.0)',
    'ZERO_CHECK=1 zero-run': r'^\[0\] step 100: out is (2\.9|3\.0)',
    'zero-bench memory': r'(?s)stage 0.*stage 3.*allocated',
    'zero-bench plan': r'(?s)stage 0.*stage 3',
    'zero-bench tune': r'cfg\.stage = \d',
}


def known(table, command):
    return [what for start, what in table.items() if command.startswith(start)]


class ReadmeCommands(unittest.TestCase):
    def setUp(self):
        self.commands = [command for _, command in commands(read(ROOT))]
        self.here = [command for command in self.commands if not known(ELSEWHERE, command)]

    def test_are_run(self):
        self.assertGreaterEqual(len(self.here), 3, self.commands)
        with tempfile.TemporaryDirectory() as folder:
            for name, path in ('zero-run', ZERO_RUN), ('zero-bench', ZERO_BENCH), ('program', PROGRAM):
                os.symlink(path, os.path.join(folder, name))
            for command in self.here:
                wanted = known(SAYS, command)
                self.assertTrue(wanted, f'README.md has a command that is not in SAYS, nor in ELSEWHERE: {command}')
                for large, small in SMALLER.items():
                    command = command.replace(large, small)
                done = run(['sh', '-euc', command], cwd=folder, PATH=f'{folder}:{os.environ["PATH"]}')
                self.assertEqual((done.returncode, done.stderr), (0, ''), command)
                self.assertRegex(done.stdout, re.compile(wanted[0], re.MULTILINE), command)

    def test_lists(self):
        """The lists have no command that is no longer in README.md."""
        for table in ELSEWHERE, SAYS:
            for start in table:
                self.assertTrue(any(command.startswith(start) for command in self.commands), f'README.md has no command {start}...')

    def test_packages(self):
        with open(os.path.join(ROOT, '.ci', 'packages'), encoding='utf-8') as f:
            packages = set(re.sub(r'#.*', '', f.read()).split())
        for command in self.commands:
            if command.startswith('apt-get install '):
                self.assertLessEqual(set(shlex.split(command)[2:]), packages)


if __name__ == '__main__':
    unittest.main()
