"""``graphpar compile``: model file -> program -> plan -> emitted package, and the report."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar import api
from graphpar.cli import run_command
from graphpar.cli.clock import Clock
from graphpar.cli.explain import explain
from graphpar.cli.explain_sharding import ShardingExplainer
from graphpar.cli.output import Result, progress, write_text
from graphpar.cli.plan_file import read_plan, read_record
from graphpar.cluster import Cluster
from graphpar.errors import GraphparError, near_match
from graphpar.mesh import Mesh
from graphpar.modelfile import ModelFile, initial_weights, load_model_file
from graphpar.passes.given import given_plan
from graphpar.passes.shard import shard
from graphpar.passes.split import Stage, positions_of, split
from graphpar.passes.table import PASSES, Pass
from graphpar.plans import Plan
from graphpar.program import Program
from graphpar.report import compile_json, html, render, report_data
from graphpar.schedule import load_table
from graphpar.shard_plans import load_shard_plan

if TYPE_CHECKING:
    from rich.console import Console

_PLAN_DECIDES = (
    "devices",
    "cluster",
    "mesh",
    "schedule",
    "schedule_table",
    "microbatch_size",
    "split",
    "layers_per_stage",
    "edge_layers",
    "shard_plan",
    "batch",
)


@dataclass(frozen=True)
class _Compiled:
    """What the planning part of the command gives."""

    program: Program  # for one microbatch
    plan: Plan
    stages: list[Stage]
    report: dict[str, Any]
    parts: api.Parts | None


def run(options: argparse.Namespace) -> Result:
    clock = Clock()
    _check_options(options)
    cluster = _cluster(options)
    table = _schedule_table(options.schedule_table)
    wishes = load_shard_plan(options.shard_plan) if options.shard_plan else None
    given = read_plan(*read_record(options.plan)) if options.plan else None
    if given is not None:
        _check_beside_plan(options)
    with progress("loading the model file"):
        file = load_model_file(options.model)
    with progress("tracing the model"):
        program = _export(file, options, given)
    clock.phase("capture")
    if wishes is None and given is None:
        wishes = file.shard_plan
    with progress("planning"):
        plan = _plan(file, program, options, cluster, table, wishes) if given is None else given_plan(program, given)
    clock.phase("plan")
    folder = None if options.no_emit else Path(options.out or default_folder(file, plan))
    compiled = _compiled(file, program, plan, folder)
    explanation = _explanation(compiled, program, options.explain, wishes) if options.explain else []
    if folder is not None:
        _save(compiled, file, folder, options.weights or options.run)
    clock.phase("emit")
    out = None if folder is None else str(folder)
    report = compiled.report if plan.found is None else compiled.report | {"search": plan.found.to_json()}
    data = compile_json(report, plan, clock.seconds, out)
    if options.explain:
        data["explain"] = explanation
    if options.html:
        write_text(options.html, html(report))
    ran = run_command.launch(folder, options.steps or 10) if options.run and folder is not None else None
    if ran is not None:
        data["run"] = ran

    def show(console: Console) -> None:
        render(report, console, out, clock.seconds["plan"])
        if explanation:
            console.out("\n" + "\n".join(explanation), highlight=False)
        if out is not None:
            console.out(f"\n Wrote      {out}   ({clock.seconds['total']:.1f} s)", highlight=False)
        if ran is not None:
            run_command.show(ran, console)

    return Result(data, show)


# ---- options ---------------------------------------------------------------------------------------------------


def _check_options(options: argparse.Namespace) -> None:
    """What is wrong with the options themselves, found before anything takes time."""
    if options.no_emit:
        for flag in ("out", "weights", "run"):
            if getattr(options, flag):
                raise GraphparError(
                    f"--no-emit writes no program, so --{flag} has nothing to do; leave one of them out."
                )
    if options.steps is not None and not options.run:
        raise GraphparError("--steps is the number of steps of --run; give --run too.")
    if options.steps is not None and options.steps < 1:
        raise GraphparError(f"--steps is {options.steps}; it must be at least 1.")
    if options.top < 0:
        raise GraphparError(f"--top is {options.top}; it is a number of plans, from 0.")
    if options.top < 0:
        raise GraphparError(f"--top is {options.top}; it is a number of plans, from 0.")
    if options.dump_after not in (None, "all"):
        names = [row.name for row in PASSES]
        if options.dump_after not in names:
            hint = near_match(options.dump_after, [*names, "all"])
            raise GraphparError(f"There is no pass {options.dump_after!r}; the passes are {', '.join(names)}.{hint}")
    if options.html and not Path(options.html).parent.is_dir():
        raise GraphparError(f"--html {options.html}: the folder {Path(options.html).parent} does not exist.")


def _check_beside_plan(options: argparse.Namespace) -> None:
    for name in _PLAN_DECIDES:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise GraphparError(f"{flag} is decided by the plan {options.plan}; leave {flag} or --plan out.")


def _schedule_table(path: str | None) -> str | None:
    return None if path is None else str(load_table(path))


def _cluster(options: argparse.Namespace) -> Cluster | None:
    if options.cluster is None:
        return None
    cluster = Cluster.parse(options.cluster)
    if options.devices not in (None, cluster.size):
        raise GraphparError(
            f"--devices is {options.devices}, but the cluster {cluster} has {cluster.size}; leave one of them out."
        )
    return cluster


def _devices(
    options: argparse.Namespace, cluster: Cluster | None, table: str | None, mesh: Mapping[str, int] | None
) -> int | None:
    """The number of devices that the options say, also by the rows of a schedule table; None if they don't."""
    if cluster is not None:
        return cluster.size
    if options.devices is None and mesh is None and table is not None:
        return len(table.splitlines())
    devices: int | None = options.devices
    return devices


