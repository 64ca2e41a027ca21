"""One rank that trains a mixture with shared experts, and notes which collectives and products it runs, in order.

torchrun --nproc-per-node N tests/ranks/shared_expert_script.py FOLDER NAME ...     FOLDER/NAME has a program and its weights

Writes of each program its weights after each step to step_N.safetensors, and losses, and the calls of the last step, to seen.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.runtime import Pipeline, start

EXPERTS, TOP, WIDTH, HIDDEN, ROWS, LAYERS, LR, STEPS = 4, 2, 16, 24, 8, 4, 0.5, 3
REPLAYED = 5
"""Steps of a program whose steps are captured."""


class Layer(nn.Module):
    """Experts for rows, and one for all of them, which is computed ``first`` or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.experts_down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.first:
            shared = self.down(F.gelu(self.up(rows)))
        weights, experts = self.gate(rows).softmax(-1).topk(TOP)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(F.gelu(product(rows[order // TOP], self.experts_up, offs)), self.experts_down, offs)
        y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, TOP))
        y = (y * weights.unsqueeze(-1)).sum(1)
        if not self.first:
            shared = self.down(F.gelu(self.up(rows)))
        return x + (y + shared).view_as(x)


class Shared(nn.Module):
    """Layers with a shared expert."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(first) for _ in range(LAYERS))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def batch(step: int) -> dict[str, Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, 8, WIDTH, generator=generator) for name in ("x", "target")}


def weights() -> dict[str, Tensor]:
    """Initial weights."""
    torch.manual_seed(0)
    return {name: value.clone() for name, value in Shared().state_dict().items()}


def steps_of(name: str) -> int:
    """How many steps a program trains."""
    return REPLAYED if "captured" in name else STEPS


class Calls(TorchDispatchMode):
    """Notes when rows are sent and waited for, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sent: set[int] = set()  # the memory of rows that travel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_to_all_single.default and args[0].is_floating_point():
            self.names.append("send")
            self.sent.add(result.data_ptr())
        elif func is torch.ops._c10d_functional.wait_tensor.default and args[0].data_ptr() in self.sent:
            self.names.append("wait")
            self.sent.discard(args[0].data_ptr())
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.names.append("product")
        elif func is torch.ops.aten._grouped_mm.default:
            self.names.append("experts")
        return result


def train(folder: Path, device: torch.device, rank: int) -> None:
    """Train one program."""
    seen: dict[str, Any] = {"losses": []}
    options: dict[str, Any] = {"compile": "aot_eager"} if "compiled" in folder.name else {}
    with Pipeline(folder, device, cuda_graphs="captured" in folder.name, **options) as pipeline:
        pipeline.load_weights(folder / "weights.safetensors")
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR)
        for step in range(steps_of(folder.name)):
            calls = Calls()
            with calls if folder.name == "plain" and step == STEPS - 1 else contextlib.nullcontext():
                loss = pipeline.step(batch(step), broadcast_loss=True)
            assert loss is not None
            seen["losses"].append(loss.item())
            optimizer.step()
            pipeline.zero_grad()
            pipeline.save_weights(folder / f"step_{step}.safetensors")
        seen["calls"] = calls.names
        seen["replays"] = 0 if pipeline.captured is None else pipeline.captured.replays
        pipeline.assert_idle()
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


def eager(steps: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """What one process finds: the loss and the weights of each step."""
    model, losses, states = Shared(), list[float](), list[dict[str, Tensor]]()
    model.load_state_dict(weights())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return losses, states


def main(root: Path, names: list[str]) -> None:
    """Train each program."""
    with start() as ranks:
        for name in names:
            train(root / name, ranks.device, ranks.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
