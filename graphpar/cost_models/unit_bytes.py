"""Bytes of ranks from their units: constant ones, those that a microbatch keeps, and those that a running stage needs on top.

units of a rank's stages, rows of a microbatch ──UnitBytes──► Memory at the peak
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from graphpar.cost_models.equal_runs import EqualRuns, Run
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.memory import ALLOCATOR_SLACK, MAIN_DTYPE, HostMemory, Memory, Moment, Most
from graphpar.cost_models.pipeline_units import Bytes, HalvesBytes, Held, JoinedUnits, Unit
from graphpar.cost_models.run_bytes import Array, equal_units, parts_together, run_largest, run_sums, together
from graphpar.runtime.axes import REPLICAS, STATE_AXES
from graphpar.runtime.groups import communicators
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.state.gradient_buckets import BUCKET_BYTES
from graphpar.runtime.state.offloaded_state import AT_ONCE, PIECE_BYTES


class _Constant(NamedTuple):
    """What does not depend on the batch of a rank's memory.

    Attributes:
        memory: without the following; ``total``: its bytes.
        gathered: of sharded parameters, as long as something runs.
        inputs, cache: the inputs that the rank takes, the keys and values of a microbatch.
        gradients: while microbatches are added up; ``reduced``: at the end of a step.
        summed: what their sums need on top of ``gradients``, at most, for the gradients of the last microbatch.
        ending: what the end of a step needs on top of ``reduced``.
    """

    memory: Memory
    total: int
    gathered: int
    inputs: tuple[Bytes, ...]
    cache: int
    gradients: int
    reduced: int
    summed: int
    ending: int


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
            self._all_known[self.units] = _Known(equal_units(self.units), {}, {})
        self._runs, self._held, self._counts = self._all_known[self.units]
        self._least_state: dict[tuple[bool, bool], int] = {}
        self._least_kept: dict[tuple[int, bool], int] = {}
        self._joined: dict[int, JoinedUnits] = {}
        self._keeps: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
        self._halves: dict[tuple[int, int, int], HalvesBytes] = {}
        self._constants: dict[tuple[Run, ...], _Constant] = {}
        self._returns: dict[tuple[int, int], int] = {}
        self._walks: dict[tuple[int, bool], Moment] = {}

    def with_units(self, units: Sequence[Unit]) -> UnitBytes:
        """Return the bytes of the same parameters and inputs where units keep something else."""
        other = copy.copy(self)
        other.units, other._least_kept, other._joined, other._keeps, other._halves = tuple(units), {}, {}, {}, {}
        other._walks = {}
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

    def reduced(self, stages: Sequence[tuple[int, int]], own: Sequence[int]) -> int:
        """Return the bytes of a rank's gradients when the optimizer's step begins."""
        return self._constant(stages, own).reduced

    def _varying(
        self, stages: Sequence[tuple[int, int]], own: Sequence[int], rows: int, microbatches: int, most: Most
    ) -> dict[str, int]:
        """Return what depends on the batch of a rank's memory."""
        costs, (activations, whole, on_top) = [self.kept(*stages[place], rows) for place in own], most
        transient = max(max(cost[1:3]) for cost in costs) if on_top is None else on_top
        boundaries = sum(cost[3] for place, cost in zip(own, costs) if place)
        boundaries += sum(self._returned(stages[place][1], rows) for place in own)
        constant = self._constant(stages, own)
        ending = constant.ending
        if self.infers:  # what forwards send is there until the last one has ended
            ends = (stages[place][1] - 1 for place in own if place + 1 not in own)
            boundaries += (microbatches - 1) * sum(self.joined(rows).at[end].sent for end in ends)
            transient = max(self._running_forward(*stages[place], rows) for place in own)
            ending = self._joining(rows, microbatches, stages[-1][0]) if len(stages) - 1 in own else 0
        elif len(own) == 1 and len(stages) > 1:  # the last message being sent
            sent = self.joined(rows).at[stages[own[0]][1] - 1].sent if own[0] + 1 < len(stages) else 0
            boundaries += max(sent, self._returned(stages[own[0]][0], rows) if own[0] else 0)
        gradients, buckets = constant.gradients, constant.gathered + whole
        if len(stages) == 1 and self._trains and on_top is None:
            kept, gradients, buckets, transient = self._walked(rows, microbatches == 1)
            activations += kept - costs[0][0]
        else:  # the last microbatch may be there still
            transient = max(transient, constant.summed + max(cost[0] for cost in costs) - activations)
        moving = activations + transient + buckets
        # What a rank keeps of a step is gone when it ends.
        more = constant.reduced + (1 + ALLOCATOR_SLACK) * ending - gradients - (1 + ALLOCATOR_SLACK) * moving
        if more > 0:
            transient += constant.reduced + ending - gradients - moving
            moving = ending
        return {
            "gradients": gradients,
            "inputs": sum(line.at(rows * microbatches) for line in constant.inputs),
            "cache": constant.cache * microbatches,
            "boundaries": boundaries,
            "activations": activations,
            "transient": transient,
            "buckets": buckets,
            "slack": round(ALLOCATOR_SLACK * moving),
        }

    def _constant(self, stages: Sequence[tuple[int, int]], own: Sequence[int]) -> _Constant:
        """Return what does not depend on the batch of a rank's memory."""
        mine = tuple(stages[place] for place in own)
        key = self.alike(mine)
        if key not in self._constants:
            run, units = self.execution, [unit for first, after in mine for unit in self.units[first:after]]
            held, gathered = self.copies(mine), 0
            if run.zero == 3 and not self._gathered_for_step:
                parts = [each for first, after in mine for each in parts_together(self.units[first:after])]
                gathered = max(map(self._while_gathered, parts), default=0)
                gathered += run.gathered_bytes(part for part in held if part.rest)
            buffers = {name: nbytes for unit in units for name, nbytes in unit.buffers.items()}
            inputs = {name: line for unit in units for name, line in unit.inputs.items()}
            memory = replace(self.state(held, 0), buffers=sum(buffers.values()), communicators=self.communicators)
            if "optimizer" in run.offload:
                memory = replace(memory, optimizer=min(self.optimizer_state(held), AT_ONCE * self.piece_state(held)))
            elsewhere_stepped = run.shards_on_host or "optimizer" in run.offload
            stepping = 0 if elsewhere_stepped else self._stepping(units, held)
            bucket, flat = self._bucket(self.held(mine), self.tied_beyond(mine)), self._flat(units)
            gradients = self._shards_of_gradients(held)
            reduced = gradients
            if run.copies_gradients and not run.shards_on_host:
                reduced = self._share(held, self.gradient_bytes)
            self._constants[key] = _Constant(
                memory,
                memory.total,
                gathered,
                tuple(inputs.values()),
                sum(unit.cache for unit in units),
                gradients,
                reduced,
                max(bucket, flat),
                max(stepping, bucket, 2 * flat),
            )
        return self._constants[key]

    def _flat(self, units: Sequence[Unit]) -> int:
        """Return the bytes of the largest flat copy of a unit's gradients, of which ZeRO level 1 makes one after the other."""
        run = self.execution
        if run.zero != 1 or not run.copies_gradients:
            return 0
        each = Counter(unit.kind for unit in units)
        alone = sum(self.gradient_sizes(unit.held) for unit in units if each[unit.kind] == 1)  # are one unit
        return max(alone, *(self.gradient_sizes(unit.held) for unit in units if each[unit.kind] > 1), 0)

    def _walked(self, rows: int, alone: bool) -> Moment:
        """Return the moment at which an only stage has the most in its last microbatch; ``alone``: it is the only one, so gradients come as
        activations go.

        Where gradients are sharded, those of units that are gathered together are whole until their backward has ended. Then they are
        copied; the copy is there until the next ones are copied.
        """
        key = rows, alone
        if key not in self._walks:
            run, joined, after = self.execution, self.joined(rows), len(self.units)
            every, kept = self._constant([(0, after)], [0]), self.kept(0, after, rows)[0]
            made, flat, seen, moments = 0, 0, set[str](), list[Moment]()
            alone, sharded = alone and run.copies_gradients, run.copies_gradients and run.zero >= 2
            for number, group in reversed([*enumerate(together(self.units))]):
                there = made if alone else every.gradients
                whole, copied = 0, 0  # of the group's gradients
                for unit in reversed(group):
                    after -= 1
                    at = joined.at[after]
                    own = [part for part in unit.held if part.trained and part.tied not in seen]
                    seen |= {part.tied for part in own if part.tied is not None}
                    gradients = self.gradient_sizes(own)
                    backward = at.backward + (at.inside + at.shared if run.recompute == "full" else 0)
                    if alone or sharded:
                        values = sum(part.elements * part.itemsize for part in own)
                        backward += whole + flat + (round(at.growth * gradients / values) if values else 0)
                    moments.append(Moment(kept, there, self._gathered_at(number, -1, alone), backward))
                    for first in {alone, alone or self._gathered_for_step}:  # microbatches of the step
                        gathered = self._gathered_at(number, 1, first)
                        moments.append(Moment(kept, 0 if first else there, gathered, at.forward))
                    kept -= joined.freed(after, inputs_only=run.recompute == "full")
                    whole, copied = whole + gradients, copied + self.reduced_sizes(own)
                for first in {alone, alone or self._gathered_for_step}:
                    moments.append(Moment(kept, 0 if first else there, self._gathered_at(number, 0, first), 0))
                if sharded:
                    # FSDP2 has the last gradient of a unit, here the only one, until it has added the sum to that of other microbatches.
                    only = sum(part.count for unit in group for part in unit.held if not part.rest) == 1
                    summing = whole + copied + (run.divided(copied, 2) if only and not alone else 0)
                else:
                    summing = min(every.summed, copied if run.zero else made + whole)
                    summing += whole if alone and run.zero else 0
                made += run.divided(whole, 1)
                flat = copied if sharded else copied - run.divided(copied, 1) if run.zero else 0
                there, gathered = made if alone else every.gradients, self._gathered_at(number - 1, -1, alone)
                moments.append(Moment(kept, there, gathered, summing))
            self._walks[key] = max(moments, key=lambda moment: moment.nbytes)
        return self._walks[key]

    def _gathered_at(self, number: int, way: int, alone: bool) -> int:
        """Return the bytes of sharded parameters that are gathered while the units that are gathered together as ``number`` run forward (1)
        or backward (-1) in an only stage, before the first at -1, or as they arrive for a forward (0); ``alone``: in a microbatch that
        gathers what a step keeps, and frees it.

        In a forward FSDP2 keeps what has arrived for a unit, beside its parameters, until the next one has them.
        """
        (gathered, rest), run = self._gathered, self.execution
        if run.zero < 3 and not self._gathered_for_step:
            return 0
        if number < 0 and not any(gathered) and (alone or run.zero == 3):  # the stage is one unit
            return 0
        places = range(number, max(0, number - (gathered[number] > 0 and not way)) - 1, -1) if way >= 0 else ()
        arrived = sum(gathered[place] or (0 if any(gathered[:place]) else rest) for place in places)
        if self._gathered_for_step:
            return rest + (sum(gathered[: number + 1]) + arrived if alone else sum(gathered))
        others = number + way * (run.gathered - 1)
        first, after = sorted((number, others))
        both = sum(gathered[max(0, first) : max(0, after + 1)]) + arrived
        if isinstance(run.reshard, int):  # what ranks keep between forward and backward
            both += sum(gathered[: max(0, first)]) // run.reshard
        if run.shards_on_host and number >= 0:  # a shard that has come from there
            both += -(-gathered[number] // run.shards)
        return both + rest

    @cached_property
    def _gathered(self) -> tuple[list[int], int]:
        """The bytes that units which are gathered together in an only stage take when they are, and those of what is gathered with the
        stage."""
        groups = [self.execution.gathered_bytes(parts) for parts in parts_together(self.units)]
        return groups, self.execution.gathered_bytes(part for unit in self.units for part in unit.held if part.rest)

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
        gradients -= min(gradients, self._shards_of_gradients(held))  # which are counted all the time
        return (run.gathered_bytes(held) if self._gathered_for_step else 0), gradients

    def _shards_of_gradients(self, held: Sequence[Held], level: int = 2) -> int:
        """Return the bytes of a rank's gradients on the device, which are sharded from ZeRO ``level`` on."""
        run = self.execution
        return 0 if run.shards_on_host else run.divided(self.gradient_sizes(held), level)

    def _fixed(self, first: int, after: int, alone: bool = True) -> int:
        """Return the least bytes of the state of units, and those of :meth:`whole` with the allocator's overhead where they are ``alone``
        on their rank, which has all at one time."""
        held = self.held([(first, after)])
        gradients = self._shards_of_gradients(held, self._level_of_gradients)
        whole = sum(self.whole([(first, after)])) if alone else 0
        return self.state(held, gradients, evenly=True).total + round((1 + ALLOCATOR_SLACK) * whole)

    @property
    def _level_of_gradients(self) -> int:
        """From which ZeRO level on the least that a rank has of gradients is a share of them."""
        return 1 if self.execution.copies_gradients and self.mesh.pp == 1 else 2

    @cached_property
    def _ties(self) -> list[tuple[int, str]]:
        """The tied parameters, each with the numbers of its units."""
        units = enumerate(self.units)
        return [(place, held.tied) for place, unit in units for held in unit.held if held.tied is not None]

    @cached_property
    def _trains(self) -> bool:
        """Whether there are gradients."""
        return any(part.trained for unit in self.units for part in unit.held)

    @property
    def infers(self) -> bool:
        """Whether forwards run alone, one after the other."""
        return self.units[-1].results is not None

    def _message(self, first: int, rows: int) -> int:
        """Return the bytes that a stage receives, which are there until it receives those of another microbatch."""
        return sum(round(size.at(rows)) for size, _ in self.units[first - 1].kind.sends) if first else 0

    def _running_forward(self, first: int, after: int, rows: int) -> int:
        """Return what the forward of a stage needs on top in inference; of units, that of the first has what the stage receives."""
        at, *others = self.joined(rows).at[first:after]
        return max(at.forward, *(each.forward + self._message(first, rows) for each in others), 0)

    def _joining(self, rows: int, microbatches: int, first: int) -> int:
        """Return the bytes that joining the outputs of inference takes, with those of one microbatch of the last stage, from unit ``first``
        on: each output of all microbatches is copied to one tensor; with replicas those of all of these are gathered, and copied again."""
        sizes, replicas = [size.at(rows) for size in self.units[-1].results or ()], self.mesh.replicas
        there, most = round(sum(sizes)) + self._message(first, rows), 0
        for nbytes in (round(microbatches * size) for size in sizes):
            most = max(most, there + nbytes * (1 if replicas == 1 else 1 + 2 * replicas))
            there += replicas * nbytes
        return most

    def _bucket(self, held: Sequence[Held], elsewhere: Collection[str]) -> int:
        """Return the bytes of the largest bucket in which gradients are all-reduced; a parameter that is larger than others may be has one
        alone. FSDP2 sums sharded ones over replicas, and ZeRO 1 over the ranks of the shards, in flat copies of units."""
        run = self.execution
        apart = REPLICAS if run.zero >= 2 else STATE_AXES if run.zero else ()
        replicas = [axis for axis in REPLICAS if axis not in apart and self.mesh.degrees()[axis] > 1]
        summed: dict[tuple[tuple[str, ...], bool], int] = {}
        largest: dict[tuple[tuple[str, ...], bool], int] = {}
        for part in held:
            shared = part.tied is not None and part.tied in elsewhere
            over = part.summed_over(replicas)
            if part.trained and (over or shared):
                key = over, shared
                nbytes = run.divided(part.elements * self.gradient_bytes(part), 1)
                largest[key] = max(
                    largest.get(key, BUCKET_BYTES), nbytes * (part.largest or part.elements) // part.elements
                )
                summed[key] = summed.get(key, 0) + nbytes
        return max((min(nbytes, largest[key]) for key, nbytes in summed.items()), default=0)

    def state(self, held: Iterable[Held], gradients: int, evenly: bool = False) -> Memory:
        """Return the bytes of parameters, ``gradients``, main copies and optimizer state, without what is updated at one time of state
        that lives in the host's memory; ``evenly``: as :meth:`_share`."""
        run, parts = self.execution, list(held)
        main = [part for part in parts if self.main_bytes(part) > self.stored_bytes(part)]
        away = run.shards_on_host  # what ZeRO-2 gathers is whole from the first microbatch to the last
        return Memory(
            parameters=0
            if away and run.zero == 3
            else run.divided(self.parameter_sizes(parts), 3 if run.gather_bytes is None else 2),
            copies=self.copied(parts),
            gradients=gradients,
            main_copies=0 if away else self._share(main, self.main_bytes, evenly),
            optimizer=0 if away or "optimizer" in run.offload else self.optimizer_state(parts, evenly),
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

    def optimizer_state(self, held: Sequence[Held], evenly: bool = False) -> int:
        """Return the bytes of the optimizer's state, wherever it lives."""
        tensors = self.execution.optimizer.tensors
        return self._share(held, lambda part: self.main_bytes(part) * tensors, evenly)

    def _share(self, held: Sequence[Held], nbytes: Callable[[Held], float], evenly: bool = False) -> int:
        """Return the bytes of what is trained that the rank with the most of it has, where ranks share that from ZeRO 1 on; ``nbytes``: of
        an element. Ranks own full parameters at that level, unless in slices, so one has no less than the largest; ``evenly``: as if in
        slices, which is the least."""
        run, trained = self.execution, [part for part in held if part.trained]
        share = run.divided(round(sum(part.elements * nbytes(part) for part in trained)), 1)
        if run.zero != 1 or run.zero1_by == "flat" or evenly:
            return share
        return max(share, *(round((part.largest or part.elements) * nbytes(part)) for part in trained), 0)

    def _stepping(self, units: Sequence[Unit], held: Sequence[Held]) -> int:
        """Return the bytes that the optimizer's step of ``held``, the parameters of ``units``, takes on top: Adam on a CPU makes two
        tensors of the size of a parameter, while it has one of that before it. Copies of a tied one follow each other."""
        run, updated = self.execution, self._share(held, self.main_bytes)
        if not run.one_by_one:
            return updated if run.foreach else 0

        def in_pieces(elements: int, part: Held) -> int:
            nbytes = elements * self.main_bytes(part)
            return min(nbytes, updated) if run.zero == 1 else run.divided(nbytes, 2)

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
            self._returns[key] = self.units[after - 1].returned(rows)
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

    def average(self, rows: int, alive: float, alone: bool, microbatches: int) -> float:
        """Return a lower bound of the mean bytes of pp ranks that each keep ``alive`` microbatches, wherever stages begin; ``alone``: a
        rank has one stage."""
        return (self.least_state(alone, microbatches) + alive * self.least_kept(rows, microbatches)) / self.mesh.pp

    def least_state(self, alone: bool, microbatches: int) -> int:
        """Return a lower bound of the state that all stages hold together, wherever they begin; ``alone``: a rank has one."""
        key = alone, self._is_exchanged(microbatches)
        if key not in self._least_state:
            less = self._least_gradients if self._is_exchanged(microbatches) else 0
            self._least_state[key] = self._fixed(0, len(self.units), alone) - less
        return self._least_state[key]

    def least_kept(self, rows: int, microbatches: int) -> int:
        """Return a lower bound of what all stages together keep of a microbatch, wherever they begin, or of gradients in its place."""
        key = rows, self._is_exchanged(microbatches)
        if key not in self._least_kept:
            kept = self.kept(0, len(self.units), rows)[0]
            if self.execution.hold_messages:
                received = [unit.received for unit in self.joined(rows).at[1:]]
                kept += (self.mesh.pp - 1) * min(received, default=0)
            if self._is_exchanged(microbatches):  # gradients have no overhead
                whole = sum(self.whole([(0, len(self.units))]))
                kept = max(kept, round(self._least_gradients / (1 + ALLOCATOR_SLACK)) - whole)
            self._least_kept[key] = kept
        return self._least_kept[key]

    def _is_exchanged(self, microbatches: int) -> bool:
        """Whether gradients take the place of what a microbatch keeps: in the backward of an only one in an only stage."""
        return self.mesh.pp == 1 and microbatches == 1

    @cached_property
    def _least_gradients(self) -> int:
        """The least bytes of gradients that all stages have together."""
        return self._shards_of_gradients(self.held([(0, len(self.units))]), self._level_of_gradients)

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
                found = HalvesBytes(0 if first else kept, (max(forward, backward), backward, backward))
            messages += self._returned(first, rows) if first else 0
            self._halves[key] = found._replace(left=found.left + messages) if found.left else found
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
