"""Standard streams and disks as they may be: closed, full, of a few characters, of no width. Each gets a sentence, never a traceback."""

from __future__ import annotations

import argparse
import errno
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphpar.cli import passes_command
from graphpar.cli.main import main
from graphpar.cli.output import Result, write_text
from graphpar.errors import GraphparError
from graphpar.runtime.checkpoints.weights import save_tensors

ROOT = Path(__file__).parents[2]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``graphpar`` is the command."""
    line = line.replace("graphpar", f"{sys.executable} -m graphpar")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("graphpar passes >&-", 0, ""),
        ("graphpar passes >&- 2>&- <&-", 0, ""),
        ("graphpar report no_folder >&-", 2, "There is no folder no_folder"),
        ("graphpar passes >/dev/full", 2, "Standard output can't be written: No space left on device."),
        ("graphpar passes --json >/dev/full", 2, "Standard output can't be written: No space left on device."),
        ("PYTHONIOENCODING=ascii graphpar --help", 0, ""),
        ("PYTHONIOENCODING=ascii graphpar passes", 0, ""),
        ("COLUMNS=0 graphpar passes", 0, ""),
        ("COLUMNS=-3 graphpar passes", 0, ""),
        ("COLUMNS=wide graphpar passes", 0, ""),
    ],
)
def test_a_stream_that_takes_less_is_no_bug(line: str, code: int, said: str) -> None:
    ran = shell(line)
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr and "Traceback" not in ran.stderr
    assert bool(ran.stderr) == bool(said)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 4 KiB, as on a disk that is almost full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path: Path, small_files: None) -> None:
    written: list[str] = []
    write_text(tmp_path / "page.html", "a", written)
    for name in ("page.html", "other.html"):
        with pytest.raises(GraphparError, match=f"{name} can't be written: File too large"):
            write_text(tmp_path / name, "b" * 10_000, written)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "a" and written == [str(tmp_path / "page.html")]


def test_a_page_is_written_through_a_link_and_to_a_device(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("a")
    (tmp_path / "link.html").symlink_to("page.html")
    write_text(tmp_path / "link.html", "b", [])
    write_text("/dev/null", "b", [])
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").read_text() == "b"


def test_tensors_that_do_not_fit_leave_nothing(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OSError, match="File too large") as raised:
        save_tensors({"a": torch.zeros(10_000)}, tmp_path / "a.safetensors")
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.costly
def test_weights_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    model = "import torch\nfrom torch import nn\nmodel = lambda: nn.Linear(256, 256)\nexample_inputs = (torch.ones(2, 256),)\n"
    (tmp_path / "model.py").write_text(model)
    ran = shell(f"ulimit -f 150; graphpar compile {tmp_path}/model.py --mode infer --devices 1 -o {tmp_path}/out")
    assert ran.returncode == 2 and ran.stderr == f"error: {tmp_path}/out can't be written: File too large.\n"
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {"model.py"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_that_an_import_makes_another_error_is_an_interrupt(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports(options: argparse.Namespace) -> Result:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            raise ImportError("a module could not be imported") from error
        raise AssertionError

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # a shell that starts tests in the background ignores some
    try:
        monkeypatch.setattr(passes_command, "run", imports)
        assert main(["passes"]) == 128 + number
        assert capsys.readouterr().err == "Interrupted; nothing was written.\n" and signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
