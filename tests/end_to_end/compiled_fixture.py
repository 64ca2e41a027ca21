"""One rank of programs that run with and without ``torch.compile``, one after the other.

As a script (under torchrun): FOLDER BACKEND; FOLDER has the programs and ``weights.safetensors`` and ``batch.safetensors``. Each rank
writes ``rank_N.json`` into it: of each program the losses and norms of both, and by how much their parameters differ in the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, start
from graphpar.runtime.distributed import Ranks
from graphpar.runtime.fully_sharded import local

STEPS = 3


def trained(program: Path, ranks: Ranks, compile: bool | str) -> tuple[list[float], dict[str, Tensor]]:
    with Pipeline(program, ranks.device, compile=compile) as pipeline:
        pipeline.load_weights(program.parent / "weights.safetensors")
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.1)
        numbers = []
        for _ in range(STEPS):
            loss = pipeline.step(load_file(program.parent / "batch.safetensors"), broadcast_loss=True)
            assert loss is not None
            numbers += [float(loss), float(pipeline.clip_grad_norm_(1.0))]
            optimizer.step()
            pipeline.zero_grad()
        return numbers, {name: local(value).detach().clone() for name, value in pipeline.state_dict().items()}


def main(folder: str, backend: str) -> None:
    seen: dict[str, Any] = {}
    with start(300) as ranks:
        for program in sorted(path.parent for path in Path(folder).glob("*/plan.json")):
            torch._dynamo.reset()
            plain, expected = trained(program, ranks, False)
            torch._dynamo.utils.counters.clear()
            numbers, found = trained(program, ranks, backend)
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            differs = max(
                float((found[name] - expected[name]).abs().max()) for name in expected if expected[name].numel()
            )
            seen[program.name] = {
                "plain": plain,
                "compiled": numbers,
                "differs": differs,
                "graphs": graphs,
                "breaks": breaks,
            }
    Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
