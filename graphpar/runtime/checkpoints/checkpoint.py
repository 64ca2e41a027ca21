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
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from graphpar.runtime.checkpoints.folders import (
    BEST,
    FORMAT,
    LATEST,
    PLAN,
    Part,
    begin,
    begin_beside,
    find,
    model_of,
    read_record,
)
from graphpar.runtime.checkpoints.saved_state import State, in_turns, joined_descriptions, may_become
from graphpar.runtime.checkpoints.tensor_chunks import MODEL, Box, Entry, Key
from graphpar.runtime.checkpoints.tensor_files import (
    BoxWriter,
    SavePlanner,
    Size,
    check_entries,
    read_entries,
    read_places,
    read_tensors,
    sizes_of,
    stored_model,
)
from graphpar.runtime.checkpoints.weights import Unread, listed, whole_shape
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.loss_scale import LossScale
from graphpar.runtime.state.host import copied_out


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
    schedule: Mapping[str, Any] | None  # as :class:`~graphpar.runtime.training.lr_schedules.Schedule` describes it


# ---- saving ----------------------------------------------------------------------------------------------------------

PEEK_S = 0.005, 0.5
"""Seconds between two looks whether other ranks are done: at first, and at most."""


class Saver:
    """Saves the checkpoints of one pipeline, one after the other.

    What ranks have to say of what they wrote goes through the store of the process group, to rank 0 and back: training makes collectives
    meanwhile, a group of all ranks for this alone would connect all pairs, and no timeout of a collective runs while files are written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._place = ""  # in the store, of the save that is under way
        self._memory: Tensor | None = None  # of the host, into which is copied what is written later

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is whole; all ranks call it.

        Raises:
            AgreedError: on all ranks, if it could not be saved.
        """
        if not self._place:
            return
        if self._thread is not None:
            self._thread.join()
        place, self._place, self._thread = self._place, "", None
        _until(lambda: _store().check([f"{place}/outcome"]))
        with agreed():  # no rank goes on, and perhaps takes the store along, before all know
            if message := _store().get(f"{place}/outcome").decode():
                raise RuntimeProgramError(message)

    def save(self, entries: Mapping[str, Entry], part: Part | None, folder: Path, finish: Finish, wait: bool) -> None:
        """Write now, or copy the boxes and write while others go on; a collective call.

        Args:
            part: of rank 0, what is written; ``finish`` makes it whole.
        """
        if not wait:
            entries, self._memory = copied(entries, self._memory)
        writer, planner = BoxWriter(folder), SavePlanner()
        own, metadata = _planned(writer, planner, entries)
        place = self._place = f"graphpar_save/{folder.name}"

        def work() -> None:
            results: list[WriteResult] = []
            error: Exception | None = None
            try:
                results = writer.write_data(planner.finish_plan(own), planner).value()
            except Exception as found:
                error = found
            said = pickle.dumps((None if error is None else str(error), results))
            _store().set(f"{place}/{dist.get_rank()}", said)  # type: ignore[arg-type]  # a store holds bytes
            _store().add(f"{place}/done", 1)
            if part is not None and metadata is not None:
                message = _finished(place, part, lambda results: finish(writer, metadata, results))
                _store().set(f"{place}/outcome", message)

        if wait:
            work()
            self.wait()
        else:
            self._thread = threading.Thread(target=work, name="checkpoint")
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being saved which is not the latest yet."""
        return bool(self._place) and not _store().check([f"{self._place}/outcome"])

    def close(self) -> None:
        """Wait; all ranks call it."""
        self.wait()
        self._memory = None


def copied(entries: Mapping[str, Entry], memory: Tensor | None) -> tuple[dict[str, Entry], Tensor]:
    """Copy the boxes of entries into the host's memory; returns them and the memory, which is ``memory`` if that has its size."""
    values = [box.values for entry in entries.values() for box in entry.boxes]
    copies, memory = copied_out(values, memory)
    copy = iter(copies)
    found = {
        key: replace(entry, boxes=[Box(box.offsets, next(copy)) for box in entry.boxes], tensors=[])
        for key, entry in entries.items()
    }
    return found, memory


