"""Checks that all ranks run one program, and, once weights are loaded, that those which must have equal tensors do.

A node with another copy of the program, or another weight file, would go on training silently: its gradients are summed with all
others', while its weights stay different. So would ranks whose kernels round differently: see :data:`ROUND_APART`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graphpar.runtime.axes import STATE_AXES
from graphpar.runtime.distributed import gather_objects, gather_tensors
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import Shard
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.fully_sharded import local

EVERY = 64
"""How often what ranks share is compared, in steps: more seldom is less than a thousandth of their time."""
ROUND_APART = {"cuda"}
"""The kinds of devices on which ranks that compute the same may get other last bits: kernels that add in any order (the backward of
attention), or that are chosen by timing in each process (``torch.compile``). There a gradient that several ranks compute, and no one
sums, is made equal once a step."""
_WIDTH = 1024


def check_program(program: Manifest) -> None:
    """Check that the files of the program are the same on all ranks; a collective call.

    Raises:
        RuntimeProgramError: a file differs, or some rank lacks it; the message names it and two ranks.
    """
    files = [program.folder / "plan.json", *sorted(program.folder.glob("*.py"))]
    own = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    everyone = gather_objects(own)
    for rank, theirs in enumerate(everyone):
        name = next((name for name in everyone[0] | theirs if everyone[0].get(name) != theirs.get(name)), None)
        if name is not None:
            raise RuntimeProgramError(
                f"ranks 0 and {rank} run different programs: their {name} differs. Give every node the same folder."
            )


def check_replicas(
    stages: Sequence[nn.Module],
    program: Manifest,
    groups: Groups,
    pieces: Mapping[str, Tensor],
    steps: int | None = None,
) -> None:
    """Compare checksums of parameters and buffers over every axis that does not shard them; a collective call.

    Args:
        pieces: what this rank updates of parameters, where ranks that share state have others.
        steps: how many steps were made since they were loaded.

    Raises:
        RuntimeProgramError: on the ranks that see a difference, with the tensor, the axis and the ranks.
    """
    held = [
        (name, local(tensor.detach()))
        for stage in stages
        for name, tensor in [
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ]
    ]
    found = _difference(held, program.axes, program, groups, steps)
    others = [axis for axis in program.axes if axis not in STATE_AXES]
    own = [(name, piece.detach()) for name, piece in pieces.items()]
    found = _difference(own, others, program, groups, steps) or found
    if found is not None:
        raise RuntimeProgramError(found)


def _difference(
    held: Sequence[tuple[str, Tensor]], axes: Sequence[str], program: Manifest, groups: Groups, steps: int | None
) -> str | None:
    """Say which tensor differs between ranks of an axis that does not shard it, if one does; a collective call."""
    if not held:
        return None
    sums, found = torch.stack([checksum(tensor).to(groups.device) for _, tensor in held]), None
    for axis in axes:
        gathered = gather_tensors(sums, groups.axes[axis])
        for place, theirs in enumerate(gathered):
            differing = (gathered[0] != theirs).tolist()
            names = [
                name
                for (name, _), differs in zip(held, differing)
                if differs and not isinstance(program.stored(name)[axis], Shard)
            ]
            if names and found is None:
                ranks = groups.rank_at(**{axis: 0}), groups.rank_at(**{axis: place})
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                found = (
                    f"{names[0]}{more} should be the same on all ranks of the {axis} axis, but ranks {ranks[0]} and {ranks[1]} "
                ) + (
                    "loaded different values. Give every node the same weight file and program."
                    if steps is None
                    else f"have different values after {steps} steps. Go on from a checkpoint of before; if it happens again, a device "
                    "is at fault, or something other than this step changes parameters."
                )
    return found


def is_compared(number: int) -> bool:
    """Whether ranks compare what they share before step ``number``: 0, 1, 2, 4, ... and then every ``EVERY``-th."""
    return number % EVERY == 0 or (number < EVERY and number & (number - 1) == 0)


def checksum(tensor: Tensor) -> Tensor:
    """Compute an int64 scalar from the tensor's bits; a change of any one element changes it.

    Its words of 64 bits in rows of ``_WIDTH``, summed up modulo 2^64, each column times another odd number: an odd factor is invertible.
    """
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    in_word = 8 // flat.element_size()
    if flat.storage_offset() % in_word:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % in_word
    words, rest = flat[:whole].view(torch.int64), flat[whole:].to(torch.int64)
    in_rows = words.numel() - words.numel() % _WIDTH
    columns = words[:in_rows].view(in_rows // _WIDTH, _WIDTH).sum(0)
    columns[: words.numel() - in_rows] += words[in_rows:]
    columns[: rest.numel()] += rest
    return (columns * (2 * torch.arange(_WIDTH, device=flat.device) + 1)).sum()
