"""The planner against brute force, and what it says where nothing fits."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, PYTHON_S, Device
from graphpar.ir.program import Program
from graphpar.passes.planning.candidates import Candidate, Priced
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.plan_request import search_plan
from graphpar.passes.planning.prices import estimate_plan
from graphpar.passes.planning.search import Planner
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.schedules.registry import check_legal
from tests.tools.every_plan import DEPTHS
from tests.tools.programs import example
from tests.tools.samples import drawn

A100 = DEVICES["A100-SXM-80GB"]


class Uneven(nn.Module):
    """Blocks of two kinds and a wide head: stages of equal length are not equally fast."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3))
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(3))
        self.head = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.narrow, *self.wide]:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


@functools.cache
def program_of(name: str) -> Program:
    if name == "uneven":
        return gp.export(Uneven(), (torch.randn(8, 64),), loss_fn=lambda y: y.square().mean())
    return example(name)


def small(memory: float = 1e12, launch: float = 1e-7) -> Device:
    """A device so slow that small programs are bound by what they compute."""
    host = dict.fromkeys(("dispatch_s", *PYTHON_S), 0.0)
    return replace(A100, flops={"fp32": 1e11}, launch_s=launch, memory_bytes=int(memory), communicator_bytes=0, **host)


def planner_of(name: str, cluster: Cluster, **pins: Any) -> Planner:
    return Planner(program_of(name), PlanConstraints(cluster=cluster, **{"overlap_tp": False} | pins))


# ---- what is not done twice ------------------------------------------------------------------------------------


@pytest.mark.costly
def test_levels_of_zero_that_cost_the_same_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = replace(Cluster.parse("4xA100-SXM-80GB"), device=small())
    pins: dict[str, Any] = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "1F1B", "recompute": "none"}
    planner, alone = planner_of("uneven", cluster, **pins), planner_of("uneven", cluster, **pins)
    priced, price = list[Candidate](), planner.fitting.price
    monkeypatch.setattr(planner.fitting, "price", lambda each: (priced.append(each), price(each))[1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(alone.prices, "level", lambda candidate: candidate.zero)
    points = [each for each in planner.search(prune=False).points if each.candidate.zero == 3]
    assert {each.candidate.reshard for each in points} == {"default", "always"}
    assert {each.reshard for each in priced if each.zero == 3} == {"always"}
    for each in points:
        exact = alone.fitting.price(each.candidate).estimate
        assert (each.step_time_s, each.peak_memory_bytes) == (exact.step_time_s, max(exact.peak_memory_bytes))


# ---- against brute force ---------------------------------------------------------------------------------------


EXPERTS = {"MixtralForCausalLM": 4}


def every_way(planner: Planner) -> Iterator[tuple[tuple[Any, ...], Estimate]]:
    """Written anew: every mesh, ZeRO level, schedule, number of microbatches and cut into stages, each simulated whole.

    Of the cuts, those whose slowest stage is fastest, and of these the one with the earliest starts, the last first.
    """
    count, batch = planner.cluster.size, planner.space.batch
    experts = EXPERTS.get(planner.program.name, 1)
    for pp, replicas, shards, ep, tp in itertools.product(range(1, count + 1), repeat=5):
        if pp * replicas * shards * ep * tp != count or batch % (replicas * shards) or experts % ep:
            continue
        mesh = Mesh(pp=pp, dp_replicate=replicas, dp_shard=shards, ep=ep, tp=tp)
        rows_each = batch // (replicas * shards)
        for (name, row), (zero, reshard) in itertools.product(SCHEDULES.items(), _states(shards, pp)):
            depths = (1,) if pp == 1 else DEPTHS.get(name, (row.default_stages,))
            if row.torch_class is None or (pp == 1 and name != "1F1B") or (reshard == "always" and row.splits_backward):
                continue
            for depth, microbatches in itertools.product(depths, range(1, rows_each + 1)):
                if rows_each % microbatches or (pp > 1 and not _legal(name, pp, depth, microbatches)):
                    continue
                rows = rows_each // microbatches
                units = planner.prices.units(Candidate(mesh, "1F1B", 1, rows, 1))
                if units is None or len(units) < pp * depth:
                    continue
                again = zero == 3 and (pp == 1 or reshard == "always")
                run = Execution(
                    copies_gradients=True, joined=True, zero=zero, reshard=reshard, gathered=2 if again else 1
                )
                pricing = Pricing(units, mesh, planner.cluster, run, dtype=planner.prices.dtype)
                starts = _best_cut(pricing, pp * depth, rows)
                estimate = pricing.estimate(Layout(name, rows, microbatches, starts))
                key = pp, tp, 1, ep, shards, zero, reshard, list(SCHEDULES).index(name), depth, microbatches
                yield (estimate.step_time_s, *key, starts), estimate


def _states(shards: int, pp: int) -> list[tuple[int, str]]:
    if shards == 1:
        return [(0, "default")]
    return [(1, "default"), (2, "default"), (3, "default")] + ([(3, "always")] if pp > 1 else [])


def _legal(name: str, pp: int, depth: int, microbatches: int) -> bool:
    try:
        check_legal(name, pp, depth, microbatches)
    except GraphparError:
        return False
    return True


def _best_cut(pricing: Pricing, stages: int, rows: int) -> tuple[int, ...]:
    def slowest(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], len(pricing.units))
        costs = [pricing.stage_seconds(place, place + 1, rows) for place in range(len(pricing.units))]
        return max(math.fsum(c.forward + c.backward for c in costs[a:b]) for a, b in zip(starts, ends))

    cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(pricing.units)), stages - 1)]
    least = min(map(slowest, cuts))
    return min((cut for cut in cuts if slowest(cut) <= least * (1 + 1e-11)), key=lambda cut: cut[::-1])


