"""Resolve the user's shard plan, patterns over the model's names, into pins that constrain the search.

    {"layers.*.q_proj": "colwise"}      what the user writes: pattern -> value (:mod:`graphpar.annotations.values`)
       + ModelNames, mesh degrees       what the model has
       ──resolve──► ShardConstraints           {"layers.0.q_proj.weight": {"tp": {S(0)}}, "layers.0.q_proj.bias": ...}

A plan is checked in full whatever the mesh is (except that ``parts`` must be divisible): every pattern and value, then the axes
of degree 1 are dropped.
Styles act on tp, and ``expert`` on ep where the mesh has it.

What a style pins       weight                                          bias      activations
    colwise             Linear S(0), Embedding S(1), Conv1D S(1), ConvNd S(0)    S(0)
    rowwise             Linear S(1), Embedding S(0), Conv1D S(0), ConvNd S(1)    whole
    sequence            R, every parameter below                                  first input and output S(1)
    replicate           whole on tp and ep, every parameter below
    expert              S(0), every parameter below: stacked experts
torch's style objects pin their inputs and outputs too, as ``parallelize_module`` would place them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphpar.annotations.values import WHOLE, Choice, Constraint, Spec, from_the_front, meet, read_value, spec_text
from graphpar.errors import GraphparError, near_match
from graphpar.ir.program import Program
from graphpar.runtime.axes import AXES
from graphpar.runtime.layout import P, R, Shard, Type
from graphpar.text import is_at_or_below, is_below, levels_match, levels_of, listed, matching

ShardPlan = Mapping[str, Any]
Position = int | str | None  # of an activation: a place among the positional ones, or a keyword


@dataclass(frozen=True)
class ModelNames:
    """What patterns can name.

    ``modules``: path to qualified class name, the root as ``""``. ``parameters``: fully qualified name to whole shape.
    ``ties``: the names of one parameter. ``aliases``: the paths of one module; ``None`` where only the ties can tell, then
    modules of one class whose parameters are all tied, name by name, count as one.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[tuple[str, ...], ...] | None = None

    def below(self, path: str) -> list[str]:
        """List the parameters of a module and its submodules."""
        return [name for name in self.parameters if not path or is_below(name, path)]

    def paths(self) -> list[str]:
        """List all that a pattern can match: modules, then parameters."""
        return [*self.modules, *self.parameters]


@dataclass(frozen=True)
class ShardConstraints:
    """A shard plan as constraints, under every name that a tensor or module has. Axes of degree 1 are left out.

    ``parameters``: per axis the types allowed; check one with :func:`graphpar.annotations.values.allows`. ``inputs``,
    ``keyword_inputs``, ``outputs``: of a module's tensors in the order of its arguments and results, ``None`` (or a
    tuple that ends early) for one that is free; a dim may count from the end. An input is pinned as the module uses it,
    after any redistribution. ``styles``: of each module or parameter that was given any. ``origins``: for each name in
    the others, the patterns that pinned it, in the plan's order. ``idle``: for each axis that was left out, the patterns
    that ask for shards or partial sums on it; whole tensors are what one rank has.
    """

    parameters: Mapping[str, Spec] = field(default_factory=dict)
    inputs: Mapping[str, tuple[Spec | None, ...]] = field(default_factory=dict)
    keyword_inputs: Mapping[str, Mapping[str, Spec]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[Spec | None, ...]] = field(default_factory=dict)
    styles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def names_of(program: Program) -> ModelNames:
    """Collect the names of a program. Modules registered twice are known by identity where the user's model is at hand."""
    model = program.source.model if program.source else None
    owners: dict[int, list[str]] = {}
    if isinstance(model, nn.Module):
        for path, module in model.named_modules(remove_duplicate=False):
            owners.setdefault(id(module), []).append(path)
    aliases = None
    if {path for paths in owners.values() for path in paths} == set(program.module_classes):  # not those of a wrapper
        aliases = tuple(tuple(paths) for paths in owners.values() if len(paths) > 1)
    shapes = {name: info.shape for name, info in program.parameters.items()}
    return ModelNames(program.module_classes, shapes, program.ties, aliases)


