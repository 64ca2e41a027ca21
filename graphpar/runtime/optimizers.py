"""The optimizer of a program: that of the model file, over the parameters that this rank updates, or AdamW.

    model.named_parameters() ──this rank's own where it has some, else stand-ins──► factory ──stand-ins left out──► optimizer

So the factory sees on every rank what it sees on one device: all names, each parameter once, in whole shapes. What it groups or counts
does not depend on the plan, and all ranks have the same groups.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import names_by_tie, whole_shape

LEARNING_RATE = 1e-3
"""Of AdamW, where the model file has no ``optimizer``."""


@dataclass(frozen=True)
class Described:
    """A parameter as the whole model has it."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def stand_in(self) -> nn.Parameter:
        """Make a parameter like it, without values."""
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.requires_grad)


def describe_model(stages: Sequence[nn.Module], program: Manifest, groups: Groups) -> dict[str, Described]:
    """Describe what ``named_parameters()`` of the model gives: each parameter by its first name, in order; a collective call."""
    tied = names_by_tie(program.ties)
    held = {
        tied.get(name, (name,))[0]: Described(
            torch.Size(whole_shape(program, name, parameter)), parameter.dtype, parameter.requires_grad
        )
        for stage in stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    }
    everyone = {name: each for given in groups.gather("pp", held) for name, each in given.items()}
    order = [name for name in program.parameters if name in everyone] or list(everyone)
    return {name: everyone[name] for name in order}


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
    make: Callable[..., Any] | None,
    own: Mapping[str, Sequence[nn.Parameter]],
    model: Mapping[str, Described],
    lr: float | None = None,
) -> Optimizer:
    """Make the optimizer of this rank. It has all groups that ``make`` gives it, some of them perhaps without parameters.

    Args:
        make: of pairs of names and parameters, the optimizer; ``None``: AdamW.
        own: what this rank updates, by first name: all copies of a parameter, whole, or shards or 1-D slices of it.
        model: all parameters of the model.
        lr: of all groups, in place of what ``make`` gives them.

    Raises:
        RuntimeProgramError: ``make`` fails, returns no optimizer, or has parameters that it was not given.
    """
    pairs = [(name, own[name][0] if name in own else each.stand_in()) for name, each in model.items()]
    with _shown_whole({parameter: model[name].shape for name, parameter in pairs}):
        made = torch.optim.AdamW(pairs, lr=LEARNING_RATE) if make is None else _called(make, pairs)
    _keep(made, {parameter: (name, own.get(name, ())) for name, parameter in pairs})
    for group in made.param_groups if lr is not None else ():
        group["lr"] = lr
    return made


@contextmanager
def _shown_whole(shapes: Mapping[nn.Parameter, torch.Size]) -> Iterator[None]:
    """Let parameters say that they have other shapes, those of the parameters that they are pieces of; their values stay as they are."""
    kinds = {parameter: type(parameter) for parameter, shape in shapes.items() if parameter.shape != shape}
    try:
        for parameter, kind in kinds.items():
            parameter.__class__ = _of_shape(kind, shapes[parameter])
        yield
    finally:
        for parameter, kind in kinds.items():
            parameter.__class__ = kind


def _of_shape(kind: type[nn.Parameter], shape: torch.Size) -> type[nn.Parameter]:
    def size(_: Any, dim: int | None = None) -> Any:
        return shape if dim is None else shape[dim]

    named: dict[str, Any] = {"shape": shape, "ndim": len(shape), "size": size, "__len__": lambda _: shape[0]}
    named |= dict.fromkeys(("dim", "ndimension"), lambda _: len(shape))
    named |= dict.fromkeys(("numel", "nelement"), lambda _: shape.numel())
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(kind.__name__, (kind,), named)
    return made


def _called(make: Callable[..., Any], pairs: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
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


def _keep(made: Optimizer, own: Mapping[nn.Parameter, tuple[str, Sequence[nn.Parameter]]]) -> None:
    """Put into the groups, in place of each parameter that the factory was given, this rank's copies of it, if it has any."""
    for group in made.param_groups:
        kept: list[tuple[str, nn.Parameter]] = []
        for parameter in group["params"]:
            if parameter not in own:
                raise RuntimeProgramError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of those that it was given; "
                    "build it over these, not over those of a model"
                )
            name, copies = own[parameter]
            kept += [(name, each) for each in copies]
            if parameter in made.state:  # of an optimizer that begins with some
                made.state.update({each: copy.deepcopy(made.state[parameter]) for each in copies[1:]})
                if not copies:
                    del made.state[parameter]
        group["params"][:] = [parameter for _, parameter in kept]
        if "param_names" in group:
            group["param_names"] = [name for name, _ in kept]
