"""Matrix products, embeddings and attention: the operators that parallel programs are built around."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphpar.emitted import collectives, fp8, fp8_gathers
from graphpar.emitted import packed_attention as emitted_packed
from graphpar.emitted import parallel_products as products
from graphpar.emitted import ring_attention as emitted_ring
from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.composite import Composite, Draw, Local, LocalCall, Message, Messages, Sample
from graphpar.operators.elementwise import aligned
from graphpar.operators.moves import unsharded
from graphpar.operators.notation import Rule, parse_rule
from graphpar.operators.placement import (
    Context,
    Placement,
    Size,
    can_shard,
    from_rule,
    literal,
    operands_of,
    results_of,
    sizes_of,
)
from graphpar.operators.record import EACH, Kind, Reads, Record, Rounding, each
from graphpar.runtime.axes import Divides
from graphpar.runtime.layout import ExpertRows, P, R, Shard

_aten = torch.ops.aten


def _ranks(node: fx.Node) -> tuple[list[int], list[int]]:
    return [value_of(operand).ndim for operand in operands_of(node)], [result.ndim for result in results_of(node)]


def linear(node: fx.Node) -> Rule:
    """Column-parallel shards n, row-parallel shards k. A weight of one dim gives each row a number."""
    operands, results = _ranks(node)
    if operands[1] == 1:
        return parse_rule(", ".join(["... k", "k", ""][: len(operands)]) + " -> ...", operands, results, linear=[{0}])
    return parse_rule("... k, n k, n? -> ... n", operands, results, padded="n ...", linear=[{0}])


def added(text: str) -> Callable[[fx.Node], Rule]:
    """addmm, baddbmm, addmv, addr, addbmm: a product added to the first operand, which is broadcast."""

    def rule(node: fx.Node) -> Rule:
        factors = parse_rule(f", {text}", [0, *_ranks(node)[0][1:]], _ranks(node)[1])
        first = aligned(sizes_of(operands_of(node)[0]), sizes_of(node), factors.results[0])
        return Rule((first, *factors.operands[1:]), factors.results, padded=frozenset(factors.results[0]))

    return rule


def matmul(node: fx.Node) -> Rule | None:
    """matmul, mm, bmm, mv, dot with broadcasting of leading dims."""
    left, right = operands_of(node)
    a, b = value_of(left).ndim, value_of(right).ndim
    lead_a, lead_b = sizes_of(left)[:-2] if a > 2 else (), sizes_of(right)[:-2] if b > 2 else ()
    result = sizes_of(node)
    count = max(len(lead_a), len(lead_b))
    names = [f"b{i}" for i in range(count)]

    def lead(sizes: tuple[tuple[int, int], ...]) -> list[str]:
        offset = count - len(sizes)
        return [names[offset + i] if size == result[offset + i] else "1" for i, size in enumerate(sizes)]

    first = [*lead(lead_a), *(["m", "k"] if a > 1 else ["k"])]
    second = [*lead(lead_b), *(["k", "n"] if b > 1 else ["k"])]
    made = [*names, *(["m"] if a > 1 else []), *(["n"] if b > 1 else [])]
    return Rule(
        (tuple(first), tuple(second)),
        (tuple(made),),
        padded=frozenset({"m", "n"}),
        linear=EACH,
    )


def embedding(node: fx.Node) -> Rule:
    """Rows of a table; the vocabulary is not sharded without a mask."""
    rule = parse_rule("v d, ... -> ... d", *_ranks(node), fixed="v", linear=[{0}])
    if literal(node, "scale_grad_by_freq"):  # the gradient divides by how often an index occurs in the whole batch
        rule = replace(rule, fixed=rule.fixed | set(rule.operands[1]))
    return rule


def vocab_embedding(node: fx.Node, context: Context) -> list[Placement]:
    """Sharded by vocabulary, each rank looks up the ids that it has rows for and gives zero for the others."""
    if literal(node, "scale_grad_by_freq") or literal(node, "sparse"):
        return []
    wide = sizes_of(operands_of(node)[0])[0][0] > context.degree
    return [Placement((Shard(0), R), (P,), "vocab_embedding")] if wide else []


def vocab_embedding_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the row without gradient where there is one."""
    padding = call.get("padding_idx", -1)
    return (call.args[1], call.args[0], *axes), {} if padding == -1 else {"padding_idx": padding}


