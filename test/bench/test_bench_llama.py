# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face folders (--model DIR) from outside, one small model of each architecture. All meshes
with the same tensor and context parallelism have the same bits, and those without either have the bits of one
rank. Folders are imported and exported on every mesh, and what cannot be done is refused by name.

A sample of the meshes is run, drawn from SEED (printed; by default the time). All of them, in some minutes:

    N_MESHES=all python3 test/bench/test_bench_llama.py build-test/bench/zero-bench build-test/zero/zero-run Bits
"""
import functools
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import KIND_SIZES, KINDS, TEXT, ZERO_BENCH, ZERO_RUN, bench, lines, run, train, write_folders  # noqa: E402

MICRO = 4  # micro-batches of a step, over all data-parallel ranks
FOLDERS = tempfile.mkdtemp(prefix='bench-llama-')
REFERENCES = os.path.join(TEXT, 'llama', 'references')


def setUpModule():  # pylint: disable=invalid-name
    write_folders(FOLDERS)


def tearDownModule():  # pylint: disable=invalid-name
    shutil.rmtree(FOLDERS)


@functools.lru_cache(maxsize=None)
def run_of(world, kind, *args):
    steps, summary = train(world, '--model', os.path.join(FOLDERS, kind), '--context=48', '--batch=2', '--data', TEXT, *args)
    assert summary['bytes'] == summary['planned_bytes'], (kind, args)
    return [(s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


PARTS = [(1, []), (2, ['--tp=2']), (4, ['--tp=4']), (2, ['--tp=2', '--sequence-parallel']), (2, ['--cp=2']), (2, ['--cp=2', '--cp-form=exchange']),
         (2, ['--cp=2', '--cp-form=ring']), (4, ['--cp=2', '--tp=2', '--sequence-parallel', '--cp-order=contiguous'])]


def others():
    """Returns (ranks, options) of meshes that have the bits of one rank at stage 0 for MICRO micro-batches in a step."""
    alone = [(1, [stage]) for stage in ('--stage=1', '--stage=2', '--stage=3')] + [(1, ['--stage=3', '--budget=192Ki'])]
    pipelines = [(2, ['--pp=2', schedule, stage]) for schedule in ('--schedule=1f1b', '--schedule=gpipe', '--schedule=zero-bubble')
                 for stage in ('--stage=0', '--stage=1', '--stage=3')]
    pipelines += [(2, ['--pp=2', '--schedule=interleaved', '--stages-per-rank=2', '--stage=2']), (4, ['--pp=4', '--schedule=zero-bubble'])]
    data = [(2, ['--stage=3', '--dp-replicate=2']), (2, ['--stage=3']), (2, ['--stage=2']), (2, ['--stage=0'])]
    return ([(n, [*args, f'--accum={MICRO}']) for n, args in alone + pipelines] + [(n, [*args, f'--accum={MICRO // 2}']) for n, args in data] +
            [(4, ['--pp=2', '--stage=3', '--schedule=zero-bubble', f'--accum={MICRO // 2}'])])


class Bits(unittest.TestCase):
    def test_are_the_same(self):
        seed = int(os.environ.get('SEED') or time.time_ns() % 10**9)
        print(f'SEED={seed}', flush=True)
        cases = [(kind, part, more, how) for kind, part, how in itertools.product(KINDS, PARTS, others()) for more in ([], ['--dtype=bf16'], ['--documents=9'], ['--recompute'])
                 if part[0] * how[0] <= 8]
        if os.environ.get('N_MESHES') != 'all':
            cases = random.Random(seed).sample(cases, int(os.environ.get('N_MESHES') or 24))
        for kind, (parts, args), more, (n, how) in cases:
            args = [*args, *(m for m in more if m != '--recompute'), '--steps=3', '--lr=1e-3']
            again = [m for m in more if m == '--recompute']  # which keeps the bits, too
            with self.subTest(kind=kind, args=args, how=[*how, *again]):
                self.assertEqual(run_of(parts * n, kind, *args, *how, *again), run_of(parts, kind, *args, f'--accum={MICRO}'))

    def test_parts_are_near(self):
        """With tensor or context parallelism sums are rounded at other places. plain has the bits of one rank."""
        for kind in KINDS:
            whole, sha = run_of(1, kind, '--steps=10', '--lr=3e-3')
            self.assertLess(whole[-1][0], 0.97 * whole[0][0])  # it learns
            plain, plain_sha = run_of(1, kind, '--steps=10', '--lr=3e-3', '--plain')
            self.assertEqual(([loss for loss, _ in plain], plain_sha), ([loss for loss, _ in whole], sha))
            for parts, args in PARTS[1:]:
                with self.subTest(kind=kind, args=args):
                    for (loss, norm), (want, want_norm) in zip(run_of(parts, kind, *args, '--steps=10', '--lr=3e-3')[0], whole):
                        self.assertLess(abs(loss - want), 1e-5 * want)
                        self.assertLess(abs(norm - want_norm), 2e-4 * want_norm)

    def test_in_check_mode(self):
        """Check mode compares what ranks of an axis do, and finds nothing."""
        for parts, args in PARTS[1:]:
            with self.subTest(args=args):
                _, watched = train(parts, '--model', os.path.join(FOLDERS, 'qwen3'), '--context=48', '--batch=2', '--data', TEXT, *args, '--steps=2', '--stage=3',
                                   env={'ZERO_CHECK': '1'})
                self.assertEqual(watched['state_sha256'], run_of(parts, 'qwen3', *args, '--steps=2', '--stage=3')[1])


def read_safetensors(folder):
    """Returns {name: (dtype, shape, bytes)} of all files of a folder."""
    weights = {}
    for file in (f for f in os.listdir(folder) if f.endswith('.safetensors')):
        with open(os.path.join(folder, file), 'rb') as f:
            data = f.read()
        end = 8 + int.from_bytes(data[:8], 'little')
        for name, entry in json.loads(data[8:end]).items():
            if name != '__metadata__':
                first, last = entry['data_offsets']
                weights[name] = entry['dtype'], entry['shape'], data[end + first:end + last]
    return weights


class Folders(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix='bench-llama-')
        self.addCleanup(shutil.rmtree, self.dir)
        self.tokens = os.path.join(self.dir, 'tokens')
        draw = random.Random(3)
        with open(self.tokens, 'wb') as f:
            for _ in range(2000):
                f.write(draw.randrange(67).to_bytes(2, 'little'))

    def train(self, world, folder, *args):
        return train(world, '--model', folder, '--tokens', self.tokens, '--token-bytes=2', '--context=16', '--batch=1', *args)

    def test_go_in_and_out(self):
        """With a learning rate of 0 the exported weights are those of the folder, whatever the mesh."""
        for kind, dtype in (('llama', 'f32'), ('mistral', 'bf16'), ('qwen2', 'bf16'), ('qwen3', 'f32')):
            source = os.path.join(REFERENCES, kind)
            want = read_safetensors(source)
            for world, args in [(1, []), (2, ['--stage=3']), (4, ['--tp=2', '--stage=2']), (2, ['--pp=2', '--accum=2', '--stage=1'])]:
                with self.subTest(kind=kind, args=args):
                    out = os.path.join(self.dir, f'{kind}-{world}{len(args)}')
                    self.train(world, source, *args, '--steps=1', '--lr=0', f'--dtype={dtype}', '--export', out)
                    self.assertEqual(read_safetensors(out), want)
                    with open(os.path.join(out, 'config.json'), encoding='utf-8') as ours, open(os.path.join(source, 'config.json'), encoding='utf-8') as theirs:
                        self.assertEqual(json.load(ours), json.load(theirs))
                    self.assertEqual(os.path.exists(os.path.join(out, 'generation_config.json')), os.path.exists(os.path.join(source, 'generation_config.json')))

    def test_training_goes_on(self):
        """A run that begins with an exported folder has the first loss that the other run would have had next."""
        source, out, saved = os.path.join(REFERENCES, 'qwen3'), os.path.join(self.dir, 'out'), os.path.join(self.dir, 'saved')
        more = ['--lr=1e-3', '--warmup=0']
        self.train(2, source, *more, '--steps=3', '--stage=3', '--export', out, '--save', saved)
        on, _ = self.train(1, source, *more, '--steps=4', '--accum=2', '--save', saved, '--load=latest')
        fresh, _ = self.train(1, out, *more, '--steps=1', '--accum=2')
        first, _ = self.train(1, source, *more, '--steps=1', '--accum=2')
        self.assertEqual(len(on), 1)
        self.assertNotEqual(fresh[0]['loss'], first[0]['loss'])
        again = os.path.join(self.dir, 'again')
        done = bench('export', '--model', source, '--load', saved, '--out', again)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEqual(read_safetensors(again), read_safetensors(out))  # a step later
        self.assertEqual(set(read_safetensors(again)), set(read_safetensors(source)))

    def test_all_ranks_fail_if_one_does(self):
        """Only one rank copies the files beside the weights. Here it cannot."""
        source = os.path.join(self.dir, 'source')
        shutil.copytree(os.path.join(REFERENCES, 'qwen3'), source)
        os.mkdir(os.path.join(source, 'merges.txt'))
        for args, text in [(['--export', os.path.join(self.dir, 'out')], 'merges.txt: cannot be read'),
                           (['--lora=2', '--export-merged', os.path.join(self.dir, 'merged')], 'merges.txt: cannot be read'),
                           (['--lora=2', '--export', self.taken()], 'model.safetensors: cannot become')]:
            for mesh in ['--stage=3'], ['--tp=2'], ['--pp=2', '--accum=2']:
                with self.subTest(args=args, mesh=mesh):
                    done = run([ZERO_RUN, '-n', '2', '--raw', 'sh', '-c', '"$@"; echo "exit code $?"', 'sh', ZERO_BENCH, 'train', '--model', source, '--tokens',
                                self.tokens, '--token-bytes=2', '--context=16', '--batch=1', '--steps=1', *mesh, *args])
                    self.assertEqual(done.stdout.count('exit code 1'), 2, done.stdout)
                    self.assertIn(text, done.stderr)
                    self.assertIn('rank 0 could not write all files', done.stderr)

    def taken(self):
        """Returns a folder in which another one has the name of the adapters' file."""
        folder = os.path.join(self.dir, 'taken')
        os.makedirs(os.path.join(folder, 'adapter_model.safetensors'))
        return folder

    def test_the_name_of_a_folder(self):
        """It may look like that of a file."""
        source = os.path.join(self.dir, 'model.safetensors')
        shutil.copytree(os.path.join(REFERENCES, 'qwen3'), source)
        self.assertEqual(self.train(1, source, '--steps=1')[0][0]['loss'], self.train(1, os.path.join(REFERENCES, 'qwen3'), '--steps=1')[0][0]['loss'])

    def test_without_weights(self):
        done = bench('train', '--model', os.path.join(FOLDERS, 'llama'), '--steps=1', '--context=16', '--data', TEXT)
        self.assertIn('the weights are drawn, not read from ' + os.path.join(FOLDERS, 'llama'), done.stdout)
        for name in 'pytorch_model.bin', 'model-00001-of-00002.safetensors':
            source = os.path.join(self.dir, name)
            shutil.copytree(os.path.join(FOLDERS, 'llama'), source)
            with open(os.path.join(source, name), 'wb'):
                pass
            done = bench('train', '--model', source, '--steps=1', '--context=16', '--data', TEXT)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f'{source} has {name}, but neither model.safetensors nor model.safetensors.index.json', done.stderr)


