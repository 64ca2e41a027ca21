"""Find the rule of an operator that has none by running it on small random tensors, whole and sharded.

    mylib::scaled(x [b, s, d], w [d])     shard b: same rows     shard d of both: same columns     so its rule is "b s d, d -> b s d"

A sharding that holds forward and backward, on several shapes, in even and in unequal parts, enters the operator's rule. What fails
or can't be run is not sharded. Trials run in a forked process. The same operator on the same sizes always gives the same rule.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.program import is_of_torch, operator_name, value_of
from graphpar.operators.notation import Factors, Rule
from graphpar.operators.placement import Placement, Size, operands_of, sizes_of, sums
from graphpar.operators.prove import Call, Trial, node_of
from graphpar.runtime.layout import P, R, Shard, Type, shard_of

_SMALL = ((6, 10, 14, 18, 22, 26, 30), (10, 6, 18, 14, 26, 22, 34), (4, 12, 8, 20, 16, 28, 24))
"""The sizes used in place of the operator's, for three trials; in two of them their halves are odd."""
_LARGEST, _MOST, _BATCH, _LONGEST_S = 1 << 18, 400, 4, 60.0
_Dims = tuple[int | None, ...]  # for each operand (or result) the dim that is sharded


@dataclass(frozen=True)
class Discovery:
    """The outcome of trying an operator; ``rule`` is None where nothing could be sharded."""

    operator: str
    rule: Rule | None
    sums_gradients: bool = True  # whether the backward of a sum of gradients is the sum of their backwards


_FOUND: dict[Any, Discovery] = {}
"""By operator, sizes and literals. They decide the outcome, so programs share it."""


def discovered(nodes: Iterable[fx.Node]) -> dict[str, tuple[str, ...]]:
    """List the rules found for operators among ``nodes``, by name; an empty list where nothing of an operator can be sharded."""
    found: dict[str, dict[str, None]] = {}
    for node in nodes:
        if _can_be_tried(node) and (known := _FOUND.get(_key(node))) is not None:
            found.setdefault(known.operator, {}).update({} if known.rule is None else {str(known.rule): None})
    return {operator: tuple(sorted(found[operator])) for operator in sorted(found)}


def discover(node: fx.Node) -> Rule | None:
    """Find the rule of an operator by running it; None where nothing is proven."""
    if not _can_be_tried(node):
        return None
    key = _key(node)
    if key not in _FOUND:
        _FOUND[key] = Discovery(
            operator_name(node), *(_isolated(lambda: _tried(node)) or (None, is_of_torch(node.target)))
        )
    return _FOUND[key].rule


