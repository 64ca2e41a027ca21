"""How good the planner's choice is: feasible plans of small models on local processes, predicted and measured.

    python -m benchmarks.regret [--json] [--processes 2 4] [--models gpt llama mlp] [--plans 60] [--cluster PROFILE.json]

    calibrate ──► Cluster ──Planner: every mesh x ZeRO level x schedule x microbatch size x recomputation──► predicted seconds ─┐
                     └── a sample and the fastest: partition, save ──► steps on local processes ──► measured ───────────────────┴─► scores

Rank correlation is Spearman's, of predicted and measured step times of a sample of all plans of a model. Regret is the measured
time of the plan that is predicted to be the fastest over that of the fastest measured one: the sample, and the plans predicted to be
the next fastest, which have no part in the rank correlation unless they are drawn.

A step in which others used the machine is taken again, as long as patience lasts. What they do all the same falls on
some plan, so plans take a few steps in turn, a chunk at a time with one plan that is in every chunk: a plan's time is its
median over that plan's in the same chunk. The few fastest and the predicted one are measured again, together and for
longer; regret is of that. The machine is calibrated in the same run.

What else runs on the same host changes the speed of a virtual machine within minutes, unseen by its kernel: after the
calibration and in each chunk the same work is timed. ``drift`` is how many times as long it takes in the median chunk;
errors are given as measured, and without it.
"""

from __future__ import annotations

import argparse
import json
import random
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
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from benchmarks.regret_models import MODELS
from graphpar.cost_models.calibrate import calibrate
from graphpar.cost_models.contention import Watch
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program
from graphpar.parts import untied
from graphpar.passes.planning.candidates import Priced
from graphpar.passes.planning.choose import choose
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.runtime import Pipeline, Ranks, start
from graphpar.runtime.launching.launch import torchrun
from graphpar.runtime.option_kinds import Recompute

CHUNK, WARM_UP, ROUNDS = 10, 1, 5
FINALISTS, FINAL_ROUNDS = 5, 15
PLANS, NEXT = 60, 10
"""How many plans are drawn of all, and how many of those predicted to be the fastest are measured beside them."""
RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "budget:0.4", "full")
MOST_MICROBATCHES = 8
IN_A_ROW = 2
"""Timed steps of a plan, one after the other, before the next plan's turn."""
GROUP_TIMEOUT_S, TIMEOUT_S = 3600, 7200
LEARNING_RATE = 1e-4
WORK_TIMES, WORK_SAMPLES = 10, 9
"""How often the work that shows the machine's speed is done, and in how many samples."""


@dataclass(frozen=True)
class Row:
    """One plan, in seconds of a step; ``again_s``: of a finalist, measured beside the others. ``drawn``: it is of the sample."""

    plan: str
    predicted_s: float
    measured_s: float
    again_s: float | None = None
    drawn: bool = True


@dataclass(frozen=True)
class Score:
    """One model on a number of processes."""

    model: str
    processes: int
    plans: int
    """Of the whole space."""
    rank_correlation: float
    regret: float
    chosen: str
    best: str
    error: float
    """Median of |predicted / measured - 1|."""
    drift: float
    """How many times as long as after the calibration the machine takes for the same work."""
    steady_error: float
    """The error of measured times that are divided by it."""
    disturbed: float
    """The share of steps in which others used the machine."""
    rows: tuple[Row, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.regret", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="default: all")
    parser.add_argument("--cluster", metavar="PROFILE.json", help="a profile instead of a calibration in the same run")
    parser.add_argument(
        "--plans", type=int, default=PLANS, help=f"how many are drawn of a model's; 0: all (default: {PLANS})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps of each plan (default: {ROUNDS})")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for others to be quiet, a model (default: 60)",
    )
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # one process of a launch
    options = parser.parse_args(arguments)
    if options.rank is not None:
        with start(GROUP_TIMEOUT_S) as ranks:
            _measure(options.rank, ranks)
        return
    scores = []
    for processes in options.processes:
        cluster = (
            Cluster.parse(f"{processes}x{options.cluster}") if options.cluster else calibrate("cpu", processes).cluster
        )
        with tempfile.TemporaryDirectory(prefix="graphpar_regret_") as scratch:
            *_, before_s = _timed(Path(scratch), cluster.size, [], 0, options.patience)
        for model in options.models:
            scores.append(made := score(model, cluster, options.rounds, options.patience, options.plans, before_s))
            _say(
                f"{model} on {processes}: {len(made.rows)} plans, rank correlation {made.rank_correlation:.3f}, regret {made.regret:.3f}, "
                f"off by {made.error:.0%}, {made.steady_error:.0%} without a drift of {made.drift:.2f}, "
                f"{made.disturbed:.0%} disturbed; chosen {made.chosen}, fastest {made.best}"
            )
    if options.json:
        print(
            json.dumps(
                {"graphpar": gp.__version__, "torch": torch.__version__, "scores": [asdict(each) for each in scores]}
            )
        )
    else:
        _show(scores)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the parent: predict, emit, launch, sum up -----------------------------------------------------------------


