"""The zoo of odd models, cut into stages, against the unpartitioned models; what can't be split is refused by name.

Fast: every fourth model of its own, and some operators whose spelling differs from their name. Slow: a sample of the others.
"""

from __future__ import annotations

import pytest

import graphpar as gp
from graphpar.verification import Verification
from tests.models.zoo import ZOO
from tests.models.zoo_programs import (
    FAST,
    REFUSED,
    SLOW,
    SPELLED,
    check,
    compiled,
    parts_of,
    planned,
    program_of,
    verified,
)
from tests.tools.samples import sample

pytestmark = pytest.mark.usefixtures("unpriced")
SAMPLE = sample(SLOW, 48)


@pytest.fixture(scope="module")
def slow() -> dict[str, Verification | Exception]:
    return verified(compiled(SAMPLE))


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", FAST)
def test_model_is_exact(name: str) -> None:
    check(verified(compiled([name]), steps=2)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_operator_is_exact(name: str, slow: dict[str, Verification | Exception]) -> None:
    check(slow[name])


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused(name: str) -> None:
    toy = ZOO[name]

    with pytest.raises(gp.GraphparError) as refusal:
        planned(toy, program_of(name))

    assert REFUSED[name] in str(refusal.value)


@pytest.mark.parametrize("name", ["Counters", "WrittenViews"])
def test_buffers_written_with_means_of_examples_allow_one_microbatch(name: str) -> None:
    toy = ZOO[name]
    program = program_of(name)

    with pytest.raises(gp.GraphparError, match="updates the buffer"):
        planned(toy, program, microbatch_size=2)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", SPELLED)
def test_emitted_code_uses_public_functions_of_torch(name: str) -> None:
    for file, text in parts_of(name).files.items():
        if file.endswith(".py") and file != "random_streams.py":
            assert "torch.ops" not in text, file


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    ["AlternatingBlocks", "EncoderDecoder"],
    ids=["a tie of a list's members", "a block whose first input has no gradient"],
)
def test_programs_of_one_device_and_cut_ones_can_be_read(name: str) -> None:
    program = program_of(name)
    for mesh in ({"pp": 1}, {"tp": 2}):
        for file, text in gp.partition(program, gp.plan(program, mesh=mesh)).files.items():
            if file.endswith(".py"):
                compile(text, file, "exec")
