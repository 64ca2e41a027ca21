"""The same loss and gradients: an exported program, after every pass, a microbatch at a time and a stage at a time.

Everything runs in one process, on the interpreter of ``Program.run``; the eager model is what it is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import graphpar as gp
from graphpar.frontend.signature import own_loss
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied

LossFn = Callable[..., Any]
STEP_KEY = torch.tensor([4242])
"""The key of what is drawn once for all examples."""


@dataclass
class Result:
    """A loss, and the gradients and buffers that it leaves, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass
class Case:
    """A model and its global batch."""

    model: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: LossFn | None = None
    targets: Sequence[Any] = ()
    batch_dims: Mapping[str, int | None] | None = None

    def export(self, **options: Any) -> Program:
        return gp.export(self.model, self.args, self.kwargs, self.loss_fn, self.targets, self.batch_dims, **options)

    def leaves(self) -> list[Tensor]:
        flat = tree_leaves((tuple(self.args), dict(self.kwargs), tuple(self.targets)))
        return [leaf for leaf in flat if isinstance(leaf, Tensor)]


class Still(nn.Sequential):
    """Modules that stay in evaluation mode."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.eval()

    def train(self, mode: bool = True) -> Still:
        """Stay as they are."""
        return super().train(False)


def eager(case: Case) -> Result:
    """The case's own model on the whole batch."""
    model = copy.deepcopy(case.model).train()
    leaves, spec = tree_flatten((tuple(case.args), dict(case.kwargs), tuple(case.targets)))
    args, kwargs, targets = tree_unflatten(
        [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )
    output = model(*args, **kwargs)
    loss = case.loss_fn(output, *targets) if case.loss_fn is not None else own_loss(output)
    assert loss is not None
    loss = loss.reshape(())
    loss.backward()
    return _result(model, loss.detach())


def _result(model: nn.Module, loss: Tensor) -> Result:
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return Result(loss, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()})


def run(
    program: Program,
    case: Case,
    parts: Sequence[int] = (),
    keys: Tensor | None = None,
    stages: Sequence[Stage] = (),
) -> Result:
    """``program`` on the case's batch in microbatches of ``parts`` rows (or whole); shares and gradients add up."""
    model = copy.deepcopy(case.model)
    state: dict[str, Tensor] = {**program.constants}
    state.update(model.named_buffers(remove_duplicate=False))
    state.update(model.named_parameters(remove_duplicate=False))
    inputs = inputs_of(program, case, keys)
    rows = next(inputs[entry.name].shape[entry.batch_dim] for entry in program.inputs if entry.batch_dim is not None)
    sizes = list(parts) or [rows]
    microbatches = cut(program, inputs, sizes)
    counts = global_counts(program, state, microbatches, sizes)
    total = torch.zeros(())
    for size, microbatch in zip(sizes, microbatches, strict=True):
        values = {**microbatch, **counts}
        share = run_stages(program, stages, state, values) if stages else program.at_batch(size).run(state, values)[0]
        assert share.shape == ()
        if share.requires_grad:
            share.backward()
        total = total + share.detach()
    return _result(model, total)


