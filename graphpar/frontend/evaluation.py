"""Whether a model computes in evaluation what it computes in training but for dropout and BatchNorm's statistics.

Emitted code reads ``self.training`` for these two. A model that looks at its mode otherwise is another program in evaluation, which
two traces show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphpar.ir.program import operator_name, where

_MODE = {"batch_norm": 5, "scaled_dot_product_attention": 4}
"""Which argument of an operator follows the mode, where the printed code follows it too."""


def may_differ(model: nn.Module) -> bool:
    """Whether a module may ask for its mode: any but torch's own, and of these the ones with averages that no operator here switches."""
    return any(
        not type(module).__module__.startswith("torch.")
        or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)
        for module in model.modules()
    )


def difference(trained: fx.Graph, evaluated: fx.Graph) -> str | None:
    """Return the first operator that only one of two graphs has; ``None`` where they differ in dropout and BatchNorm alone."""
    mine, other = _calls(trained), _calls(evaluated)
    for i in range(max(len(mine), len(other))):
        one, two = (calls[i] if i < len(calls) else (None, "nothing") for calls in (mine, other))
        if one[1] != two[1]:
            node = one[0] or two[0]
            assert node is not None
            return (
                f"the program can't evaluate: in evaluation mode the model computes something else than in training, beside dropout and "
                f"BatchNorm, at {operator_name(node)}{where(node)}; compile it with --mode infer for that"
            )
    return None


def _calls(graph: fx.Graph) -> list[tuple[fx.Node | None, str]]:
    """Each operator with its arguments, but for dropouts and the counts of BatchNorm."""
    known: dict[fx.Node, Any] = {}
    calls: list[tuple[fx.Node | None, str]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            known[node] = node.target
            continue
        name = operator_name(node) if node.op == "call_function" else node.op
        if name in ("dropout", "feature_dropout"):
            known[node] = known[node.args[0]]
            continue
        arguments = list(node.args)
        if name in ("add", "add_") and str(known.get(arguments[0])).endswith("num_batches_tracked"):
            continue
        if name in _MODE and len(arguments) > _MODE[name]:
            arguments[_MODE[name]] = None
        options = {key: value for key, value in node.kwargs.items() if key not in ("dropout_p", "training")}
        known[node] = len(calls)
        shown = torch.fx.node.map_arg((tuple(arguments), options), lambda used: _Place(known[used]))
        calls.append((node, f"{name}{shown}"))
    return calls


class _Place(str):
    """What a node stands for in the text of a call."""

    def __new__(cls, place: Any) -> _Place:
        return super().__new__(cls, f"%{place}")
