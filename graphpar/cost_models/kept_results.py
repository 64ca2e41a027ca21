"""What a block that is recomputed keeps: by a list of operators, or within a share of the bytes that it would keep otherwise.

    block ──a run on fake tensors──► each operator's result: bytes, and what it costs to make it again
                                           │
                             0-1 knapsack: the results that cost most, in the bytes allowed

Each operator whose result is not kept runs again, so the costs add up, and the knapsack is exact for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from graphpar.cost_models.activation_memory import Activations, Forward
from graphpar.cost_models.repeated_work import after_last
from graphpar.cost_models.storage_tracker import storage_of
from graphpar.cost_models.work import Collective, Phase, Traffic, Work
from graphpar.cost_models.workload import Works
from graphpar.emitted.collectives import watchers
from graphpar.emitted.pointwise import made_again
from graphpar.emitted.recomputation import NAMES, name_of
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.program import Block, Program, value_of
from graphpar.ir.recomputation import GATHERS, POINTWISE, Recomputation
from graphpar.operators.transitions import STARTS
from graphpar.runtime.option_kinds import share_of

FLOPS_A_BYTE = {2: 200, 4: 20, 8: 15}
"""How many flops take the time of a byte of memory, by bytes an element: on an A100 156, 10 and 10, on an H100 295, 20 and 20 (their
data sheets)."""
SENT_BYTES = 10
"""How many bytes of memory take the time of a byte that is sent; of an H100 and its NVLink 7, of a link between machines 67."""
ROWS = 8
"""The microbatch for which results are chosen, so that the choice is that of the program and not of a plan."""
_WAIT = "_c10d_functional.wait_tensor"
"""It returns what it waits for; on fake tensors a copy."""
_PARTS = 4096
"""The knapsack counts bytes in so many parts of all results' bytes, rounded up."""


@dataclass(frozen=True)
class Result:
    """What the main operator of a node makes, the number of its call, its bytes, and the cost to repeat the node.

    ``cost`` is in bytes of memory that take as long.
    """

    node: str
    operator: str
    number: int
    nbytes: int
    cost: int


@dataclass(frozen=True)
class Results:
    """The results of a block in the order of its forward, and its bytes kept for the backward: without recomputation, and with full.

    ``dispatched``: how many operators torch dispatches in the forward and in its repetition, without those that only ask for a tensor's
    properties or detach it.
    """

    results: tuple[Result, ...]
    kept: int
    given: int
    dispatched: tuple[int, int]

    def within(self, share: float) -> list[Result]:
        """Return the results that cost most to repeat, of which with what is given at most ``share`` of ``kept`` is kept."""
        return knapsack(self.results, int(share * self.kept) - self.given)


