"""How nouns are shown. Who draws them registers here (:mod:`graphpar.api` does), so that they need not know of it."""

from __future__ import annotations

from functools import singledispatch
from html import escape


@singledispatch
def as_text(value: object) -> str:
    """What ``str`` gives."""
    return repr(value)


@singledispatch
def as_page(value: object) -> str:
    """What a notebook shows, as HTML."""
    return f"<pre>{escape(repr(value))}</pre>"
