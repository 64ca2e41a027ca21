"""``windows``: from a model of whole sequences to a program of a window of positions, for generation.

    attention that is causal         cached_attention(q, k, v, length)     sees the keys and values that a cache keeps
    attention in a sliding window    cached_attention(.., sliding_window=w)    of the last w positions
    attention with capped scores     cached_attention(.., softcap=c)
    arange(tokens)                   window(arange(length), 0, tokens)     the window's own positions
    cumsum of ones                   an arange, where the values say so
    table[:tokens]                   window(table, 0, tokens)

The program was traced with the positions of its tokens in the place of the batch (:mod:`graphpar.frontend.signature`), so what tells
whether the batch can be split (:mod:`graphpar.operators.batch`) tells as well whether positions depend on each other. Where any do but in
attention, the program can't be computed a window at a time, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.emitted import kv_cache
from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_coefficients, batch_dims_of, is_size, size_factor
from graphpar.ir.program import NOT_SYMBOLIC, Program, ancestors, operator_name, value_of, where
from graphpar.operators.batch import Analysis, Coupled, Fixed, Rows
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.attention_idioms import mask_window, without_mask, without_repeats, written_attention
from graphpar.passes.normalize.buffer_uses import written_buffers_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.graph_matching import insert_call, insert_helper, is_call
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.runtime.option_kinds import GENERATE


def use_windows(program: Program) -> Program:
    """Rewrite a program for generation; others stay as they are.

    Raises:
        GraphparError: positions depend on each other in more than causal attention.
    """
    if program.mode != GENERATE:
        return program
    if not program.symbolic:
        why = next((line for line in program.warnings if line.startswith(NOT_SYMBOLIC)), "").removeprefix(NOT_SYMBOLIC)
        raise GraphparError(
            f"{program.name} can't generate: its forward must take sequences of any length, but it could be traced for those of "
            f"{program.batch} tokens only{f' ({why}' if why else '.'}"
        )
    if program.random_calls:
        raise GraphparError(
            f"{program.name} can't generate: it draws dropout, or other random numbers, in evaluation; leave dropout to module.training."
        )
    graph = copied(program.graph)
    place = [output.name for output in program.outputs].index(_logits(program))
    results: Any = graph.output_node().args[0]
    graph.output_node().args = ((results[place],),)
    remove_dead_code(graph)
    _leave_buffers(graph, program)
    _check_sizes(graph, program)
    masks = Masks(program.with_graph(graph))
    for node in list(graph.nodes):
        capped = written_attention(node, masks) if is_call(node, "matmul", "bmm") else None
        if capped is not None and capped.cap is not None:
            cached = _cached(capped.call(node), program, masks)
            if cached is None:
                raise GraphparError(
                    f"{program.name} can't generate: attention{where(node)} has a cap, and not over positions."
                )
            cached.kwargs = {**cached.kwargs, "softcap": capped.cap}
        elif _is_attention(node):
            _cached(node, program, masks)
    remove_dead_code(graph)  # masks
    count_positions(graph, program, _analysis(graph, program).couplings)
    states = _analysis(graph, program).states
    for node in list(graph.nodes):
        _windowed(node, program, states)
    _only_last(graph)
    remove_dead_code(graph)
    logits = next(output for output in program.outputs if output.name == _logits(program))
    made = program.with_graph(graph, outputs=(logits,))
    _check(made)
    return made


def _leave_buffers(graph: fx.Graph, program: Program) -> None:
    """Drop what writes buffers, such as counts of calls: how often a stage computes follows from how sequences are grouped.

    Raises:
        GraphparError: what is written is read.
    """
    written = written_buffers_of(program.with_graph(graph))
    read = ancestors(graph.output_node())
    for uses in written.uses:
        if uses.name in program.branches:  # notes of other branches, which are looked at
            continue
        if any(name == uses.name and node in read for node, name in written.memory.items()):
            assert uses.last_write is not None
            raise GraphparError(
                f"{program.name} can't generate: in evaluation its forward writes the buffer {uses.name!r}{where(uses.last_write)} and "
                "computes with it, so tokens would depend on how many forwards came before; write it in training alone (if self.training)."
            )
        for node in reversed(uses.nodes):
            if not node.users:
                graph.erase_node(node)
    remove_dead_code(graph)


def is_windowed(program: Program) -> bool:
    """Whether a program for generation has no attention without a cache."""
    return program.mode != GENERATE or not any(
        _is_attention(node) and any(map(_follows, node.all_input_nodes[:3])) for node in program.graph.nodes
    )


def _logits(program: Program) -> str:
    """Return the name of the output that has a number for each token that may come next."""
    names = [output.name for output in program.outputs]
    if "logits" in names:
        return "logits"
    results: Any = program.graph.output_node().args[0]
    tokens = value_of(next(node for node in program.graph.nodes if node.op == "placeholder"))
    for name, node in zip(names, results):
        value = value_of(node)
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == tokens.ndim + 1:
            return name
    raise GraphparError(
        f"{program.name} can't generate: it returns {', '.join(names)}, of which none is logits [batch, positions, vocabulary]."
    )


def _only_last(graph: fx.Graph) -> None:
    """Let the product that makes the logits take the last position alone, where no other is asked for."""
    results: Any = graph.output_node().args[0]
    node = results[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        if record_of(node).kind is Kind.PRODUCT:
            taken = [each for each in node.all_input_nodes if value_of(each).ndim > 2 and _follows(each)]
            if len(taken) == 1 and len(taken[0].users) == 1:
                dim = value_of(taken[0]).ndim - 2
                with graph.inserting_before(node):
                    made = graph.call_function(kv_cache.last, (taken[0], dim))
                made.meta = dict(taken[0].meta)
                node.replace_input_with(taken[0], made)
            return
        above = [
            each for each in node.all_input_nodes if isinstance(value_of(each), Tensor) and value_of(each).ndim > 2
        ]
        if record_of(node).kind not in (Kind.POINTWISE, Kind.COPY, Kind.ALIAS) or len(above) != 1:
            return
        node = above[0]


# ---- attention -------------------------------------------------------------------------------------------------


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and operator_name(node) in _ATTENTION


_ATTENTION = ("scaled_dot_product_attention", "dropout_attention")


def _cached(node: fx.Node, program: Program, masks: Masks) -> fx.Node | None:
    """Give causal attention over the positions a cache, and return it; attention over other dims stays."""
    query, key, value = node.args[:3]
    if not all(isinstance(each, fx.Node) for each in (query, key, value)):
        return None
    follows = [_follows(each) for each in (query, key, value)]  # type: ignore[arg-type]
    if not any(follows):
        return None
    slides = mask_window(node, masks) if operator_name(node) == "scaled_dot_product_attention" else None
    if slides is not None:
        node = without_mask(node)
        node = without_repeats(node) or node
        query, key, value = node.args[:3]
    if isinstance(literal(node, "attn_mask"), fx.Node) or not literal(node, "is_causal", 5, False):
        raise GraphparError(
            f"{program.name} can't generate: attention{where(node)} is not provably causal, so a new token would change the keys and "
            "values of those before it. A mask is causal where the values that it is made of say so (those of a buffer that is saved with "
            "the weights may change: give it persistent=False, or call attention with is_causal=True), and so is a window that slides; "
            "chunks, padding and ALiBi are not."
        )
    if not all(follows) or literal(node, "dropout_p", 4, 0.0):
        raise GraphparError(
            f"{program.name} can't generate: attention{where(node)} has dropout, or keys of another sequence."
        )
    given: dict[str, Any] = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
    if slides is not None and slides < program.batch:
        given["sliding_window"] = slides
    return insert_call(node, kv_cache.cached_attention, (query, key, value, program.batch), given)


def _follows(node: fx.Node) -> bool:
    """Whether the rows of a query, key or value are the positions."""
    return value_of(node).ndim >= 3 and _factor(node, -2) == 1


def _factor(node: fx.Node, dim: int) -> int | None:
    """Return how many elements of ``dim`` each position has; None where it doesn't follow them."""
    return batch_coefficients(node)[dim]


