"""A program in 16 bits computes what the model does in 16 bits, with its parameters in 32 and its losses in 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import operator_name, value_of

X, LABELS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


class Asks(nn.Module):
    """Asks for dtypes: of a weight, of an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        assert x.dtype == self.first.weight.dtype
        h = self.norm(self.tied(self.first(x).relu()).to(self.first.weight.dtype))
        h = h.masked_fill(h < 0, torch.finfo(h.dtype).min).relu()
        loss: Tensor = F.cross_entropy(self.last(h), labels)
        return loss


def _eager(model: Any, dtype: torch.dtype, *args: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """By hand: a copy of the model in 16 bits, its loss in 32, its gradients cast to 32."""
    stored = {name: value.detach().clone() for name, value in model.named_parameters()}
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    usual = F.cross_entropy
    F.cross_entropy = lambda logits, labels: usual(logits.float(), labels)  # type: ignore[assignment]
    try:
        loss = model(args[0].to(dtype), *args[1:])
    finally:
        F.cross_entropy = usual
    loss.backward()
    found = {name: None if p.grad is None else p.grad.float() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.data = stored[name]
    return loss.detach(), found


def _run(program: gp.Program, model: nn.Module, *args: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    leaves = {
        name: value.detach().to(program.parameters[name].dtype, copy=True).requires_grad_(value.requires_grad)
        for name, value in model.named_parameters()
    }
    state = leaves | {name: value.clone() for name, value in model.named_buffers()} | program.constants
    state |= {name: leaves[group[0]] for group in program.ties for name in group}
    counts = {name: torch.tensor(float(len(args[0]))) for name in program.count_names}
    names = [entry.name for entry in program.inputs]
    (loss,) = program.run(state, dict(zip(names, args)) | counts)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in leaves.items()}


@pytest.mark.costly
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_it_is_the_model_in_16_bits_over_weights_in_32(name: str) -> None:
    program = gp.export(Asks(), (X, LABELS), dtype=name)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]

    loss, gradients = _run(program, Asks(), X, LABELS)
    expected, by_hand = _eager(Asks(), dtype, X, LABELS)

    assert loss.dtype == torch.float32
    assert {info.dtype for info in program.parameters.values() if info.requires_grad} == {torch.float32}
    assert program.parameters["first.bias"].dtype == dtype  # frozen: it is never stepped
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for key, gradient in by_hand.items():
        if gradient is not None:
            assert gradients[key] is not None and gradients[key].dtype == torch.float32
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-2, atol=1e-5)


def test_parameters_are_cast_and_those_of_batch_norm_are_not() -> None:
    program = gp.export(Asks(), (X, LABELS), dtype="bf16", skip=("outline",))
    users = {
        str(node.target): [operator_name(user) for user in node.users]
        for node in program.graph.nodes
        if node.op == "get_attr"
    }

    assert users["first.weight"] == users["tied.weight"] == ["to"] and users["first.bias"] == ["linear"]
    assert users["norm.weight"] == users["norm.bias"] == ["batch_norm"]
    (given,) = (node for node in program.graph.nodes if operator_name(node) == "batch_norm")
    assert value_of(given).dtype == torch.bfloat16


def test_the_users_model_is_as_it_was() -> None:
    model = Asks()
    before = {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}
    gp.export(model, (X, LABELS), dtype="bf16")

    assert before == {
        name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.costly
def test_pure_programs_store_16_bits() -> None:
    for build in (Asks, Asks()):
        program = gp.export(build, (X, LABELS), dtype="bf16", pure=True)
        dtypes = {name: info.dtype for name, info in program.parameters.items()}
        assert dtypes["first.weight"] == torch.bfloat16 and dtypes["norm.weight"] == torch.float32
        assert gp.plan(program).param_dtype == "bf16"


def test_inference_has_no_main_weights() -> None:
    program = gp.export(nn.Linear(8, 4), (X,), dtype="bf16", mode="infer")
    kept = gp.export(nn.Linear(8, 4), (X,), dtype="bf16", mode="infer", param_dtype="fp32")

    assert {info.dtype for info in program.parameters.values()} == {torch.bfloat16}
    assert not any(operator_name(node) == "to" and node.args[0].op == "get_attr" for node in program.graph.nodes)
    assert {info.dtype for info in kept.parameters.values()} == {torch.float32}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.inner(x), "more": (self.inner(x), 3)}


