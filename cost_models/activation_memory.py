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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils._pytree import tree_leaves

from graphpar.cost_models.fake_operators import call_on_fakes
from graphpar.cost_models.storage_tracker import Kept, Live, Template, signature, storage_of, unseen
from graphpar.emitted import collectives
from graphpar.errors import GraphparError
from graphpar.hardware.devices import KINDS
from graphpar.ir.program import Block, Program, Runner, concrete_shape, value_of
from graphpar.runtime.axes import AXES
from graphpar.runtime.split_backward import splits_exactly
from graphpar.runtime.stages import sendable

if TYPE_CHECKING:
    from graphpar.ir.stage import Stage

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


@dataclass(frozen=True)
class Reach:
    """What one microbatch of a unit, a stage that others may be joined to, does to memory: bytes.

    Attributes:
        inside: kept from its forward to its backward, by itself alone.
        shared: kept of values that every stage computes for itself; once, however many units of a stage want them.
        given: of what it receives, the part that it keeps; the sender keeps it already where it is in the same stage and ``held``.
        received: all that it receives.
        sent: of what it sends, as new storages; ``passed``: without those that only pass on what it received, which are none where the
            next unit is in the same stage; ``held``: whether autograd keeps them too.
        forward, backward: what each takes on top of what is kept.
    """

    inside: int
    shared: int
    given: int
    received: int
    sent: int
    passed: int
    held: bool
    forward: int
    backward: int


class Activations:
    """Measures the stages of one lowered program; each stage, size and distinct block once.

    Args:
        program: what :func:`graphpar.passes.sharding.shard.shard` gives.
        degrees: ranks by axis.
        device: ``cpu`` or ``cuda``.
        even_experts: take the rows of a batch to be spread evenly over the ranks' experts, where experts are divided. How
            they are spread is known only when the program runs, so without this such a program is refused.
    """

    def __init__(
        self, program: Program, degrees: Mapping[str, int], *, device: str = "cpu", even_experts: bool = False
    ) -> None:
        if device not in KINDS:
            raise GraphparError(f"device is {device!r}; memory is known for {' and '.join(KINDS)}.")
        self.program, self.degrees, self.device, self.even_experts = program, dict(degrees), device, even_experts
        self.mode = FakeTensorMode()
        self.state: dict[str, Tensor] = {}
        self.own: set[int] = set()
        self.templates: dict[Any, Template] = {}
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

    def reach(self, stage: Stage, rows: int) -> Reach:
        """For a stage that others may be joined to; a run of its forward and backward, not kept."""
        self._check_size(rows)
        with self._ready():
            return _measure_reach(self, stage, rows)

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
            self.own.add(storage_of(self.state[first]))
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


class _Forward(Runner):
    """Interprets a stage's graph on fake tensors. With ``kept``, blocks are replayed, and what they keep is noted there."""

    def __init__(self, activations: Activations, kept: Kept | None) -> None:
        super().__init__(activations.program, {})
        self.activations, self.kept = activations, kept

    def tensor(self, name: str) -> Tensor:
        return self.activations.tensor(name)

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_on_fakes(node.target, args, kwargs, self.activations.device, self.activations.even_experts)

    def block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        if self.kept is None:
            return self.run_graph(block.graph, prefix, args)
        key = block.name, signature(args), self._frozen(block, prefix)
        template = self.activations.templates.get(key)
        if template is not None:
            return template.replay(args, self.kept)
        outer, self.kept = self.kept, Kept(self.activations.own)
        with self.kept.noting():
            result = self.run_graph(block.graph, prefix, args)
        inner, self.kept = self.kept, outer
        template = Template.of(args, result, inner)
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
    kept = Kept(activations.own)
    with kept.noting():
        result = _Forward(activations, kept).run_graph(stage.graph, "", given)
        outputs = _outputs(stage, result, given)
    others = activations.own | {storage_of(tensor) for tensor in given}
    sent = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
    inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in others and key not in sent)
    return Saved(inside + kept.inside, sum(nbytes for key, nbytes in sent.items() if key not in others))


def _measure_passes(activations: Activations, stage: Stage, rows: int) -> Passes:
    given = activations.given(stage, rows)
    for name in attributes(activations.program, stage):
        value = activations.tensor(name)
        if value.requires_grad:
            value.grad = torch.zeros_like(value)
    with Live() as live:
        outputs = _outputs(stage, _Forward(activations, None).run_graph(stage.graph, "", given), given)
        forward, kept = live.turn()
        if activations.program.mode == "train":
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            with unseen(live):
                gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
            torch.autograd.backward(roots, gradients)
        backward, _ = live.turn()
    for value in activations.state.values():
        value.grad = None
    return Passes(forward, kept, backward)


def _backward(roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> bool:
    """Run the backward; False where torch can't on fake tensors, as for values that ``index_put`` spreads: its memory is then taken to be
    that of the forward."""
    try:
        torch.autograd.backward(roots, gradients)
    except RuntimeError:
        return False
    return True


class _Sharing(_Forward):
    """Notes the storages of the values that every stage computes for itself."""

    def __init__(self, activations: Activations, names: Sequence[str]) -> None:
        super().__init__(activations, None)
        self.names, self.storages = frozenset(names), set[int]()

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().call(node, args, kwargs)
        if node.name in self.names:
            self.storages |= {storage_of(item) for item in tree_leaves(made) if isinstance(item, Tensor)}
        return made


def _measure_reach(activations: Activations, stage: Stage, rows: int) -> Reach:
    given = activations.given(stage, rows)
    for name in attributes(activations.program, stage):
        value = activations.tensor(name)
        if value.requires_grad:
            value.grad = torch.zeros_like(value)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    train = activations.program.mode == "train"
    runner = _Sharing(activations, stage.recomputed)
    with Live() as live:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            result = runner.run_graph(stage.graph, "", given)
            outputs = _outputs(stage, result, given)
        forward, kept = live.turn()
        sent = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        shared = sum(nbytes for key, nbytes in saved.items() if key in runner.storages and key not in sent)
        received = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in given}
        taken = sum(nbytes for key, nbytes in received.items() if key in saved)
        held = any(key in saved for key in sent)
        if train:
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            with unseen(live):
                gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
            backward_runs = _backward(roots, gradients)
        backward, _ = live.turn()
        if train and not backward_runs:
            backward = forward
    for value in activations.state.values():
        value.grad = None
    new = sum(nbytes for key, nbytes in sent.items() if key not in received)
    relays = {id(tensor) for tensor in given}
    copies = {
        storage_of(o)
        for r, o in zip(result if isinstance(result, tuple | list) else (result,), outputs)
        if id(r) in relays
    }
    return Reach(
        inside=kept - new - shared,
        shared=shared,
        given=taken,
        received=sum(received.values()),
        sent=new,
        passed=new - sum(nbytes for key, nbytes in sent.items() if key in copies and key not in received),
        held=held,
        forward=forward - kept,
        backward=max(0, backward - kept),
    )


def _measure_for_weight(activations: Activations, stage: Stage, rows: int) -> int:
    given = activations.given(stage, rows)
    values = [activations.tensor(name) for name in attributes(activations.program, stage)]
    distinct = {id(value): value for value in values if value.requires_grad}
    trained = cast(list[nn.Parameter], list(distinct.values()))
    received = [tensor for tensor in given if tensor.requires_grad]
    with Live() as live:
        outputs = _outputs(stage, _Forward(activations, None).run_graph(stage.graph, "", given), given)
        if not splits_exactly(outputs, received, trained):
            return 0
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        with unseen(live):
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
