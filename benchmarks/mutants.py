"""Which small faults the fast tests find: faults are planted in a copy of the product, one at a time, at random places.

    python -m benchmarks.mutants --record             # once, after pip install coverage: which lines each fast test runs
    python -m benchmarks.mutants -n 60 [--seed 0] [--only PATH] [--show]

A fault is one small change of one expression or statement, at a place drawn from all places of the product. For each the tests that run
its line are run in the copy, cheap ones first, until one fails or ``--budget`` seconds of tests have passed. What survives is printed with
file, line and change: some of it changes nothing that can be seen, the rest wants a test. Where nothing is recorded, the files of tests
that import the fault's module are run, and those of its folder.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "out" / "mutants"
"""Where ``--record`` writes: coverage's data, the seconds of each test, and the product as it was."""
LEFT_OUT = {"gc", "warnings", "functools", "Path", "TypeVar", "overload"}

_FLIPPED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OTHER: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_COPIES = ("clone", "detach", "copy", "contiguous", "deepcopy")


@dataclass(frozen=True)
class Fault:
    """One change of a file's text.

    Attributes:
        kind: what is changed.
        path: of the file, from the root.
        line: the first that changes.
        start, end: of the text that is replaced, ``old``, in bytes.
        function: the qualified name of the function that it is in; empty at the level of the module.
    """

    kind: str
    path: str
    line: int
    start: int
    end: int
    old: str
    text: str
    function: str

    def planted(self, source: str) -> str:
        """Return the text with the fault."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}\n    - {self.old}\n    + {self.text}"


def faults(path: str, source: str) -> list[Fault]:
    """Return all small faults of a file; none in annotations, in docstrings, or in what is raised."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, function in _places(ast.parse(source), ""):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        for kind, changed in _changes(node):
            text = changed if isinstance(changed, str) else ast.unparse(changed)
            if text != (old := source.encode()[start:end].decode()):
                found.append(Fault(kind, path, node.lineno, start, end, old, text, function))
    return found


def _places(node: ast.AST, function: str) -> Iterator[tuple[Any, str]]:
    """Walk what is run, with the name of the function around it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[0] in LEFT_OUT:
                continue
            inside = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{function}.{child.name}".lstrip(".")
            if hasattr(child, "lineno"):
                yield child, inside
            yield from _places(child, inside)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """The small faults of one expression or statement, as what stands there instead."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", f"({ast.unparse(ast.Compare(left, [_FLIPPED[type(op)]()], [right]))})"
            if isinstance(op, ast.Eq) and not isinstance(right, ast.Constant):
                yield "prefix for equal", f"str({ast.unparse(left)}).startswith(str({ast.unparse(right)}))"
        case ast.BoolOp(op=op, values=values):
            yield "and, or", f"({ast.unparse(ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values))})"
            yield "condition dropped", f"({ast.unparse(values[0])})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "minus removed", f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHER and not _a_type(node):
            yield "operator", f"({ast.unparse(ast.BinOp(left, _OTHER[type(op)](), right))})"
            if isinstance(right, ast.Constant) and right.value == 1:
                yield "off by one", f"({ast.unparse(left)})"
        case ast.Constant(value=bool(value)):
            yield "wrong value", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Call(func=ast.Attribute(value=value, attr="startswith"), args=[argument]):
            yield "equal for prefix", f"({ast.unparse(value)} == {ast.unparse(argument)})"
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _COPIES:
            inner = node.args[0] if ast.unparse(value) == "copy" and node.args else value
            yield "copy dropped", ast.unparse(inner)
        case ast.Call(func=ast.Name(id="sorted"), args=[argument]):
            yield "order dropped", f"list({ast.unparse(argument)})"
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield "the other function", ast.unparse(ast.Call(ast.Name(_NAMES[name]), node.args, node.keywords))
        case ast.Call(func=func, args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred) and ast.unparse(func) not in ("isinstance", "getattr", "zip"):
                yield "arguments swapped", ast.unparse(ast.Call(func, [second, first, *rest], node.keywords))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branches swapped", f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement dropped", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement dropped", "pass"
        case ast.Continue():
            yield "continue dropped", "pass"
        case ast.If(test=test, orelse=[]) if isinstance(node.body[-1], (ast.Return, ast.Continue)):
            yield "early exit dropped", "pass"
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)) and node.generators[-1].ifs:
        *before, last = node.generators
        last = ast.comprehension(last.target, last.iter, [], last.is_async)
        yield "filter dropped", type(node)(node.elt, [*before, last])
    if isinstance(node, ast.Call) and node.keywords and all(k.arg for k in node.keywords):
        yield "keyword dropped", ast.unparse(ast.Call(node.func, node.args, node.keywords[:-1]))


