"""``assign_streams``: every random operator draws from a separate stream, keyed by the example, or by the step.

    dropout(x, p)           ->  dropout(x, p, stream(sample_keys, n), batch_dim)
    randn_like(x)           ->  normal(stream(sample_keys, n), [3, 32, 32])
    bernoulli(x, 0.9)       ->  (uniform(stream(sample_keys, n), [1, 1]) < 0.9).to(x.dtype)
    rand([1])               ->  uniform(stream(step_key, n), [1], None)

``sample_keys`` [batch] becomes a root input that is split into microbatches like any other, so the numbers are those of the
whole batch on one device, however the program is split. What no dim of follows the batch is drawn once a step, from ``step_key`` [1].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.frontend.fixed_size import TWIN, Twin
from graphpar.ir.batch_sizes import batch_coefficients, batch_dims_of, unknown_dims
from graphpar.ir.program import Input, Program, named_arguments, operator_name, value_of, where
from graphpar.operators.batch import Analysis, Rows
from graphpar.operators.placement import literal, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer

_aten = torch.ops.aten
KEYS, STEP_KEY = "sample_keys", "step_key"
ONE_FOR_ALL = -1
"""In a layout, the dim of what no dim of follows the batch."""
DROPOUTS = ("dropout", "feature_dropout", "scaled_dot_product_attention")
WRITTEN_OUT = (
    "Attention dropout is computed explicitly (no fused kernel), so that its masks don't depend on the split. "
    "Set the attention dropout to 0, or give --dropout kernel, to keep the fused attention."
)


def assign_streams(program: Program) -> Program:
    """Make random operators functions of ``sample_keys`` and ``step_key``.

    Raises:
        GraphparError: an operator draws in a way that no key can, or dropout is on a tensor without a batch dim.
    """
    random = [node for node in program.graph.nodes if is_random(node)]
    if not random:
        return program
    streams = _Streams(program, copied(program.graph))
    for node in list(streams.graph.nodes):
        if node.op == "output":
            continue
        if is_random(node):
            streams.replace(node)
        else:
            streams.analysis.visit(node)
    inputs = (*program.inputs, *streams.inputs())
    result = program.with_graph(streams.graph, inputs=inputs, stream_layouts=tuple(streams.layouts))
    if any(operator_name(node) == "scaled_dot_product_attention" for node in random):
        result = result.warn(WRITTEN_OUT)
    return result


def is_random(node: fx.Node) -> bool:
    """Return whether an operator draws from torch's own generator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = operator_name(node)
    if name in ("dropout", "feature_dropout"):
        return bool(node.args[2]) and bool(0.0 < node.args[1] < 1.0)  # type: ignore[operator]  # p = 1 drops everything
    if name == "scaled_dot_product_attention":
        return float(literal(node, "dropout_p")) > 0.0
    if name.startswith("empty") or _draws_nothing(node):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _draws_nothing(node: fx.Node) -> bool:
    """Return whether a recurrent layer, (..., num_layers, dropout, train, ...), uses no dropout between its layers."""
    if record_of(node).kind is not Kind.RECURRENT:
        return False
    dropout, train = node.args[5], node.args[6]
    return not dropout or not train or bool(node.args[4] == 1)


