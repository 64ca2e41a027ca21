"""The work of blocks that run their forward again in the backward (:mod:`graphpar.emitted.recomputation`).

A repetition ends before the last operator whose backward reads something: its operands are all that is still missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from graphpar.cost_models.work import Phase, Work
from graphpar.cost_models.workload import Works
from graphpar.ir.program import Block, value_of
from graphpar.ir.recomputation import Recomputation
from graphpar.operators.contractions import ONE, matrices
from graphpar.operators.record import Kind, Reads
from graphpar.operators.table import record_of


def repeated_work(works: Works, graph: fx.Graph, recomputed: Mapping[str, Recomputation]) -> Work:
    """Return the forward work that runs again in the backward of a stage; ``recomputed`` are its blocks, by path."""
    found, known = Work(), dict[tuple[str, str], Work]()
    for node in graph.nodes:
        if node.op == "call_module" and (how := recomputed.get(str(node.target))) is not None:
            block = works.program.block_of(node)
            if (block.name, how.kind) not in known:
                known[block.name, how.kind] = repeated_in(works, block, how)
            found = found + known[block.name, how.kind]
    return found


def repeated_in(works: Works, block: Block, how: Recomputation) -> Work:
    """Return the forward work that an instance of ``block`` repeats."""
    if how.by_hooks:
        again = [node for node in block.graph.nodes if node.op == "call_function" and node.name not in how.nodes]
        sent = {node.name: works.gathers_again(node, block.name) for node in again}
        gathered = Work(dict(Counter(row for rows in sent.values() for row in rows)))
        computed = works.block(block, how.nodes | {name for name, rows in sent.items() if rows}, plain=True)
        return gathered + _forward(computed)
    without = after_last(works, block) | (_selected(block) if how.kind == "selective" else how.nodes)
    return _forward(works.block(block, without, plain=not how.compiles))


def _forward(work: Work) -> Work:
    return Work({row: times for row, times in work.rows.items() if row.phase is Phase.FORWARD})


def after_last(works: Works, block: Block) -> set[str]:
    """Return the nodes that no repetition of ``block`` comes to."""
    nodes = list(block.graph.nodes)
    last = max((place for place, node in enumerate(nodes) if _saves(works, block, node)), default=0)
    return {node.name for node in nodes[last:]}


def _saves(works: Works, block: Block, node: fx.Node) -> bool:
    if node.op != "call_function" or "transition" in node.meta or not works.has_gradient(node, block.name):
        return False
    record = record_of(node)
    return record.reads is not Reads.NOTHING or record.kind is Kind.RANDOM


def _selected(block: Block) -> set[str]:
    """Return the nodes whose results selective recomputation keeps: see ``selected`` there."""
    kept, products = set[str](), 0
    for node in block.graph.nodes:
        if node.op == "call_function" and ("transition" in node.meta or record_of(node).kind is Kind.ATTENTION):
            kept.add(node.name)
        elif node.op == "call_function" and _has_weight(node):
            products += 1
            if products % 2:
                kept.add(node.name)
    return kept


def _has_weight(node: fx.Node) -> bool:
    """Whether it is a product of one matrix with all rows, but no convolution."""
    found = matrices(node, lambda value: [ONE] * value_of(value).dim())
    return record_of(node).kind is not Kind.CONVOLUTION and any(product.shared for product in found)
