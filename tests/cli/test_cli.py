"""The command line: exit codes, messages, and JSON alone on standard output."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import graphpar as gp
from graphpar.cli import compile_command, run_command
from graphpar.cli.main import main
from graphpar.cli.output import CHECK_FAILED, DONE, OUR_BUG, USER_ERROR, phases, stdout_console
from graphpar.cli.parser import COMMANDS, build_parser
from graphpar.cli.plan_file import read_program
from graphpar.codegen.saving import edited_files
from graphpar.passes.table import STEPS
from graphpar.runtime.checkpoints.weights import no_weights
from graphpar.runtime.launching.launch import LaunchResult
from graphpar.runtime.manifest import load_manifest
from graphpar.text import spread_text
from tests.tools.programs import example

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT, HEAD_FIRST = str(EXAMPLES / "gpt.py"), str(EXAMPLES / "head_first.py")

LINEAR = """
import torch
print("noise")
def model(): return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
example_inputs = (torch.ones(3, 4),)
example_targets = torch.zeros(3, 4)
loss_fn = torch.nn.functional.mse_loss
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that the user got wrong prints; nothing on standard output, and no traceback."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    return captured.err


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def compiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(output(capsys, "compile", *arguments, "--json"))
    return data


# ---- help and usage --------------------------------------------------------------------------------------------


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom graphpar.cli.main import main\n"
        "codes = [main(['--help']), main(['compile', '--help']), main(['--version'])]\n"
        "assert codes == [0, 0, 0], codes\nassert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        "assert main(['completion', 'bash']) == 0 and main(['compile', 'm.py', '--device', '4']) == 2\n"
        "import graphpar\nassert 'plan' in dir(graphpar) and 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compile" in ran.stdout and "--schedule-table" in ran.stdout


