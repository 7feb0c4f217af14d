# SPDX-License-Identifier: Apache-2.0
"""zero-bench memory and its pictures: what is measured and drawn, what fits, and what a terminal shows."""
import json
import os
import pty
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import CATEGORIES, TINY, ZERO_BENCH, ZERO_RUN, bench, lines, run  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIZES = ['--heads=2', '--channels=32', '--context=16', '--batch=2']
MEMORY = ['memory', '--ranks=2', '--layers=8', *SIZES, '--steps=3']
SVG = '{http://www.w3.org/2000/svg}'


def size(n):
    """Formats bytes like zero-bench."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if n < 999.5:
            return f'{n:.{0 if unit == "B" or n >= 99.95 else 1 if n >= 9.995 else 2}f} {unit}'
        n /= 1000
    raise ValueError(n)


def texts(path):
    return [''.join(t.itertext()).strip() for t in ET.parse(path).iter(SVG + 'text')]


def on_terminal(command):
    """Returns what a program writes if its standard output and error are a terminal."""
    ours, theirs = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        for fd in (1, 2):
            os.dup2(theirs, fd)
        os.execv(command[0], command)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), b''.join(parts).decode()


class Measured(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.memory, cls.losses = (os.path.join(cls.folder.name, name) for name in ('memory.svg', 'loss.svg'))
        done = bench(*MEMORY, '--plain', '--json', '--plot', cls.memory, '--plot-loss', cls.losses)
        assert (done.returncode, done.stderr) == (0, ''), done
        *cls.stages, cls.plain = lines(done.stdout)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_the_plain_program_is_beside_the_stages(self):
        self.assertEqual([s['stage'] for s in self.stages], [0, 1, 2, 3])
        self.assertEqual([s['ranks'] for s in self.stages], [2] * 4)
        self.assertEqual((self.plain['stage'], self.plain['ranks']), (None, 1))
        n = self.plain['n_params']
        self.assertEqual(self.plain['bytes']['total'], 16 * n)  # weights, gradients and two moments, f32
        self.assertGreater(self.plain['peak_rss_bytes'], 16 * n)

    def test_the_plain_program_in_bf16(self):
        """bf16 weights and gradients, and fp32 master weights and moments. Each dtype has its own code."""
        done = bench(*MEMORY, '--plain', '--json', '--steps=1', '--dtype=bf16')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        plain = lines(done.stdout)[-1]
        n, told = plain['n_params'], plain['bytes']
        self.assertEqual([told[name] for name in ('param_shards', 'grad_shards', 'master', 'moments', 'total')], [2 * n, 2 * n, 4 * n, 8 * n, 16 * n])
        for dtype in 'f32', 'bf16':
            done = bench('train', '--plain', '--layers=2', *SIZES, '--steps=1', f'--dtype={dtype}')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            self.assertRegex(done.stdout, rf'million parameters, {dtype}, not wrapped')

    def test_every_stage_has_the_same_losses_and_state(self):
        first, *others = self.stages
        self.assertEqual(len(first['losses']), 3)
        self.assertEqual(len(set(first['losses'])), 3)
        for s in others:
            self.assertEqual((s['losses'], s['state_sha256']), (first['losses'], first['state_sha256']))

    def test_bars(self):
        told = texts(self.memory)
        for name, s in zip(['not wrapped', *(f'stage {i}' for i in range(4))], [self.plain, *self.stages]):
            self.assertIn(name, told)
            self.assertIn(size(s['peak_rss_bytes']), told)
        self.assertIn('the rest: activations, text, code', told)
        keyed = {'grad_gathered': 'gathered gradients', 'master': 'master weights', 'moments': 'optimizer moments', 'param_slots': 'parameter slots',
                 'snapshot': 'snapshot', 'exchange': 'exchange'}
        for category in CATEGORIES:
            if category in keyed:  # a category that no bar has is not in the key
                self.assertEqual(keyed[category] in told, any(s['bytes'][category] for s in [self.plain, *self.stages]), category)

    def test_heights(self):
        """The heights of the bars' parts in the picture are proportional to their bytes."""
        part = next(g for g in ET.parse(self.memory).iter(SVG + 'g') if g.findtext(SVG + 'title') == 'optimizer moments')
        corners = [[float(point.split(',')[1]) for point in p.get('points').split()] for p in part.iter(SVG + 'polygon')]
        boxes = [max(ys) - min(ys) for ys in corners][1:]  # the first is in the key
        moments = [s['bytes']['moments'] for s in [self.plain, *self.stages]]
        self.assertEqual(len(boxes), 5)
        for box, want in zip(boxes, moments):
            self.assertAlmostEqual(box, boxes[0] * want / moments[0], delta=0.1)  # of a pixel

    def test_loss_curves(self):
        told = texts(self.losses)
        for stage in range(4):
            self.assertIn(f'stage {stage}', told)
        self.assertIn('step', told)

    def test_what_is_saved(self):
        done = bench(*MEMORY, '--plain', '--steps=1')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        last = done.stdout.splitlines()[-1]
        self.assertRegex(last, r'^All 2 ranks together, measured \(Pss\): stage 3 holds [\d.]+ [MG]B; stage 0 [\d.]+ [MG]B, so -?\d+% are saved; '
                               r'2 plain programs of [\d.]+ [MG]B each [\d.]+ [MG]B, so -?\d+%\.$')
        words = last.replace(';', '').replace(',', '').split()
        three, zero, each, copies = (float(w) * (1000 if unit == 'GB' else 1) for w, unit in zip(words, words[1:]) if unit in ('MB', 'GB'))
        shares = [int(w.rstrip('%.')) for w in words if '%' in w]
        self.assertAlmostEqual(shares[0], 100 * (1 - three / zero), delta=2)
        self.assertAlmostEqual(shares[1], 100 * (1 - three / copies), delta=2)
        self.assertAlmostEqual(copies, 2 * each, delta=0.01 * copies)

    def test_what_is_saved_on_one_rank(self):
        done = bench(*MEMORY, '--plain', '--steps=1', '--ranks=1')
        self.assertRegex(done.stdout.splitlines()[-1], r'^The rank, measured \(Pss\): stage 3 holds .*; stage 0 .*% are saved; the plain program [\d.]+ [MG]B, so -?\d+%\.$')

    def test_what_is_saved_is_told_without_pictures(self):
        for option in ['--plot', '--plot-loss']:
            done = bench(*MEMORY, '--steps=1', f'{option}=/tmp/never.svg', env={'PATH': '/nonexistent'})
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), done)
            self.assertIn('gnuplot', done.stderr)
            self.assertRegex(done.stdout.splitlines()[-1], r'^All 2 ranks together, measured \(Pss\): stage 3 holds .*% are saved\.$')


