# SPDX-License-Identifier: Apache-2.0
"""bench/peers without other projects: its arithmetic and tables, the common start of all rows, how processes
are run and watched, and the whole program with our own rows only. PyTorch is not needed."""
import argparse
import array
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ROOT, ZERO_BENCH, lines, run, train  # noqa: E402

PEERS = os.path.join(ROOT, 'bench', 'peers')
sys.path.insert(0, PEERS)
import peers_inputs  # noqa: E402
import peers_report as report  # noqa: E402
import row_process  # noqa: E402

TINY = ['--layers=2', '--heads=2', '--channels=32', '--vocab=256', '--context=16']
LLAMA = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': 256, 'hidden_size': 32, 'intermediate_size': 48,
         'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'hidden_act': 'silu', 'max_position_embeddings': 64,
         'rms_norm_eps': 1e-5, 'rope_theta': 10000.0, 'tie_word_embeddings': True, 'torch_dtype': 'float32'}


def made(who, dtype, ranks, ms, losses, pss=2e9, first=4.0, **more):
    return {'who': who, 'dtype': dtype, 'ranks': ranks, 'threads': 3 - ranks, 'ms': ms, 'losses': losses, 'pss_bytes': pss, 'first_forward_s': first,
            'first_step_s': first + 1, 'peer': None, 'device_bytes': None, **more}


def write_llama(folder):
    os.makedirs(folder)
    with open(os.path.join(folder, 'config.json'), 'w', encoding='utf-8') as f:
        json.dump(LLAMA, f)
    return folder


class Arithmetic(unittest.TestCase):
    def test_spread(self):
        self.assertEqual(report.spread([3.5, 1.25, 9.0, 2.0]), {'median': 2.75, 'low': 1.25, 'high': 9.0})
        self.assertEqual(report.spread([7.0, 1.0, 6.0]), {'median': 6.0, 'low': 1.0, 'high': 7.0})

    def test_tokens_per_s(self):
        slow_start = made('stage3', 'f32', 2, [900.0, 800.0, 100.0, 50.0, 200.0], [])
        self.assertAlmostEqual(report.tokens_per_s(slow_start, 4, 64), 2 * 4 * 64 / 0.1)
        self.assertAlmostEqual(report.tokens_per_s(made('plain', 'f32', 1, [250.0, 750.0], []), 4, 64), 4 * 64 / 0.5)

    def test_loss_distance(self):
        self.assertEqual(report.loss_distance([5.0, 4.0, 3.3], [5.0, 4.0, 3.0])[1], 3)
        self.assertAlmostEqual(report.loss_distance([5.0, 3.96, 3.0], [5.0, 4.0, 3.0])[0], 0.01)
        self.assertEqual(report.loss_distance([5.0] * 20 + [1.0], [5.0] * 20 + [2.0]), (0.0, 20))  # the 21st is too late
        self.assertEqual(report.loss_distance([5.0, 4.0], [5.0])[1], 1)
        self.assertEqual(report.loss_distance([5.0, None], [5.0, 4.0]), (math.inf, 2))
        self.assertEqual(report.loss_distance([], [5.0]), (None, 0))
        self.assertEqual(lines(report.json_line({'who': 'ddp', 'loss_distance': math.inf})), [{'who': 'ddp', 'loss_distance': None}])


