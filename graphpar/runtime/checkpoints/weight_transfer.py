"""Weights that are sent while programs run: what :meth:`Pipeline.send_weights` and :meth:`Pipeline.receive_weights` do.

    one launch    training and generating pipelines of the same processes         pipeline.send_weights(generating)
    two launches  Peers("host:port", sends=True) and Peers("host:port", sends=False)
                  training.send_weights(peers)  ──messages of each pair of processes──►  generating.receive_weights(peers)

In round k process i sends to process i + k and receives from process i - k, in messages of at most 64 MiB, so a process has no more than
one of each beside its own values. A message that is one contiguous piece goes from the sender's parameter into the receiver's.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import socket
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup

from graphpar.runtime.checkpoints.adapters import check_mergeable, merged
from graphpar.runtime.checkpoints.engine_layouts import (
    AXES,
    EngineTensors,
    Target,
    distinct,
    left_over,
    read_mapping,
    targets,
)
from graphpar.runtime.checkpoints.resharding import (
    BUCKET_BYTES,
    Held,
    Layout,
    Move,
    Resharding,
    View,
    fill,
    put,
    region_of,
    view_of,
)
from graphpar.runtime.checkpoints.saved_state import State
from graphpar.runtime.checkpoints.tensor_chunks import Entry
from graphpar.runtime.checkpoints.weights import known_as, listed, names_by_tie, own_name
from graphpar.runtime.errors import RuntimeProgramError

FEW = 4
"""At most one in so many different values of processes travel one by one."""
QUIET_S, AGAIN_S = 10.0, 60.0
"""After how long a launch that waits for another one says so, and how often then."""


@dataclass(frozen=True)
class Transfer:
    """What a transfer of weights moved: the bytes of all messages, the fewest that could be, the seconds that it took from when all
    processes were ready, and the version."""

    moved_bytes: int
    least_bytes: int
    seconds: float
    version: int


@dataclass(frozen=True)
class Channel:
    """Processes that exchange weights: their group, this one's number in it, which of them send and receive, and the other launch."""

    group: ProcessGroup
    own: int
    senders: Sequence[int]
    receivers: Sequence[int]
    device: torch.device
    other: str = ""

    def gathered(self, value: Any) -> list[Any]:
        """Return a value of each process, of which equal ones are one object; a collective call. Few different ones travel once each."""
        raw = zlib.compress(pickle.dumps(value), 1)
        digest = hashlib.sha256(raw).digest() + len(raw).to_bytes(8, "little")
        digests = [bytes(each.tolist()) for each in self._all(self._bytes(digest))]
        first = {each: process for process, each in reversed(list(enumerate(digests)))}
        sizes = {each: int.from_bytes(each[-8:], "little") for each in first}
        if len(first) * FEW > len(digests):
            padded = self._all(self._bytes(raw.ljust(max(sizes.values()), b"\0")))
            found = {each: padded[process] for each, process in first.items()}
        else:
            found = {each: self._bytes(raw if each == digest else bytes(sizes[each])) for each in sorted(first)}
            for each, room in found.items():
                self.group.broadcast(room, first[each]).wait()
        values = {
            each: pickle.loads(zlib.decompress(room[: sizes[each]].cpu().numpy().tobytes()))
            for each, room in found.items()
        }
        return [values[each] for each in digests]

    def _bytes(self, raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)

    def _all(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.group.size())]
        self.group.allgather([found], [own]).wait()
        return found

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise in every process if the block does in one; a collective call."""
        error = None
        try:
            yield
        except RuntimeProgramError as refused:
            error = refused
        found = self.gathered(None if error is None else str(error))
        failed = next((text for text in found if text is not None), None)
        if failed is not None:
            raise RuntimeProgramError(failed) from error


@contextmanager
def _waiting(other: str) -> Iterator[None]:
    """Let rank 0 say, if the block takes long, for which other launch it waits; nothing where there is none."""
    began, done = time.monotonic(), threading.Event()

    def say() -> None:
        quiet = QUIET_S
        while not done.wait(quiet):
            quiet = AGAIN_S
            print(f"waiting for {other}, {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)

    if other and dist.get_rank() == 0:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Peers:
    """The ranks of two launches, of which one sends weights and the other receives them. Making it is a collective call of both.

    Args:
        address: ``host:port``, where rank 0 of the sending launch listens.
        sends: whether this launch sends.
        device: where this rank computes.
        timeout_s: how long to wait for the other launch, and for each message.

    Raises:
        RuntimeProgramError: the other launch does not come, or the sending one can't listen there.
    """

    def __init__(
        self, address: str, *, sends: bool, device: torch.device | str = "cpu", timeout_s: float = 600.0
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise RuntimeProgramError(f"{address!r} is no address; write host:port, such as 10.0.0.1:29600")
        if not dist.is_initialized():
            raise RuntimeProgramError(
                "Peers are of the ranks of a launch, which have no process group yet: see start()"
            )
        rank, size, where, timeout = (
            dist.get_rank(), dist.get_world_size(), torch.device(device), timedelta(seconds=timeout_s),
        )  # fmt: skip
        listens = sends and rank == 0
        sizes = ("sends", "receives")
        other = f"the launch that {sizes[sends]} weights"
        try:
            with _waiting(f"{other} to come to {address}"):
                self._store = TCPStore(host, int(port), None, listens, timeout, wait_for_workers=False)
                if rank == 0:
                    self._store.set(sizes[not sends], str(size))
                senders, receivers = (int(self._store.get(each)) for each in sizes)
        except (OSError, dist.DistError) as error:
            if "EADDRINUSE" in str(error):
                raise RuntimeProgramError(f"{address} is in use on this machine; name another port") from error
            raise RuntimeProgramError(f"{other} has not come to {address} within {timeout_s:g} s") from error
        own = rank if sends else senders + rank
        group = group_of(PrefixStore("weights", self._store), own, senders + receivers, where, timeout)
        self.sends, ranks = sends, range(senders + receivers)
        self.channel = Channel(
            group, own, ranks[:senders], ranks[senders:], where, f"{other} ({address}) to be ready for them"
        )

    def check(self, *, sends: bool) -> None:
        """Check that this launch is the one that sends, or the one that receives.

        Raises:
            RuntimeProgramError: it is the other one.
        """
        if sends != self.sends:
            raise RuntimeProgramError(f"these peers were made with sends={self.sends}; the other launch sends")

    def receive(self, tensors: EngineTensors) -> Transfer:
        """Write what the other launch sends with :meth:`Pipeline.send_weights` into the tensors of an engine; a collective call of both.

        Raises:
            RuntimeProgramError: in all processes, before anything is sent: the mapping does not fit the model or the engine's tensors.
        """
        self.check(sends=False)
        return transfer(self.channel, None, tensors, 0)


def group_of(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """Make a group of processes by a store, which no default group of them has: of two launches, or of two ranks."""
    group = ProcessGroup(store, rank, size)
    backend: dist.ProcessGroupNCCL | dist.ProcessGroupGloo
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend, kind = dist.ProcessGroupNCCL(store, rank, size, options), ProcessGroup.BackendType.NCCL
    else:
        backend, kind = dist.ProcessGroupGloo(store, rank, size, timeout), ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


def all_ranks(device: torch.device) -> Channel:
    """Return the channel of this launch's processes, each of which sends and receives."""
    ranks, group = range(dist.get_world_size()), dist.group.WORLD
    assert group is not None
    return Channel(group, dist.get_rank(), ranks, ranks, device)


