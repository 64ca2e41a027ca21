"""``Step``: what ``graphpar passes`` says of a step of a compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from graphpar.errors import OptionError


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

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add a note to an error of the step, which says its name, unless the error names an option."""
        try:
            yield
        except OptionError:
            raise
        except Exception as error:
            error.add_note(f"In the step {self.name}.")
            raise
