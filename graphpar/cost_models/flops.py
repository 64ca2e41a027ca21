"""Flops and bytes of a program's operators, from their shapes.

One block is counted once, whatever the number of its instances.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Chunked, Program, operator_name, value_of
from graphpar.operators.contractions import Size, matrices
from graphpar.operators.placement import literal, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of


def node_flops(program: Program, batch: int) -> dict[fx.Node, float]:
    """Return the forward flops of each node of the root graph for ``batch`` rows; a block's are its graph's sum."""
    blocks = {
        name: sum(operator_flops(node, batch) for node in block.graph.nodes) for name, block in program.blocks.items()
    }
    return {
        node: blocks[node.meta["block"]] if node.op == "call_module" else operator_flops(node, batch)
        for node in program.graph.nodes
    }


_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dominant_dtype(program: Program) -> str:
    """Return the dtype (``fp32``, ``bf16``, ...) of most of the forward's flops; weights may have another."""
    blocks = {name: _flops_by_dtype(block.graph, program.batch) for name, block in program.blocks.items()}
    total = _flops_by_dtype(program.graph, program.batch)
    for node in program.graph.nodes:
        if node.op == "call_module":
            for dtype, flops in blocks[node.meta["block"]].items():
                total[dtype] += flops
    return max(total, key=total.__getitem__, default="fp32")


def _flops_by_dtype(graph: fx.Graph, batch: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, Tensor) and value.dtype in _DTYPES:
            found[_DTYPES[value.dtype]] += operator_flops(node, batch)
    return found


def _shape(node: fx.Node, batch: int) -> list[int]:
    value = value_of(node)
    assert isinstance(value, Tensor)
    return [
        int(size) if coefficient is None else coefficient * batch
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    ]


def operator_flops(node: fx.Node, batch: int) -> float:
    """Return the flops of one operator: products, convolutions and attention exactly, others one an element."""
    if node.op != "call_function" or not isinstance(value_of(node), Tensor):
        return 0.0
    if isinstance(node.target, Chunked):
        return sum(operator_flops(each, batch) for each in node.target.graph.nodes)
    out = _shape(node, batch)
    if record_of(node).kind is Kind.ATTENTION:
        query, key = (_shape(operand, batch) for operand in operands_of(node)[:2])
        keys = key[-2] if (length := cache_length(node)) is None else length
        return 2.0 * math.prod(query[:-1]) * keys * (query[-1] + out[-1])
    products = matrices(node, lambda value: [Size(float(size)) for size in _shape(value, batch)])
    return sum(product.flops.number for product in products) if products else float(math.prod(out))


def cache_length(node: fx.Node) -> int | None:
    """Return for how many positions attention keeps keys and values in a cache, those of its sliding window; None where it keeps none."""
    if operator_name(node) != "cached_attention":
        return None
    length, window = literal(node, "length", 3), literal(node, "sliding_window", 6)
    return int(length) if window is None else min(int(length), int(window))


def cached_bytes(node: fx.Node) -> int | None:
    """Return the bytes of the keys and values that attention keeps for as many positions as its cache has room for."""
    length = cache_length(node)
    if length is None:
        return None
    kept = 0
    for operand in operands_of(node)[1:3]:
        *lead, _, width = _shape(operand, 1)
        kept += math.prod(lead) * length * width * value_of(operand).dtype.itemsize
    return kept


def tensor_bytes(node: fx.Node, batch: int) -> int:
    """Return the bytes of ``node``'s tensor for ``batch`` rows."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return math.prod(_shape(node, batch)) * value.dtype.itemsize
