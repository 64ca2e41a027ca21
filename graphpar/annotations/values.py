"""Read the values of a shard plan: words, specs, mappings and torch's style objects.

    "colwise"                                       Constraint(style="colwise")
    "S(0)@tp, R@cp"                                 Constraint(spec={"tp": {S(0)}, "cp": {R}})
    {"style": "rowwise", "outputs": ["S(1)@tp"]}    Constraint(style="rowwise"), Constraint(outputs=({"tp": {S(1)}},))
    ColwiseParallel(output_layouts=Replicate())     Constraint(style="colwise", outputs=({"tp": {R, I}},), computes=True)

A constraint does not depend on a model; :mod:`graphpar.annotations.patterns` applies it to what a pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpar.errors import GraphparError, near_match
from graphpar.runtime.axes import AXES, AXIS
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard, Type, parse_type

Choice = frozenset[Type]
"""The types that a pin leaves to the search. A ``Shard`` without parts leaves the parts open, see :func:`allows`."""
Spec = Mapping[str, Choice]
"""The pinned types of one tensor by axis; an axis that is not listed is free."""

WHOLE: Choice = frozenset({R, I})
"""Every rank holds the whole value; whether its gradient is partial (R) or complete (I) is left to the search."""
STYLES = ("colwise", "rowwise", "sequence", "replicate", "expert")
SHARD_AXES = tuple(name for name, axis in AXIS.items() if axis.typed)
SEQUENCE_DIM = 1

_FORMS = (
    f"a style ({', '.join(STYLES)}), a spec such as 'S(0)@tp', {{'inputs': [...], 'outputs': [...]}}, "
    "a style object of torch.distributed.tensor.parallel, or a list of these"
)
_FROM_THE_END = re.compile(r"S\(-(\d+)\)")
_KEYS = ("style", "inputs", "outputs")


@dataclass(frozen=True)
class Constraint:
    """What one value asks of the modules or parameters that its pattern matches.

    ``spec`` is of parameters. ``inputs``, ``keyword_inputs`` and ``outputs`` are of a module's tensors as its forward sees
    and returns them; ``None`` leaves one free. ``computes``: the style's own input is pinned too (torch's styles do that).
    """

    style: str = ""
    spec: Spec = field(default_factory=dict)
    inputs: tuple[Spec | None, ...] = ()
    keyword_inputs: Mapping[str, Spec | None] = field(default_factory=dict)
    outputs: tuple[Spec | None, ...] = ()
    computes: bool = False


def read_value(value: Any, pattern: str) -> tuple[Constraint, ...]:
    """Parse a plan's value into constraints; ``pattern``, its key, is named in errors.

    Raises:
        GraphparError: the value has none of the forms above, or names an unknown style, type or axis.
    """
    if isinstance(value, str):
        return (_read_text(value, pattern),)
    if isinstance(value, Mapping):
        return _read_mapping(value, pattern)
    if isinstance(value, list | tuple):
        if not value:
            raise GraphparError(f"{_prefix(pattern)} the list is empty. A value is {_FORMS}.")
        return tuple(constraint for entry in value for constraint in read_value(entry, pattern))
    if _from_torch(value):
        return _read_torch_style(value, pattern)
    raise GraphparError(f"{_prefix(pattern)} {value!r} is not a value of a shard plan. A value is {_FORMS}.")


def allows(choice: Choice, kind: Type, rank: int) -> bool:
    """Whether a pin lets a tensor of ``rank`` dims have the type ``kind``.

    A pinned ``S(-1)`` counts from the end, and a pinned ``S(d)`` without parts allows any parts of that dim: ``colwise`` on
    a fused projection may be sharded part by part.
    """
    return any(meet(from_the_front(option, rank), kind) == kind for option in choice)


def meet(one: Type, other: Type) -> Type | None:
    """Return the narrower of two pinned types, ``None`` where they exclude each other."""
    if one == other:
        return one
    both = isinstance(one, Shard) and isinstance(other, Shard) and type(one) is type(other)
    if both and one.dim == other.dim and not (one.parts and other.parts):  # type: ignore[union-attr]
        return one if one.parts else other  # type: ignore[union-attr]
    return None


def from_the_front(kind: Type, rank: int) -> Type:
    """Count a dim from the front: ``S(-1)`` becomes ``S(rank - 1)``; any other type stays."""
    return Shard(kind.dim + rank, kind.parts) if isinstance(kind, Shard) and kind.dim < 0 else kind


def spec_text(spec: Spec | None) -> str:
    """Write a spec as ``S(0)@tp, R|I@ep``; ``free`` for no pin."""
    shown = [f"{'|'.join(sorted(map(str, spec[axis]), reverse=True))}@{axis}" for axis in AXES if spec and axis in spec]
    return ", ".join(shown) or "free"


# ---- text and mappings -----------------------------------------------------------------------------------------


def _prefix(pattern: str) -> str:
    return f"Shard plan, {pattern!r}:"


def _read_text(text: str, pattern: str) -> Constraint:
    if "@" in text:
        return Constraint(spec=_read_spec(text, pattern))
    if text == "sequence":
        return sequence_constraint(SEQUENCE_DIM)
    if text in STYLES:
        return Constraint(style=text)
    try:
        _read_type(text)
    except ValueError:
        hint = near_match(text, STYLES)
        raise GraphparError(
            f"{_prefix(pattern)} there is no style {text!r}; the styles are {', '.join(STYLES)}, "
            f"and a spec looks like 'S(0)@tp'.{hint}"
        ) from None
    raise GraphparError(f"{_prefix(pattern)} {text!r} names no axis; write {text + '@tp'!r} for the tp axis.")


def sequence_constraint(dim: int) -> Constraint:
    """Sequence parallelism: the activations' ``dim`` is sharded; each rank uses the parameters on other rows (R)."""
    activation = {"tp": frozenset[Type]({Shard(dim)})}
    return Constraint(style="sequence", inputs=(activation,), outputs=(activation,))


