"""Tracing the model of a model file, as ``compile`` and ``estimate`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphpar import api
from graphpar.frontend.modelfile import ModelFile
from graphpar.hardware.cluster import Cluster
from graphpar.ir.precision import AUTO, Precision
from graphpar.ir.program import Program
from graphpar.passes.table import Step


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
) -> Program:
    """Trace the model with its example inputs, loss and passes; the rest is as :func:`graphpar.export` takes it.

    Raises:
        GraphparError: the model can't be traced.
    """
    return api.export(
        file.model,
        file.args,
        file.kwargs,
        loss_fn=file.loss_fn,
        targets=file.targets,
        batch_dims=file.batch_dims,
        mode=mode,
        evaluates=evaluates,
        dtype=None if precision is None else precision.dtype,
        param_dtype=None if precision is None else precision.param_dtype or None,
        passes=file.passes,
        skip=skip,
        after_pass=after_pass,
    )
