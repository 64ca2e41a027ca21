"""Checks of a batch before any of it is computed or sent.

Every rank is given the whole global batch, and takes the rows of its replica from it. A rank with another batch would
wait forever for its neighbours, or train with another rank's labels, so the first step also compares the batches of all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from graphpar.runtime.distributed import agree, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError, near_match
from graphpar.runtime.manifest import InputInterface, Manifest


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


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
