# SPDX-License-Identifier: Apache-2.0
"""Context parallelism (--cp) from outside. Each form and order trains as one rank does, up to rounding. Each of
them has its own bits, the same at every stage, in groups, in pipelines and on any number of data-parallel ranks.

A sample is run, drawn from SEED (printed; by default the time). All of it, in some minutes:

    N_CASES=all python3 test/bench/test_bench_context.py build-test/bench/zero-bench build-test/zero/zero-run Bits
"""
import functools
import itertools
import os
import random
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TEXT, ZERO_BENCH, ZERO_RUN, bench, lines, run, train  # noqa: E402

FORMS = ('gather', 'exchange', 'ring')
ORDERS = ('zigzag', 'contiguous')
SIZES = ['--layers=4', '--heads=12', '--channels=48', '--context=48', '--batch=2', '--data', TEXT]
MICRO = 4  # micro-batches of a step, over all data-parallel ranks


def cp_args(cp, form, order):
    return [f'--cp={cp}', f'--cp-form={form}', f'--cp-order={order}'] if cp > 1 else []


@functools.lru_cache(maxsize=None)
def run_of(world, *args):
    steps, summary = train(world, *SIZES, *args)
    assert summary['bytes'] == summary['planned_bytes'], args
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256'], summary['activation_bytes']


class Losses(unittest.TestCase):
    STEPS = 20

    def check(self, world, *args, beside=(), first=1e-5, rest=1e-5):
        got, want = (run_of(n, f'--steps={self.STEPS}', *beside, *more)[0] for n, more in ((world, args), (1, ())))
        for step, ((loss, _), (wanted, _)) in enumerate(zip(got, want)):
            self.assertLess(abs(loss - wanted), (rest if step else first) * wanted, (step, args))

    def test_forms(self):
        for cp, form, order in itertools.product((2, 3, 4), FORMS, ORDERS):
            with self.subTest(cp=cp, form=form, order=order):
                # the first loss differs by the rounding of its mean over the ranks
                self.check(cp, *cp_args(cp, form, order), first=1e-9 if form == 'gather' else 1e-6)

    def test_some_heads_at_a_time(self):
        self.check(2, *cp_args(2, 'gather', 'zigzag'), '--cp-heads=4', first=1e-9)

    def test_documents(self):
        one = run_of(1, f'--steps={self.STEPS}')[0]
        packed = run_of(1, f'--steps={self.STEPS}', '--documents=7')[0]
        self.assertNotEqual(one, packed)
        steps, _ = train(1, *SIZES, f'--steps={self.STEPS}', '--documents=7', '--plain')
        self.assertEqual([s['loss'] for s in steps], [loss for loss, _ in packed])
        for form, order in itertools.product(FORMS, ORDERS):
            with self.subTest(form=form, order=order):
                self.check(3, *cp_args(3, form, order), beside=('--documents=7',))

    def test_with_other_axes(self):
        for form in FORMS:
            cp = cp_args(2, form, 'zigzag')
            for args in (['--tp=2'], ['--tp=2', '--sequence-parallel'], ['--tp=2', '--pp=2', '--stage=1', '--sequence-parallel', '--schedule=zero-bubble']):
                with self.subTest(form=form, args=args):
                    self.check(2 ** (1 + sum(a in ('--tp=2', '--pp=2') for a in args)), *cp, *args, beside=('--accum=4',))

    def test_curves(self):
        """Over 200 steps, with a learning rate at which rounding does not grow, as with tp."""
        for form in FORMS:
            with self.subTest(form=form):
                got, want = (run_of(n, '--steps=200', '--lr=1e-3', *args)[0] for n, args in ((2, cp_args(2, form, 'zigzag')), (1, ())))
                self.assertLess(want[-1][0], 0.75 * want[0][0])  # it learns
                for step, ((loss, _), (wanted, _)) in enumerate(zip(got, want)):
                    self.assertLess(abs(loss - wanted), 1e-5 * wanted, step)

    def test_bf16(self):
        """Sums over cp are rounded at other places, each to 8 bits."""
        for form in FORMS:
            with self.subTest(form=form):
                self.check(2, *cp_args(2, form, 'zigzag'), beside=('--dtype=bf16',), first=2e-3, rest=5e-3)


