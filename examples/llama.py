"""Hugging Face Llama with grouped-query attention and right-padded rows of uneven length."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEQ, BATCH = 16, 8

config = LlamaConfig(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SEQ,
    tie_word_embeddings=False,
    use_cache=False,
)


def model() -> nn.Module:
    return LlamaForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([16, 4, 9, 12, 2, 7, 14, 5])
    padding = torch.arange(SEQ) >= lengths[:, None]
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": ids.masked_fill(padding, -100)}
