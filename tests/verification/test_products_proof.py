"""Faults in what ranks send beside products, which types don't show, and which real ranks may hide by being in time."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from graphpar.emitted import parallel_products
from graphpar.verification.products_proof import product_problems

FAULTS: dict[str, tuple[str, str, str]] = {
    "a mean in place of a sum": (
        'reduce_scatter_tensor(pieces, "sum",', 'reduce_scatter_tensor(pieces, "avg",', "take the avg",
    ),
    "a gather that is not waited for": ("_done(join(shard))", "join(shard)", "other results"),
    "a gradient that is not waited for": ("of_x = _done(sent)", "of_x = sent", "other gradients"),
    "a gradient that is written while it is sent": (
        "entered = _rows(_done(whole))", "total.zero_(); entered = _rows(_done(whole))", "is written meanwhile",
    ),
    "a piece that is not waited for": ("piece = _done(sent) if", "piece = sent if", "other results"),
    "a sum that is not waited for": ("return part + _done(sent), rest", "return part + sent, rest", "other gradients"),
    "a sum that is sent too early": ("part + _done(sent), axis)", "part + sent, axis)", "not there yet"),
}  # fmt: skip


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_nothing_is_wrong_with_what_is_emitted(degree: int) -> None:
    assert product_problems(parallel_products, {"tp": degree}) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    before, after, expected = FAULTS[fault]
    text = Path(str(parallel_products.__file__)).read_text()
    assert before in text
    faulty = ModuleType(parallel_products.__name__)
    exec(compile(text.replace(before, after), "faulty", "exec"), faulty.__dict__)
    problems = product_problems(faulty, {"tp": 3})
    assert any(expected in problem for problem in problems), problems
