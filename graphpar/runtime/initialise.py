"""Initial weights without a whole model in memory: what a function that builds the model would have drawn, tensor by tensor.

build()  ──► every operator recorded, nothing computed (:mod:`graphpar.runtime.deferred`) ──► a weight is given away once it is finished
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpar.runtime.deferred import Recorder
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import no_weights


def model_of(program: Manifest) -> Callable[[], nn.Module]:
    """Return a function that builds the model of the file that the program was compiled from.

    Raises:
        RuntimeProgramError: the program doesn't know it.
    """
    if program.model_file is None:
        raise RuntimeProgramError(
            "the program doesn't know the file of its model; name a function that builds it, initialise(build), or load weights"
        )
    path = program.folder / program.model_file
    if program.model_file.endswith(".py") and not path.is_file():
        raise RuntimeProgramError(no_weights(program))
    try:
        module = _imported(path) if path.is_file() else importlib.import_module(program.model_file)
        model = module.model
    except Exception as error:
        raise RuntimeProgramError(
            f"there are no weights to load, and the model file {program.model_file} can't be imported to make them: "
            f"{type(error).__name__}: {error}"
        ) from error
    return lambda: model if isinstance(model, nn.Module) else model()


def _imported(path: Path) -> ModuleType:
    """Import a file under a name of its own; modules beside it can be imported by it."""
    name = f"_graphpar_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their class's module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _recorded(build: Callable[[], nn.Module], seed: int) -> tuple[Recorder, dict[str, Tensor]]:
    """Build the model without values; returns the operators that make them, and its parameters and buffers by name."""
    recorder = Recorder(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
    with recorder.building(seed):
        model = build()
        while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        return recorder, model.state_dict(keep_vars=True)


@contextmanager
def _seeded_by_itself(again: Callable[[], object]) -> Iterator[None]:
    """Check that what runs inside seeds the generators of Python and NumPy that it draws from: their states are its own then.

    Args:
        again: runs it once more.

    Raises:
        RuntimeProgramError: it does not, so each rank would draw other numbers.
    """
    kept = _other_generators()
    try:
        yield
        found = _other_generators()
        used = [name for name, (state, _) in found.items() if state != kept[name][0]]
        if not used:
            return
        random.seed(repr(kept["Python's random"][0]))
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(random.getrandbits(32))
        again()
        for name, (state, _) in _other_generators().items():
            if name in used and state != found[name][0]:
                raise RuntimeProgramError(
                    f"the code that builds the model draws from {name}, which no seed of this program sets, so ranks would have other "
                    "weights; draw from torch, or seed it there"
                )
    finally:
        for _, restore in kept.values():
            restore()


def _other_generators() -> dict[str, tuple[object, Callable[[], None]]]:
    """The states of Python's and NumPy's generators, and functions that go back to them."""
    state = random.getstate()
    found: dict[str, tuple[object, Callable[[], None]]] = {"Python's random": (state, lambda: random.setstate(state))}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = held = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest), lambda: numpy.random.set_state(held)
    return found


def initial_values(build: Callable[[], nn.Module], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers that ``build`` gives a model after ``torch.manual_seed(seed)``, by name.

    Each is yielded whole, once, in the order in which they are finished; only a few are in memory at the same time. The
    state of torch's generator is afterwards what it was.

    Raises:
        RuntimeProgramError: what ``build`` does depends on values of random numbers, or draws them from generators of Python or
            NumPy that it does not seed, or it returns no module.
    """
    kept = torch.get_rng_state()
    try:
        with _seeded_by_itself(lambda: _recorded(build, seed)):
            recorder, state = _recorded(build, seed)
        if (empty := next((name for name, tensor in state.items() if tensor.is_meta), None)) is not None:
            raise RuntimeProgramError(f"the model is built without values: {empty} is on the device meta")
        yield from recorder.run(state)
    finally:
        torch.set_rng_state(kept)
