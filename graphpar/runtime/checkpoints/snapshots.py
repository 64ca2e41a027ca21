"""Snapshots in memory: what a checkpoint has, on each node and on the next one, from which training goes on after ranks are lost.

    rank ──copy──► host memory ──in the background──► memory of its node (/dev/shm) ──► that of the next node
    start ──► the newest snapshot of which each rank's part is intact on some node ──moves──► the ranks that need it, under any plan

    /dev/shm/graphpar-RUN/MODEL.STEP.RANKS.START/RANK/     the files of a checkpoint, with the boxes of one rank
    ckpt/snapshots                                         RUN

A launcher ends all ranks when one fails, so a snapshot is in files, in memory that outlives processes. The last two are kept: while one is
written, the one before it is complete. A start takes one up only if the latest checkpoint is still the one that was the latest then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

from graphpar.runtime.checkpoints.checkpoint import Progress, Saver, Shapes, Source, copied, is_of, latest, recorded
from graphpar.runtime.checkpoints.folders import is_in, model_of, read_record, remove, write_record
from graphpar.runtime.checkpoints.resharding import BUCKET_BYTES, Resharding
from graphpar.runtime.checkpoints.saved_state import State
from graphpar.runtime.checkpoints.tensor_chunks import Entry
from graphpar.runtime.checkpoints.tensor_files import (
    BoxReader,
    StoredTensor,
    check_places,
    held_of,
    needed_of,
    read_tensors,
    sizes_of,
    write_boxes,
)
from graphpar.runtime.checkpoints.weight_transfer import all_ranks, exchange, group_of
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import group_timeout

RUN = "snapshots"
"""The file next to the checkpoints that names their run."""
KEPT = 2
"""Snapshots that a node has at a time."""
BOX_BYTES = 4096
"""The most bytes that the file of a box has besides its values, with what says where it is."""

Parts = dict[str, StoredTensor]


class Snapshots:
    """The snapshots of one run. Making it, and all methods but :meth:`saved`, are collective calls.

    Args:
        checkpoints: the folder of the run's checkpoints, which all machines share.
        memory: a folder in the memory of each node.
        saver: of the checkpoints.

    Attributes:
        nodes: where each rank is.
        notes: what a start has to say of snapshots that it does not take up.

    Raises:
        RuntimeProgramError: there is no such folder, or it is somebody else's.
    """

    def __init__(self, checkpoints: Path, memory: Path, saver: Saver, device: torch.device) -> None:
        self.checkpoints, self.memory, self._saver, self._device = checkpoints, memory, saver, device
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        with agreed():
            if not memory.is_dir():
                raise RuntimeProgramError(
                    f"there is no folder {memory} for snapshots; name one in memory, such as a RAM disk's, with --snapshots"
                )
            own = (_run_of(checkpoints), secrets.token_hex(4)) if self._rank == 0 else None
        self._run, self._start = gather_objects(own)[0]
        with agreed():
            self._root = _own_folder(_root_of(memory, self._run, checkpoints))
        self.nodes: list[str] = gather_objects(_node_of(self._root))
        self._near = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self._rank]]
        self.notes: list[str] = []
        self._kept: list[str] = []  # names of snapshots, of which the last may not be complete
        self._after: list[float | None] | None = None  # on rank 0: which checkpoints may be the latest
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._copy: Tensor | None = None
        self._to: ProcessGroup | None = None
        self._from: dict[int, ProcessGroup] = {}
        self._connected = False

    # ---- saved ----

    def save(self, state: State, progress: Progress, *, step: int, data: Mapping[str, Any] | None) -> None:
        """Copy what a checkpoint has into the host's memory; it is written and sent while training goes on.

        Raises:
            RuntimeProgramError: the one before it could not be kept, or a node has too little memory.
        """
        self.wait()
        record, entries, shapes = recorded(state, progress, step, data)
        # From here on all ranks have kept the one before.
        name = f"{record['model']}.{step}.{self._size}.{self._start}"
        with agreed():
            _own_folder(self._root)  # another model of the run, which has ended, may have removed it
            if self._rank == 0:
                _run_of(self.checkpoints, self._run)
            record["after"] = self._may_be_latest(shapes) if self._rank == 0 else []
        if not self._connected:
            self._connect(sum(box.values.nbytes + BOX_BYTES for each in entries.values() for box in each.boxes))
        if name in self._kept:
            return
        entries, self._copy = copied(entries, self._copy)
        self._kept = [*self._kept[1 - KEPT :], name]
        if self._rank == self._near[0]:
            for other in self._root.glob(f"{record['model']}.*"):
                if other.name not in self._kept:
                    remove(other)
        folder = self._root / name
        works: list[Callable[[], None]] = [partial(self._write, folder, entries, record)]
        works += [partial(_received, group, folder, str(source)) for source, group in self._from.items()]
        self._threads = [threading.Thread(target=self._noting, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _write(self, folder: Path, entries: Mapping[str, Entry], record: Mapping[str, Any]) -> None:
        part, files = folder / f".{self._rank}.part", list[Path]()
        try:
            part.mkdir(parents=True)
            write_boxes(part, entries)
            write_record(part, record)
            files = sorted(part.rename(folder / str(self._rank)).iterdir())
        finally:  # the other rank waits for it
            if self._to is not None:
                _send(self._to, files)

    def _noting(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._errors.append(error)

    def wait(self) -> None:
        """Wait until all ranks have kept their parts of the last snapshot.

        Raises:
            AgreedError: on all ranks, if one could not.
        """
        for thread in self._threads:
            thread.join()
        self._threads, errors, self._errors = [], self._errors, []
        with agreed():
            if errors:
                gone = isinstance(errors[0], FileNotFoundError)
                raise RuntimeProgramError(
                    f"a snapshot can't be kept in {self.memory}: {type(errors[0]).__name__}: {errors[0]}"
                    + (f"; has another start that saves into {self.checkpoints} removed it?" if gone else "")
                )

    def saved(self, time: float) -> None:
        """Note that a checkpoint has been begun, which this time names."""
        if self._after is not None:
            self._after = [self._after[-1], time]

    def _may_be_latest(self, shapes: Shapes) -> list[float | None]:
        """The times of those checkpoints that may be the latest when this start ends."""
        if self._after is None:
            there = latest(self.checkpoints, shapes) if is_in(self.checkpoints) else None
            self._after = [None if there is None or not is_of(there, shapes) else read_record(there)["time"]]
        return self._after if self._saver.pending else self._after[-1:]

    def _connect(self, nbytes: int) -> None:
        """Check that nodes have memory enough, and connect this rank to those to which and from which it sends.

        Raises:
            RuntimeProgramError: a node has too little.
        """
        targets = [_on_next(rank, self.nodes) for rank in range(self._size)]
        sources = [rank for rank, target in enumerate(targets) if target == self._rank]
        sizes = gather_objects(nbytes)
        with agreed():
            here = self._near + [rank for rank, target in enumerate(targets) if target in self._near]
            required, found = KEPT * sum(sizes[rank] for rank in here), os.statvfs(self.memory)
            used = sum(file.stat().st_size for file in self._root.rglob("*") if file.is_file())
            free = found.f_bavail * found.f_frsize + used
            if required > free:
                raise RuntimeProgramError(
                    f"snapshots take {required:,} bytes of {self.memory} on {socket.gethostname()}, which has {free:,}: name a folder "
                    "with more memory with --snapshots, or enlarge it, such as by `mount -o remount,size=...`"
                )
        target, timeout = targets[self._rank], group_timeout(self._device) or timedelta(minutes=30)
        store = PrefixStore(f"graphpar_snapshots/{self._start}", dist.distributed_c10d._get_default_store())
        others = {*sources, *(() if target is None else (target,))}
        for pair in sorted(
            tuple(sorted((self._rank, other))) for other in others
        ):  # of all, the first can always be made
            place = pair.index(self._rank)
            prefix = PrefixStore("-".join(map(str, pair)), store)
            group = group_of(prefix, place, 2, torch.device("cpu"), timeout)
            if pair[1 - place] == target:
                self._to = group
            if pair[1 - place] in sources:
                self._from[pair[1 - place]] = group
        self._connected = True

    def close(self) -> None:
        """Wait for the last one, and leave what is kept where it is."""
        try:
            self.wait()
        finally:
            self._to, self._copy = None, None
            self._from.clear()

    def drop(self, shapes: Shapes) -> None:
        """Remove the snapshots of the model that has these tensors, as its training has ended; those of other models stay."""
        self.wait()
        with agreed():
            if self._rank == self._near[0]:
                for each in self._root.glob(f"{model_of(shapes.items())}.*"):
                    remove(each)
                with suppress(OSError):  # it has others
                    self._root.rmdir()
        left = gather_objects(self._root.is_dir())
        with agreed():
            if self._rank == 0 and not any(left):
                (self.checkpoints / RUN).unlink(missing_ok=True)

    # ---- loaded ----

    def newest(self, shapes: Shapes) -> Source | None:
        """Find the newest snapshot of the model that has these tensors which is whole, intact, and of the latest checkpoint."""
        model = model_of(shapes.items())
        with agreed():
            base = self._may_be_latest(shapes)[-1] if self._rank == 0 else None
            there = self._there(model)
        base, everyone = gather_objects(base)[0], gather_objects(there)
        ranks: dict[str, set[int]] = {}
        heads: dict[str, tuple[float, list[float | None]]] = {}
        for own in everyone:
            for name, (held, head) in own.items():
                ranks.setdefault(name, set()).update(held)
                heads |= {} if head is None else {name: head}
        for name in sorted(heads, key=lambda each: (_step(each), heads[each][0]), reverse=True):
            if len(ranks[name]) < _ranks(name):
                self.notes.append(f"the snapshot of step {_step(name)} is not complete")
            elif base not in heads[name][1]:
                self.notes.append(
                    f"the snapshot of step {_step(name)} was not taken after the checkpoint that is the latest now"
                )
            elif (source := self._source(name)) is not None:
                self._kept = [name]
                return source
        return None

    def _there(self, model: str) -> dict[str, tuple[set[int], tuple[float, list[float | None]] | None]]:
        """List the snapshots on this node: of which ranks, and of rank 0's when it was saved, and after which checkpoints."""
        found = {}
        for folder in self._root.glob(f"{model}.*.*.*"):
            held = {int(each.name) for each in folder.iterdir() if each.name.isdecimal()}
            head = None
            if 0 in held:
                with suppress(RuntimeProgramError):
                    record = read_record(folder / "0")
                    head = record["time"], record["after"]
            found[folder.name] = held, head
        return found

    def _source(self, name: str) -> Source | None:
        """Read where the tensors of a snapshot are, of which each rank of a node checks its share; None where too much is damaged."""
        good: dict[int, tuple[Parts, dict[str, Any]]] = {}
        bad: list[str] = []
        here = self._root / name
        held = sorted(int(each.name) for each in here.glob("[0-9]*")) if here.is_dir() else []
        for rank in held[self._near.index(self._rank) :: len(self._near)]:
            try:
                stored = read_tensors(here / str(rank))
                check_places(here / str(rank), [place for each in stored.values() for place in each.boxes.values()])
                good[rank] = stored, read_record(here / str(rank))
            except (RuntimeProgramError, OSError) as error:
                bad.append(str(error).partition("; there ")[0])
        everyone = gather_objects((good, bad))
        self.notes += [text for _, texts in everyone for text in texts]
        if len({rank for own, _ in everyone for rank in own}) < _ranks(name):
            self.notes.append(f"the snapshot of step {_step(name)} is not complete without what is damaged")
            return None
        record = next(own[0][1] for own, _ in everyone if 0 in own)
        by_node: dict[str, Parts] = {}
        for node, (own, _) in zip(self.nodes, everyone):
            for stored, _ in own.values():
                _add(by_node.setdefault(node, {}), stored)
        sizes = {path: size for stored in by_node.values() for path, size in sizes_of(stored).items()}

        def fill(entries: Mapping[str, Entry]) -> None:
            needed = gather_objects(needed_of(entries))
            held = {node: held_of(stored) for node, stored in by_node.items()}
            with agreed():
                moves = Resharding([held.get(node, {}) for node in self.nodes], needed, self.nodes, strict=False)
                outgoing, incoming = moves.of(self._rank)
            reader = BoxReader(by_node.get(self.nodes[self._rank], {}))
            exchange(all_ranks(self._device), outgoing, incoming, reader.view, entries)

        return Source(here, record, sizes, lambda _: None, fill)


