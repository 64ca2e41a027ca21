"""``assign_streams``: every dropout draws from a separate stream, keyed by the example.

    dropout(x, p)  ->  dropout(x, p, stream(sample_keys, n), batch_dim)

``sample_keys`` [batch] becomes a root input that is split into microbatches like any other, so the masks are those of the
whole batch on one device, however the program is split. Other random operators are refused: their numbers would change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.frontend.fixed_size import TWIN, Twin
from graphpar.ir.program import Input, Program, operator_name, value_of
from graphpar.operators.batch import Analysis, Rows
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer, random_refused

_aten = torch.ops.aten
KEYS = "sample_keys"
WRITTEN_OUT = (
    "Attention dropout is computed explicitly (no fused kernel), so that its masks don't depend on the split. "
    "Set the attention dropout to 0, or give --dropout kernel, to keep the fused attention."
)


def assign_streams(program: Program) -> Program:
    """Make random operators functions of ``sample_keys``.

    Raises:
        GraphparError: an operator other than dropout is random, or dropout is on a tensor without a batch dim.
    """
    random = [node for node in program.graph.nodes if is_random(node)]
    if not random:
        return program
    graph = copied(program.graph)
    keys = _keys_input(program, graph)
    analysis = Analysis({entry.name: entry.batch_dim for entry in program.inputs} | {KEYS: 0}, program.parameters)
    layouts: list[tuple[int, int, int]] = []
    for node in list(graph.nodes):
        if node.op == "output":
            continue
        analysis.visit(node)
        if is_random(node):
            layouts.append(_replace(graph, node, keys, len(layouts), analysis))
    inputs = (*program.inputs, Input(KEYS, (program.batch,), torch.int64, 0, "sample_keys"))
    result = program.with_graph(graph, inputs=inputs, stream_layouts=tuple(layouts))
    if any(operator_name(node) == "scaled_dot_product_attention" for node in random):
        result = result.warn(WRITTEN_OUT)
    return result


def is_random(node: fx.Node) -> bool:
    """Return whether an operator draws from torch's own generator.

    Raises:
        GraphparError: it does, and is no dropout.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = operator_name(node)
    if name in ("dropout", "feature_dropout"):
        return bool(node.args[2]) and bool(0.0 < node.args[1] < 1.0)  # type: ignore[operator]  # p = 1 drops everything
    if name == "scaled_dot_product_attention":
        return _attention_dropout(node) > 0.0
    if name.startswith("empty") or _draws_nothing(node):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        raise random_refused(node)
    return False


def _draws_nothing(node: fx.Node) -> bool:
    """Return whether a recurrent layer, (..., num_layers, dropout, train, ...), uses no dropout between its layers."""
    if record_of(node).kind is not Kind.RECURRENT:
        return False
    dropout, train = node.args[5], node.args[6]
    return not dropout or not train or bool(node.args[4] == 1)


def _attention_dropout(node: fx.Node) -> float:
    probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return float(probability)  # type: ignore[arg-type]


def _keys_input(program: Program, graph: fx.Graph) -> fx.Node:
    """Add an int64 [batch] placeholder after the others, with a fake value."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        keys = graph.placeholder(KEYS)
    example, entry = next(
        (node, entry) for node, entry in zip(placeholders, program.inputs) if entry.batch_dim is not None
    )
    value = value_of(example)
    with value.fake_mode:
        keys.meta["val"] = torch.empty(value.shape[entry.batch_dim], dtype=torch.int64)
    if not program.symbolic:
        keys.meta["batch_coefficients"] = (1,)
        twin = example.meta.get(TWIN)
        if twin is not None:
            with twin.value.fake_mode:
                moved = torch.empty(twin.value.shape[entry.batch_dim], dtype=torch.int64)
            keys.meta[TWIN] = Twin(moved, twin.size, twin.other_size)
    keys.meta["module_stack"] = ()
    return keys


def _replace(graph: fx.Graph, node: fx.Node, keys: fx.Node, number: int, analysis: Analysis) -> tuple[int, int, int]:
    """Let ``node`` draw from the stream ``number``, and return where its operand has the batch."""
    name = operator_name(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = analysis.states[source]
    if not isinstance(state, Rows):
        raise GraphparError(
            f"Dropout on a tensor without a batch dim ({node.name}); its masks could not follow the examples."
        )
    if name == "feature_dropout" and state.dim > 1:
        raise GraphparError(
            f"Channel dropout ({node.name}) has the batch on dim {state.dim} of its operand, so it drops channels of all examples at once; "
            "its first dim must be the batch."
        )
    with graph.inserting_before(node):
        own = _of_rows(graph, infer(graph.call_function(random_streams.stream, (keys, number)), node), state, analysis)
        if name == "scaled_dot_product_attention":
            arguments, options = _attention_arguments(node, own)
            if state.dim > value_of(source).ndim - 3:
                raise GraphparError(
                    f"Attention with dropout ({node.name}) has the batch on dim {state.dim} of its query, which are the positions. If "
                    "another dim of the inputs is the batch, give batch_dims."
                )
            place = {"batch_dim": state.dim} if state.dim else {}
            new = graph.call_function(random_streams.dropout_attention, arguments, {**options, **place})
        else:
            target = random_streams.dropout if name == "dropout" else random_streams.channel_dropout
            new = graph.call_function(target, (source, node.args[1], own, state.dim, True))
    new.meta = dict(node.meta)
    analysis.states[new] = analysis.states[node]
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return state.dim, state.outer, state.inner


def _of_rows(graph: fx.Graph, keys: fx.Node, state: Rows, analysis: Analysis) -> fx.Node:
    """Return a key for each row of ``state``, of ``keys`` for each example: several rows of one have different ones."""

    def made(target: Any, *args: Any) -> fx.Node:
        node = infer(graph.call_function(target, args), keys)
        analysis.visit(node)
        return node

    analysis.visit(keys)
    for count, at, others, step in ((state.inner, -1, 0, 1), (state.outer, 0, -1, state.inner)):
        if count > 1:
            places = made(_aten.cumsum.default, made(_aten.new_ones.default, keys, [count]), 0)
            steps = made(_aten.mul.Scalar, places, step * random_streams.BETWEEN_ROWS)
            wide = made(
                _aten.add.Tensor, made(_aten.unsqueeze.default, keys, at), made(_aten.unsqueeze.default, steps, others)
            )
            keys = made(_aten.flatten.using_ints, wide)
            keys.meta["name"] = "row_keys"
    return keys


def _attention_arguments(node: fx.Node, keys: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    given: dict[str, Any] = dict(zip(names, node.args)) | dict(node.kwargs)
    query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
    ranks = {value_of(operand).ndim for operand in (query, key, value)}
    if len(ranks) > 1 or min(ranks) < 3:
        raise GraphparError(
            f"Attention with dropout ({node.name}) needs query, key and value of as many dims, [..., heads, sequence, features]."
        )
    options = {name: item for name, item in given.items() if item is not None and item is not False}
    return (query, key, value, keys), {**options, "training": True}
