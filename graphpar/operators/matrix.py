"""Matrix products, embeddings and attention: the operators that parallel programs are built around."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
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
from graphpar.operators.record import EACH, Kind, Reads, Record, each
from graphpar.runtime.layout import ExpertRows, P, R, Shard


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


def embedding(node: fx.Node, context: Context) -> list[Placement]:
    """Sharded by vocabulary, each rank looks up the ids that it has rows for and gives zero for the others."""
    by_frequency, sparse = (bool(literal(node, name)) for name in ("scale_grad_by_freq", "sparse"))
    rule = parse_rule("v d, ... -> ... d", *_ranks(node), fixed="v", linear=[{0}])
    if by_frequency:  # the gradient divides by how often an index occurs in the whole batch
        rule = replace(rule, fixed=rule.fixed | set(rule.operands[1]))
    found = from_rule(node, rule, context)
    plain = not by_frequency and not sparse
    if plain and sizes_of(operands_of(node)[0])[0][0] > context.degree:
        found.append(Placement((Shard(0), R), (P,), "vocab_embedding"))
    return found


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
        sizes = sizes_of(extra)
        aligned = names[len(names) - len(sizes) :]
        texts.append(" ".join("1" if size == (1, 0) else name for size, name in zip(sizes, aligned)))
    causal = bool(literal(node, "is_causal", 5, False)) or operator_name(node) == "cached_attention"
    fixed = "k e f h g" if shared else "k e f"
    rule = parse_rule(f"{', '.join(texts)} -> {lead} h q f", *_ranks(node), fixed=f"{fixed} q" if causal else fixed)
    found = from_rule(node, rule, context) + ring(node, context)
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
    operands, plain = operands_of(node), operator_name(node) == "scaled_dot_product_attention"
    if not plain or len(operands) > 3 or value_of(node).ndim != 4 or literal(node, "dropout_p", 4, 0.0):
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


# ---- records ---------------------------------------------------------------------------------------------------


_ATTENTION = write.function(
    "F.scaled_dot_product_attention", "query key value", "attn_mask dropout_p is_causal scale enable_gqa"
)
_GROUPED = Record(Kind.GROUPED, grouped, grouped_mm, spelling=(write.grouped_product,))

RECORDS: dict[str, Record] = {
    "linear": Record(
        Kind.PRODUCT, linear, bias=2, module="Linear", spelling=(write.function("F.linear", "input weight bias"),),
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
    "bilinear": Record(Kind.PRODUCT, bilinear, bias=3),
    "addr": Record(Kind.POINTWISE, added("m, n -> m n"), bias=0),
    **each("outer ger", Record(Kind.POINTWISE, line("m, n -> m n", linear=2))),
    "cdist": Record(Kind.REDUCTION, line("... m d, ... n d -> ... m n", fixed="d")),
    **each("grouped_mm grouped_mm_fallback _grouped_mm", _GROUPED),
    "scaled_dot_product_attention": Record(Kind.ATTENTION, placements=attention, spelling=(_ATTENTION,)),
    "dropout_attention": Record(Kind.ATTENTION, placements=attention, spelling=(write.stream_function("dropout_attention"),)),
    "ring_attention": Record(Kind.ATTENTION),
    "cached_attention": Record(Kind.ATTENTION, placements=attention),
    "embedding": Record(
        Kind.LOOKUP, placements=embedding, module="Embedding",
        spelling=(write.function("F.embedding", "indices weight", "padding_idx scale_grad_by_freq sparse"),),
    ),
    "embedding_bag": Record(Kind.LOOKUP, unsharded, saves=Reads.OPERANDS),
    "vocab_embedding": Record(Kind.LOOKUP),
}  # fmt: skip
