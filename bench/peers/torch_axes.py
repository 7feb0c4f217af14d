# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensor parallelism (DTensor) and pipeline parallelism (1F1B), for torch_train.py.

All ranks work on the same micro-batches, as they do in zero-bench train --tp N and --pp N with N ranks. bf16 is autocast
over fp32 weights, as in the rows of plain PyTorch and of DDP.
"""
import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def cast(o):
    return torch.autocast(o.device, torch.bfloat16) if o.dtype == 'bf16' else contextlib.nullcontext()


def update(optimizer, lr):
    for group in optimizer.param_groups:
        group['lr'] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def regroup(p, n):
    """Reorders the rows of queries, keys and values, so that the nth part of the tensor has all three of its heads."""
    with torch.no_grad():
        p.copy_(p.view(3, n, -1, *p.shape[1:]).transpose(0, 1).reshape(p.shape))


class TensorParallel:
    """Cuts what zero-bench train --tp cuts: the token ids of the embedding, the heads, and the channels of the MLP."""

    def __init__(self, o, model, adamw):
        n = dist.get_world_size()
        if o.sizes[1] % n:
            sys.exit(f'torch_train.py: {n} ranks do not divide the {o.sizes[1]} heads')
        for layer in model.h:
            layer.attn.heads //= n
            regroup(layer.attn.c_attn.weight, n)
            regroup(layer.attn.c_attn.bias, n)
        mesh = dist.init_device_mesh(o.device, (n,))
        parallelize_module(model, mesh, {
            'wte': RowwiseParallel(input_layouts=Replicate()), 'h.*.attn.c_attn': ColwiseParallel(), 'h.*.attn.c_proj': RowwiseParallel(),
            'h.*.mlp.c_fc': ColwiseParallel(), 'h.*.mlp.c_proj': RowwiseParallel(),
            'ln_f': PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False)})
        self.o, self.model = o, model
        parameters = list(model.parameters())
        self.kinds = [[p for p in parameters if isinstance(p, DTensor) == cut] for cut in (True, False)]
        self.optimizer = adamw(parameters, o)

    def step(self, tokens, targets, lr):
        with loss_parallel():
            with cast(self.o):
                loss = self.model(tokens, targets)
            loss.backward()
        norms = [get_total_norm([p.grad for p in ps]) for ps in self.kinds]
        norm = torch.hypot(norms[0].full_tensor(), norms[1])
        for ps in self.kinds:
            clip_grads_with_norm_(ps, 1.0, norm)
        update(self.optimizer, lr)
        return loss.full_tensor().detach(), norm.item()


def layers_of(layers, n):
    """Layers of each of n pipeline stages, as pipe_layers_of in bench/schedule/pipeline_stages.c counts them."""
    turns = [n - 2, *range(n - 2), n - 1] if n > 1 else [0]  # the order in which stages get one of the layers left over
    return [layers // n + (turn < layers % n) for turn in turns]


class Stage(torch.nn.Module):
    """The layers of one pipeline stage. The first begins with the embedding; the loss of the last has the head."""

    def __init__(self, o, model, rank, n):
        super().__init__()
        self.o, self.embeds = o, rank == 0
        counts = layers_of(len(model.h), n)
        first = sum(counts[:rank])
        self.h = model.h[first:first + counts[rank]]
        if self.embeds or rank == n - 1:
            self.wte = model.wte
        if self.embeds:
            self.wpe = model.wpe
        if rank == n - 1:
            self.ln_f = model.ln_f
        self.head_loss = model.loss

    def forward(self, x):
        with cast(self.o):
            if self.embeds:
                x = self.wte(x) + self.wpe.weight[:x.shape[1]]
            for layer in self.h:
                x = layer(x)
            return x

    def loss(self, x, targets):
        with cast(self.o):
            return self.head_loss(self.ln_f(x), self.wte.weight, targets)


class Pipeline:
    """Trains with one pipeline stage for each rank. The first and the last both have the embedding, and add up its gradients."""

    def __init__(self, o, model, adamw):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        if o.sizes[0] < self.n:
            sys.exit(f'torch_train.py: {self.n} pipeline stages are more than the {o.sizes[0]} layers')
        self.part = Stage(o, model, self.rank, self.n)
        stage = PipelineStage(self.part, self.rank, self.n, torch.device(o.device))
        if o.how == 'pp-patched':
            # PyTorch 2.9.1 first sends an int64 that its peer receives as a float32, on which gloo aborts. These messages
            # only open connections.
            stage._get_init_p2p_neighbors_ops = list
        self.schedule = Schedule1F1B(stage, o.micro_batches, loss_fn=self.part.loss)
        self.ends = dist.new_group([0, self.n - 1]) if self.n > 1 else None
        self.has_copy = self.rank == self.n - 1 > 0
        self.parameters = list(self.part.parameters())
        self.optimizer = adamw(self.parameters, o)

    def step(self, tokens, targets, lr):
        losses = []
        is_last = self.rank == self.n - 1
        self.schedule.step(*([tokens.contiguous()] if self.rank == 0 else []), **({'target': targets, 'losses': losses} if is_last else {}))
        if self.ends and self.rank in (0, self.n - 1):
            dist.all_reduce(self.part.wte.weight.grad, group=self.ends)
        counted = [p.grad for p in self.parameters if not (self.has_copy and p is self.part.wte.weight)]
        square = get_total_norm(counted).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        clip_grads_with_norm_(self.parameters, 1.0, norm)
        update(self.optimizer, lr)
        # The sum over the ranks, divided by their number, is the loss.
        loss = torch.stack(losses).detach().mean() * self.n if is_last else torch.zeros(())
        return loss.to(norm.device), norm.item()
