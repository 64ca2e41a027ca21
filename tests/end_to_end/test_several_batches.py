"""``pipeline.step([batch, batch, ...])``: loss and gradients are those of one batch that has all of them, whatever the loss divides by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from tests.ranks import several_batches_script as fixture
from tests.tools import parity
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

STEPS, TOGETHER = 3, 3


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that divides by nothing that a batch has."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=parity.IGNORED, reduction="sum") / 512


def mixed(logits: Tensor, labels: Tensor) -> Tensor:
    """Terms that divide by a mask's sum, by the rows, by labels that count, and by nothing."""
    mask = (labels != parity.IGNORED).float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    of_mask = (each * mask).sum() / mask.sum()
    counted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=parity.IGNORED)
    return of_mask + 0.5 * counted + 0.1 * logits.square().mean() + logits.logsumexp(-1).square().sum() * 1e-4 + 1.0


LOSSES = {"mean": parity.loss_fn, "sum": summed, "mixed": mixed}


@dataclass(frozen=True)
class Case:
    """What is trained how; ``mean`` is of the replicas' own losses."""

    mesh: Mapping[str, int]
    loss: str = "mean"
    model: str = "tied"
    dtype: str = "fp32"
    pins: Mapping[str, Any] | None = None
    overflow: int | None = None

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())


def batches_of(step: int) -> list[dict[str, Tensor]]:
    """The batches of a step, each with another number of labels that count: of the second none in half of its rows."""
    found = [parity.batch_of(step * TOGETHER + place) for place in range(TOGETHER)]
    found[1]["labels"][::2] = parity.IGNORED
    return found


def eager(case: Case) -> parity.Trained:
    """Train on one device, on batches that have the rows of all batches of a step."""
    module = parity.build(case.model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=parity.LR, momentum=parity.MOMENTUM)
    losses, norms = [], []
    parts = 2 if (case.pins or {}).get("dp_mean") else 1
    for step in range(STEPS):
        if step == case.overflow:
            losses, norms = [*losses, math.nan], [*norms, 0.0]
            continue
        batches = batches_of(step)
        shares = []
        for part in range(parts):
            ids, labels = (torch.cat([b[name].chunk(parts)[part] for b in batches]) for name in ("ids", "labels"))
            shares.append(LOSSES[case.loss](module(ids), labels) / parts)
        loss = torch.stack(shares).sum()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return parity.Trained(losses, norms, {name: value.detach() for name, value in module.state_dict().items()})


def trained(
    pool: RankPool, programs: Sequence[tuple[gp.Program, gp.Plan, nn.Module, int | None]], root: Path
) -> list[Path]:
    """Train on ranks; returns the folders, in which the results are."""
    names: list[list[str]] = []
    for step in range(STEPS):
        names.append([str(root / f"batch_{step}_{place}.safetensors") for place in range(TOGETHER)])
        for name, batch in zip(names[-1], batches_of(step)):
            save_file(batch, name)
    jobs: dict[int, list[dict[str, Any]]] = {}
    folders = []
    for number, (program, plan, model, overflow) in enumerate(programs):
        folder = gp.partition(program, plan).save(root / str(number))
        folders.append(folder)
        save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "initial.safetensors")
        jobs.setdefault(plan.mesh.size, []).append({"program": str(folder), "steps": names, "overflow": overflow})
    for devices, listed in jobs.items():
        (root / f"jobs_{devices}.json").write_text(json.dumps(listed))
        pool.torchrun(Path(fixture.__file__), [str(root / f"jobs_{devices}.json")], nproc=devices, timeout_s=900)
    return folders


def check(pool: RankPool, cases: Sequence[Case], root: Path) -> None:
    programs = []
    for case in cases:
        batch = parity.batch_of(-1)
        options = {} if case.dtype == "fp32" else {"dtype": case.dtype}
        model = parity.build(case.model)
        loss_fn = LOSSES[case.loss]
        program = gp.export(model, (batch["ids"],), loss_fn=loss_fn, targets=(batch["labels"],), **options)  # type: ignore[arg-type]
        plan = gp.plan(program, mesh=dict(case.mesh), microbatch_size=2, **(case.pins or {}))
        programs.append((program, plan, parity.build(case.model), case.overflow))
    for case, folder in zip(cases, trained(pool, programs, root)):
        tolerance = 2e-5 if case.dtype == "fp32" else 2e-2
        expected, found = eager(case), json.loads((folder / "trained.json").read_text())
        assert not found["refused"]
        assert found["norms"] == pytest.approx(expected.norms, rel=tolerance), case
        for step, loss in enumerate(expected.losses):
            assert math.isnan(loss) or found["losses"][step] == pytest.approx(loss, rel=tolerance), (case, step)
        assert found["skipped"] == [int(case.overflow is not None and step >= case.overflow) for step in range(STEPS)]
        for name, value in load_file(folder / "trained.safetensors").items():
            assert parity_error(value, expected.parameters[name], case.dtype) < tolerance, (case, name)


def parity_error(value: Tensor, expected: Tensor, dtype: str) -> float:
    return float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-2 if dtype == "fp32" else 1e-1))


