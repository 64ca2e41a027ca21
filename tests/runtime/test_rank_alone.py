"""One rank of a plan, on a group in which the others do not exist: it runs, and takes what it takes among them."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli.main import main
from graphpar.ir.precision import Precision
from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging import lone_group
from graphpar.runtime.debugging.rank_alone import Clock, Memory, measure, run
from tests.ranks import rank_alone_script
from tests.tools.programs import example_file, norms_pinned, traced_once
from tests.tools.rank_pool import RankPool

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("gpt2_tiny", {"mesh": {"tp": 2}}),
    "tp, sequence": ("gpt", {"mesh": {"tp": 2}, "overlap_tp": True, "norms": "S(1)"}),
    "1F1B": ("gpt2_tiny", {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b"}),
    "GPipe": ("gpt", {"mesh": {"pp": 2}, "schedule": "gpipe"}),
    "Interleaved1F1B": ("llama", {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "interleaved1f1b"}),
    "InterleavedZeroBubble": ("llama", {"mesh": {"pp": 2}, "schedule": "interleavedzerobubble"}),
    "ZBV": ("llama", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zbv", "zero": 2}),
    "DualPipeV": ("llama", {"mesh": {"pp": 2}, "schedule": "dualpipev"}),
    "four stages": ("gpt2_tiny", {"mesh": {"pp": 4}, "zero": None}),
    "replicas": ("gpt_dropout", {"mesh": {"dp_replicate": 2}}),
    "zero 1": ("gpt2_tiny", {"mesh": {"dp_shard": 2}, "zero": 1}),
    "zero 1, flat": ("llama", {"mesh": {"dp_shard": 3}, "zero": 1, "zero1_by": "flat", "global_batch": 12}),
    "zero 3": ("llama", {"mesh": {"dp_shard": 4}, "zero": 3, "dtype": "bf16"}),
    "zero 3, pipeline": ("gpt", {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 3}),
    "cp": ("llama", {"mesh": {"cp": 2, "tp": 2}}),
    "cp, zero 3": ("llama", {"mesh": {"cp": 2, "dp_shard": 2}, "zero": 3}),
    "ep": ("mixtral", {"mesh": {"ep": 2, "dp_replicate": 2}}),
    "dp_expert": ("mixtral", {"mesh": {"dp_expert": 2, "tp": 2}}),
    "room": ("mixtral", {"mesh": {"dp_expert": 2, "ep": 2}, "expert_room": 1.5}),
    "recomputed": ("llama", {"mesh": {"pp": 2, "tp": 2}, "recompute": "full"}),
    "fp16": ("gpt", {"mesh": {"pp": 2}, "dtype": "fp16"}),
    "statistics of replicas": ("resnet_batchnorm", {"mesh": {"dp_replicate": 2}}),
}


def emitted(name: str, folder: Path) -> Path:
    model, given = PLANS[name]
    pins = {"global_batch": 8, "allow_batch_coupling": True, **given}
    program = traced_once(example_file(model), None, Precision.of(dtype=pins.pop("dtype", "fp32")))
    pins["shard_plan"] = norms_pinned(program, pins.pop("norms", ""))
    gp.partition(program, gp.plan(program, **pins)).save(folder)
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(1 / 4)
def test_every_rank_of_a_plan_runs_alone(name: str, tmp_path: Path) -> None:
    folder = emitted(name, tmp_path / "out")
    world = math.prod(PLANS[name][1]["mesh"].values())
    losses = 0
    for rank in range(world):
        found = measure(folder, rank, 1)
        assert found.finite and found.allocated_bytes > 0
        assert found.predicted is not None and found.allocated_bytes < 1.1 * found.predicted["allocated_bytes"]
        assert any(each.name.startswith("forward of stage") for each in found.actions)
        assert any(each.name.startswith(("backward of", "inputs of")) for each in found.actions)
        assert all(each.median_s >= 0 for each in (*found.parts, *found.actions, *found.blocks)) and found.step_s > 0
        losses += found.loss is not None
    assert losses == world // PLANS[name][1]["mesh"].get("pp", 1)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["1F1B", "ZBV", "zero 1", "zero 3", "cp", "dp_expert"])
@pytest.mark.sampled(1 / 2)
def test_a_rank_alone_is_as_it_is_among_its_peers(name: str, tmp_path: Path, pool: RankPool) -> None:
    folder = emitted(name, tmp_path / "out")
    world = math.prod(PLANS[name][1]["mesh"].values())
    pool.torchrun(Path(rank_alone_script.__file__), [str(folder), str(tmp_path)], nproc=world, timeout_s=240)
    for rank in range(world):
        among_peers, shapes = json.loads((tmp_path / f"{rank}.json").read_text())
        with (
            start(alone=(rank, world)) as ranks,
            Memory(ranks.device) as memory,
            Pipeline(folder, ranks.device) as pipeline,
        ):
            assert ranks.world_size == world and ranks.backend == lone_group.BACKEND
            found = run(pipeline, Clock(ranks.device), memory)
            own = rank_alone_script.shapes(pipeline, found)
        assert own == shapes
        # gloo's own buffers and pickled objects of other ranks come on top
        assert 0.85 * among_peers <= memory.allocated <= 1.01 * among_peers


def values_of(group: dist.ProcessGroup, rank: int, world: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What each collective gives, and what it should: as if all ranks had ``own``."""
    own, other = torch.arange(1.0, 2 * world + 1), dist.get_global_rank(group, (rank + 1) % world)
    nan = torch.full((2 * world,), math.nan)
    gathered = [torch.full((2 * world,), math.nan) for _ in range(world)]
    dist.all_gather(gathered, own, group=group)
    yield "all_gather", torch.stack(gathered), own.expand(world, -1)
    whole = torch.full((2 * world * world,), math.nan)
    dist.all_gather_into_tensor(whole, own, group=group)
    yield "all_gather_into_tensor", whole, own.repeat(world)
    inside = torch.full((world, 2 * world), math.nan)
    inside[rank] = own
    dist.all_gather_into_tensor(inside.view(-1), inside[rank], group=group)
    yield "all_gather in place", inside, own.expand(world, -1)
    part = torch.full((2,), math.nan)
    dist.reduce_scatter_tensor(part, own, group=group)
    yield "reduce_scatter_tensor", part, own.view(world, 2)[rank]
    received = nan.clone()
    dist.all_to_all_single(received, own, group=group)
    yield "all_to_all_single", received, own
    uneven = torch.full((2 * world + 3,), math.nan)
    sizes = [5, *[2] * (world - 1)]
    dist.all_to_all_single(uneven, own, sizes, [2] * world, group=group)
    yield "all_to_all_single, more than was sent", uneven, torch.cat([own, own])[: 2 * world + 3]
    total = own.clone()
    dist.all_reduce(total, group=group)
    yield "all_reduce", total, own
    shared = nan.clone()
    dist.broadcast(shared, src=other, group=group)
    yield "broadcast", shared, torch.zeros(2 * world)
    dist.broadcast(own, src=dist.get_global_rank(group, rank), group=group)
    yield "broadcast of its own", own, torch.arange(1.0, 2 * world + 1)
    for dtype in (torch.int64, torch.bool):
        tokens = torch.zeros(3, dtype=dtype)
        dist.recv(tokens, src=other, group=group)
        yield f"recv of {dtype}", tokens, torch.ones(3, dtype=dtype)
    functional = torch.ops._c10d_functional
    name = group.group_name
    made = functional.wait_tensor(functional.reduce_scatter_tensor(own, "sum", world, name))
    yield "functional reduce_scatter", made, own.view(world, 2)[rank]
    made = functional.wait_tensor(functional.all_to_all_single(own, [2] * world, [2] * world, name))
    yield "functional all_to_all", made, own
    yield (
        "functional all_gather",
        functional.wait_tensor(functional.all_gather_into_tensor(own, world, name)),
        own.repeat(world),
    )