def resolve(plan: ShardPlan, names: ModelNames, degrees: Mapping[str, int]) -> ShardConstraints:
    """Resolve a shard plan on a model into pins; ``degrees`` of mesh axes, 1 for an axis that is not listed.

    Raises:
        GraphparError: a malformed value; a pattern that matches nothing; a style that does not fit what it matches; a
            dim that a parameter does not have; two patterns that disagree.
    """
    if not isinstance(plan, Mapping):
        raise GraphparError(f"A shard plan is a mapping of patterns to values, not a {type(plan).__name__}.")
    sheet = _Sheet(names, degrees)
    for pattern, value in plan.items():
        constraints = read_entry(pattern, value)
        matched = matching(pattern, names.paths())
        if not matched:
            raise GraphparError(matches_nothing(pattern, names))
        for constraint in constraints:
            _apply(sheet, constraint, pattern, matched)
    return sheet.pins()


def read_entry(pattern: Any, value: Any) -> tuple[Constraint, ...]:
    """Parse one entry of a plan into constraints.

    Raises:
        GraphparError: the key is not a string, or the value is malformed.
    """
    if not isinstance(pattern, str):
        raise GraphparError(
            f"A shard plan's keys are patterns over module and parameter paths, but one is {pattern!r}."
        )
    return read_value(value, pattern)


# ---- patterns --------------------------------------------------------------------------------------------------


def matches_nothing(pattern: str, names: ModelNames, whose: str = "The shard plan's pattern") -> str:
    """Write a message that follows the pattern as far as it goes and names what is there."""
    message = f"{whose} {pattern!r} matches no module and no parameter."
    deeper = matching(f"**.{pattern}", names.paths())
    if deeper:
        before = {tuple(levels_of(path)[: -len(levels_of(pattern))]) for path in deeper}
        prefix = "**" if "**" in pattern or len(before) > 1 else ".".join(before.pop())
        return f"{message} Did you mean {path_under(prefix, pattern)!r}?"
    tokens = levels_of(pattern)
    for count in range(1, len(tokens) + 1):
        if any(levels_match(tokens[:count], levels_of(path)) for path in names.paths()):
            continue
        token, parent = tokens[count - 1], tokens[: count - 1]
        children = _children(parent, names)
        near = near_match(token, children)
        there = f" There are {_listed(children)}." if children and not near else ""
        return f"{message} There is no {token!r} in {'.'.join(parent) or 'the model'!r}.{near}{there}"
    return message


def _children(parent: Sequence[str], names: ModelNames) -> list[str]:
    """The last levels of the paths directly below what ``parent`` matches."""
    found = [levels_of(path) for path in names.paths()]
    return list(dict.fromkeys(levels[-1] for levels in found if levels and levels_match(parent, levels[:-1])))


def _listed(entries: Sequence[str]) -> str:
    return listed(entries, 8)


# ---- what a style means for a module ---------------------------------------------------------------------------

_S0: Choice = frozenset({Shard(0)})
_S1: Choice = frozenset({Shard(1)})
_LAST: Choice = frozenset({Shard(-1)})


@dataclass(frozen=True)
class _Kind:
    """A kind of module that has a columnwise and a rowwise form, known by the end of its class name."""

    name: str
    class_name: re.Pattern[str]
    rank: int | None  # of the weight
    colwise: Mapping[str, Choice]
    rowwise: Mapping[str, Choice]
    inputs: Mapping[str, Choice]  # by style, what torch's style objects pin; empty where torch has none


_KINDS = (
    _Kind("Linear", re.compile(r"\w*Linear"), 2, {"weight": _S0, "bias": _S0}, {"weight": _S1, "bias": WHOLE},
          {"colwise": WHOLE, "rowwise": _LAST}),
    _Kind("Embedding", re.compile(r"\w*Embedding"), 2, {"weight": _S1}, {"weight": _S0},
          {"colwise": WHOLE, "rowwise": WHOLE}),
    # transformers' Conv1D is a linear layer whose weight is [in, out]
    _Kind("Conv1D", re.compile(r"Conv1D"), 2, {"weight": _S1, "bias": _S0}, {"weight": _S0, "bias": WHOLE},
          {"colwise": WHOLE, "rowwise": _LAST}),
    _Kind("Conv1d/2d/3d", re.compile(r"Conv[123]d"), None, {"weight": _S0, "bias": _S0}, {"weight": _S1, "bias": WHOLE},
          {}),
)  # fmt: skip


def _kind_of(path: str, names: ModelNames) -> _Kind | None:
    """The kind of a module that holds a weight, ``None`` for any other."""
    shape = names.parameters.get(path_under(path, "weight"))
    short = names.modules.get(path, "").rpartition(".")[2]
    for kind in _KINDS:
        if shape is not None and kind.class_name.fullmatch(short) and kind.rank in (None, len(shape)):
            return kind
    return None


