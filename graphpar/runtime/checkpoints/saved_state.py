"""What a checkpoint holds of a program, by names that no plan changes: whole tensors, each rank with some boxes of them.

    model.NAME                   a parameter or persistent buffer; a tied one once, under the first of its names
    optimizer.state.NAME.KEY     what the optimizer keeps of a parameter: a tensor of its shape, or one number
    record["optimizer"]          its kind, and the hyperparameters of its groups with the names of their parameters

Ranks that hold the same boxes take turns to write them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphpar.runtime.axes import AXES
from graphpar.runtime.checkpoints.tensor_chunks import MODEL, STATE, Box, Entry, Key, boxes_of, part_of
from graphpar.runtime.checkpoints.weights import listed, names_by_tie, whole_shape
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import Shard
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.option_kinds import TRAIN
from graphpar.runtime.state.fully_sharded import local
from graphpar.runtime.state.offloaded_state import OffloadedState
from graphpar.runtime.state.parameters import Replicated

HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""What of a group of an optimizer is not saved: its parameters, and how they are stepped rather than by what numbers."""


@dataclass
class State:
    """The parameters, buffers and optimizer state that this rank stores.

    Raises:
        RuntimeProgramError: the optimizer has parameters that are not the program's.
    """

    parameters: Replicated
    optimizer: Optimizer | None = None
    offloaded: OffloadedState | None = None  # where its state lives, if not on the device
    whole: Mapping[str, nn.Parameter] = field(default_factory=dict)  # what this rank owns of those that are divided
    exchange: tuple[str, ...] = ()  # the axes of which one rank owns each of them
    names: dict[Tensor, str] = field(
        init=False
    )  # of the parameters that an optimizer steps; tied ones by their first name
    counts: set[str] = field(
        init=False
    )  # keys of state that has one element for some larger parameter: of any it is no part

    def __post_init__(self) -> None:
        self.program, self.groups = self.parameters.program, self.parameters.groups
        self.names = self.parameters.names() | {parameter: name for name, parameter in self.whole.items()}
        self.counts = {
            key
            for parameter, first, state in self._state()
            for key, value in tensors_of(first, state)
            if value.numel() == 1 < parameter.numel()
        }
        strange = [
            f"{list(parameter.shape)} of group {number}"
            for number, group in enumerate(self._param_groups())
            for parameter in group["params"]
            if parameter not in self.names and parameter.numel()
        ]
        if strange:
            raise RuntimeProgramError(
                f"the optimizer steps parameters that are not the program's, with the shapes {listed(strange)}; "
                "make it with pipeline.parameters() or pipeline.named_parameters()"
            )

    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def first(self, name: str) -> str:
        """Return the first name of the tie that a name is of."""
        return names_by_tie(self.program.ties).get(name, (name,))[0]

    def model(self) -> dict[str, Entry]:
        """Return the parameters and persistent buffers by first name; where stages share one, all of its copies at once."""
        found: dict[str, Entry] = {}
        for stage in self.parameters.stages:
            for name, tensor in stage.state_dict(keep_vars=True).items():
                entry = found.get(self.first(name))
                path = *MODEL, self.first(name)
                if self.parameters.is_apart(tensor):  # in the pieces that this rank updates, of which it may have none
                    for piece in self.parameters.updated.get(self.first(name), ()):
                        found[self.first(name)] = self._entry(
                            path, name, piece, self.parameters.slice_of(self.first(name))
                        )
                    continue
                made = self._entry(path, name, tensor)
                made.frozen = is_frozen(tensor, self.program)
                if entry is None:
                    found[self.first(name)] = made
                elif all(other.data_ptr() != made.tensors[0].data_ptr() for other in entry.tensors):
                    entry.tensors += made.tensors
                    entry.boxes += made.boxes
        return found

    def replaced(self, name: str, tensor: Tensor, values: Tensor) -> Entry:
        """Describe other ``values`` of a parameter of this rank, of which ``tensor`` is the stage's: its shard as it is stored."""
        return self._entry((*MODEL, self.first(name)), name, tensor, values=values)

    def _entry(
        self,
        path: Key,
        name: str,
        tensor: Tensor,
        piece: tuple[torch.Size, int] | None = None,
        values: Tensor | None = None,
    ) -> Entry:
        """Describe a tensor that is stored as the parameter or buffer of this name is, or a ``piece`` of it; or other ``values`` of it."""
        spec, values = self.program.stored(name), local(tensor.detach()) if values is None else values
        of, start = piece or (None, 0)
        shape = whole_shape(self.program, name, tensor if of is None else torch.empty(of, device="meta"))
        boxes = boxes_of(values, shape, spec, self.program.mesh, self.groups.place, of=of, start=start)
        more = () if piece is None else self.parameters.divides
        return self._turned(Entry(path, tuple(shape), values.dtype, boxes, [values]), spec, *more)

    def _turned(self, entry: Entry, spec: Mapping[str, Any], *more: str) -> Entry:
        """Note which other ranks hold the boxes of ``entry``, apart from those of other stages."""
        entry.divided = frozenset(axis for axis, kind in spec.items() if isinstance(kind, Shard)) | set(more)
        count, index = 1, 0
        for axis in AXES:
            if axis != "pp" and axis not in entry.divided:
                count *= self.groups.degrees[axis]
                index = index * self.groups.degrees[axis] + self.groups.place[axis]
        entry.copies = count, index
        return entry

    def of_parameter(self, parameter: Tensor, key: str, value: Tensor) -> Entry:
        """Describe a tensor of an optimizer's state.

        Raises:
            RuntimeProgramError: it has neither the shape of the parameter nor one element, and this rank has a part of the parameter.
        """
        name = self.names[parameter]
        path = (*STATE, name, key)
        owned = parameter is self.whole.get(name)
        if owned or (value.ndim and value.shape != parameter.shape and self._is_whole(parameter)):
            box = Box((0,) * value.ndim, value.detach())
            others = (*(self.exchange if owned else ()), *self.parameters.divides)
            return self._turned(Entry(path, tuple(value.shape), value.dtype, [box], [box.values]), {}, *others)
        if value.shape == parameter.shape and (value.numel() != 1 or key not in self.counts):
            return self._entry(path, name, value, self.parameters.slice_of(name))
        if value.numel() == 1:
            held = local(value.detach())
            return Entry(path, tuple(value.shape), value.dtype, [Box((0,) * value.ndim, held)], [held])
        raise RuntimeProgramError(
            f"{type(self.optimizer).__name__} keeps {key} of {name} as {list(value.shape)}, where the parameter is "
            f"{list(parameter.shape)}: state whose shape differs from the parameter's can't be loaded under another plan"
        )

    def _shape(self, parameter: Tensor) -> Sequence[int]:
        """The shape of what this rank has of a parameter, a slice of which it may update."""
        name = self.names[parameter]
        piece = None if parameter is self.whole.get(name) else self.parameters.slice_of(name)
        return parameter.shape if piece is None else piece[0]

    def _is_whole(self, parameter: Tensor) -> bool:
        """Whether this rank updates all of a parameter."""
        name = self.names[parameter]
        divided = any(isinstance(kind, Shard) for kind in self.program.stored(name).values())
        return parameter is self.whole.get(name) or (
            not divided and parameter.numel() == math.prod(self._shape(parameter))
        )

    def optimizer_state(self) -> dict[str, Entry]:
        """Return the tensors of the optimizer's state by key; of equal copies of a parameter, the first one's."""
        found: dict[str, Entry] = {}
        for parameter, first, state in self._state():
            for key, value in tensors_of(first, state):
                entry = self.of_parameter(parameter, key, value)
                found.setdefault(entry.key, entry)
        return found

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradients of this rank's parameters to their parts of whole ones; to none where there is none."""
        for parameter, name in self.names.items():
            parameter.grad = torch.zeros_like(parameter, requires_grad=False) if name in gradients else None
            if parameter.grad is not None:
                whole = gradients[name].to(parameter.device)
                for box in self.of_parameter(parameter, "", parameter.grad).boxes:
                    box.values.copy_(part_of(whole, box.offsets, box.values.shape))

    def _state(self) -> Iterable[tuple[Tensor, str, Any]]:
        state = {} if self.optimizer is None else self.optimizer.state
        for parameter, values in state.items():
            if parameter in self.names:
                yield from ((parameter, str(key), value) for key, value in values.items())

    def described(self) -> dict[str, Any] | None:
        """Describe the optimizer on this rank, as plain values: its kind, its groups, and state that is no tensor.

        Raises:
            RuntimeProgramError: a hyperparameter is no number, text, or list of these.
        """
        if self.optimizer is None:
            return None
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, key, value in self._state():
            if not isinstance(value, Tensor):
                name = self.names[parameter]
                numbers.setdefault(name, {})[key] = structure(key, value, f"{key} of {name}")
        groups = [
            {
                "index": index,
                "names": [self.names[parameter] for parameter in group["params"] if parameter in self.names],
                "frozen": [
                    self.names[parameter]
                    for parameter in group["params"]
                    if parameter in self.names and not parameter.requires_grad
                ],
                "values": values,
            }
            for index, (group, values) in enumerate(
                zip(self.optimizer.param_groups, hyperparameters_of(self.optimizer))
            )
        ]
        return {"kind": type(self.optimizer).__name__, "groups": groups, "numbers": numbers}

    def room(
        self, saved: Mapping[str, Any], sizes: Mapping[Key, tuple[Sequence[int], torch.dtype]]
    ) -> tuple[dict[str, Entry], dict[Tensor, dict[str, Any]]]:
        """Make room for what a checkpoint has of the optimizer's state; the optimizer itself is left as it is.

        Args:
            saved: what ``described`` has returned when the checkpoint was saved.
            sizes: shapes and dtypes of the checkpoint's tensors.

        Returns:
            The tensors to be filled, by key, and the state of each parameter, which has these tensors.
        """
        keys: dict[str, list[str]] = {}
        for path in sizes:
            if path[: len(STATE)] == STATE:
                keys.setdefault(path[-2], []).append(path[-1])
        self.counts |= {
            path[-1]
            for path, (size, _) in sizes.items()
            if path[: len(STATE)] == STATE and math.prod(size) == 1 < math.prod(sizes.get((*MODEL, path[-2]), ((),))[0])
        }
        entries: dict[str, Entry] = {}
        states: dict[Tensor, dict[str, Any]] = {}
        for group in self._param_groups():
            for parameter in (each for each in group["params"] if each in self.names):
                name = self.names[parameter]
                states[parameter] = dict(saved["numbers"].get(name, {}))
                for key in keys.get(name, []):
                    size, dtype = sizes[(*STATE, name, key)]
                    counts = math.prod(size) == 1 and key in self.counts
                    other = tuple(size) != tuple(self._shape(parameter)) and self._is_whole(parameter)
                    if len(size) and (other or counts):
                        value = torch.zeros(tuple(size), dtype=dtype, device=parameter.device)
                    elif len(size) or (not self._shape(parameter) and not counts and key != "step"):
                        value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        stays = key == "step" and not (group.get("capturable") or group.get("fused"))
                        value = torch.zeros((), dtype=dtype, device="cpu" if stays else parameter.device)
                    if self.offloaded is not None and not key.endswith("]"):  # tensors in lists stay on the device
                        value = self.offloaded.put(parameter, key, value)
                    states[parameter][key] = value
                    entry = self.of_parameter(parameter, key, value)
                    if entry.key in entries:
                        entries[entry.key].tensors += entry.tensors
                        entries[entry.key].boxes += entry.boxes
                    else:
                        entries[entry.key] = entry
                own = states[parameter]
                own.update({key: together(value, own) for key, value in [*own.items()] if isinstance(value, list)})
        return entries, states

    def hyperparameters(self, saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return for each group of the optimizer the hyperparameters that a checkpoint has for its parameters.

        A group that has no parameters on this rank takes those of a group at the same place.

        Raises:
            RuntimeProgramError: they differ within a group.
        """
        found = []
        of_name = {name: group["values"] for group in saved["groups"] for name in group["names"]}
        for index, group in enumerate(self._param_groups()):
            names = [self.names[parameter] for parameter in group["params"] if parameter in self.names]
            names = [name for name in names if name in of_name]  # others are frozen, and not in every plan's optimizer
            values = [of_name[name] for name in names]
            for name, other in zip(names, values):
                key = next((key for key in other if other[key] != values[0].get(key)), None)
                if key is not None:
                    raise RuntimeProgramError(
                        f"the optimizer has {names[0]} and {name} in one group, but they were saved with {key} "
                        f"{values[0].get(key)} and {other[key]}; use the same groups"
                    )
            same_place = (each["values"] for each in saved["groups"] if each["index"] == index)
            found.append(values[0] if values else next(same_place, {}))
        return found

    def take(self, states: Mapping[Tensor, dict[str, Any]], hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer its state and hyperparameters."""
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        self.optimizer.state.update({parameter: state for parameter, state in states.items() if state})
        for group, values in zip(self.optimizer.param_groups, hyperparameters, strict=True):
            give_group(group, values)


def is_frozen(tensor: Tensor, program: Manifest) -> bool:
    """Return whether this is a parameter that is not trained, or anything of a program that trains nothing."""
    return program.mode != TRAIN or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)


