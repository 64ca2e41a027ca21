"""The first step of the model itself, kept in an emitted folder, so that ``train.py --check`` can compare with it on any machine.

the model, eagerly ──► loss, gradient norm of a batch ──► check/first_step.json, check/batch.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graphpar.codegen.saving import record
from graphpar.errors import GraphparError
from graphpar.parts import Parts
from graphpar.runtime.checkpoints.weights import write_tensors
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.runtime.training.loop import BATCH, FIRST_STEP
from graphpar.verification.reference import SEED
from graphpar.verification.tolerances import precision
from graphpar.verification.verify import reference_for

LEAST = 1e-4
"""The smallest tolerance, relative: kernels of other devices add up in another order."""


@dataclass(frozen=True)
class FirstStep:
    """A batch, and what the model gives for it: values as ``train.py --check`` reads them."""

    batch: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        """Write it into the emitted ``folder``."""
        (folder / FIRST_STEP).parent.mkdir(exist_ok=True)
        write_tensors(folder / BATCH, self.batch)
        (folder / FIRST_STEP).write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        record(folder, [FIRST_STEP, BATCH])


def first_step(parts: Parts) -> FirstStep:
    """Run the first step of the model with its initial weights, in this process.

    Raises:
        GraphparError: attention draws other masks than the model's; the model has no values, or its loss or a gradient is not finite.
    """
    if parts.plan.dropout == KERNEL:
        raise GraphparError(
            "--check-values stores what the model computes, and with --dropout kernel the program draws different attention masks; leave "
            "one of them out."
        )
    reference = reference_for(parts, 1)
    if not reference.finite:
        raise GraphparError(
            "--check-values stores the model's first step, whose loss or gradient is not finite; leave it out."
        )
    allowed = precision(reference.dtype).allowed
    values = {
        "seed": SEED,
        "loss": reference.losses[0],
        "gradient_norm": reference.norms[0],
        "tolerance": {name: max(LEAST, allowed[kind]) for name, kind in (("loss", "loss"), ("gradient_norm", "norm"))},
        "loss_scale": reference.loss_scale,
    }
    return FirstStep(reference.batches[0], values)
