# SPDX-License-Identifier: Apache-2.0
"""zero-bench sample: a model that has learned a period goes on with it, from a checkpoint and from an export, and the
text is the same on every mesh. Wrong weights and options are refused."""
import json
import os
import re
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TEXT, ZERO_BENCH, ZERO_RUN, bench, lines, run, train  # noqa: E402

TOKENIZERS = os.path.join(TEXT, 'tokenizer', 'references')
SENTENCE = 'the cat sat on the mat; '
CONTEXT = 32
MODEL = ['--layers=3', '--heads=2', '--channels=32', f'--context={CONTEXT}']
MESHES = [(1, '--stage=3'), (2, '--stage=0'), (2, '--stage=1'), (2, '--stage=2'), (2, '--stage=3'), (4, '--stage=3')]
CUT_MESHES = [(2, '--tp=2'), (2, '--pp=2'), (3, '--pp=3', '--stage=1'), (4, '--tp=2', '--stage=3'), (4, '--pp=2', '--stage=3'),
              (4, '--tp=2', '--pp=2')]


def sample(world, *args, model=None):
    command = [ZERO_BENCH, 'sample', *(MODEL if model is None else model), *map(str, args)]
    return run(command if world == 1 else [ZERO_RUN, '-n', str(world), '--raw', *command], errors='replace')


