"""From a rule to placements: every way in which one operator can run on one mesh axis.

    Rule + sizes + shardings of neighbours ──► [Placement((x R, weight S(0)) -> S(2)), Placement((x S(2), weight S(1)) -> P), ...]

A placement gives the type of each tensor operand and result. Two placements shard nothing and always exist: all I (every rank
does the same work, forward and backward) and all R (the gradients are partial).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients, is_unknown
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.notation import Rule
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard, Type

Size = tuple[int, int]
"""``(n, 0)`` is n; ``(n, 1)`` is n times the batch."""


@dataclass(frozen=True)
class Placement:
    """Types of the tensor operands (as :func:`operands_of` lists them) and of the results, on one axis.

    ``rewrite`` names how the operator itself must change (see :mod:`graphpar.operators.rewrite`); empty where it runs as it is.
    """

    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    rewrite: str = ""

    @property
    def divides(self) -> bool:
        """Whether each rank does only its share of the work."""
        return any(isinstance(kind, Shard) for kind in (*self.operands, *self.results))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


@dataclass(frozen=True)
class Context:
    """What a rule may depend on besides the operator: the axis, and how the values around the operator may be sharded.

    Attributes:
        degree: number of ranks on the axis.
        known: (node, index) -> shardings that neighbours use of the value ``node``; ``index`` picks one of several results.
        differentiable: whether a gradient flows through a value.
        rewrites: the rewrites that the lowering knows.
        rows: (node, index) -> the ``ExpertRows`` types that the value may have.
        replicas: whether the axis divides the rows of the batch.
    """

    degree: int
    known: Callable[[fx.Node, int], Iterable[Shard]]
    differentiable: Callable[[fx.Node], bool]
    rewrites: tuple[str, ...]
    rows: Callable[[fx.Node, int], Iterable[ExpertRows]] = lambda node, index: ()
    replicas: bool = False


def operands_of(node: fx.Node) -> list[fx.Node]:
    """List the tensors that ``node`` takes, in the order of its arguments; one that is passed twice is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), lambda n: found.append(n) if isinstance(value_of(n), Tensor) else None)  # type: ignore[arg-type, func-returns-value, return-value]
    return found


def results_of(node: fx.Node) -> list[Tensor]:
    """List the fake tensors that ``node`` returns."""
    value = value_of(node)
    return [part for part in (value if isinstance(value, tuple | list) else [value]) if isinstance(part, Tensor)]


_UNKNOWN: Size = (1, 1000)  # a size that depends on data: equal to none but itself, and never sharded


def sizes_of(node: fx.Node) -> tuple[Size, ...]:
    """Return the size of each dim of ``node``'s tensor."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return tuple(
        (coefficient, 1) if coefficient is not None else _UNKNOWN if is_unknown(size) else (int(size), 0)
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    )


def result_sizes(node: fx.Node) -> list[tuple[Size, ...] | None]:
    """Return the sizes of each result; None for one without users."""
    value = value_of(node)
    if isinstance(value, Tensor):
        return [sizes_of(node)]
    found: list[tuple[Size, ...] | None] = [None] * len(value)
    for user in node.users:
        if operator_name(user) == "getitem":
            found[int(user.args[1])] = sizes_of(user)  # type: ignore[arg-type]
    return found


def can_shard(size: Size, shard: Shard, degree: int, padded: bool = False) -> bool:
    """Whether a dim of ``size`` can be sharded by ``shard``; ``padded``: the last shard may be padded."""
    if size[0] == 0 or size == _UNKNOWN:
        return False
    if shard.parts:
        return all(part % degree == 0 for part in shard.parts) and size[0] % sum(shard.parts) == 0
    if size == (1, 1):
        return False
    return size[0] % degree == 0 or (padded and size[1] == 0 and size[0] > degree)


def from_rule(node: fx.Node, rule: Rule, context: Context) -> list[Placement]:
    """List all placements of ``node`` that its rule allows."""
    operands = operands_of(node)
    assert len(operands) == len(rule.operands), (node, rule)
    given = [sizes_of(operand) for operand in operands]
    made = result_sizes(node)
    found = []
    for factor in _factors(rule):
        for parts in _offered(node, rule, factor, operands, made, context):
            sharded = _sharded(rule, factor, parts, given, made, context)
            if sharded is not None:
                found.append(sharded)
    if rule.uneven:
        found += _by_rows(node, rule, operands, given, made, context)
    for group in rule.linear:
        if all(sums(value_of(operands[index])) for index in group) and all(sums(r) for r in results_of(node)):
            before = tuple(P if index in group else R for index in range(len(operands)))
            found.append(Placement(before, (P,) * len(rule.results)))
    return found


def _by_rows(
    node: fx.Node,
    rule: Rule,
    operands: Sequence[fx.Node],
    given: Sequence[tuple[Size, ...]],
    made: Sequence[tuple[Size, ...] | None],
    context: Context,
) -> list[Placement]:
    """The factor of dim 0 sharded by experts, as neighbours shard it."""
    offers = [(rule.operands[place], rows) for place, o in enumerate(operands) for rows in context.rows(o, 0)]
    offers += [(factors, rows) for place, factors in enumerate(rule.results) for rows in context.rows(node, place)]
    found = []
    for factor, rows in dict.fromkeys((factors[0], rows) for factors, rows in offers if factors):
        users = _users(rule, factor, given, made)
        alike = len({sizes[0] for _, sizes in users}) <= 1 and not any(f.index(factor) for f, _ in users)
        # Rows that the operator itself makes belong to no expert.
        taken = any(factor in factors for factors in rule.operands)
        if factor != "1" and factor not in rule.fixed and alike and taken:
            before = tuple(rows if factor in factors else R for factors in rule.operands)
            after = tuple(rows if factor in factors else P for factors in rule.results)
            found.append(Placement(before, after))
    return found


def _users(
    rule: Rule, factor: str, given: Sequence[tuple[Size, ...]], made: Sequence[tuple[Size, ...] | None]
) -> list[tuple[tuple[str, ...], tuple[Size, ...]]]:
    """The (factors, sizes) of each operand and result that has ``factor``."""
    tensors = (*zip(rule.operands, given), *zip(rule.results, made))
    return [(factors, sizes) for factors, sizes in tensors if factor in factors and sizes is not None]


def sums(tensor: Tensor) -> bool:
    """Whether a tensor can be a sum over the ranks: real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def whole(node: fx.Node) -> list[Placement]:
    """Return the two placements that shard nothing."""
    operands, results = len(operands_of(node)), max(1, len(results_of(node)))
    return [Placement((kind,) * operands, (kind,) * results) for kind in (I, R)]


