"""Ranks that train a model whose stages share tied parameters.

As a script (under torchrun): PROGRAM FOLDER; rank N writes ``rank_N.pt`` into FOLDER, where ``weights.safetensors`` is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime import Pipeline, start

STEPS, FROZEN, VOCAB = 4, 2, 12
"""In step ``FROZEN`` the embedding is not trained."""


def batch(step: int) -> dict[str, Tensor]:
    drawn = torch.randint(VOCAB, (2, 8, 3), generator=torch.Generator().manual_seed(step))
    return {"ids": drawn[0], "labels": drawn[1]}


def main(program: str, folder: str) -> None:
    steps: list[dict[str, Any]] = []
    with start(60) as ranks, Pipeline(program, ranks.device) as pipeline:
        pipeline.load_weights(Path(folder) / "weights.safetensors")
        optimizer = pipeline.optimizer(make=lambda named: torch.optim.SGD([each for _, each in named], 0.1, 0.9))
        named = [pair for stage in pipeline.stages for pair in stage.named_parameters(remove_duplicate=False)]
        for step in range(STEPS):
            for name, parameter in named:
                if name in ("embed.weight", "head.weight"):
                    parameter.requires_grad_(step != FROZEN)
            loss = pipeline.step(batch(step), step=step, broadcast_loss=True)
            gradients = {name: each.clone() for name, each in pipeline.whole_gradients().items()}
            steps.append({"loss": loss, "gradients": gradients, "norm": pipeline.clip_grad_norm_(1.0)})
            optimizer.step()
            pipeline.zero_grad()
        values = {name: parameter.detach() for name, parameter in named}
        places = [(name, parameter.data_ptr()) for name, parameter in named]
        updated = sum(len(group["params"]) for group in optimizer.param_groups)
        found = {"steps": steps, "values": values, "places": places, "updated": updated}
        torch.save(found, Path(folder) / f"rank_{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
