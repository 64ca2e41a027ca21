"""Folders that several runs and models save into, and checkpoints that somebody has changed: nothing mixes, nothing wrong is loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graphpar.cli.main import main
from graphpar.runtime import RuntimeProgramError
from graphpar.runtime.checkpoints import conversion
from graphpar.runtime.checkpoints import folders as checkpoint_folders
from graphpar.runtime.checkpoints.folders import Part, begin, find, read_record, whole_checkpoints
from tests.tools.whole_values import whole_values

FILE = "w.safetensors"


def converted(out: Path, value: float = 1.0, width: int = 4) -> Path:
    """A checkpoint whose weights are all ``value``."""
    weights = {"layer.weight": torch.full((width, 3), value), "layer.bias": torch.full((width,), value)}
    save_file(weights, out.parent.parent / FILE)
    conversion.convert(out.parent.parent / FILE, out, None)
    return out


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return converted(tmp_path / "ckpt" / "1")


def again(saved: Path, name: str) -> Part:
    """Write all but the record of ``saved`` under another name, up to where it would become whole."""
    part = begin(saved.parent / name, read_record(saved)["model"])
    for file in saved.iterdir():
        if file.name != "checkpoint.json":
            shutil.copy(file, part.folder)
    return part


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("name", [".", "..", "../..", "/"])
def test_a_folder_without_a_name_of_its_own_holds_no_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(RuntimeProgramError, match="is neither a checkpoint nor a folder of checkpoints"):
        find(name)


def test_the_current_folder_is_a_folder_of_checkpoints(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert find(".") == Path("1")


# ---- who writes ------------------------------------------------------------------------------------------------------


def test_one_of_two_that_save_one_name_at_once_is_kept_whole(saved: Path) -> None:
    record = read_record(saved)
    first, second = again(saved, "2"), again(saved, "2")
    assert first.folder != second.folder and first.folder.is_dir()
    first.finish({**record, "step": 7}, None, None)

    with pytest.raises(RuntimeProgramError, match=rf"2 was saved by process {os.getpid()} on .* separate folders"):
        second.finish({**record, "step": 8}, None, None)
    second.drop()

    assert read_record(saved.parent / "2")["step"] == 7 and not hidden(saved.parent)
    again(saved, "2").finish({**record, "step": 9}, None, None)  # one after the other: as after a restart
    assert read_record(saved.parent / "2")["step"] == 9


_WRITES = """
import os, signal, sys
from pathlib import Path
from graphpar.runtime.checkpoints import folders
part = folders.begin(Path(sys.argv[1]) / "9", None)
(part.folder / "__0_0.distcp").write_bytes(b"half")
held = folders._locked(Path(sys.argv[1]))
held.__enter__()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.costly
def test_locks_and_parts_of_processes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folders, "HELD_S", 0.3)
    folder, record = saved.parent, read_record(saved)
    command = [sys.executable, "-c", _WRITES, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        part = again(saved, "2")
        with pytest.raises(RuntimeProgramError, match=f"is held by process {process.pid} on "):
            part.finish(record, None, None)
        assert any(name.startswith(".9.") for name in hidden(folder))  # it goes on
        os.kill(process.pid, signal.SIGKILL)
    again(saved, "3").finish(record, None, None)
    assert hidden(folder) == [part.folder.name]  # this process has not given it up
    part.drop()

    lock = folder / checkpoint_folders.LOCK
    for content in (b"", b"{", json.dumps({"owner": "00000000-1-2-3", "host": "elsewhere", "pid": 1}).encode()):
        lock.write_bytes(content)
        again(saved, "4").finish(record, None, None)
        assert not hidden(folder)


def test_what_another_machine_has_left_is_removed_when_nothing_of_it_changes(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = saved.parent / ".8.00000000-1-2-3.part"
    left.mkdir()
    converted(saved.parent / "2")
    assert left.is_dir()
    monkeypatch.setattr(checkpoint_folders, "IDLE_S", -1.0)
    converted(saved.parent / "3")
    assert not hidden(saved.parent)


def test_models_that_share_a_folder(saved: Path) -> None:
    folder, wide = saved.parent, converted(saved.parent / "wide-1", width=5)
    with pytest.raises(RuntimeProgramError, match="is a checkpoint of another model, which is kept"):
        converted(wide)
    for step in (2, 3):
        again(saved, str(step)).finish({**read_record(saved), "time": float(step) * 2e9}, None, 2)

    assert [each.name for each in whole_checkpoints(folder)] == ["wide-1", "2", "3"]  # two of each model are kept
    assert find(folder).name == "3"
    assert find(folder, lambda each: read_record(each)["model"] == read_record(wide)["model"]) == wide


def test_the_best_stays_and_can_be_named(saved: Path) -> None:
    folder, record = saved.parent, read_record(saved)
    for step, best in ((2, False), (3, True), (4, False), (5, False)):
        again(saved, str(step)).finish({**record, "time": float(step) * 2e9}, None, 1, best)
        saved = folder / str(step)
    assert sorted(each.name for each in folder.iterdir()) == ["3", "5", "best", "latest"]
    assert (find(folder).name, find(folder / "best").name, find(folder / "latest").name) == ("5", "3", "5")
    assert [each["best"] for each in conversion.inspected(folder)] == [True, False]
    again(saved, "6").finish({**record, "time": 2e10}, None, 1, True)
    assert sorted(each.name for each in folder.iterdir()) == ["6", "best", "latest"]
    (folder / "best").write_text("../outside")
    with pytest.raises(RuntimeProgramError, match="best must name a folder next to it"):
        find(folder / "best")
    (folder / "best").write_text("9")
    with pytest.raises(RuntimeProgramError, match=r"best names 9, which is not there; there are 6"):
        find(folder / "best")


# ---- what somebody has changed ---------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_is_found_or_changes_nothing(saved: Path, tmp_path: Path) -> None:
    values, record, found = whole_values(saved), read_record(saved), dict[str, int]()
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        for seed in range(40):
            draw = random.Random(seed)
            place = draw.randrange(len(content))
            changed = bytearray(content)
            changed[place] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
            try:
                torch.testing.assert_close(whole_values(saved), values, rtol=0, atol=0)
                assert read_record(saved) == record
            except RuntimeProgramError as error:
                assert "is damaged" in str(error) or "has the format" in str(error), error
                found[file.name] = found.get(file.name, 0) + 1
        file.write_bytes(content)
    assert found.pop("checkpoint.json") > 20  # some are in the space between
    assert set(found.values()) == {40} and len(found) == len(list(saved.iterdir())) - 1


def test_a_changed_record_is_refused(saved: Path) -> None:
    file = saved / "checkpoint.json"
    for change in ({"step": 8}, {"loss_scale": {}}, {"crc32": {}}, {"crc32": 1}, {"more": 1}):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(RuntimeProgramError, match=r"checkpoint\.json does not match its checksum"):
            read_record(saved)
        shutil.rmtree(saved)
        converted(saved)


@pytest.mark.parametrize("name", ["../outside", "{tmp}/outside", "linked", ".", "..", "1/../1", ".hidden"])
def test_latest_stays_in_its_folder(name: str, saved: Path, tmp_path: Path) -> None:
    converted(tmp_path / "outside")
    (saved.parent / "linked").symlink_to(tmp_path / "outside")
    (saved.parent / "latest").write_text(name.format(tmp=tmp_path) + "\n")

    with pytest.raises(RuntimeProgramError, match="latest must name a folder next to it"):
        find(saved.parent)

    (saved.parent / "latest").unlink()
    assert whole_checkpoints(saved.parent) == [saved]
    assert find(saved.parent / "linked") == saved.parent / "linked"  # by its own name


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def signed(folder: Path) -> None:
    """Give a checkpoint the sums of what is in it, as somebody could who means harm."""
    record = json.loads((folder / "checkpoint.json").read_text())
    record["crc32"] = {name: checkpoint_folders._crc32(folder / name) for name in record["crc32"]}
    record["crc32"]["checkpoint.json"] = checkpoint_folders._own_sum(record)
    (folder / "checkpoint.json").write_text(json.dumps(record))


@pytest.mark.parametrize("action", ["inspect", "merge", "export", "convert"])
def test_no_checkpoint_runs_code(action: str, saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for file in (".metadata", "tensors.json", "plan.json"):
        (saved / file).write_bytes(pickle.dumps(Evil(run)))
        signed(saved)
        out = [] if action == "inspect" else ["-o", str(tmp_path / "out" / file)]
        assert main(["checkpoint", action, str(saved), *out]) in (0, 2)
        assert not run.exists()


def test_boxes_are_in_the_folder(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "__0_0.distcp", tmp_path / "elsewhere")
    text = (saved / "tensors.json").read_text()
    for name in ("../../elsewhere", str(tmp_path / "elsewhere")):
        (saved / "tensors.json").write_text(text.replace("__0_0.distcp", name))
        signed(saved)
        with pytest.raises(RuntimeProgramError, match=r"has a chunk that is not in the folder"):
            whole_values(saved)


def test_a_damaged_latest_checkpoint_is_not_left_out_of_what_is_there(saved: Path) -> None:
    other = converted(saved.parent / "2")
    assert [each["latest"] for each in conversion.inspected(saved.parent)].count(True) == 1
    latest = find(saved.parent)
    assert latest in (saved, other)
    file = latest / "checkpoint.json"
    file.write_text(file.read_text().replace('"step"', '"stop"'))
    with pytest.raises(RuntimeProgramError, match="is damaged"):
        conversion.inspected(saved.parent)
