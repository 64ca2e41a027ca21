"""``graphpar estimate``: what a step of a given plan takes, and as what formula."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.cli.output import Result, print_wrapped, progress
from graphpar.cli.parser import given_options
from graphpar.cli.plan_file import read_plan, read_record
from graphpar.cli.trace import Clock, asked_precision, export_file
from graphpar.errors import GraphparError
from graphpar.frontend.capture_cache import CaptureCache, captures_folder
from graphpar.frontend.modelfile import ModelFile
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.passes.compilation import compiled
from graphpar.passes.planning.constraints import compiles
from graphpar.passes.planning.explain import PARTS, Formulas, formulas, in_sequence
from graphpar.passes.planning.plan_request import on_one_device, plan_request, planned
from graphpar.passes.planning.planned import Planned
from graphpar.passes.planning.prices import pricing_of
from graphpar.passes.planning.validate_plan import check_alone, validate_plan
from graphpar.report.memory_table import memory_text
from graphpar.report.report import compile_json, render, report_data, with_alone
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import SEQ, Seq
from graphpar.runtime.options import Request, flag_of, options_of
from graphpar.runtime.plan_record import kept_report
from graphpar.text import count_text, indices_text


def run(options: argparse.Namespace) -> Result:
    """Price the plan that ``graphpar estimate`` was given; the result prints the report, and formulas with ``--formula``."""
    clock = Clock()
    asked = _asked(options)
    cluster = asked.cluster
    with progress("tracing the model"):
        folder = None if options.no_cache else captures_folder()
        cache = CaptureCache(options.model, folder, asked.precision, asked.mode, seq=asked.seq)
        program = export_file(cache.file, asked.mode, asked.precision, cache=cache, seq=asked.seq)
    clock.phase("capture")
    with progress("pricing the plan"):
        plan = asked.plan(program)
        compilation = compiled(program, plan, cluster)
        if compilation.unpriced is not None:
            raise GraphparError(compilation.unpriced)
        report = report_data(compilation, cluster)
        if plan.mesh.size > 1:
            report = with_alone(report, on_one_device(program, plan, compilation.cluster).to_json())
    clock.phase("plan")
    if asked.record is not None:
        report["warnings"] += _grown(*asked.record, report["model"]["parameters"])
    data = compile_json(report, plan, clock.seconds, None)
    del data["search"]
    if options.formula:
        with progress("tracing the model at other lengths"):
            data["formula"] = formula_data(
                cache.file.imported(), program, plan, formulas(*pricing_of(program, plan, compilation.cluster))
            )

    if options.memory and compilation.estimate is not None:
        table = memory_text(compilation.estimate)
        return Result(data, lambda console: print_wrapped(console, ["", *table]))

    def show(console: Console) -> None:
        render(report, console)
        if options.formula:
            print_wrapped(console, ["", *formula_text(data["formula"])])

    return Result(data, show)


@dataclass(frozen=True)
class _Asked:
    """What is to be priced: how the model is traced, the hardware, and how the plan is made of the program.

    ``record``: the plan's file and content, where it was read.
    """

    precision: Precision
    mode: str | None
    seq: Seq | None
    cluster: Cluster | None
    plan: Callable[[Program], Planned]
    record: tuple[Path, dict[str, Any]] | None = None


def _asked(options: argparse.Namespace) -> _Asked:
    cluster = Cluster.parse(options.cluster).with_headroom(options.memory_headroom) if options.cluster else None
    requested = given_options(options)
    for name in ("cluster", "memory_headroom"):
        requested.pop(name, None)
    if options.plan is None:
        if cluster is not None and "mesh" in requested:
            requested["mesh"] = Mesh.pinned(Mesh.parse(requested["mesh"]), cluster.size)
        pins = plan_request(**requested)  # without hardware nothing is searched
        precision = asked_precision(options, options.cluster)
        seq = None if options.seq is None else SEQ.check("seq", options.seq)

        def plan_of(program: Program) -> Planned:
            there = replace(pins, cluster=cluster)
            return planned(program, replace(pins, compile=compiles(program, there, pins.schedule or "GPipe")))

        return _Asked(precision, None, seq, cluster, plan_of)
    for name in requested:
        raise GraphparError(
            f"{flag_of(name, options_of(Request)[name])} is decided by the plan {options.plan}; leave one of them out."
        )
    record = read_record(options.plan)
    given = read_plan(*record)
    check_alone(given)
    plan = functools.partial(validate_plan, given=given)
    if cluster is None and given.cluster is not None and options.memory_headroom is not None:
        cluster = given.cluster.with_headroom(options.memory_headroom)
    return _Asked(given.precision, given.mode, given.seq, cluster or given.cluster, plan, record)


def _grown(path: Path, record: dict[str, Any], parameters: int) -> list[str]:
    """Warn of a plan that was made for the model at another size, which is legal."""
    with contextlib.suppress(RuntimeProgramError):  # the plan is whole without its report
        record = kept_report(path, record) or record
    before = record.get("model")
    count = before.get("parameters") if isinstance(before, dict) else None
    if not isinstance(count, int) or count == parameters:
        return []
    return [f"The plan was made for a model of {count_text(count)} parameters; this one has {count_text(parameters)}."]


# ---- formulas --------------------------------------------------------------------------------------------------


def formula_data(file: ModelFile, program: Program, plan: Plan, in_batch: Sequence[Formulas]) -> dict[str, Any]:
    """Write the formulas of stages as text, in s too where that is possible, with notes on them."""
    stages: list[dict[str, str]]
    variables = {"b": "rows of a microbatch"}
    try:
        length, in_both = _in_sequence(file, program, plan, in_batch)
    except GraphparError as error:
        stages = [{name: str(value) for name, value in stage.items()} for stage in in_batch]
        return {"variables": variables, "stages": stages, "notes": [f"Not in the length of the sequence: {error}"]}
    stages = [{name: str(both.get(name, stage[name])) for name in stage} for stage, both in zip(in_batch, in_both)]
    left = sorted({name for stage, both in zip(in_batch, in_both) for name in stage if name not in both})
    notes = (
        [f"{', '.join(left)}: at s = {length}, because no polynomial of degree 2 in s fits the other lengths."]
        if left
        else []
    )
    return {
        "variables": variables | {"s": f"the length of the sequence, {length} in the example"},
        "stages": stages,
        "notes": notes,
    }


def _in_sequence(
    file: ModelFile, program: Program, plan: Plan, in_batch: Sequence[Formulas]
) -> tuple[int, Sequence[Formulas]]:
    """The example's sequence length, and formulas from traces of the example at parts of it.

    Raises:
        GraphparError: the example has no sequence that can be shortened, or the model changes with it.
    """
    if program.lengths is not None:
        raise GraphparError("the program is for a range of lengths.")
    length = _length(file, program)
    samples: dict[int, Sequence[Formulas]] = {}
    for part in PARTS:
        short = int(length * part)
        samples[short] = in_batch if short == length else _at(file, program, plan, length, short)
    found = in_sequence(samples)
    if found is None:
        raise GraphparError("the model runs different operators at other lengths.")
    return length, found


def _length(file: ModelFile, program: Program) -> int:
    """The size of the first dim besides the batch of the first input that has one."""
    for entry in program.inputs:
        if entry.role == "input" and entry.batch_dim is not None and len(entry.shape) > 1:
            length = int(entry.shape[1 if entry.batch_dim == 0 else 0])
            if length % PARTS[0].denominator or length < 2 * PARTS[0].denominator:
                raise GraphparError(f"{entry.name} has {length} positions, which can't be divided into quarters.")
            return length
    raise GraphparError("no input has a dim other than the batch.")


def _at(file: ModelFile, program: Program, plan: Plan, length: int, short: int) -> Sequence[Formulas]:
    """The formulas of the plan for the model traced on an example whose sequence is ``short``."""
    leaves = [leaf for leaf in tree_leaves((file.args, file.kwargs, file.targets)) if isinstance(leaf, Tensor)]
    dims = [entry.batch_dim for entry in program.inputs if entry.role in ("input", "target")]
    if len(leaves) != len(dims):
        raise GraphparError("the model does not take all of the example's tensors.")
    batch_dims = {id(leaf): dim for leaf, dim in zip(leaves, dims)}

    def shortened(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = batch_dims[id(leaf)]
        return leaf[
            tuple(slice(short if size == length and dim != own else None) for dim, size in enumerate(leaf.shape))
        ]

    args, kwargs, targets = tree_map(shortened, (file.args, file.kwargs, file.targets))
    again = export_file(replace(file, args=args, kwargs=kwargs, targets=targets), plan.mode, plan.precision)
    return formulas(
        *pricing_of(again, validate_plan(again, plan), plan.cluster or Cluster.of_this_machine(plan.mesh.size))
    )


def formula_text(data: dict[str, Any]) -> list[str]:
    """Print the formulas of each stage, once for all stages that have the same."""
    lines = [
        " A microbatch, forward and backward: "
        + "; ".join(f"{name} = {text}" for name, text in data["variables"].items())
    ]
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, stage in enumerate(data["stages"]):
        groups.setdefault(tuple(stage.items()), []).append(index)
    for formulas_of, stages in groups.items():
        lines += ["", f" Stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}"]
        lines += [f"   {name:<14} {text}" for name, text in formulas_of]
    return [*lines, *(f"\n {note}" for note in data["notes"])]
