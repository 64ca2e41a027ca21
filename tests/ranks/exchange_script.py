"""Cases for the exchange of rows between ranks that hold different experts, run by real ranks, and what each of them sends.

torchrun --nproc-per-node 4 tests/ranks/exchange_script.py FOLDER eager NAME ...     writes FOLDER/rank_0.safetensors, ...

With "room" in place of "eager" rows are those of tensors of one size, behind which there is NaN, and nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.emitted import collectives, expert_rows
from graphpar.runtime import start

EXPERTS, WIDTH, HIDDEN = 8, 16, 8
ROOM = 20
"""Rows of a tensor with room."""
LOADS: dict[str, tuple[tuple[int, ...], ...]] = {
    "even": ((2,) * 8,) * 4,
    "uneven": ((1, 0, 5, 2, 0, 3, 1, 4), (0, 7, 0, 0, 1, 2, 0, 2), (3, 1, 1, 1, 6, 0, 0, 0), (0, 0, 2, 2, 2, 2, 2, 1)),
    "an expert without tokens": ((3, 0, 1, 2, 2, 1, 1, 2), (1, 0, 2, 2, 1, 3, 1, 1), (1, 0, 3, 1, 4, 1, 1, 1), (2, 0, 2, 2, 2, 2, 1, 1)),
    "a rank without tokens": ((5, 4, 0, 0, 1, 1, 2, 3), (2, 2, 0, 0, 3, 3, 1, 1), (1, 1, 0, 0, 1, 1, 1, 1), (4, 4, 0, 0, 2, 2, 0, 0)),
    "all to one": ((0,) * 7 + (9,), (0,) * 7 + (3,), (0,) * 7 + (0,), (0,) * 7 + (4,)),
}  # fmt: skip
"""By name the rows of each rank for each expert."""


def inputs(name: str) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Rows and offsets of each rank, the weights of all experts up and down, and gradients of the results of each rank."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    loads = LOADS[name]
    rows = [drawn(sum(load), WIDTH) for load in loads]
    offs = [torch.tensor(load).cumsum(0, dtype=torch.int32) for load in loads]
    return (
        rows,
        offs,
        drawn(EXPERTS, WIDTH, HIDDEN),
        drawn(EXPERTS, HIDDEN, WIDTH),
        [drawn(*each.shape) for each in rows],
    )


class Sends(TorchDispatchMode):
    """Counts the bytes that this rank sends to others by all-to-all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.nbytes = rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, sizes, _ = args
            self.nbytes += (sum(sizes) - sizes[self.rank]) * x[:1].numel() * x.element_size() if x.numel() else 0
        return func(*args, **(kwargs or {}))


def layer(x: Tensor, offs: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What a rank with some of the experts computes for its own rows."""
    exchange = expert_rows.exchange_of(offs, "dp_expert", x, room=4.0)
    ends = expert_rows.received_ends(exchange)
    h = F.silu(F.grouped_mm(expert_rows.send_rows(x, "dp_expert", exchange), up, offs=ends))
    return expert_rows.return_rows(F.grouped_mm(h, down, offs=ends), "dp_expert", exchange)


def run_all(rank: int, count: int, how: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Run cases on this rank, ``how`` being eager or compiled, or room or compiled room."""
    found: dict[str, Tensor] = {}
    compiled, room = "compiled" in how, "room" in how
    run = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=not room) if compiled else layer
    lacking = torch.zeros((), dtype=torch.int32)
    expert_rows.note_lacking(lacking if room else None)
    for name in names:
        rows, offs, *weights, upstream = inputs(name)
        own = len(rows[rank])
        x = F.pad(rows[rank], [0, 0, 0, ROOM - own if room else 0], value=math.nan).requires_grad_()
        up, down = (weight.chunk(count)[rank].clone().requires_grad_() for weight in weights)  # type: ignore[union-attr]
        sends = Sends(rank)
        with contextlib.nullcontext() if compiled else sends:  # such a mode keeps torch.compile from running
            y = run(x, offs[rank], up, down)
            y.backward(F.pad(upstream[rank], [0, 0, 0, len(y) - own], value=math.nan))
        assert x.grad is not None and not y[own:].any() and not x.grad[own:].any() and not lacking
        values = {
            "y": y.detach()[:own],
            "x": x.grad[:own],
            "up": up.grad,
            "down": down.grad,
            "sent": torch.tensor(sends.nbytes),
        }
        found |= {f"{name}/{key}": value for key, value in values.items() if value is not None}
    return found


def main(folder: Path, how: str, names: Sequence[str]) -> None:
    """Write what this rank found."""
    with start():
        collectives.bind({"dp_expert": dist.group.WORLD})
        rank = dist.get_rank()
        save_file(run_all(rank, dist.get_world_size(), how, names), folder / f"rank_{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
