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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphpar.runtime.checkpoints import checkpoint
from graphpar.runtime.debugging.events import at, watch
from graphpar.runtime.debugging.idle import Places, left_in_stage
from graphpar.runtime.distributed import StopSignal, agreed
from graphpar.runtime.errors import AgreedError, RuntimeProgramError
from graphpar.runtime.generation.between_steps import BetweenSteps
from graphpar.runtime.generation.generates import Generates
from graphpar.runtime.generation.generator import Generator
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.option_kinds import GENERATE, SCRIPTS, TRAIN
from graphpar.runtime.rendezvous import check_size
from graphpar.runtime.stages.batches import Part, labels_named, together
from graphpar.runtime.stages.branches import Branches
from graphpar.runtime.stages.captured import Captured
from graphpar.runtime.stages.compiled import backend_of
from graphpar.runtime.stages.expert_room import ExpertRoom
from graphpar.runtime.stages.loss_scale import FIRST, LossScale
from graphpar.runtime.stages.microbatches import Microbatches, evaluating, forward_only, summed
from graphpar.runtime.stages.model_outputs import Metric, ModelOutputs
from graphpar.runtime.stages.own_stages import OwnStages
from graphpar.runtime.stages.split_backward import is_whole
from graphpar.runtime.state.gradients import Gradients, clip
from graphpar.runtime.state.host import host_of
from graphpar.runtime.state.optimizers import factory
from graphpar.runtime.state.own_optimizers import Optimizers
from graphpar.runtime.state.replicas import check_program, check_replicas, is_compared
from graphpar.runtime.training.balance import Balance


