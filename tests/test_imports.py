"""Imports point one way: a folder imports what stands before it in ``ORDER``, and nothing goes round in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphpar.frontend.fixed_size import NUMBERS, TWIN
from graphpar.ir.metadata import NodeMeta
from graphpar.passes.sharding.linear_bias import _OWNER
from graphpar.passes.sharding.pins import POINT

ROOT = Path(__file__).parents[1]
ORDER = (
    ("text",), ("runtime", "emitted"), ("errors",), ("hardware", "schedules"), ("ir",), ("operators",),
    ("codegen", "cost_models"), ("frontend",), ("annotations",), ("passes",), ("report",), ("parts",), ("verification",), ("api",),
    ("cli",), ("__main__",),
)  # fmt: skip
"""Folders and files of ``graphpar``; those of one step know nothing of each other."""
STEP = {name: step for step, names in enumerate(ORDER) for name in names}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: {self.imported}"


@functools.cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    found = {}
    for path in sorted((ROOT / "graphpar").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(*, types: bool = False) -> Iterator[Import]:
    """What is imported when a module is loaded, when one of its functions runs, or if ``types``, for types alone."""
    known = modules()
    for name, path in known.items():
        for node in _run(tree(path), types):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                assert node.level == 0 and node.module is not None, f"{path}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for imported in names:
                if imported.startswith("graphpar."):
                    module = imported if imported in known else imported.rpartition(".")[0]
                    if module != "graphpar":
                        yield Import(name, module, node.lineno)


def _run(parent: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(parent):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from _run(node, types)


def _keys(module: ast.AST) -> Iterator[str]:
    """Keys of nodes' metadata, written out or by the name of a constant."""
    for node in ast.walk(module):
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_meta(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_meta(node.func.value):
            keys = node.args[:1]
        elif isinstance(node, ast.Compare) and any(map(_is_meta, node.comparators)):
            keys = [node.left]
        elif isinstance(node, ast.Assign) and any(map(_is_meta, node.targets)):
            keys = [
                key
                for inner in ast.walk(node.value)
                if isinstance(inner, ast.Dict)
                for key in inner.keys
                if key is not None
            ]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def test_metadata_of_nodes_is_declared() -> None:
    constants = {"POINT": POINT, "_OWNER": _OWNER, "NUMBERS": NUMBERS, "TWIN": TWIN}
    declared = set(NodeMeta.__annotations__)

    found = {(key, name) for name, path in modules().items() for key in _keys(tree(path))}

    assert set(constants.values()) <= declared
    assert {(key, name) for key, name in found if key not in declared} == set()
    assert declared - {key for key, _ in found} <= set(constants.values()), "keys that nobody uses"


def _folder(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_folder_has_its_place() -> None:
    assert {_folder(name) for name in modules()} - {""} == set(STEP)


def test_imports_point_one_way() -> None:
    upward = [
        str(found)
        for found in imports()
        if (own := _folder(found.importer)) and own != (other := _folder(found.imported)) and STEP[other] >= STEP[own]
    ]

    assert not upward


def test_no_imports_go_round_in_a_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules() if name != "graphpar"}  # it loads lazily
    for found in imports(types=True):
        if found.importer != "graphpar" and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    while free := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in free}

    assert not graph, {name: sorted(needed & graph.keys()) for name, needed in graph.items()}


def test_text_files_are_utf8_in_any_locale() -> None:
    """Names and comments of models have any characters; without an encoding the locale chooses one that may lack them."""
    wrong = []
    for file in modules().values():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = node.func.attr in ("read_text", "write_text")
                if text and "encoding" not in {keyword.arg for keyword in node.keywords}:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
