"""Capture: what the user gives is what the program holds, and the user's model is left as it was."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import graphpar as gp
from graphpar.frontend.build import build
from tests.tools.equality import Case, assert_exact, assert_same, eager, run

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
TARGET = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
IDS = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(5))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + torch.tanh(self.b(y))


class Around(nn.Module):
    """A linear layer, and a function of the module and its result."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.a(x))


def square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def attributes(program: gp.Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "get_attr"]


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_one_tensor_given_twice_is_two_inputs() -> None:
    program = assert_exact(Case(Two(), (X, X), {}, F.mse_loss, (X,)), [1, 3])

    assert [entry.name for entry in program.inputs] == ["x", "y", "target"]


def test_nested_inputs_are_named_by_their_path() -> None:
    class Nested(Two):
        def forward(self, d: Any, pair: Any, *rest: Tensor, scale: float = 1.0, flag: bool = True, none: Any = None,
                    n: int = 2, **more: Any) -> Tensor:  # fmt: skip
            h = self.a(d["x"]) + pair[0] * pair[1][0] + sum(rest)
            h = h * scale if flag else h
            return h + n + more["extra"]["z"] if none is None else h

    options = {"scale": 0.5, "flag": True, "none": None, "n": 3, "extra": {"z": X}}
    case = Case(Nested(), ({"x": X, "y": None}, (X + 1, [X + 2]), X, X), options, F.mse_loss, (X,))

    program = assert_exact(case, [1, 3])

    names = ["d_x", "pair_0", "pair_1_0", "input_2", "input_3", "extra_z", "target"]
    assert [entry.name for entry in program.inputs] == names


def test_inputs_may_have_names_that_graphpar_uses() -> None:
    class Odd(Two):
        def forward(self, rows: Tensor, sample_keys: Tensor) -> Tensor:
            return F.dropout(self.a(rows), 0.5) + sample_keys

    program = assert_exact(Case(Odd(), (), {"rows": X, "sample_keys": X}, square), [1, 3], stages=False)

    assert [entry.name for entry in program.inputs] == ["rows", "sample_keys_input", "sample_keys"]
    assert program.count_names == ("rows_2",)


def test_batch_on_another_dim_or_on_none() -> None:
    class Second(Two):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return self.a(x) + position

    case = Case(Second(), (torch.randn(5, 4, 8), torch.randn(5, 1, 8)), {}, F.mse_loss, (torch.randn(5, 4, 8),),
                {"x": -2, "position": None, "target": 1})  # fmt: skip

    program = assert_exact(case, [1, 3])

    assert [entry.batch_dim for entry in program.inputs] == [1, None, 1]


@pytest.mark.parametrize(
    ("dims", "why"),
    [
        ({"z": 1}, "names 'z', which is not an input"),
        ({"x": 7}, "gives dim 7 for 'x'"),
        ({"x": 1}, "'y' has 4 rows on dim 0, but the batch is 8"),
    ],
)
def test_wrong_batch_dims(dims: dict[str, int], why: str) -> None:
    given = {"y": 0, **dims} if "x" in dims else dims
    with pytest.raises(gp.GraphparError, match=why):
        gp.export(Two(), (X, X), loss_fn=square, batch_dims=dict(reversed(given.items())))


def test_inputs_that_are_given_whole_do_not_say_how_many_rows_there_are() -> None:
    class Masked(nn.Module):
        def forward(self, mask: Tensor, x: Tensor) -> Tensor:
            return x * mask

    program = gp.export(Masked(), (torch.rand(8), X), loss_fn=square, batch_dims={"mask": None})

    assert program.batch == len(X) and [entry.batch_dim for entry in program.inputs] == [None, 0]
    with pytest.raises(gp.GraphparError, match="There is no batch to split"):
        gp.export(Masked(), (torch.rand(8), X), loss_fn=square, batch_dims={"mask": None, "x": None})


def test_a_batch_of_one_example_traces_any_batch() -> None:
    program = gp.export(Two(), (X[:1], X[:1]), loss_fn=square)

    assert program.symbolic and program.batch == 1
    assert_same(run(program, Case(Two(), (X, X), {}, square), [3, 1]), eager(Case(Two(), (X, X), {}, square)))