def test_collectives_give_what_they_would_if_all_ranks_were_alike() -> None:
    with start(alone=(2, 4096)):
        assert dist.get_world_size() == 4096 and lone_group.is_alone()
        group = dist.new_group([0, 2, 4])
        assert isinstance(group, dist.ProcessGroup)
        for name, found, wanted in values_of(group, 1, 3):
            assert torch.equal(found, wanted), name
        drawn = torch.full((1000,), math.nan)
        dist.recv(drawn, src=0, group=group)
        assert 0.01 < float(drawn.std()) < 0.03
        again = drawn.clone()
        dist.recv(drawn, src=0, group=group)
        assert torch.equal(drawn, again), "a buffer is drawn once"
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": 2}, group=group)
        assert objects == [{"rank": 2}] * 3
    assert not lone_group.is_alone()


def test_rows_are_spread_evenly_over_experts(tmp_path: Path) -> None:
    folder = emitted("ep", tmp_path / "out")
    with start(alone=(0, 4)) as ranks, Pipeline(folder, ranks.device) as pipeline:
        expert_rows = importlib.import_module(f"{pipeline.package}.expert_rows")
        offs = torch.tensor([60, 60, 60, 61], dtype=torch.int32)  # nearly all of one expert
        assert expert_rows.rank_ends(offs, "ep") == [30, 61]
        assert expert_rows.own_offsets(offs, "ep").tolist() == [15, 30]


