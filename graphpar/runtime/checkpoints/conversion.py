"""Checkpoints without ranks: what is in one, and its way to and from safetensors, in one process.

    checkpoint ──merged──► model.safetensors              every name that model.state_dict() has
    checkpoint ──exported──► sharded safetensors, index   as Hugging Face has them: tied weights once
    checkpoint ──adapters──► adapter_model.safetensors    those alone, as the package peft has them
    safetensors, a folder of them ──converted──► checkpoint

One whole tensor is in memory at a time; all are where a checkpoint is made.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.checkpoints.adapters import base_weights, check_mergeable, write_adapters
from graphpar.runtime.checkpoints.checkpoint import check_names, check_sizes, latest, shapes_of
from graphpar.runtime.checkpoints.folders import (
    BEST,
    FORMAT,
    PLAN,
    RECORD,
    begin,
    find,
    model_of,
    named,
    read_record,
    whole_checkpoints,
)
from graphpar.runtime.checkpoints.saved_state import is_frozen
from graphpar.runtime.checkpoints.tensor_chunks import MODEL
from graphpar.runtime.checkpoints.tensor_files import (
    read_tensors,
    sizes_of,
    stored_model,
    stored_tensors,
    whole_entry,
    write_boxes,
)
from graphpar.runtime.checkpoints.weights import (
    Unread,
    WeightFile,
    names_by_tie,
    whole_shape,
    write_whole,
)
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest, load_manifest, under_every_name
from graphpar.runtime.plan_record import Adapter, read_object
from graphpar.runtime.records import Record, read
from graphpar.runtime.stages.modules import emitted_package, empty_stage

INDEX = "model.safetensors.index.json"


def inspected(path: str | Path) -> list[dict[str, Any]]:
    """Describe a checkpoint, or all of a folder of checkpoints, in the order in which they were saved.

    Raises:
        RuntimeProgramError: there is none, or one is damaged.
    """
    latest = find(path)
    several = [] if (Path(path) / RECORD).is_file() else whole_checkpoints(Path(path))
    folders = several if latest in several else [*several, latest]  # one that is damaged raises
    file = latest.with_name(BEST)
    best = latest.with_name(named(file)) if file.is_file() else None
    return [{**_checkpoint_facts(each), "latest": each == latest, "best": each == best} for each in folders]


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    record, sizes = read_record(folder), sizes_of(read_tensors(folder))
    count = {path: torch.Size(shape).numel() for path, (shape, _) in sizes.items()}
    size = {path: count[path] * dtype.itemsize for path, (_, dtype) in sizes.items()}
    model = [path for path in sizes if path[:1] == MODEL]
    model_bytes = sum(size[path] for path in model)
    return {
        "path": str(folder),
        "step": record["step"],
        "time": record["time"],
        "mesh": record.get("mesh"),
        "zero": record.get("zero"),
        "optimizer": None if record["optimizer"] is None else record["optimizer"]["kind"],
        "model": {
            "tensors": len(model),
            "elements": sum(count[path] for path in model),
            "bytes": model_bytes,
        },
        "state": {"tensors": len(sizes) - len(model), "bytes": sum(size.values()) - model_bytes},
        "data": record["data"],
        "seed": record["seed"],
        "ties": record["ties"],
        "tensors": {
            ".".join(path): {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for path, (shape, dtype) in sizes.items()
        },
    }


def merge(path: str | Path, file: Path, merged: bool = False) -> dict[str, Any]:
    """Write the whole model into one safetensors file, tied weights under all of their names, as ``state_dict`` has them.

    Args:
        merged: the model without its adapters, whose products are added to its weights.

    Raises:
        RuntimeProgramError: ``merged`` of a checkpoint without adapters, or of some that can't be merged.
    """
    folder = find(path)
    tensors, ties = _base(folder) if merged else (model_in(folder), read_record(folder)["ties"])
    return {"checkpoint": str(folder), "out": str(file), "tensors": write_whole(tensors, file, ties)}


def adapters(path: str | Path, out: Path) -> dict[str, Any]:
    """Write the adapters alone, as the package ``peft`` does.

    Raises:
        RuntimeProgramError: there are none, or files in ``out`` already.
    """
    folder = find(path)
    _check_empty(out)
    found, ties = _adapters(folder), read_record(folder)["ties"]
    required = {name for adapter in found for name in (adapter.a, adapter.b)}
    write_adapters(found, under_every_name(model_in(folder), ties), out)
    return {"checkpoint": str(folder), "out": str(out), "tensors": len(required)}


def _adapters(folder: Path) -> tuple[Adapter, ...]:
    """The adapters of the program that saved a checkpoint, which its plan lists."""
    interface = _interface(folder)
    records = interface.records("adapters") if interface.has("adapters") else []
    if not (folder / PLAN).is_file():
        raise RuntimeProgramError(
            f"{folder} has no {PLAN}, which describes its adapters; convert it with --to and their program"
        )
    if not records:
        raise RuntimeProgramError(f"{folder} has no adapters; the program that saved it has none")
    return tuple(read(Adapter, each) for each in records)


def _interface(folder: Path) -> Record:
    """What the plan of a checkpoint says of its program."""
    plan = read_object(folder / PLAN) if (folder / PLAN).is_file() else {}
    return Record(plan.get("interface", {}), f"{folder / PLAN}: interface")


def model_in(folder: Path) -> dict[str, Unread]:
    """Return a checkpoint's whole parameters and buffers, by the first of each one's names; they are read when they are needed."""
    return stored_model(folder, read_tensors(folder))


def _base(folder: Path) -> tuple[dict[str, Unread], list[tuple[str, ...]]]:
    """Return the weights of the model without adapters, a tied one once, with the adapters added; and the names of ties."""
    found, ties = _adapters(folder), read_record(folder)["ties"]
    check_mergeable(found)
    weights, own = base_weights(found, ties, under_every_name(model_in(folder), ties))
    again = {name for group in own for name in group[1:]}
    return {name: value for name, value in weights.items() if name not in again}, own


def export(
    path: str | Path, out: Path, max_bytes: int, merged: bool = False, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Write the model as Hugging Face does: safetensors files of at most ``max_bytes`` where tensors are smaller, and an index.

    Of a model of transformers, ``from_pretrained`` reads the folder: its configs are
    there, and names are as in that model where the program's wraps it.

    Args:
        merged: as in :func:`merge`.
        tokenizer: a file or a folder, whose files of a tokenizer are copied.

    Raises:
        RuntimeProgramError: there are files in ``out`` already; or as :func:`merge`.
    """
    folder = find(path)
    _check_empty(out)
    tensors = _base(folder)[0] if merged else model_in(folder)
    pretrained = _interface(folder).optional("pretrained", dict, {})
    prefix = f"{pretrained['path']}." if pretrained.get("path") else ""
    files = _tokenizer_files(tokenizer) if tokenizer is not None else []
    shards: list[dict[str, int]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(shards[-1].values()) + tensor.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = tensor.nbytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    out.mkdir(parents=True, exist_ok=True)
    dtypes: Counter[torch.dtype] = Counter()
    for name, shard in zip(names, shards):
        write_whole({each.removeprefix(prefix): tensors[each] for each in shard}, out / name, ())
        for each in shard:
            dtypes[tensors[each].dtype] += shard[each] if tensors[each].dtype.is_floating_point else 0
    if len(shards) > 1:
        total = sum(size for shard in shards for size in shard.values())
        weight_map = {tensor.removeprefix(prefix): name for name, shard in zip(names, shards) for tensor in shard}
        (out / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2), encoding="utf-8"
        )
    configs = Record(pretrained, "pretrained").optional("files", dict, {}) if pretrained else {}
    for name, content in configs.items():
        if name == "config.json" and dtypes:  # what from_pretrained rounds to
            key = "torch_dtype" if "torch_dtype" in content else "dtype"
            content = {**content, key: str(dtypes.most_common(1)[0][0]).removeprefix("torch.")}
        (out / Path(name).name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in files:
        shutil.copy(file, out / file.name)
    found = {"checkpoint": str(folder), "out": str(out), "files": names, "tensors": sum(map(len, shards))}
    return found | {"configs": list(configs), "tokenizer": [file.name for file in files]}


_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""The files of a tokenizer, as transformers writes them."""


def _tokenizer_files(place: Path) -> list[Path]:
    found = (
        [place]
        if place.is_file()
        else [file for each in _TOKENIZER for file in sorted(place.glob(each)) if file.is_file()]
    )
    if not found:
        raise RuntimeProgramError(f"there is no tokenizer in {place}: none of {', '.join(_TOKENIZER)}")
    return list(dict.fromkeys(found))


def convert(source: str | Path, out: Path, to: str | Path | None) -> dict[str, Any]:
    """Write a checkpoint from safetensors, which become step 0, or from another checkpoint.

    Args:
        to: an emitted folder: the tensors are checked against its model, and its plan is noted.

    Raises:
        RuntimeProgramError: there is no source, or it does not fit the program; the message lists tensors.
    """
    program = None if to is None else load_manifest(to)
    required = None if program is None else program_tensors(program)
    ties = [] if program is None else [list(group) for group in program.ties]
    path = Path(source)
    weights = path.name.endswith((".safetensors", ".safetensors.index.json")) or any(path.glob("*.safetensors"))
    if weights:
        found: dict[tuple[str, ...], Tensor] = {
            (*MODEL, name): value for name, value in _untied(path, ties, program).items()
        }
        record: dict[str, Any] = {
            "format": FORMAT, "step": 0, "time": time.time(), "seed": 0, "steps_done": 0, "data": {}, "ties": ties,
            "loss_scale": {"value": 1.0, "skipped": 0, "finite": 0}, "optimizer": None,
        }  # fmt: skip
    else:
        path = find(source) if required is None else latest(source, {name: each[0] for name, each in required.items()})
        record, stored = {**read_record(path), "time": time.time()}, read_tensors(path)
        found = {key: tensor.read() for key, tensor in stored_tensors(path, stored).items()}
    if program is not None and required is not None:
        model = {key[1]: (value.shape, value.dtype) for key, value in found.items() if key[:1] == MODEL}
        check_names(path, required, set(model), record["ties"] or ties, "the program")
        check_sizes(path, {name: each for name, each in required.items() if name in model}, model)
        record |= {"mesh": dict(program.mesh), "zero": program.zero}
    plan = program.folder / PLAN if program is not None else path / PLAN
    _write(found, record, plan.read_bytes() if plan.is_file() and not (weights and program is None) else None, out)
    return {"source": str(path), "out": str(out), "step": record["step"], "tensors": len(found)}


def program_tensors(program: Manifest) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
    """Return the whole shapes and dtypes of an emitted program's parameters and persistent buffers, by first name, and whether they are
    frozen."""
    package, tied = emitted_package(program), names_by_tie(program.ties)
    return {
        tied.get(name, (name,))[0]: (
            tuple(whole_shape(program, name, tensor)),
            tensor.dtype,
            is_frozen(tensor, program),
        )
        for stage in program.stages
        for name, tensor in empty_stage(package, stage, False).state_dict(keep_vars=True).items()
    }


def _untied(path: Path, ties: Sequence[Sequence[str]], program: Manifest | None) -> dict[str, Tensor]:
    """Read safetensors, where a tied weight may stand under each of its names."""
    prefix = program.wrapped if program is not None else ""
    required = set(program_tensors(program)) if program is not None and prefix else set()
    with WeightFile(path) as file:
        tensors = {f"{prefix}{name}" if f"{prefix}{name}" in required else name: file[name] for name in file}
    for group in ties:
        given = [name for name in group if name in tensors]
        for name in given[1:]:
            if not torch.equal(tensors[given[0]], tensors[name]):
                raise RuntimeProgramError(
                    f"{path} has different values for {given[0]} and {name}, which are tied in the program"
                )
        values = [tensors.pop(name) for name in given]
        tensors |= {group[0]: values[0]} if values else {}
    return tensors


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RuntimeProgramError(f"{out} exists and is not an empty folder; name a new one")


def _write(tensors: Mapping[tuple[str, ...], Tensor], record: Mapping[str, Any], plan: bytes | None, out: Path) -> None:
    entries = {entry.key: entry for entry in (whole_entry(path, value.contiguous()) for path, value in tensors.items())}
    model = model_of(shapes_of(entries))
    part = begin(out, model)
    try:
        write_boxes(part.folder, entries)
        part.finish({**record, "model": model}, plan, None)
    finally:
        part.drop()
