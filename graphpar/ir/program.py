"""``Program``: the traced model, which every pass takes and returns.

A program is an ``fx.Graph`` over ATen operators in which

    placeholder   a root input: a leaf of the user's inputs or targets, or what graphpar adds (sample keys, counts)
    get_attr      a parameter, buffer or constant, by its fully qualified name in the user's model
    call_module   (after ``outline``) an instance of a block; its target is the module's path
    output        the loss, or the model's outputs

Every program is runnable on one device (:meth:`Program.run`), before and after every pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graphpar.ir.lengths import Lengths, Size
from graphpar.ir.precision import Precision
from graphpar.runtime.layout import Type
from graphpar.runtime.option_kinds import Seq
from graphpar.runtime.plan_record import Adapter
from graphpar.text import as_text, count_text


@dataclass(frozen=True)
class TensorInfo:
    """A parameter's or buffer's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    persistent: bool = True
    kind: str = "parameter"  # parameter | buffer
    whole: tuple[int, ...] | None = None  # the whole shape, where ``shape`` is that of a rank's shard
    spec: tuple[tuple[str, Type], ...] = ()  # its type on each compute axis

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def whole_numel(self) -> int:
        """The number of elements of the whole tensor, where this is a rank's shard."""
        return math.prod(self.shape if self.whole is None else self.whole)


@dataclass(frozen=True)
class Input:
    """A root input. ``batch_dim`` is the dim that is split into microbatches, ``None`` for an input that each microbatch gets whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    role: str = "input"  # input | target | sample_keys
    values: tuple[int, int] = (0, 1)  # smallest and largest value of an integer example
    positions: tuple[int, ...] = ()  # the dims that are as long as the sequence, where that varies

    def shape_at(self, rows: int) -> tuple[int, ...]:
        """Return the shape for a batch of ``rows``."""
        return tuple(rows if dim == self.batch_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class Output:
    """A leaf of what the program returns; a training program has one, ``loss``."""

    name: str
    batch_dim: int | None = None


@dataclass(frozen=True)
class ModelOutput:
    """What the model of a training program returns, besides the loss.

    Attributes:
        batch_dim: along which microbatches are joined.
        adds: whether it is a sum over examples, of which each microbatch has its share.
        sizes, coefficients: its unsharded shape, and of each size that follows the batch how many times the batch it is.
        of_length: how its sizes follow the length of the sequence, where that varies.
    """

    name: str
    batch_dim: int | None
    adds: bool
    sizes: tuple[int, ...]
    coefficients: tuple[int | None, ...]
    of_length: tuple[Size | None, ...] = ()

    def shape_at(self, rows: int) -> tuple[int, ...]:
        """Return the shape for ``rows`` rows."""
        return tuple(size if c is None else c * rows for size, c in zip(self.sizes, self.coefficients))


def model_outputs(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """Return, until ``share_loss``, the values that a training program's model returns; None: one that its loss does not need.

    They stand beside the loss, so that what replaces a value replaces it there: ``output((loss,), (logits, None))``.
    """
    values: Any = graph.output_node().args[1:]
    return tuple(values[0]) if values else ()


def set_model_outputs(graph: fx.Graph, values: Iterable[fx.Node | None]) -> None:
    """Replace what :func:`model_outputs` returns."""
    output, found = graph.output_node(), tuple(values)
    output.args = (output.args[0], found) if found else (output.args[0],)


@dataclass
class Block:
    """A subgraph that came from a repeated module; isomorphic instances share it.

    ``graph`` takes the values from outside as placeholders and names its parameters relative to the instance.
    """

    name: str
    module_class: str
    graph: fx.Graph
    instances: list[str] = field(default_factory=list)
    at_lengths: Mapping[int, fx.Graph] = field(default_factory=dict)  # what it is at other lengths of the sequence

    @property
    def path(self) -> str:
        """The path of the instance that was traced, as its operators' module stacks name it."""
        stacks = (node.meta.get("module_stack", ()) for node in self.graph.nodes if node.op == "call_function")
        paths = (str(path) for stack in stacks for path, module_class, _ in stack if module_class == self.module_class)
        return next(paths, self.instances[0])


