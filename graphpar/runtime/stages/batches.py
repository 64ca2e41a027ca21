"""What the stages of a rank take from a batch, and checks of it before any of it is computed or sent.

A rank is given the whole global batch, and takes the rows of its replica from it, or these rows alone, and no more inputs than its
stages use (``Part``). A rank with another batch would wait forever for its neighbours, or train with another rank's labels, so the
first step also compares the batches of all ranks, and so do some of the later ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from graphpar.runtime.distributed import agree, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError, near_match, root_cause
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import InputInterface, Manifest
from graphpar.runtime.option_kinds import GENERATE
from graphpar.runtime.stages.dropout import KERNEL, sample_keys, step_key
from graphpar.runtime.stages.lengths import Lengths
from graphpar.runtime.stages.schedules import microbatch
from graphpar.runtime.state.replicas import is_compared

SAMPLED = 1 << 18
"""How many elements of an input are looked at when steps after the first compare it."""


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


PLAIN = (bool, int, float, str, type(None))
"""What an argument may be besides tensors for a batch to name it again: it has to be what the model was compiled with."""


def leaf_paths(name: str, value: Any) -> list[str]:
    """Name the leaves of ``value``: ``name``, or ``name_key`` for containers."""
    leaves = tree_leaves_with_path(value)
    result = []
    for path, _ in leaves:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        text = "_".join([name, *parts])
        result.append("".join(char if char.isalnum() or char == "_" else "_" for char in text))
    return result


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or a list of such, as datasets have tensors before they are any."""
    inside = value
    while isinstance(inside, list) and inside:
        inside = inside[0]
    return inside is not value and isinstance(inside, bool | int | float)


def by_name(program: Manifest, batch: Any) -> Mapping[str, Any] | None:
    """Return a batch or an example by names: of a mapping, a dataclass or a named tuple its own, of a sequence those of the inputs in
    order, targets last. None where it is something else.

    Raises:
        RuntimeProgramError: a sequence has not as many tensors or numbers as the program has inputs.
    """
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        named: Mapping[str, Any] = batch._asdict()
        return named
    if not isinstance(batch, list | tuple):
        return None
    names = [spec.name for spec in program.inputs if spec.role != "sample_keys"]
    values = [leaf for each in batch for leaf in tree_leaves(each, is_leaf=is_numbers)]
    if len(values) != len(names):
        raise RuntimeProgramError(
            f"a batch without names has {len(values)} values, but the program has {len(names)} inputs, in this order: {', '.join(names)}"
        )
    return dict(zip(names, values))


