"""Copies of ``graphpar.emitted`` modules in a package, without what it does not use.

a stage calls swiglu, ring_attention ──► gated.py, ring_attention.py, and what these import: collectives.py
files["collectives.py"], stages that import all_reduce ──► bind, rank, all_reduce and what these use
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import graphpar.emitted
from graphpar.codegen.formatting import WIDTH, wrapped
from graphpar.codegen.sources import bound

WHOLE = ("kv_cache", "recomputation", "pointwise", "gathering")
"""Modules that are copied as they are."""
ENTRIES = {"collectives": ("bind", "rank", "size", "watchers"), "expert_rows": ("counters",)}
"""What the runtime and ``check`` use of a module, by its name."""
SETTERS = {"_lacking": "note_lacking"}
"""Variables of modules, and the functions by which the runtime sets them where anything reads them."""


@cache
def library() -> Mapping[str, ModuleType]:
    """Return the modules of :mod:`graphpar.emitted` by name; one that another imports comes after it."""
    names = sorted(module.name for module in pkgutil.iter_modules(graphpar.emitted.__path__))
    order = sorted(names, key=lambda name: sum(name in needed_by(other) for other in names))
    return {name: importlib.import_module(f"graphpar.emitted.{name}") for name in order}


@cache
def needed_by(name: str) -> frozenset[str]:
    """Return the modules of :mod:`graphpar.emitted` that one of them imports, and those that they import."""
    text = inspect.getsource(importlib.import_module(f"graphpar.emitted.{name}"))
    found = set(re.findall(r"^from graphpar\.emitted\.(\w+) import", text, re.MULTILINE))
    return frozenset(found.union(*map(needed_by, found)))


def name_in_library(target: object) -> str | None:
    """Return which module of :mod:`graphpar.emitted` has ``target``, of a call in a graph; None where none has it."""
    package, _, name = str(getattr(target, "__module__", None)).rpartition(".")
    return name if package == graphpar.emitted.__name__ else None


def library_files(names: Iterable[str]) -> dict[str, str]:
    """Return modules of :mod:`graphpar.emitted` as files of a package, with those that they import."""
    required = {needed for name in names for needed in (name, *needed_by(name))}
    texts = {name: inspect.getsource(module) for name, module in library().items() if name in required}
    return {f"{name}.py": text.replace("from graphpar.emitted.", "from .") for name, text in texts.items()}


@dataclass(frozen=True)
class _Part:
    """A statement of a module, with comments before it: its lines from ``begin`` to ``end``, what it defines and what it uses."""

    begin: int
    end: int
    defines: frozenset[str]
    uses: frozenset[str]


def without_unused(files: Mapping[str, str]) -> dict[str, str]:
    """Return ``files``, texts by name, with the modules of :func:`library` cut down to what the others, and they themselves, use."""
    made = dict(files)
    for name in library():
        file = f"{name}.py"
        if file in made and name not in WHOLE:
            required = {*ENTRIES.get(name, ()), *(used for text in made.values() for used in _imported(text, name))}
            made[file] = _cut(made[file], required)
    return made


def _imported(text: str, module: str) -> Iterator[str]:
    """What a file of the package takes from another: ``from .module import name``, or ``module.name``."""
    if f"from .{module} import" not in text and f"from . import {module}" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module == module:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            yield node.attr


def _cut(text: str, required: set[str]) -> str:
    lines, tree = text.splitlines(), ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    parts = list(_statement_texts(tree, lines, imports[-1].end_lineno or 0))
    used, kept = set(required), set[int]()
    while more := [place for place, part in enumerate(parts) if place not in kept and part.defines & used]:
        kept |= set(more)
        used |= {name for place in more for name in parts[place].uses}
        used |= {SETTERS[name] for name in SETTERS.keys() & used}
    head = lines[: imports[0].lineno - 1]
    body = "\n".join("\n".join(lines[parts[place].begin : parts[place].end]) for place in sorted(kept))
    return (
        re.sub(r"\n{4,}", "\n\n\n", "\n".join([*head, *_imports(imports, lines, used), body.lstrip()])).rstrip() + "\n"
    )


def _statement_texts(tree: ast.Module, lines: list[str], begin: int) -> Iterator[_Part]:
    """The statements after the imports; a text after an assignment is part of it, as blank lines and comments are of what follows."""
    body = [node for node in tree.body if node.lineno > begin]
    for place, node in enumerate(body):
        if isinstance(node, ast.Expr):
            continue
        last = body[place + 1] if place + 1 < len(body) and isinstance(body[place + 1], ast.Expr) else node
        end = last.end_lineno or 0
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        names |= {found for each in ast.walk(node) if (found := _quoted(each))}
        yield _Part(begin, end, frozenset(bound(node)), frozenset(names))
        begin = end
    assert not [line for line in lines[begin:] if line.strip()], "a module ends with a statement"


def _quoted(node: ast.AST) -> str:
    """The name that an annotation in quotes is."""
    return (
        node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
        else ""
    )


def _imports(nodes: list[ast.Import | ast.ImportFrom], lines: list[str], used: set[str]) -> Iterator[str]:
    """The imports of names that are used, in groups; of whole modules, which may register operators, all."""
    groups: dict[int, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            (alias,) = node.names
            text = lines[node.lineno - 1]
            kept = "." in alias.name or (alias.asname or alias.name) in used
        else:
            source = f"{'.' * node.level}{node.module or ''}"
            names = [
                each.name + (f" as {each.asname}" if each.asname else "")
                for each in node.names
                if source == "__future__" or (each.asname or each.name) in used
            ]
            text, kept = f"from {source} import {', '.join(names)}", bool(names)
            if len(text) > WIDTH:
                text = "\n".join(wrapped(f"from {source} import ({', '.join(names)})", ""))
        module = text.split()[1]
        group = 0 if module == "__future__" else 3 if module.startswith(".") else 2 if module.startswith("torch") else 1
        if kept:
            groups.setdefault(group, []).append(text)
    for group in sorted(groups):
        yield from groups[group]
        yield ""
