"""Programs that several tests share: the examples, exported once a process."""

from __future__ import annotations

import functools
from pathlib import Path

import graphpar as gp
from graphpar.modelfile import ModelFile, load_model_file
from graphpar.program import Program

EXAMPLES = Path(__file__).parent.parent / "examples"
LARGE = {"llama3_8b", "llama3_405b", "gpt2"}
SMALL = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LARGE)


@functools.cache
def example_file(name: str) -> ModelFile:
    return load_model_file(EXAMPLES / f"{name}.py")


@functools.cache
def example(name: str) -> Program:
    """The exported program of ``examples/NAME.py``."""
    file = example_file(name)
    return gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets, file.batch_dims)
