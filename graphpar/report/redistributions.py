"""The data of a report on a sharded program: specs of weights, and the bytes and seconds of each redistribution.

    lowered program, plan ──sharding_data──► scopes: {name, count, in, out, rows: [{modules, spec, transitions}]}, totals, notes

Prices are those of the step, so the lines add up to the step's figure for an axis: a line counts for every instance of its block and
every microbatch, and the step's figure is that of the busiest rank, with the lines of its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from graphpar.cost_models.collective_costs import SentPrices
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.ir.recomputation import gathers_again
from graphpar.operators.naming import value_name
from graphpar.operators.placement import literal
from graphpar.operators.table import COMPOSITES
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.text import is_below, short_names


def sharding_data(program: Program, plan: Plan, cluster: Cluster | None) -> dict[str, Any] | None:
    """Describe the sharding of the lowered ``program`` on its axes and that of an exchange of rows, as plain data;
    ``None`` where there is none.

    ``cluster``: the hardware that the step is priced for; None where it has no price, and then redistributions have none either.
    """
    if not plan.sharding.all_degrees:
        return None
    reader = _Reader(program, plan, cluster)
    scopes = reader.scopes()
    sent = [(row, scope["count"]) for scope in scopes for part in scope["rows"] for row in part["transitions"]]
    return {
        "axes": plan.sharding.all_degrees,
        "gap": plan.sharding.gap,
        "scopes": scopes,
        "transitions": sum(count for _, count in sent),
        "transitions_s": None if cluster is None else sum(row["seconds"] * count for row, count in sent),
        "bytes": {axis: _bytes(sent, axis) for axis in plan.sharding.all_degrees},
        "discovered": {operator: list(rules) for operator, rules in plan.sharding.discovered.items()},
        "notes": reader.notes(),
    }


def _bytes(sent: Sequence[tuple[Mapping[str, Any], int]], axis: str) -> float:
    """Return the bytes that a rank sends over ``axis`` in a microbatch."""
    rows = [(row["forward_bytes"] + row["backward_bytes"], count) for row, count in sent if row["axis"] == axis]
    total: float = sum(nbytes * count for nbytes, count in rows)
    return total


class _Reader:
    def __init__(self, program: Program, plan: Plan, cluster: Cluster | None) -> None:
        self.program, self.plan = program, plan
        kinds = recomputed_blocks(program, plan.recompute)
        shards = [
            name
            for name, block in program.blocks.items()
            if all(gathers_again(kinds.get(path)) for path in block.instances)
        ]
        self.prices = SentPrices(program, plan.mesh, plan.microbatch_size, cluster, shards)
        self.calls = [node for node in program.graph.nodes if node.op == "call_module"]

    def graphs(self) -> list[tuple[str, fx.Graph, int, str]]:
        """Return (name, graph, number of instances, module path of its operators) of each block, and of the root last."""
        used = [str(node.meta["block"]) for node in self.calls]
        blocks = [self.program.blocks[name] for name in dict.fromkeys(used)]
        found = [(block.name, block.graph, used.count(block.name), block.path) for block in blocks]
        return [*found, ("", self.program.graph, 1, "")]

    def scopes(self) -> list[dict[str, Any]]:
        """Return the data of each block, and of the root."""
        return [
            {
                "name": name,
                "count": count,
                "in": self._ends(graph, "placeholder") if name else "",
                "out": self._ends(graph, "output") if name else "",
                "rows": self._rows(graph, name, base),
            }
            for name, graph, count, base in self.graphs()
        ]

    def _ends(self, graph: fx.Graph, op: str) -> str:
        """Return the specs of a block's differentiable inputs or outputs."""
        nodes = [node for node in graph.nodes if node.op == op]
        nodes = nodes[0].all_input_nodes if op == "output" else nodes
        specs = [
            _spec(node.meta.get("types", {}))
            for node in nodes
            if node in self.prices.works.differentiable or self.plan.mode == "infer"
        ]
        return " · ".join(dict.fromkeys(filter(None, specs)))

    # ---- rows ----

    def _rows(self, graph: fx.Graph, scope: str, base: str) -> list[dict[str, Any]]:
        """Return a row for each module that has parameters or whose result is redistributed, in order of execution."""
        rows: dict[str, dict[str, Any]] = {}

        def row(module: str) -> dict[str, Any]:
            return rows.setdefault(module, {"modules": [module], "parameters": {}, "transitions": []})

        for node in graph.nodes:
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and self._is_parameter(str(argument.target), base):
                    owner = str(argument.target).rpartition(".")[0]
                    row(owner)["parameters"][str(argument.target)] = _spec(argument.meta.get("types", {}))
            sent = self._sent(node, scope)
            if sent is not None:
                row(self._module(node, base))["transitions"].append(sent)
        for entry in rows.values():  # the spec of a module is that of its weight, else of its first parameter
            own = entry["parameters"]
            entry["spec"] = next(
                (spec for name, spec in own.items() if name.endswith("weight")), next(iter(own.values()), "")
            )
        return _merged(list(rows.values()), "the block itself" if base else "the model itself")

    def _is_parameter(self, target: str, base: str) -> bool:
        return (f"{base}.{target}" if base else target) in self.program.parameters

    def _module(self, node: fx.Node, base: str) -> str:
        stack = node.meta.get("module_stack", ())
        path = str(stack[-1][0]) if stack else ""
        if not base:
            return path
        return path.removeprefix(f"{base}.") if is_below(path, base) else ""  # a block's input is from elsewhere

    def _sent(self, node: fx.Node, scope: str) -> dict[str, Any] | None:
        """Return the collectives of a node, with the name of the value."""
        sent = self.prices.sent(node, scope)
        if sent is None:
            return None
        composite = COMPOSITES.get(operator_name(node))
        name = "labels that count" if composite is None else composite.title
        if "transition" in node.meta:
            name = str(node.meta["name"]) if "name" in node.meta else value_name(node.meta["origin"])
        return {
            "name": name,
            "axis": sent.axis,
            "from": sent.source,
            "to": sent.target,
            "forward": sent.forward,
            "forward_bytes": sent.forward_bytes,
            "backward": sent.backward,
            "backward_bytes": sent.backward_bytes,
            "seconds": None if sent.forward_s is None or sent.backward_s is None else sent.forward_s + sent.backward_s,
        }

    # ---- notes ----

    def notes(self) -> list[str]:
        """Return notes on losses whose logits are sharded, but gathered before the loss."""
        found = []
        for node in (node for _, graph, _, _ in self.graphs() for node in graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if schema is not None and "cross_entropy_loss" in schema.name:
                gathered = _gathered(node.args[0])
                if gathered is not None:
                    found.append(self._why_gathered(node, gathered))
        return found

    def _why_gathered(self, node: fx.Node, gathered: fx.Node) -> str:
        axis = gathered.args[1]
        if value_of(node.args[1]).is_floating_point():  # type: ignore[arg-type]
            why = "its targets are probabilities of all classes"
        elif literal(node, "label_smoothing"):
            why = "label smoothing needs every class's logit"
        elif self.plan.sharding.points:
            why = "the shard plan, or the price at this size, rules out a vocabulary-parallel loss"
        else:
            why = "at this size that is cheaper than the all-reduces of a vocabulary-parallel loss"
        return f"The logits are sharded over {axis}, but gathered before the loss: {why}."


def _spec(types: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in types.items())


def _gathered(node: Any) -> fx.Node | None:
    """Return the gather of a sharded last dim from which ``node`` is computed, through operators on one tensor."""
    while getattr(node, "op", "") == "call_function":
        if "transition" in node.meta:
            source = node.meta["transition"][0]
            last = node.meta["val"].ndim - 1
            return node if source.startswith((f"S({last})", f"S({last}:")) else None
        if len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return None


def _merged(rows: Sequence[dict[str, Any]], whole: str) -> list[dict[str, Any]]:
    """Join the rows of consecutive modules with equal specs whose results are not redistributed."""
    merged: list[dict[str, Any]] = []
    for row in rows:
        last = merged[-1] if merged else None
        continues = last is not None and not last["transitions"] and last["spec"] == row["spec"]
        if last is not None and continues and row["parameters"] and last["parameters"]:
            last["modules"] = [*last["modules"], *row["modules"]]
            last["parameters"] = {**last["parameters"], **row["parameters"]}
            last["transitions"] = row["transitions"]
        else:
            merged.append(row)
    names = short_names([f"{module}.weight" for row in merged for module in row["modules"] if module])
    for row in merged:
        row["label"] = ", ".join(names.get(f"{module}.weight", whole) for module in row["modules"])
    return merged
