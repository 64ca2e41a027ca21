"""What recomputed blocks keep: the knapsack against all choices, and the bytes that emitted stages keep against what is predicted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import SAC_IGNORED_OPS, _CachedTorchDispatchMode, _CachingTorchDispatchMode

import graphpar as gp
from graphpar.cost_models.activation_memory import Activations
from graphpar.cost_models.kept_results import ROWS as CHOSEN_FOR
from graphpar.cost_models.kept_results import Recomputations, Result, knapsack, results_of
from graphpar.cost_models.storage_tracker import Live
from graphpar.cost_models.workload import Works
from graphpar.hardware.cluster import Cluster
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.program import value_of
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages.modules import (
    StageAdapter,
    bind_collectives,
    build_stage,
    emitted_package,
    keywords,
    stage_function,
)
from tests.cost_models.test_memory import ROWS, _filled, _inputs, _rank_0, _tuple
from tests.tools.programs import example, norms_pinned

KINDS = ("none", "budget:0.9", "selective", "budget:0.6", "budget:0.3", "full")
FAST = [("gpt2_tiny", {"tp": 2}), ("gpt_dropout", {})]
SLOW = [
    ("llama", {"cp": 2}),
    ("t5", {}),
    ("bert", {"pp": 2}),
    ("vit", {"tp": 2}),
    ("resnet_batchnorm", {}),
    ("gpt", {"tp": 4}),
]

sizes = st.integers(0, 50)


@given(st.lists(st.tuples(sizes, sizes), max_size=8), st.integers(-3, 200))
def test_the_knapsack_is_the_best_of_all_choices(items: list[tuple[int, int]], room: int) -> None:
    results = [Result(str(place), "", 0, nbytes, cost) for place, (nbytes, cost) in enumerate(items)]
    worth = [result for result in results if result.nbytes and result.cost]
    every = [
        (sum(r.cost for r in some), -sum(r.nbytes for r in some))
        for count in range(len(worth) + 1)
        for some in itertools.combinations(worth, count)
        if sum(r.nbytes for r in some) <= max(0, room)
    ]
    found = knapsack(results, room)
    assert (sum(r.cost for r in found), -sum(r.nbytes for r in found)) == max(every)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**6)), max_size=30),
    st.lists(st.floats(0, 1), min_size=2),
)
def test_more_room_never_keeps_less(items: list[tuple[int, int]], shares: list[float]) -> None:
    results = [Result(str(place), "", 0, nbytes, cost) for place, (nbytes, cost) in enumerate(items)]
    whole = sum(result.nbytes for result in results)
    unit = max(1, -(-whole // 4096))
    kept = [sum(-(-r.nbytes // unit) for r in knapsack(results, int(share * whole))) for share in sorted(shares)]
    assert kept == sorted(kept)
    for share in shares:
        assert sum(r.nbytes for r in knapsack(results, int(share * whole))) <= share * whole


def _kept(parts: gp.Parts, index: int) -> int:
    """The bytes that the emitted stage has between a forward and its backward, on real tensors."""
    manifest = load_manifest(parts.folder)
    package, interface = emitted_package(manifest), manifest.stages[index]
    with _rank_0(manifest) as groups:
        bind_collectives(manifest, package, groups)
        module = _filled(build_stage(package, interface, torch.device("cpu"), True))
        if interface.recomputes:
            stage_function(package, interface, "recompute_units")(module)
        adapter = StageAdapter(module, interface)
        received, named = _inputs(parts, index, ROWS)
        with Live() as live:
            outputs = _tuple(adapter(*received, **keywords(named)))
            _, left = live.mark()
        torch.autograd.backward(
            [value for value in outputs if value.requires_grad],
            [torch.ones_like(value) for value in outputs if value.requires_grad],
        )
    return int(left)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "mesh"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
@pytest.mark.sampled(1 / 2)
def test_kept_bytes(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    program, found = example(name), []
    for kind in KINDS:
        plan = gp.plan(
            program, mesh=mesh, microbatch_size=ROWS, global_batch=8, allow_batch_coupling=True, recompute=kind
        )
        parts = gp.partition(program, plan)
        activations = Activations(parts.program, plan.mesh.degrees(), recomputed=parts.compilation.recomputed)
        kept = 0
        for stage in parts.stages:
            reach = activations.reach(stage, ROWS)
            real = _kept(parts, stage.index)
            assert reach.inside + reach.shared + reach.sent == pytest.approx(real, rel=0.02), kind
            kept += real
        found.append(kept)
    none, most, selective, middle, least, full = found
    assert full <= selective < none
    assert full < selective or name == "resnet_batchnorm"  # its convolutions are all made again
    assert full <= least < middle < most < none


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.sampled(1 / 2)
def test_operators_are_counted_as_emitted_stages_dispatch_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's two modes of selective checkpointing see those of the forward and those that run again."""
    seen = Counter[str]()

    def counted(mode: type) -> None:
        dispatch = mode.__torch_dispatch__  # type: ignore[attr-defined]

        def count(self: object, operator: object, *args: object) -> object:
            seen[mode.__name__] += operator not in SAC_IGNORED_OPS
            return dispatch(self, operator, *args)

        monkeypatch.setattr(mode, "__torch_dispatch__", count)

    counted(_CachingTorchDispatchMode)
    counted(_CachedTorchDispatchMode)
    plan = gp.plan(example(name), mesh={}, microbatch_size=ROWS, global_batch=8, recompute="selective")
    parts = gp.partition(example(name), plan)
    recomputations = Recomputations(parts.program, plan.mesh.degrees(), "cpu")
    (block,) = parts.program.blocks.values()
    first, again = recomputations.dispatched(block)
    seen.clear()  # planning ran a block, too
    _kept(parts, 0)
    assert seen[_CachingTorchDispatchMode.__name__] == first * len(block.instances)
    more = seen[_CachedTorchDispatchMode.__name__] / len(block.instances) - again
    assert 0 <= more <= 2  # the last linear layer still lays out its operands


