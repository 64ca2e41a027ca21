"""Which operators of a class are calls of its own layers.

    F.linear(x, self.q_proj.weight)               self.q_proj(x)          self.q_proj = nn.Linear(64, 64, bias=False)
    F.linear(x, self.q_proj.weight.bfloat16())    self.q_proj(x)          self.q_proj = layers.Linear(64, 64, bias=False)
    F.conv2d(x, self.conv.weight, padding=[1, 1]) self.conv(x)            self.conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    F.batch_norm(x, self.bn.running_mean, ...)    self.bn(x)              self.bn = nn.BatchNorm2d(64)

Such a program is shorter, and hooks and whatever takes the place of an ``nn.Linear`` work. A layer of which the parameters are read in
another dtype than that in which they are stored is one of ``layers.py``, which casts them. Where an operator is no call of the layer
that it reads (BatchNorm with statistics that stay as they are, a product whose bias is added after a sum), the layer is made all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from graphpar.codegen.attributes import Made, Tree
from graphpar.emitted import layers
from graphpar.ir.program import TensorInfo, operator_name, value_of
from graphpar.operators.parameter_casts import casts_parameter
from graphpar.operators.spelling import given_arguments, literal
from graphpar.operators.table import TABLE, record_of

_CLASSES = {
    f"{module.__module__}.{module.__qualname__}": module.__name__
    for record in TABLE.values()
    if record.module
    for module in {getattr(nn, record.module.format(dims)) for dims in (1, 2, 3)}
}
"""The modules of torch that call an operator with their own parameters, by the path of their class."""
_TOLD = ("Linear", "Embedding", "LayerNorm", "RMSNorm")
"""Those of which the parameters alone tell how they are made."""
_CALLED_WITH = ("input", "indices", "self", "x", "input1", "input2")
_TENSORS = ("weight", "bias", "running_mean", "running_var")
_OPTIONS = ("num_groups", "stride", "padding", "output_padding", "dilation", "groups", "eps", "momentum")
_FOLLOW = {"normalized_shape", "training", "use_input_stats", "cudnn_enable", "cudnn_enabled", "axes"}
"""The arguments of such an operator: what a module is called with, what it holds, how it is made, and what follows from these."""
_COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class Layer:
    """A module of torch's: ``kind`` is its class; ``casts``: it computes in the dtype of its input, with parameters stored in another."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    casts: bool = False

    def constructor(self, tensors: Mapping[str, TensorInfo]) -> str:
        """Write its constructor: ``nn.Linear(4096, 1024, bias=False)``."""
        sizes, options = self._arguments(tensors)
        texts = [*map(literal, sizes), *(f"{name}={literal(value)}" for name, value in options.items())]
        return f"{'layers' if self.casts else 'nn'}.{self.kind}({', '.join(texts)})"

    def has(self, tensors: Mapping[str, TensorInfo]) -> bool:
        """Whether the module that is so made has ``tensors``: operators take weights and biases of other shapes, too."""
        sizes, options = self._arguments(tensors)
        held = {name: (tuple(info.shape), info.dtype) for name, info in tensors.items()}
        return bool(sizes or self.kind == "PReLU") and _held(self.kind, tuple(sizes), tuple(options.items())) == held

    def _arguments(self, tensors: Mapping[str, TensorInfo]) -> tuple[list[Any], dict[str, Any]]:
        """Return its sizes, none where no such module has parameters of these shapes, and options that are not at their defaults."""
        options, first = dict(self.options), tensors.get("weight", tensors.get("running_mean"))
        if first is None:
            return [], {}
        sizes: list[Any] = []
        groups = options.get("groups", 1)
        match self.kind.rstrip("123d"), tuple(first.shape):
            case "Linear", (rows, columns):
                sizes = [columns, rows]
            case "Bilinear", (rows, *columns):
                sizes = [*columns, rows]
            case "Conv", (rows, columns, *kernel):
                sizes = [columns * groups, rows, _short(kernel)]
            case "ConvTranspose", (rows, columns, *kernel):
                sizes = [rows, columns * groups, _short(kernel)]
            case (("LayerNorm" | "RMSNorm"), shape):
                sizes = [_short(shape) if len(shape) == 1 else shape]
            case "GroupNorm", (channels,):
                sizes = [options.pop("num_groups"), channels]
            case "Embedding", (rows, columns):
                sizes = [rows, columns]
            case (("BatchNorm" | "InstanceNorm" | "PReLU"), (channels,)):
                sizes = [channels] if self.kind != "PReLU" or channels > 1 else []
        options["affine"] = "weight" in tensors
        options["track_running_stats"] = "running_mean" in tensors
        options["bias"] = "bias" in tensors or "weight" not in tensors
        options["dtype"] = None if first.dtype is torch.float32 else first.dtype
        known = {name: default for name, default in _defaults(self.kind).items() if name in options}
        return sizes, {name: value for name, value in options.items() if name in known and value != known[name]}


