"""Low-rank adapters (LoRA) of a program's layers: their checkpoints in the format of the package ``peft``, and merging them.

    adapter_model.safetensors   base_model.model.layers.0.q_proj.lora_A.weight [rank, in], ...lora_B.weight [out, rank]
    adapter_config.json         ranks, alphas, and which layers

The files hold whole tensors, so that programs of any plan, ``peft`` and one device read them alike.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.checkpoints.weights import (
    Unread,
    WeightFile,
    base_name,
    fill,
    listed,
    save_tensors,
    whole_shape,
    write_whole,
)
from graphpar.runtime.distributed import agreed
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import joined_all, local_shard, shard_places
from graphpar.runtime.manifest import Manifest, under_every_name
from graphpar.runtime.plan_record import Adapter
from graphpar.runtime.state.fully_sharded import local, padded
from graphpar.runtime.state.parameters import Replicated

_MODEL, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def product(adapter: Adapter, a: Tensor, b: Tensor) -> Tensor:
    """Compute what an adapter adds to its weight, in at least fp32: ``scale * b @ a``, transposed where the weight is [in, out]."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    found = adapter.scale * (b.to(dtype) @ a.to(dtype))
    return found.mT if adapter.transposed else found


class Adapters:
    """The adapters of a program, on this rank. All methods but :meth:`unmerge` are collective calls.

    Args:
        parameters: this rank's.
        save_whole: makes a file of whole tensors, of all or those of these names.
    """

    def __init__(
        self,
        parameters: Replicated,
        save_whole: Callable[[Path, Callable[[Mapping[str, Unread]], object], Collection[str] | None], None],
    ) -> None:
        if not parameters.program.adapters:
            raise RuntimeProgramError(
                "the program has no adapters; make them with graphpar.lora, or with peft, before the model is compiled"
            )
        self._parameters, self._program, self._groups = parameters, parameters.program, parameters.groups
        self._save_whole = save_whole
        self._before: dict[str, Tensor] = {}  # of merged tensors
        self._versions: dict[str, tuple[int, int]] = {}

    def save(self, folder: str | Path) -> None:
        """Write the adapters of all stages, and nothing else, into ``folder``, as ``peft`` writes them."""
        self.check_apart("save")
        adapters, ties = self._program.adapters, self._program.ties
        required = {name for adapter in adapters for name in (adapter.a, adapter.b)}
        self._save_whole(
            Path(folder) / _MODEL,
            lambda stored: write_adapters(adapters, under_every_name(stored, ties), Path(folder)),
            required,
        )

    def load(self, folder: str | Path) -> None:
        """Fill the adapters from a folder that a program of any plan wrote, or ``peft``.

        Raises:
            RuntimeProgramError: there are none, or those of other layers, ranks or scales, or of a base model of other sizes.
        """
        self.check_apart("load")
        held = self._held()
        with agreed():
            for name, value in _read_adapters(Path(folder), self._program, held):
                fill(held[name], value, name, self._program, self._groups.place, self._parameters.put)
            self._parameters.written()

    def draw(self, seed: int) -> None:
        """Give the adapters values to begin with: ``a`` is drawn, alike for every plan, and ``b`` is zero.

        As ``nn.Linear`` and ``peft`` do it, uniform within ``1 / sqrt(in)``. Not a collective call.
        """
        self.check_apart("draw")
        held = self._held()
        with torch.no_grad():
            for index, adapter in enumerate(self._program.adapters):
                if adapter.a in held:
                    shape = whole_shape(self._program, adapter.a, held[adapter.a])
                    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed * 1_000_003 + index))
                    fill(
                        held[adapter.a],
                        (drawn * 2 - 1) / shape[-1] ** 0.5,
                        adapter.a,
                        self._program,
                        self._groups.place,
                        self._parameters.put,
                    )
                    self._parameters.put(held[adapter.b], torch.zeros_like(local(held[adapter.b])))
        self._parameters.written()

    def merge(self) -> None:
        """Add each adapter's product to the weight that it adapts, and set the adapter to zero, until :meth:`unmerge`.

        The values of before are kept in host memory.
        """
        self.check_apart("merge")
        self._check_mergeable()
        held = self._held()
        main = held | self._parameters.values()
        with torch.no_grad():
            for name, value in merged(main, self._program, self._groups):
                self._replace(held[name], name, main[name], value)
            for adapter in self._program.adapters:
                if adapter.b in held:
                    self._replace(held[adapter.b], adapter.b, main[adapter.b], torch.zeros_like(local(held[adapter.b])))
        self._parameters.written()
        self._versions = {name: _version(held[name]) for name in self._before}

    def _replace(self, tensor: Tensor, name: str, main: Tensor, value: Tensor) -> None:
        if name not in self._before:
            self._before[name] = local(main).detach().to("cpu", copy=True)
        self._parameters.put(tensor, value)

    def unmerge(self) -> None:
        """Undo :meth:`merge`, to the bit."""
        if not self._before:
            raise RuntimeProgramError("the adapters are not merged; call merge() first")
        held = self._held()
        changed = [name for name, version in self._versions.items() if _version(held[name]) != version]
        if changed:
            self._before.clear()
            raise RuntimeProgramError(
                f"{listed(changed)} were changed after merge(), by a step or by loading, so they can't be restored; "
                "call unmerge() before such changes"
            )
        for name, value in self._before.items():
            self._parameters.put(held[name], value)
        self._before.clear()
        self._parameters.written()

    def save_merged(self, path: str | Path) -> None:
        """Write the base model's weights, with the adapters added to them, into one safetensors file.

        The names are those of the model without adapters, which loads them as its own.
        """
        self.check_apart("save_merged")
        self._check_mergeable()
        adapters, ties = self._program.adapters, self._program.ties

        def join(stored: Mapping[str, Unread]) -> None:
            found, own = base_weights(adapters, ties, under_every_name(stored, ties))
            write_whole(found, path, own)

        self._save_whole(Path(path), join, None)

    def _held(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers (its shards), by name."""
        self._parameters.settle()
        return {
            name: value for stage in self._parameters.stages for name, value in stage.state_dict(keep_vars=True).items()
        }

    def check_apart(self, what: str) -> None:
        """Check that the adapters are not merged.

        Raises:
            RuntimeProgramError: they are, and ``what`` would take merged weights for the model's, or be lost by :meth:`unmerge`.
        """
        if self._before:
            raise RuntimeProgramError(f"the adapters are merged; call unmerge() before {what}()")

    def _check_mergeable(self) -> None:
        check_mergeable(self._program.adapters)


def check_mergeable(adapters: Sequence[Adapter]) -> None:
    """Check that nothing but their layers reads the weights that adapters are added to.

    Raises:
        RuntimeProgramError: something does.
    """
    shared = [adapter.layer for adapter in adapters if adapter.shared]
    if shared:
        raise RuntimeProgramError(
            f"the adapters of {listed(shared)} can't be merged: something else in the model reads the same weight, such as a tied "
            "embedding, and would read the product with it"
        )


# ---- checkpoints -----------------------------------------------------------------------------------------------


def write_adapters(adapters: Sequence[Adapter], whole: Mapping[str, Unread], folder: Path) -> None:
    """Write adapters as ``peft`` writes them; the tensors appear last."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{_MODEL}.part"
    save_tensors(_to_peft(adapters, whole), part, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(_config(adapters), indent=2) + "\n", encoding="utf-8")
    part.replace(folder / _MODEL)


def base_weights(
    adapters: Sequence[Adapter], ties: Sequence[Sequence[str]], whole: Mapping[str, Unread]
) -> tuple[dict[str, Unread], list[tuple[str, ...]]]:
    """Return the weights of the model without adapters, with their products added, under its own names; and which of these are tied."""
    of_adapters = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    found = dict(whole)
    for adapter in adapters:
        added = functools.partial(_added, adapter, whole[adapter.weight], whole[adapter.a], whole[adapter.b])
        found[adapter.weight] = replace(whole[adapter.weight], read=added)
    own = [group for group in ties if not of_adapters & set(group)]
    of_adapters |= {name for group in ties if group not in own for name in group}
    named = {base_name(name): value for name, value in found.items() if name not in of_adapters}
    return named, [tuple(map(base_name, group)) for group in own]


def _added(adapter: Adapter, weight: Unread, a: Unread, b: Unread) -> Tensor:
    return (weight.read() + product(adapter, a.read(), b.read())).to(weight.dtype)


def _keys(adapters: Sequence[Adapter]) -> dict[str, str]:
    """The name in a file of each tensor: ``peft`` wraps a module once for each of its stacked weights, the last one outside."""
    later: dict[str, int] = {}
    found = {}
    for adapter in reversed(adapters):
        layer = adapter.layer
        if adapter.stacked:
            later[layer] = later.get(layer, -1) + 1
            layer += ".base_layer" * later[layer]
        prefix = "" if layer.startswith(_PREFIX) else _PREFIX
        found[adapter.a], found[adapter.b] = f"{prefix}{layer}.lora_A.weight", f"{prefix}{layer}.lora_B.weight"
    return found


def _to_peft(adapters: Sequence[Adapter], whole: Mapping[str, Unread]) -> dict[str, Tensor]:
    keys, found = _keys(adapters), {}
    for adapter in adapters:
        a, b = whole[adapter.a].read(), whole[adapter.b].read()
        if adapter.stacked:  # [experts, rank, n] -> [experts * rank, n]; [experts, m, rank] -> [m, rank * experts]
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        found[keys[adapter.a]], found[keys[adapter.b]] = a.contiguous(), b.contiguous()
    return found


def _from_peft(adapter: Adapter, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    if not adapter.stacked:
        return a, b
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _config(adapters: Sequence[Adapter]) -> dict[str, Any]:
    first = adapters[0]
    paths = {adapter: _path(adapter) for adapter in adapters}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "bias": "none",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "use_rslora": False,
        "fan_in_fan_out": any(adapter.transposed for adapter in adapters),
        "target_modules": sorted({path for adapter, path in paths.items() if not adapter.stacked}),
        "target_parameters": [path for adapter, path in paths.items() if adapter.stacked] or None,
        "rank_pattern": {path: adapter.rank for adapter, path in paths.items() if adapter.rank != first.rank},
        "alpha_pattern": {path: adapter.alpha for adapter, path in paths.items() if adapter.alpha != first.alpha},
        "lora_dropout": 0.0,
    }


def _path(adapter: Adapter) -> str:
    """What ``peft`` calls it: the layer's path in the base model, or the stacked weight's name."""
    layer = adapter.layer.removeprefix(_PREFIX)
    return f"{layer}.{adapter.weight.rpartition('.')[2]}" if adapter.stacked else layer


def _read_adapters(source: Path, program: Manifest, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of this rank's stages from a folder, whole, under the program's names."""
    adapters = program.adapters
    if not (source / _MODEL).is_file():
        raise RuntimeProgramError(f"{source} has no {_MODEL}")
    with WeightFile(source / _MODEL) as file:
        keys = _keys(adapters)
        missing = [key for key in keys.values() if key not in file]
        unknown = [key for key in file if key not in set(keys.values())]
        if missing or unknown:
            what = f"no value for {listed(missing)}" if missing else f"values for no layer: {listed(unknown)}"
            hint = near_match(missing[0], unknown) if missing else ""
            raise RuntimeProgramError(
                f"{source} has {what}; its adapters are of other layers or of another model.{hint}"
            )
        _check_scales(source, adapters)
        for adapter in adapters:
            if adapter.a not in held:
                continue
            shapes = [whole_shape(program, name, held[name]) for name in (adapter.a, adapter.b)]
            read = _from_peft(adapter, file[keys[adapter.a]], file[keys[adapter.b]], shapes[0][0])
            for name, value, shape in zip((adapter.a, adapter.b), read, shapes):
                if tuple(value.shape) != shape:
                    raise RuntimeProgramError(
                        f"{source} has {keys[name]} of the shape {list(value.shape)}, where the program has {list(shape)}: "
                        "its rank or its base model is another"
                    )
                yield name, value


def _check_scales(source: Path, adapters: Sequence[Adapter]) -> None:
    """Check that the file's adapters are scaled as the program scales them."""
    if not (source / _CONFIG).is_file():
        return
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    for adapter in adapters:
        path = _path(adapter)
        rank = _given(config.get("rank_pattern") or {}, path, config.get("r"))
        alpha = _given(config.get("alpha_pattern") or {}, path, config.get("lora_alpha"))
        if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
            continue
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        if abs(scale - adapter.scale) > 1e-6 * abs(adapter.scale):
            raise RuntimeProgramError(
                f"{source} scales the adapter of {path} by {scale:g} (alpha {alpha:g}, rank {rank}), and the program by "
                f"{adapter.scale:g}; compile the model with that alpha"
            )


def _given(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value for ``path``; a pattern is a path, or the end of one."""
    return next((value for key, value in patterns.items() if path == key or path.endswith(f".{key}")), default)


# ---- merging ---------------------------------------------------------------------------------------------------


def _version(tensor: Tensor) -> tuple[int, int]:
    """What changes whenever a tensor is written: an optimizer writes to a DTensor, and loading to the shard in it."""
    return tensor._version, local(tensor)._version


def merged(held: Mapping[str, Tensor], program: Manifest, groups: Groups) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shard of each adapted weight with its adapter's product added, under its name; a collective call."""
    for adapter in program.adapters:
        if adapter.a not in held or adapter.weight not in held:
            continue
        a, b = (gathered(held[name], name, program, groups) for name in (adapter.a, adapter.b))
        weight = local(held[adapter.weight].detach())
        added = local_shard(product(adapter, a, b), program.stored(adapter.weight), program.mesh, groups.place)
        yield adapter.weight, (weight + added[: weight.shape[0]]).to(weight.dtype)


def gathered(tensor: Tensor, name: str, program: Manifest, groups: Groups) -> Tensor:
    """Join the shards of a tensor on every rank that has one; a collective call of the axes that shard it."""
    spec = program.stored(name)
    pieces = padded(tensor.detach()).to(groups.device).contiguous().unsqueeze(0)
    for axis in reversed(list(shard_places(spec, groups.degrees)[0])):  # the last axis varies fastest
        group = groups[axis]
        if group is not None:
            received = [torch.empty_like(pieces) for _ in range(groups.degrees[axis])]
            dist.all_gather(received, pieces, group=group)
            pieces = torch.cat(received)
    return joined_all(pieces.to(tensor.device).unbind(), whole_shape(program, name, tensor), spec, groups.degrees)
