"""Schedules of the learning rate: a restart at any step goes on with the same hyperparameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import SWALR

from graphpar.runtime.checkpoints.saved_state import give_group, hyperparameters_of
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.training.lr_schedules import build_lr_schedule

STEPS = 10
Make = Callable[[Optimizer], LRScheduler]


class WarmUp:
    """A callable that keeps something."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def __call__(self, step: int) -> float:
        self.seen[step] = 1.0
        return len(self.seen) / 5


class Own(LRScheduler):
    """Somebody's own, which counts in a set and follows what it has set before."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.drops: set[int] = set()
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch % 3 == 2:
            self.drops.add(self.last_epoch)
        return [group["lr"] * 0.7 ** len(self.drops) for group in self.optimizer.param_groups]


class Gradual(LRScheduler):
    """Warms up, and goes on with another schedule."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler, warm: int = 3) -> None:
        self.after, self.warm = after, warm
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.warm:
            return [base * (self.last_epoch + 1) / self.warm for base in self.base_lrs]
        self.after.step()
        return list(self.after.get_last_lr())


def cosine(optimizer: Optimizer) -> LRScheduler:
    """As the package ``transformers`` has it."""
    return lr.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 12)))


def one_cycle(optimizer: Optimizer, total: int = 14, momentum: bool = True) -> LRScheduler:
    highest = [group["lr"] for group in optimizer.param_groups]
    return lr.OneCycleLR(optimizer, highest, total_steps=total, cycle_momentum=momentum)


SCHEDULES: dict[str, Make] = {
    "LambdaLR": cosine,
    "LambdaLR of an object": lambda o: lr.LambdaLR(o, [WarmUp(), WarmUp()]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5, 5], 0.1),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 6, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": one_cycle,
    "OneCycleLR in three phases": lambda o: lr.OneCycleLR(o, 0.7, total_steps=12, three_phase=True, anneal_strategy="linear"),
    "CyclicLR": lambda o: lr.CyclicLR(o, [g["lr"] / 10 for g in o.param_groups], 0.9, 2, 3),
    "CyclicLR with a function": lambda o: lr.CyclicLR(o, 0.01, 0.9, 3, scale_fn=lambda x: 1 / (1 + x), cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, [g["lr"] / 2 for g in o.param_groups], 4),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 4), lr.ExponentialLR(o, 0.5)], [3, 7]
    ),
    "SequentialLR of OneCycleLR": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.5, 2), one_cycle(o)], [2]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, 0.1, total_iters=3), lr.MultiStepLR(o, [2, 6])], o),
    "own": Own,
    "own with another": lambda o: Gradual(o, lr.CosineAnnealingWarmRestarts(o, 3)),
}  # fmt: skip


def test_all_of_torch_are_tried() -> None:
    kinds = {name for name in lr.__all__ if name not in ("LRScheduler", "ReduceLROnPlateau")}
    assert not {kind for kind in kinds if not any(name.startswith(kind) for name in SCHEDULES)}


def optimizer_of(kind: str, rate: float = 0.1) -> Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate},
        {"params": [], "lr": 4 * rate, "weight_decay": 0.1},
    ]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    if kind == "tensors":
        groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    return torch.optim.AdamW(groups, lr=1.0, foreach=False)


def steps(optimizer: Optimizer, schedule: LRScheduler, count: int) -> list[Any]:
    """The hyperparameters of each step."""
    found = []
    for _ in range(count):
        found.append(hyperparameters_of(optimizer))
        optimizer.step()
        schedule.step()
    return found


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def load(optimizer: Optimizer, groups: Any) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        give_group(group, values)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "tensors"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.filterwarnings("ignore")
def test_a_restart_at_any_step_goes_on(make: Make, kind: str) -> None:
    if kind == "tensors":
        try:
            make(optimizer_of(kind))
        except (TypeError, ValueError):
            pytest.skip("torch wants a number for the learning rate")
    one = optimizer_of(kind)
    expected = steps(one, build_lr_schedule(make, one)[0], STEPS)
    for place in range(STEPS):
        first = optimizer_of(kind)
        made, schedule = build_lr_schedule(make, first)
        assert steps(first, made, place) == expected[:place]
        saved = through_json((schedule.record(), hyperparameters_of(first)))
        for before in (False, True):  # the schedule is made before the checkpoint is loaded
            second = optimizer_of(kind, 0.3)  # --lr gives another rate, but that of the checkpoint counts
            into = build_lr_schedule(make, second)[0] if before else None
            load(second, saved[1])
            goes_on, again = build_lr_schedule(make, second, place, saved[0], into)
            assert again.is_of(saved[0]) and (into is None or goes_on is into)
            assert steps(second, goes_on, STEPS - place) == expected[place:], place
            assert through_json(again.record())["groups"] == saved[0]["groups"]  # and so may a third


@pytest.mark.filterwarnings("ignore")
def test_a_longer_schedule_is_that_of_its_file_after_as_many_steps() -> None:
    one, first, second = (optimizer_of("AdamW") for _ in range(3))
    longer: Make = lambda optimizer: one_cycle(optimizer, 30)  # noqa: E731
    expected = steps(one, build_lr_schedule(longer, one)[0], 25)
    made, schedule = build_lr_schedule(one_cycle, first)
    steps(first, made, 9)
    saved = through_json((schedule.record(), hyperparameters_of(first)))
    load(second, saved[1])
    goes_on, again = build_lr_schedule(longer, second, 9, saved[0])
    assert not again.is_of(saved[0])
    assert steps(second, goes_on, 16) == expected[9:]


@pytest.mark.filterwarnings("ignore")
def test_without_its_own_state_a_schedule_makes_its_steps_again_or_is_refused() -> None:
    one, first, second = (optimizer_of("AdamW") for _ in range(3))
    expected = steps(one, build_lr_schedule(cosine, one)[0], 9)
    steps(first, build_lr_schedule(cosine, first)[0], 4)
    load(second, hyperparameters_of(first))
    assert steps(second, build_lr_schedule(cosine, second, 4)[0], 5) == expected[4:]
    first, second = optimizer_of("AdamW"), optimizer_of("AdamW")
    steps(first, build_lr_schedule(one_cycle, first)[0], 4)
    load(second, hyperparameters_of(first))
    with pytest.raises(RuntimeProgramError, match=r"OneCycleLR sets the initial .* 4 steps can't be repeated without"):
        build_lr_schedule(one_cycle, second, 4)


def test_what_a_checkpoint_cannot_hold_is_refused_when_the_schedule_is_made() -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        made = cosine(optimizer)
        made.noise = torch.Generator()  # type: ignore[attr-defined]
        return made

    with pytest.raises(RuntimeProgramError, match="the schedule's noise is a Generator, which a checkpoint can't hold"):
        build_lr_schedule(make, optimizer_of("SGD"))
    with pytest.raises(
        RuntimeProgramError, match=r"ReduceLROnPlateau, which needs a metric at each step.* in save_checkpoint's data"
    ):
        build_lr_schedule(lr.ReduceLROnPlateau, optimizer_of("SGD"))
