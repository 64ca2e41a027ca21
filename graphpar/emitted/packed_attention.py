"""Causal attention inside of documents that are packed into rows: no mask of a row's length times itself is made.

    documents   0 0 0 1 1 2 2 2        a number for each position of a row; equal numbers are one document

Queries of a document that follow each other are a piece; its keys are those of the document up to the last query. On
CUDA, in 16 bits, torch's kernel for sequences of several lengths takes all pieces at once. Elsewhere pieces of about
one length are a batch: a call of torch's attention for each power of two, at whose end shorter ones are filled up with
what no query sees. Compiled blocks make the mask.

Where the sequence is sharded over the ranks of an axis, each gathers all keys and values. A rank whose queries see more
keys than those of others sends some of them away while attention runs: each gets as many queries, which see about as
many keys.
"""

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from graphpar.emitted.collectives import all_gather, rank, size
from graphpar.emitted.expert_rows import Exchange, return_rows, send_rows

_varlen: Any = varlen.varlen_attn
_GROUPS = "enable_gqa" in inspect.signature(_varlen).parameters  # torch 2.12 and later
_known = WeakTensorKeyDictionary()
"""The :class:`_Pieces` of documents, by these, the axis, the window and how often they were written: layers share
them."""
_CHUNKS, _EVEN = 8, 1.05
"""Queries are sent in so many chunks of a shard, where one rank has that many times the mean work."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of each query to the keys of its document up to its own, among the last
    ``window`` of the row.

    query [b, h, s, e], key [b, g, s, e], value [b, g, s, f], documents [b or 1, s] -> [b, h, s, f]
    """
    return _attend(query, key, value, documents, "", window, scale, enable_gqa)


def balanced_packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    axis: str,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """query, key, value S(2) -> S(2): :func:`packed_attention` of the whole row, ``documents`` [b or 1, s] those of all
    of it."""
    if size(axis) > 1:
        key, value = (all_gather(x, axis, 2) for x in (key, value))
    return _attend(query, key, value, documents, axis if size(axis) > 1 else "", window, scale, enable_gqa)


def _on_hand(documents: Tensor) -> bool:
    """Whether the numbers are known while this runs."""
    return type(documents) is Tensor and not documents.is_meta and not torch.compiler.is_compiling()


