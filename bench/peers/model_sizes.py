# SPDX-License-Identifier: Apache-2.0
"""The sizes of zero-bench's models, for programs that train the same models."""
import json
import os

# layers, heads, channels, vocab, learning rate; as in bench/model/model_config.c
MODELS = {
    'gpt2-nano': (6, 6, 96, 256, 2e-3), 'gpt2-124M': (12, 12, 768, 50257, 6e-4), 'gpt2-355M': (24, 16, 1024, 50257, 3e-4),
    'gpt2-774M': (36, 20, 1280, 50257, 2.5e-4), 'gpt2-1.5B': (48, 25, 1600, 50257, 2e-4),
}
FOLDER_LR = 2e-5  # of a folder's model, as in bench/model/model_config.c
N_WARMUP_STEPS = 10  # steps over which the learning rate ramps up (--warmup in bench/train/train_cmd.c)
N_WARM_STEPS = 2  # first steps that a run's median leaves out (bench/report/report.c)


def add_options(p):
    """Adds the options that choose a model."""
    p.add_argument('--model', default='gpt2-124M', help=f'one of {", ".join(MODELS)}, or a folder of a Llama with config.json (gpt2-124M)')
    for name in ('layers', 'heads', 'channels', 'vocab'):
        p.add_argument('--' + name, type=int, help="instead of the model's own number; not with a folder")


def read_options(p, o):
    """Fills in o.sizes, o.lr, and o.folder, which is None for a GPT-2."""
    own = o.layers, o.heads, o.channels, o.vocab
    o.folder = None
    if o.model not in MODELS:
        o.folder = o.model = os.path.abspath(o.model)
    if o.folder and any(own):
        p.error('--layers, --heads, --channels, --vocab: not with a folder')
    try:
        *preset, lr = folder_sizes(o.folder) if o.folder else MODELS[o.model]
    except (OSError, ValueError, KeyError) as fault:
        p.error(f'--model: {fault}; it is one of {", ".join(MODELS)}, or a folder with the config.json of a Llama')
    layers, heads, channels, vocab = (given or number for given, number in zip(own, preset))
    o.sizes = layers, heads, channels, o.context, vocab
    o.lr = o.lr if o.lr is not None else lr


def folder_sizes(folder):
    """The same numbers as in MODELS, of a Hugging Face folder."""
    with open(os.path.join(folder, 'config.json'), encoding='utf-8') as f:
        config = json.load(f)
    return (*(config[key] for key in ('num_hidden_layers', 'num_attention_heads', 'hidden_size', 'vocab_size')), FOLDER_LR)


def flop_per_token(layers, channels, context, vocab):
    """Counts as bench/gpt2/gpt2_ops.c does (Chowdhery et al., arXiv:2204.02311, appendix B)."""
    weights = vocab * channels + layers * (12 * channels * channels + 13 * channels) + 2 * channels
    return 6 * weights + 12 * layers * channels * context
