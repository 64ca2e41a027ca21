"""A script for ranks: what a step costs the host, with dropout, Adam fused or not, and a parameter that is frozen on the way.

    step_costs_script.py PROGRAM OUT fused | plain | "one rank"

Trains OUT/batch_{step}.safetensors; before the last a bias is frozen. Writes OUT/rank_{rank}.json, by step the loss, how often
the host read a tensor, and the operators of clipping and of the optimizer, and OUT/final.safetensors. With "one rank" all drop the
gradients of another bias then, but rank 1 only once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state import optimizers

STEPS = 5
READS = {"tolist", "item", "__bool__", "__int__", "__float__", "numpy", "cpu", "nonzero"}


class Reads(TorchFunctionMode):
    """Counts calls that wait for the device, and calls that make a tensor of numbers of the host, which copy them there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or func is torch.tensor:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _train(pipeline: Pipeline, name: str, trained: bool) -> None:
    for stage in pipeline.stages:
        for each, parameter in stage.named_parameters():
            if each == name:
                parameter.requires_grad_(trained)


def main(program: Path, out: Path, how: str) -> None:
    report: dict[str, Any] = {"losses": [], "reads": [], "clip": [], "optimizer": []}
    if how == "fused":
        optimizers.FUSED_ON = ("cpu",)  # type: ignore[assignment]
    batches = [load_file(out / f"batch_{step}.safetensors") for step in range(STEPS)]
    with start(60.0) as ranks, Pipeline(program, ranks.device) as pipeline:
        pipeline.load_weights()
        optimizer = pipeline.optimizer(lr=1e-2, make=lambda named: torch.optim.AdamW(named))
        for step, batch in enumerate(batches):
            if step == STEPS - 1:
                _train(pipeline, "middle.bias", False)
            with Reads() as reads:
                loss = pipeline.step(batch, step=step)
                with Launches() as clipped:
                    pipeline.clip_grad_norm_(0.5)
            with Launches() as stepped:
                optimizer.step()
            pipeline.zero_grad()
            report["losses"].append(None if loss is None else loss.item())
            report["reads"].append(dict(reads.found))
            report["clip"].append(sum(clipped.found.values()))
            report["optimizer"].append(dict(stepped.found))
        pipeline.save_weights(out / "final.safetensors")
        if how == "one rank":
            (bias,) = (
                each for stage in pipeline.stages for name, each in stage.named_parameters() if name == "first.bias"
            )
            hook = bias.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
            for step in range(3):
                if step == 1 and ranks.rank == 1:
                    hook.remove()
                pipeline.step(batches[0], step=step)
                pipeline.zero_grad()
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
