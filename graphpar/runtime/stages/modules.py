"""Emitted stage modules: imports them by path, builds them without values, wraps them for torch's pipeline.

out/stage_1.py --emitted_package--> class Stage1 --build_stage--> module on the device, values still undefined
StageAdapter(module): torch hands it every keyword input of the rank; it passes on those the stage names
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphpar.runtime.axes import AXES
from graphpar.runtime.debugging import lone_group
from graphpar.runtime.debugging.events import delay
from graphpar.runtime.debugging.fp64 import current
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, StageInterface, TensorInterface
from graphpar.runtime.state.replicas import ROUND_APART

KEYWORD = "graphpar:"
"""Prefix of every keyword that is passed through torch's ``schedule.step``, so that none collides with its parameters."""

T = TypeVar("T")
_serial = itertools.count()


def emitted_package(program: Manifest) -> str:
    """Import the emitted folder as a package under a new name, and return the name.

    The folder's name need not be an identifier; a new name each time lets one process load a program that
    was emitted again.
    """
    name = f"graphpar_program_{next(_serial)}"
    init = program.folder / "__init__.py"
    if not init.is_file():
        raise RuntimeProgramError(f"{program.folder} is not an emitted folder: it has no __init__.py")
    check_files(program)
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(program.folder)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    with _no_bytecode():
        spec.loader.exec_module(package)
    return name


def check_files(program: Manifest) -> None:
    """Check that the stages' files, and those that they import from the folder, are there and are Python.

    Raises:
        RuntimeProgramError: one is missing, lacks a name, or can't be parsed; the message names the file and the line.
    """
    folder = program.folder
    modules: dict[str, ast.Module] = {}
    pending = [(stage.file, f"stage {stage.index}") for stage in program.stages]
    while pending:
        file, user = pending.pop(0)
        if file in modules:
            continue
        if (folder / file.removesuffix(".py") / "__init__.py").is_file():
            continue
        if not (folder / file).is_file():
            raise RuntimeProgramError(f"{folder} has no {file}, which {user} needs; compile the model again")
        modules[file] = _parsed(folder / file)
        pending += [
            (f"{node.module}.py", f"{file}, line {node.lineno},") for node in modules[file].body if _from_folder(node)
        ]
    for file, module in modules.items():
        for node in module.body:
            if _from_folder(node) and (source := modules.get(f"{node.module}.py")) is not None:
                defined = {"*", *_defined(source)}
                lacking = [alias.name for alias in node.names if alias.name not in defined]
                if lacking and "__getattr__" not in defined:
                    raise RuntimeProgramError(
                        f"{folder / file}, line {node.lineno}: {node.module}.py has no {', '.join(lacking)}; compile the model again"
                    )


def _from_folder(node: ast.stmt) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and node.level == 1 and (node.module or "").isidentifier()


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        text = (error.text or "").strip() if isinstance(error, SyntaxError) else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RuntimeProgramError(
            f"{file}{f', line {line}' if line else ''}: {message}{f': {text}' if text else ''}; fix it, or compile the model again"
        ) from None


def _defined(module: ast.Module) -> set[str]:
    """Return the names that a module defines anywhere."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def stage_module(package: str, stage: StageInterface) -> ModuleType:
    """Import the Python module of a stage's file."""
    with _no_bytecode():
        return importlib.import_module(f"{package}.{stage.file.removesuffix('.py')}")


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Write no ``__pycache__`` into the emitted folder: a file that is emitted twice in a second would look unchanged."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def bind_collectives(program: Manifest, package: str, groups: Groups) -> None:
    """Tell the emitted ``collectives.py``, if there is one, the process groups of the mesh axes."""
    if (program.folder / "collectives.py").is_file():
        with _no_bytecode():
            collectives = importlib.import_module(f"{package}.collectives")
        collectives.bind({axis: groups[axis] for axis in AXES}, groups.device.type in ROUND_APART)
        if lone_group.is_alone() and (program.folder / "expert_rows.py").is_file():
            lone_group.spread_rows(importlib.import_module(f"{package}.expert_rows"))


