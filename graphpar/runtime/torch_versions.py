"""What differs between the versions of torch that graphpar runs with. No other module asks for a version, or for what one lacks."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage as _PipelineStage
else:
    _PipelineStage = object  # which classes here stand before: loading torch's pipelines takes a second

SPLITS_BACKWARD = torch.__version__ >= "2.13"
"""Whether torch's pipelines may split a backward in two. Before, it raised where what a stage sends has no gradient or what it receives
is not used, and torch 2.11 gave wrong gradients behind operators of several results."""


COMPILES_COLLECTIVES = torch.__version__ >= "2.13"
"""Whether ``torch.compile`` keeps all collectives of a graph: torch 2.11 leaves some out, and its numbers are wrong."""
COMPILES_REPETITIONS = torch.__version__ >= "2.13"
"""Whether two functions that ``torch.compile`` makes can be told not to share graphs: their guards don't tell what a checkpoint keeps."""


CHECKPOINTS = "_checkpoint_without_reentrant_generator" + ("_impl" if torch.__version__ >= "2.14" else "")
"""The name in ``torch.utils.checkpoint`` of what runs a region without reentrance; it takes the region first."""


def forget_meshes() -> None:
    """Drop what DTensor remembers of operators: results on a mesh that is equal, but whose groups are destroyed."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


@contextlib.contextmanager
def functions_applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Let ``apply(cls, *arguments)`` run when custom autograd functions are applied, also by methods bound before: ``f = Scaled.apply``.

    Since torch 2.14 a bound ``apply`` is not Python; it runs the class's ``forward``, which is replaced then.
    """
    function: Any = torch.autograd.Function
    functions: Any = torch.autograd.function
    if not isinstance(vars(function).get("apply"), type(vars(torch._C._FunctionBase)["apply"])):
        base = functions._SingleLevelFunction  # one class above Function, whose own apply calls it
        base.apply = classmethod(apply)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del base.apply  # type: ignore[attr-defined]
        return
    plain = vars(function)["apply"]
    classes = [cls for cls in dict.fromkeys(_below(function)) if not cls.__module__.startswith("torch.")]
    forwards = [(cls, cls.forward, vars(cls).get("forward")) for cls in classes]
    inside = False  # a forward that runs may call those of other classes

    def replaced(cls: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        alone = cls.setup_context is not function.setup_context  # forward takes no context

        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            if inside:
                return forward(*arguments, **options)
            inside = True
            _trace_gradients(True)  # a forward runs without
            try:
                return apply(cls, *(arguments if alone else arguments[1:]), **options)
            finally:
                _trace_gradients(False)
                inside = False

        return run

    def applied(cls: type, *arguments: Any, **options: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active()
        return (functions.custom_function_call if transformed else apply)(cls, *arguments, **options)

    function.apply = classmethod(applied)
    for cls, forward, _ in forwards:  # also those that inherit it: their backwards are others
        cls.forward = staticmethod(replaced(cls, forward))
    try:
        yield
    finally:
        function.apply = plain
        for cls, _, own in forwards:
            if own is None:
                del cls.forward
            else:
                cls.forward = own


def _below(cls: Any) -> Iterator[Any]:
    for below in cls.__subclasses__():
        yield below
        yield from _below(below)


def _trace_gradients(enabled: bool) -> None:
    """Say whether gradients are computed, unseen by a trace."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


class _OldBoundaries(_PipelineStage):
    """Lets some of the tensors that a stage receives and sends have no gradient: those whose examples have none.

    torch 2.11 gave each of them one, which integers can't have, and both it and 2.12 waited for gradients that nobody makes. As in later
    versions nothing is sent back for such a tensor, and zeros for one that has a gradient and is not used. Nor does a rank with
    neighbouring stages send anything to itself, which torch 2.11 did, and gloo can't.
    """

    args_recv_info: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._received = [example.requires_grad for example in options["input_args"]]
        self._sent = [example.requires_grad for example in options["output_args"]]

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        trains, self.has_backward = self.has_backward, False  # else each buffer is given a gradient
        made = super()._prepare_forward_infra(*args, **options)
        self.has_backward = trains
        for received in () if self.is_first else self.args_recv_info.values():
            for each, has_gradient in zip(received, self._received):
                each.buffer.requires_grad_(trains and has_gradient)
        return made

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        outputs = prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        for each, output, has_gradient in zip(self.args_recv_info[mb_index], outputs, self._received):
            each.buffer = output.detach().requires_grad_(has_gradient)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **options)
        made = zip(gradients, bwd_kwargs.get("input_values", ()))
        return tuple(torch.zeros_like(x) if g is None and x.requires_grad else g for g, x in made), groups

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        previous = super()._create_grad_send_info(args_recv_info)
        return [stage if has_gradient else None for stage, has_gradient in zip(previous, self._received)]

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return super()._create_grad_recv_info({i: to for i, to in act_send_info.items() if self._sent[i]})

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = iter(super()._retrieve_recv_grads(bwd_chunk_id))
        return tuple(next(received) if has_gradient else None for has_gradient in self._sent)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        made = zip(next_stage_bwd_outputs, self._sent)
        super().set_local_bwd_input(tuple(each for each, has_gradient in made if has_gradient), mb_index)


if TYPE_CHECKING or torch.__version__ >= "2.13":

    class Boundaries(_PipelineStage):
        """Stands before torch's stage, and has nothing to add."""
else:
    Boundaries = _OldBoundaries


def all_gather_single(*args: Any, **options: Any) -> Any:
    """Call the function of ``torch.distributed`` of this name, which torch 2.13 gave it."""
    named = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return named(*args, **options)


def reduce_scatter_single(*args: Any, **options: Any) -> Any:
    """Call the function of ``torch.distributed`` of this name, which torch 2.13 gave it."""
    named = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    return named(*args, **options)


def parameter_groups(fsdp_state: Any) -> list[Any]:
    """Return the groups of parameters of one module of FSDP2: one or none before torch 2.12."""
    if hasattr(fsdp_state, "_fsdp_param_groups"):
        return list(fsdp_state._fsdp_param_groups)
    return [] if fsdp_state._fsdp_param_group is None else [fsdp_state._fsdp_param_group]


def waits_for_reduce_scatter(fsdp_group: Any) -> bool:
    """Tell whether a reduce-scatter of FSDP2 has not been waited for: one of several since torch 2.13."""
    ones = (getattr(fsdp_group.comm_ctx, name, None) for name in ("reduce_scatter_states", "reduce_scatter_state"))
    return any(ones)


_kept: set[tuple[str, str]] = set()
"""The functions, by file and name, whose lines are kept in traces."""


@contextlib.contextmanager
def lines_kept(function: Callable[..., Any] | None) -> Iterator[None]:
    """Keep the source lines of ``function``, and of those that :func:`keep_lines_of` names, in traces.

    torch keeps those of functions named ``forward`` only, before 2.13 of no others.
    """
    anchors: set[tuple[str, str]] | None = getattr(fx.proxy, "_STACK_TRACE_ANCHORS", None)
    tracer: Any = fx.proxy.TracerBase
    filtered = tracer._filter_traceback_frames
    known = set(anchors or ())

    def renamed(self: Any, frames: Any) -> Any:
        shown = [
            traceback.FrameSummary(each.filename, each.lineno, "forward", lookup_line=False)
            if (each.filename, each.name) in _kept
            else each
            for each in frames
        ]
        return filtered(self, traceback.StackSummary.from_list(shown))

    if anchors is None:
        tracer._filter_traceback_frames = renamed
    code = getattr(function, "__code__", None)
    if code is not None:
        keep_lines_of(code.co_filename, code.co_name)
    try:
        yield
    finally:
        _kept.clear()
        if anchors is not None:
            anchors &= known
        tracer._filter_traceback_frames = filtered


def keep_lines_of(path: str, name: str) -> None:
    """Keep the source lines of the function ``name`` of a file in the traces of :func:`lines_kept`."""
    _kept.add((path, name))
    anchors: set[tuple[str, str]] | None = getattr(fx.proxy, "_STACK_TRACE_ANCHORS", None)
    if anchors is not None:
        anchors.add((path, name))


@contextlib.contextmanager
def least_multiples() -> Iterator[None]:
    """Let traces know that of two multiples of a size the one with the smaller factor is smaller, which torch before 2.13 guards."""
    if torch.__version__ >= "2.13":
        yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._sympy.functions import Min

    def least(*terms: Any) -> Any:
        parts = [term.as_coeff_Mul() for term in terms]
        same = len({rest for _, rest in parts}) == 1 and parts[0][1].is_positive
        return min(terms, key=lambda term: term.as_coeff_Mul()[0]) if same else Min(*terms)

    shapes: Any = ShapeEnv
    evaluated = shapes._maybe_evaluate_static

    @functools.wraps(evaluated)  # whose memory torch clears
    def simplified(self: Any, expr: Any, *args: Any, **options: Any) -> Any:
        return evaluated(self, expr.replace(Min, least) if hasattr(expr, "free_symbols") else expr, *args, **options)

    shapes._maybe_evaluate_static = simplified
    try:
        yield
    finally:
        shapes._maybe_evaluate_static = evaluated
