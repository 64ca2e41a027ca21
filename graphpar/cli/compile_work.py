"""``graphpar compile``: model file -> program -> plan -> emitted package, and the report."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar import api
from graphpar.cli import run_command
from graphpar.cli.arguments import given_options
from graphpar.cli.clock import Clock
from graphpar.cli.explain import explain
from graphpar.cli.explain_decisions import DecisionExplainer
from graphpar.cli.explain_sharding import ShardingExplainer
from graphpar.cli.output import Result, check_writable, print_wrapped, progress, stdout_console, write_text
from graphpar.cli.passes_command import step_rows
from graphpar.cli.plan_file import read_plan, read_record
from graphpar.cli.trace import default_dtype, export_file
from graphpar.codegen.optimizer_file import optimizer_file
from graphpar.codegen.printer import print_graph
from graphpar.codegen.saving import EditedFiles, check_target
from graphpar.cost_models.estimates import Alone
from graphpar.errors import GraphparError, near_match
from graphpar.frontend.capture_cache import CaptureCache, cache_folder
from graphpar.frontend.inputs import batch_size
from graphpar.frontend.modelfile import ModelFile, initial_weights
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.passes.compilation import Compilation, compiled
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.next_best import Alternatives
from graphpar.passes.planning.plan_request import check_batch, plan_request, planned
from graphpar.passes.planning.planning import on_one_device
from graphpar.passes.planning.validate_plan import check_alone, validate_plan
from graphpar.passes.table import PASSES, PassList, Step, check_skipped
from graphpar.report.report import compile_json, html, render, report_data, with_alone
from graphpar.runtime.modes import GENERATE
from graphpar.runtime.options import Request, flag_of, options_of
from graphpar.text import bytes_text

if TYPE_CHECKING:
    from rich.console import Console

SMALL_BYTES = 2**30
"""Initial weights up to this size are written by default."""

_DUMPED = ("plan", "shard", "split")
"""Steps after the passes whose results ``--dump-after`` can print."""


@dataclass(frozen=True)
class _Request:
    """What the options and the model file ask for, checked as far as possible before the trace."""

    file: ModelFile
    cache: CaptureCache  # of the file
    given: Plan | None
    asked: PlanConstraints
    folder: Path | None
    kept: EditedFiles  # in the folder


def compile_model(options: argparse.Namespace) -> Result:
    """Do what ``graphpar compile`` was asked for; the result prints the report."""
    clock = Clock()
    request = _request(options)
    file, cache, given, asked, folder = request.file, request.cache, request.given, request.asked, request.folder
    with progress("tracing the model"):
        program = _export(file, options, given, clock, cache)
    clock.phase("capture")
    with progress("planning") as shown:
        plan = planned(program, asked, shown) if given is None else validate_plan(program, given)
        if plan.mesh.size > 1 and plan.alone is None:
            plan = replace(plan, alone=_on_one_device(program, plan))
    clock.phase("plan")
    clock.step("plan")
    if plan.sharded is not None:
        clock.within("plan", plan.sharded.seconds)
    _dump(options, "plan", "what was decided", plan)
    with progress("splitting"):
        compilation = compiled(program, plan)
    _dump(options, "shard", "the program of one rank", compilation.sharded.local)
    for stage in compilation.stages:
        _dump(options, "split", f"stage {stage.index}", print_graph(stage.graph))
    report = report_data(compilation)
    clock.step("report")
    clock.within("report", compilation.seconds)
    shard_plan = asked.shard_plan if given is None else None
    explanation: list[str] = []
    if options.explain:
        with progress("pricing what was not chosen"):
            explainer = DecisionExplainer(
                Alternatives(compilation.program, plan, compilation.cluster, asked if given is None else None)
            )
            explanation = _explanation(compilation, options.explain, shard_plan, explainer)
    written = "" if folder is None else _write(compilation, report, file, folder, options)
    clock.phase("emit")
    clock.step("codegen")
    out = None if folder is None else str(folder)
    report = with_alone(report, None if plan.alone is None else plan.alone.to_json())
    report |= {} if plan.found is None else {"search": plan.found.to_json()}
    data = compile_json(report, plan, clock.seconds, out) | {"steps": step_rows(clock.steps)}
    if options.explain:
        data |= {"explain": explanation, "decisions": explainer.to_json()}
    if options.html:
        write_text(options.html, html(report), options.written)

    def show(console: Console) -> None:
        render(report, console, out, clock.seconds["plan"])
        if explanation:
            print_wrapped(console, ["", *explanation])
        if out is not None:
            console.out(
                f"\n Wrote      {out}   ({clock.seconds['total']:.1f} s)\n Weights    {written}", highlight=False
            )
        if options.verbose:
            console.out("\n".join(["", *_step_lines(clock.steps), *_cache_lines(cache)]), highlight=False)
        if request.kept:
            console.out(f" Kept       {request.kept} (as NAME.orig where it was written anew)", highlight=False)

    if not options.run or folder is None:
        return Result(data, show)
    if not options.json:
        show(stdout_console())  # before the steps, which are printed as they end
    ran = data["run"] = run_command.launch(folder, options.steps or 10, compile=bool(options.compile))
    return Result(data, lambda console: run_command.show(ran, console))


def _request(options: argparse.Namespace) -> _Request:
    _check_options(options)
    given = read_plan(*read_record(options.plan)) if options.plan else None
    if given is not None:
        _check_beside_plan(options)
        given = replace(given, compile=given.compile or bool(options.compile))
        check_alone(given)
    if options.run and _traced_as(options, given)[1] == GENERATE:
        raise GraphparError(
            "--run trains or infers, and a program that generates needs prompts: leave --run out, then graphpar run OUT --prompt TEXT or "
            "--tokens IDS."
        )
    wanted = _wanted(options)
    plan_request(**wanted)  # before the model file is imported, which may take long too
    if options.out is not None:
        check_target(options.out, options.force)
    with progress("loading the model file"):
        cache = CaptureCache(options.model, None if options.no_cache else cache_folder(), *_traced_as(options, given))
    file = cache.file
    _check_dumped(options.dump_after, PASSES if file.passes is None else PassList.of(file.passes))
    asked = plan_request(**wanted | _own_pins(file, wanted, options))
    rows = None if given is not None or file.batch_dims else batch_size(file.args, file.kwargs, file.targets)
    if rows is not None:
        check_batch(asked, rows)
    if options.no_emit:
        return _Request(file, cache, given, asked, None, EditedFiles())
    devices = asked.size if given is None else given.mesh.size
    folder = Path(options.out or f"{file.path.stem}-{devices}dev")
    return _Request(file, cache, given, asked, folder, check_target(folder, options.force))


# ---- options ---------------------------------------------------------------------------------------------------


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what is wrong with the options themselves, before anything takes time."""
    if options.no_emit:
        for flag in ("out", "weights", "check-values", "run"):
            if getattr(options, flag.replace("-", "_")):
                raise GraphparError(
                    f"--no-emit writes no program, so --{flag} has nothing to do; leave one of them out."
                )
    if options.steps is not None and not options.run:
        raise GraphparError("--steps is the number of steps of --run; give --run too.")
    Precision.of(options.dtype, options.pure, options.param_dtype)
    if options.skip is not None:
        check_skipped(PASSES, _names(options.skip))
    if options.html is not None:
        check_writable(options.html)


