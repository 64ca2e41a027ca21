"""``--dropout kernel``: training with the masks that ranks draw, against an eager loop that drops by the same ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.emitted import random_streams
from graphpar.verification import verify_all
from graphpar.verification.reference import run_reference
from graphpar.verification.reference_results import Reference
from graphpar.verification.substituted import Substituted
from tests.ranks import kernel_dropout_script
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

STEPS, HALF = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {}, "microbatch_size": 4},
    "tp": {"mesh": {"tp": 2}, "microbatch_size": 4},
    "tp, recomputed": {"mesh": {"tp": 2}, "recompute": "full"},
    "tp, heads whole": {"mesh": {"tp": 2}, "shard_plan": {"blocks.*.q": "replicate", "blocks.*.k": "replicate", "blocks.*.v": "replicate"}},
    "pp": {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 2},
    "pp, recomputed": {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 2, "recompute": "full"},
    "split backwards": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 2},
    "interleaved": {"mesh": {"pp": 2}, "schedule": "Interleaved1F1B", "microbatch_size": 2, "recompute": "selective"},
    "dp": {"mesh": {"dp_replicate": 2}, "microbatch_size": 2},
    "dp and tp": {"mesh": {"dp_replicate": 2, "tp": 2}, "microbatch_size": 2},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "selective"},
    "budget": {"mesh": {"tp": 2}, "recompute": "budget:0.5"},
    "cp, heads": {"mesh": {"cp": 2}},
}  # fmt: skip


def planned(layout: str) -> gp.Plan:
    return gp.plan(example("gpt_dropout"), dropout="kernel", **LAYOUTS[layout])


class _Masks(Substituted):
    """Attention of the whole batch on one device, which drops by the masks that the ranks of ``plan`` draw."""

    plan: gp.Plan
    shards: int

    def _attention(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        (keys, _, _), rows, heads = self.stream(), self.plan.microbatch_size, query.size(1) // self.shards
        kept = torch.zeros(query.shape[:-1] + (key.size(-2),), dtype=torch.bool)
        for begin in range(0, query.size(0), rows):
            for shard in range(self.shards):
                place = slice(begin, begin + rows), slice(shard * heads, (shard + 1) * heads)
                ones = torch.eye(key.size(-2), dtype=query.dtype).expand(rows, heads, -1, -1)
                sharded = [(1, shard, self.shards)] if self.shards > 1 else []
                zeros = torch.zeros_like(query[place])  # no scores are so low that a weight is zero
                drawn = random_streams.dropout_attention(
                    zeros, zeros, ones, keys[begin : begin + rows], None, dropout_p, kernel=True, sharded=sharded
                )
                kept[place] = drawn != 0
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        if is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
        return (scores.softmax(-1) * kept / (1 - dropout_p)) @ value


def reference_of(plan: gp.Plan, shards: int, monkeypatch: pytest.MonkeyPatch) -> Reference:
    """Train the eager model with those masks: ``shards`` is over how many ranks heads are divided."""
    program = example("gpt_dropout")
    assert program.source is not None
    mine = type("Masks", (_Masks,), {"plan": plan, "shards": shards})
    monkeypatch.setattr("graphpar.verification.reference.Substituted", mine)
    return run_reference(
        program.source, replace(plan, dropout="exact"), program.inputs, 2, layouts=program.stream_layouts
    )


def compared(layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a program that draws with the eager loop: verify is told that dropout is exact, so that it turns none off."""
    plan = planned(layout)
    parts = gp.partition(example("gpt_dropout"), plan)
    shards = 2 if 'sharded=[(1, rank("' in parts.files["blocks.py"] else 1
    parts.save(folder)
    record = json.loads((folder / "plan.json").read_text())
    assert record["dropout"] == "kernel"
    (folder / "plan.json").write_text(json.dumps(record | {"dropout": "exact"}))
    reference = reference_of(plan, shards, monkeypatch)
    (result,) = verify_all([folder], 2, references=[reference])
    assert result.ok, result
    assert not any("attention dropout" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sample(list(LAYOUTS), 4))
def test_gradients_are_those_of_an_eager_loop_with_the_same_masks(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(layout, tmp_path / "program", monkeypatch)


# ---- verify and check --------------------------------------------------------------------------------------------

TEXT = "    places = [number for dim, rank, ranks, *_ in sharded for number in (dim, rank, ranks)]"
FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "one seed for all": ("dp and tp", "random_streams.py", TEXT, "    return 5", "same seed"),
    "no shards": ("dp and tp", "random_streams.py", TEXT, "    places: list[int] = []", "same seed"),
    "text without its shard": ("tp", "blocks.py", ', sharded=[(1, rank("tp"), size("tp"))]', "", "same seed"),
    "one seed for all rows": ("dp and tp", "random_streams.py", "int(keys[:1].tolist()[0])", "7", "same seed"),
    "a seed for each rank": (
        "tp, heads whole", "random_streams.py", TEXT, "    places = [torch.distributed.get_rank()]", "different seeds on ranks 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *sample(list(FAULTS), 2)])
def test_verify_finds_wrong_seeds(fault: str | None, tmp_path: Path) -> None:
    layout, file, old, new, said = ("dp and tp", "", "", "", "") if fault is None else FAULTS[fault]
    parts = gp.partition(
        example("gpt_dropout"), planned(layout), model_file=str(example_file("gpt_dropout").path.resolve())
    )
    folder = Path(parts.save(tmp_path / "program"))
    if fault is not None:
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))
    assert gp.check(folder).ok  # its types say nothing of seeds
    result = gp.verify(folder, 1)
    assert result.ok == (fault is None), result
    assert any("attention dropout is drawn by torch's kernel" in note for note in result.notes)
    if fault is not None:
        (problem,) = result.problems
        assert said in problem


