#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures PyTorch's matrix products and attention on this GPU, as one JSON line to compare with zero-bench kernels.

    kernels_peer.py [--gemm M,N,K] [--attention B,T,NH,HS] [--dtype bf16|f32] [--rounds 21]

The method is that of zero-bench kernels: random operands, unmeasured warm-up rounds, a few products between two events
in each round, and the median of the rounds. f32 is full fp32, not TF32.
"""
import argparse
import json
import statistics
import sys

N_WARM_ROUNDS, N_RUNS = 3, 5


def median_seconds(torch, rounds, run):
    seconds = []
    for round_ in range(-N_WARM_ROUNDS, rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(N_RUNS):
            run()
        end.record()
        torch.cuda.synchronize()
        if round_ >= 0:
            seconds.append(start.elapsed_time(end) * 1e-3 / N_RUNS)
    return statistics.median(seconds)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--gemm', default='8192,8192,8192')
    p.add_argument('--attention', default='8,1024,12,64')
    p.add_argument('--dtype', choices=['bf16', 'f32'], default='bf16')
    p.add_argument('--rounds', type=int, default=21)
    o = p.parse_args()
    m, n, k = (int(x) for x in o.gemm.split(','))
    rows, context, heads, size = (int(x) for x in o.attention.split(','))
    import torch
    if not torch.cuda.is_available():
        sys.exit('kernels_peer.py: PyTorch finds no usable GPU')
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = {'bf16': torch.bfloat16, 'f32': torch.float32}[o.dtype]

    def random(*shape):
        return (torch.rand(*shape, device='cuda') * 2 - 1).to(dtype)

    a, b, c = random(m, k), random(k, n), torch.empty(m, n, device='cuda', dtype=dtype)
    gemm = median_seconds(torch, o.rounds, lambda: torch.matmul(a, b, out=c))
    q, k_, v = (random(rows, heads, context, size).requires_grad_() for _ in range(3))
    dy = random(rows, heads, context, size)

    def attend():
        y = torch.nn.functional.scaled_dot_product_attention(q, k_, v, is_causal=True)
        torch.autograd.grad(y, (q, k_, v), dy)

    attention = median_seconds(torch, o.rounds, attend)
    print(json.dumps({'event': 'kernels_peer', 'peer': f'torch {torch.__version__}', 'gpu': torch.cuda.get_device_name(),
                      'dtype': o.dtype, 'rounds': o.rounds, 'gemm': [m, n, k], 'gemm_tflop_per_s': 2 * m * n * k / gemm * 1e-12,
                      'attention': [rows, context, heads, size],
                      'attention_tflop_per_s': 7 * rows * heads * context * context * size / attention * 1e-12}))


if __name__ == '__main__':
    main()
