"""Seconds of the sharding search alone: the median of repetitions in one process, without imports.

    program ──prepared, build_problem──► problem ──search──► solution ──sharding_of──► decisions ──shard──► a rank's program
                     build_s                       solve_s                read_s                  lower_s

Instances of a block share their decision, so depth should cost next to nothing: the ratios hold 126 layers against 4, and two
axes against one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import graphpar as gp
from graphpar.frontend.modelfile import import_file, load_model_file
from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.problem import build_problem
from graphpar.passes.sharding.search import search
from graphpar.passes.sharding.shard import shard
from graphpar.passes.sharding.solution import sharding_of

EXAMPLES = Path(__file__).parents[1] / "examples"
MICROBATCH, MICROBATCHES = 1, 8
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Model:
    """An example, and how many layers of it are taken; None is all."""

    name: str
    layers: int | None = None

    @property
    def label(self) -> str:
        """Its name in the table."""
        return self.name if self.layers is None else f"{self.name}, {self.layers} layers"


MODELS = (Model("gpt2"), Model("llama3_8b"), Model("llama3_405b", 4), Model("llama3_405b"))
MESHES: tuple[Mapping[str, int], ...] = ({"tp": 8}, {"tp": 8, "cp": 2})


@dataclass(frozen=True)
class SearchTime:
    """Medians over ``repetitions``, in seconds of processor time; ``plan_s`` is that of build, solve and read together."""

    model: str
    layers: int
    mesh: dict[str, int]
    repetitions: int
    operators: int
    capture_s: float
    build_s: float
    solve_s: float
    read_s: float
    plan_s: float
    lower_s: float


@dataclass(frozen=True)
class Ratio:
    """One measurement over another: the median of the repetitions' own ratios."""

    what: str
    plan: float
    lower: float


@dataclass
class _Run:
    """A model on a mesh, and what its repetitions took: build, solve, read, all three, lower."""

    model: Model
    program: Program
    mesh: Mapping[str, int]
    capture_s: float
    rows: list[tuple[float, ...]] = field(default_factory=list)
    operators: int = 0

    def repeat(self) -> None:
        workload = Workload(MICROBATCH, MICROBATCHES, self.program.mode == "train")
        sized = self.program.at_batch(MICROBATCH)
        gc.collect()  # what another run left is not for this one to clear away
        problem, build = _timed(
            lambda: build_problem(prepared(self.program, Sharding(), self.program.batch), self.mesh)
        )
        solution, solve = _timed(lambda: search(problem, workload))
        sharding, read = _timed(lambda: sharding_of(solution))
        _, lower = _timed(lambda: shard(sized, sharding))
        self.rows.append((build, solve, read, build + solve + read, lower))
        self.operators = len(problem.operators)

    def summary(self) -> SearchTime:
        layers = max(len(block.instances) for block in self.program.blocks.values())
        medians = map(statistics.median, zip(*self.rows))
        return SearchTime(
            self.model.label, layers, dict(self.mesh), len(self.rows), self.operators, self.capture_s, *medians
        )


def measure(models: Sequence[Model], repetitions: int = 7) -> tuple[list[SearchTime], list[Ratio]]:
    """Each model on each of ``MESHES``, in turn: whatever else the machine does falls on all of them."""
    runs = []
    for model in models:
        program, capture_s = _timed(lambda m=model: captured(m))  # type: ignore[misc]
        runs += [_Run(model, program, mesh, capture_s) for mesh in MESHES]
    for _ in range(repetitions):
        for run in runs:
            run.repeat()
    return [run.summary() for run in runs], _ratios(runs)


def captured(model: Model) -> Program:
    """The example's program; its parameters are fake, so that any size fits."""
    path = EXAMPLES / f"{model.name}.py"
    config: Any = getattr(import_file(path), "config", None)  # the file builds its model from this when asked for one
    layers = config.num_hidden_layers if model.layers is not None else None
    try:
        if layers is not None:
            config.num_hidden_layers = model.layers
        file = load_model_file(path)
        return gp.export(
            file.model, file.args, file.kwargs, loss_fn=file.loss_fn, targets=file.targets, batch_dims=file.batch_dims
        )
    finally:
        if layers is not None:
            config.num_hidden_layers = layers


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """All of this runs on one thread, so that its processor time is what it takes where nothing else runs."""
    began = time.process_time()
    return work(), time.process_time() - began


def _ratios(runs: Sequence[_Run]) -> list[Ratio]:
    """126 layers over 4 on each mesh, and two axes over one for each model."""
    by_label = {(run.model.label, len(run.mesh)): run for run in runs}
    deep, shallow = MODELS[-1].label, MODELS[-2].label
    pairs = [(f"126 layers over 4, {n} {'axes' if n > 1 else 'axis'}", (deep, n), (shallow, n)) for n in (1, 2)]
    pairs += [
        (f"{label}: two axes over one", (label, 2), (label, 1)) for label in dict.fromkeys(m for m, _ in by_label)
    ]
    found = []
    for what, over, under in pairs:
        if over in by_label and under in by_label:
            rows = list(zip(by_label[over].rows, by_label[under].rows))
            plan, lower = (statistics.median(one[i] / other[i] for one, other in rows) for i in (3, 4))
            found.append(Ratio(what, plan, lower))
    return found
