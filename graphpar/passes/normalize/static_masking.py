"""``fill_unchosen``: indexing with a boolean mask keeps all rows in place, so that no size depends on values.

    o[mask], a view or function of it   ->  the same of all rows; those not chosen hold a harmless number
    x[mask].sum()                       ->  where(mask, x, 0).sum()
    x[mask].mean()                      ->  where(mask, x, 0).sum() / mask.sum()
    cross_entropy(o[mask], y[mask])     ->  cross_entropy(o, where(mask, y, ignore_index))
    h[mask] = f(h[mask])                ->  h = where(mask, f(h), h)
    h[mask] += f(h[mask])               ->  h = h + where(mask, f(h), 0)

How many rows a mask chooses is known only when the program runs, and a microbatch may have none. Sums over all rows with
weights of 0 and 1 have fixed sizes: they can be priced, sharded over any axis, and added up over microbatches, and their
denominators are sums that :mod:`graphpar.passes.normalize.loss` makes global. Rows not chosen hold a number that is neither 0 nor 1
where they enter a function, and zero where they leave it, so that a row the model never looked at can't make a gradient nan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import is_size, is_unknown, number_arguments, unknown_coefficient, unknown_symbol
from graphpar.ir.program import (
    Program,
    model_outputs,
    module_path,
    named_arguments,
    operator_name,
    set_model_outputs,
    value_of,
    where,
)
from graphpar.operators.batch import Additive, Analysis, Fixed, Rows
from graphpar.operators.batch_rows import choice_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer
from graphpar.passes.normalize.graph_matching import sizes
from graphpar.passes.normalize.joined_rows import HARMLESS, join_chosen
from graphpar.passes.normalize.mask_indexing import keep_tokens, spell_as_mask, spell_by_rows, spell_pairs
from graphpar.passes.normalize.reductions import (
    ARITHMETIC,
    NONE,
    SUM,
    dtype_now,
    elements,
    reduction_place,
    tensor_overload,
    with_reduction,
)
from graphpar.passes.normalize.simplify import full_slice, remove_dead_code
from graphpar.text import plural

_aten = torch.ops.aten


def fill_unchosen(program: Program) -> Program:
    """Rewrite the program such that no tensor's size depends on values.

    Raises:
        GraphparError: a size does, in an operator from whose result the rows not chosen can't be left out.
    """
    if sizes_are_known(program):
        return program
    graph = copied(program.graph)
    set_model_outputs(graph, (None if value is None or _is_unknown(value) else value for value in model_outputs(graph)))
    for node in list(graph.nodes):
        if record_of(node).kind is Kind.CHECK:
            graph.erase_node(node)
    graph = join_chosen(graph)
    spell_pairs(graph)
    remove_dead_code(graph)
    spell_by_rows(graph)
    remove_dead_code(graph)
    keep_tokens(graph)
    for node in list(graph.nodes):
        if record_of(node).kind is Kind.INDEX:
            spell_as_mask(graph, node)
        elif operator_name(node) == "slice":
            full_slice(node)
    remove_dead_code(graph)
    products = [node for node in program.graph.nodes if record_of(node).kind is Kind.PRODUCT and _is_unknown(node)]
    return _warned(program.with_graph(_Filler(program, graph).rewrite()), products)


def _warned(program: Program, products: Sequence[fx.Node]) -> Program:
    """Warn of what fixed sizes cost, where products are of chosen rows, as those of experts in a loop."""
    if not products:
        return program
    return program.warn(
        f"{plural(len(products), 'product')} of rows that a mask selects{where(products[0])} "
        f"{'is' if len(products) == 1 else 'are'} computed for all rows, since all shapes are static. Stacked experts, multiplied "
        "by torch's grouped_mm as in newer Hugging Face models, compute only their own rows."
    )


def sizes_are_known(program: Program) -> bool:
    """Return whether no size depends on values: what the pass ensures."""
    return not any(_is_unknown(node) for node in program.graph.nodes)


def _is_unknown(node: fx.Node) -> bool:
    """Return whether a value's size, or the number itself, is known only when the program runs."""
    value = value_of(node)
    if isinstance(value, torch.SymBool):
        return any(str(symbol).startswith(("u", "zuf")) for symbol in value.node.expr.free_symbols)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return is_unknown(value)
    parts = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, Tensor) and any(is_unknown(size) for size in part.shape) for part in parts)