def _check_beside_plan(options: argparse.Namespace) -> None:
    decided = {name: flag_of(name, known) for name, known in options_of(Request).items() if not known.beside_plan}
    for name, flag in (decided | {"pure": "--pure"}).items():
        if getattr(options, name, None) is not None:
            raise GraphparError(f"{flag} is decided by the plan {options.plan}; leave {flag} or --plan out.")


# ---- the steps -------------------------------------------------------------------------------------------------


def _export(
    file: ModelFile, options: argparse.Namespace, given: Plan | None, clock: Clock, cache: CaptureCache
) -> Program:
    def ended(row: Step, program: Program) -> None:
        clock.step(row.name)
        nodes = len(program.graph.nodes)
        _dump(options, row.name, f"{row.provides} ({nodes} nodes)", program)

    precision, mode, evaluates = _traced_as(options, given)
    return export_file(file, mode, precision, _names(options.skip or ""), ended, evaluates, cache)


def _traced_as(options: argparse.Namespace, given: Plan | None) -> tuple[Precision, str | None, bool]:
    """The dtypes and the mode that the model is traced with, and whether it is traced in evaluation, too."""
    precision = given.precision if given else _precision(options)
    return precision, options.mode or (given.mode if given else None), bool(options.eval)


def _precision(options: argparse.Namespace) -> Precision:
    """Return the dtypes that are asked for; on GPUs the default is bf16 with parameters in fp32."""
    asked = options.dtype, options.pure, options.param_dtype
    return Precision(default_dtype(options.cluster)) if asked == (None, None, None) else Precision.of(*asked)


def _dump(options: argparse.Namespace, step: str, what: str, value: object) -> None:
    """Print the result of a step, if ``--dump-after`` asks for it."""
    if options.dump_after in (step, "all"):
        print(f"# after {step}: {what}\n{value}\n", file=sys.stderr)


def _check_dumped(step: str | None, passes: PassList) -> None:
    names = ["capture", *passes.names(), *_DUMPED]
    if step not in (None, "all", *names):
        raise GraphparError(
            f"--dump-after prints no {step!r}; it takes {', '.join(names)} or all.{near_match(str(step), [*names, 'all'])}"
        )


def _names(text: str) -> list[str]:
    return [name for piece in text.split(",") if (name := piece.strip())]


