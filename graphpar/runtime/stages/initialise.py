"""Initial weights without a whole model in memory: what a function that builds the model would have drawn, tensor by tensor.

build()  ──► every operator recorded, nothing computed (:mod:`~graphpar.runtime.stages.deferred`) ──► a weight is given away once it is done
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpar.runtime.checkpoints.weights import no_weights
from graphpar.runtime.distributed import agreed
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.deferred import Recorder


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
    kept = other_generators()
    try:
        yield
        found = other_generators()
        used = [name for name, (state, _) in found.items() if state != kept[name][0]]
        if not used:
            return
        random.seed(repr(kept["Python's random"][0]))
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(random.getrandbits(32))
        again()
        for name, (state, _) in other_generators().items():
            if name in used and state != found[name][0]:
                raise RuntimeProgramError(
                    f"the code that builds the model draws from {name}, which no seed of this program sets, so ranks would have different "
                    "weights; draw from torch, or seed it there"
                )
    finally:
        for _, restore in kept.values():
            restore()


def other_generators() -> dict[str, tuple[object, Callable[[], None]]]:
    """Return the states of Python's and NumPy's generators, and functions that go back to them."""
    state = random.getstate()
    found: dict[str, tuple[object, Callable[[], None]]] = {"Python's random": (state, lambda: random.setstate(state))}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = held = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest), lambda: numpy.random.set_state(held)
    return found


def initial_values(
    build: Callable[[], nn.Module],
    seed: int,
    names: Collection[str] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers that ``build`` gives a model after ``torch.manual_seed(seed)``, by name.

    Each is yielded whole, once, and only a few are in memory at the same time. The state of torch's generator is after each what it was.

    Args:
        names: those that are wanted; by default all.
        group: of ranks that want the same ``names``, each of which draws its share and broadcasts it; a collective call then.
        device: over which they are broadcast.

    Raises:
        RuntimeProgramError: ``build`` draws from generators of Python or NumPy that it does not seed, or it returns no module.
    """
    with agreed(group) if group is not None else nullcontext():
        with _seeded_by_itself(lambda: _recorded(build, seed)):
            recorder, state = _recorded(build, seed)
        if (empty := next((name for name, tensor in state.items() if tensor.is_meta), None)) is not None:
            raise RuntimeProgramError(f"the model is built without values: {empty} is on the device meta")
    wanted = {name: value for name, value in state.items() if names is None or name in names}
    yield from _drawn_apart(recorder.run(wanted) if group is None else _shared(recorder, wanted, group, device))


def _drawn_apart(values: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``values``, which draw from torch's generator, and leave it after each as it was before.

    So nothing is left to restore where whoever takes them stops early, and the garbage collector ends this in the midst of other draws.
    """
    own, ended = torch.get_rng_state(), object()
    while True:
        kept = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            found = next(values, ended)
            own = torch.get_rng_state()
        finally:
            torch.set_rng_state(kept)
        if not isinstance(found, tuple):
            return
        yield found


def _shared(
    recorder: Recorder, wanted: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``wanted`` values, of which each rank of the group draws every so many; where one fails, all go on to the end."""
    drawn, rank, ranks = recorder.drawn(wanted), dist.get_rank(group), dist.get_world_size(group)
    yield from recorder.run({name: value for name, value in wanted.items() if name not in set(drawn)})
    values, ready = recorder.run({name: wanted[name] for name in drawn[rank::ranks]}), dict[str, Tensor]()
    failure: Exception | None = None
    for begin in range(0, len(drawn), ranks):
        names = drawn[begin : begin + ranks]
        try:  # all ranks draw, then each is heard
            while failure is None and rank < len(names) and names[rank] not in ready:
                ready.update([next(values)])
        except Exception as error:
            failure = error
        for source, name in enumerate(names):
            own, like = ready.pop(name, None), wanted[name]
            value = (
                torch.empty(like.shape, dtype=like.dtype, device=device) if own is None else own.to(device).contiguous()
            )
            dist.broadcast(value.view(-1).view(torch.uint8), group=group, group_src=source)
            yield name, value
    if failure is not None:
        raise failure
