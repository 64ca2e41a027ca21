"""How values depend on the batch: are examples independent, and what is a sum over them?

Every value of a program gets a state (:mod:`graphpar.operators.batch_rows`). Splitting the batch into microbatches is one more way to
shard, so what an operator does to it follows from the rules that place operators on a mesh axis, here one with a rank for each example:

    x  Rows(0)  S(0)  ─┐
    w  Fixed    R     ─┴► linear  (S(0), R) -> S(0)  ─► Rows(0)
    x  Rows(0)  S(0)  ──► sum     (S(0),) -> P       ─► Additive

What no rule says is in :mod:`graphpar.operators.batch_rows`: rows' own numbers, sorted and chosen rows. An operator that has no
placement with its operands' types mixes examples.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import (
    batch_coefficients,
    batch_dims_of,
    integer_arguments,
    is_size,
    is_unknown,
    number_arguments,
    result_coefficients,
    size_coefficient,
    size_factor,
    unknown_coefficient,
    unknown_dims,
)
from graphpar.ir.program import is_flag, operator_name, value_of
from graphpar.operators import batch_rows
from graphpar.operators.batch_rows import Additive, Coupled, Fixed, Layout, Rows, State
from graphpar.operators.discover import discover, sums_gradients
from graphpar.operators.placement import Context, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import has_rule, placements
from graphpar.operators.table import record_of
from graphpar.runtime.layout import P, R, Shard, Type

__all__ = ["Additive", "Analysis", "Coupled", "Fixed", "Layout", "Rows", "State"]

_EXAMPLES = 999_983
"""The ranks of the axis: a prime, so that no other size is divided by it."""
SIZE_REWRITES = ("local_shape", "local_sizes", "local_slice", "output_size")
"""Changes that a program of any batch size makes by itself, as its sizes follow the batch."""
_OF_PARTS = {"any", "all", "max", "min", "amax", "amin"}
"""Operators whose answer for all parts of a batch, where they agree on a condition of it, is that for the batch."""
_KEEPS_NUMBERS = {Kind.PERMUTE, Kind.RESHAPE, Kind.EXPAND, Kind.ALIAS, Kind.COPY, Kind.VIEW, Kind.FACTORY, Kind.NUMBER}


class Analysis:
    """Computes the state of each node, in order. ``states`` may be overridden between nodes (the loss pass does).

    Args:
        batch_inputs: the batch dim of each input by name, None where it has none.
        parameters: names of the parameters.
    """

    def __init__(self, batch_inputs: dict[str, int | None], parameters: Iterable[str]) -> None:
        self.batch_inputs = batch_inputs
        self.parameters = set(parameters)
        self.states: dict[fx.Node, State] = {}
        self.results: dict[fx.Node, Sequence[State]] = {}  # of operators with several
        self.couplings: list[Coupled] = []
        self.written: dict[str, bool] = {}  # the buffers that are written: whether each microbatch writes the same
        self._graph = fx.Graph()
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._norms: set[str] | None = None
        self._checks: tuple[fx.Graph, set[fx.Node]] | None = None
        self._known: dict[Any, Sequence[Type] | None] = {}  # what layers that are alike were found to do

    def visit(self, node: fx.Node) -> State:
        """Find the state of ``node``. An operator that mixes examples, but gives a row for each, is noted and passed over."""
        state = self.state_of(node)
        if node in self._checks_of(node.graph):
            self.states[node] = state
            return state
        if isinstance(state, Coupled) and state.node is node:
            self.couplings.append(state)
            self.results.pop(node, None)
            dims, coefficients = batch_dims_of(node), result_coefficients(node)
            if len(dims) == 1 and not unknown_dims(node):
                state = Rows(dims[0], 1, coefficients[dims[0]] or 1, pure=False)
        self.states[node] = state
        return state

    def state_of(self, node: fx.Node) -> State:
        """Return the state that ``visit`` would give, without noting it."""
        return self._checked(node, self._state(node))

    def operands(self, node: fx.Node) -> list[tuple[fx.Node, State]]:
        """Return what ``node`` takes, with its states."""
        return [(argument, self.states[argument]) for argument in node.all_input_nodes]

    def _checked(self, node: fx.Node, state: State) -> State:
        """``state``, unless the result's shape or what the rows hold speaks against it."""
        name = operator_name(node)
        if node.op != "call_function" or is_size(node):
            return state
        if (written := self._written_buffer(node)) is not None:
            state = self._updated(node, written, state)
        if isinstance(state, Coupled):
            return state
        if isinstance(state, Additive) and batch_dims_of(node):
            return Coupled(f"{name} spreads a sum over examples over the examples", node)
        if unknown_dims(node) and not (isinstance(state, Rows) and state.chosen is not None):
            return Coupled(f"{name} gives a size that depends on values of several examples", node)
        numbers = [s for _, s in self.operands(node) if isinstance(s, Rows) and s.kind != "values"]
        if numbers and record_of(node).kind not in _KEEPS_NUMBERS and name not in batch_rows.TAKES_NUMBERS:
            return Coupled(f"{name} computes with the rows' numbers", node)
        return state

    # ---- by kind of node ----

    def _state(self, node: fx.Node) -> State:
        if node.op == "placeholder":
            dim = self.batch_inputs.get(str(node.target))
            return Fixed() if dim is None else Rows(dim % value_of(node).ndim)
        if node.op == "get_attr":
            written = any(self._written_buffer(user) is node for user in node.users)
            return Fixed(pure=str(node.target) not in self.parameters and not written)
        operands = self.operands(node)
        if _gives_dtype_only(node) or operator_name(node) in ("expand_as", "view_as", "reshape_as"):
            pure = operands[0][1].pure  # the second operand's values play no part
        else:
            pure = all(state.pure for _, state in operands)
        coupled = next((state for _, state in operands if isinstance(state, Coupled)), None)
        if coupled is not None:
            return coupled
        if is_size(node):
            return Fixed() if size_factor(node) == 0 else Additive()
        if operator_name(node) == "getitem":
            return self._item(node)
        if (found := batch_rows.windowed(node, self.states, pure)) is not None:
            return found
        moving = any(not isinstance(s, Fixed) and isinstance(value_of(a), Tensor | tuple | list) for a, s in operands)
        numbers = [argument for _, argument in number_arguments(node) if size_factor(argument) != 0]
        integers = [item for _, item in integer_arguments(node) if isinstance(item, fx.Node) and is_size(item)]
        if any(size_factor(item) != 0 for item in integers):
            return Coupled(f"{operator_name(node)} uses the batch size as a number", node)
        if numbers or not moving:
            return self._sized(node, numbers, moving, pure)
        return self._moving(node, pure)

    def _item(self, node: fx.Node) -> State:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if source in self.results:
            return self.results[source][index]
        state, dims = self.states[source], batch_dims_of(node)
        if not isinstance(state, Rows):
            return state
        if len(dims) != 1:
            return Coupled(f"{operator_name(source)} mixes examples", node)
        return Rows(dims[0], 1, result_coefficients(node)[dims[0]] or 1, pure=False)

    def _sized(self, node: fx.Node, numbers: list[fx.Node], moving: bool, pure: bool) -> State:
        """An operator that uses the batch size to make a tensor, or as a number."""
        name, dims, record = operator_name(node), batch_dims_of(node), record_of(node)
        if numbers:
            filled = name in ("scalar_tensor", "full", "new_full", "full_like") and not dims and not moving
            if filled and len(numbers) == 1 and size_factor(numbers[0]) is not None:
                return Additive(pure)
            return Coupled(f"{name} uses the batch size as a number", node)
        if not dims:
            if not pure and not moving and not sums_gradients(node):
                return Coupled(f"{name} has a backward that is not linear in the gradient", node)
            return Fixed(pure)
        coefficient = result_coefficients(node)[dims[0]] or 1
        if name == "arange" and len(dims) == 1:
            start, step = node.args[0] if len(node.args) > 1 else 0, node.args[2] if len(node.args) > 2 else 1
            if start == 0 and step == 1:
                return Rows(0, 1, coefficient, pure, "position")
            if start == 0 and isinstance(step, int) and coefficient == 1:
                return Rows(0, 1, 1, pure, "begins", divided=step)
            return Coupled(f"{name} numbers the rows", node)
        repeats = record.kind is Kind.EXPAND or name == "repeat" or name in FILLED
        if repeats and len(dims) == 1:
            return Rows(dims[0], 1, coefficient, pure)
        return Coupled(f"{name} uses the batch size as a number", node)

    def _moving(self, node: fx.Node, pure: bool) -> State:
        """An operator on values of which one at least follows the batch."""
        name, states = operator_name(node), [self.states[operand] for operand in operands_of(node)]
        if name in FILLED and name != "scalar_tensor":
            return self._made_like(node)
        if not any(isinstance(part, Tensor) for part in _node_values(node)):
            return Fixed(pure)
        if name in batch_rows.SPECIAL:
            found = batch_rows.SPECIAL[name](node, self.states, pure)
            if found is not None:
                return self._kept(node, found)
        if any(isinstance(state, Layout) for state in states):
            return batch_rows.grouped(node, states, pure)
        if _gives_dtype_only(node):
            return replace(states[0], pure=pure)
        return self._kept(node, self._by_rule(node, states, pure))

    def _kept(self, node: fx.Node, found: State | Sequence[State]) -> State:
        if not isinstance(found, Sequence):
            return found
        if isinstance(value_of(node), Tensor):
            return found[0]
        self.results[node] = found
        used = [int(user.args[1]) for user in node.users if operator_name(user) == "getitem"]  # type: ignore[arg-type]
        return found[min(used, default=0)]

    def _made_like(self, node: fx.Node) -> State:
        """``new_zeros`` and ``zeros_like`` take the dtype, and perhaps the shape; values are one number."""
        dims = batch_dims_of(node)
        filled = [a for a in operands_of(node)[1:] if not isinstance(self.states[a], Fixed)]
        if len(dims) > 1 or filled:
            return Coupled(f"{operator_name(node)} mixes examples", node)
        source = node.all_input_nodes[0]
        first = self.states[source]
        if not dims:
            if isinstance(first, Rows) and unknown_dims(node):
                return replace(first, kind="values", pure=True)
            return Fixed()
        if isinstance(first, Rows) and batch_coefficients(node) == batch_coefficients(source):
            return replace(first, kind="values", divided=1, pure=True)
        return Rows(dims[0], 1, result_coefficients(node)[dims[0]] or 1)

    # ---- by rule ----

    def _by_rule(self, node: fx.Node, states: Sequence[State], pure: bool) -> State | list[State]:
        """Split the batch as the operator's placements let it be."""
        name, rows = operator_name(node), [state for state in states if isinstance(state, Rows)]
        additive = any(isinstance(state, Additive) for state in states)
        if any(_rounds(node, o) for o, s in zip(operands_of(node), states) if isinstance(s, Additive)):
            return Coupled(f"{name} is not additive over examples", node)
        types = tuple(map(_type, states))
        found = None
        lists = any(isinstance(value_of(argument), tuple | list) for argument in node.all_input_nodes)
        if len({state.order for state in rows}) <= 1 and not lists:
            found = self._results(node, states, types)
        if found is None:
            if additive:
                return Coupled(f"{name} is not additive over examples", node)
            known = has_rule(node) or discover(node) is not None
            return Coupled(
                f"{name} mixes examples" if known else f"graphpar can't tell whether {name} mixes examples", node
            )
        made = [_result(node, kind, sizes, rows, pure) for kind, sizes in zip(found, self._result_shapes(node))]
        return next((state for state in made if isinstance(state, Coupled)), made)

    def _results(self, node: fx.Node, states: Sequence[State], types: tuple[Type, ...]) -> Sequence[Type] | None:
        """The types of ``node``'s results where its operands have ``types``; None where it has no such placement."""
        operands = operands_of(node)
        literals = fx.map_arg(
            (node.args, node.kwargs), lambda n: _number(n) if is_size(n) else slice(operands.index(n))
        )  # type: ignore[arg-type, return-value]
        shapes = [(self._shape(operand), value_of(operand).dtype) for operand in operands]
        key = (node.target, types, tuple(shapes), str(literals), str(self._result_shapes(node)))
        if key not in self._known:
            self._known[key] = self._placed(node, states, types)
        return self._known[key]

    def _placed(self, node: fx.Node, states: Sequence[State], types: tuple[Type, ...]) -> Sequence[Type] | None:
        copied = self._copy(node, [isinstance(state, Additive) for state in states])
        known = {o: [t] for o, t in zip(operands_of(copied), types) if isinstance(t, Shard)}
        context = Context(
            _EXAMPLES, lambda operand, index: known.get(operand, []), lambda operand: False, SIZE_REWRITES
        )
        found = [p.results for p in placements(copied, context, tried=node) if p.operands == types]
        return next((own for own in found if any(isinstance(kind, Shard) for kind in own)), found[0] if found else None)

    def _copy(self, node: fx.Node, additive: Sequence[bool]) -> fx.Node:
        """``node`` on values of a batch of as many examples as the axis has ranks.

        A count is a sum over examples, though its numbers are whole, so sums are real numbers here.
        """
        for stale in reversed(self._graph.nodes):
            self._graph.erase_node(stale)
        floats = dict(zip(operands_of(node), additive))

        def copied(argument: fx.Node) -> fx.Node:
            new, value = self._graph.placeholder(argument.name), value_of(argument)
            if not isinstance(value, Tensor):
                new.meta["val"] = _number(argument)
                return new
            return self._described(new, self._shape(argument), torch.float64 if floats[argument] else value.dtype)

        known = {argument: copied(argument) for argument in node.all_input_nodes}

        def given(argument: Any) -> Any:
            if isinstance(argument, fx.Node) and is_size(argument):
                return _number(argument)
            return fx.map_arg(argument, known.__getitem__)

        args = tuple(map(given, node.args))
        new = self._graph.call_function(node.target, args, {name: given(a) for name, a in node.kwargs.items()})  # type: ignore[arg-type]
        dtype = torch.float64 if any(additive) else None
        value = value_of(node)
        if isinstance(value, Tensor):
            return self._described(new, self._shape(node), dtype or value.dtype)
        made = [_unused(part) if isinstance(part, Tensor) else part for part in value]
        new.meta["val"] = made
        for user in node.users:
            if operator_name(user) == "getitem":
                item = self._graph.call_function(operator.getitem, (new, user.args[1]))
                self._described(item, self._shape(user), dtype or value_of(user).dtype)
                made[user.args[1]] = item.meta["val"]  # type: ignore[index]
        return new

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        if node not in self._shapes:
            sizes = zip(value_of(node).shape, batch_coefficients(node))
            self._shapes[node] = tuple(_scaled(size, coefficient) for size, coefficient in sizes)
        return self._shapes[node]

    def _result_shapes(self, node: fx.Node) -> list[tuple[int, ...] | None]:
        """The shape of each result; None of those that nobody uses."""
        if isinstance(value_of(node), Tensor):
            return [self._shape(node)]
        found: list[tuple[int, ...] | None] = [None] * len(value_of(node))
        for user in node.users:
            if operator_name(user) == "getitem":
                found[int(user.args[1])] = self._shape(user)  # type: ignore[arg-type]
        return found

    @staticmethod
    def _described(node: fx.Node, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node.meta["val"] = _empty(shape, dtype)
        return node

    # ---- buffers ----

    def _checks_of(self, graph: fx.Graph) -> set[fx.Node]:
        """The operators whose results nothing but flags of branches take: parts of a batch may answer for it."""
        if self._checks is None or self._checks[0] is not graph:
            self._checks = graph, checks_of(graph)
        return self._checks[1]

    def _written_buffer(self, node: fx.Node) -> fx.Node | None:
        """The buffer that ``node`` writes in place, if it does."""
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or not node.target._schema.is_mutable
        ):
            return None
        source = node.args[0] if node.args else None
        while isinstance(source, fx.Node) and source.op == "call_function" and operator_name(source) != "batch_norm":
            source = source.args[0] if source.args else None
        return source if isinstance(source, fx.Node) and source.op == "get_attr" else None

    def _updated(self, node: fx.Node, buffer: fx.Node, state: State) -> State:
        """What is written must be the same for each microbatch: the runtime lets each begin with what the step began with."""
        if is_flag(node):
            asked = self.states[node.args[1]]  # type: ignore[index]
            if isinstance(asked, Coupled) and (asked.node is None or operator_name(asked.node) not in _OF_PARTS):
                self.couplings.append(asked)
            return Fixed()
        name = str(buffer.target)
        if name.rpartition(".")[0] in self._of_batch_norm(node.graph):
            return state  # batch_norm itself says what is wrong with it
        self.written[name] = self.written.get(name, True) and isinstance(state, Fixed)
        if isinstance(state, Fixed) or (isinstance(state, Coupled) and state.node is not node):
            return state
        return Coupled(f"{operator_name(node)} updates the buffer {name.rpartition('.')[2]!r} once a microbatch", node)

    def _of_batch_norm(self, graph: fx.Graph) -> set[str]:
        """The modules whose running statistics batch_norm updates."""
        if self._norms is None:
            norms = [n for n in graph.nodes if operator_name(n) == "batch_norm" and n.args[5]]
            self._norms = {
                str(s.target).rpartition(".")[0] for n in norms for s in n.args[3:5] if isinstance(s, fx.Node)
            }
        return self._norms


