#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the folders in references/: small random models of four architectures, and what transformers computes.

    make_references.py OUT            writes OUT/llama, OUT/mistral, OUT/qwen2 and OUT/qwen3
    make_references.py --check DIR REFERENCE
                                      checks that DIR loads, with the logits of REFERENCE/references.json
    make_references.py --check-adapter DIR REFERENCE MERGED
                                      checks that the adapter in DIR loads in PEFT on top of REFERENCE, with the
                                      logits and, once merged, the weights of MERGED

It was run once, with torch 2.9.1 and transformers 5.24.0 on a CPU. Tests read what it wrote and need neither.

Each folder has what transformers writes (config.json, generation_config.json, the weights) and references.json:

    tokens     (20, 2, 33) a batch for each step; the first 32 of a row are inputs, the last 32 their targets
    logits     (2, 32, vocabulary) of batch 0 before any step, in f32
    losses     (20) mean over the tokens of each batch, in f32; batch i before step i
    optimizer  the numbers of AdamW; tensors with one dimension have no weight decay
    loss       of batch 0 in f64
    gradients  of batch 0 in f64: the norm of each tensor's gradient, and elements 0, stride, 2 * stride, ...
"""
import argparse
import json
import math
import os
import sys

import torch
import transformers
from torch.nn import functional

STEPS, ROWS, TOKENS, VOCAB, SAMPLED = 20, 2, 32, 67, 24
OPTIMIZER = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
# Each case: configuration class, its fields, the dtype of the file, bytes of a file at most, whether config.json
# has the names that transformers used before version 5.
CASES = {
    "llama": (transformers.LlamaConfig, {
        "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16, "eos_token_id": [2, 3],
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 3.0, "original_max_position_embeddings": 24}},
        torch.float32, "1GB", True),
    "mistral": (transformers.MistralConfig, {
        "num_hidden_layers": 2, "intermediate_size": 56, "num_key_value_heads": 4, "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
        torch.bfloat16, "16KB", True),
    "qwen2": (transformers.Qwen2Config, {
        "num_hidden_layers": 3, "intermediate_size": 40, "tie_word_embeddings": True, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        torch.bfloat16, "1GB", False),
    "qwen3": (transformers.Qwen3Config, {
        "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        torch.float32, "1GB", False),
}


def random_model(config, dtype, generator):
    """A model whose every tensor matters: norms differ from 1 and biases from 0."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            value = 1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise
            p.copy_(value.to(dtype).float())
    return model.float()


def random_tokens(generator):
    """Rows in which a token depends on the one before, so that there is something to learn."""
    follower = torch.randperm(VOCAB, generator=generator)
    rows = torch.randint(VOCAB, (STEPS, ROWS, TOKENS + 1), generator=generator)
    known = torch.rand(rows.shape, generator=generator) < 0.7
    for t in range(1, TOKENS + 1):
        rows[:, :, t] = torch.where(known[:, :, t], follower[rows[:, :, t - 1]], rows[:, :, t])
    return rows


