"""The loop of a training script: which batches a step is given, and what happens between steps.

for step, batches in training:     resumes, evaluates, saves checkpoints, and ends when asked to
    loss = pipeline.step(batches, step=step)
    norm = pipeline.clip_grad_norm_(args.clip)
    if training.accepts(loss, norm):
        optimizer.step()
    training.log(loss, norm)
    training.schedule.step()
    pipeline.zero_grad()

What it decides is decided by all ranks in the same step (:mod:`~graphpar.runtime.training.monitors`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from graphpar.runtime.distributed import Ranks, StopSignal, agreed, await_left, note_left
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.training.collate import Collate
from graphpar.runtime.training.data import first_batches, load
from graphpar.runtime.training.log import Log
from graphpar.runtime.training.loggers import Logger, requested
from graphpar.runtime.training.monitors import BestLoss, SpikeGuard, shared
from graphpar.runtime.training.profiling import Instruments
from graphpar.runtime.training.rates import Rates

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

Examples = Dataset[dict[str, Tensor]]
MakeDataset = Callable[[argparse.Namespace, int, bool], Dataset[Any] | Iterable[Any]]
"""Makes a dataset from the arguments, a seed, and whether it is to have the examples that are held out."""
Evaluate = Callable[["Pipeline", Sequence[dict[str, Tensor]]], Mapping[str, Tensor] | None]


class RandomExamples(Examples):
    """Examples that depend on their index and the seed alone; ``make`` draws one with a generator."""

    def __init__(
        self, make: Callable[[torch.Generator], dict[str, Tensor]], seed: int, examples: int = 1_000_000
    ) -> None:
        self._make, self._seed, self._examples = make, seed, examples

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._make(torch.Generator().manual_seed(self._seed * self._examples + index))


def batches(
    args: argparse.Namespace,
    pipeline: Pipeline,
    dataset: MakeDataset,
    first: int = 0,
    held_out: bool = False,
    collate_fn: Collate | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield what this rank needs of each global batch, from batch number ``first`` on; of the held-out examples once.

    Args:
        args: of the script: ``batch``, a file whose batch is used for every step, or None; ``workers``.
        collate_fn: see :func:`~graphpar.runtime.training.data.load`.
    """
    if args.batch:
        return itertools.repeat(load_file(args.batch))
    seed = pipeline.seed  # that of the checkpoint, when training goes on
    return load(
        pipeline, lambda: dataset(args, seed, held_out), seed=seed, first=first, workers=args.workers, once=held_out,
        collate_fn=collate_fn,
    )  # fmt: skip


def _schedule(args: argparse.Namespace) -> Callable[[Optimizer], LambdaLR] | None:
    """Return what makes the schedule of ``--schedule`` and ``--warmup``; None without them."""
    if not args.schedule and not args.warmup:
        return None
    rates = Rates(args.schedule or "constant", args.warmup, args.steps, args.final_lr)
    return lambda optimizer: LambdaLR(optimizer, rates)


