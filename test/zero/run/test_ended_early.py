# SPDX-License-Identifier: Apache-2.0
"""test_ended_early.py ZERO_RUN PROGRAM: if a rank ends before its zero_wrap, or in it, the other ranks stop waiting at once. Otherwise
they would wait for 10 minutes. The test fails if a run takes more than a minute."""
import os
import subprocess
import sys
import unittest

ZERO_RUN, PROGRAM = sys.argv[1:3]
del sys.argv[1:3]
LIMIT = int(os.environ.get("TEST_LIMIT", 60))


class EndedEarly(unittest.TestCase):
    def told(self, n, *args):
        # zero-run ends all ranks after the first failure, so only one rank may print the error.
        done = subprocess.run([ZERO_RUN, "-n", str(n), PROGRAM, *args], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        return done.stdout

    def test_rank_1_returns(self):
        for n in (2, 3):
            self.assertIn("rank 1 ended before it came to zero_wrap: its program returned 0", self.told(n))

    def test_inside_exchange(self):
        """The other rank, be it rank 0 or not, sees it."""
        for rank in "01":
            self.assertIn(f"rank {rank} ended in zero_wrap: its program returned 0", self.told(2, rank))


unittest.main()
