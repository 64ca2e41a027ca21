"""The pass table: every step from a captured program to one that can be split, in order.

A pass is a plain function from :class:`~graphpar.ir.program.Program` to Program. After each one ``check`` looks at what the
pass promises, so a broken pass is found where it broke.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphpar.ir.program import Helper, Program, operator_name
from graphpar.passes.normalize.functional import functionalize, is_inplace
from graphpar.passes.normalize.helpers import share_helpers
from graphpar.passes.normalize.loss import share_loss
from graphpar.passes.normalize.outline import outline
from graphpar.passes.normalize.pipe_split import keep_marks
from graphpar.passes.normalize.random_streams import assign_streams
from graphpar.passes.normalize.regions import inline_regions
from graphpar.passes.normalize.simplify import simplify
from graphpar.passes.normalize.unchosen import fill_unchosen, sizes_are_known


@dataclass(frozen=True)
class Pass:
    """A row of the table: what the pass needs and ensures in words, and a check of the latter."""

    name: str
    run: Callable[[Program], Program]
    needs: str
    ensures: str
    check: Callable[[Program], bool]
    optional: bool = False


@dataclass(frozen=True)
class PassResult:
    """What one pass did: seconds, and the root graph's nodes before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def _no_marks(program: Program) -> bool:
    return not any(operator_name(node) == "_pipe_split" for node in program.graph.nodes)


def _no_regions(program: Program) -> bool:
    return not any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in program.graph.nodes)


def _only_buffers_written(program: Program) -> bool:
    return all(
        isinstance(node.args[0], fx.Node) and node.args[0].op != "placeholder"
        for node in program.graph.nodes
        if is_inplace(node)
    )


def _streams_counted(program: Program) -> bool:
    return program.random_calls == 0 or any(entry.role == "sample_keys" for entry in program.inputs)


def _no_dead_code(program: Program) -> bool:
    return all(node.users or node.op in ("placeholder", "output") or is_inplace(node) for node in program.graph.nodes)


def _counts_are_inputs(program: Program) -> bool:
    placeholders = {str(node.target) for node in program.graph.nodes if node.op == "placeholder"}
    return set(program.count_names) <= placeholders


def _instances_named(program: Program) -> bool:
    classes: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            classes.setdefault(str(node.target), set()).add(str(node.meta["block"]))
    known = all(names <= program.blocks.keys() for names in classes.values())
    return known and all(len(names) == 1 for names in classes.values())


def _helpers_are_free(program: Program) -> bool:
    return not any(
        argument.op == "get_attr" and str(argument.target) in program.parameters
        for node in program.graph.nodes
        if isinstance(node.target, Helper)
        for argument in node.all_input_nodes
    )


PASSES: tuple[Pass, ...] = (
    Pass(
        "inline_regions",
        inline_regions,
        "a captured program",
        "no_grad and autocast regions are plain operators",
        _no_regions,
    ),
    Pass("keep_marks", keep_marks, "inline_regions", "pipe_split() is a mark on the operator after it", _no_marks),
    Pass("functionalize", functionalize, "inline_regions", "only buffers are written in place", _only_buffers_written),
    Pass(
        "fill_unchosen",
        fill_unchosen,
        "functionalize",
        "rows that a mask does not choose keep their places; no size depends on values",
        sizes_are_known,
    ),
    Pass(
        "assign_streams",
        assign_streams,
        "functionalize",
        "dropout is a function of each example's key",
        _streams_counted,
    ),
    Pass(
        "simplify",
        simplify,
        "assign_streams",
        "no asserts, no empty casts, no dead code",
        _no_dead_code,
        optional=False,
    ),
    Pass(
        "share_loss",
        share_loss,
        "simplify",
        "microbatches return shares of the loss; couplings are known",
        _counts_are_inputs,
    ),
    Pass("outline", outline, "share_loss", "repeated modules are blocks", _instances_named, optional=True),
    Pass(
        "share_helpers",
        share_helpers,
        "outline",
        "masks and tables are functions that any stage calls",
        _helpers_are_free,
        optional=True,
    ),
)


def run_passes(
    program: Program,
    *,
    skip: Sequence[str] = (),
    after: Callable[[Pass, Program], None] | None = None,
) -> tuple[Program, list[PassResult]]:
    """Runs the table in order. ``after(pass, program)`` is called after each (for dumps)."""
    results = []
    for row in PASSES:
        if row.name in skip and row.optional:
            continue
        before, started = len(program.graph.nodes), time.perf_counter()
        program = row.run(program)
        results.append(PassResult(row.name, time.perf_counter() - started, before, len(program.graph.nodes)))
        program.graph.lint()
        assert row.check(program), f"pass {row.name} did not ensure that {row.ensures}"
        if after is not None:
            after(row, program)
    return program, results
