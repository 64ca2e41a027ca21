"""Join the ranks of a program, agree, and fail together.

    with start(timeout_s=600) as ranks:     # reads RANK, WORLD_SIZE, LOCAL_RANK, which torchrun sets
        ...                                 # an exception here ends every rank; the first one is reported

A rank that fails writes its message where torchrun looks for it and exits at once; torchrun then ends the
others. A rank that only lost the connection to a failed peer waits to be ended, so that its "connection closed
by peer" neither hides the cause nor fills the terminal.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from graphpar.runtime.errors import NO_ROOM, AgreedError, RuntimeProgramError, root_cause
from graphpar.runtime.torch_versions import all_gather_single, reduce_scatter_single

PEER_LOSS = (
    "connection closed by peer", "connection reset", "broken pipe", "connection refused", "socket timeout",
    "remote process exited", "nccl communicator was aborted", "failed to recv", "failed to send", "sendbytes failed",
    "recvvalue failed", "timed out waiting", "wait timeout", "application timeout",
)  # fmt: skip
"""What torch's backends say when the other side is gone."""
FROM_GLOO = re.compile(r"\[\S*gloo\S*:\d+\] ")
"""How an error of gloo begins, which is a RuntimeError like any other."""
LEFT = "graphpar_left_"
"""Before the rank, in the store: that this one went without an error."""

GRACE_S = 20.0
"""How long a rank that lost its peer waits to be ended by torchrun before it reports that itself."""

SETTLING_S = 0.1
"""How long gloo's threads get to release their last results. These hold tensors, so releasing them needs the interpreter; if it exits
meanwhile, the process aborts although all of its work is done."""

SHOWN = 4
"""How many ranks' own messages an error shows before it counts the rest."""

USER_ERROR = 2
"""The exit status when the user must change something."""

LOOPBACK = ("127.0.0.1", "localhost")
"""Addresses that only this machine reaches."""

LAUNCHED = "GRAPHPAR_LAUNCHED"
"""Set in the environment by a launcher that reads the ranks' error files and reports the error itself."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the number of ranks, its device, and the backend of its process group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


@contextmanager
def start(timeout_s: float = 600.0) -> Iterator[Ranks]:
    """Join the process group for the length of the block: nccl with a GPU for every local rank, else gloo.

    Without torchrun's variables in the environment this is a group of one. A collective or a transfer that
    takes longer than ``timeout_s`` fails. If the block raises, the message goes to standard error and to
    torchrun, and the process exits (status 2 for a ``RuntimeProgramError``, else 1); a group of one that torchrun did
    not start raises ``SystemExit`` with it, so that a notebook goes on.
    """
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    try:
        ranks = _join(timeout_s)
        yield ranks
        _leave()
    except SystemExit as error:
        if not error.code:
            _leave()
        raise
    except Exception as error:
        fail(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(SETTLING_S)


class StopSignal:
    """Notes a SIGTERM, so that training can save and end after the step that is under way. A second one ends the process at once."""

    def __init__(self, ranks: Ranks) -> None:
        # On the CPU, so that no rank waits for its device.
        self._group = dist.new_group(backend="gloo") if ranks.backend != "gloo" and ranks.world_size > 1 else None
        self._alone = ranks.world_size == 1
        self._noted = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._noted = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def received(self) -> bool:
        """Return whether any rank was asked to end; a collective call."""
        if self._alone:
            return self._noted
        noted = torch.tensor(float(self._noted))
        dist.all_reduce(noted, op=dist.ReduceOp.MAX, group=self._group)
        return bool(noted)


def on_gpus(ranks: int) -> bool:
    """Whether so many ranks on this machine have a GPU each."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks and dist.is_nccl_available()


def _join(timeout_s: float) -> Ranks:
    under_torchrun = "RANK" in os.environ
    if under_torchrun and isinstance(sys.stdout, io.TextIOWrapper):
        # Lines at once and whole: torchrun starts ranks so that each piece of a line is written by itself.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    on_gpu = on_gpus(local_world)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    own = _local_store(rank, world_size, timeout) if local_world == world_size else None
    if own is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(rank, world_size, local_rank, device, backend)


def _local_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Make the store of ranks of one machine, which no other machine can reach; None where torchrun's own serves them."""
    if "RANK" not in os.environ:
        return HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ.get("MASTER_ADDR") not in LOOPBACK:
        return None
    address = LOOPBACK[0], int(os.environ["MASTER_PORT"])
    loops = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loops:  # the backends' own sockets, too, listen where only this machine reaches them
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loops[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loops[0])
    listener = socket.create_server(address).detach() if rank == 0 else None
    return TCPStore(*address, world_size, rank == 0, timeout, master_listen_fd=listener)


def _leave() -> None:
    """Note that this rank goes without an error, for one that still waits for it."""
    with suppress(RuntimeError, ValueError):  # there is no group any more, or no store
        dist.distributed_c10d._get_default_store().set(f"{LEFT}{dist.get_rank()}", "")


