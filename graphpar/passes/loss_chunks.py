"""``with_chunks``: a head and the loss after it become one function, which runs on a chunk of tokens at a time.

    logits = linear(hidden, weight)                                    def head_loss(hidden, labels, weight, valid_labels):
    logits = tanh(logits / 30) * 30                                        logits = tanh(linear(hidden, weight) / 30) * 30
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())     ─►    return cross_entropy(logits, labels) / valid_labels
    loss = loss / valid_labels
                                                                       loss = in_chunks(head_loss, [hidden, labels], [weight, valid_labels])

From the product on, each operator must compute a row of each token of the same row (pointwise, or over classes), until a sum over all
tokens; then the loss is a sum over chunks, whatever the operators are: softcaps, label smoothing, a z-loss, weights of classes, masks.
Collectives over classes stay between them, as with a vocabulary that is sharded over tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from graphpar.errors import OptionError
from graphpar.frontend.fixed_size import TWIN
from graphpar.ir.batch_sizes import batch_coefficients, concrete_shape
from graphpar.ir.program import Chunked, Program, named_arguments, operator_name, value_of
from graphpar.operators.naming import free_name, value_name
from graphpar.operators.parallel_products import is_parameter
from graphpar.operators.placement import argument_place, literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.reductions import NONE, SUM, reduction_place
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.runtime.option_kinds import TRAIN

_aten = torch.ops.aten

LEAST, MOST_BYTES = 1024, 2**30
"""The fewest tokens of a chunk, and the bytes of its logits in float32 unless it has as few: larger ones add up gradients less often."""
_OVER_CLASSES = (Kind.REDUCTION, Kind.NORM, Kind.SCAN, Kind.INDEX, Kind.VIEW)
"""Operators that compute each row of the same row where their dim is that of the classes."""
_ALONG = (Kind.POINTWISE, Kind.COPY, Kind.ALIAS)


@dataclass(frozen=True)
class Head:
    """A product from which on a program can run in chunks.

    Attributes:
        classes: of the rank.
        nbytes: those of the weight in float32.
    """

    product: fx.Node
    classes: int
    nbytes: int

    @property
    def chunk(self) -> int:
        """The tokens of a chunk: a power of two."""
        return max(LEAST, 1 << int(math.log2(MOST_BYTES / (4 * self.classes))))

    def saves(self, rows: int) -> bool:
        """Whether chunks take less memory for microbatches of ``rows``: all logits, in float32 and once more as gradients, are more than
        those of a chunk and the weight's gradient, in float32 and as it is kept."""
        tokens = math.prod(concrete_shape(self.product, rows)[:-1])
        whole, chunked = 8 * self.classes * tokens, 8 * self.classes * self.chunk
        return tokens >= 2 * self.chunk and whole > chunked + 2 * self.nbytes


def heads_of(program: Program) -> list[Head]:
    """Return the heads of a program for training that can run in chunks, if it has blocks beside them."""
    if program.mode != TRAIN or not program.blocks:
        return []
    return [head for head, _ in _heads(copied(program.graph))]


def chunk_of(program: Program, rows: int) -> int:
    """Return the tokens of a chunk where the heads of ``program`` take less memory so for microbatches of ``rows``; else 0."""
    return min((head.chunk for head in heads_of(program) if head.saves(rows)), default=0)


def with_chunks(program: Program, tokens: int) -> Program:
    """Return the program with its heads in chunks of so many tokens; as it is where it has none, or for 0."""
    if not tokens or program.mode != TRAIN:
        return program
    graph = copied(program.graph)
    graph.output_node().meta = dict(program.graph.output_node().meta)
    heads = list(_heads(graph))
    most = max((head.classes for head, _ in heads), default=0)
    for place, (head, region) in enumerate(each for each in heads if 4 * each[0].classes >= most):
        rounding = record_of(head.product).rounding
        if rounding is not None and rounding.weights and tokens % rounding.block:
            raise OptionError(
                f"loss_chunk is {tokens}; the gradient of the head is rounded by blocks of {rounding.block} tokens (fp8), so give a "
                f"multiple of {rounding.block}, or leave the head out of fp8."
            )
        region.replace(f"head_loss_{place}" if place else "head_loss", tokens)
    remove_dead_code(graph)
    return program.with_graph(graph)


