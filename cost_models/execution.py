"""``Execution``: how a rank's program is run, as far as prices depend on it and a plan leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

from graphpar.errors import GraphparError

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""How many tensors of a parameter's size an optimizer keeps, in the dtype of what it updates."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Execution:
    """What a plan leaves open.

    Attributes:
        optimizer: of :data:`OPTIMIZERS`.
        main_copies: the optimizer updates fp32 copies of low-precision parameters.
        gradient_bytes: of an element in which gradients are summed over microbatches and ranks; None: as the parameter.
        zero: the optimizer's state and main copies (from 1), gradients (from 2) and parameters (3) are divided by ``shards``.
        shards: the ranks of dp_shard.
        recompute: ``full`` keeps a unit's input alone and runs its forward again before its backward; ``selective`` does so with
            attention's scores, where they are kept at all.
        fused: chains of elementwise operators and normalisations are one kernel each, as compiled or hand-written ones are; else
            each operator reads and writes memory.
        overlap_gradients: sums of gradients over replicas run beside the backward of the last microbatch.
        prefetch: parameters that are divided are gathered for the next unit while this one computes.
        hold_messages: buffers for what stages receive, and for the gradients that come back, are there for every microbatch of a
            step, as torch's pipeline stages make them; else for those in flight.
        wait_for_sends: a stage waits until what it sends has arrived, as pipelines do that exchange messages in pairs; else it goes on.
        dispatch_s: seconds of the host for an operator, where a framework's own work makes them more than PyTorch's (the device's).
        overlap_tp: the share of the collectives inside operators that is hidden behind the products next to them.
    """

    optimizer: str = "adam"
    main_copies: bool = False
    gradient_bytes: int | None = None
    zero: int = 0
    shards: int = 1
    recompute: str = "none"
    fused: bool = False
    overlap_gradients: bool = True
    prefetch: bool = True
    hold_messages: bool = True
    wait_for_sends: bool = False
    dispatch_s: float | None = None
    overlap_tp: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise GraphparError(f"optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}.")
        if self.zero not in range(4):
            raise GraphparError(f"zero is {self.zero!r}; it must be 0, 1, 2 or 3.")
        if self.shards < 1:
            raise GraphparError(f"shards is {self.shards!r}; it must be at least 1.")
        if self.recompute not in RECOMPUTE:
            raise GraphparError(f"recompute is {self.recompute!r}; it must be one of {', '.join(RECOMPUTE)}.")
        if not 0 <= self.overlap_tp <= 1:
            raise GraphparError(f"overlap_tp is {self.overlap_tp!r}; it is a share, from 0 to 1.")

    def divided(self, nbytes: int, level: int) -> int:
        """What a rank has of ``nbytes`` that are divided from ``level`` on."""
        return -(-nbytes // self.shards) if self.zero >= level else nbytes
