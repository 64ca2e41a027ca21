"""How each operator is written in Python: as its record says, or by rule.

    aten.linear(x, w)  ──record──►  F.linear(x, self.weight)         aten.erfinv(x)  ──rule──►  torch.erfinv(x)

Operators whose record has no spelling that fits are spelled ``F.name``, ``torch.name``, ``torch.linalg.name`` or as a method, whichever
takes the same arguments; else ``torch.ops.namespace.name``. A spelling fits if each argument that is not at its default changes the
text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from graphpar.emitted import collectives, expert_rows
from graphpar.ir.program import operator_name
from graphpar.operators.functions import OPERATORS, FunctionOperator
from graphpar.operators.spelling import (
    WORDS,
    Expression,
    Printed,
    Spelling,
    as_operator,
    call,
    called_on,
    given_arguments,
    in_training,
    literal,
)
from graphpar.operators.table import record_named


def spell(node: fx.Node, shown: Printed, anchor: str) -> Expression:
    """Write a ``call_function`` node in Python. ``anchor`` is an expression whose ``.device`` factories use."""
    if getattr(node.target, "__module__", None) in (collectives.__name__, expert_rows.__name__):
        return _collective(node, shown)
    spellings: tuple[Spelling, ...] = (*record_named(operator_name(node)).spelling, partial(_by_rule, anchor=anchor))
    for spelling in spellings:
        spelled = spelling(node, shown)
        if spelled is not None and _tells_all(node, shown, spelling, spelled):
            return spelled
    return as_operator(node, shown)


SILENT = {"device", "layout", "pin_memory", "non_blocking", "cudnn_enable", "cudnn_enabled", "path"}
"""Arguments that no result depends on: where a program runs, and the order (``path``) in which einsum takes its products."""


LEFT_OUT = {"start": 0}
"""What an argument is where it may be None and is."""


def _tells_all(node: fx.Node, shown: Printed, spelling: Spelling, spelled: Expression) -> bool:
    """Whether each argument that differs from its default shows in the text: with the default in its place another would come out."""
    others = (spelling(changed, shown) for changed in _at_defaults(node, shown))
    return all(other is None or other.text != spelled.text for other in others)


def _at_defaults(node: fx.Node, shown: Printed) -> Iterator[fx.Node]:
    """Yield ``node`` with each argument that it is given in turn left at its default, if that reads otherwise: no end is no end."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    given = given_arguments(node)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in given and argument.has_default_value() and argument.name not in SILENT:
            default = argument.default_value
            value = given[argument.name]
            if shown(value).text == shown(default).text or (default is None and LEFT_OUT.get(argument.name) == value):
                continue
            args = tuple(default if place == index else item for index, item in enumerate(node.args))
            kwargs = {key: default if key == argument.name else item for key, item in node.kwargs.items()}
            made = {"op": node.op, "target": node.target, "args": args, "kwargs": kwargs, "meta": node.meta}
            yield cast(fx.Node, SimpleNamespace(**made, name=node.name, users=node.users))


_FAMILIES = {"linalg_": "torch.linalg.", "fft_": "torch.fft.", "special_": "torch.special."}


def _by_rule(node: fx.Node, shown: Printed, anchor: str) -> Expression:
    name = operator_name(node)
    arguments = [shown(argument) for argument in node.args]
    texts = [argument.text for argument in arguments]
    options = {key: shown(item).text for key, item in node.kwargs.items()}
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        module = getattr(target, "__module__", "")
        prefix = "F." if module == "torch.nn.functional" or getattr(F, name, None) is target else ""
        return call(f"{prefix}{name}", texts, options)
    if target in OPERATORS:
        return _function(OPERATORS[target], node, shown)
    if target.namespace != "aten":
        name = target._schema.name.partition("::")[2]
        return call(f"torch.ops.{target.namespace}.{name}", texts, options)
    if _is_factory(node):
        options["device"] = f"{anchor}.device"
        if name == "scalar_tensor":  # torch.tensor copies the number from the host, which waits for a GPU
            return call("torch.full", ["()", *texts], options)
        return call(f"torch.{name}", texts, options)
    for function, path in _functions(name):
        fitting = _fitting(function, node, shown)
        if fitting is not None:
            return call(path, *fitting)
    if node.args and isinstance(node.args[0], fx.Node) and callable(getattr(Tensor, name, None)):
        return called_on(arguments[0], name, texts[1:], options)
    return as_operator(node, shown)


def _is_factory(node: fx.Node) -> bool:
    """Whether an operator makes a tensor from numbers alone, on the device of its argument ``device``."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return "device" in names and names[0] not in ("self", "input")


def _function(operator: FunctionOperator, node: fx.Node, shown: Printed) -> Expression:
    """``Scaled.apply(x, 2.0)``"""
    arguments = [shown(argument).text for argument in operator.given(node.args)]
    applied = call(f"{operator.function.__qualname__}.apply", arguments, {})
    return Expression(f"{applied.text}[0]") if operator.alone else applied


def _functions(name: str) -> list[tuple[Any, str]]:
    """torch's public functions called like the operator, with their paths."""
    found = [(getattr(F, name, None), f"F.{name}"), (getattr(torch, name, None), f"torch.{name}")]
    for family, path in _FAMILIES.items():
        if name.startswith(family):
            short = name.removeprefix(family)
            found.append((getattr(getattr(torch, family.rstrip("_")), short, None), f"{path}{short}"))
    return [(function, path) for function, path in found if callable(function)]


def _fitting(function: Any, node: fx.Node, shown: Printed) -> tuple[list[str], dict[str, str]] | None:
    """The node's arguments as ``function`` takes them; None where it takes other arguments.

    Functions written in C++ take those of the operator. Functions written in Python may differ in order, have further options
    that change the meaning (``stft(center=True)``), or return something else (``adaptive_max_pool2d``: no indices).
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return [shown(item).text for item in node.args], {key: shown(item).text for key, item in node.kwargs.items()}
    given, names = given_arguments(node), list(parameters)
    schema = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    kinds = {parameter.kind for parameter in parameters.values()}
    further = [
        p.default
        for p in parameters.values()
        if p.name not in (*schema, "input", "_stacklevel") and p.kind is not p.VAR_POSITIONAL
    ]
    if inspect.Parameter.VAR_KEYWORD in kinds or any(default not in (None, False) for default in further):
        return None
    arguments: list[str] = []
    options: dict[str, str] = {}
    spread = inspect.Parameter.VAR_POSITIONAL in kinds  # torch.einsum(equation, *tensors)
    aligned = True
    for position, name in enumerate(schema):
        if name not in given:
            aligned = False
            continue
        item = literal(WORDS[name][given[name]]) if name in WORDS else shown(given[name]).text
        own = parameters[names[position]] if position < len(names) else None
        same = (
            own is not None
            and own.kind is not own.KEYWORD_ONLY
            and own.name in (name, "input" if name == "self" else name)
        )
        if spread and (name not in names or parameters[name].kind is inspect.Parameter.VAR_POSITIONAL):
            parts = given[name] if isinstance(given[name], list | tuple) else [given[name]]
            arguments += [shown(part).text for part in parts]
        elif aligned and same:
            arguments.append(item)
        elif name in names:
            options[name] = item
        else:
            return None
    return arguments, options


def _collective(node: fx.Node, shown: Printed) -> Expression:
    """A redistribution: ``all_gather(hidden, "tp", dim=1)``."""
    options = {key: shown(item).text for key, item in node.kwargs.items() if item is not None and item != ()}
    if "training" in options:
        options["training"] = in_training(node)
    return call(operator_name(node), [shown(item).text for item in node.args], options)
