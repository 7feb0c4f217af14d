#!/usr/bin/env python3
"""PyTorch's compiled GPT-2 under FSDP2, trained as zero-bench train trains it, as one JSON line.

    fsdp2_gpt2.py [--model gpt2-124M] [--batch 16] [--context 1024] [--steps 30] [--peak-tflops 989.4]
    torchrun --nproc-per-node N fsdp2_gpt2.py ...

The same shapes, tied head, tanh GELU, AdamW (decay of matrices only, clip 1, learning rate over 10 steps), bf16 parameters in the
model with fp32 masters in the shards (FSDP2's mixed precision), gradients reduced in bf16, tokens drawn at random: the time of a
step does not depend on them. One unit per layer, as there; layers and loss are compiled, each by itself. Attention is PyTorch's own (scaled_dot_product_attention), and the
head's logits are bf16. Medians leave out the first steps, which compile. --reduce f32 and --no-compile change what they say.
"""
import argparse
import json
import os
import statistics
import sys
import time

# L, NH, C: bench/gpt2/gpt2_config.c
MODELS = {'gpt2-124M': (12, 12, 768), 'gpt2-355M': (24, 16, 1024), 'gpt2-774M': (36, 20, 1280), 'gpt2-1.5B': (48, 25, 1600)}
N_WARMUP_STEPS = 10  # the learning rate ramps up over these; they are left out of the median too


def build(torch, layers, heads, channels, context, vocab):
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
            self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
            self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(c, dim=2))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attproj(y.transpose(1, 2).reshape(b, t, c))
            return x + self.fcproj(functional.gelu(self.fc(self.ln2(x)), approximate='tanh'))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(context, channels)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.lnf = nn.LayerNorm(channels)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.loss(self.lnf(x), self.wte.weight, targets)

        @staticmethod
        def loss(x, weight, targets):
            logits = functional.linear(x, weight)
            return functional.cross_entropy(logits.float().view(-1, vocab), targets.reshape(-1))

    return Model()


def initialise(torch, model, layers):
    for name, p in model.named_parameters():
        if p.dim() == 2:
            projection = name.endswith(('attproj.weight', 'fcproj.weight'))
            torch.nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if projection else 0.02)
        elif name.endswith('bias'):
            torch.nn.init.zeros_(p)


def flop_per_token(layers, channels, context, vocab):
    """bench/gpt2/gpt2_config.c: Chowdhery et al., arXiv:2204.02311, appendix B."""
    weights = vocab * channels + layers * (12 * channels * channels + 13 * channels) + 2 * channels
    return 6 * weights + 12 * layers * channels * context


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--model', choices=MODELS, default='gpt2-124M')
    p.add_argument('--batch', type=int, default=16, help='rows of one rank')
    p.add_argument('--context', type=int, default=1024)
    p.add_argument('--vocab', type=int, default=50257)
    p.add_argument('--steps', type=int, default=30)
    p.add_argument('--lr', type=float, default=6e-4)
    p.add_argument('--reduce', choices=['bf16', 'f32'], default='bf16', help='dtype of gradients between ranks')
    p.add_argument('--no-compile', action='store_true')
    p.add_argument('--peak-tflops', type=float, help="of one GPU; NVIDIA's data sheets give for dense bf16: A100 312, H100/H200 SXM 989.4")
    o = p.parse_args()
    if o.steps <= N_WARMUP_STEPS:
        p.error(f'--steps: more than {N_WARMUP_STEPS} are needed')
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if not torch.cuda.is_available():
        sys.exit('fsdp2_gpt2.py: PyTorch finds no usable GPU')
    for name, value in [('RANK', '0'), ('WORLD_SIZE', '1'), ('LOCAL_RANK', '0'), ('MASTER_ADDR', '127.0.0.1'), ('MASTER_PORT', '29541')]:
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    dist.init_process_group('nccl')
    rank, world = dist.get_rank(), dist.get_world_size()

    layers, heads, channels = MODELS[o.model]
    torch.manual_seed(1)
    with torch.device('cuda'):
        model = build(torch, layers, heads, channels, o.context, o.vocab)
    initialise(torch, model, layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if o.reduce == 'bf16' else torch.float32)
    if not o.no_compile:
        model.loss = torch.compile(model.loss)
    for layer in model.layers:
        if not o.no_compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{'params': matrices, 'weight_decay': 0.1}, {'params': vectors, 'weight_decay': 0.0}],
                                  lr=o.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)

    generator = torch.Generator(device='cuda').manual_seed(1 + rank)
    ms = []
    for step in range(o.steps):
        rows = torch.randint(o.vocab, (o.batch, o.context + 1), device='cuda', generator=generator)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group['lr'] = o.lr * min(1.0, (step + 1) / N_WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss, norm = loss.item(), (norm.full_tensor() if hasattr(norm, 'full_tensor') else norm).item()
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - start) * 1e3)
    median = statistics.median(ms[N_WARMUP_STEPS:])
    tokens_per_s = world * o.batch * o.context / median * 1e3
    flop = flop_per_token(layers, channels, o.context, o.vocab)
    if rank == 0:
        print(json.dumps({'event': 'fsdp2_peer', 'peer': f'torch {torch.__version__}', 'gpu': torch.cuda.get_device_name(), 'model': o.model,
                          'world': world, 'batch': o.batch, 'context': o.context, 'compiled': not o.no_compile, 'loss': loss,
                          'grad_norm': norm, 'ms_median': median, 'tokens_per_s': tokens_per_s, 'flop_per_token': flop,
                          'mfu': tokens_per_s * flop / (world * o.peak_tflops * 1e12) if o.peak_tflops else None,
                          'peak_allocated_bytes': torch.cuda.max_memory_allocated(),
                          'peak_reserved_bytes': torch.cuda.max_memory_reserved()}))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