@pytest.mark.parametrize(
    ("name", "devices"),
    drawn([("uneven", 2), ("uneven", 4), ("gpt", 2), ("gpt", 4), ("resnet", 2), ("mixtral", 2)], 2, 2),
)
def test_the_plan_of_brute_force(name: str, devices: int) -> None:
    planner = planner_of(name, Cluster.of(small(), 1, devices))
    best = planner.search().best
    assert best is not None
    key, estimate = min((way for way in every_way(planner)), key=lambda way: way[0][:-1])
    assert best.estimate.step_time_s == pytest.approx(key[0], rel=1e-9)
    slowest = _slowest_stage(best)
    assert slowest == pytest.approx(max(stage.forward_s + stage.backward_s for stage in estimate.stages), rel=1e-9)
    found = best.candidate
    mesh, schedules = found.mesh, list(SCHEDULES)
    assert (mesh.pp, mesh.tp, mesh.cp, mesh.ep, mesh.dp_shard, found.zero, found.reshard) == key[1:8]
    assert (schedules.index(found.schedule), found.stages_per_rank, found.microbatches) == key[8:11]


def _slowest_stage(priced: Priced) -> float:
    return max(stage.forward_s + stage.backward_s for stage in priced.estimate.stages)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "launch"), drawn(list(itertools.product(["uneven", "gpt", "unet"], [1e-7, 2e-5])), 2, 2)
)
def test_leaving_out_what_can_not_win_changes_nothing(name: str, launch: float) -> None:
    planner = planner_of(name, Cluster.of(small(launch=launch), 2, 2))
    pruned, whole = planner.search(), planner.search(prune=False)
    assert pruned.best is not None and whole.best is not None
    assert pruned.best.candidate == whole.best.candidate
    assert pruned.best.layout == whole.best.layout
    assert [other.candidate for other in pruned.alternatives] == [other.candidate for other in whole.alternatives]
    assert pruned.priced <= whole.priced == pruned.considered - (whole.considered - whole.priced)


