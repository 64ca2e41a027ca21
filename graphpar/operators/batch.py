"""How values depend on the batch: are examples independent, and what is a sum over them?

Every value of a program gets a state (:mod:`graphpar.operators.batch_states`), from the states of its operands and one line in a table
(:mod:`graphpar.operators.batch_tables`): ``ALONG`` names the dims that an operator mixes. Cutting the batch is exact as long as the
batch lies along none of them. Sorting the rows (mixture-of-experts) gives them an ``order``, which must be undone by its
inverse. An operator without a line
is tried (:mod:`graphpar.operators.batch_probe`). What nothing proves to be independent counts as mixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, is_of_torch, operator_name, value_of
from graphpar.operators.batch_probe import probe, sums_gradients
from graphpar.operators.batch_rules import SPECIAL
from graphpar.operators.batch_states import (
    Additive,
    Coupled,
    Fixed,
    Layout,
    Operands,
    Rows,
    State,
    batch_dims_of,
    first_value,
    gives_dtype_only,
    is_pointwise,
    is_size,
    number_arguments,
    result_coefficients,
    size_factor,
    unknown_coefficient,
    unknown_dims,
)
from graphpar.operators.batch_tables import ALONG, FACTORIES, KEEPS_NUMBERS, LINEAR, MOVES, SAME_DIM, SUMS
from graphpar.operators.placement import operands_of
from graphpar.operators.rules import rule_of


class Analysis:
    """Computes the state of each node, in order. ``states`` may be overridden between nodes (the loss pass does)."""

    def __init__(self, batch_inputs: dict[str, int | None], parameters: Iterable[str]) -> None:
        self.batch_inputs = batch_inputs
        self.parameters = set(parameters)
        self.states: dict[fx.Node, State] = {}
        self.couplings: list[Coupled] = []

    def visit(self, node: fx.Node) -> State:
        """The state of ``node``. An operator that mixes examples, but gives a row for each, is noted and passed over."""
        state = self._checked(node, self._state(node))
        if isinstance(state, Coupled) and state.node is node:
            self.couplings.append(state)
            dims, coefficients = batch_dims_of(node), result_coefficients(node)
            if len(dims) == 1 and not unknown_dims(node):
                state = Rows(dims[0], 1, coefficients[dims[0]] or 1, pure=False)
        self.states[node] = state
        return state

    def state_of(self, node: fx.Node) -> State:
        """The state that ``visit`` would give, without noting it."""
        return self._checked(node, self._state(node))

    def operands(self, node: fx.Node) -> Operands:
        return [(argument, self.states[argument]) for argument in node.all_input_nodes]

    def _checked(self, node: fx.Node, state: State) -> State:
        """``state``, unless the result's shape or what the rows hold speaks against it."""
        name = operator_name(node)
        if node.op != "call_function" or isinstance(state, Coupled) or is_size(node):
            return state
        if isinstance(state, Additive) and batch_dims_of(node):
            return Coupled(f"{name} spreads a sum over examples over the examples", node)
        if unknown_dims(node) and not (isinstance(state, Rows) and state.chosen is not None):
            return Coupled(f"{name} gives a size that depends on values of several examples", node)
        numbers = [s for _, s in self.operands(node) if isinstance(s, Rows) and s.kind != "values"]
        if numbers and name not in KEEPS_NUMBERS | FACTORIES:
            return Coupled(f"{name} computes with the rows' numbers", node)
        written = self._written_buffer(node)
        return state if written is None else self._updated(node, written, state)

    # ---- by kind of node ----

    def _state(self, node: fx.Node) -> State:
        if node.op == "placeholder":
            dim = self.batch_inputs.get(str(node.target))
            return Fixed() if dim is None else Rows(dim % value_of(node).ndim)
        if node.op == "get_attr":
            written = any(self._written_buffer(user) is node for user in node.users)
            return Fixed(pure=str(node.target) not in self.parameters and not written)
        operands = self.operands(node)
        if gives_dtype_only(node):
            operands = operands[:1]
        # The second operand's values play no part.
        shaped = operator_name(node) in ("expand_as", "view_as", "reshape_as")
        pure = all(state.pure for _, state in (operands[:1] if shaped else operands))
        coupled = next((state for _, state in operands if isinstance(state, Coupled)), None)
        if coupled is not None:
            return coupled
        if is_size(node):
            return Fixed() if size_factor(node) == 0 else Additive()
        tensors: Operands = [
            (a, s) for a, s in operands if not isinstance(s, Fixed) and isinstance(value_of(a), Tensor | list | tuple)
        ]
        numbers = [argument for _, argument in number_arguments(node) if size_factor(argument) != 0]
        if numbers or not tensors:
            return self._sized(node, numbers, bool(tensors), pure)
        return self._moving(node, tensors, pure)

    def _sized(self, node: fx.Node, numbers: list[fx.Node], moving: bool, pure: bool) -> State:
        """An operator that uses the batch size to make a tensor, or as a number."""
        name, dims = operator_name(node), batch_dims_of(node)
        if numbers:
            filled = name in ("scalar_tensor", "full", "new_full", "full_like") and not dims and not moving
            if filled and len(numbers) == 1 and size_factor(numbers[0]) is not None:
                return Additive(pure)
            return Coupled(f"{name} uses the batch size as a number", node)
        if not dims:
            if not pure and not moving and not sums_gradients(node):
                return Coupled(f"{name} has a backward that is not linear in the gradient", node)
            return Fixed(pure)
        coefficient = result_coefficients(node)[dims[0]] or 1
        if name == "arange" and len(dims) == 1:
            start, step = node.args[0] if len(node.args) > 1 else 0, node.args[2] if len(node.args) > 2 else 1
            if start == 0 and step == 1:
                return Rows(0, 1, coefficient, pure, "position")
            if start == 0 and isinstance(step, int) and coefficient == 1:
                return Rows(0, 1, 1, pure, "begins", divided=step)
            return Coupled(f"{name} numbers the rows", node)
        if name in FACTORIES | {"expand", "broadcast_to", "expand_as", "repeat"} and len(dims) == 1:
            return Rows(dims[0], 1, coefficient, pure)
        return Coupled(f"{name} uses the batch size as a number", node)

    def _moving(self, node: fx.Node, tensors: Operands, pure: bool) -> State:
        name = operator_name(node)
        if name in FACTORIES and name != "scalar_tensor":
            return self._made_like(node, pure)
        special = SPECIAL.get(name)
        found = special(node, self, pure) if special is not None else None
        if found is not None:
            return found
        states = [state for _, state in tensors]
        if any(isinstance(state, Layout) for state in states):
            return self._layout(node, name, states, pure)
        if any(isinstance(state, Additive) for state in states):
            return self._additive(node, name, pure)
        return self._rows(node, name, tensors, pure)

    def _made_like(self, node: fx.Node, pure: bool) -> State:
        """``new_zeros`` and ``zeros_like`` take the dtype, and perhaps the shape; values are one number."""
        dims = batch_dims_of(node)
        filled = [
            a
            for a in node.all_input_nodes[1:]
            if isinstance(value_of(a), Tensor) and not isinstance(self.states[a], Fixed)
        ]
        if len(dims) > 1 or filled:
            return Coupled(f"{operator_name(node)} mixes examples", node)
        first = self.states[node.all_input_nodes[0]]
        if not dims:
            return (
                Fixed()
                if not unknown_dims(node) or not isinstance(first, Rows)
                else replace(first, kind="values", pure=True)
            )
        if isinstance(first, Rows) and batch_coefficients(node) == batch_coefficients(node.all_input_nodes[0]):
            return replace(first, kind="values", divided=1, pure=True)
        return Rows(dims[0], 1, result_coefficients(node)[dims[0]] or 1)

    def _layout(self, node: fx.Node, name: str, states: list[State], pure: bool) -> State:
        orders = {state.order for state in states if isinstance(state, Layout | Rows)}
        if len(orders) == 1 and None not in orders:
            (order,) = orders
            assert order is not None
            rows = [state for state in states if isinstance(state, Rows)]
            if not rows:
                return Layout(order, pure)
            if "grouped_mm" in name and rows[0].dim == 0:
                return replace(rows[0], pure=pure)
        return Coupled(f"{name} mixes rows of different groups", node)

    def _additive(self, node: fx.Node, name: str, pure: bool) -> State:
        """Sums stay sums where the operator is linear in them: one sum among fixed values, or only sums added up."""
        used: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), used.append)
        states = [self.states[argument] for argument in used if isinstance(value_of(argument), Tensor | list | tuple)]
        sums = [state for state in states if isinstance(state, Additive)]
        rest = [state for state in states if not isinstance(state, Additive | Fixed)]
        value = value_of(node)
        rounds = bool(node.kwargs.get("rounding_mode")) or (
            name == "to" and isinstance(value, Tensor) and not value.is_floating_point()
        )
        if not rest and not rounds:
            divisor = (
                name == "div" and isinstance(node.args[1], fx.Node) and isinstance(self.states[node.args[1]], Additive)
            )
            if name in LINEAR and len(sums) == 1 and not divisor and (name not in SUMS or len(states) == 1):
                return Additive(pure)
            literals = [a for a in node.args[:2] if isinstance(a, int | float)] if name in ("add", "sub") else []
            if name in SUMS and len(sums) == len(states) and not literals:
                return Additive(pure)
        return Coupled(f"{name} is not additive over examples", node)

    def _rows(self, node: fx.Node, name: str, tensors: Operands, pure: bool) -> State:
        if name == "getitem" or name in MOVES or is_pointwise(node):
            return self.located(node, tensors, pure)
        if name in ("max", "min") and len(node.args) > 1 and isinstance(node.args[1], fx.Node):  # of two tensors
            return self.located(node, tensors, pure)
        if name not in ALONG:
            found = self._by_rule(node, tensors, pure) or probe(node, tensors, pure)
            return found or Coupled(f"graphpar can't tell whether {name} mixes examples", node)
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return Coupled(f"{name} of a list", node)
        own = self.states[first]
        for argument, state in tensors:
            value = value_of(argument)
            mixed = (
                {dim % value.ndim for dim in ALONG[name](node, value)} if argument is first and value.ndim else set()
            )
            if name == "scaled_dot_product_attention" and argument is not first:
                mixed = {value.ndim - 2, value.ndim - 1}
            if isinstance(state, Rows) and state.dim in mixed:
                return Coupled(f"{name} mixes examples", node)
        if name in SAME_DIM:
            operands = [
                self.states[a] for a in node.all_input_nodes if isinstance(value_of(a), Tensor) and value_of(a).ndim
            ]
            if name == "select_scatter" and isinstance(own, Rows):  # the source lacks the selected dim
                removed = int(node.args[2]) % value_of(first).ndim  # type: ignore[arg-type]
                operands[1:] = [
                    replace(s, dim=s.dim + (s.dim >= removed)) if isinstance(s, Rows) else s for s in operands[1:]
                ]
            if not isinstance(own, Rows) or any(not isinstance(s, Rows) or s.dim != own.dim for s in operands):
                return Coupled(f"{name} picks places by the rows' numbers", node)
        return self.located(node, tensors, pure)

    def _by_rule(self, node: fx.Node, tensors: Operands, pure: bool) -> State | None:
        """The batch is a factor of the operator's rule: along one that may be cut, examples are independent."""
        rule = rule_of(node) if is_of_torch(node.target) else None
        taken = operands_of(node)
        if rule is None or rule.fixed >= {name for own in (*rule.operands, *rule.results) for name in own}:
            return None  # nothing is known of it
        states = [self.states[operand] for operand in taken]
        factors = {own[state.dim] for own, state in zip(rule.operands, states) if isinstance(state, Rows)}
        if len(factors) != 1 or any(not isinstance(state, Rows | Fixed) for state in states):
            return Coupled(f"{operator_name(node)} mixes examples", node)
        (factor,) = factors
        alike = all(
            own.index(factor) == state.dim if isinstance(state, Rows) else False
            for own, state in zip(rule.operands, states)
            if factor in own
        )
        inside = [factor in result for result in rule.results]
        if factor in rule.fixed or factor == "1" or not alike or (any(inside) and not all(inside)):
            return Coupled(f"{operator_name(node)} mixes examples", node)
        if any(inside):
            return self.located(node, tensors, pure)
        plain = len({state.layout for _, state in tensors if isinstance(state, Rows)}) == 1
        return Additive(pure) if plain else None

    def located(self, node: fx.Node, operands: Operands, pure: bool) -> State:
        """The batch's dim in the result, read off its shape; all operands must agree."""
        name = operator_name(node)
        rows = [state for _, state in operands if isinstance(state, Rows)]
        if len(rows) < len(operands) or len({state.layout for state in rows}) != 1:
            return Coupled(f"{name} mixes examples", node)
        first = rows[0]
        kind, divided = self._numbering(node, rows)
        if first.chosen is not None:
            dims = unknown_dims(node)
            made = first_value(node)
            size = value_of(made).shape[dims[0]] if made is not None and len(dims) == 1 else None
            if size is None or batch_dims_of(node) or unknown_coefficient(size) != first.inner:
                return Coupled(f"{name} mixes examples", node)
            return replace(first, dim=dims[0], pure=pure, kind=kind)
        dims, coefficients = batch_dims_of(node), result_coefficients(node)
        if len(dims) != 1 or first.outer * first.inner != coefficients[dims[0]]:
            return Coupled(f"{name} mixes examples", node)
        return Rows(dims[0], first.outer, first.inner, pure, kind, first.order, divided)

    def _numbering(self, node: fx.Node, rows: list[Rows]) -> tuple[str, int]:
        """What the result's rows hold: numbers of rows survive where one operand has them."""
        numbers = [state for state in rows if state.kind != "values"]
        if not numbers:
            return "values", 1
        first, name = numbers[0], operator_name(node)
        floors = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") == "floor")
        if not floors:
            return (first.kind, first.divided) if len(rows) == 1 and name != "div" else ("something else", 1)
        divisor = node.args[1]
        return (
            (first.kind, first.divided * divisor)
            if isinstance(divisor, int) and len(rows) == 1
            else ("something else", 1)
        )

    # ---- buffers ----

    def _written_buffer(self, node: fx.Node) -> fx.Node | None:
        """The buffer that ``node`` writes in place, if it does."""
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or not node.target._schema.is_mutable
        ):
            return None
        source = node.args[0] if node.args else None
        while isinstance(source, fx.Node) and source.op == "call_function" and operator_name(source) != "batch_norm":
            source = source.args[0] if source.args else None
        return source if isinstance(source, fx.Node) and source.op == "get_attr" else None

    def _updated(self, node: fx.Node, buffer: fx.Node, state: State) -> State:
        """A buffer that is written once a microbatch must hold the same afterwards as if it were written once."""
        stack = node.meta.get("module_stack", ())
        if stack and stack[-1][1].startswith("torch.nn.modules.batchnorm."):
            return state  # batch_norm itself says what is wrong with it
        overwrites = operator_name(node) in ("copy_", "fill_", "zero_") and not _depends_on(node.args[1:], buffer)
        if isinstance(state, Fixed) and overwrites:
            return state
        return Coupled(f"{operator_name(node)} updates the buffer {str(buffer.target)!r} once a microbatch", node)


def _depends_on(arguments: Any, wanted: fx.Node) -> bool:
    pending: list[fx.Node] = []
    fx.map_arg(arguments, pending.append)
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node is wanted:
            return True
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return False


__all__ = ["Additive", "Analysis", "Coupled", "Fixed", "Layout", "Rows", "State"]
