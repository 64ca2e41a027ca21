"""Initial weights without a whole model in memory: what a function that builds the model would have drawn, tensor by tensor.

    build()  ──► every operator recorded, nothing computed ──► which of them each weight depends on
                                  │
                                  └─ in the same order, for real ─► a weight is given away once its last operator has run

Numbers that are drawn and then overwritten (a layer's own initialisation before the model's) are drawn again, since what follows depends
on them, but are not kept. So the values are those of ``torch.manual_seed(seed); build()``, and memory is that of a few tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import no_weights

aten = torch.ops.aten

_OWN_SEEDS = 1 << 61
"""Seeds from here on mark, while operators are recorded, how often a generator was used."""


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fakes(values: object) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor)]


@dataclass(frozen=True)
class _Place:
    """A tensor without values as it was when an operator took it: later operators may transpose it in place."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _place(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return _Place(_storage(value), value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))


@dataclass
class _Call:
    """An operator, with places for its tensors.

    Attributes:
        reads, writes: the memory that it depends on, and that it changes or makes.
        makes: the memory of ``writes`` whose earlier values don't matter.
        generator: that it draws from; None where it draws nothing.
        before, after: the generator's seed when it was called and after.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]  # the memory of each leaf
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    generator: torch.Generator | None = None
    before: int = 0
    after: int = 0


class _Recorder(TorchDispatchMode):
    """Keeps every operator that computes something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._alive: list[Any] = []  # memory, which is known by its address
        self._seeds = itertools.count(_OWN_SEEDS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.item.default, aten._local_scalar_dense.default) and isinstance(args[0], FakeTensor):
            return self._value(args[0])
        given = {_storage(fake) for fake in _fakes((args, kwargs))}
        places = tree_map(_place, (args, kwargs))
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [
            kwargs[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs
        ]
        changed = {_storage(fake) for fake in _fakes(written)}
        made = {_storage(fake) for fake in _fakes(result)} - given
        if not changed and not made:
            return result  # a view
        draws = torch.Tag.nondeterministic_seeded in func.tags
        whole = {_storage(fake) for fake in _fakes(written) if draws and _covers_its_memory(fake)}
        memory = frozenset(given - whole), frozenset(changed | made), frozenset(whole | made)
        self._record(func, places[0], places[1], result, memory, draws)
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, memory: tuple[frozenset[int], ...], draws: bool
    ) -> None:
        self._alive += [fake.untyped_storage() for fake in _fakes(result)]
        made = tuple(_storage(leaf) if isinstance(leaf, FakeTensor) else None for leaf in tree_leaves(result))
        reads, writes, makes = memory
        call = _Call(func, args, kwargs, made, reads, writes, makes)
        if draws:
            call.generator = kwargs.get("generator") or torch.default_generator
            call.before = call.generator.initial_seed()
            call.after = next(self._seeds)
            call.generator.manual_seed(call.after)
        self.calls.append(call)

    @contextmanager
    def whole_functions(self) -> Iterator[None]:
        """Keep calls of torch's initialisers that draw again depending on what they drew as one call each."""
        original = nn.init._no_grad_trunc_normal_

        def trunc_normal_(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            if not _fakes(tensor) or tensor.is_meta:
                return original(tensor, mean, std, a, b, generator=generator)
            own = frozenset(_storage(fake) for fake in _fakes(tensor))
            makes = own if _covers_its_memory(tensor) else frozenset[int]()
            drawn = {"generator": generator}
            self._record(original, (_place(tensor), mean, std, a, b), drawn, tensor, (own - makes, own, makes), True)
            return tensor

        nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = original

    def _value(self, scalar: FakeTensor) -> Any:
        """The value of a tensor that the model's code looks at, such as of a table of rates."""
        with _disable_current_modes():
            ((_, real),) = _run(self.calls, {"": scalar}, draws=False)
            return real.item()


@contextmanager
def _conversions() -> Iterator[None]:
    """Let ``model.to(dtype)`` give modules other parameters: torch changes them in place, which those without values can't be."""
    original = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, ...]] = {}  # tied ones stay tied

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    value = fn(parameter)
                if value is not parameter:
                    new = nn.Parameter(value, parameter.requires_grad)
                    kept = made.setdefault((id(fn), id(parameter)), (new, fn, parameter))
                    self._parameters[key] = kept[0]
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _covers_its_memory(fake: Tensor) -> bool:
    return fake.is_contiguous() and fake.numel() * fake.element_size() == fake.untyped_storage().nbytes()