def _a_type(node: ast.BinOp) -> bool:
    """Whether it is a union such as ``int | None``, or a text that is built."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(part.value is None or isinstance(part.value, str) for part in parts)


def drawn(number: int, seed: int, only: str = "") -> list[Fault]:
    """Draw faults: first the place among all lines that have one, then one of its changes."""
    lines: dict[tuple[str, int], list[Fault]] = {}
    for path in sorted((ROOT / "graphpar").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for fault in faults(name, path.read_text()) if only in name else ():
            lines.setdefault((name, fault.line), []).append(fault)
    chosen = random.Random(seed)
    keys = chosen.sample(sorted(lines), min(number, len(lines)))
    return [chosen.choice(lines[key]) for key in keys]


class Recorded:
    """Which tests run a line, and what they cost."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(folder / "coverage"))
        self.data.read()
        self.product, self.seed = folder / "product", (folder / "seed").read_text()
        self.cost: dict[str, float] = defaultdict(float)
        for row in (folder / "seconds.tsv").read_text().splitlines():
            name, *seconds = row.split("\t")
            self.cost[name] += sum(map(float, seconds[:2]))
        self.files = {str(Path(name).relative_to(self._top())): name for name in self.data.measured_files()}

    def _top(self) -> Path:
        return next(Path(name).parents[1] for name in self.data.measured_files() if name.endswith("graphpar/api.py"))

    def tests(self, fault: Fault, source: str) -> list[str]:
        """Return the tests that may find the fault, the cheap ones first: those that run its line.

        Of a function that has moved or has changed since, those that run any of it; of what runs at import, those of the module.
        """
        runs = self._of_line(fault, source) or self._of_function(fault.function)
        near = "" if runs else f"tests/{Path(fault.path).parts[1]}/"  # of all that import it, those of its folder
        runs = {name for name in runs or self._of_file(fault.path) if (ROOT / name.partition("::")[0]).exists()}
        return sorted(runs & self.cost.keys(), key=lambda name: (not name.startswith(near), self.cost[name]))

    def _of_line(self, fault: Fault, source: str) -> set[str]:
        before = self.product / fault.path
        if not before.exists() or before.read_text() != source:
            return set()
        return self._contexts(fault.path, [fault.line])

    def _of_function(self, function: str) -> set[str]:
        found: set[str] = set()
        for path in sorted(self.product.rglob("*.py")) if function else ():
            text = path.read_text()
            if function.rpartition(".")[2] not in text:
                continue
            for node, name in _places(ast.parse(text), ""):
                if name == function and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    lines = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
                    found |= self._contexts(str(path.relative_to(self.product)), lines)
        return found

    def _of_file(self, path: str) -> set[str]:
        return self._contexts(path, range(1, 10_000))

    def _contexts(self, path: str, lines: Sequence[int]) -> set[str]:
        if path not in self.files:
            return set()
        by_line = self.data.contexts_by_lineno(self.files[path])
        names = {name for line in lines for name in by_line.get(line, ())}
        return {name.rpartition(" (")[0] or name for name in names} - {"", "import"}


def _copied(folder: Path) -> Path:
    """A copy of the tracked files, and of those that are new."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()  # fmt: skip
    tree = folder / "tree"
    for name in names:
        place = tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            place.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, place)
    return tree


def run_tests(tree: Path, tests: Sequence[str], limit_s: float, seed: str, *options: str) -> list[str]:
    """Run tests of one seed; return what pytest says of those that fail: none where all pass, as far as the time goes.

    Each run is forked from a process that has imported what takes seconds; bytecode that is kept in the tree saves as much.
    """
    names, output = tree.parent / f"{tree.name}.txt", tree.parent / f"{tree.name}.out"
    names.write_text("\n".join(tests))
    marked = "" if "::" in tests[0] else "not slow and not costly"
    given = ["-n", "0", "-q", "-m", marked, "-p", "no:cacheprovider", "--tb=no", "--timeout=600", *options, f"@{names}"]
    process = _FORKS.Process(target=_tested, args=(tree, given, seed, output))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return []
    if process.exitcode == 0:
        return []
    said = output.read_text(errors="replace")
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed or [f"(exit {process.exitcode}) {said.strip()[-200:]}"]


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch._dynamo", "transformers", "hypothesis", "sympy", "pytest", "rich"]
)


def _tested(tree: Path, given: Sequence[str], seed: str, output: Path) -> None:
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GRAPHPAR_SAMPLE": seed}
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "tests", "graphpar")]:
        del sys.modules[name]
    import pytest

    sys.exit(int(pytest.main([*given])))


def naming(fault: Fault) -> list[str]:
    """The files of tests that import the fault's module or are named like it; then those of its folder, those with its function
    first; then the guard's."""
    module = fault.path.removesuffix(".py").replace("/", ".")
    stem = Path(fault.path).stem
    name = fault.function.rpartition(".")[2] or stem
    folder = ROOT / "tests" / Path(fault.path).relative_to("graphpar").parent
    while not folder.exists():
        folder = folder.parent
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    importing = [path for path, text in texts.items() if module in text or stem in path.stem]
    files = [
        *sorted(importing, key=lambda path: (name not in texts[path], len(texts[path]))),
        *sorted(folder.glob("test_*.py"), key=lambda path: (name not in texts[path], len(texts[path]))),
    ]
    return [*dict.fromkeys(str(path.relative_to(ROOT)) for path in files), "tests/benchmarks/test_guard.py"]


