"""Modules of a model that are built alike: the same classes, parameters, buffers and settings, all the way down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 6
"""Fewer modules that are alike are each traced."""


def siblings(model: nn.Module) -> list[list[nn.Module]]:
    """List the groups of at least ``LEAST`` modules that are alike, the outermost ones; none where a module has two names."""
    named = list(model.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in named}) != len(named):
        return []
    kinds: dict[Hashable, int] = {}
    kind_of: dict[int, int] = {}
    for _, module in reversed(named):  # children first
        kind_of[id(module)] = kinds.setdefault(_described(module, kind_of), len(kinds))
    count = Counter(kind_of.values())
    groups: dict[int, list[nn.Module]] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            kind = kind_of[id(child)]
            if (
                count[kind] >= LEAST
                and next(child.children(), None) is not None
                and type(child).forward is not nn.Module.forward
            ):
                groups.setdefault(kind, []).append(child)
            else:
                visit(child)

    visit(model)
    plain = (group for group in groups.values() if not any(isinstance(each, torch.jit.ScriptModule) for each in group))
    return [group for group in plain if len(group) >= LEAST]


def _described(module: nn.Module, kind_of: dict[int, int]) -> Hashable:
    tensors = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    )
    children = tuple((name, None if child is None else kind_of[id(child)]) for name, child in module._modules.items())
    settings = tuple((key, _setting(value)) for key, value in vars(module).items() if not key.startswith("_"))
    return type(module), tensors, children, settings


def _setting(value: Any) -> Hashable:
    """What of an attribute tells modules apart; numbers do not, since many a module has its own."""
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape)
    if type(value) in (bool, str, float, type(None), torch.dtype):
        return type(value), repr(value)
    return (type(value),)
