# SPDX-License-Identifier: Apache-2.0
"""Training from outside: the same numbers plain and wrapped, at every stage, world, prefetch and budget; and
what is printed.

A sample of the hybrids is run, drawn from SEED (printed; by default the time). All of them, in some minutes:

    N_HYBRIDS=all python3 test/bench/test_bench_train.py build-test/bench/zero-bench build-test/zero/zero-run Hybrids Parts
"""
import functools
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import (CATEGORIES, OPTIMIZERS, STATES_KEYS, STEP_KEYS, SUMMARY_KEYS, TEXT, TINY, ZERO_BENCH, ZERO_RUN, bench, lines, run,  # noqa: E402
                           train)

STEPS = 4


def result(world, *args, **more):
    """Returns what must agree: every loss and gradient norm, and the hash of the state."""
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
            self.assertIsNone(steps[-1]['loss'])  # the line was valid JSON

    def test_paused(self):
        """All ranks stand still for longer than their timeout, as on a suspended machine, and go on."""
        script = 'echo "pid $$" >&2; exec "$@"'
        command = [ZERO_RUN, '-n', '4', '--raw', 'sh', '-c', script, 'sh', ZERO_BENCH, 'train', '--json', *TINY, '--stage=3', '--steps=1000000']
        env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}
        env.update(ZERO_TIMEOUT_MS='3000', ZERO_START_TIMEOUT_MS='120000')
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, bufsize=0) as p:
            ranks = [int(p.stderr.readline().split()[1]) for _ in range(4)]
            p.stdout.readline()  # it trains
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)
            time.sleep(4.5)
            while select.select([p.stdout], [], [], 0)[0] and os.read(p.stdout.fileno(), 1 << 16):
                pass  # written before the pause
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
            later = [p.stdout.readline() for _ in range(20)]
            p.kill()  # the ranks die with it
            err = p.stderr.read().decode()
        self.assertTrue(all(later), err)

    def test_only_rank_0_talks(self):
        done = run([ZERO_RUN, '-n', '3', ZERO_BENCH, 'train', *TINY, '--layers=6', '--steps=3', '--stage=3'])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertTrue(all(line.startswith('[0]') for line in done.stdout.splitlines()), done.stdout)
        self.assertIn('stage 3 on 3 ranks', done.stdout)
        self.assertIn('tokens/s', done.stdout)

    def test_groups_are_told(self):
        done = run([ZERO_RUN, '-n', '4', '--raw', ZERO_BENCH, 'train', *TINY, '--layers=6', '--steps=1', '--prefetch=0', '--stage=3', '--hybrid=hfsdp',
                    '--dp-replicate=2'])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('stage 3 as hfsdp in groups of 2 on 4 ranks', done.stdout)
        self.assertRegex(done.stdout, r'\nof these from other groups: [0-9.]+ kB in [0-9.]+ reductions and gathers, and the agreement\n')

    def test_replicas_below_stage_3(self):
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *TINY, '--steps=1', '--stage=2', '--dp-replicate=2'])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r'\A[^\n]*warning: dp_replicate is 2 but stage is 2, not 3: all data-parallel ranks are one group[^\n]*\n\Z')


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
        for args in [['--prefetch=0'], ['--prefetch=1'], ['--prefetch=9'], ['--budget=150Ki'], ['--budget=1Mi']]:
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
                self.assertIn(beside, range(0, 16384), f'stage {stage} {args}')  # the losses, which a plan does not include


class Precisions(unittest.TestCase):
    """Precisions of sums, masters and moments, and where states are."""
    def test_remainder_is_f32(self):
        for world, stage in (1, 0), (2, 3):
            want = result(world, f'--stage={stage}', '--dtype=bf16')
            self.assertEqual(result(world, f'--stage={stage}', '--dtype=bf16', '--masters=remainder'), want)

    def test_the_same_bits_in_every_layout(self):
        for args in ['--moments=bf16'], ['--moments=q8'], ['--masters=none'], ['--grad-sum-dtype=bf16', '--masters=none', '--moments=q8']:
            want = result(1, '--dtype=bf16', '--accum=1', '--batch=4', *args)
            self.assertNotEqual(want, result(1, '--dtype=bf16', '--accum=1', '--batch=4'))
            several = [result(2, f'--stage={stage}', '--dtype=bf16', *args) for stage in range(4)]
            self.assertEqual(several, several[:1] * 4, args)

    def test_rounding_seed(self):
        for args, rounds in (['--masters=remainder'], False), (['--moments=bf16'], True), (['--moments=q8'], True), (['--masters=none'], True):
            one, other = [result(1, '--dtype=bf16', f'--rounding-seed={seed}', *args) for seed in (0, 1)]
            self.assertEqual(one != other, rounds, args)

    def test_where_states_are(self):
        want = result(2, '--stage=1', '--dtype=bf16', '--masters=remainder')
        with tempfile.TemporaryDirectory() as folder:
            for args in ['--states=host'], ['--states=file', f'--states-dir={folder}']:
                self.assertEqual(result(2, '--stage=1', '--dtype=bf16', '--masters=remainder', *args), want)
            self.assertEqual(os.listdir(folder), [])
            for args, env in [('--states=file', {'ZERO_STATES_DIR': folder}), (f'--states-dir={folder}', {'ZERO_STATES': 'file'})]:
                self.assertEqual(result(2, '--stage=1', '--dtype=bf16', '--masters=remainder', args, env=env), want)

    def test_told(self):
        done = bench('train', *TINY, '--steps=1', '--dtype=bf16', '--masters=remainder', '--moments=q8')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('; masters remainder, moments q8; ', done.stdout)
        _, summary = train(1, *TINY, '--steps=1', '--dtype=bf16', '--masters=none', '--moments=bf16')
        self.assertEqual([summary[k] for k in STATES_KEYS], ['f32', 'none', 'bf16', 'device'])
        self.assertEqual(summary['bytes'], summary['planned_bytes'])

    def test_variables_are_told(self):
        """What variables change is reported, not what the options say."""
        env = {'ZERO_GRAD_SUM_DTYPE': 'bf16', 'ZERO_MASTERS': 'remainder', 'ZERO_MOMENTS': 'q8', 'ZERO_STATES': 'host'}
        for args, want in (['--dtype=bf16', '--masters=none'], ['bf16', 'remainder', 'q8', 'host']), (['--dtype=f32'], ['f32', 'f32', 'q8', 'host']):
            _, summary = train(1, *TINY, '--steps=1', *args, env=env)
            self.assertEqual([summary[k] for k in STATES_KEYS], want)
        done = bench('train', *TINY, '--steps=1', '--dtype=bf16', env=env)
        self.assertIn('; gradient sums bf16, masters remainder, moments q8, states host; ', done.stdout)

    def test_the_loss_is_near(self):
        """Over a few steps at a low rate, so that rounding has not made the runs other runs yet.
        bench/results/states-2026-11-30.md has 2,000 steps."""
        def mean(*args):
            steps, _ = train(1, '--model=gpt2-nano', '--context=32', '--lr=2e-4', '--steps=120', '--dtype=bf16', '--data', TEXT, *args)
            return sum(s['loss'] for s in steps[-20:]) / 20
        want = mean()
        for args in ['--moments=bf16'], ['--masters=remainder', '--moments=q8'], ['--masters=none', '--moments=bf16']:
            self.assertAlmostEqual(mean(*args), want, delta=0.002 * want, msg=args)


