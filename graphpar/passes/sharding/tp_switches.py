"""What the options ``sp`` and ``loss_parallel`` ask of placements on tp, as constraints of the search.

    sp               residual sums x + f(x), and norms of them and of a block's input    S(sequence); without it, whole
    loss_parallel    the logits that a cross entropy takes                               S(classes); without it, anything else

Everything else follows: between a sharded residual and a column-parallel product is an all-gather, before it a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from graphpar.annotations.values import WHOLE, Spec
from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_dims_of
from graphpar.ir.program import ancestors, operator_name, value_of, where
from graphpar.operators.losses import class_loss, vocab_cross_entropy
from graphpar.operators.placement import operands_of
from graphpar.operators.reduce import normalization
from graphpar.operators.table import record_of
from graphpar.passes.sharding.problem import Problem
from graphpar.passes.sharding.search import SearchConstraints
from graphpar.runtime.layout import Shard

_VOCAB = vocab_cross_entropy.__name__


def with_switches(
    given: SearchConstraints, problem: Problem, sp: bool | None, loss_parallel: bool | None
) -> SearchConstraints:
    """Add what the options ask for; pins of single values come first. None leaves it to the search, as do degrees of 1.

    Raises:
        GraphparError: there is nothing that they could act on.
    """
    if "tp" not in problem.axes:
        return given
    values = {} if sp is None else _of_sequences(problem, sp)
    operands = {} if loss_parallel is None else _of_logits(problem, loss_parallel)
    return replace(given, values={**values, **given.values}, operands=operands)


def _of_sequences(problem: Problem, sharded: bool) -> dict[fx.Node, Spec]:
    graphs = (problem.program.graph, *(block.graph for block in problem.program.blocks.values()))
    dims = {node: dim for graph in graphs for node, dim in _residuals(graph)}
    if sharded and not dims:
        raise GraphparError(
            f"sp shards norms and residuals over the sequence, but {problem.program.name} has no LayerNorm or RMSNorm of activations "
            "[batch, sequence, features]; leave it out."
        )
    degree = problem.degrees["tp"]
    for node, dim in dims.items() if sharded else ():
        if isinstance(size := value_of(node).shape[dim], int) and size % degree:
            raise GraphparError(
                f"sp: tp={degree} does not divide the sequence of {size}{where(node)}; take a degree that does, pad the sequence, or leave "
                "sp out."
            )
    return {node: {"tp": frozenset({Shard(dim)}) if sharded else WHOLE} for node, dim in dims.items()}


def _residuals(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """List residual sums, and norms of them and of what enters the graph, each with the dim of its sequence."""
    norms = [node for node in graph.nodes if node.op == "call_function" and record_of(node).rule is normalization]
    shapes = {_shape(operands_of(norm)[0]) for norm in norms}
    sums = {node for node in graph.nodes if _is_residual(node) and _shape(node) in shapes}
    for node in (*sums, *norms):
        source = operands_of(node)[0]
        if node in sums or source in sums or source.op != "call_function":
            rows = batch_dims_of(source) or [0]
            yield from ((node, dim) for dim in [d for d in range(value_of(source).ndim - 1) if d not in rows][:1])


def _is_residual(node: fx.Node) -> bool:
    """Whether it is ``x + f(x)``, of one shape."""
    if node.op != "call_function" or operator_name(node) != "add" or len(operands := operands_of(node)) != 2:
        return False
    first, second = operands
    return _shape(first) == _shape(second) and (first in ancestors(second) or second in ancestors(first))


def _shape(node: fx.Node) -> str:
    return str(tuple(value_of(node).shape))  # sizes that follow the batch are not to be compared


def _of_logits(problem: Problem, sharded: bool) -> dict[fx.Node, Spec]:
    found: dict[fx.Node, Spec] = {}
    place, losses = problem.axes.index("tp"), []
    for operator in problem.operators:
        if record_of(operator.node).placements is not class_loss:
            continue
        losses.append(operator.node)
        parallel = {c.operands[0][place] for c in operator.choices if c.rewrites[place] == _VOCAB}
        others = {c.operands[0][place] for c in operator.choices} - parallel
        if parallel:
            found[operator.node] = {"tp": frozenset(parallel if sharded else others)}
    if sharded and not found:
        raise GraphparError(
            f"loss_parallel shards cross entropies of logits, but {problem.program.name} has none; leave it out."
            if not losses
            else f"loss_parallel: the loss{where(losses[0])} takes full logits, as it has label smoothing or probabilities as targets, or "
            "is no cross entropy of logits; leave it out."
        )
    return found
