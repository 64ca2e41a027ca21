"""What else is changed while a model is built without values: functions of torch that need some, copy, load, save or convert in place."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from graphpar.runtime.errors import RuntimeProgramError

_FROM_MEMORY = torch.asarray, torch.frombuffer, torch.from_file
"""Functions that make a tensor of memory which has values: of storages, files and buffers."""


def fakes_in(values: object) -> list[FakeTensor]:
    """List the tensors without values in nested ``values``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor) and leaf.layout is torch.strided]


class FromMemory(TorchFunctionMode):
    """Lets functions that need values have them: those that take memory, and those that give arrays."""

    def __init__(self, values: Callable[[Any], Any]) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.data.__set__ and fakes_in(args[1]) and not fakes_in(args[0]):  # type: ignore[attr-defined]
            _become(*args)
            return None
        gives = func in (Tensor.numpy, Tensor.__array__)
        if not gives and (func not in _FROM_MEMORY or fakes_in((args, kwargs))):
            return func(*args, **kwargs)
        args = self.values(args)
        with _disable_current_modes():
            return func(*args, **kwargs)


def _become(tensor: Tensor, value: Tensor) -> None:
    """Let ``tensor``, which has values, be ``value``, which has none, and keep its attributes."""
    trained, plain = tensor.requires_grad, value.detach()
    made = nn.Parameter(plain, trained) if isinstance(tensor, nn.Parameter) else plain.requires_grad_(trained)
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)


@contextmanager
def loaded_for_real() -> Iterator[None]:
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
def not_saved() -> Iterator[None]:
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
def copies() -> Iterator[None]:
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
def converted_in_place(fake: FakeTensorMode) -> Iterator[None]:
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
