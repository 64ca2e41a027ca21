"""``idioms``: what a model spells out in small operators, and torch has as one, becomes that one.

    weight * (x * rsqrt(x.pow(2).mean(-1) + eps))                F.rms_norm(x, [n], weight, eps)
    x * 0.5 * (1 + erf(x / 2 ** 0.5))                            F.gelu(x)
    softmax(q @ k.mT * scale + mask) @ v                         F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    attention with a mask made of arange, triu, <=, where        is_causal=True, where the mask's values prove it
    x * cos + rotate_half(x) * sin                               apply_rotary(x, cos, sin)
    keys.unsqueeze(2).expand(.., 4, ..).flatten(1, 2)            enable_gqa=True, where no mask is left

Fewer kernels run, and autograd keeps fewer tensors. Each is the same function of the same tensors; in 16 bits a norm is rounded once
where the model rounds twice. ``--skip idioms`` leaves all as they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.attention_idioms import causal_attention, grouped_heads, plain_attention
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.graph_matching import cast_from, insert_call, is_call, number, sizes
from graphpar.passes.normalize.pointwise_idioms import activation
from graphpar.passes.normalize.rotary_idioms import rotary
from graphpar.passes.normalize.simplify import remove_dead_code

_aten = torch.ops.aten


@dataclass(frozen=True)
class Idiom:
    """``rewrite`` replaces what ends in an operator ``at``, by its name or kind, if it is the idiom, and says whether it was.

    Attributes:
        written: for people, what the model has; ``now``: what the program calls.
    """

    name: str
    written: str
    now: str
    at: tuple[str | Kind, ...]
    rewrite: Callable[[fx.Node, Masks], bool]


def rms_norm(node: fx.Node, masks: Masks) -> bool:
    """``x * rsqrt(mean(x * x) + eps)``, cast, and times a weight: ``F.rms_norm``."""
    found = _divided_by_root(node)
    if found is None:
        return False
    x, root = found
    total, eps = _sum_with_number(root)
    if total is None or eps is None or not is_call(total, "mean") or not literal(total, "keepdim"):
        return False
    square, rank = total.args[0], value_of(x).ndim
    dims = sorted(int(dim) % rank for dim in literal(total, "dim") or ())
    if not isinstance(square, fx.Node) or not dims or dims != list(range(rank - len(dims), rank)):
        return False
    source, squared = cast_from(x), _squared(square)
    if squared is None or cast_from(squared) is not source or value_of(total).dtype != value_of(square).dtype:
        return False
    shape = [sizes(x)[dim] for dim in dims]
    if not all(isinstance(size, int) for size in shape):
        return False
    if value_of(node).dtype == torch.float64 != value_of(source).dtype:
        return False  # torch computes the norm of fp32 in fp32
    last, weight = _weighted(node, value_of(source).dtype, shape)
    given = source if value_of(last).dtype == value_of(source).dtype else x
    if value_of(given).dtype != value_of(last).dtype:
        return False
    insert_call(last, _aten.rms_norm.default, (given, shape, weight, eps))
    return True


def _divided_by_root(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return x and v of ``x * rsqrt(v)``, ``x / sqrt(v)``, or ``x * v ** -0.5``."""
    first, second = node.args[0], node.args[1]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)) or literal(node, "rounding_mode", default=""):
        return None
    if is_call(node, "div"):
        return (first, second.args[0]) if is_call(second, "sqrt") and isinstance(second.args[0], fx.Node) else None
    for x, root in ((first, second), (second, first)):
        below = root.args[0] if root.op == "call_function" and root.args else None
        if is_call(root, "rsqrt") or (is_call(root, "pow") and number(root.args[1]) == -0.5):
            return (x, below) if isinstance(below, fx.Node) else None
        if is_call(root, "reciprocal") and isinstance(below, fx.Node) and is_call(below, "sqrt"):
            inner = below.args[0]
            return (x, inner) if isinstance(inner, fx.Node) else None
    return None


def _sum_with_number(node: fx.Node) -> tuple[fx.Node | None, float | None]:
    """Return x and e of ``x + e``."""
    if not is_call(node, "add") or literal(node, "alpha", default=1) != 1:
        return None, None
    for x, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if isinstance(x, fx.Node) and number(other) is not None:
            return x, number(other)
    return None, None


def _squared(node: fx.Node) -> fx.Node | None:
    """Return x of ``x ** 2``, ``x.square()`` or ``x * x``."""
    square = is_call(node, "square") or (is_call(node, "pow") and number(node.args[1]) == 2)
    square |= is_call(node, "mul") and node.args[0] is node.args[1]
    operand = node.args[0] if square else None
    return operand if isinstance(operand, fx.Node) else None


def _weighted(norm: fx.Node, dtype: torch.dtype, shape: list[Any]) -> tuple[fx.Node, fx.Node | None]:
    """Return what a normalised value becomes, and the weight: it is cast back to ``dtype``, and multiplied, where nothing else uses it."""
    last, (only,) = norm, list(norm.users) if len(norm.users) == 1 else [None]
    if only is not None and record_of(only).kind is Kind.COPY and value_of(only).dtype == dtype != value_of(norm).dtype:
        last, (only,) = only, list(only.users) if len(only.users) == 1 else [None]
    if only is None or not is_call(only, "mul"):
        return last, None
    for weight, other in ((only.args[0], only.args[1]), (only.args[1], only.args[0])):
        if other is last and isinstance(weight, fx.Node) and isinstance(value_of(weight), Tensor):
            alike = value_of(weight).dtype == value_of(last).dtype == value_of(only).dtype
            if alike and sizes(weight) == shape:
                return only, weight
    return last, None


IDIOMS = (
    Idiom("rms_norm", "norms by root mean square", "F.rms_norm", ("mul", "div"), rms_norm),
    Idiom("activation", "activations in tanh, erf or sigmoid", "F.gelu and the like", ("mul",), activation),
    Idiom(
        "attention",
        "attention in products and softmax",
        "F.scaled_dot_product_attention",
        ("matmul", "bmm"),
        plain_attention,
    ),
    Idiom("is_causal", "causal masks", "is_causal=True", ("scaled_dot_product_attention",), causal_attention),
    Idiom(
        "enable_gqa", "repeated keys and values", "enable_gqa=True", ("scaled_dot_product_attention",), grouped_heads
    ),
    Idiom(
        "rotary",
        "rotary position embeddings",
        "apply_rotary",
        (Kind.POINTWISE, Kind.MOVE, Kind.RESHAPE),
        rotary,
    ),
)
"""What is looked for, in this order."""


def idiom_texts(counts: Mapping[str, int], *, written: bool = False) -> list[str]:
    """Say for each idiom how often the program has it, ``65 x F.rms_norm``, and with ``written`` what stands in the model instead."""
    found = [(f"{counts[idiom.name]:,} x {idiom.now}", idiom) for idiom in IDIOMS if idiom.name in counts]
    return [f"{text}: {idiom.written} in the model" if written else text for text, idiom in found]


def use_idioms(program: Program) -> Program:
    """Replace what is an idiom; the program says how many of each there were."""
    graph, found = copied(program.graph), Counter[str]()
    masks = Masks(program.with_graph(graph))
    for idiom in IDIOMS:
        for node in list(graph.nodes):
            if {operator_name(node), record_of(node).kind} & {*idiom.at} and (node.users or node.op == "output"):
                found[idiom.name] += idiom.rewrite(node, masks)
    remove_dead_code(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in program.constants.items() if name in used or name in program.buffers}
    return program.with_graph(
        graph, constants=constants, idioms={name: count for name, count in found.items() if count}
    )
