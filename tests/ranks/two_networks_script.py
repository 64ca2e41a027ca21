"""One rank of a program with a frozen network (under torchrun): FOLDER PROGRAM.

FOLDER has ``weights.safetensors`` and ``batch.safetensors``. Trains with SGD and momentum, and writes the whole weights to
``PROGRAM.safetensors`` and what it saw to ``PROGRAM-rank_N.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state.fully_sharded import local

STEPS, LR, MOMENTUM = 3, 0.2, 0.9


def main(folder: str, program: str) -> None:
    root = Path(folder)
    batch = load_file(root / "batch.safetensors")
    seen: dict[str, Any] = {"recorded": [], "calls": 0}

    def called(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["calls"] += 1
        if isinstance(output, Tensor) and output.requires_grad:
            seen["recorded"].append(type(module).__name__)

    with start(200) as ranks, Pipeline(root / program, ranks.device, seed=3) as pipeline:
        pipeline.load_weights(root / "weights.safetensors")
        frozen = [module for stage in pipeline.stages for module in stage.modules() if _is_frozen(module)]
        for module in frozen:
            module.register_forward_hook(called)
        before = {name: local(value).detach().clone() for name, value in pipeline.state_dict().items()}
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=LR, momentum=MOMENTUM)
        seen["losses"], seen["gradients"] = [], []
        for _ in range(STEPS):
            loss = pipeline.step(batch, broadcast_loss=True)
            assert loss is not None
            seen["losses"].append(float(loss))
            named = [(name, value) for stage in pipeline.stages for name, value in stage.named_parameters()]
            seen["gradients"] += [name for name, value in named if value.grad is not None]
            optimizer.step()
            pipeline.zero_grad()
        after = {name: local(value).detach().clone() for name, value in pipeline.state_dict().items()}
        seen["held"] = sorted(after)
        seen["changed"] = [name for name in after if not torch.equal(after[name], before[name])]
        stepped = {id(parameter) for parameter, state in optimizer.state.items() if state}
        seen["stepped"] = [name for name, parameter in pipeline.named_parameters() if id(parameter) in stepped]
        pipeline.save_weights(root / f"{program}.safetensors")
    (root / f"{program}-rank_{ranks.rank}.json").write_text(json.dumps(seen))


def _is_frozen(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) and not any(each.requires_grad for each in module.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
