"""An optimizer whose state lives in the memory of the host and comes to the device a piece at a time, to be updated there.

    host      m v │ m v │ m v │ ...      back ──► update ──► out      the next piece comes while one is updated, and the one before it
    device          └─ two pieces at most                             leaves: the numbers are those of an optimizer that keeps its state

Parameters and gradients stay on the device, and so do sums of their norms. The optimizer of torch is called once a piece, with the
groups of its parameters cut down to that piece; that changes nothing where each parameter is updated by itself, as all of torch's own
optimizers do but LBFGS. Between two steps each tensor of the state is the host's: a checkpoint is saved from there and loaded to there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import like
from graphpar.runtime.state.host import Copied, Host

PIECE_BYTES = 64 * 2**20
"""A piece has parameters of so many bytes together, and at least one."""
AT_ONCE = 2
"""Pieces whose state is on the device at one time."""

_Moved = dict[tuple[Tensor, str], tuple[Tensor, Copied]]


class OffloadedState:
    """Keeps the state of ``optimizer`` in the memory of ``host``, from now on.

    Raises:
        RuntimeProgramError: it may update several parameters together.
    """

    def __init__(self, optimizer: Optimizer, host: Host) -> None:
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, LBFGS):
            raise RuntimeProgramError(
                f"offload=optimizer updates a piece of the parameters at a time, which is known to be exact for torch.optim's own "
                f"optimizers except LBFGS, and this one is {kind.__module__}.{kind.__qualname__}; compile the model without it"
            )
        self.host = host
        self._home: dict[tuple[Tensor, str], Tensor] = {}  # the host's memory of each tensor of the state
        self._loaded: dict[
            tuple[Tensor, str], Tensor
        ] = {}  # that into which a checkpoint was loaded since the last step
        whole_step: Callable[..., Any] = kind.step.__wrapped__  # type: ignore[attr-defined]  # without torch's hooks

        def step(itself: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(itself, whole_step)
            return loss

        for parameter, state in optimizer.state.items():
            state.update({key: self.put(parameter, key, value) for key, value in state.items()})
        optimizer.step = types.MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    def put(self, parameter: Tensor, key: str, value: Any) -> Any:
        """Return ``value``, which may become part of the state of ``parameter``, with new memory of the host in its place; numbers stay."""
        if not _moves(value):
            return value
        home, _ = self.host.out(_part(value))
        self._loaded[parameter, key] = home
        self.host.synchronize()
        return like(value, home)

    def is_home(self, parameter: Tensor, key: str, value: Any) -> bool:
        """Whether ``value`` of the state is in the host's memory."""
        at = parameter, key
        return _moves(value) and any(_part(value) is each.get(at) for each in (self._home, self._loaded))

    def _step(self, optimizer: Optimizer, whole_step: Callable[..., Any]) -> None:
        groups = list(optimizer.param_groups)
        params = [group["params"] for group in groups]
        pieces = list(_pieces(groups))
        coming = self._fetched(optimizer, pieces[0]) if pieces else {}
        leaving: list[tuple[Tensor, Copied]] = []
        try:
            for number, piece in enumerate(pieces):
                here = coming
                for _, left in leaving:  # on the host, so that the memory is free for the next piece
                    left.finish()
                leaving = []
                coming = self._fetched(optimizer, pieces[number + 1]) if number + 1 < len(pieces) else {}
                for (parameter, key), (values, copied) in here.items():
                    copied.wait()
                    optimizer.state[parameter][key] = like(optimizer.state[parameter][key], values)
                used = [(group, [p for at, p in piece if at == place]) for place, group in enumerate(groups)]
                for group, own in used:
                    group["params"] = own
                optimizer.param_groups = [group for group, own in used if own]
                whole_step(optimizer)
                leaving = self._sent(optimizer, piece)
        finally:
            optimizer.param_groups = groups
            for group, own in zip(groups, params):
                group["params"] = own
        self.host.synchronize()  # so that whoever reads the state next, a checkpoint above all, finds it whole

    def _fetched(self, optimizer: Optimizer, piece: Sequence[tuple[int, Tensor]]) -> _Moved:
        return {
            (parameter, key): self.host.back(_part(value))
            for _, parameter in piece
            for key, value in optimizer.state.get(parameter, {}).items()
            if self.is_home(parameter, key, value)
        }

    def _sent(self, optimizer: Optimizer, piece: Sequence[tuple[int, Tensor]]) -> list[tuple[Tensor, Copied]]:
        """Start to send the state of a piece home; returns what is on its way."""
        found = []
        for _, parameter in piece:
            for key, value in optimizer.state.get(parameter, {}).items():
                if _moves(value):
                    known = self._home.get((parameter, key))
                    fits = known is not None and (known.shape, known.dtype) == (_part(value).shape, value.dtype)
                    home, copied = self.host.out(_part(value), known if fits else None)
                    self._home[parameter, key] = home
                    self._loaded.pop((parameter, key), None)
                    optimizer.state[parameter][key] = like(value, home)
                    found.append((_part(value), copied))
        return found


def _pieces(groups: Sequence[dict[str, Any]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield parameters with gradients, each with the place of its group."""
    piece: list[tuple[int, Tensor]] = []
    nbytes = 0
    for place, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            more = _part(parameter).nbytes
            if piece and nbytes + more > PIECE_BYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append((place, parameter))
            nbytes += more
    if piece:
        yield piece


def _moves(value: Any) -> bool:
    """Whether a value of an optimizer's state is one that grows with its parameter, and no count of steps."""
    return isinstance(value, Tensor) and value.ndim > 0


def _part(value: Tensor) -> Tensor:
    """Return what this rank stores of ``value``: that tensor itself, and no view."""
    return value._local_tensor if isinstance(value, DTensor) else value
