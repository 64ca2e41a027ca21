"""State sharded over dp_shard (ZeRO 2 and 3): the numbers of one device, with what the formulas say on each rank and on the wire."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.verification import reference_for, verify_all
from graphpar.verification.type_check import check_folder
from tests.models import architectures, zoo_programs
from tests.ranks import zero_script
from tests.tools.rank_pool import RankPool

# Tied, frozen, shared and nested modules, odd names, counts, dropout: each was once wrong somewhere.
SAMPLE = [name for name in zoo_programs.MODELS if name not in ("Counters", "CountingBlocks")]
REFUSED = ("depend", "updates the buffer", "not additive", "does not divide")


def _partitioned(program: gp.Program, **asked: Any) -> gp.Parts:
    return gp.partition(program, gp.plan(program, **asked))


def _exact(parts: list[gp.Parts]) -> None:
    for each, outcome in zip(parts, verify_all(parts, 3, timeout_s=600)):
        assert outcome.ok, (each.plan.model, each.plan.mesh, outcome.problems)
        assert max(outcome.max_error.values()) < 1e-5, (each.plan.model, outcome.max_error)


def _of_the_zoo(names: list[str], zero: int) -> list[gp.Parts]:
    parts = []
    for name in names:
        try:
            parts.append(_partitioned(zoo_programs.program_of(name), mesh={"dp_shard": 2}, zero=zero))
        except GraphparError as error:
            assert any(why in str(error) for why in REFUSED), error
    return parts


@pytest.mark.costly
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.sampled(1 / 2)
def test_models_of_all_kinds_are_exact(zero: int) -> None:
    parts = _of_the_zoo(SAMPLE[zero::8], zero)

    assert len(parts) > 5
    _exact(parts)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_many_models_are_exact(zero: int) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    _exact(_of_the_zoo(random.Random(seed).sample(SAMPLE, 15), zero))


MATRIX: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"mesh": {"dp_shard": 2, "tp": 2}}),
    ("llama", {"mesh": {"dp_shard": 2, "cp": 2}}),
    ("mixtral", {"mesh": {"dp_shard": 2, "ep": 2}}),
    ("t5", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 2}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"mesh": {"dp_shard": 4}}),
    ("gpt2", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "microbatch_size": 1}),
    ("gpt2", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 2, "microbatch_size": 1}),
    ("gpt2", {"mesh": {"dp_shard": 2, "cp": 2}, "zero": 2}),
    ("bert", {"mesh": {"dp_shard": 2, "tp": 2}}),
    ("bert_dropout", {"mesh": {"dp_shard": 4}}),
    ("llama", {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
    ("mixtral", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 2}),
    ("mixtral", {"mesh": {"dp_shard": 2, "tp": 2}}),
    ("t5", {"mesh": {"dp_shard": 4}}),
    ("t5", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 2}),
    ("vit", {"mesh": {"dp_shard": 4}, "zero": 2}),
    ("whisper", {"mesh": {"dp_shard": 2, "tp": 2}}),
]


@pytest.mark.costly
@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(("name", "asked"), MATRIX, ids=str)
def test_with_other_axes_it_is_exact(name: str, asked: dict[str, Any]) -> None:
    _exact([_partitioned(architectures.program_of(name), **asked)])


@pytest.mark.slow
def test_on_more_meshes_it_is_exact() -> None:
    _exact([_partitioned(architectures.program_of(name), **asked) for name, asked in MORE])


# ---- what a rank holds, and what is sent -------------------------------------------------------------------------

UNITS, MICROBATCHES, RANKS = 6, 2, 2


class Layer(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Layered(nn.Module):
    """Four blocks, a layer before them and one after them; no size of them is even."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(1.5))  # has no dim to be sharded
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h * self.scale)


def _layered(**asked: Any) -> gp.Parts:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    program = gp.export(Layered(), (x,), loss_fn=lambda o, y: nn.functional.mse_loss(o, y), targets=(y,))
    return _partitioned(program, mesh={"dp_shard": RANKS}, microbatch_size=2, **asked)


@pytest.fixture(scope="module", params=[2, 3])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> tuple[int, Any]:
    parts, out = _layered(zero=request.param), tmp_path_factory.mktemp("zero")
    folder = parts.save(out / "program", weights=Layered().state_dict())
    inputs = json.loads((folder / "plan.json").read_text())["interface"]["inputs"]
    generator = torch.Generator().manual_seed(2)
    save_file(
        {each["name"]: torch.randn(each["shape"], generator=generator) for each in inputs}, out / "batch.safetensors"
    )
    pool.torchrun(Path(zero_script.__file__), [str(folder), str(out)], nproc=RANKS, timeout_s=120)
    reports = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
    return request.param, (reports, load_file(out / "half.safetensors"))


