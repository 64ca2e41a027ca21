"""Operators that work row by row can be cut along the batch, as their rules say; along the batch itself they are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from tests.passes.normalize.test_batch_and_loss import XS, Applied, X
from tests.tools.equality import Case, Still, assert_exact, assert_same, eager, near, refusal, run
from tests.tools.samples import drawn

CODES, BOUNDS = torch.linspace(-1, 1, 15).view(3, 5), torch.tensor([-0.5, 0.0, 0.5])


def image(o: Tensor) -> Tensor:
    return o[:, None, :, :4]


def spd(o: Tensor) -> Tensor:
    return o[:, :4, :4] @ o[:, :4, :4].mT + torch.eye(4)


def unpooled(o: Tensor) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(image(o), 2, return_indices=True), 2)


def sampled(o: Tensor) -> Tensor:
    grid = F.affine_grid(torch.eye(2, 3).expand(o.shape[0], 2, 3), list(image(o).shape), align_corners=False)
    return F.grid_sample(image(o), grid, align_corners=False)


ROW_BY_ROW: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "cdist, rows against a codebook": (X, lambda o: torch.cdist(o, CODES).softmax(-1) @ CODES),
    "cdist, batched": (XS, lambda o: torch.cdist(o, CODES)),
    "bucketize": (XS, lambda o: o * torch.bucketize(o.detach(), BOUNDS)),
    "searchsorted, one sequence": (XS, lambda o: o * torch.searchsorted(BOUNDS, o.detach())),
    "searchsorted, one a row": (XS, lambda o: o * torch.searchsorted(o.detach().sort(-1)[0], o.detach())),
    "scatter_reduce": (XS, lambda o: torch.zeros_like(o).scatter_reduce(1, (o > 0).long(), o, "amax")),
    "index_reduce": (XS, lambda o: o.index_reduce(1, torch.tensor([0, 2]), o[:, :2], "amax")),
    "rfft and back": (XS, lambda o: torch.fft.irfft(torch.fft.rfft(o, dim=1) * 2, n=4, dim=1)),
    "fft2": (XS, lambda o: torch.fft.fft2(o).abs()),
    "fft of the dims that it has sizes for": (XS, lambda o: torch.fft.fftn(o, s=(6, 4)).abs()),
    "fft of the last dim alone": (XS, lambda o: torch.fft.ifftn(o, s=(3,)).abs()),
    "stft": (X, lambda o: torch.stft(o, 4, window=torch.ones(4), return_complex=True).abs()),
    "rot90": (XS, lambda o: torch.rot90(o, 1, (1, 2))),
    "cholesky": (XS, lambda o: torch.linalg.cholesky(spd(o))),
    "logdet": (XS, lambda o: torch.logdet(spd(o))[:, None]),
    "grid_sample": (XS, sampled),
    "max_unpool": (XS, unpooled),
    "nanmedian": (XS, lambda o: o.nanmedian(-1)[0]),
    "isin": (XS, lambda o: o * torch.isin(o.argmax(-1, keepdim=True), torch.tensor([1, 2]))),
}


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a range to it": lambda o: o * torch.arange(0.0, float(o.size(0)), o.size(0) / 5),
    "a range from it": lambda o: o * torch.arange(o.size(0), 5 + o.size(0)),
    "a range that begins before it": lambda o: o * torch.arange(1 - o.size(0), 6 - o.size(0)),
    "rows numbered from it": lambda o: o * torch.arange(o.size(0), 2 * o.size(0))[:, None],
    "a fill": lambda o: o * torch.full_like(o, float(o.size(0))),
    "a fill in place": lambda o: o * torch.empty_like(o).fill_(float(o.size(0))),
    "a tensor": lambda o: o * torch.tensor(float(o.size(0))),
    "an element": lambda o: o.index_fill(1, torch.tensor([1]), float(o.size(0))),
    "a padding": lambda o: F.pad(o, (1, 1), value=float(o.size(0))),
    "a choice": lambda o: torch.where(o > 0, o, float(o.size(0))),
    "a limit": lambda o: o.clamp(max=o.size(0) / 10),
    "a logarithm": lambda o: o * math.log(o.size(0)),
    "a power": lambda o: (o.abs() + 1).pow(1 / o.size(0)),
}  # fmt: skip


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", NUMBERS)
def test_the_number_of_rows_is_that_of_the_whole_batch(name: str) -> None:
    """Else it is printed for one size, or each microbatch takes its own."""
    assert refusal(gp.export(Applied(NUMBERS[name]), (X,), loss_fn=lambda o: o.square().mean()))


@pytest.mark.parametrize("name", drawn(list(ROW_BY_ROW), 5, 4))
def test_rows_by_themselves(name: str) -> None:
    x, function = ROW_BY_ROW[name]

    assert_exact(
        Case(Applied(function), (x,), {}, lambda o: (o.square() * (1 + torch.arange(o.shape[-1]))).mean()), [1, 5]
    )


OVER_THE_BATCH: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], str]] = {
    "cdist of all rows": (X, lambda o: torch.cdist(o, o).mean(), "cdist mixes"),
    "searchsorted among all rows": (X, lambda o: (o * torch.searchsorted(o.detach()[:, 0].sort()[0], o.detach())).mean(), ""),
    "scatter_reduce over rows": (
        X, lambda o: torch.zeros_like(o).scatter_reduce(0, (o > 0).long(), o, "sum").square().mean(), "scatter_reduce mixes",
    ),
    "fft over rows": (X, lambda o: torch.fft.rfft(o, dim=0).abs().mean(), "fft_rfft"),
    "fft over everything": (X, lambda o: torch.fft.fftn(o).real.square().mean(), "fft_fftn"),
    "fft with a size of each dim": (X, lambda o: torch.fft.fftn(o, s=(8, 4)).real.square().mean(), "fft_fftn"),
    "rot90 of rows": (X[:, :6], lambda o: (torch.rot90(o[:, :1].expand(-1, 6), 1, (0, 1)) * o[:, :1]).mean(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_the_batch_itself_is_mixed(name: str) -> None:
    x, function, why = OVER_THE_BATCH[name]

    reason = refusal(gp.export(Applied(function), (x,), loss_fn=lambda o: o))

    assert reason and why in reason


class Bags(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.bags, self.options = nn.EmbeddingBag(9, 5, mode="mean", **options), options

    def forward(self, tokens: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.bags(tokens, offsets)


def test_bags_of_rows() -> None:
    tokens = torch.arange(24).view(6, 4) % 9

    assert_exact(Case(Bags(), (tokens,), {}, lambda o: o.square().mean()), [1, 5])
    offsets = refusal(gp.export(Bags(), (tokens[:, 0], torch.arange(6)), loss_fn=lambda o: o.square().mean()))
    assert "offsets that count over the indices of all examples" in offsets


def test_gradients_by_frequency_are_those_of_the_batch() -> None:
    tokens, loss_fn = torch.arange(24).view(6, 4) % 9, lambda o: o.square().mean()
    embedding = nn.Sequential(nn.Embedding(9, 5, scale_grad_by_freq=True))

    assert "how often" in refusal(gp.export(Bags(scale_grad_by_freq=True), (tokens,), loss_fn=loss_fn))
    assert "how often" in refusal(gp.export(embedding, (tokens,), loss_fn=loss_fn))


def test_power_iterations_run_once_a_step() -> None:
    case = Case(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))), (X,), {}, lambda o: o.square().mean()
    )
    program = case.export()
    expected, found = eager(case), run(program, case)

    assert_same(found, expected)
    for name, value in expected.buffers.items():
        near(found.buffers[name], value, 1e-6, name)
    assert not program.couplings
    assert set(program.steady) == set(expected.buffers)


def test_cumulative_averages_are_refused_by_module() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None))

    with pytest.raises(gp.GraphparError, match="BatchNorm1d '1' has momentum=None"):
        gp.export(model, (X,), loss_fn=lambda o: o.mean())
    still = nn.Sequential(model[0], Still(model[1]))
    assert not refusal(gp.export(still, (X,), loss_fn=lambda o: o.mean()))


@pytest.mark.parametrize(
    "gradient",
    [
        lambda o: torch.autograd.grad(o.square().sum(), o, create_graph=True)[0],
        lambda o: torch.func.grad(lambda v: v.square().sum())(o),
        lambda o: torch.func.jvp(torch.sin, (o,), (torch.ones_like(o),))[1],
        lambda o: (o.sum().backward(retain_graph=True), o)[1],
    ],
    ids=["autograd.grad", "func.grad", "func.jvp", "backward"],
)
def test_gradients_inside_the_model_are_refused_with_their_line(gradient: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(gp.GraphparError, match=r"computes gradients in its forward \(test_rowwise.py:\d+\)"):
        gp.export(lambda: Applied(gradient), (X,), loss_fn=lambda o: o.mean())


def test_hooks_on_gradients_are_refused_with_their_line() -> None:
    def hooked(o: Tensor) -> Tensor:
        o.register_hook(lambda gradient: gradient / gradient.norm())
        return o

    with pytest.raises(gp.GraphparError, match=r"registers a hook on a tensor's gradient \(test_rowwise.py:\d+\)"):
        gp.export(lambda: Applied(hooked), (X,), loss_fn=lambda o: o.mean())


def test_a_mean_in_half_precision_is_summed_in_single() -> None:
    program = gp.export(Applied(lambda o: (o * 3e4).half().mean((0, 1))), (X,), loss_fn=lambda o: o.float())
    loss = run(program, Case(Applied(lambda o: (o * 3e4).half().mean((0, 1))), (X,), {}, lambda o: o.float())).loss

    assert loss.isfinite()
