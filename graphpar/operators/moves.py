"""Operators that permute dims, concatenate, split, slice and repeat: each dim keeps its factor, or is not sharded.

split [.., q+k+v] -> q, k, v          S(-1:q+k+v) -> S(-1)   each projection sharded by itself
x[..., :h]        -> [.., h]          S(-1:h+h) -> S(-1)     a slice is a part, too
repeat_interleave [b, kv, s] by 4     S(1) -> S(1)           every head stays with its copies
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.elementwise import aligned
from graphpar.operators.notation import Rule, labelled
from graphpar.operators.placement import (
    Context,
    Placement,
    argument_place,
    can_shard,
    from_rule,
    literal,
    operands_of,
    result_sizes,
    results_of,
    sizes_of,
)
from graphpar.operators.record import FIRST, Kind, Reads, Record, each
from graphpar.operators.shape import normal
from graphpar.runtime.layout import Shard


def unsharded(node: fx.Node) -> Rule:
    """Make the rule of an operator of which nothing can be sharded."""
    rows = tuple(tuple(f"o{k}_{i}" for i in range(value_of(o).ndim)) for k, o in enumerate(operands_of(node)))
    results = tuple(tuple(f"r{k}_{i}" for i in range(r.ndim)) for k, r in enumerate(results_of(node)))
    return Rule(rows, results, frozenset(label for factors in (*rows, *results) for label in factors))


def along(
    node: fx.Node,
    dims: Sequence[int],
    *,
    removed: bool = False,
    linear: bool = True,
    padded: bool = False,
    uneven: bool = True,
) -> Rule:
    """Make the rule of an operator that mixes ``dims`` of its first operand (or drops them: ``removed``), and leaves the others alone."""
    operands = operands_of(node)
    rank = value_of(operands[0]).ndim
    mixed = {dim % rank for dim in dims} if rank else set()
    labels = labelled(rank)
    kept = tuple(label for i, label in enumerate(labels) if not removed or i not in mixed)
    made = len(results_of(node))
    if any(value_of(o).ndim != rank for o in operands) or any(r.ndim != len(kept) for r in results_of(node)):
        return unsharded(node)
    group = FIRST if linear and len(operands) == 1 else ()
    fixed = frozenset(labels[i] for i in mixed)
    tolerant = frozenset(labels) if padded else frozenset()
    return Rule((labels,) * len(operands), (kept,) * made, fixed, tolerant, linear=group, uneven=uneven)


def last(count: int, *, linear: bool = False) -> Any:
    """Make the rule of operators that mix the last ``count`` dims (pooling, interpolation, triangles)."""

    def rule(node: fx.Node) -> Rule:
        rank = value_of(operands_of(node)[0]).ndim
        return along(node, list(range(max(0, rank - count), rank)), linear=linear, uneven=False)

    return rule


# ---- moving dims -----------------------------------------------------------------------------------------------


def permuted(node: fx.Node) -> Rule:
    """transpose, permute, movedim, t: each dim keeps its factor."""
    rank = value_of(operands_of(node)[0]).ndim
    labels, order, name = labelled(rank), list(range(rank)), operator_name(node)
    if rank == 0:
        return Rule(((),), ((),), linear=FIRST)
    if name == "permute":
        order = [int(dim) % rank for dim in literal(node, "dims", 1)]
    elif name in ("transpose", "swapaxes", "swapdims"):
        first, second = (int(node.args[i]) % rank for i in (1, 2))  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    elif name in ("movedim", "moveaxis"):
        sources, places = (_dims(literal(node, key), rank) for key in ("source", "destination"))
        rest = iter([dim for dim in range(rank) if dim not in sources])
        order = [sources[places.index(dim)] if dim in places else next(rest) for dim in range(rank)]
    elif name == "numpy_T":
        order.reverse()
    elif rank >= 2:  # t, mT, adjoint
        order[-2], order[-1] = order[-1], order[-2]
    return Rule((labels,), (tuple(labels[dim] for dim in order),), padded=frozenset(labels), linear=FIRST)


def _dims(given: Any, rank: int) -> list[int]:
    return [int(dim) % rank for dim in (given if isinstance(given, list | tuple) else [given])]


def diagonal(node: fx.Node) -> Rule:
    """Two dims become one, the last."""
    rank = value_of(operands_of(node)[0]).ndim
    labels = labelled(rank)
    pair = [int(literal(node, name)) % rank for name in ("dim1", "dim2")]
    rest = tuple(label for i, label in enumerate(labels) if i not in pair)
    fixed = frozenset({"diagonal", *(labels[i] for i in pair)})
    return Rule((labels,), ((*rest, "diagonal"),), fixed, linear=FIRST)


def windows(node: fx.Node) -> Rule:
    """unfold: a dim becomes windows, whose elements are the last dim."""
    labels = labelled(value_of(operands_of(node)[0]).ndim)
    if not labels:
        return unsharded(node)
    dim = int(literal(node, "dimension")) % len(labels)
    made = (*(f"w{i}" if i == dim else label for i, label in enumerate(labels)), "element")
    return Rule((labels,), (made,), frozenset({labels[dim], f"w{dim}", "element"}), linear=FIRST)


def broadcast(node: fx.Node) -> Rule:
    """broadcast_tensors: every operand in the common shape."""
    made = next((sizes for sizes in result_sizes(node) if sizes is not None), None)
    if made is None:
        return unsharded(node)
    labels = labelled(len(made))
    rows = tuple(aligned(sizes_of(operand), made, labels) for operand in operands_of(node))
    return Rule(rows, (labels,) * len(results_of(node)))


def complex_pairs(node: fx.Node) -> Rule:
    """view_as_complex, view_as_real: a last dim of two goes or comes."""
    ranks = value_of(operands_of(node)[0]).ndim, value_of(node).ndim
    labels = labelled(min(ranks))
    before, after = ((*labels, "pair") if rank > len(labels) else labels for rank in ranks)
    return Rule((before,), (after,), frozenset({"pair"}), linear=FIRST)


# ---- joining and taking apart ----------------------------------------------------------------------------------


def cat(node: fx.Node, context: Context) -> list[Placement]:
    """On other dims every operand is sharded alike; on the concatenated dim each operand is sharded by itself."""
    operands = operands_of(node)
    rank = value_of(node).ndim
    if any(value_of(operand).ndim != rank for operand in operands):
        return []  # the empty tensor that torch.cat still takes
    dim = int(literal(node, "dim", 1, 0)) % rank
    labels = labelled(rank)
    rows = tuple(tuple(f"part{k}" if i == dim else labels[i] for i in range(rank)) for k in range(len(operands)))
    result = tuple("joined" if i == dim else labels[i] for i in range(rank))
    fixed = frozenset({"joined", *(f"part{k}" for k in range(len(operands)))})
    everything = frozenset(range(len(operands)))
    found = from_rule(node, Rule(rows, (result,), fixed, frozenset(labels), linear=(everything,), uneven=True), context)
    lengths = [sizes_of(operand)[dim] for operand in operands]
    if any(size[1] or not size[0] for size in lengths):
        return found
    offered = [next((s for s in context.known(o, 0) if s.dim == dim), Shard(dim)) for o in operands]
    for shards in dict.fromkeys(((Shard(dim),) * len(operands), tuple(offered))):
        parts = [part for size, shard in zip(lengths, shards) for part in _every_part(size[0], shard)]
        if all(part % context.degree == 0 for part in parts):
            found.append(Placement(shards, (normal(sizes_of(node)[dim], parts, dim),)))
    return found


def _every_part(size: int, shard: Shard) -> tuple[int, ...]:
    """The parts of a dim of ``size`` that ``shard`` shards by themselves."""
    return shard.parts * (size // sum(shard.parts)) if shard.parts else (size,)


def _within(parts: Sequence[int], begin: int, end: int) -> tuple[int, ...] | None:
    """The parts between two places; None where one of them is inside of a part."""
    ends = list(itertools.accumulate(parts, initial=0))
    return tuple(parts[ends.index(begin) : ends.index(end)]) if begin in ends and end in ends else None


def stack(node: fx.Node) -> Rule:
    """A new dim, which can't be sharded; on the others all operands are sharded alike."""
    operands = operands_of(node)
    rank = value_of(node).ndim
    dim = int(literal(node, "dim", 1, 0)) % rank
    labels = labelled(rank - 1)
    result = (*labels[:dim], "new", *labels[dim:])
    everything = (frozenset(range(len(operands))),)
    return Rule((labels,) * len(operands), (result,), frozenset({"new"}), frozenset(labels), linear=everything)


