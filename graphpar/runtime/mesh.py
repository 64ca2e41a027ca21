"""The device mesh: named axes in one canonical order, outermost first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from graphpar.runtime.axes import AXES, AXIS, GROUPS, STATE_AXES
from graphpar.runtime.errors import GraphparError, near_match

_USUAL_NAMES = {name: axis.name for axis in AXIS.values() for name in axis.usual_names}


@dataclass(frozen=True)
class Mesh:
    """Degrees of the axes. ``tp`` is innermost, so neighbouring ranks share a tp group."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    dp_expert: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if degree < 1:
                raise GraphparError(f"Mesh axis {axis} has degree {degree}; it must be at least 1.")

    @property
    def compute(self) -> dict[str, int]:
        """The degrees of the axes over which operators are sharded, without those of one rank."""
        return {axis: degree for axis, degree in self.degrees().items() if AXIS[axis].compute and degree > 1}

    @property
    def replicas(self) -> int:
        """How many ranks run the same stage on rows of their own."""
        return math.prod(degree for axis, degree in self.degrees().items() if AXIS[axis].replicas)

    @property
    def replica_degrees(self) -> dict[str, int]:
        """The degrees of the axes whose ranks have rows of their own, without those of one rank."""
        return {axis: degree for axis, degree in self.degrees().items() if AXIS[axis].replicas and degree > 1}

    @property
    def text(self) -> str:
        """The axes of several ranks with their degrees, as ``pp=2, tp=4``."""
        several = (f"{axis}={degree}" for axis, degree in self.degrees().items() if degree > 1)
        return ", ".join(several) or "of one device"

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO shards state: those of dp_shard and cp together."""
        return math.prod(self.degrees()[axis] for axis in STATE_AXES)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes of several ranks over which ZeRO shards state."""
        return tuple(axis for axis in STATE_AXES if self.degrees()[axis] > 1)

    @property
    def state_axis(self) -> str:
        """The outermost of them, under which reports count the messages of state."""
        return next(iter(self.state_axes), STATE_AXES[0])

    @property
    def state_text(self) -> str:
        """These axes with their degrees, as ``dp_shard=2 x cp=4``."""
        return " x ".join(f"{axis}={self.degrees()[axis]}" for axis in self.state_axes) or f"{STATE_AXES[0]}=1"

    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis, outermost first."""
        return {axis: int(getattr(self, axis)) for axis in AXES}

    def groups(self, name: str) -> list[list[int]]:
        """Return the ranks of every group of an axis, or of a name of :data:`~graphpar.runtime.axes.GROUPS`, in order.

        Raises:
            GraphparError: there is no such name.
        """
        names = (*AXES, *GROUPS)
        if name not in names:
            raise GraphparError(f"There is no group {name!r}; there are {', '.join(names)}.{near_match(name, names)}")
        return self.groups_over(GROUPS.get(name, (name,)))

    def groups_over(self, axes: Collection[str]) -> list[list[int]]:
        """Return the ranks of every group whose ranks differ on ``axes`` alone, in order."""
        from graphpar.runtime.layout import coordinates  # imports torch, which the command line's help does without

        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = coordinates(rank, self.degrees())
            found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(found.values())

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.degrees().values())

    @staticmethod
    def parse(text: str) -> dict[str, int]:
        """Parse ``pp=2,tp=2`` into a dictionary of degrees.

        Raises:
            GraphparError: the text is not a list of axis=degree pairs; the axis is named.
        """
        degrees: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            axis = name.lower()
            if not equals:
                raise GraphparError(f"A mesh is written as axis=degree pairs such as pp=2,tp=2; {part!r} is not one.")
            if axis in degrees:
                raise GraphparError(f"Mesh axis {axis} is given twice, with {degrees[axis]} and {value}.")
            try:
                degrees[axis] = int(value)
            except ValueError:
                raise GraphparError(f"Mesh axis {axis}: {value!r} is not a whole number.") from None
        if not degrees:
            raise GraphparError(
                f"The mesh {text!r} has no axis; write axis=degree pairs such as pp=2,tp=2, or leave it out."
            )
        return degrees

    @staticmethod
    def pinned(degrees: Mapping[str, int] | None, devices: int | None = None) -> dict[str, int]:
        """Check the degrees that are given; ``dp_shard=-1`` becomes what the others leave of ``devices``.

        Raises:
            GraphparError: an axis is unknown, a degree is not a positive number, or they don't divide the devices.
        """
        if degrees is not None and not isinstance(degrees, Mapping):
            raise GraphparError(f"mesh is {degrees!r}; it must be degrees of axes, such as {{'pp': 2}} or 'pp=2'.")
        given, requested = dict(degrees or {}), dict(degrees or {})
        for axis in given:
            if axis not in AXES:
                usual = _USUAL_NAMES.get(str(axis).lower())
                hint = near_match(str(axis), AXES) if usual is None else f" Did you mean {usual!r}?"
                raise GraphparError(f"There is no mesh axis {axis!r}; the axes are {', '.join(AXES)}.{hint}")
        for axis, degree in given.items():
            if isinstance(degree, bool) or not isinstance(degree, int):
                raise GraphparError(f"Mesh axis {axis} has degree {degree!r}; it must be a whole number.")
            if degree == -1 and axis == "dp_shard":
                if devices is None:
                    raise GraphparError(
                        "Mesh dp_shard=-1 takes what the other axes leave of the devices; give --devices or a cluster."
                    )
                rest = math.prod(value for name, value in given.items() if name != axis)
                given[axis] = max(1, devices // rest)
            elif degree < 1:
                raise GraphparError(f"Mesh axis {axis} has degree {degree}; it must be at least 1.")
        if devices is None:
            return given
        if devices < 1:
            raise GraphparError(f"{devices} devices: at least 1 is needed.")
        product = math.prod(given.values())
        if devices % product:
            product = math.prod(value for value in requested.values() if value > 0)
            shown = ", ".join(f"{axis}={degree}" for axis, degree in requested.items() if degree > 0)
            raise GraphparError(
                f"{devices} devices don't divide by the mesh's {shown}; take a multiple of {product} devices, or other degrees."
            )
        return given

    @staticmethod
    def resolve(degrees: Mapping[str, int] | None, devices: int | None) -> Mesh:
        """Make the mesh of the degrees that are given, with 1 for the others.

        Raises:
            GraphparError: as :meth:`pinned`, or the product of the degrees is not ``devices``.
        """
        given = Mesh.pinned(degrees, devices)
        product = math.prod(given.values())
        if devices is not None and product != devices:
            shown = " * ".join(f"{axis}({given[axis]})" for axis in AXES if axis in given) or "no axis"
            raise GraphparError(
                f"Invalid mesh: {shown} = {product} != {devices} devices. Leave out pp, dp_replicate or tp, and it is searched."
            )
        return Mesh(**given)
