"""How a call changes when its operands are shards: literal sizes become local, and a few operators become others.

    view(x, [b, s, 8, 64])  heads sharded over 2     view(x, [b, s, 4, 64])
    mean(x, [-1])           dim -1 sharded           sum(x, [-1]) / whole size
    mean(x, [0])            replicas' rows           mean(x, [0]) / replicas
    cross_entropy mean      replicas' rows           sum / labels of all replicas
    embedding(w, ids)       vocabulary sharded       vocab_embedding(ids, w, axis)
    attention(q, k, v)      all by sequence          ring_attention(q, k, v, axis)

The lowering and the proof of the rules share this definition: ``emit`` makes a node, or runs the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.emitted import collectives, expert_rows, random_streams
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.composite import Composite, Emit, LocalCall
from graphpar.operators.placement import operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import COMPOSITES, record_named
from graphpar.runtime.axes import Divides
from graphpar.runtime.layout import Shard, Type, local_size

_aten = torch.ops.aten
_DRAWS = (random_streams.uniform, random_streams.normal, random_streams.exponential, random_streams.integers)
_RANDOM = (random_streams.dropout, random_streams.channel_dropout, random_streams.dropout_attention, *_DRAWS)


@dataclass(frozen=True)
class CallSpecs:
    """How one call is sharded: the type of each operand and result on each axis, and the rewrite on each axis."""

    degrees: Mapping[str, int]
    operands: tuple[tuple[Type, ...], ...]
    results: tuple[tuple[Type, ...], ...]
    rewrites: tuple[str, ...]

    def pieces(self, rewrite: str) -> int:
        """Return over how many ranks the call is sharded with this rewrite."""
        count = 1
        for degree, name in zip(self.degrees.values(), self.rewrites):
            count *= degree if name == rewrite else 1
        return count


def on_pieces(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], specs: CallSpecs, emit: Emit) -> Any:
    """Make the call ``node`` on one rank's arguments ``args`` and ``kwargs``, through ``emit(target, args, kwargs)``."""
    call = LocalCall(node, list(args), dict(kwargs), specs.degrees)
    if "local_shape" in specs.rewrites:
        _local_shape(call, specs, emit)
    for name in dict.fromkeys(specs.rewrites):
        if (change := REWRITES[name].change if name else None) is not None:
            change(call, specs.pieces(name))
    if node.target in _RANDOM:
        _positions(call, specs)
    count = _labels(call, specs, emit) if "mean_of_labels" in specs.rewrites else specs.pieces("mean_of_pieces")
    result = _replaced(call, specs, emit)
    return result if isinstance(count, int) and count == 1 else emit(_aten.div.Tensor, (result, count), {})


def _replaced(call: LocalCall, specs: CallSpecs, emit: Emit) -> Any:
    names = replacing(specs.rewrites)
    if not names:
        return emit(call.target or call.node.target, tuple(call.args), call.kwargs)
    call.axes = {name: [axis for axis, other in zip(specs.degrees, specs.rewrites) if other == name] for name in names}
    replace = REWRITES[names[0]].replace
    assert replace is not None
    return replace(call, call.axes[names[0]], emit)


def replacing(rewrites: Sequence[str]) -> list[str]:
    """Return the rewrites that replace a call, each once; first one that does the work of the others, where there is one."""
    names = [name for name in dict.fromkeys(rewrites) if name and REWRITES[name].replace is not None]
    return sorted(names, key=lambda name: not set(names) - {name} <= set(REWRITES[name].also))


def can_replace(rewrites: Sequence[str]) -> bool:
    """Whether one call can be all that these rewrites, one an axis, put in the place of a call."""
    names = replacing(rewrites)
    return len(names) < 2 or set(names[1:]) <= set(REWRITES[names[0]].also)


def _labels(call: LocalCall, specs: CallSpecs, emit: Emit) -> Any:
    """Turn the mean of a loss over classes into its sum; return how many labels count on all ranks."""
    call.set("reduction", 2)
    counted = emit(_aten.ne.Scalar, (call.get("target", call.args[1]), call.get("ignore_index", -100)), {})
    count = emit(_aten.sum.default, (counted,), {})
    for axis, name in zip(specs.degrees, specs.rewrites):
        if name == "mean_of_labels":
            count = emit(collectives.all_reduce, (count, axis), {})
    return count


