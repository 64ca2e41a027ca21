"""A script for ranks: several programs one after the other, each trained for some steps in an environment of its own.

    steps_script.py CASES.json     [{"name", "program", "batch", "out", "environment", "steps", "fails", "moves"}, ...]

Writes {out}/{name}.safetensors, the trained weights of the whole model, and {out}/{name}.{rank}.json, what the rank saw.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError

LEARNING_RATE = 0.05
VARIABLES = ("GRAPHPAR_DELAY", "GRAPHPAR_EVENTS")


def _train(case: dict[str, Any], device: torch.device, seen: dict[str, Any]) -> None:
    pipeline = Pipeline(case["program"], device)
    pipeline.load_weights()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE)
    batch = load_file(case["batch"])
    pipeline.assert_idle()
    for _ in range(case.get("steps", 3)):
        begin = time.monotonic()
        loss = pipeline.step(batch, broadcast_loss=True)
        assert loss is not None
        seen["losses"].append(loss.item())
        seen["seconds"].append(time.monotonic() - begin)
        pipeline.assert_idle()
        optimizer.step()
        pipeline.zero_grad()
        pipeline.assert_idle()  # new values may be on their way
        if case.get("infers"):
            pipeline.infer(batch)
            pipeline.assert_idle()
    dist.barrier()
    pipeline.save_weights(Path(case["out"]) / f"{case['name']}.safetensors")
    pipeline.close()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted")


def _fail(case: dict[str, Any], device: torch.device, seen: dict[str, Any]) -> None:
    """A step that ends with an exception in the backward of the module ``fails``, on all ranks."""
    pipeline = Pipeline(case["program"], device)
    pipeline.load_weights()
    module: nn.Module = pipeline.stages[0].get_submodule(case["fails"])
    module.register_forward_hook(lambda module, args, output: _Failing.apply(output))
    try:
        pipeline.step(load_file(case["batch"]))
    except ArithmeticError:
        seen["errors"].append(_said(pipeline.assert_idle))
    pipeline.close()


def _move(case: dict[str, Any], device: torch.device, seen: dict[str, Any]) -> None:
    pipeline = Pipeline(case["program"], device)
    pipeline.load_weights()
    for stage in pipeline.stages:
        stage.to("meta")
    seen["errors"].append(_said(lambda: pipeline.step(load_file(case["batch"]))))
    pipeline.close()


def _said(call: Any) -> str:
    try:
        call()
    except RuntimeProgramError as error:
        return str(error)
    return ""


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    with start(60.0) as ranks:
        for case in cases:
            for name in VARIABLES:
                os.environ.pop(name, None)
            os.environ.update(case.get("environment", {}))
            seen: dict[str, Any] = {"losses": [], "seconds": [], "errors": []}
            run = _fail if "fails" in case else _move if "moves" in case else _train
            run(case, ranks.device, seen)
            (Path(case["out"]) / f"{case['name']}.{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
