"""What a factory loads, or makes in whatever way, is in the program and on the ranks as in the model built plainly."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import graphpar as gp
from graphpar.frontend.build import SEED, build
from graphpar.runtime.stages.initialise import initial_values
from tests.models import architectures
from tests.models.loaded_models import LOADERS, Scaled, save_files
from tests.tools.samples import drawn

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loaded")
    save_files(path)
    return path


def built_plainly(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return factory()


def without_file(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("name", LOADERS)
def test_values_are_those_of_the_model_built_plainly(name: str, folder: Path) -> None:
    factory = functools.partial(LOADERS[name], folder)
    plain = built_plainly(factory)
    program = gp.export(factory, (X,), loss_fn=lambda y: y.square().mean())
    values = dict(initial_values(factory, SEED))

    assert torch.equal(program.constants["table"], plain.get_buffer("table"))
    state = plain.state_dict()
    assert values.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in values.items())
    assert any("at random" in line for line in program.warnings) == name.startswith(("drawn", "of a weight"))


@pytest.mark.parametrize("name", LOADERS)
def test_nothing_is_built_for_real(name: str, folder: Path) -> None:
    _, fake, _ = build(functools.partial(LOADERS[name], folder))
    assert fake is not None


def unwritten() -> Scaled:
    with torch.device("meta"):
        model = Scaled()
    return model.to_empty(device="cpu")


def half_written() -> Scaled:
    model = Scaled()
    model.table = torch.empty(4)
    model.table[:2] = 1
    return model


@pytest.mark.costly
@pytest.mark.parametrize("factory", [unwritten, half_written])
def test_what_nothing_has_written_is_refused_by_name(factory: Callable[[], nn.Module]) -> None:
    with pytest.raises(gp.GraphparError, match="'table' of Scaled holds whatever was in memory"):
        gp.export(factory, (X,), loss_fn=lambda y: y.square().mean())


def test_what_is_not_read_may_hold_anything() -> None:
    class Unread(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    def factory() -> nn.Module:
        with torch.device("meta"):
            model = Unread()
        return model.to_empty(device="cpu")

    assert gp.export(factory, (X,), loss_fn=lambda y: y.square().mean()).mode == "train"


def test_copies_of_norms_take_no_memory() -> None:
    model, fake, _ = build(lambda: copy.deepcopy(Scaled()))
    assert fake is not None and all(isinstance(parameter, FakeTensor) for parameter in model.parameters())


# ---- from_pretrained -------------------------------------------------------------------------------------------


def saved_architecture(name: str, folder: Path) -> Callable[[], nn.Module]:
    """Save an architecture, and return what loads it."""
    model = architectures.build(name)
    model.save_pretrained(folder)
    return functools.partial(type(model).from_pretrained, folder)


def differing(name: str, folder: Path) -> list[str]:
    """Names of buffers and weights that are not those of the model loaded plainly."""
    factory = saved_architecture(name, folder)
    plain = built_plainly(factory)
    model, fake, recorder = build(factory)
    assert fake is not None and recorder is not None, "it was built for real"
    wanted = without_file(model)
    values, unwritten, _ = recorder.certain(wanted)
    expected = without_file(plain)
    found = [key for key in expected if not torch.equal(values[key], expected[key])] + unwritten
    state = plain.state_dict()
    return found + [key for key, value in initial_values(factory, SEED) if not torch.equal(value, state[key])]


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn([*architectures.ALL], 3, 8))
def test_from_pretrained_gives_the_buffers_of_the_model_loaded_plainly(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert not differing(name, tmp_path)
