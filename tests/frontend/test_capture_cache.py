"""A stored capture is the program that a trace would give, and is taken only where nothing that it depends on has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import graphpar as gp
from graphpar.cli.trace import export_file
from graphpar.frontend import capture_cache, modelfile, observed
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.effects import Effects
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from tests.programs import EXAMPLES

MODEL = """
import os, json
from pathlib import Path
import torch
from torch import nn
{before}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = {layers}
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()

def model():
    return Model()

def example_inputs():
    return (torch.ones(4, 8),)
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Program, CaptureCache]]:
    """Traces ``tmp_path/model.py`` as a process of its own does that finds the cache of those before."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def traced(text: str | None = None, **options: object) -> tuple[Program, CaptureCache]:
        if text is not None:
            (folder / "model.py").write_text(text)
        forget_imports(monkeypatch)
        cache = CaptureCache("model.py", tmp_path / "cache")
        return export_file(cache.file, None, Precision(), cache=cache, **options), cache  # type: ignore[arg-type]

    return traced


def forget_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let model files be imported and observed as in a new process."""
    fresh, effects = observed.Observed(), Effects()
    for place in (capture_cache, modelfile, observed):
        monkeypatch.setattr(place, "OBSERVED", fresh)
    for place in (capture_cache, modelfile):
        monkeypatch.setattr(place, "EFFECTS", effects)
    monkeypatch.setattr(modelfile, "_loaded", {})
    for name in [each for each in sys.modules if each in ("sizes", "extra") or each.startswith("_graphpar_model_model")]:
        monkeypatch.delitem(sys.modules, name)


def imported() -> bool:
    """Whether the model file was imported since :func:`forget_imports`."""
    return any(name.startswith("_graphpar_model_model") for name in sys.modules)


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama", "mixtral", "t5", "resnet_batchnorm"])
def test_stored_captures_give_the_same_programs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_imports(monkeypatch)
    folders = []
    for number in range(2):
        cache = CaptureCache(EXAMPLES / f"{name}.py", tmp_path / "cache", Precision())
        program = export_file(cache.file, None, Precision(), cache=cache)
        assert (cache.file.importer is not None) == bool(number)
        assert cache.hit == bool(number), cache.why_not
        parts = gp.partition(program, gp.plan(program, mesh={"pp": 2, "tp": 2}))
        folders.append(parts.save(tmp_path / str(number)))

    first, second = (
        {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        for folder in folders
    )
    assert len(first) > 3
    assert first == second


def layers_of(program: Program) -> int:
    return sum(name.endswith("weight") for name in program.parameters)


Edit = Callable[[pytest.MonkeyPatch], object]
CASES: dict[str, tuple[str, str, Edit, Edit]] = {
    "a module beside it": (
        "from sizes import LAYERS",
        "LAYERS",
        lambda patch: Path("sizes.py").write_text("LAYERS = 2"),
        lambda patch: Path("sizes.py").write_text("LAYERS = 333"[:-2]),
    ),
    "a file that it reads": (
        "",
        "json.loads(Path('sizes.json').read_text())",
        lambda patch: Path("sizes.json").write_text("2"),
        lambda patch: Path("sizes.json").write_text("3"),
    ),
    "whether a path exists": (
        "",
        "3 if Path('large').exists() else 2",
        lambda patch: None,
        lambda patch: Path("large").mkdir(),
    ),
    "a variable": (
        "",
        "int(os.environ.get('LAYERS', 2))",
        lambda patch: patch.delenv("LAYERS", raising=False),
        lambda patch: patch.setenv("LAYERS", "3"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_model_depends_on(
    case: str, trace: Callable[..., tuple[Program, CaptureCache]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, layers, first, second = CASES[case]
    first(monkeypatch)
    program, cache = trace(MODEL.format(before=before, layers=layers))
    assert (layers_of(program), cache.hit, cache.why_not) == (2, False, None)
    again, cache = trace()
    assert (layers_of(again), cache.hit) == (2, True)

    second(monkeypatch)
    changed, cache = trace()

    assert (layers_of(changed), cache.hit) == (3, False)
    assert trace()[1].hit


def test_edits_and_options_are_traced(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    plain = MODEL.format(before="", layers=2)
    assert not trace(plain)[1].hit
    assert not trace(plain.replace("relu", "tanh"))[1].hit
    assert not trace(plain)[1].hit, "the file was edited back: the entry is of the last edit"
    assert not trace(plain.replace("torch.ones(4, 8)", "torch.ones(6, 8)"))[1].hit
    assert trace()[1].hit


@pytest.mark.parametrize(
    ("layers", "why"),
    [("len(os.listdir('.'))", "lists the folder"), ("int(os.popen('echo 2').read())", "starts a process")],
)
def test_what_can_not_be_known_is_not_kept(
    layers: str, why: str, trace: Callable[..., tuple[Program, CaptureCache]]
) -> None:
    for _ in range(2):
        _, cache = trace(MODEL.format(before="", layers=layers))
        assert not cache.hit
        assert why in str(cache.why_not)


def test_variables_count_as_they_were_read(
    trace: Callable[..., tuple[Program, CaptureCache]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHPAR_TEST_LAYERS", raising=False)
    text = MODEL.format(before="", layers="int(os.environ.setdefault('GRAPHPAR_TEST_LAYERS', '2'))")
    assert trace(text)[1].why_not is None
    monkeypatch.delenv("GRAPHPAR_TEST_LAYERS")  # as in a new process

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (2, True)


def test_variables_that_an_import_sets_are_no_change(
    trace: Callable[..., tuple[Program, CaptureCache]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHPAR_TEST_LAYERS", raising=False)
    text = MODEL.format(before="os.environ.setdefault('GRAPHPAR_TEST_LAYERS', '3')", layers="2")
    assert trace(text)[1].why_not is None
    monkeypatch.delenv("GRAPHPAR_TEST_LAYERS")

    assert trace()[1].hit

    monkeypatch.setenv("GRAPHPAR_TEST_LAYERS", "4")  # which the import reads, and leaves
    assert not trace()[1].hit


def test_broken_entries_are_traced_again(trace: Callable[..., tuple[Program, CaptureCache]], tmp_path: Path) -> None:
    trace(MODEL.format(before="", layers=2))
    (entry,) = (tmp_path / "cache").glob("*.capture")
    entry.write_bytes(entry.read_bytes()[:-100])

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (2, False)
    assert trace()[1].hit


def test_own_autograd_functions_are_not_kept(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    own = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
"""
    text = MODEL.format(before=own, layers=2).replace("x.sum()", "Twice.apply(x).sum()")
    assert "autograd function" in str(trace(text)[1].why_not)
    assert not trace()[1].hit


def test_constants_keep_their_values(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="", layers=2).replace("x.sum()", "(x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])).sum()")
    first, again = trace(text)[0], trace()[0]
    assert first.constants.keys() == again.constants.keys()
    for name, value in first.constants.items():
        torch.testing.assert_close(again.constants[name], value, rtol=0, atol=0)
