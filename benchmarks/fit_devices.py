"""What training programs reach of a device's peaks: the figures of ``graphpar/hardware/devices.py`` that are fitted,
from published runs.

    python -m benchmarks.fit_devices DATA.jsonl --device A100 [--every 8]

    rows that are not held out ──price──► logarithms of predicted over measured ──least squares──► four figures, the last of the host

A source weighs as the root of its rows; errors beyond ``--scale`` count as their size, not as its square; a figure on
which no row depends stays as it is. Attention's rates are not fitted: they are those of its kernels (FlashAttention-2,
arXiv 2307.08691).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_folded import Exchanging
from benchmarks.published_prices import DISPATCH_S, layout_of, pricing_of
from benchmarks.published_rows import HALF, Row, Unpriced, read, rows_of
from benchmarks.published_sources import held_out
from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.pricing import Pricing
from graphpar.hardware.devices import Device

Array: TypeAlias = NDArray[np.float64]

FIGURES = ("matrix_efficiency", "half_reduction", "memory_efficiency", "dispatch_s")
SHARES = ("matrix_efficiency", "memory_efficiency")


@dataclass(frozen=True)
class Sample:
    """A measured row with the pricing and layout that predict it for any figures of the device."""

    row: Row
    pricing: Pricing
    layout: Layout

    def error(self, change: Callable[[Device], Device]) -> float:
        """Compute the logarithm of the predicted over the measured time, on a device with other figures."""
        made = self.pricing
        cluster = replace(made.cluster, device=change(made.cluster.device))
        execution = replace(made.execution, dispatch_s=None)  # it is one of the figures
        changed = Exchanging(made.units, made.mesh, cluster, execution, dtype=made.dtype).of_row(self.row)
        step = changed.estimate(self.layout).step_time_s
        assert self.row.measured.step_time_s is not None
        return math.log(step / self.row.measured.step_time_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and print the figures of one device."""
    parser = argparse.ArgumentParser(prog="benchmarks.fit_devices", description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA.jsonl")
    parser.add_argument(
        "--device", required=True, help="the beginning of its name: all such devices get the same figures"
    )
    parser.add_argument("--every", type=int, default=1, help="of a source with many rows, use only every Nth")
    parser.add_argument(
        "--scale", type=float, default=0.15, help="errors beyond it count as their size (default: 0.15)"
    )
    options = parser.parse_args(arguments)
    found = list(samples(options.data, options.device, options.every))
    start = [float(getattr(_as_run(found[0].row.cluster.device), name)) for name in FIGURES]
    counts = Counter(sample.row.source for sample in found)
    weights = np.array([counts[sample.row.source] ** -0.5 for sample in found])

    def errors(steps: Array) -> Array:
        return np.array([sample.error(changed(start, steps)) for sample in found])

    steps = least_squares(errors, np.zeros(len(FIGURES)), weights, options.scale)
    for name, value in zip(FIGURES, figures(start, steps)):
        print(f"{name:20} {value:.4g}")
    by_source = defaultdict(list)
    for sample, error in zip(found, errors(steps)):
        by_source[sample.row.source].append(math.exp(error) - 1)
    for source, own in by_source.items():
        print(
            f"{source:20} {len(own):4} rows, error {100 * np.mean(np.abs(own)):.1f}%, bias {100 * np.mean(own):+.1f}%"
        )


def _as_run(device: Device) -> Device:
    """With the host's time in training frameworks."""
    return replace(device, dispatch_s=DISPATCH_S)


def samples(data: Path, device: str, every: int) -> Iterator[Sample]:
    """Rows of ``device`` that the headline counts, of sources that are not held out."""
    seen: Counter[str] = Counter()
    for raw in rows_of(data):
        if held_out(raw["source"]):
            continue
        try:
            row = read(raw)
            seen[row.source] += 1
            skipped = every > 1 and row.source in LARGE and seen[row.source] % every
            if skipped or not _counts(row, device):
                continue
            yield Sample(row, pricing_of(row), layout_of(row))
        except Unpriced:
            continue


LARGE = ("vtrain_single",)
"""Sources of which a part says as much as the whole."""


def _counts(row: Row, device: str) -> bool:
    fits = row.cluster.device.name.startswith(device)
    return fits and row.counted and row.measured.step_time_s is not None and row.recompute != HALF


def figures(start: Sequence[float], steps: Array) -> list[float]:
    """``start`` times e to the ``steps``; shares stay below 1."""
    values = [value * math.exp(step) for value, step in zip(start, steps)]
    return [min(1.0, value) if name in SHARES else value for name, value in zip(FIGURES, values)]


def changed(start: Sequence[float], steps: Array) -> Callable[[Device], Device]:
    """Make the change of a device: ``start`` moved by ``steps`` in place of its figures."""
    values = dict(zip(FIGURES, figures(start, steps)))
    return lambda device: replace(device, **values)  # type: ignore[arg-type]


def least_squares(
    errors: Callable[[Array], Array], at: Array, weights: Array, scale: float, *, rounds: int = 8, pull: float = 0.02
) -> Array:
    """Levenberg and Marquardt's method with Huber's weights; ``pull`` draws towards 0 what no error depends on."""
    found, damping, tip = errors(at), 1e-2, 0.03

    def cost(values: Array, place: Array) -> float:
        size = np.abs(values)
        huber = np.where(size < scale, values**2 / 2, scale * (size - scale / 2))
        return float(np.sum(weights * huber) + pull * len(values) * scale**2 * np.sum(place**2))

    for _ in range(rounds):
        slopes = np.stack([(errors(at + tip * unit) - found) / tip for unit in np.eye(len(at))], axis=1)
        counted = weights * np.minimum(1, scale / np.maximum(np.abs(found), 1e-9))
        back = 2 * pull * len(found) * scale**2
        square = (slopes * counted[:, None]).T @ slopes + back * np.eye(len(at))
        slope = (slopes * counted[:, None]).T @ found + back * at
        before = cost(found, at)
        for _ in range(6):
            place = at - np.linalg.solve(square + damping * np.diag(np.diag(square)), slope)
            values = errors(place)
            if cost(values, place) < before:
                at, found, damping = place, values, damping / 3
                break
            damping *= 4
        if cost(found, at) > (1 - 1e-3) * before:
            break
    return at


if __name__ == "__main__":
    main()
