"""Weights in safetensors files of whole tensors: each rank reads its shards; rank 0 writes them, one at a time.

model.safetensors --by key, or by any name of its tie--> whole tensor --local_shard--> parameters, persistent buffers
constants.safetensors --by full name--> whole tensor --local_shard--> non-persistent buffers
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from graphpar.runtime.distributed import agreed
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import Shard, local_shape, local_shard
from graphpar.runtime.manifest import Manifest, under_every_name
from graphpar.runtime.stages.modules import of_all_stages
from graphpar.runtime.state.fully_sharded import local
from graphpar.runtime.state.host import copy_in

Put = Callable[[Tensor, Tensor], None]
"""Gives a tensor of a stage this rank's part of other values."""
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
        # A view of the mapped file: only what is used of it is read, once by all processes of a machine.
        with torch._C.DisableTorchFunction():  # it takes bytes, which in_double must not take for numbers
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
    save_tensors(owned, path, metadata={"format": "pt"})


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


def known_as(name: str, program: Manifest, tied: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names that a tensor may have in a file of weights."""
    names = (name, *tied.get(name, ()))
    base = [base_name(each) for each in names] if program.adapters else []
    inner = [each.removeprefix(program.wrapped) for each in (*names, *base)] if program.wrapped else []
    return tuple(dict.fromkeys([*names, *base, *inner]))


def own_name(name: str, program: Manifest) -> str:
    """Return what a tensor is called in the model that a program adds adapters to, or wraps."""
    return (base_name(name) if program.adapters else name).removeprefix(program.wrapped)


def without_adapters(names: Iterable[str], path: str | Path, program: Manifest) -> list[str]:
    """Leave the adapters out of ``names``, where the file ``path`` has none of them: the weights of a base model."""
    adapters = {name for adapter in program.adapters for name in (adapter.a, adapter.b)}
    if not adapters:
        return list(names)
    with WeightFile(path) as file:
        return list(names) if any(name in file for name in adapters) else [n for n in names if n not in adapters]


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
    required = {name: known_as(name, program, tied) for name in without_adapters(names, path, program)}
    known = {other for others in required.values() for other in others}
    with WeightFile(path) as file:
        unknown = [name for name in file if name not in known]
        missing = [name for name, others in required.items() if not any(other in file for other in others)]
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


def load_weights(module: nn.Module, path: str | Path, program: Manifest, place: Mapping[str, int], put: Put) -> None:
    """Copy a stage's parameters and persistent buffers from ``path``, sharded for the mesh coordinates ``place``.

    Raises:
        RuntimeProgramError: a name is missing (under every name of its tie), a shape differs, or the values under tied names do.
    """
    tied = names_by_tie(program.ties)
    with WeightFile(path) as file:
        found: dict[str, str] = {}
        missing: list[str] = []
        held = module.state_dict(keep_vars=True)
        required = {name: held[name] for name in without_adapters(held, path, program)}
        for name in required:
            source = next((other for other in known_as(name, program, tied) if other in file), None)
            if source is None:
                missing.append(name)
            else:
                found[name] = source
                _check_tied(source, [other for other in tied.get(name, ()) if other in file], file)
        if missing:
            hint = near_match(missing[0], (name for name in file if name not in required))
            raise RuntimeProgramError(f"{path} has no value for {listed(missing)}.{hint}")
        _copy(required, found, file, program, place, put)


def load_all(
    stages: Sequence[nn.Module],
    path: Path,
    program: Manifest,
    groups: Groups,
    put: Put,
    draw: Callable[[], None],
    *,
    strict: bool,
) -> None:
    """Fill this rank's stages from ``path``; a collective call.

    Args:
        put: gives a tensor its part of other values.
        draw: gives adapters, of which the file of a base model has none, the values with which they begin.

    Raises:
        RuntimeProgramError: on all ranks, where it does not fit one; with ``strict`` also if it has what no stage takes.
    """
    names = of_all_stages(
        lambda own: [name for stage in own for name in stage.state_dict(keep_vars=True)], stages, program, groups
    )
    held = [name for own in names for name in own]
    with agreed():
        check_names(path, held, program, strict=False)
    with agreed():
        for stage in stages:
            load_weights(stage, path, program, groups.place, put)
        if without_adapters(held, path, program) != held:
            draw()
        if strict:
            check_names(path, held, program)


def _check_tied(source: str, names: Sequence[str], file: WeightFile) -> None:
    """Check that a file which has a tied tensor under several names has one value for it.

    Raises:
        RuntimeProgramError: it has others.
    """
    for name in names:
        if name != source and not torch.equal(file[name], file[source]):
            raise RuntimeProgramError(
                f"{file.path} has different values for {name} than for {source}, which are one tensor in the model; leave one of them out"
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
        required = without_adapters(held, path, program)
        keys = {name: next(other for other in known_as(name, program, tied) if other in file) for name in required}
        _check_shapes({name: held[name] for name in required}, keys, file, program)


def load_constants(module: nn.Module, path: Path, program: Manifest, place: Mapping[str, int]) -> None:
    """Copy a stage's non-persistent buffers from ``constants.safetensors``, sharded for ``place``."""
    required = non_persistent_buffers(module)
    if not required:
        return
    with WeightFile(path) as file:
        missing = [name for name in required if name not in file]
        if missing:
            raise RuntimeProgramError(f"{path} has no value for {listed(missing)}. Emit the program again.")
        _copy(required, {name: name for name in required}, file, program, place, copy_in)


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
    put: Put,
) -> None:
    """Fill each target with its shard of the tensor ``keys[name]``; one whole tensor is in memory at a time."""
    _check_shapes(targets, keys, file, program)
    for name, target in targets.items():
        fill(target, file[keys[name]], name, program, place, put)