def sums_gradients(node: fx.Node) -> bool:
    """Whether the backward is linear, so that ranks may run it on partial gradients: a user's backward may clip or round them."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_of_torch(node.target):
        return True
    discover(node)
    return _can_be_tried(node) and _FOUND[_key(node)].sums_gradients


def _can_be_tried(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    operands = operands_of(node)
    parts = value_of(node) if isinstance(value_of(node), tuple | list) else [value_of(node)]
    tensors = bool(operands) and all(isinstance(part, Tensor) for part in parts)
    static = all(argument in operands for argument in node.all_input_nodes)
    sizes = [size for operand in operands for size in sizes_of(operand)]
    return not tags & set(target.tags) and tensors and static and all(size[1] <= 1 for size in sizes)


def _key(node: fx.Node) -> Any:
    operands = operands_of(node)
    place = iter(range(len(operands)))
    literals = fx.map_arg((node.args, dict(node.kwargs)), lambda _: slice(next(place)))  # type: ignore[arg-type, return-value]
    return str(node.target), tuple((sizes_of(o), value_of(o).dtype) for o in operands), repr(literals)


_Outcome = tuple[Rule | None, bool]


def _isolated(work: Callable[[], _Outcome | None]) -> _Outcome | None:
    """Run ``work`` in a fork of this process: an operator that does not check its shapes may crash.

    Where that has no gradients ``work`` runs here, too, once it is known not to crash.
    """
    if not sys.platform.startswith("linux"):
        return work()
    copies = multiprocessing.get_context("fork")
    receiver, sender = copies.Pipe(duplex=False)

    def child() -> None:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        faulthandler.disable()  # it may write to another file than stderr
        torch.set_num_threads(1)  # threads don't survive the copy
        sender.send((work(), _has_gradients()))

    process = copies.Process(target=child)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    try:
        found, has_gradients = receiver.recv() if receiver.poll(_LONGEST_S) else (None, True)
    except EOFError:  # it died
        found, has_gradients = None, True
    process.kill()
    process.join()
    return work() if found is not None and not has_gradients else found


def _has_gradients() -> bool:
    """Tell whether autograd works in this process: not in a fork of one where it has threads of its own, as it has for GPUs."""
    with unset_fake_temporarily(), torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        try:
            torch.autograd.grad(x * 2, x)
        except RuntimeError:
            return False
    return True


# ---- trials ----------------------------------------------------------------------------------------------------


def _tried(node: fx.Node) -> _Outcome | None:
    with unset_fake_temporarily(), torch.enable_grad():
        for double in (True, False):
            for sample in (_scaled, _original):
                trials = [made for seed in range(3) if (made := _trial(node, sample(node, seed), double, seed))]
                if len(trials) == 3:
                    return _rule(trials), all(
                        not trial.problem(_summands(trial), degree) for trial in trials for degree in (2, 3)
                    )
    return None


def _summands(trial: Trial) -> Placement:
    return Placement((R,) * len(trial.values), (R,) * len(trial.results))


def _trial(node: fx.Node, sizes: Mapping[Size, int] | None, double: bool, seed: int) -> Trial | None:
    """Run the operator on random tensors, with its sizes replaced; None where it fails."""
    operands = operands_of(node)
    shapes = [concrete_shape(o, _BATCH) if sizes is None else [sizes[size] for size in sizes_of(o)] for o in operands]
    if sum(math.prod(shape) for shape in shapes) > _LARGEST:
        return None
    generator = torch.Generator().manual_seed(seed)
    below = min((size for shape in shapes for size in shape if size > 1), default=2)
    feed = iter([_random(o, s, below, double, generator) for o, s in zip(operands, shapes)])
    literals = {size[0]: small for size, small in (sizes or {}).items() if size[1] == 0 and size[0] > 8}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return next(feed)
        if isinstance(value, int) and not isinstance(value, bool):
            return literals.get(value, value)
        return value

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), argument)  # type: ignore[misc]
    try:
        return Trial(*node_of(Call(node.target, args, dict(kwargs))), seed)
    except Exception:
        return None


def _random(node: fx.Node, shape: Sequence[int], below: int, double: bool, generator: torch.Generator) -> Tensor:
    dtype = value_of(node).dtype
    if value_of(node).is_floating_point():
        return torch.randn(list(shape), generator=generator, dtype=torch.float64).to(torch.float64 if double else dtype)
    if value_of(node).is_complex():
        return torch.randn(list(shape), generator=generator, dtype=torch.complex128).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else below, list(shape), generator=generator).to(dtype)


def _scaled(node: fx.Node, seed: int) -> Mapping[Size, int] | None:
    """Equal sizes stay equal, and different ones differ."""
    different = list(dict.fromkeys(size for operand in operands_of(node) for size in sizes_of(operand)))
    small = iter(_SMALL[seed])
    return {size: 1 if size == (1, 0) else next(small, 2) for size in different}


def _original(node: fx.Node, seed: int) -> None:
    """Keep the operator's sizes: its literals may fit no others."""


# ---- from trials to a rule -------------------------------------------------------------------------------------


