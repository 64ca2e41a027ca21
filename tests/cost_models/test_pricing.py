"""Prices of a step: their parts against independent counts, and the laws that they must keep."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphpar as gp
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.run_bytes import RunBytes
from graphpar.cost_models.step_costs import StageSeconds
from graphpar.cost_models.work import Attention, Collective, Phase, Product, Size, Traffic, Work
from graphpar.cost_models.workload import Works
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Device
from graphpar.ir.program import OptimizerState
from graphpar.operators.contractions import ONE
from graphpar.passes.measured_units import RankUnits
from graphpar.passes.planning.prices import pricing_of
from graphpar.passes.sharding.shard import shard
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.runtime.torch_versions import SPLITS_BACKWARD
from tests.cost_models.test_memory import FAST, parts_of
from tests.models.zoo import ZOO
from tests.tools.exact_memory import Activations, rank_memory
from tests.tools.programs import example, example_file, norms_pinned
from tests.tools.samples import drawn

A100 = DEVICES["A100-SXM-80GB"]


def pricing_for(
    case: tuple[str, str, str], cluster: str = "", execution: Execution | None = None
) -> tuple[Pricing, Layout]:
    parts = parts_of(*case)
    where = Cluster.parse(cluster or f"{parts.plan.mesh.size}xCPU")
    return pricing_of(example(case[0]), parts.plan, where, execution)


# ---- what there is to do -----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


def mlp_work(fused: bool = False) -> Work:
    program = gp.export(Mlp(), (torch.randn(6, 8),), loss_fn=lambda y: y.square().mean())
    return Works(program, {}, fused=fused).of(program.graph)


def test_products_of_an_mlp() -> None:
    """By hand: forward, no gradient of the input, gradients of both weights and of the hidden values."""
    rows = {row: times for row, times in mlp_work().rows.items() if isinstance(row, Product)}
    batch = Size(1.0, 1)
    first, second = Size(8.0), Size(32.0)
    assert rows == {
        Product(Phase.FORWARD, ONE, batch, second, first, 4): 1,
        Product(Phase.WEIGHT, ONE, second, first, batch, 4): 1,
        Product(Phase.FORWARD, ONE, batch, Size(4.0), second, 4): 1,
        Product(Phase.INPUT, ONE, batch, second, Size(4.0), 4): 1,
        Product(Phase.WEIGHT, ONE, Size(4.0), second, batch, 4): 1,
    }


def test_chains_are_fused_only_where_that_is_said() -> None:
    """relu and its backward, then the loss: alone they are kernels of their own, fused the square is one with its mean."""

    def moved(fused: bool) -> float:
        rows = mlp_work(fused).rows.items()
        return sum(
            times * row.nbytes.at(64) for row, times in rows if isinstance(row, Traffic) and row.phase is Phase.FORWARD
        )

    alone = (
        64 * (2 * 32 + 2 * 4 + 4) * 4 + 4
    )  # relu reads and writes 32, the square 4, the mean reads 4 a row and writes one
    assert moved(False) == pytest.approx(alone, rel=0.01)
    assert moved(True) == pytest.approx(alone - 2 * 64 * 4 * 4, rel=0.01)


def test_a_backward_moves_gradients_and_what_was_saved() -> None:
    rows = [(row, times) for row, times in mlp_work().rows.items() if isinstance(row, Traffic)]
    by_input, by_weight = (
        sum(times * row.nbytes.at(64) for row, times in rows if row.phase is phase)
        for phase in (Phase.INPUT, Phase.WEIGHT)
    )
    # relu and the square read a gradient and a value and write a gradient, the mean writes one
    assert by_input == pytest.approx(64 * (3 * 32 + 3 * 4 + 4) * 4, rel=0.01)
    assert by_weight == 3 * (8 * 32 + 32 + 32 * 4) * 4  # added to what microbatches before gave


@pytest.mark.parametrize("name", ["gpt", "gpt2_tiny", "bert", "resnet_batchnorm", "vit", "unet"])
@pytest.mark.sampled(1 / 2)
def test_flops_of_products_are_those_that_torch_counts(name: str) -> None:
    """Of a forward and a backward, against torch's counter over the user's own model."""
    file, program = example_file(name), example(name)
    model = file.model if isinstance(file.model, nn.Module) else file.model()
    with FlopCounterMode(display=False) as counter:
        output = model(*file.args, **file.kwargs)
        loss = file.loss_fn(output, *file.targets) if file.loss_fn is not None else getattr(output, "loss", output)
        loss.backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flops for operator, flops in counts.items() if "attention" not in str(operator))
    rows = Works(program, {}).of(program.graph).rows
    mine = Work({row: times for row, times in rows.items() if isinstance(row, Product)}).flops(program.batch)
    assert mine == pytest.approx(counted, rel=1e-3)


def test_attention_is_halved_where_it_is_causal() -> None:
    row = Attention(Phase.FORWARD, Size(12.0, 1), Size(128.0), Size(128.0), 64.0, False, 2)
    whole, half = (Work({row._replace(causal=causal): 1}).flops(3) for causal in (False, True))
    assert whole == 2 * half == 4 * 36 * 128 * 128 * 64
    assert Work({row._replace(phase=Phase.INPUT): 1}).flops(3) == 2.5 * whole


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.sampled(1 / 2)
def test_a_divided_program_does_its_share(axis: str) -> None:
    """Two ranks together do the products of one."""
    program = example("llama")
    plan = gp.plan(program, mesh={axis: 2}, microbatch_size=2)
    lowered = shard(program, plan.sharding)
    whole, piece = (
        Works(each, degrees).of(each.graph).flops(2) for each, degrees in ((program, {}), (lowered, {axis: 2}))
    )
    assert 2 * piece == pytest.approx(whole, rel=0.01)


class Looked(nn.Module):
    """A large table, whose rows go through small residual branches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50_000, 32)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for branch in self.branches:
            x = x + branch(x)
        return x.square().mean()


