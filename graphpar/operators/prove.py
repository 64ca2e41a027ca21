"""Prove a rule by execution: compare the operator on shards with the operator on whole tensors, forward and backward.

    call ──placements──► each: shard the operands by their types, run every rank, compare its results and its operands' gradients

What each rank's gradient must be follows from the type: of S a shard, of P and I the whole, of R a summand. So one comparison
proves the placement for every program. Everything runs in one process, in the dtype of the operands (give float64).
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import value_of
from graphpar.operators.placement import (
    Context,
    Placement,
    can_shard,
    operands_of,
    result_sizes,
    results_of,
    sizes_of,
    sums,
)
from graphpar.operators.rank_threads import on_ranks
from graphpar.operators.rewrite import REWRITES, CallSpecs, on_pieces
from graphpar.runtime.layout import ExpertRows, I, P, Shard, Type, joined, local_size, shard_of

_AXIS = "tp"
_SOME_ROWS = "some_rows"  # rows of experts by the offsets of a neighbour
Place = Callable[[fx.Node, Context], list[Placement]]


@dataclass
class Call:
    """A call of an operator with tensors that have values.

    Attributes:
        batch: the batch size; dims whose size is a multiple of it follow the batch.
        used: which of several results have users; all of them where None.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    used: tuple[int, ...] | None = None

    def __str__(self) -> str:
        name = getattr(self.target, "__name__", self.target)
        words = [*map(str, _shapes(self.args)), *(f"{key}={item}" for key, item in _shapes(self.kwargs).items())]
        return f"{name}({', '.join(words)})" + (f" batch {self.batch}" if self.batch else "")


def _shapes(value: Any) -> Any:
    def text(leaf: Any) -> Any:
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, Tensor) else leaf

    return torch.utils._pytree.tree_map(text, value)


@dataclass(frozen=True)
class Proof:
    """The outcome for one placement; ``problem`` is empty where it was proven."""

    call: Call
    node: fx.Node
    placement: Placement
    degree: int
    problem: str


