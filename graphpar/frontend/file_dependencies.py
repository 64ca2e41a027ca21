"""What a model file's code looks at while it is imported, built and traced: files, whether paths exist, variables of the environment.

    with OBSERVED.watching():      a process-wide record, since a module is imported once a process
        import, build, trace
    OBSERVED.facts() ──► Facts, which another process compares with what it finds: Facts.hold()

Python's own events and a few functions of ``os`` are watched. What native code opens, the clock and random numbers are not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_LARGE = 2**26
"""Files from this size on are known by size and time of change; smaller ones, of the user, by their content."""
_ACTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "socket.connect",
    "socket.getaddrinfo",
)
_SYSTEM = ("/proc/", "/sys/", "/dev/")
OF_KERNELS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that torch itself sets, to folders of compiled kernels; no trace depends on them."""
_LISTINGS = ("os.listdir", "os.scandir", "glob.glob")


@dataclass(frozen=True)
class Facts:
    """What a capture depends on.

    Attributes:
        files: what each file was, by path; ``None`` for one that there was not.
        paths: for each path that was asked for, whether there is something and what.
        variables: hashes of variables of the environment; ``None`` for one that was not set.
        modules: top-level modules that were imported or looked for.
        beside: folders that were on ``sys.path`` while the model file was imported.
        own: what the user's folders have of the names of these modules, which something new might hide.
        installed: hashes of what the folders of installed packages list.
    """

    files: Mapping[str, str | None]
    paths: Mapping[str, str | None]
    variables: Mapping[str, str | None]
    modules: frozenset[str]
    beside: frozenset[str]
    own: frozenset[str]
    installed: Mapping[str, str]

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        return (
            all(OBSERVED.variable(name) == value for name, value in self.variables.items())
            and _own_names(self.modules, self.beside) == self.own
            and _installed() == self.installed
            and all(_path(path) == value for path, value in self.paths.items())
            and all(_file(path) == value for path, value in self.files.items())
        )