class Pages(unittest.TestCase):
    def test_tables(self):
        """The tables of README.md and zero/memory.md have the program's rows."""
        def text(path):
            with open(os.path.join(ROOT, path), encoding='utf-8') as f:
                return f.read()

        done = bench('plan', '--model=gpt2-124M', '--dtype=bf16', '--context=64', '--world=4')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        rows = [re.split(r'\s{2,}', line) for line in done.stdout.splitlines()]
        first, last = (next(i for i, row in enumerate(rows) if row[0] == name) for name in ('parameter shards', 'total'))
        for row in rows[first:last]:
            self.assertIn(f'| {" | ".join(row)} |', text('zero/memory.md'))
        for path in 'README.md', 'zero/memory.md':
            for name in 'planned', 'allocated':
                self.assertIn(f'| {" | ".join([name, *rows[last][1:]])} |', text(path))


class Axes(unittest.TestCase):
    """Tensor parallelism and pipeline stages: on each rank of the pipeline, allocated bytes equal planned
    bytes and the numbers of zero-bench plan."""
    SIZES = ['--layers=6', '--heads=2', '--channels=32', '--context=16', '--batch=2']

    def of(self, ranks, *args):
        done = bench('memory', '--json', f'--ranks={ranks}', '--steps=1', *self.SIZES, *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return lines(done.stdout)

    def test_planned_is_allocated(self):
        for ranks, args in [(4, ['--tp=2', '--sequence-parallel', '--accum=2']), (4, ['--pp=2', '--schedule=gpipe', '--accum=3']), (4, ['--pp=2', '--tp=2']),
                            (3, ['--pp=3', '--schedule=interleaved', '--stages-per-rank=2']), (3, ['--pp=3', '--schedule=zero-bubble', '--recompute']),
                            (4, ['--pp=2', '--schedule=interleaved', '--stages-per-rank=3', '--accum=8', '--dp-shard=2'])]:
            with self.subTest(ranks=ranks, args=args):
                measured = self.of(ranks, *args)
                planned = lines(bench('plan', '--json', f'--world={ranks}', '--dtype=f32', '--deterministic=on', *self.SIZES, *args).stdout)
                self.assertEqual(len(measured), 6 if '--dp-shard=2' in args else 4)
                for m, p in zip(measured, planned, strict=True):
                    self.assertEqual((m['stage'], m.get('hybrid')), (p['stage'], p.get('hybrid')))
                    self.assertEqual(m['planned_bytes'], m['bytes'])
                    self.assertEqual((m['tp'], m['sequence_parallel'], m['pp']), (2 if '--tp=2' in args else 1, '--sequence-parallel' in args, p.get('pp', 1)))
                    if m['pp'] == 1:
                        self.assertEqual(m['bytes'], p['bytes'])
                        continue
                    self.assertEqual([m[k] for k in ('schedule', 'micro_batches', 'stages_per_rank')], [p['schedule'], p['micro_batches'], p.get('stages_per_rank', 1)])
                    for rank, plan in zip(m['pp_ranks'], p['pp_ranks'], strict=True):
                        self.assertEqual((rank['pp_rank'], rank['planned_bytes'], rank['bytes']), (plan['pp_rank'], plan['bytes'], plan['bytes']))
                        self.assertGreater(rank['activation_bytes'], plan['activation_bytes'])  # includes what plan does not count
                        self.assertGreater(rank['peak_rss_bytes'], rank['bytes']['total'])
                    fullest = max(m['pp_ranks'], key=lambda r: r['bytes']['total'] + r['activation_bytes'])
                    self.assertEqual({k: m[k] for k in fullest}, fullest)

    def test_table(self):
        done = bench('memory', '--ranks=4', '--steps=1', *self.SIZES, '--tp=2', '--pp=2', '--schedule=interleaved', '--stages-per-rank=3')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('data on 1 of them, each layer in 2 parts, 6 pipeline stages, 3 on a rank, interleaved, 4 micro-batches\n', done.stdout)
        told = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines() if line.endswith('B')}
        self.assertEqual(told['planned'], told['allocated'])
        self.assertEqual(told['allocated, rank 0'], told['allocated'])
        self.assertIn('activations besides', told)
        fullest = next(line.split()[4:] for line in done.stdout.splitlines() if line.startswith('fullest rank of pp'))
        self.assertEqual(fullest, ['0'] * 4)

    def test_saved_is_of_all_ranks(self):
        done = bench('memory', '--ranks=2', '--steps=1', *self.SIZES, '--layers=5', '--channels=256', '--pp=2')
        self.assertEqual(done.returncode, 0, done.stderr)
        all_mb = float(re.search(r'stage 0 ([\d.]+) MB', done.stdout)[1])
        each = [line.split()[3:5] for line in done.stdout.splitlines() if line.startswith('resident, rank ')]
        self.assertEqual([unit for _, unit in each], ['MB', 'MB'])
        each = [float(mb) for mb, _ in each]
        self.assertGreater(each[0], each[1] + 5)  # three layers, and two
        self.assertAlmostEqual(all_mb, sum(each), delta=1.5)  # three digits each

    def test_refused(self):
        for args, word in [(['--tp=3'], '--tp: 3 parts do not divide the 2 heads'), (['--sequence-parallel'], '--sequence-parallel: is for --tp of 2 or more'),
                           (['--tp=2', '--sequence-parallel', '--context=15', '--batch=1'], '--sequence-parallel: 2 parts do not divide the 15 tokens'),
                           (['--pp=7', '--ranks=7'], '--pp: 7 stages are more than the 6 layers'), (['--pp=2', '--ranks=3'], '--ranks: 3 are not a multiple of 2 (--pp)'),
                           (['--schedule=gpipe'], '--schedule: is of a pipeline'), (['--pp=2', '--stages-per-rank=2'], '--stages-per-rank: is of --pp with --schedule'),
                           (['--pp=2', '--plain'], '--plain: has all layers'), (['--tp=2', '--fit=free'], '--fit: reckons with'), (['--accum=2', '--fit=1G'], '--fit: reckons with'),
                           (['--device=cuda', '--plot=a.svg'], '--plot: draws memory of the host')]:
            done = bench('memory', *self.SIZES, *args)
            self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, '', 1), done.stderr)
            self.assertIn(word, done.stderr)
        done = bench('memory', *self.SIZES, '--ranks=2', '--pp=2', '--schedule=interleaved', '--stages-per-rank=2', '--accum=5')
        self.assertEqual((done.returncode, done.stdout), (2, ''))
        self.assertIn('5 micro-batches evenly into 2 rounds on 2 ranks', done.stderr)


