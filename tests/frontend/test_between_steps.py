"""What a model keeps between steps in other places than buffers is refused, where it computes with it."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp


class _State:
    """Keeps a number in its ``__dict__``."""

    def __init__(self) -> None:
        self.steps = 1


class _Frozen(OrderedDict[str, Any]):
    """Can't be changed once it is made, as the configurations of some libraries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen = True

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self, "frozen"):
            raise TypeError("it is frozen")
        super().__setitem__(key, value)

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("it is frozen")

    __delitem__ = setdefault = pop = update = clear = _refused  # type: ignore[assignment]


class _Slotted(nn.Module):
    __slots__ = ("slot",)


class _Keeps(_Slotted):
    """``keep(self)`` in the forward returns a number or tensor that the result is multiplied by."""

    def __init__(self, keep: Callable[[_Keeps], Tensor | float]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(8, 8), keep
        self.count, self.on, self.plain, self.several = 1, False, torch.ones(8), [torch.ones(8)]
        self.seen: Tensor | None = torch.zeros(())
        self.past: Tensor | None = None
        self.by_name: dict[str, Tensor] = {}
        self.state, self.slot = _State(), 1
        self.frozen, self.view = _Frozen(factor=2.0), MappingProxyType({"factor": 2.0})
        self.register_buffer("all", torch.ones(8))
        self.register_buffer("some", torch.ones(8))
        self.register_buffer("first", self.all[:4])

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.keep(self)).square().mean()


def _counted(model: _Keeps) -> float:
    model.count += 1
    return float(model.count)


def _counted_in_an_object(model: _Keeps) -> float:
    model.state.steps += 1
    return float(model.state.steps)


def _counted_in_a_slot(model: _Keeps) -> float:
    model.slot += 1
    return float(model.slot)


def _counted_in_a_frozen_dict(model: _Keeps) -> float:
    OrderedDict.__setitem__(model.frozen, "factor", model.frozen["factor"] + 1)
    return float(model.frozen["factor"])


def _counted_unread(model: _Keeps) -> float:
    model.state.steps, model.slot = model.state.steps + 1, model.slot + 1
    OrderedDict.__setitem__(model.frozen, "unread", 1)
    return float(model.frozen["factor"] * model.view["factor"])


def _warms_up(model: _Keeps) -> float:
    """The first steps are alike."""
    model.count += 1
    return 0.1 if model.count <= 20 else 1.0


def _each_hundredth(model: _Keeps) -> float:
    factor = 2.0 if model.count % 100 == 0 else 1.0
    model.count = model.count + 1
    return factor


def _switched(model: _Keeps) -> float:
    model.on = not model.on
    return 2.0 if model.on else 3.0


def _assigned(model: _Keeps) -> Tensor:
    model.plain = model.plain * 2
    return model.plain


def _written(model: _Keeps) -> Tensor:
    return model.plain.mul_(2)


def _element(model: _Keeps) -> Tensor:
    return model.several[0].mul_(2)


def _element_assigned(model: _Keeps) -> Tensor:
    model.several[0] = model.several[0] * 2
    return model.several[0]


def _first_without(model: _Keeps) -> Tensor:
    past = model.some if model.past is None else model.past
    model.past = (past * 2).detach()
    return past


def _new_attribute(model: _Keeps) -> Tensor | float:
    past = getattr(model, "created", 1.0)
    model.created = model.linear.weight.sum()
    return past


def _more_and_more(model: _Keeps) -> Tensor:
    model.several.append(model.linear.bias.detach())
    return torch.stack(model.several).sum()


def _by_name(model: _Keeps) -> Tensor:
    past = model.by_name.get("past", model.some)
    model.by_name["past"] = past.detach() * 2
    return past


def _one_memory(model: _Keeps) -> Tensor:
    model.all.mul_(2)
    return model.first.sum()


def _one_memory_by_the_other(model: _Keeps) -> Tensor:
    model.first.mul_(2)
    return model.all


REFUSED: dict[Callable[[_Keeps], Tensor | float], str] = {
    _counted: r"assigns its attribute 'count' of _Keeps in the forward \(1 becomes 2\).*register_buffer",
    _counted_in_an_object: r"assigns its attribute \"state\['steps'\]\" of _Keeps in the forward \(1 becomes 2\)",
    _counted_in_a_slot: r"assigns its attribute 'slot' of _Keeps in the forward \(1 becomes 2\)",
    _counted_in_a_frozen_dict: r"assigns its attribute \"frozen\['factor'\]\" of _Keeps in the forward \(2.0 becomes 3.0\)",
    _warms_up: r"counts in its attribute 'count' of _Keeps and compares the count \(test_between_steps.py:\d+\).*register_buffer",
    _each_hundredth: r"counts in its attribute 'count' of _Keeps and compares the count",
    _switched: r"assigns its attribute 'on' of _Keeps in the forward",
    _assigned: r"assigns its attribute 'plain' of _Keeps in the forward, and computes with it",
    _written: r"writes the tensor 'plain' in place.*which is not a buffer",
    _element: r"in place.*which is not a buffer",
    _element_assigned: r"assigns its attribute 'several\[0\]' of _Keeps in the forward, and computes with it",
    _first_without: r"assigns its attribute 'past' of _Keeps in the forward, and then computes something different",
    _new_attribute: r"assigns its attribute 'created' of _Keeps in the forward, and then computes something different",
    _more_and_more: r"assigns its attribute 'several\[1\]' of _Keeps in the forward, and then computes something different",
    _by_name: r"assigns its attribute .by_name\['past'\]. of _Keeps in the forward, and then computes something different",
    _one_memory: r"writes the buffer 'all' in place, which shares memory with 'first'",
    _one_memory_by_the_other: r"writes the buffer 'first' in place, which shares memory with 'all'",
}


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("keep", REFUSED)
def test_state_that_a_trace_would_fix_is_refused(keep: Callable[[_Keeps], Tensor | float]) -> None:
    with pytest.raises(gp.GraphparError, match=f"(?s){REFUSED[keep]}"):
        gp.export(_Keeps(keep), (torch.randn(4, 8),))


