"""A script for ranks: gradients of an emitted program and of torch's DistributedDataParallel, which gets the rank's own rows.

    ddp_script.py CASE...     folders with program/, model.pt (a pickled module and loss) and batch.safetensors

Writes {case}/{rank}.json: both losses (of DDP the mean over ranks), and the largest difference of gradients, relative to the largest
gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from graphpar.runtime import Pipeline, start


def main() -> None:
    with start(60.0) as ranks:
        for folder in map(Path, sys.argv[1:]):
            batch = load_file(folder / "batch.safetensors")
            pipeline = Pipeline(folder / "program", ranks.device)
            pipeline.load_weights()
            loss = pipeline.step(batch, broadcast_loss=True)
            model, loss_fn = torch.load(folder / "model.pt", weights_only=False)
            names = ("x", *(name for name in batch if name != "x"))
            inputs, targets = (batch[name].chunk(ranks.world_size)[ranks.rank] for name in names)
            replicated = DistributedDataParallel(model)  # which reduces as long as it is there
            theirs = loss_fn(replicated(inputs), targets)
            theirs.backward()
            mean = theirs.detach().clone()
            dist.all_reduce(mean)
            found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
            largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
            differences = [
                (found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]) - parameter.grad
                for name, parameter in model.named_parameters()
            ]
            report = {
                "loss": loss.item(),
                "ddp": mean.item() / ranks.world_size,
                "difference": max(each.abs().max().item() for each in differences) / largest,
            }
            (folder / f"{ranks.rank}.json").write_text(json.dumps(report))
            pipeline.close()


if __name__ == "__main__":
    main()
