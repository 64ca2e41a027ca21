"""How values depend on the batch: are examples independent, and what is a sum over them?

Every value of a program gets one state:

    Fixed      the same for every microbatch
    Rows       one slice an example: the batch lies along a dim, of size outer * batch * inner
    Additive   a sum over examples: the value for the global batch is the sum over microbatches
    Coupled    examples are mixed (BatchNorm in training, attention over the batch): cutting the batch would change it

A row operator has one line in ``_ALONG``: the dims that it mixes. Cutting the batch is exact as long as the batch lies
along none of them. Sorting the rows (mixture-of-experts) gives them an ``order``, which must be undone by its inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.program import batch_coefficients, operator_name, value_of


@dataclass(frozen=True)
class Fixed:
    """``pure``: computed from inputs and constants alone, so it has no gradient and no parameter in it."""

    pure: bool = True


@dataclass(frozen=True)
class Rows:
    dim: int
    outer: int = 1
    inner: int = 1
    pure: bool = True
    kind: str = "values"  # values | position (the row's own number) | inverse (of ``order``)
    order: str | None = None  # the sort that the rows are in, None for the order of the batch


@dataclass(frozen=True)
class Additive:
    pure: bool = True


@dataclass(frozen=True)
class Coupled:
    reason: str
    node: fx.Node | None = None
    pure: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the groups of sorted rows begin (expert counts and offsets)."""

    order: str
    pure: bool = True


State = Fixed | Rows | Additive | Coupled | Layout
Dims = Callable[[fx.Node, Any], Iterable[int]]


def _last(count: int) -> Dims:
    return lambda node, value: range(value.ndim - count, value.ndim)


def _argument(position: int, default: Any = None, name: str = "dim") -> Dims:
    def dims(node: fx.Node, value: Any) -> Iterable[int]:
        given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
        if given is None:
            return range(value.ndim)
        items = given if isinstance(given, list | tuple) else [given]
        return [int(item) for item in items] or range(value.ndim)  # type: ignore[arg-type]

    return dims


def _all_but(*kept: int) -> Dims:
    return lambda node, value: [dim for dim in range(value.ndim) if dim not in kept]


def _normalized(node: fx.Node, value: Any) -> Iterable[int]:
    return range(value.ndim - len(node.args[1]), value.ndim)  # type: ignore[arg-type]


