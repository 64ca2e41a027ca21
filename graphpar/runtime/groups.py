"""The process groups of a program's mesh.

    rank 5 of pp=2 x dp_replicate=2 x tp=2 is at pp=1, dp_replicate=0, tp=1
    groups["tp"]                               ranks 4, 5         they agree on every other axis
    groups["batch"]                            ranks 5, 7         all replicas: dp_replicate and dp_shard
    groups.over(("dp_replicate", "tp"))        ranks 4 to 7       partial on two axes
    groups.over(("dp_replicate",), (0, 1))     ranks 1, 3, 5, 7   ... of a parameter that both stages hold

A group of one is ``None``: there is nothing to do.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphpar.runtime.axes import AXES, AXIS, GROUPS, REPLICAS, STATE_AXES
from graphpar.runtime.debugging import lone_group
from graphpar.runtime.distributed import gather_objects
from graphpar.runtime.layout import Division, Shard, coordinates, rank_at
from graphpar.runtime.rendezvous import PRIORITY
from graphpar.runtime.torch_versions import forget_meshes

_STATE = Division(STATE_AXES, Shard(0))


def communicators(degrees: Mapping[str, int]) -> int:
    """Return how many groups with other ranks a rank of a training program joins: all ranks, those of each axis, of replicas, of shared
    state and of parts of the loss, and of neighbouring stages, which exchange messages in pairs."""
    several = [axis for axis, degree in degrees.items() if degree > 1]
    groups = {frozenset(several), *(frozenset([axis]) for axis in several)}
    groups |= {frozenset(axis for axis in GROUPS[name] if axis in several) for name in ("batch", "fsdp", "loss")}
    return len(groups - {frozenset()}) + min(2, degrees["pp"] - 1)


class Groups:
    """The groups that this rank is in. Building it, and asking for a group for the first time, are collective calls."""

    def __init__(self, degrees: Mapping[str, int], device: torch.device) -> None:
        self.degrees = {axis: degrees.get(axis, 1) for axis in AXES}
        self.rank = dist.get_rank()
        self.place = coordinates(self.rank, self.degrees)
        self.device, self._timeout = device, group_timeout(device)
        self._made: dict[tuple[tuple[str, ...], tuple[int, ...] | None], dist.ProcessGroup | None] = {}
        self._state: dist.ProcessGroup | None = None
        self._owned: list[dist.ProcessGroup] = []
        self.axes = {axis: group for axis in AXES if (group := self._of_axis(axis)) is not None}
        self.over(self._several("batch"))

    def __getitem__(self, name: str) -> dist.ProcessGroup | None:
        """The group of an axis, or of a name of :data:`~graphpar.runtime.axes.GROUPS`; ``None`` where it is this rank alone.

        Raises:
            KeyError: there is no such name; the message lists those that there are.
        """
        if name in ("fsdp", "efsdp"):
            return self._of_state()
        if name in GROUPS:
            return self.over(self._several(name))
        if name not in AXES:
            raise KeyError(f"there is no group {name!r}; there are {', '.join((*AXES, *GROUPS))}")
        return self.axes.get(name)

    def largest(self) -> dist.ProcessGroup | None:
        """The largest group of an axis whose ranks have the same stages; ``None`` where this rank alone has its."""
        inside = [axis for axis in self.axes if axis != "pp"]
        return self.axes[max(inside, key=self.degrees.__getitem__)] if inside and not lone_group.is_alone() else None

    def _several(self, name: str) -> list[str]:
        """The axes of a named group that have several ranks."""
        return [axis for axis in GROUPS[name] if self.degrees[axis] > 1]

    @property
    def replica(self) -> int:
        """Which of the replicas this rank belongs to."""
        index = 0
        for axis in REPLICAS:
            index = index * self.degrees[axis] + self.place[axis]
        return index

    def rank_at(self, **changed: int) -> int:
        """Return the rank with this rank's coordinates except ``changed``."""
        return rank_at({**self.place, **changed}, self.degrees)

    @property
    def shards(self) -> int:
        """How many ranks share the state."""
        return _STATE.degree(self.degrees)

    @property
    def shard(self) -> int:
        """Which of these this rank is."""
        return _STATE.index(self.degrees, self.place)

    def rank_of_shard(self, index: int) -> int:
        """Return the rank that is number ``index`` of those that share the state with this one."""
        place = {}
        for axis in reversed(STATE_AXES):
            index, place[axis] = divmod(index, self.degrees[axis])
        return self.rank_at(**place)

    def gather(self, axis: str, value: Any) -> list[Any]:
        """Gather ``value`` of every rank of an axis, by coordinate; a collective call of that axis."""
        group = self[axis]
        return [value] if group is None else gather_objects(value, group)

    def over(self, axes: Sequence[str], stages: tuple[int, ...] | None = None) -> dist.ProcessGroup | None:
        """Return the group of the ranks that differ from this one on ``axes`` alone, none of them pp.

        With ``stages``: of all ranks at these pp coordinates. All ranks ask in the same order, also those outside.

        Returns:
            ``None`` when this rank would be alone, or is at another pp coordinate.
        """
        key = tuple(axis for axis in AXES if axis in axes), stages
        if key not in self._made:
            self._made[key] = self._divided(list(self._cosets(*key)), "_".join(key[0]) or "pp")
        return self._made[key]

    def of_stages(self, name: str) -> dist.ProcessGroup | None:
        """Make another group of the ranks of ``pp``, whose messages wait for none of the stages'; a collective call."""
        return self._divided(list(self._cosets((), tuple(range(self.degrees["pp"])))), name, own=True)

    def _of_state(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share state: one of its own where operators communicate over some of its axes, so that
        gathers and sums travel beside their messages."""
        axes = self._several("fsdp")
        if all(AXIS[axis].replicas for axis in axes):
            return self.over(axes)
        if self._state is None:
            self._state = self._divided(list(self._cosets(tuple(axes), None)), "state", own=True)
        return self._state

    def _of_axis(self, axis: str) -> dist.ProcessGroup | None:
        if axis == "pp":
            return self.over((), tuple(range(self.degrees["pp"])))
        return self.over((axis,)) if self.degrees[axis] > 1 else None

    def _cosets(self, axes: tuple[str, ...], stages: tuple[int, ...] | None) -> Iterator[list[int]]:
        """The ranks of every such group of the mesh."""
        fixed = [axis for axis in AXES if axis not in axes and not (axis == "pp" and stages is not None)]
        varying = {axis: range(self.degrees[axis]) for axis in axes}
        inside: dict[str, Sequence[int]] = {**({} if stages is None else {"pp": stages}), **varying}
        for outer in itertools.product(*(range(self.degrees[axis]) for axis in fixed)):
            place = dict(zip(fixed, outer))
            inner = itertools.product(*inside.values())
            yield sorted(rank_at({**place, **dict(zip(inside, at))}, self.degrees) for at in inner)

    def _divided(self, groups: Sequence[list[int]], name: str, own: bool = False) -> dist.ProcessGroup | None:
        """Make these groups, which are disjoint and of one size, and return this rank's; ``None`` where it is alone, or in none.

        On nccl that is one call, which splits the communicator of all ranks. A call for each group would be a collective of all ranks,
        and 16,384 ranks have thousands.

        Args:
            own: also where the group of all ranks is the same one.
        """
        if len(groups[0]) == 1:
            return None
        if len(groups[0]) == dist.get_world_size() and not own:
            return dist.group.WORLD
        if dist.get_backend() == "nccl":
            options = copy.deepcopy(_backend(self.device).options)
            options.is_high_priority_stream = name in PRIORITY
            made = [dist.split_group(None, list(groups), timeout=self._timeout, pg_options=options, group_desc=name)]
        else:
            made = [dist.new_group(ranks, timeout=self._timeout, group_desc=name) for ranks in groups]
        self._owned += [group for group in made if isinstance(group, dist.ProcessGroup)]
        return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)

    def close(self) -> None:
        """Destroy the groups that were created for this program."""
        for group in self._owned:
            dist.destroy_process_group(group)
        self._owned.clear()
        forget_meshes()
        self._made.clear()
        self._state = None
        self.axes.clear()


def _backend(device: torch.device) -> Any:
    """The backend of the group of all ranks."""
    return dist.distributed_c10d._get_default_group()._get_backend(device)


def group_timeout(device: torch.device) -> timedelta | None:
    """Return the default group's timeout, for new groups: torch's default would be half an hour."""
    timeout: timedelta | None = getattr(getattr(_backend(device), "options", None), "_timeout", None)
    return timeout
