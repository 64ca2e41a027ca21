"""Modules that repeat are traced once; whatever they do, the program is that of tracing each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphpar.codegen.printer import program_text
from graphpar.errors import GraphparError
from graphpar.frontend import capture as capturing
from graphpar.frontend.capture import capture
from graphpar.frontend.repetitions import expand
from graphpar.ir.program import ModelSource, Program, value_of
from graphpar.passes.table import run_passes

LAYERS = 8
COPIED = LAYERS - 3  # all but the first, the example, and the last
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


class Layer(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.layers, self.head, self.calls = nn.ModuleList(layers), nn.Linear(8, 4), calls

    def forward(self, x: Tensor) -> Any:
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def stack(kind: Callable[[int], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Stack(*(kind(index) for index in range(LAYERS)), **options)


def source(model: Callable[[], nn.Module], **options: Any) -> ModelSource:
    given = {
        "args": (torch.randn(4, 6, 8),),
        "kwargs": {},
        "loss_fn": lambda y: y.square().mean(),
        "targets": (),
    } | options
    return ModelSource(
        model, given["args"], given["kwargs"], given["loss_fn"], given["targets"], mode=given.get("mode")
    )


def rows(program: Program) -> list[Any]:
    """All of a program's nodes: name, operator, arguments, modules, source lines and shapes."""
    graphs = [program.graph, *(block.graph for block in program.blocks.values())]
    found: list[Any] = []
    for node in (node for graph in graphs for node in graph.nodes):
        value = value_of(node)
        shape = (str(tuple(value.shape)), value.dtype, value.requires_grad) if isinstance(value, Tensor) else str(value)
        meta = node.meta.get("module_stack"), node.meta.get("source")
        found.append(
            (
                node.name,
                node.op,
                getattr(node.target, "name", node.target),
                str(node.args),
                str(node.kwargs),
                meta,
                shape,
            )
        )
    return [row for row in found if "_assert_tensor_metadata" not in row[0]]


def check(
    model: Callable[[], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    batch_dims: dict[str, int | None] | None = None,
    **options: Any,
) -> int:
    """Check that the program is that of tracing each module, and return how many were copied."""
    copies = 0

    def counted(exported: Any, examples: Any, repetitions: Any) -> None:
        nonlocal copies
        expand(exported, examples, repetitions)
        copies += len(repetitions)

    monkeypatch.setattr(capturing, "expand", counted)
    SEEN.clear()
    program = capture(source(model, **options), batch_dims)
    SEEN.clear()
    monkeypatch.setattr(capturing, "siblings", lambda model: [])
    whole = capture(source(model, **options), batch_dims)
    different = [pair for pair in zip(rows(program), rows(whole)) if pair[0] != pair[1]]
    assert not different and len(rows(program)) == len(rows(whole))
    normal, whole = run_passes(program)[0], run_passes(whole)[0]
    assert program_text(normal) == program_text(whole)
    strip = [[row for row in rows(each) if "Helper" not in str(row[2])] for each in (normal, whole)]
    assert strip[0] == strip[1]
    return copies


@pytest.mark.costly
def test_plain_layers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(stack(Layer), monkeypatch) == COPIED


def test_a_fixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(Stack):
        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.cat([x[row : row + 1] * 2 for row in range(len(x))]))

    copies = check(lambda: Fixed(*(Layer(index) for index in range(LAYERS))), monkeypatch)
    assert copies == 2 * COPIED  # it is traced at two sizes


def test_a_model_that_is_no_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(Layer)()
    assert check(lambda: model, monkeypatch) == COPIED


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 / (self.index + 1))


class EveryThird(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() if self.index % 3 == 2 else super().forward(x)


class LastIsOther(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index != LAYERS - 2 else super().forward(x) + 1


class Appends(Layer):
    """Something inside is used outside, not through what ``forward`` returns."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(inner := self.up(x))
        return x + self.down(inner)


class UsesList(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        SEEN.clear()
        for layer in self.layers:
            x = layer(x)
        total = x.mean()
        for number, value in enumerate(SEEN):
            total = total + number * (value if isinstance(value, Tensor) else torch.full((), value)).mean()
        return total


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(float(len(SEEN) + self.index))
        return super().forward(x)


class CountsAndScales(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1.0)
        return super().forward(x) / len(SEEN)


class InPlaceOnOwn(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y.mul_(2)
        y[..., :2].zero_()
        return x + self.down(y)


class InPlaceOnInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.down(self.up(x)))
        return x


class InPlaceOnInputView(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        x[..., 0].add_(1)
        return x + self.down(self.up(x))


class NoGradInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean(-1, keepdim=True)
        return super().forward(x) * scale


class EmptyCast(Layer):
    """``x.to(x.dtype)`` is x, but another value of the graph; x is used again after."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) + super().forward(x)


class Lists(Layer):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        values, indices = torch.topk(second, 2, dim=-1)
        return x + first + values.sum(-1, keepdim=True) + indices.float().mean()


class Constants(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0] * 4)


class Remembers(Layer):
    """A buffer is assigned in forward."""

    count: Tensor

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x)


