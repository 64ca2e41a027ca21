"""Statements between the blocks of a stage become functions; the others stay where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
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


COMMON = """
import torch
from torch import nn

steps = 0


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

"""
FORWARDS = {
    "names of parts": (
        "part_0, parts = (x * 2 + 1).chunk(2, -1)",
        "return self.block(torch.cat([part_0, parts], -1)) + 1",
    ),
    "an import": ("import math", "return self.head(x) * math.sqrt(4) + 1"),
    "a return too early": ("x = self.head(x) * 2", "return x + 1", "x = self.head(x) * 3"),
    "a view of a buffer": ("view = self.seen.view(-1).detach()", "view += 1", "return self.head(x) * self.seen + 1"),
    "a variable that is a block": ("block = self.block", "x = block(x)", "return x * 2 + 1"),
    "one of two": ("if self.training:", "    y = x * 2 + 1", "x = x * 3 + 1", "return (y if self.training else x) + x"),
    "a name of the module": ("global steps", "steps = steps + 1 * 1", "return self.head(x) * steps + 1"),
    "a name of the class": ("self.__own = x * 2 + 1", "return self.head(self.__own) * 2"),
    "its class": ("y = super().extra_repr() + str(1 + 1)", "return self.head(x) * len(y) + 1"),
    "no constant path": ("return self.head(x) * len([self.block, 1][0 * 1].weight) + 1",),
}
LEFT = ("a name of the module", "a name of the class", "its class")


def stage_of(lines: tuple[str, ...], path: Path, after: str = "") -> Any:
    path.write_text(COMMON + "\n        ".join(["    def forward(self, x):", *lines]) + "\n" + after)
    names: dict[str, Any] = {"__name__": "stage"}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    torch.manual_seed(0)
    return names["Stage"]()


def parted(stage: Any) -> tuple[Callable[..., Any], list[Callable[..., Any]]]:
    made: list[Callable[..., Any]] = []
    return with_parts(type(stage).forward, stage, {stage.block}, lambda part: (part, made.append(part))[0]), made  # type: ignore[func-returns-value]


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_file_that_its_user_changed_computes_the_same(name: str, training: bool, tmp_path: Path) -> None:
    plain, changed = (stage_of(FORWARDS[name], tmp_path / f"{i}.py").train(training) for i in range(2))
    forward, parts = parted(changed)
    assert bool(parts) is (name not in LEFT)
    for x in torch.ones(2, 4), torch.arange(4.0):
        assert torch.equal(forward(changed, x), plain(x))
    assert torch.equal(changed.seen, plain.seen)


def test_what_runs_and_not_what_is_written_counts(tmp_path: Path) -> None:
    lines = ("return self.head(x) * 2 + 1",)
    wrapped = (
        "\nimport functools\nold = Stage.forward\n@functools.wraps(old)\ndef new(self, x): return old(self, x) * 5\n"
    )
    for after in wrapped + "Stage.forward = new\n", "Stage.forward = lambda stage, x: stage.head(x) * 3 + 1\n":
        stage, x = stage_of(lines, tmp_path / f"{len(after)}.py", after), torch.ones(4)
        assert torch.equal(parted(stage)[0](stage, x), stage(x))
    stage = stage_of(lines, tmp_path / "edited.py")
    assert len(parted(stage)[1]) == 1
    stage_of(("return self.head(x) * 7 + 1",), tmp_path / "edited.py")
    forward, parts = parted(stage)
    assert forward is type(stage).forward and not parts


def test_parameters_of_what_is_detached_have_no_gradient(tmp_path: Path) -> None:
    lines = (
        "x = x * 2",
        "aside = self.head(x) * 3",
        "x = x + self.seen",
        "x = self.block(x)",
        "return (x + aside.detach()).sum()",
    )
    stage = stage_of(lines, tmp_path / "stage.py")
    forward = with_parts(
        type(stage).forward, stage, {stage.block}, lambda part: torch.compile(part, backend="aot_eager")
    )
    del stage.seen
    stage.seen = nn.Parameter(torch.zeros(4))
    forward(stage, torch.ones(4)).backward()
    assert stage.seen.grad is not None and stage.head.weight.grad is None
