"""``graphpar resume``: the program of a training for fewer or more devices, which goes on from its checkpoint.

OUT, what it was compiled with ──the plans that its search kept, else a search──► OUT-6dev ──its train.py, --checkpoint──► training

The global batch, the dtypes and what else decides a number stay as they were, and so do the seed and the position in the data, which are
in the checkpoint. Edits of ``train.py`` are taken along.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from graphpar.cli import compile_command, run_command
from graphpar.cli.output import Result, print_wrapped, program_folder, stdout_console
from graphpar.cli.plan_file import read_plan, read_program
from graphpar.codegen.package import import_stage
from graphpar.codegen.saving import edited_files
from graphpar.cost_models.kept_plans import KEPT_PLANS, Change, KeptPlans, what_if
from graphpar.errors import GraphparError, NothingFits
from graphpar.frontend.file_dependencies import sources
from graphpar.frontend.modelfile import find_model_file
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.report.difference import Side, difference, difference_lines
from graphpar.runtime.checkpoints.checkpoint import check_fits
from graphpar.runtime.checkpoints.folders import is_in, read_record
from graphpar.runtime.checkpoints.snapshots import RUN
from graphpar.runtime.launching.elastic import ORIGIN, is_resumed, origin_of, ranks_of, resumed_folder
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import TRAIN_GENERATE
from graphpar.runtime.options import Decisions, options_of
from graphpar.runtime.plan_record import kept_report, read_object
from graphpar.text import listed, plural

CARRIED = ("train.py", "optimizer.py")
"""Emitted files that depend on no plan: a resumed program has them as they were edited."""
LAUNCHERS = ("launch.sh", "launch.sbatch", "launch.yaml")
KEPT_IS_GOOD = 1.25
"""A kept plan is taken where its devices do at least 1/1.25 of the work of those before; else all plans are searched."""
_NUMBERS = (
    "global_batch", "dtype", "param_dtype", "output_dtype", "keep_fp32", "fp8", "fp8_recipe", "seq", "reduce_dtype", "dp_mean", "dropout",
    "allow_batch_coupling",
)  # fmt: skip
"""The decisions that numbers depend on, which are those of before."""
_LAYOUT = (
    "mesh", "schedule", "table", "microbatch_size", "zero", "zero1_by", "reshard", "units", "prefetch", "prefetch_distance", "recompute",
    "overlap_tp", "sp", "loss_parallel", "split", "layers_per_stage", "edge_layers",
)  # fmt: skip
"""The options that numbers do not depend on, and that another number of devices may exclude."""


@dataclass(frozen=True)
class _Before:
    """The program whose training goes on: its folder, plan and report, what it was compiled with, and where its model is."""

    folder: Path
    program: Manifest
    plan: Plan
    report: Mapping[str, Any] | None
    request: Mapping[str, Any]
    model: str


def run(options: argparse.Namespace) -> Result:
    """Write the program of ``options.out`` for other devices, and train with it from a checkpoint if one is given."""
    before = _before(options.out)
    weights = before.folder / "weights"
    given = ["--weights", os.path.relpath(weights)] if weights.is_dir() else []  # for a training that is yet to begin
    if options.checkpoint is not None:  # without one it would begin anew
        if (options.checkpoint / RUN).is_file() and not is_in(options.checkpoint):
            raise GraphparError(
                f"{options.checkpoint} has no checkpoint yet, only snapshots in the memory of nodes: leave --checkpoint out, and start the "
                "new program as the one before, with --snapshot-every, which takes up the newest."
            )
        stages = [import_stage(before.folder, stage.index) for stage in before.program.stages]
        given, steps = _begun_with(check_fits(options.checkpoint, stages, before.program))
        options.steps = options.steps or steps
    cluster = _cluster(before.plan, options)
    devices = options.devices if cluster is None else cluster.size
    new = Path(options.new) if options.new else resumed_folder(before.folder, devices)
    if new.resolve() == before.folder.resolve():
        raise GraphparError(f"{new} is the program itself; name another folder with -o.")
    origin, carried = origin_of(before.folder), _carried(before, options.force)
    now = sources(before.model)
    reused = (
        options.cluster is None
        and _request(new).get("sources", now) == now
        and (is_resumed(new, before.folder, devices) or _is_before(new, before, devices, carried))
    )
    if not reused:
        if (new / "plan.json").is_file() and not (new / ORIGIN).is_file():
            raise GraphparError(f"{new} holds a program that resume did not write; name another folder with -o.")
        files = {name: (before.folder / name).read_text(encoding="utf-8") for name in carried}
        _compiled(before, cluster, devices, new, {"origin": origin, "devices": devices, "carried": carried}, files)
        options.written.append(str(new))
    why = _origin(new).get("why", "")
    after = _side(new)
    data = {
        "out": str(new),
        "from": str(before.folder),
        "devices": after.plan.mesh.size,
        "given": devices,
        "reused": reused,
        "why": why,
        "warnings": list(_warnings(before.plan, after.plan)),
        "difference": difference(Side(str(before.folder), before.plan, before.report), after),
        "command": _command(new, after.plan, options, given),
    }
    starts = options.checkpoint is not None and not options.no_run
    if not starts:
        return Result(data, lambda console: _show(data, console))
    if not options.json:
        _show(data, stdout_console())
    there = options.checkpoint.resolve()
    ran = data["run"] = run_command.launch(new, options.steps, math.inf, checkpoint=there, arguments=given)
    return Result(data, lambda console: run_command.show(ran, console))


def _begun_with(checkpoint: Path) -> tuple[list[str], int | None]:
    """Return the options with which the training of a checkpoint was started, such as ``--data``, and its steps; paths are as they were
    typed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--checkpoint", "--json"):  # given anew
        parser.add_argument(name)
    parser.add_argument("--steps", type=int)
    known, rest = parser.parse_known_args(read_record(checkpoint)["data"].get("arguments", []))
    return rest, known.steps


