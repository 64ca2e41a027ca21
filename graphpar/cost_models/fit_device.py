"""Fit the figures of a device and its link to measured times, by least squares on the logarithms of the times.

    rows ──small operators──► launch_s, dispatch_s, hooks_s, policy_s
         ──sharded units────► fsdp_hooks_s, fsdp_gather_s, fsdp_reduce_s
         ──pages────────────► fresh_bytes_per_s
         ──traffic──────────► memory_efficiency, function_efficiency
         ──products─────────► matrix_efficiency, and half_reduction or, of a CPU, operand_bytes_per_s
         ──attention────────► attention_efficiency
         ──collectives──────► latency_s, efficiency of the link
         ──pipeline─────────► action_s                           each with the figures found before it; then the error over all rows

The fitted functions are those that price programs (``graphpar.cost_models.compute``, ``collectives``). Peaks are the best rates that any
row reached, or the vendor's for a device of the table, since times don't tell a peak from the share of it that is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.collectives import Group, Network
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.measure import DTYPES, STAGES, Row, Small
from graphpar.cost_models.work import Attention, Phase, Product, Size, Traffic, Work
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Device, Link
from graphpar.operators.contractions import ONE
from graphpar.schedules.order import order_of
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import Transfers, simulate

Array = NDArray[np.float64]

FUNCTIONS = ("gelu", "layer_norm")
TRAFFIC = {"add": 3, "mul": 3, "gelu": 2, "layer_norm": 2, "gelu, backward": 3, "layer_norm, backward": 3}
"""Tensors that an operator reads and writes."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
HOST_BOUND = 3.0
"""GPU rows shorter than this many times an operator's host time say nothing about the GPU."""
_HALF = math.log(0.5)
_USUAL = 0.1
"""Errors beyond this count linearly, so that one shape that a library is bad at does not spoil the others."""
_FASTEST = math.log(1e13)  # bytes a second
_WIDEST = 8.0  # bound of the logarithm of a share: efficiencies stay above 1 / 3000


@dataclass(frozen=True)
class Error:
    """Relative errors of the fitted times; 0.1 is 10 % too long or too short."""

    rows: int
    median: float
    worst: float
    worst_row: str

    @staticmethod
    def of(rows: Sequence[Row], fitted: Sequence[float]) -> Error:
        """Compare fitted with measured times."""
        off = [math.exp(abs(math.log(seconds / row.seconds))) - 1 for row, seconds in zip(rows, fitted)]
        worst = max(range(len(off)), key=off.__getitem__)
        row = rows[worst]
        return Error(len(rows), median(off), off[worst], f"{row.what} {'x'.join(map(str, row.shape))} {row.dtype}")


def kind_of(row: Row) -> str:
    """Return the kind of a row: product, traffic, attention, operator, sharded unit, pages, collective, transfer or pipeline."""
    first = row.what.partition(",")[0]
    return "traffic" if row.what in TRAFFIC else "collective" if row.what in COLLECTIVES else first


def work_of(row: Row) -> Work:
    """Return the work of a row of products, traffic or attention."""
    itemsize = DTYPES[row.dtype].itemsize
    kind = kind_of(row)
    if kind == "product":
        m, n, k = (Size(float(size)) for size in row.shape)
        return Work({Product(Phase.FORWARD, ONE, m, n, k, itemsize): 1})
    if kind == "traffic":
        nbytes = Size(float(TRAFFIC[row.what] * math.prod(row.shape) * itemsize))
        return Work({Traffic(Phase.FORWARD, nbytes, row.what.startswith(FUNCTIONS)): 1})
    assert kind == "attention"
    batch, heads, length, width = row.shape
    phase = Phase.INPUT if row.what.endswith("backward") else Phase.FORWARD
    rows, size = Size(float(batch * heads)), Size(float(length))
    return Work({Attention(phase, rows, size, size, width, True, itemsize): 1})


