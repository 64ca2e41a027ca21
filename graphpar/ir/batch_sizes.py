"""Sizes that follow the batch, as dims of tensors and as numbers, and sizes that depend on values."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

from graphpar.errors import GraphparError
from graphpar.ir.program import is_of_torch, operator_name, value_of, where

# ---- dims ------------------------------------------------------------------------------------------------------


def batch_coefficients(node: fx.Node) -> tuple[int | None, ...]:
    """Return for each dim of ``node``'s tensor: ``c`` where its size is ``c`` times the batch, ``None`` where it is fixed.

    Raises:
        GraphparError: a size depends on the batch in another way; the message names the operator and its line.
    """
    known = node.meta.get("batch_coefficients")
    if known is not None:
        return tuple(known)
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ()
    try:
        return tuple(size_coefficient(size) for size in value.shape)
    except GraphparError as error:
        raise GraphparError(f"{operator_name(node)}{where(node)}: {error}") from None


def size_coefficient(size: Any) -> int | None:
    """Return ``c`` for a size that is ``c * batch``; ``None`` for a fixed one.

    Raises:
        GraphparError: the size depends on the batch in another way.
    """
    if isinstance(size, int) and not isinstance(size, torch.SymInt):
        return None
    return _coefficient(size.node.expr)


@functools.lru_cache(maxsize=4096)
def _coefficient(expression: Any) -> int | None:
    symbols = expression.free_symbols
    chosen = [symbol for symbol in symbols if str(symbol).startswith("u")]  # how many a mask chooses
    if len(chosen) == len(symbols):
        return None
    if len(symbols) > 1:
        raise GraphparError(f"A tensor has a size that is not a multiple of the batch: {expression}.")
    (symbol,) = symbols
    quotient = expression / symbol
    if not quotient.is_Integer:
        raise GraphparError(f"A tensor has the size {expression}, which is not a multiple of the batch {symbol}.")
    return int(quotient)


def concrete_shape(node: fx.Node, batch: int) -> tuple[int, ...]:
    """Return the shape of ``node``'s tensor for a batch of ``batch`` rows."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return tuple(
        int(size) if coefficient is None else coefficient * batch
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    )


def first_value(node: fx.Node) -> fx.Node | None:
    """Return ``node``, or the first used result of an operator with several."""
    if isinstance(value_of(node), list | tuple):
        return next((user for user in node.users if operator_name(user) == "getitem"), None)
    return node


def result_coefficients(node: fx.Node) -> tuple[int | None, ...]:
    """As ``batch_coefficients``; of the first tensor of an operator with several results."""
    first = first_value(node)
    return () if first is None else batch_coefficients(first)


def batch_dims_of(node: fx.Node) -> list[int]:
    """Return the dims of the result whose size follows the batch."""
    return [dim for dim, coefficient in enumerate(result_coefficients(node)) if coefficient is not None]


def unknown_dims(node: fx.Node) -> list[int]:
    """Return the dims of the result whose size depends on values (how many rows a mask chooses)."""
    first = first_value(node)
    value = None if first is None else value_of(first)
    return [dim for dim, size in enumerate(value.shape) if is_unknown(size)] if isinstance(value, Tensor) else []


def is_unknown(size: Any) -> bool:
    """Whether a size, or a number, depends on values, so that it is known only when the program runs."""
    return isinstance(size, torch.SymInt | torch.SymFloat) and any(map(_of_values, size.node.expr.free_symbols))


def _of_values(symbol: Any) -> bool:
    return bool(symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)))


def unknown_symbol(size: Any) -> str:
    """Return the name of the unknown in a size that depends on values."""
    return next(str(symbol) for symbol in size.node.expr.free_symbols if _of_values(symbol))


def unknown_coefficient(size: Any) -> int | None:
    """Return ``c`` for a size that is ``c`` times an unknown; None for any other."""
    symbols = size.node.expr.free_symbols
    quotient = size.node.expr / next(iter(symbols))
    return int(quotient) if len(symbols) == 1 and quotient.is_Integer else None


# ---- numbers ---------------------------------------------------------------------------------------------------


def is_size(node: fx.Node) -> bool:
    """Whether ``node`` is a number and no tensor."""
    return node.op == "call_function" and isinstance(value_of(node), int | torch.SymInt | float | torch.SymFloat)


def size_factor(node: fx.Node) -> int | None:
    """Return ``c`` where the number ``node`` is ``c`` times the batch; 0 where it is fixed; None where it is something else."""
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


def multiple_of_batch(number: Any) -> int | None:
    """Return ``c`` where a symbolic number is ``c`` times the batch; None for any other, such as ``batch - 1``."""
    symbols = number.node.expr.free_symbols if isinstance(number, torch.SymInt) and not is_unknown(number) else ()
    if len(symbols) != 1:
        return None
    quotient = number.node.expr / next(iter(symbols))
    return int(quotient) if quotient.is_Integer else None


def number_arguments(node: fx.Node) -> Iterator[tuple[int | str, fx.Node]]:
    """Yield the numbers that enter ``node``'s result as values, and not as sizes: (position or keyword, node)."""
    for place, type_name, argument in scalar_arguments(node):
        if isinstance(argument, fx.Node) and is_size(argument) and type_name != "size":
            yield place, argument


_SIZES = ("size", "shape", "sizes", "split_size", "split_sizes", "output_size", "repeats")
_PLACES = ("start", "end", "length")


def integer_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Yield (name, argument) of the whole numbers that a torch operator takes, in lists or alone, if it uses them as values.

    Sizes of results follow the batch by themselves, and so do places in a dim that follows it.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or operator_name(node) in ("arange", "sym_size"):
        return
    source = node.args[0] if node.args else None
    for position, described in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(described.name)
        if "int" not in str(described.type) or (described.name in _SIZES and is_of_torch(node.target)):
            continue
        if described.name in _PLACES and isinstance(source, fx.Node):
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            if isinstance(dim, int) and (
                batch_coefficients(source)[dim] is not None or is_unknown(value_of(source).shape[dim])
            ):
                continue
        for item in given if isinstance(given, list | tuple) else (given,):
            if isinstance(item, fx.Node | int) and not isinstance(item, bool):
                yield described.name, item


def scalar_arguments(node: fx.Node) -> Iterator[tuple[int | str, str, Any]]:
    """Yield (position or keyword, ``size`` or ``number``, argument) of an ATen operator's arguments that are no lists.

    The end of a range is the size of what it makes, where that follows the batch or depends on values; else its numbers are its values.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or operator_name(node) == "sym_size":
        return
    sized = operator_name(node) == "arange" and bool(batch_dims_of(node) or unknown_dims(node))
    for position, described in enumerate(node.target._schema.arguments):
        place: int | str = position if position < len(node.args) else described.name
        given = node.args[position] if position < len(node.args) else node.kwargs.get(described.name)
        if isinstance(given, fx.Node | int | float) and not isinstance(given, bool):
            is_size_of_result = "int" in str(described.type) or (sized and described.name == "end")
            yield place, "size" if is_size_of_result else "number", given
