"""Where an operator came from: the user's line, and the name that the user gave to its result."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from dataclasses import dataclass

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARY = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__))


@dataclass(frozen=True)
class Source:
    """A line of the user's code: file name (without folders), line, and the variables assigned there."""

    file: str
    line: int
    targets: tuple[str, ...] = ()
    callers: tuple[tuple[str, int, tuple[str, ...]], ...] = ()


def _is_library(path: str) -> bool:
    """Whether a file is torch's or ours. By folder, not by name: a user's folder may well be called ``torch``."""
    return path.startswith(_LIBRARY)


@functools.lru_cache(maxsize=65536)
def source_of(stack_trace: str) -> Source | None:
    """The innermost frame of ``stack_trace`` that is not torch's own."""
    frames = [(path, int(line)) for path, line, _ in _FRAME.findall(stack_trace)]
    own = [(path, line) for path, line in frames if not path.startswith("<") and not _is_library(path)]
    if not own:
        return None
    path, line = own[-1]
    callers = tuple((os.path.basename(p), n, assigned_names(p, n)) for p, n in own[:-1])
    return Source(os.path.basename(path), line, assigned_names(path, line), callers)


@functools.lru_cache(maxsize=16384)
def assigned_names(path: str, line: int) -> tuple[str, ...]:
    """The variables that the statement at ``path:line`` assigns, in order; empty for any other statement."""
    statement = _statements(path).get(line)
    if statement is None:
        return ()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names: list[str] = []
    for target in targets:
        elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for element in elements:
            if isinstance(element, ast.Name):
                names.append(element.id)
            elif isinstance(element, ast.Attribute):
                names.append(element.attr)
            else:
                names.append("_")
    return tuple(names)


@functools.lru_cache(maxsize=512)
def _statements(path: str) -> dict[int, ast.Assign | ast.AugAssign | ast.AnnAssign]:
    """Assignment statements of a file by each line that they span."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    spans: dict[int, ast.Assign | ast.AugAssign | ast.AnnAssign] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                spans[line] = statement
    return spans


def variable_names(source: Source | None, position: int = 0) -> list[str]:
    """The names that the user's code gives to a value, innermost statement first.

    ``position`` picks from a statement that assigns several (``q, k, v = ...``).
    """
    if source is None:
        return []
    names: list[str] = []
    for targets in [source.targets, *(targets for _, _, targets in reversed(source.callers))]:
        usable = [target for target in targets if target.isidentifier() and target != "_"]
        if usable:
            names.append(usable[position] if position < len(usable) else usable[0])
    return names
