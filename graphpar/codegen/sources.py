"""The user's Python files: which modules another process can import by name, and the top-level statements of the others.

module ──importable──► its import                  file ──statements_of──► what each statement defines, refers to and registers
"""

from __future__ import annotations

import ast
import dis
import importlib.util
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._library.simple_registry import singleton

from graphpar.ir.program import is_of_torch

# ---- modules ---------------------------------------------------------------------------------------------------


def importable(module: types.ModuleType) -> bool:
    """Whether a new process, started anywhere, can import this very module by its name."""
    top = module.__name__.split(".")[0]
    if module.__name__ == "__main__" or top == "__main__":
        return False
    if top == "torch" or top in sys.builtin_module_names:
        return True
    root = sys.modules.get(top)
    return root is not None and _found_elsewhere(top) == _place(root)


def _place(module: types.ModuleType) -> str:
    spec = module.__spec__
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return str(Path((spec.origin if spec is not None else None) or (places[0] if places else "")).resolve())


@cache
def _found_elsewhere(name: str) -> str:
    """Where a new process, started elsewhere, finds the top-level module ``name``."""
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.find_spec({name!r})\n"
        "places = list(spec.submodule_search_locations or []) if spec else []\n"
        "print(pathlib.Path(spec.origin or (places[0] if places else '')).resolve() if spec else '')"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    return found.stdout.strip()


def resolved_name(module: types.ModuleType, node: ast.ImportFrom) -> str:
    """Return the full name of the module that an import statement in ``module`` refers to."""
    if not node.level:
        return node.module or ""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__ or "")


def attribute_of(module: types.ModuleType, qualname: str) -> Any:
    """Look up a dotted name in a module; None where there is nothing."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def is_builtin(operator: str) -> bool:
    """Whether an operator belongs to torch, or has no overload at all."""
    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overloads = packet.overloads() if packet is not None else []
    return not overloads or is_of_torch(getattr(packet, overloads[0]))


def module_of_kernel(name: str, target: Any) -> types.ModuleType | None:
    """Find the module that registered the fake kernel of an operator in Python; None where there is none."""
    entry = singleton.get(name) or (singleton.get(target._name) if target is not None else None)
    kernel = entry.fake_impl.kernel if entry is not None else None
    place = re.match(r"(.+):\d+$", kernel.source) if kernel is not None else None
    if place is None:
        return None
    path = Path(place[1]).resolve()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() == path:
            return module
    return None


# ---- statements ------------------------------------------------------------------------------------------------


@dataclass
class Statement:
    """A top-level statement: the names that it defines (``binds``), and those that it refers to (``uses``)."""

    node: ast.stmt
    text: str
    binds: frozenset[str]
    uses: frozenset[str]


def statements_of(path: str, lines: Sequence[str]) -> Iterator[Statement]:
    """Yield the statements of a file, in order."""
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        yield Statement(node, text_of(node, lines), frozenset(bound(node)), frozenset(_used(node, path)))


def text_of(node: ast.stmt, lines: Sequence[str]) -> str:
    """Return a top-level statement, with its decorators, of a file's ``lines``, which end with their line breaks."""
    begin = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "".join(lines[begin - 1 : node.end_lineno]).rstrip()


def bound(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        return
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            yield from bound(inner)
        elif isinstance(inner, ast.ExceptHandler):
            for statement in inner.body:
                yield from bound(statement)
        else:
            yield from (n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _used(node: ast.stmt, path: str) -> set[str]:
    """The names of the file that a statement refers to, inside of functions, too."""
    found: set[str] = set()

    def visit(code: types.CodeType) -> None:
        for instruction in dis.get_instructions(code):
            if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")):
                found.add(str(instruction.argval))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                visit(constant)

    visit(compile(ast.Module([node], type_ignores=[]), path, "exec", dont_inherit=True))
    for inner in ast.walk(node):  # annotations are text where `from __future__ import annotations` stands
        annotations = [getattr(inner, key, None) for key in ("annotation", "returns")]
        for annotation in annotations:
            if isinstance(annotation, ast.AST):
                found |= {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
    return found


def _executed_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What is executed with a top-level statement: of a function only its decorators."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            yield from ast.walk(decorator)
    elif not isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom):
        for inner in ast.iter_child_nodes(node):
            yield from _executed_parts(inner) if isinstance(inner, ast.stmt) else ast.walk(inner)


def _word(function: ast.AST) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


_REGISTERING = {
    "custom_op", "triton_op", "define", "impl", "impl_abstract", "register_fake", "register_autograd", "register_kernel", "register_vmap",
    "register_autocast", "register_torch_dispatch",
}  # fmt: skip


def registers(node: ast.stmt, operator: str, own: Sequence[str]) -> bool:
    """Whether a statement registers something for ``operator``, whose object has the names ``own``."""
    if defines(node, operator, own):
        return True
    for part in _executed_parts(node):
        method = isinstance(part, ast.Attribute) and part.attr.startswith(("register_", "impl"))
        if method and isinstance(part.value, ast.Name) and part.value.id in own:  # type: ignore[attr-defined]
            return True
        if isinstance(part, ast.Call) and _word(part.func) in _REGISTERING and part.args:
            first = part.args[0]
            if isinstance(first, ast.Constant) and str(first.value).split(".")[0] == operator:
                return True
            if isinstance(first, ast.Name) and first.id in own:
                return True
    return False


def defines(node: ast.stmt, operator: str, own: Sequence[str]) -> bool:
    """Whether a statement defines ``operator``, whose object has the names ``own``."""
    if isinstance(node, ast.FunctionDef) and node.name in own:
        return True
    calls = [part for part in _executed_parts(node) if isinstance(part, ast.Call) and part.args]
    named = [c for c in calls if isinstance(c.args[0], ast.Constant) and c.args[0].value == operator]
    return any(_word(call.func) in ("custom_op", "triton_op", "define") for call in named)


def called_operators(node: ast.stmt) -> Iterator[str]:
    """Yield ``mylib::other`` for each ``torch.ops.mylib.other`` in a statement."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute):
            owner = part.value.value
            if isinstance(owner, ast.Attribute) and owner.attr == "ops" and _word(owner.value) == "torch":
                yield f"{part.value.attr}::{part.attr}"


def movable(statement: Statement, text: str) -> str:
    """Return the text of a statement in a form that may be indented: strings of several lines must not change."""
    lines = [
        part.end_lineno != part.lineno
        for part in ast.walk(statement.node)
        if isinstance(part, ast.Constant | ast.JoinedStr) and part.end_lineno is not None
    ]
    return ast.unparse(statement.node) if any(lines) else text
