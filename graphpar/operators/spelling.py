"""How operators are written in Python: the spellings that records name.

    linear(x, w, None)  ──function("F.linear", "input weight bias")──►  F.linear(x, self.weight)

A spelling makes an :class:`Expression` of a node whose arguments are printed already; None where it does not fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.lengths import SIZES
from graphpar.ir.program import operator_name, value_of

ATOM, UNARY, POWER, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARE, LOWEST = 100, 80, 85, 70, 60, 55, 50, 48, 46, 40, 0


@dataclass(frozen=True)
class Expression:
    """Python text and how tightly it binds, so that parentheses stand only where they must."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """Return the text, in parentheses if it binds less tightly than ``level``."""
        return self.text if self.level >= level else f"({self.text})"


Printed = Callable[[Any], Expression]
Spelling = Callable[[fx.Node, Printed], Expression | None]


def literal(value: Any) -> str:
    """Write a Python literal as one would type it."""
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**62:
        return "None"  # the end of a slice that goes to the end
    if isinstance(value, float):
        if math.isinf(value):
            return 'float("inf")' if value > 0 else 'float("-inf")'
        if math.isnan(value):
            return 'float("nan")'
        if value == torch.finfo(torch.float32).min:
            return "torch.finfo(torch.float32).min"
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def call(function: str, arguments: list[str], options: Mapping[str, str]) -> Expression:
    """``function(arguments, key=option)``"""
    return Expression(f"{function}({', '.join([*arguments, *(f'{key}={text}' for key, text in options.items())])})")


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the operator's arguments by their schema names, without those left at their defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: item for argument, item in zip(schema, node.args)} | dict(node.kwargs)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {key: item for key, item in given.items() if key not in defaults or not _same(item, defaults[key])}


def _same(item: Any, default: Any) -> bool:
    if isinstance(item, fx.Node) or isinstance(default, Tensor):
        return False
    if isinstance(item, list | tuple) and isinstance(default, list | tuple | int):
        expected = [default] * len(item) if isinstance(default, int) else list(default)
        return list(item) == expected or (len(expected) == 1 and list(item) == expected * len(item))
    return bool(item == default) and isinstance(item, bool) == isinstance(default, bool)


def infix(symbol: str, level: int) -> Spelling:
    """``a + b``; of two operands without options."""

    def spelled(node: fx.Node, shown: Printed) -> Expression | None:
        if len(node.args) != 2 or node.kwargs:
            return None
        left, right = (shown(argument) for argument in node.args)
        # Python chains comparisons: (a < b) == c needs its parentheses.
        return Expression(f"{left.at(level + (level == COMPARE))} {symbol} {right.at(level + 1)}", level)

    return spelled


def method(node: fx.Node, shown: Printed) -> Expression | None:
    """``x.view(b, s)``: a method of the first argument."""
    name = _method_name(node)
    if not name or not hasattr(Tensor, name):
        return None
    owner, *arguments = (shown(argument) for argument in node.args)
    return called_on(owner, name, [argument.text for argument in arguments], _options(node, shown))


METHOD = (method,)


def called_on(owner: Expression, name: str, arguments: list[str], options: Mapping[str, str]) -> Expression:
    """``owner.name(arguments)``"""
    return call(f"{owner.at(ATOM)}.{name}", arguments, options)


def attribute(name: str) -> Spelling:
    """``x.mT``: an attribute of the first argument."""

    def spelled(node: fx.Node, shown: Printed) -> Expression | None:
        return Expression(f"{shown(node.args[0]).at(ATOM)}.{name}") if _method_name(node) else None

    return spelled


def renamed(path: str) -> Spelling:
    """``path(...)`` with the operator's arguments."""
    return lambda node, shown: call(path, [shown(argument).text for argument in node.args], _options(node, shown))


def _method_name(node: fx.Node) -> str:
    """The name of an ATen operator whose first argument is a tensor; empty for any other operator."""
    own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    return operator_name(node) if own and node.args and isinstance(node.args[0], fx.Node) else ""


def _options(node: fx.Node, shown: Printed) -> dict[str, str]:
    return {key: shown(item).text for key, item in node.kwargs.items()}


