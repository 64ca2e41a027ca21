"""The search against every plan of small programs: pins, meshes, memory and links are drawn, seeded."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.estimates import Layout
from graphpar.hardware.cluster import Cluster, Pod
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt
from graphpar.passes.planning.candidates import Point, pareto_front
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.runtime.option_kinds import AUTO
from tests.passes.planning.test_planner import program_of, small
from tests.tools.every_plan import EveryPlan
from tests.tools.plan_prices import StepPrices, arriving, in_all
from tests.tools.samples import drawn

WIDTH, LENGTH = 32, 16


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Tapered(nn.Module):
    """Blocks of several widths between an embedding and a head."""

    def __init__(self, widths: tuple[int, ...], tokens: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, WIDTH), nn.Linear(WIDTH, tokens)
        self.blocks = nn.ModuleList(map(Block, widths))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@functools.cache
def tapered(widths: tuple[int, ...], tokens: int, batch: int) -> Program:
    torch.manual_seed(0)
    ids = torch.randint(tokens, (batch, LENGTH))
    return gp.export(Tapered(widths, tokens), (ids,), loss_fn=lambda y: y.square().mean())


@functools.cache
def experts(batch: int) -> Program:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH, sliding_window=None, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(config.vocab_size, (batch, LENGTH))
    return gp.export(MixtralForCausalLM(config), kwargs={"input_ids": ids, "labels": ids.clone()})


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "equal": (tapered, (128, 128, 128), 256, 8),
    "head": (tapered, (64, 64), 1024, 8),
    "tapered": (tapered, (64, 64, 256, 256), 300, 4),
    "two rows": (tapered, (64, 64, 64), 64, 2),
    "experts": (experts, 8),
    "uneven": (program_of, "uneven"),  # no blocks that can be recomputed, and many units
}
NODES = ((1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2))
PINS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"pp": 2, "tp": 1}, {}),
    ({"dp_replicate": 2}, {}),
    ({"dp_shard": 2}, {}),
    ({"dp_shard": 2}, {"zero": 1}),
    ({"dp_shard": 2}, {"zero": 3, "reshard": "always"}),
    ({"cp": 2}, {}),
    ({"ep": 2}, {}),
    ({}, {"zero": 2}),
    ({}, {"microbatch_size": 1}),
    ({}, {"recompute": "none"}),
    ({}, {"recompute": "full"}),
    ({}, {"recompute": "budget:0.4"}),
    ({"pp": 2}, {"schedule": "1F1B"}),
    ({}, {"schedule": "ZBVZeroBubble"}),
    ({"dp_shard": 2}, {"zero": 2, "schedule": "Interleaved1F1B"}),
    ({}, {"split": True}),
)


@dataclass(frozen=True)
class Case:
    """A program, a cluster and what is pinned; ``share`` of the memory that the fastest plan without recomputation needs; ``pod``: of how
    many nodes, with a tenth of the rate outside."""

    name: str
    nodes: tuple[int, int]
    mesh: dict[str, int]
    pins: dict[str, Any] = field(default_factory=dict)
    share: float = 100.0
    slow: float = 1.0
    launch_s: float = 1e-7
    pod: int = 0

    @staticmethod
    def drawn(seed: int) -> Case | None:
        """Draw a case; None where its pins say nothing, or nothing that can be, of its program and cluster."""
        rng = random.Random(seed)
        name, nodes, (mesh, pins) = rng.choice(list(PROGRAMS)), rng.choice(NODES), rng.choice((PINS[0], *PINS))
        share, slow = rng.choice((100.0, 1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3)), rng.choice((1, 1, 1e-2, 1e-3, 1e-4))
        devices, able = math.prod(nodes), name != "uneven" or pins.get("recompute", "none") == "none"
        if any(devices % degree for degree in mesh.values()) or (
            devices == 1 and set(pins) & {"zero", "schedule", "split"}
        ):
            return None
        fits = able and ("ep" not in mesh or name == "experts") and ("cp" not in mesh or name != "uneven")
        return Case(name, nodes, mesh, pins, share, slow, rng.choice((1e-7, 2e-6, 2e-5))) if fits else None

    @property
    def program(self) -> Program:
        make, *given = PROGRAMS[self.name]
        return make(*given)  # type: ignore[no-any-return]

    @functools.cached_property
    def asked(self) -> dict[str, Any]:
        """The pins, with a split point before the second of the program's blocks."""
        asked: dict[str, Any] = {"recompute": AUTO if self.name != "uneven" else "none"} | self.pins
        if asked.pop("split", False):
            paths = {"uneven": "wide.0", "experts": "model.layers.1"}
            asked["split_points"] = (SplitAt(paths.get(self.name, "blocks.1")),)
        return asked

    def planner(self, room: float, **pins: Any) -> Planner:
        cluster = Cluster.of(small(room, self.launch_s), *self.nodes)
        links = {name: getattr(cluster, name).times(self.slow) for name in ("intra_node", "inter_node")}
        cluster = replace(cluster, **links)  # type: ignore[arg-type]
        if self.pod:
            cluster = replace(cluster, pods=(Pod(self.pod, cluster.inter_node.times(0.1)),))
        fixed = {"cluster": cluster, "mesh": self.mesh, "overlap_tp": False, "compile": False}
        return Planner(self.program, PlanConstraints(**(fixed | self.asked | pins)))

    @functools.cached_property
    def room(self) -> int | None:
        """The bytes of a device; None where there is no plan at all."""
        best = self.planner(1e12, recompute="none").search().best
        return None if best is None else round(self.share * max(best.estimate.peak_memory_bytes))

    def every_plan(self, planner: Planner, *, any_cp: bool = False) -> EveryPlan:
        numbers = 4 if self.name == "experts" else 1
        return EveryPlan(planner, self.mesh, **self.asked, experts=numbers, any_cp=any_cp)


