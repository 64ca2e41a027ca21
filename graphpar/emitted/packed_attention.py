"""Causal attention inside of documents that are packed into rows: no mask of a row's length times itself is made.

    documents   0 0 0 1 1 2 2 2        a number for each position, which never falls
    first       0 0 0 3 3 5 5 5        where its document starts: position i attends to positions first[i] to last[i], which is i

Documents of about one length are a batch of their own: a call of torch's causal attention for each power of two, at whose end shorter ones
are filled up with what no query sees. Where queries are a part of the sequence, and in compiled blocks, the mask is made.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_batches = WeakTensorKeyDictionary()
"""What :func:`_by_length` returned, by ``first``: layers share it."""


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
    known = type(first) is Tensor and not first.is_meta and not torch.compiler.is_compiling()
    if known and query.size(2) == key.size(2):
        return _by_document(query, key, value, first, scale, enable_gqa)
    keys = torch.arange(key.size(2), device=key.device)
    shown = (keys >= first.unsqueeze(2)) & (keys <= last.unsqueeze(2))
    return F.scaled_dot_product_attention(query, key, value, shown.unsqueeze(1), scale=scale, enable_gqa=enable_gqa)


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    if first not in _batches:
        _batches[first] = _by_length(first.expand(query.size(0), -1))
    batches, places = _batches[first]
    heads = [x.size(1) for x in (query, key, value)]
    rows = [x.transpose(1, 2).flatten(2).flatten(0, 1) for x in (query, key, value)]  # [b * s, heads * width]
    results = []
    for size, batch in batches:
        q, k, v = (
            x.index_select(0, batch).view(-1, size, count, x.size(1) // count).transpose(1, 2)
            for x, count in zip(rows, heads)
        )
        each = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        results.append(each.transpose(1, 2).flatten(2).flatten(0, 1))
    result = torch.cat(results).index_select(0, places)
    return result.view(query.size(0), query.size(2), query.size(1), -1).transpose(1, 2)


def _by_length(first: Tensor) -> tuple[list[tuple[int, Tensor]], Tensor]:
    """Return batches of documents of about one length: it, and the positions of all rows, one after the other, that are theirs, the last of
    a shorter document again; and where each position is among all of them [b * s]. Waits for the device, once for all layers."""
    length, device = first.size(1), first.device
    begins = (first.cpu() == torch.arange(length)).flatten().nonzero().flatten().tolist()
    batches: dict[int, list[range]] = {}
    for begin, end in itertools.pairwise([*begins, first.numel()]):
        batches.setdefault(min(length, 1 << (end - begin - 1).bit_length()), []).append(range(begin, end))
    positions, places, before = [], torch.empty(first.numel(), dtype=torch.int64), 0
    for size, documents in sorted(batches.items()):
        taken = [place for each in documents for place in (*each, *[each[-1]] * (size - len(each)))]
        positions.append((size, torch.tensor(taken, device=device)))
        for each in documents:
            places[each.start : each.stop] = torch.arange(before, before + len(each))
            before += size
    return positions, places.to(device)
