"""Every in-place operator of torch is made functional, with eager's values and gradients, or refused for a reason in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import grad

import graphpar as gp
from graphpar.ir.program import Program
from graphpar.operators.in_place import NO_OTHER_FORM, changes_view, is_inplace_operator, out_of_place
from graphpar.passes.normalize.functional import is_inplace

SIZE = 4
POINTS = torch.linspace(0.1, 0.9, SIZE * SIZE).reshape(SIZE, SIZE)  # in the domain of every function
WHOLE = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 5
MASK = WHOLE % 2 == 0
PICKS = torch.tensor([2, 0])
ROWS = torch.ones(2)
MATRIX = POINTS.flip(0) + torch.eye(SIZE)


def operators() -> Iterator[OpOverload]:
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        if space == "aten" and base.endswith("_"):
            found = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if found is not None and is_inplace_operator(found):  # those of scripts alone are not in torch.ops
                yield found


def name_of(target: OpOverload) -> str:
    return target._schema.name.partition("::")[2]


def drawn(target: OpOverload) -> bool:
    """Operators that draw random numbers are no business of this pass; dropout of a probability is."""
    return torch.Tag.nondeterministic_seeded in target.tags or name_of(target) in NOT_TAGGED


NOT_TAGGED = ("alpha_dropout_", "feature_alpha_dropout_", "feature_dropout_", "dropout_", "bernoulli_")


def test_each_has_another_form_or_a_reason() -> None:
    lists = [each for each in operators() if str(each._schema.arguments[0].type).startswith("List")]
    without = {name_of(each) for each in operators() if out_of_place(each) is None and each not in lists}

    new = {"shallow_copy_data_"} if torch.__version__ >= "2.14" else set()  # what .data = does, which is refused before
    assert without - set(NO_OTHER_FORM) - new == set(), "no form, and no reason"
    assert set(NO_OTHER_FORM) <= {name_of(each) for each in operators()}, "a reason for what torch has not"
    assert all(out_of_place(each) is None for each in lists)


# ---- values and gradients --------------------------------------------------------------------------------------

INTEGERS = ("bitwise", "__i", "gcd", "lcm")
# Operators of names, of the module's insides, and those whose samples need more than types say.
SPECIAL: dict[str, tuple[Any, ...]] = {
    "addbmm_": (torch.ones(2, SIZE, 3), torch.ones(2, 3, SIZE)),
    "addmm_": (POINTS, MATRIX),
    "addr_": (POINTS[0], POINTS[1]),
    "as_strided_": ([2, 3], [3, 1]),
    "clamp_.Tensor": (POINTS * 0.5, POINTS * 1.1),
    "clip_.Tensor": (POINTS * 0.5, POINTS * 1.1),
    "embedding_renorm_": (PICKS, 0.5, 2.0),
    "index_put_": ([PICKS], POINTS[:2], True),
    "masked_scatter_": (MASK, MATRIX),
    "polygamma_": (1,),
    "put_": (PICKS, POINTS[0, :2]),
    "renorm_": (2.0, 0, 0.5),
    "squeeze_.dims": ([0, 1],),
    "unsqueeze_": (1,),
    "lerp_.Tensor": (MATRIX, POINTS),
    "resize_": ([SIZE, SIZE],),
    "mvlgamma_": (1,),
    "scatter_.src": (0, PICKS[None], POINTS),
    "scatter_.reduce": (0, PICKS[None], POINTS),
    "scatter_.value_reduce": (0, PICKS[None], 3),
    "scatter_.value": (0, PICKS[None], 3),
    "scatter_add_": (0, PICKS[None], POINTS),
    "scatter_reduce_.two": (0, PICKS[None], POINTS, "sum"),
    "index_reduce_": (0, PICKS, POINTS[:2], "prod"),
    "index_copy_": (0, PICKS, POINTS[:2]),
    "index_add_": (0, PICKS, POINTS[:2]),
    "div_.Tensor_mode": (MATRIX,),
    "div_.Scalar_mode": (2,),
    "divide_.Tensor_mode": (MATRIX,),
    "divide_.Scalar_mode": (2,),
    "baddbmm_": (torch.ones(SIZE, SIZE, 2), torch.ones(SIZE, 2, SIZE)),
    "clamp_": (0.2, 0.7),
    "clip_": (0.2, 0.7),
    "addmv_": (POINTS, POINTS[0]),
    "swapaxes_": (0, 1),
    "swapdims_": (0, 1),
    "transpose_": (0, 1),
}
BATCHES = ("baddbmm_",)
VECTORS = ("addmv_",)
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"rounding_mode": "floor"} for name in SPECIAL if name.endswith("_mode")},
    **{name: {"reduce": "add"} for name in ("scatter_.reduce", "scatter_.value_reduce")},
    "round_.decimals": {"decimals": 1},
}


def sample(target: OpOverload) -> tuple[Callable[[Tensor, Tensor], Tensor], tuple[Any, ...], dict[str, Any]]:
    """What is written, made of points and whole numbers; the other arguments."""
    base, name = name_of(target), name_of(target)
    if target._overloadname != "default":
        name += f".{target._overloadname}"
    own: Callable[[Tensor, Tensor], Tensor] = lambda x, i: x * 1  # noqa: E731
    if base.startswith(INTEGERS):
        own = lambda x, i: i + 0  # noqa: E731
    elif base in BATCHES:
        own = lambda x, i: (x * 1)[:, None] + x  # noqa: E731
    elif base in VECTORS:
        own = lambda x, i: x[1] * 1  # noqa: E731
    elif base.startswith("logical"):
        own = lambda x, i: i > 1  # noqa: E731
    elif base == "resize_":
        own = lambda x, i: x.detach() * 1  # noqa: E731
    elif base == "float_power_":
        own = lambda x, i: x.double()  # noqa: E731
    elif base in ("acosh_", "arccosh_"):
        own = lambda x, i: x + 1  # noqa: E731
    args = SPECIAL.get(name, SPECIAL.get(base))
    if args is None:
        given = [each for each in target._schema.arguments[1:] if not each.kwarg_only and not each.has_default_value()]
        args = tuple(_argument(each, base) for each in given)
    return own, args, OPTIONS.get(name, {})


def _argument(described: Any, base: str) -> Any:
    kind = str(described.type)
    if kind == "Tensor":
        if described.name in ("index", "indices"):
            return PICKS
        if described.name == "mask":
            return MASK
        if described.name == "value":
            return torch.tensor(0.5)
        return WHOLE + 1 if base.startswith(INTEGERS) else MATRIX
    numbers = {"int": 0, "number": 2, "Scalar": 2, "float": 0.5, "Optional[number]": 1, "Optional[Tensor]": POINTS}
    return numbers[kind]


class All(nn.Module):
    """Calls every operator of a list, each on a value of its own."""

    def __init__(self, targets: list[OpOverload]) -> None:
        super().__init__()
        self.targets = targets

    def forward(self, x: Tensor, i: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Return what each left, seen by a name from before it."""
        found = []
        for target in self.targets:
            own, args, options = sample(target)
            written = own(x, i)
            target(written, *args, **options)
            found.append(written.clone())
        return (*found, rows * 2)


