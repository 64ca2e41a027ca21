"""``torch.compile`` of the blocks changes no number beyond rounding, whatever runs around them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import graphpar as gp
from graphpar.frontend.modelfile import example_batch, initial_weights
from graphpar.runtime.compiled import check_compiles, check_recomputes_all
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages import emitted_package, stage_module
from tests.end_to_end import compiled_fixture
from tests.programs import example, example_file
from tests.rank_pool import RankPool

MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "1F1B": {"mesh": {"pp": 2}},
    "interleaved": {"mesh": {"pp": 2}, "schedule": "Interleaved1F1B"},
    "recomputed": {"mesh": {"dp_shard": 2}, "recompute": "full"},
    "cp": {"mesh": {"cp": 2}},
}


def compared(name: str, meshes: list[str], backend: str, tmp_path: Path, pool: RankPool) -> dict[str, dict[str, Any]]:
    """What :mod:`compiled_fixture` says of an example's programs on each mesh."""
    program, file = example(name), example_file(name)
    for mesh in meshes:
        gp.partition(program, gp.plan(program, **MESHES[mesh])).save(tmp_path / mesh)
    weights = {key: value.clone() for key, value in initial_weights(file).items()}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file(example_batch(file, load_manifest(tmp_path / meshes[0]).inputs), tmp_path / "batch.safetensors")
    pool.torchrun(Path(compiled_fixture.__file__), [str(tmp_path), backend], nproc=2, timeout_s=900)
    seen: dict[str, dict[str, Any]] = json.loads((tmp_path / "rank_0.json").read_text())
    assert seen.keys() == set(meshes)
    return seen


def test_compiled_blocks_train_as_others(tmp_path: Path, pool: RankPool) -> None:
    for name, found in compared("gpt", ["tp", "zero 1", "recomputed", "1F1B"], "aot_eager", tmp_path, pool).items():
        assert found["compiled"] == pytest.approx(found["plain"], rel=1e-5), name
        assert found["differs"] < 1e-5, name
        assert found["graphs"] and not found["breaks"], (name, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "meshes"), [("gpt_dropout", ["tp", "zero 3", "interleaved"]), ("llama", ["cp", "zero 2", "recomputed"])]
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_train_as_others_with_fused_kernels(
    name: str, meshes: list[str], tmp_path: Path, pool: RankPool
) -> None:
    for mesh, found in compared(name, meshes, "inductor", tmp_path, pool).items():
        assert found["compiled"] == pytest.approx(found["plain"], rel=1e-4), mesh
        assert found["differs"] < 1e-4, mesh


def test_what_cant_be_compiled_is_refused(tmp_path: Path) -> None:
    program = example("gpt")
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        plan = gp.plan(program, mesh={"pp": 2}, schedule=schedule)
        manifest = load_manifest(gp.partition(program, plan).save(tmp_path / schedule))
        with pytest.raises(RuntimeProgramError, match=rf"{schedule} splits backwards in two"):
            check_compiles(manifest, "inductor", torch.device("cpu"))
    parts = gp.partition(program, gp.plan(program, recompute="selective"))
    manifest = load_manifest(parts.save(tmp_path / "selective"))
    stage = stage_module(emitted_package(manifest), manifest.stages[0])
    with pytest.raises(RuntimeProgramError, match=r"recompute_selectively is about results of single operators"):
        check_recomputes_all(stage)
    manifest = load_manifest(gp.partition(program, gp.plan(program)).save(tmp_path / "one"))
    with pytest.raises(RuntimeProgramError, match=r"no backend 'induct'; there are .*inductor"):
        check_compiles(manifest, "induct", torch.device("cpu"))
