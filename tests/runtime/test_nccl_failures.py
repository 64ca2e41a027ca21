"""What NCCL's watchdog prints, in torch's format, becomes one sentence; what a device has no room for is beside what the plan expects."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from graphpar.runtime import distributed
from graphpar.runtime.launching import launch
from graphpar.runtime.launching.nccl_failures import named
from graphpar.runtime.plan_record import decisions_of

TIMED_OUT = (
    "[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.\n"
)
STATE = (
    "[rank{rank}]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 5({group}) Rank {rank}] Exception (either an error "
    "or timeout) detected by watchdog at work: {number}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
)
OLDER = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG 1 Rank {rank}] Timeout at NCCL work: {number}, last enqueued NCCL work: {enqueued}, "
    "last completed NCCL work: 1.\n"
)
ABORT = (
    "[rank{rank}]:[E626 06:24:45 ProcessGroupNCCL.cpp:681] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the "
    "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
    "[rank{rank}]:[E626 06:24:45 ProcessGroupNCCL.cpp:695] [Rank {rank}] To avoid data inconsistency, we are taking the "
    "entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
REMOTE = (
    "[rank1]:[E827 10:02:11.1 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated "
    "with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.27.3\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\n"
    "socketProgressOpt: Call to recv from 10.0.0.7<33759> failed : Connection reset by peer\n"
)


def _stuck(rank: int, operation: str = "ALLREDUCE", group: str = "tp") -> str:
    values = {"rank": rank, "operation": operation, "number": 808, "group": group, "enqueued": 811, "completed": 807}
    return TIMED_OUT.format(**values) + STATE.format(**values) + ABORT.format(**values)


def test_a_timeout_names_the_group_the_operation_and_who_is_missing() -> None:
    behind = STATE.format(rank=2, number=806, group="tp", enqueued=806, completed=805)
    log = _stuck(0) + _stuck(1) + behind
    expected = "ranks 0, 1 waited 600 s for the all-reduce of the group tp (number 808), which rank 2 had not started. The flight recorder "
    assert (named({None: log}) or "").startswith(expected)


def test_a_rank_that_says_nothing_is_named() -> None:
    logs = {rank: _stuck(rank, "_REDUCE_SCATTER_BASE", "default_pg") if rank else "" for rank in range(3)}
    expected = "ranks 1, 2 waited 600 s for the reduce-scatter of the default group (number 808); rank 0 said nothing, and may never have"
    assert (named(logs, 3) or "").startswith(expected)


def test_the_format_of_older_versions() -> None:
    values = {"rank": 3, "operation": "GATHER", "number": 7, "enqueued": 7}
    found = named({None: TIMED_OUT.format(**values) + OLDER.format(**values)})
    assert (found or "").startswith("rank 3 waited 600 s for the gather of the group number 1 (number 7).")


def test_a_lost_peer_is_said_with_words_of_nccl() -> None:
    assert named({None: REMOTE}) == (
        "rank 1 lost another rank, which ended, or the network between them failed (NCCL: socketProgressOpt: Call to recv from "
        "10.0.0.7<33759> failed : Connection reset by peer)"
    )
    assert named({0: "step 1", 1: "a warning"}, 2) is None


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        (_stuck(1), "NCCL ended it: rank 1 waited 600 s for the all-reduce of the group tp .*; rank 0 said nothing.*"),
        ("terminate called after ...\n  what():  no room in the queue\n", "Native code gave up: no room in the queue"),
        ("", "Native code gave up: it says no more"),
    ],
)  # fmt: skip
def test_an_abort_is_not_called_a_crash(tmp_path: Path, printed: str, message: str) -> None:
    file = tmp_path / "run" / "attempt_0" / "1" / "stderr.log"
    file.parent.mkdir(parents=True)
    file.write_text(printed)
    root = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 1)\n"
    error = launch._error([], 2, True, 60.0, 1, root, launch._Printed(tmp_path, None, None))
    assert launch.re.fullmatch(f"rank 1 was ended by SIGABRT. {message}", str(error)) and error.signal == signal.SIGABRT


def test_what_the_plan_expects_is_beside_what_there_is_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"mesh": {"pp": 2}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    memory = [
        {"parameters": 2**30, "activations": 2**33, "cache": 0},
        {"parameters": 2**31, "activations": 2**32, "cache": 0},
    ]
    report = {"decisions": decisions_of(plan), "report": {"predicted": {"memory": memory}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GRAPHPAR_LAUNCHED", raising=False)
    ended: list[int] = []
    monkeypatch.setattr(distributed.os, "_exit", ended.append)
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.19 GiB of which 1.06 GiB is free. Of the "
        "allocated memory 70.1 GiB is allocated by PyTorch, and 5.2 GiB is reserved by PyTorch but unallocated. See "
        "documentation for Memory Management"
    )
    distributed.fail(torch.OutOfMemoryError(said), tmp_path)
    assert ended == [2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[rank 3] error: CUDA out of memory.") and "documentation" not in line
    assert line.endswith("The plan expects 6.00 GiB at this rank's peak: activations 4.00, parameters 2.00.")
