"""What a program is for, and the kinds of values that options have: how each is read from the command line, checked, and kept in JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from graphpar.runtime.errors import GraphparError, near_match
from graphpar.runtime.schedule_records import SCHEDULES, canonical_name

Recompute = str | Mapping[str, str]
"""What blocks run again in the backward: one kind for all, or kinds by pattern over their paths."""
DTYPE_NAMES = ("fp32", "bf16", "fp16")
"""The dtypes in which a program computes, stores parameters and sums gradients."""
FP8_RECIPES = ("rowwise", "mxfp8")
"""torchao's ``rowwise_with_gw_hp``, a scale of each row and gradients of weights in bf16; and its ``mxfp8``, a scale of each
32 values."""
DROPOUTS = ("exact", "kernel")
"""How attention draws its dropout: masks of the unpartitioned model, or those of torch's own kernel and generator."""
OFFLOADS = ("optimizer", "activations", "params")
"""What may live in the host's memory: the optimizer's state, what blocks keep between forward and backward, and shards of parameters with
their gradients and the optimizer's state."""
PREFETCH = ("pre", "post", "none")
"""When ZeRO-3 gathers a unit's parameters for its backward: before the backward of the one before computes, after it, or at need."""
RESHARD = ("default", "always", "never")
"""When gathered parameters are freed: after each forward and backward (under a pipeline once a step), always so, or never in between."""
ZERO1_BY = ("contiguous", "longest", "flat")
"""How ZeRO-1 divides the optimizer's work over the ranks that share state: runs of whole parameters, the largest first, or equal slices."""
RECOMPUTE = ("none", "pointwise", "gathers", "gathers+pointwise", "selective", "full")
"""What blocks run again in the backward; besides these, budgets."""
WHOLE = ("none", "full")
"""Those that keep no results of single operators: what blocks that do keep can't be moved to the host."""
AUTO = "auto"
"""The least recomputation with which a plan fits."""
SHOWN = 4
"""How many plans that were not taken are shown."""


@dataclass(frozen=True)
class Kind:
    """The values of an option.

    Attributes:
        check: takes the option's name and a value, and returns the value as it is kept; raises GraphparError where it is none.
        types: of its JSON.
        parse: reads it on the command line; errors of numbers are the parser's.
        read: reads it afterwards, where that needs a file or its errors are many.
        choices: offered by completion and help.
        flag: the option takes no value: ``"on"``, or ``"either"`` with a ``--no-`` form.
    """

    check: Callable[[str, Any], Any]
    types: tuple[type, ...] = (str,)
    parse: Callable[[str], Any] = str
    read: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] = ()
    flag: str = ""


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Check a number of things.

    Raises:
        GraphparError: it is no whole number from ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise GraphparError(f"{name} is {value!r}; it must be a whole number.")
    if value < least:
        raise GraphparError(f"{name} is {value}; it must be at least {least}.")
    return value


