"""Which device each rank has: launchers and GPUs are played by variables and by what torch says of devices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graphpar.runtime import distributed, rendezvous
from graphpar.runtime.errors import AgreedError, RuntimeProgramError
from graphpar.runtime.rendezvous import (
    LAUNCHERS,
    Seen,
    agreed_device,
    check_size,
    decide,
    of_this_start,
    open_store,
    read_launcher,
    read_plan,
    see,
)

TORCHRUN = {
    "RANK": "13",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "13", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "5", "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "120042",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Give this process the variables of a launcher, and none of another one."""

    def give(variables: Mapping[str, str]) -> None:
        monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})

    yield give


def _gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let torch see GPUs of these names."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=names[index]))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("13", "16", "5", "node0", "29500")),
        (SRUN, ("13", "16", "5", "gpu07", "29542")),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, ("13", "16", "5", "127.0.0.1", "29542")),
        (MPIRUN, ("5", "8", "5", "127.0.0.1", "29500")),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "n1"}, ("5", "8", "5", "n1", "29500")),
        # a user's script that names the ranks, but not their places on a node
        ({**SRUN, "RANK": "13", "WORLD_SIZE": "16", "MASTER_ADDR": "n1", "MASTER_PORT": "5"}, ("13", "16", "5", "n1", "5")),
        # torchrun, started by srun on each node
        ({**SRUN, **TORCHRUN, "SLURM_LOCALID": "0"}, ("13", "16", "5", "node0", "29500")),
    ],
)  # fmt: skip
def test_the_variables_of_launchers(
    launched: Callable[[Mapping[str, str]], None], variables: dict[str, str], expected: tuple[str, ...]
) -> None:
    launched(variables)
    read_launcher()
    assert tuple(os.environ[name] for name in (*LAUNCHERS["torchrun"], "MASTER_ADDR", "MASTER_PORT")) == expected


