"""``train.py``: a complete, short training script for torchrun."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence

import torch

from graphpar.codegen.layout import WIDTH, wrapped
from graphpar.codegen.token_inputs import token_inputs
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
{modules}from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

{imported}
{types}

PROGRAM = Path(__file__).parent


class RandomExamples(Dataset[dict[str, Tensor]]):
    """Examples that depend on their index and the seed alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return {examples}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * len(self) + index)
        return {{
{inputs}
        }}


def dataset(args: argparse.Namespace, seed: int, held_out: bool) -> Dataset[dict[str, Tensor]]:
    """To be replaced by your data: item i is a dict of one example's inputs and targets. Each rank loads its rows.

    ``held_out``: the examples on which nothing is trained, for evaluation.
    """
    if args.data:
{tokens}
    return RandomExamples(seed + held_out)


def batches(
    args: argparse.Namespace, pipeline: Pipeline, first: int = 0, held_out: bool = False
) -> Iterator[dict[str, Tensor]]:
    """What this rank needs of each global batch of {batch} examples, from batch number ``first`` on; held-out ones once."""
    if args.batch:
        return itertools.repeat(load_file(args.batch))
    seed = pipeline.seed  # that of the checkpoint, when training goes on
    return load(
        pipeline, lambda: dataset(args, seed, held_out), seed=seed, first=first, workers=args.workers, once=held_out
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="{verb} {name} on {devices} devices.")
    parser.add_argument("--steps", type=count, default=10)
{options}    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the blocks with torch.compile")
    parser.add_argument("--weights", type=input_file, help="safetensors file or folder (default: weights/)")
    parser.add_argument("--batch", type=input_file, help="safetensors file with one batch, used for every step")
    parser.add_argument("--data", type=Path, help="text, file of tokens, or folder of these")
    parser.add_argument("--workers", type=whole, default=0, help="processes of each rank that load examples")
    parser.add_argument("--save", type=replaced_file, help="where to write the {saved}")
    parser.add_argument("--json", type=output_file, help="where to write {recorded}")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds that a rank waits for another")
    return parsed(parser)


def main() -> None:
    args = arguments()
    with start(args.timeout) as ranks:
        pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed, compile=args.compile)
{check}        pipeline.load_weights(args.weights)  # by default weights/, or the initial ones, which each rank makes
{body}

if __name__ == "__main__":
    main()
