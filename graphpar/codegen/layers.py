"""Which operators of a class are calls of its own layers.

    F.linear(x, self.q_proj.weight)               self.q_proj(x)          self.q_proj = nn.Linear(64, 64, bias=False)
    F.linear(x, self.q_proj.weight.bfloat16())    self.q_proj(x)          self.q_proj = layers.Linear(64, 64, bias=False)
    F.rms_norm(x, [64], self.norm.weight, 1e-05)  self.norm(x)            self.norm = nn.RMSNorm(64, eps=1e-05)

Such a program is shorter, and hooks and whatever takes the place of an ``nn.Linear`` work. A layer of which the parameters are read in
another dtype than that in which they are stored is one of ``layers.py``, which casts them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpar.codegen.attributes import Tree
from graphpar.ir.program import TensorInfo, value_of
from graphpar.operators.parameter_casts import casts_parameter
from graphpar.operators.spelling import given_arguments
from graphpar.operators.table import TABLE, record_of

_CLASSES = {
    f"{module.__module__}.{module.__qualname__}": record.module
    for record in TABLE.values()
    if record.module
    for module in [getattr(nn, record.module)]
}
"""The modules of torch that call an operator with their own parameters, by the path of their class."""
_OWN = {"input", "indices", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"}
"""The arguments of such an operator that a module has or is called with."""


@dataclass(frozen=True)
class Layer:
    """A module of torch's: ``kind`` is its class; ``casts``: it computes in the dtype of its input, with parameters stored in another."""

    kind: str
    eps: float | None = None
    casts: bool = False

    def constructor(self, tensors: Mapping[str, TensorInfo]) -> str:
        """Write its constructor: ``nn.Linear(4096, 1024, bias=False)``."""
        weight = tensors["weight"]
        sizes = ", ".join(map(str, weight.shape))
        if self.kind == "Linear":
            sizes = f"{weight.shape[1]}, {weight.shape[0]}"
        elif self.kind != "Embedding" and len(weight.shape) > 1:
            sizes = f"({sizes})"
        eps = "" if self.eps == _default(self.kind, "eps") else f", eps={self.eps!r}"
        unbiased = ", bias=False" if _default(self.kind, "bias") and "bias" not in tensors else ""
        dtype = "" if weight.dtype is torch.float32 else f", dtype={weight.dtype}"
        return f"{'layers' if self.casts else 'nn'}.{self.kind}({sizes}{eps}{unbiased}{dtype})"


@dataclass(frozen=True)
class Layers:
    """The layers of a class by path, and the operators that are calls of them."""

    by_path: Mapping[str, Layer] = field(default_factory=dict)
    calls: Mapping[fx.Node, str] = field(default_factory=dict)

    def constructors(self, tree: Tree, classes: Mapping[str, str], prefix: str = "") -> dict[str, str]:
        """Return how each of torch's modules in ``tree`` is made, by path; those of which other operators read the parameters, too."""
        found = {}
        for path, holder in _leaves(tree, ""):
            layer = self.by_path.get(path, _unused(classes.get(f"{prefix}{path}", ""), holder.tensors))
            if layer is not None:
                found[path] = layer.constructor(holder.tensors)
        return found

    @staticmethod
    def of(graph: fx.Graph, tree: Tree, classes: Mapping[str, str], prefix: str = "") -> Layers:
        """Find the layers of the class whose forward is ``graph`` and whose modules are ``tree``.

        Args:
            classes: module path -> the user's class; ``prefix`` is that of the class's own modules.
        """
        uses: dict[str, dict[fx.Node, Layer]] = {}
        for node in graph.nodes:
            found = _use(node, tree)
            if found is not None:
                uses.setdefault(found[0], {})[node] = found[1]
        by_path: dict[str, Layer] = {}
        calls: dict[fx.Node, str] = {}
        for path, nodes in uses.items():
            own = _CLASSES.get(classes.get(f"{prefix}{path}", ""))
            fitting = {node: layer for node, layer in nodes.items() if own in (None, layer.kind)}
            if len(set(fitting.values())) == 1:
                by_path[path] = next(iter(fitting.values()))
                calls |= dict.fromkeys(fitting, path)
        return Layers(by_path, calls)


def _default(kind: str, name: str) -> Any:
    """Return what a module of torch takes for ``name`` where it is not said; None where it has no such option."""
    parameters = inspect.signature(getattr(nn, kind)).parameters
    return parameters[name].default if name in parameters else None


