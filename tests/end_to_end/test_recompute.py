"""Programs whose blocks run their forward again: the numbers of those that don't, to the bit, and the collectives that are said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.work import Collective
from graphpar.passes.planning.planned import sharded_as
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.option_kinds import Recompute
from graphpar.verification.reference import run_reference
from tests.tools.programs import example, norms_pinned
from tests.tools.rank_pool import RankPool

FIXTURE = Path(__file__).parents[1] / "ranks" / "recomputation_script.py"
KINDS: tuple[Recompute, ...] = ("full", "selective", "budget:0.5", "pointwise")
STEPS = 2


def run(
    pool: RankPool, root: Path, name: str | gp.Program, mesh: dict[str, int], kinds: Sequence[Recompute], **asked: Any
) -> list[Path]:
    """Train the example without recomputation and with each of ``kinds``; return the folders."""
    program = example(name) if isinstance(name, str) else name
    asked = {"microbatch_size": 2, "global_batch": 8, "allow_batch_coupling": True, **asked}
    plans = [gp.plan(program, mesh=mesh, recompute=kind, **asked) for kind in ("none", *kinds)]
    assert program.source is not None
    reference = run_reference(program.source, plans[0], program.inputs, STEPS, layouts=program.stream_layouts)
    batches = [str(reference.batch_file(step)) for step in range(STEPS)]
    folders = [gp.partition(program, plan).save(root / str(place)) for place, plan in enumerate(plans)]
    cases = [{"program": str(each), "weights": str(reference.weights), "batches": batches} for each in folders]
    (root / "cases.json").write_text(json.dumps(cases))
    pool.torchrun(FIXTURE, [str(root / "cases.json")], nproc=plans[0].mesh.size, timeout_s=300)
    return folders


def same_bits(folders: Sequence[Path]) -> None:
    plain, *others = folders
    for file in sorted(plain.glob("found_*.safetensors")):
        expected = load_file(file)
        assert any(name.startswith("gradient") for name in expected)
        for folder in others:
            found = load_file(folder / file.name)
            assert found.keys() == expected.keys()
            differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
            assert not differing, f"{folder.name}: {differing}"


def sent(folder: Path, rank: int = 0) -> dict[str, int]:
    counts: dict[str, int] = json.loads((folder / f"found_{rank}.json").read_text())
    return counts


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt_dropout", "resnet_batchnorm"])
@pytest.mark.sampled(1 / 2)
def test_one_rank(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Dropout draws the same masks again, and statistics of BatchNorm are written once."""
    same_bits(run(pool, tmp_path, name, {}, KINDS))


class Averaging(nn.Module):
    """A layer that subtracts a running mean, which it then moves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = x - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x + self.down(self.up(h).relu())


@pytest.mark.costly
def test_buffers_that_are_read_and_written(pool: RankPool, tmp_path: Path) -> None:
    """What runs again reads them as they were, though later microbatches have written them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Averaging() for _ in range(4)))
    program = gp.export(model, (torch.randn(8, 8),), loss_fn=lambda y: y.square().mean())
    folders = run(pool, tmp_path, program, {"pp": 2}, KINDS, schedule="1F1B")  # each microbatch moves the mean
    same_bits(folders)
    assert 'writes=("mean",)' in (folders[1] / "stage_0.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama", "mixtral", "t5", "bert", "vit"])
def test_one_rank_of_other_models(pool: RankPool, tmp_path: Path, name: str) -> None:
    same_bits(run(pool, tmp_path, name, {}, KINDS))


ON_RANKS = [
    ("gpt_dropout", {"tp": 2}, {}),
    ("gpt_dropout", {"pp": 2}, {"schedule": "ZBVZeroBubble"}),
    ("gpt_dropout", {"pp": 2}, {"schedule": "InterleavedZeroBubble"}),
    ("gpt_dropout", {"dp_shard": 2}, {"zero": 3}),
    ("llama", {"cp": 2}, {}),
    ("mixtral", {"ep": 2}, {}),
    ("resnet_batchnorm", {"dp_replicate": 2}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "asked"), ON_RANKS, ids=lambda part: str(part))
def test_ranks(pool: RankPool, tmp_path: Path, name: str, mesh: dict[str, int], asked: dict[str, Any]) -> None:
    same_bits(run(pool, tmp_path, name, mesh, KINDS, **asked))


