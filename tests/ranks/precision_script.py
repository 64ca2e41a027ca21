"""A script for ranks: steps of an emitted program in 16 bits, with a gradient that overflows on one rank where that is asked for.

Takes a program, a folder, and a JSON object: "batches" (files), "optimize", "overflow" ([step, rank] or null), "alone" (each rank
decides for itself whether a step overflowed: a fault), "double" (all in fp64). Writes gradients_{rank}.safetensors of the last step
and rank_{rank}.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.fp64 import in_double
from graphpar.runtime.state import gradients as gradients_module
from graphpar.runtime.state.fully_sharded import local


class _Alone:
    """``torch.distributed`` whose sums of one element stay on their rank: the verdict on a step, and nothing else here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return dist.all_reduce(tensor, *args, **options) if tensor.ndim else None


def main() -> None:
    program, out, asked = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    before = gradients_module.dist
    wide = in_double() if asked.get("double") else nullcontext()
    with wide, start(60.0) as ranks, Pipeline(program, ranks.device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        report: dict[str, Any] = {"losses": [], "scales": [], "without": [], "dtypes": []}
        if asked.get("alone"):
            gradients_module.dist = _Alone()  # type: ignore[assignment]
        for step, file in enumerate(asked["batches"]):
            hooks: list[Any] = []
            if asked.get("overflow") == [step, ranks.rank]:
                first = next(p for stage in pipeline.stages for p in stage.parameters() if p.requires_grad)
                if pipeline.program.fully_sharded:  # a shard's own hook is never called
                    stage = pipeline.stages[0]
                    hooks = [
                        stage.register_full_backward_pre_hook(lambda _, given: tuple(g * torch.inf for g in given))
                    ]
                else:
                    hooks = [first.register_hook(lambda gradient: gradient * torch.inf)]
            loss = pipeline.step(load_file(file), step=step)
            for hook in hooks:
                hook.remove()
            report["losses"].append(None if loss is None else float(loss))
            report["scales"].append(pipeline.loss_scale)
            report["without"].append(all(p.grad is None for p in pipeline.parameters()))
            if step < len(asked["batches"]) - 1 or asked.get("optimize"):
                optimizer.step()
            if step < len(asked["batches"]) - 1:
                pipeline.zero_grad()
        gradients = {name: local(g).clone() for name, g in pipeline.whole_gradients().items()}
        report["dtypes"] = sorted(
            {str(p.dtype) for p in pipeline.parameters()} | {str(g.dtype) for g in gradients.values()}
        )
        report["skipped"] = pipeline.skipped_steps
        report["parameters"] = [float(local(p).detach().double().sum()) for p in pipeline.parameters()]
        save_file(gradients, out / f"gradients_{ranks.rank}.safetensors")
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))
    gradients_module.dist = before


if __name__ == "__main__":
    main()
