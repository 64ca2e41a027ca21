"""One rank of a program with adapters that starts from the weights of its base model.

As a script (under torchrun): FOLDER PROGRAM; FOLDER has ``base.safetensors``, ``batch.safetensors`` and ``start/``, the adapters to
begin with. It trains, and writes the adapters, the merged weights, and what it saw (``PROGRAM-rank_N.json``) into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import local

STEPS, LR = 3, 0.5


def main(folder: str, program: str) -> None:
    root = Path(folder)
    batch = load_file(root / "batch.safetensors")
    seen: dict[str, Any] = {}
    with start(200) as ranks, Pipeline(root / program, ranks.device, seed=3) as pipeline:
        pipeline.load_weights(root / "base.safetensors")
        pipeline.adapters.save(root / f"{program}-drawn")
        pipeline.adapters.load(root / "start")
        before = {name: local(value).detach().clone() for name, value in pipeline.state_dict().items()}
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=LR, momentum=0.9)
        losses = []
        for _ in range(STEPS):
            loss = pipeline.step(batch, broadcast_loss=True)
            assert loss is not None
            losses.append(float(loss))
            optimizer.step()
            pipeline.zero_grad()
        seen["losses"] = losses
        pipeline.adapters.save(root / f"{program}-after")
        pipeline.adapters.save_merged(root / f"{program}-merged.safetensors")
        after = {name: local(value).detach().clone() for name, value in pipeline.state_dict().items()}
        seen["changed"] = [name for name in after if not torch.equal(after[name], before[name])]
        names = dict(pipeline.named_parameters())
        held = {id(parameter) for parameter, state in optimizer.state.items() if state}
        seen["in optimizer"] = [name for name, parameter in names.items() if id(parameter) in held]
        checkpoints = root / "checkpoints"
        others = sorted(path for path in checkpoints.iterdir() if path.is_dir()) if checkpoints.is_dir() else []
        dist.barrier()
        pipeline.save_checkpoint(checkpoints / program, optimizer, step=STEPS)
        unmerged = pipeline.step(batch, broadcast_loss=True)
        pipeline.adapters.merge()
        merged = pipeline.infer(batch)
        assert unmerged is not None
        seen["unmerged"] = float(unmerged)
        seen["merged"] = [float(value) for value in (merged or {}).values()]  # on the ranks of the last stage
        pipeline.adapters.unmerge()
        again = {name: local(value) for name, value in pipeline.state_dict().items()}
        seen["restored"] = all(torch.equal(again[name], after[name]) for name in after)
        pipeline.adapters.merge()
        for refused in (
            lambda: pipeline.load_weights(root / "base.safetensors"),
            lambda: pipeline.adapters.draw(0),
            lambda: pipeline.step(batch),
        ):
            with pytest.raises(RuntimeProgramError, match=r"the adapters are merged; call unmerge\(\) before"):
                refused()
        optimizer.step()  # with the gradients of the step before
        with pytest.raises(RuntimeProgramError, match=r"were changed after merge\(\)"):
            pipeline.adapters.unmerge()
        pipeline.zero_grad()
        seen["resumed"] = []
        for other in others:
            pipeline.load_checkpoint(other, optimizer)
            resumed = pipeline.step(batch, broadcast_loss=True)
            assert resumed is not None
            seen["resumed"].append(float(resumed))
            pipeline.zero_grad()
    (root / f"{program}-rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
