"""Modes and checks for calls that a trace would lose or get wrong: they are made exact, or refused with the user's line.

torch.arange(n, device="meta")   the device that the program runs on: a model on ``meta`` is traced as one on the CPU
x + table.data                   ``table.detach()``, as long as nothing is written to the table from there on
x.data.mul_(2), x.data = y       refused: a trace follows neither
o[t > 0], t[t > 0]               one number of rows
F.gaussian_nll_loss              without its write to what carries a gradient
self.gate.to(torch.float32)      nothing where it is in fp32, else refused
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.codegen.operators import check_function
from graphpar.errors import GraphparError
from graphpar.ir.program import is_plain, memory_of
from graphpar.ir.source import source_of, stack_line
from graphpar.operators.functions import opaque_apply, plain_apply, refusal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named
from graphpar.runtime.torch_versions import functions_applied_by

_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
COLLECTIVE_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
)
"""The modules of torch's functions that call collectives."""


class FunctionMode(TorchFunctionMode):
    """Intercepts every call of a torch function inside a ``with`` block; a subclass answers it in :meth:`call`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.call(func, tuple(args), dict(kwargs or {}))

    @abstractmethod
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **options)``, or another in its place."""


def written_by(function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes in place, by the function's name and ``out``."""
    name = getattr(function, "__name__", "")
    writes = (
        name == "__setitem__"
        or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
        or (name.endswith("_") and not name.endswith("__"))
    )
    written = [args[0]] if writes and args and isinstance(args[0], Tensor) else []
    return written + [leaf for leaf in tree_leaves(options.get("out")) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def caches_kept() -> Iterator[None]:
    """Empty, at the end, what ``functools`` caches of functions got inside: tensors of a trace, which eager code can't use."""
    before = {cache: cache.cache_info().currsize for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().currsize != before.get(cache, 0):
                cache.cache_clear()


def _caches() -> list[Any]:
    """The cached functions of modules that are imported, but torch's and graphpar's own."""
    modules = [
        m for name, m in list(sys.modules.items()) if name.partition(".")[0] not in ("torch", "graphpar", "sympy")
    ]
    values = (value for module in modules for value in list(getattr(module, "__dict__", {}).values()))
    return list({id(value): value for value in values if type(value) is _CACHE}.values())


_CACHE = type(functools.lru_cache(len))

# ---- the device meta -------------------------------------------------------------------------------------------


class OffMeta(FunctionMode):
    """``device="meta"`` means the CPU, as an option or as a ``torch.device``."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function`` with the CPU in place of the device meta."""
        if str(options.get("device")) == "meta":
            options["device"] = torch.device("cpu")
        if any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in tree_leaves(args)):
            args = tree_map(lambda leaf: torch.device("cpu") if leaf == torch.device("meta") else leaf, args)
        if getattr(function, "__name__", "") == "to" and len(args) > 1 and args[1] == "meta":
            args = (args[0], torch.device("cpu"), *args[2:])
        return function(*args, **options)


def off_meta(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model that is partly on the device ``meta``, with these parts as fake tensors on the CPU. The rest is shared.

    Buffers that no weights file holds get the values that the model's own code gives them.

    Raises:
        GraphparError: the values of a tensor belong to the program, but it has none.
    """
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        kinds: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers, own)
        for kind in kinds:
            for key, leaf in ((key, leaf) for key, value in kind.items() for leaf in tree_leaves(value)):
                if isinstance(leaf, Tensor) and id(leaf) not in memo:
                    persistent = kind is module._buffers and key not in module._non_persistent_buffers_set
                    loaded = kind is module._parameters or persistent
                    if leaf.is_meta and not loaded and kind is module._buffers:
                        memo |= _initialised(model, name)
                    if leaf.is_meta and not loaded and id(leaf) not in memo:
                        raise _without_values(f"{name}.{key}" if name else key, module, kind is module._buffers)
                    memo.setdefault(id(leaf), _on_cpu(leaf, mode) if leaf.is_meta else leaf)
    return copy.deepcopy(model, memo)


def _initialised(model: nn.Module, path: str) -> dict[int, Tensor]:
    """Return values of the buffers of a module on ``meta``, by the buffers' ids: those that it, or transformers' ``_init_weights`` of a
    module around it, writes whatever was there before; none where they do not."""
    around = [path[:end] for end in range(len(path), -1, -1) if end in (0, len(path)) or path[end] == "."]
    module, makers = model.get_submodule(path), [model.get_submodule(each) for each in around]
    fill = next((own for each in makers if callable(own := getattr(each, "_init_weights", None))), None)
    if fill is None and not callable(getattr(module, "reset_parameters", None)):
        return {}
    made: list[dict[str, Tensor]] = []
    for before in (0, 1):
        blank = copy.deepcopy(module)
        empty = {name: each for name, each in blank._buffers.items() if each is not None and each.is_meta}
        blank._buffers |= {name: torch.full_like(each, before, device="cpu") for name, each in empty.items()}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(before)  # random values are no values of the model's
            fill(blank) if fill is not None else blank.reset_parameters()  # type: ignore[operator]
        made.append({name: value for name in empty if isinstance(value := blank._buffers[name], Tensor)})
    names = [name for name, value in made[0].items() if torch.equal(value, made[1][name])]
    return {id(module._buffers[name]): made[0][name] for name in names if name in module._non_persistent_buffers_set}


def _without_values(name: str, module: nn.Module, buffer: bool) -> GraphparError:
    return GraphparError(
        f"The model is on the device meta, where {'the non-persistent buffer' if buffer else 'the tensor'} {name!r} of "
        f"{type(module).__name__} has no values; they belong to the program, since no weights file holds them. Give a function that "
        "builds the model instead: it is run without memory for the weights, whatever its size."
    )


def _on_cpu(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer is on the device meta, without values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


# ---- tensor.data -----------------------------------------------------------------------------------------------


class DataAsDetached(FunctionMode):
    """``x.data`` is ``x.detach()``, as long as nothing is written to either."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, tuple[Tensor, str]] = {}  # by memory: the tensor whose data was taken, and where

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, or detach instead of taking ``.data``.

        Raises:
            GraphparError: it assigns to ``.data``, writes to memory whose ``.data`` was taken, or registers a hook on a gradient.
        """
        name = getattr(function, "__name__", "")
        if name == "__set__" and function == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise GraphparError(
                f"The model assigns to a tensor's .data{_where(stack_line())}, which a trace can't follow. Compute a new tensor, or write "
                "to a buffer (self.count.copy_(value))."
            )
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            raise GraphparError(
                f"The model registers a hook on a tensor's gradient{_where(stack_line())}, which a trace can't follow. Write it as a "
                "torch.autograd.Function, whose backward changes the gradient."
            )
        if name == "__get__" and function == Tensor.data.__get__:  # type: ignore[attr-defined]
            self.taken.setdefault(memory_of(args[0]), (args[0], stack_line()))
            return args[0].detach()
        for tensor in written_by(function, args, options) if self.taken else ():
            if memory_of(tensor) in self.taken:
                raise GraphparError(
                    f"The model writes{_where(stack_line())} to a tensor whose .data it took{_where(self.taken[memory_of(tensor)][1])}: "
                    "autograd does not see such a write, and a trace can't follow it. Write to a buffer, or compute a new tensor."
                )
        return function(*args, **options)


def _where(place: str) -> str:
    return f" ({place})" if place else ""


# ---- parameters and buffers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def assignments_as_writes(model: nn.Module) -> Iterator[None]:
    """Turn ``self.count = self.count + 1`` into a write of the buffer; a trace would lose it in all modules but the outermost."""
    before = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer in before:
        assigned = module._buffers[name]
        if assigned is buffer:
            continue
        if assigned is None or assigned.shape != buffer.shape or assigned.dtype != buffer.dtype:
            raise GraphparError(
                f"The model assigns to the buffer {name!r} of {type(module).__name__} another shape or dtype in its forward, and a program "
                "stores it as it was built. Build a table for the longest input in __init__, or keep it in a plain attribute."
            )
        module._buffers[name] = buffer
        buffer.copy_(assigned.detach())


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Let a forward cast modules to the dtype that they have, as routers do (``self.gate.to(torch.float32)``).

    Raises:
        GraphparError: to another one, which they would keep.
    """

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            with _disable_current_modes():
                stays = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                made = function(stays)
            if (made.dtype, made.device) != (stays.dtype, stays.device):
                had, wanted = (each.device if made.dtype == stays.dtype else each.dtype for each in (stays, made))
                raise GraphparError(
                    f"The model changes {name!r} of {type(module).__name__} from {had} to {wanted} in its forward{_where(stack_line())}, "
                    "and a program stores it as it was built. Build it so (with keep_fp32, where the program is in 16 bits), or cast where "
                    "it is read: F.linear(x.float(), self.weight.float())."
                )
        return module

    before = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def check_averages(model: nn.Module) -> None:
    """Refuse cumulative averages: they weigh each batch by a number read from a buffer, which a trace would fix."""
    for name, module in model.named_modules():
        averages = (
            isinstance(module, nn.modules.batchnorm._NormBase)
            and module.track_running_stats
            and module.momentum is None
        )
        if averages and module.training:
            raise GraphparError(
                f"{type(module).__name__} {name!r} has momentum=None: its running statistics are averages over all steps so far, weighted "
                "by a number that is read from a buffer in each step, which a trace can't follow. Give it a momentum (0.1 is torch's "
                "default), or keep it in evaluation mode in the train() of the model."
            )


class _Unusual:
    """Stands for a tensor that a program can't hold; whoever computes with it is refused."""

    def __init__(self, name: str, kind: str) -> None:
        vars(self).update(_name=name, _kind=kind)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphparError(
            f"The model computes with the buffer {self._name!r}{_where(stack_line())}, which is {self._kind}: no program holds it. Make it "
            "dense in the constructor (to_dense(), to_padded_tensor()), or register its indices and values as buffers."
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = __neg__ = (
        _refuse
    )
    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()


@contextlib.contextmanager
def unusual_apart(model: nn.Module) -> Iterator[None]:
    """Take sparse, nested and quantized buffers out of the model: a trace fails at them, though nothing may read them."""
    names = {module: name for name, module in model.named_modules()}
    kept = [(module, dict(module._buffers)) for module in names]
    for module, buffers in kept:
        for name, buffer in buffers.items():
            if buffer is not None and not is_plain(buffer):
                kind = "nested" if buffer.is_nested else "quantized" if buffer.is_quantized else "sparse"
                del module._buffers[name]
                vars(module)[name] = _Unusual(f"{names[module]}.{name}" if names[module] else name, kind)
    try:
        yield
    finally:
        for module, buffers in kept:
            for name in buffers.keys() - module._buffers.keys():
                vars(module).pop(name, None)
            module._buffers.clear()
            module._buffers.update(buffers)


# ---- gradients --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def custom_backwards_kept(training: bool) -> Iterator[None]:
    """Keep custom backwards, which a trace would silently lose."""
    inside = False  # of a custom function
    functions: Any = torch.autograd.function
    transformed = functions.custom_function_call
    # autograd.grad, backward, vjp and jvp all call these. The public functions can't be replaced: Dynamo has them in a table, by object.
    autograd: Any = torch.autograd
    transforms: Any = torch._functorch.eager_transforms
    backward, jvp = autograd._engine_run_backward, transforms.jvp_increment_nesting

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not training or cls.__module__.startswith("torch."):
            return plain_apply(cls, *args, **kwargs)
        if kwargs:
            raise refusal(cls, f"has keyword-only arguments ({', '.join(kwargs)})")
        check_function(cls)
        inside = True
        try:
            return opaque_apply(cls, args)
        finally:
            inside = False

    def under_transforms(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if training and isinstance(cls, type) and not cls.__module__.startswith("torch."):
            raise refusal(cls, "is called under torch.func or torch.vmap, where a trace would lose its backward")
        return transformed(cls, *args, **kwargs)

    def differentiates(*args: Any, **kwargs: Any) -> Any:
        place = stack_line()
        raise GraphparError(
            f"The model computes gradients in its forward{f' ({place})' if place else ''} (autograd.grad, backward or torch.func). A trace "
            "records only forward operators, so these gradients would be constants in the program; write the derivative out."
        )

    functions.custom_function_call = under_transforms
    autograd._engine_run_backward = transforms.jvp_increment_nesting = differentiates
    try:
        with functions_applied_by(apply):
            yield
    finally:
        functions.custom_function_call = transformed
        autograd._engine_run_backward, transforms.jvp_increment_nesting = backward, jvp


def check_backward_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients that were registered before the trace, which knows nothing of them.

    Raises:
        GraphparError: a module or a parameter has one.
    """
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _hooked(f"{type(module).__name__} {path!r} has a backward hook")
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        if any(hooks):
            raise _hooked(f"the parameter {name!r} has a hook on its gradient")


def _hooked(what: str) -> GraphparError:
    return GraphparError(
        f"In the model {what}, which a trace can't follow. Remove it; to change a gradient, write a torch.autograd.Function, whose "
        "backward does so."
    )


# ---- causal masks -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """Keep ``nn.Transformer`` from reading whether a mask's values are causal; attention with the mask itself gives the
    same result."""
    reads = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = reads


# ---- collectives -----------------------------------------------------------------------------------------------


def check_collectives(exported: ExportedProgram) -> None:
    """Refuse collectives in a model, which must be written for one device, and functions that are mapped over a dim.

    Raises:
        GraphparError: the model calls a collective, or torch.vmap.
    """
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            refuse_collective(node)
            if getattr(node.target, "__name__", "") == "_add_batch_dim":
                source = source_of(node.meta.get("stack_trace") or "")
                raise GraphparError(
                    f"The model calls torch.vmap{_where(f'{source.file}:{source.line}' if source else '')}, whose operators have a dim "
                    "that their trace does not show. Write the function for all rows at once (a dim more, broadcasting, torch.einsum)."
                )


def refuse_collective(node: fx.Node) -> None:
    """Raise if the node calls a collective, with the user's line."""
    if getattr(node.target, "namespace", None) in _COLLECTIVES:
        source = source_of(node.meta.get("stack_trace") or "")
        raise collective(str(node.target), f"{source.file}:{source.line}" if source else "")


def collective(name: str, place: str) -> GraphparError:
    """Make the error for a model that calls the collective ``name`` at ``place``."""
    return GraphparError(
        f"The model calls the collective {name}{_where(place)}. A model must be written for one device: graphpar adds the collectives. "
        "Leave it out, or make it depend on a flag that is off here."
    )


# ---- masks of equal expressions ---------------------------------------------------------------------------------
#
# mse_loss(o[t > 0], t[t > 0])
#
# A trace has a symbol for the number of rows that each mask tensor chooses, and ``t > 0`` written twice makes two tensors: the loss
# would compare two unknown sizes. Here both get one symbol. They stay two operators and two tensors, so that writing to one
# does not change the other. Every mask is assumed to choose at least one row; that is safe, since the program made from the trace
# works on all rows (:mod:`graphpar.passes.normalize.static_masking`).


_CASTS = ("bool", "int", "long")
"""Methods of tensors that have no operator of their name."""


class EqualMasks(FunctionMode):
    """Gives masks of equal expressions one number of chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        # By identity of a tensor: the tensor, its version then, its expression.
        self.made: dict[int, tuple[Tensor, int, Hashable]] = {}
        self.chosen: dict[Hashable, Any] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, with known numbers of chosen rows for the masks among its arguments."""
        name = getattr(function, "__name__", "").strip("_")
        leaves = tree_leaves((args, options)) if _chooses(name) else []
        masks = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.dtype is torch.bool]
        for mask in masks:
            known = self.chosen.get(self._expression(mask))
            if known is not None:
                mask.nonzero_memo = known
        result = function(*args, **options)
        for mask in masks:
            if mask.nonzero_memo is not None and self._expression(mask) not in self.chosen:
                self.chosen[self._expression(mask)] = mask.nonzero_memo
                torch._check(mask.nonzero_memo >= 1)
        if _is_plain(name) and isinstance(result, Tensor) and not result.is_floating_point():
            leaves = tree_leaves((args, options))
            words = tuple(self._expression(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
            self.made[id(result)] = (result, result._version, (name, *words))
        return result

    def _expression(self, tensor: Tensor) -> Hashable:
        made = self.made.setdefault(id(tensor), (tensor, tensor._version, id(tensor)))
        return made[2] if made[1] == tensor._version else (id(tensor), tensor._version)


def _chooses(name: str) -> bool:
    """Whether a function of torch, or a method, may choose rows by a mask."""
    return name in ("getitem", "setitem") or name == "where" or record_named(name).kind is Kind.INDEX


def _is_plain(name: str) -> bool:
    """Whether a function returns equal masks for equal operands."""
    return name in _CASTS or record_named(name).pure or record_named(f"__{name}__").pure


# ---- losses that write -----------------------------------------------------------------------------------------


class WithoutWrites(FunctionMode):
    """Computes a loss of torch that writes, under ``no_grad``, to what carries a gradient, without that write.

    The modes that were entered before see what the loss calls, those that are entered later, as to cast what it takes, the loss.
    """

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, or what computes the same."""
        return (_gaussian_nll_loss if function is F.gaussian_nll_loss else function)(*args, **options)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``F.gaussian_nll_loss``: the variance is at least ``eps``, and its gradient passes as if it were not clamped."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if torch.any(variance < 0) if isinstance(var, Tensor) else var < 0:
        raise ValueError("var has negative entry/entries")
    if variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    odd = [own for own, other in zip(variance.shape, input.shape) if own != other]
    if variance.ndim != input.ndim or odd not in ([], [1]):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    variance = torch.where(variance < eps, eps + (variance - variance.detach()), variance)
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
