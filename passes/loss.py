"""``share_loss``: the loss of the whole batch as a sum over microbatches.

The program's loss is rewritten so that each microbatch returns its share, and the shares add up to exactly what the
single-device program computes on the global batch:

    cross_entropy(mean, ignore_index)   ->  cross_entropy(sum) / valid_labels
    x.mean() over the batch             ->  x.sum() / (rows * n)
    (x * mask).sum() / mask.sum()       ->  (x * mask).sum() / mask_sum

The denominators (``valid_labels``, ``rows``, ``mask_sum``) depend on inputs and targets alone: they are computed once a
step over the whole batch and given to every microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphpar.batch import Additive, Analysis, Coupled, Fixed, Rows
from graphpar.passes.functional import infer
from graphpar.passes.simplify import remove_dead_code
from graphpar.program import Program, batch_coefficients, operator_name, value_of

_aten = torch.ops.aten
_MEAN = 1
_SUM = 2

# Losses with a `reduction` argument, and where it stands.
_REDUCTION_AT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4, "kl_div": 2, "soft_margin_loss": 2, "cross_entropy_loss": 3, "nll_loss": 3,
    "nll_loss_nd": 3, "nll_loss2d": 3,
}  # fmt: skip
_CLASS_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}


def share_loss(program: Program) -> Program:
    """Program -> Program whose loss is a microbatch's share; says what mixes examples."""
    rewriter = _Shares(program)
    couplings = rewriter.rewrite()
    if program.mode != "train":
        return program.with_graph(program.graph, couplings=couplings)
    if rewriter.failure is not None:
        return program.with_graph(program.graph, couplings=couplings, unsplittable=rewriter.failure)
    counts = rewriter.counts_graph()
    remove_dead_code(rewriter.graph)
    return program.with_graph(
        rewriter.graph,
        couplings=couplings,
        counts=counts,
        count_names=tuple(str(count.target) for count, _ in rewriter.counts),
    )


