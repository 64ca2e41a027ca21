"""Compute in 16 bits over parameters in 32, on ranks: the numbers of one device, and of loops written by hand."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.runtime.manifest import load_manifest
from graphpar.verification import reference_for, verify_all
from tests.models import architectures
from tests.ranks import precision_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import drawn, sample

MESHES: list[dict[str, Any]] = [
    {},
    {"mesh": {"dp_replicate": 2}},
    {"mesh": {"dp_shard": 2}, "zero": 1},
    {"mesh": {"dp_shard": 2}, "zero": 2},
    {"mesh": {"dp_shard": 2}, "reduce_dtype": "bf16"},
    {"mesh": {"tp": 2}},
    {"mesh": {"pp": 2}},
    {"mesh": {"dp_shard": 2, "tp": 2}},
]


def _verified(program: gp.Program, meshes: list[dict[str, Any]]) -> None:
    parts = []
    for asked in meshes:
        try:
            parts.append(gp.partition(program, gp.plan(program, **asked)))
        except GraphparError as error:
            assert "norm mixes examples" in str(error)
    assert parts
    for each, outcome in zip(parts, verify_all(parts, 2, timeout_s=600)):
        assert outcome.ok and outcome.decided_in == "fp64", (each.plan, outcome.problems, outcome.notes)
        assert outcome.native is not None
        if "Mixtral" not in each.plan.model:  # where rounding chooses other experts
            assert outcome.native.max_error["loss"] < 2e-2, (each.plan, outcome.native)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "number"), drawn([("t5", 1), ("gpt2", 3), ("mixtral", 5), ("resnet", 0)], 1, 2))
def test_models_are_exact(name: str, number: int) -> None:
    _verified(architectures.program_of(name, dtype="bf16"), [MESHES[number]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    sample(list(itertools.product(["gpt2", "llama", "t5", "mixtral", "resnet", "bert_dropout"], ["bf16", "fp16"])), 3),
)
def test_all_models_are_exact(name: str, dtype: str) -> None:
    _verified(architectures.program_of(name, dtype=dtype), MESHES)


# ---- beside loops by hand ---------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Two blocks and a head; the first layer is tied to the last but one, and one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


ROWS = 8
X = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(5, (ROWS,), generator=torch.Generator().manual_seed(2))


def _program(**precision: Any) -> gp.Program:
    return gp.export(
        Classifier(), (X,), loss_fn=lambda o, labels: F.cross_entropy(o, labels), targets=(LABELS,), **precision
    )


def _by_hand(dtype: torch.dtype, pieces: int, summed: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The sum over ``pieces`` of the batch of their gradients in ``dtype``, as ranks with copies of the model would have it."""

    def linear(h: Tensor, layer: Any) -> Tensor:
        return F.linear(h, layer.weight.to(dtype), layer.bias.to(dtype))

    total: dict[str, Tensor] = {}
    for x, labels in zip(X.chunk(pieces), LABELS.chunk(pieces)):
        model, h = Classifier(), x.to(dtype)
        for layer in model.layers:
            h = h + torch.tanh(linear(h, layer))
        (F.cross_entropy(linear(h, model.head).float(), labels, reduction="sum") / ROWS).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                given = parameter.grad.to(summed)
                total[name] = given if name not in total else total[name] + given
    return {name: value.float() for name, value in total.items()}


def _ran(
    program: gp.Program, folder: Path, pool: RankPool, asked: dict[str, Any], **plan: Any
) -> tuple[list[Any], list[dict[str, Tensor]]]:
    parts = gp.partition(program, gp.plan(program, **plan))
    out = parts.save(folder / "program", weights=Classifier().state_dict())
    batch = folder / "batch.safetensors"
    names = [spec.name for spec in load_manifest(out).inputs]
    save_file(dict(zip(names, (X, LABELS))), batch)
    ranks = parts.plan.mesh.size
    options = {"batches": [str(batch)] * asked.pop("steps", 1), **asked}
    pool.torchrun(
        Path(precision_script.__file__), [str(out), str(folder), json.dumps(options)], nproc=ranks, timeout_s=120
    )
    reports = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    return reports, [load_file(folder / f"gradients_{rank}.safetensors") for rank in range(ranks)]


def _off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert all(name in found for name in expected)
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


@pytest.mark.costly
def test_sums_over_replicas_are_in_32_bits(tmp_path: Path, pool: RankPool) -> None:
    reports, gradients = _ran(_program(dtype="bf16"), tmp_path, pool, {}, mesh={"dp_replicate": 2})
    right, rounded = (_by_hand(torch.bfloat16, 2, dtype) for dtype in (torch.float32, torch.bfloat16))

    for report, found in zip(reports, gradients):
        assert report["dtypes"] == [
            "torch.bfloat16",
            "torch.float32",
        ]  # that of the frozen bias, which needs no copy in fp32
        assert report["skipped"] == 0
        assert _off(found, right) < 1e-6 < 1e-3 < _off(found, rounded)


