"""Convolutions, norms over channels, pooling and interpolation: batch and channels can be sharded, spatial dims can't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphpar.emitted import collectives
from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.composite import Composite, Local, LocalCall, Message, Messages
from graphpar.operators.moves import last, unsharded
from graphpar.operators.notation import Rule, labelled
from graphpar.operators.placement import Context, Placement, from_rule, literal, operands_of, results_of, sizes_of
from graphpar.operators.record import FIRST, Kind, Reads, Record, each
from graphpar.runtime.axes import Divides
from graphpar.runtime.layout import R, Shard


def convolution(node: fx.Node, context: Context) -> list[Placement]:
    """x [n, c, ...], weight [o, c / groups, ...] (transposed: [c, o / groups, ...]), bias [o].

    Output channels are sharded with their bias; sharded input channels give a partial sum; groups are sharded on both sides.
    """
    operands = operands_of(node)
    x, weight = (value_of(operand).ndim for operand in operands[:2])
    name, groups = operator_name(node), literal(node, "groups")
    transposed = "transpose" in name or (name == "convolution" and literal(node, "transposed"))
    places = weight - 2
    lead = ["n"] if x == weight else []
    kernel = tuple(f"k{i}" for i in range(places))
    channels = ("c", "o") if transposed else ("o", "c")
    before = (*lead, "c", *(f"s{i}" for i in range(places)))
    after = (*lead, "o", *(f"t{i}" for i in range(places)))
    fixed = {*kernel, *before[-places:], *after[-places:]}
    if groups != 1:
        channels, fixed = (channels[0] + "'", channels[1] + "'"), fixed | {"o", "c", "o'", "c'"}
    rows = (before, (*channels, *kernel), *(("o",) for _ in operands[2:]))
    rule = Rule(rows, (after,), frozenset(fixed), linear=({0}, {1}) if len(operands) == 2 else ())  # type: ignore[arg-type]
    found = from_rule(node, rule, context)
    if groups % context.degree == 0:
        dim = len(lead)
        found.append(Placement((Shard(dim), *(Shard(0) for _ in operands[1:])), (Shard(dim),), "groups"))
    return found


def batch_norm(node: fx.Node) -> Rule:
    """Channels are independent; with running statistics that are only read, so is everything. Written buffers are not sharded."""
    operands = operands_of(node)
    labels = labelled(value_of(operands[0]).ndim)
    training = bool(literal(node, "training"))
    running = literal(node, "running_mean") is not None
    if (training and running) or len(labels) < 2:
        return unsharded(node)
    fixed = frozenset(label for dim, label in enumerate(labels) if dim != 1) if training or not running else frozenset()
    return Rule((labels, *((labels[1],) for _ in operands[1:])), (labels,), fixed)


def sync_batch_norm(node: fx.Node, context: Context) -> list[Placement]:
    """In training each replica normalizes its rows, with the statistics of all replicas' rows."""
    operands = operands_of(node)
    labels = labelled(value_of(operands[0]).ndim)
    if not context.replicas or not literal(node, "training") or len(labels) < 2:
        return []
    rule = Rule((labels, *((labels[1],) for _ in operands[1:])), (labels,), frozenset(labels[1:2]))
    return [Placement(p.operands, p.results, "sync_batch_norm") for p in from_rule(node, rule, context) if p.divides]


def channel_batch_norm(node: fx.Node, context: Context) -> list[Placement]:
    """Each rank normalizes its channels, and all write the statistics of all channels."""
    x, *others = operands_of(node)
    stored = [node.args[place] for place in (3, 4)]
    writes = literal(node, "training") and stored[0] is not None
    if context.replicas or not writes or value_of(x).ndim < 2 or value_of(x).shape[1] % context.degree:
        return []
    kinds = (Shard(1), *(R if operand in stored else Shard(0) for operand in others))
    return [Placement(kinds, (Shard(1),), "channel_batch_norm")]


def _channel_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (axis,) = axes
    return (*call.args[:5], axis), {name: call.get(name) for name in ("training", "momentum", "eps")}


def _channel_messages(node: fx.Node, operands: Sequence[Local], result: Local, degree: int) -> Messages:
    """The running mean and variance of each channel."""
    return [Message("all-gather", 8 * degree * operands[0].sizes[1])], []


def _sync_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {name: call.get(name) for name in ("training", "momentum", "eps")}
    if call.axes.get("channel_batch_norm"):
        (options["channels"],) = call.axes["channel_batch_norm"]
    return (*call.args[:5], tuple(axes)), options