@pytest.mark.costly
@pytest.mark.parametrize("device", [small(), DEVICES["CPU"]], ids=["slow", "CPU"])
@pytest.mark.sampled(1 / 2)
def test_bounds_are_below_the_price(device: Device) -> None:
    planner = planner_of("uneven", Cluster.of(device, 1, 4))
    candidates, _ = planner.bounded()
    assert len(candidates) > 50
    for candidate in candidates:
        step_s = planner.fitting.exactly(planner.fitting.price(candidate)).estimate.step_time_s
        assert candidate.bound <= step_s * (1 + 1e-9)
        assert planner.bounds.of_stages(candidate) <= step_s * (1 + 1e-9)
        assert planner.bounds.in_order(candidate) <= step_s * (1 + 1e-9)


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize(("batch", "cps"), [(8, {1}), (2, {1, 2}), (1, {1, 2, 4})])
@pytest.mark.sampled(1 / 2)
def test_sequences_are_divided_where_there_are_fewer_rows_than_devices(batch: int, cps: set[int]) -> None:
    planner = planner_of("gpt", Cluster.of(small(), 1, 4), global_batch=batch)

    assert {mesh.cp for mesh in planner.space.meshes() if batch % mesh.replicas == 0} == cps
    found = planner.search()
    assert found.best is not None
    assert ("cp (the batch covers all devices)" in found.left_out) == (cps == {1})


@pytest.mark.parametrize(
    ("name", "axis"), [("mixtral", "cp"), ("mixtral", "ep"), ("mixtral", "tp"), ("gpt", "cp"), ("gpt", "tp")]
)
@pytest.mark.sampled(1 / 2)
def test_ranks_do_at_least_the_work_of_one_device_together(name: str, axis: str) -> None:
    planner = planner_of(name, Cluster.of(small(), 1, 4))

    def flops(mesh: Mesh) -> float:
        return sum(unit.kind.work.flops(2) for unit in planner.prices.units(Candidate(mesh, "1F1B", 1, 2, 1)) or [])

    alone = flops(Mesh())
    for degree in (2, 4):
        assert degree * flops(Mesh(**{axis: degree})) >= alone * (1 - 1e-9)


def test_experts_are_divided_in_degrees_that_divide_them() -> None:
    planner = planner_of("mixtral", Cluster.of(small(), 1, 8))

    degrees = {mesh.ep for mesh in planner.space.meshes()}

    assert degrees == {1, 2, 4}
    assert not any(mesh.ep > 1 for mesh in planner_of("gpt", Cluster.of(small(), 1, 8)).space.meshes())


def test_stages_are_cut_under_the_memory_of_ranks() -> None:
    """The balanced cut is too much for the first stage, which keeps the most microbatches: it gets fewer units."""
    planner = planner_of("uneven", Cluster.of(small(), 1, 4), schedule="1F1B", microbatch_size=1)
    candidate = min((c for c in planner.bounded()[0] if c.mesh.pp == 4), key=lambda c: c.microbatches)
    balanced, pricing = planner.fitting.price(candidate), planner.prices.pricing(candidate)
    assert pricing is not None
    cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(pricing.units)), 3)]
    peaks = {cut: max(pricing.estimate(replace(balanced.layout, starts=cut)).peak_memory_bytes) for cut in cuts}
    room = round(1.01 * min(peaks.values()))
    assert room < peaks[balanced.layout.starts]
    tight = planner_of("uneven", Cluster.of(small(room), 1, 4), schedule="1F1B", microbatch_size=1)
    found = tight.fitting.price(candidate)
    assert found.fits and peaks[found.layout.starts] <= room
    assert found.estimate.step_time_s >= balanced.estimate.step_time_s


