"""``codegen``: the emitted package, file by file.

    stages, blocks, plan ──► plan.json  blocks.py  stage_0.py …  train.py  (constants beside them)

The text depends on the program and the plan alone, byte for byte.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpar.codegen.classes import (
    block_class,
    counts_function,
    docstring,
    helper_function,
    stage_class,
    stage_tree,
)
from graphpar.codegen.dead_code import library_files, name_in_library, without_unused
from graphpar.codegen.formatting import WIDTH, shapes_of, wrapped
from graphpar.codegen.model_outputs import model_output_interfaces, with_kept_outputs
from graphpar.codegen.operators import OperatorsFile, operators_file
from graphpar.codegen.printer import EVALUATED, FUNCTIONS, OF_FILES
from graphpar.codegen.scripts import launch_files, script
from graphpar.codegen.token_inputs import classes, vocabularies
from graphpar.codegen.units import (
    GATHERING,
    POINTWISE,
    RECOMPUTING,
    optimizer_units_function,
    recomputation_function,
    recomputed_in,
    recomputing_file,
    units_function,
    units_of,
)
from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_coefficients, concrete_shape
from graphpar.ir.lengths import SIZES, per_position
from graphpar.ir.owners import owners
from graphpar.ir.plan import Plan
from graphpar.ir.program import Block, Function, Input, Program, TensorInfo, value_of
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.stage import Boundary, Stage
from graphpar.operators.naming import free_name
from graphpar.operators.parameter_casts import cast_parameters, gather_dtype, rounded_weights, working_dtypes
from graphpar.runtime.manifest import (
    Counts,
    EvaluatedInterface,
    InputInterface,
    Interface,
    OutputInterface,
    StageInterface,
    TensorInterface,
    load_manifest,
    packed_record,
)
from graphpar.runtime.option_kinds import GENERATE, INFER, SCRIPTS, WHOLE
from graphpar.runtime.records import NAMES, written
from graphpar.runtime.stages.modules import emitted_package, stage_module
from graphpar.text import compressed, is_below, json_text, plural

_PARAMETERS = '''def parameters(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> nn.Module:
    """A module that holds parameters of these shapes."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
    return module
