"""The bytes that a unit's forward keeps for its backward, and that both need on top, measured by running the unit on fake tensors.

    unit's graph ──run on fake tensors of very many rows, collectives in groups that send nothing──► every storage: bytes, lifetime,
                                                                                                     kept by autograd, sent
         bytes divisible by the rows grow with them, others don't ──► bytes at any number of rows

Bytes are those of distinct storages: a view keeps the whole storage, and what two operators save counts once. Parameters, what they are
cast to once a step, buffers, constants and the unit's inputs are not counted; :mod:`graphpar.cost_models.unit_bytes` adds them.

``cpu`` is exact. For ``cuda`` attention saves what torch's fused kernels save, the flash kernel for half precision without a mask, else
the memory-efficient one; other operators save what they save on a CPU, which differs in small things only (statistics of
normalisations, cuDNN's reserve). No GPU is needed. Memory that a kernel allocates and frees inside is not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from graphpar.cost_models.fake_operators import call_on_fakes, two_chunks
from graphpar.cost_models.pipeline_units import Reach
from graphpar.cost_models.storage_tracker import CountedFakes, Live, storage_of, unseen
from graphpar.emitted import collectives, kv_cache
from graphpar.emitted.pointwise import made_again
from graphpar.emitted.recomputation import checkpointed
from graphpar.errors import GraphparError, torch_is_quiet
from graphpar.hardware.devices import KINDS
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.program import Block, Chunked, Program, Runner, value_of
from graphpar.ir.recomputation import Recomputation
from graphpar.operators.parameter_casts import cast_parameters, casts_parameter
from graphpar.runtime.axes import AXES
from graphpar.runtime.generation.generator import widest
from graphpar.runtime.generation.prompts import Sampling
from graphpar.runtime.option_kinds import GENERATE
from graphpar.runtime.stages.cast_once import Cast
from graphpar.runtime.stages.modules import sendable
from graphpar.runtime.stages.split_backward import read_by_others, splits_exactly

if TYPE_CHECKING:
    from graphpar.ir.stage import Stage

Array = NDArray[np.int64]
"""Bytes, one for each requested microbatch size."""

_MANY = 2**29 - 3
"""Rows of the run that gives all sizes: a prime, so that it divides the bytes of storages that grow with the rows and no others; larger
than the bytes of storages that don't grow."""


