"""Operators without a rule are tried: run whole and on parts of a small random batch, do they give the same rows?

    f(x)  ==  cat(f(x[:1]), f(x[1:]))     rows stay rows
    f(x)  ==  f(x[:1]) + f(x[1:])         a sum over examples

Floating-point arguments only: integers choose places, where chance proves nothing. What can't be tried is not proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.batch_states import Additive, Operands, Rows, State, batch_dims_of
from graphpar.program import concrete_shape, value_of

_BATCH, _CUTS, _LARGEST = 4, ((1, 3), (2, 2), (3, 1)), 1 << 20


def probe(node: fx.Node, operands: Operands, pure: bool) -> State | None:
    """The state of ``node``'s result if running it proves one."""
    target, value = node.target, value_of(node)
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    rows = {a: s for a, s in operands if isinstance(s, Rows)}
    plain = all((s.outer, s.inner, s.order, s.kind) == (1, 1, None, "values") for s in rows.values())
    dims = batch_dims_of(node)
    if not rows or len(rows) < len(operands) or not plain or len(dims) > 1:
        return None
    try:
        proven = all(_holds(node, rows, dims, seed) for seed in (0, 1))
    except Exception:
        return None
    if not proven:
        return None
    return Rows(dims[0], pure=pure) if dims else Additive(pure)


def _holds(node: fx.Node, rows: dict[fx.Node, Rows], dims: Sequence[int], seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    arguments = {argument: _sample(argument, generator) for argument in node.all_input_nodes}
    if any(value is None for value in arguments.values()):
        return False

    def run(begin: int, end: int) -> Tensor:
        parts = {a: v.narrow(rows[a].dim, begin, end - begin) if a in rows else v for a, v in arguments.items() if v is not None}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), parts.__getitem__)
        result: Tensor = _function(node)(*args, **kwargs)
        return result

    whole = run(0, _BATCH)
    if whole.isnan().any():
        return False
    for first, _ in _CUTS:
        parts = [run(0, first), run(first, _BATCH)]
        together = torch.cat(parts, dims[0]) if dims else parts[0] + parts[1]
        if together.shape != whole.shape or not torch.allclose(together, whole, rtol=1e-4, atol=1e-5):
            return False
    return True


def _function(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _sample(node: fx.Node, generator: torch.Generator) -> Tensor | None:
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    shape = concrete_shape(node, _BATCH)
    if math.prod(shape) > _LARGEST:
        return None
    return torch.randn(shape, generator=generator).to(value.dtype)
