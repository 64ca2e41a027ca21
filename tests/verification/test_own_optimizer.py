"""verify steps the model file's own optimizer and schedule, besides SGD; what no plan can step is refused at compile."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpar as gp
from graphpar.errors import GraphparError
from tests.tools.rank_pool import RankPool

TEXT = """
import torch
import torch.distributed as dist


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr, factor=1.0):
        super().__init__(params, {"lr": lr, "factor": factor})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-9)), alpha=group["lr"] * group["factor"])


def optimizer(named):
    return Lars([p for _, p in named], lr=0.01)


def lr_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
PLANTED = "lr=0.01, factor=1.01 if dist.is_initialized() and dist.get_rank() == 0 else 1.0)"


@functools.cache
def program() -> gp.Program:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)), torch.randint(4, (8,))
    return gp.export(model, inputs[:1], loss_fn=nn.functional.cross_entropy, targets=inputs[1:])


def parts(folder: Path, text: str = TEXT, **asked: Any) -> gp.Parts:
    (folder / "model.py").write_text(text)
    return gp.partition(program(), gp.plan(program(), **asked), optimizer=folder / "model.py")


@pytest.mark.costly
def test_the_own_optimizer_is_stepped_and_a_fault_of_it_is_seen(tmp_path: Path, pool: RankPool) -> None:
    from graphpar.verification import verify_all

    pins: dict[str, Any] = {"mesh": {"tp": 2}, "shard_plan": {"0": "colwise", "2": "rowwise"}}
    good, bad = parts(tmp_path, **pins), parts(tmp_path, TEXT.replace("lr=0.01)", PLANTED), **pins)
    found, wrong = verify_all([good, bad], 2)
    assert found.ok and found.max_error["optimizer"] < 1e-5, found
    assert found.to_json()["max_error"].keys() == {
        "loss",
        "gradient",
        "norm",
        "parameter",
        "buffer",
        "optimizer",
        "output",
    }
    assert not wrong.ok and wrong.max_error["parameter"] < 1e-5 < wrong.max_error["optimizer"], wrong
    assert str(wrong.first_difference).startswith("optimizer of "), wrong.first_difference


def test_what_no_plan_can_step_is_refused_at_compile(tmp_path: Path) -> None:
    closure = TEXT.replace("Lars([p for _, p in named], lr=0.01)", "torch.optim.LBFGS([p for _, p in named])")
    with pytest.raises(GraphparError, match="LBFGS, needs a closure"):
        parts(tmp_path, closure)
    noisy = TEXT.replace("p.sub_(p.grad *", "p.sub_(torch.randn_like(p) *")
    assert parts(tmp_path, noisy).report["warnings"] is not None  # one rank may draw
    with pytest.raises(GraphparError, match="Lars draws random numbers, which would differ between ranks"):
        parts(tmp_path, noisy, mesh={"dp_replicate": 2})
    moving = TEXT.replace("p.sub_(p.grad *", "p.data = p.data.sub(p.grad *")
    assert moving != TEXT and parts(tmp_path, moving, mesh={"tp": 2}).report["warnings"] is not None
    with pytest.raises(GraphparError, match=r"Lars gives parameters other memory \(p.data = ...\), and with zero=3"):
        parts(tmp_path, moving, mesh={"dp_shard": 2}, zero=3)


def test_an_optimizer_made_from_values_is_refused_where_ranks_lack_some(tmp_path: Path) -> None:
    values = TEXT.replace(
        "Lars([p for _, p in named], lr=0.01)",
        "Lars([{'params': [p], 'lr': 0.1 * float(p.norm())} for _, p in named], lr=0.1)",
    )
    assert parts(tmp_path, values, mesh={"dp_replicate": 2}).report["warnings"] is not None
    for mesh in ({"pp": 2}, {"tp": 2}):
        with pytest.raises(GraphparError, match="meta tensors; on several ranks it gets parameters without values"):
            parts(tmp_path, values, mesh=mesh)


def test_one_owner_of_everything_is_warned_of(tmp_path: Path) -> None:
    together = TEXT.replace(
        "        for group in self.param_groups:\n",
        "        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g['params']]).norm()\n"
        "        for group in self.param_groups:\n",
    ).replace("/ (p.grad.norm()", "/ (norm")
    warnings = [parts(tmp_path, together, mesh=mesh).report["warnings"] for mesh in ({"pp": 2}, {"dp_replicate": 2})]
    said = [
        any("Lars, depends on all parameters together, so one rank holds all of them" in each for each in some)
        for some in warnings
    ]
    assert said == [True, False]
    counting = TEXT.replace(
        "        for group in self.param_groups:\n",
        "        self.count = getattr(self, 'count', 0) + 1\n        for group in self.param_groups:\n",
        1,
    ).replace("/ (p.grad.norm()", "/ self.count / (p.grad.norm()")
    assert any(
        each.startswith("Checkpoints are refused: the steps of Lars")
        for each in parts(tmp_path, counting).report["warnings"]
    )
    failing = parts(
        tmp_path, TEXT.replace("def optimizer(named):", "def optimizer(named):\n    raise RuntimeError('no GPU')")
    )
    assert any("could not be tried here" in each and "no GPU" in each for each in failing.report["warnings"])
