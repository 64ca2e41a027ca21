"""One rank of programs for training that also return what their models return, and the losses of their microbatches.

As a script (under torchrun): FOLDER, which has a folder for each program with its ``weights.safetensors`` and ``batch.safetensors``. Each
rank writes ``rank_N.pt`` into it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, RuntimeProgramError, start


def token_accuracy(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    valid = batch["labels"] != -100
    return ((outputs["logits"].argmax(-1) == batch["labels"]) & valid).sum(), valid.sum()


def first_token(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (outputs["logits"][:, 0].argmax(-1) == batch["ids"][:, 0]).float()


def largest(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return outputs["states_1"].amax((1, 2)).sum()


METRICS = {"accuracy": token_accuracy, "first_token": first_token, "largest": largest}


def seen(program: Path, device: torch.device) -> dict[str, Any]:
    whole = load_file(program / "batch.safetensors")
    with Pipeline(program, device) as pipeline:
        pipeline.load_weights(program / "weights.safetensors")
        part = pipeline.data
        own = {name: whole[name][part.rows] for name in part.names}
        batches = [whole, {name: value.flip(0) for name, value in whole.items()}]
        found: dict[str, Any] = {
            "plain": pipeline.eval(whole),
            "outputs": pipeline.eval(own, outputs=True),
            "several": pipeline.eval(batches, outputs=["logits"]),
            "loss": pipeline.step(whole, step=0, broadcast_loss=True),
        }
        if pipeline.program.pp == 1:  # else a stage without the first layer has no ids
            found["metrics"] = pipeline.eval(batches, metrics=METRICS)
        else:
            found["metrics"] = pipeline.eval(batches, metrics={k: v for k, v in METRICS.items() if k != "first_token"})
        pipeline.zero_grad()
        found["losses"] = pipeline.step(whole, step=0, losses=True)
        pipeline.zero_grad()
        found["all_losses"] = pipeline.step(batches, step=0, losses=True, broadcast_loss=True)
        try:
            pipeline.eval(whole, outputs=["logit"])
        except RuntimeProgramError as error:
            found["refused"] = str(error)
    return found


def main(folder: str) -> None:
    with start(200) as ranks:
        found = {path.parent.name: seen(path.parent, ranks.device) for path in sorted(Path(folder).glob("*/plan.json"))}
    torch.save(found, Path(folder, f"rank_{ranks.rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
