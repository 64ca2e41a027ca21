"""Flops and bytes of a program's operators, from their shapes.

One block is counted once, whatever the number of its instances.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.emitted import random_streams
from graphpar.ir.program import Program, batch_coefficients, operator_name, value_of
from graphpar.operators.contractions import contraction


def node_flops(program: Program, batch: int) -> dict[fx.Node, float]:
    """Forward flops of each node of the root graph for a batch of ``batch`` rows; a block's are its graph's sum."""
    blocks = {
        name: sum(operator_flops(node, batch) for node in block.graph.nodes) for name, block in program.blocks.items()
    }
    return {
        node: blocks[node.meta["block"]] if node.op == "call_module" else operator_flops(node, batch)
        for node in program.graph.nodes
    }


_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dominant_dtype(program: Program) -> str:
    """The dtype (``fp32``, ``bf16``, ...) in which most of the forward's flops are done, whatever the dtype of the weights."""
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


def _shape(node: Any, batch: int) -> list[int]:
    value = value_of(node)
    assert isinstance(value, Tensor)
    return [
        int(size) if coefficient is None else coefficient * batch
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    ]


def operator_flops(node: fx.Node, batch: int) -> float:
    """Flops of one operator: matrix products and convolutions exactly, the rest one an element."""
    if node.op != "call_function":
        return 0.0
    value = value_of(node)
    name = operator_name(node)
    if not isinstance(value, Tensor):
        return 0.0
    out = _shape(node, batch)
    elements = float(math.prod(out))
    operands = [a for a in node.args if isinstance(a, fx.Node) and isinstance(value_of(a), Tensor)]
    if name == "linear" or (name in ("matmul", "mm", "bmm") and len(operands) >= 2):
        return 2.0 * elements * _shape(operands[0], batch)[-1]
    if (product := contraction(node)) is not None:
        return 2.0 * math.prod(number * (batch if power else 1) for number, power in product.sizes)
    if name == "addbmm":
        return 2.0 * math.prod(_shape(operands[1], batch)) * out[-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * elements * _shape(operands[1], batch)[-1]
    if name.startswith("conv_transpose"):
        return 2.0 * math.prod(_shape(operands[0], batch)) * math.prod(_shape(operands[1], batch)[1:])
    if name.startswith("conv"):
        weight = _shape(operands[1], batch)
        return 2.0 * elements * math.prod(weight[1:])
    if name == "scaled_dot_product_attention" or node.target is random_streams.dropout_attention:
        query, key = _shape(operands[0], batch), _shape(operands[1], batch)
        return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + out[-1])
    if "grouped_mm" in name:
        return 2.0 * elements * _shape(operands[0], batch)[-1]
    return elements


def tensor_bytes(node: fx.Node, batch: int) -> int:
    """Bytes of ``node``'s tensor for a batch of ``batch`` rows."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return math.prod(_shape(node, batch)) * value.dtype.itemsize
