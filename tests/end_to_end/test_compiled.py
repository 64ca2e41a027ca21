"""``torch.compile`` of the blocks changes no number beyond rounding, whatever runs around them, and compiles each kind of block once."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from safetensors.torch import save_file
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_map

import graphpar as gp
from graphpar.cli.main import main
from graphpar.cli.trace import export_file
from graphpar.emitted.recomputation import recompute_but
from graphpar.errors import GraphparError
from graphpar.frontend.modelfile import ModelFile, example_batch, initial_weights
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.runtime.stages import compiled
from graphpar.runtime.stages.compiled import backend_of, compile_repetitions
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES, COMPILES_REPETITIONS
from graphpar.verification.tolerances import PRECISIONS
from tests.ranks import compiled_script
from tests.tools.parity import WIDTH, Block
from tests.tools.programs import LARGE, SMALL, example, example_file
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

MESHES: dict[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "hooked": {"devices": 1},
    "tp": {"mesh": {"tp": 2}},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "1F1B": {"mesh": {"pp": 2}},
    "interleaved": {"mesh": {"pp": 2}, "schedule": "Interleaved1F1B"},
    "recomputed": {"mesh": {"dp_shard": 2}, "recompute": "full"},
    "partly": {"mesh": {"dp_shard": 2}, "recompute": {"**.0": "budget:0.6", "**.1": "full"}},
    "selective": {"mesh": {"tp": 2}, "sp": True, "recompute": "selective"},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"ep": 2}},
}
PAIRS = [
    *(("gpt_dropout", mesh) for mesh in ("tp", "zero 3", "interleaved", "recomputed", "selective")),
    *(("llama", mesh) for mesh in ("tp", "cp", "zero 1", "zero 2", "recomputed", "partly", "selective", "1F1B")),
    *(("mixtral", mesh) for mesh in ("ep", "tp", "zero 3")),
    *((name, mesh) for name in ("t5", "unet", "resnet", "vit") for mesh in ("tp", "1F1B", "zero 3")),
]


def compared(
    cases: Mapping[str, Sequence[str]],
    backend: str,
    tmp_path: Path,
    pool: RankPool,
    nproc: int = 2,
    double: bool = False,
) -> dict[str, dict[str, Any]]:
    """What :mod:`compiled_script` says of examples' programs, in float64 if ``double``, on each of their meshes."""
    if not COMPILES_COLLECTIVES:
        left = {name: [mesh for mesh in meshes if mesh not in ("tp", "cp", "ep")] for name, meshes in cases.items()}
        cases = {name: meshes for name, meshes in left.items() if meshes}
    for name, meshes in cases.items():
        file, folder = in_double(example_file(name)) if double else example_file(name), tmp_path / name
        program = export_file(file, None, None) if double else example(name)
        for mesh in meshes:
            gp.partition(program, gp.plan(program, **MESHES[mesh])).save(folder / mesh)
        weights = {key: value.clone() for key, value in initial_weights(file).items()}
        save_file(weights, folder / "weights.safetensors")
        save_file(example_batch(file, load_manifest(folder / meshes[0]).inputs), folder / "batch.safetensors")
    pool.torchrun(Path(compiled_script.__file__), [str(tmp_path), backend], nproc=nproc, timeout_s=1500)
    seen: dict[str, dict[str, Any]] = json.loads((tmp_path / "rank_0.json").read_text())
    assert seen.keys() == {f"{name} {mesh}" for name, meshes in cases.items() for mesh in meshes}
    return seen


def in_double(file: ModelFile) -> ModelFile:
    """A model file whose parameters and inputs are in float64."""
    args, kwargs = tree_map(lambda each: each.double() if each.is_floating_point() else each, (file.args, file.kwargs))
    return replace(file, model=lambda: file.model().double(), args=args, kwargs=kwargs)  # type: ignore[operator]


def check(seen: Mapping[str, Mapping[str, Any]], dtype: torch.dtype = torch.float32) -> None:
    assert not rounded(seen, dtype), seen
    for name, found in seen.items():
        assert found["gradients"], (name, found)
        hooked = "hooked" in name  # one block is unlike the others after the first step
        assert found["graphs"] == [found["kinds"], *[found["kinds"] + hooked] * (compiled_script.STEPS - 1)], (
            name,
            found,
        )
        assert not found["breaks"], (name, found)


