"""Checkpoints in the format of ``torch.distributed.checkpoint``: whole tensors in pieces, which any plan can read.

    ckpt/100/checkpoint.json   step, data position, seed, loss scale, hyperparameters of the optimizer, names of tied weights
    ckpt/100/plan.json         the plan under which it was saved
    ckpt/100/.metadata         torch's: where each box of each tensor is
    ckpt/100/__0_0.distcp      torch's: the boxes that rank 0 has written
    ckpt/latest                100

A checkpoint is written as ``ckpt/.100.part`` and renamed when all of it is on disk; then ``latest`` moves. So what has a
``checkpoint.json`` is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from graphpar.runtime.boxes import Box
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.saved_state import MODEL, Entry, State, in_turns, joined_descriptions
from graphpar.runtime.weights import listed

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

RECORD, LATEST, PLAN = "checkpoint.json", "latest", "plan.json"
FORMAT = 1
"""The version of ``checkpoint.json``."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says besides its tensors: ``step`` and ``data`` as they were given to ``save_checkpoint``."""

    step: int
    data: Mapping[str, Any]
    path: Path


# ---- folders ---------------------------------------------------------------------------------------------------------


def find(path: str | Path) -> Path:
    """Find the checkpoint that ``path`` is, or the latest one in it.

    Raises:
        RuntimeProgramError: there is none.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file() and (folder / LATEST).is_file():
        folder = folder / (folder / LATEST).read_text().strip()
    for each in (folder, beside(folder, "old")):  # old: it was being replaced by another of its name
        if (each / RECORD).is_file():
            return each
    whole = whole_checkpoints(folder)
    if whole:
        return whole[-1]  # the first one, saved by a process that was ended before it wrote `latest`
    others = [each.name for each in whole_checkpoints(folder.parent)]
    raise RuntimeProgramError(
        f"{path} is no checkpoint, and no folder of checkpoints.{near_match(folder.name, others)}"
    )


def is_in(path: str | Path) -> bool:
    """Return whether ``path`` is a checkpoint, or has one, be it damaged."""
    folder = Path(path)
    return (folder / RECORD).is_file() or (folder / LATEST).is_file() or bool(whole_checkpoints(folder))


def whole_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, in the order in which they were saved."""
    found: dict[Path, float] = {}
    for record in folder.glob(f"[!.]*/{RECORD}"):
        with contextlib.suppress(RuntimeProgramError):  # one that somebody has damaged
            found[record.parent] = read_record(record.parent)["time"]
    return sorted(found, key=lambda each: found[each])


