"""The optimizers of a pipeline, and what it keeps beside each of them.

make ──► what it looks at (``optimizer_scope``) ──► over what this rank updates, or over whole parameters that it owns
     ──► its state in the memory of the host, where the plan has it ──► known to the check of other optimizers
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphpar.runtime.checkpoints.saved_state import State
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.gradients import Gradients
from graphpar.runtime.state.host import Host
from graphpar.runtime.state.offloaded_state import OffloadedState
from graphpar.runtime.state.optimizer_scope import (
    ELEMENTWISE,
    Found,
    Scope,
    look,
    made_again,
    unsaved,
)
from graphpar.runtime.state.optimizers import (
    FUSED,
    Described,
    OtherOptimizers,
    build_optimizer,
    describe_model,
    factory,
)
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.whole_parameters import WholeParameters, dividing_axes
from graphpar.runtime.training.lr_schedules import Schedule, build_lr_schedule


@dataclass
class _Beside:
    """What a pipeline keeps beside an optimizer."""

    offloaded: OffloadedState | None = None
    whole: WholeParameters | None = None
    schedule: Schedule | Mapping[str, Any] | None = None  # as a checkpoint has it until it is made
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None  # in place of one of the model file, which has none
    made_by: tuple[Callable[..., Any], Mapping[str, Described]] | None = None  # with what it was given
    goes_on: bool = False  # whether it was found to go on from a checkpoint


class Optimizers:
    """Makes and knows the optimizers of a pipeline.

    Args:
        host: where the state of optimizers lives; None: on the device.
        reports: whether this rank prints what all ranks know.
    """

    def __init__(
        self, parameters: Replicated, gradients: Gradients, host: Host | None, package: str, *, reports: bool
    ) -> None:
        self._parameters, self._gradients, self._device = parameters, gradients, gradients.device
        self._host, self._package, self._reports = host, package, reports
        self._nothing = nn.Parameter(torch.empty(0, device=self._device))
        self._beside: weakref.WeakKeyDictionary[Optimizer, _Beside] = weakref.WeakKeyDictionary()
        own = (parameter for _, parameter in self.named_parameters())
        self._others = OtherOptimizers(parameters.stages, own, parameters.program, self._look_at)

    def close(self) -> None:
        """Look at no more optimizers."""
        self._others.close()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank updates; where none of it is trained, an empty parameter that is follows."""
        own = [(name, copy) for name, copies in self._parameters.updated.items() for copy in copies]
        yield from own
        if not any(copy.requires_grad for _, copy in own):
            yield "", self._nothing

    def state(self, optimizer: Optimizer | None) -> State:
        """Return what a checkpoint holds, with an optimizer's state."""
        if optimizer is None:
            return State(self._parameters)
        beside = self._beside.get(optimizer, _Beside())
        owned = ({}, ()) if beside.whole is None else (beside.whole.parameters, beside.whole.axes)
        return State(self._parameters, optimizer, beside.offloaded, *owned)

    # Making

    def make(self, make: Callable[..., Any] | None, lr: float | None) -> Optimizer:
        """Do what :meth:`Pipeline.optimizer` says, once parameters have settled."""
        program, own = self._parameters.program, self._parameters.updated
        model = describe_model(self._parameters.stages, program, self._parameters.groups)
        with agreed():
            make = make or factory(program, self._package, "optimizer")
            scope = Scope.ELEMENT
            if make is not None and program.world_size > 1:
                found = self._found(make, model)
                found.check_ranks(program.zero)
                scope = found.scope
        if program.zero > 1:
            scope = max(gather_objects(scope))  # a rank may store no DTensor
        axes = dividing_axes(program, scope)
        whole = WholeParameters(own, axes, scope, self.state(None), self._device) if axes else None
        with agreed():
            made = build_optimizer(make, own if whole is None else whole.stepped, model, lr)
            self.offload(made)
            if whole is not None:
                whole.wrap(made, self._gradients.check_reduced)
                self._of(made).whole = whole
            self._others.know(made)
            self._of(made).made_by = None if make is None else (make, model)
            return made

    def check_goes_on(self, optimizer: Optimizer | None) -> None:
        """Check that a checkpoint has all that later steps of an optimizer depend on; a collective call.

        Raises:
            AgreedError: the optimizer keeps more than that.
        """
        if optimizer is None or (beside := self._of(optimizer)).goes_on:
            return
        with agreed():
            why = None
            with suppress(RuntimeProgramError):  # it is made of something else, or needs a closure, which is the loop's
                if not type(optimizer).__module__.startswith("torch.optim."):
                    make, model = beside.made_by or self._by_hand(optimizer)
                    why = unsaved(make, model, self._device)
            if why is not None:
                raise RuntimeProgramError(why)
        beside.goes_on = True  # on all ranks, which would else wait for each other

    def offload(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer in the host's memory, where the plan has it there.

        Raises:
            RuntimeProgramError: it may update several parameters together.
        """
        if self._host is not None and "optimizer" in self._parameters.program.offload:
            beside = self._of(optimizer)
            if beside.offloaded is None:
                beside.offloaded = OffloadedState(optimizer, self._host)

    def _of(self, optimizer: Optimizer) -> _Beside:
        return self._beside.setdefault(optimizer, _Beside())

    def _found(self, make: Callable[..., Any], model: Mapping[str, Described]) -> Found:
        program = self._parameters.program
        stored = (copy for copies in self._parameters.updated.values() for copy in copies if isinstance(copy, DTensor))
        flat = program.zero == 1 and not program.owners
        return look(make, model, flat=flat, sharded=next(stored, None), device=self._device)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Check that an optimizer that was made over :meth:`named_parameters` by hand may step what this rank stores.

        Raises:
            RuntimeProgramError: it looks at more.
        """
        kind, program = type(optimizer), self._parameters.program
        plain = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
        if kind.__name__ not in FUSED:  # DTensors may have no rule for what others fuse
            plain &= not any(group.get("fused") for group in optimizer.param_groups)
        if plain or not dividing_axes(program, Scope.ALL):
            return
        try:
            found = self._found(*self._by_hand(optimizer))
        except RuntimeProgramError:
            return  # it is made of something else, or needs a closure, which is the loop's
        found.check_ranks(program.zero)
        if found.tried and dividing_axes(program, found.scope):
            what = "all parameters together" if found.scope is Scope.ALL else "whole parameters"
            raise RuntimeProgramError(
                f"the step of {kind.__name__} needs {what}, and this rank stores parts of them; make it by "
                "pipeline.optimizer(make=...), with a function of pairs of names and parameters, so that it has them"
            )

    def _by_hand(self, optimizer: Optimizer) -> tuple[Callable[[Any], Optimizer], dict[str, Described]]:
        """Return what makes an optimizer again that was made over :meth:`named_parameters` by hand, and of which parameters."""
        state, own = self.state(None), self._parameters.updated
        model = {
            name: Described(
                torch.Size(state.of_parameter(copies[0], "", copies[0]).shape), copies[0].dtype, copies[0].requires_grad
            )
            for name, copies in own.items()
        }
        return made_again(optimizer, {copies[0]: name for name, copies in own.items()}), model

    # The learning rate

    def lr_schedule(
        self,
        optimizer: Optimizer,
        done: int,
        make: Callable[[Optimizer], LRScheduler] | None = None,
        made: LRScheduler | None = None,
    ) -> LRScheduler:
        """Make a schedule where the optimizer's checkpoint says, or let ``made`` be there; a collective call.

        Args:
            done: how many steps were made before, where no checkpoint says.
            make: makes it where the model file has none.
        """
        with agreed():
            own, beside = factory(self._parameters.program, self._package, "lr_schedule"), self._of(optimizer)
            if own is not None and make is not None:
                raise RuntimeProgramError(
                    "the model file has an lr_schedule, and a second one would undo what it sets: leave --schedule and --warmup out, or "
                    "compile without lr_schedule"
                )
            beside.make_schedule = make or beside.make_schedule
            make = own or beside.make_schedule
            saved = None if isinstance(beside.schedule, Schedule) else beside.schedule
            made, schedule = build_lr_schedule(make, optimizer, done, saved, made)
            beside.schedule = schedule
            if saved is not None and not schedule.is_of(saved) and self._reports:
                print("lr_schedule: not that of the checkpoint, so it starts over and makes as many steps", flush=True)
            return made

    def loaded(self, optimizer: Optimizer, schedule: Mapping[str, Any], step: int) -> None:
        """Take the schedule of a checkpoint of ``step``; one that was made already goes on from there. A collective call then."""
        beside = self._of(optimizer)
        made = beside.schedule.made() if isinstance(beside.schedule, Schedule) else None
        beside.schedule = schedule
        if made is not None:
            self.lr_schedule(optimizer, step, made=made)

    def schedule_of(self, optimizer: Optimizer | None) -> Mapping[str, Any] | None:
        """Describe the schedule of an optimizer: that which was made, or else that of its checkpoint."""
        found = None if optimizer is None else self._beside.get(optimizer, _Beside()).schedule
        return found.record() if isinstance(found, Schedule) else found

    def rates(self, optimizer: Optimizer | None) -> str:
        """Return the learning rates with which an optimizer began."""
        schedule = self.schedule_of(optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        rates = [float(group["lr"]) for group in (groups if schedule is None else schedule["groups"])]
        return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
