"""Captures of model files on disk, so that a model is traced once however often it is planned.

    model file, example inputs, dtype, versions ──► name of an entry ──► what the capture depended on: does it hold?
                                                                              ├─ yes ──► the stored program
                                                                              └─ no ───► trace, and store

An entry is taken only if every file that was read, every path that was asked for, and every variable of the environment that was read
while the model was imported, built and traced is as it was; see :mod:`graphpar.frontend.observed`. ``GRAPHPAR_CACHE`` names another
folder; empty, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from graphpar.frontend.modelfile import ModelFile
from graphpar.frontend.observed import OBSERVED, Facts
from graphpar.frontend.stored import NotStorableError, dumps, loads
from graphpar.ir.precision import Precision
from graphpar.ir.program import ModelSource, Program

VARIABLE = "GRAPHPAR_CACHE"
"""The variable of the environment that names the folder of the cache."""
MOST_ENTRIES = 64
MOST_BYTES = 2**28
"""Larger captures are not kept."""

Capture = Callable[[ModelSource, Mapping[str, int | None] | None], Program]
"""Traces a model; :func:`graphpar.frontend.capture.capture`."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def cache_folder() -> Path | None:
    """Return the folder of captures; None where nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        return (Path(home) if home else Path.home() / ".cache") / "graphpar" / "captures"
    return None


class CaptureCache:
    """The captures of ``file`` in ``folder``.

    Attributes:
        hit: whether the last capture was stored.
        why_not: why the last capture could not be, if so.
    """

    def __init__(self, file: ModelFile, folder: Path | None) -> None:
        self.file, self.folder = file, folder
        self.hit, self.why_not = False, None if folder is not None else "no folder is kept"

    def capture(self, trace: Capture, source: ModelSource, batch_dims: Mapping[str, int | None] | None) -> Program:
        """Return the stored program of ``source``, which is of the model file; else trace and store it."""
        self.hit, entry = False, self._entry(source, batch_dims)
        if entry is not None and (found := _read(entry)) is not None:
            program, precision = found
            program.source = replace(source, precision=precision)
            self.hit = True
            return program
        with OBSERVED.watching():
            program = trace(source, batch_dims)
        if entry is not None:
            self._store(entry, program)
        return program

    def _entry(self, source: ModelSource, batch_dims: Mapping[str, int | None] | None) -> Path | None:
        """Return the file of the entry, named by what was asked; None where that can't be said."""
        if self.folder is None:
            return None
        leaves, spec = tree_flatten((source.args, dict(source.kwargs), source.targets))
        described = [_described(leaf) for leaf in leaves]
        if None in described:
            self.why_not = "an example input is neither a tensor nor a plain value"
            return None
        asked = (
            str(self.file.path.resolve()), self.file.reference, os.getcwd(), source.precision, source.mode, source.evaluates,
            sorted((batch_dims or {}).items()), described, str(spec), sys.version, sys.flags, torch.__version__, torch.get_default_dtype(),
            torch.cuda.device_count(), os.cpu_count(),
        )  # fmt: skip
        return self.folder / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:32]}.capture"

    def _store(self, entry: Path, program: Program) -> None:
        assert program.source is not None
        try:
            stored = dumps(program)
            self.why_not = OBSERVED.unknowable if len(stored) <= MOST_BYTES else "the capture is large"
        except NotStorableError as error:
            self.why_not = str(error)
        if self.why_not is not None:
            return
        with contextlib.suppress(OSError):  # a disk that is full or may not be written costs time, not the plan
            _write(entry, pickle.dumps((OBSERVED.facts(), program.source.precision, stored)))


def _described(leaf: Any) -> str | None:
    """Describe an example input by shape, dtype and content; None where that can't be done."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else None
    if type(leaf) not in (Tensor, FakeTensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return None
    kind = f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device} {tuple(leaf.stride())} {leaf.requires_grad}"
    if isinstance(leaf, FakeTensor) or leaf.device.type == "meta":
        return kind
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def _read(entry: Path) -> tuple[Program, Precision] | None:
    """Return what the entry holds; None where there is none of one's own, or it does not hold any more."""
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        facts, precision, stored = pickle.loads(entry.read_bytes())
        if not (isinstance(facts, Facts) and facts.hold()):
            return None
        program = loads(stored)
        os.utime(entry)
    except Exception:  # of another version, or broken: it is traced anew
        return None
    return program, precision


def _write(entry: Path, content: bytes) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=entry.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, entry)
    except BaseException:
        os.unlink(name)
        raise
    entries = sorted(entry.parent.glob("*.capture"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in entries[MOST_ENTRIES:]:
        old.unlink(missing_ok=True)