def every_choice(planner: Planner, found: Priced) -> Iterator[tuple[float, int]]:
    """Seconds and the fullest rank's bytes of every choice of what blocks recompute, at the stages of ``found``; equal blocks of a
    stage may change places."""
    candidate, starts = found.candidate, found.layout.starts
    first, *others = (
        planner.prices.pricing(candidate, kind) for kind in range(len(planner.prices.recomputed(candidate)))
    )
    assert first is not None
    units = [first.units, *(pricing.units for pricing in others if pricing is not None)]
    ends = (*starts[1:], len(first.units))
    blocks = [
        [place for place in range(begin, end) if len({id(kind[place].kind) for kind in units}) > 1]
        for begin, end in zip(starts, ends)
    ]
    choices = (itertools.combinations_with_replacement(range(len(units)), len(stage)) for stage in blocks)
    for kinds in itertools.product(*choices):
        chosen = {place: kind for stage, own in zip(blocks, kinds) for place, kind in zip(stage, own)}
        mixed = first.with_units([units[chosen.get(place, 0)][place] for place in range(len(first.units))])
        estimate = mixed.estimate(found.layout)
        yield estimate.step_time_s, max(estimate.peak_memory_bytes)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "share"),
    drawn(list(itertools.product([{"pp": 1, "dp_replicate": 1}, {"pp": 2}, {"dp_shard": 2}], [0.2, 0.5, 0.9])), 2, 3),
)
def test_what_is_recomputed_where_memory_is_short(mesh: dict[str, int], share: float) -> None:
    """Against every choice of every block: the bound is below all that fit, and the plan at most 3 % above the best of them."""
    devices = math.prod(mesh.values())
    pins: dict[str, Any] = {
        "recompute": AUTO,
        "microbatch_size": 2,
        "schedule": "1F1B" if mesh.get("pp", 1) > 1 else None,
    }

    def planner(memory: float) -> Planner:
        found = planner_of("gpt", Cluster.of(small(memory), 1, devices), mesh=mesh, **pins)
        found.space.kinds = ("none", "budget:0.6", "budget:0.2", "full")
        return found

    def candidate(planner: Planner) -> Candidate:
        return min(planner.bounded(all_degrees=True)[0], key=lambda each: each.key)

    roomy = planner(1e12)
    whole = roomy.fitting.price(candidate(roomy))
    peaks = [nbytes for _, nbytes in every_choice(roomy, whole)]
    room = round(min(peaks) + share * (max(peaks) - min(peaks)))
    tight = planner(room)
    found = tight.fitting.exactly(tight.fitting.price(candidate(tight)))
    assert found.fits and found.recompute != "none"
    fitting = [seconds for seconds, nbytes in every_choice(tight, found) if nbytes <= room]
    for bound in (tight.bounds.in_memory, tight.bounds.in_all_memory):
        assert bound(candidate(tight)) <= min(fitting) * (1 + 1e-9)
    assert found.estimate.step_time_s <= 1.03 * min(fitting)


def test_the_least_of_one_microbatch_is_no_more_than_its_price() -> None:
    """Whose gradients, without the allocator's overhead, are more than its activations."""
    planner = planner_of("gpt", Cluster.parse("1xH100"), microbatch_size=1, global_batch=1)
    for candidate in planner.bounded(all_degrees=True)[0]:
        own = planner.prices.known(candidate).bytes
        state, kept = own.least_state(True, 1), own.least_kept(1, 1)
        found = planner.fitting.price(candidate).estimate.peak_memory_bytes
        assert state + (1 + ALLOCATOR_SLACK) * kept <= found[0] + 1


