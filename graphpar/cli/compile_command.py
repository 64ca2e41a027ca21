"""``graphpar compile``: model file -> program -> plan -> emitted package, and the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from graphpar import api
from graphpar.cli.explain import DecisionExplainer, explain
from graphpar.cli.explain_sharding import ShardingExplainer
from graphpar.cli.output import Result, check_writable, print_wrapped, progress, stdout_console, write_text
from graphpar.cli.parser import build_parser, given_options
from graphpar.cli.passes_command import step_rows
from graphpar.cli.plan_file import read_plan, read_record
from graphpar.cli.trace import Clock, asked_precision, export_file
from graphpar.codegen.optimizer_file import optimizer_file
from graphpar.codegen.saving import EditedFiles, check_target
from graphpar.errors import GraphparError, near_match
from graphpar.frontend.capture_cache import CaptureCache, captures_folder
from graphpar.frontend.file_dependencies import sources
from graphpar.frontend.modelfile import ModelFile, initial_weights
from graphpar.frontend.signature import batch_size
from graphpar.hardware import this_machine
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.passes.compilation import Compilation, compiled
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.explain import Alternatives
from graphpar.passes.planning.plan_request import check_batch, on_one_device, plan_request, planned
from graphpar.passes.planning.validate_plan import check_alone, validate_plan
from graphpar.passes.rank_passes import Seen
from graphpar.passes.step import Step
from graphpar.passes.table import PASSES, STEPS, Pass, PassList, check_skipped
from graphpar.report.report import compile_json, html, render, report_data, with_alone
from graphpar.runtime.option_kinds import GENERATE, SEQ, TRAIN, TRAIN_GENERATE, Seq
from graphpar.runtime.options import Request, flag_of, options_of
from graphpar.text import bytes_text

SMALL_BYTES = 2**30
"""Initial weights up to this size are written by default."""

_WITHOUT_PROGRAM = ("capture", "annotate", "check_types", "codegen", "report")
_DUMPED = tuple(step.name for step in STEPS if not isinstance(step, Pass) and step.name not in _WITHOUT_PROGRAM)
"""Steps after the passes whose results ``--dump-after`` can print."""


@dataclass(frozen=True)
class _Request:
    """What the options and the model file ask for, checked as far as possible before the trace."""

    file: ModelFile
    cache: CaptureCache  # of the file
    given: Plan | None
    constraints: PlanConstraints
    folder: Path | None
    kept: EditedFiles  # in the folder


def run(options: argparse.Namespace) -> Result:
    """Do what ``graphpar compile`` was asked for; the result prints the report."""
    clock = Clock()
    request = _request(options)
    file, cache, given, folder = request.file, request.cache, request.given, request.folder
    constraints = request.constraints
    if options.cluster is None and (given is None or given.cluster is None):
        _measure_once()
    with progress("tracing the model"):
        program = _export(file, options, given, clock, cache)
    clock.phase("capture")
    with progress("planning") as shown:
        plan = planned(program, constraints, shown) if given is None else validate_plan(program, given)
        if plan.mesh.size > 1 and plan.alone is None:
            with contextlib.suppress(GraphparError):  # it can't be priced, which the report says
                here = plan.cluster or Cluster.of_this_machine(plan.mesh.size)
                plan = replace(plan, alone=on_one_device(program, plan, here))
    clock.phase("plan")
    clock.step("plan")
    clock.within("plan", plan.sharded.seconds)
    _dump(options, "plan", "what was decided", plan)
    with progress("splitting"):
        compilation = compiled(program, plan, seen=_shown(options) if options.dump_after else None)
    report = report_data(compilation)
    clock.step("report")
    clock.within("report", compilation.seconds)
    explained: dict[str, Any] = {}
    if options.explain:
        with progress("pricing alternatives"):
            explained = _explanation(compilation, options.explain, constraints if given is None else None)
    written = "" if folder is None else _write(compilation, report, file, folder, options)
    clock.phase("emit")
    clock.step("codegen")
    out = None if folder is None else str(folder)
    report = with_alone(report, None if plan.alone is None else plan.alone.to_json())
    report |= {} if plan.found is None else {"search": plan.found.to_json()}
    data = compile_json(report, plan, clock.seconds, out) | {"steps": step_rows(clock.steps)} | explained
    if options.html:
        write_text(options.html, html(report), options.written)

    def show(console: Console) -> None:
        render(report, console, out, clock.seconds["plan"])
        if explained:
            print_wrapped(console, ["", *explained["explain"]])
        if out is not None:
            console.out(
                f"\n Wrote      {out}   ({clock.seconds['total']:.1f} s)\n Weights    {written}", highlight=False
            )
        if options.verbose:
            console.out("\n".join(["", *_step_lines(clock.steps, cache)]), highlight=False)
        if request.kept:
            console.out(f" Kept       {request.kept} (as NAME.orig if rewritten)", highlight=False)

    if not options.run or folder is None:
        return Result(data, show)
    if not options.json:
        show(stdout_console())  # before the steps, which are printed as they end
    from graphpar.cli import run_command  # with all that runs programs, which takes a while to load

    ran = data["run"] = run_command.launch(
        folder, options.steps or 10, compile=options.compile, cuda_graphs=options.cuda_graphs
    )
    return Result(data, lambda console: run_command.show(ran, console))


def _measure_once() -> None:
    """Measure the CPU that plans are for, unless that was done before."""
    kept = this_machine.profile_path()
    if kept is None or Cluster.of_this_machine(1).device != DEVICES["CPU"]:
        return
    from graphpar.cli.calibrate_command import keep_profile  # what measures loads torch's pipelines, for a second

    keep_profile(kept)


def _request(options: argparse.Namespace) -> _Request:
    _check_options(options)
    given = read_plan(*read_record(options.plan)) if options.plan else None
    if given is not None:
        _check_beside_plan(options)
        given = given if options.compile is None else replace(given, compile=options.compile)
        check_alone(given)
    if options.run and _traced_as(options, given)[1] == GENERATE:
        raise GraphparError(
            "--run trains or infers, and a program that generates needs prompts: leave --run out, then graphpar run OUT --prompt TEXT or "
            "--tokens IDS."
        )
    requested = _requested(options)
    plan_request(**requested)  # before the model file is imported, which may take long too
    if options.out is not None:
        check_target(options.out, options.force)
    with progress("loading the model file"):
        precision, mode, evaluates, seq = _traced_as(options, given)
        mode = TRAIN if mode == TRAIN_GENERATE else mode
        folder = None if options.no_cache else captures_folder()
        cache = CaptureCache(options.model, folder, precision, mode, evaluates, seq)
    file = cache.file
    _check_dumped(options.dump_after, PASSES if file.passes is None else PassList.of(file.passes))
    constraints = plan_request(**requested | ({} if options.plan else _own_pins(file, requested)))
    rows = None if given is not None or file.batch_dims else batch_size(file.args, file.kwargs, file.targets)
    if rows is not None:
        check_batch(constraints, rows)
    if options.no_emit:
        return _Request(file, cache, given, constraints, None, EditedFiles())
    devices = constraints.size if given is None else given.mesh.size
    folder = Path(options.out or f"{file.path.stem}-{devices}dev")
    return _Request(file, cache, given, constraints, folder, check_target(folder, options.force))


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
    if options.cuda_graphs and not options.run:
        raise GraphparError("--cuda-graphs is for --run; give --run too, or give it to train.py.")
    asked_precision(options, options.cluster)
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

    precision, mode, evaluates, seq = _traced_as(options, given)
    return export_file(file, mode, precision, _names(options.skip or ""), ended, evaluates, cache, seq)


def _traced_as(options: argparse.Namespace, given: Plan | None) -> tuple[Precision, str | None, bool, Seq | None]:
    """The dtypes and the mode that the model is traced with, whether it is traced in evaluation, too, and the range of lengths."""
    precision = given.precision if given else asked_precision(options, options.cluster)
    seq = given.seq if given else None if options.seq is None else SEQ.check("seq", options.seq)
    return precision, options.mode or (given.mode if given else None), bool(options.eval), seq


def _dump(options: argparse.Namespace, step: str, what: str, value: object) -> None:
    """Print the result of a step, if ``--dump-after`` asks for it."""
    if options.dump_after in (step, "all"):
        print(f"# after {step}: {what}\n{value}\n", file=sys.stderr)


def _shown(options: argparse.Namespace) -> Seen:
    """Return what prints the program after a step, if ``--dump-after`` asks for it."""
    return lambda step, program: _dump(options, step.name, step.provides, program)


def _check_dumped(step: str | None, passes: PassList) -> None:
    names = ["capture", *passes.names(), *_DUMPED]
    if step not in (None, "all", *names):
        raise GraphparError(
            f"--dump-after prints no {step!r}; it takes {', '.join(names)} or all.{near_match(str(step), [*names, 'all'])}"
        )


def _names(text: str) -> list[str]:
    return [name for piece in text.split(",") if (name := piece.strip())]


def _requested(options: argparse.Namespace) -> dict[str, Any]:
    """What the options ask of a plan, as :func:`graphpar.plan` takes it."""
    requested = given_options(options)
    cluster = Cluster.parse(options.cluster) if isinstance(options.cluster, str) else options.cluster
    if cluster is not None and options.devices not in (None, cluster.size):
        raise GraphparError(
            f"--devices is {options.devices}, but the cluster {cluster} has {cluster.size}; leave one of them out."
        )
    return requested | {"cluster": cluster}


REQUEST = "request.json"
"""The file of a program's folder that says what was requested of ``compile``."""
_REQUESTED = (*(set(options_of(Request)) - {"cluster", "devices"}), "skip")
"""The options that a plan for other devices is made with, too."""
_FILES = ("shard_plan", "table")


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in sorted(_REQUESTED) if (value := getattr(options, name, None)) is not None}