class Rows(unittest.TestCase):
    def setUp(self):
        same, near, far = [5.0, 4.0, 3.0], [5.0, 4.0002, 3.0], [5.0, 4.04, 3.0]
        self.runs = [
            made('fsdp2', 'f32', 2, [1, 1, 800.0], near, 3e9, 20.0), made('stage3', 'f32', 2, [1, 1, 200.0], same, 1.8e9, 0.5),
            made('plain', 'f32', 1, [1, 1, 100.0], [2.0, 1.0, 0.5]), made('llmc', 'f32', 1, [1, 1, 500.0], [2.0, 1.0, 0.505]),
            made('stage3', 'f32', 2, [1, 1, 400.0, 400.0], same + [2.5], 2.2e9, 0.7), made('fsdp2', 'f32', 2, [1, 1, 1000.0], near, 3.5e9, 24.0),
            made('stage3', 'f32', 2, [1, 1, 250.0], same, 2e9, 0.6), made('plain', 'bf16', 1, [1, 1, 50.0], far),
            {'who': 'deepspeed1', 'dtype': 'f32', 'ranks': 2, 'threads': 1, 'failed': 'deepspeed did not install: no compiler | none'},
            {'who': 'fsdp2', 'dtype': 'bf16', 'ranks': 2, 'threads': 1, 'failed': 'exit code 1: a'},
            made('fsdp2', 'bf16', 2, [1, 1, 400.0], far),
        ]
        self.rows = report.rows_of(self.runs, 4, 64)
        self.row = {(r['who'], r['dtype']): r for r in self.rows}

    def test_rows(self):
        self.assertEqual([(r['who'], r['dtype']) for r in self.rows], [
            ('plain', 'f32'), ('llmc', 'f32'), ('stage3', 'f32'), ('fsdp2', 'f32'), ('deepspeed1', 'f32'), ('plain', 'bf16'), ('fsdp2', 'bf16')])
        row = self.row['stage3', 'f32']
        self.assertEqual(row['tokens_per_s'], {'median': 512 / 0.25, 'low': 512 / 0.4, 'high': 512 / 0.2})
        self.assertEqual((row['rounds'], row['pss_gb'], row['first_forward_s'], row['ranks'], row['threads']), (3, 2.2, 0.6, 2, 1))
        self.assertEqual(row['losses'], [5.0, 4.0, 3.0, 2.5])  # those of the longest run

    def test_reference_has_the_same_dtype_and_ranks(self):
        self.assertEqual([self.row[k].get('loss_reference') for k in [('llmc', 'f32'), ('fsdp2', 'f32'), ('stage3', 'f32'), ('fsdp2', 'bf16')]],
                         ['plain', 'stage3', 'stage3', 'fsdp2'])
        self.assertAlmostEqual(self.row['fsdp2', 'f32']['loss_distance'], 5e-5)
        self.assertEqual(self.row['fsdp2', 'f32']['losses_compared'], 3)
        self.assertEqual([report.n_compared(rows) for rows in (self.rows, [self.row['fsdp2', 'f32']], [])], ['3 to 4', '3', '0'])
        self.assertAlmostEqual(self.row['llmc', 'f32']['loss_distance'], 0.01)

    def test_failures(self):
        self.assertNotIn('tokens_per_s', self.row['deepspeed1', 'f32'])
        self.assertEqual((self.row['fsdp2', 'bf16']['rounds'], self.row['fsdp2', 'bf16']['failed']), (1, 'exit code 1: a'))

    def test_bars(self):
        bars = {name: (x, bar, met) for name, x, bar, met in report.bars_of(self.rows)}
        x = bars['f32: libzero, stage 3 / PyTorch FSDP2, tokens/s']
        self.assertAlmostEqual(x[0], (512 / 0.25) / ((512 / 0.8 + 512 / 1.0) / 2))
        self.assertEqual(x[1:], ('at least 3', True))
        memory = bars['f32: libzero, stage 3 / PyTorch FSDP2, peak Pss']
        self.assertAlmostEqual(memory[0], 2.2 / 3.5)
        self.assertEqual(memory[1:], ('at most 0.65', True))
        self.assertTrue(bars['f32: libzero, stage 3 / PyTorch FSDP2, start to first forward'][2])
        self.assertEqual(bars['f32: zero-bench --plain / llm.c on the CPU, tokens/s'][1:], ('at least 5', True))
        self.assertEqual(bars['bf16: zero-bench --plain / llm.c on the CPU, tokens/s'][1:], ('at least 10', True))  # llm.c's f32
        self.assertTrue(bars['f32: losses of PyTorch FSDP2 from ours, relative, the first 3'][2])
        self.assertFalse(bars['f32: losses of llm.c on the CPU from ours, relative, the first 3'][2])
        self.assertEqual(len(bars), 7, bars)

    def test_bars_of_a_folder(self):
        """They differ from GPT-2's. CPU time has a ratio and no bar."""
        runs = [made('stage3', 'bf16', 2, [1, 1, 100.0], [5.0], 2e9, cpu_s_per_step=0.5), made('fsdp2', 'bf16', 2, [1, 1, 240.0], [5.1], 3e9, cpu_s_per_step=4.0),
                made('stage3', 'bf16', 2, [1, 1, 100.0], [5.0], 2e9, cpu_s_per_step=1.5)]
        rows = report.rows_of(runs, 4, 64)
        bars = {name: (round(x, 6), bar, met) for name, x, bar, met in report.bars_of(rows, report.FOLDER_BARS)}
        self.assertEqual(bars, {
            'bf16: libzero, stage 3 / PyTorch FSDP2, tokens/s': (2.4, 'at least 2.3', True),
            'bf16: libzero, stage 3 / PyTorch FSDP2, CPU seconds of a step': (0.25, '', None),
            'bf16: libzero, stage 3 / PyTorch FSDP2, peak Pss': (0.666667, 'at most 0.65', False),
            'bf16: libzero, stage 3 / PyTorch FSDP2, start to first forward': (1.0, '', None)})
        self.assertIn('| libzero, stage 3 | bf16 | 2 x 1 | 5120 | 5120 to 5120 | 2 | 1 | 2 |', report.markdown('', [], rows, report.FOLDER_BARS))

    def test_on_a_gpu_there_is_no_bar(self):
        """Its bars are for CPUs. The memory printed is the GPU's."""
        runs = [made('stage3', 'f32', 1, [1, 1, 100.0], [5.0], 2e9, 1.0, device_bytes=6e9), made('fsdp2', 'f32', 1, [1, 1, 50.0], [5.1], 1e9, 9.0, device_bytes=8e9)]
        bars = {name: (x, bar, met) for name, x, bar, met in report.bars_of(report.rows_of(runs, 4, 64))}
        self.assertEqual(bars.pop('f32: libzero, stage 3 / PyTorch FSDP2, tokens/s'), (0.5, '', None))
        self.assertEqual(bars.pop("f32: libzero, stage 3 / PyTorch FSDP2, peak of the GPU's memory"), (0.75, '', None))
        self.assertEqual(bars.pop('f32: libzero, stage 3 / PyTorch FSDP2, start to first forward')[1:], ('', None))
        self.assertEqual([(bar, met) for _, bar, met in bars.values()], [('at most 0.0001', False)])  # the bar of losses, on any device
        self.assertIn("PyTorch FSDP2, peak of the GPU's memory | 0.75 |  |  |", report.markdown('', [], report.rows_of(runs, 4, 64)))

    def test_meshes(self):
        """Speed and the reference of tp and pp follow from the micro-batches of a step. Pipelines have a ratio, but no bar."""
        runs = [made('plain', 'f32', 1, [1, 1, 100.0], [5.0]), made('tp', 'f32', 2, [1, 1, 100.0], [5.0], micro_batches=1),
                made('torch_tp', 'f32', 2, [1, 1, 250.0], [5.0001], micro_batches=1), made('stage0', 'f32', 2, [1, 1, 100.0], [7.0]),
                made('pp', 'f32', 2, [1, 1, 400.0], [6.0], micro_batches=4), made('torch_pp_patched', 'f32', 2, [1, 1, 800.0], [6.06], micro_batches=4),
                {'who': 'torch_pp', 'dtype': 'f32', 'ranks': 2, 'threads': 1, 'micro_batches': 4, 'failed': 'exit code -6: 8 vs 4'}]
        rows = report.rows_of(runs, 4, 64)
        row = {r['who']: r for r in rows}
        self.assertEqual([row[who]['tokens_per_s']['median'] for who in ('tp', 'torch_tp', 'stage0', 'pp')], [256 / 0.1, 256 / 0.25, 512 / 0.1, 1024 / 0.4])
        self.assertEqual([row[who].get('loss_reference') for who in ('tp', 'torch_tp', 'stage0', 'torch_pp_patched', 'torch_pp')],
                         ['plain', 'plain', 'stage0', 'pp', None])
        bars = {name: (round(x, 6), bar, met) for name, x, bar, met in report.bars_of(rows)}
        self.assertEqual(bars, {
            'f32: libzero, tp / PyTorch tensor parallelism, tokens/s': (2.5, 'at least 2', True),
            'f32: libzero, pp / PyTorch 1F1B, patched, tokens/s': (2.0, '', None),
            'f32: losses of PyTorch tensor parallelism from ours, relative, the first 1': (2e-05, 'at most 0.0001', True),
            'f32: losses of PyTorch 1F1B, patched from ours, relative, the first 1': (0.01, 'at most 0.0001', False)})
        page = report.markdown('', [], rows)
        self.assertIn('| PyTorch 1F1B | f32 | 2 x 1 | not run: exit code -6: 8 vs 4 |', page)
        self.assertEqual([title for title, _ in report.losses_of(rows)], [f'f32, {n} in a step' for n in ('1 micro-batch', '2 micro-batches', '4 micro-batches')])

    def test_tables(self):
        page = report.markdown('Title', ['one', 'two'], self.rows)
        self.assertTrue(page.startswith('# Title\n\n- one\n- two\n\n| '))
        table = page.split('\n\n')[2].split('\n')
        self.assertEqual(len(table), 2 + len(self.rows))
        self.assertEqual({line.replace('\\|', '').count('|') for line in table}, {len(report.HEAD) + 1})
        self.assertIn('| libzero, stage 3 | f32 | 2 x 1 | 2050 | 1280 to 2560 | 3 |  | 2.2 | 0.6 | 1.6 | reference |', table)
        self.assertIn('| not run: deepspeed did not install: no compiler \\| none |', page)
        self.assertIn('| 4 | 2.500000 |  |', page)  # only the reference made a fourth step
        lines_of_text = report.text(self.rows).split('\n')
        self.assertIn('not run', ''.join(lines_of_text))
        at = lines_of_text[0].index('tokens/s')
        self.assertEqual({line[at - 1] for line in lines_of_text[:1 + len(self.rows)]}, {' '})  # a column

    def test_numbers(self):
        for x, text in [(None, ''), (0, '0'), (2048.0, '2050'), (12345.6, '12300'), (0.0765, '0.0765'), (1.6e-07, '1.6e-07'), (2.0, '2')]:
            self.assertEqual(report.number(x), text)