# ---- outputs and losses ----------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor
    extra: tuple[Tensor, ...] = ()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, h: Output(loss, h),
        lambda loss, h: {"loss": loss, "hidden": (h, [h * 2])},
        lambda loss, h: loss.view(1).sum(),
    ],
    ids=["dataclass", "dictionary", "tensor"],
)
def test_the_models_own_loss(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    assert not assert_exact(Case(Around(lambda _, h: wrap(square(h), h)), (X,)), [1, 3]).warnings


@pytest.mark.costly
@pytest.mark.parametrize(
    ("wrap", "place", "own"),
    [
        (lambda loss, h: (h, loss), "output[1]", lambda out: out[1]),
        (
            lambda loss, h: {"logits": h, "nll": loss, "seen": h.detach().mean()},
            "output['nll']",
            lambda out: out["nll"],
        ),
        (lambda loss, h: Output(None, h, (loss,)), "output.extra[0]", lambda out: out.extra[0]),  # type: ignore[arg-type]
    ],
    ids=["tuple", "dictionary", "dataclass"],
)
def test_the_only_scalar_that_needs_a_gradient_is_the_loss(
    wrap: Callable[[Tensor, Tensor], Any], place: str, own: Callable[[Any], Tensor]
) -> None:
    model = Around(lambda _, h: wrap(square(h), h))
    program = gp.export(model, (X,))
    assert program.mode == "train" and any(line.startswith(f"{place} is used as the loss") for line in program.warnings)
    assert_same(run(program, Case(model, (X,)), [4]), eager(Case(model, (X,), loss_fn=own)))
    assert not gp.export(model, (X,), loss_fn=own).warnings
    inferred = gp.export(model, (X,), mode="infer")
    assert inferred.mode == "infer" and not inferred.warnings


class Temperature(nn.Module):
    """Returns a parameter, too: a scalar that needs a gradient, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.scale.exp()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Around(lambda _, h: (h, None)), "it returns output_0"),
        (Around(lambda _, h: (h, h.sum(), h.square().sum())), "output[1], output[2] are scalars that need a gradient"),
        (Around(lambda _, h: (h, h.detach().sum())), "it returns output_0, output_1"),
        (Temperature(), "it returns output_0, output_1"),
    ],
    ids=["none", "several", "no gradient", "a parameter"],
)
def test_without_a_loss_it_is_said_that_nothing_is_trained(model: nn.Module, expected: str) -> None:
    x = X if not isinstance(model, Temperature) else torch.ones(4, 4)
    program = gp.export(model, (x,))
    (said,) = program.warnings
    assert (
        program.mode == "infer"
        and said.startswith("The program is for inference")
        and expected in said
        and "loss_fn = lambda" in said
    )
    assert not gp.export(model, (x,), mode="infer").warnings
    assert not gp.export(copy.deepcopy(model).requires_grad_(False), (x,)).warnings


def test_a_class_that_needs_arguments_is_no_factory() -> None:
    with pytest.raises(
        gp.GraphparError, match=r"the class Linear, which needs arguments \(in_features, out_features\)"
    ):
        gp.export(nn.Linear, (X,))


def test_outputs_of_inference_are_named() -> None:
    program = gp.export(Around(lambda _, h: {"logits": h, "hidden": (h, [h * 2])}), (X,), mode="infer")

    assert [(entry.name, entry.batch_dim) for entry in program.outputs] == [
        ("logits", 0),
        ("hidden_0", 0),
        ("hidden_1_0", 0),
    ]


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda o: o.mean(-1), r"shape \(batch\)"),
        (lambda o: (o.mean(), 1), "returned a tuple"),
        (lambda o: (o > 0).sum(), "torch.int64, which has no gradient"),
    ],
)
def test_losses_that_are_none(loss_fn: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(gp.GraphparError, match=why):
        gp.export(Two(), (X, X), loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "targets", "why"),
    [
        (nn.CrossEntropyLoss(), (), r"output and 0 targets.*missing a required argument: 'target'.*example_targets"),
        (lambda o, y: F.mse_loss(o, y), (X, X), r"output and 2 targets.*too many positional arguments"),
    ],
)
def test_losses_that_are_given_other_targets_than_they_take(
    loss_fn: Callable[..., Any], targets: Any, why: str
) -> None:
    with pytest.raises(gp.GraphparError, match=why):
        gp.export(Two(), (X, X), loss_fn=loss_fn, targets=targets)


# ---- parameters ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.first, self.second = shared, shared

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embed(ids)))))


@pytest.mark.costly
def test_tied_parameters_are_used_under_the_name_of_each_module() -> None:
    def loss_fn(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), y.flatten())

    program = assert_exact(Case(Tied(), (IDS,), {}, loss_fn, (IDS,)), [1, 3])

    ties = {("embed.weight", "head.weight"), ("first.weight", "second.weight"), ("first.bias", "second.bias")}
    assert set(program.ties) == ties
    assert [name for name in attributes(program) if "weight" in name] == [
        "embed.weight", "first.weight", "second.weight", "head.weight",
    ]  # fmt: skip
    assert gp.export(Tied, (IDS,), loss_fn=loss_fn, targets=(IDS,)).ties == program.ties


def test_frozen_and_unused_parameters() -> None:
    model = Two()
    model.a.requires_grad_(False)
    model.unused = nn.Linear(3, 3)

    program = assert_exact(Case(model, (X, X), {}, square), [1, 3])

    assert not program.parameters["a.weight"].requires_grad and "unused.weight" in program.parameters


def test_an_output_that_is_no_tensor_is_named() -> None:
    model = Around(lambda _, h: {"logits": h, "aux": (h, ["router"])})
    with pytest.raises(
        gp.GraphparError, match="output 'aux_1_0' is of type str, which is neither a tensor nor a number"
    ):
        gp.export(model, (X,), mode="infer")


def test_parameters_that_share_memory_without_being_one() -> None:
    model = Two()
    model.b.weight = nn.Parameter(model.a.weight.data)

    with pytest.raises(gp.GraphparError, match=r"'a.weight' and 'b.weight' share memory"):
        gp.export(model, (X, X), loss_fn=square)


def test_parameters_that_lie_beside_each_other_in_one_storage_share_no_memory() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(2, 4, 4)
            self.a, self.b = nn.Parameter(whole[0]), nn.Parameter(whole[1])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.a) @ self.b

    assert set(gp.export(Halves(), (torch.randn(8, 4),), loss_fn=square).parameters) == {"a", "b"}


# ---- factories -------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Values that are in no state_dict: buffers, attributes, literals, and numbers read while it is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.register_buffer("inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool(), persistent=False)
        written = torch.zeros(9)
        written[1:3] = 2.0
        written.mul_(3)
        self.register_buffer("written", written[1:], persistent=False)
        self.plain = torch.outer(torch.arange(3.0), torch.ones(8))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.any = bool((torch.linspace(0, 1, 3) > 0.5).any())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * torch.cat([self.inverse, self.inverse]) + self.plain[2] + self.mask.float()[3]
        return h + self.written * self.rates[1] + torch.tensor(2.5) + (1.0 if self.any else 0.0)


def test_values_of_a_model_that_was_never_built() -> None:
    program = gp.export(Tables, (X,), loss_fn=square)
    case = Case(Tables(), (X,), {}, square)

    assert_same(run(program, case), eager(case))
    assert {"inverse", "mask", "written"} <= set(program.constants)


# ---- traces at a fixed size ------------------------------------------------------------------------------------


class Literal(nn.Module):
    """``len`` makes the batch a literal of the trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.drops = nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        h = F.dropout(self.a(x).view(batch * 2, 4), 0.4, self.training and self.drops).view(batch, 2, 4)
        return h.transpose(0, 1).reshape(2 * batch, 4).view(2, batch, 4).transpose(0, 1) + torch.zeros(batch, 1, 1)


@pytest.mark.costly
def test_a_model_with_a_literal_batch_is_traced_for_each_size() -> None:
    labels = torch.randint(0, 4, (6, 2), generator=torch.Generator().manual_seed(0))
    labels[0], labels[1, 0] = -100, -100
    weight = torch.rand(4) + 0.5

    def loss_fn(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.reshape(-1, 4), y.view(-1), weight=weight) + o.pow(2).sum() / len(o) + 0.5

    case = Case(Literal(), (torch.randn(6, 2, 4),), {}, loss_fn, (labels,))
    program = assert_exact(case, [1, 5], [2, 2, 2], stages=False)
    assert not program.symbolic and "fixed" in program.warnings[0]

    case.model.drops = False  # type: ignore[assignment]
    assert_exact(case, [1, 5])


class Literals(nn.Module):
    """Sizes are written as the 8 rows of the example, beside 8 heads that mean something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.q, self.c = nn.Linear(12, 16), nn.Linear(16, 64), nn.Linear(16 * 5, 4)
        self.cls, self.cell = nn.Parameter(torch.randn(1, 1, 16)), nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(8, -1).view(8 * 4, 16).tanh().reshape(8, 4, 16)
        q = self.q(h).view(8, 4, 8, 8).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(8, 4, 64)[..., :16]
        h, _ = self.cell(torch.cat([self.cls.expand(8, -1, -1), h], 1), torch.zeros(1, 8, 16))
        return self.c(h.reshape(8, -1))


@pytest.mark.costly
def test_sizes_that_stand_in_the_code_as_the_rows_follow_the_batch() -> None:
    case = Case(Literals(), (torch.randn(8, 4, 12),), {}, F.cross_entropy, (torch.randint(0, 4, (8,)),))
    program = assert_exact(case, [2, 6], [4, 4], stages=False)

    assert program.unsplittable is None and not program.couplings
    assert "the 8 of view(8, -1) at test_capture.py" in program.warnings[0]
    with pytest.raises(gp.GraphparError, match="batches of 8 rows only"):
        gp.plan(program, mesh={"dp_shard": 2}, global_batch=16)


@pytest.mark.parametrize(
    "computed",
    [
        lambda h: h.view(8, -1, 2, 8).mean((1, 2)),
        lambda h: h.transpose(0, 1).reshape(8, 8, -1).sum((0, 2)),
    ],
)
def test_the_size_that_rows_go_to_is_found_by_what_lies_before_it(computed: Callable[[Tensor], Tensor]) -> None:
    class Guessed(Two):
        def forward(self, x: Tensor) -> Tensor:
            return computed(self.a(x.view(8, 8, 8)))

    case = Case(Guessed(), (torch.randn(8, 8, 8),), {}, square)
    program = assert_exact(case, [2, 6])

    assert program.unsplittable is None and not program.couplings


def test_a_model_of_one_batch_size_runs_whole() -> None:
    class OneSize(Two):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.position

    case = Case(OneSize(), (X,), {}, square)
    program = case.export()

    assert program.unsplittable is not None and "only with 4 rows" in program.unsplittable
    assert_same(run(program, case), eager(case))


# ---- what a trace would lose -----------------------------------------------------------------------------------


def test_functions_that_no_trace_shows_are_named() -> None:
    for layer, says in (
        (
            lambda _, h: torch.vmap(lambda row: row * row.sum())(h),
            r"torch.vmap \(test_capture.py:\d+\).*all rows at once",
        ),
        (lambda _, h: h + torch.empty_like(h).random_(5, 10), "random_ with bounds.*torch.randint"),
    ):
        with pytest.raises(gp.GraphparError, match=says):
            Case(Around(layer), (X,), {}, square).export()


@functools.lru_cache
def _table(count: int) -> Tensor:
    return torch.arange(count).float().cos()


def test_caches_of_functions_have_no_tensors_of_a_trace() -> None:
    case = Case(Around(lambda _, h: h * _table(8)), (X,), {}, square)
    program = case.export()

    assert not isinstance(_table(8), FakeTensor)
    assert_same(run(program, case), eager(case))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3.0


def test_custom_autograd_functions_keep_their_backward() -> None:
    before = dict(vars(torch.autograd.function._SingleLevelFunction))
    model = Around(lambda _, h: Tripled.apply(h))

    assert_exact(Case(model, (X,), {}, square), [1, 3])
    assert gp.export(model, (X,), mode="infer").outputs

    assert dict(vars(torch.autograd.function._SingleLevelFunction)) == before
    model.zero_grad()
    model(X).sum().backward()
    assert model.a.bias.grad is not None and model.a.bias.grad[0] == 12.0


def test_custom_operators_keep_their_backward() -> None:
    @torch.library.custom_op("graphpar_test::squared", mutates_args=())
    def squared(x: Tensor) -> Tensor:
        return x * x

    squared.register_fake(torch.empty_like)
    squared.register_autograd(
        lambda ctx, gradient: 2 * gradient * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    assert_exact(Case(Around(lambda _, h: squared(h)), (X,), {}, lambda o: o.mean()), [1, 3])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions_are_kept_in_value_and_noted(reentrant: bool) -> None:
    model = Around(lambda module, h: checkpoint(module.a, h, use_reentrant=reentrant))

    program = assert_exact(Case(model, (X,), {}, square), [1, 3])

    assert program.regions == ("a",)
    assert any("runs a under torch.utils.checkpoint" in line for line in gp.plan(program).warnings)


class Layers(nn.Module):
    """Layers that it checkpoints itself, ``how`` it is told."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Around(lambda module, h: module.a(h).relu()) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = self.how(layer, x) if place else layer(x)
        return x


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "module": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "call": lambda layer, x: checkpoint(functools.partial(layer.__call__), x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "closure": lambda layer, x: checkpoint(lambda h: layer(h), x, use_reentrant=False),
}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1 / 2)
def test_blocks_that_the_model_checkpoints_are_recomputed(way: str) -> None:
    program = gp.export(Layers(WAYS[way]), (torch.randn(4, 8),), loss_fn=square)

    assert program.regions == ("layers.1", "layers.2")
    plan = gp.plan(program)
    assert plan.recompute == {"layers.1": "full", "layers.2": "full"} and not plan.warnings
    assert gp.plan(program, recompute="none").recompute == "none"
    assert gp.plan(gp.export(Layers(WAYS[way]), (torch.randn(4, 8),))).recompute == "none"  # for inference


