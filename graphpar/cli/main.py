"""The terminal: parse, call the command's module, print.

    graphpar compile | run | verify | check | checkpoint | report | diff | estimate | sweep | calibrate |
             passes | completion

Exit codes: 0 done, 1 a check or a process that was started failed, 2 the user must change something (message, no traceback),
3 our bug (traceback).
Nothing here imports torch, so that ``graphpar --help`` answers at once; each command is a module with its parser, and imports
what its work needs when it runs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from graphpar.cli.commands import COMMANDS, build_parser
from graphpar.cli.output import (
    CHECK_FAILED,
    OUR_BUG,
    USER_ERROR,
    Result,
    discard_stdout,
    prepare_streams,
    stdout_console,
    stdout_to_stderr,
    writing_stdout,
)
from graphpar.errors import GraphparError
from graphpar.text import listed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    prepare_streams()
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the help (0) or what is wrong (2)
        return int(stop.code or 0)
    options.written = []  # what a command writes, it adds
    try:
        with _ended_by_signals():
            with stdout_to_stderr() if options.json else contextlib.nullcontext(), _rare_collections():
                result: Result = COMMANDS[options.command].run(options)
            with writing_stdout():
                if options.json:
                    print(json.dumps(_finite(result.data), allow_nan=False))
                else:
                    result.show(stdout_console())
        return result.code
    except BrokenPipeError:
        discard_stdout()  # the reader has gone, e.g. `| head`
        return 0
    except KeyboardInterrupt as stopped:
        print(_interrupted(options.command, options.written), file=sys.stderr)
        return 128 + (stopped.number if isinstance(stopped, _Ended) else signal.SIGINT)
    except Exception as error:
        return _failed(error)


_WRITE_AS_THEY_GO = ("run", "checkpoint")
"""Commands whose processes write weights and checkpoints, which are not noted."""


def _interrupted(command: str, written: Sequence[str]) -> str:
    """Say what a command that was interrupted leaves behind."""
    if written:
        return f"Interrupted; it had written {listed(written, 4)}."
    return "Interrupted." if command in _WRITE_AS_THEY_GO else "Interrupted; nothing was written."


class _Ended(KeyboardInterrupt):
    """A signal that ends a command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as Ctrl-C does, with its processes and temporary folders."""

    def end(number: int, frame: object) -> None:
        raise _Ended(number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may set handlers
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: graphs are many objects that live as long as a command, and scanning them again and again
    is slow."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _finite(data: Any) -> Any:
    """``data`` with infinities and NaN as words, since JSON has no such numbers."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _failed(error: Exception) -> int:
    """Print an error: a message if the user can act on it, else a traceback. Returns the exit code."""
    if _is_for_user(error):
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    if (runtime := sys.modules.get("graphpar.runtime.errors")) is not None and isinstance(error, runtime.LaunchError):
        print(f"{error.details}\nerror: {error}".lstrip(), file=sys.stderr)
        return CHECK_FAILED
    if _no_room(error):
        what = getattr(error, "filename", None) or "Standard output or a file"
        print(f"error: {what} can't be written: {getattr(error, 'strerror', error)}.", file=sys.stderr)
        discard_stdout()
        return USER_ERROR
    traceback.print_exception(error)
    print("error: this is a bug in graphpar, or something that it should have refused with a message.", file=sys.stderr)
    return OUR_BUG


def _no_room(error: Exception) -> bool:
    """Tell whether a disk is full, or takes nothing."""
    if not isinstance(error, OSError):
        return False
    from graphpar.runtime.errors import NO_ROOM

    return error.errno in NO_ROOM


def _is_for_user(error: Exception) -> bool:
    """Tell whether an error is a message for users; the runtime's errors are known only once it is imported."""
    if isinstance(error, GraphparError | PermissionError | NotADirectoryError | FileExistsError):
        return True
    runtime = sys.modules.get("graphpar.runtime.errors")
    if runtime is None:
        return False
    return isinstance(error, runtime.RuntimeProgramError) or (isinstance(error, runtime.LaunchError) and error.user)


if __name__ == "__main__":
    sys.exit(main())
