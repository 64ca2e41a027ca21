"""Causal attention inside of documents that are packed into rows: no mask of a row's length times itself is made.

    documents   0 0 0 1 1 2 2 2        a number for each position of a row; equal numbers are one document
    places      0 1 2 3 4 5 6 7        where the queries are in the row: a rank may have a part of them

Queries of a document that follow each other are a piece; its keys are those of the document up to the last query. On CUDA, in 16 bits,
torch's kernel for sequences of several lengths takes all pieces at once. Elsewhere pieces of about one length are a batch: a call of
torch's attention for each power of two, at whose end shorter ones are filled up with what no query sees. Compiled blocks make the mask.
"""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_varlen: Any = varlen.varlen_attn
_GROUPS = "enable_gqa" in inspect.signature(_varlen).parameters  # torch 2.12 and later
_known = WeakTensorKeyDictionary()
"""The :class:`_Pieces` of documents, by these and by places: layers share them."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    places: Tensor,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of each query to the keys of its document up to its own, among the last ``window`` of the row.

    query [b, h, q, e], key [b, g, k, e], value [b, g, k, f], documents [b or 1, k], places [1, q] -> [b, h, q, f]
    """
    if type(documents) is not Tensor or documents.is_meta or torch.compiler.is_compiling():
        shown = _shown(documents, places, window).unsqueeze(1)
        return F.scaled_dot_product_attention(query, key, value, shown, scale=scale, enable_gqa=enable_gqa)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [b * s, heads, width]
    with _disable_current_modes():  # recomputation counts the operators of a layer, and these run in one layer alone
        known = _known.setdefault(documents, WeakTensorKeyDictionary())
        if places not in known:
            known[places] = _Pieces(documents.expand(query.size(0), -1), places[0])
        found = known[places].batches(window, _takes_all(query, value))
    take = _in_one_call if isinstance(found, _Row) else _by_length
    result = take(rows, found, window, scale, enable_gqa)
    return result.view(query.size(0), -1, *result.shape[1:]).transpose(1, 2)


def _shown(documents: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Which keys each query sees. [b or 1, k], [1, q] -> [b or 1, q, k]"""
    keys, own = torch.arange(documents.size(1), device=documents.device), places.unsqueeze(2)
    same = documents.gather(1, places.expand(documents.size(0), -1)).unsqueeze(2) == documents.unsqueeze(1)
    shown = same & (keys <= own)
    return shown if window is None else shown & (keys > own - window)


class _Row(NamedTuple):
    """All pieces in one row: the rows of their queries and keys, where each ends, the longest, and where the result of each query is."""

    queries: Tensor
    keys: Tensor
    ends: tuple[Tensor, Tensor]
    longest: Sequence[int]
    results: Tensor


class _Batch(NamedTuple):
    """Pieces of about one length: the rows of their queries [n * q] and keys [n * k]; a mask [n, 1, q, k] where more than causal."""

    queries: Tensor
    keys: Tensor
    sizes: tuple[int, int]
    mask: Tensor | None


class _Batches(NamedTuple):
    """Batches, and where the result of each query is among those of all."""

    each: Sequence[_Batch]
    results: Tensor


class _Pieces:
    """Pieces, found on the host. Waits for the device, once for all layers.

    Attributes:
        pieces: of each, the rows of its queries and of its keys, among those of all examples.
        in_order: whether the positions of each document follow each other.
    """

    def __init__(self, documents: Tensor, places: Tensor) -> None:
        """documents [b, k], places [q]"""
        (batch, self.keys), self.device = documents.shape, documents.device
        self.places = places.cpu()
        numbers, order = documents.cpu().sort(dim=1, stable=True)
        rows = (order + self.keys * torch.arange(batch).unsqueeze(1)).flatten()  # of keys, by document
        begins = F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True).flatten()
        count = torch.arange(rows.numel())
        first = torch.where(begins, count, 0).cummax(0).values
        among = torch.empty_like(rows).index_copy(0, rows, count).view(batch, -1)
        at, queries = among[:, self.places].flatten().sort()
        cuts = F.pad((at[1:] != at[:-1] + 1) | begins[at[1:]], (1, 0), value=True).nonzero().flatten().tolist()
        self.pieces = [(queries[i:j], rows[first[at[i]] : at[j - 1] + 1]) for i, j in pairwise([*cuts, at.numel()])]
        self.in_order = bool((begins[1:] | (rows[1:] == rows[:-1] + 1)).all())
        self._known: dict[Any, _Row | _Batches] = {}

    def batches(self, window: int | None, together: bool) -> _Row | _Batches:
        """Return the pieces as attention takes them; ``together``: whether the device's kernel takes several lengths."""
        together = together and (window is None or self.in_order)
        which = "together" if together else window
        if which not in self._known:
            self._known[which] = self._one_after_the_other() if together else self._by_length(window)
        return self._known[which]

    def _one_after_the_other(self) -> _Row:
        rows = [torch.cat(parts) for parts in zip(*self.pieces)]
        counts = torch.tensor([[len(part) for part in piece] for piece in self.pieces])
        ends = F.pad(counts.cumsum(0), (0, 0, 1, 0)).int().to(self.device)
        queries, keys, results = (each.to(self.device) for each in (*rows, rows[0].argsort()))
        return _Row(queries, keys, (ends[:, 0].contiguous(), ends[:, 1].contiguous()), counts.amax(0).tolist(), results)

    def _by_length(self, window: int | None) -> _Batches:
        alike: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}
        for queries, keys in self.pieces:
            n, k = len(queries), len(keys)
            sizes = min(_power(n), len(self.places)), min(_power(k), self.keys)
            alike.setdefault((*sizes, n == k), []).append((queries, keys))
        results, before = torch.empty(sum(len(queries) for queries, _ in self.pieces), dtype=torch.int64), 0
        for (size, _, _), pieces in alike.items():
            for queries, _ in pieces:
                results[queries] = torch.arange(before, before + len(queries))
                before += size
        return _Batches([self._batch(pieces, *like, window) for like, pieces in alike.items()], results.to(self.device))

    def _batch(
        self, pieces: Sequence[tuple[Tensor, Tensor]], size: int, length: int, causal: bool, window: int | None
    ) -> _Batch:
        queries, keys = (
            torch.cat([part for piece in pieces for part in (piece[i], piece[i][-1:].expand(n - len(piece[i])))])
            for i, n in enumerate((size, length))
        )
        mask = None
        if not causal or (window is not None and window < (length if self.in_order else self.keys)):
            own, place = (
                self.places[queries % len(self.places)].view(-1, size, 1),
                (keys % self.keys).view(-1, 1, length),
            )
            real = torch.arange(length) < torch.tensor([len(k) for _, k in pieces]).view(-1, 1, 1)
            mask = real & (place <= own)
            mask = (mask if window is None else mask & (place > own - window)).unsqueeze(1).to(self.device)
        return _Batch(queries.to(self.device), keys.to(self.device), (size, length), mask)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _by_length(
    rows: Sequence[Tensor], batches: Any, window: int | None, scale: float | None, enable_gqa: bool
) -> Tensor:
    """[b * q, h, e], [b * k, g, e], [b * k, g, f] -> [b * q, h, f]"""
    results = []
    for queries, keys, (size, length), mask in batches.each:
        q, k, v = (
            x.flatten(1).index_select(0, index).view(-1, n, *x.shape[1:]).transpose(1, 2)
            for x, index, n in zip(rows, (queries, keys, keys), (size, length, length))
        )
        each = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa)
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
