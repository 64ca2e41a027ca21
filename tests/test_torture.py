"""The zoo of odd models, cut into stages, against the unpartitioned models; what can't be split is refused by name.

Fast: every model of its own, and the operators whose spelling differs from their name. Slow: every operator, public
architectures, and all of the zoo with its tensors cut over tp and over cp.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import graphpar as gp
from graphpar.verification import Verification, verify_all
from tests.architectures import ARCHITECTURES, REFUSED_ARCHITECTURES, architecture
from tests.zoo import ZOO, Toy

# What can't be split, and the words that say why.
REFUSED = {
    "FixedBatch": "can't be cut into",
    "ReadLater": "Buffer 'cache' is written, and is used on stages 0, 1",
    "SharedStatistics": "Buffer 'second.running_mean' is written, and is used on stages 0, 1",
}
# Operators that are tried in the fast run: each was once spelled wrongly, or is easily.
SPELLED = (
    "chained_comparison", "meshgrid", "movedim", "unfold_dim", "interpolate_nearest", "interpolate_bilinear", "adaptive_max",
    "pools_1d", "size_arithmetic", "take_along_dim", "logsigmoid", "vector_norm", "unfold_fold", "reversed_scalars", "logical",
    "einsum", "slice_assign", "masked_scatter", "fancy_index", "max_dim_both", "view_and_base", "complex_rotary", "dropout_merged",
)  # fmt: skip
_MODELS = [name for name, toy in ZOO.items() if not toy.operator and name not in REFUSED]
FAST = [*(name for name in _MODELS if ZOO[name].plan.get("pp", 2) != 3), *SPELLED]
SLOW = [name for name in ZOO if name not in FAST and name not in REFUSED]
_WHOLE = [name for name in ZOO if name not in REFUSED]


def _program(toy: Toy) -> gp.Program:
    return gp.export(toy.build, toy.inputs(), loss_fn=toy.loss_fn, targets=toy.targets(), **toy.export)


def _planned(toy: Toy, program: gp.Program, **further: Any) -> gp.Plan:
    pins = {"schedule": "1F1B", "split": list(toy.split), **toy.plan, **further}
    return gp.plan(program, mesh={"pp": pins.pop("pp", 2)}, **pins)


def _parts(name: str) -> gp.Parts:
    toy = ZOO[name]
    program = _program(toy)
    # An operator that no rule knows may mix examples; those of the zoo don't.
    unknown = any("can't tell whether" in coupling.reason for coupling in program.couplings)
    return gp.partition(program, _planned(toy, program, allow_batch_coupling=unknown))


def _verified(parts: Mapping[str, gp.Parts | Exception], steps: int = 3) -> dict[str, Verification | Exception]:
    """All programs of one world size in one launch."""
    outcomes: dict[str, Verification | Exception] = {}
    names = [name for name, found in parts.items() if isinstance(found, gp.Parts)]
    jobs = [found for found in parts.values() if isinstance(found, gp.Parts)]
    outcomes.update(zip(names, verify_all(jobs, steps, timeout_s=600)))
    outcomes.update({name: found for name, found in parts.items() if isinstance(found, Exception)})
    return outcomes


def _compiled(names: Sequence[str]) -> dict[str, gp.Parts | Exception]:
    compiled: dict[str, gp.Parts | Exception] = {}
    for name in names:
        try:
            compiled[name] = architecture(name) if name in ARCHITECTURES else _parts(name)
        except Exception as error:
            compiled[name] = error
    return compiled


@pytest.fixture(scope="module")
def fast() -> dict[str, Verification | Exception]:
    return _verified(_compiled(FAST), steps=2)


@pytest.fixture(scope="module")
def slow() -> dict[str, Verification | Exception]:
    return _verified(_compiled(SLOW))


@pytest.fixture(scope="module")
def architectures() -> dict[str, Verification | Exception]:
    pytest.importorskip("transformers")
    return _verified(_compiled(list(ARCHITECTURES)))


def _check(outcome: Verification | Exception) -> None:
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)


@pytest.mark.parametrize("name", FAST)
def test_model_is_exact(name: str, fast: dict[str, Verification | Exception]) -> None:
    _check(fast[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_operator_is_exact(name: str, slow: dict[str, Verification | Exception]) -> None:
    _check(slow[name])


@functools.cache
def _cut(axis: str) -> dict[str, Verification | Exception]:
    """Every model of the zoo over two ranks of an axis, its batch whole."""
    compiled: dict[str, gp.Parts | Exception] = {}
    for name in _WHOLE:
        program = _program(ZOO[name])
        try:
            compiled[name] = gp.partition(program, gp.plan(program, mesh={axis: 2}, allow_batch_coupling=True))
        except Exception as error:
            compiled[name] = error
    return _verified(compiled, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("name", _WHOLE)
def test_model_is_exact_when_tensors_are_cut(name: str, axis: str) -> None:
    _check(_cut(axis)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_is_exact(name: str, architectures: dict[str, Verification | Exception]) -> None:
    _check(architectures[name])


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused(name: str) -> None:
    toy = ZOO[name]

    with pytest.raises(gp.GraphparError) as refusal:
        _planned(toy, _program(toy))

    assert REFUSED[name] in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_ARCHITECTURES)
def test_architecture_is_refused(name: str) -> None:
    pytest.importorskip("transformers")

    with pytest.raises(gp.GraphparError) as refusal:
        architecture(name)

    assert REFUSED_ARCHITECTURES[name] in str(refusal.value)


@pytest.mark.parametrize("name", ["Counters", "CounterCrosses", "CountingBlocks", "WrittenViews"])
def test_written_buffers_allow_one_microbatch(name: str) -> None:
    toy = ZOO[name]
    program = _program(toy)

    with pytest.raises(gp.GraphparError, match="updates the buffer"):
        _planned(toy, program, microbatch_size=2)


def test_emitted_code_uses_public_functions_of_torch() -> None:
    for name in SPELLED:
        for file, text in _parts(name).files.items():
            if file.endswith(".py") and file != "random_streams.py":
                assert "torch.ops" not in text, (name, file)


@pytest.mark.parametrize(
    "name", ["AlternatingBlocks", "EncoderDecoder"], ids=["a tie of a list's members", "a block whose first input has no gradient"]
)
def test_programs_of_one_device_and_cut_ones_can_be_read(name: str) -> None:
    program = _program(ZOO[name])
    for mesh in ({"pp": 1}, {"tp": 2}):
        for file, text in gp.partition(program, gp.plan(program, mesh=mesh)).files.items():
            if file.endswith(".py"):
                compile(text, file, "exec")
