"""Faults in what ranks send beside products, which types don't show, and which real ranks may hide by being in time."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from graphpar.emitted import parallel_products, ring_products
from graphpar.verification.products_proof import product_problems

FAULTS: dict[str, tuple[ModuleType, str, str, str]] = {
    "a mean in place of a sum": (
        parallel_products, 'reduce_scatter_tensor(pieces, "sum",', 'reduce_scatter_tensor(pieces, "avg",', "take the avg",
    ),
    "a gather that is not waited for": (parallel_products, "_done(join(shard))", "join(shard)", "other results"),
    "a gradient that is not waited for": (parallel_products, "of_x = _done(sent)", "of_x = sent", "other gradients"),
    "a gradient that is written while it is sent": (
        parallel_products, "entered = _rows(_done(whole))", "total.zero_(); entered = _rows(_done(whole))", "is written meanwhile",
    ),
    "a piece that is not waited for": (ring_products, "piece = _done(sent) if", "piece = sent if", "other results"),
    "a sum that is not waited for": (ring_products, "return part + _done(sent), rest", "return part + sent, rest", "other gradients"),
    "a sum that is sent too early": (ring_products, "part + _done(sent), axis)", "part + sent, axis)", "not there yet"),
}  # fmt: skip


@pytest.mark.parametrize("module", [parallel_products, ring_products])
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_nothing_is_wrong_with_what_is_emitted(module: ModuleType, degree: int) -> None:
    assert product_problems(module, degree) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    module, before, after, expected = FAULTS[fault]
    text = Path(str(module.__file__)).read_text()
    assert before in text
    faulty = ModuleType(module.__name__)
    exec(compile(text.replace(before, after), "faulty", "exec"), faulty.__dict__)
    problems = product_problems(faulty, 3)
    assert any(expected in problem for problem in problems), problems