def _heads(graph: fx.Graph) -> Iterator[tuple[Head, _Region]]:
    """Find the heads of ``graph``, and what is computed of each; it is changed so that shifts come before products."""
    for node in list(graph.nodes):
        if node.op != "call_function" or record_of(node).kind is not Kind.PRODUCT:
            continue
        operands = _operands(node)
        if operands is None:
            continue
        _shift_before(graph, node)
        region = _Region(graph, node)
        if region.end is not None:
            yield Head(node, int(value_of(node).shape[-1]), value_of(operands[1]).numel() * 4), region


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the rows [..., k] and the weight, a matrix, of a product; None where it has others."""
    operands = [item for item in product.args if isinstance(item, fx.Node) and value_of(item).ndim > 1]
    if len(operands) != 2 or not is_parameter(operands[1]) or value_of(operands[1]).ndim != 2:
        return None
    return (operands[0], operands[1]) if _shape(value_of(operands[0]))[:-1] == _shape(value_of(product))[:-1] else None


def _rows_of(product: fx.Node) -> fx.Node:
    found = _operands(product)
    assert found is not None
    return found[0]


# ---- labels that are the next tokens -----------------------------------------------------------------------------


def _shift_before(graph: fx.Graph, product: fx.Node) -> None:
    """Take positions of the rows of a product instead of those of its result, where nothing needs the others."""
    chain, node = [product], product
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _is_shift(node, chain[-1]):
            rows = _rows_of(product)
            with graph.inserting_before(product):
                sliced = graph.call_function(node.target, (rows, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            shape = value_of(node).shape[:-1]
            _describe(sliced, rows, (*shape, value_of(rows).shape[-1]))
            product.replace_input_with(rows, sliced)
            for each in chain:
                _describe(each, each, (*shape, value_of(each).shape[-1]))
            node.replace_all_uses_with(chain[-1])
            graph.erase_node(node)
            node = chain[-1]
        elif record_of(node).kind in _ALONG and len(node.all_input_nodes) == 1 and _same_shape(node, chain[-1]):
            chain.append(node)
        else:
            return


def _is_shift(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` takes positions of ``source``, by numbers, along a dim that is neither the batch nor the classes."""
    if (
        operator_name(node) != "slice"
        or node.all_input_nodes != [source]
        or not 0 <= _dim(node) < value_of(node).ndim - 1
    ):
        return False
    return batch_coefficients(source)[_dim(node)] is None


def _same_shape(node: fx.Node, other: fx.Node) -> bool:
    return bool(_shape(value_of(node)) == _shape(value_of(other)))


_OWN = ("val", "batch_coefficients", "transition", "model_output")
"""The metadata that is not another node's."""
_PLACE: tuple[Literal["module_stack", "source"], ...] = ("module_stack", "source")


def _describe(
    node: fx.Node, like: fx.Node, shape: Sequence[Any], coefficients: Sequence[int | None] | None = None
) -> fx.Node:
    """Give ``node`` the metadata of ``like``, with another shape."""
    value, known = value_of(like).new_empty(tuple(shape)), like.meta.get("batch_coefficients")
    node.meta = {key: item for key, item in like.meta.items() if key not in (*_OWN, TWIN)}
    node.meta["val"] = value
    if known is not None:
        node.meta["batch_coefficients"] = tuple(known if coefficients is None else coefficients)
    return node


def _dim(node: fx.Node) -> int:
    """Return the one dim that an operator works on; -1 where there are several, or none is given."""
    given = literal(node, "dim")
    given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    return int(given) % max(1, value_of(node.all_input_nodes[0]).ndim) if isinstance(given, int) else -1


# ---- what is computed of a row -----------------------------------------------------------------------------------

SCALAR, ROWS = -2, -1
"""Where a value has its classes, besides a dim: it is a sum over tokens, or one number a token."""