class _Found(Exception):
    pass


def functional(model: nn.Module) -> Program:
    """The program after ``functionalize``."""
    found: list[Program] = []

    def stop(row: Any, program: Program) -> None:
        if row.name == "functionalize":
            found.append(program)
            raise _Found

    with pytest.raises(_Found):
        gp.export(model, (POINTS, WHOLE, ROWS), batch_dims={"x": None, "i": None}, mode="infer", after_pass=stop)
    return found[0]


def is_sampled(target: OpOverload) -> bool:
    """Whether the operator runs on plain tensors: not on names of dims, lists, or in the inside of another function of torch."""
    of_names = any("List[str]" in str(each.type) for each in target._schema.arguments)
    of_names = of_names or name_of(target) == "shallow_copy_data_"
    if (
        of_names
        or "name" in target._overloadname.lower()
        or (name_of(target).startswith("_") and name_of(target)[:3] != "__i")
    ):
        return False
    refused = name_of(target) in NO_OTHER_FORM and name_of(target) not in ("resize_", "fill_diagonal_")
    return not (refused or drawn(target))


class Reshapes(nn.Module):
    def __init__(self, change: Callable[[Reshapes, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(SIZE, SIZE), change
        self.register_buffer("scale", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "a buffer": (
        Reshapes(lambda m, h: h * m.get_buffer("scale").add_(1).unsqueeze_(0)),
        r"'scale' in place by unsqueeze_ \(test_in_place.py:\d+\)",
    ),
    "an input": (nn.Sequential(Reshapes(lambda m, h: h), nn.Flatten()), "the input 'input'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_that_would_stay_are_refused(name: str) -> None:
    model, why = REFUSED[name]
    if name == "an input":
        model.register_forward_pre_hook(lambda module, args: args[0].unsqueeze_(1))

    with pytest.raises(gp.GraphparError, match=why):
        gp.export(model, (POINTS.clone(),), loss_fn=lambda y: y.square().mean())


@pytest.mark.costly
def test_values_and_gradients_are_those_of_eager() -> None:
    targets = [each for each in operators() if is_sampled(each)]
    model = All(targets)
    program = functional(model)
    assert not any(is_inplace(node) or changes_view(node.target) for node in program.graph.nodes)
    assert len(targets) > 200

    x, again = POINTS.clone().requires_grad_(), POINTS.clone().requires_grad_()
    expected = model(x, WHOLE.clone(), ROWS)
    found = program.run(program.constants, {"x": again, "i": WHOLE.clone(), "rows": ROWS})
    without = []
    for target, one, other in zip(targets, found, expected):
        told = partial("{}: {}".format, target)
        torch.testing.assert_close(one, other, equal_nan=True, msg=told)
        try:
            expects = gradient(other, x)
        except (NotImplementedError, RuntimeError):  # torch has no such derivative
            without.append(name_of(target))
            continue
        torch.testing.assert_close(gradient(one, again), expects, equal_nan=True, msg=told)
    assert set(without) <= NO_DERIVATIVE | ({"nextafter_"} if torch.__version__ < "2.13" else set())


class Spectrum(nn.Module):
    """A filter that keeps low frequencies, written into zeros."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x)
        kept = torch.zeros_like(spectrum)
        kept[..., :2] = spectrum[..., :2]
        kept[:, -1] = spectrum[:, 0] * 2
        kept.narrow(-1, 1, 1).mul_(3)
        filtered: Tensor = torch.fft.ifft(kept).real
        return filtered


def test_complex_values_that_are_written_into_have_gradients() -> None:
    program = gp.export(Spectrum(), (POINTS,))
    x, again = POINTS.clone().requires_grad_(), POINTS.clone().requires_grad_()

    (found,) = program.run({}, {"x": again})
    expected = Spectrum()(x)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found.square(), again), gradient(expected.square(), x))


NO_DERIVATIVE = {
    *(
        "acosh_",
        "arccosh_",
        "arcsinh_",
        "arctanh_",
        "asinh_",
        "atanh_",
        "embedding_renorm_",
        "floor_divide_",
        "heaviside_",
    ),
    *("igamma_", "igammac_", "scatter_"),
}


def gradient(result: Tensor, of: Tensor) -> Tensor:
    """The gradient of a result's sum; zeros where it has none."""
    if not result.requires_grad:
        return torch.zeros_like(of)
    (found,) = grad(result.sum(), of, retain_graph=True, allow_unused=True)
    return torch.zeros_like(of) if found is None else found
