"""Every rule is proven by execution: the operator on pieces against the operator on the whole, forward and backward.

Calls are hand-made (every family), torch's own ``OpInfo`` samples (slow), and random shapes. ``graphpar.operators.prove`` says how.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.operators import prove as proofs
from graphpar.operators.discover import discover, discovered
from graphpar.operators.notation import Rule
from graphpar.operators.placement import Context, Placement, from_rule
from graphpar.operators.prove import Call, Proof, context_of, node_of, prove
from graphpar.operators.rules import REGISTERED, has_rule, placements, register_rule
from tests.tools.rule_calls import calls_of, sampled
from tests.tools.rule_samples import FAMILIES, family, real, whole
from tests.tools.samples import SEED, sample

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass
class Numbers:
    """What was proven: operators, calls and placements."""

    operators: set[str] = field(default_factory=set)
    calls: int = 0
    placements: int = 0

    def __str__(self) -> str:
        return f"{len(self.operators)} operators, {self.calls} calls, {self.placements} placements"


NUMBERS: dict[str, Numbers] = collections.defaultdict(Numbers)


@pytest.fixture(scope="module", autouse=True)
def _summary() -> Iterator[None]:
    """Run with -s to see what was proven."""
    yield
    for source, numbers in NUMBERS.items():
        print(f"\n{source}: {numbers}", end="")


def _problems(
    source: str, calls: Iterator[Call] | list[Call], degrees: tuple[int, ...], tried: bool = False
) -> list[str]:
    found = []
    for call in calls:
        try:
            node, _ = node_of(call)
            known = tried or has_rule(node)
        except Exception as error:
            found.append(f"{call}: {type(error).__name__} {error}")
            continue
        NUMBERS[source].calls += known
        for degree in degrees if known else ():
            try:
                proven = list(prove(call, placements, degree))
            except Exception as error:
                found.append(f"{call} over {degree}: {type(error).__name__} {error}")
                continue
            for proof in proven:
                if proof.problem:
                    found.append(f"{call}: {proof.placement} {proof.placement.rewrite} over {degree}: {proof.problem}")
                else:
                    NUMBERS[source].operators.add(str(call.target))
                    NUMBERS[source].placements += 1
    return found


@pytest.mark.parametrize("name", [*FAMILIES, "streams"])
def test_hand_made_calls(name: str) -> None:
    calls = family(name)
    assert [str(call) for call in calls if not has_rule(node_of(call)[0])] == []
    assert _problems("hand-made", calls, (2,)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "streams"])
def test_hand_made_calls_over_four_ranks(name: str) -> None:
    assert _problems("hand-made", family(name), (4,)) == []


def _of_replicas() -> dict[str, Call]:
    """Calls whose batch of 4 rows lies on dim 0."""

    def x(*sizes: int) -> torch.Tensor:
        return torch.randn(4, *sizes, dtype=torch.float64)

    def norm(value: torch.Tensor, weight: bool, running: bool) -> Call:
        def each(size: bool) -> torch.Tensor | None:
            return torch.rand(value.shape[1], dtype=torch.float64) + 0.5 if size else None

        return Call(
            aten.batch_norm.default,
            (value, *map(each, (weight, weight, running, running)), True, 0.1, 1e-5, True),
            batch=1,
        )

    labels, ignored = torch.tensor([2, 0, 1, 1]), torch.tensor([2, -100, -100, 1])
    places = torch.tensor([[[0, 1], [2, 1]], [[-100, 1], [2, 0]], [[0, 0], [2, 1]], [[-100, -100], [-100, 1]]])
    probabilities = x(3).softmax(1)
    return {
        "batch_norm": norm(x(3, 5, 2), True, True),
        "batch_norm of rows": norm(x(3), True, False),
        "batch_norm without weights": norm(x(3, 2), False, True),
        "mean": Call(aten.mean.default, (x(3),), batch=1),
        "mean over rows": Call(aten.mean.dim, (x(3), [0]), batch=1),
        "mean over rows and more": Call(aten.mean.dim, (x(3, 2), [0, 2], True), batch=1),
        "mse_loss": Call(aten.mse_loss.default, (x(3), x(3)), batch=1),
        "kl_div": Call(aten.kl_div.default, (x(3), probabilities), batch=1),
        "binary_cross_entropy_with_logits": Call(
            aten.binary_cross_entropy_with_logits.default, (x(3), probabilities, x(3).abs()), batch=1
        ),
        "cross_entropy": Call(aten.cross_entropy_loss.default, (x(3), labels), batch=1),
        "cross_entropy, some ignored": Call(aten.cross_entropy_loss.default, (x(3), ignored), batch=1),
        "cross_entropy, smoothed": Call(aten.cross_entropy_loss.default, (x(3), ignored, None, 1, -100, 0.2), batch=1),
        "cross_entropy of places": Call(aten.cross_entropy_loss.default, (x(3, 2, 2), places), batch=1),
        "cross_entropy of probabilities": Call(aten.cross_entropy_loss.default, (x(3), probabilities), batch=1),
        "nll_loss": Call(aten.nll_loss_nd.default, (x(3).log_softmax(1), ignored), batch=1),
    }


@pytest.mark.parametrize("name", _of_replicas())
@pytest.mark.parametrize("degree", [2, 4])
def test_means_over_the_rows_of_replicas(name: str, degree: int) -> None:
    """On an axis that divides the batch, means, losses and BatchNorm run on each replica's rows."""
    proven = list(prove(_of_replicas()[name], placements, degree, replicas=True))
    assert [(str(proof.placement), proof.problem) for proof in proven if proof.problem] == []
    assert any(str(proof.placement).startswith("S(0)") and proof.placement.rewrite for proof in proven)


