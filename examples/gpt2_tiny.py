"""Hugging Face GPT-2, small enough for tests; ignored labels are uneven, and one row has no valid label at all."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SEQ, BATCH = 16, 8

config = GPT2Config(
    vocab_size=211,
    n_positions=SEQ,
    n_embd=64,
    n_layer=8,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)


def model() -> nn.Module:
    return GPT2LMHeadModel(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([16, 3, 9, 12, 1, 7, 14, 5])  # the model shifts labels by one: length 1 leaves none
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(SEQ) >= lengths[:, None], -100)}
