"""A script for ranks: steps on sequences of other lengths, for each program of a file of jobs.

    lengths_script.py JOBS

A job names a PROGRAM, and for each step the files of its batches, each one for all ranks or a list of one a replica. Writes
PROGRAM/trained.json and PROGRAM/trained.safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from graphpar.runtime import Pipeline, RuntimeProgramError, start
from tests.tools.parity import LR, MOMENTUM


def main(jobs: Path) -> None:
    with start(120.0) as ranks:
        for job in json.loads(jobs.read_text()):
            folder = Path(job["program"])
            report: dict[str, Any] = {"losses": [], "refused": ""}
            with Pipeline(folder, ranks.device, compile=job.get("compile", False)) as pipeline:
                pipeline.load_weights(folder / "initial.safetensors")
                optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR, momentum=MOMENTUM)
                for files in job["steps"]:
                    own = [file if isinstance(file, str) else file[pipeline.data.replica] for file in files]
                    optimizer.zero_grad()
                    loss = pipeline.step([load_file(file) for file in own], broadcast_loss=True)
                    assert loss is not None
                    pipeline.assert_idle()
                    report["losses"].append(loss.item())
                    optimizer.step()
                pipeline.zero_grad()
                for file in job.get("evaluated", ()):
                    found = pipeline.eval(load_file(file), outputs=bool(pipeline.program.model_outputs))
                    if found is not None:
                        save_file(
                            {name: value.contiguous() for name, value in found.items()}, f"{file}.outputs_{folder.name}"
                        )
                try:
                    pipeline.step(load_file(job["refused"]))
                except RuntimeProgramError as error:
                    report["refused"] = str(error)
                pipeline.save_weights(folder / "trained.safetensors")
            if ranks.rank == 0:
                (folder / "trained.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
