"""Modules that are copied into a package have what it uses, and what that uses."""

from __future__ import annotations

import ast
import builtins

import pytest

from graphpar.codegen.dead_code import ENTRIES, SETTERS, WHOLE, library, library_files, without_unused

MODULES = {name: library_files([name])[f"{name}.py"] for name in library() if name not in WHOLE}


def _defined(text: str) -> list[str]:
    body = ast.parse(text).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


CASES = [
    (name, function) for name, text in MODULES.items() for function in _defined(text) if not function.startswith("_")
]


def _unknown(text: str) -> set[str]:
    """Names that the functions of a text read and nothing defines: those of a scope count in all that is within it."""
    tree = ast.parse(text)
    made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | set(dir(builtins))
    made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    made |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - made


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(("name", "function"), CASES)
def test_what_a_function_needs_is_there_and_nothing_else(name: str, function: str) -> None:
    whole = {f"{each}.py": text for each, text in MODULES.items()}
    kept = without_unused(whole | {"stage_0.py": f"from .{name} import {function}\n"})
    text = kept[f"{name}.py"]

    assert function in _defined(text)
    for file, cut in kept.items():
        assert not _unknown(cut), file
    users = [ast.parse(each) for each in kept.values()]
    used = {node.id for tree in users for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {
        alias.name
        for tree in users
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    setters = {SETTERS[each] for each in SETTERS.keys() & used}
    assert set(_defined(text)) <= used | setters | set(ENTRIES.get(name, ()))
    original = MODULES[name]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_source_segment(text, node) in original


def test_what_nothing_imports_is_left_out() -> None:
    kept = without_unused({"collectives.py": MODULES["collectives"], "stage_0.py": ""})
    assert _defined(kept["collectives.py"]) == ["bind", "size", "rank"]
