"""The passes, one device: after each of them, and for every cut of the batch, loss and gradients are the eager model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.program import operator_name
from tests.equality import Case, assert_exact

ROWS = 6


class _Classifier(nn.Module):
    """Scores of each position: x [b, 5, 8] -> [b, 5, 7]."""

    def __init__(self, body: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7)
        self.body = body or (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.linear(x))))


def _labels(seed: int = 0) -> Tensor:
    """Labels with unevenly many ignored ones; the second row has none that counts."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (ROWS, 5), generator=generator)
    labels[torch.rand(ROWS, 5, generator=generator) < 0.4] = -100
    labels[1] = -100
    labels[0, 0] = 3
    return labels


def _case(loss: Callable[..., Tensor], body: Callable[[Tensor], Tensor] | None = None) -> Case:
    torch.manual_seed(0)
    return Case(_Classifier(body), (torch.randn(ROWS, 5, 8),), loss_fn=loss, targets=(_labels(),))


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _rowwise(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean over valid labels": _cross_entropy,
    "label smoothing": lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "sum": lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), reduction="sum"),
    "masked mean": lambda s, t: (_rowwise(s, t) * (t != -100)).sum() / (t != -100).sum(),
    "masked mean, clamped": lambda s, t: (_rowwise(s, t) * (t != -100)).sum() / (t != -100).sum().clamp(min=1),
    "mean of rows' sums": lambda s, t: _rowwise(s, t).sum(1).mean(),
    "divided by the rows": lambda s, t: s.pow(2).sum() / s.size(0),
    "mean squares": lambda s, t: F.mse_loss(s, torch.zeros_like(s)),
    "two denominators": lambda s, t: _cross_entropy(s, t) + 0.1 * s.abs().mean(),
    "a constant": lambda s, t: _cross_entropy(s, t) + 2.5,
    "preferences": lambda s, t: -F.logsigmoid(s[:, 0].sum(-1) - s[:, 1].sum(-1)).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_shares_add_up_to_the_loss(name: str) -> None:
    assert_exact(_case(LOSSES[name]), [3, 3], [1] * ROWS)


def test_weights_of_classes_count_in_the_denominator() -> None:
    weight = torch.linspace(0.5, 2.0, 7)

    assert_exact(_case(lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), weight)), [2, 4], [1] * ROWS)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 2.0), min_size=3, max_size=3),
)
def test_any_weighted_sum_of_losses(names: list[str], weights: list[float]) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        terms = [weight * LOSSES[name](scores, labels) for name, weight in zip(names, weights)]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    assert_exact(_case(loss), [2, 4], stages=False)


def _written(change: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        y = x * 1.5
        change(y)
        return y + x

    return body


IN_PLACE: dict[str, Callable[[Tensor], None]] = {
    "add": lambda y: y.add_(1.0),  # type: ignore[dict-item, return-value]
    "into a column": lambda y: y[:, 0].mul_(2.0),  # type: ignore[dict-item, return-value]
    "copy into a slice": lambda y: y[:, 1:3].copy_(y[:, 2:4] * 0.5),  # type: ignore[dict-item, return-value]
    "through a view of a view": lambda y: y.transpose(1, 2)[:, :, 0].add_(3.0),  # type: ignore[dict-item, return-value]
    "relu": lambda y: F.relu(y, inplace=True),  # type: ignore[dict-item, return-value]
    "masked": lambda y: y.masked_fill_(torch.arange(8) > 5, 0.25),  # type: ignore[dict-item, return-value]
    "set an item": lambda y: y.__setitem__((slice(None), 0), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_become_values(name: str) -> None:
    program = assert_exact(_case(_cross_entropy, _written(IN_PLACE[name])), [3, 3])

    assert not any("_." in str(node.target) and "scatter" not in str(node.target) for node in program.graph.nodes)


def test_no_grad_regions_pass_no_gradient() -> None:
    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().sum(-1, keepdim=True) + 1.0
        return x / scale

    assert_exact(_case(_cross_entropy, body), [2, 4])


def test_autocast_regions_keep_their_dtypes() -> None:
    def body(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.transpose(1, 2) @ x
        return y.float()

    assert_exact(_case(_cross_entropy, body), [3, 3], tolerance=2e-2)


def test_shapes_taken_from_another_tensor() -> None:
    def body(x: Tensor) -> Tensor:
        flat = x.flatten(1).reshape_as(x)
        return flat + x[:, :1].broadcast_to(x.shape)

    assert_exact(_case(_cross_entropy, body), [3, 3])


def _noisy(p: float) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 16), nn.Dropout(p), nn.Linear(16, 4))
    return Case(model, (torch.randn(ROWS, 8),), loss_fn=lambda out: out.pow(2).mean())


def test_dropout_is_the_same_for_every_cut() -> None:
    program = assert_exact(_noisy(0.5), [3, 3], [1] * ROWS, [2, 4], stages=False)

    assert program.random_calls == 2


def test_other_random_operators_are_refused() -> None:
    case = Case(_Classifier(lambda x: x + torch.randn_like(x)), (torch.randn(ROWS, 5, 8),), loss_fn=lambda s: s.mean())

    with pytest.raises(gp.GraphparError, match="random"):
        case.export()


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over the batch": lambda x: x.softmax(0),
    "cumsum over the batch": lambda x: x.cumsum(0),
    "flipped batch": lambda x: x.flip(0),
    "centred batch": lambda x: x - x.mean(0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "attention over the batch": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_not_cut(name: str) -> None:
    program = _case(_cross_entropy, MIXING[name]).export()

    assert program.couplings or program.unsplittable
    with pytest.raises(gp.GraphparError, match="can't be cut"):
        gp.plan(program, 1, microbatch_size=2)
    assert gp.plan(program, 1, microbatch_size=ROWS).microbatches == 1


def test_a_contrastive_loss_is_not_cut() -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        rows = scores.flatten(1)
        return F.cross_entropy(rows @ rows.T, torch.arange(ROWS))

    with pytest.raises(gp.GraphparError, match="can't be cut"):
        gp.plan(_case(loss).export(), 1, microbatch_size=2)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_a_backward_that_a_trace_would_lose_is_kept() -> None:
    program = _case(_cross_entropy, lambda x: _Rounded.apply(x)).export()
    assert "_Rounded.apply" in {operator_name(node) for node in program.graph.nodes}


def test_control_flow_on_values_is_refused() -> None:
    with pytest.raises(gp.GraphparError, match="depends on values"):
        _case(_cross_entropy, lambda x: x * 2 if x.sum() > 0 else x).export()


def test_checkpoint_regions_are_reported() -> None:
    from torch.utils.checkpoint import checkpoint

    program = _case(_cross_entropy, lambda x: checkpoint(torch.tanh, x, use_reentrant=False)).export()

    assert any("checkpoint" in line for line in program.warnings)
