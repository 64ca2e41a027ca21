"""ZeRO-1 in 16 bits: whole copies in 16 bits and pieces of main values give, to the bit, what whole parameters in fp32 give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime.manifest import load_manifest
from graphpar.verification import reference_for, verify_all
from tests.ranks import main_weights_script, zero1_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

ROWS, WIDTH = 8, 16
POLICIES = ("contiguous", "longest", "flat")


class Layer(nn.Module):
    """A norm that autocast leaves in fp32, and two products in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Tied(nn.Module):
    """Blocks, the first of which is applied twice, between a table and a head that are one parameter; a bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head.weight = self.table.weight
        self.layers[1].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        for layer in (*self.layers, self.layers[3]):
            h = layer(h)
        return self.head(h)


class Autocast(Tied):
    """The same, where autocast says what is read in bf16."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)


def adapted() -> nn.Module:
    """Frozen layers with low-rank adapters."""
    return gp.lora(Tied(), {"layers.*.up": 2})


TOKENS = torch.randint(7, (ROWS, 5), generator=torch.Generator().manual_seed(1))


def _program(kind: Callable[[], nn.Module], **options: Any) -> gp.Program:
    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())

    return gp.export(kind(), (TOKENS,), loss_fn=loss_fn, targets=(TOKENS,), **options)


def _parts(kind: Callable[[], nn.Module], by: str, size: int, mesh: dict[str, int], **options: Any) -> gp.Parts:
    program = _program(kind, **({} if kind is Autocast else {"dtype": "bf16"}))
    mesh = {"dp_shard": 2, **mesh}
    return gp.partition(program, gp.plan(program, mesh=mesh, zero=1, zero1_by=by, microbatch_size=size, **options))


def _saved(parts: gp.Parts, kind: Callable[[], nn.Module], folder: Path) -> list[Path]:
    """The program, and the same one whose ranks store whole parameters in fp32."""
    found = [parts.save(folder / name, weights=kind().state_dict()) for name in ("apart", "whole")]
    plan = found[1] / "plan.json"
    record = json.loads(plan.read_text())
    assert record["interface"].pop("working")
    plan.write_text(json.dumps(record))
    return found