class Pipeline(Generates):
    """The part of an emitted program that this rank runs.

    Building it is a collective call (all ranks build it, and fail together if one fails). It needs a process
    group: see ``graphpar.runtime.start``. Parameter values are undefined until ``load_weights``.

    Args:
        folder: the emitted folder.
        device: where this rank computes.
        seed: of the random streams (dropout).
        compile: whether ``torch.compile`` compiles the blocks, or with which of its backends; the first steps take longer then. Not for
            schedules that split backwards in two. By default as planned, on the kind of device that was planned for.
        cuda_graphs: capture the forwards and backwards of a step, and replay them as one CUDA graph; where they can't be, a warning says
            why, and they run. Gradients are then in memory that the next step writes. A CPU replays a list of calls, more slowly.

    Attributes:
        weights_version: the number with which weights were last received; None where they arrived in part.
        captured: with ``cuda_graphs``, why steps are not captured, if so, and how many were replayed.

    Raises:
        RuntimeProgramError: the folder is broken, the number of ranks is not the plan's, or its blocks can't be compiled.
    """

    def __init__(
        self,
        folder: str | Path,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        compile: bool | str | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.seed = seed
        self.stop: StopSignal | None = None  # of the loop; clip_grad_norm_ sums with the norm whether a rank is to end
        self.steps_done = 0
        self.weights_version: int | None = 0
        self.rank = dist.get_rank()
        with agreed():
            self.program = load_manifest(folder)
            check_size(dist.get_world_size(), self.program.mesh, self.program.folder / SCRIPTS[self.program.mode])
            self._backend = backend_of(self.program, compile, self.device)
        with agreed():
            check_program(self.program)
        self.groups = Groups(self.program.mesh, self.device)
        self._saver = checkpoint.Saver()
        self._scale = LossScale(FIRST if self.program.scales_loss else 1.0)
        self.host = host_of(self.device, self.program.offload)
        try:
            with agreed():
                own = OwnStages(self.program, self.groups, self.device, self._backend, self.host)
            self._own, self.stages, self.has_last_stage = own, own.modules, own.last
            with agreed():
                self._parameters = own.parameters()
            with agreed():
                self._feed = own.feed(seed)
                self._generator = (
                    Generator(self.program, own.adapters, own.package, self.groups, self.device)
                    if self.program.mode == GENERATE
                    else None
                )
                self._microbatches = Microbatches(own.adapters, own.casts, self._parameters, self.device, self._scale)
                ran = self._microbatches.torch_stages
                watch(own.named(), ran, self.rank, self.device, self.program.world_size)
                self._places = Places(self.stages, self.device, own.home if "params" in self.program.offload else None)
            self._balances: list[Balance] = []
            self._room = ExpertRoom(self.program, own.package, self.stages, self.device)
            self._branches = Branches(self.program, self.stages, self.device)
            self._gradients = Gradients(self._parameters, self.device)
            self.captured = (
                Captured(self.program, self._parameters, self._gradients, self.device, own.package, self._backend)
                if cuda_graphs
                else None
            )
            self._optimizers = Optimizers(
                self._parameters, self._gradients, self.host, own.package, reports=self.reports
            )
            self.between = (
                None
                if self.program.generates is None
                else BetweenSteps(self.program.generates, self.stages, self._parameters, self.device)
            )
        except AgreedError:
            self.groups.close()
            raise

    @property
    def package(self) -> str:
        """The name under which the emitted package is imported."""
        return self._own.package

    @property
    def data(self) -> Part:
        """The rows and the inputs of a global batch that this rank needs; :meth:`step` and :meth:`infer` take these alone, too."""
        return self._feed.part

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
        self._optimizers.close()
        try:
            self._saver.close()
            if self._snapshots is not None:
                self._snapshots.close()
        finally:
            if self.between is not None:
                self.between.close()
            self.groups.close()

    # Training

    def optimizer(self, lr: float | None = None, make: Callable[..., Any] | None = None) -> torch.optim.Optimizer:
        """Make the model file's ``optimizer``; AdamW where it has none. A collective call.

        The function sees what ``named_parameters()`` of the model gives, in whole shapes, and its optimizer has all of its groups on every
        rank; this rank's parameters are then what is left in them. One that looks at whole parameters, or at all together, where ranks have
        parts of them, has those that this rank owns: :mod:`graphpar.runtime.state.whole_parameters`.

        Args:
            lr: the learning rate of all of its groups; by default its own (of AdamW 1e-3).
            make: in place of the model file's function.

        Raises:
            RuntimeProgramError: on all ranks, if it fails on one, would train other parameters than it was given, needs a closure, or draws
                random numbers, which ranks would draw apart.
        """
        self.synchronize()
        return self._optimizers.make(make, lr)

    def offload(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer that :meth:`optimizer` has not made where the plan has it: in the host's memory, or nowhere else.
        With ``offload=params`` it is there by itself.

        Raises:
            RuntimeProgramError: it may update several parameters together.
        """
        self._optimizers.offload(optimizer)

    def lr_schedule(
        self, optimizer: torch.optim.Optimizer, done: int = 0, make: Callable[[Optimizer], LRScheduler] | None = None
    ) -> LRScheduler:
        """Make the model file's ``lr_schedule(optimizer)``; one that keeps the learning rate where it has none.

        What :meth:`save_checkpoint` saves with the optimizer has its state, and what :meth:`load_checkpoint` loads with the optimizer
        lets it go on, whether it is made before or after.

        Args:
            done: how many steps were made before, of a run that goes on without such a checkpoint.
            make: makes the schedule where the model file has none.

        Raises:
            RuntimeProgramError: on all ranks, if it fails on one; or ``make`` is given, and the model file has a schedule.
        """
        return self._optimizers.lr_schedule(optimizer, done, make)

    @overload
    def step(
        self,
        batch: Any,
        *,
        step: int | None = None,
        broadcast_loss: bool = False,
        accumulate: bool = False,
        losses: Literal[False] = False,
    ) -> Tensor | None: ...

    @overload
    def step(
        self,
        batch: Any,
        *,
        step: int | None = None,
        broadcast_loss: bool = False,
        accumulate: bool = False,
        losses: Literal[True],
    ) -> list[Tensor] | None: ...

    def step(
        self,
        batch: Any,
        *,
        step: int | None = None,
        broadcast_loss: bool = False,
        accumulate: bool = False,
        losses: bool = False,
    ) -> Tensor | list[Tensor] | None:
        """Run forward and backward over the whole global batch; gradients are added to ``.grad``.

        Args:
            batch: inputs and targets by name: all of them, whole, the same on every rank; or of each that ``data.names`` lists
                the rows ``data.rows``. An argument that is a list or mapping of tensors is given as the model takes it, or its
                tensors by their own names. It is a mapping, a dataclass or a named tuple; or a list or tuple of tensors, in the order
                of the inputs, targets last. A sequence of batches is computed one after the other, as if it were one batch that has
                all of them: loss and gradients are this one's, whatever the loss divides by.
            step: number of the step, for the random streams; by default steps are counted.
            broadcast_loss: return the loss on every rank.
            accumulate: keep the gradients where they are computed, without reducing them over ranks, for the next step without it,
                which reduces the sum of all. Until then no optimizer may step and no norm is known. It is the same on all ranks.
            losses: return the losses of the microbatches instead; the same on all ranks. Microbatch ``i`` is that of all replicas. Losses
                are shares, which add up to the loss: a sum is that over the microbatch's examples, a mean that divided by what the whole
                step's mean divides by, such as its number of labels that are not ignored.

        Returns:
            The loss of the global batch (with ``losses`` one of each microbatch of each batch, in order) on the ranks that have the last
            stage, ``None`` elsewhere. In fp16 it may have overflowed in
            the backward: then ``skipped_steps`` counts one more, and every ``.grad`` is what it was before.

        Raises:
            RuntimeProgramError: the batch does not fit the program, or several can't be computed one after the other, or adapters are
                merged, before anything is sent; or a branch on values is not the program's, on all ranks, which then have no gradients;
                or, which is looked at in steps 1, 2, 4, ... 64 and every 64th, ranks differ in the number of the step, in the batch, or
                in parameters that all of them update.
        """
        if self.program.mode != TRAIN:
            raise RuntimeProgramError("the program was emitted for inference: call infer()")
        self._check_weights()
        self._check_unmerged("step")  # adapters that are zero get no gradients of their first factors
        self._places.check()
        at(step=self.steps_done if step is None else step)
        batches = together(self.program, batch, training=True)
        if self._feed.given and is_compared(self._feed.given):
            self._gradients.check_copies()
        self._microbatches.begin()
        found = [
            self._run(program, values, accumulate or place < len(batches), begins=place == 1)
            for place, (program, values) in enumerate(
                self._feed.values(batches, self.steps_done if step is None else step), 1
            )
        ]
        parts = [each for each in found if each is not None]
        loss = (
            torch.cat(parts)
            if parts and losses
            else torch.stack([each.sum() for each in parts]).sum()
            if parts
            else None
        )
        replicas = self.groups["batch"]
        if loss is not None and replicas is not None:
            dist.all_reduce(loss, group=replicas)
        if not accumulate:
            self._check_branches()
        self.steps_done += 1
        if broadcast_loss:
            loss = self._broadcast(loss, [len(batches) * self.program.microbatches] if losses else [])
        return list(loss) if loss is not None and losses else loss

    def _check_branches(self) -> None:
        """Drop the gradients of a step in which a branch on values was another than the program's."""
        try:
            self._branches.check()
        except AgreedError:
            self._drop_gradients()
            raise

    def check_replicas(self) -> None:
        """Compare the parameters and buffers that ranks should hold alike, bit for bit; a collective call, which waits for the device.

        Raises:
            RuntimeProgramError: on all ranks, if one differs; the message names it, the axis and two ranks.
        """
        self.synchronize()
        with agreed():
            check_replicas(self.stages, self.program, self.groups, self._parameters.pieces, self.steps_done)

    def balance(self) -> Balance:
        """Count from now on how rows spread over experts. In compiled blocks, and where steps are to be captured, nothing is counted."""
        counts = self._backend is None and self.captured is None
        self._balances.append(Balance(self.groups, self.package if counts else ""))
        return self._balances[-1]

    def _run(self, program: Manifest, values: Mapping[str, Tensor], accumulate: bool, begins: bool) -> Tensor | None:
        """Forward and backward of a batch, and unless it accumulates the reduction of gradients; returns this replica's losses."""
        captured = self.captured if self.captured is not None and self.captured.takes(accumulate) else None
        if program.steady and not begins:
            captured = None  # which begins a step
        self._parameters.begin_step()
        adds = self.program.fully_sharded and self._gradients.accumulated
        self._gradients.take(accumulate)
        run = functools.partial(self._microbatches.at(program).run, accumulate=accumulate)

        def compute() -> Tensor | None:
            with labels_named(values):
                return run(values) if captured is None else captured.run(run, values)

        def forget() -> None:
            nonlocal captured
            captured = None  # what is captured does not wait
            self._parameters.free()
            self._parameters.drop_gradients()
            self._gradients.again(accumulate)
            for balance in self._balances:
                balance.forget_batch()

        for balance in self._balances:
            balance.begin_batch()
        if adds:  # to gradients that FSDP2 has, and that could not be told from its own
            with self._room.waiting():
                loss = compute()
        else:
            loss = self._room.run(compute, forget)
        self._parameters.free()
        if accumulate:
            self._gradients.keep(self.parameters())
        else:
            finite = self._gradients.finish(self._scale.value)
            if self.program.scales_loss:
                self._scale.update(finite)
        self._parameters.end_step()
        self._places.check_shards("after the backward")
        return loss

    def assert_idle(self) -> None:
        """Check that no step is under way on this rank, as between two steps: nothing is pending, gathered or set aside.

        Raises:
            RuntimeProgramError: a step did not end; the message lists what it left.
        """
        left = [*self._gradients.left(), *self._microbatches.left()]
        for name, stage in self._own.named():
            left += left_in_stage(name, stage)
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

    @property
    def repeated_steps(self) -> int:
        """How many batches were computed again, since a rank had more rows of its experts than ``expert_room`` has room for."""
        return self._room.repeated

    def _broadcast(self, value: Tensor | None, shape: Sequence[int]) -> Tensor:
        dtype = self.program.outputs[0].dtype
        shared = torch.empty(shape, dtype=dtype, device=self.device) if value is None else value
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
        self._drop_gradients()
        self._parameters.send()

    def _drop_gradients(self) -> None:
        self._gradients.drop()
        self._parameters.drop_gradients()
        for parameter in self.parameters():
            parameter.grad = None

    def whole_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages, also where other ranks hold them (ZeRO level 1); a collective call there.

        Raises:
            RuntimeProgramError: the last step was one with ``accumulate``.
        """
        self._gradients.check_reduced("whole_gradients")
        return self._parameters.whole_gradients()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        A collective call. Every element of the model counts once, however many ranks hold it, as on a single device.

        Returns:
            The norm before.

        Raises:
            RuntimeProgramError: the last step was one with ``accumulate``.
        """
        self._gradients.check_reduced("clip_grad_norm_")
        return clip(self._gradients.counted, self.parameters(), max_norm, self.device, self.stop)

    # Inference

    def check_eval(self) -> None:
        """Check that the program can evaluate.

        Raises:
            RuntimeProgramError: the model computes something else in evaluation, which the program does not have.
        """
        if self.program.no_eval is not None:
            raise RuntimeProgramError(self.program.no_eval)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The model file's ``metrics``, for :meth:`eval`.

        Raises:
            RuntimeProgramError: it is no dict of functions.
        """
        found: Any = factory(self.program, self.package, "metrics") or {}
        if not isinstance(found, Mapping) or not all(callable(metric) for metric in found.values()):
            raise RuntimeProgramError(
                "metrics of the model file must be a dict of functions of the outputs and the batch"
            )
        return found

    def eval(
        self,
        batch: Any,
        *,
        outputs: bool | Collection[str] = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> dict[str, Tensor] | None:
        """Run the forward as in ``model.eval()``: no dropout, BatchNorm by its running statistics, which stay as they are.

        Args:
            batch: one, or several that stand for one that has all of them.
            outputs: of a program for training: also return what the model returns, whole; True for all that its loss is computed from,
                or some of it by name. The same on all ranks.
            metrics: of a program for training: also return these, each a function of the model's outputs and the batch, both by name and
                of a replica's rows of one microbatch (see :data:`~graphpar.runtime.stages.model_outputs.Metric`). It runs on the ranks of
                the last stage, so the batch has the inputs and targets that ``data.names`` lists there. The same on all ranks.

        Returns:
            The outputs by name, of the whole global batch (of a program for training the loss), on the ranks of the last stage, else
            ``None``. The loss, the outputs and the metrics of several batches are those of one batch that has all of them.

        Raises:
            RuntimeProgramError: the model computes something else in evaluation, which the program does not have; the batch does
                not fit; or the program does not have an output.
        """
        self.check_eval()
        asked = ModelOutputs(self._own, outputs, metrics or {})
        with evaluating(self.stages):
            return self._forward(batch, self.steps_done, asked)

    def infer(self, batch: Mapping[str, Any], *, step: int | None = None) -> dict[str, Tensor] | None:
        """Run the forward alone, without gradients, and return the outputs by name on the ranks of the last stage, else ``None``.

        They are those of the whole global batch. For a program that was emitted for training this is the loss, in training mode, so buffers
        that the forward writes are written; :meth:`eval` leaves them.
        """
        return self._forward([batch], self.steps_done if step is None else step, ModelOutputs(self._own, False, {}))

    def _forward(self, batch: Any, step: int, asked: ModelOutputs) -> dict[str, Tensor] | None:
        """The outputs of a batch, or the sums of those of several, and what is asked for besides."""
        self._check_weights()
        self.synchronize()
        found: list[dict[str, Tensor] | None] = []
        with torch.no_grad(), asked:
            batches = together(self.program, batch, training=False)
            for program, values in self._feed.values(batches, step, alike=self.program.mode != "train" or asked.joins):
                self._parameters.gather()
                if self._generator is not None:
                    found.append(self._generator.logits(values))
                else:
                    adapters = self._microbatches.at(program).stages
                    found.append(
                        self._room.run(
                            lambda: forward_only(program, adapters, values, self.groups, asked.take),  # noqa: B023  runs now
                            lambda: asked.drop(program.microbatches),  # noqa: B023
                        )
                    )
                self._parameters.free()
        self._branches.check()
        outputs = summed(found)
        return None if outputs is None else outputs | asked.results()
