"""What is emitted, decided and priced is what it was; ``python -m benchmarks.guard --update`` keeps what is changed on purpose."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import guard
from tests.tools.programs import traced_once
from tests.tools.samples import drawn


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="it is written down with torch 2.13")
@pytest.mark.parametrize("case", drawn(guard.CASES, fast=8, slow=40), ids=lambda case: case.name)
def test_what_is_made_is_what_was_made(case: guard.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpar.cli.trace.export_file", traced_once)

    found = guard.made(case.example, [case], None)

    assert [*guard.differences(json.loads(guard.KEPT.read_text()), found)] == []
