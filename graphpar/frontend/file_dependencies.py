"""What a model file's code reads while it is imported, built and traced, and what its import changes.

    with OBSERVED.watching():      a process-wide record, since a module is imported once a process
        import, build, trace
    OBSERVED.facts() ──► Facts, which another process compares with what it finds: Facts.hold()

Python's own events and a few functions are watched. What native code opens, the clock, random numbers, and functions of torch that the
file replaces are not seen.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphpar.operators.rules import REGISTERED

_LARGE = 2**26
"""Files from this size on are known by size and time of change; smaller ones, of the user, by their content."""
_ACTS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect", "socket.getaddrinfo",
)  # fmt: skip
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_OF_KERNELS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that torch itself sets, to folders of compiled kernels; no trace depends on them."""
_LISTINGS = ("os.listdir", "os.scandir", "glob.glob")


@dataclass(frozen=True)
class Facts:
    """What a capture depends on.

    Attributes:
        files: what each file was, by path; ``None`` for one that there was not.
        paths: for each path that was asked for, whether there is something and what.
        modules: top-level modules that were imported or looked for.
        beside: folders that were on ``sys.path`` while the model file was imported.
        children: folders of the user's packages, each with a name that was imported from it or looked for there.
        own: what the user's folders have of the names of these modules, which something new might hide.
    """

    files: Mapping[str, str | None]
    paths: Mapping[str, str | None]
    modules: frozenset[str]
    beside: frozenset[str]
    children: frozenset[tuple[str, str]]
    own: frozenset[str]

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        return (
            _own_names(self.modules, self.beside, self.children) == self.own
            and all(_path(path) == value for path, value in self.paths.items())
            and all(_file(path) == value for path, value in self.files.items())
        )


