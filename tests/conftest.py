"""What holds for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.tools.samples import drawn_slow, set_aside
from tests.tools.session_folder import VARIABLE, new_session_folder, session_folder

if TYPE_CHECKING:
    from tests.tools.rank_pool import RankPool

# Reports are as wide as the terminal, which is another one for each who runs the tests.
os.environ.pop("COLUMNS", None)
# Each test traces what it needs.
os.environ["GRAPHPAR_CACHE"] = ""
# As the commands do: compiling makes many objects that stay, so that looking for garbage often is a tenth of a test's time.
gc.set_threshold(400_000, 20, 20)

FIRST = ("end_to_end", "docs", "planning")
"""Folders of the longest files: they begin, so that no worker is left with one of them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    if session_folder() is None:  # else this is a worker, which has that of the process that started it
        session = contextlib.ExitStack()
        os.environ[VARIABLE] = str(session.enter_context(new_session_folder()))
        config.add_cleanup(session.close)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":  # else it runs no tests itself
        _prepare()


def _prepare() -> None:
    import torch
    from hypothesis import HealthCheck, settings

    # Each worker of pytest and each rank has a core; threads that wait for one another's core only burn time.
    torch.set_num_threads(1)
    # A machine that others use too is slow now and then, which says nothing of a test.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before those that are marked as slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):  # a test that is named runs, with all of its cases
        set_aside(items)
        kept = drawn_slow(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
        items.sort(key=lambda item: item.path.parent.name not in FIRST)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest looks for garbage five times at its end, which takes minutes among all that was compiled


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[RankPool]:
    """Programs are verified by processes that are started once."""
    from tests.tools.rank_pool import RankPool

    ranks = RankPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphpar.runtime.launching.worker.torchrun", ranks.torchrun)
        yield ranks
    ranks.close()


@pytest.fixture(scope="session", autouse=True)
def _examples_are_traced_once() -> Iterator[None]:
    """By the commands too: most of what a command takes on a small model is the trace."""
    from tests.tools.programs import traced_once

    with pytest.MonkeyPatch.context() as patch:
        for command in ("compile_command", "estimate_command"):
            patch.setattr(f"graphpar.cli.{command}.export_file", traced_once)
        yield


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test needs a trace of its own."""
    from graphpar.cli.trace import export_file

    monkeypatch.setattr("graphpar.cli.compile_command.export_file", export_file)


@pytest.fixture(scope="module")
def unpriced() -> Iterator[None]:
    """Programs are made without an estimate of what they take, which other tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphpar.passes.compilation.priced", lambda compilation, cluster: compilation)
        yield
