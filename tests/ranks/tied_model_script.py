"""Ranks that train ``tied_model`` under one plan, then under another one, and then do what must be noticed.

As a script (under torchrun): FIRST SECOND FOLDER; rank N writes ``rank_N.json`` into FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphpar.runtime import Pipeline, RuntimeProgramError, start
from tests.models.tied_model import batch

STEPS, SAVED = 7, 4


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeProgramError as error:
        return str(error)
    return ""


def main(first: str, second: str, folder: str) -> None:
    seen: dict[str, Any] = {"losses": [], "rates": []}
    with start(60) as ranks:
        for program, steps in ((first, range(SAVED)), (second, range(SAVED, STEPS))):
            with Pipeline(program, ranks.device) as pipeline:
                pipeline.load_weights(Path(folder) / "weights.safetensors")
                optimizer = pipeline.optimizer()
                schedule = pipeline.lr_schedule(optimizer)
                saved = pipeline.resume(Path(folder) / "ck", optimizer)
                assert (0 if saved is None else saved.step) == steps.start
                for step in steps:
                    loss = pipeline.step(batch(step), step=step, broadcast_loss=True)
                    assert loss is not None
                    seen["losses"].append(float(loss))
                    seen["rates"].append([group["lr"] for group in optimizer.param_groups])
                    pipeline.clip_grad_norm_(1.0)
                    optimizer.step()
                    schedule.step()
                    pipeline.zero_grad()
                pipeline.save_checkpoint(Path(folder) / "ck" / str(step + 1), optimizer, step=step + 1)
                pipeline.save_weights(Path(folder) / "trained.safetensors")
                if steps.start:
                    seen |= notice(pipeline, ranks.rank, Path(folder))
    Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(seen))


def notice(pipeline: Pipeline, rank: int, folder: Path) -> dict[str, str]:
    """Make ranks differ after the steps that were made, up to the next that looks."""
    seen = {}
    halves = [[*pipeline.parameters()][::2], [*pipeline.parameters()][1::2]]
    optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
    pipeline.step(batch(0), accumulate=True)
    seen["unreduced"] = [said(optimizer.step) for optimizer in optimizers]
    pipeline.zero_grad()
    pipeline.load_checkpoint(folder / "ck")
    seen["batch"] = looked_at(lambda: pipeline.step(batch(3 + rank), step=1))
    seen["step"] = looked_at(lambda: pipeline.step(batch(0), step=rank))
    pipeline.zero_grad()
    for _, parameter in pipeline.named_parameters():
        with torch.no_grad():
            parameter.mul_(1 + rank / 100)
    seen["saved"] = said(lambda: pipeline.save_checkpoint(folder / "ck" / "100", step=100))
    seen["copies"] = looked_at(lambda: pipeline.step(batch(0), step=1))
    return seen


def looked_at(call: Callable[[], object]) -> str:
    """What one of as many calls says as there may be steps between two that look."""
    return next(filter(None, (said(call) for _ in range(2 * STEPS))), "")


if __name__ == "__main__":
    main(*sys.argv[1:])
