"""Weights in safetensors files: each rank reads only what its stages hold, rank 0 writes the union.

    model.safetensors --by key, or by any name of its tie--> parameters, persistent buffers
    constants.safetensors --by full name--> non-persistent buffers
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from graphpar.runtime.distributed import gather_objects
from graphpar.runtime.errors import RuntimeProgramError, near_match

LISTED = 8
"""How many names an error lists before it counts the rest."""


class WeightFile:
    """A safetensors file, or a folder of shards with an index, from which tensors are read one by one."""

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

    def keys(self) -> Iterable[str]:
        return self._shard_of.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def read(self, name: str) -> Tensor:
        """The tensor of this name, read from the disk now."""
        tensor: Tensor = self._open(self._shard_of[name]).get_tensor(name)
        return tensor

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
        for name, shard in json.loads(path.read_text())["weight_map"].items():
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
                raise RuntimeProgramError(f"{path} is no safetensors file: {error}") from None
        return self._files[path]


def names_by_tie(ties: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """For every tied name, all the names of its tie."""
    return {name: tuple(group) for group in ties for name in group}


def non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` leaves out, by full name."""
    persistent = module.state_dict(keep_vars=True).keys()
    return {name: b for name, b in module.named_buffers(remove_duplicate=False) if name not in persistent}


def load_weights(module: nn.Module, path: str | Path, ties: Sequence[Sequence[str]]) -> None:
    """Copy a stage's parameters and persistent buffers from ``path``.

    Raises:
        RuntimeProgramError: a name is missing (under every name of its tie) or a shape differs.
    """
    tied = names_by_tie(ties)
    with WeightFile(path) as file:
        found: dict[str, str] = {}
        missing: list[str] = []
        wanted = module.state_dict(keep_vars=True)
        for name in wanted:
            source = next((other for other in (name, *tied.get(name, ())) if other in file), None)
            if source is None:
                missing.append(name)
            else:
                found[name] = source
        if missing:
            hint = near_match(missing[0], (name for name in file.keys() if name not in wanted))  # noqa: SIM118
            raise RuntimeProgramError(f"{path} has no value for {_listed(missing)}.{hint}")
        _copy({name: wanted[name] for name in found}, {name: file.read(key) for name, key in found.items()}, path)


def load_constants(module: nn.Module, path: Path) -> None:
    """Copy a stage's non-persistent buffers from ``constants.safetensors``."""
    wanted = non_persistent_buffers(module)
    if not wanted:
        return
    with WeightFile(path) as file:
        missing = [name for name in wanted if name not in file]
        if missing:
            raise RuntimeProgramError(f"{path} has no value for {_listed(missing)}. Emit the program again.")
        _copy(wanted, {name: file.read(name) for name in wanted}, path)


def _copy(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], path: str | Path) -> None:
    wrong = [
        f"{name} (expected {tuple(target.shape)}, found {tuple(values[name].shape)})"
        for name, target in targets.items()
        if target.shape != values[name].shape
    ]
    if wrong:
        raise RuntimeProgramError(f"{path} has values of other shapes: {_listed(wrong)}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


def save_weights(state: Mapping[str, Tensor], path: str | Path, ties: Sequence[Sequence[str]]) -> None:
    """Write the union of every rank's ``state`` into one file, on rank 0; a collective call.

    A tied parameter is stored under every name of its tie, as ``nn.Module.state_dict`` does. The file
    appears at ``path`` only when it is complete.
    """
    rank = dist.get_rank()
    described = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    everyone = gather_objects(described)
    owners: dict[str, int] = {}
    for owner, names in enumerate(everyone):
        for name in names:
            owners.setdefault(name, owner)
    union: dict[str, Tensor] = {}
    for name, owner in owners.items():
        shape, dtype = everyone[owner][name]
        if owner == rank == 0:
            union[name] = state[name].detach().cpu().clone().contiguous()
        elif owner == rank:
            dist.send(state[name].detach().contiguous(), dst=0)
        elif rank == 0:
            received = torch.empty(shape, dtype=dtype, device=_wire_device(state))
            dist.recv(received, src=owner)
            union[name] = received.cpu()
    if rank == 0:
        for group in ties:
            value = next((union[name] for name in group if name in union), None)
            if value is not None:
                union.update({name: value.clone() for name in group if name not in union})
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        save_file(union, str(part), metadata={"format": "pt"})
        part.replace(target)
    if dist.get_world_size() > 1:
        dist.barrier()


def _wire_device(state: Mapping[str, Tensor]) -> torch.device:
    """The device on which the process group can receive."""
    on_gpu = dist.get_backend() == "nccl"
    return next(iter(state.values())).device if state else torch.device("cuda" if on_gpu else "cpu")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