def checks_of(graph: fx.Graph) -> set[fx.Node]:
    """Return the operators whose results nothing but flags of branches on values take, and these."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_flag(node) or (node.op == "call_function" and node.users and all(user in found for user in node.users)):
            found.add(node)
    return found


# ---- states and types ------------------------------------------------------------------------------------------


def _type(state: State) -> Type:
    if isinstance(state, Rows):
        return Shard(state.dim, (state.inner * _EXAMPLES,) if state.outer > 1 else ())
    return P if isinstance(state, Additive) else R


def _result(node: fx.Node, kind: Type, sizes: Sequence[int] | None, rows: Sequence[Rows], pure: bool) -> State:
    """The state of one result of type ``kind``; ``sizes`` is None where nobody uses it."""
    if kind is P and not _adds_up(node):
        return Coupled(f"{operator_name(node)} gives a type in which sums are not added up", node)
    if not isinstance(kind, Shard):
        return Additive(pure) if kind is P else Fixed(pure)
    if sizes is None:
        return Rows(kind.dim, pure=pure)
    follows = [dim for dim, size in enumerate(sizes) if size and size % _EXAMPLES == 0]
    if follows != [kind.dim] or len(set(kind.parts)) > 1:
        return Coupled(f"{operator_name(node)} mixes examples", node)
    whole = sizes[kind.dim] // _EXAMPLES
    inner = kind.parts[0] // _EXAMPLES if kind.parts else whole
    first = rows[0]
    if first.order is not None and first.chosen is None and (whole, inner) != (first.outer * first.inner, first.inner):
        return Coupled(f"{operator_name(node)} divides sorted rows, which are no longer those of one example", node)
    number, divided = batch_rows.numbering(node, rows)
    return replace(first, dim=kind.dim, outer=whole // inner, inner=inner, pure=pure, kind=number, divided=divided)


# ---- sizes of a batch of as many examples as the axis has ranks ------------------------------------------------


def _scaled(size: Any, coefficient: int | None) -> int:
    if coefficient is not None:
        return coefficient * _EXAMPLES
    if not is_unknown(size):
        return int(size)
    chosen = unknown_coefficient(size)  # rows that a mask chooses are an axis, too: no operator takes both
    return _EXAMPLES + 1 if chosen is None else chosen * _EXAMPLES


def _number(node: fx.Node) -> Any:
    factor, value = size_factor(node), value_of(node)
    if factor:
        return factor * _EXAMPLES
    if factor == 0 and isinstance(value, torch.SymInt):
        return int(value)
    return value


def _unused(result: Tensor) -> Tensor:
    """A result that nobody uses; in a trace at a fixed batch its sizes say nothing of the batch."""
    return _empty([_scaled(size, size_coefficient(size)) for size in result.shape], result.dtype)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of which only shape and dtype count."""
    return torch.empty((), dtype=dtype, device="meta").expand(shape)


