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
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from graphpar.runtime.debugging import lone_group
from graphpar.runtime.errors import NO_ROOM, AgreedError, RuntimeProgramError, root_cause
from graphpar.runtime.plan_record import kept_report, read_object
from graphpar.runtime.rendezvous import (
    DEVICE,
    LAUNCHERS,
    PRIORITY,
    agreed_device,
    check_size,
    open_store,
    read_launcher,
    read_plan,
)
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

STOP_GRACE_S = 300.0
"""How long a rank that was asked to end has to save; a launcher is asked to wait as long before it kills."""

SETTLING_S = 0.1
"""How long gloo's threads get to release their last results. These hold tensors, so releasing them needs the interpreter; if it exits
meanwhile, the process aborts although all of its work is done."""

SHOWN = 4
"""How many ranks' own messages an error shows before it counts the rest."""

USER_ERROR = 2
"""The exit status when the user must change something."""

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
def start(
    timeout_s: float = 600.0,
    *,
    device: str | None = None,
    program: str | Path | None = None,
    alone: tuple[int, int] | None = None,
    part: tuple[int, int] | None = None,
) -> Iterator[Ranks]:
    """Join the process group for the length of the block: nccl with a GPU for every rank, or gloo on CPUs.

    Without variables of torchrun, srun or mpirun in the environment this is a group of one. Ranks have GPUs if one of them sees any, or if
    the plan is for GPUs; where some then lack one, all end. A collective or a transfer that takes longer than ``timeout_s`` fails. If the
    block raises, the message goes to standard error and to torchrun, and the process exits (status 2 for a ``RuntimeProgramError``, else
    1); a group of one that torchrun did not start raises ``SystemExit`` with it, so that a notebook goes on.

    Args:
        device: "cpu" or "cuda", to ask for it.
        program: the emitted folder, whose plan says what it is for.
        alone: a rank and how many there are: this process is that rank, without the others
            (:mod:`graphpar.runtime.debugging.lone_group`).
        part: the first of the launch's ranks that run this program, and how many do, where others run another one: they are a group of
            their own, whose ranks count from 0.
    """
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    try:
        ranks = _join(timeout_s, device, program, part) if alone is None else _join_alone(*alone, device)
        yield ranks
        note_left()
    except SystemExit as error:
        if not error.code:
            note_left()
        raise
    except Exception as error:
        fail(error, program)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(SETTLING_S)


