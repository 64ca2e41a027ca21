"""What a rank stores where state is sharded over dp_shard and cp: units, and bytes of parameters, gradients and optimizer state.

program of a rank, plan ──► ZeRO-3 over dp_shard=4 · 12 GPT2Block of 27.0 MiB and the rest 148 MiB · a rank stores parameters ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphpar.codegen.package import held_by_ranks, owners_of
from graphpar.codegen.units import kept_after_forward, parameters_of_units, units_without_backward, unread_in_backward
from graphpar.ir.plan import Plan
from graphpar.ir.program import OptimizerState, Program
from graphpar.ir.stage import Stage
from graphpar.operators.parameter_casts import gather_dtype, working_dtypes
from graphpar.runtime.option_kinds import RESHARD
from graphpar.runtime.options import gathers_again
from graphpar.text import bytes_text, plural

_SHOWN = 8


def state_data(
    program: Program, plan: Plan, stages: Sequence[Stage], optimizer: OptimizerState
) -> dict[str, Any] | None:
    """Return the units and what the rank that stores most stores, in bytes; None where no state is sharded.

    ``loads`` are the elements that each of the ranks updates at level 1, by pp rank; empty where they are equal slices. A unit's bytes
    are those of its parameters when they are gathered; ``count`` units of a class have as many each.
    """
    if not plan.zero:
        return None
    classes = {path: block.name for block in program.blocks.values() for path in block.instances}
    units: dict[tuple[str, int, int, int], int] = {}
    whole = _whole_bytes(program, plan)
    sent = _sent(program, plan, stages) if plan.zero > 1 else {}
    for paths, names in parameters_of_units(program, stages).items():
        name = " and ".join(dict.fromkeys(classes.get(path, path) for path in paths))
        key = name, sum(whole[name] for name in _once(program, names)), *sent.get(paths, (0, 0))
        units[key] = units.get(key, 0) + 1
    ranks = plan.mesh.shards
    owned = owners_of(program, plan, stages) if plan.zero == 1 else {}
    working = working_dtypes(program) if plan.zero == 1 else {}
    parts, loads = [], []
    for names in held_by_ranks(program, plan, stages):
        held = _once(program, names)
        trained = [name for name in held if program.parameters[name].requires_grad]
        gradients = sum(_stored(program, plan, name) for name in trained)
        updated = gradients if plan.zero > 1 else -(-gradients // ranks)
        if owned:
            shares = [[program.parameters[name] for name in trained if owned[name] == rank] for rank in range(ranks)]
            updated = max(sum(info.nbytes for info in infos) for infos in shares)
            loads.append([sum(info.numel for info in infos) for infos in shares])
        apart = {name: program.parameters[name] for name in trained if name in working}
        stored = sum(_stored(program, plan, name) for name in held)
        stored -= sum(info.numel * (info.dtype.itemsize - working[name].itemsize) for name, info in apart.items())
        summed = plan.zero == 1 and plan.microbatches == 1 and plan.mesh.pp == 1  # to the pieces, as the backward goes
        part = {"parameters": stored, "gradients": updated if summed else gradients}
        if apart:  # of the rank that updates most, the share that is apart
            part["main"] = round(updated * sum(info.nbytes for info in apart.values()) / gradients)
        parts.append(part | {"optimizer": round(optimizer.tensors * updated)})
    return {
        "zero": plan.zero,
        "by": plan.zero1_by if plan.zero == 1 else None,
        "ranks": ranks,
        "over": plan.mesh.state_text,
        "units": [
            {"name": name, "count": count, "bytes": nbytes} | ({"gathers": gathers, "reductions": sums} if sent else {})
            for (name, nbytes, gathers, sums), count in units.items()
        ],
        "kept_by": optimizer.name,
        "rank_bytes": max(parts, key=lambda each: sum(each.values())),
        "loads": loads,
    }


def _sent(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return how often a step gathers each unit's parameters and reduces its gradients, by the paths of its modules; none is the rest of
    all stages."""
    found = {}
    by_step = plan.zero == 2 or (plan.mesh.pp > 1 and plan.reshard in ("default", "never"))
    twice = gathers_again(plan.mesh.pp, plan.zero, plan.reshard)
    once = {paths for stage in stages for paths in unread_in_backward(program, stage)}
    once |= {kept_after_forward(program, stage, plan) for stage in stages}
    frozen = set[str]().union(*(units_without_backward(program, stage) for stage in stages))
    for paths, names in parameters_of_units(program, stages).items():
        sharded = [program.parameters[name] for name in names if name in plan.fully_sharded]
        again = paths not in once and not frozen.issuperset(paths) if paths else plan.reshard != RESHARD[0]
        gathers = 1 if by_step else plan.microbatches * (2 if twice and again else 1)
        trained = any(info.requires_grad for info in sharded)
        sums = (1 if plan.mesh.pp > 1 else plan.microbatches) if trained else 0
        found[paths] = gathers if sharded else 0, sums
    return found


