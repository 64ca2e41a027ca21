"""A stored capture is the program that a trace would give, and is taken only where nothing that it depends on has changed."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import graphpar as gp
from graphpar.cli.main import main
from graphpar.cli.trace import export_file
from graphpar.frontend import capture_cache, file_dependencies, modelfile
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.modelfile import initial_weights
from graphpar.hardware import this_machine
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.operators import rules
from tests.tools.programs import EXAMPLES
from tests.tools.samples import drawn

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
    fresh = file_dependencies.Observed()
    for place in (capture_cache, modelfile, file_dependencies):
        monkeypatch.setattr(place, "OBSERVED", fresh)
    monkeypatch.setattr(modelfile, "_loaded", {})
    for name in [
        each for each in sys.modules if each in ("sizes", "extra") or each.startswith("_graphpar_model_model")
    ]:
        monkeypatch.delitem(sys.modules, name)


def imported() -> bool:
    """Whether the model file was imported since :func:`forget_imports`."""
    return any(name.startswith("_graphpar_model_model") for name in sys.modules)


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(["gpt2_tiny", "llama", "mixtral", "t5", "resnet_batchnorm"], 1, 2))
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


@pytest.mark.parametrize("how", ["writable", "link", "hard link", "folder"])
def test_only_what_nobody_else_can_have_written_is_unpickled(how: str, tmp_path: Path) -> None:
    run, place, other = tmp_path / "run", tmp_path / "x.capture", tmp_path / "downloaded"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(run),)

    other.write_bytes(pickle.dumps(Evil()))
    if how == "writable":
        place.write_bytes(other.read_bytes())
        place.chmod(0o666)
    elif how == "folder":
        place.mkdir()
    else:
        place.symlink_to(other) if how == "link" else place.hardlink_to(other)

    assert capture_cache._read_entry(place) is None and not run.exists()


def layers_of(program: Program) -> int:
    return sum(name.endswith("weight") for name in program.parameters)


Edit = Callable[[pytest.MonkeyPatch], object]
CASES: dict[str, tuple[str, str, Edit, Edit]] = {
    "a module beside it": (
        "from sizes import LAYERS",
        "LAYERS",
        lambda patch: Path("sizes.py").write_text("LAYERS = 2"),
        lambda patch: Path("sizes.py").write_text(
            "LAYERS = 3  # other bytes, as Python looks at a file's second and size"
        ),
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


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1 / 2)
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


@pytest.mark.costly
def test_edits_and_options_are_traced(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    plain = MODEL.format(before="", layers=2)
    assert not trace(plain)[1].hit
    assert not trace(plain.replace("relu", "tanh"))[1].hit
    assert not trace(plain)[1].hit, "the file was edited back: the entry is of the last edit"
    assert not trace(plain.replace("torch.ones(4, 8)", "torch.ones(6, 8)"))[1].hit
    assert trace()[1].hit


@pytest.mark.costly
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


@pytest.mark.costly
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


@pytest.mark.costly
def test_broken_entries_are_traced_again(trace: Callable[..., tuple[Program, CaptureCache]], tmp_path: Path) -> None:
    trace(MODEL.format(before="", layers=2))
    (entry,) = (tmp_path / "cache").rglob("*.capture")
    entry.write_bytes(entry.read_bytes()[:-100])

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (2, False)
    assert trace()[1].hit


@pytest.mark.costly
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


@pytest.mark.costly
def test_constants_keep_their_values(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="", layers=2).replace("x.sum()", "(x * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])).sum()")
    first, again = trace(text)[0], trace()[0]
    assert first.constants.keys() == again.constants.keys()
    for name, value in first.constants.items():
        torch.testing.assert_close(again.constants[name], value, rtol=0, atol=0)


# ---- runs that do not import the model file ----------------------------------------------------------------------


@pytest.mark.costly
def test_kept_captures_need_no_import(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="", layers=2).replace("x.sum()", "x")
    text += "\ndef loss_fn(y, goal=None): return (y - goal).square().mean()\n"
    text += "\nexample_targets = torch.ones(4, 8)\nsplit_points = ['layers.1']\n"
    text += "\ndef optimizer(params): return torch.optim.SGD([each for _, each in params], momentum=0.9)\n"
    traced, first = trace(text)
    assert imported() and traced.optimizer == ("SGD", 1.0)

    program, again = trace()

    assert not imported()
    assert again.hit
    assert program.source is not None and program.optimizer == ("SGD", 1.0)
    torch.testing.assert_close((again.file.args, again.file.targets), (first.file.args, first.file.targets))
    assert again.file.split_points == first.file.split_points == ("layers.1",)
    y = torch.zeros(4, 8)
    assert list(inspect.signature(program.source.loss_fn).parameters) == ["y", "goal"]  # type: ignore[arg-type]
    assert program.source.loss_fn(y, torch.ones(4, 8)) == 1  # type: ignore[misc]
    assert imported()
    assert initial_weights(again.file).keys() == initial_weights(first.file).keys()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("print('hello')", "prints"),
        ("import sys; sys.stderr.write('hello')", "prints"),
        ("torch.set_default_dtype(torch.float64)", "default dtype"),
        ("import graphpar; graphpar.register_rule('own::twice', 'b d -> b d')", "rules of operators"),
        ("os.environ['GRAPHPAR_TEST_OWN'] = 'set'", "environment"),
        ("import sys; sys.path.append('/elsewhere')", "sys.path"),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_files_that_do_more_than_define_are_imported_each_time(
    before: str,
    why: str,
    trace: Callable[..., tuple[Program, CaptureCache]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(rules, "REGISTERED", {})
    monkeypatch.setattr(file_dependencies, "REGISTERED", rules.REGISTERED)
    printed = []
    try:
        for number in range(3):
            monkeypatch.delenv("GRAPHPAR_TEST_OWN", raising=False)
            rules.REGISTERED.clear()
            torch.set_default_dtype(torch.float32)
            sys.path[:] = [entry for entry in sys.path if entry != "/elsewhere"]
            _, cache = trace(MODEL.format(before=before, layers=2) if number == 0 else None)
            printed.append("hello" in "".join(capsys.readouterr()))
            assert imported()
            assert why in str(capture_cache.OBSERVED.effect)
            assert cache.hit == bool(number)
    finally:
        torch.set_default_dtype(torch.float32)
    assert printed == [why == "prints"] * 3


@pytest.mark.costly
def test_built_models_are_imported(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="", layers=2).replace("def model():\n    return Model()", "model = Model()")
    for number in range(2):
        program, cache = trace(text if number == 0 else None)
        assert cache.hit == bool(number)
        assert isinstance(program.source and program.source.model, torch.nn.Module)


@pytest.mark.costly
def test_modules_that_hide_others_are_seen(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    before = "try:\n    from extra import LAYERS\nexcept ImportError:\n    LAYERS = 2"
    assert layers_of(trace(MODEL.format(before=before, layers="LAYERS"))[0]) == 2
    assert trace()[1].hit
    Path("extra.py").write_text("LAYERS = 3")

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (3, False)
    Path("extra.py").unlink()
    assert layers_of(trace()[0]) == 2


@pytest.mark.costly
def test_modules_that_are_looked_for_are_seen(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    found = "3 if importlib.util.find_spec('extra') else 2"
    text = MODEL.format(before=f"import importlib.util\nLAYERS = {found}", layers="LAYERS")
    assert layers_of(trace(text)[0]) == 2
    assert trace()[1].hit
    Path("extra.py").write_text("")

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (3, False)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("imported_from", "try:\n    from imported_from.fast import LAYERS\nexcept ImportError:\n    LAYERS = 2"),
        ("looked_in", "import importlib.util\nLAYERS = 3 if importlib.util.find_spec('.fast', 'looked_in') else 2"),
    ],
    ids=["imported", "looked for"],
)
def test_modules_of_packages_that_are_looked_for_are_seen(
    package: str, found: str, trace: Callable[..., tuple[Program, CaptureCache]]
) -> None:
    Path(package).mkdir()
    Path(package, "__init__.py").write_text("")
    assert layers_of(trace(MODEL.format(before=found, layers="LAYERS"))[0]) == 2
    assert trace()[1].hit
    Path(package, "other.py").write_text("")
    assert trace()[1].hit
    Path(package, "fast.py").write_text("LAYERS = 3")

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (3, False)


@pytest.mark.costly
def test_where_links_lead_is_seen(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    for name in ("two", "three"):
        Path(name).mkdir()
    link = Path("current")
    link.symlink_to("two")
    chosen = (
        "from pathlib import Path\nLAYERS = {'two': 2, 'three': 3}[Path(__file__).with_name('current').resolve().name]"
    )
    assert layers_of(trace(MODEL.format(before=chosen, layers="LAYERS"))[0]) == 2
    assert trace()[1].hit
    link.unlink()
    link.symlink_to("three")

    program, cache = trace()

    assert (layers_of(program), cache.hit) == (3, False)


@pytest.mark.costly
def test_errors_of_changed_files_are_those_of_an_import(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="", layers=2)
    trace(text)
    for change, said in (("1 / 0", "ZeroDivisionError"), ("del model", "no 'model'")):
        with pytest.raises(gp.GraphparError, match=said):
            trace(f"{text}\n{change}\n")
    trace(text)
    assert trace()[1].hit
    Path("model.py").unlink()
    with pytest.raises(gp.GraphparError, match="There is no model file"):
        trace()


@pytest.mark.costly
def test_files_that_change_while_they_are_traced_are_not_kept(
    trace: Callable[..., tuple[Program, CaptureCache]],
) -> None:
    before = "Path('sizes.json').write_text('2')"
    for _ in range(2):
        _, cache = trace(MODEL.format(before=before, layers="json.loads(Path('sizes.json').read_text())"))
        assert not cache.hit
        assert "sizes.json was changed while the model was traced" in str(cache.why_not)


@pytest.mark.costly
def test_late_imports_have_the_random_numbers_of_early_ones(trace: Callable[..., tuple[Program, CaptureCache]]) -> None:
    text = MODEL.format(before="SCALE = torch.rand(())", layers=2).replace(
        "def model():\n    return Model()",
        "def model():\n    made = Model()\n    made.register_buffer('scale', SCALE)\n    return made",
    )
    torch.manual_seed(7)
    first = initial_weights(trace(text)[1].file)
    torch.manual_seed(7)
    _, cache = trace()
    torch.rand(5)
    state = torch.get_rng_state()

    again = initial_weights(cache.file)

    assert cache.hit
    assert first.keys() == again.keys()
    for name, value in first.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.costly
@pytest.mark.parametrize(
    "options", [["--mesh", "tp=2", "--check-values"], ["--devices", "2", "--dtype", "bf16", "--batch", "8"]]
)
@pytest.mark.sampled(1 / 2)
def test_commands_write_the_same_with_and_without_a_kept_capture(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(this_machine, "profile_path", lambda: None)
    text = (
        MODEL.format(before="", layers=2)
        + "\ndef optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.1)\n"
    )
    (tmp_path / "model.py").write_text(text)
    printed, folders = [], []
    for number, extra in enumerate((["--no-cache"], [], [])):
        forget_imports(monkeypatch)
        assert main(["compile", "model.py", *options, *extra, "-o", f"out{number}"]) == 0
        shown = capsys.readouterr()
        report = re.sub(r"in \S+ s,", "in T s,", shown.out.split(" Wrote")[0])  # the seconds of the search
        printed.append((report.replace(f"out{number}", "out"), shown.err))
        folder = tmp_path / f"out{number}"
        folders.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert any(path.suffix == ".safetensors" for path in folders[0])
    assert Path("optimizer.py") in folders[0]
    assert folders[0].keys() == folders[1].keys() == folders[2].keys()
    for path, content in folders[0].items():
        assert (folders[1][path], folders[2][path]) == (content, content), path
    assert printed[0] == printed[1] == printed[2]

    forget_imports(monkeypatch)
    assert main(["compile", "model.py", *options[:2], "--no-emit"]) == 0
    assert imported() == (options[-1] == "8")  # asked with another dtype, of which nothing is kept
    capsys.readouterr()

    refused = []
    for extra in ([], ["--no-cache"]):
        forget_imports(monkeypatch)
        assert (
            main(["compile", "model.py", *options[:2], "--no-emit", "--batch", "8", "--microbatch-size", "3", *extra])
            == 2
        )
        refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1]


TOKENS = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)

    def forward(self, tokens, labels=None):
        logits = self.head(self.embed(tokens))
        found = {} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {**found, "logits": logits}


def model():
    return Model()


def example_inputs():
    return {"tokens": torch.zeros(4, 6).long(), "labels": torch.zeros(4, 6).long()}
"""