def _local_shape(call: LocalCall, specs: CallSpecs, emit: Emit) -> None:
    """Make sizes of sharded dims local; one that follows the batch becomes -1, or is divided where -1 means something else."""
    name = operator_name(call.node)
    if name == "squeeze":  # a shard may have dims of size 1 that the whole tensor has not
        dims = call.get("dim")
        whole = value_of(operands_of(call.node)[0]).shape
        named = list(range(len(whole))) if dims is None else dims if isinstance(dims, list | tuple) else [dims]
        call.replace(_aten.squeeze.dims, dim=[dim for dim in named if whole and whole[dim] == 1])
        return
    argument = record_named(name).sizes
    if not argument or call.get(argument) is None:
        return
    types, coefficients = specs.results[0], batch_coefficients(call.node)
    sizes = list(call.get(argument))
    first = int(call.get("dim")) % value_of(operands_of(call.node)[0]).ndim if name == "unflatten" else 0
    for place, given in enumerate(sizes):
        axes = [(kind, specs.degrees[axis]) for kind, axis in zip(types, specs.degrees) if isinstance(kind, Shard)]
        axes = [(kind, degree) for kind, degree in axes if kind.dim == place + first]
        if not axes or (isinstance(given, int) and given == -1):
            continue
        if coefficients[place + first] is None:
            for kind, degree in axes:
                given = local_size(int(given), kind, degree)
            sizes[place] = given
        elif record_named(name).kind is Kind.EXPAND or -1 in [size for size in sizes if isinstance(size, int)]:
            for _, degree in axes:
                given = given // degree if isinstance(given, int) else emit(operator.floordiv, (given, degree), {})
            sizes[place] = given
        else:
            sizes[place] = -1
    call.set(argument, sizes)


