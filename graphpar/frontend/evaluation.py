"""Whether a model computes in evaluation what it computes in training but for dropout and BatchNorm's statistics.

Emitted code reads ``self.training`` for these two. A model that looks at its mode otherwise is another program in evaluation, which
two traces show: ``Program.evaluated``, whose operators are methods ``evaluated`` beside each ``forward``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graphpar.errors import GraphparError
from graphpar.frontend.between_steps import written_buffers
from graphpar.ir.program import Program, named_arguments, operator_name, where

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


def always_on(evaluated: fx.Graph, *, but_dropout: bool = False) -> str | None:
    """Return what is not off in evaluation, though a program for training alone turns it off there: dropout, unless ``but_dropout``, or
    BatchNorm by the batch's statistics."""
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
        if but_dropout and what == "dropout":
            continue
        return f"it has {what} that is always on{where(node)}; leave it to module.training"
    return None


def differs(trained: fx.Graph, evaluated: fx.Graph) -> bool:
    """Whether two graphs differ in more than dropout and BatchNorm."""
    return [call for _, call in _calls(trained)] != [call for _, call in _calls(evaluated)]


def with_evaluation(program: Program, evaluated: Program) -> Program:
    """Add the program of evaluation mode, whose constants get names of their own.

    Raises:
        GraphparError: it computes no loss, keeps something, or asks for values that training does not ask for.
    """
    if evaluated.mode != program.mode:
        raise GraphparError("in evaluation mode the model returns no loss")
    if written := [name for name in written_buffers(evaluated) if name not in evaluated.branches]:
        raise GraphparError(f"in evaluation mode the model writes the buffer {written[0]!r}")
    if dict(evaluated.branches) != dict(program.branches):
        other = next(iter({**evaluated.branches, **program.branches}.values()))
        raise GraphparError(f"only one mode has the branch on values {other}")
    names: dict[str, str] = {}
    for name, value in evaluated.constants.items():
        mine = program.constants.get(name)
        same = mine is None or (mine.dtype == value.dtype and torch.equal(mine, value))
        prefix, dot, last = name.rpartition(".")
        names[name] = name if same or name in program.buffers else f"{prefix}{dot}evaluated_{last}"
    for node in evaluated.graph.nodes:
        if node.op == "get_attr":
            node.target = names.get(str(node.target), node.target)
    constants = {names[name]: value for name, value in evaluated.constants.items()} | program.constants
    return replace(
        program, constants=constants, evaluated=replace(evaluated, constants=constants, buffers=program.buffers)
    )


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
