"""How an operator can be sharded: by a rule that the user registered, else by its record, else as trial runs show."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.program import Helper, value_of
from graphpar.operators.discover import discover, sums_gradients
from graphpar.operators.functions import OPERATORS, names_of
from graphpar.operators.notation import Rule, parse_rule
from graphpar.operators.placement import Context, Placement, from_rule, normalized, operands_of, results_of, whole
from graphpar.operators.table import PLACED, record_of
from graphpar.runtime.layout import P, R

__all__ = ["REGISTERED", "has_rule", "placements", "register_rule", "rule_of"]

# Rules that the user registered, by qualified name.
REGISTERED: dict[str, str] = {}


def register_rule(operator: str, rule: str) -> None:
    """Say how a custom operator can be sharded: ``register_rule("mylib::op", "b s d, d -> b s d")``.

    A custom ``autograd.Function`` is named by its qualified class name: ``register_rule("mymodule.Scaled", "b d -> b d")``; one of a
    model file ``model.py`` is ``model.Scaled``.

    The rule lists the tensor operands and, after the arrow, the results: one factor for each dim, ``...`` for leading dims, ``?``
    after the factors of an optional operand. A factor that appears in the operands but not in the results is summed; write ``*``
    after every factor that may not be sharded.

    Raises:
        GraphparError: the notation is wrong.
    """
    wrong = _wrong(operator, rule)
    if wrong:
        raise GraphparError(f"The rule {rule!r} of {operator} {wrong}; a rule looks like 'b s d*, d* -> b s d*'.")
    REGISTERED[_key(operator)] = rule


def _key(operator: str) -> str:
    return operator.replace("::", ".")


def _registered_name(node: fx.Node) -> str | None:
    """Return the name under which a rule of ``node``'s operator is registered, if one is."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    function = OPERATORS.get(node.target)
    names = (node.target._schema.name,) if function is None else names_of(function.function)
    return next((key for name in names if (key := _key(name)) in REGISTERED), None)


def _wrong(operator: str, rule: str) -> str:
    if "::" not in operator and "." not in operator:
        return "names no operator: its name begins with a namespace, like mylib::op"
    if "->" not in rule:
        return "has no '->'"
    if rule.count("->") > 1:
        return "has more than one '->'"
    sides = [[part.split() for part in side.split(",")] for side in rule.split("->")]
    for factors in (*sides[0], *sides[1]):
        for word in factors:
            if word != "..." and not word.rstrip("*?").isalnum():
                return f"has the factor {word!r}, which is not a word"
        names = [word.rstrip("*?") for word in factors]
        repeated = [name for name in names if names.count(name) > 1 and name != "1"]
        if repeated:
            return f"names {repeated[0]!r} twice in one tensor"
    known = {word.rstrip("*?") for factors in sides[0] for word in factors}
    new = [word for factors in sides[1] for word in factors if word.rstrip("?") == word and word not in known]
    new = [word for word in new if not word.endswith("*") and word != "1"]
    if new:
        return f"has {new[0]!r} in the result alone: no operand says how it is sharded, so write '{new[0]}*'"
    return ""


def _registered(node: fx.Node) -> Rule | None:
    name = _registered_name(node)
    if name is None:
        return None
    text = REGISTERED[name]
    fixed = [word.rstrip("*") for word in text.replace(",", " ").split() if word.endswith("*")]
    ranks = [value_of(operand).ndim for operand in operands_of(node)]
    try:
        return parse_rule(text.replace("*", ""), ranks, [result.ndim for result in results_of(node)], fixed=fixed)
    except ValueError as error:
        raise GraphparError(f"The registered rule of {name} does not fit its use: {error}.") from error


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of an operator in factors; None where factors do not describe it."""
    registered, row = _registered(node), record_of(node).rule
    return registered if registered is not None or row is None else row(node)


def has_rule(node: fx.Node) -> bool:
    """Whether graphpar knows without a trial how ``node`` can be sharded (or that it can't be)."""
    created = not operands_of(node)
    return (
        created
        or isinstance(node.target, Helper)
        or record_of(node).placements is not None
        or rule_of(node) is not None
    )


def placements(node: fx.Node, context: Context, tried: fx.Node | None = None) -> list[Placement]:
    """List every legal placement of an operator on one axis, those that shard nothing included.

    ``tried``: the node of the program that ``node`` stands for, to be tried where no rule is known; ``node`` itself if None.
    """
    found = whole(node)
    if operands_of(node) and not isinstance(node.target, Helper) and isinstance(value_of(node), Tensor | tuple | list):
        record = record_of(node)
        if record.placements is not None and _registered(node) is None:
            found += _biased(record.placements(node, context), record.bias)
        else:
            rule = rule_of(node)
            if rule is None:
                rule = discover(tried or node)
                if not sums_gradients(tried or node):
                    found = [placement for placement in found if R not in placement.operands]
            found += _biased(from_rule(node, rule, context), record.bias) if rule is not None else []
        for composite in PLACED.get(node.target, ()):
            found += composite.placements(node, context) if composite.placements is not None else []
    return normalized(found, node, context)


def _biased(placements: list[Placement], bias: int | None) -> list[Placement]:
    """Make the bias partial (zero on all ranks but one) where the product is, so that it is added once."""
    if bias is None:
        return placements
    return [
        Placement(tuple(P if i == bias else kind for i, kind in enumerate(p.operands)), p.results, p.rewrite)
        if p.results == (P,) and len(p.operands) > bias
        else p
        for p in placements
    ]
