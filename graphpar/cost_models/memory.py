"""``Memory``: the bytes of one rank at its peak, by purpose; computed by :mod:`graphpar.cost_models.unit_bytes`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

MAIN_DTYPE = torch.float32
"""The dtype of an optimizer's copies of low-precision parameters."""
ALLOCATOR_SLACK = 0.05
"""The allocator's overhead as a share of the memory that is allocated and freed in a step (assumed): it rounds tensors up to 512
bytes and segments to 2 MiB, and fragments."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one rank in the memory of its host, at the peak.

    Attributes:
        optimizer: the state of the optimizer.
        activations: what blocks keep of the microbatches in flight.
    """

    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.optimizer + self.activations


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        optimizer: the state of the optimizer on the device; where it lives in the host's memory, the pieces that are updated at one time.
        copies: of parameters, in the dtype in which they are read, made once a step.
        buffers: buffers and constants.
        buckets: of the all-reduce of gradients: gradients are copied into them, so one bucket exists twice. And what is gathered of
            sharded parameters, and gradients that are yet to be reduced to shards.
        inputs: the replica's rows of the inputs that its stages take.
        cache: keys and values of generation, of all groups of sequences that are in flight.
        boundaries: what stages receive, and the gradients of what they send; torch keeps a buffer for each microbatch.
        activations: of the microbatches in flight, at the peak.
        transient: what the running forward or backward needs on top; for the loss its logits and their gradient.
        slack: overhead of the allocator: what it reserves beyond what is allocated.
    """

    parameters: int = 0
    copies: int = 0
    buffers: int = 0
    gradients: int = 0
    main_copies: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0
    cache: int = 0
    boundaries: int = 0
    activations: int = 0
    transient: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        """All bytes of the rank: what the allocator reserves."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def allocated(self) -> int:
        """The bytes of the rank's tensors."""
        return self.total - self.slack
