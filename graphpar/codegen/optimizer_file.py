"""``optimizer.py``: the model file's ``optimizer`` and ``lr_schedule``, with what they need of that file and no more.

    model.py ──names that the two functions use, and what these use──► optimizer.py

So a program makes its optimizer without the model file, and without building the model.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

FACTORIES = ("optimizer", "lr_schedule")


def optimizer_file(path: Path, reference: str | None = None) -> str | None:
    """Return the text of ``optimizer.py`` for a model file; ``None`` where it has neither function.

    Args:
        reference: the file's dotted module name, if it was named so: relative imports become those of its package.
    """
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    named: dict[str, list[ast.stmt]] = {}
    for statement in body:
        for name in _bound(statement):
            named.setdefault(name, []).append(statement)
    if not any(name in named for name in FACTORIES):
        return None
    kept: set[ast.stmt] = {statement for name in ("annotations", "*") for statement in named.get(name, ())}
    waiting = [statement for name in FACTORIES for statement in named.get(name, ())]
    while waiting:
        statement = waiting.pop()
        if statement not in kept:
            kept.add(statement)
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            waiting += [each for name in used for each in named.get(name, ())]
    lines = source.splitlines()
    texts = dict.fromkeys(_text(statement, lines, reference) for statement in body if statement in kept)
    title = (
        f'"""The optimizer of {path.name}: what its {" and ".join(n for n in FACTORIES if n in named)} needs of it."""'
    )
    return "\n\n".join([title, *texts]) + "\n"


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module gives a value to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _text(statement: ast.stmt, lines: list[str], reference: str | None) -> str:
    if isinstance(statement, ast.ImportFrom) and statement.level and reference is not None:
        name = "." * statement.level + (statement.module or "")
        package = reference.rpartition(".")[0]
        return ast.unparse(ast.ImportFrom(importlib.util.resolve_name(name, package), statement.names, 0))
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : statement.end_lineno])
