"""Whether a model computes in evaluation what it computes in training but for dropout and BatchNorm's statistics.

Emitted code reads ``self.training`` for these two. A model that looks at its mode otherwise is another program in evaluation, which
two traces show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphpar.ir.program import named_arguments, operator_name, where

_MODE = {"batch_norm": "training", "scaled_dot_product_attention": "dropout_p"}
"""Which argument of an operator follows the mode, where the printed code follows it too."""
_DROPOUTS = ("dropout", "feature_dropout")


def may_differ(model: nn.Module) -> bool:
    """Whether a module may ask for its mode: any but torch's own, and of these the ones with averages that no operator here switches."""
    return any(
        not type(module).__module__.startswith("torch.")
        or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)
        for module in model.modules()
    )


def always_on(evaluated: fx.Graph) -> str | None:
    """Return what is not off in evaluation, though emitted code turns it off there: dropout, or BatchNorm by the batch's statistics."""
    for node in evaluated.nodes:
        name = operator_name(node) if node.op == "call_function" else ""
        if name in _MODE:
            options = named_arguments(node)
            if (
                not options[_MODE[name]] or options.get("running_mean", node) is None
            ):  # BatchNorm that has no other statistics
                continue
            what = "BatchNorm by a batch's own statistics" if name == "batch_norm" else "dropout"
        elif name in _DROPOUTS and all(node.args[1:3]):  # its probability, and whether it is on
            what = "dropout"
        else:
            continue
        return f"it has {what} that is always on{where(node)}; leave it to module.training"
    return None


def difference(trained: fx.Graph, evaluated: fx.Graph) -> str | None:
    """Return the first operator that only one of two graphs has; ``None`` where they differ in dropout and BatchNorm alone."""
    if (reason := always_on(evaluated)) is not None:
        return f"the program can't evaluate: {reason}"
    mine, other = _calls(trained), _calls(evaluated)
    for i in range(max(len(mine), len(other))):
        one, two = (calls[i] if i < len(calls) else (None, "nothing") for calls in (mine, other))
        if one[1] != two[1]:
            node = one[0] or two[0]
            assert node is not None
            return (
                f"the program can't evaluate: in evaluation mode the model differs from training in more than dropout and BatchNorm, "
                f"at {operator_name(node)}{where(node)}; compile it with --mode infer for that"
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
        if name in _DROPOUTS:
            known[node] = known[node.args[0]]
            continue
        arguments, options = list(node.args[:1] if node.op == "output" else node.args), dict(node.kwargs)
        if name in ("add", "add_") and str(known.get(arguments[0])).endswith("num_batches_tracked"):
            known[node] = known[arguments[0]]  # type: ignore[index]
            continue
        if name in _MODE:
            arguments, options = [], named_arguments(node)
            del options[_MODE[name]]
        known[node] = len(calls)
        shown = torch.fx.node.map_arg((tuple(arguments), options), lambda used: _Place(known[used]))
        calls.append((node, f"{name}{shown}"))
    return calls


class _Place(str):
    """What a node stands for in the text of a call."""

    def __new__(cls, place: Any) -> _Place:
        return super().__new__(cls, f"%{place}")
