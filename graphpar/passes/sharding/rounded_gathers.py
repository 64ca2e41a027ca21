"""``with_rounded_gathers``: what only products in 8 bits read is rounded before it is gathered.

    whole = all_gather(x, "tp", dim=1)             whole = all_gather_rounded(x, "tp", dim=1)
    q = fp8_linear(whole, q_proj.weight)           q = fp8_linear(whole, q_proj.weight)

Scales are of features, so that must not be the dim that is gathered, and blocks must divide it. When the function sends
8 bits is said in :mod:`graphpar.emitted.fp8_gathers`: gathering 8 bits in the forward and all bits in the backward sends
half as much again as one gather that is kept, and a fourth less than two. Where all weights are frozen, nothing in the
backward reads what is gathered.
"""

from __future__ import annotations

from torch import fx

from graphpar.emitted import collectives
from graphpar.emitted.fp8_gathers import all_gather_rounded
from graphpar.ir.program import Program, value_of
from graphpar.operators.parameter_casts import trains_weight
from graphpar.operators.table import record_of


def with_rounded_gathers(program: Program) -> Program:
    """Rewrite the program of a rank in place."""
    for scope, graph in program.scopes():
        for node in graph.nodes:
            if node.target is collectives.all_gather and (block := _block(node)) is not None:
                node.target = all_gather_rounded
                options = {"block": block} if block else {}
                if not any(trains_weight(program, scope, user) for user in node.users):
                    options["for_weights"] = False
                node.kwargs = {**node.kwargs, **options}
    return program


def _block(gather: fx.Node) -> int | None:
    """Return of how many features a scale is, 0: all of a row; None where what is gathered is read otherwise, too."""
    features = value_of(gather).shape[-1]
    if gather.kwargs["dim"] == value_of(gather).ndim - 1:
        return None
    blocks = {
        rounding.block
        if user.op == "call_function" and (rounding := record_of(user).rounding) and gather not in user.args[1:]
        else None
        for user in gather.users
    }
    block = blocks.pop() if len(blocks) == 1 else None
    return block if block is not None and features % (block or 1) == 0 else None
