"""How objects such as plans are shown. :mod:`graphpar.api` registers the functions here, so that ``ir`` need not import the report."""

from __future__ import annotations

from functools import singledispatch
from html import escape


@singledispatch
def as_text(value: object) -> str:
    """Return the text that ``str`` returns."""
    return repr(value)


@singledispatch
def as_page(value: object) -> str:
    """Return the HTML that a notebook shows."""
    return f"<pre>{escape(repr(value))}</pre>"
