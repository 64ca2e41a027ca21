"""Public architectures, compiled for several devices and verified: how much of each is sharded, and how exact it stays.

    python -m benchmarks.architectures [--mesh tp=2] [--only PATTERN] [--json] [--write]

The models are those of ``tests/models/architectures.py``: toy sizes, random weights. Each is planned and compiled in this
process; several programs are verified in one launch of processes: steps of SGD with momentum against the model on one
device, in fp32, and in fp64 where an error could be rounding. ``--write`` puts the table into
``docs/architectures.md``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

import graphpar as gp
from benchmarks.packages import HEADING
from graphpar.cost_models.flops import operator_flops
from graphpar.ir.sharding import Decision
from graphpar.operators.table import record_of
from graphpar.operators.transitions import TABLE
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.keys import by_node
from graphpar.passes.sharding.problem import is_operator
from graphpar.runtime.layout import Shard
from graphpar.runtime.mesh import Mesh
from graphpar.verification import Verification, verify_all
from tests.models.architectures import ALL, program_of

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
LAUNCH = 8  # programs that one launch verifies


@dataclass(frozen=True)
class Row:
    """One architecture. Shares and collectives are of the whole model, collectives divided by the blocks that repeat.

    Attributes:
        operators: share of the operators that each rank runs on shards (views are not counted).
        flops: share of the floating-point operations that are divided.
        weights: share of the parameters' bytes that are sharded.
        error: the largest relative error of losses, gradients, parameters and buffers, or None where it does not run.
        reason: why it does not run, or what is not sharded.
    """

    architecture: str
    operators: float | None = None
    flops: float | None = None
    weights: float | None = None
    forward: float | None = None
    backward: float | None = None
    plan_s: float | None = None
    error: float | None = None
    ok: bool = False
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.architectures", description=__doc__.split("\n")[0])
    parser.add_argument("--mesh", default="tp=2", help="degrees of axes, e.g. tp=2 or cp=2 (default: tp=2)")
    parser.add_argument("--only", default="*", help="names of architectures, e.g. 'qwen*'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.parent.name}/{PAGE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = [name for name in ALL if fnmatch.fnmatch(name, options.only)]
    rows: list[Row] = []
    for row in measured(names, Mesh.parse(options.mesh)):
        rows.append(row)
        print(f"{len(rows)}/{len(names)} {row.architecture}: {_outcome(row)}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: names.index(row.architecture))
    if options.write:
        packages = PAGE.read_text(encoding="utf-8").partition(HEADING)
        PAGE.write_text(
            _page(rows, options.mesh) + "".join(("\n", *packages[1:]) if packages[1] else ()), encoding="utf-8"
        )
    if options.json:
        print(json.dumps({"mesh": options.mesh, "architectures": [asdict(row) for row in rows]}))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(_table(rows))


def measured(names: Sequence[str], mesh: Mapping[str, int]) -> Iterator[Row]:
    """Yield a row for each of ``names``, as they are done."""
    waiting: list[tuple[Row, gp.Parts]] = []
    for index, name in enumerate(names):
        row, parts = compiled(name, mesh)
        if parts is None:
            yield row
        else:
            waiting.append((row, parts))
        if len(waiting) == LAUNCH or (waiting and index == len(names) - 1):
            for (row, _), found in zip(waiting, verify_all([parts for _, parts in waiting], timeout_s=600)):
                yield verified(row, found)
            waiting = []


def compiled(name: str, mesh: Mapping[str, int]) -> tuple[Row, gp.Parts | None]:
    """Plan ``name`` for ``mesh`` and print it, with the shares that are sharded; no parts where it is refused."""
    try:
        program = program_of(name)
        began = time.perf_counter()
        plan = gp.plan(program, mesh=mesh)
        took = time.perf_counter() - began
        parts = gp.partition(program, plan)
    except gp.GraphparError as error:
        return Row(name, reason=str(error).split(". ")[0]), None
    except Exception as error:  # a fault of graphpar's own is a row of the table, too
        return Row(name, reason=f"{type(error).__name__}: {str(error).splitlines()[0]}"), None
    divided, flops = _operators_sharded(program, plan)
    forward, backward = _collectives(parts.program)
    reason = "; ".join(line.removesuffix(".") for line in plan.sharding.undivided)
    return Row(name, divided, flops, _weights_sharded(program, plan), forward, backward, took, reason=reason), parts


def verified(row: Row, found: Verification) -> Row:
    """``row`` with what verification found: the error in the program's own dtypes, or in fp64 where that decided against them."""
    native = found.native or found
    shown = native if native.ok and found.ok else found
    error = max(shown.max_error.values(), default=math.nan)
    remarks = [*found.problems, *_above(found)]
    if shown is not native:
        remarks.insert(
            0,
            f"in {native.decided_in} {max(native.max_error.values()):.0e} ({', '.join(_above(native))}); this is in fp64",
        )
    return replace(row, ok=found.ok, error=error, reason="; ".join(remarks) or row.reason)