class Precisions(unittest.TestCase):
    """A column for each precision of optimizer state."""
    NAMES = ['f32', 'bf16 sums', 'remainder', '+ bf16', '+ q8', 'no masters']
    ARGS = ['memory', '--precisions', '--dtype=bf16', '--batch=1', '--steps=3']  # of gpt2-nano, whose padding is small

    def test_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            memory, losses = (os.path.join(folder, name) for name in ('memory.svg', 'loss.svg'))
            done = bench(*self.ARGS, '--ranks=1', '--json', '--plot', memory, '--plot-loss', losses)
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            for name in self.NAMES:
                self.assertIn(name, texts(memory))
                self.assertIn(name, texts(losses))
        columns = lines(done.stdout)
        self.assertEqual([c['masters'] for c in columns], ['f32', 'f32', 'remainder', 'remainder', 'remainder', 'none'])
        self.assertEqual([c['moments'] for c in columns], ['f32', 'f32', 'f32', 'bf16', 'q8', 'bf16'])
        self.assertEqual([c['grad_sum_dtype'] for c in columns], ['f32'] + ['bf16'] * 5)
        n = columns[0]['n_params']
        for c, size in zip(columns, [20, 16, 14, 10, 8.125, 8], strict=True):
            self.assertEqual(c['bytes'], c['planned_bytes'])
            self.assertAlmostEqual((c['bytes']['total'] - c['bytes']['exchange']) / n, size, delta=0.005 * size)  # padding
        for c in columns[1:3]:  # one rank and one micro-batch: a sum is the gradient itself
            self.assertEqual((c['losses'], c['state_sha256']), (columns[0]['losses'], columns[0]['state_sha256']))
        self.assertEqual(len({c['state_sha256'] for c in columns}), 4)

    def test_table(self):
        done = bench(*self.ARGS, '--ranks=1')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        rows = {line[:22].strip(): [line[at:at + 11].strip() for at in range(22, len(line), 11)] for line in done.stdout.splitlines()}
        self.assertEqual(rows['memory per rank'], self.NAMES)
        self.assertEqual(rows['planned'], rows['allocated'])
        self.assertEqual([round(float(x)) for x in rows['bytes per parameter']], [20, 16, 14, 10, 8, 8])
        self.assertIn('stage 0 with AdamW, and in each column:\n', done.stdout)
        told = dict(re.findall(r'^  (\S.{9})  (\S.*)$', done.stdout, re.MULTILINE))
        self.assertEqual([name.strip() for name in told], self.NAMES)
        self.assertEqual(told['f32       '], 'sums, masters and moments f32')
        self.assertEqual(told['+ q8      '], 'gradient sums bf16, masters remainder, moments q8')
        self.assertIn('\nBytes per parameter are those of a rank, without ', done.stdout)
        losses = [float(x) for x in rows['loss of the last tenth']]  # of the last of three steps
        self.assertEqual(losses[1:3], losses[:1] * 2)
        self.assertEqual(rows['more than f32, percent'][:3], ['0.000'] * 3)
        for loss, percent in zip(losses, rows['more than f32, percent']):
            self.assertAlmostEqual(float(percent), 100 * (loss / losses[0] - 1), delta=0.003)
        self.assertRegex(done.stdout.splitlines()[-1], r'^The rank, measured \(Pss\): no masters holds .*; f32 .*% are saved\.$')

    def test_host_memory(self):
        done = bench(*self.ARGS[:-1], '--steps=1', '--ranks=1', '--states=host')
        self.assertIn('stage 0 with AdamW, states host, and in each column:\n', done.stdout)

    def test_variables_that_would_decide(self):
        for name, value in [('ZERO_MOMENTS', 'q8'), ('ZERO_STAGE', '3'), ('ZERO_GRAD_ACCUM_STEPS', '2')]:
            for args in [self.ARGS, ['memory', '--steps=1']]:
                done = bench(*args, '--ranks=1', env={name: value})
                self.assertEqual((done.returncode, done.stdout), (2, ''))
                self.assertEqual(done.stderr, f'zero-bench memory: {name} is set in the environment and would override every run: unset it\n')

    def test_several_ranks(self):
        done = bench('memory', '--precisions', '--dtype=bf16', '--layers=8', *SIZES, '--ranks=2', '--stage=3', '--steps=2', '--json')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        columns = lines(done.stdout)
        self.assertEqual([c['stage'] for c in columns], [3] * 6)
        self.assertEqual([c['bytes'] for c in columns], [c['planned_bytes'] for c in columns])
        self.assertEqual(columns[2]['state_sha256'], columns[1]['state_sha256'])
        totals = [c['bytes']['total'] for c in columns]
        self.assertEqual(totals, sorted(totals, reverse=True))

    def test_every_stage(self):
        """Without --precisions all stages have the precision that is asked for, and the same bits."""
        done = bench('memory', '--dtype=bf16', '--masters=remainder', '--moments=q8', '--ranks=2', '--layers=8', *SIZES, '--steps=2', '--json')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        stages = lines(done.stdout)
        self.assertEqual({(s['masters'], s['moments'], s['grad_sum_dtype']) for s in stages}, {('remainder', 'q8', 'f32')})
        self.assertEqual([s['bytes'] for s in stages], [s['planned_bytes'] for s in stages])
        self.assertEqual(len({s['state_sha256'] for s in stages}), 1)