def _sync_messages(node: fx.Node, operands: Sequence[Local], result: Local, degree: int) -> Messages:
    """Each channel's mean and variance, and their gradients."""
    nbytes = 8 * degree * operands[0].sizes[1]
    return [Message("all-gather", nbytes)], [Message("reduce-scatter", nbytes)]


def _norm_of_parts(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    momentum: float,
    eps: float,
    channels: str = "",
) -> Tensor:
    mean, var = (None, None) if training else (running_mean, running_var)
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


def instance_norm(node: fx.Node) -> Rule:
    """Examples and channels are independent, unless there are running statistics."""
    operands = operands_of(node)
    labels = labelled(value_of(operands[0]).ndim)
    if literal(node, "running_mean") is not None or len(labels) < 3:
        return unsharded(node)
    return Rule((labels, *((labels[1],) for _ in operands[1:])), (labels,), frozenset(labels[2:]))


def group_norm(node: fx.Node, context: Context) -> list[Placement]:
    """Examples are independent, and so are groups of channels."""
    operands = operands_of(node)
    labels = labelled(value_of(operands[0]).ndim)
    rule = Rule((labels, *(("d1",) for _ in operands[1:])), (labels,), frozenset(labels[1:]))
    found = from_rule(node, rule, context)
    if int(literal(node, "num_groups")) % context.degree == 0 and sizes_of(operands[0])[1][0] > 0:
        found.append(Placement((Shard(1), *(Shard(0) for _ in operands[1:])), (Shard(1),), "groups"))
    return found


def grid(node: fx.Node) -> Rule:
    """affine_grid_generator: theta [n, ...] -> [n, h, w, 2] or [n, d, h, w, 3]. Only a size that follows the batch is sharded."""
    (theta,) = operands_of(node)
    before = ("n", *(f"t{i}" for i in range(value_of(theta).ndim - 1)))
    after = ("n", *(f"s{i}" for i in range(value_of(node).ndim - 1)))
    follows = sizes_of(theta)[0] == (1, 1) or isinstance(node.args[1][0], fx.Node)  # type: ignore[index, arg-type]
    return Rule((before,), (after,), frozenset({*before[follows:], *after[follows:]}))


def shuffled(node: fx.Node) -> Rule:
    """pixel_shuffle, pixel_unshuffle: [..., c r r, h, w] -> [..., c, h r, w r] or back; only leading dims and channels are sharded."""
    rank = value_of(node).ndim
    lead = labelled(rank - 3)
    return Rule(((*lead, "c", "h", "w"),), ((*lead, "c", "H", "W"),), frozenset({"h", "w", "H", "W"}), linear=FIRST)


def grid_sample(node: fx.Node) -> Rule:
    """x [n, c, ...], grid [n, places.., 2 or 3] -> [n, c, places..]: channels, and places of the result."""
    places = value_of(node).ndim - 2
    whole, made = tuple(f"s{i}" for i in range(places)), tuple(f"p{i}" for i in range(places))
    rows = (("n", "c", *whole), ("n", *made, "xy"))
    return Rule(rows, (("n", "c", *made),), frozenset({*whole, "xy"}), linear=FIRST)


def unfolded(node: fx.Node) -> Rule:
    """im2col, col2im: examples alone."""
    operand = value_of(operands_of(node)[0]).ndim
    made = results_of(node)[0].ndim
    if operand != {"im2col": 4, "col2im": 3}[operator_name(node)]:
        return unsharded(node)
    before, after = ("n", *(f"a{i}" for i in range(operand - 1))), ("n", *(f"b{i}" for i in range(made - 1)))
    return Rule((before,), (after,), frozenset({*before[1:], *after[1:]}), linear=FIRST)


# ---- records ---------------------------------------------------------------------------------------------------

_OPTIONS = "stride padding dilation groups"


def _convolution(module: str = "", *spelling: write.Spelling) -> Record:
    return Record(Kind.CONVOLUTION, placements=convolution, bias=2, module=module, spelling=spelling)


def _pool(dims: int, *spelling: write.Spelling, linear: bool = False) -> Record:
    return Record(Kind.PLACES, last(dims, linear=linear), functions=True, spelling=spelling)


def _resized(dims: int, *spelling: write.Spelling) -> Record:
    return Record(Kind.PLACES, last(dims, linear=True), saves=Reads.NOTHING, spelling=spelling)