CASES = [case for case in map(Case.drawn, range(260)) if case is not None]


def check_best(case: Case) -> None:
    """The plan is no better than the best of all, the bound no higher; where the search is sure, it has the best."""
    if case.room is None:
        return
    planner = case.planner(case.room)
    found, every = planner.search(), case.every_plan(planner)
    best = every.best(case.room)
    if best is None:
        best = case.every_plan(planner, any_cp=True).best(case.room)
    assert (best is None) == (found.best is None)
    if best is None or found.best is None:
        return
    seconds = found.best.estimate.step_time_s
    assert best.step_s <= seconds * (1 + 1e-9)
    assert min(seconds, found.lower_bound_s) <= best.step_s * (1 + 1e-9)
    if found.gap == 0:
        assert seconds == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.costly
@pytest.mark.parametrize("case", drawn(random.Random(3).sample(CASES, 14), 2, 5), ids=str)
def test_the_best_of_every_plan(case: Case) -> None:
    check_best(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_best_of_every_plan_of_more_cases(part: int) -> None:
    for case in random.Random(4).sample(CASES, 60)[part::6]:
        check_best(case)


@pytest.mark.costly
@pytest.mark.parametrize(
    "case",
    [
        Case("equal", (1, 4), {"pp": 2}, {"schedule": "1F1B"}, 0.9, 1e-2, 2e-6),
        Case("tapered", (1, 3), {}, {}, 0.9, 1, 2e-5),
        Case("equal", (1, 2), {"dp_replicate": 2}, {}, 0.9),
        Case("experts", (1, 2), {}, {}, 0.56, 1e-4, 2e-6),
    ],
    ids=str,
)
@pytest.mark.sampled(1 / 4)
def test_whole_choices_of_recomputation_are_near_the_best(case: Case) -> None:
    """The cheapest savings first, and then other choices of a unit or two: at most 4 % above the best of all choices and stages."""
    assert case.room is not None
    planner = case.planner(case.room)
    found, best = planner.search().best, case.every_plan(planner).best(case.room)
    assert found is not None and best is not None and any(best.kinds)
    assert best.step_s * (1 - 1e-9) <= found.estimate.step_time_s <= 1.04 * best.step_s


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(list(PROGRAMS), 1, 3))
def test_there_are_no_other_plans(name: str) -> None:
    """The candidates of a search are those that are enumerated anew, with every pin."""
    counted = 0
    for mesh, pins in [PINS[0], *random.Random(name).sample(PINS, 9)]:
        case = Case(name, (1, 4), mesh, pins)
        if (name == "uneven" and ("cp" in mesh or pins.get("recompute", "none") != "none")) or (
            "ep" in mesh and name != "experts"
        ):
            continue
        planner = case.planner(1e12)
        candidates = planner.bounded(all_degrees=True)[0]
        ways = [way.candidate for way in case.every_plan(planner).ways]
        assert len(ways) == len(set(ways)) and set(ways) == set(candidates)
        counted += len(ways)
    assert counted > 250