class Wide(nn.Module):
    """Two products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Its first block runs again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(32, 32), nn.ModuleList(Wide() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return x


@pytest.mark.costly
def test_a_block_that_runs_twice_recomputes_one_way() -> None:
    program = gp.export(Twice(), (torch.randn(512, 32),), loss_fn=lambda y: y.square().mean())
    rows, mixed = {"microbatch_size": 512}, 0
    peaks = []
    for kind in ("full", "none"):
        predicted = gp.plan(program, Cluster.of(small(), 1, 1), recompute=kind, **rows).predicted
        assert predicted is not None
        peaks.append(max(predicted.peak_memory_bytes))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        cluster = Cluster.of(small(peaks[0] + share * (peaks[1] - peaks[0])), 1, 1)

        plan = gp.plan(program, cluster, recompute=AUTO, **rows)

        assert plan.predicted is not None
        again = estimate_plan(program, plan, cluster)
        assert again.peak_memory_bytes == plan.predicted.peak_memory_bytes
        assert again.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
        mixed += isinstance(plan.recompute, dict)
    assert mixed >= 3


@pytest.mark.costly
def test_the_gap_is_that_to_the_lowest_bound() -> None:
    loose = planner_of("gpt", Cluster.of(small(), 1, 2), recompute=AUTO).search()
    assert loose.gap == 0 and loose.best is not None and loose.best.recompute == "none"
    tight = planner_of("gpt", Cluster.of(small(9e6), 1, 1), recompute=AUTO).search()
    assert tight.best is not None and tight.best.recompute != "none"
    assert tight.gap is not None and 0 < tight.gap < 0.05
    assert tight.gap == pytest.approx(tight.best.estimate.step_time_s / tight.lower_bound_s - 1)


@given(st.lists(st.floats(2e6, 4e7), min_size=2, max_size=4))
@settings(max_examples=6, deadline=None)
@pytest.mark.costly
def test_more_memory_never_turns_a_fit_into_a_misfit(sizes: list[float]) -> None:
    times = []
    for memory in sorted(sizes):
        best = planner_of("gpt", Cluster.of(small(memory), 1, 2)).search().best
        times.append(math.inf if best is None else best.estimate.step_time_s)
    assert times == sorted(times, reverse=True)


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("memory", [3e6, 1.5e6])  # less than activations need, and less than parameters need
def test_where_nothing_fits(memory: float) -> None:
    cluster = Cluster.of(small(memory), 1, 1)
    with pytest.raises(GraphparError) as error:
        search_plan(program_of("gpt"), PlanConstraints(cluster=cluster))
    message = str(error.value)
    assert "No plan for GPT fits" in message and "MiB on stage 0" in message and "too much" in message
    assert re.search(r"What would fit: .*\dx\S+ with [^;]*\(.* a step\).*; devices with ", message)


# ---- pins ------------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_pins_are_kept() -> None:
    program = program_of("gpt")
    plan = gp.plan(program, 4, mesh={"tp": 2})
    assert plan.mesh.tp == 2 and plan.mesh.size == 4
    plan = gp.plan(program, 4, schedule="gpipe", microbatch_size=2)
    assert plan.schedule == "GPipe" and plan.mesh.pp > 1 and plan.microbatch_size == 2
    plan = gp.plan(program, 4, split=["blocks.3"])
    assert [point.path for point in plan.split_points] == ["blocks.3"] and plan.mesh.pp == 2
    plan = gp.plan(program, 4, mesh={"dp_replicate": 2, "tp": 1})
    assert plan.mesh == Mesh(pp=2, dp_replicate=2)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"mesh": {"tp": 3}}, "4 devices don't divide by the mesh's tp=3"),
        ({"mesh": {"pp": 2, "dp_replicate": 1, "tp": 1}}, "Invalid mesh"),
        ({"microbatch_size": 3}, "3"),
        ({"schedule": "1F2B"}, "There is no schedule '1F2B'"),
        ({"mesh": {"pp": 4}, "split": ["blocks.2"]}, "^1 split point gives 2 stages"),
        ({"split": ["blocks.99"]}, "blocks.99"),
    ],
)
def test_pins_that_are_not_possible(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.plan(program_of("gpt"), 4, **pins)


@pytest.mark.costly
def test_examples_that_depend_on_each_other_are_one_microbatch_of_all_replicas() -> None:
    plan = gp.plan(program_of("resnet_batchnorm"), 4)
    assert plan.microbatches == 1 and plan.found is not None
    tried = [plan.found.best, *plan.found.alternatives]
    assert any(found is not None and found.candidate.mesh.dp_replicate > 1 for found in tried)
    pinned = gp.plan(program_of("resnet_batchnorm"), 4, mesh={"dp_replicate": 4})
    assert pinned.microbatches == 1 and pinned.sharding.degrees == {"dp_replicate": 4}


def test_the_plan_takes_what_it_was_said_to_take() -> None:
    """The chosen candidate and the plan that is made of it are priced alike."""
    cluster = Cluster.of(small(), 1, 4)
    plan = gp.plan(program_of("gpt"), cluster)
    assert plan.predicted is not None and plan.found is not None and plan.found.best is not None
    assert plan.predicted.step_time_s == pytest.approx(plan.found.best.estimate.step_time_s, rel=1e-6)
    assert estimate_plan(program_of("gpt"), plan, cluster).step_time_s == plan.predicted.step_time_s


@pytest.mark.costly
def test_a_microbatch_that_is_pinned_too_large_is_said_to_be() -> None:
    program = program_of("gpt")
    small_ones = planner_of("gpt", Cluster.of(small(), 1, 1), microbatch_size=1).search().best
    large_ones = planner_of("gpt", Cluster.of(small(), 1, 1), microbatch_size=8).search().best
    assert small_ones is not None and large_ones is not None
    between = (max(small_ones.estimate.peak_memory_bytes) + max(large_ones.estimate.peak_memory_bytes)) / 2
    with pytest.raises(GraphparError, match=r"What would fit: .*microbatches of [24] instead of 8 \("):
        search_plan(program, PlanConstraints(cluster=Cluster.of(small(between), 1, 1), microbatch_size=8))


def test_the_plan_keeps_what_was_priced() -> None:
    """Its sharding is the one that the search solved, and a step takes what the search said."""
    program, cluster = program_of("gpt"), Cluster.of(small(), 1, 2)
    pins = PlanConstraints(cluster=cluster, mesh={"tp": 2})
    best = Planner(program, pins).search().best
    plan = search_plan(program, pins)
    assert best is not None and plan.predicted is not None
    assert plan.sharding == best.sharded.sharding
    assert plan.predicted == best.estimate == estimate_plan(program, plan.plan, cluster)


@pytest.mark.costly
def test_changes_that_would_fit_are_told_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pin that is given up, the fastest first; and a plan with that change does fit."""
    monkeypatch.setattr(PlanConstraints, "complete", False)  # a whole mesh that fits in no way is taken all the same
    program, cluster = program_of("gpt"), Cluster.of(small(9e6), 1, 2)
    rows = {"microbatch_size": 4, "global_batch": 32}
    pins = PlanConstraints(cluster=cluster, mesh={"dp_replicate": 2}, recompute="none", **rows)
    with pytest.raises(GraphparError) as error:
        search_plan(program, pins)
    told = str(error.value).split("What would fit: ")[1].split("; ")
    free = {
        "recompute='auto'": replace(pins, recompute=AUTO),
        "microbatches of": replace(pins, microbatch_size=None),
        "dp_shard=2 instead of dp_replicate=2": replace(pins, mesh={"dp_shard": 2}),
    }
    times = []
    for text, changed in free.items():
        best = Planner(program, changed).search().best
        lines = [line for line in told if line.startswith(text)]
        assert len(lines) == (best is not None), text
        times += [(told.index(lines[0]), best.estimate.step_time_s)] if best is not None else []
    assert len(times) > 1 and [seconds for _, seconds in sorted(times)] == sorted(seconds for _, seconds in times)


