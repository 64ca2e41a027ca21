"""A row of published measurements, read into what can be priced and what was measured.

    {"model": {...}, "batch": {...}, "parallel": {...}, "measured": {...}}  ──read──► Row | Unpriced(why)

A field that a source does not print and that a price needs makes the row unpriced; other assumptions are in ``Row.assumed``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published_models import Experts, Latent, Shape
from benchmarks.published_sources import FIRST_FLASH, SOURCES, UNDESCRIBED, Habits, with_recipe
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link, device_named

GIB, GB = 2**30, 10**9
APART = frozenset({"tiny_model", "suspect", "repeat", "memory_only", "per_layer", "schedule_sim_only", "ranking_only"})
"""Tags of rows that the headline leaves out: launch-bound toys, slips, repetitions, and rows without a step time of a
whole run."""


HALF, OPERATORS = "half", "operators"
"""Recomputation of every second block, in time and memory half way between none and full; and of what is cheap in each block and of
every second product, as torchtitan's selective checkpointing and ``recompute="selective"`` of graphpar do."""


UNSTATED = "bf16"
"""What is assumed of rows that print two dtypes for several runs."""


class Unpriced(Exception):
    """A row that says too little, or has something without a price; the message says what."""


@dataclass(frozen=True)
class Profile:
    """Printed times of a stage, in one unit: forward, backward by input and by weight, and a transfer."""

    forward: float
    by_input: float
    by_weight: float
    transfer: float


@dataclass(frozen=True)
class Measured:
    """What was printed, or follows from it at once."""

    step_time_s: float | None = None
    memory_bytes: float | None = None
    oom: bool = False
    bubble: float | None = None
    profile: Profile | None = None


@dataclass(frozen=True)
class Row:
    """One run. ``predictions``: of following tokens, each but the first by a layer more, which ``layers`` counts, and by the head again.
    ``experts_after``: layers at the model's beginning that have no experts. ``memory_of``: the pp rank that
    was measured (-1: the last; None: the most of all)."""

    id: str
    source: str
    tags: frozenset[str]
    group: str | None
    model: str
    shape: Shape
    layers: int
    predictions: int
    experts_after: int
    cluster: Cluster
    dtype: str
    products: str
    global_batch: int
    microbatch_size: int
    degrees: Mapping[str, int]
    stages_per_rank: int
    replicas: int
    schedule: str
    zero: int
    shards: int
    sequence_parallel: bool
    recompute: str
    habits: Habits
    measured: Measured
    memory_of: int | None = None
    recompute_printed: bool = True
    assumed: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.global_batch // (self.replicas * self.microbatch_size)

    @property
    def counted(self) -> bool:
        """Whether the headline counts it."""
        return self.described and not self.tags & APART

    @property
    def described(self) -> bool:
        """Whether it is known how the runs of its source were made."""
        return self.source in SOURCES


