"""Errors for users: what was found, what was expected, and what to do. ``assert`` is for our own bugs."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""The errors of a disk that is full, or that takes nothing."""


class GraphparError(ValueError):
    """Something that the user must change before a program is made: the model, the options, the plan."""


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


_LIKE = 0.6


def _likeness(name: str, other: str) -> float:
    """How much two names are alike, from 0 to 1: in those of their parts that differ, else a long part that is equal would do."""
    parts, others = name.split("."), other.split(".")
    if len(parts) != len(others):
        return difflib.SequenceMatcher(None, name, other).ratio() - 0.15
    numbers = [a.isdecimal() and b.isdecimal() for a, b in zip(parts, others)]
    ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(parts, others)]
    return min(_LIKE if number and ratio < 1 else ratio for number, ratio in zip(numbers, ratios))


def near_match(name: str, known: Iterable[str]) -> str:
    """Write the suffix ``" Did you mean 'x'?"``; empty when no name is close. Names that begin with ``name`` come first."""
    names = list(known)
    begun = [other for other in names if len(name) > 1 and other.startswith(name)]
    close = begun[:3]
    if not begun:  # none that is much farther than the nearest
        near = {match: _likeness(name, match) for match in difflib.get_close_matches(name, names, n=20, cutoff=0.6)}
        least = max(_LIKE, max(near.values(), default=0.0) - 0.05)
        close = [match for match, likeness in near.items() if likeness >= least][:3]
    if not close:
        return ""
    quoted = " or ".join(repr(match) for match in close)
    return f" Did you mean {quoted}?"


def root_cause(error: BaseException) -> BaseException:
    """Find the exception at the bottom of a chain of ``raise ... from ...``, or the first that is for the user."""
    while error.__cause__ is not None and not isinstance(error, RuntimeProgramError):
        error = error.__cause__
    return error