def test_a_search_out_of_time_returns_the_best_so_far_and_a_bound_of_all() -> None:
    pins = PlanConstraints(cluster=Cluster.of(small(10**12), 1, 4), global_batch=16)
    whole = Planner(program_of("gpt"), pins).search()
    texts: list[str] = []
    found = Planner(program_of("gpt"), replace(pins, time_limit=0.0), show=texts.append).search()
    assert whole.best is not None and found.best is not None
    assert 1 < found.priced < whole.priced
    assert any("as the time limit of" in text for text in found.left_out) and not whole.left_out[1:]
    assert found.lower_bound_s <= whole.best.estimate.step_time_s <= found.best.estimate.step_time_s
    assert any("priced of" in text for text in texts)
    assert not any("sharding over" in text for text in texts)  # no placements were solved for it
    tried = found.tried
    assert tried is not None and tried.values["tp"] == (1,) and found.gap is not None and found.gap > 0
    others = (tried.no_faster, tried.impossible, tried.too_large, tried.slower, tried.open)
    assert min(others) >= 0 and found.considered == found.priced + sum(others)


@pytest.mark.costly
def test_a_search_out_of_time_solves_the_placements_without_which_nothing_fits() -> None:
    program, mesh = program_of("gpt"), {"pp": 1, "cp": 1}
    pins = PlanConstraints(
        cluster=Cluster.of(small(10**12), 1, 4), mesh=mesh, global_batch=2, recompute="none", zero=0, microbatch_size=1
    )
    peaks = {}
    for replicas in (1, 2):
        best = Planner(program, replace(pins, mesh=mesh | {"dp_replicate": replicas})).search().best
        assert best is not None
        peaks[best.candidate.mesh.tp] = max(best.estimate.peak_memory_bytes)
    assert peaks[4] < peaks[2]
    short = Cluster.of(small((peaks[4] + peaks[2]) / 2), 1, 4)

    found = Planner(program, replace(pins, cluster=short, time_limit=0.0)).search()

    assert found.best is not None and found.best.candidate.mesh.tp == 4
