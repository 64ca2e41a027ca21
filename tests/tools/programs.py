"""Programs that several tests share: the examples, traced once in a test session, and exported once a process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

import graphpar as gp
from graphpar import api
from graphpar.cli.trace import export_file
from graphpar.frontend.capture import capture
from graphpar.frontend.capture_cache import CaptureCache
from graphpar.frontend.modelfile import ModelFile, load_model_file
from graphpar.frontend.stored import NotStorableError, dumps, loads
from graphpar.ir.precision import Precision
from graphpar.ir.program import ModelSource, Program
from graphpar.passes.step import Step
from graphpar.passes.table import PASSES, check_skipped
from graphpar.verification import verify_all
from tests.tools.session_folder import session_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LARGE = {"llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x22b", "gpt2"}
SMALL = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LARGE)

NO_SEQUENCE = ("head_first", "resnet", "resnet_batchnorm", "two_towers", "unet", "vit")
"""Those without one that two ranks could divide."""


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
    seq: tuple[int, int] | None = None,
) -> Program:
    """In the place of the commands' :func:`graphpar.cli.trace.export_file`: an example is traced once a process, and its steps are
    shown again to whom asks for them."""
    path = file.path.resolve()
    if path.parent != EXAMPLES or file.passes is not None or seq is not None:
        return export_file(file, mode, precision, skip, after_pass, evaluates, cache, seq)
    leaves = tree_leaves((file.args, file.kwargs, file.targets))
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    key = (path.stem, mode, precision or Precision(), tuple(skip), shapes, evaluates)
    if key not in _TRACED:
        steps: list[tuple[Step, Program]] = []
        check_skipped(PASSES, skip)
        source = ModelSource(
            file.model, file.args, file.kwargs, file.loss_fn, file.targets, precision or Precision(), mode, evaluates
        )
        trace = functools.partial(_captured_once, (path.stem, mode, source.precision, shapes, evaluates))
        program = api.export_source(
            source, file.batch_dims, PASSES, skip, lambda row, made: steps.append((row, made)), trace
        )
        _TRACED[key] = steps, program
    steps, program = _TRACED[key]
    for row, made in steps if after_pass is not None else ():
        after_pass(row, made)  # type: ignore[misc]
    return program


def exported_once(
    key: Any,
    model: Any,
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    targets: Sequence[Any],
    evaluates: bool = False,
    **precision: Any,
) -> Program:
    """In the place of ``gp.export``, for a model whose captures are known by ``key``."""
    asked = Precision.of(**precision)
    source = ModelSource(model, (), dict(kwargs), loss_fn, tuple(targets), asked, evaluates=evaluates)
    return api.export_source(
        source, None, PASSES, trace=functools.partial(_captured_once, (key, str(asked), evaluates))
    )


def _captured_once(key: Any, source: ModelSource, batch_dims: Mapping[str, int | None] | None) -> Program:
    """In the place of ``capture``: what another process of the session has traced is read, as the commands' cache does."""
    folder = session_folder()
    place = folder and folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.capture"
    if place is not None and place.exists():
        precision, stored = pickle.loads(place.read_bytes())
        program = loads(stored)
        program.source = replace(source, precision=precision)
        return program
    program = capture(source, batch_dims)
    made = program.source
    if place is not None and made is not None and made.model is source.model and made.args is source.args:
        with contextlib.suppress(NotStorableError):
            content = pickle.dumps((made.precision, dumps(program)))
            own = place.with_suffix(f".{os.getpid()}")
            own.write_bytes(content)
            own.rename(place)
    return program


def norms_pinned(program: Program, kind: str) -> dict[str, dict[str, list[str]]]:
    """A shard plan that pins the input of every normalisation on tp, ``S(1)`` being sequence parallelism; none for ``""``."""
    if not kind:
        return {}
    classes = program.module_classes.items()
    return {path: {"inputs": [f"{kind}@tp"]} for path, name in classes if name.rpartition(".")[2].endswith("Norm")}


def check_parts(made: Sequence[gp.Parts]) -> None:
    """Check that programs train as their models, all in one launch, and that their types are complete."""
    for outcome in verify_all(made):
        assert not isinstance(outcome, Exception), outcome
        assert outcome.ok, outcome
    for each in made:
        result = gp.check(each)
        assert result.ok and not result.unchecked, result