@pytest.mark.costly
def test_kept_captures_generate_from_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(this_machine, "profile_path", lambda: None)
    (tmp_path / "model.py").write_text(TOKENS)
    found = []
    for number, options in enumerate(("--no-cache", "--mesh pp=1", "--mesh pp=1", "--mesh dp_replicate=2")):
        forget_imports(monkeypatch)
        command = ["compile", "model.py", *options.split(), "--mode", "train,generate", "-o", f"out{number}"]
        assert main(command) == 0, capsys.readouterr().err
        found.append((tmp_path / f"out{number}" / "generate" / "plan.json").read_text())
    assert found[0] == found[1] == found[2] != found[3]
    shapes = [json.loads(text)["interface"]["inputs"][0]["shape"] for text in (found[0], found[3])]
    assert shapes == [[4, 6], [4, 6]]


OWN_OPERATOR = """
import torch
from torch import nn


@torch.library.custom_op("kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: gradient * 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return twice(self.layer(x)).sum()


def model():
    return Model()


def example_inputs():
    return (torch.ones(4, 8),)
"""


@pytest.mark.slow
def test_other_processes_take_what_one_has_kept(tmp_path: Path) -> None:
    """Torch sets variables of the environment in each of them. An entry that is taken is not written again."""
    (tmp_path / "model.py").write_text(OWN_OPERATOR)
    command = [sys.executable, "-m", "graphpar", "compile", "model.py", "--devices", "2"]
    environment = dict(os.environ) | {"GRAPHPAR_CACHE": str(tmp_path / "cache")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    entries = []
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
        (entry,) = (tmp_path / "cache").rglob("*.capture")
        entries.append(entry.stat().st_ino)
    assert entries[0] == entries[1]