Finish = Callable[[BoxWriter, Metadata, list[list[WriteResult]]], None]


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _until(done: Callable[[], bool]) -> None:
    """Look until it is done. A call that waits in the store would keep this process's other threads from the store."""
    pause, most = PEEK_S
    while not done():
        time.sleep(pause)
        pause = min(2 * pause, most)


def _planned(writer: BoxWriter, planner: SavePlanner, entries: Mapping[str, Entry]) -> tuple[SavePlan, Metadata | None]:
    """Plan which rank writes which boxes; a collective call. Returns this rank's part, and on rank 0 what is known of the whole."""
    first = dist.get_rank() == 0
    with agreed():
        planner.set_up_planner(dict(entries), writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        own = writer.prepare_local_plan(planner.create_local_plan())
    plans: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(own, plans)
    metadata: Metadata | None = None
    with agreed():
        if plans is not None:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
    given: list[Any] = [None]
    dist.scatter_object_list(given, plans)
    return given[0], metadata


def _finished(place: str, part: Part, finish: Callable[[list[list[WriteResult]]], None]) -> str:
    """On rank 0: wait until all ranks have written, and make the checkpoint whole; returns why it can't be, or nothing."""
    ranks = range(dist.get_world_size())
    _until(lambda: _store().add(f"{place}/done", 0) == len(ranks))
    said = [pickle.loads(_store().get(f"{place}/{rank}")) for rank in ranks]
    for rank in ranks:
        _store().delete_key(f"{place}/{rank}")
    try:
        for rank, (message, _) in enumerate(said):
            if message is not None:
                # torch's writer doesn't say that a disk is full
                free = shutil.disk_usage(part.target.parent).free / 2**20
                return f"{part.target} can't be saved: rank {rank}: {message} ({free:,.1f} MiB are free there)"
        finish([results for _, results in said])
    except RuntimeProgramError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        part.drop()
    return ""


def save(
    saver: Saver,
    state: State,
    progress: Progress,
    path: str | Path,
    *,
    step: int,
    data: Mapping[str, Any] | None,
    keep: int | None,
    best: bool,
    wait: bool,
) -> float:
    """Do what :meth:`Pipeline.save_checkpoint` says; returns the time that names the checkpoint on rank 0."""
    program, target = state.program, Path(path)
    with agreed():
        if keep is not None and keep < 1:
            raise RuntimeProgramError(f"keep is {keep}; it must be at least 1")
        if target.name.startswith(".") or target.name in ("", LATEST):
            raise RuntimeProgramError(
                f"{str(path)!r} is not a name for a checkpoint; name a folder such as ckpt/{step}"
            )
        if best and (target.parent / BEST).is_dir():
            raise RuntimeProgramError(
                f"{target.parent / BEST} is a folder, but the name of the best checkpoint is to be written there; rename it"
            )
    record, entries, _ = recorded(state, progress, step, data)
    plan = (program.folder / PLAN).read_bytes()

    def finish(part: Part) -> None:
        part.finish(record, plan, keep, best)

    _written(saver, entries, target, lambda: begin(target, record["model"]), finish, wait)
    when: float = record["time"]
    return when


def recorded(
    state: State, progress: Progress, step: int, data: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Entry], dict[str, tuple[int, ...]]]:
    """Return what ``checkpoint.json`` says, what this rank is to write, and the shapes of the whole model; a collective call."""
    program = state.program
    with agreed():
        if not torch.serialization.get_crc32_options():
            raise RuntimeProgramError(
                "torch.serialization.set_crc32_options(False) leaves out the checksums that detect damage; "
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
            raise RuntimeProgramError(f"data is saved as JSON, and can't be converted: {error}") from error
    everyone = gather_objects((described, progress.schedule, shapes_of(entries)))
    record["optimizer"] = joined_descriptions([own for own, _, _ in everyone])
    alike = all(schedule == progress.schedule for _, schedule, _ in everyone)
    record["schedule"] = progress.schedule if alike else None  # of optimizers whose groups differ from rank to rank
    shapes = {name: shape for _, _, own in everyone for name, shape in own}
    record["model"] = model_of(shapes.items())
    return record, entries, shapes


def save_whole(
    saver: Saver,
    state: State,
    path: Path,
    join: Callable[[Mapping[str, Unread]], object],
    names: Collection[str] | None = None,
) -> None:
    """Have rank 0 make ``path`` of the model's whole tensors, by the first of each one's names; a collective call.

    Ranks write their boxes into a folder beside it, as those of a checkpoint, and rank 0 gives ``join`` what reads them, one at a time.
    So no rank sends its shards to another, and none waits in a collective for the writing.

    Args:
        names: of which tensors; by default of all.
    """
    saver.wait()
    with agreed():
        wanted = None if names is None else {state.first(name) for name in names}
        model = [entry for name, entry in state.model().items() if wanted is None or name in wanted]
        entries = {entry.key: entry for entry in in_turns(model)}

    def finish(part: Part) -> None:
        join(stored_model(part.folder, read_places(part.folder)))

    _written(saver, entries, path, lambda: begin_beside(path), finish, wait=True)


def _written(
    saver: Saver,
    entries: Mapping[str, Entry],
    target: Path,
    begin: Callable[[], Part],
    finish: Callable[[Part], None],
    wait: bool,
) -> None:
    """Write this rank's boxes into a folder that ``begin`` makes on rank 0, whose ``finish`` makes ``target`` of it when all are there."""
    part: Part | None = None
    try:
        with agreed():
            if dist.get_rank() == 0:
                part = begin()
        folder = target.with_name(gather_objects(part.folder.name if part is not None else "")[0])
        with agreed():
            if not folder.is_dir():
                raise RuntimeProgramError(
                    f"{folder}, which rank 0 has made, is missing: save into a folder that all machines share"
                )

        def finished(writer: BoxWriter, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            assert part is not None
            writer.finish(metadata, results)
            finish(part)

        saver.save(entries, part, folder, finished, wait)
    except BaseException:
        if part is not None:
            part.drop()
        raise


# ---- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """From where a checkpoint is loaded: what it says, the sizes of its tensors, and what checks and fills a rank's entries."""

    path: Path
    record: Mapping[str, Any]
    sizes: Mapping[Key, Size]
    check: Callable[[Mapping[str, Entry]], None]
    fill: Callable[[Mapping[str, Entry]], None]


Shapes = Mapping[str, tuple[int, ...]]
"""Of a model's whole tensors, by name."""


def on_disk(path: str | Path, held: Shapes) -> Source:
    """Find the checkpoint that :meth:`Pipeline.load_checkpoint` loads, of the model that has these tensors; a collective call."""
    with agreed():
        folder = latest(path, held)
        record, stored = read_record(folder), read_tensors(folder)
    times = gather_objects(record["time"])
    with agreed():
        if any(when != record["time"] for when in times):
            raise RuntimeProgramError(
                f"{path} is not the same checkpoint on all ranks; name one that all machines share"
            )
    return Source(
        folder,
        record,
        sizes_of(stored),
        lambda entries: check_entries(folder, entries, stored),
        lambda entries: read_entries(entries, stored),
    )


def latest(path: str | Path, held: Shapes) -> Path:
    """Find the checkpoint that ``path`` is or names, or the latest one in it of the model that has these tensors."""
    return find(path, lambda each: is_of(each, held))


def load(state: State, find_source: Callable[[Shapes], Source | None]) -> tuple[Checkpoint, Progress] | None:
    """Do what :meth:`Pipeline.load_checkpoint` says, of the source that is found, if any."""
    with agreed():
        model = state.model()
        described = state.described()
    everyone = gather_objects((shapes_of({entry.key: entry for entry in model.values()}), described))
    held = {name: shape for shapes, _ in everyone for name, shape in shapes}
    source = find_source(held)
    if source is None:
        return None
    folder, record, sizes = source.path, source.record, source.sizes
    with agreed():
        entries = _matched(folder, model, set(held), sizes, record)
        states: dict[Tensor, dict[str, Any]] = {}
        hyperparameters: list[Mapping[str, Any]] = []
        if state.optimizer is not None:
            _check_optimizer(folder, record["optimizer"], joined_descriptions([own for _, own in everyone]))
            of_optimizer, states = state.room(record["optimizer"], sizes)
            _check_entries_sizes(folder, of_optimizer, sizes)
            hyperparameters = state.hyperparameters(record["optimizer"])
            entries |= of_optimizer
        source.check(entries)
    with agreed():
        source.fill(entries)
        state.take(states, hyperparameters)
    state.parameters.loaded()
    scale = LossScale(**record["loss_scale"])
    progress = Progress(record["seed"], record["steps_done"], scale, record.get("schedule"))
    return Checkpoint(record["step"], record["data"], folder), progress


def whole_shapes(state: State) -> Shapes:
    """Return the shapes of the whole model, of all ranks, by first name; a collective call."""
    with agreed():
        own = shapes_of({entry.key: entry for entry in state.model().values()})
    return {name: shape for shapes in gather_objects(own) for name, shape in shapes}


def shapes_of(entries: Mapping[str, Entry]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and whole shapes of a model's tensors among ``entries``."""
    return [(entry.path[1], entry.shape) for entry in entries.values() if entry.path[:1] == MODEL]


def check_fits(path: str | Path, stages: Sequence[nn.Module], program: Manifest) -> Path:
    """Find the checkpoint that the ranks of a program would load, and check names and shapes of its weights against all stages, without a
    rank.

    Raises:
        RuntimeProgramError: there is no whole checkpoint, or it is of another model.
    """
    held = {name: tensor for stage in stages for name, tensor in stage.state_dict(keep_vars=True).items()}
    shapes = {name: whole_shape(program, name, tensor) for name, tensor in held.items()}
    folder = latest(path, shapes)
    record, sizes = read_record(folder), sizes_of(read_tensors(folder))
    saved = {key[1]: shape for key, (shape, _) in sizes.items() if key[:1] == MODEL}
    check_names(folder, held, set(saved), record["ties"], "the program")
    found = {name: saved[_saved_name(name, set(saved), record["ties"]) or name] for name in held}
    wrong = [
        f"{name} (expected {list(shape)}, found {list(found[name])})"
        for name, shape in shapes.items()
        if tuple(found[name]) != shape
    ]
    if wrong:
        raise RuntimeProgramError(f"{folder} has values of other shapes: {listed(wrong)}")
    return folder


def _matched(
    folder: Path,
    model: Mapping[str, Entry],
    held: set[str],
    sizes: Mapping[tuple[str, ...], Size],
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
    _check_entries_sizes(folder, entries, sizes)
    return entries


def is_of(folder: Path, held: Shapes) -> bool:
    """Return whether a checkpoint is of the model that has these tensors; also if it is damaged, which is for the user to know."""
    try:
        ties, sizes = read_record(folder)["ties"], sizes_of(read_tensors(folder))
    except RuntimeProgramError:
        return True
    saved = {path[1]: shape for path, (shape, _) in sizes.items() if path[:1] == MODEL}
    return {_saved_name(name, set(saved), ties): shape for name, shape in held.items()} == saved


def check_names(
    folder: Path, required: Iterable[str], saved: set[str], ties: Sequence[Sequence[str]], what: str
) -> None:
    """Check that a checkpoint has the tensors that are wanted, and no others.

    Raises:
        RuntimeProgramError: it has not; the message lists them.
    """
    found = {name: _saved_name(name, saved, ties) for name in required}
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


def check_sizes(
    where: Path, required: Mapping[str, tuple[Sequence[int], torch.dtype, bool | None]], found: Mapping[str, Size]
) -> None:
    """Check shapes and dtypes of tensors by name.

    Args:
        required: and whether the tensor is frozen, which may be rounded; None: it is the optimizer's, whose dtype stays.

    Raises:
        RuntimeProgramError: some differ; the message lists them.
    """
    wrong = [
        f"{name} (expected {list(shape)} {dtype}, found {list(found[name][0])} {found[name][1]})"
        for name, (shape, dtype, frozen) in required.items()
        if tuple(shape) != tuple(found[name][0])
        or not (found[name][1] == dtype if frozen is None else may_become(found[name][1], dtype, frozen))
    ]
    if wrong:
        raise RuntimeProgramError(
            f"{where} has values of other shapes or dtypes: {listed(wrong)}".replace("torch.", "")
        )


def _check_entries_sizes(folder: Path, entries: Mapping[str, Entry], sizes: Mapping[tuple[str, ...], Size]) -> None:
    required = {key: (e.shape, e.dtype, e.frozen if e.path[:1] == MODEL else None) for key, e in entries.items()}
    check_sizes(folder, required, {key: sizes[entry.path] for key, entry in entries.items()})


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
