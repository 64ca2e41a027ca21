"""The optimizer of a program: that of the model file, over the parameters that this rank updates, or AdamW.

optimizer.py: optimizer([(name, parameter), ...]) -> torch.optim.Optimizer     lr_schedule(optimizer) -> a scheduler

Names are the user's on every rank; shapes are those of what the rank holds, so groups go by names.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest

LEARNING_RATE = 1e-3
"""Of AdamW, where the model file has no ``optimizer``."""

Named = Sequence[tuple[str, nn.Parameter]]


def factory(program: Manifest, package: str, name: str) -> Callable[..., Any] | None:
    """Return ``optimizer`` or ``lr_schedule`` of the model file; ``None`` where it has none.

    Raises:
        RuntimeProgramError: ``optimizer.py`` can't be imported.
    """
    if not (program.folder / "optimizer.py").is_file():
        return None
    try:
        module = importlib.import_module(f"{package}.optimizer")
    except Exception as error:
        raise RuntimeProgramError(
            f"{program.folder / 'optimizer.py'} can't be imported: {type(error).__name__}: {error}"
        ) from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    return found


def build_optimizer(
    make: Callable[..., Any] | None, named: Named, whole: Mapping[str, torch.Size], lr: float | None
) -> Optimizer:
    """Make the optimizer of this rank.

    Args:
        make: of pairs of names and parameters, the optimizer; ``None``: AdamW.
        whole: the shapes of the parameters of which ``named`` has 1-D slices.
        lr: of all groups, in place of what ``make`` gives them.

    Raises:
        RuntimeProgramError: ``make`` fails, returns no optimizer, has parameters that are not in ``named``, or puts slices of
            parameters into other groups than it would put the parameters.
    """
    pairs = list(named) or [("", nn.Parameter(torch.empty(0)))]  # a rank without parameters: optimizers want one
    if make is None:
        return torch.optim.AdamW(pairs, lr=LEARNING_RATE if lr is None else lr)
    made = _called(make, pairs)
    groups = _groups(made, pairs)
    if any(name in whole for name, _ in pairs):
        shaped = [(n, nn.Parameter(torch.empty(whole.get(n, p.shape), device="meta"))) for n, p in pairs]
        meant = _groups(_called(make, shaped), shaped)
        moved = next((name for name in meant if meant[name] != groups.get(name)), None)
        if moved is not None:
            raise RuntimeProgramError(
                f"optimizer of the model file groups parameters by their shapes, but this rank updates a 1-D slice of {moved}; "
                "group by names"
            )
    for group in made.param_groups if lr is not None else ():
        group["lr"] = lr
    return made


def _called(make: Callable[..., Any], pairs: Named) -> Optimizer:
    try:
        made = make(list(pairs))
    except Exception as error:
        raise RuntimeProgramError(
            f"optimizer of the model file failed on pairs of names and parameters: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise RuntimeProgramError(
            f"optimizer of the model file returned a {type(made).__name__}, not a torch.optim.Optimizer"
        )
    return made


def _groups(made: Optimizer, pairs: Named) -> dict[str, dict[str, Any]]:
    """The options of each parameter, by name."""
    names = {parameter: name for name, parameter in pairs}
    found: dict[str, dict[str, Any]] = {}
    for group in made.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for parameter in group["params"]:
            if parameter not in names:
                raise RuntimeProgramError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of pipeline.named_parameters(); "
                    "build it over these, not over those of a model"
                )
            found[names[parameter]] = options
    return found


def build_lr_schedule(make: Callable[..., Any] | None, optimizer: Optimizer, done: int = 0) -> LRScheduler:
    """Make the learning rate's schedule as it is after ``done`` steps; one that changes nothing where ``make`` is ``None``.

    Args:
        optimizer: where steps are done already, its groups have the rates of the last one, and the first in ``initial_lr``.

    Raises:
        RuntimeProgramError: ``make`` fails, or returns none, or one whose steps need a metric.
    """
    for group in optimizer.param_groups if done else ():
        group["lr"] = group.get("initial_lr", group["lr"])
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
            "on the number of steps alone, or step your own in the loop"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no step
        for _ in range(done):
            made.step()
    return made
