"""Step time of emitted programs over that of the same model written by hand, on two local processes.

    python -m benchmarks.runtime [--json] [--rounds 20] [--only PATTERN]

    pipeline 1F1B, GPipe     against torch's PipelineStage: the same split points, schedule and microbatches
    tensor                   against Megatron-style layers with the sequence sharded between them (benchmarks.megatron)
    tensor, gathers          against the same that keep shards of what is gathered, and gather again in the backward
    tensor, overlap          against Megatron-style layers: with collectives in pieces beside products
    tensor, whole sequence   against the same with all-reduces
    tensor                   against torch's DTensor and parallelize_module (benchmarks.dtensor)
    cp ring                  against torch's ring attention (benchmarks.context), on one long row
    experts                  against tokens sent to their experts as torchtitan does (benchmarks.experts), the rest under DDP
    zero 0, 1, 3             against DDP, ZeroRedundancyOptimizer and FSDP2 (benchmarks.data_parallel)
    recompute full, selective  against torch.utils.checkpoint by hand, under DDP (benchmarks.data_parallel)
    compiled, ...            against the same program uncompiled: replicas, tensor, zero 3, selective; "compile" is the processor time
                             that a rank takes more in its first step than in a later one
    compiled, ...            against DDP and FSDP2 with the same blocks compiled (benchmarks.data_parallel)
    head in chunks           against the same program that makes all logits at once
    8 bits, emulated         against the same program in bf16: what rounding costs where no unit for 8 bits multiplies
    checkpoint               against dcp.save of the same state under FSDP2; a step saves, and computes nothing
    zero 1, slow network     against the same program that waits for new values before it goes on; they arrive 100 ms late

The tensor rows pin the inputs of the norms, that of cp attention, so that both sides communicate alike whatever the search prefers.

Both sides of a row hold the same weights and optimizer. They live in the same two gloo processes (one thread each) and take
steps in turn, so that whatever else the machine does falls on both. A step is forward, backward and AdamW; it is timed from
barrier to barrier. "cpu" compares the processor time of the process instead, which waiting is no part of: the figure to trust
where others use the machine. "launches" compares how many operators other than views a rank dispatches in a step, each a kernel or more
on a GPU; what is compiled is one. That both give the same loss in every step shows that they do the same work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._python_dispatch import TorchDispatchMode

import graphpar as gp
from benchmarks import context, data_parallel, dtensor, experts, gpt, megatron
from graphpar.runtime import Pipeline, Ranks, start
from graphpar.runtime.launching.launch import torchrun

DEVICES, BATCH, MICROBATCHES, WARM_UP, TIMEOUT_S = 2, 8, 8, 4, 900
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
LEARNING_RATE = 1e-4
LONG = (1, 2048)
CUT_SEQUENCE = {
    "blocks.*.norm*": {"inputs": ["S(1)@tp"]},
    "norm": {"inputs": ["S(1)@tp"]},
}
WHOLE_SEQUENCE = {
    "blocks.*.norm*": {"inputs": ["I@tp"]},
    "norm": {"inputs": ["I@tp"]},
    "positions": "replicate",
}
RING = {"blocks.*.mix": {"inputs": ["S(2)@cp"] * 3, "outputs": ["S(2)@cp"]}}
Step = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Case:
    """A row: an emitted program and what it is compared with. Cases of one ``launch`` run in the same processes."""

    name: str
    against: str
    launch: str
    program: Mapping[str, Any] = field(default_factory=dict)  # of gp.plan
    batch: tuple[int, int] = (BATCH, gpt.LENGTH)  # rows, tokens of each; one for all cases of a launch, as is the model
    model: Callable[[int], nn.Module] = gpt.GPT  # for a length
    export: Mapping[str, Any] = field(default_factory=dict)  # of gp.export
    other: Case | None = None  # the emitted program that it is compared with

    @property
    def compiles(self) -> bool:
        """Whether it is about ``torch.compile``."""
        return self.name.startswith("compiled")

    @property
    def label(self) -> str:
        """Its name in the table."""
        return f"{self.name} / {self.against}"


def _pipeline(schedule: str) -> Case:
    pins = {
        "devices": DEVICES,
        "schedule": schedule,
        "microbatch_size": BATCH // MICROBATCHES,
        "split": [f"blocks.{gpt.LAYERS // 2}"],
    }
    return Case(f"pipeline {schedule}", "PipelineStage", schedule, pins)


def _emitted(
    name: str,
    against: str,
    pins: Mapping[str, Any],
    other_pins: Mapping[str, Any],
    export: Mapping[str, Any] | None = None,
    other_export: Mapping[str, Any] | None = None,
) -> Case:
    other = Case(against, name, name, other_pins, export=other_export or {})
    return Case(name, against, name, pins, export=export or {}, other=other)


_BF16 = {"dtype": "bf16"}
_ZERO1 = {"mesh": {"dp_shard": DEVICES}, "zero": 1, "microbatch_size": BATCH // DEVICES}
_ZERO3 = {"mesh": {"dp_shard": DEVICES}, "microbatch_size": BATCH // DEVICES}
_REPLICAS = {"mesh": {"dp_replicate": DEVICES}, "microbatch_size": BATCH // DEVICES}
_EXPERTS = {"mesh": {"dp_expert": DEVICES}, "microbatch_size": BATCH // DEVICES}
_TENSOR = {"mesh": {"tp": DEVICES}, "shard_plan": CUT_SEQUENCE}
CASES = (
    *map(_pipeline, SCHEDULES),
    Case("tensor", "Megatron", "tensor", _TENSOR),
    Case("tensor, gathers", "Megatron, shards kept", "tensor", {**_TENSOR, "recompute": "gathers"}),
    Case("tensor, overlap", "Megatron", "tensor", {**_TENSOR, "overlap_tp": True}),
    Case("tensor, whole sequence", "Megatron all-reduce", "tensor", {**_TENSOR, "shard_plan": WHOLE_SEQUENCE}),
    Case("tensor", "DTensor", "tensor", _TENSOR),
    Case("cp ring", "torch's ring", "context", {"mesh": {"cp": DEVICES}, "shard_plan": RING}, LONG),
    Case("experts", "torchtitan", "experts", _EXPERTS, model=experts.ExpertGPT),
    Case("zero 0", "DDP", "data", _REPLICAS),
    Case("zero 3", "FSDP2", "data", _ZERO3),
    Case("zero 1", "ZeroRedundancyOptimizer", "data", _ZERO1),
    Case("recompute full", "torch.utils.checkpoint", "recompute", {**_REPLICAS, "recompute": "full"}),
    Case(
        "recompute selective", "torch.utils.checkpoint, selective", "recompute", {**_REPLICAS, "recompute": "selective"}
    ),
    *(
        Case(f"compiled, {name}", f"not compiled, {name}", f"compiled {name}", pins)
        for name, pins in {
            "replicas": _REPLICAS,
            "tensor": _TENSOR,
            "zero 3": _ZERO3,
            "selective": {**_REPLICAS, "recompute": "selective"},
        }.items()
    ),
    Case("compiled, replicas", "DDP, blocks compiled", "compiled replicas", _REPLICAS),
    Case("compiled, zero 3", "FSDP2, blocks compiled", "compiled zero 3", _ZERO3),
    _emitted("head in chunks", "all logits at once", {**_REPLICAS, "loss_chunk": 128}, {**_REPLICAS, "loss_chunk": 0}),
    _emitted("8 bits, emulated", "bf16", _REPLICAS, _REPLICAS, {**_BF16, "fp8": "**"}, _BF16),
    Case("checkpoint", "dcp.save", "save", _ZERO3),
    Case("zero 1, slow network", "not overlapped", "slow", _ZERO1),
)


SAVE, SLOW, LATE_S = CASES[-2], CASES[-1], 0.1
_BY_TORCH: dict[str, Callable[..., data_parallel.Stepper]] = {
    "DDP": data_parallel.ddp,
    "DDP, blocks compiled": partial(data_parallel.ddp, compiled=True),
    "FSDP2": data_parallel.fsdp2,
    "FSDP2, blocks compiled": partial(data_parallel.fsdp2, compiled=True),
    "ZeroRedundancyOptimizer": data_parallel.zero_redundancy,
    "torch.utils.checkpoint": partial(data_parallel.recomputing, selective=False),
    "torch.utils.checkpoint, selective": partial(data_parallel.recomputing, selective=True),
}


@dataclass(frozen=True)
class Comparison:
    """Medians over the rounds, and the middle half of the rounds' own ratios, of which ``ratio`` is the median.

    The two steps of a round see the same machine; the medians of two samples that drift together need not.
    """

    name: str
    against: str
    rounds: int
    handwritten_s: float
    emitted_s: float
    ratio: float
    middle_half: tuple[float, float]
    cpu_ratio: float
    launches: tuple[int, int] | None  # emitted, by hand; of compiled blocks nothing is counted
    loss_difference: float
    compile_s: float | None = None  # processor time of a rank


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.runtime", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument(
        "--only", metavar="PATTERN", default="*", help="rows such as 'tensor*' or '*DTensor'; default: all"
    )
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # one process of a launch
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if fnmatch(case.label, options.only)]
    if not chosen:
        parser.error(f"--only {options.only!r} fits none of: {', '.join(case.label for case in CASES)}")
    if options.rank is not None:
        with start(TIMEOUT_S) as ranks:
            _measure(options.rank, options.rounds, ranks)
        return
    launches = dict.fromkeys(case.launch for case in chosen)
    comparisons = [
        comparison
        for launch in launches
        for comparison in _compare([case for case in chosen if case.launch == launch], options.rounds)
    ]
    if options.json:
        print(json.dumps({**_setting(), "comparisons": [asdict(comparison) for comparison in comparisons]}))
    else:
        _show(comparisons)


# ---- the parent: emit, launch, sum up --------------------------------------------------------------------------


def _compare(cases: Sequence[Case], rounds: int) -> list[Comparison]:
    torch.manual_seed(0)
    rows, length = cases[0].batch
    model, batch = cases[0].model(length), gpt.example_batch(rows, length)
    programs = dict[str, gp.Program]()
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_") as scratch:
        folder = Path(scratch)
        save_file({**batch}, str(folder / "batch.safetensors"))
        save_file(model.state_dict(), str(folder / "weights.safetensors"))
        contestants = []
        emitted = {each.name: each for case in cases for each in (case, case.other) if each is not None}
        for made in emitted.values():
            if (key := str(made.export)) not in programs:
                example: dict[str, Any] = {"args": (batch["ids"],), "targets": (batch["labels"],)}
                programs[key] = gp.export(model, **example, loss_fn=gpt.loss_fn, **made.export)
            gp.partition(programs[key], gp.plan(programs[key], **made.program)).save(folder / made.name)
            contestants.append(made.name)
        contestants += dict.fromkeys(case.against for case in cases if case.against not in contestants)
        (folder / "contestants.json").write_text(json.dumps(contestants))
        arguments = ["--rank", str(folder), "--rounds", str(rounds)]
        torchrun("benchmarks.runtime", arguments, nproc=DEVICES, timeout_s=TIMEOUT_S, module=True)
        steps = json.loads((folder / "steps.json").read_text())
    return [_compared(case, steps[case.name], steps[case.against]) for case in cases]


def _compared(case: Case, emitted: Mapping[str, list[float]], handwritten: Mapping[str, list[float]]) -> Comparison:
    ratios = [ours / theirs for ours, theirs in zip(emitted["seconds"], handwritten["seconds"])]
    first, middle, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Comparison(
        name=case.name,
        against=case.against,
        rounds=len(ratios),
        handwritten_s=statistics.median(handwritten["seconds"]),
        emitted_s=statistics.median(emitted["seconds"]),
        ratio=middle,
        middle_half=(first, third),
        cpu_ratio=statistics.median(a / b for a, b in zip(emitted["cpu"], handwritten["cpu"])),
        launches=(int(emitted["launches"][0]), int(handwritten["launches"][0])) if emitted["launches"] else None,
        compile_s=emitted["first_cpu"][0] - statistics.median(emitted["cpu"]) if case.compiles else None,
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(emitted["losses"], handwritten["losses"])),
    )


def _setting() -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in gpt.GPT().parameters())
    return {
        "graphpar": gp.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads in all, 1 a process",
        "model": f"GPT of {parameters / 1e6:.1f} M parameters: {gpt.LAYERS} layers of {gpt.WIDTH}",
        "batch": f"{BATCH} x {gpt.LENGTH}; pipelines in {MICROBATCHES} microbatches; cp {LONG[0]} x {LONG[1]}",
        "devices": DEVICES,
    }


def _show(comparisons: Sequence[Comparison]) -> None:
    setting = _setting()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(f"{setting['model']}, batch {setting['batch']}")
    console.print(f"{DEVICES} gloo processes, torch {setting['torch']}, {comparisons[0].rounds} rounds\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "emitted",
        "against",
        "by hand",
        "emitted",
        "ratio",
        "middle half",
        "cpu",
        "launches",
        "losses differ by",
        "compile",
    ):
        table.add_column(heading, justify="left" if len(table.columns) < 2 else "right", no_wrap=True)
    for row in comparisons:
        table.add_row(
            row.name,
            row.against,
            f"{row.handwritten_s * 1e3:.1f} ms",
            f"{row.emitted_s * 1e3:.1f} ms",
            f"{row.ratio:.3f}",
            f"{row.middle_half[0]:.3f} to {row.middle_half[1]:.3f}",
            f"{row.cpu_ratio:.3f}",
            "" if row.launches is None else "/".join(map(str, row.launches)),
            f"{row.loss_difference:.1e}",
            "" if row.compile_s is None else f"{row.compile_s:.1f} s",
        )
    console.print(table)


# ---- one rank: all contestants, step by step -------------------------------------------------------------------


@dataclass
class _Contestant:
    """A step that returns the loss where the last stage is, and what it took so far."""

    step: Step
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_cpu: list[float] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)


class _Launches(TorchDispatchMode):
    """Counts the operators that are called inside, other than views, waiting and marks of the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        self.count += not is_view and "wait_tensor" not in str(func) and func.namespace != "profiler"
        return func(*args, **(kwargs or {}))