def write_safetensors(path, tensors):
    """tensors: name -> (shape, values)."""
    header, data = {}, b''
    for name, (shape, values) in tensors.items():
        piece = array.array('f', values).tobytes()
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    with open(path, 'wb') as f:
        f.write(len(text).to_bytes(8, 'little') + text + data)


def bigrams(wte, channels):
    """Makes the weights of a one-layer GPT-2 that does nothing: the next token depends on the current one
    only."""
    c = channels
    zeros = {'wpe.weight': [16, c], 'h.0.ln_1.bias': [c], 'h.0.attn.c_attn.weight': [c, 3 * c], 'h.0.attn.c_attn.bias': [3 * c],
             'h.0.attn.c_proj.weight': [c, c], 'h.0.attn.c_proj.bias': [c], 'h.0.ln_2.bias': [c], 'h.0.mlp.c_fc.weight': [c, 4 * c],
             'h.0.mlp.c_fc.bias': [4 * c], 'h.0.mlp.c_proj.weight': [4 * c, c], 'h.0.mlp.c_proj.bias': [c], 'ln_f.bias': [c]}
    ones = ['h.0.ln_1.weight', 'h.0.ln_2.weight', 'ln_f.weight']
    return {'wte.weight': ([256, c], wte), **{name: (shape, [0.0] * math.prod(shape)) for name, shape in zeros.items()},
            **{name: ([c], [1.0] * c) for name in ones}}


