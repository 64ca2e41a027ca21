"""A script for ranks: emitted programs beside data parallelism written by hand, with other data in every step and on every rank.

By hand, each rank runs the eager model on its own rows and all-reduces the gradients; nothing of graphpar takes part. Both train with
SGD and momentum from the same weights. Writes rank_{rank}.json: for each program the largest error of its losses and parameters, relative
to the largest magnitude.

    argv: out, then for each program the name of its model and its folder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime import Pipeline, start
from tests.models.fsdp_models import MODELS, Entry

STEPS = 3
SGD = {"lr": 0.01, "momentum": 0.9}


def _own(entry: Entry, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    return {name: value.chunk(world, entry.batch_dim)[rank] for name, value in batch.items()}


def by_hand(entry: Entry) -> tuple[list[float], dict[str, Tensor]]:
    """Train as DistributedDataParallel would, with sums; return the losses of the global batches and the parameters."""
    model, losses = entry.model(), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, **SGD)
    for step in range(STEPS):
        share = entry.loss_of(model, _own(entry, entry.batch(step)))
        share = share / dist.get_world_size() if entry.mean else share
        share.backward()
        for parameter in trained:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        total = share.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def emitted(entry: Entry, folder: Path, out: Path, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """Train the emitted program; return its losses and its whole parameters."""
    losses = []
    with Pipeline(folder, device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.SGD(pipeline.parameters(), **SGD)
        names = [spec.name for spec in pipeline.program.inputs if spec.role != "sample_keys"]
        for step in range(STEPS):
            batch = dict(zip(names, entry.batch(step).values(), strict=True))
            loss = pipeline.step(batch, step=step, broadcast_loss=True)
            assert loss is not None
            losses.append(loss.item())
            optimizer.step()
            pipeline.zero_grad()
        pipeline.save_weights(out)
    return losses, _read(out)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)).item()


def main() -> None:
    out, jobs = Path(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2]))
    report: dict[str, Any] = {}
    with start(60.0) as ranks:
        expected = {name: by_hand(MODELS[name]) for name in dict.fromkeys(name for name, _ in jobs)}
        for number, (name, folder) in enumerate(jobs):
            losses, parameters = expected[name]
            saved = out / f"{number}.safetensors"
            found_losses, found = emitted(MODELS[name], Path(folder), saved, ranks.device)
            assert set(parameters) <= set(found), set(parameters) - set(found)
            errors = {each: _error(found[each], value) for each, value in parameters.items()}
            errors["the loss"] = _error(torch.tensor(found_losses), torch.tensor(losses))
            report[folder] = errors
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
