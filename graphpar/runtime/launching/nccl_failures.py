"""What NCCL and its watchdog say when they end ranks, as one sentence: which group, which operation, which rank is missing.

    [rank1]:[E626 06:24:44 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, ...)
    [rank1]:[E626 06:24:44 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 5(tp) Rank 1] Exception (...) detected by watchdog at work: 808, last
        enqueued NCCL work: 811, last completed NCCL work: 807.
    [rank1]: ... NCCL error: remote process exited or there was a network error, NCCL version 2.27.3 ... Last error: socketProgress: ...

The watchdog is a thread in C++, which ends the process by SIGABRT: no exception of Python says any of this.

    python -m graphpar.runtime.launching.nccl_failures JOB.log ...        of a job that launch.sh or Slurm has started
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = re.compile(r"^\[(?:rank|default)(\d+)\]: ?", re.MULTILINE)
"""How torch, and torchrun with --tee, begin a line with the rank."""
TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+),.*?\) ran for (?P<ms>\d+) milliseconds before timing out"
)
STATE = re.compile(
    r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>\w+)(?:\((?P<group>[^)]*)\))?)? Rank (?P<rank>\d+)\] .*?"
    r"at (?:NCCL )?work: (?P<number>\d+), last enqueued NCCL work: (?P<enqueued>-?\d+)"
)
LOST = re.compile(r"ncclRemoteError|remote process exited or there was a network error")
LAST_ERROR = re.compile(r"Last error:\s*\n?(?:\[rank\d+\]:? ?)?(?P<text>[^\n]+)")
OPERATIONS = {
    "ALLREDUCE": "all-reduce", "_ALLGATHER_BASE": "all-gather", "ALLGATHER": "all-gather", "_REDUCE_SCATTER_BASE": "reduce-scatter",
    "REDUCE_SCATTER": "reduce-scatter", "BROADCAST": "broadcast", "ALLTOALL": "all-to-all", "ALLTOALL_BASE": "all-to-all",
    "SEND": "send", "RECV": "receive", "COALESCED": "transfers between stages", "GATHER": "gather", "SCATTER": "scatter",
}  # fmt: skip
"""torch's names of operations."""
WHERE = "The flight recorder of each rank is in /tmp/nccl_trace_rank_RANK (TORCH_FR_DUMP_TEMP_FILE)."


@dataclass(frozen=True)
class Waiting:
    """A rank whose operation ran out of time."""

    rank: int
    operation: str
    number: int
    seconds: float


@dataclass(frozen=True)
class At:
    """How far a rank had come in a group: the operation that failed, and the last one that it has started."""

    rank: int
    group: str
    number: int
    enqueued: int


def named(logs: Mapping[int | None, str], ranks: int | None = None) -> str | None:
    """Return what NCCL says in the ranks' logs as one sentence; None where it says nothing.

    Args:
        logs: by rank; None for a log of several ranks, whose lines begin with theirs.
        ranks: how many there are, if those that say nothing are to be named.
    """
    waiting: dict[int, Waiting] = {}
    states: list[At] = []
    lost: list[tuple[int | None, str]] = []
    for own, text in logs.items():
        for rank, part in _by_rank(text, own):
            for found in TIMEOUT.finditer(part):
                at = rank if rank is not None else int(found["rank"])
                operation = OPERATIONS.get(found["operation"], found["operation"].lower().strip("_"))
                waiting.setdefault(at, Waiting(at, operation, int(found["number"]), int(found["ms"]) / 1000))
            for found in STATE.finditer(part):
                group = found["group"] or f"number {found['guid'] or found['id']}"
                at = rank if rank is not None else int(found["rank"])
                states.append(At(at, group, int(found["number"]), int(found["enqueued"])))
            if LOST.search(part):
                last = LAST_ERROR.search(part)
                lost.append((rank, last["text"].strip() if last else "remote process exited, or a network error"))
    if waiting:
        return _timeout(list(waiting.values()), states, ranks)
    if lost:
        rank, why = lost[0]
        who = "a rank" if rank is None else f"rank {rank}"
        return f"{who} lost another rank, which ended, or the network between them failed (NCCL: {why})"
    return None


def _by_rank(text: str, own: int | None) -> list[tuple[int | None, str]]:
    """The lines of each rank, as one text."""
    parts: dict[int | None, list[str]] = {}
    rank = own
    for line in text.splitlines():
        found = PREFIX.match(line)
        rank = int(found[1]) if found and own is None else rank
        parts.setdefault(rank, []).append(line)
    return [(rank, "\n".join(lines)) for rank, lines in parts.items()]


def _timeout(waiting: Sequence[Waiting], states: Sequence[At], ranks: int | None) -> str:
    """The sentence of the operation that ran out of time first in its group: the one of the lowest number."""
    first = min(waiting, key=lambda each: each.number)
    group = next((at.group for at in states if (at.rank, at.number) == (first.rank, first.number)), None)
    alike = sorted(each.rank for each in waiting if (each.operation, each.number) == (first.operation, first.number))
    behind = sorted({at.rank for at in states if at.group == group and at.enqueued < first.number} - set(alike))
    silent = sorted(set(range(ranks or 0)) - {each.rank for each in waiting} - {at.rank for at in states})
    shown = "of the default group" if group in ("default_pg", "0") else f"of the group {group}" if group else ""
    what = f"{first.operation} {shown} (number {first.number})".replace("  ", " ")
    text = f"{_ranks(alike)} waited {first.seconds:.0f} s for the {what}"
    if behind:
        text += f", which {_ranks(behind)} had not started"
    elif silent:
        text += f"; {_ranks(silent)} said nothing, and may never have started it"
    return f"{text}. {WHERE}"


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    listed = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


if __name__ == "__main__":
    missing = [file for file in sys.argv[1:] if not Path(file).is_file()]
    if missing or not sys.argv[1:]:
        sys.exit(f"there is no file {', '.join(missing)}" if missing else "name the logs of a job")
    text = "\n".join(Path(file).read_text(encoding="utf-8", errors="replace") for file in sys.argv[1:])
    print(named({None: text}) or "NCCL says nothing there")