def bigram_loss(wte, channels, token, target):
    x = wte[token * channels:(token + 1) * channels]
    mean = sum(x) / channels
    scale = 1 / math.sqrt(sum((v - mean) ** 2 for v in x) / channels + 1e-5)
    logits = [sum((v - mean) * scale * w for v, w in zip(x, wte[i * channels:(i + 1) * channels])) for i in range(256)]
    return math.log(sum(math.exp(v) for v in logits)) - logits[target]


class Inputs(unittest.TestCase):
    def test_random_bits(self):
        self.assertEqual(peers_inputs.random_bits(0), 0xE220A8397B1DCDAF)  # the first number of splitmix64 from seed 0, as published

    def test_batches_are_zero_benchs(self):
        """The losses of a model that two lines of arithmetic can follow are those of the batches written: of
        steps, ranks and rows."""
        channels, steps, ranks, batch = 4, 3, 2, 2
        drawn = random.Random(3)
        wte = array.array('f', [drawn.gauss(0, 1) for _ in range(256 * channels)])
        with tempfile.TemporaryDirectory() as dir_:
            text, path = os.path.join(dir_, 'text'), os.path.join(dir_, 'batches')
            with open(text, 'wb') as f:
                f.write(bytes(drawn.randrange(256) for _ in range(5000)))
            peers_inputs.write_batches(text, path, steps, ranks, batch, 16, 7)
            batches = array.array('i')
            with open(path, 'rb') as f:
                batches.frombytes(f.read())
            self.assertEqual(len(batches), steps * ranks * batch * 17)
            write_safetensors(os.path.join(dir_, 'model.safetensors'), bigrams(wte, channels))
            found, _ = train(ranks, '--layers=1', '--heads=1', f'--channels={channels}', '--context=16', f'--batch={batch}', f'--steps={steps}', '--seed=7',
                             '--stage=0', '--lr=0', f'--data={text}', f'--import={dir_}')
        for step, event in enumerate(found):
            rows = [batches[i * 17:(i + 1) * 17] for i in range(step * ranks * batch, (step + 1) * ranks * batch)]
            expected = [bigram_loss(wte, channels, row[t], row[t + 1]) for row in rows for t in range(16)]
            self.assertAlmostEqual(event['loss'], sum(expected) / len(expected), delta=1e-4)

    def test_weights_for_llmc(self):
        channels = 4
        tensors = bigrams([float(i) for i in range(256 * channels)], channels)
        shape = tensors['h.0.mlp.c_fc.weight'][0]
        tensors['h.0.mlp.c_fc.weight'] = shape, [float(5000 + i) for i in range(math.prod(shape))]
        with tempfile.TemporaryDirectory() as dir_:
            write_safetensors(os.path.join(dir_, 'a.safetensors'), tensors)
            out = os.path.join(dir_, 'out')
            peers_inputs.write_llmc(dir_, (1, 1, channels, 16, 256), out)
            with open(out, 'rb') as f:
                header, values = array.array('i', f.read(1024)), array.array('f', f.read())
        self.assertEqual(list(header), [20240326, 3, 16, 256, 1, 1, channels, 256] + [0] * 248)
        self.assertEqual(len(values), sum(len(v) for _, v in tensors.values()))
        self.assertEqual(list(values[:256 * channels]), [float(i) for i in range(256 * channels)])
        at = values.index(5000.0)
        turned = [5000.0 + c * 4 * channels + o for o in range(4 * channels) for c in range(channels)]  # (out, in)
        self.assertEqual(list(values[at:at + len(turned)]), turned)

    def test_weights_come_from_zero_bench(self):
        with tempfile.TemporaryDirectory() as dir_:
            text, folder = os.path.join(dir_, 'text'), os.path.join(dir_, 'weights')
            peers_inputs.write_text(ROOT, text)
            self.assertGreater(os.path.getsize(text), 1 << 20)
            peers_inputs.write_weights(ZERO_BENCH, TINY, 'f32', 5, text, folder)
            files = peers_inputs.Safetensors(folder)
            self.assertEqual(len(files.where), 4 + 2 * 12)
            shape, values = files.read('h.1.mlp.c_fc.weight')
            self.assertEqual((shape, len(values)), ([32, 128], 32 * 128))
            self.assertAlmostEqual(math.sqrt(sum(v * v for v in values) / len(values)), 0.02, delta=0.002)
            self.assertEqual(set(files.read('h.0.ln_1.weight')[1]), {1.0})

    def test_weights_of_a_folder(self):
        """They make a folder that begins as zero-bench begins without weights."""
        with tempfile.TemporaryDirectory() as dir_:
            text, weights, bare = os.path.join(dir_, 'text'), os.path.join(dir_, 'weights'), write_llama(os.path.join(dir_, 'bare'))
            peers_inputs.write_text(ROOT, text)
            peers_inputs.write_weights(ZERO_BENCH, [f'--model={bare}', '--context=16'], 'f32', 5, text, weights)
            self.assertEqual(len(peers_inputs.Safetensors(weights).where), 2 + 2 * 9)
            losses = [[event['loss'] for event in train(1, f'--model={model}', '--context=16', '--steps=3', '--lr=0.01', f'--seed={seed}', f'--data={text}')[0]]
                      for model, seed in [(bare, 5), (weights, 5), (bare, 6), (weights, 6)]]
        self.assertEqual(losses[0], losses[1])
        self.assertNotEqual(losses[2], losses[3])


