"""Modules are built without memory, and without a word."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from graphpar.frontend.build import build


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
