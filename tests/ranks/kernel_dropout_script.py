"""A script for ranks: programs whose kernels draw dropout, trained on one batch, from a checkpoint or into one.

    kernel_dropout_script.py CASES.json     [{"program", "weights", "out", "steps", "save", "load"}, ...]

Writes {out}_{rank}.safetensors: losses, gradients of each step, and parameters afterwards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphpar.runtime import Pipeline, start

LR = 3e-3


def train(case: dict[str, Any], rank: int, device: torch.device) -> None:
    found = dict[str, Tensor]()
    batch = load_file(case["batch"])
    begin, end = case["steps"]
    with Pipeline(case["program"], device) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=LR)
        if "load" in case:
            pipeline.load_checkpoint(case["load"], optimizer)
        else:
            pipeline.load_weights(case["weights"])
        for step in range(begin, end):
            torch.manual_seed(rank + step)  # what else is drawn changes nothing
            loss = pipeline.step(batch, broadcast_loss=True)
            assert loss is not None
            found[f"loss.{step}"] = loss
            for name, gradient in pipeline.whole_gradients().items():
                found[f"gradient.{step}.{name}"] = gradient.clone()
            optimizer.step()
            pipeline.zero_grad()
        found |= {f"parameter.{name}": value.clone() for name, value in pipeline.state_dict().items()}
        if "save" in case:
            pipeline.save_checkpoint(case["save"], optimizer, step=end)
    save_file({name: value.contiguous() for name, value in found.items()}, f"{case['out']}_{rank}.safetensors")


def main(cases: Path) -> None:
    with start(120) as ranks:
        for case in json.loads(cases.read_text()):
            train(case, ranks.rank, ranks.device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
