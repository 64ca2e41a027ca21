"""Cases for the collectives: what every rank is given, and what all of them make of it.

    torchrun --nproc-per-node 4 tests/ranks/collectives_script.py FOLDER     writes FOLDER/rank_0.safetensors, ...

A tensor of integers stands for each whole tensor, so sums are exact in every dtype and in any order. What the type says
of a tensor says what the ranks are given: ``given`` makes the pieces (or terms) of a whole value, ``whole`` undoes that.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from safetensors.torch import save_file
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphpar.emitted import collectives
from graphpar.operators.transitions import Step, path
from graphpar.runtime import start
from graphpar.runtime.layout import I, P, R, Shard, Type, shard_of

SHAPE = (6, 5, 24)
GARBAGE = 7
"""What the padding of a piece holds: no result may depend on it."""

GRADIENT: dict[Type, Type] = {R: P, I: I, P: R}
"""The type of a gradient; that of S is the same S."""


def types(degree: int) -> list[Type]:
    """Even, uneven, by periods of one part and of three; over 4 ranks one of them has nothing but padding."""
    parts = (6, 2, 4) if degree == 2 else (12, 4, 8)
    return [R, I, P, Shard(0), Shard(1), Shard(2), Shard(2, (4,)), Shard(2, parts)]


@dataclass(frozen=True)
class Case:
    """A value that goes from one type to another, by all steps of the path."""

    source: Type
    target: Type
    dtype: torch.dtype = torch.float64
    axis: str = "tp"

    @property
    def name(self) -> str:
        return f"{self.axis} {self.source} -> {self.target} {str(self.dtype).removeprefix('torch.')}"

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point

    def steps(self) -> tuple[Step, ...]:
        steps = path(self.source, self.target, differentiable=self.differentiable)
        assert steps is not None, self
        return steps


def cases(degree: int) -> Iterator[Case]:
    """Every pair of types in float64, over a group and over the world; the direct transitions in other dtypes."""
    for source, target in itertools.product(types(degree), repeat=2):
        if source == target:
            continue
        if (source, target) != (R, I):
            yield Case(source, target)
            if degree == 4:
                yield Case(source, target, axis="all")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if (source, target) != (R, I) and len(Case(source, target, dtype).steps()) == 1:
                yield Case(source, target, dtype)
        yield Case(source, target, torch.int64)
        if P not in (source, target):
            yield Case(source, target, torch.bool)


def value(case: Case) -> Tensor:
    numbers = torch.arange(720).view(SHAPE) * 37 % 97
    return numbers % 2 == 0 if case.dtype == torch.bool else (numbers - 48).to(case.dtype)


def gradient(case: Case) -> Tensor:
    return (torch.arange(720).view(SHAPE) * 29 % 31 - 15).to(case.dtype)


def given(whole: Tensor, kind: Type, degree: int, rank: int) -> Tensor:
    """What a rank holds of a whole value, in memory order other than that of its dims."""
    if isinstance(kind, Shard):
        padding = shard_of(torch.zeros_like(whole, dtype=torch.int64) + 1, kind, degree, rank) == 0
        local = shard_of(whole, kind, degree, rank).masked_fill(padding, GARBAGE)
    elif kind is P:
        others = [
            (torch.arange(whole.numel()).view_as(whole) * (r + 3) % 5 - 2).to(whole.dtype) for r in range(1, degree)
        ]
        local = others[rank - 1] if rank else whole - sum(others)
    else:
        local = whole
    return local.mT.contiguous().mT


def apply(case: Case, x: Tensor, degree: int) -> Tensor:
    for step in case.steps():
        if step.function is not None:
            x = step.transition.called(x, case.axis, **step.options(SHAPE, degree))
    return x


def run_case(case: Case, degree: int, rank: int) -> dict[str, Tensor]:
    """This rank's output, and the gradient of its input."""
    x = given(value(case), case.source, degree, rank)
    if not case.differentiable:
        return {"output": apply(case, x, degree)}
    x.requires_grad_()
    output = apply(case, x, degree)
    kind = GRADIENT.get(case.target, case.target)
    output.backward(given(gradient(case), kind, degree, rank))
    assert x.grad is not None
    return {"output": output.detach(), "gradient": x.grad}


