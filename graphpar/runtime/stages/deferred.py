"""Build a model without values, and compute those of few tensors: every operator is recorded, and run later for what depends on it.

    with recorder.building(): model = build()     ──► parameters and buffers without memory, and what made them
    recorder.run({name: tensor}) ─in the same order, for real─► each tensor as soon as its last operator has run

Numbers that nothing wanted is made of (a layer's own initialisation before the model's, weights of other stages) are skipped where it is
known how many there are, see :mod:`~graphpar.runtime.stages.skipped_draws`; elsewhere they are drawn again, and not kept. So the values are
those of ``torch.manual_seed(seed); build()``, and memory is that of a few tensors. Files are read for real, mapped to memory where they can
be.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.fake_build import (
    FromMemory,
    converted_in_place,
    copies,
    fakes_in,
    loaded_for_real,
    not_saved,
)
from graphpar.runtime.stages.skipped_draws import skip, words

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
_DRAW_BY_VALUE = frozenset(
    f"aten::{name}"
    for name in (
        "binomial", "multinomial", "poisson", "rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional",
        "_sample_dirichlet", "_standard_gamma",
    )
)  # fmt: skip
"""Operators that draw as many numbers as the values that they take say; all others draw by shape, layout and dtype."""
_OVERWRITING_DRAWS = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
)
"""Operators that draw a tensor in its place; others change what it has."""
_FILLS = 0x00, 0x40
"""Bytes for such memory: what differs between the two depends on it. Repeated, the second is a usual number in each dtype."""


def _identity(generator: torch.Generator) -> int:
    """What all objects of one generator share: operators get one of their own."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class _Place:
    """A tensor without values as it was when an operator took it: later operators may transpose it in place."""

    memory: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _memory_place(value: Any) -> Any:
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
        default_dtype: torch's, when it was called.
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
    default_dtype: torch.dtype = torch.float32

    @property
    def draws_by_value(self) -> bool:
        """Whether it must have its values to draw as many numbers."""
        return self._name in _DRAW_BY_VALUE

    @property
    def in_place(self) -> bool:
        """Whether it changes memory that was there."""
        return self.writes != self.makes

    @property
    def unwritten(self) -> bool:
        """Whether it gives memory that nothing has written."""
        return self._name in _UNWRITTEN

    @property
    def _name(self) -> str:
        schema = getattr(self.operator, "_schema", None)
        return "" if schema is None else str(schema.name)


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
        self._seeded: dict[int, int] = {}  # by mark, the seed that a generator has

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
                    FromMemory(self.values),
                    loaded_for_real(),
                    not_saved(),
                    self._whole_functions(),
                ):
                    stack.enter_context(each)  # type: ignore[arg-type]
                for change in (copies(), converted_in_place(self.mode), self._true_seeds()):
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
        given = {_storage(fake) for fake in fakes_in((args, kwargs))}
        places = tree_map(_memory_place, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._computed(func, args, kwargs)
        if any(isinstance(size, torch.SymInt) for fake in fakes_in(result) for size in fake.shape):
            return self._computed(func, args, kwargs)
        given_by_name = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        to_write = {
            each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
        }
        written = [value for name, value in given_by_name.items() if name in to_write]
        taken = [value for name, value in given_by_name.items() if name not in to_write]
        changed = {_storage(fake) for fake in fakes_in(written)}
        made = {_storage(fake) for fake in fakes_in(result)} - given
        if not changed and not made:
            return result  # a view
        draws = torch.Tag.nondeterministic_seeded in func.tags
        overwrites = func in _OVERWRITE or func._schema.name in _OVERWRITING_DRAWS
        whole = {_storage(fake) for fake in fakes_in(written) if overwrites and _covers_its_memory(fake)}
        whole -= {_storage(fake) for fake in fakes_in(taken)}
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
            self._record(_memory_copy, (alias,), {}, fake, (frozenset(), own, own), False)
        return fake

    def _fake(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Make a tensor without values of one that has them, and an alias of that; those of one memory share theirs."""
        with _disable_current_modes():
            alias = value.detach().requires_grad_(value.requires_grad)  # torch swaps no tensor that the mode remembers
            return self.mode.fake_tensor_converter.from_real_tensor(self.mode, alias), alias

    def _record(
        self, func: Any, args: Any, kwargs: Any, result: Any, memory: tuple[frozenset[int], ...], draws: bool
    ) -> None:
        self._alive += [fake.untyped_storage() for fake in fakes_in(result)]
        made = tuple(_storage(leaf) if fakes_in(leaf) else None for leaf in tree_leaves(result))
        reads, writes, makes = memory
        call = _Call(func, args, kwargs, made, reads, writes, makes, default_dtype=torch.get_default_dtype())
        if draws:
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
            call.generator = generator = next(given, torch.default_generator)
            own = _identity(generator) != _identity(torch.default_generator)
            if own and _identity(generator) not in self._used:
                self._used[_identity(generator)] = generator, generator.get_state()
                mark = next(self._seeds)
                self._states[mark] = generator.get_state()
                generator.manual_seed(mark)
            call.before = generator.initial_seed()
            call.after = next(self._seeds)
            self._seeded[call.after] = self._seeded.get(call.before, call.before)
            generator.manual_seed(call.after)
        self.calls.append(call)

    @contextmanager
    def _true_seeds(self) -> Iterator[None]:
        """Let ``torch.initial_seed`` return the seed that the generator would have."""
        original = torch.initial_seed

        def initial_seed() -> int:
            found = original()
            return self._seeded.get(found, found)

        torch.initial_seed = torch.random.initial_seed = initial_seed
        try:
            yield
        finally:
            torch.initial_seed = torch.random.initial_seed = original

    @contextmanager
    def _whole_functions(self) -> Iterator[None]:
        """Keep calls of torch's initialisers that draw again depending on what they drew as one call each."""
        original = nn.init._no_grad_trunc_normal_

        def trunc_normal_(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            fake = self.without_values(tensor)
            if not fakes_in(fake) or fake.is_meta:
                return original(tensor, mean, std, a, b, generator=generator)
            own = frozenset({_storage(fake)})
            makes = own if _covers_its_memory(fake) else frozenset[int]()
            drawn = {"generator": generator}
            self._record(original, (_memory_place(fake), mean, std, a, b), drawn, fake, (own - makes, own, makes), True)
            return tensor

        nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = original

    def values(self, tree: Any) -> Any:
        """Return ``tree`` with values in the place of tensors without.

        Raises:
            RuntimeProgramError: they are not known.
        """
        generators = [torch.default_generator, *(generator for generator, _ in self._used.values())]
        marked = [generator.get_state() for generator in generators]
        with _disable_current_modes():
            fakes = {str(id(fake)): fake for fake in fakes_in(tree)}
            real = {name: value.clone() for name, value in self._run(fakes)}
        for generator, state in zip(generators, marked):
            generator.set_state(state)
        return tree_map(lambda leaf: real.get(str(id(leaf)), leaf), tree)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call what the model's code looks at the values or the size of, such as an element of a table of rates."""
        args, kwargs = self.values((args, kwargs))
        with _disable_current_modes():
            result = func(*args, **kwargs)
        return tree_map(self.without_values, result)

    def run(self, requested: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``requested`` tensors with their values, each whole, as soon as it has its last.

        Raises:
            RuntimeProgramError: one depends on a tensor that comes from elsewhere.
        """
        fakes = {name: self._standing_for(tensor) for name, tensor in requested.items()}
        yield from ((name, requested[name].detach()) for name, fake in fakes.items() if not fakes_in(fake))
        yield from self._run({name: fake for name, fake in fakes.items() if fakes_in(fake)})

    def certain(self, requested: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """Return values of the ``requested`` tensors, names of those that depend on memory which nothing has written, and of those drawn.

        Raises:
            RuntimeProgramError: one depends on a tensor that comes from elsewhere.
        """
        fakes = {name: self._standing_for(tensor) for name, tensor in requested.items()}
        values = {name: tensor.detach().clone() for name, tensor in requested.items() if not fakes_in(fakes[name])}
        fakes = {name: fake for name, fake in fakes.items() if fakes_in(fake)}
        first, second = ({name: value.clone() for name, value in self._run(fakes, fill)} for fill in _FILLS)
        unwritten = [name for name, value in first.items() if not _same_bytes(value, second[name])]
        return values | first, unwritten, self.drawn(fakes)

    def drawn(self, requested: Mapping[str, Tensor]) -> list[str]:
        """Return the names of those of the ``requested`` tensors that depend on random numbers, in the order of their last writes."""
        random: set[int] = set()
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            if call.generator is not None or call.reads & random:
                random |= call.writes
            else:
                random -= call.makes
            last.update(dict.fromkeys(call.writes, index))
        memory = {name: _storage(self._standing_for(tensor)) for name, tensor in requested.items()}
        return sorted((name for name in requested if memory[name] in random), key=lambda name: last[memory[name]])

    def _standing_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor with values as the one without that stands for it, if operators of the record would have written it."""
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return tensor
        fake, _ = self._fake(tensor)
        memory = _storage(fake)
        return (
            fake if any(memory in call.writes and call.operator is not _memory_copy for call in self.calls) else tensor
        )

    def _needed(self, requested: Mapping[str, Tensor]) -> list[tuple[_Call, bool]]:
        """Return the calls that ``requested`` depend on, in order; False for those that only draw before others of these do.

        Of these, whatever their number of draws depends on is needed too.
        """
        needed = {_storage(tensor) for tensor in requested.values()}
        marks: set[int] = set()
        found = []
        for call in reversed(self.calls):
            draws_first = call.generator is not None and call.after in marks
            kept = bool(call.writes & needed) or (draws_first and call.draws_by_value)
            if kept:
                needed = needed - call.makes | call.reads
            elif not draws_first:
                continue
            found.append((call, kept))
            if call.generator is not None:
                marks.add(call.before)
        return found[::-1]

    def _run(self, requested: Mapping[str, Tensor], fill: int | None = None) -> Iterator[tuple[str, Tensor]]:
        calls = self._needed(requested)
        last = {key: index for index, (call, kept) in enumerate(calls) if kept for key in call.reads | call.writes}
        ending: dict[int, list[int]] = {}
        for key, index in last.items():
            ending.setdefault(index, []).append(key)
        names: dict[int, list[str]] = {}
        for name, tensor in requested.items():
            names.setdefault(_storage(tensor), []).append(name)
        memory = _Memory(_restored(calls), dict(self._states), fill)
        for index, (call, kept) in enumerate(calls):
            try:
                memory.run(call, kept)
            except RuntimeError as error:
                raise RuntimeProgramError(f"{call.operator} can't be run again: {error}") from error
            for key in ending.get(index, ()):
                for name in names.pop(key, ()):
                    yield name, memory.tensor(_memory_place(requested[name]))
                memory.real.pop(key, None)
        if names:
            raise _unknown(next(iter(names.values()))[0])


def _restored(calls: Sequence[tuple[_Call, bool]]) -> set[int]:
    """Return the marks of states to which a generator goes back."""
    now: dict[int, int] = {}
    found = set()
    for call, _ in calls:
        if call.generator is not None:
            if now.get(_identity(call.generator)) != call.before:
                found.add(call.before)
            now[_identity(call.generator)] = call.after
    return found


def _unknown(what: str) -> RuntimeProgramError:
    return RuntimeProgramError(f"{what} has no values: it is not made by the code that builds the model")


def _covers_its_memory(fake: Tensor) -> bool:
    return fake.is_contiguous() and fake.numel() * fake.element_size() == fake.untyped_storage().nbytes()


def _memory_copy(value: Tensor) -> Tensor:
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
    skipped: Counter[int] = field(default_factory=Counter)  # how many words each generator is yet to leave out

    def tensor(self, place: Any) -> Any:
        """Return the tensor with values that belongs at ``place``; memory that nobody needs is made up, in the same layout."""
        if not isinstance(place, _Place):
            return place
        if place.memory not in self.real:
            end = 0 if 0 in place.shape else 1 + sum((n - 1) * by for n, by in zip(place.shape, place.stride))
            return torch.zeros(end, dtype=place.dtype, device=place.device).as_strided(place.shape, place.stride)
        empty = torch.empty(0, dtype=place.dtype, device=place.device)
        return empty.set_(self.real[place.memory], place.offset, place.shape, place.stride)

    def run(self, call: _Call, kept: bool) -> None:
        """Compute an operator, and keep what it computes unless only its draws count."""
        generator = call.generator
        if kept and not call.reads <= set(self.real):
            raise _unknown(f"a tensor that {call.operator} takes")
        if generator is not None and self.seeds.get(_identity(generator)) != call.before:
            if call.before in self.states:
                generator.set_state(self.states[call.before])
            else:
                generator.manual_seed(call.before)
            del self.skipped[_identity(generator)]
        if generator is not None and not kept and (count := _words(call)) is not None:
            self.skipped[_identity(generator)] += count
            self._drawn(call, generator)
            return
        if generator is not None:
            skip(generator, self.skipped.pop(_identity(generator), 0))
        args, kwargs = tree_map(self.tensor, (call.args, dict(call.kwargs)))
        written = args[0].untyped_storage().nbytes() if call.unwritten and args and isinstance(args[0], Tensor) else 0
        with _default_dtype(call.default_dtype):
            result = call.operator(*args, **kwargs)
        if generator is not None:
            self._drawn(call, generator)
        if call.unwritten and self.fill is not None:
            memory = result.untyped_storage()
            torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)[
                written if call.in_place else 0 :
            ].fill_(self.fill)
        for key, value in zip(call.results, tree_leaves(result)):
            if kept and key in call.makes:
                self.real.setdefault(key, value.untyped_storage())

    def _drawn(self, call: _Call, generator: torch.Generator) -> None:
        self.seeds[_identity(generator)] = call.after
        if call.after in self.restored:
            skip(generator, self.skipped.pop(_identity(generator), 0))
            self.states[call.after] = generator.get_state()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _words(call: _Call) -> int | None:
    """Return how many words a call draws that is not to be computed; None where it must be, to know."""
    first = call.args[0] if call.args else None
    if not isinstance(first, _Place):
        made = call.kwargs.get("dtype") or call.default_dtype
        plain = torch.device(call.kwargs.get("device") or "cpu").type == "cpu"
        return words(call.operator, first, made) if plain and isinstance(first, list | tuple) else None
    contiguous = torch.empty_strided(first.shape, first.stride, device="meta").is_contiguous()
    return words(call.operator, first.shape, first.dtype) if contiguous and first.device.type == "cpu" else None
