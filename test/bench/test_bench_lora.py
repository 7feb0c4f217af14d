# SPDX-License-Identifier: Apache-2.0
"""zero-bench train --lora: the same bits at every stage and world, the folders of PEFT, merged models, and the
adapters that are refused."""
import json
import math
import os
import random
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ZERO_BENCH, bench, run, train  # noqa: E402

REFERENCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'llama', 'references')
VOCAB, CONTEXT, RANK = 67, 32, 4
TARGETS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']


def folder_of(name):
    return os.path.join(REFERENCES, name)


def weights_of(path):
    """Returns what a file of safetensors has: name: (dtype, shape, values)."""
    with open(path, 'rb') as f:
        n, = struct.unpack('<Q', f.read(8))
        header, data = json.loads(f.read(n)), f.read()
    assert header.pop('__metadata__')['format'] == 'pt'
    weights = {}
    for name, t in header.items():
        raw = data[slice(*t['data_offsets'])]
        if t['dtype'] == 'BF16':
            raw = b''.join(b'\0\0' + raw[i:i + 2] for i in range(0, len(raw), 2))
        weights[name] = t['dtype'], t['shape'], struct.unpack(f'<{len(raw) // 4}f', raw)
    return weights


class Case(unittest.TestCase):
    """Has a folder with tokens of which a model can learn something."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        draw, ids = random.Random(1), [0]
        while len(ids) < 5000:
            ids.append((ids[-1] * 7 + 3) % VOCAB if draw.random() < 0.7 else draw.randrange(VOCAB))
        with open(self.at('tokens'), 'wb') as f:
            f.write(struct.pack(f'<{len(ids)}H', *ids))

    def at(self, *names):
        return os.path.join(self.folder, *names)

    def options(self, model, *more, steps=3):
        return [f'--model={model}', f'--context={CONTEXT}', f'--tokens={self.at("tokens")}', '--token-bytes=2', '--batch=2',
                '--lr=1e-2', '--warmup=0', f'--steps={steps}', *more]

    def train(self, world, model, *more, **others):
        return train(world, *self.options(model, *more, **others))

    def adapters(self, name='out'):
        return weights_of(self.at(name, 'adapter_model.safetensors'))


class Training(Case):
    def test_the_same_bits_at_every_stage_and_world(self):
        for name, dtype in (('llama', 'f32'), ('qwen2', 'bf16'), ('qwen3', 'f32')):
            runs = []
            for world, more in ((1, ['--accum=4']), (2, ['--stage=1', '--accum=2']), (2, ['--stage=2', '--accum=2']),
                                (4, ['--stage=3', '--prefetch=0']), (2, ['--pp=2', '--accum=4', '--schedule=zero-bubble']),
                                (4, ['--pp=2', '--stage=2', '--accum=2']), (2, ['--stage=3', '--accum=2', '--recompute']),
                                (2, ['--pp=2', '--accum=4', '--schedule=zero-bubble', '--recompute'])):
                steps, summary = self.train(world, folder_of(name), f'--lora={RANK}', f'--dtype={dtype}', *more)
                self.assertEqual(summary['bytes'], summary['planned_bytes'])
                runs.append(([s['loss'] for s in steps], summary['state_sha256']))
            self.assertEqual(runs[1:], runs[:1] * 7, name)
            self.assertLess(runs[0][0][-1], runs[0][0][0])

    def test_other_axes_compute_the_same(self):
        for name in ('llama', 'qwen2', 'qwen3'):
            steps, _ = self.train(1, folder_of(name), f'--lora={RANK}', '--accum=2')
            for world, more in ((2, ['--tp=2']), (2, ['--tp=2', '--sequence-parallel', '--stage=3']),
                                (4, ['--tp=2', '--sequence-parallel', '--pp=2', '--schedule=zero-bubble']),
                                (2, ['--cp=2', '--stage=3']), (4, ['--tp=2', '--cp=2', '--cp-form=ring'])):
                others, _ = self.train(world, folder_of(name), f'--lora={RANK}', '--accum=2', *more)
                for a, b in zip(steps, others):
                    self.assertLess(abs(a['loss'] / b['loss'] - 1), 1e-5, (name, more))
                    self.assertLess(abs(a['grad_norm'] / b['grad_norm'] - 1), 1e-4, (name, more))

    def test_frozen_weights_have_no_gradients_and_no_state(self):
        _, summary = self.train(1, folder_of('llama'), f'--lora={RANK}', '--lora-targets=q_proj,down_proj', '--dtype=bf16')
        n = 2 * RANK * (32 + 64 + 48 + 32)  # two layers; of q and of down
        self.assertEqual(summary['bytes']['moments'], 2 * summary['bytes']['master'])
        self.assertTrue(4 * n <= summary['bytes']['master'] < 5 * n, (summary['bytes'], n))  # parts are rounded up
        self.assertLess(summary['bytes']['grad_shards'] + summary['bytes']['grad_slots'], 8 * n)
        whole = self.train(1, folder_of('llama'))[1]['flop_per_token']
        attention = 12 * 2 * 64 * CONTEXT
        frozen = (whole - attention) / 6
        self.assertEqual(summary['flop_per_token'], 4 * frozen + 6 * n + attention)

    def test_a_resumed_run_goes_on_with_the_same_bits(self):
        more = [f'--lora={RANK}', '--stage=3', f'--save={self.at("saved")}']
        self.train(2, folder_of('llama'), *more, '--prefetch=0', steps=2)
        _, resumed = self.train(2, folder_of('llama'), *more, '--load=latest', steps=4)
        _, whole = self.train(2, folder_of('llama'), f'--lora={RANK}', steps=4)
        self.assertEqual(resumed['state_sha256'], whole['state_sha256'])
        model, saved = f'--model={folder_of("llama")}', f'--load={self.at("saved")}'
        for args in (['train', *self.options(folder_of('llama'), steps=5)], ['export', model, f'--out-merged={self.at("merged")}']):
            done = bench(*args, saved, f'--lora={RANK}', '--lora-alpha=3')  # no tensor says what it was
            self.assertEqual(done.returncode, 2)
            self.assertIn('--load: saved with --lora-alpha 8; here it is 3', done.stderr)


class Folders(Case):
    def test_a_folder_of_peft(self):
        self.train(4, folder_of('llama'), f'--lora={RANK}', '--lora-alpha=6', '--lora-targets=k_proj,down_proj', '--tp=2',
                   '--stage=3', f'--export={self.at("out")}')
        self.assertEqual(sorted(os.listdir(self.at('out'))), ['adapter_config.json', 'adapter_model.safetensors'])
        with open(self.at('out', 'adapter_config.json'), encoding='utf-8') as f:
            config = json.load(f)
        self.assertEqual(config, {
            'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': folder_of('llama'), 'r': RANK,
            'lora_alpha': 6.0, 'lora_dropout': 0.0, 'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True,
            'init_lora_weights': True, 'target_modules': ['k_proj', 'down_proj']})
        shapes = {}
        for layer in range(2):
            at = f'base_model.model.model.layers.{layer}.'
            shapes[at + 'self_attn.k_proj.lora_A.weight'] = [RANK, 32]
            shapes[at + 'self_attn.k_proj.lora_B.weight'] = [32, RANK]
            shapes[at + 'mlp.down_proj.lora_A.weight'] = [RANK, 48]
            shapes[at + 'mlp.down_proj.lora_B.weight'] = [32, RANK]
        self.assertEqual({name: shape for name, (_, shape, _) in self.adapters().items()}, shapes)

    def test_first_values_are_those_of_peft(self):
        self.train(1, folder_of('llama'), '--lora=64', '--lr=0', f'--export={self.at("out")}', steps=1)
        for name, (_, shape, values) in self.adapters().items():
            if 'lora_B' in name:
                self.assertEqual(set(values), {0.0})
                continue
            deviation = 1 / math.sqrt(3 * shape[1])
            self.assertLess(abs(math.sqrt(sum(x * x for x in values) / len(values)) / deviation - 1), 0.1, name)
            self.assertLess(abs(sum(values) / len(values)), 0.1 * deviation, name)

    def test_adapters_come_back_with_the_same_bits(self):
        for dtype in ('f32', 'bf16'):
            out, again = 'out-' + dtype, 'again-' + dtype
            self.train(2, folder_of('qwen2'), f'--lora={RANK}', '--tp=2', f'--dtype={dtype}', f'--export={self.at(out)}')
            for _ in range(2):  # the second one replaces the first
                self.train(2, folder_of('qwen2'), f'--adapter={self.at(out)}', '--stage=3', '--lr=0', f'--dtype={dtype}',
                           f'--export={self.at(again)}')
            self.assertEqual(self.adapters(again), self.adapters(out))

    def test_merged_weights_compute_the_same(self):
        for name, dtype, world, more in (('llama', 'f32', 4, ['--stage=3', '--tp=2']), ('qwen2', 'bf16', 2, ['--stage=3']),
                                         ('qwen3', 'f32', 4, ['--pp=2', '--tp=2', '--accum=2'])):
            out, merged = self.at('out-' + name), self.at('merged-' + name)
            self.train(world, folder_of(name), f'--lora={RANK}', f'--dtype={dtype}', *more, f'--export={out}',
                       f'--export-merged={merged}')
            adapted, whole = (self.train(1, *args, f'--dtype={dtype}', '--lr=0', steps=1)[0][0]['loss'] for args in (
                (folder_of(name), f'--adapter={out}'), (merged,)))
            self.assertLess(abs(adapted / whole - 1), 1e-6 if dtype == 'f32' else 2e-3, name)
            before, after = weights_of(os.path.join(folder_of(name), 'model.safetensors')), weights_of(
                os.path.join(merged, 'model.safetensors'))
            self.assertEqual(before.keys(), after.keys())
            for weight, (_, shape, values) in before.items():
                _, now, changed = after[weight]
                self.assertEqual(now, shape)
                self.assertEqual(values == changed, 'proj.weight' not in weight, weight)  # the others are frozen

    def test_export_of_a_checkpoint(self):
        self.train(2, folder_of('llama'), f'--lora={RANK}', f'--save={self.at("saved")}', f'--export={self.at("out")}',
                   f'--export-merged={self.at("merged")}')
        done = bench('export', f'--model={folder_of("llama")}', f'--context={CONTEXT}', f'--lora={RANK}',
                     f'--load={self.at("saved")}', f'--out={self.at("again")}', f'--out-merged={self.at("merged again")}')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.adapters('again'), self.adapters())
        self.assertEqual(*(weights_of(self.at(name, 'model.safetensors')) for name in ('merged', 'merged again')))


class Refusals(Case):
    def refused(self, text, *args, code=2):
        done = run([ZERO_BENCH, 'train', *self.options(folder_of('llama'), *args)])
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(text, done.stderr)

    def test_options(self):
        self.refused('--lora: not with --plain', '--lora=4', '--plain')
        self.refused('--lora-alpha: needs --lora', '--lora-alpha=4')
        self.refused("'x_proj' is not one of q_proj", '--lora=4', '--lora-targets=q_proj,x_proj')
        self.refused('--export-merged: needs --lora or --adapter', '--export-merged=x')
        done = bench('train', '--lora=4')
        self.assertIn('--lora: needs the folder of a model as --model', done.stderr)
        done = bench('train', '--adapter=x')
        self.assertIn('--adapter: needs the folder of a model as --model', done.stderr)

    def test_kinds_of_adapters(self):
        plain = {'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8, 'target_modules': ['q_proj', 'v_proj'], 'bias': 'none',
                 'modules_to_save': None, 'rank_pattern': {}, 'use_dora': False, 'lora_dropout': 0.0, 'megatron_core': 'x'}
        os.mkdir(self.at('adapter'))
        for change, text in (
                ({'use_rslora': True}, 'use_rslora has a value'), ({'use_dora': True}, 'use_dora has a value'),
                ({'rank_pattern': {'q_proj': 8}}, 'rank_pattern has a value'), ({'bias': 'all'}, 'bias is not "none"'),
                ({'modules_to_save': ['lm_head']}, 'modules_to_save has a value'), ({'peft_type': 'LOHA'}, 'peft_type is not'),
                ({'target_modules': ['q_proj', 'lm_head']}, 'target_modules has "lm_head"'),
                ({'target_modules': 'q_proj|v_proj'}, 'target_modules is not a list'), ({'r': 0}, 'r is missing, or not above 0'),
                ({'init_lora_weights': 'pissa'}, 'init_lora_weights is "pissa"')):
            with open(self.at('adapter', 'adapter_config.json'), 'w', encoding='utf-8') as f:
                json.dump({**plain, **change}, f)
            self.refused(text, f'--adapter={self.at("adapter")}')
        with open(self.at('adapter', 'adapter_config.json'), 'w', encoding='utf-8') as f:
            json.dump(plain, f)
        self.refused('the adapters there have other ranks', f'--adapter={self.at("adapter")}', '--lora=8')
        self.refused('the adapters there have other targets', f'--adapter={self.at("adapter")}', '--lora=4')
        self.refused('adapter_model.safetensors', f'--adapter={self.at("adapter")}', code=1)


if __name__ == '__main__':
    unittest.main()
