"""What graphpar makes of the examples and of plans over all axes, levels and schedules, held against what it made before.

    python -m benchmarks.guard [--texts DIR] [--update] [CASE ...]

Of each case: a hash of each emitted file, of the plan's decisions, and the predicted seconds and bytes. They are compared with
``benchmarks/data/guard.json``, and what differs is printed; the exit status is 1 then. ``--update`` writes the file anew. ``--texts``
writes all that was hashed to a folder, to be compared with ``diff -r`` with that of another commit. Nothing is run and nothing timed:
the same commit gives the same on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphpar.ir.plan import Plan
from graphpar.parts import Parts

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "data" / "guard.json"
HARDWARE = "A100-SXM-80GB"
CLOSE = 1e-6
"""Seconds that differ by less than this share are equal: sums in another order."""


@dataclass(frozen=True)
class Case:
    """A plan for an example.

    Attributes:
        devices: of the hardware that is searched for and priced on; with ``searched`` false only priced.
    """

    name: str
    example: str
    devices: int
    pins: Mapping[str, Any] = field(default_factory=dict)
    searched: bool = False
    mode: str | None = None
    dtype: str | None = None


def _pinned(example: str, devices: int, name: str, **pins: Any) -> Case:
    return Case(f"{example} {name}", example, devices, pins)


EXAMPLES = {
    "bert": {"tp": 2}, "gpt": {"pp": 2, "tp": 2}, "gpt_dropout": {"pp": 2}, "gpt2_tiny": {"tp": 2}, "head_first": {"tp": 2},
    "llama": {"tp": 4}, "mixtral": {"dp_shard": 2, "ep": 2}, "resnet": {"pp": 2}, "resnet_batchnorm": {"dp_replicate": 2},
    "t5": {"pp": 2}, "transformer": {"tp": 2}, "two_networks": {"dp_replicate": 2}, "two_towers": {"tp": 2}, "unet": {"pp": 2},
    "vit": {"dp_shard": 2},
}  # fmt: skip

SCHEDULES = ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
COUPLED = {"allow_batch_coupling": True}

CASES = (
    *(_pinned(name, 4, "mesh", mesh=mesh, **COUPLED) for name, mesh in EXAMPLES.items()),
    *(Case(f"{name} searched", name, 4, COUPLED, searched=True) for name in ("gpt", "llama", "mixtral", "t5", "resnet_batchnorm", "vit")),
    *(_pinned("gpt", 4, schedule, mesh="pp=2", schedule=schedule, microbatch_size=1) for schedule in SCHEDULES),
    _pinned("gpt", 4, "table", table="0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"),
    _pinned("gpt", 4, "split", mesh="pp=2", split=["blocks.1"]),
    *(_pinned("llama", 4, f"zero {level}", mesh="dp_shard=4", zero=level) for level in (1, 2, 3)),
    _pinned("llama", 4, "zero 1 flat", mesh="dp_shard=2,tp=2", zero=1, zero1_by="flat"),
    _pinned("llama", 4, "zero 1 longest", mesh="dp_shard=2,tp=2", zero=1, zero1_by="longest"),
    _pinned("llama", 4, "hybrid shards", mesh="dp_replicate=2,dp_shard=2", reduce_dtype="bf16"),
    _pinned("llama", 4, "never resharded", mesh="dp_shard=2,tp=2", reshard="never"),
    _pinned("llama", 4, "resharded to 2", mesh="dp_shard=4", reshard=2),
    _pinned("llama", 4, "prefetch", mesh="dp_shard=4", prefetch="post", prefetch_distance=2),
    _pinned("llama", 4, "sharded pipeline", mesh="pp=2,dp_shard=2", reshard="always"),
    _pinned("llama", 4, "zero 1 pipeline", mesh="pp=2,dp_shard=2", zero=1, schedule="1F1B"),
    _pinned("llama", 4, "cp", mesh="cp=2"),
    _pinned("llama", 4, "cp sharded", mesh="cp=2,dp_shard=2", zero=3),
    _pinned("llama", 4, "cp and tp", mesh="cp=2,tp=2"),
    _pinned("llama", 4, "full", mesh="pp=2,tp=2", recompute="full"),
    _pinned("llama", 4, "selective", mesh="tp=2", recompute="selective"),
    _pinned("llama", 4, "budget", mesh="dp_shard=2", recompute="budget:0.5"),
    _pinned("llama", 4, "gathers", mesh="tp=4", recompute="gathers"),
    _pinned("llama", 4, "by pattern", mesh="tp=2", recompute={"model.layers.*": "full", "model.layers.0": "none"}),
    _pinned("llama", 4, "rings", mesh="tp=2", overlap_tp=True, shard_plan={"**.input_layernorm": "sequence"}),
    _pinned("llama", 4, "offload", mesh="tp=2", offload="optimizer,activations"),
    _pinned("llama", 4, "sequence", mesh="tp=2", shard_plan={"model.layers.*": "sequence"}),
    _pinned("llama", 4, "replicated", mesh="tp=2", shard_plan={"model.layers.*.self_attn": "replicate"}),
    _pinned("llama", 4, "mean of replicas", mesh="dp_replicate=2", dp_mean=True),
    _pinned("llama", 4, "compiled", mesh="pp=2", compile=True),
    _pinned("gpt_dropout", 4, "kernel", mesh="tp=2", dropout="kernel"),
    _pinned("mixtral", 4, "experts", mesh="ep=4"),
    _pinned("mixtral", 4, "experts and tp", mesh="ep=2,tp=2"),
    _pinned("mixtral", 4, "expert shards", mesh="dp_shard=2,dp_expert=2"),
    Case("llama bf16", "llama", 4, {"mesh": "dp_shard=2,tp=2"}, dtype="bf16"),
    Case("llama infers", "llama", 4, {"mesh": "tp=2"}, mode="infer"),
    Case("llama infers in stages", "llama", 4, {"mesh": "pp=2"}, mode="infer"),
    Case("gpt2_tiny generates", "gpt2_tiny", 4, {"mesh": "tp=2"}, mode="generate"),
    Case("llama one device", "llama", 1),
    Case("llama memory", "llama", 4, {"recompute": "auto", "top": 2}, searched=True),
)  # fmt: skip


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def made(example: str, cases: Sequence[Case], texts: Path | None) -> dict[str, Any]:
    """Compile the cases of one example; returns what is kept of each by its name."""
    import torch

    torch.set_num_threads(1)
    return {case.name: _made(case, texts) for case in cases}


def _made(case: Case, texts: Path | None) -> dict[str, Any]:
    import graphpar as gp
    from graphpar.cli.trace import export_file
    from graphpar.errors import GraphparError
    from graphpar.frontend.modelfile import load_model_file
    from graphpar.ir.precision import Precision

    try:
        file = load_model_file(ROOT / "examples" / f"{case.example}.py")
        program = export_file(file, case.mode, Precision.of(case.dtype, None, None))
        where = f"{case.devices}x{HARDWARE}"
        plan = (
            gp.plan(program, where, **case.pins)
            if case.searched or case.devices == 1
            else gp.plan(program, **case.pins)
        )
        price = gp.estimate(program, plan, f"{plan.mesh.size}x{HARDWARE}")
        parts = gp.partition(program, plan, model_file=f"{case.example}.py")
    except GraphparError as error:
        return {"refused": f"{error}"}
    files = dict(_files(plan, parts))
    if texts is not None:
        for name, text in files.items():
            path = texts / case.name.replace(" ", "_") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    priced = {"step_s": price.step_time_s, "peak_bytes": list(price.peak_memory_bytes)}
    priced |= {f"{name}_s": seconds for name, seconds in price.to_json()["parts_s"].items()}
    return {"files": {name: digest(text) for name, text in files.items()}, "priced": priced}


def _files(plan: Plan, parts: Parts) -> Iterator[tuple[str, str]]:
    """The emitted text by file; of ``plan.json`` the decisions and the interface, of the report nothing."""
    yield "decisions.json", json.dumps(plan.to_json(), indent=1, sort_keys=True)
    for name, text in sorted(parts.files.items()):
        if name == "plan.json":
            yield "interface.json", json.dumps(json.loads(text)["interface"], indent=1, sort_keys=True)
        elif name.endswith((".py", ".sh", ".sbatch", ".yaml")):
            yield name, text


def differences(kept: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Say what differs, a line each."""
    for name, case in found.items():
        before = kept.get(name)
        if before is None:
            yield f"{name}: new"
        elif ("refused" in before) or ("refused" in case):
            if before != case:
                yield f"{name}: {before.get('refused', 'was compiled')} -> {case.get('refused', 'is compiled')}"
        else:
            files = sorted({*before["files"], *case["files"]})
            changed = [file for file in files if before["files"].get(file) != case["files"].get(file)]
            if changed:
                yield f"{name}: other text in {', '.join(changed)}"
            for part in sorted({*before["priced"], *case["priced"]}):
                one, two = before["priced"].get(part), case["priced"].get(part)
                if not _equal(one, two):
                    yield f"{name}: {part} {one} -> {two}"


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= CLOSE * max(abs(one), abs(two))
    return bool(one == two)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, or with ``--update`` keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases, or of examples (default: all)")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="write all that is hashed to this folder")
    parser.add_argument("--update", action="store_true", help="keep what is found")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if not options.cases or {case.name, case.example} & set(options.cases)]
    by_example: dict[str, list[Case]] = {}
    for case in chosen:
        by_example.setdefault(case.example, []).append(case)
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        largest = sorted(by_example.items(), key=lambda item: -len(item[1]))
        halves = [(name, cases[at::4]) for name, cases in largest for at in range(4) if cases[at::4]]
        for made_of in pool.map(made, *zip(*((name, cases, options.texts) for name, cases in halves))):
            found |= made_of
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    lines = list(differences(kept, found))
    print("\n".join(lines) or f"{len(found)} cases are as they were.")
    if options.update:
        merged = {case.name: found.get(case.name, kept.get(case.name)) for case in CASES}
        KEPT.write_text(json.dumps(merged, indent=1) + "\n")
        return 0
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