class Normalized(Layer):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.batch = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch(x))


class Hides(Layer):
    """A model's own ``except`` must not hide that a layer is another one."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) * (2.0 if self.index == 4 else 1.0)
        except Exception:
            return x


class Sized(Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        return super().forward(x.reshape(rows * tokens, width)).view(rows, -1, width) / tokens


class Regions(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(made, Tensor)
        return made


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "copies"),
    [
        (Scaled, 0), (EveryThird, 0), (LastIsOther, 0), (InPlaceOnOwn, COPIED), (InPlaceOnInputView, COPIED), (NoGradInside, 0),
        (EmptyCast, COPIED), (Lists, COPIED), (Constants, 0), (Hides, 0), (Sized, COPIED), (Regions, COPIED),
    ],
)  # fmt: skip
def test_layers(kind: Callable[[int], nn.Module], copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(stack(kind), monkeypatch) == copies


@pytest.mark.costly
@pytest.mark.parametrize("kind", [InPlaceOnInput, Remembers, Normalized])
def test_layers_that_write(kind: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: Stack(nn.Linear(8, 8), *(kind(index) for index in range(LAYERS))), monkeypatch)


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "copies"), [(Appends, COPIED), (Counts, COPIED), (CountsAndScales, 0)])
def test_what_layers_leave_in_python(
    kind: Callable[[int], nn.Module], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(lambda: UsesList(kind), monkeypatch, loss_fn=lambda y: y) == copies


class Turns(Layer):
    """Depends on how many layers have run, over all forwards."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(self.index)
        return super().forward(x).tanh() if len(SEEN) % LAYERS == 5 else super().forward(x)


class AddsToLoss(Layer):
    """Fills a list that the model clears at its end."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((inner := self.up(x)).square().mean())
        return x + self.down(inner) / (self.index + 1)


class ClearsList(UsesList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        losses = [*SEEN]
        SEEN.clear()
        return torch.stack(losses).sum() + x.mean()


@pytest.mark.parametrize("model", [stack(Turns), lambda: ClearsList(AddsToLoss)], ids=["count", "list"])
def test_what_layers_that_are_others_leave_in_python(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace that is given up has run the model to its end, as any forward does."""
    assert check(model, monkeypatch, loss_fn=lambda y: y.mean()) == 0


@pytest.mark.costly
def test_layers_of_two_kinds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (Layer, Sized)
    assert check(lambda: Stack(*(kinds[index % 2](index) for index in range(12))), monkeypatch) == 2 * (6 - 3)


@pytest.mark.costly
def test_a_flag_tells_layers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flagged(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.slides = index % 2 == 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).roll(1, 1) if self.slides else super().forward(x)

    assert check(lambda: Stack(*(Flagged(index) for index in range(12))), monkeypatch) == 2 * (6 - 3)


def test_a_layer_with_another_hyperparameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = stack(Layer)()
        made.layers[4].norm.eps = 1e-3  # type: ignore[index, union-attr]
        return made

    assert check(model, monkeypatch) == COPIED - 1


def test_a_hyperparameter_that_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rolled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).roll(self.index // 5, 1)

    assert check(stack(Rolled), monkeypatch) == 0


def test_one_layer_is_called_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: Stack(*[Layer()] * LAYERS), monkeypatch)


@pytest.mark.costly
def test_all_layers_are_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(stack(Layer, calls=2), monkeypatch) == COPIED


def test_layers_share_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = stack(Layer)()
        for layer in made.layers:  # type: ignore[union-attr]
            layer.norm = made.layers[0].norm  # type: ignore[index, union-attr]
        return made

    check(model, monkeypatch)


