"""Cases for ring attention: what every rank of 8 is given, in groups of 2, 4 and 8, and what it makes of it.

torchrun --nproc-per-node 8 tests/ranks/ring_script.py FOLDER              writes FOLDER/rank_0.safetensors, ...
torchrun --nproc-per-node 2 tests/ranks/ring_script.py FOLDER compiled     what a compiled function makes of the first case
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.emitted import collectives
from graphpar.emitted.ring_attention import ring_attention
from graphpar.runtime import start
from graphpar.runtime.layout import Shard, shard_of

DEGREES = (2, 4, 8)
OPERANDS = ("query", "key", "value")
ROWS = Shard(2)
GARBAGE = 7.0
"""What the padding of a shard holds."""


@dataclass(frozen=True)
class Case:
    """Attention of ``queries`` rows to ``keys`` rows (as many, if 0), for heads in groups, with values of another width or not."""

    queries: int
    is_causal: bool = False
    groups: int = 4
    keys: int = 0
    width: int = 8
    scale: float | None = None
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        rows = f"{self.queries} rows" if not self.keys else f"{self.queries} rows to {self.keys}"
        causal = ", causal" if self.is_causal else ""
        return f"{rows}{causal}, {self.groups} groups, width {self.width}, {str(self.dtype)[6:]}"

    def whole(self) -> tuple[list[Tensor], Tensor]:
        """Queries, keys and values, and the gradient of the result."""
        draw = torch.Generator().manual_seed(0)
        keys = self.keys or self.queries
        shapes = [(2, 4, self.queries, 8), (2, self.groups, keys, 8), (2, self.groups, keys, self.width)]
        made = [
            torch.randn(s, generator=draw, dtype=torch.float64).to(self.dtype)
            for s in (*shapes, (*shapes[0][:3], self.width))
        ]
        return made[:3], made[3]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What ring attention must give."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.groups != 4
        )

    def ring(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys = self.keys or self.queries
        return ring_attention(query, key, value, "cp", self.is_causal, self.scale, self.groups != 4, keys)


CASES = (
    Case(16, is_causal=True, groups=2),
    Case(13, is_causal=True),  # padded; of 8 ranks one has nothing else
    Case(24, is_causal=True, groups=1, scale=0.3),  # shards of 3 rows have chunks of 2 and 1
    Case(8, is_causal=True),  # of 8 ranks each has one row, so one chunk is empty
    Case(13, groups=2),
    Case(24, keys=16),
    Case(16, is_causal=True, groups=2, width=6),  # no fused kernel
    Case(13, width=6),
    Case(32, is_causal=True, groups=2, dtype=torch.bfloat16),
    Case(32, dtype=torch.float32),
)


class Sent(TorchDispatchMode):
    """The bytes that this rank sends to others."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.own, self.nbytes = own, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, to, _ = args
            self.nbytes += x.element_size() * (sum(to) - to[self.own])
        return func(*args, **(kwargs or {}))


def run(case: Case, degree: int, rank: int) -> dict[str, Tensor]:
    """This rank's result and gradients, the elements it saved for them, and the bytes it sent, forward and backward."""
    leaves, upstream = shards(case, degree, rank)
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Sent(rank) as forward, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = case.ring(*leaves)
    with Sent(rank) as backward:
        gradients = torch.autograd.grad(result, leaves, upstream)
    sent, kept = torch.tensor([forward.nbytes, backward.nbytes]), torch.tensor(sum(saved))
    return {"result": result.detach(), **dict(zip(OPERANDS, gradients)), "sent": sent, "saved": kept}


def run_compiled(case: Case, degree: int, rank: int) -> dict[str, Tensor]:
    """This rank's result and gradients by a compiled function."""
    leaves, upstream = shards(case, degree, rank)
    result = torch.compile(case.ring, fullgraph=True, backend="aot_eager")(*leaves)
    return {"result": result.detach(), **dict(zip(OPERANDS, torch.autograd.grad(result, leaves, upstream)))}


def shards(case: Case, degree: int, rank: int) -> tuple[list[Tensor], Tensor]:
    """This rank's queries, keys and values, and the gradient of its result."""
    operands, upstream = case.whole()
    leaves = [_shard(x, degree, rank, GARBAGE).requires_grad_() for x in operands]
    return leaves, _shard(upstream, degree, rank, 0.0)


def _shard(x: Tensor, degree: int, rank: int, padding: float) -> Tensor:
    real = shard_of(torch.ones_like(x, dtype=torch.bool), ROWS, degree, rank)
    return shard_of(x, ROWS, degree, rank).masked_fill(~real, padding)


def main(folder: Path, compiled: bool) -> None:
    found: dict[str, Tensor] = {}
    with start(60) as ranks:
        if compiled:
            collectives.bind({"cp": dist.group.WORLD})
            made = run_compiled(CASES[0], dist.get_world_size(), ranks.rank)
            found |= {name: tensor.contiguous() for name, tensor in made.items()}
        for degree in () if compiled else DEGREES:
            groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, 8, degree)]
            collectives.bind({"cp": groups[ranks.rank // degree]})
            for number, case in enumerate(CASES):
                made = run(case, degree, ranks.rank % degree)
                found |= {f"{degree}/{number}/{name}": tensor.contiguous() for name, tensor in made.items()}
        save_file(found, folder / f"rank_{ranks.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), compiled=sys.argv[2:] == ["compiled"])
