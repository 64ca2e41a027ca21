"""What the model of a training program returns besides the loss: where a program has it, and how ranks have parts of it.

logits = self.lm_head(hidden)      a marked value ──► keep_output("logits", logits) behind it
layers.3(...)                      a marked block's result ──► its module, of which the runtime takes it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from graphpar.emitted.model_outputs import keep_output
from graphpar.ir.lengths import per_position
from graphpar.ir.plan import Plan
from graphpar.ir.program import ModelOutput, Program, value_of
from graphpar.ir.stage import Stage
from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard
from graphpar.runtime.manifest import ModelOutputInterface


def with_kept_outputs(stages: Sequence[Stage], *, of_blocks: bool = False) -> list[Stage]:
    """Return the stages with a call of ``keep_output`` behind each operator of the root whose value the model returns.

    ``of_blocks``: also behind blocks, which are not called as modules in evaluation where they compute something else there.
    """
    found = list(stages)
    for _, node, index in _marked(stages):
        if (node.op == "call_function" or of_blocks) and found[index] is stages[index]:
            found[index] = replace(stages[index], graph=_keeping(stages[index].graph, of_blocks))
    return found


def _keeping(source: fx.Graph, of_blocks: bool) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(source, {}))
    graph.output_node().meta = dict(source.output_node().meta)
    for node in list(graph.nodes):
        for output in node.meta.get("model_output", ()) if node.op == "call_function" or of_blocks else ():
            with graph.inserting_after(node):
                keeps = graph.call_function(keep_output, (output.name, node))
            keeps.meta = {"val": None, "module_stack": node.meta.get("module_stack", ())}
    return graph


def model_output_interfaces(
    program: Program, stages: Sequence[Stage], plan: Plan, *, of_blocks: bool = False
) -> tuple[ModelOutputInterface, ...]:
    """Describe them for the runtime: those whose parts it can join."""
    found, multiple = [], 1 if program.lengths is None else program.lengths.multiple
    for output, node, index in _marked(stages):
        types = dict(node.meta.get("types", {}))
        rows = P if output.adds else R if output.batch_dim is None else Shard(output.batch_dim)
        joins = any(size and rows for size, rows in zip(output.of_length, output.coefficients))
        if joins and multiple > 1:  # padding would be in the middle
            continue
        usual = all(types.get(axis, rows) in ((R, I) if rows == R else (rows,)) for axis in REPLICAS)
        if usual and not any(isinstance(kind, ExpertRows) for kind in types.values()):
            found.append(
                ModelOutputInterface(
                    name=output.name,
                    stage=index,
                    module=str(node.target) if node.op == "call_module" and not of_blocks else None,
                    shape=output.shape_at(plan.microbatch_size),
                    dtype=value_of(node).dtype,
                    batch_dim=output.batch_dim,
                    adds=output.adds,
                    types={axis: kind for axis, kind in types.items() if axis not in REPLICAS},
                    per_position=per_position(output.of_length, output.coefficients, plan.microbatch_size, multiple),
                )
            )
    return tuple(found)


def _marked(stages: Sequence[Stage]) -> list[tuple[ModelOutput, fx.Node, int]]:
    """List the marked values, each on the last stage that computes it; of a module that is called once, and in one place."""
    found: dict[str, list[tuple[ModelOutput, fx.Node, int]]] = {}
    for index, stage in enumerate(stages):
        called = [node.target for node in stage.graph.nodes if node.op == "call_module"]
        for node in stage.graph.nodes:
            once = node.op == "call_function" or (node.op == "call_module" and called.count(node.target) == 1)
            for output in node.meta.get("model_output", ()) if once else ():
                kept = [each for each in found.get(output.name, ()) if each[2] == index]
                found[output.name] = [*kept, (output, node, index)]
    return [places[0] for places in found.values() if len(places) == 1]
