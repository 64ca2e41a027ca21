"""Scripts of the emitted package: ``train.py`` (or ``generate.py``), complete and short, for torchrun; and ``launch.sh``,
``launch.sbatch``, ``launch.yaml``, which start it on the nodes of its cluster, with torchrun, Slurm or Kubernetes."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

import torch

from graphpar.codegen.formatting import WIDTH, wrapped
from graphpar.codegen.token_inputs import token_inputs
from graphpar.ir.plan import Plan
from graphpar.ir.program import Input, Program
from graphpar.runtime.axes import AXES, AXIS
from graphpar.runtime.distributed import STOP_GRACE_S
from graphpar.runtime.option_kinds import GENERATE, SCRIPTS
from graphpar.text import plural

_HEAD = '''"""{title}

In this folder:

    torchrun --nproc-per-node {devices} {script} {example}

{begins}

{placement}
"""
'''

_TRAINS = '''
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
    with start(args.timeout, device=args.device, program=PROGRAM) as ranks:
        {pipeline}
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
    "generate": "It reads weights/model.safetensors, or what --weights or --checkpoint names; where there are none, it takes the model's "
    "initial weights.",
}

EXAMPLES = {
    "train": "--steps 100 --lr 1e-3 --save trained.safetensors",
    "infer": "--steps 1 --save outputs.safetensors",
    "generate": "--tokens 1,2,3 --max-new-tokens 16",
}
"""Options that a user may begin with, by mode."""

EXAMPLES_AT_LEAST = 1_000_000
"""How many random examples there are, unless a batch has more."""

_PIPELINE = {
    "train": """pipeline = Pipeline(
            PROGRAM, ranks.device, seed=args.seed, compile=args.compile, cuda_graphs=args.cuda_graphs
        )""",
    "infer": "pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed, compile=args.compile)",
}

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
                if training.accepts(loss, norm):  # always, without --skip-spikes
                    optimizer.step()
                training.log(loss, norm)
                training.schedule.step()  # of the model file, or of --schedule
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


_GENERATES = """
from __future__ import annotations

import json
import time
from pathlib import Path

from graphpar.runtime import Pipeline, generate_arguments, start, text_file

PROGRAM = Path(__file__).parent


def main() -> None:
    args = generate_arguments("Generate with {name} on {count}.")
    with start(args.timeout, device=args.device, program=PROGRAM) as ranks:
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
"""


def script(program: Program, plan: Plan, stages: Sequence[str]) -> str:
    """Write the script that runs the program; ``stages`` says what each stage holds."""
    devices, mode = plan.mesh.size, program.mode
    head = _HEAD.format(
        title=textwrap.fill(_title(program, plan, len(stages)), WIDTH - len('"""')),
        devices=devices,
        script=SCRIPTS[mode],
        example=EXAMPLES[mode],
        begins="\n".join(textwrap.wrap(_BEGINS[mode], WIDTH)),
        placement="\n".join(_placement_lines(plan, stages)),
    )
    if mode == GENERATE:
        return head + _GENERATES.format(name=program.name, count=plural(devices, "device"))
    inputs = [f'        "{entry.name}": {_random(entry)},' for entry in program.inputs if entry.role != "sample_keys"]
    tokens, trains = _tokens(program), mode == "train"
    names = {*_IMPORTED[mode], *(name for name in ("RuntimeProgramError", "TokenDataset") if name in tokens)}
    return head + _TRAINS.format(
        inputs="\n".join(inputs),
        examples=f", {plan.global_batch:_}" if plan.global_batch > EXAMPLES_AT_LEAST else "",
        tokens=tokens,
        name=program.name,
        verb=_verb(mode),
        mode=mode,
        devices=devices,
        modules="" if trains else "import json\nimport time\n",
        saving="" if trains else "from safetensors.torch import save_file\n",
        imported=_import(sorted(names)),
        pipeline=_PIPELINE["train" if trains else "infer"],
        body=_TRAIN if trains else _INFER,
    )


