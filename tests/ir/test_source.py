"""Names and lines come from the user's code, wherever it lies."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.frontend.modelfile import load_model_file
from tests.tools.programs import EXAMPLES


def _emitted(path: Path) -> dict[str, str]:
    file = load_model_file(path)
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets)
    return gp.partition(program, gp.plan(program, mesh={"pp": 2})).files


@pytest.mark.costly
@pytest.mark.parametrize("folder", ["graphpar", "torch"])
def test_the_text_does_not_depend_on_the_folder_of_the_model(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    copy = Path(shutil.copy(EXAMPLES / "gpt.py", tmp_path / folder / "gpt.py"))
    assert _emitted(copy) == _emitted(EXAMPLES / "gpt.py")


class _Tables(nn.Module):
    """A rotary table as people write it: both parts in one statement, cast as they are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        cos, sin = (angle * 2).cos(), (angle * 2).sin()
        return cos.to(x.dtype), sin.to(x.dtype)


class _Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = _Tables()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        position_embeddings = self.tables(x)
        cosine, sine = position_embeddings
        for layer in self.layers:
            x = layer(x)
            x = x * cosine + x.flip(-1) * sine
        return x


@pytest.mark.costly
def test_a_name_stands_for_what_it_says() -> None:
    program = gp.export(_Rotated(), (torch.randn(4, 3, 4),), loss_fn=lambda out: out.square().mean())
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}, schedule="GPipe"))
    table = parts.files["blocks.py"]

    assert re.search(r"\bcos = .*\.cos\(\)", table) and re.search(r"\bsin = .*\.sin\(\)", table), table
    assert not re.search(r"\bcos\w* = .*\.sin\(\)|\bsin\w* = .*\.cos\(\)", table), table
    assert re.search(r"return cos\b.*, sin\b", table), table
    assert "position_embeddings" not in table, "the name of both is that of neither"


@pytest.mark.costly
def test_a_range_inside_of_a_call_does_not_have_the_name_of_the_result() -> None:
    text = "\n".join(_emitted(EXAMPLES / "bert.py").values())

    assert not re.search(r"^ *\w*(mask|outputs|bert|model)\w* = torch\.arange", text, re.MULTILINE)
