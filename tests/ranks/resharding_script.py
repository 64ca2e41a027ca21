"""Ranks that send weights to another program while both run: to one of the same processes, or to another launch."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from graphpar.runtime import EngineTensors, Peers, Pipeline, RuntimeProgramError, start
from tests.models.engine_layouts import Sizes, engine_parameters
from tests.ranks import checkpoint_script as fixture

DIRT = 7


def train(pipeline: Pipeline, kind: str, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        pipeline.step(fixture.batch_of(kind, step))
        optimizer.step()
        pipeline.zero_grad()


def within(job: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Train, and send to each of the other programs; all are saved, to be compared."""
    found, out = [], Path(job["out"])
    with Pipeline(job["train"], device) as sender:
        sender.load_weights(job["weights"])
        optimizer = fixture.optimizer_of(sender.named_parameters())
        train(sender, job["kind"], range(job["steps"]), optimizer)
        for number, target in enumerate(job["targets"]):
            with Pipeline(target, device) as receiver:
                with torch.no_grad():
                    for value in receiver.state_dict().values():
                        value.fill_(DIRT)
                try:
                    moved = sender.send_weights(receiver, strict=job.get("strict", True))
                except RuntimeProgramError as error:
                    found.append({"error": str(error), "version": receiver.weights_version})
                    continue
                receiver.save_weights(out / f"{number}.safetensors")
                version = receiver.weights_version
                if job.get("checkpoint"):  # the same from a disk
                    sender.save_checkpoint(out / "checkpoint", step=job["steps"])
                    receiver.load_checkpoint(out / "checkpoint")
                    receiver.save_weights(out / f"{number}_loaded.safetensors")
                found.append({"moved": moved.moved_bytes, "least": moved.least_bytes, "version": version})
        sender.save_weights(out / "sent.safetensors")
        for number, engine in enumerate(job.get("engines", [])):
            give(sender, engine, out / f"engine_{number}_{dist.get_rank()}.safetensors")
        if sender.program.adapters:
            sender.adapters.save_merged(out / "merged.safetensors")
    return found


def give(sender: Pipeline, job: dict[str, Any], file: Path) -> None:
    """Send to tensors of another engine, of which this process has those of a rank, or let it load undivided ones."""
    if "sizes" not in job:
        options = {"dtype": getattr(torch, job["dtype"]), "bucket_bytes": job["bucket_bytes"], "ranks": job["ranks"]}
        save_file({name: value.clone() for name, value in sender.weights_for(job["mapping"], **options)}, file)
        return
    sizes, tp = Sizes(**job["sizes"]), (dist.get_rank() % job["tp"], job["tp"])
    weights = {
        name.removeprefix("model."): value for name, value in load_file(file.parent / "sent.safetensors").items()
    }
    expected = engine_parameters(weights, sizes, tp)
    found = {name: torch.full_like(value, DIRT, dtype=torch.bfloat16) for name, value in expected.items()}
    moved = sender.send_weights(EngineTensors("fused", found, tp=tp, kv_heads=sizes.kv_heads))
    assert moved.moved_bytes == moved.least_bytes
    save_file(found, file)


def between(job: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Send, or receive, after each step; or end in the middle."""
    found, out = [], Path(job["out"])
    with Pipeline(job["program"], device) as pipeline:
        pipeline.load_weights(job["weights"])
        peers = Peers(job["address"], sends=job["sends"], device=device, timeout_s=60)
        optimizer = fixture.optimizer_of(pipeline.named_parameters()) if job["sends"] else None
        if job.get("merged"):  # refused, in both launches
            if job["sends"]:
                pipeline.adapters.merge()
            try:
                pipeline.send_weights(peers) if job["sends"] else pipeline.receive_weights(peers)
            except RuntimeProgramError as error:
                found.append({"error": str(error), "version": pipeline.weights_version})
            if job["sends"]:
                pipeline.adapters.unmerge()
        for step in range(job["steps"]):
            try:
                if optimizer is not None:
                    train(pipeline, job["kind"], range(step, step + 1), optimizer)
                    if job.get("dies") and step == job["steps"] - 1 and dist.get_rank() == 1:
                        os._exit(0)  # as a process that is killed
                    moved = pipeline.send_weights(peers)
                else:
                    moved = pipeline.receive_weights(peers)
            except (RuntimeError, dist.DistError):
                found.append({"version": pipeline.weights_version, "refused": _refuses(pipeline, job["kind"])})
                break
            pipeline.save_weights(out / f"{'sent' if job['sends'] else 'received'}_{step}.safetensors")
            found.append({"version": moved.version, "moved": moved.moved_bytes, "least": moved.least_bytes})
    return found


def to_engine(job: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Send, or receive into the parameters of another engine; what does not fit is refused, and sent again."""
    found: list[dict[str, Any]] = []
    if job["sends"]:
        with Pipeline(job["program"], device) as pipeline:
            pipeline.load_weights(job["weights"])
            peers = Peers(job["address"], sends=True, device=device, timeout_s=60)
            train(pipeline, job["kind"], range(1), fixture.optimizer_of(pipeline.named_parameters()))
            for _ in range(2):
                try:
                    found.append({"version": pipeline.send_weights(peers).version})
                except RuntimeProgramError as error:
                    found.append({"error": str(error)})
            pipeline.save_weights(job["sent"])
        return found
    peers = Peers(job["address"], sends=False, device=device, timeout_s=60)
    weights = {name.removeprefix("model."): value for name, value in load_file(job["weights"]).items()}
    sizes, tp = Sizes(**job["sizes"]), (dist.get_rank(), dist.get_world_size())
    tensors = {name: torch.full_like(value, DIRT) for name, value in engine_parameters(weights, sizes, tp).items()}
    for kv_heads in (None, sizes.kv_heads):
        try:
            engine = EngineTensors("fused", tensors, tp=tp, kv_heads=kv_heads)
            found.append({"version": peers.receive(engine).version})
        except RuntimeProgramError as error:
            found.append({"error": str(error)})
        assert engine.version == found[-1].get("version")
    save_file(tensors, f"{job['sent']}.{dist.get_rank()}")
    return found


def _refuses(pipeline: Pipeline, kind: str) -> str:
    try:
        pipeline.infer({"ids": fixture.batch_of(kind, 0)["ids"]})
    except RuntimeProgramError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    given, part = json.loads(Path(sys.argv[1]).read_text()), None
    if "groups" in given:  # several programs in one launch
        begins = [0, *itertools.accumulate(each["count"] for each in given["groups"])]
        place = bisect.bisect_right(begins, int(os.environ["RANK"])) - 1
        given = given["groups"][place]
        part = begins[place], given["count"]
    with start(60.0, part=part) as ranks:
        run = within if "targets" in given else to_engine if "sizes" in given else between
        report = run(given, ranks.device)
        if ranks.rank == 0:
            Path(given["report"]).write_text(json.dumps(report))
