"""Sharded state under pipelines, over accumulated steps, and freed as asked: the numbers of one device, and the collectives of
the formulas on the wire."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.activation_memory import attributes
from graphpar.errors import GraphparError
from graphpar.passes.planning.prices import table_of
from graphpar.passes.planning.validate_plan import validate_plan
from graphpar.schedules.order import order_of
from graphpar.schedules.simulation import most_of
from graphpar.verification import reference_for, verify_all
from graphpar.verification.type_check import check_folder
from tests.end_to_end.test_zero import _exact, _partitioned
from tests.models import architectures, zoo_programs
from tests.ranks import accumulation_script, whole_state_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import drawn, sample

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "ZB-H1",
]
STEPS = [False, True, True, False, True, False]
"""Which steps accumulate."""


class Layer(nn.Module):
    """Two products, neither of an even size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Tied(nn.Module):
    """Four blocks between two products with one weight, on the first stage and on the last; a frozen block; a scale without a dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h * self.scale)


@functools.cache
def _program() -> gp.Program:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 7, generator=generator), torch.randn(24, 7, generator=generator)
    return gp.export(Tied(), (x,), loss_fn=lambda o, y: nn.functional.mse_loss(o, y), targets=(y,))


def _parts(mesh: dict[str, int], microbatches: int, **asked: Any) -> gp.Parts:
    rows = 24 // (mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1))
    return _partitioned(_program(), mesh=mesh, microbatch_size=rows // microbatches, **asked)


def _by_hand(batches: list[dict[str, Tensor]]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train in fp64 on one device, without graphpar: losses, norms and weights."""
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=accumulation_script.LEARNING_RATE)
    losses, norms = [], []
    for batch, accumulate in zip(batches, STEPS):
        x, y = (batch[name].double() for name in ("x", "y"))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if not accumulate:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def _trained(parts: gp.Parts, out: Path, pool: RankPool, *, sums: bool = True) -> list[dict[str, Any]]:
    """Run the steps on ranks, hold losses, norms and weights against the loop by hand, and return the ranks' reports.

    Without ``sums`` the ranks leave out the all-reduces over replicas.
    """
    folder = parts.save(out / "program", weights=Tied().state_dict())
    inputs = json.loads((folder / "plan.json").read_text())["interface"]["inputs"]
    x, y = (each["name"] for each in inputs)
    batches = []
    for step in range(len(STEPS)):
        generator = torch.Generator().manual_seed(100 + step)
        batches.append({name: torch.randn(24, 7, generator=generator) for name in ("x", "y")})
        save_file({x: batches[-1]["x"], y: batches[-1]["y"]}, out / f"batch_{step}.safetensors")
    (out / "job.json").write_text(json.dumps({"accumulate": STEPS, "sums": sums}))
    ranks = parts.plan.mesh.size
    pool.torchrun(Path(accumulation_script.__file__), [str(folder), str(out)], nproc=ranks, timeout_s=200)
    reports = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    losses, norms, weights = _by_hand(batches)
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-5)
        assert report["norms"] == pytest.approx(norms, rel=1e-5)
        assert len(report["refused"]) == 2 + 2 * sum(STEPS)
        assert all("accumulate=True" in text for text in report["refused"])
    saved = load_file(out / "final.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(saved[name].double(), value, rtol=1e-5, atol=1e-6)
    return reports


# ---- what is sent, and that it is right whatever is accumulated --------------------------------------------------

UNITS, REDUCED = 5, 4  # the frozen block has no gradients to reduce
A_STAGE, REDUCED_OF = 3, (2, 3)  # of each of two stages

COUNTED: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    # mesh, microbatches, what is asked, all-gathers of a rank in a step
    ({"dp_shard": 2}, 3, {"zero": 2}, UNITS),
    ({"dp_shard": 2}, 2, {"zero": 3}, 2 * (2 * UNITS - 1)),
    ({"dp_shard": 2}, 2, {"reshard": "always"}, 2 * 2 * UNITS),
    ({"dp_shard": 2}, 3, {"reshard": "never"}, 3 * UNITS),
    ({"pp": 2, "dp_shard": 2}, 2, {"zero": 2}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 3, {"zero": 3}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 3, {"reshard": "always"}, 2 * 3 * A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 2, {"schedule": "ZB-H1"}, A_STAGE),
]
MORE_COUNTED: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    ({"dp_shard": 2}, 1, {"zero": 2}, UNITS),
    ({"dp_shard": 2}, 1, {"zero": 3}, 2 * UNITS - 1),
    ({"dp_shard": 2}, 3, {"zero": 3}, 3 * (2 * UNITS - 1)),
    ({"dp_shard": 4}, 2, {"reshard": 2}, 2 * 2 * UNITS),
    ({"dp_replicate": 2, "dp_shard": 2}, 2, {"zero": 2}, UNITS),
    ({"pp": 2, "dp_shard": 2}, 1, {"schedule": "GPipe"}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "GPipe"}, A_STAGE),
    ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 3, {}, A_STAGE),
]