def _above(found: Verification) -> list[str]:
    """The kinds of values with errors above their tolerance."""
    above = [kind for kind, error in found.max_error.items() if error > found.tolerance[kind]]
    return [f"the {kind} of {found.worst[kind]}" if found.worst.get(kind) else f"the {kind}" for kind in above]


# ---- what is sharded -------------------------------------------------------------------------------------------


def _operators_sharded(program: gp.Program, plan: gp.Plan) -> tuple[float, float]:
    """The shares of the operators, and of the floating-point operations, that are divided."""
    ready = prepared(program, plan.sharding, plan.microbatch_size)
    calls = [str(node.meta["block"]) for node in ready.graph.nodes if node.op == "call_module"]
    scopes = [(ready.graph, 1), *((ready.blocks[name].graph, calls.count(name)) for name in set(calls))]
    decisions = by_node(ready, plan.sharding)
    count = own = all_flops = own_flops = 0.0
    for graph, instances in scopes:
        for node in graph.nodes:
            if not is_operator(node) or record_of(node).free or not node.all_input_nodes:
                continue
            flops = operator_flops(node, plan.microbatch_size) * instances
            divided = _divided(decisions[node])
            count, all_flops = count + instances, all_flops + flops
            own, own_flops = own + instances * divided, own_flops + flops * divided
    return own / max(1.0, count), own_flops / max(1.0, all_flops)


def _divided(decision: Decision) -> bool:
    return any(isinstance(kind, Shard) for types in (*decision.operands, *decision.results) for kind in types)


def _weights_sharded(program: gp.Program, plan: gp.Plan) -> float:
    sizes = {name: info.nbytes for name, info in program.parameters.items() if info.requires_grad}
    spec = plan.sharding.parameters
    sharded = sum(
        size for name, size in sizes.items() if any(isinstance(k, Shard) for k in spec.get(name, {}).values())
    )
    return sharded / max(1, sum(sizes.values()))


def _collectives(lowered: gp.Program) -> tuple[float, float]:
    """Forward and backward collectives of the root and all blocks, divided by the number of blocks."""
    blocks = [lowered.block_of(node).graph for node in lowered.graph.nodes if node.op == "call_module"]
    counted = [_collectives_of(graph) for graph in (lowered.graph, *blocks)]
    return tuple(sum(column) / max(1, len(blocks)) for column in zip(*counted))  # type: ignore[return-value]


def _collectives_of(graph: fx.Graph) -> tuple[int, int]:
    rows = {row.function: row for row in TABLE}
    used = [rows[getattr(node.target, "__name__", "")] for node in graph.nodes if "transition" in node.meta]
    return sum(row.forward_collective is not None for row in used), sum(
        row.backward_collective is not None for row in used
    )


# ---- what is shown ---------------------------------------------------------------------------------------------

_HEADINGS = (
    "architecture",
    "operators sharded",
    "flops divided",
    "weights sharded",
    "collectives a layer",
    "plan",
    "error",
    "remarks",
)


def _cells(row: Row) -> list[str]:
    if row.weights is None:
        return [row.architecture, "", "", "", "", "", "refused", row.reason]
    assert row.operators is not None and row.flops is not None and row.plan_s is not None
    shares = [f"{share:.0%}" for share in (row.operators, row.flops, row.weights)]
    layer = f"{row.forward:.3g} + {row.backward:.3g}"
    return [row.architecture, *shares, layer, f"{row.plan_s:.1f} s", _outcome(row), row.reason]


def _outcome(row: Row) -> str:
    if row.error is None:
        return "refused" if row.weights is None else "not verified"
    return f"{row.error:.0e}" if row.ok else f"{row.error:.0e}, wrong"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("architecture", "remarks") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _page(rows: Sequence[Row], mesh: str) -> str:
    exact = sum(row.ok for row in rows)
    lines = [
        "# Architectures",
        "",
        f"`python -m benchmarks.architectures --mesh {mesh} --write` compiled the models of `tests/models/architectures.py` (the",
        "configurations of transformers at toy sizes, with random weights) for several devices and verified each against the model on",
        "one device: losses, gradients, and parameters after three steps of SGD with momentum, in fp32, to 1e-5 of the largest value.",
        "",
        f"**{exact} of {len(rows)} are exact over {mesh}.**",
        "",
        "*Operators sharded*: the share of operators that each rank runs on shards (views are not counted). *Flops divided*: the share of",
        "floating-point operations that are divided over the ranks. *Weights sharded*: the share of the parameters' bytes. *Collectives a",
        "layer*: forward + backward, those of embedding and head included (the small all-reduces of a vocabulary-parallel loss are not),",
        "divided by the number of blocks that repeat. *Error*: the largest relative one.",
        "",
        f"| {' | '.join(_without_seconds(_HEADINGS))} |",
        "|---|---:|---:|---:|---:|---:|---|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in _without_seconds(_cells(row)))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _without_seconds(cells: Sequence[str]) -> list[str]:
    """A page that is written again has the same text."""
    return [cell for cell, heading in zip(cells, _HEADINGS) if heading != "plan"]


if __name__ == "__main__":
    main()
