"""Gated activations (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202): one value scales another.

    swiglu(gate, up)  =  silu(gate) * up                  kept for the backward: gate and up

As two operators, autograd keeps the activated gate, too; here it is computed again. The results and gradients are the
same to the bit. Two kernels forward and four backward; a compiler makes one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

_aten = torch.ops.aten


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``F.silu(gate) * up``, of tensors of one shape."""
    if has_torch_function((gate, up)):  # what recomputes pointwise operators sees the call, as one of torch's
        made: Tensor = handle_torch_function(swiglu, (gate, up), gate, up)
        return made
    return _gated(gate, up, F.silu, _aten.silu_backward)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu(gate, approximate=approximate) * up``, of tensors of one shape."""
    if has_torch_function((gate, up)):
        made: Tensor = handle_torch_function(geglu, (gate, up), gate, up, approximate=approximate)
        return made
    activation, slope = (partial(each, approximate=approximate) for each in (F.gelu, _aten.gelu_backward))
    return _gated(gate, up, activation, slope)


def _gated(gate: Tensor, up: Tensor, activation: Callable[..., Tensor], slope: Callable[..., Tensor]) -> Tensor:
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # less work for the host
        return activation(gate) * up
    result: Tensor = _Gated.apply(gate, up, activation, slope)
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activation: Callable[..., Tensor], slope: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.slope = activation, slope
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        of_gate = ctx.slope(gradient * up, gate) if ctx.needs_input_grad[0] else None
        of_up = gradient * ctx.activation(gate) if ctx.needs_input_grad[1] else None
        return of_gate, of_up, None, None
