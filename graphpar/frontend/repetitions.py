"""Put the operators of repeated modules into a traced graph, as a trace of each would have.

%add_1 = add(...)                            layers.1, the example
repeated_example([%add, weights of layers.1], 0)
%repetition = repetition([%add_1, weights of layers.2], 0)      ──►  %add_2 = add(...)      layers.2
%result = repetition[0]
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.export import ExportedProgram
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.ir.program import memory_of, named_arguments
from graphpar.text import is_below

_library = torch.library.Library("graphpar_repetitions", "FRAGMENT")
_library.define("example(Tensor[] inputs, int number) -> Tensor[]")
_library.define("repetition(Tensor[] inputs, int number) -> Tensor[]")
EXAMPLE = has_side_effect(torch.ops.graphpar_repetitions.example.default)
"""Stands behind the operators of an example, so that the values that it takes from outside are known."""
REPETITION = has_side_effect(torch.ops.graphpar_repetitions.repetition.default)
"""Stands for the operators of a repetition; its results are the values that are used outside."""

PLACE = "graphpar_place"
"""A key of nodes' metadata: the number of the example that a node is of, and its place there."""
_ASSERT = torch.ops.aten._assert_tensor_metadata.default
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")


@dataclass
class Example:
    """A traced instance of a repeated module.

    Attributes:
        nodes: how many it has.
        results: the place among them of each tensor that its calls made.
        names: the count of names by what they begin with, before and after it.
        like: the number of the example whose calls it made again.
    """

    number: int
    nodes: int
    results: list[int]
    names: dict[str, tuple[int, int]]
    like: int | None = None


@dataclass(frozen=True)
class Repetition:
    """An instance that is like an example.

    Attributes:
        results: the places, in the example's results, of those that are used outside.
        shifts: by how much numbers of names are higher than in the example.
    """

    example: int
    results: list[int]
    shifts: dict[str, int]


def copy_well(nodes: list[fx.Node], outside: Iterable[Tensor] = ()) -> bool:
    """Whether copies of these nodes mean the same: they are calls, and what they write is their own."""
    own = {memory_of(value) for node in nodes for value in _tensors(node)} - {memory_of(each) for each in outside}
    return all(_copies_well(node, own) for node in nodes)


def _copies_well(node: fx.Node, own: set[int]) -> bool:
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "torch")
    return all(memory_of(value) in own for each in written(node) for value in _tensors(each))


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given, found = named_arguments(node), list[fx.Node]()
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.map_arg(given[argument.name], found.append)
    return found


