"""Every combination of the choices that sharded optimizer state has on eight ranks, against training on one device.

How many ranks share the state {8, 1, 4}, whether new values travel during the forward, whether gradients are summed during the backward,
microbatches {1, 2, 4}, one group of parameters or two with other learning rates, fp32 or bf16: 144.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

import graphpar as gp
from tests.tools.rank_pool import RankPool

RANKS, ROWS, WIDTH, STEPS, MOMENTUM = 8, 32, 16, 2, 0.9
RATES = {1: (0.1, 0.1), 2: (0.1, 0.02)}  # of matrices, and of vectors
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
MESHES = {8: {"dp_shard": 8}, 1: {"dp_replicate": 8}, 4: {"dp_replicate": 2, "dp_shard": 4}}


@dataclass(frozen=True)
class Choice:
    """One combination; ``shared`` is the number of ranks that share the state."""

    shared: int
    values_overlap: bool
    gradients_overlap: bool
    microbatches: int
    groups: int
    dtype: str


CHOICES = [
    Choice(*each) for each in itertools.product(MESHES, (True, False), (True, False), (1, 2, 4), RATES, TOLERANCE)
]


class Layers(nn.Module):
    """Six layers of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [WIDTH, 17, 23, WIDTH, 5, 31, 3]
        self.layers = nn.ModuleList(nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, wanted)


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "wanted": torch.randn(ROWS, 3, generator=generator)}


def optimizer_of(named: list[tuple[str, nn.Parameter]], groups: int) -> torch.optim.Optimizer:
    """Make SGD with a learning rate for matrices and one for vectors, by name; a rank may have none of either."""
    kinds = [
        [p for name, p in named if name.endswith(end) or (not name and end == "weight")] for end in ("weight", "bias")
    ]
    listed = [{"params": kind, "lr": rate} for kind, rate in zip(kinds, RATES[groups]) if kind]
    return torch.optim.SGD(listed, momentum=MOMENTUM)


@functools.cache
def expected(groups: int, dtype: str) -> dict[str, Tensor]:
    """Train on one device; in bf16 with a copy of the parameters in bf16, as main weights have it."""
    model = Layers()
    optimizer = optimizer_of(list(model.named_parameters()), groups)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        x, wanted = batch_of(step).values()
        if dtype == "bf16":
            read = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
            output = functional_call(model, read, (x.to(torch.bfloat16),)).float()
        else:
            output = model(x)
        loss = loss_fn(output, wanted)
        loss.backward()
        found[f"loss/{step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"gradient/{step}/{name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"parameter/{name}": value.detach() for name, value in model.named_parameters()}


def run(pool: RankPool, wanted: list[Choice], timeout_s: float = 900) -> dict[Choice, float]:
    """Train every choice; return its largest relative error, over all ranks."""
    errors: dict[Choice, float] = {}
    with tempfile.TemporaryDirectory(prefix="graphpar_product_") as scratch:
        root, jobs = Path(scratch), []
        batch = batch_of(-1)
        for number, each in enumerate(wanted):
            folder = root / f"{each.shared}_{each.microbatches}_{each.dtype}"
            if not folder.exists():
                program = gp.export(
                    Layers(), (batch["x"],), loss_fn=loss_fn, targets=(batch["wanted"],), dtype=each.dtype
                )
                size = ROWS // RANKS // each.microbatches
                pins: dict[str, Any] = {"mesh": MESHES[each.shared], "microbatch_size": size}
                plan = gp.plan(program, **pins, zero=1 if each.shared > 1 else None)
                gp.partition(program, plan).save(folder, weights=Layers().state_dict())
            values = root / f"{each.groups}_{each.dtype}.safetensors"
            if not values.exists():
                save_file({name: value.clone() for name, value in expected(each.groups, each.dtype).items()}, values)
            jobs.append({**vars(each), "program": str(folder), "expected": str(values), "number": number})
        jobs.sort(key=lambda job: job["program"])
        (root / "jobs.json").write_text(json.dumps(jobs))
        pool.torchrun(Path(__file__), [str(root / "jobs.json")], nproc=RANKS, timeout_s=timeout_s)
        reports = [json.loads((root / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
        for number, each in enumerate(wanted):
            errors[each] = max(report[str(number)] for report in reports)
    return errors


def main() -> None:
    """Run the jobs of a file on one rank."""
    from graphpar.runtime import Pipeline, start

    jobs = Path(sys.argv[1])
    found: dict[int, float] = {}
    with start(120.0) as ranks:
        for program, listed in itertools.groupby(json.loads(jobs.read_text()), key=lambda job: job["program"]):
            with Pipeline(program, ranks.device) as pipeline:
                for job in listed:
                    found[job["number"]] = _trained(pipeline, job, jobs.parent)
        (jobs.parent / f"rank_{ranks.rank}.json").write_text(json.dumps(found))


def _trained(pipeline: Any, job: dict[str, Any], folder: Path) -> float:
    values, found = load_file(job["expected"]), {}
    pipeline.load_weights()
    optimizer = optimizer_of(list(pipeline.named_parameters()), job["groups"])
    take = type(pipeline._gradients).take
    if not job["gradients_overlap"]:  # nothing arrives early, so that all sums start when the step ends
        pipeline._gradients.take = lambda *args: (
            take(pipeline._gradients, *args),
            pipeline._gradients._to_come.clear(),
        )
    for step in range(STEPS):
        found[f"loss/{step}"] = pipeline.step(batch_of(step), step=step)
        found |= {f"gradient/{step}/{name}": value.clone() for name, value in pipeline.whole_gradients().items()}
        optimizer.step()
        pipeline.zero_grad()
        if not job["values_overlap"]:
            pipeline.synchronize()
    vars(pipeline._gradients).pop("take", None)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.save_weights(folder / "saved.safetensors")
    pipeline.load_weights(folder / "saved.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())
    found |= {f"parameter/{name}": value for name, value in state.items()}
    largest = {
        kind: max(float(v.abs().max()) for n, v in values.items() if n.startswith(kind)) for kind in ("g", "p", "l")
    }
    scales = {name: max(float(value.abs().max()), 0.1 * largest[name[0]]) for name, value in values.items()}
    return max(float((found[name] - value).abs().max()) / scales[name] for name, value in values.items())


if __name__ == "__main__":
    main()