def _before(out: str) -> _Before:
    folder = program_folder(out)
    program, written = read_program(folder)
    plan, report = read_plan(folder / "plan.json", written), kept_report(folder / "plan.json", written)
    if plan.mode != "train":
        raise GraphparError(f"{folder} is for {plan.mode}; only training goes on. Compile the model for the devices.")
    if not program.model_file:
        raise GraphparError(
            f"{folder} names no model file, so it can't be planned again: write it with graphpar compile, or give "
            "graphpar.partition(..., model_file=...)."
        )
    return _Before(folder, program, plan, report, _request(folder), str(find_model_file(folder, program.model_file)))


def _request(folder: Path) -> dict[str, Any]:
    """Return what was requested of ``compile``; nothing where the folder has no program of it."""
    file = folder / compile_command.REQUEST
    return read_object(file) if file.is_file() else {}


def _cluster(plan: Plan, options: argparse.Namespace) -> Cluster | None:
    """Return the devices to plan for; None where only their number is known."""
    if options.cluster is not None:
        found = Cluster.parse(options.cluster)
        if options.devices not in (None, found.size):
            raise GraphparError(
                f"--devices is {options.devices}, but the cluster {found} has {found.size}; leave one of them out."
            )
        return found
    if options.devices is None:
        raise GraphparError("Give how many devices there are now with --devices N, or which with --cluster.")
    if plan.cluster is None:
        return None
    if plan.cluster.groups:
        raise GraphparError(
            f"The plan is for {plan.cluster}, of several kinds of devices; say which there are now with --cluster."
        )
    return Change(devices=options.devices).on(plan.cluster)


