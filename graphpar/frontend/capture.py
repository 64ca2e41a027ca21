"""Trace an ordinary model into a :class:`~graphpar.ir.program.Program`.

    factory ──FakeTensorMode──► model ─┐
    example inputs ──flatten──► leaves ┴─ torch.export ─► training-IR graph ─► Program (get_attr parameters, named inputs)

The batch is traced as a symbol where the model allows it. Where it doesn't, the program is traced at a fixed
batch size, and once more at another one: the dims that differ are those that follow the batch.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphpar.errors import GraphparError, torch_is_quiet
from graphpar.frontend.between_steps import attributes_kept, check_memory, check_same, check_tensors, noted
from graphpar.frontend.branches import Branches, Values, with_rows
from graphpar.frontend.build import Built, build, build_for_real, needed_arguments
from graphpar.frontend.calls import NotRepeatedError
from graphpar.frontend.checkpoint_regions import Regions, plain_regions
from graphpar.frontend.evaluation import always_on, differs, may_differ, with_evaluation
from graphpar.frontend.exported import NeedsValuesError, to_program
from graphpar.frontend.fixed_size import LiteralSizes, mark_batch
from graphpar.frontend.left_out import check_left_out
from graphpar.frontend.precision import LossesInFull, cast_floating, computed_in, in_full
from graphpar.frontend.pretrained import pretrained_of, token_choice, with_adapters
from graphpar.frontend.repeated import Repetitions, repeated, siblings
from graphpar.frontend.repetitions import expand
from graphpar.frontend.signature import (
    Request,
    check_batch,
    lengths_of,
    make_request,
    named_outputs,
    note_scalars,
    of_tokens,
    own_loss,
)
from graphpar.frontend.trace_guards import (
    COLLECTIVE_MODULES,
    DataAsDetached,
    EqualMasks,
    OffMeta,
    WithoutWrites,
    assignments_as_writes,
    caches_kept,
    check_averages,
    check_backward_hooks,
    check_collectives,
    collective,
    custom_backwards_kept,
    masks_as_given,
    modules_stay,
    refuse_collective,
    unusual_apart,
)
from graphpar.frontend.unread import unread_in
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.precision import AUTO, Precision
from graphpar.ir.program import NOT_SYMBOLIC, ModelSource, Program, ancestors, without_evaluation
from graphpar.ir.source import in_loop, user_line
from graphpar.runtime.option_kinds import GENERATE, INFER, MODES, TRAIN
from graphpar.runtime.stages.initialise import other_generators
from graphpar.runtime.torch_versions import least_multiples, lines_kept
from graphpar.text import listed


def capture(source: ModelSource, batch_dims: Mapping[str, int | None] | None = None) -> Program:
    """Trace a model (or what a factory of it returns) on its example inputs; arguments as for :func:`graphpar.export`.

    Raises:
        GraphparError: the model can't be traced, or a trace would lose part of its meaning.
    """
    if source.mode not in (None, *MODES):
        raise GraphparError(f"mode is {source.mode!r}; it must be one of {', '.join(MODES)}.")
    try:
        return _capture(source, build(source.model), batch_dims)
    except NeedsValuesError:
        return _capture(source, build_for_real(source.model), batch_dims)


def _capture(source: ModelSource, built: Built, batch_dims: Mapping[str, int | None] | None) -> Program:
    """Trace what was built of the model of ``source``, in the dtype that is asked for or decided."""
    if source.seq is not None:
        lengths = lengths_of(source, make_request(source, *built, batch_dims or {}))
        program = _capture(source.at_length(lengths, lengths.most), built, batch_dims)
        program.lengths = lengths
        return program
    if source.mode == GENERATE:
        source, batch_dims = of_tokens(source, built[0], batch_dims)
    if source.precision.dtype != AUTO:
        return _captured(source, built, batch_dims or {})
    plain = replace(source, precision=Precision())
    dtypes = {parameter.dtype for parameter in built[0].parameters() if parameter.is_floating_point()}
    if dtypes != {torch.float32} or source.mode in (INFER, GENERATE):
        return _captured(plain, built, batch_dims or {})
    program = _captured(replace(source, precision=replace(source.precision, dtype="bf16")), built, batch_dims or {})
    return program if program.mode == "train" else _captured(plain, built, batch_dims or {})


def _captured(source: ModelSource, built: Built, batch_dims: Mapping[str, int | None]) -> Program:
    request = make_request(source, *built, batch_dims)
    program = _in_right_mode(request)
    check_memory(program, request.model)
    values = Values(request.model, request.recorder, ())
    again = functools.partial(_trace, request)
    check_same(tuple(request.assigned), program, again, values.tensor, lambda: request.assigned)
    trains = any(info.requires_grad for info in program.parameters.values())
    if program.mode == INFER and source.mode is None and trains:
        program = program.warn(_inference_meant(request))
    program.unread = unread_in(request, program, _trace)
    trains_in = TRAIN if program.mode == TRAIN else source.mode
    program.source = replace(source, precision=source.precision.resolved(program.mode), mode=trains_in)
    program = with_adapters(program, request.model)
    program.pretrained = pretrained_of(request.model)
    program.configures = _configures(request.model)
    if source.mode == INFER and (reason := always_on(program.graph)) is not None:
        raise GraphparError(f"{program.name} can't be compiled for inference: {reason}.")
    if program.mode == GENERATE:
        program.generation = token_choice(request.model)
    if program.mode == TRAIN:
        check_backward_hooks(request.model)
        program = program.warn(*_modes(request))
    if program.mode == TRAIN and may_differ(request.model):
        if not source.evaluates:
            return replace(program, no_eval=NOT_COMPARED)
        try:
            return _with_evaluation(request, program)
        except Exception as error:
            why = "" if isinstance(error, GraphparError) else "the model can't be traced in evaluation mode: "
            return without_evaluation(program, f"{why}{_first_line(error)}")
    return program


def _configures(model: nn.Module) -> str:
    """Write a call of the ``configure_optimizers`` of nanoGPT's models and Lightning's, with the arguments that it needs; or nothing."""
    if not callable(method := getattr(model, "configure_optimizers", None)):
        return ""
    given = "".join(f", {name}=..." for name in needed_arguments(method))
    return f"{type(model).__name__}.configure_optimizers(named{given})"


NOT_COMPARED = (
    "the program can't evaluate: the model was traced only in training mode, to save time; compile it with --eval"
)


def _with_evaluation(request: Request, program: Program) -> Program:
    """Trace in evaluation mode, too, and add that program where it differs from ``program`` beyond dropout and BatchNorm.

    Raises:
        GraphparError: a program can't have both.
    """
    literals = None if program.symbolic else LiteralSizes(request.batch)
    evaluating = replace(
        request, module_mode=INFER, still={}, scalars=[], output_names=[], returned=[], assigned=[], literals=literals
    )
    if literals is None:
        exported, regions = _export(evaluating, program.batch, symbolic=True)
        other = to_program(evaluating, exported, regions, symbolic=True, size=program.batch)
    else:
        other = _trace_static(evaluating, program.batch, None, attempts=literals.attempts())
    if (reason := always_on(other.graph, but_dropout=True)) is not None:
        raise GraphparError(reason)
    unread = set(unread_in(evaluating, other, _trace)) if program.unread else ()
    program.unread = tuple(name for name in program.unread if name in unread)
    if always_on(other.graph) is None and not differs(program.graph, other.graph):
        return program
    check_memory(other, request.model)
    values = Values(request.model, request.recorder, ())
    again = functools.partial(_trace, evaluating)
    check_same(tuple(evaluating.assigned), other, again, values.tensor, lambda: evaluating.assigned)
    program = with_evaluation(program, other)
    if program.retrace is not None and other.retrace is not None:
        program.retrace = functools.partial(_retrace_both, program.retrace, other.retrace)
    return program


def _retrace_both(
    trained: Callable[[int, int | None], Program],
    evaluated: Callable[[int, int | None], Program],
    size: int,
    whole: int | None,
) -> Program:
    program = trained(size, whole)
    try:
        return with_evaluation(program, evaluated(size, whole))
    except GraphparError as error:
        return without_evaluation(program, _first_line(error))


def _in_right_mode(request: Request) -> Program:
    """Trace what trains as its ``train()`` leaves it, and what is for inference as it was built, unless a mode was asked for."""
    if request.module_mode is None and (request.loss_fn is not None or not _changes(request.model)):
        request.module_mode = TRAIN
    program = _with_own_loss(request)
    if request.module_mode is None and program.mode == TRAIN:
        request.module_mode = TRAIN
        program = _with_own_loss(request)
    return program


def _changes(model: nn.Module) -> bool:
    """Whether ``model.train()`` changes the mode of a module."""
    before = [module.training for module in model.modules()]
    with attributes_kept(model.modules()):
        model.train()
        return before != [module.training for module in model.modules()]


def _modes(request: Request) -> Iterator[str]:
    """Warn of modules that are in evaluation mode while the model trains, and of those that were built so."""
    built = _outermost_still(request.model) if request.model.training else {}
    if request.still:
        yield f"The model's train() leaves {_with_classes(request.still)} in evaluation mode, and so does the program while it trains."
    if woken := {name: kind for name, kind in built.items() if name not in request.still}:
        yield (
            f"{_with_classes(woken)} was built in evaluation mode, and model.train(), which a training program calls, ends that; give "
            "the model a train() that keeps it, if that is intended."
        )


def _with_classes(modules: Mapping[str, str]) -> str:
    return listed([f"{name} ({kind})" for name, kind in modules.items()], 4)


def _with_own_loss(request: Request) -> Program:
    """Trace; take a scalar of the model's output as the loss only if it is computed from the inputs."""
    program = _trace(request)
    if request.scalar is None:
        return program
    if any(node.op == "placeholder" for node in ancestors(program.graph.output_node())):
        return program.warn(
            f"{request.scalar} is used as the loss: the model returns no other scalar that needs a gradient. Give loss_fn to choose "
            "another loss, or mode 'infer' (--mode infer) for inference."
        )
    request.scalar, request.takes_scalar = None, False  # a parameter that is returned, such as a temperature
    return _trace(request)


