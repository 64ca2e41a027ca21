"""Print ``__init__``: a module's parameters, buffers and blocks, under the names that they have in the user's model.

Names with numbers become ``nn.ModuleDict`` entries, so a stage that holds layers 4 to 7 has the keys ``layers.4`` to
``layers.7``. Everything is built without values; the runtime allocates and loads it. A comment says how a tensor is sharded, and
whether its gradient must still be summed over ranks.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from graphpar.ir.program import OTHERWISE, TensorInfo
from graphpar.operators.spelling import literal
from graphpar.runtime.layout import R, Shard, Type


@dataclass
class Tree:
    """A module of the class to be printed: its tensors, its submodules, or the block that it is an instance of."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    children: dict[str, Tree] = field(default_factory=dict)
    block: str | None = None
    root: bool = False  # the class itself, which is no container

    def at(self, path: str) -> Tree | None:
        """Return the module of a path; None where the class has none, as inside of a block."""
        current = self
        for part in filter(None, path.split(".")):
            found = None if current.block is not None else current.children.get(part)
            if found is None:
                return None
            current = found
        return current

    def keyed(self) -> bool:
        """Whether the children are numbers, so that the module is a ModuleDict."""
        numbered = bool(self.children) and all(name.isdigit() for name in self.children)
        return numbered and not self.tensors and not self.root


def build_tree(infos: Mapping[str, TensorInfo], blocks: Mapping[str, str], modules: Sequence[str]) -> Tree:
    """Build the tree of the tensors ``infos`` (by name) and the block instances ``blocks`` (path -> class name).

    Args:
        modules: all paths of the user's model, whose order the tree keeps.
    """
    root = Tree(root=True)

    def at(path: str) -> Tree:
        tree = root
        for part in path.split("."):
            tree = tree.children.setdefault(part, Tree())
        return tree

    owners = {name.rpartition(".")[0] for name in infos} | set(blocks)
    for path in modules:
        if path in owners and path:
            at(path)
    for path, name in blocks.items():
        at(path).block = name
    for name, info in infos.items():
        owner, _, leaf = name.rpartition(".")
        (at(owner) if owner else root).tensors[leaf] = info
    return root


def reference(tree: Tree, name: str) -> str:
    """Write how the class's forward reaches ``name``: ``self.layers["4"].mlp.weight``."""
    text, current = "self", tree
    parts = name.split(".")
    for position, part in enumerate(parts):
        inside = current.children.get(part)
        if current.block is not None:  # inside of a block, whose class knows its own tree
            inside = Tree(block=current.block) if position < len(parts) - 1 else None
        if current.keyed() and inside is not None:
            text += f'["{part}"]'
        elif _is_plain(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {literal(part)})"
        if inside is None:
            assert position == len(parts) - 1, f"{name} is not in the class"
            break
        current = inside
    return text


def _assignment(target: str, value: str) -> str:
    """``target = value`` where the target may be ``getattr(self.gains, "0")``."""
    if target.startswith("getattr(") and target.endswith(")"):
        return f"setattr({target.removeprefix('getattr(').removesuffix(')')}, {value})"
    return f"{target} = {value}"


class Made(NamedTuple):
    """How a module of torch's is made, and the tensors that it then has."""

    text: str
    tensors: tuple[str, ...]


