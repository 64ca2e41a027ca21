"""What a program for training generates by between its steps: another program of the same model, on the weights as training stores them.

    Program.generating(sequences) ──stages, placements of weights: those of the plan──► a plan of its own ──► the folder generate/

Ranks that take other rows of a batch, or other parts of a sequence, have the same weights once these are gathered: each is a replica, with
its share of the prompts. The rest is searched, so nothing of it is in the plan for training.
"""

from __future__ import annotations

import math
from dataclasses import replace

from graphpar.codegen.package import stage_contents
from graphpar.cost_models.estimates import Estimate
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.passes.evaluation import placed_as_stored
from graphpar.passes.normalize.buffer_uses import written_buffers_of
from graphpar.passes.planning.constraints import decided_by, exported_precision
from graphpar.passes.planning.planned import Planned
from graphpar.passes.split import positions_of, split
from graphpar.passes.stage_passes import Stages
from graphpar.runtime.axes import AXIS
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE
from graphpar.runtime.options import Decisions, decided
from graphpar.runtime.plan_record import StageRecord
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.text import listed


def generating_of(trained: Program, plan: Planned) -> tuple[Program, Planned]:
    """Return the program by which ``trained`` generates under ``plan``, and its plan.

    As many sequences are in flight as a step of training has rows.

    Raises:
        GraphparError: the model can't generate, or not on this mesh.
    """
    assert trained.generating is not None
    degrees = plan.mesh.degrees()
    if (experts := next((axis for axis in degrees if AXIS[axis].exchanges and degrees[axis] > 1), None)) is not None:
        raise GraphparError(
            f"mesh {experts}={degrees[experts]} is for training: replicas that generate have all experts, or share them out over ep. Give "
            "ep in its place, or compile a program for generation of its own and send it the weights."
        )
    kept = {axis: degree for axis, degree in degrees.items() if axis in ("pp", "ep", "tp")}
    mesh = Mesh(**kept, dp_replicate=plan.mesh.size // math.prod(kept.values()))
    program = _with_read_weights(trained, trained.generating(-(-plan.global_batch // (mesh.dp_replicate * mesh.pp))))
    parameters = {
        name: {axis: kind for axis, kind in types.items() if axis in kept}
        for name, types in plan.sharding.parameters.items()
    }
    decisions = Decisions(
        schedule="GPipe"
        if plan.stages_per_rank == 1
        else plan.schedule
        if plan.schedule in SCHEDULES
        else "Interleaved1F1B",
        global_batch=mesh.dp_replicate * mesh.pp,
        microbatch_size=1,
        **decided_by(exported_precision(program)),
    )
    alike = replace(
        plan.plan,
        mode=GENERATE,
        mesh=mesh,
        actions=None,
        fully_sharded={},
        sharding=replace(plan.sharding, parameters=parameters, loss_chunk=0, expert_room=None),
        **decided(decisions),
    )
    try:
        found = placed_as_stored(program, alike)
    except GraphparError as error:
        raise GraphparError(
            f"With the weights as training stores them the model can't generate: {error} Compile a program for generation of its own "
            "and send it the weights."
        ) from error
    stages = split(found.local, positions_of(found.local, plan.split_points))
    places = [StageRecord(stage.index, plan.stages[stage.index].rank, stage.modules) for stage in stages]
    fields = vars(alike) | {"stages": tuple(places), "sharding": found.sharding}
    return program, Planned(**fields, sharded=found, warnings=program.warnings)


def _with_read_weights(trained: Program, program: Program) -> Program:
    """Return the program without parameters and buffers that only training reads, such as those of a frozen reference.

    Buffers that training writes count as persistent, as a checkpoint would be the only other way for their values: they are lent.
    """
    written = {name for uses in written_buffers_of(trained).uses for name in trained.tie_of(uses.name)}
    read: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "call_module":
            inside = program.blocks[str(node.meta["block"])].graph
            read |= {f"{node.target}.{each.target}" for each in inside.nodes if each.op == "get_attr"}
        elif node.op == "get_attr":
            read.add(str(node.target))
    read |= {other for name in read for other in program.tie_of(name)}
    parameters = {name: info for name, info in program.parameters.items() if name in read}
    buffers = {
        name: replace(info, persistent=info.persistent or name in written)
        for name, info in program.buffers.items()
        if name in read
    }
    ties = tuple(group for group in program.ties if group[0] in read)
    return replace(program, parameters=parameters, buffers=buffers, ties=ties)


def with_generation(plan: Plan, trained: Estimate, generating: Estimate) -> Estimate:
    """Return the estimate of a step of training with the memory of generation between steps, on ranks where that is more; communicators
    of both are there all the time."""
    apart = plan.zero >= 2 or plan.precision.casts
    copied = plan.precision.computed.itemsize / plan.precision.stored.itemsize if apart else 0.0
    peaks = []
    for training, other in zip(trained.memory, generating.memory, strict=True):
        both = training.while_generating(other, copied)
        peaks.append(max(replace(training, communicators=both.communicators), both, key=lambda memory: memory.total))
    return replace(trained, memory=tuple(peaks))


def check_held(plan: Plan, trained: Stages, generating: Stages) -> None:
    """Check that each rank has, of what it trains, the weights and buffers that it generates with.

    Raises:
        GraphparError: one has not.
    """
    for rank in range(plan.mesh.pp):
        held, read = (_stored(plan, stages, rank) for stages in (trained, generating))
        buffers = generating[0].buffers
        if other := sorted(name for name in read - held if name not in buffers or buffers[name].persistent):
            raise GraphparError(
                f"On pp rank {rank} the model generates with {listed(other, 4)}, which that rank does not train; split the model elsewhere "
                "(--split)."
            )


def _stored(plan: Plan, of: Stages, rank: int) -> set[str]:
    """Return the names, all of each tie, of what a pp rank stores."""
    program, stages = of
    own: set[str] = set()
    for stage, infos, instances in zip(stages, *stage_contents(program, stages)):
        if plan.stages[stage.index].rank == rank:
            inside = tuple(f"{path}." for path in instances)
            own |= {
                name for name in (*program.parameters, *program.buffers) if name in infos or name.startswith(inside)
            }
    return own.union(*map(program.tie_of, own))
