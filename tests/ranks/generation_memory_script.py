"""The most bytes that operators make on a rank that generates, as a script under torchrun: FOLDER PROGRAM...

FOLDER has ``prompts.json``. It writes the bytes beyond what was there before (``PROGRAM-rank_N.json``) and the rank's pp coordinate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from graphpar.cost_models.storage_tracker import Live
from graphpar.runtime import Pipeline, start


def main(folder: str, *programs: str) -> None:
    root = Path(folder)
    prompts = json.loads((root / "prompts.json").read_text())
    with start(200) as ranks:
        for program in programs:
            with Pipeline(root / program, ranks.device) as pipeline, torch.no_grad():
                for stage in pipeline.stages:
                    for value in [*stage.parameters(), *stage.buffers()]:
                        value.normal_(0, 0.05) if value.is_floating_point() else value.zero_()
                with Live() as live:
                    pipeline.generate(prompts, 1, do_sample=True, top_k=5, top_p=0.9, repetition_penalty=1.1)
                    highest, _ = live.mark()
                seen = [pipeline.groups.place["pp"], int(highest)]
                (root / f"{program}-rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
