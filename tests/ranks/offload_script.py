"""A script for ranks: programs trained with state or activations in the memory of a host that a CPU is taken to have.

    offload_script.py CASES.json     [{"program", "weights", "out", "steps", "load", "save"}, ...]

Writes {out}_{rank}.safetensors (losses, gradients of each step, parameters and optimizer state afterwards) and {out}_{rank}.json: the bytes
that were copied, and which tensors of the state were not in the host's memory between two steps.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state import offloaded_state
from graphpar.runtime.state.fully_sharded import local, shards_of
from graphpar.runtime.state.host import pretended
from tests.ranks import checkpoint_script as models

MAX_NORM = 0.5
PIECE_BYTES = 1500
"""So that also a small model is updated in several pieces."""


def train(case: dict[str, Any], rank: int, device: torch.device) -> None:
    found = dict[str, Tensor]()
    begin, end = case["steps"]
    with Pipeline(case["program"], device) as pipeline:
        optimizer = models.optimizer_of(pipeline.named_parameters())
        pipeline.offload(optimizer)
        if case.get("load"):
            pipeline.load_checkpoint(case["load"], optimizer)
        else:
            pipeline.load_weights(case["weights"])
        names = {parameter: name for name, parameter in pipeline.named_parameters()}
        state = pipeline._state(optimizer).offloaded
        away = []
        for step in range(begin, end):
            loss = pipeline.step(models.batch_of(case["kind"], step), broadcast_loss=True)
            assert loss is not None
            found[f"loss.{step}"] = loss
            for name, gradient in pipeline.whole_gradients().items():
                found[f"gradient.{step}.{name}"] = local(gradient).clone()
            pipeline.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            pipeline.zero_grad()
            models.scheduled(optimizer)
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    found[f"state.{names[parameter]}.{key}"] = local(value).clone()
                    if state is not None and value.ndim and not state.is_home(parameter, key, value):
                        away.append(f"{names[parameter]}.{key}")
            if step + 1 == case.get("save_at"):
                pipeline.save_checkpoint(case["save"], optimizer, step=step + 1)
        forward = pipeline.infer(models.batch_of(case["kind"], end))
        found |= {f"loss.forward.{name}": value for name, value in (forward or {}).items()}
        found |= {f"parameter.{name}": local(value).clone() for name, value in pipeline.state_dict().items()}
        host = pipeline.host
        moved: dict[str, object] = {"sent": host.sent, "fetched": host.fetched} if host is not None else {}
        if any(shard.offload_to_cpu for stage in pipeline.stages for shard in shards_of(stage)):
            moved["params"] = True
    save_file({name: value.contiguous() for name, value in found.items()}, f"{case['out']}_{rank}.safetensors")
    Path(f"{case['out']}_{rank}.json").write_text(json.dumps({**moved, "away": away}))


def main(cases: Path) -> None:
    usual, offloaded_state.PIECE_BYTES = offloaded_state.PIECE_BYTES, PIECE_BYTES
    try:
        with start(120) as ranks:
            for case in json.loads(cases.read_text()):
                with pretended() if case.get("pretended", True) else nullcontext():
                    train(case, ranks.rank, ranks.device)
    finally:
        offloaded_state.PIECE_BYTES = usual


if __name__ == "__main__":
    main(Path(sys.argv[1]))
