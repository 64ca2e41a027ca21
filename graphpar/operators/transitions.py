"""Redistribution between the types of a tensor on one mesh axis: which functions exist, what they send, and the cheapest path.

    path(P, S(0))     reduce_scatter(x, axis, dim=0)
    path(I, P)        sum_gradient(x, axis), then first_only(x, axis)
    path(R, E(offs))  expert_rows(x, axis, rank_ends(offs, axis))
    path(R, I)        None: no function turns a value that the ranks use differently into one that they use alike

The functions are those of ``graphpar.emitted.collectives``, and where rows of experts come or go, of ``expert_rows``. The gradient of R is
P, of I is I, of S is S, of P is R, so each transition has one backward, and each path is right in both directions by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from graphpar.emitted import collectives, expert_rows
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard, Type


@dataclass(frozen=True)
class Cost:
    """What one rank sends: bytes, and how many messages in sequence."""

    bytes_sent: float = 0.0
    messages: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes_sent + other.bytes_sent, self.messages + other.messages)


def collective_cost(collective: str | None, whole: float, degree: int) -> Cost:
    """Return what each rank of a ring sends for a tensor of ``whole`` bytes (all shards together); nothing for ``None``.

    A send is of a message of ``whole`` bytes, to one other rank.

    Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    if collective is None:
        return Cost()
    once = whole * (degree - 1) / degree
    return {
        "all-reduce": Cost(2 * once, 2 * (degree - 1)),
        "all-gather": Cost(once, degree - 1),
        "reduce-scatter": Cost(once, degree - 1),
        "all-to-all": Cost(once / degree, degree - 1),
        "send": Cost(whole, 1),
    }[collective]


@dataclass(frozen=True)
class Transition:
    """A function from one kind of type (R, I, S, P or E) to another: what it does forward and backward, by which collective."""

    source: str
    target: str
    function: str | None
    """Its name; ``None`` where there is nothing to do."""
    forward: str
    backward: str
    forward_collective: str | None = None
    backward_collective: str | None = None

    @property
    def called(self) -> Callable[..., Any]:
        """The function itself."""
        called: Callable[..., Any] = getattr(expert_rows if self.of_rows else collectives, str(self.function))
        return called

    @property
    def of_rows(self) -> bool:
        """Whether it is of the rows of experts."""
        return "E" in (self.source, self.target)


TABLE = (
    Transition("I", "R", "sum_gradient", "nothing", "all-reduce", None, "all-reduce"),
    Transition("P", "I", "all_reduce", "all-reduce", "nothing", "all-reduce", None),
    Transition("P", "R", "all_reduce_both", "all-reduce", "all-reduce", "all-reduce", "all-reduce"),
    Transition("P", "S", "reduce_scatter", "reduce-scatter", "all-gather", "reduce-scatter", "all-gather"),
    Transition("S", "R", "all_gather", "all-gather", "reduce-scatter", "all-gather", "reduce-scatter"),
    Transition("S", "I", "all_gather_invariant", "all-gather", "slice", "all-gather", None),
    Transition("R", "S", "shard", "slice", "pad with zeros"),
    Transition("I", "S", "shard_invariant", "slice", "all-gather", None, "all-gather"),
    Transition("S", "S", "all_to_all", "all-to-all", "all-to-all", "all-to-all", "all-to-all"),
    Transition("R", "P", "first_only", "zero on all ranks but the first", "zero on all ranks but the first"),
    Transition("R", "E", "expert_rows", "rows of own experts", "pad with zeros"),
    Transition("E", "P", "expert_sums", "pad with zeros", "rows of own experts"),
)
"""Every transition of a tensor that has a gradient."""

EXCHANGES = (
    Transition("S", "E", "send_rows", "rows to their experts", "gradients back", "all-to-all", "all-to-all"),
    Transition("E", "S", "return_rows", "rows back", "gradients to their experts", "all-to-all", "all-to-all"),
    Transition("S", "E", "start_send", "rows to their experts", "gradients back", "all-to-all", "all-to-all"),
    Transition("E", "E", "finish_send", "wait", "begin"),
    Transition("E", "E", "start_return", "rows back", "gradients to their experts", "all-to-all", "all-to-all"),
    Transition("E", "S", "finish_return", "wait", "begin"),
)
"""Between replicas that hold different experts (:mod:`graphpar.passes.sharding.exchange`); no search chooses them."""
ROUNDED = Transition("S", "R", "all_gather_rounded", "all-gather", "reduce-scatter", "all-gather", "reduce-scatter")
"""In the place of ``all_gather`` before products in 8 bits (:mod:`graphpar.emitted.fp8_gathers`)."""
HALVES = {
    "send_rows": (expert_rows.start_send, expert_rows.finish_send),
    "return_rows": (expert_rows.start_return, expert_rows.finish_return),
}
"""The functions that begin what another does, and end it (:mod:`graphpar.passes.sharding.overlapped_exchange`)."""
FUNCTIONS = {row.function: row for row in (*TABLE, *EXCHANGES, ROUNDED)}
"""Every transition by the name of its function."""

WITHOUT_GRADIENT = (
    Transition("R", "I", None, "nothing", "nothing"),
    Transition("I", "R", None, "nothing", "nothing"),
    *(row for row in TABLE if row.function in ("all_reduce", "reduce_scatter", "all_gather", "shard", "all_to_all", "first_only",
                                               "expert_rows", "expert_sums")),
)  # fmt: skip
"""Every transition of a tensor that has none: R and I are the same."""


SENDS = frozenset(name for send, (start, _) in HALVES.items() for name in (send, start.__name__))
"""The names of the functions by which rows travel."""
STARTS = tuple(start for start, _ in HALVES.values())
"""The functions that begin to send rows, which travel while something else runs."""


