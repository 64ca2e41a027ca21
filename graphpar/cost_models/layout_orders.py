"""``LayoutOrders``: the stages of a layout, on which ranks they are, and in which order these act.

    Layout(1F1B, 16 microbatches, starts 0, 9) ──► stages (0, 9), (9, 18) on ranks 0, 1 ──► order of actions ──► microbatches in flight

A schedule repeats itself every pp microbatches, so the order of few tells what is in flight in that of many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.overlapped_state import StageWindow, windows
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.step_costs import StageSeconds
from graphpar.cost_models.unit_bytes import UnitBytes
from graphpar.errors import GraphparError
from graphpar.runtime.mesh import Mesh
from graphpar.schedules.action_table import ActionTable
from graphpar.schedules.order import Order
from graphpar.schedules.registry import action_order, action_table, stage_ranks
from graphpar.schedules.simulation import kept_before_backward, most_in_flight


class LayoutOrders:
    """The orders in which ranks of ``mesh`` run the stages of ``units``; :class:`~graphpar.cost_models.pricing.Pricing` prices them."""

    units: tuple[Unit, ...]
    mesh: Mesh
    bytes: UnitBytes
    execution: Execution
    train: bool

    def stages_of(self, layout: Layout) -> list[tuple[int, int]]:
        """Return (first unit, the one after the last) of each stage.

        Raises:
            GraphparError: a stage is empty, or stages don't divide over the ranks.
        """
        ends = [*layout.starts[1:], len(self.units)]
        stages = list(zip(layout.starts, ends))
        if layout.starts[:1] != (0,) or any(first >= after for first, after in stages):
            raise GraphparError(
                f"The stages begin at units {layout.starts} of {len(self.units)}; each needs at least one unit, the first from 0 on."
            )
        if len(stages) % self.mesh.pp:
            raise GraphparError(f"{len(stages)} stages don't divide evenly over pp={self.mesh.pp} ranks.")
        return stages

    def ranks_of(self, schedule: str, stages: int) -> list[int]:
        """Return the pp rank of each of so many stages."""
        return stage_ranks(schedule, self.mesh.pp, stages // self.mesh.pp) if self.mesh.pp > 1 else [0] * stages

    def places(self, layout: Layout) -> list[list[int]]:
        """Return the stages of each pp rank."""
        ranks = self._ranks(layout, len(layout.starts))
        found: list[list[int]] = [[] for _ in range(self.mesh.pp)]
        for place, rank in enumerate(ranks):
            found[rank].append(place)
        return found

    def in_flight(self, layout: Layout) -> tuple[float, ...]:
        """Return the most microbatches that each stage keeps at once."""
        stages = len(layout.starts)
        if self.bytes.infers or (self.mesh.pp == 1 and layout.order is None):
            return (1.0,) * stages
        return self._peaks(layout, lambda count: most_in_flight(self._ordered(layout, stages, count)), exact=False)

    def kept_together(self, layout: Layout) -> tuple[float, ...]:
        """Return for each pp rank a number of microbatches of which it keeps those of all its stages at one time."""
        stages = len(layout.starts)
        if self.bytes.infers or (self.mesh.pp == 1 and layout.order is None):
            return (1.0,) * self.mesh.pp
        return self._peaks(layout, lambda count: kept_before_backward(self._table(layout, stages, count)), exact=False)

    @cached_property
    def _sharded(self) -> bool:
        """Whether ranks hold shards of parameters and gradients."""
        return self.execution.zero >= 2 and self.mesh.shards > 1 and self.train

    def _ranks(self, layout: Layout, stages: int) -> list[int]:
        return list(layout.order.homes) if layout.order is not None else self.ranks_of(layout.schedule, stages)

    def _order(self, layout: Layout, stages: int, microbatches: int) -> Order:
        gathers = self.execution.kept_for_step if self._sharded else None
        return self._ordered(layout, stages, microbatches, gathers)

    def _ordered(self, layout: Layout, stages: int, microbatches: int, gathers: bool | None = None) -> Order:
        """Return the order of all actions; those on state, which keep no activations, only with ``gathers``."""
        if layout.order is not None:
            return layout.order
        return action_order(layout.schedule, self.mesh.pp, stages // self.mesh.pp, microbatches, gathers)

    def _table(self, layout: Layout, stages: int, microbatches: int) -> ActionTable:
        if layout.order is not None:
            return layout.order.table
        return action_table(layout.schedule, self.mesh.pp, stages // self.mesh.pp, microbatches)

    def _peaks(self, layout: Layout, peaks: Callable[[int], Sequence[float]], *, exact: bool) -> tuple[float, ...]:
        """Return ``peaks`` of the layout's microbatches, unless ``exact`` extrapolated from few."""
        few = self._few(layout)
        if exact or few is None:
            return tuple(peaks(layout.microbatches))
        rounds = (layout.microbatches - few) / self.mesh.pp
        return tuple(a + (b - a) * rounds for a, b in zip(peaks(few), peaks(few + self.mesh.pp)))

    def is_simulated_whole(self, layout: Layout) -> bool:
        """Whether every microbatch is simulated also where a price is not to be exact."""
        return self.mesh.pp == 1 or self._few(layout) is None

    def _few(self, layout: Layout) -> int | None:
        """Return a number of microbatches after which the schedule repeats every pp of them; None where that saves nothing."""
        pp = self.mesh.pp
        few = 2 * pp + layout.microbatches % pp
        repeats = layout.order is None and layout.microbatches > few + pp and layout.microbatches % pp == 0
        return few if repeats else None

    def _windows(
        self, layout: Layout, costs: Sequence[StageSeconds], rank: int, exact: bool
    ) -> Mapping[int, StageWindow]:
        """Return what a pp rank computes around the reduction and the gathering of each of its stages."""
        if len(costs) == self.mesh.pp or not self.train:
            return {place: StageWindow(0.0, 0.0) for place in range(len(costs))}
        few = self._few(layout)
        order = self._order(layout, len(costs), layout.microbatches if exact or few is None else few)
        return windows(order, rank, costs)
