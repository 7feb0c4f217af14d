# SPDX-License-Identifier: Apache-2.0
"""A profiler attached to a training run gets every bracket, collective, update and step, balanced."""
import collections
import os
import sys
import unittest

LISTENER = sys.argv.pop()
from bench_program import TINY, ZERO_BENCH, ZERO_RUN, run  # noqa: E402 (it takes its arguments away too)

STEPS, UNITS = 3, 4  # two layers, the embedding, the head


class Profiler(unittest.TestCase):
    def said(self, env, stage):
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', '--json', f'--steps={STEPS}', f'--stage={stage}', *TINY], env=env)
        self.assertEqual(done.returncode, 0, done.stderr)
        ranks = collections.defaultdict(list)
        for line in done.stderr.splitlines():
            if line.startswith('nvtx '):
                _, pid, thread, what, name = line.split(' ', 4)
                ranks[pid].append((thread, what, name))
        return list(ranks.values())

    def test_every_range(self):
        ranks = self.said({'NVTX_INJECTION64_PATH': LISTENER}, 3)
        self.assertEqual(len(ranks), 2)
        self.assertEqual([what for _, what, _ in ranks[0]].count('destroy'), 1)
        for events in ranks:
            open_ranges, depth, names = {}, collections.Counter(), collections.Counter()
            for thread, what, name in events:
                if what == 'push':
                    depth[thread] += 1
                    names[name] += 1
                elif what == 'pop':
                    depth[thread] -= 1
                    self.assertGreaterEqual(depth[thread], 0)
                elif what == 'begin':
                    number, name = name.split(' ', 1)
                    open_ranges[number] = name
                    names[name] += 1
                elif what == 'end':
                    del open_ranges[name]  # KeyError: it was not open
            self.assertEqual(open_ranges, {})
            self.assertFalse(any(depth.values()))
            self.assertEqual(names['step'], STEPS)
            self.assertEqual(names['norm'], STEPS)
            for what in ('forward', 'backward', 'update', 'reduce_scatter'):
                for unit in range(1, UNITS - 1):
                    self.assertEqual(names[f'{what} {unit}'], STEPS, (what, unit, names))
            self.assertGreaterEqual(names['all_gather 1'], STEPS)

    def test_nobody_listens(self):
        self.assertEqual(self.said({}, 3), [])

    def test_a_listener_that_is_not_there(self):
        self.assertEqual(self.said({'NVTX_INJECTION64_PATH': os.devnull}, 2), [])


unittest.main()
