"""Boolean indexing: whatever the spelling, losses of chosen rows are those of eager torch, in microbatches without one, too."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import graphpar as gp
from graphpar.frontend.trace_guards import EqualMasks
from tests.passes.normalize.test_batch_and_loss import TS, XS, YS, M, Net, T, W, X, Y, each
from tests.tools.equality import Case, assert_exact, assert_same, eager, refusal, run
from tests.tools.samples import drawn

Loss = Callable[..., Tensor]
YR = Y.clone()
YR[[1, 4]] = -100
ROWS, TOKENS = torch.tensor([1, 0, 0, 0, 1, 1]).bool(), M.bool()  # the second row of TOKENS has none
GAPS = torch.where(T > 0, T, torch.nan)


def chosen_ce(o: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(o[y != -100], y[y != -100], **options)


def shifted(o: Tensor, y: Tensor) -> Tensor:
    return chosen_ce(o[:, :-1].reshape(-1, 5), y[:, 1:].reshape(-1))


# name: (input, loss_fn, targets)
EXACT: dict[str, tuple[Tensor, Loss, tuple[Tensor, ...]]] = {
    "labels, flat": (XS, lambda o, y: chosen_ce(o.flatten(0, 1), y.flatten()), (YS,)),
    "labels, shifted": (XS, shifted, (YS,)),
    "labels of rows": (X, chosen_ce, (YR,)),
    "class weights, smoothed": (XS, lambda o, y: chosen_ce(o, y, weight=W, label_smoothing=0.1), (YS,)),
    "one mask flat, one not": (XS, lambda o, y: F.cross_entropy(o.view(-1, 5)[y.view(-1) != -100], y[y != -100]), (YS,)),
    "ignored labels among the chosen": (XS, lambda o, y, m: F.cross_entropy(o[m], y[m]), (YS, TOKENS)),
    "rows of tokens, flat": (XS, lambda o, y, m: F.cross_entropy(o[m].flatten(0, 1), y[m].flatten()), (YS, ROWS)),
    "no reduction, then the mean": (X, lambda o, y: chosen_ce(o, y, reduction="none").mean(), (YR,)),
    "sum over a count": (X, lambda o, y: chosen_ce(o, y, reduction="sum") / (y != -100).sum(), (YR,)),
    "sum over item()": (X, lambda o, y: chosen_ce(o, y, reduction="sum") / (y != -100).sum().item(), (YR,)),
    "sum over a float's item()": (XS, lambda o, y, m: (each(o, y) * m).sum() / m.sum().item(), (YS, M)),
    "sum over numel()": (XS, lambda o, y, m: (lambda c: c.sum() / c.numel())(each(o, y)[m]), (YS, TOKENS)),
    "sum over a size less one": (X, lambda o, m: (lambda c: c.sum() / (2 * c.shape[0] - 1))(o[m]), (ROWS,)),
    "chosen losses": (XS, lambda o, y, m: each(o, y)[m].mean(), (YS, TOKENS)),
    "masked_select": (XS, lambda o, y, m: torch.masked_select(each(o, y), m).mean(), (YS, TOKENS)),
    "masked_select, broadcast": (XS, lambda o, t, m: torch.masked_select((o - t) ** 2, m[..., None]).mean(), (TS, TOKENS)),
    "mask of elements": (XS, lambda o, t: F.mse_loss(o[t > 0], t[t > 0]), (TS,)),
    "mask and its complement": (XS, lambda o, t, m: F.mse_loss(o[m], t[m]) + 0.5 * F.l1_loss(o[~m], t[~m]), (TS, TOKENS)),
    "where": (XS, lambda o, t, m: F.mse_loss(o[torch.where(m)], t[torch.where(m)]), (TS, TOKENS)),
    "nonzero": (X, lambda o, t, m: (lambda i: F.mse_loss(o[i], t[i]))(m.nonzero().squeeze(1)), (T, ROWS)),
    "nonzero, column": (X, lambda o, t, m: (lambda i: F.mse_loss(o[i], t.index_select(0, i)))(m.nonzero()[:, 0]), (T, ROWS)),
    "nonzero, tuple": (XS, lambda o, t, m: (lambda i: F.mse_loss(o[i], t[i]))(m.nonzero(as_tuple=True)), (TS, TOKENS)),
    "gathered": (XS, lambda o, y: -F.log_softmax(o[y != -100], -1).gather(1, y[y != -100][:, None]).mean(), (YS,)),
    "nll": (XS, lambda o, y: F.nll_loss(F.log_softmax(o[y != -100], -1), y[y != -100], weight=W), (YS,)),
    "binary": (XS, lambda o, t, m: F.binary_cross_entropy_with_logits(o[m], t[m].sigmoid(), pos_weight=W), (TS, TOKENS)),
    "probabilities": (XS, lambda o, t, m: F.binary_cross_entropy(o[m].sigmoid(), t[m].sigmoid()), (TS, TOKENS)),
    "class probabilities": (XS, lambda o, t, m: F.cross_entropy(o[m], t[m].softmax(-1)), (TS, TOKENS)),
    "log-sum-exp": (XS, lambda o, m: o[m].logsumexp(-1).mean(), (TOKENS,)),
    "classes on dim 1": (XS, lambda o, y, m: F.cross_entropy(o[m].transpose(1, 2), y[m]), (YS, ROWS)),
    "kl, batchmean": (
        XS, lambda o, t, m: F.kl_div(F.log_softmax(o[m], -1), t[m].softmax(-1), reduction="batchmean"), (TS, TOKENS),
    ),
    "cosine": (XS, lambda o, t, m: F.cosine_similarity(o[m], t[m], dim=-1).mean(), (TS, TOKENS)),
    "one column": (X, lambda o, t, m: F.mse_loss(o[m, 1], t[m][:, 1]), (T, ROWS)),
    "mean over rows, then a sum": (XS, lambda o, m: o[m].mean(0).sum(), (TOKENS,)),
    "contracted": (X, lambda o, t, m: torch.einsum("ri,ri->", o[m], t[m]) / m.sum(), (T, ROWS)),
    "chosen among the chosen": (X, lambda o, t, m: (o[m][t[m][:, 0] > 0]).pow(2).mean(), (T, ROWS)),
    "chosen by the model": (XS, lambda o, t: ((o - t) ** 2)[o > 0].sum(), (TS,)),
    "means of rows that have any": (
        XS, lambda o, y, m: ((each(o, y) * m).sum(1)[m.any(1)] / m.sum(1)[m.any(1)]).mean(), (YS, TOKENS),
    ),
    "missing targets": (X, lambda o, t: F.mse_loss(o[~t.isnan()], t[~t.isnan()]), (GAPS,)),
    "outside of its domain": (X, lambda o, t: (o[t > 0] * t[t > 0].log()).mean(), (T,)),
    "labels that are no class": (XS, lambda o, y: -F.log_softmax(o[y >= 0], -1).gather(-1, y[y >= 0][:, None]).mean(), (YS,)),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(list(EXACT), 7, 10))
def test_losses_of_chosen_rows(name: str) -> None:
    x, loss_fn, targets = EXACT[name]

    program = assert_exact(Case(Net(), (x,), {}, loss_fn, targets), [1, 5], [1] * 6)

    assert not any("index" in str(node.target) for node in program.graph.nodes if node.op == "call_function")


def scaled(o: Tensor, m: Tensor) -> Tensor:
    o = o.clone()
    o[m] = torch.tanh(o[m]) * 2 + 1
    return o.square().mean()


def test_rows_written_back() -> None:
    assert_exact(Case(Net(), (XS,), {}, scaled, (TOKENS,)), [1, 5])


def test_masks_that_are_written_choose_rows_of_their_own() -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        first, second = t > 0, t > 0
        first[:, 0] = False
        return o[first].sum() / 7 + o[second].mean()

    assert_exact(Case(Net(), (X,), {}, loss_fn, (T,)), [1, 5])


def test_rows_that_the_model_chooses_run_whole() -> None:
    case = Case(Net(), (XS,), {}, lambda o, t: ((o - t) ** 2)[o > 0].mean(), (TS,))
    program = case.export()

    assert "div is not additive over examples (test_static_masking.py" in refusal(program)
    assert_same(run(program, case), eager(case))


SIGNS = torch.tensor([1.0, -1, 1, -1, 1, -1])
HALVES = SIGNS[:, None] * torch.tensor([1.0, -1, 2, 1, 3])  # as many of each sign in every column


def written_between(o: Tensor, t: Tensor) -> Tensor:
    mask = t[:, 0] > 0
    chosen = o[mask]
    mask.logical_not_()
    return F.mse_loss(chosen, t[mask])


def made_of_what_is_written(o: Tensor, t: Tensor) -> Tensor:
    base = t.clone()
    column = base[:, 0]
    chosen = o[column > 0]
    base.neg_()
    return F.mse_loss(chosen, t[column > 0])


# Masks that are not the same, though each chooses as many rows as the other
AS_MANY: dict[str, Loss] = {
    "another comparison": lambda o, t: F.mse_loss(o[t[:, 0] > 0], t[t[:, 0] <= 0]),
    "another number": lambda o, t: F.mse_loss(o[t[:, 2] > 0], t[t[:, 2] > -1]),
    "another operand": lambda o, t: F.mse_loss(o[t[:, 0] > 0], t[t[:, 1] > 0]),
    "written between": written_between,
    "made of what is written": made_of_what_is_written,
}


@pytest.mark.costly
@pytest.mark.parametrize("name", AS_MANY)
def test_masks_that_choose_as_many_rows_are_not_taken_for_one(name: str) -> None:
    with pytest.raises(gp.GraphparError, match=r"depends on values.*test_static_masking.py:\d+"):
        gp.export(Net(), (X,), loss_fn=AS_MANY[name], targets=(HALVES,))


REFUSED: dict[str, tuple[Tensor, Loss, tuple[Tensor, ...], str]] = {
    "spread": (X, lambda o, m: o[m].std(), (ROWS,), r"std \(test_static_masking.py:\d+\) needs a size made by index \(test_static_masking"),
    "sorted": (X, lambda o, m: o[m].sort(0)[0].sum(), (ROWS,), r"sort \(test_static_masking.py:\d+\)"),
    "joined": (X, lambda o, m: torch.cat([o[m], o]).mean(), (ROWS,), r"cat \(test_static_masking.py:\d+\)"),
    "columns": (X, lambda o, m: o[:, m].mean(), (W > 1,), r"index \(test_static_masking.py:\d+\)"),
    "different masks": (X, lambda o, t, m: (o[m] * t[t[:, 0] > 0]).mean(), (T, ROWS), r"test_static_masking.py:\d+"),
    "unique": (X, lambda o, y: o.mean() * y.unique().sum(), (Y,), r"_unique2 \(test_static_masking.py:\d+\)"),
    "len": (X, lambda o, m: o[m].sum() / len(o[m]), (ROWS,), r"test_static_masking.py:\d+"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_size_is_refused_with_its_line(name: str) -> None:
    x, loss_fn, targets, message = REFUSED[name]

    with pytest.raises(gp.GraphparError) as refused:
        gp.export(Net(), (x,), loss_fn=loss_fn, targets=targets)

    assert re.search(message, str(refused.value)), refused.value


def test_outputs_of_chosen_rows_are_refused() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[x[:, 0] > 0]

    with pytest.raises(gp.GraphparError, match=r"index \(test_static_masking.py:\d+\)"):
        gp.export(Chooses(), (X,), mode="infer")


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}], ids=str)
def test_programs_with_chosen_rows_are_priced_and_printed(mesh: dict[str, int]) -> None:
    program = gp.export(Net(), (XS,), loss_fn=chosen_ce, targets=(YS,))

    for text in gp.partition(program, gp.plan(program, mesh=mesh)).files.values():
        assert "nonzero" not in text


def test_masks_of_equal_expressions_choose_equally_many_rows_and_others_do_not() -> None:
    """Unless a value that they read, or the mask itself, was written in between."""

    def chosen(mask: Tensor) -> object:
        return rows[mask].shape[0].node.expr

    with FakeTensorMode(shape_env=ShapeEnv()), EqualMasks():
        rows, t = torch.ones(6), torch.ones(6)
        first = chosen(t > 0)
        assert chosen(t > 0) == first
        assert len({first, chosen(t > 1), chosen(t >= 0), chosen(rows > 0), chosen(~(t > 0))}) == 5
        mask = t > 0
        mask.logical_not_()
        assert chosen(mask) != first
        t.add_(1)
        assert chosen(t > 0) != first


# ---- joined with others -------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """A graph convolution with a loop at each node, as torch_geometric's: edges from a node to itself are left out first."""

    def __init__(self, pool: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.pool = nn.Linear(8, 16), nn.Linear(16, 5), pool

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        count = x.size(0)
        loops = torch.arange(count).view(1, -1).repeat(2, 1)
        edges = torch.cat([edges[:, edges[0] != edges[1]], loops], 1)
        source, target = edges[0], edges[1]
        degree = torch.zeros(count).scatter_add(0, target, torch.ones(edges.size(1)))
        scale = degree[source].rsqrt() * degree[target].rsqrt()
        for layer in (self.first, self.second):
            x = self.pool(layer(x), edges, scale)
        return x


def _scattered(h: Tensor, edges: Tensor, scale: Tensor) -> Tensor:
    values = scale.view(-1, 1) * h.index_select(0, edges[0])
    return values.new_zeros(h.shape).scatter_add(0, edges[1].view(-1, 1).expand_as(values), values)


def _added(h: Tensor, edges: Tensor, scale: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * scale.unsqueeze(-1))


@pytest.mark.parametrize("pool", [_scattered, _added])
def test_chosen_columns_that_are_joined_with_others_stay_in_place(pool: Callable[..., Tensor]) -> None:
    edges = torch.randint(0, 12, (2, 40), generator=torch.Generator().manual_seed(0))
    edges[1, :4] = edges[0, :4]
    labels = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(1))
    case = Case(Graph(pool), (torch.randn(12, 8), edges), {}, F.cross_entropy, (labels,))
    program = case.export()

    assert_same(run(program, case), eager(case))
    assert program.couplings


def test_joined_rows_that_are_used_in_another_way_are_refused() -> None:
    case = Case(
        Graph(lambda h, edges, scale: h + scale.median()),
        (torch.randn(12, 8), torch.zeros(2, 40).long()),
        {},
        F.cross_entropy,
        (YR[:1].expand(12),),
    )

    with pytest.raises(gp.GraphparError, match="needs a size"):
        case.export()
