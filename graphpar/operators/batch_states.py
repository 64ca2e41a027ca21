"""How one value depends on the batch: the states, and what an operator's shapes say about it.

Fixed      the same for every microbatch
Rows       one slice an example: the batch lies along a dim, of size outer * batch * inner
Additive   a sum over examples: the value for the global batch is the sum over microbatches
Layout     where the groups of sorted rows begin
Coupled    examples are mixed (BatchNorm in training, attention over the batch): cutting the batch would change it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from graphpar.ir.program import batch_coefficients, operator_name, value_of


@dataclass(frozen=True)
class Fixed:
    """``pure``: computed from inputs and constants alone, so it has no gradient and no parameter in it."""

    pure: bool = True


@dataclass(frozen=True)
class Rows:
    """``kind`` says what a row holds:

    values     anything that belongs to its example
    position   the row's own number, divided by ``divided``
    sorted     the number (divided by ``divided``) of the row that a sort put here
    inverse    where a sort put this row
    begins     where the row's own run of ``divided`` elements begins, in the order of the rows

    ``order`` names the sort, or the choice, that the rows went through; rows of different orders don't belong together.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    pure: bool = True
    kind: str = "values"
    order: str | None = None
    divided: int = 1
    chosen: fx.Node | None = None  # the boolean mask that chose these rows; how many is known only when it runs

    @property
    def layout(self) -> tuple[int, int, str | None]:
        return self.outer, self.inner, self.order


@dataclass(frozen=True)
class Additive:
    pure: bool = True


@dataclass(frozen=True)
class Coupled:
    reason: str
    node: fx.Node | None = None
    pure: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the groups of sorted rows begin (expert counts and offsets)."""

    order: str
    pure: bool = True


State = Fixed | Rows | Additive | Coupled | Layout
Operands = list[tuple[fx.Node, State]]


class Context(Protocol):
    """What the rule of an operator sees."""

    states: dict[fx.Node, State]

    def located(self, node: fx.Node, operands: Operands, pure: bool) -> State: ...


# ---- shapes ----------------------------------------------------------------------------------------------------


def first_value(node: fx.Node) -> fx.Node | None:
    """``node``, or the first used result of an operator with several."""
    if isinstance(value_of(node), list | tuple):
        return next((user for user in node.users if operator_name(user) == "getitem"), None)
    return node


def result_coefficients(node: fx.Node) -> tuple[int | None, ...]:
    """As ``batch_coefficients``; of the first tensor of an operator with several results."""
    first = first_value(node)
    return () if first is None else batch_coefficients(first)


def batch_dims_of(node: fx.Node) -> list[int]:
    """The dims of the result whose size follows the batch."""
    return [dim for dim, coefficient in enumerate(result_coefficients(node)) if coefficient is not None]


def unknown_dims(node: fx.Node) -> list[int]:
    """The dims of the result whose size depends on values (how many rows a mask chooses)."""
    first = first_value(node)
    value = None if first is None else value_of(first)
    if not isinstance(value, Tensor):
        return []
    return [dim for dim, size in enumerate(value.shape) if is_unknown(size)]


def is_unknown(size: Any) -> bool:
    """Whether only running tells a size, or a number."""
    return isinstance(size, torch.SymInt | torch.SymFloat) and any(map(_of_values, size.node.expr.free_symbols))


def _of_values(symbol: Any) -> bool:
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def unknown_symbol(size: Any) -> str:
    """The name of what only running tells."""
    return next(str(symbol) for symbol in size.node.expr.free_symbols if _of_values(symbol))


def unknown_coefficient(size: Any) -> int | None:
    """``c`` for a size that is ``c`` times what only running tells; None for any other."""
    symbols = size.node.expr.free_symbols
    quotient = size.node.expr / next(iter(symbols))
    return int(quotient) if len(symbols) == 1 and quotient.is_Integer else None


def choice_of(mask: fx.Node) -> str:
    """Names the rows that ``mask`` chooses, in their order: equal for equal values, whatever the shape that they are seen in."""
    return f"chosen by {expression(_row_major(mask))}"


def _row_major(node: fx.Node) -> fx.Node:
    """The value that ``node`` shows in another shape, element by element in the same order."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
        return node
    same = value_of(source).dtype == value_of(node).dtype
    return _row_major(source) if same and operator_name(node) in _SAME_ELEMENTS else node


