"""The programs of the GPU benchmark, and the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphpar as gp
from benchmarks import experts, gpt, llama
from graphpar.runtime.debugging.rank_alone import Measured, measure
from graphpar.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        predicted: what graphpar predicts, or what the measured figure is compared with.
        least, most: between which the ratio has to be, or the measured figure where nothing is predicted; None: no bar.
        unit: ``s``, ``B`` or the word for what is counted.
        failed: whether nothing could be measured; ``needs_gpu``: since no GPU is here.
    """

    what: str
    measured: float | None = None
    predicted: float | None = None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""
    failed: bool = False
    check: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    @property
    def bar(self) -> str:
        """What the row has to reach."""
        ends = (("at least", self.least), ("at most", self.most))
        return ", ".join(f"{word} {end:g}" for word, end in ends if end is not None)

    @property
    def ok(self) -> bool | None:
        """Whether it does; None where there is no bar."""
        value = self.measured if self.ratio is None else self.ratio
        if self.failed or value is None or (self.least is None and self.most is None):
            return False if self.failed else None
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def text(self, value: float | None) -> str:
        """Write a figure of the row."""
        if value is None:
            return ""
        if self.unit in ("s", "B"):
            return (seconds_text if self.unit == "s" else bytes_text)(value)
        return f"{value:.4g} {self.unit}".rstrip()


def needs_gpu(what: str) -> Row:
    """Return the row of a fact that only a GPU has."""
    return Row(what, note="needs a GPU")


GPT_SIZE = {"VOCAB": 50304, "WIDTH": 4096, "HEAD": 128, "LAYERS": 8, "LENGTH": 4096}
TOY_GPT = {"VOCAB": 512, "WIDTH": 64, "HEAD": 16, "LAYERS": 2, "LENGTH": 32}


@dataclass
class Programs:
    """Emits programs once, into folders of ``root``; ``every_name``: A1 lists all names."""

    root: Path
    toy: bool
    every_name: bool = False
    exported: dict[llama.Size | str, gp.Program] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    """What was measured of a rank alone, by program and rank."""

    @property
    def device(self) -> torch.device:
        """Where rows are measured."""
        return torch.device("cpu" if self.toy else "cuda")

    @property
    def size(self) -> llama.Size:
        """The model that runs whole on the device."""
        return llama.TOY if self.toy else llama.LLAMA_1B

    @property
    def known(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """The programs: a size of Llama, or "gpt" or "experts", and what is pinned. A toy divides over fewer ranks."""
        toy, one = self.toy, {"devices": 1, "microbatch_size": 2, "compile": False}
        whole, large, deep = self.size, *((llama.TOY,) * 2 if toy else (llama.LLAMA_8B, llama.LLAMA_70B))
        deep4 = llama.Size(**{**vars(llama.TOY), "layers": 8, "batch": 8}) if toy else deep
        short = deep4 if toy else llama.Size(**{**vars(llama.LLAMA_70B), "layers": 16})
        tp, pp, shards = (2, 4, 4) if toy else (8, 8, 64)
        rows = {"microbatch_size": 1, "compile": False}
        largest = llama.TOY if toy else llama.LLAMA_405B
        context = {"cp": 2, "tp": 2, "dp_shard": 2} if toy else {"pp": 16, "cp": 2, "tp": 8, "dp_shard": 4}
        return {
            "whole": (whole, one),
            "whole, recompute full": (whole, {**one, "recompute": "full"}),
            "whole, recompute selective": (whole, {**one, "recompute": "selective"}),
            "whole, budget": (whole, {**one, "recompute": "budget:0.5"}),
            "whole, compiled": (whole, {**one, "compile": True}),
            "whole, offload": (whole, {**one, "offload": ("activations",)}),
            "by hand": ("gpt", {"mesh": {"tp": tp}, "microbatch_size": 4, "compile": False}),
            "tp": (large, {"mesh": {"tp": tp}, **rows}),
            "1F1B": (deep4, {"mesh": {"pp": pp, "tp": tp}, "schedule": "1f1b", **rows}),
            "Interleaved1F1B": (short, {"mesh": {"pp": pp // 2, "tp": tp}, "schedule": "interleaved1f1b", **rows}),
            "ZBV": (short, {"mesh": {"pp": pp // 2, "tp": tp}, "schedule": "zbv", **rows}),
            "zero 3": (large, {"mesh": {"dp_shard": shards}, "zero": 3, "global_batch": shards, **rows}),
            "zero 1": (large, {"mesh": {"dp_shard": shards}, "zero": 1, "global_batch": shards, **rows}),
            "cp": (largest, {"mesh": context, "zero": 3, **rows}),
            "dp_expert": ("experts", {"mesh": {"dp_expert": 2 if toy else 8}, **rows}),
        }

    def folder(self, name: str) -> Path:
        """Return the emitted program of this name, compiled where it is not there yet."""
        folder = self.root / f"{'toy ' if self.toy else ''}{name}".replace(", ", "-").replace(" ", "_")
        if not (folder / "plan.json").is_file():
            size, pins = self.known[name]
            program = self.program(size)
            cluster = f"{_devices(pins)}xCPU" if self.toy else _cluster(_devices(pins))
            gp.partition(program, gp.plan(program, cluster, **pins)).save(folder)
        return folder

    def program(self, size: llama.Size | str) -> gp.Program:
        """Return the exported model of a size, or "gpt" or "experts"."""
        if size not in self.exported:
            with sized(self.toy):
                self.exported[size] = gp.export(**_model(size), dtype=None if self.toy else "bf16")
        return self.exported[size]

    def alone(self, name: str, rank: int = 0, *, compile: bool = False) -> Measured:
        """Measure a rank of a program alone, once."""
        key = f"{name}, rank {rank}"
        if key not in self.measured:
            self.measured[key] = measure(self.folder(name), rank, 1 if self.toy else 10, compile=compile)
        return self.measured[key]


@contextmanager
def sized(toy: bool) -> Iterator[None]:
    """Let the GPT of :mod:`benchmarks.gpt`, and what is made of it by hand, have the size that the benchmark wants."""
    wanted = TOY_GPT if toy else GPT_SIZE
    before = {name: getattr(gpt, name) for name in wanted}
    vars(gpt).update(wanted)
    try:
        yield
    finally:
        vars(gpt).update(before)


def _model(size: Any) -> dict[str, Any]:
    """Return what gp.export takes."""
    if isinstance(size, llama.Size):
        return {"model": lambda: llama.Llama(size), "kwargs": llama.example_batch(size)}
    made: Callable[..., nn.Module] = gpt.GPT if size == "gpt" else experts.ExpertGPT
    batch = gpt.example_batch(8, gpt.LENGTH)
    return {
        "model": lambda: made(gpt.LENGTH),
        "args": (batch["ids"],),
        "loss_fn": gpt.loss_fn,
        "targets": (batch["labels"],),
    }


def _devices(pins: dict[str, Any]) -> int:
    count = pins.get("devices", 1)
    for degree in pins.get("mesh", {}).values():
        count *= degree
    return int(count)


def _cluster(devices: int) -> str:
    return f"{devices}xH100-SXM-80GB" if devices <= 8 else f"{devices // 8}x8xH100-SXM-80GB"
