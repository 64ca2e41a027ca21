"""Statements between the blocks of a stage become functions; the others stay where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.runtime.stages.compiled_rest import with_parts

kept: dict[str, Tensor] = {}


def keep(name: str, value: Tensor) -> None:
    kept[name] = value


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(3)})

    def forward(self, *, ids: Tensor, scale: Tensor) -> Any:
        x = self.embed(ids)
        x = x * scale
        x = x + 1
        for block in self.blocks.values():
            x = block(x)
        scale = scale + self.head.bias.sum().float()
        y = self.blocks["0"](x) * scale
        logits = self.head(x + y).flatten(0, 1)
        keep("logits", logits)
        return (logits.softmax(-1) / scale).sum()

    def branching(self, x: Tensor) -> Any:
        if x.shape[0] > 2:
            return self.head(x) * 2 + 1
        return torch.stack([each * 2 + 1 for each in (x, x)])

    @torch.no_grad()
    def decorated(self, x: Tensor) -> Any:
        return self.head(x) * 2 + 1


def parts_of(name: str, stage: Stage) -> tuple[Callable[..., Any], list[Callable[..., Any]]]:
    made: list[Callable[..., Any]] = []

    def make(part: Callable[..., Any]) -> Callable[..., Any]:
        made.append(part)
        return part

    return with_parts(getattr(Stage, name), stage, {*stage.blocks.values(), keep}, make), made


def test_runs_of_statements_become_functions() -> None:
    stage, ids, scale = Stage(), torch.tensor([[1, 2], [3, 0]]), torch.tensor(2.0)
    forward, parts = parts_of("forward", stage)
    given = [list(inspect.signature(part).parameters) for part in parts]
    assert given == [["self", "ids", "scale"], ["self", "scale"], ["self", "x", "y"], ["self", "logits", "scale"]]
    expected = stage(ids=ids, scale=scale)
    logits = kept.pop("logits")
    assert torch.equal(forward(stage, ids=ids, scale=scale), expected)
    assert torch.equal(kept.pop("logits"), logits)


def test_errors_of_parts_have_the_lines_of_the_file() -> None:
    stage = Stage()
    forward, _ = parts_of("forward", stage)
    with pytest.raises(IndexError) as error:
        forward(stage, ids=torch.tensor([[9]]), scale=torch.tensor(2.0))
    lines, first = inspect.getsourcelines(Stage.forward)
    place = next(each for each in error.traceback if each.name == "part_0")
    assert (str(place.path), lines[place.lineno + 1 - first].strip()) == (__file__, "x = self.embed(ids)")


@pytest.mark.parametrize("name", ["branching", "decorated"])
def test_what_branches_or_is_wrapped_stays_as_it_is(name: str) -> None:
    forward, parts = parts_of(name, Stage())
    assert forward is getattr(Stage, name) and not parts