def _parsed_number(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise GraphparError(f"{text!r} is not a whole number.") from None
    if value < least:
        raise GraphparError(f"it is {value}; it must be at least {least}.")
    return value


def _parsed_count(text: str) -> int:
    return _parsed_number(text, 0)


def _parsed_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise GraphparError(f"{text!r} is not a number of seconds.") from None
    if not 0 <= value < math.inf:
        raise GraphparError(f"it is {text}; it must be a number of seconds, from 0.")
    return value


def _checked_seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not value >= 0:
        raise GraphparError(f"{name} is {value!r}; it must be a number of seconds from 0.")
    return float(value)


def _real(least: float, below: float, said: str) -> Kind:
    """Make a kind of numbers from ``least`` to below ``below``, which errors call ``said``; a share may be in percent, ``5%``."""

    def parse(text: str) -> float:
        percent = below == 1 and text.endswith("%")
        try:
            value = float(text[:-1]) / 100 if percent else float(text)
        except ValueError:
            raise GraphparError(f"{text!r} is not a number.") from None
        if not least <= value < below:
            raise GraphparError(f"it is {text}; it must be {said}.")
        return value

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value < below:
            raise GraphparError(f"{name} is {value!r}; it must be {said}.")
        return float(value)

    return Kind(check, (float,), parse)


def one_of(choices: Sequence[Any], name: str, value: Any, more: str = "") -> Any:
    """Return ``value``, which must be one of ``choices``; ``more``: what else it may be, in words.

    Raises:
        GraphparError: it is none of them; the nearest is named.
    """
    if isinstance(value, bool) or value not in choices:
        known = [str(choice) for choice in choices]
        raise GraphparError(
            f"{name} is {value!r}; it must be one of {', '.join(known)}{more}.{near_match(str(value), known)}"
        )
    return value


def choice(*choices: str) -> Kind:
    """Make a kind of a few texts."""
    return Kind(lambda name, value: one_of(choices, name, value), choices=choices)


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise GraphparError(f"{name} is {value!r}; it must be True or False.")
    return value


def _checked_reshard(name: str, value: Any) -> str | int:
    if not isinstance(value, int) or isinstance(value, bool):
        one_of(RESHARD, name, value, ", or a number of ranks")
    return value  # type: ignore[no-any-return]


def _parsed_reshard(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def share_of(kind: str) -> float | None:
    """Return the share of ``budget:SHARE``; None for other kinds of recomputation.

    Raises:
        GraphparError: it is not a number from 0 to 1.
    """
    if not kind.startswith("budget:"):
        return None
    try:
        share = float(kind.removeprefix("budget:"))
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise GraphparError(f"recompute is {kind!r}; the share of a budget is from 0 to 1, such as budget:0.6.")
    return share


def checked_recompute(name: str, value: Any) -> Recompute:
    """Check what blocks are to run again.

    Raises:
        GraphparError: it is of a wrong type, or names an unknown kind.
    """
    if isinstance(value, Mapping):
        if not value:
            raise GraphparError(f"{name} is an empty dict; give patterns over blocks, or leave it out.")
        for pattern, kind in value.items():
            if not isinstance(pattern, str):
                raise GraphparError(f"{name}'s keys are patterns over the paths of blocks, but one is {pattern!r}.")
            _checked_recomputation(f"{name} of {pattern!r}", kind)
        return dict(value)
    return value if value == AUTO else _checked_recomputation(name, value)


def _checked_recomputation(name: str, kind: Any) -> str:
    if not isinstance(kind, str) or share_of(kind) is None:
        one_of(RECOMPUTE, name, kind, ", or budget:SHARE")
    return str(kind)


def _read_recompute(text: str) -> Recompute:
    """``KIND``, or ``PATTERN=KIND,PATTERN=KIND,...``."""
    if "=" not in text:
        return text
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if entry.count("=") != 1:
            raise GraphparError(f"recompute: {entry!r} is not PATTERN=KIND, such as layers.*=full.")
    patterns = [entry.partition("=")[0].strip() for entry in entries]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise GraphparError(f"recompute: the pattern {pattern!r} is given twice.")
    return {pattern: entry.partition("=")[2].strip() for pattern, entry in zip(patterns, entries)}


def _checked_offload(name: str, value: Any) -> tuple[str, ...]:
    names = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        names = [names]
    for each in names:
        one_of(OFFLOADS, name, each, ", or several, separated by commas")
    return on_host(names)


def on_host(names: Collection[str]) -> tuple[str, ...]:
    """Return what lives in the host's memory, in order; the optimizer's state is part of ``params``."""
    return tuple(each for each in OFFLOADS if each in names and not (each == "optimizer" and "params" in names))


def _checked_patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = value.split(",") if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise GraphparError(f"{name} is {value!r}; it must be patterns of modules such as ['layers.*', 'norm'].")
    cleaned = tuple("+".join(piece.strip() for piece in each.split("+")) for each in patterns)
    if not all(piece for each in cleaned for piece in each.split("+")):
        raise GraphparError(
            f"{name} is {value!r}, where a pattern is empty; write patterns of modules such as layers.*,norm."
        )
    return cleaned


def _checked_edges(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise GraphparError(f"{name} is {value!r}; it must be two numbers, of layers before and after.")
    first, last = (whole_number(name, each, least=0) for each in value)
    return first, last


def _read_edges(text: str) -> tuple[int, int]:
    first, comma, last = text.partition(",")
    try:
        return int(first), int(last if comma else first)
    except ValueError:
        raise GraphparError(f"--edge-layers takes two whole numbers such as 1,2; got {text!r}.") from None


def _read_split(text: str) -> list[str | dict[str, str]]:
    """``a.1,a.3:end``."""
    if not text.strip(", "):
        raise GraphparError(
            f"--split {text!r} names no module; write paths such as layers.4,layers.8, or leave it out."
        )
    points: list[str | dict[str, str]] = []
    for entry in filter(None, (piece.strip() for piece in text.split(","))):
        path, colon, where = entry.partition(":")
        points.append({path: where} if colon else path)
    return points


Seq = tuple[int, int] | str
"""Lengths of the sequence: the ends of a range, or a list, ``"128,512,4096"``."""


def listed_lengths(seq: Seq | None) -> tuple[int, ...]:
    """Return the lengths of a list, the shortest first; of a range nothing."""
    return tuple(map(int, seq.split(","))) if isinstance(seq, str) else ()


def ends_of(seq: Seq) -> tuple[int, int]:
    """Return the shortest and the longest length."""
    listed = listed_lengths(seq)
    return (listed[0], listed[-1]) if listed else cast("tuple[int, int]", seq)


def seq_text(seq: Seq) -> str:
    """Spell lengths as the command line takes them: ``128..4096``, ``128,512,4096``."""
    return seq if isinstance(seq, str) else "..".join(map(str, seq))


def _length(name: str, given: Any, text: str) -> int:
    try:
        return _parsed_number(text)
    except GraphparError as error:
        raise GraphparError(f"{name} is {given!r}: {error}") from None


def _checked_seq(name: str, value: Any) -> Seq:
    if isinstance(value, str) and ".." not in value:
        listed = sorted({_length(name, value, each) for each in value.split(",")})
        if len(listed) < 2 or listed[0] < 2:
            raise GraphparError(
                f"{name} is {value!r}; it must be a range of lengths, such as 128..4096, or at least two lengths, such as 128,512,4096, "
                "each 2 or more."
            )
        return ",".join(map(str, listed))
    ends = value.split("..") if isinstance(value, str) else value
    if not isinstance(ends, tuple | list) or len(ends) != 2:
        raise GraphparError(
            f"{name} is {value!r}; it must be the shortest and the longest length, such as 128..4096, or a list of lengths in a text, "
            "such as '128,512,4096'."
        )
    least, most = (_length(name, value, end) if isinstance(end, str) else whole_number(name, end) for end in ends)
    if not 2 <= least < most:
        raise GraphparError(f"{name} is {least}..{most}; a range begins at 2 or more and ends above that.")
    return least, most


def _any(name: str, value: Any) -> Any:
    return value


COUNT = Kind(whole_number, (int,), _parsed_number)
FLAG = Kind(_checked_flag, (bool,), flag="on")
EITHER = Kind(_checked_flag, (bool,), flag="either")
TEXT = Kind(_any)
SCHEDULE = Kind(_any, parse=canonical_name, choices=tuple(SCHEDULES))
"""A schedule, in any spelling on the command line."""
FILE = Kind(_any, read=Path)
"""On the command line a path, in Python the content or a ``Path``."""
LEVEL = Kind(lambda name, value: one_of(range(4), name, value), (int,), int, choices=tuple(range(4)))
RESHARDED = Kind(_checked_reshard, (str, int), _parsed_reshard)
RECOMPUTED = Kind(checked_recompute, (str, dict), read=_read_recompute)
OFFLOADED = Kind(_checked_offload, (list,))
ANY_COUNT = Kind(lambda name, value: whole_number(name, value, 0), (int,), _parsed_count)
SECONDS = Kind(_checked_seconds, (float,), _parsed_seconds)
PART = _real(0, 1, "a share from 0 to below 1")
ROOM = _real(1, math.inf, "a number from 1")
SPLIT = Kind(_any, read=_read_split)
PATTERNS = Kind(_checked_patterns, (list,))
"""Patterns over paths of modules."""
EDGES = Kind(_checked_edges, (list,), read=_read_edges)
SEQ = Kind(_checked_seq, (list, str))
"""Lengths, as ``128..4096`` or ``128,512,4096`` on the command line."""
STAGES = Kind(lambda name, value: tuple(tuple(paths) for paths in value))


TRAIN, INFER, GENERATE = MODES = ("train", "infer", "generate")
"""Steps of training, a forward of whole inputs, or tokens one after the other."""
TRAIN_GENERATE = f"{TRAIN},{GENERATE}"
"""What a model may be compiled for besides: training, with tokens between its steps."""
COMPILED = "compiled"
"""The folder, in a program's, of what ``torch.compile`` made of it."""
SCRIPTS = {TRAIN: "train.py", INFER: "train.py", GENERATE: "generate.py"}
"""The script in an emitted folder that torchrun starts, by mode."""
STEPS = {TRAIN: "a step", INFER: "a batch", GENERATE: "a token"}
"""What a predicted time is of, by mode; with several groups of sequences in flight, a token of each."""