def run_stages(
    program: Program, stages: Sequence[Stage], state: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Tensor:
    """The loss, from one stage after the other; each gets what the one before sends, and its own inputs."""
    sent: tuple[Any, ...] = ()
    for stage in stages:
        received = {boundary.name: value for boundary, value in zip(stage.receives, sent, strict=True)}
        given = {**{name: values[name] for name in (*stage.inputs, *stage.counts)}, **received}
        result = program.with_graph(stage.graph).run(state, given)
        sent = result if isinstance(result, tuple) else (result,)
    (loss,) = sent
    assert isinstance(loss, Tensor)
    return loss


def inputs_of(program: Program, case: Case, keys: Tensor | None = None) -> dict[str, Tensor]:
    described = [entry for entry in program.inputs if entry.role != "sample_keys"]
    inputs = {entry.name: leaf.clone() for entry, leaf in zip(described, case.leaves(), strict=True)}
    rows = next(inputs[entry.name].shape[entry.batch_dim] for entry in described if entry.batch_dim is not None)
    drawn = {"sample_keys": torch.arange(rows) * 7919 if keys is None else keys, "step_key": STEP_KEY}
    return inputs | {entry.name: drawn[entry.name] for entry in program.inputs if entry.role == "sample_keys"}


def cut(program: Program, inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    dims = {entry.name: entry.batch_dim for entry in program.inputs}
    pieces: dict[str, Sequence[Tensor]] = {}
    for name, value in inputs.items():
        dim = dims[name]
        pieces[name] = [value.clone() for _ in sizes] if dim is None else value.split(list(sizes), dim)
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(len(sizes))]


def global_counts(
    program: Program, state: Mapping[str, Tensor], microbatches: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """The denominators of the whole batch: each microbatch's, added up."""
    if program.counts is None:
        return {}
    shares = []
    for size, microbatch in zip(sizes, microbatches, strict=True):
        sized = program.at_batch(size)
        assert sized.counts is not None and sized.count_names == program.count_names
        shares.append(sized.with_graph(sized.counts).run(state, microbatch))
    return {name: sum(values[1:], values[0]) for name, values in zip(program.count_names, zip(*shares), strict=True)}


def assert_same(found: Result, expected: Result, tolerance: float = 1e-5, what: str = "") -> None:
    """Loss and every gradient within ``tolerance``, relative to the largest gradient."""
    near(found.loss, expected.loss, tolerance, f"loss {what}")
    largest = max(
        (float(gradient.abs().max()) for gradient in expected.gradients.values() if gradient.numel()), default=1.0
    )
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        near(found.gradients[name], gradient, tolerance, f"gradient of {name} {what}", max(largest, 1e-3))


def near(found: Tensor, expected: Tensor, tolerance: float, what: str, scale: float = 1.0) -> None:
    __tracebackhide__ = True
    first, second = found.double(), expected.double()
    allowed = tolerance * (scale + second.abs())
    if not bool(((first - second).abs() <= allowed).all()):
        pytest.fail(
            f"{what}: off by {float((first - second).abs().max()):.3g}, {found.flatten()[:4]} for {expected.flatten()[:4]}"
        )


def _unchecked(program: Program) -> Program:
    """The program without what torch asserts of its trace, such as that a mask chooses a row at least."""
    graph = copied(program.graph)
    for node in reversed(graph.nodes):
        if record_of(node).kind is Kind.CHECK:
            graph.erase_node(node)
    return program.with_graph(graph)


def assert_exact(case: Case, *cuts: Sequence[int], stages: bool = True, tolerance: float = 1e-5) -> Program:
    """The whole claim: after every pass, and for every cut of the batch, loss and gradients are the eager model's.

    ``stages``: compare after each pass; not for models with dropout, whose masks are the program's own.
    """
    steps: list[tuple[str, Program]] = []
    program = case.export(after_pass=lambda row, result: steps.append((row.name, result)))
    if stages:
        expected = eager(case)
        previous: Program | None = None
        for name, step in steps:
            if previous is not None and step.graph is previous.graph:
                continue
            previous = step
            found = run(_unchecked(step), case)
            assert_same(found, expected, tolerance, f"after {name}")
            for buffer, value in expected.buffers.items():
                near(found.buffers[buffer], value, tolerance, f"buffer {buffer} after {name}")
    assert not program.couplings, program.couplings
    assert program.unsplittable is None, program.unsplittable
    whole = run(program, case)
    for parts in cuts:
        assert_same(run(program, case, parts), whole, tolerance, f"in microbatches of {list(parts)}")
    return program


def refusal(program: Program) -> str:
    """Why the batch can't be cut; empty where it can."""
    return "; ".join([*map(str, program.couplings), *([program.unsplittable] if program.unsplittable else [])])
