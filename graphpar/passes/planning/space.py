"""``Space``: every plan that is legal for a program on a cluster, as candidates without prices.

mesh (pp x dp_replicate x ... x tp) x ZeRO level x reshard policy x schedule x stages a rank x microbatches ──► Candidate

What a user pins constrains it. What is recomputed is chosen for each candidate (:mod:`graphpar.passes.planning.search`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt
from graphpar.passes.normalize.coupled import is_coupled, program_mesh
from graphpar.passes.planning.candidates import Candidate
from graphpar.passes.planning.constraints import (
    PlanConstraints,
    check_on_mesh,
    compiles,
    coupling_reason,
    free_axes,
    global_batch,
    usual_schedule,
)
from graphpar.passes.planning.recomputation import kinds_of
from graphpar.passes.planning.split_points import marked_split_points, pinned_split_points
from graphpar.passes.sharding.exchange import exchangeable
from graphpar.passes.sharding.experts import find_experts
from graphpar.passes.split import positions_of
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import TRAIN, Recompute
from graphpar.runtime.options import level_of, numbered
from graphpar.runtime.schedule_records import SCHEDULES, canonical_name
from graphpar.schedules.registry import legal_microbatches

State = tuple[int, str | int]
"""A ZeRO level, and when gathered parameters are freed."""


def experts_of(program: Program) -> frozenset[int]:
    """Return the numbers of experts of the program's layers that are stacked; others tp divides as ep would."""
    graphs = (program.graph, *(block.graph for block in program.blocks.values()))
    return frozenset(number for graph in graphs for number in find_experts(graph.nodes, {}).counts.values())