def _run(pool: RankPool, folder: Path, jobs: list[dict[str, Any]], ranks: int) -> list[list[tuple[Any, Any]]]:
    """Return for each job what each rank has written."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    pool.torchrun(Path(main_weights_script.__file__), [str(folder / "jobs.json")], nproc=ranks, timeout_s=400)
    stems = [[folder / f"job_{number}_{rank}" for rank in range(ranks)] for number in range(len(jobs))]
    return [[(load_file(f"{s}.safetensors"), json.loads(Path(f"{s}.json").read_text())) for s in own] for own in stems]


def _same(
    pool: RankPool, folder: Path, parts: list[gp.Parts], kind: Callable[[], nn.Module] = Tied, compiled: bool = False
) -> list[Any]:
    """Check that programs compute the same to the bit with main values apart; return what their ranks report, in pairs."""
    jobs: list[dict[str, Any]] = []
    for number, each in enumerate(parts):
        (folder / str(number)).mkdir()
        for program in _saved(each, kind, folder / str(number)):
            checkpoint = f"{program}_checkpoint"
            jobs.append({"program": str(program), "checkpoint": checkpoint, "compile": compiled})
    for first, second in zip(jobs[::2], jobs[1::2]):  # each loads what the other one has saved
        second["load"] = first["checkpoint"]
    results = _run(pool, folder, jobs, parts[0].plan.mesh.size)
    for first, second in zip(results[::2], results[1::2]):
        for (found, _), (expected, _) in zip(first, second):
            assert found.keys() == expected.keys()
            summed = [name for name in expected if name.startswith(("norm/", "averages"))]
            assert [n for n in expected if n not in summed and not torch.equal(found[n], expected[n])] == []
            assert all(torch.allclose(found[n], expected[n], rtol=1e-6) for n in summed if n != "averages")
            assert all(torch.equal(found[n], found[f"loaded/{n[10:]}"]) for n in found if n.startswith("parameter/"))
        averages = [sum(float(found["averages"]) for found, _ in ranks) for ranks in (first, second)]
        assert averages[0] == pytest.approx(averages[1], rel=1e-6, abs=1e-6)
    for first, second in zip(jobs[::2], jobs[1::2]):
        saved = [load_file(Path(each["checkpoint"]).with_suffix(".safetensors")) for each in (first, second)]
        assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[1])
    return results


def test_numbers_and_bytes(tmp_path: Path, pool: RankPool) -> None:
    number = sample(range(3), 1)[0]
    policies = POLICIES[number], POLICIES[number - 1]
    parts = [_parts(Tied, policies[0], 4, {}), _parts(Autocast, policies[1], 2, {})]
    results = _same(pool, tmp_path, parts)

    trained = sum(p.numel() for p in Tied().parameters() if p.requires_grad)
    elements = trained + Tied().layers[1].up.bias.numel()
    padding = 5 * 2 * 16  # of each unit, in every kind of memory
    for (_, apart), (_, whole) in zip(*results[:2]):
        assert 2 * elements <= apart["parameters"] <= 2 * elements + padding
        assert whole["parameters"] >= 4 * trained
        assert apart["all"] <= whole["all"] - 4 * trained + 2 * trained + 4 * trained / 2 + 23 * WIDTH * 4 + 2 * padding
    assert sum(r["all"] - r["parameters"] for _, r in results[0]) == pytest.approx(12 * trained, abs=4 * padding)
    for own in results[::2]:
        assert all("pipeline.named_parameters()" in report["refused"] for _, report in own)


MORE: list[tuple[Callable[[], nn.Module], str, int, dict[str, int], dict[str, Any]]] = [
    (Tied, "flat", 1, {"pp": 2}, {"schedule": "ZBVZeroBubble"}),
    (Autocast, "contiguous", 2, {"pp": 2}, {"schedule": "1F1B"}),
    (Tied, "longest", 2, {"tp": 2}, {}),
    (Tied, "flat", 2, {"dp_replicate": 2}, {"reduce_dtype": "bf16"}),
    (Tied, "flat", 1, {"dp_shard": 4}, {}),
    (adapted, "flat", 4, {}, {}),
    (Tied, "longest", 2, {}, {"compile": True}),
]


@pytest.mark.costly
@pytest.mark.parametrize("number", sample(range(len(MORE)), 2))
def test_beside_other_axes(number: int, tmp_path: Path, pool: RankPool) -> None:
    kind, by, size, mesh, options = MORE[number]
    compiled = options.get("compile", False)
    _same(pool, tmp_path, [_parts(kind, by, size, mesh, **options)], kind, compiled)


def test_plans_say_which_parameters_are_apart(tmp_path: Path) -> None:
    working = load_manifest(_parts(Autocast, "flat", 2, {}).save(tmp_path / "autocast")).working

    assert set(working.values()) == {torch.bfloat16}
    names = dict(Tied().named_parameters(remove_duplicate=False))
    assert set(working) == {
        n for n in names if ".norm." not in n and names[n].requires_grad and "table" not in n and n != "head.weight"
    }
    for options in (
        {"dtype": "bf16", "zero": 2},
        {"dtype": "fp32", "zero": 1},
        {"dtype": "bf16", "pure": True, "zero": 1},
    ):
        zero = options.pop("zero")
        program = _program(Tied, **options)
        folder = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, zero=zero)).save(
            tmp_path / f"{options}{zero}"
        )
        assert load_manifest(folder).working == {}


FAULTS = {
    "copies that keep the values of before": ("cast", "return None"),
    "copies of other values": ("cast", "original(self); self.own.mul_(1 + 1e-5)"),
    "copies that do not arrive": ("gather", "return []"),
}


@pytest.mark.costly
def test_planted_faults_are_found(tmp_path: Path) -> None:
    parts = _parts(Tied, "flat", 4, {})
    folders = []
    for method, body in FAULTS.values():
        folders.append(parts.save(tmp_path / str(len(folders))))
        path = folders[-1] / "stage_0.py"
        path.write_text(path.read_text() + zero1_script.PLANTED.format(method=method, body=body))
    outcomes = verify_all([parts, *folders], references=[reference_for(parts)] * (1 + len(folders)), timeout_s=300)
    assert [outcome.ok for outcome in outcomes] == [True, False, False, False]