def test_control_flow_on_values_is_refused_with_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    model = Around(lambda _, h: h * 2 if int(h.sum()) > 0 else h)

    with pytest.raises(gp.GraphparError, match=r"depends on values of tensors.*torch.where.*test_capture.py"):
        gp.export(model, (X,), loss_fn=square)
    assert capfd.readouterr().err == ""


@pytest.mark.costly
def test_advice_about_experts_is_for_loops() -> None:
    def looped(_: object, h: Tensor) -> Tensor:
        for _ in range(2):
            if (h > 0).any():
                h = h * 2
        return h

    def ctc(output: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), labels, torch.full((4,), 6), lengths)

    def once(_: object, h: Tensor) -> Tensor:
        return h * 2 if int((h > 0).sum()) else h

    for layer, reason in ((looped, "it can't be seen that mul"), (once, "depends on values of tensors")):
        with pytest.raises(gp.GraphparError, match=reason) as refused:
            gp.export(Around(layer), (X,), loss_fn=square)
        assert "loop over experts" not in str(refused.value)
    with pytest.raises(
        gp.GraphparError, match=r"The operator is ctc_loss: give it lengths and sizes as Python numbers"
    ) as refused:
        targets = (torch.ones(4, 3, dtype=torch.long), torch.tensor([3, 2, 1, 3]))
        gp.export(nn.Linear(5, 8), (torch.randn(4, 6, 5),), loss_fn=ctc, targets=targets)
    assert "experts" not in str(refused.value)