def _sums(node: fx.Node) -> bool:
    """Return whether an operator sums over a factor of its rule, so that rows of zeros add nothing."""
    row = record_of(node).rule
    rule = row(node) if row is not None else None
    if rule is None:
        return False
    kept = rule.fixed.union(*rule.results)
    return any(factor not in kept and factor != "1" for factors in rule.operands for factor in factors)


# ---- the rewriting ---------------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """Rows chosen by one mask. ``mask`` [rows] is in the new graph; ``count`` is its sum, once it is needed."""

    mask: fx.Node
    count: fx.Node | None = None


class _Filler:
    """Copies a graph; a value whose rows a mask chose has all rows in the copy."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self.old = graph
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.analysis = Analysis({entry.name: entry.batch_dim for entry in program.inputs}, program.parameters)
        self.choices: dict[str, _Choice] = {}  # by the analysis's name for the order of the chosen rows
        self.symbols: dict[str, str] = {}  # that name, by the symbol of the unknown size
        self.numbers: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> fx.Graph:
        """Return the graph with all sizes known."""
        for node in self.old.nodes:
            if node.op == "output":
                fx.map_arg(node.args[0], self._known_output)
                self.graph.output(fx.map_arg(node.args[0], self.env.__getitem__))
                set_model_outputs(self.graph, (value and self.env[value] for value in model_outputs(self.old)))
            elif is_size(node) and _is_unknown(node):
                self.analysis.states[node] = Fixed(pure=False)
            else:
                self._copy(node)
        return self.graph

    def _copy(self, node: fx.Node) -> None:
        touched = _is_unknown(node) or any(_is_unknown(argument) for argument in node.all_input_nodes)
        state = self.analysis.visit(node)
        if not touched:
            self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
            return
        new = self._of_numbers(node) or self._choice(node, state)
        if new is None and _is_unknown(node) and isinstance(state, Rows) and state.chosen is not None:
            new = self._same(node, node.args, dict(node.kwargs))
        elif new is None:
            new = self._reduction(node, state)
            self.analysis.states[node] = Fixed(pure=False)  # this pass does not care what mixes examples
            if new is None:
                new = self._written(node)
                self.analysis.states[node] = self.analysis.states.get(node.args[0], Fixed())  # type: ignore[arg-type]
        if new is None:
            raise _refused(node)
        self.env[node] = new

    def _known_output(self, node: fx.Node) -> fx.Node:
        if _is_unknown(node):
            raise _refused(node)
        return node

    # ---- choosing ----

    def _choice(self, node: fx.Node, state: Any) -> fx.Node | None:
        """Replace ``x[mask]`` by x with the mask's dims merged, and something harmless where the mask is False."""
        if operator_name(node) != "index" or not isinstance(state, Rows) or state.chosen is None:
            return None
        source, mask = node.args[0], state.chosen
        assert isinstance(source, fx.Node) and state.order is not None
        if node.args[1] != [mask]:
            return None
        choice = self.choices.get(state.order)
        if choice is None:
            own = self.env[mask]
            if value_of(own).dtype is not torch.bool:
                own = self._new(node, _aten.to.dtype, own, torch.bool)
            before = self.analysis.states[mask]
            if isinstance(before, Rows) and before.chosen is not None:  # chosen among the chosen
                own = self._new(node, _aten.logical_and.default, own, self._mask_for(before, own, node))
            choice = self.choices[state.order] = _Choice(self._merged(node, own, value_of(own).ndim))
        self.symbols[unknown_symbol(value_of(node).shape[state.dim])] = state.order
        rows = self._merged(node, self.env[source], value_of(mask).ndim)
        value = value_of(rows)
        harmless = HARMLESS if value.is_floating_point() or value.is_complex() else 0
        return self._where(node, self._aligned(node, choice.mask, 0, value.ndim), rows, harmless)

    def _merged(self, like: fx.Node, node: fx.Node, dims: int) -> fx.Node:
        return node if dims == 1 else self._new(like, _aten.flatten.using_ints, node, 0, dims - 1)

    def _mask_for(self, state: Any, new: fx.Node, like: fx.Node) -> fx.Node:
        """Return the mask that chose the rows of a value, in a shape that broadcasts over ``new``, the value with all rows."""
        assert isinstance(state, Rows) and state.order is not None
        mask = self.choices[state.order].mask
        if state.inner > 1:
            mask = self._new(like, _aten.repeat_interleave.self_int, mask, state.inner)
        return self._aligned(like, mask, state.dim, value_of(new).ndim)

    def _aligned(self, like: fx.Node, mask: fx.Node, dim: int, rank: int) -> fx.Node:
        for _ in range(rank - dim - 1):
            mask = self._new(like, _aten.unsqueeze.default, mask, -1)
        return mask

    def _where(self, like: fx.Node, mask: fx.Node, value: fx.Node, other: float) -> fx.Node:
        if value_of(value).dtype is torch.bool:
            return self._new(like, _aten.logical_and.default, value, mask)
        return self._new(like, _aten.where.ScalarOther, mask, value, other)

    def _zeroed(self, old: fx.Node, like: fx.Node) -> fx.Node:
        """Return the new value of ``old``, with zeros in the rows that were not chosen."""
        new = self.env[old]
        return self._where(like, self._mask_for(self.analysis.states[old], new, like), new, 0)

    # ---- sums and means ----

    def _reduction(self, node: fx.Node, state: Any) -> fx.Node | None:
        chosen = [argument for argument in node.all_input_nodes if self._is_chosen(argument)]
        if not chosen or not self._together(chosen):
            return None
        name, place = operator_name(node), reduction_place(node)
        if place is not None:
            return self._loss(node, place)
        if name == "mean":
            return self._mean(node)
        if isinstance(state, Additive) and _sums(node):
            zeroed = {argument: self._zeroed(argument, node) for argument in chosen}
            return self._same(node, node.args, dict(node.kwargs), zeroed)
        return None

    def _mean(self, node: fx.Node) -> fx.Node:
        source, *rest = node.args
        assert isinstance(source, fx.Node)
        total, target = self._wide(self._zeroed(source, node)), _aten.sum.dim_IntList if rest else _aten.sum.default
        total = infer(self.graph.call_function(target, (total, *rest), dict(node.kwargs)), node)
        return self._over_count(node, total, self.analysis.states[source], elements(source) // elements(node))

    def _over_count(self, node: fx.Node, total: fx.Node, state: Any, each: int) -> fx.Node:
        """Return ``total`` divided by the number of chosen rows times their ``each`` elements."""
        assert isinstance(state, Rows) and state.order is not None
        return self._new(node, _aten.div.Tensor, total, self._counted(state.order, each * state.inner, node))

    def _counted(self, order: str, each: int, like: fx.Node) -> fx.Node:
        choice = self.choices[order]
        if choice.count is None:
            choice.count = self._new(choice.mask, _aten.sum.default, choice.mask)
        return choice.count if each == 1 else self._new(like, _aten.mul.Scalar, choice.count, each)

    def _wide(self, source: fx.Node) -> fx.Node:
        """Cast float16 to float32, in which a sum does not overflow where the mean would not."""
        if value_of(source).dtype is not torch.float16:
            return source
        return self._new(source, _aten.to.dtype, source, torch.float32)

    def _loss(self, node: fx.Node, place: int) -> fx.Node | None:
        """Compute a loss of chosen rows for each row, then its sum or mean. Class losses have a label for rows that don't count."""
        old = list(named_arguments(node).values())
        given = list(fx.map_arg(old, self.env.__getitem__))
        with self.old.inserting_before(node):
            of_rows = with_reduction(self.old, node, old, place, NONE)
        state = self.analysis.state_of(of_rows)
        self.old.erase_node(of_rows)
        if not isinstance(state, Rows) or state.chosen is None:
            return None
        target = old[1]
        if record_of(node).kind is Kind.CLASS_LOSS and not value_of(target).is_floating_point():
            mask = self._mask_for(self.analysis.states[target], given[1], node)
            given[1] = self._where(node, mask, given[1], named_arguments(node)["ignore_index"])
            return with_reduction(self.graph, node, given, place, old[place])
        each = with_reduction(self.graph, node, given, place, NONE)
        total = self._wide(self._where(node, self._mask_for(state, each, node), each, 0))
        total = self._new(node, _aten.sum.default, total)
        if old[place] == SUM:
            return total
        rest = [int(size) for dim, size in enumerate(value_of(each).shape) if dim != state.dim]
        return self._over_count(node, total, state, math.prod(rest))

    def _is_chosen(self, node: fx.Node) -> bool:
        state = self.analysis.states[node]
        return isinstance(state, Rows) and state.chosen is not None

    def _together(self, nodes: list[fx.Node]) -> bool:
        """Return whether one mask chose the rows of all ``nodes``."""
        return len({(s.order, s.inner) for n in nodes if isinstance(s := self.analysis.states[n], Rows)}) == 1

    # ---- writing back ----

    def _written(self, node: fx.Node) -> fx.Node | None:
        """Replace ``x[mask] = values`` and ``x[mask] += values`` where the same mask chose the rows of ``values``."""
        if operator_name(node) not in ("index_put", "masked_scatter"):
            return None
        target, by, values, *accumulate = node.args
        mask = by[0] if isinstance(by, list | tuple) and len(by) == 1 else by
        assert isinstance(target, fx.Node) and isinstance(values, fx.Node)
        if not isinstance(mask, fx.Node) or not self._is_chosen(values) or self._is_chosen(target):
            return None
        state = self.analysis.states[values]
        whole = operator_name(node) == "index_put" or sizes(mask) == sizes(target)
        plain = isinstance(state, Rows) and state.order == choice_of(mask) and state.dim == 0 and state.inner == 1
        rank = value_of(target).ndim
        if not whole or not plain or value_of(values).ndim != rank - value_of(mask).ndim + 1:
            return None
        new = self._new(node, _aten.view_as.default, self.env[values], self.env[target])
        where = self._aligned(node, self.env[mask], value_of(mask).ndim - 1, rank)
        if any(accumulate):
            return self._new(node, _aten.add.Tensor, self.env[target], self._where(node, where, new, 0))
        return self._new(node, _aten.where.self, where, new, self.env[target])

    # ---- sizes ----

    def _of_numbers(self, node: fx.Node) -> fx.Node | None:
        """Let an operator that takes a number known only at run time take the tensor that holds it."""
        places = {place: number for place, number in number_arguments(node) if _is_unknown(number)}
        if not places:
            return None
        others = [a for a in node.all_input_nodes if a not in places.values()]
        if _is_unknown(node) and not any(self._is_chosen(a) for a in others):
            return None
        numbers = {number: self._number(number) for number in places.values()}
        if any(number is None for number in numbers.values()):
            raise _refused(node)
        new = self._same(node, node.args, dict(node.kwargs), numbers, infers=False)  # type: ignore[arg-type]
        tensor_overload(new)
        dtype = dtype_now(new)
        if dtype is None:
            raise _refused(node)
        new = infer(new, node)
        return new if dtype == value_of(node).dtype else self._new(node, _aten.to.dtype, new, value_of(node).dtype)

    def _number(self, size: fx.Node) -> fx.Node | None:
        """Return the tensor that holds the number ``size``; None where there is none."""
        if size in self.numbers:
            return self.numbers[size]
        rows = self._multiple_of_rows(size)
        found = None if rows is None else self._counted(*rows, size)
        if found is None and operator_name(size) in ("_local_scalar_dense", "item"):
            found = self.env.get(size.args[0])  # type: ignore[arg-type]
        elif found is None and size.target is torch.sym_float:
            found = self._number(size.args[0])  # type: ignore[arg-type]
        elif found is None and size.target in ARITHMETIC and len(size.args) == 2:
            operands = [self._operand(argument, size) for argument in size.args]
            found = None if None in operands else self._new(size, ARITHMETIC[size.target], *operands)  # type: ignore[index]
        if found is not None:
            self.numbers[size] = found
        return found

    def _operand(self, argument: Any, like: fx.Node) -> fx.Node | None:
        if isinstance(argument, fx.Node) and _is_unknown(argument):
            return self._number(argument)
        given = self.env[argument] if isinstance(argument, fx.Node) else argument
        number = self.graph.call_function(_aten.scalar_tensor.default, (given,), {"dtype": torch.float32})
        mode = next(v.fake_mode for n in self.old.nodes if hasattr(v := value_of(n), "fake_mode"))
        with mode:
            number.meta = {
                "val": torch.empty((), dtype=torch.float32),
                "module_stack": like.meta.get("module_stack", ()),
            }
        return number

    def _multiple_of_rows(self, size: fx.Node) -> tuple[str, int] | None:
        """Return which chosen rows ``size`` is a multiple of, and the factor."""
        value = value_of(size)
        order = self.symbols.get(unknown_symbol(value)) if isinstance(value, torch.SymInt) else None
        factor = unknown_coefficient(value) if order is not None else None
        return None if order is None or factor is None else (order, factor)

    def _size(self, size: Any) -> Any:
        """Return a size among an operator's arguments, for all rows."""
        if not isinstance(size, fx.Node) or not is_size(size) or not _is_unknown(size):
            return size
        found = self._multiple_of_rows(size)
        if found is None:
            raise _refused(size)
        order, factor = found
        mask = self.choices[order].mask
        rows = self.graph.call_function(_aten.sym_size.int, (mask, 0))
        rows.meta = {"val": value_of(mask).shape[0], "module_stack": ()}
        if factor == 1:
            return rows
        many = self.graph.call_function(operator.mul, (rows, factor))
        many.meta = {"val": value_of(mask).shape[0] * factor, "module_stack": ()}
        return many

    # ---- building nodes ----

    def _same(
        self,
        node: fx.Node,
        args: Any,
        kwargs: dict[str, Any],
        instead: dict[fx.Node, fx.Node] | None = None,
        infers: bool = True,
    ) -> fx.Node:
        """Add ``node`` on the new values of its arguments, or those in ``instead``."""
        known = instead or {}

        def new(argument: fx.Node) -> Any:
            if argument in known:
                return known[argument]
            return self.env[argument] if argument in self.env else self._size(argument)

        args, kwargs = fx.map_arg((args, kwargs), new)
        copy = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if not infers:
            copy.meta = dict(node.meta)
            return copy
        return infer(copy, node)

    def _new(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        return infer(self.graph.call_function(target, args), like)


def _refused(node: fx.Node) -> GraphparError:
    """Return the error for an operator that needs an unknown size."""
    makers = _unknown_ancestors(node)
    maker = next((n for n in makers if is_size(n) or not any(_is_unknown(a) for a in n.all_input_nodes)), node)
    made = "" if maker is node else f" made by {operator_name(maker)}{where(maker)}"
    path = module_path(maker)
    advice = (
        "Sums, means and losses of chosen rows, and functions of each row, are supported; write others with weights of 0 and 1 "
        "(torch.where), or choose a fixed number of rows (topk)."
    )
    if operator_name(maker) in ("where", "nonzero", "nonzero_numpy"):
        advice = (
            "In a loop over experts take all rows of an expert, and add to them (rows, slots = torch.where(chosen == e); "
            "y.index_add_(0, rows, weights[rows, slots, None] * expert(x[rows]))), or weigh with 0 and 1 (torch.where)."
        )
    return GraphparError(
        f"{operator_name(node)}{f' in {path!r}' if path else ''}{where(node)} needs a size{made} that depends on values, such as how many "
        f"rows a mask selects; a program has static shapes. {advice}"
    )


def _unknown_ancestors(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and the ancestors through which it gets an unknown size, nearest first."""
    found: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending.pop(0)
        if current not in found:
            found.append(current)
            pending += [argument for argument in current.all_input_nodes if _is_unknown(argument)]
    return found
