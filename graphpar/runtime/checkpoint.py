"""Checkpoints in the format of ``torch.distributed.checkpoint``: whole tensors in pieces, which any plan can read.

    ckpt/100/checkpoint.json   step, data position, seed, loss scale, hyperparameters of the optimizer, names of tied weights
    ckpt/100/plan.json         the plan under which it was saved
    ckpt/100/tensors.json      where each box of each tensor is, and the sum of its bytes
    ckpt/100/.metadata         the same without sums, for torch's own tools
    ckpt/100/__0_0.distcp      torch's: the boxes that rank 0 has written
    ckpt/latest                100

A checkpoint is written as ``ckpt/.100.OWNER.part`` and renamed when all of it is on disk; then ``latest`` moves. So what has a
``checkpoint.json`` is whole.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from graphpar.runtime.checkpoint_folders import FORMAT, LATEST, PLAN, Part, begin, find, model_of, read_record
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.loss_scale import LossScale
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.saved_state import MODEL, Entry, State, in_turns, joined_descriptions, may_become
from graphpar.runtime.stored_chunks import (
    BoxWriter,
    SavePlanner,
    check_entries,
    read_entries,
    read_metadata,
    tensors_of,
)
from graphpar.runtime.tensor_chunks import Box
from graphpar.runtime.weights import listed, whole_shape


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says besides its tensors: ``step`` and ``data`` as they were given to ``save_checkpoint``."""

    step: int
    data: Mapping[str, Any]
    path: Path


@dataclass(frozen=True)
class Progress:
    """What goes on where it was, besides values: the seed, the count of steps, the loss scale, and the learning rate's schedule."""

    seed: int
    steps_done: int
    scale: LossScale
    schedule: Mapping[str, Any] | None  # as :class:`~graphpar.runtime.lr_schedules.Schedule` describes it


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
    saver: Saver,
    state: State,
    progress: Progress,
    path: str | Path,
    *,
    step: int,
    data: Mapping[str, Any] | None,
    keep: int | None,
    wait: bool,
) -> None:
    """Do what :meth:`Pipeline.save_checkpoint` says."""
    program, target = state.program, Path(path)
    with agreed():
        if keep is not None and keep < 1:
            raise RuntimeProgramError(f"keep is {keep}; at least 1 checkpoint is kept")
        if target.name.startswith(".") or target.name in ("", LATEST):
            raise RuntimeProgramError(f"{str(path)!r} is no name for a checkpoint; name a folder such as ckpt/{step}")
        if not torch.serialization.get_crc32_options():
            raise RuntimeProgramError(
                "torch.serialization.set_crc32_options(False) leaves out the sums by which damage is found; "
                "set it to True before a checkpoint is saved"
            )
        described = state.described()
        entries = {entry.key: entry for entry in in_turns([*state.model().values(), *state.optimizer_state().values()])}
        record = {
            "format": FORMAT,
            "step": step,
            "time": time.time(),
            "seed": progress.seed,
            "steps_done": progress.steps_done,
            "loss_scale": asdict(progress.scale),
            "mesh": dict(program.mesh),
            "zero": program.zero,
            "torch": torch.__version__,
            "ties": [list(group) for group in program.ties],
            "data": dict(data or {}),
        }
        try:
            json.dumps(record)
        except (TypeError, ValueError) as error:
            raise RuntimeProgramError(f"data is kept as JSON, which it can't be: {error}") from error
    everyone = gather_objects((described, progress.schedule, shapes_of(entries)))
    record["optimizer"] = joined_descriptions([own for own, _, _ in everyone])
    alike = all(schedule == progress.schedule for _, schedule, _ in everyone)
    record["schedule"] = progress.schedule if alike else None  # of optimizers whose groups differ from rank to rank
    record["model"] = model_of(pair for _, _, shapes in everyone for pair in shapes)
    plan = (program.folder / PLAN).read_bytes()

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
    part: Part | None = None
    try:
        with agreed(group):
            if dist.get_rank() == 0:
                part = begin(target, record["model"])
        folder = target.with_name(gather_objects(part.folder.name if part is not None else "", group)[0])
        with agreed(group):
            if not folder.is_dir():
                raise RuntimeProgramError(
                    f"{folder}, which rank 0 has made, is not there: a checkpoint is saved into a folder that all machines share"
                )
        with agreed(group):
            try:
                dcp_save(dict(entries), storage_writer=BoxWriter(folder), planner=SavePlanner(), process_group=group)
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise RuntimeProgramError(f"{target} can't be saved: rank {rank}: {cause}") from None
        with agreed(group):
            if part is not None:
                part.finish(record, plan, keep)
    finally:
        if part is not None:
            part.drop()


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(state: State, path: str | Path) -> tuple[Checkpoint, Progress]:
    """Do what :meth:`Pipeline.load_checkpoint` says."""
    with agreed():
        model = state.model()
        described = state.described()
    everyone = gather_objects((shapes_of({entry.key: entry for entry in model.values()}), described))
    with agreed():
        held = {name: shape for shapes, _ in everyone for name, shape in shapes}
        folder = find(path, lambda each: _is_of(each, held))
        record, metadata = read_record(folder), read_metadata(folder)
        sizes = tensors_of(metadata)
    times = gather_objects(record["time"])
    with agreed():
        if any(when != record["time"] for when in times):
            raise RuntimeProgramError(
                f"{path} is not the same checkpoint on all ranks; name one that all machines share"
            )
        entries = _matched(folder, model, set(held), sizes, record)
        states: dict[Tensor, dict[str, Any]] = {}
        hyperparameters: list[Mapping[str, Any]] = []
        if state.optimizer is not None:
            _check_optimizer(folder, record["optimizer"], joined_descriptions([own for _, own in everyone]))
            of_optimizer, states = state.room(record["optimizer"], sizes)
            _check_sizes(folder, of_optimizer, sizes)
            hyperparameters = state.hyperparameters(record["optimizer"])
            entries |= of_optimizer
        check_entries(folder, entries, metadata)
    with agreed():
        with torch.no_grad():
            read_entries(folder, entries, metadata)
        state.take(states, hyperparameters)
        if state.shards is not None:
            state.shards.loaded()
    scale = LossScale(**record["loss_scale"])
    progress = Progress(record["seed"], record["steps_done"], scale, record.get("schedule"))
    return Checkpoint(record["step"], record["data"], folder), progress


