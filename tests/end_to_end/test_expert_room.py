"""Room for rows of experts: programs that wait for no layer, and compute again what does not fit, are the unpartitioned model."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import graphpar as gp
from graphpar.cost_models.activation_memory import Activations
from graphpar.cost_models.workload import Works
from graphpar.emitted import expert_rows
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, value_of
from graphpar.passes.normalize.functional import copied
from graphpar.passes.sharding.expert_room import with_room
from graphpar.passes.split import split
from graphpar.runtime.layout import P
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE
from graphpar.runtime.options import Decisions, check_decisions
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES
from graphpar.verification import verify_all
from tests.ranks import expert_room_script as script
from tests.tools.programs import example
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

WHOLE = {"model.layers.*.mlp.experts": "expert"}


@functools.cache
def mixture() -> Program:
    pytest.importorskip(
        "transformers.integrations.moe"
    )  # it registers the product by groups that can be traced in fp32
    torch.manual_seed(0)
    return gp.export(script.Mixture(), (), script.batches(0)[0], evaluates=True)


def made(mesh: Mapping[str, int], room: float | None, **pins: Any) -> gp.Partitioned:
    return gp.partition(mixture(), gp.plan(mixture(), mesh=mesh, expert_room=room, **pins))


def trained(programs: Mapping[str, gp.Partitioned], folder: Path, pool: RankPool) -> dict[str, dict[str, Any]]:
    """What each program found, whose name ends with how its router spreads rows."""
    for name, parts in programs.items():
        parts.save(folder / name)
        save_file(script.weights_of(name.rpartition(" ")[2]), folder / name / "weights.safetensors")
    pool.torchrun(Path(script.__file__), [str(folder), *programs], nproc=2, timeout_s=240)
    found = {}
    for name in programs:
        steps = [load_file(folder / name / f"step_{step}.safetensors") for step in range(script.STEPS)]
        found[name] = json.loads((folder / name / "seen.json").read_text()) | {"states": steps}
    return found


def differ(found: Mapping[str, Any], kind: str) -> bool:
    """Whether losses, parameters after each step, or gradients, which are their differences, are not those of one process."""
    weights = script.weights_of(kind)
    losses, states, evaluated = script.eager(weights)
    same = found["losses"] == pytest.approx(losses, rel=1e-5)
    same &= found["evaluated"]["loss"] == pytest.approx(evaluated, rel=1e-5)
    for before, after, own_before, own in zip([weights, *states], states, [weights, *found["states"]], found["states"]):
        for name in weights:
            gradient, own_gradient = before[name] - after[name], own_before[name] - own[name]
            same &= torch.allclose(own_gradient, gradient, rtol=1e-4, atol=1e-6)
            same &= torch.allclose(own[name], after[name], rtol=1e-4, atol=1e-6)
    return not same


@pytest.mark.costly
def test_programs_are_the_model_whether_rows_have_room_or_not_and_no_layer_waits(
    tmp_path: Path, pool: RankPool
) -> None:
    meshes = {"dp_expert": {"dp_expert": 2}, "ep": {"ep": 2}}
    programs = {
        f"{axis} {room} {kind}": made(mesh, room)
        for axis, mesh in meshes.items()
        for room, kind in ((1.5, "balanced"), (1.5, "skewed"), (None, "balanced"))
    }
    for name, found in trained(programs, tmp_path, pool).items():
        _, room, kind = name.split()
        assert not differ(found, kind), name
        repeats = kind == "skewed"
        assert found["repeated"] == (script.STEPS + 1) * repeats and found["warned"] == repeats, name
        squares = sum(each["x"].square().sum().item() for each in script.batches(script.STEPS - 1))
        assert found["evaluated"]["square"] == pytest.approx(squares, rel=1e-5)
        assert found["calls"] == script.STEPS + 2, name  # steps, and batches of evaluation
        rows = script.ROWS * 16 * script.TOP * script.LAYERS
        assert found["rows"] == [rows, rows, 2 * rows], name
        waits = script.LAYERS if repeats or room == "None" else 0  # of a batch
        assert found["reads"] == [waits, waits, 2 * waits], name


@pytest.mark.parametrize(
    ("mesh", "noted"),
    [
        ({"dp_expert": 2}, "_lacking.logical_or_((ends - begins > room).any())"),
        ({"ep": 2}, "_lacking.logical_or_(end - begin > held)"),
    ],
    ids=str,
)
@pytest.mark.sampled(1 / 2)
def test_rows_that_are_left_out_without_a_word_are_found(
    mesh: dict[str, int], noted: str, tmp_path: Path, pool: RankPool
) -> None:
    parts = made(mesh, 1.5)
    files = {**parts.files, "expert_rows.py": parts.files["expert_rows.py"].replace(noted, "pass")}
    assert files != parts.files

    found = trained({"a fault skewed": replace(parts, files=files)}, tmp_path, pool)["a fault skewed"]
    assert found["repeated"] == 0 and differ(found, "skewed")


@pytest.mark.costly
@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="this torch loses collectives in what it compiles")
@pytest.mark.parametrize("axis", ["dp_expert", "ep"])
@pytest.mark.sampled(1 / 2)
def test_compiled_programs_notice_what_has_no_room(axis: str, tmp_path: Path, pool: RankPool) -> None:
    programs = {f"compiled {kind}": made({axis: 2}, 1.5) for kind in ("balanced", "skewed")}

    for name, found in trained(programs, tmp_path, pool).items():
        kind = name.removeprefix("compiled ")
        assert not differ(found, kind), name
        assert found["repeated"] == (script.STEPS + 1) * (kind == "skewed"), name


PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp_expert": 2, "ep": 2}},
    {"mesh": {"dp_expert": 2, "pp": 2}, "schedule": "1F1B", "microbatch_size": 1},
    {"mesh": {"tp": 2}, "shard_plan": WHOLE},
    {"mesh": {"cp": 2}, "shard_plan": {"model.layers.*.mlp.experts.*": "S(0)@cp"}},
    {"mesh": {"dp_shard": 2, "dp_expert": 2}},
    {"mesh": {"dp_shard": 2, "dp_expert": 2}, "zero": 1},
    {"mesh": {"dp_shard": 2, "ep": 2}, "zero": 2, "recompute": "full"},
)


@pytest.mark.costly
def test_batches_are_computed_again_beside_every_other_axis() -> None:
    """With room for the mean alone hardly a batch fits."""
    program, plans = example("mixtral"), sample(list(PLANS), 2)
    parts = [gp.partition(program, gp.plan(program, expert_room=1.0, **pins)) for pins in plans]

    assert [gp.check(each).problems for each in parts] == [[]] * len(parts)
    for pins, outcome in zip(plans, verify_all(parts, 3, timeout_s=300)):
        assert outcome.ok, (pins, outcome.problems, outcome.max_error, outcome.worst)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "sent"), [({"dp_expert": 2}, 1.5), ({"dp_expert": 2, "ep": 2}, 1.5), ({"ep": 2}, 1.0)], ids=str
)
def test_messages_and_memory_count_the_room_and_products_the_mean_rows(mesh: dict[str, int], sent: float) -> None:
    found = []
    for room in (None, 1.5):
        local = gp.plan(example("mixtral"), mesh=mesh, expert_room=room).sharded.local
        works, (block,) = Works(local, Mesh(**mesh).degrees()), local.blocks.values()
        rows = [row for node in block.graph.nodes for row in works.collectives(node, block.name)]
        moved = sum(row.nbytes.at(4) for row in rows if row.kind == "all-to-all" and row.axis == "dp_expert")
        others = sum(row.nbytes.at(4) for row in rows if row.axis != "dp_expert")
        (stage,) = split(local, [])
        kept = Activations(local, Mesh(**mesh).degrees(), even_experts=True).reach(stage, 4).inside
        products = works.block(block).flops(4)
        found.append((moved, others, products, kept))

    (moved, others, products, kept), (moved_with_room, others_with_room, products_with_room, kept_with_room) = found
    assert moved_with_room == pytest.approx(sent * moved) and others_with_room == others
    assert products_with_room == products
    assert kept < kept_with_room < 1.5 * kept


@pytest.mark.parametrize("axis", ["ep"])
def test_an_operator_that_combines_the_rows_of_experts_is_refused(axis: str) -> None:
    local = gp.plan(example("mixtral"), mesh={axis: 2}).sharded.local
    ((name, block),) = local.blocks.items()
    graph = copied(block.graph)
    for node, source in zip(graph.nodes, block.graph.nodes):
        node.meta = dict(source.meta)
    rows = next(node for node in graph.nodes if node.target is expert_rows.expert_sums).args[0]
    with graph.inserting_after(rows):
        total = graph.call_function(torch.ops.aten.sum.dim_IntList, (rows, [0]))
    total.meta = {"val": value_of(rows)[0], "types": {axis: P}}
    with pytest.raises(GraphparError, match=r"sum.* takes the rows of a rank's experts together"):
        with_room(replace(local, blocks={name: replace(block, graph=graph)}), 1.5)


@pytest.mark.parametrize(
    ("model", "pins", "message"),
    [
        ("mixtral", {"mesh": {"dp_replicate": 2}}, "has no rows sorted by expert that are divided"),
        ("mixtral", {"mesh": {"tp": 2}}, "has no rows sorted by expert that are divided"),
        ("gpt", {"mesh": {"tp": 2}}, "has no rows sorted by expert that are divided"),
        ("mixtral", {"mesh": {"ep": 2}, "expert_room": 0.9}, "must be a number from 1"),
    ],
    ids=str,
)
def test_room_without_divided_rows_is_refused(model: str, pins: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.plan(example(model), **{"expert_room": 1.25, **pins})


def test_room_for_generation_is_refused() -> None:
    with pytest.raises(GraphparError, match="expert_room is for training and inference"):
        check_decisions(Decisions(expert_room=1.25), Mesh(ep=2), GENERATE)