def expression(node: fx.Node, known: dict[fx.Node, str] | None = None) -> str:
    """A digest of how ``node`` is computed, the same for equal values: ``labels != -100`` may be written twice."""
    known = {} if known is None else known
    if node in known:
        return known[node]
    drawn = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    if node.op in ("placeholder", "get_attr") or drawn:
        text = node.name
    else:
        operands = node.all_input_nodes
        if len(operands) == 1 and is_pointwise(node):  # of a view is a view of it
            operands = [_row_major(operands[0])]
        words = [expression(argument, known) for argument in operands]
        place = {argument: index for index, argument in enumerate(node.all_input_nodes)}
        shape = fx.map_arg((node.args, dict(node.kwargs)), lambda n: slice(place[n]))  # type: ignore[arg-type, return-value]
        text = f"{node.target}{shape}{words}"
    known[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return known[node]


# ---- batch sizes as numbers ------------------------------------------------------------------------------------


def is_size(node: fx.Node) -> bool:
    """Whether ``node`` is a number and no tensor."""
    return node.op == "call_function" and isinstance(value_of(node), int | torch.SymInt | float | torch.SymFloat)


def size_factor(node: fx.Node) -> int | None:
    """``c`` where the number ``node`` is ``c`` times the batch; 0 where it is fixed; None where it is something else."""
    if "batch_factor" in node.meta:  # a fixed-size trace
        return int(node.meta["batch_factor"])
    value = value_of(node)
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return 0
    expression = value.node.expr
    symbols = expression.free_symbols
    if not symbols:
        return 0
    if len(symbols) > 1 or is_unknown(value):
        return None
    (symbol,) = symbols
    quotient = (expression / symbol).simplify()
    return int(quotient) if quotient.is_Integer else None


def number_arguments(node: fx.Node) -> Iterator[tuple[int | str, fx.Node]]:
    """The numbers that enter ``node``'s result as values, and not as sizes: (position or keyword, node)."""
    for place, type_name, argument in scalar_arguments(node):
        if isinstance(argument, fx.Node) and is_size(argument) and type_name != "size":
            yield place, argument


def scalar_arguments(node: fx.Node) -> Iterator[tuple[int | str, str, Any]]:
    """(position or keyword, ``size`` or ``number``, argument) of an ATen operator's arguments that are no lists."""
    if not isinstance(node.target, torch._ops.OpOverload) or operator_name(node) in ("arange", "sym_size"):
        return
    for position, described in enumerate(node.target._schema.arguments):
        place: int | str = position if position < len(node.args) else described.name
        given = node.args[position] if position < len(node.args) else node.kwargs.get(described.name)
        if isinstance(given, fx.Node | int | float) and not isinstance(given, bool):
            yield place, "size" if "int" in str(described.type) else "number", given


def gives_dtype_only(node: fx.Node) -> bool:
    """Whether ``node`` takes nothing but the dtype (and device) of its second operand: ``x.type_as(h)``, ``x.to(h)``."""
    return operator_name(node) in ("type_as", "to") and len(node.args) > 1 and isinstance(node.args[1], fx.Node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says so, or it is one that torch forgot."""
    if operator_name(node) in _POINTWISE:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


# Operators that show the same elements in the same order.
_SAME_ELEMENTS = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
                  "alias", "contiguous", "clone", "detach", "to", "lift_fresh_copy"}  # fmt: skip

# Pointwise operators that torch does not tag so.
_POINTWISE = {
    "__and__", "__or__", "__xor__", "__invert__", "where", "masked_fill", "rsub", "broadcast_tensors", "dropout",
    "floor_divide", "stream", "log_sigmoid", "prelu", "hardswish", "true_divide", "subtract", "multiply", "divide",
    "negative", "absolute", "greater", "greater_equal", "less", "less_equal", "not_equal", "complex", "real", "imag", "conj",
    "polar", "isclose", "special_expit", "ldexp", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "scalar_tensor", "isreal", "float_power",
}  # fmt: skip
