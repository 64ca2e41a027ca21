"""Matrix products, embeddings and attention: the operators that parallel programs are built around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.elementwise import aligned
from graphpar.operators.moves import uncut
from graphpar.operators.notation import Rule, parse_rule
from graphpar.operators.placement import Context, Placement, Size, from_rule, literal, operands_of, results_of, sizes_of
from graphpar.runtime.layout import ExpertRows, P, R, Shard

PlacementsOf = Callable[[fx.Node, Context], list[Placement]]


def _ranks(node: fx.Node) -> tuple[list[int], list[int]]:
    return [value_of(operand).ndim for operand in operands_of(node)], [result.ndim for result in results_of(node)]


def linear(node: fx.Node, context: Context) -> list[Placement]:
    """Column-parallel cuts n, row-parallel cuts k. A bias is added once, so under k it must be partial too."""
    rule = parse_rule("... k, n k, n? -> ... n", *_ranks(node), padded="n ...", linear=[{0}])
    return _biased(from_rule(node, rule, context), 2)


def added(text: str) -> PlacementsOf:
    """addmm, baddbmm, addmv, addr, addbmm: a product added to the first operand, which is broadcast."""

    def rule(node: fx.Node, context: Context) -> list[Placement]:
        factors = parse_rule(f", {text}", [0, *_ranks(node)[0][1:]], _ranks(node)[1])
        own = aligned(sizes_of(operands_of(node)[0]), sizes_of(node), factors.results[0])
        found = Rule((own, *factors.operands[1:]), factors.results, padded=frozenset(factors.results[0]))
        return _biased(from_rule(node, found, context), 0)

    return rule


def _biased(placements: list[Placement], bias: int) -> list[Placement]:
    """Where the product is partial the bias must be so too (zero on all ranks but one)."""
    return [
        Placement(tuple(P if i == bias else kind for i, kind in enumerate(p.operands)), p.results, p.rewrite)
        if p.results == (P,) and len(p.operands) > bias
        else p
        for p in placements
    ]


def matmul(node: fx.Node) -> Rule | None:
    """matmul, mm, bmm, mv, dot with broadcasting of leading dims."""
    left, right = operands_of(node)
    a, b = value_of(left).ndim, value_of(right).ndim
    lead_a, lead_b = sizes_of(left)[:-2] if a > 2 else (), sizes_of(right)[:-2] if b > 2 else ()
    result = sizes_of(node)
    count = max(len(lead_a), len(lead_b))
    names = [f"b{i}" for i in range(count)]

    def lead(own: tuple[tuple[int, int], ...]) -> list[str]:
        offset = count - len(own)
        return [names[offset + i] if size == result[offset + i] else "1" for i, size in enumerate(own)]

    first = [*lead(lead_a), *(["m", "k"] if a > 1 else ["k"])]
    second = [*lead(lead_b), *(["k", "n"] if b > 1 else ["k"])]
    made = [*names, *(["m"] if a > 1 else []), *(["n"] if b > 1 else [])]
    return Rule(
        (tuple(first), tuple(second)),
        (tuple(made),),
        padded=frozenset({"m", "n"}),
        linear=(frozenset({0}), frozenset({1})),
    )


def embedding(node: fx.Node, context: Context) -> list[Placement]:
    """Cut over the vocabulary each rank looks up its own rows, and the others give zero."""
    by_frequency, sparse = (bool(literal(node, name)) for name in ("scale_grad_by_freq", "sparse"))
    rule = parse_rule("v d, ... -> ... d", *_ranks(node), fixed="v", linear=[{0}])
    if by_frequency:  # the gradient divides by how often an index comes in the whole
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
    if rank < 3 or any(value_of(operand).ndim != rank for operand in operands[:3]):
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
            texts.append("b0")  # the keys of the random streams, one an example
            continue
        sizes = sizes_of(extra)
        aligned = names[len(names) - len(sizes) :]
        texts.append(" ".join("1" if size == (1, 0) else name for size, name in zip(sizes, aligned)))
    causal = bool(literal(node, "is_causal", 5, False))
    fixed = "k e f h g" if shared else "k e f"
    rule = parse_rule(f"{', '.join(texts)} -> {lead} h q f", *_ranks(node), fixed=f"{fixed} q" if causal else fixed)
    found = from_rule(node, rule, context)
    masked = len(operands) > 3 and value_of(operands[3]).ndim >= 3 and sizes_of(operands[3])[-3] != (1, 0)
    if shared and keys[-3][0] % context.degree == 0 and not masked:  # whole groups of heads
        cut = Shard(rank - 3)
        found.append(Placement((cut, cut, cut, *(R for _ in operands[3:])), (cut,)))
    return found


def grouped_mm(node: fx.Node, context: Context) -> list[Placement]:
    """Rows by group times each group's matrix. Where groups are cut, each rank has the rows of its own groups."""
    rule = grouped_rule(node)
    found = from_rule(node, rule, context)
    groups = sizes_of(operands_of(node)[1])[0]
    if "g" in rule.fixed and groups[1] == 0 and groups[0] % context.degree == 0:
        rows = ExpertRows(offsets=operands_of(node)[2].name)
        found.append(Placement((rows, Shard(0), R), (rows,), "own_experts"))
    return found


def grouped_rule(node: fx.Node) -> Rule:
    """x [t, k], weight [g, k, n], offsets [g] -> [t, n]."""
    if _ranks(node)[0] != [2, 3, 1]:
        return uncut(node)
    return parse_rule("t k, g k n, g -> t n", *_ranks(node), fixed="t g", linear=[{0}])


def einsum(node: fx.Node) -> Rule:
    """The equation is the rule."""
    equation, operands = str(node.args[0]).replace(" ", ""), operands_of(node)
    left, arrow, right = equation.partition("->")
    words = left.split(",")
    if "..." in equation or len(words) != len(operands):
        return uncut(node)
    letters = left.replace(",", "")
    right = right if arrow else "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
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
    return Rule((tuple(left), tuple(right)), (made,), fixed, linear=(frozenset({0}), frozenset({1})))


def bilinear(node: fx.Node, context: Context) -> list[Placement]:
    """``x1 W x2 + b`` over the trailing dims."""
    rule = parse_rule(
        "... i, ... j, o i j, o? -> ... o", *_ranks(node), linear=[] if len(operands_of(node)) > 3 else [{0}]
    )
    return _biased(from_rule(node, rule, context), 3)


def line(text: str, fixed: str = "", linear: int = 0) -> Callable[[fx.Node], Rule]:
    """A rule that factors say for every use; linear in each of the first ``linear`` operands."""

    def rule(node: fx.Node) -> Rule:
        try:
            return parse_rule(text, *_ranks(node), fixed=fixed, linear=[{index} for index in range(linear)])
        except ValueError:
            return uncut(node)

    return rule