def transfer(
    channel: Channel,
    sender: State | None,
    receiver: State | EngineTensors | None,
    version: int,
    strict: bool = True,
    only: Collection[str] | None = None,
    may: Callable[[], None] = lambda: None,
) -> Transfer:
    """Move the weights that ``sender`` has into ``receiver``; either is None in a process that has none. A collective call.

    Of a sender with adapters that the receivers do not have, the weights with their products are sent.

    Args:
        strict: whether all that is sent must be received.
        only: the sender's names of what is sent; by default all.
        may: raises if this process can't take part; then all do.

    Returns:
        What moved; of a process that only receives, with the version that was sent.

    Raises:
        RuntimeProgramError: in all processes, before anything is sent: the programs are of different models.
    """
    own = channel.own
    with _waiting(channel.other), channel.agreed():
        may()
    began = time.monotonic()
    held = {} if sender is None else _entries(sender, only)
    names_of = {name: _names(sender, name) for name in held} if sender is not None else {}
    offers = channel.gathered([(name, names_of[name], entry.shape) for name, entry in held.items()])
    with channel.agreed():
        taken, needed = _needed(receiver, offers)
    names = {name for every in channel.gathered(tuple(needed)) for name in every}
    with channel.agreed():
        sent = {} if sender is None else _sent(sender, held, names, only)
    had = {name: Held.of(each, names_of[name]) for name, each in sent.items()}
    with channel.agreed():
        outgoing, incoming, least = _planned(channel, (Layout(had), Layout(needed), socket.gethostname(), strict))
    if isinstance(receiver, EngineTensors):
        receiver.version = None
    exchange(channel, outgoing, incoming, view_of(sent), taken)
    if isinstance(receiver, State):
        receiver.parameters.loaded()
    received = sum(move.nbytes for move in incoming if move.source != own)
    # When all have arrived: nobody goes on with values of which others have a part.
    versions, moved, fewest = zip(*channel.gathered((version, received, least)))
    found = Transfer(sum(moved), sum(fewest), time.monotonic() - began, versions[channel.senders[0]])
    if isinstance(receiver, EngineTensors):
        receiver.version = found.version
    return found


