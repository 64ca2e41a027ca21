"""A script for ranks: programs of one model, with other recomputation, trained for some steps; everything is written for comparison.

    recomputation_script.py CASES.json     [{"program", "weights", "batches"}, ...]

Writes for each rank {program}/found_{rank}.safetensors (losses, gradients of each step, state afterwards) and
{program}/found_{rank}.json: how many collectives all steps sent, by name, and {program}/bytes_{rank}.json: the bytes that went in.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.runtime import Pipeline, start


class _Sent(TorchDispatchMode):
    """Counts collectives, and the bytes that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.nbytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            self.counts[name.removeprefix("_c10d_functional.")] += 1
            self.nbytes[name.removeprefix("_c10d_functional.")] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def train(case: dict[str, Any], rank: int, device: torch.device) -> None:
    folder, found = Path(case["program"]), dict[str, Tensor]()
    with Pipeline(folder, device, seed=5) as pipeline:
        pipeline.load_weights(case["weights"])
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
        with _Sent() as sent:
            for step, path in enumerate(case["batches"]):
                loss = pipeline.step(load_file(path), step=step, broadcast_loss=True)
                assert loss is not None
                found[f"loss.{step}"] = loss
                for name, gradient in pipeline.whole_gradients().items():
                    found[f"gradient.{step}.{name}"] = _local(gradient).clone()
                optimizer.step()
                pipeline.zero_grad()
        found |= {f"state.{name}": _local(value).clone() for name, value in pipeline.state_dict().items()}
    save_file({name: value.contiguous() for name, value in found.items()}, folder / f"found_{rank}.safetensors")
    (folder / f"found_{rank}.json").write_text(json.dumps(sent.counts))
    (folder / f"bytes_{rank}.json").write_text(json.dumps(sent.nbytes))


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    with start(120) as ranks:
        for case in json.loads(Path(sys.argv[1]).read_text()):
            train(case, ranks.rank, ranks.device)
