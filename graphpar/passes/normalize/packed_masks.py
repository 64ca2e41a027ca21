"""What the structure of a mask proves: that each position sees those before it in its own document, of several that are packed into a row.

    (documents[:, :, None] == documents[:, None, :]) & causal            documents = (...).cumsum(-1), which never falls
    (documents[:, :, None] == documents[:, None, :]) & (p[:, None, :] <= p[:, :, None])    documents = (p.diff(prepend=..) != 1).cumsum(-1)

The second is transformers' mask of position ids that start again: inside of a document they count up, so that their order is that of the
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpar.emitted import packed_attention as emitted
from graphpar.frontend.fixed_size import TWIN
from graphpar.ir.program import value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.attention_idioms import filled, hides, without_mask, without_repeats
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import insert_call, is_call, number, sizes
from graphpar.runtime.option_kinds import GENERATE

_aten = torch.ops.aten
_SHAPES = (Kind.RESHAPE, Kind.EXPAND, Kind.ALIAS)


def packed_attention(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """A mask of documents is no operand: attention is told where the document of each position starts."""
    mask = literal(node, "attn_mask")
    if (
        not isinstance(mask, fx.Node)
        or masks.program.mode == GENERATE
        or literal(node, "dropout_p")
        or literal(node, "is_causal")
    ):
        return False
    *lead, length, keys = sizes(mask)
    shapes = [sizes(operand) for operand in node.args[:3]]
    if any(len(shape) != 4 for shape in shapes) or not isinstance(length, int) or any(s[2] != length for s in shapes):
        return False
    documents = _documents_of(mask, length, masks) if keys == length and lead[1:] == [1] else None
    if documents is None or sizes(documents) not in ([1, length], [shapes[0][0], length]):
        return False
    first, last = _spans(documents, length, masks)
    plain = without_mask(node)
    once = without_repeats(plain) or plain
    given = {name: literal(once, name) for name in ("scale", "enable_gqa")}
    options = {name: value for name, value in given.items() if value not in (None, False)}
    insert_call(once, emitted.packed_attention, (*once.args[:3], first, last), options)
    return True


def _documents_of(mask: fx.Node, length: int, masks: Masks) -> fx.Node | None:
    """Return the numbers of documents [b, s] of which ``mask`` shows each position its own, up to itself; None where it shows others."""
    parts = list(_conjuncts(mask, length))
    same = [numbers for part in parts if (numbers := _compared(part, "eq", length)) and numbers[0] is numbers[1]]
    others = [part for part in parts if not ((found := _compared(part, "eq", length)) and found[0] is found[1])]
    if len(same) != 1 or len(others) != 1:
        return None
    documents = same[0][0]
    ordered = _compared(others[0], "le", length)
    counted = ordered is not None and ordered[0] is ordered[1] and _counts_up(documents, ordered[0])
    if counted or (_never_falls(documents) and masks.is_causal(others[0], length)):
        return documents
    return None


def _conjuncts(mask: fx.Node, length: int) -> Iterator[fx.Node]:
    """Yield the masks of booleans that all must show a column for ``mask`` to show it."""
    while record_of(mask).kind in _SHAPES and sizes(mask)[-2:] == sizes(_first(mask))[-2:] == [length, length]:
        mask = _first(mask)
    if is_call(mask, "where") and len(mask.args) == 3 and filled(mask.args[1]) == 0 and hides(mask.args[2]):
        yield from _conjuncts(_first(mask), length)
    elif is_call(mask, "bitwise_and", "logical_and", "__and__") and value_of(mask).dtype == torch.bool:
        for part in mask.all_input_nodes:
            yield from _conjuncts(part, length)
    else:
        yield mask


def _compared(mask: fx.Node, name: str, length: int) -> tuple[fx.Node, fx.Node] | None:
    """Return what is compared of columns and of rows by ``columns name rows``; None for another mask."""
    turned = {"eq": "eq", "le": "ge"}[name]
    if not is_call(mask, name, turned) or len(mask.all_input_nodes) != 2:
        return None
    first, second = mask.all_input_nodes
    if sizes(first)[-2:] == [length, 1]:
        first, second, name, turned = second, first, turned, name
    fits = sizes(first)[-2:] == [1, length] and sizes(second)[-2:] == [length, 1] and is_call(mask, name)
    return (_flat(first), _flat(second)) if fits else None


def _flat(node: fx.Node) -> fx.Node:
    """Return the [b, s] of which ``node`` has the elements in order."""
    while record_of(node).kind in _SHAPES and value_of(node).ndim > 2:
        node = _first(node)
    return node


def _counts_up(documents: fx.Node, positions: fx.Node) -> bool:
    """Whether documents begin wherever ``positions`` do not count up by one."""
    if value_of(positions).ndim != 2 or value_of(positions).is_floating_point() or not _sums_along(documents):
        return False
    begins = _without_copies(_first(documents))
    if not is_call(begins, "ne") or number(begins.args[1]) != 1 or not is_call(_first(begins), "diff"):
        return False
    steps = _first(begins)
    along = literal(steps, "dim") in (-1, 1) and literal(steps, "n") == 1
    prepended = isinstance(literal(steps, "prepend"), fx.Node) and literal(steps, "append") is None
    return along and prepended and _first(steps) is positions and sizes(steps) == sizes(positions)


def _never_falls(documents: fx.Node) -> bool:
    """Whether numbers count what is true of the positions up to each, or before it."""
    if is_call(documents, "pad", "constant_pad_nd"):
        widths: Any = documents.args[1]
        zero = number(literal(documents, "value")) in (None, 0.0)
        shifted = _first(documents)
        return zero and list(widths) == [1, 0] and is_call(shifted, "slice") and _never_falls(_first(shifted))
    return value_of(documents).ndim == 2 and _sums_along(documents) and _is_true_or_false(_first(documents))


def _is_true_or_false(node: fx.Node) -> bool:
    return bool(value_of(_without_copies(node)).dtype == torch.bool)


def _sums_along(node: fx.Node) -> bool:
    return is_call(node, "cumsum") and literal(node, "dim") in (-1, 1) and not value_of(node).is_floating_point()


def _without_copies(node: fx.Node) -> fx.Node:
    while record_of(node).kind is Kind.COPY and not value_of(node).is_floating_point():
        node = _first(node)
    return node


def _first(node: fx.Node) -> fx.Node:
    """Return the first operand."""
    return node.all_input_nodes[0]


def _spans(documents: fx.Node, length: int, masks: Masks) -> tuple[fx.Node, fx.Node]:
    """Return the nodes of the first and of the last position that each one sees, made once for all layers."""
    if documents not in masks.spans:
        graph = documents.graph
        place = {key: documents.meta.get(key) for key in ("module_stack", "source")}
        numbers = value_of(documents).new_empty(length, dtype=torch.int64)
        with graph.inserting_after(documents):
            first = graph.call_function(emitted.document_starts, (documents,))
        with graph.inserting_before(first):
            order = graph.call_function(_aten.arange.default, (length,))
            last = graph.call_function(_aten.unsqueeze.default, (order, 0))
        kept = {key: item for key, item in documents.meta.items() if key in ("batch_coefficients", TWIN)}
        first.meta = {**place, **kept, "val": value_of(documents).to(torch.int64)}
        order.meta, last.meta = {**place, "val": numbers}, {**place, "val": numbers.unsqueeze(0)}
        masks.spans[documents] = first, last
    return masks.spans[documents]
