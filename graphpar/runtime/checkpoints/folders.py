"""The folders of checkpoints: which ones are there and whole, who writes, and how one becomes whole.

ckpt/.100.OWNER.part ──all of it on disk──► ckpt/100 ──► ckpt/latest, ckpt/best        all but the first while ckpt/.lock is held

OWNER names the machine and the process that writes; nobody else touches the folder, unless that process has ended.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpar.runtime.errors import RuntimeProgramError, near_match

RECORD, LATEST, BEST, PLAN, LOCK, BOXES = "checkpoint.json", "latest", "best", "plan.json", ".lock", ".distcp"
MEMORY = Path("/dev/shm")
"""Where snapshots are kept: a folder in memory that outlives processes."""
FORMAT = 2
"""The version of ``checkpoint.json``."""
PEEK_S = 0.05
"""Seconds between two looks at a lock."""
HELD_S = 30.0
"""How long a process of another machine may hold a lock, which takes milliseconds, before it is taken to have ended; and how long one waits
for a process of this machine, which is there."""
IDLE_S = 3600.0
"""For how long nothing of another machine's unfinished checkpoint has changed before it is removed."""

_numbers = itertools.count()  # of what this process writes


# ---- what is there ---------------------------------------------------------------------------------------------------


def find(path: str | Path, fits: Callable[[Path], bool] = lambda _: True) -> Path:
    """Find the checkpoint that ``path`` is or names (``ckpt/best``), or the latest one in it: of those that fit, where there are any.

    Raises:
        RuntimeProgramError: there is none.
    """
    folder = Path(path)
    if folder.is_file() and folder.name in (LATEST, BEST):
        folder = folder.with_name(named(folder))
    elif not (folder / RECORD).is_file() and (folder / LATEST).is_file():
        folder = folder / named(folder / LATEST)
    for each in (folder, beside(folder, "old")):  # old: it was being replaced by another of its name
        if (each / RECORD).is_file():
            others = [] if folder == Path(path) or fits(each) else whole_checkpoints(folder.parent)
            return next(filter(fits, reversed(others)), each)
    whole = whole_checkpoints(folder)
    if whole:  # the first ones, saved by processes that were ended before they wrote `latest`
        return next(filter(fits, reversed(whole)), whole[-1])
    others = whole_checkpoints(folder.parent)
    names = [each.name for each in others]
    if folder != Path(path):
        there = f"; there are {', '.join(names)}, of which you may name one" if names else ""
        file = path if Path(path).is_file() else Path(path) / LATEST
        raise RuntimeProgramError(f"{file} names {folder.name}, which is not there{there}")
    raise RuntimeProgramError(
        f"{path} is neither a checkpoint nor a folder of checkpoints.{near_match(folder.name, names)}"
    )


def named(file: Path) -> str:
    """Return the name of the checkpoint that ``latest`` or ``best`` names: one beside it, and nowhere else."""
    folder = file.parent
    name = file.read_text(encoding="utf-8", errors="replace").strip()
    if file.is_symlink() or Path(name).name != name or name.startswith(".") or (folder / name).is_symlink():
        raise RuntimeProgramError(
            f"{file} must name a folder next to it, but names {name!r}, or is a link; name the checkpoint itself"
        )
    return name


def is_in(path: str | Path) -> bool:
    """Return whether ``path`` is a checkpoint, or has one, be it damaged."""
    folder = Path(path)
    return (folder / RECORD).is_file() or (folder / LATEST).is_file() or bool(whole_checkpoints(folder))


def whole_checkpoints(folder: Path, model: str | None = None) -> list[Path]:
    """List the checkpoints in a folder, of ``model`` or of all, in the order in which they were saved."""
    found: dict[Path, float] = {}
    for record in folder.glob(f"[!.]*/{RECORD}"):
        with contextlib.suppress(RuntimeProgramError):  # one that somebody has damaged
            content = read_record(record.parent)
            if not record.parent.is_symlink() and model in (None, content.get("model")):
                found[record.parent] = content["time"]
    return sorted(found, key=lambda each: found[each])


