#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT-2, or a Llama of transformers, on one rank as zero-bench train does, and reports each step in the same JSON lines.

    torch_train.py --how plain|ddp|fsdp2|tp|pp|zero1|zero2|zero3 [--dtype f32|bf16] [--model gpt2-124M|DIR] [--steps 20] ...

DIR is a Hugging Face folder of a Llama, as for zero-bench. zeroN is ZeRO stage N of DeepSpeed. tp and pp divide a GPT-2
among all ranks (torch_axes.py). pp-patched is pp without the messages at its start, on which gloo aborts. Ranks find each other by torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT). Without them there is one rank. The optimizer is PyTorch's fused AdamW. Only matrices decay, gradients are
clipped to norm 1, and the learning rate ramps up.

bf16 is the usual mode of each program, always with fp32 master weights:

- plain, DDP, tp and pp: autocast over fp32 weights
- FSDP2: mixed precision, gathered in bf16 and reduced in bf16, or in f32 with --reduce f32
- DeepSpeed: its bf16 mode

On a GPU --compile compiles each layer and the loss. Without --batches tokens are drawn at random, and without --weights
weights are, too.
"""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

import model_sizes
from model_sizes import N_WARM_STEPS, N_WARMUP_STEPS

HOWS = ['plain', 'ddp', 'fsdp2', 'tp', 'pp', 'pp-patched', 'zero1', 'zero2', 'zero3']


def options():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--how', choices=HOWS, required=True)
    p.add_argument('--dtype', choices=['f32', 'bf16'], default='f32')
    p.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    model_sizes.add_options(p)
    p.add_argument('--context', type=int, default=1024)
    p.add_argument('--batch', type=int, default=4, help='rows of a micro-batch')
    p.add_argument('--micro-batches', type=int, default=4, help='of a step of pp (4)')
    p.add_argument('--steps', type=int, default=20)
    p.add_argument('--lr', type=float, help='one that suits the model')
    p.add_argument('--weights', help='a folder of safetensors files')
    p.add_argument('--batches', help='int32 of (step, rank or micro-batch, row, context + 1)')
    p.add_argument('--reduce', choices=['bf16', 'f32'], default='bf16', help="FSDP2's gradients between ranks, where the model is bf16")
    p.add_argument('--compile', action='store_true')
    p.add_argument('--peak-tflops', type=float, help="of one GPU; NVIDIA's data sheets give for dense bf16: A100 312, H100/H200 SXM 989.4")
    o = p.parse_args()
    if o.steps <= N_WARM_STEPS:
        p.error(f'--steps: more than {N_WARM_STEPS} are needed')
    model_sizes.read_options(p, o)
    if o.folder and o.how.startswith(('tp', 'pp')):
        p.error(f'--how {o.how}: for a GPT-2 only')
    return o


def micro_batches(o, rank, world):
    """The first micro-batch of this rank, how many it has, and how many a step of all ranks has."""
    if o.how == 'tp':
        return 0, 1, 1
    if o.how.startswith('pp'):
        return 0, o.micro_batches, o.micro_batches
    return rank, 1, world


class Batches:
    """The tokens and targets of each step for this rank, (rows, context) each."""

    def __init__(self, o, first, n, n_all):
        self.o, self.first, self.n = o, first, n
        self.generator = torch.Generator().manual_seed(1 + first)
        self.all = None
        if o.batches:
            shape = (-1, n_all, o.batch, o.context + 1)
            self.all = torch.from_file(o.batches, dtype=torch.int32, size=os.path.getsize(o.batches) // 4).view(shape)

    def next(self, step):
        o = self.o
        if self.all is None:
            rows = torch.randint(o.sizes[4], (self.n * o.batch, o.context + 1), generator=self.generator)
        else:
            rows = self.all[step, self.first:self.first + self.n].flatten(0, 1).long()
        rows = rows.to(o.device)
        return rows[:, :-1], rows[:, 1:]


def adamw(parameters, o):
    """Only matrices decay. DTensors and plain tensors have groups of their own, because a fused kernel does not mix them."""
    kinds = {}
    for p in parameters:
        kinds.setdefault((p.dim() == 2, type(p.data)), []).append(p)
    groups = [{'params': ps, 'weight_decay': 0.1 if is_matrix else 0.0} for (is_matrix, _), ps in kinds.items()]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


class Torch:
    """Trains with plain PyTorch, DDP or FSDP2."""

    def __init__(self, o, model):
        self.cast = contextlib.nullcontext
        if o.how == 'fsdp2':
            self.shard(o, model)
        elif o.dtype == 'bf16':
            self.cast = lambda: torch.autocast(o.device, torch.bfloat16)
        self.parameters = list(model.parameters())
        self.optimizer = adamw(self.parameters, o)
        self.model = torch.nn.parallel.DistributedDataParallel(model) if o.how == 'ddp' else model

    @staticmethod
    def shard(o, model):
        """Shards each layer as a unit, and the rest as one unit, as zero-bench does."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        mesh = init_device_mesh(o.device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if o.dtype == 'bf16':
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if o.reduce == 'bf16' else torch.float32)
        for layer in model.h:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(self, tokens, targets, lr):
        with self.cast():
            loss = self.model(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), (norm.full_tensor() if hasattr(norm, 'full_tensor') else norm).item()


