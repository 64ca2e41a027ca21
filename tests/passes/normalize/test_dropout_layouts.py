"""Dropout draws the same wherever the batch, heads and positions are: whole, in microbatches, and in the eager model of verify."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification.substituted import Substituted
from tests.tools.equality import Case, assert_same, eager, run

B, T, H, E = 4, 4, 4, 2  # as many rows as positions and heads: a size says nothing
D = H * E
P = 0.4
Function = Callable[["Attending", Tensor], Tensor]


class Attending(nn.Module):
    """A function of ``h`` [b, t, d], or [t, b, d], between two linear layers."""

    def __init__(self, function: Function, **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self, self.first(x)))


def _case(function: Function, batch_dim: int, modules: Callable[[], dict[str, nn.Module]] = dict) -> Case:
    torch.manual_seed(0)
    model = Attending(function, **modules()).train()
    x, y = torch.randn(4, 4, D), torch.randn(4, 4, 3)
    return Case(model, (x,), {}, lambda out, y: (out - y).square().mean(), (y,), {"x": batch_dim, "y": batch_dim})


def _check(case: Case) -> gp.Program:
    program = case.export()
    keys = torch.arange(B) * 7919
    whole = run(program, case, keys=keys)

    assert program.random_calls > 0
    with Substituted(keys, program.stream_layouts, 1, 1):
        assert_same(whole, eager(case))
    assert_same(run(program, case, [1, 3], keys=keys), whole)
    return program


# ---- functions -----------------------------------------------------------------------------------------------------


def _heads(h: Tensor) -> Tensor:
    return h.view(-1, T, H, E).transpose(1, 2)


def _written(order: str, p: float = P) -> Function:
    """Attention that is written out, its scores with these dims."""

    def function(self: Attending, h: Tensor) -> Tensor:
        scores = torch.einsum(f"bhqe,bhke->{order}", _heads(h), _heads(h)) / E**0.5
        drawn = F.dropout(scores.softmax(order.index("k")), p)
        return torch.einsum(f"{order},bhke->bqhe", drawn, _heads(h)).flatten(2)

    return function


def _merged(outer: bool) -> Function:
    """Attention whose heads are in one dim with the batch, before or behind it."""

    def function(self: Attending, h: Tensor) -> Tensor:
        q = _heads(h).transpose(0, 1).reshape(-1, T, E) if outer else _heads(h).reshape(-1, T, E)
        made = F.dropout((q @ q.mT).softmax(-1), P) @ q
        return (
            made.view(H, -1, T, E).permute(1, 2, 0, 3) if outer else made.view(-1, H, T, E).transpose(1, 2)
        ).flatten(2)

    return function


def _fused(shape: str) -> Function:
    """torch's attention, with dims of this order."""

    def function(self: Attending, h: Tensor) -> Tensor:
        q = _heads(h)
        if shape == "bte":
            return F.scaled_dot_product_attention(h, h, h, dropout_p=P)
        if shape == "nte":
            q = q.flatten(0, 1)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=P).unflatten(0, (-1, H)).transpose(1, 2).flatten(2)
        if shape == "mte":  # heads before the batch
            q = q.transpose(0, 1).flatten(0, 1)
            made = F.scaled_dot_product_attention(q, q, q, dropout_p=P, is_causal=True)
            return made.unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)
        if shape == "hbte":
            q = q.transpose(0, 1)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=P).permute(1, 2, 0, 3).flatten(2)
        if shape == "bwhte":  # windows of two positions
            q = q.unflatten(2, (2, 2)).transpose(1, 2)
            mask = torch.tensor([[True, False], [True, True]])
            made = F.scaled_dot_product_attention(q, q, q, mask, dropout_p=P)
            return made.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2)
        assert shape == "whte"  # windows in one dim with the batch
        q = q.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
        made = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], dropout_p=P, enable_gqa=True)
        return made.transpose(1, 2).flatten(2).view(-1, T, D)

    return function


