"""What the runtime raises: one class for what the user must change, one for a launch that failed."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""The errors of a disk that is full, or that takes nothing."""


class RuntimeProgramError(ValueError):
    """Something that the user must change: the batch, the weights, the number of ranks, the emitted folder."""


class AgreedError(RuntimeProgramError):
    """An error that every rank raised together, so that all of them can go on afterwards."""


class LaunchError(RuntimeError):
    """A launched program failed or ran out of time.

    ``rank`` is the rank that failed first (``None`` when it is not known), ``message`` is its own
    message and ``details`` the traceback before it, or the end of what the launch printed. ``user`` says that the
    message is a ``RuntimeProgramError``'s: for the user, who needs no traceback. ``signal`` is the number of the
    signal that ended the rank, if one did.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        details: str = "",
        user: bool = False,
        signal: int | None = None,
    ) -> None:
        super().__init__(message if rank is None else f"rank {rank}{':' if signal is None else ''} {message}")
        self.message = message
        self.rank = rank
        self.details = details
        self.user = user
        self.signal = signal


def near_match(name: str, known: Iterable[str]) -> str:
    """Return a ``" Did you mean 'x'?"`` suffix, or the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def root_cause(error: BaseException) -> BaseException:
    """Find the exception at the bottom of a chain of ``raise ... from ...``, or the first that is for the user."""
    while error.__cause__ is not None and not isinstance(error, RuntimeProgramError):
        error = error.__cause__
    return error