@dataclass
class _Streams:
    """The graph in which random operators are replaced, in order.

    Attributes:
        layouts: of each, the dim that has the batch, and how many rows are before and behind each example in it; of what is no dropout
            also the bits of precision of the floats that it draws, 0 of whole numbers.
        keys: the placeholders of keys so far.
    """

    program: Program
    graph: fx.Graph
    layouts: list[tuple[int, ...]] = field(default_factory=list)
    keys: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dims = {entry.name: entry.batch_dim for entry in self.program.inputs}
        self.analysis = Analysis(dims | {KEYS: 0, STEP_KEY: None}, self.program.parameters)

    def inputs(self) -> list[Input]:
        """Describe the inputs that were added."""
        added = {KEYS: Input(KEYS, (self.program.batch,), torch.int64, 0, "sample_keys")}
        added[STEP_KEY] = Input(STEP_KEY, (1,), torch.int64, None, "sample_keys")
        return [added[name] for name in self.keys]

    def replace(self, node: fx.Node) -> None:
        """Let ``node`` draw from the next stream."""
        with self.graph.inserting_before(node):
            new = self._dropped(node) if operator_name(node) in DROPOUTS else self._drawn(node)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    # ---- keys ----

    def _input(self, name: str) -> fx.Node:
        """Return the placeholder of these keys, int64 [batch] or [1], which is added after the others where there is none."""
        if name in self.keys:
            return self.keys[name]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        with self.graph.inserting_after(placeholders[-1]):
            keys = self.keys[name] = self.graph.placeholder(name)
        example, entry = next(
            (node, entry) for node, entry in zip(placeholders, self.program.inputs) if entry.batch_dim is not None
        )
        value, twin, of_batch = value_of(example), example.meta.get(TWIN), name == KEYS

        def shaped(like: Tensor) -> Tensor:
            with like.fake_mode:  # type: ignore[attr-defined]
                return torch.empty(like.shape[entry.batch_dim] if of_batch else 1, dtype=torch.int64)  # type: ignore[index]

        keys.meta = {"val": shaped(value), "module_stack": ()}
        if not self.program.symbolic:
            keys.meta["batch_coefficients"] = (1 if of_batch else None,)
            if twin is not None:
                keys.meta[TWIN] = Twin(shaped(twin.value), twin.size, twin.other_size)
        self.analysis.visit(keys)
        return keys

    def _stream(self, node: fx.Node, state: Rows | None, digits: Sequence[int] = ()) -> fx.Node:
        """Return the keys of the next stream, one for each row of ``state``: several rows of one example have different ones."""
        number = len(self.layouts)
        keys = self._made(node, random_streams.stream, self._input(STEP_KEY if state is None else KEYS), number)
        if state is None:
            self.layouts.append((ONE_FOR_ALL, 1, 1, *digits))
            return keys
        self.layouts.append((state.dim, state.outer, state.inner, *digits))
        for count, at, others, step in ((state.inner, -1, 0, 1), (state.outer, 0, -1, state.inner)):
            if count > 1:
                places = self._made(
                    keys, _aten.cumsum.default, self._made(keys, _aten.new_ones.default, keys, [count]), 0
                )
                steps = self._made(keys, _aten.mul.Scalar, places, step * random_streams.BETWEEN_ROWS)
                wide = self._made(
                    keys, _aten.add.Tensor,
                    self._made(keys, _aten.unsqueeze.default, keys, at), self._made(keys, _aten.unsqueeze.default, steps, others),
                )  # fmt: skip
                keys = self._made(keys, _aten.flatten.using_ints, wide)
                keys.meta["name"] = "row_keys"
        return keys

    def _made(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = infer(self.graph.call_function(target, args, kwargs), like)
        self.analysis.visit(node)
        return node

    # ---- dropout ----

    def _dropped(self, node: fx.Node) -> fx.Node:
        name = operator_name(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self.analysis.visit(node)
        state = self.analysis.states[source]
        if not isinstance(state, Rows):
            return self._dropped_once(node)
        if name == "feature_dropout" and state.dim > 1:
            raise GraphparError(
                f"Channel dropout ({node.name}{where(node)}) has the batch on dim {state.dim} of its operand, so it drops channels of all "
                "examples at once; its first dim must be the batch."
            )
        own = self._stream(node, state)
        if name == "scaled_dot_product_attention":
            arguments, options = _attention_arguments(node, own)
            if state.dim > value_of(source).ndim - 3:
                raise GraphparError(
                    f"Attention with dropout ({node.name}{where(node)}) has the batch on dim {state.dim} of its query, which are the "
                    "positions. If another dim of the inputs is the batch, give batch_dims."
                )
            place = {"batch_dim": state.dim} if state.dim else {}
            new = self.graph.call_function(random_streams.dropout_attention, arguments, {**options, **place})
        else:
            target = random_streams.dropout if name == "dropout" else random_streams.channel_dropout
            new = self.graph.call_function(target, (source, node.args[1], own, state.dim, True))
        new.meta = dict(node.meta)
        self.analysis.states[new] = self.analysis.states[node]
        return new

    def _dropped_once(self, node: fx.Node) -> fx.Node:
        """Drop elements of what no dim of follows the batch: the same for all microbatches of a step."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        name, key = operator_name(node), self._stream(node, None)
        if name == "feature_dropout" or batch_dims_of(source):
            raise GraphparError(
                f"Dropout on a tensor without a batch dim ({node.name}{where(node)}); its masks could not follow the examples."
            )
        if name == "dropout":
            one = self._made(node, _aten.unsqueeze.default, source, 0)
            one = self._made(node, random_streams.dropout, one, node.args[1], key, 0, True)
        else:
            (*operands, _), options = _attention_arguments(node, key)
            whole = [self._made(node, _aten.unsqueeze.default, operand, 0) for operand in operands]
            one = self._made(node, random_streams.dropout_attention, *whole, key, **options)
        return self._made(node, _aten.squeeze.dims, one, [0])

    # ---- other random operators ----

    def _drawn(self, node: fx.Node) -> fx.Node:
        name = operator_name(node)
        given = named_arguments(node)
        if given.get("generator") is not None:
            raise GraphparError(
                f"The model draws from a torch.Generator{where(node)}, whose state a program can't follow: its numbers are functions of "
                "the seed of the run, the step and the example. Leave the generator out."
            )
        if name not in _VALUES or value_of(node).is_complex():
            raise random_refused(node)
        state = self._rows(node)
        new = _VALUES[name](_Draw(self, node, state), given)
        if value_of(new).dtype != value_of(node).dtype:
            new = self._made(node, _aten.to.dtype, new, value_of(node).dtype)
        new.meta |= {key: item for key, item in node.meta.items() if key != "val"}
        return new

    def _rows(self, node: fx.Node) -> Rows | None:
        """Where the result has the batch: where the tensor that it is made like has it, else one or more rows an example."""
        sizes = batch_coefficients(node)
        dims = [
            dim
            for dim, (size, whole) in enumerate(zip(value_of(node).shape, sizes))
            if not isinstance(size, int) or whole
        ]
        if not dims:
            if any(
                isinstance(self.analysis.states[operand], Rows) and batch_dims_of(operand)
                for operand in operands_of(node)
            ):
                raise random_refused(node)  # chosen among examples
            return None
        if len(dims) > 1 or sizes[dims[0]] is None or unknown_dims(node):
            raise GraphparError(
                f"The model draws a tensor of {_text(value_of(node))} with {node.target}{where(node)}, of which not exactly one dim is "
                "a multiple of the batch; its numbers could not follow the examples. Draw it with the batch in one dim."
            )
        for operand in operands_of(node):
            state = self.analysis.states[operand]
            if isinstance(state, Rows) and state.order is not None:
                raise GraphparError(
                    f"The model draws random numbers for sorted rows{where(node)}, which don't say whose they are; draw before the sort."
                )
            alike = value_of(operand).ndim == value_of(node).ndim
            if (
                isinstance(state, Rows)
                and alike
                and (state.dim, state.outer * state.inner) == (dims[0], sizes[dims[0]])
            ):
                return state
        return Rows(dims[0], 1, int(sizes[dims[0]] or 1))


def _text(value: Tensor) -> str:
    return "[" + ", ".join(map(str, value.shape)) + "]"


def random_refused(node: fx.Node) -> GraphparError:
    """Return the error for a random operator that no key can draw."""
    return GraphparError(
        f"The model draws random numbers with {node.target}{where(node)}, which has no form that draws by the examples' keys, as rand, "
        "randn, randint, normal, uniform, bernoulli, exponential, randperm and multinomial along the last dim have. Use one of these, or "
        "pass the random tensor as an input instead."
    )


@dataclass
class _Draw:
    """Draws for one operator: ``draw(random_streams.normal)`` has its sizes, and a floating point dtype."""

    streams: _Streams
    node: fx.Node
    state: Rows | None

    def __call__(
        self,
        function: Callable[..., Tensor],
        *bounds: int,
        dims: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """Draw from ``function``; ``dims``: the sizes, -1 for the batch's, if not the operator's."""
        dtype = value_of(self.node).dtype if dtype is None else dtype
        own = self.state
        sizes = [
            -1 if own is not None and dim == own.dim else int(size)
            for dim, size in enumerate(value_of(self.node).shape)
        ]
        sizes = sizes if dims is None else list(dims)
        batch_dim = None if own is None else own.dim
        digits = 0 if function is random_streams.integers else random_streams.digits(dtype)
        keys = self.streams._stream(self.node, own, (digits,))
        options: dict[str, Any] = {} if batch_dim == 0 else {"batch_dim": batch_dim}
        if digits and dtype != torch.float32:
            options["dtype"] = dtype
        return self.made(
            function, keys, [size for dim, size in enumerate(sizes) if dim != batch_dim], *bounds, **options
        )

    def made(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Make another operator."""
        return self.streams._made(self.node, target, *args, **kwargs)

    def scaled(self, value: fx.Node, factor: Any, added: Any) -> fx.Node:
        """Multiply, and add: numbers, or tensors, which get no gradient."""
        for number, neutral, target in ((factor, 1, "mul"), (added, 0, "add")):
            if isinstance(number, fx.Node):
                still = self.made(_aten.detach.default, number)
                value = self.made(getattr(_aten, target).Tensor, value, still)
            elif number != neutral:
                value = self.made(getattr(_aten, target).Scalar, value, number)
        return value

    def below(self, p: Any) -> fx.Node:
        """Draw truth values: whether uniform numbers are below ``p``."""
        numbers = self(random_streams.uniform, dtype=torch.float32)
        return self.made(_aten.lt.Tensor if isinstance(p, fx.Node) else _aten.lt.Scalar, numbers, p)

    def chosen(self, p: fx.Node, count: int, replacement: bool) -> fx.Node:
        """Draw indices of ``p`` [..., n]: those of the largest ``p`` divided by exponential numbers, as torch does."""
        sizes = [
            -1 if self.state is not None and dim == self.state.dim else int(size)
            for dim, size in enumerate(value_of(p).shape)
        ]
        again = replacement and count > 1
        if again:
            sizes.insert(-1, count)
            p = self.made(_aten.unsqueeze.default, p, -2)
        scores = self.made(_aten.div.Tensor, p, self(random_streams.exponential, dims=sizes, dtype=torch.float32))
        if again or count == 1:
            return self.made(_aten.argmax.default, scores, -1, not again)
        largest = self.made(_aten.topk.default, scores, count)
        return self.made(operator.getitem, largest, 1)


def _uniform(draw: _Draw, given: dict[str, Any]) -> fx.Node:
    low, high = given.get("from", 0), given.get("to", 1)
    return draw.scaled(draw(random_streams.uniform), high - low, low)


def _normal(draw: _Draw, given: dict[str, Any]) -> fx.Node:
    return draw.scaled(draw(random_streams.normal), given.get("std", 1), given.get("mean", 0))


def _integers(draw: _Draw, given: dict[str, Any]) -> fx.Node:
    return draw(random_streams.integers, given.get("low", 0), given["to"] if "to" in given else given["high"])


_VALUES: dict[str, Callable[[_Draw, dict[str, Any]], fx.Node]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random"), _integers),
    "bernoulli": lambda draw, given: draw.below(given.get("p", draw.node.args[0])),
    "exponential": lambda draw, given: draw.scaled(draw(random_streams.exponential), 1 / given["lambd"], 0),
    "log_normal": lambda draw, given: draw.made(_aten.exp.default, _normal(draw, given)),
    "randperm": lambda draw, given: draw.made(_aten.argsort.default, draw(random_streams.integers, 0, 1 << 60)),
    "multinomial": lambda draw, given: draw.chosen(given["self"], given["num_samples"], given["replacement"]),
}
"""How each random operator's result is made of the drawn numbers."""


def _attention_arguments(node: fx.Node, keys: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = named_arguments(node)
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    ranks = {value_of(operand).ndim for operand in (query, key, value)}
    if len(ranks) > 1 or min(ranks) < 3:
        raise GraphparError(
            f"Attention with dropout ({node.name}{where(node)}) needs query, key and value of as many dims, [..., heads, sequence, "
            "features]."
        )
    options = {name: item for name, item in given.items() if item is not None and item is not False}
    return (query, key, value, keys), {**options, "training": True}