def _add(parts: Parts, stored: Mapping[str, StoredTensor]) -> None:
    for key, each in stored.items():
        boxes = parts[key].boxes if key in parts else {}
        parts[key] = replace(each, boxes=boxes | each.boxes)


def _step(name: str) -> int:
    return int(name.split(".")[1])


def _ranks(name: str) -> int:
    return int(name.split(".")[2])


def _run_of(checkpoints: Path, name: str | None = None) -> str:
    """Return the name of the run that saves into a folder of checkpoints; its file gets ``name``, or a new one, where it has none."""
    file = checkpoints / RUN
    found = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if not re.fullmatch(r"[0-9a-f]{16}", found):
        found, new = name or secrets.token_hex(8), checkpoints / f".{RUN}"
        checkpoints.mkdir(parents=True, exist_ok=True)
        new.write_text(f"{found}\n", encoding="utf-8")
        new.replace(file)
    return found


def _root_of(memory: Path, run: str, checkpoints: Path) -> Path:
    """Return where a run keeps its snapshots; a copied folder of checkpoints is another run."""
    digest = hashlib.sha256(f"{run} {checkpoints.resolve()}".encode()).hexdigest()
    return memory / f"graphpar-{digest[:16]}"


def has_left(checkpoints: Path, memory: Path) -> bool:
    """Return whether a run that saves into this folder of checkpoints may have snapshots in this node's memory."""
    return (checkpoints / RUN).is_file() and memory.is_dir()


