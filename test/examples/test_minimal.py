# SPDX-License-Identifier: Apache-2.0
"""zero/examples/minimal.c learns the same at every stage and on every number of ranks, and the same as the
plain program. So does that program with the example of zero.h in it.

    test_minimal.py ZERO_RUN PLAIN PROGRAM WORLDS STAGES
"""
import re
import sys
import unittest

from clean_run import run

ZERO_RUN, PLAIN, PROGRAM = sys.argv[1:4]
WORLDS, STAGES = ([int(n) for n in arg.split(',')] for arg in sys.argv[4:6])
del sys.argv[1:6]  # the rest is unittest's


def losses(text):
    return [(int(step), float(loss)) for step, loss in re.findall(r'^step (\d+) loss (\S+)$', text, re.MULTILINE)]


def wrapped(world, **variables):
    return run([ZERO_RUN, '-n', str(world), '--raw', PROGRAM], **variables)


def logs(world):
    """One rank is warned that nothing is sharded. Several get no warning, since the example is large enough
    for stage 3."""
    return {'ZERO_LOG': 'off'} if world == 1 else {}


class Minimal(unittest.TestCase):
    def test_against_the_plain_program(self):
        done = run([PLAIN])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        plain = losses(done.stdout)
        self.assertEqual([step for step, _ in plain], list(range(20, 201, 20)))
        self.assertLess(plain[-1][1], plain[0][1] / 10)
        for world in WORLDS:
            told = []
            for stage in STAGES:
                done = wrapped(world, **logs(world), ZERO_STAGE=str(stage))
                self.assertEqual((done.returncode, done.stderr), (0, ''), (world, stage))
                told.append(losses(done.stdout))
            self.assertEqual(told[1:], told[:1] * (len(STAGES) - 1), f'stages differ on {world} ranks')
            self.assertEqual(len(told[0]), len(plain))
            for (step, loss), (plain_step, plain_loss) in zip(told[0], plain):
                self.assertEqual(step, plain_step)
                self.assertAlmostEqual(loss / plain_loss, 1, 2, (world, step))

    def test_brackets(self):
        """Check mode, which notices access outside of a bracket, reports nothing."""
        for world in WORLDS[:2]:
            done = wrapped(world, **logs(world), ZERO_CHECK='1')
            self.assertEqual((done.returncode, done.stderr), (0, ''), world)

    def test_failures_are_told(self):
        done = wrapped(1, ZERO_STAGE='7')
        self.assertEqual(done.returncode, 1)
        self.assertIn('ZERO_STAGE is "7"', done.stderr)
        done = wrapped(5)
        self.assertEqual(done.returncode, 1)
        self.assertIn('48 samples cannot be divided evenly among 5 ranks', done.stderr)


if __name__ == '__main__':
    unittest.main()
