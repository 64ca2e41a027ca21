"""A causal language model from a folder that ``save_pretrained`` wrote, trained as a whole or by adapters. Set in the environment:

MODEL      the folder
ADAPTERS   a pattern of the layers that get adapters, such as model.layers.*.self_attn.*_proj; without it all weights are trained
LENGTH     tokens of a sequence (128), and
BATCH      sequences of an example batch (8)
"""

import os

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import graphpar as gp

LENGTH, BATCH = int(os.environ.get("LENGTH", "128")), int(os.environ.get("BATCH", "8"))
RANK = 8


def pretrained() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.float32)


model = gp.lora(pretrained, {os.environ["ADAPTERS"]: RANK}, alpha=16) if "ADAPTERS" in os.environ else pretrained


def example_inputs() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    matrices, others = ([p for _, p in named if (p.ndim > 1) is large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
