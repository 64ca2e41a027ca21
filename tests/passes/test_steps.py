"""The list of steps: what each requires is enforced, users put passes of their own between, optional ones can be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphpar as gp
from graphpar.cli.main import main
from graphpar.passes.table import STEPS, Pass, PassList, run_passes

aten = torch.ops.aten
X, Y = torch.randn(8, 16), torch.randint(4, (8,))


def gated() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)), nn.Linear(16, 4))


def export(**options: object) -> gp.Program:
    return gp.export(gated(), (X,), loss_fn=nn.functional.cross_entropy, targets=(Y,), **options)  # type: ignore[arg-type]


def doubled(program: gp.Program) -> gp.Program:
    """GELU twice as large: wrong, so that it can be seen."""
    for node in list(program.graph.nodes):
        if node.target is aten.gelu.default:
            with program.graph.inserting_after(node):
                twice = program.graph.call_function(aten.mul.Tensor, (node, 2.0))
            twice.meta = dict(node.meta)
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, own=twice: user is not own)
    return program


def test_every_step_has_what_it_requires_before_it() -> None:
    names = [step.name for step in STEPS]

    for place, step in enumerate(STEPS):
        assert set(step.requires) <= set(names[:place]), step.name


def test_a_users_pass_runs_where_it_was_put() -> None:
    seen: list[str] = []

    export(passes=gp.PASSES.insert_after("simplify", doubled), after_pass=lambda step, _: seen.append(step.name))

    assert seen[0] == "capture" and seen[seen.index("doubled") - 1] == "simplify"


@pytest.mark.costly
def test_verify_holds_a_users_pass_against_the_model() -> None:
    program = export(passes=gp.PASSES.insert_after("simplify", doubled))

    assert not gp.verify(gp.partition(program, gp.plan(program, mesh={"tp": 2})), steps=1).ok


def test_a_pass_before_what_it_requires_is_refused() -> None:
    rows = {row.name: row for row in gp.PASSES}
    others = [row for row in gp.PASSES if row.name not in ("inline_regions", "simplify")]
    wrong = PassList((rows["inline_regions"], rows["simplify"], *others))

    with pytest.raises(gp.GraphparError, match="The pass simplify requires assign_streams, which comes after it"):
        export(passes=wrong)


def test_a_list_without_a_pass_that_others_need_is_refused() -> None:
    with pytest.raises(
        gp.GraphparError, match="The pass fill_unchosen requires functionalize, which is not in the list"
    ):
        export(passes=PassList(row for row in gp.PASSES if row.name != "functionalize"))


def test_conflicts_are_refused() -> None:
    early = Pass(
        "early", __name__, ("capture",), "nothing", "nothing", ("outline",), run=lambda p: p, check=lambda p: True
    )

    assert "early" in gp.PASSES.insert_before("outline", early).names()
    with pytest.raises(gp.GraphparError, match="The pass early must not come after outline"):
        export(passes=gp.PASSES.insert_after("outline", early))


@pytest.mark.parametrize(
    "insert, message",
    [
        (lambda: gp.PASSES.insert_after("simplfy", doubled), "no pass 'simplfy'.*Did you mean 'simplify'"),
        (lambda: gp.PASSES.insert_after("simplify", gp.PASSES[0]), "already a pass 'inline_regions'"),
        (lambda: gp.PASSES.insert_after("simplify", "doubled"), "a function from Program to Program, not 'doubled'"),
        (lambda: export(passes=[doubled]), "passes holds <function doubled .*which is not a pass"),
        (lambda: export(skip=["simplify"]), "simplify can't be skipped; those that can are idioms, outline, share_helpers"),
        (lambda: export(passes=gp.PASSES.insert_after("simplify", lambda program: None)), "returned a NoneType"),
        (lambda: export(passes=gp.PASSES.insert_after("outline", doubled), skip=["outline"]), "doubled requires outline, which is skipped"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(insert: object, message: str) -> None:
    with pytest.raises(gp.GraphparError, match=message):
        insert()  # type: ignore[operator]


@pytest.mark.costly
def test_programs_without_the_optional_passes_are_exact() -> None:
    program = export(skip=["outline", "share_helpers"])

    assert not program.blocks
    assert gp.verify(gp.partition(program, gp.plan(program, mesh={"tp": 2})), steps=2).ok


def test_a_model_file_brings_its_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nimport graphpar as gp\n"
        "def mine(program):\n    return program\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\nexample_inputs = (torch.randn(4, 4),)\n"
        "loss_fn = lambda out: out.mean()\npasses = gp.PASSES.insert_after('simplify', mine)\n"
    )
    arguments = ["compile", str(tmp_path / "model.py"), "--mesh", "pp=2", "--no-emit", "--json"]

    assert main([*arguments, "--dump-after", "mine"]) == 0
    assert "# after mine: " in capsys.readouterr().err
    assert main([*arguments, "--dump-after", "yours"]) == 2
    assert "it takes capture, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "step, shown",
    [
        ("capture", "def "),
        ("plan", "Plan "),
        ("shard", "def "),
        ("exchange_experts", "def "),
        ("split", "def "),
        ("join_products", "def "),
    ],
)
def test_results_of_steps_are_printed(step: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "examples/gpt.py", "--mesh", "pp=2", "--no-emit", "--json", "--dump-after", step]) == 0

    assert f"# after {step}: " in (printed := capsys.readouterr().err) and shown in printed


def test_each_pass_is_checked_after_it_ran() -> None:
    def broken(program: gp.Program) -> gp.Program:
        program.graph.placeholder("nobody_knows")
        return program

    with pytest.raises(
        gp.GraphparError, match="pass broken failed its check: the graph is complete, and its inputs are"
    ):
        export(passes=gp.PASSES.insert_after("simplify", broken))


def test_later_steps_need_their_passes_too() -> None:
    early = PassList(row for row in gp.PASSES if row.name not in ("share_loss", "outline", "share_helpers"))

    with pytest.raises(gp.GraphparError, match="The step plan requires the pass share_loss, which is not in the list"):
        export(passes=early)
    with pytest.raises(gp.GraphparError, match="requires the pass share_loss"):
        export(passes=gp.PASSES[:4])


def dropped(program: gp.Program) -> gp.Program:
    for node in list(program.graph.nodes):
        if node.target is aten.gelu.default:
            with program.graph.inserting_after(node):
                made = program.graph.call_function(aten.dropout.default, (node, 0.5, True))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, delete_user_cb=lambda user, own=made: user is not own)
    return program


def test_what_was_provided_must_still_hold() -> None:
    with pytest.raises(
        gp.GraphparError, match="pass dropped undid what assign_streams provides: no operator draws from torch"
    ):
        export(passes=gp.PASSES.insert_after("simplify", dropped))
    assert export(passes=gp.PASSES.insert_before("assign_streams", dropped)).random_calls == 4  # there it gets streams


def raising(program: gp.Program) -> gp.Program:
    return program.nothing_here  # type: ignore[attr-defined, no-any-return]


def unsorted(program: gp.Program) -> gp.Program:
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    calls[0].prepend(calls[-1])
    return program


def forgetful(program: gp.Program) -> gp.Program:
    for node in list(program.graph.nodes):
        if node.target is aten.gelu.default:
            with program.graph.inserting_before(node):
                node.replace_all_uses_with(program.graph.call_function(aten.relu.default, node.args))
    return program


@pytest.mark.parametrize(
    "own, message",
    [
        (raising, r"The pass raising raised AttributeError: .*test_steps.py:\d+\)"),
        (lambda program, more: program, "raised TypeError"),
        (unsorted, "The pass unsorted left a malformed graph"),
        (
            forgetful,
            r"left the operator relu.* without metadata; give it that of the operator it replaces: new.meta = dict\(old.meta\)",
        ),
    ],
)
def test_what_goes_wrong_in_a_users_pass_names_it(own: object, message: str) -> None:
    with pytest.raises(gp.GraphparError, match=message):
        export(passes=gp.PASSES.insert_after("simplify", own))  # type: ignore[arg-type]


def test_what_a_pass_leaves_unused_goes() -> None:
    def kept(program: gp.Program) -> gp.Program:
        for node in list(program.graph.nodes):
            if node.target is aten.gelu.default:
                with program.graph.inserting_before(node):
                    made = program.graph.call_function(aten.relu.default, node.args)
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
        return program

    program = export(passes=gp.PASSES.insert_after("simplify", kept))

    assert "gelu" not in str(program)


@pytest.mark.parametrize(
    "passes, expected",
    [
        ("[1, 2]", "passes holds 1, which is not a pass"),
        ("[*gp.PASSES, lambda program: program]", "put a function between them with graphpar.PASSES.insert_after"),
        ("5", "passes is a int"),
        ("gp.PASSES[:4]", "requires the pass share_loss"),
        ("lambda: gp.PASSES", ""),
        ("list(gp.PASSES)", ""),
    ],
)
def test_passes_of_a_model_file_may_be_a_function_or_a_list(
    passes: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nimport graphpar as gp\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\nexample_inputs = (torch.randn(4, 4),)\n"
        f"loss_fn = lambda out: out.mean()\npasses = {passes}\n"
    )

    code = main(["compile", str(tmp_path / "model.py"), "--mesh", "pp=2", "--no-emit", "--json"])

    assert code == (2 if expected else 0) and expected in capsys.readouterr().err


def test_results_say_what_each_pass_took() -> None:
    seen: list[gp.Program] = []
    export(after_pass=lambda step, program: seen.append(program) if step.name == "capture" else None)

    _, results = run_passes(seen[0])

    assert [result.name for result in results] == gp.PASSES.names() and all(result.seconds >= 0 for result in results)