# ---- queries ---------------------------------------------------------------------------------------------------

FILLED = {
    *("zeros", "ones", "full", "empty", "scalar_tensor"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
}
"""Operators that fill a tensor with one number."""


def _node_values(node: fx.Node) -> Sequence[Any]:
    value = value_of(node)
    return value if isinstance(value, tuple | list) else [value]


def _rounds(node: fx.Node, operand: fx.Node) -> bool:
    """Whether ``node`` makes whole numbers of real ones, or truth values of any: what it does to a sum is no sum."""
    results = [part.dtype for part in _node_values(node) if isinstance(part, Tensor)]
    before = value_of(operand).dtype
    whole = not (before.is_floating_point or before.is_complex)
    return torch.bool in results or (not whole and any(not (d.is_floating_point or d.is_complex) for d in results))


def _adds_up(node: fx.Node) -> bool:
    """Whether the results are of types in which parts of a sum add up to it: small integers wrap, truth values are no sums."""
    exact = (torch.int32, torch.int64)
    return all(_is_smooth(part) or part.dtype in exact for part in _node_values(node) if isinstance(part, Tensor))


def _is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _gives_dtype_only(node: fx.Node) -> bool:
    """Whether ``node`` takes nothing but the dtype (and device) of its second operand: ``x.type_as(h)``, ``x.to(h)``."""
    return operator_name(node) in ("type_as", "to") and len(node.args) > 1 and isinstance(node.args[1], fx.Node)