def travelling_beside(node: fx.Node) -> list[fx.Node]:
    """Return what a rank computes while rows travel that ``node`` begins to send; nothing of others."""
    if node.target not in STARTS:
        return []
    (finish,), found = node.users, list[fx.Node]()
    while (node := node.next) is not finish:
        found.append(node)
    return found


@dataclass(frozen=True)
class Step:
    """One transition between two given types."""

    transition: Transition
    source: Type
    target: Type

    @property
    def function(self) -> str | None:
        """The name of the function; ``None`` where there is nothing to do."""
        return self.transition.function

    @property
    def offsets(self) -> str:
        """The name of the value [experts] that says where each expert's rows end; empty for a step without ``E``."""
        return next((kind.offsets for kind in (self.source, self.target) if isinstance(kind, ExpertRows)), "")

    def options(self, shape: Sequence[int], degree: int) -> dict[str, Any]:
        """Return the keyword arguments of the function.

        Args:
            shape: of the tensor before this axis shards it (outer axes have sharded it already).
        """
        options: dict[str, Any] = {}
        if self.offsets:
            return options
        shards = [kind for kind in (self.source, self.target) if isinstance(kind, Shard)]
        for kind, prefix in zip(shards, ("from_", "to_") if len(shards) == 2 else ("",)):
            options[f"{prefix}dim"] = kind.dim
            if kind.parts:
                options[f"{prefix}parts"] = kind.parts
        if isinstance(self.source, Shard) and not self.source.parts and shape[self.source.dim] % degree:
            options["size"] = int(shape[self.source.dim])
        return options

    def bytes_moved(self, whole: float, degree: int) -> tuple[Cost, Cost]:
        """Return what the forward and the backward send, for a tensor of ``whole`` bytes before this axis shards it."""
        row = self.transition
        return tuple(  # type: ignore[return-value]
            collective_cost(name, whole, degree) for name in (row.forward_collective, row.backward_collective)
        )

    def cost(self, whole: float, degree: int, train: bool = True) -> Cost:
        """Return what the forward sends, and with ``train`` the backward too."""
        forward, backward = self.bytes_moved(whole, degree)
        return forward + backward if train else forward


@cache
def path(source: Type, target: Type, differentiable: bool = True) -> tuple[Step, ...] | None:
    """Return the cheapest steps from one type to another, ``()`` between equal ones, ``None`` where there are none.

    Steps in between end in R or I only: the tensor may have no dim to shard, and stopping at P gains nothing. So there are
    none from R to I, unless the tensor has no gradient. Rows of experts can only become a partial sum.
    The order of costs is the same for every size and degree.
    """
    if source == target:
        return ()
    found: list[tuple[Step, ...]] = []
    stops = (P, R, I) if isinstance(source, ExpertRows) else (R, I)
    for count in range(3):
        for between in itertools.permutations(stops, count):
            steps = _steps((source, *between, target), differentiable)
            if steps is not None:
                found.append(steps)
    return min(found, key=lambda steps: _order(steps, differentiable), default=None)


@cache
def moves(
    source: tuple[Type, ...], target: tuple[Type, ...], differentiable: bool = True
) -> tuple[tuple[int, Step], ...] | None:
    """Return the steps between types on several axes (outermost first) as (position of the axis, step), in the order to take them.

    Steps that make the tensor smaller come first. Where two axes shard one dim, the inner axis shards the shards of the outer, so
    an outer axis can shard or gather only while no inner one shards that dim; where that never happens there is no path (``None``).
    """
    now, found = list(source), []
    while now != list(target):
        places = [
            place for place in range(len(now)) if now[place] != target[place] and _is_free(now, target[place], place)
        ]
        if not places:
            return None
        place = min(places, key=lambda i: (isinstance(now[i], Shard) or not isinstance(target[i], Shard), i))
        steps = path(now[place], target[place], differentiable)
        if steps is None:
            return None
        found += [(place, step) for step in steps]
        now[place] = target[place]
    return tuple(found)


def _is_free(now: Sequence[Type], target: Type, place: int) -> bool:
    """Whether no inner axis shards the dim that the axis at ``place`` shards or will shard; for rows of experts, no axis at all."""
    ends = (now[place], target)
    dims = {kind.dim for kind in ends if isinstance(kind, Shard)}
    alone = any(isinstance(kind, ExpertRows) for kind in ends)
    others = [*(now[:place] if alone else ()), *now[place + 1 :]]
    return not any(isinstance(kind, Shard) and kind.dim in dims for kind in others)


def _steps(types: tuple[Type, ...], differentiable: bool) -> tuple[Step, ...] | None:
    steps = tuple(_step(a, b, differentiable) for a, b in itertools.pairwise(types))
    return None if None in steps else steps  # type: ignore[return-value]


def _step(source: Type, target: Type, differentiable: bool) -> Step | None:
    if "S" == _type_letter(source) == _type_letter(target) and source.dim == target.dim:  # type: ignore[union-attr]
        return None  # all-to-all is between two dims; it can't shard the same dim in another way
    if source == target:
        return None
    kinds = _type_letter(source), _type_letter(target)
    rows = TABLE if differentiable else WITHOUT_GRADIENT
    row = next((row for row in rows if (row.source, row.target) == kinds), None)
    return None if row is None else Step(row, source, target)


def _type_letter(kind: Type) -> str:
    if isinstance(kind, ExpertRows):
        return "E"
    return "S" if isinstance(kind, Shard) else kind.letter


def _order(steps: tuple[Step, ...], differentiable: bool) -> tuple[float, int, int]:
    total = sum((step.cost(1.0, 2, differentiable) for step in steps), Cost())
    return total.bytes_sent, total.messages, len(steps)
