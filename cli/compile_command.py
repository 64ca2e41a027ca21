"""``graphpar compile``: what may be asked of it. The work is in ``compile_work``, which imports torch."""

from __future__ import annotations

import argparse

from graphpar.cli.arguments import Commands, Parser, add_cache, add_json, add_model, count, count_or_none, seconds
from graphpar.cli.output import Result
from graphpar.runtime.axes import DROPOUTS
from graphpar.runtime.modes import MODES

_EXAMPLES = """examples:
  graphpar compile model.py --devices 4
  graphpar compile model.py --mesh pp=2 --schedule zbv --batch 64 --microbatch-size 4 -o out
  graphpar compile model.py --mesh tp=2,dp_replicate=2 --shard-plan plan.toml
  graphpar compile model.py --devices 2 --split layers.12 --run --steps 5
  graphpar compile package.module --devices 8 --no-emit --json
"""


def run(options: argparse.Namespace) -> Result:
    """Compile the model file, write the program unless ``--no-emit`` is given, and run it with ``--run``."""
    from graphpar.cli.compile_work import compile_model

    return compile_model(options)


def add_parser(commands: Commands) -> None:
    """Add the parser of the command: the model file, and options in groups."""
    parser = commands.add_parser(
        "compile",
        help="compile a model file to a parallel program",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    _add_devices(parser)
    _add_pins(parser)
    _add_workload(parser)
    _add_output(parser)


def _add_devices(parser: Parser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument("--devices", type=count, metavar="N", help="how many devices (default: 1)")
    group.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="which devices: 8xH100-SXM-80GB, 2x8xA100 (nodes first), or a file (TOML, or a profile of calibrate)",
    )


def _add_pins(parser: Parser) -> None:
    group = parser.add_argument_group("pins (what is left out is chosen)")
    group.add_argument("--mesh", metavar="pp=2,tp=2", help="degrees of mesh axes; alone, they give the device count")
    group.add_argument("--schedule", metavar="NAME", help="1F1B, GPipe, Interleaved1F1B, ZBVZeroBubble, ...")
    group.add_argument(
        "--schedule-table", metavar="FILE.csv", help="a schedule of your own, a row a rank: 0F0,0F1,0B0,0B1"
    )
    group.add_argument("--microbatch-size", type=count, metavar="M", help="rows of a microbatch")
    group.add_argument(
        "--split",
        metavar="PATH[,PATH...]",
        help="modules that begin a stage (PATH:end: that end one; 'layers.*': evenly)",
    )
    group.add_argument("--layers-per-stage", type=count, metavar="N", help="split into stages of this many layers")
    group.add_argument(
        "--edge-layers", metavar="IN,OUT", help="what the parts around the layers count as (default 1,1)"
    )
    group.add_argument(
        "--shard-plan",
        metavar="FILE",
        help="how weights and activations are sharded: patterns in a .json, .toml or .py file",
    )
    group.add_argument("--plan", metavar="PLAN.json", help="take every decision from this plan")
    group.add_argument(
        "--allow-batch-coupling", action="store_true", help="accept operators that mix examples, such as BatchNorm"
    )
    group.add_argument(
        "--dp-mean",
        action="store_true",
        default=None,
        help="the loss is the mean of the replicas' own, as DDP has it, not the global batch's",
    )
    group.add_argument(
        "--dropout",
        choices=DROPOUTS,
        help="masks of attention: those of the unpartitioned model (exact, the default), or of torch's fused kernel (kernel)",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        help="which state ranks of dp_shard and cp share: 1 optimizer state, 2 and 3 (default with dp_shard) all of it",
    )
    group.add_argument(
        "--zero1-by",
        choices=("contiguous", "longest", "flat"),
        help="how ZeRO-1 divides it: whole parameters in runs (default) or the largest first, or equal slices",
    )
    group.add_argument(
        "--reshard",
        type=_reshard,
        metavar="WHEN",
        help="when gathered parameters are freed: default, always, never, or N: after a forward, down to shards over N ranks",
    )
    group.add_argument(
        "--prefetch",
        choices=("pre", "post", "none"),
        help="when ZeRO-3 gathers a block for its backward: before the backward of the block before it (default), after it, or at need",
    )
    group.add_argument(
        "--prefetch-distance", type=count, metavar="K", help="how many blocks are gathered ahead (default: 1)"
    )
    group.add_argument(
        "--recompute",
        metavar="KIND",
        help="what blocks run again in the backward: none, gathers, selective, full, budget:0.6, auto, or by pattern: "
        "'layers.*=full,layers.0=none' (default: searched with the mesh; none where the whole mesh is given and no cluster)",
    )
    group.add_argument(
        "--overlap-tp",
        action=argparse.BooleanOptionalAction,
        help="send what tp gathers and scatters in pieces, while other pieces are multiplied, where the sequence is sharded between "
        "(default: where the prices of a cluster say that it is faster)",
    )
    group.add_argument(
        "--offload",
        metavar="WHAT",
        help="what lives in the memory of the host: optimizer (its state), activations (what blocks keep), or optimizer,activations",
    )


def _reshard(text: str) -> str | int:
    """Read a policy's name, or a number of ranks."""
    return int(text) if text.isdigit() else text


def _add_workload(parser: Parser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--batch", type=count, metavar="B", help="global batch (default: that of the example inputs)")
    dtypes = ("fp32", "bf16", "fp16")
    group.add_argument(
        "--dtype",
        choices=dtypes,
        help="dtype in which the model computes; its parameters stay in fp32 (default: on GPUs bf16 for training, else that of the model)",
    )
    group.add_argument(
        "--pure", action="store_true", default=None, help="store and step parameters in the compute dtype, too"
    )
    group.add_argument("--param-dtype", choices=dtypes, help="dtype in which parameters are stored and stepped")
    group.add_argument(
        "--reduce-dtype",
        choices=dtypes,
        help="dtype in which gradients are summed over dp_replicate, dp_shard and, with zero, cp",
    )
    group.add_argument("--skip", metavar="PASS,...", help="leave optional passes out: see graphpar passes")
    group.add_argument(
        "--mode", choices=MODES, help="default: train if there is a loss; generate: tokens with a key-value cache"
    )
    group.add_argument(
        "--eval", action="store_true", help="trace in evaluation mode, too, so that pipeline.eval works on any model"
    )


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--out", metavar="DIR", help="where to write the program (default: ./MODELNAME-Ndev)")
    group.add_argument("--force", action="store_true", help="write where files were changed or added, and keep these")
    group.add_argument("--no-emit", action="store_true", help="plan and report, write no program")
    group.add_argument(
        "--weights",
        action=argparse.BooleanOptionalAction,
        help="write the initial weights too (default: where they take at most 1 GiB)",
    )
    group.add_argument(
        "--check-values",
        action="store_true",
        help="run the model's first step here and store its loss and gradient norm, with which train.py --check compares",
    )
    add_cache(group)
    add_json(group)
    group.add_argument("-v", "--verbose", action="store_true", help="say how long each step of the compilation took")
    group.add_argument("--html", metavar="FILE", help="write the report as a page too")
    group.add_argument(
        "--top", type=count_or_none, default=4, metavar="K", help="plans not taken to show, and why (default: 4)"
    )
    group.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help="after S seconds of search take the best plan so far; the report says how far from the best it may be",
    )
    group.add_argument(
        "--explain",
        metavar="PATTERN",
        help="say where matching modules and values are, and why; of mesh, schedule, ... or plan, what else would cost",
    )
    group.add_argument("--dump-after", metavar="STEP|all", help="print the program after a step, on standard error")
    group.add_argument(
        "--compile",
        action="store_true",
        help="take a plan whose blocks torch.compile can compile, priced with fused operators; with --run, compile them",
    )
    group.add_argument("--run", action="store_true", help="then run it here, on local processes")
    group.add_argument("--steps", type=count, metavar="K", help="optimizer steps of --run (default: 10)")