def test_layers_share_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = stack(Layer)()
        for layer in list(made.layers)[1:]:  # type: ignore[arg-type]
            layer.up.weight = made.layers[0].up.weight  # type: ignore[index, union-attr]
        return made

    assert check(model, monkeypatch) == COPIED


def test_a_frozen_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = stack(Layer)()
        made.layers[3].requires_grad_(False)  # type: ignore[index, union-attr]
        return made

    assert check(model, monkeypatch) == COPIED - 1


@pytest.mark.costly
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_on_one_layer(before: bool, inner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = stack(Layer)()
        module: Any = made.layers[4].up if inner else made.layers[4]  # type: ignore[index, union-attr]
        if before:
            module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        else:
            module.register_forward_hook(lambda module, args, output: output * 2)
        return made

    assert check(model, monkeypatch) == (0 if inner else COPIED - 1)


def test_hooks_that_collect_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = UsesList(Layer)
        for index in (1, 4, 5):
            made.layers[index].up.register_forward_hook(lambda module, args, output: SEEN.append(output))  # type: ignore[union-attr]
        return made

    assert check(model, monkeypatch, loss_fn=lambda y: y) == COPIED


@pytest.mark.costly
def test_all_hidden_states_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(Stack):
        def forward(self, x: Tensor) -> Any:
            states = [x]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return {"states": tuple(states), "count": torch.full((), float(len(self.layers)))}

    for kind in (Layer, EmptyCast):
        model = lambda kind=kind: Hidden(*(kind(index) for index in range(LAYERS)))  # noqa: E731
        check(model, monkeypatch, loss_fn=lambda out: sum(state.mean() for state in out["states"]) * out["count"])


@pytest.mark.costly
def test_what_is_written_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(Stack):
        def forward(self, x: Tensor) -> Any:
            total = torch.zeros_like(x)
            for layer in self.layers:
                x = layer(x)
                x[..., 0] += 1
                total += x.view(x.shape)
            return self.head(total)

    assert check(lambda: Writes(*(Layer(index) for index in range(LAYERS))), monkeypatch) == COPIED


@pytest.mark.costly
def test_layers_that_return_views_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class View(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.transpose(1, 2)

    class Writes(Stack):
        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                before = x + 1
                x, view = layer(before)
                view.mul_(2)
                x = x + before
            return self.head(x)

    assert check(lambda: Writes(*(View(index) for index in range(LAYERS))), monkeypatch) == COPIED


def test_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if mask is None else x * mask)

    class Some(Stack):
        def forward(self, x: Tensor) -> Any:
            mask = (x > 0).float()
            for index, layer in enumerate(self.layers):
                x = layer(x, mask if index in (2, 5, 6, 7) else None)
            return self.head(x)

    assert check(lambda: Some(*(Masked(index) for index in range(LAYERS))), monkeypatch) > 0


@pytest.mark.costly
@pytest.mark.parametrize("outside", [False, True])
def test_modes_of_the_model(outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.relu:
                SEEN.append(func)
                return result * (len(SEEN) if outside else 2)
            return result

    class Within(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with Doubles():
                return super().forward(x)

    class Around(Stack):
        def forward(self, x: Tensor) -> Any:
            with Doubles():
                return super().forward(x)

    if outside:
        assert check(lambda: Around(*(Layer(index) for index in range(LAYERS))), monkeypatch) == 0
    else:
        assert check(stack(Within), monkeypatch) == COPIED


def test_state_of_torch_that_no_call_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Casts(Layer):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64 if self.index == 4 else torch.float32)
            try:
                return super().forward(x) + torch.ones(8).to(x.dtype)
            finally:
                torch.set_default_dtype(torch.float32)

    assert check(stack(Casts), monkeypatch) == 0


@pytest.mark.costly
def test_dropout_is_numbered_as_in_a_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drops(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(super().forward(x))

    assert check(stack(Drops), monkeypatch) == COPIED


def test_layers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return Stack(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(LAYERS)))

    assert check(model, monkeypatch) == COPIED


def test_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(stack(Layer), monkeypatch, loss_fn=None, mode="infer") == COPIED


def test_errors_are_those_of_a_whole_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 7) if self.index == 5 else super().forward(x)

    with pytest.raises(GraphparError, match=r"could not trace the model in Fails 'layers\.5'"):
        capture(source(stack(Fails)))