def function(path: str, positional: str, keywords: str = "") -> Spelling:
    """``F.name`` with ATen's arguments: ``positional`` ones up to the first that is absent, the others by keyword."""

    def spelled(node: fx.Node, shown: Printed) -> Expression | None:
        given = given_arguments(node)
        given |= {name: words[given[name]] for name, words in WORDS.items() if name in given}
        arguments: list[str] = []
        positions = positional.split()
        while positions and positions[0] in given:
            arguments.append(shown(given[positions.pop(0)]).text)
        options = {name: shown(given[name]).text for name in [*positions, *keywords.split()] if name in given}
        return call(path, arguments, options)

    return spelled


WORDS = {
    "reduction": ("none", "mean", "sum"),
    "compute_mode": ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"),
}
"""The words of torch's functions for numbers of ATen's, by argument."""


def loss(path: str, keywords: str = "") -> Spelling:
    """``F.cross_entropy(input, target)``, with the reduction as a word."""
    return function(path, "self target", f"{keywords} reduction")


def interpolated(mode: str, *, antialias: bool = False) -> Spelling:
    """``F.interpolate`` to a size, or by factors."""

    def spelled(node: fx.Node, shown: Printed) -> Expression | None:
        if node.target._overloadname != "vec":  # type: ignore[union-attr]
            return None
        given = given_arguments(node)
        options = {}
        if given.get("output_size") is not None:
            options["size"] = shown(given["output_size"]).text
        else:
            factors = given["scale_factors"]
            options["scale_factor"] = shown(factors[0] if len(set(factors)) == 1 else factors).text
        if mode != "nearest":
            options["mode"] = literal(mode)
        if given.get("align_corners"):
            options["align_corners"] = "True"
        if antialias:
            options["antialias"] = "True"
        return call("F.interpolate", [shown(given["input"]).text], options)

    return spelled


def sliced(node: fx.Node, shown: Printed) -> Expression | None:
    """``x[:, a:b]``"""
    given = given_arguments(node)
    source = node.args[0]
    value = value_of(source)  # type: ignore[arg-type]
    dim, start, end, step = (given.get(key) for key in ("dim", "start", "end", "step"))
    position = int(dim or 0) % value.ndim
    text = f"{'' if start in (None, 0) else shown(start).text}:"
    if end is not None and not (isinstance(end, int) and end >= 2**62):
        text += shown(end).text
    if step not in (None, 1):
        text += f":{shown(step).text}"
    index = f"..., {text}" if position > 1 and position == value.ndim - 1 else ", ".join([":"] * position + [text])
    return Expression(f"{shown(source).at(ATOM)}[{index}]")


def selected(node: fx.Node, shown: Printed) -> Expression | None:
    """``x[:, i]``"""
    source, dim, index = node.args
    value = value_of(source)  # type: ignore[arg-type]
    assert isinstance(dim, int)
    position = dim % value.ndim
    return Expression(f"{shown(source).at(ATOM)}[{', '.join([':'] * position + [shown(index).text])}]")


def indexed(node: fx.Node, shown: Printed) -> Expression | None:
    """``x[i, :, j]``"""
    source, indices = node.args
    assert isinstance(indices, list | tuple)
    parts = [":" if index is None else shown(index).text for index in indices]
    return Expression(f"{shown(source).at(ATOM)}[{', '.join(parts)}]")