def _read_type(text: str) -> Type:
    negative = _FROM_THE_END.fullmatch(text)
    kind = Shard(-int(negative[1])) if negative else parse_type(text)
    if isinstance(kind, ExpertRows):
        raise ValueError(f"{text!r} is a type that only the search assigns")
    return kind


def _read_spec(text: str, pattern: str) -> Spec:
    spec: dict[str, Choice] = {}
    for piece in text.split(","):
        kind, at, axis = (part.strip() for part in piece.partition("@"))
        if not at:
            raise GraphparError(
                f"{_prefix(pattern)} {piece.strip()!r} in {text!r} is not type@axis, such as 'S(0)@tp'."
            )
        if axis == "pp":
            raise GraphparError(
                f"{_prefix(pattern)} {text!r}: no tensor is sharded over pp; give split points instead."
            )
        if axis not in SHARD_AXES:
            raise GraphparError(
                f"{_prefix(pattern)} {text!r}: there is no axis {axis!r}; the axes are {', '.join(SHARD_AXES)}."
                f"{near_match(axis, SHARD_AXES)}"
            )
        if axis in spec:
            raise GraphparError(f"{_prefix(pattern)} {text!r} names the axis {axis} twice.")
        try:
            spec[axis] = frozenset({_read_type(kind)})
        except ValueError as error:
            raise GraphparError(f"{_prefix(pattern)} {error}.") from None
    return spec


def _read_mapping(value: Mapping[Any, Any], pattern: str) -> tuple[Constraint, ...]:
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not value:
        found = f"there is no key {unknown[0]!r}" if unknown else "the mapping is empty"
        raise GraphparError(
            f"{_prefix(pattern)} {found}; a mapping has {', '.join(map(repr, _KEYS))}.{near_match(str(next(iter(unknown), '')), _KEYS)} "
            "(A path with dots is one quoted key.)"
        )
    constraints = read_value(value["style"], pattern) if "style" in value else ()
    inputs, keyword_inputs = value.get("inputs"), {}
    if isinstance(inputs, Mapping):
        keyword_inputs = {str(name): _read_activation(entry, pattern) for name, entry in inputs.items()}
        inputs = None
    constraint = Constraint(
        inputs=_read_activations(inputs, "inputs", pattern),
        keyword_inputs=keyword_inputs,
        outputs=_read_activations(value.get("outputs"), "outputs", pattern),
    )
    return (*constraints, constraint) if constraint != Constraint() else constraints


