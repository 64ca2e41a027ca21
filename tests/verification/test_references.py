"""verify compares with what the user brings: a function, or a run that was made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification.policy import LossesInFloat
from graphpar.verification.recorded import function_of

ROWS, WIDTH, STEPS, RATE, MOMENTUM = 8, 12, 3, 0.1, 0.9


class Scored(nn.Module):
    """A norm with running statistics between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16, bias=False)  # a bias would have gradients that are rounding alone
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "labels": torch.randint(4, (ROWS,), generator=generator),
    }


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


@pytest.fixture(scope="module")
def parts() -> gp.Parts:
    batch = _batch(0)
    program = gp.export(Scored(), (batch["x"],), loss_fn=_loss, targets=(batch["labels"],))
    return gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, zero=3))


def by_hand(model: Scored, batch: Mapping[str, Tensor]) -> Tensor:
    """The same loss, written otherwise."""
    scores = model.down(model.norm(model.up(batch["x"])).clamp(min=0)).log_softmax(1)
    return -scores[torch.arange(ROWS), batch["labels"]].mean()


def test_losses_of_half_precision_are_those_of_floats() -> None:
    """In the loss function all that computes with parameters is in fp32, but what it reads and writes of them is theirs."""
    scores, labels = torch.randn(4, 3).bfloat16(), torch.arange(3).repeat(2)[:4]
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half = weight.detach().clone()
    with LossesInFloat():
        assert torch.equal(F.cross_entropy(scores, labels), F.cross_entropy(scores.float(), labels))
        assert (weight * 2).dtype == F.relu(scores).dtype == torch.bfloat16
    with LossesInFloat(in_loss_fn=True):
        assert F.cross_entropy(scores, labels).dtype == (weight * 2).dtype == torch.float32
        assert (half * 2).dtype == weight.dtype == torch.bfloat16
        weight.grad = half
    assert weight.grad is half


@pytest.mark.costly
def test_a_function_that_computes_the_same(parts: gp.Parts) -> None:
    outcome = gp.verify(parts, 2, reference=by_hand)

    assert outcome.ok, outcome.problems
    assert {"loss", "gradient", "norm", "parameter", "buffer"} == set(outcome.max_error)


@pytest.mark.costly
@pytest.mark.parametrize("factor", [pytest.param(2.0, marks=pytest.mark.slow), 1.001])
def test_a_function_that_computes_something_else(parts: gp.Parts, factor: float) -> None:
    outcome = gp.verify(parts, 2, reference=lambda model, batch: by_hand(model, batch) * factor)

    assert not outcome.ok
    assert outcome.first_difference.kind == "loss" and outcome.first_difference.step == 0


def test_a_function_without_a_loss(parts: gp.Parts) -> None:
    with pytest.raises(gp.GraphparError, match=r"must return the loss of the batch.*\[8, 4\]"):
        gp.verify(parts, 1, reference=lambda model, batch: model(batch["x"]))


def _run() -> dict[str, Any]:
    """A run of a loop of one's own."""
    torch.manual_seed(3)
    model = Scored()
    run: dict[str, Any] = {"weights": {name: value.clone() for name, value in model.state_dict().items()}}
    run |= {"batches": [_batch(step) for step in range(STEPS)], "losses": [], "gradients": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for batch in run["batches"]:
        loss = _loss(model(batch["x"]), batch["labels"])
        loss.backward()
        run["losses"].append(loss.item())
        run["gradients"].append({name: each.grad.clone() for name, each in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return run | {"state": model.state_dict(), "learning_rate": RATE, "momentum": MOMENTUM}


def test_a_run_made_elsewhere(parts: gp.Parts) -> None:
    outcome = gp.verify(parts, reference=gp.Recorded(**_run()))

    assert outcome.ok, outcome.problems
    assert outcome.parallel_losses == pytest.approx(outcome.reference_losses, rel=1e-5)
    assert set(outcome.worst) == {"loss", "gradient", "parameter", "buffer"}


@pytest.mark.parametrize(
    "what",
    [pytest.param("momentum", marks=pytest.mark.slow), "state", pytest.param("gradients", marks=pytest.mark.slow)],
)
def test_a_run_that_differs(parts: gp.Parts, what: str) -> None:
    run = _run()
    if what == "momentum":
        run["momentum"] = 0.0
    elif what == "state":
        run["state"] = {"norm.running_mean": run["state"]["norm.running_mean"] * 1.01}
    else:
        run["gradients"][2]["down.bias"] *= 1.01

    outcome = gp.verify(parts, reference=gp.Recorded(**run))

    assert not outcome.ok
    kind = {"momentum": "loss", "state": "buffer", "gradients": "gradient"}[what]
    assert outcome.first_difference.kind == kind


def test_bad_input(parts: gp.Parts, tmp_path: Path) -> None:
    run = _run()
    for changes, message in [
        ({"losses": run["losses"][1:]}, r"3 batches, 2 losses and gradients of 3 steps"),
        ({"state": {"norm.runing_mean": torch.zeros(16)}}, r"norm.runing_mean.*norm.running_mean"),
        ({"batches": [], "losses": [], "gradients": []}, r"0 batches"),
    ]:
        with pytest.raises(gp.GraphparError, match=message):
            gp.verify(parts, reference=gp.Recorded(**{**run, **changes}))
    with pytest.raises(gp.GraphparError, match="its own number of steps"):
        gp.verify(parts, 7, reference=gp.Recorded(**run))
    file = tmp_path / "reference.py"
    file.write_text("def loss_of(model, batch): ...\n")
    for spec, message in [
        (str(file), "FILE.py:function"),
        (f"{file}:los_of", "no function los_of.*loss_of"),
        (f"{tmp_path / 'other.py'}:loss_of", "no model file"),
    ]:
        with pytest.raises(gp.GraphparError, match=message):
            function_of(spec)
