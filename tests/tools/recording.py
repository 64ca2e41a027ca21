"""Which lines of the product each test runs, and its seconds: a plugin of pytest for ``benchmarks.mutants --record``.

the test's process:      a context of coverage.py for each test
commands that it starts: coverage's own start-up file, which reads COVERAGE_PROCESS_START
ranks:                   :func:`recorded`, which the pool calls for each launch
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "GRAPHPAR_RECORD"
TEST = "PYTEST_CURRENT_TEST"
IMPORTED = "import"
"""In the place of a test: what runs when a module is imported."""
ROOT = Path(__file__).parents[2]


def _coverage(context: str) -> Any:
    import coverage

    return coverage.Coverage(
        config_file=str(Path(os.environ[FOLDER]) / "coveragerc"), data_suffix=True, context=context or None
    )


def _log(test: str, *seconds: float) -> None:
    with (Path(os.environ[FOLDER]) / "seconds.tsv").open("a") as file:
        file.write("\t".join([test, *(f"{each:.3f}" for each in seconds)]) + "\n")


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """What a rank runs in the block is that of the test that launched it."""
    if FOLDER not in os.environ:
        yield
        return
    test = os.environ.get(TEST, "").rpartition(" ")[0]
    run, start = _coverage(test), time.process_time()
    run.start()
    yield
    run.stop()
    run.save()
    _log(test, time.process_time() - start)


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class _Recorder:
    def __init__(self) -> None:
        os.environ.pop(TEST, None)
        self.run = _coverage("")
        self.run.start()
        self.run.switch_context(IMPORTED)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.run.switch_context(item.nodeid)
        start = _seconds()
        yield
        _log(item.nodeid, _seconds() - start)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.run.stop()
        self.run.save()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ[FOLDER])
    if not hasattr(config, "workerinput"):
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        (folder / "coveragerc").write_text(
            f"[run]\nsource = {ROOT / 'graphpar'}\nparallel = true\ndata_file = {folder / 'parts' / 'coverage'}\n"
            f"context = ${{{TEST}-}}\ndisable_warnings = no-data-collected, module-not-measured, couldnt-parse\n"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(folder / "coveragerc")
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(_Recorder())
