"""Modules are built without memory, and without a word."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpar.frontend.build import build
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.deferred import Recorder


class Pair(nn.Module):
    """A network and a copy of it, as DPO has."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(2, 2)
        self.reference = copy.deepcopy(self.policy)


def test_a_module_that_copies_itself_warns_of_nothing() -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else torch warns once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built, fake, _ = build(Pair)
    finally:
        torch.set_warn_always(before)
    assert isinstance(built, Pair) and fake is not None


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_factory_that_saves_what_it_builds_leaves_a_whole_file(save: Callable[..., None], tmp_path: Path) -> None:
    """Such as one that keeps its initial weights, and takes them from there when they are."""
    file = tmp_path / "initial"

    def factory() -> nn.Module:
        model = Pair()
        if file.exists():
            model.load_state_dict(torch.load(file) if save is torch.save else load_file(file))
        else:
            save(model.state_dict(), file)
        return model

    first, fake, _ = build(factory)
    assert fake is None
    again, fake, _ = build(factory)
    assert fake is not None and again.state_dict().keys() == first.state_dict().keys()


def test_ranks_say_why_a_factory_that_saves_can_not_be_built() -> None:
    def factory() -> nn.Module:
        model = Pair()
        torch.save(model.state_dict(), "file")
        return model

    with pytest.raises(RuntimeProgramError, match="save outside of it"), Recorder(FakeTensorMode()).building(0):
        factory()
    assert not Path("file").exists()
