"""Models of the suites of sharded data parallelism: the numbers of one device, and those of data parallelism written by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import graphpar as gp
from graphpar.verification import verify_all
from tests.models.fsdp_models import MODELS
from tests.ranks import fsdp_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

BY_HAND = [name for name in MODELS if name not in ("dropout", "norm over examples", "shared parameters")]
"""Each of the others needs what a rank does not know by itself: the masks of all examples, the scales of its own."""

MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"dp_replicate": 2}},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "tp": {"mesh": {"tp": 2}},
    "zero 2, tp": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 2},
    "pp": {"mesh": {"pp": 2}},
    "pp, zero 1": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 1},
    "pp, zero 2": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 2},
    "pp, zero 3": {"mesh": {"pp": 2, "dp_shard": 2}},
    "hybrid": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
}
SAMPLE = [("shared transformer", "zero 3"), ("branches", "zero 2"), ("twice", "zero 3"), ("uneven", "zero 2")]


@functools.cache
def _program(name: str) -> gp.Program:
    return MODELS[name].exported()


@functools.cache
def _parts(name: str, mesh: str) -> gp.Parts:
    return gp.partition(_program(name), gp.plan(_program(name), **MESHES[mesh]))


def _as_by_hand(cases: list[tuple[str, str]], out: Path, pool: RankPool) -> None:
    arguments = []
    for number, (name, mesh) in enumerate(cases):
        folder = _parts(name, mesh).save(out / f"program_{number}", weights=MODELS[name].model().state_dict())
        arguments += [name, str(folder)]
    ranks = _parts(*cases[0]).plan.mesh.size
    pool.torchrun(Path(fsdp_script.__file__), [str(out), *arguments], nproc=ranks, timeout_s=300)
    for rank in range(ranks):
        report = json.loads((out / f"rank_{rank}.json").read_text())
        for case, errors in zip(cases, report.values(), strict=True):
            assert max(errors.values()) < 2e-5, (case, errors)


@pytest.mark.costly
def test_as_data_parallelism_by_hand(tmp_path: Path, pool: RankPool) -> None:
    _as_by_hand(SAMPLE, tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", sample(list(MESHES), 3))
def test_all_as_data_parallelism_by_hand(mesh: str, tmp_path: Path, pool: RankPool) -> None:
    _as_by_hand([(name, mesh) for name in BY_HAND], tmp_path, pool)


def _exact(cases: list[tuple[str, str]]) -> None:
    for case, outcome in zip(cases, verify_all([_parts(*case) for case in cases], 3, timeout_s=600)):
        assert outcome.ok, (case, outcome.problems)
        assert max(outcome.max_error.values()) < 1e-5, (case, outcome.max_error)


@pytest.mark.costly
def test_what_ranks_do_not_know_is_exact() -> None:
    _exact([("dropout", "zero 2"), ("norm over examples", "zero 3"), ("norm over examples", "replicas")])
    _exact([("shared parameters", mesh) for mesh in ("tp", "pp", "zero 3", "replicas")])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", sample(list(MESHES), 3))
def test_all_are_exact(mesh: str) -> None:
    _exact([(name, mesh) for name in MODELS])
