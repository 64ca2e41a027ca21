"""The folders of checkpoints: which ones are there and whole, and how one becomes whole.

ckpt/.100.part ──all of it on disk──► ckpt/100 ──► ckpt/latest
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpar.runtime.errors import RuntimeProgramError, near_match

RECORD, LATEST, PLAN, METADATA = "checkpoint.json", "latest", "plan.json", ".metadata"
FORMAT = 1
"""The version of ``checkpoint.json``."""


def find(path: str | Path) -> Path:
    """Find the checkpoint that ``path`` is, or the latest one in it.

    Raises:
        RuntimeProgramError: there is none.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file() and (folder / LATEST).is_file():
        folder = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    for each in (folder, beside(folder, "old")):  # old: it was being replaced by another of its name
        if (each / RECORD).is_file():
            return each
    whole = whole_checkpoints(folder)
    if whole:
        return whole[-1]  # the first one, saved by a process that was ended before it wrote `latest`
    others = [each.name for each in whole_checkpoints(folder.parent)]
    if folder != Path(path):
        there = f"; there are {', '.join(others)}, of which you may give one" if others else ""
        raise RuntimeProgramError(f"{Path(path) / LATEST} names {folder.name}, which is not there{there}")
    raise RuntimeProgramError(
        f"{path} is no checkpoint, and no folder of checkpoints.{near_match(folder.name, others)}"
    )


def is_in(path: str | Path) -> bool:
    """Return whether ``path`` is a checkpoint, or has one, be it damaged."""
    folder = Path(path)
    return (folder / RECORD).is_file() or (folder / LATEST).is_file() or bool(whole_checkpoints(folder))


def whole_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, in the order in which they were saved."""
    found: dict[Path, float] = {}
    for record in folder.glob(f"[!.]*/{RECORD}"):
        with contextlib.suppress(RuntimeProgramError):  # one that somebody has damaged
            found[record.parent] = read_record(record.parent)["time"]
    return sorted(found, key=lambda each: found[each])


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``, and compare the sums of the small files beside it.

    Raises:
        RuntimeProgramError: it is damaged, or of another version.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeProgramError(f"{folder} is damaged: {RECORD} can't be read ({error})") from error
    fields = ("format", "step", "time", "data", "seed", "steps_done", "ties", "optimizer", "loss_scale")
    lacking = [field for field in fields if not isinstance(record, dict) or field not in record]
    if lacking or record["format"] != FORMAT:
        what = f"it lacks {', '.join(lacking)}" if lacking else f"its format is {record['format']}, not {FORMAT}"
        raise RuntimeProgramError(f"{folder} is damaged: {RECORD} can't be read ({what})")
    for name, crc in record.get("crc32", {}).items():
        if _crc32(folder / name) != crc:
            what = "has other bytes than were written" if (folder / name).is_file() else "is missing"
            raise RuntimeProgramError(f"{folder} is damaged: {name} {what}")
    return dict(record)


def _crc32(path: Path) -> int | None:
    return zlib.crc32(path.read_bytes()) if path.is_file() else None


def beside(folder: Path, kind: str) -> Path:
    """Return the hidden folder beside a checkpoint: "part" while it is written, "old" while another takes its place."""
    return folder.with_name(f".{folder.name}.{kind}")


def begin(target: Path) -> None:
    """Make the folder that a checkpoint is written into, and remove what processes have left that were ended in the middle.

    Raises:
        RuntimeProgramError: something else is there.
    """
    old = beside(target, "old")
    if (old / RECORD).is_file() and not target.exists():
        old.rename(target)
    if target.exists() and not (target / RECORD).is_file():
        raise RuntimeProgramError(f"{target} is there and is no checkpoint; save into a folder that is new")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in [old, *target.parent.glob(".*.part")]:
        if left.is_dir():
            shutil.rmtree(left)
    beside(target, "part").mkdir()


def finish(target: Path, record: Mapping[str, Any], plan: bytes | None, keep: int | None) -> None:
    """Make a checkpoint whole whose tensors are written, then the latest; then remove all but the last ``keep``."""
    part, old = beside(target, "part"), beside(target, "old")
    if plan is not None:
        _written(part / PLAN, plan)
    sums = {name: _crc32(part / name) for name in (METADATA, PLAN) if (part / name).is_file()}
    _written(part / RECORD, json.dumps({**record, "crc32": sums}, indent=1).encode())
    _sync(part)
    if target.exists():
        target.rename(old)
    part.rename(target)
    new = target.parent / f".{LATEST}"
    _written(new, f"{target.name}\n".encode())
    new.replace(target.parent / LATEST)
    _sync(target.parent)
    surplus = [] if keep is None else whole_checkpoints(target.parent)[:-keep]
    for folder in surplus:
        folder = folder.rename(beside(folder, "part"))
        shutil.rmtree(folder)
    if old.exists():
        shutil.rmtree(old)


def _written(path: Path, content: bytes) -> None:
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