def _local_sizes(call: LocalCall, pieces: int) -> None:
    """split, split_with_sizes, tensor_split: lengths, or places, in the shard."""
    for name in ("split_sizes", "split_size", "indices"):
        given = call.get(name)
        if given is not None:
            call.set(name, [item // pieces for item in given] if isinstance(given, list | tuple) else given // pieces)


def _local_slice(call: LocalCall, pieces: int) -> None:
    """slice, narrow: begin and end in the shard."""
    for name in ("start", "end", "length"):
        given = call.get(name)
        if isinstance(given, int) and abs(given) < 1 << 62:
            call.set(name, given // pieces)


def _groups(call: LocalCall, pieces: int) -> None:
    """A convolution or group_norm whose groups are sharded."""
    name = "num_groups" if operator_name(call.node) == "group_norm" else "groups"
    call.set(name, call.get(name, 1) // pieces)


def _output_size(call: LocalCall, pieces: int) -> None:
    if call.get("output_size") is not None:
        call.set("output_size", call.get("output_size") // pieces)


def _positions(call: LocalCall, specs: CallSpecs) -> None:
    """Tell a random operator which shard it has: an element's random number depends on its place in the whole tensor."""
    batch_dim: int | None = call.kwargs.get("batch_dim", 0)
    if call.node.kwargs.get("kernel"):
        batch_dim = None  # its seed differs from shard to shard, whatever the dim
    elif call.node.target in (random_streams.dropout, random_streams.channel_dropout) and len(call.args) > 3:
        batch_dim = call.args[3]
    draws = call.node.target in _DRAWS
    if draws:  # of a row, whose sizes are given without the batch's
        batch_dim = call.kwargs.get("batch_dim", 0)
    shards = [
        (axis, kind)
        for axis, kind in zip(specs.degrees, specs.results[0] if draws else specs.operands[0])
        if isinstance(kind, Shard) and kind.dim != batch_dim
    ]
    if draws:
        sizes = list(call.args[1])
        for axis, kind in shards:
            place = kind.dim - (batch_dim is not None and kind.dim > batch_dim)
            sizes[place] = local_size(sizes[place], kind, specs.degrees[axis])
        call.args[1] = sizes
    found = tuple((kind.dim, axis, kind.parts) for axis, kind in shards)
    if found:
        call.kwargs["sharded"] = found


def _mean(call: LocalCall, axes: Sequence[str], emit: Emit) -> Any:
    """The mean over a sharded dim: the sum of the shard, divided by the whole size."""
    whole = value_of(operands_of(call.node)[0])
    dims = call.get("dim")
    count = 1
    for dim in dims if dims else range(whole.ndim):
        count *= int(whole.shape[dim])
    total = emit(_aten.sum.dim_IntList if len(call.args) > 1 else _aten.sum.default, tuple(call.args), call.kwargs)
    return emit(_aten.div.Tensor, (total, float(count)), {})


def _own_experts(call: LocalCall, axes: Sequence[str], emit: Emit) -> Any:
    """A grouped product on the rows of this rank's experts: its offsets count from the rank's first row."""
    (axis,) = axes
    own = emit(expert_rows.own_offsets, (call.get("offs"), axis), {})
    if isinstance(own, fx.Node):
        whole = value_of(operands_of(call.node)[2])
        own.meta |= {"val": whole.new_empty(whole.shape[0] // call.degrees[axis]), "batch_coefficients": (None,)}
    call.set("offs", own)
    return emit(call.node.target, tuple(call.args), call.kwargs)


def _own_group(call: LocalCall, axes: Sequence[str], emit: Emit) -> Any:
    """Attention of a part of a group of heads: keys and values are those of its group alone, which the outermost axis says, since each axis
    divides the heads of one group further."""
    (query, key, value), axis = call.args[:3], axes[0]
    dim = value_of(operands_of(call.node)[1]).ndim - 3
    own = [emit(collectives.own_group, (x, axis, dim), {}) for x in (key, value)]
    for made, x in zip(own, (key, value)):
        if isinstance(made, fx.Node):
            sizes = list(value_of(x).shape)
            made.meta["val"] = value_of(x).new_empty([*sizes[:dim], 1, *sizes[dim + 1 :]])
            made.meta.pop("batch_coefficients", None)
    return emit(call.node.target, (query, *own, *call.args[3:]), call.kwargs)


def _composite(composite: Composite) -> Rewrite:
    """Make the rewrite that calls the function of a composite."""
    arguments = composite.arguments
    assert arguments is not None

    def replace(call: LocalCall, axes: Sequence[str], emit: Emit) -> Any:
        return emit(composite.function, *arguments(call, axes))

    return Rewrite(
        replace=replace, together=True, divides=composite.divides, updates=composite.updates, also=composite.also
    )


@dataclass(frozen=True)
class Rewrite:
    """How a call changes where ``Placement.rewrite`` names this; the rest is in :func:`on_pieces`.

    Attributes:
        change: makes literal arguments those of one of so many shards.
        replace: (call, axes, emit) -> what stands in the place of the call.
        own: the function that makes operands a rank's own.
        first: on the first of several axes it has made them so for all: those after it divide what is left.
        together: the ranks communicate.
        divides: what an axis must divide for it.
        updates: buffers that it writes are the same on all ranks.
        also: rewrites on other axes that it does as well.
    """

    change: Callable[[LocalCall, int], None] | None = None
    replace: Callable[[LocalCall, Sequence[str], Emit], Any] | None = None
    own: Callable[..., Any] | None = None
    first: bool = False
    together: bool = False
    divides: tuple[Divides, ...] = tuple(Divides)
    updates: bool = False
    also: tuple[str, ...] = ()


_BY_EXPERTS = (Divides.EXPERTS, Divides.WEIGHTS, Divides.SEQUENCE)
REWRITES: Mapping[str, Rewrite] = {
    "local_shape": Rewrite(),
    "local_sizes": Rewrite(_local_sizes),
    "local_slice": Rewrite(_local_slice),
    "groups": Rewrite(_groups),
    "output_size": Rewrite(_output_size),
    "mean": Rewrite(replace=_mean),
    "own_experts": Rewrite(replace=_own_experts, own=expert_rows.own_offsets, together=True, divides=_BY_EXPERTS),
    "own_group": Rewrite(replace=_own_group, own=collectives.own_group, first=True, together=True),
    "mean_of_pieces": Rewrite(),
    "mean_of_labels": Rewrite(together=True),
    **{name: _composite(composite) for name, composite in COMPOSITES.items() if composite.of is not None},
}
"""By the names that ``Placement.rewrite`` may have."""
