"""``cast_weights``: parameters are stored in one dtype and read in another.

    linear(x, weight)  traced with weight in bf16, stored in fp32   ->   linear(x, weight.to(bfloat16))

The gradient of a cast is a cast back, so gradients arrive in the dtype in which parameters are stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import Program, value_of
from graphpar.passes.normalize.functional import copied

_aten = torch.ops.aten


def cast_weights(program: Program) -> Program:
    """Declare parameters in the dtypes in which they are stored, with a cast for each module that reads one."""
    if not program.stored:
        return program
    graph = copied(program.graph)
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in program.stored:
            _cast(graph, node, program.stored[str(node.target)])
    infos = {name: replace(program.parameters[name], dtype=dtype) for name, dtype in program.stored.items()}
    return program.with_graph(graph, parameters=program.parameters | infos, stored={})


def _cast(graph: fx.Graph, node: fx.Node, stored: torch.dtype) -> None:
    """Cast the parameter ``node`` once for each module that uses it, so that the cast belongs to that module's block."""
    read = value_of(node)
    assert isinstance(read, Tensor)
    node.meta["val"] = _fake(read, stored)
    made: dict[Any, fx.Node] = {}
    places = {user: place for place, user in enumerate(graph.nodes)}
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
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return value.to(dtype)
    with mode:
        return value.to(dtype)
