"""Where an operator came from: the user's line, and the name that the user gave to its result."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARY = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)


@dataclass(frozen=True)
class Assignment:
    """What a statement assigns: ``names``, and the operators that its expression calls; of a tuple those of each element.

    ``cos, sin = x.cos(), x.sin()`` has the names ``("cos", "sin")``, made of ``({"cos"}, {"sin"})``.
    """

    names: tuple[str, ...] = ()
    operators: frozenset[str] = frozenset()
    made_of: tuple[frozenset[str], ...] = ()

    def name(self, position: int = 0, operator: str = "") -> str | None:
        """Return the variable that holds the value at ``position`` of the result, or what ``operator`` makes; None if there is none.

        Where each variable has its own expression, ``operator`` decides if it is in only one of them.
        """
        usable = [name for name in self.names if name.isidentifier() and name != "_"]
        if self.made_of:
            makes = [name for name, words in zip(self.names, self.made_of) if operator in words and name in usable]
            return makes[0] if len(makes) == 1 else None
        if position < len(self.names) and self.names[position] in usable:
            return self.names[position]
        return usable[0] if usable else None


@dataclass(frozen=True)
class Source:
    """A line of user code: file name (without folders), line, what it assigns, and the lines that called it."""

    file: str
    line: int
    assigns: Assignment = Assignment()
    callers: tuple[tuple[str, int, Assignment], ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """The variables that the line assigns."""
        return self.assigns.names


def _is_library(path: str) -> bool:
    """Whether a file belongs to torch or graphpar. By folder, not by name: a user's folder may be called ``torch``."""
    return path.startswith(_LIBRARY)


def user_line(error: BaseException) -> str:
    """Return ``file.py:12``, the user's innermost line on the way to where ``error`` was raised; empty if there is none."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def user_text_of(frame: FrameType) -> str | None:
    """Return the line that ``frame`` runs; None where that is no code of the user."""
    path = frame.f_code.co_filename
    return None if path.startswith("<") or _is_library(path) else linecache.getline(path, frame.f_lineno).strip()


def in_loop(error: BaseException) -> bool:
    """Return whether the innermost line outside of torch, on the way to where ``error`` was raised, is one of a ``for`` loop."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<", *_LIBRARY))]
    try:
        tree = ast.parse("".join(linecache.getlines(frames[-1].filename)))
    except (IndexError, ValueError, SyntaxError):
        return False
    line = frames[-1].lineno or 0
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    return any(loop.lineno <= line <= (loop.end_lineno or line) for loop in loops)


def condition_now() -> tuple[str, str]:
    """Return the condition that the user's innermost running line asks for, and what of a loop depends on it; empty where nothing does.

    A branch in a loop that does nothing but raise is no part of what the loop computes.
    """
    text, found, inside = _test_now()
    if found is None:
        return text, ""
    test = found.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    raises = isinstance(found, ast.Assert) or (
        isinstance(found, ast.If) and not found.orelse and all(isinstance(each, ast.Raise) for each in found.body)
    )
    depends = "how often a loop runs depends" if isinstance(found, ast.While) else "a branch in a loop depends"
    return ast.unparse(test), depends if isinstance(found, ast.While) or (inside and not raises) else ""


def left_out_now(taken: bool) -> str:
    """Return the condition that the user's innermost running line asks for, if its other branch does something: not only leave a loop's
    round or the function, or raise."""
    text, found, _ = _test_now()
    if not isinstance(found, ast.If | ast.IfExp):
        return ""
    other = [found] if isinstance(found, ast.IfExp) else found.orelse if _truth(found.test, taken) else found.body
    ends = ast.Continue | ast.Pass | ast.Return | ast.Raise
    return text if any(not isinstance(each, ends) for each in other) else ""


def runs_only_then(taken: bool) -> tuple[str, str, frozenset[int]]:
    """Return file and function of the user's innermost running line, and the lines that run only if its condition is ``taken``.

    Where the other branch ends the round or the function these are those that follow, too.
    """
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith("<") and not _is_library(f.filename)]
    _, found, _ = _test_now()
    if not isinstance(found, ast.If):
        return "", "", frozenset()
    path = frames[-1].filename
    own, other = (found.body, found.orelse) if _truth(found.test, taken) else (found.orelse, found.body)
    statements = list(own)
    if other and isinstance(other[-1], ast.Continue | ast.Return | ast.Break):
        statements += _after(path, found.lineno, found.col_offset)
    lines = (range(each.lineno, (each.end_lineno or each.lineno) + 1) for each in statements)
    return path, frames[-1].name, frozenset(line for part in lines for line in part)