def test_what_several_ranks_compute_alike_counts_once_in_mfu() -> None:
    program = gp.export(Looked(), (torch.randint(50_000, (8, 10)),))
    pins = {"branches.**": "replicate"}
    alone, divided, alike = (
        gp.plan(program, cluster, mesh=mesh, shard_plan=how, global_batch=8, microbatch_size=8)
        for cluster, mesh, how in (("1xA100", {}, None), ("2xA100", {"tp": 2}, None), ("2xA100", {"tp": 2}, pins))
    )
    for plan in (divided, alike):
        assert plan.predicted is not None and alone.predicted is not None
        flops = 2 * plan.predicted.mfu * plan.predicted.step_time_s
        assert flops == pytest.approx(alone.predicted.mfu * alone.predicted.step_time_s, rel=1e-9)


@pytest.mark.skipif(not SPLITS_BACKWARD, reason="torch runs backwards whole")
def test_the_halves_of_a_stage_that_sends_what_it_reads_are_measured() -> None:
    """The runtime returns a copy of ``x``, which torch detaches after the first half."""
    program = gp.export(Looked(), (torch.randint(50_000, (8, 10)),), dtype="bf16")
    plan = gp.plan(program, "4xA100", mesh={"pp": 2, "tp": 2}, schedule="ZBVZeroBubble", global_batch=8)
    assert plan.predicted is not None and len(plan.stages) == 4


def test_collectives_are_the_transitions() -> None:
    program = example("gpt")
    plan = gp.plan(program, mesh={"tp": 2}, microbatch_size=2, shard_plan=norms_pinned(program, "S(1)"))
    lowered = shard(program, plan.sharding)
    block = next(iter(lowered.blocks.values()))
    rows = Works(lowered, {"tp": 2}).block(block).rows
    kinds = {(row.phase, row.kind): times for row, times in rows.items() if isinstance(row, Collective)}
    assert kinds == {
        (Phase.FORWARD, "all-gather"): 2,
        (Phase.FORWARD, "reduce-scatter"): 2,
        (Phase.INPUT, "all-gather"): 2,
        (Phase.INPUT, "reduce-scatter"): 2,
    }


def test_the_closed_form_is_the_count() -> None:
    b = sympy.Symbol("b")
    work = mlp_work()
    assert [float(work.formula(b)["flops"].subs(b, rows)) for rows in (1, 7)] == [work.flops(rows) for rows in (1, 7)]