_FAST = (
    "nn.functional.linear", "matmul", "addmm", "einsum", "cat", "split", "chunk", "reshape", "view", "expand", "transpose", "permute",
    "index_put", "gather", "scatter", "index_select", "sum", "mean", "softmax", "nn.functional.layer_norm", "nn.functional.embedding",
    "nn.functional.cross_entropy", "nn.functional.scaled_dot_product_attention", "nn.functional.conv2d", "where", "add", "mul", "div",
    "squeeze", "unsqueeze", "repeat", "repeat_interleave", "cumsum", "topk", "nn.functional.glu", "nn.functional.mse_loss",
)  # fmt: skip


@pytest.mark.costly
def test_samples_of_torch_for_common_operators() -> None:
    pytest.importorskip("expecttest")
    assert _problems("OpInfo", (call for _, call in sampled(6, set(sample(_FAST, 12)))), (2, 5)) == []


def _drawn() -> set[str]:
    """The names of a third of the functions that torch describes."""
    from torch.testing._internal.common_methods_invocations import op_db

    names = list(dict.fromkeys(info.name for info in op_db))
    return set(sample(names, len(names) // 3))


@pytest.mark.slow
def test_rules_that_were_found_hold_for_the_samples_of_torch() -> None:
    """What one trial found is proven once more, on the sample itself."""
    pytest.importorskip("expecttest")
    unknown = (call for _, call in sampled(2, _drawn()) if not _known(call))
    assert _problems("tried", unknown, (2, 5), tried=True) == []
    assert len(NUMBERS["tried"].operators) > (60 if SEED == "all" else 10)


def _known(call: Call) -> bool:
    try:
        return has_rule(node_of(call)[0])
    except Exception:  # a sample that fits no tensor of its own
        return True


@pytest.mark.slow
def test_samples_of_torch_for_all_operators() -> None:
    pytest.importorskip("expecttest")
    # as_strided's samples look beyond their own tensors.
    calls = (call for _, call in sampled(8, _drawn()) if "as_strided" not in str(call))
    assert _problems("OpInfo", calls, (2, 5)) == []
    assert len(NUMBERS["OpInfo"].operators) > (350 if SEED == "all" else 100)


# ---- random shapes ---------------------------------------------------------------------------------------------

_sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
_examples = settings(max_examples=15, deadline=None, derandomize=True)


def _hold(call: Call, *degrees: int) -> None:
    assert _problems("random", [call], degrees or (2, 3)) == []


@_examples
@given(st.lists(_sizes, min_size=0, max_size=3), _sizes, _sizes, st.booleans())
def test_linear_of_random_shapes(lead: list[int], k: int, n: int, bias: bool) -> None:
    _hold(Call(aten.linear.default, (real(*lead, k), real(n, k), *([real(n)] if bias else []))))


@_examples
@given(st.lists(st.tuples(_sizes, st.sampled_from(["both", "left", "right"])), max_size=2), _sizes, _sizes, _sizes)
def test_matmul_of_random_shapes(lead: list[tuple[int, str]], m: int, k: int, n: int) -> None:
    left = [1 if side == "right" else size for size, side in lead]
    right = [1 if side == "left" else size for size, side in lead]
    _hold(Call(aten.matmul.default, (real(*left, m, k), real(*right, k, n))))


@pytest.mark.costly
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_views_of_random_shapes(groups: list[list[int]], data: Any) -> None:
    """Dims are merged and split at will, with and without the batch."""
    sizes = [size for group in groups for size in group]
    merged = [functools.reduce(lambda a, b: a * b, group) for group in groups]
    before, after = (sizes, merged) if data.draw(st.booleans()) else (merged, sizes)
    batch = data.draw(st.sampled_from([None, 11]))
    if batch:
        before, after = [batch * before[0], *before[1:]], [batch * after[0], *after[1:]]
    _hold(Call(aten.view.default, (real(*before), after), batch=batch), 2, 3, 4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_reshapes_of_random_shapes(sizes: list[int], random: Any) -> None:
    """Any factors of the same product."""
    primes = [prime for size in sizes for prime in {4: [2, 2], 6: [2, 3]}.get(size, [size])]
    random.shuffle(primes)
    after, rest = [], primes
    while rest:
        count = random.randint(1, len(rest))
        after.append(functools.reduce(lambda a, b: a * b, rest[:count]))
        rest = rest[count:]
    _hold(Call(aten.reshape.default, (real(*sizes), after)), 2, 3, 4)


@_examples
@given(st.lists(_sizes, min_size=1, max_size=3), st.lists(_sizes, min_size=1, max_size=3), st.data())
def test_cat_and_split_of_random_shapes(sizes: list[int], lengths: list[int], data: Any) -> None:
    dim = data.draw(st.integers(0, len(sizes) - 1))
    parts = [real(*sizes[:dim], length, *sizes[dim + 1 :]) for length in lengths]
    _hold(Call(aten.cat.default, (parts, dim)), 2)
    _hold(Call(aten.split_with_sizes.default, (torch.cat(parts, dim), lengths, dim)), 2)
    each = data.draw(st.integers(1, 4))
    _hold(Call(aten.split.Tensor, (torch.cat(parts, dim), each, dim)), 2)
    _hold(Call(aten.chunk.default, (torch.cat(parts, dim), each, dim)), 2)
    size = sum(lengths)
    start = data.draw(st.integers(-size, size - 1))
    _hold(Call(aten.slice.Tensor, (torch.cat(parts, dim), dim, start, data.draw(st.sampled_from([None, size, -1])))), 2)


@_examples
@given(
    *[st.sampled_from([1, 2, 4])] * 3,
    st.sampled_from([2, 3, 4]),
    st.booleans(),
    st.sampled_from(["", "q k", "h q k", "b 1 1 k", "1 h q k"]),
)
def test_attention_of_random_shapes(b: int, h: int, groups: int, s: int, causal: bool, mask: str) -> None:
    sizes = {"b": b, "h": h * groups, "q": s, "k": s, "1": 1}
    masks = [real(*[sizes[name] for name in mask.split()])] if mask and not causal else [None]
    args = (real(b, h * groups, s, 4), real(b, h, s, 4), real(b, h, s, 2), *masks, 0.0, causal)
    _hold(Call(aten.scaled_dot_product_attention.default, args, {"enable_gqa": groups > 1}), 2, 4)


@_examples
@given(st.lists(_sizes, max_size=3), st.lists(st.integers(1, 4), max_size=2), st.data())
def test_expand_of_random_shapes(sizes: list[int], new: list[int], data: Any) -> None:
    before = [1 if data.draw(st.booleans()) else size for size in sizes]
    after = [*new, *(-1 if size == own and data.draw(st.booleans()) else size for size, own in zip(sizes, before))]
    _hold(Call(aten.expand.default, (real(*before), after)))
    _hold(Call(aten.repeat.default, (real(*before), [*new, *(data.draw(st.integers(1, 3)) for _ in before)])))


@pytest.mark.costly
@_examples
@given(_sizes, _sizes, st.lists(_sizes, max_size=2))
def test_embedding_and_loss_of_random_shapes(vocabulary: int, width: int, lead: list[int]) -> None:
    _hold(Call(aten.embedding.default, (real(vocabulary, width), whole(vocabulary, *lead))))
    _hold(Call(aten.cross_entropy_loss.default, (real(width, vocabulary, *lead), whole(vocabulary, width, *lead))))
    _hold(Call(aten.cross_entropy_loss.default, (real(width, vocabulary), whole(vocabulary, width), None, 2)))


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x, w: F.linear(x, w), [(11, 6, 8), (4, 8)]),
        (lambda x: x.reshape(44, 8), [(11, 4, 8)]),
        (lambda x: x.reshape(11, 4, 2, 4), [(44, 8)]),
        (lambda x: x.expand(22, 4), [(1, 4)]),
        (lambda x: x.sum(0), [(44, 6)]),
        (lambda x: x.mean(0), [(44, 6)]),
        (lambda x, y: x * y, [(22, 4), (22, 1)]),
        (lambda x: x.transpose(0, 1).reshape(4, 22), [(11, 4, 2)]),
    ],
)
def test_dims_that_follow_the_batch(function: Any, shapes: list[tuple[int, ...]]) -> None:
    calls = calls_of(function, *[real(*shape) for shape in shapes])
    for call in calls:
        call.batch = 11
    assert _problems("batch", calls, (2, 4)) == []


