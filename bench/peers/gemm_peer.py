#!/usr/bin/env python3
"""How fast PyTorch multiplies matrices on this GPU, as one JSON line, to be held against zero-bench kernels.

    gemm_peer.py [--gemm M,N,K] [--dtype bf16|f32] [--rounds 21]

The method is zero-bench kernels': random operands, warm-up rounds left out, each round a few products between two events, the
median of the rounds. f32 is full fp32, not TF32.
"""
import argparse
import json
import statistics
import sys

N_WARM_ROUNDS, N_RUNS = 3, 5


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--gemm', default='8192,8192,8192')
    p.add_argument('--dtype', choices=['bf16', 'f32'], default='bf16')
    p.add_argument('--rounds', type=int, default=21)
    o = p.parse_args()
    m, n, k = (int(x) for x in o.gemm.split(','))
    import torch
    if not torch.cuda.is_available():
        sys.exit('gemm_peer.py: PyTorch finds no usable GPU')
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = {'bf16': torch.bfloat16, 'f32': torch.float32}[o.dtype]
    a = (torch.rand(m, k, device='cuda') * 2 - 1).to(dtype)
    b = (torch.rand(k, n, device='cuda') * 2 - 1).to(dtype)
    c = torch.empty(m, n, device='cuda', dtype=dtype)
    seconds = []
    for round_ in range(-N_WARM_ROUNDS, o.rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(N_RUNS):
            torch.matmul(a, b, out=c)
        end.record()
        torch.cuda.synchronize()
        if round_ >= 0:
            seconds.append(start.elapsed_time(end) * 1e-3 / N_RUNS)
    print(json.dumps({'event': 'gemm_peer', 'peer': f'torch {torch.__version__}', 'gpu': torch.cuda.get_device_name(), 'dtype': o.dtype,
                      'gemm': [m, n, k], 'rounds': o.rounds,
                      'gemm_tflop_per_s': 2 * m * n * k / statistics.median(seconds) * 1e-12}))


if __name__ == '__main__':
    main()