def put(node: fx.Node, shown: Printed) -> Expression | None:
    """``x.index_put((i, j), values)``; a dim that is left out is None, which only the operator itself takes."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    return as_operator(node, shown) if None in indices else method(node, shown)


def as_operator(node: fx.Node, shown: Printed) -> Expression:
    """``torch.ops.aten.name.default(...)`` with all arguments."""
    return call(f"torch.ops.{node.target}", [shown(item).text for item in node.args], _options(node, shown))


def grouped_product(node: fx.Node, shown: Printed) -> Expression | None:
    """``F.grouped_mm(F.pad(x, (0, 4)), F.pad(w, (0, 0, 0, 4)), offs=ends)``: kernels want rows of whole 16 bytes, no float64."""
    rows, weight = (value_of(argument) for argument in node.args[:2] if isinstance(argument, fx.Node))
    if rows.ndim != 2 or weight.ndim != 3 or "offs" not in node.kwargs:
        return None
    x, w, ends = shown(node.args[0]), shown(node.args[1]), shown(node.kwargs["offs"]).at(ATOM)
    if rows.dtype == torch.float64:
        runs = f"{x.at(ATOM)}.tensor_split({ends}[:-1].long().cpu())"
        return Expression(f"torch.cat([*map(torch.matmul, {runs}, {w.text})])")
    step = 16 // rows.element_size()
    inner, outer = (-size % step for size in weight.shape[1:])
    if not inner and not outer:
        return None
    padded = [f"F.pad({x.text}, (0, {inner}))" if inner else x.text, f"F.pad({w.text}, (0, {outer}, 0, {inner}))"]
    result = call("F.grouped_mm", padded, {"offs": shown(node.kwargs["offs"]).text})
    return Expression(f"{result.text}[:, :-{outer}]") if outer else result


def item(node: fx.Node, shown: Printed) -> Expression | None:
    """``x[0]``"""
    return Expression(f"{shown(node.args[0]).at(ATOM)}[{shown(node.args[1]).text}]")


def size(node: fx.Node, shown: Printed) -> Expression | None:
    """``x.size(0)``"""
    return Expression(f"{shown(node.args[0]).at(ATOM)}.size({node.args[1]})")


def flattened(node: fx.Node, shown: Printed) -> Expression | None:
    """``flatten`` or ``unflatten`` where the view does no more, so that no size of batch or sequence is spelled out."""
    source = node.args[0]
    before, after = value_of(source), value_of(node)  # type: ignore[arg-type]
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    old, new = _dims(source), _dims(node)  # type: ignore[arg-type]
    ahead = 0
    while ahead < min(len(old), len(new)) and old[ahead] == new[ahead]:
        ahead += 1
    behind = 0
    while behind < min(len(old), len(new)) - ahead and old[-1 - behind] == new[-1 - behind]:
        behind += 1
    if behind and len(old) == ahead + behind < len(new):  # a dim of size 1 came in: take it with its neighbour
        behind -= 1
    merged, made = old[ahead : len(old) - behind], new[ahead : len(new) - behind]
    owner = shown(source).at(ATOM)
    if len(made) == 1 and len(merged) > 1:
        last = len(old) - behind - 1
        end = -1 - behind if behind else None
        suffix = "" if not ahead and end is None else f"{ahead}" if end is None else f"{ahead}, {last}"
        return Expression(f"{owner}.flatten({suffix})")
    if len(merged) == 1 and len(made) > 1:
        given = node.args[1] if isinstance(node.args[1], list | tuple) and len(node.args[1]) == len(new) else new
        of_length = [isinstance(each, fx.Node) and isinstance(value_of(each), int) for each in given]
        sizes = [
            shown(given[dim]).text if of_length[dim] else new[dim] if new[dim].isdigit() else "-1"
            for dim in range(ahead, ahead + len(made))
        ]
        if sizes.count("-1") <= 1:
            dim = ahead if behind else -1
            return Expression(f"{owner}.unflatten({dim}, ({', '.join(sizes)}))")
    return None


def _dims(node: fx.Node) -> list[str]:
    """Write the sizes of a tensor, so that those that follow the length of the sequence are told from others."""
    shape = value_of(node).shape
    of_length = node.meta.get(SIZES) or [None] * len(shape)
    return [str(size) if follows is None else f"{size} is {follows}" for size, follows in zip(shape, of_length)]


_CASTS: dict[Any, str] = {torch.float32: "float", torch.bool: "bool", torch.int64: "long",
                          torch.bfloat16: "bfloat16", torch.float16: "half"}  # fmt: skip


def cast(node: fx.Node, shown: Printed) -> Expression | None:
    """``x.float()``"""
    name = _CASTS.get(node.args[1]) if len(node.args) == 2 and not node.kwargs else None
    return None if name is None else Expression(f"{shown(node.args[0]).at(ATOM)}.{name}()")


def einsum(node: fx.Node, shown: Printed) -> Expression | None:
    """``torch.einsum("ij,jk", a, b)``, which finds the order of its products itself."""
    equation, operands = node.args[:2]
    assert isinstance(operands, list | tuple)
    return call("torch.einsum", [shown(item).text for item in (equation, *operands)], {})


def tensordot(node: fx.Node, shown: Printed) -> Expression | None:
    """``torch.tensordot(a, b, dims=([1], [0]))``"""
    first, second, *dims = (shown(argument).text for argument in node.args)
    return call("torch.tensordot", [first, second], {"dims": f"({', '.join(dims)})"})


def prefix(symbol: str) -> Spelling:
    """``-x``"""
    return lambda node, shown: Expression(f"{symbol}{shown(node.args[0]).at(UNARY)}", UNARY)


def power(node: fx.Node, shown: Printed) -> Expression | None:
    """``x.pow(2)``"""
    base, exponent = node.args[:2]
    if not isinstance(base, fx.Node) or not isinstance(exponent, int | float):
        return None
    whole = float(exponent).is_integer() and value_of(base).is_floating_point()
    return Expression(f"{shown(base).at(ATOM)}.pow({int(exponent) if whole else exponent!r})")


def batch_norm(node: fx.Node, shown: Printed) -> Expression | None:
    """``F.batch_norm``, in training where the module is."""
    given = dict(zip(["x", "weight", "bias", "mean", "var", "training", "momentum", "eps"], node.args))
    tracked = given["mean"] is not None  # else evaluation normalizes by the batch, too
    options = {"training": ("self.training" if tracked else "True") if given["training"] else "False"}
    if given["training"]:
        options["momentum"] = shown(given["momentum"]).text
    options["eps"] = shown(given["eps"]).text
    arguments = [shown(given[key]).text for key in ("x", "mean", "var", "weight", "bias")]
    return call("F.batch_norm", arguments, options)


def in_training(node: fx.Node) -> str:
    """Return the argument ``training`` of an operator that has one: what is on in evaluation alone is always on."""
    return "True" if node.meta.get("evaluated") else "self.training"


def stream_function(function: str) -> Spelling:
    """A dropout of ``random_streams.py``, which draws an example's numbers from its key."""

    def spelled(node: fx.Node, shown: Printed) -> Expression | None:
        if isinstance(node.target, torch._ops.OpOverload):
            return None
        arguments = [shown(argument).text for argument in node.args]
        options = {key: shown(item).text for key, item in node.kwargs.items() if key not in ("training", "sharded")}
        if function != "dropout_attention":
            if len(arguments) > 4:
                arguments, options["training"] = arguments[:4], in_training(node)
            if arguments[3:] == ["0"]:
                del arguments[3]
        options["training"] = in_training(node)
        if "sharded" in node.kwargs:
            options["sharded"] = _sharded_dims(node.kwargs["sharded"])
        return call(function, arguments, options)

    return spelled


