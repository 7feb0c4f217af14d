# SPDX-License-Identifier: Apache-2.0
"""Runs zero-bench and zero-run for tests, and reads their output."""
import json
import os
import re
import subprocess
import sys

ZERO_BENCH, ZERO_RUN = map(os.path.abspath, sys.argv[1:3])
del sys.argv[1:3]  # the rest is unittest's

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
with open(os.path.join(ROOT, 'zero', 'types.h'), encoding='utf-8') as header:  # the kinds listed there
    OPTIMIZERS = re.findall(r'X\(\w+, \d+, (\w+), "', re.search(r'#define ZERO_OPTIMIZER_MAP\(X\)(.*?)\n\n', header.read(), re.DOTALL)[1])
TEXT = os.path.dirname(os.path.abspath(__file__))  # these files are text to learn from
TINY = ['--layers=2', '--heads=2', '--channels=32', '--context=16', '--batch=2', '--data', TEXT]
STEP_KEYS = ['event', 'step', 'loss', 'grad_norm', 'lr', 'ms', 'tokens_per_s', 'mfu', 'seconds_left']
STATES_KEYS = ['grad_sum_dtype', 'masters', 'moments', 'states']
SUMMARY_KEYS = ['event', 'world', 'stage', 'device', 'loss', 'state_sha256', 'bytes', 'planned_bytes', 'peak_rss_bytes',
                'peak_device_bytes', 'ms_median', 'tokens_per_s', 'flop_per_token', 'mfu', 'collectives', 'activation_bytes',
                *STATES_KEYS]
CATEGORIES = ['param_shards', 'param_slots', 'grad_shards', 'grad_slots', 'grad_sums', 'grad_gathered', 'master', 'moments', 'state_buffers', 'snapshot', 'comm',
              'exchange', 'total']


def run(command, **more):
    """Runs a command to its end, without the variables of an outer launcher and without ZERO_*."""
    env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}
    env.update(more.pop('env', {}))
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, **more)
    done.stderr = re.sub(r"==\d+==WARNING: ASan doesn't fully support makecontext.*\n", '', done.stderr)  # simulated ranks use it
    return done


def bench(*args, **more):
    return run([ZERO_BENCH, *map(str, args)], **more)


def refuse_constant(name):
    raise ValueError(f'{name} is not JSON')


def lines(text):
    """Reads JSON lines strictly: NaN and Infinity are refused."""
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def train(world, *args, **more):
    """Returns the step events and the summary of a run on so many ranks."""
    command = [ZERO_BENCH, 'train', '--json', *map(str, args)]
    if world > 1:
        command = [ZERO_RUN, '-n', str(world), '--raw', *command]
    done = run(command, **more)
    assert done.returncode == 0, f'{command}: exit code {done.returncode}\n{done.stderr}'
    *steps, summary = lines(done.stdout)
    return steps, summary


# Small models of each architecture, as config.json says them.
KIND_SIZES = {'vocab_size': 259, 'hidden_size': 48, 'num_hidden_layers': 4, 'num_attention_heads': 8, 'num_key_value_heads': 4, 'intermediate_size': 72,
              'max_position_embeddings': 64, 'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'bos_token_id': 1, 'eos_token_id': 2}
KINDS = {
    'llama': {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'tie_word_embeddings': False, 'head_dim': 8,
              'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 500000.0, 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 3.0,
                                  'original_max_position_embeddings': 24}},
    'mistral': {'architectures': ['MistralForCausalLM'], 'model_type': 'mistral', 'tie_word_embeddings': False, 'num_key_value_heads': 8, 'sliding_window': None},
    'qwen2': {'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'tie_word_embeddings': True},
    'qwen3': {'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'tie_word_embeddings': True, 'head_dim': 16, 'attention_bias': False},
}


def write_folders(folder):
    """Makes a folder in this one for each of KINDS, with a config.json and no weights."""
    for kind, fields in KINDS.items():
        os.mkdir(os.path.join(folder, kind))
        with open(os.path.join(folder, kind, 'config.json'), 'w', encoding='utf-8') as f:
            json.dump(KIND_SIZES | fields, f)
