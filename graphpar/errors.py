"""Errors for users: what was found, what was expected, and what to do.

``GraphparError`` is for the user (the command line prints it without a traceback and exits with 2);
``assert`` is for our own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraphparError(ValueError):
    """Something that the user must change."""


class NothingFits(GraphparError):
    """No plan fits in the devices' memory."""


def near_match(name: str, known: Iterable[str]) -> str:
    """Write the suffix ``" Did you mean 'x'?"``; empty when no name is close. Names that begin with ``name`` come first."""
    names = list(known)
    begun = [other for other in names if len(name) > 1 and other.startswith(name)]
    close = begun[:3] or difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not close:
        return ""
    quoted = " or ".join(repr(match) for match in close)
    return f" Did you mean {quoted}?"
