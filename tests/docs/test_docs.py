"""What the README and the pages of docs/ show is true: code runs, excerpts are what is written now, commands and links exist.

A comment before a fenced block says how it is checked:

    <!-- run -->                                            run, together with the page's other such blocks
    <!-- excerpt: examples/gpt2.py -->                      stands in that file
    <!-- emitted: MODEL OPTIONS -> FILE: NAME, NAME -->     those classes and functions of an emitted file
    <!-- printed: graphpar ... -->                          what the command prints, seconds and torch's version aside
    <!-- part: graphpar ... -->                             stands in what the command prints
    <!-- table: NAME -->                                    a Markdown table made by a function here
    <!-- train -->                                          typed one after the other, ends with the losses that the page states

``python -m tests.docs.test_docs`` writes what is emitted, printed and made by a function anew.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpar as gp
from benchmarks import architectures as benchmark
from graphpar.cli.main import main
from graphpar.cli.parser import COMMANDS, build_parser
from graphpar.hardware.devices import DEVICES
from graphpar.passes.table import STEPS
from graphpar.runtime.options import Decisions, options_of
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.schedules.action_table import parse_table, validate_table
from graphpar.schedules.order import check_deadlock
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import peak_in_flight, simulate
from tests.models import architectures
from tests.tools.samples import drawn

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ("emitted", "printed", "table")
OTHER_COMMANDS = {
    "python3",
    "python",
    ".",
    "cd",
    "pip",
    "pytest",
    "mypy",
    "ruff",
    "torchrun",
    ".ci/run",
    ".ci/versions",
}
_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_TABLE = re.compile(r"<!-- (?P<marker>table: [^\n]*?) -->\n(?P<text>(?:\|[^\n]*\n)*)")


@dataclass(frozen=True)
class Block:
    """A fenced block (or a marked table) of a page."""

    page: Path
    language: str
    text: str
    kind: str  # of the marker; empty without one
    argument: str

    def __str__(self) -> str:
        return f"{page_name(self.page)}: {self.argument or self.kind or self.language}"


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for pattern in (_BLOCK, _TABLE):
        for match in pattern.finditer(text):
            kind, _, argument = (match["marker"] or "").partition(": ")
            language = match["language"] if pattern is _BLOCK else "table"
            yield Block(page, language, match["text"], kind, argument)


ALL = [block for page in PAGES for block in blocks(page)]


# ---- what generated blocks hold --------------------------------------------------------------------------------


def emitted(argument: str) -> str:
    """``MODEL OPTIONS -> FILE: NAME, NAME``: the source of these classes and functions."""
    options, _, where = argument.partition(" -> ")
    file, _, names = where.partition(": ")
    source = _emitted_files(options)[file]
    lines = source.splitlines()
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    parts = [found[name] for name in names.split(", ")]
    return "\n\n\n".join("\n".join(lines[part.lineno - 1 : part.end_lineno]) for part in parts) + "\n"


@cache
def _emitted_files(options: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        _run(["compile", *shlex.split(options), "-o", f"{folder}/out"])
        return {path.name: path.read_text() for path in Path(folder, "out").glob("*.py")}


def printed(command: str) -> str:
    """What a command prints, with files written to a temporary folder that can't be seen in the output."""
    program, *arguments = shlex.split(command)
    assert program == "graphpar"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        return _run(arguments)


