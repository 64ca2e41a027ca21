"""Where ranks meet, and on which devices: agreed before any process group is made.

    variables of torchrun, srun or mpirun ──► rank, store ──► each rank says what it sees ──rank 0──► "cuda", "cpu", or why not

A rank alone can't know: a node whose driver fails, or a launcher that shows each rank one GPU, looks like a machine with too few. So all
have the same kind of device, or all end with the same sentence.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from graphpar.runtime.errors import AgreedError, RuntimeProgramError
from graphpar.runtime.plan_record import read_object

LOOPBACK = ("127.0.0.1", "localhost")
"""Addresses that only this machine reaches."""
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""The variables of launchers: a process's rank, how many there are, and its number on its node. torchrun's are those that are used."""
DEVICE = "GRAPHPAR_DEVICE"
"""Set in the environment by a launcher that has counted this machine's GPUs: what is asked for, where a script asks for nothing."""
PORT = 29500
SHOWN = 4
"""How many nodes a message shows before it counts the rest."""
READ_S = 10.0
"""How long rank 0, which may have the store, stays for others to read why they end."""
_PLACE, _START = "graphpar_device", "graphpar_start"
_PEEK_S = 0.02
"""Seconds between two looks of rank 0 at who has come."""


def on_gpus(ranks: int) -> bool:
    """Whether so many ranks on this machine have a GPU each."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks and dist.is_nccl_available()


def read_launcher() -> None:
    """Set torchrun's variables where another launcher has started this process.

    Raises:
        RuntimeProgramError: nothing says where ranks meet, or a rank is given without their number.
    """
    rank, size, local = LAUNCHERS["torchrun"]
    for name in LAUNCHERS:
        own = LAUNCHERS[name]
        if rank in os.environ or int(os.environ.get(own[1], "1")) < 2 or own[0] not in os.environ:
            continue
        os.environ.update({rank: os.environ[own[0]], size: os.environ[own[1]]})
        node = _first_node(name)
        if "MASTER_ADDR" not in os.environ and node is None:
            raise RuntimeProgramError(
                f"{name} has started ranks on several nodes: set MASTER_ADDR to the node of rank 0"
            )
        os.environ.setdefault("MASTER_ADDR", node or "")
        os.environ.setdefault("MASTER_PORT", str(PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000))
    if (rank in os.environ) != (size in os.environ):
        present, missing = (rank, size) if rank in os.environ else (size, rank)
        raise RuntimeProgramError(f"{present} is set and {missing} is not: set both, as torchrun does, or neither")
    for name in (rank, size, local, "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise RuntimeProgramError(f"{name} is set to {os.environ[name]!r}, which is no number")
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if rank in os.environ and name not in os.environ]
    if unset:
        raise RuntimeProgramError(
            f"{rank} is set and {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not: set where rank 0 is to be found, as "
            "torchrun does"
        )
    for *_, given in LAUNCHERS.values():
        if rank in os.environ and given in os.environ:
            os.environ.setdefault(local, os.environ[given])


def _first_node(launcher: str) -> str | None:
    """The node of rank 0, where the launcher says it; this machine's own address if there is no other."""
    if launcher == "mpirun":
        sizes = [os.environ.get(f"OMPI_COMM_WORLD_{of}") for of in ("SIZE", "LOCAL_SIZE")]
        return LOOPBACK[0] if sizes[0] == sizes[1] else None
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        return LOOPBACK[0]
    listed = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ.get("SLURM_STEP_NODELIST", ""))  # node[01-04,7],other
    return listed and listed[1] + (listed[2] or "")