@dataclass
class _Memory:
    """Real memory in place of that of tensors without values, and the generators' states."""

    real: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)

    def tensor(self, place: Any) -> Any:
        """Return the tensor with values that belongs at ``place``; memory that nobody needs is made up."""
        if not isinstance(place, _Place):
            return place
        if place.memory not in self.real:
            return torch.zeros(place.shape, dtype=place.dtype)
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(self.real[place.memory], place.offset, place.shape, place.stride)

    def run(self, call: _Call, restored: set[int]) -> None:
        """Compute an operator; ``restored`` are marks of states to which a later one goes back."""
        generator = call.generator
        if generator is not None and self.seeds.get(id(generator)) != call.before:
            if call.before in self.states:
                generator.set_state(self.states[call.before])
            else:
                generator.manual_seed(call.before)
        args, kwargs = tree_map(self.tensor, (call.args, dict(call.kwargs)))
        result = call.operator(*args, **kwargs)
        if generator is not None:
            self.seeds[id(generator)] = call.after
            if call.after in restored:
                self.states[call.after] = generator.get_state()
        for key, value in zip(call.results, tree_leaves(result)):
            if key in call.makes:
                self.real.setdefault(key, value.untyped_storage())


def _run(calls: list[_Call], wanted: Mapping[str, Tensor], *, draws: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Compute the ``wanted`` tensors, and yield each as soon as it has its last value.

    Raises:
        RuntimeProgramError: without ``draws``, if one depends on random numbers.
    """
    needed = {_storage(tensor) for tensor in wanted.values()}
    live: list[bool] = []
    for call in reversed(calls):
        live.append(bool(call.writes & needed))
        if live[-1]:
            needed = needed - call.makes | call.reads
    live.reverse()
    last = {key: index for index, call in enumerate(calls) if live[index] for key in call.reads | call.writes}
    ending: dict[int, list[int]] = {}
    for key, index in last.items():
        ending.setdefault(index, []).append(key)
    names: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        names.setdefault(_storage(tensor), []).append(name)
    restored = {call.before for call in calls if call.generator is not None}
    memory = _Memory()
    for index, call in enumerate(calls):
        if live[index] and call.generator is not None and not draws:
            raise RuntimeProgramError("the code that builds the model looks at values that are drawn at random")
        if live[index]:
            memory.run(call, restored)
        elif call.generator is not None and draws:
            unused = _Memory(states=memory.states, seeds=memory.seeds)  # of numbers that nobody keeps
            unused.run(call, restored)
        for key in ending.get(index, ()):
            for name in names.get(key, ()):
                yield name, memory.tensor(_place(wanted[name]))
            memory.real.pop(key, None)


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


def _recorded(build: Callable[[], nn.Module], seed: int) -> tuple[_Recorder, dict[str, Tensor]]:
    """Build the model without values; returns the operators that make them, and its parameters and buffers by name."""
    torch.default_generator.manual_seed(seed)
    recorder = _Recorder()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder, recorder.whole_functions(), _conversions():
            model = build()
            while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
                model = model.module
            return recorder, model.state_dict(keep_vars=True)
    except DataDependentOutputException as error:
        raise RuntimeProgramError(
            f"the code that builds the model looks at the values of its weights ({error.func}), which are not computed yet"
        ) from error


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
        for name, tensor in state.items():
            if not isinstance(tensor, FakeTensor) and not isinstance(tensor.data, FakeTensor):
                yield name, tensor.detach()
        yield from _run(
            recorder.calls, {name: tensor for name, tensor in state.items() if isinstance(tensor, FakeTensor)}
        )
    finally:
        torch.set_rng_state(kept)
