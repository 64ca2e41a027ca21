"""Sequence parallelism and the vocabulary-parallel loss, asked for or forbidden, whatever is cheaper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.verification import verify_all
from tests.tools.programs import example

FAST_LINKS = "2xH100"  # and slow cores: sequences are sharded where nothing is asked


class Sums(nn.Module):
    """Residuals between norms that are functions; heads have a norm of their own, which is none of the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.q, self.head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q = F.layer_norm(self.q(F.layer_norm(x, (16,))).unflatten(-1, (4, 4)), (4,))
        x = x + F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(F.layer_norm(x, (16,)))))
        return self.head(F.layer_norm(x, (16,)))


def smoothed(smoothing: float = 0.0) -> Any:
    return lambda found, wanted: F.cross_entropy(found.flatten(0, 1), wanted.flatten(), label_smoothing=smoothing)


def exported(length: int = 16, smoothing: float = 0.0) -> gp.Program:
    torch.manual_seed(0)
    ids = torch.randint(32, (4, length))
    return gp.export(Sums(), (ids,), loss_fn=smoothed(smoothing), targets=(ids,))


def text_of(program: gp.Program, **asked: Any) -> str:
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}, **asked))
    return "".join(parts.files.get(name, "") for name in ("blocks.py", "stage_0.py"))


@pytest.mark.parametrize("cluster", [None, FAST_LINKS])
def test_norms_and_residuals_are_sharded_over_the_sequence_as_asked(cluster: str | None) -> None:
    program = example("gpt2_tiny")
    sharded, whole = (text_of(program, sp=sp, loss_parallel=True, cluster=cluster) for sp in (True, False))
    assert "all_reduce(" not in sharded.partition("class ")[2] and "reduce_scatter" in sharded
    assert "reduce_scatter" not in whole
    assert "vocab_cross_entropy(" in sharded and "vocab_cross_entropy(" in whole
    assert "vocab_cross_entropy(" not in text_of(program, loss_parallel=False, cluster=cluster)


@pytest.mark.costly
def test_numbers_are_those_of_one_device() -> None:
    program = exported()
    plans = [gp.plan(program, mesh={"tp": 2}, sp=sp, loss_parallel=sp) for sp in (True, False)]
    for plan, outcome in zip(plans, verify_all([gp.partition(program, plan) for plan in plans], 2)):
        assert outcome.ok, (plan.sp, outcome.problems)
        assert gp.Plan.from_json(plan.to_json()).sp is plan.sp


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ({}, {"mesh": {"pp": 2}, "sp": True}, "sp says how tp shards; give mesh tp=2"),
        ({"length": 15}, {"mesh": {"tp": 2}, "sp": True}, r"tp=2 does not divide the sequence of 15 \(test_tp_switches.py:\d+\)"),
        ({"smoothing": 0.1}, {"mesh": {"tp": 2}, "loss_parallel": True}, r"the loss .*test_tp_switches.py:\d+\) takes full logits"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(given: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.plan(exported(**given), **asked)


@pytest.mark.parametrize(("option", "what"), [("sp", "norms and residuals"), ("loss_parallel", "cross entropies")])
def test_a_model_without_what_is_asked_for_is_refused(option: str, what: str) -> None:
    program = gp.export(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), (torch.randn(2, 4),), loss_fn=torch.sum)
    with pytest.raises(GraphparError, match=f"{option} shards {what}"):
        gp.plan(program, mesh={"tp": 2}, **{option: True})
