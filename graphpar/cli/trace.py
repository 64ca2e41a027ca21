"""What commands that trace a model share: the trace, and how long phases and steps take."""

from __future__ import annotations

import argparse
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from graphpar import api
from graphpar.cost_models.memory import with_optimizer
from graphpar.frontend.capture import capture
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.modelfile import ModelFile
from graphpar.hardware.cluster import Cluster
from graphpar.ir.precision import AUTO, Precision
from graphpar.ir.program import ModelSource, Program
from graphpar.passes.step import Step
from graphpar.passes.table import PASSES, PassList, check_skipped
from graphpar.runtime.option_kinds import Seq


def asked_precision(options: argparse.Namespace, *clusters: str | None) -> Precision:
    """Return the dtypes that are asked for; where none is named, the default on ``clusters``, of which None is this machine: on GPUs bf16
    with parameters in fp32."""
    given = {name: getattr(options, name, None) for name in inspect.signature(Precision.of).parameters}
    if all(given[name] is None for name in ("dtype", "pure", "param_dtype")):
        found = [Cluster.of_this_machine(1) if name is None else Cluster.parse(name) for name in clusters]
        given["dtype"] = AUTO if any(cluster.device.faster_in_bf16 for cluster in found) else "fp32"
    return Precision.of(**given)


def export_file(
    file: ModelFile,
    mode: str | None,
    precision: Precision | None,
    skip: Sequence[str] = (),
    after_pass: Callable[[Step, Program], None] | None = None,
    evaluates: bool = False,
    cache: CaptureCache | None = None,
    seq: Seq | None = None,
) -> Program:
    """Trace the model with its example inputs, loss and passes; the rest is as :func:`graphpar.export` takes it.

    Args:
        cache: where its captures are kept.

    Raises:
        GraphparError: the model can't be traced.
    """
    passes = PASSES if file.passes is None else PassList.of(file.passes)
    check_skipped(passes, skip)
    source = ModelSource(
        file.model, file.args, file.kwargs, file.loss_fn, file.targets, precision or Precision(), mode, evaluates, seq
    )

    def traced(source: ModelSource, batch_dims: Mapping[str, int | None] | None) -> Program:
        return with_optimizer(
            capture(source, batch_dims), file.optimizer
        )  # which a stored capture knows, without an import

    trace = traced if cache is None else partial(cache.capture, traced)
    return api.export_source(source, file.batch_dims, passes, skip, after_pass, trace)


@dataclass
class Clock:
    """Seconds of each phase and of all together, and of each step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"capture": 0.0, "plan": 0.0, "emit": 0.0, "total": 0.0})
    steps: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def step(self, name: str) -> None:
        """Note the end of a step; it began where the last one ended."""
        self.steps[name] = time.perf_counter() - self.started - math.fsum(self.steps.values())

    def within(self, name: str, parts: Mapping[str, float]) -> None:
        """Count ``parts`` of the step ``name`` as separate steps."""
        self.steps[name] -= math.fsum(parts.values())
        self.steps |= parts

    def phase(self, name: str) -> None:
        """Note the end of a phase."""
        now = time.perf_counter()
        self.seconds[name] = now - self.started - self.seconds["total"]
        self.seconds["total"] = now - self.started
