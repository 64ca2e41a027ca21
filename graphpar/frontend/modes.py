"""The base of the modes that watch calls of torch's functions while a model is traced."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


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


def written_by(function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes in place, by the function's name and ``out``."""
    name = getattr(function, "__name__", "")
    writes = (
        name == "__setitem__"
        or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
        or (name.endswith("_") and not name.endswith("__"))
    )
    written = [args[0]] if writes and args and isinstance(args[0], Tensor) else []
    return written + [leaf for leaf in tree_leaves(options.get("out")) if isinstance(leaf, Tensor)]
