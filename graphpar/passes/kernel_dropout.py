"""``with_dropout``: attention draws its dropout by torch's own kernel and generator.

    dropout_attention(q, k, v, stream(keys, n), dropout_p=0.1)  ->  dropout_attention(q, k, v, stream(keys, n), dropout_p=0.1, kernel=True)

The key still says which example, step and operator draws; of it and of a rank's shard the seed of the generator is made. So masks are
drawn again when a block is recomputed and when a checkpoint is resumed, and ranks that hold the same tensor draw the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.random_streams import WRITTEN_OUT
from graphpar.runtime.stages.dropout import EXACT, KERNEL

OF_THE_SPLIT = (
    "Attention dropout is drawn by torch's own kernel: masks depend on how the program is split, so losses differ from those of one "
    "device, and of another plan, by different random draws. verify compares with this dropout off, and checks the seeds of all draws."
)


def with_dropout(program: Program, dropout: str) -> Program:
    """Return ``program`` with attention that draws its dropout in this way; the same object each time.

    Raises:
        GraphparError: no attention has dropout for the kernel to draw, or other random numbers are drawn.
    """
    if program.dropout == dropout:
        return program
    if program.other_dropout is not None and program.other_dropout[0] is program:
        return program.other_dropout[1]
    if not any(_attention(program)):
        raise GraphparError(
            f"dropout=kernel: {program.name} has no attention with dropout for a kernel to draw: none by F.scaled_dot_product_attention, "
            "in training. Leave it out."
        )
    if any(program.draws):
        raise GraphparError(
            f"dropout=kernel: {program.name} also draws other random numbers by the examples' keys, which must be on the device for them, "
            "and on the host for the kernel's seeds. Leave it out."
        )
    made = _drawing(program, dropout)
    program.other_dropout = (program, made)
    made.other_dropout = (made, program)
    return made


def writes_out_dropout(program: Program) -> bool:
    """Return whether attention has dropout that no kernel draws."""
    return program.dropout == EXACT and not any(program.draws) and any(_attention(program))


def _attention(program: Program) -> Iterator[fx.Node]:
    for graph in (program.graph, *(block.graph for block in program.blocks.values())):
        yield from (node for node in graph.nodes if node.target is random_streams.dropout_attention)


def _drawing(program: Program, dropout: str) -> Program:
    graph = copied(program.graph)
    blocks = {name: replace(block, graph=copied(block.graph)) for name, block in program.blocks.items()}
    made = program.with_graph(graph, blocks=blocks, dropout=dropout, other_dropout=None)
    for node in _attention(made):
        options = {key: value for key, value in node.kwargs.items() if key != "kernel"}
        node.kwargs = options | ({"kernel": True} if dropout == KERNEL else {})
    if program.retrace is not None:
        retrace = program.retrace
        made.retrace = lambda size, whole: with_dropout(retrace(size, whole), dropout)
    told = {EXACT: WRITTEN_OUT, KERNEL: OF_THE_SPLIT}
    kept = [line for line in program.warnings if line not in told.values()]
    return replace(made, warnings=(*kept, told[dropout]))
