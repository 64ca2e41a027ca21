"""``cast_weights``: parameters are stored in one dtype and read in another.

    linear(x, weight)  traced with weight in bf16, stored in fp32   ->   linear(x, weight.to(bfloat16))

The gradient of a cast is a cast back, so gradients arrive in the dtype in which parameters are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from graphpar.errors import GraphparError
from graphpar.ir.fakes import fake_like
from graphpar.ir.program import Program, operator_name, value_of, where
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied

_aten = torch.ops.aten
_OF_ONE_DTYPE = {Kind.PRODUCT, Kind.ATTENTION, Kind.NORM}


def cast_weights(program: Program) -> Program:
    """Declare parameters in the dtypes in which they are stored, with a cast for each module that reads one.

    Raises:
        GraphparError: an operator takes a parameter in 16 bits together with a value in 32.
    """
    for node in program.graph.nodes:
        _check_operands(node)
    if not program.stored:
        return program
    graph = copied(program.graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in program.stored:
            _cast(graph, node, program.stored[str(node.target)], places)
    infos = {name: replace(program.parameters[name], dtype=dtype) for name, dtype in program.stored.items()}
    return program.with_graph(graph, parameters=program.parameters | infos, stored={})


def _check_operands(node: fx.Node) -> None:
    """Check that products and norms don't take a weight of 16 bits with an input of 32: a trace does, and torch's kernels don't."""
    if node.op != "call_function" or record_of(node).kind not in _OF_ONE_DTYPE or operator_name(node) == "rms_norm":
        return
    values = [(operand, value_of(operand)) for operand in node.all_input_nodes]
    floating = [(operand, v.dtype) for operand, v in values if isinstance(v, Tensor) and v.is_floating_point()]
    weights = [(operand, dtype) for operand, dtype in floating if operand.op == "get_attr" and dtype.itemsize == 2]
    if weights and floating[0][1].itemsize > 2:
        weight, dtype = weights[0]
        raise GraphparError(
            f"{operator_name(node)}{where(node)} takes an input in {_short(floating[0][1])} and {str(weight.target)!r} in "
            f"{_short(dtype)}: something before it is in 32 bits, such as a buffer, or is cast to 32. Cast the input in the model: "
            "x.to(self.weight.dtype)."
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(graph: fx.Graph, node: fx.Node, stored: torch.dtype, places: Mapping[fx.Node, int]) -> None:
    """Cast the parameter ``node`` once for each module that uses it, so that the cast belongs to that module's block; ``places``
    has the order of its users."""
    read = value_of(node)
    assert isinstance(read, Tensor)
    node.meta["val"] = _fake(read, stored)
    made: dict[Any, fx.Node] = {}
    for user in sorted(node.users, key=places.__getitem__):
        stack = user.meta.get("module_stack", ())
        if stack not in made:
            with graph.inserting_before(user):
                made[stack] = graph.call_function(_aten.to.dtype, (node, read.dtype))
            made[stack].meta = dict(node.meta, val=read, module_stack=stack)
            if "source" in user.meta:
                made[stack].meta["source"] = user.meta["source"]
        user.replace_input_with(node, made[stack])


def _fake(value: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, FakeTensor):
        return value.to(dtype)
    return fake_like(value, dtype).requires_grad_(value.requires_grad)
