"""What operators and collectives take on this machine: a table of cases, timed on every rank of a launch.

    torchrun -m graphpar.cost_models.measure FOLDER      FOLDER/request.json ──► FOLDER/rows.json

    products     x @ W^T and the two products of its backward, from small to large, in every dtype that the device has
    traffic      elementwise operators and normalisations, forward and backward
    attention    fused and causal, forward and backward
    operators    additions of four numbers: what an operator costs however small it is
    collectives  by size, between all ranks

A case runs first on one rank alone, then on as many at once as the machine has cores (or GPUs) for, which share its memory: plans run
like that. A time is the lowest tenth of its samples, so that what else a machine does counts little; collectives wait for all ranks
and for the scheduler, as those of programs do, so theirs is a mean without the extremes. Ranks beyond the cores would only take turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from graphpar.runtime.distributed import Ranks, gather_objects, start

TIMEOUT_S = 300.0
SAMPLE_S = 1e-3
"""Calls are repeated within a sample until it is at least this long."""
LEAST_SAMPLES = 5
OPERATORS = 100
"""Small operators in a row."""

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS = (
    (32, 32, 32), (64, 256, 256), (256, 64, 256), (256, 256, 64), (256, 256, 256), (8, 1024, 1024), (512, 512, 512),
    (1024, 256, 1024), (256, 1024, 256), (128, 128, 4096), (1024, 1024, 1024),
)  # fmt: skip
"""(m, n, k): rows, outputs and inputs of a linear layer."""
GPU_PRODUCTS = (
    (4096, 4096, 1024), (4096, 1024, 4096), (4096, 4096, 4096), (2048, 11008, 4096), (8192, 8192, 8192), (16384, 8192, 2048),
)  # fmt: skip
TRAFFIC = ((64, 256), (1024, 256), (2048, 512), (2048, 2048))
GPU_TRAFFIC = ((16384, 1024), (16384, 4096))
ATTENTION = ((4, 4, 128, 64), (2, 4, 512, 64), (1, 4, 1024, 64))
"""(batch, heads, length, width of a head)."""
GPU_ATTENTION = ((4, 16, 2048, 128), (1, 32, 8192, 128), (8, 16, 1024, 64))
COLLECTIVES = tuple(4**power for power in range(5, 13))
"""Bytes: 1 KiB to 16 MiB."""
GPU_COLLECTIVES = (4**13, 4**14)


@dataclass(frozen=True)
class Request:
    """What to measure: on how many ranks at once, the seconds that a case may take, and whether only small shapes are."""

    at_once: tuple[int, ...] = (1,)
    budget_s: float = 0.08
    quick: bool = False


@dataclass(frozen=True)
class Row:
    """One time. ``shape``: (m, n, k) of a product, rows and columns, (batch, heads, length, width) of attention, else bytes.

    ``processes`` ran the same at once.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    processes: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A row to be: ``make`` allocates its operands and returns what to time, which does its work ``times`` times."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], Callable[[], object]]
    times: int = 1


# ---- the cases -------------------------------------------------------------------------------------------------


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """All but the collectives."""
    gpu = device.type == "cuda"
    products = PRODUCTS[:4] if quick else PRODUCTS + (GPU_PRODUCTS if gpu else ())
    traffic = TRAFFIC[:2] if quick else TRAFFIC + (GPU_TRAFFIC if gpu else ())
    attention = ATTENTION[:1] if quick else ATTENTION + (GPU_ATTENTION if gpu else ())
    dtypes = ("fp32", "tf32", "bf16", "fp16") if gpu else ("fp32",)
    yield from _operators(device)
    for dtype in dtypes:
        for shape in products:
            yield from _products(shape, dtype, device)
    main = "bf16" if gpu else "fp32"
    for rows, columns in traffic:
        yield from _traffic((rows, columns), main, device)
    for size in attention:
        yield from _attention(size, main, device)


