"""The GPT of ``base.py`` with adapters: its own weights stay as they are."""

import sys
from pathlib import Path

import torch
from torch import nn

import graphpar as gp

sys.path.insert(0, str(Path(__file__).parent))
from base import example_inputs
from base import model as base

__all__ = ["example_inputs", "model", "optimizer"]

model = gp.lora(base, {"transformer.h.*.attn.c_*": 8, "transformer.h.*.mlp.c_*": 8}, alpha=16)


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=3e-3, weight_decay=0.0)
