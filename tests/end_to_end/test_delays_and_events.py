"""Delays at named points change no number, a step leaves nothing behind, and events come in the order that was planned."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.runtime.debugging.events import DELAY_VARIABLE, EVENTS_VARIABLE, POINTS, read_delays
from graphpar.runtime.debugging.idle import left_in_schedule
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.schedule_records import SCHEDULES
from tests.ranks import steps_script
from tests.tools.rank_pool import RankPool

ROWS, RANKS, STEPS = 8, 2, 3
CPU = torch.device("cpu")


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


class Reading(nn.Module):
    """Six blocks, and six others that each read what the first gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.encoder = nn.ModuleList([Layer() for _ in range(6)])
        self.decoder = nn.ModuleList([ReadingLayer() for _ in range(6)])
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = h = self.first(x)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            h = layer(h, memory)
        return self.last(h)


class ReadingLayer(nn.Module):
    """Two products of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.read = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return h + torch.tanh(self.own(h) + self.read(memory))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(ROWS, 6, generator=generator), "y": torch.randn(ROWS, 3, generator=generator)}


def trained(model: nn.Module, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps on one device."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=steps_script.LEARNING_RATE), []
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
        parts = gp.partition(program, gp.plan(program, mesh=mesh, **{"microbatch_size": 2, **asked}))
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
        self.pool.torchrun(Path(steps_script.__file__), [str(file)], nproc=RANKS, timeout_s=timeout_s)

    def saw(self, name: str) -> list[dict[str, Any]]:
        """What each rank saw."""
        return [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]

    def events(self, name: str, rank: int = 0, step: int = 1) -> list[tuple[str, str]]:
        """The events of one step, with the unit of each."""
        lines = [json.loads(line) for line in (self.folder / f"{name}.events.rank{rank}").read_text().splitlines()]
        assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
        assert {line["rank"] for line in lines} == {rank}
        return [(line["event"], line["unit"]) for line in lines if line["step"] == step]

    def check(self, name: str, model: nn.Module) -> None:
        """Compare losses and weights with those of one device."""
        losses, weights = trained(model)
        for saw in self.saw(name):
            assert saw["losses"] == pytest.approx(losses, rel=1e-5), name
        found = load_file(self.folder / f"{name}.safetensors")
        for key, value in weights.items():
            assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), (name, key)


LAYERS = {"units": ["**.[0-9]"]}
PROGRAMS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"dp_replicate": 2}},
    "zero1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero2": {"mesh": {"dp_shard": 2}, "zero": 2, **LAYERS},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": 3, **LAYERS},
    "pipeline": {"mesh": {"pp": 2}},
}
WHERE = ("", "@rank1")
AT: dict[str, tuple[str, ...]] = {  # the points that a step of each program passes
    "replicas": ("after_loss", "before_reduce"),
    "zero3": ("after_loss", "before_reduce", "before_free", "before_gather"),
}
LEFT = {
    "replicas": ("1 reductions of gradients have not been started",),
    "zero2": ("stage_0 is in the state PRE_BACKWARD", "the parameters of layers.1 are gathered"),
    "zero3": ("stage_0 is in the state PRE_BACKWARD", "a gather of layers.1 has not been waited for"),
}
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
ONE = {"mesh": {"dp_shard": 2}, "microbatch_size": ROWS // RANKS}
ORDERS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "reading": (Reading(), LAYERS),
    "reading-post": (Reading(), {"prefetch": "post", **LAYERS}),
    "three-none": (Layered(), {"prefetch": "none"}),
    "reused": (Layered(4, (0, 1, 0, 2, 3)), LAYERS),
}
MORE_ORDERS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    f"{name}-{when}-{distance}": (model, {"prefetch": when, "prefetch_distance": distance or None, **LAYERS})
    for name, model in {
        "one": Layered(1),
        "two": Layered(2),
        "three": Layered(),
        "reading": Reading(),
        "reused": Layered(4, (0, 1, 0, 2, 3)),
        "again": Layered(3, (0, 1, 2, 0, 1, 2)),
        "unused": Layered(4, (0, 2, 3)),
        "turned": Layered(4, (3, 1, 2, 0)),
    }.items()
    for when, distance in (("pre", 1), ("pre", 2), ("post", 1), ("post", 2), ("none", 0))
    if distance < 2 or name not in ("one", "again")  # refused: they have no second unit to gather
}


def _delays(milliseconds: float, where: str) -> dict[str, str]:
    each = {point: f"{point}:{milliseconds}{where}" for point in POINTS}
    return {**each, "all": ",".join(each.values())}


def _add_orders(ran: Ran, orders: Mapping[str, tuple[nn.Module, dict[str, Any]]]) -> None:
    for name, (model, asked) in orders.items():
        ran.emit(name, model, **ONE, **asked)
        ran.add(name, name, {EVENTS_VARIABLE: str(ran.folder / f"{name}.events")})


@pytest.fixture(scope="module")
def ran(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What the tests look at, in one launch."""
    ran = Ran(pool, tmp_path_factory.mktemp("ran"))
    for name, asked in PROGRAMS.items():
        ran.emit(name, Layered(), **asked)
        for where in WHERE:
            ran.add(f"{name}-all{where}", name, {DELAY_VARIABLE: _delays(1, where)["all"]})
        for point in AT.get(name, ()):
            ran.add(f"{name}-{point}", name, {DELAY_VARIABLE: f"{point}:60@rank0"}, steps=1)
        if name in LEFT:
            ran.add(name, name, fails="layers.1")
            ran.add(f"{name}-infers", name, infers=True)
            ran.add(f"{name}-moves", name, moves=True)
        ran.add(f"{name}-events", name, {EVENTS_VARIABLE: str(ran.folder / f"{name}-events.events")})
    _add_orders(ran, ORDERS)
    ran.programs["unwaited"] = ran.folder / "unwaited"
    shutil.copytree(ran.programs["zero3"], ran.programs["unwaited"])
    file = ran.programs["unwaited"] / "stage_0.py"
    file.write_text(file.read_text() + UNWAITED)
    ran.add("unwaited", "unwaited", {DELAY_VARIABLE: "before_gather:30@rank1"})
    ran.run()
    return ran