def _wanted(options: argparse.Namespace) -> dict[str, Any]:
    """What the options ask of a plan, as :func:`graphpar.plan` takes it."""
    wanted = given_options(options)
    cluster = None if options.cluster is None else Cluster.parse(options.cluster)
    if cluster is not None and options.devices not in (None, cluster.size):
        raise GraphparError(
            f"--devices is {options.devices}, but the cluster {cluster} has {cluster.size}; leave one of them out."
        )
    return wanted | {"cluster": cluster}


def _own_pins(file: ModelFile, wanted: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the model file pins and the options don't; its split points count where there may be stages."""
    if options.plan is not None:
        return {}
    own: dict[str, Any] = {}
    if "shard_plan" not in wanted:
        own["shard_plan"] = file.shard_plan
    if not {"split", "layers_per_stage", "edge_layers"} & set(wanted) and _may_be_pipelined(plan_request(**wanted)):
        own["split"] = file.split_points
    return own


def _may_be_pipelined(asked: PlanConstraints) -> bool:
    """Whether the devices may have several stages: the mesh says so, or leaves it to the search."""
    pp = asked.mesh.get("pp")
    return pp > 1 if pp is not None else asked.size > math.prod(asked.mesh.values())


def _on_one_device(program: Program, plan: Plan) -> Alone | None:
    """Price the batch on one device; None where it can't be priced, which the report says."""
    try:
        return on_one_device(program, plan, plan.cluster or Cluster.of_this_machine(plan.mesh.size))
    except GraphparError:
        return None


def _explanation(
    compilation: Compilation, pattern: str, shard_plan: Mapping[str, Any] | None, decisions: DecisionExplainer
) -> list[str]:
    """Explain the decision of that name, and every module and value that the pattern matches."""
    plan, sharded, priced = compilation.plan, compilation.sharded, compilation.estimate is not None
    tensors = ShardingExplainer(compilation, shard_plan) if plan.sharding.degrees else None
    lines = decisions.named(pattern) if priced else []

    def more(name: str) -> list[str]:
        return [*(decisions.lines(name) if priced else ()), *(tensors.lines(name) if tensors else ())]

    return explain(sharded.local, plan, compilation.stages, pattern, more, lines)


def _cache_lines(cache: CaptureCache) -> list[str]:
    if cache.hit:
        return [" Capture    as it was kept from an earlier run (--no-cache traces the model again)"]
    return [] if cache.why_not is None else [f" Capture    not kept for other runs: {cache.why_not}"]


def _step_lines(steps: Mapping[str, float]) -> list[str]:
    """The seconds of each step, in their order; those under a hundredth of all together, in one line."""
    total = math.fsum(steps.values())
    rows = [(name, seconds) for name, seconds in steps.items() if seconds >= total / 100]
    rows.append((f"{len(steps) - len(rows)} others", total - math.fsum(seconds for _, seconds in rows)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}} {seconds:6.2f} s {seconds / total:5.0%}" for name, seconds in rows]
    return [f" {'' if place else 'Steps':10} {line}" for place, line in enumerate(lines)]


def _write(
    compilation: Compilation, report: dict[str, Any], file: ModelFile, folder: Path, options: argparse.Namespace
) -> str:
    """Write the program, with weights where they are asked for or small; returns what became of them, in words."""
    reference = file.reference or os.path.relpath(file.path.resolve(), folder.resolve())
    with progress("printing the stages"):
        parts = api.printed(compilation, report, reference, optimizer_file(file.path, file.reference))
    wanted = options.weights if options.weights is not None else options.run or None
    size = _state_bytes(parts.program)
    state, said = None, "none; train.py takes a file of them with --weights"
    if wanted is None and size > SMALL_BYTES:
        said += (
            f". The initial ones, {bytes_text(size)}, are more than compile writes by default; --weights writes them"
        )
    elif wanted is not False:
        try:
            with progress("building the initial weights"):
                state = initial_weights(file)
            said = f"initial values, {bytes_text(size)}, in {folder / 'weights'}"
        except GraphparError as error:
            if wanted:
                raise
            said += f". The initial ones can't be built: {error}"
    if options.check_values and parts.program.mode != "train":
        raise GraphparError("--check-values stores a step of training; this program is for inference, so leave it out.")
    first = None
    if options.check_values:
        from graphpar.verification.first_step import first_step

        with progress("running the model's first step"):
            first = first_step(parts)
    with progress(f"writing {folder}"):
        parts.save(folder, state, options.force)
        options.written.append(str(folder))
        if first is not None:
            first.save(folder)
    return said


def _state_bytes(program: Program) -> int:
    """Bytes of the model's ``state_dict``, a tied parameter counted once."""
    again = {name for names in program.ties for name in names[1:]}
    held = [
        info
        for name, info in (*program.parameters.items(), *program.buffers.items())
        if name not in again and info.persistent
    ]
    return sum(math.prod(info.whole or info.shape) * info.dtype.itemsize for info in held)