class Activations:
    """Measures the stages of one lowered program.

    Args:
        program: the result of :func:`graphpar.passes.sharding.shard.shard`.
        degrees: ranks by axis.
        device: ``cpu`` or ``cuda``.
        even_experts: assume that rows are spread evenly over the ranks' experts. The real spread is known only when the program
            runs, so without this a program with sharded experts is refused.
        recomputed: how blocks are recomputed, by path.
        casts: the dtypes of the copies of parameters that all microbatches share, by name; by default those of
            :mod:`graphpar.runtime.stages.cast_once`.

    Raises:
        GraphparError: the device is of another kind.
    """

    def __init__(
        self,
        program: Program,
        degrees: Mapping[str, int],
        *,
        device: str = "cpu",
        even_experts: bool = False,
        recomputed: Mapping[str, Recomputation] | None = None,
        casts: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if device not in KINDS:
            raise GraphparError(f"device is {device!r}; memory is known for {' and '.join(KINDS)}.")
        self.program, self.degrees, self.device, self.even_experts = program, dict(degrees), device, even_experts
        self.recomputed = recomputed or {}
        self.mode = CountedFakes()
        self.state: dict[str, Tensor] = {}
        self.copies: dict[tuple[Tensor, torch.dtype], Tensor] = {}
        once = cast_parameters(program) if program.mode == "train" else {}
        self.casts = once if casts is None else casts

    def reach(self, stage: Stage, rows: int) -> Reach:
        """Measure one run of a stage's forward and backward for a microbatch of ``rows``."""
        return self.reaches(stage, [rows])[0]

    def reaches(self, stage: Stage, sizes: Sequence[int]) -> list[Reach]:
        """Measure several microbatch sizes.

        Sizes above 1 take one run of very many rows. Where that does not tell whether some bytes grow with the rows, or does not run,
        each size is run separately. So is a size of 1: torch makes fewer copies where a dim has one element.

        Raises:
            GraphparError: a size is not possible for this program.
        """
        for rows in sizes:
            self._check_size(rows)
        with self.ready():
            if self.program.symbolic and min(sizes) > 1 and self.program.mode != GENERATE:
                found = _of_many_rows(self, stage, sizes)
                if found is not None:
                    return found
            return [_measure_reach(self, stage, rows, lambda nbytes: np.array([nbytes]))[0] for rows in sizes]

    @property
    def holds_variables(self) -> bool:
        """Whether values outside of blocks stay, without a backward that needs them."""
        return self.program.mode != "train" and bool(self.program.blocks)

    def _check_size(self, rows: int) -> None:
        if rows < 1:
            raise GraphparError(f"The microbatch has {rows} rows; it must be at least 1.")
        if not self.program.symbolic and rows != self.program.batch:
            raise GraphparError(
                f"The microbatch has {rows} rows, but the program was traced for {self.program.batch} and its batch is not symbolic; "
                "partition it for that size."
            )

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Use fake tensors, and bind the axes to groups that send nothing (operators on fake tensors never ask for a group)."""
        before = dict(collectives._axes)
        if self.program.mode == GENERATE:
            kv_cache.bind(_LongestSequences(self.program))  # type: ignore[arg-type]
        collectives._axes.update({axis: ("fake", self.degrees.get(axis, 1), 0) for axis in AXES})
        try:
            with self.mode, torch.set_grad_enabled(self.program.mode == "train"):
                yield
        except DataDependentOutputException as error:
            raise GraphparError(
                f"How much memory {self.program.name} takes depends on the values of its inputs: {error}."
            ) from error
        finally:
            kv_cache.bind(None)
            collectives._axes.clear()
            collectives._axes.update(before)

    def tensor(self, name: str) -> Tensor:
        """Return the parameter, buffer or constant ``name``; tied names share one."""
        first = self.program.tie_of(name)[0]
        if first not in self.state:
            info = self.program.tensor_info(first)
            self.state[first] = torch.empty(info.shape, dtype=info.dtype).requires_grad_(info.requires_grad)
        parameter = self.state[first]
        if name in self.casts and (parameter, self.casts[name]) not in self.copies:
            self.copies[parameter, self.casts[name]] = torch.empty(parameter.shape, dtype=self.casts[name])
        return parameter

    def given(self, stage: Stage, rows: int) -> list[Tensor]:
        """Return the stage's arguments: received values, inputs, counts."""
        gradients = {boundary.name for boundary in stage.receives if boundary.requires_grad}
        nodes = [node for node in stage.graph.nodes if node.op == "placeholder"]
        return [
            torch.empty(concrete_shape(node, rows), dtype=value_of(node).dtype).requires_grad_(
                bool(node.meta.get("boundary")) and str(node.target) in gradients
            )
            for node in nodes
        ]


class _LongestSequences:
    """In the place of a :class:`~graphpar.emitted.kv_cache.KeyValueCache`: its last wide window, without the memory that it keeps.

    Attributes: those of the cache.
    """

    def __init__(self, program: Program) -> None:
        self.position = program.inputs[0].shape[1] - widest_window(program)
        self.last = True

    def append(
        self, key: Tensor, value: Tensor, length: int, sliding_window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what has the shape of all keys and values that the window sees: views of the cache, or copies where it goes around."""
        rows, room = key.size(-2), length if sliding_window is None else min(length, sliding_window)
        before = min(self.position, room - 1)
        around = rows > 1 and self.position + rows > room
        seen = []
        for part in (key, value):
            one = part.narrow(-2, 0, 1)
            if around:
                seen.append(torch.cat((one.expand(*part.shape[:-2], before, part.size(-1)), part), -2))
            else:
                seen.append(one.expand(*part.shape[:-2], before + rows, part.size(-1)))
        return seen[0], seen[1]


def widest_window(program: Program) -> int:
    """Return how many positions of a prompt a program for generation computes at once, at most."""
    sequences, length = program.inputs[0].shape_at(program.batch)
    return min(length, widest(sequences))


# ---- running a stage ---------------------------------------------------------------------------------------------


class Forward(Runner):
    """Interprets a stage's graph on fake tensors."""

    def __init__(self, activations: Activations) -> None:
        super().__init__(activations.program, {})
        self.activations = activations

    def tensor(self, name: str) -> Tensor:
        return self.activations.tensor(name)

    def block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        run, recomputed = super().block, self.activations.recomputed.get(prefix.removesuffix("."))
        if recomputed is None:
            return run(block, prefix, args)
        if recomputed.by_hooks:
            gathers = collectives.watchers if recomputed.gathers else None
            return made_again(lambda *args: run(block, prefix, args), recomputed.pointwise, gathers, self.kept)(*args)
        return checkpointed(lambda *args: run(block, prefix, args), recomputed.keeps)(*args)

    def kept(self, tensor: Tensor) -> None:
        """Note a tensor that a block keeps by hooks of its own: hooks outside of it are not called."""

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(node.target, Chunked):
            return two_chunks(node.target, args)
        if casts_parameter(node) and (copy := self.activations.copies.get((args[0], value_of(node).dtype))) is not None:
            return Cast.apply(args[0], copy)
        return call_on_fakes(node.target, args, kwargs, self.activations.device, self.activations.even_experts)


def _outputs(stage: Stage, result: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """Return the stage's results as the runtime holds them (``StageAdapter``): contiguous tensors that are no views."""
    ids = {id(tensor) for tensor in given} if stage.sends else set()
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [tensor.clone() if id(tensor) in ids else sendable(tensor) for tensor in outputs]


def _draw(logits: Tensor) -> None:
    """Choose tokens as :mod:`graphpar.runtime.generation.generator` does at most: logits [b, n, vocabulary]."""
    rows = logits.size(0)
    every = Sampling(do_sample=True, top_k=1, top_p=0.5, repetition_penalty=2.0)
    every.tokens(logits[:, -1], [[0]] * rows, list(range(rows)))


def _backward(roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> bool:
    """Run the backward, and return whether torch can on fake tensors; it can't through ``index_put``, for example."""
    try:
        torch.autograd.backward(roots, gradients)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _hooked(parameters: Sequence[Tensor], live: Live) -> Iterator[None]:
    """Let ``live`` count the gradients of parameters as soon as they are made."""
    hooks = [
        each.register_post_accumulate_grad_hook(lambda made: live.add_beyond(made.nbytes))  # as large as its gradient
        for each in parameters
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Sharing(Forward):
    """Collects the storages of the values that every stage recomputes; calls ``note`` with what blocks keep by hooks of their own.

    ``variables``: of a program without a backward, what is made between blocks: it has names, so it stays while blocks run.
    """

    def __init__(self, activations: Activations, names: Sequence[str], note: Callable[[Tensor], object]) -> None:
        super().__init__(activations)
        self.names, self.note = frozenset(names), note
        self.storages: dict[int, StorageWeakRef] = {}  # which keep other storages from having the same identity
        self.variables: list[Any] = []
        self._inside = False

    def block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        self._inside = True
        try:
            return super().block(block, prefix, args)
        finally:
            self._inside = False

    def kept(self, tensor: Tensor) -> None:
        self.note(tensor)

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().call(node, args, kwargs)
        if self.activations.holds_variables and not self._inside:
            self.variables.append(made)
        if node.name in self.names:
            tensors = [item for item in tree_leaves(made) if isinstance(item, Tensor)]
            self.storages |= {storage_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        return made


class _Growing:
    """Converts the bytes of a storage at ``_MANY`` rows to those at ``sizes``; ``unclear`` is set once a storage may grow in part.

    ``whole``: bytes of storages as large as a parameter, which do not grow.
    """

    def __init__(self, sizes: Sequence[int], whole: Collection[int]) -> None:
        self.sizes, self.whole, self.unclear = np.array(sizes), whole, False

    def __call__(self, nbytes: int) -> Array:
        rows, rest = divmod(nbytes, _MANY)
        if not rest:
            return np.asarray(rows * self.sizes)
        self.unclear |= rows > 0 and nbytes not in self.whole
        return np.full(len(self.sizes), nbytes)


def _of_many_rows(activations: Activations, stage: Stage, sizes: Sequence[int]) -> list[Reach] | None:
    """Measure all ``sizes`` by one run; return None where that does not tell."""
    numbers = {activations.tensor(name).numel() for name in attributes(activations.program, stage)}
    at = _Growing(sizes, {number * itemsize for number in numbers for itemsize in (1, 2, 4, 8)})
    try:
        with torch_is_quiet():
            found = _measure_reach(activations, stage, _MANY, at)
    except RuntimeError:  # more elements than torch can count
        return None
    return None if at.unclear else found


def _measure_reach(activations: Activations, stage: Stage, rows: int, at: Callable[[int], Array]) -> list[Reach]:
    """Measure a run of ``rows``; ``at`` converts the bytes of a storage in this run to those at the requested sizes."""
    given = activations.given(stage, rows)
    for name in attributes(activations.program, stage):
        value = activations.tensor(name)
        if value.requires_grad:
            value.grad = torch.zeros_like(value)
    saved: dict[int, Array] = {}
    nothing = at(0)

    def sizes_of(tensors: Sequence[Tensor]) -> dict[int, Array]:
        return {storage_of(tensor): at(tensor.untyped_storage().nbytes()) for tensor in tensors}

    def total(sizes: Iterable[Array]) -> Array:
        return sum(sizes, nothing)

    def note(tensor: Tensor) -> Tensor:
        saved.update(sizes_of([tensor]))
        return tensor

    train = activations.program.mode == "train"
    runner = _Sharing(activations, stage.recomputed, note)
    live = Live(at)
    with activations.mode.counted_by(live):
        with saved_tensors_hooks(note, lambda tensor: tensor):
            result = runner.run_graph(stage.graph, "", given)
            outputs = _outputs(stage, result, given)
            if not stage.sends:
                runner.variables.clear()  # no block comes after
            if activations.program.mode == GENERATE and not stage.sends:
                _draw(outputs[0])
        forward, kept = live.mark()
        sent, received = sizes_of(outputs), sizes_of(given)
        shared = total(nbytes for key, nbytes in saved.items() if key in runner.storages and key not in sent)
        taken = total(nbytes for key, nbytes in received.items() if key in saved)
        held = any(key in saved for key in sent)
        if train:
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            with unseen(live):
                gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
            trained = {id(value): value for value in map(activations.tensor, attributes(activations.program, stage))}
            with _hooked([value for value in trained.values() if value.requires_grad], live):
                backward_runs = _backward(roots, gradients)
        grown = np.maximum(live.highest_beyond, live.now + live.beyond)
        backward, _ = live.mark()
        if train and not backward_runs:  # assume the forward's
            backward = grown = forward
    for value in activations.state.values():
        value.grad = None
    new = total(nbytes for key, nbytes in sent.items() if key not in received)
    relays = {id(tensor) for tensor in given}
    results = result if isinstance(result, tuple | list) else (result,)
    copies = {storage_of(output) for made, output in zip(results, outputs) if id(made) in relays}
    columns = {
        "inside": kept - new - shared,
        "shared": shared,
        "given": taken,
        "received": total(received.values()),
        "sent": new,
        "passed": new - total(nbytes for key, nbytes in sent.items() if key in copies and key not in received),
        "forward": forward - kept,
        "backward": np.maximum(0, backward - kept),
        "growth": np.maximum(0, grown - np.maximum(backward, kept)),
    }
    del live, runner, result, results, outputs, given
    halves = _measure_halves(activations, stage, rows, at) if train else None
    columns |= halves or {}
    return [
        Reach(held=held, splits=halves is not None, **{name: int(column[place]) for name, column in columns.items()})
        for place in range(len(nothing))
    ]


def _measure_halves(
    activations: Activations, stage: Stage, rows: int, at: Callable[[int], Array]
) -> dict[str, Array] | None:
    """Measure a backward in halves, as :func:`_measure_reach` does a whole one; None where torch can't split it, or a block recomputes."""
    given = activations.given(stage, rows)
    values = [activations.tensor(name) for name in attributes(activations.program, stage)]
    trained: Any = list({id(value): value for value in values if value.requires_grad}.values())
    received = [tensor for tensor in given if tensor.requires_grad]
    again = (str(node.target) in activations.recomputed for node in stage.graph.nodes if node.op == "call_module")
    if not received or any(again):
        return None

    def bytes_of(tensors: Iterable[Tensor]) -> dict[int, Array]:
        return {storage_of(tensor): at(tensor.untyped_storage().nbytes()) for tensor in tensors}

    for value in trained:
        value.grad = torch.zeros_like(value)
    live, nothing = Live(at), at(0)
    with activations.mode.counted_by(live):
        outputs = _outputs(stage, Forward(activations).run_graph(stage.graph, "", given), given)
        _, kept = live.mark()
        if not splits_exactly(outputs, received, trained):
            return None
        copied = set(read_by_others(outputs))
        outputs = [tensor.clone() if place in copied else tensor for place, tensor in enumerate(outputs)]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        with unseen(live):
            gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
        try:
            groups = stage_backward_input(roots, gradients, received, iter(trained))[1]
        except RuntimeError:  # as in _backward: assume as many gradients as there are values
            return {"for_weights": kept, "input_half": kept, "weight_half": kept}
        for tensor in received:
            tensor.grad = None
        first, left = live.mark()
        given_back = bytes_of(gradients or ())
        own = bytes_of(each for group in groups for part in group["grads"] for each in part if each is not None)
        made = sum((nbytes for key, nbytes in own.items() if key not in given_back), nothing)
        stage_backward_weight(iter(trained), groups)
        second, _ = live.mark()
    for value in trained:
        value.grad = None
    return {
        "for_weights": made,
        "outer": sum((nbytes for key, nbytes in own.items() if key in given_back), nothing),
        "freed": np.maximum(0, kept - (left - made)),
        "input_half": np.maximum(0, first - kept),
        "weight_half": np.maximum(0, second - left),
    }


def attributes(program: Program, stage: Stage) -> list[str]:
    """Return the names of the parameters, buffers and constants of a stage, a tied one under each of its names."""
    names: dict[str, None] = {}

    def collect(graph: fx.Graph, prefix: str) -> None:
        for node in graph.nodes:
            if node.op == "get_attr" and str(node.target) not in program.subgraphs:
                names[prefix + str(node.target)] = None
            elif node.op == "call_module":
                collect(program.block_of(node).graph, f"{prefix}{node.target}.")

    collect(stage.graph, "")
    return list(names)