def test_the_loss_function_sees_32_bits() -> None:
    model, seen = Head(), []

    def loss_fn(output: dict[str, Any], labels: Tensor) -> Tensor:
        seen.extend([output["logits"].dtype, output["more"][0].dtype])
        return F.cross_entropy(output["logits"], labels) + model.inner.weight.square().sum()

    program = gp.export(model, (X,), loss_fn=loss_fn, targets=(LABELS,), dtype="bf16")

    assert set(seen) == {torch.float32}
    squares = [node for node in program.graph.nodes if operator_name(node) in ("pow", "square")]
    assert [value_of(node).dtype for node in squares] == [torch.float32]


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            h = self.first(x)
        assert h.dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            h = self.last(h.to(x.dtype))
        return h.float().square().mean()


@pytest.mark.parametrize("asked", [{}, {"dtype": "bf16"}, {"dtype": "bf16", "pure": True}])
def test_autocast_means_what_it_did(asked: dict[str, Any]) -> None:
    program = gp.export(Autocast(), (X,), skip=("outline",), **asked)
    dtypes = [value_of(node).dtype for node in program.graph.nodes if operator_name(node) == "linear"]

    assert dtypes == [torch.float16, torch.bfloat16 if asked else torch.float32]


class Buffered(nn.Module):
    """A buffer in fp32 makes what ``last`` takes, which torch traces and its kernels refuse."""

    gain: Tensor

    def __init__(self, last: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(8))
        self.norm, self.linear, self.cell = nn.LayerNorm(8), nn.Linear(8, 8), nn.GRUCell(8, 8)
        self.conv, self.bag = nn.ConvTranspose1d(8, 2, 3), nn.EmbeddingBag(8, 8, mode="sum")
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self, x * self.gain).float() + x.mean()


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (lambda m, h: m.norm(h), "layer_norm .* takes an input in float32 and 'norm.weight' in bfloat16"),
        (lambda m, h: h @ m.linear.weight.t(), "matmul .* in float32 and another operand in bfloat16"),
        (lambda m, h: torch.mv(m.linear.weight, m.gain) * h, "mv .* in bfloat16 and 'gain' in float32"),
        (lambda m, h: torch.cdist(h, m.linear.weight), "cdist .* in float32 and 'linear.weight' in bfloat16"),
        (lambda m, h: m.conv(h.unsqueeze(-1)), "conv_transpose1d .* in float32 and 'conv.weight' in bfloat16"),
        (lambda m, h: m.cell(h), "gru_cell .* in float32 and 'cell.weight_ih' in bfloat16"),
        (lambda m, h: m.bag(torch.ones(6, 8).long(), per_sample_weights=h), "embedding_bag .* another operand in"),
    ],
)
def test_operands_of_two_dtypes_are_refused_with_their_line(last: Any, what: str) -> None:
    with pytest.raises(GraphparError, match=what):
        gp.export(Buffered(last), (X,), loss_fn=lambda o: o.mean(), dtype="bf16")


def test_attention_takes_a_mask_in_fp32() -> None:
    def last(m: Any, h: Tensor) -> Tensor:
        q = m.linear(h.bfloat16()).unflatten(-1, (2, 4))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m.gain[:2].expand(2, 2))

    gp.export(Buffered(lambda m, h: last(m, h).flatten(1)), (X,), loss_fn=lambda o: o.mean(), dtype="bf16")


def test_what_cannot_be_is_refused() -> None:
    double = nn.Linear(8, 4).double()
    with pytest.raises(GraphparError, match="'weight' is in float64"):
        gp.export(double, (X.double(),), loss_fn=lambda o: o.mean(), dtype="bf16")
    for asked, message in (
        ({"dtype": "bf61"}, "dtype is 'bf61'; it must be one of fp32, bf16, fp16. Did you mean 'bf16'"),
        ({"dtype": "bf16", "param_dtype": "int8"}, "param_dtype is 'int8'"),
        ({"dtype": "bf16", "pure": True, "param_dtype": "fp32"}, "but param_dtype is fp32; give one of them"),
        ({"pure": True}, "give dtype=bf16 or fp16 with it"),
    ):
        with pytest.raises(GraphparError, match=message):
            gp.export(nn.Linear(8, 4), (X,), loss_fn=lambda o: o.mean(), **asked)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.gaussian_nll_loss(y, y + 1, y.square())


def test_a_loss_that_is_computed_another_way_is_in_fp32() -> None:
    program = gp.export(lambda: Own(8, 4), (X,), dtype="bf16")

    logarithms = [node for node in program.graph.nodes if operator_name(node) == "log"]
    assert [value_of(node).dtype for node in logarithms] == [torch.float32]