def rounded(seen: Mapping[str, Mapping[str, Any]], dtype: torch.dtype) -> list[str]:
    """The programs whose numbers differ by more than a dtype allows."""
    allowed = PRECISIONS[dtype].allowed
    kinds = ("loss", "gradient", "parameter")
    return [name for name, found in seen.items() if any(found[kind] > allowed[kind] for kind in kinds)]


def check_fused(cases: Mapping[str, Sequence[str]], tmp_path: Path, pool: RankPool, nproc: int = 2) -> None:
    """Fused kernels change results by 1e-5, and what lies on the other side of a ReLU's kink then changes gradients by far more.

    As in ``verify``, such programs are decided in float64: there results change by 1e-14, and hardly any crosses it.
    """
    seen = compared(cases, "inductor", tmp_path / "fp32", pool, nproc)
    again: dict[str, list[str]] = {}
    for name in rounded(seen, torch.float32):
        model, mesh = name.split(" ", 1)
        again.setdefault(model, []).append(mesh)
        del seen[name]
    check(seen)
    if again:
        seen = compared(again, "inductor", tmp_path / "fp64", pool, nproc, double=True)
        in_full = {name for name, found in seen.items() if casts(name.split(" ", 1)[0])}
        check({name: found for name, found in seen.items() if name not in in_full}, torch.float64)
        check({name: found for name, found in seen.items() if name in in_full})


def casts(name: str) -> bool:
    """Whether a model computes something in fp32 whatever it is in, as the loss of grpo does."""
    nodes = export_file(in_double(example_file(name)), None, None).graph.nodes
    return any(torch.float32 in (*node.args, *node.kwargs.values()) for node in nodes)


@pytest.mark.costly
def test_compiled_blocks_train_as_others(tmp_path: Path, pool: RankPool) -> None:
    check(compared({"gpt": ["tp", "zero 1", "recomputed", "1F1B"]}, "aot_eager", tmp_path, pool))


@pytest.mark.costly
def test_blocks_of_examples_are_compiled_whole_and_once(tmp_path: Path, pool: RankPool) -> None:
    names = sample(["gpt_dropout", "mixtral", "resnet", "vit", "head_first", "two_towers"], 1)
    check(compared({"gpt": ["hooked"]} | {name: ["one"] for name in names}, "aot_eager", tmp_path, pool, nproc=1))


@pytest.mark.costly
def test_what_stands_between_blocks_is_compiled(tmp_path: Path, pool: RankPool) -> None:
    (found,) = compared({"gpt2_tiny": ["one"]}, "aot_eager", tmp_path, pool, nproc=1).values()
    assert found["graphs"][0] == 1 + 3  # the block; embeddings, norm and head, loss


def test_a_graph_too_many_runs_uncompiled() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    run = compiled._tried(double, "eager", None)
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        assert [len(run(torch.ones(size))) for size in (1, 2)] == [1, 2]
        with pytest.warns(UserWarning, match=r"double has 2 graphs, and runs uncompiled where it would need another"):
            assert torch.equal(run(torch.ones(3)), torch.full([3], 2.0))
        assert torch.equal(run(torch.ones(2)), torch.full([2], 2.0))


def test_a_list_of_lengths_has_a_graph_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(gp.partition(example("gpt"), gp.plan(example("gpt"))).save(tmp_path / "one"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._dynamo.config.patch(recompile_limit=8):
        backend_of(replace(manifest, seq=",".join(map(str, range(2, 12)))), "eager", torch.device("cpu"))
        assert torch._dynamo.config.recompile_limit == 2 * 10


@pytest.mark.slow
def test_blocks_of_all_examples_are_compiled_whole_and_once(tmp_path: Path, pool: RankPool) -> None:
    check(compared({name: ["one"] for name in SMALL}, "aot_eager", tmp_path, pool, nproc=1))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_blocks_of_examples_train_as_others_with_fused_kernels(tmp_path: Path, pool: RankPool) -> None:
    check_fused({name: ["one"] for name in sample(SMALL, 6)}, tmp_path, pool, nproc=1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_rounding_moves_over_a_kink_is_decided_in_float64(tmp_path: Path, pool: RankPool) -> None:
    check_fused({"resnet_batchnorm": ["one"]}, tmp_path, pool, nproc=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), sample(PAIRS, 8))
def test_compiled_blocks_train_as_others_on_meshes(name: str, mesh: str, tmp_path: Path, pool: RankPool) -> None:
    check(compared({name: [mesh]}, "aot_eager", tmp_path, pool))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), sample(PAIRS, 3))
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_train_as_others_on_meshes_with_fused_kernels(
    name: str, mesh: str, tmp_path: Path, pool: RankPool
) -> None:
    check_fused({name: [mesh]}, tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE - {"gpt2", "mixtral_8x22b"}))  # products of experts on meta want bf16
