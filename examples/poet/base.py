"""A small GPT that reads bytes, to be trained on the text beside it and then tuned with adapters (``tuned.py``)."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SEQ, BATCH = 128, 16

config = GPT2Config(
    vocab_size=256,
    n_positions=SEQ,
    n_embd=128,
    n_layer=4,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
)


def model() -> nn.Module:
    return GPT2LMHeadModel(config)


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-3, weight_decay=0.01)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(256, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
