"""Delays at named points change no number, a step leaves nothing behind, and events come in the order that was planned."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime.delays import POINTS, VARIABLE, read_delays
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.idle import left_in_schedule
from tests import steps_fixture
from tests.rank_pool import RankPool

ROWS, RANKS, STEPS = 8, 2, 3


class Layer(nn.Module):
    """Two products."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Layered(nn.Module):
    """Blocks of one class, in the order that ``order`` says, and the rest."""

    def __init__(self, blocks: int = 3, order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList([Layer() for _ in range(blocks)])
        self.last = nn.Linear(7, 3)
        self.order = tuple(range(blocks)) if order is None else order

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for index in self.order:
            h = self.layers[index](h)
        return self.last(h)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(ROWS, 6, generator=generator), "y": torch.randn(ROWS, 3, generator=generator)}


def trained(model: nn.Module, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps on one device."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=steps_fixture.LEARNING_RATE), []
    x, y = batch().values()
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


class Ran:
    """Programs that are run in one launch, case by case."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.cases: list[dict[str, Any]] = []
        self.programs: dict[str, Path] = {}
        save_file(batch(), folder / "batch.safetensors")

    def emit(self, name: str, model: nn.Module, mesh: Mapping[str, int], **asked: Any) -> gp.Parts:
        """Emit a program with two microbatches a rank."""
        x, y = batch().values()
        program = gp.export(model, (x,), loss_fn=lambda o, y: nn.functional.mse_loss(o, y), targets=(y,))
        parts = gp.partition(program, gp.plan(program, mesh=mesh, microbatch_size=2, **asked))
        self.programs[name] = parts.save(self.folder / name, weights=model.state_dict())
        (target,) = {entry.name for entry in program.inputs} - {"x"}
        save_file({"x": x, target: y}, self.folder / "batch.safetensors")
        return parts

    def add(self, name: str, program: str, environment: Mapping[str, str] | None = None, **more: Any) -> None:
        """Plan a run of an emitted program."""
        of_case = {"program": str(self.programs[program]), "batch": str(self.folder / "batch.safetensors")}
        self.cases.append(
            {"name": name, "out": str(self.folder), "environment": dict(environment or {}), **of_case, **more}
        )

    def run(self, timeout_s: float = 120.0) -> None:
        """Run all of them."""
        file = self.folder / "cases.json"
        file.write_text(json.dumps(self.cases))
        self.pool.torchrun(Path(steps_fixture.__file__), [str(file)], nproc=RANKS, timeout_s=timeout_s)

    def saw(self, name: str) -> list[dict[str, Any]]:
        """What each rank saw."""
        return [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]

    def check(self, name: str, model: nn.Module) -> None:
        """Compare losses and weights with those of one device."""
        losses, weights = trained(model)
        for saw in self.saw(name):
            assert saw["losses"] == pytest.approx(losses, rel=1e-5), name
        found = load_file(self.folder / f"{name}.safetensors")
        for key, value in weights.items():
            assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), (name, key)


@pytest.fixture
def ran(pool: RankPool, tmp_path: Path) -> Ran:
    return Ran(pool, tmp_path)


# ---- delays ------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"dp_replicate": 2}},
    "zero2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "pipeline": {"mesh": {"pp": 2}},
}
WHERE = ("", "@rank1")


def _delays(milliseconds: float, where: str) -> dict[str, str]:
    each = {point: f"{point}:{milliseconds}{where}" for point in POINTS}
    return {**each, "all": ",".join(each.values())}


def test_delays_change_nothing(ran: Ran) -> None:
    for name, asked in PROGRAMS.items():
        ran.emit(name, Layered(), **asked)
        for where in WHERE:
            ran.add(f"{name}-all{where}", name, {VARIABLE: _delays(2, where)["all"]})
    ran.run()

    for case in ran.cases:
        ran.check(case["name"], Layered())


@pytest.mark.slow
def test_each_delay_changes_nothing(ran: Ran) -> None:
    for name, asked in PROGRAMS.items():
        ran.emit(name, Layered(), **asked)
        for where, milliseconds in itertools.product(WHERE, (5, 50)):
            for point, text in _delays(milliseconds, where).items():
                ran.add(f"{name}-{point}-{milliseconds}{where}", name, {VARIABLE: text})
    ran.run(600)

    for case in ran.cases:
        ran.check(case["name"], Layered())


AT: dict[str, tuple[str, ...]] = {  # the points that a step of each program passes
    "replicas": ("after_loss", "before_reduce"),
    "zero3": ("after_loss", "before_reduce", "before_free", "before_gather"),
}


def test_a_step_takes_at_least_the_delay(ran: Ran) -> None:
    for name, points in AT.items():
        ran.emit(name, Layered(), **PROGRAMS[name])
        for point in points:
            ran.add(f"{name}-{point}", name, {VARIABLE: f"{point}:60@rank0"}, steps=1)
    ran.run()

    for case in ran.cases:
        assert ran.saw(case["name"])[0]["seconds"][0] > 0.06, case["name"]


UNWAITED = """
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
import torch.distributed as dist

class Unwaited(DefaultAllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.kept = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        self.buffers = output_tensor, input_tensor

def fully_shard_units(stage, _planned=fully_shard_units, **options):
    order = _planned(stage, **options)
    for layer in stage.layers.values():
        layer.set_custom_all_gather(Unwaited())
    return order
"""


def test_a_missing_wait_is_found(ran: Ran) -> None:
    ran.emit("zero3", Layered(), **PROGRAMS["zero3"])
    file = ran.programs["zero3"] / "stage_0.py"
    file.write_text(file.read_text() + UNWAITED)
    ran.add("unwaited", "zero3", {VARIABLE: "before_gather:30@rank1"})

    ran.run()

    with pytest.raises(AssertionError):
        ran.check("unwaited", Layered())


@pytest.mark.parametrize(
    "text",
    ["after_lost:20", "after_loss", "after_loss:x", "after_loss:-5", "after_loss:20@1", "after_loss:20@rankx", ":5"],
)
def test_delays_that_are_no_delays(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)

    with pytest.raises(RuntimeProgramError, match="the points are after_loss, before_reduce, before_free") as caught:
        read_delays(0)
    assert ("Did you mean 'after_loss'?" in str(caught.value)) == (text == "after_lost:20")


def test_delays_of_other_ranks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "after_loss:20@rank1, before_free:1.5@rank1")

    assert read_delays(1)
    assert not read_delays(0)


# ---- nothing is left ---------------------------------------------------------------------------------------------


LEFT = {
    "replicas": ("1 reductions of gradients have not been started",),
    "zero2": ("stage_0 is in the state PRE_BACKWARD", "the parameters of layers.1 are gathered"),
    "zero3": ("stage_0 is in the state PRE_BACKWARD", "a gather of layers.1 has not been waited for"),
}


def test_what_a_broken_step_leaves_is_listed(ran: Ran) -> None:
    for name in LEFT:
        ran.emit(name, Layered(), **PROGRAMS[name])
        ran.add(name, name, fails="layers.1")
        ran.add(f"{name}-infers", name, infers=True)
        ran.add(f"{name}-moves", name, moves=True)
    ran.run()

    for name in LEFT:
        ran.check(f"{name}-infers", Layered())
        for rank, saw in enumerate(ran.saw(name)):
            (message,) = saw["errors"]
            assert message.startswith(f"a step did not end on rank {rank}: ")
            assert [part for part in LEFT[name] if part not in message] == [], message
        for saw in ran.saw(f"{name}-moves"):
            (message,) = saw["errors"]
            assert message.startswith("first.weight is on the device meta, but the program was built for cpu"), message


def test_what_a_schedule_keeps_is_listed() -> None:
    stages: Any = [
        SimpleNamespace(stage_index=0, is_first=True, fwd_cache={}, bwd_cache={0: ()}),  # which torch never removes
        SimpleNamespace(stage_index=2, is_first=False, fwd_cache={3: (), 1: ()}, dw_runner={0: print}),
    ]

    assert list(left_in_schedule(SimpleNamespace(unshard_ops={2: []}, bwd_recv_ops={}), stages)) == [
        "stage 2 keeps activations that wait for their backward: microbatches 1, 3",
        "stage 2 keeps backwards of weights that were put off: microbatches 0",
        "the schedule keeps gathers of stages: 2",
    ]
