"""Rows that are sorted by expert: each rank takes those of its experts, or is sent them.

    E      rows sorted by expert: each rank has those of its experts   its gradient is E

``offs`` [experts]: where each expert's rows end. Functions with ``room`` do not wait for the device: tensors have room
for ``room`` times the mean number of rows of a rank, and padding behind these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted.collectives import _all_to_all, _apply, _begin_all_to_all, _done, rank, size

counters: list[Callable[[str, Tensor], None]] = []
"""Called where rows are divided by expert, with the axis and the number of rows of each expert: of all of them, or
where rows are sent, of this rank's, from all ranks."""

_lacking: Tensor | None = None
"""Is set where rows have no room; ``None``: nothing reads it, so all rows have room, which waits for the device."""


def note_lacking(lacking: Tensor | None) -> None:
    """Have functions with ``room`` take as many rows as they have room for, and set ``lacking`` where there are more;
    ``None``: have them wait for the device, and take all."""
    global _lacking
    _lacking = lacking


class OwnRows(NamedTuple):
    """Which of ``whole`` rows are those of a rank's experts: from ``begin`` to ``end``, both on the device. There is
    room for ``room`` of them."""

    begin: Tensor
    end: Tensor
    room: int
    whole: int


def rank_ends(offs: Tensor, axis: str, rows: Tensor | None = None, room: float | None = None) -> list[int] | OwnRows:
    """Compute where the rows of each rank's experts end. [experts] -> k; with ``room`` for this rank's of ``rows``
    [n, ...].

    Without it waits for the device, so it is called once for all tensors with these rows.
    """
    own = offs.size(0) // size(axis)
    for count_rows in counters:
        count_rows(axis, offs.diff(prepend=offs.new_zeros(1)))
    if room is not None and rows is not None and _lacking is not None:
        whole, first = rows.size(0), rank(axis) * own
        begin, end = offs[first - 1] if first else offs.new_zeros(()), offs[first + own - 1]
        held = _room(whole, room, axis)
        _lacking.logical_or_(end - begin > held)
        return OwnRows(begin, torch.minimum(end, begin + held), held, whole)
    ends: list[int] = offs[own - 1 :: own].tolist()
    return ends


def expert_rows(x: Tensor, axis: str, ends: Sequence[int] | OwnRows) -> Tensor:
    """R -> E: the rows of this rank's experts; backward pads with zeros. [n, ...] -> [own, ...]"""
    if isinstance(ends, OwnRows):
        return _apply(x, lambda x: _own_rows(x, ends), lambda g: _among_all(g, ends))
    begin, end = ([0, *ends])[rank(axis)], ends[rank(axis)]
    torch._check(ends[-1] == x.size(0), lambda: "every row must be one of an expert: the offsets end elsewhere")
    torch._check(begin >= 0)  # for torch.compile, which does not see the numbers
    torch._check(end >= begin)
    torch._check(end <= x.size(0))
    return x.narrow(0, begin, end - begin)


def expert_sums(x: Tensor, axis: str, ends: Sequence[int] | OwnRows) -> Tensor:
    """E -> P: the rows of this rank's experts, zeros elsewhere; backward keeps its rows. [own, ...] -> [n, ...]"""
    if isinstance(ends, OwnRows):
        return _apply(x, lambda x: _among_all(x, ends), lambda g: _own_rows(g, ends))
    begin, end = ([0, *ends])[rank(axis)], ends[rank(axis)]
    return F.pad(x, [0, 0] * (x.ndim - 1) + [begin, ends[-1] - end])


def without_padding(x: Tensor, ends: Sequence[int] | OwnRows) -> Tensor:
    """E -> E: the same rows, and zeros for padding, which products leave undefined; backward the same. [own, ...] ->
    [own, ...]"""
    return x.where(_is_own(x, ends), 0) if isinstance(ends, OwnRows) else x


def own_offsets(offs: Tensor, axis: str, ends: Sequence[int] | OwnRows = ()) -> Tensor:
    """Compute where the rows of each of this rank's experts end among the rank's rows. [experts] -> [experts / k]"""
    own = offs.size(0) // size(axis)
    first = rank(axis) * own
    found = offs[first : first + own] - (offs[first - 1] if first else 0)
    return found.clamp(max=ends.room) if isinstance(ends, OwnRows) else found


