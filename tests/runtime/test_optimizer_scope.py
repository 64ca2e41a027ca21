"""What an optimizer looks at is found by stepping it on small tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.optimizer_scope import NeedsClosure, Scope, look, unsaved
from graphpar.runtime.state.optimizers import Described
from tests.ranks.whole_parameters_script import OPTIMIZERS, Lars, parameters

SHAPES = {
    "emb.weight": (50_000, 512), "0.weight": (24, 16), "0.bias": (24,), "1.weight": (16, 24), "1.bias": (16,), "conv.weight": (8, 4, 3, 3),
    "gate": (), "scale": (1,),
}  # fmt: skip
MODEL = {name: Described(torch.Size(shape), torch.float32, True) for name, shape in SHAPES.items()}
Named = list[tuple[str, nn.Parameter]]
EACH = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop")


class Simple(Optimizer):
    """Its step is a function of a parameter, or of all of them."""

    def __init__(
        self, named: Named, change: Callable[[list[nn.Parameter]], None], params: Any = None, **group: Any
    ) -> None:
        super().__init__(params or [{"params": parameters(named), **group}], {"lr": 0.1})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.change([each for group in self.param_groups for each in group["params"] if each.grad is not None])


def noisy(given: list[nn.Parameter], scale: float = 1.0) -> None:
    for each in given:
        each.sub_((each.grad + torch.randn_like(each) * scale) * 0.1)


def slightly_noisy(given: list[nn.Parameter]) -> None:
    noisy(given, 1e-6)


def clipped(given: list[nn.Parameter]) -> None:
    """Elements move alone, but for a limit on the norm of all gradients together."""
    norm = torch.stack([each.grad.norm() for each in given if each.grad is not None]).norm()
    for each in given:
        each.sub_(each.grad * (1000.0 / norm).clamp(max=1.0) * 0.1)


def by_rows(given: list[nn.Parameter]) -> None:
    """Rows move alone, so shards along the first dim are stepped as the whole is, and others not."""
    for each in given:
        scale = each.grad.norm(dim=-1, keepdim=True) + 1e-6 if each.ndim == 2 else 1.0
        each.sub_(each.grad / scale)


def by_dims(given: list[nn.Parameter]) -> None:
    """What has one dim moves otherwise; slices have one."""
    for each in given:
        each.sub_(each.grad * (0.1 if each.ndim > 1 else 0.2))


def limited(given: list[nn.Parameter]) -> None:
    """A tensor stays as it is where it would change far more than here."""
    for each in given:
        if float(each.grad.norm()) < 1e6 * float(each.norm()):
            each.sub_(each.grad * 0.1)


def skipping(given: list[nn.Parameter]) -> None:
    if all(each.grad.isfinite().all() for each in given):
        for each in given:
            each.sub_(each.grad * 0.1)


def failing_once() -> Callable[[list[nn.Parameter]], None]:
    calls: list[None] = []

    def change(given: list[nn.Parameter]) -> None:
        calls.append(None)
        assert len(calls) != 2, "the second step of all"
        for each in given:
            each.sub_(each.grad * 0.1)

    return change


def noted(named: Named) -> Optimizer:
    """One group; the matrices that the factory has noted move as a whole, and they are not the first ones."""
    large = [each for name, each in named if each.ndim == 2 and "emb" not in name and name != "0.weight"]

    def change(given: list[nn.Parameter]) -> None:
        for each in given:
            each.sub_(each.grad / each.grad.norm() if any(each is one for one in large) else each.grad.sign())

    return Simple(named, change)


def numbered(named: Named) -> Optimizer:
    """A whole number of a group chooses how it is stepped."""
    first, later = (
        [each for name, each in named if each.ndim == 2 and (name[0] in "e0") == old] for old in (True, False)
    )
    made = Simple([], lambda _: None, params=[{"params": first, "way": 1}, {"params": later, "way": 2}])

    def change(_: list[nn.Parameter]) -> None:
        for group in made.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                each.sub_(each.grad / each.grad.norm() if group["way"] == 2 else each.grad.sign())

    made.change = change
    return made


class Adapted(Simple):
    """A step size that is estimated from all parameters, and is used when it is larger than the first."""

    def step(self, closure: Any = None) -> None:
        given = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        for group in self.param_groups:
            group["estimate"] = (
                group.get("estimate", 0.0) + sum(float(each.grad.square().sum()) for each in given) * 1e-12
            )
        with torch.no_grad():
            for each in given:
                each.sub_(each.grad * max(self.param_groups[0]["estimate"], 0.01))


class Sam(Simple):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        closure()


def groups_by_shape(named: Named) -> Optimizer:
    large = [each for _, each in named if each.ndim == 2 and each.size(0) < 10_000]
    rest = [each for _, each in named if not (each.ndim == 2 and each.size(0) < 10_000)]
    return torch.optim.AdamW([{"params": large, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize("kind", EACH)
def test_each_element_by_itself(kind: str) -> None:
    assert (
        look(lambda named: getattr(torch.optim, kind)(parameters(named), lr=0.01), MODEL, flat=True).scope
        is Scope.ELEMENT
    )


def test_new_tensors_and_fused_kernels_leave_each_element_by_itself() -> None:
    def decayed(given: list[nn.Parameter]) -> None:
        for each in given:
            each.sub_(each.grad * each.new_full(each.shape, 0.1))

    for make in (
        lambda named: Simple(named, decayed),
        lambda named: torch.optim.AdamW(parameters(named), lr=0.01, fused=True),
    ):
        assert look(make, MODEL, flat=True).scope is Scope.ELEMENT


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize(
    ("make", "scope", "over_slices"),
    [
        (groups_by_shape, Scope.ELEMENT, Scope.ELEMENT),
        (OPTIMIZERS["lars"], Scope.PARAMETER, Scope.PARAMETER),
        (lambda named: Lars(parameters(named), lr=0.0), Scope.PARAMETER, Scope.PARAMETER),  # a schedule begins at 0
        (OPTIMIZERS["orthogonal"], Scope.PARAMETER, Scope.PARAMETER),
        (OPTIMIZERS["adafactor"], Scope.PARAMETER, Scope.PARAMETER),
        (
            lambda named: torch.optim.Muon([each for _, each in named if each.ndim == 2]),
            Scope.PARAMETER,
            Scope.PARAMETER,
        ),
        (lambda named: Simple(named, by_rows), Scope.PARAMETER, Scope.PARAMETER),
        (lambda named: Simple(named, by_dims), Scope.ELEMENT, Scope.PARAMETER),
        (lambda named: Simple(named, limited), Scope.PARAMETER, Scope.PARAMETER),
        (noted, Scope.PARAMETER, Scope.PARAMETER),
        (numbered, Scope.PARAMETER, Scope.PARAMETER),
        (lambda named: Simple(named, skipping), Scope.ALL, Scope.ALL),
        (OPTIMIZERS["global"], Scope.ALL, Scope.ALL),
        (lambda named: Simple(named, clipped), Scope.ALL, Scope.ALL),
        (lambda named: Adapted(named, clipped), Scope.ALL, Scope.ALL),
        (lambda named: Simple(named, lambda given: given.missing), Scope.ALL, Scope.ALL),  # it can't be tried
    ],
)
def test_a_parameter_or_all_together(make: Callable[..., Any], scope: Scope, over_slices: Scope) -> None:
    assert look(make, MODEL).scope is scope
    assert look(make, MODEL, flat=True).scope is over_slices


@pytest.mark.parametrize(
    "make", [lambda named: torch.optim.LBFGS(parameters(named)), lambda named: Sam(named, lambda given: None)]
)
def test_a_step_that_needs_a_closure_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(NeedsClosure, match=r"(LBFGS|Sam), needs a closure .* use one whose step\(\) needs none"):
        look(make, MODEL)


def test_a_step_that_fails_once_needs_no_closure() -> None:
    change = failing_once()
    found = look(lambda named: Simple(named, change), MODEL)
    assert found.tried and found.scope is Scope.ELEMENT  # in float32, after it failed in float64


def elsewhere(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad


def in_place(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.data.sub_(0.1 * parameter.grad)


def test_a_step_that_gives_parameters_other_memory_is_refused_where_state_is_sharded() -> None:
    found = look(lambda named: Simple(named, elsewhere), MODEL)
    found.check_ranks(0)
    for zero in (1, 2, 3):
        with pytest.raises(RuntimeProgramError, match=r"the step of Simple gives parameters other memory"):
            found.check_ranks(zero)
    look(lambda named: Simple(named, in_place), MODEL).check_ranks(3)


@pytest.mark.parametrize("change", [noisy, slightly_noisy])
def test_a_step_that_draws_is_refused_on_several_ranks_and_nothing_is_left_of_the_trial(
    change: Callable[[list[nn.Parameter]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def make(named: Named) -> Optimizer:
        print("made")
        return Simple(named, change)

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    found = look(make, MODEL)
    assert torch.rand(2).equal(expected) and capfd.readouterr().out == ""
    with pytest.raises(RuntimeProgramError, match="Simple draws random numbers"):
        found.check_ranks(0)


class Stored(Optimizer):
    """Elements move alone, but their momenta are one row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            row = self.state[each].setdefault("row", torch.zeros_like(each).view(-1))
            each.sub_(row.lerp_(each.grad.view(-1), 0.1).view_as(each))


