"""State and activations in the memory of the host: the numbers of a program without, to the bit, and checkpoints between both."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.unit_bytes import UnitBytes
from graphpar.passes.planning.planned import sharded_as
from graphpar.passes.planning.recomputation import recomputed_blocks
from tests.ranks import checkpoint_script as models
from tests.ranks import offload_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

KIND, STEPS, HALF = "17", 3, 2
BOTH = ("optimizer", "activations")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {}},
    "one device, recomputed": {"mesh": {}, "recompute": "full"},
    "tp2": {"mesh": {"tp": 2}},
    "tp2 in microbatches": {"mesh": {"tp": 2}, "microbatch_size": 2},
    "pp2 1F1B": {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 2},
    "pp2 1F1B, recomputed": {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 2, "recompute": "full"},
    "pp2 V": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 2, "split": ["layers.0", "layers.1", "norm"]},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 1 flat": {"mesh": {"dp_shard": 2}, "zero": 1, "zero1_by": "flat", "microbatch_size": 2},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": 2, "microbatch_size": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3, "microbatch_size": 2},
    "zero 3, recomputed": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": {"layers.0": "full"}},
    "zero 3 under pp2": {"mesh": {"dp_shard": 2, "pp": 2}, "zero": 3, "schedule": "1F1B", "microbatch_size": 1},
    "dp2 x tp2": {"mesh": {"dp_replicate": 2, "tp": 2}},
    "zero 3, dp2": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 3, "microbatch_size": 1},
    "zero 2 under tp2": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 2, "microbatch_size": 1},
}  # fmt: skip
USUAL = ("tp2", "pp2 1F1B", "zero 1", "zero 2", "zero 3")


def run(pool: RankPool, root: Path, layout: str, offload: Sequence[str] = BOTH) -> tuple[gp.Program, gp.Plan]:
    """Train the program of a layout with and without offload, and each from a checkpoint of the other."""
    batch, model = models.batch_of(KIND, -1), models.build(KIND)
    program = gp.export(model, (batch["ids"],), loss_fn=models.loss_fn, targets=(batch["labels"],))
    save_file({name: value.clone() for name, value in model.state_dict().items()}, root / "weights.safetensors")
    plans = {
        kind: gp.plan(program, offload=what, **LAYOUTS[layout]) for kind, what in (("plain", ()), ("away", offload))
    }
    cases: list[dict[str, Any]] = []
    for name, plan in plans.items():
        folder = gp.partition(program, plan).save(root / name)
        common = {"kind": KIND, "program": str(folder), "weights": str(root / "weights.safetensors")}
        saves = {"save": str(root / "saved" / name), "save_at": HALF}
        cases.append({**common, **saves, "out": str(root / f"whole_{name}"), "steps": (0, STEPS)})
    for name, case in zip(reversed(plans), cases[:2]):
        load = str(root / "saved" / name)
        cases.append({**case, "load": load, "save_at": None, "steps": (HALF, STEPS), "out": f"{case['out']}_on"})
    (root / "cases.json").write_text(json.dumps(cases))
    ranks = math.prod(plans["plain"].mesh.degrees().values())
    pool.torchrun(Path(offload_script.__file__), [str(root / "cases.json")], nproc=ranks, timeout_s=300)
    return program, plans["away"]


def same(root: Path, name: str, other: str) -> dict[str, Tensor]:
    """Check that both trained to the same bits from where they began; return what is of rank 0."""
    files = sorted(root.glob(f"{name}_[0-9].safetensors"))
    assert files
    for file in files:
        found, expected = load_file(file), load_file(root / file.name.replace(name, other))
        assert {key.split(".")[0] for key in found} == {"loss", "gradient", "state", "parameter"}
        assert found.keys() <= expected.keys()
        differing = [key for key, value in found.items() if not torch.equal(value, expected[key])]
        assert not differing, f"{file.name}: {differing}"
    return load_file(files[0])


def moved(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(root.glob(f"{name}_[0-9].json"))]


@cache
def on_one_device() -> list[float]:
    """Train the model without graphpar, as the script does; return its losses."""
    model = models.build(KIND)
    optimizer, losses = models.optimizer_of(model.named_parameters()), []
    for step in range(STEPS):
        batch = models.batch_of(KIND, step)
        loss = models.loss_fn(model(batch["ids"]), batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), offload_script.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        models.scheduled(optimizer)
        losses.append(loss.item())
    return losses


def check(root: Path) -> None:
    found = same(root, "whole_away", "whole_plain")
    same(root, "whole_away_on", "whole_plain")
    same(root, "whole_plain_on", "whole_plain")
    for step, loss in enumerate(on_one_device()):
        assert math.isclose(found[f"loss.{step}"].item(), loss, rel_tol=2e-5)
    assert all(each == {"away": []} for each in moved(root, "whole_plain"))
    for each in moved(root, "whole_away"):
        assert each["sent"] > each["fetched"] > 0 and each["away"] == []


@pytest.mark.costly
@pytest.mark.parametrize("layout", sample(USUAL, 2))
def test_the_numbers_are_those_without(pool: RankPool, tmp_path: Path, layout: str) -> None:
    run(pool, tmp_path, layout)
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sample(list(LAYOUTS), 4))
def test_the_numbers_are_those_without_under_more_plans(pool: RankPool, tmp_path: Path, layout: str) -> None:
    run(pool, tmp_path, layout)
    check(tmp_path)


def check_params(pool: RankPool, root: Path, layout: str) -> None:
    """Also in a program without: what FSDP2 moves to a host that is the device stays there, so that the numbers are its optimizer's."""
    run(pool, root, layout, ["params", "optimizer"])
    for name, other in (("away", "plain"), ("away_on", "plain"), ("plain_on", "plain")):
        same(root, f"whole_{name}", f"whole_{other}")
    assert all(each == {"away": [], "params": True, "sent": 0, "fetched": 0} for each in moved(root, "whole_away"))
    assert all(each == {"away": []} for each in moved(root, "whole_plain"))


@pytest.mark.costly
@pytest.mark.parametrize("layout", sample(["zero 2", "zero 3", "zero 3 under pp2"], 1))
def test_shards_of_parameters_on_the_host(pool: RankPool, tmp_path: Path, layout: str) -> None:
    check_params(pool, tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sample([each for each in LAYOUTS if each.startswith(("zero 2", "zero 3"))], 3))
def test_shards_of_parameters_on_the_host_under_more_plans(pool: RankPool, tmp_path: Path, layout: str) -> None:
    check_params(pool, tmp_path, layout)


@pytest.mark.costly
@pytest.mark.parametrize("layout", sample(["pp2 1F1B", "pp2 1F1B, recomputed", "tp2 in microbatches"], 1))
def test_what_is_moved_is_what_is_priced(pool: RankPool, tmp_path: Path, layout: str) -> None:
    program, plan = run(pool, tmp_path, layout, ["activations"])
    same(tmp_path, "whole_away", "whole_plain")
    execution = Execution(blocks=tuple(recomputed_blocks(program, plan.recompute).items()), offload=plan.offload)
    units = sharded_as(program, plan).units.of(execution, required=plan.split_points)
    kept = UnitBytes(units, plan.mesh, execution)
    starts = [place for place, unit in enumerate(units) if unit.split_point in (None, *plan.split_points)]
    stages = list(zip(starts, [*starts[1:], len(units)]))
    expected = [STEPS * plan.microbatches * kept.moved(*stage, plan.microbatch_size) for stage in stages]
    found = [each["sent"] for each in moved(tmp_path, "whole_away")]
    assert found == (expected if plan.mesh.pp > 1 else expected * plan.mesh.size)
