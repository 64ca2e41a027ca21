"""Programs that several tests share: the examples, exported once a process."""

from __future__ import annotations

import functools
from pathlib import Path

import graphpar as gp
from graphpar.frontend.modelfile import ModelFile, load_model_file
from graphpar.ir.program import Program

EXAMPLES = Path(__file__).parent.parent / "examples"
LARGE = {"llama3_8b", "llama3_70b", "llama3_405b", "gpt2"}
SMALL = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LARGE)


@functools.cache
def example_file(name: str) -> ModelFile:
    return load_model_file(EXAMPLES / f"{name}.py")


@functools.cache
def example(name: str) -> Program:
    """The exported program of ``examples/NAME.py``."""
    file = example_file(name)
    return gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets, file.batch_dims)


def norms_pinned(program: Program, kind: str) -> dict[str, dict[str, list[str]]]:
    """A shard plan that pins the input of every normalisation on tp, ``S(1)`` being sequence parallelism; none for ``""``."""
    if not kind:
        return {}
    classes = program.module_classes.items()
    return {path: {"inputs": [f"{kind}@tp"]} for path, name in classes if name.rpartition(".")[2].endswith("Norm")}
