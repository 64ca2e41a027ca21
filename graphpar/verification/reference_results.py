"""What a reference came to, for ``verify`` to compare a program with: figures, and tensors in files, since they may not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.checkpoints.weights import WeightFile, write_tensors
from graphpar.runtime.launching.launch import KeptFolder

LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Accumulated:
    """The accumulated gradients of the last two batches, clipped to ``max_norm``."""

    loss: float
    norm: float
    max_norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Stepping:
    """What makes the model file's optimizer, AdamW where it has none, and its schedule."""

    optimizer: Callable[..., Any] | None
    lr_schedule: Callable[..., Any] | None


@dataclass
class Reference:
    """The results of the unpartitioned model. Tensors are in files, and are read when they are used."""

    losses: list[float]
    ties: list[tuple[str, ...]]
    dtype: torch.dtype  # the least precise dtype of the computation
    persistent: frozenset[str]  # names of buffers in the state_dict
    batches: list[dict[str, Tensor]]
    begun: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # buffers and other tensors of modules before the first step
    gradients: list[Mapping[str, Tensor]] = field(default_factory=list)  # a step
    norms: list[float] = field(default_factory=list)  # of the whole model's gradient, a step
    parameters: Mapping[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    stepped: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # the parameters after steps of the own optimizer with those gradients
    outputs: list[Mapping[str, Tensor]] = field(default_factory=list)  # of an inference program, a batch
    finite: bool = True  # whether no loss, gradient or output is infinite or nan
    accumulated: Accumulated | None = None
    evaluated: float | None = None  # the loss of the last step's batch in evaluation, with the parameters after it
    evaluated_outputs: Mapping[str, Tensor] = field(default_factory=dict)  # what the model returns of it then
    generated: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # the logits of its tokens then, where the program generates
    learning_rate: float = LEARNING_RATE
    momentum: float = MOMENTUM
    loss_scale: float | None = None  # for fp16: one that no gradient of these batches overflows with
    loss_dtype: torch.dtype = torch.float32
    policy_dtype: torch.dtype | None = None  # in which the whole model computes, whatever its parameters are stored in
    order: dict[str, int] = field(default_factory=dict)  # of the parameters' first use in the forward
    data: str = ""  # how the batches were made
    again: Callable[[], Reference] | None = None  # the same in float64; None where the model is not run
    scratch: KeptFolder = field(default_factory=lambda: KeptFolder("graphpar-reference-"))

    @property
    def folder(self) -> Path:
        """The temporary folder of the files; it is removed with this object."""
        return Path(self.scratch.name)

    @property
    def weights(self) -> Path:
        """The file of the state_dict before the first step; each tied name has a separate copy."""
        return self.folder / "weights.safetensors"

    def batch_file(self, step: int) -> Path:
        """Return the file of the inputs and targets of a step."""
        return self.folder / f"batch_{step}.safetensors"

    @property
    def gradient_files(self) -> list[Path]:
        """The files of the gradients of each step."""
        return [self.folder / f"gradients_{step}.safetensors" for step in range(len(self.gradients))]

    def keep(self, file: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Write ``tensors``, and return a mapping that reads them when they are used."""
        write_tensors(file, tensors)
        return WeightFile(file)

    @cached_property
    def in_double(self) -> Reference:
        """The same in float64, on the same batches from the same weights; run on first use."""
        assert self.again is not None
        return self.again()