def knapsack(results: Sequence[Result], room: int) -> list[Result]:
    """Return those of the highest cost that take at most ``room`` bytes, and of several such choices the smallest."""
    worth = [result for result in results if result.cost > 0 and result.nbytes > 0]
    unit = max(1, -(-sum(result.nbytes for result in worth) // _PARTS))
    size = max(0, room) // unit
    best = np.zeros(size + 1, dtype=np.int64)
    taken = np.zeros((len(worth), size + 1), dtype=bool)
    for place, result in enumerate(worth):
        weight = -(-result.nbytes // unit)
        if weight <= size:
            with_it = best[: size + 1 - weight] + result.cost
            taken[place, weight:] = with_it > best[weight:]
            best[weight:] = np.maximum(best[weight:], with_it)
    left, chosen = int(np.argmax(best == best[-1])), []
    for place in range(len(worth) - 1, -1, -1):
        if taken[place, left]:
            chosen.append(worth[place])
            left -= -(-worth[place].nbytes // unit)
    return chosen[::-1]


def results_of(activations: Activations, works: Works, block: Block) -> Results:
    """Measure the operators of a block of a rank's program, each for :data:`ROWS` rows."""
    noted, saved = _Noted(activations), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with activations.ready():
        placeholders = [node for node in block.graph.nodes if node.op == "placeholder"]
        given = [_given(works, block, node) for node in placeholders]
        with saved_tensors_hooks(note, lambda tensor: tensor):
            made = noted.run_graph(block.graph, f"{block.instances[0]}.", given)
        whole = *activations.state.values(), *activations.copies.values()
        parameters = {storage_of(tensor) for tensor in whole}
        entering = [tensor for tensor in given if isinstance(tensor, Tensor)]
        shared = {storage_of(tensor) for tensor in entering if not tensor.requires_grad}
        kept = sum(nbytes for key, nbytes in saved.items() if key not in parameters | shared)
    del made
    never = after_last(works, block)
    costs = {node.name: 0 if node.name in never else _cost(works, block, node) for node in block.graph.nodes}
    results = [Result(name, *_main(calls), costs[name]) for name, calls in noted.calls.items() if calls]
    own = sum(tensor.untyped_storage().nbytes() for tensor in entering if tensor.requires_grad)
    again = sum(number for name, number in noted.dispatched.items() if name not in never)
    return Results(tuple(results), kept, own, (noted.dispatched.total(), again))


def _main(calls: Sequence[tuple[str, int, int]]) -> tuple[str, int, int]:
    """Return the operator that does the work of a node: others only lay out what it takes or makes, or read it."""
    return next((call for call in reversed(calls) if call[0] in NAMES.values()), calls[-1])


def _given(works: Works, block: Block, node: fx.Node) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return value
    rows = ROWS if works.program.symbolic else works.program.batch
    floating = value.is_floating_point() and works.has_gradient(node, block.name)
    return torch.empty(concrete_shape(node, rows), dtype=value.dtype).requires_grad_(floating)


def _cost(works: Works, block: Block, node: fx.Node) -> int:
    others = {other.name for other in block.graph.nodes} - {node.name}
    rows = ROWS if works.program.symbolic else works.program.batch
    return int(sum(_bytes_for(work, rows) for work in _forward(works.block(block, others))))


def _forward(work: Work) -> Iterator[Work]:
    for row, times in work.rows.items():
        if row.phase is Phase.FORWARD:
            yield Work({row: times})


def _bytes_for(work: Work, rows: int) -> float:
    (row,) = work.rows
    if isinstance(row, Collective):
        return SENT_BYTES * work.rows[row] * row.nbytes.at(rows)
    if isinstance(row, Traffic):
        return float(work.rows[row] * row.nbytes.at(rows))
    return work.flops(rows) / FLOPS_A_BYTE.get(row.itemsize, FLOPS_A_BYTE[2])


def _made_again(activations: Activations, works: Works, block: Block, how: Recomputation) -> set[str]:
    """Return the nodes of a block that hooks run again, because its backward reads their results."""
    found = set[str]()

    class Named(Forward):
        running = ""

        def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.running = node.name
            return super().call(node, args, kwargs)

    with activations.ready():
        runner, path = Named(activations), f"{block.instances[0]}."
        given = [_given(works, block, node) for node in block.graph.nodes if node.op == "placeholder"]
        made_again(
            lambda: runner.run_graph(block.graph, path, given),
            how.pointwise,
            watchers if how.gathers else None,
            noted=lambda: partial(found.add, runner.running),
        )()
    return found


class _Noted(Forward):
    """Runs a block and notes of each node the operators that make results in new memory, with the numbers of their calls and bytes.

    A result that is written later is left out: if it were kept, the forward that runs again would write it a second time.
    """

    def __init__(self, activations: Activations) -> None:
        super().__init__(activations)
        self.numbers = Counter[str]()
        self.calls: dict[str, list[tuple[str, int, int]]] = {}
        self.makers: dict[int, tuple[str, tuple[str, int, int]]] = {}
        """The node and its call that made a storage."""
        self.dispatched = Counter[str]()

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls[node.name] = []
        with _Dispatched(self, node.name):
            return super().call(node, args, kwargs)


class _Dispatched(TorchDispatchMode):
    def __init__(self, noted: _Noted, node: str) -> None:
        super().__init__()
        self.noted, self.node = noted, node

    def __torch_dispatch__(self, func: Any, types: Collection[Any], args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func, args, kwargs or {})
        number = self.noted.numbers[name]
        self.noted.numbers[name] += 1
        self.noted.dispatched[self.node] += func not in SAC_IGNORED_OPS
        given = {storage_of(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        for key in _written_storages(func, args, kwargs or {}) & self.noted.makers.keys():
            node, call = self.noted.makers[key]
            self.noted.calls[node] = [other for other in self.noted.calls[node] if other != call]
        result = func(*args, **(kwargs or {}))
        made = {
            storage_of(item): item.untyped_storage().nbytes()
            for item in tree_leaves(result)
            if isinstance(item, Tensor)
        }
        new = {key: nbytes for key, nbytes in made.items() if key not in given}
        call = name, number, sum(new.values())
        self.noted.makers.update(dict.fromkeys(new, (self.node, call)))
        if new and name != _WAIT:
            self.noted.calls[self.node].append(call)
        return result


def _written_storages(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the storages that an operator writes."""
    arguments = func._schema.arguments
    values = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return {
        storage_of(item)
        for argument, value in values
        if argument.alias_info is not None and argument.alias_info.is_write
        for item in tree_leaves(value)
        if isinstance(item, Tensor)
    }


class Recomputations:
    """How blocks of a rank's program are recomputed; each is measured once, however many kinds are asked for."""

    def __init__(self, program: Program, degrees: Mapping[str, int], device: str) -> None:
        self.program, self._works = program, Works(program, degrees)
        self._activations = Activations(program, degrees, device=device, even_experts=True)
        self._known: dict[tuple[str, str], Recomputation | None] = {}
        self._results: dict[str, Results] = {}

    def of(self, kinds: Mapping[str, str]) -> dict[str, Recomputation]:
        """Say for each block, by path, what it keeps; ``kinds`` are those of the blocks that are recomputed."""
        found = {}
        for block in self.program.blocks.values():
            for path in dict.fromkeys(block.instances):
                if kind := kinds.get(path):
                    how = self._of_block(block, kind)
                    if how is not None:
                        found[path] = how
        return found

    def _of_block(self, block: Block, kind: str) -> Recomputation | None:
        key = block.name, kind
        if key not in self._known:
            self._known[key] = self._recomputation(block, kind)
        return self._known[key]

    def _recomputation(self, block: Block, kind: str) -> Recomputation | None:
        how = Recomputation(kind, rows_travel=any(node.target in STARTS for node in block.graph.nodes))
        if how.gathers and how.pointwise:
            either = [self._of_block(block, each) for each in (GATHERS, POINTWISE)]
            if None in either:  # that of which there is something
                return next(filter(None, either), None)
        if how.by_hooks:
            again = _made_again(self._activations, self._works, block, how)
            return replace(how, nodes=frozenset(n.name for n in block.graph.nodes) - again) if again else None
        if (share := share_of(kind)) is None:
            return how
        kept = self._results_of(block).within(share)
        calls: dict[str, list[int]] = {}
        for result in kept:
            calls.setdefault(result.operator, []).append(result.number)
        numbers = {name: tuple(each) for name, each in calls.items()}
        return replace(how, calls=numbers, nodes=frozenset(r.node for r in kept))

    def dispatched(self, block: Block) -> tuple[int, int]:
        """Return how many operators torch dispatches in the forward of ``block`` and in its repetition."""
        return self._results_of(block).dispatched

    def _results_of(self, block: Block) -> Results:
        if block.name not in self._results:
            self._results[block.name] = results_of(self._activations, self._works, block)
        return self._results[block.name]
