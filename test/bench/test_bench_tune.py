# SPDX-License-Identifier: Apache-2.0
"""zero-bench tune: its choice and order are compared with a search over the numbers of zero-bench plan, also
with tensor parallelism and pipeline stages. Also tests its lines, its probe, and what it refuses."""
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ROOT, TEXT, ZERO_BENCH, ZERO_RUN, bench, lines, run, train  # noqa: E402

NANO = ['--model=gpt2-nano']
DEEP = ['--layers=9', '--heads=2', '--channels=64', '--context=32', '--vocab=512']
FIELDS = {'stage': 0, 'mesh.tp': 1, 'mesh.pp': 1, 'pipeline.schedule': 0, 'pipeline.stages_per_rank': 1, 'hybrid': 0, 'mesh.dp_replicate': 1, 'memory.prefetch': 2, 'memory.param_budget_bytes': -1, 'memory.wire_dtype': 0, 'deterministic': -1,
          'memory.grad_sum_dtype': 0, 'optim.masters': 0, 'optim.moments': 0, 'memory.states': 0}
SCHEDULES = ['1f1b', 'gpipe', 'interleaved', 'zero-bubble']
WORDS = {'hsdp': 0, 'hfsdp': 1, 'bf16': 2}
MASTERS, MOMENTS, STATES = ['f32', 'remainder', 'none'], ['f32', 'bf16', 'q8'], ['device', 'host']
ANY = ['--masters=any', '--moments=any', '--grad-sum-dtype=any']


def tune(*args):
    done = bench('tune', '--json', *args)
    assert (done.returncode, done.stderr) == (0, ''), done
    *candidates, choice = lines(done.stdout)
    assert [c['event'] for c in candidates] == ['candidate'] * len(candidates) and choice['event'] == 'choice'
    return candidates, choice


