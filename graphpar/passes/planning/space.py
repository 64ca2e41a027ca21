"""``Space``: every plan that is legal for a program on a cluster, as candidates without prices.

mesh (pp x dp_replicate x ... x tp) x ZeRO level x reshard policy x schedule x stages a rank x microbatches ──► Candidate

What a user pins constrains it. What is recomputed is chosen for each candidate (:mod:`graphpar.passes.planning.planner`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping

from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt
from graphpar.passes.normalize.coupled import program_mesh
from graphpar.passes.planning.candidates import Candidate, PlannerConstraints
from graphpar.passes.sharding.exchange import exchangeable
from graphpar.passes.sharding.experts import find_experts
from graphpar.runtime.axes import AXIS
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.modes import TRAIN
from graphpar.runtime.options import level_of
from graphpar.schedules.registry import SCHEDULES, legal_microbatches

FREE_AXES = tuple(name for name, axis in AXIS.items() if axis.searched)
"""The axes whose degrees are searched where they are not pinned."""
DEPTHS = (2, 3, 4)
"""Stages a rank to try for schedules that take any number of them."""
DEEP = {"Interleaved1F1B": (6, 8, 16)}
"""More of them for schedules of which published runs have as many."""
State = tuple[int, str | int]
"""A ZeRO level, and when gathered parameters are freed."""


def free_axes(pinned: Collection[str], zero: int | None, mode: str = "train") -> tuple[str, ...]:
    """Return the axes that are searched where some are pinned.

    A pinned dp_replicate says how replicas are to be made, so state is then sharded only where a ZeRO level is asked for.
    """
    sharded = mode == "train" and (zero or (zero is None and "dp_replicate" not in pinned))
    return tuple(axis for axis in FREE_AXES if axis not in pinned and (sharded or axis != "dp_shard"))


def experts_of(program: Program) -> frozenset[int]:
    """Return the numbers of experts of the program's layers that are stacked; others tp divides as ep would."""
    graphs = (program.graph, *(block.graph for block in program.blocks.values()))
    return frozenset(number for graph in graphs for number in find_experts(graph.nodes, {}).counts.values())


class Space:
    """The candidates for ``batch`` rows of ``program``; ``refused`` collects why some meshes can't be.

    Sequences are divided (cp) only where there are fewer rows than devices to take them, unless ``any_cp``: a rank with rows of its own
    computes the same without sending keys and values. Experts are divided where a program has some.
    """

    def __init__(
        self, program: Program, cluster: Cluster, batch: int, pinned: Mapping[str, int], wishes: PlannerConstraints
    ) -> None:
        self.program, self.cluster, self.batch = program, cluster, batch
        self.pinned, self.wishes = dict(pinned), wishes
        self.refused: dict[str, None] = {}
        self.any_cp = False
        self._around: Space | None = None

    def lies_in(self, other: Space) -> None:
        """Take the candidates of ``other`` that can be here too; those are all that there are."""
        self._around = other

    def divide_any_sequence(self) -> None:
        """Let sequences be divided wherever they can be."""
        self.any_cp = True
        for name in ("all", "order", "divides_sequences", "_middle_sizes"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates."""
        if self._around is None or self._around.any_cp != self.any_cp:
            return tuple(self.candidates())
        able = {
            (mesh, *state) for mesh in self.meshes() if not self.batch % mesh.replicas for state in self.states(mesh)
        }
        return tuple(each for each in self._around.all if (each.mesh, each.zero, each.reshard) in able)

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
        free = free_axes(self.pinned, self.wishes.zero, self.program.mode)
        experts: frozenset[int] = frozenset()
        sent: frozenset[int] = frozenset()
        if free:
            experts = frozenset() if "ep" in self.pinned else experts_of(self.program)
            if not self.program.couplings and self.program.unsplittable is None:
                sent = frozenset(exchangeable(self.program).values())
            able = {"dp_expert": bool(sent), "cp": True, "ep": bool(experts)}
            free += tuple(axis for axis, helps in able.items() if helps and axis not in self.pinned)
        found = [
            Mesh(**(self.pinned | dict(zip(free, degrees))))
            for degrees in _factorisations(self.cluster.size // fixed, len(free))
        ]
        legal = [
            mesh
            for mesh in found
            if (mesh.shards > 1 or not self.wishes.zero)
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
        if self.wishes.zero is not None:
            levels = (level_of(mesh, self.wishes.zero),)
        for level in levels:
            policies: tuple[str | int, ...] = ("default", "always") if level == 3 and mesh.pp > 1 else ("default",)
            for reshard in policies if self.wishes.reshard is None else (self.wishes.reshard,):
                try:
                    if self.wishes.check is not None:
                        self.wishes.check(mesh, level, reshard)
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
            rows = self.batch // mesh.replicas
            for zero, reshard in self.states(mesh):
                for schedule, depth, split_points in self._schedules(mesh, zero, reshard):
                    counts = legal_microbatches(schedule, mesh.pp, depth, rows) if mesh.pp > 1 else divisors(rows)
                    for count in counts:
                        if self._wanted(rows // count, count):
                            size = rows // count
                            yield Candidate(mesh, schedule, depth, size, count, split_points, zero, reshard)

    def _wanted(self, size: int, count: int) -> bool:
        if self.wishes.one_microbatch and count > 1:
            return False
        return self.wishes.microbatch_size in (None, size)

    @property
    def _is_given(self) -> bool:
        """Whether the whole mesh is pinned: then a schedule that is asked for does not ask for a pipeline."""
        return math.prod(self.pinned.values()) == self.cluster.size

    def _schedules(
        self, mesh: Mesh, zero: int, reshard: str | int
    ) -> Iterator[tuple[str, int, tuple[SplitAt, ...] | None]]:
        """Yield (name, stages a rank, split points if they are pinned)."""
        wished = self.wishes.schedule
        if mesh.pp == 1:
            given = wished if self._is_given and wished is not None and SCHEDULES[wished].min_stages == 1 else None
            if self.wishes.split_points is None and (wished is None or given is not None):
                yield given or ("1F1B" if self.program.mode == "train" else "GPipe"), 1, None
            return
        for row in SCHEDULES.values():
            if (wished is None and row.torch_class is None) or wished not in (None, row.name):
                continue
            if row.splits_backward and self.wishes.whole_backwards:
                continue
            if self.program.mode != TRAIN and (row.splits_backward or row.min_stages > 1):
                continue
            if row.splits_backward and zero >= 2 and reshard not in ("default", "never"):
                continue
            if self.wishes.split_points is None:
                depths = (
                    [row.default_stages]
                    if row.max_stages is not None
                    else [d for d in (*DEPTHS, *DEEP.get(row.name, ())) if d >= row.min_stages]
                )
                yield from ((row.name, depth, None) for depth in depths)
                continue
            try:
                split_points = self.wishes.split_points(mesh, row.name)
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
