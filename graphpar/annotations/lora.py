"""LoRA: low-rank adapters on the layers of an ordinary model, whose own parameters are frozen.

    y = layer(x) + alpha / rank * lora_B(lora_A(dropout(x)))        lora_A [rank, in] drawn, lora_B [out, rank] zero at first

A layer stays in its place, with its parameters under their names: only its class changes, into one that adds the adapter. So weights
of the base model load as before. Stacked weights of experts [experts, m, n] are adapted by the product of two stacks that are added to
them, ``alpha / rank * lora_B[e] @ lora_A[e]``. Source: Hu et al., LoRA (2021); initial values and scale as in the package ``peft``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from graphpar.annotations.patterns import ModelNames, matches_nothing, path_under
from graphpar.errors import GraphparError
from graphpar.text import listed, matching

Model = TypeVar("Model", bound=nn.Module | Callable[[], nn.Module])
_READ_BY_OWNERS = (nn.modules.linear.NonDynamicallyQuantizableLinear,)
"""Layers whose weights another module reads, without calling them."""


def lora(model: Model, ranks: Mapping[str, int], *, alpha: float = 16.0, dropout: float = 0.0) -> Model:
    """Freeze ``model`` and add adapters to the layers that patterns name.

    Args:
        model: a module, which is changed, or a function that makes one; of a function the result is a function.
        ranks: pattern over the paths of modules, as in shard plans (``"layers.*.self_attn.q_proj"``), to the rank of their adapters; or
            over the names of stacked weights of experts (``"layers.*.mlp.experts.down_proj"``).
        alpha: the adapters' products are scaled by ``alpha / rank``.
        dropout: the probability with which an adapter's inputs are zeroed; not for stacked weights.

    Raises:
        GraphparError: a pattern matches nothing, or something that is no product; two give one layer different ranks; a rank is not
            positive.
    """
    _check_number("alpha", alpha, 0.0, math.inf)
    _check_number("dropout", dropout, 0.0, 1.0)
    if not isinstance(model, nn.Module):
        make = cast(Callable[[], nn.Module], model)

        @functools.wraps(make)
        def adapted() -> nn.Module:
            return lora(make(), ranks, alpha=alpha, dropout=dropout)

        return cast(Model, adapted)
    found = _matched(model, ranks)
    model.requires_grad_(False)
    for path, rank in found.items():
        _adapt(model, path, rank, alpha, dropout)
    return model


def _check_number(name: str, value: object, least: float, limit: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < limit:
        below = "" if limit == math.inf else f" and below {limit:g}"
        raise GraphparError(f"{name} of adapters is {value!r}; it is a number of at least {least:g}{below}.")


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. x [..., in] -> [..., out]"""

    lora_of = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Add the adapter's product to the layer's own."""
        return super().forward(input) + _adapter(self, input)


def _adapter(layer: Any, input: Tensor) -> Tensor:
    narrow = layer.lora_A(layer.lora_dropout(input) if layer.lora_dropout is not None else input)
    return cast(Tensor, layer.lora_B(narrow) * layer.scaling)


@functools.cache
def _with_adapter(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of layers of ``kind`` that have an adapter."""
    if kind is nn.Linear:
        return LoRALinear

    def forward(self: Any, input: Tensor) -> Tensor:
        return cast(Tensor, kind.forward(self, input) + _adapter(self, input))

    members = {"forward": forward, "lora_of": kind, "__module__": kind.__module__}
    return type(f"LoRA{kind.__name__}", (kind,), members)


