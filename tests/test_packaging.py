"""What is installed and what is imported: emitted programs need no compiler, the command line answers without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import graphpar

ROOT = Path(__file__).parents[1]
COMPILER = ("graphpar.api", "graphpar.frontend.capture", "graphpar.codegen", "graphpar.cost_models", "graphpar.passes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported_by(code: str) -> set[str]:
    """The modules that a new interpreter has imported after ``code``."""
    program = f"{code}\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return set(line.split()[1:])


def test_the_runtime_imports_no_other_part_of_graphpar() -> None:
    modules = imported_by(
        "import graphpar.runtime, graphpar.runtime.launching.launch, graphpar.runtime.launching.worker"
    )
    own = {name for name in modules if name.startswith("graphpar.") and not name.startswith("graphpar.runtime")}
    assert own == set()
    assert not modules & {"highspy", "transformers", "rich"}


def test_code_that_is_copied_into_programs_imports_torch_alone() -> None:
    modules = imported_by("import graphpar.emitted.random_streams")
    assert {name for name in modules if name.startswith("graphpar")} == {
        "graphpar",
        "graphpar.emitted",
        "graphpar.emitted.random_streams",
    }


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["compile", "--help"], ["compile", "model.py", "--no-such-option"]]
)
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    modules = imported_by(f"from graphpar.cli.main import main\nmain({arguments!r})")
    assert "torch" not in modules
    assert not [name for name in modules if name.startswith(COMPILER)]


def test_importing_graphpar_imports_nothing_heavy() -> None:
    assert not imported_by("import graphpar") & {"torch", "rich", "graphpar.api"}


def test_all_exported_names_can_be_imported() -> None:
    for name in graphpar.__all__:
        assert getattr(graphpar, name) is not None
    assert set(graphpar.__all__) == {*graphpar._EXPORTS, "__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        graphpar.no_such_name  # noqa: B018


@pytest.mark.costly
def test_importing_every_module_leaves_the_public_names_as_they_are() -> None:
    """A module named like a function, such as ``plan``, would replace it."""
    code = "import importlib, pkgutil, graphpar\n"
    code += "names = [m.name for m in pkgutil.walk_packages(graphpar.__path__, 'graphpar.')]\n"
    code += "[importlib.import_module(name) for name in names]\n"
    code += "assert all(callable(getattr(graphpar, n)) for n in graphpar.__all__ if n not in ('__version__', 'PASSES'))"
    assert "graphpar.passes.table" in imported_by(code)


def test_every_folder_is_a_package() -> None:
    """The links in the root are for people; tools need none of them."""
    for path in (ROOT / "graphpar").rglob("*.py"):
        assert (path.parent / "__init__.py").is_file() and not path.parent.is_symlink()
    for name in ("passes", "cost_models", "cli"):
        assert (ROOT / name).resolve() == ROOT / "graphpar" / name


def test_the_types_are_published() -> None:
    assert (Path(graphpar.__file__).parent / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["graphpar"]


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == graphpar.__version__


def test_what_is_installed_is_pinned() -> None:
    """Continuous integration must install tomorrow what it installs today."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("-", "_") for line in lines if "==" in line}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["test"]]
    names = {requirement.partition(">=")[0].lower().replace("-", "_") for requirement in wanted}
    assert names <= pins
