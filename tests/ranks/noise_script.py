"""A rank whose kernels round apart from the first rank's, as those of GPUs may: what ranks should hold alike after some steps.

    noise_script.py PROGRAM BATCH FOLDER STEPS MENDED KERNEL     MENDED 0, 1     KERNEL attention, softmax

Writes FOLDER/rank_N.safetensors, its parameters, and FOLDER/rank_N.json: the loss and the rows of each expert in the last step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state import replicas
from graphpar.runtime.state.fully_sharded import local


class _Backward(torch.autograd.Function):
    """Nothing; its gradient is ``direction`` units in the last place away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, direction: float) -> Tensor:
        ctx.direction = direction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.nextafter(gradient, gradient + ctx.direction), None


def _plant(kernel: str, rank: int) -> None:
    attend, softmax = F.scaled_dot_product_attention, F.softmax

    def attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
        return attend(_Backward.apply(query, float(rank)), *args, **options)

    def scores(x: Tensor, dim: int) -> Tensor:
        """Equal scores are a little less equal on another rank, and another expert is the better one."""
        found = softmax(x, dim)
        if rank == 0:
            return found
        return found * (1 - torch.arange(found.size(dim)) * torch.finfo(found.dtype).eps)

    if kernel == "attention":
        F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    else:
        F.softmax = scores  # type: ignore[assignment]


def main(program: str, batch_file: str, folder: str, steps: str, mended: str, kernel: str) -> None:
    with start(60) as ranks:
        if int(mended):
            replicas.ROUND_APART.add("cpu")
        with Pipeline(program, ranks.device) as pipeline:
            _plant(kernel, ranks.rank)
            pipeline.load_weights()
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
            balance, batch = pipeline.balance(), load_file(batch_file)
            for _ in range(int(steps)):
                loss = pipeline.step(batch, broadcast_loss=True)
                pipeline.clip_grad_norm_(1.0)
                optimizer.step()
                pipeline.zero_grad()
                counted = balance.end_step()
            save_file(
                {name: local(value).clone() for name, value in pipeline.state_dict().items()},
                Path(folder) / f"rank_{ranks.rank}.safetensors",
            )
            rows = None if counted is None else counted.rows.tolist()
            said = f"rank_{ranks.rank}.json"
            assert loss is not None
            (Path(folder) / said).write_text(json.dumps({"loss": loss.item(), "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
