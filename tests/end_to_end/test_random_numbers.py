"""Models that draw random numbers, on every kind of mesh, against themselves on one device with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

import graphpar as gp
from graphpar.runtime import load_manifest
from graphpar.verification import verify_all
from graphpar.verification.type_check import check_folder
from tests.models.random_models import case
from tests.tools.samples import sample

MESHES: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2}, "schedule": "1F1B"},
    "tp": {"mesh": {"tp": 2}},
    "replicas": {"mesh": {"dp_replicate": 2}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "recomputed": {"mesh": {"pp": 2}, "recompute": "full", "schedule": "1F1B"},
    "recomputed in part": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "selective"},
}
PAIRS = [(name, mesh) for name in ("diffusion", "autoencoder", "masked") for mesh in MESHES]
PAIRS += [("diffusion", mesh) for mesh in RECOMPUTED]


def _verify(pairs: list[tuple[str, str]]) -> list[gp.Parts]:
    # What draws in training alone can't be evaluated.
    programs = {name: case(name).export(evaluates=name != "diffusion") for name, _ in pairs}
    parts = [gp.partition(programs[n], gp.plan(programs[n], **(MESHES | RECOMPUTED)[mesh])) for n, mesh in pairs]
    for pair, found in zip(pairs, verify_all(parts, 3, timeout_s=600)):
        assert found.ok, (pair, found.problems, found.max_error)
    return parts


@pytest.mark.costly
def test_numbers_are_those_of_one_device_in_stages_and_shards() -> None:
    parts = _verify([("diffusion", "recomputed"), ("autoencoder", "tp"), ("masked", "zero 3")])

    assert "normal(stream(sample_keys, 1), [6, 8])" in parts[0].files["stage_0.py"]
    assert parts[1].report["model"]["draws"] == [4, 2]
    assert all(load_manifest(each.folder).no_eval is None for each in parts[1:])


@pytest.mark.slow
def test_numbers_are_those_of_one_device_everywhere(tmp_path: Any) -> None:
    for place, parts in enumerate(_verify(sample(PAIRS, 14))):
        parts.save(tmp_path / str(place))
        checked = check_folder(tmp_path / str(place))
        assert checked.ok, checked.problems
