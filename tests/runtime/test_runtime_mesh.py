"""The runtime on meshes of several axes: hand-written programs give the numbers of the single-process model."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import RuntimeProgramError, load_manifest, sample_keys
from graphpar.runtime.axes import AXES
from graphpar.runtime.groups import Groups
from graphpar.runtime.launching.worker import JobResult, run_jobs
from graphpar.runtime.layout import R, coordinates, joined_all, local_shard, parse_type, rank_at, shard_places
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.state.gradient_buckets import BUCKET_BYTES, buckets
from graphpar.runtime.state.gradients import Gradients
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.replicas import checksum
from graphpar.verification import Reference, Verification, compare
from tests.ranks import runtime_script as fixture
from tests.ranks import sharded_script as sharded
from tests.tools.rank_pool import RankPool

STEPS, OPTIMIZER = 2, {"lr": 0.1, "momentum": 0.9}
DRIVEN = {"tp": {"tp": 2}, "pp x tp": {"pp": 2, "tp": 2}, "dp": {"dp": 2}}


def train(model: torch.nn.Module, batch: dict[str, Tensor], keys: bool) -> Reference:
    """What the single-process model does, as ``verify`` records it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    losses, gradients = [], []
    for step in range(STEPS):
        loss = model(**batch, **({"sample_keys": sample_keys(7, step, fixture.BATCH)} if keys else {}))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    owners: dict[int, tuple[str, ...]] = {}
    for name, parameter in named.items():
        owners[id(parameter)] = (*owners.get(id(parameter), ()), name)
    constant = {name: value for name, value in model.named_buffers() if not name.endswith("calls")}
    return Reference(
        losses=losses,
        gradients=gradients,
        parameters={name: value.detach().clone() for name, value in named.items()},
        buffers=constant,
        ties=[names for names in owners.values() if len(names) > 1],
        dtype=torch.float32,
        persistent=frozenset(),
        batches=[batch] * STEPS,
    )


def compared(reference: Reference, result: JobResult, program: Path) -> Verification:
    manifest = load_manifest(program)
    plan: Any = SimpleNamespace(mesh=Mesh(**manifest.mesh), mode="train", dropout="exact")
    return compare(reference, result, plan, STEPS, manifest)


@pytest.fixture(scope="module")
def tied() -> Reference:
    return train(fixture.reference(), fixture.batch(), keys=True)


@pytest.fixture(scope="module")
def mlp() -> Reference:
    return train(sharded.reference(), sharded.batch(), keys=False)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[JobResult, Path]]:
    """All jobs of four ranks, in one launch."""
    root = tmp_path_factory.mktemp("four")
    transformers = {
        "1F1B": fixture.emit(root / "1f1b", stages=2, ranks=[0, 1], replicas=2),
        "ZBVZeroBubble": fixture.emit(root / "zbv", stages=4, ranks=[0, 1, 1, 0], schedule="ZBVZeroBubble", replicas=2),
        "four replicas": fixture.emit(root / "dp", stages=1, ranks=[0], replicas=4),
    }
    mlps = {
        "pp x tp": sharded.emit(root / "pp-tp", pp=2, tp=2),
        "dp x tp": sharded.emit(root / "dp-tp", dp=2, tp=2),
    }
    jobs = {
        name: fixture.make_job(root / name, program, fixture.batch(), STEPS, OPTIMIZER)
        for name, program in transformers.items()
    }
    jobs |= {
        name: fixture.make_job(root / name, program, sharded.batch(), STEPS, OPTIMIZER)
        for name, program in mlps.items()
    }
    results = run_jobs(list(jobs.values()), world_size=4, timeout_s=150, group_timeout_s=60)
    return {name: (result, {**transformers, **mlps}[name]) for name, result in zip(jobs, results)}


@pytest.mark.costly
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "four replicas"])
def test_replicated_pipelines_equal_the_single_process_model(
    name: str, four: dict[str, tuple[JobResult, Path]], tied: Reference
) -> None:
    result, program = four[name]
    assert result.error is None
    outcome = compared(tied, result, program)
    assert outcome.ok, outcome.to_json()
    assert len(result.rank_losses) == load_manifest(program).replicas
    assert len(set(result.rank_losses)) == 1
    tensors = [entry for rank in range(4) for entry in result.tensors(rank).items()]
    calls = {int(value) for key, value in tensors if key.startswith("buffer/") and key.endswith(".calls")}
    assert calls == {STEPS * load_manifest(program).microbatches}


