"""The files of tensors: written as ``torch.distributed.checkpoint`` has them, and read by which boxes are needed.

    entries of a rank ──torch's planner and writer──► __0_0.distcp, tensors.json: where each box is, and the sum of its bytes
    tensors.json ──► stored boxes ──regions in common with what a rank needs──► its entries

A box that is stored is read as if a process that has it sent it (:mod:`~graphpar.runtime.checkpoints.resharding`).
"""

from __future__ import annotations

import functools
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graphpar.runtime.checkpoints.folders import damaged, read_record
from graphpar.runtime.checkpoints.resharding import Held, Move, Region, Resharding, fill
from graphpar.runtime.checkpoints.tensor_chunks import MODEL, Box, Entry, Key
from graphpar.runtime.checkpoints.weights import Unread

TENSORS = "tensors.json"

Size = tuple[Sequence[int], torch.dtype]
"""The shape and dtype of a tensor."""


# ---- written ---------------------------------------------------------------------------------------------------


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


def write_boxes(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write this process's boxes, and what says where they are, into a folder of its own."""
    writer, planner = BoxWriter(folder), SavePlanner()
    planner.set_up_planner(dict(entries))
    writer.set_up_storage_writer(True)
    own = planner.create_local_plan()
    plans, metadata = create_default_global_save_plan(writer.prepare_global_plan([writer.prepare_local_plan(own)]))
    metadata.planner_data = own.planner_data
    writer.finish(metadata, [writer.write_data(plans[0], planner).value()])


# ---- read ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a box is stored, and the sum of its bytes there."""

    file: Path
    offset: int
    length: int
    crc32: int

    def is_intact(self) -> bool:
        """Return whether its bytes have their sum."""
        return zlib.crc32(self._bytes()) == self.crc32

    def read(self) -> Tensor:
        """Read the values of the box."""
        values: Tensor = torch.load(io.BytesIO(self._bytes()), map_location="cpu", weights_only=True)
        return values

    def _bytes(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and those of its boxes that this process can read."""

    path: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[Region, Place] = field(default_factory=dict)


Stored = Mapping[str, StoredTensor]
"""Tensors by key."""


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Read where the tensors of a checkpoint are, and check that their files are there.

    Raises:
        RuntimeProgramError: a file is missing, or shorter than it was; or as :func:`read_record`.
    """
    read_record(folder)
    return read_places(folder)


def read_places(folder: Path) -> dict[str, StoredTensor]:
    """Read where the tensors in a folder are, be it a checkpoint or not yet.

    Raises:
        RuntimeProgramError: a file is missing, or shorter than it was.
    """
    found, ends = dict[str, StoredTensor](), dict[str, int]()
    try:
        for tensor in json.loads((folder / TENSORS).read_text(encoding="utf-8")):
            path, dtype = tuple(map(str, tensor["path"])), getattr(torch, tensor["dtype"])
            key = ".".join(path)
            found[key] = StoredTensor(path, tuple(map(int, tensor["shape"])), dtype)
            for offsets, sizes, name, offset, length, crc in tensor["boxes"]:
                if Path(name).name != name or min(offset, length, *offsets, *sizes) < 0:
                    raise ValueError(f"{key} has a chunk that is not in the folder")
                region = Region(tuple(map(int, offsets)), tuple(map(int, sizes)))
                found[key].boxes[region] = Place(folder / name, offset, length, crc)
                ends[name] = max(ends.get(name, 0), offset + length)
    except Exception as error:  # of any kind: anything may be in it
        raise damaged(folder, f"{TENSORS} can't be read ({error})") from error
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} bytes, where {end} were written"
            raise damaged(folder, f"{name} {what}")
    return found


def sizes_of(stored: Stored) -> dict[Key, Size]:
    """Return the shapes and dtypes of tensors by path."""
    return {each.path: (each.shape, each.dtype) for each in stored.values()}


def held_of(stored: Stored) -> dict[str, Held]:
    """Return what a process has that reads these tensors."""
    return {
        key: Held((key,), each.shape, each.dtype, tuple(region for region in each.boxes if region.numel))
        for key, each in stored.items()
    }


def needed_of(entries: Mapping[str, Entry]) -> dict[str, Held]:
    """Return what a process needs that fills these entries."""
    return {key: Held.of(entry, (key,)) for key, entry in entries.items()}


@dataclass
class BoxReader:
    """Reads parts of stored boxes. The last box stays in memory: the next part is often of the same one."""

    stored: Stored
    _last: tuple[Place, Tensor] | None = None

    def view(self, key: str, region: Region) -> Tensor:
        """Return the values of a region, which is inside one box."""
        box, place = _box(self.stored[key], region)
        if self._last is None or self._last[0] != place:
            self._last = place, place.read()
        return region.of(Box(box.offsets, self._last[1]))


def _box(tensor: StoredTensor, region: Region) -> tuple[Region, Place]:
    return next(each for each in tensor.boxes.items() if region.common(each[0]) == region)


def _moves(stored: Stored, entries: Mapping[str, Entry]) -> list[Move]:
    read = {key: stored[key] for key in entries}
    return list(Resharding([held_of(read)], [needed_of(entries)], [""]).to(0))


def check_entries(folder: Path, entries: Mapping[str, Entry], stored: Stored) -> None:
    """Check the sums of the boxes that will be read.

    Raises:
        RuntimeProgramError: a file does not match its checksum.
    """
    check_places(folder, (_box(stored[each.sent], each.region)[1] for each in _moves(stored, entries)))


def check_places(folder: Path, places: Iterable[Place]) -> None:
    """Check the sums of stored boxes.

    Raises:
        RuntimeProgramError: a file does not match its checksum.
    """
    for place in sorted(set(places), key=lambda each: (each.file, each.offset)):
        if not place.is_intact():
            raise damaged(folder, f"{place.file.name} does not match its checksum")


def read_entries(entries: Mapping[str, Entry], stored: Stored) -> None:
    """Read the values of all boxes; the padding next to them becomes zero."""
    fill(entries, _moves(stored, entries), BoxReader(stored).view)


def stored_tensors(folder: Path, stored: Stored) -> dict[Key, Unread]:
    """Return the whole tensors in a folder by path; they are read when they are needed."""

    def read(each: StoredTensor) -> Tensor:
        entry = whole_entry(each.path, torch.empty(each.shape, dtype=each.dtype))
        check_entries(folder, {entry.key: entry}, stored)
        read_entries({entry.key: entry}, stored)
        return entry.tensors[0]

    return {each.path: Unread(each.shape, each.dtype, functools.partial(read, each)) for each in stored.values()}


def stored_model(folder: Path, stored: Stored) -> dict[str, Unread]:
    """Return the whole parameters and buffers in a folder, by the first of each one's names; they are read when they are needed."""
    return {path[1]: tensor for path, tensor in stored_tensors(folder, stored).items() if path[:1] == MODEL}


def whole_entry(path: tuple[str, ...], tensor: Tensor) -> Entry:
    """Describe a tensor that this process has as a whole."""
    return Entry(path, tuple(tensor.shape), tensor.dtype, [Box((0,) * tensor.ndim, tensor)], [tensor])
