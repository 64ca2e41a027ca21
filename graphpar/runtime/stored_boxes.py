"""The tensors of a checkpoint: boxes of whole tensors, written and read by the planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from graphpar.runtime.boxes import Box
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.saved_state import MODEL, Entry


def read_metadata(folder: Path) -> Metadata:
    """Read where the tensors of a checkpoint are, and check that their files are there.

    Raises:
        RuntimeProgramError: a file is missing, or shorter than it was.
    """
    reader = FileSystemReader(folder)
    try:
        metadata: Metadata = reader.read_metadata()
        ends: dict[str, int] = {}
        for stored in metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    except Exception as error:
        raise RuntimeProgramError(f"{folder} is damaged: .metadata can't be read ({error})") from error
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} bytes, where {end} were written"
            raise RuntimeProgramError(f"{folder} is damaged: {name} {what}")
    return metadata


def tensors_of(metadata: Metadata) -> dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of a checkpoint's tensors by path."""
    return {
        metadata.planner_data[key]: (tuple(stored.size), stored.properties.dtype)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


class SavePlanner(DefaultSavePlanner):
    """Writes the boxes of entries. Those that several ranks have are written once; together they must be the whole tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.entries: dict[str, Entry] = state_dict
        self.boxes = {(key, box.offsets): box.values for key, entry in state_dict.items() for box in entry.boxes}

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(self.entries[key], offsets, values) for (key, offsets), values in self.boxes.items()]
        self.plan = SavePlan(items, planner_data={key: entry.path for key, entry in self.entries.items()})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        values: Tensor = self.boxes[index.fqn, tuple(index.offset)]
        return values


def _write_item(entry: Entry, offsets: Sequence[int], values: Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), values.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
    return WriteItem(MetadataIndex(entry.key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(DefaultLoadPlanner):
    """Fills the boxes of entries."""

    def __init__(self, entries: Mapping[str, Entry], metadata: Metadata) -> None:
        super().__init__()
        self.plan = LoadPlan([])
        self.boxes = {key: entry.boxes for key, entry in entries.items()}
        for key, boxes in self.boxes.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), box.values.shape) for box in boxes]
            stored = metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            for number, chunk in enumerate(chunks):
                items = create_read_items_for_chunk_list(key, stored, [chunk])
                self.plan.items += [
                    replace(item, dest_index=MetadataIndex(key, chunk.offsets, number)) for item in items
                ]

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self.boxes[index.fqn][index.index].values


def check_entries(folder: Path, entries: Mapping[str, Entry], metadata: Metadata) -> None:
    """Check what will be read: each box is an archive of ``torch.save``, which has the CRC-32 of its
    values (torch writes it and does not look at it).

    Raises:
        RuntimeProgramError: a file has other bytes than were written.
    """
    files: dict[str, set[tuple[int, int]]] = {}
    for item in _LoadPlanner(entries, metadata).plan.items:
        stored = metadata.storage_data[item.storage_index]
        files.setdefault(stored.relative_path, set()).add((stored.offset, stored.length))
    for name, places in files.items():
        with (folder / name).open("rb") as file:
            for offset, length in sorted(places):
                file.seek(offset)
                content = io.BytesIO(file.read(length))
                try:
                    torch.load(content, map_location="cpu", weights_only=True)
                    with zipfile.ZipFile(content) as archive:
                        wrong = archive.testzip()
                except Exception as error:  # of any kind: any byte may be wrong
                    wrong = str(error).split(". ")[0]
                if wrong is not None:
                    raise RuntimeProgramError(
                        f"{folder} is damaged: {name} has other bytes than were written (at {offset}: {wrong})"
                    )


def read_entries(folder: Path, entries: Mapping[str, Entry], metadata: Metadata) -> None:
    """Read the values of all boxes; the padding beside them becomes zero."""
    for entry in entries.values():
        for tensor in entry.tensors:
            if sum(box.values.numel() for box in entry.boxes) < sum(each.numel() for each in entry.tensors):
                tensor.zero_()
    reader, planner = FileSystemReader(folder), _LoadPlanner(entries, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.plan, planner).wait()


def read_model(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read whole parameters and buffers in one process, by the first of each one's names."""
    metadata = read_metadata(folder)
    entries = {}
    for path, (shape, dtype) in tensors_of(metadata).items():
        if path[:1] == MODEL and (names is None or path[1] in names):
            entry = whole_entry(path, torch.empty(shape, dtype=dtype))
            entries[entry.key] = entry
    check_entries(folder, entries, metadata)
    read_entries(folder, entries, metadata)
    return {entry.path[1]: entry.tensors[0] for entry in entries.values()}


def whole_entry(path: tuple[str, ...], tensor: Tensor) -> Entry:
    """Describe a tensor that this process has as a whole."""
    return Entry(path, tuple(tensor.shape), tensor.dtype, [Box((0,) * tensor.ndim, tensor)], [tensor])