def drawn(node: fx.Node, shown: Printed) -> Expression | None:
    """Numbers of ``random_streams.py``: ``normal(keys, [3, 32], dtype=torch.bfloat16)``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return None
    options = {key: shown(item).text for key, item in node.kwargs.items() if key != "sharded"}
    if "sharded" in node.kwargs:
        options["sharded"] = _sharded_dims(node.kwargs["sharded"])
    return call(operator_name(node), [shown(argument).text for argument in node.args], options)


def _sharded_dims(sharded: Any) -> str:
    """The sharded dims of a tensor: ``[(1, rank("tp"), size("tp"))]``."""
    shown = [
        f'({dim}, rank("{axis}"), size("{axis}"){f", {literal(tuple(parts))}" if parts else ""})'
        for dim, axis, parts in sharded
    ]
    return f"[{', '.join(shown)}]"


def layer_norm(node: fx.Node, shown: Printed) -> Expression | None:
    """``F.layer_norm(x, (64,), weight, bias)``"""
    given = given_arguments(node)
    shape = tuple(given["normalized_shape"])
    arguments = [shown(given["input"]).text, literal(shape)]
    for name in ("weight", "bias"):
        arguments.append(shown(given[name]).text if given.get(name) is not None else "None")
    return call("F.layer_norm", arguments, {"eps": shown(given["eps"]).text} if "eps" in given else {})