HOLDER = """
import subprocess, sys
held = bytearray(b'x') * (int(sys.argv[1]) << 20)
more = subprocess.Popen([sys.executable, '-c', sys.argv[2], '48', ''], stdin=sys.stdin) if sys.argv[2] else None
print('ready', flush=True)
sys.stdin.read()
if more:
    more.wait()
"""


class Processes(unittest.TestCase):
    def test_memory_of_all_of_them(self):
        with subprocess.Popen([sys.executable, '-c', HOLDER, '32', HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            ready = [p.stdout.readline(), p.stdout.readline()]  # includes its child
            tree = row_process.tree_of([p.pid])
            total = row_process.pss_bytes(tree)
            alone = row_process.pss_bytes([p.pid])
            p.stdin.close()
        self.assertEqual((ready, len(tree)), (['ready\n'] * 2, 2))
        self.assertGreater(alone, 32 << 20)
        self.assertGreater(total - alone, 48 << 20)
        self.assertLess(total, 80 + 100 << 20)
        self.assertEqual(row_process.pss_bytes(tree), 0)

    def failed(self, *scripts, **more):
        with tempfile.TemporaryDirectory() as dir_, self.assertRaises(row_process.Failed) as failure:
            row_process.run_row([(['sh', '-c', script], dict(os.environ)) for script in scripts], os.path.join(dir_, 'log'), 0.05, **more)
        return str(failure.exception)

    def test_failures(self):
        self.assertEqual(self.failed('echo first >&2; echo why >&2; exit 3'), 'exit code 3: why')
        self.assertEqual(self.failed('exec sleep 600', 'echo the second >&2; exit 4'), 'exit code 4: the second')  # which ends the first
        # A peer that lost it, or that was ended for it, does not hide an abort.
        self.assertEqual(self.failed('echo reset >&2; exit 1', 'echo of no use >&2; echo the abort >&2; kill -ABRT $$'), 'exit code -6: the abort')
        self.assertEqual(self.failed('exec sleep 600', 'echo the abort >&2; kill -ABRT $$'), 'exit code -6: the abort')
        self.assertEqual(self.failed('exec sleep 600', limit_s=0.1), 'not done after 0.1 s')
        self.assertEqual(self.failed('echo of no interest'), 'it told of no step')

    def test_steps(self):
        step = '{"event": "step", "step": %d, "loss": %s, "ms": %s}'
        text = '\n'.join(['of no interest', step % (1, '2.5', '10'), step % (2, 'null', '5.5'), '{"event": "summary", "peer": "p 1"}'])
        with tempfile.TemporaryDirectory() as dir_:
            found = row_process.run_row([(['printf', '%s\n', text], dict(os.environ))], os.path.join(dir_, 'log'))
        self.assertEqual((found['ms'], found['losses'], found['peer']), ([10, 5.5], [2.5, None], 'p 1'))
        self.assertAlmostEqual(found['first_step_s'] - found['first_forward_s'], 0.01)

    BUSY = 'import time\nwhile time.process_time() < %s: pass\n'

    def test_cpu_time(self):
        """It includes the processes that one has waited for."""
        before = row_process.cpu_s_of_children()
        script = f'import subprocess, sys\n{self.BUSY % 0.3}subprocess.run([sys.executable, "-c", {self.BUSY % 0.2!r}])\nprint("ready", flush=True)\nsys.stdin.read()\n'
        with subprocess.Popen([sys.executable, '-c', script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            p.stdout.readline()
            found = row_process.cpu_s([p.pid])
            p.stdin.close()
        self.assertLess(0.45, found)
        self.assertLess(0.45, row_process.cpu_s_of_children() - before)
        self.assertEqual(row_process.cpu_s([p.pid]), 0)

    def test_cpu_time_of_the_start_does_not_count(self):
        step = "print('{\"event\": \"step\", \"loss\": 1, \"ms\": 1}', flush=True)\n"
        with tempfile.TemporaryDirectory() as dir_:
            found = row_process.run_row([([sys.executable, '-c', self.BUSY % 0.8 + step * 3], dict(os.environ))], os.path.join(dir_, 'log'))
        self.assertEqual(len(found['ms']), 3)
        self.assertLessEqual(0, found['cpu_s_per_step'])
        self.assertLess(found['cpu_s_per_step'], 0.3)


class Installed(unittest.TestCase):
    """Runs install_deepspeed.sh with a pip that records its arguments. Like the real one, it refuses to build
    without the build tools."""
    PIP = r"""#!/bin/sh
here=$(dirname "$0")
for word; do file=$word; done
{ echo "pip $* DS_BUILD_OPS=${DS_BUILD_OPS:-}"; grep == "$file"; } >>"$here/asked"
if grep -q ^wheel== "$file" && [ ! -f "$here/without" ]; then touch "$here/builds"; fi
if grep -q ^deepspeed== "$file" && [ ! -f "$here/builds" ]; then
    printf '  error: subprocess-exited-with-error\n\n  x Getting metadata\n      error: invalid command %s\n' "'bdist_wheel'"
    printf '  note: This error originates from a subprocess\nerror: metadata-generation-failed\n\nx Encountered error\nhint: See above for details.\n'
    exit 1
fi
"""

    def setUp(self):
        self.venv = tempfile.TemporaryDirectory()
        self.bin = os.path.join(self.venv.name, 'bin')
        self.failed = os.path.join(self.venv.name, 'deepspeed-failed')
        os.mkdir(self.bin)
        for name, text in [('pip', self.PIP), ('python', '#!/bin/sh\nexit 1\n')]:
            with open(os.path.join(self.bin, name), 'w', encoding='utf-8') as file:
                file.write(text)
            os.chmod(file.name, 0o755)

    def tearDown(self):
        self.venv.cleanup()

    def install(self):
        done = run(['sh', os.path.join(PEERS, 'install_deepspeed.sh'), self.venv.name])
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        try:
            with open(os.path.join(self.bin, 'asked'), encoding='utf-8') as file:
                asked = file.read().splitlines()
            os.remove(file.name)
        except FileNotFoundError:
            asked = []
        return done.stdout, asked

    def test_what_builds_it_comes_first(self):
        with open(os.path.join(PEERS, 'requirements-deepspeed.txt'), encoding='utf-8') as file:
            pins = [line for line in file.read().splitlines() if not line.startswith('#')]
        self.assertEqual([pin.split('==')[0] for pin in pins], ['setuptools', 'wheel', 'deepspeed'])
        told, asked = self.install()
        self.assertEqual(told, 'trying to install DeepSpeed\n')
        self.assertEqual([asked[1:3], asked[4:]], [pins[:2], pins])
        self.assertRegex(asked[0], r'^pip install --no-cache-dir -r \S+ DS_BUILD_OPS=$')
        self.assertRegex(asked[3], r'^pip install --no-cache-dir --no-build-isolation -r \S+requirements-deepspeed.txt DS_BUILD_OPS=0$')
        self.assertFalse(os.path.exists(self.failed))

    def test_why_not(self):
        without = os.path.join(self.bin, 'without')
        open(without, 'w', encoding='utf-8').close()
        told, asked = self.install()
        self.assertEqual(len(asked), 7)
        self.assertRegex(told, r"\Atrying to install DeepSpeed\nit does not install here \(\S+/deepspeed\.log\): error: invalid command 'bdist_wheel'\n\Z")
        self.assertEqual(self.install(), ('', []))  # it is not tried again
        os.remove(without)
        os.utime(self.failed, (0, 0))               # until it is older than the requested versions
        self.assertEqual(self.install()[0], 'trying to install DeepSpeed\n')
        self.assertFalse(os.path.exists(self.failed))

    def test_one_that_is_there_stays(self):
        with open(os.path.join(self.bin, 'python'), 'w', encoding='utf-8') as file:
            file.write('#!/bin/sh\nexit 0\n')
        self.assertEqual(self.install(), ('', []))


class WholeProgram(unittest.TestCase):
    def compare(self, *args):
        return run([sys.executable, os.path.join(PEERS, 'compare.py'), '--build', os.path.dirname(os.path.dirname(ZERO_BENCH)), *args])

    def test_our_own_rows(self):
        with tempfile.TemporaryDirectory() as dir_:
            common = [*TINY, '--batch=2', '--steps=8', '--dtype=f32', '--rows=plain,stage0,stage3', f'--work={dir_}', '--lr=0.01']
            out = os.path.join(dir_, 'page.md')
            done = self.compare(*common, '--rounds=2', f'--out={out}')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            with open(os.path.join(dir_, 'runs.jsonl'), encoding='utf-8') as f:
                runs = lines(f.read())
            with open(os.path.join(dir_, 'rows.jsonl'), encoding='utf-8') as f:
                rows = {row['who']: row for row in lines(f.read())}
            self.check_order(runs)
            for r in runs:
                self.assertAlmostEqual(report.tokens_per_s(r, 2, 16) / r['own_tokens_per_s'], 1, delta=1e-9)
                self.assertLess(0, r['first_forward_s'])
                self.assertLess(r['first_forward_s'], r['first_step_s'])
            for who, ranks in [('plain', 1), ('stage0', 2), ('stage3', 2)]:
                self.check_row(rows[who], who, ranks, dir_, [r for r in runs if r['who'] == who])
            with open(out, encoding='utf-8') as f:
                page = f.read()
            self.assertIn('| libzero, stage 3 | f32 | 2 x 1 |', page)
            self.assertIn('2 layers, 2 heads, 32 channels, 256 token ids; rows of 16 tokens, 2 for each rank', page)
            self.assertIn('of the rounds, which were interleaved\n', page)
            self.assertIn('the largest relative difference of the first 8 losses', page)
            version = run([ZERO_BENCH, '--version']).stdout.split()[-1]
            self.assertRegex(version, r'^\d+\.\d+\.\d+$')
            self.assertIn(f'\n- libzero {version}, this tree at ', page)
            self.check_added(common, dir_, done.stdout, out)

    def test_our_meshes(self):
        """tp and pp train on the micro-batches of one rank and of four."""
        with tempfile.TemporaryDirectory() as dir_:
            out = os.path.join(dir_, 'page.md')
            done = self.compare(*TINY, '--batch=2', '--steps=4', '--dtype=f32', '--rows=tp,pp,plain', '--rounds=1', f'--work={dir_}', '--lr=0.01', f'--out={out}')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            with open(os.path.join(dir_, 'runs.jsonl'), encoding='utf-8') as f:
                runs = {r['who']: r for r in lines(f.read())}
            with open(out, encoding='utf-8') as f:
                self.assertIn(', 2 for each rank and step, with tp for all ranks, with pp in each of 4 micro-batches; AdamW', f.read())
            accum, _ = train(1, *TINY, '--batch=2', '--steps=4', '--lr=0.01', '--accum=4', f'--data={os.path.join(dir_, "text")}')
        for r in runs.values():
            self.assertAlmostEqual(report.tokens_per_s(r, 2, 16) / r['own_tokens_per_s'], 1, delta=1e-9)
        self.assertEqual([(r['ranks'], r['threads'], r['micro_batches']) for r in runs.values()], [(2, 1, 1), (2, 1, 4), (1, 2, 1)])
        for found, expected in [(runs['tp']['losses'], runs['plain']['losses']), (runs['pp']['losses'], [event['loss'] for event in accum])]:
            self.assertEqual(report.loss_distance(found, expected)[1], 4)
            self.assertLess(report.loss_distance(found, expected)[0], 1e-5)

    def test_a_mesh_that_is_refused(self):
        with tempfile.TemporaryDirectory() as dir_:
            done = self.compare(*TINY, '--batch=2', '--steps=4', '--dtype=f32', '--rows=tp,pp', '--ranks=3', '--rounds=1', f'--work={dir_}', f'--out={dir_}/out')
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r'libzero, tp: not run: exit code \d+: .*--tp: 3 parts do not divide the 2 heads')
        self.assertRegex(done.stdout, r'libzero, pp: not run: exit code \d+: .*--pp: 3 stages are more than the 2 layers')

    def test_our_rows_of_a_folder(self):
        with tempfile.TemporaryDirectory() as dir_:
            folder, work, out = write_llama(os.path.join(dir_, 'a-llama')), os.path.join(dir_, 'work'), os.path.join(dir_, 'page.md')
            common = ['--context=16', '--batch=2', '--lr=0.01']
            done = self.compare(f'--model={folder}', *common, '--steps=4', '--dtype=f32', '--rows=plain,stage3,torch_tp,fsdp2', '--rounds=1', '--python=/bin/false',
                                f'--work={work}', f'--out={out}')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            self.assertIn('PyTorch tensor parallelism: not run: it is for a GPT-2', done.stdout)
            self.assertIn('PyTorch FSDP2: not run: torch is not there', done.stdout)
            with open(os.path.join(work, 'runs.jsonl'), encoding='utf-8') as f:
                runs = {r['who']: r for r in lines(f.read())}
            with open(out, encoding='utf-8') as f:
                self.assertIn('\n- a-llama: 2 layers, 4 heads, 32 channels, 256 token ids; all but', f.read())
            weights = os.path.join(work, 'weights-f32')
            for who, ranks, how in [('plain', 1, ['--plain', f'--model={folder}']), ('stage3', 2, ['--stage=3', f'--model={weights}'])]:
                steps, _ = train(ranks, *common, '--steps=4', f'--data={os.path.join(work, "text")}', f'--threads={3 - ranks}', *how)
                self.assertEqual(runs[who]['losses'], [event['loss'] for event in steps], who)
            done = self.compare(f'--model={weights}', *common, '--steps=4', '--dtype=f32', '--rows=plain', '--rounds=1', f'--work={work}-2')
            self.assertIn('zero-bench --plain: not run: it reads no weights, which the folder has', done.stdout)

    def test_commands_of_a_folder(self):
        """transformers and zero-bench read the same weights."""
        import compare
        o = argparse.Namespace(build='b', work='w', data='d', rows=['stage3'], device='host', ranks=2, threads=1, sizes=(2, 4, 32, 16, 256), model='m', folder='m',
                               batch=2, steps=4, lr=0.01, seed=1, compile=False, python='p')
        rows = compare.Rows(o)
        rows.weights['f32'] = 'weights'
        rows.batches = {2: 'two'}
        ours, theirs = rows.commands('stage3', 'f32')[0][0], [command for command, _ in rows.commands('fsdp2', 'f32')]
        self.assertEqual([x for x in ours if x.startswith(('--model', '--layers', '--context'))], ['--model=weights', '--context=16'])
        self.assertEqual(theirs[0], theirs[1])
        self.assertEqual([x for x in theirs[0] if x.startswith(('--model', '--weights', '--layers', '--context', '--batches'))],
                         ['--model=m', '--context=16', '--weights=weights', '--batches=two'])
        self.assertEqual([rows.modules([who]) for who in ('stage3', 'llmc', 'fsdp2', 'deepspeed1')],
                         [[], [], ['torch', 'transformers'], ['torch', 'transformers', 'deepspeed']])

    def test_commands_of_pytorchs_meshes(self):
        """torch_train.py and zero-bench get the same micro-batches."""
        import compare
        o = argparse.Namespace(build='b', work='w', data='d', rows=['tp'], device='host', ranks=2, threads=1, sizes=(2, 2, 32, 16, 256), model='gpt2-nano', folder=None,
                               batch=2, steps=4, lr=0.01, seed=1, compile=False, python='p')
        rows = compare.Rows(o)
        rows.weights['f32'] = 'weights'
        rows.batches = {1: 'one', 4: 'four'}
        for who, wanted in [('torch_tp', ['--how=tp', '--batches=one']), ('torch_pp', ['--how=pp', '--batches=four', '--micro-batches=4']),
                            ('torch_pp_patched', ['--how=pp-patched', '--batches=four', '--micro-batches=4'])]:
            (zero, env), (one, _) = rows.commands(who, 'f32')
            self.assertEqual((zero, env['RANK'], env['WORLD_SIZE']), (one, '0', '2'))
            self.assertEqual([x for x in zero if x.startswith(('--how', '--batches', '--micro'))], wanted)
        self.assertEqual(rows.commands('tp', 'f32')[0][0][-1:], ['--tp=2'])
        self.assertEqual(rows.commands('pp', 'f32')[0][0][-2:], ['--pp=2', '--accum=4'])

    def check_order(self, runs):
        rounds = [[r['who'] for r in runs[i:i + 3]] for i in (0, 3)]
        self.assertEqual([sorted(r) for r in rounds], [['plain', 'stage0', 'stage3']] * 2)
        self.assertNotEqual(rounds[0], rounds[1])

    def check_row(self, row, who, ranks, dir_, runs):
        how = ['--plain'] if who == 'plain' else [f'--stage={who[-1]}']
        steps, _ = train(ranks, *TINY, '--batch=2', '--steps=8', '--lr=0.01', f'--threads={3 - ranks}', f'--data={os.path.join(dir_, "text")}', *how)
        self.assertEqual(row['losses'], [event['loss'] for event in steps], who)
        self.assertEqual((row['ranks'], row['threads'], row['rounds'], row['loss_distance']), (ranks, 3 - ranks, 2, 0))
        self.assertEqual(row['tokens_per_s'], report.spread([report.tokens_per_s(r, 2, 16) for r in runs]))

    def check_added(self, common, dir_, before, out):
        text = os.path.join(dir_, 'text')
        with open(text, 'ab') as f:  # as if the sources had changed
            f.write(b'other sources')
        size = os.path.getsize(text)
        again = self.compare(*common, '--add', '--rounds=0', f'--out={out}')
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual([line for line in again.stdout.splitlines() if ' x ' in line], [line for line in before.splitlines() if ' x ' in line])
        self.assertEqual(os.path.getsize(text), size)
        with open(out, encoding='utf-8') as f:
            self.assertNotIn('interleaved', f.read())
        other = self.compare(*common, '--add', '--rounds=0', '--seed=4')
        self.assertEqual((other.returncode, other.stderr), (1, 'bench/peers: --add: --seed was 1\n'))
        other = self.compare(*common, '--add', '--rounds=0', '--compile')
        self.assertEqual((other.returncode, other.stderr), (1, 'bench/peers: --add: --compile was False\n'))
        self.assertTrue(os.path.exists(os.path.join(dir_, 'runs.jsonl')))

    def test_what_is_missing_is_said(self):
        with tempfile.TemporaryDirectory() as dir_:
            done = self.compare(*TINY, '--rows=torch,fsdp2,torch_tp,torch_pp,deepspeed3,llmc', '--dtype=f32', '--rounds=1', '--python=/bin/false', f'--work={dir_}', f'--out={dir_}/out')
            self.assertEqual(done.returncode, 1)
            for who in ('PyTorch, plain', 'PyTorch FSDP2', 'PyTorch tensor parallelism', 'PyTorch 1F1B', 'DeepSpeed ZeRO-3'):
                self.assertIn(f'{who}: not run: torch is not there', done.stdout)
            self.assertIn('llm.c on the CPU: not run: --llmc DIR was not given', done.stdout)

    def test_its_end_ends_its_rows(self):
        with tempfile.TemporaryDirectory() as dir_:
            command = [sys.executable, os.path.join(PEERS, 'compare.py'), '--build', os.path.dirname(os.path.dirname(ZERO_BENCH)), *TINY, '--rows=stage0',
                       '--dtype=f32', '--steps=100000000', f'--work={dir_}']
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as p:
                while len(tree := row_process.tree_of([p.pid])) < 4:  # zero-run and two ranks
                    self.assertIsNone(p.poll())
                p.terminate()
                self.assertEqual(p.wait(), 143)
            while any(row_process.pss_bytes([pid]) for pid in tree):
                pass

    def test_wrong_options(self):
        for args, told in [(['--rows=plain,fsdp3'], 'there is no fsdp3'), (['--dtype=f16'], 'there is no f16'), (['--steps=2'], '--steps: at least 3'),
                           (['--model=gpt2-125M'], 'No such file or directory'), ([f'--model={PEERS}/llama-100M', '--heads=2'], '--vocab: not with a folder')]:
            done = self.compare(*args)
            self.assertEqual(done.returncode, 2)
            self.assertIn(told, done.stderr)

    def test_sizes_are_zero_benchs(self):
        """The models of model_sizes.py have the numbers of parameters and operations that zero-bench prints."""
        import model_sizes
        with open(os.path.join(ROOT, 'bench', 'model', 'model_config.c'), encoding='utf-8') as f:
            source = f.read()
        found = re.findall(r'{GPT2\((\d+), (\d+), (\d+), \d+, (\d+)\), ([\d.e-]+)}', source)  # ordered by name, which both have
        self.assertEqual([(*map(int, sizes), float(lr)) for *sizes, lr in found], list(model_sizes.MODELS.values()))
        self.assertEqual(re.findall(r'{"(gpt2-[^"]+)", ', source), list(model_sizes.MODELS))
        self.assertEqual([float(lr) for lr in re.findall(r'default_lr = ([\d.e-]+);', source)], [model_sizes.FOLDER_LR])
        _, summary = train(1, *TINY, '--batch=2', '--steps=1')
        self.assertEqual(summary['flop_per_token'], model_sizes.flop_per_token(2, 32, 16, 256))


if __name__ == '__main__':
    unittest.main()