# ---- the user's model ------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_the_model_is_left_as_it_was() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.norm(self.a(x))
            return self.last

    model = nn.Sequential(Remembering(), nn.Dropout(0.3), nn.Linear(8, 8))
    model[1].eval()
    model[2].requires_grad_(False)
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes_before = [dict(vars(module)) for module in model.modules()]

    gp.export(model, (X,), loss_fn=square)
    gp.export(model, (X,), mode="infer")

    assert [dict(vars(module)) for module in model.modules()] == attributes_before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True] * 4 + [False] * 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), seed)


def test_wrapped_models_keep_the_inner_names() -> None:
    assert list(gp.export(nn.DataParallel(Two()), (X, X), loss_fn=square).parameters)[:2] == ["a.weight", "a.bias"]


def test_a_bare_tensor_is_no_tuple_of_arguments() -> None:
    with pytest.raises(gp.GraphparError, match=r"args is a tensor; .* args=\(tensor,\)"):
        gp.export(nn.Linear(4, 4), torch.randn(2, 4))  # type: ignore[arg-type]
    with pytest.raises(gp.GraphparError, match=r"targets is a tensor; .* targets=\(tensor,\)"):
        gp.export(nn.Linear(4, 4), (torch.randn(2, 4),), loss_fn=nn.functional.mse_loss, targets=torch.randn(2, 4))  # type: ignore[arg-type]


