"""Reading and writing by index: the indexed dim can't be sharded, other dims can. Sharded indices: each rank reads its own; what it
adds to a tensor is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.elementwise import aligned
from graphpar.operators.moves import unsharded
from graphpar.operators.notation import Factors, Rule, labelled
from graphpar.operators.placement import Context, Placement, Size, from_rule, literal, operands_of, sizes_of
from graphpar.operators.record import FIRST, Kind, PlacementsOf, Reads, Record, each
from graphpar.runtime.layout import P


def _common(sizes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The shape that tensors are broadcast to."""
    rank = max(map(len, sizes))
    rows = [((1, 0),) * (rank - len(shape)) + shape for shape in sizes]
    return tuple(next((size for size in column if size != (1, 0)), (1, 0)) for column in zip(*rows))


def _indexed(node: fx.Node) -> tuple[Factors, list[Factors], Factors] | None:
    """The factors of tensor, indices and result of ``x[i, :, j]``; None for a boolean mask."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    rank = value_of(source).ndim  # type: ignore[arg-type]
    indices += [None] * (rank - len(indices))
    given = [index for index in indices if index is not None]
    if any(value_of(index).dtype in (torch.bool, torch.uint8) for index in given) or not given:
        return None
    common = _common([sizes_of(index) for index in given])
    picks = tuple(f"i{dim}" for dim in range(len(common)))
    tensor = tuple(f"v{dim}" if index is not None else f"d{dim}" for dim, index in enumerate(indices))
    at = [dim for dim, index in enumerate(indices) if index is not None]
    begin = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    through = [label for label in tensor if label.startswith("d")]
    before = [label for dim, label in enumerate(tensor) if label.startswith("d") and dim < begin]
    return (
        tensor,
        [aligned(sizes_of(index), common, picks) for index in given],
        (*before, *picks, *through[len(before) :]),
    )


def index(node: fx.Node) -> Rule:
    """x[i, :, j]: indices together, then the dims that pass through."""
    found = _indexed(node)
    if found is None:
        return unsharded(node)
    tensor, picks, made = found
    fixed = frozenset(label for label in tensor if label.startswith("v"))
    return Rule((tensor, *picks), (made,), fixed, linear=FIRST, uneven=True)


def index_put(node: fx.Node, context: Context) -> list[Placement]:
    """x[i, :, j] = values: dims that are not indexed; with ``accumulate`` the values, too: each rank adds its own."""
    found = _indexed(node)
    if found is None:
        return []
    tensor, picks, made = found
    operands = operands_of(node)
    sizes = dict(zip(tensor, sizes_of(operands[0])))
    common = _common([sizes_of(operand) for operand in operands[1:-1]])
    sizes |= {f"i{dim}": size for dim, size in enumerate(common)}
    values = aligned(sizes_of(operands[-1]), tuple(sizes[label] for label in made), made)
    accumulate = bool(literal(node, "accumulate", 3, False))
    fixed = {label for label in tensor if label.startswith("v")}
    if not accumulate:
        fixed |= {label for label in made if label.startswith("i")}
    rule = Rule((tensor, *picks, values), (tensor,), frozenset(fixed), linear=(frozenset({0, len(operands) - 1}),))
    return _shared(from_rule(node, rule, context))


def gather(node: fx.Node) -> Rule:
    """gather, take_along_dim: other dims where their sizes agree; on the indexed dim the indices can be sharded."""
    x, picks = operands_of(node)
    before, after = sizes_of(x), sizes_of(picks)
    given = literal(node, "dim")
    if given is None or not before or len(before) != len(after):
        return unsharded(node)
    dim = int(given) % len(before)
    made = sizes_of(node)
    labels = labelled(len(before))
    tensor = tuple("v" if i == dim else f"d{i}" if size == made[i] else f"x{i}" for i, size in enumerate(before))
    rows = tuple(label if size == made[i] else "1" for i, (label, size) in enumerate(zip(labels, after)))
    broken = {f"d{i}" for i, label in enumerate(tensor) if label.startswith("x")}
    fixed = frozenset({"v", *(label for label in tensor if label.startswith("x")), *broken})
    return Rule((tensor, rows), (labels,), fixed, linear=FIRST)


def scattered(node: fx.Node) -> Rule:
    """scatter, scatter_add, scatter_reduce: other dims where their sizes agree."""
    operands = operands_of(node)
    sizes = [sizes_of(operand) for operand in operands]
    if not sizes[0]:
        return unsharded(node)
    labels, tensor, picks = _lookup(node, len(sizes[0]))
    fixed = {label for i, label in enumerate(labels) if label != picks and len({size[i] for size in sizes if size}) > 1}
    adds = operator_name(node) == "scatter_add"
    together = len(operands) == 3 and sizes[1] == sizes[2]
    fixed |= {"v"} if adds and together else {"v", picks}
    rows = (tensor, *(labels if size else () for size in sizes[1:]))
    return Rule(rows, (tensor,), frozenset(fixed), linear=(frozenset({0, 2}),) if adds else ())


def _lookup(node: fx.Node, rank: int) -> tuple[Factors, Factors, str]:
    """Factors of the indices in ``rank`` dims, of the tensor that is indexed along ``dim`` (there "v"), and that of ``dim``."""
    dim, labels = int(literal(node, "dim")) % rank, labelled(rank)
    return labels, (*labels[:dim], "v", *labels[dim + 1 :]), labels[dim]


def adding(rule: Callable[[fx.Node], Rule]) -> PlacementsOf:
    """Make placements of ``rule`` for an operator that adds to its first operand: what is added can be sharded, too."""
    return lambda node, context: _shared(from_rule(node, rule(node), context))


def _shared(placements: list[Placement]) -> list[Placement]:
    """Where each rank adds its own values, the tensor they are added to must be partial, so that it counts once."""
    return [Placement((P, *p.operands[1:]), p.results) if p.results == (P,) and p.divides else p for p in placements]


def index_select(node: fx.Node) -> Rule:
    """x, picks [k]: other dims, and the picks."""
    x, _ = operands_of(node)
    rank = value_of(x).ndim
    if rank == 0 or value_of(operands_of(node)[1]).ndim == 0:
        return unsharded(node)
    labels, tensor, picks = _lookup(node, rank)
    return Rule((tensor, (picks,)), (labels,), frozenset({"v"}), linear=FIRST)


def index_added(node: fx.Node) -> Rule:
    """index_add, index_copy, index_fill, index_reduce: other dims."""
    operands = operands_of(node)
    rank = value_of(operands[0]).ndim
    if rank == 0 or value_of(operands[1]).ndim == 0:
        return unsharded(node)
    labels, tensor, picks = _lookup(node, rank)
    rest = tuple(labels if value_of(operand).ndim == rank else () for operand in operands[2:])
    adds = operator_name(node) == "index_add"
    fixed = frozenset({"v"} if adds else {"v", picks})
    return Rule((tensor, (picks,), *rest), (tensor,), fixed, linear=(frozenset({0, 2}),) if adds else ())


def one_hot(node: fx.Node) -> Rule:
    """[...] -> [..., classes], where the number of classes is given."""
    classes = literal(node, "num_classes")
    labels = labelled(value_of(operands_of(node)[0]).ndim)
    if not isinstance(classes, int) or classes < 0:
        return unsharded(node)
    return Rule((labels,), ((*labels, "class"),), frozenset({"class"}))


def searchsorted(node: fx.Node) -> Rule:
    """Among one sorted sequence each element by itself; among one for each row, each row."""
    operands = operands_of(node)
    if len(operands) < 2 or value_of(operands[1]).ndim == 0:
        return unsharded(node)
    labels = labelled(value_of(operands[1]).ndim)
    rows = ("sorted",) if value_of(operands[0]).ndim == 1 else (*labels[:-1], "sorted")
    return Rule((rows, labels, *(rows for _ in operands[2:])), (labels,), frozenset({"sorted"}))


def membership(node: fx.Node) -> Rule:
    """isin: each element by itself, among all that are tested."""
    operands = operands_of(node)
    if len(operands) < 2:
        return unsharded(node)
    tested = tuple(f"t{i}" for i in range(value_of(operands[1]).ndim))
    labels = labelled(value_of(operands[0]).ndim)
    return Rule((labels, tested), (labels,), frozenset(tested))


def bucketize(node: fx.Node) -> Rule:
    """Element by element; the boundaries are not sharded."""
    x, boundaries = operands_of(node)
    labels = labelled(value_of(x).ndim)
    limits = tuple(f"b{i}" for i in range(value_of(boundaries).ndim))
    return Rule((labels, limits), (labels,), frozenset(limits))


# ---- records ---------------------------------------------------------------------------------------------------

_UNSHARDED = Record(Kind.INDEX, unsharded)
_SCATTER = Record(Kind.INDEX, scattered, adding(scattered))
_INDEX_ADD = Record(Kind.INDEX, index_added, adding(index_added))

RECORDS: dict[str, Record] = {
    "index": Record(Kind.INDEX, index, spelling=(write.indexed,)),
    "gather": Record(Kind.INDEX, gather, saves=Reads.OPERANDS, spelling=write.METHOD),
    "take_along_dim": Record(Kind.INDEX, gather, saves=Reads.OPERANDS),
    "index_select": Record(Kind.INDEX, index_select, spelling=write.METHOD),
    "one_hot": Record(Kind.INDEX, one_hot, spelling=(write.function("F.one_hot", "self num_classes"),)),
    "bucketize": Record(Kind.INDEX, bucketize),
    "searchsorted": Record(Kind.INDEX, searchsorted),
    "isin": Record(Kind.INDEX, membership),
    **each("scatter scatter_add", replace(_SCATTER, spelling=write.METHOD)),
    "scatter_reduce": replace(_SCATTER, saves=Reads.OPERANDS),
    **each("index_add index_copy index_reduce", replace(_INDEX_ADD, saves=Reads.OPERANDS)),
    "index_fill": _INDEX_ADD,
    "index_put": Record(Kind.INDEX, placements=index_put, spelling=(write.put,)),
    "histc": Record(Kind.INDEX, unsharded, spelling=write.METHOD),
    **each("nonzero masked_scatter _unique2 unique_dim unique_consecutive bincount", _UNSHARDED),
    **each("masked_select take put", replace(_UNSHARDED, saves=Reads.OPERANDS)),
    **each("expert_rows expert_sums send_rows return_rows without_padding", Record(Kind.INDEX)),
    **each("start_send finish_send start_return finish_return", Record(Kind.INDEX)),
    "agree_on": Record(Kind.ALIAS),
}  # fmt: skip
