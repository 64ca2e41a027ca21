"""Which branches on values a trace takes, which it marks, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.program import is_flag

X = torch.linspace(0.1, 1, 32).reshape(4, 8)


class Around(nn.Module):
    def __init__(self, layer: Callable[[Around, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.layer = nn.Linear(8, 8), layer
        self.register_buffer("limit", torch.tensor(0.5))
        self.register_buffer("grid", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, self.linear(x))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def traced(layer: Callable[[Around, Tensor], Tensor], dtype: str | None = None) -> gp.Program:
    return gp.export(lambda: Around(layer), (X,), loss_fn=square, dtype=dtype)


def _raising(_: Around, h: Tensor) -> Tensor:
    for _ in range(2):
        h = h * 0.5
        if h.isnan().any():
            raise FloatingPointError
    return h


def _compared(_: Around, h: Tensor) -> Tensor:
    return h * 2 if h.detach().abs().max().item() < 100 else h


def _written(_: Around, h: Tensor) -> Tensor:
    count = torch.zeros(())
    count.add_(1)
    count.mul_(h.detach().abs().max())
    return h if (count > 1000).logical_not() else h * 2


TAKEN: dict[Callable[[Around, Tensor], Tensor], list[tuple[str, bool]]] = {
    lambda m, h: h * 2 if h.abs().sum() > 0 else h: [("h.abs().sum() > 0", True)],
    lambda m, h: h * 2 if not (h > 100).any() else h: [("(h > 100).any()", False)],
    lambda m, h: h * 2 if m.limit > 0.4 else h: [("m.limit > 0.4", True)],
    lambda m, h: h * 2 if torch.equal(h, h * 1) else h: [("torch.equal(h, h * 1)", True)],
    lambda m, h: h * 2 if torch.allclose(h, h + 1) else h: [("torch.allclose(h, h + 1)", False)],
    lambda m, h: h * 2 if h.sum(0).argmax() in torch.arange(8) else h: [("h.sum(0).argmax() in torch.arange(8)", True)],
    _raising: [("h.isnan().any()", False)] * 2,
    _compared: [("h.detach().abs().max().item() < 100", True)],
    _written: [("(count > 1000).logical_not()", True)],
}


@pytest.mark.parametrize("layer", TAKEN)
def test_the_branch_of_the_example_is_taken(layer: Callable[[Around, Tensor], Tensor]) -> None:
    program = traced(layer)

    for each in (program, traced(layer, "bf16")):
        assert [(branch.condition, branch.taken) for branch in each.branches.values()] == TAKEN[layer]
    assert all(branch.line.startswith("test_branches.py:") for branch in program.branches.values())
    model = Around(layer)
    state = dict(model.state_dict()) | program.constants
    (loss,) = program.run(state, {program.inputs[0].name: X, **dict.fromkeys(program.count_names, torch.tensor(4))})
    torch.testing.assert_close(loss, square(model(X)))
    assert not any(state[name] for name in program.branches)


def _asserted(_: Around, h: Tensor) -> Tensor:
    torch._assert(h.abs().max() < 1e4, "too large")
    return h


@pytest.mark.parametrize("layer", [next(iter(TAKEN)), _raising, _compared, _asserted])
def test_a_flag_tells_that_it_would_be_another(layer: Callable[[Around, Tensor], Tensor]) -> None:
    program = traced(layer)
    state = dict(Around(layer).state_dict()) | program.constants
    state["linear.weight"], state["linear.bias"] = torch.eye(8), torch.zeros(8)
    other = {_raising: X * torch.nan, _compared: X * 1000, _asserted: X * 1e6}.get(layer, X * 0)

    program.run(state, {program.inputs[0].name: other, **dict.fromkeys(program.count_names, torch.tensor(4))})

    assert all(state[name] for name in program.branches)


def test_what_no_step_changes_is_no_condition() -> None:
    def solver(model: Around, h: Tensor) -> Tensor:
        times, place = torch.linspace(0, 1, 5), 0
        while place < 4 and times[place] < 0.7:
            h, place = h * 0.9, place + 1
        return h

    program = traced(solver)
    assert not program.branches and not program.warnings
    assert sum(0.9 in node.args for node in program.graph.nodes) == 3


COUPLED: dict[Callable[[Around, Tensor], Tensor], bool] = {
    lambda m, h: h * 2 if (h > 100).any() else h: False,
    lambda m, h: h * 2 if not (h > -100).all() else h: False,
    lambda m, h: h * 2 if h.amax() > 100 else h: False,
    lambda m, h: h * 2 if m.limit > 0.4 else h: False,
    lambda m, h: h * 2 if (h == h[0]).all() else h: True,
    lambda m, h: h * 2 if h.sum() > 100 else h: True,
}


@pytest.mark.parametrize("layer", COUPLED)
def test_parts_of_a_batch_answer_for_it_or_it_is_computed_whole(layer: Callable[[Around, Tensor], Tensor]) -> None:
    program = traced(layer)

    assert bool(program.couplings) == COUPLED[layer]
    if program.couplings:
        with pytest.raises(gp.GraphparError, match=r"test_branches\.py"):
            gp.plan(program, microbatch_size=1)


def _until_small(_: Around, h: Tensor) -> Tensor:
    while h.abs().max() > 0.1:
        h = h * 0.5
    return h


def _breaks(_: Around, h: Tensor) -> Tensor:
    for _ in range(10):
        h = h * 0.5
        if (h.abs() < 0.1).all():
            break
    return h


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (_until_small, r"how often a loop runs depends on h.abs\(\).max\(\) > 0.1 \(test_branches.py:\d+\)"),
        (_breaks, r"a branch in a loop depends on \(h.abs\(\) < 0.1\).all\(\) \(test_branches.py:\d+\)"),
        (lambda m, h: h * float(h.detach().sum()), r"depends on values of tensors.*test_branches.py:\d+"),
        (lambda m, h: h[: int(h.detach().sum())], r"depends on values of tensors.*test_branches.py:\d+"),
    ],
)
def test_loops_and_numbers_are_refused(layer: Callable[[Around, Tensor], Tensor], what: str) -> None:
    with pytest.raises(gp.GraphparError, match=what):
        traced(layer)


def _printed(_: Around, h: Tensor) -> Tensor:
    print(f"largest: {h.max().item()}")
    return h


def _by_text(_: Around, h: Tensor) -> Tensor:
    return h * 2 if f"{(h > 0).sum().item()}" == "13" else h


def test_a_text_of_a_number_decides_nothing() -> None:
    """It is that of any number; a model may print it."""
    assert not traced(_printed).couplings

    with pytest.raises(
        gp.GraphparError, match=r"makes a text of a number that depends on values, .*\(test_branches.py"
    ):
        traced(_by_text)


def test_examples_without_values_decide_nothing() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if (x > 0).any() else x

    with pytest.raises(
        gp.GraphparError, match=r"can't be computed: the example inputs have no values. Give example inputs"
    ):
        gp.export(Masked, (X.to("meta"),), loss_fn=square)


def _rows_or(otherwise: Callable[[Tensor], Tensor]) -> Callable[[Around, Tensor], Tensor]:
    def layer(m: Around, h: Tensor) -> Tensor:
        rows = torch.where(h[:, 0] > 0)[0]
        if rows.numel() > 0:  # noqa: SIM108
            h = h.index_add(0, rows, m.grid[0] * h[rows])
        else:
            h = otherwise(h)
        return h.tanh()

    return layer


def test_what_happens_without_chosen_rows_is_not_left_out() -> None:
    with pytest.raises(gp.GraphparError, match=r"something else where a mask chooses no rows, `if rows.numel\(\) > 0:"):
        traced(_rows_or(lambda h: h + 1))


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_a_branch_that_is_drawn_is_refused_unless_it_is_always_the_same(share: float) -> None:
    def layer(_: Around, h: Tensor) -> Tensor:
        return h if torch.rand(()) < share else h * 2

    if 0 < share < 1:
        with pytest.raises(
            gp.GraphparError, match=r"draws random numbers to choose a branch, torch.rand\(\(\)\) < share"
        ):
            traced(layer)
    else:
        assert [branch.taken for branch in traced(layer).branches.values()] == [share == 1]


def _in_no_grad(m: Around, h: Tensor) -> Tensor:
    with torch.no_grad():
        large = bool((h > 100).any())
    return h * 2 if large else h


def _in_autocast(m: Around, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        k = m.linear(h)
        if (k > 100).any():
            k = k * 2
    return h * k


@torch.no_grad()
def _scale(h: Tensor) -> float:
    return 2.0 if (h > 100).any() else 1.0


def _counted(m: Around, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.limit += 1
        factor = 2.0 if m.limit > 100 else 1.0
    return h * factor


@pytest.mark.parametrize("layer", [_in_no_grad, _in_autocast, lambda m, h: h * _scale(h), _counted])
def test_a_branch_in_a_region_is_checked(layer: Callable[[Around, Tensor], Tensor]) -> None:
    program = traced(layer)
    assert [branch.taken for branch in program.branches.values()] == [False]
    assert sum(is_flag(node) for node in program.graph.nodes) == 1


def test_a_condition_of_whole_numbers() -> None:
    program = traced(lambda m, h: h if h.detach().abs().sum().long().item() % 3 == 1 else h * 2)
    assert len(program.branches) == 1