class Fits(unittest.TestCase):
    def test_fewer_layers(self):
        done = bench('memory', '--ranks=2', '--steps=1', '--json', '--layers=8', *SIZES, '--vocab=20000', '--fit=144Mi')
        self.assertEqual(done.returncode, 0)
        model, = {s['model'] for s in lines(done.stdout)}
        self.assertRegex(done.stderr, rf'^zero-bench memory: stage 0 of custom on 2 ranks takes about 1\d\d MB, and 151 MB are allowed: taking {model}, '
                                      r'about 1\d\d MB\n')

    def test_refused(self):
        for value in ['0', 'x', '12Q', '']:
            done = bench('memory', f'--fit={value}')
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn('--fit', done.stderr)


class Terminal(unittest.TestCase):
    TRAIN = [ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *TINY, '--stage=3']

    def test_a_bar_and_plain_lines(self):
        code, told = on_terminal([*self.TRAIN, '--seconds=1.2'])
        self.assertEqual(code, 0, told)
        self.assertRegex(told, r'\r\[#+\.*\] +\d+%  step \d+  loss \d')
        shown = told.split('\r\x1b[K')[-1]  # what is left when the bar has been removed
        self.assertRegex(shown, r'^step +\d+   loss')
        self.assertNotIn('[#', shown)
        done = run([*self.TRAIN, '--seconds=1.2'])
        self.assertEqual(done.returncode, 0)
        self.assertNotRegex(done.stdout + done.stderr, r'[\r\x1b]|\[#')
        self.assertGreater(len([line for line in done.stdout.splitlines() if line.startswith('step ')]), 2)

    def test_no_bar_behind_a_prefix(self):
        """Without --raw, zero-run gives its ranks terminals. It shows each line after the rank's number."""
        command = [ZERO_RUN, '-n', '2', ZERO_BENCH, 'train', *TINY, '--stage=3', '--steps=20']
        code, reported = on_terminal(command)
        self.assertEqual(code, 0, reported)
        for text in [reported.replace('\r\n', '\n'), run(command).stdout]:
            self.assertNotRegex(text, r'[\r\x1b]|\[#')
            self.assertRegex(text, r'(?m)^\[0\] step +20   loss')

    def test_bar_of_memory(self):
        code, told = on_terminal([ZERO_BENCH, *MEMORY, '--steps=1', '--json'])
        self.assertEqual(code, 0, told)
        for stage in range(4):
            self.assertRegex(told, rf'\r\[[#.]+\] +\d+%  stage {stage}')
        self.assertEqual(len([json.loads(line) for line in told.replace('\r\x1b[K', '\n').splitlines() if line.startswith('{')]), 4)


