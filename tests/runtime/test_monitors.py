"""What is a spike, and which held-out loss is the best: also after a checkpoint; and the rates of ``--schedule``."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch.optim import lr_scheduler as lr

from graphpar.runtime.errors import AgreedError
from graphpar.runtime.training.loggers import numbers
from graphpar.runtime.training.monitors import STEADY, WINDOW, BestLoss, SpikeGuard
from graphpar.runtime.training.rates import DECAYS, STABLE, Rates


def test_what_is_not_finite_is_refused_and_too_many_in_a_row_end() -> None:
    guard = SpikeGuard(math.inf, 2)
    assert guard.refuses(0, 1.0, 1e30) is None
    assert guard.refuses(1, math.nan, 1.0) == "the loss is nan"
    assert guard.refuses(2, 1.0, math.inf) == "the gradient norm is inf"
    assert guard.refuses(3, 1e30, 1.0) is None and guard.skipped == 2
    for step in (4, 5):
        assert guard.refuses(step, -math.inf, 1.0)
    with pytest.raises(AgreedError, match=r"of 3 steps in a row .*\(step 6: the loss is nan\), and --max-skips is 2"):
        guard.refuses(6, math.nan, 1.0)


def test_a_spike_is_measured_by_the_updates_before_it_also_after_a_checkpoint() -> None:
    guard, chance = SpikeGuard(6.0, 10), random.Random(0)
    values = [(-3 + chance.gauss(0, 0.1), 1 + chance.gauss(0, 0.2)) for _ in range(2 * WINDOW)]
    assert SpikeGuard(6.0, 10).refuses(0, 100.0, 1.0) is None  # nothing to compare with
    assert not any(guard.refuses(step, *pair) for step, pair in enumerate(values))
    for restored in (False, True):
        if restored:
            state = json.loads(json.dumps(guard.state_dict()))
            guard = SpikeGuard(6.0, 10)
            guard.load_state_dict(state)
        window = torch.tensor(values[-WINDOW:], dtype=torch.float64)
        limits = window.mean(0) + 6 * window.std(0, correction=0)
        usual = window.mean(0).tolist()
        for place, name in enumerate(("loss", "gradient norm")):
            pair = list(usual)
            pair[place] = limits[place].item() + 1e-6
            assert (guard.refuses(0, *pair) or "").startswith(f"the {name} is ")
            pair[place] = limits[place].item() - 1e-6
            probe = SpikeGuard(6.0, 10)
            probe.load_state_dict(guard.state_dict())
            assert probe.refuses(0, *pair) is None
    assert guard.skipped == 4
    steady = SpikeGuard(6.0, 10)
    assert not any(steady.refuses(step, 2.0, 1.0) for step in range(WINDOW))
    assert steady.refuses(WINDOW, 2.0 * (1 + 5.9 * STEADY), 1.0) is None
    assert steady.refuses(WINDOW, 2.0 * (1 + 6.5 * STEADY), 1.0)


def test_the_best_loss_and_patience() -> None:
    best = BestLoss(2)
    assert [best.improves(value) for value in (3.0, 2.0, math.nan, 1.5, 1.5)] == [True, True, False, True, False]
    again = BestLoss(2)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert not again.ends and not again.improves(1.7) and again.ends and again.value == 1.5
    fresh = BestLoss(None)
    fresh.load_state_dict(json.loads(json.dumps(BestLoss(1).state_dict())))
    assert fresh.improves(1e30) and not fresh.improves(math.inf) and not fresh.ends


def _of_torch(decay: str, warmup: int, steps: int, final: float, optimizer: torch.optim.Optimizer) -> lr.LRScheduler:
    later = steps - warmup
    stable = round(STABLE * later)
    after: list[lr.LRScheduler] = {
        "constant": lambda: [lr.ConstantLR(optimizer, 1.0)],
        "linear": lambda: [lr.LinearLR(optimizer, 1.0, final, later)],
        "cosine": lambda: [lr.CosineAnnealingLR(optimizer, later, 0.3 * final)],
        "wsd": lambda: [lr.ConstantLR(optimizer, 1.0), lr.LinearLR(optimizer, 1.0, final, later - stable)],
    }[decay]()
    warm = [lr.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)] if warmup else []
    begins = [*([warmup] if warmup else []), warmup + stable]
    return lr.SequentialLR(optimizer, [*warm, *after], begins[: len(warm) + len(after) - 1])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("warmup", "final"), [(0, 0.0), (5, 0.1)])
@pytest.mark.filterwarnings("ignore")
def test_rates_are_those_of_torch(decay: str, warmup: int, final: float) -> None:
    steps = warmup + 20
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3) for _ in range(2)]
    own = lr.LambdaLR(optimizers[0], Rates(decay, warmup, steps, final))
    others = _of_torch(decay, warmup, steps, final, optimizers[1])
    for step in range(steps + 1):
        found, expected = (each.param_groups[0]["lr"] for each in optimizers)
        assert found == pytest.approx(expected, abs=1e-9), step
        own.step(), others.step()


def test_the_numbers_of_a_record() -> None:
    record = {
        "step": 3,
        "loss": 2.5,
        "mfu": None,
        "checkpoint": "ck/3",
        "predicted": {"seconds": 1, "here": True, "cluster": "x"},
    }
    assert dict(numbers(record)) == {"loss": 2.5, "predicted/seconds": 1}
