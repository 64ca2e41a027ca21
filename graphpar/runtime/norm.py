"""The norm of the gradients of a whole model, of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.fully_sharded import local


def clip(
    counted: Iterable[nn.Parameter], parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm over the model is at most ``max_norm``; a collective call.

    Args:
        counted: those of this rank's parameters that no other rank counts.

    Returns:
        The norm before.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in counted:
        if parameter.grad is not None:
            precise = torch.promote_types(parameter.grad.dtype, torch.float32)
            squares += torch.linalg.vector_norm(local(parameter.grad), dtype=precise) ** 2
    dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(scale.to(parameter.grad.dtype))
    return norm
