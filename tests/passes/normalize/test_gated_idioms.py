"""Activated gates times values: where they become one function, what it computes to the bit, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from graphpar.emitted.gated import geglu, swiglu
from tests.tools.idiom_checks import Model, check_idioms

Function = Callable[[Tensor, Tensor], Tensor]

GATED: dict[str, Function] = {
    "SwiGLU": lambda gate, up: F.silu(gate) * up,
    "the other way": lambda gate, up: up * F.silu(gate),
    "in place": lambda gate, up: F.silu(gate).mul_(up),
    "GEGLU": lambda gate, up: F.gelu(gate) * up,
    "GEGLU by tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "a gate of itself": lambda gate, up: F.silu(gate) * gate + 0 * up,
    "parts of one value": lambda gate, up: (h := torch.cat([gate, up], -1).chunk(2, -1)) and F.silu(h[0]) * h[1],
    "without a gradient of the gate": lambda gate, up: F.silu(gate.detach()) * up,
    "without a gradient of what it scales": lambda gate, up: F.silu(gate) * up.detach(),
}
NOT_GATED: dict[str, Function] = {
    "used elsewhere": lambda gate, up: (h := F.silu(gate)) * up + h,
    "broadcast": lambda gate, up: F.silu(gate) * up[..., :1],
    "a broadcast gate": lambda gate, up: F.silu(gate[..., :1]) * up,
    "times a number": lambda gate, up: F.silu(gate) * 2 + up,
    "squared": lambda gate, up: (h := F.silu(gate)) * h + up,
    "another dtype": lambda gate, up: F.silu(gate) * up.double(),
    "sigmoid": lambda gate, up: torch.sigmoid(gate) * up,
}


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", [*GATED, *NOT_GATED])
def test_gates(name: str) -> None:
    function = (GATED | NOT_GATED)[name]

    def model(x: Tensor, m: Model) -> Tensor:
        return function(m.weight * x, m.weight + x).to(x.dtype).sin()

    called = "geglu" if "GEGLU" in name else "swiglu"
    check_idioms(model, {called: 1} if name in GATED else {})


def test_a_gate_that_is_spelled_out() -> None:
    check_idioms(lambda x, m: (g := m.weight * x) * torch.sigmoid(g) * (m.weight + x), {"activation": 1, "swiglu": 1})


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "swiglu": (swiglu, GATED["SwiGLU"]),
    "geglu": (geglu, GATED["GEGLU"]),
    "geglu, tanh": (partial(geglu, approximate="tanh"), GATED["GEGLU by tanh"]),
}


def _saved_by(function: Function, gate: Tensor, up: Tensor) -> tuple[Tensor, list[Tensor]]:
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        return function(gate, up), saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_the_bit(name: str, dtype: torch.dtype) -> None:
    function, plain = FUNCTIONS[name]
    gate, up = (torch.randn(3, 33, dtype=dtype).mul(4).requires_grad_() for _ in range(2))
    gradient = torch.randn(3, 33, dtype=dtype)
    found, saved = _saved_by(function, gate, up)
    expected, more = _saved_by(plain, gate, up)

    assert torch.equal(found, expected)
    assert {each.data_ptr() for each in saved} == {gate.data_ptr(), up.data_ptr()} and len(more) == 3
    for ours, theirs in zip(*(torch.autograd.grad(each, (gate, up), gradient) for each in (found, expected))):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("with_gradient", [(True, False), (False, True)], ids=["gate", "up"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_gradient(name: str, with_gradient: tuple[bool, bool]) -> None:
    function, plain = FUNCTIONS[name]
    operands: Any = [torch.randn(5).requires_grad_(wanted) for wanted in with_gradient]
    wanted = [each for each in operands if each.requires_grad]

    (ours,), (theirs,) = (torch.autograd.grad(each(*operands).sum(), wanted) for each in (function, plain))

    assert torch.equal(ours, theirs)


@pytest.mark.costly
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_as_one_graph(name: str) -> None:
    function, plain = FUNCTIONS[name]
    gate, up = (torch.randn(3, 8).requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda a, b: function(a, b), fullgraph=True, backend="aot_eager")

    ours, theirs = (torch.autograd.grad(each(gate, up).sin().sum(), (gate, up)) for each in (compiled, plain))

    assert all(map(torch.equal, ours, theirs))