def _split_points(text: str) -> list[str | dict[str, str]]:
    """``a.1,a.3:end`` as :func:`graphpar.plan` takes it."""
    points: list[str | dict[str, str]] = []
    for entry in filter(None, (piece.strip() for piece in text.split(","))):
        path, colon, where = entry.partition(":")
        points.append({path: where} if colon else path)
    return points


# ---- the steps -------------------------------------------------------------------------------------------------


def _export(file: ModelFile, options: argparse.Namespace, given: Plan | None) -> Program:
    def dump(row: Pass, program: Program) -> None:
        if options.dump_after in (row.name, "all"):
            nodes = len(program.graph.nodes)
            print(f"# after {row.name}: {row.ensures} ({nodes} nodes)\n{program}\n", file=sys.stderr)

    return api.export(
        file.model,
        file.args,
        file.kwargs,
        loss_fn=file.loss_fn,
        targets=file.targets,
        batch_dims=file.batch_dims,
        mode=options.mode or (given.mode if given else None),
        dtype=options.dtype or (given.dtype if given else None),
        after_pass=dump if options.dump_after else None,
    )


def _edge_layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, comma, last = text.partition(",")
    try:
        return int(first), int(last if comma else first)
    except ValueError:
        raise GraphparError(f"--edge-layers wants two whole numbers such as 1,2; got {text!r}.") from None


def _may_be_pipelined(mesh: Mapping[str, int] | None, devices: int | None) -> bool:
    """Whether the devices may have several stages: the mesh says so, or leaves it to the search."""
    pp = (mesh or {}).get("pp")
    return pp > 1 if pp is not None else devices is not None and devices > math.prod((mesh or {}).values())


def _plan(
    file: ModelFile,
    program: Program,
    options: argparse.Namespace,
    cluster: Cluster | None,
    table: str | None,
    shard_plan: Mapping[str, Any] | None,
) -> Plan:
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    devices = _devices(options, cluster, table, mesh)
    by_layers = options.layers_per_stage is not None or options.edge_layers is not None
    own_split = file.split_points if not by_layers and _may_be_pipelined(mesh, devices) else None
    return api.plan(
        program,
        cluster,
        devices=devices,
        global_batch=options.batch,
        mesh=mesh,
        schedule=options.schedule,
        microbatch_size=options.microbatch_size,
        split=_split_points(options.split) if options.split else own_split,
        layers_per_stage=options.layers_per_stage,
        edge_layers=_edge_layers(options.edge_layers),
        table=table,
        shard_plan=shard_plan,
        allow_batch_coupling=options.allow_batch_coupling,
        dtype=options.dtype or "fp32",
        top=options.top,
    )


def default_folder(file: ModelFile, plan: Plan) -> str:
    return f"{file.path.stem}-{plan.mesh.size}dev"


def _compiled(file: ModelFile, program: Program, plan: Plan, folder: Path | None) -> _Compiled:
    """The stages, and unless ``folder`` is None the package that is to go there, in memory."""
    if folder is None:
        with progress("splitting"):
            sized = shard(program.at_batch(plan.microbatch_size), plan.sharding)
            stages = split(sized, positions_of(sized, plan.cuts))
            return _Compiled(sized, plan, stages, report_data(sized, plan, stages), None)
    reference = file.reference or os.path.relpath(file.path.resolve(), folder.resolve())
    with progress("printing the stages"):
        parts = api.partition(program, plan, model_file=reference)
    return _Compiled(parts.program, plan, parts.stages, parts.report, parts)


def _explanation(
    compiled: _Compiled, program: Program, pattern: str, shard_plan: Mapping[str, Any] | None
) -> list[str]:
    plan = compiled.plan
    explainer = None
    if plan.sharding.degrees:
        explainer = ShardingExplainer(program.at_batch(plan.microbatch_size), plan, shard_plan)
    return explain(compiled.program, plan, compiled.stages, pattern, explainer.lines if explainer else None)


def _save(compiled: _Compiled, file: ModelFile, folder: Path, weights: bool) -> None:
    assert compiled.parts is not None
    state: Mapping[str, Any] | None = None
    if weights:
        with progress("building the initial weights"):
            state = initial_weights(file, api.DTYPES[compiled.plan.dtype])
    with progress(f"writing {folder}"):
        compiled.parts.save(folder, state)