class Bits(unittest.TestCase):
    """Cases of (cp, form, order, dtype): the run on cp ranks at stage 0, and others that have its bits."""

    @staticmethod
    def others(cp):
        """Returns (ranks, options) of meshes with cp, for MICRO micro-batches in a step."""
        meshes = [(1, ['--stage=1']), (1, ['--stage=2']), (1, ['--stage=3', '--prefetch=0']), (1, ['--stage=3', '--budget=256Ki']), (1, ['--stage=3', '--recompute'])]
        pipelines = [(2, ['--pp=2', schedule, stage]) for schedule in ('--schedule=1f1b', '--schedule=gpipe', '--schedule=zero-bubble')
                     for stage in ('--stage=0', '--stage=1', '--stage=3')]
        pipelines += [(n, [*args, '--recompute']) for n, args in pipelines]
        pipelines += [(2, ['--pp=2', '--schedule=interleaved', '--stages-per-rank=2', '--stage=2']), (4, ['--pp=4', '--schedule=gpipe'])]
        if cp == 3:  # sums over 6 ranks have an order of their own
            return [(n, [*args, f'--accum={MICRO}']) for n, args in meshes + pipelines]
        data = [(2, ['--stage=3', '--dp-replicate=2']), (2, ['--stage=3', '--dp-replicate=2', '--hybrid=hfsdp']), (2, ['--stage=2']), (2, ['--stage=0'])]
        return ([(n, [*args, f'--accum={MICRO}']) for n, args in meshes + pipelines] + [(n, [*args, f'--accum={MICRO // 2}']) for n, args in data] +
                [(4, ['--pp=2', '--stage=3', '--schedule=zero-bubble', f'--accum={MICRO // 2}'])])

    def test_are_the_same(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        cases = [(cp, form, order, more, how) for cp, form, order in itertools.product((2, 3, 4), FORMS, ORDERS)
                 for more in ([], ['--dtype=bf16'], ['--documents=9']) for how in self.others(cp) if cp * how[0] <= 8]
        if os.environ.get('N_CASES') != 'all':
            cases = random.Random(seed).sample(cases, int(os.environ.get('N_CASES') or 30))
        for cp, form, order, more, (n, how) in cases:
            args = [*cp_args(cp, form, order), *more, '--steps=3']
            with self.subTest(args=args, how=how):
                want, got = run_of(cp, *args, f'--accum={MICRO}'), run_of(cp * n, *args, *how)
                self.assertEqual(got[:2], want[:2])

    def test_parts(self):
        """With tp, too, all stages and schedules have the same bits."""
        for form in FORMS:
            args = [*cp_args(2, form, 'zigzag'), '--tp=2', '--steps=3', f'--accum={MICRO}']
            want = run_of(4, *args)
            for n, how in [(1, ['--stage=3']), (1, ['--recompute']), (2, ['--pp=2', '--stage=1', '--schedule=zero-bubble'])]:
                with self.subTest(form=form, how=how):
                    self.assertEqual(run_of(4 * n, *args, *how)[:2], want[:2])

    def test_watched(self):
        for form in FORMS:
            args = [*SIZES, *cp_args(2, form, 'zigzag'), '--steps=3', '--stage=3']
            steps, watched = train(2, *args, env={'ZERO_CHECK': '1'})
            self.assertEqual(len(steps), 3)
            self.assertEqual(watched['state_sha256'], run_of(2, *cp_args(2, form, 'zigzag'), '--steps=3', '--stage=3')[1], form)


class Memory(unittest.TestCase):
    """A rank has its part of the activations, besides the buffers that the plan names."""
    SIZES = ['--layers=3', '--heads=4', '--channels=32', '--context=256']

    def test_activations(self):
        one = train(1, *self.SIZES, '--batch=2', '--steps=1', '--data', TEXT)[1]['activation_bytes']
        for cp, form in itertools.product((2, 4), FORMS):
            with self.subTest(cp=cp, form=form):
                how = cp_args(cp, form, 'zigzag')
                plan = lines(bench('plan', '--json', '--dtype=f32', '--batch=2', f'--world={cp}', *self.SIZES, *how).stdout)[0]
                got = train(cp, *self.SIZES, '--batch=2', '--steps=1', '--data', TEXT, *how)[1]['activation_bytes']
                self.assertLess(got, one / cp + plan['cp_room_bytes'] + 8192)

    def test_plan(self):
        plans = [lines(bench('plan', '--json', '--dtype=f32', '--batch=2', '--world=8', *self.SIZES, *how).stdout)[0] for how in ([], cp_args(4, 'ring', 'zigzag'))]
        self.assertEqual(plans[0]['activation_bytes'], 4 * plans[1]['activation_bytes'])
        self.assertEqual(plans[0]['bytes'], plans[1]['bytes'] | {k: plans[0]['bytes'][k] for k in ('comm', 'exchange', 'total')})
        self.assertNotIn('cp', plans[0])
        n = 2 * 64 * 32 * 4  # bytes of this rank's tokens
        self.assertEqual((plans[1]['cp'], plans[1]['cp_bytes']), (4, 3 * (2 * 2 * 3 * n + 2 * 4 * n)))
        pipeline = lines(bench('plan', '--json', '--batch=1', '--world=8', '--pp=2', *self.SIZES, *cp_args(4, 'gather', 'contiguous')).stdout)
        self.assertTrue(all(line['cp'] == 4 and line['cp_room_bytes'] > 0 for line in pipeline))

    def test_memory(self):
        done = bench('memory', '--json', '--ranks=4', '--steps=1', '--batch=1', '--dp-shard=2', *self.SIZES, *cp_args(2, 'gather', 'zigzag'), '--cp-heads=2')
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in lines(done.stdout):
            self.assertEqual((line['bytes'], line['cp']), (line['planned_bytes'], 2))
        table = bench('memory', '--ranks=2', '--steps=1', '--batch=1', *self.SIZES, *cp_args(2, 'ring', 'zigzag'))
        self.assertIn('data on 1 of them, each row on 2', table.stdout)

    def test_tune(self):
        done = bench('tune', '--json', '--world=8', *self.SIZES, *cp_args(2, 'ring', 'zigzag'))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('cfg.mesh.cp = 2;', bench('tune', '--world=8', *self.SIZES, '--cp=2').stdout)


class Balance(unittest.TestCase):
    """CPU time of the ranks in attention is printed: about 0.99 of the largest in the mean for zigzag, 0.6 for contiguous."""

    def test_is_printed(self):
        for order in ORDERS:
            done = run([ZERO_RUN, '-n', '4', '--raw', ZERO_BENCH, 'profile', '--json', '--context=4096', '--layers=1', '--heads=4', '--channels=64', '--batch=1',
                        '--steps=2', '--params=1e4', '--rounds=1', *cp_args(4, 'gather', order)])
            self.assertEqual(done.returncode, 0, done.stderr)
            line = lines(done.stdout)[-1]
            self.assertEqual(len(line['attention_cpu_ms']), 4)
            print(f"{order}: {[round(ms, 1) for ms in line['attention_cpu_ms']]} ms, mean / largest {line['balance']:.3f}", flush=True)
            self.assertGreater(line['balance'], 0)


class Refused(unittest.TestCase):
    def test_by_name(self):
        for args, text in [(['--cp=3', '--context=64'], '--cp: the zigzag order cuts a row in 6 parts, which do not divide the 64 tokens'),
                           (['--cp=3', '--context=64', '--cp-order=contiguous'], '--cp: the contiguous order cuts a row in 3 parts'),
                           (['--cp=4', '--heads=6', '--cp-form=exchange'], '--cp-form exchange: 4 ranks do not divide the 6 heads of each'),
                           (['--cp=2', '--tp=2', '--heads=6', '--cp-form=exchange'], '--cp-form exchange: 2 ranks do not divide the 3 heads of each'),
                           (['--cp-form=ring'], '--cp-form: needs --cp of 2 or more'), (['--cp-order=zigzag'], '--cp-order: needs --cp of 2 or more'),
                           (['--cp=1', '--cp-heads=2'], '--cp-heads: needs --cp of 2 or more'), (['--cp=2', '--cp-form=ring', '--cp-heads=2'], '--cp-heads: needs --cp-form gather'),
                           (['--cp=2', '--cp-heads=4'], '--cp-heads: 4 do not divide the 6 heads of a rank')]:
            for command in ('train', 'plan', 'memory'):
                if command != 'train' and '--tp=2' in args:
                    continue
                done = bench(command, *args)
                self.assertEqual((done.returncode, done.stdout), (2, ''), (command, args))
                self.assertIn(text, done.stderr)
        self.assertIn('--cp: not with --plain', bench('train', '--cp=2', '--plain').stderr)
        self.assertIn('--cp: 4 ranks for each row', bench('plan', '--cp=4', '--world=6').stderr)
        self.assertIn('--ranks: 6 are not a multiple of 1 (--pp) times 4 (--cp)', bench('memory', '--cp=4', '--ranks=6').stderr)

    def test_ranks_that_cp_does_not_divide(self):
        done = run([ZERO_RUN, '-n', '3', '--raw', ZERO_BENCH, 'train', *SIZES, '--cp=2', '--steps=1'])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('cp', done.stderr)


if __name__ == '__main__':
    unittest.main()
