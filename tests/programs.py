"""Programs that several tests share: the examples, exported once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphpar.cli.trace import export_file
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.modelfile import ModelFile, load_model_file
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.passes.table import Step

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LARGE = {"llama3_8b", "llama3_70b", "llama3_405b", "gpt2"}
SMALL = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LARGE)


@functools.cache
def example_file(name: str) -> ModelFile:
    return load_model_file(EXAMPLES / f"{name}.py")


@functools.cache
def example(name: str) -> Program:
    """The exported program of ``examples/NAME.py``."""
    return traced_once(example_file(name), None, None)


_TRACED: dict[Any, tuple[list[tuple[Step, Program]], Program]] = {}


def traced_once(
    file: ModelFile,
    mode: str | None,
    precision: Precision | None,
    skip: Sequence[str] = (),
    after_pass: Callable[[Step, Program], None] | None = None,
    evaluates: bool = False,
    cache: CaptureCache | None = None,
) -> Program:
    """In the place of the commands' :func:`graphpar.cli.trace.export_file`: an example is traced once a process, and its steps are
    shown again to whom asks for them."""
    path = file.path.resolve()
    if path.parent != EXAMPLES or file.passes is not None:
        return export_file(file, mode, precision, skip, after_pass, evaluates, cache)
    leaves = tree_leaves((file.args, file.kwargs, file.targets))
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    key = (path.stem, mode, precision or Precision(), tuple(skip), shapes, evaluates)
    if key not in _TRACED:
        steps: list[tuple[Step, Program]] = []
        program = export_file(file, mode, precision, skip, lambda row, made: steps.append((row, made)), evaluates)
        _TRACED[key] = steps, program
    steps, program = _TRACED[key]
    for row, made in steps if after_pass is not None else ():
        after_pass(row, made)  # type: ignore[misc]
    return program


def norms_pinned(program: Program, kind: str) -> dict[str, dict[str, list[str]]]:
    """A shard plan that pins the input of every normalisation on tp, ``S(1)`` being sequence parallelism; none for ``""``."""
    if not kind:
        return {}
    classes = program.module_classes.items()
    return {path: {"inputs": [f"{kind}@tp"]} for path, name in classes if name.rpartition(".")[2].endswith("Norm")}
