"""Tracing the model of a model file, as ``compile`` and ``estimate`` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphpar import api
from graphpar.frontend.modelfile import ModelFile
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.passes.table import Step


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
