"""``keep_marks``: ``torch.distributed.pipelining.pipe_split()`` in a forward marks the operator after it.

The marker itself does nothing, so it leaves the graph; where the mark ends up (an operator of the root, or the call of a
block) is where a stage begins, unless the user says otherwise.
"""

from __future__ import annotations

from torch import fx

from graphpar.ir.program import Program, operator_name


def keep_marks(program: Program) -> Program:
    """Program -> Program in which ``meta["stage_begins"]`` stands for ``pipe_split()``."""
    if not any(operator_name(node) == "_pipe_split" for node in program.graph.nodes):
        return program
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, copies))
    for node in list(graph.nodes):
        if operator_name(node) == "_pipe_split":
            following = node.next
            while following.op not in ("call_function", "output"):
                following = following.next
            following.meta["stage_begins"] = True
            graph.erase_node(node)
    return program.with_graph(graph)
