"""``Sharding``: what the search decided, as plain data: the types of every tensor around every operator.

    decisions["LlamaDecoderLayer"]["mlp.up_proj/linear#0"]  =  x R, weight S(0) -> S(2)        (on each compute axis)
    parameters["model.layers.0.mlp.up_proj.weight"]  =  {"tp": S(0)}

It is part of the plan, so plan and program alone determine the emitted text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpar.errors import GraphparError
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import R, Shard, Type, parse_type
from graphpar.runtime.records import Record, degrees_of

Types = tuple[Type, ...]
"""The types of one tensor, one an axis of the sharding."""


@dataclass(frozen=True)
class Decision:
    """How one operator is sharded: the types of its tensor operands and results, and its rewrite, on each axis."""

    operands: tuple[Types, ...]
    results: tuple[Types, ...]
    rewrites: tuple[str, ...]

    def to_json(self) -> str:
        """Write ``R, S(0) -> S(2)``; axes are separated by ``|``, rewrites follow a ``;``."""
        sides = [", ".join("|".join(map(str, types)) for types in side) for side in (self.operands, self.results)]
        rewrites = "|".join(self.rewrites)
        return f"{sides[0]} -> {sides[1]}".strip() + (f" ; {rewrites}" if rewrites.strip("|") else "")

    @staticmethod
    def from_json(text: str, axes: int) -> Decision:
        """Read what :meth:`to_json` wrote, for a sharding of ``axes`` axes.

        Raises:
            GraphparError: the text is not a decision.
        """
        body, _, rewrites = text.partition(" ; ")
        left, arrow, right = body.partition("->")
        try:
            if not arrow:
                raise ValueError("no ->")
            sides = [
                tuple(tuple(parse_type(kind) for kind in tensor.split("|")) for tensor in _split(side))
                for side in (left, right)
            ]
        except ValueError as error:
            raise GraphparError(f"a decision that can't be read, {text!r}: {error}.") from error
        names = tuple(rewrites.split("|")) if rewrites else ("",) * axes
        return Decision(sides[0], sides[1], names)


def _split(side: str) -> list[str]:
    return [part.strip() for part in side.split(",") if part.strip()]


@dataclass(frozen=True)
class Point:
    """An input or output of a module that the user pinned."""

    path: str
    kind: str  # input | output
    position: int


@dataclass(frozen=True)
class Sharding:
    """How every operator and parameter is sharded.

    ``decisions``: by scope ("" is the root, else a block's name) and key (:mod:`graphpar.passes.sharding.keys`). ``parameters``: types
    by name, on each axis. ``exchange``: the degree of the axis of replicas that hold different experts and send rows to each other,
    which has no decisions (:mod:`graphpar.passes.sharding.exchange`). ``loss_chunk``: the tokens of which heads and losses are computed at
    once (:mod:`graphpar.passes.loss_chunks`); 0: all. ``expert_room``: the option of the plan, which its JSON has.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    decisions: Mapping[str, Mapping[str, Decision]] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Type]] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)  # block instances that are sharded unlike the others
    points: tuple[Point, ...] = ()
    cost: Mapping[str, float] = field(default_factory=dict)  # seconds of a microbatch as it was solved for, by part
    gap: float = 0.0
    undivided: tuple[str, ...] = ()  # warnings: work that every rank of an axis does
    # Rules that were found by running operators.
    discovered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exchange: Mapping[str, int] = field(default_factory=dict)
    loss_chunk: int = 0
    expert_room: float | None = None

    @property
    def all_degrees(self) -> dict[str, int]:
        """The degrees of all axes over which a rank's program sends something."""
        return {**self.degrees, **self.exchange}

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, without ``parameters``, ``expert_room`` and what is empty."""
        found = {
            "axes": dict(self.degrees),
            "gap": self.gap,
            "undivided": list(self.undivided),
            "discovered": {operator: list(rules) for operator, rules in self.discovered.items()},
            "exchange": dict(self.exchange),
            "loss_chunk": self.loss_chunk,
            "cost": dict(self.cost),
            "variants": dict(self.variants),
            "points": [[point.path, point.kind, point.position] for point in self.points],
            "decisions": {
                scope: {name: decision.to_json() for name, decision in rows.items()}
                for scope, rows in self.decisions.items()
            },
        }
        return {name: value for name, value in found.items() if value}

    @staticmethod
    def from_json(data: Record, parameters: Mapping[str, Mapping[str, Type]]) -> Sharding:
        """Read what :meth:`to_json` returned, with the types of ``parameters``.

        Raises:
            GraphparError: a decision can't be read; the message names its operator.
            RuntimeProgramError: a field is missing or of a wrong type.
        """
        data.only(_FIELDS)
        degrees, exchange = (degrees_of(data, name) if data.has(name) else {} for name in ("axes", "exchange"))
        computed = {name: _computed(spec, degrees, exchange) for name, spec in parameters.items()}
        scopes = data.record("decisions") if data.has("decisions") else Record({}, data.where)
        decisions: dict[str, dict[str, Decision]] = {}
        for scope in scopes.names():
            rows = decisions[scope] = {}
            for name, text in scopes.values(scope, str).items():
                try:
                    rows[name] = Decision.from_json(text, len(degrees))
                except GraphparError as error:
                    place = f"{scope}: {name}" if scope else name
                    raise GraphparError(f"The plan's sharding has for {place} {error}") from None
        return Sharding(
            degrees,
            decisions,
            {
                name: spec
                for name, spec in computed.items()
                # else listed for what is stored alone
                if degrees or spec or not any(AXIS[axis].stores_shards for axis in parameters[name])
            },
            data.values("variants", str) if data.has("variants") else {},
            tuple(_point(data, row) for row in data.items("points", list)) if data.has("points") else (),
            data.values("cost", float) if data.has("cost") else {},
            float(data.get("gap", float)) if data.has("gap") else 0.0,
            data.strings("undivided"),
            data.listings("discovered", str) if data.has("discovered") else {},
            exchange,
            data.get("loss_chunk", int) if data.has("loss_chunk") else 0,
        )


_FIELDS = (
    "axes",
    "gap",
    "undivided",
    "discovered",
    "exchange",
    "loss_chunk",
    "cost",
    "variants",
    "points",
    "decisions",
)


def _computed(stored: Mapping[str, Type], degrees: Mapping[str, int], exchange: Mapping[str, int]) -> dict[str, Type]:
    """Return the types in which a stored parameter is computed with."""
    return {
        axis: R if AXIS[axis].stores_shards else kind
        for axis, kind in stored.items()
        if axis in degrees or (axis in exchange and isinstance(kind, Shard))
    }


def _point(data: Record, row: list[Any]) -> Point:
    if [type(value) for value in row] != [str, str, int]:
        raise GraphparError(f"{data.where}: points has {row!r}; a point is a module, input or output, and a number.")
    return Point(*row)