FUNCTIONS: dict[str, Function] = {
    **{f"written {order}": _written(order) for order in ("bhqk", "hbqk", "qbhk", "qkbh", "qhkb")},
    **{f"merged {name}": _merged(name == "heads first") for name in ("heads first", "batch first")},
    **{f"fused {shape}": _fused(shape) for shape in ("bte", "nte", "mte", "hbte", "bwhte", "whte")},
    "positions and batch": lambda self, h: F.dropout(h.transpose(0, 1).reshape(-1, D), P).view(T, -1, D).transpose(0, 1),
    "batch and positions": lambda self, h: F.dropout(h.reshape(-1, D), P).view(-1, T, D),
    "all in one": lambda self, h: F.dropout(h.flatten(), P).view(-1, T, D),
    "between two": lambda self, h: F.dropout(_heads(h).permute(1, 0, 2, 3).reshape(2, -1, E), P)
    .view(H, -1, T, E).permute(1, 2, 0, 3).flatten(2),
    "last": lambda self, h: F.dropout(h.permute(1, 2, 0), P).permute(2, 0, 1),
    "in place": lambda self, h: F.dropout(F.relu(h) * 2, P, inplace=True),
    "written and not used": lambda self, h: _dropped_in_place(h * 2),
    "everything and some": lambda self, h: F.dropout(F.dropout(h, 1.0) + h, P),
    "channels": lambda self, h: F.dropout1d(h, P) + F.dropout2d(_heads(h), P).transpose(1, 2).flatten(2),
    "channels of one": lambda self, h: F.dropout1d(h.flatten(1), P).view(-1, T, D),
    "channels, batch second": lambda self, h: F.dropout1d(h.transpose(0, 1), P).transpose(0, 1),
    "torch's own": lambda self, h: torch.dropout(h, P, True) + torch.feature_dropout(h, P, True),
}  # fmt: skip


def _dropped_in_place(h: Tensor) -> Tensor:
    F.dropout(h, P, inplace=True)
    return h


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_any_order_of_dims(name: str) -> None:
    _check(_case(FUNCTIONS[name], 0))


# ---- torch's modules -----------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}])
def test_multihead_attention(batch_dim: int, weights: bool, options: dict[str, bool]) -> None:
    def function(self: Attending, h: Tensor) -> Tensor:
        mask = torch.ones(T, T, dtype=torch.bool).triu(1) if weights else None
        made, scores = self.attention(h, h, h, need_weights=weights, attn_mask=mask)
        return made + (scores.sum(-1).unsqueeze(-1) if scores is not None and batch_dim == 0 else 0)

    _check(
        _case(
            function,
            batch_dim,
            lambda: {"attention": nn.MultiheadAttention(D, H, P, batch_first=not batch_dim, **options)},
        )
    )


@pytest.mark.costly
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_layers_of_encoders_and_decoders(batch_dim: int) -> None:
    def modules() -> dict[str, nn.Module]:
        first = {"batch_first": not batch_dim, "dropout": P}
        return {
            "encoder": nn.TransformerEncoderLayer(D, H, 4, **first),
            "decoder": nn.TransformerDecoderLayer(D, H, 4, **first),
        }

    _check(_case(lambda self, h: self.decoder(h, self.encoder(h)), batch_dim, modules))


# ---- what is drawn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch and positions", "positions and batch", "all in one"])
def test_rows_of_one_example_have_masks_of_their_own(name: str) -> None:
    case = _case(lambda self, h: FUNCTIONS[name](self, torch.ones_like(h) + h * 0), 0)
    drawn: list[Tensor] = []
    case.model.second.register_forward_hook(lambda module, given, made: drawn.append(given[0]))
    with Substituted(torch.arange(B) * 7919, case.export().stream_layouts, 1, 1):
        eager(case)
    masks = drawn[-1] > 0

    assert len({tuple(row.tolist()) for row in masks.flatten(0, 1)}) > B * T // 2


def test_channels_of_all_examples_are_not_dropped_at_once() -> None:
    with pytest.raises(gp.GraphparError, match=r"Channel dropout .* dim 2"):
        _case(lambda self, h: F.dropout1d(h.permute(1, 2, 0), P).permute(2, 0, 1), 0).export()


# ---- on ranks ------------------------------------------------------------------------------------------------------


class _Second(nn.Module):
    """An encoder and a decoder whose batch is the second dim, and a layer on rows of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D, 2, 1, 1, 8, P)
        self.out = nn.Linear(D, 3)

    def forward(self, s: Tensor, t: Tensor) -> Tensor:
        return self.out(F.dropout(self.transformer(s, t).flatten(0, 1), P))


@pytest.mark.costly
def test_verify_draws_as_the_program_where_the_batch_is_second() -> None:
    torch.manual_seed(0)
    s, t, y = torch.randn(6, 4, D), torch.randn(4, 4, D), torch.randint(3, (4, 4))
    batch = {"s": 1, "t": 1, "y": 1}
    program = gp.export(
        _Second(), (s, t), loss_fn=lambda out, y: F.cross_entropy(out, y.flatten()), targets=(y,), batch_dims=batch
    )

    outcome = gp.verify(gp.partition(program, gp.plan(program, mesh={"tp": 2}, microbatch_size=2)), 1)

    assert outcome.ok, outcome.problems
