"""The parity matrix: training with sharded state against training on one device, by an eager loop that knows nothing of graphpar.

    python -m tests.tools.parity [--docs]      run all combinations; --docs: write the table into docs/parity.md

A combination is a model, a ZeRO level, a mesh, a schedule, a prefetch mode, a number of accumulated batches, and whether gradients are
clipped. Each trains three steps of SGD with momentum, with other rows on every rank, in every batch and step; losses, norms of the
gradients and the parameters afterwards are compared.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

import graphpar as gp
from tests.models import architectures
from tests.tools.rank_pool import RankPool

LR, MOMENTUM, STEPS, MAX_NORM = 0.1, 0.9, 3, 0.5
ROWS, TOKENS, WORDS, WIDTH, IGNORED = 16, 12, 64, 32, -100
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
FLOOR = {
    "fp32": 1e-3,
    "bf16": 1e-1,
}  # parameters that are smaller, such as biases that began at 0, are compared with this


# ---- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Four layers; ``kind`` is tied (head and embedding), frozen (a layer and the positions), or shared (a layer used twice)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.tokens.weight
        if kind == "frozen":
            for parameter in [*self.positions.parameters(), *self.layers[1].parameters(), self.layers[2].up.weight]:
                parameter.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        if self.kind == "shared":
            x = self.layers[3](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Mixture(nn.Module):
    """Mixtral, with experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = architectures.build("mixtral")

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not ignored, of which each row has another number."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def build(kind: str) -> nn.Module:
    """Make a model with its initial values."""
    return Mixture() if kind == "moe" else Transformer(kind)


def batch_of(number: int) -> dict[str, Tensor]:
    """Make a global batch."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids, labels = (torch.randint(3, WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    lengths = torch.randint(2, TOKENS + 1, (ROWS,), generator=generator)
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(TOKENS) >= lengths[:, None], IGNORED)}


# ---- combinations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """What is trained how. ``level``: 0, 1 (whole parameters), "1 flat", 2 or 3."""

    model: str
    level: str
    mesh: tuple[tuple[str, int], ...]
    schedule: str | None = None
    prefetch: str | None = None
    accumulated: int = 1
    clipped: bool = False
    dtype: str = "fp32"
    reshard: str | None = None
    whole_sequence: bool = False  # with tp: norms compute on whole sequences
    whole_experts: bool = False  # whole experts on ranks of tp or cp, by a shard plan
    recompute: str | None = None

    @property
    def devices(self) -> int:
        return math.prod(degree for _, degree in self.mesh)

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of ``gp.plan``."""
        replicas = math.prod(degree for axis, degree in self.mesh if axis.startswith("dp_"))
        pins: dict[str, Any] = {"mesh": dict(self.mesh), "microbatch_size": min(2, ROWS // replicas)}
        if dict(self.mesh).get("pp", 1) > 1:
            pins["microbatch_size"] = 1
            pins["schedule"] = self.schedule
        if self.level != "0":
            pins["zero"] = int(self.level[0])
        if self.level.endswith("flat"):
            pins["zero1_by"] = "flat"
        if self.prefetch is not None:
            pins["prefetch"] = self.prefetch
        if self.reshard is not None:
            pins["reshard"] = self.reshard
        if self.recompute is not None:
            pins["recompute"] = self.recompute
        if self.whole_sequence:
            pins["shard_plan"] = {
                "layers.*.norm*": {"inputs": ["I@tp"]},
                "norm": {"inputs": ["I@tp"]},
                "positions": "replicate",
            }
        if self.whole_experts:
            pins["shard_plan"] = {"**.experts": "expert"} if "tp" in dict(self.mesh) else {"**.experts.*": "S(0)@cp"}
        return pins

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={degree}" for axis, degree in self.mesh)
        more = [self.schedule, self.prefetch and f"prefetch {self.prefetch}"]
        more += [f"{self.accumulated} accumulated" if self.accumulated > 1 else None, "clip" if self.clipped else None]
        more += [self.dtype if self.dtype != "fp32" else None, self.recompute and f"recompute {self.recompute}"]
        return ", ".join([self.model, f"zero {self.level}", mesh, *filter(None, more)])


LEVELS = ("0", "1", "1 flat", "2", "3")
MODELS = ("tied", "frozen", "shared", "moe")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
DATA: tuple[dict[str, int], ...] = ({"": 2}, {"": 4}, {"dp_replicate": 2, "": 2})  # the last shards over two of four
WITH: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "pp": 2})