def attention(node: fx.Node, context: Context) -> list[Placement]:
    """Heads and batch are independent; the query's rows too, unless the mask is implied by their position."""
    operands = operands_of(node)
    rank = value_of(operands[0]).ndim
    tensors = (*operands[:3], node)
    if rank < 3 or any(value_of(each).ndim != rank for each in tensors):
        return []
    lead = " ".join(f"b{i}" for i in range(rank - 3))
    keys = sizes_of(operands[1])
    heads, grouped = sizes_of(operands[0])[-3], literal(node, "enable_gqa", 7, False)
    shared = grouped and keys[-3] != heads
    kv = "g" if shared else "h"
    texts = [f"{lead} h q e", f"{lead} {kv} k e", f"{lead} {kv} k f"]
    names = [*(f"b{i}" for i in range(rank - 3)), "h", "q", "k"]
    for extra in operands[3:]:
        if value_of(extra).ndim == 1 and operator_name(node) == "dropout_attention":
            texts.append(names[node.kwargs.get("batch_dim", 0)])  # type: ignore[index]  # the keys of the random streams
            continue
        if operator_name(node) == "packed_attention":  # the document of each key
            texts.append("1 k" if sizes_of(extra)[0] == (1, 0) else "b0 k")
            continue
        sizes = sizes_of(extra)
        aligned = names[len(names) - len(sizes) :]
        texts.append(" ".join("1" if size == (1, 0) else name for size, name in zip(sizes, aligned)))
    by_place = operator_name(node) in ("cached_attention", "packed_attention")
    causal = bool(literal(node, "is_causal", 5, False)) or by_place
    fixed = "k e f h g" if shared else "k e f"
    rule = parse_rule(f"{', '.join(texts)} -> {lead} h q f", *_ranks(node), fixed=f"{fixed} q" if causal else fixed)
    found = from_rule(node, rule, context)
    masked = len(operands) > 3 and value_of(operands[3]).ndim >= 3 and sizes_of(operands[3])[-3] != (1, 0)
    by_heads, others = Shard(rank - 3), tuple(R for _ in operands[3:])
    if shared and keys[-3][0] % context.degree == 0 and not masked:  # whole groups of heads
        found.append(Placement((by_heads, by_heads, by_heads, *others), (by_heads,)))
    elif (
        shared and heads[0] % context.degree == 0 and context.degree % keys[-3][0] == 0 and not masked
    ):  # parts of one group
        found.append(Placement((by_heads, R, R, *others), (by_heads,), "own_group"))
    return found


def heads_of(node: fx.Node) -> int:
    """Return how many heads an attention has for tp to divide, those of each example where they are merged; else 0."""
    if (record := RECORDS.get(operator_name(node))) is None or record.kind is not Kind.ATTENTION:
        return 0
    query = sizes_of(operands_of(node)[0])
    return query[-3][0] if len(query) > 2 else 0


def ring(node: fx.Node, context: Context) -> list[Placement]:
    """Queries, keys and values sharded along the sequence, if only their places say which keys a query sees."""
    operands = operands_of(node)
    if len(operands) > 3 or value_of(node).ndim != 4 or literal(node, "dropout_p", 4, 0.0):
        return []
    batches, heads, rows = zip(*(sizes_of(operand)[:3] for operand in operands))
    by_rows, grouped = Shard(2), literal(node, "enable_gqa", 7, False)
    if len(set(batches)) > 1 or heads[1] != heads[2] or (heads[0] != heads[1] and not grouped):  # one is repeated
        return []
    if literal(node, "is_causal", 5, False) and rows[0] != rows[1]:
        return []
    if not all(size[1] == 0 and can_shard(size, by_rows, context.degree, padded=True) for size in rows):
        return []
    return [Placement((by_rows,) * 3, (by_rows,), "ring_attention")]


