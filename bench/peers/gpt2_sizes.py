# SPDX-License-Identifier: Apache-2.0
"""The sizes of zero-bench's models, for programs that train the same models."""

# layers, heads, channels, vocab, learning rate; as in bench/model/model_config.c
MODELS = {
    'gpt2-nano': (6, 6, 96, 256, 2e-3), 'gpt2-124M': (12, 12, 768, 50257, 6e-4), 'gpt2-355M': (24, 16, 1024, 50257, 3e-4),
    'gpt2-774M': (36, 20, 1280, 50257, 2.5e-4), 'gpt2-1.5B': (48, 25, 1600, 50257, 2e-4),
}
N_WARMUP_STEPS = 10  # steps over which the learning rate ramps up (--warmup in bench/train/train_cmd.c)
N_WARM_STEPS = 2  # first steps that a run's median leaves out (bench/report/report.c)


def flop_per_token(layers, channels, context, vocab):
    """Counts as bench/gpt2/gpt2_ops.c does (Chowdhery et al., arXiv:2204.02311, appendix B)."""
    weights = vocab * channels + layers * (12 * channels * channels + 13 * channels) + 2 * channels
    return 6 * weights + 12 * layers * channels * context
