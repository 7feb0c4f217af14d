# SPDX-License-Identifier: Apache-2.0
"""GPT-2 in PyTorch (Radford et al. 2019), the model of all rows of PyTorch and DeepSpeed.

As in bench/gpt2/, it has a tied head, tanh GELU and no dropout. Its parameters have the names of the published checkpoints, which zero-bench export writes, too.
"""
import glob
import os

import torch
from torch import nn
from torch.nn import functional

TRANSPOSED = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # published as (in, out)


class Attention(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x), approximate='tanh'))


class Layer(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)  # eps 1e-5, as GPT-2 has it
        self.attn, self.mlp = Attention(heads, channels), Mlp(channels)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, channels, context, vocab):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(context, channels)
        self.h = nn.ModuleList(Layer(heads, channels) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.loss(self.ln_f(x), self.wte.weight, targets)

    @staticmethod
    def loss(x, weight, targets):
        logits = functional.linear(x, weight)
        return functional.cross_entropy(logits.float().view(-1, weight.shape[0]), targets.reshape(-1))


def initialise(model):
    """Draws weights as GPT-2 does."""
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            nn.init.zeros_(p)
        elif p.dim() == 2:
            nn.init.normal_(p, std=0.02 / (2 * len(model.h)) ** 0.5 if name.endswith('c_proj.weight') else 0.02)
        else:
            nn.init.ones_(p)


def load(model, folder):
    """Reads all weights from a folder of safetensors files, one tensor at a time. Missing or unknown names are errors."""
    from safetensors import safe_open
    left = dict(model.named_parameters())
    for path in sorted(glob.glob(os.path.join(folder, '*.safetensors'))):
        with safe_open(path, 'pt') as file, torch.no_grad():
            for name in file.keys():
                value = file.get_tensor(name)
                left.pop(name).copy_(value.t() if name.endswith(TRANSPOSED) else value)
    if left:
        raise KeyError(f'{folder} has no {", ".join(left)}')


def build(sizes, device, folder):
    """An fp32 model of (layers, heads, channels, context, vocab). Weights come from the folder, or are drawn if it is None."""
    with torch.device('meta'):  # draws nothing
        model = Gpt2(*sizes)
    model.to_empty(device=device)
    if folder:
        load(model, folder)
    else:
        initialise(model)
    return model
