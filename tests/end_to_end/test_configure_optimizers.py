"""The ``configure_optimizers`` of a model, as nanoGPT and Lightning have it, makes the optimizer of a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphpar.cli.main import main

MODEL = """
import inspect
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int = 64
    n_embd: int = 16


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(2)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        param_dict = {pn: p for pn, p in self.named_parameters()}
        param_dict = {pn: p for pn, p in param_dict.items() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        optim_groups = [
            {'params': decay_params, 'weight_decay': weight_decay},
            {'params': nodecay_params, 'weight_decay': 0.0}
        ]
        fused_available = 'fused' in inspect.signature(torch.optim.AdamW).parameters
        use_fused = fused_available and device_type == 'cuda'
        extra_args = dict(fused=True) if use_fused else dict()
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra_args)


def model():
    return GPT(GPTConfig())


ids = torch.zeros(4, 8, dtype=torch.int64)
example_inputs = {"idx": ids, "targets": ids.clone()}
"""
OPTIMIZER = """

def optimizer(named):
    return GPT.configure_optimizers(named, weight_decay=10.0, learning_rate=1e-2, betas=(0.9, 0.95), device_type="cpu")
"""
CALL = "def optimizer(named): return GPT.configure_optimizers(named, weight_decay=..., learning_rate=..., betas=..., device_type=...)"


@pytest.mark.costly
def test_that_of_nanogpt_steps_under_every_plan_as_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its decay shows in the parameters, which ``verify`` compares after several of its steps."""
    (tmp_path / "model.py").write_text(MODEL + OPTIMIZER)
    for mesh, zero in (("pp=2", 0), ("tp=2", 0), ("dp_shard=2", 1), ("dp_shard=2", 3)):
        out = tmp_path / f"{mesh}{zero}"
        more = ["--zero", str(zero)] if zero else []
        assert main(["compile", str(tmp_path / "model.py"), "--mesh", mesh, *more, "-o", str(out), "--json"]) == 0
        compiled = json.loads(capsys.readouterr().out)
        assert not [line for line in compiled["warnings"] if "ptimizer" in line]
        assert main(["verify", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]


def test_one_that_is_not_called_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert main(["compile", str(tmp_path / "model.py"), "--mesh", "tp=2", "-o", str(tmp_path / "out"), "--json"]) == 0
    (warning,) = [each for each in json.loads(capsys.readouterr().out)["warnings"] if "configure_optimizers" in each]
    assert warning.endswith(CALL)