def split(node: fx.Node, context: Context) -> list[Placement]:
    """split, chunk, split_with_sizes, tensor_split: on the dim that is split each part is sharded by itself."""
    source, *others = operands_of(node)
    results = results_of(node)
    rank = value_of(source).ndim
    if others or rank == 0:
        return []  # the places are known at run time only
    dim = int(literal(node, "dim", 2, 0)) % rank
    labels = tuple(f"d{i}" if i != dim else "joined" for i in range(rank))
    rows = tuple(
        tuple(f"part{k}" if i == dim else label for i, label in enumerate(labels)) for k in range(len(results))
    )
    fixed = frozenset({"joined", *(f"part{k}" for k in range(len(results)))})
    rule = Rule((labels,), rows, fixed, frozenset(labels), linear=FIRST, uneven=True)
    found = from_rule(node, rule, context)
    lengths = [result.shape[dim] for result in results]
    size = sizes_of(source)[dim]
    if size[1] or not all(isinstance(length, int) and length > 0 for length in lengths):
        return found
    ends = list(itertools.accumulate(map(int, lengths), initial=0))
    offers = [tuple(map(int, lengths))]
    offers += [_every_part(size[0], shard) for shard in context.known(source, 0) if shard.dim == dim and shard.parts]
    for parts in dict.fromkeys(offers):
        inside = [_within(parts, begin, end) for begin, end in itertools.pairwise(ends)]
        if all(part % context.degree == 0 for part in parts) and None not in inside:
            pieces = [normal((int(n), 0), own, dim) for n, own in zip(lengths, inside) if own is not None]
            found.append(Placement((normal(size, parts, dim),), tuple(pieces), "local_sizes"))
    return found