# ---- positions -------------------------------------------------------------------------------------------------


def check_rows(program: Program) -> None:
    """Check that the rows of a batch, traced as such, are independent: prompts must not see each other.

    Raises:
        GraphparError: they are not.
    """
    reason = program.unsplittable or next((str(coupling) for coupling in program.couplings), None)
    if reason is not None:
        raise GraphparError(
            f"{program.name} can't generate for several sequences at a time, since they would see each other: {reason}. Give an example of "
            "one row."
        )


def _analysis(graph: fx.Graph, program: Program) -> Analysis:
    analysis = Analysis({entry.name: entry.batch_dim for entry in program.inputs}, program.parameters)
    for node in graph.nodes:
        if node.op != "output":
            analysis.visit(node)
    return analysis


def _windowed(node: fx.Node, program: Program, states: dict[fx.Node, Any]) -> None:
    """Take the window of what holds something for each position from the first on."""
    if node.op != "call_function" or not isinstance(value_of(node), Tensor):
        return
    sizes = [each for each in node.all_input_nodes if is_size(each) and size_factor(each) == 1]
    if len(sizes) != 1:
        return
    name, size = operator_name(node), sizes[0]
    if name == "arange" and states.get(node) == Rows(0, kind="position") and not _numbers_rows(node, states):
        with node.graph.inserting_before(node):
            whole = node.graph.node_copy(node, lambda each: each)
        whole.args = tuple(program.batch if each is size else each for each in node.args)
        whole.kwargs = {key: program.batch if each is size else each for key, each in node.kwargs.items()}
        whole.meta["val"] = value_of(node).new_empty(program.batch)
        whole.meta.pop("batch_coefficients", None)
        insert_call(node, kv_cache.window, (whole, 0, size), {})
    elif name == "slice" and isinstance(states.get(node.args[0]), Fixed):  # type: ignore[arg-type]
        source, dim = node.args[0], int(literal(node, "dim", 1, 0))
        assert isinstance(source, fx.Node)
        dim %= value_of(source).ndim
        plain = (
            literal(node, "end", 3) is size and not literal(node, "start", 2, 0) and literal(node, "step", 4, 1) == 1
        )
        if plain and _factor(node, dim) == 1 and value_of(source).shape[dim] >= program.batch:
            insert_call(node, kv_cache.window, (source, dim, size), {})


