"""Bytes of ranks from their units: constant ones, those that a microbatch keeps, and those that a running stage needs on top.

units of a rank's stages, rows of a microbatch ──UnitBytes──► Memory at the peak
                                               ──RunBytes───► tables of every run of units, to balance stages
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.equal_runs import EqualRuns, Run
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.memory import ALLOCATOR_SLACK, MAIN_DTYPE, HostMemory, Memory
from graphpar.cost_models.pipeline_units import Bytes, HalvesBytes, Held, JoinedUnits, Unit
from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.groups import communicators
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.state.gradient_buckets import BUCKET_BYTES
from graphpar.runtime.state.offloaded_state import AT_ONCE, PIECE_BYTES

Array = NDArray[np.float64]


class Most(NamedTuple):
    """The bytes of activations that a rank keeps, of whole parameters and gradients of sharded state, and of what the running action needs
    on top, where their sum is the most; None: the last is that of any action."""

    activations: int
    whole: int = 0
    transient: int | None = None


class _Constant(NamedTuple):
    """What does not depend on the batch of a rank's memory, its total, buckets, the inputs that the rank takes, the cache of a microbatch,
    what the optimizer's step needs, and gradients, see ``_gradients``."""

    memory: Memory
    total: int
    buckets: int
    inputs: tuple[Bytes, ...]
    cache: int
    stepping: int
    gradients: tuple[int, int, int]


class _Known(NamedTuple):
    """Of units, whatever shares their state: which runs of them hold the same, and what; equal parameters once, with their number."""

    runs: EqualRuns
    held: dict[tuple[Run, ...], tuple[Held, ...]]
    counts: dict[tuple[tuple[Run, ...], int], Counter[Held]]