def open_store(timeout: timedelta) -> Store:
    """Make or find the store of all ranks; that of ranks of one machine is reached by no other.

    Raises:
        RuntimeProgramError: its port is in use, or some ranks don't come.
    """
    if "RANK" not in os.environ:
        return HashStore()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        return _opened(rank, size, timeout)
    except (OSError, dist.DistError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error):
            raise RuntimeProgramError(
                f"{place} is in use, so rank 0 can't be found there: set MASTER_PORT to another port on all ranks"
            ) from error
        raise RuntimeProgramError(
            f"the {size} ranks of WORLD_SIZE have not all met at {place} within {timeout.total_seconds():g} s: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _opened(rank: int, size: int, timeout: timedelta) -> Store:
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if (
        shared
        or os.environ.get("MASTER_ADDR") not in LOOPBACK
        or os.environ.get("LOCAL_WORLD_SIZE") not in (None, str(size))
    ):
        found: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        return of_this_start(found, rank, size, timeout) if shared else found
    address = LOOPBACK[0], int(os.environ["MASTER_PORT"])
    loops = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loops:  # the backends' own sockets, too, listen where only this machine reaches them
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loops[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loops[0])
    listener = socket.create_server(address).detach() if rank == 0 else None
    return TCPStore(*address, size, rank == 0, timeout, master_listen_fd=listener)


def of_this_start(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a store without the keys of earlier starts: torchrun's outlives ranks, and has the addresses of those that have ended.

    Each rank takes a name that was never used, and rank 0 answers all of them with its own, which comes before the keys of this start.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{_START}/{rank}", own)
    if rank:
        start = store.get(f"{_START}/{own}").decode()
        store.add(f"{_START}/{start}/joined", 1)
        return PrefixStore(start, store)
    answered = set[bytes]()
    while size > 1 and store.add(f"{_START}/{own}/joined", 0) < size - 1:
        names = store.multi_get(
            [f"{_START}/{each}" for each in range(1, size)]
        )  # of a start before, until the rank has come
        for name in set(names) - answered:
            store.set(f"{_START}/{name.decode()}", own)
        answered.update(names)
        if time.monotonic() > deadline:
            raise TimeoutError("some have not come again")
        time.sleep(_PEEK_S)
    return PrefixStore(own, store)


PRIORITY = ("tp", "pp")
"""Axes whose messages the next operator waits for: on nccl they have streams of high priority, so that they get their share of the device
before products that were started with them, such as those of gradients of weights."""


def read_plan(program: str | Path | None) -> tuple[str | None, Mapping[str, int] | None]:
    """Return the kind of device that an emitted program's plan is for, and its degrees above 1; None where it is not known."""
    with suppress(RuntimeProgramError, OSError, AttributeError):  # what is wrong with it, the pipeline says
        plan = read_object(Path(program) / "plan.json") if program is not None else {}
        kind, mesh = (plan.get("cluster") or {}).get("device", {}).get("kind"), plan.get("mesh")
        return kind, mesh and {axis: int(degree) for axis, degree in mesh.items() if degree != 1}
    return None, None


def check_size(ranks: int, degrees: Mapping[str, int], script: str | Path) -> None:
    """Check that there are as many ranks as a plan has.

    Raises:
        RuntimeProgramError: there are others; the message says how to start ``script``.
    """
    expected = math.prod(degrees.values())
    if ranks != expected:
        mesh = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        raise RuntimeProgramError(
            f"the program runs on {expected} rank{'s' if expected > 1 else ''} ({mesh or 'one device'}), "
            f"but {ranks} {'were' if ranks > 1 else 'was'} started. "
            f"Start it with: torchrun --nproc-per-node {expected} {os.path.relpath(script)}"
        )


@dataclass(frozen=True)
class Seen:
    """What a rank sees of GPUs: how many, and the identity of the one that it would take; empty where none is left for it."""

    node: str
    gpus: int = 0
    gpu: str = ""
    error: str = ""


def see(local_rank: int) -> Seen:
    """Look for this rank's GPU: number ``local_rank`` of those that are visible, or the only one."""
    node = socket.gethostname()
    try:
        gpus = torch.cuda.device_count()
        index = _index(local_rank, gpus)
        return Seen(node, gpus, str(torch.cuda.get_device_properties(index).uuid) if index < gpus else "")
    except (RuntimeError, AssertionError) as error:  # a driver that fails
        return Seen(node, error=str(error).strip().partition("\n")[0])


def _index(local_rank: int, gpus: int) -> int:
    return 0 if gpus == 1 else local_rank


def agreed_device(store: Store, asked: str | None, planned: str | None) -> torch.device:
    """Return this rank's device, of the kind that all ranks have.

    Args:
        asked: "cpu" or "cuda".
        planned: that of the plan.

    Raises:
        AgreedError: on all ranks, if some that need a GPU have none.
    """
    rank, size, local = (int(os.environ.get(name, usual)) for name, usual in zip(LAUNCHERS["torchrun"], "010"))
    own = Seen(socket.gethostname()) if asked == "cpu" else see(local)
    store.set(f"{_PLACE}/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        seen = [Seen(**json.loads(store.get(f"{_PLACE}/{each}"))) for each in range(size)]
        store.set(f"{_PLACE}/kind", json.dumps(decide(seen, asked, planned)))
    kind, problem = json.loads(store.get(f"{_PLACE}/kind"))
    if problem is not None:
        store.add(f"{_PLACE}/read", 1)
        deadline = time.monotonic() + READ_S
        while rank == 0 and store.add(f"{_PLACE}/read", 0) < size and time.monotonic() < deadline:
            time.sleep(0.05)
        raise AgreedError(problem)
    return torch.device("cuda", _index(local, own.gpus)) if kind == "cuda" else torch.device("cpu")


def decide(seen: Sequence[Seen], asked: str | None, planned: str | None) -> tuple[str, str | None]:
    """Return the kind of device for all ranks, and what is in the way: GPUs, wherever a rank sees one, unless CPUs are asked for."""
    if asked == "cpu" or (asked is None and planned != "cuda" and not any(each.gpus for each in seen)):
        return "cpu", None
    nodes: dict[str, dict[int, Seen]] = {}
    for rank, each in enumerate(seen):
        nodes.setdefault(each.node, {})[rank] = each
    lacking = [
        _lacking(node, of) for node, of in nodes.items() if len({each.gpu for each in of.values()} - {""}) < len(of)
    ]
    if not lacking and dist.is_nccl_available():
        return "cuda", None
    why = "--device cuda asks for it" if asked else "the plan is for GPUs" if planned == "cuda" else "GPUs are visible"
    what = "; ".join(lacking[:SHOWN]) + (f"; and {len(lacking) - SHOWN} more nodes" if len(lacking) > SHOWN else "")
    return "cuda", (
        f"each rank needs a GPU of its own ({why}), but {what or 'this torch has no NCCL'}. Start a rank for each GPU of a node, "
        "or run on CPUs with --device cpu"
    )


def _lacking(node: str, ranks: Mapping[int, Seen]) -> str:
    gpus, used = max(each.gpus for each in ranks.values()), len({each.gpu for each in ranks.values()} - {""})
    first, last = min(ranks), max(ranks)
    text = f"{node} has {gpus} GPU{'s' if gpus != 1 else ''} for {len(ranks)} rank{'s' if len(ranks) != 1 else ''}"
    text += f" ({first} to {last})" if first != last else f" ({first})"
    if gpus >= len(ranks) and used:
        text += f", of which they would share {used}: LOCAL_RANK is to number the ranks of a node"
    error = next((each.error for each in ranks.values() if each.error), "")
    return f"{text}: {error}" if error else text