class Train(unittest.TestCase):
    def test_plot_and_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            plot, trace = os.path.join(folder, "it's.svg"), os.path.join(folder, 'trace.json')
            done = run([*Terminal.TRAIN, '--layers=12', '--steps=6', '--json', '--plot', plot, '--trace', trace])
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            self.assertIn('custom, stage 3 on 2 ranks (shm): loss of each step', texts(plot))
            with open(trace, encoding='utf-8') as f:
                events = json.load(f)
            events = events['traceEvents'] if isinstance(events, dict) else events
            names = [e['name'].split()[0] for e in events if e['ph'] == 'X']
            self.assertEqual((names.count('backward'), names.count('step')), (6 * 13, 6))  # one unit per layer, and one more

    def test_refused(self):
        for args, word in [(['--plot=a.pdf'], "--plot: 'a.pdf' does not end in .svg or .png"), (['--plain', '--trace=x'], '--plain: has no timeline')]:
            done = bench('train', *args)
            self.assertEqual((done.returncode, done.stdout), (2, ''))
            self.assertIn(word, done.stderr)

    def test_no_gnuplot(self):
        done = bench('train', *TINY, '--steps=1', '--plain', '--plot=/tmp/never.svg', env={'PATH': '/nonexistent'})
        self.assertEqual((done.returncode, done.stderr), (1, 'zero-bench train: --plot needs gnuplot: No such file or directory\n'))
        self.assertIn('state sha256', done.stdout)


if __name__ == '__main__':
    unittest.main()