@pytest.mark.parametrize("name", ["pp x tp", "dp x tp"])
def test_tensor_parallel_programs_equal_the_single_process_model(
    name: str, four: dict[str, tuple[JobResult, Path]], mlp: Reference
) -> None:
    result, program = four[name]
    assert result.error is None
    outcome = compared(mlp, result, program)
    assert outcome.ok, outcome.to_json()
    assert result.tensors(0)["param/block.0.up.weight"].shape == (4, sharded.WIDTH)
    assert result.tensors(0)["buffer/block.0.scale"].shape == (4,)


@pytest.mark.costly
def test_all_three_axes_at_once(tmp_path: Path, mlp: Reference) -> None:
    program = sharded.emit(tmp_path / "out", pp=2, dp=2, tp=2)
    (result,) = run_jobs(
        [fixture.make_job(tmp_path / "job", program, sharded.batch(), STEPS, OPTIMIZER)], world_size=8, timeout_s=150
    )
    assert result.error is None
    outcome = compared(mlp, result, program)
    assert outcome.ok, outcome.to_json()
    assert "grad/0/block.0.shift" not in result.tensors(0)


class _Tampered(JobResult):
    """A result in which one tensor of one rank was changed."""

    rank: int
    key: str
    element: int

    def tensors(self, rank: int) -> dict[str, Tensor]:
        found = dict(super().tensors(rank))
        if rank == self.rank:
            found[self.key] = found[self.key].clone()
            found[self.key].view(-1)[self.element] += 1e-3
        return found


@pytest.mark.parametrize(
    ("rank", "key", "element", "problem"),
    [
        (3, "param/block.1.up.weight", 0, "parameter block.1.up.weight: its copies on ranks 0 and 2 differ by 0.001"),
        (1, "param/block.0.down.bias", 2, "parameter block.0.down.bias: its copies on ranks 0 and 1 differ by 0.001"),
        (1, "param/block.0.up.bias", 3, "parameter block.0.up.bias: the padding of rank 1's shard is not zero"),
        (3, "grad/1/block.0.up.bias", 3, "gradient block.0.up.bias: the padding of rank 3's shard is not zero"),
    ],
)
def test_verify_sees_a_replica_that_drifts_and_padding_that_is_not_zero(
    rank: int, key: str, element: int, problem: str, four: dict[str, tuple[JobResult, Path]], mlp: Reference
) -> None:
    result, program = four["dp x tp"]
    tampered = _Tampered(result.folder, 4, None, result.losses, result.missing_gradients)
    for name, value in {"rank": rank, "key": key, "element": element}.items():
        object.__setattr__(tampered, name, value)
    outcome = compared(mlp, tampered, program)
    assert problem in outcome.problems
    wrong_loss = replace(result, rank_losses=(result.losses, (result.losses[0] + 1e-3, result.losses[1])))
    assert not compared(mlp, wrong_loss, program).ok


@pytest.mark.costly
@pytest.mark.parametrize("name", [pytest.param("tp", marks=pytest.mark.slow), "pp x tp", "dp"])
def test_accumulation_clipping_saving_and_a_replica_with_other_weights(
    name: str, tmp_path: Path, pool: RankPool
) -> None:
    mesh = DRIVEN[name]
    program = sharded.emit(tmp_path / "out", **mesh)
    size = load_manifest(program).world_size
    pool.torchrun(Path(sharded.__file__), [str(program), str(tmp_path)], nproc=size, timeout_s=90)
    seen = [json.loads((tmp_path / f"drive_{rank}.json").read_text()) for rank in range(size)]
    model = sharded.reference()
    for _ in range(2):
        loss = model(**sharded.batch())
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    axis = "dp_replicate" if "dp" in mesh else "tp"
    for rank, values in enumerate(seen):
        assert f"should be the same on all ranks of the {axis} axis, but ranks 0 and 1 loaded" in values["mismatch"]
        assert values["losses"] == pytest.approx([loss.item()] * 2, rel=1e-5)
        last = rank >= size - size // mesh.get("pp", 1)
        assert values["eval"] == pytest.approx({"loss": loss.item()} if last else {}, rel=1e-5)
        assert values["norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert values["clipped"] == pytest.approx(0.25, rel=1e-4)
        assert values["round trip"]
    assert [values["reports"] for values in seen].count(True) == 1
    saved = load_file(tmp_path / "saved.safetensors")
    expected = model.state_dict()
    assert {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in expected.items()}
    for key, value in expected.items():
        torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.slow
def test_outputs_of_replicas_are_joined(tmp_path: Path, pool: RankPool) -> None:
    program = fixture.emit(tmp_path / "out", stages=4, ranks=[0, 1, 0, 1], schedule="Interleaved1F1B", replicas=2)
    inference = fixture.emit(tmp_path / "inference", stages=2, ranks=[0, 1], infer=True, replicas=2)
    pool.torchrun(Path(fixture.__file__), [str(program), str(inference), str(tmp_path)], nproc=4, timeout_s=90)
    seen = json.loads((tmp_path / "drive_3.json").read_text())
    assert "ranks 0 and 1 got different values of target" in seen["wrong"]
    assert "expects 8 (2 microbatches of 2 on each of 2 replicas)" in seen["uneven"]
    with torch.no_grad():
        logits = fixture.reference()(fixture.batch()["input_ids"], None, sample_keys(0, 0, fixture.BATCH))
    found = load_file(tmp_path / "outputs.safetensors")["logits"]
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)