def score(name: str, cluster: Cluster, rounds: int, patience_s: float, plans: int, before_s: float) -> Score:
    """Predict every plan of the model ``name``, and measure ``plans`` of them, the fastest among them; ``before_s`` is what
    :func:`_work_s` was when the cluster was calibrated."""
    module, program = MODELS[name].program()
    every = predicted(program, cluster)
    drawn = {plan_name(each) for each in sampled(every, plans)}
    priced = [each for place, each in enumerate(every) if place < NEXT or plan_name(each) in drawn]
    with tempfile.TemporaryDirectory(prefix="graphpar_regret_") as scratch:
        folder = Path(scratch)
        save_file(dict(MODELS[name].batch()), str(folder / "batch.safetensors"))
        save_file(untied(module.state_dict()), str(folder / "weights.safetensors"))
        saved = _emitted(program, cluster, priced, folder)
        _say(f"{name} on {cluster.size}: measuring {len(saved)} plans")
        measured, disturbed, work_s = _timed(folder, cluster.size, _chunks(list(saved)), rounds, patience_s)
        chosen = min(saved, key=lambda plan: saved[plan].estimate.step_time_s)
        fastest = sorted(measured, key=measured.__getitem__)[:FINALISTS]
        finals = list(dict.fromkeys([chosen, *fastest]))
        again, *_ = _timed(folder, cluster.size, [finals], FINAL_ROUNDS, patience_s)
    rows = tuple(
        Row(plan, saved[plan].estimate.step_time_s, seconds, again.get(plan), plan in drawn)
        for plan, seconds in sorted(measured.items(), key=lambda entry: entry[1])
    )
    best, ranked = min(again, key=again.__getitem__), [row for row in rows if row.drawn]
    drift = work_s / before_s
    error, steady = (
        statistics.median(abs(times * row.predicted_s / row.measured_s - 1) for row in ranked) for times in (1, drift)
    )
    return Score(
        model=name,
        processes=cluster.size,
        plans=len(every),
        rank_correlation=spearman([row.predicted_s for row in ranked], [row.measured_s for row in ranked]),
        regret=again[chosen] / again[best],
        chosen=chosen,
        best=best,
        error=error,
        drift=drift,
        steady_error=steady,
        disturbed=disturbed,
        rows=rows,
    )


def predicted(program: Program, cluster: Cluster) -> list[Priced]:
    """Every plan that the planner considers, with each kind of recomputation, but for those of very many microbatches, the most promising
    first."""
    found: dict[str, Priced] = {}
    for kind in RECOMPUTED:
        planner = Planner(program, PlanConstraints(cluster=cluster, recompute=kind, overlap_tp=False))
        candidates = [each for each in planner.bounded(all_degrees=True)[0] if each.microbatches <= MOST_MICROBATCHES]
        priced = [planner.fitting.exactly(planner.fitting.price(candidate)) for candidate in candidates]
        found |= {plan_name(each): each for each in priced if each.fits}
    return sorted(found.values(), key=lambda each: each.rank_key)


def sampled(plans: Sequence[Priced], number: int) -> list[Priced]:
    """Draw ``number`` plans, the same ones each time; all of them for 0."""
    return list(plans) if not 0 < number < len(plans) else random.Random(0).sample(plans, number)


def plan_name(priced: Priced) -> str:
    """Mesh, ZeRO level, recomputation, schedule, stages a rank and microbatches, as ``pp2 fsdp2 zero3 full 1F1B/1 x8``."""
    candidate = priced.candidate
    short = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "fsdp", "tp": "tp"}
    mesh = " ".join(f"{short[axis]}{degree}" for axis, degree in candidate.mesh.degrees().items() if degree > 1)
    schedule = f" {candidate.schedule}/{candidate.stages_per_rank}" if candidate.mesh.pp > 1 else ""
    zero = f" zero{candidate.zero}" if candidate.zero else ""
    zero += f" {candidate.reshard}" if candidate.reshard != "default" else ""
    again = "" if priced.recompute == "none" else f" {priced.recompute}"
    return f"{mesh}{zero}{again}{schedule} x{candidate.microbatches}"


def _emitted(program: Program, cluster: Cluster, priced: Sequence[Priced], folder: Path) -> dict[str, Priced]:
    """Plans by name, each a folder of its own; those that can't be emitted are left out, and said."""
    saved: dict[str, Priced] = {}
    for each in priced:
        candidate = each.candidate
        pins = PlanConstraints(
            schedule=candidate.schedule,
            microbatch_size=candidate.microbatch_size,
            split_points=each.split_points if candidate.mesh.pp > 1 else None,
            zero=candidate.zero,
            reshard=candidate.reshard,
            recompute=each.recompute,
            cluster=cluster,
        )
        try:
            plan = choose(program, candidate.mesh, pins)
            gp.partition(program, plan).save(folder / plan_name(each))
            saved[plan_name(each)] = each
        except gp.GraphparError as error:
            _say(f"{plan_name(each)}: {error}")
    return saved


