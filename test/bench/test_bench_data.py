# SPDX-License-Identifier: Apache-2.0
"""zero-bench train on files of tokens: the same bits over worlds and after a resume in the middle of an epoch,
and wrong files refused by name."""
import fcntl
import json
import math
import os
import pty
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TEXT, ZERO_BENCH, ZERO_RUN, bench, run, train  # noqa: E402

VOCAB, CONTEXT = 300, 16
MODEL = ['--layers=2', '--heads=2', '--channels=32', f'--context={CONTEXT}', f'--vocab={VOCAB}', '--batch=1']


def clean_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}


def ids_of(n, seed=1):
    """Draws n ids that a model can learn something of: most follow from the one before."""
    draw, ids = random.Random(seed), [0]
    while len(ids) < n:
        ids.append((ids[-1] * 7 + 3) % VOCAB if draw.random() < 0.6 else draw.randrange(VOCAB))
    return ids


def header(magic, version, n):
    return struct.pack('<3i', magic, version, n).ljust(1024, b'\0')


def llmc(ids):
    return header(20240520, 1, len(ids)) + struct.pack(f'<{len(ids)}H', *ids)


class Case(unittest.TestCase):
    """Has a folder for files."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def put(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, 'wb') as f:
            f.write(content)
        return path

    def pairs(self, got, want):
        self.assertEqual(len(got), len(want))
        return zip(got, want)

    def refused(self, args, *why, world=1):
        command = [ZERO_BENCH, 'train', *MODEL, *map(str, args)]
        done = run(command if world == 1 else [ZERO_RUN, '-n', str(world), '--raw', *command])
        self.assertEqual(done.returncode, 2, done.stderr)
        for text in why:
            self.assertIn(str(text), done.stderr)


def result(world, *args):
    """Returns what must agree: every loss and gradient norm, and the hash of the state."""
    steps, summary = train(world, *MODEL, *args)
    return [(s['step'], s['loss'], s['grad_norm']) for s in steps], summary['state_sha256']


def folder_with_tokenizer(folder):
    """Makes a small model whose tokenizer is that of tokenizer/references/llama3.json."""
    config = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'num_hidden_layers': 1, 'num_attention_heads': 2,
              'hidden_size': 16, 'intermediate_size': 16, 'max_position_embeddings': 64, 'vocab_size': 700, 'rms_norm_eps': 1e-5, 'eos_token_id': 657}
    with open(os.path.join(folder, 'config.json'), 'w', encoding='utf-8') as f:
        json.dump(config, f)
    shutil.copy(os.path.join(TEXT, 'tokenizer', 'references', 'llama3.json'), os.path.join(folder, 'tokenizer.json'))


class Text(Case):
    """Text for a model whose folder has a tokenizer."""

    def setUp(self):
        super().setUp()
        folder_with_tokenizer(self.folder)
        self.ids = os.path.join(self.folder, 'ids')
        self.model = ['--model', self.folder, '--context=16', '--batch=1', '--steps=3', '--documents=end']
        done = self.tokenize(os.path.join(TEXT, 'test_bench_data.py'))
        if 'PCRE2' in done.stderr and 'CHECKS_MUST_RUN' not in os.environ:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)

    def tokenize(self, *paths):
        return bench('tokenize', '--model', self.folder, '--to', self.ids, *paths)

    def test_text_is_not_overwritten(self):
        text = self.put('text', b'the gradient')
        self.ids = os.path.join(os.path.dirname(text), '.', os.path.basename(text))
        self.assertIn('is also to be read, and would be lost', self.tokenize(text).stderr)
        with open(text, 'rb') as f:
            self.assertEqual(f.read(), b'the gradient')

    def test_only_an_incomplete_file_is_removed(self):
        broken = self.put('broken.txt', b'abc\xff')
        self.assertEqual((self.tokenize(broken).returncode, os.path.exists(self.ids)), (2, False))
        file, self.ids = self.put('file', b''), os.path.join(self.folder, 'link')
        os.symlink(file, self.ids)  # as /dev/stdout is one
        self.assertEqual((self.tokenize(broken).returncode, os.path.islink(self.ids)), (2, True))
        os.remove(self.ids)
        os.mkfifo(self.ids)
        reader = os.open(self.ids, os.O_RDONLY | os.O_NONBLOCK)
        self.assertEqual((self.tokenize(broken).returncode, os.path.exists(self.ids)), (2, True))
        os.close(reader)

    def test_text_is_encoded(self):
        """Text given to train, on one rank or two, is what tokenize makes of it: a document for each file."""
        texts = [self.put('a.txt', 'Grüße, the gradient\n'.encode() * 40), self.put('b.txt', b'the parameter ' * 100)]
        done = self.tokenize(*texts)
        self.assertRegex(done.stdout, r'^\d+ tokens of 2 files.*--token-bytes 2, and with --documents end --end-token 657')
        with open(self.ids, 'rb') as f:
            ids = [i for i, in struct.iter_unpack('<H', f.read())]
        self.assertEqual((ids[0], ids[-1], ids.count(656), ids.count(657)), (656, 657, 2, 2))
        runs = [train(world, *self.model, '--held-out=0.1', *args)[1]['state_sha256'] for world, args in [
            (1, ['--data', *texts, '--accum=2']), (2, ['--data', *texts, '--stage=3']),
            (1, ['--tokens', self.ids, '--token-bytes=2', '--end-token=657', '--accum=2'])]]
        self.assertEqual(len(set(runs)), 1, runs)

    def test_refused(self):
        broken = self.put('broken.txt', b'abc\xff')
        for args, why in [(['--data', broken], 'broken.txt: the text is not UTF-8: byte 3 is 0xff'), (['--data', self.put('short', b'a')], 'tokens of text are less than a row'),
                          (['--data', broken, '--documents=7'], "--documents: is 'end' with --tokens or a tokenizer")]:
            done = bench('train', *self.model, *args)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(why, done.stderr)
        done = self.tokenize(broken)
        self.assertEqual(done.returncode, 2)
        self.assertIn('broken.txt: the text is not UTF-8', done.stderr)
        with open(os.path.join(self.folder, 'tokenizer.json'), 'w', encoding='utf-8') as f:
            f.write('{"pre_tokenizer": {"type": "Metaspace"}}')
        done = bench('train', *self.model, '--data', broken)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn('tokenizer.json: pre_tokenizer: Metaspace is not implemented', done.stderr)


class Tokens(Case):
    def test_formats_have_the_same_rows(self):
        ids = ids_of(1000)
        two, four = struct.pack('<1000H', *ids), struct.pack('<1000I', *ids)
        want = result(1, '--steps=4', '--tokens', self.put('a', llmc(ids)))
        for name, content, more in [('b', header(20240801, 7, 1000) + four, []), ('c', two, ['--token-bytes=2']), ('d', four, ['--token-bytes=4'])]:
            self.assertEqual(result(1, '--steps=4', '--tokens', self.put(name, content), *more), want, name)
        self.assertEqual(result(1, '--steps=4', '--tokens', self.put('e', llmc(ids)), '--plain')[1], want[1])

    def test_several_files(self):
        """Words after a file belong to its list, before and after other options."""
        a, b = self.put('a', llmc(ids_of(500))), self.put('b', llmc(ids_of(500, seed=2)))
        want = result(1, '--steps=4', '--tokens', a, '--tokens', b)
        self.assertEqual(result(1, '--steps=4', '--tokens', a, b), want)
        self.assertEqual(result(1, '--tokens', a, '--steps=4', b), want)
        self.assertNotEqual(result(1, '--steps=4', '--tokens', a), want)

    def test_worlds_and_meshes(self):
        """Two epochs of the rows that a step's micro-batches share, however ranks divide them."""
        data = ['--tokens', self.put('a', llmc(ids_of(20 * CONTEXT + 1))), '--steps=10']
        want = result(1, '--accum=4', '--stage=0', *data)
        for world, *how in [(2, '--accum=2', '--stage=3'), (4, '--accum=1', '--stage=1'), (1, '--accum=2', '--batch=2')]:
            got = result(world, *how, *data)
            if '--batch=2' in how:  # gradients are added in another order
                for (_, a, _), (_, b, _) in self.pairs(got[0], want[0]):
                    self.assertAlmostEqual(a, b, delta=1e-4)
            else:
                self.assertEqual(got, want, how)
        self.assertEqual(result(2, '--accum=4', '--pp=2', '--stage=1', *data), want)

    def test_an_epoch_takes_each_row_once(self):
        """Without learning, a row has the same loss whenever it comes. Epochs and seeds differ in the order."""
        data = ['--tokens', self.put('a', llmc(ids_of(12 * CONTEXT + 1))), '--lr=0', '--weight-decay=0', '--steps=24']
        orders = []
        for seed in (1, 2):
            losses = [s['loss'] for s in train(1, *MODEL, *data, f'--seed={seed}')[0]]
            self.assertEqual(sorted(losses[:12]), sorted(losses[12:]))
            self.assertEqual(len(set(losses)), 12)
            orders += [[sorted(losses[:12]).index(x) for x in epoch] for epoch in (losses[:12], losses[12:])]
        self.assertEqual(len(set(map(tuple, orders))), 4)

    def test_resume_in_the_middle_of_an_epoch(self):
        data = ['--tokens', self.put('a', llmc(ids_of(30 * CONTEXT + 1))), '--save', os.path.join(self.folder, 'ckpt')]
        want = result(1, '--accum=4', '--steps=12', *data[:2])
        result(2, '--accum=2', '--steps=5', *data)  # 20 of 30 rows
        steps, state = result(4, '--accum=1', '--steps=9', '--load=latest', *data)  # and 36
        self.assertEqual(steps, want[0][5:9])
        steps, state = result(1, '--accum=4', '--steps=12', '--load=latest', *data)
        self.assertEqual((steps, state), (want[0][9:], want[1]))

    def test_resume_with_another_batch(self):
        """Rows are counted, not batches: none is left out or taken twice."""
        data = ['--tokens', self.put('a', llmc(ids_of(12 * CONTEXT + 1))), '--save', os.path.join(self.folder, 'ckpt'), '--lr=0', '--weight-decay=0']
        rows = [s['loss'] for s in train(1, *MODEL, *data[:2], *data[4:], '--steps=12')[0]]
        train(1, *MODEL, *data, '--steps=3')
        pairs = [s['loss'] for s in train(1, *MODEL, *data, '--steps=7', '--batch=2', '--load=latest')[0]]
        self.assertEqual(len(pairs), 4)
        for i, pair in enumerate(pairs):
            self.assertAlmostEqual(pair, (rows[3 + 2 * i] + rows[4 + 2 * i]) / 2, delta=1e-5)

    def test_other_tokens_are_not_gone_on_with(self):
        save = ['--save', os.path.join(self.folder, 'ckpt'), '--load=latest']
        train(1, *MODEL, '--tokens', self.put('a', llmc(ids_of(500))), '--steps=1', *save)
        self.refused(['--tokens', self.put('b', llmc(ids_of(501))), '--steps=2', *save], '--load', '500 tokens', '501')

    def test_data_that_differ_in_anything_are_not_gone_on_with(self):
        draw, ids = random.Random(1), ids_of(400)
        mask = bytes(draw.randrange(2) for _ in ids)
        halves = [self.put('first', llmc(ids[:201])), self.put('second', llmc(ids[201:]))]
        want = ['--tokens', *halves, '--mask', self.put('m', mask[:201]), self.put('n', mask[201:]), '--documents=end', '--end-token=299']
        save = ['--save', os.path.join(self.folder, 'ckpt'), '--load=latest']
        train(1, *MODEL, *want, *save, '--steps=1')
        changed = [*ids[:150], (ids[150] + 1) % VOCAB, *ids[151:201]]
        for other in (['--tokens', halves[1], halves[0], '--mask', self.folder + '/n', self.folder + '/m', *want[6:]],
                      ['--tokens', self.put('changed', llmc(changed)), *want[2:]], want[:3] + want[6:], want[:6],
                      [*want[:7], '--end-token=298'], [*want[:4], self.put('o', mask[::-1][:201]), *want[5:]],
                      ['--tokens', *(self.put(p[-5:] + '.raw', llmc(part)[1024:]) for p, part in (('first', ids[:201]), ('secon', ids[201:]))),
                       '--token-bytes=2', *want[3:]]):
            self.refused([*other, *save, '--steps=2'], '--load: saved with other data', '--tokens, --mask, --documents')
        wide = [self.put(f'{i}', header(20240801, 7, len(part)) + struct.pack(f'<{len(part)}I', *part)) for i, part in enumerate((ids[:201], ids[201:]))]
        train(2, *MODEL, '--tokens', *wide, *want[3:], *save, '--steps=2')

    def test_bad_files(self):
        good = self.put('good', llmc(ids_of(500)))
        whole = llmc(ids_of(500))
        for name, content, why in [('empty', b'', 'the file is empty'), ('magic', struct.pack('<256i', *[7] * 256), 'begins with 7'),
                                   ('truncated', whole[:-1], 'its header says 500 tokens'), ('longer', whole + b'xx', 'its header says 500 tokens'),
                                   ('version', header(20240520, 3, 500) + whole[1024:], 'version 3'), ('head', whole[:100], '100 bytes are less'),
                                   ('short', llmc(ids_of(CONTEXT)), None)]:
            path = self.put(name, content)
            if why:
                self.refused(['--tokens', good, path], path, why)
                self.refused(['--tokens', good, path, '--stage=3'], path, why, world=2)
            else:
                self.refused(['--tokens', path], path, f'{CONTEXT} tokens are less than a row, which takes {CONTEXT + 1}: --context')
        self.refused(['--tokens', good + '.none'], good + '.none', 'No such file')
        self.refused(['--tokens', good, '--token-bytes=2'], good, 'begins with a header of llm.c')
        odd = self.put('odd', b'123')
        self.refused(['--tokens', odd, '--token-bytes=2'], odd, '3 bytes')

    def test_ids_out_of_range(self):
        ids = ids_of(500)
        ids[77] = VOCAB
        path = self.put('a', llmc(ids))
        for how in (['--plain'], ['--stage=1']):
            self.refused(['--tokens', path, *how], path, f'token 77 has id {VOCAB}, but the model has {VOCAB} ids')
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *MODEL, '--tokens', path])
        self.assertNotEqual(done.returncode, 0)  # that of the rank that ends first
        self.assertIn(f'{path}: token 77 has id {VOCAB}', done.stderr)
        self.assertIn('--vocab', done.stderr)

    def test_options(self):
        path = self.put('a', llmc(ids_of(500)))
        for args, why in [(['--tokens', path, '--data', TEXT], '--data: not with --tokens'), (['--token-bytes=2'], '--token-bytes: is of'),
                          (['--tokens', path, '--token-bytes=3'], '--token-bytes: is 2 or 4'),
                          (['--vocab=255'], '--vocab: 255 ids are too few for bytes')]:
            self.refused(args, why)
        self.assertEqual(bench('train', *MODEL, '--vocab=300', '--tokens', path, '--steps=1').returncode, 0)

    def test_documents(self):
        """Documents do not see each other: what a row's second document adds to the loss does not depend on its
        first one, once a model is trained."""
        draw, half, weights = random.Random(3), CONTEXT // 2, os.path.join(self.folder, 'weights')
        first = [[draw.randrange(299) for _ in range(half - 1)] + [7] for _ in range(2)]
        second = [[299] + [draw.randrange(299) for _ in range(half)] for _ in range(2)]
        rows = [a + b for a in first for b in second]
        for how, independent in ((['--documents=end', '--end-token=299'], True), ([], False)):
            train(1, *MODEL, '--tokens', *(self.put(f'{i}', llmc(row)) for i, row in enumerate(rows)), '--steps=80', '--lr=0.01', '--export', weights, *how)
            args = ['--steps=1', '--lr=0', '--weight-decay=0', '--import', weights, *how]
            loss = [train(1, *MODEL, '--tokens', *[self.put('x', llmc(row))] * 4, *args)[0][0]['loss'] for row in rows]
            interaction = abs(loss[0] - loss[1] - loss[2] + loss[3])
            self.assertEqual(interaction < 1e-5, independent, interaction)

    def test_documents_over_meshes(self):
        ids = ids_of(12 * CONTEXT + 1)
        ids[::7] = [299] * len(ids[::7])
        data = ['--tokens', self.put('a', llmc(ids)), '--steps=4', '--documents=end', '--end-token=299']
        want = result(1, '--accum=4', '--stage=0', *data)
        self.assertNotEqual(result(1, '--accum=4', '--stage=0', *data[:3]), want)
        self.assertEqual(result(1, '--plain', *data)[1], result(1, '--stage=2', *data)[1])
        self.assertEqual(result(4, '--stage=3', *data), want)
        self.assertEqual(result(2, '--accum=4', '--pp=2', *data), want)
        cp = result(2, '--accum=4', '--cp=2', *data)
        for (_, a, _), (_, b, _) in self.pairs(cp[0], want[0]):
            self.assertAlmostEqual(a, b, delta=1e-5)
        self.refused(['--tokens', self.put('b', llmc(ids)[1024:]), '--token-bytes=2', '--documents=end'], 'b: its format has no end token', '--end-token')
        self.refused([*data[:3], '--documents=9'], "--documents: is 'end' with --tokens")
        self.refused(['--documents=end'], "--documents: is 'end' with --tokens")
        self.refused(['--documents=x'], "--documents: 'x' is not a whole number")
        self.refused(['--end-token=3'], '--end-token: is of')
        self.refused([*data[:3], '--end-token=3'], '--end-token: needs --documents end')
        self.refused([*data[:4], f'--end-token={VOCAB}'], data[1], f'documents end at token {VOCAB}, but the model has {VOCAB} ids; --end-token or --vocab')
        self.refused(data[:4], data[1], 'documents end at token 50256')  # that of llm.c