def _run(arguments: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(arguments) == 0
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def table(name: str) -> str:
    kind, _, argument = name.partition(" ")
    tables = {"schedules": schedules, "devices": devices, "steps": steps, "decisions": decisions}
    return options(argument) if kind == "options" else tables[name]()


def options(command: str) -> str:
    """The arguments of a command as ``--help`` tells of them."""
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    rows = ["| argument | what |", "|---|---|"]
    for action in subparsers.choices[command]._actions:
        if action.dest != "help":
            taken = "" if action.nargs == 0 or not action.option_strings else f" {_taken(action)}"
            names = ", ".join(f"`{name}{taken}`" for name in action.option_strings) or f"`{_taken(action)}`"
            rows.append(f"| {names.replace('|', chr(92) + '|')} | {action.help} |")
    return "\n".join(rows) + "\n"


def decisions() -> str:
    """The fields of ``plan.json`` that are options, as ``gp.plan`` tells of them."""
    rows = ["| field | what |", "|---|---|"]
    for name, known in options_of(Decisions).items():
        rows.append(f"| `{name}` | {re.sub('``', '`', known.about or known.help)} |")
    return "\n".join(rows) + "\n"


def _taken(action: argparse.Action) -> str:
    return str(action.metavar or "|".join(map(str, action.choices or [action.dest.upper()])))


def steps() -> str:
    rows = ["| step | file | requires | provides | checked by |", "|---" * 5 + "|"]
    for row in STEPS:
        file = importlib.util.find_spec(row.file)
        assert file is not None and file.origin is not None
        path = Path(file.origin).resolve().relative_to(ROOT.resolve())
        rows.append(f"| {row.name} | `{path}` | {', '.join(row.requires)} | {row.provides} | {row.checked_by} |")
    return "\n".join(rows) + "\n"


def devices() -> str:
    dtypes = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8")
    rows = [
        f"| device | {', '.join(dtypes)}: Tflop/s | memory | bandwidth | in a node | between | a node |",
        "|---" * 7 + "|",
    ]
    for device in DEVICES.values():
        rates = " · ".join(f"{device.flops[dtype] / 1e12:g}" if dtype in device.flops else "–" for dtype in dtypes)
        inside, between = (f"{link.bytes_per_s / 1e9:g} GB/s" for link in (device.intra_node, device.inter_node))
        pair = device.intra_node.pair_bytes_per_s
        inside += f", {pair / 1e9:g} a pair" if pair else ""
        rows.append(
            f"| `{device.name}` | {rates} | {device.memory_bytes / 2**30:.1f} GiB | {device.memory_bytes_per_s / 1e12:g} TB/s "
            f"| {inside} | {between} | {device.devices_per_node or 'any'} |"
        )
    return "\n".join(rows) + "\n"


def schedules() -> str:
    rows = ["| name | stages a rank | bubble | activations held | microbatches | also |", "|---|---|---|---|---|---|"]
    counts = {"1F1B": "at least the stages", "DualPipeV": "at least the stages"}
    for schedule in SCHEDULES.values():
        per_rank, ranks = schedule.default_stages, 4
        actions = action_table(schedule.name, ranks, per_rank, 8)
        timeline = simulate(actions, [1 / per_rank] * ranks * per_rank, [2 / per_rank] * ranks * per_rank)
        stages = f"{schedule.min_stages}" if schedule.max_stages else f"{schedule.min_stages} or more"
        rounds = "in equal rounds" if schedule.name.startswith("Interleaved") else "any"
        held = max(peak_in_flight(actions)) / per_rank
        rows.append(
            f"| `{schedule.name}` | {stages}{', in a V' if schedule.placement == 'v' else ''} | {timeline.bubble:.1%} "
            f"| {held:g} of 8 | {counts.get(schedule.name, rounds)} | {', '.join(f'`{a}`' for a in schedule.aliases)} |"
        )
    return "\n".join(rows) + "\n"


MAKERS: dict[str, Callable[[str], str]] = {"emitted": emitted, "printed": printed, "table": table}


def _timeless(text: str) -> str:
    return re.sub(r"torch \d\S+", "torch …", re.sub(r"\d+\.\d s\b", "… s", text))


# ---- tests -----------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- run -->" in page.read_text()], ids=page_name)
@pytest.mark.sampled(2 / 3)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.text for block in blocks(page) if block.kind == "run"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))


def _generated() -> list[Any]:
    """Those of the large models are for the long run."""
    generated = [block for block in ALL if block.kind in GENERATED]
    return [pytest.param(b, marks=[pytest.mark.slow] if "llama3" in b.argument else [], id=str(b)) for b in generated]


@pytest.mark.parametrize("block", _generated())
@pytest.mark.sampled(1 / 2)
def test_what_is_shown_is_what_is_written_now(block: Block) -> None:
    expected = MAKERS[block.kind](block.argument)
    assert _timeless(block.text) == _timeless(expected), "run: python -m tests.docs.test_docs"


@pytest.mark.parametrize("block", [b for b in ALL if b.kind == "part"], ids=str)
def test_parts_stand_in_what_is_printed(block: Block) -> None:
    assert _timeless(block.text) in _timeless(printed(block.argument))


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(list(architectures.ALL), 1, 6))
def test_a_row_of_the_table_of_architectures_is_what_is_compiled(name: str) -> None:
    """Rounding and remarks aside."""
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "architectures.md").read_text().splitlines()]
    shown = {row[0]: row[1:5] for row in rows if row[0] in architectures.ALL}
    row, _ = benchmark.compiled(name, {"tp": 2})

    assert list(shown) == list(architectures.ALL)
    assert benchmark._cells(row)[1:5] == shown[name]


@pytest.mark.parametrize("block", [b for b in ALL if b.kind == "excerpt"], ids=str)
def test_excerpts_stand_in_their_files(block: Block) -> None:
    assert block.text in (ROOT / block.argument).read_text()


def test_python_blocks_parse() -> None:
    for block in ALL:
        if block.language == "python":
            ast.parse(block.text)


def _commands() -> Iterator[list[str]]:
    for block in ALL:
        if block.language == "sh":
            for command in re.split(r"&&|\n", block.text.replace("\\\n", " ")):
                if words := shlex.split(command):
                    yield words


