"""Causal attention inside of documents that are packed into rows: no mask of a row's length times itself is made.

    documents   0 0 0 1 1 2 2 2        a number for each position, which never falls
    first       0 0 0 3 3 5 5 5        where its document starts: position i attends to positions first[i] to last[i], which is i

On CPUs each document is a call of torch's attention, on GPUs all are one call of its flash kernel in 16 bits. Where neither can be (queries
that are a part of the sequence, compiled blocks) the mask is made.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_spans = WeakTensorKeyDictionary()
"""The lengths of the documents of each row, by ``first``: layers share it."""


def document_starts(documents: Tensor) -> Tensor:
    """Where the document of each position starts; numbers of ``documents`` never fall. [b, s] -> [b, s]"""
    return torch.searchsorted(documents.contiguous(), documents.contiguous())


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of each query to the keys from its ``first`` to its ``last``.

    query [b, h, q, e], key [b, g, k, e], value [b, g, k, f], first and last [b or 1, q] -> [b, h, q, f]
    """
    if query.size(2) == key.size(2) and type(first) is Tensor and not torch.compiler.is_compiling():
        if query.device.type == "cpu":
            return _by_document(query, key, value, _lengths(first, query.size(0)), scale, enable_gqa)
        if query.device.type == "cuda" and query.itemsize == 2 and query.size(3) == value.size(3) <= 256:
            return _by_flash(query, key, value, _lengths(first, query.size(0)), scale)
    keys = torch.arange(key.size(2), device=key.device)
    shown = (keys >= first.unsqueeze(2)) & (keys <= last.unsqueeze(2))
    return F.scaled_dot_product_attention(query, key, value, shown.unsqueeze(1), scale=scale, enable_gqa=enable_gqa)


def _lengths(first: Tensor, rows: int) -> list[list[int]]:
    """Return the lengths of the documents of each row. Waits for the device, once for all layers."""
    if first not in _spans:
        begins = (first == torch.arange(first.size(1), device=first.device)).tolist()
        ends = [[i for i, begin in enumerate(row) if begin] + [first.size(1)] for row in begins]
        _spans[first] = [[end - begin for begin, end in itertools.pairwise(row)] for row in ends]
    found: list[list[int]] = _spans[first]
    return found * rows if len(found) == 1 else found


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[list[int]], scale: float | None, enable_gqa: bool
) -> Tensor:
    results = []
    for row in zip(query.unbind(0), key.unbind(0), value.unbind(0), lengths):
        documents = zip(*(x.split(row[3], 1) for x in row[:3]))
        each = [
            F.scaled_dot_product_attention(
                q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
            for q, k, v in documents
        ]
        results.append(torch.cat(each, 2))
    return torch.cat(results)


def _by_flash(query: Tensor, key: Tensor, value: Tensor, lengths: list[list[int]], scale: float | None) -> Tensor:
    ends = torch.tensor([0] + [length for row in lengths for length in row]).cumsum(0)
    ends = ends.to(torch.int32).to(query.device, non_blocking=True)
    longest = max(max(row) for row in lengths)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    result: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, ends, ends, longest, longest, 0.0, True, False, scale=scale
    )[0]
    result = result.unflatten(0, (query.size(0), -1))
    return result.transpose(1, 2)