class Masks(Case):
    def setUp(self):
        super().setUp()
        draw, ids = random.Random(5), ids_of(24 * CONTEXT + 1)
        mask = bytes(draw.random() < 0.2 + 0.6 * (i // CONTEXT % 2) for i in range(len(ids)))
        self.data = ['--tokens', self.put('a', llmc(ids)), '--mask', self.put('mask', mask)]
        self.ones = ['--tokens', self.data[1], '--mask', self.put('ones', b'\1' * len(ids))]

    def test_a_mask_of_ones_changes_nothing(self):
        want = result(2, '--steps=4', '--accum=2', *self.data[:2])
        self.assertEqual(result(2, '--steps=4', '--accum=2', *self.ones), want)

    def test_the_loss_is_the_mean_over_counted_tokens(self):
        """However ranks and micro-batches divide them, and with every other way to cut a model."""
        self.assertNotEqual(result(1, '--accum=4', '--steps=6', *self.data[:2]), result(1, '--accum=4', '--steps=6', *self.data))
        want = result(1, '--accum=4', '--steps=6', '--stage=1', *self.data)
        for world, *how in [(2, '--accum=2', '--stage=3'), (4, '--stage=0'), (4, '--stage=3'), (2, '--accum=4', '--pp=2')]:
            self.assertEqual(result(world, *how, '--steps=6', *self.data), want, how)
        for world, *how in [(1, '--accum=4', '--plain'), (1, '--accum=1', '--batch=4'), (2, '--accum=4', '--tp=2'), (4, '--accum=2', '--cp=2')]:
            got = result(world, *how, '--steps=6', *self.data)
            for (_, a, norm), (_, b, want_norm) in self.pairs(got[0], want[0]):
                self.assertAlmostEqual(a, b, delta=2e-5, msg=how)
                self.assertAlmostEqual(norm, want_norm, delta=1e-3 * want_norm, msg=how)

    def test_what_is_left_out_changes_nothing(self):
        """Two files differ in the targets of one row, which a mask leaves out: without --lr the losses are the
        same, if the row's tokens are."""
        ids = [random.Random(1).randrange(VOCAB) for _ in range(CONTEXT + 1)]
        other = ids[:-1] + [(ids[-1] + 1) % VOCAB]
        mask = ['--mask', self.put('m', b'\1' * CONTEXT + b'\0'), '--steps=3']
        self.assertEqual(result(1, '--tokens', self.put('x', llmc(ids)), *mask), result(1, '--tokens', self.put('y', llmc(other)), *mask))
        self.assertNotEqual(result(1, '--tokens', self.put('x', llmc(ids)), mask[2]), result(1, '--tokens', self.put('y', llmc(other)), mask[2]))

    def test_resume(self):
        save = ['--save', os.path.join(self.folder, 'ckpt'), '--load=latest']
        want = result(1, '--accum=4', '--steps=10', *self.data)
        result(2, '--accum=2', '--steps=4', *self.data, *save)
        self.assertEqual(result(4, '--steps=10', *self.data, *save)[1], want[1])

    def test_wrong_masks(self):
        short = self.put('short', b'\1' * 9)
        self.refused([*self.data[:3], short], short, 'a mask of 9 bytes', self.data[1], f'{24 * CONTEXT + 1} tokens')
        self.refused([*self.data, short], '--mask: 2 files, but --tokens has 1')
        self.refused(['--mask', short], '--mask: is of')
        self.refused([*self.data[:3], self.put('none', bytes(24 * CONTEXT + 1))], '--mask: no token of the 24 rows to train on counts')

    def test_steps_in_which_no_token_counts(self):
        """They are numbered and take their rows, but change no weight, whatever decays it."""
        ids = ids_of(8 * CONTEXT + 1)
        data = ['--tokens', self.put('b', llmc(ids)), '--mask', self.put('m', bytes(7 * CONTEXT + 1) + b'\1' * CONTEXT), '--weight-decay=0.5']
        want, empty = None, None
        for world, *how in [(1, '--accum=2', '--plain'), (1, '--accum=2', '--stage=0'), (2, '--stage=3'), (2, '--accum=2', '--pp=2')]:
            events, summary = train(world, *MODEL, *data, '--steps=8', *how)
            steps = [(e['step'], e['loss']) for e in events if e['event'] == 'step']
            empty = [e['step'] for e in events if e['event'] == 'empty_step']
            self.assertEqual(len(steps), 2, how)  # one in each epoch of four
            self.assertEqual(sorted([*empty, *(s[0] for s in steps)]), list(range(1, 9)))
            want = want or (steps, summary['state_sha256'])
            self.assertEqual((steps, summary['state_sha256']), want, how)
        last = want[0][-1][0]
        for how in (['--plain'], ['--stage=1']):  # weights do not depend on how many such steps follow
            self.assertEqual(train(1, *MODEL, *data, '--accum=2', f'--steps={last}', *how)[1]['state_sha256'], want[1])
        save = ['--save', os.path.join(self.folder, 'ckpt'), '--load=latest']
        train(1, *MODEL, *data, '--accum=2', f'--steps={empty[0]}', *save)
        self.assertEqual(train(2, *MODEL, *data, '--steps=8', *save)[1]['state_sha256'], want[1])
        told = bench('train', *MODEL, *data, '--accum=2', '--steps=8').stdout
        self.assertEqual(told.count('no token counts (--mask)\n'), 6)
        self.assertIn(f'step {empty[0]:6}: no token counts', told)


def evaluated(world, *args, **more):
    """Returns the evaluations as (step, loss, best loss, best step), and the hash of the state."""
    events, summary = train(world, *MODEL, *args, **more)
    return [(e['step'], e['loss'], e['best_loss'], e['best_step']) for e in events if e['event'] == 'evaluation'], summary['state_sha256']


class HeldOut(Case):
    def test_the_last_rows_are_held_out(self):
        """They are evaluated, and only the others are trained on."""
        ids = ids_of(20 * CONTEXT + 1)
        first, last = llmc(ids[:15 * CONTEXT + 1]), llmc(ids[15 * CONTEXT:])
        data = ['--tokens', self.put('a', llmc(ids)), '--steps=20', '--eval-every=7']
        got = evaluated(1, *data, '--held-out=0.25')
        self.assertEqual([e[0] for e in got[0]], [7, 14, 20])
        apart = ['--tokens', self.put('b', first), '--steps=20', '--eval-every=7', '--eval-tokens', self.put('c', last)]
        self.assertEqual(evaluated(1, *apart), got)
        self.assertEqual(got[1], result(1, *apart[:3])[1])  # evaluations change nothing
        rows = ['--tokens', self.put('c', last), '--lr=0', '--weight-decay=0', '--steps=5']
        before = evaluated(1, *data[:2], '--lr=0', '--weight-decay=0', '--steps=1', '--held-out=0.25')[0][0][1]
        self.assertAlmostEqual(before, sum(s[1] for s in result(1, *rows)[0]) / 5, delta=1e-6)

    def test_any_part_of_rows(self):
        """The same loss for every world, batch and mesh, also if the rows do not divide evenly."""
        data = ['--tokens', self.put('a', llmc(ids_of(23 * CONTEXT + 1))), '--held-out=0.3', '--steps=5', '--eval-every=2']
        want = evaluated(1, '--accum=4', '--stage=0', *data)
        for world, *how in [(2, '--accum=2', '--stage=3'), (4, '--stage=1'), (4, '--stage=3'), (2, '--accum=4', '--pp=2'),
                            (2, '--accum=4', '--pp=2', '--schedule=zero-bubble')]:
            self.assertEqual(evaluated(world, *how, *data), want, how)
        more = ['--layers=4', *data]
        self.assertEqual(evaluated(2, '--accum=4', '--pp=2', '--schedule=interleaved', '--stages-per-rank=2', *more), evaluated(1, '--accum=4', *more))
        for world, *how in [(1, '--accum=4', '--plain'), (1, '--batch=4'), (2, '--accum=4', '--tp=2'), (2, '--accum=4', '--cp=2')]:
            for (_, a, *_), (_, b, *_) in self.pairs(evaluated(world, *how, *data)[0], want[0]):
                self.assertAlmostEqual(a, b, delta=2e-5, msg=how)
        self.assertEqual(evaluated(2, '--accum=2', '--stage=3', *data, env={'ZERO_CHECK': '1'}), want)

    def test_masks(self):
        draw, ids = random.Random(2), ids_of(21 * CONTEXT + 1)
        mask = bytes(draw.random() < 0.5 for _ in ids)
        data = ['--tokens', self.put('a', llmc(ids)), '--mask', self.put('m', mask), '--steps=3']
        got = evaluated(2, *data, '--accum=2', '--held-out=0.3')
        cut = 15 * CONTEXT
        apart = ['--tokens', self.put('b', llmc(ids[:cut + 1])), '--mask', self.put('n', mask[:cut + 1]), '--steps=3',
                 '--eval-tokens', self.put('c', llmc(ids[cut:])), '--eval-mask', self.put('o', mask[cut:])]
        self.assertEqual(evaluated(1, *apart, '--accum=4'), got)
        self.assertNotEqual(evaluated(1, *apart[:-2], '--accum=4')[0], got[0])
        none = self.put('none', mask[:cut + 1] + bytes(len(ids) - cut - 1))
        self.refused([*data[:3], none, '--held-out=0.3'], '--mask: no token of the 6 rows to evaluate counts')
        self.refused([*apart[:-1], self.put('none', bytes(len(ids) - cut))], '--eval-mask: no token of the 6 rows to evaluate counts', world=2)

    def test_text(self):
        """The last part of the text, in rows."""
        text = bytes(random.Random(1).randrange(256) for _ in range(1000))
        files = ['--data', self.put('all', text)], ['--data', self.put('first', text[:800])]
        how = ['--steps=3', '--accum=2']
        got = evaluated(1, *files[0], *how, '--held-out=0.2')
        self.assertEqual(got[1], result(1, *files[1], *how)[1])
        self.assertEqual(evaluated(2, '--steps=3', *files[0], '--held-out=0.2'), got)
        self.assertEqual(len(got[0]), 1)

    def test_the_best_is_kept(self):
        """A learning rate that is too high: the loss falls, and rises again. The best checkpoint has its loss
        again, and a run that goes on knows it."""
        ckpt = os.path.join(self.folder, 'ckpt')
        data = ['--tokens', self.put('a', llmc(ids_of(12 * CONTEXT + 1))), '--held-out=0.3', '--eval-every=4', '--lr=0.03', '--accum=2']
        whole = evaluated(1, '--steps=24', *data)
        best = min(whole[0], key=lambda e: e[1])
        self.assertEqual(whole[0][-1][2:], (best[1], best[0]))
        self.assertLess(best[0], 24)
        save = ['--save', ckpt, '--keep=1', '--keep-best']
        first = evaluated(2, '--steps=10', *data[:-1], *save)
        self.assertEqual(first[0][:2], whole[0][:2])
        kept = [d for d in os.listdir(ckpt) if d.endswith('-kept')]
        self.assertEqual(len(kept), 1, os.listdir(ckpt))
        rest = evaluated(1, '--steps=24', *data, *save, '--load=latest')
        self.assertEqual((rest[0][-1][1], rest[1]), (whole[0][-1][1], whole[1]))
        kept = [d for d in os.listdir(ckpt) if d.endswith('-kept')]
        self.assertEqual(len(kept), 1, os.listdir(ckpt))
        self.assertEqual(len(os.listdir(ckpt)) - os.listdir(ckpt).count('lock') - 1, 1, os.listdir(ckpt))  # and the latest
        again = evaluated(1, f"--steps={int(kept[0].split('-')[3]) + 1}", '--load', os.path.join(ckpt, kept[0]), *data[:-2], '--lr=0', '--weight-decay=0')
        self.assertEqual(again[0][0][1], min(e[1] for e in [*first[0], *rest[0]]))

    def test_a_former_best_one_is_an_ordinary_checkpoint(self):
        ckpt = os.path.join(self.folder, 'ckpt')
        data = ['--tokens', self.put('a', llmc([i % 5 for i in range(12 * CONTEXT + 1)])), '--held-out=0.3', '--eval-every=2', '--lr=0.002', '--save', ckpt, '--keep-best']
        evaluations, _ = evaluated(2, '--steps=6', *data)
        self.assertEqual([e[3] for e in evaluations], [2, 4, 6])  # each is better than the one before
        names = [f'save-{i:08}-step-{step:08}' for i, step in enumerate((2, 4, 6), 1)]
        self.assertEqual(sorted(os.listdir(ckpt)), [*names[:2], names[2] + '-kept', 'save-00000004-step-00000006'])
        train(1, *MODEL, *data[:-3], '--accum=2', '--steps=3', '--load', os.path.join(ckpt, names[0]))
        evaluations, _ = evaluated(1, '--accum=2', '--steps=8', '--keep=1', '--load=latest', *data)
        self.assertEqual(evaluations[0][3], 8)
        self.assertEqual(sorted(os.listdir(ckpt)), ['save-00000005-step-00000008-kept', 'save-00000006-step-00000008'])

    def test_only_the_former_best_one_is_renamed(self):
        """Folders with other names stay, and a name that is taken is a warning, not the end of the run."""
        ckpt = os.path.join(self.folder, 'ckpt')
        data = ['--tokens', self.put('a', llmc([i % 5 for i in range(12 * CONTEXT + 1)])), '--held-out=0.3', '--eval-every=2', '--lr=0.002', '--save', ckpt, '--keep-best']
        evaluated(1, '--steps=2', *data)
        others = ['save-the-date-kept', 'save-1-step-2-kept', 'save-00000001-step-00000002']
        for name in others:
            os.makedirs(os.path.join(ckpt, name, 'x'))
        done = run([ZERO_RUN, '-n', '2', '--raw', ZERO_BENCH, 'train', *MODEL, *data, '--steps=4', '--load', os.path.join(ckpt, 'save-00000002-step-00000002')])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('--keep-best: cannot rename the former best checkpoint', done.stderr)
        self.assertEqual(sorted(os.listdir(ckpt)), sorted([*others, 'save-00000001-step-00000002-kept', 'save-00000002-step-00000002',
                                                           'save-00000003-step-00000004-kept', 'save-00000004-step-00000004']))

    def test_a_best_loss_of_other_rows_or_not_kept(self):
        """A run that goes on knows the lowest loss only with the same rows, and with --keep-best only if its
        checkpoint is in the folder."""
        ckpt, other = os.path.join(self.folder, 'ckpt'), os.path.join(self.folder, 'other')
        a, b, c = (self.put(name, llmc(ids_of(n * CONTEXT + 1, seed))) for name, n, seed in (('a', 12, 1), ('b', 4, 1), ('c', 5, 2)))
        data = ['--tokens', a, '--accum=2', '--eval-every=1']
        evaluated(1, *data, '--eval-tokens', b, '--steps=4', '--save', ckpt, '--keep-best')
        kept = [d for d in os.listdir(ckpt) if d.endswith('-kept')]
        last = ['--load', os.path.join(ckpt, 'save-00000005-step-00000004'), '--steps=5', '--lr=1']
        for world, rows, save, step in [(1, b, [], 4), (1, c, [], 5), (2, c, [], 5), (1, b, ['--save', other, '--keep-best'], 5)]:
            how = [*data, '--eval-tokens', rows, *save, *last]
            got = evaluated(world, *(how if world == 1 else [*how, '--accum=1']))[0]
            self.assertEqual([e[3] for e in got], [step], (rows, save))
        self.assertEqual(len([d for d in os.listdir(other) if d.endswith('-kept')]), 1)
        self.assertEqual(len(kept), 1)
        # A run without an evaluation passes it on.
        train(1, *MODEL, *data[:-1], '--save', ckpt, *last)
        got = evaluated(1, *data, '--eval-tokens', b, '--save', ckpt, '--keep-best', '--load=latest', '--steps=6', '--lr=1')[0]
        self.assertEqual([e[3] for e in got], [4])

    def test_refused(self):
        a, one = self.put('a', llmc(ids_of(500))), self.put('one', llmc(ids_of(CONTEXT + 1)))
        for args, why in [(['--eval-every=2'], '--eval-every: needs'), (['--keep-best', '--save=/tmp/x'], '--keep-best: needs'),
                          (['--tokens', a, '--held-out=0.1', '--keep-best'], '--save: is needed'),
                          (['--tokens', a, '--held-out=0.1', '--eval-tokens', a], '--eval-tokens: is for --tokens, and not with --held-out'),
                          (['--eval-tokens', a], '--eval-tokens: is for --tokens'), (['--held-out=1'], "--held-out: '1' is not a number"),
                          (['--tokens', one, '--held-out=0.1'], '--held-out 0.1: no row is left to train on'),
                          (['--tokens', a, '--eval-tokens', a, '--eval-mask', a, a], '--eval-mask: 2 files, but --eval-tokens has 1'),
                          (['--data', self.put('t', b'x' * 100), '--held-out=0.1'], '--held-out 0.1'),
                          (['--tokens', a, '--eval-tokens', self.put('e', b'')], 'the file is empty')]:
            self.refused(args, why)
        save = ['--tokens', a, '--save', os.path.join(self.folder, 'ckpt'), '--steps=1']
        train(1, *MODEL, *save, '--held-out=0.2')
        self.refused([*save, '--load=latest', '--held-out=0.3'], '--load: saved with 25 rows to train on', '22')

    def test_told(self):
        done = bench('train', *MODEL, '--tokens', self.put('a', llmc(ids_of(500))), '--steps=3', '--held-out=0.2')
        self.assertRegex(done.stdout, r'step +3 +held out: loss +5\.')
        self.assertIn('500 tokens in 1 file, 25 rows, and 6 rows to evaluate\n', done.stdout)


class LearningRates(Case):
    def rates(self, *args):
        return [s['lr'] for s in train(1, *MODEL, '--data', TEXT, *args)[0]]

    def check(self, got, want):
        for a, b in self.pairs(got, want):
            self.assertAlmostEqual(a, b, delta=1e-6 * b)  # rates are fp32

    def test_schedules(self):
        self.check(self.rates('--steps=12', '--lr=1e-3'), [*(1e-4 * (i + 1) for i in range(10)), 1e-3, 1e-3])
        self.check(self.rates('--steps=3', '--warmup=0', '--lr=1e-3'), [1e-3] * 3)
        how = ['--steps=10', '--warmup=2', '--lr=8e-3', '--min-lr=1e-3']
        self.check(self.rates(*how, '--lr-schedule=linear'), [4e-3, *(8e-3 - 7e-3 * i / 8 for i in (0, *range(8)))])
        self.check(self.rates(*how, '--lr-schedule=cosine'),
                   [4e-3, *(1e-3 + 7e-3 * (1 + math.cos(math.pi * i / 8)) / 2 for i in (0, *range(8)))])
        self.check(self.rates('--steps=6', '--lr-steps=4', '--warmup=1', '--lr=1e-3', '--min-lr=1e-4', '--lr-schedule=linear'),
                   [1e-3, 1e-3, 7e-4, 4e-4, 1e-4, 1e-4])

    def test_resume(self):
        how = ['--data', TEXT, '--lr-schedule=cosine', '--lr-steps=12', '--min-lr=1e-5', '--warmup=3', '--accum=2']
        save = ['--save', os.path.join(self.folder, 'ckpt'), '--load=latest']
        want = train(1, *MODEL, *how, '--steps=12')
        train(1, *MODEL, *how, '--steps=5', *save)
        steps, summary = train(1, *MODEL, *how, '--steps=12', *save)
        self.assertEqual([s['lr'] for s in steps], [s['lr'] for s in want[0][5:]])
        self.assertEqual(summary['state_sha256'], want[1]['state_sha256'])

    def test_refused(self):
        for args, why in [(['--min-lr=1e-5'], '--min-lr: needs --lr-schedule'), (['--lr-steps=9'], '--lr-steps: needs --lr-schedule'),
                          (['--lr-schedule=cosine', '--seconds=1'], '--lr-schedule: needs --steps or --lr-steps'),
                          (['--lr-schedule=linear', '--steps=10'], '--warmup: 10 steps leave none of 10'),
                          (['--lr-schedule=linear', '--lr=1e-4', '--min-lr=1e-3'], '--min-lr: 0.001 is above --lr, which is 0.0001'),
                          (['--lr-schedule=step'], "--lr-schedule: 'step' is not constant, cosine or linear")]:
            self.refused(args, why)


class Told(Case):
    def test_time_and_share_of_the_peak(self):
        steps, summary = train(1, *MODEL, '--data', TEXT, '--steps=5', '--peak-tflops=0.5')
        self.assertEqual(steps[-1]['seconds_left'], 0)
        for s in steps[:-1]:
            self.assertGreater(s['seconds_left'], 0)
        for s in steps:
            self.assertAlmostEqual(s['mfu'], s['tokens_per_s'] * summary['flop_per_token'] / 0.5e12, delta=1e-9)
        self.assertIsNone(train(1, *MODEL, '--data', TEXT, '--steps=1')[0][0]['mfu'])

    def test_terminal(self):
        """The bar shows speed, share of the peak and the time that is left. It is there from the second step on,
        and the terminal has room for all of it, however long the numbers are."""
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack('4H', 24, 200, 0, 0))
        with subprocess.Popen([ZERO_BENCH, 'train', *MODEL, '--data', TEXT, '--steps=50', '--peak-tflops=1'], stdout=follower,
                              env=clean_environment()) as p:
            os.close(follower)
            shown = b''
            try:
                while more := os.read(leader, 1 << 16):
                    shown += more
            except OSError:  # the program has ended
                pass
            self.assertEqual(p.wait(), 0)
        os.close(leader)
        self.assertRegex(shown.decode(), r'\] +\d+%  step \d+  loss \d\.\d{3}  \d+(:\d\d)+ left  \d+ tokens/s  \d+\.\d% MFU')

    def test_told(self):
        done = bench('train', *MODEL, '--tokens', self.put('a', llmc(ids_of(500))), '--steps=1')
        self.assertIn('500 tokens in 1 file, 31 rows', done.stdout)


if __name__ == '__main__':
    unittest.main(verbosity=1)