def path_under(prefix: str, name: str) -> str:
    """Join ``name`` below ``prefix``; either may be empty, which is the root."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _no_kind(constraint: Constraint, path: str, names: ModelNames) -> str:
    """What is at ``path`` that a columnwise or rowwise style does not fit."""
    shown = f"{path!r} is a {names.modules[path].rpartition('.')[2]}" if path else "the root"
    own = [name for name in names.below(path) if "." not in name[len(path) :].strip(".")]
    kinds = [kind.name for kind in _KINDS if kind.inputs or not constraint.computes]
    inner = {name: child for name, child in names.modules.items() if name and name.rpartition(".")[0] == path}
    message = f"{constraint.style!r} is for a {', '.join(kinds)}, but {shown}"
    if own:
        shapes = _listed([f"{name.rpartition('.')[2]} {list(names.parameters[name])}" for name in own])
        return f"{message} with {shapes}. Give a spec for each, such as {own[0]!r}: 'S(0)@tp'."
    if inner:
        children = [f"{name.rpartition('.')[2]} ({child.rpartition('.')[2]})" for name, child in inner.items()]
        return f"{message} without a weight. Below it are {_listed(children)}."
    return f"{message} without a weight."


# ---- applying a constraint -------------------------------------------------------------------------------------------


def _apply(sheet: _Sheet, constraint: Constraint, pattern: str, matched: Sequence[str]) -> None:
    """Pin what ``constraint`` asks of each match."""
    about_modules = constraint.style == "sequence" or bool(
        constraint.inputs or constraint.keyword_inputs or constraint.outputs
    )
    modules = [path for path in matched if path in sheet.names.modules]
    pinned = 0
    for path in modules if modules and about_modules else matched:
        if path in sheet.names.parameters:
            specs = _specs_for_parameter(sheet, constraint, pattern, path)
        else:
            specs = dict(_specs_for_module(sheet, constraint, pattern, path))
            _pin_activations(sheet, constraint, pattern, path)
        for name, spec in specs.items():
            sheet.pin_parameter(name, spec, pattern)
        pinned += len(specs)
        if constraint.style:
            sheet.add_style(path, constraint.style, pattern)
    if not pinned and (constraint.spec or constraint.style in ("replicate", "expert")):
        raise GraphparError(f"Shard plan, {pattern!r}: {_listed(matched)} has no parameters to place.")


def _specs_for_module(sheet: _Sheet, constraint: Constraint, pattern: str, path: str) -> Iterator[tuple[str, Spec]]:
    names = sheet.names
    if constraint.style in ("colwise", "rowwise"):
        kind = _kind_of(path, names)
        if kind is None or (constraint.computes and not kind.inputs):
            raise GraphparError(f"Shard plan, {pattern!r}: {_no_kind(constraint, path, names)}")
        for name, choice in (kind.colwise if constraint.style == "colwise" else kind.rowwise).items():
            if path_under(path, name) in names.parameters:
                yield path_under(path, name), {"tp": choice}
        return
    spec = _uniform_spec(sheet, constraint)
    below = names.below(path) if spec else []
    if constraint.style == "expert":
        sizes = {name: names.parameters[name][:1] for name in below}
        if len(set(sizes.values())) > 1:
            shown = [f"{name} {list(names.parameters[name])}" for name in below]
            raise GraphparError(
                f"Shard plan, {pattern!r}: 'expert' is for stacked experts, whose parameters all have the experts as dim 0; "
                f"{path!r} has {_listed(shown)}. Give each parameter a spec."
            )
    for name in below:
        yield name, spec


def _uniform_spec(sheet: _Sheet, constraint: Constraint) -> Spec:
    """What a style or spec that does not look at the kind of module asks of every parameter."""
    if constraint.style == "sequence":
        return {"tp": frozenset({R})}
    if constraint.style == "replicate":
        return {"tp": WHOLE, "ep": WHOLE}
    if constraint.style == "expert":
        return {sheet.expert_axis: _S0}
    return constraint.spec


def _specs_for_parameter(sheet: _Sheet, constraint: Constraint, pattern: str, name: str) -> dict[str, Spec]:
    """A style given to one parameter places it as it would within its module, and nothing else."""
    if constraint.style == "sequence" or constraint.inputs or constraint.keyword_inputs or constraint.outputs:
        what = "a torch style object" if constraint.computes else repr(constraint.style or "inputs and outputs")
        raise GraphparError(
            f"Shard plan, {pattern!r}: {name!r} is a parameter, but {what} is about a module's activations too. "
            "Name the module, or give the parameter a spec such as 'R@tp'."
        )
    if constraint.style not in ("colwise", "rowwise"):
        return {name: _uniform_spec(sheet, constraint)}
    owner, _, attribute = name.rpartition(".")
    kind = _kind_of(owner, sheet.names)
    if kind is None:
        raise GraphparError(f"Shard plan, {pattern!r}: {_no_kind(constraint, owner, sheet.names)}")
    choices = kind.colwise if constraint.style == "colwise" else kind.rowwise
    if attribute not in choices:
        raise GraphparError(
            f"Shard plan, {pattern!r}: {constraint.style!r} says nothing about {name!r}; give it a spec such as 'S(0)@tp'."
        )
    return {name: {"tp": choices[attribute]}}


def _pin_activations(sheet: _Sheet, constraint: Constraint, pattern: str, path: str) -> None:
    inputs = constraint.inputs
    if constraint.computes:
        kind = _kind_of(path, sheet.names)
        assert kind is not None
        inputs = ({"tp": kind.inputs[constraint.style]},)
    entries: list[tuple[str, Position, Spec | None]] = [("input", at, spec) for at, spec in enumerate(inputs)]
    entries += [("input", name, spec) for name, spec in constraint.keyword_inputs.items()]
    entries += [("output", at, spec) for at, spec in enumerate(constraint.outputs)]
    for what, position, spec in entries:
        if spec is not None:
            sheet.pin_activation(path, what, position, spec, pattern)


_Cell = tuple[str, str, Position]  # parameter | input | output, the first of its names, which activation
_Claim = tuple[str, Choice]  # the pattern and the types that it allows on one axis


class _Sheet:
    """Collects pins, each with the patterns that made it. One tensor or module is kept under the first of its names."""

    def __init__(self, names: ModelNames, degrees: Mapping[str, int]) -> None:
        self.names = names
        self.degrees = {axis: degrees.get(axis, 1) for axis in AXES}
        self.expert_axis = "tp" if self.degrees["ep"] == 1 < self.degrees["tp"] else "ep"
        aliases = _aliases_by_ties(names) if names.aliases is None else names.aliases
        self._groups = {name: group for group in (*names.ties, *aliases) for name in group}
        self._claims: dict[_Cell, dict[str, list[_Claim]]] = {}
        self._styles: dict[str, list[str]] = {}
        self._origins: dict[str, list[str]] = {}

    def add_style(self, path: str, style: str, pattern: str) -> None:
        """Note that ``pattern`` gives ``path`` a style."""
        self._remember(path, pattern)
        for name in self._all_names(path):
            styles = self._styles.setdefault(name, [])
            styles += [style] if style not in styles else []

    def pin_parameter(self, name: str, spec: Spec, pattern: str) -> None:
        """Pin a parameter's types; ``GraphparError`` where they do not fit it or another pattern disagrees."""
        shape = self.names.parameters[name]
        checked = {axis: frozenset(self._checked(kind, axis, name, shape, pattern) for kind in choice)
                   for axis, choice in spec.items()}  # fmt: skip
        self._pin(("parameter", self._all_names(name)[0], None), checked, name, pattern)

    def pin_activation(self, path: str, what: str, position: Position, spec: Spec, pattern: str) -> None:
        """Pin an input or output (``what``) of a module; ``GraphparError`` where another pattern disagrees."""
        self._pin((what, self._all_names(path)[0], position), spec, path, pattern)

    def pins(self) -> ShardConstraints:
        """Return the pins on the axes that the mesh has."""
        kept: dict[str, dict[str, dict[Position, Spec]]] = {"parameter": {}, "input": {}, "output": {}}
        for (what, first, position), axes in self._claims.items():
            spec = {axis: _common(claims) for axis, claims in axes.items() if self.degrees[axis] > 1}
            for name in self._all_names(first) if spec else ():
                kept[what].setdefault(name, {})[position] = spec
        keywords = {path: {str(at): spec for at, spec in entries.items() if isinstance(at, str)}
                    for path, entries in kept["input"].items()}  # fmt: skip
        return ShardConstraints(
            parameters={name: entries[None] for name, entries in kept["parameter"].items()},
            inputs=_in_order(kept["input"]),
            keyword_inputs={path: entries for path, entries in keywords.items() if entries},
            outputs=_in_order(kept["output"]),
            styles={path: tuple(styles) for path, styles in self._styles.items()},
            origins={name: tuple(patterns) for name, patterns in self._origins.items()},
            idle=self._idle(),
        )

    def _idle(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for axes in self._claims.values():
            for axis, claims in axes.items():
                for pattern, choice in claims:
                    if self.degrees[axis] == 1 and not choice & WHOLE and pattern not in found.setdefault(axis, []):
                        found[axis].append(pattern)
        return {axis: tuple(patterns) for axis, patterns in found.items() if patterns}

    def _all_names(self, name: str) -> tuple[str, ...]:
        return self._groups.get(name, (name,))

    def _remember(self, name: str, pattern: str) -> None:
        for each in self._all_names(name):
            patterns = self._origins.setdefault(each, [])
            patterns += [pattern] if pattern not in patterns else []

    def _pin(self, cell: _Cell, spec: Spec, name: str, pattern: str) -> None:
        self._remember(name, pattern)
        for axis, choice in spec.items():
            claims = self._claims.setdefault(cell, {}).setdefault(axis, [])
            for other, earlier in claims:
                if not _common([(other, earlier), (pattern, choice)]):
                    raise GraphparError(self._disagreement(cell, axis, (other, earlier), (pattern, choice)))
            claims.append((pattern, choice))

    def _disagreement(self, cell: _Cell, axis: str, one: _Claim, other: _Claim) -> str:
        what, first, position = cell
        names = " = ".join(map(repr, self._all_names(first)))
        subject = names if what == "parameter" else f"{what} {position!r} of {names}"
        says = [f"pattern {pattern!r} says {spec_text({axis: choice})}" for pattern, choice in (one, other)]
        return f"The shard plan disagrees about {subject}: {says[0]}, and {says[1]}."

    def _checked(self, kind: Type, axis: str, name: str, shape: tuple[int, ...], pattern: str) -> Type:
        """A parameter's type with its dim counted from the front."""
        where = f"Shard plan, {pattern!r}: {kind}@{axis} does not fit {name!r}, whose shape is {list(shape)}"
        if kind == P:
            raise GraphparError(
                f"Shard plan, {pattern!r}: {name!r} is a parameter and can't be a partial sum (P@{axis})."
            )
        kind = from_the_front(kind, len(shape))
        if not isinstance(kind, Shard):
            return kind
        if not 0 <= kind.dim < len(shape):
            raise GraphparError(f"{where}: there is no such dim.")
        if kind.parts and (not sum(kind.parts) or shape[kind.dim] % sum(kind.parts)):
            raise GraphparError(f"{where}: {shape[kind.dim]} is not a multiple of the parts' sum {sum(kind.parts)}.")
        if any(part % self.degrees[axis] for part in kind.parts):
            raise GraphparError(f"{where}: {axis}={self.degrees[axis]} does not divide every part.")
        return kind


def _common(claims: Sequence[_Claim]) -> Choice:
    """The types that all claims allow."""
    left = claims[0][1]
    for _, choice in claims[1:]:
        pairs = (meet(one, other) for one in left for other in choice)
        left = frozenset(kind for kind in pairs if kind is not None)
    return left


def _in_order(entries: Mapping[str, Mapping[Position, Spec]]) -> dict[str, tuple[Spec | None, ...]]:
    ordered = {}
    for path, specs in entries.items():
        places = [at for at in specs if isinstance(at, int)]
        if places:
            ordered[path] = tuple(specs.get(at) for at in range(max(places) + 1))
    return ordered


def _aliases_by_ties(names: ModelNames) -> tuple[tuple[str, ...], ...]:
    """Paths of modules of one class whose parameters are tied name by name."""
    first = {name: group[0] for group in names.ties for name in group}
    tied = {name.rpartition(".")[0] for name in first}
    candidates = [path for path in names.modules if any(not path or is_at_or_below(owner, path) for owner in tied)]
    groups: dict[tuple[Any, ...], list[str]] = {}
    for path in candidates:
        below = tuple((name[len(path) :], first.get(name)) for name in names.below(path))
        if below and all(owner is not None for _, owner in below):
            groups.setdefault((names.modules[path], *below), []).append(path)
    return tuple(tuple(paths) for paths in groups.values() if len(paths) > 1)