@dataclass
class Observed:
    """The record of this process.

    Attributes:
        unknowable: why nothing can be said of what was read, if so.
        effect: what an import did that only another import does again, if anything.
    """

    opened: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    beside: set[str] = field(default_factory=set)
    unknowable: str | None = None
    effect: str | None = None
    depth: int = 0
    began: int | None = None  # in nanoseconds since the epoch
    hooked: bool = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is read within the block, in this thread and others."""
        if not self.hooked:
            sys.addaudithook(self._event)
            self.hooked = True
        self.began = self.began or _next_tick()
        self.depth += 1
        try:
            with self._functions() if self.depth == 1 else contextlib.nullcontext():
                yield
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """As :meth:`watching`, and note whether the block prints or changes how torch, Python or graphpar behave."""
        before = _settings()
        with self.watching(), _noticed(sys.stdout, self._printed), _noticed(sys.stderr, self._printed):
            yield
        changed = [name for name, value in _settings().items() if value != before[name]]
        if changed and self.effect is None:
            self.effect = f"the model file changes {', '.join(changed)}"

    def _printed(self) -> None:
        self.effect = self.effect or "the model file prints"

    def facts(self) -> Facts:
        """Return what was looked at, as it is now."""
        modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        opened = self.opened | {path for path in modules.values() if isinstance(path, str)}
        names = frozenset(name.partition(".")[0] for name in (*modules, *self.modules)) - {""}
        parts = (name.rpartition(".") for name in (*modules, *self.modules))
        children = frozenset((folder, name) for parent, _, name in parts for folder in _package_folders(parent))
        return Facts(
            {path: _file(path) for path in sorted(opened)},
            {path: _path(path) for path in sorted(self.asked)},
            names,
            frozenset(self.beside),
            children,
            _own_names(names, self.beside, children),
        )

    def why_not(self, facts: Facts) -> str | None:
        """Say why ``facts`` do not tell what the capture depends on; None where they do."""
        if self.unknowable is not None:
            return self.unknowable
        changed = (path for path in facts.files if not _of_library(path) and _changed_since(path, self.began or 0))
        return next((f"{path} was changed while the model was traced" for path in changed), None)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.depth:
            return
        if event == "open":
            if not (isinstance(args[1], str) and not args[1].startswith("r")):
                self._note(self.opened, args[0])
        elif event == "import":
            self.modules.add(args[0])
        elif event in _LISTINGS and self.unknowable is None:
            asks = sys._getframe(1).f_code.co_filename
            importing = asks.startswith("<frozen importlib") or f"{os.sep}importlib{os.sep}" in asks
            if not importing and not _of_library(os.path.abspath(args[0] or ".")):
                self.unknowable = f"the model file lists the folder {args[0]}"
        elif event in _ACTS and self.unknowable is None:
            self.unknowable = f"the model file starts a process or uses the network ({event})"

    def _note(self, known: set[str], path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.path.abspath(os.fsdecode(path))
            if not text.startswith(_SYSTEM) and not text.endswith(".pyc") and "torchinductor_" not in text:
                known.add(text)

    @contextlib.contextmanager
    def _functions(self) -> Iterator[None]:
        """Watch questions that Python raises no event for: whether there is a file, or a module."""

        def asks(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(path: Any, *args: Any, **options: Any) -> Any:
                self._note(self.asked, path)
                return original(path, *args, **options)

            return function

        def seeks(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(name: str, package: str | None = None) -> Any:
                relative = name.startswith(".") and package is not None
                self.modules.add(importlib.util.resolve_name(name, package) if relative else name)
                return original(name, package)

            return function

        watched: tuple[tuple[Any, str, Any], ...] = (
            (os, "stat", asks), (os, "lstat", asks), (os, "access", asks), (importlib.util, "find_spec", seeks),
        )  # fmt: skip
        before = [getattr(place, name) for place, name, _ in watched]
        for (place, name, wrapped), original in zip(watched, before):
            setattr(place, name, wrapped(original))
        try:
            yield
        finally:
            for (place, name, _), original in zip(watched, before):
                setattr(place, name, original)


OBSERVED = Observed()


def surroundings() -> tuple[Any, ...]:
    """Return what any capture may depend on: the environment, and what is installed in the folders of ``sys.path``."""
    installed = []
    for entry in sorted({os.path.abspath(each) for each in sys.path}):
        if _of_library(entry) and os.path.isdir(entry):
            installed.append((entry, sorted(name for name in os.listdir(entry) if name != "__pycache__")))
    return sorted(_environment().items()), installed


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_KERNELS}


# ---- the sources of a model ------------------------------------------------------------------------------------------


def sources(model: str | Path) -> dict[str, str]:
    """Return hashes of a model file, a path or a dotted name, and of the user's modules that it imports: by path, relative to the folder
    that it is imported from. They are found in the text, so nothing is imported."""
    as_file = Path(model).is_file()
    root = Path(model).resolve().parent if as_file else Path.cwd()
    places = [root, *(Path(entry) for entry in sys.path if not _of_library(os.path.abspath(entry)))]
    first = [(Path(model).resolve(), "")] if as_file else list(_modules(str(model), places))
    found: dict[Path, str] = {}
    while first:
        file, package = first.pop()
        if file in found:
            continue
        content = file.read_bytes()
        found[file] = hashlib.sha256(content).hexdigest()
        names = _imports(content, package)
        first += [each for name in names if name.partition(".")[0] != "graphpar" for each in _modules(name, places)]
    return {os.path.relpath(file, root): digest for file, digest in sorted(found.items())}


def _modules(name: str, places: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files of a module and of the packages that it is in, each with the package that relative imports in it begin from."""
    parts = name.split(".")
    for place in places:
        if not any((place / f"{parts[0]}{end}").exists() for end in ("", ".py")):
            continue
        for at in range(1, len(parts) + 1):
            within, folder = ".".join(parts[:at]), place.joinpath(*parts[:at])
            for file, package in (
                (folder / "__init__.py", within),
                (folder.with_suffix(".py"), within.rpartition(".")[0]),
            ):
                if file.is_file():
                    yield file.resolve(), package
        return