def is_number(node: fx.Node) -> bool:
    """Whether the value of ``node`` is a size, or computed from sizes; they are the same in each instance."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]


class ExpansionError(Exception):
    """The operators of an example are not as they were recorded."""


def _require(condition: object, why: str) -> None:
    if not condition:
        raise ExpansionError(why)


def expand(exported: ExportedProgram, examples: dict[int, Example], repetitions: dict[int, Repetition]) -> None:
    """Replace each repetition by copies of its example's operators.

    Raises:
        ExpansionError: that can't be done exactly.
    """
    graph = exported.graph_module.graph
    writes = False
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            ours = node.target in (EXAMPLE, REPETITION)
            _require(not ours or node.graph is graph, "a repeated module is in a region of its own")
            writes = writes or bool(written(node))
    marks = {node.args[1]: node for node in graph.nodes if node.target is EXAMPLE}
    if not repetitions:
        examples = {}
    originals = {number: _Original(examples[number], mark) for number, mark in marks.items() if number in examples}
    for number, original in originals.items():
        like = examples[number].like
        _require(
            like is None or not repetitions or originals[like].equals(original), "equal calls made other operators"
        )
    found = [node for node in graph.nodes if node.target is REPETITION]
    _require(len(found) == len(repetitions), "a repetition is lost")
    for node in found:
        repetition = repetitions[node.args[1]]
        originals[repetition.example].copy(node, repetition, apart=writes)
    for mark in marks.values():
        graph.erase_node(mark)


class _Original:
    """The operators of an example in the exported graph."""

    def __init__(self, example: Example, mark: fx.Node) -> None:
        self.example, self.mark = example, mark
        self.nodes = _before(mark, example.number)
        by_place = {node.meta[PLACE][1]: node for node in self.nodes if PLACE in node.meta}
        self.results = [by_place.get(place) for place in example.results]
        self.depth = len(mark.meta["nn_module_stack"])
        kept = [node for node in mark.graph.nodes if node.meta.get(PLACE, (None,))[0] == example.number]
        _require(list(by_place.values()) == kept, "other operators are among those of an example")
        self._check()

    @property
    def inputs(self) -> list[fx.Node]:
        """What it takes from outside. Where that is of a repetition, it is a copy as soon as that is expanded."""
        return list(self.mark.args[0])  # type: ignore[arg-type]

    def _check(self) -> None:
        inside, inputs = set(self.nodes), set(self.inputs)
        taken = [value for node in self.inputs for value in _tensors(node)]
        _require(copy_well(self.nodes, taken), "an operator of an example can't be copied")
        for node in self.nodes:
            _require(len(node.meta.get("nn_module_stack") or ()) >= self.depth, "an operator is of no module")
            for each in node.all_input_nodes:
                size = isinstance(each.meta.get("val"), torch.SymInt | int)
                _require(
                    each in inside or each in inputs or size, "an example takes a value from outside that was not seen"
                )

    def equals(self, other: _Original) -> bool:
        """Whether ``other`` has the same operators, of its own inputs."""
        pairs = self._paired(other.inputs)
        if len(self.nodes) != len(other.nodes):
            return False
        for mine, its in zip(self.nodes, other.nodes):
            args = fx.map_arg((mine.args, mine.kwargs), lambda node: pairs.get(node, node))
            if mine.target is not its.target or args != (its.args, its.kwargs):
                return False
            pairs[mine] = its
        return True

    def _paired(self, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        pairs: dict[fx.Node, fx.Node] = {}
        _require(len(inputs) == len(self.inputs), "a repetition has other inputs")
        for mine, its in zip(self.inputs, inputs):
            _require(pairs.setdefault(mine, its) is its, "a repetition has other inputs")
        return pairs

    def copy(self, place: fx.Node, repetition: Repetition, apart: bool) -> None:
        """Put copies before ``place``, and them in the place of its results; ``apart``: their values have memory of their own."""
        graph = place.graph
        pairs = self._paired(list(place.args[0]))  # type: ignore[arg-type]
        stacks: dict[tuple[str, ...], dict[str, Any]] = {}
        memory = _Memory(pairs)
        for value, number in zip(place.meta["val"], repetition.results):
            memory.share(self.results[number], value)

        def paired(node: fx.Node) -> fx.Node:
            _require(node in pairs or is_number(node), "an example takes a value from outside that was not seen")
            return pairs.get(node, node)

        with graph.inserting_before(place):
            for node in self.nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), paired)
                copied = graph.create_node(
                    node.op, node.target, args, kwargs, name=_shifted(node.name, repetition.shifts)
                )
                copied.meta = {**node.meta, "nn_module_stack": self._stack(node, place, stacks)}
                if apart:
                    copied.meta["val"] = memory.renewed(node.meta.get("val"))
                pairs[node] = copied
        for user in list(place.users):
            result = self.results[repetition.results[user.args[1]]]  # type: ignore[index]
            _require(
                user.target is operator.getitem and result in pairs, "a result of a repetition is none of its example"
            )
            user.replace_all_uses_with(pairs[result])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(place)

    def _stack(self, node: fx.Node, place: fx.Node, known: dict[tuple[str, ...], dict[str, Any]]) -> dict[str, Any]:
        """The modules that a copy of ``node`` is in: those that the repetition is in, then those inside."""
        entries = list(node.meta["nn_module_stack"].items())
        key = tuple(call for call, _ in entries)
        if key not in known:
            (old_call, (old, _)), (new_call, (new, _)) = (
                list(each.meta["nn_module_stack"].items())[-1] for each in (self.mark, place)
            )
            inner = {
                _moved(call, old_call, new_call): (_moved(path, old, new), kind)
                for call, (path, kind) in entries[self.depth :]
            }
            outer = dict(place.meta["nn_module_stack"])
            known[key] = outer | inner
        return known[key]


class _Memory:
    """New fake tensors that share memory with each other and with their inputs as those do that they replace."""

    def __init__(self, inputs: dict[fx.Node, fx.Node]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        for mine, its in inputs.items():
            for old, new in zip(_tensors(mine), _tensors(its)):
                self.storages[memory_of(old)] = new.untyped_storage()

    def share(self, old: fx.Node | None, new: Any) -> None:
        """Have copies of ``old`` share memory with ``new``, since other operators of the graph have views of it."""
        for each in _tensors(old) if old is not None else ():
            self.storages.setdefault(memory_of(each), new.untyped_storage())

    def renewed(self, value: Any) -> Any:
        return tree_map(lambda each: self._tensor(each) if isinstance(each, FakeTensor) else each, value)

    def _tensor(self, old: FakeTensor) -> Tensor:
        made = fake_like(old, storage=self.storages.get(memory_of(old)))
        self.storages.setdefault(memory_of(old), made.untyped_storage())
        return made.requires_grad_(old.requires_grad)


def _moved(path: str, old: str, new: str) -> str:
    _require(is_below(path, old), "a module is called from another one")
    return new + path[len(old) :]


def _shifted(name: str, shifts: dict[str, int]) -> str:
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    base, number = match.groups()
    return f"{base}_{int(number or 0) + shifts.get(base, 0)}"


def _before(mark: fx.Node, number: int) -> list[fx.Node]:
    """The nodes of an example, which are before its mark, and the asserts that torch.export added to them."""
    found: list[fx.Node] = []
    node = mark.prev
    while node.meta.get(PLACE, (None,))[0] == number or node.target is _ASSERT:
        found.append(node)
        node = node.prev
    return found[::-1]


# ---- fake tensors made from others, without running an operator on them --------------------------------------


def fake_like(
    value: FakeTensor, dtype: torch.dtype | None = None, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake tensor of the shape and strides of ``value``, in memory of its own or in ``storage``; it needs no gradient."""
    with _on_meta(value):
        plain = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="meta")
        if storage is not None:
            plain.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    return FakeTensor(value.fake_mode, plain, value.fake_device)


def fake_on(plain: Tensor, like: FakeTensor) -> Tensor:
    """Return a fake tensor in the memory of ``plain``, which is on the device meta. It costs a twentieth of a new one."""
    return FakeTensor(like.fake_mode, plain.detach(), like.fake_device)


def moved(value: FakeTensor, storage: torch.UntypedStorage) -> None:
    """Have ``value`` in ``storage`` from now on."""
    with _on_meta(value):
        value.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


@contextlib.contextmanager
def _on_meta(value: FakeTensor) -> Iterator[None]:
    mode = value.fake_mode
    guards = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), torch.no_grad(), in_kernel_invocation_manager(mode), guards:
        yield
