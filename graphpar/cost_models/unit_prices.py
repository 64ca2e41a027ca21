"""``UnitPrices``: seconds of the units of a rank, by kind: their phases, their collectives, and what their blocks run again.

UnitClass, rows ──Compute──► seconds of each phase ───────────────┐
                ──Network──► seconds of each collective, by axis ─┼─► UnitSeconds, Again
                             those that nothing beside them hides ┘
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from graphpar.cost_models.collectives import Group, Network
from graphpar.cost_models.compute import Compute, PhaseSeconds, collectives_of
from graphpar.cost_models.pipeline_units import UnitClass
from graphpar.cost_models.stage_prices import Again
from graphpar.cost_models.step_costs import UnitSeconds, summed_by_axis
from graphpar.cost_models.work import Collective, Phase, Product, Work

ByAxis = dict[str, float]


class UnitPrices:
    """Prices the units of a rank, each kind once for a size of microbatches.

    Args:
        groups: by axis, the ranks of a collective inside a unit.
        overlap_tp: the share of collectives that is hidden, apart from those that say what runs beside them.
    """

    def __init__(self, compute: Compute, network: Network, groups: Mapping[str, Group], overlap_tp: float) -> None:
        self.compute, self.network, self.groups, self.overlap_tp = compute, network, groups, overlap_tp
        self._seconds: dict[tuple[UnitClass, int], UnitSeconds] = {}
        self._again: dict[tuple[UnitClass, int], Again] = {}

    @cached_property
    def _on_cpu(self) -> bool:
        return self.compute.device.kind == "cpu"

    def seconds(self, kind: UnitClass, rows: int) -> UnitSeconds:
        """Return the seconds of a unit for a microbatch of ``rows``."""
        key = kind, rows
        if key not in self._seconds:
            sent, exposed, apart = zip(*(self._by_axis(kind.work, rows, phase) for phase in Phase))
            self._seconds[key] = UnitSeconds(self.phases(kind, rows), sent, exposed, summed_by_axis(apart))
        return self._seconds[key]

    def again(self, kind: UnitClass, rows: int) -> Again:
        """Return the seconds of what a unit's blocks run again in the backward."""
        key = kind, rows
        if key not in self._again:
            work = kind.again.work
            seconds = self.compute.seconds(work, rows)[Phase.FORWARD]
            sent = self._by_axis(work, rows, Phase.FORWARD)
            self._again[key] = Again(seconds, *sent, self.compute.python_s(kind.again))
        return self._again[key]

    def least_s(self, kind: UnitClass, rows: int) -> tuple[float, float]:
        """Return lower bounds of the seconds that a unit adds to a stage, and of those it recomputes: the device's, nothing gathered."""
        seconds, again = self.seconds(kind, rows), self.again(kind, rows)
        busy = sum(phase.busy for phase in seconds.phases)
        shown = sum(sum(axes.values()) for axes in seconds.exposed)
        host = sum(again.python) if self._on_cpu else 0.0
        return busy + shown, again.phase.busy + sum(again.exposed.values()) + host

    def sent_s(self, row: Collective, rows: int) -> float:
        """Return the seconds of one collective inside a microbatch of ``rows``."""
        return self.network.seconds(row.kind, row.nbytes.at(rows), self.groups[row.axis])

    def exposed_s(self, row: Collective, rows: int, apart: bool = False) -> float:
        """Return those that what runs beside it does not hide; ``apart``: where the halves of a backward run apart."""
        seconds, beside = self.sent_s(row, rows), row.beside
        if not beside:
            return (1.0 - self.overlap_tp) * seconds
        if self._on_cpu:  # whose cores multiply or send
            beside = tuple(each for each in beside if not isinstance(each, Product))
        hidden = (each for each in beside if not apart or each.phase is row.phase)
        return max(0.0, seconds - sum(self.compute.alone_s(each, rows) for each in hidden))

    def phases(self, kind: UnitClass, rows: int) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        """Return the seconds of the phases of a unit."""
        return self.compute.seconds(kind.work, rows)

    def _by_axis(self, work: Work, rows: int, phase: Phase) -> tuple[ByAxis, ByAxis, ByAxis]:
        """Return the seconds of the collectives of a phase by axis: all, exposed, and what more is where halves run apart."""
        found: tuple[ByAxis, ByAxis, ByAxis] = {}, {}, {}
        for axis, collectives in collectives_of(work).items():
            for row, times in collectives:
                if row.phase is phase:
                    exposed = self.exposed_s(row, rows)
                    each = self.sent_s(row, rows), exposed, self.exposed_s(row, rows, apart=True) - exposed
                    for seconds, value in zip(found, each):
                        seconds[axis] = seconds.get(axis, 0.0) + times * value
        return found
