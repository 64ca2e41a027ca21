"""Optimizers that look at whole parameters, or at all together, step as on one device where ranks have parts of them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from tests.ranks import checkpoint_script as models
from tests.ranks import whole_parameters_script as fixture
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

CLIP, SAVED_AT, STEPS = 1.0, 2, 4
_PIPELINE = {"schedule": "1F1B", "microbatch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}, **_PIPELINE},
    "zero 1 flat": {"mesh": {"dp_shard": 2}, "zero": 1, "zero1_by": "flat"},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "dp2": {"mesh": {"dp_replicate": 2}},
    "V": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 2},
    "tp2 x pp2": {"mesh": {"tp": 2, "pp": 2}, **_PIPELINE},
    "tp2 x zero 1 flat": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 1, "zero1_by": "flat"},
    "tp2 x zero 1": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 1},
    "tp2 x zero 3": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3},
    "pp2 x zero 3": {"mesh": {"dp_shard": 2, "pp": 2}, "zero": 3, **_PIPELINE},
    "cp2 zero 3": {"mesh": {"cp": 2}, "zero": 3},
    "dp2 x tp2": {"mesh": {"dp_replicate": 2, "tp": 2}},
}


EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"mesh": {"ep": 2}},
    "dp_expert2": {"mesh": {"dp_expert": 2}},
    "dp2 x ep2": {"mesh": {"dp_shard": 2, "ep": 2}},
}


class Bench:
    """Programs of the layouts of a model, compiled when they are first asked for."""

    def __init__(self, root: Path, pool: RankPool, kind: str = "17") -> None:
        self.root, self.pool, self.kind = root, pool, kind
        model, batch = models.build(kind), models.batch_of(kind, -1)
        save_file({name: value.clone() for name, value in model.state_dict().items()}, root / "weights.safetensors")
        self.program = gp.export(model, (batch["ids"],), loss_fn=models.loss_fn, targets=(batch["labels"],))

    def run(self, layout: str, jobs: list[dict[str, Any]]) -> None:
        folder, asked = self.root / "programs" / layout, (LAYOUTS | EXPERTS)[layout]
        if not folder.exists():
            gp.partition(self.program, gp.plan(self.program, **asked)).save(folder)
        given = {"program": folder, "weights": self.root / "weights.safetensors", "clip": CLIP, "kind": self.kind}
        (self.root / "jobs.json").write_text(json.dumps([{**given, **job} for job in jobs], default=str))
        ranks = math.prod(asked["mesh"].values())
        self.pool.torchrun(Path(fixture.__file__), [str(self.root / "jobs.json")], nproc=ranks, timeout_s=300)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Bench:
    return Bench(tmp_path_factory.mktemp("whole"), pool)


@cache
def eager(name: str, kind: str) -> dict[str, Tensor]:
    """The weights of a model after all steps on one device."""
    model = models.build(name)
    optimizer = fixture.OPTIMIZERS[kind](model.named_parameters())
    for step in range(STEPS):
        batch = models.batch_of(name, step)
        models.loss_fn(model(batch["ids"]), batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def error(file: Path, name: str, kind: str) -> float:
    found, expected = load_file(file), eager(name, kind)
    return float(torch.stack([(found[name] - value).abs().max() for name, value in expected.items()]).max())


def stepped(bench: Bench, first: str, then: str, kinds: list[str]) -> None:
    """Train under one layout to the end, and save between; go on from there under another."""
    root = bench.root / f"{first}, {then}"
    root.mkdir()
    common = [{"optimizer": kind, "save": root / kind} for kind in kinds]
    straight = {"steps": (0, STEPS), "save_at": SAVED_AT}
    bench.run(first, [{**job, **straight, "out": root / f"{job['optimizer']} straight"} for job in common])
    further = {"steps": (SAVED_AT, STEPS)}
    bench.run(then, [{**job, **further, "load": job["save"], "out": root / f"{job['optimizer']} on"} for job in common])
    found = {
        (kind, how): error(root / f"{kind} {how}", bench.kind, kind) for kind in kinds for how in ("straight", "on")
    }
    assert all(each < 1e-4 for each in found.values()), found  # none is NaN


@pytest.mark.costly
def test_whole_parameters_are_stepped_over_tp_and_go_on_over_shards(bench: Bench) -> None:
    stepped(bench, "tp2", "zero 3", ["lars", "adafactor", "global", "counted", "listed"])


@pytest.mark.costly
def test_whole_parameters_are_stepped_over_stages_and_go_on_over_slices(bench: Bench) -> None:
    stepped(bench, "pp2", "zero 1 flat", ["orthogonal", "global", "counted"])


@pytest.mark.costly
def test_state_of_slices_goes_on_in_shards(bench: Bench) -> None:
    stepped(bench, "zero 1 flat", "tp2", ["counted"])


@pytest.mark.costly
def test_what_torch_has_no_rule_for_steps_whole_parameters(bench: Bench) -> None:
    """Its fused SGD looks at elements, but takes no DTensors."""
    stepped(bench, "zero 3", "zero 2", ["fused"])


@pytest.mark.slow
@pytest.mark.parametrize("first", sample([*LAYOUTS], 4))
def test_every_layout_steps_whole_parameters(first: str, bench: Bench) -> None:
    names = list(LAYOUTS)
    stepped(bench, first, names[(names.index(first) + 4) % len(names)], list(fixture.OPTIMIZERS))


@pytest.mark.slow
def test_whole_experts_are_stepped(tmp_path: Path, pool: RankPool) -> None:
    bench, names = Bench(tmp_path, pool, "moe"), list(EXPERTS)
    for first, then in zip(names, [*names[1:], names[0]]):
        stepped(bench, first, then, ["lars", "global", "adafactor"])