def ring_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention on this rank's rows; a ring brings it the keys and values of the others."""
    keys = value_of(operands_of(call.node)[1]).shape[2]
    options: dict[str, Any] = {}
    for name, default in (("is_causal", False), ("scale", None), ("enable_gqa", False)):
        if call.get(name, default) != default:
            options[name] = call.get(name)
    if int(keys) % call.degrees[axes[0]]:
        options["length"] = int(keys)
    return (*call.args[:3], *axes), options


def ring_messages(node: fx.Node, operands: Sequence[Local], result: Local, degree: int) -> Messages:
    """Keys and values go round the ring while attention runs, and their gradients.

    With ``is_causal`` chunks are exchanged before the ring and after it. Of two ranks each keeps half of its rows; of more, some keep none.
    """
    query, keys = operands[0].nbytes, operands[1].nbytes + operands[2].nbytes
    forward = [Message("send", keys, degree - 1, True)]
    backward = [Message("send", 2 * keys, degree - 1, True)]
    if literal(node, "is_causal", default=False):
        moved = 0.5 if degree == 2 else 1.0
        forward += [Message("send", moved * (query + keys)), Message("send", moved * result.nbytes)]
        backward += [Message("send", moved * 2 * result.nbytes), Message("send", moved * (query + keys))]
    return forward, backward


def packed_ring(node: fx.Node, context: Context) -> list[Placement]:
    """Documents over the ranks of a sequence."""
    rows, by_rows = sizes_of(node)[2], Shard(2)
    if rows[1] or not can_shard(rows, by_rows, context.degree):
        return []
    return [Placement((by_rows, by_rows, by_rows, R), (by_rows,), "balanced_packed_attention")]


def packed_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention of this rank's rows, or of others that see about as many keys."""
    return (*call.args[:4], *axes), dict(call.kwargs)


def packed_messages(node: fx.Node, operands: Sequence[Local], result: Local, degree: int) -> Messages:
    """Keys and values are gathered, and their gradients summed; at most all queries and results travel, and their gradients."""
    keys, queries = degree * (operands[1].nbytes + operands[2].nbytes), degree * (operands[0].nbytes + result.nbytes)
    return (
        [Message("all-gather", keys), Message("all-to-all", queries)],
        [Message("all-to-all", queries), Message("reduce-scatter", keys)],
    )


