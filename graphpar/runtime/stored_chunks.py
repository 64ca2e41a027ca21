"""The tensors of a checkpoint: boxes of whole tensors, written and read by the planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graphpar.runtime.checkpoint_folders import read_record
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.saved_state import MODEL, Entry
from graphpar.runtime.tensor_chunks import Box

TENSORS = "tensors.json"


@dataclass(frozen=True)
class _Place:
    """Where a box is stored, as torch's reader takes it, and the sum of its bytes there."""

    relative_path: str
    offset: int
    length: int
    crc32: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class _Summed(WriteResult):
    """That a box was written, with the sum of its bytes."""

    crc32: int


class _SummedFile(io.BufferedWriter):
    """A file that sums what is written to it, from each place that is asked for to the next: torch asks where a box begins and ends."""

    def __init__(self, path: Path, sums: dict[tuple[str, int], int]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._file, self._sums, self._begin, self._crc = path.name, sums, 0, 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        return super().write(data)

    def tell(self) -> int:
        place = super().tell()
        if place != self._begin:
            self._sums[self._file, self._begin] = self._crc
            self._begin, self._crc = place, 0
        return place


class _SummedFiles(FileSystem):
    """Files, with the sums of their boxes by file and offset."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _SummedFile(Path(path), self.sums) if mode == "wb" else open(path, mode) as stream:
            yield stream


class BoxWriter(FileSystemWriter):
    """Writes torch's files, and ``tensors.json``: where each box is, and the sum of its bytes.

    ``.metadata`` says the same to torch, as a pickle, which can run code: what somebody else has written is read from ``tensors.json``.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._files = _SummedFiles()

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                _Summed(each.index, each.size_in_bytes, each.storage_data, self._files.sums[place])
                for each in super().write_data(plan, planner).value()
                for place in [(each.storage_data.relative_path, each.storage_data.offset)]
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        boxes: dict[tuple[str, tuple[int, ...]], _Summed] = {
            (each.index.fqn, tuple(each.index.offset or ())): each
            for of_rank in results
            for each in of_rank
            if isinstance(each, _Summed)
        }
        listed = []
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            rows = []
            for chunk in tensor.chunks:
                box = boxes[key, tuple(chunk.offsets)]
                stored = box.storage_data
                rows.append(
                    [
                        *map(list, (chunk.offsets, chunk.sizes)),
                        stored.relative_path,
                        stored.offset,
                        stored.length,
                        box.crc32,
                    ]
                )
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            listed.append(
                {"path": metadata.planner_data[key], "shape": list(tensor.size), "dtype": dtype, "boxes": rows}
            )
        with open(Path(self.path) / TENSORS, "w", encoding="utf-8") as file:
            json.dump(listed, file)
            file.flush()
            os.fsync(file.fileno())


def read_metadata(folder: Path) -> Metadata:
    """Read where the tensors of a checkpoint are, and check that their files are there.

    Raises:
        RuntimeProgramError: a file is missing, or shorter than it was; or as :func:`read_record`.
    """
    read_record(folder)
    metadata, ends = Metadata({}, {}, {}), dict[str, int]()
    try:
        for tensor in json.loads((folder / TENSORS).read_text(encoding="utf-8")):
            path, dtype = tuple(map(str, tensor["path"])), getattr(torch, tensor["dtype"])
            key = ".".join(path)
            metadata.planner_data[key], chunks = path, []
            for offsets, sizes, name, offset, length, crc in tensor["boxes"]:
                if Path(name).name != name or min(offset, length, *offsets, *sizes) < 0:
                    raise ValueError(f"{key} has a box that is not in the folder")
                place = _Place(name, offset, length, crc)
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                metadata.storage_data[MetadataIndex(key, chunks[-1].offsets)] = place
                ends[name] = max(ends.get(name, 0), offset + length)
            properties = TensorProperties(dtype=dtype)
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
    except Exception as error:  # of any kind: anything may be in it
        raise RuntimeProgramError(f"{folder} is damaged: {TENSORS} can't be read ({error})") from error
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
    """Check the sums of the boxes that will be read.

    Raises:
        RuntimeProgramError: a file has other bytes than were written.
    """
    files: dict[str, set[_Place]] = {}
    for item in _LoadPlanner(entries, metadata).plan.items:
        stored = metadata.storage_data[item.storage_index]
        files.setdefault(stored.relative_path, set()).add(stored)
    for name, places in files.items():
        with (folder / name).open("rb") as file:
            for place in sorted(places, key=lambda each: each.offset):
                file.seek(place.offset)
                if zlib.crc32(file.read(place.length)) != place.crc32:
                    raise RuntimeProgramError(
                        f"{folder} is damaged: {name} has other bytes than were written (at {place.offset})"
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
