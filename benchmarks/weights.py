"""Weights that are sent to another program of the same processes, compared with a checkpoint that it loads.

    python -m benchmarks.weights [--json] [--rounds 5] [--disk FOLDER]

Four local processes hold a GPT of 206 M parameters as a training program, in fp32, and as one that infers. "over least" are the bytes of
all messages over the fewest that could be. The first transfer includes what ranks must tell each other; the others are medians. A
checkpoint is saved and then loaded, from the page cache where the disk has one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import graphpar as gp
from benchmarks import gpt
from benchmarks.snapshots import parsed
from graphpar.runtime import Pipeline, Ranks, start
from graphpar.runtime.launching.launch import torchrun

DEVICES, TIMEOUT_S = 4, 900
SIZE = {"VOCAB": 32768, "WIDTH": 1024, "LAYERS": 11, "LENGTH": 64}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp 2, tp 2 to tp 4, bf16": ({"mesh": {"pp": 2, "tp": 2}}, {"mesh": {"tp": 4}, "dtype": "bf16"}),
    "ZeRO 3 to pp 2, tp 2": ({"mesh": {"dp_shard": 4}, "zero": 3}, {"mesh": {"pp": 2, "tp": 2}}),
    "ZeRO 3 to tp 2, bf16": ({"mesh": {"dp_shard": 4}, "zero": 3}, {"mesh": {"tp": 2, "dp_replicate": 2}, "dtype": "bf16"}),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights", description=__doc__.split("\n")[0])
    options = parsed(parser, arguments, 5, "of a transfer and a checkpoint")
    if options.rank is not None:
        with start(TIMEOUT_S) as ranks:
            found = [_measured(options.rank, name, options.rounds, ranks) for name in PAIRS]
            if ranks.rank == 0:
                (options.rank / "found.json").write_text(json.dumps(found))
        return
    vars(gpt).update(SIZE)
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_", dir=options.disk) as name:
        folder = Path(name)
        for pair, (training, inferring) in PAIRS.items():
            _emit(folder / _name(pair) / "train", "train", **training)
            _emit(folder / _name(pair) / "infer", "infer", **inferring)
        given = ["--rank", str(folder), "--rounds", str(options.rounds)]
        torchrun("benchmarks.weights", given, nproc=DEVICES, timeout_s=TIMEOUT_S, module=True)
        found = json.loads((folder / "found.json").read_text())
    print(json.dumps(found) if options.json else "\n".join(_table(found)))


def _name(pair: str) -> str:
    return pair.replace(",", "").replace(" ", "_")


def _emit(folder: Path, mode: str, dtype: str | None = None, **pins: Any) -> None:
    batch = gpt.example_batch(DEVICES, gpt.LENGTH)
    trained: dict[str, Any] = {"targets": (batch["labels"],), "loss_fn": gpt.loss_fn} if mode == "train" else {}
    program = gp.export(gpt.GPT, (batch["ids"],), mode=mode, dtype=dtype, **trained)
    gp.partition(program, gp.plan(program, **pins)).save(folder)


def _measured(folder: Path, pair: str, rounds: int, ranks: Ranks) -> dict[str, Any]:
    """Send the weights of a pair of programs, and load them from a checkpoint."""

    def seconds(call: Callable[[], Any]) -> float:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - began

    own, saved = folder / _name(pair), folder / _name(pair) / "checkpoint"
    with Pipeline(own / "train", ranks.device) as sender, Pipeline(own / "infer", ranks.device) as receiver:
        with torch.no_grad():
            for parameter in sender.parameters():
                parameter.normal_(0, 0.02)
        first = seconds(lambda: sender.send_weights(receiver))
        moved = sender.send_weights(receiver)
        sent = [seconds(lambda: sender.send_weights(receiver)) for _ in range(rounds)]
        disk = [
            (
                seconds(partial(sender.save_checkpoint, saved, step=step, keep=1)),
                seconds(partial(receiver.load_checkpoint, saved)),
            )
            for step in range(1, rounds + 1)
        ]
    checkpoint = [statistics.median(column) for column in zip(*disk)]
    return {
        "weights": pair,
        "GB": round(moved.moved_bytes / 1e9, 3),
        "over least": round(moved.moved_bytes / moved.least_bytes, 3),
        "first": round(first, 3),
        "sent": round(statistics.median(sent), 3),
        "saved": round(checkpoint[0], 3),
        "loaded": round(checkpoint[1], 3),
        "ratio": round(statistics.median(sent) / sum(checkpoint), 3),
    }


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    seconds = ("first", "sent", "saved", "loaded")
    rows = [
        [*found[0]],
        *([f"{value} s" if name in seconds else f"{value}" for name, value in each.items()] for each in found),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


if __name__ == "__main__":
    main()
