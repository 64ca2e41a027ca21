"""The tensors of a checkpoint: boxes of whole tensors, where a rank's lie, and how torch's planners write and read them.

weight [8, 4]  S(0:4) over tp=2, rank 0         two boxes: rows [0, 2) and rows [4, 6)
weight [7, 4]  S(0) over tp=2, rank 1           one box: rows [4, 7); the padding behind them is in none
the same, elements [6, 13) of its 16 (ZeRO-1)   three boxes: half of row 5, row 6, a quarter of row 7
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
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

from graphpar.runtime.checkpoints.folders import damaged, read_record
from graphpar.runtime.checkpoints.weights import Unread
from graphpar.runtime.layout import Type, divisions, shard_of

MODEL, STATE = ("model",), ("optimizer", "state")
"""What the paths of tensors begin with; a path's parts, joined by dots, are the key in the checkpoint."""
TENSORS = "tensors.json"

Key = tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor: where it begins, and a view of the rank's values of it."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass
class Entry:
    """A tensor of a checkpoint and this rank's boxes of it.

    Attributes:
        path: the parts of its key.
        shape: that of the whole tensor.
        tensors: what the boxes are views of.
        divided: the axes whose ranks hold other boxes.
        copies: how many ranks hold the same boxes, and which of them this one is.
        frozen: it is a parameter that is not trained.
    """

    path: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]
    tensors: list[Tensor]
    divided: frozenset[str] = frozenset()
    copies: tuple[int, int] = (1, 0)
    frozen: bool = False

    @property
    def key(self) -> str:
        """The key in the checkpoint."""
        return ".".join(self.path)


@dataclass(frozen=True)
class _Run:
    """Indices along a dim that follow one another in the whole and in the part."""

    whole: int
    part: int
    length: int


def boxes_of(
    part: Tensor,
    shape: Sequence[int],
    spec: Mapping[str, Type],
    degrees: Mapping[str, int],
    place: Mapping[str, int],
    *,
    of: Sequence[int] | None = None,
    start: int = 0,
) -> list[Box]:
    """Return the boxes of a tensor of ``shape`` that the rank at ``place`` stores in ``part``; padding is in none.

    Args:
        part: the rank's shard, or, where ``of`` is the shape of that, the elements from ``start`` on that it has of it.
    """
    runs = [
        _index_runs(size, dim, held, spec, degrees, place)
        for dim, (size, held) in enumerate(zip(shape, part.shape if of is None else of, strict=True))
    ]
    blocks = [((0,) * len(shape), part)] if of is None else _blocks(part, of, start)
    found = []
    for begin, block in blocks:
        for chosen in itertools.product(*(_within(*each) for each in zip(runs, begin, block.shape))):
            view = block
            for dim, run in enumerate(chosen):
                view = view.narrow(dim, run.part - begin[dim], run.length)
            found.append(Box(tuple(run.whole for run in chosen), view))
    return found