def _by_dims(dims: int) -> dict[str, Record]:
    """Operators that exist for one, two and three spatial dims."""
    conv = write.function(f"F.conv{dims}d", "input weight bias", _OPTIONS)
    pool = write.function(f"F.max_pool{dims}d", "self kernel_size", "stride padding dilation ceil_mode")
    return {
        f"conv{dims}d": _convolution(f"Conv{dims}d", conv),
        f"conv_transpose{dims}d": _convolution(f"ConvTranspose{dims}d"),
        f"max_pool{dims}d": _pool(dims, pool),
        **each(f"max_pool{dims}d_with_indices adaptive_max_pool{dims}d", _pool(dims)),
        f"avg_pool{dims}d": _pool(dims, linear=True),
        f"adaptive_avg_pool{dims}d": Record(Kind.PLACES, last(dims, linear=True)),
        f"upsample_nearest{dims}d": _resized(dims, write.interpolated("nearest")),
        f"_upsample_nearest_exact{dims}d": _resized(dims, write.interpolated("nearest-exact")),
    }


_INSTANCE_NORM = write.function(
    "F.instance_norm", "input running_mean running_var weight bias", "use_input_stats momentum eps"
)
_AVG_POOL = write.function(
    "F.avg_pool2d", "self kernel_size", "stride padding ceil_mode count_include_pad divisor_override"
)

RECORDS: dict[str, Record] = {
    **_by_dims(1),
    **_by_dims(2),
    **_by_dims(3),
    "convolution": _convolution(),
    "max_unpool2d": replace(_pool(2), saves=Reads.NOTHING),
    "max_unpool3d": replace(_pool(3), saves=Reads.NOTHING),
    "avg_pool2d": _pool(2, _AVG_POOL, linear=True),
    "adaptive_max_pool2d": _pool(2, write.renamed("F.adaptive_max_pool2d_with_indices")),
    "adaptive_max_pool3d": _pool(3, write.renamed("F.adaptive_max_pool3d_with_indices")),
    "upsample_linear1d": _resized(1, write.interpolated("linear")),
    "upsample_bilinear2d": _resized(2, write.interpolated("bilinear")),
    "upsample_bicubic2d": _resized(2, write.interpolated("bicubic")),
    "upsample_trilinear3d": _resized(3, write.interpolated("trilinear")),
    "_upsample_bilinear2d_aa": _resized(2, write.interpolated("bilinear", antialias=True)),
    "_upsample_bicubic2d_aa": _resized(2, write.interpolated("bicubic", antialias=True)),
    **each("pixel_shuffle pixel_unshuffle", Record(Kind.MOVE, shuffled)),
    **each("grid_sampler grid_sampler_2d grid_sampler_3d", Record(Kind.PLACES, grid_sample)),
    "im2col": Record(Kind.PLACES, unfolded, saves=Reads.NOTHING, spelling=(write.renamed("F.unfold"),)),
    "col2im": Record(Kind.PLACES, unfolded, saves=Reads.NOTHING, spelling=(write.renamed("F.fold"),)),
    "affine_grid_generator": Record(Kind.PLACES, grid),
    "sync_batch_norm": Record(
        Kind.NORM,
        module="BatchNorm{}d",
        composite=Composite(
            collectives.sync_batch_norm,
            _norm_of_parts,
            of=torch.ops.aten.batch_norm.default,
            placements=sync_batch_norm,
            arguments=_sync_arguments,
            sends=_sync_messages,
            updates=True,
            also=("channel_batch_norm",),
            title="statistics of BatchNorm",
            samples=(lambda draw: ((draw(4, 3, 5), draw(3), draw(3), None, None, True, 0.1, 1e-5, False), {}),),
        ),
    ),
    "channel_batch_norm": Record(
        Kind.NORM,
        module="BatchNorm{}d",
        composite=Composite(
            collectives.channel_batch_norm,
            _norm_of_parts,
            of=torch.ops.aten.batch_norm.default,
            placements=channel_batch_norm,
            arguments=_channel_arguments,
            sends=_channel_messages,
            divides=(Divides.WEIGHTS,),
            updates=True,
            title="running statistics of BatchNorm",
            samples=(
                lambda draw: ((draw(4, 6, 5), *(draw(6) for _ in range(4)), True, 0.1, 1e-5, False), {}),
                lambda draw: ((draw(4, 6), None, None, draw(6), draw(6), True, 0.1, 1e-5, False), {}),
            ),
        ),
    ),
    "batch_norm": Record(Kind.NORM, batch_norm, module="BatchNorm{}d", spelling=(write.batch_norm,)),
    "instance_norm": Record(Kind.NORM, instance_norm, module="InstanceNorm{}d", spelling=(_INSTANCE_NORM,)),
    "group_norm": Record(
        Kind.NORM,
        placements=group_norm,
        module="GroupNorm",
        spelling=(write.function("F.group_norm", "input num_groups weight bias", "eps"),),
    ),
}
