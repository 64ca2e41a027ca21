"""The table of stages in a printed report: a row for each stage, with whole names even in narrow terminals.

Stage  ranks  modules             params     fwd     bwd  memory
    0    0-1  embed, layers.0-3   62.2 M  229 ms  428 ms  █▏            1.09 GiB
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpar.report.predicted import stage_columns
from graphpar.text import count_text, flops_text, indices_text, wrapped

BAR = 12
_LEAST = 20
"""Modules that would have fewer columns than this are below their row instead."""


def stage_table(data: Mapping[str, Any], width: int) -> list[str]:
    """Make the table: with a prediction, each stage's times and its rank's memory; else its share of the flops."""
    stages, predicted = data["stages"], data.get("predicted")
    together = data["devices"] // data["mesh"]["pp"]  # ranks that hold shards or replicas of a stage
    places = [indices_text(range(stage["rank"] * together, (stage["rank"] + 1) * together)) for stage in stages]
    left = [
        ("Stage", "rank" if together == 1 else "ranks"),
        *((str(stage["index"]), place) for stage, place in zip(stages, places)),
    ]
    modules = ["modules", *(", ".join(stage["modules"]) for stage in stages)]
    if predicted is None:
        right = _flops_columns(stages) if "flops" in stages[0] else [()] * (len(stages) + 1)
    else:
        right = _time_columns(predicted)
    room = _room(left, right, width)
    words = max(len(word) for text in modules for word in text.split(" "))
    if right[0] and room < max(words, _LEAST):  # bars go first
        right = [
            (*cells[:-1], cells[-1] if not place else cells[-1][BAR:].strip()) for place, cells in enumerate(right)
        ]
        room = _room(left, right, width)
    return _laid_out(left, modules, right, room if room >= max(words, _LEAST) else 0, width)


def _room(left: Sequence[Sequence[str]], right: Sequence[Sequence[str]], width: int) -> int:
    """Return the number of columns that are left for modules."""
    return width - 1 - sum(size + 2 for size in (*_sizes(left), *_sizes(right)))


def _sizes(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows)]


def _laid_out(
    left: Sequence[Sequence[str]], modules: Sequence[str], right: Sequence[Sequence[str]], room: int, width: int
) -> list[str]:
    """Lay out the rows, with modules in ``room`` columns, or below each row where ``room`` is 0."""
    before, after = _sizes(left), _sizes(right)
    column = min(room, max(map(len, modules)))
    lines = []
    for first, text, last in zip(left, modules, right):
        own = wrapped(text, column) if column else [""]
        start = "".join(f" {cell:>{size}} " for cell, size in zip(first, before))
        aligned = [f"{cell:>{size}}" for cell, size in zip(last[:-1], after)] + list(last[-1:])
        end = "".join(f"  {cell}" for cell in aligned)
        middle = f" {own[0]:<{column}}" if column else ""
        lines.append(f"{start}{middle}{end}".rstrip())
        lines += [" " * (len(start) + 1) + line for line in own[1:]]
        if not column and text:
            lines += wrapped(text, width, " " * 8, " " * 8)
    return lines


def _flops_columns(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    flops = [stage["flops"] for stage in stages]
    total, most = sum(flops) or 1.0, max(flops) or 1.0
    rows = [
        (count_text(stage["parameters"]), flops_text(own), f"{_bar(own / most)} {own / total:4.0%}")
        for stage, own in zip(stages, flops)
    ]
    return [("params", "forward", "share"), *rows]


def _time_columns(predicted: Mapping[str, Any]) -> list[tuple[str, ...]]:
    columns = stage_columns(predicted)
    backward = any(column[1] for column in columns)
    rows = []
    for own, (forward, back, peak, share) in zip(predicted["stages"], columns):
        memory = f"{_bar(share)} {peak:>8}" if peak else ""
        rows.append((count_text(own["parameters"]), forward, *([back] if backward else []), memory))
    return [("params", "fwd", *(["bwd"] if backward else []), "memory"), *rows]


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(BAR)