def test_a_rank_holds_its_shard(ran: tuple[int, Any]) -> None:
    level, (reports, _) = ran
    shapes = {name: tuple(value.shape) for name, value in Layered().named_parameters()}
    for rank, report in enumerate(reports):
        for name, shape in shapes.items():
            each = math.ceil(shape[0] / RANKS) if shape else 0
            rows = (min(each, max(0, shape[0] - rank * each)), *shape[1:]) if shape else ()
            assert tuple(report["stored"][name]) == rows, name
        assert report["gradients"] == report["held"]
    assert sum(report["held"] for report in reports) == sum(p.numel() for p in Layered().parameters()) + RANKS - 1
    written = json.loads(_layered(zero=level).files["report.json"])["report"]["state"]
    held = 4 * reports[0]["held"]
    assert written["rank_bytes"] == {"parameters": held, "gradients": held, "optimizer": 2 * held}
    each = {2: (1, MICROBATCHES), 3: (2 * MICROBATCHES, MICROBATCHES)}[level]
    last = (each[0] if level == 2 else MICROBATCHES, MICROBATCHES)
    assert {(unit["name"], unit["count"]): (unit["gathers"], unit["reductions"]) for unit in written["units"]} == {
        ("", 1): (0, 0),
        ("LinearFirst", 1): each,
        ("Layer", 4): each,
        ("LinearLast", 1): last,
    }


def test_collectives_of_a_step(ran: tuple[int, Any]) -> None:
    """M (2 N - 1) all-gathers at level 3 (the last unit is kept for the backward), N at level 2; M N reduce-scatters."""
    level, (reports, _) = ran
    gathered = {3: MICROBATCHES * (2 * UNITS - 1), 2: UNITS}[level]
    for report in reports:
        assert report["counts"]["all-gather"] == gathered
        assert report["counts"]["reduce-scatter"] == MICROBATCHES * UNITS


def test_saved_weights_are_whole_and_training_goes_on(ran: tuple[int, Any]) -> None:
    _, (reports, saved) = ran
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in Layered().state_dict().items()
    }
    for report in reports:
        assert report["rest"] == pytest.approx(report["losses"][2:], rel=1e-6)


# ---- on which dim ------------------------------------------------------------------------------------------------

DIMS = {
    "model.layers.*.mlp.*.weight": "S(1)@dp_shard",
    "**.o_proj.weight": "S(-1)@dp_shard",
    "lm_head.weight": "S(1)@dp_shard",
}


@pytest.mark.costly
def test_parameters_are_divided_on_the_dims_that_are_pinned() -> None:
    meshes = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2}]
    program = architectures.program_of("llama")
    parts = [_partitioned(program, mesh=mesh, shard_plan=DIMS, zero=3 - (n == 3)) for n, mesh in enumerate(meshes)]
    for each in parts:
        stored = json.loads(each.files["plan.json"])["parameters"]
        assert (
            stored["model.layers.{0-3}.mlp.up_proj.weight"]["dp_shard"]
            == stored["lm_head.weight"]["dp_shard"]
            == "S(1)"
        )
        again = gp.partition(program, gp.Plan.from_json(each.plan.to_json()))
        assert again.files["plan.json"] == each.files["plan.json"]
    _exact(parts)


# ---- what is written ---------------------------------------------------------------------------------------------


def test_emitted_units() -> None:
    text = _layered().files["stage_0.py"]

    assert (
        "    fully_shard(stage.first, **options)\n    for layer in stage.layers.values():\n        fully_shard(layer, **options)\n"
        '    fully_shard(stage.last, **{**options, "reshard_after_forward": False})\n    fully_shard(stage, **options)\n'
    ) in text
    assert text.endswith("        unit.set_modules_to_backward_prefetch(backward[i + 1 : i + 2] or [unit])\n")
    assert "ZeRO-3 over dp_shard=2" in text


def test_blocks_whose_parameters_others_use_stay_with_the_rest() -> None:
    text = _partitioned(zoo_programs.program_of("TiedAcrossBlocks"), mesh={"dp_shard": 2}).files["stage_0.py"]

    assert text.count("fully_shard(") == 1


