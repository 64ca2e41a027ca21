"""``keep_marks``: ``torch.distributed.pipelining.pipe_split()`` in a forward marks the operator after it.

The call itself computes nothing and is removed. A stage begins at the marked operator, or at the call of its block, unless the user
gives other split points.
"""

from __future__ import annotations

from graphpar.ir.program import Program, operator_name
from graphpar.passes.normalize.functional import copied


def keep_marks(program: Program) -> Program:
    """Replace ``pipe_split()`` by ``meta["stage_begins"]`` on the operator after it."""
    if not any(operator_name(node) == "_pipe_split" for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    for node in list(graph.nodes):
        if operator_name(node) == "_pipe_split":
            following = node.next
            while following.op not in ("call_function", "output"):
                following = following.next
            following.meta["stage_begins"] = True
            graph.erase_node(node)
    return program.with_graph(graph)