# ---- without processes -----------------------------------------------------------------------------------------


def test_a_plan_that_cuts_wrongly_says_so(tmp_path: Path) -> None:
    program = sharded.emit(tmp_path / "out", tp=2)
    plan = json.loads((program / "plan.json").read_text())

    def error(change: Any) -> str:
        edited = json.loads(json.dumps(plan))
        change(edited)
        (program / "plan.json").write_text(json.dumps(edited))
        with pytest.raises(RuntimeProgramError) as caught:
            load_manifest(program)
        return str(caught.value)

    def without_shape(edited: Any) -> None:
        del edited["interface"]["shapes"]["block.0.up.bias"]

    assert "'block.0.up.bias' is sharded, but interface.shapes does not have its full shape" in error(without_shape)
    ties = error(lambda edited: edited["parameters"].update({"table.weight": {"tp": "R"}, "out.weight": {"tp": "I"}}))
    assert "the names table.weight, out.weight of one parameter have different types" in ties
    assert "'Q' is not a type" in error(lambda edited: edited["parameters"].update({"table.weight": {"tp": "Q"}}))
    assert "on each of 2 replicas are not a global batch of 8" in error(
        lambda edited: edited["mesh"].update(dp_replicate=2)
    )


def test_names_that_the_plan_does_not_list_and_names_of_a_tie(tmp_path: Path) -> None:
    program = sharded.emit(tmp_path / "out", dp=2, tp=2)
    plan = json.loads((program / "plan.json").read_text())
    plan["parameters"]["table.weight"] = {"tp": "S(0)"}
    plan["interface"]["shapes"]["table.weight"] = [9, 6]
    (program / "plan.json").write_text(json.dumps(plan))
    manifest = load_manifest(program)
    spec = {name: {axis: str(kind) for axis, kind in manifest.spec(name).items()} for name in ("out.weight", "other")}
    assert spec == {"out.weight": {"dp_replicate": "R", "tp": "S(0)"}, "other": {"dp_replicate": "R", "tp": "I"}}
    assert manifest.shapes["out.weight"] == (9, 6)


def test_ranks_are_the_inverse_of_coordinates() -> None:
    degrees = {"pp": 2, "dp_replicate": 3, "tp": 4}
    assert [rank_at(coordinates(rank, degrees), degrees) for rank in range(24)] == list(range(24))


@pytest.mark.parametrize(
    "texts",
    [{"tp": "S(0)"}, {"ep": "S(0)", "tp": "S(0)"}, {"cp": "S(1)", "tp": "S(0)"}, {"tp": "S(1:4+2)"}, {"tp": "I"}],
)
def test_pieces_join_to_the_whole(texts: dict[str, str]) -> None:
    whole, degrees = torch.randn(7, 12), dict.fromkeys(AXES, 1) | dict.fromkeys(texts, 2)
    spec = {axis: parse_type(text) for axis, text in texts.items()}
    pieces = [local_shard(whole, spec, degrees, place) for place in shard_places(spec, degrees)]
    assert len({piece.shape for piece in pieces}) == 1
    assert torch.equal(joined_all(pieces, whole.shape, spec, degrees), whole)


