"""GPT-2 small as Hugging Face writes it, at full size, computing its own loss; dropout off."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SEQ, BATCH = 32, 4

config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)


def model() -> nn.Module:
    return GPT2LMHeadModel(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
