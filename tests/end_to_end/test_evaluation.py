"""``pipeline.eval`` is the model's evaluation on one device, and a rank needs its own rows alone, on every kind of mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import graphpar as gp
from graphpar.runtime.manifest import load_manifest
from tests.models import architectures
from tests.ranks import evaluation_script
from tests.tools.rank_pool import RankPool

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp": ("bert_dropout", {"mesh": {"dp_replicate": 2, "tp": 2}}, {}),
    "cp": ("llama", {"mesh": {"dp_shard": 2, "cp": 2}}, {}),
    "ep": ("mixtral", {"mesh": {"dp_shard": 2, "ep": 2}}, {}),
    "zero 2": ("bert_dropout", {"mesh": {"dp_shard": 4}, "zero": 2}, {}),
    "zero 1, tp": ("bert_dropout", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 1}, {}),
    "bf16": ("bert_dropout", {"mesh": {"dp_shard": 2, "tp": 2}}, {"dtype": "bf16"}),
    "fp16": ("bert_dropout", {"mesh": {"dp_replicate": 2, "pp": 2}}, {"dtype": "fp16"}),
    "zero bubble": ("llama", {"mesh": {"dp_replicate": 2, "pp": 2}, "schedule": "ZBVZeroBubble"}, {}),
    "zero bubble, interleaved": ("llama", {"mesh": {"dp_shard": 2, "pp": 2}, "schedule": "InterleavedZeroBubble"}, {}),
}


@pytest.mark.slow
def test_evaluation_and_own_rows_on_every_kind_of_mesh(tmp_path: Path, pool: RankPool) -> None:
    expected = {}
    for case, (name, asked, precision) in CASES.items():
        program = architectures.program_of(name, evaluates=True, **precision)
        out = gp.partition(program, gp.plan(program, **asked)).save(tmp_path / case)
        _, kwargs, loss_fn, targets = architectures._example(name)
        model = architectures.build(name).eval()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        held = {n for names in load_manifest(out).ties for n in names[1:]}
        save_file({key: value for key, value in state.items() if key not in held}, out / "weights.safetensors")
        inputs = [spec.name for spec in load_manifest(out).inputs]
        save_file(dict(zip(inputs, (*kwargs.values(), *(t.clone() for t in targets)))), out / "batch.safetensors")
        with torch.no_grad():
            expected[case] = float(loss_fn(model(**kwargs), *targets))
    pool.torchrun(Path(evaluation_script.__file__), [str(tmp_path)], nproc=4, timeout_s=500)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(4)]

    for case, (_, _, precision) in CASES.items():
        close = {"rel": 2e-2 if precision else 1e-5}
        evaluated = [found["loss"] for rank in ranks for found in rank[case]["evaluated"] if found]
        assert evaluated == pytest.approx([expected[case]] * len(evaluated), **close), case
        assert len(evaluated) >= 4, case
        assert all(rank[case]["untouched"] for rank in ranks), case
        for key in ("trained", "norms"):
            numbers = [number for rank in ranks for number in rank[case][key]]
            assert numbers == pytest.approx([numbers[0]] * 8, rel=1e-6), (case, key)
