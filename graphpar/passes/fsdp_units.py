"""``with_own_units``: the units of ZeRO-2 and 3, and classes for those that are no blocks, since a unit is gathered where it is called.

stage:  operators of features and classifier    ->    self.features(x), self.classifier[0](x), the rest
        embedding, blocks, norm, head           ->    embedding | each block | norm and head, gathered together

A unit holds the parameters below its modules; what no unit holds is gathered with the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from graphpar.annotations.patterns import matches_nothing, names_of
from graphpar.errors import GraphparError
from graphpar.ir.program import Helper, Program
from graphpar.ir.stage import Stage
from graphpar.passes.normalize.outline import Region, block_names, prepare, rebuilt, regions_of
from graphpar.text import is_at_or_below, is_below, matching, paths_above

_LEAST, _MOST = 0.1, 0.3
"""Modules with less than the first share of the parameters that no block has are no unit of their own; one with more than the second is
divided into its children, where these are large enough."""
Group = tuple[str, ...]
"""The paths of modules that are gathered together."""


def with_own_units(
    program: Program, stages: Sequence[Stage], patterns: Sequence[str] | None = None
) -> tuple[Program, list[Stage]]:
    """Return the stages with their units, which they call, and the program with the classes of these.

    Args:
        patterns: of the units, as in the option ``units``. By default they are the blocks, and large modules before and after these; where
            blocks have less than half of the parameters, large ones elsewhere, too.

    Raises:
        GraphparError: a pattern matches no module, or one that can't be gathered where it is called.
    """
    found = []
    for stage, (groups, regions) in zip(stages, _of_stages(program, stages, patterns)):
        graph = stage.graph
        if regions:
            names = {digest: _unlike(name, program.blocks) for digest, name in block_names(regions).items()}
            called = rebuilt(program.with_graph(graph), regions, names)
            program, graph = replace(program, blocks={**program.blocks, **called.blocks}), called.graph
        found.append(replace(stage, graph=graph, units=tuple(groups)))
    return program, found


def unit_of_each(program: Program, stage: Stage, patterns: Sequence[str] | None = None) -> dict[str, Group]:
    """Return the unit of each parameter of ``stage`` that is not gathered with the stage."""
    ((groups, _),) = _of_stages(program, [stage], patterns)
    places = {path: place for place, group in enumerate(groups) for path in group}
    found: dict[int, list[str]] = {}
    for name in program.parameters:
        for place in sorted({places[path] for path in paths_above(name) if path in places}):
            found.setdefault(place, []).append(name)
    return {name: groups[place] for place in sorted(found) for name in found[place]}


def _of_stages(
    program: Program, stages: Sequence[Stage], patterns: Sequence[str] | None
) -> list[tuple[list[Group], list[Region]]]:
    """Return the units of each stage, in the order of its forward, and their modules that are no blocks."""
    wanted = None if patterns is None else _wanted(program, patterns)
    read = [{str(node.target) for node in s.graph.nodes if node.op in ("get_attr", "call_module")} for s in stages]
    found = []
    for stage in stages:
        elsewhere = {name for other, names in zip(stages, read) if other is not stage for name in names}
        modules = _Modules(program, stage, elsewhere)
        found.append(modules.usual() if wanted is None else modules.of(wanted))
    if wanted is not None:
        _check_found(wanted, [group for groups, _ in found for group in groups], set[str]().union(*read))
    if (
        program.evaluated is not None
    ):  # which may enter one module of a unit alone, so that FSDP2 would wait for the others
        found = [([(path,) for group in groups for path in group], regions) for groups, regions in found]
    return found


def with_units_of(
    program: Program, stages: Sequence[Stage], before: Sequence[Stage], after: Sequence[Stage]
) -> tuple[Program, list[Stage]]:
    """Return what the same model is in evaluation with calls of the modules that :func:`with_own_units` made classes of in the stages
    ``before``.

    Raises:
        GraphparError: one is used there otherwise than by one call.
    """
    found = []
    for stage, old, new in zip(stages, before, after):
        calls = {str(node.target): str(node.meta["block"]) for node in new.graph.nodes if node.op == "call_module"}
        known = {str(node.target) for node in old.graph.nodes if node.op == "call_module"}
        modules = _Modules(program, stage, ())
        regions = [region for region in modules.regions if region.path in calls.keys() - known]
        for region in regions:
            if not modules.able(region, (region.path,)):
                raise GraphparError(
                    f"in evaluation mode {region.path}, whose state is sharded, is used otherwise than by one call"
                )
            region.digest = region.path
        if regions:
            called = rebuilt(program.with_graph(stage.graph), regions, calls)
            program = replace(program, blocks={**program.blocks, **called.blocks})
            stage = replace(stage, graph=called.graph)
        found.append(stage)
    return program, found


# ---- units by pattern ------------------------------------------------------------------------------------------


def _wanted(program: Program, patterns: Sequence[str]) -> list[Group]:
    """Return the units that the patterns of the option ``units`` name."""
    found: list[Group] = []
    taken: dict[str, str] = {}
    for pattern in patterns:
        paths: dict[str, None] = {}
        for piece in pattern.split("+"):
            matched = matching(piece, filter(None, program.module_classes))
            if not matched:
                raise GraphparError(matches_nothing(piece, names_of(program), "units: the pattern"))
            own = [path for path in matched if piece == path or _may_be_meant(program, path)]
            paths |= dict.fromkeys(path for path in own if not any(is_below(path, other) for other in own))
        for path in paths:
            _check_holds(program, path)
            other = next((each for each in taken if is_at_or_below(path, each) or is_below(each, path)), None)
            if other is not None:
                raise GraphparError(
                    f"units: {path} (of {pattern!r}) and {other} (of {taken[other]!r}) share parameters; a parameter is in one unit."
                )
        taken |= dict.fromkeys(paths, pattern)
        found += [tuple(paths)] if "+" in pattern else [(path,) for path in paths]
    return found


def _may_be_meant(program: Program, path: str) -> bool:
    """Whether a module that a wildcard matches has parameters and is not around blocks."""
    return any(is_below(name, path) for name in program.parameters) and not any(
        is_below(block, path) for block in _blocks(program)
    )


def _check_holds(program: Program, path: str) -> None:
    blocks = _blocks(program)
    around = next((block for block in blocks if is_below(path, block)), None)
    if around is not None:
        raise GraphparError(f"units: {path} is inside the block {around}, which is gathered as one; name {around}.")
    inside = next((block for block in blocks if is_below(block, path)), None)
    if inside is not None:
        raise GraphparError(
            f"units: {path} is around blocks such as {inside}. Name these ({inside.rpartition('.')[0]}.*); what no unit holds is "
            "gathered with the stage."
        )
    if not any(is_below(name, path) for name in program.parameters):
        raise GraphparError(f"units: {path} has no parameters to gather; leave it out.")


def _blocks(program: Program) -> list[str]:
    return [path for block in program.blocks.values() for path in block.instances]


def _check_found(wanted: Sequence[Group], found: Sequence[Group], read: Collection[str]) -> None:
    """Check that each wanted module is gathered, if its parameters are read at all."""
    called = {path for group in found for path in group}
    missing = next(
        (
            path
            for group in wanted
            for path in group
            if path not in called and any(is_at_or_below(name, path) for name in read)
        ),
        None,
    )
    if missing is not None:
        raise GraphparError(
            f"units: {missing} can't be gathered where it is called: its parameters are tied to others or read outside of it, several "
            "calls or stages share it, or other operators run between its own. Leave it out, so that it is gathered with the stage, or "
            "name the modules that share a tensor as one unit (A+B)."
        )


# ---- the modules of a stage ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Modules:
    """The modules of a stage that may become units; none holds a tensor or block that other stages use (``elsewhere``)."""

    program: Program
    stage: Stage
    elsewhere: Collection[str]

    @cached_property
    def regions(self) -> list[Region]:
        return regions_of(self.program.with_graph(self.stage.graph))

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.stage.graph.nodes)}

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Where each block is called first."""
        calls = [node for node in self.stage.graph.nodes if node.op == "call_module"]
        return {str(node.target): self.order[node] for node in reversed(calls)}

    @cached_property
    def last(self) -> int:
        """Where the last block is called."""
        return max((self.order[node] for node in self.stage.graph.nodes if node.op == "call_module"), default=-1)

    @cached_property
    def rest(self) -> int:
        """The bytes of what no block of the program holds."""
        inside = tuple(f"{path}." for path in _blocks(self.program))
        return sum(info.nbytes for name, info in self.program.parameters.items() if not name.startswith(inside))

    # ---- by pattern ----

    def of(self, wanted: Sequence[Group]) -> tuple[list[Group], list[Region]]:
        """Return those of the wanted units that the stage can gather, in the order of its forward, and their modules that are no blocks."""
        by_path = {region.path: region for region in self.regions}
        found: dict[Group, int] = {}
        regions: list[Region] = []
        for group in wanted:
            own = [by_path[path] for path in group if path in by_path and self.able(by_path[path], group)]
            paths = tuple(path for path in group if path in self.blocks or any(path == each.path for each in own))
            if paths:
                places = [self.blocks[path] for path in paths if path in self.blocks]
                found[paths] = min([*places, *(self.order[region.nodes[0]] for region in own)])
                regions += own
        return sorted(found, key=found.__getitem__), self._in_order(regions)

    # ---- by size ----

    def usual(self) -> tuple[list[Group], list[Region]]:
        """Return the usual units, in the order of the forward, and their modules that are no blocks."""
        everything = sum(info.nbytes for info in self.program.parameters.values())
        inside = self._tops()
        if 2 * self.rest < everything:
            inside = [region for region in inside if not self._between(region)]
        large = self._in_order(self._chosen(inside))
        groups: list[list[Region]] = [[region] for region in large]
        if self.blocks:
            small = [region for region in self._small(self._tops(), large) if not self._between(region)]
            for region in small:
                self._join(region, groups)
        found: dict[Group, int] = {(path,): place for path, place in self.blocks.items()}
        found |= {
            tuple(region.path for region in self._in_order(each)): min(self.order[r.nodes[0]] for r in each)
            for each in groups
        }
        return sorted(found, key=found.__getitem__), self._in_order([region for each in groups for region in each])

    def _between(self, region: Region) -> bool:
        """Whether a module runs neither before all blocks nor after them."""
        first = min(self.blocks.values(), default=len(self.order))
        return not (self.order[region.nodes[-1]] < first or self.order[region.nodes[0]] > self.last)

    def _join(self, region: Region, groups: Sequence[list[Region]]) -> None:
        """Add a small module to the next large one on its side of the blocks, else to the one before it; both are trained, or frozen."""

        def kind(each: Region) -> tuple[bool, bool]:
            return self.order[each.nodes[0]] > self.last, self._trains(each.path)

        near = [each for each in groups if not self._between(each[-1]) and kind(each[-1]) == kind(region)]
        later = [each for each in near if self.order[each[-1].nodes[0]] > self.order[region.nodes[0]]]
        if near:
            (later[:1] or near[-1:])[0].append(region)

    def _trains(self, path: str) -> bool:
        return any(info.requires_grad for name, info in self.program.parameters.items() if is_below(name, path))

    @cached_property
    def _children(self) -> dict[str, list[Region]]:
        children: dict[str, list[Region]] = {}
        for region in self.regions:
            children.setdefault(region.ancestors[-1] if region.ancestors else "", []).append(region)
        return children

    def _tops(self) -> list[Region]:
        """Return the outermost modules that are not around blocks."""

        def tops(among: Sequence[Region]) -> Iterator[Region]:
            for region in among:
                if self._is_around_blocks(region):
                    yield from tops(self._children.get(region.call, ()))
                else:
                    yield region

        known = {region.call for region in self.regions}
        return list(tops([region for region in self.regions if not known.intersection(region.ancestors)]))

    def _is_around_blocks(self, region: Region) -> bool:
        return any(is_below(path, region.path) for path in self.blocks)

    def _chosen(self, among: Sequence[Region]) -> list[Region]:
        """Return the large modules."""
        found = []
        for region in among:
            share = self._nbytes(region.path) / max(1, self.rest)
            if share < _LEAST:
                continue
            able = self.able(region, (region.path,))
            inside = self._chosen(self._children.get(region.call, ())) if share > _MOST or not able else []
            found += inside or ([region] if able else [])
        return found

    def _small(self, among: Sequence[Region], large: Sequence[Region]) -> list[Region]:
        """Return the outermost modules with parameters that may be called, beside the large ones."""
        found = []
        for region in among:
            if region in large or not self._nbytes(region.path):
                continue
            around = any(region.call in other.ancestors for other in large)
            if not around and self._nbytes(region.path) < _LEAST * self.rest and self.able(region, (region.path,)):
                found.append(region)
            else:
                found += self._small(self._children.get(region.call, ()), large)
        return found

    def _nbytes(self, path: str) -> int:
        return sum(info.nbytes for name, info in self.program.parameters.items() if is_below(name, path))

    def _in_order(self, regions: Sequence[Region]) -> list[Region]:
        return sorted(regions, key=lambda region: self.order[region.nodes[0]])

    # ---- which can be called ----

    def able(self, region: Region, group: Group) -> bool:
        """Return whether a module can be called, and the unit ``group`` holds all that its parameters are tied to."""
        calls = sum(region.path == other.path for other in self.regions)
        if calls > 1 or any(is_below(name, region.path) for name in self.elsewhere):
            return False
        return self._is_alone(region, group) and prepare(self.program, region, self.order)

    def _is_alone(self, region: Region, group: Group) -> bool:
        """Return whether the region alone reads its parameters, and calls neither a block nor a helper."""
        own = {name for name in self.program.parameters if is_below(name, region.path)}
        inside = set(region.nodes)
        nodes = self.stage.graph.nodes
        reads = (node for node in nodes if node.op == "get_attr" and str(node.target) in own)
        readers = {user for node in reads for user in node.users}
        calls = [node for node in nodes if node.op == "call_module"]
        within = [node for node in calls if any(entry[2] == region.call for entry in node.meta.get("module_stack", ()))]
        tied = {other for name in own for other in self.program.tie_of(name)}
        helped = any(isinstance(node.target, Helper) for node in inside)
        held = all(any(is_below(name, path) for path in group) for name in tied)
        return readers <= inside and held and not within and not helped


def _unlike(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else _unlike(f"{name}Variant", taken)
