"""One rank that trains a mixture whose router is as its weights say: balanced, or with all rows for one rank.

torchrun --nproc-per-node 2 tests/ranks/expert_room_script.py FOLDER NAME ...     FOLDER/NAME has a program and weights.safetensors

Writes of each program its weights after each step to step_N.safetensors, and losses and counts to seen.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.runtime import Pipeline, start

EXPERTS, TOP, WIDTH, ROWS, LAYERS, LR, STEPS = 4, 2, 16, 8, 2, 1.0, 3


class Mixture(nn.Module):
    """Two layers of experts, whose routers have biases, and a buffer that each step writes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(LAYERS))
        shapes = (EXPERTS, WIDTH, 32), (EXPERTS, 32, WIDTH)
        self.up, self.down = (
            nn.ParameterList(nn.Parameter(torch.randn(shape) / 4) for _ in range(LAYERS)) for shape in shapes
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        for gate, up, down in zip(self.gates, self.up, self.down):
            weights, experts = gate(rows).softmax(-1).topk(TOP)
            experts, order = experts.flatten().sort()
            offs = experts.float().histc(EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
            hidden = F.gelu(torch.ops.transformers.grouped_mm_fallback(rows[order // TOP], up, offs))
            y = torch.ops.transformers.grouped_mm_fallback(hidden, down, offs)
            y = torch.zeros_like(y).index_copy(0, order, y).unflatten(0, (-1, TOP))
            rows = rows + (y * weights.unsqueeze(-1)).sum(1)
        self.calls += 1
        return F.mse_loss(rows.view_as(x), target)


def batches(step: int) -> list[dict[str, Tensor]]:
    """The batches of a step: two in the last one, which count as one."""
    generator = torch.Generator().manual_seed(step)
    shape = ROWS, 16, WIDTH
    return [
        {name: torch.randn(shape, generator=generator) for name in ("x", "target")}
        for _ in range(1 + (step == STEPS - 1))
    ]


class Reads:
    """Counts numbers that the program's own files read from a device."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = str(folder), 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this is open."""
        plain = {name: getattr(Tensor, name) for name in ("tolist", "item")}

        def counting(name: str) -> Any:
            def read(tensor: Tensor) -> Any:
                self.count += sys._getframe(1).f_code.co_filename.startswith(self.folder)
                return plain[name](tensor)

            return read

        for name in plain:
            setattr(Tensor, name, counting(name))
        try:
            yield
        finally:
            for name, method in plain.items():
                setattr(Tensor, name, method)


def train(folder: Path, device: torch.device, rank: int) -> None:
    """Train one program, and evaluate it."""
    seen: dict[str, Any] = {"losses": [], "reads": [], "rows": []}
    compile = "aot_eager" if "compiled" in folder.name else None
    with Pipeline(folder, device, compile=compile) as pipeline, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        pipeline.load_weights(folder / "weights.safetensors")
        optimizer, balance = torch.optim.SGD(pipeline.parameters(), lr=LR), pipeline.balance()
        for step in range(STEPS):
            reads = Reads(folder)
            balance.begin_step()
            with reads.counted():
                loss = pipeline.step(batches(step), broadcast_loss=True)
            counted = balance.end_step()
            assert loss is not None
            seen["losses"].append(loss.item())
            seen["reads"].append(reads.count)
            seen["rows"].append(0 if counted is None else int(counted.rows.sum()))  # compiled blocks count none
            optimizer.step()
            pipeline.zero_grad()
            pipeline.save_weights(folder / f"step_{step}.safetensors")
        seen["repeated"] = pipeline.repeated_steps
        found = pipeline.eval(batches(STEPS - 1), metrics={"square": lambda outputs, batch: batch["x"].square().sum()})
        assert found is not None
        seen["evaluated"] = {name: value.item() for name, value in found.items()}
        seen["calls"] = float(pipeline.state_dict()["calls"])
        seen["warned"] = sum("a larger room avoids it" in str(each.message) for each in warned)
        pipeline.assert_idle()
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


def eager(weights: dict[str, Tensor]) -> tuple[list[float], list[dict[str, Tensor]], float]:
    """What one process finds: the loss and the weights of each step, and the loss of the last batches after them."""
    model = Mixture()
    model.load_state_dict(weights)
    optimizer, losses, states = torch.optim.SGD(model.parameters(), lr=LR), [], []
    wholes = [
        {name: torch.cat([each[name] for each in batches(step)]) for name in ("x", "target")} for step in range(STEPS)
    ]
    for whole in wholes:
        optimizer.zero_grad()
        loss = model(**whole)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    with torch.no_grad():
        return losses, states, model(**wholes[-1]).item()


def weights_of(kind: str) -> dict[str, Tensor]:
    """Initial weights: those of a ``skewed`` router send all rows to the first two experts."""
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in Mixture().state_dict().items()}
    for name in (name for name in state if name.startswith("gates.") and kind == "skewed"):
        if name.endswith("bias"):
            state[name] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    return state


def main(root: Path, names: list[str]) -> None:
    """Train each program."""
    with start() as ranks:
        for name in names:
            train(root / name, ranks.device, ranks.rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