def _measure(folder: Path, rounds: int, ranks: Ranks) -> None:
    """Steps in turn, each round in the other order; the last rank writes what it saw."""
    batch, weights = load_file(folder / "batch.safetensors"), load_file(folder / "weights.safetensors")
    contestants: dict[str, _Contestant] = {}
    for name in json.loads((folder / "contestants.json").read_text()):
        if name == "PipelineStage":
            schedule = json.loads((folder / next(iter(contestants)) / "plan.json").read_text())["schedule"]
            step = _pipeline_step(schedule, weights, batch, ranks)
        elif name == "torch's ring":
            step = partial(context.stepping(weights, LEARNING_RATE), batch)
        elif name == "torchtitan":
            step = partial(experts.stepping(weights, LEARNING_RATE), batch)
        elif name == "DTensor":
            step = _dtensor_step(weights, batch, ranks)
        elif name.startswith("Megatron"):
            step = _megatron_step(name, weights, batch)
        elif name in _BY_TORCH:
            step = partial(_BY_TORCH[name](weights, ranks.device, LEARNING_RATE), batch)
        elif name == SAVE.name:
            step = _saving_step(folder, batch, ranks)
        elif name == SAVE.against:
            step = data_parallel.saving(weights, ranks.device, LEARNING_RATE, batch, folder / "by hand")
        elif name in (SLOW.name, SLOW.against):
            step = _emitted_step(
                folder / SLOW.name, folder / "weights.safetensors", batch, ranks, LATE_S, name == SLOW.against
            )
        else:
            compiled = name.startswith("compiled")
            program = folder / (f"compiled{name.removeprefix('not compiled')}" if name.startswith("not ") else name)
            step = _emitted_step(program, folder / "weights.safetensors", batch, ranks, compile=compiled)
        contestants[name] = _Contestant(step)
    counts = not any("compiled" in name for name in contestants)  # torch.compile takes no dispatch mode
    for turn in range(WARM_UP + rounds):
        for contestant in list(contestants.values())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            with (counted := _Launches()) if counts and turn == WARM_UP - 1 else nullcontext():
                loss = contestant.step()
            worked = time.process_time() - worked
            dist.barrier()
            if not turn:
                contestant.first_cpu.append(worked)
            if counts and turn == WARM_UP - 1:
                contestant.launches.append(counted.count)
            if turn >= WARM_UP:
                contestant.seconds.append(time.perf_counter() - began)
                contestant.cpu.append(worked)
            if loss is not None:
                contestant.losses.append(loss.item())
    if ranks.rank == DEVICES - 1:
        record = {
            name: {key: value for key, value in vars(c).items() if key != "step"} for name, c in contestants.items()
        }
        (folder / "steps.json").write_text(json.dumps(record))


