# SPDX-License-Identifier: Apache-2.0
"""zero-bench on a GPU, or on the stand-in for one: training plain and wrapped gives the same bits, and the
host's results. So do meshes of several ranks, which need a GPU for each on a machine that has some."""
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import KINDS, TEXT, TINY, ZERO_BENCH, ZERO_RUN, bench, lines, run, train, write_folders  # noqa: E402

GPU = ['--device=cuda', *TINY, '--steps=4']
STAND_IN = ZERO_BENCH.endswith('stand-in')


def count_gpus():
    """Returns how many GPUs the library sees, which CUDA_VISIBLE_DEVICES may limit. A number that is too high
    is refused, and the message has the highest."""
    last = re.search(r'GPU number is 1000, must be 0 to (\d+)', bench('train', *GPU, '--plain', '--gpu=1000').stderr)
    return int(last[1]) + 1 if last else 0


N_GPUS = count_gpus()


def needs_gpus(n):
    """Skips a test that has n ranks, each with a GPU. The stand-in has as many GPUs as ranks."""
    return unittest.skipUnless(STAND_IN or N_GPUS >= n, f'it needs {n} GPUs, and the library sees {N_GPUS}')


def result(*args):
    steps, summary = train(1, *GPU, *args)
    assert summary['device'] == 'cuda'
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


class Training(unittest.TestCase):
    def test_plain_and_wrapped(self):
        for dtype in ['f32', 'bf16']:
            for clip in [0, 0.5]:
                args = [f'--dtype={dtype}', f'--clip={clip}']
                want = result('--plain', *args)
                self.assertEqual(result('--plain', *args), want, f'again {args}')
                for stage in range(4):
                    self.assertEqual(result(f'--stage={stage}', *args), want, f'stage {stage} {args}')

    def test_stages(self):
        for dtype in ['f32', 'bf16']:
            args = ['--accum=3', '--wire-dtype=bf16', f'--dtype={dtype}']
            results = [result(f'--stage={stage}', *args) for stage in range(4)]
            self.assertEqual(results, results[:1] * 4, args)

    def test_as_on_the_host(self):
        if 'oneDNN' in bench('train', *TINY, '--steps=1').stderr:
            self.skipTest('no matrix products on the host')
        for dtype, places in [('f32', 4), ('bf16', 1)]:
            gpu, _ = train(1, *GPU, '--plain', f'--dtype={dtype}')
            host, _ = train(1, *TINY, '--steps=4', '--plain', f'--dtype={dtype}')
            for a, b in zip(gpu, host):
                self.assertAlmostEqual(a['loss'], b['loss'], places)

    def test_sizes(self):
        _, summary = train(1, *GPU, '--stage=3', '--peak-tflops=1')
        self.assertEqual(summary['bytes'], summary['planned_bytes'])
        self.assertGreater(summary['peak_device_bytes'], summary['bytes']['total'])
        self.assertAlmostEqual(summary['mfu'] / (summary['tokens_per_s'] * summary['flop_per_token'] / 1e12), 1, 9)

    def test_losses_that_are_not_numbers(self):
        for how in ['--plain', '--stage=2']:
            steps, _ = train(1, *GPU, '--steps=14', '--lr=1e6', '--clip=0', '--weight-decay=1e6', how)
            self.assertIsNone(steps[-1]['loss'])

    def test_gpu_of_the_rank(self):
        """Without --gpu it uses the GPU of the rank on this host, whichever launcher gives the rank."""
        launcher = {'OMPI_COMM_WORLD_RANK': '998', 'OMPI_COMM_WORLD_SIZE': '999', 'OMPI_COMM_WORLD_LOCAL_RANK': '997'}
        done = bench('train', *GPU, '--plain', env=launcher)
        self.assertIn('GPU number is 997', done.stderr)
        done = bench('train', *GPU, '--plain', env={'OMPI_COMM_WORLD_RANK': '1'})
        self.assertIn('OMPI_COMM_WORLD_SIZE is not set though OMPI_COMM_WORLD_RANK is "1"', done.stderr)
        self.assertEqual(bench('train', *GPU, '--plain', '--gpu=0', env=launcher).returncode, 0)

    def test_text(self):
        done = bench('train', *GPU, '--stage=3')
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r'\A[^\n]*stage 3 shards nothing: this is rank 0 of world 1[^\n]*\n\Z')
        self.assertIn('peak of the GPU', done.stdout)


