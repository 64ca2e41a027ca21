"""Tracing the model of a model file, as ``compile`` and ``estimate`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from graphpar import api
from graphpar.frontend.capture import capture
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.modelfile import ModelFile
from graphpar.hardware.cluster import Cluster
from graphpar.ir.precision import AUTO, Precision
from graphpar.ir.program import ModelSource, Program
from graphpar.passes.table import PASSES, PassList, Step, check_skipped


def default_dtype(*clusters: str | None) -> str:
    """Return in what a model computes on some clusters where nobody says so; None is this machine."""
    found = [Cluster.of_this_machine(1) if name is None else Cluster.parse(name) for name in clusters]
    return AUTO if any(cluster.device.faster_in_bf16 for cluster in found) else "fp32"


def export_file(
    file: ModelFile,
    mode: str | None,
    precision: Precision | None,
    skip: Sequence[str] = (),
    after_pass: Callable[[Step, Program], None] | None = None,
    evaluates: bool = False,
    cache: CaptureCache | None = None,
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
        file.model, file.args, file.kwargs, file.loss_fn, file.targets, precision or Precision(), mode, evaluates
    )
    trace = capture if cache is None else partial(cache.capture, capture)
    return api.export_source(source, file.batch_dims, passes, skip, after_pass, trace)