def _verb(mode: str) -> str:
    return "Train" if mode == "train" else "Run"


def _title(program: Program, plan: Plan, count: int) -> str:
    """Say what is run how, on how many devices."""
    degrees = {axis: degree for axis, degree in plan.mesh.degrees().items() if degree > 1}
    mesh = f" ({' x '.join(f'{axis}={degree}' for axis, degree in degrees.items())})"
    devices, replicas = plural(plan.mesh.size, "device"), plan.mesh.replicas
    if program.mode == GENERATE:
        rows, length = program.inputs[0].shape_at(program.batch)
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        return (
            f"Generate with {program.name} on {devices}{mesh if degrees else ''}: {plural(rows, 'sequence')} at a time{each} of up to "
            f"{length} tokens, with their keys and values in a cache."
        )
    what = f"{count} pipeline stages, {plan.schedule}" if count > 1 else "one stage"
    batch = f"{plural(plan.microbatches, 'microbatch', 'microbatches')} of {plural(plan.microbatch_size, 'example')}"
    return (
        f"{_verb(program.mode)} {program.name} on {devices}{mesh if set(degrees) - {'pp'} else ''}: {what}, {batch}"
        f"{' on each replica' if replicas > 1 else ''}.{_LOSSES[plan.dp_mean] if program.mode == 'train' else ''}"
    )


def _import(names: Iterable[str]) -> str:
    """Import from the runtime, in one line or several."""
    given = ", ".join(names)
    line = f"from graphpar.runtime import {given}"
    return line if len(line) <= WIDTH else "\n".join(wrapped(f"from graphpar.runtime import ({given})", ""))


def _placement_lines(plan: Plan, stages: Sequence[str]) -> list[str]:
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


# ---- launching -------------------------------------------------------------------------------------------------

_SHELL = """#!/usr/bin/env bash
# {verb} {name} on {where}. {usage}
#
# Set in the environment, where it is otherwise: NODES, DEVICES (of a node), PORT, JOB (a name, if several jobs share a node).
{elastic}set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)

{bounds}nodes=${{NODES:-{nodes}}} devices=${{DEVICES:-{devices}}}
if ! [[ $nodes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ ]]; then
    echo "launch.sh: NODES=$nodes and DEVICES=$devices must be whole numbers above 0" >&2
    exit 2
fi
if {unbounded}((nodes * devices != {ranks})); then
    echo "launch.sh: the program runs on {ranks} ranks; NODES=$nodes times DEVICES=$devices is $((nodes * devices))" >&2
    exit 2
fi
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
# After a SIGTERM, training with --checkpoint saves and ends. torchrun waits this long, in seconds, before it kills its ranks (torch 2.11
# doesn't read it, and always waits 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{grace}}}
# On GPUs: memory that the allocator returns in pieces of any size, and a record of each rank's last collectives where one runs out of time.
export PYTORCH_ALLOC_CONF=${{PYTORCH_ALLOC_CONF:-expandable_segments:True}}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${{TORCH_NCCL_DUMP_ON_TIMEOUT:-1}} TORCH_FR_BUFFER_SIZE=${{TORCH_FR_BUFFER_SIZE:-2000}}
{start}if ((nodes == 1)); then
    # Ranks of one node meet in a file and on its loopback, where no other machine reaches them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    exec torchrun --nproc-per-node "$devices" --local-addr localhost --rdzv-id "${{JOB:-{job}}}" --rdzv-backend c10d \\
        --rdzv-conf store_type=file --rdzv-endpoint "$(mktemp)" "$here/{script}" "$@"
fi
if [[ -z ${{HEAD:-}} ]]; then
    echo "launch.sh: set HEAD to the name or address of one node, the same on all" >&2
    exit 2
fi
exec torchrun --nnodes "$nodes" --nproc-per-node "$devices" --rdzv-id "${{JOB:-{job}}}" --rdzv-backend c10d \\
    --rdzv-endpoint "$HEAD:${{PORT:-29500}}" "$here/{script}" "$@"
"""