@pytest.mark.costly
def test_sums_over_replicas_are_in_the_dtype_asked_for(tmp_path: Path, pool: RankPool) -> None:
    """So the test before would see partial sums that are rounded."""
    asked = {"mesh": {"dp_replicate": 2}, "reduce_dtype": "bf16"}
    reports, gradients = _ran(_program(dtype="bf16"), tmp_path, pool, {}, **asked)
    right, rounded = (_by_hand(torch.bfloat16, 2, dtype) for dtype in (torch.float32, torch.bfloat16))

    assert _off(gradients[0], rounded) < 1e-6 < 1e-3 < _off(gradients[0], right)
    assert reports[0]["dtypes"] == ["torch.bfloat16", "torch.float32"]


def test_microbatches_add_up_in_32_bits(tmp_path: Path, pool: RankPool) -> None:
    _, (found,) = _ran(_program(dtype="bf16"), tmp_path, pool, {}, microbatch_size=2)

    assert _off(found, _by_hand(torch.bfloat16, 4)) < 1e-6
    assert _off(found, _by_hand(torch.bfloat16, 4, torch.bfloat16)) > 1e-3


# ---- fp16 -------------------------------------------------------------------------------------------------------

SCALED: list[dict[str, Any]] = [
    {"mesh": {"dp_replicate": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"pp": 2}, "split": ["layers.1"]},
    {"mesh": {"dp_shard": 2}, "zero": 1},
    {"mesh": {"dp_shard": 2}, "zero": 3},
]


@pytest.mark.costly
@pytest.mark.parametrize("plan", SCALED, ids=lambda plan: "-".join([*plan["mesh"], str(plan.get("zero", ""))]))
def test_an_overflow_on_one_rank_skips_the_step_on_all(plan: dict[str, Any], tmp_path: Path, pool: RankPool) -> None:
    asked = {"steps": 3, "overflow": [1, 1]}
    reports, _ = _ran(_program(dtype="fp16"), tmp_path, pool, asked, **plan)

    for report in reports:
        assert report["without"] == [False, True, False] and report["skipped"] == 1
        assert report["scales"] == [2.0**16, 2.0**15, 2.0**15]
    losses = next(report["losses"] for report in reports if report["losses"][0] is not None)
    assert losses[0] > losses[1] == losses[2]  # a step was made after the first batch, and none after the second


@pytest.mark.costly
def test_a_verdict_that_is_not_shared_is_seen(tmp_path: Path, pool: RankPool) -> None:
    """A planted fault, so that the test before means something: one rank skips, the other steps."""
    asked = {"steps": 2, "overflow": [1, 1], "alone": True}
    reports, _ = _ran(_program(dtype="fp16"), tmp_path, pool, asked, mesh={"tp": 2})

    assert [report["without"][1] for report in reports] == [False, True]


def test_small_gradients_survive_in_16_bits(tmp_path: Path, pool: RankPool) -> None:
    program = gp.export(
        Classifier(), (X,), loss_fn=lambda o, labels: 1e-5 * F.cross_entropy(o, labels), targets=(LABELS,), dtype="fp16"
    )
    _, (found,) = _ran(program, tmp_path, pool, {})
    expected = {name: 1e-5 * value for name, value in _by_hand(torch.float32, 1).items()}

    assert _off(found, expected) < 1e-2
    assert float(expected["head.bias"].abs().max()) < 1e-5  # which fp16 itself would have two bits of


@pytest.mark.costly
def test_casts_of_weights_are_sharded_as_the_weights_are() -> None:
    """They are not gathered over tp in 16 bits, where their gradients would be summed in 16 bits for each microbatch."""
    program = architectures.program_of("llama", dtype="bf16")
    text = gp.partition(program, gp.plan(program, mesh={"tp": 2})).files["blocks.py"]

    assert "layers.Linear(" in text and "layers.RMSNorm(" in text
    assert not any("gather" in line and "weight" in line for line in text.splitlines())


# ---- planted faults ---------------------------------------------------------------------------------------------


def test_a_loss_in_16_bits_is_found(tmp_path: Path) -> None:
    program = _program(dtype="bf16")
    folder = gp.partition(program, gp.plan(program)).save(tmp_path / "out")
    stage = folder / "stage_0.py"
    text = stage.read_text()
    assert text.count(".float()") == 1
    stage.write_text(text.replace(".float()", ""))
    whole = gp.partition(program, gp.plan(program))

    (outcome,) = verify_all([folder], 2, references=[reference_for(whole, 2)])

    assert not outcome.ok and any("not in float32" in problem for problem in outcome.problems), outcome.problems