def test_state_that_no_shard_can_have_needs_whole_parameters() -> None:
    assert look(lambda named: Stored(parameters(named), {}), MODEL).scope is Scope.PARAMETER


class Every(Simple):
    """Each so many steps, counted in an attribute, it moves twice as far; it notes times and keeps results, too."""

    def __init__(self, named: Named, every: int) -> None:
        super().__init__(named, in_place)
        self.every, self.count, self.cache = every, 0, dict[int, int]()

    def step(self, closure: Any = None) -> None:
        self.count += self.every > 0
        self.time = time.perf_counter()
        of_first = self.state[self.param_groups[0]["params"][0]]
        of_first["step"] = of_first.get("step", 0) + 1
        self.cache[of_first["step"]] = of_first["step"] ** 2
        for _ in range(2 if self.every and self.count % self.every == 0 else 1):
            super().step()


@pytest.mark.parametrize("every", [0, *range(2, 15), 1000])
def test_a_counter_in_an_attribute_is_found_whatever_it_counts_to(every: int) -> None:
    small = {"weight": Described(torch.Size((4, 3)), torch.float32, True)}
    found = unsaved(lambda named: Every(named, every), small)
    assert re.search("in an attribute|its attribute count ", found or "") if every else found is None


class Counting(Optimizer):
    """Its steps become smaller; it counts them in an option, in the state of each parameter, or where no checkpoint has them."""

    def __init__(self, named: Named, where: str) -> None:
        super().__init__(parameters(named), {"lr": 0.1, "count": 0})
        self.where, self.count = where, 0
        self.everything: Any = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += self.where == "attribute"
        of_all = self.everything["all"]
        of_all["count"] = of_all.get("count", 0) + (self.where == "key")
        for group in self.param_groups:
            group["count"] += 1
            for each in (each for each in group["params"] if each.grad is not None):
                own = self.state[each]
                own["count"] = own.get("count", 0) + 1
                own.setdefault("noted", None)
                own[3] = own.get(3, 0) + 1
                if self.where in ("dict", "list"):
                    own["nested"] = {"count": 1} if self.where == "dict" else [torch.zeros(2)]
                counts = {
                    "option": group,
                    "parameter": own,
                    "key": of_all,
                    "attribute": vars(self),
                    "number": {"count": own[3]},
                }
                each.sub_(each.grad, alpha=group["lr"] / counts.get(self.where, own)["count"])


@pytest.mark.parametrize(
    ("make", "lacking"),
    [
        *((lambda named, where=where: Counting(named, where), None) for where in ("option", "parameter")),
        *(
            (lambda named, where=where: Counting(named, where), "in an attribute")
            for where in ("key", "attribute", "number")
        ),
        (lambda named: Counting(named, "dict"), "nested of .*weight is a dict"),
        (lambda named: Counting(named, "list"), None),
        *((make, None) for make in OPTIMIZERS.values()),
    ],
)
def test_what_no_checkpoint_has_of_an_optimizer_is_found(make: Callable[..., Any], lacking: str | None) -> None:
    found = unsaved(make, MODEL)
    assert found == lacking or (lacking is not None and re.search(lacking, found or ""))