def _rule(trials: Sequence[Trial]) -> Rule | None:
    values, results = trials[0].values, trials[0].results
    factors: list[tuple[_Dims, _Dims]] = []
    taken: set[tuple[int, int]] = set()
    for dims in itertools.islice(_candidates(trials), _MOST):
        places = {(operand, dim) for operand, dim in enumerate(dims) if dim is not None}
        if places & taken:
            continue
        made = _holds(trials, dims)
        if made is not None:
            factors.append((dims, made))
            taken |= places
    linear = tuple(group for group in _groups(values) if _is_linear(trials, group))
    if not factors and not linear:
        return None
    rows = [[f"o{operand}_{dim}" for dim in range(value.ndim)] for operand, value in enumerate(values)]
    made_rows = [[f"r{number}_{dim}" for dim in range(result.ndim)] for number, result in enumerate(results)]
    fixed = {label for row in (*rows, *made_rows) for label in row}
    for number, (dims, made) in enumerate(factors):
        for tensors, places_ in ((rows, dims), (made_rows, made)):
            for row, dim in zip(tensors, places_):
                if dim is not None:
                    row[dim] = f"f{number}"
    return Rule(_frozen(rows), _frozen(made_rows), frozenset(fixed), linear=linear)


def _frozen(rows: Sequence[Sequence[str]]) -> tuple[Factors, ...]:
    return tuple(tuple(row) for row in rows)


def _candidates(trials: Sequence[Trial]) -> Iterator[_Dims]:
    """Choose dims of equal size, at most one of each operand, that might be one factor; those of fewest operands first."""
    shapes = [[tuple(value.shape) for value in trial.values] for trial in trials]
    options = [[None, *range(len(shape))] for shape in shapes[0]]
    found = []
    for dims in itertools.islice(itertools.product(*options), 100 * _MOST):
        sizes = [{shape[dim] for shape, dim in zip(each, dims) if dim is not None} for each in shapes]
        if all(len(each) == 1 and min(each) % 2 == 0 for each in sizes):
            found.append(dims)
    return iter(
        sorted(found, key=lambda dims: (sum(dim is not None for dim in dims), [-1 if d is None else d for d in dims]))
    )


def _holds(trials: Sequence[Trial], dims: _Dims) -> _Dims | None:
    """Find the dim of each result that is sharded (None: it is partial) when operands are sharded on ``dims``; None if they can't be."""
    made = _shapes_of_pieces(trials[0], dims)
    if made is None:
        return None
    for trial in trials:
        if any(dim is not None and dim >= result.ndim for dim, result in zip(made, trial.results)):
            return None
        size = next(v.shape[dim] for v, dim in zip(trial.values, dims) if dim is not None)
        ways: list[tuple[tuple[int, ...], int]] = [((), 2)]
        ways += [((2, size - 2), 2)] if size > 4 else []
        ways += [((), 4)] if size % 4 == 0 else []
        for parts, degree in ways:
            before: tuple[Type, ...] = tuple(R if dim is None else Shard(dim, parts) for dim in dims)
            after: tuple[Type, ...] = tuple(P if dim is None else Shard(dim, parts) for dim in made)
            if trial.problem(Placement(before, after), degree):
                return None
    return made


def _shapes_of_pieces(trial: Trial, dims: _Dims) -> _Dims | None:
    """Find which dim of each result shrinks when the operands are halved."""
    pieces = [v if dim is None else shard_of(v, Shard(dim), 2, 0) for v, dim in zip(trial.values, dims)]
    try:
        results = trial.run(pieces)
    except Exception:
        return None
    found: list[int | None] = []
    for result, whole in zip(results, trial.results):
        if result.ndim != whole.ndim:
            return None
        halved = [dim for dim in range(whole.ndim) if result.shape[dim] != whole.shape[dim]]
        if len(halved) > 1 or any(2 * result.shape[dim] != whole.shape[dim] for dim in halved):
            return None
        if not halved and not sums(whole):
            return None
        found.append(halved[0] if halved else None)
    return tuple(found)


def _groups(values: Sequence[Tensor]) -> list[frozenset[int]]:
    floats = [index for index, value in enumerate(values) if sums(value)]
    alone = [frozenset({index}) for index in floats]
    return [*alone, *([frozenset(floats)] if len(floats) > 1 else [])]


def _is_linear(trials: Sequence[Trial], group: frozenset[int]) -> bool:
    if not all(sums(result) for result in trials[0].results):
        return False
    for trial in trials:
        before = tuple(P if index in group else R for index in range(len(trial.values)))
        claim = Placement(before, (P,) * len(trial.results))
        # Several times, since |x| is linear where all summands have one sign.
        if any(trial.problem(claim, degree) for degree in (2, 3, 4) * 3):
            return False
    return True
