"""Initial values that ranks draw together: which differ from those of the model on one device, and how many tensors each rank drew.

torchrun --nproc-per-node 3 tests/ranks/initial_values_script.py FOLDER     writes FOLDER/0.json, ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.runtime import start
from graphpar.runtime.stages import skipped_draws
from graphpar.runtime.stages.initialise import initial_values


class Stages(nn.Module):
    """Layers that torch initialises, and the model again; a draw of other kinds between; a generator that goes back to a state."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(24, 20 + number) for number in range(6)]
        self.layers = nn.ModuleList(layers)
        self.words = nn.Embedding(48, 16)
        self.odd = nn.Parameter(torch.rand(3))
        self.few = nn.Parameter(torch.randn(5))
        self.drawn = nn.Parameter(torch.randn(6, 6))
        self.order = nn.Parameter(torch.randperm(40).float())
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.trunc_normal_(self.words.weight, std=0.1)
        nn.init.uniform_(layers[0].weight[:, ::2])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.apart = nn.Parameter(torch.rand(50))
        self.last = nn.Parameter(torch.empty(30, 30, dtype=torch.bfloat16).normal_())
        self.after = nn.Parameter(torch.rand(20, dtype=torch.float64))


SOME = {"layers.5.weight", "after", "words.weight", "apart", "few", "order", "last"}


class Failing(Stages):
    """One that can't be built on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            raise ValueError("there is no such file")


class _Draws(TorchDispatchMode):
    """Counts the numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        real = torch.Tag.nondeterministic_seeded in func.tags and not isinstance(made, FakeTensor)
        self.count += made.numel() if real else 0
        return made


def _shared(names: Collection[str] | None) -> dict[str, Any]:
    torch.manual_seed(3)
    with _Draws() as whole:
        expected = Stages().state_dict()
    for _ in range(2):  # the first finds out, once, how much each operator draws
        with _Draws() as draws:
            found = dict(initial_values(Stages, 3, names, dist.group.WORLD, torch.device("cpu")))
    differ = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    return {"names": sorted(found), "differ": differ, "draws": draws.count, "whole": whole.count}


def main(folder: str) -> None:
    skipped_draws._DRAWN = 0  # what is skipped isn't drawn
    with start(device="cpu") as ranks:
        found: dict[str, Any] = {"all": _shared(None), "some": _shared(SOME)}
        try:
            list(initial_values(Failing, 3, None, dist.group.WORLD, torch.device("cpu")))
        except Exception as error:
            found["error"] = str(error)
        Path(folder, f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