def _counted_alone(model: _Keeps) -> float:
    model.count += 1
    return 2.0


def _shown(model: _Keeps) -> Tensor:
    model.seen = model.linear.weight.sum()
    return model.some * 2


def _other_buffer(model: _Keeps) -> Tensor:
    return model.some.mul_(2)


def _collected(model: _Keeps) -> float:
    model.several.append(model.linear.weight.sum())
    model.by_name["weight"] = model.linear.weight * 2
    model.past = model.linear.bias.detach()
    return 2.0


@pytest.mark.parametrize("keep", [_counted_unread, _counted_alone, _shown, _other_buffer, _collected])
def test_what_nothing_is_computed_with_may_change(keep: Callable[[_Keeps], Tensor | float]) -> None:
    model = _Keeps(keep)
    gp.export(model, (torch.randn(4, 8),))
    assert (model.count, len(model.several), model.by_name, model.past) == (1, 1, {}, None)
    assert (model.state.steps, model.slot, dict(model.frozen)) == (1, 1, {"factor": 2.0})


class Rotary(nn.Module):
    """Keeps its tables, of ``made(self, positions)``, from the first forward on."""

    def __init__(self, made: Callable[[Rotary, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(8, 8), made
        self.register_buffer("frequency", torch.linspace(1, 2, 8))
        self.length, self.table, self.tables = 0, None, dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.shape[1] != self.length:
            self.length = h.shape[1]
            self.table = self.made(self, torch.arange(h.shape[1]), h)
            self.tables[self.length] = self.table * 2
        assert self.table is not None
        return (h * self.table + self.tables[self.length]).square().mean()


def _outer(model: Rotary, positions: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        grid = torch.outer(positions.type_as(model.frequency), model.frequency)
        grid[0] = 1.0
        return grid.cos()


def _same_each_time(model: Rotary, positions: Tensor, h: Tensor) -> Tensor:
    return torch.zeros(len(positions), 8).add_(positions[:, None]).sin()


@pytest.mark.parametrize("made", [_outer, _same_each_time])
@pytest.mark.parametrize("built", [False, True])
def test_tables_that_are_kept_may_be_kept(made: Callable[[Rotary, Tensor, Tensor], Tensor], built: bool) -> None:
    torch.manual_seed(0)
    model, x = Rotary(made), torch.randn(4, 5, 8)

    program = gp.export(model if built else lambda: Rotary(made), (x,))

    state, run = dict(model.state_dict()) | program.constants, []
    for _ in range(2):
        run.append(program.run(state, {"x": x, **dict.fromkeys(program.count_names, torch.tensor(4))})[0])
    torch.testing.assert_close(run, [model(x), model(x)])
    assert model.length == 5


def _of_a_parameter(model: Rotary, positions: Tensor, h: Tensor) -> Tensor:
    return model.linear.weight[:5].detach()


def _of_the_input(model: Rotary, positions: Tensor, h: Tensor) -> Tensor:
    return h.detach().mean(0)


def _drawn(model: Rotary, positions: Tensor, h: Tensor) -> Tensor:
    return torch.rand(len(positions), 8)


@pytest.mark.parametrize("made", [_of_a_parameter, _of_the_input, _drawn])
def test_tables_of_what_changes_are_refused(made: Callable[[Rotary, Tensor, Tensor], Tensor]) -> None:
    line = _first_line_of(Rotary.forward, "self.table = ")
    with pytest.raises(
        gp.GraphparError, match=rf"'table' of Rotary in the forward.*different \(test_between_steps.py:{line}\)"
    ):
        gp.export(lambda: Rotary(made), (torch.randn(4, 5, 8),))


def test_a_table_that_is_another_in_the_second_step_is_refused() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            table = torch.linspace(1, 2, 8).cos()
            self.table = table * 2 if self.table is None else self.table
            return (self.linear(x) * (table if self.table is None else self.table * table)).square().mean()

    class Swapping(Doubling):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.linspace(1, 2, 8).cos() if self.table is None else self.table
            self.table = table * 2
            return (self.linear(x) * table).square().mean()

    gp.export(Doubling, (torch.randn(4, 8),))
    with pytest.raises(
        gp.GraphparError, match=r"'table' of .*Swapping in the forward, and then computes something different"
    ):
        gp.export(Swapping, (torch.randn(4, 8),))


def _first_line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return next(first + place for place, line in enumerate(lines) if text in line)