'''


@dataclass(frozen=True)
class Package:
    """The text of each file by name, and the tensors of ``constants.safetensors``."""

    files: dict[str, str]
    constants: dict[str, Tensor]


def emit_package(
    program: Program,
    plan: Plan,
    stages: Sequence[Stage],
    model_file: str | None = None,
    optimizer: str | None = None,
    recomputed: Mapping[str, Recomputation] | None = None,
) -> Package:
    """Print ``program``, split into ``stages``, as a package.

    Args:
        model_file: the model file that ``plan.json`` names: a path relative to the package, or a dotted module name.
        optimizer: the text of ``optimizer.py``.
        recomputed: the blocks that run their forward again in the backward, by path.
    """
    with shapes_of(program.mode):
        return _package(program, plan, stages, model_file, optimizer, recomputed or {})


def _package(
    program: Program,
    plan: Plan,
    stages: Sequence[Stage],
    model_file: str | None,
    optimizer: str | None,
    recomputed: Mapping[str, Recomputation],
) -> Package:
    stages = with_kept_outputs(stages)
    for length in {length for stage in stages for length in stage.at_lengths}:
        others = with_kept_outputs([stage.at_lengths.get(length, stage) for stage in stages])
        stages = [
            replace(stage, at_lengths={**stage.at_lengths, length: other}) if length in stage.at_lengths else stage
            for stage, other in zip(stages, others)
        ]
    if program.evaluated is not None:
        evaluated = with_kept_outputs(
            [stage.evaluated for stage in stages if stage.evaluated is not None], of_blocks=True
        )
        stages = [replace(stage, evaluated=other) for stage, other in zip(stages, evaluated)]
        for graph in (
            *(block.graph for block in program.evaluated.blocks.values()),
            *(stage.graph for stage in evaluated),
        ):
            for node in graph.nodes:
                node.meta[EVALUATED] = True
    tensors, instances = stage_contents(program, stages)
    files = {"__init__.py": f'"""{program.name}, split into {plural(len(stages), "stage")} by graphpar."""\n'}
    operators = operators_file(_graphs(program, stages), program.name, _taken(program, stages))
    if operators is not None:
        files["operators.py"] = operators.text
    blocks, exported = _blocks_file(program, stages, operators)
    if blocks:
        files["blocks.py"] = blocks
    shown = [", ".join(names) or "no parameters" for names in compressed([stage.modules for stage in stages])]
    for stage, modules, infos, calls in zip(stages, shown, tensors, instances):
        files[f"stage_{stage.index}.py"] = _stage_file(
            program, plan, stage, modules, infos, calls, exported, operators, recomputed_in([stage], recomputed)
        )
    used = {name_in_library(node.target) for graph in _graphs(program, stages) for node in graph.nodes}
    used |= {"chunks"} if plan.sharding.loss_chunk else set()
    used |= {"random_streams"} if program.random_calls else set()
    used |= {"collectives"} if plan.sharding.all_degrees else set()
    used |= {"layers"} if any("from . import layers\n" in text for text in files.values()) else set()
    used |= {recomputing_file(how) for how in recomputed.values()}
    files = without_unused(files | library_files(name for name in used if name is not None))
    record = plan.to_json() | {
        "interface": interface(program, plan, stages, recomputed),
        "model_file": model_file,
        "torch": torch.__version__,
    }
    files["plan.json"] = json_text(packed_record(record)) + "\n"
    if optimizer is not None and program.mode == "train":
        files["optimizer.py"] = optimizer
    files[SCRIPTS[program.mode]] = script(program, plan, shown)
    if plan.mesh.size > 1:
        files |= launch_files(program.name, plan)
    required = {name for infos in tensors for name, info in infos.items() if not info.persistent}
    required |= {name for paths in instances for path in paths for name in program.constants if is_below(name, path)}
    return Package(files, {name: value for name, value in program.constants.items() if name in required})


def stage_contents(
    program: Program, stages: Sequence[Stage]
) -> tuple[list[dict[str, TensorInfo]], list[dict[str, str]]]:
    """Return for each stage its tensors outside of blocks, and its block instances (path -> class).

    A tensor that no operator uses goes where its neighbours are, so that the stages' keys are the model's keys.
    """
    tensors: list[dict[str, TensorInfo]] = []
    instances: list[dict[str, str]] = []
    for stage in stages:
        nodes = [node for graph in graphs_of(stage) for node in graph.nodes]
        used = [str(node.target) for node in nodes if node.op == "get_attr"]
        if any(each.counts for each in (stage, stage.evaluated) if each is not None):
            used += program.count_buffers
        calls = {str(node.target): str(node.meta["block"]) for node in nodes if node.op == "call_module"}
        used = [name for name in used if not any(is_below(name, path) for path in calls)]
        tensors.append({name: program.tensor_info(name) for name in used})
        instances.append(calls)
    held = {name for infos in tensors for name in infos}
    paths = [path for calls in instances for path in calls]
    persistent = [name for name, info in program.buffers.items() if info.persistent]
    for name in [*program.parameters, *persistent]:
        if name not in held and not any(is_below(name, path) for path in paths):
            tensors[_home(program, name, tensors, instances)][name] = program.tensor_info(name)
    return tensors, instances


def _home(
    program: Program, name: str, tensors: Sequence[Mapping[str, TensorInfo]], instances: Sequence[Mapping[str, str]]
) -> int:
    """The stage of a tensor that no operator uses: that of its tie, or that of the nearest module."""
    tied = set(program.tie_of(name)) - {name}
    for index, infos in enumerate(tensors):
        if tied & set(infos) or any(is_below(other, path) for other in tied for path in instances[index]):
            return index
    parts = name.split(".")

    def nearness(index: int) -> int:
        names = (other.split(".") for other in [*tensors[index], *instances[index]])
        shared = (itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, other)) for other in names)
        return max((len(list(pairs)) for pairs in shared), default=0)

    return max(range(len(tensors)), key=lambda index: (nearness(index), -index))


# ---- files -----------------------------------------------------------------------------------------------------


def graphs_of(stage: Stage) -> list[fx.Graph]:
    """Return what a stage computes: in training, at other lengths and in evaluation, where these are other graphs."""
    others = [*stage.at_lengths.values(), *([stage.evaluated] if stage.evaluated is not None else [])]
    return [stage.graph, *(other.graph for other in others)]


def _graphs(program: Program, stages: Sequence[Stage]) -> list[fx.Graph]:
    """All graphs that are printed."""
    blocks = [
        graph
        for block in _called(program, stages)
        for each in _modes(program, block.name)
        for graph in _graphs_of_block(each.blocks[block.name])
    ]
    graphs = [*(graph for stage in stages for graph in graphs_of(stage)), *blocks]
    graphs += [function.graph for function in _functions(program, stages).values()]
    return [*graphs, *([program.counts] if program.counts is not None else [])]


def _called(program: Program, stages: Sequence[Stage]) -> list[Block]:
    """The blocks that stages call."""
    nodes = (node for stage in stages for graph in graphs_of(stage) for node in graph.nodes)
    used = {str(node.meta["block"]) for node in nodes if node.op == "call_module"}
    return [block for name, block in program.blocks.items() if name in used]


def _graphs_of_block(block: Block) -> list[fx.Graph]:
    """Return what a block computes at the longest length, and at others where that is another graph."""
    return [block.graph, *block.at_lengths.values()]


def _modes(program: Program, block: str) -> list[Program]:
    """The programs, of training and of evaluation where that is another, that have a block."""
    return [each for each in (program, program.evaluated) if each is not None and block in each.blocks]


def _functions(program: Program, stages: Sequence[Stage]) -> dict[str, Function]:
    """The functions that stages and their blocks call, by name; one that evaluation or another length has under a name of training's gets
    another."""
    called = [block.name for block in _called(program, stages)]
    blocks = [program.blocks[name] for name in called]
    evaluated = [stage.evaluated.graph for stage in stages if stage.evaluated is not None]
    if program.evaluated is not None:
        evaluated += [program.evaluated.blocks[name].graph for name in called if name in program.evaluated.blocks]
    at_lengths = [each.graph for stage in stages for each in stage.at_lengths.values()]
    at_lengths += [graph for block in blocks for graph in block.at_lengths.values()]
    first = [*(stage.graph for stage in stages), *(block.graph for block in blocks)]
    found: dict[str, Function] = {}
    for graphs, others in ((first, False), ([*at_lengths, *evaluated], True)):
        for target in (node.target for graph in graphs for node in graph.nodes):
            if isinstance(target, Function):
                known = found.setdefault(target.name, target)
                if known is not target and others and helper_function(known) != helper_function(target):
                    target.name = free_name(target.name, found)
                    found[target.name] = target
    return found


def _taken(program: Program, stages: Sequence[Stage]) -> set[str]:
    """The names that the package defines."""
    helpers = _functions(program, stages)
    return {*program.blocks, *helpers, *(f"Stage{stage.index}" for stage in stages), "global_counts"}


def _blocks_file(program: Program, stages: Sequence[Stage], operators: OperatorsFile | None) -> tuple[str, set[str]]:
    """``blocks.py`` and the names that it defines."""
    helpers, blocks = _functions(program, stages), _called(program, stages)
    classes = [block_class(program, block) for block in blocks]
    parts = [*map(helper_function, helpers.values()), *(text for text, _, _ in classes)]
    apart = {block.name for block, (_, _, apart) in zip(blocks, classes) if apart}
    for stage in stages:
        for node in stage.evaluated.graph.nodes if stage.evaluated is not None else ():
            if node.op == "call_module":
                node.meta[EVALUATED] = node.meta["block"] in apart
    if any(needs for _, needs, _ in classes):
        parts.insert(0, _PARAMETERS)
    if not parts:
        return "", set()
    counts = ", ".join(f"{block.name} x {len(set(block.instances))}" for block in blocks)
    summary = (
        f"{program.name}: {counts or 'what the stages share'}. Generated by graphpar; plan.json holds every decision. "
        f"Shapes are those of {'a window of n positions' if program.mode == GENERATE else 'one microbatch of b rows'}."
    )
    title = "\n".join(docstring(summary, "")) + "\n"
    exported = {*helpers, *(block.name for block in blocks), *(["parameters"] if parts[0] is _PARAMETERS else [])}
    return _assembled(title, parts, (), operators), exported


def _stage_file(
    program: Program,
    plan: Plan,
    stage: Stage,
    modules: str,
    infos: Mapping[str, TensorInfo],
    calls: Mapping[str, str],
    exported: set[str],
    operators: OperatorsFile | None,
    recomputed: Mapping[str, Recomputation],
) -> str:
    text, needs_parameters = stage_class(program, stage, modules, infos, calls)
    parts = [text]
    last = stage.index == len(plan.stages) - 1
    if last and program.counts is not None:
        parts.insert(0, counts_function(program))
    if plan.zero:
        tree = stage_tree(program, infos, calls)
        parts.append(
            optimizer_units_function(tree, [path for (path,) in units_of(program, stage)], plan.mesh.state_text)
            if plan.zero == 1
            else units_function(tree, program, stage, plan)
        )
    if recomputed:
        parts.append(recomputation_function(stage_tree(program, infos, calls), recomputed))
    names = set(exported)
    if needs_parameters and "parameters" not in exported:
        parts.insert(0, _PARAMETERS)
    rank = plan.stages[stage.index].rank
    title = "\n".join(docstring(f"Stage {stage.index} of {len(plan.stages)}, on pp rank {rank}: {modules}.", "")) + "\n"
    return _assembled(title, parts, names, operators)


def _assembled(
    title: str, parts: Sequence[str], blocks: Sequence[str] | set[str], operators: OperatorsFile | None = None
) -> str:
    """A file: docstring, the imports that its text needs, and its parts."""
    text = "\n\n".join(parts)
    words = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r'"""[\s\S]*?"""', "", text)))
    imports = ["from typing import Any\n"] if "Any" in words else []
    imports += ["import torch"] if "torch" in words else []
    if "F" in words:
        imports.append("import torch.nn.functional as F")
    from_torch = [name for name in ("Tensor", "nn") if name in words]
    if from_torch:
        imports.append(f"from torch import {', '.join(from_torch)}")
    if "fully_shard" in words:
        imports.append("from torch.distributed.fsdp import fully_shard")
    local = []
    shared = sorted(name for name in blocks if name in words)
    if shared:
        local.append(_import("blocks", shared))
    for module, functions in (
        *OF_FILES.items(),
        ("random_streams", FUNCTIONS),
        ("recomputation", RECOMPUTING),
        ("pointwise", POINTWISE),
        ("gathering", GATHERING),
    ):
        called = sorted(name for name in functions if re.search(rf"(?<![.\w]){name}\(", text))
        if called:
            local.append(_import(module, called))
    if operators is not None:
        classes = [name for name in operators.classes if name in words]
        if classes:
            local.append(_import("operators", classes))
        registered = [name for name in operators.registers if f"torch.ops.{name.replace('::', '.')}" in text]
        if registered and not classes:
            local.append(f"from . import operators  # noqa: F401  registers {', '.join(registered)}")
    if re.search(r"(?<![\w.])layers\.[A-Z]\w*\(", text):
        local.append("from . import layers")
    local.sort()
    header = "\n".join(imports) + ("\n\n" + "\n".join(local) if local else "")
    return f"{title}\n{header}\n\n\n{text}"


def _import(module: str, names: Sequence[str]) -> str:
    """The import of ``names`` from a file of the package, over several lines where it is long."""
    line = f"from .{module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else "\n".join(wrapped(f"from .{module} import ({', '.join(names)})", ""))


# ---- the runtime's interface -----------------------------------------------------------------------------------


def interface(
    program: Program, plan: Plan, stages: Sequence[Stage], recomputed: Mapping[str, Recomputation]
) -> dict[str, Any]:
    """Describe for the runtime: inputs, what each stage takes and sends, loss denominators, ties."""
    tables, labels = vocabularies(program), classes(program)
    counts_inputs: list[str] = []
    if program.counts is not None:
        counts_inputs = [str(node.target) for node in program.counts.nodes if node.op == "placeholder"]
    trains = program.mode == "train"
    fills = {} if program.lengths is None else program.lengths.fills
    other_names = {name for group in program.ties for name in group[1:]}
    evaluated = [stage.evaluated for stage in stages if stage.evaluated is not None]
    described = Interface(
        inputs=tuple(
            _input(
                entry,
                plan,
                tables.get(entry.name),
                labels.get(entry.name),
                None if program.lengths is None else program.lengths.multiple,
                None if isinstance(fills, str) else fills.get(entry.name),
            )
            for entry in program.inputs
        ),
        counts=Counts(program.count_names, tuple(counts_inputs), tuple(program.count_buffers)),
        stages=tuple(
            StageInterface(
                class_name=f"Stage{stage.index}",
                file=f"stage_{stage.index}.py",
                inputs=tuple(stage.inputs),
                counts=tuple(stage.counts),
                receives=tuple(_boundary(program, boundary, plan) for boundary in stage.receives),
                sends=tuple(_boundary(program, boundary, plan) for boundary in stage.sends),
                recomputes=bool(own := recomputed_in([stage], recomputed)),
                partly=tuple(path for path, how in own.items() if how.kind not in WHOLE),
                evaluated=None if stage.evaluated is None else _evaluated(program, stage.evaluated, plan),
            )
            for stage in stages
        ),
        outputs=tuple(_outputs(program, plan)),
        model_outputs=model_output_interfaces(program, stages, plan),
        evaluated_outputs=model_output_interfaces(program, evaluated, plan, of_blocks=True),
        steady=tuple(program.steady),
        branches={name: f"{branch} is not {branch.taken}" for name, branch in program.branches.items()},
        shapes={
            name: tuple(info.whole)
            for name, info in program.parameters.items()
            if info.whole is not None and info.whole != info.shape
        },
        gather_dtype=_known(gather_dtype(program, plan.fully_sharded)) if plan.zero > 1 else None,
        casts={name: dtype for name, dtype in cast_parameters(program).items() if dtype in NAMES}
        if plan.zero < 2 and program.mode != INFER
        else {},
        working={name: dtype for name, dtype in working_dtypes(program).items() if dtype in NAMES}
        if plan.zero == 1 and trains
        else {},
        owners=owners_of(program, plan, stages) if plan.zero == 1 else {},
        ties=tuple(tuple(group) for group in program.ties),
        streams=tuple(tuple(layout) for layout in program.stream_layouts),
        evaluated_streams=tuple(tuple(layout) for layout in program.evaluated.stream_layouts)
        if program.evaluated
        else (),
        rounded_weights=rounded_weights(program, plan.sharding.parameters),
        plain=program.plain,
        unread=program.unread,
        multiple=1 if program.lengths is None else program.lengths.multiple,
        unpadded=fills if isinstance(fills, str) else None,
        no_eval=program.no_eval,
        generation=program.generation if program.mode == GENERATE else {},
        pretrained=program.pretrained,
        adapters=program.adapters,
        parameters=tuple(name for name in program.parameters if name not in other_names) if trains else (),
        **(_whole(program, plan) if trains else {}),
    )
    return written(described)


def _evaluated(program: Program, stage: Stage, plan: Plan) -> EvaluatedInterface:
    return EvaluatedInterface(
        inputs=tuple(stage.inputs),
        counts=tuple(stage.counts),
        receives=tuple(_boundary(program, boundary, plan) for boundary in stage.receives),
        sends=tuple(_boundary(program, boundary, plan) for boundary in stage.sends),
    )


def _known(dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype if dtype in NAMES else None


SEVERAL = 8
"""A model that is traced for numbers of rows is tried with so many batches, which a step may have one after the other as one."""


def _whole(program: Program, plan: Plan) -> dict[str, str]:
    """Say why a batch can't be computed in parts, one after the other, where the user does not accept what comes of it."""
    if program.unsplittable is not None:
        return {"unsplittable": program.unsplittable}
    try:
        program.check_batch(plan.microbatch_size, plan.global_batch * SEVERAL)
    except GraphparError as error:
        return {"unsplittable": str(error).rstrip(".")}
    if plan.allow_batch_coupling or not program.couplings:
        return {}
    first, *others = program.couplings
    more = f", and so do {plural(len(others), 'other operator')}" if others else ""
    return {
        "coupled": f"{first}{more}; compile with --allow-batch-coupling to accept that each batch is computed separately"
    }


def owners_of(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, int]:
    """Return which of the ranks that share state updates each parameter at ZeRO level 1."""
    return owners(program, held_by_ranks(program, plan, stages), plan.mesh.shards, plan.zero1_by)


def held_by_ranks(program: Program, plan: Plan, stages: Sequence[Stage]) -> list[list[str]]:
    """Return the names of the parameters that each pp rank holds."""
    held: list[list[str]] = [[] for _ in range(plan.mesh.pp)]
    for stage, infos, instances in zip(stages, *stage_contents(program, stages)):
        inside = tuple(f"{path}." for path in instances)
        names = [name for name in program.parameters if name in infos or name.startswith(inside)]
        held[plan.stages[stage.index].rank] += names
    return held


def _input(
    entry: Input,
    plan: Plan,
    rows: int | None,
    labels: tuple[int, int] | None,
    multiple: int | None,
    fill: int | None,
) -> InputInterface:
    """Describe an input; ``rows`` are those of the table in which it looks up, ``labels`` the classes of a loss, and the ignored one."""
    dim, shape = entry.batch_dim, entry.shape_at(plan.global_batch)
    if plan.mode == GENERATE:  # sequences, of as many positions as the cache has
        dim, shape = 0, (entry.shape[0] * plan.mesh.replicas, *entry.shape[1:])
    classes, ignored = labels or (None, None)
    return InputInterface(
        name=entry.name, shape=tuple(shape), dtype=entry.dtype, batch_dim=dim, role=entry.role, below=rows, classes=classes,
        ignored=ignored, fill=fill,
        per_position=tuple(multiple * (dim in entry.positions) for dim in range(len(shape))) if multiple and entry.positions else (),
    )  # fmt: skip


def _boundary(program: Program, boundary: Boundary, plan: Plan) -> TensorInterface:
    node = boundary.node
    return TensorInterface(
        name=boundary.name,
        shape=tuple(concrete_shape(node, plan.microbatch_size)),
        dtype=value_of(node).dtype,
        requires_grad=boundary.requires_grad,
        types=node.meta.get("types", {}),
        per_position=tuple(each or 0 for each in batch_coefficients(node))
        if plan.mode == GENERATE
        else _per_position(program, node, plan.microbatch_size),
    )


def _per_position(program: Program, node: fx.Node, rows: int) -> tuple[int, ...]:
    multiple = 1 if program.lengths is None else program.lengths.multiple
    return per_position(node.meta.get(SIZES, ()), batch_coefficients(node), rows, multiple)


def _outputs(program: Program, plan: Plan) -> Iterator[OutputInterface]:
    nodes: Any = program.graph.output_node().args[0]
    for output, node in zip(program.outputs, nodes):
        whole = program.mode == GENERATE
        shape, dtype = concrete_shape(node, program.batch if whole else plan.microbatch_size), value_of(node).dtype
        batch_dim = None if program.mode == "train" else 0 if whole else output.batch_dim
        follows = () if whole else _per_position(program, node, plan.microbatch_size)
        yield OutputInterface(
            name=output.name, shape=tuple(shape), dtype=dtype, batch_dim=batch_dim, per_position=follows
        )


def import_stage(folder: Path, index: int) -> nn.Module:
    """Import a stage of the emitted package in ``folder`` and build its module on the meta device."""
    manifest = load_manifest(folder)
    stage = manifest.stages[index]
    with torch.device("meta"):
        module = getattr(stage_module(emitted_package(manifest), stage), stage.class_name)()
    assert isinstance(module, nn.Module)
    return module
