"""A rank may be given the whole batch, or its own rows of what its stages use; what ranks count of them is added up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import graphpar as gp
from graphpar.runtime.errors import LaunchError
from graphpar.runtime.stages.batches import sum_of_counts
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool

SCRIPT = """
import json, sys
import torch
from graphpar.runtime import Pipeline, start

folder, results, given = sys.argv[1:]

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(2, 200, (8, 16), generator=generator), "labels": torch.randint(0, 200, (8, 16), generator=generator)}

with start(60) as ranks, Pipeline(folder, ranks.device) as pipeline:
    pipeline.load_weights()
    losses = []
    for step in range(2):
        whole = batch(step)
        mine = {name: whole[name][pipeline.data.rows] for name in pipeline.data.names}
        if given == "mixed" and "labels" in mine:
            mine["ids"] = whole["ids"]
        loss = pipeline.step(whole if given == "whole" else mine, step=step, broadcast_loss=True)
        losses.append(loss.item())
    norm = pipeline.clip_grad_norm_(1.0)
    part = pipeline.data
    record = {"losses": losses, "norm": norm.item(), "names": part.names, "rows": [part.rows.start, part.rows.stop]}
    open(f"{results}/{given}_{ranks.rank}.json", "w").write(json.dumps(record))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "script.py").write_text(SCRIPT)
    mesh = {"dp_replicate": 2, "pp": 2}
    plan = gp.plan(example("gpt"), mesh=mesh, microbatch_size=2, schedule="1F1B")  # type: ignore[arg-type]
    gp.partition(example("gpt"), plan, model_file=str(example_file("gpt").path.resolve())).save(folder / "out")
    return folder


def _run(folder: Path, given: str, pool: RankPool) -> list[dict[str, object]]:
    pool.torchrun(folder / "script.py", [str(folder / "out"), str(folder), given], nproc=4, timeout_s=120)
    return [json.loads((folder / f"{given}_{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.costly
def test_own_rows_are_the_whole_batch(folder: Path, pool: RankPool) -> None:
    whole, own = _run(folder, "whole", pool), _run(folder, "own", pool)

    assert whole == own
    assert [(rank["names"], rank["rows"]) for rank in own] == [
        (["ids"], [0, 4]),
        (["ids"], [4, 8]),
        (["labels"], [0, 4]),
        (["labels"], [4, 8]),
    ]


@pytest.mark.costly
def test_rows_of_both_kinds_are_refused(folder: Path, pool: RankPool) -> None:
    message = "the input ids has the rows of the global batch, but labels those of one of 2 replicas"
    with pytest.raises(LaunchError, match=message):
        _run(folder, "mixed", pool)


def test_counts_in_16_bits_of_many_replicas_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_after_the_other(total: torch.Tensor, group: object) -> None:
        own = total.clone()
        for _ in range(999):
            total += own

    monkeypatch.setattr(torch.distributed, "all_reduce", one_after_the_other)
    count = torch.tensor(100.0, dtype=torch.bfloat16)
    total = sum_of_counts([count, count], object())  # type: ignore[arg-type]
    assert total.dtype == torch.bfloat16
    assert total.item() == pytest.approx(200_000, rel=2**-8)
