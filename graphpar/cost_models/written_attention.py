"""The work of attention whose dropout is exact: products, and passes over the scores, which no kernel fuses.

scores = q @ k^T * scale, masked ──softmax──► weights ──mask by hashes──► dropped ──► dropped @ v        each in memory, [b, h, q, k]
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphpar.cost_models.work import Attention, Phase, Product, Row, Traffic
from graphpar.ir.program import operator_name
from graphpar.operators.contractions import product_of

_HASHES = 15 * 2 * 8
"""Bytes an element of a mask: SplitMix64 is some 15 kernels, each of which reads and writes an int64."""
_PASSES = 2
"""Passes over the weights, each of a read and a write: dividing by what is kept, and choosing it; as many for their gradients."""


def is_written_out(node: fx.Node) -> bool:
    """Return whether ``node`` is attention without a fused kernel."""
    return operator_name(node) == "dropout_attention" and not node.kwargs.get("kernel")


def written_out(row: Attention, differentiable: bool) -> Iterator[Row]:
    """Yield the rows of an attention that would be ``row`` by a fused kernel: all scores are computed, also those that are masked."""
    heads, m, n, width = row.heads, row.queries, row.keys, int(row.width)
    scores = product_of((heads, m, n))
    passes = 1 + row.causal  # over the scores: scaling, masking
    product = Product(Phase.FORWARD, heads, m, n, type(m)(float(width)), row.itemsize, copies=row.copies)
    yield from [product] * 2
    yield from [Traffic(Phase.FORWARD, (2.0 * row.itemsize) * scores)] * (_PASSES + passes)
    yield Traffic(Phase.FORWARD, (2.0 * row.itemsize) * scores, True)
    yield Traffic(Phase.FORWARD, float(_HASHES) * scores)
    if differentiable:
        yield from [product._replace(phase=Phase.INPUT)] * 4
        yield from [Traffic(Phase.INPUT, (2.0 * row.itemsize) * scores)] * (_PASSES + passes)
        yield Traffic(Phase.INPUT, (3.0 * row.itemsize) * scores, True)
