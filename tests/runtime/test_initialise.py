"""Initial weights made on the ranks are those of the model built on one device, to the bit, without the whole model in memory."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages import deferred
from graphpar.runtime.stages.initialise import initial_values
from tests.models import architectures
from tests.models.zoo import ZOO
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool

SEED = 3


class Odd(nn.Module):
    """Initialised in every way that a model's own code may think of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        nn.init.trunc_normal_(self.up.weight, std=0.5)
        nn.init.trunc_normal_(self.down.weight[:, 2:], a=1.5, b=2.0)  # a part of a weight
        nn.init.orthogonal_(self.down.weight)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.down.weight
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.apart = nn.Parameter(torch.randn(3, 3))
        self.scaled = nn.Parameter(torch.randn(2, 2) * self.apart.mean().detach())
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.rand(4))
        torch.manual_seed(0)
        self.again = nn.Parameter(torch.rand(4))
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)] + torch.linspace(0, 1, 3).tolist()
        self.rates = nn.Parameter(torch.tensor(rates) * torch.rand(7))
        self.words = nn.Embedding(10, 4, padding_idx=0)
        self.words.weight.data[3] = 7
        self.words.weight.data.mul_(2)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        own = torch.Generator().manual_seed(9)
        self.own = nn.Parameter(torch.randn(4, generator=own))
        own.manual_seed(2)
        self.other = nn.Parameter(torch.randn(4, generator=own))
        self.up.bias.data = torch.full((7,), 0.5)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 6), 0.3))
        self.shuffled = nn.Parameter(torch.arange(8.0)[torch.randperm(8)])
        self.brief = nn.Parameter(torch.rand(3, dtype=torch.bfloat16))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.recurrent, self.attention = nn.LSTM(3, 4), nn.MultiheadAttention(8, 2)


def _tied_in_16_bits() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 5), nn.LSTM(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    model[3].weight = model[0].weight
    return model.to(torch.bfloat16).double().half()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "tied in 16 bits": _tied_in_16_bits,
    **{name: functools.partial(architectures.build, name) for name in ("gpt2", "t5", "mixtral", "vit")},
}


def _differing(build: Callable[[], nn.Module]) -> list[str]:
    """The names of weights that are not those of ``build``, run for real."""
    torch.manual_seed(SEED)
    expected = build().state_dict()
    left = dict(expected)
    differing = []
    for name, value in initial_values(build, SEED):
        wanted = left.pop(name)
        if value.dtype != wanted.dtype or not torch.equal(value, wanted):
            differing.append(name)
    return differing + sorted(left)


@pytest.mark.parametrize("name", BUILDS)
def test_equal_to_the_bit(name: str) -> None:
    assert not _differing(BUILDS[name])


@pytest.mark.slow
def test_all_models_are_equal_to_the_bit() -> None:
    builds = {name: toy.build for name, toy in ZOO.items()}
    builds |= {name: functools.partial(architectures.build, name) for name in architectures.ARCHITECTURES}
    assert not {name: differing for name, build in builds.items() if (differing := _differing(build))}


def test_the_generator_is_left_as_it_was() -> None:
    state = torch.get_rng_state()
    list(initial_values(Odd, SEED))

    assert torch.equal(torch.get_rng_state(), state)


def test_a_few_weights_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's own initialisation is overwritten by the model's, after all layers are built."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)))
        for layer in model:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.normal_(layer.bias)
        return model

    held: list[int] = []
    run = deferred._Memory.run

    def watched(self: deferred._Memory, call: deferred._Call, kept: bool) -> None:
        run(self, call, kept)
        held.append(sum(storage.nbytes() for storage in self.real.values()))

    monkeypatch.setattr(deferred._Memory, "run", watched)
    assert not _differing(build)
    assert max(held) <= 2 * 32 * 32 * 4


def test_a_model_that_looks_at_what_it_draws() -> None:
    def build() -> nn.Module:
        first = nn.Linear(3 + int(torch.rand(1) * 5), 4)
        second = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        return nn.Sequential(first, second, nn.Linear(4, 1 + int(first.weight.std() > 0.1)))

    assert not _differing(build)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(RuntimeProgramError, match="weight is on the device meta"):
        list(initial_values(lambda: nn.Linear(3, 2, device="meta"), SEED))


SCRIPT = """
import sys
from graphpar.runtime import Pipeline, start
from torch import nn

folder, saved, seed = sys.argv[1:]
with start(60) as ranks, Pipeline(folder, ranks.device, seed=int(seed)) as pipeline:
    for parameter in pipeline.parameters():
        nn.init.constant_(parameter, float("nan"))
    pipeline.load_weights()  # the folder has none
    pipeline.save_weights(saved)
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"tp": 2, "pp": 2}, {}), ({"dp_shard": 4}, {"zero": 3}), ({"dp_shard": 2, "tp": 2}, {"zero": 1})],
)
def test_on_ranks_they_are_those_of_one_device(
    mesh: dict[str, int], options: dict[str, int], tmp_path: Path, pool: RankPool
) -> None:
    file = example_file("gpt")
    program = example("gpt")
    plan = gp.plan(program, mesh=mesh, microbatch_size=1, **options)  # type: ignore[arg-type]
    folder = gp.partition(program, plan, model_file=str(file.path.resolve())).save(tmp_path / "out")

    script = tmp_path / "initialise.py"
    script.write_text(SCRIPT)
    arguments = [str(folder), str(tmp_path / "saved.safetensors"), str(SEED)]
    pool.torchrun(script, arguments, nproc=4, timeout_s=120)

    torch.manual_seed(SEED)
    expected: dict[str, Tensor] = file.model().state_dict()  # type: ignore[operator]
    saved = load_file(tmp_path / "saved.safetensors")
    assert set(saved) == set(expected)
    assert not [name for name, value in saved.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_from_generators_that_no_seed_sets_are_refused(draw: Callable[[], float]) -> None:
    def build() -> nn.Module:
        return nn.Linear(3 + int(draw() * 0), 2)

    def seeded() -> nn.Module:
        random.seed(1)
        np.random.seed(1)
        return build()

    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(RuntimeProgramError, match=r"draws from .*random, which no seed of this program sets"):
        list(initial_values(build, SEED))
    list(initial_values(seeded, SEED))
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert not _differing(seeded)