def _carried(before: _Before, force: bool) -> list[str]:
    """Return the files that the new program takes along.

    Raises:
        GraphparError: others that depend on the plan were edited, or the model, and ``force`` is not set.
    """
    edited = edited_files(before.folder)
    lost = [
        name
        for name in edited.changed
        if name not in CARRIED and name not in LAUNCHERS and not name.startswith("weights/")
    ]
    now = sources(before.model)
    known: Mapping[str, str] = before.request.get("sources", {})
    lost += [str(Path(before.model).parent / name) for name, digest in known.items() if now.get(name) != digest]
    if lost and not force:
        raise GraphparError(
            f"{listed(lost, 8)} {'was' if len(lost) == 1 else 'were'} edited since {before.folder} was compiled, so the new program "
            "would be another one. Undo that; or with --force leave edits of emitted files out, and take the model with its changes."
        )
    own = {name for name in edited.changed if name in CARRIED}
    own |= {name for name in edited.added if name.endswith(".py") and "/" not in name}
    taken = (name for name in _origin(before.folder).get("carried", ()) if (before.folder / name).is_file())
    return sorted(own.union(taken))


def _origin(folder: Path) -> dict[str, Any]:
    """Return what a resumed program says of where it is from; nothing of others."""
    return read_object(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}


def _is_before(new: Path, before: _Before, devices: int, carried: Sequence[str]) -> bool:
    """Whether ``new`` is the program that ``before`` goes on with, as it was, for so many devices, with the same files of the user."""
    if (
        not (new / "plan.json").is_file()
        or _origin(before.folder).get("origin") != origin_of(new)
        or ranks_of(new) != devices
    ):
        return False
    return all(
        (new / name).is_file() and (new / name).read_bytes() == (before.folder / name).read_bytes() for name in carried
    )


# ---- planning --------------------------------------------------------------------------------------------------------