def found_by(fault: Fault, tree: Path, recorded: Recorded | None, budget_s: float, limit_s: float) -> str | None:
    """Plant the fault, run the tests that may find it; return the one that does, None for a survivor."""
    source = (tree / fault.path).read_text()
    tests: list[str] = []
    left = budget_s
    if recorded is not None:
        for name in recorded.tests(fault, source):
            if left >= recorded.cost[name]:
                left -= recorded.cost[name]
                tests.append(name)
    tests = tests or naming(fault)
    if not tests:
        return None
    (tree / fault.path).write_text(fault.planted(source))
    try:
        failed = run_tests(tree, tests, limit_s, recorded.seed if recorded else "0", "-x")
        return failed[0] if failed else None
    finally:
        (tree / fault.path).write_text(source)


def record(folder: Path, arguments: Sequence[str]) -> int:
    """Run the fast tests under coverage.py, which need not hold: what each runs is written down."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "graphpar", folder / "product" / "graphpar", ignore=shutil.ignore_patterns("__pycache__"))
    seed = os.environ.get("GRAPHPAR_SAMPLE", "0")
    (folder / "seed").write_text(seed)
    environment = {**os.environ, "GRAPHPAR_RECORD": str(folder), "GRAPHPAR_SAMPLE": seed}
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.tools.recording", *arguments], cwd=ROOT, env=environment
    ).returncode
    import coverage

    coverage.Coverage(data_file=str(folder / "coverage"), config_file=False).combine([str(folder / "parts")])
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, plant, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=60, help="faults (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATH", help="of files whose path has this in it")
    parser.add_argument(
        "--budget", type=float, default=150.0, metavar="S", help="seconds of tests for each fault (default: 150)"
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="S", help="how long the tests of one may take by the clock"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--record", action="store_true", help="run the fast tests and write down which lines each runs")
    parser.add_argument("--folder", type=Path, default=RECORD, help="of what is recorded (default: out/mutants)")
    parser.add_argument("--show", action="store_true", help="print the faults, run nothing")
    asked, others = parser.parse_known_args(arguments)
    if asked.record:
        return record(asked.folder, others)
    chosen = drawn(asked.n, asked.seed, asked.only)
    if asked.show:
        print(*chosen, sep="\n")
        return 0
    recorded = Recorded(asked.folder) if (asked.folder / "coverage").exists() else None
    survivors = []
    finders: dict[str, list[Fault]] = {}
    with tempfile.TemporaryDirectory(prefix="graphpar-mutants-") as folder, ThreadPoolExecutor(asked.jobs) as jobs:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            trees.put(_copied(Path(folder) / str(number)))

        def run(fault: Fault) -> tuple[str | None, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return found_by(fault, tree, recorded, asked.budget, asked.limit), time.monotonic() - start
            finally:
                trees.put(tree)

        for number, (fault, (found, seconds)) in enumerate(zip(chosen, jobs.map(run, chosen)), 1):
            survivors += [fault] if found is None else []
            finders.setdefault(str(found), []).append(fault)
            print(f"{number:3} {'SURVIVED' if found is None else 'caught  '} {seconds:5.0f} s {fault}")
            print(f"    {found[:140]}" if found else "    by no test", flush=True)
        names = [name for name in recorded.cost if any(name in found for found in finders)] if recorded else []
        failing = run_tests(trees.get(), names, asked.limit, recorded.seed) if recorded and names else []
    for found in failing:
        print(f"fails without a fault: {found[:140]}")
        survivors += [
            fault
            for finder, given in finders.items()
            if finder.split(" - ")[0] == found.split(" - ")[0]
            for fault in given
        ]
    caught = len(chosen) - len(survivors)
    print(f"\n{caught} of {len(chosen)} caught ({caught / max(len(chosen), 1):.0%}); survivors:", *survivors, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
