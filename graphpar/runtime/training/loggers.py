"""Where a log is written to: each logger takes one record after the other, on the rank that reports.

Log ──{"step": 3, "loss": 5.3, "predicted": {"seconds": 0.2}, ...}──► JsonLines
                                                                  ├──► TensorBoard, WandB, MLflow: the numbers, by name
                                                                  └──► yours: log(record), close()
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from graphpar.runtime.errors import RuntimeProgramError


class Logger(Protocol):
    """Takes the records of a log."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record: ``step``, and what is known after it. A step may have several: of itself, an evaluation, a checkpoint."""

    def close(self) -> None:
        """Write what is left."""


def numbers(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name, ``predicted/seconds`` where they are nested; the step is none of them."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and f"{above}{name}" != "step":
            yield f"{above}{name}", value


class JsonLines:
    """Appends a line of JSON to a file, at once."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Write it."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes event files into a folder."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, record: Mapping[str, Any]) -> None:
        """Write its numbers."""
        for name, value in numbers(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases in a project; ``config``: what it shows of the run."""

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        self._run: Any = importlib.import_module("wandb").init(project=project, config=dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Send its numbers."""
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of an experiment of MLflow, at the server that MLFLOW_TRACKING_URI names; ``config``: its parameters."""

    def __init__(self, experiment: str, config: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run()
        self._mlflow.log_params(dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Send its numbers."""
        self._mlflow.log_metrics(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


OPTIONS: dict[str, Callable[[Any, Mapping[str, Any]], Logger]] = {
    "tensorboard": lambda folder, config: TensorBoard(folder),
    "wandb": WandB,
    "mlflow": MLflow,
}
"""Makes a logger of the value of an option, which is named as the package that it needs."""


def requested(args: argparse.Namespace) -> list[Callable[[], Logger]]:
    """Return what makes the loggers that the options of a script name.

    Raises:
        RuntimeProgramError: the package of one is not installed.
    """
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    for name in given:
        if importlib.util.find_spec(name) is None:
            raise RuntimeProgramError(f"--{name} needs a package that is not installed: pip install {name}")
    config = {
        name: value if isinstance(value, bool | int | float) else str(value) for name, value in vars(args).items()
    }
    return [lambda name=name, value=value: OPTIONS[name](value, config) for name, value in given.items()]  # type: ignore[misc]