def _factors(rule: Rule) -> list[str]:
    names = [name for factors in (*rule.operands, *rule.results) for name in factors]
    return [name for name in dict.fromkeys(names) if name != "1" and name not in rule.fixed]


def _offered(
    node: fx.Node,
    rule: Rule,
    factor: str,
    operands: Sequence[fx.Node],
    made: Sequence[tuple[Size, ...] | None],
    context: Context,
) -> list[tuple[int, ...]]:
    """The ``parts`` to shard ``factor`` by: none (evenly, as one part), and those of neighbours (which may need padding)."""
    offers: list[tuple[int, ...]] = []
    even = False
    for position, factors in enumerate(rule.operands):
        if factor in factors:
            dim = factors.index(factor)
            even |= _is_even(sizes_of(operands[position])[dim], context)
            offers += [shard.parts for shard in context.known(operands[position], 0) if shard.dim == dim]
    for position, factors in enumerate(rule.results):
        if factor in factors and position < len(made):
            dim, sizes = factors.index(factor), made[position]
            even |= sizes is not None and _is_even(sizes[dim], context)
            offers += [shard.parts for shard in context.known(node, position) if shard.dim == dim]
    return list(dict.fromkeys(([()] if even else []) + offers))


def _is_even(size: Size, context: Context) -> bool:
    return size[1] <= context.replicas and size != _UNKNOWN and size[0] > 0 and size[0] % context.degree == 0


def _sharded(
    rule: Rule,
    factor: str,
    parts: tuple[int, ...],
    given: Sequence[tuple[Size, ...]],
    made: Sequence[tuple[Size, ...] | None],
    context: Context,
) -> Placement | None:
    """Shard one factor. Where its dims have different sizes (repeated or grouped elements) only even shards agree in all."""
    lengths = {sizes[factors.index(factor)] for factors, sizes in _users(rule, factor, given, made)}
    if len(lengths) > 1 and (parts or any(size[1] or size[0] % context.degree for size in lengths)):
        return None

    def types_of(
        tensors: Sequence[tuple[str, ...]], sizes: Sequence[tuple[Size, ...] | None], absent: Type
    ) -> list[Type] | None:
        types: list[Type] = []
        for factors, shape in zip(tensors, sizes):
            if factor not in factors or shape is None:
                types.append(absent)
                continue
            shard = Shard(factors.index(factor), parts)
            if not can_shard(shape[shard.dim], shard, context.degree, factor in rule.padded):
                return None
            types.append(shard)
        return types

    before = types_of(rule.operands, given, R)
    after = types_of(rule.results, made, P)
    if before is None or after is None:
        return None
    return Placement(tuple(before), tuple(after))


def averaged(placements: Iterable[Placement], rewrite: str) -> list[Placement]:
    """Make the placements of a mean from those of its sum: those that are partial over a sharded dim get ``rewrite``."""
    return [Placement(p.operands, p.results, rewrite) if p.results[0] is P and p.divides else p for p in placements]


def normalized(placements: Iterable[Placement], node: fx.Node, context: Context) -> list[Placement]:
    """Drop duplicates and unknown rewrites; a tensor without gradient is R, not I, since the two differ in gradients alone."""
    operands = operands_of(node)
    silent = [not context.differentiable(operand) for operand in operands]
    tensors = results_of(node)
    mute = [not (context.differentiable(node) and sums(tensor)) for tensor in tensors]
    found = {}
    for placement in placements:
        if placement.rewrite and placement.rewrite not in context.rewrites:
            continue
        before = tuple(R if kind is I and still else kind for kind, still in zip(placement.operands, silent))
        after = tuple(R if kind is I and still else kind for kind, still in zip(placement.results, mute))
        found[before, after] = Placement(before, after, placement.rewrite)
    return list(found.values())


def argument_place(node: fx.Node, name: str) -> int | None:
    """Return the position of the argument ``name`` in the operator's schema; None if it has no such argument."""
    return _places(node.target).get(name)


@cache
def _places(target: Any) -> dict[str, int]:
    schema = getattr(target, "_schema", None)
    return {argument.name: place for place, argument in enumerate(schema.arguments)} if schema is not None else {}


def literal(node: fx.Node, name: str, position: int | None = None, default: Any = None) -> Any:
    """Return an argument that is not a tensor, given by position (by default that in the schema) or by name."""
    place = argument_place(node, name) if position is None else position
    if place is not None and len(node.args) > place:
        return node.args[place]
    if name in node.kwargs or default is not None:
        return node.kwargs.get(name, default)
    declared = argument_place(node, name)
    return None if declared is None else node.target._schema.arguments[declared].default_value  # type: ignore[union-attr]