class Hybrids(unittest.TestCase):
    """Groups of ranks. Groups whose size is a power of two give the bits of runs without groups. Others have
    their own bits, the same each time. No run holds or moves other bytes than zero-bench plan says, within a
    group and between groups. The mean of its losses, which a step also moves, is the same in all."""
    SIZES = ['--layers=6', '--heads=2', '--channels=32', '--context=16']

    @functools.lru_cache(maxsize=None)
    def run_of(self, n_steps, world, accum, dtype, prefetch, *how):
        args = [*self.SIZES, f'--accum={accum}', f'--dtype={dtype}', f'--prefetch={prefetch}']
        steps, summary = train(world, *TINY, *args, f'--steps={n_steps}', *how)
        self.assertEqual(len(steps), n_steps)
        self.assertEqual(summary['bytes'], summary['planned_bytes'])
        return [(s['loss'], s['grad_norm']) for s in steps], summary

    @functools.lru_cache(maxsize=None)
    def plan_of(self, world, group, accum, dtype, prefetch):
        args = [*self.SIZES, f'--accum={accum}', f'--dtype={dtype}', f'--prefetch={prefetch}']
        done = bench('plan', '--json', f'--world={world}', f'--dp-shard={group}', '--deterministic=on', *args)
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        return {s.get('hybrid', s['stage']): s for s in lines(done.stdout)}

    def beside(self, planned, *how):
        """Returns the bytes that the last of STEPS steps received in addition to the plan's: in total, and
        from other groups."""
        (_, summary), (_, before) = self.run_of(STEPS, *how), self.run_of(STEPS - 1, *how)
        self.assertEqual(summary['bytes'], planned['bytes'])
        return [summary['collectives'].get(tier, 0) - before['collectives'].get(tier, 0) - planned.get(tier, 0) for tier in ('wire_bytes', 'outer_bytes')]

    def check(self, world, group, hybrid, *how):
        plan = self.plan_of(world, group, *how)
        flat, flat_summary = self.run_of(STEPS, world, *how, '--stage=3')
        groups = ['--stage=3', f'--hybrid={hybrid}', f'--dp-replicate={world // group}']
        got, summary = self.run_of(STEPS, world, *how, *groups)
        self.assertEqual((summary['hybrid'], summary['dp_shard'], summary['stage']), (hybrid, group, 3))
        besides, outer = self.beside(plan[3], world, *how, '--stage=3')
        self.assertIn(besides, range(1, 8192))
        self.assertEqual(outer, 0)
        self.assertEqual(self.beside(plan[hybrid], world, *how, *groups), [besides, besides])  # over all ranks, and so counted between groups
        if group & (group - 1):
            again, summary_again = self.run_of.__wrapped__(self, STEPS, world, *how, *groups)
            self.assertEqual((again, summary_again['state_sha256']), (got, summary['state_sha256']))
            self.assertAlmostEqual(got[-1][0], flat[-1][0], delta=1e-2)
            return
        whole, whole_summary = self.run_of(STEPS, world, *how, '--stage=0')
        self.assertEqual((got, summary['state_sha256']), (flat, flat_summary['state_sha256']))
        self.assertEqual((got, summary['state_sha256']), (whole, whole_summary['state_sha256']))

    def test_groups(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        draw = random.Random(seed)
        everything = os.environ.get('N_HYBRIDS') == 'all'
        for world, group in [(8, 2), (8, 4), (6, 2), (6, 3)]:
            cases = [(hybrid, accum, dtype, prefetch) for hybrid in ['hsdp', 'hfsdp'] for accum in [1, 4] for dtype in ['f32', 'bf16']
                     for prefetch in ([0, 2] if everything else [draw.randrange(3)])]
            for hybrid, *how in cases if everything else draw.sample(cases, 1):
                with self.subTest(world=world, group=group, hybrid=hybrid, accum=how[0], dtype=how[1], prefetch=how[2]):
                    self.check(world, group, hybrid, *how)


class Recompute(unittest.TestCase):
    """Backward computes activations inside layers again: the same bits, with less memory."""

    def test_bits(self):
        for dtype in ('f32', 'bf16'):
            for world, *how in [(1, '--plain'), (1, '--stage=0'), (2, '--stage=3'), (2, '--stage=2', '--held-out=0.1', '--eval-every=1'), (2, '--pp=2', '--schedule=gpipe'),
                                (2, '--pp=2', '--schedule=interleaved', '--stages-per-rank=2', '--documents=9'), (3, '--pp=3', '--stage=1', '--schedule=zero-bubble'),
                                (2, '--pp=2', '--schedule=zero-bubble', '--documents=9'), (4, '--pp=2', '--tp=2', '--sequence-parallel', '--schedule=zero-bubble')]:
                with self.subTest(dtype=dtype, how=how):
                    args = [*TINY, '--layers=4', '--accum=6', f'--dtype={dtype}', f'--steps={STEPS}', *how]
                    (want, plain), (got, less) = train(world, *args), train(world, *args, '--recompute')
                    self.assertEqual([[s.get(k) for k in ('loss', 'grad_norm')] for s in got], [[s.get(k) for k in ('loss', 'grad_norm')] for s in want])
                    self.assertEqual(*[[s[k] for k in ('state_sha256', 'bytes', 'planned_bytes', 'flop_per_token')] for s in (plain, less)])
                    self.assertLess(less['activation_bytes'], plain['activation_bytes'])

    def test_memory(self):
        """Of 12 layers, one has its 15 arrays of B * T * C inside."""
        args = [*TINY, '--layers=12', '--channels=96', '--context=32', '--steps=1']
        for dtype, size in (('f32', 4), ('bf16', 2)):
            plain, less = (train(1, *args, f'--dtype={dtype}', *more)[1]['activation_bytes'] for more in ([], ['--recompute']))
            self.assertEqual(plain - less, 11 * 15 * 2 * 32 * 96 * size)
            self.assertLess(3 * less, plain)

    def test_watched(self):
        """The library's check finds that passes read and write what they may."""
        for world, *how in [(2, '--stage=3'), (2, '--pp=2', '--schedule=zero-bubble', '--accum=3')]:
            got = train(world, *TINY, '--steps=2', '--recompute', *how, env={'ZERO_CHECK': '1'})[1]
            self.assertEqual(got['state_sha256'], train(world, *TINY, '--steps=2', *how)[1]['state_sha256'])


class Parts(unittest.TestCase):
    """Tensor parallelism. For each tp, the bits do not depend on stage, hybrid, prefetch or the division of
    data. Losses and norms are those of the whole model. N_HYBRIDS=all tests every stage."""
    SIZES = ['--layers=3', '--heads=6', '--channels=48', '--context=16']
    PER_STEP = 4

    def run_of(self, tp, n_dp, dtype, *how):
        args = [*TINY, *self.SIZES, f'--accum={self.PER_STEP // n_dp}', f'--dtype={dtype}', f'--steps={STEPS}', *how]
        steps, summary = train(tp * n_dp, *args, *([f'--tp={tp}'] if tp > 1 else []))
        self.assertEqual(len(steps), STEPS)
        self.assertEqual(summary['world'], tp * n_dp)
        self.assertEqual(summary['bytes'], summary['planned_bytes'])
        self.assertAlmostEqual(steps[0]['tokens_per_s'] * steps[0]['ms'] / 1000, self.PER_STEP * 2 * 16, delta=0.01)
        return [(s['loss'], s['grad_norm']) for s in steps], summary

    def run_of_steps(self, tp, n_dp, until, *how):
        args = [*TINY, *self.SIZES, f'--accum={self.PER_STEP // n_dp}', '--dtype=f32', f'--steps={until}', *how]
        steps, summary = train(tp * n_dp, *args, *([f'--tp={tp}'] if tp > 1 else []))
        return [(s['loss'], s['grad_norm']) for s in steps], summary

    def test_parts(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        draw = random.Random(seed)
        hows = [(n_dp, *how) for n_dp in (1, 2, 4) for how in [[f'--stage={s}', f'--prefetch={p}'] for s in range(4) for p in (0, 2)]]
        hows += [(4, '--stage=3', f'--hybrid={h}', '--dp-replicate=2', '--deterministic=on') for h in ('hsdp', 'hfsdp')]
        hows += [(*how, '--recompute') for how in hows]
        for tp, dtype, near in [(2, 'f32', 2e-5), (3, 'f32', 2e-5), (2, 'bf16', 2e-2)]:  # 3: some ids are unused
            whole, whole_summary = self.run_of(1, 1, dtype, '--stage=0')
            first = None
            some = [how for how in hows if tp * how[0] <= 8]
            for n_dp, *how in some if os.environ.get('N_HYBRIDS') == 'all' else draw.sample(some, 3):
                with self.subTest(tp=tp, dtype=dtype, n_dp=n_dp, how=how):
                    got, summary = self.run_of(tp, n_dp, dtype, *how)
                    for (loss, norm), (want, want_norm) in zip(got, whole):
                        self.assertLess(abs(loss - want), near * want)
                        self.assertLess(abs(norm - want_norm), 10 * near * want_norm)
                    first = first or (got, summary['state_sha256'])
                    self.assertEqual((got, summary['state_sha256']), first)
                    self.assertNotEqual(summary['state_sha256'], whole_summary['state_sha256'])

    def test_label_smoothing(self):
        """Labels are smoothed over all tokens, whichever of them a rank has. The result is close to the whole
        model's, with the same bits in each layout of one tp."""
        whole, _ = self.run_of(1, 1, 'f32', '--stage=0', '--label-smoothing=0.2')
        sharp, _ = self.run_of(1, 1, 'f32', '--stage=0', '--label-smoothing=0')
        self.assertEqual(sharp, self.run_of(1, 1, 'f32', '--stage=0')[0])
        self.assertNotEqual(whole, sharp)
        self.assertEqual(whole[0][0], self.run_of(1, 1, 'f32', '--plain', '--label-smoothing=0.2')[0][0][0])  # it adds micro-batches in another order
        for tp in (2, 3):  # 3: some ids are unused
            first = self.run_of(tp, 1, 'f32', '--stage=0', '--label-smoothing=0.2')[0]
            self.assertEqual(first, self.run_of(tp, 2, 'f32', '--stage=3', '--label-smoothing=0.2')[0])
            for (loss, norm), (want, want_norm) in zip(first, whole):
                self.assertLess(abs(loss - want), 2e-5 * want)
                self.assertLess(abs(norm - want_norm), 2e-4 * want_norm)
        axes = [*TINY, *self.SIZES, '--accum=4', '--dtype=f32', f'--steps={STEPS}', '--label-smoothing=0.2', '--pp=3']
        self.assertEqual([(s['loss'], s['grad_norm']) for s in train(3, *axes)[0]], whole)

    def test_sequence(self):
        """With sequence parallelism: close to the whole model's run, with the same bits however data are
        divided, and less memory for activations."""
        for tp, dtype, near in [(2, 'f32', 2e-5), (2, 'bf16', 2e-2)]:
            whole, _ = self.run_of(1, 1, dtype, '--stage=0')
            _, in_parts = self.run_of(tp, 1, dtype, '--stage=0')
            first = None
            for n_dp, *how in [(1, '--stage=0'), (2, '--stage=2'), (2, '--stage=3', '--prefetch=0'), (4, '--stage=1'), (2, '--stage=3', '--recompute')]:
                with self.subTest(tp=tp, dtype=dtype, n_dp=n_dp, how=how):
                    got, summary = self.run_of(tp, n_dp, dtype, '--sequence-parallel', *how)
                    for (loss, norm), (want, want_norm) in zip(got, whole):
                        self.assertLess(abs(loss - want), near * want)
                        self.assertLess(abs(norm - want_norm), 10 * near * want_norm)
                    first = first or (got, summary['state_sha256'])
                    self.assertEqual((got, summary['state_sha256']), first)
                    if '--recompute' in how:
                        continue
                    # Saves half of 4 (B, T, C) for each of 3 layers, and of 3 others. One more stays whole.
                    btc = 2 * 16 * 48 * (4 if dtype == 'f32' else 2)
                    self.assertEqual(in_parts['activation_bytes'] - summary['activation_bytes'], (3 * 4 + 3) * btc // 2 - btc)

    def test_checkpoints(self):
        """A tensor-parallel run that was saved continues as if it had not stopped: with the same tp in the
        same bits, and otherwise close to the whole model's run."""
        whole, _ = self.run_of(1, 1, 'f32', '--stage=0')
        straight, summary = self.run_of(2, 2, 'f32', '--stage=2')
        with tempfile.TemporaryDirectory() as folder:
            self.run_of_steps(2, 2, 2, '--stage=1', f'--save={folder}')
            rest = f'--load={folder}'
            for tp, n_dp, stage in (2, 2, 3), (2, 1, 0), (3, 2, 3), (1, 4, 2):  # 3: some ids are unused
                with self.subTest(tp=tp, n_dp=n_dp, stage=stage):
                    got, again = self.run_of_steps(tp, n_dp, STEPS, f'--stage={stage}', rest)
                    self.assertEqual(len(got), STEPS - 2)
                    for (loss, _), (want, _) in zip(got, whole[2:]):
                        self.assertLess(abs(loss - want), 2e-5 * want)
                    if tp == 2:
                        self.assertEqual((got, again['state_sha256']), (straight[2:], summary['state_sha256']))
            weights = os.path.join(folder, 'weights')
            done = bench('export', *self.SIZES, rest, f'--out={weights}')
            self.assertEqual(done.returncode, 0, done.stderr)
            losses = [self.run_of_steps(tp, n_dp, 1, f'--import={weights}')[0][0][0] for tp, n_dp in ((1, 1), (2, 1), (3, 2))]
            for loss in losses[1:]:
                self.assertLess(abs(loss - losses[0]), 2e-5 * losses[0])

    def test_memory(self):
        """Divided tensors take their part of the memory. Others take all of it: positions, norms, and biases
        after a sum."""
        C, T, V, L = 48, 16, 256, 3
        shared = (T + 2) * C + L * 6 * C
        cut = V * C + L * (12 * C * C + 7 * C)
        for tp in (1, 2, 3, 6):
            _, summary = self.run_of(tp, 1, 'f32', '--stage=1')
            self.assertAlmostEqual(summary['bytes']['moments'] / 8, shared + cut / tp, delta=4 * 64 * 20)

    def test_plan(self):
        for tp, n_dp in [(2, 1), (2, 4), (3, 2)]:
            args = [*self.SIZES, f'--accum={self.PER_STEP // n_dp}', '--dtype=f32', '--deterministic=on']
            done = bench('plan', '--json', f'--world={tp * n_dp}', f'--tp={tp}', *(['--dp-shard=2'] if n_dp == 4 else []), *args)
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            plan = {s.get('hybrid', s['stage']): s['bytes'] for s in lines(done.stdout)}
            for stage in range(4):
                self.assertEqual(self.run_of(tp, n_dp, 'f32', f'--stage={stage}')[1]['bytes'], plan[stage])
            for hybrid in ('hsdp', 'hfsdp') if n_dp == 4 else ():
                how = ['--stage=3', f'--hybrid={hybrid}', '--dp-replicate=2', '--deterministic=on']
                self.assertEqual(self.run_of(tp, n_dp, 'f32', *how)[1]['bytes'], plan[hybrid])
        for params in (7 * 10**9, 123457):  # all ranks together: the model, and the replicated tensors once more
            one, part = (bench('plan', '--json', '--world=8', f'--params={params}', f'--tp={tp}') for tp in (1, 8))
            whole, of_8 = (lines(done.stdout)[0]['bytes']['param_shards'] for done in (one, part))
            self.assertLess(abs(8 * of_8 - whole) / whole, 0.01 if params > 10**9 else 0.5)
        done = bench('plan', '--tp=4', *self.SIZES)
        self.assertEqual((done.returncode, done.stderr), (2, 'zero-bench plan: --tp: 4 parts do not divide the 6 heads\n'))
        done = bench('plan', '--tp=2', '--world=3', *self.SIZES)
        self.assertEqual(done.returncode, 2)
        self.assertIn('do not divide the world of 3', done.stderr)

    def test_refused(self):
        for world, args, says in [(2, ['--tp=4'], '--tp: 4 parts do not divide the 6 heads'), (2, ['--tp=2', '--plain'], '--tp: not with --plain'),
                                  (1, ['--sequence-parallel'], '--sequence-parallel: is for --tp of 2 or more'),
                                  (2, ['--tp=3'], 'do not divide the world of 2'),
                                  (2, ['--tp=2', '--stage=3', '--dp-shard=2'], 'do not multiply to the world of 2')]:
            with self.subTest(args=args):
                done = run([ZERO_RUN, '-n', str(world), '--raw', ZERO_BENCH, 'train', *TINY, *self.SIZES, *args])
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(says, done.stderr)
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *TINY, *self.SIZES], env={'ZERO_TP': '2'})
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('pp is 1, cp 1 and tp 2 by ZERO_PP, ZERO_CP and ZERO_TP, which this program wants as --pp, --cp and --tp', done.stderr)


class Stages(unittest.TestCase):
    """Pipeline stages with a tied embedding. Losses and norms have the bits of one pipeline stage, for any
    number of stages, ZeRO stage, hybrid, schedule and division of data, and for each tp. N_MESHES=all tests
    every one of them."""
    SIZES = ['--layers=5', '--heads=4', '--channels=16', '--context=16']
    PER_STEP = 4

    def run_of(self, pp, n_dp, tp, *how):
        axes = [f'--{axis}={n}' for axis, n in (('pp', pp), ('tp', tp)) if n > 1]
        steps, summary = train(pp * n_dp * tp, *TINY, *self.SIZES, f'--accum={self.PER_STEP // n_dp}', f'--steps={STEPS}', *axes, *how)
        self.assertEqual(len(steps), STEPS)
        self.assertEqual((summary['world'], summary['bytes']), (pp * n_dp * tp, summary['planned_bytes']))
        return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']

    def test_meshes(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        draw = random.Random(seed)
        for tp, dtype in (1, 'f32'), (1, 'bf16'), (2, 'f32'):
            one = self.run_of(1, 1, tp, f'--dtype={dtype}')
            meshes = [(pp, n_dp) for pp in (2, 3, 4, 5) for n_dp in (1, 2, 4) if pp * n_dp * tp <= 8]
            hows = [(pp, n_dp, schedule, f'--stage={stage}') for pp, n_dp in meshes for schedule in ('1f1b', 'gpipe') for stage in range(4)]
            hows += [(2, 4, '1f1b', '--stage=3', f'--hybrid={h}', '--dp-replicate=2', '--deterministic=on') for h in ('hsdp', 'hfsdp') if tp == 1]
            for pp, n_dp, schedule, *how in hows if os.environ.get('N_MESHES') == 'all' else draw.sample(hows, 4):
                with self.subTest(tp=tp, dtype=dtype, pp=pp, n_dp=n_dp, schedule=schedule, how=how):
                    self.assertEqual(self.run_of(pp, n_dp, tp, f'--dtype={dtype}', f'--schedule={schedule}', *how), one)

    def test_several_stages_on_a_rank(self):
        one = self.run_of(1, 1, 1, '--layers=6')
        for pp, n_dp, per_rank, schedule, stage in [(2, 1, 2, 'interleaved', 0), (2, 2, 3, 'interleaved', 3), (3, 2, 2, 'interleaved', 1), (3, 1, 2, 'gpipe', 2)]:
            with self.subTest(pp=pp, n_dp=n_dp, per_rank=per_rank, schedule=schedule, stage=stage):
                how = [f'--schedule={schedule}', f'--stages-per-rank={per_rank}', f'--stage={stage}']
                self.assertEqual(self.run_of(pp, n_dp, 1, '--layers=6', *how), one)
        with tempfile.TemporaryDirectory() as folder:  # saved in four stages on two ranks, and continued on one rank
            args = [*TINY, *self.SIZES, '--layers=6', f'--accum={self.PER_STEP}', f'--{{}}={folder}']
            train(2, *[a.format('save') for a in args], '--steps=2', '--pp=2', '--schedule=interleaved', '--stages-per-rank=2')
            steps, summary = train(1, *[a.format('load') for a in args], f'--steps={STEPS}')
            self.assertEqual(([(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']), (one[0][2:], one[1]))

    def test_checkpoints(self):
        """A run continues in other pipeline stages, and in one, as if it had not stopped."""
        straight = self.run_of(1, 1, 1)
        with tempfile.TemporaryDirectory() as folder:
            for pp, n_dp, stage in (3, 1, 1), (1, 2, 3):
                saved = os.path.join(folder, str(pp))
                args = [*TINY, *self.SIZES, f'--accum={self.PER_STEP // n_dp}', '--steps=2', f'--stage={stage}', f'--save={saved}']
                train(pp * n_dp, *args, *([f'--pp={pp}'] if pp > 1 else []))
                for pp, n_dp, stage in (2, 2, 3), (3, 2, 0), (1, 4, 2):
                    with self.subTest(saved=saved, pp=pp, n_dp=n_dp, stage=stage):
                        args = [*TINY, *self.SIZES, f'--accum={self.PER_STEP // n_dp}', f'--steps={STEPS}', f'--stage={stage}', f'--load={saved}']
                        steps, summary = train(pp * n_dp, *args, *([f'--pp={pp}'] if pp > 1 else []))
                        self.assertEqual(([(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']), (straight[0][2:], straight[1]))

    def test_import(self):
        """Weights from a file of one pipeline stage, with fresh states, are the same in any number of stages."""
        with tempfile.TemporaryDirectory() as folder:
            train(1, *TINY, *self.SIZES, '--steps=1', f'--save={folder}')
            weights = os.path.join(folder, 'weights')
            done = bench('export', *self.SIZES, f'--load={folder}', f'--out={weights}')
            self.assertEqual(done.returncode, 0, done.stderr)
            for tp in 1, 2:
                one = self.run_of(1, 1, tp, f'--import={weights}')
                self.assertNotEqual(one, self.run_of(1, 1, tp))
                for pp, n_dp, stage in (2, 1, 0), (3, 1, 1), (2, 2, 3), (4, 1, 2):
                    with self.subTest(pp=pp, n_dp=n_dp, tp=tp, stage=stage):
                        self.assertEqual(self.run_of(pp, n_dp, tp, f'--import={weights}', f'--stage={stage}'), one)

    def test_weights_of_several_stages_on_a_rank(self):
        """Imports, trains and exports: the bits and the file are those of one pipeline stage, except for the
        export's id, which is that of its checkpoint."""
        def files_of(folder):
            found = {}
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), 'rb') as f:
                    found[name] = re.sub(rb'("libzero_export":")[0-9a-f]{16}', rb'\1', f.read())
            return found

        with tempfile.TemporaryDirectory() as folder:
            weights, saved, one, several = (os.path.join(folder, name) for name in ('weights', 'saved', 'one', 'several'))
            train(1, *TINY, *self.SIZES, '--layers=7', '--steps=2', '--seed=3', f'--save={saved}', f'--export={weights}')
            done = bench('export', *self.SIZES, '--layers=7', f'--load={saved}', f'--out={one}')
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(files_of(one), files_of(weights))
            for tp in 1, 2:
                run_of_one = self.run_of(1, 1, tp, '--layers=7', f'--import={weights}', f'--export={one}')
                self.assertNotEqual(files_of(one), files_of(weights))
                for pp, n_dp, per_rank, schedule, stage in [(2, 1, 2, 'interleaved', 3), (2, 2, 3, 'gpipe', 1), (3, 1, 2, 'gpipe', 2), (2, 1, 3, 'interleaved', 0)]:
                    with self.subTest(tp=tp, pp=pp, n_dp=n_dp, per_rank=per_rank, schedule=schedule, stage=stage):
                        how = [f'--schedule={schedule}', f'--stages-per-rank={per_rank}', f'--stage={stage}', f'--import={weights}', f'--export={several}']
                        self.assertEqual(self.run_of(pp, n_dp, tp, '--layers=7', *how), run_of_one)
                        self.assertEqual(files_of(several), files_of(one))

    def test_plan(self):
        """The ranks of each pipeline stage allocate exactly what plan prints. The last one reports for all."""
        sizes = ['--layers=5', '--heads=4', '--channels=32', '--context=32']
        for pp, n_dp, tp, schedule, more, hybrids in [(2, 1, 1, '1f1b', [], []), (3, 2, 1, 'gpipe', [], []), (2, 2, 2, '1f1b', ['--tp=2'], []), (2, 4, 1, '1f1b', [], ['--dp-shard=2']),
                                                      (2, 1, 2, '1f1b', ['--tp=2', '--sequence-parallel'], []),
                                                      (2, 2, 1, 'interleaved', ['--stages-per-rank=2'], []), (3, 1, 1, 'interleaved', ['--stages-per-rank=2', '--layers=6', '--accum=9'], []),
                                                      (2, 1, 1, '1f1b', self.FEWER_BYTES, [])]:
            args = [*sizes, f'--accum={8 // n_dp}', '--batch=2', '--dtype=f32', '--deterministic=on', f'--pp={pp}', f'--schedule={schedule}', *more]
            done = bench('plan', '--json', f'--world={pp * n_dp * tp}', *args, *hybrids)
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            for row in lines(done.stdout):
                how = [f"--stage={row['stage']}", *([f"--hybrid={row['hybrid']}", f'--dp-replicate={n_dp // 2}', *hybrids] if 'hybrid' in row else [])]
                with self.subTest(pp=pp, n_dp=n_dp, tp=tp, how=how):
                    _, summary = train(pp * n_dp * tp, *TINY, *args, '--steps=1', *how)
                    self.assertEqual(summary['bytes'], row['pp_ranks'][-1]['bytes'])
                    for rank, planned in zip(summary['pp_ranks'], row['pp_ranks'], strict=True):
                        self.assertEqual((rank['bytes'], rank['planned_bytes'], rank['pp_rank']), (planned['bytes'], planned['bytes'], planned['pp_rank']))
                    *_, last = summary['pp_ranks']
                    self.assertEqual([last[k] for k in ('activation_bytes', 'peak_rss_bytes')], [summary[k] for k in ('activation_bytes', 'peak_rss_bytes')])

    # The state of 5 layers has 64 digests of 32 bytes. They go from stage to stage like activations, which
    # take 16 bytes here, so each digest takes two messages.
    FEWER_BYTES = ['--channels=4', '--context=1', '--batch=1']

    def test_messages_of_fewer_bytes_than_the_digests(self):
        one = self.run_of(1, 1, 1, *self.FEWER_BYTES)
        two = self.run_of(1, 1, 1, '--context=3')  # 384 bytes: 1536 with the four micro-batches of an evaluation
        for pp, n_dp, *how in [(2, 1), (3, 2), (5, 1, '--schedule=gpipe'), (2, 2, '--schedule=interleaved', '--stages-per-rank=2')]:
            with self.subTest(pp=pp, n_dp=n_dp, how=how):
                self.assertEqual(self.run_of(pp, n_dp, 1, *self.FEWER_BYTES, *how), one)
                self.assertEqual(self.run_of(pp, n_dp, 1, '--context=3', *how), two)
        self.assertNotEqual(self.run_of(2, 1, 1, *self.FEWER_BYTES, '--weight-decay=0')[1], one[1])

    def test_schedule_file(self):
        one = self.run_of(1, 1, 1)
        with tempfile.NamedTemporaryFile('w', suffix='.csv') as f:
            f.write('0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n')
            f.flush()
            self.assertEqual(self.run_of(2, 1, 1, f'--schedule-file={f.name}', '--stage=2'), one)

    def test_fewer_micro_batches_than_stages(self):
        one = self.run_of(1, 4, 1)
        self.assertEqual(self.run_of(2, 4, 1), one)  # one micro-batch each, of which only one is kept

    def test_environment(self):
        """A launcher's variables may set the number of micro-batches of a step and their order. Activations
        are kept for all of these."""
        one = self.run_of(1, 1, 1)
        args = [*TINY, *self.SIZES, f'--steps={STEPS}', '--pp=2']
        for accum, schedule, more in [(1, '1f1b', {}), (2, 'gpipe', {}), (self.PER_STEP, '1f1b', {'ZERO_SCHEDULE': 'gpipe'})]:
            with self.subTest(accum=accum, schedule=schedule, more=more):
                env = {'ZERO_GRAD_ACCUM_STEPS': str(self.PER_STEP), **more}
                steps, summary = train(2, *args, f'--accum={accum}', f'--schedule={schedule}', env=env)
                self.assertEqual(([(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']), one)

    def test_sequence_parallel(self):
        one = self.run_of(1, 1, 2, '--sequence-parallel')
        for pp, n_dp, stage in (2, 1, 1), (2, 2, 3), (3, 1, 2):
            with self.subTest(pp=pp, n_dp=n_dp, stage=stage):
                self.assertEqual(self.run_of(pp, n_dp, 2, '--sequence-parallel', f'--stage={stage}'), one)

    def test_another_state_has_another_hash(self):
        self.assertEqual(len({self.run_of(2, 1, 1, *how)[1] for how in ([], ['--seed=2'], ['--lr=0.5'], ['--optimizer=lion'])}), 4)

    def test_time(self):
        steps, _ = train(4, *TINY, *self.SIZES, '--accum=4', '--pp=2', '--steps=1000000', '--seconds=0.2')
        self.assertGreater(len(steps), 0)
        self.assertLess(len(steps), 1000000)

    def test_told(self):
        done = run([ZERO_RUN, '-n', '4', '--raw', ZERO_BENCH, 'train', *TINY, *self.SIZES, '--accum=4', '--pp=2', '--steps=1'])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('stage 0 on 4 ranks, in 2 pipeline stages (shm)', done.stdout)
        four = ['--accum=4', '--pp=2', '--schedule=interleaved', '--stages-per-rank=2', '--steps=1']
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *TINY, *self.SIZES, *four])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('stage 0 on 2 ranks, in 4 pipeline stages (shm)', done.stdout)
        self.assertRegex(done.stdout, r'(?m)^rank of the pipeline +planned +allocated +activations +peak resident\n0( +[\d.]+ [kM]B){4}\n1( +[\d.]+ [kM]B){4}\n\nstate')

    def test_refused(self):
        for world, args, says in [(2, ['--pp=6'], '--pp: 6 stages are more than the 5 layers'), (2, ['--pp=2', '--plain'], '--pp: not with --plain'),
                                  (2, ['--pp=3'], 'do not divide the world of 2'), (1, ['--schedule=gpipe'], '--schedule: is of the stages of --pp'),
                                  (1, ['--schedule=zb'], '--schedule'), (1, ['--schedule-file=x'], '--schedule-file: is of the stages of --pp'),
                                  (2, ['--pp=2', '--stages-per-rank=2', '--schedule=gpipe', '--import=/nowhere'], '/nowhere'),
                                  (1, ['--stages-per-rank=2'], '--stages-per-rank: is of the stages of --pp'),
                                  (2, ['--pp=2', '--stages-per-rank=3'], '--pp and --stages-per-rank: 6 stages are more than the 5 layers'),
                                  (2, ['--pp=2', '--stages-per-rank=2'], 'stages_per_rank is 2, but schedule is 1f1b'),
                                  (2, ['--pp=2', '--schedule-file=/nowhere'], '/nowhere: No such file')]:
            with self.subTest(args=args):
                done = run([ZERO_RUN, '-n', str(world), '--raw', ZERO_BENCH, 'train', *TINY, *self.SIZES, *args])
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(says, done.stderr)


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
    # A few layers fit the slots.
    SMALL = (r'\A[^\n]*warning: stage 3 shards no parameters: all \d units are resident '
             r'because slots and shards would take as much memory; lower prefetch, or use stage 2\n\Z')
    MEMORY = ['memory', '--ranks=2', '--layers=2', '--heads=2', '--channels=32', '--context=16', '--steps=1']

    def test_wire_dtype_widens_nothing(self):
        for dtype, warned in (('bf16', 1), ('f32', 0)):
            done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', '--json', *TINY, '--steps=1', f'--dtype={dtype}', '--wire-dtype=f32'])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count('wire_dtype is f32, but gradients of bf16 are sent as they are'), warned)

    def test_resident_without_prefetch(self):
        done = run([ZERO_RUN, '-n', '2', ZERO_BENCH, 'train', *TINY, '--steps=1', '--stage=3', '--prefetch=0', '--layers=1'])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('slots and shards would take as much memory; use stage 2\n', done.stderr)

    def test_memory(self):
        done = bench(*self.MEMORY, '--json')
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, self.SMALL)
        stages = lines(done.stdout)
        self.assertEqual([s['stage'] for s in stages], [0, 1, 2, 3])
        for s in stages:
            self.assertEqual(list(s), ['stage', 'model', 'n_params', 'ranks', 'planned_bytes', 'bytes', 'peak_rss_bytes', 'state_sha256', 'losses', *STATES_KEYS])
            self.assertEqual(s['planned_bytes'], s['bytes'])
            self.assertGreater(s['peak_rss_bytes'], s['bytes']['total'])

    def test_memory_of_hybrids(self):
        done = bench(*self.MEMORY, '--ranks=4', '--dp-shard=2', '--layers=6', '--json')
        self.assertEqual(done.returncode, 0, done.stderr)
        columns = lines(done.stdout)
        self.assertEqual([(s['stage'], s.get('hybrid'), s.get('dp_shard')) for s in columns],
                         [(0, None, None), (1, None, None), (2, None, None), (3, None, None), (3, 'hsdp', 2), (3, 'hfsdp', 2)])
        for s in columns:
            self.assertEqual(s['planned_bytes'], s['bytes'])
        *_, hsdp, hfsdp = [s['bytes'] for s in columns]
        self.assertEqual(hsdp['moments'], 2 * hfsdp['moments'])  # a copy in each group; one in the world
        self.assertEqual(hsdp['grad_shards'], hfsdp['grad_shards'])
        done = bench(*self.MEMORY, '--ranks=4', '--dp-shard=3')
        self.assertEqual((done.returncode, done.stdout), (2, ''))
        self.assertIn('do not multiply to the world of 4 ranks', done.stderr)
        self.assertIn('zero-bench memory: the run of HSDP ended with code 2', done.stderr)

    def test_memory_table_and_plot(self):
        with tempfile.TemporaryDirectory() as folder:
            for kind, magic in [('svg', b'<?xml'), ('png', b'\x89PNG')]:
                path = os.path.join(folder, f'it\'s a "plot".{kind}')
                done = bench(*self.MEMORY, '--plot', path)
                self.assertEqual(done.returncode, 0)
                self.assertRegex(done.stderr, self.SMALL)
                for word in ['planned', 'allocated', 'peak resident', 'stage 3']:
                    self.assertIn(word, done.stdout)
                self.assertNotIn('HSDP', done.stdout)
                with open(path, 'rb') as f:
                    self.assertTrue(f.read().startswith(magic))

    def test_no_gnuplot(self):
        done = bench(*self.MEMORY, '--plot', '/tmp/never.svg', env={'PATH': '/nonexistent'})
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 2), done.stderr)
        self.assertIn('gnuplot', done.stderr.splitlines()[1])


class GoesOn(unittest.TestCase):
    """A run that continues with fewer ranks than it began with."""

    def train(self, world, folder, steps, *args, **more):
        return train(world, *TINY, f'--steps={steps}', f'--save={folder}', '--load=latest', *args, **more)

    def test_with_as_many_micro_batches(self):
        """The launcher starts a job again as before: the program requested one micro-batch per rank."""
        for stage, args in ((1, []), (3, []), (3, ['--save-async'])):
            whole = result(4, f'--stage={stage}')
            with tempfile.TemporaryDirectory() as folder:
                begun, _ = self.train(4, folder, 2, f'--stage={stage}', *args)
                steps, summary = self.train(2, folder, STEPS, f'--stage={stage}', *args, env={'ZERO_GRAD_ACCUM_STEPS': '2'})
            self.assertEqual([s['step'] for s in begun + steps], list(range(1, STEPS + 1)))
            self.assertEqual(([(s['loss'], s['grad_norm']) for s in begun + steps], summary['state_sha256']), whole)

    def test_no_step_is_left(self):
        with tempfile.TemporaryDirectory() as folder:
            self.train(2, folder, 2)
            steps, summary = self.train(2, folder, 2)
        self.assertEqual(steps, [])
        self.assertGreater(summary['peak_rss_bytes'], summary['bytes']['total'])

    def test_with_fewer_micro_batches(self):
        """No text comes twice and none is left out: with constant weights each text has its own loss."""
        whole, _ = train(2, *TINY, '--steps=4', '--lr=0')
        with tempfile.TemporaryDirectory() as folder:
            begun, _ = self.train(2, folder, 2, '--lr=0')
            steps, _ = self.train(1, folder, 6, '--lr=0')
        found = [s['loss'] for s in begun] + [(a['loss'] + b['loss']) / 2 for a, b in zip(steps[::2], steps[1::2])]
        self.assertEqual(len(found), 4)
        for loss, want in zip(found, whole):
            self.assertAlmostEqual(loss, want['loss'], delta=1e-6)
        self.assertGreater(len({s['loss'] for s in steps}), 3)  # each its own


if __name__ == '__main__':
    unittest.main()
