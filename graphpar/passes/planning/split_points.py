"""Where stages begin: balanced by flops, or as the user says.

split points        ["h.4", {"h.7": "end"}]        used unchanged (:func:`graphpar.passes.split.positions_of`)
a pattern           ["h.*"]                        matching modules spread evenly, earlier stages take the remainder
modules a stage     [["wte", "h.0"], ["h.1", ...]] every module in exactly one list
layers a stage      layers_per_stage, edge_layers  modules before and after the layers count as so many layers
marks               pipe_split() in the forward    torch.distributed.pipelining's own marker
nothing             flops                          the costliest stage is as cheap as possible
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence

from torch import fx

from graphpar.cost_models.flops import node_flops
from graphpar.errors import GraphparError, near_match
from graphpar.ir.program import Program, module_path
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.operators.gradients import differentiable_nodes
from graphpar.passes.normalize.applications import followed, placed_with
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.split import positions_of, split_candidates, stages_of
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.schedule_records import get_schedule
from graphpar.text import is_at_or_below, is_below, plural

_WITH_BACKWARD = 3.0
"""A product's flops in a step, in those of its forward: its backward is two more."""


def pinned_split_points(program: Program, mesh: Mesh, pins: PlanConstraints) -> tuple[SplitAt, ...] | None:
    """Return the user's split points, in whichever way they were given; None leaves them to the search."""
    pins.check_one_way()
    if pins.stages is not None:
        return split_points_from_lists(program, pins.stages)
    per_rank = get_schedule(pins.schedule or "1F1B").default_stages if mesh.pp > 1 else 1
    if pins.by_layers:
        return split_points_by_layers(program, mesh.pp, per_rank, pins.layers_per_stage, pins.edge_layers or (1, 1))
    if pins.split_points is not None and any("*" in point.path for point in pins.split_points):
        return even_split_points(program, pins.split_points, mesh.pp * per_rank)
    return pins.split_points if pins.split_points is not None else marked_split_points(program)


def balanced_split_points(program: Program, stages: int) -> tuple[SplitAt, ...]:
    """Return split points that minimise the flops of the costliest of ``stages`` stages.

    Raises:
        GraphparError: the model has fewer places to split.
    """
    if stages == 1:
        return ()
    candidates = split_candidates(program, stages)
    if stages - 1 > len(candidates):
        blocks = len(_layers(program))
        most = len(candidates) + 1
        what = plural(blocks, "block") if blocks else f"{plural(most, 'module')} with parameters"
        raise GraphparError(
            f"{stages} stages are needed, but {program.name} has only {what}, and with what is before and after "
            f"them at most {plural(most, 'stage')}. "
            "Use fewer devices, or a schedule with fewer stages a rank."
        )
    nodes, placed = list(program.graph.nodes), placed_with(program)
    trained = differentiable_nodes(program) if program.mode == "train" else set()
    flops = dict.fromkeys(nodes, 0.0)
    for node, own in node_flops(program, 1).items():
        flops[followed(placed, node)] += own * (_WITH_BACKWARD if node in trained else 1.0)
    edges = [0, *(position for position, _ in candidates), len(nodes)]
    segments = [sum(flops[node] for node in nodes[begin:end]) for begin, end in itertools.pairwise(edges)]
    return tuple(SplitAt(candidates[index - 1][1]) for index in _partition(segments, stages))