class Sample(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.text = os.path.join(folder.name, 'text')
        with open(cls.text, 'w', encoding='ascii') as f:
            f.write(SENTENCE * 100)
        cls.weights = {}
        for dtype in 'f32', 'bf16':
            saved, exported = (os.path.join(folder.name, f'{what}-{dtype}') for what in ('saved', 'exported'))
            train(2, *MODEL, f'--dtype={dtype}', '--data', cls.text, '--steps=200', '--lr=0.01', '--stage=2', f'--save={saved}', f'--export={exported}')
            cls.weights[dtype] = [[f'--dtype={dtype}', f'--load={saved}'], [f'--dtype={dtype}', f'--import={exported}']]

    def ids(self, world, *args):
        done = sample(world, '--json', *args)
        self.assertEqual((done.returncode, done.stderr), (0, ''), args)
        (event,) = lines(done.stdout)
        self.assertEqual(list(event), ['event', 'prompt', 'tokens'])
        return event['tokens']

    def refused(self, args, *why, **more):
        done = sample(more.pop('world', 1), *args, **more)
        self.assertEqual(done.returncode, 2, done)
        for text in why:
            self.assertIn(f'zero-bench sample: {text}', done.stderr)

    def test_goes_on_with_the_period(self):
        """Over several rows, from any place of the period, on every mesh."""
        for dtype, sources in self.weights.items():
            for source in sources:
                for at, n in (5, 100), (30, 10), (17, 1):
                    prompt = (2 * SENTENCE)[:at]
                    done = sample(1, *source, f'--prompt={prompt}', f'--tokens={n}', '--temperature=0')
                    self.assertEqual((done.returncode, done.stderr, done.stdout), (0, '', (10 * SENTENCE)[:at + n] + '\n'), source)
            for world, *how in [*MESHES, *CUT_MESHES]:
                with self.subTest(dtype=dtype, world=world, how=how):
                    done = sample(world, *sources[world % 2], *how, '--prompt=the c', '--tokens=70', '--temperature=0')
                    self.assertEqual((done.returncode, done.stderr, done.stdout), (0, '', (4 * SENTENCE)[:75] + '\n'))

    def test_the_same_choices_on_every_mesh(self):
        """At a high temperature most tokens are surprising. The text has the same bits at all stages, in all
        worlds and pipelines. With tp sums are in another order, which changes no token here."""
        for dtype, sources in self.weights.items():
            how = ['--tokens=60', '--temperature=3', '--seed=5', '--prompt=cat']
            want = self.ids(1, *sources[0], *how)
            self.assertGreater(len(set(want)), 20)
            self.assertEqual(self.ids(1, *sources[1], *how), want)
            for world, *mesh in [*MESHES, *(m for m in CUT_MESHES if dtype == 'f32' or '--tp=2' not in m)]:
                with self.subTest(dtype=dtype, world=world, mesh=mesh):
                    self.assertEqual(self.ids(world, *sources[world % 2], *how, *mesh), want)

    def test_folders(self):
        """A Llama and a Qwen3 with random weights, from the folder of --model. They have fewer ids than bytes."""
        for name in 'llama', 'qwen3':
            folder = os.path.join(TEXT, 'llama', 'references', name)
            texts = [run([ZERO_RUN, '-n', str(world), '--raw', ZERO_BENCH, 'sample', f'--model={folder}', '--prompt= !', '--tokens=40', '--json', *how])
                     for world, *how in [(1,), (2, '--stage=3'), (2, '--pp=2'), (2, '--tp=2')]]
            self.assertEqual([(done.returncode, done.stderr) for done in texts], 4 * [(0, '')])
            self.assertEqual(len({done.stdout for done in texts}), 1)
            self.refused([f'--model={folder}', '--prompt=a'], '--prompt: the model has no id 97, only those below 67', model=[])

    def test_tokenizers(self):
        """A model of one text's ids repeats it, after the ids that a text begins with. A special token ends it."""
        with open(os.path.join(TOKENIZERS, 'references.json'), encoding='utf-8') as f:
            references = json.load(f)
        for name, first, end in [('llama3', '<|begin_of_text|>', '<|end_of_text|>'), ('qwen2', None, '<|im_end|>')]:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer = os.path.join(TOKENIZERS, name + '.json')
                with open(tokenizer, encoding='utf-8') as f:
                    known = json.load(f)
                added = {token['content']: token['id'] for token in known['added_tokens']}
                text, ids = max(((text, ids) for text, ids in zip(references['texts'], references[name]['ids'])
                                 if text.isprintable() and len(set(ids)) == len(ids) and max(ids, default=999) < 656), key=lambda pair: len(pair[1]))
                self.assertGreater(len(ids), 8)
                whole = [*([added[first]] if first else []), *ids, added[end]]
                tokens = os.path.join(folder, 'tokens')
                with open(tokens, 'wb') as f:
                    f.write(struct.pack(f'<{100 * len(whole)}H', *(100 * whole)))
                model = [*MODEL, '--vocab=700', f'--load={folder}/saved', f'--tokenizer={tokenizer}', '--temperature=0']
                train(1, *MODEL, '--vocab=700', '--tokens', tokens, '--token-bytes=2', '--steps=100', '--lr=0.01', f'--save={folder}/saved')
                done = sample(1, f'--prompt={text[:4]}', model=model)
                if 'PCRE2' in done.stderr:
                    self.skipTest('no PCRE2')
                self.assertEqual((done.returncode, done.stderr, done.stdout), (0, '', text + '\n'))
                (event,) = lines(sample(2, '--pp=2', '--json', f'--prompt={text[:4]}', model=model).stdout)
                self.assertEqual(event['prompt'] + event['tokens'], whole)
                (event,) = lines(sample(1, '--json', '--tokens=3', model=model).stdout)
                self.assertEqual(event['prompt'], [added[first]] if first else [known['model']['vocab']['Ċ']])
                self.refused([f'--prompt={text}'], '--prompt: the model has no id ', model=[*MODEL, *self.weights['f32'][0], f'--tokenizer={tokenizer}'])
        done = sample(1, *self.weights['f32'][0], f'--tokenizer={self.text}')
        self.assertIn('not JSON', done.stderr)

    def test_options_of_the_choice(self):
        source = self.weights['f32'][0]
        greedy = self.ids(1, *source, '--temperature=0', '--tokens=40')
        self.assertEqual(self.ids(1, *source, '--temperature=9', '--top-k=1', '--tokens=40'), greedy)
        self.assertEqual(self.ids(1, *source, '--temperature=9', '--top-p=0', '--tokens=40'), greedy)
        texts = [self.ids(1, *source, '--temperature=2', '--tokens=40', f'--seed={seed}', *more) for seed in (1, 2) for more in ([], ['--top-k=3'])]
        self.assertEqual(len(set(map(tuple, texts))), 4)
        self.assertEqual(self.ids(1, *source, '--temperature=2', '--tokens=40'), texts[0])
        self.assertEqual(self.ids(1, *source, '--temperature=2', '--tokens=20'), texts[0][:20])

    def test_parameters_are_gathered(self):
        """At once, or where they exceed the budget unit by unit for each token."""
        source = [*self.weights['f32'][0], '--stage=3', '--tokens=20', '--temperature=2']
        want = self.ids(4, *source)
        for budget in '60Ki', '200Ki', '4Mi':
            self.assertEqual(self.ids(4, *source, f'--budget={budget}'), want, budget)
        self.refused([*source, '--budget=1K'], 'zero_wrap: ', world=4)

    def test_a_prompt_longer_than_a_row(self):
        """The model sees the row before each token, and the text has the whole prompt."""
        source = [*self.weights['f32'][1], '--tokens=30', '--temperature=0']
        prompt = 'zzz' * CONTEXT + SENTENCE * 2
        self.assertEqual(sample(1, *source, f'--prompt={prompt}').stdout, prompt + (2 * SENTENCE)[:30] + '\n')
        self.assertEqual(self.ids(1, *source, f'--prompt={prompt}'), self.ids(1, *source, f'--prompt={prompt[-CONTEXT:]}'))

    def test_bytes(self):
        """Bytes of all values in a prompt. Control characters are not sent to the terminal."""
        source = [*self.weights['f32'][0], '--tokens=1', '--temperature=0']
        more = ['--layers=1', '--heads=1', '--channels=4', '--vocab=700']
        with tempfile.TemporaryDirectory() as folder:
            train(1, *more, '--data', self.text, '--steps=1', f'--save={folder}')
            self.assertRegex(sample(1, f'--load={folder}', '--temperature=1000', '--tokens=40', model=more).stdout, '<[2-6][0-9][0-9]>')
        (event,) = lines(sample(1, '--json', *source, '--prompt=é\x1b\t').stdout)
        self.assertEqual(event['prompt'], [0xC3, 0xA9, 0x1B, 9])
        self.assertTrue(sample(1, *source, '--prompt=é\x1b\t').stdout.startswith('é\\x1b\t'))
        (event,) = lines(sample(1, '--json', *source).stdout)
        self.assertEqual(event['prompt'], [10])

    def test_refused(self):
        load, imported = self.weights['f32'][0][1], self.weights['f32'][1][1]
        for args, why in [([], '--load or --import: one is needed'), ([load, imported], '--load or --import: both are given'),
                          ([load, '--prompt='], '--prompt: is empty'), ([load, '--temperature=0', '--top-k=2'], '--top-k: needs a --temperature above 0'),
                          ([load, '--temperature=0', '--top-p=0.5'], '--top-p: needs a --temperature above 0'),
                          ([load, '--tp=3'], '--tp: 3 parts do not divide the 2 heads'), ([load, '--pp=4'], '--pp: 4 stages are more than the 3 layers'),
                          ([load, '--temperature=-1'], "--temperature: '-1' is not a number"), ([load, '--tokens=0'], "--tokens: '0' is not a whole number"),
                          ([load, '--vocab=100', '--prompt=~'], ''), ([load, '--layers=2'], '')]:
            self.refused(args, why)
        self.assertEqual(sample(1, f'--load={self.text}-no').returncode, 1)

    def test_weights_that_are_not_finite(self):
        """All ranks name the first id whose logit is not finite."""
        with tempfile.TemporaryDirectory() as folder:
            (name,) = os.listdir(self.weights['f32'][1][1].split('=')[1])
            with open(os.path.join(self.weights['f32'][1][1].split('=')[1], name), 'rb') as f:
                weights = bytearray(f.read())
            n = struct.unpack('<Q', weights[:8])[0]
            start = int(re.search(rb'"[^"]*wte.weight":\{[^}]*"data_offsets":\[(\d+),', weights[8:8 + n])[1])
            struct.pack_into('<f', weights, 8 + n + start + 4 * 32 * 200, float('nan'))  # of token 200
            with open(os.path.join(folder, name), 'wb') as f:
                f.write(weights)
            for world, *how in [(1,), (2, '--stage=3'), (2, '--tp=2'), (2, '--pp=2')]:
                # The shell of a rank does not fail, so zero-run does not end the others before they have said why they do.
                done = run([*([ZERO_RUN, '-n', str(world), '--raw'] if world > 1 else []), 'sh', '-c', '"$@"; echo "exit code $?"', 'sh', ZERO_BENCH, 'sample', *MODEL,
                            f'--import={folder}', '--tokens=3', '--prompt=the', *how], errors='replace')
                self.assertEqual(done.stdout.count('exit code 2'), world, done)
                self.assertEqual(done.stderr.count('zero-bench sample: the logit of id 200 after 3 tokens is not a finite number'), world, done.stderr)

    def test_help(self):
        done = bench('sample', '--help')
        self.assertIn('--temperature', done.stdout)
        self.assertEqual(done.returncode, 0)


if __name__ == '__main__':
    unittest.main(verbosity=1)
