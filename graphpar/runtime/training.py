"""The loop of a training script: which batches a step is given, and what happens between steps.

for step, batches in training:     resumes, evaluates, saves checkpoints, and ends when asked to
    loss = pipeline.step(batches, step=step)
    norm = pipeline.clip_grad_norm_(args.clip)
    optimizer.step()
    training.log(loss, norm)
    training.schedule.step()
    pipeline.zero_grad()
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from graphpar.runtime.data import first_batches, load
from graphpar.runtime.distributed import Ranks, StopSignal
from graphpar.runtime.log import Log

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

Examples = Dataset[dict[str, Tensor]]
MakeDataset = Callable[[argparse.Namespace, int, bool], Examples]
"""Makes a dataset from the arguments, a seed, and whether it is to have the examples that are held out."""


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
    args: argparse.Namespace, pipeline: Pipeline, dataset: MakeDataset, first: int = 0, held_out: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Yield what this rank needs of each global batch, from batch number ``first`` on; of the held-out examples once.

    Args:
        args: of the script: ``batch``, a file whose batch is used for every step, or None; ``workers``.
    """
    if args.batch:
        return itertools.repeat(load_file(args.batch))
    seed = pipeline.seed  # that of the checkpoint, when training goes on
    return load(
        pipeline, lambda: dataset(args, seed, held_out), seed=seed, first=first, workers=args.workers, once=held_out
    )


class Training:
    """Yields the number of each step and the batches that it is given, a list of ``--accumulate``.

    At its start it resumes from the latest checkpoint, if ``--checkpoint`` has one. Between steps it evaluates and saves as the arguments
    say, and after a SIGTERM it saves and ends. Else it writes the trained weights to ``--save`` in the end.

    Args:
        args: see :func:`graphpar.runtime.arguments.train_arguments`.
        dataset: makes the examples.
        batches: yields this rank's part of each global batch, where :func:`batches` of ``dataset`` is not wanted.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer,
        ranks: Ranks,
        args: argparse.Namespace,
        dataset: MakeDataset,
        batches: Callable[..., Iterator[dict[str, Tensor]]] = batches,
    ) -> None:
        self._pipeline, self._optimizer, self._args = pipeline, optimizer, args
        saved = pipeline.resume(args.checkpoint, optimizer) if args.checkpoint else None
        self._first = saved.step if saved else 0
        # Under any plan training goes on with the next examples.
        self._begun = saved.data.get("examples", 0) // pipeline.program.global_batch if saved else 0
        self.schedule = pipeline.lr_schedule(optimizer, self._first)
        """Of the model file; without one it changes nothing."""
        self._stop = StopSignal(ranks) if args.checkpoint else None
        self._held_out: list[dict[str, Tensor]] = []
        if args.eval_every:
            pipeline.check_eval()
            self._held_out += first_batches(batches(args, pipeline, dataset, 0, True), args.eval_batches)
        self._data = batches(args, pipeline, dataset, self._begun)
        self._log = Log(
            pipeline, args.steps, self._first, every=args.log_every, batches=args.accumulate, file=args.log_file,
            history=args.json, tensorboard=args.tensorboard,
        )  # fmt: skip
        self._step, self._stopped = self._first, False

    def __enter__(self) -> Training:
        self._log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, trace)
        if error is None and not self._stopped and self._args.save:
            self._pipeline.save_weights(self._args.save)

    def __iter__(self) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
        args, pipeline = self._args, self._pipeline
        for step in range(self._first, args.steps):
            self._step = step
            yield step, [next(self._data) for _ in range(args.accumulate)]
            done, ending = step + 1, self._stop is not None and self._stop.received()
            if args.eval_every and done % args.eval_every == 0:
                self._log.held_out(step, pipeline.eval(self._held_out))  # the loss of all, as in model.eval()
            if args.checkpoint and (ending or done == args.steps or done % args.checkpoint_every == 0):
                taken = (self._begun + (done - self._first) * args.accumulate) * pipeline.program.global_batch
                folder, position = args.checkpoint / str(done), {"examples": taken}
                pipeline.save_checkpoint(folder, self._optimizer, step=done, data=position, keep=args.keep)
                self._log.restart()
            if ending:
                self._stopped = True
                return

    def log(self, loss: Tensor | None, norm: Tensor) -> None:
        """Log the step that was made; every ``--log-every`` steps their losses are read."""
        self._log.step(self._step, loss, norm, self._optimizer)
