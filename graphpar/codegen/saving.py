"""Write the emitted package to disk. Its folder is replaced as a whole, but files that the user changed or added are kept.

write ──► hidden folder beside ──rename──► out/     with a record: the hash of every file that graphpar wrote there
out/, its record ──edited files──► refused by name; with ``force``, changed ones are kept as NAME.orig, added ones stay
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphpar.errors import GraphparError
from graphpar.runtime.option_kinds import COMPILED
from graphpar.text import listed

RECORD = ".graphpar.json"
_CACHES = ("__pycache__", COMPILED)
_NAMED = 8


@dataclass(frozen=True)
class EditedFiles:
    """The files in a package's folder that the user changed or added, by path in it."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    recorded: bool = True  # whether the folder says what graphpar wrote

    def __bool__(self) -> bool:
        return bool(self.changed or self.added)

    def __str__(self) -> str:
        groups = {"changed": self.changed, "added": self.added}
        return "; ".join(f"{what} {listed(names, _NAMED)}" for what, names in groups.items() if names)


def edited_files(folder: Path) -> EditedFiles:
    """Find files in ``folder`` that were changed after graphpar wrote them, and files that it did not write."""
    hashes = _record(folder)
    names = list(_files(folder))
    changed = [name for name in names if name in hashes and _hash(folder / name) != hashes[name]]
    added = [name for name in names if name not in hashes and name != RECORD]
    whole = {name.partition("/")[0] for name in added} - {name.partition("/")[0] for name in hashes}
    shown = dict.fromkeys(
        f"{top}/" if "/" in name and (top := name.partition("/")[0]) in whole else name for name in added
    )
    return EditedFiles(tuple(changed), tuple(shown), (folder / RECORD).is_file())


def check_target(folder: str | Path, force: bool = False) -> EditedFiles:
    """Check that a package may be written to ``folder``; return the user's edits in it, which are kept.

    Raises:
        GraphparError: it is not a folder, can't be written, holds something else, or holds edited files and ``force`` is not set.
    """
    target, shown = Path(os.path.realpath(folder)), Path(folder)
    if target.exists() and not target.is_dir():
        raise GraphparError(f"{shown} is a file; name a folder for the program.")
    here = Path.cwd().resolve()
    if target == here or target in here.parents:
        raise GraphparError(
            f"{shown} is the folder that this runs in, and a program's folder is replaced as a unit; name one in it."
        )
    _check_writable(target, shown)
    if not target.exists() or not any(target.iterdir()):
        return EditedFiles()
    if not (target / "plan.json").exists():
        raise GraphparError(f"{shown} exists and holds something other than a graphpar program; choose another folder.")
    found = edited_files(target)
    if found and not force:
        why = f"{shown} holds files that would be lost: {found}."
        if not found.recorded:
            why = f"{shown} has no {RECORD}, so changed files can't be detected: {listed(found.added, _NAMED)}."
        raise GraphparError(
            f"{why} Choose another folder, or keep them with --force (in Python force=True): a rewritten file is kept as NAME.orig, "
            "others are not changed."
        )
    return found


def _check_writable(target: Path, shown: Path) -> None:
    """Make a folder beside the program's and remove it: permissions alone don't tell whether that works."""
    parent = next(folder for folder in target.parents if folder.exists())
    with _write_errors(shown):
        os.rmdir(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))


@contextlib.contextmanager
def _write_errors(shown: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GraphparError(f"{shown} can't be written: {error.strerror or error}.") from error


def save_package(folder: str | Path, write: Callable[[Path], None], force: bool = False) -> None:
    """Replace ``folder`` as a whole by what ``write`` puts into an empty folder; nothing changes if ``write`` fails.

    Raises:
        GraphparError: as :func:`check_target`.
    """
    check_target(folder, force)
    target = Path(os.path.realpath(folder))
    with _write_errors(Path(folder)):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        moved: list[tuple[Path, Path]] = []  # undone in reverse where something fails
        try:
            write(scratch)
            record(scratch, list(_files(scratch)), new=True)
            if target.exists():
                for source, kept in _kept(target, scratch):
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    _move(source, kept, moved)
                _move(target, scratch.with_name(f"{scratch.name}.old"), moved)
            scratch.chmod(0o755)
            _move(scratch, target, moved)
        except BaseException:
            for source, kept in reversed(moved):
                kept.rename(source)
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(scratch.with_name(f"{scratch.name}.old"), ignore_errors=True)


def _move(source: Path, target: Path, moved: list[tuple[Path, Path]]) -> None:
    source.rename(target)
    moved.append((source, target))


def _kept(old: Path, new: Path) -> Iterator[tuple[Path, Path]]:
    """The edited files in ``old``, and where they go in ``new``."""
    hashes = _record(old)
    for name in list(_files(old)):
        if name == RECORD or (name in hashes and _hash(old / name) == hashes[name]):
            continue
        stays = name not in hashes and not os.path.lexists(new / name)
        yield old / name, new / (name if stays else _free(f"{name}.orig", (old, new)))


def _free(name: str, folders: Sequence[Path]) -> str:
    """``name``, or with a number behind it, so that no folder has it."""
    number, free = 2, name
    while any(os.path.lexists(folder / free) for folder in folders):
        free, number = f"{name}.{number}", number + 1
    return free


# ---- the record ------------------------------------------------------------------------------------------------


def record(folder: Path, names: Sequence[str], new: bool = False) -> None:
    """Note that graphpar wrote these files of ``folder`` as they are now. Only a ``new`` folder gets a record if it has none."""
    if not new and not (folder / RECORD).is_file():
        return
    hashes = _record(folder) | {name: _hash(folder / name) for name in names}
    text = json.dumps({"written by graphpar": dict(sorted(hashes.items()))}, indent=1) + "\n"
    (folder / RECORD).write_text(text, encoding="utf-8")


def _record(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / RECORD).read_text(encoding="utf-8"))["written by graphpar"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _hash(file: Path) -> str:
    if file.is_symlink():
        return f"link to {os.readlink(file)}"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(folder: Path, prefix: str = "") -> Iterator[str]:
    """Files and links below ``folder``, in order, without Python's caches."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _CACHES:
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}"
