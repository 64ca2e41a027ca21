"""The base of the modes that watch calls of torch's functions while a model is traced."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """Intercepts every call of a torch function inside a ``with`` block; a subclass answers it in :meth:`call`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.call(func, tuple(args), dict(kwargs or {}))

    @abstractmethod
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **options)``, or another in its place."""
