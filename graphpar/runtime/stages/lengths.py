"""Batches of sequences of other lengths, in a program for a range of lengths or a list.

input_ids [8, 301], labels [8, 301]  ──fitted, multiples of 4──►  [8, 304], [8, 304], and the program of 304 positions

Ranks of a pipeline receive what they know the size of, so all of a replica agree on the length of each batch before any of it is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.debugging import lone_group
from graphpar.runtime.distributed import agree
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import InputInterface, Manifest
from graphpar.runtime.option_kinds import ends_of, listed_lengths, seq_text

Batch = Mapping[str, Tensor]


class Lengths:
    """Fits batches to the lengths that a program takes."""

    def __init__(self, program: Manifest, groups: Groups, device: torch.device) -> None:
        self._program, self._groups, self._device = program, groups, device
        self._at = functools.cache(program.at)

    def fitted(self, batches: Sequence[Batch], alike: bool) -> list[tuple[Manifest, Batch]]:
        """Return each batch as the stages take it, with the program of its length; a collective call where lengths vary.

        Args:
            alike: replicas have batches of the same lengths, or they can't be joined.

        Raises:
            RuntimeProgramError: a batch has a length that the program does not take; or on all ranks, lengths of ranks differ.
        """
        if self._program.seq is None:
            return [(self._program, batch) for batch in batches]
        error: RuntimeProgramError | None = None
        lengths = [0] * len(batches)
        try:
            lengths = [length_of(self._program, batch) for batch in batches]
        except RuntimeProgramError as found:
            error = found
        if dist.get_world_size() > 1 and not lone_group.is_alone():
            lengths = self._agreed(lengths, error, alike)
        elif error is not None:
            raise error
        return [self._fitted(batch, length or ends_of(self._program.seq)[1]) for batch, length in zip(batches, lengths)]

    def _agreed(self, lengths: list[int], error: RuntimeProgramError | None, alike: bool) -> list[int]:
        """Take the lengths of the ranks of this replica that know them."""
        alike = alike or bool(self._program.coupled) or self._program.mesh.get("dp_expert", 1) > 1
        row = torch.tensor([self._groups.replica, error is not None, *lengths], device=self._device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        everyone = torch.stack(rows).tolist()
        if any(failed for _, failed, *_ in everyone):
            agree(error)
        for place in range(len(lengths)):
            known = {rank: found[place] for rank, (replica, _, *found) in enumerate(everyone) if found[place]}
            own = {rank: length for rank, length in known.items() if alike or everyone[rank][0] == self._groups.replica}
            if len(set(own.values())) > 1:
                error = RuntimeProgramError(
                    f"ranks got batches of other lengths: {', '.join(f'rank {rank} {length}' for rank, length in own.items())}; give "
                    + ("all ranks" if alike else "the ranks of a replica")
                    + " sequences of one length"
                )
            lengths[place] = next(iter(own.values()), 0)
        if error is not None:
            raise error
        return lengths

    def _fitted(self, batch: Batch, length: int) -> tuple[Manifest, Batch]:
        assert self._program.seq is not None
        more = _taken(self._program, length) - length
        program = self._at(length + more)
        if not more:
            return program, batch
        named = {spec.name: spec for spec in self._program.inputs}
        padded = {
            name: lengthened(value, dims_of(named[name]), more, named[name].fill) if name in named else value
            for name, value in batch.items()
        }
        return replace(program, padding=more), padded


def _taken(program: Manifest, length: int) -> int:
    """Return the least length, from this one on, that the stages take."""
    assert program.seq is not None
    listed = listed_lengths(program.seq)
    return next((each for each in listed if each >= length), length + -length % program.multiple)


def length_of(program: Manifest, batch: Batch) -> int:
    """Return the length of a batch's sequences; 0 where it has none of the inputs that say.

    Raises:
        RuntimeProgramError: inputs have different lengths, or one that the program does not take.
    """
    assert program.seq is not None
    listed, (least, most) = listed_lengths(program.seq), ends_of(program.seq)
    if listed and program.unpadded is None:
        least = 2
    found: dict[str, int] = {}
    for spec in program.inputs:
        value = batch.get(spec.name)
        if spec.per_position and isinstance(value, Tensor) and value.dim() == len(spec.shape):
            for dim in dims_of(spec):
                found.setdefault(spec.name, value.shape[dim])
                if value.shape[dim] != next(iter(found.values())):
                    raise RuntimeProgramError(
                        f"the input {spec.name} has {value.shape[dim]} positions along dim {dim}, but {next(iter(found))} has "
                        f"{next(iter(found.values()))}"
                    )
    if not found:
        return 0
    name, length = next(iter(found.items()))
    if not least <= length <= most:
        raise RuntimeProgramError(
            f"the input {name} has {length} positions; the program takes {least} to {most} (--seq {seq_text(program.seq)}): compile it for "
            f"a {'list' if listed else 'range'} that has this length"
        )
    if _taken(program, length) != length and program.unpadded is not None:
        only = (
            f"the program takes {' or '.join(map(str, listed))}"
            if listed
            else f"on this mesh they are multiples of {program.multiple}"
        )
        raise RuntimeProgramError(
            f"the input {name} has {length} positions; {only}, and padding to one would change results: {program.unpadded}"
        )
    return length


def dims_of(spec: InputInterface) -> list[int]:
    """Return the dims of an input that are as long as the sequence."""
    return [dim for dim, each in enumerate(spec.per_position) if each]


def lengthened(value: Tensor, dims: Sequence[int], more: int, fill: int | None) -> Tensor:
    """Add so many positions at the end of each of ``dims``: ``fill``, or by None the last one again."""
    for dim in dims:
        last = value.narrow(dim, value.shape[dim] - 1, 1)
        value = torch.cat([value, *[last if fill is None else torch.full_like(last, fill)] * more], dim)
    return value


def cropped(value: Tensor, per_position: Sequence[int], program: Manifest) -> Tensor:
    """Return what is computed of a padded batch without that of its padding."""
    for dim, each in enumerate(per_position if program.padding else ()):
        value = value.narrow(dim, 0, value.shape[dim] - each * program.padding // program.multiple)
    return value
