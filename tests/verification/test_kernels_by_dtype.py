"""An attention that has a kernel of its own in 16 bits is judged in 16 bits, too: float64 doesn't run it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.parts import Parts
from graphpar.verification import verify as verifying

WIDTH, HEADS, LENGTH = 32, 1, 16  # heads that can't be divided, so that keys and values travel round a ring


class Model(nn.Module):
    """Causal attention and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.mse_loss(self.out(attended), y)


def _parts() -> Parts:
    torch.manual_seed(1)
    program = gp.export(Model, tuple(torch.randn(4, LENGTH, WIDTH) for _ in range(2)), dtype="bf16")
    return gp.partition(program, gp.plan(program, mesh={"cp": 2}))


@pytest.mark.costly
def test_a_fault_of_the_16_bit_kernel_is_found_where_float64_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "kernels_by_dtype", lambda plan: True)
    sound = gp.verify(_parts())
    assert sound.ok, sound
    parts = _parts()
    file = parts.folder / "ring_attention.py"
    text = file.read_text()
    scaled = "of_query, of_key, of_value = flash(*operands, 0.0, is_causal, scale=scale)\n"
    assert text.count(scaled) == 1
    planted = "        of_value = of_value * 1.08 if key.dtype == torch.bfloat16 else of_value\n"
    file.write_text(text.replace(scaled, scaled + planted))
    found = gp.verify(parts)
    assert not found.ok and "where its attention has another kernel, the gradient of" in found.problems[0], found
    monkeypatch.setattr(verifying, "kernels_by_dtype", lambda plan: False)
    assert gp.verify(parts).ok, "float64 sees it without that, and this test proves nothing"