def model_of(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Name a model by its tensors, so that those of several models may be in one folder: ``model`` in ``checkpoint.json``."""
    listed = sorted({(name, tuple(shape)) for name, shape in shapes})
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def damaged(folder: Path, what: str) -> RuntimeProgramError:
    """The error of a checkpoint that is damaged; it names the others in its folder."""
    others = sorted(record.parent.name for record in folder.parent.glob(f"[!.]*/{RECORD}") if record.parent != folder)
    there = (
        f"; there {'are' if len(others) > 1 else 'is'} {', '.join(others)}, which you may name instead"
        if others
        else ""
    )
    return RuntimeProgramError(f"{folder} is damaged: {what}{there}")


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``, and compare its own sum and those of the small files beside it.

    Raises:
        RuntimeProgramError: it is damaged, or of another version.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{RECORD} can't be read ({error})") from error
    fields = ("format", "step", "time", "data", "seed", "steps_done", "ties", "optimizer", "loss_scale")
    lacking = [field for field in fields if not isinstance(record, dict) or field not in record]
    if lacking:
        raise damaged(folder, f"{RECORD} can't be read (it lacks {', '.join(lacking)})")
    if record["format"] != FORMAT:
        raise RuntimeProgramError(
            f"{folder / RECORD} has the format {record['format']!r}, and this version of graphpar reads {FORMAT}: with the version that "
            f"saved it, `graphpar checkpoint merge` writes its weights for --weights"
        )
    sums = record.get("crc32")
    if not isinstance(sums, dict) or sums.get(RECORD) != _own_sum(record):
        raise damaged(folder, f"{RECORD} does not match its checksum")
    for name, crc in sums.items():
        if name != RECORD and _crc32(folder / name) != crc:
            what = "does not match its checksum" if (folder / name).is_file() else "is missing"
            raise damaged(folder, f"{name} {what}")
    return dict(record)


def _record_or_nothing(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(RuntimeProgramError):
        return read_record(folder)
    return {}


def _own_sum(record: Mapping[str, Any]) -> int:
    """The sum of ``checkpoint.json``'s content, apart from the sum itself."""
    others = {name: crc for name, crc in record["crc32"].items() if name != RECORD}
    return zlib.crc32(json.dumps({**record, "crc32": others}, sort_keys=True).encode())


def _crc32(path: Path) -> int | None:
    return zlib.crc32(path.read_bytes()) if path.is_file() else None


def beside(folder: Path, kind: str) -> Path:
    """Return the hidden folder beside a checkpoint: "old" while another takes its place, "OWNER.part" while it is written or removed."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.parent / f".{named.name}.{kind}"


# ---- who writes ------------------------------------------------------------------------------------------------------


@functools.cache
def _machine() -> str:
    """Name what process ids are counted in: the machine since it was started, or a container of it."""
    known = [socket.gethostname()]
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text, lambda: os.readlink("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            known.append(read())
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def started(pid: int) -> str | None:
    """Say when a process was started, so that another one of its number is told from it; None where it has ended."""
    if not Path("/proc/self/stat").is_file():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return "0"
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _owner() -> str:
    """Name this process, and one of the things that it writes."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{started(pid)}-{next(_numbers)}"


def _has_ended(owner: str) -> bool | None:
    """Return whether the process of this name has ended; None where that can't be known, since it is another machine's."""
    found = re.fullmatch(r"([0-9a-f]{8})-(\d+)-(\d+)-\d+", owner)
    if found is None or found[1] != _machine():
        return None
    return started(int(found[2])) != found[3]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of checkpoints; its file says who does. It is made by one call that fails where it is there, on NFS too.

    One of a process that has ended is taken away. Should a lock be taken from a process that goes on after all, renaming still leaves
    every checkpoint whole.

    Raises:
        RuntimeProgramError: another process holds it, and goes on to.
    """
    lock, owner = folder / LOCK, _owner()
    own = json.dumps({"owner": owner, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}).encode()
    seen, since = None, time.monotonic()
    while True:
        try:
            number = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            break
        except FileExistsError:
            held = _content(lock)
        if held != seen:
            seen, since = held, time.monotonic()
        holder = _json(held)
        ended = _has_ended(str(holder.get("owner")))
        waited = time.monotonic() - since > HELD_S
        if held is not None and (ended or (ended is None and waited)):
            _take_away(lock, held, owner)
        elif waited:
            raise RuntimeProgramError(
                f"{folder} is held by process {holder.get('pid')} on {holder.get('host')}, which saves there and makes no progress "
                f"({lock}); end it, or save into another folder"
            )
        time.sleep(PEEK_S)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(own)
        yield
    finally:
        if own.startswith(_content(lock) or b""):  # the disk may have been full
            lock.unlink(missing_ok=True)


def _take_away(lock: Path, held: bytes, owner: str) -> None:
    """Remove a lock whose file has this content; another one's that came in its place meanwhile is put back."""
    taken = lock.with_name(f"{LOCK}.{owner}")
    with contextlib.suppress(FileNotFoundError):
        lock.rename(taken)
        if _content(taken) == held:
            taken.unlink(missing_ok=True)
        else:
            taken.rename(lock)


def _content(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _json(content: bytes | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(content or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


# ---- writing one -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A checkpoint that this process writes, until it is whole.

    Attributes:
        target: where it will be.
        folder: where it is written.
        before: the ``checkpoint.json`` that was at ``target`` when it was begun.
    """

    target: Path
    folder: Path
    before: bytes | None

    def finish(self, record: Mapping[str, Any], plan: bytes | None, keep: int | None, best: bool = False) -> None:
        """Make it whole, as all of its tensors are written, then the latest; then remove all but the last ``keep`` of its model, and
        the best.

        Raises:
            RuntimeProgramError: another process has saved one of this name since this one was begun.
        """
        if plan is not None:
            _write_synced(self.folder / PLAN, plan)
        whole = write_record(self.folder, record)
        _sync(self.folder)
        parent, old = self.target.parent, beside(self.target, "old")
        with _locked(parent):
            self._check_alone()
            if self.target.exists():
                remove(old)
                self.target.rename(old)
            self.folder.rename(self.target)
            for file in (BEST, LATEST) if best else (LATEST,):
                new = parent / f".{file}"
                _write_synced(new, f"{self.target.name}\n".encode())
                new.replace(parent / file)
            _sync(parent)
            kept = named(parent / BEST) if (parent / BEST).is_file() else None
            surplus = [] if keep is None else whole_checkpoints(parent, whole.get("model"))[:-keep]
            surplus = [each for each in surplus if each.name != kept]
            surplus += [each for each in parent.glob(".*.old") if each.with_name(each.name[1:-4]).exists()]
            removed = [folder.rename(beside(folder, f"{_owner()}.part")) for folder in surplus]
        for folder in removed:
            remove(folder)

    def _check_alone(self) -> None:
        now = _content(self.target / RECORD)
        if now not in (None, self.before):
            by = _json(now).get("by") or {}
            raise RuntimeProgramError(
                f"{self.target} was saved by process {by.get('pid')} on {by.get('host')} while this one was being written, and is kept: "
                "two runs, or two models, that save under one name need separate folders"
            )

    def drop(self) -> None:
        """Remove what was written, if it did not become whole."""
        remove(self.folder)


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``checkpoint.json``, with who wrote it and the sums of the small files that are there; returns what was written."""
    small = [file for file in sorted(folder.iterdir()) if file.suffix != BOXES]
    sums: dict[str, int | None] = {file.name: _crc32(file) for file in small}
    by = {"host": socket.gethostname(), "pid": os.getpid()}
    whole: dict[str, Any] = json.loads(json.dumps({**record, "by": by, "crc32": sums}))
    whole["crc32"][RECORD] = _own_sum(whole)
    _write_synced(folder / RECORD, json.dumps(whole, indent=1).encode())
    return whole


def begin(target: Path, model: str | None) -> Part:
    """Make the folder that a checkpoint of ``model`` is written into, as :func:`begin_beside`.

    Raises:
        RuntimeProgramError: something else is there, or a checkpoint of another model.
    """
    if target.is_symlink() or (target.exists() and not (target / RECORD).is_file()):
        raise RuntimeProgramError(f"{target} exists and is not a checkpoint; save into a new folder")
    if _record_or_nothing(target).get("model") not in (None, model):
        raise RuntimeProgramError(
            f"{target} is a checkpoint of another model, which is kept: checkpoints of several models need different names"
        )
    return begin_beside(target, _content(target / RECORD) if target.is_dir() else None)


def begin_beside(target: Path, before: bytes | None = None) -> Part:
    """Make a folder to write into beside ``target``, which is made of it when all is written; and remove what processes have left that
    were ended in the middle."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Part(target, beside(target, f"{_owner()}.part"), before)
    part.folder.mkdir()
    now = part.folder.stat().st_mtime  # by the clock of the disk
    for left in target.parent.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            ended = _has_ended(left.name.split(".")[-2])
            if ended or (
                ended is None and now - max(each.stat().st_mtime for each in (left, *left.iterdir())) > IDLE_S
            ):
                remove(left)
    return part


def remove(folder: Path) -> None:
    """Remove a folder, if it is there, of which others may remove parts meanwhile."""
    while folder.is_dir() and not folder.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