# ---- seconds -----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 2), st.integers(1, 64),
    st.sampled_from(["A100-SXM-80GB", "H100-SXM-80GB", "CPU"]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_larger_product_is_never_cheaper(m: int, n: int, k: int, grown: int, steps: int, name: str) -> None:
    """Rows that were whole 16 bytes stay so, and others don't become so: that alone may make a larger product cheaper."""
    sizes = [m, n, k]
    compute = Compute(DEVICES[name], "fp32" if name == "CPU" else "bf16")

    def seconds(m: int, n: int, k: int) -> float:
        row = Product(Phase.FORWARD, ONE, Size(float(m)), Size(float(n)), Size(float(k)), 4 if name == "CPU" else 2)
        return compute.seconds(Work({row: 1}), 1)[0].products

    before = seconds(*sizes)
    sizes[grown] += 8 * steps
    assert seconds(*sizes) >= before * (1 - 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_products_of_each_dtype_have_a_price(dtype: torch.dtype) -> None:
    row = Product(Phase.FORWARD, ONE, Size(8.0), Size(8.0), Size(8.0), dtype.itemsize)

    assert Compute(DEVICES["CPU"], "fp32").seconds(Work({row: 1}), 1)[0].products > 0


@pytest.mark.costly
@given(
    st.floats(1.0, 8.0),
    st.sampled_from(["flops", "memory_bytes_per_s", "intra_node", "inter_node"]),
    st.sampled_from(FAST),
)
@settings(max_examples=12, deadline=None)
def test_a_faster_device_never_costs_time(times: float, what: str, case: tuple[str, str, str]) -> None:
    slow = Cluster.of(A100, 2, 1) if "=2" in case[1] else Cluster.of(A100, 1, 1)
    fast = replace(slow, **_faster(slow, what, times))
    before, after = (_priced(case, cluster).step_time_s for cluster in (slow, fast))
    assert after <= before * (1 + 1e-12)


def _faster(cluster: Cluster, what: str, times: float) -> dict[str, Any]:
    if what in ("intra_node", "inter_node"):
        link = getattr(cluster, what)
        return {what: replace(link, bytes_per_s=link.bytes_per_s * times)}
    value = getattr(cluster.device, what)
    grown = {name: rate * times for name, rate in value.items()} if what == "flops" else value * times
    changes: dict[str, Any] = {what: grown}
    return {"device": replace(cluster.device, **changes)}


def _priced(case: tuple[str, str, str], cluster: Cluster) -> Estimate:
    units, mesh, layout = _units(case)
    return Pricing(units, mesh, cluster, dtype="fp32").estimate(layout)


@functools.cache
def _units(case: tuple[str, str, str]) -> tuple[tuple[Unit, ...], Mesh, Layout]:
    pricing, layout = pricing_for(case)
    return pricing.units, pricing.mesh, layout


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "tp"), drawn([(name, tp) for name in ("A100-SXM-80GB", "CPU") for tp in (1, 2)], 1, 2)
)
def test_a_longer_sequence_never_gets_cheaper(name: str, tp: int) -> None:
    times, peaks = [], []
    for length in (8, 12, 24, 64, 100):
        pricing = Pricing(_attentive(length, tp), Mesh(tp=tp), Cluster.of(DEVICES[name], 1, tp), dtype="fp32")
        estimate = pricing.estimate(Layout("1F1B", 2, 2))
        times.append(estimate.step_time_s)
        peaks.append(estimate.peak_memory_bytes[0])
    assert times == sorted(times)
    assert peaks == sorted(peaks)


@functools.cache
def _attentive(length: int, tp: int) -> tuple[Unit, ...]:
    program = gp.export(Attentive(), (torch.zeros(4, length, 32),), loss_fn=lambda y: y.square().mean())
    lowered = shard(program, gp.plan(program, mesh={"tp": tp}, microbatch_size=2).sharding) if tp > 1 else program
    return tuple(RankUnits(lowered, {"tp": tp}).of())