def tensors_in(value: Any) -> list[Tensor]:
    """List all tensors in nested arguments, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def node_of(call: Call) -> tuple[fx.Node, list[Tensor]]:
    """Make a node of the call, with placeholders for its tensors; return it and their values in the order of ``operands_of``."""
    graph = fx.Graph()

    def placeholder(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        made = graph.placeholder(f"t{len(graph.nodes)}")
        _describe(made, tensor, call.batch)
        made.meta["real"] = tensor
        return made

    args = torch.utils._pytree.tree_map(placeholder, call.args)
    kwargs = torch.utils._pytree.tree_map(placeholder, call.kwargs)
    node = graph.call_function(call.target, tuple(args), dict(kwargs))
    result = call.target(*call.args, **call.kwargs)
    if isinstance(result, Tensor):
        _describe(node, result, call.batch)
    else:
        node.meta["val"] = tuple(part.detach().to("meta") if isinstance(part, Tensor) else part for part in result)
        for index, part in enumerate(result):
            if isinstance(part, Tensor) and (call.used is None or index in call.used):
                _describe(graph.call_function(operator.getitem, (node, index)), part, call.batch)
    return node, [operand.meta["real"] for operand in operands_of(node)]


def _describe(node: fx.Node, tensor: Tensor, batch: int | None) -> None:
    node.meta["val"] = tensor.detach().to("meta")
    if batch is not None:
        node.meta["batch_coefficients"] = tuple(
            size // batch if size and size % batch == 0 else None for size in tensor.shape
        )


def offers(node: fx.Node, index: int, degree: int) -> list[Shard]:
    """List every kind of sharding that a neighbour might give a value: even, padded, by periods and by unequal parts."""
    sizes = sizes_of(node) if isinstance(value_of(node), Tensor) else result_sizes(node)[index]
    found = []
    for dim, size in enumerate(sizes or ()):
        n = size[0]
        unequal = (degree, n - degree) if n % degree == 0 and n > 2 * degree and size[1] == 0 else ()
        for parts in ((), (n,), (n // 2,), (degree,), unequal):
            shard = Shard(dim, parts)
            plain = not parts or (all(part > 0 for part in parts) and (parts != (n,) or size[1] == 1))
            if plain and n > 0 and can_shard(size, shard, degree, padded=True):
                found.append(shard)
    return list(dict.fromkeys(found))


def context_of(degree: int, offered: bool = True, replicas: bool = False) -> Context:
    """Make the context for a rule; every float has a gradient. ``replicas``: the axis divides the rows of the batch."""
    return Context(
        degree,
        lambda node, index: offers(node, index, degree) if offered else [],
        lambda node: any(sums(tensor) for tensor in results_of(node)),
        tuple(REWRITES),
        lambda node, index: [ExpertRows(offsets=_SOME_ROWS)] if offered else [],
        replicas,
    )


def prove(call: Call, place: Place, degree: int = 2, seed: int = 0, replicas: bool = False) -> Iterator[Proof]:
    """Yield a proof for each placement of the call that shards or sums something; ``replicas`` as for :func:`context_of`."""
    node, values = node_of(call)
    trial = None
    for placement in place(node, context_of(degree, replicas=replicas)):
        if not placement.divides and P not in (*placement.operands, *placement.results):
            continue
        trial = trial or Trial(node, values, seed)
        yield Proof(call, node, placement, degree, trial.problem(placement, degree))


class Trial:
    """An operator and what it gives on whole tensors, to compare placements with."""

    def __init__(self, node: fx.Node, values: Sequence[Tensor], seed: int = 0) -> None:
        self.node, self.seed = node, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.values = [value.detach() for value in values]
        specs = _unsharded(node)
        self.smooth = [sums(value) for value in self.values]
        self.smooth = self._differentiable(specs)
        leaves = self._leaves(self.values)
        self.results = self._run(leaves, specs, 0)
        self.used = [sizes is not None for sizes in result_sizes(node)]
        self.gradients = [
            self._random(r) if r.requires_grad and used else None for r, used in zip(self.results, self.used)
        ]
        self.true = self._backward(self.results, self.gradients, leaves)
        self.results = [result.detach() for result in self.results]
        self.limit = _precision([*self.values, *self.results])

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Run the unchanged operator on other tensors."""
        return self._run([value.detach() for value in values], _unsharded(self.node), 0)

    def problem(self, placement: Placement, degree: int) -> str:
        """Say why the placement is wrong; empty if it is right."""
        try:
            return self._problem(placement, degree)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"

    # ---- one placement ----

    def _problem(self, placement: Placement, degree: int) -> str:
        if len(placement.operands) != len(self.values) or len(placement.results) != len(self.results):
            return "the placement does not fit the operator"
        given = [self._split(v, kind, degree, True) for v, kind in zip(self.values, placement.operands)]
        required = [
            [None] * degree if g is None else self._split(g, _gradient(kind), degree, False)
            for g, kind in zip(self.gradients, placement.results)
        ]
        specs = CallSpecs(
            {_AXIS: degree},
            tuple((kind,) for kind in placement.operands),
            tuple((kind,) for kind in placement.results),
            (placement.rewrite,),
        )

        def rank(index: int) -> tuple[list[Tensor], list[Tensor | None]]:
            leaves = self._leaves([pieces[index] for pieces in given])
            results = self._run(leaves, specs, index)
            return results, self._backward(results, [gradients[index] for gradients in required], leaves)

        if placement.rewrite and REWRITES[placement.rewrite].together:
            emitted = [module for name, module in sys.modules.items() if name.startswith("graphpar.emitted.")]
            ranks = on_ranks(rank, degree, emitted)
        else:
            ranks = [rank(index) for index in range(degree)]
        for number, kind in enumerate(placement.results):
            if not self.used[number]:
                continue  # without users its type does not matter
            pieces = [results[number].detach() for results, _ in ranks]
            problem = _differs(pieces, self.results[number], kind, self.limit)
            if problem:
                return f"result {number} ({kind}): {problem}"
        for number, kind in enumerate(placement.operands):
            true, found = self.true[number], [gradients[number] for _, gradients in ranks]
            if true is None and all(gradient is None for gradient in found):
                continue
            whole = torch.zeros_like(self.values[number]) if true is None else true
            shapes = [pieces.shape for pieces in given[number]]
            pieces = [torch.zeros(s, dtype=whole.dtype) if g is None else g for g, s in zip(found, shapes)]
            problem = _differs(pieces, whole, _gradient(kind), self.limit, padding=True)
            if problem:
                return f"gradient of operand {number} ({kind}): {problem}"
        return ""

    # ---- running ----

    def _leaves(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.clone().requires_grad_(smooth) for value, smooth in zip(values, self.smooth)]

    def _differentiable(self, specs: CallSpecs) -> list[bool]:
        """Find the operands that torch has a gradient for: all floats, or where that fails each one that works alone."""
        floats = list(self.smooth)
        alone = [[index == at for index in range(len(floats))] for at, smooth in enumerate(floats) if smooth]
        found = [False] * len(floats)
        for required in [floats, *alone]:
            self.smooth = required
            leaves = self._leaves(self.values)
            try:
                results = self._run(leaves, specs, 0)
                self._backward(results, [torch.ones_like(r) if r.requires_grad else None for r in results], leaves)
            except (RuntimeError, NotImplementedError):
                continue
            if required is floats:
                return floats
            found = [a or b for a, b in zip(found, required)]
        return found

    def _run(self, leaves: Sequence[Tensor], specs: CallSpecs, index: int) -> list[Tensor]:
        feed = iter(leaves)
        operands = operands_of(self.node)
        assert len(operands) == len(leaves)
        # An operand that is passed twice is two placeholders, so each leaf is taken once.
        args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), lambda _: next(feed))

        def emit(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "sharded" in kwargs:
                kwargs = kwargs | {
                    "sharded": [(d, index, specs.degrees[axis], parts) for d, axis, parts in kwargs["sharded"]]
                }
            return target(*args, **kwargs)

        return tensors_in(on_pieces(self.node, args, kwargs, specs, emit))

    def _backward(
        self, results: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        pairs = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not inputs:
            return [None] * len(leaves)
        outputs, required = zip(*pairs)
        found = iter(torch.autograd.grad(outputs, inputs, required, allow_unused=True))
        dense = [None if not leaf.requires_grad else next(found) for leaf in leaves]
        return [gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient for gradient in dense]

    # ---- pieces ----

    def _split(self, value: Tensor, kind: Type, degree: int, garbage: bool) -> list[Tensor]:
        """Return each rank's part of a value of this type. Padding is arbitrary in operands (``garbage``), zero in gradients."""
        if isinstance(kind, ExpertRows):
            return list(value.split(self._rows(kind, value.shape[0], degree)))
        if isinstance(kind, Shard):
            pieces = [shard_of(value, kind, degree, index).clone() for index in range(degree)]
            if garbage and not kind.parts and value.is_floating_point():
                ones = torch.ones(value.shape, dtype=torch.bool)
                for index, piece in enumerate(pieces):
                    padding = ~shard_of(ones, kind, degree, index)
                    piece[padding] = self._random(piece)[padding].relu()  # zeros, too
            return pieces
        if kind is not P:
            return [value] * degree
        summands = [self._random(value) for _ in range(degree - 1)]
        return [*summands, value - sum(summands)]  # type: ignore[list-item]

    def _rows(self, kind: ExpertRows, size: int, degree: int) -> list[int]:
        """Return how many rows each rank has: by the operand that counts them, else very uneven numbers, zero among them."""
        counts = [value for operand, value in zip(operands_of(self.node), self.values) if operand.name == kind.offsets]
        some = ([0] * (degree > 2) + [min(1, size)] + [size] * degree)[:degree]
        ends = counts[0].view(degree, -1)[:, -1].tolist() if counts else some
        return [end - begin for begin, end in itertools.pairwise([0, *ends])]

    def _random(self, like: Tensor) -> Tensor:
        if sums(like):
            return torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like.dtype)
        return torch.randint(-3, 4, like.shape, generator=self.generator).to(like.dtype)


def _unsharded(node: fx.Node) -> CallSpecs:
    return CallSpecs({}, tuple(() for _ in operands_of(node)), tuple(() for _ in results_of(node)), ())


def _gradient(kind: Type) -> Type:
    """Return the type of a value's gradient."""
    if isinstance(kind, Shard) or kind is I:
        return kind
    return {"R": P}.get(kind.letter, I)


def _differs(pieces: Sequence[Tensor], whole: Tensor, kind: Type, limit: float, padding: bool = False) -> str:
    """Say how the ranks' parts differ from ``whole``; empty if they agree. ``padding``: it must be zero."""
    degree = len(pieces)
    if isinstance(kind, ExpertRows):
        pairs = [(torch.cat(list(pieces)), whole)]
    elif isinstance(kind, Shard):
        size = whole.shape[kind.dim]
        if any(piece.shape[kind.dim] != local_size(size, kind, degree) for piece in pieces):
            return f"pieces of {[list(piece.shape) for piece in pieces]} of {list(whole.shape)}"
        if not all(piece.isfinite().all() for piece in pieces) and whole.isfinite().all():
            return "the padding is not finite"
        if padding:
            pairs = [(piece, shard_of(whole, kind, degree, index)) for index, piece in enumerate(pieces)]
        else:
            pairs = [(joined(pieces, kind, size), whole)]
    elif kind is P:
        if any(piece.shape != whole.shape for piece in pieces):
            return f"summands of {list(pieces[0].shape)} of {list(whole.shape)}"
        pairs = [(sum(pieces[1:], pieces[0]), whole)]
    else:
        pairs = [(piece, whole) for piece in pieces]
    for piece, expected in pairs:
        if piece.shape != expected.shape or piece.dtype != expected.dtype:
            return f"{piece.dtype}{list(piece.shape)} instead of {expected.dtype}{list(expected.shape)}"
        if not _close(piece, expected, limit):
            return "other values"
    return ""


def _close(piece: Tensor, expected: Tensor, limit: float) -> bool:
    if not sums(expected):
        return torch.equal(piece, expected)
    return torch.allclose(piece, expected, rtol=limit, atol=limit, equal_nan=True)


def _precision(tensors: Sequence[Tensor]) -> float:
    """Return the tolerance that the coarsest of the dtypes allows."""
    known = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4}
    return max((known.get(t.dtype, 5e-2) for t in tensors if sums(t)), default=1e-7)