def flattened(program: Manifest, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a batch or an example has by the names of inputs that are read; arguments may be lists and mappings, as the model takes
    them.

    Raises:
        RuntimeProgramError: a number or another argument that is no tensor differs from what the model was compiled with.
    """
    if not program.unread and all(isinstance(value, Tensor) for value in batch.values()):
        return batch
    found: dict[str, Any] = {}
    for name, value in batch.items():
        found.update(zip(leaf_paths(name, value), tree_leaves(value), strict=True))
    for name, value in list(found.items()):
        if name in program.unread:
            del found[name]
        elif name in program.plain:
            if not isinstance(value, PLAIN) or value != program.plain[name]:
                shown = repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"
                raise RuntimeProgramError(
                    f"the model was compiled with {name}={program.plain[name]!r}, which is part of the program, but got {shown}: "
                    "compile it again with example inputs that have that"
                )
            del found[name]
    return found


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
            f"the input {whole[0]} has the rows of the global batch, but {own} those of one of {program.replicas} replicas"
        )


def _check_value(program: Manifest, spec: InputInterface, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise RuntimeProgramError(f"the input {spec.name} is a {type(value).__name__}, not a tensor")
    if value.dtype != spec.dtype:
        raise RuntimeProgramError(f"the input {spec.name} is {value.dtype}; the program expects {spec.dtype}")
    if tuple(value.shape) in (spec.shape, _own_shape(program, spec)):
        return _check_ids(spec, value)
    dim = spec.batch_dim
    own = 0 if dim is None else spec.shape[dim] // program.replicas
    if dim is not None and value.dim() == len(spec.shape) and value.shape[dim] not in (spec.shape[dim], own):
        each = f"{program.microbatches} microbatches of {own // program.microbatches}"
        if program.mode == GENERATE:
            each = f"{own} sequences at a time"
        raise RuntimeProgramError(
            f"the input {spec.name} has {value.shape[dim]} rows along dim {dim}; the program expects {spec.shape[dim]} ({each}"
            f"{f' on each of {program.replicas} replicas), or the {own} of one replica' if program.replicas > 1 else ')'}. "
            "Pad or drop rows, or emit the program for another batch."
        )
    raise RuntimeProgramError(
        f"the input {spec.name} has shape {list(value.shape)}; the program expects {list(spec.shape)}"
        f"{_other_length(program, spec, value)}"
    )


def _other_length(program: Manifest, spec: InputInterface, value: Tensor) -> str:
    """Say what helps where an input has another size along one dim, such as a shorter sequence."""
    sizes = list(zip(value.shape, spec.shape)) if value.dim() == len(spec.shape) else []
    others = [dim for dim, (found, expected) in enumerate(sizes) if found != expected and dim != spec.batch_dim]
    if len(others) != 1:
        return ""
    (dim,) = others
    found, expected = sizes[dim]
    if program.seq is not None:
        if any(spec.per_position):
            return f": inputs that vary in length have one length in a microbatch, here {expected}; pad them to the longest"
        return (
            f": its dim {dim} does not vary with --seq, as it was not as long as the sequence in the example inputs; pad it to {expected}, "
            "or compile the model with an example in which both are equally long"
        )
    padding = (
        f"pad it to {expected} (graphpar.runtime.pad: exact where attention is causal and the loss ignores labels of -100), or "
        if found < expected and not spec.dtype.is_floating_point
        else ""
    )
    return (
        f": a program has one size of each dim except the batch, and was traced with {expected} along dim {dim}, not {found}; {padding}"
        "compile the model with example inputs of that size into another folder, which reads the same checkpoints; or for a range of "
        "lengths of its sequence (--seq A..B, or A,B,C)"
    )


def _check_ids(spec: InputInterface, value: Tensor) -> None:
    """Check token ids and labels on the CPU: a rank that has a part of a table, or of the classes, would take another rank's for none."""
    if value.device.type != "cpu" or not value.numel():
        return
    for what, count, ignored in (("token", spec.below, None), ("label", spec.classes, spec.ignored)):
        known = value if ignored is None else value.masked_fill(value == ignored, 0)
        least, most = (int(end) for end in known.aminmax()) if count is not None else (0, 0)
        if count is not None and (least < 0 or most >= count):
            found, also = (
                most if most >= count else least,
                "" if ignored is None else f", and {ignored}, which is ignored",
            )
            knows = "the model" if what == "token" else "the loss"
            raise RuntimeProgramError(
                f"the input {spec.name} has {what} {found}; {knows} knows {count} (0 to {count - 1}{also})"
            )


@contextmanager
def labels_named(batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Say of which input a label is that a loss refuses, where the loss takes a part of that input, or what is computed of it.

    Raises:
        RuntimeProgramError: a loss was given a label that is no class.
    """
    try:
        yield
    except Exception as error:
        found = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(root_cause(error)))
        if found is None:
            raise
        whole = [
            name for name, value in batch.items() if not value.is_floating_point() and (value == int(found[1])).any()
        ]
        raise RuntimeProgramError(
            f"a loss got the label {found[1]}, which is not one of its classes; {' and '.join(whole) or 'no input'} of the batch has it"
        ) from error


def _own_shape(program: Manifest, spec: InputInterface) -> tuple[int, ...]:
    return tuple(size // program.replicas if dim == spec.batch_dim else size for dim, size in enumerate(spec.shape))


def is_whole(program: Manifest, name: str, value: Tensor) -> bool:
    """Whether an input has more rows than those of one replica."""
    dim = program.input(name).batch_dim
    return program.replicas > 1 and dim is not None and value.shape[dim] == program.input(name).shape[dim]


def share_of(count: int, replicas: int, replica: int) -> range:
    """Return which of ``count`` rows replica ``replica`` computes: those of all are equal in number, or differ by one."""
    return range(replica * count // replicas, (replica + 1) * count // replicas)


def own_rows(program: Manifest, name: str, value: Tensor, replica: int) -> Tensor:
    """Select the rows of an input that replica ``replica`` computes; ``value`` has them, or those of the whole batch."""
    if not is_whole(program, name, value):
        return value
    dim = program.input(name).batch_dim
    assert dim is not None
    rows = share_of(value.shape[dim], program.replicas, replica)
    return value.narrow(dim, rows.start, len(rows))


def agree_on_batches(
    program: Manifest,
    batches: Sequence[tuple[Manifest, Mapping[str, Tensor]]],
    needed: Collection[str],
    replica: int,
    step: int,
    *,
    sampled: bool = False,
) -> None:
    """Check batches on every rank, and that ranks were given the same rows of what they both have, for one step; a collective call.

    Args:
        batches: each with the program of its length.
        sampled: look at some of the elements of a large input.

    Raises:
        AgreedError: on every rank, with the rank and the reason.
    """
    error: RuntimeProgramError | None = None
    try:
        for own_program, batch in batches:
            check_batch(own_program, batch, needed)
    except RuntimeProgramError as found:
        error = found
    agree(error)
    own: dict[tuple[int, str, int | None], str] = {}  # the last is None: all rows
    for place, (_, batch) in enumerate(batches):
        for name, value in batch.items():
            if is_whole(program, name, value) or program.input(name).batch_dim is None:
                own[place, name, None] = _digest(value, sampled)
            if program.input(name).batch_dim is not None:
                own[place, name, replica] = _digest(own_rows(program, name, value, replica), sampled)
    first: dict[tuple[int, str, int | None], tuple[int, str]] = {}
    everyone = gather_objects((step, own))
    for rank, (number, digests) in enumerate(everyone):
        if number != everyone[0][0]:
            raise AgreedError(f"rank 0 is at step {everyone[0][0]}, but rank {rank} at step {number}")
        seen = {key: first.setdefault(key, (rank, digest)) for key, digest in digests.items()}
        differing = {key: other for key, (other, digest) in seen.items() if digest != digests[key]}
        if differing:
            names = sorted({name for _, name, _ in differing})
            of_all = any(rows is None for *_, rows in differing)
            raise AgreedError(
                f"ranks {min(differing.values())} and {rank} got different values of {', '.join(names)} for step {step}. "
                + (
                    "Give every rank the same global batch: shuffle with the same seed everywhere."
                    if of_all or program.replicas == 1
                    else f"Both belong to replica {next(iter(differing))[2]}, so give them the same rows (pipeline.data.rows)."
                )
            )


def together(program: Manifest, batch: Any, training: bool) -> Sequence[Mapping[str, Tensor]]:
    """List the batches of a step, each as its tensors by name: one, or several that stand for one that has all of them.

    A list or tuple with a tensor in it is one batch.

    Args:
        training: whether operators that mix examples do so; BatchNorm in evaluation does not.

    Raises:
        RuntimeProgramError: there is none, or several, and what is computed of an example depends on the other examples of its batch;
            or an argument that is no tensor is another than the model was compiled with.
    """
    one = not isinstance(batch, list | tuple) or hasattr(batch, "_asdict") or any(map(torch.is_tensor, batch))
    batches = [batch] if one else list(batch)
    if not batches:
        raise RuntimeProgramError("a step got no batch")
    given = [by_name(program, each) for each in batches]
    strange = next((each for each, named in zip(batches, given) if named is None), None)
    if strange is not None:
        names = ", ".join(f'"{spec.name}": ...' for spec in program.inputs if spec.role != "sample_keys")
        raise RuntimeProgramError(
            f"a batch has its tensors by name, {{{names}}}, and several batches are a list of such; this one is a {type(strange).__name__}"
        )
    reason = program.unsplittable or (program.coupled if training else None)
    if program.mode != "train":
        reason = "only losses add up, and this program returns outputs"
    if len(batches) > 1 and reason is not None:
        raise RuntimeProgramError(f"{len(batches)} consecutive batches are not equivalent to one large batch: {reason}")
    return [flattened(program, each) for each in given if each is not None]


def agree_on_number(batches: Sequence[object]) -> None:
    """Check that every rank was given as many batches; a collective call.

    Raises:
        AgreedError: on every rank.
    """
    numbers = gather_objects(len(batches))
    other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    if other is not None:
        raise AgreedError(
            f"rank 0 got {numbers[0]} batches for a step, but rank {other} {numbers[other]}; give every rank the same number"
        )


def check_shared(program: Manifest, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that inputs without a batch dim are the same in all of ``batches``, as in one batch that has all of them.

    Raises:
        RuntimeProgramError: one differs.
    """
    for spec in program.inputs if len(batches) > 1 else ():
        values = [batch[spec.name] for batch in batches if spec.batch_dim is None and spec.name in batch]
        if any(value is not values[0] and not torch.equal(value, values[0]) for value in values):
            raise RuntimeProgramError(
                f"the input {spec.name} has no batch dim, so it must be the same in all {len(batches)} batches of a step"
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
        self._required = {*names, *(program.count_inputs if count is not None else ())}
        replica, rows = groups.replica, share_of(program.rows, program.replicas, groups.replica)
        given = tuple(
            spec.name for spec in program.inputs if spec.name in self._required and spec.role != "sample_keys"
        )
        self.part = Part(replica, program.replicas, slice(rows.start, rows.stop), given)
        self._lengths = Lengths(program, groups, device)
        self._agreed = 0  # on how many batches at once
        self.given = 0
        """How often batches were given."""

    def values(
        self, batches: Sequence[Mapping[str, Tensor]], step: int, alike: bool = False
    ) -> Iterator[tuple[Manifest, dict[str, Tensor]]]:
        """Return for each batch the program of its length, and the inputs by name: checked, this replica's rows, with denominators and
        keys of random streams.

        Denominators are those of all batches together, and keys those of one batch that has all of them, so that the shares of the
        loss add up to its. A batch is moved to the device when it is taken.

        Args:
            alike: where lengths vary, those of all replicas are the same.

        Raises:
            RuntimeProgramError: a batch does not fit the program.
        """
        if len(batches) != self._agreed:
            agree_on_number(batches)
            self._agreed = len(batches)
        fitted = self._lengths.fitted(batches, alike)
        if is_compared(self.given):
            sampled = self.given > 0
            agree_on_batches(self._program, fitted, self.part.names, self.part.replica, step, sampled=sampled)
        self.given += 1
        for program, batch in fitted:
            check_batch(program, batch, self.part.names)
        check_shared(self._program, [batch for _, batch in fitted])
        given = [dict(batch) for _, batch in fitted]
        for spec in (spec for spec in self._program.inputs if spec.role == "sample_keys"):
            device = None if self._program.dropout == KERNEL else self._device
            keys: Sequence[Tensor] = [step_key(self.seed, step, device)] * len(batches)
            if spec.batch_dim is not None:
                keys = sample_keys(self.seed, step, len(batches) * spec.shape[0], device).split(spec.shape[0])
            for batch, own in zip(given, keys):
                batch.setdefault(spec.name, own)
        counts = self._global_counts(given)

        def value(batch: Mapping[str, Tensor], name: str) -> Tensor:
            return counts[name] if name in counts else self._taken(batch, name)

        return (
            (program, {name: value(batch, name) for name in self._names}) for (program, _), batch in zip(fitted, given)
        )

    def _taken(self, batch: Mapping[str, Tensor], name: str) -> Tensor:
        """This replica's rows of an input, on the device. Keys that kernels are seeded from stay on the host, which reads them."""
        if self._program.dropout == KERNEL and self._program.input(name).role == "sample_keys":
            return own_rows(self._program, name, batch[name], self.part.replica)
        return own_rows(self._program, name, batch[name], self.part.replica).to(self._device, non_blocking=True)

    def _global_counts(self, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The denominators of the loss over all rows of all batches, or with ``dp_mean`` over this replica's rows.

        Emitted code counts one microbatch at a time. What it counts stays on the device, in ``batches``.
        """
        if self._count is None:
            return {}
        parts: list[Sequence[Tensor]] = []
        with torch.no_grad():
            for batch in batches:
                inputs = {name: self._taken(batch, name) for name in self._program.count_inputs}
                batch.update(inputs)
                parts += [
                    self._count(**microbatch(self._program, inputs, i)) for i in range(self._program.microbatches)
                ]
        replicas = None if self._program.dp_mean else self._groups["batch"]
        return dict(zip(self._program.count_names, (sum_of_counts(shares, replicas) for shares in zip(*parts))))


def sum_of_counts(shares: Sequence[Tensor], replicas: dist.ProcessGroup | None) -> Tensor:
    """Add up what microbatches and ``replicas`` count: in 16 bits in fp32, since a sum of many would no longer change by what one adds."""
    dtype = shares[0].dtype
    narrow = dtype in (torch.bfloat16, torch.float16)
    total = torch.stack([share.float() if narrow else share for share in shares]).sum(0)
    if replicas is not None:
        dist.all_reduce(total, group=replicas)
    return total.to(dtype) if narrow else total


def _digest(value: Tensor, sampled: bool) -> str:
    flat = value.detach().reshape(-1)
    if sampled:  # an odd distance: other places in each row
        flat = flat[:: (flat.numel() // SAMPLED) | 1]
    flat = flat.cpu().contiguous().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
