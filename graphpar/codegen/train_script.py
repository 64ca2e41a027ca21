"""``train.py``: a complete, short training script for torchrun."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import torch

from graphpar.codegen.layout import WIDTH
from graphpar.ir.plan import Plan
from graphpar.ir.program import Input, Program
from graphpar.runtime.axes import AXES, AXIS

_TEMPLATE = '''"""{title}

In this folder:

    torchrun --nproc-per-node {devices} train.py {example}

{begins}

{placement}
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, {imported}start

PROGRAM = Path(__file__).parent


def batches(seed: int, path: Path | None) -> Iterator[dict[str, Tensor]]:
    """Random batches, to be replaced by your data. Every rank must yield the same whole batch of {batch} examples."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield load_file(path) if path else {{
{inputs}
        }}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="{verb} {name} on {devices} devices.")
    parser.add_argument("--steps", type=int, default=10)
{options}    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the blocks with torch.compile")
    parser.add_argument("--weights", type=Path, help="safetensors file or folder (default: weights/)")
    parser.add_argument("--batch", type=Path, help="safetensors file with one batch, used for every step")
    parser.add_argument("--save", type=Path, help="where to write the {saved}")
    parser.add_argument("--json", type=Path, help="where to write the {recorded}")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with start(args.timeout) as ranks:
        pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed, compile=args.compile)
        pipeline.load_weights(args.weights)  # by default weights/, or the initial ones, which each rank makes
{body}

if __name__ == "__main__":
    main()
'''

_BEGINS = {
    "train": "It starts from weights/model.safetensors, or what --weights names; where there are none, from the model's initial weights, "
    "of which each rank makes its part. With --checkpoint it saves now and then, and goes on from the last checkpoint when it is started "
    "again.",
    "infer": "It reads weights/model.safetensors, or what --weights names; where there are none, it takes the model's initial weights.",
}

EXAMPLES = {
    "train": "--steps 100 --lr 1e-3 --save trained.safetensors",
    "infer": "--steps 1 --save outputs.safetensors",
}
"""Options that a user may begin with, by mode."""

_LOSSES = {
    False: " Losses and gradients are those of the global batch.",
    True: " Losses and gradients are means over the replicas, each of its own rows, as in DDP.",
}

_TRAIN_OPTIONS = """    parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's own; AdamW's is 1e-3)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints: go on from its latest, and save there")
    parser.add_argument("--checkpoint-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep")
"""

_TRAIN = """        optimizer = pipeline.optimizer(args.lr)  # of the model file, over this rank's parameters, or AdamW
        saved = pipeline.resume(args.checkpoint, optimizer) if args.checkpoint else None
        first = saved.step if saved else 0
        schedule = pipeline.lr_schedule(optimizer, first)  # of the model file, or none
        stop = StopSignal(ranks) if args.checkpoint else None
        history: list[dict[str, float]] = []
        for step, batch in enumerate(itertools.islice(batches(args.seed, args.batch), first, args.steps), first):
            began = time.perf_counter()
            loss = pipeline.step(batch, step=step)  # every .grad is now the single-device gradient
            norm = pipeline.clip_grad_norm_(args.clip)
            optimizer.step()
            schedule.step()
            pipeline.zero_grad()
            if loss is not None and pipeline.reports:  # one rank of the last stage
                record = {"loss": loss.item(), "gradient_norm": norm.item()}  # waits for the device
                taken = time.perf_counter() - began
                history.append({**record, "seconds": taken})
                print(f"step {step:4}   loss {loss:.6f}   gradient norm {norm:.4f}   {taken:.3f} s", flush=True)
            done, ending = step + 1, stop is not None and stop.received()
            if args.checkpoint and (ending or done == args.steps or done % args.checkpoint_every == 0):
                pipeline.save_checkpoint(args.checkpoint / str(done), optimizer, step=done, keep=args.keep)
            if ending:
                return
        if args.json and pipeline.reports:
            args.json.write_text(json.dumps(history))
        if args.save:
            pipeline.save_weights(args.save)
"""

_INFER = """        for step, batch in zip(range(args.steps), batches(args.seed, args.batch)):
            began = time.perf_counter()
            outputs = pipeline.infer(batch, step=step)
            if outputs is not None and pipeline.reports:  # one rank of the last stage
                shapes = {name: list(value.shape) for name, value in outputs.items()}
                print(f"step {step:4}   {shapes}   {time.perf_counter() - began:.3f} s", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(shapes))
                if args.save:
                    save_file({name: value.contiguous() for name, value in outputs.items()}, args.save)
