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
{modules}from pathlib import Path

import torch
{saving}from torch import Tensor
from torch.utils.data import Dataset

{imported}

PROGRAM = Path(__file__).parent


def random_example(generator: torch.Generator) -> dict[str, Tensor]:
    return {{
{inputs}
    }}


def dataset(args: argparse.Namespace, seed: int, held_out: bool) -> Dataset[dict[str, Tensor]]:
    """To be replaced by your data: item i is a dict of one example's inputs and targets. Each rank loads its rows.

    ``held_out``: the examples on which nothing is trained, for evaluation.
    """
    if args.data:
{tokens}
    return RandomExamples(random_example, seed + held_out{examples})


def main() -> None:
    args = {mode}_arguments("{verb} {name} on {devices} devices.")
    with start(args.timeout) as ranks:
        pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed, compile=args.compile)
{body}

if __name__ == "__main__":
    main()
'''

_IMPORTED = {
    "train": ("Pipeline", "RandomExamples", "Training", "check_first_step", "start", "train_arguments"),
    "infer": ("Pipeline", "RandomExamples", "batches", "infer_arguments", "start"),
}

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

EXAMPLES_AT_LEAST = 1_000_000
"""How many random examples there are, unless a batch has more."""

_LOSSES = {
    False: " Losses and gradients are those of the global batch.",
    True: " Losses and gradients are means over the replicas, each of its own rows, as in DDP.",
}

_TRAIN = """        if args.check:
            return check_first_step(pipeline)  # against what compile --check-values stored
        pipeline.load_weights(args.weights)  # by default weights/, or the initial ones, which each rank makes
        optimizer = pipeline.optimizer(args.lr)  # of the model file, over this rank's parameters, or AdamW
        # Resumes from --checkpoint; between steps it evaluates and saves, and in the end it writes --save.
        with Training(pipeline, optimizer, ranks, args, dataset) as training:
            for step, batches in training:
                loss = pipeline.step(batches, step=step)
                norm = pipeline.clip_grad_norm_(args.clip)  # every .grad is the single-device gradient
                optimizer.step()
                training.log(loss, norm)
                training.schedule.step()  # of the model file, or none
                pipeline.zero_grad()
"""

_INFER = """        pipeline.load_weights(args.weights)  # by default weights/, or the initial ones, which each rank makes
        for step, batch in zip(range(args.steps), batches(args, pipeline, dataset)):
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
    inputs = [f'        "{entry.name}": {_random(entry)},' for entry in program.inputs if entry.role != "sample_keys"]
    tokens, body = _tokens(program), _TRAIN if program.mode == "train" else _INFER
    return _TEMPLATE.format(
        title=textwrap.fill(f"{title}{_LOSSES[plan.dp_mean] if program.mode == 'train' else ''}", WIDTH - len('"""')),
        devices=plan.mesh.size,
        example=EXAMPLES[program.mode],
        placement="\n".join(placement_lines(plan, stages)),
        inputs="\n".join(inputs),
        examples=f", {plan.global_batch:_}" if plan.global_batch > EXAMPLES_AT_LEAST else "",
        tokens=tokens,
        name=program.name,
        verb=verb,
        mode=program.mode,
        begins="\n".join(textwrap.wrap(_BEGINS[program.mode], WIDTH)),
        modules="" if program.mode == "train" else "import json\nimport time\n",
        saving="" if program.mode == "train" else "from safetensors.torch import save_file\n",
        imported=_import(
            sorted({*_IMPORTED[program.mode], *(n for n in ("RuntimeProgramError", "TokenDataset") if n in tokens)})
        ),
        body=body,
    )


def _import(names: Iterable[str]) -> str:
    """Import from the runtime, in one line or several."""
    given = ", ".join(names)
    line = f"from graphpar.runtime import {given}"
    return line if len(line) <= WIDTH else "\n".join(wrapped(f"from graphpar.runtime import ({given})", ""))


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