def combinations() -> Iterator[Combination]:
    """Yield the matrix: every level with every mesh, where the other choices take turns so that each meets each level."""
    number = 0
    for level in LEVELS:
        axis = "dp_replicate" if level == "0" else "dp_shard"
        for others in WITH:
            for data in DATA:
                if level == "0" and len(data) > 1:
                    continue
                mesh = {axis if name == "" else name: degree for name, degree in data.items()} | others
                if math.prod(mesh.values()) > 8:
                    continue
                number += 1
                yield Combination(
                    model="moe" if "ep" in others else MODELS[number % 3] if "cp" in others else MODELS[number % 4],
                    level=level,
                    mesh=tuple(mesh.items()),
                    schedule=SCHEDULES[number % len(SCHEDULES)] if "pp" in others else None,
                    prefetch=("pre", "post", "none")[number % 3] if level == "3" and "pp" not in others else None,
                    accumulated=(1, 3)[number % 2],
                    clipped=number % 3 == 0,
                    recompute=(None, "full", "selective", None, "full")[number % 5],
                )
        for schedule in SCHEDULES:
            number += 1
            yield Combination(
                MODELS[number % 4],
                level,
                ((axis, 2), ("pp", 2)),
                schedule,
                accumulated=(3, 1)[number % 2],
                clipped=True,
            )


def in_16_bits() -> Iterator[Combination]:
    """Yield some of the matrix in bf16 over parameters, gradients and optimizer state in fp32."""
    for number, level in enumerate(LEVELS):
        axis = "dp_replicate" if level == "0" else "dp_shard"
        for others in ((), (("pp", 2),), (("tp", 2),)):
            schedule = SCHEDULES[number] if others == (("pp", 2),) else None
            yield Combination(MODELS[number % 3], level, ((axis, 2), *others), schedule, clipped=True, dtype="bf16")


def over_sequences() -> Iterator[Combination]:
    """Yield every level over ranks that divide sequences, without ``dp_shard``: weights are gathered, activations stay divided."""
    meshes = ({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"dp_replicate": 2, "cp": 2})
    for number, (level, mesh) in enumerate(itertools.product(LEVELS[1:], meshes)):
        yield Combination(
            MODELS[number % 3],
            level,
            tuple(mesh.items()),
            schedule=SCHEDULES[number % len(SCHEDULES)] if "pp" in mesh else None,
            prefetch=("pre", "post")[number % 2] if level == "3" and "pp" not in mesh else None,
            accumulated=(1, 3)[number % 2],
            clipped=number % 3 == 0,
            recompute=(None, "full")[number % 2],
        )


def _row(level: str, schedule: str | None = None, model: str = "tied", **mesh: int) -> Combination:
    return Combination(model, level, tuple(mesh.items()), schedule)


TORCHTITAN = {
    "tp2": _row("0", tp=2),
    "tp2 without sequence parallelism": replace(_row("0", tp=2), whole_sequence=True),
    "pp2 1F1B": _row("0", "1F1B", pp=2),
    "dp2 x pp2": _row("3", "1F1B", dp_shard=2, pp=2),
    "tp2 x pp2": _row("0", "1F1B", tp=2, pp=2),
    "dp2 x tp2 x pp2": _row("3", "1F1B", dp_shard=2, tp=2, pp=2),
    "dp2 x tp2 x pp2, interleaved": _row("3", "Interleaved1F1B", dp_shard=2, tp=2, pp=2),
    "dp2 x tp2 x pp2, zero bubble": _row("3", "ZBVZeroBubble", dp_shard=2, tp=2, pp=2),
    "ddp4": _row("0", dp_replicate=4),
    "fsdp4": _row("3", dp_shard=4),
    "hsdp 2x2": _row("3", dp_replicate=2, dp_shard=2),
    "hsdp 2x2 with tp2": _row("3", dp_replicate=2, dp_shard=2, tp=2),
    "hsdp 2x2 with cp2": _row("3", dp_replicate=2, dp_shard=2, cp=2),
    "cp4": _row("0", cp=4),
    "dp2 x cp2, sharded": _row("3", dp_shard=2, cp=2),
    "dp2 x cp2, replicated": _row("0", dp_replicate=2, cp=2),
    "dp2 x tp2 x cp2": _row("3", dp_shard=2, tp=2, cp=2),
    "reshard always": replace(_row("3", "1F1B", dp_shard=2, pp=2), reshard="always"),
    "gradient accumulation": replace(_row("3", dp_shard=2), accumulated=3),
    "experts: dp2 x ep2": _row("3", model="moe", dp_shard=2, ep=2),
    "experts: dp2 x pp2 x ep2": _row("3", "1F1B", "moe", dp_shard=2, pp=2, ep=2),
    "experts: hsdp 2x2 x ep2": _row("3", model="moe", dp_replicate=2, dp_shard=2, ep=2),
    "experts: tp2 x pp2 x ep2": _row("0", "1F1B", "moe", tp=2, pp=2, ep=2),
    "experts: dp2 x tp2 x ep2": _row("3", model="moe", dp_shard=2, tp=2, ep=2),
    "experts over dp4": _row("0", model="moe", dp_expert=4),
    "experts over dp2 of dp2 x dp2": _row("3", model="moe", dp_shard=2, dp_expert=2),
    "experts over dp2 x ep2": _row("0", model="moe", dp_expert=2, ep=2),
    "experts over dp2 x tp2": replace(_row("0", model="moe", dp_expert=2, tp=2), whole_experts=True),
    "experts over dp2 x cp2": replace(_row("0", model="moe", dp_expert=2, cp=2), whole_experts=True),
    "experts over dp2 x tp2, with dp2": replace(
        _row("3", model="moe", dp_shard=2, dp_expert=2, tp=2), whole_experts=True
    ),
    "experts over dp2 x tp2, with pp2": replace(_row("0", "1F1B", "moe", pp=2, dp_expert=2, tp=2), whole_experts=True),
}
"""What torchtitan's integration tests run. It divides experts over ranks of other axes, as the rows "over" do; ep is an axis besides."""


