"""What each operator does to the batch: tables first, and functions for the operators that move or sort it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from graphpar.batch_states import (
    Additive,
    Context,
    Coupled,
    Fixed,
    Layout,
    Rows,
    State,
    result_coefficients,
    size_factor,
)
from graphpar.program import batch_coefficients, operator_name, value_of

Dims = Callable[[fx.Node, Any], Iterable[int]]
Rule = Callable[[fx.Node, Context, bool], State | None]


def _last(count: int) -> Dims:
    return lambda node, value: range(value.ndim - count, value.ndim)


def _argument(position: int, default: Any = None, name: str = "dim") -> Dims:
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
    "softmax": _argument(1),
    "log_softmax": _argument(1),
    "_softmax": _argument(1),
    "_log_softmax": _argument(1),
    "logsumexp": _argument(1),
    "cumsum": _argument(1),
    "cumprod": _argument(1),
    "cummax": _argument(1),
    "cummin": _argument(1),
    "logcumsumexp": _argument(1),
    "flip": _argument(1, name="dims"),
    "roll": _argument(2, name="dims"),
    "topk": _argument(2, -1),
    "kthvalue": _argument(2, -1),
    "sort": _argument(1, -1),
    "argsort": _argument(1, -1),
    "argmax": _argument(1),
    "argmin": _argument(1),
    "amax": _argument(1),
    "amin": _argument(1),
    "max": _argument(1),
    "min": _argument(1),
    "median": _argument(1),
    "any": _argument(1),
    "all": _argument(1),
    "prod": _argument(1),
    "var": _argument(1),
    "std": _argument(1),
    "var_mean": _argument(1),
    "std_mean": _argument(1),
    "norm": _argument(2),
    "linalg_vector_norm": _argument(2),
    "glu": _argument(1, -1),
    "tril": _last(2),
    "triu": _last(2),
    "pad": _padded,
    "constant_pad_nd": _padded,
    "slice": _argument(1, 0),
    "select": _argument(1, 0),
    "narrow": _argument(1, 0),
    "split": _argument(2, 0),
    "split_with_sizes": _argument(2, 0),
    "chunk": _argument(2, 0),
    "tensor_split": _argument(2, 0),
    "unbind": _argument(1, 0),
    "unfold": _argument(1, 0),
    "gather": _argument(1, 0),
    "scatter": _argument(1, 0),
    "scatter_add": _argument(1, 0),
    "take_along_dim": _argument(2),
    "index_select": _argument(1, 0),
    "select_scatter": _argument(2, 0),
    "slice_scatter": _argument(2, 0),
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
    "cosine_similarity": _argument(2, 1),
    "cosine_embedding_loss": _last(1),
    "triplet_margin_loss": _last(1),
    "multi_margin_loss": _last(1),
    "multilabel_margin_loss": _last(1),
    "pairwise_distance": _last(1),
    "cdist": _last(2),
    "diff": _argument(2, -1),
    "count_nonzero": _argument(1),
    "lstm": _over_time,
    "gru": _over_time,
    "rnn_tanh": _over_time,
    "rnn_relu": _over_time,
    "channel_dropout": _all_but(0),
}  # fmt: skip

# Operators that only move dims: the batch is wherever the result's shape shows it.
MOVES = {
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "t", "mT", "movedim", "moveaxis", "swapaxes",
    "swapdims", "detach", "alias", "contiguous", "clone", "to", "type_as", "_to_copy", "dropout", "feature_dropout",
    "channel_dropout", "one_hot", "numpy_T", "adjoint", "lift_fresh_copy", "view_as_real", "view_as_complex", "resolve_conj",
}  # fmt: skip

# Row numbers stay row numbers under these. Anything else that computes with them would tell microbatches apart.
KEEPS_NUMBERS = {
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "detach", "alias", "contiguous", "clone", "to",
    "view", "reshape", "slice", "floor_divide", "index", "index_put", "getitem", "div", "sym_size",
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


# ---- reshaping -------------------------------------------------------------------------------------------------


def _reshape(node: fx.Node, context: Context, pure: bool) -> State | None:
    """view and its kin: find where the factor ``batch`` went, by counting what lies before and after it."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = context.states[source]
    if not isinstance(state, Rows) or state.chosen is not None:
        return None if not isinstance(state, Rows) else _chosen_reshape(node, state, pure)
    before, after = value_of(source).shape, batch_coefficients(node)
    dims = [dim for dim, coefficient in enumerate(after) if coefficient is not None]
    outside = state.outer
    for size in before[: state.dim]:
        outside *= int(size)
    for dim in dims:
        ahead = 1
        for size in value_of(node).shape[:dim]:
            ahead *= int(size)
        coefficient = after[dim] or 1
        if len(dims) == 1 and outside % ahead == 0 and coefficient % (outside // ahead) == 0:
            outer = outside // ahead
            return replace(state, dim=dim, outer=outer, inner=coefficient // outer, pure=pure)
    return Coupled(f"{operator_name(node)} folds the batch into other dims", node)


def _chosen_reshape(node: fx.Node, state: Rows, pure: bool) -> State:
    """Chosen rows may get or lose inner dims, but stay on dim 0."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    same = str(value_of(source).shape[0]) == str(value_of(node).shape[0]) if value_of(node).ndim else False
    if state.dim == 0 and same:
        return replace(state, pure=pure)
    return Coupled(f"{operator_name(node)} folds the batch into other dims", node)


def _concatenation(node: fx.Node, context: Context, pure: bool) -> State | None:
    """``cat`` along the batch puts whole batches one after the other: ``outer`` counts them."""
    name, parts = operator_name(node), node.args[0]
    assert isinstance(parts, list | tuple)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    tensors = [(p, context.states[p]) for p in parts if isinstance(p, fx.Node)]
    rows = [(p, s) for p, s in tensors if isinstance(s, Rows)]
    if not rows or any(isinstance(s, Additive | Layout) for _, s in tensors):
        return None
    first = rows[0][1]
    assert isinstance(first, Rows)
    along = int(dim) % (value_of(rows[0][0]).ndim + (name == "stack"))  # type: ignore[arg-type]
    states = [s for _, s in rows if isinstance(s, Rows)]
    if name == "cat" and any(s.dim == along for s in states):
        whole = len(states) == len(tensors) and all(s.dim == along and s.order is None for s in states)
        if whole and len({s.inner for s in states}) == 1:
            return replace(first, outer=sum(s.outer for s in states), pure=pure)
        return Coupled("cat joins along the batch", node)
    return context.located(node, list(rows), pure)


def _repeated(node: fx.Node, context: Context, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, counts = context.states[source], node.args[1]
    if not isinstance(state, Rows) or not isinstance(counts, list | tuple) or state.chosen is not None:
        return None
    added = len(counts) - value_of(source).ndim
    count = counts[state.dim + added]
    if not isinstance(count, int):
        return None
    return replace(state, dim=state.dim + added, outer=state.outer * count, pure=pure)


def _interleaved(node: fx.Node, context: Context, pure: bool) -> State | None:
    source, count = node.args[0], node.args[1] if len(node.args) > 1 else None
    assert isinstance(source, fx.Node)
    state, value = context.states[source], value_of(source)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None and value.ndim == 1:
        dim = 0
    if not isinstance(state, Rows) or not isinstance(dim, int) or not isinstance(count, int) or state.chosen is not None:
        return None
    if dim % value.ndim != state.dim:
        return context.located(node, [(source, state)], pure)
    return replace(state, inner=state.inner * count, pure=pure)


def _parts(node: fx.Node, context: Context, pure: bool) -> State | None:
    """``chunk`` and ``split`` along the batch take whole batches apart again."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = context.states[source]
    if not isinstance(state, Rows) or state.dim not in _dims_along(node, source):
        return None
    items = [user for user in node.users if operator_name(user) == "getitem"]
    for item in items:
        coefficient = batch_coefficients(item)[state.dim]
        if state.order is not None or coefficient is None or coefficient % state.inner:
            return None
    count = len(value_of(node))
    even = operator_name(node) in ("chunk", "split", "tensor_split")
    if state.outer % count or not even or any(_outer(item, state) != state.outer // count for item in items):
        return None
    return replace(state, outer=state.outer // count, pure=pure)


def _outer(node: fx.Node, state: Rows) -> int:
    return (batch_coefficients(node)[state.dim] or 0) // state.inner


def _slice(node: fx.Node, context: Context, pure: bool) -> State | None:
    """``x[batch:]`` of several batches in a row."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = context.states[source]
    if not isinstance(state, Rows) or state.dim not in _dims_along(node, source) or state.order is not None:
        return None
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    begins = size_factor(start) if isinstance(start, fx.Node) else (0 if start in (0, None) else None)
    taken = result_coefficients(node)[state.dim]
    if step != 1 or begins is None or taken is None or begins < 0 or begins % state.inner or taken % state.inner:
        return None
    return replace(state, outer=taken // state.inner, pure=pure)


def _dims_along(node: fx.Node, source: fx.Node) -> set[int]:
    value = value_of(source)
    return {dim % value.ndim for dim in ALONG[operator_name(node)](node, value)}


# ---- contractions ----------------------------------------------------------------------------------------------


def _reduction(node: fx.Node, context: Context, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, value = context.states[source], value_of(source)
    if not isinstance(state, Rows):
        return None
    dims = {dim % value.ndim for dim in _argument(1)(node, value)} if value.ndim else set()
    if state.dim not in dims:
        return context.located(node, [(source, state)], pure)
    if operator_name(node) in ("sum", "nansum", "count_nonzero"):
        return Additive(pure)
    return Coupled(f"{operator_name(node)} mixes examples", node)


def _matmul(node: fx.Node, context: Context, pure: bool) -> State | None:
    """matmul, mm, bmm, dot: the batch may not be contracted, unless it is in both (a sum over examples)."""
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    added = operands[:1] if operator_name(node) in ("addmm", "baddbmm", "addmv", "addbmm") else []
    left, right = operands[len(added)], operands[len(added) + 1]
    states = [context.states[left], context.states[right]]
    if any(not isinstance(state, Rows | Fixed) for state in [*states, *(context.states[a] for a in added)]):
        return None
    contracted = []
    for operand, state, back in ((left, states[0], 1), (right, states[1], 2)):
        ndim = value_of(operand).ndim
        contracted.append(isinstance(state, Rows) and state.dim == ndim - min(back, ndim))
    rows = [state for state in states if isinstance(state, Rows)]
    if all(contracted) and not added and len({state.layout for state in rows}) == 1:
        return Additive(pure)
    if any(contracted) or operator_name(node) == "addbmm":
        return Coupled(f"{operator_name(node)} contracts the batch", node)
    tensors = [(a, context.states[a]) for a in [*added, left, right] if isinstance(context.states[a], Rows)]
    return context.located(node, tensors, pure)


def _einsum(node: fx.Node, context: Context, pure: bool) -> State | None:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    letters: set[str] = set()
    rows: list[tuple[fx.Node, State]] = []
    for labels, operand in zip(inputs.split(","), operands):
        assert isinstance(operand, fx.Node)
        state = context.states[operand]
        if not isinstance(state, Rows | Fixed) or "." in labels or not arrow:
            return None
        if isinstance(state, Rows):
            letters.add(labels[state.dim])
            rows.append((operand, state))
    layouts = {state.layout for _, state in rows if isinstance(state, Rows)}
    if len(letters) != 1 or len(layouts) != 1:
        return Coupled("einsum mixes examples", node)
    return context.located(node, rows, pure) if letters <= set(output) else Additive(pure)


def _recurrent(node: fx.Node, context: Context, pure: bool) -> State | None:
    """lstm, gru, rnn: the initial states are [layers, batch, features]."""
    hidden = node.args[1]
    states = hidden if isinstance(hidden, list | tuple) else [hidden]
    for operand in states:
        state = context.states[operand] if isinstance(operand, fx.Node) else Fixed()
        if isinstance(state, Rows) and state.dim != 1:
            return Coupled(f"{operator_name(node)} mixes examples", node)
    return None


# ---- indexing --------------------------------------------------------------------------------------------------


def _embedding(node: fx.Node, context: Context, pure: bool) -> State | None:
    weight, indices = node.args[0], node.args[1]
    if isinstance(weight, fx.Node) and isinstance(context.states[weight], Fixed) and isinstance(indices, fx.Node):
        state = context.states[indices]
        return context.located(node, [(indices, state)], pure) if isinstance(state, Rows) else None
    return None


def _index(node: fx.Node, context: Context, pure: bool) -> State | None:
    """x[i, j]: rows chosen by their own numbers stay rows; by a sort's indices they take its order, or lose it again."""
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    state = context.states[source]
    moving = [(i, context.states[i]) for i in indices if isinstance(i, fx.Node) and not isinstance(context.states[i], Fixed)]
    if any(not isinstance(s, Rows) for _, s in moving):
        return None
    if not isinstance(state, Rows):
        numbers = any(isinstance(s, Rows) and (s.kind != "values" or _is_mask(i)) for i, s in moving)
        return None if numbers or not moving or not isinstance(state, Fixed) else context.located(node, moving, pure)
    if len(indices) == 1 and len(moving) == 1 and _is_mask(moving[0][0]):
        return _masked(node, state, moving[0][0], context, pure)
    chooser = indices[state.dim] if state.dim < len(indices) else None
    if chooser is None:
        return context.located(node, [(source, state)], pure) if not moving else None
    assert isinstance(chooser, fx.Node)
    by = context.states[chooser]
    others = [s for i, s in moving if i is not chooser]
    if not isinstance(by, Rows) or any(isinstance(s, Rows) and s.kind != "values" for s in others):
        return Coupled("index picks rows of the batch", node)
    return _picked(node, state, by, moving, context, pure)


def _picked(
    node: fx.Node, state: Rows, by: Rows, moving: list[tuple[fx.Node, State]], context: Context, pure: bool
) -> State:
    """Rows of ``state`` picked by the row numbers ``by``, which count ``divided`` rows of theirs for one of its."""
    numbers = state.outer == by.outer == 1 and by.inner == state.inner * by.divided
    orders = {"position": (None, None), "sorted": (None, by.order), "inverse": (by.order, None)}
    taken, given = orders.get(by.kind, ("", None))
    if not numbers or state.order != taken or state.chosen is not None:
        return Coupled("index picks rows of the batch", node)
    plain = [(i, replace(s, kind="values", divided=1) if isinstance(s, Rows) else s) for i, s in moving]
    located = context.located(node, plain, pure)
    return replace(located, order=given) if isinstance(located, Rows) else located


def _is_mask(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype.itemsize == 1


def _masked(node: fx.Node, state: Rows, mask: fx.Node, context: Context, pure: bool) -> State | None:
    """x[mask]: the rows (or parts of rows) that a boolean mask of each example's own chooses, in the batch's order."""
    by = context.states[mask]
    if isinstance(by, Rows) and (by.layout, by.dim) == (state.layout, state.dim) and state.dim < value_of(mask).ndim:
        return Rows(0, pure=pure, order=f"chosen by {mask.name}", chosen=mask)
    return Coupled("index picks rows of the batch", node)


def _masked_select(node: fx.Node, context: Context, pure: bool) -> State | None:
    source, mask = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(mask, fx.Node)
    state = context.states[source]
    same = value_of(source).ndim == value_of(mask).ndim
    return _masked(node, state, mask, context, pure) if isinstance(state, Rows) and same else None


def _sort(node: fx.Node, context: Context, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, value = context.states[source], value_of(source)
    if isinstance(state, Rows) and value.ndim == 1 and state.order is None and state.kind == "values":
        kind = "sorted" if operator_name(node) == "argsort" else "values"
        return replace(state, kind=kind, order=node.name, pure=pure)
    return None


def _getitem(node: fx.Node, context: Context, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, name = context.states[source], operator_name(source)
    if name == "sort" and isinstance(state, Rows) and state.order is not None:
        return replace(state, kind="sorted" if node.args[1] == 1 else "values")
    if name in ("chunk", "split", "tensor_split") and isinstance(state, Rows):
        return replace(state, pure=pure)
    return None


def _counts(node: fx.Node, context: Context, pure: bool) -> State | None:
    """histc and bincount of sorted rows: the sizes of their groups. Of plain rows: sums over them."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = context.states[source]
    if isinstance(state, Rows) and state.order is not None and state.chosen is None:
        return Layout(state.order, pure)
    bounds = [*node.args, 0, 0][2:4]
    return Additive(pure) if isinstance(state, Rows) and operator_name(node) == "histc" and bounds[0] != bounds[1] else None


def _index_put(node: fx.Node, context: Context, pure: bool) -> State | None:
    """empty[sorted indices] = arange: the inverse of the sort. Otherwise as a write to each row's own places."""
    target, indices, values = node.args[0], node.args[1], node.args[2]
    assert isinstance(indices, list | tuple) and isinstance(values, fx.Node) and isinstance(target, fx.Node)
    state, what = context.states[target], context.states[values]
    if len(indices) == 1 and isinstance(indices[0], fx.Node):
        by = context.states[indices[0]]
        if isinstance(by, Rows) and isinstance(what, Rows) and by.kind == "sorted" and what.kind == "position":
            plain = by.divided == what.divided == 1 and (by.outer, by.inner) == (what.outer, what.inner)
            return replace(by, kind="inverse", pure=pure) if plain else None
    if not isinstance(state, Rows) or state.order is not None or not isinstance(what, Fixed) or value_of(values).ndim:
        return None
    return _written(node, state, indices, context, pure)


def _written(node: fx.Node, state: Rows, indices: Any, context: Context, pure: bool) -> State | None:
    """One value written to places that each row chooses for itself, by its own number or by a mask."""
    by = [context.states[i] if isinstance(i, fx.Node) else None for i in indices]
    if len(indices) == 1 and isinstance(indices[0], fx.Node) and _is_mask(indices[0]):
        masked = _masked(node, state, indices[0], context, pure)
        return replace(state, pure=pure) if isinstance(masked, Rows) else masked
    own = by[state.dim] if state.dim < len(by) else None
    others = [s for dim, s in enumerate(by) if s is not None and dim != state.dim]
    if own is None:
        return replace(state, pure=pure) if all(isinstance(s, Fixed) for s in others) else None
    numbers = isinstance(own, Rows) and own.kind == "position" and own.divided == 1 and own.layout == state.layout
    plain = all(isinstance(s, Fixed) or (isinstance(s, Rows) and s.kind == "values" and s.layout == state.layout) for s in others)
    return replace(state, pure=pure) if numbers and plain else None


# ---- losses and random operators -------------------------------------------------------------------------------


def _class_loss(node: fx.Node, context: Context, pure: bool) -> State | None:
    """Cross-entropy with ``reduction=none``: classes are on dim 1 (or on the only one); weights are fixed."""
    source, target = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(target, fx.Node)
    states = [(source, context.states[source]), (target, context.states[target])]
    state, value = states[0][1], value_of(source)
    others = [a for a in node.all_input_nodes if a not in (source, target)]
    if isinstance(state, Rows) and state.dim != (1 if value.ndim > 1 else 0):
        rows = [(a, s) for a, s in states if isinstance(s, Rows)]
        settled = all(isinstance(s, Rows) for _, s in states) and all(isinstance(context.states[a], Fixed) for a in others)
        if settled:
            return context.located(node, list(rows), pure)
    return Coupled(f"{operator_name(node)} mixes examples", node)


def _random(node: fx.Node, context: Context, pure: bool) -> State | None:
    """Dropout from streams: the keys have the batch on dim 0, the value where the argument says."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return context.located(node, [(source, context.states[source])], pure)


SPECIAL: dict[str, Rule] = {
    "view": _reshape,
    "reshape": _reshape,
    "_unsafe_view": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "cat": _concatenation,
    "stack": _concatenation,
    "repeat": _repeated,
    "tile": _repeated,
    "repeat_interleave": _interleaved,
    "chunk": _parts,
    "split": _parts,
    "tensor_split": _parts,
    "slice": _slice,
    "sum": _reduction,
    "nansum": _reduction,
    "count_nonzero": _reduction,
    "mean": _reduction,
    "matmul": _matmul,
    "mm": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "bmm": _matmul,
    "addmm": _matmul,
    "baddbmm": _matmul,
    "addmv": _matmul,
    "addbmm": _matmul,
    "einsum": _einsum,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
    "embedding": _embedding,
    "index": _index,
    "masked_select": _masked_select,
    "sort": _sort,
    "argsort": _sort,
    "getitem": _getitem,
    "histc": _counts,
    "bincount": _counts,
    "index_put": _index_put,
    "cross_entropy_loss": _class_loss,
    "nll_loss": _class_loss,
    "nll_loss_nd": _class_loss,
    "nll_loss2d": _class_loss,
    "dropout_attention": _random,
}
