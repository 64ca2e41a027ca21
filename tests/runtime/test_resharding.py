"""What moves between two programs, for drawn divisions of tensors: everything that is needed, once, and from whom it should."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphpar.runtime import RuntimeProgramError
from graphpar.runtime.checkpoints.resharding import Held, Layout, Region, Resharding
from graphpar.runtime.checkpoints.tensor_chunks import Box


def _whole(shape: tuple[int, ...]) -> Region:
    return Region((0,) * len(shape), shape)


def _cut(region: Region, drawn: random.Random, times: int) -> list[Region]:
    """Divide a region into disjoint ones."""
    found = [region]
    for _ in range(times):
        one = found.pop(drawn.randrange(len(found)))
        dims = [dim for dim, size in enumerate(one.sizes) if size > 1]
        if not dims:
            found.append(one)
            continue
        dim = drawn.choice(dims)
        at = drawn.randrange(1, one.sizes[dim])
        first = Region(one.offsets, (*one.sizes[:dim], at, *one.sizes[dim + 1 :]))
        found += [first, *one.without(first)]
    return found


def _drawn_side(shapes: dict[str, tuple[int, ...]], drawn: random.Random, processes: int) -> list[dict[str, Held]]:
    """Let processes have each tensor, divided in the same way by one or several copies of it."""
    dtype = drawn.choice([torch.float32, torch.bfloat16, torch.float64])
    own: list[dict[str, Held]] = [{} for _ in range(processes)]
    for name, shape in shapes.items():
        parts: list[list[Region]] = [[] for _ in range(processes)]
        for _ in range(drawn.choice([1, 1, 2])):
            for region in _cut(_whole(shape), drawn, drawn.randrange(6)):
                place = drawn.randrange(processes)
                if all(region.common(other) is None for other in parts[place]):
                    parts[place].append(region)
        for place, regions in enumerate(parts):
            if regions:
                own[place][name] = Held((name,), shape, dtype, tuple(regions))
    return own


def _complete(side: list[dict[str, Held]], name: str, shape: tuple[int, ...]) -> bool:
    seen = torch.zeros(shape, dtype=torch.bool)
    for own in side:
        for region in own[name].regions if name in own else ():
            region.of(Box((0,) * len(shape), seen)).fill_(True)
    return bool(seen.all())


@pytest.mark.parametrize("seed", range(40))
def test_drawn_divisions(seed: int) -> None:
    drawn = random.Random(seed)
    shapes = {"a": (7, 5), "b": (12,), "c": (3, 4, 5), "d": ()}
    count = drawn.choice([1, 2, 4, 5])
    senders, receivers = (_drawn_side(shapes, drawn, count) for _ in range(2))
    shapes = {name: shape for name, shape in shapes.items() if _complete(senders, name, shape)}
    senders, receivers = (
        [{name: own[name] for name in own if name in shapes} for own in side] for side in (senders, receivers)
    )
    nodes = [f"node {place // 2}" for place in range(count)]
    sides = ([pickle.loads(pickle.dumps(Layout(own))) for own in side] for side in (senders, receivers))
    resharding = Resharding(*sides, nodes, strict=False)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    outgoing = [move for place in range(count) for move in resharding.of(place)[0]]
    incoming = [move for place in range(count) for move in resharding.of(place)[1]]
    received = sum(move.nbytes for move in incoming if move.source != move.target)
    assert received == sum(map(resharding.least_bytes, range(count)))
    assert Counter(outgoing) == Counter(move for move in incoming if move.source != move.target)
    for source in range(count):  # both sides have them in one order
        for target in set(range(count)) - {source}:
            sends = [move for move in resharding.of(source)[0] if move.target == target]
            assert sends == [move for move in resharding.of(target)[1] if move.source == source]
    for process, own in enumerate(receivers):
        arrived: dict[str, Tensor] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        for move in (move for move in incoming if move.target == process):
            held = senders[move.source][move.sent]
            assert any(move.region.common(region) == move.region for region in held.regions)  # its sender has it
            begin = (0,) * len(shapes[move.sent])
            move.region.of(Box(begin, times[move.sent])).add_(1)
            move.region.of(Box(begin, arrived[move.sent])).copy_(move.region.of(Box(begin, values[move.sent])))
        for name, shape in shapes.items():
            needed = torch.zeros(shape, dtype=torch.int64)
            for region in own[name].regions if name in own else ():
                region.of(Box((0,) * len(shape), needed)).fill_(1)
            assert torch.equal(times[name], needed), (name, process)  # all that is needed, once, and nothing else
            assert torch.equal(arrived[name], values[name] * needed)


def test_the_own_node_sends_and_copies_take_turns() -> None:
    own = {name: Held((name,), (8,), torch.float32, (_whole((8,)),)) for name in "abcd"}
    senders = [own, own, own, own, {}, {}]
    receivers: list[dict[str, Held]] = [{}, {}, {}, {}, own, own]
    moves = list(Resharding(senders, receivers, ["x", "x", "y", "y", "y", "z"]).to(4))
    assert sorted(move.source for move in moves) == [2, 2, 3, 3]
    moves = list(Resharding(senders, receivers, ["x", "x", "y", "y", "y", "z"]).to(5))
    assert sorted(move.source for move in moves) == [0, 1, 2, 3]


def test_pieces_are_in_order_and_small_enough() -> None:
    region = Region((2, 0, 1), (5, 3, 4))
    seen = torch.zeros(8, 3, 6)
    for piece in region.pieces(10):
        assert piece.numel <= 10
        piece.of(Box((0, 0, 0), seen)).add_(1)
    assert torch.equal(seen[2:7, :, 1:5], torch.ones(5, 3, 4)) and seen.sum() == 60


def test_what_nobody_has_is_refused() -> None:
    half = Held(("a",), (8,), torch.float32, (Region((0,), (4,)),))
    whole = Held(("a",), (8,), torch.float32, (_whole((8,)),))
    with pytest.raises(RuntimeProgramError, match=r"nobody has \[4:8\] of a, which process 1 needs"):
        Resharding([{"a": half}, {}], [{}, {"a": whole}], ["x", "x"]).of(1)
    with pytest.raises(RuntimeProgramError, match="nobody sends b and nobody receives a; strict=False leaves that out"):
        Resharding([{"a": whole}, {}], [{}, {"b": replace(whole, names=())}], ["x", "x"])
    trained = Held(("a",), (8,), torch.bfloat16, (_whole((8,)),), rounds=False)
    with pytest.raises(RuntimeProgramError, match="it would be rounded"):
        Resharding([{"a": whole}], [{"a": trained}], ["x"])