@pytest.mark.parametrize("used", [(0,), (1,), ()])
@pytest.mark.parametrize(
    "target, args",
    [
        (aten.max.dim, (real(4, 6), 1)),
        (aten.split.Tensor, (real(4, 8), 4, 1)),
        (aten.topk.default, (real(4, 6), 2)),
        (aten.unbind.int, (real(4, 2), 1)),
        (aten.native_layer_norm.default, (real(4, 6), [6], None, None, 1e-5)),
    ],
)
def test_results_that_nobody_takes(target: Any, args: tuple[Any, ...], used: tuple[int, ...]) -> None:
    assert _problems("unused", [Call(target, args, used=used)], (2, 4)) == []


# ---- the proofs themselves -------------------------------------------------------------------------------------


def _claim(rule: Rule) -> Any:
    def place(node: fx.Node, context: Context) -> list[Placement]:
        return from_rule(node, rule, context)

    return place


@pytest.mark.parametrize(
    "call, rule",
    [
        (Call(aten.softmax.int, (real(4, 6), 1)), Rule((("a", "b"),), (("a", "b"),), frozenset("a"))),
        (Call(aten.relu.default, (real(4, 6),)), Rule((("a", "b"),), (("a", "b"),), frozenset("ab"), linear=(frozenset({0}),))),
        (Call(aten.transpose.int, (real(4, 4), 0, 1)), Rule((("a", "b"),), (("a", "b"),))),
        (Call(aten.log.default, (real(3, 4).abs(),)), Rule((("a", "b"),), (("a", "b"),), frozenset("b"), frozenset("a"))),
        (Call(aten.amax.default, (real(4, 6), [1])), Rule((("a", "b"),), (("a",),), frozenset("a"))),
        (Call(aten.layer_norm.default, (real(4, 6), [6], real(6))), Rule((("a", "b"), ("b",)), (("a", "b"),), frozenset("a"))),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_found(call: Call, rule: Rule) -> None:
    found: list[Proof] = list(prove(call, _claim(rule)))
    assert any(proof.problem for proof in found), found


def test_neighbours_offer_uneven_cuts_and_parts() -> None:
    node, _ = node_of(Call(aten.relu.default, (real(7, 8),)))
    assert {str(shard) for shard in proofs.offers(node, 0, 2)} == {"S(0)", "S(1)", "S(1:4)", "S(1:2)", "S(1:2+6)"}


# ---- rules of users --------------------------------------------------------------------------------------------


def test_a_registered_rule_holds_for_its_operator() -> None:
    @torch.library.custom_op("graphpar_rules::scaled_rows", mutates_args=())
    def scaled_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).cumsum(0)

    target = torch.ops.graphpar_rules.scaled_rows.default
    register_rule("graphpar_rules::scaled_rows", "a* b, b -> a* b")
    try:
        node, _ = node_of(Call(target, (real(4, 6), real(6))))
        cuts = {str(p) for p in placements(node, context_of(2, offered=False)) if p.divides}
        assert cuts == {"S(1), S(0) -> S(1)"}
    finally:
        REGISTERED.clear()


@pytest.mark.parametrize(
    "operator, rule, words",
    [
        ("lib::op", "b s d", "has no '->'"),
        ("op", "b -> b", "namespace"),
        ("lib::op", "b s, -> b ->", "one '->'"),
        ("lib::op", "b -> b new", "new"),
        ("lib::op", "b b -> b", "twice"),
    ],
)
def test_a_wrong_registration_is_explained(operator: str, rule: str, words: str) -> None:
    with pytest.raises(GraphparError, match=words):
        register_rule(operator, rule)


# ---- operators without a rule ----------------------------------------------------------------------------------


def _cuts(call: Call) -> set[str]:
    """The placements that cut something; each is proven."""
    assert [proof for proof in prove(call, placements) if proof.problem] == []
    node, _ = node_of(call)
    return {str(p) for p in placements(node, context_of(2, offered=False)) if p.divides}


def test_a_custom_operator_is_tried() -> None:
    @torch.library.custom_op("graphpar_rules::gated", mutates_args=())
    def gated(x: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
        split = x.view(x.shape[0], heads, -1)
        return (split.softmax(-1) * weight.view(heads, -1)).flatten(1)

    @gated.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
        return torch.empty_like(x)

    def backward(context: Any, gradient: torch.Tensor) -> Any:
        x, weight, heads = context.saved
        with torch.enable_grad():
            given = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            made = (given[0].view(x.shape[0], heads, -1).softmax(-1) * given[1].view(heads, -1)).flatten(1)
            return *torch.autograd.grad(made, given, gradient), None

    gated.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs))
    target = torch.ops.graphpar_rules.gated.default
    # Rows are independent, channels are not: a head's must stay together, and how many heads there are is a literal.
    assert _cuts(Call(target, (real(4, 8), real(8), 2))) == {"S(0), R -> S(0)"}
    node, _ = node_of(Call(target, (real(4, 8), real(8), 2)))
    assert discovered([node])["graphpar_rules::gated"]