def test_commands_exist() -> None:
    for words in _commands():
        if words[0] == "graphpar":
            build_parser().parse_args(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file(), words
        else:
            assert words[0] in OTHER_COMMANDS, words


COMPILED = {
    " ".join(words): words[1:]
    for words in _commands()
    if words[:2] == ["graphpar", "compile"]
    and words[2] not in ("examples/gpt2.py", "examples/mixtral_8x22b.py", "MODEL")
}
"""Commands that compile a model, each once."""


@pytest.mark.costly
@pytest.mark.parametrize("command", drawn(list(COMPILED), 9, 18))
def test_compile_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in ALL:
        if block.kind == "file":
            (tmp_path / block.argument).write_text(block.text)
    (tmp_path / "here.json").symlink_to(ROOT / "benchmarks" / "data" / "cpu_profile.json")
    monkeypatch.chdir(tmp_path)
    assert main(COMPILED[command]) == 0


@pytest.mark.costly
def test_torchrun_runs_as_the_page_and_the_docstring_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fresh folder, but for the number of steps, and with a port that is free."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shells = [block for block in ALL if block.language == "sh" and block.kind != "train"]
    (shown,) = [block.text for block in shells if "torchrun" in block.text and "--save" in block.text]
    monkeypatch.chdir(tmp_path)
    for words in map(shlex.split, shown.splitlines()):
        if words[0] == "graphpar":
            assert main(words[1:]) == 0
        elif words[0] == "cd":
            monkeypatch.chdir(tmp_path / words[1])
        else:
            assert f"    {shlex.join(words)}\n" in Path("train.py").read_text()
            words[words.index("--steps") + 1] = "2"
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]], check=True, timeout=180
            )
            assert Path("trained.safetensors").is_file()


@pytest.mark.slow
def test_the_tutorial_trains_to_the_losses_that_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = ROOT / "docs" / "tutorial.md"
    (model,) = [block.text for block in blocks(page) if block.kind == "file"]
    (tmp_path / "letters.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    losses: list[dict[int, float]] = []
    for block in (block for block in blocks(page) if block.kind == "train"):
        for words in map(shlex.split, block.text.replace("\\\n", " ").splitlines()):
            if words[0] == "graphpar":
                assert main(words[1:]) == 0
                continue
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
            done = subprocess.run(
                command,
                check=True,
                timeout=900,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            found = re.findall(r"^step +(\d+) +loss (\S+)", done.stdout, re.MULTILINE)
            losses.append({int(step): float(loss) for step, loss in found})

    one, two, four = losses
    assert (min(two), max(two), min(four), max(four)) == (0, 99, 100, 199)
    stated = {0: 5.67, 99: 2.42, 100: 2.47, 199: 2.16}
    for step, loss in stated.items():
        assert f"{loss}" in page.read_text()
        assert one[step] == pytest.approx(loss, abs=0.02)
        assert {**two, **four}[step] == pytest.approx(one[step], abs=0.01)


def test_the_schedule_table_that_is_shown_runs() -> None:
    (shown,) = [block for block in ALL if block.kind == "file" and block.argument == "table.csv"]
    parsed = parse_table(shown.text)
    validate_table(parsed, stages=2, microbatches=4)
    check_deadlock(parsed)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    assert {page.resolve() for page in PAGES[1:]} - {index.resolve()} <= linked


def test_the_reference_names_every_public_name_and_every_field_of_a_plan() -> None:
    api = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in gp.__all__ if name != "__version__" and f"gp.{name}" not in api] == []
    commands = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    assert [name for name in COMMANDS if f"<!-- table: options {name} -->" not in commands] == []
    net = torch.nn.Linear(2, 2)
    plan = gp.plan(gp.export(net, (torch.zeros(4, 2),), loss_fn=lambda y: y.sum()), mesh={})
    fields = (ROOT / "docs" / "reference" / "plan.md").read_text()
    assert [name for name in plan.to_json() if f"`{name}`" not in fields] == []


# ---- writing them anew -----------------------------------------------------------------------------------------


def refresh() -> None:
    for page in PAGES:
        text = page.read_text()
        for block in blocks(page):
            if block.kind in GENERATED:
                marker = f"<!-- {block.kind}: {block.argument} -->\n"
                fence = "" if block.language == "table" else f"```{block.language}\n"
                made = MAKERS[block.kind](block.argument)
                if _timeless(made) == _timeless(block.text):
                    continue
                text = text.replace(f"{marker}{fence}{block.text}", f"{marker}{fence}{made}")
        page.write_text(text)


if __name__ == "__main__":
    os.environ["GRAPHPAR_CACHE"] = ""  # as tests run: with the figures of the table's CPU
    refresh()