Plan = tuple[list[Move], list[Move], int]
"""What a process sends, what it receives and copies, and the fewest bytes that it can receive."""
_plans: dict[tuple[tuple[bytes, ...], int], Plan] = {}
"""Those of the last few pairs of programs, by what all processes have and need, which are told once."""


def _planned(channel: Channel, layout: tuple[Layout, Layout, str, bool]) -> Plan:
    key = tuple(channel.gathered(hashlib.sha256(pickle.dumps(layout)).digest())), channel.own
    if not all(channel.gathered(key in _plans)):
        senders, receivers, nodes, strict = zip(*channel.gathered(layout))
        found = Resharding(senders, receivers, nodes, all(strict))
        while len(_plans) >= 8:
            del _plans[next(iter(_plans))]
        _plans[key] = *found.of(channel.own), found.least_bytes(channel.own)
    return _plans[key]


def _entries(state: State, only: Collection[str] | None = None) -> dict[str, Entry]:
    return {name: entry for name, entry in state.model().items() if only is None or name in only}


def _names(state: State, name: str) -> tuple[str, ...]:
    return known_as(name, state.program, names_by_tie(state.program.ties))


def _needed(
    receiver: State | EngineTensors | None, offers: Sequence[Sequence[tuple[str, Sequence[str], Sequence[int]]]]
) -> tuple[dict[str, Entry], dict[str, Held]]:
    """Return what a process receives, and as what: of another engine by the names of the senders."""
    if receiver is None:
        return {}, {}
    if isinstance(receiver, EngineTensors):
        offered = {each: (name, shape) for own in offers for name, names, shape in own for each in names}
        entries = receiver.entries(offered)
        return entries, {name: Held.of(entry, (name,)) for name, entry in entries.items()}
    entries = _entries(receiver)
    return entries, {
        name: replace(Held.of(entry, _names(receiver, name)), rounds=entry.frozen) for name, entry in entries.items()
    }


def _sent(state: State, entries: dict[str, Entry], needed: set[str], only: Collection[str] | None) -> dict[str, Entry]:
    """Return what a rank has to send; where nobody needs its adapters, the weights with their products."""
    adapters = state.program.adapters
    of_adapters = {name for each in adapters for name in (each.a, each.b)}
    if not adapters or of_adapters & needed:
        return entries
    check_mergeable(adapters)
    stored = {
        name: each for stage in state.parameters.stages for name, each in stage.state_dict(keep_vars=True).items()
    }
    held = {
        name: each
        for name, each in (stored | state.parameters.values()).items()
        if only is None or state.first(name) in only or name in of_adapters
    }
    found = dict(entries)
    for name, value in merged(held, state.program, state.groups):
        found[state.first(name)] = state.replaced(name, stored[name], value)
    return {name: entry for name, entry in found.items() if name not in of_adapters}


# ---- other engines --------------------------------------------------------------------------------------------------