# ---- delays ------------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("name", PROGRAMS)
def test_delays_change_nothing(ran: Ran, name: str) -> None:
    for where in WHERE:
        ran.check(f"{name}-all{where}", Layered())


@pytest.mark.slow
def test_each_delay_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    ran = Ran(pool, tmp_path)
    for name, asked in PROGRAMS.items():
        ran.emit(name, Layered(), **asked)
        for where, milliseconds in itertools.product(WHERE, (5, 50)):
            for point, text in _delays(milliseconds, where).items():
                ran.add(f"{name}-{point}-{milliseconds}{where}", name, {DELAY_VARIABLE: text})
    ran.run(600)

    for case in ran.cases:
        ran.check(case["name"], Layered())


@pytest.mark.costly
def test_a_step_takes_at_least_the_delay(ran: Ran) -> None:
    for name, points in AT.items():
        for point in points:
            assert ran.saw(f"{name}-{point}")[0]["seconds"][0] > 0.06, point


@pytest.mark.costly
def test_a_missing_wait_is_found(ran: Ran) -> None:
    with pytest.raises(AssertionError):
        ran.check("unwaited", Layered())


@pytest.mark.parametrize(
    "text",
    ["after_lost:20", "after_loss", "after_loss:x", "after_loss:-5", "after_loss:20@1", "after_loss:20@rankx", ":5"],
)
def test_delays_that_are_no_delays(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, text)

    with pytest.raises(RuntimeProgramError, match="the points are after_loss, before_reduce, before_free") as caught:
        read_delays(0, CPU, 2)
    assert ("Did you mean 'after_loss'?" in str(caught.value)) == (text == "after_lost:20")


def test_delays_of_other_ranks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "after_loss:20@rank1, before_free:1.5@rank1")

    assert read_delays(1, CPU, 2)
    assert not read_delays(0, CPU, 2)


def test_delays_of_a_rank_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "after_loss:20@rank2")

    with pytest.raises(RuntimeProgramError, match="has 'after_loss:20@rank2', but the ranks are 0 to 1"):
        read_delays(0, CPU, 2)


# ---- nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("name", LEFT)
def test_what_a_broken_step_leaves_is_listed(ran: Ran, name: str) -> None:
    for rank, saw in enumerate(ran.saw(name)):
        (message,) = saw["errors"]
        assert message.startswith(f"a step did not end on rank {rank}: ")
        assert [part for part in LEFT[name] if part not in message] == [], message


@pytest.mark.costly
@pytest.mark.parametrize("name", LEFT)
def test_nothing_is_left_after_a_step_or_an_inference(ran: Ran, name: str) -> None:
    ran.check(f"{name}-infers", Layered())


@pytest.mark.costly
@pytest.mark.parametrize("name", LEFT)
def test_a_stage_that_was_moved_is_refused(ran: Ran, name: str) -> None:
    for saw in ran.saw(f"{name}-moves"):
        (message,) = saw["errors"]
        assert message.startswith("first.weight is on the device meta, but the program was built for cpu"), message