class _Region:
    """What is computed of a product, up to a sum over tokens, as a function of rows [n, ...].

    Attributes:
        end: the sum over tokens; None where there is no such function.
    """

    def __init__(self, graph: fx.Graph, product: fx.Node) -> None:
        self.graph, self.body = graph, fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.classes: dict[fx.Node, int] = {}
        self.rows: dict[tuple[fx.Node, bool], fx.Node] = {}  # by whether they have classes
        self.whole: dict[fx.Node, fx.Node] = {}
        self.names: set[str] = set()
        self.tokens = _elements(_shape(value_of(product))[:-1])
        self.place: dict[str, Any] = {key: product.meta[key] for key in _PLACE if key in product.meta}
        self.end = self._grown(product)

    def _grown(self, product: fx.Node) -> fx.Node | None:
        rows = _rows_of(product)
        row = self._row(rows, value_of(rows).ndim - 1, "hidden")
        others = [self._other(argument) for argument in product.all_input_nodes if argument is not rows]
        places = dict(zip([rows, *(a for a in product.all_input_nodes if a is not rows)], [row, *others]))
        self._add(product, places.get, value_of(product).ndim - 1)
        for node in list(self.graph.nodes):
            if node is product or not any(argument in self.made for argument in node.all_input_nodes):
                continue
            inside = [argument for argument in node.all_input_nodes if self.classes.get(argument, SCALAR) != SCALAR]
            if (node.op != "call_function" or not self._taken(node)) and inside:
                return None
        ends = [node for node in self.made if any(user not in self.made for user in node.users)]
        return ends[0] if len(ends) == 1 and self.classes[ends[0]] == SCALAR else None

    # ---- operators ----

    def _taken(self, node: fx.Node) -> bool:
        """Add an operator to the function; return whether it can be."""
        operands = [argument for argument in node.all_input_nodes if argument in self.made]
        at, kind, name = self.classes[operands[0]], record_of(node).kind, operator_name(node)
        if any(self.classes[operand] != at for operand in operands) or not isinstance(value_of(node), Tensor):
            return False
        if at == SCALAR:
            return self._scalar(node, operands)
        if "transition" in node.meta:
            return (
                at >= 0 and len(node.args) == 2 and bool(node.kwargs.get("dim", at) == at) and self._along(node, at, at)
            )
        if name == "detach":
            return self._along(node, at, at)
        if kind in (Kind.RESHAPE, Kind.PERMUTE, Kind.ALIAS) or name in ("clone", "contiguous"):
            return self._moved(node, operands[0], at)
        if kind is Kind.CLASS_LOSS:
            return self._loss(node, at)
        if (kind is Kind.POINTWISE and not record_of(node).module) or name == "to":  # a PReLU's weight is of dim 1
            return self._along(node, at, at)
        if name == "sum" and value_of(node).ndim == 0:
            kept = {key: item for key, item in node.kwargs.items() if key == "dtype"}
            self.made[node] = self._new(node, _aten.sum.default, (self.made[operands[0]],), kept, SCALAR)
            return True
        if kind in _OVER_CLASSES and at >= 0 and _dim(node) == at:
            keeps = value_of(node).ndim == value_of(operands[0]).ndim
            return self._along(node, at, at if keeps else ROWS)
        return False

    def _scalar(self, node: fx.Node, operands: Sequence[fx.Node]) -> bool:
        """A linear function of sums over tokens is one."""
        name = operator_name(node)
        linear = name in ("add", "sub") and len(operands) == len(node.args) and not node.kwargs
        once = sum(argument in self.made for argument in node.args if isinstance(argument, fx.Node)) == 1
        scaled = name in ("mul", "div") and once and (name == "mul" or node.args[0] is operands[0])
        if not (linear or (scaled and not node.kwargs) or name in ("neg", "to")) or value_of(node).ndim:
            return False
        return self._along(node, SCALAR, SCALAR)

    def _moved(self, node: fx.Node, source: fx.Node, at: int) -> bool:
        """Shapes: what is one dim of tokens in the function may be several."""
        before, after = _shape(value_of(source)), _shape(value_of(node))
        if operator_name(node) == "unsqueeze" and at == ROWS and _dim_of_new(node) == len(after) - 1:
            self.made[node] = self._new(node, _aten.unsqueeze.default, (self.made[source], 1), {}, len(after) - 1)
        elif operator_name(node) == "squeeze" and at == len(before) - 1 and after == before[:-1]:
            self.made[node] = self._new(node, _aten.squeeze.dim, (self.made[source], 1), {}, ROWS)
        elif record_of(node).kind is Kind.PERMUTE:
            order = _order(node, len(before))
            if order is None or [dim for dim in order if dim != at] != [dim for dim in range(len(before)) if dim != at]:
                return False
            self.made[node], self.classes[node] = self.made[source], order.index(at) if at >= 0 else at
        elif after == before or at == ROWS:
            if _elements(after) != self.tokens and at == ROWS:
                return False
            self.made[node], self.classes[node] = self.made[source], at
        elif at == len(before) - 1 and after[-1:] == before[-1:] and _elements(after[:-1]) == self.tokens:
            self.made[node], self.classes[node] = self.made[source], len(after) - 1
        else:
            return False
        return True

    def _loss(self, node: fx.Node, at: int) -> bool:
        place = reduction_place(node)
        reduction = node.kwargs.get("reduction") if place is None else list(named_arguments(node).values())[place]
        labels = node.args[1]
        integers = isinstance(labels, fx.Node) and labels not in self.made and not value_of(labels).is_floating_point()
        if at != 1 or not integers or reduction not in (NONE, SUM, "none", "sum"):
            return False
        row = self._row(labels, ROWS, "labels")  # type: ignore[arg-type]
        known = {a: row if a is labels else self.made.get(a) or self._other(a) for a in node.all_input_nodes}
        self._add(node, known.get, SCALAR if reduction in (SUM, "sum") else ROWS)
        return row is not None

    def _along(self, node: fx.Node, at: int, after: int) -> bool:
        """An operator that computes each row of the same row: dims of tokens are the same of all that it takes and gives."""
        inside = [argument for argument in node.all_input_nodes if argument in self.made]
        tokens = _tokens_of(inside[0], at)
        if any(_tokens_of(each, at) != tokens for each in inside) or (
            at != SCALAR and _tokens_of(node, after) != tokens
        ):
            return False
        known = {a: self.made.get(a) or self._beside(a, at, inside[0]) for a in node.all_input_nodes}
        if None in known.values():
            return False
        self._add(node, known.get, after)
        return True

    def _beside(self, argument: fx.Node, at: int, other: fx.Node) -> fx.Node | None:
        """An operand from outside: a number, one number a class, or rows as ``other`` has them."""
        value = value_of(argument)
        if not isinstance(value, Tensor) or value.ndim == 0 or at == SCALAR:
            return self._other(argument) if isinstance(value, Tensor) and value.ndim == 0 else None
        last = value_of(other).ndim - 1
        if value.ndim == 1 and at == last > 0:
            return self._other(argument)
        alike = value.ndim == last + 1 and _tokens_of(argument, at) == _tokens_of(other, at)
        return self._row(argument, at) if alike and at in (ROWS, last) else None

    # ---- the function ----

    def _row(self, argument: fx.Node, at: int, name: str = "") -> fx.Node | None:
        """What is divided into chunks: [..., classes], or [...] with one element a token."""
        value = value_of(argument)
        shape = _shape(value)
        if _elements(shape[:at] if at >= 0 else shape) != self.tokens:
            return None
        key = argument, at >= 0
        if key not in self.rows:
            self.rows[key] = self._described(self._argument(name or value_name(argument)), argument, at)
        return self.rows[key]

    def _other(self, argument: fx.Node) -> fx.Node:
        if argument not in self.whole:
            made = self._argument(
                str(argument.target).rpartition(".")[2] if argument.op == "get_attr" else value_name(argument)
            )
            made.meta = {key: item for key, item in argument.meta.items() if key not in ("transition", TWIN)}
            self.whole[argument] = made
        return self.whole[argument]

    def _argument(self, name: str) -> fx.Node:
        made = self.body.placeholder(free_name(name, self.names))
        self.names.add(str(made.target))
        return made

    def _described(self, node: fx.Node, like: fx.Node, at: int) -> fx.Node:
        """Give ``node`` the metadata of ``like``, whose dims of tokens it has as one."""
        if at == SCALAR:
            return _describe(node, like, ())
        value, known = value_of(like), like.meta.get("batch_coefficients")
        lead = [dim for dim in range(value.ndim) if dim != at]
        count = math.prod(value.shape[dim] for dim in lead)
        coefficients: list[int | None] = []
        if known is not None:
            follows = any(known[dim] is not None for dim in lead)
            sizes = (known[dim] if known[dim] is not None else int(value.shape[dim]) for dim in lead)
            coefficients = [math.prod(sizes) if follows else None, *([None] if at >= 0 else [])]  # type: ignore[list-item]
        return _describe(node, like, (count, *([value.shape[at]] if at >= 0 else [])), coefficients)

    def _add(self, node: fx.Node, known: Callable[[fx.Node], fx.Node | None], at: int) -> None:
        """Repeat ``node`` on values of the function, with the dim of classes as the second."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known)
        place = argument_place(node, "dim")
        if "transition" in node.meta and "dim" in kwargs:
            kwargs = {**kwargs, "dim": 1}
        elif record_of(node).kind in _OVER_CLASSES and place is not None:
            over = [1] if isinstance(literal(node, "dim"), list | tuple) else 1
            args, kwargs = (*args[:place], over, *args[place + 1 :]), {k: v for k, v in kwargs.items() if k != "dim"}
        self.made[node] = self._new(node, node.target, args, kwargs, at)

    def _new(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int) -> fx.Node:
        self.classes[like] = at
        made = self._described(self.body.call_function(target, args, kwargs), like, at)
        if "transition" in like.meta:
            made.meta["transition"] = like.meta["transition"]
        return made

    def replace(self, name: str, tokens: int) -> None:
        """Put a call of the function in the place of the sum."""
        assert self.end is not None
        self.body.output(self.made[self.end])
        with self.graph.inserting_before(self.end):
            rows = [self._flat(argument, made) for (argument, _), made in self.rows.items()]
            made = Chunked(name, _in_order(self.body, [*self.rows.values(), *self.whole.values()]), len(rows), tokens)
            call = self.graph.call_function(made, (*rows, *self.whole))
        call.meta = {**self.end.meta, **self.place}
        self.end.replace_all_uses_with(call)

    def _flat(self, argument: fx.Node, made: fx.Node) -> fx.Node:
        last = value_of(argument).ndim - value_of(made).ndim
        if not last:
            if argument.op == "call_function" and len(argument.users) == 1 and "transition" not in argument.meta:
                argument.meta["name"] = str(made.target)  # and not that of the line of the loss
            return argument
        flat = self.graph.call_function(_aten.flatten.using_ints, (argument, 0, last))
        flat.meta = {**made.meta, **self.place}
        return flat


def _in_order(body: fx.Graph, placeholders: Sequence[fx.Node]) -> fx.Graph:
    """Return ``body`` with its placeholders first, in this order."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*placeholders, *(node for node in body.nodes if node.op != "placeholder")):
        env[node] = graph.node_copy(node, env.__getitem__)
    return graph


def _shape(value: Tensor) -> tuple[Any, ...]:
    """Return sizes that may be compared without a guard: expressions where they follow the batch."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)


def _tokens_of(node: fx.Node, at: int) -> tuple[Any, ...]:
    """Return the sizes of a value without that of its classes."""
    shape = _shape(value_of(node))
    return (*shape[:at], *shape[at + 1 :]) if at >= 0 else shape


def _elements(shape: Sequence[Any]) -> Any:
    return sympy.prod(shape)


def _dim_of_new(node: fx.Node) -> int:
    return int(literal(node, "dim")) % int(value_of(node).ndim)


def _order(node: fx.Node, ndim: int) -> list[int] | None:
    """Return where each dim of a permuted tensor comes from; None where this is not read."""
    given: Any = node.args[1:] or (-2, -1)
    if len(given) == 1:
        return [int(dim) % ndim for dim in given[0]]
    if operator_name(node).startswith("move") or node.kwargs:
        return None
    order = list(range(ndim))
    first, second = (int(dim) % ndim for dim in given)
    order[first], order[second] = order[second], order[first]
    return order