@dataclass(frozen=True)
class Loss:
    """A cross-entropy whose classes are cut."""

    vocab: int
    inner: tuple[int, ...] = ()
    weighted: bool = False
    reduction: str = "mean"
    ignore_index: int = -100
    dtype: torch.dtype = torch.float64
    scale: float = 3.0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """logits [9, vocab, *inner], target [9, *inner], and class weights [vocab] or None."""
        generator = torch.Generator().manual_seed(self.vocab)
        logits = torch.randn(9, self.vocab, *self.inner, generator=generator, dtype=torch.float64) * self.scale
        target = torch.randint(0, self.vocab, (9, *self.inner), generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.3] = self.ignore_index
        weight = torch.rand(self.vocab, generator=generator, dtype=torch.float64) + 0.1 if self.weighted else None
        return logits.to(self.dtype), target, weight if weight is None else weight.to(self.dtype)

    def upstream(self, loss: Tensor) -> Tensor:
        return torch.linspace(0.5, 2.0, loss.numel()).view_as(loss).to(loss.dtype)


LOSSES = [
    Loss(8),
    Loss(8, (3,), weighted=True),
    Loss(7, reduction="sum", weighted=True, ignore_index=2),
    Loss(7, (2, 3), reduction="none", weighted=True),
    Loss(5, ignore_index=0),  # over 4 ranks: pieces of 2, 2, 1 and none
    Loss(10, scale=2e3),
    Loss(7, dtype=torch.float32),
    Loss(23),
    Loss(23, dtype=torch.float32),
    Loss(7, (2,), dtype=torch.bfloat16),
    Loss(8, dtype=torch.float16, scale=30.0, reduction="sum"),
]


class Sizes(TorchDispatchMode):
    """The elements of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found += [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        return made


def run_loss(case: Loss, degree: int, rank: int) -> dict[str, Tensor]:
    """This rank's loss and gradients of two backwards, and the sizes of the tensors that it makes and that it saves."""
    logits, target, weight = case.inputs()
    x = given(logits, Shard(1), degree, rank).requires_grad_()
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Sizes() as made, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = collectives.vocab_cross_entropy(
            x, target, "tp", case.vocab, weight, reduction=case.reduction, ignore_index=case.ignore_index
        )
        (gradient,) = torch.autograd.grad(loss, x, case.upstream(loss), retain_graph=True)
    (again,) = torch.autograd.grad(loss, x, case.upstream(loss))
    sizes = {"made": torch.tensor(made.found), "saved": torch.tensor(saved)}
    return {"output": loss.detach(), "gradient": gradient, "again": again, **sizes}


VOCABULARIES = (8, 7, 5)