class Plans(unittest.TestCase):
    def test_memory(self):
        """Allocated equals planned at every stage, for the whole model and its parts."""
        for kind in KINDS:
            for args in ([], ['--tp=2'], ['--pp=2', '--accum=2']):
                with self.subTest(kind=kind, args=args):
                    done = bench('memory', '--json', '--ranks=2', '--steps=1', '--batch=1', '--context=16', '--model', os.path.join(FOLDERS, kind), *args)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    for line in lines(done.stdout):
                        self.assertEqual(line['bytes'], line.get('planned_bytes', line['bytes']), line)

    def test_plan(self):
        """The plan's activations are what a run takes, up to the buffers of backward and statistics."""
        for kind in KINDS:
            model = ['--model', os.path.join(FOLDERS, kind), '--context=48', '--batch=2']
            plan = lines(bench('plan', '--json', '--dtype=f32', '--world=1', *model).stdout)[0]
            got = train(1, *model, '--steps=1', '--data', TEXT)[1]['activation_bytes']
            self.assertTrue(plan['activation_bytes'] < got < 1.6 * plan['activation_bytes'], (kind, plan['activation_bytes'], got))


    def test_recompute(self):
        """Of each layer only its input is kept: that is a third or less of 12 layers' activations."""
        with tempfile.TemporaryDirectory() as deep:
            for kind, fields in KINDS.items():
                with open(os.path.join(deep, 'config.json'), 'w', encoding='utf-8') as f:
                    json.dump(KIND_SIZES | fields | {'num_hidden_layers': 12}, f)
                args = ['--model', deep, '--context=48', '--batch=2', '--steps=2', '--data', TEXT]
                (steps, all_of_it), (again, less) = (train(1, *args, *more) for more in ([], ['--recompute']))
                with self.subTest(kind=kind):
                    self.assertEqual(([s['loss'] for s in again], less['state_sha256']), ([s['loss'] for s in steps], all_of_it['state_sha256']))
                    self.assertLess(less['activation_bytes'], all_of_it['activation_bytes'] / 3)

    def test_units(self):
        """An embedding that is no head, and a head of its own, are a unit each."""
        for kind, n in (('llama', 6), ('qwen2', 5)):
            for command in ('plan', 'tune'):
                self.assertIn(f' in {n} units, ', bench(command, '--world=2', '--model', os.path.join(FOLDERS, kind)).stdout)