@pytest.mark.costly
def test_shards_are_kept_of_what_is_gathered() -> None:
    """Each of 8 blocks gathers twice, for q, k and v and for its wider layer."""
    program, kept = example("gpt"), []
    for kind in ("none", "gathers"):
        pinned = norms_pinned(program, "S(1)")
        plan = gp.plan(program, mesh={"tp": 4}, microbatch_size=ROWS, global_batch=8, recompute=kind, shard_plan=pinned)
        parts = gp.partition(program, plan)
        activations = Activations(parts.program, {"tp": 4}, recomputed=parts.compilation.recomputed)
        reach = activations.reach(parts.stages[0], ROWS)
        assert reach.inside + reach.shared + reach.sent == _kept(parts, 0)
        kept.append(reach.inside)
    whole = ROWS * 16 * 64 * 4
    assert kept[0] - kept[1] == 8 * 2 * whole * 3 // 4


POINTWISE = [
    ("gpt", {"tp": 4}, "S(1)"),  # gathered norms, both ways
    ("llama", {"tp": 2}, "S(1)"),
    pytest.param("mixtral", {}, "", marks=pytest.mark.slow),
    pytest.param("bert", {"pp": 2}, "", marks=pytest.mark.slow),
    pytest.param("gpt_dropout", {}, "", marks=pytest.mark.slow),
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "mesh", "norms"), POINTWISE)
def test_what_pointwise_operators_made_is_not_kept(name: str, mesh: dict[str, int], norms: str) -> None:
    """Emitted stages keep what is predicted: of results that products read nothing, whether they were gathered or not."""
    program, kept = example(name), dict[str, int]()
    for kind in ("none", "pointwise", "gathers", "gathers+pointwise") if norms else ("none", "pointwise"):
        pinned = norms_pinned(program, norms)
        plan = gp.plan(program, mesh=mesh, microbatch_size=ROWS, global_batch=8, recompute=kind, shard_plan=pinned)
        parts = gp.partition(program, plan)
        activations = Activations(parts.program, plan.mesh.degrees(), recomputed=parts.compilation.recomputed)
        kept[kind] = 0
        for stage in parts.stages:
            reach = activations.reach(stage, ROWS)
            assert reach.inside + reach.shared + reach.sent == _kept(parts, stage.index), kind
            kept[kind] += reach.inside
        if kind == "pointwise":
            assert kept["none"] - kept[kind] == _made_again(parts) > 0
    if norms:
        of_norms = 2 * 8 * ROWS * 16 * 64 * 4 // parts.plan.mesh.tp
        assert kept["gathers"] - kept["gathers+pointwise"] == kept["none"] - kept["pointwise"] + of_norms


def _made_again(parts: gp.Parts) -> int:
    """The bytes of what blocks compute again."""
    shapes = [
        (concrete_shape(node, ROWS), value_of(node).dtype)
        for block in parts.program.blocks.values()
        for path in block.instances
        if (how := parts.compilation.recomputed.get(path))
        for node in block.graph.nodes
        if node.op == "call_function" and node.name not in how.nodes
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


@pytest.mark.costly
def test_the_peak_grows_with_the_budget() -> None:
    """Without the host, whose Python around operators of budgets makes these slower than full recomputation in a model this small."""
    program, cluster = example("llama"), Cluster.parse("2xH100")
    cluster = replace(cluster, device=replace(cluster.device, dispatch_s=0.0, hooks_s=0.0, policy_s=0.0))
    peaks, seconds = [], []
    for kind in ("full", *(f"budget:{tenths / 10}" for tenths in range(1, 10)), "none"):
        predicted = gp.plan(
            program, cluster, mesh={"tp": 2}, microbatch_size=2, global_batch=8, recompute=kind, compile=False
        ).predicted
        assert predicted is not None
        peaks.append(max(predicted.peak_memory_bytes))
        seconds.append(predicted.step_time_s)
    assert peaks == sorted(peaks)
    assert seconds[0] == max(seconds) and seconds[-1] == min(seconds)


def test_results_that_are_written_later_are_not_kept() -> None:
    parts = gp.partition(example("llama"), gp.plan(example("llama"), mesh={}, microbatch_size=ROWS, global_batch=8))
    block = next(b for b in parts.program.blocks.values() if any("rotary" in str(n.target) for n in b.graph.nodes))
    found = results_of(Activations(parts.program, {}), Works(parts.program, {}), block).results
    turned = {node.name for node in block.graph.nodes if "rotary" in str(node.target)}
    assert turned and not turned & {result.node for result in found}


def test_a_gated_activation_is_kept_as_its_product() -> None:
    """The activated gate is not written again, and a budget may keep the product, of which the whole cost to make it again is known."""
    parts = gp.partition(example("llama"), gp.plan(example("llama"), mesh={}, microbatch_size=ROWS, global_batch=8))
    block = next(b for b in parts.program.blocks.values() if any("swiglu" in str(n.target) for n in b.graph.nodes))
    found = results_of(Activations(parts.program, {}), Works(parts.program, {}), block).results
    (node,) = (node for node in block.graph.nodes if "swiglu" in str(node.target))
    (gated,) = (result for result in found if result.node == node.name)
    nbytes = CHOSEN_FOR * value_of(node).shape[1:].numel() * value_of(node).dtype.itemsize
    assert (gated.operator, gated.nbytes, gated.cost) == ("aten.mul", nbytes, 5 * nbytes)
