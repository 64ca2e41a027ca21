"""What snapshots in memory cost: the time of steps with and without, and the seconds to go on from memory and from a disk.

    python -m benchmarks.snapshots [--json] [--rounds 3] [--disk FOLDER]

Two local processes train the model of ``benchmarks.gpt`` under ZeRO-3 and AdamW. Each is a node, with a folder in /dev/shm, so each
snapshot is written twice, and sent. A round has 10 steps without snapshots, with one every 5 steps and with one every step, in an order
that changes; seconds of a step are those of all 10, until the last snapshot is kept, divided by 10.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import graphpar as gp
from benchmarks import gpt
from graphpar.runtime import Pipeline, Ranks, start
from graphpar.runtime.checkpoints.folders import MEMORY
from graphpar.runtime.launching.launch import torchrun

DEVICES, BATCH, STEPS, TIMEOUT_S = 2, 8, 10, 900
EVERY = (None, 5, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description=__doc__.split("\n")[0])
    options = parsed(parser, arguments, 3, "of 10 steps of each kind")
    if options.rank is not None:
        with start(TIMEOUT_S) as ranks:
            _measure(options.rank, options.rounds, ranks)
        return
    torch.manual_seed(0)
    model, batch = gpt.GPT(), gpt.example_batch(BATCH, gpt.LENGTH)
    with _folder(options.disk) as folder, _folder(MEMORY) as memory:
        save_file({**batch}, str(folder / "batch.safetensors"))
        program = gp.export(model, (batch["ids"],), targets=(batch["labels"],), loss_fn=gpt.loss_fn)
        plan = gp.plan(program, mesh={"dp_shard": DEVICES}, microbatch_size=BATCH // DEVICES)
        gp.partition(program, plan).save(folder / "out", weights=model.state_dict())
        (folder / "memory").write_text(str(memory))
        given = ["--rank", str(folder), "--rounds", str(options.rounds)]
        torchrun("benchmarks.snapshots", given, nproc=DEVICES, timeout_s=TIMEOUT_S, module=True)
        found = json.loads((folder / "found.json").read_text())
    print(json.dumps(found) if options.json else "\n".join(f"{name:52} {value}" for name, value in found.items()))


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, rounds: int, of: str
) -> argparse.Namespace:
    """Parse the options of a benchmark of local processes that has ``rounds`` ``of`` something by default, and saves checkpoints."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{of} (default: {rounds})")
    parser.add_argument(
        "--disk", type=Path, help="where checkpoints are saved (default: the folder of temporary files)"
    )
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # one process of a launch
    return parser.parse_args(arguments)


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_", dir=parent) as folder:
        yield Path(folder)


def _measure(folder: Path, rounds: int, ranks: Ranks) -> None:
    batch = load_file(folder / "batch.safetensors")
    nodes = [Path((folder / "memory").read_text()) / str(rank) for rank in range(DEVICES)]
    memory, checkpoints = nodes[ranks.rank], folder / "ckpt"
    memory.mkdir()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    with Pipeline(folder / "out", ranks.device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)
        steps = 0

        def train(every: int | None) -> None:
            nonlocal steps
            for _ in range(STEPS):
                pipeline.step(batch)
                optimizer.step()
                pipeline.zero_grad()
                steps += 1
                if every is not None and steps % every == 0:
                    pipeline.save_snapshot(checkpoints, optimizer, step=steps, memory=memory)
            if every is not None:
                pipeline._in_memory(checkpoints, memory).wait()

        for every in EVERY:
            train(every)
        for turn in range(rounds):
            for place in range(len(EVERY)):
                every = EVERY[(turn + place) % len(EVERY)]
                name = "no snapshots" if every is None else f"a snapshot every {every} step{'s' if every > 1 else ''}"
                timed(name, partial(train, every))
        train(1)
        tensors = [*pipeline.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        nbytes = sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in tensors)
        for number in range(rounds):
            saved = folder / "saved" / str(number)
            timed("checkpoint saved", partial(pipeline.save_checkpoint, saved, optimizer, step=steps, keep=1))
    for lost in (False, True):
        if lost and ranks.rank == 0:
            shutil.rmtree(nodes[0])
            nodes[0].mkdir()
        for _ in range(rounds):
            with Pipeline(folder / "out", ranks.device) as pipeline:
                optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)
                name = "resumed from memory" + (", a node of two lost" if lost else "")
                timed(name, partial(pipeline.resume, checkpoints, optimizer, memory=memory))
                timed("resumed from a checkpoint", partial(pipeline.load_checkpoint, folder / "saved", optimizer))
    if ranks.rank == 0:
        found: dict[str, Any] = {"MB of a rank": round(nbytes / 1e6, 1)}
        for name, each in seconds.items():
            of = STEPS if "snapshot" in name else 1
            found[f"{name}, ms{' of a step' if of > 1 else ''}"] = round(statistics.median(each) / of * 1e3, 1)
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
