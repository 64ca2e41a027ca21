"""Functions as the frameworks' kernels compute them, with the same kept tensors and memory traffic.

Cross entropy of logits [n, v] and labels [n]:

    plain      torch's: logits, log-softmax and two gradients, in 32 bits
    gathered   the same, of logits that every rank of tp has whole; the model ends with the log-softmax, so that it can be pinned
    megatron   a copy in 32 bits becomes the softmax, which becomes the gradient (Megatron-LM, core/tensor_parallel/cross_entropy.py)
    kernel     the logits become the gradient, in their own dtype (flash-attention, csrc/xentropy, in place)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.cost_models.work import Phase

MEGATRON_BYTES = {Phase.FORWARD: 38, Phase.INPUT: 14}
"""Of memory, for an element of the logits: Megatron-LM's loss is single operators. Forward it casts to 32 bits (6), takes the largest (4),
subtracts (8), exponentiates (8), sums (4) and divides (8); backward it scales (8) and casts back (6)."""
ONE_KERNEL_BYTES = {Phase.FORWARD: 2, Phase.INPUT: 4}
"""What is priced of it as a function of a program, which is one kernel forward and one backward."""
DIVIDED_BYTES = {Phase.FORWARD: 14, Phase.INPUT: 14}
"""What is priced of a loss that is divided over the vocabulary: casts, and a kernel forward and one backward in 32 bits."""


class Dropped(torch.autograd.Function):
    """Dropout in one kernel, which keeps a byte an element. Nothing is drawn at random, since prices don't depend on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        """Scale x by its mask; keeps a byte an element."""
        kept = torch.ones_like(x, dtype=torch.bool)
        ctx.save_for_backward(kept)
        ctx.share = share
        return (x * kept).div_(1 - share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Scale the gradient by the mask that was kept."""
        (kept,) = ctx.saved_tensors
        return (gradient * kept).div_(1 - ctx.share), None


def dropped(x: Tensor, share: float) -> Tensor:
    """Apply dropout with the share ``share``; x itself where that is 0"""
    result: Tensor = Dropped.apply(x, share) if share else x
    return result


class MegatronLoss(torch.autograd.Function):
    """Cross entropy as Megatron-LM computes it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [n, v], labels [n] -> losses [n]; keeps the softmax in 32 bits."""
        shares = logits.float()
        shares.sub_(shares.amax(-1, keepdim=True))
        picked = shares.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        sums = shares.exp_().sum(-1)
        ctx.save_for_backward(shares.div_(sums.unsqueeze(-1)), labels)
        ctx.dtype = logits.dtype
        return sums.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Turn the softmax into the gradient of the logits, in place, in 32 bits."""
        shares, labels = ctx.saved_tensors
        shares.scatter_add_(-1, labels.unsqueeze(-1), -torch.ones_like(gradient).unsqueeze(-1))
        return shares.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None


class KernelLoss(torch.autograd.Function):
    """Cross entropy as flash-attention's kernel computes it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [n, v], labels [n] -> losses [n]; keeps the logits."""
        sums = torch.logsumexp(logits, -1)
        ctx.save_for_backward(logits, sums, labels)
        return (sums - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Turn the logits into their gradient, in place, in their own dtype."""
        logits, sums, labels = ctx.saved_tensors
        shares = logits.detach().sub_(sums.unsqueeze(-1)).exp_()
        shares.scatter_add_(-1, labels.unsqueeze(-1), -torch.ones_like(sums).unsqueeze(-1))
        return shares.mul_(gradient.unsqueeze(-1).to(logits.dtype)), None


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy by torch: logits [b, s, v], labels [b, s] -> scalar"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def megatron(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy by :class:`MegatronLoss`: logits [b, s, v], labels [b, s] -> scalar"""
    losses: Tensor = MegatronLoss.apply(logits.flatten(0, 1), labels.flatten())
    return losses.mean()


def kernel(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy by :class:`KernelLoss`: logits [b, s, v], labels [b, s] -> scalar"""
    losses: Tensor = KernelLoss.apply(logits.flatten(0, 1), labels.flatten())
    return losses.mean()


def gathered(shares: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of log-softmax, which the model computes: [b s, v], labels [b, s] -> scalar"""
    return F.nll_loss(shares, labels.flatten(), reduction="none").mean()


LOSSES = {"plain": plain, "gathered": gathered, "megatron": megatron, "kernel": kernel}
