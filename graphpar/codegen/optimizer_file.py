"""``optimizer.py``: the model file's ``optimizer``, ``lr_schedule`` and ``metrics``, with what they need of that file and no more.

    model.py ──names that they use, and what these use──► optimizer.py
    a file beside it, from which it imports ──the same of what is imported──┘

So a program trains and evaluates without the model file, and without building the model.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from graphpar.codegen.sources import bound, text_of
from graphpar.errors import GraphparError

FACTORIES = ("optimizer", "lr_schedule", "metrics")


def optimizer_file(path: Path, reference: str | None = None) -> str | None:
    """Return the text of ``optimizer.py`` for a model file; ``None`` where it has none of them.

    Args:
        reference: the file's dotted module name, if it was named so: relative imports become those of its package.
    """
    defined: dict[str, Path] = {}
    texts = _needed(path, path.parent, FACTORIES, reference, defined)
    found = [name for name in FACTORIES if name in defined]
    if not found:
        return None
    title = f'"""The optimizer of {path.name}: what its {" and ".join(found)} need{"s" if len(found) == 1 else ""} of it."""'
    first = [text for text in texts if text.startswith("from __future__")]
    return "\n\n".join(dict.fromkeys([title, *first, *texts])) + "\n"


def _needed(path: Path, root: Path, names: Iterable[str], reference: str | None, defined: dict[str, Path]) -> list[str]:
    """Return the statements of a file that ``names`` need, those of files beside the model file in the place of their imports.

    Args:
        root: the folder of the model file.
        reference: the dotted module name of ``path``.
        defined: the file of each name so far.

    Raises:
        GraphparError: files define different things of one name, or a file beside the model file is imported as a module.
    """
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    named: dict[str, list[ast.stmt]] = {}
    for statement in body:
        for name in bound(statement):
            named.setdefault(name, []).append(statement)
    kept: set[ast.stmt] = {statement for name in ("annotations", "*") for statement in named.get(name, ())}
    waiting, used = [name for name in names if defined.get(name) != path], set[str]()
    while waiting:
        name = waiting.pop()
        if name in used:
            continue
        used.add(name)
        for statement in named.get(name, ()):
            if statement not in kept:
                kept.add(statement)
                waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    for statement in kept:
        imports = isinstance(statement, ast.Import | ast.ImportFrom)
        for name in () if imports else {*bound(statement)} & used:
            if defined.setdefault(name, path) != path:
                raise GraphparError(
                    f"The optimizer of the model file needs {name} of {defined[name].name} and another {name} of {path.name}; "
                    "rename one."
                )
        nested = () if imports else ast.walk(statement)
        inner = next(
            (each for each in nested if isinstance(each, ast.stmt) and _local_import(each, root, reference)), None
        )
        if inner is not None:
            raise GraphparError(
                f"The optimizer of the model file needs {ast.unparse(inner)!r} inside a function ({path.name}:{inner.lineno}), a file "
                "next to it, from which its dependencies are copied; move the import to the top of the file."
            )
    lines = source.splitlines(keepends=True)
    texts: list[str] = []
    for statement in (each for each in body if each in kept):
        beside = _local_import(statement, root, reference)
        if beside is None:
            texts.append(_text(statement, lines, reference))
            continue
        if isinstance(statement, ast.Import):
            raise GraphparError(
                f"The optimizer of the model file needs {ast.unparse(statement)!r} ({path.name}:{statement.lineno}), a file next to it, "
                f"from which its dependencies are copied; write from {statement.names[0].name} import NAME."
            )
        assert isinstance(statement, ast.ImportFrom)
        taken = {alias.name: alias.asname or alias.name for alias in statement.names}
        own = {each for each, made in named.items() if made[0].lineno > statement.lineno and not _reads(made[0], each)}
        required = used - own if "*" in taken else {name for name, bound in taken.items() if bound in used}
        name = _absolute(statement, reference)
        texts += _needed(beside, root, sorted(required), name, defined)
        texts += [f"{bound} = {name}" for name, bound in taken.items() if bound in used and bound != name]
    return texts


def _absolute(statement: ast.ImportFrom, reference: str | None) -> str:
    """The dotted name of the module that is imported from."""
    name = "." * statement.level + (statement.module or "")
    return importlib.util.resolve_name(name, (reference or "").rpartition(".")[0]) if statement.level else name


def _local_import(statement: ast.AST, root: Path, reference: str | None) -> Path | None:
    """The file in the folder of the model file that is imported, which no program finds later."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return None
    name = _absolute(statement, reference) if isinstance(statement, ast.ImportFrom) else statement.names[0].name
    place = root.joinpath(*name.split("."))
    return next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()), None)


def _reads(statement: ast.stmt, name: str) -> bool:
    """Whether what gives ``name`` a value may read it, as it was before."""
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(node.id == name for node in names)


def _text(statement: ast.stmt, lines: list[str], reference: str | None) -> str:
    if isinstance(statement, ast.ImportFrom) and statement.level and reference is not None:
        return ast.unparse(ast.ImportFrom(_absolute(statement, reference), statement.names, 0))
    return text_of(statement, lines)