def _attention_of_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    length: int | None = None,
) -> Tensor:
    key, value = (x if length is None else x.narrow(2, 0, length) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def _packed_of_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    places = torch.arange(key.size(2), device=key.device)
    before = places.unsqueeze(1) - places
    shown = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (before >= 0)
    shown &= before < (key.size(2) if window is None else window)
    return F.scaled_dot_product_attention(query, key, value, shown.unsqueeze(1), scale=scale, enable_gqa=enable_gqa)


def _embedding_of_parts(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return F.embedding(ids, weight, padding_idx)


def grouped_mm(node: fx.Node, context: Context) -> list[Placement]:
    """Where groups are sharded, each rank has the rows of its groups."""
    rule = grouped(node)
    found = from_rule(node, rule, context)
    groups = sizes_of(operands_of(node)[1])[0]
    if "g" in rule.fixed and groups[1] == 0 and groups[0] % context.degree == 0:
        rows = ExpertRows(offsets=operands_of(node)[2].name)
        found.append(Placement((rows, Shard(0), R), (rows,), "own_experts"))
    return found


def grouped(node: fx.Node) -> Rule:
    """Rows by group times each group's matrix: x [t, k], weight [g, k, n], offsets [g] -> [t, n]."""
    if _ranks(node)[0] != [2, 3, 1]:
        return unsharded(node)
    return parse_rule("t k, g k n, g -> t n", *_ranks(node), fixed="t g", linear=[{0}])


def einsum(node: fx.Node) -> Rule:
    """Read the rule off the equation."""
    operands = operands_of(node)
    words, right = _equation(str(node.args[0]).replace(" ", ""), [value_of(operand).ndim for operand in operands])
    if len(words) != len(operands):
        return unsharded(node)
    twice = {letter for word in words for letter in word if word.count(letter) > 1}  # a diagonal
    largest: dict[str, Size] = {}
    for word, operand in zip(words, operands):
        for letter, size in zip(word, sizes_of(operand)):
            largest[letter] = size if largest.get(letter, (1, 0)) == (1, 0) else largest[letter]
    rows = tuple(
        tuple(letter if size == largest[letter] else "1" for letter, size in zip(word, sizes_of(operand)))
        for word, operand in zip(words, operands)
    )
    linear = tuple(frozenset({index}) for index in range(len(operands)))
    return Rule(rows, (tuple(right),), frozenset(twice), linear=linear)


def _equation(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with one for each dim that ``...`` stands for, aligned at the right."""
    left, arrow, right = equation.partition("->")
    words = left.split(",")
    counts = [rank - len(word) + 3 for word, rank in zip(words, ranks) if "..." in word]
    free = [letter for letter in string.ascii_letters if letter not in equation][: max(counts, default=0)]
    more = "".join(free)
    words = [
        word.replace("...", more[len(more) - (rank - len(word) + 3) :]) if "..." in word else word
        for word, rank in zip(words, ranks)
    ]
    letters = "".join(words)
    once = sorted(letter for letter in set(letters) if letters.count(letter) == 1 and letter not in more)
    return words, right.replace("...", more) if arrow else more + "".join(once)


def tensordot(node: fx.Node) -> Rule:
    """Pairs of dims are summed, the others stand one after the other."""
    first, second = _ranks(node)[0]
    given: list[Any] = [node.args[2], node.args[3]]
    pairs = [[int(dim) % rank for dim in dims] for dims, rank in zip(given, (first, second))]
    left, right = [f"m{i}" for i in range(first)], [f"n{i}" for i in range(second)]
    for number, (a, b) in enumerate(zip(*pairs)):
        same = sizes_of(operands_of(node)[0])[a] == sizes_of(operands_of(node)[1])[b]
        left[a], right[b] = (f"k{number}",) * 2 if same else ("1", "1")
    made = tuple(name for name in (*left, *right) if name[0] in "mn")
    fixed = frozenset() if "1" not in (*left, *right) else frozenset((*left, *right))
    return Rule((tuple(left), tuple(right)), (made,), fixed, linear=EACH)


def bilinear(node: fx.Node) -> Rule:
    """``x1 W x2 + b`` over the trailing dims."""
    linear = [] if len(operands_of(node)) > 3 else [{0}]
    return parse_rule("... i, ... j, o i j, o? -> ... o", *_ranks(node), linear=linear)


def line(text: str, fixed: str = "", linear: int = 0) -> Callable[[fx.Node], Rule]:
    """Make a rule of one line of factors, for every use of the operator; linear in each of the first ``linear`` operands."""

    def rule(node: fx.Node) -> Rule:
        try:
            return parse_rule(text, *_ranks(node), fixed=fixed, linear=[{index} for index in range(linear)])
        except ValueError:
            return unsharded(node)

    return rule


# ---- products and their collectives, as functions of the emitted package -----------------------------------------

Biases = Sequence[Tensor | None] | None


def _products(whole: Tensor, weights: Sequence[Tensor], biases: Biases) -> tuple[Tensor, ...]:
    return tuple(F.linear(whole, *pair) for pair in zip(weights, biases or [None] * len(weights)))


def _gathered_products(
    on: ModuleType,
    x: Tensor,
    weights: Sequence[Tensor],
    axis: str,
    dim: int,
    biases: Biases = None,
    in_order: bool = False,
) -> tuple[Tensor, ...]:
    return _products(on.all_gather(x, axis, dim=dim), weights, biases)


def _scattered_product(on: ModuleType, x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
    result: Tensor = on.reduce_scatter(F.linear(x, weight), axis, dim=dim)
    return result


def _shared_products(
    on: ModuleType, x: Tensor, weights: Sequence[Tensor], axis: str, biases: Biases = None
) -> tuple[Tensor, ...]:
    return _products(on.sum_gradient(x, axis), weights, biases)


def _single(parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return the parts of a function of one weight and bias from those of several."""

    def single(
        on: ModuleType, x: Tensor, weight: Tensor, *rest: Any, bias: Tensor | None = None, **options: Any
    ) -> Any:
        return parts(on, x, [weight], *rest, biases=[bias], **options)[0]

    return single


def _several(draw: Draw, rows: int, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (draw(2, rows, 3), [draw(4, 3), draw(4, 3)], "tp"), {**options, "biases": [draw(4), None]}


def _one(draw: Draw, rows: int, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (draw(2, rows, 3), draw(4, 3), "tp"), options


def _with_collectives(function: Callable[..., Any], parts: Callable[..., Any], *samples: Sample) -> Record:
    return Record(Kind.OTHER, composite=Composite(function, parts, samples=samples))


_IN_DIM: tuple[Sample, ...] = (lambda draw: _several(draw, 2, dim=1),)
_IN_ORDER: tuple[Sample, ...] = (lambda draw: _several(draw, 2, dim=1, in_order=True),)
_OUT: tuple[Sample, ...] = (lambda draw: _one(draw, 12, dim=1),)
PRODUCTS = {
    record.composite.function.__name__: record
    for record in (
        _with_collectives(products.gathered_products, _gathered_products, *_IN_DIM, *_IN_ORDER),
        _with_collectives(
            products.gathered_product, _single(_gathered_products), lambda draw: _one(draw, 2, dim=1, bias=draw(4))
        ),
        _with_collectives(products.scattered_product, _scattered_product, *_OUT),
        _with_collectives(products.shared_products, _shared_products, lambda draw: _several(draw, 2)),
        _with_collectives(products.shared_product, _single(_shared_products), lambda draw: _one(draw, 2, bias=draw(4))),
        _with_collectives(products.ring_gathered_products, _gathered_products, *_IN_DIM),
        _with_collectives(
            products.ring_gathered_product, _single(_gathered_products), lambda draw: _one(draw, 2, dim=1)
        ),
        _with_collectives(products.ring_scattered_product, _scattered_product, *_OUT),
    )
    if record.composite is not None
}


def _whole_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _gathered_rows(on: ModuleType, x: Tensor, axis: str, dim: int, **options: Any) -> Tensor:
    result: Tensor = on.all_gather(x, axis, dim, **options)
    return result


def _in_8_bits(draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands that 8 bits don't round, of a product whose gradient they don't either."""
    return (draw(2, 3, 4).sign(), draw(5, 4).sign()), {}


# ---- records ---------------------------------------------------------------------------------------------------


_ATTENTION = write.function(
    "F.scaled_dot_product_attention", "query key value", "attn_mask dropout_p is_causal scale enable_gqa"
)
_GROUPED = Record(Kind.GROUPED, grouped, grouped_mm, spelling=(write.grouped_product,))

RECORDS: dict[str, Record] = {
    **PRODUCTS,
    "linear": Record(
        Kind.PRODUCT, linear, bias=2, module="Linear", spelling=(write.function("F.linear", "input weight bias"),),
    ),
    **{
        function.__name__: Record(
            Kind.PRODUCT, line("... k, n k -> ... n"), rounding=rounding,
            composite=Composite(function, _whole_linear, samples=(_in_8_bits,)),
        )
        for function, rounding in (
            (fp8.fp8_linear, Rounding("rowwise")),
            (fp8.mxfp8_linear, Rounding("mxfp8", fp8.BLOCK, True)),
            (fp8.mxfp8_linear_with_gw_hp, Rounding("mxfp8_with_gw_hp", fp8.BLOCK)),
        )
    },
    "all_gather_rounded": _with_collectives(
        fp8_gathers.all_gather_rounded, _gathered_rows, lambda draw: ((draw(2, 3, 4), "tp"), {"dim": 1}),
    ),
    **each("matmul mm bmm", Record(Kind.PRODUCT, matmul, spelling=(write.infix("@", write.PRODUCT),))),
    **each("mv dot", Record(Kind.PRODUCT, matmul)),
    "vdot": Record(Kind.PRODUCT, line("k, k -> ", linear=2)),
    "inner": Record(Kind.PRODUCT, line("... k, n k -> ... n", linear=2)),
    "einsum": Record(Kind.PRODUCT, einsum, spelling=(write.einsum,)),
    "tensordot": Record(Kind.PRODUCT, tensordot, spelling=(write.tensordot,)),
    "addmm": Record(Kind.PRODUCT, added("m k, k n -> m n"), bias=0),
    "baddbmm": Record(Kind.PRODUCT, added("b m k, b k n -> b m n"), bias=0),
    "addbmm": Record(Kind.PRODUCT, added("b m k, b k n -> m n"), bias=0),
    "addmv": Record(Kind.PRODUCT, added("m k, k -> m"), bias=0),
    "bilinear": Record(Kind.PRODUCT, bilinear, bias=3, module="Bilinear"),
    "addr": Record(Kind.POINTWISE, added("m, n -> m n"), bias=0),
    **each("outer ger", Record(Kind.POINTWISE, line("m, n -> m n", linear=2))),
    "cdist": Record(Kind.REDUCTION, line("... m d, ... n d -> ... m n", fixed="d")),
    **each("grouped_mm grouped_mm_fallback _grouped_mm", _GROUPED),
    "scaled_dot_product_attention": Record(Kind.ATTENTION, placements=attention, spelling=(_ATTENTION,)),
    "dropout_attention": Record(Kind.ATTENTION, placements=attention, spelling=(write.stream_function("dropout_attention"),)),
    "ring_attention": Record(Kind.ATTENTION, composite=Composite(
        emitted_ring.ring_attention, _attention_of_parts, of=_aten.scaled_dot_product_attention.default, placements=ring,
        arguments=ring_arguments, sends=ring_messages, divides=(Divides.SEQUENCE,), title="ring attention",
        samples=(
            lambda draw: ((draw(2, 4, 8, 6), draw(2, 2, 8, 6), draw(2, 2, 8, 6), None, 0.0, True), {"enable_gqa": True}),
            lambda draw: ((draw(2, 4, 8, 6), draw(2, 4, 9, 6), draw(2, 4, 9, 6)), {}),
        ),
    )),
    "cached_attention": Record(Kind.ATTENTION, placements=attention),
    "packed_attention": Record(Kind.ATTENTION, placements=attention, composite=Composite(
        emitted_packed.packed_attention, _packed_of_parts, samples=(
            lambda draw: (
                (draw(2, 4, 8, 6), draw(2, 2, 8, 6), draw(2, 2, 8, 6), draw(2, 8, below=2).cumsum(1)), {"enable_gqa": True}
            ),
            lambda draw: ((draw(2, 4, 8, 6), draw(2, 4, 8, 6), draw(2, 4, 8, 6), draw(2, 8, below=2)), {"window": 3}),
        ),
    )),
    "balanced_packed_attention": Record(Kind.ATTENTION, composite=Composite(
        emitted_packed.balanced_packed_attention, _packed_of_parts, of=emitted_packed.packed_attention, placements=packed_ring,
        arguments=packed_arguments, sends=packed_messages, divides=(Divides.SEQUENCE,), title="attention in documents",
        samples=(
            lambda draw: (
                (draw(2, 4, 24, 6), draw(2, 2, 24, 6), draw(2, 2, 24, 6), (draw(2, 24, below=6) == 0).cumsum(1)), {"enable_gqa": True}
            ),
            lambda draw: ((draw(1, 4, 12, 6), draw(1, 4, 12, 6), draw(1, 4, 12, 6), draw(1, 12, below=2)), {"window": 3}),
        ),
    )),
    "embedding": Record(
        Kind.LOOKUP, embedding, module="Embedding",
        spelling=(write.function("F.embedding", "indices weight", "padding_idx scale_grad_by_freq sparse"),),
    ),
    "embedding_bag": Record(Kind.LOOKUP, unsharded, saves=Reads.OPERANDS),
    "vocab_embedding": Record(Kind.LOOKUP, composite=Composite(
        collectives.vocab_embedding, _embedding_of_parts, of=_aten.embedding.default, placements=vocab_embedding,
        arguments=vocab_embedding_arguments, order=(1, 0), samples=(lambda draw: ((draw(8, 3), draw(2, 5, below=8)), {}),),
    )),
}  # fmt: skip
