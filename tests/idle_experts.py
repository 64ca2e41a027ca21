"""A mixture of experts some of which no token chooses, and the gradients that ranks have of it after one step.

torchrun --nproc-per-node 4 tests/idle_experts.py FOLDER 0 1     writes FOLDER/0.safetensors, and the loss in FOLDER/0.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime import Pipeline, start
from tests.rank_pool import RankPool

LR = 64.0
CHOSEN = (2, 3, 4, 5)


class Idle(nn.Module):
    """Eight experts, of which the router never chooses the first and last two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 4) for shape in ((8, 16, 32), (8, 32, 16)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        biases = torch.tensor([0.0 if expert in CHOSEN else -9.0 for expert in range(8)])
        gates, experts = (self.gate(rows) + biases).softmax(-1).topk(2)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(8, 0, 7).cumsum(0, dtype=torch.int32)
        hidden = F.gelu(torch.ops.transformers.grouped_mm_fallback(rows[order // 2], self.up, offs))
        y = torch.ops.transformers.grouped_mm_fallback(hidden, self.down, offs)
        y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, 2))
        return F.mse_loss((y * gates.unsqueeze(-1)).sum(1).view_as(x), target)


def gradients(
    programs: Mapping[str, gp.Partitioned], model: nn.Module, batch: Mapping[str, Tensor], folder: Path, pool: RankPool
) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Return the loss and the whole gradients of each program, from a step of SGD on its ranks."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(dict(batch), folder / "batch.safetensors")
    save_file(weights, folder / "weights.safetensors")
    jobs: dict[int, list[str]] = {}
    for number, parts in enumerate(programs.values()):
        parts.save(folder / str(number))
        jobs.setdefault(parts.plan.mesh.size, []).append(str(number))
    for devices, numbers in jobs.items():
        pool.torchrun(Path(__file__), [str(folder), *numbers], nproc=devices, timeout_s=240)
    found = {}
    for number, name in enumerate(programs):
        after = load_file(folder / f"{number}.safetensors")
        loss = json.loads((folder / f"{number}.json").read_text())
        found[name] = loss, {key: (value - after[key]) / LR for key, value in weights.items()}
    return found


def main(folder: Path, numbers: list[str]) -> None:
    """Train each program one step."""
    batch = load_file(folder / "batch.safetensors")
    with start() as ranks:
        for number in numbers:
            with Pipeline(folder / number, ranks.device) as pipeline:
                pipeline.load_weights(folder / "weights.safetensors")
                optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR)
                loss = pipeline.step(batch, broadcast_loss=True)
                assert loss is not None and all(parameter.grad is not None for parameter in pipeline.parameters())
                optimizer.step()
                pipeline.save_weights(folder / f"{number}.safetensors")
            if ranks.rank == 0:
                (folder / f"{number}.json").write_text(json.dumps(loss.item()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