def _emitted_step(
    folder: Path,
    weights: Path,
    batch: dict[str, Tensor],
    ranks: Ranks,
    late_s: float = 0.0,
    waits: bool = False,
    compile: bool = False,
) -> Step:
    pipeline = Pipeline(folder, ranks.device, compile=compile)
    pipeline.load_weights(weights)
    if late_s:
        for unit in pipeline._parameters.units:
            unit.gather = partial(_late, unit.gather, late_s)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor | None:
        loss = pipeline.step(batch)
        optimizer.step()
        pipeline.zero_grad()
        if waits:
            pipeline.synchronize()
        return loss

    return step


def _saving_step(folder: Path, batch: dict[str, Tensor], ranks: Ranks) -> Step:
    pipeline = Pipeline(folder / SAVE.name, ranks.device)
    pipeline.load_weights(folder / "weights.safetensors")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)
    loss = pipeline.step(batch)
    optimizer.step()
    numbers = itertools.count()

    def save() -> Tensor | None:
        number = next(numbers)
        pipeline.save_checkpoint(folder / "saved" / str(number), optimizer, step=number, keep=1)
        return loss

    return save


class _Late:
    """A collective whose result arrives some seconds after it was started."""

    def __init__(self, work: dist.Work, late_s: float) -> None:
        self.work, self.arrives = work, time.monotonic() + late_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.arrives - time.monotonic()))
        self.work.wait()


