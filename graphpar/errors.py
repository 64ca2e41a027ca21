"""Errors for users: what was found, what was expected, and what to do.

``GraphparError`` is for the user (the command line prints it without a traceback and exits with 2); ``assert`` is for our own bugs.
"""

from __future__ import annotations

from graphpar.runtime.errors import GraphparError, near_match

__all__ = ["GraphparError", "NothingFits", "near_match"]


class NothingFits(GraphparError):
    """No plan fits in the devices' memory."""
