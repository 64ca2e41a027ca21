"""A script for ranks: steps of an emitted program with sharded state, what each rank holds, what goes over the wire, and saving.

Writes rank_{rank}.json into the folder that it is given: elements held, collectives a step, and whether training from
the saved file goes on as training without saving.
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
from graphpar.runtime.state.fully_sharded import local

WIRE = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),  # as torch 2.13 calls it, and before
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def counted(counts: Counter[str], kind: str, name: str) -> Any:
    """Return the function of torch.distributed of this name, which counts its calls under ``kind``, but not those of bytes: of numbers
    that ranks tell each other."""
    original = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = args[0] if args else next(iter(kwargs.values()))
        counts[kind] += result.dtype is not torch.uint8
        return original(*args, **kwargs)

    return call


def _trained(program: Path, weights: Path | None, steps: range, batch: dict[str, Any], device: torch.device) -> Any:
    pipeline = Pipeline(program, device)
    pipeline.load_weights(weights)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)  # no state, so that weights are all that is to be kept
    losses = []
    for step in steps:
        loss = pipeline.step(batch, step=step, broadcast_loss=True)
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
        pipeline.zero_grad()
    return pipeline, losses


def main() -> None:
    program, out = Path(sys.argv[1]), Path(sys.argv[2])
    batch = load_file(out / "batch.safetensors")
    counts: Counter[str] = Counter()
    with start(60.0) as ranks:
        pipeline, losses = _trained(program, None, range(4), batch, ranks.device)
        pipeline.close()
        half, _ = _trained(program, None, range(2), batch, ranks.device)
        half.save_weights(out / "half.safetensors")
        held = sum(local(parameter).numel() for parameter in half.parameters())
        stored = {name: list(local(value).shape) for name, value in half.named_parameters()}
        half.close()
        again, rest = _trained(program, out / "half.safetensors", range(2, 4), batch, ranks.device)
        for kind, names in WIRE.items():
            name = next(name for name in names if hasattr(dist, name))
            setattr(dist, name, counted(counts, kind, name))
        again.step(batch, step=4)
        gradients = sum(local(p.grad).numel() for p in again.parameters() if p.grad is not None)
        report = {
            "losses": losses,
            "rest": rest,
            "held": held,
            "stored": stored,
            "gradients": gradients,
            "counts": counts,
        }
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))
        again.close()


if __name__ == "__main__":
    main()
