"""What an optimizer looks at to update an element: found by stepping it on small tensors, whole and in shards, with others and alone.

a step is the same with shards of each parameter, and without the others ──► ELEMENT     SGD, AdamW: a rank steps what it stores
without the others alone                                                 ──► PARAMETER   LARS, Muon, Adafactor need whole parameters
neither                                                                  ──► ALL         a step size from all gradients

What a step does for some values only may not show there, so its operators are noted, too: one that is not elementwise needs whole
parameters, and one that draws random numbers is found however small they are. Whole parameters are also needed where torch has no rule for
the operators on DTensors (Rprop), and where state of a parameter has neither its shape nor one element, which no shard could have.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from graphpar.runtime.checkpoints.saved_state import give_group, hyperparameters_of, structure, tensors_of, together
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import local
from graphpar.runtime.state.optimizers import Described, build_optimizer

ELEMENTS, STEPS, TRIED = 8192, 12, 48
"""The largest small tensor, how many steps are made, and how many parameters are stepped at most."""
ELEMENTWISE = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adadelta",
        "Adagrad",
        "ASGD",
        "RMSprop",
        "SparseAdam",
    }
)
"""Those of ``torch.optim`` that were found to look at elements, as the tests do again: of one that was made by hand nothing is tried."""
HANDED_OVER = (5, 8)
"""Before which steps another optimizer takes over: one that counts to some number in an attribute is found after one of them."""
SCALES = (1.0, 30.0, 0.01)
"""Of the gradients, one step after the other, so that limits show which hold for some of them."""
ALIKE = frozenset(
    {
        "_to_copy",
        "abs_",
        "alias",
        "copy_",
        "detach",
        "fill_",
        "lift_fresh",
        "masked_fill",
        "masked_fill_",
        "view",
        "zero_",
    }
)
"""Operators that lack torch's tag of elementwise ones, but let no element look at another one."""
TOLERANCE = 1e-4
"""How far two runs may be apart, relative to the largest change of a parameter."""

Cut = Callable[[Tensor], Tensor]


class NeedsClosure(RuntimeProgramError):
    """The step of an optimizer computes gradients itself."""


class _NotSaved(RuntimeProgramError):
    """An optimizer has something that no checkpoint can have."""


class Scope(IntEnum):
    """What the update of an element depends on."""

    ELEMENT = 0
    PARAMETER = 1
    ALL = 2


@dataclass(frozen=True)
class Found:
    """What was found of an optimizer: what its step looks at, whether it draws random numbers, and whether it gives parameters other
    memory; whether it could be stepped at all."""

    kind: str
    scope: Scope
    random: bool
    tried: bool
    moves: bool = False

    def check_ranks(self, zero: int) -> None:
        """Check that several ranks step alike what they all store, and where it is stored at this level of ZeRO.

        Raises:
            RuntimeProgramError: they would not.
        """
        if self.moves and zero:
            raise RuntimeProgramError(
                f"the step of {self.kind} gives parameters other memory (p.data = ...), and with zero={zero} their values are sent from "
                "the memory that they have; write into it, as p.data.copy_(...) or p.sub_(...) do, or use --mesh without dp_shard and cp"
            )
        if self.random:
            raise RuntimeProgramError(
                f"the step of {self.kind} draws random numbers, which would differ between ranks; use "
                "an optimizer that draws none, or one device"
            )


def look(
    make: Callable[..., Any],
    model: Mapping[str, Described],
    *,
    flat: bool = False,
    sharded: DTensor | None = None,
    device: torch.device | str = "cpu",
) -> Found:
    """Find what the optimizer of ``make`` looks at; one that can't be stepped on small tensors may look at everything. One that looks at
    elements needs whole parameters where it computes with what torch has no rule for DTensors.

    Args:
        model: all of its parameters, by name.
        flat: whether ranks store 1-D slices of parameters.
        sharded: where ranks store DTensors, one of them.

    Raises:
        NeedsClosure: the step needs a closure.
        RuntimeProgramError: ``make`` fails, or returns no optimizer.
    """
    with _alone(place := torch.device(device)):
        trial = _Trial(make, model, place)
        whole = trial.tried(trial.names)
        if whole is None or not all(change.any() for change in whole.changes.values() if change.numel()):
            return Found(trial.kind, Scope.ALL, random=False, tried=False, moves=trial.moves)
        called = _Called()
        trial.tried(trial.names, called=called)
        scope = max(
            trial.scope(whole, flat), Scope.PARAMETER if called.reduces or trial.keeps_others else Scope.ELEMENT
        )
        random = called.random or trial.random(whole)
        if (
            scope is Scope.ELEMENT and sharded is not None and not trial.takes(sharded, whole)
        ):  # last: where it fails, in fp32
            scope = Scope.PARAMETER
        return Found(trial.kind, scope, random, tried=True, moves=trial.moves)


