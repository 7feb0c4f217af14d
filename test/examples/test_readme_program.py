# SPDX-License-Identifier: Apache-2.0
"""README.md's program learns, and prints the same at every stage and on every number of ranks that it allows.

test_readme_program.py ZERO_RUN PROGRAM
"""
import re
import sys
import unittest

from clean_run import run

ZERO_RUN, PROGRAM = sys.argv[1:3]
del sys.argv[1:3]  # the rest is unittest's


class ReadmeProgram(unittest.TestCase):
    def wrapped(self, world, **variables):
        done = run([ZERO_RUN, '-n', str(world), '--raw', PROGRAM], **variables)
        self.assertEqual((done.returncode, done.stderr), (0, ''), (world, variables))
        return done.stdout

    def test_learns(self):
        for world in 1, 2, 4:
            logs = {'ZERO_LOG': 'off'} if world == 1 else {}  # one rank is warned that nothing is sharded
            said = self.wrapped(world, **logs)
            errors = [(int(step), float(out) - 3) for step, out in re.findall(r'^step (\d+): out is (\S+), should be 3$', said, re.MULTILINE)]
            self.assertEqual([step for step, _ in errors], list(range(20, 101, 20)), said)
            self.assertGreater(abs(errors[0][1]), 1)
            self.assertLess(abs(errors[-1][1]), 0.1)
            for stage in 0, 1, 2:
                self.assertEqual(self.wrapped(world, **logs, ZERO_STAGE=str(stage)), said, (world, stage))

    def test_brackets(self):
        """Check mode, which notices access outside of a bracket, reports nothing."""
        self.wrapped(2, ZERO_CHECK='1')

    def test_failures_are_told(self):
        done = run([ZERO_RUN, '-n', '2', '--raw', PROGRAM], ZERO_STAGE='7')
        self.assertEqual(done.returncode, 1)
        self.assertIn('ZERO_STAGE is "7"', done.stderr)


if __name__ == '__main__':
    unittest.main()
