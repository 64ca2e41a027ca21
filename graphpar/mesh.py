"""The device mesh: named axes in one canonical order, outermost first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphpar.errors import GraphparError, near_match
from graphpar.runtime.layout import AXES


@dataclass(frozen=True)
class Mesh:
    """Degrees of the axes. ``tp`` is innermost, so neighbouring ranks share a tp group."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if degree < 1:
                raise GraphparError(f"Mesh axis {axis} has degree {degree}; it must be at least 1.")

    @property
    def compute(self) -> dict[str, int]:
        """The axes of several ranks on which operators are cut."""
        return {axis: degree for axis, degree in self.degrees().items() if axis in ("cp", "ep", "tp") and degree > 1}

    def degrees(self) -> dict[str, int]:
        return {axis: int(getattr(self, axis)) for axis in AXES}

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.degrees().values())

    @staticmethod
    def parse(text: str) -> dict[str, int]:
        """``pp=2,tp=2`` as a dictionary of degrees; errors name the axis."""
        degrees: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            axis, equals, value = part.partition("=")
            if not equals:
                raise GraphparError(f"--mesh wants axis=degree pairs such as pp=2; got {part!r}.")
            try:
                degrees[axis.strip()] = int(value)
            except ValueError:
                raise GraphparError(f"Mesh axis {axis}: {value!r} is no whole number.") from None
        return degrees

    @staticmethod
    def resolve(degrees: Mapping[str, int] | None, devices: int | None) -> Mesh:
        """The mesh of ``devices`` devices with some degrees given; a pipeline takes what is left."""
        given = dict(degrees or {})
        for axis in given:
            if axis not in AXES:
                raise GraphparError(
                    f"There is no mesh axis {axis!r}; the axes are {', '.join(AXES)}.{near_match(axis, AXES)}"
                )
        for axis, degree in given.items():
            if degree == -1 and axis == "dp_shard" and devices is not None:
                rest = math.prod(value for name, value in given.items() if name != axis)
                given[axis] = max(1, devices // rest)
            elif degree < 1:
                raise GraphparError(f"Mesh axis {axis} has degree {degree}; it must be at least 1.")
        if devices is None:
            return Mesh(**given)
        if devices < 1:
            raise GraphparError(f"{devices} devices: at least 1 is needed.")
        if "pp" not in given:
            rest = math.prod(given.values())
            if devices % rest:
                shown = ", ".join(f"{axis}={degree}" for axis, degree in given.items())
                raise GraphparError(
                    f"{devices} devices don't divide by the mesh's {shown}; take a multiple of {rest} devices, or other degrees."
                )
            given["pp"] = devices // rest
        product = math.prod(given.values())
        if product != devices:
            shown = " * ".join(f"{axis}({given[axis]})" for axis in AXES if axis in given)
            raise GraphparError(
                f"Invalid mesh: {shown} = {product} != {devices} devices. Leave out pp, and it takes what is left."
            )
        return Mesh(**given)