def priced(device: Device, rows: Sequence[Row]) -> list[float]:
    """Return the priced seconds of rows of products, traffic and attention on ``device``."""
    computes = {dtype: Compute(device, dtype) for dtype in {row.dtype for row in rows}}
    return [sum(phase.busy for phase in computes[row.dtype].seconds(work_of(row), 1)) for row in rows]


def rate(row: Row) -> float:
    """Return the flop/s of a row of products or attention, the bytes/s of one of traffic."""
    work = work_of(row)
    flops = work.flops(1)
    return (flops or sum(each.nbytes.at(1) for each in work.rows if isinstance(each, Traffic))) / row.seconds


# ---- the device ------------------------------------------------------------------------------------------------


def fit_device(start: Device, rows: Sequence[Row], peaks: Device | None = None) -> tuple[Device, dict[str, Error]]:
    """Fit a device to ``rows``, all of the same number of processes at once, and return it with the errors by kind of row.

    Args:
        start: name, kind, compute units and memory; its other figures are replaced.
        peaks: the same device in the table, for its peaks; None where it is not there.

    Raises:
        GraphparError: there are no products, traffic or operators among the rows.
    """
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(kind_of(row), []).append(row)
    for kind in ("operator", "product", "traffic"):
        if kind not in by_kind:
            raise GraphparError(f"A device can't be fitted: there are no rows of kind {kind!r} among the {len(rows)}.")
    small = {row.what: row.seconds for kind in ("operator", "sharded unit") for row in by_kind.get(kind, ())}
    device = _with_peaks(_with_overheads(start, small), by_kind, peaks)
    device = replace(device, fresh_bytes_per_s=_fresh(by_kind.get("pages", ())))
    traffic = _long(device, by_kind["traffic"])
    functions = [row for row in traffic if row.what.startswith(FUNCTIONS)]
    device = _fitted(device, [row for row in traffic if row not in functions], _with_memory, [_HALF])
    device = _fitted(device, functions, _with_functions, [_HALF]) if functions else device
    second = math.log(16.0) if start.kind != "cpu" else math.log(device.memory_bytes_per_s / 3)
    device = _fitted(device, _long(device, by_kind["product"]), _with_matrices, [_HALF, second])
    attention = _long(device, by_kind.get("attention", ()))
    if attention:
        device = _fitted(device, attention, _with_attention, [_HALF, _HALF])
    errors = {}
    for kind in ("product", "traffic", "attention"):
        if found := _long(device, by_kind.get(kind, ())):
            errors[kind] = Error.of(found, priced(device, found))
    return device, errors