def may_become(saved: torch.dtype, target: torch.dtype, frozen: bool) -> bool:
    """Return whether values of a model may be read in another dtype: where none is rounded, or the parameter is ``frozen``, which is
    stored as it is computed with, so that a trained one is rounded alike."""
    floating = saved.is_floating_point and target.is_floating_point
    return saved == target or (floating and (frozen or torch.promote_types(saved, target) == target))


def joined_descriptions(everyone: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Join what ``described`` has returned on all ranks: groups at one place with equal values are one."""
    given = [each for each in everyone if each is not None]
    if not given:
        return None
    groups: list[dict[str, Any]] = []
    for group in (group for each in given for group in each["groups"]):
        same = next((g for g in groups if (g["index"], g["values"]) == (group["index"], group["values"])), None)
        if same is None:
            same = {**group, "names": [], "frozen": []}
            groups.append(same)
        for key in ("names", "frozen"):
            same[key] = list(dict.fromkeys([*same[key], *group[key]]))
    numbers = {name: values for each in given for name, values in each["numbers"].items()}
    return {"kind": given[0]["kind"], "groups": groups, "numbers": numbers}


def in_turns(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out the tensors that it is another rank's turn to write; numbers are everyone's, and written once all the same."""
    turns: Counter[frozenset[str]] = Counter()
    own = []
    for entry in sorted(entries, key=lambda entry: (-math.prod(entry.shape), entry.key)):
        count, index = entry.copies
        if turns[entry.divided] % count == index:
            own.append(entry)
        turns[entry.divided] += 1
    return own


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group as JSON has them.

    Raises:
        RuntimeProgramError: one is no number, text, or list of these.
    """
    return [
        {key: plain(value, key) for key, value in group.items() if key not in HOW} for group in optimizer.param_groups
    ]


def give_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group of an optimizer hyperparameters as JSON has them."""
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def tensors_of(key: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value of an optimizer's state, which may be in lists, and the keys that they have in a checkpoint."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from tensors_of(f"{key}[{at}]", each)


def structure(key: str, value: Any, what: str) -> Any:
    """Return a value of an optimizer's state as JSON has it, with the keys of tensors in their place."""
    if isinstance(value, Tensor):
        return {"tensor": key}
    if isinstance(value, list | tuple):
        return [structure(f"{key}[{at}]", each, what) for at, each in enumerate(value)]
    return plain(value, what)


def together(value: Any, tensors: dict[str, Any]) -> Any:
    """Return the value of which :func:`structure` has made this, with tensors that are taken from ``tensors``."""
    if isinstance(value, list):
        return [together(each, tensors) for each in value]
    return tensors.pop(value["tensor"]) if isinstance(value, dict) else value


def plain(value: Any, what: str) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(each, what) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RuntimeProgramError(f"the optimizer's {what} is a {type(value).__name__}, which a checkpoint can't hold")
