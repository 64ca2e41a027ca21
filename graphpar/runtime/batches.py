"""What the stages of a rank take from a batch, and checks of it before any of it is computed or sent.

A rank is given the whole global batch, and takes the rows of its replica from it, or these rows alone, and no more inputs than its
stages use (``Part``). A rank with another batch would wait forever for its neighbours, or train with another rank's labels, so the
first step also compares the batches of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.distributed import agree, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError, near_match
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import InputInterface, Manifest
from graphpar.runtime.random_streams import sample_keys
from graphpar.runtime.schedules import microbatch


@dataclass(frozen=True)
class Part:
    """What a rank needs of a global batch.

    Attributes:
        replica: which replica the rank belongs to, of ``replicas``; each computes its own rows.
        rows: the examples of the global batch that this replica computes. Those of all replicas are the whole batch.
        names: the inputs and targets that the stages of this rank use; none where they only compute with what others send.
    """

    replica: int
    replicas: int
    rows: slice
    names: tuple[str, ...]


def check_batch(program: Manifest, batch: Mapping[str, Tensor], needed: Collection[str]) -> None:
    """Compare names, shapes and dtypes with the plan; rows may be those of the whole batch or of one replica.

    Raises:
        RuntimeProgramError: they differ, or one of ``needed`` is missing.
    """
    expected = {spec.name: spec for spec in program.inputs}
    missing = [name for name in expected if name in needed and name not in batch]
    if missing:
        raise RuntimeProgramError(f"the batch has no {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}")
    for name, value in batch.items():
        if name not in expected:
            raise RuntimeProgramError(f"the program has no input {name!r}.{near_match(name, expected)}")
        _check_value(program, expected[name], value)
    divided = [name for name in batch if program.replicas > 1 and expected[name].batch_dim is not None]
    whole = [name for name in divided if is_whole(program, name, batch[name])]
    if whole and len(whole) < len(divided):
        own = next(name for name in divided if name not in whole)
        raise RuntimeProgramError(
            f"the input {whole[0]} has the rows of the whole batch, but {own} those of one of {program.replicas} replicas"
        )


def _check_value(program: Manifest, spec: InputInterface, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise RuntimeProgramError(f"the input {spec.name} is a {type(value).__name__}, not a tensor")
    if value.dtype != spec.dtype:
        raise RuntimeProgramError(f"the input {spec.name} is {value.dtype}; the program expects {spec.dtype}")
    if tuple(value.shape) in (spec.shape, _own_shape(program, spec)):
        return
    dim = spec.batch_dim
    if dim is not None and value.dim() == len(spec.shape) and value.shape[dim] != spec.shape[dim]:
        own = spec.shape[dim] // program.replicas
        raise RuntimeProgramError(
            f"the input {spec.name} has {value.shape[dim]} rows along dim {dim}; the program expects {spec.shape[dim]} "
            f"({program.microbatches} microbatches of {own // program.microbatches}"
            f"{f' on each of {program.replicas} replicas), or the {own} of one replica' if program.replicas > 1 else ')'}. "
            "Pad or drop rows, or emit the program for another batch."
        )
    raise RuntimeProgramError(
        f"the input {spec.name} has shape {list(value.shape)}; the program expects {list(spec.shape)}"
    )


def _own_shape(program: Manifest, spec: InputInterface) -> tuple[int, ...]:
    return tuple(size // program.replicas if dim == spec.batch_dim else size for dim, size in enumerate(spec.shape))


def is_whole(program: Manifest, name: str, value: Tensor) -> bool:
    """Whether an input has more rows than those of one replica."""
    dim = program.input(name).batch_dim
    return program.replicas > 1 and dim is not None and value.shape[dim] == program.input(name).shape[dim]


def own_rows(program: Manifest, name: str, value: Tensor, replica: int) -> Tensor:
    """Select the rows of an input that replica ``replica`` computes; ``value`` has them, or those of the whole batch."""
    if not is_whole(program, name, value):
        return value
    dim = program.input(name).batch_dim
    assert dim is not None
    rows = value.shape[dim] // program.replicas
    return value.narrow(dim, replica * rows, rows)


def agree_on_batch(program: Manifest, batch: Mapping[str, Tensor], needed: Collection[str], replica: int) -> None:
    """Check the batch on every rank, and that ranks were given the same rows of what they both have; a collective call.

    Raises:
        AgreedError: on every rank, with the rank and the reason.
    """
    error: RuntimeProgramError | None = None
    try:
        check_batch(program, batch, needed)
    except RuntimeProgramError as found:
        error = found
    agree(error)
    own: dict[tuple[str, int | None], str] = {}  # None: all rows
    for name, value in batch.items():
        if is_whole(program, name, value) or program.input(name).batch_dim is None:
            own[name, None] = _digest(value)
        if program.input(name).batch_dim is not None:
            own[name, replica] = _digest(own_rows(program, name, value, replica))
    first: dict[tuple[str, int | None], tuple[int, str]] = {}
    for rank, digests in enumerate(gather_objects(own)):
        seen = {key: first.setdefault(key, (rank, digest)) for key, digest in digests.items()}
        differing = {key: other for key, (other, digest) in seen.items() if digest != digests[key]}
        if differing:
            names = sorted({name for name, _ in differing})
            of_all = any(rows is None for _, rows in differing)
            raise AgreedError(
                f"ranks {min(differing.values())} and {rank} were given different values of {', '.join(names)}. "
                + (
                    "Give every rank the same whole batch: shuffle with the same seed everywhere."
                    if of_all or program.replicas == 1
                    else f"Both belong to replica {next(iter(differing))[1]}, so give them the same rows (pipeline.data.rows)."
                )
            )


class Feed:
    """What this rank's stages take from a batch.

    Args:
        names: of the inputs that they take, the loss denominators among them.
        count: of one microbatch's inputs, the denominators of its loss; ``None`` where no stage of this rank divides by them.
    """

    def __init__(
        self,
        program: Manifest,
        groups: Groups,
        device: torch.device,
        seed: int,
        names: Sequence[str],
        count: Callable[..., Sequence[Tensor]] | None,
    ) -> None:
        self._program = program
        self._groups = groups
        self._device = device
        self.seed = seed
        self._names = names
        self._count = count
        self._wanted = {*names, *(program.count_inputs if count is not None else ())}
        rows, replica = program.global_batch // program.replicas, groups.replica
        given = tuple(spec.name for spec in program.inputs if spec.name in self._wanted and spec.role != "sample_keys")
        self.part = Part(replica, program.replicas, slice(replica * rows, (replica + 1) * rows), given)
        self._agreed = False

    def values(self, batch: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the inputs by name: checked, this replica's rows, on the device, with denominators and keys of random streams.

        Raises:
            RuntimeProgramError: the batch does not fit the program.
        """
        if self._agreed:
            check_batch(self._program, batch, self.part.names)
        else:
            agree_on_batch(self._program, batch, self.part.names, self.part.replica)
            self._agreed = True
        given = dict(batch)
        for spec in self._program.inputs:
            if spec.role == "sample_keys" and spec.name not in given:
                given[spec.name] = sample_keys(self.seed, step, spec.shape[0])
        values = {
            name: own_rows(self._program, name, value, self.part.replica).to(self._device, non_blocking=True)
            for name, value in given.items()
            if name in self._wanted
        }
        counts = self._global_counts(values)
        return {name: counts[name] if name in counts else values[name] for name in self._names}

    def _global_counts(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The denominators of the loss over the whole global batch, or with ``dp_mean`` over this replica's rows.

        Emitted code counts one microbatch at a time.
        """
        if self._count is None:
            return {}
        inputs = {name: values[name] for name in self._program.count_inputs}
        with torch.no_grad():
            parts = [self._count(**microbatch(self._program, inputs, i)) for i in range(self._program.microbatches)]
            totals = [torch.stack(shares).sum(0) for shares in zip(*parts)]
        replicas = self._groups["batch"]
        for total in totals if replicas is not None and not self._program.dp_mean else ():
            dist.all_reduce(total, group=replicas)
        return dict(zip(self._program.count_names, totals))


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
