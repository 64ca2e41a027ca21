"""The memory of a rank that generates: what is predicted is no less than what is measured, with the widest windows of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graphpar as gp
from tests.end_to_end.test_generation import LENGTH, MODELS, VOCABULARY, WINDOWS
from tests.ranks import generation_memory_script
from tests.tools.rank_pool import RankPool


def check(cases: list[tuple[str, dict[str, int], float]], ranks: int, folder: Path, pool: RankPool) -> None:
    """Compare each (model, mesh, by how much more may be predicted), on the longest prompts, drawing tokens."""
    rows, predicted = 3, {}
    prompts = torch.randint(VOCABULARY, (2 * ranks * rows, LENGTH), generator=torch.Generator().manual_seed(0))
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()))
    for number, (name, mesh, most) in enumerate(cases):
        ids = torch.zeros(rows, LENGTH, dtype=torch.long)
        program = gp.export((MODELS | WINDOWS)[name], kwargs={"input_ids": ids}, mode="generate")
        parts = gp.partition(program, gp.plan(program, mesh=mesh))
        label = f"{name}_{number}"
        parts.save(folder / label)
        assert parts.compilation.estimate is not None
        predicted[label] = parts.compilation.estimate.memory, most
    pool.torchrun(Path(generation_memory_script.__file__), [str(folder), *predicted], nproc=ranks, timeout_s=300)
    for label, (memories, most) in predicted.items():
        for rank in range(ranks):
            place, measured = json.loads((folder / f"{label}-rank_{rank}.json").read_text())
            memory = memories[place]
            made = memory.allocated - memory.parameters - memory.buffers
            assert memory.transient > memory.cache / 8
            assert measured <= made <= most * measured, (label, rank, made / measured)


@pytest.mark.costly
def test_prompts_are_counted(pool: RankPool, tmp_path: Path) -> None:
    check([("llama", {"pp": 2}, 1.12), ("gpt2", {"dp_replicate": 2}, 1.12)], 2, tmp_path, pool)


@pytest.mark.costly
def test_prompts_longer_than_a_sliding_window_are_counted(pool: RankPool, tmp_path: Path) -> None:
    check([("mistral", {"pp": 2}, 1.3), ("gemma2", {"tp": 2}, 1.6)], 2, tmp_path, pool)


@pytest.mark.slow
def test_prompts_are_counted_where_layers_are_divided(pool: RankPool, tmp_path: Path) -> None:
    check([("gpt2", {"pp": 2}, 1.12), ("gpt2", {"tp": 2}, 1.4), ("mixtral", {"ep": 2}, 1.6)], 2, tmp_path, pool)
