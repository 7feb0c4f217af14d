# SPDX-License-Identifier: Apache-2.0
"""Writes the inputs of all rows: text, batches, and weights in each program's format. Standard library only."""
import array
import glob
import json
import os
import shutil
import subprocess
import sys

TEXT_FOLDERS = ('bench', 'comm', 'kernels', 'shard', 'zero')
MAX_TEXT = 16 << 20  # BYTES_DATA_MAX of bench/train/bytes_data.h
MASK = (1 << 64) - 1
PACK = 'I' if array.array('I').itemsize == 4 else 'L'

# llm.c's order of tensors, by the names of the published checkpoints. %d: one tensor per layer, stacked.
LLMC_ORDER = ['wte.weight', 'wpe.weight', 'h.%d.ln_1.weight', 'h.%d.ln_1.bias', 'h.%d.attn.c_attn.weight', 'h.%d.attn.c_attn.bias',
              'h.%d.attn.c_proj.weight', 'h.%d.attn.c_proj.bias', 'h.%d.ln_2.weight', 'h.%d.ln_2.bias', 'h.%d.mlp.c_fc.weight',
              'h.%d.mlp.c_fc.bias', 'h.%d.mlp.c_proj.weight', 'h.%d.mlp.c_proj.bias', 'ln_f.weight', 'ln_f.bias']
TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # published as (in, out); llm.c has (out, in)


def write_text(root, path):
    """Concatenates the sources of this tree."""
    left = MAX_TEXT
    with open(path, 'wb') as out:
        for folder in TEXT_FOLDERS:
            for source in sorted(glob.glob(os.path.join(root, folder, '**', '*.[ch]'), recursive=True)):
                with open(source, 'rb') as f:
                    left -= out.write(f.read(left))


def random_bits(x):
    """Computes what random_bits in bench/random_bits.h does."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def write_batches(text_path, path, steps, ranks, batch, context, seed):
    """Writes the batches that zero-bench train draws from a text, as int32 of (step, rank, row, context + 1).

    The draws are those of bytes_data_sample in bench/train/bytes_data.c.
    """
    with open(text_path, 'rb') as f:
        text = f.read()
    if len(text) <= context:
        raise ValueError(f'{text_path} has {len(text)} bytes, and a row takes {context + 1}')
    with open(path, 'wb') as out:
        for step in range(steps):
            for rank in range(ranks):
                which = random_bits((random_bits((random_bits(seed) + step) & MASK) + rank) & MASK)
                for row in range(batch):
                    at = random_bits((which + row) & MASK) % (len(text) - context)
                    array.array(PACK, list(text[at:at + context + 1])).tofile(out)


def run(command, log):
    with open(log, 'w', encoding='utf-8') as f:
        code = subprocess.run(command, stdout=f, stderr=f, check=False).returncode
    if code:
        with open(log, encoding='utf-8', errors='replace') as f:
            sys.exit(f'bench/peers: exit code {code} of {" ".join(command)}\n{f.read()[-2000:]}')


def write_weights(zero_bench, model, dtype, seed, text_path, folder):
    """Writes zero-bench's initial weights, after a step with learning rate 0, as a Hugging Face folder."""
    shutil.rmtree(folder, ignore_errors=True)
    run([zero_bench, 'train', *model, f'--dtype={dtype}', f'--seed={seed}', f'--data={text_path}', '--batch=1', '--steps=1', '--lr=0',
         f'--export={folder}'], folder + '.log')


class Safetensors:
    """The f32 tensors in a folder of safetensors files; read(name) gives the shape and an array of values."""

    def __init__(self, folder):
        self.where = {}
        for path in glob.glob(os.path.join(folder, '*.safetensors')):
            with open(path, 'rb') as f:
                n = int.from_bytes(f.read(8), 'little')
                for name, about in json.loads(f.read(n)).items():
                    if name != '__metadata__':
                        self.where[name] = path, 8 + n + about['data_offsets'][0], about

    def read(self, name):
        path, at, about = self.where[name]
        if about['dtype'] != 'F32':
            raise ValueError(f'{path}: {name} is {about["dtype"]}, not F32')
        values = array.array('f')
        with open(path, 'rb') as f:
            f.seek(at)
            values.fromfile(f, (about['data_offsets'][1] - about['data_offsets'][0]) // 4)
        return about['shape'], values


def transposed(shape, values):
    _, columns = shape
    answer = array.array('f')
    for c in range(columns):
        answer.extend(values[c::columns])
    return answer


def write_llmc(weights, sizes, path):
    """Writes the weights in llm.c's format: a header of 256 ints (version 3), then fp32 tensors."""
    layers, heads, channels, context, vocab = sizes
    files = Safetensors(weights)
    header = array.array('i', [20240326, 3, context, vocab, layers, heads, channels, vocab] + [0] * 248)
    with open(path, 'wb') as out:
        header.tofile(out)
        for pattern in LLMC_ORDER:
            for layer in range(layers if '%d' in pattern else 1):
                name = pattern % layer if '%d' in pattern else pattern
                shape, values = files.read(name)
                (transposed(shape, values) if name.endswith(TRANSPOSED) else values).tofile(out)
