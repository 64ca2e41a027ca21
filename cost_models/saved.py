"""What a stage's forward leaves behind for its backward, found by running the stage on fake tensors.

    stage's graph ──interpreted on fake tensors, collectives in groups that send nothing──► the storages that autograd keeps
                       │                                                                    and those that are sent
                       └─ a block is run once for each kind of arguments, and replayed for its other instances

Bytes are those of distinct storages: a view keeps the whole of what it views, and what two operators save is there once. So the
output of one block that is the input of the next counts once, too. Not counted are parameters, buffers, constants and what the
stage is given: others hold those (:mod:`graphpar.cost_models.memory`).

Device kinds: ``cpu`` is exact. For ``cuda`` attention saves what torch's fused kernels for CUDA save, the flash kernel for half
precision without a mask, else the memory-efficient one; all other operators save what they save on a CPU, which differs in small
things only (statistics of normalisations, cuDNN's reserve). No GPU is needed for either.

Not seen: memory that a kernel takes and gives back, and tensors that a custom ``autograd.Function`` puts on its ``ctx`` instead of
``save_for_backward`` (they are in :class:`Passes`, but not in :class:`Saved`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphpar.emitted import collectives
from graphpar.errors import GraphparError
from graphpar.functions import OPERATORS, plain_apply
from graphpar.program import Block, Program, concrete_shape, value_of
from graphpar.runtime.layout import AXES
from graphpar.runtime.split_backward import splits_exactly
from graphpar.runtime.stages import sendable

if TYPE_CHECKING:
    from graphpar.passes.split import Stage

DEVICES = ("cpu", "cuda")
_SIZES = (2, 3, 5)
"""Microbatch sizes of a line and of its check. A size of 1 is off the line: torch makes fewer copies where a dim has one element."""


@dataclass(frozen=True)
class Saved:
    """Bytes that one microbatch keeps between its forward and its backward: ``inside`` autograd's, ``sent`` the stage's outputs.

    A storage that is both is in ``sent`` alone.
    """

    inside: int
    sent: int

    @property
    def total(self) -> int:
        return self.inside + self.sent


@dataclass(frozen=True)
class Line:
    """Bytes for a microbatch of ``rows``: ``fixed + per_row * rows``."""

    fixed: Saved
    per_row: Saved

    def at(self, rows: int) -> Saved:
        return Saved(
            self.fixed.inside + self.per_row.inside * rows,
            self.fixed.sent + self.per_row.sent * rows,
        )


@dataclass(frozen=True)
class Passes:
    """The highest bytes of a forward, what is left after it, and the highest of a backward, in which gradients are added to older ones.

    All without parameters, their gradients, and what the stage is given.
    """

    forward: int
    kept: int
    backward: int


class Activations:
    """Measures the stages of one lowered program; each stage, size and distinct block once.

    Args:
        program: what :func:`graphpar.passes.shard.shard` gives.
        degrees: ranks by axis.
        device: ``cpu`` or ``cuda``.
        even_experts: take the rows of a batch to be spread evenly over the ranks' experts, where experts are divided. How
            they are spread is known only when the program runs, so without this such a program is refused.
    """

    def __init__(
        self, program: Program, degrees: Mapping[str, int], *, device: str = "cpu", even_experts: bool = False
    ) -> None:
        if device not in DEVICES:
            raise GraphparError(f"device is {device!r}; memory is known for {' and '.join(DEVICES)}.")
        self.program, self.degrees, self.device, self.even_experts = program, dict(degrees), device, even_experts
        self.mode = FakeTensorMode()
        self.state: dict[str, Tensor] = {}
        self.own: set[int] = set()
        self.templates: dict[Any, _Template] = {}
        self._saved: dict[tuple[int, int], Saved] = {}
        self._lines: dict[int, Line | None] = {}
        self._passes: dict[tuple[int, int], Passes] = {}
        self._for_weight: dict[tuple[int, int], int] = {}

    def saved(self, stage: Stage, rows: int) -> Saved:
        """For a microbatch of ``rows``: on the stage's line where it has one, else measured at this size."""
        self._check_size(rows)
        if rows in _SIZES or rows == 1 or not self.program.symbolic:
            return self._measured(stage, rows)
        line = self.line(stage)
        return self._measured(stage, rows) if line is None else line.at(rows)

    def line(self, stage: Stage) -> Line | None:
        """The line on which all sizes above 1 lie; None where they don't, or the program has one size only."""
        if not self.program.symbolic:
            return None
        if stage.index not in self._lines:
            (a, b, c), (first, second, third) = _SIZES, (self._measured(stage, rows) for rows in _SIZES)
            slope = Saved((second.inside - first.inside) // (b - a), (second.sent - first.sent) // (b - a))
            line = Line(Saved(first.inside - slope.inside * a, first.sent - slope.sent * a), slope)
            self._lines[stage.index] = line if (line.at(b), line.at(c)) == (second, third) else None
        return self._lines[stage.index]

    def passes(self, stage: Stage, rows: int) -> Passes:
        """The highest points of one forward and one backward of a microbatch; a run of the whole stage."""
        self._check_size(rows)
        key = stage.index, rows
        if key not in self._passes:
            with self._ready():
                self._passes[key] = _measure_passes(self, stage, rows)
        return self._passes[key]

    def for_weight(self, stage: Stage, rows: int) -> int:
        """What a microbatch keeps from the input half of its backward (``I``) to the weight half (``W``), outputs included.

        The first stage does all of it in W, a stage that torch can't split in I (:mod:`graphpar.runtime.split_backward`).
        """
        self._check_size(rows)
        if stage.index == 0:
            return self.saved(stage, rows).total
        key = stage.index, rows
        if key not in self._for_weight:
            with self._ready():
                self._for_weight[key] = _measure_for_weight(self, stage, rows)
        return self._for_weight[key]

    def _measured(self, stage: Stage, rows: int) -> Saved:
        key = stage.index, rows
        if key not in self._saved:
            with self._ready():
                self._saved[key] = _measure_saved(self, stage, rows)
        return self._saved[key]

    def _check_size(self, rows: int) -> None:
        if rows < 1 or (not self.program.symbolic and rows != self.program.batch):
            raise GraphparError(
                f"The microbatch has {rows} rows, but the program was traced for {self.program.batch} and its batch is no "
                "symbol; partition it for that size."
                if rows >= 1
                else f"The microbatch has {rows} rows; it must be at least 1."
            )

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        """Fake tensors, and the axes bound to groups that send nothing (the operators of fake tensors never ask for a group)."""
        before = dict(collectives._axes)
        collectives._axes.update({axis: ("fake", self.degrees.get(axis, 1), 0) for axis in AXES})
        try:
            with self.mode, torch.set_grad_enabled(self.program.mode == "train"):
                yield
        except DataDependentOutputException as error:
            raise GraphparError(
                f"How much memory {self.program.name} takes depends on the values of its inputs: {error}."
            ) from error
        finally:
            collectives._axes.clear()
            collectives._axes.update(before)

    def tensor(self, name: str) -> Tensor:
        """The parameter, buffer or constant ``name``; tied names share one."""
        first = self.program.tie_of(name)[0]
        if first not in self.state:
            info = self.program.tensor_info(first)
            self.state[first] = torch.empty(info.shape, dtype=info.dtype).requires_grad_(info.requires_grad)
            self.own.add(_memory(self.state[first]))
        return self.state[first]

    def given(self, stage: Stage, rows: int) -> list[Tensor]:
        """What the stage is called with: received values, inputs, counts."""
        gradients = {boundary.name for boundary in stage.receives if boundary.requires_grad}
        nodes = [node for node in stage.graph.nodes if node.op == "placeholder"]
        return [
            torch.empty(concrete_shape(node, rows), dtype=value_of(node).dtype).requires_grad_(
                bool(node.meta.get("boundary")) and str(node.target) in gradients
            )
            for node in nodes
        ]


# ---- running a stage ---------------------------------------------------------------------------------------------


class _Forward:
    """Interprets a stage's graph. With ``kept``, blocks are replayed, and what they keep is noted there."""

    def __init__(self, activations: Activations, kept: _Kept | None) -> None:
        self.activations, self.program, self.kept = activations, activations.program, kept

    def run(self, graph: fx.Graph, prefix: str, arguments: Sequence[Any]) -> Any:
        """Values live until their graph is done, as the locals of an emitted function do."""
        env: dict[fx.Node, Any] = {}
        feed = iter(arguments)
        for node in graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "get_attr":
                name = str(node.target)
                env[node] = self.program.subgraphs.get(name) or self.activations.tensor(prefix + name)
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                env[node] = self._call(node, prefix, args, kwargs)
        raise AssertionError("a graph without an output")

    def _call(self, node: fx.Node, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if node.op == "call_module":
            return self._block(self.program.block_of(node), f"{prefix}{target}.", args)
        if target in OPERATORS:
            made = plain_apply(OPERATORS[target].function, *OPERATORS[target].given(args))
            return made[0] if OPERATORS[target].alone else made
        if target is torch.ops.aten.scaled_dot_product_attention.default and self.activations.device == "cuda":
            return _attention_on_cuda(*args, **kwargs)
        if target in _OF_EXPERTS:
            return _OF_EXPERTS[target](self.activations.even_experts, *args, **kwargs)
        if target is F.grouped_mm:
            return _GroupedProduct.apply(*args, **kwargs)
        if "cut" in kwargs:
            kwargs = kwargs | {"cut": [_piece(*entry) for entry in kwargs["cut"]]}
        return target(*args, **kwargs)

    def _block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        if self.kept is None:
            return self.run(block.graph, prefix, args)
        key = block.name, _signature(args), self._frozen(block, prefix)
        template = self.activations.templates.get(key)
        if template is not None:
            return template.replay(args, self.kept)
        outer, self.kept = self.kept, _Kept(self.activations.own)
        with self.kept.noting():
            result = self.run(block.graph, prefix, args)
        inner, self.kept = self.kept, outer
        template = _Template.of(args, result, inner)
        if template is not None:
            self.activations.templates[key] = template
        outer.include(inner)
        return result

    def _frozen(self, block: Block, prefix: str) -> tuple[str, ...]:
        names = [str(node.target) for node in block.graph.nodes if node.op == "get_attr"]
        parameters = [name for name in names if prefix + name in self.program.parameters]
        return tuple(name for name in parameters if not self.program.parameters[prefix + name].requires_grad)


def _outputs(stage: Stage, result: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """What the runtime holds of the stage's results (``StageAdapter``): contiguous tensors that are no views."""
    ids = {id(tensor) for tensor in given} if stage.sends else set()
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [tensor.clone() if id(tensor) in ids else sendable(tensor) for tensor in outputs]


def _measure_saved(activations: Activations, stage: Stage, rows: int) -> Saved:
    given = activations.given(stage, rows)
    kept = _Kept(activations.own)
    with kept.noting():
        result = _Forward(activations, kept).run(stage.graph, "", given)
        outputs = _outputs(stage, result, given)
    others = activations.own | {_memory(tensor) for tensor in given}
    sent = {_memory(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
    inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in others and key not in sent)
    return Saved(inside + kept.inside, sum(nbytes for key, nbytes in sent.items() if key not in others))


def _measure_passes(activations: Activations, stage: Stage, rows: int) -> Passes:
    given = activations.given(stage, rows)
    for name in attributes(activations.program, stage):
        value = activations.tensor(name)
        if value.requires_grad:
            value.grad = torch.zeros_like(value)
    with _Live() as live:
        outputs = _outputs(stage, _Forward(activations, None).run(stage.graph, "", given), given)
        forward, kept = live.turn()
        if activations.program.mode == "train":
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            with _unseen(live):
                gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
            torch.autograd.backward(roots, gradients)
        backward, _ = live.turn()
    for value in activations.state.values():
        value.grad = None
    return Passes(forward, kept, backward)


def _measure_for_weight(activations: Activations, stage: Stage, rows: int) -> int:
    given = activations.given(stage, rows)
    values = [activations.tensor(name) for name in attributes(activations.program, stage)]
    distinct = {id(value): value for value in values if value.requires_grad}
    trained = cast(list[nn.Parameter], list(distinct.values()))
    received = [tensor for tensor in given if tensor.requires_grad]
    with _Live() as live:
        outputs = _outputs(stage, _Forward(activations, None).run(stage.graph, "", given), given)
        if not splits_exactly(outputs, received, trained):
            return 0
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        with _unseen(live):
            gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
        inputs, groups = stage_backward_input(roots, gradients, received, iter(trained))
        del inputs
        for tensor in received:
            tensor.grad = None
        kept, _ = live.now, groups
    return int(kept)


def attributes(program: Program, stage: Stage) -> list[str]:
    """The parameters, buffers and constants of a stage by name, a tied one under each of its names."""
    names: dict[str, None] = {}

    def collect(graph: fx.Graph, prefix: str) -> None:
        for node in graph.nodes:
            if node.op == "get_attr" and str(node.target) not in program.subgraphs:
                names[prefix + str(node.target)] = None
            elif node.op == "call_module":
                collect(program.block_of(node).graph, f"{prefix}{node.target}.")

    collect(stage.graph, "")
    return list(names)


# ---- what is kept ------------------------------------------------------------------------------------------------


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


class _Kept:
    """The storages that autograd keeps, each once; they live as long as this does, so that no other gets their identity."""

    def __init__(self, own: set[int]) -> None:
        self.own = own  # of parameters, buffers and constants, which are not counted
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.inside = 0  # bytes of storages that only replayed blocks know

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.own:
            self.storages[storage._cdata] = storage
        return tensor

    def include(self, other: _Kept) -> None:
        self.storages |= other.storages
        self.inside += other.inside


@dataclass(frozen=True)
class _Result:
    """A block's output: a view of its argument ``source``, or of the new storage ``-1 - source``; ``same``: that argument itself."""

    source: int
    same: bool
    view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Template:
    """What a block does to memory, for arguments of one kind."""

    inside: int  # bytes kept that nobody else sees
    taken: tuple[int, ...]  # arguments that are kept
    made: tuple[tuple[int, bool], ...]  # each new storage of the outputs: bytes, whether it is kept
    results: tuple[_Result, ...]
    alone: bool

    @staticmethod
    def of(args: Sequence[Any], result: Any, kept: _Kept) -> _Template | None:
        """None for what can't be made again, of which a block hardly ever returns any.

        That is an output that is no tensor, has another dtype than what it views, or lies in a storage in no usual way.
        """
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not all(isinstance(output, Tensor) for output in outputs):
            return None
        known: dict[int, int] = {}
        for index, argument in enumerate(args):
            if isinstance(argument, Tensor):
                known.setdefault(_memory(argument), index)
        made: list[tuple[int, bool]] = []
        results: list[_Result] = []
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = -1 - len(made)
                made.append((storage.nbytes(), storage._cdata in kept.storages))
            source = known[storage._cdata]
            same = source >= 0 and output is args[source]
            view = output._is_view()
            if not same and not (_is_view_of(args[source], output) if source >= 0 else _is_first(output, source, results)):
                return None
            results.append(
                _Result(
                    source, same, view, tuple(output.shape), output.stride(), int(output.storage_offset()),
                    output.dtype, output.requires_grad,
                )
            )  # fmt: skip
        inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in known)
        taken = tuple(index for key, index in known.items() if index >= 0 and key in kept.storages)
        return _Template(inside + kept.inside, taken, tuple(made), tuple(results), isinstance(result, Tensor))

    def replay(self, args: Sequence[Any], kept: _Kept) -> Any:
        kept.inside += self.inside
        for index in self.taken:
            kept.add(args[index])
        bases: dict[int, Tensor] = {}
        outputs = [args[r.source] if r.same else self._output(r, args, bases) for r in self.results]
        for index, (_, is_kept) in enumerate(self.made):
            if is_kept:
                kept.add(bases[-1 - index])
        return outputs[0] if self.alone else tuple(outputs)

    def _output(self, result: _Result, args: Sequence[Any], bases: dict[int, Tensor]) -> Tensor:
        with torch.no_grad():
            if result.source < 0 and not result.view:
                value = torch.empty_strided(result.shape, result.stride, dtype=result.dtype)
                bases[result.source] = value
            else:
                if result.source < 0 and result.source not in bases:
                    elements = self.made[-1 - result.source][0] // result.dtype.itemsize
                    bases[result.source] = torch.empty(elements, dtype=result.dtype)
                base = args[result.source] if result.source >= 0 else bases[result.source]
                value = base.detach().as_strided(result.shape, result.stride, result.offset)
        return value.requires_grad_(result.requires_grad)


def _is_view_of(argument: Tensor, output: Tensor) -> bool:
    return output._is_view() and output.dtype == argument.dtype


def _is_first(output: Tensor, source: int, results: Sequence[_Result]) -> bool:
    """Whether ``output`` can be made with its new storage: a view of elements of its dtype, or a tensor that fills it."""
    others = [result for result in results if result.source == source]
    nbytes, itemsize = output.untyped_storage().nbytes(), output.dtype.itemsize
    if output._is_view():
        return nbytes % itemsize == 0 and all(result.dtype == output.dtype for result in others)
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride()))
    filled = (last + 1) * itemsize if output.numel() else 0
    return not others and output.storage_offset() == 0 and nbytes == filled


def _signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """All of a block's arguments that its memory depends on."""
    first: dict[int, int] = {}
    parts: list[Any] = []
    for index, argument in enumerate(args):
        if isinstance(argument, Tensor):
            alias = first.setdefault(_memory(argument), index)
            layout = tuple(argument.shape), argument.stride(), int(argument.storage_offset())
            parts.append((alias, layout, argument.dtype, argument.requires_grad))
        else:
            parts.append(argument)
    return tuple(parts)


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, from then until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0
        self.known: set[int] = set()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result) if self.counting else ():
            if isinstance(item, Tensor) and _memory(item) not in given:
                self._made(item.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += nbytes
            self.highest = max(self.highest, self.now)
            weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes

    def turn(self) -> tuple[int, int]:
        """The highest since the last turn, and what is there now."""
        highest, self.highest = self.highest, self.now
        return highest, self.now


@contextlib.contextmanager
def _unseen(live: _Live) -> Iterator[None]:
    live.counting = False
    try:
        yield
    finally:
        live.counting = True


# ---- operators that need something else than fake tensors --------------------------------------------------------


def _attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` by the kernels that CUDA has."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.size(-1), value.size(-1)
    if half and attn_mask is None and widths[0] == widths[1] <= 256 and widths[0] % 8 == 0:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        result: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return result
    if enable_gqa:
        plain: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True
        )[0]
        return plain
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        padding = -attn_mask.size(-1) % 16  # the kernel wants aligned rows
        attn_mask = F.pad(attn_mask, [0, padding]).narrow(-1, 0, attn_mask.size(-1)) if padding else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    """``F.grouped_mm`` of any dtype: torch's own has fake tensors for bfloat16 only, though it multiplies others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        return x.new_empty((*x.shape[:-1], weight.size(-1)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None


def _piece(dim: int, axis: str, parts: tuple[int, ...]) -> tuple[Any, ...]:
    """A cut dim as the functions of random streams take it."""
    return (dim, collectives.rank(axis), collectives.size(axis), *([parts] if parts else []))


@dataclass(eq=False)
class _Even:
    """In place of where each rank's rows end: every rank has as many."""

    rows: int = field(default=0)


def _rank_ends(even: bool, offs: Tensor, axis: str) -> _Even:
    if not even:
        raise GraphparError(
            "How many rows the experts of a rank get is known only when the program runs, and so is its memory. "
            "Ask for it under even_experts, where every rank gets as many."
        )
    return _Even()


def _expert_rows(even: bool, x: Tensor, axis: str, ends: _Even) -> Tensor:
    ends.rows = x.size(0)
    return x.narrow(0, 0, -(-x.size(0) // collectives.size(axis)))


def _expert_sums(even: bool, x: Tensor, axis: str, ends: _Even) -> Tensor:
    assert ends.rows, "rows are summed before any were taken"
    return F.pad(x, [0, 0] * (x.ndim - 1) + [0, ends.rows - x.size(0)])


_OF_EXPERTS: dict[Any, Any] = {
    collectives.rank_ends: _rank_ends,
    collectives.expert_rows: _expert_rows,
    collectives.expert_sums: _expert_sums,
}
