"""The data of a report: sizes, flops, what stages send, what they recompute, and the schedule.

The schedule is kept as a table of actions; its timeline and bubble come from the simulator, with the predicted seconds of stages and
transfers. Without a prediction a stage costs its forward flops, twice as much backward, and transfers are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpar import __version__
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.flops import node_flops, tensor_bytes
from graphpar.cost_models.repeated_work import repeated_in, repeated_work
from graphpar.cost_models.timelines import Conditions, StageEstimate, StepEnd, whole_step
from graphpar.cost_models.work import Collective, Phase
from graphpar.cost_models.workload import Works
from graphpar.emitted.fp8 import BLOCK, mxfp8_linear, mxfp8_linear_with_gw_hp
from graphpar.hardware.cluster import Cluster
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.plan import Plan
from graphpar.ir.program import Block, Program, operator_name
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.stage import Boundary, Stage
from graphpar.operators.parameter_casts import trains_weight, weight_names
from graphpar.operators.transitions import SENDS, collective_cost, travelling_beside
from graphpar.passes.compilation import Compilation
from graphpar.passes.planning.candidates import misfit
from graphpar.passes.planning.planned import Planned
from graphpar.passes.sharding.experts import find_experts
from graphpar.report.redistributions import sharding_data
from graphpar.report.state import state_data
from graphpar.runtime.option_kinds import GENERATE, STEPS
from graphpar.runtime.options import decided
from graphpar.runtime.records import packed
from graphpar.schedules.action_table import ActionTable, format_table, forwards, parse_table
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import Timeline, simulate
from graphpar.text import bytes_text, compressed, numbered_runs, plural, seconds_text

_WORTH_IT = 0.9
"""A dtype is advised where it takes at most this share of the step's time."""
BACKWARD = 2.0
"""Cost of a backward as a multiple of its forward: two matrix products for each one."""


def report_data(compilation: Compilation, cluster: Cluster | None = None) -> dict[str, Any]:
    """Return everything that the report shows except the search, as plain JSON data; it depends on the compilation only.

    Args:
        cluster: the hardware that was asked for, where it was.
    """
    program, plan, stages = compilation.sharded.local, compilation.plan, compilation.stages
    rows = [_stage_data(program, plan, stage) for stage in stages]
    works = Works(program, plan.mesh.degrees())
    for row, stage in zip(rows, stages):
        row["collectives"] = _sent_bytes(works, plan, stage, compilation.recomputed)
    held = compressed([[path for path in stage.modules if path not in program.constants] for stage in stages])
    for row, modules, names in zip(rows, held, _recomputed(program, stages)):
        row["modules"] = modules
        row["recomputed"] = names
    data: dict[str, Any] = {
        "model": {
            "name": program.name,
            "parameters": _whole_count(program),
            **_trained(program),
            "blocks": [{"name": block.name, "count": len(block.instances)} for block in program.blocks.values()],
            **({"idioms": dict(program.idioms)} if program.idioms else {}),
            **({"draws": list(program.draws)} if any(program.draws) else {}),
        },
        "torch": torch.__version__,
        **decisions(plan),
        **_priced_cluster(plan, cluster),
        "inputs": [{"name": entry.name, "role": entry.role} for entry in program.inputs],
        "stages": rows,
        "ties": [
            {"names": list(group), "stages": [row["index"] for row in rows if group[0] in row["names"]]}
            for group in program.tied_parameters
        ],
        "actions": _actions(plan),
        "backward_cost": BACKWARD,
        **(
            {"predicted": None, "unpriced": compilation.unpriced}
            if compilation.estimate is None
            else predicted_data(plan, compilation.estimate)
        ),
    }
    slow = [*_dtype_warning(compilation), *_dropout_warning(compilation), *_gradient_warning(compilation)]
    data["warnings"] = list(dict.fromkeys((*data.pop("misfits", ()), *slow, *plan.warnings, *program.warnings)))
    state = state_data(program, plan, stages, compilation.program.optimizer)
    if state is not None:
        data["state"] = state
    if compilation.overlapped is not None:
        data["overlapped"] = compilation.overlapped.to_json()
    if compilation.recomputed:
        data["recomputation"] = _recomputation(compilation)
    experts = _expert_data(program, rows)
    if experts is not None:
        data["experts"] = experts
    if (lengths := compilation.emitted[0].lengths) is not None:
        unpadded = lengths.fills if isinstance(lengths.fills, str) else None
        data["lengths"] = {"multiple": lengths.multiple, "unpadded": unpadded}
    if program.mode == GENERATE:
        sequences, length = program.inputs[0].shape_at(program.batch)
        data["generation"] = {"sequences": sequences, "length": length}
    if (other := compilation.generating) is not None:
        sequences, length = other.program.inputs[0].shape_at(other.program.batch)
        seconds = None if other.estimate is None else other.estimate.step_time_s
        data["between_steps"] = {
            "sequences": sequences * other.plan.global_batch,
            "length": length,
            "seconds": seconds,
        }
    if state is not None and plan.prefetch is not None:
        units = [unit["bytes"] for unit in state["units"] if unit["name"]]
        data["ahead_bytes"] = max(units, default=0) * max(0, plan.prefetch_distance - (plan.prefetch == "post"))
    sharding = sharding_data(program, plan, compilation.cluster if data["predicted"] else None)
    if sharding is not None:
        data["sharding"] = sharding
    for row in rows:
        del row["names"]
    timeline = timeline_of(data)
    data["bubble_fraction"] = round(timeline.bubble, 6)
    data["in_flight"] = list(timeline.peak_in_flight)
    return data