class Exchange(NamedTuple):
    """How rows travel between the ranks of an axis, each of which has rows of its own, sorted by expert, and other
    experts.

    ``sent`` and ``received``: the number of rows to and from each rank. ``order`` [received]: sorts what came by
    expert; rows of one expert stay in the order of their ranks, and padding is last. ``ends`` [experts / k]: where the
    rows of each of this rank's experts end then. With padding, ``rows`` [sent]: which row is sent in each place, and
    ``places`` [own]: in which place each row is sent, -1 where it is not.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    ends: Tensor
    rows: Tensor | None = None
    places: Tensor | None = None


def exchange_of(offs: Tensor, axis: str, rows: Tensor | None = None, room: float | None = None) -> Exchange:
    """Tell the ranks how many rows each expert gets from each; ``offs`` [experts]: where the rows of each expert end on
    this rank. With ``room`` for those of ``rows`` [own, ...] that go to one rank.

    Without it waits for the device, so it is called once for all tensors with these rows.
    """
    count = size(axis)
    own = offs.size(0) // count
    sent = offs.to(torch.int64).diff(prepend=offs.new_zeros(1, dtype=torch.int64)).view(count, own)
    received = _all_to_all(sent, axis)
    for count_rows in counters:
        count_rows(axis, received.sum(0))
    if room is not None and rows is not None and _lacking is not None:
        return _exchange_with_room(sent, received, axis, rows.size(0), _room(rows.size(0), room, axis), offs.dtype)
    to_ranks, from_ranks = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    expert = torch.arange(own, device=offs.device).repeat(count)
    order = expert.repeat_interleave(received.flatten(), output_size=sum(from_ranks)).argsort(stable=True)
    return Exchange(to_ranks, from_ranks, order, received.sum(0).cumsum(0, dtype=offs.dtype))


def send_rows(x: Tensor, axis: str, exchange: Exchange) -> Tensor:
    """S -> E: each row goes to the rank of its expert, by all-to-all; backward brings gradients back. [own, ...]
    -> [received, ...]"""
    return _apply(x, lambda x: _sent(x, axis, exchange), lambda g: _returned(g, axis, exchange))


def return_rows(x: Tensor, axis: str, exchange: Exchange) -> Tensor:
    """E -> S: each row goes back to where it came from, by all-to-all; backward sends gradients. [received, ...]
    -> [own, ...]"""
    return _apply(x, lambda x: _returned(x, axis, exchange), lambda g: _sent(g, axis, exchange))


class Travelling(NamedTuple):
    """Rows on their way: ``given`` [sent] as they were sent, and ``rows`` [received], which are not there yet.

    A gradient takes the way of ``given``, on its own way back.
    """

    given: Tensor
    rows: Tensor


def start_send(x: Tensor, axis: str, exchange: Exchange) -> Travelling:
    """S -> E: begin :func:`send_rows`; backward waits for gradients. [own, ...] -> on their way [received, ...]"""
    given = _apply(x, lambda x: _packed(x, exchange), lambda g: _unpacked(_done(g), exchange))
    return Travelling(given, _begin_all_to_all(given.detach(), axis, exchange.sent, exchange.received))


def finish_send(sent: Travelling, axis: str, exchange: Exchange) -> Tensor:
    """E -> E: wait for the rows; backward begins to bring gradients back. On their way -> [received, ...]"""
    rows = sent.rows
    return _apply(
        sent.given,
        lambda given: _sorted(_done(rows), exchange),
        lambda g: _begin_all_to_all(_unsorted(g, exchange), axis, exchange.received, exchange.sent),
    )


def start_return(x: Tensor, axis: str, exchange: Exchange) -> Travelling:
    """E -> E: begin :func:`return_rows`; backward waits for gradients. [received, ...] -> on their way [own, ...]"""
    given = _apply(x, lambda x: _unsorted(x, exchange), lambda g: _sorted(_done(g), exchange))
    return Travelling(given, _begin_all_to_all(given.detach(), axis, exchange.received, exchange.sent))


def finish_return(sent: Travelling, axis: str, exchange: Exchange) -> Tensor:
    """E -> S: wait for the rows; backward begins to send gradients. On their way -> [own, ...]"""
    rows = sent.rows
    return _apply(
        sent.given,
        lambda given: _unpacked(_done(rows), exchange),
        lambda g: _begin_all_to_all(_packed(g, exchange), axis, exchange.sent, exchange.received),
    )


def received_ends(exchange: Exchange) -> Tensor:
    """Return where the rows of each of this rank's experts end among those that came: [experts / k]."""
    return exchange.ends