def _read_activations(value: Any, key: str, pattern: str) -> tuple[Spec | None, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise GraphparError(
            f"{_prefix(pattern)} {key!r} is {value!r}; it must be a list with a spec or None for each tensor"
            f"{', or a mapping of argument names to specs' if key == 'inputs' else ''}."
        )
    return tuple(_read_activation(entry, pattern) for entry in value)


def _read_activation(value: Any, pattern: str) -> Spec | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _read_spec(value, pattern)
    if _from_torch(value):
        return _of_placement(value, pattern)
    raise GraphparError(
        f"{_prefix(pattern)} {value!r} is not a spec of a tensor; write one such as 'S(1)@tp', or None."
    )


# ---- torch's styles --------------------------------------------------------------------------------------------


def _from_torch(value: Any) -> bool:
    return any(base.__module__.startswith("torch.distributed.tensor") for base in type(value).__mro__)


def _read_torch_style(style: Any, pattern: str) -> tuple[Constraint, ...]:
    """A style object of ``torch.distributed.tensor.parallel``, with its meaning on the axis tp.

    Of the layouts before and after a module's boundary the later one is pinned: ``desired_input_layouts`` for inputs (the
    layout that a tensor arrives in is the producer's), ``output_layouts`` of the two linear styles and
    ``desired_output_layouts`` of ``PrepareModuleOutput`` for outputs.
    """
    from torch.distributed.tensor import parallel  # slow to load, and whoever made ``style`` has loaded it

    if isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        name = "colwise" if isinstance(style, parallel.ColwiseParallel) else "rowwise"
        return (Constraint(style=name, outputs=_of_placements(style.output_layouts, pattern), computes=True),)
    if isinstance(style, parallel.SequenceParallel):
        (placement,) = style.sequence_sharding
        return (sequence_constraint(placement.dim),)
    if isinstance(style, parallel.PrepareModuleInputOutput):
        parts = (style.prepare_module_input, style.prepare_module_output)
        return tuple(constraint for part in parts for constraint in _read_torch_style(part, pattern))
    if isinstance(style, parallel.PrepareModuleInput):
        keywords = {name: _of_placement(layout, pattern) for name, layout in style.desired_input_kwarg_layouts.items()}
        return (Constraint(inputs=_of_placements(style.desired_input_layouts, pattern), keyword_inputs=keywords),)
    if isinstance(style, parallel.PrepareModuleOutput):
        return (Constraint(outputs=_of_placements(style.desired_output_layouts, pattern)),)
    raise GraphparError(
        f"{_prefix(pattern)} {type(style).__name__} is not one of torch's styles that graphpar reads: ColwiseParallel, RowwiseParallel, "
        "SequenceParallel, PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput. Write it as specs, such as 'S(0)@tp'."
    )


def _of_placements(placements: Sequence[Any] | None, pattern: str) -> tuple[Spec | None, ...]:
    return tuple(_of_placement(placement, pattern) for placement in placements or ())


def _of_placement(placement: Any, pattern: str) -> Spec | None:
    """A placement as types on tp. torch's Replicate does not tell R from I, so the search may take either."""
    from torch.distributed import tensor  # loaded already, as above

    if placement is None:
        return None
    if isinstance(placement, tensor.Replicate):
        return {"tp": WHOLE}
    if isinstance(placement, tensor.Shard):
        return {"tp": frozenset({Shard(placement.dim)})}
    if isinstance(placement, tensor.Partial) and placement.reduce_op == "sum":
        return {"tp": frozenset({P})}
    raise GraphparError(
        f"{_prefix(pattern)} the placement {placement!r} is not supported; Replicate(), Shard(dim) and Partial('sum') are."
    )