def chosen(seed: int, count: int) -> list[Combination]:
    """Draw some combinations of at most four ranks."""
    few = [each for each in combinations() if each.devices <= 4]
    order = torch.randperm(len(few), generator=torch.Generator().manual_seed(seed)).tolist()
    return [few[i] for i in order[:count]]


# ---- one device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Losses of all batches, norms of all steps, and the parameters afterwards."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


@functools.cache
def eager(model: str, accumulated: int, clipped: bool, dtype: str = "fp32") -> Trained:
    """Train on one device; in bf16 with copies of the parameters, made anew for each batch."""
    module = build(model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(accumulated):
            batch = batch_of(step * accumulated + part)
            read = dict(module.named_parameters())
            if dtype == "bf16":
                read = {name: parameter.to(torch.bfloat16) for name, parameter in read.items()}
            loss = loss_fn(functional_call(module, read, (batch["ids"],)).float(), batch["labels"])
            loss.backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM if clipped else math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: value.detach() for name, value in module.state_dict().items()})


# ---- on ranks --------------------------------------------------------------------------------------------------------


@functools.cache
def program_of(model: str, dtype: str) -> gp.Program:
    """Export a model, at a global batch of other values than those that are trained on."""
    batch = batch_of(-1)
    options = {} if dtype == "fp32" else {"dtype": dtype}
    return gp.export(build(model), (batch["ids"],), loss_fn=loss_fn, targets=(batch["labels"],), **options)


def run(pool: RankPool, wanted: Sequence[Combination], timeout_s: float = 1200) -> dict[Combination, float]:
    """Train every combination on local ranks; return the largest relative error of each, infinite where it did not run.

    Raises:
        GraphparError: one can't be compiled.
    """
    errors: dict[Combination, float] = {}
    with tempfile.TemporaryDirectory(prefix="graphpar_parity_") as scratch:
        root = Path(scratch)
        for number in range(max(each.accumulated for each in wanted) * STEPS):
            save_file(batch_of(number), root / f"batch_{number}.safetensors")
        jobs: dict[int, list[dict[str, Any]]] = {}
        for number, each in enumerate(wanted):
            program = program_of(each.model, each.dtype)
            folder = gp.partition(program, gp.plan(program, **each.asked)).save(root / str(number))
            save_file(
                {name: value.clone() for name, value in build(each.model).state_dict().items()},
                folder / "initial.safetensors",
            )
            jobs.setdefault(each.devices, []).append(
                {"program": str(folder), "batches": str(root), "accumulated": each.accumulated, "clipped": each.clipped}
            )
        for devices, listed in jobs.items():
            (root / f"jobs_{devices}.json").write_text(json.dumps(listed))
            pool.torchrun(Path(__file__), [str(root / f"jobs_{devices}.json")], nproc=devices, timeout_s=timeout_s)
        for number, each in enumerate(wanted):
            errors[each] = _error(root / str(number), each)
    return errors