def test_16384_ranks_make_one_call_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[int, int, bool]] = {}

    def split_group(
        parent: None, groups: list[list[int]], *, pg_options: SimpleNamespace, group_desc: str, **_: object
    ) -> None:
        assert group_desc not in made and len({rank for group in groups for rank in group}) == 16384
        made[group_desc] = len(groups), len(groups[0]), pg_options.is_high_priority_stream

    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16384)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "split_group", split_group)
    backend = SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=False, _timeout=None))
    monkeypatch.setattr("graphpar.runtime.groups._backend", lambda _: backend)
    degrees = {"pp": 8, "dp_replicate": 8, "dp_shard": 16, "cp": 2, "tp": 8}
    groups = Groups(degrees, torch.device("cuda"))
    assert made.pop("dp_replicate_dp_shard") == (128, 128, False)
    assert made == {axis: (16384 // degree, degree, axis in ("pp", "tp")) for axis, degree in degrees.items()}
    made.clear()
    assert groups["fsdp"] is None and made == {"state": (512, 32, False)}


def test_groups_of_several_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: made.append(ranks))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr("graphpar.runtime.groups.group_timeout", lambda _: None)
    groups = Groups({"pp": 2, "dp_replicate": 2, "tp": 2}, torch.device("cpu"))
    assert made == [
        *([0, 4], [1, 5], [2, 6], [3, 7]),
        *([0, 2], [1, 3], [4, 6], [5, 7]),
        *([0, 1], [2, 3], [4, 5], [6, 7]),
    ]
    made.clear()
    groups.over(("tp", "dp_replicate"))
    groups.over(("dp_replicate", "tp"))
    assert made == [[0, 1, 2, 3], [4, 5, 6, 7]]
    made.clear()
    groups.over(("dp_replicate",), (0, 1))
    assert made == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_buckets_are_filled_in_order_and_by_dtype() -> None:
    big = torch.empty(BUCKET_BYTES // 4 + 1)
    half = torch.empty(BUCKET_BYTES // 8)
    other = torch.empty(3, dtype=torch.bfloat16)
    assert buckets([half, other, half, half, big, half]) == [[0, 2], [3], [4], [1], [5]]


def test_sums_over_replicas_start_in_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's bucket is sent off before the gradient reaches the layer below; what autograd does not see goes at the end."""
    events: list[str] = []

    def all_reduce(tensor: Tensor, **options: Any) -> None:
        events.append(f"sum of {tensor.numel()}" if options.get("async_op") else "flags")

    monkeypatch.setattr("graphpar.runtime.state.gradient_buckets.dist.all_reduce", all_reduce)
    monkeypatch.setattr("graphpar.runtime.state.gradient_buckets.BUCKET_BYTES", 1)
    group, microbatches = object(), 2
    replicas = SimpleNamespace(
        rank=0,
        degrees={"dp_replicate": 2},
        place={"pp": 0, "dp_replicate": 0},
        axes={"dp_replicate": group},
        gather=lambda _, value: [value],
        over=lambda *_: group,
    )
    manifest = SimpleNamespace(
        microbatches=microbatches,
        ties=(),
        placed=(),
        zero=0,
        reduced=None,
        dtype="fp32",
        scales_loss=False,
        expert_room=None,
        pp=1,
        fully_sharded=frozenset(),
        stored=lambda _: {"dp_replicate": R},
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for width in (2, 3, 4)))
    by_hand = torch.nn.Parameter(torch.ones(5))
    model.register_parameter("by_hand", by_hand)

    def backward() -> None:
        x = torch.ones(2)
        for layer in model:
            x = torch.nn.functional.pad(layer(x), (0, 1))
            x.register_hook(lambda _, layer=layer: events.append(f"backward of {layer.weight.numel()}"))  # type: ignore[misc]
        x.sum().backward()
        by_hand.grad = torch.ones(5) if by_hand.grad is None else by_hand.grad + 1

    gradients = Gradients(Replicated([model], manifest, replicas), torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(2):  # the second step adds to what is there
        gradients.take()
        backward()
        assert not any("sum" in event for event in events)
        events.clear()
        backward()
        gradients.finish()
        order = [event for event in events if event != "flags"]
        assert order == [
            *("backward of 16", "sum of 16", "backward of 9", "sum of 9", "backward of 4", "sum of 4"), "sum of 5",
        ]  # fmt: skip
        events.clear()
    assert by_hand.grad is not None and by_hand.grad.tolist() == [4.0] * 5

    gone = weakref.ref(gradients)
    del gradients
    assert gone() is None  # parameters don't keep it, and with it process groups, alive
    backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_one_element_and_an_exchange(dtype: torch.dtype) -> None:
    value = (torch.arange(60) % 7 * 1.5).reshape(5, 12).t().to(dtype)
    changed = value.clone()
    changed[3, 2] = changed[3, 2] == 0
    assert checksum(value) == checksum(value.contiguous())
    assert checksum(value) != checksum(changed)
    exchanged = value.clone()
    exchanged[0, 0], exchanged[1, 0] = value[1, 0].clone(), value[0, 0].clone()
    assert checksum(value) != checksum(exchanged)
