"""Values on an emitted script's command line are refused in one sentence, before the time of training is spent."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpar.runtime.checkpoints.folders import find
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.launching.arguments import (
    checkpoint_folder,
    count,
    input_file,
    number,
    output_file,
    parsed,
    positive,
    replaced_file,
    train_arguments,
    whole,
)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (whole, ["-3", "1.5", "99999999999999999999", "x", ""]),
        (number, ["-1", "nan", "inf", "x"]),
        (positive, ["0", "-1", "nan", "inf"]),
        (input_file, ["missing"]),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--keep 3", "--keep needs --checkpoint"),
        ("--batch b --workers 2", "--workers would have no effect with --batch"),
        ("--check --checkpoint ck --batch b", "--batch, --checkpoint would have no effect with --check"),
        ("--checkpoint ck --keep 3 --batch b", None),
    ],
)
def test_no_option_is_ignored(
    given: str, message: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", type=count, default=2)
    parser.add_argument("--workers", type=whole, default=0)
    for name in ("--batch", "--checkpoint"):
        parser.add_argument(name)
    monkeypatch.setattr("sys.argv", ["train.py", *given.split()])
    if message is None:
        assert parsed(parser).keep == 3
        return
    with pytest.raises(SystemExit) as ended:
        parsed(parser)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_wrong_option_is_one_line_of_all_ranks(
    local_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr("sys.argv", ["out/train.py", "--stepz", "3"])
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("GRAPHPAR_LAUNCHED", raising=False)
    with pytest.raises(SystemExit) as ended:
        train_arguments("Train.")

    said = "there is no option --stepz. Did you mean '--steps'? (train.py --help lists the options)"
    assert ended.value.code == 2 and json.loads((tmp_path / "error.json").read_text())["message"]["message"] == said
    assert capsys.readouterr().err == ("" if local_rank else f"error: {said}\n")
    assert bool(slept) == bool(local_rank)  # the first rank comes before torchrun ends all


def test_a_latest_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("200")
    with pytest.raises(RuntimeProgramError, match="latest names 200, which is not there"):
        find(tmp_path)
