"""The highest memory of a rank in a real step, as a script under torchrun: ``memory_script.py PROGRAM BATCH OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from graphpar.cost_models.storage_tracker import Live
from graphpar.runtime import Pipeline, start


def main(program: str, batch: str, out: Path) -> None:
    with start(120) as ranks:
        pipeline = Pipeline(program, ranks.device)
        for stage in pipeline.stages:
            for value in [*stage.parameters(), *stage.buffers()]:
                equal = torch.Generator().manual_seed(value.numel())  # those of a tie, on whichever ranks
                with torch.no_grad():
                    value.normal_(0, 0.05, generator=equal) if value.is_floating_point() else value.zero_()
        rows = load_file(batch)
        with Live() as live:
            pipeline.step(rows, step=0)  # makes the buffers of boundaries
            pipeline.zero_grad()
            live.mark()
            pipeline.step(rows, step=1)
            highest, _ = live.mark()
        place = pipeline.groups.place["pp"]
        (out / f"{pipeline.rank}.json").write_text(json.dumps([place, int(highest)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
