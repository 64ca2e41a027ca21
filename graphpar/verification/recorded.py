"""A run that was made elsewhere (another framework, an older version, a cluster), for ``verify`` to compare a program with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from graphpar.errors import GraphparError, near_match
from graphpar.frontend.modelfile import import_file
from graphpar.ir.plan import Plan
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.modules import emitted_package, empty_stage
from graphpar.verification.reference_results import Reference
from graphpar.verification.tolerances import least_precise


@dataclass(frozen=True)
class Recorded:
    """What a run of the model began with and came to; each step is one of SGD.

    Attributes:
        weights: the ``state_dict`` before the first step.
        batches: of each step, the inputs and targets of the whole global batch, by the program's names.
        losses: of each step, over the global batch.
        state: the ``state_dict`` after the last step, or a part of it; what it lacks is not compared.
        gradients: of each step, by name; none are compared where it is empty.
        learning_rate, momentum: of SGD.
    """

    weights: Mapping[str, Tensor]
    batches: Sequence[Mapping[str, Tensor]]
    losses: Sequence[float]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Sequence[Mapping[str, Tensor]] = ()
    learning_rate: float = 0.0
    momentum: float = 0.0

    def reference(self, program: Manifest, plan: Plan) -> Reference:
        """Return the run as the reference of this program.

        Raises:
            GraphparError: numbers of batches, losses and gradients differ, the program can't be compared with a run of another
                (inference, random streams), or ``state`` has a name that the model has not.
        """
        self._check(program)
        package = emitted_package(program)
        stages = [empty_stage(package, stage, program.mode == "train") for stage in program.stages]
        parameters = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
        parameters |= {name for tie in program.ties if parameters & set(tie) for name in tie}
        held = parameters | {name for stage in stages for name in stage.state_dict()}
        for named in (self.state, *self.gradients):
            if (unknown := next((name for name in named if name not in held), None)) is not None:
                raise GraphparError(
                    f"The recorded run has a value for {unknown}, which the model lacks.{near_match(unknown, held)}"
                )
        reference = Reference(
            losses=[float(loss) for loss in self.losses],
            ties=list(program.ties),
            dtype=least_precise(value.dtype for name, value in self.weights.items() if name in parameters),
            persistent=frozenset(name for name in self.state if name not in parameters),
            batches=[dict(batch) for batch in self.batches],
            gradients=list(self.gradients),
            parameters={name: value for name, value in self.state.items() if name in parameters},
            buffers={name: value for name, value in self.state.items() if name not in parameters},
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            policy_dtype=plan.precision.cast_to,
            data=f"{len(self.batches)} recorded batches",
        )
        reference.keep(reference.weights, self.weights)
        for step, batch in enumerate(reference.batches):
            reference.keep(reference.batch_file(step), batch)
        return reference

    def _check(self, program: Manifest) -> None:
        if program.mode != "train":
            raise GraphparError("A recorded run is one of training, and this program was emitted for inference.")
        if any(entry.role == "sample_keys" for entry in program.inputs):
            raise GraphparError(
                "The program has dropout (or another random operator), whose masks a recorded run can't know. Record it without."
            )
        counts = [len(self.batches), len(self.losses), len(self.gradients) or len(self.losses)]
        if len(set(counts)) > 1 or not counts[0]:
            raise GraphparError(
                f"The run has {counts[0]} batches, {counts[1]} losses and gradients of {len(self.gradients)} steps; each step has one."
            )


def function_of(spec: str) -> Callable[..., Any]:
    """Load the function that ``FILE:function`` names.

    Raises:
        GraphparError: it is not of this form, the file can't be run, or it has no such function.
    """
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise GraphparError(f"--reference is {spec!r}; it must be FILE.py:function.")
    module = import_file(Path(file))
    found = getattr(module, name, None)
    if not callable(found):
        hint = near_match(name, (each for each in vars(module) if callable(getattr(module, each))))
        raise GraphparError(f"{file} has no function {name}.{hint}")
    return cast(Callable[..., Any], found)
