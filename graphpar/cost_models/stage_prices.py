"""``StagePrices``: seconds of one microbatch of any stage, which is a run of units.

seconds of each kind of unit ──one column a unit──► table ──sums of a run's columns──► StageSeconds
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.compute import Compute, PhaseSeconds
from graphpar.cost_models.equal_runs import EqualRuns
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.step_costs import StageSeconds, UnitSeconds, summed_by_axis
from graphpar.cost_models.work import Phase

Array = NDArray[np.float64]
HOST_LINK = "host link"
"""The name under which copies to the host and back are reported, beside the axes over which is communicated."""
_PARTS = 4


class Again(NamedTuple):
    """What a unit's blocks run again in the backward.

    Attributes:
        sent, exposed, apart: seconds of its collectives by axis, as in :class:`UnitSeconds`.
        python: seconds of the host in the unit's forward and in its backward.
    """

    phase: PhaseSeconds
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    apart: Mapping[str, float]
    python: tuple[float, float]


class StateSeconds(NamedTuple):
    """What sharded state costs each unit.

    Attributes:
        gathers, again: seconds of gathering its parameters for its forward, and for its backward.
        reduces: seconds of reduce-scattering its gradients.
        blocks: whether it is gathered by itself; all others of a stage are gathered as one.
    """

    gathers: Array
    again: Array
    reduces: Array
    blocks: NDArray[np.bool_]

    def of(self, stage: slice) -> StateSeconds:
        """Return that of the units of a stage."""
        return StateSeconds(self.gathers[stage], self.again[stage], self.reduces[stage], self.blocks[stage])

    def times(self, moved: Array) -> int:
        """Return how often FSDP2 starts one of the three."""
        return int(np.count_nonzero(moved[self.blocks])) + bool(moved[~self.blocks].any())


class StagePrices:
    """Prices runs of units for microbatches of one size.

    Args:
        seconds, again: of each unit; equal units give the same object.
        recomputes: whether a unit runs anything again.
        moved: the seconds of copying to the host, and back, what each unit keeps; None where nothing is moved.
    """

    def __init__(
        self,
        seconds: Sequence[UnitSeconds],
        again: Sequence[Again],
        recomputes: Sequence[bool],
        compute: Compute,
        execution: Execution,
        moved: Array | None = None,
    ) -> None:
        self._moved, self.compute, self.execution = moved, compute, execution
        self._state: Callable[[], StateSeconds] | None = None
        self._state_axis, self._pp = "", 1
        kinds = {id(own): (own, more) for own, more in zip(seconds, again)}
        place = {key: number for number, key in enumerate(kinds)}
        own_axes = [list(way) for own, _ in kinds.values() for way in own.sent]
        self._axes = list(dict.fromkeys(axis for axes in own_axes for axis in axes))
        self._more_axes = list(dict.fromkeys(axis for _, more in kinds.values() for axis in more.sent))
        kind = [place[id(own)] for own in seconds]
        columns = np.array([self._column(own, more) for own, more in kinds.values()]).T
        self._table: Array = np.ascontiguousarray(columns[:, kind])
        self._recomputes = np.cumsum([0, *recomputes])
        self._runs = EqualRuns(kind)
        self._stages: dict[tuple[int, int, bool], StageSeconds] = {}
        self._waits: dict[int, Array] = {}

    def with_state(
        self,
        state: Callable[[], StateSeconds],
        axis: str,
        execution: Execution,
        pp: int,
        held: Sequence[int],
    ) -> StagePrices:
        """Return the prices of the same units where each gathers its parameters and reduce-scatters its gradients.

        Args:
            state: what sharded state costs.
            axis: under which axis these are reported.
            pp: pipeline ranks.
            held: a number for each unit; of the same parameters it is the same.
        """
        other = copy.copy(self)
        other._state, other._state_axis, other.execution, other._pp = state, axis, execution, pp
        other._runs, other._stages = EqualRuns(list(zip(self._runs.numbers, held))), {}
        return other

    def _column(self, own: UnitSeconds, more: Again) -> list[float]:
        phases = [*own.phases, more.phase]
        parts = [value for each in phases for value in (each.products, each.attention, each.traffic, each.operators)]
        sent = [way[phase].get(axis, 0.0) for way in (own.sent, own.exposed) for axis in self._axes for phase in Phase]
        again = [way.get(axis, 0.0) for way in (more.sent, more.exposed, more.apart) for axis in self._more_axes]
        return [*parts, *more.python, *sent, *(own.apart.get(axis, 0.0) for axis in self._axes), *again]

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self._recomputes) - 1

    def waits(self, phases: int) -> Array:
        """Return for each number of units the seconds of the device in the first ``phases`` of them, all added up."""
        if phases not in self._waits:
            rows = [_PARTS * phase + part for phase in range(phases) for part in range(_PARTS - 1)]
            self._waits[phases] = np.append(0.0, self._table[rows].sum(axis=0).cumsum().cumsum())
        return self._waits[phases]

    def stage(self, first: int, after: int, apart: bool = False) -> StageSeconds:
        """Return the seconds of a stage of the units from ``first`` up to ``after``, exclusive; ``apart``: of a schedule that runs the
        halves of backwards apart.
        """
        first, after = self._runs.first((first, after))
        key = first, after, apart and bool(self._table[self._apart, first:after].any())
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        return self._stages[key]

    @property
    def _apart(self) -> list[int]:
        """The rows of the table of what is exposed where halves run apart."""
        begin = _PARTS * _PARTS + 2 + 6 * len(self._axes)
        again = begin + len(self._axes) + 2 * len(self._more_axes)
        return [*range(begin, begin + len(self._axes)), *range(again, again + len(self._more_axes))]

    def _stage(self, first: int, after: int, apart: bool) -> StageSeconds:
        sums = self._table[:, first:after].sum(axis=1).tolist()
        *busy, run_again = (PhaseSeconds(*sums[_PARTS * place : _PARTS * (place + 1)]) for place in range(_PARTS))
        there_python, back_python, *rest = sums[_PARTS * _PARTS :]
        axes, more = self._axes, self._more_axes
        values = iter(rest)
        sent, shown = ([dict.fromkeys(axes, 0.0) for _ in Phase] for _ in range(2))
        for way in (sent, shown):
            for axis in axes:
                for phase in Phase:
                    way[phase][axis] = next(values)
        own_apart = {axis: next(values) for axis in axes}
        sent_again, shown_again, again_apart = ({axis: next(values) for axis in more} for _ in range(3))
        if apart:
            shown[Phase.INPUT] = summed_by_axis([shown[Phase.INPUT], own_apart])
            shown_again = summed_by_axis([shown_again, again_apart])
        run, of_state = self.execution, (0.0, 0.0) if self._state is None else self._state_python(slice(first, after))
        python = there_python + of_state[0], of_state[1], 0.0
        seconds = [self.compute.phase_s(busy[p], python[p]) + sum(shown[p].values()) for p in Phase]
        again = self._again(busy[Phase.FORWARD], seconds[Phase.FORWARD])
        times = 2 if run.recompute == "full" else 1
        there, back = sent[0], summed_by_axis([sent[0]] * (times - 1) + [sent_again] + sent[1:])
        everything = [dict(there), back]
        again += self.compute.phase_s(run_again, back_python) + sum(shown_again.values())
        forward, backward = seconds[0], again + seconds[1] + seconds[2]
        exposed = [shown[0], summed_by_axis([shown[0]] * (times - 1) + [shown_again] + shown[1:])]
        if self._state is not None:
            plain = forward, backward
            forward, backward, *moved = self._gathered(slice(first, after), forward, backward)
            everything = [summed_by_axis([way, {self._state_axis: more}]) for way, more in zip(everything, moved)]
            longer = forward - plain[0], backward - plain[1]
            exposed = [summed_by_axis([way, {self._state_axis: more}]) for way, more in zip(exposed, longer)]
        if self._moved is not None:
            plain = forward, backward
            forward, backward = self._beside_copies(slice(first, after), forward, backward)
            copied = {HOST_LINK: float(self._moved[first:after].sum())}
            everything = [summed_by_axis([way, copied]) for way in everything]
            longer = forward - plain[0], backward - plain[1]
            exposed = [summed_by_axis([way, {HOST_LINK: more}]) for way, more in zip(exposed, longer)]
        twice = self._again(busy[Phase.FORWARD], busy[Phase.FORWARD].busy)
        compute = sum(phase.busy for phase in busy) + twice + run_again.busy
        compute += there_python + back_python + sum(of_state) if self.compute.device.kind == "cpu" else 0.0
        # A stage that recomputes runs its backward whole, but the first, whose backward is all weight half.
        recomputes = self._recomputes[after] > self._recomputes[first]
        split = seconds[2] if first == 0 or not recomputes else 0.0
        return StageSeconds(forward, backward, split, everything[0], everything[1], exposed[0], exposed[1], compute)

    def _again(self, busy: PhaseSeconds, seconds: float) -> float:
        """Return the seconds of recomputation in the backward."""
        if self.execution.recompute == "full":
            return seconds
        return busy.attention if self.execution.recompute == "selective" else 0.0

    @cached_property
    def _forwards(self) -> Array:
        """Of each unit the seconds of its forward, with its exposed collectives."""
        busy, operators = self._table[: _PARTS - 1].sum(axis=0), self._table[_PARTS - 1]
        first = _PARTS * _PARTS + 2 + 3 * len(self._axes)
        exposed = self._table[first :: len(Phase)][: len(self._axes)].sum(axis=0)
        return np.asarray(np.maximum(busy, operators * self.compute.device.dispatch_s) + exposed)

    def _beside_copies(self, stage: slice, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of a forward and a backward with copies to the host and back beside them.

        What a unit keeps leaves while the next computes, and comes while the one after it does; each waits for the end of that. At the
        end of the model the last unit's backward follows at once, and what it kept is still there; elsewhere nothing is beside its return.
        """
        assert self._moved is not None
        moved = self._moved[stage]
        forwards = self._forwards[stage]
        forwards = forwards * (forward / max(forwards.sum(), 1e-12))
        before = np.append(0.0, moved[:-1])
        leaving = float(np.maximum(forwards, before).sum())
        last = 0.0 if stage.stop == self.count else float(moved[-1])
        coming = last + float(np.maximum(forwards * (backward / max(forward, 1e-12)), before).sum())
        return max(forward, leaving), max(backward, coming)

    def _moved_state(self, stage: slice) -> StateSeconds:
        """Return what sharded state costs a microbatch: ZeRO 2 gathers once a step, and a pipeline reduces once a step."""
        assert self._state is not None
        found = self._state().of(stage)
        none, once = np.zeros(len(found.gathers)), self.execution.zero == 2
        return found._replace(
            gathers=none if once else found.gathers,
            again=none if once or self.execution.reshard == "never" else found.again,
            reduces=none if self._pp > 1 else found.reduces,
        )

    def _state_python(self, stage: slice) -> tuple[float, float]:
        """Return the seconds of the host for sharded state in a forward and a backward: of FSDP2's Python for each unit."""
        assert self._state is not None
        device, moved, held = self.compute.device, self._moved_state(stage), self._state().of(stage)
        gathers, again, reduces = map(moved.times, moved[:3])
        hooks = held.times(held.gathers) * device.fsdp_hooks_s
        there = hooks + gathers * device.fsdp_gather_s
        return there, hooks + again * device.fsdp_gather_s + reduces * device.fsdp_reduce_s

    def _gathered(self, stage: slice, forward: float, backward: float) -> tuple[float, float, float, float]:
        """Return forward, backward, and the communication of each, of a microbatch with sharded state, in seconds.

        Parameters are gathered a unit ahead and gradients reduce-scattered a unit behind, hidden behind each unit's work.
        """
        forwards = self._forwards[stage]
        forwards = forwards * (
            forward / max(forwards.sum(), 1e-12)
        )  # a host that is ahead in one unit is not behind in the next
        ratio = backward / forward if forward else 2.0
        gathers, again, scatters, _ = self._moved_state(stage)
        moved = tuple(float(each.sum()) for each in (gathers, again, scatters))
        if not self.execution.prefetch or self.compute.device.kind == "cpu":
            return forward + moved[0], backward + moved[1] + moved[2], moved[0], moved[1] + moved[2]
        ahead = float(gathers[0] + np.maximum(forwards, np.append(gathers[1:], 0.0)).sum())
        traffic = np.append(0.0, again[:-1]) + np.append(scatters[1:], 0.0)
        behind = float(np.maximum(ratio * forwards, traffic).sum() + scatters[0])
        return max(forward, ahead), max(backward, behind), moved[0], moved[1] + moved[2]