def _own_folder(folder: Path) -> Path:
    """Make a folder that nobody else reads or writes.

    Raises:
        RuntimeProgramError: somebody else has made it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise RuntimeProgramError(f"{folder} belongs to somebody else, or is a link; remove it")
    return folder


def _node_of(folder: Path) -> str:
    """Name the node that has a folder in its memory: ranks that see one folder are on one node."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    found = folder.stat()
    return f"{machine}:{found.st_dev}:{found.st_ino}"


def _on_next(rank: int, nodes: Sequence[str]) -> int | None:
    """Return the rank of the same place on the next node, to which a rank sends; None where there is one node."""
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    own, after = nodes[rank], order[(order.index(nodes[rank]) + 1) % len(order)]
    place = [each for each, node in enumerate(nodes) if node == own].index(rank)
    there = [each for each, node in enumerate(nodes) if node == after]
    return there[place % len(there)]


# ---- messages ------------------------------------------------------------------------------------------------------


def _send(group: ProcessGroup, files: Sequence[Path]) -> None:
    """Send the files of a folder to the other rank of a group of two; none where they could not be written."""
    other = 1 - group.rank()
    listed = json.dumps([[file.name, file.stat().st_size] for file in files]).encode()
    for values in (torch.tensor([len(listed)]), torch.frombuffer(bytearray(listed), dtype=torch.uint8)):
        group.send([values], other, 0).wait()
    room = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    for path in files:
        with path.open("rb") as file:
            while count := file.readinto(room.numpy().data):
                group.send([room[:count]], other, 0).wait()