GATHERED = [
    ("llama", {"tp": 2}, {}),
    pytest.param("llama", {"tp": 2, "pp": 2}, {"schedule": "ZBVZeroBubble"}, marks=pytest.mark.slow),
    pytest.param("gpt_dropout", {"tp": 2, "pp": 2}, {"schedule": "InterleavedZeroBubble"}, marks=pytest.mark.slow),
    pytest.param("gpt2_tiny", {"tp": 2, "dp_shard": 2}, {"zero": 3}, marks=pytest.mark.slow),
    pytest.param("gpt", {"tp": 4}, {}, marks=pytest.mark.slow),
    pytest.param("llama", {"cp": 2}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "asked"), GATHERED, ids=lambda part: str(part))
@pytest.mark.costly
def test_gathers(pool: RankPool, tmp_path: Path, name: str, mesh: dict[str, int], asked: dict[str, Any]) -> None:
    program = example(name)
    blocks = [path for block in program.blocks.values() for path in block.instances]
    kinds: tuple[Recompute, ...] = (
        "gathers",
        {blocks[0]: "gathers", blocks[-1]: "full"},
        "gathers+pointwise",
    )
    pinned = norms_pinned(program, "S(1)") if "tp" in mesh else {}
    folders = run(pool, tmp_path, name, mesh, kinds, shard_plan=pinned, **asked)
    same_bits(folders)
    plan, counts = gp.Plan.load(folders[1]), [sent(folder)["all_gather_into_tensor"] for folder in folders[:2]]
    if "pp" not in mesh:
        assert counts[1] - counts[0] == _repeated(program, plan) * plan.microbatches * STEPS > 0


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("gathers", "self.read_args[0]().repeat(1, 2, 1)"),
        ("gathers", "self.make(*(read() for read in self.read_args), **named).flip(1)"),
        ("pointwise", "1.01 * self.make(*(read() for read in self.read_args), **named)"),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_verify_finds_a_result_that_is_made_wrongly_again(tmp_path: Path, kind: str, fault: str) -> None:
    program = example("llama")
    pinned = norms_pinned(program, "S(1)")
    plan = gp.plan(program, mesh={"tp": 2}, microbatch_size=2, global_batch=4, recompute=kind, shard_plan=pinned)
    parts = gp.partition(program, plan)
    file = parts.folder / "pointwise.py"
    made, text = "self.make(*(read() for read in self.read_args), **named)", file.read_text()
    assert made in text
    file.write_text(text.replace(made, fault))
    result = gp.verify(parts, steps=1)
    assert not result.ok
    assert "_proj" in result.worst["gradient"]


@pytest.mark.costly
def test_collectives_are_kept_or_repeated_as_said(pool: RankPool, tmp_path: Path) -> None:
    kinds: tuple[Recompute, ...] = ("selective", "full", {"transformer.h.0": "full"}, "budget:0.3", "budget:0.9")
    folders = run(pool, tmp_path, "gpt2_tiny", {"tp": 2}, kinds)
    same_bits(folders)
    program, plain = example("gpt2_tiny"), sum(sent(folders[0]).values())
    for kind, folder in zip(kinds, folders[1:], strict=True):
        plan = gp.Plan.load(folder)
        said = _repeated(program, plan) * plan.microbatches * STEPS
        assert sum(sent(folder).values()) == plain + said, kind
        assert (said > 0) == ("full" in str(kind)), kind


def _repeated(program: gp.Program, plan: gp.Plan) -> int:
    blocks = tuple(recomputed_blocks(program, plan.recompute).items())
    units = sharded_as(program, plan).units.of(Execution(blocks=blocks))
    return sum(
        times for unit in units for row, times in unit.kind.again.work.rows.items() if isinstance(row, Collective)
    )


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.linear(x)
        return made


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_frozen_blocks_have_nothing_to_run_again(kind: Recompute, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(_Layer().requires_grad_(False) for _ in range(3)), nn.Linear(8, 2))

    program = gp.export(model, (torch.randn(4, 8),), loss_fn=lambda y: y.square().mean())
    parts = gp.partition(program, gp.plan(program, 1, recompute=kind, microbatch_size=2))
    (warning,) = parts.report["warnings"]
    assert (
        warning
        == f"recompute={kind!r} has nothing to run again: no backward runs through the blocks of {program.name}."
    )
    assert load_manifest(parts.save(tmp_path / "out")).recompute == "none"