def without_dim(node: fx.Node) -> Rule:
    """unbind, select: a dim is removed."""
    return along(node, [int(literal(node, "dim", 1, 0))], removed=True, padded=True)


def sliced(node: fx.Node, context: Context) -> list[Placement]:
    """slice, narrow: where the slice is one of the parts that the dim is sharded by, the slice is sharded as well."""
    source, *others = operands_of(node)
    rank = value_of(source).ndim
    if others:
        return from_rule(node, unsharded(node), context)
    dim = int(literal(node, "dim", 1, 0)) % rank
    found = from_rule(node, along(node, [dim], padded=True), context)
    (whole, follows), (made, _) = sizes_of(source)[dim], sizes_of(node)[dim]
    start = literal(node, "start", 2, 0) or 0
    end = literal(node, "end", 3) if operator_name(node) == "slice" else None
    plain = _plain(node)
    if plain and sizes_of(source)[dim] == sizes_of(node)[dim] and start == 0 and (end is None or end >= 1 << 62):
        labels = labelled(rank)
        return from_rule(node, Rule((labels,), (labels,), padded=frozenset(labels), linear=FIRST), context)
    if plain and not follows and made:
        shardings = _slice_shardings(node, dim, whole, context)
        found += [Placement((before,), (after,), "local_slice") for before, after in shardings]
    return found


def _window(node: fx.Node) -> Rule:
    """``kv_cache.window(x, dim, size)`` and ``last(x, dim)``: positions that are known when the program runs."""
    return along(node, [int(node.args[1])], padded=True)  # type: ignore[arg-type]


