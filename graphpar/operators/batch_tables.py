"""Tables: what each operator mixes, moves, or adds up. The functions for the others are in :mod:`graphpar.operators.batch_rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

Dims = Callable[[fx.Node, Any], Iterable[int]]


def _last(count: int) -> Dims:
    return lambda node, value: range(value.ndim - count, value.ndim)


def dims_of_argument(position: int, default: Any = None, name: str = "dim") -> Dims:
    def dims(node: fx.Node, value: Any) -> Iterable[int]:
        given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
        if given is None or isinstance(given, bool):
            return range(value.ndim)
        items = given if isinstance(given, list | tuple) else [given]
        return [int(item) for item in items] or range(value.ndim)  # type: ignore[arg-type]

    return dims


def _all_but(*kept: int) -> Dims:
    return lambda node, value: [dim for dim in range(value.ndim) if dim not in kept]


def _normalized(node: fx.Node, value: Any) -> Iterable[int]:
    return range(value.ndim - len(node.args[1]), value.ndim)  # type: ignore[arg-type]


def _padded(node: fx.Node, value: Any) -> Iterable[int]:
    """The dims with padding, last first, two numbers a dim."""
    amounts = list(node.args[1])  # type: ignore[arg-type]
    return [value.ndim - 1 - place // 2 for place, amount in enumerate(amounts) if amount != 0]


def _batch_norm(node: fx.Node, value: Any) -> Iterable[int]:
    training = bool(node.args[5]) or node.args[3] is None
    return [dim for dim in range(value.ndim) if dim != 1] if training else []


def _instance_norm(node: fx.Node, value: Any) -> Iterable[int]:
    """Running statistics are written from those of all examples."""
    writes = bool(node.args[5]) and node.args[3] is not None
    return range(value.ndim) if writes else [dim for dim in range(value.ndim) if dim > 1]


def _diagonal(node: fx.Node, value: Any) -> Iterable[int]:
    return [int(dim) for dim in node.args[2:4]] if len(node.args) >= 4 else (0, 1)  # type: ignore[arg-type]


def _over_time(node: fx.Node, value: Any) -> Iterable[int]:
    """Recurrent layers: everything but the batch, which ``batch_first`` puts on dim 0."""
    batch = 0 if node.args[8] else 1
    return [dim for dim in range(value.ndim) if dim != batch or value.ndim < 3]


# The dims of the first argument that an operator mixes. The batch may lie along any other.
ALONG: dict[str, Dims] = {
    "linear": _last(1),
    "layer_norm": _normalized,
    "rms_norm": _normalized,
    "group_norm": _all_but(0),
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "softmax": dims_of_argument(1),
    "log_softmax": dims_of_argument(1),
    "_softmax": dims_of_argument(1),
    "_log_softmax": dims_of_argument(1),
    "logsumexp": dims_of_argument(1),
    "cumsum": dims_of_argument(1),
    "cumprod": dims_of_argument(1),
    "cummax": dims_of_argument(1),
    "cummin": dims_of_argument(1),
    "logcumsumexp": dims_of_argument(1),
    "flip": dims_of_argument(1, name="dims"),
    "roll": dims_of_argument(2, name="dims"),
    "topk": dims_of_argument(2, -1),
    "kthvalue": dims_of_argument(2, -1),
    "sort": dims_of_argument(1, -1),
    "argsort": dims_of_argument(1, -1),
    "argmax": dims_of_argument(1),
    "argmin": dims_of_argument(1),
    "amax": dims_of_argument(1),
    "amin": dims_of_argument(1),
    "max": dims_of_argument(1),
    "min": dims_of_argument(1),
    "median": dims_of_argument(1),
    "any": dims_of_argument(1),
    "all": dims_of_argument(1),
    "prod": dims_of_argument(1),
    "var": dims_of_argument(1),
    "std": dims_of_argument(1),
    "var_mean": dims_of_argument(1),
    "std_mean": dims_of_argument(1),
    "norm": dims_of_argument(2),
    "linalg_vector_norm": dims_of_argument(2),
    "glu": dims_of_argument(1, -1),
    "tril": _last(2),
    "triu": _last(2),
    "pad": _padded,
    "constant_pad_nd": _padded,
    "slice": dims_of_argument(1, 0),
    "select": dims_of_argument(1, 0),
    "narrow": dims_of_argument(1, 0),
    "split": dims_of_argument(2, 0),
    "split_with_sizes": dims_of_argument(2, 0),
    "chunk": dims_of_argument(2, 0),
    "tensor_split": dims_of_argument(2, 0),
    "unbind": dims_of_argument(1, 0),
    "unfold": dims_of_argument(1, 0),
    "gather": dims_of_argument(1, 0),
    "scatter": dims_of_argument(1, 0),
    "scatter_add": dims_of_argument(1, 0),
    "take_along_dim": dims_of_argument(2),
    "index_select": dims_of_argument(1, 0),
    "select_scatter": dims_of_argument(2, 0),
    "slice_scatter": dims_of_argument(2, 0),
    "diagonal": _diagonal,
    "conv1d": _all_but(0),
    "conv2d": _all_but(0),
    "conv3d": _all_but(0),
    "convolution": _all_but(0),
    "conv_transpose1d": _all_but(0),
    "conv_transpose2d": _all_but(0),
    "conv_transpose3d": _all_but(0),
    "max_pool1d": _last(1),
    "max_pool2d": _last(2),
    "max_pool3d": _last(3),
    "avg_pool1d": _last(1),
    "avg_pool2d": _last(2),
    "avg_pool3d": _last(3),
    "adaptive_avg_pool1d": _last(1),
    "adaptive_avg_pool2d": _last(2),
    "adaptive_avg_pool3d": _last(3),
    "adaptive_max_pool1d": _last(1),
    "adaptive_max_pool2d": _last(2),
    "upsample_nearest1d": _last(1),
    "upsample_linear1d": _last(1),
    "upsample_nearest2d": _last(2),
    "upsample_bilinear2d": _last(2),
    "upsample_bicubic2d": _last(2),
    "pixel_shuffle": _last(3),
    "pixel_unshuffle": _last(3),
    "im2col": _all_but(0),
    "col2im": _all_but(0),
    "scaled_dot_product_attention": _last(2),
    "_transformer_encoder_layer_fwd": _all_but(0),
    "_native_multi_head_attention": _all_but(0),
    "cosine_similarity": dims_of_argument(2, 1),
    "cosine_embedding_loss": _last(1),
    "triplet_margin_loss": _last(1),
    "multi_margin_loss": _last(1),
    "multilabel_margin_loss": _last(1),
    "pairwise_distance": _last(1),
    "diff": dims_of_argument(2, -1),
    "count_nonzero": dims_of_argument(1),
    "lstm": _over_time,
    "gru": _over_time,
    "rnn_tanh": _over_time,
    "rnn_relu": _over_time,
    "channel_dropout": _all_but(0),
}  # fmt: skip

# Operators that only move dims: the batch is wherever the result's shape shows it.
MOVES = {
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "t", "mT", "movedim", "moveaxis", "swapaxes",
    "swapdims", "detach", "alias", "contiguous", "clone", "to", "type_as", "_to_copy", "dropout", "feature_dropout",
    "channel_dropout", "one_hot", "numpy_T", "adjoint", "lift_fresh_copy", "view_as_real", "view_as_complex", "resolve_conj",
}  # fmt: skip

# Row numbers stay row numbers under these. Anything else that computes with them would tell microbatches apart.
KEEPS_NUMBERS = {
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "detach", "alias", "contiguous", "clone", "to",
    "view", "reshape", "slice", "floor_divide", "index", "index_put", "getitem", "div", "sym_size", "embedding_bag",
}  # fmt: skip

FACTORIES = {"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
             "new_full", "new_empty", "scalar_tensor"}  # fmt: skip

# Sums over examples stay sums under these, where the one sum comes once and everything else is fixed.
LINEAR = {
    "neg", "mul", "div", "to", "view", "reshape", "squeeze", "unsqueeze", "sum", "select", "slice", "clone", "detach", "permute",
    "transpose", "expand", "contiguous", "alias", "stack", "cat", "getitem", "mean", "unbind", "matmul", "mm", "mv", "dot",
}  # fmt: skip
SUMS = {"add", "sub", "stack", "cat"}

# Operators whose tensor arguments must all have the batch on the same dim: an index picks within its own row.
SAME_DIM = {"gather", "scatter", "scatter_add", "take_along_dim", "slice_scatter", "select_scatter"}
