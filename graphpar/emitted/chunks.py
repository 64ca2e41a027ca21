"""The head and the loss, a chunk of tokens at a time, so that the logits of all tokens never exist.

    loss = in_chunks(head_loss, [hidden, labels], [weight, valid_labels], tokens=1024)

``head_loss`` gives a sum over tokens. The gradients of a chunk are computed right after its forward, while its logits
are there: no product runs twice, and the backward only multiplies what was found by the gradient of the loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def in_chunks(function: Callable[..., Tensor], rows: Sequence[Tensor], whole: Sequence[Tensor], tokens: int) -> Tensor:
    """``function(*rows, *whole)`` as a sum over chunks of so many ``tokens``: rows [n, ...] are divided, the others are
    not. -> []"""
    if torch.is_grad_enabled():
        result: Tensor = _InChunks.apply(function, tokens, len(rows), *rows, *whole)
        return result
    pieces = zip(*(row.split(tokens) for row in rows))
    return torch.stack([function(*piece, *whole) for piece in pieces]).sum(0)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], tokens: int, count: int, *given: Tensor) -> Tensor:
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        leaves = [x.detach().requires_grad_(place in wanted) for place, x in enumerate(given)]
        sums: dict[int, Tensor] = {place: torch.empty_like(given[place]) for place in wanted if place < count}
        losses = []
        for begin in range(0, given[0].size(0), tokens):
            length = min(tokens, given[0].size(0) - begin)
            with torch.enable_grad():
                piece = [x.narrow(0, begin, length) for x in leaves[:count]]
                loss = function(*piece, *leaves[count:])
            losses.append(loss.detach())
            variables = [piece[place] if place < count else leaves[place] for place in wanted]
            found = list(torch.autograd.grad(loss, variables, materialize_grads=True)) if wanted else []
            del piece, loss, variables  # before the next chunk's
            for place in wanted:
                if place < count:
                    sums[place].narrow(0, begin, length).copy_(found.pop(0))
                elif place in sums:
                    sums[place] += found.pop(0)
                else:  # of several chunks, in float32 at least
                    wide = torch.promote_types(given[place].dtype, torch.float32)
                    sums[place] = found.pop(0).to(wide if length < given[0].size(0) else given[place].dtype)
        ctx.save_for_backward(*(sums[place].to(given[place].dtype) for place in wanted))
        ctx.wanted, ctx.places = wanted, len(given)
        return torch.stack(losses).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = dict(zip(ctx.wanted, ctx.saved_tensors))
        return None, None, None, *(gradient * found[p] if p in found else None for p in range(ctx.places))
