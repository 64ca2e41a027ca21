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

from graphpar.emitted import collectives, random_streams, ring_attention
from graphpar.ir.program import batch_coefficients, operator_name, value_of
from graphpar.operators.placement import argument_place, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named
from graphpar.runtime.layout import Shard, Type, local_size

_aten = torch.ops.aten
Emit = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_RANDOM = (random_streams.dropout, random_streams.channel_dropout, random_streams.dropout_attention)


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
    call = _Call(node, list(args), dict(kwargs), specs.degrees)
    if "local_shape" in specs.rewrites:
        _local_shape(call, specs, emit)
    for name, change in _CHANGES.items():
        if name in specs.rewrites:
            change(call, specs.pieces(name))
    if node.target in _RANDOM:
        _positions(call, specs)
    if "sync_batch_norm" in specs.rewrites:
        axes = tuple(axis for axis, name in zip(specs.degrees, specs.rewrites) if name == "sync_batch_norm")
        options = {name: call.get(name) for name in ("training", "momentum", "eps")}
        return emit(collectives.sync_batch_norm, (*call.args[:5], axes), options)
    count = _labels(call, specs, emit) if "mean_of_labels" in specs.rewrites else specs.pieces("mean_of_pieces")
    result = _replaced(call, specs, emit)
    return result if isinstance(count, int) and count == 1 else emit(_aten.div.Tensor, (result, count), {})


def _replaced(call: _Call, specs: CallSpecs, emit: Emit) -> Any:
    for axis, name in zip(specs.degrees, specs.rewrites):
        if name in _REPLACED:
            return _REPLACED[name](call, axis, emit)
    return emit(call.target or call.node.target, tuple(call.args), call.kwargs)


def _labels(call: _Call, specs: CallSpecs, emit: Emit) -> Any:
    """Turn the mean of a loss over classes into its sum; return how many labels count on all ranks."""
    call.set("reduction", 2)
    counted = emit(_aten.ne.Scalar, (call.get("target", call.args[1]), call.get("ignore_index", -100)), {})
    count = emit(_aten.sum.default, (counted,), {})
    for axis, name in zip(specs.degrees, specs.rewrites):
        if name == "mean_of_labels":
            count = emit(collectives.all_reduce, (count, axis), {})
    return count


@dataclass
class _Call:
    """A call whose arguments are read and written by name, however they were given."""

    node: fx.Node
    args: list[Any]
    kwargs: dict[str, Any]
    degrees: Mapping[str, int]
    target: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument ``name``."""
        place = argument_place(self.node, name)
        if place is not None and place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def replace(self, target: Any, **options: Any) -> None:
        """Call ``target`` instead, on the same first operand and ``options``."""
        self.target, self.args, self.kwargs = target, [self.args[0], *options.values()], {}

    def set(self, name: str, value: Any) -> None:
        """Replace the argument ``name``."""
        place = argument_place(self.node, name)
        if place is not None and place < len(self.args):
            self.args[place] = value
        else:
            self.kwargs[name] = value


def _local_shape(call: _Call, specs: CallSpecs, emit: Emit) -> None:
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


def _local_sizes(call: _Call, pieces: int) -> None:
    """split, split_with_sizes, tensor_split: lengths, or places, in the shard."""
    for name in ("split_sizes", "split_size", "indices"):
        given = call.get(name)
        if given is not None:
            call.set(name, [item // pieces for item in given] if isinstance(given, list | tuple) else given // pieces)


def _local_slice(call: _Call, pieces: int) -> None:
    """slice, narrow: begin and end in the shard."""
    for name in ("start", "end", "length"):
        given = call.get(name)
        if isinstance(given, int) and abs(given) < 1 << 62:
            call.set(name, given // pieces)


def _groups(call: _Call, pieces: int) -> None:
    """A convolution or group_norm whose groups are sharded."""
    name = "num_groups" if operator_name(call.node) == "group_norm" else "groups"
    call.set(name, call.get(name, 1) // pieces)


def _output_size(call: _Call, pieces: int) -> None:
    if call.get("output_size") is not None:
        call.set("output_size", call.get("output_size") // pieces)


def _positions(call: _Call, specs: CallSpecs) -> None:
    """Tell a random operator which shard it has: an element's random number depends on its place in the whole tensor."""
    batch_dim: int | None = call.kwargs.get("batch_dim", 0)
    if call.node.kwargs.get("kernel"):
        batch_dim = None  # its seed differs from shard to shard, whatever the dim
    elif call.node.target is not random_streams.dropout_attention and len(call.args) > 3:
        batch_dim = call.args[3]
    found = tuple(
        (kind.dim, axis, kind.parts)
        for axis, kind in zip(specs.degrees, specs.operands[0])
        if isinstance(kind, Shard) and kind.dim != batch_dim
    )
    if found:
        call.kwargs["sharded"] = found


