"""Find expert weights: parameters whose first dim counts experts in a matrix product.

grouped_mm(rows, gate_up_proj.transpose(-2, -1), offs)      gate_up_proj [experts, n, k]
bmm(rows [experts, t, k], weight)                           weight [experts, k, n]
einsum("bsd,edf->bsef", hidden, weight)                     weight [experts, d, f]

Experts that are modules of their own (:mod:`graphpar.passes.sharding.expert_modules`) have no such dim: they are divided by features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.program import Block, value_of
from graphpar.operators.notation import Rule
from graphpar.operators.placement import operands_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import rule_of
from graphpar.operators.table import record_of
from graphpar.passes.sharding.expert_modules import expert_modules, parameters_of
from graphpar.text import is_below


@dataclass(frozen=True)
class Experts:
    """``weights``: the parameter of each product; ``counts``: the number of experts of each parameter.

    ``modules``: the parameters of experts that are modules of their own; ``lists``: the paths of these modules' lists, in their graphs,
    with the number of experts of each.
    """

    weights: Mapping[fx.Node, fx.Node]
    counts: Mapping[fx.Node, int]
    modules: frozenset[fx.Node] = frozenset()
    lists: Mapping[str, int] = field(default_factory=dict)


def find_experts(nodes: Iterable[fx.Node], blocks: Mapping[str, Block]) -> Experts:
    """Return the expert weights that ``nodes`` take; ``blocks``: those that they call."""
    weights, graphs = {}, dict[fx.Graph, None]()
    for node in nodes:
        graphs[node.graph] = None
        record = record_of(node)
        if record.kind not in (Kind.PRODUCT, Kind.GROUPED) or record.bias is not None:
            continue
        rule = rule_of(node)
        for position, operand in enumerate(operands_of(node)):
            parameter, dim = first_dim(operand)
            if parameter is not None and rule is not None and _by_expert(rule, position, dim):
                weights[node] = parameter
    counts = {parameter: int(value_of(parameter).shape[0]) for parameter in weights.values()}
    lists = {graph: expert_modules(graph) for graph in graphs}
    modules = {node for graph, paths in lists.items() for node in parameters_of(graph, paths)}
    found = {path: count for paths in lists.values() for path, count in paths.items()}
    for block in blocks.values():
        if all(any(is_below(instance, path) for path in found) for instance in block.instances):
            modules |= {node for node in block.graph.nodes if node.op == "get_attr"}
    return Experts(weights, counts, frozenset(modules), found)


def check_degree(experts: Experts, degree: int, program: str) -> None:
    """Check that an ep axis has experts to divide, evenly.

    Raises:
        GraphparError: it has not.
    """
    if not (experts.counts or experts.modules):
        raise GraphparError(
            f"Mesh ep={degree}: {program} has no experts to divide: no product (grouped_mm, bmm, matmul or einsum) applies a weight "
            "of three dims one expert at a time, and no modules side by side are weighed by a router; use tp, cp or dp_replicate."
        )
    for parameter, count in experts.counts.items():
        if count % degree:
            raise GraphparError(
                f"Mesh ep={degree}: {parameter.target} has {count} experts, which {degree} ranks can't share evenly."
            )


def first_dim(node: fx.Node) -> tuple[fx.Node | None, int]:
    """Return the parameter of three or more dims that ``node`` is or is a view of, and which dim of ``node`` is its first."""
    if not isinstance(value_of(node), Tensor) or value_of(node).ndim < 3:
        return None, 0
    if node.op == "get_attr":
        return node, 0
    if not record_of(node).same_elements or len(operands_of(node)) != 1:
        return None, 0
    parameter, dim = first_dim(operands_of(node)[0])
    rule = rule_of(node)
    if parameter is None or rule is None or rule.operands[0][dim] not in rule.results[0]:
        return None, 0
    return parameter, rule.results[0].index(rule.operands[0][dim])


def _by_expert(rule: Rule, position: int, dim: int) -> bool:
    """Return whether dim ``dim`` counts experts: it is kept, or summed together with the features."""
    own, (made,) = rule.operands[position], rule.results
    others = {factor for place, factors in enumerate(rule.operands) if place != position for factor in factors}
    summed = [factor for factor in own if factor not in made and factor in others]
    return own[dim] in made or own[dim] == "g" or (own[dim] in summed and len(summed) > 1)
