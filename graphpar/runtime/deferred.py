"""Build a model without values, and compute those of few tensors: every operator is recorded, and run later for what depends on it.

    with recorder.building(): model = build()     ──► parameters and buffers without memory, and what made them
    recorder.run({name: tensor}) ─in the same order, for real─► each tensor as soon as its last operator has run

Numbers that are drawn and then overwritten (a layer's own initialisation before the model's) are drawn again where what is wanted depends
on them, but are not kept. So the values are those of ``torch.manual_seed(seed); build()``, and memory is that of a few tensors. Files are
read for real, mapped to memory where they can be.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.runtime.errors import RuntimeProgramError

aten = torch.ops.aten

_OWN_SEEDS = 1 << 61
"""Seeds from here on mark, while operators are recorded, how often a generator was used."""
_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_",
    )
)  # fmt: skip
"""Operators that give memory which nothing has written."""
_OVERWRITE = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default})
"""Operators besides those that draw after which nothing is left of what they write to."""
_FILLS = 0x00, 0x40
"""Bytes for such memory: what differs between the two depends on it. Repeated, the second is a usual number in each dtype."""
_FROM_MEMORY = torch.asarray, torch.frombuffer, torch.from_file
"""Functions that make a tensor of memory which has values: of storages, files and buffers."""


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _fakes(values: object) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor) and leaf.layout is torch.strided]


@dataclass(frozen=True)
class _Place:
    """A tensor without values as it was when an operator took it: later operators may transpose it in place."""

    memory: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _place(value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
    return _Place(_storage(value), value.dtype, value.device, shape, stride, offset)


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

    @property
    def in_place(self) -> bool:
        """Whether it changes memory that was there."""
        return self.writes != self.makes

    @property
    def unwritten(self) -> bool:
        """Whether it gives memory that nothing has written."""
        schema = getattr(self.operator, "_schema", None)
        return schema is not None and schema.name in _UNWRITTEN


class Recorder(TorchDispatchMode):
    """Keeps every operator that computes something, in order."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.calls: list[_Call] = []
        self._alive: list[Any] = []  # memory, which is known by its address
        self._given: set[int] = set()  # memory of tensors that have values
        self._seeds = itertools.count(_OWN_SEEDS)
        self._states: dict[int, Tensor] = {}  # of generators when they were first used, by the mark that they got then
        self._used: dict[int, tuple[torch.Generator, Tensor]] = {}

    @contextmanager
    def building(self, seed: int) -> Iterator[None]:
        """Record what the block does, as after ``torch.manual_seed(seed)``; generators are afterwards what they were."""
        kept = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            with ExitStack() as stack:
                for each in (
                    self.mode,
                    self,
                    _FromMemory(self),
                    _loaded_for_real(),
                    _not_saved(),
                    self._whole_functions(),
                ):
                    stack.enter_context(each)  # type: ignore[arg-type]
                for change in (_copies(), _converted_in_place(self.mode)):
                    stack.enter_context(change)
                yield
        finally:
            for generator, state in self._used.values():
                generator.set_state(state)
            torch.set_rng_state(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lifts = func in (aten.lift_fresh.default, aten.lift.default)  # torch.tensor(values)
        if not lifts:
            args, kwargs = tree_map(self.without_values, (args, kwargs))
        if func in (aten.item.default, aten._local_scalar_dense.default) and isinstance(args[0], FakeTensor):
            return self._computed(func, args, kwargs)
        given = {_storage(fake) for fake in _fakes((args, kwargs))}
        places = tree_map(_place, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._computed(func, args, kwargs)
        if any(isinstance(size, torch.SymInt) for fake in _fakes(result) for size in fake.shape):
            return self._computed(func, args, kwargs)
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
        overwrites = draws or func in _OVERWRITE
        whole = {_storage(fake) for fake in _fakes(written) if overwrites and _covers_its_memory(fake)}
        whole -= {_storage(fake) for fake in _fakes(args[1:])}
        read = set() if func._schema.name in _UNWRITTEN and not changed else given - whole
        memory = frozenset(read), frozenset(changed | made), frozenset(whole | made)
        self._record(aten.clone.default if lifts else func, places[0], places[1], result, memory, draws)
        return result

    def without_values(self, value: Any) -> Any:
        """Return the tensor without values that stands for ``value``, whose operators are recorded; anything else as it is."""
        if (
            isinstance(value, FakeTensor)
            or type(value) not in (Tensor, nn.Parameter)
            or value.layout is not torch.strided
        ):
            return value
        fake, alias = self._fake(value)
        if (memory := _storage(fake)) not in self._given:
            self._given.add(memory)
            own = frozenset({memory})
            self._record(_copied, (alias,), {}, fake, (frozenset(), own, own), False)
        return fake

    def _fake(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Make a tensor without values of one that has them, and an alias of that; those of one memory share theirs."""
        with _disable_current_modes():
            alias = value.detach().requires_grad_(value.requires_grad)  # torch swaps no tensor that the mode remembers
            return self.mode.fake_tensor_converter.from_real_tensor(self.mode, alias), alias

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, memory: tuple[frozenset[int], ...], draws: bool
    ) -> None:
        self._alive += [fake.untyped_storage() for fake in _fakes(result)]
        made = tuple(_storage(leaf) if _fakes(leaf) else None for leaf in tree_leaves(result))
        reads, writes, makes = memory
        call = _Call(func, args, kwargs, made, reads, writes, makes)
        if draws:
            call.generator = generator = kwargs.get("generator") or torch.default_generator
            if generator is not torch.default_generator and id(generator) not in self._used:
                self._used[id(generator)] = generator, generator.get_state()
                mark = next(self._seeds)
                self._states[mark] = generator.get_state()
                generator.manual_seed(mark)
            call.before = generator.initial_seed()
            call.after = next(self._seeds)
            generator.manual_seed(call.after)
        self.calls.append(call)

    @contextmanager
    def _whole_functions(self) -> Iterator[None]:
        """Keep calls of torch's initialisers that draw again depending on what they drew as one call each."""
        original = nn.init._no_grad_trunc_normal_

        def trunc_normal_(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            fake = self.without_values(tensor)
            if not _fakes(fake) or fake.is_meta:
                return original(tensor, mean, std, a, b, generator=generator)
            own = frozenset({_storage(fake)})
            makes = own if _covers_its_memory(fake) else frozenset[int]()
            drawn = {"generator": generator}
            self._record(original, (_place(fake), mean, std, a, b), drawn, fake, (own - makes, own, makes), True)
            return tensor

        nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = original

    def values(self, tree: Any) -> Any:
        """Return ``tree`` with values in the place of tensors without.

        Raises:
            RuntimeProgramError: they are drawn at random, or not known.
        """
        with _disable_current_modes():
            fakes = {str(id(fake)): fake for fake in _fakes(tree)}
            if any(call.generator is not None for call, _ in self._needed(fakes)):
                raise RuntimeProgramError("the code that builds the model looks at values that are drawn at random")
            real = {name: value.clone() for name, value in self._run(fakes)}
        return tree_map(lambda leaf: real.get(str(id(leaf)), leaf), tree)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call what the model's code looks at the values or the size of, such as an element of a table of rates."""
        args, kwargs = self.values((args, kwargs))
        with _disable_current_modes():
            result = func(*args, **kwargs)
        return tree_map(self.without_values, result)

    def run(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``wanted`` tensors with their values, each whole, as soon as it has its last.

        Raises:
            RuntimeProgramError: one depends on a tensor that comes from elsewhere.
        """
        fakes = {name: self._standing_for(tensor) for name, tensor in wanted.items()}
        yield from ((name, wanted[name].detach()) for name, fake in fakes.items() if not _fakes(fake))
        yield from self._run({name: fake for name, fake in fakes.items() if _fakes(fake)})

    def certain(self, wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """Return values of the ``wanted`` tensors, names of those that depend on memory which nothing has written, and of those drawn.

        Raises:
            RuntimeProgramError: one depends on a tensor that comes from elsewhere.
        """
        fakes = {name: self._standing_for(tensor) for name, tensor in wanted.items()}
        values = {name: tensor.detach().clone() for name, tensor in wanted.items() if not _fakes(fakes[name])}
        fakes = {name: fake for name, fake in fakes.items() if _fakes(fake)}
        first, second = ({name: value.clone() for name, value in self._run(fakes, fill)} for fill in _FILLS)
        unwritten = [name for name, value in first.items() if not _same_bytes(value, second[name])]
        drawn = [name for name, fake in fakes.items() if any(call.generator for call, _ in self._needed({name: fake}))]
        return values | first, unwritten, drawn

    def _standing_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor with values as the one without that stands for it, if operators of the record would have written it."""
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        fake, _ = self._fake(tensor)
        memory = _storage(fake)
        return fake if any(memory in call.writes and call.operator is not _copied for call in self.calls) else tensor

    def _needed(self, wanted: Mapping[str, Tensor]) -> list[tuple[_Call, bool]]:
        """Return the calls that ``wanted`` depend on, in order; False for those that only draw before others of these do."""
        needed = {_storage(tensor) for tensor in wanted.values()}
        marks: set[int] = set()
        found = []
        for call in reversed(self.calls):
            if kept := bool(call.writes & needed):
                needed = needed - call.makes | call.reads
            elif call.generator is None or call.after not in marks:
                continue
            found.append((call, kept))
            if call.generator is not None:
                marks.add(call.before)
        return found[::-1]

    def _run(self, wanted: Mapping[str, Tensor], fill: int | None = None) -> Iterator[tuple[str, Tensor]]:
        calls = self._needed(wanted)
        last = {key: index for index, (call, kept) in enumerate(calls) if kept for key in call.reads | call.writes}
        ending: dict[int, list[int]] = {}
        for key, index in last.items():
            ending.setdefault(index, []).append(key)
        names: dict[int, list[str]] = {}
        for name, tensor in wanted.items():
            names.setdefault(_storage(tensor), []).append(name)
        memory = _Memory({call.before for call, _ in calls if call.generator is not None}, dict(self._states), fill)
        for index, (call, kept) in enumerate(calls):
            try:
                memory.run(call, kept)
            except RuntimeError as error:
                raise RuntimeProgramError(f"{call.operator} can't be run again: {error}") from error
            for key in ending.get(index, ()):
                for name in names.pop(key, ()):
                    yield name, memory.tensor(_place(wanted[name]))
                memory.real.pop(key, None)
        if names:
            raise _unknown(next(iter(names.values()))[0])


def _unknown(what: str) -> RuntimeProgramError:
    return RuntimeProgramError(f"{what} has no values: it is not made by the code that builds the model")


def _covers_its_memory(fake: Tensor) -> bool:
    return fake.is_contiguous() and fake.numel() * fake.element_size() == fake.untyped_storage().nbytes()


def _copied(value: Tensor) -> Tensor:
    """Return ``value`` in a copy of its memory."""
    value, memory = value.detach(), value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(  # type: ignore[call-overload, no-any-return]
        memory, value.storage_offset(), value.shape, value.stride()
    )


def _same_bytes(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit, and so with the same NaN."""
    return value.shape == other.shape and torch.equal(
        *(each.contiguous().reshape(-1).view(torch.uint8) for each in (value, other))
    )


@dataclass
class _Memory:
    """Real memory in place of that of tensors without values, and the generators' states.

    Attributes:
        restored: marks of states to which a later operator goes back.
        fill: the byte in memory that nothing has written; None for whatever is there.
    """

    restored: set[int]
    states: dict[int, Tensor]
    fill: int | None = None
    real: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)

    def tensor(self, place: Any) -> Any:
        """Return the tensor with values that belongs at ``place``; memory that nobody needs is made up."""
        if not isinstance(place, _Place):
            return place
        if place.memory not in self.real:
            return torch.zeros(place.shape, dtype=place.dtype, device=place.device)
        empty = torch.empty(0, dtype=place.dtype, device=place.device)
        return empty.set_(self.real[place.memory], place.offset, place.shape, place.stride)

    def run(self, call: _Call, kept: bool) -> None:
        """Compute an operator, and keep what it computes unless only its draws count."""
        generator = call.generator
        if kept and not call.reads <= set(self.real):
            raise _unknown(f"a tensor that {call.operator} takes")
        if generator is not None and self.seeds.get(id(generator)) != call.before:
            if call.before in self.states:
                generator.set_state(self.states[call.before])
            else:
                generator.manual_seed(call.before)
        args, kwargs = tree_map(self.tensor, (call.args, dict(call.kwargs)))
        written = args[0].untyped_storage().nbytes() if call.unwritten and args and isinstance(args[0], Tensor) else 0
        result = call.operator(*args, **kwargs)
        if generator is not None:
            self.seeds[id(generator)] = call.after
            if call.after in self.restored:
                self.states[call.after] = generator.get_state()
        if call.unwritten and self.fill is not None:
            memory = result.untyped_storage()
            torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)[
                written if call.in_place else 0 :
            ].fill_(self.fill)
        for key, value in zip(call.results, tree_leaves(result)):
            if kept and key in call.makes:
                self.real.setdefault(key, value.untyped_storage())


# ---- while a model is built ------------------------------------------------------------------------------------


class _FromMemory(TorchFunctionMode):
    """Lets functions that need values have them: those that take memory, and those that give arrays."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.data.__set__ and _fakes(args[1]) and not _fakes(args[0]):  # type: ignore[attr-defined]
            _become(*args)
            return None
        gives = func in (Tensor.numpy, Tensor.__array__)
        if not gives and (func not in _FROM_MEMORY or _fakes((args, kwargs))):
            return func(*args, **kwargs)
        args = self.recorder.values(args)
        with _disable_current_modes():
            return func(*args, **kwargs)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter if ``tensor`` is one, and with a gradient if it has one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _become(tensor: Tensor, value: Tensor) -> None:
    """Let ``tensor``, which has values, be ``value``, which has none, and keep its attributes."""
    made = _like(tensor, value.detach())
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)


@contextmanager
def _loaded_for_real() -> Iterator[None]:
    """Let ``torch.load`` read files, mapped to memory where it can, also where fake tensors would be made."""

    def for_real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and kwargs.get("mmap") is None and zipfile.is_zipfile(f):
            kwargs["mmap"] = True
        return loads(f, *args, **kwargs)

    files: Any = torch.serialization
    loads, inner, legacy = torch.load, files._load, files._legacy_load
    torch.load = files.load = functools.wraps(loads)(load)
    files._load, files._legacy_load = for_real(inner), for_real(legacy)
    try:
        yield
    finally:
        torch.load = files.load = loads
        files._load, files._legacy_load = inner, legacy


@contextmanager
def _not_saved() -> Iterator[None]:
    """Stop ``torch.save`` before it opens a file: fake tensors have no values, and half a file would be left."""

    def refuse(*_: object) -> Any:
        raise RuntimeProgramError("model() calls torch.save, but is built without values here; save outside of it")

    files: Any = torch.serialization
    opens, files._open_zipfile_writer = files._open_zipfile_writer, refuse
    try:
        yield
    finally:
        files._open_zipfile_writer = opens


@contextmanager
def _copies() -> Iterator[None]:
    """Let ``copy.deepcopy`` copy fake tensors, by an operator and in the mode that made them, and without a warning."""

    def copied(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            value = self.detach().clone()
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = (
                nn.Parameter(value, self.requires_grad) if parameter else value.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    FakeTensorMode.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    FakeTensor.__deepcopy__ = copied  # type: ignore[assignment, attr-defined, method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        del FakeTensorMode.__deepcopy__  # type: ignore[attr-defined]
        del FakeTensor.__deepcopy__  # type: ignore[attr-defined]


@contextmanager
def _converted_in_place(fake: FakeTensorMode) -> Iterator[None]:
    """Make ``.to(dtype)`` and the like work on fake parameters: torch swaps these, which it refuses for tensors that the mode remembers."""
    swap = torch.utils.swap_tensors
    remembered = fake.fake_tensor_converter.meta_converter.tensor_memo

    def swapped(first: Tensor, second: Tensor) -> None:
        references = [*weakref.getweakrefs(first), *weakref.getweakrefs(second)]
        keys = [reference.key for reference in references if isinstance(reference, weakref.KeyedRef)]
        del references
        for key in keys:
            remembered.pop(key, None)
        swap(first, second)

    torch.utils.swap_tensors = swapped
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