def _compiled(
    before: _Before,
    cluster: Cluster | None,
    devices: int,
    new: Path,
    origin: Mapping[str, Any],
    files: Mapping[str, str],
) -> None:
    """Write the program for as many of the devices as can be used, with ``files``, and ``origin``, to which it adds why these are not
    all."""
    plan, reasons, fits = before.plan, list[str](), True
    usual = options_of(Decisions)
    numbers = {name: value for name in _NUMBERS if (value := getattr(plan, name)) != usual[name].usual}
    numbers |= {
        "global_batch": plan.global_batch,
        "dtype": plan.dtype,
        "param_dtype": plan.param_dtype,
        "mode": plan.mode if before.program.generates is None else TRAIN_GENERATE,
    }
    numbers |= {"pure": None, "eval": before.program.evaluates_apart}
    for used in range(devices, max(1, devices // 2) - 1, -1):
        on = cluster
        if used < devices and cluster is not None:
            try:
                on = Change(devices=used).on(cluster)
            except GraphparError:
                continue
        for layout in _layouts(before, on, used):
            decided = (
                numbers
                | layout
                | {"cluster": on, "devices": None if on is not None else used, "out": str(new), "force": False}
            )
            said = dict(origin) | {"why": reasons[0] if used < devices else ""}
            more = {**files, ORIGIN: json.dumps(said, indent=1) + "\n"}
            options = compile_command.again(before.request, before.folder, before.model, more, **decided)
            options.written, options.json = [], True
            try:
                compile_command.run(options)
            except GraphparError as error:
                reasons.append(str(error))
                fits &= not isinstance(error, NothingFits)
                continue
            return
        if not fits or (len(reasons) > 3 and len(set(reasons)) == 1):  # fewer devices won't help
            break
    raise GraphparError(f"{before.folder} can't be planned for {plural(devices, 'device')}: {reasons[-1]}")


def _layouts(before: _Before, cluster: Cluster | None, devices: int) -> Iterator[dict[str, Any]]:
    """Yield what to pin of the layout, until a plan is found: a kept plan, what was pinned before, of it the mesh, and nothing."""
    request = before.request.get("options", {})
    kept = None if cluster is None else _best_kept(before, cluster)
    free = dict.fromkeys(_LAYOUT)
    if kept is not None:
        yield free | kept
    asked = {name: request[name] for name in _LAYOUT if name in request}
    mesh = _resized(Mesh.parse(asked.pop("mesh")), devices) if "mesh" in asked else {}
    pinned = {"mesh": ",".join(f"{axis}={degree}" for axis, degree in mesh.items())} if mesh else {}
    for layout in (asked | pinned, pinned) if asked else (pinned,):
        if layout:
            yield free | layout
    yield free


def _resized(mesh: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the degrees that were pinned, with as many replicas as there are now; nothing where they don't divide the devices."""
    axis = next((axis for axis in ("dp_shard", "dp_replicate") if axis in mesh), None)
    others = math.prod(degree for name, degree in mesh.items() if name != axis)
    if devices % others:
        return {}
    return dict(mesh) | ({} if axis is None else {axis: devices // others})


def _best_kept(before: _Before, cluster: Cluster) -> dict[str, Any] | None:
    """Return the options of the best of the plans that the search kept; None where none is as good as the one before."""
    file = before.folder / KEPT_PLANS
    if not file.is_file():
        return None
    try:
        answer = what_if(KeptPlans.from_json(read_object(file)), Change(cluster=cluster), before.plan)
    except GraphparError:
        return None
    best, old = answer.best, answer.before
    if (
        best is None
        or best.estimate.step_time_s * best.mesh.size > KEPT_IS_GOOD * old.estimate.step_time_s * old.mesh.size
    ):
        return None
    found = {"mesh": ",".join(f"{axis}={degree}" for axis, degree in best.mesh.degrees().items()), "zero": best.zero}
    found["microbatch_size"] = best.layout.microbatch_size
    return found | ({"schedule": best.layout.schedule} if best.mesh.pp > 1 else {})


# ---- what is said ----------------------------------------------------------------------------------------------------


def _side(folder: Path) -> Side:
    plan = read_object(folder / "plan.json")
    return Side(str(folder), read_plan(folder / "plan.json", plan), kept_report(folder / "plan.json", plan))


def _warnings(old: Plan, new: Plan) -> Iterator[str]:
    """Yield why losses may be others than without the change, by more than rounding."""
    if old.mesh == new.mesh and old.microbatch_size == new.microbatch_size:
        return
    if old.dropout != options_of(Decisions)["dropout"].usual:
        yield "With --dropout kernel masks of attention depend on the mesh, so losses are not those of the old plan."
    if old.dp_mean:
        yield "With --dp-mean the loss is a mean over replicas, so with other replicas it is another one."
    if old.allow_batch_coupling:
        yield "With --allow-batch-coupling results depend on the rows of a microbatch, so losses are not those of the old plan."


def _command(new: Path, plan: Plan, options: argparse.Namespace, given: Sequence[str]) -> str:
    """Return how training goes on by hand."""
    more = [*([] if options.steps is None else ["--steps", str(options.steps)]), *given]
    place = "CKPT" if options.checkpoint is None else str(options.checkpoint.resolve())
    if plan.cluster is not None and plan.cluster.nodes > 1:
        return "HEAD=NAME " + shlex.join([f"{os.path.relpath(new)}/launch.sh", "--checkpoint", place, *more])
    script = f"{os.path.relpath(new)}/train.py"
    return shlex.join(["torchrun", "--nproc-per-node", str(plan.mesh.size), script, "--checkpoint", place, *more])


def _show(data: Mapping[str, Any], console: Console) -> None:
    lines = difference_lines(data["difference"])
    lines = lines[: next((place for place, line in enumerate(lines) if line.startswith(" Step ")), len(lines))]
    if data["devices"] < data["given"]:
        lines += ["", f" {data['given']} devices can't be used, {data['devices']} are: {data['why']}"]
    lines += [""] + [f" Warning    {text}" for text in data["warnings"]]
    lines += [f" {'Kept' if data['reused'] else 'Wrote':10} {data['out']}"]
    print_wrapped(console, lines)
    console.out(f" Next       {data['command']}", highlight=False)  # whole, to be copied
    console.out(f"            {shlex.join(['graphpar', 'diff', data['from'], data['out']])}", highlight=False)