def _priced_cluster(plan: Plan, cluster: Cluster | None) -> dict[str, Any]:
    """Return the cluster of the prices, where it was asked for, and the plan's own, where it differs."""
    if cluster is None:
        return {}
    elsewhere = plan.cluster is not None and plan.cluster != cluster
    return {"cluster": str(cluster), **({"made_for": str(plan.cluster)} if elsewhere else {})}


def _gradient_warning(compilation: Compilation) -> list[str]:
    """Return a warning where gradients of weights should be rounded by blocks of tokens, and are not."""
    local = compilation.sharded.local
    found: dict[Any, set[str]] = {mxfp8_linear: set(), mxfp8_linear_with_gw_hp: set()}
    for scope, graph in local.scopes():
        for node in graph.nodes:
            if node.target in found and trains_weight(local, scope, node):
                found[node.target] |= weight_names(local, scope, node)
    rounded, left = map(len, found.values())
    if not left:
        return []
    return [
        f"mxfp8: gradients of {left:,} of {plural(rounded + left, 'weight')} are products in bf16, as a rank does not have blocks of "
        f"{BLOCK} tokens, each of one sequence."
    ]


def _dropout_warning(compilation: Compilation) -> list[str]:
    """Return a warning where attention that draws its dropout by a kernel would be faster, or take less memory."""
    other, estimate = compilation.by_kernel, compilation.estimate
    if other is None or estimate is None:
        return []
    peaks = max(estimate.peak_memory_bytes), max(other.peak_memory_bytes)
    if other.step_time_s > _WORTH_IT * estimate.step_time_s and peaks[1] > _WORTH_IT * peaks[0]:
        return []
    times = (
        f"{seconds_text(other.step_time_s)} {STEPS[compilation.plan.mode]}, not {seconds_text(estimate.step_time_s)}"
    )
    return [
        f"With --dropout kernel this plan would take {times}, and {bytes_text(peaks[1])} of memory on the fullest rank, not "
        f"{bytes_text(peaks[0])}; its attention masks differ on each mesh."
    ]


def _dtype_warning(compilation: Compilation) -> list[str]:
    """Return a warning where the program is in 32 bits, and the device much faster in 16."""
    seconds, cluster, estimate = compilation.in_bf16_s, compilation.cluster, compilation.estimate
    if seconds is None or estimate is None or seconds > _WORTH_IT * (step := estimate.step_time_s):
        return []
    rates = [f"{cluster.device.peak(dtype) / 1e12:,.4g}" for dtype in ("fp32", "bf16")]
    return [
        f"The model computes in fp32, in which {cluster.device.name} does {rates[0]} Tflop/s, not {rates[1]} as in bf16: with --dtype bf16 "
        f"this plan would take about {seconds_text(seconds)}, not {seconds_text(step)}, with parameters and their state still in fp32."
    ]