class Attentive(nn.Module):
    """Two blocks of attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("pp", [2, 4])
def test_a_schedule_is_continued_as_it_goes_on(schedule: str, pp: int) -> None:
    """What few microbatches and the next round say of many is what simulating them all gives."""
    units, _, _ = _units(("gpt", "pp=1", ""))
    units = (units[0], *[units[1]] * 14, units[-1])
    pricing = Pricing(units, Mesh(pp=pp), Cluster.of(A100, 2, pp // 2), dtype="fp32")
    stages = pp * SCHEDULES[schedule].default_stages
    starts = tuple(round(place * len(units) / stages) for place in range(stages))
    for count in (8 * pp, 12 * pp):
        layout = Layout(schedule, 1, count, starts)
        exact, continued = pricing.estimate(layout), pricing.estimate(layout, exact=False)
        assert continued.step_time_s == pytest.approx(exact.step_time_s, rel=5e-3)
        assert continued.peak_memory_bytes == pytest.approx(exact.peak_memory_bytes, rel=5e-3)


@pytest.mark.costly
@given(
    device=st.sampled_from(["A100-SXM-80GB", "CPU"]),
    mesh=st.sampled_from(
        [Mesh(pp=2), Mesh(pp=4), Mesh(dp_shard=2), Mesh(pp=2, dp_shard=2), Mesh(pp=2, dp_replicate=2)]
    ),
    schedule=st.sampled_from(list(SCHEDULES)),
    rounds=st.integers(2, 6),
    zero=st.integers(0, 3),
    reshard=st.sampled_from(["default", "always"]),
    slow=st.sampled_from([1.0, 30.0, 1000.0, 1e5]),
    wait_for_sends=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_axis_shows_more_communication_than_it_has(
    device: str, mesh: Mesh, schedule: str, rounds: int, zero: int, reshard: str, slow: float, wait_for_sends: bool
) -> None:
    """However slow the links are, and also where a rank waits until its own messages have arrived."""
    row = SCHEDULES[schedule]
    if mesh.dp_shard == 1 or (row.splits_backward and reshard == "always"):
        zero, reshard = zero if mesh.dp_shard > 1 else 0, "default"
    units, _, _ = _units(("gpt", "pp=1", ""))
    units = (units[0], *[units[1]] * 6, units[-1])
    cluster = Cluster.of(DEVICES[device], 1, mesh.size)
    link = replace(cluster.intra_node, bytes_per_s=cluster.intra_node.bytes_per_s / slow)
    run = Execution(zero=zero, reshard=reshard, wait_for_sends=wait_for_sends)
    pricing = Pricing(units, mesh, replace(cluster, intra_node=link), run, dtype="fp32")
    stages = mesh.pp * (row.default_stages if mesh.pp > 1 else 1)
    starts = tuple(round(place * len(units) / stages) for place in range(stages))
    estimate = pricing.estimate(Layout(schedule, 1, rounds * mesh.pp, starts))
    for axis, exposed in estimate.exposed_s.items():
        assert exposed <= estimate.communication_s[axis] * (1 + 1e-9), axis
    assert sum(estimate.parts_s.values()) == pytest.approx(estimate.step_time_s)


def test_recomputing_costs_a_forward_and_keeps_inputs() -> None:
    units, mesh, layout = _units(("gpt", "pp=1", ""))
    cluster = Cluster.of(A100, 1, 1)
    none, full = (
        Pricing(units, mesh, cluster, Execution(recompute=kind), dtype="fp32").estimate(layout)
        for kind in ("none", "full")
    )
    forward = sum(stage.forward_s for stage in none.stages)
    assert full.step_time_s - none.step_time_s == pytest.approx(forward * layout.microbatches)
    assert full.memory[0].activations < none.memory[0].activations / 4
    assert full.memory[0].parameters == none.memory[0].parameters
    assert full.mfu == pytest.approx(none.mfu * none.step_time_s / full.step_time_s)  # recomputed flops don't count


def test_sharded_state_and_parameters() -> None:
    units, _, layout = _units(("gpt", "pp=1", ""))
    cluster, mesh = Cluster.of(A100, 1, 4), Mesh(dp_shard=4)
    levels = [Pricing(units, mesh, cluster, Execution(zero=level), dtype="fp32").estimate(layout) for level in range(4)]
    whole = levels[0].memory[0]
    assert [each.memory[0].optimizer for each in levels] == [whole.optimizer, *[-(-whole.optimizer // 4)] * 3]
    assert [each.memory[0].gradients for each in levels] == [whole.gradients] * 2 + [-(-whole.gradients // 4)] * 2
    assert levels[3].memory[0].parameters == -(-whole.parameters // 4)
    late = Pricing(units, mesh, cluster, Execution(zero=3, prefetch=False), dtype="fp32").estimate(layout)
    assert late.step_time_s > levels[3].step_time_s


def test_gradients_that_do_not_overlap_show() -> None:
    units, _, layout = _units(("gpt", "pp=1", ""))
    slow = replace(A100.intra_node, bytes_per_s=1e8)  # gradients take longer than a bucket of them
    cluster, mesh = replace(Cluster.of(A100, 1, 2), intra_node=slow), Mesh(dp_replicate=2)
    units = [units[0], *[units[1]] * 200, units[-1]]
    beside, after = (
        Pricing(units, mesh, cluster, Execution(overlap_gradients=flag), dtype="fp32").estimate(layout)
        for flag in (True, False)
    )
    assert after.gradients_s == pytest.approx(after.communication_s["dp_replicate"])
    assert beside.gradients_s < after.gradients_s


def test_waiting_for_sends_costs_time() -> None:
    units, _, _ = _units(("gpt", "pp=1", ""))
    cluster, layout = Cluster.of(A100, 2, 1), Layout("1F1B", 2, 4, (0, 1))
    free, waits = (
        Pricing(units, Mesh(pp=2), cluster, Execution(wait_for_sends=flag), dtype="fp32").estimate(layout)
        for flag in (False, True)
    )
    assert waits.pipeline_s > free.pipeline_s
    assert waits.compute_s == free.compute_s


def test_stages_must_have_units_and_ranks() -> None:
    units, _, _ = _units(("gpt", "pp=1", ""))
    pricing = Pricing(units, Mesh(pp=2), Cluster.of(A100, 1, 2), dtype="fp32")
    for starts, message in (
        ((0, 0), "at least one unit"),
        ((1, 2), "at least one unit"),
        ((0, 1, 2), "don't divide evenly"),
    ):
        with pytest.raises(GraphparError, match=message):
            pricing.estimate(Layout("1F1B", 1, 4, starts))


def test_a_phase_takes_its_host_where_that_is_longer() -> None:
    units, mesh, layout = _units(("gpt", "pp=1", ""))
    pricing = Pricing(units, mesh, Cluster.of(A100, 1, 1), Execution(dispatch_s=1e-3), dtype="fp32")
    forward, by_input, by_weight = (sum(unit.kind.work.operators[phase] for unit in units) for phase in Phase)
    cost = pricing.stage_seconds(0, len(units), layout.microbatch_size)
    assert cost.forward == pytest.approx(1e-3 * forward)
    assert cost.backward == pytest.approx(1e-3 * (by_input + by_weight)) and cost.weight == pytest.approx(
        1e-3 * by_weight
    )


@pytest.mark.parametrize("kind", ["full", "budget:0.5"])
@pytest.mark.sampled(1 / 2)
def test_operators_that_run_again_cost_a_cpu_their_python_and_a_gpu_what_its_kernels_do_not_hide(kind: str) -> None:
    program = example("gpt")
    plan = gp.plan(program, mesh={"dp_replicate": 2}, global_batch=8, recompute=kind)

    def cost(device: Device, **figures: float) -> StageSeconds:
        pricing, layout = pricing_of(program, plan, Cluster.of(replace(device, **figures), 1, 2))  # type: ignore[arg-type]
        return pricing.stage_seconds(0, len(pricing.units), layout.microbatch_size)

    pricing, _ = pricing_of(program, plan, Cluster.parse("2xCPU"))
    counts = [unit.kind.again for unit in pricing.units]
    first, again = (sum(count.watched[way] for count in counts) for way in (0, 1))
    hooked = sum(count.hooked for count in counts)
    assert (first, again) == ((0, 0) if kind == "full" else (first, hooked)) and hooked > 100
    free = cost(DEVICES["CPU"], hooks_s=0.0, policy_s=0.0)
    paid = cost(DEVICES["CPU"], hooks_s=1e-3, policy_s=1e-2)
    assert paid.forward - free.forward == pytest.approx(1e-2 * first)
    assert paid.backward - free.backward == pytest.approx(1e-2 * again + 1e-3 * hooked)
    hidden, shown = (replace(A100, dispatch_s=0.0, launch_s=launch) for launch in (1.0, 0.0))
    assert cost(hidden, policy_s=1e-2).backward == cost(hidden, policy_s=0.0).backward
    assert cost(hidden, policy_s=1e-2).forward == cost(hidden, policy_s=0.0).forward
    if kind != "full":
        assert cost(shown, policy_s=1e3).forward == pytest.approx(1e3 * first)


BLOCKS = 8  # of the example: FSDP2's units, with one of the rest of a stage


@pytest.mark.parametrize(
    ("zero", "pp", "counts"),
    [(3, 1, (2 * BLOCKS + 2, 2 * BLOCKS + 1, BLOCKS + 1)), (2, 1, (2 * BLOCKS + 2, 0, BLOCKS + 1)), (3, 2, (0, 5, 5))],
)
def test_units_of_sharded_state_cost_a_cpu_the_python_of_fsdp(zero: int, pp: int, counts: tuple[int, int, int]) -> None:
    """A pipeline gathers and reduces once a step, by its table, without hooks."""
    program, cores = example("gpt"), 2 * pp
    plan = gp.plan(program, mesh={"dp_shard": 2, "pp": pp}, zero=zero, global_batch=8)

    def step(**figures: float) -> float:
        device = replace(DEVICES["CPU"], cores=cores, **(dict.fromkeys(names, 0.0) | figures))  # type: ignore[arg-type]
        pricing, layout = pricing_of(program, plan, Cluster.of(device, 1, cores))
        return pricing.estimate(layout).step_time_s

    names = [f"fsdp_{what}_s" for what in ("hooks", "gather", "reduce")]
    assert [step(**{name: 1.0}) - step() for name in names] == pytest.approx(counts, abs=1e-2)


def test_the_optimizer_moves_its_state() -> None:
    """AdamW in fp32, not fused: in three passes it reads and writes the parameter and two moments, and the gradient as often."""
    units, mesh, layout = _units(("gpt", "pp=1", ""))
    device = replace(A100, launch_s=0.0)
    (sgd, adam, fused) = (
        Pricing(units, mesh, Cluster.of(device, 1, 1), execution, dtype="fp32").estimate(layout)
        for execution in (Execution(optimizer=OptimizerState("SGD", 0.0)), Execution(), Execution(fused=True))
    )
    elements = adam.memory[0].parameters / 4
    rate = device.memory_bytes_per_s * device.memory_efficiency
    assert adam.optimizer_s == pytest.approx(3 * elements * 4 * (2 * 3 + 2) / rate)
    assert fused.optimizer_s == pytest.approx(adam.optimizer_s / 3)
    assert sgd.optimizer_s < adam.optimizer_s


def test_what_is_moved_besides_is_moved_once_for_each_element() -> None:
    units, mesh, layout = _units(("gpt", "pp=1", ""))
    cluster = Cluster.of(replace(A100, launch_s=0.0), 1, 1)
    plain, moving = (
        Pricing(units, mesh, cluster, Execution(moved_bytes=moved), dtype="fp32").estimate(layout) for moved in (0, 34)
    )
    elements = plain.memory[0].parameters / 4
    rate = A100.memory_bytes_per_s * A100.memory_efficiency
    assert moving.optimizer_s - plain.optimizer_s == pytest.approx(34 * elements / rate)


def test_zero_1_sums_gradients_in_shards_or_whole_and_gathers_parameters_or_broadcasts_them() -> None:
    units, _, _ = _units(("gpt", "pp=1", ""))
    cluster, mesh = Cluster.of(A100, 2, 2), Mesh(dp_replicate=2, dp_shard=2)
    whole = [(0, len(units))]

    def prices(**how: Any) -> tuple[float, ...]:
        pricing = Pricing(units, mesh, cluster, Execution(zero=1, **how), dtype="fp32")
        return pricing._ends.gradients(whole)[:3]

    network = Pricing(units, mesh, cluster, dtype="fp32").network
    shards, everyone = (network.group_of_axes(mesh, axes) for axes in (["dp_shard"], ["dp_replicate", "dp_shard"]))
    reduced, gathered, total = prices()
    between = network.seconds("all-reduce", total / 2, network.group_of_axes(mesh, ["dp_replicate"]))
    assert reduced == pytest.approx(network.seconds("reduce-scatter", total, shards) + between)
    assert gathered == network.seconds("all-gather", total, shards)  # parameters are as large as gradients here
    assert prices(sums_whole=True) == (network.seconds("all-reduce", total, everyone), gathered, total)
    assert prices(broadcasts=2)[1] == 2 * network.seconds("broadcast", total / 2, shards)


def test_a_hidden_collective_does_not_make_gathers_of_state_slower() -> None:
    units, plan_mesh, layout = _units(("gpt", "tp=2", ""))
    wire = replace(A100.intra_node, bytes_per_s=1e9)
    cluster, mesh = replace(Cluster.of(A100, 1, 4), intra_node=wire), replace(plan_mesh, dp_shard=2)

    def stage(overlap: float) -> StageSeconds:
        pricing = Pricing(units, mesh, cluster, Execution(zero=3, overlap_tp=overlap), dtype="fp32")
        return pricing.stage_seconds(0, len(units), layout.microbatch_size)

    shown, hidden = stage(0.0), stage(0.9)
    assert hidden.forward < shown.forward and hidden.backward <= shown.backward


def test_gathers_and_scatters_that_take_longer_than_the_work_are_all_that_shows() -> None:
    units, _, layout = _units(("llama", "pp=1", ""))
    wire = replace(A100.intra_node, bytes_per_s=1e4)
    cluster, mesh = replace(Cluster.of(A100, 1, 2), intra_node=wire), Mesh(dp_shard=2)
    pricing = Pricing(units, mesh, cluster, Execution(zero=3), dtype="fp32")
    group = pricing.network.group_of_axes(mesh, ["dp_shard"])
    gathers = [pricing.network.seconds("all-gather", sum(held.nbytes for held in unit.held), group) for unit in units]
    scatters = [
        pricing.network.seconds("reduce-scatter", pricing.bytes.gradient_sizes(unit.held), group) for unit in units
    ]
    cost = pricing.stage_seconds(0, len(units), layout.microbatch_size)
    assert cost.forward == pytest.approx(sum(gathers), rel=1e-3)
    # The backward of an embedding reads no parameters; those of the last unit are there from the forward.
    assert cost.backward == pytest.approx(sum(gathers[1:-1]) + sum(scatters), rel=1e-3)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_cpu_hides_no_gathers_and_scatters(zero: int) -> None:
    """Its cores copy and add what gloo moves, which they can't do while they compute."""
    units, _, layout = _units(("llama", "pp=1", ""))
    device = replace(DEVICES["CPU"], fsdp_hooks_s=0.0, fsdp_gather_s=0.0, fsdp_reduce_s=0.0)
    cluster, mesh = Cluster.of(device, 1, 2), Mesh(dp_shard=2)
    alone, sharded = (
        Pricing(units, mesh, cluster, Execution(zero=each), dtype="fp32").stage_seconds(
            0, len(units), layout.microbatch_size
        )
        for each in (0, zero)
    )
    pricing = Pricing(units, mesh, cluster, Execution(zero=zero), dtype="fp32")
    group = pricing.network.group_of_axes(mesh, ["dp_shard"])
    moved = 0.0
    for unit in units:
        gathers = 0 if zero == 2 else 1 if unit in (units[0], units[-1]) else 2
        moved += gathers * pricing.network.seconds("all-gather", sum(held.nbytes for held in unit.held), group)
        moved += pricing.network.seconds("reduce-scatter", pricing.bytes.gradient_sizes(unit.held), group)
    assert sharded.forward + sharded.backward == pytest.approx(alone.forward + alone.backward + moved)


