"""A script for ranks: a program with sharded optimizer state, stepped in several ways and compared with an eager loop of its own.

Writes rank_{rank}.json into the folder that it is given: elements held, collectives of a step, the order in which new values are
waited for, and how far each way to step is from the eager loop.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from graphpar.runtime import Pipeline, start
from graphpar.runtime.state.zero1 import Unit

LR, STEPS, FROZEN = 0.05, 3, ("layers.1.", "scale")
_WIRE = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),  # as torch 2.13 calls it, and before
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "reduce": ("reduce",),
    "broadcast": ("broadcast",),
}

PLANTED = '''

_named = optimizer_units


def optimizer_units(stage):
    """A fault in the runtime, for this program alone."""
    import time

    from graphpar.runtime.state.zero1 import Unit

    original, inside = Unit.{method}, set(stage.modules())

    def planted(self, *args):
        if self.modules[0] not in inside:
            return original(self, *args)
        {body}

    Unit.{method} = planted
    return _named(stage)
'''


def batch_of(step: int, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def eager(model: nn.Module, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Train on one device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        x, y = batch_of(step, shapes).values()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def usual(pipeline: Pipeline) -> Callable[[], None]:
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR)

    def update() -> None:
        optimizer.step()
        pipeline.zero_grad()

    return update


def two_optimizers(pipeline: Pipeline) -> Callable[[], None]:
    parameters = list(pipeline.parameters())
    parts = [[p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]]
    optimizers = [torch.optim.SGD(part, lr=LR) for part in parts if part]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


def by_hand(pipeline: Pipeline) -> Callable[[], None]:
    def update() -> None:
        for parameter in pipeline.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-LR)
                parameter.grad = None

    return update


def some_frozen(pipeline: Pipeline) -> Callable[[], None]:
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return usual(pipeline)


def unseen(pipeline: Pipeline) -> Callable[[], None]:
    """Torch counts no change of a tensor."""

    def update() -> None:
        for parameter in pipeline.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-LR)
                parameter.grad.data.zero_()

    return update


def after_sending(pipeline: Pipeline) -> Callable[[], None]:
    def update() -> None:
        gradients = [(parameter, parameter.grad) for parameter in pipeline.parameters()]
        pipeline.zero_grad()
        pipeline.synchronize()
        for parameter, gradient in gradients:
            if gradient is not None:
                parameter.data.add_(gradient, alpha=-LR)
        pipeline.synchronize()

    return update


def read_at_once(pipeline: Pipeline) -> Callable[[], None]:
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR)

    def update() -> None:
        optimizer.step()
        pipeline.state_dict()
        optimizer.zero_grad(set_to_none=False)

    return update


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    kept = {}
    for kind, names in _WIRE.items():
        name = next(name for name in names if hasattr(dist, name))
        kept[name] = getattr(dist, name)

        def call(*args: Any, _kind: str = kind, _name: str = name, **kwargs: Any) -> Any:
            counts[_kind] += 1
            return kept[_name](*args, **kwargs)

        setattr(dist, name, call)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


@contextmanager
def watched(pipeline: Pipeline, order: list[str]) -> Iterator[None]:
    stage: Any = pipeline.stages[0]
    blocks = {block: str(i) for i, block in enumerate(stage.layers.values())}
    hooks = []
    for block, name in blocks.items():
        hooks.append(block.register_forward_pre_hook(lambda *_, n=name: order.append(f"enter {n}"), prepend=True))
        hooks.append(block.register_forward_hook(lambda *_, n=name: order.append(f"leave {n}")))
    original = Unit.wait

    def wait(self: Unit) -> None:
        if self.works:
            order.append(f"wait {blocks.get(self.modules[0], 'rest')}")
        original(self)

    Unit.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Unit.wait = original  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def main() -> None:
    from tests.end_to_end.test_zero import Layered

    program, out = Path(sys.argv[1]), Path(sys.argv[2])
    inputs = json.loads((program / "plan.json").read_text())["interface"]["inputs"]
    shapes = {each["name"]: each["shape"] for each in inputs}
    counts: Counter[str] = Counter()
    order: list[str] = []
    differences = {}
    with start(60.0) as ranks:
        for way in (usual, two_optimizers, by_hand, some_frozen, unseen, after_sending, read_at_once):
            model = Layered()
            model.load_state_dict(load_file(program / "weights" / "model.safetensors"))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(way is not some_frozen or not name.startswith(FROZEN))
            expected = eager(model, shapes)
            with Pipeline(program, ranks.device) as pipeline:
                pipeline.load_weights()
                update = way(pipeline)
                for step in range(STEPS):
                    pipeline.step(batch_of(step, shapes))
                    update()
                pipeline.save_weights(out / "saved.safetensors")
                found = pipeline.state_dict()
                differences[way.__name__] = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        pipeline = Pipeline(program, ranks.device)
        pipeline.load_weights()
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR, momentum=0.9)
        for step in range(2):
            with counted(counts) if step else watched(pipeline, []):
                pipeline.step(batch_of(step, shapes))
                optimizer.step()
                pipeline.zero_grad()
        order.append("updated")
        with watched(pipeline, order):
            pipeline.step(batch_of(2, shapes))
        report = {
            "state": sum(value.numel() for state in optimizer.state.values() for value in state.values()),
            "parameters": sum(parameter.numel() for parameter in pipeline.stages[0].parameters()),
            "counts": counts,
            "owners": [len(list(unit._owners())) for unit in pipeline._parameters.units],
            "order": order,
            "differences": differences,
            "saved": str(out / "saved.safetensors"),
        }
        (out / f"rank_{ranks.rank}.json").write_text(json.dumps(report))
        pipeline.close()


if __name__ == "__main__":
    main()