def _mean(call: _Call, axis: str, emit: Emit) -> Any:
    """The mean over a sharded dim: the sum of the shard, divided by the whole size."""
    whole = value_of(operands_of(call.node)[0])
    dims = call.get("dim")
    count = 1
    for dim in dims if dims else range(whole.ndim):
        count *= int(whole.shape[dim])
    total = emit(_aten.sum.dim_IntList if len(call.args) > 1 else _aten.sum.default, tuple(call.args), call.kwargs)
    return emit(_aten.div.Tensor, (total, float(count)), {})


def _vocab_embedding(call: _Call, axis: str, emit: Emit) -> Any:
    padding = call.get("padding_idx", -1)
    options = {} if padding == -1 else {"padding_idx": padding}
    return emit(collectives.vocab_embedding, (call.args[1], call.args[0], axis), options)


def _vocab_cross_entropy(call: _Call, axis: str, emit: Emit) -> Any:
    logits = value_of(operands_of(call.node)[0])
    options: dict[str, Any] = {}
    if call.get("weight") is not None:
        options["weight"] = call.get("weight")
    options["reduction"] = ("none", "mean", "sum")[call.get("reduction", 1)]
    if call.get("ignore_index", -100) != -100:
        options["ignore_index"] = call.get("ignore_index")
    vocabulary = int(logits.shape[min(1, logits.ndim - 1)])
    return emit(collectives.vocab_cross_entropy, (call.args[0], call.args[1], axis, vocabulary), options)


def _own_experts(call: _Call, axis: str, emit: Emit) -> Any:
    """A grouped product on the rows of this rank's experts: its offsets count from the rank's first row."""
    own = emit(collectives.own_offsets, (call.get("offs"), axis), {})
    if isinstance(own, fx.Node):
        whole = value_of(operands_of(call.node)[2])
        own.meta |= {"val": whole.new_empty(whole.shape[0] // call.degrees[axis]), "batch_coefficients": (None,)}
    call.set("offs", own)
    return emit(call.node.target, tuple(call.args), call.kwargs)


def _own_group(call: _Call, axis: str, emit: Emit) -> Any:
    """Attention of a part of a group of heads: keys and values are those of its group alone."""
    query, key, value = call.args[:3]
    dim = value_of(operands_of(call.node)[1]).ndim - 3
    own = [emit(collectives.own_group, (x, axis, dim), {}) for x in (key, value)]
    for made, x in zip(own, (key, value)):
        if isinstance(made, fx.Node):
            sizes = list(value_of(x).shape)
            made.meta["val"] = value_of(x).new_empty([*sizes[:dim], 1, *sizes[dim + 1 :]])
            made.meta.pop("batch_coefficients", None)
    return emit(call.node.target, (query, *own, *call.args[3:]), call.kwargs)


def _ring_attention(call: _Call, axis: str, emit: Emit) -> Any:
    """Attention on this rank's rows; a ring brings it the keys and values of the others."""
    keys = value_of(operands_of(call.node)[1]).shape[2]
    options: dict[str, Any] = {}
    for name, default in (("is_causal", False), ("scale", None), ("enable_gqa", False)):
        if call.get(name, default) != default:
            options[name] = call.get(name)
    if int(keys) % call.degrees[axis]:
        options["length"] = int(keys)
    return emit(ring_attention.ring_attention, (*call.args[:3], axis), options)


_CHANGES: dict[str, Callable[[_Call, int], None]] = {
    "local_sizes": _local_sizes,
    "local_slice": _local_slice,
    "groups": _groups,
    "output_size": _output_size,
}
_REPLACED: dict[str, Callable[[_Call, str, Emit], Any]] = {
    "mean": _mean,
    "vocab_embedding": _vocab_embedding,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "own_experts": _own_experts,
    "own_group": _own_group,
    "ring_attention": _ring_attention,
}
REWRITES = ("local_shape", *_CHANGES, *_REPLACED, "mean_of_pieces", "mean_of_labels", "sync_batch_norm")
"""The names that ``Placement.rewrite`` may have."""
TOGETHER = (
    "vocab_embedding", "vocab_cross_entropy", "own_experts", "own_group", "ring_attention", "mean_of_labels", "sync_batch_norm",
)  # fmt: skip
"""Rewrites in which the ranks communicate."""