def test_blocks_of_large_examples_are_taken_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = example(name)
    parts = gp.partition(program, gp.plan(program, devices=1, recompute="none"))
    parts.save(tmp_path / f"emitted_{name}")
    monkeypatch.syspath_prepend(str(tmp_path))
    emitted = importlib.import_module(f"emitted_{name}.blocks")
    for kind, block in program.blocks.items():
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        values = [node.meta["val"] for node in block.graph.nodes if node.op == "placeholder"]
        inputs = [
            torch.empty(
                [2 if not isinstance(size, int) else size for size in value.shape], dtype=value.dtype, device="meta"
            )
            for value in values
        ]
        with torch.device("meta"):
            instances = [getattr(emitted, kind)() for _ in range(2)]
        for instance in instances:
            torch.compile(instance.forward, fullgraph=True, backend=counter)(*inputs)
        assert counter.frame_count == 1
    sys.modules.pop(f"emitted_{name}.blocks")


def test_what_cant_be_compiled_is_refused(tmp_path: Path) -> None:
    program, cpu = example("gpt"), torch.device("cpu")
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        plan = gp.plan(program, mesh={"pp": 2}, schedule=schedule)
        manifest = load_manifest(gp.partition(program, plan).save(tmp_path / schedule))
        with pytest.raises(RuntimeProgramError, match=rf"{schedule} splits backwards in two"):
            backend_of(manifest, True, cpu)
        with pytest.raises(GraphparError, match=rf"compile: the schedule {schedule} splits backwards in two"):
            gp.plan(program, mesh={"pp": 2}, schedule=schedule, compile=True)
    manifest = load_manifest(gp.partition(program, gp.plan(program)).save(tmp_path / "one"))
    with pytest.raises(RuntimeProgramError, match=r"no backend 'induct'; there are .*inductor"):
        backend_of(manifest, "induct", cpu)


def test_collectives_are_not_compiled_by_a_torch_that_loses_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load_manifest(
        gp.partition(example("gpt"), gp.plan(example("gpt"), mesh={"tp": 2})).save(tmp_path / "tp")
    )
    monkeypatch.setattr("graphpar.runtime.stages.compiled.COMPILES_COLLECTIVES", False)
    with pytest.raises(
        RuntimeProgramError, match=r"loses collectives in blocks that it compiles; use torch 2\.13 or later"
    ):
        backend_of(manifest, True, torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"blocks are not compiled, as the plan has it: torch .* loses collectives"):
        assert backend_of(replace(manifest, compile=True), None, torch.device("cpu")) is None