def test_each_argument_of_each_command_has_help() -> None:
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert list(commands.choices) == list(COMMANDS)
    lacking = [
        (name, action.dest) for name, each in commands.choices.items() for action in each._actions if not action.help
    ]
    assert lacking == [] and all(each.help for each in COMMANDS.values())


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "graphpar", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("graphpar ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: COMMAND"),
        (["compil", "m.py"], "There is no command 'compil'"),
        (["compile"], "required: MODEL"),
        (["compile", "m.py", "--device", "4"], "graphpar compile has no option --device. Did you mean '--devices'?"),
        (["compile", "m.py", "--dev=4"], "no option --dev. Did you mean '--devices'?"),
        (["compile", "m.py", "--weight"], "no option --weight. Did you mean '--weights'?"),
        (["run", "out", "--step", "3"], "no option --step. Did you mean '--steps'?"),
        (["--versions", "passes"], "no option --versions. Did you mean '--version'?"),
        (["compile", "m.py", "n.py"], "takes no further argument, but got 'n.py'"),
        (["compile", "m.py", "--dtype", "fp8"], "--dtype is 'fp8'; it is one of fp32, bf16, fp16."),
        (["compile", "m.py", "--devices", "0"], "--devices: it is 0; it must be at least 1"),
        (["compile", "m.py", "--devices", "two"], "--devices: 'two' is not a whole number"),
        (["compile", "m.py", "--batch", "0"], "--batch: it is 0"),
        (["compile", "m.py", "--microbatch-size", "-2"], "--microbatch-size: it is -2"),
        (["compile", "m.py", "--layers-per-stage", "0"], "--layers-per-stage: it is 0"),
        (["compile", "m.py", "--top", "-1"], "--top: it is -1; it must be at least 0"),
        (["compile", "m.py", "--run", "--steps", "0"], "--steps: it is 0"),
        (["run", "out", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["run", "out", "--lr", "1"], "graphpar run has no option --lr. It is one of train.py"),
        (["calibrate", "--patience", "nan"], "--patience: it is nan"),
        *(
            (["compile", "m.py", option, ""], f"{option} is empty")
            for option in (
                "--mesh",
                "--schedule",
                "--split",
                "--shard-plan",
                "--plan",
                "--html",
                "--explain",
                "--cluster",
                "--out",
            )
        ),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is imported, in one line."""
    said = message(capsys, *arguments)
    assert expected in said and "--help" in said.splitlines()[1]


# ---- completion ------------------------------------------------------------------------------------------------


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in ("graphpar", *words))
    ask = f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words)}\n_graphpar\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    ran = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    script = output(capsys, "completion", "bash")
    assert completed(script, "com") == {"compile", "completion"}
    assert completed(script, "compile", "model.py", "--micro") == {"--microbatch-size"}
    assert completed(script, "compile", "model.py", "--dtype", "") == {"fp32", "bf16", "fp16"}
    assert completed(script, "compile", "--schedule", "ZBV") == {"ZBVZeroBubble"}
    assert completed(script, "completion", "") == {"bash", "zsh", "fish"}
    assert completed(script, "compile", "mod") == set()  # the shell's own paths


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = output(capsys, "completion", shell)
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert len(commands.choices) > 8
    for command, parser in commands.choices.items():
        assert re.search(rf"\b{command}\b", script), command
        for option in (name for action in parser._actions for name in action.option_strings if name.startswith("--")):
            assert (f"-l {option[2:]}" if shell == "fish" else option) in script, (command, option)


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "outline" in output(capsys, "passes")
    rows = json.loads(output(capsys, "passes", "--json"))["passes"]
    assert {"name", "needs", "ensures"} <= set(rows[0])


# ---- compile ---------------------------------------------------------------------------------------------------


def test_an_error_of_a_step_names_module_line_and_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "noise.py").write_text(
        "import torch\n"
        "class Noise(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + torch.randn(2, dtype=torch.complex64).abs()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), Noise())\n"
        "example_inputs = (torch.ones(4, 2),)\n"
        "loss_fn = torch.sum\n"
    )
    said = message(capsys, "compile", "noise.py", "--no-emit")
    assert "(1, noise.py:4)" in said and said.splitlines()[-1] == "In the step assign_streams."


@pytest.mark.costly
def test_compile_as_a_process_prints_one_json_object(folder: Path) -> None:
    (folder / "noisy.py").write_text(LINEAR)
    command = [
        sys.executable,
        "-m",
        "graphpar.cli.main",
        "compile",
        "noisy.py",
        "--devices",
        "2",
        "--batch",
        "6",
        "--json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    data = json.loads(ran.stdout)
    assert set(data) == {
        "graphpar",
        "torch",
        "alone",
        "out",
        "warnings",
        "model",
        "placements",
        "plan",
        "predicted",
        "search",
        "seconds",
        "steps",
    }
    assert set(data["seconds"]) == {"capture", "plan", "emit", "total"}
    assert data["out"] == "noisy-2dev" and data["plan"]["global_batch"] == 6
    assert "noise" in ran.stderr
    record = json.loads((folder / "noisy-2dev" / "plan.json").read_text())
    assert record["model_file"] == "../noisy.py"
    kept = json.loads((folder / "noisy-2dev" / "report.json").read_text())
    assert kept["report"]["model"] == data["model"]


def test_compile_report_and_pins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--mesh", "pp=2", "--schedule", "gpipe", "--microbatch-size", "4", "--split", "body.2:end"]
    printed = output(capsys, "compile", HEAD_FIRST, *pins, "-o", "out", "--weights", "--html", "page.html")
    assert "GPipe, 2 microbatches of 4 (global batch 8)" in printed
    assert "body.3-7, head" in printed
    assert "graphpar verify out" in printed
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    assert (folder / "out" / "weights" / "model.safetensors").is_file()
    assert output(capsys, "report", "out") in printed  # the same report, without the model
    page = output(capsys, "report", "out/plan.json", "--html", "again.html")
    assert "Wrote again.html" in page
    assert (folder / "again.html").read_text() == (folder / "page.html").read_text()
    assert "Wrote trace.json" in output(capsys, "report", "out", "--trace", "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    predicted = json.loads((folder / "out" / "report.json").read_text())["report"]["predicted"]
    assert trace["otherData"]["times"] == "seconds" and trace["otherData"]["makespan"] == pytest.approx(
        predicted["pipeline_s"]
    )
    first = next(event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == "0F0")
    assert first["dur"] == pytest.approx(
        1e6 * (predicted["stages"][0]["forward_s"] + predicted["conditions"]["action_s"])
    )
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    slices = [name for name in names if re.fullmatch(r"\d+[FB]\d+", name)]
    assert sorted(slices) == sorted(f"{stage}{kind}{m}" for stage in range(2) for kind in "FB" for m in range(2))
    assert "not both" in message(capsys, "report", "out", "--trace", "trace.json", "--html", "again.html")
    assert output(capsys, "report", "out", "--groups").splitlines() == [
        " Group  over  ranks  groups  of rank 0",
        " pp     pp=2      2       1  0-1",
    ]
    assert json.loads(output(capsys, "report", "out", "--group", "pp", "--json")) == {"pp": [[0, 1]]}
    assert "no group expert: it divides no experts" in message(capsys, "report", "out", "--group", "expert")
    assert "no group batch: dp_replicate, dp_shard and dp_expert have one rank; it has pp." in message(
        capsys, "report", "out", "--group", "batch"
    )
    assert "Give one of" in message(capsys, "report", "out", "--groups", "--group", "pp")


@pytest.mark.costly
@pytest.mark.parametrize("name", ["ZB-H1", "ZB-H2"])
def test_a_schedule_that_torch_lacks_runs_as_a_table(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "--schedule", name.lower(), "-o", "first")
    again = compiled(capsys, HEAD_FIRST, "--plan", "first/plan.json", "-o", "again")

    assert first["plan"]["schedule"] == name and first["plan"]["actions"]["0"][-1].endswith("W3")
    assert again["plan"] == first["plan"]
    assert main(["verify", "first", "--steps", "2"]) == 0
    assert "PASS" in capsys.readouterr().out


def test_a_plan_is_reused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "--schedule", "zbv", "-o", "first")
    again = compiled(capsys, HEAD_FIRST, "--plan", "first/plan.json", "-o", "again")
    assert again["plan"] == first["plan"]
    assert_same_files(folder / "first", folder / "again")


def assert_same_files(first: Path, second: Path) -> None:
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for name in names:
        if name not in (Path("request.json"), Path(".graphpar.json")):  # what was requested, and hashes, also of that
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_sharded_plan_is_reused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the pins of a shard plan, which the plan itself does not hold, and a block that has two definitions."""
    (folder / "wishes.toml").write_text('"body.*.up" = "rowwise"\n"body.3.down.weight" = "S(0)@tp"\n')
    pins = ["--devices", "4", "--mesh", "tp=2,dp_replicate=2", "--shard-plan", "wishes.toml"]
    first = compiled(capsys, HEAD_FIRST, *pins, "-o", "first")
    parameters = first["plan"]["parameters"]
    assert parameters["body.0.up.weight"] == {"dp_replicate": "R", "tp": "S(1)"}
    assert parameters["body.3.down.weight"]["tp"] == "S(0)"
    assert first["plan"]["sharding"]["cost"]["transitions"] > 0
    again = compiled(capsys, HEAD_FIRST, "--plan", "first/plan.json", "-o", "again")
    assert again["plan"] == first["plan"]
    assert_same_files(folder / "first", folder / "again")


def test_a_sharded_plan_that_was_edited(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = compiled(capsys, HEAD_FIRST, "--mesh", "tp=2", "--no-emit")["plan"]

    def edited(change: Callable[[dict[str, Any]], None]) -> str:
        copy = json.loads(json.dumps(plan))
        change(copy)
        (folder / "plan.json").write_text(json.dumps(copy))
        return message(capsys, "compile", HEAD_FIRST, "--plan", "plan.json")

    def decided(text: str, scope: str = "Block", name: str = "/relu#0") -> Callable[[dict[str, Any]], None]:
        return lambda copy: copy["sharding"]["decisions"][scope].update({name: text})

    assert "Block: /relu#0, which no rule allows" in edited(decided("R -> S(0)"))
    assert "can't be read" in edited(decided("R"))
    assert "no decision for Block: /relu#0" in edited(
        lambda copy: copy["sharding"]["decisions"]["Block"].pop("/relu#0")
    )
    unknown = edited(decided("R -> R", name="/relu#1"))
    assert "decides on '/relu#1', which is nothing in the block Block. Did you mean '/relu#0'?" in unknown
    assert "decides on the block 'Blocks'" in edited(lambda copy: copy["sharding"]["decisions"].update(Blocks={}))
    stored = {"body.2.up.weight": {"tp": "R"}}
    assert "body.2.up.weight is stored as R@tp" in edited(lambda copy: copy["parameters"].update(stored))
    assert "no redistribution leads there" in edited(decided("R, R -> R", "", "head/add#0"))
    assert "its mesh has no axis" in edited(lambda copy: copy.update(mesh={"pp": 1}))


def test_a_file_in_the_place_of_a_folder_and_a_folder_in_that_of_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("a")
    (folder / "models").mkdir()
    for command in ("run", "verify", "check"):
        assert "notes.txt is a file; name the folder that graphpar compile wrote." in message(
            capsys, command, "notes.txt"
        )
    assert "models is a folder; name the Python file in it" in message(capsys, "compile", "models")
    assert "models is a folder; name the Python file in it" in message(capsys, "compile", "./models")


def test_what_is_no_program_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint has a plan, and an emitted folder is a package; neither is taken for what is asked for."""
    for name, files in {"ck/5": ("checkpoint.json", "plan.json"), "out": ("__init__.py", "plan.json")}.items():
        (folder / name).mkdir(parents=True)
        for file in files:
            (folder / name / file).write_text("{}")
    (folder / "model.py").touch()
    for command in (["run", "ck/5"], ["verify", "ck/5"], ["check", "ck/5"], ["resume", "ck/5", "--devices", "2"]):
        assert "ck/5 is a checkpoint; name the folder that graphpar compile wrote" in message(capsys, *command)
    for command in (["report", "model.py"], ["what-if", "model.py"], ["diff", "model.py", "out"]):
        assert "model.py is no plan; name the folder that graphpar compile wrote" in message(capsys, *command)
    for command in (["compile", "out"], ["estimate", "out"], ["sweep", "out", "--cluster", "2xCPU"]):
        assert "out is a folder; name the Python file" in message(capsys, *command)
    assert "There is no folder missing" in message(capsys, "what-if", "missing")  # before what is to be different
    assert "ck/5 is itself a checkpoint" in message(capsys, "resume", "out", "--devices", "2", "--checkpoint", "ck/5")


def test_steps_of_a_training_that_goes_on_are_those_made_now(capsys: pytest.CaptureFixture[str]) -> None:
    run_command.show({"steps": 6, "seconds": 2.0, "step_seconds": [0.5], "predicted": None}, stdout_console())
    assert capsys.readouterr().out == "\n 1 step in 2.0 s, including the start of the processes\n"


def test_figures_of_a_plan_that_was_edited_since_are_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("out", "other"):
        compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "--microbatch-size", "4", "-o", out, "--no-weights")
    file = folder / "out" / "plan.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record))  # written again, and the same
    assert "Predicted" in output(capsys, "report", "out")
    assert json.loads(output(capsys, "diff", "out", "other", "--json"))["times"]

    file.write_text(json.dumps(record | {"microbatch_size": 2, "microbatches": 4}))

    printed = " ".join(output(capsys, "report", "out").split())
    assert "4 microbatches of 2" in printed and "Predicted" not in printed
    assert "was edited since report.json was written" in printed and "graphpar estimate MODEL" in printed
    assert "of another plan, and page.html needs them" in message(capsys, "report", "out", "--html", "page.html")
    compared = json.loads(output(capsys, "diff", "out", "other", "--json"))
    assert compared["times"] is None and "out has no prediction, or was edited since" in compared["summary"]


def test_an_axis_that_takes_the_rest_follows_the_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = "--mesh", "pp=2,dp_shard=-1", "--batch", "8", "--json"
    data = json.loads(output(capsys, "estimate", HEAD_FIRST, "--cluster", "4xA100", *mesh))
    assert data["plan"]["mesh"]["dp_shard"] == 2
    compiled(capsys, HEAD_FIRST, "--cluster", "4xA100", "--batch", "8", "-o", "out", "--no-weights")
    answer = json.loads(output(capsys, "what-if", "out", "--mesh", "dp_shard=-1", "--json"))
    assert all(each["mesh"]["dp_shard"] == 4 for each in answer["plans"])


@pytest.mark.parametrize(
    ("change", "command"),
    [
        (lambda record: record.update(report="x"), ["report"]),
        (lambda record: record["report"]["predicted"]["conditions"].update(action_s=1e308), ["report", "--html", "a.html"]),
        (lambda record: record["report"]["predicted"].update(stages=3), ["report"]),
    ],
    ids=["report", "overflow", "stages"],
)  # fmt: skip
def test_a_report_that_was_damaged_is_a_sentence(
    change: Callable[[dict[str, Any]], None], command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "-o", "out", "--no-weights")
    record = json.loads((folder / "out" / "report.json").read_text())
    change(record)
    (folder / "out" / "report.json").write_text(json.dumps(record))
    assert "Compile the model again." in message(capsys, command[0], "out", *command[1:])
    if record["report"] == "x":  # the plan is whole, so its price is that of today
        assert json.loads(output(capsys, "estimate", HEAD_FIRST, "--plan", "out", "--json"))["predicted"]


@pytest.mark.costly
def test_shard_plans_of_the_model_file_and_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command's replaces the model file's; a mesh without tp has no use for either."""
    (folder / "model.py").write_text(LINEAR + "shard_plan = {'0.weight': 'S(0)@tp', '1.weight': 'S(1)@tp'}\n")
    (folder / "own.py").write_text("shard_plan = {'0': 'replicate'}\n")

    def cut(*arguments: str) -> dict[str, Any]:
        parameters = compiled(capsys, "model.py", "--no-emit", "--batch", "4", *arguments)["plan"]["parameters"]
        return {name: spec["tp"] for name, spec in parameters.items() if name in ("0.weight", "1.weight")}

    assert cut("--mesh", "tp=2") == {"0.weight": "S(0)", "1.weight": "S(1)"}
    assert cut("--mesh", "tp=2", "--shard-plan", "own.py")["0.weight"] in ("R", "I")
    assert cut("--mesh", "pp=2") == {}
    (folder / "bad.json").write_text('{"7.weight": "colwise"}')
    for mesh in ("tp=2", "pp=2"):
        said = message(capsys, "compile", "model.py", "--no-emit", "--mesh", mesh, "--shard-plan", "bad.json")
        assert "matches no module and no parameter" in said


def test_the_package_exports_what_shard_plans_need() -> None:
    import graphpar as gp

    assert gp.merge_plans({"encoder": {"q": "colwise"}}) == {"encoder.q": "colwise"}
    with pytest.raises(gp.GraphparError, match="has no '->'"):
        gp.register_rule("mylib::op", "b s d")


def test_a_schedule_table_gives_the_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    data = compiled(capsys, HEAD_FIRST, "--schedule-table", "own.csv", "--no-emit")
    assert data["plan"]["mesh"]["pp"] == 2 and data["plan"]["schedule"] == "custom"
    assert data["plan"]["actions"]["0"] == ["0F0", "0F1", "0B0", "0B1"]
    (folder / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert "rank 1" in message(capsys, "compile", HEAD_FIRST, "--schedule-table", "bad.csv")


def test_no_emit_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(capsys, HEAD_FIRST, "--cluster", "2xCPU", "--no-emit")["out"] is None
    assert list(folder.iterdir()) == []


@pytest.mark.costly
def test_a_cluster_goes_into_the_plan_and_its_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.toml").write_text(
        'nodes = 2\ndevices_per_node = 2\ndevice = "A100"\ninter_node = { bytes_per_s = 1e9 }\n'
    )
    arguments = ["--cluster", "own.toml", "--devices", "4", "--mesh", "tp=2", "-o", "out"]
    plan = compiled(capsys, HEAD_FIRST, *arguments)["plan"]
    assert plan["mesh"]["pp"] == 2 and plan["cluster"]["inter_node"]["bytes_per_s"] == 1e9
    assert "2x2xA100-SXM-80GB" in output(capsys, "report", "out").splitlines()[0]
    again = compiled(capsys, HEAD_FIRST, "--plan", "out", "--no-emit")["plan"]
    assert again["cluster"] == plan["cluster"]

    record = json.loads((folder / "out" / "plan.json").read_text())
    record["cluster"]["nodes"] = 4
    (folder / "edited.json").write_text(json.dumps(record))
    wrong = message(capsys, "compile", HEAD_FIRST, "--plan", "edited.json")
    assert "its mesh has 4 devices, but its cluster 4x2xA100-SXM-80GB has 8" in wrong


@pytest.mark.costly
def test_a_plan_from_before_clusters_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--devices", "2", "-o", "out")
    file = folder / "out" / "plan.json"
    record = json.loads(file.read_text())
    del record["cluster"]
    file.write_text(json.dumps(record))
    assert "2 devices" in output(capsys, "report", "out").splitlines()[0]
    assert compiled(capsys, HEAD_FIRST, "--plan", "out", "--no-emit")["plan"]["cluster"] is None


def test_explain_and_dump(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compile", GPT, "--mesh", "pp=2", "--no-emit", "--explain", "*.weight", "--dump-after", "outline"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "tokens.weight: a parameter [211, 64] on stage 0-1, tied: tokens.weight = head.weight" in captured.out
    assert "# after outline" in captured.err


@pytest.mark.costly
@pytest.mark.parametrize("where", [[], ["--cluster", "2x1xL40S"]], ids=["default", "cluster"])
def test_explain_says_how_tensors_lie_and_what_the_next_best_costs(
    where: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next best costs what a plan does that is pinned to it."""
    arguments = [HEAD_FIRST, "--mesh", "tp=2", "--no-emit", *where]
    found = compiled(capsys, *arguments, "--explain", "body.*.down.weight")
    spec = found["plan"]["parameters"]["body.0.down.weight"]["tp"]
    lines = found["explain"]
    assert lines[1].startswith(f"     is placed as {spec}@tp; next best ")
    assert lines[3] == "     is placed as body.0.down.weight is"
    other, total = re.search(r"next best (\S+)@tp: (.+) a step instead", lines[1]).groups()  # type: ignore[union-attr]
    assert other != spec
    (folder / "other.json").write_text(json.dumps({"body.*.down.weight": f"{other}@tp"}))
    pinned = compiled(capsys, *arguments, "--shard-plan", "other.json", "--explain", "body.2.down.weight")
    predicted = pinned["predicted"]
    assert spread_text(predicted["step_time_s"], predicted["spread_s"]) == total
    assert pinned["explain"][1] == f"     is placed as {other}@tp; pinned by the shard plan: 'body.*.down.weight'"


@pytest.mark.costly
def test_explain_a_module_of_a_cut_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "compile", HEAD_FIRST, "--mesh", "tp=2", "--no-emit", "--explain", "body.1.up", "-v")
    lines = [line.split() for line in printed.splitlines() if line.startswith("     ") and " as " in line]
    assert [line[0] for line in lines[-4:]] == ["takes", "holds", "holds", "gives"]
    assert all(re.search(r" as [RIPS]\S*@tp", " ".join(line)) for line in lines[-4:])
    shares = re.findall(r"^ (?:Steps)? +\w[\w ]* +\d+\.\d\d s +(\d+)%$", printed, re.MULTILINE)
    assert len(shares) > 2 and 95 <= sum(map(int, shares)) <= 105


# ---- what the user must change ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ny = foo + 1\n", "NameError: name 'foo' is not defined (model.py, line 2: y = foo + 1)"),
        ("def f(:\n", "model.py, line 1"),
        ("raise SystemExit('stop')\n", "SystemExit: stop"),
        ("modle = 1\nexample_inputs = ()\n", "It has modle, example_inputs. Did you mean 'modle'?"),
        ("model = int\nexample_input = ()\n", "Did you mean 'example_input'?"),
        ("model = 3\nexample_inputs = ()\n", "model is of type int"),
        (
            "from torch import nn\nmodel = nn.Linear\nexample_inputs = ()\n",
            "class Linear, which needs arguments (in_features, out_",
        ),
        (
            "def model(width): return width\nexample_inputs = ()\n",
            "model is the function model, which needs arguments (width)",
        ),
        ("import torch\nmodel = int\nexample_inputs = torch.ones(1)\n", "write (tensor,)"),
        ("model = int\ndef example_inputs(): return 1 / 0\n", "line 2: def example_inputs(): return 1 / 0"),
        ("import torch\nexample_inputs = (torch.ones(2),)\ndef model():\n    return 1 / 0\n", "line 4: return 1 / 0"),
        ("model = int\nexample_inputs = ()\nsplit_points = 3\n", "split_points is of type int"),
        ("model = int\nexample_targets = ()\n", "It has example_targets.\n"),
        (
            "model = int\nexample_inputs = ()\nexample_targets = (1,)\n",
            "has example_targets, but no loss_fn that takes them",
        ),
        ("model = int\nexample_input = ()\n", "Did you mean 'example_input'?"),
    ],
)
def test_a_broken_model_file(text: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(text)
    assert expected in message(capsys, "compile", "model.py", "--devices", "2")
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["model.py"]


def test_a_class_without_arguments_is_a_factory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self, width=4): super().__init__(width, width)\nmodel = Net\n"
    (folder / "model.py").write_text(
        source + "example_inputs = (torch.ones(4, 4),)\nloss_fn = lambda y: y.square().mean()\n"
    )
    data = compiled(capsys, "model.py", "--weights")
    assert data["model"]["name"] == "Net" and data["model"]["parameters"] == 20
    assert (folder / "model-1dev" / "weights" / "model.safetensors").is_file()


def test_what_generates_is_not_run_without_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs prompts: leave --run out" in message(capsys, "compile", GPT, "--mode", "generate", "--run")
    assert "--cuda-graphs is for --run" in message(capsys, "compile", GPT, "--cuda-graphs")


def test_a_missing_model_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(LINEAR)
    assert "Did you mean 'model.py'?" in message(capsys, "compile", "modle.py")
    assert "the folder nowhere does not exist" in message(capsys, "compile", "nowhere/model.py")
    assert "There is no module no.such.module" in message(capsys, "compile", "no.such.module")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--devices", "2", "--split", "bodi.4"], "Did you mean 'body.4'"),
        (["--mesh", "pp=16", "--batch", "16"], "16 stages are needed, but HeadFirst has only 8 blocks"),
        (["--devices", "2", "--microbatch-size", "3"], "sizes that do: 1, 2, 4, 8"),
        (["--mesh", "tq=2"], "There is no mesh axis 'tq'"),
        (["--mesh", "tp=2", "--shard-plan", "nope.toml"], "There is no shard plan nope.toml"),
        (["--devices", "4", "--mesh", "pp=2,dp_replicate=1,tp=1"], "= 2 != 4 devices"),
        (["--devices", "2", "--schedule", "gpip"], "Did you mean 'GPipe'?"),
        (["--cluster", "some"], "There is no device 'some'; known are"),
        (["--cluster", "nope.toml"], "There is no cluster file nope.toml"),
        (["--cluster", "4xCPU", "--devices", "2"], "--devices is 2, but the cluster 4xCPU has 4"),
        (
            ["--cluster", "2x4xH100", "--mesh", "pp=2,tp=2,dp_replicate=1"],
            "pp(2) * dp_replicate(1) * tp(2) = 4 != 8 devices",
        ),
        (
            ["--cluster", "2xH100", "--mesh", "tp=4"],
            "2 devices don't divide by the mesh's tp=4; take a multiple of 4 devices",
        ),
        (["--dump-after", "outlin"], "Did you mean 'outline'?"),
        (["--devices", "2", "--explain", "bode"], "matches no module"),
        (["--devices", "2", "--explain", "schedul"], "Did you mean 'schedule'?"),
        (["--plan", "nope.json"], "There is no plan nope.json"),
        (["--no-emit", "--weights"], "--no-emit"),
        (["--steps", "3"], "give --run too"),
        (["--html", "nowhere/page.html"], "nowhere"),
    ],
)
def test_wrong_options(arguments: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in message(capsys, "compile", HEAD_FIRST, *arguments)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mesh", "tp=two"], "'two' is not a whole number"),
        (["--mesh", "dp=2"], "Did you mean 'dp_replicate'?"),
        (["--devices", "2", "--schedule", "1f2b"], "Did you mean '1F1B'?"),
        (["--mesh", "tp=2", "--schedule", "zbv"], "the mesh tp=2 has pp=1"),
        (["--cluster", "h100x8"], "Did you mean '8xH100-SXM-80GB'?"),
        (["--devices", "2", "--microbatch-size", "3"], "sizes that do: 1, 2, 4, 8"),
        (
            ["--mesh", "dp_replicate=3"],
            "A global batch of 8 does not divide over dp_replicate=3; each replica takes as many rows. Degrees that do: 1, 2, 4, 8.",
        ),
        (["--mesh", "pp=2", "--edge-layers", "one"], "--edge-layers takes two whole numbers"),
        (["--mesh", "pp=2", "--split", ","], "--split ',' names no module"),
        (["--mesh", "pp=2", "--split", "a", "--layers-per-stage", "2"], "not both"),
        (["--mesh", "pp=2", "--shard-plan", "bad.json"], "colwize"),
        (["--schedule-table", "bad.csv"], "rank 1"),
        (["--dump-after", "outlin"], "Did you mean 'outline'?"),
        (["--plan", "zero.json"], "zero=3 shards state over dp_shard and cp, which have one rank"),
        (["-o", "/proc/x/y"], "/proc/x/y can't be written"),
        (["-o", "bad.csv"], "bad.csv is a file"),
        (["-o", "."], "is the folder that this runs in"),
        (["--html", "/proc/page.html"], "/proc/page.html can't be written"),
    ],
)
def test_a_typo_costs_no_trace(
    arguments: list[str],
    expected: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphpar import api

    plan = gp.plan(example("head_first"), mesh="pp=2").to_json()
    monkeypatch.setattr(api, "export", lambda *_, **__: pytest.fail("traced before the options were checked"))
    (folder / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    (folder / "bad.json").write_text('{"body.*": "colwize"}')
    (folder / "zero.json").write_text(json.dumps(plan | {"zero": 3}))
    assert expected in message(capsys, "compile", HEAD_FIRST, *arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["bad.csv", "bad.json", "zero.json"]


def test_files_that_can_not_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--devices", "2", "-o", "out")
    for option in ("--html", "--trace"):
        assert "can't be written" in message(capsys, "report", "out", option, "/proc/page")
        assert "does not exist" in message(capsys, "report", "out", option, "nowhere/page")
    assert "can't be written" in message(capsys, "calibrate", "-o", "/proc/profile.json")


def test_compiling_again_does_not_lose_what_was_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [HEAD_FIRST, "--mesh", "pp=2", "-o", "out"]
    compiled(capsys, *arguments, "--weights")
    compiled(capsys, *arguments)  # nothing was changed
    train = folder / "out" / "train.py"
    emitted = train.read_text()
    train.write_text("mine")
    (folder / "out" / "my_data.py").write_text("data")
    said = message(capsys, "compile", *arguments)
    assert "changed train.py; added my_data.py" in said and "--force" in said and train.read_text() == "mine"
    assert "Kept       changed train.py; added my_data.py" in output(capsys, "compile", *arguments, "--force")
    assert train.read_text() == emitted
    assert (folder / "out" / "train.py.orig").read_text() == "mine" and (
        folder / "out" / "my_data.py"
    ).read_text() == "data"


def test_a_plan_that_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = compiled(capsys, HEAD_FIRST, "--devices", "2", "--no-emit")["plan"]
    path = folder / "plan.json"

    def edited(**changes: Any) -> str:
        path.write_text(json.dumps({**plan, **changes}))
        return message(capsys, "compile", HEAD_FIRST, "--plan", "plan.json")

    assert "version 7" in edited(version=7)
    assert "does not divide into microbatches of 3" in edited(microbatch_size=3)
    assert (
        "recompute is 'ful'; it must be one of none, pointwise, gathers, gathers+pointwise, selective, full, or budget:SHARE. Did you "
        "mean 'full'" in edited(recompute="ful")
    )
    assert "The plan is for 'GPT'" in edited(model="GPT")
    for wrong in (-1, 2):
        assert f"The plan contradicts itself: microbatches is {wrong}, but a global batch of" in edited(
            microbatches=wrong
        )
    assert "parameters has body.0.upp.weight, which the model does not have. Did you mean 'body.0.up.weight'" in edited(
        parameters={"body.0.upp.weight": {}}
    )
    stored = edited(parameters={"body.0.up.weight": {"tp": "S(0)"}})
    assert "The plan contradicts itself: body.0.up.weight is stored as S(0)@tp, but" in stored
    assert "there is no field 'shedule'. Did you mean 'schedule'?" in edited(shedule="GPipe")
    assert "plan.json, mesh: there is no mesh axis 'zz'" in edited(mesh={"pp": 2, "zz": 1})
    path.write_text(json.dumps(plan))
    assert "--devices is decided by the plan" in message(
        capsys, "compile", HEAD_FIRST, "--plan", "plan.json", "--devices", "4"
    )
    path.write_text("{")
    assert "is not JSON" in message(capsys, "report", "plan.json")


def test_a_damaged_plan_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever command reads it, and before a process is started."""
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2,tp=2", "--schedule", "zbv", "-o", "out")
    file = folder / "out" / "plan.json"
    plan = json.loads(file.read_text())
    compile_it = ("compile", HEAD_FIRST, "--no-emit", "--plan")

    def edited(change: Callable[[dict[str, Any]], None], *command: str) -> str:
        copy = json.loads(json.dumps(plan))
        change(copy)
        file.write_text(json.dumps(copy))
        return message(capsys, *command, "out")

    for command in ("run", "verify", "check", "report"):
        file.write_text("{")
        assert "plan.json is not JSON" in message(capsys, command, "out")
        assert "mesh: the field 'pp' is \"two\"; it must be a whole number" in edited(
            lambda copy: copy["mesh"].update(pp="two"), command
        )
        assert "the field 'mesh' is missing" in edited(lambda copy: copy.pop("mesh"), command)
    for command in ("run", "verify", "check"):
        assert "the field 'interface' is missing" in edited(lambda copy: copy.pop("interface"), command)
    assert "no mesh axis 'ppp'" in edited(lambda copy: copy["mesh"].update(ppp=2), *compile_it)
    assert "'parameters' is missing" in edited(lambda copy: copy.pop("parameters"), *compile_it)
    assert "'version' is missing" in edited(lambda copy: copy.pop("version"), *compile_it)
    assert "'actions' is a list; it must be an object" in edited(lambda copy: copy.update(actions=[]), *compile_it)
    assert "rows for the ranks 'x'" in edited(lambda copy: copy.update(actions={"x": []}), *compile_it)
    assert "actions.0[1]' is 3" in edited(lambda copy: copy.update(actions={"0": ["0F0", 3]}), *compile_it)
    unreadable = {"/relu#0": "R -> X"}
    wrong = edited(lambda copy: copy["sharding"]["decisions"]["Block"].update(unreadable), *compile_it)
    assert "for Block: /relu#0 a decision that can't be read, 'R -> X'" in wrong
    file.write_text(json.dumps(plan))
    kept = json.loads((folder / "out" / "report.json").read_text())
    del kept["report"]["mesh"]
    (folder / "out" / "report.json").write_text(json.dumps(kept))
    assert "can't be read: it lacks 'mesh'" in message(capsys, "report", "out")


def test_every_damaged_field_is_refused_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2,tp=2", "-o", "out")
    file = folder / "out" / "plan.json"
    plan = json.loads(file.read_text())

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The first fields of each object and list."""
        inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
        for key, item in inner if len(path) == 0 else inner[:3]:
            yield (*path, key)
            yield from places(item, (*path, key))

    for *outer, key in places(plan):
        copy = json.loads(json.dumps(plan))
        holder = copy
        for name in outer:
            holder = holder[name]
        holder[key] = [[True]]
        file.write_text(json.dumps(copy))
        with pytest.raises(gp.GraphparError, match=r"plan\.json"):
            read_program("out")


def test_a_damaged_program_says_which_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "-o", "out")
    blocks, stage = folder / "out" / "blocks.py", folder / "out" / "stage_1.py"
    text, code = blocks.read_text(), stage.read_text()
    commands = ("run", "verify", "check")
    blocks.unlink()
    for command in commands:
        said = message(capsys, command, "out")
        assert "has no blocks.py, which stage_0.py, line " in said and "graphpar_program" not in said
    blocks.write_text(text.replace("class Block(", "class Blocks("))
    for command in commands:
        assert re.search(r"stage_0.py, line \d+: blocks.py has no Block;", message(capsys, command, "out"))
    blocks.write_text(text)
    stage.write_text(code + "\ndef broken(:\n")
    line = len(code.splitlines()) + 2
    for command in commands:
        assert f"stage_1.py, line {line}: invalid syntax: def broken(:" in message(capsys, command, "out")


@pytest.mark.costly
def test_weights_of_another_model_are_refused_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2,dp_replicate=2", "-o", "out")
    file = folder / "out" / "weights" / "model.safetensors"
    save_file({"other.weight": torch.ones(2)}, str(file))
    assert main(["run", "out", "--steps", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.count("has no value for") == 1 and "rank" not in said


def test_a_folder_that_is_no_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / "notes.txt").write_text("mine")
    assert "something other" in message(capsys, "compile", HEAD_FIRST, "--devices", "2", "-o", "kept")
    assert [path.name for path in (folder / "kept").iterdir()] == ["notes.txt"]
    for command in ("run", "verify", "report"):
        assert "no plan.json" in message(capsys, command, "kept")


def test_exit_codes_are_those_of_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \|", page.partition("| exit code | meaning |")[2], re.MULTILINE)

    assert [str(code) for code in (DONE, CHECK_FAILED, USER_ERROR, OUR_BUG)] == rows


def test_our_own_bugs_are_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("graphpar.cli.passes_command.STEPS", None)
    assert main(["passes"]) == 3
    assert "Traceback" in capsys.readouterr().err


# ---- model files -----------------------------------------------------------------------------------------------


def test_a_file_is_imported_once(folder: Path) -> None:
    from graphpar.frontend.modelfile import load_model_file

    (folder / "helper.py").write_text("VALUE = 4\n")
    (folder / "model.py").write_text(
        "import torch\nfrom helper import VALUE\nopen('count', 'a').write('.')\n"
        "model = torch.nn.Linear(VALUE, VALUE)\nexample_inputs = {'input': torch.ones(2, VALUE)}\n"
        "shard_plan = {'weight': 'colwise'}\n"
    )
    first, second = load_model_file("model.py"), load_model_file(folder / "model.py")
    assert first.model is second.model
    assert (folder / "count").read_text() == "."
    assert list(first.kwargs) == ["input"] and first.args == () and first.targets == ()
    assert first.shard_plan == {"weight": "colwise"}
    assert str(folder) not in sys.path


def test_a_dotted_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "some_package").mkdir()
    (folder / "some_package" / "__init__.py").write_text("")
    (folder / "some_package" / "toy.py").write_text(LINEAR)
    data = compiled(capsys, "some_package.toy", "--devices", "2", "--batch", "4")
    assert data["out"] == "toy-2dev"
    assert json.loads((folder / "toy-2dev" / "plan.json").read_text())["model_file"] == "some_package.toy"


# ---- run and verify --------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_run_makes_weights_and_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, HEAD_FIRST, "--mesh", "dp_replicate=2", "--batch", "12", "-o", "out", "--no-weights")
    assert not (folder / "out" / "weights").exists()
    data = json.loads(output(capsys, "run", "out", "--steps", "2", "--json"))
    assert data["devices"] == 2 and len(data["loss"]) == len(data["step_seconds"]) == 2
    assert data["predicted"]["cluster"] == "2xCPU" and data["predicted"]["step_time_s"] > 0
    assert data["loss"][1] < data["loss"][0]
    assert (folder / "out" / "weights" / "model.safetensors").is_file()
    assert not edited_files(folder / "out")  # so that it is compiled again without a word


def test_weights_are_written_where_they_are_small_or_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = folder / "out" / "weights"
    for limit, options, written in (
        (2**30, [], True),
        (100, [], False),
        (100, ["--weights"], True),
        (2**30, ["--no-weights"], False),
    ):
        monkeypatch.setattr(compile_command, "SMALL_BYTES", limit)
        printed = output(capsys, "compile", HEAD_FIRST, "-o", "out", *options)
        assert weights.exists() is written, options
        if limit == 100 and not written:
            assert "more than compile writes by default; --weights writes them" in printed
    missing = no_weights(load_manifest("out"))
    assert "there are no weights in out: name a safetensors file" in missing
    typed = shlex.split(missing.partition(": graphpar ")[2])
    assert main(typed) == 0 and weights.exists()


def test_a_prediction_for_other_devices_is_said_to_be_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = compiled(capsys, HEAD_FIRST, "--cluster", "2x1xL40S", "--mesh", "pp=2", "-o", "out")
    record = json.loads((folder / "out" / "plan.json").read_text())
    found = run_command.prediction(folder / "out", record, 2)
    assert found is not None and not found["here"]
    assert found["step_time_s"] == plan["predicted"]["step_time_s"]

    def torchrun(*_: Any, on_stdout: Callable[[str], None], **__: Any) -> LaunchResult:
        on_stdout("step    0   loss 1.0   0.100 s")
        return LaunchResult("", "", 1.0)

    monkeypatch.setattr("graphpar.cli.run_command.torchrun", torchrun)
    printed = output(capsys, "run", "out", "--steps", "1")
    assert "for 2x1xL40S-48GB" in printed and "which this machine does not have" in printed
    assert " step    0   loss 1.0   0.100 s\n" in printed


def test_verify_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from graphpar import verification
    from graphpar.cli import verify_command

    monkeypatch.setattr(verify_command, "program_folder", Path)
    for error, code, verdict in ((1e-7, 0, "PASS"), (2e-2, 1, "FAIL")):
        made = verification.Verification(
            2, 1, [1.5], [1.5], {"loss": 0.0, "gradient": error}, {"gradient": "a.b"}, {"loss": 1e-5, "gradient": 1e-5}
        )
        monkeypatch.setattr(verification, "verify_parts", lambda folder, made=made, **_: made)
        assert main(["verify", "out"]) == code
        printed = capsys.readouterr().out
        assert printed.rstrip().endswith(verdict) and "a.b" in printed
        assert main(["verify", "out", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_phases_are_lines_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with phases() as phase:
        phase("one")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with phases() as phase:
        phase("two")
    assert "0 s] two" in capsys.readouterr().err


def test_verify_says_how_it_was_decided_and_what_inference_was_compared_on(capsys: pytest.CaptureFixture[str]) -> None:
    from graphpar.cli.verify_command import show
    from graphpar.verification import Difference, Verification

    native = Verification(2, 4, [1.0], [1.0], {"gradient": 2e-2}, {"gradient": "a.b"}, {"gradient": 1e-5})
    decided = replace(native, max_error={"gradient": 1e-12}, decided_in="fp64", native=native, notes=["again in fp64"])
    outputs = Verification(
        2, 4, [], [], {"output": 1e-2}, {"output": "logits"}, {"output": 1e-5}, data="rows drawn again"
    )
    outputs.first_difference = Difference(1, "output", "logits", 1e-2)

    show(decided.to_json(), Console())
    assert capsys.readouterr().out.rstrip().endswith("PASS, decided in fp64")
    show(outputs.to_json(), Console())
    printed = capsys.readouterr().out
    assert "outputs of 4 batches" in printed and "loss" not in printed and "rows drawn again" in printed
    assert "the first difference: output of logits, step 1 (1.0e-02)" in printed and printed.rstrip().endswith("FAIL")


@pytest.mark.costly
def test_compile_says_what_each_step_took(folder: Path, traced_anew: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The list of steps with the seconds of each, which are most of those of the command."""
    data = compiled(capsys, HEAD_FIRST, "--mesh", "tp=2", "-o", "out")
    steps = {row["name"]: row for row in data["steps"]}
    assert list(steps) == [row.name for row in STEPS]
    assert {"requires", "ensures", "conflicts", "checked_by", "seconds"} <= steps["share_loss"].keys()
    assert all(row["seconds"] >= 0 for row in steps.values())
    total = sum(row["seconds"] for row in steps.values())
    rounding = 5e-5 * (len(steps) + 1)
    assert total / data["seconds"]["total"] > 0.5  # what is between them waits where the machine is loaded
    assert total <= data["seconds"]["total"] + rounding