class Refused(unittest.TestCase):
    def test_by_name(self):
        llama = os.path.join(FOLDERS, 'llama')
        for args, text in [(['--model', llama, '--vocab=300'], '--vocab: not with a folder as --model'), (['--model', llama, '--heads=4'], '--heads: not with a folder'),
                           (['--model', llama, '--context=65'], '--context: the model of ' + llama + ' has 64 at most'),
                           (['--model', llama, '--layers=5'], '--layers: the model of ' + llama + ' has 4 at most'),
                           (['--model', FOLDERS], FOLDERS + '/config.json: cannot be opened'), (['--model=gpt3'], "--model: 'gpt3' is not gpt2-nano, gpt2-124M, gpt2-355M, gpt2-774M or gpt2-1.5B, nor a folder"),
                           (['--model', llama, '--tp=8'], '--tp: 8 parts do not divide the 4 heads of keys')]:
            for command in ('train', 'plan', 'memory'):
                if command == 'plan' and '--tp=8' in args:
                    continue
                done = bench(command, *args)
                self.assertEqual((done.returncode, done.stdout), (2, ''), (command, args))
                self.assertIn(text, done.stderr)
        for args in (['export', '--load=x', '--out'], ['train', '--export']):
            done = bench(*args, os.path.join(FOLDERS, '.', 'llama'), '--model', llama)
            self.assertIn(args[-1] + ': is the folder of --model, whose weights stay', done.stderr)
        done = bench('train', '--model', llama, '--lora=2', '--export=never', '--export-merged=never')
        self.assertIn('--export-merged: is the folder of --export, which is for the adapters', done.stderr)
        done = bench('export', '--model', llama, '--layers=2', '--load=x', '--out=never')
        self.assertIn("--layers: with --out it must be the 4 of the folder's config.json", done.stderr)
        done = bench('train', '--model', llama, '--layers=2', '--export', os.path.join(FOLDERS, 'never'), '--data', TEXT)
        self.assertIn("--layers: with --export it must be the 4 of the folder's config.json", done.stderr)


if __name__ == '__main__':
    unittest.main()
