"""Ring attention on 2, 4 and 8 ranks (gloo) against attention to the whole sequence: values, gradients, bytes sent and saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from graphpar.emitted import ring_attention as emitted
from graphpar.emitted.ring_attention import ring_attention
from graphpar.operators.composite import Local
from graphpar.operators.matrix import ring_messages
from graphpar.runtime.layout import joined
from tests.ranks import ring_script as fixture
from tests.ranks.ring_script import CASES, DEGREES, OPERANDS, ROWS, Case
from tests.tools.rank_pool import RankPool

Results = list[dict[str, Tensor]]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    pool.torchrun(Path(fixture.__file__), [str(folder)], nproc=8, timeout_s=120.0)
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in range(8)]


@pytest.mark.costly
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


@pytest.mark.costly
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", [case for case in CASES if case.queries % 16 == 0 and not case.keys], ids=str)
def test_bytes_on_the_wire_are_those_of_the_formula(launch: Results, case: Case, degree: int) -> None:
    (query, key, value), upstream = case.whole()
    node = fx.Graph().call_function(ring_attention, kwargs={"is_causal": case.is_causal})
    *operands, result = (Local([x.numel() / degree], x.itemsize) for x in (query, key, value, upstream))
    ways = ring_messages(node, operands, result, degree)
    sent = torch.stack([found[f"{degree}/{CASES.index(case)}/sent"] for found in launch[:degree]])
    assert sent.amax(0).tolist() == [sum(message.nbytes * message.times for message in way) for way in ways]


@pytest.mark.costly
@pytest.mark.parametrize("degree", DEGREES)
def test_it_saves_its_shards_alone(launch: Results, degree: int) -> None:
    case = CASES[0]
    (query, key, value), result = case.whole()
    logsumexp = query.numel() // query.size(3)
    whole = sum(x.numel() for x in (query, key, value, result)) + logsumexp
    assert all(found[f"{degree}/0/saved"] == whole // degree for found in launch[:degree])


@pytest.mark.costly
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_compiles_in_one_graph(launch: Results, degree: int, tmp_path: Path, pool: RankPool) -> None:
    pool.torchrun(Path(fixture.__file__), [str(tmp_path), "compiled"], nproc=degree, timeout_s=120.0)
    for rank, found in enumerate(launch[:degree]):
        compiled = load_file(tmp_path / f"rank_{rank}.safetensors")
        for name in ("result", *OPERANDS):
            torch.testing.assert_close(compiled[name], found[f"{degree}/0/{name}"])


# ---- the kernels of a GPU, without one ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width", "of_value", "kernel"),
    [
        (torch.bfloat16, 64, 64, "flash"), (torch.bfloat16, 64, 32, "efficient"), (torch.float32, 20, 20, "efficient"),
        (torch.float32, 18, 18, "math"), (torch.float64, 16, 16, "math"),
    ],
    ids=str,
)  # fmt: skip
def test_a_gpu_has_kernels_for_16_and_32_bits(dtype: torch.dtype, width: int, of_value: int, kernel: str) -> None:
    """torch's own rules of shapes take what they are called with."""
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 48, width, dtype=dtype, device="cuda") for heads in (4, 2))
        value = torch.empty(2, 2, 48, of_value, dtype=dtype, device="cuda")
        assert emitted._kernel(query, value) == kernel
        result, logsumexp = emitted._attend(query, key, value, True, None)
        assert result.shape == (2, 4, 48, of_value) and logsumexp.shape == (2, 4, 48)
        found = emitted._attend_backward(result, query, result, logsumexp, key, value, True, None)
        assert [each.shape for each in found] == [query.shape, key.shape, value.shape]


def _efficient(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None) -> tuple[Tensor, ...]:
    """What torch's kernel gives: heads one to one, and the logsumexp in rows that are padded."""
    assert query.size(1) == key.size(1) == value.size(1)
    result, logsumexp = emitted._attend(query, key, value, rest[3], scale)
    return result, F.pad(logsumexp, (0, -query.size(2) % 32), value=torch.inf), torch.zeros(()), torch.zeros(())


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None
) -> Any:
    _, result, logsumexp, _, _, _, needs, is_causal = rest
    assert (
        query.size(1) == key.size(1) == value.size(1)
        and logsumexp.size(2) % 32 == 0
        and needs == (True, True, True, False)
    )
    lse = logsumexp[:, :, : query.size(2)]
    return *emitted._attend_backward(gradient, query, result, lse, key, value, is_causal, scale), None


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_efficient_kernel_is_called_for_grouped_heads(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 20, 8, generator=made) for heads in (4, 2, 2))
    gradient = torch.randn(2, 4, 20, 8, generator=made)
    names = {
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    monkeypatch.setattr(emitted, "_aten", SimpleNamespace(**names))
    found = []
    for kernels in (["math"] * 2, ["efficient", "math"] * 2):
        taken = iter(kernels)
        monkeypatch.setattr(emitted, "_kernel", lambda *_, taken=taken: next(taken))
        result, logsumexp = emitted._attend(query, key, value, is_causal, 0.3)
        found.append(
            (
                result,
                logsumexp,
                *emitted._attend_backward(gradient, query, result, logsumexp, key, value, is_causal, 0.3),
            )
        )
    for one, other in zip(*found):
        torch.testing.assert_close(other, one)
