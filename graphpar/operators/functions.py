"""Trace custom autograd functions as operators: a plain trace would go into ``forward`` and lose ``backward``.

    Scaled.apply(x, 2.0) ──while tracing──► graphpar_functions::Scaled.0(x, 2.0)     one operator in the graph, with its backward
                         ◄──emitted code──                                            Scaled.apply(x, 2.0), as the user wrote it

The operator runs the class's forward. Its backward applies the class again to detached operands and asks torch for their
gradients, which keeps everything that a class may store in its ``ctx``. That costs a second forward, but only where graphpar
itself runs the operator (in trials of how it can be sharded).
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphpar.errors import GraphparError
from graphpar.ir.program import FUNCTION_OPERATORS, memory_of

_INSTEAD = (
    "Or register it as an operator: torch.library.custom_op for the forward, and register_autograd for the backward."
)


@dataclass(frozen=True)
class FunctionOperator:
    """An ``autograd.Function`` as an operator, for one kind of arguments.

    Attributes:
        kinds: the type of each argument in the operator's schema.
        tuples: positions of arguments that are tuples (schemas have lists only).
        results: how many tensors it returns.
        alone: the class returns a tuple of one tensor.
    """

    function: type
    kinds: tuple[str, ...]
    tuples: tuple[int, ...]
    results: int
    alone: bool

    def given(self, arguments: Sequence[Any]) -> list[Any]:
        """Convert the operator's arguments to those of the class."""
        return [tuple(item) if index in self.tuples else item for index, item in enumerate(arguments)]

    def run(self, *arguments: Any) -> Any:
        """Run the forward: the operator's implementation."""
        made = plain_apply(self.function, *self.given(arguments))
        results = made if isinstance(made, tuple) else (made,)
        memory = {memory_of(item) for item in arguments if isinstance(item, Tensor)}
        own = []
        for result in results:  # an operator's results share no memory, a function's may: x.view_as(x)
            own.append(result.clone() if memory_of(result) in memory else result)
            memory.add(memory_of(own[-1]))
        return own[0] if self.results == 1 else tuple(own)

    def remember(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Save the inputs for the backward: the operator's ``setup_context``."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(item for item in inputs if isinstance(item, Tensor)))
        ctx.others = [None if isinstance(item, Tensor) else item for item in inputs]

    def backward(self, ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the gradients of the inputs by applying the class again."""
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if kind == "Tensor" else item for kind, item in zip(self.kinds, ctx.others)]
        required = [index for index, needed in enumerate(ctx.needs_input_grad) if needed]
        for index, kind in enumerate(self.kinds):
            if kind == "Tensor":
                arguments[index] = arguments[index].detach().requires_grad_(index in required)
        with torch.enable_grad():
            made = plain_apply(self.function, *self.given(arguments))
        results = made if isinstance(made, tuple) else (made,)
        pairs = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
        found: list[Tensor | None] = [None] * len(arguments)
        if pairs:
            outputs, given = zip(*pairs)
            leaves = [arguments[index] for index in required]
            for index, gradient in zip(required, torch.autograd.grad(outputs, leaves, given, allow_unused=True)):
                found[index] = gradient
        return tuple(found)


OPERATORS: dict[Any, FunctionOperator] = {}
"""By the operator's overload: the function that it stands for."""
_targets: dict[FunctionOperator, Any] = {}
_library = torch.library.Library(FUNCTION_OPERATORS, "FRAGMENT")


def plain_apply(function: type, *arguments: Any, **options: Any) -> Any:
    """Call torch's own ``function.apply``, which is replaced while a model is traced."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)(*arguments, **options)


def function_name(function: type) -> str:
    """Return ``module.Class``."""
    return f"{function.__module__}.{function.__qualname__}"


def names_of(function: type) -> tuple[str, ...]:
    """List the names under which a rule of ``function`` may be registered: for a model file also by the file's name."""
    stem = Path(getattr(sys.modules.get(function.__module__), "__file__", None) or "").stem
    return (function_name(function), *((f"{stem}.{function.__qualname__}",) if stem else ()))


def refusal(function: type, why: str, advice: str = "") -> GraphparError:
    """Make the error for a custom function that can't be an operator."""
    return GraphparError(f"The custom autograd.Function {function_name(function)} {why}. {advice}{_INSTEAD}")


def opaque_apply(function: type, arguments: Sequence[Any]) -> Any:
    """Call ``function.apply(*arguments)`` as one operator of the trace."""
    kinds = tuple(_argument_kind(function, index, item) for index, item in enumerate(arguments))
    results, differentiable, alone = _tried(function, arguments)
    tuples = tuple(index for index, item in enumerate(arguments) if isinstance(item, tuple))
    target = _operator(FunctionOperator(function, kinds, tuples, results, alone))
    made = target(*arguments)
    parts = made if isinstance(made, tuple) else (made,)
    # Results that the class marks as non-differentiable, and integers, carry no gradient in the graph either.
    kept = [p if d or not p.is_floating_point() else p.detach() for p, d in zip(parts, differentiable)]
    return kept[0] if results == 1 and not alone else tuple(kept)


def _operator(made: FunctionOperator) -> Any:
    if made not in _targets:
        arguments = ", ".join(f"{kind} a{index}" for index, kind in enumerate(made.kinds))
        results = "Tensor" if made.results == 1 else f"({', '.join(['Tensor'] * made.results)})"
        name = re.sub(r"\W+", "_", made.function.__qualname__)
        overload = f"{len(_targets)}"
        _library.define(f"{name}.v{overload}({arguments}) -> {results}")
        _library.impl(f"{name}.v{overload}", made.run, "CompositeExplicitAutograd")
        qualified = f"{FUNCTION_OPERATORS}::{name}.v{overload}"
        torch.library.register_fake(qualified, made.run, lib=_library)
        torch.library.register_autograd(qualified, made.backward, setup_context=made.remember, lib=_library)
        _targets[made] = getattr(getattr(getattr(torch.ops, FUNCTION_OPERATORS), name), f"v{overload}")
        OPERATORS[_targets[made]] = made
    return _targets[made]


_KINDS: dict[type, str] = {
    bool: "bool",
    int: "SymInt",
    torch.SymInt: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}


def _argument_kind(function: type, index: int, item: Any) -> str:
    if isinstance(item, Tensor):
        return "Tensor"
    if item is None:
        return "Tensor?"
    if type(item) in _KINDS:
        return _KINDS[type(item)]
    if isinstance(item, list | tuple):
        kinds = {_KINDS.get(type(part)) for part in item}
        if not kinds or (len(kinds) == 1 and kinds <= {"SymInt", "float", "bool", "str"}):
            return f"{(kinds or {'SymInt'}).pop()}[]"
    what = f"a {type(item).__name__}" + (" of other things than numbers" if isinstance(item, list | tuple) else "")
    raise refusal(
        function,
        f"is given {what} as its argument {index}, which emitted code can't write down",
        "Pass tensors, numbers, strings, dtypes and lists of numbers. ",
    )


# ---- a trial run of a function ---------------------------------------------------------------------------------


class _Watched(TorchDispatchMode):
    """Records operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.random: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.append(str(func))
        return func(*args, **(kwargs or {}))


def _tried(function: type, arguments: Sequence[Any]) -> tuple[int, list[bool], bool]:
    """How many tensors ``function`` returns, which carry a gradient, and whether it returns a tuple of one."""
    modes = [item.fake_mode for item in arguments if isinstance(item, FakeTensor)]
    with _disable_current_modes(), torch.enable_grad():
        given = [_fresh(item) if isinstance(item, Tensor) else item for item in arguments]
        versions = [item._version for item in given if isinstance(item, Tensor)]
        with _Watched() as watched, modes[0] if modes else contextlib.nullcontext():
            made = plain_apply(function, *given)
        written = versions != [item._version for item in given if isinstance(item, Tensor)]
    results = made if isinstance(made, tuple) else (made,)
    if any(not isinstance(result, Tensor) for result in results) or not results:
        raise refusal(function, "returns something other than tensors", "Return a tensor, or a tuple of tensors. ")
    if written:
        raise refusal(function, "writes its argument in place (mark_dirty)", "Let it return a new tensor. ")
    if watched.random:
        raise refusal(
            function,
            f"draws random numbers ({watched.random[0]}), which would differ from one mesh to another",
            "Draw them outside with F.dropout. ",
        )
    return len(results), [result.requires_grad for result in results], isinstance(made, tuple) and len(made) == 1


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor like ``tensor`` that carries a gradient and is not a leaf (a leaf may not be written in place)."""
    fresh = tensor.detach()
    return fresh.requires_grad_().clone() if fresh.is_floating_point() or fresh.is_complex() else fresh.clone()