def _chunks(plans: Sequence[str]) -> list[list[str]]:
    """Plans a few at a time, every chunk with the first."""
    rest = list(plans[1:])
    return [[plans[0], *rest[at : at + CHUNK]] for at in range(0, len(rest), CHUNK)] or [[plans[0]]]


def _timed(
    folder: Path, processes: int, chunks: Sequence[Sequence[str]], rounds: int, patience_s: float
) -> tuple[dict[str, float], float, float]:
    """Seconds of a step by plan: relative to the plan that all chunks have, times what that took on the whole; the
    share disturbed; and the median of :func:`_work_s`."""
    (folder / "request.json").write_text(json.dumps({"chunks": chunks, "rounds": rounds, "patience_s": patience_s}))
    torchrun("benchmarks.regret", ["--rank", str(folder)], nproc=processes, timeout_s=TIMEOUT_S, module=True)
    found = json.loads((folder / "steps.json").read_text())
    steps: list[dict[str, list[float]]] = found["chunks"]
    work_s = statistics.median(found["work_s"])
    if not chunks:
        return {}, found["disturbed"], work_s
    common = chunks[0][0]
    usual = statistics.median(seconds for chunk in steps for seconds in chunk[common])
    times = {
        plan: usual * statistics.median(seconds) / statistics.median(chunk[common])
        for chunk in steps
        for plan, seconds in chunk.items()
    }
    return times, found["disturbed"], work_s


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of ranks; equal values share a rank."""
    if len(first) < 2:
        return 1.0
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def _show(scores: Sequence[Score]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = (
        "model",
        "processes",
        "plans",
        "of",
        "rank correlation",
        "regret",
        "off by",
        "drift",
        "without it",
        "disturbed",
        "chosen",
        "fastest",
    )
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in ("model", "chosen", "fastest") else "right", no_wrap=True
        )
    for each in scores:
        table.add_row(
            each.model,
            str(each.processes),
            str(len(each.rows)),
            str(each.plans),
            f"{each.rank_correlation:.3f}",
            f"{each.regret:.3f}",
            f"{each.error:.0%}",
            f"{each.drift:.2f}",
            f"{each.steady_error:.0%}",
            f"{each.disturbed:.0%}",
            each.chosen,
            each.best,
        )
    console.print(table)


# ---- one rank: plans step by step ------------------------------------------------------------------------------


def _measure(folder: Path, ranks: Ranks) -> None:
    """Chunk after chunk: its plans are built, take steps in turn, each round in the other order, and are closed."""
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    watch = Watch(ranks, request["patience_s"])
    found: list[dict[str, list[float]]] = []
    work = [_work_s(watch)]
    for chunk in request["chunks"]:
        batch = load_file(folder / "batch.safetensors")
        pipelines = {plan: Pipeline(folder / plan, ranks.device) for plan in chunk}
        steps = {plan: _step_of(pipeline, folder, batch) for plan, pipeline in pipelines.items()}
        seconds: dict[str, list[float]] = {plan: [] for plan in chunk}
        for turn in range(WARM_UP + request["rounds"]):
            for plan in list(chunk)[:: 1 if turn % 2 else -1]:
                steps[plan]()  # not timed: before it caches and the allocator hold another plan's memory
                if turn >= WARM_UP:
                    seconds[plan] += [watch.undisturbed(steps[plan]) for _ in range(IN_A_ROW)]
        for pipeline in pipelines.values():
            pipeline.close()
        found.append(seconds)
        work.append(_work_s(watch))
    if ranks.rank == 0:
        (folder / "steps.json").write_text(
            json.dumps({"chunks": found, "work_s": work, "disturbed": watch.disturbed / max(1, watch.measured)})
        )


def _work_s(watch: Watch) -> float:
    """Seconds of work that is the same each time, of all ranks at once: a product, and reading and writing more than caches hold."""
    first, second, large = torch.randn(512, 512), torch.randn(512, 2048), torch.randn(2**22)

    def work() -> float:
        began = time.perf_counter()
        for _ in range(WORK_TIMES):
            torch.mm(first, second)
            large.mul_(1.0)
        return time.perf_counter() - began

    work()
    return statistics.median(watch.undisturbed(work) for _ in range(WORK_SAMPLES))


def _step_of(pipeline: Pipeline, folder: Path, batch: dict[str, Tensor]) -> Callable[[], float]:
    """A step of all ranks, which gives its seconds."""
    pipeline.load_weights(folder / "weights.safetensors")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        began = time.perf_counter()
        pipeline.step(batch)
        optimizer.step()
        pipeline.zero_grad()
        dist.barrier()
        return time.perf_counter() - began

    return step


if __name__ == "__main__":
    main()
