# SPDX-License-Identifier: Apache-2.0
"""All meshes of 2, 4 and 8 ranks, of pipeline stages, data parallelism and tensor parallelism, train a GPT-2
with the same result. Without tensor parallelism they have the bits of the data-parallel run with the same
micro-batches. With it, all meshes of the same tp have the same bits. Losses of 200 steps agree.

A sample is run, drawn from SEED (printed; by default the time). All of them, in some minutes:

    N_MESHES=all python3 test/bench/test_bench_meshes.py build-test/bench/zero-bench build-test/zero/zero-run Meshes
"""
import functools
import os
import random
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TEXT, train  # noqa: E402

POWERS = (1, 2, 4, 8)
MESHES = [(pp, dp, tp) for pp in POWERS for dp in POWERS for tp in POWERS if 2 <= pp * dp * tp <= 8]
MICRO = 8  # micro-batches of a step, over all data-parallel ranks
SIZES = ['--layers=16', '--heads=8', '--channels=16', '--context=8', '--batch=1', '--data', TEXT]


def axes(pp, dp, tp):
    return [f'--accum={MICRO // dp}', *[f'--{axis}={n}' for axis, n in (('pp', pp), ('tp', tp)) if n > 1]]


@functools.lru_cache(maxsize=None)
def run_of(pp, dp, tp, *how, n_steps=3):
    steps, summary = train(pp * dp * tp, *SIZES, *axes(pp, dp, tp), f'--steps={n_steps}', *how)
    assert len(steps) == n_steps and summary['bytes'] == summary['planned_bytes'], how
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


def schedules(pp):
    """Returns the options of each. The interleaved schedule has two stages on a rank, GPipe one or two."""
    if pp == 1:
        return [[]]
    two = '--stages-per-rank=2'
    return [['--schedule=1f1b'], ['--schedule=zero-bubble'], ['--schedule=gpipe'], ['--schedule=gpipe', two], ['--schedule=interleaved', two]]


class Meshes(unittest.TestCase):
    def test_are_all(self):
        self.assertEqual([sum(pp * dp * tp == n for pp, dp, tp in MESHES) for n in (2, 4, 8)], [3, 6, 10])

    def test_the_same_bits(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        draw = random.Random(seed)
        everything = os.environ.get('N_MESHES') == 'all'
        data_parallel = {tp: run_of(1, 8 // tp, tp) for tp in POWERS}
        self.assertEqual(run_of(1, 1, 1), data_parallel[1])
        cases = [(mesh, stage, how) for mesh in MESHES for stage in range(4) for how in schedules(mesh[0])]
        for mesh, stage, how in cases if everything else draw.sample(cases, 24):
            ahead = draw.choice(['--prefetch=0', '--prefetch=1', '--prefetch=2', *(['--budget=64Ki'] if stage == 3 else [])])
            how = [*how, f'--stage={stage}', ahead]
            with self.subTest(mesh=mesh, how=how):
                self.assertEqual(run_of(*mesh, *how), data_parallel[mesh[2]])

    def test_parts_are_near(self):
        """With tensor parallelism sums are rounded at other places. Otherwise losses and norms are those of
        the whole model."""
        whole, _ = run_of(1, 8, 1)
        for tp in POWERS[1:]:
            for (loss, norm), (want, want_norm) in zip(run_of(1, 8 // tp, tp)[0], whole):
                self.assertLess(abs(loss - want), 1e-5 * want)
                self.assertLess(abs(norm - want_norm), 1e-4 * want_norm)


class Curves(unittest.TestCase):
    """Over 200 steps each loss is the same number without tensor parallelism, and the same up to rounding
    with it."""
    STEPS = 200

    def curve(self, *mesh_and_how):
        return [loss for loss, _ in run_of(*mesh_and_how, '--layers=4', '--lr=3e-3', n_steps=self.STEPS)[0]]

    def test_lie_on_each_other(self):
        one = self.curve(1, 1, 1)
        self.assertLess(sum(one[-10:]) / 10, 0.75 * one[0])  # it learns
        two = '--stages-per-rank=2'
        for mesh, how in [((2, 2, 1), ['--stage=3']), ((4, 1, 1), ['--stage=1', '--schedule=gpipe']), ((2, 1, 1), ['--stage=2', '--schedule=interleaved', two]),
                          ((4, 1, 1), ['--stage=1', '--schedule=zero-bubble'])]:
            with self.subTest(mesh=mesh, how=how):
                self.assertEqual(self.curve(*mesh, *how), one)
        for mesh, how in [((1, 1, 2), ['--stage=0']), ((2, 2, 2), ['--stage=3', '--schedule=interleaved', two]), ((2, 1, 4), ['--stage=1', '--sequence-parallel']),
                          ((2, 1, 2), ['--stage=1', '--sequence-parallel', '--schedule=zero-bubble'])]:
            with self.subTest(mesh=mesh, how=how):
                for step, (loss, want) in enumerate(zip(self.curve(*mesh, *how), one)):
                    self.assertLess(abs(loss - want), 5e-3 * want, step)


if __name__ == '__main__':
    unittest.main()
