"""Operators without a rule are tried: run whole and on parts of a small random batch, do they give the same rows?

    f(x)  ==  cat(f(x[:1]), f(x[1:]))     rows stay rows
    f(x)  ==  f(x[:1]) + f(x[1:])         a sum over examples

A user's own operator is tried backward, too: nothing says that its backward is the derivative of its forward.

Floating-point arguments only: integers choose places, where chance proves nothing. What can't be tried is not proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, concrete_shape, is_of_torch, operator_name, value_of
from graphpar.operators.batch_states import Additive, Operands, Rows, State

_BATCH, _CUTS, _LARGEST = 4, ((1, 3), (2, 2), (3, 1)), 1 << 20


def probe(node: fx.Node, operands: Operands, pure: bool) -> State | None:
    """The state of ``node``'s results if running it proves one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not _tried(node):
        return None
    rows = {a: s for a, s in operands if isinstance(s, Rows)}
    plain = all((s.outer, s.inner, s.order, s.kind) == (1, 1, None, "values") for s in rows.values())
    results = _used(node)
    dims = [[d for d, c in enumerate(batch_coefficients(result)) if c is not None] for result in results.values()]
    alike = len({tuple(own) for own in dims}) == 1 and (len(results) == 1 or dims[0])
    if not rows or len(rows) < len(operands) or not plain or not alike or len(dims[0]) > 1:
        return None
    try:
        proven = all(_holds(node, rows, list(results), dims[0], seed) for seed in (0, 1))
    except Exception:
        return None
    if not proven:
        return None
    return Rows(dims[0][0], pure=pure) if dims[0] else Additive(pure)


def sums_gradients(node: fx.Node) -> bool:
    """Whether the backward of a user's operator on fixed values may run once a microbatch, each with its part of the gradient."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_of_torch(target):
        return True
    generator = torch.Generator().manual_seed(0)
    arguments = {argument: _sample(argument, generator) for argument in node.all_input_nodes}
    if not _tried(node) or any(value is None for value in arguments.values()):
        return False
    try:
        results, leaves = _run(node, {a: v for a, v in arguments.items() if v is not None}, list(_used(node)))
        first = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
        second = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
        both = _gradients(results, leaves, [a + b for a, b in zip(first, second)])
        one, other = (_gradients(results, leaves, given) for given in (first, second))
    except Exception:
        return False
    return all(_near(both[leaf], one[leaf] + other[leaf]) for leaf in both)


def _tried(node: fx.Node) -> bool:
    """Whether an operator can be run on random numbers."""
    assert isinstance(node.target, torch._ops.OpOverload)
    value = value_of(node)
    parts = value if isinstance(value, tuple | list) else [value]
    smooth = all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
    return smooth and not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _used(node: fx.Node) -> dict[int, fx.Node]:
    """The results that somebody takes, by their positions."""
    if isinstance(value_of(node), Tensor):
        return {0: node}
    return {int(user.args[1]): user for user in node.users if operator_name(user) == "getitem"}  # type: ignore[arg-type]


def _holds(node: fx.Node, rows: dict[fx.Node, Rows], used: Sequence[int], dims: Sequence[int], seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    arguments = {argument: _sample(argument, generator) for argument in node.all_input_nodes}
    if any(value is None for value in arguments.values()):
        return False

    def run(begin: int, end: int) -> tuple[list[Tensor], dict[fx.Node, Tensor]]:
        parts = {
            a: v.narrow(rows[a].dim, begin, end - begin) if a in rows else v
            for a, v in arguments.items()
            if v is not None
        }
        return _run(node, parts, used)

    whole, leaves = run(0, _BATCH)
    if any(result.isnan().any() for result in whole):
        return False
    own = not is_of_torch(node.target)
    given = [torch.randn(result.shape, generator=generator).to(result.dtype) for result in whole]
    gradients = _gradients(whole, leaves, given) if own else {}
    for first, _ in _CUTS:
        places = ((0, first), (first, _BATCH))
        ran = [run(begin, end) for begin, end in places]
        for index, result in enumerate(whole):
            parts = [results[index] for results, _ in ran]
            if not _near(torch.cat(parts, dims[0]) if dims else parts[0] + parts[1], result):
                return False
        if own:
            cut = [[g.narrow(dims[0], begin, end - begin) if dims else g for g in given] for begin, end in places]
            found = [_gradients(results, theirs, own_) for (results, theirs), own_ in zip(ran, cut)]
            for a, gradient in gradients.items():
                pieces = [part[a] for part in found]
                if not _near(torch.cat(pieces, rows[a].dim) if a in rows else pieces[0] + pieces[1], gradient):
                    return False
    return True


def _run(
    node: fx.Node, values: dict[fx.Node, Tensor], used: Sequence[int]
) -> tuple[list[Tensor], dict[fx.Node, Tensor]]:
    """The results that are used, and the leaves that they were made of."""
    assert callable(node.target)
    leaves = {argument: value.detach().clone().requires_grad_() for argument, value in values.items()}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), leaves.__getitem__)
    with torch.enable_grad():
        made = node.target(*args, **kwargs)
    parts = made if isinstance(made, tuple | list) else [made]
    return [parts[index] for index in used], leaves


def _gradients(
    results: Sequence[Tensor], leaves: dict[fx.Node, Tensor], given: Sequence[Tensor]
) -> dict[fx.Node, Tensor]:
    pairs = [(result, gradient) for result, gradient in zip(results, given) if result.requires_grad]
    if not pairs:
        return {argument: torch.zeros_like(leaf) for argument, leaf in leaves.items()}
    outputs, wanted = zip(*pairs)
    found = torch.autograd.grad(outputs, list(leaves.values()), wanted, allow_unused=True, retain_graph=True)
    return {a: torch.zeros_like(leaf) if g is None else g for (a, leaf), g in zip(leaves.items(), found)}


def _near(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def _sample(node: fx.Node, generator: torch.Generator) -> Tensor | None:
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    shape = concrete_shape(node, _BATCH)
    if math.prod(shape) > _LARGEST:
        return None
    return torch.randn(shape, generator=generator).to(value.dtype)
