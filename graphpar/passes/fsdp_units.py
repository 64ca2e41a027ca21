"""``with_own_units``: large modules that do not repeat become classes, so that state which is sharded is gathered one of them at a time.

stage:  operators of features and classifier    ->    self.features(x), self.classifier[0](x), the rest
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from graphpar.ir.program import Helper, Program
from graphpar.ir.stage import Stage
from graphpar.passes.normalize.outline import Region, block_names, prepare, rebuilt, regions_of
from graphpar.text import is_below

_LEAST, _MOST = 0.1, 0.3
"""Modules with less than the first share of the parameters that no block has stay together; one with more than the second is divided
into its children, where these are large enough."""


def with_own_units(program: Program, stages: Sequence[Stage]) -> tuple[Program, list[Stage]]:
    """Return the stages with such modules called, and the program with their classes; unchanged where blocks have most parameters."""
    blocks = tuple(f"{path}." for block in program.blocks.values() for path in block.instances)
    rest = [name for name in program.parameters if not name.startswith(blocks)]
    size = sum(program.parameters[name].nbytes for name in rest)
    if 2 * size < sum(info.nbytes for info in program.parameters.values()):
        return program, list(stages)
    found = []
    read = [{str(node.target) for node in s.graph.nodes if node.op in ("get_attr", "call_module")} for s in stages]
    for stage in stages:
        elsewhere = {name for other, names in zip(stages, read) if other is not stage for name in names}
        units = _units(program, stage, size, elsewhere)
        if not units:
            found.append(stage)
            continue
        names = {digest: _unlike(name, program.blocks) for digest, name in block_names(units).items()}
        called = rebuilt(program.with_graph(stage.graph), units, names)
        program = replace(program, blocks={**program.blocks, **called.blocks})
        found.append(replace(stage, graph=called.graph))
    return program, found


def _units(program: Program, stage: Stage, size: int, elsewhere: Collection[str]) -> list[Region]:
    """Return the modules of ``stage`` that become units; none holds a tensor or block that other stages use (``elsewhere``)."""
    regions = regions_of(program.with_graph(stage.graph))
    order = {node: index for index, node in enumerate(stage.graph.nodes)}
    calls: dict[str, int] = {}
    for region in regions:
        calls[region.path] = calls.get(region.path, 0) + 1
    children: dict[str, list[Region]] = {}
    for region in regions:
        children.setdefault(region.ancestors[-1] if region.ancestors else "", []).append(region)

    def able(region: Region) -> bool:
        if calls[region.path] > 1 or any(is_below(name, region.path) for name in elsewhere):
            return False
        return _is_alone(program, stage, region) and prepare(program, region, order)

    def chosen(among: Sequence[Region]) -> list[Region]:
        units = []
        for region in among:
            share = _nbytes(program, region.path) / size
            if share < _LEAST:
                continue
            inside = chosen(children.get(region.call, ())) if share > _MOST or not able(region) else []
            units += inside or ([region] if able(region) else [])
        return units

    tops = [region for region in regions if all(other.call not in region.ancestors for other in regions)]
    return sorted(chosen(tops), key=lambda region: order[region.nodes[0]])


def _nbytes(program: Program, path: str) -> int:
    return sum(info.nbytes for name, info in program.parameters.items() if is_below(name, path))


def _is_alone(program: Program, stage: Stage, region: Region) -> bool:
    """Return whether the region alone reads its parameters, and calls neither a block nor a helper."""
    own = {name for name in program.parameters if is_below(name, region.path)}
    inside = set(region.nodes)
    readers = {
        user for node in stage.graph.nodes if node.op == "get_attr" and str(node.target) in own for user in node.users
    }
    calls = [node for node in stage.graph.nodes if node.op == "call_module"]
    within = [node for node in calls if any(entry[2] == region.call for entry in node.meta.get("module_stack", ()))]
    tied = {other for name in own for other in program.tie_of(name)}
    helped = any(isinstance(node.target, Helper) for node in inside)
    return readers <= inside and tied <= own and not within and not helped


def _unlike(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else _unlike(f"{name}Variant", taken)
