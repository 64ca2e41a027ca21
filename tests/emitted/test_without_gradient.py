"""Where no gradient is asked for, emitted functions take shorter ways, to the same bits."""

from __future__ import annotations

import pytest
import torch

from graphpar.emitted import collectives
from graphpar.emitted.gated import geglu, swiglu
from graphpar.emitted.rotary import apply_rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 8])  # a number for each feature, or for each pair
def test_rotary_embeddings(width: int, interleaved: bool) -> None:
    x, cos, sin = (torch.randn(2, 3, 5, size) for size in (16, width, width))
    before = x.clone()
    with torch.no_grad():
        made = apply_rotary(x, cos, sin, interleaved)

    assert torch.equal(made, apply_rotary(x.clone().requires_grad_(), cos, sin, interleaved))
    assert torch.equal(x, before)


@pytest.mark.parametrize("gate", [swiglu, geglu])
def test_gates(gate: object) -> None:
    assert callable(gate)
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    with torch.no_grad():
        made = gate(x, y)

    assert torch.equal(made, gate(x.clone().requires_grad_(), y))


def test_an_all_reduce_leaves_its_operand_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> None: ...

    class Group:
        def allreduce(self, tensors: list[torch.Tensor]) -> Work:
            tensors[0].mul_(2)  # of two ranks that hold the same
            return Work()

    monkeypatch.setattr(collectives, "_axes", {"tp": ("tp", 2, 0)})
    monkeypatch.setattr(collectives, "_groups", {"tp": Group()})
    for x in (torch.randn(3, 4), torch.randn(4, 3).t()):
        before = x.clone()
        with torch.no_grad():
            total = collectives.all_reduce(x, "tp")
        assert torch.equal(x, before) and torch.equal(total, 2 * before)