def _products(shape: tuple[int, int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    m, n, k = shape

    def operand(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=DTYPES[dtype])

    def forward() -> Callable[[], object]:
        x, weight = operand(m, k), operand(n, k)
        return lambda: F.linear(x, weight)

    def input_gradient() -> Callable[[], object]:
        gradient, weight = operand(m, n), operand(n, k)
        return lambda: gradient @ weight

    def weight_gradient() -> Callable[[], object]:
        gradient, x = operand(m, n), operand(m, k)
        return lambda: gradient.t() @ x

    yield Case("product", (m, n, k), dtype, forward)
    yield Case("product, gradient of x", (m, k, n), dtype, input_gradient)
    yield Case("product, gradient of W", (n, k, m), dtype, weight_gradient)


def _traffic(shape: tuple[int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    def operand(requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=requires_grad)

    def binary(operator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a, b = operand(), operand()
            return lambda: operator(a, b)

        return make

    def unary(operator: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a = operand()
            return lambda: operator(a)

        return make

    def backward(operator: Callable[[Tensor], Tensor]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a = operand(requires_grad=True)
            result, gradient = operator(a), operand()
            return lambda: torch.autograd.grad(result, a, gradient, retain_graph=True)

        return make

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape[1:])

    yield Case("add", shape, dtype, binary(torch.add))
    yield Case("mul", shape, dtype, binary(torch.mul))
    for name, operator in (("gelu", F.gelu), ("layer_norm", layer_norm)):
        yield Case(name, shape, dtype, unary(operator))
        yield Case(f"{name}, backward", shape, dtype, backward(operator))


def _attention(shape: tuple[int, int, int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    def operands() -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]

    def forward() -> Callable[[], object]:
        query, key, value = operands()
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> Callable[[], object]:
        leaves = operands()
        result = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
        gradient = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    yield Case("attention", shape, dtype, forward)
    yield Case("attention, backward", shape, dtype, backward)


def _operators(device: torch.device) -> Iterator[Case]:
    def chain(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(OPERATORS):
            x = x + y
        return x

    def forward() -> Callable[[], object]:
        x, y = torch.zeros(4, device=device, requires_grad=True), torch.zeros(4, device=device)
        return lambda: chain(x, y)

    def backward() -> Callable[[], object]:
        x, y = torch.zeros(4, device=device, requires_grad=True), torch.zeros(4, device=device, requires_grad=True)
        result, gradient = chain(x, y), torch.ones(4, device=device)
        return lambda: torch.autograd.grad(result, (x, y), gradient, retain_graph=True)

    def replayed() -> Callable[[], object]:
        """Without the host: what is left is the device's own time between small kernels."""
        x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(x, y)
        return graph.replay

    yield Case("operator", (4,), "fp32", forward, OPERATORS)
    yield Case("operator, backward", (4,), "fp32", backward, OPERATORS)
    if device.type == "cuda":
        yield Case("operator, replayed", (4,), "fp32", replayed, OPERATORS)


# ---- time ------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The lowest tenth of samples, of which each is some calls in a row, within about ``budget_s``."""
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for _ in range(2):
        call()
    once = timed(call, 1)
    calls = max(1, round(SAMPLE_S / max(once, 1e-7)))
    samples: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(samples) < LEAST_SAMPLES or time.perf_counter() < stop:
        samples.append(timed(call, calls) / calls)
    return sorted(samples)[len(samples) // 10]


def _cpu_seconds(call: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began


def _gpu_seconds(call: Callable[[], object], calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# ---- one rank --------------------------------------------------------------------------------------------------


def measure(request: Request, ranks: Ranks) -> list[Row]:
    """All rows, the same on every rank."""
    torch.manual_seed(0)
    rows = []
    for case in cases(ranks.device, request.quick):
        torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"
        for count in request.at_once:
            dist.barrier()
            own = None
            if ranks.rank < count:
                own = seconds(case.make(), ranks.device, request.budget_s) / case.times
            found = [value for value in gather_objects(own) if value is not None]
            rows.append(Row(case.what, case.shape, case.dtype, count, sum(found) / len(found)))
    if ranks.world_size > 1:
        sizes = COLLECTIVES[:2] if request.quick else COLLECTIVES + (GPU_COLLECTIVES if ranks.device.type == "cuda" else ())
        for nbytes in sizes:
            rows += _collectives(nbytes, ranks, request.quick)
    return rows


def _collectives(nbytes: int, ranks: Ranks, quick: bool) -> Iterator[Row]:
    """``nbytes``: of the whole tensor; a transfer goes from the first rank to the second and back, and is half of that."""
    piece = torch.ones(-(-nbytes // 4 // ranks.world_size), device=ranks.device)
    whole = torch.ones(piece.numel() * ranks.world_size, device=ranks.device)
    other = torch.empty_like(whole)

    def transfer() -> None:
        if ranks.rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif ranks.rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, piece),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "transfer": transfer,
    }
    for what, call in calls.items():
        count = 5 if quick else max(8, min(40, 2**24 // nbytes))
        taken = _collective_seconds(call, ranks.device, count)
        taken = max(gather_objects(taken)) / (2 if what == "transfer" else 1)
        yield Row(what, (whole.numel() * 4,), "fp32", ranks.world_size, taken)


def _collective_seconds(call: Callable[[], object], device: torch.device, count: int) -> float:
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    dist.barrier()
    for _ in range(2):
        call()
    samples = sorted(timed(call, 1) for _ in range(count))
    kept = samples[count // 10 : count - count // 10]
    return sum(kept) / len(kept)


def main(arguments: Sequence[str]) -> None:
    """One rank of a launch: the folder holds the request, and gets the rows."""
    folder = Path(arguments[0])
    request = Request(**json.loads((folder / "request.json").read_text()))
    with start(TIMEOUT_S) as ranks:
        rows = measure(request, ranks)
        if ranks.rank == 0:
            (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main(sys.argv[1:])