def test_what_a_schedule_keeps_is_listed() -> None:
    stages: Any = [
        SimpleNamespace(stage_index=0, is_first=True, fwd_cache={}, bwd_cache={0: ()}),  # which torch never removes
        SimpleNamespace(
            stage_index=2, is_first=False, fwd_cache={3: (), 1: ()}, dw_runner={0: print}, dw_builder=print
        ),
    ]

    assert list(left_in_schedule(SimpleNamespace(unshard_ops={2: []}, bwd_recv_ops={}), stages)) == [
        "stage 2 keeps activations that wait for their backward: microbatches 1, 3",
        "stage 2 keeps postponed backwards of weights: microbatches 0",
        "the schedule keeps gathers of stages: 2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_nothing_is_left_by_any_schedule(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    ran = Ran(pool, tmp_path)
    ran.emit("program", Layered(4), {"pp": 2}, schedule=schedule)
    ran.add("program", "program", {DELAY_VARIABLE: _delays(1, "@rank1")["all"]})
    ran.run()

    ran.check("program", Layered(4))


# ---- events ------------------------------------------------------------------------------------------------------


def _gathers(events: list[tuple[str, str]]) -> list[str]:
    return [unit for event, unit in events if event == "gather"]


def _backward(events: list[tuple[str, str]], *kinds: str) -> list[tuple[str, str]]:
    """The events of these kinds from the beginning of the backward on."""
    begin = events.index(("forward_done", "stage_0"))
    return [each for each in events[begin:] if each[0] in kinds]


def _most_alive(events: list[tuple[str, str]]) -> int:
    """The most units that were gathered at once, besides what is around them."""
    alive: set[str] = set()
    most = 0
    for event, unit in events:
        if event == "gather" and unit != "stage_0":
            alive.add(unit)
        elif event == "free":
            alive.discard(unit)
        most = max(most, len(alive))
    assert not alive
    return most


@pytest.mark.costly
def test_the_order_of_three_units(ran: Ran) -> None:
    """One ahead, before the backward of each: as FSDP2 has it, here in the order of the program."""
    events = ran.events("zero3-events")
    (middle,) = [i for i, each in enumerate(events) if each == ("backward_done", "stage_0")][:1]
    assert _backward(events[: middle + 1], "gather", "backward_done") == [
        ("gather", "layers.2"),
        ("gather", "layers.1"),
        ("backward_done", "layers.2"),
        ("gather", "layers.0"),
        ("backward_done", "layers.1"),
        ("backward_done", "layers.0"),
        ("backward_done", "stage_0"),
    ]
    assert _gathers(events)[:4] == ["stage_0", "layers.0", "layers.1", "layers.2"]
    assert _most_alive(events) == 2


ENCODER_DECODER = [f"{part}.{index}" for part in ("decoder", "encoder") for index in reversed(range(6))]


@pytest.mark.costly
def test_the_order_of_an_encoder_and_a_decoder(ran: Ran) -> None:
    events = ran.events("reading")
    assert [unit for _, unit in _backward(events, "gather")] == ENCODER_DECODER
    for before, unit in itertools.pairwise(ENCODER_DECODER):
        assert events.index(("backward", before)) > _last(events, ("gather", unit))
    assert _most_alive(events) == 2


@pytest.mark.costly
def test_the_order_of_gathers_after_each_backward(ran: Ran) -> None:
    """The first unit is gathered ahead too, when the backward begins: nothing computes before it."""
    events = ran.events("reading-post")
    assert [unit for _, unit in _backward(events, "gather")] == ENCODER_DECODER
    assert _last(events, ("gather", "decoder.5")) < events.index(("backward", "stage_0"))
    for before, unit in itertools.pairwise(ENCODER_DECODER):
        assert events.index(("backward_done", before)) < _last(events, ("gather", unit))
        assert _last(events, ("free", before)) < _last(events, ("gather", unit)) < _last(events, ("reduce", before))
    assert _most_alive(events) == 1


@pytest.mark.costly
def test_no_gather_ahead(ran: Ran) -> None:
    events = ran.events("three-none")
    for index, (event, unit) in enumerate(events):
        assert event != "gather" or events[index + 1] == ("gather_wait", unit)
    assert _most_alive(events) == 1


@pytest.mark.costly
def test_a_unit_that_is_used_twice_is_gathered_at_need(ran: Ran) -> None:
    events = ran.events("reused")
    assert [unit for _, unit in _backward(events, "gather")] == [f"layers.{index}" for index in (3, 2, 1, 0, 0)]
    assert _most_alive(events) == 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ORDERS)
