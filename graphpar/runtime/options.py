"""The options of a plan, each a record: a field of :class:`Decisions` or :class:`Request`.

    field ──► compile --flag, gp.plan(keyword=...), completion
          ──► plan.json, Plan and Manifest, diff, the report's decisions        (fields of Decisions)
          ──► docs/reference/command_line.md, docs/reference/plan.md

A field's declaration says all that is known of an option but what it does: its type, choices and default, what help and docs say, and
when it is legal. Values are checked one by one by :func:`checked`, and against each other and a mesh by :func:`check_decisions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpar.runtime.axes import STATE_AXES
from graphpar.runtime.errors import GraphparError, near_match
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import (
    ANY_COUNT,
    AUTO,
    COUNT,
    DROPOUTS,
    DTYPE_NAMES,
    EDGES,
    EITHER,
    FILE,
    FLAG,
    FP8_RECIPES,
    GENERATE,
    LEVEL,
    OFFLOADED,
    PART,
    PATTERNS,
    PREFETCH,
    RECOMPUTED,
    RESHARD,
    RESHARDED,
    ROOM,
    SCHEDULE,
    SECONDS,
    SEQ,
    SHOWN,
    SPLIT,
    STAGES,
    TEXT,
    WHOLE,
    ZERO1_BY,
    Kind,
    Recompute,
    Seq,
    choice,
    share_of,
)

# ---- what is legal -------------------------------------------------------------------------------------------------


def level_of(mesh: Mesh, level: int | None) -> int:
    """Return the ZeRO level on ``mesh``: as given, else 3 where dp_shard has several ranks."""
    return (3 if mesh.dp_shard > 1 else 0) if level is None else level


def gathers_again(pp: int, level: int, reshard: str | int | None) -> bool:
    """Return whether units are gathered for their backward apart from their forward."""
    return level == 3 and reshard != "never" and not (pp > 1 and reshard in (None, "default"))


def prefetching(
    pp: int, level: int, reshard: str | int | None, prefetch: str | None, distance: int | None
) -> tuple[str | None, int]:
    """Return how a plan gathers ahead of a backward: as given, else one unit before the backward of the one before it."""
    if not gathers_again(pp, level, reshard):
        return None, 0
    return prefetch or PREFETCH[0], 0 if prefetch == "none" else distance or 1


def numbered(recompute: Recompute | None) -> str | None:
    """Return the first kind of recomputation that says by numbers of operators what runs again; None where none does."""
    kinds = recompute.values() if isinstance(recompute, Mapping) else (recompute,)
    return next((kind for kind in kinds if isinstance(kind, str) and share_of(kind) is not None), None)


def _legal_global_batch(rows: int, given: Decisions, mesh: Mesh, mode: str) -> None:
    if rows % mesh.replicas:
        shown = " x ".join(f"{axis}={degree}" for axis, degree in mesh.replica_degrees.items())
        raise GraphparError(
            f"A global batch of {rows} does not divide over {shown}; each replica takes as many rows. Degrees that do: "
            f"{', '.join(divisors(rows))}."
        )


def _legal_microbatch_size(size: int, given: Decisions, mesh: Mesh, mode: str) -> None:
    if given.global_batch is None or given.global_batch % mesh.replicas:
        return
    rows = given.global_batch // mesh.replicas
    if rows % size:
        whose = (
            f"The {rows} rows of a replica do" if mesh.replicas > 1 else f"A global batch of {given.global_batch} does"
        )
        raise GraphparError(
            f"{whose} not divide into microbatches of {size}; sizes that do: {', '.join(divisors(rows))}."
        )


def divisors(rows: int) -> list[str]:
    """Return the numbers that divide ``rows``, as text."""
    return [str(number) for number in range(1, rows + 1) if rows % number == 0]


def _legal_dp_mean(mean: bool, given: Decisions, mesh: Mesh, mode: str) -> None:
    if not mean:
        return
    if mesh.replicas == 1:
        raise GraphparError(
            "dp_mean takes the mean of the replicas' own losses, which needs mesh dp_replicate=2 or more, or dp_shard."
        )
    _for_training("dp_mean", mode)


def _for_training(name: str, mode: str) -> None:
    if mode != "train":
        raise GraphparError(f"{name} is for training; this program is for inference, so leave it out.")


def _legal_zero(level: int, given: Decisions, mesh: Mesh, mode: str) -> None:
    if mesh.shards == 1:
        if level:
            raise GraphparError(
                f"zero={level} shards state over dp_shard and cp, which have one rank; give mesh dp_shard=2 or more, or cp=2."
            )
    elif mesh.dp_shard > 1 and level == 0:
        raise GraphparError(
            f"Mesh dp_shard={mesh.dp_shard} with zero=0 shards nothing; use dp_replicate={mesh.dp_shard}, or zero=1, 2 or 3."
        )
    elif level and mode != "train":
        raise GraphparError(
            f"Mesh {mesh.state_text} with zero={level} shards what training stores; for inference use tp, or dp_replicate."
        )


def _legal_zero1_by(by: str, given: Decisions, mesh: Mesh, mode: str) -> None:
    if given.zero != 1:
        raise GraphparError(f"zero1_by={by} says how ZeRO-1 divides the state; give zero=1 with it.")


def _legal_reshard(reshard: str | int, given: Decisions, mesh: Mesh, mode: str) -> None:
    level = level_of(mesh, given.zero)
    if reshard == RESHARD[0]:
        return
    if mesh.shards == 1 or level < 2:
        raise GraphparError(
            f"reshard={reshard} requires sharded parameters; with {mesh.state_text} and zero={level} they are not sharded. Give "
            "mesh dp_shard=2 or more, or cp=2, and zero=3."
        )
    if level < 3 and reshard != "never":
        raise GraphparError(
            f"reshard={reshard} requires zero=3: zero={level} keeps gathered parameters for the full step."
        )
    others = [f"{axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1 and axis not in STATE_AXES]
    if not isinstance(reshard, int):
        return
    if others:  # each unit would make its groups on the ranks of one shard group alone, and hang
        raise GraphparError(
            f"reshard={reshard} with {', '.join(others)} and {mesh.state_text} is not supported yet; use reshard=always."
        )
    if not 1 < reshard < mesh.shards or mesh.shards % reshard:
        between = [str(number) for number in range(2, mesh.shards) if mesh.shards % number == 0]
        raise GraphparError(
            f"reshard={reshard} must be a proper divisor of {mesh.state_text}: {', '.join(between) or 'it has none'}."
        )


def _legal_units(units: tuple[str, ...], given: Decisions, mesh: Mesh, mode: str) -> None:
    level = level_of(mesh, given.zero)
    if mesh.shards == 1 or level < 2:
        raise GraphparError(
            f"units says what ZeRO-2 and 3 gather together; with {mesh.state_text} and zero={level} nothing is gathered. Give mesh "
            "dp_shard=2 or more, or cp=2, and zero=2 or 3."
        )


def _legal_prefetch(prefetch: str, given: Decisions, mesh: Mesh, mode: str) -> None:
    _gathers("prefetch", given, mesh)


def _legal_prefetch_distance(distance: int, given: Decisions, mesh: Mesh, mode: str) -> None:
    if not distance:
        return
    _gathers("prefetch_distance", given, mesh)
    if given.prefetch == "none":
        raise GraphparError(f"prefetch=none gathers nothing ahead; leave prefetch_distance={distance} out.")


def _gathers(name: str, given: Decisions, mesh: Mesh) -> None:
    if not gathers_again(mesh.pp, level_of(mesh, given.zero), given.reshard):
        raise GraphparError(
            f"{name}={getattr(given, name)} requires ZeRO-3 that gathers for the backward: zero=3 over dp_shard or cp, and under a "
            "pipeline reshard=always."
        )


def _legal_overlap_tp(overlap: bool, given: Decisions, mesh: Mesh, mode: str) -> None:
    if not overlap:
        return
    if (kind := numbered(given.recompute)) is not None:
        raise GraphparError(
            f"recompute={kind} is incompatible with overlap_tp, which runs operators in pieces; take gathers, selective or full, or leave "
            "overlap_tp out."
        )
    if mesh.tp == 1:
        raise GraphparError("overlap_tp requires tensor parallelism; give mesh tp=2 or more, or leave it out.")


def _legal_on_tp(name: str) -> Callable[[bool, Decisions, Mesh, str], None]:
    def legal(value: bool, given: Decisions, mesh: Mesh, mode: str) -> None:
        if value and mesh.tp == 1:
            raise GraphparError(f"{name} says how tp shards; give mesh tp=2 or more, or leave it out.")
        if value and mode == GENERATE:
            raise GraphparError(f"{name} is for training and inference; generation computes a token at a time.")

    return legal


def _legal_offload(offload: tuple[str, ...], given: Decisions, mesh: Mesh, mode: str) -> None:
    if not offload:
        return
    _for_training("offload", mode)
    kinds = given.recompute.values() if isinstance(given.recompute, Mapping) else [given.recompute]
    other = next((kind for kind in kinds if kind not in (None, AUTO, *WHOLE)), None)
    if "activations" in offload and other is not None:
        raise GraphparError(
            f"offload=activations is unsupported with recompute={other}; take recompute={' or '.join(WHOLE)}."
        )
    level = level_of(mesh, given.zero)
    if "params" in offload and (mesh.shards == 1 or level < 2):
        raise GraphparError(
            f"offload=params stores shards of parameters and gradients on the host; with {mesh.state_text} and zero={level} they are not "
            "sharded. Give mesh dp_shard=2 or more, or cp=2, and zero=2 or 3; or take offload=optimizer."
        )


def _legal_reduce_dtype(dtype: str, given: Decisions, mesh: Mesh, mode: str) -> None:
    _for_training("reduce_dtype", mode)
    if mesh.replicas == 1 and (mesh.shards == 1 or not level_of(mesh, given.zero)):
        raise GraphparError(
            f"reduce_dtype={dtype} is for sums of gradients over dp_replicate and dp_shard (and cp with a ZeRO level); mesh "
            f"{mesh.text} has none, so leave it out."
        )


def _legal_expert_room(room: float, given: Decisions, mesh: Mesh, mode: str) -> None:
    if mode == GENERATE:
        raise GraphparError(
            "expert_room is for training and inference; generation computes a token at a time, so leave it out."
        )


def _legal_seq(seq: Seq, given: Decisions, mesh: Mesh, mode: str) -> None:
    if mode == GENERATE:
        raise GraphparError(
            "seq: a program for generation takes prompts of any lengths, up to that of the example inputs; leave it out."
        )


# ---- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name and type.

    Attributes:
        group: its group in ``compile --help``; none: for Python alone.
        help: a line for the command line.
        about: what Python's help says, where that is more.
        usual: the value of a plan for which it was not given; where that is searched, of a plan of one device.
        flag: its name on the command line, where that is another one.
        metavar: what help calls its value.
        legal: raises GraphparError where a value can't be, beside other decisions, on a mesh, in a mode.
        over: the axes of the mesh that ``legal`` asks for; where the search may give them several ranks it takes them to have these.
        beside_plan: may be given together with a plan file.
    """

    kind: Kind
    help: str
    group: str = ""
    about: str = ""
    usual: Any = None
    flag: str = ""
    metavar: str = ""
    legal: Callable[[Any, Decisions, Mesh, str], None] | None = None
    over: tuple[str, ...] = ()
    beside_plan: bool = False


