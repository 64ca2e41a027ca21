"""Random operators draw the same whole, in microbatches, and in the eager model of verify."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification.substituted import Substituted
from tests.tools.equality import STEP_KEY, Case, assert_same, eager, run

B, N, D = 4, 6, 8
Function = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """A function of ``h`` [b, n, d] between two linear layers."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def _case(function: Function, batch_dim: int = 0) -> Case:
    torch.manual_seed(0)
    shape = [N, B] if batch_dim else [B, N]
    x, y = torch.randn(*shape, D), torch.randn(*shape, 3)
    dims = {"x": batch_dim, "y": batch_dim}
    return Case(Drawing(function).train(), (x,), {}, lambda out, y: (out - y).square().mean(), (y,), dims)


def _check(case: Case, keys: Tensor | None = None) -> gp.Program:
    program = case.export()
    keys = torch.arange(B) * 7919 if keys is None else keys
    whole = run(program, case, keys=keys)

    with Substituted(keys, program.stream_layouts, 1, 1, step_key=STEP_KEY):
        assert_same(whole, eager(case))
    assert_same(run(program, case, [1, 3], keys=keys), whole)
    return program


def _drop_path(h: Tensor) -> Tensor:
    mask = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.8)
    return h * mask.div_(0.8)


def _masked(h: Tensor) -> Tensor:
    """A masked autoencoder's rows: some are kept, in the order of random numbers, and put back."""
    order = torch.rand(h.shape[0], N).argsort(1)
    kept = h.gather(1, order[:, : N // 2, None].expand(-1, -1, D))
    filled = torch.cat([kept, torch.zeros_like(kept)], 1)
    return filled.gather(1, order.argsort(1)[..., None].expand(-1, -1, D))


def _noised(h: Tensor) -> Tensor:
    t = torch.randint(0, 50, (h.shape[0],), device=h.device).long()
    level = torch.linspace(0.1, 0.9, 50)[t][:, None, None]
    return level * h + (1 - level) * torch.randn_like(h)


def _routed(h: Tensor) -> Tensor:
    scores = h[..., :4] + torch.empty_like(h[..., :4]).normal_(0.0, 0.5)
    top = scores.topk(2, -1)
    weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values.softmax(-1))
    return h * weights.repeat_interleave(2, -1)


FUNCTIONS: dict[str, Function] = {
    "drop path": _drop_path,
    "masked autoencoder": _masked,
    "diffusion": _noised,
    "router noise": _routed,
    "gumbel": lambda h: F.gumbel_softmax(h, hard=True) * h,
    "rand": lambda h: h * torch.rand(h.shape),
    "rand_like": lambda h: h * torch.rand_like(h),
    "rows of an example": lambda h: h * torch.rand(h.shape[0] * N).view(-1, N, 1),
    "like merged rows": lambda h: (h.transpose(0, 1).flatten(0, 1) + 1).detach().bernoulli(0.5).view(N, -1, D).mT.permute(2, 0, 1) * h,
    "randn of rows": lambda h: h + torch.randn(h.shape[0], 1, 1),
    "normal of numbers": lambda h: h + torch.normal(1.0, 0.5, (h.shape[0], N, D)),
    "normal of tensors": lambda h: h + torch.normal(h, h.exp()),
    "normal of a mean": lambda h: h + torch.normal(h, 0.5),
    "normal of a deviation": lambda h: h + torch.normal(0.5, h.exp()),
    "uniform_": lambda h: h + torch.empty_like(h).uniform_(-1, 2),
    "log_normal_": lambda h: h + torch.empty_like(h).log_normal_(0.1, 0.2),
    "exponential_": lambda h: h + torch.empty_like(h).exponential_(2.0),
    "random_": lambda h: h + torch.empty_like(h).random_(9),
    "randint_like": lambda h: h + torch.randint_like(h, 3),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_ of numbers": lambda h: h * torch.empty_like(h).bernoulli_(),
    "bernoulli_ of a tensor": lambda h: h * torch.empty_like(h).bernoulli_(h.sigmoid()),
    "a view": lambda h: h * torch.ones_like(h).index_fill(2, torch.tensor(0), 2)[:, :3].clone().normal_().mean(1, True),
    "multinomial": lambda h: h * h.softmax(-1)[:, 0].multinomial(1)[:, None],
    "multinomial without replacement": lambda h: h * h.softmax(-1)[:, 0].multinomial(3).float().mean(1)[:, None, None],
    "multinomial with replacement": lambda h: h * h.softmax(-1)[:, 0].multinomial(9, True).float().mean(1)[:, None, None],
    "once a step": lambda h: h * torch.floor(0.8 + torch.rand(1)) + torch.rand(()),
    "randperm": lambda h: h + h[..., torch.randperm(D)],
    "bf16": lambda h: h + torch.rand_like(h.bfloat16()) + torch.randn_like(h.half()),
    "float64": lambda h: h + torch.rand_like(h.double()).float(),
    "dropout of what is the same for all": lambda h: h @ F.dropout(torch.linspace(0, 1, D * D).view(D, D), 0.4),
    "with dropout": lambda h: F.dropout(h + torch.rand_like(h), 0.5) * torch.rand(1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_the_whole_batch(name: str) -> None:
    program = _check(_case(FUNCTIONS[name]))

    assert program.random_calls > 0


def test_batch_may_be_second() -> None:
    program = _check(_case(lambda h: h + torch.randn_like(h) * torch.rand(h.shape[1], 1), 1))

    assert program.stream_layouts == ((1, 1, 1, 24), (0, 1, 1, 24))


def test_streams_follow_the_modules_of_a_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return x + _drop_path(self.linear(self.norm(x)) * torch.rand(1))

    torch.manual_seed(0)
    x, y = torch.randn(B, N, D), torch.randn(B, N, D)
    program = _check(Case(nn.Sequential(*(Block() for _ in range(3))), (x,), {}, F.mse_loss, (y,)))

    assert len(program.blocks["Block"].instances) == 3
    assert [entry.name for entry in program.inputs][2:] == ["step_key", "sample_keys"]
    assert program.random_calls == 6


def test_rows_streams_and_steps_differ() -> None:
    """Each of them would else give equal numbers: one key for all rows, one number for all streams."""
    drawn: list[Tensor] = []

    def function(h: Tensor) -> Tensor:
        first, second = torch.rand_like(h), torch.rand_like(h)
        return torch.where(torch.arange(D) < D // 2, first, second) * 0 + h * (first - second).abs().sum((1, 2), True)

    case = _case(function)
    program = case.export()
    for keys in (torch.arange(B), torch.arange(B) + 99, torch.zeros(B, dtype=torch.int64)):
        drawn.append(run(program, case, keys=keys).loss)

    assert len({float(loss) for loss in drawn}) == 3


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda h: h + F.rrelu(h, training=True), "rrelu.*no form that draws by the examples' keys"),
        (lambda h: h + torch.poisson(h.abs()), "poisson.*no form that draws by the examples' keys"),
        (
            lambda h: h + torch.rand(h.shape[0], h.shape[0]).mean(1)[:, None, None],
            "not exactly one dim is a multiple of the batch",
        ),
        (lambda h: h + h[:, 0, 0].softmax(0).multinomial(1), "multinomial.*no form that draws"),
        (lambda h: h + torch.randn_like(h + 0j).real, "no form that draws by the examples' keys"),
    ],
)
def test_what_no_key_can_draw_is_refused(function: Function, why: str) -> None:
    with pytest.raises(gp.GraphparError, match=why):
        _case(function).export()


def test_a_program_for_inference_draws_too() -> None:
    case = _case(lambda h: h + torch.randn_like(h))
    program = gp.export(case.model, case.args, mode="infer")

    assert [entry.name for entry in program.inputs] == ["x", "sample_keys"]


def test_the_reference_says_where_the_program_draws_otherwise() -> None:
    program = _case(lambda h: h + torch.randn_like(h)).export()

    with (
        pytest.raises(gp.GraphparError, match="draws random numbers where the program does not, after 1 draw"),
        Substituted(torch.arange(B), program.stream_layouts, 1, 1, step_key=STEP_KEY),
    ):
        eager(_case(lambda h: h + torch.randn_like(h) + torch.randn_like(h)))


@pytest.mark.parametrize("fault", ["a stream twice", "one key for all rows"])
def test_planted_faults_are_seen(fault: str) -> None:
    case = _case(lambda h: h + torch.randn_like(h) * torch.rand_like(h))
    program = case.export()
    keys = torch.arange(B) * 7919
    with Substituted(keys, program.stream_layouts, 1, 1, step_key=STEP_KEY):
        expected = eager(case)
    if fault == "a stream twice":
        first = next(node for node in program.graph.nodes if getattr(node.target, "__name__", "") == "stream")
        first.args = (first.args[0], 1)
    else:
        keys = keys[:1].expand(B)

    with pytest.raises(pytest.fail.Exception, match="off by"):
        assert_same(run(program, case, keys=keys), expected)