class UnitBytes:
    """Memory of any stages of ``units`` on ``mesh``; ``like``: that of others, what is known of whose units is used on."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, execution: Execution, like: UnitBytes | None = None) -> None:
        self.units, self.mesh, self.execution = tuple(units), mesh, execution
        self._all_known: dict[tuple[Unit, ...], _Known] = {} if like is None else like._all_known
        if self.units not in self._all_known:
            self._all_known[self.units] = _Known(_equal_runs(self.units), {}, {})
        self._runs, self._held, self._counts = self._all_known[self.units]
        self._least_state: dict[bool, int] = {}
        self._least_kept: dict[int, int] = {}
        self._joined: dict[int, JoinedUnits] = {}
        self._keeps: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
        self._halves: dict[tuple[int, int, int], HalvesBytes] = {}
        self._constants: dict[tuple[Run, ...], _Constant] = {}
        self._returns: dict[tuple[int, int], int] = {}

    def with_units(self, units: Sequence[Unit]) -> UnitBytes:
        """Return the bytes of the same parameters and inputs where units keep something else."""
        other = copy.copy(self)
        other.units, other._least_kept, other._joined, other._keeps, other._halves = tuple(units), {}, {}, {}, {}
        return other

    def gradient_sizes(self, held: Iterable[Held]) -> int:
        """Return the bytes of the gradients of parameters."""
        return sum(part.elements * self.gradient_bytes(part) for part in held if part.trained)

    def reduced_sizes(self, held: Iterable[Held]) -> int:
        """Return the bytes of gradients as they are summed over replicas."""
        return sum(
            part.elements * (self.execution.reduce_bytes or self.gradient_bytes(part)) for part in held if part.trained
        )

    def copied(self, held: Iterable[Held]) -> int:
        """Return the bytes of the copies of parameters that a step makes; those that are sharded are gathered as they are read, unless
        they are read in several dtypes."""
        as_read = self.execution.zero >= 2 and self.execution.gather_bytes is not None
        copied = (part for part in held if self.stored_bytes(part) == part.itemsize)
        return 0 if as_read else sum(part.elements * part.copied for part in copied)

    def gradient_bytes(self, held: Held) -> int:
        """Return the bytes of one element of a gradient."""
        return self.execution.gradient_bytes or held.itemsize

    def stored_bytes(self, held: Held) -> int:
        """Return the bytes of one element of what is computed with, in the dtype in which that is stored."""
        return held.working if held.working and self.execution.zero == 1 else held.itemsize

    def main_bytes(self, held: Held) -> int:
        """Return the bytes of one element of what the optimizer updates: a parameter, or its main copy."""
        return max(held.itemsize, MAIN_DTYPE.itemsize) if self.execution.main_copies else held.itemsize

    def held(self, stages: Sequence[tuple[int, int]]) -> tuple[Held, ...]:
        """Return the parameters of a rank with these stages, a tied one once."""
        key = self.alike(stages)
        if key not in self._held:
            found: dict[object, Held] = {}
            for first, after in stages:
                for held in itertools.chain.from_iterable(unit.held for unit in self.units[first:after]):
                    found.setdefault(held.tied or len(found), held)
            self._held[key] = tuple(found.values())
        return self._held[key]

    def counted(self, stages: Sequence[tuple[int, int]], copies: bool = False) -> Counter[Held]:
        """Return :meth:`held`, or :meth:`copies`, equal ones once, with their number."""
        parts = self.copies(stages) if copies and len(stages) > 1 else self.held(stages)
        key = self.alike(stages), len(parts)
        if key not in self._counts:
            self._counts[key] = Counter(parts)
        return self._counts[key]

    def copies(self, stages: Sequence[tuple[int, int]]) -> tuple[Held, ...]:
        """Return the parameters of a rank with these stages as it stores and updates them: where FSDP2 shards stages, each by itself, each
        has a tied one, with a gradient and state of its own."""
        if self.execution.zero < 2:
            return self.held(stages)
        return tuple(held for stage in stages for held in self.held([stage]))

    def tied_beyond(self, stages: Sequence[tuple[int, int]]) -> frozenset[str]:
        """Return the ties of which units that are not in these stages hold a parameter."""
        return frozenset(name for unit, name in self._ties if not any(a <= unit < b for a, b in stages))

    def alike(self, stages: Sequence[Run]) -> tuple[Run, ...]:
        """Return, of all stages that were asked for and hold the same as these, the first."""
        return tuple(map(self._runs.first, stages))

    @property
    def numbers(self) -> Sequence[int]:
        """A number for each unit; those that hold the same, of the same name where it is tied, have the same."""
        return self._runs.numbers

    def memory(
        self, stages: Sequence[tuple[int, int]], own: Sequence[int], rows: int, microbatches: int, most: Most
    ) -> Memory:
        """Return the memory of a rank at its peak.

        Args:
            stages: (first unit, the one after the last) of each stage of the program.
            own: the numbers of the rank's stages.
            rows, microbatches: the size of a microbatch, and how many a step has.
            most: what comes and goes as the schedule says.
        """
        constant = self._constant(stages, own).memory
        return replace(constant, **self._varying(stages, own, rows, microbatches, most))

    def total(
        self, stages: Sequence[tuple[int, int]], own: Sequence[int], rows: int, microbatches: int, most: Most
    ) -> int:
        """Return the bytes of :meth:`memory` together."""
        varying = self._varying(stages, own, rows, microbatches, most)
        return self._constant(stages, own).total + sum(varying.values())

    def _varying(
        self, stages: Sequence[tuple[int, int]], own: Sequence[int], rows: int, microbatches: int, most: Most
    ) -> dict[str, int]:
        """Return what depends on the batch of a rank's memory."""
        costs, (activations, whole, on_top) = [self.kept(*stages[place], rows) for place in own], most
        transient = max(max(cost[1:3]) for cost in costs) if on_top is None else on_top
        boundaries = sum(cost[3] for place, cost in zip(own, costs) if place)
        boundaries += sum(self._returned(stages[place][1], rows) for place in own)
        if len(own) == 1 and len(stages) > 1:  # the last message being sent
            sent = self.joined(rows).at[stages[own[0]][1] - 1].sent if own[0] + 1 < len(stages) else 0
            boundaries += max(sent, self._returned(stages[own[0]][0], rows) if own[0] else 0)
        constant = self._constant(stages, own)
        one, several, last = constant.gradients
        gradients = one if microbatches == 1 else several
        transient = max(transient, constant.stepping - activations - whole, last - gradients - activations)
        buckets = constant.buckets + whole
        return {
            "gradients": gradients,
            "inputs": sum(line.at(rows * microbatches) for line in constant.inputs),
            "cache": constant.cache * microbatches,
            "boundaries": boundaries,
            "activations": activations,
            "transient": transient,
            "buckets": buckets,
            "slack": round(ALLOCATOR_SLACK * (activations + transient + buckets)),
        }

    def _constant(self, stages: Sequence[tuple[int, int]], own: Sequence[int]) -> _Constant:
        """Return what does not depend on the batch of a rank's memory."""
        mine = tuple(stages[place] for place in own)
        key = self.alike(mine)
        if key not in self._constants:
            run, units = self.execution, [unit for first, after in mine for unit in self.units[first:after]]
            held = self.copies(mine)
            buckets = summed = self._buckets(self.held(mine), self.tied_beyond(mine))
            if run.zero == 3 and not self._gathered_for_step:
                together = [parts for first, after in mine for parts in parts_together(self.units[first:after])]
                buckets += max(map(self._while_gathered, together), default=0)
                buckets += run.gathered_bytes(part for part in held if part.rest)
            buffers = {name: nbytes for unit in units for name, nbytes in unit.buffers.items()}
            inputs = {name: line for unit in units for name, line in unit.inputs.items()}
            memory = replace(self.state(held, 0), buffers=sum(buffers.values()), communicators=self.communicators)
            if "optimizer" in run.offload:
                memory = replace(memory, optimizer=min(self.optimizer_state(held), AT_ONCE * self.piece_state(held)))
            elsewhere_stepped = run.shards_on_host or "optimizer" in run.offload
            stepping = 0 if elsewhere_stepped else self._stepping(units, held)
            stepping -= min(stepping, summed)  # gradients are summed before
            self._constants[key] = _Constant(
                memory,
                memory.total,
                buckets,
                tuple(inputs.values()),
                sum(unit.cache for unit in units),
                stepping,
                self._gradients(units, held),
            )
        return self._constants[key]

    @property
    def _gathered_for_step(self) -> bool:
        """Whether ranks keep what they gathered of sharded parameters for a whole step. At level 2 they do, and where that is in the
        dtype in which parameters are stored, these count as whole."""
        run = self.execution
        kept = run.reshard == "never" or (self.mesh.pp > 1 and run.kept_for_step)
        return (run.zero == 3 and kept) or (run.zero == 2 and run.gather_bytes is not None)

    def _while_gathered(self, parts: Sequence[Held]) -> int:
        """Return the bytes that a unit takes while units are gathered: what is gathered, and its shard that came from the host."""
        run = self.execution
        came = run.divided(sum(part.elements * part.itemsize for part in parts), 2) if run.shards_on_host else 0
        return run.gathered * run.gathered_bytes(parts) + came

    def whole(self, stages: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the bytes of parameters and gradients of stages beside their shards: those from the first action of a stage to its last,
        these from its first backward until they are reduced."""
        run, held = self.execution, self.held(stages)
        gradients = self.gradient_sizes(held) if run.zero >= 2 and self.mesh.pp > 1 else 0
        return (run.gathered_bytes(held) if self._gathered_for_step else 0), gradients

    def _gradients(self, units: Sequence[Unit], held: Sequence[Held]) -> tuple[int, int, int]:
        """Return the bytes of a rank's gradients, where a step has one microbatch, where it has more, and when the last are summed.

        At ZeRO level 1 these are summed a unit at a time, while two have flat copies of theirs, and ranks keep the sums of their pieces. In
        the backward of an only microbatch that frees the others; what does not repeat is one unit, whose gradients are summed last.
        """
        run, whole = self.execution, self.gradient_sizes(held)
        if run.zero != 1 or not run.copies_gradients:
            return (self._shards_of_gradients(held),) * 2 + (0,)
        each = Counter(unit.kind for unit in units)
        largest = max((self.gradient_sizes(unit.held) for unit in units if each[unit.kind] > 1), default=0)
        rest = sum(self.gradient_sizes(unit.held) for unit in units if each[unit.kind] == 1)
        several, sums = whole + largest, run.divided(whole, 1)
        one = sums + min(rest + 3 * largest, several) if self.mesh.pp == 1 else several
        return one, several, sums + 2 * min(rest, whole)

    def _shards_of_gradients(self, held: Sequence[Held], level: int = 2) -> int:
        """Return the bytes of a rank's gradients on the device, which are sharded from ZeRO ``level`` on."""
        run = self.execution
        return 0 if run.shards_on_host else run.divided(self.gradient_sizes(held), level)

    def _fixed(self, first: int, after: int, alone: bool = True) -> int:
        """Return the least bytes of the state of units, and those of :meth:`whole` with the allocator's overhead where they are ``alone``
        on their rank, which has all at one time."""
        level, held = 1 if self.execution.copies_gradients and self.mesh.pp == 1 else 2, self.held([(first, after)])
        gradients = self._shards_of_gradients(held, level)  # see _gradients
        whole = sum(self.whole([(first, after)])) if alone else 0
        return self.state(held, gradients).total + round((1 + ALLOCATOR_SLACK) * whole)

    @cached_property
    def _ties(self) -> list[tuple[int, str]]:
        """The tied parameters, each with the numbers of its units."""
        units = enumerate(self.units)
        return [(place, held.tied) for place, unit in units for held in unit.held if held.tied is not None]

    def _buckets(self, held: Sequence[Held], elsewhere: Collection[str]) -> int:
        """Return the bytes of the largest bucket in which gradients are all-reduced."""
        replicas = [axis for axis in REPLICAS if self.mesh.degrees()[axis] > 1]
        summed: dict[tuple[tuple[str, ...], bool], int] = {}
        for part in held:
            shared = part.tied is not None and part.tied in elsewhere
            over = part.summed_over(replicas)
            if part.trained and (over or shared):
                key = over, shared
                summed[key] = summed.get(key, 0) + part.elements * self.gradient_bytes(part)
        return max((min(nbytes, BUCKET_BYTES) for nbytes in summed.values()), default=0)

    def state(self, held: Iterable[Held], gradients: int) -> Memory:
        """Return the bytes of parameters, ``gradients``, main copies and optimizer state, without what is updated at one time of state
        that lives in the host's memory."""
        run, parts = self.execution, list(held)
        main = sum(
            part.elements * size
            for part in parts
            if part.trained and (size := self.main_bytes(part)) > self.stored_bytes(part)
        )
        away = run.shards_on_host  # what ZeRO-2 gathers is whole from the first microbatch to the last
        return Memory(
            parameters=0
            if away and run.zero == 3
            else run.divided(self.parameter_sizes(parts), 3 if run.gather_bytes is None else 2),
            copies=self.copied(parts),
            gradients=gradients,
            main_copies=0 if away else run.divided(main, 1),
            optimizer=0 if away or "optimizer" in run.offload else self.optimizer_state(parts),
        )

    def parameter_sizes(self, held: Iterable[Held]) -> int:
        """Return the bytes of parameters as they are stored."""
        return sum(part.elements * self.stored_bytes(part) for part in held)

    def on_host(self, held: Sequence[Held]) -> HostMemory:
        """Return the bytes of state in the memory of the host."""
        run = self.execution
        if not run.shards_on_host:
            return HostMemory(self.optimizer_state(held) if "optimizer" in run.offload else 0)
        parameters, gradients = (run.divided(each(held), 2) for each in (self.parameter_sizes, self.gradient_sizes))
        return HostMemory(self.optimizer_state(held), parameters=parameters, gradients=gradients)

    def optimizer_state(self, held: Iterable[Held]) -> int:
        """Return the bytes of the optimizer's state, wherever it lives."""
        return self.execution.divided(round(self._updated(held) * self.execution.optimizer.tensors), 1)

    def _stepping(self, units: Sequence[Unit], held: Sequence[Held]) -> int:
        """Return the bytes that the optimizer's step of ``held``, the parameters of ``units``, takes on top: Adam on a CPU makes two
        tensors of the size of a parameter, while it has one of that before it. Copies of a tied one follow each other."""
        run, updated = self.execution, self._updated(held)
        if not run.one_by_one:
            return run.divided(updated, 1) if run.foreach else 0

        def in_pieces(elements: int, part: Held) -> int:
            nbytes = elements * self.main_bytes(part)
            return min(nbytes, run.divided(updated, 1)) if run.zero == 1 else run.divided(nbytes, 2)

        tied = [part for part, count in Counter(part for part in held if part.tied).items() if count > 1]
        most, before = max((3 * in_pieces(part.elements, part) for part in tied if part.trained), default=0), 0
        for unit in units:
            sizes = [
                in_pieces(elements, part)
                for part in unit.held
                if part.trained
                for largest in [part.largest or part.elements]
                for elements in (largest, min(largest, part.elements - largest))
            ]
            first, second = sorted([0, 0, *sizes])[:-3:-1]
            most, before = max(most, 2 * first + max(before, second)), first
        return most

    def _updated(self, held: Iterable[Held]) -> int:
        """Return the bytes of what optimizers of the ranks that share state update together."""
        return sum(part.elements * self.main_bytes(part) for part in held if part.trained)

    @cached_property
    def communicators(self) -> int:
        """The bytes of the groups that a rank joins."""
        return self.execution.communicator_bytes * communicators(self.mesh.degrees())

    def piece_state(self, held: Iterable[Held]) -> int:
        """Return the bytes of the state of the largest piece of parameters that are updated at one time, see
        :mod:`graphpar.runtime.state.offloaded_state`."""
        run = self.execution
        trained = [part for part in held if part.trained]
        largest = max(((part.largest or part.elements) * part.itemsize for part in trained), default=0)
        return round(run.optimizer.tensors * max(PIECE_BYTES, run.divided(largest, 1) if run.zero >= 2 else largest))

    def _returned(self, after: int, rows: int) -> int:
        """Return the bytes of the gradients that come back to a stage whose last unit is the one before ``after``."""
        if after == len(self.units):
            return 0
        key = after, rows
        if key not in self._returns:
            self._returns[key] = _returned(self.units[after - 1], rows)
        return self._returns[key]

    def room(self, memory_bytes: int) -> int:
        """Return how many bytes of :meth:`fixed_runs`, and of what depends on the microbatch, fit in a device."""
        return memory_bytes - self.communicators + self._counted_twice

    @cached_property
    def _counted_twice(self) -> int:
        """The bytes that :meth:`fixed_runs` counts for each of several units of one stage, though it has them once."""
        buffers = {name: nbytes for unit in self.units for name, nbytes in unit.buffers.items()}
        each = sum(self._fixed(place, place + 1) + sum(unit.buffers.values()) for place, unit in enumerate(self.units))
        return each - self._fixed(0, len(self.units)) - sum(buffers.values())

    def average(self, rows: int, alive: float, alone: bool) -> float:
        """Return a lower bound of the mean bytes of pp ranks that each keep ``alive`` microbatches, wherever stages begin; ``alone``: a
        rank has one."""
        return (self.least_state(alone) + alive * self.least_kept(rows)) / self.mesh.pp

    def least_state(self, alone: bool) -> int:
        """Return a lower bound of the state that all stages hold together, wherever they begin; ``alone``: a rank has one."""
        if alone not in self._least_state:
            self._least_state[alone] = self._fixed(0, len(self.units), alone)
        return self._least_state[alone]

    def least_kept(self, rows: int) -> int:
        """Return a lower bound of what all stages together keep of a microbatch, wherever they begin."""
        if rows not in self._least_kept:
            kept = self.kept(0, len(self.units), rows)[0]
            if self.execution.hold_messages:
                received = [unit.received for unit in self.joined(rows).at[1:]]
                kept += (self.mesh.pp - 1) * min(received, default=0)
            self._least_kept[rows] = kept
        return self._least_kept[rows]

    def fixed_runs(self) -> Array:
        """Return a table [first, after] of the bytes of parameters, state and buffers of every run of units."""
        fixed = run_sums(
            np.array(
                [self._fixed(place, place + 1) + sum(unit.buffers.values()) for place, unit in enumerate(self.units)],
                dtype=float,
            )
        )
        if self.execution.zero == 3 and not self._gathered_for_step:
            parts = [[part for part in unit.held if not part.rest] for unit in self.units]
            fixed = fixed + (1 + ALLOCATOR_SLACK) * run_largest(
                np.array([self._while_gathered(each) for each in parts])
            )
        return fixed

    def moved(self, first: int, after: int, rows: int) -> int:
        """Return the bytes of a microbatch that a stage keeps in the memory of the host."""
        return self.joined(rows).moved(first, after)

    def joined(self, rows: int) -> JoinedUnits:
        """Return the bytes of all units for microbatches of ``rows``."""
        if rows not in self._joined:
            self._joined[rows] = JoinedUnits(self.units, rows)
        return self._joined[rows]

    def in_flight(self, first: int, after: int, rows: int) -> int:
        """Return the bytes that a stage has of each microbatch in flight: what it keeps, and what it received from another rank."""
        kept, _, _, received = self.kept(first, after, rows)
        return kept + (received if first and self.execution.hold_messages else 0)

    def halves(self, first: int, after: int, rows: int) -> HalvesBytes:
        """Return the bytes of a microbatch of a stage whose backward runs in halves, with its messages: torch keeps the gradient of what
        the stage sent, and that of what it received, until the second half."""
        key = first, after, rows
        if key not in self._halves:
            found, messages = self.joined(rows).halves(first, after), self._returned(after, rows)
            if self.execution.recompute == "full":
                kept, forward, backward, _ = self.kept(*key)
                found = HalvesBytes(kept, (max(forward, backward), backward, backward))
            messages += self._returned(first, rows) if first else 0
            self._halves[key] = found._replace(left=found.left + messages)
        return self._halves[key]

    def kept(self, first: int, after: int, rows: int) -> tuple[int, int, int, int]:
        """Return the bytes of a microbatch of a stage: (kept, forward on top, backward on top, received)."""
        key = first, after, rows
        if key not in self._keeps:
            joined = self.joined(rows)
            kept, forward, backward, sent, received = joined.stage(first, after)
            if self.execution.recompute == "full":
                units = joined.at[first:after]
                kept = sum(unit.received for unit in units[1:]) + sent
                backward = max(unit.inside + unit.shared + unit.backward for unit in units)
            self._keeps[key] = kept, forward, backward, received
        return self._keeps[key]


@dataclass(frozen=True)
class RunBytes:
    """Bytes of every run of units that depend on the microbatch, as tables [first, after].

    Attributes:
        kept: by each microbatch in flight.
        transient: needed on top by the running one.
        message: buffers for messages.
        own: of each unit, what it adds to ``kept``.
    """

    kept: Array
    transient: Array
    message: Array
    own: Array

    @staticmethod
    def of(units: Sequence[Unit], rows: int) -> RunBytes:
        """Return the tables for microbatches of ``rows``, of whose messages a buffer is there as long as what is kept."""
        joined = JoinedUnits(units, rows)
        column = dict(zip(joined.at[0]._fields, np.array(joined.at, dtype=float).T))
        between = np.array([*joined.between, 0.0])
        returned = [0, *(_returned(unit, rows) for unit in units[:-1]), 0]
        received = np.append(column["received"], 0.0)
        received[0] = 0.0
        sent = np.append(0.0, column["sent"])
        inside, shared = run_sums(column["inside"]), run_largest(column["shared"])
        return RunBytes(
            kept=inside + run_sums(between, last=False) + shared + sent[None, :] + received[:, None],
            transient=run_largest(np.maximum(column["forward"], column["backward"])),
            message=received[:, None] + np.array(returned, dtype=float)[None, :],
            own=np.asarray(column["inside"] + between),
        )


def parts_together(units: Sequence[Unit]) -> list[list[Held]]:
    """Return the parameters that are gathered together for units of a stage, without those that are gathered with the stage."""
    found: list[list[Held]] = []
    for unit in units:
        if not unit.joins or not found:
            found.append([])
        found[-1] += [part for part in unit.held if not part.rest]
    return found


def _equal_runs(units: Sequence[Unit]) -> EqualRuns:
    """Return which runs of ``units`` hold the same; one with a tied parameter is like no other, as it matters which stages have that."""
    names = Counter(name for unit in units for name in unit.buffers)
    marks: list[Hashable] = []
    for place, unit in enumerate(units):
        buffers = tuple((name if names[name] > 1 else "", nbytes) for name, nbytes in unit.buffers.items())
        tied = place if any(held.tied is not None for held in unit.held) else None
        marks.append((unit.held, unit.kind.sends, buffers, tuple(unit.inputs.items()), unit.cache, tied, unit.joins))
    return EqualRuns(marks)


def _returned(unit: Unit, rows: int) -> int:
    return sum(round(size.at(rows)) for size, gradient in unit.kind.sends if gradient)


def run_sums(values: Array, *, last: bool = True) -> Array:
    """Return a table [first, after] of the sum of each run, with or without its last."""
    sums = np.append(0.0, np.cumsum(values))
    ends = sums if last else np.append(0.0, sums[:-1])
    return np.asarray(ends[None, :] - sums[:, None])


def run_largest(values: Array) -> Array:
    """Return a table [first, after] of the largest of each run."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        table[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return table