def _sent(x: Tensor, axis: str, exchange: Exchange) -> Tensor:
    return _sorted(_all_to_all(_packed(x, exchange), axis, exchange.sent, exchange.received), exchange)


def _returned(x: Tensor, axis: str, exchange: Exchange) -> Tensor:
    return _unpacked(_all_to_all(_unsorted(x, exchange), axis, exchange.received, exchange.sent), exchange)


def _packed(x: Tensor, exchange: Exchange) -> Tensor:
    """[own, ...] -> [sent, ...]"""
    x = x.view_as(x) if exchange.rows is None else x[exchange.rows]
    torch._check(
        sum(exchange.sent) == x.size(0), lambda: "every row must be one of an expert: the offsets end elsewhere"
    )
    return x


def _unpacked(x: Tensor, exchange: Exchange) -> Tensor:
    """[sent, ...] -> [own, ...]"""
    if exchange.places is None:
        return x
    return x[exchange.places].masked_fill(_as_column(exchange.places < 0, x), 0)


def _sorted(x: Tensor, exchange: Exchange) -> Tensor:
    return x[exchange.order]


def _unsorted(x: Tensor, exchange: Exchange) -> Tensor:
    return torch.empty_like(x).index_copy(0, exchange.order, x)


def _room(rows: int, room: float, axis: str) -> int:
    """How many of so many rows a tensor has room for."""
    return min(rows, math.ceil(rows * room / size(axis)))


def _exchange_with_room(
    sent: Tensor, received: Tensor, axis: str, rows: int, room: int, dtype: torch.dtype
) -> Exchange:
    """sent, received [k, experts / k]. Rows to and from each rank that have no room are left out, which is noted."""
    assert _lacking is not None
    count = sent.size(0)
    row, place = (torch.arange(n, device=sent.device) for n in (rows, room))
    ends = sent.sum(1).cumsum(0)
    begins = ends - sent.sum(1)
    _lacking.logical_or_((ends - begins > room).any())
    to = torch.searchsorted(ends, row, right=True)
    within = row - begins[to.clamp(max=count - 1)]
    places = torch.where((to < count) & (within < room), to * room + within, -1)
    came = received.cumsum(1).clamp(max=room)
    expert = torch.searchsorted(came, place.expand(count, room).contiguous(), right=True)
    return Exchange(
        [room] * count,
        [room] * count,
        expert.flatten().argsort(stable=True),
        came.sum(0).to(dtype),
        (begins.unsqueeze(1) + place).clamp(max=rows - 1).flatten(),
        places,
    )


def _own_rows(x: Tensor, own: OwnRows) -> Tensor:
    """[whole, ...] -> [room, ...]"""
    row = torch.arange(own.room, device=x.device) + own.begin
    return x[row.clamp(max=own.whole - 1)].masked_fill(_as_column(row >= own.end, x), 0)


def _among_all(x: Tensor, own: OwnRows) -> Tensor:
    """[room, ...] -> [whole, ...]"""
    row = torch.arange(own.whole, device=x.device)
    elsewhere = (row < own.begin) | (row >= own.end)
    return x[(row - own.begin).masked_fill(elsewhere, 0)].masked_fill(_as_column(elsewhere, x), 0)


def _is_own(x: Tensor, own: OwnRows) -> Tensor:
    return _as_column(torch.arange(own.room, device=x.device) < own.end - own.begin, x)


def _as_column(flags: Tensor, x: Tensor) -> Tensor:
    """[n] -> [n, 1, ...], with the dims of ``x``"""
    return flags.view(-1, *[1] * (x.ndim - 1))
