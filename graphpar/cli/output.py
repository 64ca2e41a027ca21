"""What the commands share: their result, progress on the terminal, and a clean standard output for ``--json``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.errors import GraphparError, near_match
from graphpar.runtime.checkpoints.folders import RECORD
from graphpar.text import wrapped

if TYPE_CHECKING:
    from rich.console import Console

DONE, CHECK_FAILED, USER_ERROR, OUR_BUG = 0, 1, 2, 3
"""Exit codes."""


@dataclass(frozen=True)
class Result:
    """The result of a command: the object that ``--json`` prints, how to print it for people, and the exit code."""

    data: dict[str, Any]
    show: Callable[[Console], None]
    code: int = DONE


def prepare_streams() -> None:
    """Make standard streams that take everything: closed ones become the null device, and a character that one lacks a question mark."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, as by `>&-`; the next file opened gets the lowest free number
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  it stays open
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  it stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def discard_stdout() -> None:
    """Send what standard output still holds, and all that follows, to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Write what the block prints to the end.

    Raises:
        GraphparError: standard output doesn't take it, such as a file on a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:  # of another file
            raise
        discard_stdout()
        raise GraphparError(f"Standard output can't be written: {error.strerror or error}.") from error


def stdout_console() -> Console:
    """Make a console on standard output: as wide as the terminal or as COLUMNS says, or 100 columns where neither says it."""
    from rich.console import Console

    return Console(width=shutil.get_terminal_size((100, 25)).columns, highlight=False, emoji=False, markup=False)


def print_wrapped(console: Console, lines: Iterable[str]) -> None:
    """Print lines unchanged where they fit; else wrapped and indented, with no name or price broken."""
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()) + 4)
        console.out("\n".join(wrapped(line, console.width, then=margin)), highlight=False)


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on the terminal while the block runs, and yield a function that shows another instead.

    Nothing is shown where standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line as each phase of the block begins; nothing where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    with console.status("") as status:

        def phase(text: str) -> None:
            console.print(f"[{time.monotonic() - began:5.0f} s] {text}", markup=False)
            status.update(text)

        yield phase


@contextlib.contextmanager
def steps_shown(steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line at once; in a terminal a bar below follows the lines ``step N``."""
    if not sys.stdout.isatty():
        yield lambda line: print(f" {line}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn(" steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps)

        def show(line: str) -> None:
            bar.console.print(f" {line}", markup=False, highlight=False, soft_wrap=True)
            if found := re.match(r"step +(\d+) ", line):
                bar.update(task, completed=int(found[1]) + 1)

        yield show


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send everything that the block prints, from Python, libraries or child processes, to standard error."""
    sys.stdout.flush()
    saved = None
    with contextlib.suppress(OSError, ValueError):  # a stream without a file, as under tests
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def write_text(path: str | Path, text: str, written: list[str]) -> None:
    """Write a file that the user asked for, whole or not at all; its folder must exist. Its path is added to ``written``."""
    check_writable(path)
    target = Path(os.path.realpath(path))
    whole = target if target.exists() and not target.is_file() else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        whole.write_text(text, encoding="utf-8")
        if whole is not target:
            whole.replace(target)
    except OSError as error:
        raise GraphparError(f"{path} can't be written: {error.strerror or error}.") from error
    finally:
        if whole is not target:
            whole.unlink(missing_ok=True)
    written.append(str(path))


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, before its content is computed.

    Raises:
        GraphparError: it can't; the message says why.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise GraphparError(f"{target} can't be written: the folder {target.parent} does not exist.")
    if target.is_dir():
        raise GraphparError(f"{target} can't be written: it is a folder; name a file.")
    try:
        if target.exists():
            target.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise GraphparError(f"{target} can't be written: {error.strerror or error}.") from error


def program_folder(path: str | Path, *, runs: bool = True) -> Path:
    """Check that ``path`` is the folder of an emitted program; unless it ``runs``, of a plan, as a checkpoint is.

    Raises:
        GraphparError: it is not; the message says what is there instead.
    """
    folder = Path(path)
    if runs and (folder / RECORD).is_file():
        raise GraphparError(f"{folder} is a checkpoint; name the folder that graphpar compile wrote.")
    if (folder / "plan.json").is_file():
        return folder
    if folder.is_dir():
        raise GraphparError(
            f"{folder} holds no graphpar program: there is no plan.json in it; name the folder that graphpar compile wrote."
        )
    if folder.exists():
        raise GraphparError(f"{folder} is a file; name the folder that graphpar compile wrote.")
    parent = folder.parent
    others = [entry.name for entry in parent.iterdir() if (entry / "plan.json").is_file()] if parent.is_dir() else []
    raise GraphparError(f"There is no folder {folder}.{near_match(folder.name, others)}")
