"""One rank of programs that evaluate and train on whole batches and on the rank's own rows.

As a script (under torchrun): FOLDER, which has a folder for each program with its ``weights.safetensors`` and ``batch.safetensors``. Each
rank writes ``rank_N.json`` into it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state.fully_sharded import local


def seen(program: Path, device: torch.device) -> dict[str, Any]:
    with Pipeline(program, device) as pipeline:
        pipeline.load_weights(program / "weights.safetensors")
        whole, part = load_file(program / "batch.safetensors"), pipeline.data
        own = {name: whole[name][part.rows] for name in part.names}
        before = {name: local(value).clone() for name, value in pipeline.state_dict().items()}
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.0)
        found: dict[str, Any] = {"evaluated": [], "trained": [], "norms": []}
        for batch in (own, whole):
            found["evaluated"].append({name: float(value) for name, value in (pipeline.eval(batch) or {}).items()})
            found["trained"].append(float(pipeline.step(batch, step=1, broadcast_loss=True)))  # type: ignore[arg-type]
            found["norms"].append(float(pipeline.clip_grad_norm_(1.0)))
            optimizer.step()
            pipeline.zero_grad()
        found["untouched"] = all(
            torch.equal(local(value), before[name]) for name, value in pipeline.state_dict().items()
        )
        return found


def main(folder: str) -> None:
    with start(200) as ranks:
        found = {path.parent.name: seen(path.parent, ranks.device) for path in sorted(Path(folder).glob("*/plan.json"))}
    Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
