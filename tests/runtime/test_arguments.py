"""Values on an emitted script's command line are refused in one sentence, before the time of training is spent."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpar.runtime.arguments import checkpoint_folder, number, output_file, positive, replaced_file, whole


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (whole, ["-3", "1.5", "99999999999999999999", "x", ""]),
        (number, ["-1", "nan", "inf", "x"]),
        (positive, ["0", "-1", "nan", "inf"]),
        (output_file, ["missing/a.json", "."]),
        (replaced_file, ["missing/a.safetensors", "/dev/null"]),
        (checkpoint_folder, ["file", "file/ck", "ck/100"]),
    ],
)
def test_wrong_values_are_refused(
    read: Callable[[str], object], texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "ck" / "100").mkdir(parents=True)
    (tmp_path / "ck" / "100" / "checkpoint.json").touch()
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_right_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (whole("0"), number("0"), positive("1e-3")) == (0, 0.0, 1e-3)
    assert output_file("/dev/null") == Path("/dev/null")
    assert replaced_file("a.safetensors") == Path("a.safetensors")
    assert checkpoint_folder("new/ck") == Path("new/ck") and not Path("new").exists()