class _Use(NamedTuple):
    """What an operator is to the module at ``path``: ``called``, or reading what the module has."""

    path: str
    layer: Layer
    called: bool


@dataclass(frozen=True)
class Layers:
    """The layers of a class by path, the operators that are calls of them, and those that are part of such calls."""

    by_path: Mapping[str, Layer] = field(default_factory=dict)
    calls: Mapping[fx.Node, str] = field(default_factory=dict)
    counts: frozenset[fx.Node] = frozenset()

    def constructors(self, tree: Tree, classes: Mapping[str, str], prefix: str = "") -> dict[str, Made]:
        """Return how each of torch's modules in ``tree`` is made, by path; those of which other operators read the parameters, too."""
        found = {}
        for path, holder in _leaves(tree, ""):
            if (layer := self.by_path.get(path)) is not None:
                found[path] = Made(layer.constructor(holder.tensors), tuple(holder.tensors))
            elif (layer := _unused(classes.get(f"{prefix}{path}", ""), holder.tensors)) is not None:
                parameters = _parameters(holder.tensors)
                found[path] = Made(layer.constructor(parameters), tuple(parameters))
        return found

    @staticmethod
    def of(
        graph: fx.Graph,
        tree: Tree,
        classes: Mapping[str, str],
        prefix: str = "",
        *,
        at_lengths: Sequence[fx.Graph] = (),
        evaluated: fx.Graph | None = None,
    ) -> Layers:
        """Find the layers of the class whose forward is ``graph`` and whose modules are ``tree``.

        Args:
            classes: module path -> the user's class; ``prefix`` is that of the class's own modules.
            at_lengths: what the class computes at other lengths of the sequence, where these are other graphs, on the same layers.
            evaluated: the same in evaluation.
        """
        mine = Layers._of(graph, tree, classes, prefix, trains=True)
        for each in at_lengths:
            mine = mine._with(Layers._of(each, tree, classes, prefix, trains=True))
        return mine if evaluated is None else mine._with(Layers._of(evaluated, tree, classes, prefix, trains=False))

    def _with(self, other: Layers) -> Layers:
        """Add the calls of another graph of the class."""
        by_path = {**other.by_path, **self.by_path}
        same = {path for path, layer in other.by_path.items() if layer == by_path[path]}
        calls = {node: path for node, path in other.calls.items() if path in same}
        counts = {node for node in other.counts if _counts_batches(node) in same}
        return Layers(by_path, {**self.calls, **calls}, self.counts | counts)

    @staticmethod
    def _of(graph: fx.Graph, tree: Tree, classes: Mapping[str, str], prefix: str, *, trains: bool) -> Layers:
        uses: dict[str, dict[fx.Node, _Use]] = {}
        counts: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if (found := _use(node, tree, trains)) is not None:
                uses.setdefault(found.path, {})[node] = found
            elif (path := _counts_batches(node)) is not None:
                counts.setdefault(path, []).append(node)
        by_path: dict[str, Layer] = {}
        calls: dict[fx.Node, str] = {}
        counted: list[fx.Node] = []
        for path, nodes in uses.items():
            own = _CLASSES.get(classes.get(f"{prefix}{path}", ""))
            fitting = {node: use for node, use in nodes.items() if own in (None, use.layer.kind)}
            if len({use.layer for use in fitting.values()}) != 1:
                continue
            by_path[path] = next(iter(fitting.values())).layer
            called = [node for node, use in fitting.items() if use.called]
            holder = tree.at(path)
            counting = len(called) if trains and holder is not None and _COUNT in holder.tensors else 0
            if len(counts.get(path, ())) == counting:  # each call of a BatchNorm counts a batch
                calls |= dict.fromkeys(called, path)
                counted += counts.get(path, ())
        return Layers(by_path, calls, frozenset(counted))


@cache
def _defaults(kind: str) -> Mapping[str, Any]:
    """Return what a module of torch takes for each option that is not said."""
    return {name: each.default for name, each in inspect.signature(getattr(nn, kind)).parameters.items()}