@pytest.mark.costly
def test_prices_are_those_of_a_second_writing() -> None:
    """Steps and peaks of plans with any stages, each unit with any recomputation."""
    rng, checked = random.Random(0), 0
    for name, nodes in [
        ("equal", (1, 4)),
        ("tapered", (2, 2)),
        ("experts", (1, 4)),
        ("uneven", (2, 2)),
        ("equal", (2, 1)),
    ]:
        planner = Case(name, nodes, {}, slow=rng.choice((1, 1e-2, 1e-3))).planner(1e12)
        for candidate in rng.sample(planner.bounded(all_degrees=True)[0], 24):
            count = len(planner.prices.recomputed(candidate))
            kinds = [rng.randrange(count) for _ in planner.prices.known(candidate).units]
            pricing = planner.prices.mixed(candidate, kinds)
            stages = candidate.mesh.pp * candidate.stages_per_rank
            starts = (0, *sorted(rng.sample(range(1, len(kinds)), stages - 1)))
            layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
            estimate = pricing.estimate(layout)
            prices = StepPrices(
                candidate.mesh, pricing.compute, pricing.network, candidate.zero, candidate.reshard == "always"
            )
            units = [pricing.units[a:b] for a, b in zip(starts, (*starts[1:], len(kinds)))]
            step = candidate.microbatch_size, candidate.microbatches, candidate.schedule
            assert prices.step_s(units, *step) == pytest.approx(estimate.step_time_s, rel=1e-9)
            assert prices.peaks(units, *step) == list(estimate.peak_memory_bytes)
            checked += estimate.step_time_s > 0
    assert checked == 120


