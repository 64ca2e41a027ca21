"""The types of emitted programs: right ones pass at any world size, and planted faults are found, in the text and in the graph."""

from __future__ import annotations

import ast
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import spmd_types._checker
import torch.distributed as dist
from torch import fx
from torch.nn import functional as F

import graphpar as gp
from graphpar.cli.main import main
from graphpar.emitted import collectives
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, operator_name
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.check_types import check_types
from graphpar.passes.sharding.lowering import lower
from graphpar.passes.sharding.problem import build_problem
from graphpar.verification.type_check import CheckResult, check_folder
from tests.models.architectures import program_of
from tests.models.whole_modules import with_whole_modules
from tests.tools.programs import example, norms_pinned

Emit = Callable[..., Path]


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Emit:
    """``emitted("bert", tp=2)``: the folder of an example's program, made once."""
    made: dict[str, Path] = {}

    def emit(name: str, global_batch: int | None = None, **mesh: int) -> Path:
        key = f"{name} {mesh} {global_batch}"
        if key not in made:
            program = example(name)
            parts = gp.partition(program, gp.plan(program, mesh=mesh, global_batch=global_batch))
            made[key] = parts.save(tmp_path_factory.mktemp("emitted") / "out")
        return made[key]

    return emit


# ---- right programs --------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama", "bert", "gpt_dropout", "mixtral", "unet"])
@pytest.mark.sampled(1 / 2)
def test_examples_pass_with_every_operator_checked(name: str, emitted: Emit) -> None:
    result = check_folder(emitted(name, tp=2))

    assert result.problems == []
    assert result.operators_checked > 50
    assert result.unchecked == {}


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2_tiny", "mixtral"])
@pytest.mark.sampled(1 / 2)
def test_stages_replicas_and_tensor_parallelism_together(name: str, emitted: Emit) -> None:
    result = check_folder(emitted(name, pp=2, dp_replicate=2, tp=2))

    assert (result.ok, result.world_size, result.stages) == (True, 8, 2), result.problems


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp_replicate": 2}, {"pp": 1}], ids=str)
def test_programs_without_collectives_pass(mesh: dict[str, int], emitted: Emit) -> None:
    assert check_folder(emitted("gpt2_tiny", **mesh)).ok


@pytest.mark.costly
@pytest.mark.parametrize("replicas", [1024, 2500])
def test_thousands_of_ranks_are_checked_in_seconds_in_one_process(replicas: int, emitted: Emit) -> None:
    folder = emitted("gpt_dropout", replicas, tp=4, dp_replicate=replicas)

    begin = time.monotonic()
    result = check_folder(folder)

    assert (result.ok, result.world_size) == (True, 4 * replicas), result.problems
    assert time.monotonic() - begin < 60
    assert not dist.is_initialized()


# ---- faults in the text ----------------------------------------------------------------------------------------

STAGE = '''import torch
from torch import nn
from torch.nn import functional as F

from .collectives import all_gather_invariant, all_reduce, all_reduce_both, first_only, rank, reduce_scatter, shard
from .collectives import sum_gradient, vocab_cross_entropy, vocab_embedding


class Stage0(nn.Module):
    """One layer as Megatron has it; the table, up and the head are cut by rows, down by columns."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.empty(6))
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, *, ids, target, valid_labels):
        h = all_reduce(vocab_embedding(ids, self.table.weight, "tp"), "tp")
        x = F.layer_norm(h, (6,), self.norm.weight, self.norm.bias)
        x = sum_gradient(x, "tp") * self.gain
        x = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        x = F.linear(x, self.down.weight)
        h = h + all_reduce(x, "tp") + self.down.bias
        logits = F.linear(sum_gradient(h, "tp"), self.head.weight)
        loss = vocab_cross_entropy(logits.flatten(0, 1), target.flatten(), "tp", 8, reduction="sum")
        return loss / valid_labels
'''
CUT = {"table.weight": "S(0)", "up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)", "head.weight": "S(0)"}
WHOLE = {"table.weight": [8, 6], "up.weight": [14, 6], "up.bias": [14], "down.weight": [6, 14], "head.weight": [8, 6]}


