"""Reductions, norms, scans and sorts. A sum over a sharded dim is partial; for all others their dims can't be sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.elementwise import aligned, elementwise
from graphpar.operators.moves import along, unsharded
from graphpar.operators.notation import Rule, labelled
from graphpar.operators.placement import (
    Context,
    Placement,
    argument_place,
    averaged,
    from_rule,
    literal,
    operands_of,
    results_of,
    sizes_of,
    sums,
)
from graphpar.operators.record import FIRST, Kind, Reads, Record, each
from graphpar.runtime.layout import P


def _dims(given: Any, rank: int) -> list[int]:
    if given is None or given == []:
        return list(range(rank))
    items = [int(dim) for dim in (given if isinstance(given, list | tuple) else [given])]
    return [dim % rank for dim in items] if rank else []


def _reduced(node: fx.Node, fixed: bool) -> Rule:
    """The result lacks the reduced dims, or keeps them with size 1."""
    operands = operands_of(node)
    rank = value_of(operands[0]).ndim
    given = literal(node, "dim") if argument_place(node, "dim") is not None else None
    dims = set(_dims(given, rank))
    labels = labelled(rank)
    kept = tuple("1" if i in dims else label for i, label in enumerate(labels))
    dropped = tuple(label for i, label in enumerate(labels) if i not in dims)
    results = tuple(kept if result.ndim == rank else dropped for result in results_of(node))
    frozen = frozenset(labels[i] for i in dims) if fixed else frozenset()
    others = tuple(tuple(f"o{k}_{i}" for i in range(value_of(o).ndim)) for k, o in enumerate(operands[1:]))
    frozen |= {label for factors in others for label in factors}
    return Rule((labels, *others), results, frozen, linear=() if fixed else FIRST)


def total(node: fx.Node) -> Rule:
    """sum: over a sharded dim the result is partial."""
    return _reduced(node, fixed=False)


def counted(node: fx.Node) -> Rule:
    """count_nonzero, nansum: a sum that is not linear in the operand."""
    return replace(_reduced(node, fixed=False), linear=())


def mean(node: fx.Node, context: Context) -> list[Placement]:
    """mean: over a sharded dim a partial sum, divided by the whole size; over the batch the mean over equal shards."""
    found = from_rule(node, _reduced(node, fixed=False), context)
    source = operands_of(node)[0]
    if not sums(value_of(source)):
        return [p for p in found if not (p.results[0] is P and p.divides)]
    reduced = [sizes_of(source)[dim] for dim in _dims(literal(node, "dim"), value_of(source).ndim)]
    rewrite = "mean" if all(size[1] == 0 for size in reduced) else "mean_of_pieces"
    return averaged(found, rewrite)


def extremum(node: fx.Node) -> Rule | None:
    """max, min: of one tensor, or of each pair of elements of two."""
    return reduction(node) if len(operands_of(node)) == 1 else elementwise(node)


def reduction(node: fx.Node) -> Rule:
    """max, var, norm, any, prod, ...: not over a sharded dim."""
    return _reduced(node, fixed=True)


def normalization(node: fx.Node) -> Rule:
    """layer_norm, rms_norm: the normalised trailing dims, weight and bias are not sharded."""
    operands = operands_of(node)
    shape = literal(node, "normalized_shape")
    rank = value_of(operands[0]).ndim
    labels = labelled(rank)
    tail = labels[rank - len(shape) :]
    rows = (labels, *(tail for _ in operands[1:]))
    kept = (*labels[: rank - len(shape)], *("1" for _ in tail))  # the statistics of native_layer_norm
    results = tuple(labels if index == 0 else kept for index, _ in enumerate(results_of(node)))
    return Rule(rows, results, frozenset(tail))


def scan(node: fx.Node) -> Rule:
    """softmax, cumsum, sort, topk, ...: along a dim; several results of the same rank."""
    rank = value_of(operands_of(node)[0]).ndim
    linear = operator_name(node) in ("cumsum", "diff")
    dim = literal(node, "dim")
    return along(node, list(range(rank)) if dim is None else [int(dim)], linear=linear)


def similarity(node: fx.Node) -> Rule:
    """cosine_similarity, pairwise_distance: two broadcast operands, one dim reduced."""
    sizes = [sizes_of(operand) for operand in operands_of(node)]
    rank = max(len(shape) for shape in sizes)
    if rank == 0:
        return unsharded(node)
    padded = [((1, 0),) * (rank - len(shape)) + shape for shape in sizes]
    whole = tuple(b if a == (1, 0) else a for a, b in zip(*padded))
    labels = labelled(rank)
    dim = int(literal(node, "dim") if argument_place(node, "dim") is not None else -1) % rank
    rows = tuple(aligned(shape, whole, labels) for shape in sizes)
    keeps = value_of(node).ndim == rank
    result = tuple("1" if i == dim else label for i, label in enumerate(labels) if keeps or i != dim)
    return Rule(rows, (result,), frozenset({labels[dim]}))


def weight_norm(node: fx.Node) -> Rule:
    """v, and g of size 1 on all dims but ``dim``: each slice along ``dim`` is normalised by itself, for -1 the whole."""
    labels, dim = labelled(value_of(node).ndim), int(literal(node, "dim", default=0))
    sizes = tuple(labels[i] if i == dim else "1" for i in range(value_of(operands_of(node)[1]).ndim))
    return Rule((labels, sizes), (labels,), frozenset(label for i, label in enumerate(labels) if i != dim))


_CHOICES = {"topk", "argmax", "sort", "argsort", "max"}
_EXPERTS = 1024
"""Scores of more than that are not those of experts."""


def chooses(node: fx.Node) -> bool:
    """Whether an operator chooses by scores, few for each row, as a router does among experts.

    Where scores are equal but for their last bits, ranks would choose differently: rows are lost then, or ranks send others than expected.
    Tokens of a vocabulary and keys of attention are no experts, and too many to be sent.
    """
    if operator_name(node) not in _CHOICES:
        return False
    scores = value_of(operands_of(node)[0])
    return scores.is_floating_point() and scores.ndim > 1 and int(scores.shape[-1]) <= _EXPERTS


# ---- records ---------------------------------------------------------------------------------------------------

_REDUCTION = Record(Kind.REDUCTION, reduction, spelling=write.METHOD)

RECORDS: dict[str, Record] = {
    "sum": Record(Kind.REDUCTION, total, saves=Reads.NOTHING, spelling=write.METHOD),
    "mean": Record(Kind.REDUCTION, placements=mean, saves=Reads.NOTHING, spelling=write.METHOD),
    **each("count_nonzero nansum", Record(Kind.REDUCTION, counted)),
    **each("max min", Record(Kind.REDUCTION, extremum, spelling=write.METHOD)),
    **each("amax amin any all prod var std argmax argmin norm", _REDUCTION),
    "logsumexp": replace(_REDUCTION, functions=True),
    **each("aminmax var_mean std_mean linalg_vector_norm nanmean", Record(Kind.REDUCTION, reduction)),
    **each("median nanmedian", Record(Kind.SORT, reduction, saves=Reads.OPERANDS)),
    **each("mode kthvalue", Record(Kind.SORT, reduction)),
    **each("cosine_similarity pairwise_distance", Record(Kind.REDUCTION, similarity)),
    # norms
    "layer_norm": Record(Kind.NORM, normalization, module="LayerNorm", spelling=(write.layer_norm,)),
    "rms_norm": Record(
        Kind.NORM, normalization, module="RMSNorm",
        spelling=(write.function("F.rms_norm", "input normalized_shape weight", "eps"),),
    ),
    "native_layer_norm": Record(Kind.NORM, normalization),
    "_weight_norm": Record(Kind.NORM, weight_norm),
    "softmax": Record(Kind.NORM, scan, saves=Reads.RESULT, spelling=(write.function("F.softmax", "self", "dim dtype"),)),
    "log_softmax": Record(Kind.NORM, scan, saves=Reads.RESULT, spelling=(write.function("F.log_softmax", "self", "dim dtype"),)),
    **each("_softmax _log_softmax _safe_softmax", Record(Kind.NORM, scan, saves=Reads.RESULT)),
    # along a dim
    "cumsum": Record(Kind.SCAN, scan, saves=Reads.NOTHING, spelling=write.METHOD),
    "cumprod": Record(Kind.SCAN, scan, spelling=write.METHOD),
    **each("cummax cummin logcumsumexp", Record(Kind.SCAN, scan)),
    **each("sort argsort topk", Record(Kind.SORT, scan, spelling=write.METHOD)),
    "diff": Record(Kind.MOVE, scan, spelling=write.METHOD),
}  # fmt: skip