def test_a_plan_is_read_from_a_dictionary() -> None:
    with pytest.raises(gp.GraphparError, match=r"json\.loads"):
        gp.Plan.from_json("{}")  # type: ignore[arg-type]


# ---- what a trace would lose, and the lines of what it can't follow ---------------------------------------------


class Positions(nn.Module):
    """A table whose positions are made on the model's own device, and with ``masked`` a mask that no weights file holds."""

    def __init__(self, device: str | None = None, masked: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 8, device=device), nn.Linear(8, 8, device=device)
        if masked:
            self.register_buffer("mask", torch.ones(3, 3, device=device).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = (
            x[:, None]
            + self.table(torch.arange(3, device=self.table.weight.device))
            + torch.zeros(8, device=self.head.weight.device)
        )
        return self.head(self.mask @ h if hasattr(self, "mask") else h)


def in_meta() -> nn.Module:
    with torch.device("meta"):
        return Positions(masked=True)


def test_a_model_on_the_device_meta_is_one_without_memory() -> None:
    model = Positions("meta")
    expected = gp.export(Positions(), (X,), loss_fn=square)
    program = gp.export(model, (X,), loss_fn=square)

    assert str(program.graph) == str(expected.graph) and "meta" not in str(program.graph)
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}))
    assert model.head.weight.is_meta, "the user's model is as it was"
    with pytest.raises(
        gp.GraphparError, match=r"table.weight is on the device meta.*give a function that builds it on the CPU"
    ):
        gp.verify(parts)


