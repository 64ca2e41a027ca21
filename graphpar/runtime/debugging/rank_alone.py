"""One rank of a program by itself: its steps at their real sizes, timed and with their memory, beside what the plan predicts of it.

    measure("out", rank=37) ──LoneGroup──► Pipeline, random weights and batches ──► seconds by action and block, peak memory

Kernels, allocations and the host's work are those of the rank among its peers. Communication is missing: its time, its buffers, and the
waiting of a pipeline. So the predictions beside are those without it.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler_legacy

from graphpar.runtime.debugging import events
from graphpar.runtime.debugging.lone_group import SPREAD
from graphpar.runtime.distributed import start
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import coordinates
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.option_kinds import GENERATE, SCRIPTS, TRAIN
from graphpar.runtime.pipeline import Pipeline
from graphpar.runtime.plan_record import kept_report, read_object
from graphpar.runtime.records import unpacked_names
from graphpar.runtime.state.fully_sharded import local
from graphpar.runtime.training.data import load
from graphpar.runtime.training.loop import RandomExamples

WARM_UP = 1
"""Steps after which a rank has the optimizer's state and all buffers. The next one's memory is looked at, those that follow are timed."""
PASSES, CLIP, OPTIMIZER = PARTS = ("forwards and backwards", "clip", "optimizer")


@dataclass(frozen=True)
class Timed:
    """Seconds of an action or a block in each of its runs; ``predicted_s`` without communication, where there is a prediction."""

    name: str
    runs: int
    median_s: float
    predicted_s: float | None = None


@dataclass(frozen=True)
class Measured:
    """What one rank took.

    Attributes:
        place: its coordinate on each axis of several ranks.
        step_s: from the first forward to the end of the optimizer's step, without communication; the median of the steps.
        parts: of it: all forwards and backwards, clipping, the optimizer.
        actions: a microbatch's forward, backward and half of a backward on each stage.
        blocks: the same of each module of a stage, those of equal names added up.
        allocated_bytes: of tensors, at the peak; ``reserved_bytes``: of the device by torch's allocator, None on a CPU.
        predicted: seconds of a step and bytes, without communication; None where the plan was not priced, or was edited since.
        finite: whether loss and norm are.
    """

    rank: int
    world_size: int
    place: Mapping[str, int]
    device: str
    steps: int
    step_s: float
    parts: tuple[Timed, ...]
    actions: tuple[Timed, ...]
    blocks: tuple[Timed, ...]
    allocated_bytes: int
    reserved_bytes: int | None
    predicted: Mapping[str, Any] | None
    loss: float | None
    norm: float | None
    finite: bool


def measure(folder: str | Path, rank: int, steps: int = 3, *, compile: bool | str | None = None) -> Measured:
    """Run ``steps`` steps of one rank of an emitted program, with none of the others.

    Weights are drawn, batches made by ``random_example`` of the program's script, and the optimizer is the program's.

    Raises:
        RuntimeProgramError: there is no such rank, or the program generates.
    """
    program = load_manifest(folder)
    if not 0 <= rank < program.world_size:
        raise RuntimeProgramError(f"there is no rank {rank}: the program has the ranks 0 to {program.world_size - 1}")
    if program.mode == GENERATE:
        raise RuntimeProgramError("a rank alone trains or infers; a program that generates needs the tokens of others")
    with start(alone=(rank, program.world_size)) as ranks:
        clock = Clock(ranks.device)
        with Memory(ranks.device) as memory, Pipeline(folder, ranks.device, compile=compile) as pipeline:
            run(pipeline, clock, memory)
        del pipeline
        gc.collect()
        # Again for the times: hooks that listen keep parts of graphs, and so memory.
        with clock.listening(), Pipeline(folder, ranks.device, compile=compile) as pipeline:
            found = run(pipeline, clock, None, steps)
            return _measured(program, rank, steps, ranks.device, clock, memory, found)


def run(pipeline: Pipeline, clock: Clock, memory: Memory | None, steps: int = 0) -> dict[str, Tensor]:
    """Give a pipeline values, and run one step whose memory is looked at, or some that are timed.

    Returns:
        Loss and norm, or the outputs, of the last step.
    """
    clock.watch(pipeline)
    draw_values(pipeline)
    one = _step(pipeline, clock)
    for number in range(WARM_UP):
        one(number)
    with contextlib.nullcontext() if memory is None else memory.looking():
        found = one(WARM_UP)
    clock.clear()
    for number in range(WARM_UP + 1, WARM_UP + 1 + steps):
        found = one(number)
    return found


def draw_values(pipeline: Pipeline) -> None:
    """Give the parameters of a rank small random values, those of one size the same ones on all ranks, and its buffers ones."""
    for stage in pipeline.stages:
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        for name, value in stage.state_dict(keep_vars=True).items():
            with torch.no_grad():
                drawn = local(value)
                if name in parameters and drawn.is_floating_point():
                    drawn.normal_(0, SPREAD, generator=torch.Generator(drawn.device).manual_seed(drawn.numel()))
                else:
                    drawn.fill_(1)
                pipeline._parameters.put(value, drawn)
    pipeline._parameters.written()


def _step(pipeline: Pipeline, clock: Clock) -> Callable[[int], dict[str, Tensor]]:
    """Return what runs one step, and returns its loss and norm or its outputs."""
    program = pipeline.program
    script = program.folder / SCRIPTS[program.mode]
    make = runpy.run_path(str(script), run_name="graphpar_script").get("random_example") if script.is_file() else None
    if make is None:
        raise RuntimeProgramError(f"{script} has no random_example, from which a rank alone has its batches")
    batches = load(pipeline, lambda: RandomExamples(make, 0, program.global_batch))
    optimizer = pipeline.optimizer() if program.mode == TRAIN else None

    def one(number: int) -> dict[str, Tensor]:
        batch = next(batches)
        if optimizer is None:
            with clock.part(PASSES):
                return pipeline.infer(batch, step=number) or {}
        with clock.part(PASSES):
            loss = pipeline.step(batch, step=number)
        with clock.part(CLIP):
            norm = pipeline.clip_grad_norm_(1.0)
        with clock.part(OPTIMIZER):
            optimizer.step()
        pipeline.zero_grad()
        return {"norm": norm, **({} if loss is None else {"loss": loss})}

    return one


def _measured(
    program: Manifest,
    rank: int,
    steps: int,
    device: torch.device,
    clock: Clock,
    memory: Memory,
    found: Mapping[str, Tensor],
) -> Measured:
    place = coordinates(rank, program.mesh)
    predicted = Predicted.read(program, place["pp"])
    times = clock.seconds()
    step_s = [sum(each) for each in zip(*(times[part] for part in PARTS if part in times))]
    known = {} if predicted is None else predicted.by_action
    of_parts = {} if predicted is None else {PASSES: predicted.pipeline_s, OPTIMIZER: predicted.optimizer_s}
    timed = {
        name: Timed(name, len(each), statistics.median(each), (of_parts if name in PARTS else known).get(name))
        for name, each in times.items()
    }
    actions = [name for name in timed if name.split(" of ")[-1].startswith("stage ")]
    return Measured(
        rank=rank,
        world_size=program.world_size,
        place={axis: at for axis, at in place.items() if program.mesh.get(axis, 1) > 1},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        steps=steps,
        step_s=statistics.median(step_s),
        parts=tuple(timed[part] for part in PARTS if part in timed),
        actions=tuple(timed[name] for name in actions),
        blocks=tuple(each for name, each in timed.items() if name not in PARTS and name not in actions),
        allocated_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        predicted=None if predicted is None else predicted.to_json(),
        loss=float(found["loss"]) if "loss" in found else None,
        norm=float(found["norm"]) if "norm" in found else None,
        finite=all(bool(value.isfinite().all()) for value in found.values()),
    )


# ---- what was predicted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """What the planner expects of a rank without communication: seconds of a step's parts, and bytes at the peak.

    Attributes:
        by_action: seconds of a microbatch's forward, backward, and the half of it for weights, and of blocks, by the names of
            :class:`Clock`.
        pipeline_s: of all forwards and backwards; ``optimizer_s``: of the optimizer's step.
        allocated_bytes, reserved_bytes: of tensors, and with what the allocator holds beyond them.
        missing_s: of exposed communication in a step, which a rank alone does not have.
    """

    by_action: Mapping[str, float]
    pipeline_s: float
    optimizer_s: float
    allocated_bytes: int
    reserved_bytes: int
    missing_s: float
    cluster: str

    @staticmethod
    def read(program: Manifest, pp: int) -> Predicted | None:
        """Read what is kept beside ``plan.json`` of the ranks at ``pp``; None where it is not of this plan."""
        file = program.folder / "plan.json"
        found = (kept_report(file, read_object(file)) or {}).get("predicted")
        if found is None:
            return None
        actions: dict[str, float] = {}
        missing, whole, overhead = 0.0, 0.0, found["conditions"]["action_s"]  # of the host, in each action
        for stage in (each for each in found["stages"] if each["rank"] == pp):
            hidden = sum(stage["forward_exposed_s"].values()), sum(stage["backward_exposed_s"].values())
            forward, backward = stage["forward_s"] - hidden[0], stage["backward_s"] - hidden[1]
            name = f"stage {stage['index']}"
            actions |= {f"forward of {name}": forward, f"backward of {name}": backward}
            actions |= {f"weights of {name}": stage["weight_s"]}
            actions |= {f"inputs of {name}": backward - stage["weight_s"]}
            whole += forward + overhead + (backward + overhead if program.mode == TRAIN else 0.0)
            missing += sum(hidden)
        ways = ("forward", "backward")
        actions |= {
            f"{way} of {name}": block[f"{way}_s"]
            for block in found["blocks"]
            for name in unpacked_names(block["modules"])
            for way in ways
        }
        memory, optimizer = found["memory"][pp], found["closings"][pp]["optimizer"] if found["closings"] else 0.0
        allocated = found["allocated_memory_bytes"][pp]
        return Predicted(
            actions,
            whole * program.microbatches,
            optimizer,
            allocated,
            allocated + memory.get("slack", 0),
            missing * program.microbatches,
            found["cluster"],
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "step_s": self.pipeline_s + self.optimizer_s,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "missing_communication_s": self.missing_s,
            "cluster": self.cluster,
        }


# ---- seconds and bytes -----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds of parts of a step, by name; on CUDA those of the device, read once in the end."""

    device: torch.device
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    _open: dict[str, Any] = field(default_factory=dict)
    _backward = False  # whether one runs
    _scheduled = False  # whether torch's schedule calls the stages

    def now(self) -> Any:
        """Return this moment: of the device's current stream, or of the host."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block."""
        began = self.now()
        yield
        self._spans.append((name, began, self.now()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the events of pipelines that are built within."""
        events.listeners.append(self._hear)
        try:
            yield
        finally:
            events.listeners.remove(self._hear)

    def watch(self, pipeline: Pipeline) -> None:
        """Time the actions of a schedule, which torch calls."""
        for stage in pipeline._microbatches.torch_stages:
            self._scheduled = True
            name = f"stage {stage.stage_index}"
            for call, what in (
                ("forward_one_chunk", "forward"),
                ("backward_one_chunk", "backward"),
                ("backward_weight_one_chunk", "weights"),
            ):
                setattr(stage, call, self._timed(getattr(stage, call), what, name))

    def _timed(self, call: Callable[..., Any], what: str, name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kind = "inputs" if what == "backward" and kwargs.get("full_backward", True) is False else what
            with self.part(f"{kind} of {name}"):
                return call(*args, **kwargs)

        return run

    def _hear(self, event: str, unit: str | None) -> None:
        """Take an event of a unit: a module's path, or ``stage_0``."""
        way, _, done = event.partition("_")
        if unit is None or way not in ("forward", "backward") or (way == "forward" and self._backward):
            return  # a forward within a backward is run again
        if event == "backward" and not self._backward:
            self._backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # type: ignore[attr-defined]
        stage = unit.startswith("stage_")
        name = f"{way} of {unit.replace('_', ' ') if stage else unit}"
        if stage and self._scheduled:
            return
        if not done:
            self._open[name] = self.now()
        elif name in self._open:
            self._spans.append((name, self._open.pop(name), self.now()))

    def _ended(self) -> None:
        """Note the end of a backward, and of units whose inputs have no gradient."""
        self._backward = False
        now = self.now()
        self._spans += [(name, began, now) for name, began in self._open.items() if name.startswith("backward")]
        self._open = {}

    def clear(self) -> None:
        """Forget what was timed."""
        self._spans.clear()

    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of each part, in the order in which parts came first; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: dict[str, list[float]] = {}
        for name, began, ended in self._spans:
            seconds = began.elapsed_time(ended) / 1e3 if self.device.type == "cuda" else ended - began
            found.setdefault(name, []).append(seconds)
        return found


class Memory:
    """The most bytes of a step, by the allocator's own count; on a CPU of what is allocated since ``with`` this object."""

    def __init__(self, device: torch.device) -> None:
        self.allocated, self.reserved = 0, None if device.type != "cuda" else 0
        self._device, self._level, self._counting = device, 0, False

    def __enter__(self) -> Memory:
        gc.collect()  # else what was left before would be freed meanwhile
        if self.reserved is None:
            self._start()
        return self

    def _start(self) -> None:
        self._counting = True
        profiler_legacy.profile(profile_memory=True)._start_trace()

    def __exit__(self, *raised: object) -> None:
        if self._counting:
            self._added()

    def _added(self) -> int:
        """Stop counting; add up what was allocated and freed since it began, and return the most bytes at once."""
        highest, self._counting = self._level, False
        records: Sequence[Any] = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
        for record in (record for thread in records for record in thread if record.kind() == "memory_alloc"):
            self._level += record.cpu_memory_usage()
            highest = max(highest, self._level)
        return highest

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Note the most bytes within the block; nothing is counted after it."""
        if self._counting:
            self._added()
            self._start()
            yield
            self.allocated = self._added()
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        torch.cuda.synchronize(self._device)
        self.allocated = torch.cuda.max_memory_allocated(self._device)
        self.reserved = torch.cuda.max_memory_reserved(self._device)