class Space:
    """The candidates for ``batch`` rows of ``program``; ``refused`` collects why some meshes can't be.

    Sequences are divided (cp) only where there are fewer rows than devices to take them, unless ``any_cp``: a rank with rows of its own
    computes the same without sending keys and values. Experts are divided where a program has some.
    """

    def __init__(self, program: Program, pins: PlanConstraints) -> None:
        assert pins.cluster is not None
        self.program, self.cluster, self.pins, self.pinned = program, pins.cluster, pins, dict(pins.mesh)
        self.batch = global_batch(program, pins)
        self.kinds = kinds_of(program, pins)
        self.refused: dict[str, None] = {}
        self._compiled: dict[str, bool] = {}
        self.any_cp = False

    def kinds_beside(self, overlap_tp: bool) -> tuple[Recompute, ...]:
        """Return what blocks may recompute, the least first: no budgets, which number operators, where tp runs these in pieces."""
        return tuple(kind for kind in self.kinds if not overlap_tp or numbered(kind) is None)

    def divide_any_sequence(self) -> None:
        """Let sequences be divided wherever they can be."""
        self.any_cp = True
        for name in ("all", "order", "divides_sequences", "_middle_sizes"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates."""
        return tuple(self.candidates())

    @functools.cached_property
    def order(self) -> list[int]:
        """The place of each candidate among all where equally fast ones are in the order of their keys."""
        places = [0] * len(self.all)
        for place, number in enumerate(sorted(range(len(self.all)), key=lambda number: self.all[number].key)):
            places[number] = place
        return places

    def middle_size(self, compute: Mesh) -> int:
        """Return the middle one of the microbatch sizes of the candidates whose compute axes are ``compute``; 1 where there are none."""
        return self._middle_sizes.get(compute, 1)

    @functools.cached_property
    def _middle_sizes(self) -> dict[Mesh, int]:
        sizes: dict[Mesh, set[int]] = {}
        for mesh, size in dict.fromkeys((each.mesh, each.microbatch_size) for each in self.all):
            sizes.setdefault(program_mesh(self.program, mesh), set()).add(size)
        return {compute: sorted(found)[len(found) // 2] for compute, found in sizes.items()}

    def meshes(self) -> list[Mesh]:
        """Return every factorisation of the devices over the axes that are not pinned.

        Raises:
            GraphparError: the pinned degrees don't divide the number of devices.
        """
        fixed = math.prod(self.pinned.values())
        if self.cluster.size % fixed:
            shown = ", ".join(f"{axis}={degree}" for axis, degree in self.pinned.items())
            raise GraphparError(
                f"{self.cluster.size} devices don't divide by the mesh's {shown}; take a multiple of {fixed} devices, or other degrees."
            )
        free = free_axes(self.pinned, self.pins.zero, self.program.mode)
        experts: frozenset[int] = frozenset()
        sent: frozenset[int] = frozenset()
        if free:
            experts = frozenset() if "ep" in self.pinned else experts_of(self.program)
            if not is_coupled(self.program):
                sent = frozenset(exchangeable(self.program).values())
            able = {"dp_expert": bool(sent), "cp": True, "ep": bool(experts)}
            free += tuple(axis for axis, helps in able.items() if helps and axis not in self.pinned)
        found = [
            Mesh(**(self.pinned | dict(zip(free, degrees))))
            for degrees in _factorisations(self.cluster.size // fixed, len(free))
        ]
        one_kind = [mesh for mesh in found if self.cluster.kinds_of_stages(mesh.pp, mesh.size // mesh.pp) is not None]
        if not one_kind:
            sizes = [each.size for each in self.cluster.groups]
            held = ", ".join(f"{each.size} of {each.device.name}" for each in self.cluster.groups)
            raise GraphparError(
                f"A stage runs on equal devices, and {self.cluster} has {held}: take a pp whose stages have a number of ranks that divides "
                f"these, so {self.cluster.size // math.gcd(*sizes)} or a multiple."
            )
        legal = [
            mesh
            for mesh in one_kind
            if (mesh.shards > 1 or not self.pins.zero)
            and (mesh.cp == 1 or self.any_cp or not self._has_rows_for_more(mesh))
            and not any(count % mesh.ep for count in experts)
            and not any(count % (mesh.ep * mesh.dp_expert) for count in sent)
            and not (mesh.ep > 1 and mesh.dp_expert > 1 and not {"ep", "dp_expert"} <= set(self.pinned))
        ]
        return sorted(legal, key=lambda mesh: tuple(mesh.degrees().values()))

    @functools.cached_property
    def divides_sequences(self) -> bool:
        """Whether some mesh that is tried divides sequences."""
        return any(mesh.cp > 1 for mesh in self.meshes())

    def _has_rows_for_more(self, mesh: Mesh) -> bool:
        """Whether some ranks of the mesh's cp could be replicas with rows of their own instead."""
        if "cp" in self.pinned or not {"dp_replicate", "dp_shard"} - set(self.pinned):
            return False
        able = mesh.replicas * mesh.cp
        return any(able % number == 0 == self.batch % number for number in range(mesh.replicas + 1, able + 1))

    def states(self, mesh: Mesh) -> Iterator[State]:
        """Yield the ways of sharding state over ``mesh`` that the pins allow."""
        levels: tuple[int, ...] = (1, 2, 3)
        if mesh.dp_shard == 1:
            levels = (0, *levels) if self._shares_sequences(mesh) else (0,)
        if self.pins.zero is not None:
            levels = (level_of(mesh, self.pins.zero),)
        for level in levels:
            policies: tuple[str | int, ...] = ("default", "always") if level == 3 and mesh.pp > 1 else ("default",)
            for reshard in policies if self.pins.reshard is None else (self.pins.reshard,):
                try:
                    check_on_mesh(mesh, replace(self.pins, zero=level, reshard=reshard), self.program)
                except GraphparError as error:
                    self.refused[str(error)] = None
                else:
                    yield level, reshard

    def _shares_sequences(self, mesh: Mesh) -> bool:
        """Whether ranks of cp alone may share state: as for ``free_axes``, not where replicas are to hold all of it."""
        return self.program.mode == "train" and mesh.cp > 1 and self.pinned.get("dp_replicate", 1) == 1

    def candidates(self) -> Iterator[Candidate]:
        """Yield every legal candidate; those whose mesh can't divide the batch are left out."""
        for mesh in self.meshes():
            if self.batch % mesh.replicas:
                continue
            rows, overlaps = self.batch // mesh.replicas, self._overlaps(mesh)
            for zero, reshard in self.states(mesh):
                for schedule, depth, split_points in self._schedules(mesh, zero, reshard):
                    counts = legal_microbatches(schedule, mesh.pp, depth, rows) if mesh.pp > 1 else divisors(rows)
                    compiled = self._compiles(schedule)
                    for count in counts:
                        size = rows // count
                        if (count == 1 or self.splits) and self.pins.microbatch_size in (None, size):
                            for overlap in overlaps:
                                yield Candidate(
                                    mesh, schedule, depth, size, count, split_points, zero, reshard, overlap, compiled
                                )

    def _compiles(self, schedule: str) -> bool:
        """Whether blocks are compiled under ``schedule``."""
        if schedule not in self._compiled:
            self._compiled[schedule] = compiles(self.program, self.pins, schedule)
        return self._compiled[schedule]

    @functools.cached_property
    def splits(self) -> bool:
        """Whether the batch can be split into microbatches."""
        return coupling_reason(self.program, self.pins) is None

    def _overlaps(self, mesh: Mesh) -> tuple[bool, ...]:
        """Return whether collectives of tp may run beside products on ``mesh``: a CPU sends and multiplies in turn."""
        if self.pins.overlap_tp is not None:
            return (self.pins.overlap_tp,)
        within = 1 < mesh.tp <= self.cluster.devices_per_node
        return (False, True) if within and self.cluster.device.kind != "cpu" and self.kinds_beside(True) else (False,)

    @functools.cached_property
    def _has_split_points(self) -> bool:
        given = self.pins.split_points, self.pins.stages, self.pins.layers_per_stage, self.pins.edge_layers
        return any(each is not None for each in (*given, marked_split_points(self.program)))

    def _split_points(self, mesh: Mesh, schedule: str) -> tuple[SplitAt, ...]:
        given = pinned_split_points(self.program, mesh, replace(self.pins, schedule=schedule))
        assert given is not None
        positions_of(self.program, given)
        return given

    @property
    def _is_given(self) -> bool:
        """Whether the whole mesh is pinned: then a schedule that is asked for does not ask for a pipeline."""
        return math.prod(self.pinned.values()) == self.cluster.size

    def _schedules(
        self, mesh: Mesh, zero: int, reshard: str | int
    ) -> Iterator[tuple[str, int, tuple[SplitAt, ...] | None]]:
        """Yield (name, stages a rank, split points if they are pinned)."""
        pinned_schedule = canonical_name(self.pins.schedule) if self.pins.schedule else None
        if mesh.pp == 1:
            given = (
                pinned_schedule
                if self._is_given and pinned_schedule is not None and SCHEDULES[pinned_schedule].min_stages == 1
                else None
            )
            if not self._has_split_points and (pinned_schedule is None or given is not None):
                yield given or usual_schedule(self.program, self.pins), 1, None
            return
        for row in SCHEDULES.values():
            if (pinned_schedule is None and row.torch_class is None) or pinned_schedule not in (None, row.name):
                continue
            if row.splits_backward and self.pins.compile:
                continue
            if self.program.mode != TRAIN and (row.splits_backward or row.min_stages > 1):
                continue
            if row.splits_backward and zero >= 2 and reshard not in ("default", "never"):
                continue
            if not self._has_split_points:
                yield from ((row.name, depth, None) for depth in row.searched_stages)
                continue
            try:
                split_points = self._split_points(mesh, row.name)
            except GraphparError as error:
                self.refused[str(error)] = None
                continue
            depth, rest = divmod(len(split_points) + 1, mesh.pp)
            if not rest and row.min_stages <= depth <= (row.max_stages or depth):
                yield row.name, depth, split_points


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        if number == 1:
            yield ()
        return
    for divisor in divisors(number):
        for rest in _factorisations(number // divisor, parts - 1):
            yield (divisor, *rest)


def divisors(number: int) -> list[int]:
    """Return the numbers that divide ``number``, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