class Search:
    """Finds every candidate again by running zero-bench plan."""

    def __init__(self, model, world, per_host, limit, dtype, accum, tp=1, pp=1, *how):
        self.model, self.world, self.per_host, self.limit, self.dtype, self.accum = model, world, per_host, limit, dtype, accum
        self.tp, self.mesh, self.of_stage, self.n_dp = tp, mesh_arguments(tp, pp, *how), world // pp, world // pp // tp
        self.found = []
        for wire in [None] if dtype == 'bf16' else [None, 'bf16']:
            for stage in range(3):
                self.keep(self.plan(None, wire, 2)[stage], None, wire, 2, None)
            for group in [None] + [g for g in range(2, self.n_dp) if self.n_dp % g == 0 and (per_host % (g * tp) == 0 or g * tp % per_host == 0)]:
                for prefetch in [0, 1, 2]:
                    for kind in [3] if group is None else ['hsdp', 'hfsdp']:
                        self.sharded(kind, group, wire, prefetch)

    def plan(self, group, wire, prefetch, budget=None):
        args = [*self.model, *self.mesh, f'--world={self.world}', f'--dtype={self.dtype}', f'--accum={self.accum}', f'--prefetch={prefetch}']
        args += [f'--dp-shard={group}'] if group else []
        args += [f'--wire-dtype={wire}'] if wire else []
        args += [f'--budget={budget}'] if budget else []
        args += ['--deterministic=on'] if group and self.accum > 1 and self.of_stage <= self.per_host else []
        done = bench('plan', '--json', *args)
        return {p.get('hybrid', p['stage']): p for p in lines(done.stdout)} if done.returncode == 0 else None

    def far(self, plan, group):
        """Bytes that a rank receives from other hosts, axis by axis."""
        inner, total = (group or self.n_dp) * self.tp, 0
        outer_bytes = plan.get('outer_bytes', 0)
        for bytes_, ranks in [(plan['wire_bytes'] - outer_bytes, range(0, inner, self.tp)), (outer_bytes, range(0, self.of_stage, inner))]:
            others = len(ranks) - 1
            total += bytes_ * sum(r // self.per_host != 0 for r in ranks) // others if others else 0
        return total

    def keep(self, plan, group, wire, prefetch, budget):
        ranks = ranks_of(plan)
        most, gathers = fullest(plan), any(r['bytes']['param_slots'] for r in ranks)
        if plan['stage'] == 3 and not group and not gathers:
            return  # the same as stage 2
        self.found.append({'stage': plan['stage'], 'hybrid': plan.get('hybrid'), 'dp_shard': group, 'wire_dtype': wire, 'prefetch': prefetch,
                           'bytes': most['bytes'], 'pp_rank': most.get('pp_rank', 0), 'wire_bytes': max(r['wire_bytes'] for r in ranks),
                           'between_bytes': max(self.far(r, group) for r in ranks), 'fits': most['bytes']['total'] <= self.limit,
                           'auto': budget is None, 'gathers': gathers})

    def sharded(self, kind, group, wire, prefetch):
        least = self.plan(group, wire, prefetch)[kind]
        self.keep(least, group, wire, prefetch, None)
        budget = min([self.limit - r['bytes']['total'] + r['bytes']['param_slots'] for r in ranks_of(least) if r['bytes']['param_slots']], default=0)
        if budget < 1:
            return
        planned = self.plan(group, wire, prefetch, budget)
        over = fullest(planned[kind])['bytes']['total'] - self.limit if planned else 0
        if over > 0:
            budget -= over
            planned = self.plan(group, wire, prefetch, budget)
        if planned and [(r['bytes'], r['wire_bytes']) for r in ranks_of(planned[kind])] != [(r['bytes'], r['wire_bytes']) for r in ranks_of(least)]:
            self.keep(planned[kind], group, wire, prefetch, budget)


def ranks_of(plan):
    """The numbers of each rank of a pipeline, or of a whole model."""
    return plan.get('pp_ranks', [plan])


def fullest(plan):
    return max(ranks_of(plan), key=lambda r: r['bytes']['total'])


def place(c):
    """The key that orders candidates, except for what makes one the simplest."""
    refused = c['wire_dtype'] is not None
    if not c['fits']:
        return (True, refused, c['bytes']['total'])
    waits = c['prefetch'] == 0 and c['gathers']
    return (False, refused, waits, c['between_bytes'], c['wire_bytes'], -c['prefetch'], c['bytes']['total'], c['stage'], c['hybrid'] == 'hfsdp',
            -(c['dp_shard'] or 0))


def numbers(c):
    return [c[k] for k in ('stage', 'hybrid', 'dp_shard', 'wire_dtype', 'prefetch', 'bytes', 'pp_rank', 'wire_bytes', 'between_bytes', 'fits')] + [
        c['auto'] if 'auto' in c else c['budget'] is None]


CASES = [(NANO, 4, 4, 4500000, 'bf16', 1), (NANO, 8, 4, 5200000, 'bf16', 1), (DEEP, 8, 2, 4300000, 'bf16', 2), (DEEP, 4, 4, 7000000, 'f32', 3),
         (NANO, 12, 4, 4000000, 'f32', 1), (['--params=3e8'], 64, 8, 900000000, 'bf16', 1), (DEEP, 3, 1, 3900000, 'bf16', 1)]
# the same, then tp, pp and options of the pipeline
MESHES = [(DEEP, 8, 4, 5100000, 'bf16', 1, 2), (DEEP, 12, 6, 4700000, 'bf16', 1, 2), (DEEP, 16, 2, 4800000, 'bf16', 2, 2), (DEEP, 8, 4, 2650000, 'bf16', 4, 1, 2), (DEEP, 16, 16, 5150000, 'f32', 4, 2, 2),
          (DEEP, 8, 8, 2600000, 'bf16', 4, 1, 2, '--schedule=interleaved', '--stages-per-rank=3'), (['--params=3e8'], 64, 8, 560000000, 'bf16', 6, 2, 4, '--schedule=zero-bubble'),
          (DEEP, 12, 2, 2500000, 'bf16', 6, 1, 3, '--schedule=gpipe', '--stages-per-rank=2')]


def mesh_arguments(tp=1, pp=1, *how):
    return [f'--tp={tp}', f'--pp={pp}', '--batch=2', *how]


def arguments(model, world, per_host, limit, dtype, accum, *mesh):
    return [*model, f'--world={world}', f'--ranks-per-host={per_host}', f'--limit={limit}', f'--dtype={dtype}', f'--accum={accum}', *mesh_arguments(*mesh)]


class Order(unittest.TestCase):
    def test_against_a_search(self):
        kinds = set()
        for case in CASES + MESHES:
            with self.subTest(case=case):
                search = Search(*case).found
                candidates, choice = tune(*arguments(*case))
                best = min((c for c in search if c['fits'] and not c['wire_dtype']), key=place)
                self.assertEqual(numbers(choice), numbers(best))
                self.assertEqual(sorted(map(str, map(numbers, candidates))), sorted(map(str, map(numbers, search))))
                gathers = {str(numbers(c)): c['gathers'] for c in search}
                for c in candidates:
                    c['gathers'] = gathers[str(numbers(c))]
                self.assertEqual([place(c) for c in candidates], sorted(place(c) for c in candidates))
                self.assertEqual([c['order'] for c in candidates], list(range(1, len(candidates) + 1)))
                self.assertTrue(any(not c['fits'] for c in candidates), 'a limit that everything fits')
                kinds.add((choice['stage'], choice['hybrid'], choice['budget'] is None))
        self.assertGreater(len(kinds), 2, kinds)  # the cases differ

    def test_no_budget_is_better(self):
        """No budget that fits receives fewer bytes than tune's choice with the same prefetch, or than stage 2
        where that fits."""
        limit, draw = 4300000, random.Random(1)
        candidates, _ = tune(*DEEP, '--world=4', f'--limit={limit}')
        n_fit = 0
        for prefetch in [0, 1, 2]:
            best = min(c['wire_bytes'] for c in candidates if c['fits'] and not c['hybrid'] and (c['stage'], c['prefetch']) in [(2, 2), (3, prefetch)])
            for budget in [draw.randrange(100000, 1000000) for _ in range(12)]:
                done = bench('plan', '--json', *DEEP, '--world=4', f'--prefetch={prefetch}', f'--budget={budget}')
                plan = lines(done.stdout)[3] if done.returncode == 0 else {'bytes': {'total': limit + 1}}
                if plan['bytes']['total'] <= limit:
                    n_fit += 1
                    self.assertGreaterEqual(plan['wire_bytes'], best, f'prefetch {prefetch} budget {budget}')
        self.assertGreater(n_fit, 3)

    def test_ratio_of_links(self):
        """Above the printed ratio no candidate needs less time for its bytes. Just below it one does."""
        n_told = 0
        for model in [NANO, DEEP]:
            for limit in [4500000, 5200000, 9000000]:
                candidates, choice = tune(*model, '--world=16', '--ranks-per-host=4', f'--limit={limit}')
                rivals = [c for c in candidates if c['fits'] and (c['prefetch'] or not c['bytes']['param_slots'])]

                def least(ratio, among=rivals):
                    return min(c['wire_bytes'] + (ratio - 1) * c['between_bytes'] for c in among)
                told = choice['least_ratio']
                above, below = max(told, 1) * 1.001, told * 0.999
                self.assertEqual(least(above), least(above, [choice]))
                if told > 0:
                    n_told += 1
                    self.assertLess(least(below), least(below, [choice]))
        self.assertGreater(n_told, 2)

    def test_more_memory_never_receives_more(self):
        args = [*DEEP, '--world=8', '--ranks-per-host=4']
        before = None
        for limit in [3600000, 4000000, 4500000, 5000000, 6000000, 10000000]:
            _, choice = tune(*args, f'--limit={limit}')
            self.assertLessEqual(choice['bytes']['total'], limit)
            if before:
                self.assertLessEqual(choice['between_bytes'], before['between_bytes'])
            before = choice
        _, free = tune(*args)
        self.assertEqual((free['between_bytes'], free['limit']), (before['between_bytes'], None))

    def test_wire_dtype(self):
        args = [*NANO, '--world=4', '--dtype=f32']
        _, own = tune(*args)
        _, both = tune(*args, '--wire-dtype=any')
        only, bf16 = tune(*args, '--wire-dtype=bf16')
        self.assertEqual((own['wire_dtype'], both['wire_dtype'], bf16['wire_dtype']), (None, 'bf16', 'bf16'))
        self.assertEqual({c['wire_dtype'] for c in only}, {'bf16'})
        self.assertLess(both['wire_bytes'], own['wire_bytes'])
        refused = [c for c in tune(*args)[0] if c['wire_dtype']]
        self.assertEqual({c['why'] for c in refused}, {'rounds gradients to bf16 on their way; --wire-dtype any allows it'})

    def test_bits_that_are_given_up_are_told(self):
        args = [*DEEP, '--world=8', '--ranks-per-host=2', '--accum=2', '--limit=4300000']
        for more, gives_up in [([], True), (['--deterministic=on'], False), (['--ranks-per-host=8'], False)]:
            _, choice = tune(*args, *more)
            self.assertEqual(bool(choice['note']), gives_up, choice)
            self.assertEqual('\nNote: ' in bench('tune', *args, *more).stdout, gives_up)

    def test_only_groups_of(self):
        candidates, _ = tune(*NANO, '--world=8', '--dp-shard=4')
        self.assertEqual({c['dp_shard'] for c in candidates}, {None, 4})


def fields_of(choice, world, tp=1, pp=1, schedule='--schedule=1f1b', stages_per_rank='=1'):
    want = dict(FIELDS, stage=choice['stage'])
    want.update({'mesh.tp': tp, 'mesh.pp': pp, 'pipeline.schedule': SCHEDULES.index(schedule.split('=')[1]), 'pipeline.stages_per_rank': int(stages_per_rank.split('=')[1])})
    if choice['hybrid']:
        want.update({'hybrid': WORDS[choice['hybrid']], 'mesh.dp_replicate': world // pp // tp // choice['dp_shard']})
    if choice['stage'] == 3:
        want.update({'memory.prefetch': choice['prefetch'], 'memory.param_budget_bytes': -1 if choice['budget'] is None else choice['budget']})
    want['memory.wire_dtype'] = WORDS[choice['wire_dtype']] if choice['wire_dtype'] else 0
    want.update(deterministic=choice['deterministic'] if choice['deterministic'] is not None else -1)
    want['memory.grad_sum_dtype'] = 2 if choice['grad_sum_dtype'] == 'bf16' else 0
    want.update({'optim.masters': MASTERS.index(choice['masters']), 'optim.moments': MOMENTS.index(choice['moments']), 'memory.states': STATES.index(choice['states'])})
    return want


class Lines(unittest.TestCase):
    """The lines to be pasted select the choice, and take the planned memory."""

    def test_environment(self):
        for model, world, per_host, limit, dtype, accum, *mesh in CASES + MESHES:
            with self.subTest(model=model, world=world, mesh=mesh):
                _, choice = tune(*arguments(model, world, per_host, limit, dtype, accum, *mesh))
                env = dict(pair.split('=') for pair in choice['environment'].split())
                told = bench('plan', '--json', *model, f'--world={world}', f'--dtype={dtype}', f'--accum={accum}', *mesh_arguments(*mesh), env=env)
                self.assertEqual(told.returncode, 0, told.stderr)
                for stage in lines(told.stdout):  # the variables override all of them
                    self.assertEqual(fullest(stage)['bytes'], choice['bytes'])
                    self.assertEqual(max(r['wire_bytes'] for r in ranks_of(stage)), choice['wire_bytes'])

    def test_run(self):
        """Two hosts of two ranks are one host here. Its ranks still take the planned memory."""
        args = [*DEEP, '--dtype=bf16']
        for limit in [3700000, 4600000, 6000000]:
            _, choice = tune(*args, '--world=4', '--ranks-per-host=2', f'--limit={limit}')
            env = dict(pair.split('=') for pair in choice['environment'].split())
            _, summary = train(4, *args, '--batch=1', '--data', TEXT, '--steps=1', env=env)
            self.assertEqual((summary['bytes'], summary['stage']), (choice['bytes'], choice['stage']))

    def test_run_on_a_mesh(self):
        """The fullest rank takes the planned memory."""
        args = [*DEEP, '--dtype=bf16', '--batch=1']
        for limit, mesh in [(6050000, ['--tp=2']), (7000000, ['--tp=2']), (3950000, ['--pp=2']), (3700000, ['--pp=2', '--schedule=interleaved', '--stages-per-rank=2'])]:
            _, choice = tune(*args, *mesh, '--world=4', f'--limit={limit}')
            env = dict(pair.split('=') for pair in choice['environment'].split())
            accum = [] if '--tp=2' in mesh else ['--accum=4']
            _, summary = train(4, *args, *mesh, *accum, '--data', TEXT, '--steps=1', env=env)
            self.assertEqual((fullest(summary)['bytes'], summary['stage']), (choice['bytes'], choice['stage']))
            self.assertEqual((choice['tp'], choice['pp']), (2, 1) if '--tp=2' in mesh else (1, 2))

    def test_c(self):
        cc = shutil.which('cc') or shutil.which('gcc')
        if not cc:
            self.skipTest('no C compiler in PATH')
        choices = [(tune(*arguments(*case), *more)[1], case) for case in CASES[:5] for more in [[], ['--wire-dtype=any'], ['--deterministic=off'], ['--dp-shard=2']] if case[1] % 4 == 0]
        choices += [(tune(*arguments(*case))[1], case) for case in MESHES]
        choices += [(tune(*arguments(*CASES[0]), *more)[1], CASES[0]) for more in [['--masters=remainder', '--moments=q8'], ['--masters=none', '--moments=bf16', '--grad-sum-dtype=bf16'], ['--states=host']]]
        body = ''
        for choice, _ in choices:
            body += '{ struct zero_config cfg = ZERO_CONFIG_INIT;\n' + '\n'.join(choice['c']) + '\n'
            body += ''.join(f'printf("%lld ", (long long)cfg.{field});' for field in FIELDS) + 'puts(""); }\n'
        with tempfile.TemporaryDirectory() as folder:
            source, program = os.path.join(folder, 'pasted.c'), os.path.join(folder, 'pasted')
            with open(source, 'w', encoding='utf-8') as f:
                f.write('#include <stdio.h>\n#include "zero/zero.h"\nint main(void)\n{\n' + body + 'return 0; }\n')
            subprocess.run([cc, '-Wall', '-Werror', '-I', ROOT, source, '-o', program], check=True)
            rows = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
        self.assertEqual(len(rows), len(choices))
        for (choice, case), row in zip(choices, rows):
            got = dict(zip(FIELDS, map(int, row.split())))
            self.assertEqual(got, fields_of(choice, case[1], *case[6:]))

    def test_sums_of_groups_on_one_host(self):
        """If groups on one host add up micro-batches, zero_wrap keeps the fixed order. A plan has to be asked
        for it."""
        args = [*DEEP, '--accum=4', '--dtype=f32']
        for world, mesh in [(4, []), (8, ['--pp=2'])]:
            for c in tune(*args, *mesh, '--batch=1', f'--world={world}')[0]:
                if c['hybrid'] and c['prefetch'] == 2 and c['budget'] is None and not c['wire_dtype']:
                    _, summary = train(world, *args, *mesh, '--batch=1', '--data', TEXT, '--steps=1', '--stage=3', f"--hybrid={c['hybrid']}", '--dp-replicate=2')
                    self.assertEqual(fullest(summary)['bytes'], c['bytes'])
        _, off = tune(*args, '--world=4', '--deterministic=off')
        self.assertEqual((off['c'][-1], off['environment'].split()[-1]), ('cfg.deterministic = 0;', 'ZERO_DETERMINISTIC=0'))

    def test_text(self):
        case = arguments(*CASES[1])
        _, choice = tune(*case)
        done = bench('tune', *case)
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        for line in [*choice['c'], choice['environment']]:
            self.assertIn(f'    {line}\n', done.stdout)
        self.assertRegex(done.stdout, r'\n +1 .* chosen\n')
        self.assertRegex(done.stdout, r'stage 0 .* more than the limit\n')
        self.assertRegex(done.stdout, r' more between hosts\n')


class Precisions(unittest.TestCase):
    """Exact precisions come first, then those that round, from the least to the most. Each is searched for by
    giving its options."""
    @staticmethod
    def precisions(dtype='bf16'):
        """All precisions in groups, which are in their order; the exact ones are one group."""
        groups = {}
        for masters in MASTERS if dtype == 'bf16' else ['f32']:
            for moments in MOMENTS:
                for grad_sum in ['f32', 'bf16'] if dtype == 'bf16' else ['f32']:
                    cost = (masters == 'none', moments == 'q8', moments == 'bf16', grad_sum == 'bf16')
                    groups.setdefault(cost, []).append([f'--masters={masters}', f'--moments={moments}', f'--grad-sum-dtype={grad_sum}'])
        return [groups[cost] for cost in sorted(groups)]

    def first_that_fits(self, *args, dtype='bf16'):
        for group in self.precisions(dtype):
            done = [bench('tune', '--json', *args, *precision) for precision in group]
            fit = [lines(d.stdout)[-1] for d in done if d.returncode == 0]
            if fit:
                return min(fit, key=lambda c: place(dict(c, gathers=c['bytes']['param_slots'])))
        return None

    def test_against_a_search(self):
        chosen = set()
        for limit in [9000000, 2700000, 2400000, 2200000, 1800000, 1500000]:
            args = [*DEEP, '--world=4', f'--limit={limit}']
            want = self.first_that_fits(*args)
            _, choice = tune(*args, *ANY)
            keys = ['masters', 'moments', 'grad_sum_dtype', 'stage', 'hybrid', 'bytes', 'wire_bytes', 'inexact']
            self.assertEqual([choice[k] for k in keys], [want[k] for k in keys], limit)
            self.assertLessEqual(choice['bytes']['total'], limit)
            exact = (choice['moments'], choice['grad_sum_dtype']) == ('f32', 'f32') and choice['masters'] != 'none'
            self.assertEqual((choice['inexact'], bool(choice['note'])), (not exact, not exact))
            chosen.add((choice['masters'], choice['moments'], choice['grad_sum_dtype']))
        self.assertGreater(len(chosen), 3, chosen)

    def test_f32_has_moments_only(self):
        _, choice = tune(*DEEP, '--world=4', '--dtype=f32', '--limit=2800000', *ANY)
        want = self.first_that_fits(*DEEP, '--world=4', '--dtype=f32', '--limit=2800000', dtype='f32')
        self.assertEqual([choice[k] for k in ('masters', 'moments', 'grad_sum_dtype', 'bytes')], [want[k] for k in ('masters', 'moments', 'grad_sum_dtype', 'bytes')])
        self.assertNotEqual(choice['moments'], 'f32')

    def test_only_what_is_allowed(self):
        """Without a word about them all candidates have the defaults. What is given is fixed."""
        candidates, _ = tune(*NANO, '--world=4')
        self.assertEqual({(c['masters'], c['moments'], c['grad_sum_dtype'], c['states']) for c in candidates}, {('f32', 'f32', 'f32', 'device')})
        candidates, _ = tune(*NANO, '--world=4', '--moments=q8', '--masters=any')
        self.assertEqual({(c['masters'], c['moments'], c['inexact']) for c in candidates}, {('f32', 'q8', True), ('remainder', 'q8', True)})

    def test_host_memory_is_not_limited(self):
        args = [*DEEP, '--world=4', '--device=cuda', '--states=any']
        _, free = tune(*args)
        self.assertEqual(free['states'], 'device')
        least = min(c['bytes']['total'] for c in tune(*args)[0])
        candidates, choice = tune(*args, '--moments=any', f'--limit={least - 1}')
        self.assertEqual((choice['states'], choice['moments'], choice['inexact']), ('host', 'f32', False))
        self.assertLess(choice['bytes']['total'] - choice['bytes']['master'] - choice['bytes']['moments'], least)
        self.assertEqual({c['moments'] for c in candidates}, {'f32'})  # nothing inexact is needed
        candidates, _ = tune(*args, '--device=host', '--limit=9000000')
        self.assertEqual({c['states'] for c in candidates}, {'device'})

    def test_what_is_inexact_is_named(self):
        args = [*DEEP, '--world=4', '--limit=2200000', *ANY]
        _, choice = tune(*args)
        self.assertTrue(choice['inexact'])
        done = bench('tune', *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r'Chosen, by the order: .*, inexact: ')
        self.assertIn('Note: its precision is inexact', done.stdout)
        self.assertRegex(done.stdout, r'\n +\d+ +stage 3, masters remainder  ')

    def test_environment(self):
        for limit in [4400000, 2400000, 1800000]:
            _, choice = tune(*DEEP, '--world=4', f'--limit={limit}', *ANY)
            env = dict(pair.split('=') for pair in choice['environment'].split())
            done = bench('plan', '--json', *DEEP, '--world=4', env=env)
            self.assertEqual({str(s['bytes']) for s in lines(done.stdout)}, {str(choice['bytes'])}, done.stderr)


def chosen_by_rule(candidates):
    best = candidates[0]
    for c in candidates[1:]:
        if c['probe'] and c['probe']['ms_upper'] < best['probe']['ms_lower']:
            best = c
    return best


class Probe(unittest.TestCase):
    RANKS = [ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'tune', '--batch=1', '--data', TEXT]

    def test_all_ranks_choose_the_same(self):
        done = run([*self.RANKS, *NANO, '--dtype=f32', '--json', '--log'])
        self.assertEqual(done.returncode, 0, done.stderr)
        *candidates, choice = lines(done.stdout)
        probed = [c for c in candidates if c['probe']]
        self.assertEqual([c['probe']['steps'] for c in probed], [10] * 3)
        self.assertEqual(probed, candidates[:1] + [c for c in candidates[1:] if c['probe']])  # the first is among them
        self.assertEqual(len({(c['stage'], c['hybrid'], c['dp_shard']) for c in probed}), 3)
        for c in probed:
            self.assertLessEqual(0 < c['probe']['ms_lower'], c['probe']['ms_median'])
            self.assertLessEqual(c['probe']['ms_median'], c['probe']['ms_upper'])
        best = chosen_by_rule(candidates)
        self.assertEqual(choice['order'], best['order'])
        self.assertEqual(choice['by'], 'order' if best['order'] == 1 else 'probe')
        said = sorted(line for line in done.stderr.splitlines() if ' chose ' in line)
        self.assertEqual(len(said), 2, done.stderr)
        self.assertEqual([line.split(' chose ')[0] for line in said], [f'zero-bench tune: rank {rank}' for rank in range(2)])
        self.assertEqual(said[0].split(' chose ')[1], said[1].split(' chose ')[1])

    def test_none(self):
        done = run([*self.RANKS, *NANO, '--json', '--probe=0'])
        alone, _ = tune(*NANO, '--world=2')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertEqual(lines(done.stdout)[:-1], alone)

    def test_a_mesh(self):
        """Pipeline ranks have different parts of the model, but choose the same."""
        for mesh in ['--pp=2'], ['--tp=2']:
            done = run([ZERO_RUN, '-n', '4', *self.RANKS[3:], *DEEP, '--json', '--log', '--steps=4', *mesh])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([c['probe']['steps'] for c in lines(done.stdout)[:-1] if c['probe']], [4] * 3)
            said = [line.split(' chose ')[1] for line in done.stderr.splitlines() if ' chose ' in line]
            self.assertEqual(said, said[:1] * 4)

    def test_sizes_alone_are_not_run(self):
        done = run([*self.RANKS, '--params=1e6', '--json'])
        self.assertEqual((done.returncode, done.stderr), (0, 'zero-bench tune: no probe: --params names sizes, not a model that runs\n'))
        self.assertTrue(all(c['probe'] is None for c in lines(done.stdout)))

    def test_one_that_fails_leaves_the_order(self):
        with tempfile.NamedTemporaryFile() as short:
            done = run([*self.RANKS[:-1], short.name, *NANO, '--json'])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(lines(done.stdout)[:-1], tune(*NANO, '--world=2')[0])
        self.assertEqual(done.stderr.count('the probe failed, so the order decides'), 2)


class Refused(unittest.TestCase):
    def refused(self, args, *words, **more):
        done = bench('tune', *args, **more)
        self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, '', 1), done)
        for word in ('zero-bench tune: ', *words):
            self.assertIn(word, done.stderr)

    def test_options(self):
        self.refused(['--world=4', '--limit=0'], "--limit: '0' is not a number of bytes of at least 1")
        self.refused([], '--world: with 1 rank there is nothing to shard')
        self.refused(['--world=1'], '--world: with 1 rank there is nothing to shard')
        self.refused(['--world=8', '--ranks-per-host=3'], '--ranks-per-host: 3 does not divide the 8 ranks')
        self.refused(['--world=12', '--dp-shard=5'], '--dp-shard: 5 does not divide the 12 ranks')
        self.refused(['--world=12', '--ranks-per-host=4', '--dp-shard=6'], '--dp-shard: groups of 6 neither divide the 4 ranks of a host nor fill')
        self.refused(['--world=4', '--dp-shard=4'], '--dp-shard: 4 of 4 ranks are no groups')
        self.refused(['--world=4', '--wire-dtype=f16'], "--wire-dtype: 'f16' is not own, bf16 or any")
        self.refused(['--world=4', '--vocab=10'], '--vocab')
        self.refused(['--world=4', '--masters=bf16'], "--masters: 'bf16' is not f32, remainder, none or any")
        self.refused(['--world=4', '--states=file'], "--states: 'file' is not device, host or any")
        self.refused(['--world=4', '--dtype=f32', '--masters=none'], '--masters: needs a bf16 model')
        self.refused(['--world=4', '--dtype=f32', '--grad-sum-dtype=bf16'], '--grad-sum-dtype: needs a bf16 model')

    def test_meshes(self):
        self.refused(['--world=8', '--tp=4'], '--tp: 4 parts do not divide the 6 heads')
        self.refused(['--world=8', '--tp=3'], '--tp and --pp: 3 parts', 'do not divide the 8 ranks')
        self.refused(['--world=8', '--pp=3'], '--pp: 3 stages', 'world of 8')
        self.refused(['--world=8', '--schedule=gpipe'], '--schedule: is of a pipeline')
        self.refused(['--world=8', '--pp=2', '--stages-per-rank=2'], '--stages-per-rank: is of --pp with')
        self.refused(['--world=8', '--sequence-parallel'], '--sequence-parallel')
        self.refused(['--world=4', '--tp=2', '--pp=2'], 'each of the 4 ranks has another part of the model')
        self.refused(['--world=12', '--tp=3', '--ranks-per-host=4'], '--tp: the 3 ranks of a tensor-parallel group neither divide the 4 ranks of a host nor fill hosts')
        self.refused(['--world=12', '--pp=2', '--ranks-per-host=4'], '--pp: the 6 ranks of a pipeline stage neither divide the 4 ranks of a host nor fill hosts')
        self.refused(['--world=16', '--tp=2', '--dp-shard=8'], '--dp-shard: 8 of 8 data-parallel ranks are no groups')
        self.refused(['--world=16', '--pp=2', '--dp-shard=3'], '--dp-shard: 3 does not divide the 8 data-parallel ranks')

    def test_nothing_fits(self):
        for dtype in ['bf16', 'f32']:
            args = [*DEEP, '--world=4', f'--dtype={dtype}']
            least = min(c['bytes']['total'] for c in tune(*args)[0] if not c['wire_dtype'])
            self.refused([*args, f'--limit={least - 1}'], f'no candidate fits {least - 1} bytes; the least that one needs is {least}, by stage 3, prefetch 0')
            _, choice = tune(*args, f'--limit={least}')
            self.assertEqual(choice['bytes']['total'], least)

    def test_variables_that_would_decide(self):
        for name, value in [('ZERO_STAGE', '2'), ('ZERO_PREFETCH', '1'), ('ZERO_HYBRID', 'hfsdp'), ('ZERO_DP_REPLICATE', '2'), ('ZERO_PARAM_BUDGET_BYTES', '1G'), ('ZERO_SCHEDULE', 'gpipe'),
                            ('ZERO_TP', '2')]:
            self.refused(['--world=4'], f'{name} is set in the environment and would override every candidate', env={name: value})

    def test_another_world(self):
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'tune', '--world=4'])
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('--world: 4, but 2 ranks were started', done.stderr)


if __name__ == '__main__':
    unittest.main()
