"""What the stages of a rank take from a batch, and checks of it before any of it is computed or sent.

Every rank is given the whole global batch, and takes the rows of its replica from it. A rank with another batch would
wait forever for its neighbours, or train with another rank's labels, so the first step also compares the batches of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.distributed import agree, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError, near_match
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import InputInterface, Manifest
from graphpar.runtime.random_streams import sample_keys
from graphpar.runtime.schedules import microbatch


def check_batch(program: Manifest, batch: Mapping[str, Tensor]) -> None:
    """Compare names, shapes and dtypes with the plan.

    Raises:
        RuntimeProgramError: they differ.
    """
    expected = {spec.name: spec for spec in program.inputs}
    missing = [spec.name for spec in program.inputs if spec.name not in batch and spec.role != "sample_keys"]
    if missing:
        raise RuntimeProgramError(f"the batch has no {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}")
    for name, value in batch.items():
        if name not in expected:
            raise RuntimeProgramError(f"the program has no input {name!r}.{near_match(name, expected)}")
        _check_value(program, expected[name], value)


def _check_value(program: Manifest, spec: InputInterface, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise RuntimeProgramError(f"the input {spec.name} is a {type(value).__name__}, not a tensor")
    if value.dtype != spec.dtype:
        raise RuntimeProgramError(f"the input {spec.name} is {value.dtype}; the program expects {spec.dtype}")
    if tuple(value.shape) == spec.shape:
        return
    dim = spec.batch_dim
    if dim is not None and value.dim() == len(spec.shape) and value.shape[dim] != spec.shape[dim]:
        raise RuntimeProgramError(
            f"the input {spec.name} has {value.shape[dim]} rows along dim {dim}; the program expects {spec.shape[dim]} "
            f"({program.microbatches} microbatches of {spec.shape[dim] // program.microbatches // program.replicas}"
            f"{f' on each of {program.replicas} replicas' if program.replicas > 1 else ''}). "
            "Pad or drop rows, or emit the program for another batch."
        )
    raise RuntimeProgramError(
        f"the input {spec.name} has shape {list(value.shape)}; the program expects {list(spec.shape)}"
    )


def own_rows(program: Manifest, name: str, value: Tensor, replica: int) -> Tensor:
    """Select the rows of an input that replica ``replica`` computes."""
    dim = program.input(name).batch_dim
    if dim is None or program.replicas == 1:
        return value
    rows = value.shape[dim] // program.replicas
    return value.narrow(dim, replica * rows, rows)


def agree_on_batch(program: Manifest, batch: Mapping[str, Tensor]) -> None:
    """Check the batch on every rank, and that all ranks were given the same one; a collective call.

    Raises:
        AgreedError: on every rank, with the rank and the reason.
    """
    error: RuntimeProgramError | None = None
    try:
        check_batch(program, batch)
    except RuntimeProgramError as found:
        error = found
    agree(error)
    signatures = gather_objects({name: _digest(value) for name, value in batch.items()})
    for rank, signature in enumerate(signatures):
        differing = sorted(
            name for name in signature.keys() | signatures[0].keys() if signature.get(name) != signatures[0].get(name)
        )
        if differing:
            raise AgreedError(
                f"ranks 0 and {rank} were given different values of {', '.join(differing)}. "
                "Give every rank the same whole batch: shuffle with the same seed everywhere."
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
        self._agreed = False

    def values(self, batch: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the inputs by name: checked, this replica's rows, on the device, with denominators and keys of random streams.

        Raises:
            RuntimeProgramError: the batch does not fit the program.
        """
        if self._agreed:
            check_batch(self._program, batch)
        else:
            agree_on_batch(self._program, batch)
            self._agreed = True
        given = dict(batch)
        for spec in self._program.inputs:
            if spec.role == "sample_keys" and spec.name not in given:
                given[spec.name] = sample_keys(self.seed, step, spec.shape[0])
        values = {
            name: own_rows(self._program, name, value, self._groups.replica).to(self._device, non_blocking=True)
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