_ELASTIC = """\
# With --min-nodes A --max-nodes B as first options, and --checkpoint, nodes may be lost and come back, in a folder that all of them share.
# HEAD is then a node that stays, or the path of a new file in such a folder, so that any may be lost. RESTARTS: after how many losses it
# ends (100). RENDEZVOUS: settings of torchrun's --rdzv-conf, such as last_call_timeout=30, the seconds that more nodes are waited for.
"""

_BOUNDS = """least= most=
while [[ ${1:-} == --min-nodes || ${1:-} == --max-nodes ]]; do
    if [[ $1 == --min-nodes ]]; then least=${2:-none}; else most=${2:-none}; fi
    shift $(($# < 2 ? $# : 2))
done
if [[ " $* " == *" --min-nodes"[[:space:]=]* || " $* " == *" --max-nodes"[[:space:]=]* ]]; then
    echo "launch.sh: --min-nodes A --max-nodes B come before all other options, without =" >&2
    exit 2
fi
"""

_START = """if [[ -n $least$most ]]; then
    most=${{most:-$nodes}}
    if ! [[ $least =~ ^[1-9][0-9]*$ && $most =~ ^[1-9][0-9]*$ ]] || ((least > most)); then
        echo "launch.sh: --min-nodes $least --max-nodes $most must be whole numbers above 0, the first not above the second" >&2
        exit 2
    fi
    if [[ -z ${{HEAD:-}} || " $* " != *" --checkpoint"[[:space:]=]* ]]; then
        echo "launch.sh: --min-nodes needs HEAD, the same on all nodes, and --checkpoint, from which training goes on" >&2
        exit 2
    fi
    conf=keep_alive_interval=5 endpoint="$HEAD:${{PORT:-29500}}" place=${{PORT:-29500}}
    if [[ $HEAD == */* ]]; then conf=store_type=file endpoint=$(realpath -m "$HEAD") place=${{HEAD##*/}}; fi
    if [[ $HEAD == */* && (-d $HEAD || ! -w ${{HEAD%/*}}/) ]]; then
        echo "launch.sh: HEAD=$HEAD can't be written; it must be a new file in a folder that all nodes share" >&2
        exit 2
    fi
    if [[ ! -w $here/.. ]]; then
        echo "launch.sh: $(dirname "$here") can't be written, where programs for other numbers of nodes are to be" >&2
        exit 2
    fi
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # the ranks' own store is a new one after each change
    # The name of the job has the place where its nodes meet, so that launches of this folder by other HEADs have files of their own.
    exec python3 -m graphpar.runtime.launching.nodes --nnodes "$least:$most" --nproc-per-node "$devices" \\
        --max-restarts "${{RESTARTS:-100}}" --rdzv-id "${{JOB:-{job}}}-$place" --rdzv-backend c10d \\
        --rdzv-conf "$conf${{RENDEZVOUS:+,$RENDEZVOUS}}" --rdzv-endpoint "$endpoint" \\
        --module graphpar.runtime.launching.elastic "$here" "$@"
fi
"""

_SLURM = """#!/usr/bin/env bash
# {verb} {name} on {where}. In this folder, which all nodes must see:
#
#     sbatch launch.sbatch {example}
#
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices_of_a_task}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@{grace}
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD JOB=$SLURM_JOB_ID
srun --kill-on-bad-exit=1 bash "$SLURM_SUBMIT_DIR/launch.sh" "$@" &
step=$!
# Before the time is up this shell alone gets a SIGTERM. It passes on one, and waits: training with --checkpoint saves and ends.
trap 'trap "" TERM; kill -TERM "$step"' TERM
wait "$step" || true
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
wait "$step"
"""

