"""Ring attention on 2, 4 and 8 ranks (gloo) against attention to the whole sequence: values, gradients, bytes sent and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.operators.transitions import ring_messages
from graphpar.runtime.layout import joined
from tests import ring_fixture as fixture
from tests.rank_pool import RankPool
from tests.ring_fixture import CASES, DEGREES, OPERANDS, ROWS, Case

Results = list[dict[str, Tensor]]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    pool.torchrun(Path(fixture.__file__), [str(folder)], nproc=8, timeout_s=120.0)
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in range(8)]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention_to_the_whole_sequence(launch: Results, case: Case, degree: int) -> None:
    operands, upstream = case.whole()
    exact = torch.promote_types(case.dtype, torch.float32)
    leaves = [x.to(exact).requires_grad_() for x in operands]
    result = case.attend(*leaves)
    result.backward(upstream.to(exact))
    expected = {"result": result.detach(), **{n: x.grad for n, x in zip(OPERANDS, leaves)}}
    limit = TOLERANCE[case.dtype]
    for name, whole in expected.items():
        assert whole is not None
        pieces = [found[f"{degree}/{CASES.index(case)}/{name}"] for found in launch[:degree]]
        assert all(piece.dtype == case.dtype and piece.isfinite().all() for piece in pieces)
        torch.testing.assert_close(joined(pieces, ROWS, whole.size(2)).to(exact), whole, rtol=limit, atol=limit)
        if name != "result":  # the gradient of padding is zero
            assert not torch.cat(pieces, 2)[:, :, whole.size(2) :].any()


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", [case for case in CASES if case.queries % 16 == 0 and not case.keys], ids=str)
def test_bytes_on_the_wire_are_those_of_the_formula(launch: Results, case: Case, degree: int) -> None:
    (query, key, value), upstream = case.whole()
    keys = (key.nbytes + value.nbytes) / degree
    ways = ring_messages(query.nbytes / degree, keys, upstream.nbytes / degree, degree, case.is_causal)
    sent = torch.stack([found[f"{degree}/{CASES.index(case)}/sent"] for found in launch[:degree]])
    assert sent.amax(0).tolist() == [sum(message.nbytes * message.times for message in way) for way in ways]


@pytest.mark.parametrize("degree", DEGREES)
def test_it_saves_its_shards_alone(launch: Results, degree: int) -> None:
    case = CASES[0]
    (query, key, value), result = case.whole()
    logsumexp = query.numel() // query.size(3)
    whole = sum(x.numel() for x in (query, key, value, result)) + logsumexp
    assert all(found[f"{degree}/0/saved"] == whole // degree for found in launch[:degree])


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_compiles_in_one_graph(launch: Results, degree: int, tmp_path: Path, pool: RankPool) -> None:
    pool.torchrun(Path(fixture.__file__), [str(tmp_path), "compiled"], nproc=degree, timeout_s=120.0)
    for rank, found in enumerate(launch[:degree]):
        compiled = load_file(tmp_path / f"rank_{rank}.safetensors")
        for name in ("result", *OPERANDS):
            torch.testing.assert_close(compiled[name], found[f"{degree}/0/{name}"])
