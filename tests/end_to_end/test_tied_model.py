"""Tied weights, an optimizer that groups by names and shapes, and a schedule, from one plan to another; and what ranks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import graphpar as gp
from tests.models import tied_model as source
from tests.ranks import tied_model_script as fixture
from tests.tools.rank_pool import RankPool

PP, ZERO1 = {"mesh": {"pp": 2}}, {"mesh": {"dp_shard": 2}, "zero": 1, "zero1_by": "flat"}
TP, ZERO3 = {"mesh": {"tp": 2}}, {"mesh": {"dp_shard": 2}, "zero": 3}
V = {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 2}


def emitted(options: dict[str, Any], folder: Path) -> Path:
    inputs, target = source.example_inputs(), source.example_targets()
    program = gp.export(source.Net(), inputs, loss_fn=source.loss_fn, targets=(target,))
    return gp.partition(program, gp.plan(program, **options), optimizer=Path(source.__file__)).save(folder)


@pytest.mark.parametrize(
    "plans",
    [
        (ZERO1, PP),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((PP, TP), (TP, ZERO3), (ZERO3, V), (V, ZERO1))),
    ],
)
def test_tied_weights_and_schedules_are_those_of_one_device(
    plans: tuple[dict[str, Any], ...], tmp_path: Path, pool: RankPool
) -> None:
    programs = [emitted(options, tmp_path / str(index)) for index, options in enumerate(plans)]
    torch.manual_seed(0)
    model = source.Net()
    state = model.state_dict()
    save_file({name: value for name, value in state.items() if name != "head.weight"}, tmp_path / "weights.safetensors")
    arguments = [str(each) for each in (*programs, tmp_path)]
    pool.torchrun(Path(fixture.__file__), arguments, nproc=2, timeout_s=120)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]

    optimizer = source.optimizer(model.named_parameters())
    schedule = source.lr_schedule(optimizer)
    losses, rates = [], []
    for step in range(fixture.STEPS):
        batch = source.batch(step)
        loss = source.loss_fn(model(batch["ids"]), batch["labels"])
        losses.append(loss.item())
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    trained = load_file(tmp_path / "trained.safetensors")
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["rates"] == rates
        assert all("the optimizer's step needs reduced gradients" in said for said in rank["unreduced"])
        assert "ranks 0 and 1 got different values of" in rank["batch"] and "for step 1." in rank["batch"]
        assert "rank 0 is at step 0, but rank 1 at step 1" in rank["step"]
        if plans[1] is PP:
            assert "should be the same on ranks 0 and 1" in rank["copies"] and rank["saved"] == rank["copies"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