_KUBERNETES = """# {verb} {name} on {where}, with the training operator of Kubeflow: kubectl apply -f launch.yaml
# To be replaced: the image (it needs graphpar and torch), and the claim of the volume that holds this folder.
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {job}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: Never
      template: &pod
        spec:
          terminationGracePeriodSeconds: {grace}  # in which training with --checkpoint saves and ends
          containers:
            - name: pytorch
              image: REPLACE/IMAGE:TAG
              workingDir: /program
              command: ["bash", "-c", "HEAD=$MASTER_ADDR PORT=$MASTER_PORT exec bash launch.sh {example}"]
{resources}              volumeMounts:
                - {{name: program, mountPath: /program}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - {{name: program, persistentVolumeClaim: {{claimName: REPLACE-CLAIM}}}}
            - {{name: shm, emptyDir: {{medium: Memory}}}}
{workers}"""

_RESOURCES = """              resources: {{limits: {{{vendor}.com/gpu: {devices}}}}}
"""

_WORKERS = """    Worker:
      replicas: {others}
      restartPolicy: Never
      template: *pod
"""


def launch_files(name: str, plan: Plan) -> dict[str, str]:
    """Write the files that start the program's script on the nodes of the plan's cluster, or on one where it names none.

    Args:
        name: of the model.
    """
    example = EXAMPLES[plan.mode]
    ranks, trains = plan.mesh.size, plan.mode == "train"
    node = plan.cluster.host_devices if plan.cluster is not None else ranks
    devices = min(node, ranks) if ranks % min(node, ranks) == 0 else math.gcd(node, ranks)
    nodes = ranks // devices
    gpus = plan.cluster is not None and plan.cluster.device.kind == "cuda"
    place = (
        _shown(plan.cluster.device.name) if plan.cluster is not None else plural(devices, "device").partition(" ")[2]
    )
    usage = f"In this folder:\n#\n#     ./launch.sh {example}"
    if nodes > 1:
        usage = (
            "On each of them, in a copy of this folder, with the name of one:"
            f"\n#\n#     HEAD=NAME ./launch.sh {example}{_order_of_nodes(plan)}"
        )
    job = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")[:50]
    values = {
        "script": SCRIPTS[plan.mode],
        "verb": _verb(plan.mode),
        "name": _shown(name),
        "job": job or "graphpar",
        "nodes": nodes,
        "devices": devices,
        "ranks": ranks,
        "where": f"{plural(nodes, 'node')} of {devices} {place}" if nodes > 1 else f"one node of {devices} {place}",
        "example": example,
        "grace": round(STOP_GRACE_S),
        "usage": usage,
        "elastic": _ELASTIC if trains else "",
        "bounds": _BOUNDS if trains else "",
        "unbounded": "[[ -z $least$most ]] && " if trains else "",
        "start": _START.format(job=job or "graphpar") if trains else "",
        "devices_of_a_task": f"#SBATCH --gpus-per-node={devices}\n" if gpus else "",
        "resources": _RESOURCES.format(vendor="amd" if place.startswith("MI") else "nvidia", devices=devices)
        if gpus
        else "",
        "workers": _WORKERS.format(others=nodes - 1) if nodes > 1 else "",
    }
    templates = {"launch.sh": _SHELL, "launch.sbatch": _SLURM, "launch.yaml": _KUBERNETES}
    return {file: template.format(**values) for file, template in templates.items()}


def _order_of_nodes(plan: Plan) -> str:
    """Say in which order nodes are to be where it matters: of several kinds, or in pods."""
    if plan.cluster is None or not (plan.cluster.groups or plan.cluster.pods):
        return ""
    order = " those of a pod must follow each other"
    if plan.cluster.groups:
        order = " first " + ", then ".join(
            f"{each.nodes} of {_shown(each.device.name)}" for each in plan.cluster.groups
        )
    return f"\n#\n# torchrun numbers nodes in the order of their names:{order}."


def _shown(name: str) -> str:
    """A name as a comment of a shell script or of YAML may have it: nothing of it ends the line, or begins something else."""
    return re.sub(r"[^\w .,:+/()-]", "_", name)