MICRO = 4  # micro-batches of a step, over all data-parallel ranks
SIZES = ['--layers=4', '--heads=4', '--channels=16', '--context=8', '--batch=1', '--steps=2', '--data', TEXT]
MESHES = [(pp, dp, tp) for pp in (1, 2, 4) for dp in (1, 2, 4) for tp in (1, 2, 4) if 2 <= pp * dp * tp <= 4]


def train_on(device, pp, dp, tp, *how):
    n, axes = pp * dp * tp, [f'--accum={MICRO // dp}', f'--pp={pp}', f'--tp={tp}', '--deterministic=on']
    args = [f'--device={device}', *SIZES, *axes, *how]
    if device == 'cuda' and STAND_IN:
        steps, summary = train(1, *args, env={'STAND_IN_RANKS': str(n)})
    else:
        steps, summary = train(n, *args)
    assert (summary['world'], summary['device']) == (n, device)
    assert summary['bytes'] == summary['planned_bytes'], how
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


class Meshes(unittest.TestCase):
    @needs_gpus(4)
    def test_the_same_bits(self):
        """Meshes with the same tp end in the same bits. A sample is run, drawn from SEED, or all with
        N_MESHES=all."""
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        cases = [(mesh, stage, schedule) for mesh in MESHES for stage in range(4)
                 for schedule in (['1f1b', 'gpipe', 'zero-bubble'] if mesh[0] > 1 else ['1f1b'])]
        if os.environ.get('N_MESHES') != 'all':
            cases = random.Random(seed).sample(cases, 6)
        want = {tp: train_on('cuda', 1, 4 // tp, tp) for tp in {mesh[2] for mesh, _, _ in cases}}
        for mesh, stage, schedule in cases:
            how = [f'--stage={stage}', *([f'--schedule={schedule}'] if mesh[0] > 1 else [])]
            with self.subTest(mesh=mesh, how=how):
                self.assertEqual(train_on('cuda', *mesh, *how), want[mesh[2]])

    @needs_gpus(2)
    def test_as_on_the_host(self):
        for how in ([1, 1, 2], [1, 1, 2, '--sequence-parallel', '--dtype=bf16'], [2, 1, 1, '--stage=3']):
            with self.subTest(how=how):
                gpu, host = train_on('cuda', *how)[0], train_on('host', *how)[0]
                for (a, _), (b, _) in zip(gpu, host):
                    self.assertAlmostEqual(a, b, 1 if '--dtype=bf16' in how else 4)


class Rows(unittest.TestCase):
    """Rows on two GPUs train as on one, and each form has the same bits at every stage and with pp."""
    SIZES = ['--layers=2', '--heads=4', '--channels=64', '--context=32', '--batch=1', '--documents=9', '--data', TEXT]

    def rows_on(self, n, *how):
        args = ['--device=cuda', '--deterministic=on', '--accum=2', '--steps=3', *self.SIZES, *how]
        steps, summary = train(1, *args, env={'STAND_IN_RANKS': str(n)}) if STAND_IN else train(n, *args)
        self.assertEqual((summary['world'], summary['bytes']), (n, summary['planned_bytes']))
        return [s['loss'] for s in steps], summary['state_sha256']

    @needs_gpus(4)
    def test_forms(self):
        for dtype, places, forms in [('f32', 4, ('gather', 'exchange', 'ring')), ('bf16', 2, ('ring',))]:
            one = self.rows_on(1, f'--dtype={dtype}')[0]
            for form in forms:
                how = ['--cp=2', f'--cp-form={form}', f'--dtype={dtype}']
                with self.subTest(how=how):
                    got = self.rows_on(2, *how, '--stage=3')
                    for a, b in zip(got[0], one):
                        self.assertAlmostEqual(a, b, places)
                    self.assertEqual(self.rows_on(4, *how, '--stage=1', '--pp=2', '--schedule=zero-bubble'), got)


class Folders(unittest.TestCase):
    """Models of Hugging Face folders train on GPUs as on the host, and with the same bits on each mesh."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix='bench-gpu-')
        self.addCleanup(shutil.rmtree, self.dir)
        write_folders(self.dir)

    def run_on(self, n, kind, *how):
        args = ['--deterministic=on', '--accum=2', '--steps=3', '--lr=1e-3', '--context=32', '--batch=1', '--data', TEXT, '--model', os.path.join(self.dir, kind), *how]
        steps, summary = train(1, '--device=cuda', *args, env={'STAND_IN_RANKS': str(n)}) if STAND_IN else train(n, '--device=cuda', *args)
        self.assertEqual(summary['bytes'], summary['planned_bytes'])
        return [s['loss'] for s in steps], summary['state_sha256']

    @needs_gpus(4)
    def test_meshes(self):
        for kind, dtype in zip(KINDS, ('f32', 'bf16', 'f32', 'bf16')) if STAND_IN else itertools.product(KINDS, ('f32', 'bf16')):
            with self.subTest(kind=kind, dtype=dtype):
                one = self.run_on(1, kind, f'--dtype={dtype}')
                host = train(1, '--accum=2', '--steps=3', '--lr=1e-3', '--context=32', '--batch=1', '--data', TEXT, '--model', os.path.join(self.dir, kind),
                             f'--dtype={dtype}')[0]
                for loss, step in zip(one[0], host):
                    self.assertAlmostEqual(loss, step['loss'], 5 if dtype == 'f32' else 2)
                self.assertEqual(self.run_on(2, kind, f'--dtype={dtype}', '--pp=2', '--stage=1', '--schedule=zero-bubble'), one)
                parts = self.run_on(2, kind, f'--dtype={dtype}', '--tp=2', '--sequence-parallel', '--stage=3')
                for a, b in zip(parts[0], one[0]):
                    self.assertAlmostEqual(a, b, 4 if dtype == 'f32' else 2)
                self.assertEqual(self.run_on(4, kind, f'--dtype={dtype}', '--tp=2', '--sequence-parallel', '--pp=2', '--stage=2'), parts)


class Masks(unittest.TestCase):
    """Tokens that a mask leaves out, and an evaluation, have the host's losses."""

    @needs_gpus(2)
    def test_as_on_the_host(self):
        """All tokens that count are the same, which is learnt quickly. A run with another mask has losses that
        are farther off than bf16 rounds."""
        draw = random.Random(4)
        counted = [draw.random() < 0.4 for _ in range(300)]
        with tempfile.TemporaryDirectory() as folder:
            tokens, mask = os.path.join(folder, 'tokens'), os.path.join(folder, 'mask')
            with open(tokens, 'wb') as f:
                f.write(b''.join(bytes([7 if counts else draw.randrange(250), 0]) for counts in counted))
            with open(mask, 'wb') as f:
                f.write(bytes(counted))
            for n, *how in (1, '--dtype=f32'), (1, '--dtype=bf16'), (2, '--tp=2'), (2, '--stage=3', '--pp=2'):
                args = [*SIZES[:-3], '--steps=3', '--accum=2', '--tokens', tokens, '--token-bytes=2', '--mask', mask, '--held-out=0.2', '--eval-every=1', '--lr=0.01', '--warmup=1', *how]
                gpu = train(1, *args, '--device=cuda', env={'STAND_IN_RANKS': str(n)})[0] if STAND_IN else train(n, *args, '--device=cuda')[0]
                host = train(n, *args)[0]
                self.assertEqual((len(gpu), len(host)), (6, 6))
                for a, b in zip(gpu, host):
                    self.assertAlmostEqual(a['loss'], b['loss'], 1 if '--dtype=bf16' in how else 4, how)
                at = args.index('--mask')
                for a, b in zip(host[2:], train(n, *args[:at], *args[at + 2:])[0][2:]):
                    self.assertGreater(abs(a['loss'] - b['loss']), 0.1, how)


class Samples(unittest.TestCase):
    @needs_gpus(4)
    def test_as_on_the_host(self):
        """A text that a model has learned by heart, on every mesh."""
        with tempfile.TemporaryDirectory() as folder:
            text, saved = os.path.join(folder, 'text'), os.path.join(folder, 'saved')
            with open(text, 'w', encoding='ascii') as f:
                f.write('the cat sat on the mat; ' * 100)
            model = ['--layers=3', '--heads=2', '--channels=32', '--context=32']
            train(1, f"--device={'host' if STAND_IN else 'cuda'}", *model, '--data', text, '--batch=8', '--steps=150', '--lr=0.01', '--save', saved)
            sample = ['sample', *model, f'--load={saved}', '--prompt=the c', '--tokens=40', '--temperature=0']
            for n, *how in (1,), (2, '--stage=3'), (2, '--tp=2'), (2, '--pp=2'), (4, '--tp=2', '--pp=2'):
                start = {'STAND_IN_RANKS': str(n)} if STAND_IN else {}
                done = run([*([] if STAND_IN else [ZERO_RUN, '-n', str(n), '--raw']), ZERO_BENCH, *sample, '--device=cuda', *how], env=start)
                self.assertEqual((done.returncode, done.stdout), (0, ('the cat sat on the mat; ' * 2)[:45] + '\n'), done.stderr)


class Memory(unittest.TestCase):
    @unittest.skipUnless(STAND_IN, 'it would need two GPUs')
    def test_planned_and_allocated(self):
        """A plan for GPUs, which needs none, has what a run allocates. On the stand-in a script starts the
        ranks, in place of zero-run."""
        with tempfile.TemporaryDirectory() as folder:
            script = os.path.join(folder, 'zero-run')
            with open(script, 'w', encoding='utf-8') as f:
                f.write('#!/bin/sh\nshift 2; STAND_IN_RANKS=$1; export STAND_IN_RANKS; shift; exec "$@"\n')
            os.chmod(script, 0o755)
            for axis in '--tp=2', '--pp=2':
                plan = bench('plan', '--json', '--device=cuda', '--dtype=f32', '--world=2', '--batch=1', axis, *SIZES[:4])
                self.assertEqual(plan.returncode, 0, plan.stderr)
                done = bench('memory', '--json', '--device=cuda', '--ranks=2', '--batch=1', axis, *SIZES[:4], '--steps=1', env={'PATH': folder + ':' + os.environ['PATH']})
                self.assertEqual(done.returncode, 0, done.stderr)
                rows = lines(done.stdout)
                self.assertEqual([row['stage'] for row in rows], list(range(4)))
                for row, planned in zip(rows, lines(plan.stdout)):
                    self.assertEqual(row['bytes'], row['planned_bytes'])
                    self.assertEqual(planned['bytes'], row['planned_bytes'])
                    self.assertGreater(row['peak_device_bytes'], row['bytes']['total'])
            done = bench('memory', '--device=cuda', '--ranks=2', '--batch=1', *SIZES[:4], '--steps=1', env={'PATH': folder + ':' + os.environ['PATH']})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn('\npeak of a GPU', done.stdout)
            self.assertNotIn('saved', done.stdout)  # that would be memory of the host


class Kernels(unittest.TestCase):
    def test_numbers(self):
        for dtype in ['f32', 'bf16']:
            done = bench('kernels', '--json', '--device=cuda', f'--dtype={dtype}', '--params=1000', '--gemm=9,17,5',
                         '--attention=1,70,2,16', '--rounds=2')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            told, = lines(done.stdout)
            self.assertEqual((told['device'], told['dtype'], told['gemm']), ('cuda', dtype, [9, 17, 5]))
            for key in ['copy_gb_per_s', 'adamw_gb_per_s', 'gemm_tflop_per_s']:
                self.assertGreater(told[key], 0)
            self.assertEqual(told['attention'], [1, 70, 2, 16])
            if dtype == 'bf16':
                self.assertGreater(told['attention_tflop_per_s'], 0)
            else:
                self.assertIsNone(told['attention_tflop_per_s'])
            self.assertAlmostEqual(told['adamw_over_copy'], told['adamw_gb_per_s'] / told['copy_gb_per_s'])
            self.assertEqual(told['adamw_bytes_per_param'], {'f32': 28, 'bf16': 30}[dtype])

    def test_other_heads(self):
        done = bench('kernels', '--device=cuda', '--params=1', '--gemm=1,1,1', '--attention=1,1,1,24', '--rounds=1')
        self.assertEqual((done.returncode, done.stdout), (1, ''))
        self.assertIn('heads of 24 channels', done.stderr)


class Communicators(unittest.TestCase):
    def test_values(self):
        for dtype in ['f32', 'bf16']:
            for deterministic in ['on', 'off']:
                done = bench('comm', '--json', '--device=cuda', '--bytes=1Ki:64Ki', f'--dtype={dtype}', f'--deterministic={deterministic}', '--rounds=2')
                self.assertEqual((done.returncode, done.stderr), (0, ''))
                head, *rows = lines(done.stdout)
                backends = ['self'] if head['left_out'] else ['self', 'nccl']
                self.assertFalse(STAND_IN and head['left_out'], head)
                self.assertEqual((head['device'], head['dtype']), ('cuda', dtype))
                told = [('all_gather', b, 0) for b in backends] + [('reduce_scatter', 'add limit', None)]
                told += [(op, b, 0) for op in ['reduce_scatter', 'agree'] for b in backends]
                self.assertEqual([(r['op'], r['backend'], r['wrong']) for r in rows], told * 4)

    def test_refused(self):
        done = bench('comm', '--device=cuda', '--backend=shm')
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (2, '', 'zero-bench comm: --backend: shm is for device host, and device is cuda\n'))


if __name__ == '__main__':
    if 'no usable GPU' in bench('kernels', '--device=cuda', '--params=1', '--gemm=1,1,1', '--attention=1,1,1,16',
                                  '--rounds=1').stderr:
        sys.exit(77)  # skipped
    unittest.main()
