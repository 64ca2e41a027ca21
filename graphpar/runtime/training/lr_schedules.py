"""The learning rate's schedule of a program, and how it goes on after a restart.

    checkpoint.json    "schedule": {"kind": ..., "groups": ..., "begun": ..., "state": ...}
                       its class, the optimizer's hyperparameters before it was made, its own state then and when it was saved

Its constructor changes hyperparameters (OneCycleLR the initial rates, too), so it is made again on those that it was made on. If it then
has the state that it had at its beginning, it takes the saved one; if not, it is another schedule now, which makes as many steps.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from graphpar.runtime.checkpoints.saved_state import give_group, hyperparameters_of
from graphpar.runtime.errors import RuntimeProgramError

CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""What a schedule keeps that is not state: a new one has it, too."""


@dataclass(frozen=True)
class Schedule:
    """A schedule that was made, by what a checkpoint needs to make it again."""

    kind: str
    groups: Sequence[Mapping[str, Any]]
    begun: Any
    made: weakref.ref[LRScheduler]  # which refers to its optimizer

    def is_of(self, saved: Mapping[str, Any]) -> bool:
        """Whether it began as the one that a checkpoint has."""
        return (self.kind, self.begun) == (saved["kind"], saved["begun"])

    def record(self) -> dict[str, Any] | None:
        """Describe it as it is now, in JSON's values; ``None`` where it is no more."""
        made = self.made()
        if made is None:
            return None
        return {"kind": self.kind, "groups": self.groups, "begun": self.begun, "state": _encoded(made.state_dict())}


def build_lr_schedule(
    make: Callable[..., Any] | None,
    optimizer: Optimizer,
    done: int = 0,
    saved: Mapping[str, Any] | None = None,
    into: LRScheduler | None = None,
) -> tuple[LRScheduler, Schedule]:
    """Make the learning rate's schedule as it is after ``done`` steps; one that changes nothing where ``make`` is ``None``.

    Args:
        optimizer: where steps are done already, its groups have the rates of the last one, and the first in ``initial_lr``.
        saved: what a checkpoint has of the schedule; then the optimizer has what it has of the optimizer.
        into: give this schedule the state, and return it.

    Raises:
        RuntimeProgramError: ``make`` fails, or returns none, or one whose steps need a metric; or where it is after ``done`` steps can't
            be told.
    """
    loaded = hyperparameters_of(optimizer)
    if saved is not None:
        if len(saved["groups"]) != len(loaded):
            raise RuntimeProgramError(
                f"the schedule was saved with {len(saved['groups'])} groups of the optimizer, which has {len(loaded)} now; "
                "use the same groups"
            )
        _give(optimizer, saved["groups"])
    else:
        for group in optimizer.param_groups if done else ():
            group["lr"] = group.get("initial_lr", group["lr"])
    groups = hyperparameters_of(optimizer)
    made = _made(make, optimizer)
    state = made.state_dict()
    schedule = Schedule(type(made).__name__, groups, _encoded(state), weakref.ref(made if into is None else into))
    if saved is not None and schedule.is_of(saved):
        made.load_state_dict(_decoded(saved["state"], state))
        _give(optimizer, loaded)
    else:
        if saved is not None:
            done = saved["state"].get("last_epoch", done)
        elif done and any(
            group["initial_lr"] != old.get("initial_lr", group["initial_lr"])
            for group, old in zip(optimizer.param_groups, loaded)
        ):
            raise RuntimeProgramError(
                f"{schedule.kind} sets the initial learning rate from the present one, so {done} steps can't be repeated without its own "
                "state, which the checkpoint lacks: save with the optimizer that was passed to pipeline.lr_schedule"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has made no step
            for _ in range(done):
                made.step()
    if into is not None:
        into.load_state_dict(_decoded(_encoded(made.state_dict()), state))
    return into or made, schedule


def _made(make: Callable[..., Any] | None, optimizer: Optimizer) -> LRScheduler:
    if make is None:
        return LambdaLR(optimizer, lambda step: 1.0)
    try:
        made = make(optimizer)
    except Exception as error:
        raise RuntimeProgramError(f"lr_schedule of the model file failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, LRScheduler):
        raise RuntimeProgramError(
            f"lr_schedule of the model file returned a {type(made).__name__}, not a torch.optim.lr_scheduler.LRScheduler"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise RuntimeProgramError(
            "lr_schedule of the model file returned a ReduceLROnPlateau, which needs a metric at each step; return a schedule that depends "
            "on the number of steps alone, or step your own in the loop, and keep its state_dict() in save_checkpoint's data"
        )
    return made


def _give(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Let the groups have these hyperparameters, and no others."""
    for group, values, own in zip(optimizer.param_groups, groups, hyperparameters_of(optimizer), strict=True):
        for key in own.keys() - values.keys():
            del group[key]
        give_group(group, values)


def _encoded(value: Any, what: str = "state") -> Any:
    """Return a schedule's state as JSON has it; :func:`_decoded` needs the state of such a schedule to read it.

    Raises:
        RuntimeProgramError: it has something else than numbers, text, and collections of them.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, LRScheduler):  # that another one goes on with
        return _encoded(value.state_dict(), what)
    if isinstance(value, dict):
        items = [[key, _encoded(each, str(key))] for key, each in value.items()]
        return dict(items) if all(isinstance(key, str) for key in value) else items
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [_encoded(each, what) for each in value]
    if isinstance(value, CODE):
        return None
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        return value.item()
    raise RuntimeProgramError(f"the schedule's {what} is a {type(value).__name__}, which a checkpoint can't hold")


def _decoded(value: Any, like: Any) -> Any:
    """Return what was encoded, in the types of ``like``."""
    if isinstance(like, CODE):
        return like
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    if isinstance(like, LRScheduler):
        like.load_state_dict(_decoded(value, like.state_dict()))
        return like
    if isinstance(like, dict):
        made = like.copy()
        made.clear()
        for key, each in value.items() if isinstance(value, dict) else value:
            made[key] = _decoded(each, like.get(key))
        return made
    if isinstance(like, list | tuple | deque | set | frozenset) and isinstance(value, list):
        old = [*like, *[None] * len(value)]
        return type(like)(_decoded(each, before) for each, before in zip(value, old))
    return value