def rows_of(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a JSON Lines file."""
    for line in file.read_text().splitlines():
        if line.strip():
            yield json.loads(line)


def read(row: Mapping[str, Any]) -> Row:
    """Read a row of the file.

    Raises:
        Unpriced: it can't be priced.
    """
    assumed: list[str] = []
    habits = SOURCES.get(row["source"], UNDESCRIBED)
    if row["source"] not in SOURCES:
        assumed.append("it ran as Megatron Core does")
    if "nonstandard_model" in row["tags"]:
        raise Unpriced("its blocks are others than its dims say")
    habits = _with_options(habits, row.get("options") or {}, _year(row))
    if container := re.search(r"\[(\S+) NeMo Container\]", row.get("source_ref") or ""):
        drops = "tokendrop" in (row.get("note") or "")
        habits = with_recipe(habits, row["model"]["name"], row["hardware"], container[1], drops)
    degrees = _degrees(row)
    batch, parallel = row["batch"], row["parallel"]
    rows = _printed(batch, "global")
    micro = batch.get("micro") or 1
    if batch.get("micro") is None:
        assumed.append("a row a microbatch")
    replicas = _printed(parallel, "dp")
    if rows % (replicas * micro):
        raise Unpriced(f"a batch of {rows} is no multiple of {replicas} replicas x {micro} rows")
    schedule, per_rank = _schedule(row, assumed)
    dtype, products = _dtypes(row, habits, assumed)
    zero = int(parallel["zero"])
    predictions = _predictions(row)
    habits = replace(habits, gradient_bytes=habits.gradient_bytes or (2 if dtype == "fp16" else 4))
    return Row(
        id=row["id"],
        source=row["source"],
        tags=frozenset(row["tags"]),
        group=row.get("rank_group"),
        model=row["model"]["name"],
        shape=_shape(row, habits),
        layers=row["model"]["layers"] + predictions - 1,
        predictions=predictions,
        experts_after=row["model"].get("dense_layers") or 0,
        cluster=_cluster(row, habits),
        dtype=dtype,
        products=products,
        global_batch=rows,
        microbatch_size=micro,
        degrees=degrees,
        stages_per_rank=per_rank,
        replicas=replicas,
        schedule=schedule,
        zero=zero,
        shards=parallel.get("zero1_group") or (replicas * degrees["cp"] if zero else 1),
        sequence_parallel=bool(parallel.get("sp")),
        recompute=_recompute(row["recompute"], assumed),
        habits=habits,
        measured=measured(row),
        memory_of=-1 if row["source"] == "megatron_ci" else None,  # its logs are of the last rank
        recompute_printed=row["recompute"] in _PRINTED,
        assumed=tuple(assumed),
    )


def measured(row: Mapping[str, Any]) -> Measured:
    """Read what was measured in a row: printed, or derived from what was printed."""
    found, derived = row["measured"], row.get("derived") or {}
    times = (found.get("step_time_s"), derived.get("step_time_s"), derived.get("step_time_s_from_flops"))
    memory = (
        found["peak_mem_gib"] * GIB
        if "peak_mem_gib" in found
        else found["peak_mem_gb"] * GB
        if "peak_mem_gb" in found
        else None
    )
    printed = found.get("profile_ms")
    return Measured(
        step_time_s=next((time for time in times if time is not None), None),
        memory_bytes=memory,
        oom=bool(found.get("oom")),
        bubble=found.get("bubble_rate"),
        profile=None if printed is None else Profile(printed["TF"], printed["TB"], printed["TW"], printed["Tcomm"]),
    )


def _printed(table: Mapping[str, Any], name: str) -> int:
    if table.get(name) is None:
        raise Unpriced(f"{name} is not printed")
    return int(table[name])


def _degrees(row: Mapping[str, Any]) -> dict[str, int]:
    parallel = row["parallel"]
    degrees = {axis: _printed(parallel, axis) for axis in ("pp", "tp", "cp")}
    degrees["ep"] = parallel.get("ep") or 1
    used = degrees["pp"] * degrees["tp"] * degrees["cp"] * _printed(parallel, "dp")
    if used != (count := _printed(row, "gpus")):
        raise Unpriced(f"its degrees take {used} devices, but {count} are printed")
    return degrees


# ---- the model -------------------------------------------------------------------------------------------------

_LATENT = re.compile(r"MLA q_lora(\d+) kv_lora(\d+) nope(\d+) rope(\d+) v(\d+)")


def _shape(row: Mapping[str, Any], habits: Habits) -> Shape:
    model = row["model"]
    gated = model["mlp"] == "swiglu"
    attention = model.get("attn") or ""
    found = _LATENT.fullmatch(attention)
    latent = Latent(*map(int, found.groups())) if found else None
    if attention and latent is None:
        raise Unpriced(f"attention is {attention!r}")
    experts = None
    if model.get("experts"):
        experts = Experts(
            model["experts"],
            model["topk"],
            model.get("moe_ffn") or _printed(model, "ffn"),
            model.get("shared_experts") or 0,
        )
    options = row.get("options") or {}
    block = 128 * row["parallel"]["tp"]  # Megatron-LM pads to a multiple; of what others do it changes next to nothing
    return Shape(
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=model.get("head_dim") or model["hidden"] // model["heads"],
        ffn=model.get("dense_ffn") or _printed(model, "ffn"),
        vocab=-(-(model.get("vocab") or habits.vocab) // block) * block,
        seq=row["batch"]["seq"],
        gated=gated,
        rotary=gated or options.get("--position-embedding-type") == "rope",
        rms=gated or options.get("--normalization") == "RMSNorm",
        biases=habits.biases and not gated,
        tied=model.get("tied", habits.tied and not gated),
        experts=experts,
        latent=latent,
        attention=habits.attention,
        dropout=0.0 if gated else habits.dropout,
        loss=habits.loss,
        merged=habits.merged,
        composed_norm=_composes_norm(options, habits),
        upcast_norm=habits.upcast_norm,
    )


def _predictions(row: Mapping[str, Any]) -> int:
    """How many tokens are predicted at each place: DeepSeek-V3 has a module for a second one (arXiv 2412.19437, section 2.2), which recipes
    of Megatron-Bridge train unless a row says that they don't: their flops over their tokens have it."""
    return 1 + (row["model"]["name"].startswith("DeepSeek-V3") and "w/o MTP" not in (row.get("note") or ""))


def _composes_norm(options: Mapping[str, Any], habits: Habits) -> bool:
    """Whether norms are plain operators: of rows that name their kernels without one, and where nothing compiles those of a source."""
    if "kernel" in options:
        return "RMS" not in options["kernel"]
    return habits.upcast_norm and options.get("compile") is False


def _year(row: Mapping[str, Any]) -> int | None:
    """The year in the name of what the row is from; None where it has none."""
    found = re.search(r"20[12]\d", row.get("source_ref") or "")
    return int(found[0]) if found else None


def _with_options(habits: Habits, options: Mapping[str, Any], year: int | None) -> Habits:
    """What the options of the row, and its year, say about kernels and overlap."""
    kernel = options.get("kernel")
    if kernel is not None:
        attention = {"torch": "composed", "fused": "softmax"}.get(kernel, "flash")
        habits = replace(habits, attention=attention, attention_rates=FIRST_FLASH if "v1" in kernel else {})
    if "compile" in options:
        habits = replace(habits, fused=options["compile"], overlap_tp=bool(options.get("async_tp")))
        if options["compile"] and habits.compiles_loss_from is not None and (year or 0) >= habits.compiles_loss_from:
            habits = replace(habits, loss="kernel")
    if options.get("fsdp_mixed") == "PURE":
        habits = replace(habits, gradient_bytes=2, stops_early=False)
    if options.get("--disable-bias-linear"):
        habits = replace(habits, biases=False)
    if options.get("--transformer-impl") == "local":
        habits = replace(habits, attention="softmax")
    if options.get("--overlap-grad-reduce"):
        habits = replace(habits, overlap_gradients=True)
    return habits


def _dtypes(row: Mapping[str, Any], habits: Habits, assumed: list[str]) -> tuple[str, str]:
    """Of parameters, and of what products take; where the row does not say, by its date."""
    name = row["precision"].lower()
    if "fp4" in name:
        raise Unpriced("products of 4 bits have no price")
    if "fp8" in name or "float8" in name:
        return "bf16", "fp8"
    if name.startswith(("fp16/bf16", "bf16/fp16")):
        date = re.search(r"date=(\d\d-\d\d)", row.get("note") or "")
        if habits.bf16_from is not None and date is not None:
            dtype = "bf16" if date[1] >= habits.bf16_from else "fp16"
            return dtype, dtype
        assumed.append(UNSTATED)
        return "bf16", "bf16"
    return ("fp16", "fp16") if name.startswith("fp16") else ("bf16", "bf16")


# ---- the plan --------------------------------------------------------------------------------------------------

_SCHEDULES = {
    "none": "1F1B", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2",
    "zb-1p": "ZB-1p", "zb-2p": "ZB-2p",
}  # fmt: skip


def _schedule(row: Mapping[str, Any], assumed: list[str]) -> tuple[str, int]:
    """Its name, and stages a rank."""
    pp, per_rank = row["parallel"]["pp"], row["parallel"].get("vpp")
    given = row["schedule"] or ("interleaved-1f1b" if (per_rank or 1) > 1 else "1f1b")
    name = given.partition("(")[0]
    if name not in _SCHEDULES:
        raise Unpriced(f"the schedule is {given!r}")
    if name != "interleaved-1f1b" or pp == 1:
        return ("1F1B" if pp == 1 else _SCHEDULES[name]), 1
    if per_rank is None:
        per_rank = row["model"]["layers"] // pp
        assumed.append("a layer a stage")
    return (_SCHEDULES[name], per_rank) if per_rank > 1 else ("1F1B", 1)


_PRINTED = ("none", "selective", "full", "selective_op", "selective_layer(every 2nd)")


def _recompute(given: str | None, assumed: list[str]) -> str:
    if given in ("none", "selective", "full"):
        return given
    if given is None or given in ("unspecified", "none(assumed)"):
        assumed.append("nothing is recomputed")
        return "none"
    if given == "selective(assumed)":
        assumed.append("scores are recomputed")
        return "selective"
    if given == "selective_op":
        return OPERATORS
    if given != "selective_layer(every 2nd)":
        raise Unpriced(f"recomputation is {given!r}")
    return HALF


# ---- the cluster -----------------------------------------------------------------------------------------------


def _cluster(row: Mapping[str, Any], habits: Habits) -> Cluster:
    try:
        device = device_named(row["hardware"].partition("(")[0])
    except GraphparError as error:
        raise Unpriced(str(error)) from None
    count = row["gpus"]
    usual = 16 if "DGX-2" in row["hardware"] else device.devices_per_node or count
    nodes = -(-count // usual)
    if count % nodes:
        raise Unpriced(f"{count} devices fill no nodes of {usual}")
    cluster = Cluster.of(device, nodes, count // nodes)
    if habits.node_gbps is None:
        return cluster
    return replace(cluster, inter_node=Link(cluster.inter_node.latency_s, habits.node_gbps * GB / usual))