# ---- training ----------------------------------------------------------------------------------------------------


def trained(pool: RankPool, root: Path, layout: str) -> dict[str, list[float]]:
    """Train a program with each kind of dropout, and that of kernels again from a checkpoint in the middle; return the losses."""
    program = example("gpt_dropout")
    file = example_file("gpt_dropout")
    model: nn.Module = file.model()
    torch.manual_seed(0)
    save_file(
        {name: torch.randn_like(v) * 0.05 + (v.ndim == 1) * v for name, v in model.state_dict().items()},
        root / "weights.safetensors",
    )
    names = [entry.name for entry in program.inputs if entry.role != "sample_keys"]
    tensors = [*file.kwargs.values(), *file.targets]
    save_file({name: value.clone() for name, value in zip(names, tensors, strict=True)}, root / "batch.safetensors")
    common = {"weights": str(root / "weights.safetensors"), "batch": str(root / "batch.safetensors")}
    cases: list[Mapping[str, Any]] = []
    ranks = 1
    for kind in ("exact", "kernel"):
        plan = gp.plan(program, dropout=kind, **LAYOUTS[layout])
        folder, ranks = gp.partition(program, plan).save(root / kind), plan.mesh.size
        cases.append({**common, "program": str(folder), "out": str(root / f"{kind}_whole"), "steps": (0, STEPS)})
    half = {**cases[1], "out": str(root / "first"), "steps": (0, HALF), "save": str(root / "saved")}
    cases += [half, {**cases[1], "out": str(root / "kernel_on"), "steps": (HALF, STEPS), "load": str(root / "saved")}]
    (root / "cases.json").write_text(json.dumps(cases))
    pool.torchrun(Path(kernel_dropout_script.__file__), [str(root / "cases.json")], nproc=ranks, timeout_s=300)
    for rank in range(ranks):
        whole, on = (load_file(root / f"{name}_{rank}.safetensors") for name in ("kernel_whole", "kernel_on"))
        assert any(key.startswith("gradient.3") for key in on)
        assert all(torch.equal(value, whole[key]) for key, value in on.items())
    found = {kind: load_file(root / f"{kind}_whole_0.safetensors") for kind in ("exact", "kernel")}
    return {kind: [float(values[f"loss.{step}"]) for step in range(STEPS)] for kind, values in found.items()}


@pytest.mark.costly
@pytest.mark.parametrize("layout", sample(["tp", "pp, recomputed"], 1))
def test_it_goes_on_from_a_checkpoint_and_learns_as_with_exact_dropout(
    pool: RankPool, tmp_path: Path, layout: str
) -> None:
    losses = trained(pool, tmp_path, layout)
    assert losses["kernel"] != losses["exact"]
    assert losses["kernel"][-1] < losses["kernel"][0] - 0.02
    for one, other in zip(losses["kernel"], losses["exact"], strict=True):
        assert abs(one - other) < 0.05


# ---- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_the_plan_says_it_and_reads_it_again() -> None:
    program, plan = example("gpt_dropout"), planned("tp")
    assert plan.dropout == "kernel" and gp.Plan.from_json(plan.to_json()) == plan
    assert gp.plan(program, mesh={"tp": 2}).dropout == "exact"
    again = gp.partition(program, gp.Plan.from_json(plan.to_json()))
    assert again.files["blocks.py"] == gp.partition(program, plan).files["blocks.py"]
    assert again.files["blocks.py"].count("kernel=True") == 1
    assert "kernel=True" not in gp.partition(program, gp.plan(program, mesh={"tp": 2})).files["blocks.py"]
    assert "drawn by torch's own kernel" in str(plan) and "computed explicitly" not in str(plan)


@pytest.mark.costly
def test_prices_and_memory_follow() -> None:
    program, cluster = example("gpt_dropout"), "2xH100-SXM-80GB"
    exact = gp.partition(program, gp.plan(program, cluster, mesh={"tp": 2}, compile=False))
    kernel = gp.plan(program, cluster, mesh={"tp": 2}, dropout="kernel")
    slow, fast = exact.plan.predicted, kernel.predicted
    assert slow is not None and fast is not None
    assert fast.step_time_s < slow.step_time_s and max(fast.peak_memory_bytes) < max(slow.peak_memory_bytes)
    (said,) = (line for line in exact.report["warnings"] if line.startswith("With --dropout kernel"))
    estimate = gp.estimate(program, replace(exact.plan, dropout="kernel"), cluster)
    assert f"{1e6 * estimate.step_time_s:.3g}"[:3] in said or f"{1e3 * estimate.step_time_s:.3g}" in said
    assert "drawn by kernels" in str(kernel)


def test_what_it_can_not_do_is_refused() -> None:
    program = example("gpt_dropout")
    with pytest.raises(gp.GraphparError, match="dropout is 'kernels'; it must be one of exact, kernel"):
        gp.plan(program, mesh={"tp": 2}, dropout="kernels")
    with pytest.raises(gp.GraphparError, match="compiled blocks can't do"):
        gp.plan(program, mesh={"tp": 2}, dropout="kernel", compile=True)
    with pytest.raises(gp.GraphparError, match="no attention with dropout"):
        gp.plan(example("gpt"), mesh={"tp": 2}, dropout="kernel")
    record = planned("tp").to_json() | {"dropout": "none"}
    with pytest.raises(gp.GraphparError, match="dropout is 'none'"):
        gp.partition(program, gp.Plan.from_json(record))