def test_gathers_ahead_change_nothing(ran: Ran, name: str) -> None:
    ran.check(name, ORDERS[name][0])


@pytest.mark.slow
def test_more_orders(pool: RankPool, tmp_path: Path) -> None:
    ran = Ran(pool, tmp_path)
    _add_orders(ran, MORE_ORDERS)
    ran.run(600)

    for name, (model, asked) in MORE_ORDERS.items():
        ran.check(name, model)
        distance = asked["prefetch_distance"] or 0
        for rank, step in itertools.product(range(RANKS), range(STEPS)):
            assert _most_alive(ran.events(name, rank, step)) <= 1 + distance, name


@pytest.mark.costly
def test_events_of_replicas_and_of_a_pipeline(ran: Ran) -> None:
    events = ran.events("replicas-events")
    assert [event for event, _ in events if event.startswith("reduce")] == ["reduce", "reduce_done"]
    for unit in ("stage_0", "layers.0"):
        for event in ("forward", "forward_done", "backward"):
            assert events.count((event, unit)) == 2, (event, unit)
    lines = [json.loads(line) for line in (ran.folder / "pipeline-events.events.rank1").read_text().splitlines()]
    assert {(line["step"], line["microbatch"]) for line in lines if line["event"] == "backward"} == {
        (step, microbatch) for step in range(STEPS) for microbatch in range(4)
    }


def _last(events: list[tuple[str, str]], event: tuple[str, str]) -> int:
    return len(events) - 1 - events[::-1].index(event)


# ---- what can be asked for ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> gp.Program:
    return gp.export(Layered(), (batch()["x"],), loss_fn=lambda o: o.square().mean())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no sharded state": ({"mesh": {"dp_replicate": 2}, "prefetch": "pre"}, "prefetch=pre requires ZeRO-3"),
    "one device": ({"prefetch_distance": 2}, "prefetch_distance=2 requires ZeRO-3"),
    "level 1": ({"mesh": {"dp_shard": 2}, "zero": 1, "prefetch": "none"}, "requires ZeRO-3"),
    "level 2": ({"mesh": {"dp_shard": 2}, "zero": 2, "prefetch_distance": 1}, "requires ZeRO-3"),
    "an unknown time": ({"mesh": {"dp_shard": 2}, "prefetch": "past"}, "one of pre, post, none. Did you mean 'post'"),
    "none of some": ({"mesh": {"dp_shard": 2}, "prefetch": "none", "prefetch_distance": 2}, "gathers nothing ahead"),
    "none ahead": ({"mesh": {"dp_shard": 2}, "prefetch_distance": 0}, "it must be at least 1"),
    "too far ahead": (
        {"mesh": {"dp_shard": 2}, "prefetch_distance": 99},
        "gathers 99 units ahead, but no stage has more than",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(program: gp.Program, name: str) -> None:
    asked, message = WRONG[name]
    with pytest.raises(GraphparError, match=message):
        gp.plan(program, **asked)


def test_a_plan_keeps_it(program: gp.Program) -> None:
    for asked, kept in (
        ({}, ("pre", 1)),
        ({"prefetch": "post", "prefetch_distance": 3}, ("post", 3)),
        ({"prefetch": "none"}, ("none", 0)),
        ({"zero": 2}, (None, 0)),
    ):
        plan = gp.plan(program, mesh={"dp_shard": 2}, **asked)
        again = gp.Plan.from_json(plan.to_json())
        assert (again.prefetch, again.prefetch_distance) == kept
        assert gp.partition(program, again).files["stage_0.py"] == gp.partition(program, plan).files["stage_0.py"]


def test_an_edited_plan_is_refused(program: gp.Program) -> None:
    plan = gp.plan(program, mesh={"dp_shard": 2}, zero=2).to_json()

    for edit in ({"prefetch": "pre"}, {"prefetch_distance": 1}, {"zero": 3}):
        with pytest.raises(GraphparError):
            gp.partition(program, gp.Plan.from_json({**plan, **edit}))


def test_gathering_ahead_takes_memory(program: gp.Program) -> None:
    peaks = {}
    for name, asked in {"none": {"prefetch": "none"}, "pre": {}, "far": {"prefetch_distance": 2}}.items():
        plan = gp.plan(program, Cluster.of_this_machine(2), mesh={"dp_shard": 2}, zero=3, **asked)
        assert plan.predicted is not None
        peaks[name] = max(plan.predicted.peak_memory_bytes)
    assert peaks["none"] < peaks["pre"] < peaks["far"]
