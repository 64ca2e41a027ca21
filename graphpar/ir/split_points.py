"""Where the stages of a pipeline begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graphpar.errors import GraphparError


class SplitPoint(Enum):
    """Which end of a module a stage begins at. The values are those of ``torch.distributed.pipelining.SplitPoint``."""

    BEGINNING = "beginning"
    END = "end"


@dataclass(frozen=True)
class SplitAt:
    """A split point: a stage begins before the module ``path``, or after it (``SplitPoint.END``)."""

    path: str
    where: SplitPoint = SplitPoint.BEGINNING


def split_points_of(entries: Sequence[str | Mapping[str, str] | SplitAt] | Mapping[str, Any]) -> tuple[SplitAt, ...]:
    """Read split points as a user writes them: paths, ``{"path": "end"}``, or torch's ``{path: SplitPoint.END}``.

    Raises:
        GraphparError: one is neither at the beginning nor at the end of a module.
    """
    pairs: list[tuple[str, Any]] = []
    items: Any = entries.items() if isinstance(entries, Mapping) else entries
    for entry in items:
        if isinstance(entry, str):
            pairs.append((entry, SplitPoint.BEGINNING))
        elif isinstance(entry, SplitAt):  # those of a plan
            pairs.append((entry.path, entry.where))
        elif isinstance(entry, Mapping):
            pairs += list(entry.items())
        else:
            pairs.append(tuple(entry))
    points = []
    for path, where in pairs:
        name = str(getattr(where, "name", where)).lower()
        if name not in ("beginning", "end"):
            raise GraphparError(f"Split point {path!r}: {where!r} must be 'beginning' or 'end'.")
        points.append(SplitAt(path, SplitPoint(name)))
    return tuple(points)
