"""A script for ranks: steps of which each is given several batches, for each program of a file of jobs.

    several_batches_script.py JOBS

A job names a PROGRAM, the files of the batches of each step, and a step of whose second batch a gradient overflows, if any. Writes
PROGRAM/trained.json and PROGRAM/trained.safetensors.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, RuntimeProgramError, start
from tests.tools.parity import LR, MOMENTUM


def _overflowing(pipeline: Pipeline) -> Any:
    """Let the second gradient that the first parameter gets be infinite."""
    first = next(p for stage in pipeline.stages for p in stage.parameters() if p.requires_grad)
    came = [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        came[0] += 1
        return gradient * torch.inf if came[0] == 1 + pipeline.program.microbatches else gradient

    return first.register_hook(hook)


def main(jobs: Path) -> None:
    with start(120.0) as ranks:
        for job in json.loads(jobs.read_text()):
            folder = Path(job["program"])
            report: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "refused": ""}
            with Pipeline(folder, ranks.device) as pipeline:
                pipeline.load_weights(folder / "initial.safetensors")
                optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR, momentum=MOMENTUM)
                if pipeline.program.scales_loss:
                    pipeline.loss_scale = 128.0
                for step, files in enumerate(job["steps"]):
                    batches = [load_file(file) for file in files]
                    hook = _overflowing(pipeline) if job.get("overflow") == step else None
                    try:
                        loss = pipeline.step(batches, step=step, broadcast_loss=True)
                    except RuntimeProgramError as error:
                        report["refused"] = str(error)
                        break
                    if hook is not None:
                        hook.remove()
                    assert loss is not None
                    pipeline.assert_idle()
                    report["losses"].append(loss.item())
                    report["norms"].append(float(pipeline.clip_grad_norm_(math.inf)))
                    report["skipped"].append(pipeline.skipped_steps)
                    optimizer.step()
                    pipeline.zero_grad()
                if pipeline.program.no_eval is None:
                    held_out = pipeline.eval([load_file(file) for file in job["steps"][0]])
                    report["held_out"] = held_out and {name: float(value) for name, value in held_out.items()}
                pipeline.save_weights(folder / "trained.safetensors")
            if ranks.rank == 0:
                (folder / "trained.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