def _slice_shardings(node: fx.Node, dim: int, whole: int, context: Context) -> list[tuple[Shard, Shard]]:
    """Pair shardings of a dim by parts with those of its slice: parts between the bounds of all slices, and those of neighbours."""
    source = operands_of(node)[0]
    begin, end = _bounds(node, whole)
    siblings = [user for user in source.users if operator_name(user) in ("slice", "narrow") and user.args[0] is source]
    same = [
        user for user in siblings if int(literal(user, "dim", 1, 0)) % value_of(source).ndim == dim and _plain(user)
    ]
    places = sorted({0, whole, begin, end, *(place for user in same for place in _bounds(user, whole))})
    bounds = sorted({0, whole, begin, end})
    offers = [tuple(b - a for a, b in itertools.pairwise(ends)) for ends in (places, bounds)]
    offers += [shard.parts for shard in context.known(source, 0) if shard.dim == dim and shard.parts]
    found = {}
    for offered in offers:
        parts = offered * (whole // sum(offered))
        inside = _within(parts, begin, end)
        if inside is None or any(part % context.degree for part in parts):
            continue
        found[normal((whole, 0), parts, dim)] = normal((end - begin, 0), inside, dim)
    return list(found.items())


def _plain(node: fx.Node) -> bool:
    """Whether a slice takes consecutive elements between constant bounds."""
    given = [literal(node, name) for name in ("start", "end" if operator_name(node) == "slice" else "length")]
    step = literal(node, "step", 4, 1) if operator_name(node) == "slice" else 1
    return step == 1 and all(item is None or isinstance(item, int) for item in given)


def _bounds(node: fx.Node, whole: int) -> tuple[int, int]:
    """Return where a plain slice begins and ends in a dim of ``whole`` elements."""
    start = literal(node, "start") or 0
    begin = max(0, start + whole) if start < 0 else min(start, whole)
    if operator_name(node) == "narrow":
        return begin, begin + int(literal(node, "length"))
    given = literal(node, "end")
    end = whole if given is None else max(0, given + whole) if given < 0 else min(given, whole)
    return begin, max(begin, end)


def halves(node: fx.Node, context: Context) -> list[Placement]:
    """glu: two halves of a dim, each sharded by itself. Not linear."""
    (source,) = operands_of(node)
    dim = int(literal(node, "dim", 1, -1)) % value_of(source).ndim
    found = from_rule(node, along(node, [dim], linear=False), context)
    half, follows = sizes_of(node)[dim]
    if not follows and half and half % context.degree == 0:
        found.append(Placement((normal(sizes_of(source)[dim], [half, half], dim),), (Shard(dim),)))
    return found


# ---- repeating and filling -------------------------------------------------------------------------------------


def repeated(node: fx.Node, context: Context) -> list[Placement]:
    """repeat, tile: where a repeated dim is sharded, every period of the result is sharded alike."""
    (source,) = operands_of(node)
    before, after = sizes_of(source), sizes_of(node)
    offset = len(after) - len(before)
    if offset < 0:
        return []
    labels = labelled(len(after))
    taken = tuple(labels[offset + dim] if size == after[offset + dim] else f"r{dim}" for dim, size in enumerate(before))
    fixed = frozenset(label for label in (*taken, *labels) if label not in taken or label.startswith("r"))
    found = from_rule(node, Rule((taken,), (labels,), fixed, linear=FIRST), context)
    for dim, size in enumerate(before):
        if size == after[offset + dim] or size[1] or after[offset + dim][0] == 0:
            continue
        for shard in [Shard(dim), *(shard for shard in context.known(source, 0) if shard.dim == dim)]:
            parts = shard.parts or (size[0],)
            if size[0] > 1 and can_shard(size, shard, context.degree):
                found.append(Placement((shard,), (Shard(offset + dim, parts),)))
    return found


def interleaved(node: fx.Node, context: Context) -> list[Placement]:
    """repeat_interleave by a number: each element stays with its copies."""
    source, *counts = operands_of(node)
    dim = 0 if value_of(source).ndim == 1 else literal(node, "dim")
    repeats = literal(node, "repeats")
    if counts or dim is None or not isinstance(repeats, int):
        return from_rule(node, unsharded(node), context)
    rank = value_of(source).ndim
    found = from_rule(node, along(node, [int(dim)]), context)
    place, size = int(dim) % rank, sizes_of(source)[int(dim) % rank]
    if size[1] == 0 and repeats > 0:
        for shard in [Shard(place), *(shard for shard in context.known(source, 0) if shard.dim == place)]:
            if can_shard(size, shard, context.degree):
                made = Shard(place, tuple(part * repeats for part in shard.parts))
                found.append(Placement((shard,), (made,), "output_size"))
    return found


def padding(node: fx.Node) -> Rule:
    """pad, constant_pad_nd: a dim that grows is not sharded."""
    rank = value_of(operands_of(node)[0]).ndim
    amounts = list(literal(node, "pad"))
    dims = [rank - 1 - place // 2 for place, amount in enumerate(amounts) if not isinstance(amount, int) or amount]
    value = literal(node, "value")
    constant = operator_name(node) != "pad" or literal(node, "mode", default="constant") == "constant"
    return along(
        node, dims, linear=value is None or value == 0, uneven=constant
    )  # other modes refuse a shard of 0 rows


def turned(node: fx.Node) -> Rule:
    """flip, roll: the dims that are flipped or rolled are not sharded."""
    rank = value_of(operands_of(node)[0]).ndim
    dims = literal(node, "dims")
    return along(node, [int(dim) for dim in dims] if dims else list(range(rank)))


def rotated(node: fx.Node) -> Rule:
    """rot90: two dims, which may change places, are not sharded."""
    labels = labelled(value_of(operands_of(node)[0]).ndim)
    turned = {int(dim) % len(labels) for dim in literal(node, "dims", default=(0, 1))}
    before = tuple(f"x{i}" if i in turned else label for i, label in enumerate(labels))
    after = tuple(f"y{i}" if i in turned else label for i, label in enumerate(labels))
    fixed = frozenset(label for label in (*before, *after) if label not in labels)
    return Rule((before,), (after,), fixed, linear=FIRST)


def recurrent(node: fx.Node) -> Rule:
    """lstm, gru, rnn of [time, batch, features], or batch first; states [layers, batch, features]: examples alone."""
    operands = operands_of(node)
    padded = argument_place(node, "input") == 0 and argument_place(node, "batch_first") is not None
    if not padded or value_of(operands[0]).ndim != 3 or (literal(node, "train") and literal(node, "dropout")):
        return unsharded(node)  # packed sequences; one example; masks that no example has of its own
    given = node.args[1]
    states = set(given) if isinstance(given, list | tuple) else {given}
    batch = 0 if literal(node, "batch_first") else 1

    def factors(name: str, rank: int, place: int | None) -> tuple[str, ...]:
        return tuple("batch" if dim == place else f"{name}_{dim}" for dim in range(rank))

    rows = [factors("x", 3, batch)]
    rows += [factors(f"o{k}", value_of(o).ndim, 1 if o in states else None) for k, o in enumerate(operands[1:])]
    made = [factors(f"r{k}", 3, batch if k == 0 else 1) for k, _ in enumerate(results_of(node))]
    fixed = frozenset(name for own in (*rows, *made) for name in own if name != "batch")
    return Rule(tuple(rows), tuple(made), fixed)


def transformed(node: fx.Node) -> Rule:
    """Fourier transforms: over ``dim``, or over the last dims that ``s`` has sizes for, or over all."""
    rank = value_of(operands_of(node)[0]).ndim
    given, sizes = literal(node, "dim"), literal(node, "s") if argument_place(node, "s") is not None else None
    if given is None:
        given = range(rank - len(sizes), rank) if sizes else range(rank)
    dims = [int(dim) for dim in (given if isinstance(given, list | tuple | range) else [given])]
    return along(node, dims, uneven=False)  # of no rows, as an expert may have, torch makes no transform


def matrices(node: fx.Node) -> Rule:
    """Functions of each matrix of a batch: neither its last two dims nor what they become are sharded."""
    (source,) = operands_of(node)
    rank = value_of(source).ndim
    labels = labelled(rank)
    lead = labels[: rank - 2]
    results = [(*lead, *(f"r{k}_{i}" for i in range(made.ndim - len(lead)))) for k, made in enumerate(results_of(node))]
    return Rule(
        (labels,),
        tuple(results),
        frozenset({*labels[rank - 2 :], *(f for made in results for f in made if f not in lead)}),
    )


def windowed(node: fx.Node) -> Rule:
    """stft and istft of [batch, time]: each row by itself."""
    source, *others = operands_of(node)
    rank, made = value_of(source).ndim, value_of(node).ndim
    if rank < 2 or made < 2 or min(rank, made) > 2:
        return unsharded(node)
    before, after = ("batch", *(f"s{i}" for i in range(rank - 1))), ("batch", *(f"r{i}" for i in range(made - 1)))
    rest = tuple(tuple(f"o{k}_{i}" for i in range(value_of(o).ndim)) for k, o in enumerate(others))
    return Rule(
        (before, *rest), (after,), frozenset({*before[1:], *after[1:], *(f for factors in rest for f in factors)})
    )


def inside(node: fx.Node) -> Rule:
    """slice_scatter, select_scatter: one tensor written into another; on the other dims both are sharded alike."""
    labels = labelled(value_of(node).ndim)
    dim = int(literal(node, "dim", default=0)) % len(labels)
    put = operator_name(node) == "slice_scatter"
    source = tuple("part" if i == dim else label for i, label in enumerate(labels) if put or i != dim)
    rows = (labels, source)
    return Rule(rows, (labels,), frozenset({labels[dim], "part"}), frozenset(labels), linear=(frozenset({0, 1}),))


# ---- records ---------------------------------------------------------------------------------------------------


_PARTS = Record(Kind.VIEW, placements=split, spelling=write.METHOD)

RECORDS: dict[str, Record] = {
    # dims in another order
    **each("transpose permute t movedim swapaxes swapdims", Record(Kind.PERMUTE, permuted, spelling=write.METHOD)),
    **each("moveaxis adjoint", Record(Kind.PERMUTE, permuted)),
    "mT": Record(Kind.PERMUTE, permuted, spelling=(write.attribute("mT"),)),
    "mH": Record(Kind.PERMUTE, permuted, spelling=(write.attribute("mH"),)),
    "matrix_H": Record(Kind.PERMUTE, spelling=(write.attribute("H"),)),
    "numpy_T": Record(Kind.PERMUTE, permuted, spelling=(write.attribute("T"),)),
    # parts
    **each("split chunk", _PARTS),
    **each("split_with_sizes tensor_split unsafe_chunk unsafe_split", replace(_PARTS, spelling=())),
    "unbind": Record(Kind.VIEW, without_dim, spelling=write.METHOD),
    "select": Record(Kind.VIEW, without_dim, spelling=(write.selected, write.method)),
    "window": Record(Kind.VIEW, _window),
    "last": Record(Kind.VIEW, _window),
    "slice": Record(Kind.VIEW, placements=sliced, spelling=(write.sliced,)),
    "narrow": Record(Kind.VIEW, placements=sliced, spelling=write.METHOD),
    "getitem": Record(Kind.VIEW, spelling=(write.item,)),
    "diagonal": Record(Kind.VIEW, diagonal),
    "unfold": Record(Kind.VIEW, windows, spelling=write.METHOD),
    **each("view_as_complex view_as_real", Record(Kind.VIEW, complex_pairs)),
    "as_strided": Record(Kind.VIEW, unsharded),
    "broadcast_tensors": Record(Kind.EXPAND, broadcast),
    # joined, repeated, filled
    "cat": replace(Record(Kind.MOVE, placements=cat), adds=True),
    "stack": replace(Record(Kind.MOVE, stack), adds=True),
    **each("repeat tile", Record(Kind.MOVE, placements=repeated, spelling=write.METHOD)),
    "repeat_interleave": Record(Kind.INDEX, placements=interleaved, spelling=write.METHOD),
    "pad": Record(
        Kind.MOVE, padding, saves=Reads.OPERANDS, spelling=(write.function("F.pad", "self pad", "mode value"),)
    ),
    "constant_pad_nd": Record(Kind.MOVE, padding),
    **each("flip roll", Record(Kind.MOVE, turned, spelling=write.METHOD)),
    "rot90": Record(Kind.MOVE, rotated, spelling=write.METHOD),
    **each("slice_scatter select_scatter", Record(Kind.MOVE, inside, spelling=write.METHOD)),
    **each("tril triu", Record(Kind.MOVE, last(2, linear=True), spelling=write.METHOD)),
    "glu": Record(Kind.POINTWISE, placements=halves, functions=True),
    # transforms
    **each(
        "fft_fft fft_ifft fft_rfft fft_rfft2 fft_rfftn fft_ihfft", Record(Kind.TRANSFORM, transformed)
    ),  # of what may be real
    **each(
        "fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_fftshift fft_ifftshift",
        Record(Kind.TRANSFORM, transformed, saves=Reads.NOTHING),
    ),
    **each("stft istft", Record(Kind.TRANSFORM, windowed)),
    **each("linalg_cholesky linalg_cholesky_ex cholesky", Record(Kind.TRANSFORM, matrices, saves=Reads.RESULT)),
    **each("cholesky_inverse logdet", Record(Kind.TRANSFORM, matrices)),
    **each("lstm gru rnn_tanh rnn_relu", Record(Kind.RECURRENT, recurrent)),
}
