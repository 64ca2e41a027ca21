"""Optimizers that look at more than an element, and a script that trains a program with each of them on ranks.

script JOBS     each job: a program, an optimizer, a checkpoint to go on from, steps, where to save; then what a step leaves
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphpar.runtime import Pipeline, start
from tests.ranks import checkpoint_script as models

Named = Iterable[tuple[str, nn.Parameter]]


class Lars(Optimizer):
    """A step size for each parameter, by its norm."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                change = parameter.grad * (parameter.norm() / (parameter.grad.norm() + 1e-9)).clamp(0.1, 10)
                moved = self.state[parameter].setdefault("moved", torch.zeros_like(parameter))
                parameter.sub_(moved.mul_(group["momentum"]).add_(change), alpha=group["lr"])


class Global(Optimizer):
    """One step size, from all parameters together; it counts its steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        values, gradients = (
            torch.stack([(each**2).sum() for each in some]).sum().sqrt() for some in (own, [each.grad for each in own])
        )
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] * values / (gradients + 1e-8) / group["steps"]))


class Orthogonal(Optimizer):
    """Matrices move by the orthogonal part of their momentum, as with Muon, but no embeddings; the rest by its sign."""

    def __init__(self, named: Named) -> None:
        pairs = list(named)
        matrices = [parameter for name, parameter in pairs if parameter.ndim == 2 and "tokens" not in name]
        others = [parameter for name, parameter in pairs if parameter.ndim != 2 or "tokens" in name]
        super().__init__([{"params": matrices, "matrix": True}, {"params": others, "matrix": False}], {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                change = (
                    self.state[parameter].setdefault("moved", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                )
                if not group["matrix"]:
                    parameter.sub_(change / (change.abs() + 1e-3), alpha=group["lr"])
                    continue
                assert parameter.ndim == 2
                change = change / (change.norm() + 1e-7)
                for _ in range(5):
                    change = 1.5 * change - 0.5 * change @ change.T @ change
                parameter.sub_(change, alpha=group["lr"] * max(parameter.shape) ** 0.5)


class Listed(Optimizer):
    """Moves along the squares of sides of matrices, which it keeps in a list; they are none at first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state, change = self.state[parameter], parameter.grad / (parameter.grad.norm() + 1e-3)
            if not state.setdefault("sides", []):
                state["sides"] = [None if side > 20 else torch.eye(side) for side in parameter.shape]
            for dim, side in enumerate(state["sides"]):
                if side is not None:
                    rows = change.transpose(0, dim).flatten(1) if change.ndim > 1 else change[:, None]
                    side.lerp_(rows @ rows.T, 0.1)
                    change = (side @ rows).view(change.transpose(0, dim).shape).transpose(0, dim)
            parameter.sub_(change, alpha=0.01)


class Counted(Optimizer):
    """Elements move alone, less far with each step, of which a tensor of one dim counts them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            count = self.state[parameter].setdefault("count", torch.zeros(1))
            parameter.sub_(parameter.grad, alpha=1 / (count.add_(1).item() + 3))


def parameters(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "lars": lambda named: Lars(parameters(named)),
    "global": lambda named: Global(parameters(named)),
    "orthogonal": Orthogonal,
    "adafactor": lambda named: torch.optim.Adafactor(parameters(named), lr=0.01),
    "listed": lambda named: Listed(parameters(named), {}),
    "counted": lambda named: Counted(parameters(named), {}),
    "adamw": models.optimizer_of,
    "fused": lambda named: torch.optim.SGD(parameters(named), lr=0.01, momentum=0.9, fused=True),
}


def main(jobs: Path) -> None:
    with start(120.0) as ranks:
        for job in json.loads(jobs.read_text()):
            with Pipeline(job["program"], ranks.device) as pipeline:
                _run(pipeline, job)


def _run(pipeline: Pipeline, job: dict[str, Any]) -> None:
    pipeline.load_weights(job["weights"])
    optimizer = pipeline.optimizer(make=OPTIMIZERS[job["optimizer"]])
    if "load" in job:
        pipeline.load_checkpoint(job["load"], optimizer)
    for step in range(*job["steps"]):
        batch = models.batch_of(job["kind"], step)
        pipeline.step(batch)
        pipeline.clip_grad_norm_(job["clip"])
        optimizer.step()
        pipeline.zero_grad() if step % 2 or pipeline.program.zero == 1 else optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        if step + 1 == job.get("save_at"):
            pipeline.save_checkpoint(Path(job["save"], str(step + 1)), optimizer, step=step + 1)
    pipeline.save_weights(job["out"])
    pipeline.assert_idle()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