def _have_left() -> list[int]:
    """Return the ranks that have gone without an error; none where the store has gone, too."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return [rank for rank in range(dist.get_world_size()) if store.check([f"{LEFT}{rank}"])]
    except (RuntimeError, ValueError):
        return []


def fail(error: Exception) -> None:
    """Report ``error`` as this rank's own failure and exit, or wait to be ended if only a peer was lost."""
    cause = root_cause(error)
    secondary = lost_peer(error)
    rank = int(os.environ.get("RANK", "0"))
    user, message = isinstance(cause, RuntimeProgramError), str(cause)
    cause_text = re.sub(r"^\[.*?\] *", "", message) if secondary else ""
    if isinstance(cause, OSError) and cause.errno in NO_ROOM:
        user, message = True, f"{cause.filename or 'a file'} can't be written: {cause.strerror}"
    elif not user:
        message = f"{type(cause).__name__}: {cause}"
    if secondary:
        left = _have_left()
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
        ended = f"{who} ended without an error while this rank waits for it: it left its loop early, or exited"
        message = f"{ended if left else 'another rank went away, or was waited for too long'} ({cause_text})"
    frames, raised = ("", f"error: {message}\n") if user or secondary else _short_traceback(cause)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": frames + raised, "frames": frames, "timestamp": str(int(time.time()))}
        own = {"rank": str(rank), "time_ns": str(time.time_ns()), "secondary": str(secondary), "user": str(user)}
        own["lost"] = cause_text
        own["agreed"] = str(isinstance(cause, AgreedError))
        Path(path).write_text(
            json.dumps({"message": {"message": message, "extraInfo": {**extra, **own}}}), encoding="utf-8"
        )
    if secondary and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(GRACE_S)
    if LAUNCHED not in os.environ and not (isinstance(cause, AgreedError) and rank != 0):
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in (frames + raised).splitlines()))
    sys.stdout.flush()
    sys.stderr.flush()
    status = USER_ERROR if user else 1
    if "RANK" not in os.environ:  # no other rank waits, and a notebook goes on
        raise SystemExit(status) from error
    os._exit(status)


def _short_traceback(cause: BaseException) -> tuple[str, str]:
    """The frames of the cause without torch's own, which say nothing about the program, and what was raised there."""
    inside = str(Path(torch.__file__).parent)
    summary = traceback.TracebackException.from_exception(cause)
    kept = [frame for frame in summary.stack if not frame.filename.startswith(inside)]
    if kept:
        summary.stack = traceback.StackSummary.from_list(kept)
    return "".join(["Traceback (most recent call last):\n", *summary.stack.format()]), "".join(
        summary.format_exception_only()
    )


def lost_peer(error: BaseException) -> bool:
    """Tell whether ``error`` says no more than that the connection to another rank was lost."""
    cause = root_cause(error)
    if isinstance(cause, dist.DistNetworkError):
        return True
    of_backend = isinstance(cause, dist.DistError) or (
        isinstance(cause, RuntimeError) and FROM_GLOO.match(str(cause)) is not None
    )
    return of_backend and any(sign in str(cause).lower() for sign in PEER_LOSS)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather ``value`` of every rank (of ``group``) on all of them, in the order of the ranks. Pickles it."""
    size = dist.get_world_size(group)
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_tensors(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a tensor of one shape and dtype from every rank of ``group`` on all of them, in the order of the ranks; any dtype."""
    # As bytes: gloo does not know every dtype.
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, flat, group=group)
    return [piece.view(value.dtype).view(value.shape) for piece in gathered]


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to gather every rank's 1-D ``own`` into ``whole``, in the order of the ranks."""
    work: dist.Work = all_gather_single(whole, own, group=group, async_op=True)
    return work


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum every rank's 1-D ``whole`` into equal pieces, this rank's into ``own``."""
    work: dist.Work = reduce_scatter_single(own, whole, group=group, async_op=True)
    return work


def group_timeout(device: torch.device) -> timedelta | None:
    """Return the default group's timeout, for new groups: torch's default would be half an hour."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank (of ``group``) if any has an error, so that no rank waits for one that gave up. A collective call.

    Raises:
        AgreedError: with the message of the rank, or of each rank if they differ.
    """
    own: str | None = None
    if error is not None:
        own = str(error) if isinstance(error, RuntimeProgramError) else f"{type(error).__name__}: {error}"
    messages = gather_objects(own, group)
    if not any(message is not None for message in messages):
        return
    failed = {rank: message for rank, message in enumerate(messages) if message is not None}
    if len(set(messages)) == 1:
        text = str(messages[0])
    else:
        ranks_of: dict[str, list[int]] = {}
        for rank, message in failed.items():
            ranks_of.setdefault(message, []).append(rank)
        parts = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {message}"
            for message, ranks in list(ranks_of.items())[:SHOWN]
        ]
        rest = sum(len(ranks) for ranks in list(ranks_of.values())[SHOWN:])
        text = "; ".join(parts) + (f"; and {rest} more rank{'s' if rest > 1 else ''}" if rest else "")
    raise AgreedError(text) from error


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If the block raises on any rank (of ``group``), every rank raises ``AgreedError``."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    agree(error, group)
