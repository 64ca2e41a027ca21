"""One rank of a program of ``training_loop_model``: evaluation, steps on its own rows, the optimizer of the model file.

As a script (under torchrun): PROGRAM WEIGHTS BATCH FOLDER; each rank writes ``rank_N.json`` into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, RuntimeProgramError, start
from tests.models.training_loop_model import Net

STEPS = 3


def main(program: str, weights: str, batch_file: str, folder: str) -> None:
    with start(60) as ranks, Pipeline(program, ranks.device) as pipeline:
        pipeline.load_weights(weights)
        batch, part = load_file(batch_file), pipeline.data
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        seen: dict[str, Any] = {"rows": [part.rows.start, part.rows.stop], "names": part.names}
        own = {name: batch[name][part.rows] for name in part.names}
        seen["eval"] = {name: float(value) for name, value in (pipeline.eval(own) or {}).items()}
        seen["untouched"] = all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
        optimizer = pipeline.optimizer()
        schedule = pipeline.lr_schedule(optimizer)
        seen["decay"] = {
            name: group["weight_decay"]
            for name, parameter in pipeline.named_parameters()
            for group in optimizer.param_groups
            if name and any(parameter is each for each in group["params"])
        }
        losses = []
        for step in range(STEPS):
            loss = pipeline.step(own if step % 2 else batch, broadcast_loss=True)
            assert loss is not None
            losses.append(float(loss))
            optimizer.step()
            schedule.step()
            pipeline.zero_grad()
        seen |= {"losses": losses, "lr": schedule.get_last_lr()[0]}
        pipeline.step(own)
        try:
            torch.optim.AdamW(Net().parameters()).step()
        except RuntimeProgramError as error:
            seen["refused"] = str(error)
        pipeline.zero_grad()
        Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