def _request_text(options: argparse.Namespace, file: ModelFile, folder: Path) -> str:
    """What was requested, as ``graphpar resume`` requests it again, with hashes of the model's sources; paths are as from ``folder``."""
    given = _asked(options) if options.again is None else options.again.asked
    paths = {name: os.path.relpath(Path(given[name]).resolve(), folder.resolve()) for name in _FILES if name in given}
    data = {"options": given | paths, "sources": sources(file.reference or file.path)}
    return json.dumps(data, indent=1) + "\n"


@dataclass(frozen=True)
class _Again:
    """What a program that is compiled again has from the one before: what was requested of that, and files, by name."""

    asked: Mapping[str, Any]
    files: Mapping[str, str]


def again(
    record: Mapping[str, Any], folder: Path, model: str, files: Mapping[str, str], **decided: Any
) -> argparse.Namespace:
    """Return the options of a ``compile`` that requests what ``record``, the request of the program in ``folder``, says, but what is
    ``decided``. It writes ``files`` too, or in place of its own."""
    options = build_parser().parse_args(["compile", model])
    asked = record.get("options", {})
    vars(options).update(_located({**asked, **decided}, folder))
    options.again = _Again(_located(asked, folder), files)
    return options


def _located(asked: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return options with the paths of files from here, where they were relative to ``folder``."""
    return {
        name: str(folder / value) if name in _FILES and value is not None else value for name, value in asked.items()
    }


def _own_pins(file: ModelFile, requested: Mapping[str, Any]) -> dict[str, Any]:
    """What the model file pins and the options don't; its split points count where the mesh has several stages, or leaves it open."""
    own: dict[str, Any] = {} if "shard_plan" in requested else {"shard_plan": file.shard_plan}
    constraints = plan_request(**requested)
    pp = constraints.mesh.get("pp")
    pipelined = pp > 1 if pp is not None else constraints.size > math.prod(constraints.mesh.values())
    if pipelined and not {"split", "layers_per_stage", "edge_layers"} & set(requested):
        own["split"] = file.split_points
    return own


def _explanation(compilation: Compilation, pattern: str, constraints: PlanConstraints | None) -> dict[str, Any]:
    """Explain the decision of that name, and every module and value that the pattern matches: as text, and decisions as data.

    ``constraints``: what the plan was searched for; None where it was given.
    """
    plan, sharded, priced = compilation.plan, compilation.sharded, compilation.estimate is not None
    decisions = DecisionExplainer(Alternatives(compilation.program, plan, compilation.cluster, constraints))
    shard_plan = None if constraints is None else constraints.shard_plan
    tensors = ShardingExplainer(compilation, shard_plan) if plan.sharding.degrees else None
    lines = decisions.named(pattern) if priced else []

    def more(name: str) -> list[str]:
        return [*(decisions.lines(name) if priced else ()), *(tensors.lines(name) if tensors else ())]

    lines = explain(sharded.local, plan, compilation.stages, pattern, more, lines)
    return {"explain": lines, "decisions": decisions.to_json()}


def _step_lines(steps: Mapping[str, float], cache: CaptureCache) -> list[str]:
    """The seconds of each step, in their order; those under a hundredth of all together, in one line."""
    total = math.fsum(steps.values())
    rows = [(name, seconds) for name, seconds in steps.items() if seconds >= total / 100]
    rows.append((f"{len(steps) - len(rows)} others", total - math.fsum(seconds for _, seconds in rows)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}} {seconds:6.2f} s {seconds / total:5.0%}" for name, seconds in rows]
    lines = [f" {'' if place else 'Steps':10} {line}" for place, line in enumerate(lines)]
    if cache.hit:
        lines.append(" Capture    reused from an earlier run (--no-cache traces the model again)")
    elif cache.why_not is not None:
        lines.append(f" Capture    not cached: {cache.why_not}")
    return lines


def _write(
    compilation: Compilation, report: dict[str, Any], file: ModelFile, folder: Path, options: argparse.Namespace
) -> str:
    """Write the program, with weights where they are asked for or small; returns the outcome, in words."""
    reference = file.reference or os.path.relpath(file.path.resolve(), folder.resolve())
    with progress("printing the stages"):
        parts = api.printed(compilation, report, reference, optimizer_file(file.path, file.reference))
        more = {} if options.again is None else options.again.files
        parts = replace(parts, files={**parts.files, REQUEST: _request_text(options, file, folder), **more})
    requested = options.weights if options.weights is not None else options.run or None
    size = sum(info.whole_numel * info.dtype.itemsize for info in parts.program.whole_state())
    state, said = None, "none; train.py takes a file of them with --weights"
    if requested is None and size > SMALL_BYTES:
        said += (
            f". The initial ones, {bytes_text(size)}, are more than compile writes by default; --weights writes them"
        )
    elif requested is not False:
        try:
            with progress("building the initial weights"):
                state = initial_weights(file)
            said = f"initial values, {bytes_text(size)}, in {folder / 'weights'}"
        except GraphparError as error:
            if requested:
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
