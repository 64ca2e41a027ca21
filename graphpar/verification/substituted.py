"""Make the eager model compute what the emitted program does on purpose: random numbers by example, statistics by microbatch.

Both are calls of torch's functions in the order of execution, so a torch function mode replaces them without changing the model. The
mode also notes which dtypes the model computes in, and in which order its parameters are used. Random operators other than dropout
are replaced below it, where those that torch's own functions call (``F.gumbel_softmax``, distributions) are seen, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.runtime.torch_versions import CHECKPOINTS
from graphpar.text import plural

_plain_attention, _plain_dropout = F.scaled_dot_product_attention, F.dropout
_DROPS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.dropout, torch.dropout), random_streams.dropout),
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout), random_streams.channel_dropout),
}
_DECIDES = ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")
"""Functions that say whether something holds for the values of tensors."""
_ALONE: dict[Any, int] = {F.dropout1d: 2, F.dropout3d: 4}
"""How many dims one example has, of the functions that take one alone."""


class Substituted(TorchFunctionMode):
    """Replaces dropout and BatchNorm calls of the eager model, in execution order.

    Attributes:
        layouts: of each random operator, as ``Program.stream_layouts``.
        attention_drops: whether attention has dropout; where kernels draw it, it is off on both sides.
        dtypes: of the differentiable values that the model computes; under autocast not those of its parameters.
        used: the ids of parameters, in the order of their first use.
        decided: what each condition on values of a tensor was.
        evaluates: the model is in evaluation, where no dropout is called.
        linear: what is called in the place of ``F.linear``.
    """

    def __init__(
        self,
        keys: Tensor | None,
        layouts: Sequence[Sequence[int]],
        microbatches: int,
        replicas: int,
        attention_drops: bool = True,
        step_key: Tensor | None = None,
        evaluates: bool = False,
        linear: Callable[..., Tensor] = F.linear,
    ) -> None:
        super().__init__()
        self.step_key, self.evaluates, self.linear = step_key, evaluates, linear
        self._draws: list[contextlib.AbstractContextManager[Any]] = []
        self.keys, self.layouts, self.microbatches, self.replicas = keys, layouts, microbatches, replicas
        self.attention_drops = attention_drops
        self.calls = 0
        self.dtypes: set[torch.dtype] = set()
        self.used: dict[int, None] = {}
        self.decided: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") == "__get__"  # .shape does not use a parameter
        for argument in () if reads else (*args, *(kwargs or {}).values()):
            for value in argument if isinstance(argument, list | tuple) else (argument,):
                if type(value) is nn.Parameter:
                    self.used.setdefault(id(value))
        result = self._called(func, args, kwargs or {})
        if isinstance(result, bool) and getattr(func, "__name__", "") in _DECIDES:
            self.decided.append(result)
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            self.dtypes.add(result.dtype)
        return result

    def __enter__(self) -> Self:
        drawn = any(len(layout) > 3 for layout in self.layouts)
        self._draws.append(_Draws(self) if drawn else contextlib.nullcontext())
        self._draws[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._draws.pop().__exit__(*raised)

    @contextlib.contextmanager
    def again(self, calls: int) -> Iterator[None]:
        """Run inside what ran before, when ``calls`` random operators had drawn."""
        before, self.calls = self.calls, calls
        try:
            with self:
                yield
        finally:
            self.calls = before

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self._inside():
                return func(*args, **kwargs)
        if self.keys is not None:
            if func in _DROPS:
                return self._dropout(*args, **kwargs, drop=_DROPS[func], plain=func)
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        if func is F.batch_norm and self.microbatches > 1:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Replace functions inside another function of torch, where this mode does not see the calls."""
        before = F.dropout, F.scaled_dot_product_attention, F.linear
        if self.keys is not None:
            F.dropout, F.scaled_dot_product_attention = self._dropout, self._attention
        F.linear = self.linear
        try:
            yield
        finally:
            F.dropout, F.scaled_dot_product_attention, F.linear = before

    def stream(self, of_dropout: bool = True) -> tuple[Tensor, int, int]:
        """Return the keys of the next random operator, one a row, the dim that has the rows, and the bits of what it draws."""
        while self.evaluates and self.calls < len(self.layouts) and len(self.layouts[self.calls]) == 3:
            self.calls += 1  # dropout draws nothing there, and keeps its number
        if self.calls == len(self.layouts) or (len(self.layouts[self.calls]) == 3) != of_dropout:
            raise GraphparError(
                f"The model draws {'dropout' if of_dropout else 'random numbers'} where the program does not, after "
                f"{plural(self.calls, 'draw')} of the step: compile it again."
            )
        dim, outer, inner, *digits = self.layouts[self.calls]
        keys = self.step_key if dim < 0 else self.keys
        assert keys is not None
        keys = random_streams.stream(keys, self.calls)
        self.calls += 1
        for count, at, step in ((inner, -1, 1), (outer, 0, inner)):
            steps = torch.arange(1, count + 1) * (step * random_streams.BETWEEN_ROWS)
            keys = (keys.unsqueeze(at) + steps.unsqueeze(-1 - at)).flatten() if count > 1 else keys
        return keys, dim, sum(digits)

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
        keys, dim, _ = self.stream()
        result = drop(input, p, keys, dim) if dim >= 0 else drop(input.unsqueeze(0), p, keys, 0).squeeze(0)
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
        keys, dim, _ = self.stream()  # counted in any case: each operator has its number
        if not self.attention_drops:
            return _plain_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if dim < 0:  # one key for all
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        result = random_streams.dropout_attention(
            query, key, value, keys, attn_mask, dropout_p, is_causal, scale, enable_gqa, batch_dim=max(dim, 0)
        )
        return result.squeeze(0) if dim < 0 else result

    def _batch_norm(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        training = kwargs.get("training", args[4] if len(args) > 4 else False)
        if not training:
            return F.batch_norm(input, *args, **kwargs)
        rows = input.unflatten(0, (self.replicas, self.microbatches, -1))  # a microbatch has rows of all replicas
        # contiguous: on CPUs torch's backward is wrong for one row of channels-last strides, (8, 1, 32, 8) of [1, 8, 4, 4]
        parts = [F.batch_norm(part.flatten(0, 1).contiguous(), *args, **kwargs) for part in rows.unbind(1)]
        return torch.stack([part.unflatten(0, (self.replicas, -1)) for part in parts], 1).flatten(0, 2)


class _Draws(TorchDispatchMode):
    """Lets random operators draw the numbers of the emitted program, where it has any but dropout."""

    def __init__(self, substituted: Substituted) -> None:
        super().__init__()
        self.substituted = substituted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_like")
        if name not in _NUMBERS or self.substituted.keys is None:
            return result
        arguments = func._schema.arguments
        usual = {each.name: each.default_value for each in arguments if each.has_default_value()}
        given = usual | {each.name: value for each, value in zip(arguments, args)} | (kwargs or {})
        keys, dim, digits = self.substituted.stream(of_dropout=False)

        def draw(function: Callable[..., Tensor], *bounds: int, shape: Sequence[int] = result.shape) -> Tensor:
            sizes = [size for place, size in enumerate(shape) if place != dim]
            unrounded = (
                result.dtype == torch.float64 and function is not random_streams.uniform
            )  # as the program in fp64
            options = {"dtype": torch.float64 if unrounded else _OF_DIGITS[digits]} if digits else {}
            return function(keys.to(result.device), sizes, *bounds, None if dim < 0 else dim, **options)

        result.copy_(_NUMBERS[name](draw, given))
        return result


_OF_DIGITS = {8: torch.bfloat16, 11: torch.float16, 24: torch.float32, 53: torch.float64}


def _chosen(draw: Any, given: dict[str, Any]) -> Tensor:
    """Indices without replacement are those of the largest; with it, each is the largest of an own race."""
    p, count = given["self"], given["num_samples"]
    if given.get("replacement") and count > 1:
        races: Tensor = p.unsqueeze(-2) / draw(random_streams.exponential, shape=[*p.shape[:-1], count, p.size(-1)])
        return races.argmax(-1)
    race: Tensor = p / draw(random_streams.exponential, shape=p.shape)
    return race.topk(count).indices


_NUMBERS: dict[str, Callable[[Any, dict[str, Any]], Tensor]] = {
    "rand": lambda draw, given: draw(random_streams.uniform),
    "uniform": lambda draw, given: (
        draw(random_streams.uniform) * (given.get("to", 1) - given.get("from", 0)) + given.get("from", 0)
    ),
    "randn": lambda draw, given: draw(random_streams.normal),
    "normal": lambda draw, given: draw(random_streams.normal) * given.get("std", 1) + given.get("mean", 0),
    "log_normal": lambda draw, given: (draw(random_streams.normal) * given.get("std", 2) + given.get("mean", 1)).exp(),
    "randint": lambda draw, given: draw(random_streams.integers, given.get("low", 0), given["high"]),
    "random": lambda draw, given: draw(random_streams.integers, 0, given["to"]),
    "bernoulli": lambda draw, given: draw(random_streams.uniform) < given.get("p", given["self"]),
    "exponential": lambda draw, given: draw(random_streams.exponential) / given.get("lambd", 1),
    "randperm": lambda draw, given: draw(random_streams.integers, 0, 1 << 60).argsort(),
    "multinomial": _chosen,
}


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
