"""Run an emitted program on its ranks: build it, load weights, run steps.

    pipeline = Pipeline("out", device)            # this rank's stages, process groups, torch's schedule
    pipeline.load_weights("model.safetensors")
    loss = pipeline.step(batch)                   # every .grad is now the single-device gradient
    pipeline.clip_grad_norm_(1.0); optimizer.step(); pipeline.zero_grad()

One step: check the batch -> take the rows of this replica, unless it has no others -> count the loss denominators (ranks
of the last stage) -> torch's schedule over the microbatches -> finish the gradients -> sum the loss over the replicas.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphpar.runtime import checkpoint
from graphpar.runtime.adapters import Adapters
from graphpar.runtime.balance import Balance
from graphpar.runtime.batches import Feed, Part, labels_named, together
from graphpar.runtime.checkpoint_folders import is_in
from graphpar.runtime.compiled import backend_of, check_compiles
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError
from graphpar.runtime.event_hooks import watch
from graphpar.runtime.events import at
from graphpar.runtime.forward import evaluating, forward_only
from graphpar.runtime.fully_sharded import (
    drop_gradients,
    free,
    gather,
)
from graphpar.runtime.generation import Generator
from graphpar.runtime.gradients import Gradients
from graphpar.runtime.groups import Groups
from graphpar.runtime.host import Host, has_host
from graphpar.runtime.idle import Places, left_in_stage
from graphpar.runtime.initialise import initial_values, model_of
from graphpar.runtime.loss_scale import FIRST, LossScale
from graphpar.runtime.lr_schedules import Schedule, build_lr_schedule
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.microbatches import Microbatches
from graphpar.runtime.modes import GENERATE
from graphpar.runtime.norm import clip
from graphpar.runtime.offloaded_activations import OffloadedActivations
from graphpar.runtime.offloaded_state import OffloadedState
from graphpar.runtime.optimizer_scope import ELEMENTWISE, Found, Scope, look, made_again
from graphpar.runtime.optimizer_shards import OptimizerShards
from graphpar.runtime.optimizers import Described, build_optimizer, describe_model, factory
from graphpar.runtime.other_optimizers import OtherOptimizers
from graphpar.runtime.replicas import check_program, check_ranks, check_replicas, is_compared
from graphpar.runtime.saved_state import State
from graphpar.runtime.schedules import keyword_names
from graphpar.runtime.split_backward import is_whole
from graphpar.runtime.stages import (
    StageAdapter,
    bind_collectives,
    emitted_package,
    stage_function,
)
from graphpar.runtime.stored import optimizer_shards, stored_stage
from graphpar.runtime.weights import (
    check_names,
    fill_all,
    load_constants,
    load_weights,
    no_weights,
    parameters_by_name,
    save_weights,
    without_adapters,
)
from graphpar.runtime.whole_parameters import WholeParameters, dividing_axes

CONSTANTS = "constants.safetensors"
WEIGHTS = Path("weights") / "model.safetensors"


class Pipeline:
    """The part of an emitted program that this rank runs.

    Building it is a collective call (all ranks build it, and fail together if one fails). It needs a process
    group: see ``graphpar.runtime.start``. Parameter values are undefined until ``load_weights``.

    Args:
        folder: the emitted folder.
        device: where this rank computes.
        seed: of the random streams (dropout).
        compile: whether ``torch.compile`` compiles the blocks, or with which of its backends; the first steps take longer then. Not for
            schedules that split backwards in two.

    Raises:
        RuntimeProgramError: the folder is broken, the number of ranks is not the plan's, or its blocks can't be compiled.
    """

    def __init__(
        self, folder: str | Path, device: torch.device | str = "cpu", seed: int = 0, *, compile: bool | str = False
    ) -> None:
        self.device = torch.device(device)
        self.seed = seed
        self.steps_done = 0
        self.rank = dist.get_rank()
        with agreed():
            self.program = load_manifest(folder)
            check_ranks(self.program)
            self._backend = backend_of(compile)
            if self.program.offload and not has_host(self.device) and self.rank == 0:
                print(
                    f"offload: {self.device} is the host, so {' and '.join(self.program.offload)} stay where they are",
                    flush=True,
                )
            if self._backend is not None:
                check_compiles(self.program, self._backend, self.device)
        with agreed():
            check_program(self.program)
        self.groups = Groups(self.program.mesh, self.device)
        self._shards: OptimizerShards | None = None
        self._saver = checkpoint.Saver()
        self._nothing = nn.Parameter(torch.empty(0, device=self.device))
        self._scale = LossScale(FIRST if self.program.scales_loss else 1.0)
        self.host = Host(self.device) if self.program.offload and has_host(self.device) else None
        self._schedules: weakref.WeakKeyDictionary[Optimizer, Schedule | Mapping[str, Any]] = (
            weakref.WeakKeyDictionary()
        )  # as a checkpoint has them until they are made
        self._offloaded: weakref.WeakKeyDictionary[Optimizer, OffloadedState] = weakref.WeakKeyDictionary()
        self._whole: weakref.WeakKeyDictionary[Optimizer, WholeParameters] = weakref.WeakKeyDictionary()
        try:
            with agreed():
                self._build()
            if self.program.zero == 1:
                with agreed():
                    self._shards = optimizer_shards(
                        self._package, self._interfaces, self.stages, self.program, self.groups
                    )
            self._gradients = Gradients(self.stages, self.program, self.groups, self.device, self._shards)
            self._others = OtherOptimizers(self.stages, self.parameters, self.program, self._look_at)
        except AgreedError:
            self.groups.close()
            raise

    def _build(self) -> None:
        """Everything that needs no other rank."""
        self._package = emitted_package(self.program)
        bind_collectives(self.program, self._package, self.groups)
        self._interfaces = self.program.stages_of(self.groups.place["pp"])
        moves = self.host is not None and "activations" in self.program.offload
        activations = OffloadedActivations(self.host) if self.host is not None and moves else None
        stored = [
            stored_stage(self._package, spec, self.program, self.groups, self.device, self._backend, activations)
            for spec in self._interfaces
        ]
        self.stages = [stage for stage, _ in stored]
        for stage in self.stages:
            load_constants(stage, self.program.folder / CONSTANTS, self.program, self.groups.place)
        self._adapters = [
            StageAdapter(stage, spec, 1 / self.program.replicas if self.program.dp_mean else None, self.program.steady)
            for stage, spec in zip(self.stages, self._interfaces)
        ]
        names = keyword_names(self.program, [spec.index for spec in self._interfaces])
        counts = any(spec.counts for spec in self._interfaces)
        count = stage_function(self._package, self.program.stages[-1], "global_counts") if counts else None
        self._feed = Feed(self.program, self.groups, self.device, self.seed, names, count)
        self.has_last_stage = self._interfaces[-1].index == len(self.program.stages) - 1
        if self.program.mode == GENERATE:
            self._generator = Generator(self.program, self._adapters, self._package, self.groups, self.device)
        casts = [casts for _, casts in stored]
        self._microbatches = Microbatches(self.program, self._adapters, casts, self.groups, self.device, self._scale)
        named = [(f"stage_{spec.index}", stage) for spec, stage in zip(self._interfaces, self.stages)]
        watch(named, self._microbatches.torch_stages, self.rank, self.device, self.program.world_size)
        self._places = Places(self.stages, self.device)

    @property
    def package(self) -> str:
        """The name under which the emitted package is imported."""
        return self._package

    @property
    def data(self) -> Part:
        """The rows and the inputs of a global batch that this rank needs; :meth:`step` and :meth:`infer` take these alone, too."""
        return self._feed.part

    @property
    def reports(self) -> bool:
        """Whether this is the one rank that should print the loss: the first of those that hold the last stage."""
        others = (index for axis, index in self.groups.place.items() if axis != "pp")
        return self.has_last_stage and not any(others)

    @property
    def whole_backward_stages(self) -> list[int]:
        """This rank's stages whose backward a zero-bubble schedule does not split; known after the first step."""
        return [stage.stage_index for stage in self._microbatches.torch_stages if is_whole(stage)]

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, AgreedError):
            self.close()

    def close(self) -> None:
        """Wait for a checkpoint that is being saved, and destroy the process groups that this program created; a collective call."""
        self._gradients.drop()
        self._others.close()
        try:
            self._saver.close()
        finally:
            self.groups.close()

    # Weights

    def initialise(self, build: Callable[[], nn.Module] | None = None) -> None:
        """Give this rank's parameters and buffers the values that the model has when it is built on one device with this seed.

        No rank has the whole model in memory: see :func:`~graphpar.runtime.initialise.initial_values`. A collective call.

        Args:
            build: makes the model; by default the ``model`` of the model file that the program was compiled from.

        Raises:
            RuntimeProgramError: the program doesn't know its model file, or ``build`` depends on values of what it draws, or
                makes another model.
        """
        self._check_unmerged("initialise")
        self.synchronize()
        with agreed():
            values = initial_values(build or model_of(self.program), self.seed)
            fill_all(self.stages, values, self.program, self.groups.place)
            self._written()
        with agreed():
            check_replicas(self.stages, self.program, self.groups)

    def load_weights(self, path: str | Path | None = None, *, strict: bool = True) -> None:
        """Load parameters and persistent buffers from a safetensors file or a folder of shards.

        By default from the program's own ``weights/model.safetensors``, or where it has none as :meth:`initialise` makes them.
        A file of the base model, which has no adapters, leaves these as they begin.
        The file has whole tensors; each rank takes its shard. A collective call: all ranks fail if one does. ``strict=False``
        ignores what no stage takes.

        Raises:
            RuntimeProgramError: the file is not there, names or shapes do not fit, or ranks that should hold the
                same values loaded different ones.
        """
        self._check_unmerged("load_weights")
        if path is None and self.program.model_file is not None:
            found = gather_objects((self.program.folder / WEIGHTS).exists())
            if not any(found):
                self.initialise()
                return
        everyone = self.groups.gather("pp", list(self.state_dict()))
        with agreed():
            source = self.program.folder / WEIGHTS if path is None else Path(path)
            if path is None and not source.exists():
                raise RuntimeProgramError(no_weights(self.program))
            held = [name for names in everyone for name in names]
            check_names(source, held, self.program, strict=False)
        self.synchronize()
        with agreed():
            for stage in self.stages:
                load_weights(stage, source, self.program, self.groups.place)
            if without_adapters(held, source, self.program) != held:
                self.adapters.draw(self.seed)
            self._written()
            if strict:
                check_names(source, held, self.program)
        with agreed():
            check_replicas(self.stages, self.program, self.groups)

    def save_weights(self, path: str | Path) -> None:
        """Write the whole model's parameters and persistent buffers into one safetensors file; a collective call.

        The keys are those of the user's model, so ``model.load_state_dict(load_file(path))`` works.
        """
        self._check_unmerged("save_weights")
        save_weights(self.state_dict(), path, self.program, self.groups)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers (its shards of them), by the user's names.

        At ZeRO level 1 a collective call: see :meth:`synchronize`.
        """
        self.synchronize()
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}

    def synchronize(self) -> None:
        """Wait until the parameters of this rank have the values that other ranks' optimizers gave them (ZeRO level 1).

        A collective call there: values may still have to be sent. Elsewhere there is nothing to wait for.
        """
        if self._shards is not None:
            self._shards.settle()
            self._shards.wait()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank updates, with the names that the model's ``named_parameters()`` gives them.

        Each copy that stages share has the first name of its tie. At ZeRO level 1 these are the rank's own (or 1-D slices of parameters).
        Where none is trained, an empty parameter that is follows, since optimizers want one.
        """
        own = self._own_parameters()
        yield from ((name, copy) for name, copies in own.items() for copy in copies)
        if not any(copy.requires_grad for copies in own.values() for copy in copies):
            yield "", self._nothing

    def _own_parameters(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """What this rank updates, by first name."""
        if self._shards is not None:
            return {name: [piece] for name, piece in self._shards.pieces.items()}
        return parameters_by_name(self.stages, self.program.ties)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank updates, as an optimizer takes them."""
        return (parameter for _, parameter in self.named_parameters())

    @functools.cached_property
    def adapters(self) -> Adapters:
        """The model's low-rank adapters: to save, load and merge them."""
        return Adapters(self.stages, self.program, self.groups, self.synchronize, self._written)

    def _check_unmerged(self, what: str) -> None:
        if self.program.adapters:
            self.adapters.check_apart(what)

    def _written(self) -> None:
        """Note that parameters have been given other values."""
        if self._shards is not None:
            self._shards.loaded()

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> None:
        """Save weights, optimizer state and ``step`` between two steps, for programs of any plan; a collective call.

        Each rank writes a part. The folder ``path`` appears when it is whole; then the file ``latest`` beside it names it.

        Args:
            path: a folder beside other checkpoints, such as ``ckpt/100``, on a disk that all machines share.
            optimizer: that of this rank.
            step: number of the last step that was taken.
            data: position in the data, or whatever else is to be kept as JSON: that of rank 0.
            keep: remove all but this many of the last checkpoints.
            wait: False: copy what is saved and write it while training goes on. An error is then raised by the next call that saves
                or loads, or by ``close``.

        Raises:
            RuntimeProgramError: it can't be saved, gradients are yet to be reduced, or ranks that update the same parameters have made
                them different.
        """
        self._check_unmerged("save_checkpoint")
        self._saver.wait()
        with agreed():
            self._gradients.check_reduced("save_checkpoint")
        self._gradients.check_copies()
        state = self._state(optimizer)
        progress = checkpoint.Progress(self.seed, self.steps_done, self._scale, self._schedule_of(optimizer))
        checkpoint.save(self._saver, state, progress, path, step=step, data=data, keep=keep, wait=wait)

    def load_checkpoint(self, path: str | Path, optimizer: Optimizer | None = None) -> checkpoint.Checkpoint:
        """Load what a program of this model has saved, under any plan and from any number of ranks; a collective call.

        The seed, the count of steps and the loss scale become those of the checkpoint, too.

        Args:
            path: a checkpoint, or a folder of checkpoints: the latest.
            optimizer: that of this rank, of the same kind; its hyperparameters become those of the checkpoint. Without one the
                weights alone are loaded.

        Raises:
            RuntimeProgramError: there is no checkpoint, it is damaged, or it does not fit the program or the optimizer: the message
                lists tensors that are missing, unexpected or of other shapes. Then nothing is changed.
        """
        self._check_unmerged("load_checkpoint")
        self._saver.wait()
        loaded, progress = checkpoint.load(self._state(optimizer), path)
        if self.program.scales_loss and progress.scale.value != 1.0:
            self._scale.take(progress.scale)
        self.seed = self._feed.seed = progress.seed
        self.steps_done = progress.steps_done
        if optimizer is not None and progress.schedule is not None:
            schedule = self._schedules.get(optimizer)
            made = schedule.made() if isinstance(schedule, Schedule) else None
            self._schedules[optimizer] = progress.schedule
            if made is not None:
                self._go_on(optimizer, loaded.step, made)
        return loaded

    def resume(self, path: str | Path, optimizer: Optimizer | None = None) -> checkpoint.Checkpoint | None:
        """Load the latest checkpoint of a folder as :meth:`load_checkpoint`, or nothing where no rank sees one; a collective call."""
        if not any(gather_objects(is_in(path))):
            return None
        asked = self._settings(optimizer)
        loaded = self.load_checkpoint(path, optimizer)
        for name, value in self._settings(optimizer).items() if self.reports else ():
            if value != asked[name]:
                print(f"{name}: {value}, that of the checkpoint, not {asked[name]}", flush=True)
        return loaded

    def _settings(self, optimizer: Optimizer | None) -> dict[str, object]:
        """What a checkpoint replaces of what was asked for, by name."""
        schedule = self._schedule_of(optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        rates = [float(group["lr"]) for group in (groups if schedule is None else schedule["groups"])]
        return {"seed": self.seed, "learning rate": ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))}

    def _schedule_of(self, optimizer: Optimizer | None) -> Mapping[str, Any] | None:
        """Describe the schedule of an optimizer: that which was made, or else that of its checkpoint."""
        found = None if optimizer is None else self._schedules.get(optimizer)
        return found.record() if isinstance(found, Schedule) else found

    def _state(self, optimizer: Optimizer | None) -> State:
        self.synchronize()
        with agreed():
            offloaded = None if optimizer is None else self._offloaded.get(optimizer)
            whole = None if optimizer is None else self._whole.get(optimizer)
            owned = ({}, ()) if whole is None else (whole.parameters, whole.axes)
            return State(self.stages, self.program, self.groups, self._shards, optimizer, offloaded, *owned)

    # Training

    def optimizer(self, lr: float | None = None, make: Callable[..., Any] | None = None) -> torch.optim.Optimizer:
        """Make the model file's ``optimizer``; AdamW where it has none. A collective call.

        The function sees what ``named_parameters()`` of the model gives, in whole shapes, and its optimizer has all of its groups on every
        rank; this rank's parameters are then what is left in them. One that looks at whole parameters, or at all together, where ranks have
        parts of them, has those that this rank owns: :mod:`graphpar.runtime.whole_parameters`.

        Args:
            lr: the learning rate of all of its groups; by default its own (of AdamW 1e-3).
            make: in place of the model file's function.

        Raises:
            RuntimeProgramError: on all ranks, if it fails on one, would train other parameters than it was given, needs a closure, or draws
                random numbers, which ranks would draw apart.
        """
        model = describe_model(self.stages, self.program, self.groups)
        with agreed():
            make = make or factory(self.program, self._package, "optimizer")
            scope = Scope.ELEMENT if make is None else self._scope(make, model)
        axes = dividing_axes(self.program, scope)
        whole = WholeParameters(self._own_parameters(), axes, scope, self._state(None), self.device) if axes else None
        with agreed():
            made = build_optimizer(make, self._own_parameters() if whole is None else whole.stepped, model, lr)
            self.offload(made)
            if whole is not None:
                whole.wrap(made, self._gradients.check_reduced)
                self._whole[made] = whole
            self._others.know(made)
            return made

    def _scope(self, make: Callable[..., Any], model: Mapping[str, Described]) -> Scope:
        """Find what an optimizer looks at, where there are several ranks."""
        if self.program.world_size == 1:
            return Scope.ELEMENT
        found = self._found(make, model)
        found.check_ranks()
        return found.scope

    def _found(self, make: Callable[..., Any], model: Mapping[str, Described]) -> Found:
        return look(make, model, flat=self.program.zero == 1 and not self.program.owners, device=self.device)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Check that an optimizer that was made over :meth:`parameters` by hand may step what this rank stores.

        Raises:
            RuntimeProgramError: it looks at more.
        """
        kind = type(optimizer)
        plain = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
        if plain or not dividing_axes(self.program, Scope.ALL):
            return
        state, own = State(self.stages, self.program, self.groups, self._shards, None), self._own_parameters()
        model = {
            name: Described(
                torch.Size(state.of_parameter(copies[0], "", copies[0]).shape), copies[0].dtype, copies[0].requires_grad
            )
            for name, copies in own.items()
        }
        try:
            found = self._found(made_again(optimizer, {copies[0]: name for name, copies in own.items()}), model)
        except RuntimeProgramError:
            return  # it is made of something else, or needs a closure, which is the loop's
        if found.tried and dividing_axes(self.program, found.scope):
            what = "all parameters together" if found.scope is Scope.ALL else "whole parameters"
            raise RuntimeProgramError(
                f"the step of {kind.__name__} looks at {what}, and this rank stores parts of them; make it by "
                "pipeline.optimizer(make=...), with a function of pairs of names and parameters, so that it has them"
            )

    def offload(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer that :meth:`optimizer` has not made where the plan has it: in the host's memory, or nowhere else.

        Raises:
            RuntimeProgramError: it may update several parameters together.
        """
        if self.host is not None and "optimizer" in self.program.offload and optimizer not in self._offloaded:
            self._offloaded[optimizer] = OffloadedState(optimizer, self.host)

    def lr_schedule(self, optimizer: torch.optim.Optimizer, done: int = 0) -> LRScheduler:
        """Make the model file's ``lr_schedule(optimizer)``; one that keeps the learning rate where it has none.

        What :meth:`save_checkpoint` saves with the optimizer has its state, and what :meth:`load_checkpoint` loads with the optimizer
        lets it go on, whether it is made before or after.

        Args:
            done: how many steps were made before, of a run that goes on without such a checkpoint.

        Raises:
            RuntimeProgramError: on all ranks, if it fails on one.
        """
        return self._go_on(optimizer, done)

    def _go_on(self, optimizer: Optimizer, done: int, made: LRScheduler | None = None) -> LRScheduler:
        """Make a schedule where the optimizer's checkpoint says, or let ``made`` be there."""
        with agreed():
            make, found = factory(self.program, self._package, "lr_schedule"), self._schedules.get(optimizer)
            saved = None if isinstance(found, Schedule) else found
            made, schedule = build_lr_schedule(make, optimizer, done, saved, made)
            self._schedules[optimizer] = schedule
            if saved is not None and not schedule.is_of(saved) and self.reports:
                print("lr_schedule: not that of the checkpoint, so it begins anew and makes as many steps", flush=True)
            return made

    def step(
        self,
        batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        step: int | None = None,
        broadcast_loss: bool = False,
        accumulate: bool = False,
    ) -> Tensor | None:
        """Run forward and backward over the whole global batch; gradients are added to ``.grad``.

        Args:
            batch: inputs and targets by name: all of them, whole, the same on every rank; or of each that ``data.names`` lists
                the rows ``data.rows``. An argument that is a list or mapping of tensors is given as the model takes it, or its
                tensors by their own names. A sequence of batches is computed one after the other, as if it were one batch that has
                all of them: loss and gradients are this one's, whatever the loss divides by.
            step: number of the step, for the random streams; by default steps are counted.
            broadcast_loss: return the loss on every rank.
            accumulate: keep the gradients where they are computed, without reducing them over ranks, for the next step without it,
                which reduces the sum of all. Until then no optimizer may step and no norm is known. It is the same on all ranks.

        Returns:
            The loss of the global batch on the ranks that have the last stage, ``None`` elsewhere. In fp16 it may have overflowed in
            the backward: then ``skipped_steps`` counts one more, and every ``.grad`` is what it was before.

        Raises:
            RuntimeProgramError: the batch does not fit the program, or several can't be computed one after the other, before anything
                is sent; or, which is looked at in steps 1, 2, 4, ... 64 and every 64th, ranks differ in the number of the step, in the
                batch, or in parameters that all of them update.
        """
        if self.program.mode != "train":
            raise RuntimeProgramError("the program was emitted for inference: call infer()")
        self._places.check()
        at(step=self.steps_done if step is None else step)
        batches = together(self.program, batch, training=True)
        if self._feed.given and is_compared(self._feed.given):
            self._gradients.check_copies()
        losses = [
            self._run(values, accumulate or place < len(batches))
            for place, values in enumerate(self._feed.values(batches, self.steps_done if step is None else step), 1)
        ]
        loss = torch.stack([each for each in losses if each is not None]).sum() if self.has_last_stage else None
        replicas = self.groups["batch"]
        if loss is not None and replicas is not None:
            dist.all_reduce(loss, group=replicas)
        self.steps_done += 1
        return self._broadcast(loss) if broadcast_loss else loss

    def balance(self) -> Balance:
        """Count from now on how rows spread over experts. Compiled blocks are whole graphs, in which nothing is counted."""
        return Balance(self.groups, self._package if self._backend is None else "")

    def _run(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor | None:
        """Forward and backward of a batch, and unless it accumulates the reduction of gradients; returns this replica's loss."""
        if self._shards is not None:
            self._shards.begin_step()
        self._gradients.take(accumulate)
        with labels_named(values):
            loss = self._microbatches.run(values, accumulate)
        self._free()
        if accumulate:
            self._gradients.keep(self.parameters())
        else:
            finite = self._gradients.finish(self._scale.value)
            if self.program.scales_loss:
                self._scale.update(finite)
        if self._shards is not None:
            self._shards.end_step()
        return loss

    def assert_idle(self) -> None:
        """Check that no step is under way on this rank, as between two steps: nothing is pending, gathered or set aside.

        Raises:
            RuntimeProgramError: a step did not end; the message lists what it left.
        """
        left = [*self._gradients.left(), *self._microbatches.left()]
        for spec, stage in zip(self._interfaces, self.stages):
            left += left_in_stage(f"stage_{spec.index}", stage)
        if left:
            raise RuntimeProgramError(f"a step did not end on rank {self.rank}: {'; '.join(left)}")

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by for the backward; always 1 but in fp16. It may be set, alike on all ranks."""
        return self._scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not self.program.scales_loss:
            raise RuntimeProgramError("the loss is scaled in programs for training in fp16 only")
        self._gradients.check_reduced("setting the loss scale")
        self._scale.value = float(value)

    @property
    def skipped_steps(self) -> int:
        """How many steps left no gradients, since one was not finite on some rank (fp16)."""
        return self._scale.skipped

    def _free(self) -> None:
        """Free what FSDP2 still holds gathered, such as a unit without a backward: it would not see the optimizer's step."""
        for stage in self.stages if self.program.fully_sharded else ():
            free(stage)

    def _broadcast(self, value: Tensor | None) -> Tensor:
        spec = self.program.outputs[0]
        shared = torch.empty(spec.shape, dtype=spec.dtype, device=self.device) if value is None else value
        if (group := self.groups["pp"]) is not None:
            dist.broadcast(shared, src=self.groups.rank_at(pp=self.program.stages[-1].rank), group=group)
        return shared

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Give each parameter that this rank updates its part of a whole gradient, by name; none where there is none."""
        self._state(None).give(gradients)

    def zero_grad(self) -> None:
        """Set the gradients of this rank's parameters to ``None``, and drop those that steps with ``accumulate`` have left.

        At ZeRO level 1 also start to send the parameters' new values. Call it on all ranks after ``optimizer.step()``.
        """
        self._gradients.drop()
        for stage in self.stages if self.program.fully_sharded else ():
            drop_gradients(stage)
        for parameter in self.parameters():
            parameter.grad = None
        if self._shards is not None:
            self._shards.send()

    def whole_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages, also where other ranks hold them (ZeRO level 1); a collective call there.

        Raises:
            RuntimeProgramError: the last step was one with ``accumulate``.
        """
        self._gradients.check_reduced("whole_gradients")
        if self._shards is not None:
            return self._shards.whole_gradients()
        named = (pair for stage in self.stages for pair in stage.named_parameters(remove_duplicate=False))
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        A collective call. Every element of the model counts once, however many ranks hold it, as on a single device.

        Returns:
            The norm before.

        Raises:
            RuntimeProgramError: the last step was one with ``accumulate``.
        """
        self._gradients.check_reduced("clip_grad_norm_")
        return clip(self._gradients.counted, self.parameters(), max_norm, self.device)

    # Inference

    def check_eval(self) -> None:
        """Check that the program can evaluate.

        Raises:
            RuntimeProgramError: the model computes something else in evaluation, which the program does not have.
        """
        if self.program.no_eval is not None:
            raise RuntimeProgramError(self.program.no_eval)

    def eval(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Tensor] | None:
        """Run the forward as in ``model.eval()``: no dropout, BatchNorm by its running statistics, which stay as they are.

        Returns:
            The outputs by name, of the whole global batch (of a program for training the loss), on the ranks of the last stage. The
            loss of several batches is that of one batch that has all of them.

        Raises:
            RuntimeProgramError: the model computes something else in evaluation, which the program does not have; or the batch does
                not fit.
        """
        self.check_eval()
        with evaluating(self.stages):
            return self._forward(batch, self.steps_done)

    def infer(self, batch: Mapping[str, Any], *, step: int | None = None) -> dict[str, Tensor] | None:
        """Run the forward alone, without gradients, and return the outputs by name on the ranks of the last stage, else ``None``.

        They are those of the whole global batch. For a program that was emitted for training this is the loss.
        """
        return self._forward([batch], self.steps_done if step is None else step)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        show: Callable[[int, int], None] | None = None,
        **choice: Any,
    ) -> list[list[int]]:
        """Continue prompts, and return the new tokens of each on every rank; a collective call of a program for generation.

        Args:
            prompts: token ids of any lengths, the same on all ranks.
            max_new_tokens: for each; by default that of the model's generation config, or what the cache has room for.
            attention_mask: [prompts, positions], where ``prompts`` is a tensor with padding on either side.
            seed: of tokens that are drawn: the same tokens for the same seed, under any plan. By default the pipeline's.
            show: called with the number of a prompt and each new token of it.
            choice: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``eos_token_id`` (one or several), as in
                transformers; by default those of the model's generation config.

        Raises:
            RuntimeProgramError: on all ranks: the program is for something else, or a prompt does not fit.
        """
        self._check_mode("generate", GENERATE)
        self.synchronize()
        with torch.no_grad():
            given = self.seed if seed is None else seed
            return self._generator.answers(prompts, max_new_tokens, attention_mask, given, show, choice)

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys and values that this rank kept of as many sequences as the program computes at once, when it last generated."""
        self._check_mode("cache_bytes", GENERATE)
        return self._generator.cache_bytes

    def _check_mode(self, what: str, mode: str) -> None:
        if self.program.mode != mode:
            raise RuntimeProgramError(
                f"{what} needs a program for it, but this one is for {self.program.mode}: compile the model with --mode {mode}"
            )

    def _forward(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], step: int) -> dict[str, Tensor] | None:
        """The outputs of a batch, or the sums of those of several."""
        self.synchronize()
        found: list[dict[str, Tensor] | None] = []
        with torch.no_grad():
            for values in self._feed.values(together(self.program, batch, training=False), step):
                for stage in self.stages if self.program.gathers_by_table else ():
                    gather(stage)
                if self.program.mode == GENERATE:
                    found.append(self._generator.logits(values))
                else:
                    found.append(forward_only(self.program, self._adapters, values, self.groups))
                self._free()
        outputs = [each for each in found if each is not None]
        return (
            {name: sum(each[name] for each in outputs[1:]) + outputs[0][name] for name in outputs[0]}
            if outputs
            else None
        )