def shapes_of(entries: Mapping[str, Entry]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and whole shapes of a model's tensors among ``entries``."""
    return [(entry.path[1], entry.shape) for entry in entries.values() if entry.path[:1] == MODEL]


def check_fits(path: str | Path, stages: Sequence[nn.Module], program: Manifest) -> None:
    """Check the names and shapes of the weights in a checkpoint against all stages of a program, without a rank.

    Raises:
        RuntimeProgramError: there is no whole checkpoint, or it is of another model.
    """
    folder = find(path)
    record, sizes = read_record(folder), tensors_of(read_metadata(folder))
    saved = {key[1]: shape for key, (shape, _) in sizes.items() if key[:1] == MODEL}
    held = {name: tensor for stage in stages for name, tensor in stage.state_dict(keep_vars=True).items()}
    check_names(folder, held, set(saved), record["ties"], "the program")
    found = {name: saved[_saved_name(name, set(saved), record["ties"]) or name] for name in held}
    shapes = {name: whole_shape(program, name, tensor) for name, tensor in held.items()}
    wrong = [
        f"{name} (expected {list(shape)}, found {list(found[name])})"
        for name, shape in shapes.items()
        if tuple(found[name]) != shape
    ]
    if wrong:
        raise RuntimeProgramError(f"{folder} has values of other shapes: {listed(wrong)}")


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


def _is_of(folder: Path, held: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a checkpoint is of the model that has these tensors; also if it is damaged, which is for the user to know."""
    try:
        ties, sizes = read_record(folder)["ties"], tensors_of(read_metadata(folder))
    except RuntimeProgramError:
        return True
    saved = {path[1]: shape for path, (shape, _) in sizes.items() if path[:1] == MODEL}
    return {_saved_name(name, set(saved), ties): shape for name, shape in held.items()} == saved


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
        if entry.shape != sizes[entry.path][0]
        or not (
            entry.dtype == sizes[entry.path][1]
            if entry.path[:1] != MODEL
            else may_become(sizes[entry.path][1], entry.dtype, entry.frozen)
        )
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
    # at ZeRO level 1 optimizers have no frozen parameters
    was, now = ({name for group in each["groups"] for name in group.get("frozen", ())} for each in (saved, own))
    missing, unexpected = sorted(wants - has - now), sorted(has - wants - was)
    problems = [f"no state for {listed(missing)}"] if missing else []
    problems += [f"state for {listed(unexpected)}, which no optimizer steps"] if unexpected else []
    if problems:
        raise RuntimeProgramError(f"{folder} does not fit the optimizer: it has {'; and '.join(problems)}")
