"""The collectives on 1, 2 and 4 ranks (gloo) against what their types say, and the table of transitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted import collectives
from graphpar.operators.transitions import TABLE, Cost, collective_cost, path
from graphpar.runtime.layout import I, P, R, Shard, Type, joined, local_size, shard_of
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES
from tests.ranks import collectives_script as fixture
from tests.ranks.collectives_script import GRADIENT, LOSSES, SHAPE, VOCABULARIES, Case, Loss, types
from tests.tools.rank_pool import RankPool

TIMEOUT_S = 60.0
Results = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Results:
    """What each of 4 ranks made of every case: over all of them, and over 2 groups of 2."""
    folder = tmp_path_factory.mktemp("ranks")
    pool.torchrun(Path(fixture.__file__), [str(folder)], nproc=4, timeout_s=TIMEOUT_S)
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in range(4)]


@pytest.fixture(scope="module", params=["alone", "first pair", "second pair", "four"])
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """What each rank of one group made of every case."""
    if request.param == "alone":
        collectives.bind({"tp": None})
        yield [fixture.run_all(1, 0)]
        collectives.bind({})
        return
    launch: Results = request.getfixturevalue("launch")
    ranks = {"first pair": launch[:2], "second pair": launch[2:], "four": launch}[request.param]
    prefix = f"{len(ranks)}/"
    yield [{n.removeprefix(prefix): x for n, x in rank.items() if n.startswith(prefix)} for rank in ranks]


def check(found: list[Tensor], whole: Tensor, kind: Type, padding_is_zero: bool) -> None:
    """The ranks hold ``whole`` as ``kind`` says."""
    degree = len(found)
    if kind is P:
        assert torch.equal(sum(found[1:], found[0]), whole)
        return
    for rank, local in enumerate(found):
        expected = shard_of(whole, kind, degree, rank) if isinstance(kind, Shard) else whole
        if isinstance(kind, Shard) and not padding_is_zero:
            real = shard_of(torch.ones_like(whole, dtype=torch.bool), kind, degree, rank)
            assert local.shape == expected.shape
            local, expected = local[real], expected[real]
        assert local.dtype == expected.dtype and torch.equal(local, expected)


def test_every_path_moves_values_and_gradients_as_its_types_say(results: Results) -> None:
    degree = len(results)
    for case in fixture.cases(degree):
        try:
            check([rank[f"{case.name}/output"] for rank in results], fixture.value(case), case.target, False)
            if case.differentiable:
                gradients = [rank[f"{case.name}/gradient"] for rank in results]
                check(gradients, fixture.gradient(case), GRADIENT.get(case.source, case.source), True)
        except AssertionError as error:
            raise AssertionError(f"{case.name} on {degree} ranks") from error


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_vocabulary_loss_is_cross_entropy(results: Results, number: int) -> None:
    case, degree = LOSSES[number], len(results)
    logits, target, weight = case.inputs()
    exact = torch.promote_types(case.dtype, torch.float32)
    x = logits.to(exact).requires_grad_()
    loss = F.cross_entropy(
        x,
        target,
        weight if weight is None else weight.to(exact),
        ignore_index=case.ignore_index,
        reduction=case.reduction,
    )
    loss.backward(case.upstream(loss))
    assert x.grad is not None
    tolerance = {"float64": 1e-11, "float32": 1e-6}.get(str(case.dtype)[6:], 1e-2)
    for rank, found in enumerate(results):
        output, gradient = found[f"loss {number}/output"], found[f"loss {number}/gradient"]
        assert torch.equal(gradient, found[f"loss {number}/again"])  # a backward leaves what it needs as it was
        assert output.dtype == gradient.dtype == case.dtype
        assert torch.equal(output, results[0][f"loss {number}/output"])  # the same bits on every rank
        torch.testing.assert_close(output.to(exact), loss.detach(), rtol=tolerance, atol=tolerance)
        expected = shard_of(x.grad, Shard(1), degree, rank)
        torch.testing.assert_close(gradient.to(exact), expected, rtol=tolerance, atol=tolerance)
        assert not gradient[shard_of(torch.ones_like(x), Shard(1), degree, rank) == 0].any()


def test_vocabulary_loss_makes_no_whole_logits_and_saves_one_piece(results: Results) -> None:
    number = next(number for number, case in enumerate(LOSSES) if case.vocab == 23)
    piece = shard_of(LOSSES[number].inputs()[0], Shard(1), len(results), 0).numel()
    for found in results:
        assert found[f"loss {number}/made"].max() == piece
        assert found[f"loss {number}/saved"].eq(piece).sum() == 1


@pytest.fixture
def alone() -> Iterator[None]:
    collectives.bind({"tp": None})
    yield
    collectives.bind({})


@pytest.mark.parametrize(
    "number", [n for n, case in enumerate(LOSSES) if case.dtype == torch.float64 and case.scale < 1e3]
)
def test_vocabulary_loss_has_the_gradient_of_its_differences(alone: None, number: int) -> None:
    case = LOSSES[number]
    logits, target, weight = case.inputs()

    def loss(x: Tensor) -> Tensor:
        return collectives.vocab_cross_entropy(x, target, "tp", case.vocab, weight, case.reduction, case.ignore_index)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_vocabulary_loss_has_no_second_gradient_and_says_so(alone: None) -> None:
    logits, target, _ = Loss(8).inputs()
    loss = collectives.vocab_cross_entropy(logits.requires_grad_(), target, "tp", 8)
    (gradient,) = torch.autograd.grad(loss * logits.sum(), logits, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("label", [-1, 7, 8, 99])
def test_a_label_that_is_no_class_makes_the_loss_nan(alone: None, label: int) -> None:
    logits, target, _ = Loss(8).inputs()  # of which the last is padding
    target = target.clamp(max=6)
    assert collectives.vocab_cross_entropy(logits, target, "tp", 7).isfinite()
    target[0] = label

    assert collectives.vocab_cross_entropy(logits, target, "tp", 7).isnan()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabulary_embedding_is_a_pending_sum(results: Results, vocab: int) -> None:
    ids, table, upstream = fixture.embedding_inputs(vocab)
    table.requires_grad_()
    whole = F.embedding(ids, table)
    whole.backward(upstream)
    assert table.grad is not None
    check([rank[f"embedding {vocab}/output"] for rank in results], whole.detach(), P, True)
    check([rank[f"embedding {vocab}/gradient"] for rank in results], table.grad, Shard(0), True)


def test_global_index_is_the_cut_of_all_indices(results: Results) -> None:
    degree = len(results)
    for kind in types(degree):
        if isinstance(kind, Shard):
            size = local_size(SHAPE[kind.dim], kind, degree) * degree  # with padding
            found = [rank[f"index/{kind}"] for rank in results]
            check(found, torch.arange(size), Shard(0, kind.parts), True)


@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="refused with this torch")
def test_compiled_in_one_graph(launch: Results) -> None:
    for found in launch[:2]:
        for name in ("loss", "x", "table"):
            assert found[f"2/eager/{name}"].any()
            torch.testing.assert_close(found[f"2/compiled/{name}"], found[f"2/eager/{name}"])


@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="refused with this torch")
def test_every_rank_compiles_the_same_graph(launch: Results) -> None:
    """Else the compiler drops or reorders a collective on one rank only, and the ranks talk past each other."""
    texts = [bytes(found["graphs"].tolist()).decode() for found in launch[:2]]
    assert len(texts[0].split("\n\n")) == 2 and texts[0].count("all_gather_into_tensor.default") >= 4
    assert texts[0] == texts[1]


# Cutting and joining.

shards = st.builds(
    lambda dim, parts: Shard(dim, tuple(parts)), st.integers(0, 2), st.lists(st.integers(1, 4), max_size=3)
)


@given(shards, st.integers(1, 5), st.lists(st.integers(0, 7), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_the_whole(shard: Shard, degree: int, sizes: list[int]) -> None:
    shard = Shard(shard.dim, tuple(part * degree for part in shard.parts))
    sizes[shard.dim] *= sum(shard.parts) or 1
    whole = torch.arange(torch.Size(sizes).numel()).view(sizes) + 1
    pieces = [shard_of(whole, shard, degree, rank) for rank in range(degree)]
    assert {piece.shape[shard.dim] for piece in pieces} == {local_size(sizes[shard.dim], shard, degree)}
    assert sum(int((piece != 0).sum()) for piece in pieces) == whole.numel()
    assert torch.equal(joined(pieces, shard, sizes[shard.dim]), whole)

    # The emitted program has its own, of stacked pieces.
    stacked = collectives._pieces(whole, shard.dim, shard.parts, degree)
    assert torch.equal(stacked, torch.stack(pieces))
    assert torch.equal(collectives._joined(stacked, shard.dim, shard.parts, sizes[shard.dim]), whole)


def test_one_value_per_channel_has_no_variance() -> None:
    """As torch says of it; with the rows of another replica there are two."""
    options = {"training": True, "momentum": 0.1, "eps": 1e-5}
    x, mean, var = torch.randn(1, 3), torch.zeros(3), torch.ones(3)
    collectives.bind({"dp_replicate": None})
    try:
        for running in ((mean, var), (None, None)):
            for normalize, axes in ((F.batch_norm, ()), (collectives.sync_batch_norm, (["dp_replicate"],))):
                with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
                    rest = (*running, None, None) if normalize is F.batch_norm else (None, None, *running)
                    normalize(x, *rest, *axes, **options)
        assert torch.equal(mean, torch.zeros(3)) and torch.equal(var, torch.ones(3))
    finally:
        collectives.bind({})


# The table and its paths.

some_types = st.one_of(st.sampled_from([R, I, P]), shards)


def kind_of(kind: Type) -> str:
    return "S" if isinstance(kind, Shard) else kind.letter


def test_the_table_is_the_functions() -> None:
    assert len(TABLE) == 12 and len({(row.source, row.target) for row in TABLE}) == 12
    for row in TABLE:
        assert row.function is not None
        doc = row.called.__doc__
        assert doc is not None
        source, target = (rf"{kind}" for kind in (row.source, row.target))
        assert doc.startswith(source) and f"-> {target}" in doc.partition(":")[0], doc
        assert (row.forward in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")) == bool(
            row.forward_collective
        )
        assert (row.backward in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")) == bool(
            row.backward_collective
        )


@given(some_types, some_types, st.booleans(), st.sampled_from([2, 3, 8, 64]))
@settings(max_examples=300, deadline=None)
def test_a_path_leads_from_its_source_to_its_target(
    source: Type, target: Type, differentiable: bool, degree: int
) -> None:
    steps = path(source, target, differentiable=differentiable)
    if steps is None:
        assert differentiable and (source, target) == (R, I)
        return
    ends = [source, *(step.target for step in steps)]
    assert ends[-1] == target and [step.source for step in steps] == ends[:-1]
    for step in steps:
        assert (kind_of(step.source), kind_of(step.target)) == (step.transition.source, step.transition.target)
        forward, backward = step.bytes_moved(1e6, degree)
        assert step.cost(1e6, degree, train=False) == forward and step.cost(1e6, degree) == forward + backward
        for cost, name in (
            (forward, step.transition.forward_collective),
            (backward, step.transition.backward_collective),
        ):
            assert (cost.bytes_sent > 0) == (cost.messages > 0) == (name is not None)
        assert all(part == Cost() for part in step.bytes_moved(1e6, 1))
    if not differentiable:
        assert not {step.function for step in steps} & {"sum_gradient", "all_reduce_both", "shard_invariant"}


@given(some_types, st.sampled_from([R, I, P]), some_types, st.booleans(), st.sampled_from([2, 3, 8, 64]))
@settings(max_examples=300, deadline=None)
def test_no_detour_is_cheaper(source: Type, between: Type, target: Type, differentiable: bool, degree: int) -> None:
    legs = [
        path(*ends, differentiable=differentiable) for ends in ((source, target), (source, between), (between, target))
    ]
    direct, *detour = legs
    if direct is not None and None not in detour:
        costs = [
            sum((step.cost(1e6, degree, differentiable) for step in leg), Cost())
            for leg in (direct, tuple(itertools.chain(*(leg or () for leg in detour))))
        ]
        assert costs[0].bytes_sent <= costs[1].bytes_sent * (1 + 1e-12) and costs[0].messages <= costs[1].messages


def test_ring_costs() -> None:
    assert collective_cost("all-reduce", 800.0, 4) == Cost(1200.0, 6)
    assert collective_cost("all-gather", 800.0, 4) == collective_cost("reduce-scatter", 800.0, 4) == Cost(600.0, 3)
    assert collective_cost("all-to-all", 800.0, 4) == Cost(150.0, 3)
    assert collective_cost(None, 800.0, 4) == Cost()


def test_an_uneven_cut_is_joined_to_its_size() -> None:
    (step,) = path(Shard(1), R) or ()
    assert step.options((6, 5), 2) == {"dim": 1, "size": 5} and step.options((6, 4), 2) == {"dim": 1}
    (step,) = path(Shard(1), Shard(0, (6,))) or ()
    assert step.options((6, 5), 2) == {"from_dim": 1, "to_dim": 0, "to_parts": (6,), "size": 5}
    assert Case(I, P).steps()[1].function == "first_only"