def _long(device: Device, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are long enough to measure the device, not its host; all where none is."""
    found = [row for row in rows if row.seconds > HOST_BOUND * device.dispatch_s]
    return found or list(rows)


def _with_overheads(device: Device, times: Mapping[str, float]) -> Device:
    """Set launch and dispatch times, and those of the Python around operators that run again and units whose state is sharded.

    On a GPU the dispatch time is an operator's in a row of small ones; a CPU has no separate host.
    """
    if "operator, run again" in times:
        forward = Small.FORWARD * times["operator, forward"]
        twice = forward + (Small.FORWARD + Small.BACKWARD) * times["operator"]
        hooks = times["operator, run again"] - twice / Small.DISPATCHED
        policy = (times["operator, watched"] - times["operator, run again"]) / 2  # in the forward and again
        device = replace(device, hooks_s=max(0.0, hooks), policy_s=max(0.0, policy))
    if "sharded unit, hooks" in times:
        alone = (Small.FORWARD + Small.BACKWARD) * times["operator"]
        hooks, gathers, both = (times[f"sharded unit, {what}"] for what in ("hooks", "gathered", "reduced"))
        device = replace(
            device,
            fsdp_hooks_s=max(0.0, hooks - alone) / 2,  # in the forward and in the backward, as gathers
            fsdp_gather_s=max(0.0, gathers - hooks) / 2,
            fsdp_reduce_s=max(0.0, both - gathers),
        )
    if "operator, replayed" in times:
        return replace(device, launch_s=times["operator, replayed"], dispatch_s=times["operator"])
    return replace(device, launch_s=times["operator"], dispatch_s=0.0)


def _fresh(rows: Sequence[Row]) -> float | None:
    """Return the rate at which the system zeroes pages; None where an allocator keeps them."""
    times = {row.what: row for row in rows}
    if not times:
        return None
    fresh, again = times["pages"], times["pages, again"].seconds
    return fresh.shape[0] / (fresh.seconds - again) if fresh.seconds > 2 * again else None


def _with_peaks(device: Device, rows: Mapping[str, Sequence[Row]], known: Device | None) -> Device:
    flops: dict[str, float] = {}
    for row in (*rows["product"], *rows.get("attention", ())):
        flops[row.dtype] = max(flops.get(row.dtype, 0.0), rate(row))
    largest = max(math.prod(row.shape) for row in rows["traffic"])  # small ones stay in caches
    bandwidth = max(rate(row) for row in rows["traffic"] if math.prod(row.shape) == largest)
    if known is not None:
        flops = {dtype: max(best, known.flops.get(dtype, 0.0)) for dtype, best in flops.items()}
        bandwidth = known.memory_bytes_per_s
    return replace(device, flops=flops, memory_bytes_per_s=bandwidth)


def _share(logarithm: float) -> float:
    """Return a share of a peak, at most 1."""
    return math.exp(max(-_WIDEST, min(0.0, logarithm)))


def _with_memory(device: Device, logs: Sequence[float]) -> Device:
    return replace(device, memory_efficiency=_share(logs[0]), function_efficiency=None)


def _with_functions(device: Device, logs: Sequence[float]) -> Device:
    return replace(device, function_efficiency=_share(logs[0]))


def _with_matrices(device: Device, logs: Sequence[float]) -> Device:
    """Set the share of products, and raise peaks where the fitted rate of infinite reductions exceeds the best measured one."""
    above = math.exp(min(max(0.0, logs[0]), _WIDEST))
    flops = {dtype: peak * above for dtype, peak in device.flops.items()}
    found = replace(device, flops=flops, matrix_efficiency=_share(logs[0]))
    if device.kind == "cpu":
        return replace(found, operand_bytes_per_s=math.exp(max(0.0, min(logs[1], 50.0))))
    return replace(found, half_reduction=math.exp(min(logs[1], 10.0)))


def _with_attention(device: Device, logs: Sequence[float]) -> Device:
    return replace(device, attention_efficiency=(_share(logs[0]), _share(logs[1])))


def _fitted(
    device: Device, rows: Sequence[Row], figures: Callable[[Device, Sequence[float]], Device], start: Sequence[float]
) -> Device:
    measured = np.log([row.seconds for row in rows])

    def off(logs: Array) -> Array:
        return soft(np.log(priced(figures(device, list(logs)), rows)) - measured)

    return figures(device, list(least_squares(off, np.array(start))))


# ---- the link --------------------------------------------------------------------------------------------------


def fit_link(device: Device, rows: Sequence[Row]) -> tuple[Link, dict[str, Error]]:
    """Fit a link to ``rows`` of collectives and transfers, and return it with the error of each kind.

    Its bandwidth is that of transfers, where there are any; rings reach a share of it. Transfers have a separate latency, since a
    collective wakes more threads.
    """
    collectives, transfers = ([row for row in rows if kind_of(row) == kind] for kind in ("collective", "transfer"))

    def off(own: Sequence[Row], link: Callable[[Array], Link]) -> Callable[[Array], Array]:
        measured = np.log([row.seconds for row in own])
        return lambda logs: soft(np.log(sent(device, link(logs), own)) - measured)

    def send(logs: Array) -> Link:
        return Link(1e-4, math.exp(min(logs[1], _FASTEST)), send_latency_s=math.exp(logs[0]))

    best = math.log(max(row.shape[0] / row.seconds for row in transfers or collectives))
    found = Link(1e-4, math.exp(best))
    if transfers:
        found = send(least_squares(off(transfers, send), np.array([math.log(1e-4), best])))

    def ring(logs: Array) -> Link:
        return replace(found, latency_s=math.exp(logs[0]), efficiency=_share(logs[1]))

    if collectives:
        found = ring(least_squares(off(collectives, ring), np.array([math.log(1e-4), _HALF])))
    kinds = {"collective": collectives, "transfer": transfers}
    return found, {kind: Error.of(own, sent(device, found, own)) for kind, own in kinds.items() if own}


def sent(device: Device, link: Link, rows: Sequence[Row]) -> list[float]:
    """Return the priced seconds of collectives and transfers over ``link``."""
    networks = {count: Network(Cluster(1, count, device, link, link)) for count in {row.processes for row in rows}}
    found = []
    for row in rows:
        kind, ranks = ("send", 2) if row.what == "transfer" else (row.what, row.processes)
        found.append(networks[row.processes].seconds(kind, row.shape[0], Group(ranks, 1, ranks)))
    return found


def fit_actions(device: Device, link: Link, rows: Mapping[str, Row]) -> float:
    """Fit ``action_s``, the seconds of a pipeline's action besides its stage's work and transfers over ``link``.

    Args:
        rows: ``pipeline``, and ``pipeline, forward`` and ``pipeline, both ways`` of its stage alone.
    """
    row = rows["pipeline"]
    microbatches, height, width = row.shape
    order = order_of(action_table("Interleaved1F1B", 2, STAGES, microbatches))
    transfer = sent(device, link, [Row("transfer", (4 * height * width,), row.dtype, 2, 1.0)]) * (2 * STAGES - 1)
    forward = rows["pipeline, forward"].seconds
    backward = max(0.0, rows["pipeline, both ways"].seconds - forward)

    def makespan(action: float) -> float:
        costs = [forward + action] * 2 * STAGES, [backward + action] * 2 * STAGES
        return simulate(order, *costs, transfers=Transfers(transfer, transfer, sender_waits=True), spans=False).makespan

    low, high = 0.0, row.seconds
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if makespan(middle) < row.seconds else (low, middle)
    return low


# ---- least squares ---------------------------------------------------------------------------------------------


def soft(errors: Array) -> Array:
    """Transform errors so that their squares grow quadratically for small and linearly for large errors (pseudo-Huber loss)."""
    return np.asarray(np.sign(errors) * _USUAL * np.sqrt(2 * (np.sqrt(1 + (errors / _USUAL) ** 2) - 1)))


def least_squares(residuals: Callable[[Array], Array], start: Array, steps: int = 60) -> Array:
    """Return the point near ``start`` with the least sum of squares, by the Levenberg-Marquardt method."""
    point, damping = start.astype(float), 1e-2
    here = residuals(point)
    for _ in range(steps):
        slopes = np.stack(list(_slopes(residuals, point, here)), axis=1)
        normal = slopes.T @ slopes
        damped = normal + damping * (np.diag(np.diag(normal)) + 1e-12 * np.eye(len(point)))
        step = np.linalg.solve(damped, -slopes.T @ here)
        there = residuals(point + step)
        if there @ there < here @ here:
            done = here @ here - there @ there < 1e-12 * (here @ here)
            point, here, damping = point + step, there, damping / 3
            if done:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    return point


def _slopes(residuals: Callable[[Array], Array], point: Array, here: Array, width: float = 1e-4) -> Iterator[Array]:
    for place in range(len(point)):
        moved = point.copy()
        moved[place] += width
        yield (residuals(moved) - here) / width