def _error(folder: Path, each: Combination) -> float:
    if not (folder / "trained.json").is_file():
        return math.inf
    expected, found = (
        eager(each.model, each.accumulated, each.clipped, each.dtype),
        json.loads((folder / "trained.json").read_text()),
    )
    pairs = [*zip(found["losses"], expected.losses, strict=True), *zip(found["norms"], expected.norms, strict=True)]
    errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    saved = load_file(folder / "trained.safetensors")
    for name, value in expected.parameters.items():
        errors.append(float((saved[name] - value).abs().max() / value.abs().max().clamp(min=FLOOR[each.dtype])))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def main_of_a_rank(jobs: Path) -> None:
    """Train the programs of a file, one after the other, as the emitted train.py does."""
    from graphpar.runtime import Pipeline, start

    with start(120.0) as ranks:
        for job in json.loads(jobs.read_text()):
            folder, accumulated = Path(job["program"]), job["accumulated"]
            losses, norms = [], []
            with Pipeline(folder, ranks.device) as pipeline:
                pipeline.load_weights(folder / "initial.safetensors")
                optimizer = torch.optim.SGD(pipeline.parameters(), lr=LR, momentum=MOMENTUM)
                for step in range(STEPS):
                    for part in range(accumulated):
                        number = step * accumulated + part
                        batch = load_file(Path(job["batches"]) / f"batch_{number}.safetensors")
                        last = part == accumulated - 1
                        loss = pipeline.step(
                            batch, step=number, broadcast_loss=True, **({} if last else {"accumulate": True})
                        )
                        assert loss is not None
                        losses.append(loss.item())
                    pipeline.assert_idle()
                    norms.append(float(pipeline.clip_grad_norm_(MAX_NORM if job["clipped"] else math.inf)))
                    optimizer.step()
                    pipeline.zero_grad()
                pipeline.save_weights(folder / "trained.safetensors")
            if ranks.rank == 0:
                (folder / "trained.json").write_text(json.dumps({"losses": losses, "norms": norms}))


# ---- the table -------------------------------------------------------------------------------------------------------


_PAGE = """# Parity of sharded state

The results of `python -m tests.tools.parity --docs`: training on ranks, compared with an eager loop on one device without graphpar. Each
row trains {steps} steps of SGD with momentum, with different rows of the batch on every rank and new batches in every step; the error is
the largest of losses, gradient norms and parameters afterwards, relative to the largest magnitude. The tests run a sample each time.

Models: a transformer with tied embeddings (tied), with frozen parameters (frozen), with a layer that is used twice (shared), and Mixtral
(moe). "batches a step" are added up by `pipeline.step(batch, accumulate=True)`.

## {count} combinations

{matrix}
## Over ranks that divide sequences

Without `dp_shard`: all ranks take the same rows, or those of their replica.

{sequences}
## In bf16

Over parameters, gradients and optimizer state in fp32; the eager loop reads a copy of the parameters in bf16.

{halves}
## The meshes of torchtitan's integration tests

torchtitan divides experts over ranks of other axes, as the rows "experts over" do; in graphpar `ep` is an axis of its own.

{titan}"""


def table(errors: Mapping[Combination, float], names: Sequence[str] = ()) -> str:
    """Write the results as a table of Markdown; ``names`` for its rows come first."""
    heads = ["model", "ZeRO", "mesh", "schedule", "prefetch", "batches a step", "clip", "largest error"]
    rows = []
    for each, error in errors.items():
        mesh = " x ".join(f"{axis}={degree}" for axis, degree in each.mesh)
        cells = [each.model, each.level, mesh, each.schedule or "", each.prefetch or "", str(each.accumulated)]
        rows.append([*cells, "yes" if each.clipped else "", f"{error:.0e}"])
    if names:
        heads, rows = ["", *heads], [[name, *row] for name, row in zip(names, rows, strict=True)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix and print its table."""
    parser = argparse.ArgumentParser(prog="tests.tools.parity", description=__doc__.split("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table into docs/parity.md")
    parser.add_argument("jobs", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jobs is not None:
        main_of_a_rank(options.jobs)
        return 0
    errors = run(RankPool(), [*combinations(), *over_sequences(), *in_16_bits(), *TORCHTITAN.values()])
    matrix = table({each: errors[each] for each in combinations()})
    sequences = table({each: errors[each] for each in over_sequences()})
    halves = table({each: errors[each] for each in in_16_bits()})
    titan = table({each: errors[each] for each in TORCHTITAN.values()}, list(TORCHTITAN))
    if options.docs:
        page = _PAGE.format(
            count=len(list(combinations())), matrix=matrix, sequences=sequences, halves=halves, titan=titan, steps=STEPS
        )
        (Path(__file__).parents[2] / "docs" / "parity.md").write_text(page)
    else:
        print(f"{matrix}\n{sequences}\n{halves}\n{titan}")
    return int(any(not error <= TOLERANCE[each.dtype] for each, error in errors.items()))


if __name__ == "__main__" and main():
    sys.exit(1)
