"""``Execution``: how a rank's program runs, where prices depend on it and a plan does not say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphpar.errors import GraphparError
from graphpar.ir.program import ADAMW, OptimizerState

if TYPE_CHECKING:
    from graphpar.cost_models.pipeline_units import Held

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Execution:
    """How a rank's program runs.

    Attributes:
        optimizer: what it keeps, in the dtype of a parameter or its main copy.
        main_copies: the optimizer updates fp32 copies of low-precision parameters.
        gradient_bytes: of an element in which gradients are summed over microbatches and ranks; None: as the parameter.
        gather_bytes: of an element in which sharded parameters are gathered; None: as the parameter.
        reduce_bytes: of an element in which gradients are summed over replicas; None: as they are accumulated.
        sums_whole: with ZeRO 1 gradients are all-reduced whole, and each rank uses its shard of them; else they are reduce-scattered.
        broadcasts: with ZeRO 1 so many ranks broadcast the parameters that they updated, one after the other; 0: all gather all.
        zero1_by: with ZeRO 1 what a rank updates, see the option of that name: equal slices (``flat``), of which all gather all, or full
            parameters, whose gradients are reduced to it, and which it broadcasts.
        moved_bytes: of memory that are read and written for each element of a gradient at the end of a step, besides its sum and the
            optimizer: copies to flat buffers, casts, norms.
        copies_gradients: they are copied into the flat tensors that are summed, and sharded parameters out of those that are gathered, as
            programs and FSDP2 do; else they lie there.
        zero: shard optimizer state and main copies (from 1), gradients (from 2) and parameters (3) over ``shards`` ranks.
        shards: the ranks of dp_shard and cp.
        reshard: when gathered parameters are freed, see the option ``reshard`` of :class:`graphpar.runtime.options.Decisions`.
        recompute: ``full`` keeps a unit's input only and runs its forward again before its backward; ``selective`` recomputes
            attention scores, where they are kept at all.
        blocks: the kind of each block that the program itself recomputes, by path; what is kept and run again of them is measured.
        fused: each chain of elementwise operators and normalisations is one kernel; else each operator reads and writes memory.
        compiled: ``torch.compile`` fuses the operators between products, collectives and blocks
            (:mod:`graphpar.cost_models.fused_groups`). Sums of gradients and the optimizer run as they are.
        overlap_gradients: gradients are reduced over replicas during the backward of the last microbatch.
        units: which modules are gathered together, see the option ``units``.
        prefetch: sharded parameters are gathered for the next unit while this one computes.
        gathered: how many units have their whole parameters at once (ZeRO 3).
        hold_messages: what a stage received lives until its backward, as what it sent does, as in torch's pipeline stages; else one of the
            two does.
        wait_for_sends: a stage waits until its message has arrived, as pipelines do that exchange messages in pairs.
        dispatch_s: seconds of the host for an operator, where a framework adds to PyTorch's (the device's).
        overlap_tp: the share of collectives inside operators that is hidden behind the products next to them, apart from those that
            ``rings`` and ``joined`` say to be beside something.
        offload: what lives in the memory of the host, see the option ``offload`` there; nothing where the device is the host.
        rings: gathers before products and reduce-scatters after them are sent in pieces beside these, see
            :mod:`graphpar.emitted.parallel_products`.
        joined: the other sums of gradients of what enters products run beside the products of the gradients of their weights, where a
            backward is not split in two, and what is gathered again beside those of that gradient: see
            :mod:`graphpar.emitted.parallel_products`, which programs have, and Megatron-LM's column-parallel layers.
        travelling: rows travel to experts and back beside the products that stand between the start and the end of that, see
            :mod:`graphpar.passes.sharding.overlapped_exchange`.
        communicator_bytes: of the device's memory, for each group of ranks that a rank joins.
        cast_bytes: of memory, for each element of what a product in 8 bits takes, where the program's own rows of work have no casts.
        halves: backwards in halves keep and need the memory that torch's do; else what the forward kept stays until the second half.
        foreach: the optimizer has one more copy of what it updates during its step.
        one_by_one: it updates one parameter after the other, with temporary tensors of the size of each.
    """

    optimizer: OptimizerState = ADAMW
    main_copies: bool = False
    gradient_bytes: int | None = None
    gather_bytes: int | None = None
    reduce_bytes: int | None = None
    sums_whole: bool = False
    broadcasts: int = 0
    zero1_by: str = "flat"
    moved_bytes: int = 0
    copies_gradients: bool = False
    zero: int = 0
    shards: int = 1
    reshard: str | int = "default"
    units: tuple[str, ...] | None = None
    recompute: str = "none"
    blocks: tuple[tuple[str, str], ...] = ()
    fused: bool = False
    compiled: bool = False
    overlap_gradients: bool = True
    prefetch: bool = True
    gathered: int = 2
    hold_messages: bool = True
    wait_for_sends: bool = False
    dispatch_s: float | None = None
    overlap_tp: float = 0.0
    rings: bool = False
    joined: bool = False
    travelling: bool = False
    offload: tuple[str, ...] = ()
    communicator_bytes: int = 0
    cast_bytes: float = 4.0
    halves: bool = False
    foreach: bool = False
    one_by_one: bool = False

    def __post_init__(self) -> None:
        if self.zero not in range(4):
            raise GraphparError(f"zero is {self.zero!r}; it must be 0, 1, 2 or 3.")
        if self.shards < 1:
            raise GraphparError(f"shards is {self.shards!r}; it must be at least 1.")
        if self.recompute not in RECOMPUTE:
            raise GraphparError(f"recompute is {self.recompute!r}; it must be one of {', '.join(RECOMPUTE)}.")
        if not 0 <= self.overlap_tp <= 1:
            raise GraphparError(f"overlap_tp is {self.overlap_tp!r}; it is a share, from 0 to 1.")

    @property
    def recasts(self) -> bool:
        """Whether parameters that are read in another dtype are cast for each microbatch: compiled blocks do that, unless they are
        gathered, or stored whole, as they are read.
        """
        return self.compiled and (not self.zero or self.gather_bytes is None)

    @property
    def shards_on_host(self) -> bool:
        """Whether shards of parameters, their gradients and the optimizer's state live in the memory of the host, which updates them."""
        return "params" in self.offload

    @property
    def kept_for_step(self) -> bool:
        """Whether a pipeline's stages keep gathered parameters from their first action to their last."""
        return self.reshard in ("default", "never")

    def gathered_bytes(self, parts: Iterable[Held]) -> int:
        """Return the bytes of parameters as they are gathered."""
        return sum(part.elements * (self.gather_bytes or part.itemsize) for part in parts)

    def divided(self, nbytes: int, level: int) -> int:
        """Return a rank's share of ``nbytes`` that are sharded from ZeRO ``level`` on."""
        return -(-nbytes // self.shards) if self.zero >= level else nbytes
