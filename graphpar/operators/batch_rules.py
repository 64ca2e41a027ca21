"""What operators do to the batch that reshape it, contract it, sort it or pick from it: a function each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, operator_name, value_of
from graphpar.operators.batch_states import (
    Additive,
    Context,
    Coupled,
    Fixed,
    Layout,
    Rows,
    State,
    choice_of,
    result_coefficients,
    size_factor,
    unknown_coefficient,
    unknown_dims,
)
from graphpar.operators.batch_tables import ALONG, dims_of_argument

Rule = Callable[[fx.Node, Context, bool], State | None]


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
    """Chosen rows may get, lose or take in inner dims, but nothing may come before them that was not before."""
    source, dims = node.args[0], unknown_dims(node)
    assert isinstance(source, fx.Node)
    before, after = value_of(source).shape, value_of(node).shape
    if len(dims) == 1 and math.prod(before[: state.dim]) == math.prod(after[: dims[0]]):
        inner = unknown_coefficient(after[dims[0]])
        if inner is not None:
            return replace(state, dim=dims[0], inner=inner, pure=pure)
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
    if (
        not isinstance(state, Rows)
        or not isinstance(dim, int)
        or not isinstance(count, int)
        or state.chosen is not None
    ):
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
    dims = {dim % value.ndim for dim in dims_of_argument(1)(node, value)} if value.ndim else set()
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
    if len(node.args) > 3 and node.args[3]:
        return Coupled("embedding scales gradients by how often an index comes in the batch", node)
    if isinstance(weight, fx.Node) and isinstance(context.states[weight], Fixed) and isinstance(indices, fx.Node):
        state = context.states[indices]
        return context.located(node, [(indices, state)], pure) if isinstance(state, Rows) else None
    return None


def _embedding_bag(node: fx.Node, context: Context, pure: bool) -> State | None:
    """Bags of one size, each the run of indices of its example. Other offsets count over the indices of all examples."""
    given = dict(zip([argument.name for argument in node.target._schema.arguments], node.args)) | dict(node.kwargs)  # type: ignore[union-attr]
    weight, indices, offsets, each = (
        given.get(name) for name in ("weight", "indices", "offsets", "per_sample_weights")
    )
    if given.get("scale_grad_by_freq"):
        return Coupled(f"{operator_name(node)} scales gradients by how often an index comes in the batch", node)
    states = [context.states[a] if isinstance(a, fx.Node) else Fixed() for a in (weight, indices, offsets, each)]
    _, rows, begins, own = states
    bags = isinstance(begins, Rows) and isinstance(rows, Rows) and (rows.outer, rows.order) == (1, None)
    plain = bags and (begins.kind == "begins" or (begins.kind == "position" and begins.inner == 1))  # type: ignore[union-attr]
    if not plain or begins.divided != rows.inner or not isinstance(states[0], Fixed):  # type: ignore[union-attr]
        return Coupled(f"{operator_name(node)} takes offsets that count over the indices of all examples", node)
    if isinstance(each, fx.Node) and not (isinstance(own, Rows) and (own.layout, own.kind) == (rows.layout, "values")):  # type: ignore[union-attr]
        return Coupled(f"{operator_name(node)} mixes examples", node)
    return Rows(0, pure=pure)


def _index(node: fx.Node, context: Context, pure: bool) -> State | None:
    """x[i, j]: rows chosen by their own numbers stay rows; by a sort's indices they take its order, or lose it again."""
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    state = context.states[source]
    moving = [
        (i, context.states[i]) for i in indices if isinstance(i, fx.Node) and not isinstance(context.states[i], Fixed)
    ]
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
        return Rows(0, pure=pure, order=choice_of(mask), chosen=mask)
    return Coupled("index picks rows of the batch", node)


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
    return (
        Additive(pure)
        if isinstance(state, Rows) and operator_name(node) == "histc" and bounds[0] != bounds[1]
        else None
    )


