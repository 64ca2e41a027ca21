"""``Precision``: in which dtypes a program computes, and stores and steps its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpar.errors import GraphparError, near_match
from graphpar.hardware.devices import Device
from graphpar.runtime.option_kinds import FP8_RECIPES, PATTERNS
from graphpar.runtime.records import DTYPES

ROWWISE, MXFP8 = FP8_RECIPES
AUTO = "auto"
"""Compute in bf16 where the model trains and is built in fp32; else in the dtypes that it is built in."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a program, by their names.

    Attributes:
        dtype: in which the model computes. In fp32 it computes in the dtypes that it was built in, and nothing is cast. :data:`AUTO` is
            decided by :func:`graphpar.frontend.capture.capture`.
        param_dtype: in which parameters are stored, and stepped. Empty: fp32 for training, ``dtype`` for inference.
        output_dtype: of the model's outputs, such as what a loss function takes. Empty: fp32 for training, for inference as computed.
        keep_fp32: patterns of modules that compute in fp32 and store their parameters in it, whatever the others do.
        fp8: patterns of modules whose ``nn.Linear`` layers multiply in 8 bits.
        fp8_recipe: how they do, one of :data:`~graphpar.runtime.option_kinds.FP8_RECIPES`; empty where none do.
    """

    dtype: str = "fp32"
    param_dtype: str = ""
    output_dtype: str = ""
    keep_fp32: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    fp8_recipe: str = ""

    @staticmethod
    def of(
        dtype: str | None = None,
        pure: bool | None = None,
        param_dtype: str | None = None,
        output_dtype: str | None = None,
        keep_fp32: Any = None,
        fp8: Any = None,
        fp8_recipe: str | None = None,
    ) -> Precision:
        """Make a policy of what a user asks for; ``pure`` stores parameters in the compute dtype.

        Raises:
            GraphparError: a dtype is not known, or ``pure`` contradicts ``param_dtype``, or one has no use in fp32.
        """
        kept = () if keep_fp32 is None else PATTERNS.check("keep_fp32", keep_fp32)
        eight = () if fp8 is None else PATTERNS.check("fp8", fp8)
        if fp8_recipe is not None and fp8_recipe not in FP8_RECIPES:
            raise GraphparError(
                f"fp8_recipe is {fp8_recipe!r}; it must be one of {', '.join(FP8_RECIPES)}."
                f"{near_match(str(fp8_recipe), FP8_RECIPES)}"
            )
        if fp8_recipe and not eight:
            raise GraphparError("fp8_recipe says how the layers of fp8 multiply; give fp8 with it.")
        recipe = fp8_recipe or ROWWISE if eight else ""
        check_dtype("output_dtype", output_dtype)
        if dtype == AUTO and not pure and param_dtype is None:
            return Precision(AUTO, "", output_dtype or "", kept, eight, recipe)
        for name, value in (("dtype", dtype), ("param_dtype", param_dtype)):
            check_dtype(name, value)
        for name, given in (("output_dtype", output_dtype), ("keep_fp32", kept)):
            if given and dtype in (None, "fp32"):
                raise GraphparError(f"{name} is for a model that computes in 16 bits; give dtype=bf16 or fp16 with it.")
        if eight and dtype != "bf16":
            raise GraphparError("fp8 is for a model that computes in bf16; give dtype=bf16 with it.")
        if pure and param_dtype not in (None, dtype or "fp32"):
            raise GraphparError(
                f"pure stores parameters in the compute dtype, {dtype or 'fp32'}, but param_dtype is {param_dtype}; give one of them."
            )
        if pure and dtype in (None, "fp32"):
            raise GraphparError(
                "pure stores parameters in the compute dtype, and that is fp32 anyway; give dtype=bf16 or fp16 with it."
            )
        return Precision(
            dtype or "fp32", (dtype or "fp32") if pure else param_dtype or "", output_dtype or "", kept, eight, recipe
        )

    def check_units(self, device: Device) -> None:
        """Check that ``device`` can multiply in 8 bits as is asked for.

        Raises:
            GraphparError: it can't; CPUs emulate it.
        """
        if self.fp8 and device.kind != "cpu" and "fp8" not in device.flops:
            raise GraphparError(f"fp8: {device.name} has no units for 8 bits; leave it out.")
        if self.fp8_recipe == MXFP8 and device.kind != "cpu" and MXFP8 not in device.flops:
            raise GraphparError(
                f"fp8_recipe: {device.name} has no units for blocks of 32 values with a scale (mxfp8); take rowwise."
            )

    def resolved(self, mode: str) -> Precision:
        """Return the policy with its ``param_dtype`` filled in, for ``train`` or ``infer``."""
        return self if self.param_dtype else replace(self, param_dtype="fp32" if mode == "train" else self.dtype)

    @property
    def text(self) -> str:
        """``dtype bf16 with parameters in fp32, outputs in bf16, **.norm in fp32``"""
        more = [f"outputs in {self.output_dtype}"] * bool(self.output_dtype)
        more += [f"{', '.join(self.keep_fp32)} in fp32"] * bool(self.keep_fp32)
        more += [f"products of {', '.join(self.fp8)} in 8 bits ({self.fp8_recipe or ROWWISE})"] * bool(self.fp8)
        return ", ".join([f"dtype {self.dtype} with parameters in {self.param_dtype}", *more])

    @property
    def casts(self) -> bool:
        """Whether anything is cast."""
        return {self.dtype, self.param_dtype} - {"fp32", ""} != set()

    @property
    def computed(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return DTYPES[self.dtype]

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which parameters are stored."""
        return DTYPES[self.param_dtype]

    def returned(self, training: bool) -> torch.dtype | None:
        """The dtype of the model's outputs; None for that in which they are computed."""
        if not self.casts or not (self.output_dtype or training):
            return None
        return DTYPES[self.output_dtype or "fp32"]

    @property
    def cast_to(self) -> torch.dtype | None:
        """The dtype to which parameters and inputs are cast while the model runs; None where nothing is."""
        return self.computed if self.casts else None


def check_dtype(name: str, value: Any) -> None:
    """Check that the argument ``name`` is a dtype that a policy may have; None is one that is not given.

    Raises:
        GraphparError: it is not.
    """
    if value is not None and value not in DTYPES:
        raise GraphparError(
            f"{name} is {value!r}; it must be one of {', '.join(DTYPES)}.{near_match(str(value), DTYPES)}"
        )