def test_what_was_compiled_is_kept_in_the_programs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = example("gpt")
    parts = gp.partition(program, gp.plan(program))
    plain, spaced = parts.save(tmp_path / "one"), parts.save(tmp_path / "a path")  # which no C++ compiler is given
    for folder, before, kept in (
        (plain, default_cache_dir(), str(plain / "compiled")),
        (plain, str(tmp_path / "mine"), str(tmp_path / "mine")),
        (spaced, default_cache_dir(), default_cache_dir()),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        assert backend_of(load_manifest(folder), "eager", torch.device("cpu")) == "eager"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == kept


def test_a_plan_that_is_given_is_compiled_or_not_as_asked(tmp_path: Path) -> None:
    file = str(example_file("gpt").path)
    for number, (flags, compiles) in enumerate(
        ((["--compile"], True), ([], True), (["--no-compile"], False), ([], False))
    ):
        given = [] if number else ["--mesh", "pp=2"]
        plan = ["--plan", str(tmp_path / f"{number - 1}" / "plan.json")] if number else []
        assert main(["compile", file, *given, *plan, *flags, "-o", str(tmp_path / f"{number}"), "--json"]) == 0
        assert json.loads((tmp_path / f"{number}" / "plan.json").read_text())["compile"] is compiles


def test_a_program_is_compiled_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpar.runtime.stages.compiled.has_triton", lambda: True)
    program = example("gpt")
    plans = {
        "of a mesh": gp.plan(program, mesh={"pp": 2}, compile=True),
        "of GPUs": gp.plan(program, "2xA100", mesh={"pp": 2}, global_batch=64, compile=True),
        "of GPUs, as usual": gp.plan(program, "2xA100", mesh={"pp": 2}, schedule="1F1B", global_batch=64),
        "plain": gp.plan(program, mesh={"pp": 2}),
        "plain of GPUs": gp.plan(program, "2xA100", mesh={"pp": 2}, schedule="1F1B", global_batch=64, compile=False),
    }
    programs = {name: load_manifest(gp.partition(program, plan).save(tmp_path / name)) for name, plan in plans.items()}
    found = {
        name: [backend_of(each, None, torch.device(device)) for device in ("cpu", "cuda")]
        for name, each in programs.items()
    }
    assert found == {
        "of a mesh": ["inductor"] * 2,
        "of GPUs": [None, "inductor"],
        "of GPUs, as usual": [None, "inductor"],
        "plain": [None] * 2,
        "plain of GPUs": [None] * 2,
    }
    asked = {
        compile: {backend_of(each, compile, torch.device("cpu")) for each in programs.values()}
        for compile in (True, False, "eager")
    }
    assert asked == {True: {"inductor"}, False: {None}, "eager": {"eager"}}


def test_the_search_takes_a_plan_that_can_be_compiled() -> None:
    program = example("gpt")
    free = gp.plan(program, "2xA100", mesh={"pp": 2}, global_batch=64)
    asked = gp.plan(program, "2xA100", mesh={"pp": 2}, global_batch=64, compile=True)
    assert SCHEDULES[free.schedule].splits_backward and not free.compile  # else nothing is left out
    assert not SCHEDULES[asked.schedule].splits_backward and asked.compile


@pytest.mark.costly
def test_plans_on_gpus_compile_what_can_be() -> None:
    program, pins = example("gpt_dropout"), {"mesh": {"pp": 2}, "schedule": "1F1B", "global_batch": 64}
    for changed, compiles in (
        ({}, True),
        ({"recompute": "selective"}, True),  # whose blocks are not compiled
        ({"schedule": "ZBVZeroBubble"}, False),
        ({"offload": "activations"}, False),
        ({"dropout": "kernel"}, False),
    ):
        assert gp.plan(program, "2xA100", **(pins | changed)).compile is compiles, changed  # type: ignore[arg-type]
    assert not gp.plan(program, gp.Cluster.of_this_machine(2), **pins).compile  # type: ignore[arg-type]


def test_a_search_on_gpus_prices_compiled_plans_beside_schedules_that_split_backwards() -> None:
    pins = PlanConstraints(cluster=gp.Cluster.parse("4xA100"), mesh={"pp": 2}, global_batch=64)
    every = Planner(example("gpt"), pins).space.all
    seen = {(SCHEDULES[each.schedule].splits_backward, each.compile) for each in every}
    assert seen == {(True, False), (False, True)}


@pytest.mark.skipif(not COMPILES_REPETITIONS, reason="torch shares graphs of several policies")
def test_blocks_keep_compiled_what_they_keep_by_themselves() -> None:
    """Of two policies each in a block of one class, neither of which torch's guards tell from the other."""
    kept: list[float] = []
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    for keeps in ({}, {"product": (0, 1, 2, 3, 4, 5), "attention": (0,)}, None):
        stage = nn.Module()
        stage.block = Block()
        if keeps is not None:
            recompute_but(stage.block, keeps or {"nothing": (0,)})
            compile_repetitions(stage, "aot_eager", ["block"])
        else:
            stage.block.forward = torch.compile(stage.block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
        own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            if tensor.is_floating_point():  # no state of a generator
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stage.block(x).sum().backward()
        kept.append(sum(nbytes for place, nbytes in found.items() if place not in own) / (x.numel() * 4))

    assert kept[0] == 1  # what enters the block
    assert 7 < kept[1] < kept[2] - 2, kept  # q, k, v, attention and its sums, o, up (2) and what enters


@pytest.mark.parametrize(
    ("name", "kept"), [("plain-1.0", True), ("a b", False), ("bob's", False), ('two"', False), ("x{y}", False)]
)
def test_what_is_compiled_is_kept_where_the_compiler_of_cpp_takes_the_path(
    name: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(*tmp_path.parts[:3]) / f"graphpar-{os.getpid()}" / name  # without the brackets of a test's name
    folder.mkdir(parents=True)
    monkeypatch.delenv(compiled._CACHE, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    compiled._keep_beside(folder)
    shutil.rmtree(folder.parent)
    assert (compiled._CACHE in os.environ) == kept
