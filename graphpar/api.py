"""The Python API: export, plan, estimate, partition, verify, check.

program = export(model, args, kwargs, loss_fn, targets)     trace and normalize
plan    = plan(program, cluster, mesh=..., schedule=...)    decide
seconds = estimate(program, plan).step_time_s               predict
parts   = partition(program, plan)                          the emitted package, in memory
parts.save("out/");  verify(parts);  check(parts)
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn

from graphpar.codegen.optimizer_file import optimizer_file
from graphpar.codegen.package import emit_package
from graphpar.codegen.printer import program_text
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.kept_plans import Answer, Change
from graphpar.cost_models.kept_plans import what_if as priced_again
from graphpar.errors import GraphparError
from graphpar.frontend.build import ModelLike
from graphpar.frontend.capture import capture
from graphpar.frontend.capture_cache import Capture
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.precision import AUTO, Precision
from graphpar.ir.program import ModelSource, Program
from graphpar.parts import Parts
from graphpar.passes.compilation import Compilation, compiled
from graphpar.passes.normalize.buffer_uses import written_buffers_of
from graphpar.passes.normalize.windows import check_rows
from graphpar.passes.planning.plan_request import plan_request, planned
from graphpar.passes.planning.planned import Planned
from graphpar.passes.planning.prices import estimate_plan
from graphpar.passes.planning.validate_plan import validate_plan
from graphpar.passes.step import Step
from graphpar.passes.table import PASSES, STEPS, Pass, PassList, check_skipped, run_passes
from graphpar.report.notebook import estimate_frame, plan_frame
from graphpar.report.report import plan_text, report_data, report_files
from graphpar.runtime.option_kinds import GENERATE, INFER, SCRIPTS, SEQ, TRAIN, TRAIN_GENERATE, Seq
from graphpar.runtime.options import Request, options_of
from graphpar.text import as_page, as_text, listed

P = ParamSpec("P")

as_text.register(Plan, plan_text)
as_text.register(Program, program_text)
as_page.register(Plan, plan_frame)
as_page.register(Estimate, estimate_frame)


def export(
    model: ModelLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    *,
    mode: str | None = None,
    evaluates: bool = False,
    dtype: str | None = None,
    pure: bool | None = None,
    param_dtype: str | None = None,
    output_dtype: str | None = None,
    keep_fp32: Sequence[str] | str | None = None,
    fp8: Sequence[str] | str | None = None,
    fp8_recipe: str | None = None,
    seq: Seq | None = None,
    passes: Sequence[Pass] | None = None,
    skip: Sequence[str] = (),
    after_pass: Callable[[Step, Program], None] | None = None,
) -> Program:
    """Trace a single-device model into a :class:`Program`.

    Args:
        model: an ``nn.Module``, or a function without arguments that returns one (built under fake tensors: no memory).
        args, kwargs: example inputs of the global batch (any size); they show shapes and dtypes.
        loss_fn: ``loss_fn(output, *targets) -> scalar``. Without it the model's own scalar output or ``loss`` is used;
            with neither, the program is for inference.
        targets: example targets for ``loss_fn``.
        batch_dims: ``{input name: dim or None}`` for inputs whose batch is not on dim 0.
        mode: "train", "infer", "generate", or "train,generate": a program for training that generates between steps. It sets the modules'
            mode by the model's ``train`` and ``eval``. By default "train" where there is a loss; a model without one stays as it is built.
        evaluates: also trace in evaluation mode, so that ``pipeline.eval`` computes what the model does then. Without it ``eval`` is
            refused for all models but those of torch's own modules.
        dtype: "fp32", "bf16", "fp16" or "auto": in which the model computes. With 16 bits, parameters, gradients and optimizer state
            stay in fp32, and so do losses; for inference parameters are stored in 16 bits, too. In fp32, the default, the model
            computes in the dtypes that it was built in. "auto" is bf16 where the model trains, is built in fp32 and can be traced so.
        pure: parameters are stored and stepped in ``dtype``.
        param_dtype: the dtype in which parameters are stored and updated.
        output_dtype: the dtype of the model's outputs, with a ``dtype`` of 16 bits: what ``loss_fn`` takes, fp32 by default, and what
            ``pipeline.infer`` returns. A model that returns its own loss returns it in fp32, and this is refused.
        keep_fp32: patterns of modules that compute in fp32 with a ``dtype`` of 16 bits, such as ``"**.norm"``: their parameters are
            stored in fp32, what enters them is cast to it, and what they return to ``dtype``.
        fp8: patterns of modules whose ``nn.Linear`` layers multiply in 8 bits, with ``dtype="bf16"``: ``"**"`` for all but the head,
            routers and adapters, which take part by their own paths.
        fp8_recipe: how they do: ``"rowwise"`` (the default), a scale of each row, or ``"mxfp8"``, a scale of each 32
            values, and gradients of weights in 8 bits, too.
        seq: the shortest and the longest sequence that the program takes, as ``"128..4096"``; it is traced at the longest. Every dim of
            the example that is as long as its sequence varies. Of a model that is another one at other lengths a list,
            ``"128,512,4096"``: each is traced. By default a program takes the example's length alone.
        passes: ``graphpar.PASSES``, or these with your passes: ``PASSES.insert_after("simplify", my_pass)``.
        skip: names of optional passes to leave out.
        after_pass: called with each step, ``capture`` first, and the program after it.

    Raises:
        GraphparError: the model can't be traced, or a trace would lose part of its meaning.
    """
    for name, value in (("args", args), ("targets", targets)):
        if isinstance(value, Tensor):
            raise GraphparError(f"{name} is a tensor; it must be a tuple: {name}=(tensor,).")
    row_list = PASSES if passes is None else PassList.of(passes)
    check_skipped(row_list, skip)
    precision = Precision.of(dtype, pure, param_dtype, output_dtype, keep_fp32, fp8, fp8_recipe)
    lengths = None if seq is None else SEQ.check("seq", seq)
    source = ModelSource(
        model, tuple(args), dict(kwargs or {}), loss_fn, tuple(targets), precision, mode, evaluates, lengths
    )
    return export_source(source, batch_dims, row_list, skip, after_pass)


def export_source(
    source: ModelSource,
    batch_dims: Mapping[str, int | None] | None,
    row_list: PassList,
    skip: Sequence[str] = (),
    after_pass: Callable[[Step, Program], None] | None = None,
    trace: Capture = capture,
) -> Program:
    """Do what :func:`export` says, where ``trace`` captures the model."""
    if source.mode == TRAIN_GENERATE:
        program = export_source(replace(source, mode=TRAIN), batch_dims, row_list, skip, after_pass, trace)
        if program.mode != TRAIN:
            raise GraphparError(
                f"mode {TRAIN_GENERATE!r} trains between generations, but the model returns no loss; give loss_fn."
            )
        assert program.source is not None
        trained = replace(program.source, mode=GENERATE, evaluates=False, seq=None)

        @functools.cache
        def generating(sequences: int) -> Program:
            asked = replace(trained, sequences=sequences)
            return _exported(asked, batch_dims, row_list, skip, None, trace)

        program.generating = generating
        return program
    try:
        return _exported(source, batch_dims, row_list, skip, after_pass, trace)
    except GraphparError as error:
        if source.precision.dtype != AUTO:
            raise
        plain = replace(source, precision=Precision())
        program = _exported(plain, batch_dims, row_list, skip, after_pass, trace)
        return program.warn(
            f"The model computes in fp32, since in bf16 it can't be traced: {error} If fp32 is intended, set dtype 'fp32' (--dtype "
            "fp32)."
        )


def _exported(
    source: ModelSource,
    batch_dims: Mapping[str, int | None] | None,
    row_list: PassList,
    skip: Sequence[str],
    after_pass: Callable[[Step, Program], None] | None,
    trace: Capture,
) -> Program:
    raw = trace(source, batch_dims)
    if raw.lengths is not None and raw.source is not None:
        raw.source = raw.source.at_length(raw.lengths, raw.lengths.most)
    if after_pass is not None:
        after_pass(STEPS[0], raw)
    program, _ = run_passes(raw, row_list, skip=skip, after=after_pass)
    if raw.mode == GENERATE and raw.source is not None and raw.inputs[0].shape[0] > 1:
        check_rows(run_passes(trace(replace(raw.source, mode=INFER), None), row_list, skip=skip)[0])
    if raw.retrace is not None:
        retrace = raw.retrace

        @functools.cache  # a search asks for a size several times, and each is two traces
        def at_size(size: int, whole: int | None) -> Program:
            again = run_passes(retrace(size, whole), row_list, skip=skip)[0]
            again.source, again.retrace = raw.source, at_size
            again.lengths, again.at_length = raw.lengths, program.at_length
            return _retraced_with(again)

        program.retrace = at_size
        _retraced_with(program)
    if raw.lengths is None:
        return program
    assert raw.source is not None
    lengths, longest = raw.lengths, replace(raw.source, evaluates=False)

    @functools.cache
    def at_length(length: int, blocks: bool = True) -> Program:
        flat = () if blocks else ("outline", "share_helpers")
        return _exported(longest.at_length(lengths, length), batch_dims, row_list, (*skip, *flat), None, capture)

    program.at_length = at_length
    return program


def _retraced_with(program: Program) -> Program:
    """Trace what the model is in evaluation, if it is another program, at each size with ``program``."""
    if program.evaluated is not None:
        retrace = program.retrace
        assert retrace is not None
        program.evaluated.retrace = lambda size, whole: _evaluated_at(retrace(size, whole))
    return program


def _evaluated_at(program: Program) -> Program:
    if program.evaluated is None:
        raise GraphparError(f"at other numbers of rows {program.no_eval}")
    return program.evaluated


def _with_options(request: Callable[P, Request]) -> Callable[Concatenate[Program, P], Planned]:
    """Return ``plan`` with the signature and the help of the options of a request."""

    def plan(program: Program, *arguments: Any, **options: Any) -> Planned:
        """Decide how to run ``program`` on ``cluster``. What the arguments leave open is searched."""
        _take(program, Program, "plan")
        return planned(program, plan_request(*arguments, **options))

    made: Any = plan
    signature = inspect.signature(plan)
    parameters = [signature.parameters["program"], *inspect.signature(Request).parameters.values()]
    made.__signature__ = signature.replace(parameters=parameters)
    made.__qualname__ = "plan"
    made.__doc__ = "\n".join([str(plan.__doc__), "", "Args:", *_described_options(), "", *_RAISES])
    return made  # type: ignore[no-any-return]


_RAISES = (
    "Raises:",
    "    GraphparError: an argument is wrong (found before any search), or the plan is not possible for this program.",
)


def _described_options() -> Iterator[str]:
    for name, known in options_of(Request).items():
        text = known.about or f"{known.help}."
        yield from textwrap.wrap(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)


plan = _with_options(Request)


def _take(value: object, kind: type, function: str, position: str = "first") -> None:
    """Raise where a function is not given the result of the function that comes before it."""
    if isinstance(value, kind):
        return
    given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    made_by = (
        "graphpar.export(model, args, loss_fn=..., targets=...)" if kind is Program else "graphpar.plan(program, ...)"
    )
    what = " (a model)" if isinstance(value, nn.Module) else ""
    raise GraphparError(
        f"The {position} argument of {function} is {given}{what}; it must be a {kind.__name__}, which {made_by} returns. Call that first."
    )


def _take_parts(value: object, function: str) -> None:
    if not isinstance(value, Parts | str | Path):
        raise GraphparError(
            f"The first argument of {function} is a {type(value).__name__}; it must be Parts, which graphpar.partition(program, plan) "
            "returns, or the folder of an emitted program."
        )


def partition(
    program: Program, plan: Plan, *, model_file: str | None = None, optimizer: str | Path | None = None
) -> Parts:
    """Split ``program`` as ``plan`` says and print the stage modules.

    Args:
        model_file: the model file that ``plan.json`` shall name: a path relative to the package, or a dotted module name.
        optimizer: a Python file with the functions ``optimizer`` and ``lr_schedule`` that the program shall use, such as the model file;
            without it the program trains with AdamW, whatever ``model_file`` has.

    Raises:
        GraphparError: the plan is for another program, or contradicts itself; or the file of ``optimizer`` has neither function.
    """
    _take(program, Program, "partition")
    _take(plan, Plan, "partition", "second")
    compilation = compiled(program, validate_plan(program, plan))
    text = None if optimizer is None else _optimizer(program, Path(optimizer))
    return printed(compilation, report_data(compilation), model_file, text)


def _optimizer(program: Program, path: Path) -> str:
    """The text of ``optimizer.py``, of the functions of a file."""
    if program.mode != "train":
        raise GraphparError(
            f"The program is for inference, so it has no use for the optimizer of {path}; leave it out."
        )
    if not path.is_file():
        raise GraphparError(f"There is no file {path}, which should define optimizer or lr_schedule.")
    text = optimizer_file(path)
    if text is None:
        raise GraphparError(f"{path} defines neither optimizer nor lr_schedule.")
    return text


def printed(
    compilation: Compilation, report: dict[str, Any], model_file: str | None = None, optimizer: str | None = None
) -> Parts:
    """Print the stage modules of ``compilation``, with the files of its ``report`` and the text of its ``optimizer.py``."""
    plan, (local, stages) = compilation.plan, compilation.emitted
    package = emit_package(local, plan, stages, model_file, optimizer, compilation.recomputed)
    files = package.files
    if (other := compilation.generating) is not None:
        below = model_file if model_file is None or "/" not in model_file else f"../{model_file}"
        generates = emit_package(other.emitted[0], other.plan, other.emitted[1], below)
        compilation = replace(compilation, generating=replace(other, package=generates))
        apart = ("launch.", SCRIPTS[GENERATE])  # what runs it by itself
        own = {name: text for name, text in generates.files.items() if not name.startswith(apart)}
        files = files | {f"{GENERATE}/{name}": text for name, text in own.items()}
    done = replace(compilation, package=package)
    if local.no_eval is not None and local.source is not None and local.source.evaluates:
        report["warnings"].append(f"{local.no_eval[0].upper()}{local.no_eval[1:]}.")
    written = [uses.name for uses in written_buffers_of(local).uses] if local.mode == TRAIN else []
    if lost := sorted(set(written) & local.constants.keys()):
        report["warnings"].append(
            f"The model writes {listed(lost, 4)}, which persistent=False leaves out of checkpoints: training that resumes has the initial "
            "value again."
        )
    if optimizer is not None and local.mode == "train":
        from graphpar.verification.tried_optimizer import tried_optimizer

        report["warnings"] += tried_optimizer(Parts(done, files, report, model_file))
    return Parts(done, files | report_files(report, plan), report, model_file)


def what_if(
    plan: Plan,
    *,
    cluster: Cluster | str | Path | None = None,
    network: float | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    microbatch_size: int | None = None,
    memory_headroom: float | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Answer:
    """Price the best plans that a search kept at other conditions, without searching again.

    Placements of tensors and the boundaries of stages are as they were found; microbatches, replicas and recomputation follow the change.

    Args:
        plan: of :func:`plan`, where something was searched.
        cluster: other hardware, of the same kind of device.
        network: times the bandwidth between nodes, or in the node where there is one.
        devices: how many there are, of the same cluster otherwise.
        global_batch: rows of a step.
        microbatch_size: rows of a microbatch; by default the plan's, half of it, or twice.
        memory_headroom: the share of a device's memory that plans leave free.
        mesh: degrees that plans must have.

    Returns:
        The plan before, the same plan then, and the best then, each with its estimate.

    Raises:
        GraphparError: nothing was searched for ``plan``, or no kept plan can have the change.
    """
    found = plan.found if isinstance(plan, Planned) else None
    if found is None or found.kept is None:
        raise GraphparError(
            "no search kept other plans than this one: give graphpar.plan a cluster, and leave something open."
        )
    hardware = Cluster.parse(cluster) if isinstance(cluster, str | Path) else cluster
    change = Change(hardware, network, devices, global_batch, microbatch_size, memory_headroom, dict(mesh or {}))
    return priced_again(found.kept, change, plan)


def estimate(
    program: Program, plan: Plan, cluster: Cluster | str | Path | None = None, execution: Execution | None = None
) -> Estimate:
    """Predict a training step (or a batch of inference) of ``plan``: seconds, communication, memory.

    Args:
        cluster: by default that of the plan, else as many devices of this machine's kind.
        execution: how the program is run, where it is not as graphpar emits it: fused kernels, optimizer, overlap.

    Raises:
        GraphparError: the plan is for another program, contradicts itself, or is for another number of devices.
    """
    _take(program, Program, "estimate")
    _take(plan, Plan, "estimate", "second")
    named = Cluster.parse(cluster) if isinstance(cluster, str | Path) else cluster
    hardware = (named or plan.cluster or Cluster.of_this_machine(plan.mesh.size)).with_headroom()
    return estimate_plan(program, validate_plan(program, plan), hardware, execution)


def verify(parts: Parts | str | Path, steps: int | None = None, **options: Any) -> Any:
    """Run the emitted program on local processes against the unpartitioned model. See :mod:`graphpar.verification`."""
    from graphpar.verification import verify_parts

    _take_parts(parts, "verify")
    return verify_parts(parts, steps=steps, **options)


def check(parts: Parts | str | Path) -> Any:
    """Check the types of the emitted program in this process, at its world size. See :mod:`graphpar.verification.type_check`."""
    from graphpar.verification.type_check import check_folder

    _take_parts(parts, "check")
    return check_folder(parts.folder if isinstance(parts, Parts) else parts)
