"""What the structure of a mask proves: that each position sees those before it in its own document, of several that are packed into a row.

    (documents[:, :, None] == documents[:, None, :]) & causal            whatever numbers documents have; also of a window that slides
    (documents[:, :, None] == documents[:, None, :]) & (p[:, None, :] <= p[:, :, None])    documents = (p.diff(prepend=..) != 1).cumsum(-1)

The second is transformers' mask of position ids that start again: inside of a document they count up, so that they are as far apart as the
positions are. How conditions are joined does not matter (:mod:`graphpar.passes.normalize.mask_conditions`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from graphpar.emitted import packed_attention as emitted
from graphpar.ir.program import value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.attention_idioms import without_mask, without_repeats
from graphpar.passes.normalize.causal_masks import Condition, Masks
from graphpar.passes.normalize.graph_matching import insert_call, is_call, number, sizes
from graphpar.passes.normalize.mask_conditions import SHAPES, conditions_of, each_with_each, equals_itself, flat
from graphpar.runtime.option_kinds import GENERATE

_aten = torch.ops.aten


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
    found_documents = _documents_of(mask, length, masks) if keys == length and lead[1:] == [1] else None
    if found_documents is None:
        return False
    documents, window = found_documents
    (batch, heads, *_), (of_keys, groups, *_), (of_values, others, *_) = shapes
    if sizes(documents) not in ([1, length], [batch, length]) or not batch == of_keys == of_values or groups != others:
        return False
    if groups not in (heads, 1) and not literal(node, "enable_gqa"):
        return False
    plain = without_mask(node)
    once = without_repeats(plain) or plain
    grouped = sizes(once.args[1])[1] != heads  # one head of keys is that of all queries, also where nobody says so
    given = {"scale": literal(once, "scale"), "enable_gqa": grouped, "window": window}
    options = {name: value for name, value in given.items() if value not in (None, False)}
    insert_call(once, emitted.packed_attention, (*once.args[:3], _read_anew(documents, masks)), options)
    return True


def _read_anew(documents: fx.Node, masks: Masks) -> fx.Node:
    """Return ``documents``, or a copy where they are a buffer: attention remembers what it found in a tensor, and a buffer is loaded."""
    root = documents
    while record_of(root).kind in (*SHAPES, Kind.COPY):
        root = _first(root)
    if root.op != "get_attr":
        return documents
    if documents not in masks.copies:
        with documents.graph.inserting_after(documents):
            masks.copies[documents] = documents.graph.call_function(_aten.clone.default, (documents,))
        masks.copies[documents].meta = dict(documents.meta)
    return masks.copies[documents]


def _documents_of(mask: fx.Node, length: int, masks: Masks) -> tuple[fx.Node, int | None] | None:
    """Return the numbers of documents [b, s] of which ``mask`` shows each position its own, up to itself, and the window that it has;
    None where it shows others."""
    found = conditions_of(mask, length, masks)
    equal = {each: same for each in found if (same := equals_itself(each, length)) is not None}
    if len(set(equal.values())) != 1:
        return None
    documents = next(iter(equal.values()))
    others = [each for each in found if each not in equal]
    counted = {
        each: far for each in others if (far := _distance(each, length)) and _counts_up(documents, far.positions)
    }
    others = [each for each in others if each not in counted]
    window = masks.window(tuple(others), length) if others else length
    after = [far.most for far in counted.values() if far.most is not None] + [0] * bool(others)
    before = [1 - far.least for far in counted.values() if far.least is not None]
    if window is None or not after or min(after) != 0 or (window := min([window, *before])) < 1:
        return None
    return documents, None if window == length else window


class _Distance(NamedTuple):
    """A mask shows the columns whose ``positions`` [b, s] are at least so much, and at most so much, above that of their row."""

    positions: fx.Node
    least: int | None
    most: int | None


def _distance(condition: Condition, length: int) -> _Distance | None:
    """Return which distances are shown where positions are compared with the same ones; None for another condition."""
    mask, shown, _ = condition
    sides = each_with_each(mask, length) if is_call(mask, "le", "lt", "ge", "gt") else None
    if sides is None:
        return None
    (columns, above), (rows, below) = map(_shifted, sides)
    if columns is not rows or columns.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    less, strict = is_call(mask, "le", "lt") == shown, is_call(mask, "lt", "gt") == shown
    far = below - above
    if less == (sides[0] is mask.args[0]):
        return _Distance(columns, None, far - strict)
    return _Distance(columns, far + strict, None)


def _shifted(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the [b, s] that ``node`` has in order, and what is added to each."""
    node, added = flat(node), 0
    while (
        is_call(node, "add", "sub")
        and isinstance(by := literal(node, "other"), int)
        and literal(node, "alpha", default=1) == 1
    ):
        added += by if is_call(node, "add") else -by
        node = flat(_first(node))
    return node, added


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


def _sums_along(node: fx.Node) -> bool:
    counts = value_of(node).dtype in (torch.int64, torch.int32)  # others start again within a row
    return is_call(node, "cumsum") and literal(node, "dim") in (-1, 1) and counts


def _without_copies(node: fx.Node) -> fx.Node:
    while record_of(node).kind is Kind.COPY and not value_of(node).is_floating_point():
        node = _first(node)
    return node


def _first(node: fx.Node) -> fx.Node:
    """Return the first operand."""
    return node.all_input_nodes[0]