def _written(folder: Path, stage: str = STAGE, **types: str) -> Path:
    """An emitted folder with this stage, on dp_replicate=2 x tp=2; ``types`` replaces those of parameters on tp."""
    given = {"shape": [8, 5], "dtype": "int64", "batch_dim": 0}
    tensors = {**CUT, "gain": "R", **{name.replace("__", "."): kind for name, kind in types.items()}}
    plan = {
        "version": 2,
        "mesh": {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "ep": 1, "tp": 2},
        "schedule": "1F1B",
        "microbatches": 2,
        "microbatch_size": 2,
        "global_batch": 8,
        "mode": "train",
        "actions": None,
        "stages": [{"index": 0, "rank": 0, "modules": []}],
        "parameters": {name: {"tp": kind} for name, kind in tensors.items()},
        "interface": {
            "inputs": [{"name": "ids", "role": "input", **given}, {"name": "target", "role": "target", **given}],
            "counts": {"names": ["valid_labels"], "inputs": ["target"]},
            "stages": [
                {
                    "class": "Stage0",
                    "file": "stage_0.py",
                    "inputs": ["ids", "target"],
                    "counts": ["valid_labels"],
                    "receives": [],
                    "sends": [],
                }
            ],
            "outputs": [{"name": "loss", "shape": [], "dtype": "float32", "batch_dim": None}],
            "shapes": WHOLE,
            "ties": [],
        },
    }
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "__init__.py").write_text("")
    (folder / "stage_0.py").write_text(stage)
    (folder / "collectives.py").write_text(Path(str(collectives.__file__)).read_text())
    return folder


def _faulty(folder: Path, *edits: tuple[str, str]) -> CheckResult:
    text = STAGE
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return check_folder(_written(folder, text))


def test_a_layer_written_by_hand_passes(tmp_path: Path) -> None:
    result = check_folder(_written(tmp_path / "out"))

    assert (result.problems, result.unchecked, result.world_size) == ([], {}, 4)


