"""A program that was written for float32 (or less), run in float64: a difference that remains is not rounding.

    with in_double():                       torch.empty(4, dtype=torch.float32)   ──►  float64
        pipeline = Pipeline(folder)         hidden.to(torch.bfloat16)             ──►  float64
        pipeline.step(batch)                rows / 2 (of integers)                ──►  float64, the default dtype

Every call of torch that names a floating dtype, or takes a tensor of one, gets float64 instead. So the program's text
runs unchanged, with its casts. Tensors of Python's numbers are rounded first, as the trace has them: torch.tensor([0.1]) is 0.1 in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from graphpar.runtime.torch_versions import CHECKPOINTS

WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = (Tensor.float, Tensor.bfloat16, Tensor.half)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


@contextmanager
def in_double(shown: torch.dtype | None = None) -> Iterator[None]:
    """Compute everything inside in float64.

    Args:
        shown: what ``tensor.dtype`` says of a float64 tensor. A model that asks (for ``torch.finfo(x.dtype).eps``) then gets the
            number that its trace has.
    """
    before, region = torch.get_default_dtype(), getattr(torch.utils.checkpoint, CHECKPOINTS)

    def again(function: Any, *args: Any, **kwargs: Any) -> Any:
        """A region of ``torch.utils.checkpoint``, which the backward runs again outside of every function mode."""

        def doubled_again(*args: Any, **kwargs: Any) -> Any:
            with _InDouble(shown, before):
                return function(*args, **kwargs)

        return region(doubled_again, *args, **kwargs)

    torch.set_default_dtype(torch.float64)
    setattr(torch.utils.checkpoint, CHECKPOINTS, again)
    try:
        with _InDouble(shown, before):
            yield
    finally:
        torch.set_default_dtype(before)
        setattr(torch.utils.checkpoint, CHECKPOINTS, region)


def current(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return what a tensor of ``dtype`` has where this is called: float64 in the block above. Hooks of autograd run outside of it."""
    return None if dtype is None else torch.empty(0, dtype=dtype).dtype


def doubled(value: Any) -> Any:
    """Convert ``value`` to float64 where it is a floating tensor, or names such a dtype; return anything else unchanged."""
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, Tensor) and value.dtype in WIDER:
        return value.to(WIDER[value.dtype])
    return value


class _InDouble(TorchFunctionMode):
    def __init__(self, shown: torch.dtype | None, usual: torch.dtype) -> None:
        super().__init__()
        self.shown, self.usual = shown, usual

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            found = func(*args, **(kwargs or {}))
            return self.shown if self.shown is not None and found is torch.float64 and func == _DTYPE else found
        if name == "__set__":
            return func(*args, **(kwargs or {}))
        if func in _CASTS:
            return args[0].double()
        if func in _OF_NUMBERS:
            torch.set_default_dtype(self.usual)
            try:
                return doubled(func(*args, **(kwargs or {})))
            finally:
                torch.set_default_dtype(torch.float64)
        written = args[:1] if name.endswith("_") and not name.endswith("__") else ()  # a copy would not be written
        rest, named = tree_map(doubled, (args[len(written) :], kwargs or {}))
        if name.strip("_") == "grouped_mm" and rest[0].ndim == 2 and rest[1].ndim == 3:
            return _grouped_mm(*rest, **named)
        return func(*written, *rest, **named)


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """Multiply runs of rows, which end at ``offs``, by a matrix each, as ``grouped_mm`` does that has no kernel for float64."""
    ends = offs.tolist()
    runs = [rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights)]
    assert bias is None
    return torch.cat([*runs, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])
