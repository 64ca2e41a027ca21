"""Operator calls to prove rules with: torch's own samples (``OpInfo``), as a traced program holds them."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from graphpar.ir.program import operator_name
from graphpar.operators.prove import Call


def calls_of(function: Callable[..., Any], *tensors: Tensor) -> list[Call]:
    """The operator calls of ``function`` as capture sees them, with their real arguments."""
    with _garbage_stays():
        traced = make_fx(lambda *given: function(*given), pre_dispatch=True)(*tensors)
    recorder = _Recorder(traced)
    recorder.run(*tensors)
    return recorder.calls


@contextlib.contextmanager
def _garbage_stays() -> Iterator[None]:
    """A generator that stands within ``no_grad`` and is found to be garbage would set the mode in the graph that is traced."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[Call] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload) and operator_name(n) != "getitem":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            kept = pytree.tree_map(
                lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            schema = n.target._schema
            random = torch.Tag.nondeterministic_seeded in n.target.tags or operator_name(n).startswith(
                ("empty", "new_empty")
            )
            if not schema.is_mutable and not random:
                self.calls.append(Call(n.target, *kept))
        return super().run_node(n)


def signature(call: Call) -> str:
    """What makes two calls alike: the operator, shapes, dtypes and literals."""
    return str(call)


def sampled(limit: int = 4, names: set[str] | None = None) -> Iterator[tuple[str, Call]]:
    """(OpInfo, call) for up to ``limit`` samples of every function that torch describes, without duplicates."""
    from torch.testing._internal.common_methods_invocations import op_db

    seen: set[str] = set()
    for info in op_db:
        if names is not None and info.name not in names:
            continue
        dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in info.dtypes), None)
        if dtype is None or "fft" in info.name or ("linalg" in info.name and "norm" not in info.name):
            continue
        try:
            torch.manual_seed(0)
            made = iter(info.sample_inputs("cpu", dtype, requires_grad=False))
            samples = list(itertools.islice(made, 12 * limit))
            if hasattr(made, "close"):
                made.close()  # not while a later call is traced
        except Exception:
            continue
        for sample in samples[:: max(1, len(samples) // limit)][:limit]:
            for call in _captured(info, sample):
                key = signature(call)
                if key not in seen:
                    seen.add(key)
                    yield info.name, call


def _captured(info: Any, sample: Any) -> list[Call]:
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors):
            given[place] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec)
        return info.op(*args, **kwargs)

    try:
        return calls_of(function, *[leaves[place].detach() for place in places])
    except Exception:
        return []