def _by_index(node: fx.Node, context: Context, pure: bool) -> State | None:
    """index_add, index_copy, index_fill: the same places of every row, along another dim."""
    target, dim, index, *source = node.args
    assert isinstance(target, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    state, ndim = context.states[target], value_of(target).ndim
    given = [context.states[a] for a in source if isinstance(a, fx.Node)]
    fixed = isinstance(context.states[index], Fixed) and dim % ndim != (state.dim if isinstance(state, Rows) else -1)
    if not isinstance(state, Rows) or not fixed:
        return Coupled(f"{operator_name(node)} picks rows of the batch", node)
    alike = all(isinstance(s, Rows) and (s.dim, s.layout) == (state.dim, state.layout) for s in given)
    if alike or (operator_name(node) == "index_fill" and all(isinstance(s, Fixed) for s in given)):
        return replace(state, pure=pure)
    return Coupled(f"{operator_name(node)} mixes examples", node)


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
    if not isinstance(state, Rows) or state.order is not None or not _fits(node, state, what, context):
        return None
    return _written(node, state, indices, context, pure)


def _fits(node: fx.Node, state: Rows, what: State, context: Context) -> bool:
    """Whether the written values are the same for all rows, or have the batch where the written places have it."""
    target, indices, values = node.args[0], node.args[1], node.args[2]
    assert isinstance(target, fx.Node) and isinstance(indices, list | tuple) and isinstance(values, fx.Node)
    if isinstance(what, Fixed):
        return True
    given = [dim for dim, index in enumerate(indices) if isinstance(index, fx.Node)]
    together = given == list(range(given[0], given[0] + len(given)))
    masks = any(_is_mask(indices[dim]) for dim in given)  # type: ignore[arg-type]
    if not isinstance(what, Rows) or what.layout != state.layout or what.kind != "values" or masks or not together:
        return False
    widest = max(value_of(indices[dim]).ndim for dim in given)  # type: ignore[arg-type]
    places = value_of(target).ndim - len(given) + widest
    own = indices[state.dim] if state.dim < len(indices) else None
    if isinstance(own, fx.Node):
        by = context.states[own]
        dim = given[0] + by.dim + widest - value_of(own).ndim if isinstance(by, Rows) else -1
    else:
        dim = state.dim if state.dim < given[0] else state.dim - len(given) + widest
    return bool(value_of(values).ndim - what.dim == places - dim)


def _written(node: fx.Node, state: Rows, indices: Any, context: Context, pure: bool) -> State | None:
    """Values written to places that each row chooses for itself, by its own number or by a mask."""
    by = [context.states[i] if isinstance(i, fx.Node) else None for i in indices]
    if len(indices) == 1 and isinstance(indices[0], fx.Node) and _is_mask(indices[0]):
        masked = _masked(node, state, indices[0], context, pure)
        return replace(state, pure=pure) if isinstance(masked, Rows) else masked
    own = by[state.dim] if state.dim < len(by) else None
    others = [s for dim, s in enumerate(by) if s is not None and dim != state.dim]
    if own is None:
        return replace(state, pure=pure) if all(isinstance(s, Fixed) for s in others) else None
    numbers = isinstance(own, Rows) and own.kind == "position" and own.divided == 1 and own.layout == state.layout
    plain = all(
        isinstance(s, Fixed) or (isinstance(s, Rows) and s.kind == "values" and s.layout == state.layout)
        for s in others
    )
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
        settled = all(isinstance(s, Rows) for _, s in states) and all(
            isinstance(context.states[a], Fixed) for a in others
        )
        if settled:
            return context.located(node, list(rows), pure)
    return Coupled(f"{operator_name(node)} mixes examples", node)


def _random(node: fx.Node, context: Context, pure: bool) -> State | None:
    """Dropout from streams: the keys have the batch on dim 0, the value where the argument says."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return context.located(node, [(source, context.states[source])], pure)


SPECIAL: dict[str, Rule] = {
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"], _reshape),
    **dict.fromkeys(["cat", "stack"], _concatenation),
    **dict.fromkeys(["repeat", "tile"], _repeated),
    "repeat_interleave": _interleaved,
    **dict.fromkeys(["chunk", "split", "tensor_split"], _parts),
    "slice": _slice,
    **dict.fromkeys(["sum", "nansum", "count_nonzero", "mean"], _reduction),
    **dict.fromkeys(["matmul", "mm", "mv", "dot", "bmm", "addmm", "baddbmm", "addmv", "addbmm"], _matmul),
    "einsum": _einsum,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], _recurrent),
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "index": _index,
    **dict.fromkeys(["sort", "argsort"], _sort),
    "getitem": _getitem,
    **dict.fromkeys(["histc", "bincount"], _counts),
    "index_put": _index_put,
    **dict.fromkeys(["index_add", "index_copy", "index_fill"], _by_index),
    **dict.fromkeys(["cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"], _class_loss),
    "dropout_attention": _random,
}