def test_a_core_moves_operands_before_it_multiplies() -> None:
    core = replace(
        DEVICES["CPU"],
        flops={"fp32": 1e11},
        matrix_efficiency=1.0,
        half_reduction=0.0,
        operand_bytes_per_s=1e10,
        launch_s=0.0,
    )
    product = Work({Product(Phase.FORWARD, ONE, Size(64.0), Size(256.0), Size(128.0), 4): 1})
    moved = 4 * (64 * 128 + 128 * 256 + 64 * 256)
    forward, *_ = Compute(core, "fp32").seconds(product, 1)
    assert forward.products == pytest.approx(2 * 64 * 256 * 128 / 1e11 + moved / 1e10)


def test_rows_of_features_that_are_not_whole_take_longer() -> None:
    def taken(m: int, n: int, k: int, heads: int = 1, itemsize: int = 2, phase: Phase = Phase.FORWARD) -> float:
        row = Product(phase, Size(float(heads)), Size(float(m)), Size(float(n)), Size(float(k)), itemsize)
        return Compute(A100).seconds(Work({row: 1}), 1)[phase].products

    assert taken(4096, 50257, 768) > 1.7 * taken(4096, 50264, 768)
    assert taken(50257, 768, 4096, phase=Phase.WEIGHT) > 1.7 * taken(50264, 768, 4096, phase=Phase.WEIGHT)
    assert taken(2048, 2048, 225, 8) > 5 * taken(2048, 2048, 232, 8)
    some = replace(A100, flops={"bf16": A100.flops["bf16"]})  # a device of a file, of which no other rate is known
    row = Product(Phase.FORWARD, Size(8.0), Size(2048.0), Size(2048.0), Size(225.0), 2)
    assert 0 < Compute(some).seconds(Work({row: 1}), 1)[0].products < taken(2048, 2048, 225, 8)
    for sizes in ((4096, 50257, 768), (2048, 2048, 225)):  # units of 32 bits take rows of any length
        assert taken(*sizes, 8, itemsize=4) <= taken(sizes[0], sizes[1] + 7, sizes[2] + 7, 8, itemsize=4)
    assert taken(4095, 1024, 1024) <= taken(4096, 1024, 1024)  # as many tokens as there are
    assert taken(2047, 2047, 64, 8) <= taken(2048, 2048, 64, 8)  # and a sequence as long as it is


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("case", FAST, ids="-".join)
@pytest.mark.sampled(1 / 2)
def test_units_keep_what_their_stages_keep(case: tuple[str, str, str]) -> None:
    """The quick count, by units, against the exact one, of whole stages."""
    parts = parts_of(*case)
    pricing, layout = pricing_for(case)
    measured = Activations(parts.program, parts.plan.mesh.degrees(), even_experts=True)
    for rank, quick in enumerate(pricing.estimate(layout).memory):
        exact = rank_memory(parts.program, parts.plan, parts.stages, rank, activations=measured)
        for part in ("parameters", "gradients", "optimizer", "buffers", "inputs"):
            assert getattr(quick, part) == getattr(exact, part), part
        assert quick.boundaries == pytest.approx(exact.boundaries, rel=0.03)
        slack = 0.08 if case[0] == "unet" else 0.02  # values that skip units are kept by none of them alone
        assert quick.total == pytest.approx(exact.total, rel=slack)