def build_stage(package: str, stage: StageInterface, device: torch.device, train: bool) -> nn.Module:
    """Build a stage's module on ``device`` with undefined values; tied names stay one parameter."""
    module = empty_stage(package, stage, train)
    materialise(module, device)
    return module


def empty_stage(package: str, stage: StageInterface, train: bool) -> nn.Module:
    """Build a stage's module without memory for its parameters and buffers."""
    found = getattr(stage_module(package, stage), stage.class_name, None)
    if found is None:
        raise RuntimeProgramError(f"{stage.file} has no class {stage.class_name}")
    with torch.device("meta"):
        module: nn.Module = found()
    return module.train(train)


def of_all_stages(
    describe: Callable[[Sequence[nn.Module]], T], stages: Sequence[nn.Module], program: Manifest, groups: Groups
) -> list[T]:
    """Return what ``describe`` says of the stages of each pp rank, this rank's being ``stages``; a collective call of pp.

    A rank alone has nobody to ask, and builds the others' stages without memory.
    """
    if program.pp == 1 or not lone_group.is_alone():
        return groups.gather("pp", describe(stages))
    package, found = emitted_package(program), []
    bind_collectives(program, package, groups)
    for rank in range(program.pp):
        others = [empty_stage(package, stage, program.mode == "train") for stage in program.stages_of(rank)]
        found.append(describe(stages if rank == groups.place["pp"] else others))
    return found