"""


def train_script(program: Program, plan: Plan, stages: Sequence[str]) -> str:
    """Write ``train.py`` for this plan; ``stages`` says what each stage holds."""
    count, devices = len(stages), plan.mesh.size
    degrees = {axis: degree for axis, degree in plan.mesh.degrees().items() if degree > 1}
    mesh = f" ({' x '.join(f'{axis}={degree}' for axis, degree in degrees.items())})" if set(degrees) - {"pp"} else ""
    replicas = " on each replica" if plan.mesh.replicas > 1 else ""
    what = f"{count} pipeline stage{'s' if count > 1 else ''}, {plan.schedule}" if count > 1 else "one stage"
    verb = "Train" if program.mode == "train" else "Run"
    size = plan.microbatch_size
    title = (
        f"{verb} {program.name} on {devices} device{'s' if devices > 1 else ''}{mesh}: {what}, {plan.microbatches} "
        f"microbatch{'es' if plan.microbatches > 1 else ''} of {size} example{'s' if size > 1 else ''}{replicas}."
    )
    inputs = [
        f'            "{entry.name}": {_random(entry, plan)},'
        for entry in program.inputs
        if entry.role != "sample_keys"
    ]
    text = _TEMPLATE.format(
        title=textwrap.fill(f"{title}{_LOSSES[plan.dp_mean] if program.mode == 'train' else ''}", WIDTH - len('"""')),
        devices=plan.mesh.size,
        example=EXAMPLES[program.mode],
        placement="\n".join(_placement(plan, stages)),
        batch=plan.global_batch,
        inputs="\n".join(inputs),
        name=program.name,
        verb=verb,
        begins="\n".join(textwrap.wrap(_BEGINS[program.mode], WIDTH)),
        imported="StopSignal, " if program.mode == "train" else "",
        options=_TRAIN_OPTIONS if program.mode == "train" else "",
        saved="trained weights" if program.mode == "train" else "outputs",
        recorded="loss, gradient norm and seconds of every step" if program.mode == "train" else "outputs' shapes",
        body=_TRAIN if program.mode == "train" else _INFER,
    )
    if program.mode == "train":
        return text
    return text.replace("import load_file\n", "import load_file, save_file\n").replace("import itertools\n", "")


def _placement(plan: Plan, stages: Sequence[str]) -> list[str]:
    """What each rank holds: a line for each stage, and one for each other axis, with ranks that differ on this axis alone."""
    degrees = plan.mesh.degrees()
    inside = plan.mesh.size // plan.mesh.pp  # ranks at one pp coordinate: pp is the outermost axis
    lines = []
    for stage, modules in zip(plan.stages, stages):
        first = stage.rank * inside
        ranks = f"ranks {first}-{first + inside - 1}" if inside > 1 else f"rank {first}"
        line = f"    {ranks}   stage {stage.index}   {modules}"
        lines.append(line if len(line) <= 118 else line[:117] + "…")
    for axis, what in ((name, record.ranks) for name, record in AXIS.items() if record.typed):
        inside = math.prod(degrees[inner] for inner in AXES[AXES.index(axis) + 1 :])
        alike = [str(index * inside) for index in range(degrees[axis])]
        shown = ", ".join(alike if len(alike) <= 4 else [*alike[:3], "…", alike[-1]])
        if len(alike) > 1:
            lines.append(f"    {axis}={len(alike)}   such as ranks {shown}: they {what}")
    return lines


def _random(entry: Input, plan: Plan) -> str:
    size = repr(entry.shape_at(plan.global_batch))
    if entry.dtype.is_floating_point:
        dtype = "" if entry.dtype is torch.float32 else f", dtype={entry.dtype}"
        return f"torch.randn({size}, generator=generator{dtype})"
    if entry.dtype is torch.bool:
        return f"torch.rand({size}, generator=generator) < 0.5"
    low, high = entry.values
    dtype = "" if entry.dtype is torch.int64 else f", dtype={entry.dtype}"
    return f"torch.randint({max(0, low)}, {max(high, 0) + 1}, {size}, generator=generator{dtype})"