@functools.cache
def _with_adapted_weights(kind: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    """The class of modules of ``kind`` whose stacked weights ``names`` are read with their adapters' products added."""

    def read(name: str) -> property:
        def adapted(self: Any) -> Tensor:
            pair = self.lora[name]
            return cast(Tensor, self._parameters[name] + torch.bmm(pair.lora_B, pair.lora_A) * pair.scaling)

        return property(adapted)

    members: dict[str, Any] = {name: read(name) for name in sorted(names)}
    plain = getattr(kind, "lora_of", kind)
    return type(f"LoRA{plain.__name__}", (plain,), members | {"lora_of": plain, "__module__": plain.__module__})


class StackedAdapter(nn.Module):
    """The adapters of a stack of weights. lora_A [experts, rank, n], lora_B [experts, m, rank]"""

    def __init__(self, like: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        experts, rows, columns = like.shape
        self.scaling = alpha / rank
        self.rank, self.alpha = rank, alpha
        self.lora_A = nn.Parameter(like.new_empty(experts, rank, columns).uniform_(-1, 1) / math.sqrt(columns))
        self.lora_B = nn.Parameter(like.new_zeros(experts, rows, rank))


def _matched(model: nn.Module, ranks: Mapping[str, int]) -> dict[str, int]:
    """The layers and stacked weights that the patterns name, each once, with the rank of its adapter."""
    if not isinstance(ranks, Mapping) or not ranks:
        raise GraphparError('lora takes a mapping of patterns to ranks, such as {"layers.*.self_attn.q_proj": 8}.')
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = ModelNames(
        {path: type(module).__name__ for path, module in modules.items()},
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
    )
    found: dict[str, int] = {}
    by: dict[int, tuple[str, int]] = {}
    for pattern, rank in ranks.items():
        if not isinstance(pattern, str):
            raise GraphparError(
                f"The adapters' pattern {pattern!r} is not a string; write a pattern such as 'layers.*.q_proj'."
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise GraphparError(
                f"The adapters of {pattern!r} have rank {rank!r}; a rank is a whole number of at least 1."
            )
        paths = matching(pattern, names.paths())
        if not paths:
            raise GraphparError(matches_nothing(pattern, names, "The adapters' pattern"))
        for path in paths:
            target = modules.get(path, parameters.get(path))
            _check_adaptable(model, path, target, pattern)
            before = by.setdefault(id(target), (pattern, rank))
            if before[1] != rank:
                raise GraphparError(
                    f"{path!r} has adapters of rank {before[1]} by {before[0]!r} and of rank {rank} by {pattern!r}; give one of them."
                )
            if before == (pattern, rank) and not any(modules.get(p, parameters.get(p)) is target for p in found):
                found[path] = rank
    return found


def _check_adaptable(model: nn.Module, path: str, target: object, pattern: str) -> None:
    if isinstance(target, nn.Parameter):
        if target.ndim != 3:
            raise GraphparError(
                f"The adapters' pattern {pattern!r} matches the parameter {path!r} {list(target.shape)}; of parameters only stacked "
                "weights [experts, m, n] have adapters: name the module that it belongs to."
            )
        return
    if isinstance(target, _READ_BY_OWNERS):
        raise GraphparError(
            f"{path!r} can't have an adapter: the module it belongs to reads its weight without calling it, so an adapter would do nothing."
        )
    if not isinstance(target, nn.Linear) and not _is_conv1d(target):
        below = [
            path_under(path, name)
            for name, child in cast(nn.Module, target).named_modules()
            if name and (isinstance(child, nn.Linear) or _is_conv1d(child))
        ]
        inside = f" It has {listed(below, 6)}." if below else ""
        raise GraphparError(
            f"The adapters' pattern {pattern!r} matches {path!r} ({type(target).__name__}), which is not a matrix product: adapters are "
            f"for nn.Linear, for transformers' Conv1D and for stacked weights of experts.{inside}"
        )
    if hasattr(target, "lora_A"):
        raise GraphparError(f"{path!r} has an adapter already.")


def _is_conv1d(module: object) -> bool:
    """Whether this is a product by a weight [in, out], as ``transformers`` has it in GPT-2."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(module, nn.Module)


def _adapt(model: nn.Module, path: str, rank: int, alpha: float, dropout: float) -> None:
    owner, _, name = path.rpartition(".")
    parent: Any = model.get_submodule(owner)
    target: Any = getattr(parent, name) if path else model
    if isinstance(target, nn.Parameter):
        if not hasattr(parent, "lora"):
            parent.lora = nn.ModuleDict()
        parent.lora[name] = StackedAdapter(target.detach(), rank, alpha)
        parent.__class__ = _with_adapted_weights(type(parent), frozenset(parent.lora))  # type: ignore[arg-type]
        return
    weight = target.weight
    columns, rows = weight.shape if _is_conv1d(target) else reversed(weight.shape)
    target.__class__ = _with_adapter(type(target))  # type: ignore[arg-type]
    target.lora_A = nn.Linear(columns, rank, bias=False, device=weight.device, dtype=weight.dtype)
    target.lora_B = nn.Linear(rank, rows, bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(target.lora_B.weight)
    target.lora_dropout = nn.Dropout(dropout) if dropout else None
    target.lora_alpha, target.scaling = alpha, alpha / rank
