"""``generate.py``: a complete, short script for torchrun that continues prompts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from graphpar.codegen.layout import WIDTH
from graphpar.codegen.train_script import placement_lines
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.text import plural

EXAMPLE = "--tokens 1,2,3 --max-new-tokens 16"
"""Options that a user may begin with."""

_TEMPLATE = '''"""{title}

In this folder:

    torchrun --nproc-per-node {devices} generate.py {example}

{begins}

{placement}
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from graphpar.runtime import Pipeline, generate_arguments, start, text_file

PROGRAM = Path(__file__).parent


def main() -> None:
    args = generate_arguments("Generate with {name} on {count}.")
    with start(args.timeout) as ranks:
        pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed)
        if args.checkpoint:
            pipeline.load_checkpoint(args.checkpoint)
        else:
            pipeline.load_weights(args.weights)  # by default weights/, or the initial ones, which each rank makes
        texts = text_file(args.tokenizer) if args.prompt else None
        prompts = [texts.encode(prompt) for prompt in args.prompt] + args.tokens
        began = time.perf_counter()
        found = pipeline.generate(
            prompts, args.max_new_tokens, do_sample=args.sample, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, repetition_penalty=args.repetition_penalty, seed=args.seed,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        if not pipeline.reports:  # one rank of the last stage
            return
        words = [texts.decode(tokens) if texts else " ".join(map(str, tokens)) for tokens in found]
        for prompt, text in zip([*args.prompt, *(" ".join(map(str, ids)) for ids in args.tokens)], words):
            print(f"{{prompt}}\\n  -> {{text}}", flush=True)
        made = sum(map(len, found))
        print(f"{{made}} tokens in {{seconds:.3f}} s, {{made / seconds:.1f}} a second", flush=True)
        if args.json:
            figures = {{"seconds": seconds, "tokens_per_second": made / seconds}}
            args.json.write_text(json.dumps({{"prompts": prompts, "tokens": found, "texts": words, **figures}}))


if __name__ == "__main__":
    main()
'''

_BEGINS = (
    "It reads weights/model.safetensors, or what --weights or --checkpoint names; where there are none, it takes the model's initial "
    "weights."
)


def generate_script(program: Program, plan: Plan, stages: Sequence[str]) -> str:
    """Write ``generate.py`` for this plan; ``stages`` says what each stage holds."""
    devices = plan.mesh.size
    rows, length = program.inputs[0].shape_at(program.batch)
    degrees = {axis: degree for axis, degree in plan.mesh.degrees().items() if degree > 1}
    mesh = f" ({' x '.join(f'{axis}={degree}' for axis, degree in degrees.items())})" if degrees else ""
    each = f" on each of {plan.mesh.replicas} replicas" if plan.mesh.replicas > 1 else ""
    title = (
        f"Generate with {program.name} on {plural(devices, 'device')}{mesh}: {plural(rows, 'sequence')} at a time{each} of up to {length} "
        "tokens, with their keys and values in a cache."
    )
    return _TEMPLATE.format(
        title=textwrap.fill(title, WIDTH - len('"""')),
        devices=devices,
        count=plural(devices, "device"),
        example=EXAMPLE,
        begins="\n".join(textwrap.wrap(_BEGINS, WIDTH)),
        placement="\n".join(placement_lines(plan, stages)),
        name=program.name,
    )