def _whole_bytes(program: Program, plan: Plan) -> dict[str, int]:
    """Return the bytes of each whole parameter: of one that is stored in shards, in the dtype that it is gathered in."""
    gathered = gather_dtype(program, plan.fully_sharded) if plan.fully_sharded else None
    return {
        name: info.numel * gathered.itemsize if gathered and name in plan.fully_sharded else info.nbytes
        for name, info in program.parameters.items()
    }


def _once(program: Program, names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(program.tie_of(name)[0] for name in names))


def _stored(program: Program, plan: Plan, name: str) -> int:
    """Return the bytes that the first of the ranks stores; later ones have as many or, where it does not divide, fewer."""
    info = program.parameters[name]
    if name not in plan.fully_sharded:
        return info.nbytes
    dim = plan.fully_sharded[name]
    others = math.prod(info.shape[:dim]) * math.prod(info.shape[dim + 1 :])
    return -(-info.shape[dim] // plan.mesh.shards) * others * info.dtype.itemsize


def state_text(state: Mapping[str, Any]) -> str:
    """Write the level, the units, and what a rank stores."""
    named = [(unit, unit["name"] or "the rest") for unit in sorted(state["units"], key=lambda unit: not unit["name"])]
    units = ", ".join(
        f"{unit['count']} x {name} of {bytes_text(unit['bytes'])}"
        if unit["count"] > 1
        else f"{name} {bytes_text(unit['bytes'])}"
        for unit, name in named
    )
    if all("gathers" in unit for unit in state["units"]):
        gathers, sums = (
            sum(unit["count"] * unit[what] for unit in state["units"]) for what in ("gathers", "reductions")
        )
        units += f", in a step {plural(gathers, 'all-gather')} and {plural(sums, 'reduce-scatter')}"
    own = state["rank_bytes"]
    by = f", {state['by']}" if state.get("by") else ""
    kept = f"main values {bytes_text(own['main'])}, " if "main" in own else ""
    kept += f"{state.get('kept_by', 'AdamW')}'s state {bytes_text(own['optimizer'])}"
    return (
        f"ZeRO-{state['zero']} over {state['over']}{by} · units {units} · a rank stores parameters "
        f"{bytes_text(own['parameters'])}, gradients {bytes_text(own['gradients'])}, {kept}"
        + (f" · {_loads_text(state['loads'])}" if state["loads"] else "")
    )


def _loads_text(loads: Sequence[Sequence[int]]) -> str:
    """Write what each rank updates, of the pp rank where that is least even."""
    unevenness, worst = max((max(each) * len(each) / max(sum(each), 1), each) for each in loads)
    shown = ", ".join(f"{elements:,}" for elements in worst[:_SHOWN]) + (", …" if len(worst) > _SHOWN else "")
    return f"ranks update {shown} elements, the largest {unevenness:.2f} of the mean"
