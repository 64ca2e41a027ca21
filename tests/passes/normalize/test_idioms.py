"""Idioms: what becomes one operator of torch, that it computes the same forward and backward, and what is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.passes.normalize.attention_idioms import mask_window
from graphpar.passes.normalize.causal_masks import Masks, as_band
from tests.tools.idiom_checks import LENGTH, WIDTH, Model, check_idioms, exported

# ---- norms -----------------------------------------------------------------------------------------------------


def _hf(x: Tensor, m: Model) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * h.to(x.dtype)


def _t5(x: Tensor, m: Model) -> Tensor:
    h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * h.to(m.weight.dtype)


def _gemma(x: Tensor, m: Model) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + m.weight.float())).type_as(x)


NORMS: dict[str, Callable[..., Tensor]] = {
    "HF": _hf,
    "T5": _t5,
    "Gemma": _gemma,
    "x * x": lambda x, m: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * m.weight,
    "square": lambda x, m: (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()) * m.weight,
    "over sqrt": lambda x, m: m.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "to the power": lambda x, m: m.weight * (x * (1e-5 + x.pow(2).mean(-1, keepdim=True)) ** -0.5),
    "reciprocal": lambda x, m: m.weight * x.mul(x.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt().reciprocal()),
    "two dims": lambda x, m: m.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-5)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sampled(1 / 3)
def test_norms_that_are_written_out(name: str, dtype: torch.dtype) -> None:
    check_idioms(NORMS[name], {"rms_norm": 1}, dtype)


NO_NORMS: dict[str, Callable[..., Tensor]] = {
    "another dim": lambda x, m: m.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
    "of another tensor": lambda x, m: m.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5)),
    "a sum": lambda x, m: m.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
    "cubed": lambda x, m: m.weight * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
    "no epsilon": lambda x, m: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "a learned epsilon": lambda x, m: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.weight.exp().mean()),
    "variance": lambda x, m: m.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
    "in fp64": lambda x, m: (
        m.weight * (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)).float()
    ),
    "rounded": lambda x, m: m.weight * x.div((x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), rounding_mode="floor"),
}


@pytest.mark.parametrize("name", NO_NORMS)
@pytest.mark.sampled(1 / 2)
def test_what_is_no_norm_stays(name: str) -> None:
    check_idioms(NO_NORMS[name], {})


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


LAYER_NORMS: dict[str, Callable[..., Tensor]] = {
    "squares": lambda x, m: (
        (x - _mean(x)) * torch.rsqrt(_mean((x - _mean(x)).pow(2)) + 1e-5) * m.weight + m.bias[0, :1]
    ),
    "over sqrt": lambda x, m: m.weight + m.weight * ((x - _mean(x)) / torch.sqrt(_mean((x - _mean(x)) ** 2) + 1e-5)),
    "var": lambda x, m: (x - _mean(x)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * m.weight,
    "unbiased=False": lambda x, m: (x - _mean(x)) * (x.var(-1, unbiased=False, keepdim=True) + 1e-5) ** -0.5,
    "two dims": lambda x, m: (
        (x - x.mean((1, 2), True)) / ((x - x.mean((1, 2), True)).square().mean((1, 2), True) + 1e-5).sqrt() * m.weight
    ),
}
NO_LAYER_NORMS: dict[str, Callable[..., Tensor]] = {
    "Bessel": lambda x, m: m.weight * ((x - _mean(x)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)),
    "another mean": lambda x, m: (
        m.weight * ((x - _mean(x + 1)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
    ),
    "another dim": lambda x, m: m.weight * ((x - _mean(x)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()),
    "of another": lambda x, m: (
        m.weight * ((x - _mean(x)) / (x.sin().var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
    ),
    "centered over another dim": lambda x, m: (
        m.weight
        * (x - _mean(x))
        * torch.rsqrt((x - x.mean(1, keepdim=True)).var(-1, keepdim=True, correction=0) + 1e-3)
    ),
    "twice the mean": lambda x, m: (
        (x.sub(_mean(x), alpha=2)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * m.weight
    ),
}


@pytest.mark.parametrize("name", [*LAYER_NORMS, *NO_LAYER_NORMS])
@pytest.mark.sampled(1 / 3)
def test_layer_norms_that_are_written_out(name: str) -> None:
    function = (LAYER_NORMS | NO_LAYER_NORMS)[name]
    check_idioms(
        lambda x, m: function(x + m.weight, m).sin(), {"layer_norm": 1} if name in LAYER_NORMS else {}, torch.float64
    )


def _exponentials(x: Tensor, dim: int, most: Tensor) -> Tensor:
    e = (x - most).exp()
    return e / e.sum(dim, keepdim=True)


SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: _exponentials(x, -1, x.max(-1, keepdim=True).values),
    "amax, another dim": lambda x: _exponentials(x, 1, x.amax(1, keepdim=True)),
    "detached": lambda x: _exponentials(x, -1, x.detach().amax(-1, keepdim=True).detach()),
}
NO_SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "may overflow": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "another sum": lambda x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(1, keepdim=True),
    "without its dim": lambda x: _exponentials(x, -1, x[:, :, :1]),
    "two dims": lambda x: (x - x.amax((1, 2), True)).exp() / (x - x.amax((1, 2), True)).exp().sum((1, 2), True),
    "used elsewhere": lambda x: (e := (x - x.amax(-1, True)).exp()) / e.sum(-1, True) + e,
}


@pytest.mark.parametrize("name", [*SOFTMAX, *NO_SOFTMAX])
@pytest.mark.sampled(1 / 3)
def test_softmax_that_is_written_out(name: str) -> None:
    function = (SOFTMAX | NO_SOFTMAX)[name]
    check_idioms(lambda x, m: function(x * m.weight).sin(), {"softmax": 1} if name in SOFTMAX else {}, torch.float64)


def test_attention_with_its_own_softmax() -> None:
    def attention(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        scores = (q @ k.mT / 2).masked_fill(~_arange_mask(), float("-inf"))
        return (_exponentials(scores, -1, scores.amax(-1, True)) @ v).transpose(1, 2).flatten(2)

    check_idioms(attention, {"softmax": 1, "attention": 1, "is_causal": 1})


# ---- activations -----------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "HF's new GELU": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "HF's fast GELU": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "GELU": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "SiLU": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "SiLU that overflows": lambda x: x * (torch.exp(x) / (1 + torch.exp(x))),
}
NO_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "a constant that is off": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978 * (x + 0.044715 * x**3))),
    "twice": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "of two values": lambda x: x * torch.sigmoid(x.flip(-1)),
    "square": lambda x: x * x,
    "with a bound": lambda x: x.clamp(max=100) * torch.sigmoid(x),
    "with a bound far out": lambda x: (x * 1e-6).clamp(-1, 1) * 1e6 * torch.sigmoid(x),
}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *NO_ACTIVATIONS])
@pytest.mark.sampled(1 / 3)
def test_activations_that_are_written_out(name: str) -> None:
    function = (ACTIVATIONS | NO_ACTIVATIONS)[name]
    check_idioms(lambda x, m: function(m.weight * x), {"activation": 1} if name in ACTIVATIONS else {})


# ---- attention -------------------------------------------------------------------------------------------------


def _heads(x: Tensor, m: Model) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x * m.weight, x + m.weight, x * 2 * m.weight)
    return tuple(each.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for each in (q, k, v))  # type: ignore[return-value]


def _by_hand(x: Tensor, m: Model, masked: Callable[[Tensor], Tensor] = lambda s: s) -> Tensor:
    q, k, v = _heads(x, m)
    scores = masked(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _arange_mask() -> Tensor:
    return torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None]


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "tril": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "triu": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "smallest": lambda: torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None],
    "arange": _arange_mask,
    "where": lambda: torch.where(_arange_mask(), 0.0, float("-inf")),
    "not greater": lambda: ~(torch.arange(LENGTH)[None, :] > torch.arange(LENGTH)[:, None]),
    "filled": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(~_arange_mask(), -1e9),
}
OTHERS: dict[str, Callable[[], Tensor]] = {
    "strictly lower, and itself by a number": lambda: torch.full((LENGTH, LENGTH), -100.0).triu(1),
    "window": lambda: _arange_mask() & (torch.arange(LENGTH)[None, :] > torch.arange(LENGTH)[:, None] - 3),
    "one more": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
    "upper": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(),
    "all": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "a bias": lambda: torch.where(_arange_mask(), 0.5, float("-inf")),
}


@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
@pytest.mark.sampled(1 / 3)
def test_masks_made_of_constants(name: str) -> None:
    make = (CAUSAL | OTHERS)[name]

    def attention(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make()).transpose(1, 2).flatten(2)

    check_idioms(attention, {"is_causal": 1} if name in CAUSAL else {})


def _likeness(x: Tensor) -> Tensor:
    """[b, s, n] -> [b, 1, s, s]"""
    return x[:, None] @ x[:, None].mT


BY_HAND: dict[str, tuple[Callable[..., Tensor], dict[str, int]]] = {
    "no mask": (_by_hand, {"attention": 1}),
    "causal, filled": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~_arange_mask(), float("-inf"))), {"attention": 1, "is_causal": 1},
    ),
    "causal, filled with a number": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~_arange_mask(), -1e10)), {"attention": 1, "is_causal": 1},
    ),
    "causal, where": (
        lambda x, m: _by_hand(x, m, lambda s: torch.where(_arange_mask(), s, torch.finfo(s.dtype).min)), {"attention": 1, "is_causal": 1},
    ),
    "causal, added": (
        lambda x, m: _by_hand(x, m, lambda s: s + torch.full((LENGTH, LENGTH), float("-inf")).triu(1)), {"attention": 1, "is_causal": 1},
    ),
    "of the batch": (lambda x, m: _by_hand(x, m, lambda s: s + _likeness(x.detach())), {"attention": 1}),
    "a buffer": (lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~m.table, float("-inf"))), {"attention": 1}),
    "a buffer and a number": (lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~m.table, -1e10)), {}),
    "with a gradient": (lambda x, m: _by_hand(x, m, lambda s: s + m.bias), {}),
    "scaled after the mask": (lambda x, m: _by_hand(x, m, lambda s: (s + 1.0 * _arange_mask()) * 2), {}),
    "a window, and a number": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(3), -1e10)), {},
    ),
    "through an activation": (lambda x, m: _by_hand(x, m, F.relu), {}),
    "without a gradient": (lambda x, m: _by_hand(x, m, torch.detach), {}),
    "whole numbers": (lambda x, m: _by_hand(x, m, lambda s: s.int().float()), {}),
    "booleans that are added": (lambda x, m: _by_hand(x, m, lambda s: s + _arange_mask()), {}),
    "causal, twice": (
        lambda x, m: _by_hand(x, m, lambda s: torch.where(~_arange_mask(), -1e9, s) + torch.full((LENGTH, LENGTH), -1e9).triu(2)),
        {"attention": 1, "is_causal": 1},
    ),
    "a row that sees nothing, and a number": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~(_arange_mask() & ~torch.eye(LENGTH, dtype=torch.bool)), -1e9)), {},
    ),
    "a number, and a row that sees nothing else": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(~_arange_mask(), -1e9).masked_fill(x[:, None, None, :, 0] > 0, -math.inf)), {},
    ),
    "of keys": (lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(_arange_mask()[3], float("-inf"))), {}),
    "of keys, and examples": (
        lambda x, m: _by_hand(x, m, lambda s: s.masked_fill((x[:, None, None, :, 0] > 1.5), float("-inf"))), {"attention": 1},
    ),
    "of nothing": (lambda x, m: _by_hand(x, m, lambda s: s.masked_fill(torch.zeros((), dtype=torch.bool), float("-inf"))), {}),
    "turned around": (lambda x, m: _by_hand(x, m, lambda s: (s * -1).masked_fill(~_arange_mask(), float("-inf"))), {}),
    "times zero": (lambda x, m: _by_hand(x, m, lambda s: (s * 0).masked_fill(~_arange_mask(), float("-inf"))), {}),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.sampled(1 / 3)
def test_attention_that_is_written_out(name: str) -> None:
    function, found = BY_HAND[name]
    check_idioms(function, found)


@pytest.mark.costly
def test_scores_that_a_mask_repeats_are_no_attention() -> None:
    """The mask has more dims, heads or examples than the scores."""

    def dims(x: Tensor, m: Model) -> Tensor:
        q, bias = x * m.weight, torch.arange(3.0)[:, None, None, None].expand(3, 1, LENGTH, LENGTH)
        return ((q @ q.mT + bias).softmax(-1) @ q).sum(0)

    def heads(x: Tensor, m: Model) -> Tensor:
        q, shown = (x * m.weight)[:, None], torch.stack([_arange_mask(), _arange_mask().mT])
        return torch.where(shown, q @ q.mT, float("-inf")).softmax(-1) @ q

    def examples(x: Tensor, m: Model) -> Tensor:
        q, shown = m.bias[None, None], _likeness(x) > 0
        return torch.where(shown | _arange_mask(), q @ q.mT, float("-inf")).softmax(-1) @ q

    for function in (dims, heads, examples):
        check_idioms(function, {})


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5])
@pytest.mark.sampled(1 / 2)
def test_a_scale_that_is_not_positive_keeps_its_mask(scale: float) -> None:
    """torch's kernels multiply -inf by the scale of a causal mask."""

    def attention(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_arange_mask(), scale=scale)

    if scale == 0:
        assert not exported(attention)[1].idioms  # gradients are 0 / 0 in torch's own kernel
    else:
        check_idioms(attention, {"is_causal": 1} if scale > 0 else {})