def _padded(node: fx.Node, value: Any) -> Iterable[int]:
    return range(value.ndim - len(node.args[1]) // 2, value.ndim)  # type: ignore[arg-type]


def _repeated(node: fx.Node, value: Any) -> Iterable[int]:
    counts = list(node.args[1])  # type: ignore[arg-type]
    return [dim - (len(counts) - value.ndim) for dim, count in enumerate(counts) if count != 1]


def _batch_norm(node: fx.Node, value: Any) -> Iterable[int]:
    training = bool(node.args[5]) or node.args[3] is None
    return [dim for dim in range(value.ndim) if dim != 1] if training else []


# The dims of the first argument that an operator mixes. The batch may lie along any other.
_ALONG: dict[str, Dims] = {
    "linear": _last(1),
    "layer_norm": _normalized,
    "rms_norm": _normalized,
    "group_norm": _all_but(0),
    "instance_norm": _all_but(0, 1),
    "batch_norm": _batch_norm,
    "softmax": _argument(1),
    "log_softmax": _argument(1),
    "_softmax": _argument(1),
    "_log_softmax": _argument(1),
    "logsumexp": _argument(1),
    "cumsum": _argument(1),
    "cumprod": _argument(1),
    "flip": _argument(1),
    "roll": _argument(2),
    "topk": _argument(2, -1),
    "sort": _argument(1, -1),
    "argsort": _argument(1, -1),
    "argmax": _argument(1),
    "argmin": _argument(1),
    "amax": _argument(1),
    "amin": _argument(1),
    "max": _argument(1),
    "min": _argument(1),
    "any": _argument(1),
    "all": _argument(1),
    "prod": _argument(1),
    "var": _argument(1),
    "std": _argument(1),
    "var_mean": _argument(1),
    "norm": _argument(2),
    "linalg_vector_norm": _argument(2),
    "glu": _argument(1, -1),
    "tril": _last(2),
    "triu": _last(2),
    "pad": _padded,
    "constant_pad_nd": _padded,
    "repeat": _repeated,
    "tile": _repeated,
    "repeat_interleave": _argument(2),
    "slice": _argument(1, 0),
    "select": _argument(1, 0),
    "narrow": _argument(1, 0),
    "split": _argument(2, 0),
    "split_with_sizes": _argument(2, 0),
    "chunk": _argument(2, 0),
    "unbind": _argument(1, 0),
    "unfold": _argument(1, 0),
    "gather": _argument(1, 0),
    "scatter": _argument(1, 0),
    "scatter_add": _argument(1, 0),
    "take_along_dim": _argument(2),
    "select_scatter": _argument(2, 0),
    "slice_scatter": _argument(2, 0),
    "diagonal": lambda node, value: (0, 1) if len(node.args) < 4 else (node.args[2], node.args[3]),  # type: ignore[return-value]
    "conv1d": _all_but(0),
    "conv2d": _all_but(0),
    "conv3d": _all_but(0),
    "convolution": _all_but(0),
    "conv_transpose2d": _all_but(0),
    "max_pool2d": _last(2),
    "avg_pool2d": _last(2),
    "max_pool1d": _last(1),
    "avg_pool1d": _last(1),
    "adaptive_avg_pool1d": _last(1),
    "adaptive_avg_pool2d": _last(2),
    "adaptive_max_pool2d": _last(2),
    "upsample_nearest2d": _last(2),
    "upsample_bilinear2d": _last(2),
    "upsample_bicubic2d": _last(2),
    "pixel_shuffle": _last(3),
    "scaled_dot_product_attention": _last(2),
    "cosine_similarity": _argument(2, 1),
    "diff": _argument(2, -1),
}  # fmt: skip

# Operators that only move dims: the batch is wherever the result's shape shows it.
_MOVES = {
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "t", "movedim", "swapaxes", "detach", "alias",
    "contiguous", "clone", "to", "type_as", "_to_copy", "dropout", "feature_dropout", "channel_dropout", "one_hot",
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip

# Pointwise operators that torch does not tag so.
_POINTWISE = {"__and__", "__or__", "__xor__", "__invert__", "where", "masked_fill", "rsub", "broadcast_tensors", "dropout", "floor_divide",
              "stream"}  # fmt: skip

# Sums over examples stay sums under these, as long as everything else is fixed.
_LINEAR = {
    "neg", "mul", "div", "to", "view", "reshape", "squeeze", "unsqueeze", "sum", "select", "slice", "clone", "detach", "permute",
    "transpose", "expand", "contiguous", "alias", "stack", "cat", "getitem", "mean",
}  # fmt: skip
_SUMS = {"add", "sub"}
_FACTORIES = {"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
              "new_full", "new_empty", "scalar_tensor"}  # fmt: skip


class Analysis:
    """Computes the state of each node, in order. ``states`` may be overridden between nodes (the loss pass does)."""

    def __init__(self, batch_inputs: dict[str, int | None], parameters: Iterable[str]) -> None:
        self.batch_inputs = batch_inputs
        self.parameters = set(parameters)
        self.states: dict[fx.Node, State] = {}
        self.couplings: list[Coupled] = []

    def visit(self, node: fx.Node) -> State:
        """The state of ``node``. An operator that mixes examples, but gives a row for each, is noted and passed over."""
        state = self._state(node)
        if isinstance(state, Coupled) and state.node is node:
            self.couplings.append(state)
            coefficients = _result_coefficients(node)
            dims = [dim for dim, coefficient in enumerate(coefficients) if coefficient is not None]
            if len(dims) == 1:
                state = Rows(dims[0], 1, coefficients[dims[0]] or 1, pure=False)
        self.states[node] = state
        return state

    def operands(self, node: fx.Node) -> list[tuple[fx.Node, State]]:
        return [(argument, self.states[argument]) for argument in node.all_input_nodes]

    def _state(self, node: fx.Node) -> State:
        if node.op == "placeholder":
            dim = self.batch_inputs.get(str(node.target))
            return Fixed() if dim is None else Rows(dim)
        if node.op == "get_attr":
            return Fixed(pure=str(node.target) not in self.parameters)
        operands = self.operands(node)
        pure = all(state.pure for _, state in operands)
        coupled = next((state for _, state in operands if isinstance(state, Coupled)), None)
        if coupled is not None:
            return coupled
        if _is_size(node):
            return self._size_state(node, pure)
        moving = [(argument, state) for argument, state in operands if not isinstance(state, Fixed)]
        if not moving:
            return Fixed(pure)
        return self._moving(node, moving, pure)

    def _size_state(self, node: fx.Node, pure: bool) -> State:
        value = value_of(node)
        return Additive() if isinstance(value, torch.SymInt) else Fixed()

    def _moving(self, node: fx.Node, moving: list[tuple[fx.Node, State]], pure: bool) -> State:
        name = operator_name(node)
        tensors = [(a, s) for a, s in moving if isinstance(value_of(a), Tensor | list | tuple)]
        if not tensors:  # only batch sizes: the operator makes or reshapes a tensor by them
            return self._sized(node, name, pure)
        special = _SPECIAL.get(name)
        if special is not None:
            found = special(node, self, pure)
            if found is not None:
                return found
        states = [state for _, state in tensors]
        if any(isinstance(state, Layout) for state in states):
            return self._layout(node, name, states, pure)
        if any(isinstance(state, Additive) for state in states):
            return self._additive(node, name, tensors, pure)
        return self._rows(node, name, tensors, pure)

    def _sized(self, node: fx.Node, name: str, pure: bool) -> State:
        dims = [dim for dim, c in enumerate(batch_coefficients(node)) if c is not None]
        if name == "arange" and dims:
            return Rows(0, 1, batch_coefficients(node)[0] or 1, pure, kind="position")
        if not dims:
            return Fixed(pure) if name in _FACTORIES | {"view", "reshape", "expand"} else Additive(pure)
        if name in _FACTORIES | {"expand", "view", "reshape", "repeat"} and len(dims) == 1:
            return Rows(dims[0], 1, batch_coefficients(node)[dims[0]] or 1, pure)
        return Coupled(f"{name} uses the batch size as a number", node)

    def _layout(self, node: fx.Node, name: str, states: list[State], pure: bool) -> State:
        orders = {state.order for state in states if isinstance(state, Layout | Rows)}
        if len(orders) == 1 and None not in orders:
            (order,) = orders
            assert order is not None
            rows = [state for state in states if isinstance(state, Rows)]
            if not rows:
                return Layout(order, pure)
            if "grouped_mm" in name and rows[0].dim == 0:
                return replace(rows[0], pure=pure)
        return Coupled(f"{name} mixes rows of different groups", node)

    def _additive(self, node: fx.Node, name: str, tensors: list[tuple[fx.Node, State]], pure: bool) -> State:
        states = [state for _, state in tensors]
        if all(isinstance(state, Additive) for state in states):
            if name in _LINEAR and len(states) == 1 and not (name == "div" and node.args[0] is not tensors[0][0]):
                return Additive(pure)
            if name in _SUMS | {"stack", "cat"} and len(states) == len(node.all_input_nodes) and len(states) > 1:
                return Additive(pure)
        return Coupled(f"{name} is not additive over examples", node)

    def _rows(self, node: fx.Node, name: str, tensors: list[tuple[fx.Node, State]], pure: bool) -> State:
        if name == "getitem":
            return self._located(node, tensors, pure)
        if name in _ALONG:
            first = node.args[0]
            if isinstance(first, list | tuple):
                return Coupled(f"{name} of a list", node)
            for argument, state in tensors:
                value = value_of(argument)
                mixed = {dim % value.ndim for dim in _ALONG[name](node, value)} if argument is first and value.ndim else set()
                if name == "scaled_dot_product_attention" and argument is not first:
                    mixed = {value.ndim - 2, value.ndim - 1}
                if isinstance(state, Rows) and state.dim in mixed:
                    if name == "sum":
                        return Additive(pure)
                    return Coupled(f"{name} mixes examples", node)
            return self._located(node, tensors, pure)
        if name in _MOVES or _is_pointwise(node):
            return self._located(node, tensors, pure)
        return Coupled(f"graphpar can't tell whether {name} mixes examples", node)

    def _located(self, node: fx.Node, tensors: list[tuple[fx.Node, State]], pure: bool) -> State:
        """The batch's dim in the result, read off its shape; all operands must agree."""
        coefficients = _result_coefficients(node)
        dims = [dim for dim, coefficient in enumerate(coefficients) if coefficient is not None]
        rows = [state for _, state in tensors if isinstance(state, Rows)]
        layouts = {(state.outer, state.inner, state.order) for state in rows}
        name = operator_name(node)
        if len(dims) != 1 or len(layouts) != 1:
            return Coupled(f"{name} mixes examples", node)
        if (rows[0].outer * rows[0].inner) != coefficients[dims[0]] and name != "getitem":
            return Coupled(f"{name} mixes examples", node)
        kinds = {state.kind for state in rows}
        kind = kinds.pop() if len(kinds) == 1 else "values"
        if (kinds or kind != "values") and name not in _MOVES | {"slice", "view", "reshape", "floor_divide"}:
            return Coupled(f"{name} computes with the rows' numbers", node)
        return Rows(dims[0], rows[0].outer, rows[0].inner, pure, kind, rows[0].order)


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(value_of(node), int | torch.SymInt | float | torch.SymFloat)


def _is_pointwise(node: fx.Node) -> bool:
    if operator_name(node) in _POINTWISE:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _result_coefficients(node: fx.Node) -> tuple[int | None, ...]:
    """As :func:`batch_coefficients`; of the first tensor of an operator with several results."""
    value = value_of(node)
    if isinstance(value, list | tuple):
        for user in node.users:
            if operator_name(user) == "getitem":
                return batch_coefficients(user)
        return ()
    return batch_coefficients(node)


# ---- operators with a rule of their own ------------------------------------------------------------------------


def _reshape(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    """view and its kin: find where the factor ``batch`` went, by counting what lies before and after it."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = analysis.states[source]
    if not isinstance(state, Rows):
        return None
    before, after = value_of(source).shape, batch_coefficients(node)
    dims = [dim for dim, coefficient in enumerate(after) if coefficient is not None]
    outside = 1
    for size in before[: state.dim]:
        outside *= int(size)
    outside *= state.outer
    for dim in dims:
        ahead = 1
        for size in value_of(node).shape[:dim]:
            if isinstance(size, int):
                ahead *= size
        coefficient = after[dim] or 1
        if len(dims) == 1 and outside % ahead == 0 and coefficient % max(1, outside // ahead) == 0:
            outer = outside // ahead
            return replace(state, dim=dim, outer=outer, inner=coefficient // outer, pure=pure)
    return Coupled(f"{operator_name(node)} folds the batch into other dims", node)


def _reduction(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, value = analysis.states[source], value_of(source)
    if isinstance(state, Additive):
        return Additive(pure)
    if not isinstance(state, Rows):
        return None
    dims = {dim % value.ndim for dim in _argument(1)(node, value)} if value.ndim else set()
    if state.dim not in dims:
        return analysis._located(node, [(source, state)], pure)
    if operator_name(node) == "sum" and state.order is None:
        return Additive(pure)
    return Coupled(f"{operator_name(node)} mixes examples", node)


def _matmul(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    """matmul, mm, bmm, addmm, baddbmm: the batch may not be contracted, unless it is in both (a sum over examples)."""
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    if operator_name(node) in ("addmm", "baddbmm"):
        operands = operands[1:]
    left, right = operands[0], operands[1]
    states = [analysis.states[left], analysis.states[right]]
    if any(not isinstance(state, Rows | Fixed) for state in states):
        return None
    contracted = []
    for operand, state, back in ((left, states[0], 1), (right, states[1], 2)):
        ndim = value_of(operand).ndim
        contracted.append(isinstance(state, Rows) and state.dim == ndim - min(back, ndim))
    if all(contracted):
        return Additive(pure)
    if any(contracted):
        return Coupled(f"{operator_name(node)} contracts the batch", node)
    tensors = [(a, s) for a, s in zip(operands, states) if isinstance(s, Rows)]
    return analysis._located(node, tensors, pure)


def _embedding(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    weight, indices = node.args[0], node.args[1]
    if isinstance(weight, fx.Node) and isinstance(analysis.states[weight], Fixed) and isinstance(indices, fx.Node):
        return analysis._located(node, [(indices, analysis.states[indices])], pure)
    return None


def _index(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    """x[i, j]: rows chosen by their own numbers stay rows; by a sort's indices they take its order, or lose it again."""
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    state = analysis.states[source]
    if isinstance(state, Rows):
        chooser = indices[state.dim] if state.dim < len(indices) else None
        others = [i for dim, i in enumerate(indices) if isinstance(i, fx.Node) and dim != state.dim]
        if chooser is None:
            if any(not isinstance(analysis.states[i], Fixed) for i in others):
                return None
            return analysis._located(node, [(source, state)], pure)
        assert isinstance(chooser, fx.Node)
        by = analysis.states[chooser]
        if not isinstance(by, Rows):
            return Coupled("index picks rows of the batch", node)
        if by.kind == "position" and by.order is None and state.order is None:
            return _first_rows(node, analysis, pure)
        if by.kind == "sorted" and state.order is None:
            located = analysis._located(node, [(chooser, replace(by, kind="values"))], pure)
            return replace(located, order=by.order) if isinstance(located, Rows) else located
        if by.kind == "inverse" and state.order == by.order:
            located = analysis._located(node, [(chooser, replace(by, kind="values", order=None))], pure)
            return replace(located, order=None) if isinstance(located, Rows) else located
        return Coupled("index picks rows of the batch", node)
    moving = [(i, analysis.states[i]) for i in indices if isinstance(i, fx.Node)]
    rows = [(i, s) for i, s in moving if isinstance(s, Rows)]
    return analysis._located(node, rows, pure) if isinstance(state, Fixed) and rows else None


def _first_rows(node: fx.Node, analysis: Analysis, pure: bool) -> State:
    dims = [dim for dim, coefficient in enumerate(batch_coefficients(node)) if coefficient is not None]
    return Rows(dims[0], 1, batch_coefficients(node)[dims[0]] or 1, pure) if len(dims) == 1 else Coupled("index", node)


def _sort(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state, value = analysis.states[source], value_of(source)
    if isinstance(state, Rows) and value.ndim == 1 and state.order is None and state.kind == "values":
        kind = "sorted" if operator_name(node) == "argsort" else "values"
        return replace(state, kind=kind, order=node.name, pure=pure)
    return None


def _getitem(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = analysis.states[source]
    if operator_name(source) == "sort" and isinstance(state, Rows) and state.order is not None:
        return replace(state, kind="sorted" if node.args[1] == 1 else "values")
    return None


def _counts(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    """histc and bincount of sorted rows: the sizes of their groups."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = analysis.states[source]
    if isinstance(state, Rows) and state.order is not None:
        return Layout(state.order, pure)
    return Additive(pure) if isinstance(state, Rows) else None


def _index_put(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    """empty[sorted indices] = arange: the inverse of the sort."""
    indices, values = node.args[1], node.args[2]
    if isinstance(indices, list | tuple) and len(indices) == 1 and isinstance(values, fx.Node):
        assert isinstance(indices[0], fx.Node)
        by, what = analysis.states[indices[0]], analysis.states[values]
        if isinstance(by, Rows) and isinstance(what, Rows) and by.kind == "sorted" and what.kind == "position":
            return replace(by, kind="inverse", pure=pure)
    return None


def _concatenation(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    name, parts = operator_name(node), node.args[0]
    assert isinstance(parts, list | tuple)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    tensors = [(p, analysis.states[p]) for p in parts if isinstance(p, fx.Node)]
    rows = [(p, s) for p, s in tensors if isinstance(s, Rows)]
    if not rows or any(isinstance(s, Additive | Layout) for _, s in tensors):
        return None
    ndim = value_of(rows[0][0]).ndim + (name == "stack")
    if name == "cat" and any(s.dim == int(dim) % ndim for _, s in rows):  # type: ignore[call-overload]
        return Coupled("cat joins along the batch", node)
    return analysis._located(node, rows, pure)


def _random_op(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return analysis._located(node, [(source, analysis.states[source])], pure)


def _einsum(node: fx.Node, analysis: Analysis, pure: bool) -> State | None:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = set()
    rows = []
    for labels, operand in zip(inputs.split(","), operands):
        state = analysis.states[operand]  # type: ignore[index]
        if isinstance(state, Rows):
            if "." in labels:
                return None
            letters.add(labels[state.dim])
            rows.append((operand, state))
    if len(letters) == 1 and letters <= set(output):
        return analysis._located(node, rows, pure)  # type: ignore[arg-type]
    if len(letters) == 1:
        return Additive(pure)
    return Coupled("einsum mixes examples", node)


_SPECIAL: dict[str, Callable[[fx.Node, Analysis, bool], State | None]] = {
    "view": _reshape,
    "reshape": _reshape,
    "_unsafe_view": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "sum": _reduction,
    "mean": _reduction,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _matmul,
    "baddbmm": _matmul,
    "embedding": _embedding,
    "index": _index,
    "index_select": lambda node, analysis, pure: None,
    "sort": _sort,
    "argsort": _sort,
    "getitem": _getitem,
    "histc": _counts,
    "bincount": _counts,
    "index_put": _index_put,
    "cat": _concatenation,
    "stack": _concatenation,
    "einsum": _einsum,
    "dropout_attention": _random_op,
}