def _shown(documents: Tensor, window: int | None) -> Tensor:
    """Which keys each query sees. [b or 1, s] -> [b or 1, s, s]"""
    places = torch.arange(documents.size(1), device=documents.device)
    before = places.unsqueeze(1) - places
    shown = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (before >= 0)
    return shown if window is None else shown & (before < window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    axis: str,
    window: int | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """[b, h, q, e], keys and values of all ranks -> [b, h, q, f]; ``axis``: over which queries are sharded, or none"""
    if not _on_hand(documents):
        begin = rank(axis) * query.size(2) if axis else 0
        shown = _shown(documents, window).narrow(1, begin, query.size(2)).unsqueeze(1)
        return F.scaled_dot_product_attention(query, key, value, shown, scale=scale, enable_gqa=enable_gqa)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [b * s, heads, width]
    with _disable_current_modes():  # recomputation counts the operators of a layer, and these run in one layer alone
        version = 0 if documents.is_inference() else documents._version
        known, which = _known.setdefault(documents, {}), (axis, window, version)
        if which not in known:
            known[which] = _Pieces(documents.expand(query.size(0), -1), window, axis)
        pieces = known[which]
        found = (
            pieces.together() if _takes_all(query, value) and (window is None or pieces.in_order) else pieces.batches()
        )
    if pieces.moves is not None:
        rows[0] = send_rows(rows[0].index_select(0, pieces.moves.leaving), axis, pieces.moves.exchange)
    take = _in_one_call if isinstance(found, _Row) else _by_length
    result: Tensor = take(rows, found, window, scale, enable_gqa)
    if pieces.moves is not None:
        result = return_rows(result, axis, pieces.moves.exchange).index_select(0, pieces.moves.back)
    return result.view(query.size(0), -1, *result.shape[1:]).transpose(1, 2)


class _Row(NamedTuple):
    """All pieces in one row: the rows of their queries and keys, where each ends, the longest, and where the result of
    each query is."""

    queries: Tensor
    keys: Tensor
    ends: tuple[Tensor, Tensor]
    longest: Sequence[int]
    results: Tensor


class _Batch(NamedTuple):
    """Pieces of about one length: the rows of their queries [n * q] and keys [n * k]; a mask [n, 1, q, k] where more
    than causal."""

    queries: Tensor
    keys: Tensor
    sizes: tuple[int, int]
    mask: Tensor | None


class _Batches(NamedTuple):
    """Batches, and where the result of each query is among those of all."""

    each: Sequence[_Batch]
    results: Tensor


class _Moves(NamedTuple):
    """How queries travel: the order in which they leave, and where each is among the results that come back."""

    leaving: Tensor
    exchange: Exchange
    back: Tensor


class _Pieces:
    """The pieces of this rank's queries, found on the host. Waits for the device, once for all layers.

    Attributes:
        places: of this rank's queries, among the positions of all examples [b * s].
        pieces: of each, which of the queries it has, and the places of its keys.
        in_order: whether the positions of each document follow each other.
        moves: how the rank gets its queries; None where it has them.
    """

    def __init__(self, documents: Tensor, window: int | None, axis: str) -> None:
        """documents [b, s]"""
        (batch, self.length), self.device, self.window = documents.shape, documents.device, window
        numbers, order = documents.cpu().sort(dim=1, stable=True)
        sorted_places = (order + self.length * torch.arange(batch).unsqueeze(1)).flatten()
        begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True).flatten()
        count = torch.arange(sorted_places.numel())
        first = torch.where(begins, count, 0).cummax(0).values
        among = torch.empty_like(sorted_places).index_copy(0, sorted_places, count)
        seen = (among - first[among] + 1).clamp(max=window or self.length)
        self.moves: _Moves | None = None
        self.places = count if not axis else self._divided(seen.view(batch, -1), axis)
        at, queries = among[self.places].sort()
        cuts = F.pad((at[1:] != at[:-1] + 1) | begins[at[1:]], (1, 0), value=True).nonzero().flatten().tolist()
        bounds = pairwise([*cuts, at.numel()])
        self.pieces = [(queries[i:j], sorted_places[first[at[i]] : at[j - 1] + 1]) for i, j in bounds]
        self.in_order = bool((begins[1:] | (sorted_places[1:] == sorted_places[:-1] + 1)).all())
        self._found: dict[type, Any] = {}

    def _divided(self, seen: Tensor, axis: str) -> Tensor:
        """Return the places of the queries that this rank computes, where each sees so many keys. [b, s]
        -> [b * s / k]"""
        (batch, length), count = seen.shape, size(axis)
        own = length // count
        local = torch.arange(batch * own)
        places = torch.stack(
            [local // own * length + local % own + each * own for each in range(count)]
        )  # [k, b * own]
        loads = seen.flatten()[places].sum(1)
        if loads.max() <= _EVEN * loads.sum() / count:
            return places[rank(axis)]
        chunk = own // math.gcd(own, _CHUNKS)
        work = seen.view(-1, chunk).sum(1)
        holders, totals, room = torch.empty_like(work), [0] * count, [work.numel() // count] * count
        for each in work.argsort(descending=True, stable=True).tolist():  # the largest to whom has the least
            taker = min((other for other in range(count) if room[other]), key=totals.__getitem__)
            holders[each], totals[taker], room[taker] = taker, totals[taker] + int(work[each]), room[taker] - 1
        holder = holders.repeat_interleave(chunk)[places]  # [k, b * own]
        leaving = holder[rank(axis)].argsort(stable=True)
        coming = holder == rank(axis)
        exchange = Exchange(
            holder[rank(axis)].bincount(minlength=count).tolist(), coming.sum(1).tolist(),
            local.to(self.device), torch.empty(0),
        )  # fmt: skip
        self.moves = _Moves(leaving.to(self.device), exchange, leaving.argsort().to(self.device))
        return places[coming]

    def together(self) -> _Row:
        """Return all pieces in one row."""
        if _Row not in self._found:
            rows = [torch.cat(parts) for parts in zip(*self.pieces)]
            counts = torch.tensor([[len(part) for part in piece] for piece in self.pieces])
            ends = F.pad(counts.cumsum(0), (0, 0, 1, 0)).int().to(self.device)
            queries, keys, results = (each.to(self.device) for each in (*rows, rows[0].argsort()))
            both = ends[:, 0].contiguous(), ends[:, 1].contiguous()
            self._found[_Row] = _Row(queries, keys, both, counts.amax(0).tolist(), results)
        row: _Row = self._found[_Row]
        return row

    def batches(self) -> _Batches:
        """Return batches of pieces of about one length."""
        if _Batches not in self._found:
            alike: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}
            for queries, keys in self.pieces:
                n, k = len(queries), len(keys)
                sizes = min(_power(n), self.length), min(_power(k), self.length)
                alike.setdefault((*sizes, n == k), []).append((queries, keys))
            results, before = torch.empty_like(self.places), 0
            for (rows, _, _), pieces in alike.items():
                for queries, _ in pieces:
                    results[queries] = torch.arange(before, before + len(queries))
                    before += rows
            each = [self._batch(pieces, *like) for like, pieces in alike.items()]
            self._found[_Batches] = _Batches(each, results.to(self.device))
        found: _Batches = self._found[_Batches]
        return found

    def _batch(self, pieces: Sequence[tuple[Tensor, Tensor]], rows: int, columns: int, causal: bool) -> _Batch:
        queries, keys = (
            torch.cat([part for piece in pieces for part in (piece[i], piece[i][-1:].expand(n - len(piece[i])))])
            for i, n in enumerate((rows, columns))
        )
        mask = None
        if not causal or (self.window is not None and self.window < (columns if self.in_order else self.length)):
            before = self.places[queries].view(-1, rows, 1) - keys.view(-1, 1, columns)
            real = torch.arange(columns) < torch.tensor([len(k) for _, k in pieces]).view(-1, 1, 1)
            mask = real & (before >= 0) & (before < (self.window or self.length))
            mask = mask.unsqueeze(1).to(self.device)
        return _Batch(queries.to(self.device), keys.to(self.device), (rows, columns), mask)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _by_length(
    rows: Sequence[Tensor], batches: Any, window: int | None, scale: float | None, enable_gqa: bool
) -> Tensor:
    """[b * q, h, e], [b * k, g, e], [b * k, g, f] -> [b * q, h, f]"""
    results = []
    for queries, keys, (n, k), mask in batches.each:
        query, key, value = (
            x.flatten(1).index_select(0, index).view(-1, count, *x.shape[1:]).transpose(1, 2)
            for x, index, count in zip(rows, (queries, keys, keys), (n, k, k))
        )
        each = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        results.append(each.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(results).index_select(0, batches.results).view(*rows[0].shape[:2], -1)


def _takes_all(query: Tensor, value: Tensor) -> bool:
    """Whether the device has a kernel for sequences of several lengths."""
    width = query.size(3)
    return query.is_cuda and query.itemsize == 2 and width == value.size(3) <= 256 and width % 8 == 0


def _in_one_call(rows: Sequence[Tensor], row: Any, window: int | None, scale: float | None, enable_gqa: bool) -> Tensor:
    """As :func:`_by_length`."""
    taken = [x.index_select(0, index) for x, index in zip(rows, (row.queries, row.keys, row.keys))]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if enable_gqa and _GROUPS:
        options["enable_gqa"] = True
    elif enable_gqa:
        taken[1:] = (x.repeat_interleave(taken[0].size(1) // x.size(1), 1) for x in taken[1:])
    each: Tensor = _varlen(*taken, *row.ends, *row.longest, **options)
    return each.index_select(0, row.results)