def _numbers_rows(node: fx.Node, states: dict[fx.Node, Any]) -> bool:
    """Whether an arange numbers the rows of this very window, as the inverse of a sort does, and not positions of a sequence."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            name = operator_name(user)
            if name == "index_put" or (
                name == "index" and user.args[0] is not current and not isinstance(states.get(user.args[0]), Fixed)  # type: ignore[arg-type]
            ):
                return True
            if user.op == "call_function" and record_of(user).kind in _SAME_NUMBERS and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


_SAME_NUMBERS = (Kind.RESHAPE, Kind.EXPAND, Kind.ALIAS, Kind.COPY, Kind.VIEW)


def _check_sizes(graph: fx.Graph, program: Program) -> None:
    """Check that tensors have a multiple of the window's positions, or a number that does not follow them.

    Raises:
        GraphparError: one has one more than it, or depends on it in another way.
    """
    for node in graph.nodes:
        try:
            batch_coefficients(node)
        except GraphparError:
            shape = re.sub(r"\bs\d+\b", "n", ", ".join(map(str, value_of(node).shape)))
            raise GraphparError(
                f"{program.name} can't generate a token at a time: {operator_name(node)}{where(node)} makes a tensor [{shape}], where a "
                "window has n positions: it pads, prepends or cuts along the sequence."
            ) from None


def _check(program: Program) -> None:
    """Check that positions are independent but for attention.

    Raises:
        GraphparError: an operator mixes them, or the logits are not one row a position.
    """
    analysis = _analysis(program.graph, program)
    if analysis.couplings:  # masks are not at fault, but what they are for
        found = next((each for each in analysis.couplings if _follows_tokens(each.node)), analysis.couplings[0])
        place = where(found.node) if found.node is not None else ""
        reason = found.reason.replace("the batch size", "the sequence's length").replace("examples", "positions")
        raise GraphparError(
            f"{program.name} can't generate a token at a time: {reason.replace('the batch', 'the sequence')}{place}. "
            "Only causal attention may look at other positions."
        )
    results: Any = program.graph.output_node().args[0]
    state, value = analysis.states[results[0]], value_of(results[0])
    rows = isinstance(state, Rows) and (state.dim, state.outer, state.order, state.kind) == (1, 1, None, "values")
    if not rows or value.ndim != 3 or value.shape[0] != program.inputs[0].shape[0]:
        raise GraphparError(
            f"{program.name} can't generate: its output {program.outputs[0].name} is not logits [batch, positions, vocabulary]."
        )


def _follows_tokens(node: fx.Node | None) -> bool:
    """Whether the values of ``node`` depend on those of the tokens."""
    pending, seen = [node] if node is not None else [], {node}
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current.op != "call_function" or record_of(current).kind not in (Kind.FACTORY, Kind.NUMBER):
            pending += [each for each in current.all_input_nodes if each not in seen]
            seen.update(current.all_input_nodes)
    return False


# ---- positions that a model counts ------------------------------------------------------------------------------
#
# ones [b, s] -> cumsum -> * mask - 1        arange(1, length + 1) -> window -> expand -> * mask - 1
#
# Nothing is known by name: a tensor whose values follow from constants and sizes alone, and are ``start``, ``start + 1``, .. along the
# positions in all lengths that are tried, is that. Such a tensor can be computed for a window of positions; a sum over those before can't.


_aten = torch.ops.aten


def count_positions(graph: fx.Graph, program: Program, couplings: Iterable[Coupled]) -> None:
    """Replace what counts positions, in place.

    Args:
        couplings: the operators that mix positions.
    """
    masks = Masks(program.with_graph(graph))
    for node in [coupled.node for coupled in couplings if coupled.node is not None]:
        if (start := _start(node, masks)) is not None:
            _replace(node, start, program)


def _start(node: fx.Node, masks: Masks) -> int | None:
    """Return the number of the first position, where ``node`` numbers them."""
    dims = batch_dims_of(node) if isinstance(value_of(node), Tensor) else []
    if len(dims) != 1 or batch_coefficients(node)[dims[0]] != 1 or value_of(node).is_complex():
        return None
    start: int | None = None
    for length, value in masks.values(node):
        if not isinstance(value, Tensor) or value.numel() == 0 or value.shape[dims[0]] != length:
            return None
        first = float(value.flatten()[0])
        if not first.is_integer() or start not in (None, int(first)):
            return None
        start = int(first)
        numbers = torch.arange(start, start + length, dtype=torch.float64)
        if not bool((value.movedim(dims[0], -1).double() == numbers).all()):
            return None
    return start


def _replace(node: fx.Node, start: int, program: Program) -> None:
    """Let a window of an arange take the place of ``node``."""
    value, (dim,) = value_of(node), batch_dims_of(node)
    length, size = program.batch, _size(node, program)
    numbers = insert_helper(node, _aten.arange.start, (start, start + length), value.new_empty(length))
    numbers.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    made = insert_helper(node, kv_cache.window, (numbers, 0, size), value.new_empty(value.shape[dim]))
    for _ in range(dim + 1, value.ndim):
        made = insert_helper(node, _aten.unsqueeze.default, (made, -1), value_of(made).unsqueeze(-1))
    if value.ndim > 1:
        others = [-1 if place == dim else size for place, size in enumerate(value.shape)]
        made = insert_helper(node, _aten.expand.default, (made, others), value_of(made).expand(others))
    node.replace_all_uses_with(made)


def _size(node: fx.Node, program: Program) -> fx.Node:
    """Return the number of positions of the window, as a node before ``node``."""
    before = takewhile(lambda each: each is not node, node.graph.nodes)
    sizes: list[fx.Node] = [each for each in before if is_size(each) and size_factor(each) == 1]
    if sizes:
        return sizes[0]
    tokens = next(each for each in node.graph.nodes if each.op == "placeholder")
    dim = program.inputs[0].batch_dim
    assert dim is not None
    return insert_helper(node, _aten.sym_size.int, (tokens, dim), value_of(tokens).shape[dim])