class TwoDtypes(nn.Module):
    """Most of the parameters in float64, one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5).double()
        self.first.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.double()).float() * self.first.scale


def test_a_parameter_of_another_dtype_than_its_unit_stays_whole() -> None:
    program = gp.export(TwoDtypes(), (torch.randn(8, 6),), loss_fn=lambda o: o.square().mean())
    parts = _partitioned(program, mesh={"dp_shard": 2})
    stored = json.loads(parts.files["plan.json"])["parameters"]

    assert stored == {"first.bias": {"dp_shard": "S(0)"}, "first.weight": {"dp_shard": "S(0)"}}
    _exact([parts])


class Odd(nn.Module):
    """Whole numbers first, then blocks, one of which has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = nn.Parameter(torch.arange(5).flip(0), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.layers[1].none = nn.Parameter(torch.empty(0, 3))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x[:, self.order]))
        x = self.layers[1](x) + self.layers[1].none.sum()
        return self.last(self.layers[2](x))


@pytest.mark.costly
def test_odd_parameters_are_exact() -> None:
    program = gp.export(Odd(), (torch.randn(8, 5),), loss_fn=lambda o: o.square().mean())
    _exact([_partitioned(program, mesh={"dp_shard": 2}, zero=zero, microbatch_size=2) for zero in (2, 3)])


def test_types_are_right(tmp_path: Path) -> None:
    program = architectures.program_of("gpt2")
    _partitioned(program, mesh={"dp_shard": 2, "tp": 2}).save(tmp_path / "out")

    assert check_folder(tmp_path / "out").problems == []


CALL = "        fully_shard(layer, **options)\n"
FAULTS = {
    "gradients that stay on their rank": CALL
    + "        layer.set_requires_gradient_sync(False)\n"
    + "        layer.set_requires_gradient_sync = lambda *_, **__: None\n",
    "gradients that are halved": CALL.replace(
        "(layer, **options)",
        "(layer, **options)\n        layer.register_full_backward_pre_hook(lambda _, g: tuple(x / 2 for x in g))",
    ),
}


@pytest.mark.costly
def test_planted_faults_are_found(tmp_path: Path) -> None:
    folders = []
    for number, text in enumerate(FAULTS.values()):
        folders.append(_layered().save(tmp_path / str(number)))
        path = folders[-1] / "stage_0.py"
        assert CALL in path.read_text()
        path.write_text(path.read_text().replace(CALL, text))

    reference = reference_for(_layered())
    outcomes = verify_all(folders, references=[reference] * len(folders), timeout_s=300)

    assert [name for name, outcome in zip(FAULTS, outcomes) if outcome.ok] == []


TWICE = {
    "a unit twice": (CALL + CALL, "A parameter is in one unit"),
    "a unit inside of another, after it": (
        CALL + "        fully_shard(layer.up, **options)\n",
        "the last layers.0.down.bias",
    ),
}


@pytest.mark.costly
def test_a_parameter_in_two_units_is_refused(tmp_path: Path) -> None:
    folders = []
    for text, _ in TWICE.values():
        folders.append(_layered().save(tmp_path / str(len(folders))))
        path = folders[-1] / "stage_0.py"
        path.write_text(path.read_text().replace(CALL, text))

    outcomes = verify_all(folders, references=[reference_for(_layered())] * 2, timeout_s=300)

    for outcome, (_, message) in zip(outcomes, TWICE.values()):
        assert len(outcome.problems) == 1 and message in outcome.problems[0]
        assert "fully_shard_units can't shard" in outcome.problems[0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "level 0 shards nothing": ({"mesh": {"dp_shard": 2}, "zero": 0}, "use dp_replicate=2"),
    "a level without the axis": ({"mesh": {"dp_replicate": 2}, "zero": 3}, "dp_shard and cp, which have one rank"),
    "a level that is not": ({"mesh": {"dp_shard": 2}, "zero": 4}, "one of 0, 1, 2, 3"),
    "devices that it does not divide": ({"mesh": {"dp_shard": 3}, "devices": 8}, "8 devices don't divide by"),
    "rows that it does not divide": ({"mesh": {"dp_shard": 3}}, "8 does not divide over dp_shard=3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    asked, message = WRONG[name]
    x = torch.randn(8, 6)
    program = gp.export(Layered(), (x,), loss_fn=lambda o: o.square().mean())

    with pytest.raises(GraphparError, match=message):
        gp.plan(program, **asked)


def test_models_that_cannot_be_are_refused() -> None:
    x = torch.randn(8, 6)
    with pytest.raises(GraphparError, match="for inference"):
        gp.plan(gp.export(Layered(), (x,), mode="infer"), mesh={"dp_shard": 2})
