"""Step time of an emitted pipeline over that of one written by hand with torch's ``PipelineStage``.

    python -m benchmarks.runtime [--json] [--rounds 20] [--schedule 1F1B --schedule GPipe]

Both pipelines hold the same model and weights, cut at the same block, with the same schedule, microbatches and
optimizer. They live in the same two gloo processes (one thread each) and take steps in turn, so that whatever else the
machine does falls on both. A step is forward, backward and AdamW; it is timed from barrier to barrier. That both give
the same loss in every step shows that they do the same work.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import graphpar as gp
from benchmarks import gpt
from graphpar.runtime import Pipeline, Ranks, start
from graphpar.runtime.launch import torchrun

DEVICES, BATCH, MICROBATCHES, WARM_UP, TIMEOUT_S = 2, 8, 8, 3, 600
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """Medians over the rounds, and the middle half of the rounds' own ratios, of which ``ratio`` is the median.

    The two steps of a round see the same machine; the medians of two samples that drift together need not.
    """

    schedule: str
    rounds: int
    handwritten_s: float
    emitted_s: float
    ratio: float
    middle_half: tuple[float, float]
    loss_difference: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.runtime", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="default: all")
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # one process of a launch
    options = parser.parse_args(arguments)
    if options.rank is not None:
        with start(TIMEOUT_S) as ranks:
            _measure(options.rank, options.rounds, ranks)
        return
    comparisons = [_compare(schedule, options.rounds) for schedule in options.schedule or SCHEDULES]
    if options.json:
        print(json.dumps({**_setting(), "comparisons": [asdict(comparison) for comparison in comparisons]}))
    else:
        _show(comparisons)


# ---- the parent: emit, launch, sum up --------------------------------------------------------------------------


def _compare(schedule: str, rounds: int) -> Comparison:
    torch.manual_seed(0)
    model, batch = gpt.GPT(), gpt.example_batch(BATCH)
    program = gp.export(model, args=(batch["ids"],), loss_fn=gpt.loss_fn, targets=(batch["labels"],))
    plan = gp.plan(
        program,
        devices=DEVICES,
        schedule=schedule,
        microbatch_size=BATCH // MICROBATCHES,
        split=[f"blocks.{gpt.LAYERS // 2}"],
    )
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_") as scratch:
        folder = gp.partition(program, plan).save(Path(scratch) / "out", weights=model.state_dict())
        save_file(batch, str(folder / "batch.safetensors"))
        arguments = ["--rank", str(folder), "--rounds", str(rounds), "--schedule", schedule]
        torchrun("benchmarks.runtime", arguments, nproc=DEVICES, timeout_s=TIMEOUT_S, module=True)
        steps = json.loads((folder / "steps.json").read_text())
    handwritten, emitted = steps["handwritten"], steps["emitted"]
    ratios = [ours / theirs for ours, theirs in zip(emitted["seconds"], handwritten["seconds"])]
    first, middle, third = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Comparison(
        schedule=schedule,
        rounds=rounds,
        handwritten_s=statistics.median(handwritten["seconds"]),
        emitted_s=statistics.median(emitted["seconds"]),
        ratio=middle,
        middle_half=(first, third),
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(emitted["losses"], handwritten["losses"])),
    )


def _setting() -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in gpt.GPT().parameters())
    return {
        "graphpar": gp.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads in all, 1 a process",
        "model": f"GPT of {parameters / 1e6:.1f} M parameters: {gpt.LAYERS} layers of {gpt.WIDTH}",
        "batch": f"{BATCH} x {gpt.LENGTH} in {MICROBATCHES} microbatches",
        "devices": DEVICES,
    }


def _show(comparisons: Sequence[Comparison]) -> None:
    setting = _setting()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print(f"{setting['model']}, batch {setting['batch']}")
    console.print(f"{DEVICES} gloo processes, torch {setting['torch']}, {comparisons[0].rounds} rounds\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("schedule", "by hand", "emitted", "ratio", "middle half", "losses differ by"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for row in comparisons:
        table.add_row(
            row.schedule,
            f"{row.handwritten_s * 1e3:.1f} ms",
            f"{row.emitted_s * 1e3:.1f} ms",
            f"{row.ratio:.3f}",
            f"{row.middle_half[0]:.3f} to {row.middle_half[1]:.3f}",
            f"{row.loss_difference:.1e}",
        )
    console.print(table)


# ---- one rank: both pipelines, step by step --------------------------------------------------------------------


@dataclass
class _Contestant:
    """One of the two pipelines: a step that returns the loss where the last stage is, and what it took so far."""

    step: Callable[[], Tensor | None]
    seconds: list[float]
    losses: list[float]


def _measure(folder: Path, rounds: int, ranks: Ranks) -> None:
    """Steps in turn, each round in the other order; the last rank writes what it saw."""
    batch = load_file(folder / "batch.safetensors")
    emitted = _Contestant(_emitted_step(folder, batch, ranks), [], [])
    handwritten = _Contestant(_handwritten_step(folder, batch, ranks), [], [])
    for turn in range(WARM_UP + rounds):
        for contestant in (emitted, handwritten) if turn % 2 else (handwritten, emitted):
            dist.barrier()
            began = time.perf_counter()
            loss = contestant.step()
            dist.barrier()
            if turn >= WARM_UP:
                contestant.seconds.append(time.perf_counter() - began)
            if loss is not None:
                contestant.losses.append(loss.item())
    if ranks.rank == DEVICES - 1:
        found = {"emitted": emitted, "handwritten": handwritten}
        record = {name: {"seconds": c.seconds, "losses": c.losses} for name, c in found.items()}
        (folder / "steps.json").write_text(json.dumps(record))


def _emitted_step(folder: Path, batch: dict[str, Tensor], ranks: Ranks) -> Callable[[], Tensor | None]:
    pipeline = Pipeline(folder, ranks.device)
    pipeline.load_weights()
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor | None:
        loss = pipeline.step(batch)
        optimizer.step()
        pipeline.zero_grad()
        return loss

    return step


def _handwritten_step(folder: Path, batch: dict[str, Tensor], ranks: Ranks) -> Callable[[], Tensor | None]:
    """What torch's documentation shows, with a loss that is a sum over the microbatches, as a masked mean needs."""
    model = gpt.GPT()
    model.load_state_dict(load_file(folder / "weights" / "model.safetensors"))
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

    plan = json.loads((folder / "plan.json").read_text())
    schedule = SCHEDULES[plan["schedule"]](stage, MICROBATCHES, loss_fn=loss_share, scale_grads=False)
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
