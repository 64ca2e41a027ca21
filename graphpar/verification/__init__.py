"""``verify``: compare the emitted program with the unpartitioned model, each step on different data.

    example ──► batches      a batch a step; the first is the example's
    model, batches ──► reference    eager, one process ──► losses, gradients, parameters, buffers ─┐
    out/,  batches ──► every rank, gloo processes      ──► the same, shards joined, every replica  ┴─ comparison
                                                                                unclear ──► both again in float64

The optimizer is SGD with momentum, because Adam hides a gradient that is wrong by a factor. Its last step takes the gradients of two
batches, accumulated and clipped.
"""

from graphpar.verification.comparison import Difference, Verification, compare
from graphpar.verification.recorded import Recorded
from graphpar.verification.reference import run_reference
from graphpar.verification.reference_results import Accumulated, Reference
from graphpar.verification.tolerances import PRECISIONS
from graphpar.verification.verify import STEPS, reference_for, verify_all, verify_parts

__all__ = [
    "PRECISIONS",
    "STEPS",
    "Accumulated",
    "Difference",
    "Recorded",
    "Reference",
    "Verification",
    "compare",
    "reference_for",
    "run_reference",
    "verify_all",
    "verify_parts",
]