def _truth(test: ast.expr, asked: bool) -> bool:
    """Return the answer to ``test`` where what it asks for is ``asked``."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, asked = test.operand, not asked
    return asked


def _after(path: str, line: int, column: int) -> list[ast.stmt]:
    """The statements that follow the one at a place in its block."""
    for parent in ast.walk(ast.parse("".join(linecache.getlines(path)))):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            for place, statement in enumerate(block if isinstance(block, list) else ()):
                if (statement.lineno, statement.col_offset) == (line, column):
                    return list(block[place + 1 :])  # type: ignore[index]
    return []


def _test_now() -> tuple[str, ast.If | ast.IfExp | ast.While | ast.Assert | None, bool]:
    """Return the text of the user's innermost running line or condition, the statement that asks for it, and whether that is in a loop."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith("<") and not _is_library(f.filename)]
    if not frames:
        return "", None, False
    line, found, inside = frames[-1].lineno or 0, None, False
    for node, in_loop_here in _tests(frames[-1].filename):
        if node.test.lineno <= line <= (node.test.end_lineno or line):
            found, inside = node, in_loop_here
    return linecache.getline(frames[-1].filename, line).strip(), found, inside


@functools.lru_cache(maxsize=512)
def _tests(path: str) -> list[tuple[ast.If | ast.IfExp | ast.While | ast.Assert, bool]]:
    """The conditions of a file, outer ones first, and whether each is in a loop of its function."""
    found: list[tuple[ast.If | ast.IfExp | ast.While | ast.Assert, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            found.append((node, inside))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inside = False
        elif isinstance(node, ast.For | ast.While | ast.comprehension):
            inside = True
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    with contextlib.suppress(SyntaxError, ValueError):
        visit(ast.parse("".join(linecache.getlines(path))), False)
    return found


def stack_line() -> str:
    """Return ``file.py:12``, the user's innermost line that is running now; empty if there is none."""
    return _innermost(traceback.extract_stack())


def _innermost(stack: traceback.StackSummary) -> str:
    frames = [f for f in stack if not f.filename.startswith("<") and not _is_library(f.filename)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def stack_lines(stack_trace: str) -> list[tuple[str, int]]:
    """Return the files and lines of torch's ``stack_trace``."""
    return [(path, int(line)) for path, line, _ in _FRAME.findall(stack_trace)]


def lines_of(node: Any) -> str:
    """Return `` (file.py:12)``, the user's line of a node of a fresh trace; empty if there is none."""
    source = source_of(node.meta.get("stack_trace") or "")
    return f" ({source.file}:{source.line})" if source else ""


@functools.lru_cache(maxsize=65536)
def source_of(stack_trace: str) -> Source | None:
    """Find the user's innermost line in torch's ``stack_trace``; None if there is none."""
    frames = stack_lines(stack_trace)
    own = [(path, line) for path, line in frames if not path.startswith("<") and not _is_library(path)]
    if not own:
        return None
    path, line = own[-1]
    callers = tuple((os.path.basename(p), n, assignment(p, n)) for p, n in own[:-1])
    return Source(os.path.basename(path), line, assignment(path, line), callers)


@functools.lru_cache(maxsize=16384)
def assignment(path: str, line: int) -> Assignment:
    """Read what the statement at ``path:line`` assigns; an empty ``Assignment`` for any other statement."""
    statement = _statements(path).get(line)
    if statement is None:
        return Assignment()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names: list[str] = []
    for target in targets:
        names += [
            _target_name(element) for element in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
        ]
    value = statement.value
    parts = value.elts if isinstance(value, ast.Tuple) and len(names) > 1 and len(value.elts) == len(names) else []
    operators = frozenset[str]() if value is None else _operators(value)
    return Assignment(tuple(names), operators, tuple(_operators(part) for part in parts))


def _target_name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else "_"


_SYMBOLS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow",
            ast.USub: "neg", ast.Mod: "remainder", ast.FloorDiv: "floor_divide", ast.BitAnd: "__and__", ast.BitOr: "__or__",
            ast.Invert: "bitwise_not"}  # fmt: skip
"""The ATen names of Python's operators."""


def _operators(expression: ast.expr) -> frozenset[str]:
    """The names of the operators that ``expression`` calls."""
    found: set[str] = set()
    for part in ast.walk(expression):
        if isinstance(part, ast.Call):
            found.add(_target_name(part.func))
        elif isinstance(part, ast.BinOp | ast.UnaryOp):
            found.add(_SYMBOLS.get(type(part.op), ""))
        elif isinstance(part, ast.Subscript):
            found |= {"slice", "select", "index", "unsqueeze"}
    return frozenset(found - {"", "_"})


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


def variable_name(source: Source | None, position: int = 0, operator: str = "") -> str | None:
    """Find the name that the user's code gives to what ``operator`` made at ``source``, in the innermost statement with one.

    Args:
        position: which of several results it is (``q, k, v = ...``).
    """
    if source is None:
        return None
    if source.targets:
        return source.assigns.name(position, operator)
    calls = (assigned.name(position) for _, _, assigned in reversed(source.callers) if assigned.names)
    return next((name for name in calls if name is not None), None)