def test_a_process_alone_in_a_job_is_alone(launched: Callable[[Mapping[str, str]], None]) -> None:
    launched({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"})
    read_launcher()
    assert "RANK" not in os.environ


def test_ranks_of_mpirun_on_several_nodes_must_know_where_they_meet(
    launched: Callable[[Mapping[str, str]], None],
) -> None:
    launched({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    with pytest.raises(
        RuntimeProgramError, match="mpirun has started ranks on several nodes: set MASTER_ADDR to the node of rank 0"
    ):
        read_launcher()


@pytest.mark.parametrize(
    ("local_rank", "visible", "gpu"),
    [(3, ["a", "b", "c", "d"], "d"), (3, ["d"], "d"), (3, ["a", "b"], ""), (0, [], "")],
    ids=["all are visible", "one a task", "too few", "none"],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: list[str], gpu: str
) -> None:
    _gpus(monkeypatch, *visible)
    seen = see(local_rank)
    assert (seen.gpus, seen.gpu, seen.error) == (len(visible), gpu, "")


def test_a_driver_that_fails_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, "a")

    def failing(index: int) -> None:
        raise RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch.cuda, "get_device_properties", failing)
    assert see(0).error == "CUDA error: system not yet initialized"


NODE = [Seen("n0", 4, gpu) for gpu in "abcd"]
MISSES = r"each rank needs a GPU of its own \(%s\), but %s. Start a rank for each GPU of a node, or run on CPUs with --device cpu"


@pytest.mark.parametrize(
    ("seen", "asked", "planned", "kind", "problem"),
    [
        (NODE, None, "cuda", "cuda", None),
        (NODE, None, None, "cuda", None),
        (NODE, None, "cpu", "cuda", None),  # compiled on a laptop, which is what it was priced for
        (NODE, "cpu", "cuda", "cpu", None),
        ([Seen("n0", 1, gpu) for gpu in "ab"], None, "cuda", "cuda", None),  # a launcher that shows each task one
        ([Seen("n0"), Seen("n1")], None, None, "cpu", None),
        ([Seen("n0"), Seen("n1")], None, "cpu", "cpu", None),
        ([Seen("n0"), Seen("n0")], None, "cuda", "cuda", MISSES % ("the plan is for GPUs", r"n0 has 0 GPUs for 2 ranks \(0 to 1\)")),
        ([Seen("n0")], "cuda", None, "cuda", MISSES % ("--device cuda asks for it", r"n0 has 0 GPUs for 1 rank \(0\)")),
        (
            [Seen("n0", 1, "a"), Seen("n0", 1, "a")], None, None, "cuda",
            MISSES % ("GPUs are visible", r"n0 has 1 GPU for 2 ranks \(0 to 1\)"),
        ),
        (
            [*NODE, Seen("n1", 0, "", "no driver"), Seen("n1")], None, None, "cuda",
            MISSES % ("GPUs are visible", r"n1 has 0 GPUs for 2 ranks \(4 to 5\): no driver"),
        ),
        (
            [Seen("n0", 4, "a"), Seen("n0", 4, "a")], None, "cuda", "cuda",
            MISSES % ("the plan is for GPUs", r"n0 has 4 GPUs for 2 ranks \(0 to 1\), of which they would share 1: LOCAL_RANK is .*"),
        ),
        (
            [Seen(f"n{node}") for node in range(9)], None, "cuda", "cuda",
            MISSES % ("the plan is for GPUs", r"n0 .*; n3 has 0 GPUs for 1 rank \(3\); and 5 more nodes"),
        ),
    ],
)  # fmt: skip
def test_all_have_gpus_or_all_have_none(
    monkeypatch: pytest.MonkeyPatch,
    seen: list[Seen],
    asked: str | None,
    planned: str | None,
    kind: str,
    problem: str | None,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    found, why = decide(seen, asked, planned)
    assert found == kind
    if problem is None:
        assert why is None
    else:
        assert why is not None
        assert rendezvous.re.fullmatch(problem, why), why


def test_it_is_agreed_before_any_group_is_made(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[[Mapping[str, str]], None]
) -> None:
    """Rank 1 of two nodes has a GPU, rank 0 has not: both end with the same sentence."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    store, messages = dist.HashStore(), []
    store.set("graphpar_device/1", json.dumps({"node": "n1", "gpus": 1, "gpu": "b", "error": ""}))
    store.add("graphpar_device/read", 1)
    for rank in ("0", "1"):
        launched({"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
        _gpus(monkeypatch, *(["b"] if rank == "1" else []))
        with pytest.raises(AgreedError) as caught:
            agreed_device(store, None, None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "has 0 GPUs for 1 rank (0)" in messages[0]


def test_the_plan_says_what_it_is_for(tmp_path: Path) -> None:
    assert read_plan(None) == read_plan(tmp_path) == (None, None)
    on_gpus = {"device": {"kind": "cuda"}}
    for plan, expected in (
        ({"cluster": None, "mesh": {"pp": 1, "tp": 2}}, (None, {"tp": 2})),
        ({"cluster": on_gpus, "mesh": {"pp": 2, "tp": 2}}, ("cuda", {"pp": 2, "tp": 2})),
        ({"cluster": on_gpus, "mesh": {"dp_shard": 2}}, ("cuda", {"dp_shard": 2})),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        assert read_plan(tmp_path) == expected


def test_a_group_on_gpus_has_its_device_from_the_start(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[[Mapping[str, str]], None], tmp_path: Path
) -> None:
    """The tensor parallel group of all ranks gets the stream of high priority."""
    (tmp_path / "plan.json").write_text(json.dumps({"cluster": {"device": {"kind": "cuda"}}, "mesh": {"tp": 8}}))
    launched({})
    monkeypatch.setattr(distributed, "check_size", lambda *_: None)  # one of 8 ranks
    _gpus(monkeypatch, "a")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: seen.append({"backend": backend, **options})
    )
    ranks = distributed._join(60.0, None, tmp_path)
    assert ranks.device == torch.device("cuda", 0) and seen[0]["backend"] == "nccl"
    assert seen[0]["device_id"] == ranks.device and vars(seen[0]["pg_options"])["is_high_priority_stream"]


def test_a_script_without_gpus_ends_with_the_sentence_on_each_node(tmp_path: Path) -> None:
    """Two ranks of srun on one node, of a plan for GPUs."""
    (tmp_path / "plan.json").write_text(json.dumps({"cluster": {"device": {"kind": "cuda"}}}))
    script = f"from graphpar.runtime import start\nwith start(60, program={str(tmp_path)!r}): pass"
    common = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "MASTER_PORT": "29617",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert "each rank needs a GPU of its own (the plan is for GPUs)" in said[0] and said[1] == ""


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"RANK": "1"}, "RANK is set and WORLD_SIZE"), ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK")],
)
def test_half_of_a_launch_is_a_sentence(
    variables: dict[str, str], said: str, launched: Callable[[Mapping[str, str]], None]
) -> None:
    """One would else wait for the others until the time is up."""
    launched(variables)
    with pytest.raises(RuntimeProgramError, match=f"{said} is not: set both"):
        read_launcher()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set and MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29501"}, "RANK is set and MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is set to 'two', which is no number"),
    ],
)
def test_a_launch_that_says_too_little_is_a_sentence(
    variables: dict[str, str], said: str, launched: Callable[[Mapping[str, str]], None]
) -> None:
    launched(variables)
    with pytest.raises(RuntimeProgramError, match=said):
        read_launcher()


def test_ranks_that_do_not_meet_are_a_sentence(launched: Callable[[Mapping[str, str]], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        launched({**meeting, "MASTER_PORT": str(port)})
        with pytest.raises(RuntimeProgramError, match=f"127.0.0.1:{port} is in use"):
            open_store(timedelta(seconds=1))
    launched({**meeting, "MASTER_PORT": str(port)})
    with pytest.raises(RuntimeProgramError, match="the 2 ranks of WORLD_SIZE have not all met at"):
        open_store(timedelta(seconds=1))


def test_another_number_of_ranks_than_the_plan_s_is_refused_before_they_meet() -> None:
    with pytest.raises(RuntimeProgramError, match=r"runs on 2 ranks \(pp=2\), but 4 were started.*--nproc-per-node 2"):
        check_size(4, {"pp": 2}, "train.py")


def test_a_start_sees_no_keys_of_earlier_ones() -> None:
    """One store, as of a torchrun that restarts its ranks; a start before has left the names of its ranks, which have ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(3):
        server.set(f"graphpar_start/{rank}", f"ended{rank}")

    def come(rank: int) -> dist.Store:
        time.sleep(0.1 * rank)  # rank 0 first sees the others' names of before
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        return of_this_start(client, rank, 3, timedelta(seconds=30))

    with ThreadPoolExecutor() as threads:
        first, second = (list(threads.map(come, range(3))) for _ in range(2))
    first[1].set("key", "first")
    second[2].set("key", "second")
    assert [each.get("key") for each in first] == [b"first"] * 3
    assert [each.get("key") for each in second] == [b"second"] * 3
    with pytest.raises(TimeoutError, match="some have not come again"):
        of_this_start(server, 0, 3, timedelta(seconds=0.1))


def test_a_rank_outside_its_group_is_refused(launched: Callable[[Mapping[str, str]], None]) -> None:
    launched({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with pytest.raises(RuntimeProgramError, match="rank 0 of 4 is in no group of 2 ranks from rank 1 on"):
        distributed._join(1.0, "cpu", None, (1, 2))
