"""``with_rounded_gathers``: what only products in 8 bits read is rounded before it is gathered.

    whole = all_gather(x, "tp", dim=1)             whole = all_gather_rounded(x, "tp", dim=1)
    q = fp8_linear(whole, q_proj.weight)           q = fp8_linear(whole, q_proj.weight)

A row has one scale along its features, so that must not be the dim that is gathered. When the function sends 8 bits is said in
:mod:`graphpar.emitted.fp8_gathers`: gathering 8 bits in the forward and all bits in the backward sends half as much again as one gather
that is kept, and a fourth less than two.
"""

from __future__ import annotations

from torch import fx

from graphpar.emitted import collectives
from graphpar.emitted.fp8_gathers import all_gather_rounded
from graphpar.ir.program import Program, value_of
from graphpar.operators.table import record_of


def with_rounded_gathers(program: Program) -> Program:
    """Rewrite the program of a rank in place."""
    for graph in (program.graph, *(block.graph for block in program.blocks.values())):
        for node in graph.nodes:
            if node.target is collectives.all_gather and _is_rounded(node):
                node.target = all_gather_rounded
    return program


def _is_rounded(gather: fx.Node) -> bool:
    if gather.kwargs["dim"] == value_of(gather).ndim - 1:
        return False
    return bool(gather.users) and all(
        user.op == "call_function" and record_of(user).operand_bytes is not None and gather not in user.args[1:]
        for user in gather.users
    )