def _inference_meant(request: Request) -> str:
    """The warning that the program is for inference, though no mode was given, and how to train it."""
    given = f"it returns {', '.join(request.output_names)}"
    how = "loss_fn = lambda output, target: ..., with example targets"
    if request.scalars:
        given = f"{', '.join(request.scalars)} are scalars that need a gradient, and none is marked as the loss"
        how = f"loss_fn = lambda output: {request.scalars[-1]}"
    return (
        f"The program is for inference, since the model returns no loss: {given}. To train it give a loss, such as {how}; if "
        "inference is intended, set mode 'infer' (--mode infer)."
    )


# ---- the trace -------------------------------------------------------------------------------------------------


class _Traced(nn.Module):
    """The model with its loss, over a flat list of input leaves."""

    def __init__(
        self,
        request: Request,
        repetitions: Repetitions | None,
        values: Values,
        sizes: contextlib.AbstractContextManager[Any],
    ) -> None:
        super().__init__()
        self.model = request.model
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "repetitions", repetitions)

    def forward(self, *tensors: Tensor) -> Any:
        """Return the loss, and the tensors of the model's output or, without a loss, these alone."""
        request = cast(Request, self.request)
        feed, shapes = iter(tensors), [tensor.shape for tensor in tensors]
        leaves = [next(feed) if isinstance(leaf, Tensor) else leaf for leaf in request.leaves]
        args, kwargs, targets = tree_unflatten(leaves, request.arguments_spec)
        dtype = request.precision.cast_to
        values = cast(Values, self.values)
        values.begin(request.model, tensors)
        args, kwargs = cast_floating((args, kwargs), dtype)
        if request.unread:
            flat, spec = tree_flatten((args, kwargs, targets))
            args, kwargs, targets = tree_unflatten([request.unread.get(i, leaf) for i, leaf in enumerate(flat)], spec)
        sizes = cast(Any, self.sizes)
        with (
            assignments_as_writes(request.model),
            modules_stay(),
            noted(request.model, request.assigned, values.fixed),
            repeated(request.model, cast(Any, self.repetitions)),
            _functions(values, _losses(dtype), sizes),
        ):
            generators = other_generators()
            output = self.model(*args, **kwargs)
            for name, (state, _) in other_generators().items():
                if name in generators and state != generators[name][0]:
                    raise GraphparError(
                        f"The model's forward draws from {name}, as to leave out a layer, and a trace has what it drew once. Draw from "
                        "torch, and multiply by what is drawn (stochastic depth), or set that probability to 0."
                    )
        given = [name for name, leaf in zip(request.names, request.leaves) if isinstance(leaf, Tensor)]
        for name, tensor, before in zip(given, tensors, shapes):
            if tensor.shape != before:
                raise GraphparError(
                    f"The model changes the shape of the input {name!r} in place (unsqueeze_, transpose_ or the like), and the caller's "
                    "tensor with it; use the result of unsqueeze or transpose instead."
                )
        returned, to = output, request.precision.returned(request.training)
        if request.training and request.loss_fn is None and request.precision.output_dtype:
            raise GraphparError(
                "output_dtype is of what loss_fn takes, and this model returns its own loss, which is in fp32; leave it out."
            )
        if to is torch.float32:
            output = in_full(output)
        elif to is not None:
            output = returned = cast_floating(output, to)
        if request.training:
            if request.loss_fn is not None:
                with _functions(values, _losses(dtype, parameters=True), sizes):
                    loss = request.loss_fn(output, *targets)
                if isinstance(loss, Tensor) and loss.numel() != 1:
                    shape = ", ".join(str(size) if isinstance(size, int) else "batch" for size in loss.shape)
                    raise GraphparError(f"loss_fn returned a tensor of shape ({shape}); it must return a scalar.")
            else:
                loss = own_loss(output, request.takes_scalar)
                note_scalars(request, output, loss)
            if loss is not None:
                if not isinstance(loss, Tensor):
                    raise GraphparError(f"loss_fn returned a {type(loss).__name__}; it must return a scalar tensor.")
                if not loss.is_floating_point():
                    raise GraphparError(f"loss_fn returned a tensor of {loss.dtype}, which has no gradient.")
                trained = [parameter for parameter in request.model.parameters() if parameter.requires_grad]
                if trained and not loss.requires_grad and request.module_mode != INFER:
                    raise GraphparError(
                        "The loss has no gradient, though the model has parameters that need one: somewhere on the way it is detached, "
                        "computed under torch.no_grad(), or made of whole numbers. For inference leave loss_fn out or set mode='infer'."
                    )
                request.output_names[:] = ["loss"]
                beside = named_outputs(returned, loss)
                request.returned[:] = [name for name, _ in beside]
                return (loss.reshape(()) if loss.ndim else loss, *(value for _, value in beside))
        named = named_outputs(output)
        request.output_names[:] = [name for name, _ in named]
        return tuple(value for _, value in named)


