# SPDX-License-Identifier: Apache-2.0
"""zero/examples/pipelined.c learns, and prints the same however its layers are divided and its data cut.

test_pipelined.py ZERO_RUN PROGRAM
"""
import re
import sys
import unittest

from clean_run import run

ZERO_RUN, PROGRAM = sys.argv[1:3]
del sys.argv[1:3]  # the rest is unittest's


class Pipelined(unittest.TestCase):
    def staged(self, world, stages, **variables):
        done = run([ZERO_RUN, '-n', str(world), '--raw', PROGRAM, str(stages)], **variables)
        self.assertEqual((done.returncode, done.stderr), (0, ''), (world, stages, variables))
        return done.stdout

    def test_learns_the_same(self):
        said = self.staged(1, 1)
        losses = [(int(step), float(loss)) for step, loss in re.findall(r'^step (\d+) loss (\S+)$', said, re.MULTILINE)]
        self.assertEqual([step for step, _ in losses], list(range(20, 201, 20)), said)
        self.assertLess(losses[-1][1], 0.1 * losses[0][1])
        for world, stages, variables in ((2, 2, {}), (4, 2, {'ZERO_SCHEDULE': 'gpipe'}), (4, 4, {'ZERO_STAGE': '0'}), (4, 1, {}), (4, 2, {'ZERO_SCHEDULE': 'zero-bubble'}),
                                         (4, 2, {'ZERO_STAGE': '3', 'ZERO_CHECK': '1', 'ZERO_LOG': 'off'}),
                                         (4, 4, {'ZERO_SCHEDULE': 'zero-bubble', 'ZERO_STAGE': '3', 'ZERO_CHECK': '1', 'ZERO_LOG': 'off'})):
            self.assertEqual(self.staged(world, stages, **variables), said, (world, stages, variables))

    def test_what_does_not_divide(self):
        done = run([ZERO_RUN, '-n', '3', '--raw', PROGRAM, '3'])
        self.assertEqual(done.returncode, 1)
        self.assertIn('8 layers do not divide into 3 stages, or 8 micro-batches into 1 ranks', done.stderr)
        done = run([ZERO_RUN, '-n', '3', '--raw', PROGRAM, '2'])
        self.assertEqual(done.returncode, 1)
        self.assertIn('zero_find_place: ', done.stderr)


if __name__ == '__main__':
    unittest.main()
