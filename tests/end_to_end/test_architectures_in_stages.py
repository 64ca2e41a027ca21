"""Slow: public architectures, split into stages, against the unpartitioned models; what can't be split is refused by name."""

from __future__ import annotations

import pytest

import graphpar as gp
from graphpar.verification import Verification
from tests.models.architectures import ARCHITECTURES, REFUSED_ARCHITECTURES, architecture
from tests.models.zoo_programs import check, compiled, verified
from tests.tools.samples import sample

SAMPLE = sample(ARCHITECTURES, 10)


@pytest.fixture(scope="module")
def architectures() -> dict[str, Verification | Exception]:
    pytest.importorskip("transformers")
    return verified(compiled(SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_architecture_is_exact(name: str, architectures: dict[str, Verification | Exception]) -> None:
    check(architectures[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_ARCHITECTURES)
def test_architecture_is_refused(name: str) -> None:
    pytest.importorskip("transformers")

    with pytest.raises(gp.GraphparError) as refusal:
        architecture(name)

    assert REFUSED_ARCHITECTURES[name] in str(refusal.value)
