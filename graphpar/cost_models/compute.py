"""Seconds of a rank's work on a device: a roofline whose roof depends on shapes.

    product     the tiles of its result, in waves over the compute units; a tile takes its reduction plus ``half_reduction`` to start and
                end; few tiles split the reduction; at least its bytes. Rows of features that are not whole 16 bytes take longer.
                On a CPU its flops and its bytes one after the other, since a core packs its operands
    attention   flops at the share of the peak that fused kernels reach, less for short rows and narrow heads
    traffic     bytes at the share of the bandwidth that elementwise kernels reach
    pages       on a CPU a result of FRESH_FROM bytes comes in pages that the system zeroes first; half of traffic is written
    all         at least ``launch_s`` an operator; on a GPU a phase takes at least ``dispatch_s`` of the host for each operator
    recomputed  the Python around operators of blocks that run again, of the host; a CPU is its own host

Shares are the device's (:class:`graphpar.hardware.devices.Device`); the shapes of tiles are those of the libraries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Repeated
from graphpar.cost_models.work import (
    ATTENTION_BACKWARD,
    Attention,
    Collective,
    Phase,
    Product,
    Row,
    Size,
    Traffic,
    Work,
)
from graphpar.hardware.devices import Device

Array = NDArray[np.float64]

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.78), (64, 64, 0.6))
"""Rows and columns of a tile, and the share of a unit's rate it reaches: small tiles read operands more often."""
LEAST_SPLIT = 1024
"""The shortest part that a reduction is split into."""
HALF_ROW, HALF_WIDTH = 256.0, 24.0
"""Lengths of rows and widths of heads at which fused attention loses half of its rate (fits FlashAttention-2's published curves)."""
_HEAD = 4
"""A sequence is at least so many times longer than a head is wide."""
FRESH_FROM = 2**25
"""Bytes from which glibc takes a tensor's memory from the system and gives it back each time (its DEFAULT_MMAP_THRESHOLD_MAX)."""
_DTYPES = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64", 16: "fp64"}  # 16: complex numbers of fp64


