"""What training says of itself while it runs: each step's loss, speed and memory, measured beside predicted.

    log.step(...) ──every N steps, when the loss is read──► a line on the terminal
                                                        └─► a record of each step for the loggers

Nothing waits for the device but reading the loss, and only on the one rank that reports. Its seconds are those from step to step, with
the loading of data; where N steps are read at once, each has an equal share.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphpar.runtime.manifest import Manifest
from graphpar.runtime.plan_record import kept_report, read_object
from graphpar.runtime.training.balance import Counted
from graphpar.runtime.training.loggers import JsonLines, Logger

if TYPE_CHECKING:
    from rich.progress import Progress

    from graphpar.runtime.pipeline import Pipeline

_GIB = 2**30


@dataclass(frozen=True)
class Predicted:
    """What the planner expects of a step of one batch, on the cluster that it priced.

    Attributes:
        seconds: from the first forward to the end of the optimizer's step.
        mfu: model flops utilisation.
        peak_memory_bytes: of the tensors of each pp rank, without what the allocator reserves beyond them, as they are measured.
        here: whether these ranks run on devices of that kind, so that what is measured compares.
    """

    seconds: float
    mfu: float
    peak_memory_bytes: tuple[int, ...]
    cluster: str
    here: bool


def predicted(program: Manifest, device: torch.device) -> Predicted | None:
    """Read the prediction beside ``plan.json``; None where the plan was not priced, or was edited since."""
    file = program.folder / "plan.json"
    plan = read_object(file)
    found = (kept_report(file, plan) or {}).get("predicted")
    if found is None:
        return None
    here = (program.device_kind or ("cpu" if found["device"] == "CPU" else "cuda")) == device.type
    if device.type == "cuda":
        here &= found["device"].split("-")[0].lower() in torch.cuda.get_device_name(device).lower()
    peaks = tuple(found.get("allocated_memory_bytes", found["peak_memory_bytes"]))
    return Predicted(found["step_time_s"], found["mfu"], peaks, found["cluster"], here)


def tokens_of(program: Manifest) -> int | None:
    """How many tokens a global batch has: the elements of the first input of whole numbers by example and place; None without one, and
    where their number varies."""
    for spec in program.inputs if program.seq is None else ():
        whole = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)
        if spec.role == "input" and spec.batch_dim is not None and len(spec.shape) == 2 and whole:
            return spec.shape[0] * spec.shape[1]
    return None


class Log:
    """The log of a training loop. Every rank may have one; that of the rank that reports says something.

    Args:
        steps: at which step training ends; ``first``: at which it begins.
        every: of how many steps one is shown, when the losses of all of them are read.
        batches: that a step is given.
        file: a line of JSON for each step is appended to it at once.
        history: where loss, gradient norm and seconds of all steps are written when the log is closed.
        loggers: make what each record is given to, on the one rank that says something.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        steps: int,
        first: int = 0,
        *,
        every: int = 1,
        batches: int = 1,
        file: Path | None = None,
        history: Path | None = None,
        loggers: Sequence[Callable[[], Logger]] = (),
    ) -> None:
        self._reports = pipeline.reports
        if first >= steps and self._reports:
            print(f"nothing to do: {first} steps were made before, and --steps is {steps}", flush=True)
        self._device, self._every, self._batches, self._last = pipeline.device, every, batches, steps - 1
        self._stage_rank = pipeline.groups.place["pp"]
        self._predicted = predicted(pipeline.program, pipeline.device)
        tokens = tokens_of(pipeline.program)
        self._unit = "examples" if tokens is None else "tokens"
        self._amount = batches * (pipeline.program.global_batch if tokens is None else tokens)
        self._history_file = history if self._reports else None
        self._history: list[dict[str, float]] = []
        self._pending: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        self._balance, self._counted = pipeline.balance(), dict[int, Counted]()
        self._spent = 0.0
        made: list[Callable[[], Logger]] = [] if file is None else [lambda: JsonLines(file)]
        self._loggers = [make() for make in (*made, *loggers)] if self._reports else []
        self._bar = _bar(first, steps) if self._reports and sys.stdout.isatty() else None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.restart()

    def restart(self) -> None:
        """Let the time of the next step begin now: after an evaluation, or a checkpoint."""
        self._balance.begin_step()
        self._began = time.perf_counter()

    def _pass(self) -> None:
        """Add the time since then to that of the steps that are yet to be read."""
        self._spent, self._began = self._spent + time.perf_counter() - self._began, time.perf_counter()

    def step(
        self,
        step: int,
        loss: Tensor | None,
        norm: Tensor,
        optimizer: Optimizer,
        *,
        data_seconds: float | None = None,
        skipped: str | None = None,
    ) -> None:
        """Note a step that the optimizer has made.

        Args:
            loss: what ``pipeline.step`` returned.
            norm: of the gradient, over the whole model.
            optimizer: whose first group's learning rate is noted.
            data_seconds: for how long this rank waited for its batches.
            skipped: why the optimizer has not made it.
        """
        counted = self._balance.end_step()  # on all ranks
        if not self._reports or loss is None:
            return
        if counted is not None:
            self._counted[step] = counted
        noted: dict[str, Any] = {"step": step, "lr": float(optimizer.param_groups[0]["lr"])}
        noted |= {} if data_seconds is None else {"data_seconds": data_seconds}
        noted |= {} if skipped is None else {"skipped": skipped}
        self._pending.append((noted, loss.detach(), norm))
        self._pass()
        if (step + 1) % self._every == 0 or step == self._last:
            self._read()

    def held_out(self, step: int, outputs: Mapping[str, Tensor] | None) -> None:
        """Note the loss and metrics of held-out batches, as ``pipeline.eval`` returned them after a step; the next one begins."""
        self.restart()
        if self._reports and outputs is not None:
            self._read()
            loss, *others = outputs.values()
            metrics = {name: float(value) for name, value in zip(list(outputs)[1:], others)}
            more = "".join(f", {name} {value:.6f}" for name, value in metrics.items())
            self._print(f"held-out loss {float(loss):.6f}{more} after step {step}")
            self._write({"step": step, "held_out_loss": float(loss), **metrics})
        self.restart()

    def saved(self, step: int, folder: Path, seconds: float) -> None:
        """Note for how long training waited for a checkpoint after a step; the next step's time begins."""
        if self._reports:
            self._print(f"saved {folder}; training waited {seconds:.2f} s")
            self._write({"step": step, "checkpoint": str(folder), "waited_s": seconds})
        self.restart()

    def kept(self, step: int, seconds: float) -> None:
        """Note for how long training waited for a snapshot after a step; the next step's time begins."""
        if self._reports:
            self._write({"step": step, "snapshot_waited_s": seconds})
        self.restart()

    def _read(self) -> None:
        """Wait for the device, and tell of the steps since the last time."""
        if not self._pending:
            return
        values = torch.stack([value.double().reshape(()) for _, *two in self._pending for value in two]).tolist()
        self._pass()
        seconds = self._spent / len(self._pending)
        for (noted, *_), loss, norm in zip(self._pending, values[::2], values[1::2]):
            record = self._record(noted, loss, norm, seconds)
            self._history.append({"loss": loss, "gradient_norm": norm, "seconds": seconds})
            self._write(record)
            if "skipped" in noted and noted is not self._pending[-1][0]:
                self.say(f"step {noted['step']:4}   skipped: {noted['skipped']}")
        self._print(self._line(record))
        self._pending, self._spent = [], 0.0
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record["step"] + 1)

    def _record(self, noted: Mapping[str, Any], loss: float, norm: float, seconds: float) -> dict[str, Any]:
        step = noted["step"]
        record = {"step": step, "loss": loss, "gradient_norm": norm, "lr": noted["lr"], "seconds": seconds, **noted}
        record[f"{self._unit}_per_s"] = self._amount / seconds
        meant = self._predicted
        here = meant is not None and meant.here
        # mfu x seconds is the time of the model's flops at the devices' peak, which no CPU states
        record["mfu"] = (
            self._batches * meant.mfu * meant.seconds / seconds
            if meant is not None and here and self._device.type == "cuda"
            else None
        )
        record["peak_memory_bytes"] = _peak_memory(self._device)
        if step in self._counted:
            record["experts"] = self._counted.pop(step).to_json()
        record["predicted"] = meant and {
            "seconds": self._batches * meant.seconds,
            "mfu": meant.mfu,
            "peak_memory_bytes": meant.peak_memory_bytes[self._stage_rank],
            "cluster": meant.cluster,
            "here": here,
        }
        return record

    def _line(self, record: Mapping[str, Any]) -> str:
        meant: Mapping[str, Any] = record["predicted"] if record["predicted"] and record["predicted"]["here"] else {}
        beside = f", predicted {meant['seconds']:.3f} s" if meant else ""
        waited = f", data {record['data_seconds']:.3f} s" if record.get("data_seconds", 0.0) >= 0.001 else ""
        line = (
            f"step {record['step']:4}   loss {record['loss']:.6f}   gradient norm {record['gradient_norm']:.4f}   "
            f"{record['seconds']:.3f} s{beside}{waited}   lr {record['lr']:.2e}   {record[f'{self._unit}_per_s']:,.0f} {self._unit}/s"
        )
        if record["mfu"] is not None:
            line += f"   MFU {record['mfu']:.1%}, predicted {meant['mfu']:.1%}"
        line += f"   memory {record['peak_memory_bytes'] / _GIB:.2f} GiB"
        if "experts" in record:
            of = record["experts"]
            line += f"   rows: most of an expert {of['max_over_mean']:.2f}, of a rank {of['rank_max_over_mean']:.2f} of the mean"
        if meant and self._device.type == "cuda":
            line += f", predicted {meant['peak_memory_bytes'] / _GIB:.2f} GiB"
        return f"{line}   skipped: {record['skipped']}" if "skipped" in record else line

    def say(self, line: str) -> None:
        """Print a line, on the rank that reports."""
        if self._reports:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, record: Mapping[str, Any]) -> None:
        for logger in self._loggers:
            logger.log(record)

    def close(self) -> None:
        """Tell of the last steps, and write the history."""
        self._read()
        if self._history_file is not None:
            self._history_file.write_text(json.dumps(self._history), encoding="utf-8")
        self._end()

    def _end(self) -> None:
        self._balance.close()
        if self._bar is not None:
            self._bar.stop()
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()


def _peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: of tensors on an accelerator, of the whole process, with Python and libraries, on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _bar(first: int, steps: int) -> Progress | None:
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar.add_task("", total=steps, completed=first)
    bar.start()
    return bar
