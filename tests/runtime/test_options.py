"""An option is one record: one that is added there is everywhere."""

from __future__ import annotations

import json
import pydoc
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphpar as gp
from graphpar.cli.parser import build_parser, given_options
from graphpar.passes.planning.plan_request import plan_request
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.options import Decisions, Request, check_decisions, options_of

ROOT = Path(__file__).parents[2]
FIELD = """    zero1_by: str | Any = option("""
DUMMY = """    dummy_level: int | Any = option(
        LEVEL, "a level of nothing", group="pins", usual=1, legal=_legal_dummy,
    )
"""
LEGAL = """
def _legal_dummy(level: int, given: Decisions, mesh: Mesh, mode: str) -> None:
    if level > mesh.tp + 1:
        raise GraphparError(f"dummy_level={level} requires tp={level - 1} or more.")


# ---- records"""
SCRIPT = """
import json, sys, torch
import graphpar as gp
from graphpar.cli.main import main
from graphpar.report.difference import Side, difference
from graphpar.runtime.manifest import load_manifest

program = gp.export(torch.nn.Linear(4, 4), (torch.zeros(4, 4),), loss_fn=lambda y: y.sum())
plans = {level: gp.plan(program, mesh="tp=2", dummy_level=level) for level in (None, 3)}
folder = gp.partition(program, plans[3]).save("out")
refused = []
for given in ({"dummy_level": 7}, {"dummy_level": 3}):
    try:
        gp.plan(program, mesh="pp=1", **given)
    except gp.GraphparError as error:
        refused.append(str(error))
print(json.dumps({
    "usual": plans[None].to_json()["dummy_level"],
    "kept": json.loads((folder / "plan.json").read_text())["dummy_level"],
    "read": gp.Plan.load(folder).dummy_level,
    "manifest": load_manifest(folder).dummy_level,
    "diff": difference(Side("a", plans[None], None), Side("b", plans[3], None))["decisions"],
    "report": json.loads((folder / "report.json").read_text())["report"]["dummy_level"],
    "about": "dummy_level: a level of nothing" in gp.plan.__doc__,
    "refused": refused,
}))
"""


def test_an_option_that_is_added_is_everywhere(tmp_path: Path) -> None:
    package = tmp_path / "graphpar"
    shutil.copytree(ROOT / "graphpar", package, ignore=shutil.ignore_patterns("__pycache__"))
    record = package / "runtime" / "options.py"
    text = record.read_text()
    assert text.count(FIELD) == text.count("\n# ---- records") == 1
    record.write_text(text.replace(FIELD, DUMMY + FIELD).replace("\n# ---- records", LEGAL))

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(tmp_path)},
            timeout=120,
        )

    found = ran("-c", SCRIPT)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == {
        "usual": 1, "kept": 3, "read": 3, "manifest": 3, "diff": [{"name": "dummy_level", "a": 1, "b": 3}], "report": 3, "about": True,
        "refused": ["dummy_level is 7; it must be one of 0, 1, 2, 3.", "dummy_level=3 requires tp=2 or more."],
    }  # fmt: skip
    assert "--dummy-level {0,1,2,3}" in ran("-m", "graphpar", "compile", "--help").stdout
    assert "--dummy-level" in ran("-m", "graphpar", "completion", "bash").stdout
    given = ran("-m", "graphpar", "compile", "no_such.py", "--dummy-level", "3", "--plan", "out")
    assert "--dummy-level is decided by the plan out" in given.stderr


def test_every_option_is_documented() -> None:
    for name, known in options_of(Request).items():
        assert known.help and not known.help.endswith("."), name


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", options_of(Decisions))
def test_usual_values_are_values_and_legal_on_one_device(name: str) -> None:
    known = options_of(Decisions)[name]
    if known.usual not in (None, 0, ()):
        assert known.kind.check(name, known.usual) == known.usual
    check_decisions(Request(**{name: known.usual}), gp.Mesh())


def test_a_share_may_be_in_percent() -> None:
    parse = options_of(Request)["memory_headroom"].kind.parse
    assert parse is not None and (parse("5%"), parse("0.05")) == (0.05, 0.05)
    for text in ("100%", "%", "5%%"):
        with pytest.raises(gp.GraphparError):
            parse(text)


def test_an_option_of_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(gp.GraphparError, match=r"no option 'microbatchsize'[.] Did you mean 'microbatch_size'"):
        plan_request(microbatchsize=2)


@pytest.mark.parametrize("name", [name for name, known in options_of(Request).items() if known.kind.flag])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(gp.GraphparError, match=f"{name} is 'no'; it must be True or False"):
        plan_request(**{name: "no"})


def test_help_of_plan_is_that_of_its_options() -> None:
    text = pydoc.render_doc(gp.plan, renderer=pydoc.plaintext)
    assert text.startswith("Python Library Documentation: function plan") and "zero1_by: 'str | Any' = None" in text
    assert all(f"    {name}: " in text for name in options_of(Request))


def test_plans_that_said_how_they_would_divide_state_are_read() -> None:
    """As they were written before zero1_by was left open where there is nothing to divide."""
    data = gp.plan(
        gp.export(torch.nn.Linear(4, 4), (torch.zeros(4, 4),), loss_fn=torch.sum), mesh="dp_replicate=2"
    ).to_json()
    assert gp.Plan.from_json(data | {"zero1_by": "contiguous"}) == gp.Plan.from_json(data)


def test_few_options_are_given_beside_a_plan() -> None:
    beside = {name for name, known in options_of(Request).items() if known.beside_plan}
    assert beside == {"allow_batch_coupling", "compile", "top"}


def test_combinations_that_the_documentation_lists_are_refused() -> None:
    page = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    rows = page.partition("| combination | why |")[2].partition("\n\n")[0]
    listed = [row.split("`")[1] for row in rows.splitlines() if row.startswith("| `")]
    assert len(listed) > 5
    for line in listed:
        options = build_parser().parse_args(["compile", "model.py", *shlex.split(line)])
        with pytest.raises(gp.GraphparError):
            asked = plan_request(**given_options(options))
            check_decisions(asked, Mesh(**asked.mesh), options.mode or "train")
            pytest.fail(f"{line} is taken")
