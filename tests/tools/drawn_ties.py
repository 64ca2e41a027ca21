"""Random programs whose parameters are used in more than one place, or not trained: what ``tests/end_to_end/test_ties.py`` verifies.

A few layers of attention and two products between an embedding and a head, in float64. Drawn are: parameters tied inside of an
instance (of the first, the last, some or all), between instances, and of a block with the root; whole modules that are shared; weights
used transposed; parameters of a block used again by the root or in a penalty; what is frozen; and the mesh.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp

WIDTH, HEADS, VOCAB, LENGTH, ROWS = 16, 4, 16, 4, 4
MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2}, {"pp": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2},
)  # fmt: skip


class Layer(nn.Module):
    """Attention and two products; ``transposed``: the second product's weight is the first one's."""

    def __init__(self, bias: bool, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.n, self.q, self.k, self.v, self.o = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, WIDTH, bias) for _ in range(4)),
        )
        self.m, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH, bias),
            nn.Linear(2 * WIDTH, WIDTH, bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = torch.tanh(self.up(self.m(x)))
        return x + (F.linear(h, self.up.weight.t(), self.down.bias) if self.transposed else self.down(h))


class Model(nn.Module):
    """The drawn model; ``again`` are uses of parameters by the root after the layers, ``penalised`` names in the loss."""

    def __init__(self, count: int, bias: bool, transposed: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(bias, transposed) for _ in range(count))
        self.again: list[tuple[str, str]] = []
        self.penalised: list[str] = []

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        for how, name in self.again:
            parameter = self.get_parameter(name)
            if how == "add":
                x = x + parameter
            elif how == "scale":
                x = x * parameter
            else:
                x = x + F.linear(x, parameter.t() if how == "transposed" else parameter)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        for name in self.penalised:
            loss = loss + 0.01 * self.get_parameter(name).square().sum()
        return loss


@dataclass
class Drawn:
    """One random program."""

    seed: int
    mesh: dict[str, int]
    model: nn.Module
    told: list[str] = field(default_factory=list)
    """What was drawn, in words."""

    def __str__(self) -> str:
        return f"seed {self.seed} on {self.mesh}: {'; '.join(self.told)}"

    def compile(self) -> gp.Parts:
        """The program, cut over its mesh, in two microbatches where it is a pipeline."""
        numbers = torch.Generator().manual_seed(self.seed)
        ids, labels = (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=numbers) for _ in range(2))
        program = gp.export(self.model, (ids, labels))
        size = {"microbatch_size": ROWS // self.mesh.get("dp_replicate", 1) // 2} if "pp" in self.mesh else {}
        return gp.partition(program, gp.plan(program, mesh=self.mesh, **size))


def draw(seed: int, mesh: dict[str, int] | None = None) -> Drawn:
    """The program of a seed: one to four things done to the plain model."""
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(numbers.choice([2, 3, 3, 4]), numbers.random() < 0.7, numbers.random() < 0.2).double()
    with torch.no_grad():  # norms and biases that are not all ones and zeros
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    drawn = Drawn(seed, mesh or MESHES[seed % len(MESHES)], model)
    actions = numbers.sample(_ACTIONS, numbers.choice([1, 1, 2, 2, 3, 4]))
    for action in sorted(actions, key=_ACTIONS.index):
        drawn.told += action(model, numbers)
    if not any(parameter.requires_grad for parameter in model.layers.parameters()):
        model.layers[0].q.weight.requires_grad_()
    return drawn


# ---- what is done to a model ---------------------------------------------------------------------------------------


def tie(model: Model, kept: str, other: str) -> str:
    """The parameter ``kept`` under the name ``other`` as well."""
    owner, _, leaf = other.rpartition(".")
    setattr(model.get_submodule(owner), leaf, model.get_parameter(kept))
    return f"{other} = {kept}"


def _names(model: nn.Module, *, ndim: int | None = None, shape: torch.Size | None = None) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ndim in (None, parameter.ndim) and shape in (None, parameter.shape)
    ]


def _pair(layer: nn.Module, numbers: random.Random) -> tuple[str, str]:
    """Two parameters of a layer that have one shape."""
    first = numbers.choice(
        [name for name in _names(layer) if len(_names(layer, shape=layer.get_parameter(name).shape)) > 1]
    )
    return first, numbers.choice(
        [name for name in _names(layer, shape=layer.get_parameter(first).shape) if name != first]
    )


def _tied_inside(model: Model, numbers: random.Random) -> Iterator[str]:
    """The same tie in the first instance, the last, every other one or all."""
    count = len(model.layers)
    chosen = numbers.choice([[0], [count - 1], list(range(0, count, 2)), list(range(1, count, 2)), list(range(count))])
    kept, other = _pair(model.layers[0], numbers)
    return (tie(model, f"layers.{i}.{kept}", f"layers.{i}.{other}") for i in chosen)


def _tied_between(model: Model, numbers: random.Random) -> Iterator[str]:
    """Parameters of two instances: of one name, or of two."""
    first, second = numbers.sample(range(len(model.layers)), 2)
    kept, other = _pair(model.layers[0], numbers)
    other = kept if numbers.random() < 0.3 else other
    yield tie(model, f"layers.{first}.{kept}", f"layers.{second}.{other}")


def _tied_everywhere(model: Model, numbers: random.Random) -> Iterator[str]:
    """One parameter for all instances."""
    name = numbers.choice(_names(model.layers[0]))
    return (tie(model, f"layers.0.{name}", f"layers.{i}.{name}") for i in range(1, len(model.layers)))


def _tied_to_root(model: Model, numbers: random.Random) -> Iterator[str]:
    root = numbers.choice(["embed.weight", "head.weight", "head.bias", "norm.weight", "norm.bias"])
    names = [name for name in _names(model, shape=model.get_parameter(root).shape) if name.startswith("layers.")]
    kept = numbers.choice(names)
    yield tie(model, kept, root) if numbers.random() < 0.5 else tie(model, root, kept)


def _tied_table(model: Model, numbers: random.Random) -> Iterator[str]:
    yield tie(model, "embed.weight", "head.weight")


def _shared_module(model: Model, numbers: random.Random) -> Iterator[str]:
    """A module under two names, or a whole layer twice."""
    first, second = numbers.sample(range(len(model.layers)), 2)
    name = numbers.choice(["q", "o", "n", "up", ""])
    if name:
        setattr(model.layers[second], name, getattr(model.layers[first], name))
    elif len(model.layers) > 2:  # of two, nothing would be left to cut between
        model.layers[second] = model.layers[first]
    yield f"layers.{second}{'.' if name else ''}{name} is that of layers.{first}"


def _used_again(model: Model, numbers: random.Random) -> Iterator[str]:
    """By the root, after the layers."""
    layer = f"layers.{numbers.randrange(len(model.layers))}"
    names = [name for name in _names(model) if name.startswith(layer) and model.get_parameter(name).shape[-1] == WIDTH]
    name = numbers.choice(names)
    if model.get_parameter(name).ndim == 1:
        how = numbers.choice(["add", "scale"])
    else:
        square = model.get_parameter(name).shape[0] == WIDTH
        how, name = (numbers.choice(["plain", "transposed"]), name) if square else ("plain", f"{layer}.q.weight")
    model.again.append((how, name))
    yield f"{name} again: {how}"


def _penalised(model: Model, numbers: random.Random) -> Iterator[str]:
    every = [name for name, _ in model.named_parameters()]
    kind = numbers.choice(["all", "weights", "one", "some"])
    chosen = {
        "all": every,
        "weights": [name for name in every if model.get_parameter(name).ndim > 1],
        "one": [numbers.choice(every)],
        "some": numbers.sample(every, min(3, len(every))),
    }[kind]
    model.penalised += chosen
    yield f"a penalty on {kind}{': ' + ', '.join(chosen) if kind in ('one', 'some') else ''}"


def _frozen(model: Model, numbers: random.Random) -> Iterator[str]:
    kind = numbers.choice(
        ["all but a layer", "all but a weight", "first layers", "last layers", "biases", "root", "some"]
    )
    layer = f"layers.{numbers.randrange(len(model.layers))}."
    at = numbers.randrange(1, len(model.layers))
    some = set(numbers.sample(_names(model), 6))
    trained = f"{layer}{numbers.choice(['q.weight', 'down.weight', 'n.weight'])}"
    test: Callable[[str, nn.Parameter], bool] = {
        "all but a layer": lambda name, _: not name.startswith(layer),
        "all but a weight": lambda name, _: name != trained,
        "first layers": lambda name, _: name.startswith(("embed", *(f"layers.{i}." for i in range(at)))),
        "last layers": lambda name, _: name.startswith(
            ("head", "norm", *(f"layers.{i}." for i in range(at, len(model.layers))))
        ),
        "biases": lambda name, parameter: name.endswith("bias"),
        "root": lambda name, _: not name.startswith("layers."),
        "some": lambda name, _: name in some,
    }[kind]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not test(name, parameter))
    yield f"frozen: {kind} ({trained if kind == 'all but a weight' else at if 'layers' in kind else layer})"


_ACTIONS: list[Any] = [
    _shared_module, _tied_everywhere, _tied_inside, _tied_between, _tied_to_root, _tied_table, _used_again, _penalised, _frozen,
]  # fmt: skip