def _imports(content: bytes, package: str) -> set[str]:
    """Return what a file's text imports: names of modules, and those of modules or of something in them."""
    found = set[str]()
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)} - {""}
    return found


# ---- what is compared ---------------------------------------------------------------------------------------------


def _library() -> tuple[str, ...]:
    """The folders of Python and of installed packages."""
    shared = (entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")))  # by a .pth file
    known = {
        *sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), sys.prefix, sys.base_prefix, *shared,
    }  # fmt: skip
    return tuple(sorted({os.path.abspath(path) + os.sep for path in known if path}))


_LIBRARY = _library()


def _of_library(path: str) -> bool:
    return (path + os.sep).startswith(_LIBRARY)


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
    """Say what is at a path: nothing, a folder, or a file of a size and a time of change; of a link also where it leads."""
    leads = f"{os.readlink(path)} " if os.path.islink(path) else ""
    try:
        found = os.stat(path)
    except OSError:
        return leads or None
    return f"{leads}folder" if os.path.isdir(path) else f"{leads}{found.st_size} {found.st_mtime_ns}"


def _next_tick() -> int:
    """Wait for the next tick of the clock that Linux stamps files with, 1 to 10 ms, and return it, in nanoseconds.

    What is written before has an earlier stamp, what is written after has this one or a later one; by the exact clock a
    file that is written right afterwards may seem older.
    """
    if sys.platform != "linux":
        return time.time_ns()
    coarse = 5  # CLOCK_REALTIME_COARSE, which the module time does not name
    began = time.clock_gettime_ns(coarse)
    while (now := time.clock_gettime_ns(coarse)) == began:
        time.sleep(0.0005)
    return now


def _changed_since(path: str, nanoseconds: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns >= nanoseconds
    except OSError:
        return False


def _package_folders(name: str) -> list[str]:
    """Return the folders of a package of the user's that is imported."""
    folders = getattr(sys.modules.get(name), "__path__", ()) if name else ()
    return [path for path in map(os.path.abspath, folders) if not _of_library(path)]


def _own_names(
    modules: frozenset[str], beside: set[str] | frozenset[str], children: frozenset[tuple[str, str]]
) -> frozenset[str]:
    """Return which of these modules are in the user's folders: top-level ones in those of ``sys.path`` and ``beside``, and ``children``."""
    found = set()
    for folder in {folder for folder, _ in children}:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found |= {os.path.join(folder, name) for name in names if (folder, name.partition(".")[0]) in children}
    for entry in {os.path.abspath(each) for each in sys.path} | beside:
        if not _of_library(entry) and os.path.isdir(entry):
            found |= {os.path.join(entry, name) for name in os.listdir(entry) if name.partition(".")[0] in modules}
    return frozenset(found)


# ---- what an import changes ----------------------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    cuda = torch.backends.cuda
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "whether gradients are computed": torch.is_grad_enabled(),
        "whether torch is deterministic": torch.are_deterministic_algorithms_enabled(),
        "how precise products are": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32),
        "which attention is computed": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        ),
        "how many threads torch has": torch.get_num_threads(),
        "the rules of operators": dict(REGISTERED),
        "sys.path": list(sys.path),
        "the current folder": os.getcwd(),
        "the environment": _environment(),
    }  # fmt: skip


@contextlib.contextmanager
def _noticed(stream: Any, wrote: Callable[[], None]) -> Iterator[None]:
    """Call ``wrote`` whenever ``stream`` is written in the block."""
    write, own = stream.write, vars(stream).get("write")

    def noticed(*arguments: Any) -> Any:
        wrote()
        return write(*arguments)

    stream.write = noticed
    try:
        yield
    finally:
        if own is None:
            del stream.write
        else:
            stream.write = own