def given(node: fx.Node) -> fx.Node:
    """Return what a layer is called with, of the operator that is its call."""
    options = given_arguments(node)
    operand = options.get("input", options.get("indices"))
    assert isinstance(operand, fx.Node)
    return operand


def _use(node: fx.Node, tree: Tree) -> tuple[str, Layer] | None:
    """Return the path of the module whose call ``node`` is, and what module that must be."""
    arguments = _arguments(node)
    if arguments is None:
        return None
    kind, weight, bias, eps = arguments
    tensors = {name: _parameter(item, node) for name, item in (("weight", weight), ("bias", bias)) if item is not None}
    read = [found for found in tensors.values() if found is not None]
    if len(read) != len(tensors):
        return None
    owners = {name.rpartition(".")[0] for name, _ in read}
    if len(owners) > 1 or [name.rpartition(".")[2] for name, _ in read] != list(tensors):
        return None
    path = owners.pop()
    holder = _at(tree, path)
    if (
        not path
        or holder is None
        or list(holder.tensors) != list(tensors)
        or holder.children
        or holder.block is not None
    ):
        return None
    stored = {info.dtype for info in holder.tensors.values()}
    if len(stored) > 1 or any(info.kind != "parameter" for info in holder.tensors.values()):
        return None
    if not _has_shapes(kind, holder.tensors):
        return None
    casts = {cast for _, cast in read}
    wanted = value_of(given(node)).dtype
    if len(casts) > 1 or not casts <= {None, wanted} or (kind == "Embedding" and casts != {None}):
        return None
    return path, Layer(kind, eps, casts != {None})


def _arguments(node: fx.Node) -> tuple[str, Any, Any, float | None] | None:
    """Return kind, weight, bias and eps of an operator that a layer of torch's may be."""
    kind = record_of(node).module
    if not kind:
        return None
    options = given_arguments(node)
    weight = options.get("weight")
    if options.keys() - _OWN or not isinstance(weight, fx.Node):
        return None
    if list(options.get("normalized_shape", value_of(weight).shape)) != list(value_of(weight).shape):
        return None
    return kind, weight, options.get("bias"), options.get("eps", _default(kind, "eps"))


def _parameter(item: Any, user: fx.Node) -> tuple[str, torch.dtype | None] | None:
    """Return the name of the parameter that ``item`` is, and the dtype in which it is read, where it is cast for ``user`` alone."""
    if not isinstance(item, fx.Node) or not isinstance(value_of(item), Tensor):
        return None
    if item.op == "get_attr":
        return str(item.target), None
    if casts_parameter(item) and list(item.users) == [user]:
        return str(item.all_input_nodes[0].target), value_of(item).dtype
    return None


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    """Yield the modules that hold parameters alone, and nothing below them."""
    for name, child in tree.children.items():
        inner = f"{path}.{name}" if path else name
        if child.tensors and not child.children and child.block is None:
            yield inner, child
        if child.block is None:
            yield from _leaves(child, inner)


def _unused(module_class: str, tensors: Mapping[str, TensorInfo]) -> Layer | None:
    """Return the module of torch's with these parameters that ``module_class`` is, where nothing calls it."""
    kind = _CLASSES.get(module_class)
    parameters = {name: info for name, info in tensors.items() if info.kind == "parameter"}
    if kind is None or set(parameters) - {"weight", "bias"} or len({i.dtype for i in tensors.values()}) > 1:
        return None
    return Layer(kind, _default(kind, "eps")) if _has_shapes(kind, parameters) else None


def _has_shapes(kind: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether torch's module ``kind`` may have parameters of these shapes; operators take biases of one element, too."""
    if "weight" not in tensors:
        return False
    weight = tuple(tensors["weight"].shape)
    normalised = "elementwise_affine" in inspect.signature(getattr(nn, kind)).parameters
    biased = (weight if normalised else weight[:1]) if _default(kind, "bias") else None
    if "bias" in tensors and tuple(tensors["bias"].shape) != biased:
        return False
    return normalised or len(weight) == 2


def _at(tree: Tree, path: str) -> Tree | None:
    current: Tree | None = tree
    for part in path.split("."):
        current = current.children.get(part) if current is not None and current.block is None else None
    return current
