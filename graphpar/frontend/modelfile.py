"""Read the user's model file: a plain Python file (or ``package.module``) with a few known names in it.

    model.py ──import, once a process──► ModelFile: model, args, kwargs, loss_fn, targets, ...
                                            ├─initial_weights─► state_dict of the model, built for real
                                            └─example_batch──► a global batch, by the program's input names

Everything that the file raises becomes a ``GraphparError`` with the line of the file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphpar.errors import GraphparError, near_match
from graphpar.frontend.build import ModelLike, needed_arguments, unwrapped
from graphpar.frontend.file_dependencies import OBSERVED
from graphpar.ir.lengths import at_length
from graphpar.ir.program import is_plain
from graphpar.runtime.manifest import InputInterface
from graphpar.runtime.stages.lengths import dims_of

NAMES = (
    "model",
    "example_inputs",
    "example_targets",
    "loss_fn",
    "batch_dims",
    "shard_plan",
    "split_points",
    "optimizer",
    "lr_schedule",
    "metrics",
    "passes",
)

MEANING = {
    "model": "an nn.Module, or a class or function that makes one without arguments",
    "example_inputs": "a tuple (positional arguments), a dict (keyword arguments), or a function that returns either",
}

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_loaded: dict[tuple[Path, int], ModuleType] = {}  # a file is executed once a process, unless it changes


@dataclass(frozen=True)
class ModelFile:
    """The content of a model file. ``reference`` is its dotted module name, if it was named so.

    ``importer`` imports the file, where the rest is what was kept of it; its functions are then such that import it when they are called.
    """

    model: ModelLike
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None
    targets: tuple[Any, ...]
    batch_dims: dict[str, int | None] | None
    split_points: tuple[str | Mapping[str, str], ...] | None
    shard_plan: dict[str, Any] | None
    optimizer: Callable[..., Any] | None
    path: Path
    reference: str | None = None
    passes: Any = None  # graphpar.PASSES with the user's passes
    importer: Callable[[], ModelFile] | None = None

    def imported(self) -> ModelFile:
        """Return the file's content as an import of it gives."""
        return self if self.importer is None else self.importer()


def load_model_file(path_or_module: str | Path) -> ModelFile:
    """Import a model file and check the names in it.

    Raises:
        GraphparError: there is no such file or module, it raises, or a name is missing or of a wrong type.
    """
    with OBSERVED.importing():
        return _loaded_file(path_or_module)


def _loaded_file(path_or_module: str | Path) -> ModelFile:
    text = str(path_or_module)
    if named_as_file(path_or_module):
        path = Path(text)
        module, reference = import_file(path), None
    elif _DOTTED.fullmatch(text):
        module, reference = _import_dotted(text), text
        path = Path(cast(str, module.__file__))
    else:
        raise GraphparError(f"{text!r} is neither a Python file nor a module name such as package.module.")
    return _model_file_of(module, path, reference)


def named_as_file(path_or_module: str | Path) -> bool:
    """Whether this is the path of a model file, not the name of a module."""
    text = str(path_or_module)
    return isinstance(path_or_module, Path) or text.endswith(".py") or "/" in text or Path(text).is_file()


def find_model_file(folder: Path, reference: str) -> Path | str:
    """Find what ``model_file`` in a ``plan.json`` names: a path relative to ``folder``, or a dotted module name."""
    path = Path(os.path.normpath(folder.resolve() / reference))
    if path.is_file():
        return path
    if not reference.endswith(".py"):
        return reference
    raise GraphparError(
        f"{folder / 'plan.json'} names the model file {reference!r}, relative to its folder, but there is no {path}. If one of the two was "
        f"moved, move it back, or compile the file again, with --plan {folder / 'plan.json'} for the same plan."
    )


