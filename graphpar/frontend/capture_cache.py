"""Captures of model files on disk, so that a model is traced once however often it is planned.

    model file's name, dtype, versions ──► name of an entry ──► what the capture depended on: does it hold?
                                                                     ├─ yes ──► the stored program, and what is kept of the model file
                                                                     └─ no ───► import the model file, trace, and store

An entry is of one environment and one set of installed packages, and is taken only if every file that was read and every path that was
asked for while the model was imported, built and traced is as it was (:mod:`graphpar.frontend.file_dependencies`). ``GRAPHPAR_CACHE``
names another folder; empty, nothing is kept. A model file whose import does more than define names is imported in each run.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from graphpar.frontend.file_dependencies import OBSERVED, Facts, surroundings
from graphpar.frontend.modelfile import ModelFile, load_model_file, named_as_file
from graphpar.frontend.stored import NotStorableError, dumps, loads
from graphpar.hardware.this_machine import cache_folder
from graphpar.ir.precision import Precision
from graphpar.ir.program import ModelSource, Program
from graphpar.runtime.option_kinds import GENERATE, Seq

MOST_ENTRIES = 64
MOST_BYTES = 2**28
"""Larger captures are not kept."""

_FUNCTIONS = ("model", "loss_fn", "optimizer")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

Capture = Callable[[ModelSource, Mapping[str, int | None] | None], Program]
"""Traces a model; :func:`graphpar.frontend.capture.capture`."""


def captures_folder() -> Path | None:
    """Return the folder of captures; None where nothing is to be kept."""
    folder = cache_folder()
    return None if folder is None else folder / "captures"


@dataclass(frozen=True)
class _Entry:
    """What is kept of a model that was traced.

    Attributes:
        facts: what it depended on.
        inputs: the example inputs, described.
        file: the model file's content without its functions, pickled; None where each run imports it.
        precision: the dtypes that were decided.
        program: the program, stored.
        tokens: of a program for generation, the model's arguments that are left of the example.
    """

    facts: Facts
    inputs: str
    file: bytes | None
    precision: Precision
    program: bytes
    tokens: Mapping[str, Any] | None = None


class _Late:
    """A function of a model file that is imported when it is called, or asked for its parameters."""

    def __init__(self, imported: Callable[[], ModelFile], name: str) -> None:
        self.imported, self.name = imported, name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self.imported(), self.name)(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(self.imported(), self.name))


class CaptureCache:
    """The captures of a model file in ``folder``.

    Attributes:
        file: the model file's content; imported only when something of it is called, where a capture is kept and nothing else is needed.
        hit: whether the last capture was stored.
        why_not: why the last capture could not be, if so.
    """

    def __init__(
        self,
        model: str | Path,
        folder: Path | None,
        precision: Precision | None = None,
        mode: str | None = None,
        evaluates: bool = False,
        seq: Seq | None = None,
    ) -> None:
        """Find the model file ``model``, a path or a dotted name; the rest is what its capture will be asked with.

        Raises:
            GraphparError: there is no such model file, or it can't be imported.
        """
        self.hit, self.why_not = False, None if folder is not None else "no folder is kept"
        self._model, self._folder = model, folder
        self._surroundings = None if folder is None else surroundings()  # as they are before an import may change them
        self._random = torch.get_rng_state()
        self._imported: ModelFile | None = None
        self._entries: dict[Path, _Entry | None] = {}
        entry = self._entry(self._place(precision or Precision(), mode, evaluates, seq))
        self.file = self._kept(entry) or self._import()

    def capture(self, trace: Capture, source: ModelSource, batch_dims: Mapping[str, int | None] | None) -> Program:
        """Return the stored program of ``source``, which is of the model file; else trace and store it."""
        self.hit, place = (
            False,
            self._place(source.precision, source.mode, source.evaluates, source.seq, source.sequences),
        )
        entry = self._entry(place)
        if self._imported is None and entry is not None and (program := self._program(entry, source)) is not None:
            return program
        if self._imported is None:  # asked with something else, or the program's operators are of what the file imports
            file = self._import_late()
            example: dict[str, Any] = {}
            if source.kwargs is self.file.kwargs:  # not the tokens alone
                example = {"args": file.args, "kwargs": file.kwargs, "loss_fn": file.loss_fn, "targets": file.targets}
            source = replace(source, model=file.model, **example)
        inputs = _input_signature(
            (source.args, dict(source.kwargs), source.targets, sorted((batch_dims or {}).items()))
        )
        same = entry is not None and entry.inputs == inputs
        if entry is not None and same and (program := self._program(entry, source)) is not None:
            return program
        content = None if OBSERVED.effect is not None else _without_functions(self._import())
        with OBSERVED.watching():
            program = trace(source, batch_dims)
        if place is not None:
            self._store(place, inputs, content, program)
        return program

    def _import(self) -> ModelFile:
        """Import the model file, once."""
        if self._imported is None:
            self._imported = load_model_file(self._model)
        return self._imported

    def _import_late(self) -> ModelFile:
        """Import the model file with the random numbers that an import at first would have had."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            return self._import()

    def _kept(self, entry: _Entry | None) -> ModelFile | None:
        """Return what is kept of the model file, with functions that import it when they are called; None where it has to be imported."""
        if entry is None or entry.file is None:
            return None
        try:
            file: ModelFile = pickle.loads(entry.file)
        except Exception:  # a value of a class that is the model file's own
            return None

        functions: dict[str, Any] = {name: _Late(self._import_late, name) for name in _FUNCTIONS if getattr(file, name)}
        as_file = named_as_file(self._model)  # by whatever path it is named now
        path, reference = (Path(self._model), None) if as_file else (file.path, str(self._model))
        return replace(file, **functions, path=path, reference=reference, importer=self._import_late)

    def _place(
        self, precision: Precision, mode: str | None, evaluates: bool, seq: Seq | None, sequences: int | None = None
    ) -> Path | None:
        """Return the file of the entry, named by what was asked; None where nothing is kept."""
        if self._folder is None:
            return None
        requested = (
            Path(self._model).resolve() if named_as_file(self._model) else self._model, os.getcwd(), sys.path, self._surroundings,
            precision, mode, evaluates, seq, sequences, sys.version, sys.flags, torch.__version__, torch.get_default_dtype(),
            torch.cuda.device_count(), os.cpu_count(),
        )  # fmt: skip
        return self._folder / f"{hashlib.sha256(repr(requested).encode()).hexdigest()[:32]}.capture"

    def _entry(self, place: Path | None) -> _Entry | None:
        if place is not None and place not in self._entries:
            self._entries[place] = _read_entry(place)
        return None if place is None else self._entries[place]

    def _program(self, entry: _Entry, source: ModelSource) -> Program | None:
        """Return the stored program; None where it can't be made here."""
        try:
            program = loads(entry.program)
        except Exception:  # of operators that the model file registers, or broken
            return None
        if entry.tokens is not None:
            source = replace(source, args=(), kwargs=entry.tokens, loss_fn=None, targets=())
        program.source = replace(source, precision=entry.precision)
        self.hit = True
        return program

    def _store(self, place: Path, inputs: str | None, file: bytes | None, program: Program) -> None:
        assert program.source is not None
        if inputs is None:
            self.why_not = "an example input is neither a tensor nor a plain value"
            return
        try:
            stored, facts = dumps(program), OBSERVED.facts()
        except NotStorableError as error:
            self.why_not = str(error)
            return
        self.why_not = OBSERVED.why_not(facts)
        tokens = program.source.kwargs if program.mode == GENERATE else None
        content = pickle.dumps(_Entry(facts, inputs, file, program.source.precision, stored, tokens))
        if self.why_not is None and len(content) > MOST_BYTES:
            self.why_not = "the capture is large"
        if self.why_not is None:
            with contextlib.suppress(OSError):  # a disk that is full or may not be written costs time, not the plan
                _write(place, content)