def option(kind: Kind, help: str, **known: Any) -> Any:
    """Declare an option as a field, which is None where it is left open."""
    return field(default=None, metadata={"option": Option(kind, help, **known)})


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The options that a plan decides: of a request what is given, None what is left to graphpar; of a plan all of them."""

    # fmt: off
    schedule: str | Any = option(
        SCHEDULE, "1F1B, GPipe, Interleaved1F1B, ZBVZeroBubble and others", group="pins", metavar="NAME", usual="GPipe",
    )
    global_batch: int | Any = option(
        COUNT, "global batch (default: that of the example inputs)", group="workload", flag="--batch", metavar="B", usual=1,
        about="rows of the global batch; by default those of the example inputs.", legal=_legal_global_batch,
    )
    microbatch_size: int | Any = option(
        COUNT, "rows of a microbatch", group="pins", metavar="M", usual=1, legal=_legal_microbatch_size,
    )
    allow_batch_coupling: bool | Any = option(
        FLAG, "accept operators that mix examples, such as BatchNorm", group="pins", usual=False,
        about="accept operators that mix examples (BatchNorm takes each microbatch's statistics).", beside_plan=True,
    )
    dp_mean: bool | Any = option(
        FLAG, "the loss is the mean of the replicas' own losses, as in DDP, not that of the global batch", group="pins", usual=False,
        about="the loss is the mean of the replicas' own losses, each with its own denominators, as in DDP; by default it is that "
        "of the global batch.", legal=_legal_dp_mean, over=("dp_replicate",),
    )
    dropout: str | Any = option(
        choice(*DROPOUTS), "attention masks: those of the unpartitioned model (exact, the default), or of torch's fused kernel (kernel)",
        group="pins", usual=DROPOUTS[0], about='how attention draws its dropout: ``"exact"``, the masks of the unpartitioned model on any '
        'mesh, computed without a fused kernel; or ``"kernel"``, torch\'s own kernel and generator: faster and without the scores in '
        "memory, but other random draws on each mesh. Dropout outside of attention is exact in any case.",
    )
    zero: int | Any = option(
        LEVEL, "which state ranks of dp_shard and cp share: 1 optimizer state, 2 and 3 (default with dp_shard) all of it",
        group="pins", usual=0, about="which state each rank of the mesh's ``dp_shard`` and ``cp`` axes holds a shard of: 1 is the "
        "optimizer's, 2 and 3 are parameters, gradients and optimizer state; 3, the default with ``dp_shard``, gathers parameters again "
        "for the backward.", legal=_legal_zero, over=("dp_shard",),
    )
    zero1_by: str | Any = option(
        choice(*ZERO1_BY), "how ZeRO-1 divides it: full parameters in runs (default) or the largest first, or equal slices",
        group="pins", about='how ZeRO-1 divides the optimizer\'s work: full parameters in contiguous runs '
        '(``"contiguous"``), or the largest first (``"longest"``), or equal slices (``"flat"``).',
        legal=_legal_zero1_by, over=("dp_shard",),
    )
    reshard: str | int | Any = option(
        RESHARDED, "when gathered parameters are freed: default, always, never, or N: after a forward, down to shards over N ranks",
        group="pins", metavar="WHEN", usual=RESHARD[0], about='when gathered parameters are freed: ``"default"`` (after each forward and '
        'backward; under a pipeline once a step), ``"always"``, ``"never"`` between forward and backward, or a number: after a forward '
        "down to shards over this number of ranks.", legal=_legal_reshard, over=("dp_shard",),
    )
    units: tuple[str, ...] | None = option(
        PATTERNS, "which modules ZeRO-2 and 3 gather together: patterns, A+B for several (default: embedding, each block, norm and head)",
        group="pins", metavar="PATTERN,...", about='which modules ZeRO-2 and 3 gather and reduce together, by patterns over their paths: '
        '``"layers.*,norm+head"`` or a list. Each module that matches is a unit, all that match ``A+B`` are one, and what no unit holds is '
        "gathered with the stage. By default units are the blocks, and large modules before and after them.",
        legal=_legal_units, over=("dp_shard",),
    )
    prefetch: str | None = option(
        choice(*PREFETCH), "when ZeRO-3 gathers a block for its backward: before the backward of the block before it (default), after it, "
        "or when needed", group="pins", about="when ZeRO-3 gathers a unit's parameters for its backward: before the backward of the unit "
        'before it computes (``"pre"``, the default; in the forward, too), after it (``"post"``), or when it is needed (``"none"``).',
        legal=_legal_prefetch, over=("dp_shard",),
    )
    prefetch_distance: int | Any = option(
        COUNT, "how many blocks are gathered ahead (default: 1)", group="pins", metavar="K", usual=0,
        about="how many units are gathered ahead, 1 by default.", legal=_legal_prefetch_distance, over=("dp_shard",),
    )
    recompute: Recompute | Any = option(
        RECOMPUTED, "what blocks run again in the backward: none, pointwise, gathers, gathers+pointwise, selective, full, "
        "budget:0.6, auto, or by pattern: 'layers.*=full,layers.0=none' (default: searched with the mesh; none with a complete mesh and no "
        "cluster)",
        group="pins", metavar="KIND", usual="none", about='what blocks run again in the backward instead of saving it: ``"none"``, '
        '``"full"`` (all but their inputs), ``"pointwise"`` (results of pointwise operators and norms that products read), ``"gathers"`` '
        '(all-gathered tensors, gathered again from their shards), ``"gathers+pointwise"`` (both), ``"selective"`` (cheap operators: not '
        'collectives, attention, and every second product), or ``"budget:0.6"`` (the cheapest operators for their bytes, '
        "until a block saves this share of them); or one of these by pattern over the paths of blocks, the last that matches: "
        '``{"layers.*": "full", "layers.0": "none"}``. ``"auto"``: the least that fits in the devices\' memory, for each block if the '
        "mesh is searched; then it is also the default, unless the model itself uses ``torch.utils.checkpoint``.",
    )
    overlap_tp: bool | Any = option(
        EITHER, "send tp gathers and scatters in pieces, overlapped with products, if the sequence is sharded between them (default: if "
        "it is predicted to be faster on a cluster)", group="pins", usual=False, about="gathers before products and "
        "reduce-scatters after them, if tp shards the sequence between them, are done in pieces: one is multiplied while the next is sent. "
        "By default if it is predicted to be faster on a cluster; a CPU hides nothing.", legal=_legal_overlap_tp, over=("tp",),
    )
    sp: bool | None = option(
        EITHER, "tp shards norms and residuals over the sequence, or not (default: searched)", group="pins",
        about="with tp, whether norms and residuals between column- and row-parallel products are sharded over the sequence (sequence "
        "parallelism), or replicated. By default the cheaper of both, by the search.", legal=_legal_on_tp("sp"), over=("tp",),
    )
    loss_parallel: bool | None = option(
        EITHER, "tp shards the cross entropy over the vocabulary, or gathers the logits (default: searched)", group="pins",
        about="with tp, whether cross entropies take logits that are sharded over the vocabulary, or never do. By default the cheaper of "
        "both, by the search.", legal=_legal_on_tp("loss_parallel"), over=("tp",),
    )
    offload: tuple[str, ...] | Any = option(
        OFFLOADED, "what is stored in host memory: optimizer (its state), activations (of blocks), params (shards of parameters, gradients "
        "and the optimizer's state), or several: optimizer,activations",
        group="pins", metavar="WHAT", usual=(), about='what is stored in the memory of each device\'s host: ``"optimizer"`` (its state, '
        'which comes to the device a piece at a time to be updated), ``"activations"`` (what blocks save between forward and backward), '
        '``"params"`` (with ``zero`` 2 and 3 shards of parameters and gradients, and the optimizer\'s state: the host updates them), or '
        'several, as ``"optimizer,activations"`` or a list. On a CPU it does nothing.', legal=_legal_offload, over=("dp_shard",),
    )
    expert_room: float | None = option(
        ROOM, "room for F times the mean number of rows of a rank's experts, so that no layer waits for the device; batches with more "
        "are computed again (default: exact sizes, for which each layer waits)", group="pins", metavar="F",
        about="room for this number of times the mean rows of a rank's experts, 1 or more, so that no layer waits for the device. A batch "
        "in which a rank has more rows is computed again with exact sizes, so results are the same. By default each layer with divided "
        "experts waits for the number of its rows.", legal=_legal_expert_room,
    )
    compile: bool | None = option(
        EITHER, "torch.compile compiles the blocks of the program, which are priced with fused operators, or not (default: on GPUs, where "
        "it can)", group="output", about="whether ``torch.compile`` compiles blocks, but those that gather again in the backward. By "
        "default on GPUs, except for generation, packed attention, schedules that split backwards, ``dropout='kernel'`` and offloaded "
        "activations. True is refused with the last three, and leaves such schedules out of the search. Prices are those of fused "
        "operators; memory is counted as without.", beside_plan=True,
    )
    seq: Seq | None = option(
        SEQ, "lengths of the sequence that the program takes, such as 128..4096, or 128,512,4096 for a model that is another one at "
        "other lengths; priced at the longest (default: that of the example inputs)", group="workload", metavar="A..B",
        about="must equal that of ``export``.", legal=_legal_seq,
    )
    dtype: str | Any = option(
        choice(*DTYPE_NAMES), "dtype in which the model computes; its parameters stay in fp32 (default: on GPUs bf16 for training, else "
        "that of the model)", group="workload", usual="fp32", about="must equal that of ``export``.",
    )
    param_dtype: str | Any = option(
        choice(*DTYPE_NAMES), "dtype in which parameters are stored and updated", group="workload", usual="fp32",
        about="must equal that of ``export``.",
    )
    output_dtype: str | None = option(
        choice(*DTYPE_NAMES), "dtype of the model's outputs, with a dtype of 16 bits (default: fp32 for loss_fn, else as computed)",
        group="workload", about="must equal that of ``export``.",
    )
    keep_fp32: tuple[str, ...] | None = option(
        PATTERNS, "modules that compute in fp32 and keep their parameters in it, with a dtype of 16 bits: '**.norm'", group="workload",
        metavar="PATTERN,...", about="must equal that of ``export``.",
    )
    fp8: tuple[str, ...] | None = option(
        PATTERNS, "modules whose linear layers multiply in 8 bits, with --dtype bf16: '**'; without the head, routers and adapters, "
        "unless by their own paths", group="workload", metavar="PATTERN,...", about="must equal that of ``export``.",
    )
    fp8_recipe: str | None = option(
        choice(*FP8_RECIPES), "how layers multiply in 8 bits: with a scale of each row, or of each 32 values, and so for "
        "gradients of weights, too (default: rowwise)", group="workload", about="must equal that of ``export``.",
    )
    reduce_dtype: str | None = option(
        choice(*DTYPE_NAMES), "dtype in which gradients are summed over dp_replicate, dp_shard and, with zero, cp", group="workload",
        about="the dtype in which gradients are summed over dp_replicate, dp_shard and, with zero, cp; by default that of the parameters.",
        legal=_legal_reduce_dtype, over=("dp_replicate", "dp_shard"),
    )
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Request(Decisions):
    """What a user asks of a plan: the decisions that are given, and how the others are to be found."""

    # fmt: off
    cluster: Any = field(default=None, kw_only=False, metadata={"option": Option(
        TEXT, "which devices: 8xH100-SXM-80GB, 2x8xA100 (nodes first), or a file (TOML, or a profile of calibrate)",
        group="devices", metavar="NAME|FILE", about='the hardware, as a :class:`Cluster`, by name (``"2xH100"``) or file; or '
        "how many devices of this machine's kind. The axes that ``mesh`` leaves out are searched (cp where rows are fewer than devices "
        "or nothing fits otherwise, dp_expert and ep where there are experts), and so are the ZeRO level, the schedule, the microbatch "
        "size and the recomputation: the fastest plan that fits is taken.",
    )})
    devices: int | None = option(
        COUNT, "how many devices (default: 1)", group="devices", metavar="N", about="how many devices, as a keyword.",
    )
    mesh: Any = option(
        TEXT, "degrees of mesh axes; alone, they give the device count", group="pins", metavar="pp=2,tp=2",
        about='degrees of axes, e.g. ``{"pp": 4}`` or ``"pp=4"``. Without a cluster or a number of devices, the other axes are 1 and the '
        "schedule and the microbatches have defaults.",
    )
    table: Any = option(
        FILE, "a schedule of your own, a row a rank: 0F0,0F1,0B0,0B1", group="pins", flag="--schedule-table", metavar="FILE.csv",
        about="a custom schedule, one row for each rank: ``0F0,0F1,0B0,0B1``; CSV as text, or the :class:`~pathlib.Path` of a file.",
    )
    split: Any = option(
        SPLIT, "modules that begin a stage (PATH:end: that end one; 'layers.*': evenly)", group="pins", metavar="PATH[,PATH...]",
        about='split points, e.g. ``["layers.4"]``, ``[{"layers.3": "end"}]`` or ``{"layers.3": SplitPoint.END}``; ``["layers.*"]`` '
        "spreads the layers evenly; a function of the program returns such a list. By default ``pipe_split()`` calls in the model's "
        "forward are used; without them stages are searched (with a mesh alone, balanced by flops).",
    )
    stages: Sequence[Sequence[str]] | None = option(STAGES, "instead of split points, the modules of each stage")
    layers_per_stage: int | None = option(
        COUNT, "split into stages of this many layers", group="pins", metavar="N",
        about="instead of split points, how many layers a stage has.",
    )
    edge_layers: tuple[int, int] | None = option(
        EDGES, "what the parts around the layers count as (default 1,1)", group="pins", metavar="IN,OUT",
        about="how many layers the parts before and after the layers count as.",
    )
    shard_plan: Any = option(
        FILE, "how weights and activations are sharded: patterns in a .json, .toml or .py file", group="pins", metavar="FILE",
        about="specs of parameters and of inputs and outputs of modules, by pattern; see :mod:`graphpar.annotations.patterns`; or the "
        ":class:`~pathlib.Path` of a file.",
    )
    loss_chunk: int | Any = option(
        ANY_COUNT, "tokens of which the head and the loss are computed at once; 0: all (default: where fewer take less memory)",
        group="pins", metavar="TOKENS", about="tokens of which the head (the product that gives logits) and the loss are computed at once, "
        "forward and gradients, so that the logits of all tokens never exist; 0 for all of them. By default a power of two from 1024 on, "
        "where that takes less memory.",
    )
    top: int | Any = option(
        ANY_COUNT, f"number of other plans to show, and why they lost (default: {SHOWN})", group="output", metavar="K", beside_plan=True,
        about="how many of the other plans ``plan.found`` holds.",
    )
    memory_headroom: float | None = option(
        PART, "share of a device's memory that plans leave free (default: 0.05 on GPUs)", group="devices", metavar="SHARE",
        about="the share of a device's memory that plans leave free, for what is not predicted; by default 0.05 on GPUs, of which "
        "communicators and the allocator's overhead are no part.",
    )
    time_limit: float | None = option(
        SECONDS, "after S seconds of search take the best plan so far; the report says how far from the best it may be", group="output",
        metavar="S", about="seconds after which a search takes the best plan so far; ``plan.found.gap`` says how far from the best it may "
        "be.",
    )
    # fmt: on


# ---- all of them ---------------------------------------------------------------------------------------------------


def options_of(record: type[Decisions]) -> dict[str, Option]:
    """Return the options of a class by name, its own first."""
    inherited = {
        each.name for base in record.__bases__ if dataclasses.is_dataclass(base) for each in dataclasses.fields(base)
    }
    found = sorted(dataclasses.fields(record), key=lambda each: each.name in inherited)
    return {each.name: each.metadata["option"] for each in found if "option" in each.metadata}


def flag_of(name: str, known: Option) -> str:
    """Return the name of an option on the command line."""
    return known.flag or f"--{name.replace('_', '-')}"


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of options one by one; None is one that is left open.

    Raises:
        GraphparError: there is no such option, or a value is of a wrong type, out of range or unknown.
    """
    known = options_of(Request)
    for name in given:
        if name not in known:
            raise GraphparError(f"A plan has no option {name!r}.{near_match(name, known)}")
    return {name: None if value is None else known[name].kind.check(name, value) for name, value in given.items()}


def check_decisions(given: Decisions, mesh: Mesh, mode: str = "train", searched: Collection[str] = ()) -> None:
    """Check the decisions of a request or a plan against each other and the mesh.

    Args:
        searched: the axes whose degrees are left open; an option is legal where it is with two ranks on those that it is over.

    Raises:
        GraphparError: one can't be.
    """
    for name, known in options_of(Decisions).items():
        if (value := getattr(given, name)) is None:
            continue
        if value != known.usual:
            known.kind.check(name, value)
        if known.legal is not None:
            enough = {axis: _enough(given) for axis in known.over if axis in searched}
            known.legal(value, given, dataclasses.replace(mesh, **enough), mode)


def _enough(given: Decisions) -> int:
    """Return a degree of an axis with which most is legal."""
    return 2 * given.reshard if isinstance(given.reshard, int) and given.reshard > 1 else 2


def decided(given: Decisions) -> dict[str, Any]:
    """Return the decisions as a plan has them, by name: the usual value of what is left open."""
    return {
        name: known.usual if (value := getattr(given, name)) is None else value
        for name, known in options_of(Decisions).items()
    }
