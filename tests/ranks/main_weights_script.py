"""A script for ranks: programs trained in all the ways that touch parameters, what each leaves, and what a rank stores.

Takes a JSON file of jobs, {"program", "checkpoint", "load", "compile"}, and writes job_{number}_{rank}.safetensors and .json beside it.
What is written of two programs that compute the same can be compared to the bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import local

STEPS = 4


def batch_of(pipeline: Pipeline, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        spec.name: torch.randint(7, spec.shape, generator=generator)
        if not spec.dtype.is_floating_point
        else torch.randn(spec.shape, generator=generator)
        for spec in pipeline.program.inputs
    }


def storages(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory of these tensors, counted once where they share it."""
    found = {local(each).untyped_storage().data_ptr(): local(each).untyped_storage().nbytes() for each in tensors}
    return sum(found.values())


def trained(pipeline: Pipeline, job: dict[str, Any], report: dict[str, Any]) -> dict[str, Tensor]:
    pipeline.load_weights()
    optimizer = pipeline.optimizer()
    averages = [parameter.detach().clone() for parameter in pipeline.parameters()]
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        if step == 2:  # adds up with the next one
            pipeline.step(batch_of(pipeline, 100), step=100, accumulate=True)
        if step == 3:  # values that are written by hand, in a way that torch does not see
            pipeline.synchronize()
            for parameter in pipeline.parameters():
                parameter.data.mul_(0.9)
            pipeline.synchronize()
        loss = pipeline.step(batch_of(pipeline, step), step=step, broadcast_loss=True)
        assert loss is not None
        found[f"loss/{step}"] = loss
        found |= {f"gradient/{step}/{name}": local(g).clone() for name, g in pipeline.whole_gradients().items()}
        found[f"norm/{step}"] = pipeline.clip_grad_norm_(
            1e9
        )  # which scales nothing: pieces are added up in another order
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values() if value.ndim]
        pipeline.zero_grad()
        for average, parameter in zip(averages, pipeline.parameters()):
            average.lerp_(parameter.detach(), 0.3)
        evaluated = pipeline.infer(batch_of(pipeline, step))
        found |= {f"eval/{step}/{name}": value for name, value in (evaluated or {}).items()}
    stage = [parameter for stage in pipeline.stages for parameter in stage.parameters()]
    own = [parameter.detach() for parameter in pipeline.parameters()]
    report |= {"parameters": storages(stage), "all": storages([*stage, *own, *state]), "state": storages(state)}
    found["averages"] = torch.cat([average.flatten() for average in averages]).double().sum()
    found |= {f"parameter/{name}": local(value).clone() for name, value in pipeline.state_dict().items()}
    if pipeline.program.adapters:
        found |= merged(pipeline)
    pipeline.save_checkpoint(job["checkpoint"], optimizer, step=STEPS)
    pipeline.save_weights(Path(job["checkpoint"]).with_suffix(".safetensors"))
    pipeline.load_weights()
    pipeline.load_checkpoint(job.get("load", job["checkpoint"]), optimizer)
    found |= {f"loaded/{name}": local(value).clone() for name, value in pipeline.state_dict().items()}
    evaluated = pipeline.infer(batch_of(pipeline, 0))
    found |= {f"loaded eval/{name}": value for name, value in (evaluated or {}).items()}
    if pipeline.program.working:
        report["refused"] = refused(pipeline)
    return found


def merged(pipeline: Pipeline) -> dict[str, Tensor]:
    """What is computed and stored while adapters are merged; they are as before in the end."""
    pipeline.adapters.merge()
    found = {f"merged/{name}": value.clone() for name, value in pipeline.state_dict().items()}
    found |= {f"merged loss/{name}": value for name, value in (pipeline.infer(batch_of(pipeline, 0)) or {}).items()}
    pipeline.adapters.unmerge()
    return found


def refused(pipeline: Pipeline) -> str:
    """What is said where a stage's copies are written instead of main values, on one rank alone."""
    if pipeline.rank == 0:
        next(p for stage in pipeline.stages for p in stage.parameters() if p.dtype == torch.bfloat16).data.zero_()
    try:
        pipeline.synchronize()
    except RuntimeProgramError as error:
        return str(error)
    return ""


def main() -> None:
    jobs = Path(sys.argv[1])
    with start(120.0) as ranks:
        for number, job in enumerate(json.loads(jobs.read_text())):
            report: dict[str, Any] = {}
            backend = "aot_eager" if job["compile"] else False
            with Pipeline(job["program"], ranks.device, compile=backend) as pipeline:
                found = trained(pipeline, job, report)
            save_file(found, jobs.parent / f"job_{number}_{ranks.rank}.safetensors")
            (jobs.parent / f"job_{number}_{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