@cache
def _held(kind: str, sizes: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    """Return shape and dtype of what a module of torch's holds that is made so."""
    module = getattr(nn, kind)(*sizes, **dict(options), device="meta")
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}


def _short(value: Any) -> Any:
    """Write sizes that are all the same as one, and others as a tuple: 3, (3, 1)."""
    if not isinstance(value, list | tuple):
        return value
    return value[0] if len(set(value)) == 1 else tuple(value)


def given(node: fx.Node) -> list[fx.Node]:
    """Return what a layer is called with, of the operator that is its call."""
    named = _named(node)
    return [named[name] for name in _CALLED_WITH if isinstance(named.get(name), fx.Node)]


def _named(node: fx.Node) -> dict[str, Any]:
    """Return the arguments that are given, by their names."""
    if isinstance(node.target, torch._ops.OpOverload):
        return given_arguments(node)
    return dict(zip(inspect.signature(node.target).parameters, node.args)) | dict(node.kwargs)  # type: ignore[arg-type]


def _use(node: fx.Node, tree: Tree, trains: bool) -> _Use | None:
    """Return which module of torch's ``node`` is a call of, or reads, where modules are in training or not."""
    record = record_of(node)
    if not record.module:
        return None
    named, (operand, *_) = _named(node), given(node)
    kind = record.module.format(max(1, value_of(operand).ndim - 2))
    given_tensors = {name: named[name] for name in _TENSORS if named.get(name) is not None}
    options = {name: _short(named[name]) for name in _OPTIONS if name in named}
    further = named.keys() - {*_CALLED_WITH, *_TENSORS, *_OPTIONS, *_FOLLOW}
    if further or not given_tensors or any(isinstance(option, fx.Node) for option in options.values()):
        return None
    read = {name: found for name, item in given_tensors.items() if (found := _parameter(item, node)) is not None}
    owners = {name.rpartition(".")[0] for name, _ in read.values()}
    path = owners.pop() if len(owners) == 1 else ""
    holder = tree.at(path) if path else None
    if holder is None or holder.children or holder.block is not None or next(iter(given_tensors)) not in read:
        return None
    if any(found.rpartition(".")[2] != name for name, (found, _) in read.items()):
        return None
    casts = {cast for _, cast in read.values()}
    layer = Layer(kind, tuple(options.items()), casts != {None})
    if len(casts) > 1 or not casts <= {None, value_of(operand).dtype} or (layer.casts and not hasattr(layers, kind)):
        return None
    if not layer.has(holder.tensors) or not all(info.persistent for info in holder.tensors.values()):
        return None
    follows = named.get("training", named.get("use_input_stats", trains)) is trains and record.composite is None
    return _Use(path, layer, follows and read.keys() == given_tensors.keys() == holder.tensors.keys() - {_COUNT})


def _parameter(item: Any, user: fx.Node) -> tuple[str, torch.dtype | None] | None:
    """Return the name of the parameter or buffer that ``item`` is, and the dtype that it is read in where it is cast for ``user`` alone."""
    if not isinstance(item, fx.Node) or not isinstance(value_of(item), Tensor):
        return None
    if item.op == "get_attr":
        return str(item.target), None
    if casts_parameter(item) and list(item.users) == [user]:
        return str(item.all_input_nodes[0].target), value_of(item).dtype
    return None


def _counts_batches(node: fx.Node) -> str | None:
    """Return the path of the BatchNorm whose batches ``node`` counts, if that is all that it does: it may go on from another count."""
    if not _adds_one(node) or not all(_adds_one(user) for user in node.users):
        return None
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and _adds_one(source):
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    path, _, name = str(source.target).rpartition(".")
    return path if name == _COUNT else None


def _adds_one(node: fx.Node) -> bool:
    return operator_name(node) == "add_" and node.args[1:] == (1,)


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    """Yield the modules that hold parameters alone, and nothing below them."""
    for name, child in tree.children.items():
        inner = f"{path}.{name}" if path else name
        if child.tensors and not child.children and child.block is None:
            yield inner, child
        if child.block is None:
            yield from _leaves(child, inner)


def _parameters(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: info for name, info in tensors.items() if info.kind == "parameter"}


def _unused(module_class: str, tensors: Mapping[str, TensorInfo]) -> Layer | None:
    """Return the module of torch's with these parameters that ``module_class`` is, where nothing calls it."""
    kind = _CLASSES.get(module_class)
    return Layer(kind) if kind in _TOLD and Layer(kind).has(_parameters(tensors)) else None