def part_of(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a box of a whole tensor."""
    for dim, (begin, size) in enumerate(zip(offsets, sizes)):
        whole = whole.narrow(dim, begin, size)
    return whole


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide the elements from ``begin`` to ``end`` of a tensor, in row-major order, into boxes: at most 2 k - 1 for k dims.

    Yields:
        The offsets and sizes of a box, in order.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    each = math.prod(shape[1:])
    first, last = -(-begin // each), end // each  # the whole rows
    row, high = (last, end) if first > last else (first - 1, first * each)
    for offsets, sizes in flat_boxes(shape[1:], begin - row * each, high - row * each):
        yield (row, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last:
        for offsets, sizes in flat_boxes(shape[1:], 0, end - last * each):
            yield (last, *offsets), (1, *sizes)


def _blocks(part: Tensor, of: Sequence[int], start: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield views of ``part`` as blocks of the shard whose elements it has from ``start`` on, and where they begin in it."""
    flat, done = part.reshape(-1) if part.numel() == 0 else part.view(-1), 0
    for offsets, sizes in flat_boxes(of, start, start + part.numel()):
        yield offsets, flat[done : done + math.prod(sizes)].view(sizes)
        done += math.prod(sizes)


def _index_runs(
    size: int, dim: int, held: int, spec: Mapping[str, Type], degrees: Mapping[str, int], place: Mapping[str, int]
) -> list[_Run]:
    """Return the runs of a dim, of which the rank holds the first ``held`` of its indices."""
    index: Tensor | None = None  # counted from 1, since 0 is padding
    for each in divisions(spec):
        if each.shard.dim == dim:
            index = torch.arange(1, size + 1) if index is None else index
            along = dataclasses.replace(each.shard, dim=0)
            index = shard_of(index, along, each.degree(degrees), each.index(degrees, place))
    if index is None:
        return [_Run(0, 0, size)]
    index = index[:held]
    ends = [*((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    begins = [0, *ends[:-1]]
    return [
        _Run(int(index[begin]) - 1, begin, end - begin)
        for begin, end in zip(begins, ends)
        if end > begin and index[begin]
    ]


def _within(runs: Sequence[_Run], begin: int, size: int) -> list[_Run]:
    """Return the parts of ``runs`` that lie at ``begin`` to ``begin + size`` of the shard."""
    found = []
    for run in runs:
        low, high = max(begin, run.part), min(begin + size, run.part + run.length)
        if low < high or run.length == 0:
            found.append(_Run(run.whole + low - run.part, low, high - low))
    return found


# ---- stored ----------------------------------------------------------------------------------------------------


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
    return read_places(folder)


def read_places(folder: Path) -> Metadata:
    """Read where the tensors in a folder are, be it a checkpoint or not yet.

    Raises:
        RuntimeProgramError: a file is missing, or shorter than it was.
    """
    metadata, ends = Metadata({}, {}, {}), dict[str, int]()
    try:
        for tensor in json.loads((folder / TENSORS).read_text(encoding="utf-8")):
            path, dtype = tuple(map(str, tensor["path"])), getattr(torch, tensor["dtype"])
            key = ".".join(path)
            metadata.planner_data[key], chunks = path, []
            for offsets, sizes, name, offset, length, crc in tensor["boxes"]:
                if Path(name).name != name or min(offset, length, *offsets, *sizes) < 0:
                    raise ValueError(f"{key} has a chunk that is not in the folder")
                place = _Place(name, offset, length, crc)
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                metadata.storage_data[MetadataIndex(key, chunks[-1].offsets)] = place
                ends[name] = max(ends.get(name, 0), offset + length)
            properties = TensorProperties(dtype=dtype)
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
    except Exception as error:  # of any kind: anything may be in it
        raise damaged(folder, f"{TENSORS} can't be read ({error})") from error
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            what = "is missing" if size is None else f"has {size} bytes, where {end} were written"
            raise damaged(folder, f"{name} {what}")
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
        RuntimeProgramError: a file does not match its checksum.
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
                    raise damaged(folder, f"{name} does not match its checksum")


def read_entries(folder: Path, entries: Mapping[str, Entry], metadata: Metadata) -> None:
    """Read the values of all boxes; the padding beside them becomes zero."""
    for entry in entries.values():
        for tensor in entry.tensors:
            if sum(box.values.numel() for box in entry.boxes) < sum(each.numel() for each in entry.tensors):
                tensor.zero_()
    reader, planner = FileSystemReader(folder), _LoadPlanner(entries, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.plan, planner).wait()


def stored(folder: Path, metadata: Metadata) -> dict[Key, Unread]:
    """Return the whole tensors in a folder by path; they are read when they are needed."""

    def read(path: Key, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        entry = whole_entry(path, torch.empty(shape, dtype=dtype))
        check_entries(folder, {entry.key: entry}, metadata)
        read_entries(folder, {entry.key: entry}, metadata)
        return entry.tensors[0]

    return {
        path: Unread(shape, dtype, functools.partial(read, path, shape, dtype))
        for path, (shape, dtype) in tensors_of(metadata).items()
    }


def stored_model(folder: Path, metadata: Metadata) -> dict[str, Unread]:
    """Return the whole parameters and buffers in a folder, by the first of each one's names; they are read when they are needed."""
    return {path[1]: tensor for path, tensor in stored(folder, metadata).items() if path[:1] == MODEL}


def whole_entry(path: tuple[str, ...], tensor: Tensor) -> Entry:
    """Describe a tensor that this process has as a whole."""
    return Entry(path, tuple(tensor.shape), tensor.dtype, [Box((0,) * tensor.ndim, tensor)], [tensor])