'''

_IMPORTED = (
    "Log", "Pipeline", "RuntimeProgramError", "StopSignal", "TokenDataset", "check_first_step", "first_batches", "load", "start",
)  # fmt: skip

_INFER_TYPES = ("count", "input_file", "output_file", "parsed", "positive", "replaced_file", "whole")
_TYPES = sorted((*_INFER_TYPES, "checkpoint_folder", "limit", "number"))
"""What reads the command line."""

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

_TRAIN_OPTIONS = """    parser.add_argument("--lr", type=number, help="learning rate (default: the optimizer's own; AdamW's is 1e-3)")
    parser.add_argument("--clip", type=limit, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--accumulate", type=count, default=1, metavar="N", help="batches a step, as if they were one")
    parser.add_argument("--eval-every", type=count, metavar="STEPS", help="evaluate on batches that are held out")
    parser.add_argument("--eval-batches", type=count, default=1, metavar="M")
    parser.add_argument(
        "--checkpoint", type=checkpoint_folder, help="folder of checkpoints: go on from its latest, and save there"
    )
    parser.add_argument("--checkpoint-every", type=count, default=1000, metavar="STEPS")
    parser.add_argument("--keep", type=count, default=2, help="how many checkpoints to keep")
    parser.add_argument("--log-file", type=output_file, help="file to which each step adds a line of JSON at once")
    parser.add_argument("--log-every", type=count, default=1, metavar="N", help="read the loss at every Nth step only")
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard")
    parser.add_argument("--check", action="store_true", help="compare the first step with the model's own, and end")
"""

_CHECK = """        if args.check:
            return check_first_step(pipeline)  # against what compile --check-values stored
"""

_TRAIN = """        optimizer = pipeline.optimizer(args.lr)  # of the model file, over this rank's parameters, or AdamW
        saved = pipeline.resume(args.checkpoint, optimizer) if args.checkpoint else None
        first = saved.step if saved else 0
        begun = saved.data.get("examples", 0) // pipeline.program.global_batch if saved else 0  # under any plan
        schedule = pipeline.lr_schedule(optimizer, first)  # of the model file, or none
        stop = StopSignal(ranks) if args.checkpoint else None
        held_out: list[dict[str, Tensor]] = []
        if args.eval_every:
            pipeline.check_eval()
            held_out += first_batches(batches(args, pipeline, held_out=True), args.eval_batches)
        data = batches(args, pipeline, begun)
        with Log(pipeline, args.steps, first, every=args.log_every, batches=args.accumulate, file=args.log_file,
                 history=args.json, tensorboard=args.tensorboard) as log:  # fmt: skip
            for step in range(first, args.steps):
                loss = pipeline.step([next(data) for _ in range(args.accumulate)], step=step)
                norm = pipeline.clip_grad_norm_(args.clip)  # every .grad is the single-device gradient
                optimizer.step()
                log.step(step, loss, norm, optimizer)
                schedule.step()
                pipeline.zero_grad()
                done, ending = step + 1, stop is not None and stop.received()
                if args.eval_every and done % args.eval_every == 0:
                    log.held_out(step, pipeline.eval(held_out))  # the loss of all of them, as in model.eval()
                if args.checkpoint and (ending or done == args.steps or done % args.checkpoint_every == 0):
                    position = {"examples": (begun + (done - first) * args.accumulate) * pipeline.program.global_batch}
                    pipeline.save_checkpoint(
                        args.checkpoint / str(done), optimizer, step=done, data=position, keep=args.keep
                    )
                    log.restart()
                if ending:
                    return
        if args.save:
            pipeline.save_weights(args.save)
"""

_INFER = """        for step, batch in zip(range(args.steps), batches(args, pipeline)):
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
        f'            "{entry.name}": {_random(entry)},' for entry in program.inputs if entry.role != "sample_keys"
    ]
    tokens, body = _tokens(program), _TRAIN if program.mode == "train" else _INFER
    check = _CHECK if program.mode == "train" else ""
    text = _TEMPLATE.format(
        title=textwrap.fill(f"{title}{_LOSSES[plan.dp_mean] if program.mode == 'train' else ''}", WIDTH - len('"""')),
        devices=plan.mesh.size,
        example=EXAMPLES[program.mode],
        placement="\n".join(placement_lines(plan, stages)),
        batch=plan.global_batch,
        examples=f"{max(1_000_000, plan.global_batch):_}",
        inputs="\n".join(inputs),
        tokens=tokens,
        name=program.name,
        verb=verb,
        begins="\n".join(textwrap.wrap(_BEGINS[program.mode], WIDTH)),
        modules="" if program.mode == "train" else "import json\nimport time\n",
        check=check,
        imported=_import("", (name for name in _IMPORTED if name in f"{tokens} {check} {body} Pipeline load start")),
        types=_import(".arguments", _TYPES if program.mode == "train" else _INFER_TYPES),
        options=_TRAIN_OPTIONS if program.mode == "train" else "",
        saved="trained weights" if program.mode == "train" else "outputs",
        recorded="loss, gradient norm and seconds of every step" if program.mode == "train" else "outputs' shapes",
        body=body,
    )
    if program.mode == "train":
        return text
    return text.replace("import load_file\n", "import load_file, save_file\n")


def _import(module: str, names: Iterable[str]) -> str:
    """Import from a module of the runtime, in one line or several."""
    given = ", ".join(names)
    line = f"from graphpar.runtime{module} import {given}"
    return line if len(line) <= WIDTH else "\n".join(wrapped(f"from graphpar.runtime{module} import ({given})", ""))


def placement_lines(plan: Plan, stages: Sequence[str]) -> list[str]:
    """What each rank holds: a line for each stage, and one for each other axis, with ranks that differ on this axis alone."""
    degrees = plan.mesh.degrees()
    inside = plan.mesh.size // plan.mesh.pp  # ranks at one pp coordinate: pp is the outermost axis
    lines = []
    for stage, modules in zip(plan.stages, stages):
        first = stage.rank * inside
        ranks = f"ranks {first}-{first + inside - 1}" if inside > 1 else f"rank {first}"
        line = f"    {ranks}   stage {stage.index}   {modules}"
        lines.append(line if len(line) <= 118 else line[:117] + "…")
    for axis, record in ((name, record) for name, record in AXIS.items() if record.typed):
        what = record.sharing if record.sharing and plan.zero >= 2 else record.ranks
        inside = math.prod(degrees[inner] for inner in AXES[AXES.index(axis) + 1 :])
        alike = [str(index * inside) for index in range(degrees[axis])]
        shown = ", ".join(alike if len(alike) <= 4 else [*alike[:3], "…", alike[-1]])
        if len(alike) > 1:
            lines.append(f"    {axis}={len(alike)}   such as ranks {shown}: they {what}")
    return lines


def _tokens(program: Program) -> str:
    """What ``dataset()`` does with ``--data``."""
    found = token_inputs(program)
    if isinstance(found, str):
        reason = f"--data is for models that predict the next token, but {found}: replace dataset() in train.py"
        return "\n".join(
            [
                "        raise RuntimeProgramError(",
                *(f"            {json.dumps(line, ensure_ascii=False)}" for line in _lines(reason)),
                "        )",
            ]
        )
    more: dict[str, object] = {"dtype": found.ids.dtype} if found.ids.dtype is not torch.int64 else {}
    if found.labels is not None:
        more |= {"labels": json.dumps(found.labels.name), "ahead": found.ahead, "padded": found.padded}
    options = {"length": found.length, "vocabulary": found.vocabulary, "ids": json.dumps(found.ids.name), **more}
    given = [f"{name}={value}" for name, value in options.items()]
    inside = textwrap.fill(", ".join(["args.data", *given, "held_out=held_out"]), WIDTH - 12)
    return textwrap.indent(f"return TokenDataset(\n{textwrap.indent(inside, '    ')}\n)", " " * 8)


def _lines(text: str) -> list[str]:
    """Lines of a literal, which together are ``text``."""
    lines = textwrap.wrap(text, WIDTH - 20)
    return [f"{line} " for line in lines[:-1]] + lines[-1:]


def _random(entry: Input) -> str:
    size = repr(tuple(size for dim, size in enumerate(entry.shape) if dim != entry.batch_dim))
    generator = "generator=generator" if entry.batch_dim is not None else "generator=torch.Generator().manual_seed(0)"
    if entry.dtype.is_floating_point:
        dtype = "" if entry.dtype is torch.float32 else f", dtype={entry.dtype}"
        return f"torch.randn({size}, {generator}{dtype})"
    if entry.dtype is torch.bool:
        return f"torch.rand({size}, {generator}) < 0.5"
    low, high = entry.values
    dtype = "" if entry.dtype is torch.int64 else f", dtype={entry.dtype}"
    return f"torch.randint({max(0, low)}, {max(high, 0) + 1}, {size}, {generator}{dtype})"
