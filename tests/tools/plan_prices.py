"""The seconds and bytes of a training step, written a second time and as plainly as possible: an oracle for prices and searches.

    units of a rank ──sums──► stages ──every rank's actions, one after the other──► ends of ranks ──gradients, optimizer──► seconds
                         └──► what a microbatch keeps ──the same actions──► the most at one time, and the state ──► bytes

Only rates are taken from the product: seconds of a product, of moved bytes and of a collective; and what each unit alone keeps and
holds. It knows training on GPUs with Adam, gradients that are summed behind backwards, and gathers a unit ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphpar.cost_models.collectives import Network
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.pipeline_units import Held, Unit, UnitMemory
from graphpar.cost_models.work import Collective, Product, Work
from graphpar.runtime.mesh import Mesh
from graphpar.schedules.action_table import Action
from graphpar.schedules.registry import action_table

BUCKET = 25 * 2**20
SLACK = 0.05
Units = Sequence[Unit]
UnitCosts = tuple[list[float], float, bool]
Row = Sequence[tuple[Action, ...]]
Result = tuple[int, bool, int]
"""A stage's activations (True) or the gradient of its input, and the microbatch."""


@dataclass(frozen=True)
class Stage:
    """Seconds of a microbatch of a stage; ``weight`` is the part of ``backward`` that schedules may put off."""

    forward: float
    backward: float
    weight: float