def _check_shapes(targets: Mapping[str, Tensor], keys: Mapping[str, str], file: WeightFile, program: Manifest) -> None:
    shapes = {name: whole_shape(program, name, target) for name, target in targets.items()}
    wrong = [
        f"{name} (expected {shape}, found {file.shape(keys[name])})"
        for name, shape in shapes.items()
        if shape != file.shape(keys[name])
    ]
    if wrong:
        raise RuntimeProgramError(f"{file.path} has values of other shapes: {listed(wrong)}")


def fill(target: Tensor, whole: Tensor, name: str, program: Manifest, place: Mapping[str, int], put: Put) -> None:
    """Have ``put`` copy this rank's shard of ``whole`` into ``target``."""
    part = local(target)
    shard = local_shard(whole, program.stored(name), program.mesh, place)
    # FSDP2 stores no padding
    put(target, shard if part.shape == shard.shape else shard.narrow(0, 0, part.shape[0]))


def held_names(stages: Sequence[nn.Module], program: Manifest) -> set[str]:
    """Return the names of what stages hold, and all names of a tie of which they hold one."""
    tied = names_by_tie(program.ties)
    return {each for stage in stages for name in stage.state_dict(keep_vars=True) for each in tied.get(name, (name,))}


def fill_all(
    stages: Sequence[nn.Module],
    values: Iterable[tuple[str, Tensor]],
    program: Manifest,
    place: Mapping[str, int],
    put: Put,
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
            fill(target, value, own, program, place, put)
        left.discard(first)
    if left:
        raise RuntimeProgramError(f"the model is built without {listed(sorted(left))}")


@dataclass(frozen=True)
class Unread:
    """A whole tensor that is read when it is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_whole(tensors: Mapping[str, Unread], path: str | Path, ties: Sequence[Sequence[str]]) -> int:
    """Write whole tensors into one safetensors file, tied ones under every name of their tie; one is in memory at a time.

    The file appears when it is complete.

    Returns:
        How many the file has.
    """
    target, named = Path(path), under_every_name(tensors, ties)
    # safetensors' order: those of wide elements first, so that all are aligned
    names = sorted(named, key=lambda name: (-named[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        each = named[name]
        header[name] = {
            "dtype": _dtype(each.dtype),
            "shape": list(each.shape),
            "data_offsets": [end, end := end + each.nbytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(named[name].read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return len(named)


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    """What a dtype is called in a safetensors file."""
    file = save({"": torch.empty(0, dtype=dtype)})
    found: str = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])[""]["dtype"]
    return found


def listed(names: Sequence[str]) -> str:
    """Name the first few, and count the rest."""
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path``. Where that fails, no part of the file stays.

    Raises:
        OSError: the system's own, which safetensors tells in words alone.
    """
    new = not os.path.lexists(path)
    try:
        save_file(dict(tensors), str(path), metadata=metadata)
    except SafetensorError as error:
        if new:
            Path(path).unlink(missing_ok=True)
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