def unsaved(make: Callable[..., Any], model: Mapping[str, Described], device: torch.device | str = "cpu") -> str | None:
    """Say what a checkpoint would lack of an optimizer: another one that is given the state of each parameter and the options of groups, as
    they are saved, must step on as this one would. None where it lacks nothing, or the optimizer can't be stepped on small tensors."""
    with _alone(place := torch.device(device)):
        trial = _Trial(make, model, place)
        straight = trial.tried(trial.names)
        try:
            resumed = trial.tried(trial.names, resumed=True)
        except _NotSaved as error:
            return str(error)
        if straight is None or not all(change.isfinite().all() for change in straight.changes.values()):
            return None
        if resumed is None or not resumed.is_part_of(straight):
            return (
                f"the steps of {trial.kind} depend on something that is neither in the state of a parameter, under a name, nor an option "
                "of a group, but in an attribute, or under another key of optimizer.state: a checkpoint lacks it, so resumed training "
                "would differ; keep it in one of these (an optimizer that calls others shares its state and its groups with them)"
            )
        if other := resumed.other_attributes(straight):
            again = trial.tried(trial.names)  # what differs there, too, such as a time, is of no step
            random = set() if again is None else again.other_attributes(straight)
            if other := other - random:
                return (
                    f"{trial.kind} changes its attribute {min(other)} with each step, which a checkpoint lacks: if later steps depend on "
                    "it, resumed training would differ; keep it in the state of a parameter, or in an option of a group"
                )
        return None


@contextlib.contextmanager
def _alone(place: torch.device) -> Iterator[None]:
    """Try something that neither prints, as what the user's function says is said where the optimizer is made, nor moves random streams."""
    devices = [place] if place.type == "cuda" else []
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices):
        yield


def made_again(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Callable[[Any], Optimizer]:
    """Return what makes another optimizer of the same class, with the same options, of parameters by these names."""

    def make(named: Any) -> Optimizer:
        of_name = dict(named)
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"params": [of_name[names[parameter]] for parameter in group["params"] if parameter in names]}
            for group in optimizer.param_groups
        ]
        taken = inspect.signature(type(optimizer)).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in taken}
        return type(optimizer)([group for group in groups if group["params"]], **options)

    return make


@dataclass(frozen=True)
class _Run:
    """What some steps leave: how parameters changed, and the numbers among the options of each group; None of one without parameters.
    Also numbers and tensors in attributes of the optimizer."""

    changes: Mapping[str, Tensor]
    options: Sequence[Mapping[str, float] | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, cut: Cut) -> _Run:
        """Return what would be left where each parameter is what ``cut`` leaves of it."""
        return _Run({name: cut(change) for name, change in self.changes.items()}, self.options)

    def without(self, name: str) -> _Run:
        """Return what is left of all parameters but one."""
        return _Run({each: change for each, change in self.changes.items() if each != name}, self.options)

    def other_attributes(self, other: _Run) -> set[str]:
        """Return those that are others after the other run; one that only one run has may be kept for speed alone."""
        return {
            key
            for key in self.attributes.keys() & other.attributes.keys()
            if not _same(self.attributes[key], other.attributes[key])
        }

    def is_part_of(self, other: _Run) -> bool:
        """Whether parameters changed as in the other run, but for rounding, and options, which may decide later, are the same."""
        for name, change in self.changes.items():
            expected = other.changes[name]
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            allowed = TOLERANCE * largest + 100 * torch.finfo(change.dtype).eps * (1 + largest)
            if change.numel() and not float((change - expected).abs().max()) <= allowed:
                return False
        options = [(own, its) for own, its in zip(self.options, other.options) if own is not None and its is not None]
        return all(
            own.keys() == its.keys() and all(math.isclose(own[key], its[key], rel_tol=TOLERANCE) for key in own)
            for own, its in options
        )


