"""Cutting the batch changes nothing: shares of the loss add up to the eager loss, with its gradients, or the cut is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from tests.tools.equality import Case, Still, assert_exact, assert_same, eager, refusal, run
from tests.tools.samples import drawn

Loss = Callable[..., Tensor]


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Applied(nn.Module):
    """``Net``, then any function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = Net(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net(x))


_draw = torch.Generator().manual_seed(1)
X, XS = torch.randn(6, 6, generator=_draw), torch.randn(6, 4, 6, generator=_draw)
T, TS = torch.randn(6, 5, generator=_draw), torch.randn(6, 4, 5, generator=_draw)
Y, YS = torch.randint(0, 5, (6,), generator=_draw), torch.randint(0, 5, (6, 4), generator=_draw)
YS[0, 1:], YS[1], YS[4, 2] = -100, -100, -100  # the second row has no valid label at all
M = (torch.rand(6, 4, generator=_draw) > 0.4).float()
M[1] = 0.0
TABLE = torch.randn(40, 5, generator=_draw)
V, W = torch.rand(6, generator=_draw), torch.rand(5, generator=_draw) + 0.5
CUTS = ([1, 5], [2, 2, 2])


def ce(o: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), **options)


def each(o: Tensor, y: Tensor) -> Tensor:
    return ce(o, y, reduction="none").view(y.shape)


