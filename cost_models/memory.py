"""``Memory``: the bytes of one rank at its peak, by what they are for. :mod:`graphpar.cost_models.unit_bytes` finds them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

MAIN_DTYPE = torch.float32
"""Of the copies of low-precision parameters that an optimizer may update in their place."""
ALLOCATOR_SLACK = 0.05
"""Share of the memory that comes and goes in a step which the allocator takes besides: it rounds every tensor up to 512 bytes and
every segment to 2 MiB, and keeps pieces between live tensors that fit nothing else (assumed)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        buffers: and constants.
        buckets: of the sums of gradients over ranks: gradients move into them, so one is there twice.
        inputs: the rows of this rank's replica of the inputs that its stages name.
        boundaries: what stages receive and the gradients of what they send; torch has a buffer for each microbatch.
        activations: of the microbatches in flight, where together with ``transient`` they are the most.
        transient: what the forward or backward that runs then takes on top; of the loss its logits and their gradient.
        slack: of the allocator.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    main_copies: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0
    boundaries: int = 0
    activations: int = 0
    transient: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))