def test_what_there_is_nothing_to_reduce_for_is_refused() -> None:
    program = _program(dtype="bf16")
    for asked in ({}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}):
        with pytest.raises(GraphparError, match="for sums of gradients over dp_replicate and dp_shard"):
            gp.plan(program, reduce_dtype="bf16", **asked)
    plan = gp.plan(program, mesh={"dp_replicate": 2}, reduce_dtype="bf16")
    assert gp.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.to_json()["param_dtype"] == "fp32" and plan.to_json()["reduce_dtype"] == "bf16"
    with pytest.raises(GraphparError, match="The plan is for dtype bf16 with parameters in fp32"):
        gp.partition(_program(), plan)


# ---- modules in fp32, and the dtype of outputs -------------------------------------------------------------------


class NormedLayer(nn.Module):
    """A norm and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Normed(nn.Module):
    """Layers with a norm each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(NormedLayer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def _normed(**asked: Any) -> gp.Program:
    ids = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(1))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((logits * 3).flatten(0, 1), labels.flatten())

    return gp.export(Normed(), (ids,), loss_fn=loss_fn, targets=(ids,), **{"dtype": "bf16"} | asked)


NORMS = "**.norm"


@pytest.mark.costly
def test_norms_in_fp32_are_exact_and_stay_whole() -> None:
    program = _normed(keep_fp32=NORMS, output_dtype="bf16")
    asked: list[dict[str, Any]] = [
        {"mesh": {"dp_shard": 2, "cp": 2}},
        {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 2},
        {"mesh": {"tp": 2}},
        {"mesh": {"dp_shard": 2}, "zero": 1},
    ]
    _verified(program, asked)
    parts = gp.partition(program, gp.plan(program, **asked[0]))
    record, blocks = json.loads(parts.files["plan.json"]), parts.files["blocks.py"]
    assert (record["keep_fp32"], record["output_dtype"]) == ([NORMS], "bf16")
    assert record["interface"]["gather_dtype"] == "bf16"  # of all that is stored in shards, which norms are not
    assert not any("norm" in name for name, types in record["parameters"].items() if types.get("dp_shard") == "S(0)")
    layer = blocks.split("class NormedLayer")[1].split("class ")[0]
    assert "self.norm(h.float()).bfloat16()" in layer
    stage = parts.files["stage_0.py"]
    assert ".float()" in stage.split(" * 3")[1] and ".float() * 3" not in stage  # the loss function got bf16
    again = gp.partition(program, gp.Plan.from_json(parts.plan.to_json()))
    assert again.files["plan.json"] == parts.files["plan.json"]


def test_gradients_of_modules_in_fp32_are_so() -> None:
    program = _normed(keep_fp32=[NORMS], pure=True)
    infos = program.parameters
    assert {info.dtype for name, info in infos.items() if "norm" in name} == {torch.float32}
    assert {info.dtype for name, info in infos.items() if "norm" not in name} == {torch.bfloat16}
    parts = gp.partition(program, gp.plan(program))
    (outcome,) = verify_all([parts], 2)
    assert outcome.ok, outcome.problems


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_outputs_are_in_the_dtype_that_is_asked_for(dtype: str) -> None:
    program = gp.export(
        Normed(), (torch.zeros(4, 6, dtype=torch.long),), mode="infer", dtype="bf16", output_dtype=dtype
    )
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}))
    assert {"fp32": ".float()", "fp16": ".half()"}[dtype] in parts.files["stage_0.py"].splitlines()[-1]
    (outcome,) = verify_all([parts], 1)
    assert outcome.ok, outcome.problems


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dtype": "fp32", "keep_fp32": NORMS}, "keep_fp32 is for a model that computes in 16 bits; give dtype=bf16"),
        ({"dtype": "fp32", "output_dtype": "bf16"}, "output_dtype is for a model that computes in 16 bits"),
        ({"keep_fp32": "layers.*.nrm"}, "keep_fp32: the pattern 'layers.*.nrm' matches no module"),
        ({"output_dtype": "fp8"}, "output_dtype is 'fp8'; it must be one of fp32, bf16, fp16"),
    ],
)
def test_what_can_not_be_kept_in_fp32_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphparError, match=re.escape(said)):
        _normed(**asked)


def test_a_tied_module_alone_is_not_kept_in_fp32() -> None:
    model = Normed()
    model.head.weight = model.embedding.weight
    ids = torch.zeros(4, 6, dtype=torch.long)
    said = "keep_fp32: embedding.weight is also head.weight, whose module computes in 16 bits"
    with pytest.raises(GraphparError, match=re.escape(said)):
        gp.export(model, (ids,), loss_fn=lambda o: o.square().mean(), dtype="bf16", keep_fp32="embedding")


def test_a_plan_is_for_the_dtypes_of_its_program() -> None:
    plan = gp.plan(_normed(keep_fp32=NORMS), mesh={"pp": 1})
    with pytest.raises(
        GraphparError, match="in fp32, but the program was exported in dtype bf16 with parameters in fp32;"
    ):
        gp.partition(_normed(), plan)