def old_names(config):
    """config.json as transformers wrote it before version 5."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def loss_of(logits, batch):
    return functional.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def norm_in_f64(module, x):
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def frequencies_in_f64(config):
    """Returns what transformers computes in f32."""
    rope, size = config.rope_parameters, getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    plain = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if rope["rope_type"] == "default":
        return plain
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope["factor"]


def rotary_in_f64(module, x, position_ids):
    frequencies = frequencies_in_f64(module.config)
    assert torch.allclose(frequencies, module.inv_freq.double(), rtol=1e-6, atol=0)
    angles = position_ids[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


def in_f64(model):
    """transformers computes norms, rotations and the softmax of its eager attention in f32, whatever the dtype."""
    model = model.double()
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = norm_in_f64.__get__(module)
        elif name.endswith("RotaryEmbedding"):
            module.forward = rotary_in_f64.__get__(module)
    return model


def gradients_in_f64(folder, batch):
    model = in_f64(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    loss = loss_of(model(batch[:, :-1]).logits, batch)
    loss.backward()
    assert loss.dtype == torch.float64
    gradients = {}
    for name, p in model.named_parameters():
        g = p.grad.reshape(-1)
        stride = max(1, g.numel() // SAMPLED)
        gradients[name] = {"norm": g.norm().item(), "stride": stride, "elements": g[::stride][:SAMPLED].tolist()}
    return loss.item(), gradients


def losses_of_training(model, tokens):
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    o = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], lr=OPTIMIZER["lr"],
                          betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"])
    losses = []
    for batch in tokens:
        loss = loss_of(model(batch[:, :-1]).logits, batch)
        o.zero_grad()
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses


def store(path, values):
    """JSON with a line for each row of tokens and logits. Nine digits tell an f32 from the next one."""
    def text(value):
        if isinstance(value, list) and value and isinstance(value[0], list):
            return "[\n" + ",\n".join(text(v) for v in value) + "]"
        if isinstance(value, list):
            return "[" + ",".join(text(v) for v in value) + "]"
        return f"{value:.9g}" if isinstance(value, float) else json.dumps(value)

    with open(path, "w", encoding="utf-8") as f:
        f.write("{\n" + ",\n".join(f'"{k}": {text(v)}' for k, v in values.items() if k != "gradients"))
        f.write(',\n"gradients": {\n' + ",\n".join(
            f'"{k}": {{"norm": {g["norm"]!r}, "stride": {g["stride"]}, "elements": {g["elements"]}}}'
            for k, g in values["gradients"].items()) + "}}\n")


def make(folder, seed, kind, fields, dtype, max_shard, old):
    generator = torch.Generator().manual_seed(seed)
    config = kind(**{**SMALL, **fields})
    model = random_model(config, dtype, generator)
    tokens = random_tokens(generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard)
    path = os.path.join(folder, "config.json")
    if old:
        with open(path, encoding="utf-8") as f:
            config = old_names(json.load(f))
        with open(path, "w", encoding="utf-8") as f:
            f.write(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(tokens[0][:, :-1]).logits
    loss, gradients = gradients_in_f64(folder, tokens[0])
    losses = losses_of_training(model, tokens)
    store(os.path.join(folder, "references.json"),
          {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
           "optimizer": OPTIMIZER, "tokens": tokens.tolist(), "loss": loss, "losses": losses,
           "logits": logits.tolist(), "gradients": gradients})
    print(f"{folder}: {losses[0]:.6f} to {losses[-1]:.6f}, in f64 {loss:.6f}")


def check(folder, reference):
    with open(os.path.join(reference, "references.json"), encoding="utf-8") as f:
        values = json.load(f)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                       output_loading_info=True)
    with torch.no_grad():
        logits = model(torch.tensor(values["tokens"][0])[:, :-1]).logits
    expected = torch.tensor(values["logits"])
    worst = ((logits - expected).abs().max() / expected.abs().max()).item()
    print(f"{folder}: logits differ by {worst:.1e} of the largest; {loading}")
    return worst < 1e-5 and not any(loading.values())


def check_adapter(folder, base, merged):
    import peft
    with open(os.path.join(base, "references.json"), encoding="utf-8") as f:
        tokens = torch.tensor(json.load(f)["tokens"][0])[:, :-1]
    model, whole = (transformers.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32) for d in (base, merged))
    with torch.no_grad():
        before, expected = model(tokens).logits, whole(tokens).logits
        model = peft.PeftModel.from_pretrained(model, folder)
        logits, after = model(tokens).logits, model.merge_and_unload().state_dict()
    worst = ((logits - expected).abs().max() / expected.abs().max()).item()
    weights = max((after[name] - p).abs().max().item() for name, p in whole.state_dict().items())
    print(f"{folder}: with peft {peft.__version__} logits differ by {worst:.1e} of the largest, merged weights by {weights:.1e}")
    return worst < 1e-5 and weights < 1e-6 and not torch.equal(before, logits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT|DIR")
    parser.add_argument("reference", metavar="REFERENCE", nargs="?")
    parser.add_argument("merged", metavar="MERGED", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--check-adapter", action="store_true")
    args = parser.parse_args()
    if args.check_adapter:
        return 0 if check_adapter(args.folder, args.reference, args.merged) else 1
    if args.check:
        return 0 if check(args.folder, args.reference) else 1
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        make(os.path.join(args.folder, name), seed, *case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