@pytest.mark.costly
def test_softmax_over_another_dim_and_dropout_are_no_attention() -> None:
    def turned(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        return ((q @ k.mT).softmax(-2) @ v).transpose(1, 2).flatten(2)

    def dropped(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        return (F.dropout((q @ k.mT).softmax(-1), 0.1) @ v).transpose(1, 2).flatten(2)

    for function in (turned, dropped):
        assert not exported(function)[1].idioms


def test_weights_that_are_used_elsewhere_are_computed_once() -> None:
    def returned(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        weights = (q @ k.mT).masked_fill(~_arange_mask(), float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) + weights.mean((1, 3))[..., None]

    check_idioms(returned, {})


# ---- groups of heads -------------------------------------------------------------------------------------------


def _grouped(x: Tensor, m: Model, mask: Tensor | None = None, repeat: str = "expand") -> Tensor:
    q = (x * m.weight).unflatten(-1, (4, 2)).transpose(1, 2)
    k, v = ((x * m.weight + each)[..., :4].unflatten(-1, (2, 2)).transpose(1, 2) for each in (1, 2))
    if repeat == "expand":
        k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.size(0), 4, LENGTH, 2) for each in (k, v))
    elif repeat == "interleave":
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    else:  # heads in another order: each group's heads are not neighbours
        k, v = (each[:, None].expand(-1, 2, -1, -1, -1).reshape(x.size(0), 4, LENGTH, 2) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2).flatten(2)


@pytest.mark.costly
def test_repeated_keys_and_values() -> None:
    check_idioms(_grouped, {"enable_gqa": 1})
    check_idioms(lambda x, m: _grouped(x, m, repeat="interleave"), {"enable_gqa": 1})
    check_idioms(lambda x, m: _grouped(x, m, repeat="tiled"), {})
    check_idioms(lambda x, m: _grouped(x, m, _arange_mask()), {"is_causal": 1, "enable_gqa": 1})
    check_idioms(lambda x, m: _grouped(x, m, m.table), {})  # kernels that take a mask want all heads


def test_repeated_keys_that_have_another_shape_than_the_queries_stay() -> None:
    def one_query_head(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return F.scaled_dot_product_attention(q[:, :1], k, v)

    def the_same_for_all_examples(x: Tensor, m: Model) -> Tensor:
        q, _, _ = _heads(x, m)
        k = m.bias[:, :4][None, None, None].expand(x.size(0), 1, 2, LENGTH, 4).flatten(1, 2)
        return F.scaled_dot_product_attention(q, k, k)

    check_idioms(one_query_head, {})
    check_idioms(the_same_for_all_examples, {})


class Grouped(nn.Module):
    """Attention of 8 heads in 2 groups, with products around it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 64), nn.Linear(16, 16), nn.Linear(16, 16)
        self.o = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(4, 1) for each in (k, v))
        y: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


@pytest.mark.costly
def test_ranks_that_outnumber_the_groups_take_the_keys_of_their_group(tmp_path: Any) -> None:
    """8 heads in 2 groups over 4 ranks: each has 2 heads of one group."""
    x = torch.randn(4, 12, 16)
    program = gp.export(Grouped(), (x,), loss_fn=lambda y: y.square().mean())
    plan = gp.plan(program, mesh={"tp": 4}, shard_plan={"q.weight": "S(0)@tp", "o.weight": "S(1)@tp"})
    parts = gp.partition(program, plan)
    folder = parts.save(tmp_path / "out")
    text = "".join(path.read_text() for path in (tmp_path / "out").glob("*.py") if path.stem != "collectives")
    assert "own_group" in text and "enable_gqa=True" in text
    assert gp.check(folder).ok
    assert gp.verify(parts).ok


# ---- masks of any length ---------------------------------------------------------------------------------------


class Longer(nn.Module):
    def __init__(self, length: int, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.length, self.mask, self.scale = length, mask, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(self.length)
        mask = self.mask(place[None, None, None, :], place[None, None, :, None])
        q = x * self.scale
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.expand(x.size(0), -1, -1, -1))


def _longer(length: int, mask: Callable[[Tensor, Tensor], Tensor]) -> Program:
    return gp.export(Longer(length, mask), (torch.randn(2, 1, length, 2),), loss_fn=lambda y: y.square().mean())


@pytest.mark.costly
def test_a_mask_of_a_million_tokens_is_proven_without_being_made() -> None:
    assert _longer(2**20, lambda column, row: column <= row).idioms == {"is_causal": 1}
    assert _longer(2**20, lambda column, row: (row >= column) & (column < 2**20)).idioms == {"is_causal": 1}
    assert _longer(2**20, lambda column, row: column < row + 1).idioms == {"is_causal": 1}
    assert _longer(2**20, lambda column, row: (column <= row) & (column.flatten() >= 0)).idioms == {"is_causal": 1}
    assert not _longer(2**20, lambda column, row: column < row).idioms
    assert not _longer(2**20, lambda column, row: (column <= row) & ((column < 100) <= (row < 100))).idioms
    assert not _longer(2**20, lambda column, row: (column <= row) & (column < 2**20 - 1)).idioms
    assert not _longer(2**20, lambda column, row: (column <= row) & (row - column < 4096)).idioms


_TERMS = {
    "column <= row": lambda c, r: c <= r,
    "row >= column": lambda c, r: r >= c,
    "column < row + 1": lambda c, r: c < r + 1,
    "column < row": lambda c, r: c < r,
    "column <= 299": lambda c, r: c <= torch.full_like(r, 299),
    "column <= 150": lambda c, r: c <= torch.full_like(r, 150),
    "column // 2 <= row // 2": lambda c, r: c // 2 <= r // 2,
    "alike": lambda c, r: torch.zeros_like(c) == torch.zeros_like(r),
    "differ": lambda c, r: torch.zeros_like(c) == torch.ones_like(r),
    "not later": lambda c, r: ~(c > r),
    "near": lambda c, r: r - c < 200,
    "booleans that fall": lambda c, r: (c < 100) <= (r < 100),
    "nowhere": lambda c, r: torch.logical_and(c >= 300, r >= 0),
    "but for a few": lambda c, r: ~torch.logical_and(c >= 3, r % 7 == 6),
    "but for the own": lambda c, r: torch.logical_xor(c >= 0, r == c),
    "bytes that fall": lambda c, r: (250 - c.clamp(max=250)).to(torch.uint8) <= (r.clamp(max=250)).to(torch.uint8),
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(_TERMS)), min_size=1, max_size=3), st.lists(st.booleans(), min_size=2, max_size=2)
)
@pytest.mark.costly
def test_proofs_agree_with_the_masks_themselves(terms: list[str], joins: list[bool]) -> None:
    def mask(column: Tensor, row: Tensor) -> Tensor:
        made = _TERMS[terms[0]](column, row)
        for term, both in zip(terms[1:], joins):
            other = _TERMS[term](column, row)
            made = made & other if both else made | other
        return made

    place = torch.arange(300)
    whole = mask(place[None, :], place[:, None])
    causal = torch.equal(whole, torch.ones(300, 300, dtype=torch.bool).tril())
    found = bool(_longer(300, mask).idioms)
    assert causal or not found
    if all(joins[: len(terms) - 1]):  # of alternatives not all are recognised
        assert found == causal


def test_what_compares_no_places_is_no_band() -> None:
    def holes(column: Tensor, row: Tensor) -> Tensor:
        causal = column <= row
        return causal & ~(causal & torch.logical_and(column >= 3, row % 7 == 6))

    assert not _longer(300, holes).idioms


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**18), st.integers(1, 7), st.floats(0, 1))
def test_bands_are_masks_without_holes(seed: int, columns: int, share: float) -> None:
    mask = torch.rand(2, 3, columns, generator=torch.Generator().manual_seed(seed)) < share
    holes = any(bool((row.nonzero().flatten().diff() > 1).any()) for row in mask.flatten(0, 1))
    band = as_band(mask, columns)

    assert (band is None) == holes
    if band is not None:
        place = torch.arange(columns)
        shown = (place >= band.first.unsqueeze(-1)) & (place < band.end.unsqueeze(-1))
        assert torch.equal(shown.expand(mask.shape), mask)


class Places(nn.Module):
    """Attention inside of documents that begin where ``places`` do not count up, numbered in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.scale = dtype, nn.Parameter(torch.ones(2))

    def forward(self, places: Tensor) -> Tensor:
        steps = torch.diff(places, prepend=places[:, :1] - 1)
        documents = (steps != 1).cumsum(-1, dtype=self.dtype)
        mask = (documents[:, :, None] == documents[:, None, :]) & (places[:, None, :] <= places[:, :, None])
        q = places[:, None, :, None] * self.scale
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_documents_that_are_counted_in_few_bits_are_not_packed(dtype: torch.dtype) -> None:
    places = torch.arange(12).expand(2, -1).contiguous()
    program = gp.export(Places(dtype), (places,), loss_fn=lambda y: y.square().mean())
    assert bool(program.idioms) == (dtype is torch.int64)


@pytest.mark.costly
def test_masks_that_differ_from_example_to_example_are_not_proven() -> None:
    def attention(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def function(x: Tensor, m: Model) -> Tensor:
            q, k, v = _heads(x, m)
            example = torch.arange(x.size(0))[:, None, None, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=change(_arange_mask(), example))

        return function

    wider = attention(lambda mask, example: mask | (example >= 2))
    narrower = attention(lambda mask, example: mask & ((example < 2) | torch.eye(LENGTH, dtype=torch.bool)))
    late = attention(lambda mask, example: mask | (example >= 1000))
    picked = attention(lambda mask, example: mask | (torch.arange(5000) > 4000)[example])
    counted = attention(lambda mask, example: mask | (torch.full_like(example, example.size(0)) > 1000))
    banded = attention(lambda mask, example: mask | (torch.ones(example.size(0), 2).triu(-900)[:, :1, None, None] < 1))
    for function in (wider, narrower, late, picked, counted, banded):
        program = gp.export(Model(function), (torch.randn(4, LENGTH, WIDTH),), loss_fn=lambda y: y.square().sum())
        assert not program.idioms
    alike = torch.ones(1, LENGTH, dtype=torch.bool)
    check_idioms(
        attention(lambda mask, example: mask & alike.expand(example.size(0), -1)[example, 0]), {"is_causal": 1}
    )


def test_a_mask_that_is_known_only_at_run_time_is_not_proven() -> None:
    def padded(x: Tensor, m: Model) -> Tensor:
        q, k, v = _heads(x, m)
        mask = _arange_mask() & (x[:, None, None, :, 0] > -1e30)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    _, program = exported(padded)
    assert not program.idioms
    node = next(each for each in program.graph.nodes if "attention" in each.name)
    assert mask_window(node, Masks(program)) is None


# ---- the pass --------------------------------------------------------------------------------------------------


def test_the_pass_can_be_skipped() -> None:
    _, program = exported(_hf, skip=["idioms"])
    assert not program.idioms and "rms_norm" not in str(program)
    assert "F.rms_norm" in str(exported(_hf)[1])
    with pytest.raises(GraphparError, match="idioms"):
        exported(_hf, skip=["simplify"])