class _Called(TorchDispatchMode):
    """Notes whether operators are called that look at several elements of a tensor, or draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces = self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.reduces |= not _by_element(func, args) and any(
            isinstance(value, Tensor) and value.numel() > 1 for value in tree_leaves((args, kwargs))
        )
        return func(*args, **kwargs)


def _by_element(func: Any, args: Sequence[Any]) -> bool:
    name = func.overloadpacket.__name__
    if name == "index_put_":  # x[mask] = 0
        masks = [each for each in args[1] if each is not None]
        return (
            len(masks) == 1
            and masks[0].dtype == torch.bool
            and masks[0].shape == args[0].shape
            and args[2].numel() == 1
        )
    if name.startswith("_foreach_"):
        return not name.endswith(("_norm", "_max", "_powsum"))
    return (
        torch.Tag.pointwise in func.tags
        or name in ALIKE
        or name.endswith("_like")
        or name.startswith(("new_", "_fused_"))
    )


class _Trial:
    """Small tensors in place of parameters. Those of ``names`` are stepped: of each kind two."""

    def __init__(self, make: Callable[..., Any], model: Mapping[str, Described], device: torch.device) -> None:
        self.make, self.model, self.device, self.dtype = make, model, device, torch.float64
        self.moves = False  # whether a step gave a parameter other memory
        self.keeps_others = False  # whether it keeps tensors of other shapes than those of parameters
        small = {
            name: nn.Parameter(torch.zeros(_small(each.shape), device=device))
            for name, each in model.items()
            if each.requires_grad
        }
        made = build_optimizer(make, {name: [each] for name, each in small.items()}, model)
        self.kind = type(made).__name__
        name_of = {parameter: name for name, parameter in small.items()}
        kinds: dict[
            Any, list[str]
        ] = {}  # by name, too: a step may treat a parameter by its name, or as the factory has noted of it
        for group in made.param_groups:
            for parameter in group["params"]:
                name = name_of[parameter]
                kinds.setdefault((_group_kind(group), parameter.ndim, re.sub(r"\d+", "", name)), []).append(name)
        firsts, seconds = ([kind[at] for kind in kinds.values() if len(kind) > at] for at in (0, 1))
        self.names = _spread(firsts, TRIED)
        self.names += _spread(seconds, TRIED - len(self.names))
        self.drawn = {name: _drawn(_small(model[name].shape), at).to(device) for at, name in enumerate(self.names)}

    def scope(self, whole: _Run, flat: bool) -> Scope:
        """Find what a step looks at; ``whole``: where all are stepped, whole."""
        for part in (self.names[0::2], self.names[1::2]):
            if (run := self.tried(part)) is None or not run.is_part_of(whole):
                return Scope.ALL
        broken = self.tried(self.names, broken=self.names[0])
        if broken is not None and not broken.without(self.names[0]).is_part_of(whole):
            return Scope.ALL
        for cut in self._cuts(flat):
            if (run := self.tried(self.names, cut)) is None or not run.is_part_of(whole.cut(cut)):
                return Scope.PARAMETER
        return Scope.ELEMENT

    def takes(self, sharded: DTensor, whole: _Run) -> bool:
        """Whether DTensors that lie as ``sharded`` does are stepped as ``whole`` is, which is what each rank has of them."""

        def placed(value: Tensor) -> Tensor:
            kinds = [Shard(0) if kind.is_shard() and value.ndim else Replicate() for kind in sharded.placements]
            return DTensor.from_local(value, sharded.device_mesh, kinds, run_check=False)

        run = self.tried(self.names, placed=placed)
        return run is not None and run.is_part_of(whole)

    def random(self, whole: _Run) -> bool:
        """Whether a step draws random numbers."""
        run = self.tried(self.names, seed=1)
        return run is None or not run.is_part_of(whole)

    def _cuts(self, flat: bool) -> Iterator[Cut]:
        """Yield what leaves the first or the second half of each tensor, along a dim or of all its elements."""
        dims = range(max((len(self.model[name].shape) for name in self.names), default=0))
        for at, half in ((at, half) for at in dims for half in (0, 1)):
            yield lambda value, at=at, half=half: (  # type: ignore[misc]
                value.tensor_split(2, at)[half] if value.ndim > at and value.shape[at] > 1 else value
            )
        for half in (0, 1) if flat else ():
            yield lambda value, half=half: value.reshape(-1).tensor_split(2)[half]  # type: ignore[misc]

    def tried(
        self,
        names: Sequence[str],
        cut: Cut = lambda value: value,
        seed: int = 0,
        broken: str | None = None,
        called: _Called | None = None,
        resumed: bool = False,
        placed: Cut = lambda value: value,
    ) -> _Run | None:
        """Step the parameters of ``names`` alone, what ``cut`` leaves of each; None where that fails.

        Args:
            placed: makes of values what is stepped.
            broken: the parameter whose gradient is infinite at the last step.
            called: notes what operators steps call.
            resumed: whether other optimizers take over on the way.

        Raises:
            NeedsClosure: the step needs a closure.
        """
        for dtype in dict.fromkeys((self.dtype, torch.float32)):
            self.dtype = dtype
            try:
                return self._stepped(names, cut, seed, broken, called, resumed, placed)
            except (NeedsClosure, _NotSaved):
                raise
            except Exception:  # kernels that know no float64, or no such shape
                continue
        return None

    def _stepped(
        self,
        names: Sequence[str],
        cut: Cut,
        seed: int,
        broken: str | None,
        called: _Called | None,
        resumed: bool,
        placed: Cut,
    ) -> _Run:
        torch.manual_seed(seed)
        before = {name: cut(self.drawn[name][0]).to(self.dtype) for name in names}
        own = {name: nn.Parameter(placed(value.clone())) for name, value in before.items()}
        memory = {name: local(parameter.detach()) for name, parameter in own.items()}
        made = self._made(own)
        for step in range(1, STEPS + 1):
            if resumed and step in HANDED_OVER:
                made = _handed_over(made, self._made(own), {parameter: name for name, parameter in own.items()})
            for name, parameter in own.items():
                value = cut(self.drawn[name][step]).to(self.dtype).contiguous() * SCALES[step % len(SCALES)]
                parameter.grad = placed(value)
                if name == broken and step == STEPS:
                    parameter.grad.fill_(math.inf)
            with called or contextlib.nullcontext():
                _step(made)
        after = {name: local(parameter.detach()) for name, parameter in own.items()}
        self.moves |= any(after[name].data_ptr() != value.data_ptr() for name, value in memory.items())
        self.keeps_others |= any(
            isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape
            for parameter in own.values()
            for value in tree_leaves(made.state.get(parameter))
        )
        changes = {name: after[name] - before[name] for name in names}
        options = [_numbers(group) if group["params"] else None for group in made.param_groups]
        return _Run(changes, options, _attributes(made))

    def _made(self, own: Mapping[str, nn.Parameter]) -> Optimizer:
        made = build_optimizer(self.make, {name: [parameter] for name, parameter in own.items()}, self.model)
        for group in made.param_groups:
            if "lr" in group and not float(group["lr"]):
                group["lr"] = 0.01  # where a schedule begins at 0
        if callable(train := getattr(made, "train", None)):
            train()
        return made


def _handed_over(made: Optimizer, other: Optimizer, names: Mapping[Tensor, str]) -> Optimizer:
    """Give another optimizer of the same parameters what a checkpoint has of this one.

    Raises:
        _NotSaved: this one has something that none can have.
    """
    try:
        groups = hyperparameters_of(made)
        states = {
            parameter: {
                str(key): together(
                    structure(str(key), value, f"{key} of {names[parameter]}"),
                    {at: each.clone() for at, each in tensors_of(str(key), value)},
                )
                for key, value in state.items()
            }
            for parameter, state in made.state.items()
            if parameter in names
        }
    except RuntimeProgramError as error:
        raise _NotSaved(str(error)) from None
    other.state.clear()
    other.state.update(states)
    for group, values in zip(other.param_groups, groups):
        give_group(group, values)
    return other


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape, its largest dims halved until a tensor of it is small."""
    sizes = list(shape)
    while math.prod(sizes) > ELEMENTS:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(sizes)


