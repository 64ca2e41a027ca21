"""Make the eager model compute what the emitted program does on purpose: dropout masks by example, statistics by microbatch.

Both are calls of torch's functions in the order of execution, so a torch function mode replaces them without changing the model. The
mode also notes which dtypes the model computes in, and in which order its parameters are used.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.runtime.torch_versions import CHECKPOINTS
from graphpar.text import plural

_plain_attention, _plain_dropout = F.scaled_dot_product_attention, F.dropout
_DROPS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.dropout, torch.dropout), random_streams.dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), random_streams.channel_dropout),
}
_ALONE: dict[Any, int] = {F.dropout1d: 2, F.dropout3d: 4}
"""How many dims one example has, of the functions that take one alone."""


class Substituted(TorchFunctionMode):
    """Replaces dropout and BatchNorm calls of the eager model, in execution order.

    Attributes:
        layouts: of each dropout, the dim that has the batch, and how many rows are before and behind each example in it.
        attention_drops: whether attention has dropout; where kernels draw it, it is off on both sides.
        dtypes: of the differentiable values that the model computes; under autocast not those of its parameters.
        used: the ids of parameters, in the order of their first use.
    """

    def __init__(
        self,
        keys: Tensor | None,
        layouts: Sequence[Sequence[int]],
        microbatches: int,
        replicas: int,
        attention_drops: bool = True,
    ) -> None:
        super().__init__()
        self.keys, self.layouts, self.microbatches, self.replicas = keys, layouts, microbatches, replicas
        self.attention_drops = attention_drops
        self.calls = 0
        self.dtypes: set[torch.dtype] = set()
        self.used: dict[int, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") == "__get__"  # .shape does not use a parameter
        for argument in () if reads else (*args, *(kwargs or {}).values()):
            for value in argument if isinstance(argument, list | tuple) else (argument,):
                if type(value) is nn.Parameter:
                    self.used.setdefault(id(value))
        result = self._called(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            self.dtypes.add(result.dtype)
        return result

    @contextlib.contextmanager
    def again(self, calls: int) -> Iterator[None]:
        """Run inside what ran before, when ``calls`` dropouts had been drawn."""
        before, self.calls = self.calls, calls
        try:
            with self:
                yield
        finally:
            self.calls = before

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.keys is not None:
            if func in _DROPS:
                return self._dropout(*args, **kwargs, drop=_DROPS[func], plain=func)
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            if func is F.multi_head_attention_forward:
                with self._inside():
                    return func(*args, **kwargs)
        if func is F.batch_norm and self.microbatches > 1:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Replace functions inside another function of torch, where this mode does not see the calls."""
        before = F.dropout, F.scaled_dot_product_attention
        F.dropout, F.scaled_dot_product_attention = self._dropout, self._attention
        try:
            yield
        finally:
            F.dropout, F.scaled_dot_product_attention = before

    def _stream(self) -> tuple[Tensor, int]:
        """Return the keys of the next dropout, one a row, and the dim that has the rows."""
        assert self.keys is not None
        if self.calls == len(self.layouts):
            raise GraphparError(
                f"The model draws dropout more than {plural(self.calls, 'time')} a step, the program does not: compile it again."
            )
        dim, outer, inner = self.layouts[self.calls]
        keys = random_streams.stream(self.keys, self.calls)
        self.calls += 1
        for count, at, step in ((inner, -1, 1), (outer, 0, inner)):
            steps = torch.arange(1, count + 1) * (step * random_streams.BETWEEN_ROWS)
            keys = (keys.unsqueeze(at) + steps.unsqueeze(-1 - at)).flatten() if count > 1 else keys
        return keys, dim

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        drop: Callable[..., Tensor] = random_streams.dropout,
        plain: Callable[..., Tensor] = _plain_dropout,
    ) -> Tensor:
        if not training or p in (0.0, 1.0):
            return plain(input, p, training)
        if input.ndim == _ALONE.get(plain):  # without a batch, as torch takes it
            return self._dropout(input.unsqueeze(0), p, drop=drop).squeeze(0)
        keys, dim = self._stream()
        result = drop(input, p, keys, dim)
        leaf = input.is_leaf and input.requires_grad
        return input.copy_(result) if inplace and not leaf else result

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return _plain_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        keys, dim = self._stream()  # counted in any case: each operator has its number
        if not self.attention_drops:
            return _plain_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return random_streams.dropout_attention(
            query, key, value, keys, attn_mask, dropout_p, is_causal, scale, enable_gqa, batch_dim=dim
        )

    def _batch_norm(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        training = kwargs.get("training", args[4] if len(args) > 4 else False)
        if not training:
            return F.batch_norm(input, *args, **kwargs)
        rows = input.unflatten(0, (self.replicas, self.microbatches, -1))  # a microbatch has rows of all replicas
        parts = [F.batch_norm(part.flatten(0, 1), *args, **kwargs) for part in rows.unbind(1)]
        return torch.stack([part.unflatten(0, (self.replicas, -1)) for part in parts], 1).flatten(0, 2)


@contextlib.contextmanager
def own_regions(substituted: Substituted) -> Iterator[None]:
    """Let the model's regions of ``torch.utils.checkpoint`` that begin inside draw the same masks when the backward runs them again."""
    checkpoint: Any = torch.utils.checkpoint
    generator, apply = getattr(checkpoint, CHECKPOINTS), checkpoint.CheckpointFunction.apply

    def drawn_again(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        calls = substituted.calls

        def again(*args: Any, **kwargs: Any) -> Any:
            with substituted.again(calls):
                return function(*args, **kwargs)

        return generator(again, *args, **kwargs)  # type: ignore[no-any-return]

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        calls, runs = substituted.calls, itertools.count()

        def each(*args: Any) -> Any:
            with substituted.again(calls) if next(runs) else contextlib.nullcontext():
                return function(*args)

        return apply(each, preserve, *args)

    setattr(checkpoint, CHECKPOINTS, drawn_again)
    checkpoint.CheckpointFunction.apply = staticmethod(reentrant)
    try:
        yield
    finally:
        setattr(checkpoint, CHECKPOINTS, generator)
        del checkpoint.CheckpointFunction.apply
