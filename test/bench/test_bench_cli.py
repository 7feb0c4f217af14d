# SPDX-License-Identifier: Apache-2.0
"""The command line of zero-bench: refusals and their messages, help, and the numbers of plan."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import CATEGORIES, OPTIMIZERS, STATES_KEYS, TEXT, ZERO_RUN, bench, lines, run, ZERO_BENCH  # noqa: E402

PAGE = 4096
SUBCOMMANDS = ['train', 'sample', 'plan', 'tune', 'memory', 'checkpoint', 'export', 'kernels', 'profile', 'comm', 'scale', 'pipeline', 'verify']


class Refused(unittest.TestCase):
    """A refusal has exit code 2, one line on stderr with the given words, and nothing on stdout."""

    def refused(self, args, *words):
        done = bench(*args)
        told = done.stderr.splitlines()
        self.assertEqual((done.returncode, len(told), done.stdout), (2, 1, ''), f'{args}: {done}')
        self.assertTrue(told[0].startswith('zero-bench'), told[0])
        for word in words:
            self.assertIn(word, told[0], args)

    def test_subcommands(self):
        self.refused([], *SUBCOMMANDS)
        self.refused(['trane'], 'trane', *SUBCOMMANDS)

    def test_unknown_options(self):
        for command in SUBCOMMANDS:
            self.refused([command, '--no-such'], f'zero-bench {command}', '--no-such')
            self.refused([command, '-x'], f'zero-bench {command}', 'x')

    def test_values(self):
        for option, value, *words in [
                ('stage', 4, '0', '3'), ('stage', -1), ('stage', 'x'), ('stage', ''), ('dtype', 'f16', 'f32', 'bf16'),
                ('model', 'gpt3', 'gpt2-nano'), ('batch', 0), ('batch', '1.5'), ('accum', 0), ('steps', 0), ('steps', '1e30'),
                ('lr', 'fast'), ('lr', -1), ('lr', 'nan'), ('clip', -1), ('prefetch', -1), ('budget', '12Q'), ('budget', 0),
                ('seed', 'a'), ('wire-dtype', 'f64'), ('threads', 0), ('optimizer', 'adagrad', 'adamw', 'rmsprop'),
                ('deterministic', 'maybe'), ('seconds', 0), ('layers', 0), ('heads', 5, 'multiple'), ('vocab', 255, '256'),
                ('channels', 0), ('context', 0), ('device', 'tpu', 'host', 'cuda'), ('gpu', -1), ('peak-tflops', 0), ('beta1', 1), ('beta2', 2), ('weight-decay', -1)]:
            shown = () if value in ('', 0) or option in ('heads', 'beta2') else (str(value),)
            named = 'channels' if option == 'heads' else option
            self.refused(['train', f'--{option}={value}'], f'--{named}', *shown, *words)

    def test_whole_messages(self):
        whole, size = 'is not a whole number from', 'is not a number of bytes of at least'
        for command, given, told in [
                ('train', '--stage=4', f"--stage: '4' {whole} 0 to 3"), ('train', '--prefetch=-1', f"--prefetch: '-1' {whole} 0 to 10000"),
                ('plan', '--prefetch=10001', f"--prefetch: '10001' {whole} 0 to 10000"), ('checkpoint', '--stage=4', f"--stage: '4' {whole} 0 to 3"),
                ('checkpoint', '--repeat=26', f"--repeat: '26' {whole} 1 to 25"), ('kernels', '--gpu=1001', f"--gpu: '1001' {whole} 0 to 1000"),
                ('memory', '--ranks=4097', f"--ranks: '4097' {whole} 1 to 4096"),
                ('memory', '--heads=0', f"--heads: '0' {whole} 1 to 10000"), ('verify', '--world=65', f"--world: '65' {whole} 1 to 64"),
                ('verify', '--far=0', "--far: '0' is not a number from 1e-06 to 1e+06"),
                ('train', '--seconds=0', "--seconds: '0' is not a number from 0.001 to 1e+09"),
                ('plan', '--budget=12Q', f"--budget: '12Q' {size} 1 (k, M, G, T or Ki, Mi, Gi, Ti may follow)"),
                ('export', '--max-file=0', f"--max-file: '0' {size} 1 (k, M, G, T or Ki, Mi, Gi, Ti may follow)"),
                ('export', '--dtype=f16', "--dtype: 'f16' is not f32 or bf16"), ('kernels', '--device=tpu', "--device: 'tpu' is not host or cuda"),
                ('train', '--deterministic=1', "--deterministic: '1' is not on or off"),
                ('train', '--masters=bf16', "--masters: 'bf16' is not f32, remainder or none"), ('plan', '--moments=8', "--moments: '8' is not f32, bf16 or q8"),
                ('memory', '--states=disk', "--states: 'disk' is not device, host or file"), ('train', '--grad-sum-dtype=f16', "--grad-sum-dtype: 'f16' is not f32 or bf16"),
                ('train', '--rounding-seed=9007199254740992', f"--rounding-seed: '9007199254740992' {whole} 0 to 9007199254740991"),
                ('plan', '--model=gpt3', "--model: 'gpt3' is not gpt2-nano, gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B, nor a folder"),
                ('plan', '--optimizer=adagrad', f"--optimizer: 'adagrad' is not {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"),
                ('kernels', '--gemm=1,2', "--gemm: '1,2' is not three numbers from 1 to 1000000, as in 8192,8192,8192"),
                ('kernels', '--attention=1,2,3,x', "--attention: '1,2,3,x' is not four numbers from 1 to 1000000, as in 8,1024,12,64"),
                ('memory', '--plot=a.pdf', "--plot: 'a.pdf' does not end in .svg or .png"),
                ('plan', '--heads=5', '--channels: 96 is not a multiple of the 5 heads'),
                ('plan', '--json=1', "option '--json' doesn't allow an argument"),
                ('verify', '--trace', "option '--trace' requires an argument"), ('checkpoint', '--stage=0', '--dir: is needed'),
                ('export', '--out=x', '--load: is needed'), ('export', '--load=x', '--out: is needed'),
                ('kernels', 'word', "'word' is not an option"), ('export', 'word', 'Too many arguments')]:
            done = bench(command, given)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', f'zero-bench {command}: {told}\n'))

    def test_missing_value(self):
        self.refused(['train', '--stage'], '--stage')

    def test_what_does_not_go_together(self):
        self.refused(['train', '--plain', '--optimizer=sgd'], '--optimizer', 'adamw')
        self.refused(['train', '--plain', '--import=x'], '--plain')
        self.refused(['train', '--plain', '--export=x'], '--plain')
        for option in ['--masters=remainder', '--moments=q8', '--grad-sum-dtype=bf16', '--states=host', '--rounding-seed=2']:
            self.refused(['train', '--plain', '--dtype=bf16', option], '--plain', 'fp32')
        for command in 'train', 'plan', 'memory':
            for option in '--masters=none', '--grad-sum-dtype=bf16':
                self.refused([command, '--dtype=f32', option], option.split('=')[0], '--dtype bf16')
        for command in 'train', 'memory':
            done = bench(command, '--states=file', '--steps=1')
            self.assertEqual((done.returncode, done.stdout, done.stderr),
                             (2, '', f'zero-bench {command}: --states file: needs --states-dir or ZERO_STATES_DIR\n'))
            self.refused([command, '--states-dir=/tmp'], '--states-dir', '--states file')
        self.refused(['memory', '--stage=1'], '--stage', '--precisions')
        self.refused(['memory', '--precisions'], '--precisions', '--dtype bf16')
        for option in '--masters=none', '--grad-sum-dtype=bf16', '--moments=q8', '--dp-shard=2':
            self.refused(['memory', '--precisions', '--dtype=bf16', option], '--precisions')
        for alone in ['--save-every=2', '--save-async', '--keep=1', '--load=latest']:
            self.refused(['train', alone], '--save:')
        for stage in '03':
            self.refused(['profile', '--plain', f'--stage={stage}'], '--plain', '--stage')
        self.refused(['profile', '--vocab=255', '--params=1000', '--rounds=1'], '--vocab', 'too few for bytes')

    def test_plain_words(self):
        for command in ['plan', 'memory', 'kernels', 'profile', 'scale', 'verify']:
            self.refused([command, 'word'], 'word')

    def test_no_gpu(self):
        for args in [['train', '--steps=1'], ['train', '--plain', '--steps=1', '--dtype=bf16'], ['kernels']]:
            done = bench(*args, '--device=cuda')
            if done.returncode == 0:
                self.skipTest('here is a GPU')
            self.refused([*args, '--device=cuda'], 'GPU')

    def test_kernels(self):
        for value in ['1,2', '1,2,0', '1,2,3,4', '1,2,x', '']:
            self.refused(['kernels', f'--gemm={value}'], '--gemm')
        self.refused(['kernels', '--rounds=0'], '--rounds')

    def test_scale(self):
        for value in ['8,x', '0', '8,,9', '', '16385', ','.join(['8'] * 33)]:
            self.refused(['scale', f'--worlds={value}'], '--worlds', '16384')
        self.refused(['scale', '--model=gpt2-nano'], '--model', 'llama-3-405B')
        self.refused(['scale', '--machine=h101'], '--machine', 'b200')
        self.refused(['scale', '--compute=1.5'], '--compute')
        self.refused(['scale', '--stage=2', '--dp-replicate=auto'], '--dp-replicate', 'stage 3')
        self.refused(['scale', '--hybrid=hfsdp'], '--hybrid=hfsdp', '--dp-shard')
        self.refused(['scale', '--dp-shard=4', '--dp-replicate=auto'], '--dp-shard', '--dp-replicate=auto')
        self.refused(['scale', '--dp-replicate=2'], '--dp-replicate', 'auto')
        self.refused(['scale', '--stage=2', '--budget=1G'], '--budget', 'stage 3')
        self.refused(['scale', '--stage=2', '--prefetch=2'], '--prefetch', 'stage 3')
        self.refused(['scale', '--wire-dtype=f32'], '--wire-dtype=f32', 'bf16 travel as they are')
        self.refused(['scale', '--states=file'], "--states: 'file' is not device or host")
        self.refused(['scale', '--dtype=f32', '--masters=none'], '--masters', '--dtype bf16')
        self.refused(['scale', '--worlds=12', '--dp-replicate=auto', '--hybrid=hfsdp'], '12 GPUs', 'dp_shard is 8')
        self.refused(['scale', '--worlds=8', '--budget=1K'], 'param_budget_bytes is 1000')
        for form in [[], ['--json']]:
            self.refused(['scale', '--worlds=8', '--batch=1000000', '--context=10000000', '--compute=0.001', *form],
                         '8 GPUs', '--batch', '--context', '--compute')

    def test_scale_of_a_mesh(self):
        self.refused(['scale', '--worlds=8', '--tp=3'], '--tp', '3 parts', '32 heads', 'llama-3-8B')
        self.refused(['scale', '--worlds=16', '--tp=16'], '--tp', '16 parts', '8 of keys and values')
        self.refused(['scale', '--worlds=60', '--model=gpt2-1.5B', '--tp=5'], '--tp', 'hosts of 8 GPUs')
        self.refused(['scale', '--worlds=66', '--pp=33'], '--pp', '33 stages', '32 layers')
        self.refused(['scale', '--worlds=8,12', '--pp=8', '--json', '--worlds=12'], '12 GPUs', '8 stages', '--pp')
        self.refused(['scale', '--worlds=48', '--pp=2', '--tp=8', '--dp-shard=2'], '48 GPUs', 'dp_shard is 2')
        self.refused(['scale', '--tp=8', '--dp-replicate=auto'], '--dp-replicate', "host's 8 GPUs have 8 different parts", '--dp-shard')
        self.refused(['scale', '--schedule=gpipe'], '--schedule', '--pp')
        for how in [], ['--pp=2'], ['--pp=2', '--schedule=1f1b'], ['--schedule=gpipe']:
            wanted = '--schedule: is of' if how == ['--schedule=gpipe'] else '--stages-per-rank: is of --pp with --schedule interleaved or gpipe'
            self.refused(['scale', '--stages-per-rank=2', *how], wanted)
        several = ['scale', '--pp=4', '--schedule=interleaved', '--stages-per-rank']
        self.refused([*several, '9', '--worlds=16'], '--pp and --stages-per-rank', '36 stages', '32 layers')
        self.refused([*several, '2', '--worlds=18'], '18 GPUs', '4 GPUs with stages')
        self.refused([*several, '2', '--worlds=16', '--accum=9'], '--pp', '9 micro-batches evenly into 2 rounds on 4 ranks')
        self.refused([*several, '17'], '--stages-per-rank', '16')
        self.refused(['scale', '--accum=2', '--micro-batches=2'], '--micro-batches', '--accum')
        self.refused(['scale', '--pp=200'], '--pp', '--accum', '256')
        self.refused(['scale', '--pp=2', '--worlds=2', '--batch=100000', '--compute=0.01'], '2 GPUs', '--batch', '--compute')

    def test_pipeline(self):
        self.refused(['pipeline'], '--ranks', '--read')
        self.refused(['pipeline', '--ranks=0'], '--ranks')
        self.refused(['pipeline', '--ranks=4', '--schedule=zbv'], 'gpipe, 1f1b, interleaved or zero-bubble')
        self.refused(['pipeline', '--ranks=4', '--stages-per-rank=2'], '1F1B has one stage per rank')
        self.refused(['pipeline', '--ranks=4', '--schedule=interleaved', '--micro-batches=9'], '9 micro-batches evenly into 2 rounds on 4 ranks')
        self.refused(['pipeline', '--read=/nonexistent/x.csv'], '/nonexistent/x.csv')
        for given in ['--ranks=4', '--schedule=1f1b', '--micro-batches=4', '--stages-per-rank=1', '--forward-only']:
            self.refused(['pipeline', '--read=x.csv', given], '--read', given.split('=')[0])
        self.refused(['pipeline', '--ranks=4', '--unsharded=1'], '--unsharded', '--messages')
        self.refused(['pipeline', '--ranks=4', '--weight-us=1'], '--weight-us', '--read')
        for backward, weight in [(2, 2), (1, 1), (1, 50)]:
            self.refused(['pipeline', '--read=x.csv', f'--backward-us={backward}', f'--weight-us={weight}'], '--weight-us')
        self.refused(['pipeline', '--ranks=4', '--forward-only', '--backward-us=2'], '--forward-only', '--backward-us')
        for units in ['1,2,3', '1,2,3,4,5', '1,0,1,1', '1,,1,1', 'x', '']:
            self.refused(['pipeline', '--ranks=4', f'--units={units}'], '--units', 'list of 4 numbers')

    def test_verify(self):
        self.refused(['verify', '--case', 'wold=2'], '--case', 'wold')
        self.refused(['verify', '--case', 'stage=4 world=2 n_units=1 accum=1 n_steps=1'], '--case', '0..3')
        self.refused(['verify', '--seeds=0'], '--seeds')
        for args in [['--world=8', '--pp=3'], ['--schedule=gpipe'], ['--world=2', '--pp=2', '--stages-per-rank=2'],
                     ['--world=4', '--pp=4', '--schedule=interleaved', '--accum=9']]:
            self.refused(['verify', '--time', *args], 'do not go together')

    def test_time_of_stages(self):
        """On free links, the bubble is (p - 1) of (m + p - 1) parts. Several pipeline stages on a rank divide
        it."""
        free = ['--near=1e6', '--far=1e6', '--memory=1e6', '--elements=1e6', '--units=16', '--tokens=1000000']
        for schedule, per_rank in ('gpipe', 1), ('1f1b', 1), ('interleaved', 2), ('zero-bubble', 1):
            row, = lines(bench('verify', '--time', '--json', '--world=4', '--pp=4', '--accum=8', f'--schedule={schedule}', *free).stdout)
            self.assertEqual((row['pp'], row['stages_per_rank']), (4, per_rank))
            parts = 3 if schedule == 'zero-bubble' else per_rank
            self.assertAlmostEqual(row['bubble_ms'] / row['compute_ms'], 3 / 8 / parts, delta=0.01)
            self.assertLess(row['norm_ms'], 0.01 * row['compute_ms'])
            self.assertGreaterEqual(row['exposed_ms'], row['bubble_ms'] + row['norm_ms'])

    def test_plan_of_stages(self):
        self.refused(['plan', '--pp=13', '--world=26', '--model=gpt2-124M'], '--pp', '13 stages', '12 layers')
        self.refused(['plan', '--pp=3', '--world=8'], '--pp', '3 stages', 'world of 8', '--world')
        self.refused(['plan', '--pp=2', '--tp=2', '--world=6'], '--pp', '2 parts', 'world of 6')
        self.refused(['plan', '--pp=2', '--tp=4', '--world=8'], '--tp', '4 parts', '6 heads')
        self.refused(['plan', '--pp=2', '--world=24', '--dp-shard=5'], 'dp_shard 5', 'world of 24 ranks')
        self.refused(['plan', '--params=1e6', '--tp=1024', '--pp=2', '--world=2048'], '--params', '1024 parts', '2 stages')
        self.refused(['plan', '--pp=0'], '--pp')
        self.refused(['plan', '--pp=1025'], '--pp', '1024')
        self.refused(['plan', '--pp=2', '--world=2', '--schedule=zb'], '--schedule', '1f1b', 'gpipe')
        self.refused(['plan', '--schedule=gpipe'], '--schedule', '--pp')
        self.refused(['plan', '--pp=2', '--world=2', '--schedule=zero-bubble', '--stages-per-rank=2'], '--stages-per-rank', 'interleaved or gpipe')
        self.refused(['train', '--pp=2', '--schedule=zbv'], '--schedule', '1f1b, gpipe, interleaved or zero-bubble')
        self.refused(['plan', '--accum=2', '--micro-batches=2'], '--micro-batches', '--accum')
        self.refused(['plan', '--micro-batches=0'], '--micro-batches')
        self.refused(['plan', '--batch=0'], '--batch')

    def test_plan(self):
        self.refused(['plan', '--params=0'], '--params')
        self.refused(['plan', '--params=0.5'], '--params')
        self.refused(['plan', '--world=0'], '--world')
        self.refused(['plan', '--world=8', '--dp-shard=3'], 'dp_shard 3', 'do not multiply to the world of 8 ranks')
        self.refused(['plan', '--dp-shard=0'], '--dp-shard')

    def test_hybrid(self):
        data = ['--data', TEXT, '--steps=1']
        self.refused(['train', '--hybrid=fsdp', *data], '--hybrid', 'hsdp or hfsdp')
        self.refused(['train', '--hybrid=none', *data], '--hybrid', 'hsdp or hfsdp')
        self.refused(['train', '--shard-group=2', *data], '--shard-group')
        self.refused(['train', '--dp-replicate=2', '--stage=3', *data], 'dp_replicate 2', 'do not divide the world of 1 ranks')
        self.refused(['train', '--dp-replicate=auto', '--dp-shard=2', *data], 'dp_shard is 2, but dp_replicate auto')

    def test_plot_kind(self):
        self.refused(['memory', '--plot=a.pdf'], '--plot', 'a.pdf', '.svg')

    def test_data(self):
        with tempfile.TemporaryDirectory() as folder:
            none, short = os.path.join(folder, 'none'), os.path.join(folder, 'short')
            with open(short, 'w', encoding='utf-8') as f:
                f.write('x' * 64)
            exact = ['--batch=2', '--context=32', '--layers=1', '--steps=1']
            self.refused(['train', '--data', none], none)
            self.refused(['train', '--data', TEXT, none], none)
            self.refused(['train', '--data', short, *exact], '--data', '64', '65')
            self.refused(['train', '--plain', '--data', folder, *exact], '--data', '64', '65')
            with open(short, 'a', encoding='utf-8') as f:
                f.write('x')
            done = bench('train', '--data', short, *exact)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_budget_below_one_unit(self):
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', '--stage=3', '--budget=1K', '--data', TEXT])
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn('budget', done.stderr)


class Kernels(unittest.TestCase):
    """Each figure of the host has its limit next to it. How fast anything is, is not for a test to judge."""

    def test_rows(self):
        done = bench('kernels', '--json', '--dtype=bf16', '--params=100001', '--gemm=90,170,50', '--rounds=2')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        told, = lines(done.stdout)
        rows = {row['name']: row for row in told['kernels']}
        self.assertEqual(len(rows), len(told['kernels']))
        two = {'adamw', 'adam'}
        bytes_of = {'copy': 8, 'cast f32 to bf16': 6, 'cast bf16 to f32': 6, 'sum of squares': 4, 'scale': 8, 'add': 12,
                    'sum of 4, f32': 20, 'sum of 4, bf16': 12, 'product f32': 0, 'product bf16': 0}
        for name in OPTIMIZERS: # reads the gradient, reads and writes the weight and states
            bytes_of[name + ' f32'] = 4 + 8 * (3 if name in two else 2)
            bytes_of[name + ' bf16'] = bytes_of[name + ' f32'] + 2
        self.assertEqual({name: row['bytes_per_element'] for name, row in rows.items()}, bytes_of)
        for name, row in rows.items():
            self.assertEqual(row['unit'], 'GFLOP/s' if 'product' in name else 'GB/s')
            self.assertGreater(row['measured'], 0, name)
            self.assertGreater(row['limit'], 0, name)
            self.assertAlmostEqual(row['of_limit'] * row['limit'] / row['measured'], 1)
        self.assertEqual(told['adamw_gb_per_s'], rows['adamw bf16']['measured'])
        self.assertEqual(told['adamw_bytes_per_param'], rows['adamw bf16']['bytes_per_element'])
        self.assertAlmostEqual(told['gemm_tflop_per_s'] * 1e3 / rows['product bf16']['measured'], 1)

    def test_text(self):
        done = bench('kernels', '--params=100000', '--gemm=64,64,64', '--rounds=1')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertRegex(done.stdout, r'(?m)^adamw f32 +28 +[0-9.]+ GB/s +[0-9.]+ GB/s +[0-9]+%$')
        self.assertRegex(done.stdout, r'(?m)^product bf16 +[0-9.]+ GFLOP/s +[0-9.]+ GFLOP/s +[0-9]+%$')


class Profile(unittest.TestCase):
    """Every nanosecond of the measured steps is counted in one part."""
    PARTS = ['products', 'attention', 'other compute', 'optimizer', 'norm and agreement', 'exposed communication', 'runtime', 'rest']

    def profile(self, world, *args, steps=3):
        command = [ZERO_BENCH, 'profile', '--json', '--data', TEXT, '--params=100000', '--rounds=1', f'--steps={steps}', '--batch=1', *args]
        done = run([ZERO_RUN, '--raw', '-n', str(world), *command] if world > 1 else command)
        self.assertEqual(done.returncode, 0, done)
        told, = lines(done.stdout)
        parts = {part['part']: part for part in told['parts']}
        self.assertEqual([part['part'] for part in told['parts']], self.PARTS)
        self.assertEqual(sum(part['ns'] for part in told['parts']), told['ns'])
        self.assertTrue(all(part['ns'] >= 0 for part in told['parts']), told['parts'])
        self.assertAlmostEqual(sum(part['of_step'] for part in told['parts']), 1)
        self.assertEqual((told['world'], told['steps']), (world, steps))
        for name in ['products', 'attention', 'other compute']:
            self.assertGreater(parts[name]['ns'], 0, name)
            self.assertGreater(parts[name]['ns_at_limit'], 0, name)
        return told, parts

    def test_plain(self):
        told, parts = self.profile(1, '--plain', '--layers=2', '--heads=3', '--channels=48', '--context=32', '--vocab=300')
        L, C, T, V, BT = 2, 48, 32, 300, 32
        # Each weight of a matrix is multiplied once in forward and twice in backward. The same holds for
        # attention's two products of T x T, but backward repeats the first of forward.
        self.assertEqual(parts['products']['flop'], 3 * 3 * 2 * BT * (L * 12 * C * C + V * C))
        self.assertEqual(parts['attention']['flop'], 3 * 7 * L * 2 * BT * T * C)
        self.assertGreater(parts['optimizer']['ns'], 0)
        for name in ['norm and agreement', 'exposed communication', 'runtime']:
            self.assertEqual(parts[name]['ns'], 0, name)
        self.assertTrue(told['plain'])
        self.assertIsNone(told['stage'])

    def test_wrapped(self):
        L, C, T, V = 2, 48, 32, 300
        n = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
        for world, stage in [(1, 0), (2, 0), (2, 3)]:
            told, parts = self.profile(world, f'--stage={stage}', '--dtype=bf16', f'--layers={L}', '--heads=3', f'--channels={C}', f'--context={T}', f'--vocab={V}')
            self.assertGreater(parts['norm and agreement']['ns'], 0)
            self.assertEqual(parts['exposed communication']['ns'] > 0, world > 1)
            kernels = {k['name']: k for k in told['kernels']}
            # Every rank reads its slice for the norm. At stage 0 it updates everything, including the gaps in
            # the layout of states.
            for name, kernel, elements, gaps in [('norm and agreement', 'sum of squares', n / world, 1e-9),
                                                 ('optimizer', 'adamw bf16', n / (world if stage else 1), 0.05)]:
                ns = 3 * elements * kernels[kernel]['bytes_per_element'] / kernels[kernel]['limit']
                self.assertAlmostEqual(parts[name]['ns_at_limit'] / ns, 1, delta=gaps, msg=(world, stage, name))


    def test_what_the_timeline_has_room_for(self):
        """Whether it fits is known before training only as a bound: the timeline keeps the latest 16384 spans
        of a track."""
        tiny = ['--layers=1', '--heads=1', '--channels=8', '--context=4', '--vocab=256']
        self.profile(1, '--stage=0', '--accum=24', *tiny, steps=50)
        self.profile(1, '--plain', '--accum=25', *tiny, steps=50)
        done = bench('profile', '--steps=50', '--accum=25', *tiny)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', 'zero-bench profile: --steps, --accum: 1250 micro-batches would be measured; '
                                                                       'with --layers 1 the timeline has room for 1248\n'))


class Help(unittest.TestCase):
    def test_help(self):
        for args in [['--help'], *([c, '--help'] for c in SUBCOMMANDS)]:
            done = bench(*args)
            self.assertEqual((done.returncode, done.stderr), (0, ''), args)
            self.assertIn('Usage: zero-bench', done.stdout)
            self.assertNotRegex(done.stdout, r'(?m) $|^ {30}', args)  # argp breaks a few lengths of text at the wrong place

    def test_version(self):
        done = bench('--version')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertRegex(done.stdout, r'^zero-bench \d+\.\d+\.\d+\n$')

    def test_options_of_the_train_subcommand(self):
        text = bench('train', '--help').stdout
        for option in ('model layers heads channels context vocab stage dtype batch accum steps lr clip prefetch budget seed '
                       'wire-dtype threads data json plain seconds').split():
            self.assertIn(f'--{option}', text)


class Plan(unittest.TestCase):
    def stages(self, *args):
        done = bench('plan', '--json', *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        stages = lines(done.stdout)
        self.assertEqual([s['stage'] for s in stages], [0, 1, 2, 3])
        for s in stages:
            self.assertEqual(list(s), ['stage', 'bytes', 'paper_bytes', 'wire_bytes', 'plan_ns', *STATES_KEYS])
            self.assertGreater(s.pop('plan_ns'), 0)
            self.assertEqual(list(s['bytes']), CATEGORIES)
            self.assertEqual(sum(v for k, v in s['bytes'].items() if k != 'total'), s['bytes']['total'])
        return stages

    def test_the_papers_figures(self):
        p, n = 7500000000, 64
        exact = [16 * p, 4 * p + 12 * p // n, 2 * p + 14 * p // n, 16 * p // n]
        self.assertEqual([s['paper_bytes'] for s in self.stages('--params=7.5e9', '--world=64')], exact)
        text = bench('plan', '--params=7.5e9', '--world=64').stdout
        row = next(line for line in text.splitlines() if 'paper' in line)
        for figure in ['120 GB', '31.4 GB', '16.6 GB', '1.88 GB']:
            self.assertIn(figure, row)
        self.assertRegex(text.splitlines()[-1], r'^time to plan( +[0-9.]+ ms){4}$')

    def test_precisions(self):
        """Bytes of a parameter by precision; padding is the same for all."""
        def of(*args):
            stages = lines(bench('plan', '--json', '--model=gpt2-124M', *args).stdout)
            self.assertEqual(len(stages), 4)
            return stages

        default = of('--world=4')
        self.assertEqual([[s[k] for k in STATES_KEYS] for s in default], [['f32', 'f32', 'f32', 'device']] * 4)
        for masters, size in ('remainder', 2), ('none', 0):
            for a, b in zip(default, of('--world=4', f'--masters={masters}')):
                self.assertEqual((b['bytes']['master'] * 4, b['masters']), (a['bytes']['master'] * size, masters))
                self.assertEqual(a['bytes']['total'] - b['bytes']['total'], a['bytes']['master'] - b['bytes']['master'])
        for moments, size in ('bf16', 2), ('q8', 1 + 2 / 32):
            for a, b in zip(default, of('--world=4', f'--moments={moments}')):
                self.assertAlmostEqual(b['bytes']['moments'] / a['bytes']['moments'], size / 4, delta=1e-3)  # regions are padded
                self.assertEqual(b['moments'], moments)
        largest = 4 * 39383808 // 4  # the embeddings, in fp32, of one of four ranks
        for a, b in zip(default, of('--world=4', '--grad-sum-dtype=bf16')):
            self.assertEqual((b['bytes']['grad_shards'] * 2, b['grad_sum_dtype']), (a['bytes']['grad_shards'] * (b['stage'] > 0), 'bf16'))
            self.assertAlmostEqual(b['bytes']['grad_sums'] / largest, 1, delta=0.01)
        n = default[0]['bytes']['param_shards'] // 2
        for args, size in ([], 16), (['--masters=remainder'], 14), (['--masters=remainder', '--moments=bf16'], 10), (['--masters=none', '--moments=bf16'], 8), (
                ['--masters=remainder', '--moments=q8'], 8.125):
            one = of('--world=1', '--grad-sum-dtype=bf16', *args)[0]['bytes']
            self.assertAlmostEqual((one['total'] - one['exchange']) / n, size, delta=1e-3)
        self.assertIn(', adamw, gradient sums bf16, masters remainder, moments q8, ', bench('plan', '--grad-sum-dtype=bf16', '--masters=remainder', '--moments=q8').stdout)

    def test_states(self):
        """States in host memory are part of the total; those in a file are not. No file is opened."""
        for device in 'host', 'cuda':
            args = ['plan', '--model=gpt2-124M', '--world=4', f'--device={device}']
            plans = [lines(bench(*args, '--json', f'--states={where}').stdout) for where in ('device', 'host', 'file')]
            for d, h, f in zip(*plans, strict=True):
                self.assertEqual((d['states'], h['states'], f['states']), ('device', 'host', 'file'))
                self.assertEqual((h['bytes'], h['file_bytes']), (d['bytes'], 0))
                states = d['bytes']['master'] + d['bytes']['moments']
                if device == 'cuda':
                    self.assertIn(h['host_bytes'] - states, range(0, 1 << 20))
                self.assertEqual((f['bytes']['master'], f['bytes']['moments']), (0, 0))
                self.assertAlmostEqual(f['file_bytes'] / states, 1, delta=0.01)
                self.assertLess(f['bytes']['state_buffers'], states)
                self.assertGreater(f['bytes']['state_buffers'], 0)
            told = [bench(*args, f'--states={where}').stdout for where in ('device', 'host', 'file')]
            self.assertEqual([('of it in host memory' in t, 'and in a file' in t) for t in told], [(False, False), (device == 'cuda', False), (device == 'cuda', True)])
        pipeline = bench('plan', '--model=gpt2-124M', '--world=4', '--pp=2', '--states=file').stdout
        self.assertIn('and in a file', pipeline)

    def test_hybrids_stand_behind_the_stages(self):
        """Bytes per parameter, with 2 for a weight: parameters and gradients are sharded in a group, states
        in a group or in the world."""
        p, world, group = 7500000000, 64, 8
        args = [f'--params={p}', f'--world={world}', f'--dp-shard={group}']
        stages = lines(bench('plan', '--json', *args).stdout)
        self.assertEqual([(s['stage'], s.get('hybrid'), s.get('dp_shard')) for s in stages],
                         [(0, None, None), (1, None, None), (2, None, None), (3, None, None), (3, 'hsdp', group), (3, 'hfsdp', group)])
        self.assertEqual([s['paper_bytes'] for s in stages[4:]], [16 * p // group, 4 * p // group + 12 * p // world])
        for s, states in (stages[4], group), (stages[5], world):
            for category, bytes_each, ranks in [('param_shards', 2, group), ('grad_shards', 4, group), ('master', 4, states), ('moments', 8, states)]:
                self.assertAlmostEqual(s['bytes'][category] / (bytes_each * p / ranks), 1, delta=1e-3, msg=category)
        text = bench('plan', *args).stdout
        self.assertRegex(text, r'\nper rank +stage 0 +stage 1 +stage 2 +stage 3 +HSDP +HFSDP\n')
        self.assertRegex(text.splitlines()[-1], r'^time to plan( +[0-9.]+ ms){6}$')

    def test_groups_taken_for_hosts_are_told_of(self):
        """A plan does not know hosts. Reducing each micro-batch between hosts would be slow, so sums are not
        deterministic unless that is requested."""
        args = ['--world=8', '--dp-shard=2', '--json']
        said = {accum: bench('plan', *args, f'--accum={accum}') for accum in [1, 4]}
        self.assertEqual(said[1].stderr, '')
        self.assertEqual([line.split(';')[0] for line in said[4].stderr.splitlines()],
                         2 * ['libzero: deterministic is off: groups of 2 ranks span several hosts, and each of a step\'s 4 micro-batches would be '
                              'reduced over their network'])
        on = bench('plan', *args, '--accum=4', '--deterministic=on')
        self.assertEqual((on.returncode, on.stderr), (0, ''))
        off = lines(said[4].stdout)
        for s, t in zip(lines(on.stdout), off):
            self.assertEqual(s['bytes'] == t['bytes'], 'hybrid' not in s)
            self.assertEqual(s.get('outer_bytes', 0) > t.get('outer_bytes', 0), 'hybrid' in s)
        off = bench('plan', *args, '--accum=4', '--deterministic=off')
        self.assertEqual((off.returncode, off.stderr), (0, ''))
        alone = bench('plan', '--world=8', '--dp-shard=8', '--json')
        self.assertIn('hybrid is hfsdp but dp_replicate is 1: it has no effect, this runs as stage 3', alone.stderr)

    def test_the_number_asked_for_is_met(self):
        for n in [1, 17, 1000, 123457, 10**6, 99999999, 10**8, 10**9 + 7, 175 * 10**9]:
            text = bench('plan', f'--params={n}').stdout
            self.assertTrue(text.startswith(f'{n} parameters'), text.splitlines()[0])

    def test_sizes_win_over_the_model(self):
        given = ['--layers=3', '--context=32']
        around = [self.stages(*args) for args in [(*given, '--model=gpt2-124M'), ('--model=gpt2-124M', *given),
                                                 ('--model=gpt2-1.5B', '--model=gpt2-124M', *given)]]
        self.assertEqual(around[0], around[1])
        self.assertEqual(around[0], around[2])
        c = 768
        params = (50257 + 32) * c + 3 * (12 * c * c + 13 * c) + 2 * c
        self.assertEqual(around[0][0]['paper_bytes'], 16 * params)

    def test_prefetch_none(self):
        none, two, default = [self.stages('--world=4', *args)[3]['bytes']['param_slots'] for args in
                              [['--prefetch=0'], ['--prefetch=2'], []]]
        self.assertLess(none, two)
        self.assertEqual(two, default)

    def test_named_models(self):
        for model, millions in [('gpt2-124M', 124), ('gpt2-355M', 355), ('gpt2-774M', 774), ('gpt2-1.5B', 1558)]:
            stages = self.stages('--model', model, '--world=1')
            self.assertEqual(round(stages[0]['paper_bytes'] / 16e6), millions)  # 16 bytes each

    def test_one_rank_sends_nothing(self):
        self.assertEqual([s['wire_bytes'] for s in self.stages('--world=1')], [0] * 4)

    def test_stages_save_memory(self):
        totals = [s['bytes']['total'] for s in self.stages('--model=gpt2-1.5B', '--world=16')]
        self.assertEqual(totals, sorted(totals, reverse=True))
        self.assertLess(totals[3] * 4, totals[0])


class PlanOfStages(unittest.TestCase):
    """--pp: a GPT of 5 layers in 2 pipeline stages of 3 and 2, without data parallelism, so that every byte
    can be computed by hand."""
    C, T, V, L = 64, 32, 256, 5
    SIZES = ['--layers=5', '--channels=64', '--heads=4', '--vocab=256', '--context=32', '--dtype=f32', '--pp=2', '--world=2']
    KEYS = ['stage', 'bytes', 'paper_bytes', 'wire_bytes', 'plan_ns', *STATES_KEYS, 'pp', 'schedule', 'micro_batches', 'bubble',
            'pp_rank', 'activation_bytes', 'all_bytes', 'pp_ranks']
    RANK_KEYS = ['pp_rank', 'layers', 'n_params', 'bytes', 'kept', 'activation_bytes', 'wire_bytes', 'moved_bytes']

    def of(self, *args, err=''):
        done = bench('plan', '--json', *args)
        self.assertEqual((done.returncode, done.stderr), (0, err), args)
        return lines(done.stdout)

    def test_by_hand(self):
        c, t, v = self.C, self.T, self.V
        layer, embedding, positions, norm = 12 * c * c + 13 * c, v * c, t * c, 2 * c
        for schedule, m, batch, kept in [('1f1b', 4, 1, [2, 1]), ('1f1b', 4, 2, [2, 1]), ('gpipe', 4, 1, [4, 4]), ('1f1b', 2, 3, [2, 1]), ('zero-bubble', 4, 1, [2, 2])]:
            rows = self.of(*self.SIZES, f'--micro-batches={m}', f'--batch={batch}', f'--schedule={schedule}')
            self.assertEqual([r['stage'] for r in rows], [0, 1, 2, 3])
            row = rows[0]
            first, last = row['pp_ranks']
            self.assertEqual((list(row), list(first)), (self.KEYS, self.RANK_KEYS))
            self.assertEqual((row['pp'], row['schedule'], row['micro_batches']), (2, schedule, m))
            self.assertEqual([s['layers'] for s in row['pp_ranks']], [3, 2])
            trained = [embedding + positions + 3 * layer, 2 * layer + norm]
            self.assertEqual([first['n_params'], last['n_params']], [trained[0], trained[1] + embedding])
            for s, n in zip(row['pp_ranks'], trained):
                self.assertEqual(s['bytes']['param_shards'], 4 * s['n_params'])  # includes the copy of the embedding
                self.assertEqual(s['bytes']['moments'], 8 * n)                   # the first stage has its states
                self.assertEqual(s['bytes']['grad_shards'], 4 * n)
                self.assertEqual(sum(b for k, b in s['bytes'].items() if k != 'total'), s['bytes']['total'])
                self.assertEqual(s['moved_bytes'], m * 4 * batch * t * c)
            # A layer: two norms, two sums, q, k, v, attention, and 4 C twice. On the last stage the first
            # layer's input is not counted, since it is in a slot. The final norm with its input, and the
            # logits, are added there.
            elems = [3 * 16 * c, 2 * 16 * c - c + 2 * c + v]
            self.assertEqual([s['kept'] for s in row['pp_ranks']], kept)
            self.assertEqual([s['activation_bytes'] for s in row['pp_ranks']], [k * 4 * batch * t * n for k, n in zip(kept, elems)])
            self.assertEqual((row['pp_rank'], row['bytes']), (0, first['bytes']))
            self.assertEqual(row['all_bytes'], first['bytes']['total'] + first['activation_bytes'])
            if schedule == '1f1b' and m == 4:  # 2 slots to the next stage and 1 back, twice, and a gradient of the embedding with a word after it
                self.assertEqual(first['bytes']['comm'], 6 * 4 * batch * t * c + 4 * embedding + PAGE)

    def test_bubble(self):
        for pp, m, schedule in [(2, 4, '1f1b'), (4, 8, '1f1b'), (4, 8, 'gpipe'), (4, 32, '1f1b'), (12, 12, 'gpipe'), (12, 100, '1f1b'), (6, 1, '1f1b'), (4, 8, 'zero-bubble'),
                                (12, 24, 'zero-bubble')]:
            few = f'zero-bench plan: warning: fewer micro-batches ({m}) than pipeline stages ({pp})\n' if m < pp else ''
            row = self.of('--model=gpt2-124M', f'--pp={pp}', f'--world={pp}', f'--micro-batches={m}', f'--schedule={schedule}', err=few)[0]
            parts = 3 * m if schedule == 'zero-bubble' else m
            self.assertAlmostEqual(row['bubble'], (pp - 1) / (parts + pp - 1), delta=1e-12)
        row = self.of('--model=gpt2-124M', '--pp=2', '--world=2')[0]
        self.assertEqual(row['micro_batches'], 4)
        # 3 layers and 2. The first stage computes 4 * 9 and waits once, for 3: until its neighbour's forward
        # and backward (2 + 4) are done, less one forward.
        row = self.of(*self.SIZES, '--micro-batches=4')[0]
        self.assertAlmostEqual(row['bubble'], 1 - (36 + 24) / 2 / 39, delta=1e-12)

    def test_several_stages_on_a_rank(self):
        """Their idle time is divided by the stages per rank. For two stages on each of two ranks every byte
        is computed by hand."""
        for pp, m, v in [(2, 4, 2), (2, 8, 3), (4, 8, 3), (3, 12, 2), (12, 24, 1)]:
            row = self.of('--model=gpt2-124M', f'--pp={pp}', f'--world={pp}', f'--micro-batches={m}', '--schedule=interleaved', f'--stages-per-rank={v}')[0]
            self.assertAlmostEqual(row['bubble'], (pp - 1) / (v * m + pp - 1), delta=1e-12)
            self.assertEqual(row.get('stages_per_rank', 1), v)
            if v == 1:  # not 1F1B, which keeps one for each stage from here to the last
                self.assertEqual([s['kept'] for s in row['pp_ranks']], list(range(2 * pp - 1, 0, -2)))
            self.assertEqual(sum(s['layers'] for s in row['pp_ranks']), 12)
            self.assertEqual(sum(s['n_params'] for s in row['pp_ranks']), 124439808 + 50257 * 768)
        c, t, v = self.C, self.T, self.V
        row = self.of(*self.SIZES, '--layers=4', '--micro-batches=4', '--schedule=interleaved', '--stages-per-rank=2')[0]
        first, last = row['pp_ranks']
        self.assertEqual([s['layers'] for s in row['pp_ranks']], [2, 2])
        self.assertEqual([s['moved_bytes'] for s in row['pp_ranks']], 2 * [3 * 4 * 4 * t * c])
        layer, messages = 16 * c, 4 * t * c
        # Two pairs. Each of two stages has one slot back and four forward, as all that the first stage sends
        # may come before its neighbour's first backward of it. One gradient of the embedding with a word
        # after it.
        self.assertEqual(first['bytes']['comm'], 2 * 2 * 5 * messages + 4 * v * c + PAGE)
        # The first rank's actions: forward of stages 0 0 2 2 0, backward of 2, forward of 0. Then it keeps
        # four inputs of stage 0 and one of stage 2, which is in a slot.
        self.assertEqual(first['activation_bytes'], 4 * t * (4 * layer + layer - c))
        done = bench('plan', *self.SIZES, '--layers=4', '--micro-batches=4', '--schedule=interleaved', '--stages-per-rank=2')
        self.assertIn('2 ranks: 4 pipeline stages of 1 to 1 of 4 layers, 2 on each rank', done.stdout)
        for says, *args in [('--stages-per-rank: is of --pp with', '--stages-per-rank=2'), ('--stages-per-rank: is of --pp with', '--stages-per-rank=2', '--pp=2', '--world=2'),
                            ('--pp: 6 stages are more than the 5 layers', *self.SIZES, '--stages-per-rank=3', '--schedule=gpipe')]:
            done = bench('plan', *args)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)

    def test_stages_make_up_the_model(self):
        """All stages together have each parameter once, and the embedding once more on the last stage.
        Remaining layers go to the stages in the middle."""
        for pp, layers in [(5, [2, 3, 3, 2, 2]), (12, 12 * [1]), (3, 3 * [4])]:
            rows = self.of('--model=gpt2-124M', f'--pp={pp}', f'--world={2 * pp}')
            self.assertEqual([s['layers'] for s in rows[3]['pp_ranks']], layers)
            self.assertEqual(sum(s['n_params'] for s in rows[0]['pp_ranks']), 124439808 + 50257 * 768)
            self.assertEqual([s['kept'] for s in rows[0]['pp_ranks']], list(range(pp, 0, -1)))

    def test_with_parts_and_groups(self):
        rows = self.of('--params=7e10', '--world=4096', '--pp=8', '--tp=8', '--dp-shard=8', '--accum=32', '--deterministic=on')
        self.assertEqual([(r['stage'], r.get('hybrid')) for r in rows], [(0, None), (1, None), (2, None), (3, None), (3, 'hsdp'), (3, 'hfsdp')])
        for r in rows:
            self.assertEqual(max(s['bytes']['total'] + s['activation_bytes'] for s in r['pp_ranks']), r['all_bytes'])
        text = bench('plan', '--params=7e10', '--world=4096', '--pp=8', '--tp=8').stdout
        for row in ['fullest stage of pp', 'with activations', '  so the first stage', '  between, the fullest', '  the last', 'from other stages']:
            self.assertRegex(text, rf'(?m)^{row} ')
        self.assertIn('not counted are', text)

    def test_activations_without_stages(self):
        """--batch alone adds everything that the whole model keeps, and changes nothing else."""
        c, t, v = self.C, self.T, self.V
        sizes = [a for a in self.SIZES if not a.startswith('--pp')]
        plain, counted = self.of(*sizes), self.of(*sizes, '--batch=2')
        for a, b in zip(plain, counted):
            self.assertEqual(b.pop('activation_bytes'), 4 * 2 * t * (5 * 16 * c + 2 * c + v))
            self.assertEqual({**a, 'plan_ns': 0}, {**b, 'plan_ns': 0})

    def test_recompute(self):
        """With --recompute a micro-batch keeps C for each layer, and one layer has all of its activations. With
        zero-bubble, layers have them between the two parts of a backward, too."""
        c, t, v = self.C, self.T, self.V
        sizes = [a for a in self.SIZES if not a.startswith('--pp')]
        plain, less = self.of(*sizes, '--batch=2'), self.of(*sizes, '--batch=2', '--recompute')
        for a, b in zip(plain, less):
            self.assertEqual(b.pop('activation_bytes'), 4 * 2 * t * (5 * c + 15 * c + 2 * c + v))
            a.pop('activation_bytes')
            self.assertEqual({**a, 'plan_ns': 0}, {**b, 'plan_ns': 0})
        for schedule, between in [('1f1b', [0, 0]), ('zero-bubble', [1, 2])]:
            ranks = self.of(*self.SIZES, '--layers=6', '--micro-batches=4', f'--schedule={schedule}', '--recompute')[0]['pp_ranks']
            self.assertEqual([s['kept'] for s in ranks], [2, 1] if schedule == '1f1b' else [2, 2])
            kept = [s['kept'] * elems for s, elems in zip(ranks, [3 * c, 3 * c - c + 2 * c + v])]
            self.assertEqual([s['activation_bytes'] for s in ranks], [4 * t * (k + 15 * c + 3 * 15 * c * n) for k, n in zip(kept, between)])
        text = bench('plan', *self.SIZES, '--recompute').stdout
        self.assertIn('those inside layers computed again', text)

    def test_activations_of_own_rows(self):
        """With sequence parallelism a rank keeps one tp-th of the norms and sums, the embedded tokens, and
        the final norm with its input. Of heads, the MLP and logits it keeps as much as without. Between
        pipeline stages one tp-th is sent."""
        c, t, v = self.C, self.T, self.V
        sizes = [*[a for a in self.SIZES if not a.startswith(('--pp', '--world'))], '--world=2', '--tp=2', '--batch=2']
        whole, own = self.of(*sizes), self.of(*sizes, '--sequence-parallel')
        for a, b in zip(whole, own):
            self.assertEqual(a.pop('activation_bytes'), 4 * 2 * t * (5 * (4 * c + 12 * c // 2) + 2 * c + (v + 1) // 2))
            self.assertEqual(b.pop('activation_bytes'), 4 * 2 * t * (5 * 16 * c // 2 + c + (v + 1) // 2))
            self.assertEqual({**a, 'plan_ns': 0}, {**b, 'plan_ns': 0})
        for args in (['--tp=2'], ['--batch=2'], ['--tp=2', '--batch=1', '--context=15']):
            done = bench('plan', '--model=gpt2-124M', '--world=2', '--sequence-parallel', *args)
            self.assertEqual((done.returncode, done.stdout), (2, ''))
            self.assertIn('--sequence-parallel: is of activations, which --batch asks for', done.stderr)


class Scale(unittest.TestCase):
    def of(self, *args, err=''):
        done = bench('scale', '--json', *args)
        self.assertEqual((done.returncode, done.stderr), (0, err), args)
        return lines(done.stdout)

    def test_memory_and_traffic_are_the_plans(self):
        """Equal except for the alignment of a model's tensors; here each unit is one tensor."""
        planned = lines(bench('plan', '--json', '--world=16', '--model=gpt2-124M', '--dp-shard=4').stdout)
        for stage in range(4):
            self.close(planned[stage], *self.of('--worlds=16', '--model=gpt2-124M', f'--stage={stage}'))
        for column, hybrid in enumerate(['hsdp', 'hfsdp'], 4):
            here, = self.of('--worlds=16', '--model=gpt2-124M', '--dp-shard=4', f'--hybrid={hybrid}')
            self.close(planned[column], here)
            self.assertAlmostEqual(here['outer_bytes'] / planned[column]['outer_bytes'], 1, delta=0.002)

    def close(self, plan, here):
        self.assertAlmostEqual(here['memory_bytes'] / plan['bytes']['total'], 1, delta=0.002)
        self.assertAlmostEqual(here['received_bytes'] / plan['wire_bytes'], 1, delta=0.002)

    WITH_MESH = ['tp', 'pp', 'schedule', 'micro_batches', 'bubble', 'activation_bytes', 'all_bytes', 'tp_bytes', 'pp_bytes']

    def test_without_a_mesh_nothing_has_changed(self):
        """The figures of the command before it supported tp and pp, but for the update, whose time is now that
        of the bytes that it moves."""
        for args, wanted in [
                (['--model=gpt2-124M', '--worlds=8'], (1.7240689999999999, 0.69497399999999998, 508707840, 547199872)),
                (['--model=gpt2-124M', '--worlds=64'], (5.3179020000000001, 4.3505280000000006, 263873536, 616002992))]:
            for given in [], ['--tp=1', '--pp=1']:
                row, = self.of(*args, *given)
                self.assertEqual((row['step_ms'], row['exposed_ms'], row['memory_bytes'], row['received_bytes']), wanted)
                self.assertEqual([k for k in self.WITH_MESH if k in row], [])
        for args in [['--worlds=8,64,512'], ['--model=llama-3-70B', '--dp-replicate=auto', '--hybrid=hfsdp', '--worlds=64', '--recompute']]:
            self.assertEqual(bench('scale', *args).stdout, bench('scale', '--tp=1', '--pp=1', *args).stdout)

    def test_precisions(self):
        """Memory is the plan's. An update takes as long as its bytes, over PCIe if states are in host memory."""
        one = ['--worlds=1', '--model=gpt2-1.5B', '--stage=0']
        default, default_ms = None, None
        for args in [], ['--masters=remainder', '--moments=q8'], ['--masters=none', '--moments=bf16']:
            planned = lines(bench('plan', '--json', '--world=1', '--model=gpt2-1.5B', *args).stdout)[0]['bytes']
            here, = self.of(*one, *args)
            self.assertAlmostEqual(here['memory_bytes'] / planned['total'], 1, delta=0.002)
            self.assertEqual(here['host_bytes'], 0)
            states = planned['master'] + planned['moments']
            default, default_ms = default or states, default_ms or here['step_ms']
            fewer = 2 * (default - states) - (planned['param_shards'] if args else 0)  # weights that are part of masters are read, too
            self.assertAlmostEqual(default_ms - here['step_ms'], fewer / 3350e9 * 1e3, delta=0.1)
            there, = self.of(*one, '--states=host', *args)
            self.assertAlmostEqual(there['host_bytes'] / states, 1, delta=0.002)
            self.assertEqual(there['memory_bytes'] + there['host_bytes'], here['memory_bytes'])
            self.assertAlmostEqual(there['step_ms'] - here['step_ms'], 2 * states / 128e9 * 1e3, delta=1)
            half, = self.of(*one, '--states=host', '--links=0.5', *args)
            self.assertAlmostEqual(half['step_ms'] - here['step_ms'], 2 * states / 64e9 * 1e3, delta=1)
            self.assertEqual([there[k] for k in STATES_KEYS[1:]], [here['masters'], here['moments'], 'host'])
        more, = self.of('--worlds=8', '--model=llama-3-8B')
        hidden, = self.of('--worlds=8', '--model=llama-3-8B', '--states=host')
        self.assertLess(hidden['step_ms'] - more['step_ms'], 0.5 * 2 * hidden['host_bytes'] / 128e9 * 1e3)  # by the next forward
        self.assertRegex(bench('scale', '--worlds=8', '--states=host').stdout, r'\nstates host\n\n.* of the host\n.* GB')

    def test_parts_by_hand(self):
        """tp only, on one host. Compute waits for 4 all-reduces per layer, one after the embedding and one
        before the head."""
        for model, layers, c, again in [('llama-3-70B', 80, 8192, []), ('llama-3-8B', 32, 4096, ['--recompute'])]:
            row, = self.of(f'--model={model}', '--worlds=8', '--tp=8', *again)
            n, sent = layers * (6 if again else 4) + 2, 8192 * c * 2
            self.assertEqual(row['tp_bytes'], n * 2 * 7 * sent // 8)
            each_ms = (2 * 7 / 8 * sent / 450e9 + 14 * 1900e-9) * 1e3
            self.assertGreater(row['exposed_ms'], (n - 1) * each_ms * (1 - 1e-5))  # the embedding's may be hidden by the update of later layers
            self.assertLess(row['exposed_ms'], n * each_ms * (1 + 1e-5))
            self.assertEqual((row['tp'], row['pp'], row['bubble'], row['pp_bytes']), (8, 1, 0, 0))
            self.assertEqual(list(row)[-len(self.WITH_MESH):], self.WITH_MESH)
            whole, = self.of(f'--model={model}', '--worlds=1', *again)  # the same compute, an eighth of it on each rank
            self.assertAlmostEqual((row['step_ms'] - row['exposed_ms']) * 8 / whole['step_ms'], 1, delta=0.01)
            self.assertAlmostEqual(row['memory_bytes'] * 8 / whole['memory_bytes'], 1, delta=0.01)
            self.assertEqual(row['all_bytes'], row['memory_bytes'] + row['activation_bytes'])
        far, = self.of('--model=mpt-70b', '--worlds=16', '--tp=16')
        near, = self.of('--model=mpt-70b', '--worlds=8', '--tp=8')
        self.assertGreater(far['exposed_ms'], near['exposed_ms'])  # over two hosts

    def test_rows_on_several_by_hand(self):
        """cp on one host, and with tp on two. Compute waits for two gathers per layer and a reduction in fp32."""
        layers, kv, tokens = 32, 2 * 1024, 131072
        whole, = self.of('--worlds=1', f'--context={tokens}', '--activations')
        row, = self.of('--worlds=8', f'--context={tokens}', '--cp=8')
        self.assertEqual((row['cp'], row['cp_bytes']), (8, layers * 7 * tokens // 8 * kv * (2 + 2 + 4)))
        waits_ms = layers * (7 / 8 * tokens * kv * (2 + 2 + 4) / 450e9 + 3 * 7 * 1900e-9) * 1e3
        rest, = self.of('--worlds=8', f'--context={tokens // 8}')  # what is exposed besides
        self.assertAlmostEqual((row['exposed_ms'] - rest['exposed_ms']) / waits_ms, 1, delta=0.05)
        room = 2 * tokens * kv * (2 + 4)
        self.assertEqual(row['activation_bytes'], whole['activation_bytes'] // 8 + room)
        self.assertAlmostEqual((row['step_ms'] - row['exposed_ms']) * 8 / whole['step_ms'], 1, delta=0.01)
        far, = self.of('--worlds=16', f'--context={tokens}', '--cp=8', '--tp=2')
        self.assertGreater(far['exposed_ms'], row['exposed_ms'])
        self.assertIn('each row on 8 GPUs (cp); ', bench('scale', '--worlds=8', f'--context={tokens}', '--cp=8').stdout)
        for args, text in [(['--cp=3'], '--cp: the zigzag order cuts a row in 6 parts'), (['--cp=2', '--worlds=3'], '--cp: 2 ranks for each row'),
                           (['--cp=3', '--context=6000'], '--cp: 3 ranks with --tp lie on hosts of 8 GPUs unevenly')]:
            done = bench('scale', '--worlds=8', *args)
            self.assertEqual(done.returncode, 2)
            self.assertIn(text, done.stderr)

    def test_activations_alone(self):
        """They are added to the memory, and nothing else changes."""
        for args in [['--worlds=64'], ['--worlds=16', '--model=gpt2-1.5B', '--stage=2', '--accum=3'], ['--worlds=64', '--dp-replicate=auto']]:
            plain, counted = self.of(*args)[0], self.of(*args, '--activations')[0]
            self.assertAlmostEqual(plain['exposed_ms'], counted['exposed_ms'], delta=1e-9)  # a difference, which is rounded in another way
            for key in set(plain) - {'fits', 'exposed_ms'}:
                self.assertEqual(plain[key], counted[key], key)
            self.assertEqual(counted['all_bytes'], plain['memory_bytes'] + counted['activation_bytes'])
        c, layer = 4096, 6 * 4096 + 2 * 1024 + 3 * 14336
        self.assertEqual(self.of('--worlds=8', '--activations', '--batch=2')[0]['activation_bytes'], 2 * 2 * 8192 * (32 * layer + 2 * c + 128256))
        self.assertEqual(self.of('--worlds=8', '--activations', '--recompute')[0]['activation_bytes'], 2 * 8192 * (32 * c + layer + 2 * c + 128256))

    def test_stages_by_hand(self):
        c, kv, hidden, tokens = 4096, 1024, 14336, 8192
        layer = 6 * c + 2 * kv + 3 * hidden
        for schedule, m, kept in [('1f1b', 16, 2), ('gpipe', 16, 16), ('1f1b', 1, 1)]:
            done = bench('scale', '--json', '--worlds=2', '--pp=2', f'--micro-batches={m}', f'--schedule={schedule}')
            self.assertEqual(done.stderr, 'zero-bench scale: warning: fewer micro-batches (1) than pipeline stages (2)\n' if m == 1 else '')
            row, = lines(done.stdout)
            # 1F1B keeps 2 on the first stage. GPipe keeps all on both; the last has the final norm with its
            # input and the logits, but not the input of its first layer.
            elems = 16 * layer if kept == 2 else 16 * layer + c + 128256
            self.assertEqual(row['activation_bytes'], kept * 2 * tokens * elems)
            self.assertEqual(row['pp_bytes'], m * 2 * tokens * c)
            self.assertEqual(row['tp_bytes'], 0)
            # The last stage also has the head's products, and the first waits for it: it works from the first
            # forward to its last backward.
            block = 2 * (c * (2 * c + 2 * kv) + 3 * c * hidden) + 4 * tokens * c
            first, last = 16 * block, 16 * block + 2 * 128256 * c
            self.assertAlmostEqual(row['bubble'], 1 - m * (first + last) / 2 / (first + m * last), delta=0.02)  # includes what happens once per step
        shown = bench('scale', '--worlds=64', '--pp=4', '--micro-batches=12', '--schedule=interleaved', '--stages-per-rank=2').stdout
        self.assertIn('layers in 8 stages (pp), 2 on each GPU, interleaved: with stages that take as long they stand still for 11.1 %, (p-1)/(vm+p-1); ', shown)
        shown = bench('scale', '--worlds=64', '--pp=4', '--micro-batches=12').stdout
        for words in ['20.0 %, (p-1)/(m+p-1)', 'not counted', 'not run on real GPUs yet', 'bubble\n']:
            self.assertIn(words, shown)

    def test_stages_take_what_plan_says(self):
        """A stage's memory is the plan's, including the slots between stages, whatever time stages take. GPUs
        add up in any order."""
        for pp, world, m, how in [(2, 8, 4, []), (4, 8, 8, []), (2, 8, 1, []), (2, 8, 4, ['--schedule=interleaved', '--stages-per-rank=2']),
                                  (2, 4, 4, ['--schedule=interleaved', '--stages-per-rank=16']), (3, 6, 9, ['--schedule=interleaved', '--stages-per-rank=4']),
                                  (2, 8, 4, ['--schedule=gpipe', '--stages-per-rank=2']), (3, 6, 5, ['--schedule=gpipe', '--stages-per-rank=2'])]:
            told = '' if m >= pp else 'zero-bench plan: warning: fewer micro-batches (1) than pipeline stages (2)\n'
            mesh = ['--model=gpt2-1.5B', f'--pp={pp}', f'--accum={m}', *how]
            done = bench('plan', '--json', f'--world={world}', '--deterministic=off', *mesh)
            self.assertEqual((done.returncode, done.stderr), (0, told))
            fullest = set()
            for plan in lines(done.stdout):
                row, = self.of(f'--worlds={world}', f"--stage={plan['stage']}", *mesh, err=told.replace('plan', 'scale'))
                self.assertAlmostEqual(row['memory_bytes'] / plan['bytes']['total'], 1, delta=1e-4)
                self.assertEqual(row['activation_bytes'], plan['activation_bytes'])
                self.assertEqual(row.get('stages_per_rank'), plan.get('stages_per_rank'))
                self.assertEqual(row['pp_bytes'], plan['pp_ranks'][0]['moved_bytes'])
                fullest.add(plan['pp_rank'])
            self.assertEqual(fullest, {0})

    def test_last_rank_is_the_fullest(self):
        """With GPipe, which keeps all micro-batches on both stages. The first stage has as few layers as the
        last, which has the logits."""
        mesh = ['--model=gpt2-124M', '--pp=2', '--accum=16', '--schedule=gpipe', '--stages-per-rank=2']
        for plan in lines(bench('plan', '--json', '--world=4', '--batch=4', '--deterministic=off', *mesh).stdout):
            row, = self.of('--worlds=4', f"--stage={plan['stage']}", '--batch=4', *mesh)
            self.assertEqual(plan['pp_rank'], 1)
            self.assertAlmostEqual(row['memory_bytes'] / plan['bytes']['total'], 1, delta=2e-3)
            self.assertEqual(row['activation_bytes'], plan['activation_bytes'])

    def test_several_stages_on_a_rank_by_hand(self):
        """Two ranks on fast links. The last one also has the head's products. It waits once for a stage's
        forward, and once while the first works on alone for a stage's backward. So each is idle for (F + B) /
        v, and the first also for the time of the head."""
        c, kv, hidden, tokens, m = 8192, 1024, 28672, 4096, 8
        block, head = 2 * (c * (2 * c + 2 * kv) + 3 * c * hidden) + 4 * tokens * c, 2 * 32000 * c
        ms = 3e3 * tokens / (989.5e12 * 0.35)  # forward and backward of one operation per token
        waits, steps = [], []
        for v in 1, 2, 4, 5:
            how = ['--schedule=interleaved', f'--stages-per-rank={v}'] if v > 1 else []
            row, = self.of('--model=llama-2-70B', '--compute=0.35', '--worlds=2', '--pp=2', f'--micro-batches={m}', '--stage=0', *how)
            waits.append(row['bubble'] * row['step_ms'] - m * head / 2 * ms)
            steps.append(row['step_ms'])
            self.assertAlmostEqual(waits[-1] * v / waits[0], 1, delta=0.01)
            self.assertAlmostEqual((steps[0] - steps[-1]) / waits[0], 1 - 1 / v, delta=0.01)
            self.assertEqual(row['pp_bytes'], (2 * v - 1) * m * 2 * tokens * c)
        self.assertAlmostEqual(waits[0] / (40 * block * ms), 1, delta=0.01)

    def test_more_micro_batches_fill_the_pipeline(self):
        rows = [self.of('--model=llama-3-70B', '--worlds=512', '--tp=8', '--pp=8', '--stage=1', f'--accum={m}')[0] for m in (8, 32, 128)]
        self.assertEqual(sorted((r['bubble'] for r in rows), reverse=True), [r['bubble'] for r in rows])
        self.assertEqual(sorted(r['mfu'] for r in rows), [r['mfu'] for r in rows])
        again, = self.of('--model=llama-3-70B', '--worlds=512', '--tp=8', '--pp=8', '--stage=1', '--accum=32', '--recompute')
        self.assertLess(again['activation_bytes'], rows[1]['activation_bytes'] / 5)
        self.assertGreater(again['step_ms'], rows[1]['step_ms'])

    def test_thousands(self):
        rows = self.of('--model=llama-3-405B', '--worlds=1,8,16384,16383', '--recompute', '--compute=0.5')
        self.assertEqual([r['world'] for r in rows], [1, 8, 16384, 16383])
        self.assertEqual([r['simulated_ranks'] for r in rows], [1, 1, 1, 2])
        self.assertEqual(rows[0]['exposed_ms'], 0)
        self.assertEqual([r['fits'] for r in rows], [False, False, True, True])
        for r in rows:
            self.assertIn('no stragglers, no congestion', r['assumes'])
            self.assertLess(r['mfu'], 0.5)

    def test_table(self):
        done = bench('scale', '--model=gpt2-124M', '--machine=a100-40', '--worlds=8,64')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('no stragglers, no congestion', done.stdout)
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()[-2:]], ['8', '64'])

    def test_products_are_of_bf16(self):
        self.assertIn("products are bf16's all the same", ' '.join(bench('scale', '--help').stdout.split()))
        steps = [self.of('--model=gpt2-124M', '--batch=64', '--worlds=1', f'--dtype={d}')[0]['step_ms'] for d in ['f32', 'bf16']]
        self.assertAlmostEqual(steps[0] / steps[1], 1, delta=0.05)


class Pipeline(unittest.TestCase):
    """A schedule by its name: its numbers, its picture, and the file that is read back."""

    def test_numbers(self):
        told, = lines(bench('pipeline', '--ranks=4', '--micro-batches=8', '--activation-bytes=1Mi', '--json').stdout)
        self.assertEqual((told['n_stages'], told['n_micro_batches'], told['span_ns'], told['in_order']), (4, 8, 33000, True))
        self.assertEqual([r['idle_ns'] for r in told['ranks']], [9000] * 4)
        self.assertEqual([r['peak_bytes'] for r in told['ranks']], [4 << 20, 3 << 20, 2 << 20, 1 << 20])

    def test_picture(self):
        shown = bench('pipeline', '--ranks=2', '--micro-batches=3').stdout
        self.assertIn('     0  01..aa2bb.cc\n     1  .0aa1bb2cc..\n', shown)
        self.assertIn('no picture', bench('pipeline', '--ranks=2', '--micro-batches=300').stdout)
        few = bench('pipeline', '--ranks=3', '--micro-batches=2')
        self.assertEqual((few.returncode, few.stderr), (0, 'warning: fewer micro-batches (2) than ranks (3)\n'))

    def test_costs(self):
        long = bench('pipeline', '--ranks=1', '--micro-batches=12', '--forward-us=1000000000', '--units=1000000')
        self.assertEqual((long.returncode, long.stdout), (1, ''))
        self.assertIn('63 bits', long.stderr)

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            odd = os.path.join(os.fsencode(folder), b'\xff.csv')
            self.assertEqual(bench('pipeline', '--ranks=2', '--json', '--write', os.fsdecode(odd)).returncode, 0)
            told, = lines(bench('pipeline', '--json', '--read', os.fsdecode(odd)).stdout)
            self.assertEqual((told['schedule'], told['n_ranks']), (None, 2))
            path = os.path.join(folder, 's.csv')
            args = ['--ranks=4', '--schedule=interleaved', '--messages', '--unsharded=1', '--json']
            named, = lines(bench('pipeline', *args, f'--write={path}').stdout)
            read, = lines(bench('pipeline', f'--read={path}', '--json').stdout)
            self.assertEqual({**named, 'schedule': path}, read)
            self.assertEqual([r['peak_unsharded'] for r in read['ranks']], [1] * 4)
            with open(path) as f:
                rows = f.read().split('\n')
            with open(path, 'w') as f:
                f.write('\n'.join([rows[0].replace('0SEND_F0,0F1', '0F1,0SEND_F0').replace('0F1,0SEND_F0,0SEND_F1', '0F1,0SEND_F1,0SEND_F0')] + rows[1:]))
            wrong = bench('pipeline', f'--read={path}', f'--write={path}.new')
            self.assertEqual((wrong.returncode, wrong.stdout), (1, ''))
            self.assertIn("rank 0's 0SEND_F1 would meet rank 1's 1RECV_F0", wrong.stderr)
            self.assertFalse(os.path.exists(f'{path}.new'))


if __name__ == '__main__':
    unittest.main()
