"""``dtype="auto"``: bf16 where a model trains and is built in fp32 and can be traced so; else as it is."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli.trace import asked_precision


def traced(model: nn.Module, dtype: torch.dtype = torch.float32, **given: object) -> gp.Program:
    given = {"loss_fn": lambda y: y.float().square().mean()} | given
    return gp.export(model, (torch.randn(4, 8, dtype=dtype),), dtype="auto", **given)  # type: ignore[arg-type]


class AddsTable(nn.Module):
    """A buffer in fp32 beside weights in bf16, which has no product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x + self.table)  # type: ignore[no-any-return]


def test_a_model_in_fp32_trains_in_bf16() -> None:
    program = traced(nn.Linear(8, 8))
    assert program.source is not None
    assert (program.source.precision.dtype, program.source.precision.param_dtype) == ("bf16", "fp32")
    assert gp.plan(program).dtype == "bf16"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    program = traced(nn.Linear(8, 8, dtype=dtype), dtype)
    assert program.source is not None and program.source.precision.dtype == "fp32"  # nothing is cast
    assert {info.dtype for info in program.parameters.values()} == {dtype}


@pytest.mark.parametrize("given", [{"mode": "infer", "loss_fn": None}, {"loss_fn": None}])
def test_inference_stays(given: dict[str, object]) -> None:
    program = traced(nn.Linear(8, 8), **given)
    assert program.mode == "infer" and program.source is not None and program.source.precision.dtype == "fp32"


def test_what_bf16_can_not_trace_is_in_fp32_and_said() -> None:
    program = traced(AddsTable())
    assert program.source is not None and program.source.precision.dtype == "fp32"
    assert any("computes in fp32, since in bf16 it can't be traced" in line for line in program.warnings)
    assert not traced(nn.Linear(8, 8)).warnings


def test_the_default_is_that_of_the_cluster() -> None:
    of = {
        name: asked_precision(argparse.Namespace(), *name.split()).dtype
        for name in ("8xH100", "2xCPU 2xA100", "2xCPU", "2xV100")
    }
    assert of == {
        "8xH100": "auto",
        "2xCPU 2xA100": "auto",
        "2xCPU": "fp32",
        "2xV100": "fp32",
    }  # a V100 has no units for bf16
