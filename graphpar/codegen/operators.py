"""Write ``operators.py`` of the emitted package: the user's operators, so that no rank needs the model file.

    mylib::squared, defined in an installed module    ──►  import mylib.ops
    mylib::squared, defined in the model's file       ──►  the statements of that file that define it, and what they use
    Scaled(torch.autograd.Function)                   ──►  the same for a class

Whole statements are copied, in the file's order: functions, classes, imports and constants that the definition refers to.
Statements that register an operator stand under a condition: another program in the process may have registered it.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS, CustomOpDef

from graphpar.codegen.printer import RESERVED
from graphpar.codegen.sources import (
    Statement,
    attribute_of,
    called_operators,
    defines,
    importable,
    is_builtin,
    module_of_kernel,
    movable,
    registers,
    resolved_name,
    statements_of,
)
from graphpar.errors import GraphparError
from graphpar.ir.program import is_of_torch
from graphpar.operators.functions import OPERATORS, function_name
from graphpar.operators.spelling import literal

_INSTALL = (
    "Put its definition into a module that Python can import by name (an installed package), or write it so that it needs "
    "nothing but torch, importable modules, and functions, classes and constants of its own file"
)


@dataclass(frozen=True)
class OperatorsFile:
    """The text of ``operators.py``, the classes in it by name, and the operators that importing it registers."""

    text: str
    classes: tuple[str, ...]
    registers: tuple[str, ...]


def operators_file(graphs: Iterable[fx.Graph], model: str, taken: Iterable[str]) -> OperatorsFile | None:
    """Write ``operators.py`` for the user's operators in ``graphs``; None where there are none.

    Args:
        model: the model's name, for the docstring.
        taken: names of the emitted package, which no class of the user may have.

    Raises:
        GraphparError: an operator's definition can't be imported or copied.
    """
    targets: dict[Any, None] = {}
    for graph in graphs:
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and not is_of_torch(node.target):
                targets[node.target] = None
    if not targets:
        return None
    copied = _Copied()
    classes: dict[str, type] = {}
    for target in sorted(targets, key=str):
        if target in OPERATORS:
            function = OPERATORS[target].function
            name = function.__qualname__.split(".")[0]
            other = classes.setdefault(name, function)
            if name in {*taken, *RESERVED} or other.__module__ != function.__module__:
                raise GraphparError(
                    f"The custom autograd.Function {function_name(function)} has the name of something else in the emitted code; "
                    "rename the class."
                )
            copied.add_class(function)
        else:
            copied.add_operator(target._schema.name, target)
    return OperatorsFile(copied.text(model), tuple(sorted(classes)), tuple(sorted(copied.registered)))


def check_function(function: type) -> None:
    """Refuse a class that can neither be imported nor copied."""
    _Copied().add_class(function)


# ---- what is needed --------------------------------------------------------------------------------------------


@dataclass
class _File:
    """A Python file of the user as its top-level statements."""

    path: str
    module: types.ModuleType
    statements: list[Statement]
    needed: set[int] = field(default_factory=set)
    constants: dict[int, str] = field(default_factory=dict)  # the text in place of a computed constant
    guarded: dict[int, str] = field(default_factory=dict)  # statement -> the operator that it registers
    names: set[str] = field(default_factory=set)


class _Copied:
    """The statements that the emitted file must have. ``registered``: operators that importing it defines."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.imports: dict[str, None] = {}
        self.registered: dict[str, None] = {}
        self.subject = ""
        self.defined: dict[str, str] = {}  # name -> the file that it is copied from, or its import

    # ---- what graphpar asks for ----

    def add_class(self, function: type) -> None:
        """Copy or import a custom ``autograd.Function``."""
        self.subject = f"The custom autograd.Function {function_name(function)}"
        outer = function.__qualname__.split(".")[0]
        if "<locals>" in function.__qualname__:
            raise self._refused("is defined inside a function, so emitted code can't include it")
        module = sys.modules.get(function.__module__)
        if module is None or attribute_of(module, function.__qualname__) is not function:
            raise self._refused(f"is not what {function.__module__} has under this name")
        if importable(module):
            self.imports[f"from {module.__name__} import {outer}  # noqa: F401"] = None
        else:
            self._need(self._file(module), outer)

    def add_operator(self, name: str, target: Any = None) -> None:
        """Copy the definition of the operator ``name``, or import the module that has it."""
        if name in self.registered:
            return
        self.subject = f"The operator {name}"
        defined = OPDEFS.get(name)
        module = sys.modules.get(defined._init_fn.__module__) if defined is not None else module_of_kernel(name, target)
        if module is None:
            raise self._refused("has no Python source that graphpar can find")
        if importable(module):
            self.registered[name] = None
            self.imports[f"import {module.__name__}  # noqa: F401  registers {name}"] = None
            return
        if defined is not None and "<locals>" in defined._init_fn.__qualname__:
            raise self._refused("is defined inside a function, so emitted code can't include it")
        self.registered[name] = None
        file = self._file(module)
        own = [n for n, value in vars(module).items() if isinstance(value, CustomOpDef) and value._qualname == name]
        found = [index for index, s in enumerate(file.statements) if registers(s.node, name, own)]
        if not any(defines(file.statements[index].node, name, own) for index in found):
            raise self._refused(f"is not defined at the top level of {Path(file.path).name}")
        for index in found:
            file.guarded[index] = name
        for index in found:
            self._need_statement(file, index)

    # ---- following names ----

    def _refused(self, why: str) -> GraphparError:
        return GraphparError(f"{self.subject} {why}. {_INSTALL}.")

    def _file(self, module: types.ModuleType) -> _File:
        path = getattr(module, "__file__", None) or ""
        lines = linecache.getlines(path) if path else []
        if not lines:
            raise self._refused("has no source file that graphpar can read")
        if path not in self.files:
            self.files[path] = _File(path, module, list(statements_of(path, lines)))
        return self.files[path]

    def _need(self, file: _File, name: str) -> None:
        if name in file.names or (hasattr(builtins, name) and name not in vars(file.module)):
            return
        file.names.add(name)
        value = vars(file.module).get(name)
        if isinstance(value, CustomOpDef):
            self._need_operator(value._qualname)
        binding = [index for index, statement in enumerate(file.statements) if name in statement.binds]
        for index in binding:
            self._need_statement(file, index)
        if not binding and name in vars(file.module) and not name.startswith("__"):
            raise self._refused(f"uses {name}, which no statement of {Path(file.path).name} defines by name")

    def _need_statement(self, file: _File, index: int) -> None:
        if index in file.needed:
            return
        statement = file.statements[index]
        if isinstance(statement.node, ast.Import | ast.ImportFrom):
            self._need_import(file, statement.node)
            return
        file.needed.add(index)
        for name in sorted(statement.binds & file.names):
            self._define(name, file.path)
        if isinstance(statement.node, ast.Assign | ast.AnnAssign | ast.AugAssign) and index not in file.guarded:
            self._need_constant(file, index)
            if index in file.constants:
                return
        for name in sorted(statement.uses):
            self._need(file, name)
        for name in called_operators(statement.node):
            if not is_builtin(name):
                self._need_operator(name)

    def _need_operator(self, name: str) -> None:
        """Add an operator that the current subject uses."""
        subject = self.subject
        self.add_operator(name)
        self.subject = subject

    def _define(self, name: str, origin: str) -> None:
        """Two files may import the same thing; they may not define different things of one name."""
        if self.defined.setdefault(name, origin) != origin:
            raise self._refused(f"uses two things called {name}, of which emitted code can have one: rename one")

    def _import(self, name: str, line: str) -> None:
        self._define(name, line)
        self.imports[line] = None

    def _need_import(self, file: _File, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            if bound not in file.names and alias.name != "*":
                continue
            if isinstance(node, ast.Import):
                found = sys.modules.get(alias.name.split(".")[0])
                if found is None or not importable(found):
                    raise self._refused(f"needs {alias.name}, which can't be imported by name elsewhere")
                self._import(bound, f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""))
                continue
            source = resolved_name(file.module, node)
            found = sys.modules.get(source)
            if found is not None and importable(found):
                self._import(
                    bound, f"from {source} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                )
            elif found is not None and alias.asname in (None, alias.name) and alias.name in vars(found):
                self._need(self._file(found), alias.name)  # a file beside the model's: copy from it, too
            else:
                raise self._refused(f"needs {alias.name} of {source}, which can't be imported by name elsewhere")

    def _need_constant(self, file: _File, index: int) -> None:
        """A constant that a definition refers to: its value must be the same on every rank."""
        statement = file.statements[index]
        for name in sorted(statement.binds & file.names):
            value = vars(file.module).get(name)
            if isinstance(
                value, type | types.FunctionType | types.BuiltinFunctionType | CustomOpDef | types.ModuleType
            ):
                continue
            if type(value).__module__ in ("typing", "types", "logging") or isinstance(
                value, torch._ops.OpOverloadPacket
            ):
                continue
            if not _is_constant(value) or len(statement.binds) > 1:
                kind = type(value).__name__
                raise self._refused(
                    f"uses the global {name} of {Path(file.path).name}, a {kind}: pass it as an argument"
                )
            node = statement.node
            plain = (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and _literal(node.value) == [value]
            )
            if not plain:  # computed, or changed since: as it is now
                file.constants[index] = f"{name} = {_literal_text(value)}"

    # ---- the text ----

    def text(self, model: str) -> str:
        """Assemble the file."""
        plain: list[str] = []
        guarded: dict[str, list[str]] = {}
        for file in self.files.values():
            for index in sorted(file.needed):
                text = file.constants.get(index, file.statements[index].text)
                if index in file.guarded:
                    guarded.setdefault(file.guarded[index], []).append(movable(file.statements[index], text))
                elif text not in plain:
                    plain.append(text)
        for name, texts in guarded.items():
            namespace, _, operator = name.partition("::")
            body = textwrap.indent("\n\n".join(texts), "    ")
            plain.append(
                f'if not hasattr(torch.ops.{namespace}, "{operator}"):  # else this process has it already\n\n{body}'
            )
        names = sorted({Path(file.path).name for file in self.files.values()})
        origin = f", copied from {', '.join(names)}" if names else ""
        future = "from __future__ import annotations\n\n" if names else ""
        if guarded:
            self.imports["import torch"] = None
        groups: dict[bool, list[str]] = {}
        for line in sorted(self.imports, key=lambda line: (line.startswith("from"), line)):
            groups.setdefault(line.split()[1].split(".")[0] in sys.stdlib_module_names, []).append(line)
        lines = ["\n".join(groups[own]) for own in (True, False) if own in groups]
        head = f'"""The operators that {model} brings along{origin}."""\n\n{future}' + "\n\n".join(lines)
        return "\n\n\n".join([head.rstrip(), *plain]) + "\n"


# ---- constants ---------------------------------------------------------------------------------------------------


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or type(value) in (int, float, complex, bool, str, bytes, torch.dtype)


def _literal_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal_text, value))}{',' if len(value) == 1 else ''})"
    return literal(value) if isinstance(value, float) else repr(value)


def _literal(node: ast.expr) -> list[Any]:
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, SyntaxError):
        return []
