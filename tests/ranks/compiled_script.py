"""One rank of programs that run with and without ``torch.compile``, one after the other.

As a script (under torchrun): FOLDER BACKEND; FOLDER has a folder for each model, with ``weights.safetensors``, ``batch.safetensors`` and
its programs. Each rank writes ``rank_N.json`` into it: of each program by how much losses, gradients and parameters differ between
both, how many graphs there are after each step, and how many kinds of blocks. The program ``hooked`` gets hooks after its first step.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from graphpar.runtime import Pipeline, start
from graphpar.runtime.distributed import Ranks
from graphpar.runtime.stages.compiled import _functions, blocks
from graphpar.runtime.state.fully_sharded import local
from graphpar.verification.comparison import relative_error

STEPS = 3


@dataclass
class Trained:
    """What a program did: losses (the last of a forward without gradients), gradients of each step, parameters in the end, and graphs after
    each step."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)
    kinds: int = 0


def trained(program: Path, ranks: Ranks, compile: bool | str) -> Trained:
    found = Trained()
    with Pipeline(program, ranks.device, compile=compile) as pipeline:
        pipeline.load_weights(program.parent / "weights.safetensors")
        batch = load_file(program.parent / "batch.safetensors")
        kinds = {
            (type(block), _repetition(block)) for stage in pipeline.stages for block in blocks(stage, pipeline.package)
        }
        called = {each for stage in pipeline.stages for each in _compiled_functions(stage, pipeline.package)}
        found.kinds = len(kinds) + len(called)
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.1)
        for step in range(STEPS):
            if step == 1 and program.name == "hooked":
                _hook(pipeline.stages[0])
            loss = pipeline.step(batch, step=step, broadcast_loss=True)
            assert loss is not None
            found.losses.append(float(loss))
            gradients = pipeline.whole_gradients().items()
            found.gradients |= {f"{step} {name}": local(value).detach().clone() for name, value in gradients}
            optimizer.step()
            pipeline.zero_grad()
            found.graphs.append(counters["stats"]["unique_graphs"])
        found.losses += [float(value) for value in (pipeline.infer(batch, step=STEPS) or {}).values()]
        state = pipeline.state_dict().items()
        found.parameters = {name: local(value).detach().clone() for name, value in state}
    return found


def _compiled_functions(stage: nn.Module, package: str) -> list[Any]:
    """What is compiled of the stage outside of its blocks: statements between them, and functions that are called elsewhere."""
    forward = getattr(stage.forward, "func", stage.forward)
    parts = [cell.cell_contents for cell in forward.__closure__ or ()]
    names = forward.__code__.co_names
    return [*parts, *(each for name, each in _functions(stage, package).items() if name in names)]


def _repetition(block: nn.Module) -> Any:
    """What a block is compiled with that keeps results of single operators, which others of its class may keep not, or others."""
    repeated = isinstance(block.forward, functools.partial) and block.forward.func is not checkpoint
    return block.forward.func if repeated else None  # type: ignore[attr-defined]


def _hook(stage: nn.Module) -> None:
    """Hook a layer inside of the first block, whose hook no other block has, and the block itself."""
    block = next(iter(blocks(stage, type(stage).__module__.rpartition(".")[0])))
    inner = next(module for module in block.modules() if isinstance(module, nn.Linear))
    inner.register_forward_hook(lambda module, args, output: output * 0.9)
    block.register_forward_hook(lambda module, args, output: output * 1.1)
    next(inner.parameters()).register_hook(lambda gradient: gradient * 0.5)


def compared(plain: Trained, compiled: Trained) -> dict[str, Any]:
    largest = max((float(value.abs().max()) for value in plain.gradients.values() if value.numel()), default=0.0)
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(plain.losses, compiled.losses, strict=True)),
        "gradient": _worst(plain.gradients, compiled.gradients, largest),
        "parameter": _worst(plain.parameters, compiled.parameters, 1.0),
        "gradients": plain.gradients.keys() == compiled.gradients.keys(),
        "graphs": compiled.graphs,
        "kinds": compiled.kinds,
        "breaks": sum(counters["graph_break"].values()),
    }


def _worst(expected: dict[str, Tensor], found: dict[str, Tensor], largest: float) -> float:
    return max((relative_error(value, found[name], largest) for name, value in expected.items()), default=0.0)


def main(folder: str, backend: str) -> None:
    seen: dict[str, Any] = {}
    with start(600) as ranks:
        for program in sorted(path.parent for path in Path(folder).glob("*/*/plan.json")):
            plain = trained(program, ranks, False)
            torch._dynamo.reset()
            counters.clear()
            seen[f"{program.parent.name} {program.name}"] = compared(plain, trained(program, ranks, backend))
    Path(folder, f"rank_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