@pytest.mark.parametrize(
    "factory", [in_meta, lambda: Positions("meta", True), lambda: Positions(masked=True).to("meta")]
)
def test_values_of_a_factory_on_the_device_meta(factory: Callable[[], nn.Module]) -> None:
    program = gp.export(factory, (X,), loss_fn=square)

    assert torch.equal(program.constants["mask"], torch.ones(3, 3).tril()) and "meta" not in str(program.graph)


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, lambda model: model.to(torch.float16)], ids=["bf16", "fp16"])
def test_a_factory_that_converts_its_model_takes_no_memory(convert: Callable[[nn.Module], nn.Module]) -> None:
    module, fake, _ = build(lambda: convert(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))))

    assert fake is not None and all(isinstance(parameter, FakeTensor) for parameter in module.parameters())
    assert {parameter.dtype for parameter in module.parameters()} <= {torch.bfloat16, torch.float16}


class Masked(Positions):
    """A model whose own code fills its mask, as transformers' ``_init_weights`` does; ``drawn``: with random values."""

    def __init__(self, drawn: bool = False) -> None:
        super().__init__("meta", masked=True)
        self.drawn = drawn

    def reset_parameters(self) -> None:
        self.mask.copy_(torch.rand(3, 3) if self.drawn else torch.ones(3, 3).tril())


def test_a_table_on_the_device_meta_has_the_values_that_the_models_code_gives_it() -> None:
    model, seed = Masked(), torch.get_rng_state()
    program = gp.export(model, (X,), loss_fn=square)

    assert torch.equal(program.constants["mask"], torch.ones(3, 3).tril()) and "meta" not in str(program.graph)
    assert model.mask.is_meta and torch.equal(torch.get_rng_state(), seed)
    with pytest.raises(gp.GraphparError, match="'mask' of Masked has no values"):
        gp.export(Masked(drawn=True), (X,), loss_fn=square)


def test_a_table_on_the_device_meta_without_values_is_refused() -> None:
    with pytest.raises(
        gp.GraphparError, match=r"non-persistent buffer 'mask' of Positions has no values.*Give a function"
    ):
        gp.export(Positions("meta", masked=True), (X,), loss_fn=square)


@pytest.mark.parametrize(
    "function", [lambda m, y: y * y.data, lambda m, y: y / m.a.weight.data.norm(), lambda m, y: y + m.a.bias.data]
)
def test_data_of_a_tensor_is_the_tensor_without_gradient(function: Callable[[Any, Tensor], Tensor]) -> None:
    assert_exact(Case(Around(function), (X,), {}, square, ()), [1, 3])


def writes_data(module: Any, y: Tensor) -> Tensor:
    y.data.mul_(2)
    return y


def writes_later(module: Any, y: Tensor) -> Tensor:
    kept = y.data
    y += 1
    return y * kept


def assigns_data(module: Any, y: Tensor) -> Tensor:
    y.data = 2 * y.data
    return y


@pytest.mark.parametrize("function", [writes_data, writes_later])
def test_data_that_is_written_is_refused_with_its_line(function: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(gp.GraphparError, match=r"writes \(test_capture.py:\d+\) to a tensor whose .data it took"):
        gp.export(Around(function), (X,), loss_fn=square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_that_its_forward_casts_stays_as_it_is(dtype: torch.dtype) -> None:
    def cast(module: Any, y: Tensor) -> Tensor:
        module.a = module.a.to(dtype)
        return module.a(y.to(dtype)).to(y.dtype)

    if dtype is torch.float32:
        assert_exact(Case(Around(cast), (X,), {}, square, ()), [1, 3])
        return
    why = r"changes 'weight' of Linear from torch.float32 to torch.float64 in its forward \(test_capture.py:\d+\), and"
    with pytest.raises(gp.GraphparError, match=why):
        gp.export(Around(cast), (X,), loss_fn=square)


def test_lazy_modules_are_to_be_called_where_they_are_built() -> None:
    def built() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        model(X)
        return model

    with pytest.raises(gp.GraphparError, match=r"LazyLinear '0' has no sizes before it is called"):
        gp.export(nn.Sequential(nn.LazyLinear(3)), (X,), loss_fn=square)
    assert_exact(Case(built(), (X,), {}, square, ()), [1, 3])


def converted(module: Any, y: Tensor) -> Tensor:
    return y + float(y.detach().numpy().sum())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (assigns_data, "assigns to a tensor's .data"),
        (lambda m, y: y @ torch.ones(7, 8), "same reduction dim"),
        (converted, "numpy"),
        (lambda m, y: y * float(y.sum()), "control flow"),
    ],
)
def test_what_fails_in_a_model_is_said_with_its_line(function: Callable[[Any, Tensor], Tensor], why: str) -> None:
    with pytest.raises(gp.GraphparError, match=why) as error:
        gp.export(Around(function), (X,), loss_fn=square)

    first, said = function.__code__.co_firstlineno, re.search(r"test_capture.py:(\d+)", str(error.value))
    assert said is not None and first <= int(said[1]) <= first + 5