# ---- fronts of time and bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "nodes"), [("equal", (1, 4)), ("experts", (1, 2)), ("two rows", (1, 4))])
@pytest.mark.sampled(1 / 3)
def test_the_front_of_all_plans(name: str, nodes: tuple[int, int]) -> None:
    """Of the plans that the search prices those that no other one beats in time and bytes, nothing being recomputed."""
    case = Case(name, nodes, {}, {"recompute": "none"})
    planner = case.planner(1e12)
    fitting, every = planner.fitting, case.every_plan(planner)
    points = [Point.of(fitting.exactly(fitting.price(each))) for each in planner.bounded(all_degrees=True)[0]]
    again = [every.fitting(way, math.inf, every=False) for way in every.ways]

    expected: list[tuple[float, int]] = []
    for found in sorted((each for each in again if each is not None), key=lambda each: (each.step_s, each.nbytes)):
        if not expected or (found.nbytes < expected[-1][1] and found.step_s > expected[-1][0] * (1 + 1e-9)):
            expected.append((found.step_s, found.nbytes))
    front = [(point.step_time_s, point.peak_memory_bytes) for point in pareto_front(points)]

    distinct = [each for place, each in enumerate(front) if not place or each[0] > front[place - 1][0] * (1 + 1e-9)]
    assert len(expected) > 3
    assert [seconds for seconds, _ in distinct] == pytest.approx([seconds for seconds, _ in expected], rel=1e-9)
    assert [nbytes for _, nbytes in distinct] == [nbytes for _, nbytes in expected]


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [{"pp": 1, "dp_replicate": 1, "tp": 2}, {"pp": 2}])
@pytest.mark.sampled(1 / 2)
def test_the_front_of_a_stage(mesh: dict[str, int]) -> None:
    """For every run of units and every room: the search's bound is below the fastest choice that fits, and touches it somewhere."""
    case = Case("tapered", (1, 2), mesh, {"schedule": "1F1B"} if mesh["pp"] > 1 else {})
    planner = case.planner(1e12)
    every, rows = case.every_plan(planner), 2
    way = next(each for each in every.ways if each.rows == rows)
    candidate, units = way.candidate, every.units(way)
    assert units is not None
    balancer, prices = planner.prices.balancer(candidate), every.prices(way)
    touched = 0
    for first, after in itertools.combinations(range(len(units) + 1), 2):
        plain = prices.stage(units[first:after], rows, True)
        held = balancer._fixed[first, after] + planner.prices.savings(candidate).first.message[first, after]
        received = arriving([units[:first], units[first:after]], 1, rows) if first else 0
        for choice in every.choices(way, first, after):
            room = held + in_all(0, 0, choice.kept + received, choice.on_top) + 1
            bound = balancer._within(1.0, room, planner.prices.savings(candidate))[first, after]
            seconds = plain.forward + plain.backward + choice.more
            assert bound <= seconds * (1 + 1e-9)
            touched += bound >= seconds * (1 - 1e-6)
    assert touched >= len(units)


# ---- tp degrees that are left out ------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("slow", [1, 1e-5])
@pytest.mark.parametrize(("name", "nodes"), [("equal", (1, 4)), ("two rows", (1, 8)), ("experts", (1, 4))])
@pytest.mark.sampled(1 / 3)
def test_a_smaller_degree_bounds_a_larger_one(name: str, nodes: tuple[int, int], slow: float) -> None:
    planner = Case(name, nodes, {}, {"recompute": "none"}, slow=slow).planner(1e12)
    wide = [each for each in planner.bounded(all_degrees=True)[0] if each.mesh.tp > 1]
    assert len(wide) > 15
    for candidate in wide:
        step_s = planner.fitting.exactly(planner.fitting.price(candidate)).estimate.step_time_s
        for smaller in (degree for degree in range(1, candidate.mesh.tp) if candidate.mesh.tp % degree == 0):
            assert planner.bounds.of_smaller(candidate, smaller) <= step_s * (1 + 1e-9)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "slow"), [("equal", 1), ("head", 1e-3), ("equal", 1e-6)])
@pytest.mark.sampled(1 / 3)
def test_samples_that_are_wrong_leave_no_degree_out(name: str, slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they take every degree for useless, the plan is the same, since those that may be faster are searched."""
    case = Case(name, (1, 4), {}, {"recompute": "none"}, slow=slow)
    whole = case.planner(1e12).search()
    monkeypatch.setattr(Planner, "_useless_degrees", lambda self: {(1, 1, 1): {2, 4}})
    planner = case.planner(1e12)
    assert len(planner.bounded()[0]) < len(planner.bounded(all_degrees=True)[0])
    found = case.planner(1e12).search()
    assert whole.best is not None and found.best is not None
    assert found.best.candidate == whole.best.candidate
    assert found.best.estimate == whole.best.estimate
    assert found.lower_bound_s == whole.lower_bound_s


def test_a_degree_that_can_not_be_faster_is_not_sharded() -> None:
    planner = Case("equal", (1, 4), {}, {"recompute": "none"}, slow=1e-6).planner(1e12)
    found = planner.search()
    assert found.tried is not None and found.tried.no_faster == 4 and "tp=4, as tp=2 is no faster" in found.left_out
    assert {compute.tp for compute, *_ in planner.prices._sharded} == {1, 2}