@contextlib.contextmanager
def _functions(values: Values, *inner: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Intercept functions of torch as a trace needs it: the ``inner`` modes see a call first, and the others what these call."""
    with contextlib.ExitStack() as modes:
        for mode in (EqualMasks(), OffMeta(), DataAsDetached(), Branches(values), WithoutWrites(), *inner):
            modes.enter_context(mode)
        yield


def _losses(dtype: torch.dtype | None, parameters: bool = False) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else LossesInFull(parameters)


def _trace(request: Request) -> Program:
    check_batch(request)
    symbolic_failure: Exception | None = None
    if any(dim is not None for dim in request.batch_dims):
        try:
            program = to_program(request, *_export(request, request.batch, symbolic=True), symbolic=True)
            if program.mode == GENERATE or (odd := _odd_size(program)) is None:
                return program
            symbolic_failure = odd
        except GraphparError:
            raise
        except Exception as error:
            symbolic_failure = error
    request.literals = LiteralSizes(request.batch)
    return _trace_static(request, request.batch, symbolic_failure, attempts=request.literals.attempts())


def _odd_size(program: Program) -> GraphparError | None:
    """Say which operator has a result of half a batch, or the like: torch 2.11 traces it, later versions fix the batch size."""
    for node in program.graph.nodes:
        try:
            if node.users and isinstance(node.meta.get("val"), Tensor):
                batch_coefficients(node)
        except GraphparError as error:
            return error
    return None


def _trace_static(
    request: Request,
    size: int,
    why: Exception | None,
    other_size: int | None = None,
    attempts: Iterable[None] = (None,),
) -> Program:
    """Trace at a fixed batch; find the dims that follow the batch by comparing with a trace at another size."""
    try:
        exported, regions = _export(request, size, symbolic=False)
    except GraphparError:
        raise
    except Exception as error:
        raise _explained(error, request) from error
    other_size = other_size or size + 1
    reason: str | None = None
    reasons: list[str | None] = []
    for _ in attempts:
        try:
            other = _export(request, other_size, symbolic=False)[0]
        except Exception as error:
            reason = f"it can be traced only with {size} rows: with {other_size}{_where(error, request.model)}: {_first_line(error)}"
        else:
            reason = mark_batch(exported, other, size, other_size)
        reasons.append(reason)
        if reason is None:
            break
    if reason and len(reasons) > 1 and request.literals is not None and not request.literals.followed:
        reason = reasons[-2]  # with sizes that follow it comes further than without, in the last attempt
    program = to_program(request, exported, regions, symbolic=False, size=size)
    program.unsplittable = reason
    program.retrace = functools.partial(_retrace, request, why)
    if request.literals is not None and request.literals.place is not None:
        program = program.warn(
            f"{NOT_SYMBOLIC}the {request.batch} of {request.literals.place} is taken for the rows of a batch, and x.shape[0] would be)."
        )
    elif why is not None:
        program = program.warn(f"{NOT_SYMBOLIC}{_first_line(why)}).")
    return program


def _retrace(request: Request, why: Exception | None, size: int, whole: int | None) -> Program:
    """Trace for microbatches of ``size`` rows; but for the size, it must be the program of ``whole`` rows, by default the example's."""
    whole = request.batch if whole is None else whole
    if whole != request.batch and request.literals is not None and request.literals.place is not None:
        raise GraphparError(
            f"The model computes batches of {request.batch} rows only: {request.literals.place}. Give an example of {whole} rows, or take "
            "the number of rows from the input (x.shape[0])."
        )
    program = _trace_static(request, size, why, other_size=whole if size != whole else None)
    if program.unsplittable is not None:
        raise GraphparError(
            f"The model differs for microbatches of {size} rows: {program.unsplittable}. Make it independent of the number of "
            "rows, or give an example of the global batch and run it unsplit: one microbatch, and no replicas."
        )
    return program


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _export(request: Request, size: int, *, symbolic: bool) -> tuple[ExportedProgram, Regions]:
    """Call torch.export, which sees few instances of modules that repeat where the others are provably like them."""
    with unusual_apart(request.model):
        if siblings(request.model):
            repetitions = Repetitions()
            try:
                exported, regions = _exported(request, size, repetitions, symbolic=symbolic)
                expand(exported, repetitions.examples, repetitions.repetitions)
                return exported, regions
            except (Exception, NotRepeatedError):
                if not repetitions.begun:  # each module was traced, so the error is the model's
                    raise
        return _exported(request, size, None, symbolic=symbolic)


def _exported(
    request: Request, size: int, repetitions: Repetitions | None, *, symbolic: bool
) -> tuple[ExportedProgram, Regions]:
    dims: list[dict[int, Any] | None] = []
    example: list[Tensor] = []
    rows: list[Tensor | None] = []
    trace_size = max(2, size // 2 if request.module_mode == GENERATE else size) if symbolic else size
    longest = max(3, request.batch - 1) if request.module_mode == GENERATE else None  # tables of positions have no more
    batch = Dim("batch", min=2, max=longest) if symbolic else None
    for leaf, dim in zip(request.leaves, request.batch_dims):
        if not isinstance(leaf, Tensor):
            continue
        shape = list(leaf.shape)
        if dim is not None:
            shape[dim] = trace_size
        with request.mode or contextlib.nullcontext():  # a new tensor each: torch.export merges one that is given twice
            example.append(torch.zeros(shape, dtype=leaf.dtype))
        rows.append(with_rows(leaf, dim, trace_size))
        dims.append({dim % leaf.ndim: batch} if symbolic and dim is not None else None)
    literals = None if symbolic else request.literals
    sizes = contextlib.nullcontext() if literals is None else literals.traced(size)
    values = Values(request.model, request.recorder, rows)
    traced = _Traced(request, repetitions, values, sizes)
    training = [module.training for module in traced.modules()]
    regions = Regions(request.model, request.training)
    with (
        warnings.catch_warnings(),
        torch_is_quiet(),
        _in_mode(request, request.module_mode),
        computed_in(request.model, request.precision),
        custom_backwards_kept(request.training),
        plain_regions(regions),
        lines_kept(request.loss_fn),
        least_multiples(),
        masks_as_given(),
        caches_kept(),
    ):
        warnings.simplefilter("ignore")
        check_averages(request.model)
        exported = torch.export.export(
            traced, tuple(example), dynamic_shapes={"tensors": tuple(dims)} if symbolic else None, strict=False
        )
    assert training == [module.training for module in traced.modules()]
    check_tensors(request.assigned, exported.constants)
    check_collectives(exported)
    check_left_out(exported, values.conditions)
    return exported, regions


@contextlib.contextmanager
def _in_mode(request: Request, mode: str | None) -> Iterator[None]:
    """Set the modules to ``mode``, if any, while they are traced; then restore all their attributes."""
    with attributes_kept(request.model.modules()):
        if mode is not None:
            request.model.train(mode == TRAIN)
        if mode == TRAIN:
            request.still = _outermost_still(request.model)
        yield


def _outermost_still(model: nn.Module) -> dict[str, str]:
    """Return modules in evaluation mode that are in no other such module, each with its class."""
    still = {name: type(module).__name__ for name, module in model.named_modules() if not module.training}
    return {name: kind for name, kind in still.items() if name and name.rpartition(".")[0] not in still}


def _explained(error: Exception, request: Request) -> GraphparError:
    """Explain a failure of torch.export in the user's terms."""
    model, to = request.model, request.precision.cast_to
    kind, text = type(error).__name__, str(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, _ in frames:
        if isinstance(node := frame.f_locals.get("node"), fx.Node):
            refuse_collective(node)
    called = next((frame for frame, _ in frames if frame.f_globals.get("__name__") in COLLECTIVE_MODULES), None)
    if called is not None:
        return collective(f"{called.f_globals['__name__']}.{called.f_code.co_name}", user_line(error))
    if (
        "GuardOnDataDependent" in kind
        or "data-dependent" in text.lower()
        or "DynamicOutputShape" in kind
        or ".numpy()" in text
    ):
        place, advice = user_line(error), "Use torch.where, torch.cond or a fixed size there"
        if isinstance(error, DynamicOutputShapeException) and isinstance(error.func, torch._ops.OpOverload):
            advice = (
                f"The operator is {error.func._opname.removeprefix('_')}: give it lengths and sizes as Python numbers, or use one "
                "of a fixed size"
            )
        elif ".numpy()" in text:
            advice = "Use torch's functions in the place of numpy's there"
        elif in_loop(error):
            advice += "; in a loop over experts leave out the condition, since an expert without tokens adds nothing"
        return GraphparError(
            "The model's control flow or a tensor's size depends on values of tensors, which a trace can't follow. "
            f"{advice}" + (f": {place}." if place else f". ({kind}: {_first_line(error)})")
        )
    if isinstance(error, SyntaxError):  # torch writes code with the operator's argument names, of which one is ``from``
        place = user_line(error)
        return GraphparError(
            f"torch can't trace random_ with bounds{f' ({place})' if place else ''}: call torch.randint(low, high, x.shape) instead."
        )
    mixed = ""
    if to is not None and any(words in text.lower() for words in ("dtype", "scalar type", "same type", "be the same")):
        name = str(to).removeprefix("torch.")
        mixed = f" (Parameters and inputs are in {name} here, but buffers are as the model has them: cast those to x.dtype in the model.)"
    return GraphparError(
        f"torch.export could not trace the model{_where(error, model)} ({kind}): {text.strip()[:1500]}{mixed}"
    )


def _where(error: Exception, model: nn.Module) -> str:
    """The module in which ``error`` was raised and the user's innermost line on the way: " in Linear 'head' (model.py:12)"."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    module = next((module for module in reversed(inside) if module in names), None)
    where = f" in {type(module).__name__} {names[module]!r}" if module is not None and names[module] else ""
    where += f" ({place})" if (place := user_line(error)) else ""
    if isinstance(module, nn.modules.batchnorm._NormBase) and "more than 1 value per channel" not in str(error):
        where += f", which takes dim 1 of its input as its {module.num_features} features, but dim 1 is the batch"
    return where
