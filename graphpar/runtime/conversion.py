"""Checkpoints without ranks: what is in one, and its way to and from safetensors, in one process.

    checkpoint ──merged──► model.safetensors              every name that model.state_dict() has
    checkpoint ──exported──► sharded safetensors, index   as Hugging Face has them: tied weights once
    checkpoint ──adapters──► adapter_model.safetensors    those alone, as the package peft has them
    safetensors, a folder of them ──converted──► checkpoint

Whole tensors are in memory.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from graphpar.runtime.adapters import base_weights, check_mergeable, write_adapters
from graphpar.runtime.checkpoint import check_names, shapes_of
from graphpar.runtime.checkpoint_folders import (
    FORMAT,
    PLAN,
    RECORD,
    begin,
    find,
    model_of,
    read_record,
    whole_checkpoints,
)
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.plan_record import Adapter, Record, read_object
from graphpar.runtime.saved_state import MODEL, is_frozen, may_become
from graphpar.runtime.stages import emitted_package, empty_stage
from graphpar.runtime.stored_chunks import (
    BoxWriter,
    SavePlanner,
    check_entries,
    read_entries,
    read_metadata,
    read_model,
    tensors_of,
    whole_entry,
)
from graphpar.runtime.tensor_file import save_tensors
from graphpar.runtime.weights import WeightFile, listed, names_by_tie, whole_shape, write_tensors

INDEX = "model.safetensors.index.json"
Described = Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]


def inspected(path: str | Path) -> list[dict[str, Any]]:
    """Describe a checkpoint, or all of a folder of checkpoints, in the order in which they were saved.

    Raises:
        RuntimeProgramError: there is none, or one is damaged.
    """
    latest = find(path)
    several = [] if (Path(path) / RECORD).is_file() else whole_checkpoints(Path(path))
    folders = several if latest in several else [*several, latest]  # one that is damaged raises
    return [{**_described(folder), "latest": folder == latest} for folder in folders]


def _described(folder: Path) -> dict[str, Any]:
    record, sizes = read_record(folder), tensors_of(read_metadata(folder))
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
    tensors, ties = _base(folder) if merged else (read_model(folder), read_record(folder)["ties"])
    tensors = _under_every_name(tensors, ties)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    write_tensors(part, tensors)
    part.replace(file)
    return {"checkpoint": str(folder), "out": str(file), "tensors": len(tensors)}


def adapters(path: str | Path, out: Path) -> dict[str, Any]:
    """Write the adapters alone, as the package ``peft`` does.

    Raises:
        RuntimeProgramError: there are none, or files in ``out`` already.
    """
    folder = find(path)
    _check_empty(out)
    found, ties = _adapters(folder), read_record(folder)["ties"]
    tied, wanted = names_by_tie(ties), {name for adapter in found for name in (adapter.a, adapter.b)}
    stored = read_model(folder, {each for name in wanted for each in tied.get(name, (name,))})
    write_adapters(found, _under_every_name(stored, ties), out)
    return {"checkpoint": str(folder), "out": str(out), "tensors": len(wanted)}


def _adapters(folder: Path) -> tuple[Adapter, ...]:
    """The adapters of the program that saved a checkpoint, which its plan lists."""
    interface = _interface(folder)
    records = interface.records("adapters") if interface.has("adapters") else []
    if not (folder / PLAN).is_file():
        raise RuntimeProgramError(
            f"{folder} has no {PLAN}, which says what its adapters are; convert it with --to and their program"
        )
    if not records:
        raise RuntimeProgramError(f"{folder} has no adapters; the program that saved it has none")
    return tuple(map(Adapter.read, records))


def _interface(folder: Path) -> Record:
    """What the plan of a checkpoint says of its program."""
    plan = read_object(folder / PLAN) if (folder / PLAN).is_file() else {}
    return Record(plan.get("interface", {}), f"{folder / PLAN}: interface")


def _base(folder: Path) -> tuple[dict[str, Tensor], list[tuple[str, ...]]]:
    """Return the weights of the model without adapters, a tied one once, with the adapters added; and the names of ties."""
    found, ties = _adapters(folder), read_record(folder)["ties"]
    check_mergeable(found)
    weights, own = base_weights(found, ties, _under_every_name(read_model(folder), ties))
    again = {name for group in own for name in group[1:]}
    return {name: value for name, value in weights.items() if name not in again}, own


def _under_every_name(tensors: Mapping[str, Tensor], ties: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    found = dict(tensors)
    for group in ties:
        value = next((tensors[name] for name in group if name in tensors), None)
        found |= {} if value is None else dict.fromkeys(group, value)
    return found


def export(
    path: str | Path, out: Path, max_bytes: int, merged: bool = False, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Write the model as Hugging Face does: safetensors files of at most ``max_bytes`` where tensors are smaller, and an index.

    No more than one file's tensors are in memory. Of a model of transformers, ``from_pretrained`` reads the folder: its configs are
    there, and names are as in that model where the program's wraps it.

    Args:
        merged: as in :func:`merge`; then the whole model is in memory.
        tokenizer: a file or a folder, whose files of a tokenizer are copied.

    Raises:
        RuntimeProgramError: there are files in ``out`` already; or as :func:`merge`.
    """
    folder = find(path)
    _check_empty(out)
    base = _base(folder)[0] if merged else None
    sizes = {
        path_[1]: torch.Size(shape).numel() * dtype.itemsize
        for path_, (shape, dtype) in tensors_of(read_metadata(folder)).items()
        if path_[:1] == MODEL
    }
    if base is not None:
        sizes = {name: value.nbytes for name, value in base.items()}
    pretrained = _interface(folder).optional("pretrained", dict, {})
    prefix = f"{pretrained['path']}." if pretrained.get("path") else ""
    files = _tokenizer_files(tokenizer) if tokenizer is not None else []
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > max_bytes:
            shards.append({})
        shards[-1][name] = size
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    out.mkdir(parents=True, exist_ok=True)
    dtypes: Counter[torch.dtype] = Counter()
    for name, shard in zip(names, shards):
        held = read_model(folder, shard) if base is None else {each: base[each].contiguous() for each in shard}
        save_tensors(
            {each.removeprefix(prefix): value for each, value in held.items()}, out / name, metadata={"format": "pt"}
        )
        for value in held.values():
            dtypes[value.dtype] += value.nbytes if value.is_floating_point() else 0
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
    wanted = None if program is None else program_tensors(program)
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
        path = find(source)
        record, metadata = {**read_record(path), "time": time.time()}, read_metadata(path)
        whole = [
            whole_entry(key, torch.empty(shape, dtype=dtype)) for key, (shape, dtype) in tensors_of(metadata).items()
        ]
        entries = {entry.key: entry for entry in whole}
        check_entries(path, entries, metadata)
        read_entries(path, entries, metadata)
        found = {entry.path: entry.tensors[0] for entry in whole}
    if program is not None and wanted is not None:
        _check(
            path, {key[1]: value for key, value in found.items() if key[:1] == MODEL}, wanted, record["ties"] or ties
        )
        record |= {"mesh": dict(program.mesh), "zero": program.zero}
    plan = program.folder / PLAN if program is not None else path / PLAN
    _write(found, record, plan.read_bytes() if plan.is_file() and not (weights and program is None) else None, out)
    return {"source": str(path), "out": str(out), "step": record["step"], "tensors": len(found)}