FAULTS = {
    "an all-reduce is dropped": (
        [('all_reduce(x, "tp")', "x")],
        'stage_0.py:27 (h = h + x + self.down.bias): Invariant type on axis tp cannot mix with other types. Found types: [I, P]',
    ),
    "an all-reduce is dropped where the sum is R": (
        [('all_reduce(vocab_embedding(ids, self.table.weight, "tp"), "tp")',
          'all_reduce_both(vocab_embedding(ids, self.table.weight, "tp"), "tp")'),
         ("F.layer_norm(h, (6,), self.norm.weight, self.norm.bias)", "F.layer_norm(h, (6,))"),
         ("sum_gradient(x, \"tp\")", "x"),
         ('h + all_reduce(x, "tp") + self.down.bias', "h + x")],
        "Partial type on axis tp in a linear op requires all operands to be Partial",
    ),
    "an I is taken for an R": (
        [('sum_gradient(x, "tp") * self.gain', "x * self.gain")],
        "Invariant type on axis tp cannot mix with other types. Found types: [I, R] In mul(",
    ),
    "an all-reduce without the one of the gradient": (
        [('sum_gradient(h, "tp"), self.head', "h, self.head")],
        "Invariant type on axis tp cannot mix with other types. Found types: [I, V] In matmul(",
    ),
    "an all-reduce with one too many of the gradient": (
        [('all_reduce(x, "tp")', 'all_reduce_both(x, "tp")')],
        "Invariant type on axis tp cannot mix with other types. Found types: [I, R] In add(",
    ),
    "a sum is taken twice": (
        [('all_reduce(x, "tp")', 'all_reduce(all_reduce(x, "tp"), "tp")')],
        "expects its input to be P on axis tp, but it is I",
    ),
    "a slice of a partial sum": (
        [('all_reduce(x, "tp")', 'shard(x, "tp", dim=1)')],
        "expects its input to be R on axis tp, but it is P",
    ),
    "a bias that every rank adds to a partial sum": (
        [("F.linear(x, self.down.weight)", "F.linear(x, self.down.weight, self.down.bias)")],
        "Found types: [P, I] In add(",
    ),
    "a nonlinear function of a partial sum": (
        [("F.linear(x, self.down.weight)", "F.linear(x, self.down.weight).tanh()")],
        "Partial type on axis tp cannot propagate through non-linear ops",
    ),
    "a table that is not cut": (
        [("vocab_embedding(ids, self.table.weight", "vocab_embedding(ids, self.gain.expand(4, 6)")],
        "vocab_embedding takes weight S(0), ids R on tp, not ids V@dp_replicate, R@tp, weight R@dp_replicate, R@tp",
    ),
    "logits that are not cut": (
        [("self.head.weight)\n", 'self.head.weight)\n        logits = all_reduce_both(logits, "tp")\n')],
        "vocab_cross_entropy takes logits S(1), target R on tp, not logits V@dp_replicate, R@tp, target V@dp_replicate, R@tp",
    ),
    "logits that are a partial sum": (
        [("self.head.weight)\n", 'self.head.weight)\n        logits = first_only(all_reduce_both(logits, "tp"), "tp")\n')],
        "vocab_cross_entropy takes logits S(1), target R on tp, not logits V@dp_replicate, P@tp, target",
    ),
    "logits that are a partial sum over replicas": (
        [("self.head.weight)\n", 'self.head.weight)\n        logits = all_reduce(logits, "dp_replicate")\n'
                                 '        logits = first_only(sum_gradient(logits, "dp_replicate"), "dp_replicate")\n')],
        "Partial type on axis dp_replicate",
    ),
    "labels that are cut": (
        [("target.flatten()", 'shard(target, "tp", dim=1).repeat(1, 2)[:, :5].flatten()')],
        "vocab_cross_entropy takes logits S(1), target R on tp, not logits V@dp_replicate, V@tp, target V@dp_replicate, V@tp",
    ),
    "a number that differs by rank": (
        [("h = h + all_reduce", 'h = h * (1 + rank("tp")) + all_reduce')],
        "Invariant type on axis tp cannot mix with other types. Found types: [I, V] In mul(",
    ),
    "a loss that each rank has a part of": (
        [("return loss / valid_labels", "return logits.sum() / valid_labels")],
        "it returns loss as V on tp, but it must be whole (I)",
    ),
    "a loss whose gradient is counted on each rank": (
        [("return loss / valid_labels", 'return sum_gradient(loss, "tp") / valid_labels')],
        "it returns loss as R on tp, but it must be whole (I)",
    ),
    "a loss that is the same on every replica": (
        [("return loss / valid_labels", 'return all_reduce(loss, "dp_replicate") / valid_labels')],
        "it returns loss as I on dp_replicate, but it must be a share of each replica",
    ),
    "pieces that are added to a partial sum": (
        [("return loss / valid_labels",
          'loss = first_only(sum_gradient(loss, "tp"), "tp") + self.head.weight.square().sum(1)[0]\n'
          '        return all_reduce(loss + self.head.weight[0], "tp").sum()')],
        "Found types: [P, V] In add(",
    ),
    "a cut of the wrong dim": (
        [('all_reduce(x, "tp")', 'reduce_scatter(x, "tp", dim=1)')],
        "must match the size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(1 / 2)
def test_faults_in_the_text_are_found_with_stage_line_and_types(fault: str, tmp_path: Path) -> None:
    edits, message = FAULTS[fault]

    result = _faulty(tmp_path / "out", *edits)

    assert not result.ok
    assert message in result.problems[0]
    assert result.problems[0].startswith("stage 0, stage_0.py:")


@pytest.mark.parametrize(
    ("parameter", "kind", "message"),
    [
        ("gain", "I", "Found types: [R, I] In mul("),
        ("norm__weight", "R", "Found types: [I, R, I] In layer_norm("),
        ("down__bias", "R", "Found types: [I, R] In add("),
        ("down__weight", "S(0)", "down.weight is [6, 7], which is not {'dp_replicate': R, 'tp': S(0)} of [6, 14]"),
    ],
)
def test_wrong_types_of_parameters_in_the_plan_are_found(
    parameter: str, kind: str, message: str, tmp_path: Path
) -> None:
    result = check_folder(_written(tmp_path / "out", **{parameter: kind}))

    assert message in result.problems[0]


def test_a_scalar_of_each_rank_may_be_added_to_a_pending_sum(tmp_path: Path) -> None:
    penalty = """loss = first_only(sum_gradient(loss / valid_labels, "tp"), "tp")
        return all_reduce(loss + self.head.weight.square().sum() * 0.01, "tp")"""

    assert _faulty(tmp_path / "out", ("return loss / valid_labels", penalty)).problems == []


def test_an_operator_without_a_rule_is_counted_as_unchecked(tmp_path: Path) -> None:
    result = _faulty(tmp_path / "out", ('all_reduce(x, "tp")', 'all_reduce(x.double().float(), "tp")'))

    assert result.ok, result.problems
    assert result.unchecked == dict.fromkeys(("double", "float"), "spmd_types does not know that it is linear")


def test_an_operator_that_the_checker_fails_on_is_counted_as_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated = spmd_types._checker._get_mutated_tensors

    def failing(function: Any, *arguments: Any) -> Any:
        assert function is not F.gelu, "a bug of its own"
        return mutated(function, *arguments)

    monkeypatch.setattr(spmd_types._checker, "_get_mutated_tensors", failing)

    result = check_folder(_written(tmp_path / "out"))

    assert result.ok, result.problems
    assert list(result.unchecked) == ["gelu"]
    assert "a bug of its own" in result.unchecked["gelu"]


def test_a_stage_must_send_what_the_next_one_is_told(emitted: Emit, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(emitted("gpt", pp=2, tp=2), tmp_path / "out"))
    plan = json.loads((copy / "plan.json").read_text())
    (sent,) = plan["interface"]["stages"][0]["sends"]
    kind = "I" if sent["types"]["tp"] == "R" else "R"
    for record in (sent, *plan["interface"]["stages"][1]["receives"]):
        record["types"]["tp"] = kind
    (copy / "plan.json").write_text(json.dumps(plan))

    assert f"stage 0, stage_0.py: it sends {sent['name']} as " in check_folder(copy).problems[0]


# ---- every collective of a program, one fault at a time --------------------------------------------------------

OTHER_GRADIENT = {
    "all_reduce": "all_reduce_both",
    "all_reduce_both": "all_reduce",
    "all_gather": "all_gather_invariant",
    "all_gather_invariant": "all_gather",
}
TRANSITIONS = (
    *OTHER_GRADIENT,
    "sum_gradient",
    "reduce_scatter",
    "shard",
    "shard_invariant",
    "all_to_all",
    "first_only",
    "expert_rows",
    "expert_sums",
    "own_offsets",
)


SHARED = ("shared_product", "shared_products")
"""Products with weights that tp divides, which sum the gradient of what all ranks multiply."""


def _mutants(text: str) -> Iterator[tuple[str, str]]:
    """The text with one collective dropped, or with one that has another backward in its place."""
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        begin, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
        if node.func.id in SHARED:
            operand, weights = (ast.get_source_segment(text, argument) for argument in node.args[:2])
            alone = f"F.linear({operand}, {weights})"
            several = f"tuple(F.linear({operand}, w) for w in {weights})"
            plain = several if node.func.id.endswith("s") else alone
            yield f"products alone for {node.func.id} in line {node.lineno}", f"{text[:begin]}{plain}{text[end:]}"
        if node.func.id in TRANSITIONS:
            name, operand = node.func.id, ast.get_source_segment(text, node.args[0])
            yield f"without {name} in line {node.lineno}", f"{text[:begin]}({operand}){text[end:]}"
            if name in OTHER_GRADIENT:
                other = OTHER_GRADIENT[name]
                swapped = f"{text[:begin]}{other}{text[begin + len(name) :]}"
                swapped = swapped.replace("from .coll", f"from .collectives import {other}\nfrom .coll", 1)
                yield f"{other} for {name} in line {node.lineno}", swapped


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("gpt", "tp"),
        ("mixtral", "ep"),
        *(pytest.param(name, "tp", marks=pytest.mark.slow) for name in ("mixtral", "bert")),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_no_collective_of_an_example_can_be_dropped_or_have_another_gradient(
    name: str, axis: str, emitted: Emit, tmp_path: Path
) -> None:
    folder = with_whole_modules(emitted(name, **{axis: 2}))
    missed, count = [], 0
    for file in ("blocks.py", "stage_0.py"):
        for what, text in _mutants((folder / file).read_text()):
            count += 1
            copy = Path(shutil.copytree(folder, tmp_path / str(count)))
            (copy / file).write_text(text)
            if check_folder(copy).ok:
                missed.append(f"{file}: {what}")
    assert count >= 10
    assert missed == []


def test_a_cut_of_the_batch_has_the_same_type_and_only_the_graph_shows_it(tmp_path: Path) -> None:
    """The gap that the module's docstring names: V has no dim, so what is cut and joined in one wrong dim passes."""
    swapped = 'all_gather_invariant(reduce_scatter(x, "tp", dim=0), "tp", dim=1).unflatten(1, (2, 5)).sum(1)'
    assert _faulty(tmp_path / "out", ('all_reduce(x, "tp")', f"{swapped}.repeat(2, 1, 1)")).ok

    assert _graph_problems("gpt", "S(1)", _another_dim("reduce_scatter"))


# ---- faults in the graph ---------------------------------------------------------------------------------------


def _transition(local: Program, name: str, fits: Callable[[fx.Node], bool] = lambda node: True) -> fx.Node:
    graphs = [*(block.graph for block in local.blocks.values()), local.graph]
    return next(node for graph in graphs for node in graph.nodes if operator_name(node) == name and fits(node))


def _graph_problems(name: str, norms: str, plant: Callable[[Program], Any], axis: str = "tp") -> list[str]:
    program = example(name)
    plan = gp.plan(program, mesh={axis: 2}, shard_plan=norms_pinned(program, norms))
    separated = prepared(program, plan.sharding, plan.microbatch_size)
    problem = build_problem(separated, plan.sharding.degrees)
    local = lower(separated, plan.sharding)
    assert check_types(problem, local) == []
    plant(local)
    return check_types(problem, local)


def _drop(name: str) -> Callable[[Program], None]:
    def plant(local: Program) -> None:
        node = _transition(local, name)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    return plant


def _drop_before_a_block(name: str) -> Callable[[Program], None]:
    def plant(local: Program) -> None:
        node = _transition(local, name, lambda node: any(user.op == "call_module" for user in node.users))
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    return plant


def _swap(name: str, other: str) -> Callable[[Program], None]:
    def plant(local: Program) -> None:
        _transition(local, name).target = getattr(collectives, other)

    return plant


def _another_dim(name: str) -> Callable[[Program], None]:
    def plant(local: Program) -> None:
        node = _transition(local, name)
        node.kwargs = {**node.kwargs, "dim": int(node.kwargs["dim"]) + 1}  # type: ignore[arg-type, call-overload]

    return plant


@pytest.mark.parametrize(
    ("name", "norms", "plant"),
    [
        pytest.param("mixtral", "", _drop("all_reduce"), id="an all-reduce is dropped"),
        pytest.param("mixtral", "", _drop("sum_gradient"), id="an I is taken for an R"),
        pytest.param("bert", "R", _swap("all_reduce_both", "all_reduce"), id="no all-reduce of the gradient"),
        pytest.param("mixtral", "", _swap("all_reduce", "all_reduce_both"), id="one all-reduce too many"),
        pytest.param("gpt", "S(1)", _drop("reduce_scatter"), id="a reduce-scatter is dropped"),
        pytest.param("gpt", "S(1)", _drop_before_a_block("reduce_scatter"), id="a block gets another type"),
        pytest.param("gpt", "S(1)", _another_dim("reduce_scatter"), id="reduce-scatter of another dim"),
        pytest.param("gpt", "S(1)", _another_dim("all_gather"), id="all-gather of another dim"),
        pytest.param("bert", "S(1)", _another_dim("shard"), id="slice of another dim"),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_faults_in_the_graph_are_found(name: str, norms: str, plant: Callable[[Program], Any]) -> None:
    assert _graph_problems(name, norms, plant)


def _other_rows(local: Program) -> None:
    """Rows counted by another value than the product's."""
    node = _transition(local, "rank_ends")
    (cumsum,) = node.all_input_nodes
    node.args = (cumsum.args[0], node.args[1])


def _whole_offsets(local: Program) -> None:
    node = _transition(local, "own_offsets")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(_drop("expert_rows"), id="all rows for own experts"),
        pytest.param(_drop("expert_sums"), id="own rows are taken for a sum"),
        pytest.param(_swap("expert_sums", "all_reduce"), id="own rows are summed with those of others"),
        pytest.param(_other_rows, id="rows of other offsets"),
        pytest.param(_whole_offsets, id="offsets of all experts"),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_faults_in_rows_of_experts_are_found(plant: Callable[[Program], Any]) -> None:
    assert _graph_problems("mixtral", "", plant, "ep")


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_the_command_prints_json_and_says_by_its_exit_code_whether_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _written(tmp_path / "right")
    assert main(["check", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {"ok": True, "devices": 4, "stages": 1, "checked": data["checked"], "unchecked": {}, "problems": []}

    _faulty(tmp_path / "faulty", *FAULTS["an all-reduce is dropped"][0])
    assert main(["check", str(tmp_path / "faulty")]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "stage 0, stage_0.py:27" in shown

    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "There is no folder" in capsys.readouterr().err


@pytest.mark.costly
def test_check_of_parts_in_memory() -> None:
    program = example("gpt")
    assert gp.check(gp.partition(program, gp.plan(program, mesh={"tp": 2}))).ok


def test_a_process_that_has_a_process_group_is_told_so(tmp_path: Path) -> None:
    folder = _written(tmp_path / "out")
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(GraphparError, match="process group"):
            check_folder(folder)
    finally:
        dist.destroy_process_group()


def test_an_edited_dtype_of_gathers_is_found(tmp_path: Path) -> None:
    program = example("gpt")
    folder = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2})).save(tmp_path / "out")
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["interface"]["gather_dtype"] == "fp32"
    plan["interface"]["gather_dtype"] = "bf16"
    (folder / "plan.json").write_text(json.dumps(plan))

    (problem,) = check_folder(folder).problems

    assert "is read in float32, but interface.gather_dtype gathers it in bfloat16" in problem


@pytest.mark.costly
def test_parameters_are_gathered_in_the_dtype_of_the_computation(tmp_path: Path) -> None:
    program = program_of("gpt2", dtype="bf16")
    folder = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2})).save(tmp_path / "out")

    assert json.loads((folder / "plan.json").read_text())["interface"]["gather_dtype"] == "bf16"
    assert check_folder(folder).problems == []


@pytest.mark.parametrize(
    ("field", "options", "says"),
    [
        ("casts", {"mesh": {"pp": 2}}, "interface.casts casts it to bfloat16"),
        ("working", {"mesh": {"dp_shard": 2}, "zero": 1}, "interface.working stores it in bfloat16"),
    ],
)
def test_an_edited_dtype_of_copies_is_found(field: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    program = example("gpt")
    folder = gp.partition(program, gp.plan(program, **options)).save(tmp_path / "out")
    plan = json.loads((folder / "plan.json").read_text())
    assert field not in plan["interface"]
    name = next(iter(program.parameters))
    plan["interface"][field] = {name: "bf16"}
    (folder / "plan.json").write_text(json.dumps(plan))

    (problem,) = check_folder(folder).problems

    assert f"{name} is read in float32, but {says}" in problem