@pytest.mark.costly
def test_the_command_prints_a_rank_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = emitted("tp", tmp_path / "out")
    assert main(["run", str(folder), "--alone", "1", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Rank 1 of 2, at tp=1, alone on CPU; predicted for 2xCPU" in shown
    assert "forward of stage 0" in shown and "forward of transformer.h.0" in shown and "optimizer" in shown
    assert "Peak memory allocated: " in shown and "Not here: communication" in shown
    assert main(["run", str(folder), "--alone", "1", "--steps", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rank"] == 1 and data["finite"] and data["predicted"]["allocated_bytes"] > 0
    assert {each["name"] for each in data["actions"]} == {"forward of stage 0", "backward of stage 0"}
    blocks = [each for each in data["blocks"] if "transformer.h." in each["name"]]
    assert blocks and all(each["predicted_s"] > 0 for each in blocks)
    assert main(["run", str(folder), "--alone", "2"]) == 2
    assert "there is no rank 2: the program has the ranks 0 to 1" in capsys.readouterr().err


class Block(nn.Module):
    """Keeps as many bytes of gradients for the weights of its backward as of activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


class Twice(Block):
    """Backwards of stages with it can't be split."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


_HALVES: list[tuple[int, str, type[Block]]] = [
    (2, "ZBV", Block),
    (3, "InterleavedZeroBubble", Block),
    (2, "DualPipeV", Block),
    (2, "InterleavedZeroBubble", Twice),
]


@pytest.mark.costly
@pytest.mark.parametrize(("pp", "schedule", "block"), _HALVES)
def test_halves_of_backwards_take_what_is_predicted(pp: int, schedule: str, block: type[Block], tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 32), *(block(32) for _ in range(8)))

    program = gp.export(model, (torch.randint(16, (12, 64)),), loss_fn=lambda y: y.square().mean())
    plan = gp.plan(program, mesh={"pp": pp}, schedule=schedule, microbatch_size=4, global_batch=48)
    gp.partition(program, plan).save(tmp_path / "out")
    for rank, said in enumerate(gp.estimate(program, plan, f"{pp}xCPU").memory):
        measured = _measured(tmp_path / "out", rank, pp)
        assert 0.995 * measured <= said.allocated <= 1.05 * measured


_MOMENTS: dict[str, dict[str, Any]] = {
    "gradients come as activations go": {"mesh": {"dp_replicate": 2}, "global_batch": 8},
    "buckets are filled when activations are gone": {
        "mesh": {"dp_replicate": 2},
        "recompute": "full",
        "global_batch": 8,
    },
    "gradients are added up": {"mesh": {"dp_replicate": 2}, "global_batch": 32},
    "ZeRO 1": {"mesh": {"dp_shard": 4}, "zero": 1, "recompute": "full", "global_batch": 16},
    "ZeRO 2": {"mesh": {"dp_shard": 4}, "zero": 2, "global_batch": 64},
    "ZeRO 3": {"mesh": {"dp_shard": 4}, "zero": 3, "recompute": "full", "global_batch": 16},
    "ZeRO 3, some ranks keep it": {"mesh": {"dp_shard": 4}, "zero": 3, "reshard": 2, "global_batch": 16},
    "ZeRO 3, microbatches": {"mesh": {"dp_shard": 4}, "zero": 3, "global_batch": 64},
    "ZeRO 3, stages": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 3, "schedule": "1F1B", "global_batch": 32},
}


@pytest.mark.costly
@pytest.mark.parametrize("name", _MOMENTS)
@pytest.mark.sampled(1 / 2)
def test_the_moment_of_the_most_memory_is_found(name: str, tmp_path: Path) -> None:
    """With a head that is much larger than a block."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 96), *(Block(96) for _ in range(8)), nn.Linear(96, 2048))

    pins = {"recompute": "none"} | _MOMENTS[name]
    program = gp.export(model, (torch.randint(16, (8, 64)),), loss_fn=lambda y: y.square().mean())
    plan = gp.plan(program, f"{math.prod(pins['mesh'].values())}xCPU", microbatch_size=4, **pins)
    gp.partition(program, plan).save(tmp_path / "out")
    for pp, said in enumerate(gp.estimate(program, plan).memory):
        rank = pp * plan.mesh.size // plan.mesh.pp
        measured = _measured(tmp_path / "out", rank, plan.mesh.size)
        assert 0.97 * measured <= said.allocated <= 1.05 * measured


@pytest.mark.costly
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_large_unit_takes_what_is_predicted(zero: int, tmp_path: Path) -> None:
    """At level 1 one rank updates all of its weight. Above, what has arrived is there beside that during the forward."""
    program = gp.export(lambda: nn.Linear(512, 1024), (torch.randn(16, 64, 512),), loss_fn=lambda y: y.square().mean())
    plan = gp.plan(program, "4xCPU", mesh={"dp_shard": 4}, zero=zero, microbatch_size=4)
    gp.partition(program, plan).save(tmp_path / "out")
    measured = max(_measured(tmp_path / "out", rank, 4) for rank in range(4))
    assert 0.97 * measured <= gp.estimate(program, plan).memory[0].allocated <= 1.05 * measured


class Flat(nn.Module):
    """Parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(64, 64)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


_ARRIVALS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ZeRO 2 keeps what is gathered until the last microbatch is done": (
        Flat,
        torch.randn(4, 8, 64),
        {"zero": 2, "global_batch": 64},
    ),
    "the copy of a unit's gradients is there whole until the next one": (
        lambda: nn.Sequential(nn.Embedding(16, 96), *(Block(96) for _ in range(6))),
        torch.randint(16, (4, 8)),
        {"zero": 3, "global_batch": 16, "recompute": "full"},
    ),
    "as a unit takes what has arrived, what arrived for the one before is there": (
        lambda: nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)),
        torch.randn(4, 8, 512),
        {"zero": 2, "global_batch": 16},
    ),
    "a unit's only gradient stays until it has been reduced": (
        lambda: nn.Sequential(nn.Embedding(8192, 128), Block(128), Block(128)),
        torch.randint(16, (4, 8)),
        {"zero": 3, "global_batch": 32},
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", _ARRIVALS)
def test_what_comes_and_goes_of_sharded_state_takes_what_is_predicted(name: str, tmp_path: Path) -> None:
    model, x, pins = _ARRIVALS[name]
    program = gp.export(model, (x,), loss_fn=lambda y: y.square().mean())
    plan = gp.plan(program, "4xCPU", mesh={"dp_shard": 4}, microbatch_size=4, **{"recompute": "none", **pins})
    gp.partition(program, plan).save(tmp_path / "out")
    measured = _measured(tmp_path / "out", 0, 4)
    assert 0.99 * measured <= gp.estimate(program, plan).memory[0].allocated <= 1.02 * measured


def _measured(folder: Path, rank: int, world_size: int) -> int:
    """The most bytes that a rank of a program has allocated in a step."""
    with start(alone=(rank, world_size)) as ranks, Memory(ranks.device) as memory:
        with Pipeline(folder, ranks.device) as pipeline:
            run(pipeline, Clock(ranks.device), memory)
        del pipeline
    return memory.allocated


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [{"dp_replicate": 1}, {"dp_replicate": 2}, {"pp": 2, "dp_replicate": 2}], ids=str)
def test_inference_takes_what_is_predicted(mesh: dict[str, int], tmp_path: Path) -> None:
    """What stages send is there until the last microbatch has run; outputs are joined over microbatches and replicas."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 128))
    program = gp.export(model, (torch.randn(8, 64),), mode="infer")
    rows = 256 * 8 * mesh["dp_replicate"]
    plan = gp.plan(program, f"{math.prod(mesh.values())}xCPU", mesh=mesh, microbatch_size=256, global_batch=rows)
    gp.partition(program, plan).save(tmp_path / "out")
    for pp, said in enumerate(gp.estimate(program, plan).memory):
        measured = _measured(tmp_path / "out", pp * plan.mesh.size // plan.mesh.pp, plan.mesh.size)
        assert 0.97 * measured <= said.allocated <= 1.08 * measured


@pytest.mark.costly
def test_a_step_of_the_optimizer_takes_what_is_predicted(tmp_path: Path) -> None:
    """Two temporary tensors of the size of the largest parameter, when all else that comes and goes is small; three of a tied one that two
    stages have."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers = nn.Embedding(4096, 16), nn.ModuleList(Block(16) for _ in range(4))
            self.head = nn.Linear(16, 4096, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.table(x)
            for layer in self.layers:
                h = layer(h)
            made: Tensor = self.head(h)
            return made

    program = gp.export(Model, (torch.randint(16, (4, 2)),), loss_fn=lambda y: y.square().mean())
    for schedule in ("1F1B", "ZBV"):
        plan = gp.plan(program, mesh={"pp": 2}, schedule=schedule, microbatch_size=1, global_batch=4)
        gp.partition(program, plan).save(tmp_path / schedule)
        said = gp.estimate(program, plan, "2xCPU").memory[0].allocated
        measured = _measured(tmp_path / schedule, 0, 2)
        assert 0.99 * measured <= said <= 1.06 * measured