def program_tensors(program: Manifest) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
    """Return the whole shapes and dtypes of an emitted program's parameters and persistent buffers, by first name, and whether they are
    frozen."""
    package, tied = emitted_package(program), names_by_tie(program.ties)
    return {
        tied.get(name, (name,))[0]: (tuple(whole_shape(program, name, tensor)), tensor.dtype, is_frozen(tensor))
        for stage in program.stages
        for name, tensor in empty_stage(package, stage, False).state_dict(keep_vars=True).items()
    }


def _untied(path: Path, ties: Sequence[Sequence[str]], program: Manifest | None) -> dict[str, Tensor]:
    """Read safetensors, where a tied weight may stand under each of its names."""
    prefix = program.wrapped if program is not None else ""
    wanted = set(program_tensors(program)) if program is not None and prefix else set()
    with WeightFile(path) as file:
        tensors = {f"{prefix}{name}" if f"{prefix}{name}" in wanted else name: file[name] for name in file}
    for group in ties:
        given = [name for name in group if name in tensors]
        for name in given[1:]:
            if not torch.equal(tensors[given[0]], tensors[name]):
                raise RuntimeProgramError(
                    f"{path} has other values for {given[0]} and {name}, which are tied in the program"
                )
        values = [tensors.pop(name) for name in given]
        tensors |= {group[0]: values[0]} if values else {}
    return tensors


def _check(path: Path, tensors: Mapping[str, Tensor], wanted: Described, ties: Sequence[Sequence[str]]) -> None:
    check_names(path, wanted, set(tensors), ties, "the program")
    wrong = [
        f"{name} (expected {list(shape)} {dtype}, found {list(tensors[name].shape)} {tensors[name].dtype})"
        for name, (shape, dtype, frozen) in wanted.items()
        if name in tensors
        and (tuple(tensors[name].shape) != shape or not may_become(tensors[name].dtype, dtype, frozen))
    ]
    if wrong:
        raise RuntimeProgramError(f"{path} has values of other shapes or dtypes: {listed(wrong)}".replace("torch.", ""))


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RuntimeProgramError(f"{out} is there and is not an empty folder; name one that is new")


def _write(tensors: Mapping[tuple[str, ...], Tensor], record: Mapping[str, Any], plan: bytes | None, out: Path) -> None:
    entries = {entry.key: entry for entry in (whole_entry(path, value.contiguous()) for path, value in tensors.items())}
    model = model_of(shapes_of(entries))
    part = begin(out, model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            dcp_save(dict(entries), storage_writer=BoxWriter(part.folder), planner=SavePlanner(), no_dist=True)
        part.finish({**record, "model": model}, plan, None)
    finally:
        part.drop()
