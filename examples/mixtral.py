"""Hugging Face Mixtral: a mixture of 4 experts a layer, 2 of them active for each token."""

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

SEQ, BATCH = 16, 8

config = MixtralConfig(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=SEQ,
    sliding_window=None,
    use_cache=False,
)


def model() -> nn.Module:
    return MixtralForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