class InitPrinter:
    """Prints the body of ``__init__`` of one class."""

    def __init__(self, tree: Tree, constructors: Mapping[str, Made], *, train: bool = True) -> None:
        self.tree = tree
        self.train = train
        self.constructors = constructors  # of torch's modules, by path
        self.lines: list[tuple[str, str]] = []
        self.needs_parameters = False

    def print(self, ties: Sequence[tuple[str, ...]] = ()) -> list[tuple[str, str]]:
        """List the statements, each with a comment or an empty one."""
        self._tensors("self", self.tree.tensors)
        for name, child in self.tree.children.items():
            self._child("self", self.tree, name, child, name)
        for group in ties:
            for other in group[1:]:
                self._line(_assignment(reference(self.tree, other), reference(self.tree, group[0])), "tied")
        return self.lines

    def _line(self, text: str, comment: str = "") -> None:
        self.lines.append((text, comment))

    def _child(self, owner: str, parent: Tree, name: str, child: Tree, path: str) -> None:
        made = self._constructor(child, path)
        has = self._has(child, path, made)
        comment = self._placed({n: info for n, info in child.tensors.items() if n in has})
        target = f'{owner}["{name}"]' if parent.keyed() else f"{owner}.{name}"
        if parent.keyed() or _is_plain(name):
            self._line(f"{target} = {made}", comment)
        else:
            target = f"getattr({owner}, {literal(name)})"
            self._line(f"{owner}.add_module({literal(name)}, {made})", comment)
        self._frozen(target, child, made)
        if child.block is not None:
            return
        self._tensors(target, {n: info for n, info in child.tensors.items() if n not in has})
        if not self._all_blocks(child):
            for inner, grandchild in child.children.items():
                self._child(target, child, inner, grandchild, f"{path}.{inner}")

    def _has(self, child: Tree, path: str, made: str) -> Sequence[str]:
        """The tensors of ``child`` that its constructor ``made`` gives it."""
        if path in self.constructors:
            return self.constructors[path].tensors
        own = child.block is None and made not in ("nn.Module()", "nn.ModuleDict()")
        return [name for name, info in child.tensors.items() if own and _is_parameter(info)]

    def _all_blocks(self, tree: Tree) -> bool:
        return tree.keyed() and all(child.block is not None for child in tree.children.values())

    def _constructor(self, child: Tree, path: str) -> str:
        if child.block is not None:
            return f"{child.block}()"
        if self._all_blocks(child):
            return _block_dict(child)
        if child.keyed():
            return "nn.ModuleDict()"
        if path in self.constructors:
            return self.constructors[path].text
        parameters = {name: info for name, info in child.tensors.items() if _is_parameter(info)}
        if not parameters or child.children:
            return "nn.Module()"
        dtype, *others = {info.dtype for info in parameters.values()}
        if others or "dtype" in parameters or not all(map(_is_plain, parameters)):
            return "nn.Module()"
        self.needs_parameters = True
        shapes = ", ".join(f"{name}={_shape(info)}" for name, info in parameters.items())
        return f"parameters({shapes}{_dtype_option(dtype)})"

    def _frozen(self, target: str, child: Tree, made: str) -> None:
        if made.startswith(("nn.Module", "Block")) or child.block is not None:
            return
        frozen = [name for name, info in child.tensors.items() if _is_parameter(info) and not info.requires_grad]
        if frozen and len(frozen) == sum(_is_parameter(info) for info in child.tensors.values()):
            self._line(f"{target}.requires_grad_(False)")
            return
        for name in frozen:
            self._line(f"{target}.{name}.requires_grad_(False)")

    def _tensors(self, target: str, tensors: Mapping[str, TensorInfo]) -> None:
        for name, info in tensors.items():
            made = f"torch.empty({_shape(info)}{_dtype_option(info.dtype)})"
            if not _is_parameter(info):
                persistent = "" if info.persistent else ", persistent=False"
                note = "True: a condition was otherwise, and the step is an error" if name.startswith(OTHERWISE) else ""
                self._line(f"{target}.register_buffer({literal(name)}, {made}{persistent})", note)
                continue
            parameter = f"nn.Parameter({made}{'' if info.requires_grad else ', requires_grad=False'})"
            registered = f"{target}.register_parameter({literal(name)}, {parameter})"
            self._line(f"{target}.{name} = {parameter}" if _is_plain(name) else registered, self._placed({"": info}))

    def _placed(self, tensors: Mapping[str, TensorInfo]) -> str:
        """``weight S(0)@tp of [4096, 4096]; bias R@tp: its gradient is summed once a step``"""
        groups: dict[str, list[str]] = {}
        for name, info in tensors.items():
            kinds = [
                f"{kind}@{axis}" for axis, kind in info.spec if isinstance(kind, Shard) or self._summed(info, kind)
            ]
            whole = f" of {list(info.whole)}" if info.whole not in (None, info.shape) else ""
            if kinds:
                groups.setdefault(f"{', '.join(kinds)}{whole}", []).append(name)
        shown = []
        for text, names in groups.items():
            summed = any(self._summed(tensors[name], kind) for name in names for _, kind in tensors[name].spec)
            which = "its gradient is" if len(names) == 1 else "their gradients are"
            shown.append(f"{', '.join(names)} {text}{f': {which} summed once a step' if summed else ''}".strip())
        return "; ".join(shown)

    def _summed(self, info: TensorInfo, kind: Type) -> bool:
        """Whether each rank has only a partial gradient until the end of a step."""
        return kind is R and info.requires_grad and self.train


def _is_parameter(info: TensorInfo) -> bool:
    return info.kind == "parameter"


def _is_plain(name: str) -> bool:
    """Whether ``name`` can be written behind a dot."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _dtype_option(dtype: torch.dtype) -> str:
    return "" if dtype is torch.float32 else f", dtype={dtype}"


def _shape(info: TensorInfo) -> str:
    return f"({', '.join(map(str, info.shape))}{',' if len(info.shape) == 1 else ''})"


def _block_dict(tree: Tree) -> str:
    """``nn.ModuleDict({str(i): Layer() for i in range(4, 8)})``, or several such runs."""
    items = [(int(name), child.block) for name, child in tree.children.items()]
    runs: list[tuple[int, int, str | None]] = []
    for number, block in items:
        if runs and runs[-1][2] == block and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1, block)
        else:
            runs.append((number, number + 1, block))
    if len(runs) == 1 and runs[0][1] - runs[0][0] > 1:
        begin, end, block = runs[0]
        return f"nn.ModuleDict({{str(i): {block}() for i in {_range(begin, end)}}})"
    parts = []
    for begin, end, block in runs:
        if end - begin == 1:
            parts.append(f'"{begin}": {block}()')
        else:
            parts.append(f"**{{str(i): {block}() for i in {_range(begin, end)}}}")
    return f"nn.ModuleDict({{{', '.join(parts)}}})"


def _range(begin: int, end: int) -> str:
    return f"range({begin}, {end})" if begin else f"range({end})"