@dataclass(frozen=True)
class PhaseSeconds:
    """The device seconds of one phase of a unit, and its number of operators."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    operators: int = 0

    @property
    def busy(self) -> float:
        """Device seconds of all operators."""
        return self.products + self.attention + self.traffic


class Compute:
    """Prices :class:`Work` on ``device``; tables are laid out once for each work.

    Args:
        dtype: of 16-bit (and fp8) products; those of 32 bits run as fp32 (tf32 where ``dtype`` says so).
        cast_bytes: of memory, for each element that is cast to 8 bits: by default it is read in 16 bits and written in 8 bits twice, also
            transposed for the weight's gradient.
    """

    def __init__(self, device: Device, dtype: str = "bf16", cast_bytes: float = Execution.cast_bytes) -> None:
        self.device, self.dtype, self.cast_bytes = device, dtype, cast_bytes
        self._tables: dict[int, tuple[Work, _Tables]] = {}
        self._seconds: dict[tuple[int, int], tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]] = {}
        self._alone: dict[tuple[Attention | Product, int], float] = {}

    def seconds(self, work: Work, batch: int) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        """Return the seconds of each phase of ``work`` for a microbatch of ``batch`` rows."""
        key = id(work), batch
        if key not in self._seconds:
            if id(work) not in self._tables:
                self._tables[id(work)] = work, _Tables(work)
            self._seconds[key] = self._computed(self._tables[id(work)][1], batch)
        return self._seconds[key]

    def alone_s(self, row: Attention | Product, batch: int) -> float:
        """Return the seconds of one operator for a microbatch of ``batch`` rows."""
        key = row, batch
        if key not in self._alone:
            self._alone[key] = self._computed(_Tables(Work({row: 1})), batch)[row.phase].busy
        return self._alone[key]

    def _computed(self, tables: _Tables, batch: int) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        products = self._products(tables, batch) * tables.product_times
        attention = self._attention(tables, batch) * tables.attention_times
        moved = _elements(tables.traffic, batch)
        traffic = (self.traffic_s(moved, tables.traffic_functions) + self.fresh_s(moved / 2)) * tables.traffic_times
        sums = [
            np.bincount(phases, seconds, 3) if len(phases) else np.zeros(3)
            for phases, seconds in (
                (tables.product_phases, products), (tables.attention_phases, attention), (tables.traffic_phases, traffic),
            )
        ]  # fmt: skip
        first, second, third = (
            PhaseSeconds(float(sums[0][p]), float(sums[1][p]), float(sums[2][p]), tables.operators[p]) for p in Phase
        )
        return first, second, third

    def traffic_s(self, nbytes: Array | float, functions: NDArray[np.bool_] | bool = False) -> Array:
        """Return the seconds of kernels that move ``nbytes`` each; ``functions`` is as in :class:`Traffic`."""
        device = self.device
        other = device.memory_efficiency if device.function_efficiency is None else device.function_efficiency
        rate = device.memory_bytes_per_s * np.where(functions, other, device.memory_efficiency)
        return np.asarray(self._with_launch(np.asarray(nbytes, dtype=float) / rate))

    def fresh_s(self, nbytes: Array) -> Array:
        """Return the seconds of zeroing the pages of new tensors of ``nbytes`` each."""
        rate = self.device.fresh_bytes_per_s
        return np.where(nbytes < FRESH_FROM, 0.0, nbytes / rate) if rate is not None else np.zeros_like(nbytes)

    def _with_launch(self, seconds: Array) -> Array:
        return seconds + self.device.launch_s

    def phase_s(self, phase: PhaseSeconds, python_s: float = 0.0) -> float:
        """Return the duration of a phase: the device's time, or the host's where that is longer; a CPU is its own host.

        Args:
            python_s: of the host, besides its operators.
        """
        if self.device.kind == "cpu":
            return phase.busy + python_s
        return max(phase.busy, phase.operators * self.device.dispatch_s + python_s)

    def python_s(self, repeated: Repeated) -> tuple[float, float]:
        """Return the seconds of the host in the forward and in the backward for what recomputes."""
        watched = [operators * self.device.policy_s for operators in repeated.watched]
        return watched[0], watched[1] + repeated.hooked * self.device.hooks_s

    def rate(self, itemsize: int) -> float:
        """Return the peak flop/s of operands of ``itemsize`` bytes."""
        named = _DTYPES[itemsize]
        if itemsize == 2 or (itemsize == 4 and self.dtype == "tf32"):
            named = self.dtype if self.dtype not in ("fp32", "fp64") else named
        return self.device.peak(named if named != "fp64" else "fp32")

    def _products(self, tables: _Tables, batch: int) -> Array:
        if not len(tables.product_times):
            return np.zeros(0)
        matrices, m, n, k = (_elements(tables.products[:, place], batch) for place in range(4))
        peaks = np.array([self.rate(size) for size in tables.itemsizes])
        if self.device.compute_units is not None:
            peaks = np.where(_whole_rows(tables, matrices, m, n, k), peaks, self._broken(peaks, matrices))
        half = self.device.half_reduction * peaks / np.array([self.rate_16(size) for size in tables.itemsizes])
        seconds = self._tiled(matrices, m, n, k, peaks * self.device.matrix_efficiency, half)
        nbytes = matrices * (m * k + k * n + m * n) * tables.itemsizes
        if self.device.operand_bytes_per_s is not None:
            fresh = self.fresh_s(matrices * m * n * tables.itemsizes * tables.pieces) / tables.pieces
            return self._with_launch(seconds + nbytes / self.device.operand_bytes_per_s + fresh)
        bandwidth = self.device.memory_bytes_per_s * self.device.memory_efficiency
        cast = np.where(tables.itemsizes == 2, self._casts(tables), 0.0) * matrices * m * k / bandwidth
        return self._with_launch(np.maximum(seconds, nbytes / bandwidth) + cast)

    def _broken(self, peaks: Array, matrices: Array) -> Array:
        """Return the rates of products whose rows are not whole 16 bytes.

        Batches run without matrix units (cuBLAS's restrictions on operands). One product reaches half of the peak: training GPT-2, whose
        head is a third of the flops, gains a fourth by a vocabulary of 50,304 instead of 50,257 (karpathy/nanoGPT). Half is assumed too
        where the rate without matrix units is not known.
        """
        vector = self.device.flops.get("fp32")
        if vector is None:
            return np.asarray(peaks / 2)
        return np.minimum(peaks, np.where(matrices > 1, vector, np.maximum(peaks / 2, vector)))

    def _casts(self, tables: _Tables) -> Array:
        """Return the bytes an element of casting a product's input to 8 bits."""
        return np.where((self.dtype == "fp8") & (tables.product_phases != Phase.WEIGHT), self.cast_bytes, 0.0)

    def rate_16(self, itemsize: int) -> float:
        """Return :meth:`rate` for operators that never run in 8 bits."""
        if itemsize == 1 or (itemsize == 2 and self.dtype == "fp8"):
            return self.device.peak("bf16")
        return self.rate(itemsize)

    def _tiled(self, matrices: Array, m: Array, n: Array, k: Array, rate: Array, half: Array) -> Array:
        """Return the seconds of products; ``half`` is the ``half_reduction`` scaled to each rate, since it stands for a time."""
        if self.device.compute_units is None:
            return np.asarray(2 * matrices * m * n * (k + half) / rate)
        units = self.device.compute_units
        best = np.full(len(m), np.inf)
        for rows, columns, share in TILES:
            for tall, wide in {(rows, columns), (columns, rows)}:
                tiles = matrices * np.ceil(m / tall) * np.ceil(n / wide)
                splits = np.clip(np.minimum(units / np.maximum(tiles, 1), k / LEAST_SPLIT), 1, None)
                waves = np.maximum(1, np.ceil(tiles / units))
                flops = 2.0 * tall * wide * (k / splits + half)
                best = np.minimum(best, waves * flops * units / (rate * share))
        return best

    def _attention(self, tables: _Tables, batch: int) -> Array:
        if not len(tables.attention_times):
            return np.zeros(0)
        heads, queries, keys = (_elements(tables.attention[:, place], batch) for place in range(3))
        width, causal, backward = tables.attention_width, tables.attention_causal, tables.attention_backward
        flops = 4.0 * heads * queries * keys * width * np.where(causal, 0.5, 1.0)
        flops = flops * np.where(backward, ATTENTION_BACKWARD, 1.0)
        forward_share, backward_share = self.device.attention_efficiency
        peaks = np.array([self.rate_16(size) for size in tables.attention_itemsizes])
        rate = peaks * np.where(backward, backward_share, forward_share)
        if self.device.kind == "cpu":  # a core has no tiles to fill
            return self._with_launch(flops / rate)
        rows = keys / (keys + np.where(causal, 2 * HALF_ROW, HALF_ROW))
        shape = rows * width / (width + HALF_WIDTH) * (128 + HALF_WIDTH) / 128
        return self._with_launch(flops / (rate * np.minimum(shape, 1.0)))


def _whole_rows(tables: _Tables, matrices: Array, m: Array, n: Array, k: Array) -> NDArray[np.bool_]:
    """Return whether the rows of features that a product reads and writes are whole 16 bytes.

    In batches of products (attention) the features are the width of a head: the size that is much smaller than both others. Rows as
    long as a sequence count as whole, or a longer sequence would be cheaper.
    """
    broken_m, broken_n, broken_k = (size % (16 // tables.itemsizes) != 0 for size in (m, n, k))
    plain = broken_n | np.where(tables.product_phases == Phase.WEIGHT, broken_m, broken_k)
    least, middle, _ = np.sort(np.stack((m, n, k)), axis=0)
    head = (_HEAD * least <= middle) & (least % (16 // tables.itemsizes) != 0)
    return np.asarray(~np.where(matrices > 1, head, plain))


class _Tables:
    """The rows of a work as arrays: numbers and powers, phases, and how often each runs."""

    def __init__(self, work: Work) -> None:
        by_kind: dict[type, list[tuple[Row, int]]] = defaultdict(list)
        for row, times in work.rows.items():
            by_kind[type(row)].append((row, times))
        products = [(row, times) for row, times in by_kind[Product] if isinstance(row, Product)]
        attention = [(row, times) for row, times in by_kind[Attention] if isinstance(row, Attention)]
        traffic = [(row, times) for row, times in by_kind[Traffic] if isinstance(row, Traffic)]
        self.operators = work.operators
        self.products = _sizes([(row.matrices, row.m, row.n, row.k) for row, _ in products], 4)
        self.itemsizes = np.array([row.itemsize for row, _ in products], dtype=int)
        self.pieces = np.array([row.pieces for row, _ in products], dtype=int)
        self.product_phases, self.product_times = _columns(products)
        self.attention = _sizes([(row.heads, row.queries, row.keys) for row, _ in attention], 3)
        self.attention_width = np.array([row.width for row, _ in attention], dtype=float)
        self.attention_causal = np.array([row.causal for row, _ in attention], dtype=bool)
        self.attention_backward = np.array([row.phase is not Phase.FORWARD for row, _ in attention], dtype=bool)
        self.attention_itemsizes = [row.itemsize for row, _ in attention]
        self.attention_phases, self.attention_times = _columns(attention)
        self.traffic = _sizes([(row.nbytes,) for row, _ in traffic], 1)[:, 0]
        self.traffic_functions = np.array([row.functions for row, _ in traffic], dtype=bool)
        self.traffic_phases, self.traffic_times = _columns(traffic)


def _columns(rows: Sequence[tuple[Row, int]]) -> tuple[NDArray[np.int64], Array]:
    phases = np.array([int(row.phase) for row, _ in rows], dtype=np.int64)
    return phases, np.array([times for _, times in rows], dtype=float)


def _sizes(rows: Sequence[tuple[Size, ...]], width: int) -> Array:
    """Return an array [rows, columns, (number, power)]."""
    numbers = [[(size.number, size.power) for size in row] for row in rows]
    return np.array(numbers, dtype=float).reshape(len(rows), width, 2)


def _elements(sizes: Array, batch: int) -> Array:
    return np.asarray(sizes[..., 0] * float(batch) ** sizes[..., 1])


def collectives_of(work: Work) -> Mapping[str, Sequence[tuple[Collective, int]]]:
    """Return the collectives of a work by axis, with how often each runs."""
    found: dict[str, list[tuple[Collective, int]]] = defaultdict(list)
    for row, times in work.rows.items():
        if isinstance(row, Collective):
            found[row.axis].append((row, times))
    return found