def _spread(names: Sequence[str], most: int) -> list[str]:
    """Return all, or that many at most, evenly."""
    return list(names[:: -(-len(names) // most)]) if names and most > 0 else []


def _drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Values, and the gradients of all steps, which point the same way in part, so that step sizes grow that are estimated from them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn((STEPS + 1, *shape), generator=generator, dtype=torch.float64)
    found[2:] = found[1] + found[2:] / 2
    return found


def _group_kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What groups that are stepped alike have in common: their options, of fractions whether they are 0."""
    return tuple(
        (key, value if isinstance(value, str | int) or value is None else repr(value) != "0.0")
        for key, value in group.items()
        if key not in ("params", "param_names")
    )


def _attributes(made: Optimizer) -> dict[str, Any]:
    """Numbers and tensors in attributes, by their paths, but for state, groups and parameters."""
    others = (made.state, made.param_groups, made.defaults)
    own = {key: value for key, value in vars(made).items() if all(value is not other for other in others)}
    return {
        f"{key}{keystr(path)}": each.detach().clone() if isinstance(each, Tensor) else each
        for key, value in own.items()
        for path, each in tree_flatten_with_path(value)[0]
        if isinstance(each, int | float | Tensor) and not isinstance(each, nn.Parameter)
    }


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.allclose(value, other, rtol=TOLERANCE, equal_nan=True)
    return type(value) is type(other) and bool(value == other or value != value)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _step(made: Optimizer) -> None:
    calls: list[None] = []

    def closure() -> Any:
        calls.append(None)
        return torch.zeros((), requires_grad=True)

    try:
        made.step()
    except Exception:
        with contextlib.suppress(Exception):
            made.step(closure)
            calls.append(None)
        if len(calls) > 1:
            raise NeedsClosure(
                f"the optimizer of the model file, {type(made).__name__}, needs a closure that computes gradients again within its step, "
                "and a program computes them once a step; use one whose step() needs none, such as AdamW or Muon"
            ) from None
        raise