# ---- importing -------------------------------------------------------------------------------------------------


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module, executed once a process unless it changes; what it raises is a ``GraphparError``."""
    if not path.is_file():
        raise GraphparError(_no_such_file(path))
    resolved = path.resolve()
    key = (resolved, resolved.stat().st_mtime_ns)
    if key not in _loaded:
        _loaded[key] = _execute(resolved, path)
    return _loaded[key]


def _no_such_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name the Python file in it that holds the model."
    if not path.parent.is_dir():
        return f"There is no model file {path}: the folder {path.parent} does not exist."
    siblings = sorted(entry.name for entry in path.parent.glob("*.py"))
    return f"There is no model file {path}.{near_match(path.name, siblings)}"


def _execute(resolved: Path, shown: Path) -> ModuleType:
    """Run the file under a private module name: a file called ``bert.py`` must not hide a package."""
    stem = re.sub(r"\W", "_", resolved.stem)
    name = f"_graphpar_model_{stem}"
    while name in sys.modules:
        name += "_again"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise GraphparError(f"{shown} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look a class's module up
    try:
        with _importable(resolved.parent), _users_errors(f"{shown} can't be imported", resolved):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_dotted(name: str) -> ModuleType:
    if Path(name).is_dir() and (not (Path(name) / "__init__.py").is_file() or (Path(name) / "plan.json").is_file()):
        raise GraphparError(f"{name} is a folder; name the Python file in it that holds the model.")
    with _importable(Path.cwd()):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        except Exception as error:
            raise GraphparError(f"{name} can't be imported: {type(error).__name__}: {error}") from None
        if found is None or found.origin is None or not found.has_location:
            hint = f" Did you mean the file {name}.py?" if Path(f"{name}.py").is_file() else ""
            raise GraphparError(f"There is no module {name} (searched from {Path.cwd()} and where Python looks).{hint}")
        with _users_errors(f"{name} can't be imported", Path(found.origin)):
            return importlib.import_module(name)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let modules beside the file be imported within the block."""
    OBSERVED.beside.add(str(folder.resolve()))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _users_errors(what: str, file: Path) -> Iterator[None]:
    """Raise whatever the user's code raises as one sentence with the line of their file."""
    try:
        yield
    except (GraphparError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, SyntaxError) and error.lineno is not None:
            code = f": {error.text.strip()}" if error.text else ""
            where = f"{Path(error.filename or file).name}, line {error.lineno}{code}"
            raise GraphparError(f"{what}: {type(error).__name__}: {error.msg} ({where})") from None
        own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
        code = f": {own[-1].line}" if own and own[-1].line else ""
        where = f" ({file.name}, line {own[-1].lineno}{code})" if own else ""
        raise GraphparError(f"{what}: {type(error).__name__}: {error}{where}") from error


# ---- reading the names -----------------------------------------------------------------------------------------


def _model_file_of(module: ModuleType, path: Path, reference: str | None) -> ModelFile:
    shown = reference or str(path)
    found = {name: getattr(module, name, None) for name in NAMES}
    for name in ("model", "example_inputs"):
        if not hasattr(module, name):
            raise GraphparError(_missing(name, module, shown))
    model = found["model"]
    if not isinstance(model, nn.Module):
        _require(callable(model), shown, "model", model, MEANING["model"])
        if needed := needed_arguments(cast(Callable[..., Any], model)):
            name = getattr(model, "__name__", "model")
            raise GraphparError(
                f"{shown}: model is the {'class' if isinstance(model, type) else 'function'} {name}, which needs arguments "
                f"({', '.join(needed)}); give an instance, or a function without arguments that makes one, such as "
                f"def model(): return {name}(...)."
            )
        model = _guarded(cast(Callable[[], nn.Module], model), f"model() of {shown} failed", path.resolve())
    args, kwargs = _inputs(_value(module, "example_inputs", path, shown), shown)
    targets = _value(module, "example_targets", path, shown)
    shard_plan = _typed(found["shard_plan"], Mapping, shown, "shard_plan", "a dict of patterns and styles")
    batch_dims = _typed(found["batch_dims"], Mapping, shown, "batch_dims", "a dict of input names and dims")
    split = _typed(found["split_points"], list | tuple, shown, "split_points", "a list of module paths")
    _typed(found["metrics"], Mapping, shown, "metrics", "a dict of functions of outputs and batch")
    for name in ("loss_fn", "optimizer", "lr_schedule"):
        _require(found[name] is None or callable(found[name]), shown, name, found[name], "a function")
    if targets is not None and found["loss_fn"] is None:
        raise GraphparError(
            f"{shown} has example_targets, but no loss_fn that takes them: loss_fn = lambda output, target: ..."
        )
    return ModelFile(
        model=model,
        args=args,
        kwargs=kwargs,
        loss_fn=found["loss_fn"],
        targets=tuple(targets) if isinstance(targets, list | tuple) else () if targets is None else (targets,),
        batch_dims=None if batch_dims is None else dict(batch_dims),
        split_points=None if split is None else tuple(split),
        shard_plan=None if shard_plan is None else dict(shard_plan),
        passes=found["passes"],
        optimizer=found["optimizer"],
        path=path,
        reference=reference,
    )


