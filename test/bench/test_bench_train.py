"""Training from outside: the same numbers plain and wrapped, at every stage, world, prefetch and budget; what is printed."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import (CATEGORIES, OPTIMIZERS, STEP_KEYS, SUMMARY_KEYS, TEXT, TINY, ZERO_BENCH, ZERO_RUN, bench, lines, run,  # noqa: E402
                           train)

STEPS = 4


def result(world, *args, **more):
    """What must agree: every loss and gradient norm, and the hash of the state."""
    steps, summary = train(world, *TINY, f'--steps={STEPS}', *args, **more)
    assert len(steps) == STEPS
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


class Shape(unittest.TestCase):
    def check(self, world, steps, summary):
        for i, s in enumerate(steps):
            self.assertEqual(list(s), STEP_KEYS)
            self.assertEqual((s['event'], s['step']), ('step', i + 1))
            self.assertGreater(s['ms'], 0)
            self.assertAlmostEqual(s['tokens_per_s'] * s['ms'] / 1000, world * 2 * 16, delta=0.01)
        self.assertEqual(list(summary), SUMMARY_KEYS)
        self.assertEqual((summary['event'], summary['world']), ('summary', world))
        self.assertEqual(summary['loss'], steps[-1]['loss'])
        self.assertRegex(summary['state_sha256'], '^[0-9a-f]{64}$')
        self.assertEqual(list(summary['bytes']), CATEGORIES)
        self.assertEqual(list(summary['planned_bytes']), CATEGORIES)
        self.assertEqual(list(summary['collectives']), ['all_gather', 'reduce_scatter', 'all_reduce', 'wire_bytes'])
        self.assertGreater(summary['peak_rss_bytes'], summary['bytes']['total'])

    def test_wrapped(self):
        for stage in range(4):
            steps, summary = train(2, *TINY, '--steps=3', f'--stage={stage}')
            self.check(2, steps, summary)
            self.assertEqual(summary['stage'], stage)
            self.assertGreater(summary['collectives']['wire_bytes'], 0)
            units, n = 3, summary['collectives']
            self.assertEqual(n['reduce_scatter'] + n['all_reduce'], 3 * units)
            self.assertEqual(n['all_reduce'] > 0, stage == 0)

    def test_plain(self):
        steps, summary = train(1, *TINY, '--steps=3', '--plain')
        self.check(1, steps, summary)
        self.assertIsNone(summary['stage'])

    def test_losses_that_are_not_numbers(self):
        for how in ['--plain', '--stage=2']:
            steps, _ = train(1, *TINY, '--steps=14', '--lr=1e6', '--clip=0', '--weight-decay=1e6', how)
            self.assertIsNone(steps[-1]['loss'])  # and the line was JSON

    def test_only_rank_0_talks(self):
        done = run([ZERO_RUN, '-n', '3', ZERO_BENCH, 'train', *TINY, '--layers=6', '--steps=3', '--stage=3'])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertTrue(all(line.startswith('[0]') for line in done.stdout.splitlines()), done.stdout)
        self.assertIn('stage 3 on 3 ranks', done.stdout)
        self.assertIn('tokens/s', done.stdout)


class Parity(unittest.TestCase):
    def test_watched(self):
        for world in [1, 3]:
            for stage in range(4):
                args = [f'--stage={stage}', '--dtype=bf16', '--accum=2']
                watched = result(world, *args, env={'ZERO_CHECK': '1'})
                self.assertEqual(watched, result(world, *args), f'world {world} {args}')

    def test_plain_and_wrapped(self):
        for dtype in ['f32', 'bf16']:
            for clip in [0, 0.5]:
                args = [f'--dtype={dtype}', f'--clip={clip}']
                plain = result(1, '--plain', *args)
                for stage in range(4):
                    wrapped = result(1, f'--stage={stage}', *args)
                    self.assertEqual([loss for loss, _ in wrapped[0]], [loss for loss, _ in plain[0]], f'stage {stage} {args}')
                    for (_, a), (_, b) in zip(wrapped[0], plain[0]):  # summed in another order
                        self.assertAlmostEqual(a, b, delta=1e-6 * b)
                    self.assertEqual(wrapped[1], plain[1], f'stage {stage} {args}')

    def test_stages(self):
        for world in [1, 2, 3, 4]:
            for args in [['--dtype=f32', '--accum=1'], ['--dtype=bf16', '--accum=4']]:
                results = [result(world, f'--stage={stage}', *args) for stage in range(4)]
                self.assertEqual(results, results[:1] * 4, f'world {world} {args}')

    def test_prefetch_and_budget(self):
        want = result(3, '--stage=0')
        for args in [['--prefetch=0'], ['--prefetch=1'], ['--prefetch=9'], ['--budget=150K'], ['--budget=1M']]:
            self.assertEqual(result(3, '--stage=3', *args), want, args)

    def test_worlds(self):
        for dtype in ['f32', 'bf16']:
            want = result(1, '--accum=4', '--stage=0', f'--dtype={dtype}')
            for world, stage in [(1, 3), (2, 1), (2, 3), (4, 0), (4, 3)]:
                got = result(world, f'--accum={4 // world}', f'--stage={stage}', f'--dtype={dtype}')
                self.assertEqual(got, want, f'world {world} stage {stage} {dtype}')

    def test_optimizers(self):
        for optimizer in OPTIMIZERS:
            args = [f'--optimizer={optimizer}', '--lr=1e-3']
            self.assertEqual(result(2, '--stage=3', *args), result(2, '--stage=0', *args), optimizer)

    def test_bytes_are_as_planned(self):
        for world in range(1, 6):
            for stage in range(4):
                _, summary = train(world, *TINY, '--steps=1', f'--stage={stage}', '--dtype=bf16')
                self.assertEqual(summary['bytes'], summary['planned_bytes'], f'world {world} stage {stage}')

    def test_plan_tells_what_a_run_takes(self):
        model = [a for a in TINY if a.split('=')[0] in ('--layers', '--heads', '--channels', '--context')]
        for args in [['--dtype=f32', '--accum=1'], ['--dtype=bf16', '--accum=2']]:
            plan = lines(bench('plan', '--json', '--world=3', *model, *args).stdout)
            for stage in range(4):
                _, summary = train(3, *TINY, '--steps=4', f'--stage={stage}', *args)
                self.assertEqual(plan[stage]['bytes'], summary['bytes'], f'stage {stage} {args}')
                beside = summary['collectives']['wire_bytes'] - 4 * plan[stage]['wire_bytes']
                self.assertIn(beside, range(0, 16384), f'stage {stage} {args}')  # the losses, which are no part of a plan


class Learning(unittest.TestCase):
    def test_the_loss_falls(self):
        steps, _ = train(1, '--plain', '--layers=1', '--steps=80', '--data', TEXT)
        self.assertAlmostEqual(steps[0]['loss'], 5.5, delta=0.5)
        self.assertLess(sum(s['loss'] for s in steps[-10:]) / 10, 4)

    def test_seconds(self):
        steps, summary = train(2, *TINY, '--seconds=0.5', '--stage=2')
        self.assertGreater(len(steps), 0)
        self.assertEqual(steps[-1]['loss'], summary['loss'])

    def test_seeds(self):
        self.assertEqual(result(1, '--plain', '--seed=5'), result(1, '--plain', '--seed=5'))
        self.assertNotEqual(result(1, '--plain', '--seed=5'), result(1, '--plain', '--seed=6'))


class Others(unittest.TestCase):
    SMALL = r'\A[^\n]*warning: stage 3 shards nothing: all \d units are resident[^\n]*\n\Z'  # a few layers fit the slots
    MEMORY = ['memory', '--ranks=2', '--layers=2', '--heads=2', '--channels=32', '--context=16', '--steps=1']

    def test_memory(self):
        done = bench(*self.MEMORY, '--json')
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, self.SMALL)
        stages = lines(done.stdout)
        self.assertEqual([s['stage'] for s in stages], [0, 1, 2, 3])
        for s in stages:
            self.assertEqual(list(s), ['stage', 'planned_bytes', 'bytes', 'peak_rss_bytes'])
            self.assertEqual(s['planned_bytes'], s['bytes'])
            self.assertGreater(s['peak_rss_bytes'], s['bytes']['total'])

    def test_memory_table_and_plot(self):
        with tempfile.TemporaryDirectory() as folder:
            for kind, magic in [('svg', b'<?xml'), ('png', b'\x89PNG')]:
                path = os.path.join(folder, f'it\'s a "plot".{kind}')
                done = bench(*self.MEMORY, '--plot', path)
                self.assertEqual(done.returncode, 0)
                self.assertRegex(done.stderr, self.SMALL)
                for word in ['planned', 'allocated', 'peak resident', 'stage 3']:
                    self.assertIn(word, done.stdout)
                with open(path, 'rb') as f:
                    self.assertTrue(f.read().startswith(magic))

    def test_no_gnuplot(self):
        done = bench(*self.MEMORY, '--plot', '/tmp/never.svg', env={'PATH': '/nonexistent'})
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 2), done.stderr)
        self.assertIn('gnuplot', done.stderr.splitlines()[1])

    def test_overhead(self):
        done = bench('overhead', '--units=20', '--passes=5', '--json')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        stages = lines(done.stdout)
        self.assertEqual([s['stage'] for s in stages], [0, 1, 2, 3])
        for s in stages:
            self.assertGreater(s['forward_ns'], 0)
            self.assertGreater(s['backward_ns'], 0)
        self.assertIn('backward', bench('overhead', '--units=20', '--passes=5').stdout)
        wrong = bench('overhead', '--units=20', '--passes=5', env={'ZERO_STGE': '3'})  # only its own choices are not told
        self.assertIn('ZERO_STGE is not known', wrong.stderr)

    def test_overhead_among_ranks(self):
        done = bench('overhead', '--world=3', '--units=20', '--passes=5', '--json')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        stages = lines(done.stdout)
        self.assertEqual([(s['stage'], s['world']) for s in stages], [(stage, 3) for stage in range(4)])
        for s in stages:
            self.assertAlmostEqual(s['ratio'], s['forward_ns'] / s['forward_of_2_ns'])
        self.assertIn('ratio', bench('overhead', '--world=2', '--units=20', '--passes=5').stdout)


if __name__ == '__main__':
    unittest.main()
