"""Rows of the GPU benchmark that are ranks of plans, each alone: seconds and memory next to the prediction."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks import gpt, llama, megatron
from benchmarks.gpu_programs import Programs, Row, needs_gpu, sized
from benchmarks.published_scores import kendall
from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.rank_alone import Clock, Measured, Memory, draw_values

MEMORY, SECONDS, TOY_MEMORY = (0.97, 1.03), (0.9, 1.1), 1.1
"""Between which memory and seconds are of what is predicted, on a GPU. A toy's seconds are those of launches, which nobody predicts."""


def _rows(programs: Programs, name: str, ranks: tuple[int, ...] = (0,)) -> Iterator[Row]:
    for rank in ranks:
        found = programs.alone(name, rank)
        label = f"{name}, rank {rank} of {found.world_size}"
        predicted = found.predicted or {}
        least, most = (None, None) if programs.toy else SECONDS
        note = "" if found.finite else "loss or norm is not finite"
        yield Row(
            f"{label}, step", found.step_s, predicted.get("step_s"), "s", least, most, note, failed=not found.finite
        )
        for action in found.actions if not programs.toy else ():
            yield Row(f"  {action.name}", action.median_s, action.predicted_s, "s", least, most)
        least, most = (None, TOY_MEMORY) if programs.toy else MEMORY
        yield Row(f"{label}, allocated", found.allocated_bytes, predicted.get("allocated_bytes"), "B", least, most)
        if found.reserved_bytes is not None:
            yield Row(f"{label}, reserved", found.reserved_bytes, predicted.get("reserved_bytes"), "B")


def by_hand(programs: Programs) -> Iterator[Row]:
    """Compare a rank of tensor parallelism with the same by hand, on the same group of one."""
    found = programs.alone("by hand")
    with sized(programs.toy):
        seconds, allocated = _megatron(programs, found.world_size)
    most = (None, None) if programs.toy else (1.03, 1.02)
    yield Row(
        "GPT, tp by hand: step", found.parts[0].median_s, seconds, "s", most=most[0], note="emitted over hand-written"
    )
    yield Row(
        "GPT, tp by hand: allocated",
        found.allocated_bytes,
        allocated,
        "B",
        most=most[1],
        note="fp32 by hand has no copies",
    )
    yield from _rows(programs, "tp")


def _megatron(programs: Programs, world_size: int) -> tuple[float, int]:
    """Return the seconds of forwards and backwards of a step by hand, and bytes at the peak."""
    gc.collect()
    with start(alone=(0, world_size)) as ranks, Memory(ranks.device) as memory:
        group = dist.group.WORLD
        assert group is not None
        with torch.device(ranks.device):
            model = megatron.MegatronGPT(group, sequence=True)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = {name: value.to(ranks.device) for name, value in gpt.example_batch(8, gpt.LENGTH).items()}
        clock = Clock(ranks.device)

        def step() -> None:
            with clock.part("step"):
                for ids, labels in zip(batch["ids"].split(4), batch["labels"].split(4)):
                    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=not programs.toy):
                        loss = model(ids, labels)
                    loss.backward()
                megatron.finish_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

        step()
        with memory.looking():
            step()
        clock.clear()
        for _ in range(2 if programs.toy else 5):
            step()
        return statistics.median(clock.seconds()["step"]), memory.allocated


def pipelines(programs: Programs) -> Iterator[Row]:
    """Ranks of the first, a middle and the last stage, and of schedules with several stages a rank."""
    tp, pp = (2, 4) if programs.toy else (8, 8)
    yield from _rows(programs, "1F1B", (0, pp // 2 * tp, (pp - 1) * tp))
    for name in ("Interleaved1F1B", "ZBV"):
        yield from _rows(programs, name, (0, (pp // 2 - 1) * tp))


def sharded(programs: Programs) -> Iterator[Row]:
    """Ranks that have shards of parameters, or of the optimizer's state."""
    yield from _rows(programs, "zero 3", (1,))
    yield from _rows(programs, "zero 1", (1,))


def contexts(programs: Programs) -> Iterator[Row]:
    """A rank that has a part of the sequence, with sharded state."""
    yield from _rows(programs, "cp")


def experts(programs: Programs) -> Iterator[Row]:
    """A rank that has some of the experts, with rows spread evenly."""
    yield from _rows(programs, "dp_expert", (1,))


def all_predictions(programs: Programs) -> Iterator[Row]:
    """Score the predictions of all ranks and actions that were measured so far."""
    pairs = [(each.predicted_s, each.median_s) for found in programs.measured.values() for each in found.actions]
    known = [(predicted, seconds) for predicted, seconds in pairs if predicted]
    if not known:
        yield Row("predictions", note="nothing was measured: ask for B2 to B5 too")
        return
    error = statistics.mean(abs(seconds - predicted) / seconds for predicted, seconds in known)
    most, least = (None, None) if programs.toy else (0.12, 0.9)
    yield Row(f"error of {len(known)} actions", error, most=most, note="mean of the shares of the measured seconds")
    yield Row("order of them", kendall(known), least=least, note="Kendall's tau")


def recomputation(programs: Programs) -> Iterator[Row]:
    """Recompute all, some or no results."""
    for name in ("whole", "whole, recompute full", "whole, recompute selective", "whole, budget"):
        yield from _rows(programs, name)


def compiled(programs: Programs) -> Iterator[Row]:
    """Compile the blocks; by inductor on a GPU, and without code generation on a CPU."""
    plain = programs.alone("whole")
    backend = "eager" if programs.toy else "inductor"
    with start() as ranks, Pipeline(programs.folder("whole, compiled"), ranks.device, compile=backend) as pipeline:
        clock = Clock(ranks.device)
        draw_values(pipeline)
        optimizer = pipeline.optimizer()
        batch = llama.example_batch(programs.size)
        stats = torch._dynamo.utils.counters["stats"]
        known = 0
        for number in range(4):
            with clock.part("first" if number == 0 else "step"):
                pipeline.step(batch, step=number)
            optimizer.step()
            pipeline.zero_grad()
            known = stats["unique_graphs"] if number < 2 else known
        times = clock.seconds()
    most = None if programs.toy else 1 / 1.10
    step = statistics.median(times["step"])
    yield Row("step, compiled over plain", step, plain.parts[0].median_s, "s", most=most)
    yield Row("first step", times["first"][0], unit="s", most=60, note=f"backend {backend}")
    yield Row("graphs after the second step", stats["unique_graphs"] - known, most=0)


def offloaded(programs: Programs) -> Iterator[Row]:
    """Move what is kept for the backward to the host."""
    plain: Measured = programs.alone("whole")
    if programs.toy:
        yield needs_gpu("offload, step over step without")
        return
    found = programs.alone("whole, offload")
    yield Row("offload, step over step without", found.step_s, plain.step_s, "s", most=1.10)
    yield from _rows(programs, "whole, offload")