def materialise(
    module: nn.Module,
    device: torch.device,
    working: Mapping[str, torch.dtype] = MappingProxyType({}),
    home: torch.device | None = None,
    lent: bool = False,
) -> None:
    """Give every parameter and buffer, where these are ``lent`` those alone that are not persistent, memory on ``device``, shards on
    ``home``; those of ``working`` in these dtypes, with gradients in their own.

    ``nn.Module.to_empty`` would do, but it makes two parameters of one that has two names.
    """
    made: dict[int, Tensor] = {}
    named = module.named_parameters(remove_duplicate=False)
    dtypes = {id(parameter): current(working[name]) for name, parameter in named if name in working}

    def empty(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            place = home if home is not None and isinstance(tensor, DTensor) else device
            made[id(tensor)] = torch.empty_like(tensor, device=place, dtype=dtypes.get(id(tensor)))
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(made[id(tensor)], requires_grad=tensor.requires_grad)
                if id(tensor) in dtypes:
                    made[id(tensor)].grad_dtype = tensor.dtype
        return made[id(tensor)]

    for owner in module.modules():
        for slots in cast(tuple[dict[str, Any], ...], (owner._parameters, owner._buffers)):
            for name, tensor in slots.items():
                if tensor is not None and (not lent or name in owner._non_persistent_buffers_set):
                    slots[name] = empty(tensor)


def share_parameters(stages: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> None:
    """Have one parameter where several stages of this rank hold a parameter of one name, or of one tie."""
    first, found = {name: names[0] for names in ties for name in names}, dict[str, nn.Parameter]()
    for stage in stages:
        for path, module in stage.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    known = f"{path}.{name}" if path else name
                    module._parameters[name] = found.setdefault(first.get(known, known), parameter)


def stage_function(package: str, stage: StageInterface, name: str) -> Callable[..., Any]:
    """Return a function of a stage's file.

    ``global_counts`` computes a microbatch's share of the loss denominators, ``fully_shard_units`` calls FSDP2,
    ``recompute_units`` ``torch.utils.checkpoint``.
    """
    found = getattr(stage_module(package, stage), name, None)
    if found is None:
        raise RuntimeProgramError(f"{stage.file} has no function {name}, but plan.json says that it is used")
    function: Callable[..., Any] = found
    return function


def _anew(x: Tensor) -> Tensor:
    """Return another tensor with the memory of ``x``, which is written again in the next step: layers may remember what they computed of
    the tensor that they were given."""
    return x if x.requires_grad else x.detach()


class StageAdapter(nn.Module):
    """A stage as torch's ``PipelineStage`` wants it.

    It picks the keyword inputs that the stage names, makes what is sent contiguous and no view (gloo sends
    contiguous tensors only, and zero-bubble schedules detach outputs in place), and checks it against the
    plan: a wrong shape would be received as garbage.

    Attributes:
        positions: of a program for generation: how many the next call computes.

    Args:
        share: what the last stage's loss is multiplied by, if anything: one replica's part of a mean over replicas.
        steady: names of buffers that are written once a step: each microbatch of its batches begins with what the first one began with.
    """

    def __init__(
        self, stage: nn.Module, interface: StageInterface, share: float | None = None, steady: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.stage = stage
        self._interfaces = interface, interface.in_evaluation
        self.share = share
        self.positions: int | None = None
        self.steady = [name for name, _ in stage.named_buffers() if name in steady]
        self._begun: dict[str, Tensor] = {}

    @property
    def interface(self) -> StageInterface:
        """What the stage takes and sends in the mode that it is in."""
        training, evaluating = self._interfaces
        return training if self.stage.training else evaluating

    def at(self, interface: StageInterface) -> StageAdapter:
        """Return the same stage with another interface, of sequences of another length."""
        other = StageAdapter(self.stage, interface, self.share, self.steady)
        other._begun = self._begun  # batches of one step may be of several lengths
        return other

    def begin(self) -> None:
        """Begin a step."""
        self._begun.clear()

    def _rewind(self) -> None:
        """Give the steady buffers what they held as the step began."""
        with torch.no_grad():
            for name in self.steady:
                buffer = self.stage.get_buffer(name)
                if name in self._begun:
                    buffer.copy_(self._begun[name])
                else:
                    self._begun[name] = buffer.clone()

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        """Run the stage on what it received and on its keyword inputs; returns what it sends, checked, or its result."""
        self._rewind()
        received = tuple(map(_anew, received))
        interface = self.interface
        apart = self._interfaces[0].evaluated is not None and not self.stage.training
        run: Any = self.stage.evaluated if apart else self.stage
        outputs = run(
            *received, **{name: _anew(inputs[KEYWORD + name]) for name in interface.inputs + interface.counts}
        )
        if not self.interface.sends:
            delay("after_loss")
            outputs = outputs if self.share is None else outputs * self.share
            return tuple(map(sendable, outputs)) if isinstance(outputs, tuple) else sendable(outputs)
        sent = outputs if isinstance(outputs, tuple) else (outputs,)
        self._check(sent)
        received_ids = {id(tensor) for tensor in received}
        ready = tuple(t.clone() if id(t) in received_ids else sendable(t) for t in sent)
        return ready if len(ready) > 1 else ready[0]

    def _check(self, sent: tuple[Tensor, ...]) -> None:
        planned = self.interface.sends
        where = f"stage {self.interface.index} ({self.interface.file})"
        if len(sent) != len(planned):
            raise RuntimeProgramError(f"{where} returned {len(sent)} tensors; plan.json says {len(planned)}")
        for tensor, spec in zip(sent, planned):
            shape = spec.shape_at(self.positions)
            if tuple(tensor.shape) != shape or tensor.dtype != spec.dtype:
                raise RuntimeProgramError(
                    f"{where} returned {spec.name} as {tensor.dtype} {list(tensor.shape)}; "
                    f"plan.json says {spec.dtype} {list(shape)}"
                )
            if tensor.requires_grad and not spec.requires_grad:
                raise RuntimeProgramError(
                    f"{where} returned {spec.name} with a gradient; plan.json says that it has none"
                )


def sendable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if it is not contiguous or is a view."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor._is_view() else tensor


def example(spec: TensorInterface, device: torch.device) -> Tensor:
    """Make an example of what is sent, for torch's ``PipelineStage``: shape, strides, dtype, and whether it has a gradient."""
    return torch.empty(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)


def keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``values`` so that no name collides with a parameter of torch's ``schedule.step``."""
    return {KEYWORD + name: value for name, value in values.items()}
