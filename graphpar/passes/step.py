"""``Step``: what ``graphpar passes`` says of a step of a compilation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step: what it requires, what it provides, and what checks that.

    Attributes:
        file: the module that implements it.
        requires: names of steps that must have run before it.
        conflicts: names of steps that must not have run before it.
    """

    name: str
    file: str
    requires: tuple[str, ...]
    provides: str
    checked_by: str
    conflicts: tuple[str, ...] = ()
    optional: bool = False