def with_alone(data: Mapping[str, Any], alone: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the time of one device for the same batch, and a warning where it is not longer."""
    if alone is None or not data.get("predicted"):
        return dict(data)
    step, single = data["predicted"]["step_time_s"], alone["step_time_s"]
    slower = []
    if alone["fits"] and step >= single:
        times = f"{step / single:.3g}"
        longer = "as long as one" if times == "1" else f"{times} times as long as one"
        slower = [
            f"{plural(data['devices'], 'device')} take {longer}, which takes {seconds_text(single)} {STEPS[data['mode']]}: "
            "use fewer devices, or a larger batch."
        ]
    return {**data, "alone": dict(alone), "warnings": [*slower, *data.get("warnings", ())]}


def host_misfits(predicted: Estimate) -> list[str]:
    """Say that what a plan offloads does not fit in the hosts, where that is so."""
    missing, room = predicted.host_missing_bytes, predicted.host_memory_bytes
    if missing <= 0 or room is None:
        return []
    return [
        f"What this plan offloads does not fit in the hosts of {predicted.cluster}: a rank has {bytes_text(room)} there, "
        f"{bytes_text(missing)} too little; offload less, or take more nodes."
    ]


def predicted_data(plan: Plan, predicted: Estimate) -> dict[str, Any]:
    """Return an estimate, its assumptions, and a warning where it does not fit in memory."""
    data: dict[str, Any] = {
        "predicted": predicted.to_json(),
        "assumed": {
            "optimizer": predicted.optimizer,
            "recompute": plan.recompute,
            "loss_chunk": plan.sharding.loss_chunk,
            "expert_room": plan.expert_room,
            "operators": "fused by torch.compile; memory as without it" if plan.compile else "not fused",
            "dropout": plan.dropout,
            "collectives": _collectives(plan, predicted),
            "device": predicted.device,
            "figures": predicted.figures,
        },
    }
    data["misfits"] = host_misfits(predicted)
    if predicted.missing_bytes > 0:
        why = "It is used because it is pinned; leave axes of the mesh to the search, or choose other hardware (--cluster)."
        if isinstance(plan, Planned) and plan.found is not None:
            why = (
                "A step fits, but not generation between steps: give an example of fewer rows or positions, a smaller --batch, or "
                "--memory-headroom, which the search leaves free."
            )
        data["misfits"] += [
            f"This plan {misfit(predicted)} on {predicted.cluster}, {bytes_text(predicted.missing_bytes)} too much. {why}"
        ]
    return data


def _collectives(plan: Plan, predicted: Estimate) -> list[str]:
    """Say which collectives the prediction hides behind computation, as the emitted program does, and which it waits for."""
    mesh, cpu = plan.mesh, predicted.device.startswith("CPU")
    said = []
    if mesh.replicas > 1 and plan.mode == "train":
        said.append("gradients summed after the last backward" if cpu else "gradient sums overlap with backwards")
    if plan.zero == 3:
        said.append("parameters gathered when needed" if plan.prefetch == "none" else "parameters gathered ahead")
    if any(degree > 1 for axis, degree in mesh.degrees().items() if axis in ("tp", "cp", "ep")):
        within = predicted.communication_s.get("tp", 0.0) - predicted.exposed_s.get("tp", 0.0)
        hidden = within > 0 and not cpu
        if hidden and not plan.overlap_tp:
            said.append("sums of input gradients over tp overlap with weight gradients")
        said.append(f"{'other ' if hidden else ''}collectives in operators exposed")
    return said


def _trained(program: Program) -> dict[str, int]:
    """Count the elements of parameters that are trained, where some are frozen."""
    frozen = any(not info.requires_grad for info in program.parameters.values())
    return {"trained": _whole_count(program, trained=True)} if program.mode == "train" and frozen else {}


def _recomputation(compilation: Compilation) -> list[dict[str, Any]]:
    """Return for each class of blocks and each kind which they are, and what one of them sends again for a microbatch."""
    local, plan = compilation.sharded.local, compilation.plan
    works = Works(local, plan.mesh.degrees())
    rows = []
    for block in local.blocks.values():
        found = {path: how for path in block.instances if (how := compilation.recomputed.get(path))}
        for kind in dict.fromkeys(how.kind for how in found.values()):
            paths = [path for path, how in found.items() if how.kind == kind]
            how = found[paths[0]]
            again = repeated_in(works, block, how).rows.items()
            sent = [(row, times) for row, times in again if isinstance(row, Collective)]
            rows.append(
                {
                    "block": block.name,
                    "kind": kind,
                    "count": len(paths),
                    "paths": numbered_runs(paths),
                    "uncompiled": plan.compile and not how.compiles,
                    "again": _again(block, how),
                    "keeps": {name: list(numbers) for name, numbers in how.calls.items()},
                    "collectives": sum(times for _, times in sent),
                    "bytes": int(sum(times * row.nbytes.at(plan.microbatch_size) for row, times in sent)),
                }
            )
    return rows


def _again(block: Block, how: Recomputation) -> list[str]:
    """Return the operators whose results hooks make again, without gathers."""
    nodes = [node for node in block.graph.nodes if node.op == "call_function" and "transition" not in node.meta]
    return [operator_name(node) for node in nodes if how.by_hooks and node.name not in how.nodes]


def _whole_count(program: Program, trained: bool = False) -> int:
    """Return the number of parameters of the user's unsharded model, each tied one once; ``trained``: only of those."""
    infos = [info for info in program.whole_state() if info.kind == "parameter"]
    return sum(info.whole_numel for info in infos if info.requires_grad or not trained)


def _expert_data(program: Program, rows: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return the sizes of expert weights and of all others: elements in the model, and bytes on a rank of the stage with most experts; and
    how often rows travel in a forward, also beside products."""
    scopes = [("", program.graph), *((f"{path}.", b.graph) for b in program.blocks.values() for path in b.instances)]
    names: set[str] = set()
    for base, graph in scopes:
        found = find_experts((node.meta.get("origin", node) for node in graph.nodes), {})
        lists = tuple(f"{base}{path}." for path in found.lists)
        names |= {f"{base}{parameter.target}" for parameter in found.counts}
        names |= {name for name in program.parameters if name.startswith(lists)}
    if not names:
        return None
    moves = [node for _, graph in scopes for node in graph.nodes if operator_name(node) in SENDS]
    whole = sum(info.whole_numel for name, info in program.parameters.items() if name in names)
    held = [sum(program.parameters[name].nbytes for name in row["names"] if name in names) for row in rows]
    most = max(range(len(rows)), key=held.__getitem__)
    return {
        "parameters": whole,
        "other_parameters": _whole_count(program) - whole,
        "rank_bytes": held[most],
        "other_rank_bytes": rows[most]["parameter_bytes"] - held[most],
        **({"moves": len(moves), "beside": sum(map(bool, map(travelling_beside, moves)))} if moves else {}),
    }


def decisions(plan: Plan) -> dict[str, Any]:
    """Collect the plan's decisions as plain data: mesh, cluster, all options, split points."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in decided(plan).items()}
    return {
        "mode": plan.mode,
        "devices": plan.mesh.size,
        "cluster": None if plan.cluster is None else str(plan.cluster),
        "mesh": plan.mesh.degrees(),
        "microbatches": plan.microbatches,
        **options,
        "recompute": plan.recompute if isinstance(plan.recompute, str) else dict(plan.recompute),
        "split": [{"path": point.path, "where": point.where.value} for point in plan.split_points],
    }


def _stage_data(program: Program, plan: Plan, stage: Stage) -> dict[str, Any]:
    names = stage_parameters(program, stage)
    flops = node_flops(program.with_graph(stage.graph), plan.microbatch_size)
    relayed = {boundary.node for boundary in stage.receives}
    return {
        "index": stage.index,
        "rank": plan.stages[stage.index].rank,
        "names": names,
        "parameters": sum(program.parameters[name].numel for name in names),
        "parameter_bytes": sum(program.parameters[name].nbytes for name in names),
        "flops": sum(flops.values()),
        "inputs": list(stage.inputs),
        "sends": [_boundary_data(boundary, plan, boundary.node in relayed) for boundary in stage.sends],
    }


def _sent_bytes(
    works: Works, plan: Plan, stage: Stage, recomputed: Mapping[str, Recomputation]
) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends by axis in a microbatch's collectives of a stage: in its forward, and in its backward with what is
    recomputed there."""
    degrees = plan.mesh.degrees()
    own, again = works.of(stage.graph), repeated_work(works, stage.graph, recomputed)
    found: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    for work, repeats in ((own, False), (again, True)):
        for row, times in work.rows.items():
            if isinstance(row, Collective):
                way = found["backward" if repeats or row.phase is not Phase.FORWARD else "forward"]
                sent = collective_cost(row.kind, row.nbytes.at(plan.microbatch_size), degrees[row.axis]).bytes_sent
                way[row.axis] = way.get(row.axis, 0) + round(times * sent)
    return found


def _boundary_data(boundary: Boundary, plan: Plan, relayed: bool) -> dict[str, Any]:
    return {
        "name": boundary.name,
        "shape": list(concrete_shape(boundary.node, plan.microbatch_size)),
        "dtype": str(boundary.node.meta["val"].dtype).removeprefix("torch."),
        "bytes": tensor_bytes(boundary.node, plan.microbatch_size),
        "requires_grad": boundary.requires_grad and plan.mode == "train",
        "relayed": relayed,
    }


def stage_parameters(program: Program, stage: Stage) -> list[str]:
    """Return the parameters of ``stage`` by their first name; tied names are one parameter."""
    found: dict[str, None] = {}
    for node in stage.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] = None
        elif node.op == "call_module":
            for inner in program.block_of(node).graph.nodes:
                if inner.op == "get_attr":
                    found[f"{node.target}.{inner.target}"] = None
    first = {name: group[0] for group in program.ties for name in group}
    return list(dict.fromkeys(first.get(name, name) for name in found if name in program.parameters))


def _recomputed(program: Program, stages: Sequence[Stage]) -> list[list[str]]:
    """Return for each stage the user's names of the values that it computes and another stage computes too."""
    holders = Counter(name for stage in stages for name in stage.recomputed)
    labels: dict[str, str] = {}
    for node in program.graph.nodes:
        source = node.meta.get("source")
        if holders[node.name] > 1 and source is not None and len(source.targets) > 0:
            labels[node.name] = ", ".join(name for name in source.targets if name != "_")
    chosen = [set(stage.recomputed) for stage in stages]
    return [list(dict.fromkeys(label for name, label in labels.items() if name in names and label)) for names in chosen]


def _actions(plan: Plan) -> list[str]:
    """Return the schedule table, a line a rank; without backwards in inference."""
    if plan.actions is not None:
        lines = [",".join(row) for row in plan.actions]
        return lines if plan.mode == "train" else format_table(forwards(parse_table("\n".join(lines)))).splitlines()
    if plan.mesh.pp == 1:
        kinds = "FB" if plan.mode == "train" else "F"
        return [",".join(f"0{kind}{m}" for m in range(plan.microbatches) for kind in kinds)]

    table = action_table(plan.schedule, plan.mesh.pp, plan.stages_per_rank, plan.microbatches)
    return format_table(table if plan.mode == "train" else forwards(table)).splitlines()


def timeline_of(data: Mapping[str, Any]) -> Timeline:
    """Simulate the step of a report, in seconds, with transfers, collectives, reduction of gradients and the optimizer.

    Its length is the predicted one. Without a prediction only the pipeline is simulated, in flops, with free transfers.
    """
    table: ActionTable = parse_table("\n".join(data["actions"]))
    if not data.get("predicted"):
        forward = [float(stage["flops"]) for stage in data["stages"]]
        return simulate(table, forward, [data["backward_cost"] * cost for cost in forward])
    predicted = data["predicted"]
    stages = [StageEstimate.from_json(stage) for stage in predicted["stages"]]
    closings = [StepEnd(**closing) for closing in predicted["closings"]]
    pipeline = Conditions.from_json(predicted["conditions"]).timeline(table, stages, spans=True)
    return whole_step(pipeline, stages, closings)


NO_SEARCH: Mapping[str, Any] = {
    "considered": 1,
    "priced": 1,
    "infeasible": 0,
    "optimality_gap": None,
    "alternatives": [],
    "refused": [],
    "left_out": [],
}
"""The ``search`` entry where nothing was searched: the plan or its mesh was given."""


def compile_json(
    data: Mapping[str, Any], plan: Planned, seconds: Mapping[str, float], out: str | None
) -> dict[str, Any]:
    """Make the JSON of ``graphpar compile`` and ``graphpar estimate``, from a report's data."""
    return {
        "graphpar": __version__,
        "torch": torch.__version__,
        "out": out,
        "warnings": data["warnings"],
        "model": data["model"],
        "plan": plan.to_json(),
        "placements": packed(plan.to_json()["parameters"]),
        **({"alone": data["alone"]} if "alone" in data else {}),
        "predicted": data["predicted"] or {"bubble_fraction": data["bubble_fraction"]},
        "search": NO_SEARCH if plan.found is None else plan.found.to_json(),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }
