"""``lower``: the program of one rank. Collectives are inserted, sizes and parameters made local, names kept.

    Program + Sharding ──► Program in which hidden is [b, s/2, d], q_proj.weight [d/2, d], and q_proj follows an all_gather

The types of every value stay on its node (``meta["types"]``, axis -> type), so that the result can be checked against the rules.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from graphpar.emitted import collectives, expert_rows
from graphpar.ir.batch_sizes import batch_coefficients, is_size
from graphpar.ir.program import Block, Program, TensorInfo, operator_name, value_of
from graphpar.ir.sharding import Decision, Sharding, Types
from graphpar.operators.gradients import block_results, differentiable_nodes
from graphpar.operators.placement import operands_of, results_of
from graphpar.operators.reduce import chooses
from graphpar.operators.rewrite import CallSpecs, on_pieces
from graphpar.operators.table import record_of
from graphpar.operators.transitions import FUNCTIONS, moves
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.passes.sharding.keys import by_node
from graphpar.passes.sharding.pins import POINT
from graphpar.passes.sharding.problem import is_operator
from graphpar.runtime.layout import I, P, R, Shard, local_shape, local_size


def lower(program: Program, sharding: Sharding) -> Program:
    """Return the program of a rank from a prepared one (:data:`graphpar.passes.rank_passes.PREPARING`); biases stay separate."""
    lowered = _Lowering(program, sharding)
    used = {str(node.meta["block"]) for node in program.graph.nodes if node.op == "call_module"}
    blocks = {
        name: replace(block, graph=_Scope(lowered, block.graph).lower()) if name in used else block
        for name, block in program.blocks.items()
    }
    graph = _Scope(lowered, program.graph).lower()
    parameters = {name: lowered.info(name, info) for name, info in program.parameters.items()}
    return program.with_graph(graph, blocks=blocks, parameters=parameters)


class _Lowering:
    def __init__(self, program: Program, sharding: Sharding) -> None:
        self.program, self.sharding = program, sharding
        self.axes = tuple(sharding.degrees)
        self.degrees = sharding.degrees
        self.decisions = by_node(program, sharding)
        self.gradients = differentiable_nodes(program)
        self.pieces: dict[object, Tensor] = {}
        self._signatures: dict[str, tuple[list[Types | None], list[Types]]] = {}

    def info(self, name: str, info: TensorInfo) -> TensorInfo:
        """Return a parameter's description with its local shape."""
        spec = self.sharding.parameters.get(name)
        if spec is None:
            return info
        spec = {axis: kind for axis, kind in spec.items() if axis in self.degrees}
        return replace(
            info, shape=local_shape(info.shape, spec, self.degrees), whole=info.shape, spec=tuple(spec.items())
        )

    def signature(self, block: Block) -> tuple[list[Types | None], list[Types]]:
        """Return the types of a block's inputs (None where an input is no tensor) and results."""
        if block.name not in self._signatures:
            inside = [self.decisions.get(node) for node in block.graph.nodes if node.op == "placeholder"]
            taken = [None if decision is None else decision.results[0] for decision in inside]
            results = [_type_of(self.decisions, result) for result in block_results(block.graph)]
            self._signatures[block.name] = taken, results
        return self._signatures[block.name]

    def local(self, node: fx.Node, types: Types, value: Tensor) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """Return a rank's shape of ``value``, and its batch coefficients."""
        sizes, coefficients = list(value.shape), list(batch_coefficients(node))
        for axis, kind in zip(self.axes, types):
            if not isinstance(kind, Shard):
                continue
            degree, dim = self.degrees[axis], kind.dim
            coefficient = coefficients[dim]
            if coefficient is None:
                sizes[dim] = local_size(int(sizes[dim]), kind, degree)
            else:
                coefficients[dim] = coefficient // degree
                sizes[dim] = sizes[dim] // degree
        return tuple(sizes), tuple(coefficients)


class _Scope:
    """One graph: the root, or a block."""

    def __init__(self, lowering: _Lowering, source: fx.Graph) -> None:
        self.lowering, self.source = lowering, source
        self.axes, self.degrees = lowering.axes, lowering.degrees
        self.decisions = lowering.decisions
        self.new = fx.Graph()
        self.ends: dict[tuple[str, str], fx.Node] = {}
        self.named = {node.name: node for node in source.nodes}
        self.made: dict[fx.Node, fx.Node] = {}
        self.types: dict[fx.Node, Types] = {}
        self.redistributed: dict[tuple[fx.Node, Types], fx.Node] = {}
        self.whole: Types = (R,) * len(self.axes)

    def lower(self) -> fx.Graph:
        """Return the graph of a rank."""
        for node in self.source.nodes:
            if node not in self.made:
                self._lower(node)
        for (node, types), value in self.redistributed.items():
            if P in self.types[node] and P not in types and "model_output" in self.made[node].meta:
                value.meta["model_output"] = self.made[node].meta.pop("model_output")
        remove_dead_code(self.new)
        return self.new

    def _lower(self, node: fx.Node) -> None:
        if node.op == "output":
            self._output(node)
        elif node.op == "call_module":
            self._call(node)
        elif is_operator(node):
            self._operator(node, self.decisions[node])
        elif operator_name(node) == "getitem" and isinstance(value_of(node), Tensor):
            self._item(node)
        elif is_size(node):
            self._size(node)
        else:
            self._keep(node)

    # ---- by kind of node ----

    def _keep(self, node: fx.Node) -> None:
        """Copy inputs, parameters, and values that are no tensors."""
        copy = self.new.node_copy(node, lambda n: self.made[n])
        decision = self.decisions.get(node)
        self._record(node, copy, decision.results[0] if decision is not None else self.whole)
        if isinstance(value_of(node), Tensor):
            self._set_value(copy, node, self.types[node])

    def _item(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        copy = self.new.node_copy(node, lambda n: self.made[n])
        if source.op == "call_module":
            types = self._result_types(source)[int(node.args[1])]  # type: ignore[arg-type]
        elif source in self.decisions:
            types = self.decisions[source].results[int(node.args[1])]  # type: ignore[arg-type]
        else:
            types = self.whole
        self._record(node, copy, types)
        self._set_value(copy, node, types)

    def _size(self, node: fx.Node) -> None:
        """Multiply a size read from a shard to that of the unsharded tensor, as literals in the graph are."""
        copy = self.new.node_copy(node, lambda n: self.made[n])
        self.made[node] = copy
        if operator_name(node) == "sym_size":
            source, dim = node.args
            pieces = 1
            for axis, kind in zip(self.axes, self.types.get(source, self.whole)):  # type: ignore[arg-type]
                if isinstance(kind, Shard) and kind.dim == dim:
                    pieces *= self.degrees[axis]
            if pieces > 1:
                self.made[node] = self.new.call_function(operator.mul, (copy, pieces))
                self.made[node].meta = dict(node.meta)
                copy.meta = dict(copy.meta, val=value_of(node) // pieces)

    def _call(self, node: fx.Node) -> None:
        """Call a block on arguments of the types that it takes."""
        taken, _ = self.lowering.signature(self.lowering.program.block_of(node))
        arguments = []
        for argument, types in zip(node.args, taken):
            assert isinstance(argument, fx.Node)
            arguments.append(self.made[argument] if types is None else self._as(argument, types))
        call = self.new.call_module(str(node.target), tuple(arguments))
        call.meta = dict(node.meta)
        results = self._result_types(node)
        self._record(node, call, results[0])
        if isinstance(value_of(node), Tensor):
            self._set_value(call, node, results[0])

    def _result_types(self, call: fx.Node) -> list[Types]:
        return self.lowering.signature(self.lowering.program.block_of(call))[1]

    def _output(self, node: fx.Node) -> None:
        decision = self.decisions.get(node)
        required = iter(decision.operands if decision is not None else ())

        def result(argument: fx.Node) -> fx.Node:
            if decision is None or not isinstance(value_of(argument), Tensor):
                return self.made[argument]
            return self._as(argument, next(required))

        self.new.output(fx.map_arg(node.args[0], result))

    def _operator(self, node: fx.Node, decision: Decision) -> None:
        if POINT in node.meta:  # an identity where the user pinned a value
            source = operands_of(node)[0]
            self.made[node] = self._as(source, decision.operands[0])
            self.types[node] = decision.results[0]
            return
        required = iter(decision.operands)

        def operand(argument: fx.Node) -> fx.Node:
            if isinstance(value_of(argument), Tensor):
                types = next(required)
                made = self._as(argument, types)
                return self._agreed(made, types) if chooses(node) else made
            return self.made[argument]

        mapped: Any = fx.map_arg((node.args, dict(node.kwargs)), operand)

        def emit(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            made = self.new.call_function(target, args, kwargs)
            made.meta = {key: item for key, item in node.meta.items() if key != "model_output"}
            return made

        placement = CallSpecs(self.degrees, decision.operands, decision.results, decision.rewrites)
        copy = on_pieces(node, mapped[0], mapped[1], placement, emit)
        copy.meta = dict(node.meta) | {key: item for key, item in copy.meta.items() if key == "val"}
        copy.meta.pop("batch_coefficients", None)
        self._record(node, copy, decision.results[0])
        if isinstance(value_of(node), Tensor):
            self._set_value(copy, node, decision.results[0])
        else:
            copy.meta["val"] = tuple(
                self._empty(node, types, value, index)
                for index, (types, value) in enumerate(zip(decision.results, results_of(node)))
            )

    def _agreed(self, scores: fx.Node, types: Types) -> fx.Node:
        """Return the scores that all ranks choose by where each computes them; those that a collective made are equal already."""
        source = scores
        while record_of(source).free and source.target is not collectives.agree_on:
            source = source.all_input_nodes[0]  # of a part, all that it is a part of
        if "transition" in source.meta and FUNCTIONS[operator_name(source)].forward_collective:
            return scores
        for axis, kind in zip(self.axes, types):
            if kind in (R, I):
                made = self.new.call_function(collectives.agree_on, (scores, axis))
                made.meta = {
                    key: value for key, value in scores.meta.items() if key not in ("origin", "transition", "bias_of")
                }
                scores = made
        return scores

    # ---- transitions ----

    def _as(self, node: fx.Node, types: Types) -> fx.Node:
        """Redistribute ``node`` to ``types``, once for all users that want the same."""
        own = self.types[node]
        if own == types:
            return self.made[node]
        if (node, types) in self.redistributed:
            return self.redistributed[node, types]
        value, now = self.made[node], list(own)
        steps = moves(own, types, differentiable=node in self.lowering.gradients)
        assert steps is not None, (node, own, types)
        for place, step in steps:
            now[place] = step.target
            if step.function is None:
                continue
            axis = self.axes[place]
            function = step.transition.called
            ends = [self._ends(step.offsets, axis)] if step.offsets else []
            options = step.options(value_of(node).shape, self.degrees[axis])
            value = self.new.call_function(function, (value, axis, *ends), options)
            value.meta = {key: node.meta[key] for key in ("module_stack", "source") if key in node.meta}
            if node.op in ("placeholder", "get_attr"):
                value.meta["name"] = node.name if node.op == "get_attr" else str(node.target)
                value.meta.pop("source", None)
            value.meta["types"] = dict(zip(self.axes, now))
            value.meta["origin"] = node
            value.meta["transition"] = (str(step.source), str(step.target))
            self._set_value(value, node, tuple(now))
        self.redistributed[node, types] = value
        return value

    def _ends(self, offsets: str, axis: str) -> fx.Node:
        """Return where the rows of each rank's experts end; computed now, even if the program computes the offsets later."""
        if (offsets, axis) in self.ends:
            return self.ends[offsets, axis]
        source = self.named[offsets]
        pending = [source]
        while pending:
            missing = [node for node in pending[-1].all_input_nodes if node not in self.made]
            if missing:
                pending += missing
            elif (node := pending.pop()) not in self.made:
                self._lower(node)
        ends = self.new.call_function(expert_rows.rank_ends, (self._as(source, self.whole), axis))
        ends.meta = {"module_stack": source.meta.get("module_stack", ()), "name": "ends"}
        self.ends[offsets, axis] = ends
        return ends

    def _record(self, node: fx.Node, copy: fx.Node, types: Types) -> None:
        self.made[node] = copy
        copy.meta["origin"] = node
        if isinstance(value_of(node), Tensor | tuple | list):
            self.types[node] = types
            copy.meta["types"] = dict(zip(self.axes, types))

    def _set_value(self, copy: fx.Node, node: fx.Node, types: Types) -> None:
        """Set the fake value of a rank's shard."""
        value = value_of(node)
        shape, coefficients = self.lowering.local(node, types, value)
        copy.meta["val"] = value if tuple(shape) == tuple(value.shape) else self._piece(value, shape)
        copy.meta.pop("twin", None)
        if "batch_coefficients" in node.meta:
            copy.meta["batch_coefficients"] = coefficients

    def _piece(self, value: Tensor, shape: tuple[Any, ...]) -> Tensor:
        """Return a fake value of ``shape``; equal ones are shared."""
        key = value.dtype, str(shape)
        if key not in self.lowering.pieces:
            self.lowering.pieces[key] = value.new_empty(shape)
        return self.lowering.pieces[key]

    def _empty(self, node: fx.Node, types: Types, value: Tensor, index: int) -> Tensor:
        user = next((u for u in node.users if operator_name(u) == "getitem" and u.args[1] == index), None)
        if user is None:
            return value
        shape, _ = self.lowering.local(user, types, value)
        return value if tuple(shape) == tuple(value.shape) else self._piece(value, shape)


def _type_of(decisions: Mapping[fx.Node, Decision], node: fx.Node) -> Types:
    """Return the types of a value inside a block."""
    if operator_name(node) == "getitem" and node not in decisions:
        maker, index = node.args
        assert isinstance(maker, fx.Node) and isinstance(index, int)
        return decisions[maker].results[index]
    return decisions[node].results[0]
