"""The same loss and gradients: an exported program, after every pass and a microbatch at a time, against the eager model.

Everything runs in one process, on the interpreter of ``Program.run``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import graphpar as gp
from graphpar.capture import own_loss
from graphpar.program import Program

LossFn = Callable[..., Tensor]


@dataclass
class Result:
    """A loss, and the gradients and buffers that its backward left, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass
class Case:
    """A model and its examples; ``rows`` may have more rows than the examples that are traced."""

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


def eager(case: Case) -> Result:
    """The case's own model on the whole batch."""
    model = copy.deepcopy(case.model)
    leaves, spec = tree_flatten((tuple(case.args), dict(case.kwargs), tuple(case.targets)))
    args, kwargs, targets = tree_unflatten(
        [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )
    output = model(*args, **kwargs)
    loss = case.loss_fn(output, *targets) if case.loss_fn is not None else own_loss(output)
    assert loss is not None
    loss = loss.reshape(())
    if loss.requires_grad:
        loss.backward()
    return _result(model, loss.detach())


def _result(model: nn.Module, loss: Tensor) -> Result:
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return Result(loss, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()})


def run(program: Program, case: Case, parts: Sequence[int] | None = None, keys: Tensor | None = None) -> Result:
    """``program`` on the case's batch, cut into microbatches of ``parts`` rows; shares and gradients add up."""
    model = copy.deepcopy(case.model)
    state: dict[str, Tensor] = {**program.constants}
    state.update(model.named_buffers(remove_duplicate=False))
    state.update(model.named_parameters(remove_duplicate=False))
    inputs = inputs_of(program, case, keys)
    rows = next(inputs[e.name].shape[e.batch_dim] for e in program.inputs if e.batch_dim is not None)
    microbatches = cut(program, inputs, parts or [rows])
    counts = global_counts(program, state, microbatches, parts or [rows])
    total = torch.zeros(())
    for size, microbatch in zip(parts or [rows], microbatches):
        (share,) = program.at_batch(size).run(state, {**microbatch, **counts})
        assert share.shape == ()
        if share.requires_grad:
            share.backward()
        total = total + share.detach()
    return _result(model, total)


def inputs_of(program: Program, case: Case, keys: Tensor | None = None) -> dict[str, Tensor]:
    described = [entry for entry in program.inputs if entry.role != "sample_keys"]
    inputs = {entry.name: leaf.clone() for entry, leaf in zip(described, case.leaves(), strict=True)}
    if len(described) < len(program.inputs):
        rows = next(inputs[e.name].shape[e.batch_dim] for e in described if e.batch_dim is not None)
        inputs["sample_keys"] = torch.arange(rows) * 7919 if keys is None else keys
    return inputs


def cut(program: Program, inputs: Mapping[str, Tensor], parts: Sequence[int]) -> list[dict[str, Tensor]]:
    dims = {entry.name: entry.batch_dim for entry in program.inputs}
    pieces: dict[str, Sequence[Tensor]] = {}
    for name, value in inputs.items():
        dim = dims[name]
        pieces[name] = [value.clone() for _ in parts] if dim is None else value.split(list(parts), dim)
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(len(parts))]


def global_counts(
    program: Program, state: Mapping[str, Tensor], microbatches: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """The denominators of the whole batch: each microbatch's, added up."""
    if program.counts is None:
        return {}
    shares = []
    for size, microbatch in zip(sizes, microbatches):
        sized = program.at_batch(size)
        assert sized.counts is not None and sized.count_names == program.count_names
        shares.append(sized.with_graph(sized.counts).run(state, microbatch))
    return {name: sum(values[1:], values[0]) for name, values in zip(program.count_names, zip(*shares))}


def assert_same(found: Result, expected: Result, rtol: float = 1e-5, atol: float = 2e-6, what: str = "") -> None:
    torch.testing.assert_close(
        found.loss.double(), expected.loss.double(), rtol=rtol, atol=atol, msg=lambda m: f"loss {what}: {m}"
    )
    largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=1.0)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(
            found.gradients[name],
            gradient,
            rtol=rtol * 10,
            atol=max(atol, atol * largest),
            msg=lambda m, name=name: f"gradient of {name} {what}: {m}",
        )


def assert_exact(
    case: Case, *cuts: Sequence[int], stages: bool = True, tolerance: float = 1e-5, keys: Tensor | None = None
) -> Program:
    """The whole claim: after every pass, and for every cut of the batch, loss and gradients are the eager model's.

    ``stages``: compare after each pass; not for models with dropout, whose masks are the program's own.
    """
    expected = eager(case) if stages else None
    steps: list[tuple[str, Program]] = []
    program = case.export(after_pass=lambda row, result: steps.append((row.name, result)))
    if expected is not None:
        for name, step in steps:
            found = run(step, case)
            assert_same(found, expected, tolerance, tolerance / 5, f"after {name}")
            for buffer, value in expected.buffers.items():
                torch.testing.assert_close(
                    found.buffers[buffer], value, msg=lambda m, buffer=buffer, name=name: f"{buffer} after {name}: {m}"
                )
    assert not program.couplings, program.couplings
    assert program.unsplittable is None, program.unsplittable
    whole = run(program, case, keys=keys)
    for parts in cuts:
        assert_same(run(program, case, parts, keys), whole, tolerance, tolerance / 5, f"in microbatches of {parts}")
    return program