def read_record(folder: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``.

    Raises:
        RuntimeProgramError: it is damaged, or of another version.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise RuntimeProgramError(f"{folder} is damaged: {RECORD} can't be read ({error})") from error
    fields = ("format", "step", "time", "data", "seed", "steps_done", "ties", "optimizer", "loss_scale")
    lacking = [field for field in fields if not isinstance(record, dict) or field not in record]
    if lacking or record["format"] != FORMAT:
        what = f"it lacks {', '.join(lacking)}" if lacking else f"its format is {record['format']}, not {FORMAT}"
        raise RuntimeProgramError(f"{folder} is damaged: {RECORD} can't be read ({what})")
    return dict(record)


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


def beside(folder: Path, kind: str) -> Path:
    """Return the hidden folder beside a checkpoint: "part" while it is written, "old" while another takes its place."""
    return folder.with_name(f".{folder.name}.{kind}")


# ---- writing and reading boxes ---------------------------------------------------------------------------------------


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
    read_entries(folder, entries, metadata)
    return {entry.path[1]: entry.tensors[0] for entry in entries.values()}


def whole_entry(path: tuple[str, ...], tensor: Tensor) -> Entry:
    """Describe a tensor that this process has as a whole."""
    return Entry(path, tuple(tensor.shape), tensor.dtype, [Box((0,) * tensor.ndim, tensor)], [tensor])


# ---- saving ----------------------------------------------------------------------------------------------------------


class Saver:
    """Saves the checkpoints of one pipeline, one after the other."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None  # for what the thread sends
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is whole; a collective call.

        Raises:
            RuntimeProgramError: it could not be saved.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            error, self._error = self._error, None
            if error is not None:  # of all ranks
                raise error

    def save(self, entries: Mapping[str, Entry], write: Callable[..., None], wait: bool) -> None:
        """Write now, or copy the boxes and write while others go on; a collective call."""
        if wait:
            write(entries, None)
            return
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        copied = {key: _copied(entry) for key, entry in entries.items()}

        def work() -> None:
            try:
                write(copied, self._group)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def close(self) -> None:
        """Wait, and destroy the process group; a collective call."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None


def _copied(entry: Entry) -> Entry:
    return replace(entry, boxes=[Box(box.offsets, box.values.to("cpu", copy=True)) for box in entry.boxes], tensors=[])


def save(
    pipeline: Pipeline,
    saver: Saver,
    state: State,
    path: str | Path,
    *,
    step: int,
    data: Mapping[str, Any] | None,
    keep: int | None,
    wait: bool,
) -> None:
    """Do what :meth:`Pipeline.save_checkpoint` says."""
    scale, target = pipeline._scale, Path(path)
    with agreed():
        if keep is not None and keep < 1:
            raise RuntimeProgramError(f"keep is {keep}; at least 1 checkpoint is kept")
        if target.name.startswith(".") or target.name in ("", LATEST):
            raise RuntimeProgramError(f"{str(path)!r} is no name for a checkpoint; name a folder such as ckpt/{step}")
        described = state.described()
        entries = {entry.key: entry for entry in in_turns([*state.model().values(), *state.optimizer_state().values()])}
        record = {
            "format": FORMAT,
            "step": step,
            "time": time.time(),
            "seed": pipeline.seed,
            "steps_done": pipeline.steps_done,
            "loss_scale": {"value": scale.value, "skipped": scale.skipped, "finite": scale.finite},
            "mesh": dict(pipeline.program.mesh),
            "zero": pipeline.program.zero,
            "torch": torch.__version__,
            "ties": [list(group) for group in pipeline.program.ties],
            "data": dict(data or {}),
        }
        try:
            json.dumps(record)
        except (TypeError, ValueError) as error:
            raise RuntimeProgramError(f"data is kept as JSON, which it can't be: {error}") from error
    record["optimizer"] = joined_descriptions(gather_objects(described))
    plan = (pipeline.program.folder / PLAN).read_bytes()

    def write(boxes: Mapping[str, Entry], group: dist.ProcessGroup | None) -> None:
        _write(boxes, record, plan, target, keep, group)

    saver.save(entries, write, wait)


def _write(
    entries: Mapping[str, Entry],
    record: Mapping[str, Any],
    plan: bytes,
    target: Path,
    keep: int | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint from all ranks of ``group``."""
    part, first = beside(target, "part"), dist.get_rank() == 0
    with agreed(group):
        if first:
            begin(target)
    with agreed(group):
        if not part.is_dir():
            raise RuntimeProgramError(
                f"{part}, which rank 0 has made, is not there: a checkpoint is saved into a folder that all machines share"
            )
    with agreed(group):
        try:
            dcp_save(dict(entries), storage_writer=FileSystemWriter(part), planner=SavePlanner(), process_group=group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeProgramError(f"{target} can't be saved: rank {rank}: {cause}") from None
    with agreed(group):
        if first:
            finish(target, record, plan, keep)


def begin(target: Path) -> None:
    """Make the folder that a checkpoint is written into, and remove what processes have left that were ended in the middle.

    Raises:
        RuntimeProgramError: something else is there.
    """
    old = beside(target, "old")
    if (old / RECORD).is_file() and not target.exists():
        old.rename(target)
    if target.exists() and not (target / RECORD).is_file():
        raise RuntimeProgramError(f"{target} is there and is no checkpoint; save into a folder that is new")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in [old, *target.parent.glob(".*.part")]:
        if left.is_dir():
            shutil.rmtree(left)
    beside(target, "part").mkdir()


def finish(target: Path, record: Mapping[str, Any], plan: bytes | None, keep: int | None) -> None:
    """Make a checkpoint whole whose tensors are written, then the latest; then remove all but the last ``keep``."""
    part, old = beside(target, "part"), beside(target, "old")
    if plan is not None:
        _written(part / PLAN, plan)
    _written(part / RECORD, json.dumps(record, indent=1).encode())
    _sync(part)
    if target.exists():
        target.rename(old)
    part.rename(target)
    new = target.parent / f".{LATEST}"
    _written(new, f"{target.name}\n".encode())
    new.replace(target.parent / LATEST)
    _sync(target.parent)
    surplus = [] if keep is None else whole_checkpoints(target.parent)[:-keep]
    for folder in surplus:
        folder = folder.rename(beside(folder, "part"))
        shutil.rmtree(folder)
    if old.exists():
        shutil.rmtree(old)


def _written(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(pipeline: Pipeline, state: State, path: str | Path) -> Checkpoint:
    """Do what :meth:`Pipeline.load_checkpoint` says."""
    with agreed():
        folder = find(path)
        record, metadata = read_record(folder), read_metadata(folder)
        sizes = tensors_of(metadata)
        model = state.model()
        described = state.described()
    everyone = gather_objects((record["time"], list(model), described))
    with agreed():
        if any(when != record["time"] for when, _, _ in everyone):
            raise RuntimeProgramError(
                f"{path} is not the same checkpoint on all ranks; name one that all machines share"
            )
        entries = _matched(folder, model, {name for _, names, _ in everyone for name in names}, sizes, record)
        states: dict[Tensor, dict[str, Any]] = {}
        hyperparameters: list[Mapping[str, Any]] = []
        if state.optimizer is not None:
            _check_optimizer(folder, record["optimizer"], joined_descriptions([own for _, _, own in everyone]))
            of_optimizer, states = state.room(record["optimizer"], sizes)
            _check_sizes(folder, of_optimizer, sizes)
            hyperparameters = state.hyperparameters(record["optimizer"])
            entries |= of_optimizer
    with agreed():
        with torch.no_grad():
            read_entries(folder, entries, metadata)
        state.take(states, hyperparameters)
        if state.shards is not None:
            state.shards.loaded()
    if pipeline.program.scales_loss and record["loss_scale"]["value"] != 1.0:
        for field, value in record["loss_scale"].items():
            setattr(pipeline._scale, field, value)
    pipeline.seed = pipeline._feed.seed = record["seed"]
    pipeline.steps_done = record["steps_done"]
    return Checkpoint(record["step"], record["data"], folder)


def _matched(
    folder: Path,
    model: Mapping[str, Entry],
    held: set[str],
    sizes: Mapping[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]],
    record: Mapping[str, Any],
) -> dict[str, Entry]:
    """Return the model's entries by the keys that the checkpoint has for them.

    Args:
        held: the names of all ranks.
    """
    saved = {path[1] for path in sizes if path[:1] == MODEL}
    check_names(folder, held, saved, record["ties"], "the program")
    entries = {}
    for name, entry in model.items():
        entry.path = (*MODEL, _saved_name(name, saved, record["ties"]) or name)
        entries[entry.key] = entry
    _check_sizes(folder, entries, sizes)
    return entries


def check_names(folder: Path, wanted: Iterable[str], saved: set[str], ties: Sequence[Sequence[str]], what: str) -> None:
    """Check that a checkpoint has the tensors that are wanted, and no others.

    Raises:
        RuntimeProgramError: it has not; the message lists them.
    """
    found = {name: _saved_name(name, saved, ties) for name in wanted}
    missing = sorted(name for name, source in found.items() if source is None)
    unexpected = sorted(saved - set(found.values()))
    problems = [f"it has no value for {listed(missing)}"] if missing else []
    problems += [f"it has values that {what} does not take: {listed(unexpected)}"] if unexpected else []
    if problems:
        hint = near_match(missing[0], unexpected) if missing else ""
        raise RuntimeProgramError(f"{folder} does not fit {what}: {'; '.join(problems)}.{hint}")


def _saved_name(name: str, saved: set[str], ties: Sequence[Sequence[str]]) -> str | None:
    """Return the name under which a checkpoint has a tensor: its own, or another one of its tie."""
    return next((each for group in ([name], *ties) if name in group for each in group if each in saved), None)


def _check_sizes(
    folder: Path, entries: Mapping[str, Entry], sizes: Mapping[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]
) -> None:
    wrong = [
        f"{key} (expected {list(entry.shape)} {entry.dtype}, found {list(sizes[entry.path][0])} {sizes[entry.path][1]})"
        for key, entry in entries.items()
        if (entry.shape, entry.dtype) != sizes[entry.path]
    ]
    if wrong:
        raise RuntimeProgramError(
            f"{folder} has values of other shapes or dtypes: {listed(wrong)}".replace("torch.", "")
        )


def _check_optimizer(folder: Path, saved: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    assert own is not None
    if saved is None:
        raise RuntimeProgramError(f"{folder} was saved without an optimizer; load it without one, too")
    if saved["kind"] != own["kind"]:
        raise RuntimeProgramError(f"{folder} has the state of {saved['kind']}, but the optimizer is {own['kind']}")
    has, wants = ({name for group in each["groups"] for name in group["names"]} for each in (saved, own))
    problems = [f"no state for {listed(sorted(wants - has))}"] if wants - has else []
    problems += [f"state for {listed(sorted(has - wants))}, which no optimizer steps"] if has - wants else []
    if problems:
        raise RuntimeProgramError(f"{folder} does not fit the optimizer: it has {'; and '.join(problems)}")
