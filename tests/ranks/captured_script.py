"""One rank of programs whose steps are captured, and run, one after the other.

As a script (under torchrun): FOLDER; FOLDER has a folder for each model, with ``weights.safetensors``, ``batch.safetensors`` and its
programs. Each rank writes ``rank_N.json`` into it: of each program the names of what differs in any bit between both, how many steps were
replayed, and why not. A program whose name begins with ``compiled`` has its blocks compiled.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, start
from graphpar.runtime.distributed import Ranks
from graphpar.runtime.state.fully_sharded import local

STEPS = 9
ACCUMULATES, EVALUATES, FREEZES = 3, 4, 6
"""The step with ``accumulate``, that after which a batch is evaluated, and that after which a parameter of the first stage is frozen."""


def batch_of(batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return other values for each step."""
    return {
        name: value * (1 + step / 8) if value.is_floating_point() else value.roll(step, -1)
        for name, value in batch.items()
    }


def trained(program: Path, ranks: Ranks, cuda_graphs: bool) -> tuple[dict[str, Tensor], Pipeline]:
    """Return losses, gradients and state after each step."""
    found: dict[str, Tensor] = {}
    compile = "aot_eager" if program.name.startswith("compiled") else False
    with Pipeline(program, ranks.device, compile=compile, cuda_graphs=cuda_graphs) as pipeline:
        pipeline.load_weights(program.parent / "weights.safetensors")
        batch = load_file(program.parent / "batch.safetensors")
        optimizer = pipeline.optimizer(1e-2)
        for step in range(STEPS):
            loss = pipeline.step(batch_of(batch, step), broadcast_loss=True, accumulate=step == ACCUMULATES)
            assert isinstance(loss, Tensor)
            found[f"loss {step}"] = loss
            if step == ACCUMULATES:
                continue
            for name, value in pipeline.whole_gradients().items():
                found[f"gradient {step} {name}"] = local(value).detach().clone()
            optimizer.step()
            pipeline.zero_grad()
            if step == EVALUATES and pipeline.program.no_eval is None:
                found["evaluated"] = torch.stack([*(pipeline.eval(batch) or {}).values(), torch.zeros(())])
            if step == FREEZES:
                _freeze(pipeline)
        for name, value in pipeline.state_dict().items():
            found[f"state {name}"] = local(value).detach().clone()
    return found, pipeline


def _freeze(pipeline: Pipeline) -> None:
    """Freeze what is the first parameter of rank 0, on all ranks that have it."""
    names = [next(name for name, _ in pipeline.stages[0].named_parameters())]
    dist.broadcast_object_list(names, src=0)
    for stage in pipeline.stages:
        for name, parameter in stage.named_parameters():
            if name == names[0]:
                parameter.requires_grad_(False)


def main(folder: str) -> None:
    seen: dict[str, Any] = {}
    with start(600) as ranks:
        for program in sorted(path.parent for path in Path(folder).glob("*/*/plan.json")):
            expected, _ = trained(program, ranks, False)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found, pipeline = trained(program, ranks, True)
            assert pipeline.captured is not None
            seen[f"{program.parent.name} {program.name}"] = {
                "differ": [name for name, value in expected.items() if not torch.equal(value, found[name])],
                "names": expected.keys() == found.keys(),
                "replays": pipeline.captured.replays,
                "reason": pipeline.captured.reason,
                "said": [str(each.message) for each in said if "captured" in str(each.message)],
            }
    Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
