"""A script for ranks: steps of an emitted program with sharded state, some of which accumulate, each with data of its own.

    accumulation_script.py PROGRAM OUT

Reads OUT/job.json, {"accumulate": [false, true, ...], "sums": true}, and OUT/batch_{step}.safetensors.

Writes OUT/rank_{rank}.json: by step the loss and the collectives on the wire; of accumulated gradients what refused to read
them; and OUT/final.safetensors, the weights after all steps.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError
from tests.ranks.zero_script import WIRE, counted

LEARNING_RATE = 0.05


def _refused(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeProgramError as error:
        return str(error)
    return ""


def _toggle(pipeline: Pipeline) -> None:
    parameter = next(iter(pipeline.stages[0].parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


def main() -> None:
    program, out = Path(sys.argv[1]), Path(sys.argv[2])
    job = json.loads((out / "job.json").read_text())
    counts: Counter[str] = Counter()
    report: dict[str, Any] = {"losses": [], "counts": [], "norms": [], "refused": []}
    with start(60.0) as ranks:
        pipeline = Pipeline(program, ranks.device)
        pipeline.load_weights()
        if not job["sums"]:
            pipeline._gradients._sums = []
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE)
        pipeline.step(load_file(out / "batch_0.safetensors"), accumulate=True)
        pipeline.zero_grad()  # what was accumulated is gone, and the optimizer may step again
        optimizer.step()
        for change in (optimizer.zero_grad, lambda: _toggle(pipeline)):
            pipeline.step(load_file(out / "batch_0.safetensors"), accumulate=True)
            change()
            report["refused"].append(_refused(pipeline.step, load_file(out / "batch_0.safetensors")))
            pipeline.zero_grad()
        _toggle(pipeline)
        for kind, names in WIRE.items():
            name = next(name for name in names if hasattr(dist, name))
            setattr(dist, name, counted(counts, kind, name))
        for step, accumulate in enumerate(job["accumulate"]):
            counts.clear()
            batch = load_file(out / f"batch_{step}.safetensors")
            loss = pipeline.step(batch, step=step, broadcast_loss=True, accumulate=accumulate)
            assert loss is not None
            report["losses"].append(loss.item())
            report["counts"].append(dict(counts))
            if accumulate:
                report["refused"] += [_refused(pipeline.clip_grad_norm_, 1.0), _refused(optimizer.step)]
                continue
            report["norms"].append(float(pipeline.clip_grad_norm_(1e9)))
            optimizer.step()
            pipeline.zero_grad()
        pipeline.infer(batch)
        pipeline.save_weights(out / "final.safetensors")
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))
        pipeline.close()


if __name__ == "__main__":
    main()
