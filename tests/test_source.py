"""Names and lines come from the user's code, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import graphpar as gp
from graphpar.modelfile import load_model_file
from tests.programs import EXAMPLES


def _emitted(path: Path) -> dict[str, str]:
    file = load_model_file(path)
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets)
    return gp.partition(program, gp.plan(program, mesh={"pp": 2})).files


@pytest.mark.parametrize("folder", ["graphpar", "torch"])
def test_the_text_does_not_depend_on_the_folder_of_the_model(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    copy = Path(shutil.copy(EXAMPLES / "gpt.py", tmp_path / folder / "gpt.py"))
    assert _emitted(copy) == _emitted(EXAMPLES / "gpt.py")
