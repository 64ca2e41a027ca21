"""Zero-bubble schedules split a stage's backward in two; this decides whether torch's split is right for a stage.

    I (input): gradients of what the stage received, now     W (weight): gradients of its parameters, later

torch (``torch/distributed/pipelining/_backward.py``) runs I up to the nodes where a parameter joins the part of
the graph that depends on the received tensors, keeps the gradients there, and starts W from them, one group of
parameters with common joins after the other. Seen from a parameter, this is

- silently wrong where it reaches an output past the received tensors: that path has no join. With no received
  tensor that has a gradient (everything before is frozen) the gradient is ``None``;
- an error ("backward through the graph a second time") where it joins twice, one join above the other, with
  other parameters' joins between: W of the one frees what W of the other needs;
- an error, or silently doubled where the join saves nothing (additions), in two groups at once: a parameter
  that joins where ``p`` does and also where ``q`` does.

The first stage is always right, because torch runs its whole backward in W. A stage that this module finds
unsafe runs its whole backward in I and nothing in W: never wrong, but it does not fill bubbles. So does one that recomputes, since
``torch.utils.checkpoint`` runs a block again for every call of the autograd engine, and so do all stages where torch is too old.

After I torch detaches what the stage returned in place. W can't read such a tensor any more, so what is returned and also read by the
stage's own operators (``x`` of ``f(x), x``) is returned as a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from graphpar.runtime.torch_versions import SPLITS_BACKWARD


def guard(stage: PipelineStage, *, whole: bool = False) -> None:
    """At the first forward of ``stage``, and at one after which other parameters are trained, make its backward whole if splitting it would
    be wrong, else find what it returns as copies.

    ``whole``: it is made whole anyway, as where blocks run again in the backward: each half would run them again.
    """
    if stage.stage_index == 0:
        return
    if whole or not SPLITS_BACKWARD:
        stage.dw_builder = _nothing_left
        return

    copied, looked_at = list[int](), list[bool]()

    def check(module: nn.Module, received: tuple[Tensor, ...], output: Any) -> Any:
        nonlocal copied, looked_at
        if not torch.is_grad_enabled():
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        parameters = list(module.parameters())  # of sharded state what is gathered
        trained = [True, *(parameter.requires_grad for parameter in parameters)]
        if trained != looked_at:
            exact = splits_exactly(outputs, received, parameters)
            stage.dw_builder = None if exact else _nothing_left
            copied, looked_at = read_by_others(outputs) if exact else [], trained
        ready = tuple(tensor.clone() if place in copied else tensor for place, tensor in enumerate(outputs))
        return ready if isinstance(output, tuple) else ready[0]

    stage.submod.register_forward_hook(check)


def is_whole(stage: PipelineStage) -> bool:
    """Tell whether ``guard`` found that the backward of ``stage`` cannot be split."""
    return stage.dw_builder is _nothing_left


def _nothing_left() -> Callable[..., None]:
    """Serve as torch's ``dw_builder``: with one, I runs the whole backward and W runs what this returns, nothing."""
    return lambda: None


def splits_exactly(outputs: Iterable[Tensor], received: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether torch's input and weight backward give the same gradients as the whole backward.

    Sufficient, not necessary: two joins of one parameter, one above the other, count as unsafe.
    """
    roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    users = _users(roots)
    dependent = _above([_accumulator(t) for t in received if t.requires_grad], users)
    joins_of: list[frozenset[Node]] = []
    for parameter in parameters:
        if parameter.requires_grad:
            accumulator = _accumulator(parameter)
            if accumulator in users:
                alone = _above([accumulator], users, stop=dependent)
                if any(root in alone for root in roots):
                    return False
                joins_of.append(frozenset(user for node in alone for user in users[node] if user in dependent))
    for joins in set(joins_of):
        if len(joins) > 1:
            if any(joins != other and joins & other for other in joins_of) and not _first_listed(joins, joins_of):
                return False
            if _nested(joins):
                return False
    return True


def read_by_others(outputs: Sequence[Tensor]) -> list[int]:
    """Return the places of the outputs from which another output is computed."""
    users = _users([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])
    return [at for at, tensor in enumerate(outputs) if tensor.grad_fn is not None and users.get(tensor.grad_fn)]


def _first_listed(joins: frozenset[Node], joins_of: list[frozenset[Node]]) -> bool:
    """Whether torch merges all groups that touch ``joins`` into one: it does when no two smaller ones come before."""
    before = joins_of[: joins_of.index(joins)]
    return not any(joins & other for other in before)


def _accumulator(tensor: Tensor) -> Node:
    """The node that a leaf's gradient flows into."""
    return get_gradient_edge(tensor).node


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For every node below ``roots``, the nodes that hand it a gradient."""
    users: dict[Node, list[Node]] = {root: [] for root in roots}
    queue = list(users)
    while queue:
        node = queue.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in users:
                    users[below] = []
                    queue.append(below)
                users[below].append(node)
    return users


def _above(starts: Iterable[Node], users: dict[Node, list[Node]], stop: Iterable[Node] = ()) -> set[Node]:
    """``starts`` and everything computed from them, without the nodes of ``stop``."""
    stops = stop if isinstance(stop, set) else set(stop)
    found = {node for node in starts if node in users}
    queue = list(found)
    while queue:
        for user in users[queue.pop()]:
            if user not in found and user not in stops:
                found.add(user)
                queue.append(user)
    return found


def _nested(joins: frozenset[Node]) -> bool:
    """Whether the gradient of one join flows through another."""
    for join in joins:
        seen = {join}
        queue = [join]
        while queue:
            for below, _ in queue.pop().next_functions:
                if below is not None and below not in seen:
                    if below in joins:
                        return True
                    seen.add(below)
                    queue.append(below)
    return False