def test_tables_of_runs_are_the_sums() -> None:
    """What the cut of stages reads, against what a stage of these units is priced at."""
    pricing, _ = pricing_for(("llama", "pp=1", ""))
    table = RunBytes.of(pricing.units, 2)
    for first, after in itertools.combinations(range(len(pricing.units) + 1), 2):
        _, forward, backward, _ = pricing.bytes.kept(first, after, 2)
        assert table.kept[first, after] == pytest.approx(pricing.bytes.in_flight(first, after, 2), abs=4)
        assert table.transient[first, after] == pytest.approx(max(forward, backward), abs=4)


@pytest.mark.costly
def test_norms_and_activations_have_a_rate_of_their_own() -> None:
    half = replace(DEVICES["CPU"], memory_efficiency=0.8, function_efficiency=0.4, launch_s=0.0)
    works = [Work({Traffic(Phase.FORWARD, Size(1e6), flag): 1}) for flag in (False, True)]
    plain, functions = (Compute(half, "fp32").seconds(work, 1)[0].traffic for work in works)
    assert functions == pytest.approx(2 * plain)
    program = gp.export(Attentive(), (torch.zeros(4, 8, 32),), loss_fn=lambda y: y.square().mean())
    rows = [
        row for row in Works(program, {}).block(next(iter(program.blocks.values()))).rows if isinstance(row, Traffic)
    ]
    assert {row.functions for row in rows} == {False, True}  # residual sums and copies, and norms


def test_attention_over_one_tensor_has_three_operands() -> None:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            out: Tensor = F.scaled_dot_product_attention(h, h, h)
            return out

    program = gp.export(Self(), (torch.zeros(4, 16, 8),), loss_fn=lambda y: y.sum())
    rows = [row for row in Works(program, {}).of(program.graph).rows if isinstance(row, Attention)]
    assert {(row.phase, row.heads, row.queries, row.keys, row.width) for row in rows} == {
        (phase, Size(1.0, 1), Size(16.0), Size(16.0), 8.0) for phase in (Phase.FORWARD, Phase.INPUT)
    }


def test_a_backward_that_fake_tensors_can_not_run_is_priced_all_the_same() -> None:
    toy = ZOO["index_put"]
    program = gp.export(toy.build, toy.inputs(), loss_fn=toy.loss_fn, targets=toy.targets(), **toy.export)
    assert all(unit.kind.memory.backward.at(2) > 0 for unit in RankUnits(program, {}).of())