def _partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return where each part after the first begins, so that the costliest part is cheapest (exact, by dynamic programming).

    Ties go to the split whose earlier parts cost less, so the result is unique.
    """
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    choice = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            for begin in range(part - 1, end):
                worst = max(best[part - 1][begin], prefix[end] - prefix[begin])
                if worst < best[part][end]:
                    best[part][end], choice[part][end] = worst, begin
    starts, end = [], count
    for part in range(parts, 1, -1):
        end = choice[part][end]
        starts.append(end)
    return starts[::-1]


def split_points_from_lists(program: Program, lists: Sequence[Sequence[str]]) -> tuple[SplitAt, ...]:
    """Return split points from lists of the modules of each stage.

    Raises:
        GraphparError: a module with parameters is in no list or in two, or runs after modules of a later stage.
    """
    known = [path for path in program.module_classes if path]
    owner: dict[str, int] = {}
    for stage, paths in enumerate(lists):
        for path in paths:
            if path not in known:
                raise GraphparError(
                    f"Stage {stage} lists {path!r}, which is not a module of the program.{near_match(path, known)}"
                )
            if path in owner:
                raise GraphparError(f"Module {path!r} is in stages {owner[path]} and {stage}; list it once.")
            owner[path] = stage
    first: dict[int, str] = {}
    begun: set[str] = set()
    current = 0
    placed = placed_with(program)
    stages: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        holder = _parameter_owner(node)
        if holder is None:
            continue
        enclosing = [p for p in owner if is_at_or_below(holder, p)]
        if not enclosing:
            raise GraphparError(f"Module {holder!r} is in no stage; list it, or a module that contains it.")
        listed = max(enclosing, key=len)
        stage = stages[node] = owner[listed]
        if node in placed:
            continue
        if stage < current:
            raise GraphparError(
                f"Module {listed!r} is listed in stage {stage}, but it runs after modules of stage {current}."
            )
        current = stage
        first.setdefault(stage, holder if listed in begun else listed)
        begun.update(path for path in owner if is_below(holder, path))
    missing = next((stage for stage in range(len(lists)) if stage not in first), None)
    if missing is not None:
        raise GraphparError(f"Stage {missing} would be empty: none of its modules computes anything.")
    found = tuple(SplitAt(first[stage]) for stage in range(1, len(lists)))
    runs_in = stages_of(program, positions_of(program, found))
    for node, beside in placed.items():
        if stages.get(node, runs_in[node]) != runs_in[node] and module_path(node) != module_path(beside):
            raise GraphparError(
                f"Module {_parameter_owner(node)!r} is listed in stage {stages[node]}, but runs in stage {runs_in[node]}, "
                f"with {module_path(beside)!r}."
            )
    return found


def _parameter_owner(node: fx.Node) -> str | None:
    """Return the module whose parameters ``node`` uses, if it uses any."""
    if node.op == "call_module":
        return str(node.target)
    if node.op != "call_function":
        return None
    parameters = [str(a.target) for a in node.all_input_nodes if a.op == "get_attr"]
    stack = node.meta.get("module_stack", ())
    return stack[-1][0] if parameters and stack and stack[-1][0] else None


def even_split_points(program: Program, patterns: Sequence[SplitAt], stages: int) -> tuple[SplitAt, ...]:
    """Return split points that spread the modules matching a pattern evenly; earlier stages take the remainder.

    Raises:
        GraphparError: there are other split points beside the pattern, or it matches fewer modules than there are stages.
    """
    if len(patterns) > 1 or patterns[0].where is not SplitPoint.BEGINNING:
        raise GraphparError(
            "A split point with * must be the only one: it says which modules to spread evenly over the stages."
        )
    pattern = patterns[0].path
    known = _layers(program) or [path for _, path in split_candidates(program)]
    # * stays within one level of the path.
    matching = [p for p in known if p.count(".") == pattern.count(".") and fnmatch.fnmatchcase(p, pattern)]
    if not matching:
        raise GraphparError(f"Split pattern {pattern!r} matches no module.{near_match(pattern, known)}")
    if len(matching) < stages:
        raise GraphparError(
            f"Split pattern {pattern!r} matches {len(matching)} modules, fewer than the {stages} stages."
        )
    counts = [len(matching) // stages + (stage < len(matching) % stages) for stage in range(stages)]
    starts = itertools.accumulate(counts[:-1])
    return tuple(SplitAt(matching[start]) for start in starts)


def split_points_by_layers(
    program: Program, pp: int, per_rank: int, layers_per_stage: int | None, edges: tuple[int, int]
) -> tuple[SplitAt, ...]:
    """Return split points by number of layers, where the modules before and after the layers count as ``edges`` layers.

    Raises:
        GraphparError: there are no layers, or they don't divide so.
    """
    layers = _layers(program)
    first, last = edges
    if min(edges) < 0:
        raise GraphparError(f"Edge layers {first},{last}: a number of layers can't be negative.")
    if not layers:
        raise GraphparError(f"{program.name} has no repeated layers to count; give split points.")
    total = len(layers) + first + last
    stages = pp * per_rank
    if layers_per_stage is not None:
        if layers_per_stage < 1:
            raise GraphparError(f"{layers_per_stage} layers a stage: at least 1 is needed.")
        stages = -(-total // layers_per_stage)
        if stages % pp:
            per_stage = -(-total // (pp * max(1, stages // pp)))
            raise GraphparError(
                f"{len(layers)} layers (and {first} + {last} for the ends) at {layers_per_stage} a stage are {stages} stages, which "
                f"pp={pp} ranks can't hold evenly; {per_stage} layers a stage would be {-(-total // per_stage)}."
            )
    if stages > total:
        raise GraphparError(
            f"{stages} stages, but only {len(layers)} layers (counted as {total} with {first} + {last} for the ends)."
        )
    base, extra = divmod(total, stages)
    if stages > 1 and max(edges) > base:
        raise GraphparError(
            f"The ends count as {first} and {last} layers, more than the {base} layers of the smallest of {stages} stages."
        )
    counts = [base + (stage < extra) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    starts = list(itertools.accumulate(counts[:-1]))
    # A last stage without layers begins after the last layer.
    return tuple(
        SplitAt(layers[start]) if start < len(layers) else SplitAt(layers[-1], SplitPoint.END) for start in starts
    )


def _layers(program: Program) -> list[str]:
    """Return the block instances of the root that decide about stages, in execution order."""
    placed = placed_with(program)
    calls = [node for node in program.graph.nodes if node.op == "call_module" and node not in placed]
    return list(dict.fromkeys(str(node.target) for node in calls))


def marked_split_points(program: Program) -> tuple[SplitAt, ...] | None:
    """Return split points where the model's forward calls ``torch.distributed.pipelining.pipe_split()``; None without calls.

    Raises:
        GraphparError: a call is between operators of one module, so the stage would begin at no module.
    """
    seen: set[str] = set()
    split_points: list[SplitAt] = []
    for node in program.graph.nodes:
        paths = [entry[0] for entry in node.meta.get("module_stack", ()) if entry[0]]
        if node.meta.get("stage_begins"):
            fresh = next((path for path in paths if path not in seen), None)
            if fresh is None:
                raise GraphparError(
                    f"pipe_split() is between operators of the module {paths[-1] if paths else 'root'!r}; put it before "
                    "the call of a module, which the stage then begins with."
                )
            split_points.append(SplitAt(fresh))
        seen.update(paths)
    return tuple(split_points) or None