@dataclass
class Observed:
    """The record of this process. ``unknowable``: why nothing can be said, if so."""

    opened: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    beside: set[str] = field(default_factory=set)
    variables: dict[str, str | None] = field(default_factory=dict)  # as first read: code may set them
    unknowable: str | None = None
    depth: int = 0
    began: int | None = None  # in nanoseconds since the epoch
    hooked: bool = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record within the block, in this thread and others."""
        if not self.hooked:
            sys.addaudithook(self._event)
            self.hooked = True
        self.began = self.began or time.time_ns()
        self.depth += 1
        try:
            with self._functions() if self.depth == 1 else contextlib.nullcontext():
                yield
        finally:
            self.depth -= 1

    def variable(self, name: str) -> str | None:
        """Return a variable as this process first read it; torch sets some while the model file is imported."""
        return self.variables[name] if name in self.variables else _variable(os.environ.get(name))

    def facts(self) -> Facts:
        """Return what was looked at, as it is now."""
        modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        opened = self.opened | {path for path in modules.values() if isinstance(path, str)}
        names = frozenset(name.partition(".")[0] for name in (*modules, *self.modules)) - {""}
        beside = frozenset(self.beside)
        return Facts(
            {path: _file(path) for path in sorted(opened)},
            {path: _path(path) for path in sorted(self.asked)},
            dict(sorted(self.variables.items())),
            names,
            beside,
            _own_names(names, beside),
            _installed(),
        )

    def why_not(self, facts: Facts) -> str | None:
        """Say why ``facts`` do not tell what the capture depends on; None where they do."""
        if self.unknowable is not None:
            return self.unknowable
        changed = (path for path in facts.files if not _of_library(path) and _time(path) > (self.began or 0))
        return next((f"{path} was changed while the model was traced" for path in changed), None)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.depth:
            return
        if event == "open":
            path, mode = args[0], args[1]
            if isinstance(path, str | bytes | os.PathLike):
                self._note(self.opened, path, writes=isinstance(mode, str) and not mode.startswith("r"))
        elif event == "import":
            self.modules.add(args[0])
        elif event in _LISTINGS and self.unknowable is None:
            if not _of_importing(sys._getframe(1).f_code.co_filename) and not _of_library(
                os.path.abspath(args[0] or ".")
            ):
                self.unknowable = f"the model file lists the folder {args[0]}"
        elif event in _ACTS and self.unknowable is None:
            self.unknowable = f"the model file starts a process or asks the network ({event})"

    def _note(self, known: set[str], path: str | bytes | os.PathLike[Any], writes: bool = False) -> None:
        text = os.path.abspath(os.fsdecode(path))
        if not writes and not text.startswith(_SYSTEM) and not text.endswith(".pyc") and "torchinductor_" not in text:
            known.add(text)

    @contextlib.contextmanager
    def _functions(self) -> Iterator[None]:
        """Watch questions that Python raises no event for."""
        environment: Any = type(os.environ)
        get = environment.__getitem__

        def getitem(mapping: Any, name: Any) -> Any:
            if (
                mapping is not os.environ
                or not isinstance(name, str)
                or name in OF_KERNELS
                or _looks_through(sys._getframe(1))
            ):
                return get(mapping, name)
            try:
                value = get(mapping, name)
            except KeyError:
                self.variables.setdefault(name, None)
                raise
            self.variables.setdefault(name, _variable(value))
            return value

        def asked(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(path: Any, *args: Any, **options: Any) -> Any:
                if isinstance(path, str | bytes | os.PathLike):
                    self._note(self.asked, path)
                return original(path, *args, **options)

            return function

        def sought(name: str, package: str | None = None) -> Any:
            self.modules.add(name)
            return find(name, package)

        before = {name: getattr(os, name) for name in ("stat", "lstat", "access")}
        find = importlib.util.find_spec
        importlib.util.find_spec = sought
        environment.__getitem__ = getitem
        for name, original in before.items():
            setattr(os, name, asked(original))
        try:
            yield
        finally:
            importlib.util.find_spec = find
            environment.__getitem__ = get
            for name, original in before.items():
                setattr(os, name, original)


OBSERVED = Observed()


# ---- what is compared ---------------------------------------------------------------------------------------------


def _library() -> tuple[str, ...]:
    """The folders of Python and of installed packages."""
    known = {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        sys.prefix,
        sys.base_prefix,
    }
    return tuple(sorted({os.path.abspath(path) + os.sep for path in known if path}))


_LIBRARY = _library()


def _of_library(path: str) -> bool:
    return (path + os.sep).startswith(_LIBRARY)


def _of_importing(file: str) -> bool:
    return file.startswith("<frozen importlib") or f"{os.sep}importlib{os.sep}" in file


def _looks_through(frame: FrameType) -> bool:
    """Whether a package goes through all variables of the environment, for those with a name that it knows."""
    code, outer = frame.f_code, frame.f_back
    iterates = code.co_name == "__iter__" and code.co_filename.endswith("_collections_abc>")
    return iterates and outer is not None and _of_library(outer.f_code.co_filename)


def _file(path: str) -> str | None:
    """Say what a file is: of an installed package by size and time of change, of the user by its content."""
    try:
        found = os.stat(path)
        if _of_library(path) or found.st_size >= _LARGE:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _path(path: str) -> str | None:
    """Say what is at a path: nothing, a folder, or a file of a size and a time of change."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return "folder" if os.path.isdir(path) else f"{found.st_size} {found.st_mtime_ns}"


def _time(path: str) -> int:
    """When a file was changed, in nanoseconds since the epoch; 0 where there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _variable(value: str | None) -> str | None:
    return None if value is None else hashlib.sha256(value.encode()).hexdigest()


def _own_names(modules: frozenset[str], beside: frozenset[str]) -> frozenset[str]:
    """Return which of these top-level modules are found in the user's folders, of ``sys.path`` and ``beside``, as folder and name."""
    found = set()
    for entry in {os.path.abspath(each) for each in sys.path} | beside:
        if _of_library(entry) or not os.path.isdir(entry):
            continue
        found |= {os.path.join(entry, name) for name in os.listdir(entry) if name.partition(".")[0] in modules}
    return frozenset(found)


def _installed() -> dict[str, str]:
    """Return hashes of what is in the folders of ``sys.path`` that are not the user's, which packages may be looked for in."""
    found = {}
    for entry in sorted({os.path.abspath(each) for each in sys.path}):
        if _of_library(entry) and os.path.isdir(entry):
            names = sorted(name for name in os.listdir(entry) if name != "__pycache__")
            found[entry] = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return found