@pytest.mark.costly
def test_on_two_ranks(pool: RankPool, tmp_path: Path) -> None:
    cases = [
        Case({"pp": 2}, "mixed", pins={"schedule": "1F1B"}),
        Case({"dp_shard": 2}, pins={"zero": 3}),
        Case({"dp_replicate": 2}, pins={"dp_mean": True}),
        Case({"dp_shard": 2}, "sum", pins={"zero": 1}),
        Case({"dp_shard": 2}, dtype="fp16", pins={"zero": 1}, overflow=1),
    ]
    check(pool, cases, tmp_path)


@pytest.mark.slow
def test_on_many_layouts(pool: RankPool, tmp_path: Path) -> None:
    cases = [Case({"dp_replicate": 2}, loss) for loss in LOSSES]
    cases += [Case({"pp": 2}, loss, "frozen", pins={"schedule": "InterleavedZeroBubble"}) for loss in LOSSES]
    cases += [Case({"tp": 2}, loss) for loss in LOSSES]
    cases += [Case({"cp": 2}, loss, "shared") for loss in LOSSES]
    cases += [Case({"dp_expert": 2}, loss, "moe") for loss in LOSSES]
    cases += [Case({"dp_shard": 2, "dp_expert": 2}, "mixed", "moe", pins={"zero": zero}) for zero in (1, 3)]
    cases += [Case({"ep": 2}, "mixed", "moe"), Case({"dp_shard": 2, "ep": 2}, "mean", "moe", pins={"zero": 3})]
    cases += [Case({"dp_shard": 2, "pp": 2}, "mixed", pins={"zero": zero, "schedule": "1F1B"}) for zero in (1, 2, 3)]
    cases += [Case({"dp_shard": 2, "tp": 2}, "mixed", pins={"zero": zero}) for zero in (1, 2, 3)]
    cases += [Case({"dp_shard": 2, "dp_replicate": 2}, "mean", pins={"zero": 2})]
    cases += [Case({"pp": 2, "tp": 2}, "mixed", pins={"schedule": "ZBVZeroBubble"})]
    cases += [Case({"dp_replicate": 2, "pp": 2}, dtype="fp16", pins={"schedule": "1F1B"}, overflow=2)]
    cases += [Case({"dp_replicate": 2, "tp": 2}, "sum", pins={"dp_mean": True})]
    check(pool, sample(cases, 10), tmp_path)


class Dropped(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.inner = nn.Embedding(parity.WORDS, 16), nn.Linear(16, 16)
        self.norm: nn.Module = nn.Identity()
        self.head = nn.Linear(16, parity.WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.inner(self.tokens(ids)), 0.4, self.training)
        logits: Tensor = self.head(self.norm(x.flatten(0, 1)).unflatten(0, ids.shape))
        return logits


@pytest.mark.costly
def test_dropout_is_that_of_one_batch_and_batch_norm_is_refused(pool: RankPool, tmp_path: Path) -> None:
    def exported(model: nn.Module, rows: int) -> tuple[gp.Program, gp.Plan, nn.Module, None]:
        ids, labels = torch.cat([parity.batch_of(-1)["ids"]] * rows), torch.cat([parity.batch_of(-1)["labels"]] * rows)
        program = gp.export(model, (ids,), loss_fn=parity.loss_fn, targets=(labels,), evaluates=True)
        return program, gp.plan(program, mesh={"dp_replicate": 2}), model, None

    normed = Dropped()
    normed.norm = nn.BatchNorm1d(16)
    parts, refused = trained(pool, [exported(Dropped(), 1), exported(normed, 1)], tmp_path)
    program, plan, model, _ = exported(Dropped(), TOGETHER)
    whole = gp.partition(program, plan).save(tmp_path / "whole")
    save_file(model.state_dict(), whole / "initial.safetensors")
    files = [[str(tmp_path / f"whole_{step}.safetensors")] for step in range(STEPS)]
    for step, (file,) in enumerate(files):
        batches = batches_of(step)
        save_file({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, file)
    (tmp_path / "jobs.json").write_text(json.dumps([{"program": str(whole), "steps": files}]))
    pool.torchrun(Path(fixture.__file__), [str(tmp_path / "jobs.json")], nproc=2, timeout_s=120)

    found, expected = (json.loads((folder / "trained.json").read_text()) for folder in (parts, whole))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    trained_model = Dropped().eval()
    trained_model.load_state_dict(load_file(parts / "trained.safetensors"))
    ids, labels = (torch.cat([batch[name] for batch in batches_of(0)]) for name in ("ids", "labels"))
    assert found["held_out"]["loss"] == pytest.approx(parity.loss_fn(trained_model(ids), labels).item(), rel=1e-6)
    normed.load_state_dict(load_file(refused / "trained.safetensors"))
    held_out = json.loads((refused / "trained.json").read_text())["held_out"]["loss"]
    assert held_out == pytest.approx(parity.loss_fn(normed.eval()(ids), labels).item(), rel=1e-6)
    said = json.loads((refused / "trained.json").read_text())["refused"]
    assert said.startswith("3 consecutive batches are not equivalent to one large batch: batch_norm")
    assert "--allow-batch-coupling" in said
