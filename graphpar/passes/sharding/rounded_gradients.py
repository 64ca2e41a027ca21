"""``with_rounded_gradients``: gradients of weights are products in 8 bits where blocks of tokens don't depend on the mesh.

    x [b, 4096, d], of a rank [b, 2048, d]      mxfp8_linear(x, up.weight)                 blocks of 32 tokens
    x [b, 40, d]; [b, d]                        mxfp8_linear_with_gw_hp(x, up.weight)      the product is in bf16

Blocks of other tokens would hold those of several examples, which microbatches and replicas divide, or of a rank's part
alone. So rows must be tokens of a sequence, and a multiple of a block, on each rank; else all calls of a weight have
gradients that are not rounded.
"""

from __future__ import annotations

from torch import fx

from graphpar.emitted.fp8 import mxfp8_linear, mxfp8_linear_with_gw_hp
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Program, value_of
from graphpar.operators.parameter_casts import trains_weight, weight_names
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.runtime.layout import Shard


def with_rounded_gradients(program: Program) -> Program:
    """Rewrite the program of a rank in place."""
    products = {
        node: weight_names(program, scope, node)
        for scope, graph in program.scopes()
        for node in graph.nodes
        if node.target is mxfp8_linear and trains_weight(program, scope, node)
    }
    left = {node for node in products if program.lengths is not None or not _has_blocks(node)}
    while left:
        names = set[str]().union(*(products.pop(node) for node in left))
        for node in left:
            node.target = mxfp8_linear_with_gw_hp
        left = {node for node, own in products.items() if own & names}
    return program


def _has_blocks(product: fx.Node) -> bool:
    """Whether consecutive rows of what is multiplied, as many as a block, are of one sequence on all ranks."""
    x = product.args[0]
    assert isinstance(x, fx.Node)
    source = x.all_input_nodes[0] if x.op == "call_function" and record_of(x).kind is Kind.RESHAPE else x
    if value_of(x).ndim == 2 and value_of(source).shape[-1] == value_of(x).shape[-1]:
        x = source
    *outer, tokens, _ = batch_coefficients(x) if value_of(x).ndim > 2 else (None, None)
    if tokens is not None or not any(outer):
        return False
    dim, rounding = value_of(x).ndim - 2, record_of(product).rounding
    assert rounding is not None
    shards = [kind for kind in x.meta.get("types", {}).values() if isinstance(kind, Shard) and kind.dim == dim]
    values = [value_of(node) for node in (x, x.meta.get("origin", x))]  # of a rank, and of all
    whole = all(value.ndim == dim + 2 and int(value.shape[dim]) % rounding.block == 0 for value in values)
    return whole and not any(kind.parts for kind in shards)
