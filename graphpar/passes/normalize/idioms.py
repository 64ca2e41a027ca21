"""``idioms``: what a model spells out in small operators becomes the one operator that torch, or the emitted package, has for it.

    weight * (x * rsqrt(x.pow(2).mean(-1) + eps))                F.rms_norm(x, [n], weight, eps)
    (x - mean) * rsqrt(var + eps) * weight + bias                F.layer_norm(x, [n], weight, bias, eps)
    exp(x - max) / sum                                           F.softmax(x, dim)
    x * 0.5 * (1 + erf(x / 2 ** 0.5))                            F.gelu(x)
    silu(gate) * up                                              swiglu(gate, up)
    softmax(q @ k.mT * scale + mask) @ v                         F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    attention with a mask made of arange, triu, <=, where        is_causal=True, where the mask's values prove it
    attention with a mask of packed documents                    packed_attention(q, k, v, documents)
    x * cos + rotate_half(x) * sin                               apply_rotary(x, cos, sin)
    view_as_real(view_as_complex(x) * polar(1, angles))          apply_rotary(x, table.real, table.imag, interleaved=True)
    keys.unsqueeze(2).expand(.., 4, ..).flatten(1, 2)            enable_gqa=True, where no mask is left

Fewer kernels run, and autograd keeps fewer tensors. Each is the same function of the same tensors; in 16 bits a norm is rounded once
where the model rounds twice. ``--skip idioms`` leaves all as they are written.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpar.ir.program import Program
from graphpar.operators.record import Kind
from graphpar.operators.table import COMPOSITES
from graphpar.passes.normalize.attention_idioms import causal_attention, grouped_heads, plain_attention
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.graph_matching import Pattern, call, matches
from graphpar.passes.normalize.norm_idioms import LAYER_NORM, RMS_NORM, SOFTMAX, layer_norm, rms_norm, softmax
from graphpar.passes.normalize.packed_masks import packed_attention
from graphpar.passes.normalize.pointwise_idioms import activation, composite, composite_patterns
from graphpar.passes.normalize.rotary_idioms import rotary
from graphpar.passes.normalize.simplify import remove_dead_code


@dataclass(frozen=True)
class Idiom:
    """``rewrite`` replaces what fits ``pattern``, if it is the idiom, and says whether it was; it gets what the pattern's names stand for.

    Attributes:
        written: for people, what the model has; ``now``: what the program calls.
    """

    name: str
    written: str
    now: str
    pattern: Pattern | Callable[[], Pattern]
    rewrite: Callable[[fx.Node, dict[str, Any], Masks], bool]


_ATTENTION = call("scaled_dot_product_attention")
IDIOMS = (
    Idiom("softmax", "softmax in exponentials", "F.softmax", SOFTMAX, softmax),
    Idiom("layer_norm", "layer norms in means and roots", "F.layer_norm", LAYER_NORM, layer_norm),
    Idiom("rms_norm", "norms by root mean square", "F.rms_norm", RMS_NORM, rms_norm),
    Idiom("activation", "activations in tanh, erf or sigmoid", "F.gelu and the like", call("mul"), activation),
    *(
        Idiom(name, each.title, name, functools.partial(composite_patterns, each), functools.partial(composite, each))
        for name, each in COMPOSITES.items() if each.fuses
    ),
    Idiom(
        "attention", "attention in products and softmax", "F.scaled_dot_product_attention", call("matmul bmm"), plain_attention
    ),
    Idiom("is_causal", "causal masks", "is_causal=True", _ATTENTION, causal_attention),
    Idiom("packed", "masks of documents", "packed_attention", _ATTENTION, packed_attention),
    Idiom("enable_gqa", "repeated keys and values", "enable_gqa=True", _ATTENTION, grouped_heads),
    Idiom(
        "rotary", "rotary position embeddings", "apply_rotary", tuple(map(call, (Kind.POINTWISE, Kind.MOVE, Kind.RESHAPE))), rotary
    ),
)  # fmt: skip
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
        pattern = idiom.pattern() if callable(idiom.pattern) else idiom.pattern
        for node in list(graph.nodes):
            fits = matches(pattern, node) if node.users else ()
            found[idiom.name] += any(idiom.rewrite(node, names, masks) for names in fits)
    remove_dead_code(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in program.constants.items() if name in used or name in program.buffers}
    return program.with_graph(
        graph, constants=constants, idioms={name: count for name, count in found.items() if count}
    )
