"""Weights in safetensors files of whole tensors: each rank reads its shards, rank 0 writes the joined shards.

model.safetensors --by key, or by any name of its tie--> whole tensor --local_shard--> parameters, persistent buffers
constants.safetensors --by full name--> whole tensor --local_shard--> non-persistent buffers
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.fully_sharded import local, padded
from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import Shard, joined_all, local_shape, local_shard, rank_at, shard_places
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.tensor_file import save_tensors

LISTED = 8
"""How many names an error lists before it counts the rest."""


class WeightFile(Mapping[str, Tensor]):
    """A safetensors file, or a folder of them with or without an index: tensors by name, each read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[Path, safe_open] = {}
        self._shard_of: dict[str, Path] = {}
        if self.path.is_dir():
            self._read_folder()
        elif self.path.name.endswith(".index.json"):
            self._read_index(self.path)
        else:
            self._read_shard(self.path)

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def __getitem__(self, name: str) -> Tensor:
        with torch._C.DisableTorchFunction():  # it reads bytes, which in_double must not take for numbers
            tensor: Tensor = self._open(self._shard_of[name]).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of this name; its values are not read."""
        return tuple(self._open(self._shard_of[name]).get_slice(name).get_shape())

    def _read_folder(self) -> None:
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        shards = sorted(self.path.glob("*.safetensors"))
        if indices:
            self._read_index(indices[0])
        elif shards:
            for shard in shards:
                self._read_shard(shard)
        else:
            raise RuntimeProgramError(f"there are no safetensors files in {self.path}")

    def _read_index(self, path: Path) -> None:
        for name, shard in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
            self._shard_of[name] = path.parent / shard

    def _read_shard(self, path: Path) -> None:
        for name in self._open(path).keys():  # noqa: SIM118 (not a mapping)
            self._shard_of[name] = path

    def _open(self, path: Path) -> safe_open:
        if path not in self._files:
            try:
                self._files[path] = safe_open(str(path), framework="pt", device="cpu").__enter__()
            except FileNotFoundError:
                raise RuntimeProgramError(f"there is no weight file {path}") from None
            except SafetensorError as error:
                raise RuntimeProgramError(f"{path} is not a safetensors file: {error}") from None
        return self._files[path]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to a safetensors file; names that share memory get a copy each, since such a file holds none."""
    seen: set[int] = set()
    owned: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        owned[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(owned[name].untyped_storage().data_ptr())
    save_tensors(owned, path)


def no_weights(program: Manifest) -> str:
    """Say that a program has no weights of its own, and which command writes them."""
    folder = _short(program.folder)
    message = f"there are no weights in {folder}: name a safetensors file of the model's state_dict with --weights FILE"
    if program.model_file is None:
        return f"{message}, or save the program with weights: parts.save(folder, weights=model.state_dict())"
    named = program.folder / program.model_file
    model = _short(named) if program.model_file.endswith(".py") else program.model_file
    command = ["graphpar", "compile", model, "--plan", folder, "--weights", "-o", folder]
    return f"{message}, or write the initial ones first: {shlex.join(command)}"


def _short(path: Path) -> str:
    """Shorten a path to what one would type here."""
    return min(os.path.normpath(path), os.path.relpath(path), key=len)


def names_by_tie(ties: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Map every tied name to all names of its tie."""
    return {name: tuple(group) for group in ties for name in group}


def base_name(name: str) -> str:
    """Return what a tensor is called in the model without adapters, where the package ``peft`` has wrapped its layers."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _known_as(name: str, program: Manifest, tied: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names that a tensor may have in a file of weights."""
    names = (name, *tied.get(name, ()))
    base = (base_name(each) for each in names if program.adapters and base_name(each) != each)
    inner = (
        each.removeprefix(program.wrapped) for each in names if program.wrapped and each.startswith(program.wrapped)
    )
    return (*names, *base, *inner)


def without_adapters(names: Iterable[str], path: str | Path, program: Manifest) -> list[str]:
    """Leave the adapters out of ``names``, where the file ``path`` has none of them: the weights of a base model."""
    adapters = {name for adapter in program.adapters for name in (adapter.a, adapter.b)}
    if not adapters:
        return list(names)
    with WeightFile(path) as file:
        return list(names) if any(name in file for name in adapters) else [n for n in names if n not in adapters]


def parameters_by_name(stages: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> Mapping[str, list[nn.Parameter]]:
    """Collect the distinct parameter objects of these stages, by the first name of their tie (or their own)."""
    tied = names_by_tie(ties)
    held: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            copies = held.setdefault(tied.get(name, (name,))[0], [])
            if not any(parameter is copy for copy in copies):
                copies.append(parameter)
    return held


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that ``state_dict`` leaves out, by full name."""
    persistent = module.state_dict(keep_vars=True).keys()
    return {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in persistent}


def check_names(path: str | Path, names: Iterable[str], program: Manifest, *, strict: bool = True) -> None:
    """Check that ``path`` has the tensors that stages hold (``names``, of all stages), under any name of a tie, and, if
    ``strict``, no others.

    Raises:
        RuntimeProgramError: it lacks some or has others: they would be of another model, or under names that this one does
            not know.
    """
    tied = names_by_tie(program.ties)
    wanted = {name: _known_as(name, program, tied) for name in without_adapters(names, path, program)}
    known = {other for others in wanted.values() for other in others}
    with WeightFile(path) as file:
        unknown = [name for name in file if name not in known]
        missing = [name for name, others in wanted.items() if not any(other in file for other in others)]
    if missing:
        raise RuntimeProgramError(f"{path} has no value for {listed(missing)}.{near_match(missing[0], unknown)}")
    if not strict:
        return
    if unknown:
        hint = near_match(unknown[0], known)
        raise RuntimeProgramError(
            f"{path} has values that no stage of the program takes: {listed(unknown)}.{hint} If they are to be left out, "
            "load the file with strict=False."
        )


def load_weights(module: nn.Module, path: str | Path, program: Manifest, place: Mapping[str, int]) -> None:
    """Copy a stage's parameters and persistent buffers from ``path``, sharded for the mesh coordinates ``place``.

    Raises:
        RuntimeProgramError: a name is missing (under every name of its tie), a shape differs, or the values under tied names do.
    """
    tied = names_by_tie(program.ties)
    with WeightFile(path) as file:
        found: dict[str, str] = {}
        missing: list[str] = []
        held = module.state_dict(keep_vars=True)
        wanted = {name: held[name] for name in without_adapters(held, path, program)}
        for name in wanted:
            source = next((other for other in _known_as(name, program, tied) if other in file), None)
            if source is None:
                missing.append(name)
            else:
                found[name] = source
                _check_tied(source, [other for other in tied.get(name, ()) if other in file], file)
        if missing:
            hint = near_match(missing[0], (name for name in file if name not in wanted))
            raise RuntimeProgramError(f"{path} has no value for {listed(missing)}.{hint}")
        _copy(wanted, found, file, program, place)


def _check_tied(source: str, names: Sequence[str], file: WeightFile) -> None:
    """Check that a file which has a tied tensor under several names has one value for it.

    Raises:
        RuntimeProgramError: it has others.
    """
    for name in names:
        if name != source and not torch.equal(file[name], file[source]):
            raise RuntimeProgramError(
                f"{file.path} has other values for {name} than for {source}, which are one tensor in the model; leave one of them out"
            )


def check_file(path: str | Path, stages: Sequence[nn.Module], program: Manifest) -> None:
    """Check the names and shapes of a weight file against all stages of a program, which need no values; nothing is read into them.

    Raises:
        RuntimeProgramError: it is no weight file, or one of another model.
    """
    held = {name: tensor for stage in stages for name, tensor in stage.state_dict(keep_vars=True).items()}
    check_names(path, held, program)
    tied = names_by_tie(program.ties)
    with WeightFile(path) as file:
        wanted = without_adapters(held, path, program)
        keys = {name: next(other for other in _known_as(name, program, tied) if other in file) for name in wanted}
        _check_shapes({name: held[name] for name in wanted}, keys, file, program)


def load_constants(module: nn.Module, path: Path, program: Manifest, place: Mapping[str, int]) -> None:
    """Copy a stage's non-persistent buffers from ``constants.safetensors``, sharded for ``place``."""
    wanted = non_persistent_buffers(module)
    if not wanted:
        return
    with WeightFile(path) as file:
        missing = [name for name in wanted if name not in file]
        if missing:
            raise RuntimeProgramError(f"{path} has no value for {listed(missing)}. Emit the program again.")
        _copy(wanted, {name: name for name in wanted}, file, program, place)


def whole_shape(program: Manifest, name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that a stage's tensor has in the weight file."""
    sharded = any(isinstance(kind, Shard) for kind in program.spec(name).values())
    return program.shapes[name] if sharded else tuple(tensor.shape)


def check_local_shapes(module: nn.Module, program: Manifest) -> None:
    """Compare the shapes of the stage's tensors with the plan's shards.

    Raises:
        RuntimeProgramError: the stage file and ``plan.json`` disagree.
    """
    held = {**module.state_dict(keep_vars=True), **non_persistent_buffers(module)}
    for name, tensor in held.items():
        whole = whole_shape(program, name, tensor)
        expected = local_shape(whole, program.spec(name), program.mesh)
        if tuple(tensor.shape) != expected:
            raise RuntimeProgramError(
                f"the stage holds {name} as {list(tensor.shape)}; plan.json shards {list(whole)} into {list(expected)}"
            )


def _copy(
    targets: Mapping[str, Tensor],
    keys: Mapping[str, str],
    file: WeightFile,
    program: Manifest,
    place: Mapping[str, int],
) -> None:
    """Fill each target with its shard of the tensor ``keys[name]``; one whole tensor is in memory at a time."""
    _check_shapes(targets, keys, file, program)
    for name, target in targets.items():
        fill(target, file[keys[name]], name, program, place)


def _check_shapes(targets: Mapping[str, Tensor], keys: Mapping[str, str], file: WeightFile, program: Manifest) -> None:
    shapes = {name: whole_shape(program, name, target) for name, target in targets.items()}
    wrong = [
        f"{name} (expected {shape}, found {file.shape(keys[name])})"
        for name, shape in shapes.items()
        if shape != file.shape(keys[name])
    ]
    if wrong:
        raise RuntimeProgramError(f"{file.path} has values of other shapes: {listed(wrong)}")


def fill(target: Tensor, whole: Tensor, name: str, program: Manifest, place: Mapping[str, int]) -> None:
    """Copy this rank's shard of ``whole`` into ``target``."""
    part = local(target)
    shard = local_shard(whole, program.stored(name), program.mesh, place)
    with torch.no_grad():
        part.copy_(shard if part.shape == shard.shape else shard.narrow(0, 0, part.shape[0]))  # FSDP2 stores no padding


def fill_all(
    stages: Sequence[nn.Module],
    values: Iterable[tuple[str, Tensor]],
    program: Manifest,
    place: Mapping[str, int],
) -> None:
    """Copy each of the whole ``values`` into what the stages hold of it, under any name of its tie, one after the other.

    Raises:
        RuntimeProgramError: a value has another shape, or something that a stage holds has none.
    """
    tied = names_by_tie(program.ties)
    held: dict[str, list[tuple[str, Tensor]]] = {}
    for stage in stages:
        for name, target in stage.state_dict(keep_vars=True).items():
            held.setdefault(tied.get(name, (name,))[0], []).append((name, target))
    left = set(held)
    for name, value in values:
        first = tied.get(name, (name,))[0]
        for own, target in held.get(first, ()):
            if (shape := whole_shape(program, own, target)) != tuple(value.shape):
                raise RuntimeProgramError(
                    f"{name} is built with the shape {tuple(value.shape)}; the program has {shape}"
                )
            fill(target, value, own, program, place)
        left.discard(first)
    if left:
        raise RuntimeProgramError(f"the model is built without {listed(sorted(left))}")


def save_weights(state: Mapping[str, Tensor], path: str | Path, program: Manifest, groups: Groups) -> None:
    """Write the whole tensors of every stage's ``state`` into one file, on rank 0; a collective call.

    Rank 0 receives the shards of one tensor after the other; a replicated tensor comes from one rank only. A tied parameter
    is stored under every name of its tie, as ``nn.Module.state_dict`` does. The file appears at ``path`` only when it
    is complete.
    """
    union = collected(state, program, groups)
    if groups.rank == 0:
        write_whole(union, path, program.ties)
    if dist.get_world_size() > 1:
        dist.barrier()


def write_whole(tensors: dict[str, Tensor], path: str | Path, ties: Sequence[Sequence[str]]) -> None:
    """Write whole tensors into one file, which appears when it is complete; tied ones under every name of their tie."""
    for group in ties:
        value = next((tensors[name] for name in group if name in tensors), None)
        if value is not None:
            tensors.update({name: value.clone() for name in group if name not in tensors})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    save_tensors(tensors, part, metadata={"format": "pt"})
    part.replace(target)


def collected(state: Mapping[str, Tensor], program: Manifest, groups: Groups) -> dict[str, Tensor]:
    """Join the shards of every stage's tensors on rank 0, one tensor after the other; empty on other ranks. A collective call."""
    described = {name: (tuple(padded(t).shape), t.dtype, whole_shape(program, name, t)) for name, t in state.items()}
    everyone = groups.gather("pp", described)
    owners: dict[str, int] = {}
    for stage, names in enumerate(everyone):
        for name in names:
            owners.setdefault(name, stage)
    union: dict[str, Tensor] = {}
    for name, stage in owners.items():
        shape, dtype, whole = everyone[stage][name]
        spec = program.stored(name)
        ranks = [rank_at({**at, "pp": stage}, groups.degrees) for at in shard_places(spec, groups.degrees)]
        if groups.rank == 0:
            pieces = [
                (padded(state[name].detach()) if rank == 0 else _received(shape, dtype, rank, state)).cpu()
                for rank in ranks
            ]
            union[name] = joined_all(pieces, whole, spec, groups.degrees).clone(memory_format=torch.contiguous_format)
        elif groups.rank in ranks:
            dist.send(padded(state[name].detach()).contiguous(), dst=0)
    return union


def _received(shape: Sequence[int], dtype: torch.dtype, rank: int, state: Mapping[str, Tensor]) -> Tensor:
    received = torch.empty(shape, dtype=dtype, device=_wire_device(state))
    dist.recv(received, src=rank)
    return received


def _wire_device(state: Mapping[str, Tensor]) -> torch.device:
    """The device on which the process group can receive."""
    on_gpu = dist.get_backend() == "nccl"
    return next(iter(state.values())).device if state else torch.device("cuda" if on_gpu else "cpu")


def listed(names: Sequence[str]) -> str:
    """Name the first few, and count the rest."""
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