class DeepSpeed:
    def __init__(self, o, model):
        import deepspeed
        config = {
            'train_micro_batch_size_per_gpu': o.batch, 'gradient_clipping': 1.0, 'zero_optimization': {'stage': int(o.how[-1])},
            'bf16': {'enabled': o.dtype == 'bf16'}, 'zero_allow_untested_optimizer': True, 'zero_force_ds_cpu_optimizer': False,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters(), o), config=config)

    def step(self, tokens, targets, lr):
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return loss.detach().float(), float(norm) if norm is not None else None


def join(o):
    """Joins the other ranks. Returns the rank and the world size."""
    for name, value in [('RANK', '0'), ('WORLD_SIZE', '1'), ('LOCAL_RANK', os.environ.get('RANK', '0')), ('MASTER_ADDR', '127.0.0.1'),
                        ('MASTER_PORT', '29541')]:
        os.environ.setdefault(name, value)
    if o.device == 'cuda':
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    if o.how != 'plain':
        dist.init_process_group('nccl' if o.device == 'cuda' else 'gloo')
    return int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])


def wait_for(device):
    if device == 'cuda':
        torch.cuda.synchronize()


def trainer_of(o, model):
    if o.compile and not o.how.startswith('zero'):
        if not o.folder:
            model.loss = torch.compile(model.loss)
        for layer in model.h:
            layer.compile()
    if o.how.startswith('zero'):
        return DeepSpeed(o, model)
    if o.how in ('plain', 'ddp', 'fsdp2'):
        return Torch(o, model)
    import torch_axes
    return (torch_axes.TensorParallel if o.how == 'tp' else torch_axes.Pipeline)(o, model, adamw)


def model_of(o):
    """Returns the model, the operations for each token, and the version of the program that it comes from."""
    if o.folder:
        import torch_llama
        model = torch_llama.build(o.folder, o.device, o.weights)
        return model, torch_llama.flop_per_token(model, o.context), f'transformers {torch_llama.__version__}, torch {torch.__version__}'
    import torch_gpt2
    layers, _, channels, context, vocab = o.sizes
    flop = model_sizes.flop_per_token(layers, channels, context, vocab)
    return torch_gpt2.build(o.sizes, o.device, o.weights), flop, f'torch {torch.__version__}'


def summary(o, world, n_batches, ms, flop, peer):
    median = statistics.median(ms[N_WARM_STEPS:])
    tokens_per_s = n_batches * o.batch * o.context / median * 1e3
    line = {'event': 'summary', 'peer': peer, 'model': o.model, 'how': o.how, 'dtype': o.dtype, 'world': world,
            'batch': o.batch, 'context': o.context, 'compiled': o.compile, 'ms_median': median, 'tokens_per_s': tokens_per_s,
            'flop_per_token': flop, 'mfu': tokens_per_s * flop / (world * o.peak_tflops * 1e12) if o.peak_tflops else None}
    if o.how.startswith('zero'):
        import deepspeed
        line['peer'] = f'deepspeed {deepspeed.__version__}, {line["peer"]}'
    if o.device == 'cuda':
        line.update(gpu=torch.cuda.get_device_name(), peak_allocated_bytes=torch.cuda.max_memory_allocated(),
                    peak_device_bytes=torch.cuda.max_memory_reserved())
    return line


def main():
    o = options()
    if o.device == 'cuda' and not torch.cuda.is_available():
        sys.exit('torch_train.py: PyTorch finds no usable GPU')
    rank, world = join(o)
    out = os.fdopen(os.dup(1), 'w')  # only for JSON, since DeepSpeed logs on the standard output
    os.dup2(2, 1)
    torch.manual_seed(1)
    model, flop, peer = model_of(o)
    trainer = trainer_of(o, model)
    first, n, n_all = micro_batches(o, rank, world)
    batches = Batches(o, first, n, n_all)
    ms = []
    for step in range(o.steps):
        wait_for(o.device)
        start = time.perf_counter()
        loss, norm = trainer.step(*batches.next(step), o.lr * min(1.0, (step + 1) / N_WARMUP_STEPS))
        if world > 1:
            dist.all_reduce(loss)
        loss = loss.item() / world
        wait_for(o.device)
        ms.append((time.perf_counter() - start) * 1e3)
        if rank == 0:
            print(json.dumps({'event': 'step', 'step': step + 1, 'loss': loss, 'grad_norm': norm, 'ms': ms[-1]}), file=out, flush=True)
    if rank == 0:
        print(json.dumps(summary(o, world, n_all, ms, flop, peer)), file=out, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == '__main__':
    import torch
    import torch.distributed as dist
    main()