@pytest.mark.costly
def test_a_plan_names_the_rules_that_were_found_for_its_own_operators() -> None:
    def plan(size: int) -> gp.Plan:
        model = nn.Sequential(nn.Linear(8, size * size), nn.Unflatten(-1, (size, size)), Exponential(), nn.Flatten())
        program = gp.export(model, (torch.randn(4, 8),), loss_fn=lambda y: y.mean())
        return gp.plan(program, mesh={"tp": 2})

    first = plan(4).to_json()
    other = plan(6)

    assert "linalg_matrix_exp" in other.sharding.discovered
    assert plan(4).to_json() == first == gp.Plan.from_json(first).to_json()
    assert list(first["sharding"]["discovered"]) == ["linalg_matrix_exp"]


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(x)


def test_an_operator_with_a_window_stays_whole_along_it() -> None:
    @torch.library.custom_op("graphpar_rules::window", mutates_args=())
    def window(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)

    assert _cuts(Call(torch.ops.graphpar_rules.window.default, (real(8, 6),))) == {"S(1) -> S(1)"}


def test_an_operator_that_can_not_be_run_stays_whole() -> None:
    @torch.library.custom_op("graphpar_rules::elsewhere", mutates_args=())
    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        if x.shape != (8, 6) or not torch.equal(x, torch.ones(8, 6)):
            raise RuntimeError("needs an accelerator")
        return x.clone()

    assert _cuts(Call(torch.ops.graphpar_rules.elsewhere.default, (torch.ones(8, 6),))) == set()


@pytest.mark.parametrize(
    "call, cuts",
    [
        (Call(aten.linalg_inv.default, (real(4, 6, 6),)), {"S(0) -> S(0)"}),
        (Call(aten.linalg_cross.default, (real(4, 3), real(4, 3))), {"S(0), S(0) -> S(0)"}),
        (Call(aten.linalg_inv.default, (real(4, 3, 3),)), {"S(0) -> S(0)"}),
    ],
)
def test_operators_of_torch_without_a_rule_are_tried(call: Call, cuts: set[str]) -> None:
    assert not has_rule(node_of(call)[0])
    assert _cuts(call) == cuts


def test_trying_finds_the_rule_that_we_wrote() -> None:
    call = Call(aten.linear.default, (real(4, 6, 8), real(10, 8)))
    found = discover(node_of(call)[0])
    assert found is not None
    again = {str(p) for p in from_rule(node_of(call)[0], found, context_of(2, offered=False))}
    node, _ = node_of(call)
    assert {str(p) for p in placements(node, context_of(2, offered=False)) if p.divides} <= again
