"""Public architectures over two tensor-parallel ranks against themselves on one device, and how much of each is sharded.

Fast: one of each way to write attention that was once left whole. Slow: all, in batches of programs a launch.
"""

from __future__ import annotations

import functools

import pytest

from tests.models.architectures import ALL

pytest.importorskip("transformers")

import graphpar as gp
from benchmarks.architectures import Row, compiled, measured, verified
from graphpar.verification import verify_all
from tests.tools.samples import sample

MESH = {"tp": 2}
# Queries, keys and values sliced from one product; weights used as weight.T with one shared key; grouped convolutions; T5's two halves.
FAST = ("phi3", "falcon", "convnext", "t5")
SLOW = sample([name for name in ALL if name not in FAST], 10)


@functools.cache
def fast(name: str) -> tuple[Row, gp.Parts]:
    row, parts = compiled(name, MESH)
    assert parts is not None, row.reason
    (found,) = verify_all([parts], 2, timeout_s=300)
    return verified(row, found), parts


@pytest.fixture(scope="module")
def slow() -> dict[str, Row]:
    return {row.architecture: row for row in measured(SLOW, MESH)}


def _check(row: Row) -> None:
    assert row.ok, (row.error, row.reason)
    assert row.weights is not None and row.weights > 0.9, row.weights
    assert row.flops is not None and row.flops > 0.5, (row.flops, row.reason)


@pytest.mark.costly
@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("name", FAST)
def test_architecture_is_sharded_and_exact(name: str) -> None:
    row, parts = fast(name)

    _check(row)
    assert parts.plan.sharding.undivided == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_architecture_is_exact(name: str, slow: dict[str, Row]) -> None:
    _check(slow[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_types_of_the_emitted_program(name: str) -> None:
    pytest.importorskip("spmd_types")

    assert gp.check(fast(name)[1]).ok
