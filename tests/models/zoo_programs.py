"""The programs of the zoo and of public architectures, compiled and verified: what the files of torture tests share."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import graphpar as gp
from graphpar.verification import Verification, verify_all
from tests.models.architectures import ARCHITECTURES, architecture
from tests.models.zoo import ZOO, Toy

# What can't be split, and the words that say why.
REFUSED = {
    "FixedBatch": "can't be split into",
}
# Operators that the fast run draws from: each was once spelled wrongly, or is easily.
SPELLED = (
    "chained_comparison", "meshgrid", "movedim", "unfold_dim", "interpolate_nearest", "interpolate_bilinear", "adaptive_max",
    "pools_1d", "size_arithmetic", "take_along_dim", "logsigmoid", "vector_norm", "unfold_fold", "reversed_scalars", "logical",
    "einsum", "slice_assign", "masked_scatter", "fancy_index", "max_dim_both", "view_and_base", "complex_rotary", "dropout_merged",
)  # fmt: skip
MODELS = [name for name, toy in ZOO.items() if not toy.operator and name not in REFUSED]
FAST = [*(name for name in MODELS if ZOO[name].plan.get("pp", 2) != 3), *SPELLED][::4]
SLOW = [name for name in ZOO if name not in FAST and name not in REFUSED]
WHOLE = [name for name in ZOO if name not in REFUSED]


@functools.cache
def program_of(name: str) -> gp.Program:
    toy = ZOO[name]
    return gp.export(toy.build, toy.inputs(), loss_fn=toy.loss_fn, targets=toy.targets(), **toy.export)


def planned(toy: Toy, program: gp.Program, **further: Any) -> gp.Plan:
    pins = {"schedule": "1F1B", "split": list(toy.split), **toy.plan, **further}
    return gp.plan(program, mesh={"pp": pins.pop("pp", 2)}, **pins)


@functools.cache
def parts_of(name: str) -> gp.Parts:
    toy = ZOO[name]
    program = program_of(name)
    # An operator that no rule knows may mix examples; those of the zoo don't.
    unknown = any("can't tell whether" in coupling.reason for coupling in program.couplings)
    return gp.partition(program, planned(toy, program, allow_batch_coupling=unknown))


def verified(parts: Mapping[str, gp.Parts | Exception], steps: int = 3) -> dict[str, Verification | Exception]:
    """All programs of one world size in one launch."""
    outcomes: dict[str, Verification | Exception] = {}
    names = [name for name, found in parts.items() if isinstance(found, gp.Parts)]
    jobs = [found for found in parts.values() if isinstance(found, gp.Parts)]
    outcomes.update(zip(names, verify_all(jobs, steps, timeout_s=600)))
    outcomes.update({name: found for name, found in parts.items() if isinstance(found, Exception)})
    return outcomes


def compiled(names: Sequence[str]) -> dict[str, gp.Parts | Exception]:
    made: dict[str, gp.Parts | Exception] = {}
    for name in names:
        try:
            made[name] = architecture(name) if name in ARCHITECTURES else parts_of(name)
        except Exception as error:
            made[name] = error
    return made


def check(outcome: Verification | Exception) -> None:
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)