def _received(group: ProcessGroup, folder: Path, name: str) -> None:
    """Write what the other rank sends as a folder of this name, if it has sent any.

    Raises:
        OSError: a file can't be written; the rest was received, too, so that the other rank does not wait.
    """
    size, part, errors = torch.zeros(1, dtype=torch.int64), folder / f".{name}.part", list[OSError]()
    group.recv([size], 1 - group.rank(), 0).wait()
    listed = torch.empty(int(size), dtype=torch.uint8)
    group.recv([listed], 1 - group.rank(), 0).wait()
    sizes = json.loads(listed.numpy().tobytes())
    for file_name, count in sizes:
        pieces = _pieces(group, count)
        try:
            part.mkdir(parents=True, exist_ok=True)
            with (part / Path(file_name).name).open("wb") as file:
                for piece in pieces:
                    file.write(piece.numpy().data)
        except OSError as error:
            errors.append(error)
            for _ in pieces:
                pass
    if errors:
        raise errors[0]
    if sizes:
        part.rename(folder / name)


def _pieces(group: ProcessGroup, left: int) -> Iterator[Tensor]:
    """Receive so many bytes from the other rank of a group of two, in pieces that are valid until the next one."""
    room = torch.empty(min(left, BUCKET_BYTES), dtype=torch.uint8)
    while left:
        piece = room[:left]
        group.recv([piece], 1 - group.rank(), 0).wait()
        left -= len(piece)
        yield piece
