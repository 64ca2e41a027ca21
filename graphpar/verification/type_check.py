"""``check``: type-check the emitted text with ``spmd_types``, in one process, at the real world size.

    plan.json ──types of inputs, parameters, boundaries──┐
    out/stage_0.py ... ──run on meta tensors, rank 0 of a fake process group──► a type of every value ──► the loss's type

``spmd_types`` knows four types on an axis: R, I, P, and V ("varying", any shard). A program that it accepts has complete gradients
where the plan says so: a gradient of R is P, of I is I, of V is V, of P is R, by its rules, not ours.

Assumed: the functions of ``collectives.py`` and of composite operators do what they declare (tests compare them with whole tensors),
which is tried of ``parallel_products.py`` (:mod:`graphpar.verification.products_proof`); the runtime reduces the gradients of R
parameters; a loss that varies over replicas is a share of a sum.

Not seen: V has no dim. A shard of the wrong dim shows only as a wrong shape, so a wrong shard of the batch, or of other ``parts``,
passes; and so does a partial sum that is taken for a shard, except after a linear operator, a product with a matrix or a convolution:
there two sharded operands are sharded in the dim that is summed, so this module says P. A branch on the rank, a factor in the value,
and a denominator that each replica counts for itself have no type either. Dims, parts and placements are proven before the text is
printed (``passes.sharding.check_types``), values by ``verify``. Checking a stage ends at its first problem.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from graphpar.codegen.dead_code import library
from graphpar.errors import GraphparError
from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import local_shape, rank_at
from graphpar.runtime.manifest import InputInterface, Manifest, StageInterface, TensorInterface, load_manifest
from graphpar.runtime.option_kinds import GENERATE, listed_lengths
from graphpar.runtime.stages.modules import build_stage, emitted_package
from graphpar.runtime.stages.schedules import check_actions
from graphpar.verification.products_proof import product_problems
from graphpar.verification.recomputed import check_recomputed
from graphpar.verification.typed_functions import (
    DECLARED,
    Axes,
    Kinds,
    declare_composites,
    give,
    kind_of,
    kinds_of,
    untyped,
)

SMALL = 1 << 26
"""The most parameters of a stage that may be run on numbers."""

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_PRODUCTS = (torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)
_LINEAR = (
    torch.Tensor.to, torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.type_as,
    torch.Tensor.__getitem__, F.pad, torch.Tensor.diff, torch.diff,
)  # fmt: skip
"""Linear in the first operand, which ``spmd_types`` does not know: a partial sum passes through them unchecked."""
_SUMS = (
    torch.add,
    torch.sub,
    *(getattr(torch.Tensor, name) for name in ("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__")),
)
_CASTS = {
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
}
_NEW = (torch.Tensor.new_empty, torch.Tensor.new_full, torch.Tensor.new_ones, torch.Tensor.new_zeros)
"""They take only a dtype and a device from their operand."""


@dataclass
class CheckResult:
    """``problems`` name the stage, the line of the emitted file and the types; ``unchecked`` says why, by operator."""

    world_size: int
    stages: int
    operators_checked: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found; operators may be unchecked."""
        return not self.problems

    def with_other(self, other: CheckResult) -> CheckResult:
        """Return this result with that of the program by which this one generates between steps."""
        return CheckResult(
            self.world_size,
            self.stages,
            self.operators_checked + other.operators_checked,
            self.unchecked | other.unchecked,
            [*self.problems, *(f"{GENERATE}/{problem}" for problem in other.problems)],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``graphpar check --json`` prints."""
        return {
            "ok": self.ok,
            "devices": self.world_size,
            "stages": self.stages,
            "checked": self.operators_checked,
            "unchecked": self.unchecked,
            "problems": self.problems,
        }


def check_folder(folder: str | Path) -> CheckResult:
    """Check the types of every stage of an emitted program, that its table of actions loses nothing, and what it recomputes.

    Raises:
        GraphparError: this process already has a process group.
        RuntimeProgramError: the folder holds no emitted program, or a broken plan.
    """
    program = load_manifest(folder)
    if dist.is_initialized():
        raise GraphparError("check makes its own process group, so it can't run in a process that has one.")
    result = CheckResult(program.world_size, len(program.stages))
    try:
        check_actions(program)
    except RuntimeProgramError as error:
        result.problems.append(str(error))
    with _fake_mesh(program) as axes:
        package = emitted_package(program)
        files = [name for name in library() if (program.folder / f"{name}.py").is_file()]
        collectives: Any = None
        for name, declare in DECLARED.items():
            if name in files:
                declare(module := importlib.import_module(f"{package}.{name}"), axes)
                collectives = collectives or module
        for module in (importlib.import_module(f"{package}.{name}") for name in files if name not in DECLARED):
            result.problems += product_problems(module, program.mesh)
            declare_composites(module, axes, collectives)
            if hasattr(module, "in_chunks"):  # a sum over chunks has the type of the whole
                setattr(module, "in_chunks", lambda function, rows, whole, tokens: function(*rows, *whole))  # noqa: B010
        for method in ("forward", "evaluated") if program.evaluates_apart else ("forward",):
            for length in listed_lengths(program.seq) or (0,):
                at, received = program.at(length) if length else program, list[Kinds]()
                for stage in at.stages:
                    received = _Stage(at, package, stage, axes, result, method).check(received)
        if program.mode == "train":
            result.problems += check_recomputed(program, package)
    return result if program.generates is None else result.with_other(check_folder(program.generates))


@contextlib.contextmanager
def _fake_mesh(program: Manifest) -> Iterator[Axes]:
    """Become rank 0 of the real mesh, in groups that send nothing. All ranks run the same text, so one rank's types are all ranks'."""
    dist.init_process_group("fake", rank=0, world_size=program.world_size, store=FakeStore())
    try:
        yield {
            axis: dist.new_group([rank_at({axis: place}, program.mesh) for place in range(program.mesh[axis])])
            for axis in program.axes
        }
    finally:
        dist.destroy_process_group()


# ---- operators ---------------------------------------------------------------------------------------------------


class _Operators(TorchFunctionMode):
    """Counts the operators that the checker typed; types those it has no rule for, and notes them as unchecked."""

    def __init__(self, axes: Axes, placed: Collection[str], result: CheckResult) -> None:
        super().__init__()
        self.axes, self.placed, self.result = axes, placed, result
        self.counts: Counter[str] = Counter()
        self.read: dict[nn.Parameter, set[torch.dtype]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" and func is not torch.Tensor.T.__get__:  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        for operand in (*args, *kwargs.values()):
            if isinstance(operand, nn.Parameter):
                self.read.setdefault(operand, set()).add(_cast_to(func, args, kwargs) or operand.dtype)
        if func is F.linear:
            return self._affine(torch.matmul, args[0], _transposed(args[1]), _argument(args, kwargs, 2, "bias"))
        if func in (torch.addmm, torch.Tensor.addmm) and not kwargs:
            return self._affine(torch.mm, args[1], args[2], args[0])
        if func in _CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func in _PRODUCTS:
            return self._product(func, *args, summed=args[1].ndim == 2)
        if func in _SUMS:
            args = self._summands(args)
        return self._typed(func, args, kwargs)

    def _affine(self, product: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Type a product and a sum by the checker's rules: a bias that every rank adds to a partial sum is an error."""
        value = self._product(product, x, weight, summed=weight.ndim == 2)
        return value if bias is None else self._sum(value, bias)

    def _convolution(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        place = 4 if "transpose" in func.__name__ else 3
        groups = _argument(rest, options, place, "groups")
        value = self._product(func, input, weight, None, *rest, summed=groups in (None, 1), **options)
        if bias is None:
            return value
        return self._sum(value, bias.view([-1] + [1] * (weight.ndim - 2)))

    def _sum(self, value: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = self._typed(torch.add, (value, bias), {})
        return result

    def _summands(self, operands: Sequence[Any]) -> list[Any]:
        """Make a varying scalar that is added to a partial sum partial: it is a summand, since a scalar has no shards."""
        kinds = [kinds_of(operand, self.axes) if isinstance(operand, Tensor) else {} for operand in operands]
        partial = {axis for own in kinds for axis, kind in own.items() if kind is spmd.P}
        summands = list(operands)
        for place, own in enumerate(kinds):
            if any(own.get(axis) is spmd.V for axis in partial) and operands[place].ndim == 0:
                with untyped():
                    summands[place] = operands[place].view_as(operands[place])
                typed = {axis: spmd.P if axis in partial and kind is spmd.V else kind for axis, kind in own.items()}
                give(summands[place], typed, self.axes)
        return summands

    def _product(self, func: Any, x: Tensor, weight: Tensor, *rest: Any, summed: bool, **options: Any) -> Tensor:
        """Type a product as P where both operands are sharded: then they are in the dim that is summed."""
        value: Tensor = self._typed(func, (x, weight, *rest), options)
        for axis in self.axes if summed else ():
            sharded = all(kinds_of(operand, self.axes).get(axis) is spmd.V for operand in (x, weight))
            if sharded and (axis not in REPLICAS or axis in self.placed):
                spmd.mutate_type(value, self.axes[axis], src=spmd.V, dst=spmd.P)
        return value

    def _typed(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func in _NEW:
            return self._new(func, args, kwargs)
        if func in (torch.index_add, torch.Tensor.index_add) and spmd.P in kinds_of(operands[0], self.axes).values():
            return self._added(func, args, kwargs, operands)
        if func in _LINEAR and operands and spmd.P in kinds_of(operands[0], self.axes).values():
            return self._unchecked(func, args, kwargs, operands[:1], "spmd_types does not know that it is linear")
        try:
            value = func(*args, **kwargs)
        except spmd.SpmdTypeError:
            raise
        except Exception as error:
            try:
                return self._unchecked(func, args, kwargs, operands, f"spmd_types fails: {_line(error)}")
            except Exception:
                raise error from None  # it fails without the checker too, so the program is wrong
        results = [item for item in tree_leaves(value) if isinstance(item, Tensor)]
        if not results:
            return value
        if not operands and self.axes and not kinds_of(results[0], self.axes):
            return self._unchecked(func, args, kwargs, [], "a new tensor, assumed to be the same on every rank")
        self.result.operators_checked += 1
        return value

    def _new(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Type a tensor filled with a number as R; the tensor that gives its dtype does not matter."""
        with untyped():
            value: Tensor = func(*args, **kwargs)
        give(value, dict.fromkeys(self.axes, spmd.R), self.axes)
        self.result.operators_checked += 1
        return value

    def _added(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> Any:
        """Type ``index_add`` to a partial sum: each rank adds a partial sum, or its own shard by its own indices."""
        own, index, source = (kinds_of(operand, self.axes) for operand in operands)
        for axis, kind in own.items():
            added = index.get(axis), source.get(axis)
            if kind is spmd.P and added not in ((spmd.R, spmd.P), (spmd.I, spmd.P), (spmd.V, spmd.V)):
                raise spmd.SpmdTypeError(f"index_add of {added[1]} by indices {added[0]} to a partial sum on {axis}")
        return self._unchecked(func, args, kwargs, operands, "spmd_types does not know that it is linear")

    def _unchecked(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor], reason: str) -> Any:
        """Run an operator without the checker, and give its result the type of its operands: P before V before I before R."""
        with untyped():
            value = func(*args, **kwargs)
        given = [kinds_of(operand, self.axes) for operand in operands]
        merged: Kinds = {}
        for axis in self.axes:
            kinds = {kinds[axis] for kinds in given if axis in kinds} or {spmd.R}
            merged[axis] = next(kind for kind in (spmd.P, spmd.V, spmd.I, spmd.R) if kind in kinds)
        for item in tree_leaves(value):
            if isinstance(item, Tensor) and not kinds_of(item, self.axes):
                give(item, merged, self.axes)
        self.result.unchecked[_function_name(func)] = reason
        return value


def _cast_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    if func is torch.Tensor.to:
        return next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), None)
    return _CASTS.get(func)


def _transposed(weight: Tensor) -> Tensor:
    return weight.t()


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _function_name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


# ---- a stage -----------------------------------------------------------------------------------------------------


class _Stage:
    """Checks one stage: its parameters and inputs typed by the plan, run forward and backward.

    ``method``: its forward, or what it is in evaluation where that is another.
    """

    def __init__(
        self, program: Manifest, package: str, stage: StageInterface, axes: Axes, result: CheckResult, method: str
    ) -> None:
        self.program, self.package, self.axes, self.result, self.method = program, package, axes, result, method
        self.stage = stage if method == "forward" else stage.in_evaluation

    def check(self, received: Sequence[Kinds]) -> list[Kinds]:
        """Check the stage on values of the ``received`` types, and return the types of what it sends.

        It runs on meta tensors, or on numbers where an operator can't (``grouped_mm``) and the stage is small.
        """
        before = self.result.operators_checked, dict(self.result.unchecked), list(self.result.problems)
        declared = [self._declared(spec) for spec in self.stage.receives]
        kinds = [theirs | own for theirs, own in zip(received or [{} for _ in declared], declared)]
        try:
            try:
                outputs = self._run(torch.device("meta"), kinds)
            except spmd.SpmdTypeError:
                raise
            except Exception:
                if not self._is_small():
                    raise
                self.result.operators_checked, self.result.unchecked, self.result.problems = before
                outputs = self._run(torch.device("cpu"), kinds)
        except Exception as error:
            self._problem(f"{self._where(error)}{_line(error)}")
            return []
        return self._sent(outputs) if self.stage.sends else []

    def _run(self, device: torch.device, received: Sequence[Kinds]) -> tuple[Tensor, ...]:
        train = self.program.mode == "train"
        module = build_stage(self.package, self.stage, device, train and self.method == "forward")
        run = module if self.method == "forward" else getattr(module, self.method)
        mesh = {axis: spmd.MeshAxis.of(group) for axis, group in self.axes.items()}
        with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict", local=True):
            self._type_parameters(module)
            values = [self._value(spec, kinds, device) for spec, kinds in zip(self.stage.receives, received)]
            inputs = {name: self._input(self.program.input(name), device) for name in self.stage.inputs}
            counts = {
                name: give(torch.ones((), device=device), self._everywhere(), self.axes) for name in self.stage.counts
            }
            with _Operators(self.axes, self.program.placed, self.result) as operators, torch.set_grad_enabled(train):
                returned = run(*values, **inputs, **counts)
            self._check_copies(module, operators.read)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            if not self.stage.sends:
                self._check_outputs(outputs, train)
            elif train:
                with untyped():
                    sent = [value for value in outputs if value.requires_grad]
                    torch.autograd.backward(sent, [torch.zeros_like(value) for value in sent])
        return outputs

    def _check_copies(self, module: nn.Module, read: Mapping[nn.Parameter, set[torch.dtype]]) -> None:
        """Check that no parameter is gathered, stored or cast for a step in fewer bits than those in which it is read."""
        for name, parameter in module.named_parameters():
            sharded = name in self.program.fully_sharded
            kept, cast = self.program.working.get(name), self.program.casts if self.method == "forward" else {}
            copied = kept or (self.program.gather_dtype if sharded else cast.get(name))  # casts are those of a step
            if copied is None:
                continue
            lost = [dtype for dtype in read.get(parameter, ()) if torch.promote_types(dtype, copied) != copied]
            if lost:
                how = "interface.gather_dtype gathers it in" if sharded else "interface.casts casts it to"
                how = "interface.working stores it in" if kept else how
                self._problem(f"{name} is read in {lost[0]}, but {how} {copied}".replace("torch.", ""))
                return

    def _is_small(self) -> bool:
        module = build_stage(self.package, self.stage, torch.device("meta"), True)
        return sum(parameter.numel() for parameter in module.parameters()) < SMALL

    # ---- types in the plan ----

    def _everywhere(self) -> Kinds:
        return dict.fromkeys(self.axes, spmd.R)

    def _declared(self, spec: TensorInterface) -> Kinds:
        return {axis: kind_of(kind) for axis, kind in spec.types.items() if axis in self.axes}

    def _type_parameters(self, module: nn.Module) -> None:
        tensors = dict(module.named_parameters(remove_duplicate=False))
        for name, value in (tensors | dict(module.named_buffers(remove_duplicate=False))).items():
            spec = self.program.spec(name)
            whole = self.program.shapes.get(name)
            if whole is not None and local_shape(whole, spec, self.program.mesh) != tuple(value.shape):
                self._problem(f"{name} is {list(value.shape)}, which is not {spec} of {list(whole)}")
            with untyped():
                value.detach().fill_(1)  # undefined until weights are loaded
            give(value, {axis: kind_of(kind) for axis, kind in spec.items()}, self.axes)

    def _value(self, spec: TensorInterface, kinds: Kinds, device: torch.device) -> Tensor:
        value = torch.ones(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)
        return self._new(value, self._everywhere() | kinds)

    def _input(self, spec: InputInterface, device: torch.device) -> Tensor:
        """Return a microbatch of an input on a rank: its own rows, whole otherwise."""
        shape, kinds = list(spec.shape), self._everywhere()
        if self.program.mode == GENERATE:
            shape = [shape[0] // self.program.replicas, self.program.microbatch_size]  # positions of a window
        elif spec.batch_dim is not None:
            shape[spec.batch_dim] = self.program.microbatch_size
        if spec.batch_dim is not None:
            kinds |= {axis: spmd.V for axis in REPLICAS if axis in self.axes}
        return self._new(torch.ones(shape, dtype=spec.dtype, device=device), kinds)

    def _new(self, value: Tensor, kinds: Kinds) -> Tensor:
        """Return a copy of ``value`` with these types, not those that the checker gave it when it was made."""
        with untyped():
            return give(value.detach().clone().requires_grad_(value.requires_grad), kinds, self.axes)

    # ---- results ----

    def _check_outputs(self, outputs: Sequence[Tensor], train: bool) -> None:
        file = f"{self.stage.file}: "
        for spec, value in zip(self.program.outputs, outputs):
            for axis, kind in kinds_of(value, self.axes).items():
                if axis in REPLICAS:
                    own = kind is spmd.I and spec.batch_dim is not None  # a sum over replicas, in place of rows
                    fits = kind in (spmd.V, spmd.P) if train else not (own or kind is spmd.P)
                    expected = "a share of each replica" if train else "rows of each replica"
                else:
                    fits = kind is spmd.I or (kind is spmd.R and not value.requires_grad)
                    expected = "whole (I)"
                if not fits:
                    self._problem(f"{file}it returns {spec.name} as {kind} on {axis}, but it must be {expected}")
        if train and self.result.ok:
            (loss,) = outputs
            for axis in REPLICAS:
                if kinds_of(loss, self.axes).get(axis) is spmd.V:
                    rules.reinterpret(loss, self.axes[axis], src=spmd.V, dst=spmd.P, out=loss)
            if loss.requires_grad:
                loss.backward()

    def _sent(self, outputs: Sequence[Tensor]) -> list[Kinds]:
        kinds = [kinds_of(value, self.axes) for value in outputs]
        for spec, value, found in zip(self.stage.sends, outputs, kinds):
            if tuple(value.shape) != spec.shape:
                self._problem(f"{self.stage.file}: it sends {spec.name} as {list(value.shape)}, not {list(spec.shape)}")
            for axis, expected in self._declared(spec).items():
                same = {found.get(axis), expected} == {spmd.R, spmd.I} and not value.requires_grad
                if (
                    found.get(axis) is not expected
                    and not same
                    and not (expected is spmd.P and found.get(axis) is spmd.V)
                ):
                    self._problem(
                        f"{self.stage.file}: it sends {spec.name} as {found.get(axis)} on {axis}, not {expected}"
                    )
        return kinds

    # ---- messages ----

    def _problem(self, text: str) -> None:
        shown = text.replace("PerMeshAxisLocalSpmdType.", "")
        for (
            axis,
            group,
        ) in self.axes.items():  # names given to spmd_types' axes would outlive the mesh, so they have none
            shown = shown.replace(repr(spmd.MeshAxis.of(group)), axis)
        self.result.problems.append(f"stage {self.stage.index}, {shown}")

    def _where(self, error: Exception) -> str:
        """Return the innermost line of emitted model code that the error passed through."""
        lines = [
            (Path(frame.filename).name, frame.lineno or 0)
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).parent == self.program.folder
        ]
        models = [line for line in lines if line[0].removesuffix(".py") not in library()]
        if not lines:
            return f"{self.stage.file}: "
        file, number = (models or lines)[-1]
        return f"{file}:{number} ({linecache.getline(str(self.program.folder / file), number).strip()}): "


def _line(error: Exception) -> str:
    """Return an error's message in one line; errors of ``spmd_types`` have the operator and the types of its operands."""
    what = str(error.args[0]).splitlines()[0] if error.args and str(error.args[0]) else type(error).__name__
    where = " ".join((getattr(error, "context", None) or "").split())
    return f"{what} {where}".strip()