@dataclass
class StepPrices:
    """Prices steps over ``mesh`` with state sharded by ZeRO level ``zero``; ``always``: gathered parameters are freed after each use."""

    mesh: Mesh
    compute: Compute
    network: Network
    zero: int = 0
    always: bool = False
    _known: dict[tuple[int, int], UnitCosts] = field(default_factory=dict)

    # ---- seconds ----

    def unit(self, unit: Unit, rows: int) -> UnitCosts:
        """Seconds of a unit's forward, of its backward by inputs and by weights, those that run again, and whether any does."""
        key = id(unit.kind), rows
        if key not in self._known:
            work, again = unit.kind.work, unit.kind.again
            phases = [each.products + each.attention + each.traffic for each in self.compute.seconds(work, rows)]
            phases = [alone + sent for alone, sent in zip(phases, self._sent(work, rows))]
            first = self.compute.seconds(again.work, rows)[0]
            more = first.products + first.attention + first.traffic + self._sent(again.work, rows)[0]
            self._known[key] = phases, more, bool(again.work.rows)
        return self._known[key]

    def _sent(self, work: Work, rows: int) -> list[float]:
        """Seconds of the collectives of a forward, and of a backward by inputs and by weights."""
        seconds = [0.0, 0.0, 0.0]
        for row, times in work.rows.items():
            if isinstance(row, Collective):
                each = self._collective(row.axis, row.kind, row.nbytes.at(rows))
                cpu = self.compute.device.kind == "cpu"  # whose cores multiply or send
                others = [other for other in row.beside if not (cpu and isinstance(other, Product))]
                beside = [self.compute.seconds(Work({other: 1}), rows)[other.phase] for other in others]
                each = max(0.0, each - sum(other.products + other.attention for other in beside))
                seconds[row.phase] += times * each
        return seconds

    @property
    def shards(self) -> int:
        """The ranks that share state."""
        return self.mesh.dp_shard * self.mesh.cp

    def _over_shards(self, kind: str, nbytes: float) -> float:
        return self.network.seconds(kind, nbytes, self.network.group_of_axes(self.mesh, ["dp_shard", "cp"]))

    def _collective(self, axis: str, kind: str, nbytes: float) -> float:
        return self.network.seconds(kind, nbytes, self.network.group_of_axes(self.mesh, [axis]))

    def stage(self, units: Units, rows: int, first: bool) -> Stage:
        """Seconds of a microbatch of a stage of ``units``; ``first``: it is the first of the program."""
        own = [self.unit(unit, rows) for unit in units]
        forward = sum(phases[0] for phases, _, _ in own)
        weight = sum(phases[2] for phases, _, _ in own)
        backward = sum(phases[1] + more for phases, more, _ in own) + weight
        if self.zero >= 2 and (self.mesh.pp == 1 or self.always):
            forward, backward = self._gathering(units, [phases[0] for phases, _, _ in own], forward, backward)
        return Stage(forward, backward, 0.0 if any(again for _, _, again in own) and not first else weight)

    def _gathering(self, units: Units, own: list[float], forward: float, backward: float) -> tuple[float, float]:
        """Each unit's parameters are gathered while the one before it computes, its gradients scattered while the next one does."""
        held = [list(unit.held) for unit in units]
        for place, parts in enumerate(held if self.mesh.pp == 1 else ()):  # what is tied has one unit
            earlier = {part.tied for other in units[:place] for part in other.held} - {None}
            held[place] = [part for part in parts if part.tied not in earlier]
        gathers = [self._gather(parts) if self.zero == 3 else 0.0 for parts in held]
        second = [[part for part in parts if part.backward and (self.always or not part.rest)] for parts in held]
        again = [self._gather(parts) if self.zero == 3 else 0.0 for parts in second]
        scatters = [self._scatter(parts) if self.mesh.pp == 1 else 0.0 for parts in held]
        ahead, behind, ratio = gathers[0], scatters[0], backward / forward
        for place in range(len(units)):
            after = gathers[place + 1] if place + 1 < len(units) else 0.0
            ahead += max(own[place], after)
            before = again[place - 1] if place else 0.0
            behind += max(ratio * own[place], before + (scatters[place + 1] if place + 1 < len(units) else 0.0))
        return max(forward, ahead), max(backward, behind)

    def _gather(self, held: Sequence[Held]) -> float:
        return self._exchange("all-gather", sum(part.nbytes for part in held))

    def _scatter(self, held: Sequence[Held]) -> float:
        return self._exchange("reduce-scatter", sum(part.nbytes for part in held if part.trained))

    def _exchange(self, kind: str, nbytes: int) -> float:
        """Seconds of a collective over shards, and of copies from and to its flat tensors: a rank's shard, and the whole."""
        copied = 2 * nbytes + 2 * nbytes / self.shards
        return self._over_shards(kind, nbytes) + float(self.compute.traffic_s(copied)) if nbytes else 0.0

    # ---- a step ----

    def step_s(self, stages: Sequence[Units], rows: int, microbatches: int, schedule: str) -> float:
        """Seconds of a step of ``stages``."""
        costs = [self.stage(units, rows, place == 0) for place, units in enumerate(stages)]
        ranks = self.actions(len(stages), microbatches, schedule)
        summed, after = [], []
        for end, row in zip(self._ends(stages, costs, rows, ranks), ranks):
            own = sorted({action.stage for cell in row for action in cell})
            late, waits = self._late(stages, own, costs, row)
            summed.append(end + late)
            after.append(self._optimizer([stages[place] for place in own]) + waits)
        return max(summed) + max(after)

    def actions(self, stages: int, microbatches: int, schedule: str) -> list[Row]:
        """What each pp rank runs, one after the other; pairs together."""
        if self.mesh.pp == 1:
            one = [(Action(0, kind, number),) for number in range(microbatches) for kind in ("F", "B")]  # type: ignore[arg-type]
            return [one]
        table = action_table(schedule, self.mesh.pp, stages // self.mesh.pp, microbatches)
        return [[cell.parts for cell in row if cell is not None] for row in table.rows]

    def _ends(self, stages: Sequence[Units], costs: Sequence[Stage], rows: int, ranks: Sequence[Row]) -> list[float]:
        """When each rank has done its last action: each goes on for as long as what it needs is there, in turn."""
        home = {action.stage: rank for rank, row in enumerate(ranks) for cell in row for action in cell}
        last = {
            action.stage: (rank, step)
            for rank, row in enumerate(ranks)
            for step, cell in enumerate(row)
            for action in cell
        }
        by_table = self.zero >= 2 and self.mesh.pp > 1
        clock, step, begun = [0.0] * len(ranks), [0] * len(ranks), set[int]()
        made, link = dict[Result, float](), dict[tuple[int, int], float]()
        while any(step[rank] < len(row) for rank, row in enumerate(ranks)):
            rank = next(
                rank for rank, row in enumerate(ranks)
                if step[rank] < len(row) and all(need in made for need in _needs(row[step[rank]], len(stages)))
            )  # fmt: skip
            cell = ranks[rank][step[rank]]
            for place in dict.fromkeys(action.stage for action in cell if action.stage not in begun):
                clock[rank] += (
                    sum(self._gather(unit.held) for unit in stages[place]) if by_table and not self.always else 0
                )
                begun.add(place)
            clock[rank] = max([clock[rank], *(made[need] for need in _needs(cell, len(stages)))])
            clock[rank] += sum(_seconds(costs[action.stage], action.kind) for action in cell)
            for action in (action for action in cell if action.kind != "W"):
                to, there = action.stage + (1 if action.kind == "F" else -1), clock[rank]
                if 0 <= to < len(stages) and home[to] != rank:
                    there = max(there, link.get((rank, home[to]), 0.0)) + self._message(stages, action, rows)
                    link[rank, home[to]] = there
                made[_result(action)] = there
            for place in dict.fromkeys(action.stage for action in cell):
                if by_table and last[place] == (rank, step[rank]):
                    clock[rank] += sum(self._scatter(unit.held) for unit in stages[place])
            step[rank] += 1
        return clock

    def _message(self, stages: Sequence[Units], action: Action, rows: int) -> float:
        """Seconds of what a stage sends on, or of the gradient that goes back over the same boundary."""
        forward = action.kind == "F"
        sends = stages[action.stage if forward else action.stage - 1][-1].kind.sends
        nbytes = sum(size.at(rows) for size, has_gradient in sends if forward or has_gradient)
        return self.network.seconds("send", nbytes, self.network.boundary(self.mesh)) if nbytes else 0.0

    # ---- the end of a step ----

    def _replicas_of(self, part: Held) -> tuple[str, ...]:
        """The axes of replicas that hold the same parameters: those of dp_expert hold other experts."""
        degrees = self.mesh.degrees()
        axes = (axis for axis in ("dp_replicate", "dp_shard", "dp_expert") if degrees[axis] > 1)
        return tuple(axis for axis in axes if axis not in part.apart)

    def _of_state(self, stages: Sequence[Units]) -> tuple[float, float, float]:
        """Seconds of summing a rank's gradients and of gathering its parameters after the optimizer; bytes of gradients."""
        network = self.network
        sizes: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
        for part in (part for part in held_once(stages) if part.trained):
            key = part.axes, self._replicas_of(part)
            sizes[key] = sizes.get(key, 0.0) + part.elements * part.itemsize
        total, seconds = sum(sizes.values()), 0.0
        for (axes, replicas), nbytes in sizes.items():
            over = [*axes, *replicas] if not self.zero else [axis for axis in axes if axis != "cp"]
            seconds += network.seconds("all-reduce", nbytes, network.group_of_axes(self.mesh, over)) if over else 0.0
        if not self.zero:
            return seconds, 0.0, total
        messages = self._messages(stages)
        if self.zero == 1:
            seconds += messages * self._over_shards("reduce", total / messages)
        for replicas in {own for _, own in sizes}:
            others = [axis for axis in replicas if axis != "dp_shard"]
            nbytes = sum(each for (_, own), each in sizes.items() if own == replicas) / self.shards
            seconds += (
                network.seconds("all-reduce", nbytes, network.group_of_axes(self.mesh, others)) if others else 0.0
            )
        if self.zero == 3 or (self.zero == 2 and self.mesh.pp > 1):
            return seconds, 0.0, total
        parameters = sum(part.nbytes for part in held_once(stages) if part.trained) / messages
        return seconds, messages * self._over_shards("broadcast" if self.zero == 1 else "all-gather", parameters), total

    def _messages(self, stages: Sequence[Units]) -> int:
        """A block is summed by itself, so is what else a stage has, and what several stages have; of owners in a row each but the first
        begins inside of one of these, and none has less than a parameter."""
        several = {part.tied for units in stages for unit in units for part in unit.held if self.mesh.pp > 1} - {None}
        numbers = [len({part.tied for part in held_once(stages) if part.trained and part.tied in several})]
        apart, parameters = numbers[0], numbers[0]
        for units in stages:
            own = [
                (unit.has_blocks, sum(part.count for part in unit.held if part.trained and part.tied not in several))
                for unit in units
            ]
            apart += sum(1 for block, count in own if block and count) + any(count for block, count in own if not block)
            parameters += sum(count for _, count in own)
        return max(1, min(apart + (self.shards - 1 if self.zero == 1 else 0), parameters))

    def _late(
        self, stages: Sequence[Units], own: Sequence[int], costs: Sequence[Stage], row: Row
    ) -> tuple[float, float]:
        """Seconds by which a rank's sums of gradients end after its last action, and its gathers after its forwards would have begun."""
        reduce, gather, nbytes = self._of_state([stages[place] for place in own])
        elements = {place: sum(part.elements for part in held_once([stages[place]])) for place in own}
        share = {place: count / max(1, sum(elements.values())) for place, count in elements.items()}
        before, behind = dict.fromkeys(own, 0.0), dict.fromkeys(own, 0.0)
        if len(stages) > self.mesh.pp:  # a rank with one stage has nothing else to compute
            actions = [action for cell in row for action in cell]
            taken = [_seconds(costs[action.stage], action.kind) for action in actions]
            for place in own:
                first = next(number for number, each in enumerate(actions) if (each.stage, each.kind) == (place, "F"))
                last = max(number for number, each in enumerate(actions) if each.stage == place and each.kind != "F")
                before[place], behind[place] = sum(taken[:first]), sum(taken[last + 1 :])
        bucket = reduce * BUCKET / max(nbytes, BUCKET)
        free, done, waits = -1e30, 0.0, 0.0
        for place in sorted(own, key=lambda place: -behind[place]):  # the first that is done is summed first
            begins = max(free, -behind[place] - costs[place].backward)
            free = max(begins + reduce * share[place], -behind[place] + min(bucket, reduce * share[place]))
        for place in sorted(own, key=lambda place: before[place]):
            done += gather * share[place]
            waits = max(waits, done - before[place] - costs[place].forward)
        return max(0.0, free), waits

    def _optimizer(self, stages: Sequence[Units]) -> float:
        """Adam reads and writes a parameter and two of its size, reads the gradient and clears it; three passes. Gradients that are summed
        after the backwards were copied to flat tensors, and a rank's shard out of those.
        """
        trained = [part for part in self._copies(stages) if part.trained]
        nbytes = sum(part.elements * 8 * part.itemsize for part in trained)
        shards = self.shards if self.zero else 1
        summed = [part for part in held_once(stages) if part.trained and (self._replicas_of(part) or part.axes)]
        flat = sum(part.nbytes for part in summed) if self.zero < 2 else 0
        copied = 2 * flat + (2 * flat / shards if self.zero else 0)
        return (float(self.compute.traffic_s(3 * nbytes / shards + copied)) if nbytes else 0.0) + self._few_numbers()

    def _few_numbers(self) -> float:
        """The loss and, unless they are sharded, which gradients there are, over replicas; over all ranks the norm."""
        axes, group = self.mesh.degrees(), self.network.group_of_axes
        replicas = [axis for axis in ("dp_replicate", "dp_shard", "dp_expert") if axes[axis] > 1]
        times = 2 if self.zero < 2 else 1
        over_replicas = self.network.seconds("all-reduce", 8, group(self.mesh, replicas))
        return times * over_replicas + self.network.seconds("all-reduce", 8, group(self.mesh, list(axes)))

    # ---- bytes ----

    def peaks(self, stages: Sequence[Units], rows: int, microbatches: int, schedule: str) -> list[int]:
        """The most bytes that each pp rank holds at one time."""
        found = []
        for row in self.actions(len(stages), microbatches, schedule):
            own = sorted({action.stage for cell in row for action in cell})
            if len(stages) == 1:
                return [self.only_bytes(stages[0], rows, microbatches)]
            local = {place for place in own if place - 1 in own}
            kept = {place: in_flight_bytes(stages, place, rows, local) for place in own}
            apart = any(action.kind == "W" for cell in row for action in cell)
            halves = {place: halves_bytes(stages[place], rows, place == 0, apart) for place in own}
            left = {
                place: halves[place].left
                and kept[place] - kept_bytes(stages[place], rows) + halves[place].left + returned(stages, place, rows)
                for place in own
            }
            highest = most_kept(kept, left, halves, row, self.whole_bytes(stages, own))
            one = max(kept_bytes(stages[place], rows) for place in own)
            found.append(self.fixed_bytes(stages, own, rows, microbatches).most(highest, one))
        return found

    def fixed_bytes(self, stages: Sequence[Units], own: Sequence[int], rows: int, microbatches: int) -> Fixed:
        """What a rank with the stages ``own`` holds for the whole step, and at its end."""
        units = [unit for place in own for unit in stages[place]]
        messages = sum(arriving(stages, place, rows) + _coming_back(stages, place, rows) for place in own)
        if len(own) == 1 and len(stages) > 1:
            sent = stages[own[0]][-1].kind.memory.sent.at(rows) if own[0] + 1 < len(stages) else 0
            messages += max(sent, _coming_back(stages, own[0] - 1, rows) if own[0] else 0)
        inputs = {name: line.at(rows * microbatches) for unit in units for name, line in unit.inputs.items()}
        buffers = {name: nbytes for unit in units for name, nbytes in unit.buffers.items()}
        state = self._state([stages[place] for place in own])
        whole, shards = _trained(self._copies([stages[place] for place in own])), self.shards
        share, bucket = -(-whole // shards), self._bucket(stages, own)
        largest = self._largest([stages[place] for place in own])
        flat = self._flat(units) if self.zero == 1 else 0
        return Fixed(
            state + sum(buffers.values()) + sum(inputs.values()) + messages,
            self._gathered(stages, own),
            share if self.zero >= 2 else whole,
            max(share, largest) if self.zero else whole,
            max(bucket, flat),
            max(bucket, 2 * flat),
        )

    def _state(self, stages: Sequence[Units]) -> int:
        """Parameters and Adam's two tensors, each divided over dp_shard and cp from a ZeRO level on."""
        held, shards = self._copies(stages), self.shards
        sizes = {2: sum(part.nbytes for part in held), 1: 2 * _trained(held)}
        shared = {level: -(-nbytes // shards) if self.zero >= level else nbytes for level, nbytes in sizes.items()}
        return shared[2] + max(shared[1], 2 * self._largest(stages))

    def _largest(self, stages: Sequence[Units]) -> int:
        """At level 1, the largest parameter, which one rank updates."""
        trained = [part for part in self._copies(stages) if part.trained]
        return max((part.nbytes // part.elements * (part.largest or part.elements) for part in trained), default=0) * (
            self.zero == 1
        )

    def _copies(self, stages: Sequence[Units]) -> list[Held]:
        """A stage that is sharded has its own copy of what others have."""
        return held_once(stages) if self.zero < 2 else [part for units in stages for part in held_once([units])]

    def _flat(self, units: Units) -> int:
        """At level 1, the largest copy of the gradients of a unit; those of units that are like no other are one."""
        times = [sum(other.kind == unit.kind for other in units) for unit in units]
        once = sum(_trained(unit.held) for unit, count in zip(units, times) if count == 1)
        return max(once, *(_trained(unit.held) for unit, count in zip(units, times) if count > 1), 0)

    def only_bytes(self, units: Units, rows: int, microbatches: int) -> int:
        """The most bytes of a rank whose only stage has all ``units``: after each of its units is run forward, and backward."""
        fixed = self.fixed_bytes([units], [0], rows, microbatches)
        memories, kept, gone = [unit.kind.memory for unit in units], kept_bytes(units, rows), set[str]()
        groups: list[list[int]] = []
        for place, unit in enumerate(units):
            if place == 0 or not unit.joins:
                groups.append([])
            groups[-1].append(place)
        rest = sum(part.nbytes for unit in units for part in unit.held if part.rest)
        sizes = [[part for place in group for part in units[place].held] for group in groups]
        gathers = [sum(part.nbytes for part in parts if not part.rest) for parts in sizes]
        single, most = microbatches == 1, 0

        def total(beside: int, on_top: int) -> int:
            return in_all(done if single else fixed.gradients, beside, kept, on_top)

        done = flat = 0  # of gradients: bytes of shards, and the copy that is on its way
        for number in reversed(range(len(groups))):
            forward = backward = before = taken = 0  # before: while no gradients are there, what has arrived beside
            arrived = gathers[number] or (0 if any(gathers[:number]) else rest)
            earlier = (
                (gathers[number - 1] or (0 if any(gathers[: number - 1]) else rest))
                if number and gathers[number]
                else 0
            )
            if self.zero == 2:
                forward, backward = (
                    rest + sum(each) for each in (gathers, gathers[: number + 1] if single else gathers)
                )
                before = rest + sum(gathers[: number + 1]) + arrived
                taken = before + earlier
            if self.zero == 3:
                forward, backward = (sum(gathers[max(0, n) : n + 2]) + rest for n in (number, number - 1))
                before = forward = forward + arrived
                taken = gathers[number] + rest + arrived + earlier
            own = 0
            for place in reversed(groups[number]):
                memory = memories[place]
                fresh = [part for part in units[place].held if part.trained and part.tied not in gone]
                gone |= {part.tied for part in fresh if part.tied is not None}
                growing = single or self.zero >= 2
                with_own = own + flat + (memory.growth.at(rows) if fresh and growing else 0) if growing else 0
                if not single:
                    most = max(most, total(forward, memory.forward.at(rows)))
                if single or self.zero == 2:
                    most = max(most, in_all(0, before, kept, memory.forward.at(rows)))
                most = max(most, total(backward, memory.backward.at(rows) + with_own))
                kept -= memory.inside.at(rows) + self._between(memories, place, rows)
                own += _trained(fresh)
            if single or self.zero == 2:
                most = max(most, in_all(0, taken, kept, 0))
            if not single and self.zero == 3:
                most = max(most, total(taken, 0))
            after, stay = 0, single or self.zero == 3
            if self.zero >= 2 and (number or any(gathers) or not stay):
                after = rest + (
                    sum(gathers[(0 if self.zero == 2 else max(0, number - 2)) : number]) if stay else sum(gathers)
                )
            copies = {0: min(fixed.summed, done + own), 1: min(fixed.summed, own) + own * single}.get(
                self.zero, 2 * own
            )
            if self.zero >= 2 and not single and sum(part.count for part in sizes[number] if not part.rest) == 1:
                copies += -(-own // self.shards)
            share = -(-own // self.shards) if self.zero else own
            done, flat = done + share, own - share * (self.zero < 2)
            most = max(most, total(after, copies))
        return fixed.state + max(most, in_all(fixed.reduced, 0, 0, fixed.ending))

    @staticmethod
    def _between(memories: Sequence[UnitMemory], place: int, rows: int) -> int:
        """What the backward of a unit frees of the values that it received and sent."""
        last, own = place + 1 == len(memories), memories[place]
        found = own.sent.at(rows) if last else own.passed.at(rows) if own.held else 0
        if place and not memories[place - 1].held:
            found += min(memories[place - 1].passed.at(rows), memories[place].given.at(rows))
        return found

    def _bucket(self, stages: Sequence[Units], own: Sequence[int]) -> int:
        """The largest bucket of gradients that are all-reduced: over replicas, or where a tied parameter is on another rank, too. Those of
        ranks that share state are summed in flat copies of units, and all that are sharded."""
        held = held_once([stages[place] for place in own])
        others = {part.tied for place, units in enumerate(stages) if place not in own for part in held_once([units])}
        sizes: dict[object, int] = {}
        for part in (part for part in held if part.trained):
            shared = part.tied is not None and part.tied in others
            replicas = [axis for axis in self._replicas_of(part) if not self.zero or axis == "dp_expert"]
            key = part.axes, tuple(replicas if self.zero < 2 else ()), shared
            if any(key):
                nbytes = part.elements * part.itemsize
                sizes[key] = sizes.get(key, 0) + (-(-nbytes // self.shards) if self.zero else nbytes)
        assert max(sizes.values(), default=0) < BUCKET, "a bucket of these tests has all of its kind"
        return max(sizes.values(), default=0)

    def whole_bytes(self, stages: Sequence[Units], own: Sequence[int]) -> dict[int, tuple[int, int]]:
        """What a pipeline has of each stage beside its shards: parameters that it keeps gathered, gradients until it has reduced them."""
        held, piped = {place: held_once([stages[place]]) for place in own}, self.mesh.pp > 1
        gathers = self.zero == 2 or (self.zero == 3 and piped and not self.always)
        return {
            place: (
                sum(part.nbytes for part in parts) if gathers else 0,
                _trained(parts) - -(-_trained(parts) // self.shards) if self.zero >= 2 and piped else 0,
            )
            for place, parts in held.items()
        }

    def _gathered(self, stages: Sequence[Units], own: Sequence[int]) -> int:
        """Parameters that are gathered for a unit."""
        held, found = self._copies([stages[place] for place in own]), 0
        if self.zero == 3 and (self.mesh.pp == 1 or self.always):  # a unit, and the next one
            sizes: list[int] = []
            for place in own:
                for number, unit in enumerate(stages[place]):
                    if number == 0 or not unit.joins:
                        sizes.append(0)
                    sizes[-1] += sum(part.nbytes for part in unit.held if not part.rest)
            found += 2 * max(sizes)
            found += sum(part.nbytes for part in held if part.rest)
        return found


def _trained(held: Sequence[Held]) -> int:
    return sum(part.nbytes for part in held if part.trained)


def kept_bytes(units: Units, rows: int) -> int:
    """What a microbatch keeps from its forward to its backward in a stage."""
    memories = [unit.kind.memory for unit in units]
    found = sum(each.inside.at(rows) for each in memories) + max(each.shared.at(rows) for each in memories)
    for before, after in itertools.pairwise(memories):
        passed = before.passed.at(rows)
        found += passed if before.held else min(passed, after.given.at(rows))
    return found + memories[-1].sent.at(rows)


def on_top_bytes(units: Units, rows: int) -> int:
    """What the running unit of a stage needs on top."""
    return max(max(unit.kind.memory.forward.at(rows), unit.kind.memory.backward.at(rows)) for unit in units)


class Fixed(NamedTuple):
    """What a rank holds for the whole step: state and messages, what is gathered of a unit, gradients; those that are left at the end, what
    sums need on top while a microbatch may be there, and in the end."""

    state: int
    gathered: int
    gradients: int
    reduced: int
    summed: int
    ending: int

    def most(self, highest: tuple[int, int, int], one: int) -> int:
        """The most bytes of a rank of a pipeline: ``highest`` as :func:`most_kept` has it, ``one`` microbatch of a stage."""
        kept, whole, on_top = highest
        on_top = max(on_top, self.summed + one - kept)
        running = in_all(self.gradients, self.gathered + whole, kept, on_top)
        return self.state + max(running, in_all(self.reduced, 0, 0, self.ending))


class Halves(NamedTuple):
    """What a microbatch keeps for the second half of its backward, and what actions need on top: by their kind."""

    left: int
    whole: int
    first: int
    second: int

    def on_top(self, kind: str) -> int:
        return {"I": self.first, "W": self.second}.get(kind, self.whole)


def halves_bytes(units: Units, rows: int, first: bool, apart: bool) -> Halves:
    """Of a stage of ``units``, the ``first`` or another; ``apart``: its backward runs in halves, if it can."""
    kept, on_top, own = kept_bytes(units, rows), on_top_bytes(units, rows), [unit.kind.memory for unit in units]
    backward = first_half = max(each.backward.at(rows) for each in own)
    if (
        not apart or first or not all(each.splits for each in own)
    ):  # in others than the first stage, the first half does all
        return Halves(0 if apart and not first else kept, on_top, backward, backward)
    within = [each.outer.at(rows) for each in own[:-1]] + [0]  # a stage is given the gradient of what it sends
    made, less = [each.for_weights.at(rows) for each in own], own[-1].freed.at(rows)
    for place, each in enumerate(own):
        before = sum(made[place + 1 :]) + sum(within[place:]) - (less if place + 1 < len(own) else 0)
        first_half = max(first_half, before + each.input_half.at(rows))
    return Halves(
        kept + max(0, sum(made + within) - less), on_top, first_half, max(each.weight_half.at(rows) for each in own)
    )


def returned(stages: Sequence[Units], place: int, rows: int) -> int:
    """The gradients of what a stage received, and of what it sent."""
    return sum(_coming_back(stages, each, rows) for each in (place - 1, place) if each >= 0)


def in_flight_bytes(stages: Sequence[Units], place: int, rows: int, local: Collection[int] = ()) -> int:
    """What a microbatch in flight takes in a stage: what is kept, and what it received, if that is no tensor of the same rank."""
    return kept_bytes(stages[place], rows) + (0 if place in local else arriving(stages, place, rows))


def most_kept(
    kept: Mapping[int, int],
    left: Mapping[int, int],
    halves: Mapping[int, Halves],
    row: Row,
    whole: Mapping[int, tuple[int, int]],
) -> tuple[int, int, int]:
    """The most bytes at one time on a rank that runs ``row``: ``kept`` by microbatches of its stages, or ``left`` for second halves of
    backwards; ``whole`` state; and what the running action needs on top."""
    actions = [action for cell in row for action in cell]
    most, alive, waiting = (0, 0, 0), dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)
    for number, action in enumerate(actions):
        ahead, behind = actions[number:], actions[: number + 1]
        gathered = [s for s in kept if any(a.stage == s for a in ahead) and any(a.stage == s for a in behind)]
        summing = [s for s in gathered if any(a.stage == s and a.kind != "F" for a in behind)]
        alive[action.stage] += action.kind == "F"
        now = sum(alive[s] * kept[s] + waiting[s] * left[s] for s in kept)
        beside = sum(whole[s][0] for s in gathered) + sum(whole[s][1] for s in summing)
        on_top = max(each.on_top(action.kind) for each in halves.values())
        most = max(most, (now, beside, on_top), key=sum)
        alive[action.stage] -= action.kind in ("B", "I")
        waiting[action.stage] += (action.kind == "I") - (action.kind == "W")
    return most


def in_all(fixed: int, beside: int, most: int, on_top: int) -> int:
    """All bytes of a rank, with the allocator's overhead on what comes and goes."""
    return fixed + beside + most + on_top + round(SLACK * (most + on_top + beside))


def held_once(stages: Sequence[Units]) -> list[Held]:
    """The parameters of a rank's stages, tied ones once."""
    seen, found = set[str](), []
    for part in (part for units in stages for unit in units for part in unit.held):
        if part.tied is None or part.tied not in seen:
            found.append(part)
        seen |= {part.tied} if part.tied is not None else set()
    return found


def arriving(stages: Sequence[Units], place: int, rows: int) -> int:
    """What a microbatch sends to a stage."""
    return stages[place][0].kind.memory.received.at(rows) if place else 0


def _coming_back(stages: Sequence[Units], place: int, rows: int) -> int:
    sends = stages[place][-1].kind.sends if place + 1 < len(stages) else ()
    return sum(round(size.at(rows)) for size, has_gradient in sends if has_gradient)


def _seconds(cost: Stage, kind: str) -> float:
    return {"F": cost.forward, "B": cost.backward, "I": cost.backward - cost.weight, "W": cost.weight}[kind]


def _result(action: Action) -> Result:
    return action.stage, action.kind == "F", action.microbatch


def _needs(cell: tuple[Action, ...], stages: int) -> list[Result]:
    """What other stages must have sent before a rank runs ``cell``."""
    found: list[Result] = []
    for action in cell:
        if action.kind == "F" and action.stage:
            found.append((action.stage - 1, True, action.microbatch))
        elif action.kind in ("B", "I") and action.stage + 1 < stages:
            found.append((action.stage + 1, False, action.microbatch))
    return found
