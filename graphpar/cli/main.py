"""The terminal: parse, call the command's module, print.

    graphpar compile | run | verify | check | checkpoint | report | diff | estimate | sweep | calibrate |
             passes | completion

Exit codes: 0 done, 1 a check or a process that was started failed, 2 the user must change something (message, no traceback),
3 our bug (traceback).
Nothing here imports torch, so that ``graphpar --help`` answers at once; the module of a command is imported when it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

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
from graphpar.cli.parser import COMMANDS, build_parser
from graphpar.errors import GraphparError
from graphpar.runtime.errors import NO_ROOM, LaunchError, RuntimeProgramError
from graphpar.text import listed


def command() -> int:
    """Run one command as a process of its own; returns its exit code.

    Graphs are many objects that live as long as a command, and scanning them again and again is slow, so garbage is
    collected rarely, and not when the process ends.
    """
    gc.set_threshold(400_000, 50, 100)
    code = main()
    gc.freeze()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    prepare_streams()
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the help (0) or what is wrong (2)
        return int(stop.code or 0)
    options.written = []  # what a command writes, it adds
    came: list[int] = []
    try:
        with _ended_by_signals(came):
            with stdout_to_stderr() if options.json else contextlib.nullcontext():
                module, _, function = COMMANDS[options.command].function.partition(".")
                result: Result = getattr(importlib.import_module(f"graphpar.cli.{module}"), function)(options)
            with writing_stdout():
                if options.json:
                    print(json.dumps(_finite(result.data), allow_nan=False))
                else:
                    result.show(stdout_console())
        return result.code
    except BrokenPipeError:
        discard_stdout()  # the reader has gone, e.g. `| head`
        return 0
    except (KeyboardInterrupt, Exception) as error:
        if not came and isinstance(error, Exception):
            return _failed(error)
        print(_interrupted(options.command, options.written), file=sys.stderr)
        return 128 + (came[0] if came else signal.SIGINT)


_FOR_USERS = (GraphparError, RuntimeProgramError, PermissionError, NotADirectoryError, FileExistsError)
"""Errors whose messages are for users."""
_WRITE_AS_THEY_GO = ("run", "checkpoint", "resume")
"""Commands whose processes write weights and checkpoints, which are not noted."""


def _interrupted(command: str, written: Sequence[str]) -> str:
    """Say what a command that was interrupted leaves behind."""
    if written:
        return f"Interrupted; it had written {listed(written, 4)}."
    return "Interrupted." if command in _WRITE_AS_THEY_GO else "Interrupted; nothing was written."


@contextlib.contextmanager
def _ended_by_signals(came: list[int]) -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as Ctrl-C does, with its processes and temporary folders.

    Those that came are added to ``came``, as what is imported meanwhile may make another error of the interrupt.
    """

    def end(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if threading.current_thread() is not threading.main_thread():
        ours = {}  # only the main thread may set handlers
    ours = {number: was for number, was in ours.items() if was in (signal.SIG_DFL, signal.default_int_handler)}
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, was in ours.items():
            signal.signal(number, was)


def _finite(data: Any) -> Any:
    """``data`` with infinities and NaN as words, since JSON has no such numbers."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _failed(error: Exception) -> int:
    """Print an error: a message if the user can act on it, else a traceback. Returns the exit code."""
    if isinstance(error, _FOR_USERS) or (isinstance(error, LaunchError) and error.user):
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return USER_ERROR
    if isinstance(error, LaunchError):
        print(f"{error.details}\nerror: {error}".lstrip(), file=sys.stderr)
        return CHECK_FAILED
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        what = error.filename or "Standard output or a file"
        print(f"error: {what} can't be written: {error.strerror or error}.", file=sys.stderr)
        discard_stdout()
        return USER_ERROR
    traceback.print_exception(error)
    print("error: this is a bug in graphpar, or something that it should have refused with a message.", file=sys.stderr)
    return OUR_BUG


if __name__ == "__main__":
    sys.exit(command())