def engine_tensors(
    channel: Channel,
    sender: State,
    mapping: str | Path,
    ranks: Collection[int] | None,
    dtype: torch.dtype | None,
    bucket_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a mapping makes of what ranks have, undivided, on each of ``ranks``; a collective call as long as it lasts.

    Raises:
        RuntimeProgramError: the mapping can't be read, or leaves something out.
    """
    adapters = {name for each in sender.program.adapters for name in (each.a, each.b)}
    own = [
        (own_name(name, sender.program), name, entry.shape, entry.dtype)
        for name, entry in _entries(sender).items()
        if name not in adapters
    ]
    offered = {each: rest for every in channel.gathered(own) for each, *rest in every}
    with channel.agreed():
        made = targets(read_mapping(mapping), {name: shape for name, (_, shape, _) in offered.items()})
        if strange := [rank for rank in ranks or () if rank not in range(channel.group.size())]:
            raise RuntimeProgramError(f"there is no rank {strange[0]} among {channel.group.size()} that could receive")
        if left := left_over(made, offered):
            raise RuntimeProgramError(f"the mapping {mapping} leaves out {listed(left)}")
    shapes, places = {name: shape for name, (_, shape, _) in offered.items()}, dict.fromkeys(AXES, (0, 1))
    buckets: list[dict[str, tuple[Target, list[int], torch.dtype]]] = []
    room = 0
    for name, target in distinct(made):
        first = offered[target.sources[0][0]][2]
        kind = dtype if dtype is not None and first.is_floating_point else first
        shape, _ = target.parts(shapes, places)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes > room:
            buckets.append({})
            room = bucket_bytes
        buckets[-1][name] = target, shape, kind
        room -= nbytes
    for bucket in buckets:
        receives = ranks is None or channel.own in ranks
        tensors = {
            name: torch.empty(shape, dtype=kind, device=channel.device)
            for name, (_, shape, kind) in bucket.items()
            if receives
        }
        only = {offered[name][0] for target, _, _ in bucket.values() for names in target.sources for name in names}
        transfer(channel, sender, EngineTensors(mapping, tensors), 0, strict=False, only=only)
        while tensors:  # so that a consumer may free one before the next
            name = next(iter(tensors))
            yield name, tensors.pop(name)


# ---- messages ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def exchange(
    channel: Channel, outgoing: Sequence[Move], incoming: Sequence[Move], view: View, taken: Mapping[str, Entry]
) -> None:
    """Send what others need, and fill what this process needs; a collective call.

    Args:
        outgoing, incoming: as :meth:`Resharding.of` returns them.
        view: of what this process has.
        taken: what it needs.
    """
    fill(taken, (move for move in incoming if move.source == channel.own), view)
    count, own = channel.group.size(), channel.own
    by_target, by_source = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
    for move in outgoing:
        by_target[move.target].append(move)
    for move in incoming:
        by_source[move.source].append(move)  # its own ones are in no message
    for step in range(1, count):
        to, source = (own + step) % count, (own - step) % count
        sends, receives = _messages(by_target[to]), _messages(by_source[source])
        for mine, theirs in _together(sends, receives):
            works, arrived = [], None
            out = None if mine is None else _packed(mine, view, channel.device)
            if theirs is not None:
                arrived = _room(theirs, taken, channel.device)
            coalesces = channel.device.type == "cuda"
            if coalesces:
                channel.group._start_coalescing(channel.device)
            if out is not None:
                works.append(channel.group.send([out], to, 0))
            if arrived is not None:
                works.append(channel.group.recv([arrived], source, 0))
            if coalesces:
                works = [channel.group._end_coalescing(channel.device)]
            for work in works:
                work.wait()
            if theirs is not None and arrived is not None:
                _unpack(theirs, arrived, taken)


def _together(
    first: Sequence[list[Move]], second: Sequence[list[Move]]
) -> Iterator[tuple[list[Move] | None, list[Move] | None]]:
    for place in range(max(len(first), len(second))):
        yield (first[place] if place < len(first) else None), (second[place] if place < len(second) else None)


def _messages(moves: Sequence[Move]) -> list[list[Move]]:
    """Divide what goes from one process to another into messages."""
    found: list[list[Move]] = []
    room = 0
    for move in moves:
        for region in move.region.pieces(max(1, BUCKET_BYTES // move.dtype.itemsize)):
            piece = replace(move, region=region)
            if piece.nbytes > room:
                found.append([])
                room = BUCKET_BYTES
            found[-1].append(piece)
            room -= piece.nbytes
    return found


def _bytes(values: Tensor) -> Tensor:
    """View contiguous values as bytes: gloo does not know every dtype."""
    return values.reshape(-1).view(torch.uint8)


def _packed(message: Sequence[Move], view: View, device: torch.device) -> Tensor:
    parts = [_bytes(view(move.sent, move.region).to(device, move.dtype).contiguous()) for move in message]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _in_place(message: Sequence[Move], taken: Mapping[str, Entry], device: torch.device) -> Tensor | None:
    """Return where a message of one piece may arrive, if that is the only place where it is needed."""
    (move, *others), entry = message, taken[message[0].received]
    boxes = [box for box in entry.boxes if move.region.common(region_of(box)) is not None]
    if others or len(boxes) > 1 or entry.dtype != move.dtype:
        return None
    view = move.region.of(boxes[0])
    return _bytes(view) if view.is_contiguous() and view.device == device else None


def _room(message: Sequence[Move], taken: Mapping[str, Entry], device: torch.device) -> Tensor:
    found = _in_place(message, taken, device)
    return (
        torch.empty(sum(move.nbytes for move in message), dtype=torch.uint8, device=device) if found is None else found
    )


def _unpack(message: Sequence[Move], arrived: Tensor, taken: Mapping[str, Entry]) -> None:
    if _in_place(message, taken, arrived.device) is not None:
        return
    begin = 0
    for move in message:
        values = arrived[begin : begin + move.nbytes].clone().view(move.dtype).view(move.region.sizes)
        put(taken[move.received], move.region, values)
        begin += move.nbytes
