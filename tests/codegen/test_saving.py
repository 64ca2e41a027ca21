"""Emitted folders on disk: made as a whole, and what people changed or added is refused by name or kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpar.codegen import saving
from graphpar.codegen.saving import RECORD, check_target, edited_files, record, save_package
from graphpar.errors import GraphparError
from graphpar.runtime.option_kinds import COMPILED

FIRST = {"plan.json": "{1}", "train.py": "one", "stage_0.py": "s0", "weights/model.safetensors": "w1"}
SECOND = {"plan.json": "{2}", "train.py": "two"}


def package(files: dict[str, str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)

    return write


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    save_package(tmp_path / "out", package(FIRST))
    return tmp_path / "out"


def test_what_graphpar_wrote_is_replaced_as_a_whole(out: Path) -> None:
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "train.pyc").write_text("made by Python")
    (out / COMPILED / "fxgraph").mkdir(parents=True)
    (out / COMPILED / "fxgraph" / "kernel").write_text("made by torch.compile")
    (out / "batch.safetensors").write_text("made by graphpar run")
    record(out, ["batch.safetensors"])
    assert not edited_files(out)
    save_package(out, package(SECOND))
    assert contents(out) == SECOND
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_same_files_make_the_same_record(out: Path, tmp_path: Path) -> None:
    save_package(tmp_path / "again", package(dict(reversed(FIRST.items()))))
    assert (tmp_path / "again" / RECORD).read_bytes() == (out / RECORD).read_bytes()


def test_files_of_people_are_refused_by_name(out: Path) -> None:
    (out / "train.py").write_text("mine")
    (out / "plan.json").write_text("{edited}")
    (out / "my_data.py").write_text("data")
    (out / "ckpt" / "100").mkdir(parents=True)
    (out / "ckpt" / "100" / "model.pt").write_text("state")
    (out / "weights" / "trained.safetensors").write_text("trained")
    (out / "linked").symlink_to(out / "nowhere")
    before = contents(out)
    for attempt in (lambda: check_target(out), lambda: save_package(out, package(SECOND))):
        with pytest.raises(GraphparError) as refused:
            attempt()
        assert "changed plan.json, train.py; added ckpt/, linked, my_data.py, weights/trained.safetensors" in str(
            refused.value
        )
        assert "--force" in str(refused.value) and "force=True" in str(refused.value)
    assert contents(out) == before


def test_force_keeps_what_was_changed_and_added(out: Path) -> None:
    (out / "train.py").write_text("mine")
    (out / "stage_0.py").write_text("my stage")
    (out / "ckpt").mkdir()
    (out / "ckpt" / "model.pt").write_text("state")
    (out / "weights" / "model.safetensors").write_text("trained")
    (out / "linked").symlink_to("train.py")
    save_package(out, package(SECOND), force=True)
    kept = {
        "train.py.orig": "mine",
        "stage_0.py.orig": "my stage",
        "weights/model.safetensors.orig": "trained",
        "ckpt/model.pt": "state",
    }
    assert contents(out) == SECOND | kept | {"linked": "two"} and os.readlink(out / "linked") == "train.py"

    (out / "train.py").write_text("mine again")
    save_package(out, package(SECOND), force=True)
    assert contents(out) == SECOND | kept | {"train.py.orig.2": "mine again", "linked": "two"}


def test_an_added_file_that_is_written_now_is_kept_beside_it(out: Path) -> None:
    (out / "blocks.py").write_text("mine")
    save_package(out, package(SECOND | {"blocks.py": "emitted"}), force=True)
    assert contents(out) == SECOND | {"blocks.py": "emitted", "blocks.py.orig": "mine"}


def test_a_folder_without_a_record_may_hold_anything(out: Path) -> None:
    (out / RECORD).unlink()
    record(out, ["train.py"])  # by graphpar run: of the others nothing is known
    with pytest.raises(GraphparError, match=rf"has no {RECORD}.*plan\.json, stage_0\.py"):
        save_package(out, package(SECOND))
    save_package(out, package(SECOND), force=True)
    assert contents(out)["train.py.orig"] == "one"


@pytest.mark.parametrize("fails", ["write", "swap"])
def test_what_fails_leaves_everything_as_it_was(out: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "train.py").write_text("mine")
    (out / "my_data.py").write_text("data")
    before = contents(out)

    def write(folder: Path) -> None:
        package(SECOND)(folder)
        if fails == "write":
            raise KeyboardInterrupt

    move, calls = saving._move, []

    def fail_at_the_end(source: Path, target: Path, moved: list[tuple[Path, Path]]) -> None:
        calls.append(target)
        if target == out:
            raise OSError(28, "No space left on device")
        move(source, target, moved)

    if fails == "swap":
        monkeypatch.setattr(saving, "_move", fail_at_the_end)
    with pytest.raises(KeyboardInterrupt if fails == "write" else GraphparError):
        save_package(out, write, force=True)
    assert contents(out) == before and edited_files(out).changed == ("train.py",)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert len(calls) == (4 if fails == "swap" else 0)


def test_through_a_link_the_folder_behind_it_is_replaced(out: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(out)
    save_package(tmp_path / "latest", package(SECOND))
    assert (tmp_path / "latest").is_symlink() and contents(out) == SECOND


def test_folders_that_are_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    for target, why in {
        "file": "is a file",
        "file/out": "can't be written: Not a directory",
        "kept": "holds something other",
        ".": "is the folder that this runs in",
        "..": "is the folder that this runs in",
        "/proc/x/y": "can't be written",
    }.items():
        with pytest.raises(GraphparError, match=why):
            check_target(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kept"]
