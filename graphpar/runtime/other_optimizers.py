"""Refuse optimizers that were meant for a program and would not train it: those of its model on one device, above all.

Such an optimizer steps without an error and changes nothing. A hook on all optimizers of the process looks at each: one whose parameters
the program updates is known after its first step, and another one costs a look at its gradients.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import whole_shape


class OtherOptimizers:
    """Refuses the steps of optimizers that would not train one program, until it is closed.

    Args:
        parameters: gives those that this rank updates.
        look: raises where an optimizer that was made over them by hand needs more of them.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        parameters: Callable[[], Iterable[nn.Parameter]],
        program: Manifest,
        look: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self._look = look
        # By identity, and not weakly: torch moves no module to which there are weak references.
        self._own = {id(parameter): parameter for parameter in parameters()}
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