def _without_functions(file: ModelFile) -> bytes | None:
    """Pickle a model file's content, with whether there is each function; None where it holds what only an import makes."""
    if isinstance(file.model, nn.Module) or file.passes is not None:
        return None
    marks: dict[str, Any] = {name: getattr(file, name) is not None or None for name in _FUNCTIONS}
    try:
        return pickle.dumps(replace(file, **marks))
    except Exception:  # a value of a kind that can't be stored
        return None


def _input_signature(inputs: Any) -> str | None:
    """Describe example inputs by shapes, dtypes and content; None where that can't be done."""
    leaves, spec = tree_flatten(inputs)
    texts = [_leaf(leaf) for leaf in leaves]
    return None if None in texts else repr((texts, str(spec)))


def _leaf(leaf: Any) -> str | None:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else None
    if type(leaf) not in (Tensor, FakeTensor, nn.Parameter) or leaf.layout is not torch.strided:
        return None
    kind = f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device} {tuple(leaf.stride())} {leaf.requires_grad}"
    if isinstance(leaf, FakeTensor) or leaf.is_meta:
        return kind
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def _read_entry(place: Path) -> _Entry | None:
    """Return the entry; None where there is none of one's own, or it does not hold any more.

    It is unpickled, which can run code, so it has to be a file that nobody else can have written, and that no link brought here.
    """
    try:
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            writable = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or writable or found.st_nlink > 1:
                return None
            entry = pickle.load(file)
        if not (isinstance(entry, _Entry) and entry.facts.hold()):
            return None
        os.utime(place)
    except Exception:  # of another version, or broken: it is traced anew
        return None
    return entry


def _write(place: Path, content: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise
    entries = sorted(place.parent.glob("*.capture"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in entries[MOST_ENTRIES:]:
        old.unlink(missing_ok=True)
