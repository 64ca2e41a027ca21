"""``share_loss``: the loss of the whole batch as a sum over microbatches.

Each microbatch returns its share of the loss, and the shares add up to exactly what the single-device program computes on the
global batch:

    cross_entropy(mean, ignore_index)   ->  cross_entropy(sum) / valid_labels
    x.mean() over the batch             ->  x.sum() / (rows * n)
    (x * mask).sum() / mask.sum()       ->  (x * mask).sum() / mask_sum

The loss denominators (``valid_labels``, ``rows``, ``mask_sum``) depend on inputs, targets and buffers alone: they are computed once a step
over the whole batch, and are inputs of every microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients, is_size, number_arguments, size_factor
from graphpar.ir.program import (
    Coupling,
    ModelOutput,
    Program,
    ancestors,
    model_outputs,
    named_arguments,
    operator_name,
    set_model_outputs,
    value_of,
)
from graphpar.operators.batch import Additive, Analysis, Coupled, Fixed, Rows
from graphpar.operators.naming import free_name
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer, is_inplace
from graphpar.passes.normalize.reductions import (
    ARITHMETIC,
    MEAN,
    NONE,
    SUM,
    dtype_now,
    elements,
    reduction_place,
    tensor_overload,
    with_reduction,
)
from graphpar.passes.normalize.simplify import remove_dead_code

_aten = torch.ops.aten


def share_loss(program: Program) -> Program:
    """Rewrite the loss to a microbatch's share, and note the operators that mix examples.

    Where the loss (or an output of inference) is no sum over examples, the program stays, with the reason in ``unsplittable``.
    """
    if program.unsplittable is not None:  # the batch runs whole
        return program.with_graph(_with_marks(program, copied(program.graph), None))
    rewriter = _Shares(program)
    couplings = rewriter.rewrite()
    if program.mode != "train" or rewriter.failure is not None:
        graph = _with_marks(program, copied(program.graph), None)
        reason = rewriter.failure or program.unsplittable
        return program.with_graph(graph, couplings=couplings, unsplittable=reason, steady=rewriter.steady)
    counts = rewriter.counts_graph()
    remove_dead_code(_with_marks(program, rewriter.graph, rewriter.analysis))
    return program.with_graph(
        rewriter.graph,
        couplings=couplings,
        steady=rewriter.steady,
        counts=counts,
        count_names=tuple(str(count.target) for count, _ in rewriter.counts),
    )


def _with_marks(program: Program, graph: fx.Graph, analysis: Analysis | None) -> fx.Graph:
    """Mark, in place, the values that the model returns besides the loss; the graph then has no other use for them.

    Args:
        analysis: says how microbatches have parts of them; without one a batch runs whole.
    """
    values = model_outputs(graph)
    set_model_outputs(graph, ())
    needed = ancestors(graph.output_node())
    for name, node in zip(program.returned, values):
        if node is None or node not in needed:
            continue
        state = Fixed() if analysis is None else analysis.states.get(node)
        rows = isinstance(state, Rows) and (state.outer, state.order, state.kind, state.chosen) == (
            1,
            None,
            "values",
            None,
        )
        if rows or isinstance(state, Additive | Fixed):
            sizes, coefficients = value_of(node).shape, batch_coefficients(node)
            known = tuple(1 if c is not None else int(size) for size, c in zip(sizes, coefficients))
            dim = state.dim if isinstance(state, Rows) else None
            found = ModelOutput(name, dim, isinstance(state, Additive), known, tuple(coefficients))
            node.meta["model_output"] = (*node.meta.get("model_output", ()), found)
    return graph


class _Shares:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = copied(program.graph)
        dims = {entry.name: entry.batch_dim for entry in program.inputs}
        self.analysis = Analysis(dims, program.parameters)
        self.counts: list[tuple[fx.Node, fx.Node]] = []  # (placeholder in the program, what it counts)
        self.known: dict[tuple[Any, ...], fx.Node] = {}
        self.failure: str | None = None

    @property
    def steady(self) -> tuple[str, ...]:
        """The buffers that each microbatch writes alike."""
        return tuple(name for name, alike in self.analysis.written.items() if alike)

    def rewrite(self) -> tuple[Coupling, ...]:
        """Rewrite the graph, and return the operators that mix examples."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._finish(node)
            elif self.program.mode != "train" or self._rewritten(node) is None:
                self.analysis.visit(node)
        return tuple(dict.fromkeys(_coupling(state) for state in self.analysis.couplings))

    def _finish(self, output: fx.Node) -> None:
        """Check the result: a sum over examples, or a constant of which each microbatch returns its share."""
        if self.program.mode != "train":
            self._check_outputs(output)
            return
        (loss,) = output.args[0]  # type: ignore[misc, str-unpack]
        assert isinstance(loss, fx.Node)
        state = self.analysis.states[loss]
        if isinstance(state, Fixed):
            with self.graph.inserting_before(output):
                loss = self._scaled(loss, loss)
            output.args = ((loss,), *output.args[1:])
        elif not isinstance(state, Additive):
            reason = _coupling(state) if isinstance(state, Coupled) else "it is not a sum or mean over examples"
            if (divisor := next((each for each in self.analysis.couplings if each.divides), None)) is not None:
                reason = _coupling(divisor)
            self.failure = f"the loss can't be computed a microbatch at a time: {reason}"

    def _check_outputs(self, output: fx.Node) -> None:
        """Check that each output of inference has one row an example, in order: they are concatenated along the batch."""
        for node, entry in zip(output.args[0], self.program.outputs):  # type: ignore[arg-type]
            state = self.analysis.states[node] if isinstance(node, fx.Node) else Fixed()
            rows = isinstance(state, Rows) and (state.outer, state.order, state.kind) == (1, None, "values")
            if not rows and not isinstance(state, Fixed):
                reason = _coupling(state) if isinstance(state, Coupled) else "it is not a row of each example"
                self.failure = f"the output {entry.name!r} can't be computed a microbatch at a time: {reason}"

    # ---- rewriting one operator ----

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Return the node that replaced ``node``; None where it stays."""
        if node.op != "call_function" or is_size(node):
            return None
        name = operator_name(node)
        with self.graph.inserting_before(node):
            self._count_rows_globally(node)
            if reduction_place(node) is not None and any(isinstance(s, Rows) for _, s in self.analysis.operands(node)):
                return self._loss(node)
            if name == "mean" and self._over_batch(node):
                return self._mean(node)
            self._divide_by_global(node)
            if name == "where":
                self._share_chosen(node)
            elif record_of(node).adds and not is_inplace(node):
                self._share_fixed(node, name)
        return None

    def _over_batch(self, node: fx.Node) -> bool:
        """Return whether a mean is taken over the batch dim."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        state = self.analysis.states[source]
        if not isinstance(state, Rows):
            return False
        ndim = value_of(source).ndim
        dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(ndim)
        return state.dim in {dim % ndim for dim in dims}  # type: ignore[union-attr, operator]

    def _mean(self, node: fx.Node) -> fx.Node:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        state = self.analysis.states[source]
        assert isinstance(state, Rows)
        if len(node.args) > 1:
            total = self._new(_aten.sum.dim_IntList, (self._wide(source), *node.args[1:]), dict(node.kwargs), node)
        else:
            total = self._new(_aten.sum.default, (self._wide(source),), dict(node.kwargs), node)
        count = self._rows(elements(source) // elements(node))
        mean = self._quotient(total, count, node)
        if len(node.args) > 1 and value_of(mean).dtype != value_of(node).dtype:
            mean = self._new(_aten.to.dtype, (mean, value_of(node).dtype), {}, node)
        return self._put(node, mean)

    def _quotient(self, total: fx.Node, count: fx.Node, like: fx.Node) -> fx.Node:
        """Return ``total / count``; it is known before the step where ``total`` is."""
        pure = self.analysis.states[total].pure
        quotient = self._new(_aten.div.Tensor, (total, count), {}, like)
        if isinstance(self.analysis.states[quotient], Additive):
            self.analysis.states[quotient] = Additive(pure)
        return quotient

    def _wide(self, source: fx.Node) -> fx.Node:
        """Cast float16 to float32, in which a sum does not overflow where the mean would not."""
        if value_of(source).dtype is not torch.float16:
            return source
        return self._new(_aten.to.dtype, (source, torch.float32), {}, source)

    def _loss(self, node: fx.Node) -> fx.Node | None:
        """Replace a loss with ``reduction=mean`` by its sum over the loss denominator of the whole batch."""
        place = reduction_place(node)
        assert place is not None
        given = list(named_arguments(node).values())
        reduction = given[place]
        if reduction == NONE:
            return None
        each = with_reduction(self.graph, node, given, place, NONE)
        state = self.analysis.state_of(each)
        if not isinstance(state, Rows):
            self.graph.erase_node(each)
            return None
        self.analysis.states[each] = state
        source = given[0]
        assert isinstance(source, fx.Node)
        given[0] = self._wide(source)
        total = with_reduction(self.graph, node, given, place, SUM)
        self.analysis.states[total] = Additive(state.pure)
        if reduction == MEAN:
            labels = record_of(node).kind is Kind.CLASS_LOSS and not value_of(node.args[1]).is_floating_point()  # type: ignore[arg-type]
            divisor = self._valid(node) if labels else self._rows(elements(each))
            total = self._quotient(total, divisor, node)
        self.graph.erase_node(each)
        return self._put(node, total)

    def _valid(self, node: fx.Node) -> fx.Node:
        """Return the denominator of a mean class loss: how many labels are not ignored, or the sum of their weights."""
        target = node.args[1]
        assert isinstance(target, fx.Node)
        given = named_arguments(node)
        weight, ignored = given["weight"], given["ignore_index"]
        key = ("valid", target, weight, ignored)
        if key not in self.known:
            valid = self._new(_aten.ne.Scalar, (target, ignored), {}, target)
            if isinstance(weight, fx.Node):
                flat = self._new(_aten.mul.Tensor, (target, valid), {}, target)
                column = self._new(_aten.unsqueeze.default, (weight, -1), {}, node)
                chosen = self._new(_aten.embedding.default, (column, flat), {}, target)
                weights = self._new(_aten.squeeze.dim, (chosen, -1), {}, target)
                valid = self._new(_aten.mul.Tensor, (weights, valid), {}, target)
            total = self._new(_aten.sum.default, (valid,), {}, node)
            label = _input_behind(target)
            self.known[key] = self._global_value(total, f"valid_{label}" if label else "valid_labels") or total
        return self.known[key]

    # ---- batch sizes as numbers ----

    def _count_rows_globally(self, node: fx.Node) -> None:
        """Make ``x / batch`` divide by the rows of the whole batch."""
        if record_of(node).kind is Kind.FACTORY and not any(c is not None for c in batch_coefficients(node)):
            return  # a tensor that holds a batch size is a sum over examples like any other
        for place, size in list(number_arguments(node)):
            number = None if size_factor(size) == 0 else self._global_number(size)
            if number is None:
                continue
            if isinstance(place, int):
                node.update_arg(place, number)
            else:
                node.update_kwarg(place, number)
            target = node.target
            tensor_overload(node)
            if dtype_now(node) != value_of(node).dtype:  # undo; the analysis will report a coupling
                node.target = target
                node.replace_input_with(number, size)

    def _global_number(self, size: fx.Node) -> fx.Node | None:
        """Repeat arithmetic on the batch size with the count of all rows; None where that is not possible."""
        factor = size_factor(size)
        if factor:
            return self._rows(factor)
        if size.target is torch.sym_float:
            return self._global_number(size.args[0])  # type: ignore[arg-type]
        if size.target not in ARITHMETIC or len(size.args) != 2:
            return None
        example = self._batch_input()
        operands: list[fx.Node] = []
        for argument in size.args:
            if isinstance(argument, fx.Node) and size_factor(argument) != 0:
                found = self._global_number(argument)
            else:
                number = value_of(argument) if isinstance(argument, fx.Node) else argument
                found = self.graph.call_function(_aten.scalar_tensor.default, (number,), {"dtype": torch.float32})
                found.meta = self._scalar_meta()
                self.analysis.states[found] = Fixed()
            if found is None:
                return None
            operands.append(found)
        return self._new(ARITHMETIC[size.target], tuple(operands), {}, example)  # type: ignore[index]

    # ---- sums over examples that are known before the step ----

    def _divide_by_global(self, node: fx.Node) -> None:
        """Replace sums over examples that are known before the step by the global sums, unless ``node`` only adds them up."""
        states = self.analysis.states
        pure = [
            argument
            for argument in node.all_input_nodes
            if isinstance(state := states[argument], Additive) and state.pure and isinstance(value_of(argument), Tensor)
        ]
        if not pure or isinstance(self.analysis.state_of(node), Additive):
            return
        for argument in pure:
            replacement = self._global_value(argument, _count_name(argument))
            if replacement is not None:
                node.replace_input_with(argument, replacement)

    def _global_value(self, node: fx.Node, name: str) -> fx.Node | None:
        """Return the pure sum ``node`` over the whole batch; None where it depends on what a step changes, or on other counts."""
        state = self.analysis.states[node]
        if not isinstance(state, Additive) or not state.pure:
            reason = "the loss divides by a sum that depends on parameters, on a buffer that is written, or on another such sum"
            self.analysis.couplings.append(Coupled(reason, node, divides=True))
            return None
        if ("global", node) not in self.known:
            counted = any(count in ancestors(node) for count, _ in self.counts)
            self.known[("global", node)] = self._rebuilt(node) if counted else self._global(node, name)
        return self.known[("global", node)]

    def _rebuilt(self, node: fx.Node) -> fx.Node:
        """Repeat a linear function of sums, some of them divided by counts, on the global sums."""
        replacements: dict[fx.Node, fx.Node] = {}
        for argument in node.all_input_nodes:
            if isinstance(self.analysis.states[argument], Additive) and isinstance(value_of(argument), Tensor):
                replacements[argument] = self._global_value(argument, _count_name(argument)) or argument
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: replacements.get(n, n))
        return self._new(node.target, args, kwargs, node)

    def _share_fixed(self, node: fx.Node, name: str) -> None:
        """In ``sum over examples + constant``, let each microbatch add its share of the constant."""
        parts = node.args[0] if name in ("stack", "cat") else node.args[:2]
        assert isinstance(parts, list | tuple)
        states = [self.analysis.states[part] if isinstance(part, fx.Node) else Fixed() for part in parts]
        sums = [state for state in states if isinstance(state, Additive)]
        if not sums or not all(isinstance(state, Additive | Fixed) for state in states) or len(sums) == len(states):
            return
        like = next(part for part in parts if isinstance(part, fx.Node))
        shares = [self._scaled(part, like) if isinstance(state, Fixed) else part for part, state in zip(parts, states)]
        if name in ("stack", "cat"):
            node.args = (shares, *node.args[1:])
            return
        node.args = (*shares, *node.args[2:])
        tensor_overload(node)
        if name == "rsub":
            first, second, *rest = node.args
            node.target, node.args = _aten.sub.Tensor, (second, first)
            if rest and rest[0] != 1:  # other - alpha * self
                node.kwargs = {"alpha": rest[0]}

    def _share_chosen(self, node: fx.Node) -> None:
        """In ``where(known before the step, sum over examples, constant)``, let each microbatch have its share of the constant."""
        states = [self.analysis.states[part] if isinstance(part, fx.Node) else Fixed() for part in node.args]
        if isinstance(states[0], Fixed) and sorted(map(type, states[1:]), key=str) == [Additive, Fixed]:
            place = 1 + isinstance(states[2], Fixed)
            share = self._scaled(node.args[place], node)
            if value_of(share).dtype != value_of(node).dtype:
                share = self._new(_aten.to.dtype, (share, value_of(node).dtype), {}, node)
            node.args, node.target = (*node.args[:place], share, *node.args[place + 1 :]), _aten.where.self

    def _scaled(self, fixed: Any, like: fx.Node) -> fx.Node:
        """Return ``fixed`` times this microbatch's share of the rows."""
        part = self._new(_aten.div.Tensor, (self._row_count(), self._rows(1)), {}, like)
        self.analysis.states[part] = Additive(pure=False)
        if isinstance(fixed, fx.Node):
            shared = self._new(_aten.mul.Tensor, (fixed, part), {}, like)
        else:
            shared = self._new(_aten.mul.Scalar, (part, fixed), {}, like)
        self.analysis.states[shared] = Additive(pure=False)
        return shared

    # ---- counts ----

    def _rows(self, factor: int) -> fx.Node:
        """Return the rows of the global batch times ``factor``."""
        if ("rows",) not in self.known:
            self.known[("rows",)] = self._global(self._row_count(), "rows")
        rows = self.known[("rows",)]
        return rows if factor == 1 else self._new(_aten.mul.Tensor, (rows, factor), {}, self._batch_input())

    def _row_count(self) -> fx.Node:
        example = self._batch_input()
        dim = self.program.input(str(example.target)).batch_dim
        size = self.graph.call_function(_aten.sym_size.int, (example, dim))
        size.meta = {"val": value_of(example).shape[dim], "module_stack": (), "batch_factor": 1}
        count = self.graph.call_function(_aten.scalar_tensor.default, (size,), {"dtype": torch.float32})
        count.meta = self._scalar_meta()
        self.analysis.states[size] = self.analysis.states[count] = Additive()
        return count

    def _scalar_meta(self) -> dict[str, Any]:
        with value_of(self._batch_input()).fake_mode:
            return {"val": torch.empty((), dtype=torch.float32), "module_stack": ()}

    def _batch_input(self) -> fx.Node:
        """Return the input whose rows are counted: a target where there is one, since the last stage has it."""
        batched = [entry for entry in self.program.inputs if entry.batch_dim is not None]
        chosen = next((entry for entry in batched if entry.role == "target"), batched[0])
        labels = next((entry for entry in batched if "label" in entry.name), chosen)
        found: fx.Node = next(n for n in self.graph.nodes if n.op == "placeholder" and n.target == labels.name)
        return found

    def _global(self, node: fx.Node, name: str) -> fx.Node:
        """Add a placeholder for the global value of ``node``, a sum over examples that is known before the step."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(placeholders[-1]):
            count = self.graph.placeholder(free_name(name, {str(n.target) for n in placeholders}))
        count.meta = {"val": value_of(node), "module_stack": ()}
        if not self.program.symbolic:
            count.meta["batch_coefficients"] = (None,) * value_of(node).ndim
        self.analysis.states[count] = Fixed(pure=False)  # known before the step, but not when other counts are computed
        self.counts.append((count, node))
        return count

    def counts_graph(self) -> fx.Graph | None:
        """Return the denominators as a graph of inputs, constants and buffers; run a microbatch at a time, its results add up."""
        if not self.counts:
            return None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        needed = ancestors(*(node for _, node in self.counts))
        for node in self.graph.nodes:
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for count, node in self.counts:
            copies[node].meta["name"] = str(count.target)
        graph.output(tuple(copies[node] for _, node in self.counts))
        return graph

    # ---- building nodes ----

    def _new(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        node = infer(self.graph.call_function(target, args, kwargs), like)
        self.analysis.visit(node)
        return node

    def _put(self, old: fx.Node, new: fx.Node) -> fx.Node:
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        return new


def _coupling(state: Coupled) -> Coupling:
    if state.node is None:
        return Coupling(state.reason)
    source, stack = state.node.meta.get("source"), state.node.meta.get("module_stack", ())
    return Coupling(state.reason, stack[-1][0] if stack else "", f"{source.file}:{source.line}" if source else "")


def _input_behind(node: fx.Node) -> str | None:
    """Return the name of the input that ``node`` was made of, where that is a single one."""
    inputs = [str(ancestor.target) for ancestor in ancestors(node) if ancestor.op == "placeholder"]
    return inputs[0] if len(inputs) == 1 else None


def _count_name(node: fx.Node) -> str:
    """Name a count after the user's variable, else after its input."""
    source = node.meta.get("source")
    if source is not None and source.targets and len(source.targets) == 1 and source.targets[0] != "loss":
        return str(source.targets[0])
    behind = _input_behind(node)
    return f"{behind}_sum" if behind else "total"
