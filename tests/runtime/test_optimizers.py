"""The model file's optimizer sees on every rank what it sees on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.optimizers import Described, build_optimizer, made_by

Named = Sequence[tuple[str, nn.Parameter]]
SHAPES = {"emb.weight": (10, 4), "layers.0.weight": (4, 4), "layers.0.bias": (4,), "layers.1.scale": ()}
MODEL = {name: Described(torch.Size(shape), torch.float32, name != "layers.1.scale") for name, shape in SHAPES.items()}


def by_everything(named: Named) -> torch.optim.Optimizer:
    """Groups by names, by shapes and by what is trained, and counts."""
    named = list(named)
    assert [name for name, _ in named] == list(SHAPES)
    assert {name: tuple(p.shape) for name, p in named} == SHAPES
    assert sum(p.numel() for _, p in named) == 61 and all(p.dim() == len(p.shape) == p.ndim for _, p in named)
    assert all(p.size() == p.shape and p.size(0) == len(p) for _, p in named if p.ndim)
    assert [name for name, p in named if not p.requires_grad] == ["layers.1.scale"]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if p.ndim > 1 and p.requires_grad], "weight_decay": 0.1},
        {
            "params": [p for n, p in named if p.ndim == 1],
            "weight_decay": 0.0,
            "lr": 1 / sum(p.numel() for _, p in named),
        },
    ]
    return torch.optim.Adagrad(groups, lr=0.5, initial_accumulator_value=0.25)


def test_pieces_are_grouped_as_the_parameters_that_they_are_of() -> None:
    own = {name: [nn.Parameter(torch.ones(3))] for name in ("emb.weight", "layers.0.bias")}
    made = build_optimizer(by_everything, own, MODEL)
    (emb,), (bias,) = own.values()
    assert [[*map(id, group["params"])] for group in made.param_groups] == [[id(emb)], [id(bias)]]
    assert made.param_groups[1]["lr"] == 1 / 61 and made.param_groups[0]["weight_decay"] == 0.1
    assert type(emb) is nn.Parameter and emb.shape == (3,)
    assert set(made.state) == {emb, bias} and made.state[emb]["sum"].equal(torch.full((3,), 0.25))
    emb.grad = torch.ones(3)
    made.step()
    assert not emb.detach().equal(torch.ones(3)) and bias.detach().equal(torch.ones(3))


def test_all_copies_are_stepped_and_none_on_other_ranks() -> None:
    copies = [nn.Parameter(torch.ones(10, 4)) for _ in range(2)]
    for make in (by_everything, None, lambda named: torch.optim.AdamW(named)):
        made = build_optimizer(make, {"emb.weight": copies}, MODEL, 0.25)
        for copy in copies:
            copy.grad = torch.ones(10, 4)
        made.step()
        assert copies[0].equal(copies[1])
        assert [group["lr"] for group in made.param_groups] == [0.25] * len(made.param_groups)
    assert made.param_groups[0]["param_names"] == ["emb.weight"] * 2
    nothing = build_optimizer(by_everything, {}, MODEL)
    nothing.step()
    assert len(nothing.param_groups) == 2 and not nothing.state


def test_parameters_of_a_model_are_refused() -> None:
    foreign = nn.Parameter(torch.zeros(7))
    with pytest.raises(RuntimeProgramError, match=r"shape \[7\] that it did not receive"):
        build_optimizer(lambda _: torch.optim.AdamW([foreign]), {}, MODEL)
    with pytest.raises(RuntimeProgramError, match="failed on pairs of names and parameters: KeyError: 'x'"):
        build_optimizer(lambda named: dict(named)["x"], {}, MODEL)


def test_what_lightning_returns_is_an_optimizer_where_there_is_one() -> None:
    pairs = [("a", nn.Parameter(torch.zeros(2)))]

    def made(wrap: Any) -> Any:
        return made_by(lambda named: wrap(torch.optim.SGD(named.parameters(), lr=0.1)), pairs)

    for wrap in (lambda o: o, lambda o: [o], lambda o: (o,), lambda o: {"optimizer": o}, lambda o: ([o], [])):
        assert made(wrap).param_groups[0]["params"] == [pairs[0][1]]
    for wrap in (lambda o: ([o], [1]), lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": 1}}):
        with pytest.raises(RuntimeProgramError, match=r"scheduler, too; .* in a function lr_schedule\(optimizer\)"):
            made(wrap)
    for wrap, kind in ((lambda o: [o, o], "list"), (lambda o: None, "NoneType")):
        with pytest.raises(RuntimeProgramError, match=f"returned a {kind}, not a torch.optim.Optimizer"):
            made(wrap)
