"""The price of a row: its own plan, on its own cluster.

Row ──its model's units──► Pricing ──its layout──► Estimate ──► Prediction
 └── printed stage times ──simulate(the row's schedule)──► bubble
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from benchmarks.published_folded import (
    Exchanging,
    exchanging,
    held_logits_bytes,
    mesh_of,
    own_copies_bytes,
    own_gradients_bytes,
    own_state_bytes,
    shape_here,
)
from benchmarks.published_kernels import DIVIDED_BYTES, MEGATRON_BYTES, ONE_KERNEL_BYTES
from benchmarks.published_programs import (
    Build,
    Degrees,
    Parts,
    parts,
    with_casts,
    with_forwards_again,
    with_gathers_again,
    with_heads,
    with_kernels_of_loss,
    with_peak_of_loss,
    with_pieces_sent,
    with_scores_again,
    with_shards_kept,
    with_sums_apart,
)
from benchmarks.published_rows import HALF, OPERATORS, Profile, Row, Unpriced
from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pricing import Pricing
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import USABLE
from graphpar.schedules.action_table import ActionTable, parse_table
from graphpar.schedules.order import Order, order_of
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import Transfers, simulate
from graphpar.schedules.zero_bubble import StageCosts, automatic

AUTOMATIC = {"ZB-1p": 1, "ZB-2p": 2}
"""Schedules that are made for given costs, by how often the memory of 1F1B they may take."""


@dataclass(frozen=True)
class Prediction:
    """Of a row; ``memory_bytes``, what the source prints, and the other two are of the rank that was measured, ``fits`` is about all."""

    step_time_s: float
    memory_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    fits: bool
    estimates: tuple[Estimate, ...] = ()


def price_row(row: Row) -> Prediction:
    """
    Raises:
        Unpriced: graphpar has no price for what the row ran.
    """
    if row.recompute == HALF:
        without, whole = (price_row(replace(row, recompute=kind)) for kind in ("none", "full"))
        return Prediction(
            (without.step_time_s + whole.step_time_s) / 2,
            (without.memory_bytes + whole.memory_bytes) / 2,
            (without.allocated_bytes + whole.allocated_bytes) / 2,
            reserved := (without.reserved_bytes + whole.reserved_bytes) / 2,
            reserved <= row.cluster.device.memory_bytes,
            (*without.estimates, *whole.estimates),
        )
    try:
        estimate = pricing_of(row).estimate(layout_of(row))
    except GraphparError as error:
        raise Unpriced(str(error)) from None
    blocks = Counter[int]()  # with experts, of each pp rank
    for stage in estimate.stages:
        first, after = stage.units
        blocks[stage.rank] += len(range(max(first, 1 + row.experts_after), min(after, 1 + row.layers)))
    held = Counter[int]()
    for stage in estimate.stages:
        held[stage.rank] += stage.parameters
    peaks = [
        peak
        + own_state_bytes(row, blocks[pp])
        - own_copies_bytes(row, held[pp])
        + own_gradients_bytes(row, held[pp], estimate.memory[pp].activations + estimate.memory[pp].transient)
        for pp, peak in enumerate(estimate.peak_memory_bytes)
    ]
    peaks[-1] += held_logits_bytes(row)
    rank = max(range(len(peaks)), key=peaks.__getitem__) if row.memory_of is None else row.memory_of
    reserved = peaks[rank] - estimate.memory[rank].communicators
    allocated = reserved - estimate.memory[rank].slack
    outside = row.cluster.device.memory_bytes * (1 / USABLE - 1) + estimate.memory[rank].communicators
    return Prediction(
        estimate.step_time_s,
        {"allocated": allocated, "device": reserved + outside}.get(row.habits.prints or "", reserved),
        allocated,
        reserved,
        max(peaks) <= row.cluster.device.memory_bytes,
        (estimate,),
    )


def pricing_of(row: Row) -> Pricing:
    """Make the pricing of a row's model on the row's cluster."""
    units = _parts(row).chain(row.experts_after, row.layers - row.experts_after)
    return Exchanging(units, mesh_of(row), _cluster(row), execution_of(row), dtype=row.products).of_row(row)


def _parts(row: Row) -> Parts:
    shape, habits = shape_here(row), row.habits
    degrees = Degrees(row.degrees["tp"], row.sequence_parallel and row.degrees["tp"] > 1)
    kinds = row.experts_after > 0, row.layers > row.experts_after
    build = Build(degrees, row.dtype, *kinds, habits.fused, habits.gradient_bytes, habits.joined)
    made = with_scores_again if _makes_scores_again(row) else parts
    found = made(shape, build)
    if row.recompute == "full":
        plain, found = found, made(shape, replace(build, kind="full"))
        found = found if habits.stops_early else with_forwards_again(found, plain, habits.recomputes_ends)
    if row.recompute == OPERATORS:
        plain, found = found, made(shape, replace(build, kind="selective"))
        if degrees.sequence:
            found = with_gathers_again(found, plain, made(shape, replace(build, kind="gathers")))
    if habits.keeps_shards and degrees.sequence and row.recompute in ("none", "selective"):
        found = with_shards_kept(made(shape, replace(build, kind="gathers")), found)
    if row.products == "fp8" and habits.cast_bytes:
        found = with_casts(found, habits.cast_bytes, shape.hidden, degrees.tp if degrees.sequence else 1)
    if habits.divided_loss_bytes and degrees.tp > 1:
        found = with_peak_of_loss(found, habits.divided_loss_bytes * shape.seq * shape.vocab / degrees.tp)
    if habits.loss == "megatron":
        known = ONE_KERNEL_BYTES if degrees.tp == 1 else DIVIDED_BYTES
        more = {phase: nbytes - known[phase] for phase, nbytes in MEGATRON_BYTES.items()}
        found = with_kernels_of_loss(found, more, shape.seq * shape.vocab / degrees.tp)
    if habits.fused and not habits.fuses_sums:
        found = with_sums_apart(found)
    if row.predictions > 1:
        found = with_heads(found, row.predictions)
    if habits.splits_messages and degrees.tp > 1 and not degrees.sequence:
        found = with_pieces_sent(found, degrees.tp)
    return exchanging(row, shape, found)


def _makes_scores_again(row: Row) -> bool:
    return row.recompute == "selective" and row.shape.attention != "flash"


DISPATCH_S = 57e-6
"""The host's time for an operator in training frameworks, whose operators are many calls of Python each: fitted by
:mod:`benchmarks.fit_devices`, in effect to vtrain_single, which alone is bound by its hosts. One figure for all sources."""


FUSED_CAST_BYTES = 4 / 3
"""Of memory, for an element of what products of 8 bits take, where the kernels before them write it in 8 bits: a third of a block's casts
are left, of what attention gives and takes and of gradients of what is added to the residual (Transformer Engine's modules)."""


_WEIGHTS = 5
"""Of a block of InternLM: of q, k and v, of what follows attention, and three; norms and biases go with them."""


def execution_of(row: Row) -> Execution:
    """Read how a row's program runs: kernels, overlap, recomputation, dtypes."""
    habits = row.habits
    return Execution(
        main_copies=True,
        gradient_bytes=habits.gradient_bytes,
        reduce_bytes=habits.sum_bytes,
        sums_whole=habits.sums_whole,
        broadcasts=min(row.shards, _WEIGHTS * row.layers + 2) if habits.broadcasts else 0,
        moved_bytes=habits.moved_bytes,
        zero=row.zero,
        shards=row.shards,
        recompute="selective" if row.recompute == "selective" and not _makes_scores_again(row) else "none",
        fused=habits.fused,
        overlap_gradients=habits.overlap_gradients,
        prefetch=habits.prefetch,
        hold_messages=False,
        wait_for_sends=habits.wait_for_sends,
        dispatch_s=DISPATCH_S,
        communicator_bytes=row.cluster.device.communicator_bytes or 0,
        cast_bytes=FUSED_CAST_BYTES if habits.fused_casts else 4.0,
        joined=habits.joined,
        overlap_tp=1 - 1 / row.degrees["tp"] if habits.overlap_tp else 0.0,
    )


def _cluster(row: Row) -> Cluster:
    """The row's cluster with the rates of the attention kernel that ran."""
    device = row.cluster.device
    rate = next((rate for part, rate in row.habits.attention_rates.items() if part in device.name), 1.0)
    forward, backward = (min(1.0, rate * share) for share in device.attention_efficiency)
    return replace(row.cluster, device=replace(device, attention_efficiency=(forward, backward)))


# ---- layout ----------------------------------------------------------------------------------------------------


def starts(layers: int, stages: int, entries: bool = False, up: int = 0) -> tuple[int, ...]:
    """List the first unit of each stage. Layers are divided evenly; where that can't be, the embedding and the head
    count as layers, and first stages have one more. ``entries``: embedding, last norm and head always count, each as one. ``up``: so many
    layers are divided by rounding up, and the last stage has those that are left, with any others."""
    if up and (each := -(-up // stages)) * (stages - 1) < layers:
        return (0, *(1 + stage * each for stage in range(1, stages)))
    if layers % stages == 0 and not entries:
        return (0, *(1 + stage * (layers // stages) for stage in range(1, stages)))
    each, more = divmod(layers + 2 + entries, stages)
    return tuple(min(stage * each + min(stage, more), layers + 1) for stage in range(stages))


def layout_of(row: Row) -> Layout:
    """Make the layout of a row for the estimate: its stages, schedule and microbatches.

    Raises:
        Unpriced: there are fewer layers than stages.
    """
    pp = row.degrees["pp"]
    count = pp * row.stages_per_rank
    if row.layers + 2 < count:
        raise Unpriced(f"{row.layers} layers are fewer than {count} stages")
    up = row.layers + 1 - row.predictions if row.habits.rounds_up else 0
    first = starts(row.layers, count, row.habits.split_entries, up)
    if row.schedule not in AUTOMATIC:
        order = order_of(few(pp, row.microbatches)) if row.schedule == "1F1B" and row.microbatches < pp else None
        return Layout(row.schedule, row.microbatch_size, row.microbatches, first, order)
    named = Layout("ZB-H1", row.microbatch_size, row.microbatches, first)
    found = pricing_of(row).estimate(named).stages
    costs = StageCosts(
        [stage.forward_s for stage in found],
        [stage.backward_s - stage.weight_s for stage in found],
        [stage.weight_s for stage in found],
        Transfers([0.0] * (pp - 1), [0.0] * (pp - 1)),
    )
    return replace(
        named, schedule=row.schedule, order=order_of(_automatic(row, costs, 1.0))
    )  # Pricing counts activations as whole until W


def few(pp: int, microbatches: int) -> ActionTable:
    """1F1B of fewer microbatches than ranks, which torch's does not run: every rank does what it has as soon as it can."""
    rows = []
    for rank in range(pp):
        ahead = min(microbatches, pp - rank)
        steps = [f"{rank}F{number}" for number in range(ahead)]
        for number in range(microbatches):
            steps += [f"{rank}B{number}", *([f"{rank}F{number + ahead}"] if number + ahead < microbatches else [])]
        rows.append(",".join(steps))
    return parse_table("\n".join(rows))


def _automatic(row: Row, costs: StageCosts, for_weight: float) -> ActionTable:
    return automatic(row.microbatches, costs, row.degrees["pp"] * AUTOMATIC[row.schedule], for_weight)


# ---- bubbles ---------------------------------------------------------------------------------------------------


def bubble(row: Row) -> float:
    """The share of a step in which a rank computes nothing, from the stage times that the row prints."""
    profile = row.measured.profile
    assert profile is not None
    return _bubble(row, profile)


def _bubble(row: Row, profile: Profile) -> float:
    pp, per_rank, count = row.degrees["pp"], row.stages_per_rank, row.microbatches
    stages = pp * per_rank
    one, two, three = (value / per_rank for value in (profile.forward, profile.by_input, profile.by_weight))
    moves = Transfers([profile.transfer] * (stages - 1), [profile.transfer] * (stages - 1))
    order = _order(row, StageCosts([one] * stages, [two] * stages, [three] * stages, moves))
    timeline = simulate(order, [one] * stages, [two + three] * stages, [three] * stages, transfers=moves, spans=False)
    return 1 - count * (profile.forward + profile.by_input + profile.by_weight) / timeline.period


def _order(row: Row, costs: StageCosts) -> Order | ActionTable:
    if row.schedule in AUTOMATIC:
        # of 34 + 5 a s / h bytes of a value that a layer keeps, 32 stay for the weights (arXiv 2401.10241, section 2.3)
        return _automatic(row, costs, 32 / (34 + 5 * row.shape.heads * row.shape.seq / row.shape.hidden))
    if row.schedule == "1F1B" and row.microbatches < row.degrees["pp"]:
        return few(row.degrees["pp"], row.microbatches)
    return action_table(row.schedule, row.degrees["pp"], row.stages_per_rank, row.microbatches)
