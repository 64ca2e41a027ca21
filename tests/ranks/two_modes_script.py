"""One rank of programs whose models compute something else in evaluation: two steps, an evaluation, and one more step, or without it.

As a script (under torchrun): FOLDER, which has a folder for each program with its ``weights.safetensors`` and ``batch.safetensors``. Rank
0 writes into that the parameters after two steps, and after three with and without an evaluation between them; each rank ``rank_N.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, start


def accuracy(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = next(iter(outputs.values()))
    labels = batch["labels"] if logits.ndim == 3 else batch["labels"][:, 0]
    return (logits.argmax(-1) == labels).sum(), (labels != -100).sum()


def seen(program: Path, device: torch.device, *, evaluates: bool) -> dict[str, Any]:
    batch = load_file(program / "batch.safetensors")
    found: dict[str, Any] = {}
    with Pipeline(program, device) as pipeline:
        pipeline.load_weights(program / "weights.safetensors")
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.3, momentum=0.9)
        for step in range(3):
            if step == 2 and evaluates:
                pipeline.save_weights(program / "two.safetensors")
                found = {
                    "plain": pipeline.eval(batch),
                    "whole": pipeline.eval([batch, batch], outputs=True, metrics={"accuracy": accuracy}),
                }
            pipeline.step(batch, step=step)
            if step == 1 and evaluates:  # what it gathers must not outlive the optimizer's step
                pipeline.eval(batch)
            optimizer.step()
            pipeline.zero_grad()
        pipeline.save_weights(program / ("three.safetensors" if evaluates else "straight.safetensors"))
    return found


def main(folder: str) -> None:
    with start(200) as ranks:
        found = {}
        for path in sorted(Path(folder).glob("*/plan.json")):
            seen(path.parent, ranks.device, evaluates=False)
            found[path.parent.name] = seen(path.parent, ranks.device, evaluates=True)
    torch.save(found, Path(folder, f"rank_{ranks.rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
