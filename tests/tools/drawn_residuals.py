"""Random networks of residual, dense and gated parts, cut anywhere, under schedules that split backwards: what
``tests/end_to_end/test_split_backwards.py`` verifies.

What a stage sends is often read by its own operators too, was received, is sent twice as far as the next stage, or has no gradient.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp

WIDTH, SIZE, ROWS = 8, 4, 8
SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ACTIVATIONS = (F.gelu, torch.tanh, torch.sigmoid, F.silu, F.relu, F.leaky_relu, F.elu, torch.exp)


class Part(nn.Module):
    """One of :data:`KINDS` around two layers; ``other`` is a result of an earlier part."""

    def __init__(self, kind: str, convolves: bool, numbers: random.Random) -> None:
        super().__init__()

        def layer() -> nn.Module:
            bias = numbers.random() < 0.6
            if convolves:
                return nn.Conv2d(WIDTH, WIDTH, numbers.choice([1, 3]), padding="same", bias=bias)
            return nn.Linear(SIZE, SIZE, bias)

        self.kind, self.a, self.b = kind, layer(), layer()
        self.norm = nn.GroupNorm(2, WIDTH) if numbers.random() < 0.5 else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.activation = numbers.choice(ACTIVATIONS)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.b(self.activation(self.norm(self.a(x))))
        if self.kind == "residual":
            return x + self.b(self.activation(self.norm(self.a(x))))
        if self.kind == "before":
            return x + self.b(self.activation(self.a(self.norm(x))))
        if self.kind == "gate":
            return x * torch.sigmoid(self.a(x)) + self.b(x)
        if self.kind == "dense":
            first, second = torch.cat([self.a(x), self.b(other)], 1).chunk(2, 1)
            return self.scale * first + second.transpose(2, 3).transpose(2, 3)
        if self.kind == "twice":
            return self.a(torch.tanh(self.a(x))) + self.scale * x
        if self.kind == "detached":
            return self.a(x) + self.b(x.detach()) * other.detach()
        return self.a(x) + self.scale * other  # "skip"


KINDS = ("plain", "residual", "residual", "before", "gate", "dense", "twice", "detached", "skip", "skip")


class Network(nn.Module):
    """Parts one after the other, each given the result of an earlier one too; ``before[i]``: how much earlier."""

    def __init__(self, numbers: random.Random) -> None:
        super().__init__()
        convolves = numbers.random() < 0.7
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        count = numbers.randint(4, 7)
        self.parts = nn.ModuleList(Part(numbers.choice(KINDS), convolves, numbers) for _ in range(count))
        self.before = [numbers.randint(1, 3) for _ in range(count)]
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for part, before in zip(self.parts, self.before):
            found.append(torch.tanh(part(found[-1], found[max(0, len(found) - 1 - before)])))
        return self.head(found[-1].mean((2, 3)))


@dataclass
class Drawn:
    """One random program."""

    seed: int
    schedule: str
    model: Network

    def __str__(self) -> str:
        kinds = [part.kind for part in self.model.parts]
        return f"seed {self.seed}, {self.schedule}: {kinds} {self.model.before}"

    def compile(self) -> gp.Parts:
        """The program on two ranks with two stages each, which begin at any layer."""
        numbers = torch.Generator().manual_seed(self.seed)
        x = torch.randn(ROWS, 3, SIZE, SIZE, generator=numbers, dtype=torch.float64)
        target = torch.randint(5, (ROWS,), generator=numbers)
        program = gp.export(self.model, (x,), loss_fn=F.cross_entropy, targets=(target,))
        places = [f"parts.{i}{part}" for i in range(len(self.model.parts)) for part in (".a", ".b", "")]
        chance = random.Random(self.seed)
        for _ in range(20):
            split = sorted(chance.sample(places, 3))
            try:
                plan = gp.plan(program, mesh={"pp": 2}, schedule=self.schedule, split=split, microbatch_size=2)
            except gp.GraphparError:
                continue  # modules that don't run, or that run in another order
            return gp.partition(program, plan)
        return gp.partition(program, gp.plan(program, mesh={"pp": 2}, schedule=self.schedule, microbatch_size=2))


def draw(seed: int) -> Drawn:
    """The program of a seed."""
    torch.manual_seed(seed)
    return Drawn(seed, SCHEDULES[seed % len(SCHEDULES)], Network(random.Random(seed)).double())