class _Shares:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(program.graph, copies))
        dims = {entry.name: entry.batch_dim for entry in program.inputs}
        self.analysis = Analysis(dims, program.parameters)
        self.counts: list[tuple[fx.Node, fx.Node]] = []  # (placeholder in the program, what it counts)
        self.known: dict[tuple[Any, ...], fx.Node] = {}
        self.failure: str | None = None

    def rewrite(self) -> tuple[str, ...]:
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._finish(node)
                continue
            replaced = self._rewritten(node)
            if replaced is None:
                self.analysis.visit(node)
        return tuple(dict.fromkeys(_described(state) for state in self.analysis.couplings))

    def _finish(self, output: fx.Node) -> None:
        if self.program.mode != "train":
            return
        (loss,) = output.args[0]  # type: ignore[misc]
        assert isinstance(loss, fx.Node)
        state = self.analysis.states[loss]
        if isinstance(state, Fixed):
            with self.graph.inserting_before(output):
                loss = self._scaled(loss)
            output.args = ((loss,),)
        elif not isinstance(state, Additive):
            reason = state.reason if isinstance(state, Coupled) else "it is no sum or mean over examples"
            self.failure = f"the loss can't be computed a microbatch at a time: {reason}"

    # ---- rewriting one operator ----

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """The node that took ``node``'s place, or None where it stands as it is."""
        if node.op != "call_function":
            return None
        name = operator_name(node)
        states = self.analysis.states
        with self.graph.inserting_before(node):
            if name in _REDUCTION_AT and any(isinstance(states[a], Rows) for a in node.all_input_nodes):
                return self._loss(node, name)
            if name == "mean" and self._over_batch(node):
                return self._mean(node)
            self._divide_by_global(node, name)
            if name in ("add", "sub") and len(node.all_input_nodes) == 2:
                self._share_fixed(node)
        return None

    def _over_batch(self, node: fx.Node) -> bool:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        state = self.analysis.states[source]
        if not isinstance(state, Rows) or state.order is not None:
            return False
        ndim = value_of(source).ndim
        dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(ndim)
        return state.dim in {dim % ndim for dim in dims}  # type: ignore[union-attr, operator]

    def _mean(self, node: fx.Node) -> fx.Node:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = _elements(source), _elements(node)
        if len(node.args) > 1:
            total = self._new(_aten.sum.dim_IntList, node.args, {}, node)
        else:
            total = self._new(_aten.sum.default, (source,), {}, node)
        return self._put(node, self._new(_aten.div.Tensor, (total, self._rows(before // after)), {}, node))

    def _loss(self, node: fx.Node, name: str) -> fx.Node | None:
        position = _REDUCTION_AT[name]
        reduction = node.args[position] if len(node.args) > position else node.kwargs.get("reduction", _MEAN)
        if reduction == 0:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            state = self.analysis._located(node, [(source, self.analysis.states[source])], False)
            self.analysis.states[node] = state
            return node
        if reduction == _SUM:
            self.analysis.states[node] = Additive(pure=False)
            return node
        args = [*node.args, *_defaults(node)[len(node.args) : position + 1]]
        args[position] = _SUM
        total = self._new(node.target, tuple(args), dict(node.kwargs), node, state=Additive(pure=False))
        if name in _CLASS_LOSSES:
            divisor = self._valid(node, name)
        else:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            divisor = self._rows(_elements(source))
        return self._put(node, self._new(_aten.div.Tensor, (total, divisor), {}, node))

    def _valid(self, node: fx.Node, name: str) -> fx.Node:
        """The denominator of a mean class loss: how many labels are not ignored, or the sum of their weights."""
        target = node.args[1]
        assert isinstance(target, fx.Node)
        given = dict(zip(["input", "target", "weight", "reduction", "ignore_index"], node.args)) | dict(node.kwargs)
        weight, ignored = given.get("weight"), given.get("ignore_index", -100)
        if value_of(target).is_floating_point():  # class probabilities: one row a label
            return self._rows(_elements(target) // int(value_of(target).shape[1]))
        key = ("valid", target, weight, ignored)
        if key not in self.known:
            valid = self._new(_aten.ne.Scalar, (target, ignored), {}, node)
            if isinstance(weight, fx.Node):
                flat = self._new(_aten.mul.Tensor, (target, valid), {}, node)
                chosen = self._new(_aten.embedding.default, (self._column(weight, node), flat), {}, node)
                valid = self._new(_aten.mul.Tensor, (self._new(_aten.squeeze.dim, (chosen, -1), {}, node), valid), {}, node)
            total = self._new(_aten.sum.default, (valid,), {}, node)
            label = _input_behind(target)
            self.known[key] = self._global(total, f"valid_{label}" if label else "valid_labels")
        return self.known[key]

    def _column(self, weight: fx.Node, like: fx.Node) -> fx.Node:
        return self._new(_aten.unsqueeze.default, (weight, -1), {}, like)

    def _divide_by_global(self, node: fx.Node, name: str) -> None:
        """A sum over examples that is known before the step stands for the global sum wherever it is not just added up."""
        additive = [a for a in node.all_input_nodes if isinstance(self.analysis.states[a], Additive)]
        pure = [a for a in additive if self.analysis.states[a].pure and self._is_number(a, node)]
        if not pure or _keeps_sums(node, name, self.analysis):
            return
        for argument in pure:
            if ("global", argument) not in self.known:
                self.known[("global", argument)] = self._global(argument, _count_name(argument))
            replacement = self.known[("global", argument)]
            node.replace_input_with(argument, replacement)
        _tensor_overload(node)

    def _is_number(self, argument: fx.Node, user: fx.Node) -> bool:
        """Whether a batch size is used as a number here, and not as a size."""
        if isinstance(value_of(argument), Tensor):
            return True
        return isinstance(user.target, torch._ops.OpOverload) and operator_name(user) in ("div", "mul", "true_divide")

    def _share_fixed(self, node: fx.Node) -> None:
        """sum over examples + constant: each microbatch adds its share of the constant."""
        first, second = node.all_input_nodes
        states = self.analysis.states
        for fixed, other in ((first, second), (second, first)):
            if isinstance(states[fixed], Fixed) and isinstance(states[other], Additive):
                node.replace_input_with(fixed, self._scaled(fixed))

    def _scaled(self, fixed: fx.Node) -> fx.Node:
        """``fixed`` times this microbatch's part of the rows."""
        part = self._new(_aten.div.Tensor, (self._row_count(fixed), self._rows(1)), {}, fixed)
        self.analysis.states[part] = Additive()
        return self._new(_aten.mul.Tensor, (fixed, part), {}, fixed, state=Additive(pure=False))

    # ---- counts ----

    def _rows(self, factor: int) -> fx.Node:
        """rows of the global batch times ``factor``."""
        example = self._batch_input()
        if "rows" not in self.known:
            self.known["rows"] = self._global(self._row_count(example), "rows")  # type: ignore[index]
        rows = self.known["rows"]  # type: ignore[index]
        if factor == 1:
            return rows
        return self._new(_aten.mul.Tensor, (rows, factor), {}, example)

    def _row_count(self, like: fx.Node) -> fx.Node:
        example = self._batch_input()
        dim = self.program.input(str(example.target)).batch_dim
        size = self.graph.call_function(_aten.sym_size.int, (example, dim))
        size.meta = {"val": value_of(example).shape[dim], "module_stack": ()}
        count = self.graph.call_function(_aten.scalar_tensor.default, (size,), {"dtype": torch.float32})
        with value_of(example).fake_mode:
            count.meta = {"val": torch.empty((), dtype=torch.float32), "module_stack": ()}
        self.analysis.states[size] = self.analysis.states[count] = Additive()
        return count

    def _batch_input(self) -> fx.Node:
        """The input that counts rows: a target where there is one, so that it is at hand where the loss is."""
        batched = [entry for entry in self.program.inputs if entry.batch_dim is not None]
        chosen = next((entry for entry in batched if entry.role == "target"), batched[0])
        labels = next((entry for entry in batched if "label" in entry.name), chosen)
        return next(n for n in self.graph.nodes if n.op == "placeholder" and n.target == labels.name)

    def _global(self, node: fx.Node, name: str) -> fx.Node:
        """A placeholder for the global value of ``node``, a sum over examples that is known before the step."""
        taken = {str(n.target) for n in self.graph.nodes if n.op == "placeholder"}
        unique, suffix = name, 2
        while unique in taken:
            unique, suffix = f"{name}_{suffix}", suffix + 1
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(placeholders[-1]):
            count = self.graph.placeholder(unique)
        value = value_of(node)
        if not isinstance(value, Tensor):
            with value_of(self._batch_input()).fake_mode:
                value = torch.empty((), dtype=torch.float32)
        count.meta = {"val": value, "module_stack": ()}
        if not self.program.symbolic:
            count.meta["batch_coefficients"] = (None,) * value.ndim
        self.analysis.states[count] = Fixed()
        self.counts.append((count, node))
        return count

    def counts_graph(self) -> fx.Graph | None:
        """The denominators as a graph of inputs and constants; run a microbatch at a time, its results add up."""
        if not self.counts:
            return None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        needed: set[fx.Node] = set()
        pending = [node for _, node in self.counts]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        for node in self.graph.nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for _, node in self.counts))
        return graph

    # ---- building nodes ----

    def _new(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, state: Any = None
    ) -> fx.Node:
        node = infer(self.graph.call_function(target, args, kwargs), like)
        if state is None:
            self.analysis.visit(node)
        else:
            self.analysis.states[node] = state
        return node

    def _put(self, old: fx.Node, new: fx.Node) -> fx.Node:
        self.analysis.states[new] = Additive(pure=False)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        return new


def _described(state: Coupled) -> str:
    node = state.node
    if node is None:
        return state.reason
    source, stack = node.meta.get("source"), node.meta.get("module_stack", ())
    path = stack[-1][0] if stack else ""
    place = ", ".join(part for part in (path, f"{source.file}:{source.line}" if source else "") if part)
    return f"{state.reason} ({place})" if place else state.reason


def _elements(node: fx.Node) -> int:
    """Elements an example: the size of ``node`` without the batch factor (its coefficient stays)."""
    count = 1
    for size, coefficient in zip(value_of(node).shape, batch_coefficients(node)):
        count *= int(size) if coefficient is None else coefficient
    return count


def _defaults(node: fx.Node) -> list[Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    return [argument.default_value if argument.has_default_value() else None for argument in node.target._schema.arguments]


def _input_behind(node: fx.Node) -> str | None:
    """The one input that ``node`` was made of, if it is one."""
    seen: set[fx.Node] = set()
    pending, inputs = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder":
            inputs.add(str(current.target))
        pending.extend(current.all_input_nodes)
    return inputs.pop() if len(inputs) == 1 else None


def _count_name(node: fx.Node) -> str:
    source = node.meta.get("source")
    if source is not None and source.targets and len(source.targets) == 1 and source.targets[0] != "loss":
        return str(source.targets[0])
    behind = _input_behind(node)
    return f"{behind}_sum" if behind else "total"


def _keeps_sums(node: fx.Node, name: str, analysis: Analysis) -> bool:
    """Whether ``node`` only adds up (or scales by a constant), so that a sum over examples stays one."""
    probe = analysis._state(node)
    numerator_only = name != "div" or not _is_divisor(node, analysis)
    return isinstance(probe, Additive) and probe.pure and numerator_only


def _is_divisor(node: fx.Node, analysis: Analysis) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node) and isinstance(analysis.states[node.args[1]], Additive)


def _tensor_overload(node: fx.Node) -> None:
    """``div.Scalar`` by what is now a tensor is ``div.Tensor``."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname == "Scalar":
        packet = getattr(_aten, operator_name(node))
        if hasattr(packet, "Tensor"):
            node.target = packet.Tensor