def _missing(name: str, module: ModuleType, shown: str) -> str:
    own = [key for key, value in vars(module).items() if not key.startswith("_") and _defined_in(module, value)]
    listing = f"It has {', '.join(own)}." if own else "It defines nothing."
    return f"{shown} has no {name!r}: {MEANING[name]}. {listing}{near_match(name, [other for other in own if other not in NAMES])}"


def _defined_in(module: ModuleType, value: Any) -> bool:
    """Whether a name of ``module`` is its own, not imported."""
    if isinstance(value, type | FunctionType):
        return value.__module__ == module.__name__
    return not isinstance(value, ModuleType | BuiltinFunctionType)


def _require(condition: bool, shown: str, name: str, value: Any, expected: str) -> None:
    if not condition:
        given = "a Tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        raise GraphparError(f"{shown}: {name} is {given}; it must be {expected}.")


def _typed(value: Any, kind: Any, shown: str, name: str, expected: str) -> Any:
    _require(value is None or isinstance(value, kind), shown, name, value, expected)
    return value


def _value(module: ModuleType, name: str, path: Path, shown: str) -> Any:
    """A module-level value, or what the function of this name returns."""
    value = getattr(module, name, None)
    if callable(value) and not isinstance(value, Tensor | Mapping):
        return _guarded(value, f"{name}() of {shown} failed", path.resolve())()
    return value


def _guarded(function: Callable[[], Any], what: str, file: Path) -> Callable[[], Any]:
    @functools.wraps(function)
    def call() -> Any:
        with _importable(file.parent), _users_errors(what, file):
            return function()

    return call


def _inputs(value: Any, shown: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise GraphparError(f"{shown}: example_inputs has the key {wrong[0]!r}; keys must be argument names.")
        return (), dict(value)
    hint = "; for one positional argument write (tensor,)" if isinstance(value, Tensor) else ""
    expected = f"a tuple of positional arguments, or a dict of keyword arguments{hint}"
    _require(isinstance(value, tuple | list), shown, "example_inputs", value, expected)
    return tuple(value), {}


# ---- real values -----------------------------------------------------------------------------------------------


def initial_weights(file: ModelFile, seed: int = 0) -> dict[str, Tensor]:
    """Make the ``state_dict`` of the model, built for real after ``torch.manual_seed(seed)``; an instance's as it is."""
    model = file.model
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model()
    state = {
        name: value
        for name, value in unwrapped(model).state_dict().items()
        if isinstance(value, Tensor) and is_plain(value)
    }
    empty = next((name for name, value in state.items() if value.is_meta), None)
    if empty is not None:
        raise GraphparError(
            f"{file.path}: model has no values to write as initial weights: {empty} is on the device meta. Give "
            'a function that builds it on the CPU (no torch.device("meta") in it): it is run for real only where values are needed.'
        )
    return state


def example_batch(file: ModelFile, inputs: Sequence[InputInterface]) -> dict[str, Tensor]:
    """Make a global batch of the example's rows, repeated or shortened to its size; where the length of sequences varies, of the longest.

    Args:
        inputs: those of a plan: names, shapes and batch dims in the order of the example's tensors.
    """
    leaves = [leaf for leaf in tree_leaves((file.args, file.kwargs, file.targets)) if isinstance(leaf, Tensor)]
    expected = [entry for entry in inputs if entry.role in ("input", "target")]
    if len(leaves) != len(expected):
        raise GraphparError(
            f"{file.path} has {len(leaves)} example tensors, but the plan was made for {len(expected)} "
            f"({', '.join(entry.name for entry in expected)}). Compile the model again."
        )
    return {entry.name: _resized(leaf, entry) for leaf, entry in zip(leaves, expected)}


def _resized(leaf: Tensor, entry: InputInterface) -> Tensor:
    dim, shape = entry.batch_dim, list(entry.shape)
    value = leaf.detach()
    if dim is not None and value.shape[dim] != shape[dim]:
        rows = torch.arange(shape[dim]) % value.shape[dim]
        value = value.index_select(dim, rows)
    for length in dict.fromkeys(shape[position] for position in dims_of(entry)):
        value = at_length(value, dims_of(entry), length)
    if list(value.shape) != shape:
        raise GraphparError(
            f"The example's {entry.name} has shape {list(leaf.shape)}, but the plan was made for {shape}. "
            "Compile the model again."
        )
    return value.contiguous().clone()
