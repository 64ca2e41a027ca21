"""Buffers that the forward writes, over stages, microbatches and replicas: as one device writes them, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import graphpar as gp
from graphpar.verification import verify_all

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
T = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Encoder(nn.Module):
    """Counts its calls, in a number and through a view, and uses what it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counts[1] += 1
        return self.layers(x) * (1 + self.counts[1])


class Twice(nn.Module):
    """An encoder of two views; it keeps state of its own."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) - self.encoder(x * 0.5))


class Recurrent(nn.Module):
    """One cell before the boundary and after it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.middle, self.head = cell, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.cell(x)
        x = self.middle(x)
        for _ in range(2):
            x = x + self.cell(x)
        return self.head(x)


class Ends(nn.Module):
    """A step that the model counts at its begin and at its end, and reads on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("history", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        before = self.step * 1
        self.step += 1
        self.history[2:4] = self.history[1:3] + self.step
        x = self.layers(x * (1 + before) / self.step)
        x = x * self.history[2:4].sum()
        self.step.mul_(2)
        return x / (1 + self.step)


class Averages(nn.Module):
    """Reads at its begin what it writes of its last activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x / self.size))
        with torch.no_grad():
            self.size.mul_(0.9).add_(x.abs().mean() * 0.1)
        return x


Watch = Callable[["Watched", Tensor], Tensor]


class Watched(nn.Module):
    """Reads a BatchNorm's running statistics beside what writes them."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))
        self.watch = watch

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.watch(self, self.first(x)))


def _after(self: Watched, h: Tensor) -> Tensor:
    normal = self.norm(h)
    self.average.lerp_(self.norm.running_mean.detach(), 0.5)  # type: ignore[union-attr]
    return normal.relu() + self.average  # type: ignore[operator]


def _before_and_after(self: Watched, h: Tensor) -> Tensor:
    before = self.norm.running_mean.clone()  # type: ignore[union-attr]
    return self.norm(h).relu() + before + self.norm.running_mean


def _by_hand(self: Watched, h: Tensor) -> Tensor:
    normal = self.norm(h * 2)
    return normal.relu() + (h - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()  # type: ignore[operator]


def _in_evaluation_then(self: Watched, h: Tensor) -> Tensor:
    normal = self.norm(h * 2)
    self.norm.eval()
    still = self.norm(h)
    self.norm.train()
    return normal.relu() + still


WATCHED = {
    "after": _after,
    "before and after": _before_and_after,
    "by hand": _by_hand,
    "in evaluation": _in_evaluation_then,
}


def counting() -> nn.Module:
    return Twice(Encoder())


def normalised() -> nn.Module:
    return Twice(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)))


def spectral() -> nn.Module:
    norm = parametrizations.spectral_norm
    return Twice(nn.Sequential(norm(nn.Linear(16, 16)), nn.ReLU(), norm(nn.Linear(16, 16))))


def exported(build: Callable[[], nn.Module]) -> gp.Program:
    return gp.export(build, (X,), loss_fn=F.mse_loss, targets=(T,))


CASES = {
    "called twice": (counting, "encoder.layers.2", {"microbatch_size": 2}),
    "BatchNorm called twice": (normalised, "encoder.3", {}),
    "power iterations": (spectral, "encoder.2", {"microbatch_size": 4}),
    "in a recurrence": (lambda: Recurrent(Encoder()), "middle", {"microbatch_size": 4}),
    "at both ends": (Ends, "layers.2", {"microbatch_size": 2}),
}


def test_a_module_that_counts_its_calls_is_not_counted_for_beside_it() -> None:
    program = exported(normalised)
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}, split=["encoder.3"]))
    text = parts.files["stage_0.py"]
    assert text.count('self.encoder["1"](') == 2 and "num_batches_tracked" not in text


def test_such_a_module_is_traced_in_evaluation_too() -> None:
    program = gp.export(normalised, (X,), loss_fn=F.mse_loss, targets=(T,), evaluates=True)

    assert program.no_eval is None


def test_running_statistics_are_read_where_the_model_reads_them() -> None:
    program = exported(lambda: Watched(_before_and_after))
    text = gp.partition(program, gp.plan(program, mesh={"tp": 2})).files["stage_0.py"]

    body = text.partition("def forward")[2]
    before, norm, after = body.index("running_mean"), body.index("self.norm("), body.rindex("running_mean")
    assert before < norm < after, text


@pytest.mark.costly
def test_running_statistics_that_are_read_are_those_of_one_device() -> None:
    names, parts = [], []
    for name, watch in WATCHED.items():
        program = exported(functools.partial(Watched, watch))
        for mesh in ({"pp": 2}, {"tp": 2}, {"dp_shard": 2}):
            names.append((name, mesh))
            parts.append(gp.partition(program, gp.plan(program, mesh=mesh)))

    for which, outcome in zip(names, verify_all(parts, 2)):
        assert outcome.ok, (which, outcome.problems, outcome.max_error)


@pytest.mark.costly
def test_written_buffers_are_those_of_one_device() -> None:
    parts = []
    for build, split, options in CASES.values():
        program = exported(build)
        mesh = {"pp": 2}
        parts.append(gp.partition(program, gp.plan(program, mesh=mesh, split=[split], **options)))
    replicas = exported(counting)
    parts.append(gp.partition(replicas, gp.plan(replicas, mesh={"dp_replicate": 2}, microbatch_size=2)))

    for name, outcome in zip([*CASES, "replicas"], verify_all(parts, 2)):
        assert outcome.ok, (name, outcome.problems, outcome.max_error)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("build", "split", "name"),
    [
        (lambda: Recurrent(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))), "middle", "cell.1.running_mean"),
        (Averages, "second", "size"),
    ],
    ids=["BatchNorm in a recurrence", "read before, written after"],
)
def test_a_buffer_that_two_stages_would_write_is_refused(build: Callable[[], nn.Module], split: str, name: str) -> None:
    program = exported(build)

    with pytest.raises(gp.GraphparError, match=rf"Buffer '{name}' is written \(.*must be on one stage"):
        gp.plan(program, mesh={"pp": 2}, split=[split])