class StopSignal:
    """Notes a SIGTERM, so that training can save and end after the step that is under way.

    A launcher may send it several times: Slurm to each process of a job step, and torchrun again to its ranks. Within ``STOP_GRACE_S``
    of the first one the others are ignored; later, one ends the process at once.

    Whether any rank has one is known from a sum over all ranks. It travels with one that a step makes anyway, of the gradient's norm
    (:meth:`summed`); only after a step without that there is one of its own.

    Attributes:
        noted: whether this process has had one.
        ended: whether training has ended for one that any rank had.
    """

    noted = ended = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._noted_at: float | None = None
        self._sums: list[
            Callable[[], float]
        ] = []  # of the ranks that were asked to end, as each step of late has counted them
        self._carried = False  # whether the last step has
        self._before = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Let a SIGTERM do again what it did before."""
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: object) -> None:
        now, StopSignal.noted = time.monotonic(), True
        if self._noted_at is None:
            self._noted_at = now
        elif now - self._noted_at > STOP_GRACE_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def summed(self, value: Tensor) -> Tensor:
        """Sum a number over all ranks, and with it how many of them were asked to end; a collective call."""
        both = torch.stack([value, value.new_full((), float(self._noted_at is not None))])
        dist.all_reduce(both)
        if self._carried:  # by another norm of this step
            self._sums.pop()
        self._sums.append(read_later(both[1]))
        self._carried = True
        return both[0]

    def received(self) -> bool:
        """Return whether any rank was asked to end; a collective call.

        On a GPU that is what the step before the last one has counted, so that no rank waits for its device.
        """
        if self._ranks.world_size == 1:
            return self._noted_at is not None
        if not self._carried:
            self.summed(torch.zeros((), device=self._ranks.device))
        self._carried = False
        late = self._ranks.device.type == "cuda"
        return len(self._sums) > late and self._sums.pop(0)() > 0


def read_later(value: Tensor) -> Callable[[], Any]:
    """Start to copy numbers to the host; what is returned waits for them alone, and reads them as ``tolist`` does."""
    if value.device.type != "cuda":
        return value.tolist
    copy, copied = torch.empty_like(value, device="cpu", pin_memory=True), torch.cuda.Event()
    copy.copy_(value, non_blocking=True)
    copied.record()

    def read() -> Any:
        copied.synchronize()
        return copy.tolist()

    return read


def _join(
    timeout_s: float, device: str | None, program: str | Path | None, part: tuple[int, int] | None = None
) -> Ranks:
    read_launcher()
    if "RANK" in os.environ and isinstance(sys.stdout, io.TextIOWrapper):
        # Lines at once and whole: torchrun starts ranks so that each piece of a line is written by itself.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank, world_size, local_rank = (
        int(os.environ.get(name, usual)) for name, usual in zip(LAUNCHERS["torchrun"], ("0", "1", "0"))
    )
    timeout = timedelta(seconds=timeout_s)
    first, count = part or (0, world_size)
    if not (0 <= first <= rank < first + count <= world_size):
        raise RuntimeProgramError(
            f"rank {rank} of {world_size} is in no group of {count} ranks from rank {first} on: part is (first, how many)"
        )
    planned, degrees = read_plan(program)
    if degrees is not None:
        check_size(count, degrees, sys.argv[0])
    store = open_store(timeout)
    where = agreed_device(store, device or os.environ.get(DEVICE), planned)
    if part is not None:
        rank, world_size, store = rank - first, count, PrefixStore(f"ranks from {first}", store)
    backend, options = "gloo", dict[str, Any]()
    if where.type == "cuda":
        torch.cuda.set_device(where)
        # With its device a group has its communicator at once, from which those of the axes are split.
        urgent = [*(degrees or ())] in [[axis] for axis in PRIORITY]
        settings = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        settings._timeout = timeout
        backend, options = "nccl", {"device_id": where, "pg_options": settings}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)
    return Ranks(rank, world_size, local_rank, where, backend)


def _join_alone(rank: int, world_size: int, device: str | None) -> Ranks:
    on_gpu = device != "cpu" and torch.cuda.is_available()
    where = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as a launcher's ranks have
    lone_group.join(rank, world_size)
    return Ranks(rank, world_size, 0, where, lone_group.BACKEND)


def note_left() -> None:
    """Note that this rank goes without an error, for one that still waits for it."""
    with suppress(RuntimeError, ValueError):  # there is no group any more, or no store
        dist.distributed_c10d._get_default_store().set(f"{LEFT}{dist.get_rank()}", "")


def await_left(timeout_s: float) -> None:
    """Wait until all other ranks have left their loops, too.

    Raises:
        RuntimeProgramError: they have not.
    """
    store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
    try:
        store.wait(
            [f"{LEFT}{rank}" for rank in range(dist.get_world_size()) if rank != own], timedelta(seconds=timeout_s)
        )
    except dist.DistStoreError:
        raise RuntimeProgramError(
            "this rank left its loop early, and others did not; training.end_if(condition) ends all ranks together"
        ) from None


def _have_left() -> list[int]:
    """Return the ranks that have gone without an error; none where the store has gone, too."""
    try:
        store = dist.distributed_c10d._get_default_store()
        others = (rank for rank in range(dist.get_world_size()) if rank != dist.get_rank())
        return [rank for rank in others if store.check([f"{LEFT}{rank}"])]
    except (RuntimeError, ValueError):
        return []


def fail(error: Exception, program: str | Path | None = None) -> None:
    """Report ``error`` as this rank's own failure and exit, or wait to be ended if only a peer was lost.

    Args:
        program: the emitted folder, whose plan says how much memory a rank needs.
    """
    status = report(error, program, before_exit)
    if "RANK" not in os.environ:  # no other rank waits, and a notebook goes on
        raise SystemExit(status) from error
    os._exit(status)


def report(
    error: Exception, program: str | Path | None = None, then: Callable[[str, bool], None] = lambda error, lost: None
) -> int:
    """Write ``error`` where torchrun looks for it, do ``then``, and print it; returns the exit status of this rank."""
    cause = root_cause(error)
    secondary = lost_peer(error)
    rank = int(os.environ.get("RANK", "0"))
    user, message = isinstance(cause, RuntimeProgramError), str(cause)
    cause_text = re.sub(r"^\[.*?\] *", "", message) if secondary else ""
    if isinstance(cause, OSError) and cause.errno in NO_ROOM:
        user, message = True, f"{cause.filename or 'a file'} can't be written: {cause.strerror}"
    elif isinstance(cause, torch.OutOfMemoryError):
        user, message = True, f"{message.partition(' See documentation')[0]}{_planned_memory(program, rank)}"
    elif not user:
        message = f"{type(cause).__name__}: {cause}"
    if secondary:
        left = _have_left()
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}"
        ended = (
            f"{who} ended without an error while this rank waits for it: it left its loop early, or exited; training.end_if(condition) "
            "ends all ranks together"
        )
        message = f"{ended if left else 'another rank ended, or the wait for it timed out'} ({cause_text})"
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
    then(message, secondary)
    if LAUNCHED not in os.environ and not (isinstance(cause, AgreedError) and int(os.environ.get("LOCAL_RANK", "0"))):
        named = "" if isinstance(cause, AgreedError) else f"[rank {rank}] "
        sys.stderr.write("".join(f"{named}{line}\n" for line in (frames + raised).splitlines()))
    sys.stdout.flush()
    sys.stderr.flush()
    return USER_ERROR if user else 1


def _await_torchrun(error: str, lost: bool) -> None:
    if lost and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(GRACE_S)


before_exit: Callable[[str, bool], None] = _await_torchrun
"""What a rank that failed does before it says so and exits: given its error, and whether that is only the loss of another rank."""


def _nothing(step: int) -> None:
    pass


after_resume: Callable[[int], None] = _nothing
"""What a rank does once it knows the step from which its training goes on."""


def _planned_memory(program: str | Path | None, rank: int) -> str:
    """Say what the plan expects a rank's memory to hold at its peak, where it was priced."""
    with suppress(RuntimeProgramError, OSError, KeyError, TypeError):
        file = Path(program or "") / "plan.json"
        parts = (kept_report(file, read_object(file)) or {})["predicted"]["memory"]
        own = parts[rank * len(parts) // int(os.environ.get("WORLD_SIZE", "1"))]  # pp is the outermost axis
        sizes = {name.replace("_", " "): size / 2**30 for name, size in own.items() if isinstance(size, int) and size}
        shown = ", ".join(f"{name} {size:.2f}" for name, size in sorted(sizes.items(), key=lambda each: -each[1]))
        return f" The plan expects {sum(sizes.values()):.2f} GiB at this rank's peak: {shown}."
    return ""


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
    if size == 1 or lone_group.is_alone():
        return [value] * size
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_tensors(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather a tensor of one shape and dtype from every rank of ``group`` on all of them, in the order of the ranks; any dtype."""
    # As bytes: gloo does not know every dtype.
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    ranks = dist.get_world_size(group)
    gathered = flat.new_empty(ranks * len(flat))  # of a list NCCL would make another copy
    all_gather_flat(gathered, flat, group).wait()
    return list(gathered.view(value.dtype).view(ranks, *value.shape))


def all_gather_flat(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to gather every rank's 1-D ``own`` into ``whole``, in the order of the ranks."""
    work: dist.Work = all_gather_single(whole, own, group=group, async_op=True)
    return work


def reduce_scatter_flat(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to sum every rank's 1-D ``whole`` into equal pieces, this rank's into ``own``."""
    work: dist.Work = reduce_scatter_single(own, whole, group=group, async_op=True)
    return work


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