def _check_counts(
    mesh: dict[str, int], microbatches: int, asked: dict[str, Any], gathers: int, out: Path, pool: RankPool
) -> None:
    parts = _parts(mesh, microbatches, **asked)
    reports = _trained(parts, out, pool)
    for rank, report in enumerate(reports):
        pipelined = parts.plan.mesh.pp > 1
        stage = rank // (parts.plan.mesh.size // 2)
        reductions = REDUCED_OF[stage] if pipelined else microbatches * REDUCED
        for accumulate, counts in zip(STEPS, report["counts"]):
            assert counts.get("all-gather") == gathers, (mesh, asked)
            assert counts.get("reduce-scatter", 0) == (0 if accumulate else reductions), (mesh, asked)


@pytest.mark.costly
@pytest.mark.parametrize("case", drawn(range(len(COUNTED)), 2, 4))
def test_collectives_of_a_step(case: int, tmp_path: Path, pool: RankPool) -> None:
    _check_counts(*COUNTED[case], tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(range(len(MORE_COUNTED)), 3))
def test_collectives_of_a_step_on_more_meshes(case: int, tmp_path: Path, pool: RankPool) -> None:
    _check_counts(*MORE_COUNTED[case], tmp_path, pool)


WHOLE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_replicate": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp_shard": 2}, {"zero": 1}),
    ({"dp_replicate": 2, "pp": 2}, {}),
    ({"dp_shard": 2, "pp": 2}, {"zero": 1, "zero1_by": "flat"}),
]


@pytest.mark.costly
@pytest.mark.sampled(2 / 5)
@pytest.mark.parametrize(("mesh", "asked"), WHOLE, ids=str)
def test_stages_with_whole_parameters_accumulate(
    mesh: dict[str, int], asked: dict[str, Any], tmp_path: Path, pool: RankPool
) -> None:
    _trained(_parts(mesh, 3, **asked), tmp_path, pool)