# name: (input, loss_fn, targets)
EXACT: dict[str, tuple[Tensor, Loss, tuple[Tensor, ...]]] = {
    "cross-entropy, uneven ignored labels": (XS, ce, (YS,)),
    "cross-entropy, classes on dim 1": (XS, lambda o, y: F.cross_entropy(o.transpose(1, 2), y), (YS,)),
    "label smoothing": (XS, lambda o, y: ce(o, y, label_smoothing=0.1), (YS,)),
    "sum, not divided": (XS, lambda o, y: ce(o, y, reduction="sum"), (YS,)),
    "class weights": (XS, lambda o, y: ce(o, y, weight=W), (YS,)),
    "class weights and label smoothing": (XS, lambda o, y: ce(o, y, weight=W, label_smoothing=0.1), (YS,)),
    "another ignore_index": (XS, lambda o, y: ce(o, y.clamp(min=0), ignore_index=0), (YS,)),
    "class probabilities": (X, lambda o, p: F.cross_entropy(o, p, weight=W), (T.softmax(-1),)),
    "nll": (XS, lambda o, y: F.nll_loss(F.log_softmax(o, -1).transpose(1, 2), y, weight=W), (YS,)),
    "sum over valid labels": (XS, lambda o, y: ce(o, y, reduction="sum") / (y != -100).sum(), (YS,)),
    "masked mean": (XS, lambda o, y, m: (each(o, y) * m).sum() / m.sum(), (YS, M)),
    "masked mean, clamped": (XS, lambda o, y, m: (each(o, y) * m).sum() / m.sum().clamp(min=1), (YS, M)),
    "masked mean, plus epsilon": (XS, lambda o, y, m: (each(o, y) * m).sum() / (m.sum() + 1e-6), (YS, M)),
    "masked mean, or nothing": (
        XS, lambda o, y, m: (lambda n: torch.where(n > 0, (each(o, y) * m).sum() / n, 0.0))(m.sum()), (YS, M),
    ),
    "a constant, or masked mean": (
        XS, lambda o, y, m: torch.where(m.sum() > 99, (each(o, y) * m).sum(), W.sum() + 0 * o.sum()), (YS, M),
    ),
    "another constant, or masked mean": (XS, lambda o, y, m: torch.where(m.sum() > 99, each(o, y).sum(), W.sum()) + ce(o, y), (YS, M)),
    "masked mean of each row": (XS, lambda o, y, m: ((each(o, y) * m).sum(1) / m.sum(1).clamp(min=1)).mean(), (YS, M)),
    "chosen labels only": (XS, lambda o, y: F.cross_entropy(o[y != -100], y[y != -100]), (YS,)),
    "chosen places, mean": (XS, lambda o, t, m: ((o - t) ** 2)[m > 0].mean(), (TS, M)),
    "normalised weights": (X, lambda o, y, v: (F.cross_entropy(o, y, reduction="none") * (v / v.sum())).sum(), (Y, V)),
    "centred weights": (X, lambda o, v: (o.mean(-1) * (v - v.mean())).mean(), (V,)),
    "mse, weighted": (X, lambda o, t: F.mse_loss(o, t, weight=W.expand_as(o)), (T,)),
    "l1": (X, F.l1_loss, (T,)),
    "huber": (X, lambda o, t: F.huber_loss(o, t, delta=0.5), (T,)),
    "binary cross-entropy": (X, lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=W), (T.sigmoid(),)),
    "kl, batchmean": (X, lambda o, t: F.kl_div(F.log_softmax(o, -1), t, reduction="batchmean"), (T.softmax(-1),)),
    "kl, sum": (X, lambda o, t: F.kl_div(F.log_softmax(o, -1), t, reduction="sum"), (T.softmax(-1),)),
    "poisson": (X, F.poisson_nll_loss, (T.abs(),)),
    "gaussian": (X, lambda o, t: F.gaussian_nll_loss(o, t, o.square(), eps=0.1, full=True), (T,)),
    "gaussian, a variance a row": (X, lambda o, t: F.gaussian_nll_loss(o, t, o[:, 0].abs() + 0.1), (T,)),
    "gaussian, variances of columns": (X, lambda o, t: F.gaussian_nll_loss(o, t, o.abs()[:, :1], eps=0.2, reduction="sum"), (T,)),
    "gaussian, one variance": (X, lambda o, t: F.gaussian_nll_loss(o, t, 0.3), (T,)),
    "entropy of a distribution": (X, lambda o: -torch.distributions.Categorical(logits=o).entropy().mean(), ()),
    "log-probability in a distribution": (X, lambda o, t: -torch.distributions.Normal(o, 0.5).log_prob(t).mean(), (T,)),
    "triplet": (X, lambda o, t: F.triplet_margin_loss(o, t, t.roll(1, 1)), (T,)),
    "rows, then their mean": (XS, lambda o, t: ((o - t) ** 2).mean((1, 2)).mean(0), (TS,)),
    "mean over the batch, then sum": (X, lambda o, t: ((o - t) ** 2).mean(0).sum(), (T,)),
    "two terms of different denominators": (XS, lambda o, y, t: ce(o, y) - 0.1 * F.mse_loss(o, t), (YS, TS)),
    "a constant minus a mean": (XS, lambda o, y: 1.0 - ce(o, y), (YS,)),
    "stacked terms": (XS, lambda o, y, t: torch.stack([ce(o, y), F.mse_loss(o, t), W.sum()]).mean(), (YS, TS)),
    "divided by the batch": (X, lambda o, t: ((o - t) ** 2).sum() / o.size(0), (T,)),
    "divided by len": (X, lambda o, t: ((o - t) ** 2).sum() / len(o), (T,)),
    "divided by numel": (XS, lambda o, y: ce(o, y, reduction="sum") / y.numel(), (YS,)),
    "times one over the batch": (X, lambda o, t: ((o - t) ** 2).sum() * (1 / o.size(0)), (T,)),
    "divided by batch - 1": (X, lambda o, t: ((o - t) ** 2).sum() / (o.size(0) - 1), (T,)),
    "times the batch squared": (X, lambda o, t: ((o - t) ** 2).mean() * o.size(0) * o.size(0), (T,)),
    "plus the batch": (X, lambda o, t: ((o + o.size(0)) * t).mean(), (T,)),
    "preferences": (X, lambda o, t: -F.logsigmoid(0.1 * (o[:, 0] - o[:, 1] - t[:, 0])).mean(), (T,)),
    "chosen and rejected in one batch": (
        X, lambda o, t: (lambda z: -F.logsigmoid(z[: o.size(0)] - z[o.size(0) :]).mean())(torch.cat([o, t]).sum(-1)), (T,),
    ),
    "gathered log-probabilities": (X, lambda o, y: -F.log_softmax(o, -1).gather(1, y[:, None]).mean(), (Y,)),
    "picked by row number": (X, lambda o, y: -F.log_softmax(o, -1)[torch.arange(o.size(0)), y].mean(), (Y,)),
    "repeated rows": (X, lambda o, t: (o.repeat_interleave(2, 0).view(-1, 2, 5) * t[:, None]).mean(), (T,)),
    "einsum": (X, lambda o, t: torch.einsum("bi,bi->", o, t), (T,)),
    "shapes of another tensor": (
        XS, lambda o, t: ((o.flatten(1).reshape_as(o) + o[:, :1].broadcast_to(o.shape)) * t).mean(), (TS,),
    ),
    "one row squeezed": (X, lambda o, t: (o[:, None].squeeze().softmax(1) * t).sum(1).mean(), (T,)),
    "joined twice, taken apart again": (
        X, lambda o, t: (lambda a, b: (a * b.flip(1)).mean())(*torch.cat([torch.cat([o, t]), torch.cat([t, o])]).chunk(2)), (T,),
    ),
    "repeated, then one of the copies": (X, lambda o, t: (o.repeat(3, 1)[o.size(0) : 2 * o.size(0)] * t).mean(), (T,)),
    "chosen rows over len": (X, lambda o, v: o[v > 0.4].sum() / len(o), (V,)),
    "covariance": (X, lambda o: o.sum() * (o.shape[0] - 1), ()),
    "rows in order, and back": (
        X, lambda o, t, v: (lambda s: (o[s].tanh()[torch.empty_like(s).index_put((s,), torch.arange(o.size(0)))] * t).mean())(
            v.argsort()), (T, V),
    ),
    "rows in order, written back": (
        X, lambda o, t, v: (lambda s: (torch.empty_like(o).index_copy(0, s, o[s].tanh()) * t).mean())(v.argsort()), (T, V),
    ),
    "rows in order, put back": (
        X, lambda o, t, v: (lambda s: (torch.zeros_like(o).index_put((s,), o[s].tanh()) * t).mean())(v.argsort()), (T, V),
    ),
    "two of each row in order, added up": (
        X, lambda o, t: (lambda s: (torch.zeros_like(o).index_add(0, s // 2, o[s // 2].tanh()) * t).mean())(
            o[:, :2].flatten().argsort()), (T,),
    ),
    "one truth of all labels": (XS, lambda o, y: ce(o, y) * (y != -100).sum().bool(), (YS,)),
    "no term with examples": (X, lambda o, t: o.sum() * 0 + 1.0, (T,)),
}  # fmt: skip


@pytest.mark.parametrize("name", drawn(list(EXACT), 10, 14))
def test_shares_add_up(name: str) -> None:
    x, loss_fn, targets = EXACT[name]

    assert_exact(Case(Net(), (x,), {}, loss_fn, targets), *CUTS)


MIXING: dict[str, tuple[Tensor, Loss, tuple[Tensor, ...], str]] = {
    "contrastive": (X, lambda o, t: F.cross_entropy(o @ t.T, torch.arange(o.size(0))), (T,), "matmul"),
    "labels that are row numbers": (X, lambda o: F.mse_loss(o[:, 0], torch.arange(len(o)).float()), (), "mse_loss"),
    "sum of row numbers": (X, lambda o: o.mean() * torch.arange(o.size(0)).sum(), (), "rows' numbers"),
    "reversed by index": (X, lambda o, t: (o[torch.arange(o.size(0) - 1, -1, -1)] * t).sum(), (T,), "arange"),
    "half the row numbers": (X, lambda o, t: (o[torch.arange(o.size(0)) // 2] * t).mean(), (T,), "picks rows"),
    "row numbers of another layout": (XS, lambda o: o.reshape(-1, 5)[torch.arange(o.size(0))].mean(), (), "picks rows"),
    "weights by row number": (X, lambda o: (o.mean(-1) * torch.linspace(0, 1, o.size(0))).sum(), (), "linspace"),
    "running count of rows": (X, lambda o: (o.mean(-1) * torch.ones(o.size(0)).cumsum(0)).sum(), (), "cumsum"),
    "product of means": (X, lambda o, t: (o.softmax(-1).mean(0) * (o > 0).float().mean(0)).sum(), (T,), "mul"),
    "square of one mean": (X, lambda o, t: (lambda loss: loss * loss)(F.mse_loss(o, t)), (T,), "mul"),
    "ratio of one mean to itself": (X, lambda o, t: (lambda loss: loss / loss)(F.mse_loss(o, t)), (T,), "div"),
    "root of a mean": (X, lambda o, t: F.mse_loss(o, t).sqrt(), (T,), "sqrt"),
    "ratio of model sums": (X, lambda o, t: (o * t).sum() / o.detach().abs().sum(), (T,), "div"),
    "one truth of all examples": (X, lambda o: o.mean() * (o > 5).sum().bool(), (), "to"),
    "sorted numbers of several examples in rows": (XS, lambda o: o.flatten().sort()[0].view(-1, 5).square().amax(1).sum(), (), "sorted"),
    "sorted rows of two columns": (X, lambda o: torch.cat([o[:, 0], o[:, 1]]).sort()[0].view(2, -1)[0].mean(), (), "sorted"),
    "row of a table by the batch size": (X, lambda o: (TABLE[o.shape[0]] * o).sum(), (), "select"),
    "part of a table from the batch size": (X, lambda o: (TABLE.narrow(0, o.shape[0], 3).sum(0) * o).sum(), (), "takes "),
    "slice of a table from the batch size": (X, lambda o: (TABLE[o.shape[0] : o.shape[0] + 3].sum(0) * o).sum(), (), "takes "),
    "columns shifted by the batch size": (X, lambda o, t: (o.roll(o.shape[0], 1) * t).sum(), (T,), "number"),
    "a column by the batch size": (X, lambda o: o[:, o.shape[0] - 5].sum(), (), "takes "),
    "a column by len": (X, lambda o: o[:, len(o) - 6].sum(), (), "batch of"),
    "smallest by the batch size": (X, lambda o, t: (o * t.kthvalue(o.shape[0] - 4, 1)[0][:, None]).sum(), (T,), "takes "),
    "columns of all rows written": (
        X, lambda o, y: o.index_put((torch.arange(o.size(0))[:, None], y), torch.zeros(())).sum(), (Y,), "writes to rows",
    ),
    "mask of row numbers": (X, lambda o: o.index_put((torch.arange(o.size(0)).bool(),), torch.zeros(())).sum(), (), "rows"),
    "bags of row numbers": (X, lambda o: (F.embedding_bag(torch.arange(o.size(0))[:, None], TABLE) * o).mean(), (), "offsets"),
    "bags that begin at half the row numbers": (
        X, lambda o, y: (F.embedding_bag(torch.stack([y, y], 1).view(-1), TABLE, torch.arange(o.size(0)) // 2) * o).mean(), (Y,), "",
    ),
    "histogram of row numbers": (X, lambda o: o.mean() * torch.histc(torch.arange(o.size(0)).float(), 4, 0, 8)[0], (), "histc"),
    "sum in truth values": (X, lambda o, t: o.sum() / ((t > 0).sum(0, dtype=torch.bool).float().sum() + 1), (T,), ""),
    "inverse that is added up": (
        X, lambda o, v: (lambda s: o[s][torch.full((o.size(0),), -1).index_put((s,), torch.arange(o.size(0)), accumulate=True)])(
            v.argsort()).mean(), (V,), "",
    ),
    "rows written to other rows' places": (
        X, lambda o, v: torch.zeros_like(o).index_copy(0, v.argsort(), o).square().mean(0).amax(), (V,), "writes to rows",
    ),
    "rows of one order written by another": (
        X, lambda o, v: (torch.zeros_like(o).index_copy(0, (-v).argsort(), o[v.argsort()]) * TABLE[0, 0]).mean(), (V,), "writes to rows",
    ),
    "rows added to what each third came from": (
        X, lambda o, t: (lambda s: (torch.zeros_like(o).index_add(0, s // 3, o[s // 2]) * t).mean())(
            o[:, :2].flatten().argsort()), (T,), "",
    ),
    "two rows written to one place": (
        X, lambda o, t: (lambda s: (torch.zeros_like(o).index_copy(0, s // 2, o[s // 2]) * t).mean())(
            o[:, :2].flatten().argsort()), (T,), "writes to rows",
    ),
    "row numbers in few bits": (X, lambda o: o[torch.arange(o.size(0)).to(torch.int8).long()].mean(), (), "rows"),
    "rows of two orders": (X, lambda o, v: (o[v.argsort()] * o[(-v).argsort()]).sum(), (V,), "mul"),
    "numbers and columns of other rows": (
        X, lambda o, y: o[torch.arange(o.size(0))[:, None], torch.stack([y, y]).T.flip(0)].mean(), (Y,), "",
    ),
    "bags of rows of the batch": (X, lambda o, y: F.embedding_bag(y[:, None].clamp(max=3), o).mean(), (Y,), "embedding_bag"),
    "bags of other lengths": (
        X, lambda o, y: (F.embedding_bag(y.clamp(min=0).flatten(), TABLE, torch.arange(0, 2 * o.size(0), 2)) * o).mean(), (YS,), "offsets",
    ),
    "numbers of rows as columns": (
        X, lambda o: o[torch.arange(o.size(0)), torch.arange(o.size(0)) // 2].mean(), (), "picks rows",
    ),
    "truth of a count": (X, lambda o: o.mean() * (o > 5).sum().logical_not(), (), "logical_not"),
    "copies of different length": (X, lambda o, t: torch.cat([o, t.repeat_interleave(2, 0)]).square().mean(), (T,), "cat"),
    "a copy of each against all in turn": (X, lambda o, t: (o.repeat(2, 1) * t.repeat_interleave(2, 0)).mean(), (T,), "mul"),
    "clamped mean": (X, lambda o, t: F.mse_loss(o, t).clamp(max=0.5), (T,), "clamp"),
    "rounded sum": (X, lambda o: o.sum().div(3, rounding_mode="floor") + o.mean(), (), "div"),
    "mean as a target": (X, lambda o: F.mse_loss(o, o.mean(0, keepdim=True).expand_as(o)), (), "expand_as"),
    "mean spread over rows": (X, lambda o: o.mean(0).expand(o.size(0), 5).sum(), (), "spreads a sum"),
    "einsum with a mean": (X, lambda o, t: torch.einsum("i,bi->b", o.mean(0), t).mean(), (T,), "einsum"),
    "denominator of a normalised weight": (X, lambda o, v: (o.mean(-1) * v).sum() / (v / v.sum()).sum(), (V,), ""),
    "standard deviation over the batch": (X, lambda o: o.std(0).mean(), (), "std"),
    "largest of all": (X, lambda o, t: (o - t).abs().max(), (T,), "max"),
    "median of all": (X, lambda o, t: (o - t).median(), (T,), "median"),
    "norm of all": (X, lambda o, t: (o - t).norm(), (T,), "norm"),
    "softmax over the batch": (X, lambda o, t: (o.softmax(0) * t).sum(), (T,), "softmax"),
    "attention over the batch": (
        XS, lambda o: F.scaled_dot_product_attention(*[o.transpose(0, 1)] * 3).mean(), (), "scaled_dot_product_attention",
    ),
    "centred over the batch": (X, lambda o, t: ((o - o.mean(0)) * t).mean(), (T,), "sub"),
    "cumsum over the batch": (X, lambda o, t: (o.cumsum(0) * t).mean(), (T,), "cumsum"),
    "flip of the batch": (X, lambda o, t: (o.flip(0) * t).mean(), (T,), "flip"),
    "roll of everything": (X, lambda o, t: (o.roll(1) * t).mean(), (T,), "roll"),
    "sort along the batch": (X, lambda o, t: (o.sort(0)[0] * t).mean(), (T,), "sort"),
    "first row": (X, lambda o, t: (o[0] - t[0]).pow(2).mean(), (T,), "select"),
    "every second row": (X, lambda o, t: (o[::2] - t[::2]).pow(2).mean(), (T,), "slice"),
    "all pairs": (X, lambda o, t: (o[:, None] - t[None]).pow(2).mean(), (T,), "sub"),
    "broadcast by accident": (X, lambda o, t: (o[:, 0] - t[:, :1]).pow(2).mean(), (T,), "sub"),
    "places of a table by row number": (X, lambda o, y: (torch.ones(99, 5).gather(1, y[:, None]) * o).mean(), (Y,), "gather"),
    "only the first row written": (X, lambda o: o.scatter(1, torch.zeros(1, 1).long(), 0.0).mean(), (), "scatter"),
    "rows picked by a target": (X, lambda o, y: o[y].mean(), (Y,), "picks rows"),
    "histogram of the range seen": (X, lambda o, t: o.mean() * torch.histc(t, 5)[0], (T,), "histc"),
    "root of the batch": (X, lambda o: o.sum() / len(o) ** 0.5, (), "number"),
    "list of row numbers": (X, lambda o: (o.mean(-1) * torch.tensor([1.0 * i for i in range(len(o))])).sum(), (), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", drawn(list(MIXING), 10, 16))
def test_mixed_examples_are_refused_by_name(name: str) -> None:
    x, loss_fn, targets, why = MIXING[name]

    reason = refusal(Case(Net(), (x,), {}, loss_fn, targets).export())

    assert reason and why in reason


def test_what_mixes_examples_is_planned_with_the_batch_whole() -> None:
    program = Case(Net(), (X,), {}, *MIXING["contrastive"][1:3]).export()

    assert gp.plan(program, 1).microbatches == 1
    with pytest.raises(gp.GraphparError, match="can't be split"):
        gp.plan(program, 1, microbatch_size=1)


def test_coupling_names_module_and_line() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=False)  # but it is fed batch first

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    program = gp.export(Encoder(), (XS,), loss_fn=lambda o: o.mean())

    assert any("layer.self_attn" in line and ".py:" in line for line in map(str, program.couplings)), program.couplings


def test_batchnorm_in_training_only() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))

    assert "batch_norm mixes examples (1" in refusal(gp.export(model, (X,), loss_fn=lambda o: o.mean()))
    assert_exact(Case(nn.Sequential(model[0], Still(model[1]), model[2]), (X,), {}, F.mse_loss, (T,)), [1, 5])


def test_a_model_that_is_another_one_for_smaller_batches() -> None:
    program = gp.export(Net(), (X,), loss_fn=lambda o: o.mean() * (2.0 if len(o) > 2 else 1.0))

    with pytest.raises(gp.GraphparError, match="differs for microbatches of 1 rows"):
        program.at_batch(1)


def _limited(o: Tensor) -> Tensor:
    return o.mean() / (len(o) if len(o) <= 6 else 6)


@pytest.mark.costly
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o: o.mean() * (2.0 if len(o) > 8 else 1.0),
        lambda o: o.relu().mean() if len(o) > 8 else o.mean(),
        _limited,
    ],
)
@pytest.mark.parametrize(("mesh", "size"), [("dp_replicate=2", 6), ("dp_replicate=2", 3), ("dp_replicate=1", 6)])
def test_a_model_that_is_another_one_for_the_global_batch(loss_fn: Loss, mesh: str, size: int) -> None:
    program = gp.export(Net(), (X,), loss_fn=loss_fn)

    gp.plan(program, mesh=mesh, microbatch_size=3)  # of the example's rows
    if loss_fn is _limited and size == 6:
        gp.plan(program, global_batch=12, mesh=mesh, microbatch_size=size)  # 6 is 6 for 6 rows, and for 12
        return
    with pytest.raises(gp.GraphparError, match=f"differs for microbatches of {size} rows: .* 12"):
        gp.plan(program, global_batch=12, mesh=mesh, microbatch_size=size)


def test_a_model_that_is_another_one_for_several_batches_takes_one(tmp_path: Path) -> None:
    """Several stand for one that has all of their rows."""
    for most, reason in ((12, "differs for microbatches of 6 rows"), (10**6, None)):
        program = gp.export(Net(), (X,), loss_fn=lambda o, most=most: o.mean() * (2.0 if len(o) > most else 1.0))
        folder = gp.partition(program, gp.plan(program)).save(tmp_path / str(most))
        found = json.loads((folder / "plan.json").read_text())["interface"].get("unsplittable")
        assert found is reason is None or (reason is not None and reason in found)


def test_outputs_of_inference_must_be_rows() -> None:
    rows = gp.export(Net(), (X,), mode="infer")
    mean = gp.export(Applied(lambda o: o.mean(0)), (X,), mode="infer")
    numbers = gp.export(Applied(lambda o: o.cumsum(0)), (X,), mode="infer")

    assert not refusal(rows)
    assert "output" in refusal(mean)
    assert "cumsum" in refusal(numbers)


# ---- models ----------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.costly
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers(layer: type[nn.Module]) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o, t)

    assert_exact(Case(Recurrent(layer(6, 5, 2, batch_first=True)), (XS,), {}, loss, (TS,)), [2, 4])
    assert "mixes" in refusal(gp.export(Recurrent(layer(6, 5)), (XS,), loss_fn=loss, targets=(TS,)))


IDS = torch.randint(5, 60, (4, 10), generator=_draw)
MASK = torch.ones(4, 10, dtype=torch.int64)
MASK[1, 6:], MASK[2, 3:] = 0, 0
LABELS = IDS.clone()
LABELS[0, 3:], LABELS[1] = -100, -100


def _transformers_case(name: str) -> Case:
    import transformers as hf

    size = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
            "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    padded, classes = {"input_ids": IDS * MASK, "attention_mask": MASK}, torch.tensor([0, 2, 1, 1])
    gpt2 = hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                         attn_pdrop=0.0, pad_token_id=0, num_labels=3)  # fmt: skip
    bart = hf.BartConfig(vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                         decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
                         dropout=0.0, pad_token_id=0, decoder_start_token_id=2)  # fmt: skip
    discriminator = {**padded, "labels": (IDS > 30).long()}
    spans = {**padded, "start_positions": torch.tensor([1, 2, 40, 3]), "end_positions": torch.tensor([2, 5, 40, 9])}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    models: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
        "last token by index": lambda: (hf.GPT2ForSequenceClassification(gpt2), {**padded, "labels": classes}),
        "experts": lambda: (
            hf.MixtralForCausalLM(hf.MixtralConfig(**size, **experts)),
            {"input_ids": IDS, "labels": LABELS},
        ),
        "clamped positions": lambda: (hf.BertForQuestionAnswering(hf.BertConfig(**size, **still)), spans),
        "chosen tokens": lambda: (
            hf.ElectraForPreTraining(hf.ElectraConfig(**size, **still, embedding_size=16)),
            discriminator,
        ),
        "shifted labels": lambda: (
            hf.BartForConditionalGeneration(bart),
            {"input_ids": IDS, "labels": LABELS.clamp(min=1)},
        ),
    }
    torch.manual_seed(0)
    model, inputs = models[name]()
    return Case(model, (), inputs)


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        "last token by index",
        "experts",
        "chosen tokens",
        pytest.param("clamped positions", marks=pytest.mark.slow),
        pytest.param("shifted labels", marks=pytest.mark.slow),
    ],
)
def test_transformers_models_can_be_cut(name: str) -> None:
    pytest.importorskip("transformers")
    assert_exact(_transformers_case(name), [1, 3], [2, 2])


# ---- dropout ---------------------------------------------------------------------------------------------------


def _drop(layout: str, h: Tensor) -> Tensor:
    """Dropout on ``h`` [batch, 4, 5], with the batch somewhere else."""
    if layout == "rows":
        return F.dropout(h, 0.4)
    if layout == "dim 1":
        return F.dropout(h.transpose(0, 1), 0.4).transpose(0, 1)
    if layout == "with an inner dim":
        return F.dropout(h.reshape(-1, 5), 0.4).view(-1, 4, 5)
    if layout == "with an outer dim":
        return F.dropout(h.transpose(0, 1).reshape(-1, 5), 0.4).view(4, -1, 5).transpose(0, 1)
    if layout == "channels":
        return F.dropout2d(h[..., None], 0.4)[..., 0]
    if layout == "attention":
        return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], dropout_p=0.4, is_causal=True)[:, 0]
    assert layout == "under no_grad"
    with torch.no_grad():
        noise = F.dropout(h, 0.4)
    return h + noise


LAYOUTS = ["rows", "dim 1", "with an inner dim", "with an outer dim", "channels", "attention", "under no_grad"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_follow_the_examples(layout: str) -> None:
    case = Case(Applied(lambda h: _drop(layout, h)), (XS,), {}, F.mse_loss, (TS,))

    program = assert_exact(case, *CUTS, stages=False)
    losses = [float(run(program, case, keys=torch.arange(6) + seed).loss) for seed in (0, 0, 1)]

    assert losses[0] == losses[1] != losses[2]


def test_layers_draw_different_masks_at_the_right_rate() -> None:
    def both(h: Tensor) -> Tensor:
        ones = torch.ones_like(h.detach())[:, :, None].expand(-1, -1, 50, -1)
        return h.sum() * 0 + ((F.dropout(ones, 0.3) > 0) == (F.dropout(ones, 0.3) > 0)).float().mean()

    program = gp.export(Applied(both), (XS,), loss_fn=lambda o: o)
    agreement = float(run(program, Case(Applied(both), (XS,), {}, lambda o: o)).loss)

    assert agreement == pytest.approx(0.7**2 + 0.3**2, abs=0.03)


def test_dropout_that_drops_nothing_or_everything_draws_nothing() -> None:
    def function(h: Tensor) -> Tensor:
        return F.dropout(h, 0.0) + F.dropout(h, 0.5, training=False) + F.dropout(h, 1.0)

    case = Case(Applied(function), (XS,), {}, F.mse_loss, (TS,))

    assert assert_exact(case, [1, 5]).random_calls == 0


# ---- compositions ----------------------------------------------------------------------------------------------

TERMS: list[Loss] = [
    lambda o, y, t, m: ce(o, y),
    lambda o, y, t, m: F.mse_loss(o, t),
    lambda o, y, t, m: (each(o, y) * m).sum() / m.sum(),
    lambda o, y, t, m: (o * t).sum() / o.size(0),
    lambda o, y, t, m: o.logsumexp(-1).pow(2).mean(1).sum() / len(o),
    lambda o, y, t, m: ((o - t) ** 2).mean(0).amax() * 0 + W.pow(2).sum(),
]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(5)), st.floats(-2, 2), st.sampled_from(["+", "-", "* count"])),
        min_size=1,
        max_size=3,
    ),
    st.permutations(range(6)),
)
@pytest.mark.costly
def test_sums_of_terms_add_up(terms: list[tuple[int, float, str]], order: list[int]) -> None:
    def loss_fn(o: Tensor, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
        total = o.new_zeros(())
        for index, weight, sign in terms:
            term = weight * TERMS[index](o, y, t, m)
            if sign == "* count":
                term = term * m.sum() / 10
            total = total - term if sign == "-" else total + term
        return total

    batch = (YS[order], TS[order], M[order])
    case = Case(Net(), (XS[order],), {}, loss_fn, batch)
    program = case.export()

    assert not refusal(program)
    whole = run(program, case)
    assert_same(whole, eager(case), what="whole")
    assert_same(run(program, case, [1, 2, 3]), whole, what="in microbatches")


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
def test_a_denominator_reads_a_buffer_as_it_is_in_each_step(written: bool) -> None:
    """A checkpoint may change the weights of classes; where the model changes them itself, the batch runs as one."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3)])
            self.register_buffer("F", torch.tensor([0.5, 1.0, 2.0]))  # as the emitted code calls a module of torch

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for each in self.body:
                x = each(x)
            if written:
                self.F.mul_(1.5)
            return F.cross_entropy(x, labels, weight=self.F)

    case = Case(Weighted(), (torch.randn(4, 5), torch.tensor([0, 1, 2, 1])))
    program = case.export()
    parts = gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2} if written else {"pp": 2}))

    if written:
        assert not program.count_names and "on a buffer that is written" in str(program.unsplittable)
        assert not any("global_counts" in text for text in parts.files.values())
    else:
        assert parts.plan.microbatches > 1
        case.model.F *= torch.tensor([1.0, 3.0, 0.1])
        assert_same(run(program, case, [1, 3]), eager(case))
    assert gp.verify(parts).ok