@dataclass(frozen=True)
class ModelSource:
    """The user's model and examples, as ``export`` was given them; ``verify`` runs the model for reference."""

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    precision: Precision = field(default_factory=Precision)
    mode: str | None = None
    evaluates: bool = False
    seq: Seq | None = None  # the lengths of the sequence, where they vary
    sequences: int | None = None  # of generation: how many at a time; None: the rows of the example

    def at_length(self, lengths: Lengths, length: int) -> ModelSource:
        """Return the source with examples of this length."""
        args, kwargs, targets = lengths.resized((self.args, self.kwargs, self.targets), length)
        return replace(self, args=args, kwargs=kwargs, targets=targets, seq=None)


@dataclass(eq=False)
class Function:
    """A part of the root without parameters of its own, as a function."""

    name: str
    graph: fx.Graph

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *arguments: Any) -> Any:
        return run_plain(self.graph, arguments)


@dataclass(eq=False)
class Helper(Function):
    """A parameter-free part of the root (a mask, rotary tables) as a function that any stage can call."""

    like: int | None = None  # the argument of which only the batch size and the device are used


@dataclass(eq=False)
class Chunked(Function):
    """A function of rows, its first ``rows`` arguments, and others, that is a sum over them: it runs on ``tokens`` of them at a time."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Coupling:
    """An operator that mixes examples, so that splitting the batch changes the result: why, in which module, on which source line."""

    reason: str
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.module, self.line)))
        return f"{self.reason} ({place})" if place else self.reason


OTHERWISE = "other_branch_"
"""How the names of flags begin in their modules: buffers that hold whether a branch on values would have been another."""


@dataclass(frozen=True)
class Branch:
    """A condition on values of tensors of which the program has one branch: that of the example inputs."""

    module: str
    line: str
    condition: str
    taken: bool

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.module, self.line)))
        return f"`{self.condition}`" + (f" ({place})" if place else "")


def is_flag(node: fx.Node) -> bool:
    """Return whether an operator notes that a branch on values would be another."""
    if node.target is not torch.ops.aten.logical_or_.default:
        return False
    buffer = node.args[0]
    return isinstance(buffer, fx.Node) and str(buffer.target).rpartition(".")[2].startswith(OTHERWISE)


class OptimizerState(NamedTuple):
    """What an optimizer keeps between steps: the name of its class, and its bytes for each byte of the parameters that it trains."""

    name: str = "AdamW"
    tensors: float = 2.0


ADAMW = OptimizerState()
"""Of programs whose model file has no optimizer."""


@dataclass
class Program:
    """A traced model. Passes treat it as immutable: they take one and return a new one."""

    name: str
    mode: str  # train | infer | generate, where the batch is the positions of a sequence
    graph: fx.Graph
    parameters: dict[str, TensorInfo]
    buffers: dict[str, TensorInfo]
    constants: dict[str, Tensor]
    ties: tuple[tuple[str, ...], ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    batch: int  # the batch size that the trace saw
    symbolic: bool  # whether the batch is a symbol of the graph's shapes
    unsplittable: str | None  # why the batch can't be split, where neither trace allows it
    module_classes: dict[str, str]
    blocks: dict[str, Block] = field(default_factory=dict)
    subgraphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype] = field(
        default_factory=dict
    )  # until cast_weights: parameters stored in another dtype
    warnings: tuple[str, ...] = ()
    retrace: Callable[[int, int | None], Program] | None = None  # at so many rows, as at others or the example's
    source: ModelSource | None = None
    lengths: Lengths | None = None  # of the sequence, where they vary; the graph is that of the longest
    at_length: Callable[..., Program] | None = None  # the program of another length of these, with or without blocks
    couplings: tuple[Coupling, ...] = ()
    steady: tuple[str, ...] = ()  # buffers that are written with what depends on no example: counters, power iterations
    plain: Mapping[str, Any] = field(default_factory=dict)  # what the model was given besides tensors: numbers, None
    unread: tuple[str, ...] = ()  # what the model was given and reads nothing of
    counts: fx.Graph | None = None  # the loss denominators as a graph of inputs, and of buffers that are not written
    count_names: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()  # modules that the user's model runs under torch.utils.checkpoint; "": a function
    branches: Mapping[str, Branch] = field(default_factory=dict)  # on values, by the buffer that holds their flag
    evaluated: Program | None = (
        None  # the same model in evaluation mode, where that differs beyond dropout and BatchNorm
    )
    generating: Callable[[int], Program] | None = None  # the same model for generation, of so many sequences at a time
    no_eval: str | None = None  # why neither graph can say what the model computes in evaluation
    adapters: tuple[Adapter, ...] = ()  # low-rank adapters that the model has
    returned: tuple[str, ...] = ()  # of a program for training: the names of what its model returns besides the loss
    pretrained: Mapping[str, Any] = field(
        default_factory=dict
    )  # what transformers' from_pretrained needs besides weights
    generation: Mapping[str, Any] = field(default_factory=dict)  # how the model chooses tokens, unless a call says so
    stream_layouts: tuple[tuple[int, ...], ...] = ()
    """Of each random operator, in execution order, the dim that has the batch (-1: none has), and how many rows are before and behind
    each example in it; of what is no dropout also the bits of precision of the floats that it draws, 0 of whole numbers."""
    optimizer: OptimizerState = ADAMW  # of the model file, where it has one
    configures: str = ""  # a call of the model's own configure_optimizers, if it has one
    dropout: str = "exact"  # how attention draws its dropout, of runtime.axes.DROPOUTS
    other_dropout: tuple[Program, Program] | None = field(default=None, compare=False, repr=False)
    """This program, and the same with another ``dropout``, once that was asked for."""
    idioms: Mapping[str, int] = field(
        default_factory=dict
    )  # how many of each kind are one operator now; see passes.normalize.idioms

    def with_graph(self, graph: fx.Graph, **changes: Any) -> Program:
        """Return this program with another graph (and other fields as given)."""
        return replace(self, graph=graph, **changes)

    @property
    def random_calls(self) -> int:
        """The number of random operators; each has its own random stream."""
        return len(self.stream_layouts)

    @property
    def draws(self) -> tuple[int, int]:
        """How many random operators, besides dropout, draw by the key of the example, and how many by that of the step."""
        dims = [layout[0] for layout in self.stream_layouts if len(layout) > 3]
        return len(dims) - dims.count(-1), dims.count(-1)

    def warn(self, *lines: str) -> Program:
        """Return this program with more warnings, each once."""
        fresh = tuple(line for line in lines if line not in self.warnings)
        return replace(self, warnings=self.warnings + fresh)

    @property
    def of_one_size(self) -> bool:
        """Whether it can be traced only with the rows that the trace saw."""
        return not self.symbolic and self.unsplittable is not None and not self.couplings

    def at_batch(self, size: int) -> Program:
        """Return the program for microbatches of ``size`` rows: itself where the batch is symbolic, else a new trace."""
        if self.symbolic or size == self.batch:
            return self
        assert self.retrace is not None
        return self.retrace(size, None)

    def check_batch(self, size: int, whole: int) -> None:
        """Check that microbatches of ``size`` rows run the program that a batch of ``whole`` rows does, where the example has others.

        Raises:
            GraphparError: the model does something else with so many rows, such as another branch.
        """
        if self.retrace is not None and not self.of_one_size and whole not in (size, self.batch):
            self.retrace(size, whole)

    def input(self, name: str) -> Input:
        """Look up the root input ``name``; ``KeyError`` if there is none."""
        return {entry.name: entry for entry in self.inputs}[name]

    def tensor_info(self, fqn: str) -> TensorInfo:
        """Look up the shape and dtype of the parameter, buffer or constant ``fqn``."""
        if fqn in self.parameters:
            return self.parameters[fqn]
        if fqn in self.buffers:
            return self.buffers[fqn]
        value = self.constants[fqn]
        return TensorInfo(tuple(value.shape), value.dtype, persistent=False, kind="buffer")

    def tie_of(self, fqn: str) -> tuple[str, ...]:
        """List all names of the parameter ``fqn``, itself included."""
        return next((group for group in self.ties if fqn in group), (fqn,))

    @property
    def tied_parameters(self) -> list[tuple[str, ...]]:
        """The ties of parameters; of a buffer with several names a program has the first alone."""
        return [group for group in self.ties if group[0] in self.parameters]

    def prefixes(self, block: str) -> list[str]:
        """List the prefix of names for each instance of ``block``: its path and a dot. The block "" is the root."""
        return [f"{path}." for path in dict.fromkeys(self.blocks[block].instances)] if block else [""]

    def scopes(self) -> list[tuple[str, fx.Graph]]:
        """List the graphs, each with the name of its block; the root is ""."""
        return [("", self.graph), *((name, block.graph) for name, block in self.blocks.items())]

    def ties_below(self, path: str) -> list[tuple[str, ...]]:
        """List the groups of names below the module ``path`` that are one parameter, relative to it."""
        prefix = f"{path}."
        groups = (
            tuple(name.removeprefix(prefix) for name in group if name.startswith(prefix))
            for group in self.tied_parameters
        )
        return [group for group in groups if len(group) > 1]

    def parameter_count(self) -> int:
        """Count parameter elements, those of a tied parameter once."""
        skipped = {name for group in self.ties for name in group[1:]}
        return sum(info.numel for name, info in self.parameters.items() if name not in skipped)

    def whole_state(self) -> list[TensorInfo]:
        """The entries of the user's ``state_dict``, a tied one once: parameters, and buffers that it saves."""
        again = {name for group in self.ties for name in group[1:]}
        entries = (*self.parameters.items(), *self.buffers.items())
        return [info for name, info in entries if name not in again and info.persistent]

    @property
    def count_buffers(self) -> list[str]:
        """The buffers that the loss denominators are computed from."""
        read = [] if self.counts is None else [node.target for node in self.counts.nodes if node.op == "get_attr"]
        return [name for name in dict.fromkeys(map(str, read)) if name in self.buffers]

    def counts_results(self, expression: Callable[[Any], Any]) -> list[str]:
        """Print the expressions of the loss denominators with ``expression``."""
        assert self.counts is not None
        output: Any = self.counts.output_node().args[0]
        return [expression(node).text for node in output]

    def block_of(self, node: fx.Node) -> Block:
        """Look up the block that the ``call_module`` node calls."""
        return self.blocks[node.meta["block"]]

    def run(self, state: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Any:
        """Run on one device. ``state`` holds parameters, buffers and constants by name; buffers are written in place."""
        values = [inputs[node.target] for node in self.graph.nodes if node.op == "placeholder"]
        return Runner(self, state).run_graph(self.graph, "", values)

    def __repr__(self) -> str:
        blocks = "".join(f", {block.name} x {len(block.instances)}" for block in self.blocks.values())
        return f"Program({self.name}, {self.mode}, {count_text(self.parameter_count())} parameters{blocks}, batch {self.batch})"

    def __str__(self) -> str:
        return as_text(self)


def without_evaluation(program: Program, reason: str) -> Program:
    """Return ``program`` without what it computes in evaluation, and why."""
    return replace(program, evaluated=None, no_eval=f"the program can't evaluate: {reason.rstrip('.')}")


NOT_SYMBOLIC = "The batch size is fixed in the program (no symbolic trace: "
"""How the warning begins that a trace found the model to be for one batch size."""
Evaluate = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the value of a node from its arguments."""


def _interpret(graph: fx.Graph, arguments: Sequence[Any], evaluate: Evaluate) -> Any:
    """Run a graph whose placeholders take ``arguments``. Values live until it is done, as the locals of a function do."""
    env: dict[fx.Node, Any] = {}
    feed = iter(arguments)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            env[node] = next(feed)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            env[node] = evaluate(node, args, kwargs)
    return fx.map_arg(graph.output_node().args[0], env.__getitem__)


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert callable(node.target)
    return node.target(*args, **kwargs)


def run_plain(graph: fx.Graph, arguments: Sequence[Any]) -> Any:
    """Run a graph without parameters."""
    return _interpret(graph, arguments, _call)


class Runner:
    """Runs graphs and the blocks that they call; ``get_attr`` targets are looked up in a dictionary."""

    def __init__(self, program: Program, state: Mapping[str, Tensor]) -> None:
        self.program = program
        self.state = state

    def run_graph(self, graph: fx.Graph, prefix: str, arguments: Sequence[Any]) -> Any:
        """Run a graph whose parameters' names begin with ``prefix``."""

        def value(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            target, subgraphs = str(node.target), self.program.subgraphs
            if node.op == "get_attr":
                return subgraphs[target] if target in subgraphs else self.tensor(prefix + target)
            if node.op == "call_module":
                return self.block(self.program.block_of(node), f"{prefix}{target}.", args)
            return self.call(node, args, kwargs)

        return _interpret(graph, arguments, value)

    def tensor(self, name: str) -> Tensor:
        """Look up the parameter, buffer or constant ``name``."""
        return self.state[name]

    def block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        """Run the instance of ``block`` whose names begin with ``prefix``."""
        return self.run_graph(block.graph, prefix, args)

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return _call(node, args, kwargs)


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module whose forward made ``node`` (empty for the root)."""
    stack = node.meta.get("module_stack", ())
    return stack[-1][0] if stack else ""


def where(node: fx.Node) -> str:
    """Write `` (module, file:line)`` of the user's code, for messages; without what isn't known."""
    source = node.meta.get("source")
    known = [part for part in (module_path(node), source and f"{source.file}:{source.line}") if part]
    return f" ({', '.join(known)})" if known else ""


def value_of(node: fx.Node) -> Any:
    """Return the fake value that tracing saw for ``node``."""
    return node.meta.get("val")


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """Return all that ``nodes`` depend on, and themselves."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(current.all_input_nodes)
    return found


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator with a schema by name, in its order: given by position, by name, or their defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    described = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(described, node.args)} | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in described}


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share, fake ones too."""
    return int(torch._C._storage_id(tensor))  # type: ignore[attr-defined]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested nor quantized: one that files hold, and that is cut for ranks."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


FUNCTION_OPERATORS = "graphpar_functions"
"""Namespace of the operators that stand for custom autograd functions."""
_OF_TORCH = frozenset((
    "aten", "prims", "prim", "quantized", "mkldnn", "sparse", "inductor", "higher_order", "c10d", "_c10d_functional", "c10d_functional",
    "_dtensor", "dist_inductor", "pipelining", "pippy", "profiler",
))  # fmt: skip


def is_of_torch(target: Any) -> bool:
    """Whether ``target`` is an operator of torch, not of the user or of another library."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _OF_TORCH


def operator_name(node: fx.Node) -> str:
    """Return the operator without its overload: ``linear``, ``mylib::op``, ``Scaled.apply``; for a block ``call_module``."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return _overload_name(node.target)
    return str(getattr(node.target, "__name__", node.target))


@functools.cache
def _overload_name(target: torch._ops.OpOverload) -> str:
    namespace, _, name = target._schema.name.partition("::")
    if namespace == FUNCTION_OPERATORS:
        return f"{name}.apply"
    # mylib::relu is not torch's relu; but transformers' operators are torch's newer ones, for older torch.
    return name if is_of_torch(target) or namespace == "transformers" else f"{namespace}::{name}"