class Gradients(nn.Module):
    """Blocks whose parameters share a gradient, get one that is expanded, and send gradients that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.a, self.b, self.c = (nn.Parameter(torch.randn(7)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.t() * (self.a + self.b)[:, None]).t() * self.c.sum()


@pytest.mark.costly
def test_gradients_of_split_backwards_can_be_sent_and_added_to() -> None:
    x, y = torch.randn(8, 7), torch.randn(8, 7)
    program = gp.export(Gradients(), (x,), loss_fn=lambda o, y: nn.functional.mse_loss(o, y), targets=(y,))
    _exact([_partitioned(program, mesh={"pp": 2}, schedule="ZB-H1", microbatch_size=2)])


# ---- every schedule ----------------------------------------------------------------------------------------------

PIPELINED = {"pp": 2, "dp_shard": 2}
KINDS = [
    "TiedThreeWays",
    "TiedAcrossBlocks",
    "FrozenFirst",
    "FrozenMiddle",
    "Repeated",
    "DropoutTied",
    "Skips",
]


def _of_schedules(names: list[str], schedules: list[str], **asked: Any) -> list[gp.Parts]:
    programs = {name: _program_of(name) for name in names}
    return [
        _partitioned(programs[name], **{"mesh": PIPELINED, "schedule": schedule, **asked})
        for name in names
        for schedule in schedules
    ]


def _program_of(name: str) -> gp.Program:
    return zoo_programs.program_of(name) if name in zoo_programs.MODELS else architectures.program_of(name)


@pytest.mark.costly
@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("TiedThreeWays", "InterleavedZeroBubble"),
        ("FrozenFirst", "ZBVZeroBubble"),
        ("Repeated", "1F1B"),
        ("DropoutTied", "DualPipeV"),
    ],
)
def test_a_sample_of_schedules_is_exact(name: str, schedule: str) -> None:
    _exact(_of_schedules([name], [schedule], zero=2 + len(name) % 2))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "zero"), sample(list(itertools.product(SCHEDULES, [2, 3])), 4))
def test_all_schedules_are_exact(schedule: str, zero: int) -> None:
    _exact(_of_schedules([*KINDS, "mixtral"], [schedule], zero=zero))


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_other_policies_are_exact(reshard: str) -> None:
    _exact(_of_schedules(KINDS, ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"], reshard=reshard))
    _exact(_of_schedules([*KINDS, "Siamese"], ["1F1B"], mesh={"dp_shard": 2}, reshard=reshard, microbatch_size=1))


WITH_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"mesh": {**PIPELINED, "tp": 2}, "schedule": "ZBVZeroBubble"}),
    ("llama", {"mesh": {**PIPELINED, "cp": 2}, "schedule": "Interleaved1F1B", "zero": 2}),
    ("mixtral", {"mesh": {**PIPELINED, "ep": 2}, "schedule": "InterleavedZeroBubble"}),
    (
        "bert_dropout",
        {"mesh": {**PIPELINED, "dp_replicate": 2}, "schedule": "DualPipeV", "microbatch_size": 1, "global_batch": 16},
    ),
    ("t5", {"mesh": {"pp": 2, "dp_shard": 4}, "schedule": "GPipe", "reshard": "always"}),
]


@pytest.mark.slow
def test_with_other_axes_schedules_are_exact() -> None:
    _exact([_partitioned(architectures.program_of(name), **asked) for name, asked in WITH_OTHERS])


# ---- tables ------------------------------------------------------------------------------------------------------

TABLE = """0UNSHARD,0F0,0F1,0B0,0RESHARD,0UNSHARD,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1F0,1B0,1F1,1I1,1W1,1REDUCE_GRAD,1RESHARD"""


@pytest.mark.costly
def test_a_table_of_ones_own_may_say_when_state_is_gathered(tmp_path: Path) -> None:
    bare = "\n".join(
        ",".join(cell for cell in row.split(",") if not cell.endswith(("SHARD", "GRAD"))) for row in TABLE.split("\n")
    )
    own = [
        _partitioned(_program_of(name), mesh=PIPELINED, table=table) for name in KINDS[:2] for table in (TABLE, bare)
    ]

    assert own[0].plan.actions is not None and own[0].plan.actions[0][4] == "0RESHARD"
    assert own[1].plan.actions == tuple(
        (f"{stage}UNSHARD", *row.split(","), f"{stage}REDUCE_GRAD", f"{stage}RESHARD")
        for stage, row in enumerate(bare.split("\n"))
    )
    _exact(own)


WRONG_TABLES = {
    "a reduction before the last weight gradient": (
        TABLE.replace("0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1"), "reduces the gradients of stage 0 before 0B1 at step 7"),
    "a reduction between the halves of a backward": (
        TABLE.replace("1W1,1REDUCE_GRAD", "1REDUCE_GRAD,1W1"), "reduces the gradients of stage 1 before 1W1"),
    "no reduction": (TABLE.replace(",0REDUCE_GRAD", ""), "no 0REDUCE_GRAD, so its gradients stay on their ranks"),
    "two reductions": (TABLE.replace("1REDUCE_GRAD", "1REDUCE_GRAD,1REDUCE_GRAD"), "a second time"),
    "no gather": (TABLE.replace("1UNSHARD,", ""), "needs the parameters of stage 1"),
    "use of what is freed": (TABLE.replace("0RESHARD,0UNSHARD,0B1", "0RESHARD,0B1"), "needs the parameters of stage 0"),
    "two gathers": (TABLE.replace("0UNSHARD,0F0", "0UNSHARD,0UNSHARD,0F0"), "which are gathered already"),
    "nothing freed": (TABLE.replace(",1RESHARD", ""), "no 1RESHARD"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TABLES)
@pytest.mark.sampled(1 / 2)
def test_wrong_tables_are_refused(name: str) -> None:
    table, message = WRONG_TABLES[name]
    with pytest.raises(GraphparError, match=message):
        gp.plan(_program(), mesh=PIPELINED, table=table)


def test_a_plan_makes_the_same_plan() -> None:
    program = _program()
    for asked in ({"schedule": "ZBVZeroBubble"}, {"table": TABLE}, {"reshard": "always", "zero": 3}):
        plan = gp.plan(program, mesh=PIPELINED, **asked)
        assert validate_plan(program, gp.Plan.from_json(plan.to_json())) == plan


def _reduced_early(plan: dict[str, Any]) -> None:
    row = plan["actions"]["0"]
    row.insert(row.index("0B1"), row.pop(row.index("0REDUCE_GRAD")))


@pytest.mark.costly
def test_a_reduction_that_comes_early_is_found(tmp_path: Path) -> None:
    """In a plan that was spoilt after it was checked, too: before a rank computes anything."""
    parts = _partitioned(zoo_programs.program_of("NamedBlocks"), mesh=PIPELINED, schedule="1F1B", microbatch_size=2)
    folder = parts.save(tmp_path / "out")
    plan = json.loads((folder / "plan.json").read_text())
    _reduced_early(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    (outcome,) = verify_all([folder], references=[reference_for(parts)], timeout_s=300)

    for problems in (outcome.problems, check_folder(folder).problems):
        assert "after the last backward of stage" in problems[0]


@pytest.mark.costly
def test_gradients_that_replicas_of_the_shards_do_not_sum_are_found(tmp_path: Path, pool: RankPool) -> None:
    parts = _parts({**PIPELINED, "dp_replicate": 2}, 3)
    with pytest.raises(AssertionError):
        _trained(parts, tmp_path, pool, sums=False)


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1F1B", 3), ("Interleaved1F1B", 2), ("Interleaved1F1B", 6), ("LoopedBFS", 3)]
)
@pytest.mark.sampled(1 / 2)
def test_what_is_whole_of_sharded_state_is_what_memory_says(
    schedule: str, microbatches: int, tmp_path: Path, pool: RankPool
) -> None:
    """Stages whose backwards have ended have neither parameters nor gradients left when those of others begin."""
    parts = _parts(PIPELINED, microbatches, schedule=schedule)
    folder = parts.save(tmp_path / "program", weights=Tied().state_dict())
    inputs = json.loads((folder / "plan.json").read_text())["interface"]["inputs"]
    save_file({each["name"]: torch.randn(24, 7) for each in inputs}, tmp_path / "batch.safetensors")
    arguments = [str(folder), str(tmp_path / "batch.safetensors"), str(tmp_path)]
    pool.torchrun(Path(whole_state_script.__file__), arguments, nproc=4, timeout_s=200)
    held = [[0, 0] for _ in parts.stages]
    for name, info in parts.program.parameters.items():
        for stage in parts.stages:
            if info.shape and name in attributes(parts.program, stage):  # the scale is not divided
                held[stage.index][0] += info.nbytes
                held[stage.index][1] += info.nbytes * info.requires_grad
    order, nothing = order_of(table_of(parts.plan)), [0] * len(held)
    gathered, gradients = (list(each) for each in zip(*held))
    said = [
        [fullest.whole[1] for fullest in most_of(order, nothing, nothing, *each)]
        for each in ((gathered, nothing), (nothing, gradients))
    ]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [found for _, *found in reports] == [[each[place] for each in said] for place, *_ in reports]


# ---- plans -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a policy without shards": ({"mesh": {"pp": 2}, "reshard": "always"}, "dp_shard=1 and zero=0 they are not sharded"),
    "a policy at level 1": ({"mesh": {"dp_shard": 2}, "zero": 1, "reshard": "never"}, "zero=1 they are not sharded"),
    "freed at level 2": ({"mesh": {"dp_shard": 2}, "zero": 2, "reshard": "always"}, "zero=2 keeps gathered parameters for the full step"),
    "a split backward": ({"mesh": PIPELINED, "schedule": "ZB-H1", "reshard": "always"}, "splits backwards in two, as at"),
    "no such policy": ({"mesh": {"dp_shard": 2}, "reshard": "sometimes"}, "one of default, always, never, or a number"),
    "a number that does not divide": ({"mesh": {"dp_shard": 4}, "reshard": 3}, "a proper divisor of dp_shard=4: 2"),
    "a trivial number": ({"mesh": {"dp_shard": 2}, "reshard": 2}, "it has none"),
    "a number and another axis": ({"mesh": {"dp_shard": 4, "tp": 2}, "reshard": 2}, "tp=2 and dp_shard=4 is not supported yet"),
    "state of no shards": ({"mesh": {"pp": 2}, "table": TABLE}, "gathers or reduces state, but the mesh shards none"),
    "gathers by whom": ({"mesh": PIPELINED, "table": TABLE.replace("1I1,1W1", "1B1"), "reshard": "always"}, "has UNSHARD actions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_be_are_refused(name: str) -> None:
    asked, message = REFUSED[name]
    with pytest.raises(GraphparError, match=message):
        gp.plan(_program(), **asked)


def test_the_search_prices_sharded_pipelines() -> None:
    """On slow wires a pipeline that gathers once a step is faster than one that gathers for each microbatch."""
    steps = {}
    for reshard in ("default", "always"):
        pins: Any = {"schedule": "1F1B", "microbatch_size": 2, "zero": 3, "reshard": reshard}
        plan = gp.plan(_program(), "4xH100-SXM-80GB", mesh={"dp_shard": 2}, **pins)
        assert plan.mesh.pp == 2 and plan.reshard == reshard and plan.predicted is not None and plan.actions is not None
        steps[reshard] = plan.predicted.step_time_s
        stage = plan.predicted.stages[0]
        assert stage.reduce_s > 0 and (stage.gather_s > 0) == (reshard == "default")
        assert plan.predicted.communication_s["dp_shard"] >= stage.gather_s + stage.reduce_s
    assert steps["default"] < steps["always"]
