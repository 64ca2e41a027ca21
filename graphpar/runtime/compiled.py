"""``torch.compile`` of a program's blocks.

    block.forward ──torch.compile──► the same numbers from fused kernels; what FSDP2, ZeRO-1 and pipelines do around it stays as it is

A block is compiled whole, with the collectives in it, and once for all its instances. Where torch can't follow it, as into a user's own
operator without a fake kernel, it is refused: parts of a block between which Python runs gain little, and nobody would see why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphpar.runtime.compiled_operators import hide_masks, know_grouped_products
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.kernel_dropout import KERNEL
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""The schedules that split backwards in two."""
WHOLE = ("none", "full")
"""What compiled blocks may recompute."""


def backend_of(compile: bool | str) -> str | None:
    """Return the backend that is meant; None: blocks run as they are."""
    return ("inductor" if compile else None) if isinstance(compile, bool) else compile


def splits_backwards(schedule: str, cells: Iterable[str | None]) -> bool:
    """Whether a schedule, whose table has ``cells``, if any, runs the two halves of a backward apart."""
    return schedule in SPLIT or any("W" in cell for cell in cells if cell)


def obstacle(
    schedule: str, cells: Iterable[str | None], recompute: object, offload: Collection[str] = ()
) -> str | None:
    """Say why blocks can't be compiled under a schedule, whose table has ``cells``, if any, and with what they recompute and ``offload`` to
    the host."""
    if splits_backwards(schedule, cells):
        return (
            f"the schedule {schedule} splits backwards in two, which compiled blocks run as one; compile the model with another "
            "schedule, such as 1F1B, or leave compile out"
        )
    kinds = recompute.values() if isinstance(recompute, Mapping) else [recompute]
    other = next((kind for kind in kinds if kind not in WHOLE), None)
    if other is not None:
        return (
            f"recompute={other} is about results of single operators, which compiled blocks do not have; compile the model with "
            "recompute=full or none, or leave compile out"
        )
    if "activations" in offload:
        return "offload=activations with compiled blocks comes in a later version; leave one of them out"
    return None


def check_compiles(program: Manifest, backend: str, device: torch.device) -> None:
    """Check that the blocks of ``program`` can be compiled.

    Raises:
        RuntimeProgramError: torch has no such backend, or no C++ compiler, or backwards are split in two, or blocks recompute a part, or
            attention draws its dropout by a kernel.
    """
    if program.dropout == KERNEL:
        raise RuntimeProgramError(
            "dropout=kernel seeds torch's generator before each attention, which compiled blocks can't do; leave compile out, or compile "
            "the model without --dropout kernel"
        )
    backends = torch._dynamo.list_backends(None)  # type: ignore[no-untyped-call, arg-type]
    if backend not in backends:
        raise RuntimeProgramError(f"torch.compile has no backend {backend!r}; there are {', '.join(backends)}")
    if not COMPILES_COLLECTIVES and (program.folder / "collectives.py").is_file():
        raise RuntimeProgramError(
            f"torch {torch.__version__} loses collectives in blocks that it compiles; take torch 2.13 or later, or leave compile out"
        )
    cells = (cell for row in (program.actions or {}).values() for cell in row)
    reason = obstacle(program.schedule, cells, program.recompute, program.offload)
    if reason is not None:
        raise RuntimeProgramError(reason)
    if backend == "inductor" and device.type == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:
            raise RuntimeProgramError(
                f"torch.compile needs a C++ compiler on the CPU ({error}); install one, or leave compile out"
            ) from error


def compile_blocks(stage: nn.Module, package: str, backend: str) -> None:
    """Compile the forwards of the blocks of ``stage``, or its own where it has none; before FSDP2 shards them."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # else blocks share the graph of one that has other hooks
    know_grouped_products()
    streams = sys.modules.get(f"{package}.random_streams")
    if streams is not None:
        hide_masks(streams)
    for module in list(blocks(stage, package)) or [stage]:
        module.forward = _whole(module, backend)  # type: ignore[method-assign]


def _whole(module: nn.Module, backend: str) -> Callable[..., Any]:
    """Compile the forward of ``module`` as one graph; it is compiled when it is first called.

    Raises:
        RuntimeProgramError: (the function that is returned) it can't be.
    """
    compiled = torch.compile(module.forward, fullgraph=True, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:
            raise RuntimeProgramError(
                f"torch.compile can't compile {type(module).__name__} as one graph; leave compile out, or change what it can't follow "
                f"(an operator of your own needs torch.library.register_fake): {error}"
            ) from error

    return forward


def blocks(module: nn.Module, package: str) -> Iterator[nn.Module]:
    """Yield the outermost modules in ``module`` of classes that the emitted ``blocks.py`` has."""
    for child in module.children():
        if any(
            kind.__module__ == f"{package}.blocks" for kind in type(child).__mro__
        ):  # FSDP2 makes classes of its own
            yield child
        else:
            yield from blocks(child, package)