def test_a_module_that_fails_is_named() -> None:
    with pytest.raises(gp.GraphparError, match="in Linear '1'"):
        gp.export(nn.Sequential(nn.Linear(8, 8), nn.Linear(7, 8)), (X,), loss_fn=square)


def test_a_norm_over_the_batch_is_named() -> None:
    class Transposed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(x).t()).t()

    program = gp.export(Transposed(), (X,), loss_fn=square)

    with pytest.raises(gp.GraphparError, match=r"BatchNorm1d 'norm'.*takes dim 1 of its input as its 4 features"):
        gp.plan(program, mesh={"dp_replicate": 2}, microbatch_size=1)


@pytest.mark.parametrize("loss_fn", [None, square])
@pytest.mark.parametrize("axis", ["tp", "cp", "dp_replicate"])
@pytest.mark.sampled(1 / 2)
def test_a_model_without_parameters_is_planned_and_emitted(
    axis: str, loss_fn: Callable[[Tensor], Tensor] | None
) -> None:
    program = gp.export(nn.Softmax(-1), (X,), loss_fn=loss_fn)

    assert gp.partition(program, gp.plan(program, mesh={axis: 2})).stages


def all_reduced(module: Any, y: Tensor) -> Tensor:
    torch.distributed.all_reduce(y)
    return y


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (all_reduced, "torch.distributed.distributed_c10d.all_reduce"),
        (lambda m, y: torch.ops._c10d_functional.all_reduce(y, "sum", "0"), "_c10d_functional.all_reduce"),
        (lambda m, y: torch.ops._c10d_functional.wait_tensor(y), "_c10d_functional.wait_tensor"),
    ],
)
def test_collectives_in_a_model_are_refused_with_their_line(
    function: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    with pytest.raises(gp.GraphparError, match=rf"calls the collective {name}[a-z_.]* \(test_capture.py:\d+\)"):
        gp.export(Around(function), (X,), loss_fn=square)


def test_a_dim_that_a_pin_cannot_cut_is_said_with_its_size() -> None:
    program = gp.export(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), (torch.ones(6, 8),), loss_fn=square)

    with pytest.raises(gp.GraphparError, match="32 is not divisible by 3"):
        gp.plan(program, mesh={"tp": 3}, shard_plan={"0": "colwise"})


class Causal(nn.Module):
    def __init__(self, made: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = made
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.0)
        self.register_buffer("held", torch.ones(3, 3).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(x.shape[0], 3, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(3) if self.made else self.held
        return self.transformer(rows, rows, src_mask=mask, tgt_mask=mask)


@pytest.mark.costly
@pytest.mark.parametrize("made", [True, False])
def test_causal_masks_of_a_transformer_are_taken_as_they_are(made: bool) -> None:
    assert_exact(Case(Causal(made), (torch.randn(4, 24),), {}, square, ()), [1, 3])


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_forward_that_draws_outside_of_torch_is_refused(draw: Callable[[], float]) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return (self.second(x) if draw() < 0.5 else x).square().mean()

    with pytest.raises(gp.GraphparError, match=r"forward draws from .*random.*stochastic depth"):
        gp.export(Skipping(), (torch.randn(4, 4),))


def test_a_loss_that_is_detached_is_refused() -> None:
    def detached(output: Tensor) -> Tensor:
        return output.square().mean().detach()

    with pytest.raises(gp.GraphparError, match="The loss has no gradient"):
        gp.export(nn.Linear(4, 4), (torch.randn(2, 4),), loss_fn=detached)
    gp.export(nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),), loss_fn=detached)  # all of it is frozen


