"""A mixture of experts some of which no token chooses: the gradients that ranks have of it after one step, and what they send.

torchrun --nproc-per-node 4 tests/models/idle_experts.py FOLDER 0 1     writes FOLDER/0.safetensors, and loss and bytes to FOLDER/0.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime import Pipeline, start
from graphpar.runtime.distributed import gather_objects
from tests.ranks.exchange_script import Sends
from tests.tools.rank_pool import RankPool

LR = 64.0
CHOSEN, EXPERTS, TOP, WIDTH = (2, 3, 4, 5), 8, 2, 16


@dataclass(frozen=True)
class Found:
    """``sent``: bytes that each rank sent to other ranks by all-to-all."""

    loss: float
    gradients: dict[str, Tensor]
    sent: list[int]


class Idle(nn.Module):
    """Eight experts, of which the router never chooses the first and last two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = (EXPERTS, WIDTH, 32), (EXPERTS, 32, WIDTH)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 4) for shape in (up, down))

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the experts of each row, and their numbers: [n, width] -> [n, 2] twice"""
        biases = torch.tensor([0.0 if expert in CHOSEN else -9.0 for expert in range(EXPERTS)])
        weights, experts = (self.gate(rows) + biases).softmax(-1).topk(TOP)
        return weights, experts

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        gates, experts = self.routed(rows)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = rows[order // TOP]
        hidden = F.gelu(torch.ops.transformers.grouped_mm_fallback(rows, self.up, offs))
        y = torch.ops.transformers.grouped_mm_fallback(hidden, self.down, offs)
        y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, TOP))
        return F.mse_loss((y * gates.unsqueeze(-1)).sum(1).view_as(x), target)


def trained(
    programs: Mapping[str, gp.Partitioned], model: nn.Module, batch: Mapping[str, Tensor], folder: Path, pool: RankPool
) -> dict[str, Found]:
    """Return what each program's ranks found in a step of SGD; gradients are whole."""
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
        seen = json.loads((folder / f"{number}.json").read_text())
        gradients = {key: (value - after[key]) / LR for key, value in weights.items()}
        found[name] = Found(seen["loss"], gradients, seen["sent"])
    return found


def main(folder: Path, numbers: list[str]) -> None:
    """Train each program one step."""
    batch = load_file(folder / "batch.safetensors")
    with start() as ranks:
        for number in numbers:
            with Pipeline(folder / number, ranks.device) as pipeline:
                pipeline.load_weights(folder / "weights.safetensors")
                optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR)
                with Sends(pipeline.groups.place["dp_expert"]) as sends:
                    loss = pipeline.step(batch, broadcast_loss=True)
                assert loss is not None and all(parameter.grad is not None for parameter in pipeline.parameters())
                optimizer.step()
                pipeline.save_weights(folder / f"{number}.safetensors")
            sent = gather_objects(sends.nbytes)
            if ranks.rank == 0:
                (folder / f"{number}.json").write_text(json.dumps({"loss": loss.item(), "sent": sent}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
