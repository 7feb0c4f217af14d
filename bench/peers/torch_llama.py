# SPDX-License-Identifier: Apache-2.0
"""The models of Hugging Face folders that zero-bench trains, as transformers has them, for torch_train.py."""
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, __version__


class Llama(nn.Module):
    """Has the interface of Gpt2 in torch_gpt2.py. The loss is computed by transformers, too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def h(self):
        return self.model.model.layers

    def forward(self, tokens, targets):
        targets = targets.contiguous()
        return self.model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss


def build(folder, device, weights):
    """An fp32 model of the folder's config.json. Weights come from the folder `weights`, or are drawn if it is None."""
    if weights:
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return Llama(model.to(device).train())


def flop_per_token(model, context):
    """Counts as bench/llama/llama_ops.c does."""
    config = model.model.config
    weights = sum(p.numel() for p in model.parameters())
    weights -= 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    head_size = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
    return 6 * weights + 12 * config.num_hidden_layers * config.num_attention_heads * head_size * context
