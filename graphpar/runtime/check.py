"""``train.py --check``: the first step on these ranks against the model's own on one device, which ``compile --check-values`` stored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from graphpar.runtime.distributed import agreed
from graphpar.runtime.errors import RuntimeProgramError

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

FIRST_STEP, BATCH = "check/first_step.json", "check/batch.safetensors"
"""What is stored, by its path in an emitted folder."""


def check_first_step(pipeline: Pipeline) -> None:
    """Run a step from the initial weights on the stored batch, and print its loss and gradient norm beside the stored ones.

    A collective call. Parameters are the initial ones afterwards, and have no gradients.

    Raises:
        RuntimeProgramError: on all ranks, if nothing is stored, or if a value differs by more than rounding.
    """
    folder = pipeline.program.folder
    with agreed():
        if not (folder / FIRST_STEP).is_file():
            raise RuntimeProgramError(
                "nothing is stored to compare with: compile with --check-values where the whole model fits in memory (for a model that "
                "never does, a smaller one of the same kind)"
            )
        stored = json.loads((folder / FIRST_STEP).read_text(encoding="utf-8"))
        if pipeline.seed != stored["seed"]:
            raise RuntimeProgramError(
                f"the stored step was made with seed {stored['seed']}, not {pipeline.seed}; leave --seed out"
            )
    pipeline.load_weights()
    if stored["loss_scale"] is not None:
        pipeline.loss_scale = stored["loss_scale"]
    loss = pipeline.step(load_file(folder / BATCH), step=0, broadcast_loss=True)
    assert loss is not None
    found = {"loss": loss.item(), "gradient_norm": pipeline.clip_grad_norm_(math.inf).item()}
    pipeline.zero_grad()
    pairs, wrong = [], []
    for name, value in found.items():
        pairs.append(f"{name.replace('_', ' ')} {value:.6f}, the model's {stored[name]:.6f}")
        if not math.isclose(value, stored[name], rel_tol=stored["tolerance"][name], abs_tol=1e-12):
            wrong.append(f"{pairs[-1]}, which differ by more than {stored['tolerance'][name]:.0e} of it")
    with agreed():
        if wrong:
            raise RuntimeProgramError(
                f"the first step is not the model's: {'; '.join(wrong)}. Were the stages edited, or weights/ replaced?"
            )
    if pipeline.reports:
        print(f"check: {'; '.join(pairs)}: the same", flush=True)