def _late(gather: Callable[[Tensor], list[dist.Work]], late_s: float, flat: Tensor) -> list[Any]:
    return [_Late(work, late_s) for work in gather(flat)]


def _megatron_step(name: str, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> Step:
    group = dist.group.WORLD
    assert group is not None
    model = megatron.MegatronGPT(group, name != "Megatron all-reduce", keeps=name == "Megatron, shards kept")
    megatron.load(model, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor | None:
        loss: Tensor = model(batch["ids"], batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        megatron.finish_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _dtensor_step(weights: dict[str, Tensor], batch: dict[str, Tensor], ranks: Ranks) -> Step:
    model = dtensor.parallelized(init_device_mesh(ranks.device.type, (DEVICES,)), weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor | None:
        loss = dtensor.loss_and_backward(model, batch["ids"], batch["labels"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _pipeline_step(name: str, weights: dict[str, Tensor], batch: dict[str, Tensor], ranks: Ranks) -> Step:
    """What torch's documentation shows, with a loss that is a sum over the microbatches, as a masked mean needs."""
    model = gpt.GPT()
    model.load_state_dict(weights)
    rows = BATCH // MICROBATCHES
    hidden = torch.empty(rows, gpt.LENGTH, gpt.WIDTH, requires_grad=True)
    logits = torch.empty(rows, gpt.LENGTH, gpt.VOCAB, requires_grad=True)
    first = ranks.rank == 0
    module: nn.Module = gpt.FirstStage(model) if first else gpt.LastStage(model)
    stage = PipelineStage(
        module,
        ranks.rank,
        DEVICES,
        ranks.device,
        input_args=(batch["ids"][:rows],) if first else (hidden,),
        output_args=(hidden,) if first else (logits,),
    )
    valid = torch.ones(())

    def loss_share(output: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=gpt.IGNORED, reduction="sum")
        return total / valid

    schedule = SCHEDULES[name](stage, MICROBATCHES, loss_fn=loss_share, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor | None:
        nonlocal valid
        losses: list[Tensor] = []
        if first:
            schedule.step(batch["ids"], return_outputs=False)
        else:
            valid = (batch["labels"] != gpt.IGNORED).sum()
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return None if first else torch.stack([loss.detach() for loss in losses]).sum()

    return step


if __name__ == "__main__":
    main()