@pytest.mark.parametrize("where", ["module", "before", "parameter", "accumulated"])
def test_hooks_on_gradients_are_refused(where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if where == "module":
        model[1].register_full_backward_hook(lambda module, given, taken: (2 * given[0],))
    elif where == "before":
        model[1].register_full_backward_pre_hook(lambda module, taken: (2 * taken[0],))
    elif where == "parameter":
        model[1].weight.register_hook(lambda gradient: 2 * gradient)
    else:
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"which a trace can't follow\. Remove it"):
        gp.export(model, (torch.randn(4, 4),), loss_fn=lambda y: y.square().mean())
    gp.export(model, (torch.randn(4, 4),))  # for inference


class Odd(nn.Module):
    """A layer, and a buffer of a kind that no program holds, which the forward reads if ``reads``."""

    def __init__(self, reads: bool, nested: bool, persistent: bool) -> None:
        super().__init__()
        self.a, self.reads = nn.Linear(8, 8), reads
        odd = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]) if nested else torch.eye(8).to_sparse()
        self.register_buffer("heads", odd, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.reads:
            h = h + (
                self.heads.to_padded_tensor(0.0).sum()
                if self.heads.is_nested
                else torch.sparse.mm(self.heads, h.t()).t()
            )
        return h


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_buffers_that_no_program_holds_may_stay_unread(nested: bool, persistent: bool) -> None:
    for built in (Odd(False, nested, persistent), lambda: Odd(False, nested, persistent)):
        program = gp.export(built, (X,), loss_fn=square)
        assert not program.buffers and not program.constants
        assert not isinstance(built, nn.Module) or "heads" in built._buffers
        with pytest.raises(
            gp.GraphparError, match=rf"buffer 'heads' \(test_capture.py.*is {'nested' if nested else 'sparse'}"
        ):
            gp.export(Odd(True, nested, persistent), (X,), loss_fn=square)
    assert gp.verify(gp.partition(program, gp.plan(program, mesh={"tp": 1})), steps=1).ok


class Running(nn.Module):
    """Moves its mean without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


def test_a_module_that_several_blocks_share_writes_its_buffer() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = Running()
            self.layers = nn.ModuleList(nn.Sequential(norm, nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    case = Case(Sharing(), (X,), {}, square)
    program = case.export()
    assert len(program.buffers) == 1
    assert_same(run(program, case), eager(case))


class Given(nn.Module):
    """``use`` of a tensor and a number, beside a layer."""

    def __init__(self, use: Callable[[Tensor, int], object]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, ends: Tensor, longest: int) -> Tensor:
        y = self.layer(x)
        return (y * 2 if self.use(ends, longest) else y).sum()


UNREAD: dict[str, tuple[Callable[[Tensor, int], object], tuple[str, ...]]] = {
    "nothing": (lambda ends, longest: None, ("ends", "longest")),
    "passed on, and there": (lambda ends, longest: {"ends": ends, "longest": longest}["ends"] is None, ("ends", "longest")),
    "their types": (lambda ends, longest: isinstance(ends, Tensor) and not isinstance(longest, int), ("ends", "longest")),
    "a comparison": (lambda ends, longest: longest > 3, ("ends",)),
    "a size": (lambda ends, longest: torch.zeros(longest).numel() > 3, ("ends",)),
    "in a text": (lambda ends, longest: f"{longest}" == "5", ("ends",)),
    "its shape": (lambda ends, longest: ends.shape[0] > 3, ("longest",)),
    "its length": (lambda ends, longest: len(ends) > 3, ("longest",)),
    "one of the other": (lambda ends, longest: longest == ends.numel(), ()),
    "a copy": (lambda ends, longest: copy.copy(ends) is None, ("longest",)),
    "its type": (lambda ends, longest: ends.dtype is torch.int64, ("longest",)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_arguments_of_which_nothing_is_read(name: str) -> None:
    use, unread = UNREAD[name]
    program = gp.export(Given(use), (torch.randn(4, 4), torch.arange(7), 5))
    assert program.unread == unread
    assert program.plain == {"longest": 5}


def test_what_evaluation_or_the_next_step_reads_is_read() -> None:
    given = (torch.randn(4, 4), torch.arange(7), 5)
    evaluating = Given(lambda ends, longest: not evaluating.training and longest > 100)
    assert gp.export(evaluating, given).unread == ("ends", "longest")
    assert gp.export(evaluating, given, evaluates=True).unread == ("ends",)
    keeping = Given(lambda ends, longest: setattr(keeping, "last", longest))
    keeping.last = 5  # type: ignore[assignment]
    assert gp.export(keeping, given).unread == ()