class Training:
    """Yields the number of each step and the batches that it is given, a list of ``--accumulate``.

    At its start it resumes from the newest snapshot, or from the latest checkpoint, if ``--checkpoint`` has one. Between steps it evaluates
    and saves as the arguments say, and after a SIGTERM it saves and ends. Else it writes the trained weights to ``--save`` in the end.

    Args:
        args: see :func:`graphpar.runtime.launching.arguments.train_arguments`.
        dataset: makes the examples.
        batches: yields this rank's part of each global batch, where :func:`batches` of ``dataset`` is not wanted; if it has
            ``state_dict`` and ``load_state_dict``, checkpoints hold its state, of rank 0.
        evaluate: in place of ``pipeline.eval``: of the pipeline and held-out batches, on the reporting rank a dict whose first value is the
            lower the better.
        loggers: make what each record of the log is given to besides those of the arguments, on the reporting rank.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        ranks: Ranks,
        args: argparse.Namespace,
        dataset: MakeDataset,
        batches: Callable[..., Iterator[dict[str, Tensor]]] = batches,
        *,
        evaluate: Evaluate | None = None,
        loggers: Sequence[Callable[[], Logger]] = (),
    ) -> None:
        self._pipeline, self._optimizer, self._args = pipeline, optimizer, args
        loggers, self._instruments = [*requested(args), *loggers], Instruments(args, pipeline.device)
        memory = args.snapshots if args.snapshot_every else None
        saved = pipeline.resume(args.checkpoint, optimizer, memory=memory) if args.checkpoint else None
        self._first = saved.step if saved else 0
        self._from_memory = saved is not None and memory is not None and memory.absolute() in saved.path.parents
        # Under any plan training goes on with the next examples.
        self._begun = saved.data.get("examples", 0) // pipeline.program.global_batch if saved else 0
        self.schedule = pipeline.lr_schedule(optimizer, self._first, _schedule(args))
        """Of the model file or of ``--schedule``; without either it changes nothing."""
        self._guard = SpikeGuard(args.skip_spikes, args.max_skips) if args.skip_spikes is not None else None
        self._best = BestLoss(args.patience) if args.patience or args.keep_best else None
        for name, each in self._monitors().items():
            if saved and name in saved.data:
                each.load_state_dict(saved.data[name])
        self._stop = pipeline.stop = StopSignal(ranks) if args.checkpoint else None
        self._evaluate = evaluate or (lambda pipeline, given: pipeline.eval(given, metrics=pipeline.metrics))
        self._held_out: list[dict[str, Tensor]] = []
        if args.eval_every:
            if evaluate is None:
                pipeline.check_eval()
            self._held_out += first_batches(batches(args, pipeline, dataset, 0, True), args.eval_batches)
        self._data: Any = batches(args, pipeline, dataset, self._begun)
        if saved and "stream" in saved.data and hasattr(self._data, "load_state_dict"):
            self._data.load_state_dict(saved.data["stream"])
        self._log = Log(
            pipeline, args.steps, self._first, every=args.log_every, batches=args.accumulate, file=args.log_file,
            history=args.json, loggers=loggers,
        )  # fmt: skip
        self._step, self._waited = self._first, 0.0
        self._skipped: str | None = None
        self._ends = self._stopped = self._finished = self._asked = False

    def _monitors(self) -> dict[str, SpikeGuard | BestLoss]:
        """Those whose state checkpoints keep."""
        found = {"spikes": self._guard, "best": self._best}
        return {name: each for name, each in found.items() if each is not None}

    def __enter__(self) -> Training:
        self._log.__enter__()
        self._instruments.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        broken_off = error is None and not self._finished
        if broken_off:
            note_left()  # where other ranks go on, they are told so
        self._instruments.close()
        self._log.__exit__(kind, error, trace)
        if self._stop is not None and not self._stopped:
            self._stop.close()
        if error is None and not self._stopped and self._args.save:
            if broken_off:
                await_left(self._args.timeout)
            self._pipeline.save_weights(self._args.save)

    def __iter__(self) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        args, pipeline = self._args, self._pipeline
        self._end_if_no_better()
        if args.snapshot_every and 0 < self._first < args.steps:
            self._save_snapshot(self._first)  # nodes that have been replaced have none
        on_disk = not self._from_memory
        for step in range(self._first, 0 if self._ends else args.steps):
            self._instruments.begin(step)
            self._step, began = step, time.perf_counter()
            given = [next(self._data) for _ in range(args.accumulate)]
            self._waited, self._skipped, self._asked = time.perf_counter() - began, None, False
            yield step, given
            self._instruments.end(step)
            done, stopped = step + 1, self._stop is not None and self._stop.received()
            if args.check_replicas and done % args.check_replicas == 0:
                pipeline.check_replicas()
            best = bool(args.eval_every) and done % args.eval_every == 0 and self._evaluated()
            last = stopped or self._ends or done == args.steps
            if args.checkpoint and (last or done % args.checkpoint_every == 0 or (best and args.keep_best)):
                self._save(done, best=best and args.keep_best, wait=last or not args.checkpoint_async)
            if args.snapshot_every and not last and done % args.snapshot_every == 0:
                self._save_snapshot(done)
            if last:
                self._stopped, on_disk = stopped, True
                StopSignal.ended = stopped
                break
        if args.checkpoint and on_disk:
            pipeline.drop_snapshots(args.checkpoint, args.snapshots)
        self._finished = True

    def _evaluated(self) -> bool:
        """Evaluate on the held-out batches, and return whether that is the best so far."""
        outputs = self._evaluate(self._pipeline, self._held_out)
        self._log.held_out(self._step, outputs)
        if self._best is None:
            return False
        best = self._best.improves(*shared(self._pipeline, next(iter(outputs.values())) if outputs else None))
        self._end_if_no_better()
        return best

    def _end_if_no_better(self) -> None:
        if self._best is not None and self._best.ends:
            self._ends = True
            self._log.say(f"{self._best.since} evaluations were no better than {self._best.value:.6f}: training ends")

    def _save(self, done: int, *, best: bool, wait: bool) -> None:
        args, data, began = self._args, self._data_at(done), self._save_begins()
        folder, pipeline = args.checkpoint / str(done), self._pipeline
        pipeline.save_checkpoint(folder, self._optimizer, step=done, data=data, keep=args.keep, best=best, wait=wait)
        self._log.saved(self._step, folder, time.perf_counter() - began)

    def _save_snapshot(self, done: int) -> None:
        args, data, began = self._args, self._data_at(done), self._save_begins()
        self._pipeline.save_snapshot(args.checkpoint, self._optimizer, step=done, data=data, memory=args.snapshots)
        self._log.kept(self._step, time.perf_counter() - began)

    def _save_begins(self) -> float:
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)  # the rest of the step is no part of the save
        return time.perf_counter()

    def _data_at(self, done: int) -> dict[str, Any]:
        """Return what a checkpoint keeps of the loop besides the pipeline, after so many steps."""
        args, pipeline = self._args, self._pipeline
        taken = (self._begun + (done - self._first) * args.accumulate) * pipeline.program.global_batch
        kept = self._monitors() | ({"stream": self._data} if hasattr(self._data, "state_dict") else {})
        return {
            "examples": taken,
            "arguments": sys.argv[1:],
            **{name: each.state_dict() for name, each in kept.items()},
        }

    def accepts(self, loss: Tensor | None, norm: Tensor) -> bool:
        """Whether the optimizer is to make this step, the same on all ranks; with ``--skip-spikes`` a collective call.

        Raises:
            AgreedError: more than ``--max-skips`` steps in a row are spikes.
        """
        self._asked = True
        if self._guard is not None:
            self._skipped = self._guard.refuses(self._step, *shared(self._pipeline, loss, norm))
        return self._skipped is None

    def end_if(self, condition: bool) -> None:
        """End on all ranks after this step, as after ``--steps``, if the condition holds on any of them; a collective call."""
        asked = torch.tensor(float(condition), device=self._pipeline.device)
        dist.all_reduce(asked)
        self._ends |= bool(asked)

    def log(self, loss: Tensor | None, norm: Tensor) -> None:
        """Log the step that was made; every ``--log-every`` steps their losses are read.

        Raises:
            RuntimeProgramError: ``--skip-spikes`` is given, but the loop does not ask :meth:`accepts`.
        """
        if self._guard is not None and not self._asked:
            raise RuntimeProgramError(
                "--skip-spikes has no effect in this loop: write `if training.accepts(loss, norm):` before optimizer.step()"
            )
        self._log.step(self._step, loss, norm, self._optimizer, data_seconds=self._waited, skipped=self._skipped)


# ---- ``train.py --check`` ----------------------------------------------------------------------------------------

FIRST_STEP, BATCH = "check/first_step.json", "check/batch.safetensors"
"""What is stored, by its path in an emitted folder."""


def check_first_step(pipeline: Pipeline) -> None:
    """Run a step from the initial weights on the stored batch, and print its loss and gradient norm beside the stored ones.

    A collective call. Parameters are the initial ones afterwards, and have no gradients.

    Raises:
        RuntimeProgramError: on all ranks, if nothing is stored, or if a value differs by more than rounding.
    """
    folder = pipeline.program.folder
    with agreed():
        if not (folder / FIRST_STEP).is_file():
            raise RuntimeProgramError(
                "nothing is stored to compare with: compile with --check-values where the model fits in memory (if it never does, use "
                "a smaller one of the same kind)"
            )
        stored = json.loads((folder / FIRST_STEP).read_text(encoding="utf-8"))
        if pipeline.seed != stored["seed"]:
            raise RuntimeProgramError(
                f"the stored step was made with seed {stored['seed']}, not {pipeline.seed}; leave --seed out"
            )
    pipeline.load_weights()
    if stored["loss_scale"] is not None:
        pipeline.loss_scale = stored["loss_scale"]
    loss = pipeline.step(load_file(folder / BATCH), step=0, broadcast_loss=True)
    assert loss is not None
    found = {"loss": loss.item(), "gradient_norm": pipeline.clip_grad_norm_(math.inf).item()}
    pipeline.zero_grad()
    pairs, wrong = [], []
    for name, value in found.items():
        pairs.append(f"{name.replace('_', ' ')} {value:.6f}, the model's {stored[name]:.6f}")
        if not math.isclose(value, stored[name], rel_tol=stored["tolerance"][name], abs_tol=1e-12):
            wrong.append(f"{pairs[-1]}, which differ by more than {stored['tolerance'][name]:.0e} of it")
    with agreed():
        if wrong:
            raise RuntimeProgramError(
                f"the first step is not the model's: {'; '.join(wrong)}. Were the stages edited, or weights/ replaced?"
            )
    if pipeline.reports:
        print(f"check: {'; '.join(pairs)}: the same", flush=True)
