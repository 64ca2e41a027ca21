"""The optimizer of a program: that of the model file, over the parameters that this rank updates, or AdamW.

    model.named_parameters() ──this rank's own where it has some, else stand-ins──► factory ──stand-ins left out──► optimizer

So the factory sees on every rank what it sees on one device: all names, each parameter once, in whole shapes. What it groups or counts
does not depend on the plan, and all ranks have the same groups.

An optimizer of the model on one device would step without an error and change nothing: a hook on all optimizers of the process looks at
each. One whose parameters the program updates is known after its first step, and another one costs a look at its gradients.
"""

from __future__ import annotations

import copy
import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from graphpar.runtime.checkpoints.weights import names_by_tie, whole_shape
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.modules import of_all_stages

LEARNING_RATE = 1e-3
"""Of AdamW, where the model file has no ``optimizer``."""
FUSED, FUSED_ON = ("Adam", "AdamW"), ("cuda",)
"""torch's optimizers that are fused where the model file does not say how, and the kinds of device on which they are. Its others take
``foreach`` by themselves on a GPU, which has one more copy of what it updates during a step (torch.optim's documentation)."""


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

    def describe(stages: Sequence[nn.Module]) -> dict[str, Described]:
        return {
            tied.get(name, (name,))[0]: Described(
                torch.Size(whole_shape(program, name, parameter)),
                parameter.grad_dtype or parameter.dtype,
                parameter.requires_grad,
            )
            for stage in stages
            for name, parameter in stage.named_parameters(remove_duplicate=False)
        }

    given = of_all_stages(describe, stages, program, groups)
    everyone = {name: each for held in given for name, each in held.items()}
    order = [name for name in program.parameters if name in everyone] or list(everyone)
    return {name: everyone[name] for name in order}


def factory(program: Manifest, package: str, name: str) -> Callable[..., Any] | None:
    """Return ``optimizer``, ``lr_schedule`` or ``metrics`` of the model file; ``None`` where it has none.

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
        made = torch.optim.AdamW(pairs, lr=LEARNING_RATE) if make is None else made_by(make, pairs)
    _keep(made, {parameter: (name, own.get(name, ())) for name, parameter in pairs})
    _fuse(made)
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


class Named(list[tuple[str, nn.Parameter]]):
    """Pairs of names and parameters, as the ``self`` of a model's ``configure_optimizers`` that asks for no more than its parameters."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the pairs."""
        return iter(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters."""
        return (parameter for _, parameter in self)


def made_by(make: Callable[..., Any], pairs: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimizer that a model file's ``optimizer`` makes, also as Lightning's ``configure_optimizers`` returns it.

    Raises:
        RuntimeProgramError: it fails, or returns something else than one optimizer.
    """
    try:
        made = make(Named(pairs))
    except Exception as error:
        raise RuntimeProgramError(
            f"optimizer of the model file failed on pairs of names and parameters: {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):
        made = {"optimizer": made[0], **({"lr_scheduler": made[1]} if made[1] else {})}
    if isinstance(made, Mapping) and "optimizer" in made:
        if made.get("lr_scheduler") is not None:
            raise RuntimeProgramError(
                "optimizer of the model file returned a learning-rate scheduler, too; return the optimizer alone, and make the "
                "scheduler in a function lr_schedule(optimizer), which is stepped after each step"
            )
        made = made["optimizer"]
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
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
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that it did not receive; build it over "
                    "the parameters passed to it, not over those of a model"
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


def _fuse(made: Optimizer) -> None:
    """Have torch's own :data:`FUSED` optimizers update all parameters on a GPU in a few kernels."""
    for group in made.param_groups if type(made) in [getattr(torch.optim, name) for name in FUSED] else ():
        unsaid = group["fused"] is None and group["foreach"] is None and not group["differentiable"]
        if unsaid and group["params"] and all(each.device.type in FUSED_ON for each in group["params"]):
            group["fused"] = True


class OtherOptimizers:
    """Refuses the steps of optimizers that would not train one program, until it is closed.

    Args:
        parameters: those that this rank updates.
        look: raises where an optimizer that was made over them by hand needs more of them.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        parameters: Iterable[nn.Parameter],
        program: Manifest,
        look: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self._look = look
        # By identity, and not weakly: torch moves no module to which there are weak references.
        self._own = {id(parameter): parameter for parameter in parameters}
        self._inner: dict[
            int, tuple[nn.Parameter, str]
        ] = {}  # what the stages compute with, where this rank updates pieces
        shapes: dict[Tensor, torch.Size] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                shapes[parameter] = torch.Size(whole_shape(program, name, parameter))
                if id(parameter) not in self._own and parameter.requires_grad:
                    self._inner[id(parameter)] = parameter, name
        self._shapes = Counter(shapes.values())
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        known = weakref.ref(self)

        def check(optimizer: Optimizer, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            if (others := known()) is not None:
                others._check(optimizer, closure=any(map(callable, (*args, *given.values()))))

        self._handle = register_optimizer_step_pre_hook(check)
        _LIVE.add(self)

    def know(self, optimizer: Optimizer) -> None:
        """Note an optimizer that trains the program."""
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._known[optimizer] = len(given)
        self._own |= {id(parameter): parameter for parameter in given}

    def close(self) -> None:
        """Look at no more optimizers."""
        self._handle.remove()
        _LIVE.discard(self)

    def _check(self, optimizer: Optimizer, closure: bool) -> None:
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._known.get(optimizer) == len(given):
            return
        inner = next((self._inner[id(parameter)] for parameter in given if id(parameter) in self._inner), None)
        if inner is not None:
            raise _error(f"has {inner[1]}, of which this rank updates a piece")
        if any(id(parameter) in each._own for each in _LIVE for parameter in given):
            if any(id(parameter) in self._own for parameter in given):
                self._look(optimizer)
            self._known[optimizer] = len(given)
        elif not closure and all(parameter.grad is None for parameter in given) and self._is_for(given):
            raise _error("has none of this program's parameters, but some of their shapes and without gradients,")

    def _is_for(self, given: Sequence[Tensor]) -> bool:
        """Whether gradients wait for a step, and ``given`` look like the model's parameters: all of them, or at least half."""
        shapes = Counter(parameter.shape for parameter in given)
        common, own = (shapes & self._shapes).total(), self._shapes.total()
        alike = common == min(own, len(given)) and 2 * common >= own > 0
        return alike and any(parameter.grad is not None for parameter in self._own.values())


_LIVE: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()
"""Those of all programs of this process: the optimizer of one program is no error in another one."""


def _error(what: str) -> RuntimeProgramError:
    return RuntimeProgramError(
        f"an optimizer that {what} would change nothing; build it over pipeline.named_parameters()"
    )
