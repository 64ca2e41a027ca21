"""The functions of a program's ``parallel_products.py`` against the collectives and products that they are, on numbers.

    each rank is a thread ──► results and gradients of all ranks ──► those of the parts of the composite operator

For ``check``, which types these functions as their parts.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.emitted import collectives
from graphpar.operators.composite import Sample
from graphpar.operators.rank_threads import on_ranks
from graphpar.operators.table import COMPOSITES

_MOST = 4
"""Ranks of a proof: the functions treat all alike, so that no longer ring shows more."""
_PATIENCE_S = 10.0


def product_problems(module: ModuleType, mesh: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the functions of ``module`` that are made of collectives; nothing where they do what they should."""
    problems = []
    for name, composite in COMPOSITES.items():
        if not composite.composed or not hasattr(module, name):
            continue
        for sample in composite.samples:
            arguments, _ = sample(_draw(0, 0))
            count = min(next(mesh[item] for item in arguments if isinstance(item, str)), _MOST)
            parts = functools.partial(composite.parts, collectives)
            problem = _difference(module, getattr(module, name), parts, sample, count)
            if problem:
                problems.append(f"{module.__name__.rpartition('.')[2]}.py: on {count} ranks {name} {problem}")
    return problems


def _draw(seed: int, rank: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def _difference(
    module: ModuleType, function: Callable[..., Any], parts: Callable[..., Any], sample: Sample, count: int
) -> str:
    """Say how ``function`` differs from ``parts``; empty where it does not."""

    def made(called: Callable[..., Any], rank: int) -> tuple[list[Tensor], list[Tensor]]:
        arguments = tree_map(lambda x: x.requires_grad_() if isinstance(x, Tensor) else x, sample(_draw(1, rank)))
        results = tree_leaves(called(*arguments[0], **arguments[1]))
        draw, leaves = _draw(2, rank), [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        return results, list(torch.autograd.grad(results, leaves, [draw(*result.shape) for result in results]))

    sources = {each.__module__ for each in vars(module).values() if isinstance(each, FunctionType)}
    modules = [module, collectives, *(sys.modules[name] for name in sorted(sources) if name in sys.modules)]
    expected = on_ranks(functools.partial(made, parts), count, modules)
    try:
        found = on_ranks(functools.partial(made, function), count, modules, _PATIENCE_S)
    except threading.BrokenBarrierError:
        return "leaves a rank waiting for another"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    for ours, theirs in zip(found, expected):
        for what, one, other in zip(("results", "gradients"), ours, theirs):
            if not all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(one, other, strict=True)):
                return f"gives other {what} than the collective and the products"
    return ""