def embedding_inputs(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [2, 6], table [vocab, 3] and the gradient of the result [2, 6, 3]."""
    ids = torch.arange(12).view(2, 6) * 5 % vocab
    return ids, (torch.arange(vocab * 3.0) - 7).view(vocab, 3), (torch.arange(36.0) % 7 - 3).view(2, 6, 3)


def run_embedding(vocab: int, degree: int, rank: int) -> dict[str, Tensor]:
    ids, table, upstream = embedding_inputs(vocab)
    weight = given(table, Shard(0), degree, rank).requires_grad_()
    output = collectives.vocab_embedding(ids, weight, "tp")
    output.backward(upstream)
    assert weight.grad is not None
    return {"output": output.detach(), "gradient": weight.grad}


def indices(degree: int, rank: int) -> dict[str, Tensor]:
    found = {}
    for kind in types(degree):
        if isinstance(kind, Shard):
            local = shard_of(torch.empty(SHAPE), kind, degree, rank).shape[kind.dim]
            found[str(kind)] = collectives.global_index(local, "tp", kind.parts)
    return found


def every_function(x: Tensor, table: Tensor, target: Tensor) -> Tensor:
    """x [4, 8] of type I, table S(0) [5, 8] of a vocabulary of 9 on 2 ranks, target [4] -> a loss of type I."""
    y = collectives.sum_gradient(x.sin(), "tp")  # R
    y = collectives.shard(y * (1 + collectives.rank("tp")), "tp", 0)  # S(0)
    y = collectives.all_gather(y.cos(), "tp", 0)  # R
    y = collectives.first_only(y, "tp") + collectives.vocab_embedding(target, table, "tp")  # P
    y = collectives.reduce_scatter(y, "tp", 1, parts=(4,))  # S(1:4)
    y = collectives.all_to_all(y.tanh(), "tp", 1, 0, from_parts=(4,))  # S(0)
    y = collectives.all_gather_invariant(y.exp(), "tp", 0)  # I
    y = collectives.shard_invariant(y, "tp", 1)  # S(1)
    y = collectives.all_reduce_both(y @ y.mT, "tp")  # R
    y = collectives.all_reduce((y * 0.1).sin(), "tp")  # I
    y = collectives.sum_gradient(torch.cat([y, x], 1), "tp")[:, :8]  # R
    logits = y @ table.mT  # S(1)
    return collectives.vocab_cross_entropy(logits, target, "tp", 9)


def run_compiled(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    table = torch.randn(10, 8, generator=generator).chunk(2)[collectives.rank("tp")].clone().requires_grad_()
    loss = run(x, table, torch.tensor([3, 8, 0, 5]))
    loss.backward()
    assert x.grad is not None and table.grad is not None
    return {"loss": loss.detach(), "x": x.grad, "table": table.grad}


def recording(graphs: list[str]) -> Any:
    """The backend "aot_eager", which also keeps the graphs that it is given, forward then backward."""

    def keep(module: fx.GraphModule, _: Any) -> Any:
        nodes = module.graph.nodes
        graphs.append(
            "\n".join(f"{n.name} = {n.target}({', '.join(i.name for i in n.all_input_nodes)})" for n in nodes)
        )
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def run_all(degree: int, rank: int) -> dict[str, Tensor]:
    """Every case on this rank, by name."""
    found: dict[str, Tensor] = {}

    def keep(prefix: str, tensors: dict[str, Tensor]) -> None:
        found.update({f"{prefix}/{name}": tensor.contiguous() for name, tensor in tensors.items()})

    for case in cases(degree):
        keep(case.name, run_case(case, degree, rank))
    for number, loss in enumerate(LOSSES):
        keep(f"loss {number}", run_loss(loss, degree, rank))
    for vocab in VOCABULARIES:
        keep(f"embedding {vocab}", run_embedding(vocab, degree, rank))
    keep("index", indices(degree, rank))
    return found


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    with start(60) as ranks:
        pair = [dist.new_group([first, first + 1]) for first in (0, 2)][ranks.rank // 2]
        collectives.bind({"tp": dist.new_group([0, 1, 2, 3]), "all": dist.group.WORLD})
        found = {f"4/{name}": tensor for name, tensor in run_all(4, ranks.rank).items()}
        collectives.bind({"tp": pair})
        found |= {f"2/{name}": tensor for name, tensor in run_all(2, ranks.rank % 2).items()}
        if ranks.rank < 2:
            graphs: list[str] = []
            compiled = torch.compile(every_function, fullgraph=True, backend=recording(graphs))
            for way, run in (("eager", every_function), ("compiled", compiled)):
                found |= {f"2/{way}/{name}": tensor for name, tensor in run_compiled(run).items()}
            found["graphs"] = torch.frombuffer(bytearray("\n\n".join(graphs).encode()), dtype=torch.uint8)
        save_file({name: tensor.clone() for name, tensor in found.items()}, folder / f"rank_{ranks.rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
