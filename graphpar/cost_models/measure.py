"""Time operators and collectives on this machine: a table of cases, run on every rank of a launch.

    torchrun -m graphpar.cost_models.measure FOLDER      FOLDER/request.json ──► FOLDER/rows.json

    products     x @ W^T and the two products of its backward, from small to large, in every dtype that the device has
    traffic      elementwise operators and normalisations, forward and backward
    attention    fused and causal, forward and backward
    pages        a large tensor written where it is, and a new one, whose pages the system zeroes first (CPU)
    operators    blocks of a few numbers: the least cost of an operator, alone and in blocks that run again
    units        the same blocks, whose state FSDP2 shards over ranks that are not there: what its Python costs
    collectives  by size, between all ranks
    pipeline     a schedule over two ranks, and its stage alone (CPU)

A case runs first on one rank alone, then on as many at once as the machine has cores (or GPUs), which share its memory as plans do. A
time is the median of its samples, as that of a program's steps is. Collectives wait for all ranks and for the scheduler, as
those of programs do, so theirs is a mean without the extremes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from graphpar.cost_models.contention import Disturbed, Watch
from graphpar.emitted.recomputation import checkpointed
from graphpar.runtime.debugging.lone_group import known_to_torch
from graphpar.runtime.distributed import Ranks, gather_objects, start

TIMEOUT_S = 300.0
SAMPLE_S = 1e-3
"""Calls are repeated in a sample until it is at least this long."""
SUSTAINED_SAMPLE_S = 0.05
"""The same where clocks are to settle: long enough that the host's pauses between samples don't cool the device."""
LEAST_SAMPLES, MOST_SAMPLES = 5, 500
MICROBATCHES, STAGES = 8, 2
"""Microbatches of the pipeline, and its stages a rank."""
LARGE, PLACES = 1 << 20, 4
"""Elements from which a case runs on several allocations, and how many."""
BETWEEN, LAYERS = (128, 512), 4
"""Rows and columns that a rank on a CPU multiplies by LAYERS square matrices between messages: some milliseconds, as stages do."""
COLD_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes of the operands that products cycle through, more than fit in a cache, as a program's weights are."""
MOST_COPIES = 256
LEAST_S = 1e-5
"""The shortest time of a message that can be told from the work before it."""
BLOCKS, ADDITIONS = 20, 100
"""How many small blocks, or additions of four numbers, follow each other."""
TOGETHER = 4
"""How many small blocks run again as one: with as many operators as a layer of a transformer."""

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS = (
    (32, 32, 32), (64, 256, 256), (256, 64, 256), (256, 256, 64), (256, 256, 256), (8, 1024, 1024), (64, 1024, 512), (512, 512, 512),
    (1024, 256, 1024), (256, 1024, 256), (128, 128, 4096), (1024, 1024, 1024),
)  # fmt: skip
"""(m, n, k): rows, outputs and inputs of a linear layer."""
QUICK_PRODUCTS = ((256, 256, 256), (512, 512, 512), (1024, 256, 1024))
"""Of these, as few as are fitted to nearly the same figures: small ones alone lie in caches, and say nothing of memory."""
GPU_PRODUCTS = (
    (4096, 4096, 1024), (4096, 1024, 4096), (4096, 4096, 4096), (2048, 11008, 4096), (8192, 8192, 8192), (16384, 8192, 2048),
)  # fmt: skip
TRAFFIC = ((64, 256), (1024, 256), (2048, 512), (2048, 2048))
GPU_TRAFFIC = ((16384, 1024), (16384, 4096))
ATTENTION = ((4, 4, 128, 64), (2, 4, 512, 64), (1, 4, 1024, 64))
"""(batch, heads, length, width of a head)."""
GPU_ATTENTION = ((4, 16, 2048, 128), (1, 32, 8192, 128), (8, 16, 1024, 64))
PAGES_BYTES = 1 << 26
"""Of a tensor whose memory glibc takes from the system, and gives back when the tensor is freed."""
COLLECTIVES = tuple(4**power for power in range(5, 13))
"""Bytes: 1 KiB to 16 MiB."""
GPU_COLLECTIVES = (4**13, 4**14)

Call = Callable[[], object]


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        at_once: numbers of ranks that run a case at the same time.
        budget_s: seconds for each case.
        quick: few shapes.
        patience_s, gives_up: see :class:`graphpar.cost_models.contention.Watch`.
    """

    at_once: tuple[int, ...] = (1,)
    budget_s: float = 0.08
    quick: bool = False
    patience_s: float = 60.0
    gives_up: bool = False


@dataclass(frozen=True)
class Row:
    """One measured time.

    Attributes:
        shape: (m, n, k) of a product, (rows, columns) of traffic, (batch, heads, length, width) of attention, else bytes.
        processes: how many ranks ran it at the same time.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    processes: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A row to measure: ``make`` allocates operands and returns the call to time, which does its work ``times`` times.

    Operands are allocated again ``places`` times, since the speed of reading large ones depends on their addresses.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], Call]
    times: int = 1
    places: int = 1


# ---- the cases -------------------------------------------------------------------------------------------------


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield all cases but the collectives."""
    gpu = device.type == "cuda"
    products = QUICK_PRODUCTS if quick else PRODUCTS + (GPU_PRODUCTS if gpu else ())
    traffic = TRAFFIC[::3] if quick else TRAFFIC + (GPU_TRAFFIC if gpu else ())
    attention = ATTENTION[:2] if quick else ATTENTION + (GPU_ATTENTION if gpu else ())
    dtypes = ("fp32", "tf32", "bf16", "fp16") if gpu else ("fp32",)
    yield from _operators(device)
    if not gpu:
        yield from _pages()
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

    def product(
        first: tuple[int, int], second: tuple[int, int], multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[], Call]:
        bytes_each = (math.prod(first) + math.prod(second)) * DTYPES[dtype].itemsize
        copies = min(MOST_COPIES, -(-COLD_BYTES[device.type] // bytes_each))

        def make() -> Call:
            pairs = itertools.cycle([(operand(*first), operand(*second)) for _ in range(copies)])
            return lambda: multiply(*next(pairs))

        return make

    yield Case("product", (m, n, k), dtype, product((m, k), (n, k), F.linear))
    yield Case("product, gradient of x", (m, k, n), dtype, product((m, n), (n, k), torch.matmul))
    yield Case(
        "product, gradient of W", (n, k, m), dtype, product((m, n), (m, k), lambda gradient, x: gradient.t() @ x)
    )


def _traffic(shape: tuple[int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    def operand(requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=requires_grad)

    def binary(operator: Callable[..., Tensor]) -> Callable[[], Call]:
        def make() -> Call:  # into an existing tensor, since the operating system's time for new pages varies
            a, b, result = operand(), operand(), operand()
            return lambda: operator(a, b, out=result)

        return make

    def unary(operator: Callable[[Tensor], Tensor]) -> Callable[[], Call]:
        def make() -> Call:
            a = operand()
            return lambda: operator(a)

        return make

    def backward(operator: Callable[[Tensor], Tensor]) -> Callable[[], Call]:
        def make() -> Call:
            a = operand(requires_grad=True)
            result, gradient = operator(a), operand()
            return lambda: torch.autograd.grad(result, a, gradient, retain_graph=True)

        return make

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape[1:])

    made = {"add": binary(torch.add), "mul": binary(torch.mul)}
    for name, operator in (("gelu", F.gelu), ("layer_norm", layer_norm)):
        made |= {name: unary(operator), f"{name}, backward": backward(operator)}
    for name, make in made.items():
        yield Case(name, shape, dtype, make, places=PLACES if math.prod(shape) >= LARGE else 1)


def _pages() -> Iterator[Case]:
    def again() -> Call:
        written = torch.empty(PAGES_BYTES, dtype=torch.uint8)
        return lambda: written.fill_(1)

    yield Case("pages, again", (PAGES_BYTES,), "fp32", again)
    yield Case("pages", (PAGES_BYTES,), "fp32", lambda: lambda: torch.empty(PAGES_BYTES, dtype=torch.uint8).fill_(1))


def _attention(shape: tuple[int, int, int, int], dtype: str, device: torch.device) -> Iterator[Case]:
    def operands() -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)]

    def forward() -> Call:
        query, key, value = operands()
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> Call:
        leaves = operands()
        result = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
        gradient = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    yield Case("attention", shape, dtype, forward)
    yield Case("attention, backward", shape, dtype, backward)


def _operators(device: torch.device) -> Iterator[Case]:
    """Yield small blocks as models have them: the cost of each priced operator, with the views and the Python around it."""

    def blocks(
        wrapped: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda forward: forward,
    ) -> Callable[[], Tensor]:
        parts = [nn.Sequential(*(Small() for _ in range(TOGETHER))).to(device) for _ in range(BLOCKS // TOGETHER)]
        layers = [wrapped(part.forward) for part in parts]
        x = torch.randn(1, 4, Small.WIDTH, device=device)

        def forward() -> Tensor:
            result = x
            for layer in layers:
                result = layer(result)
            return result

        return forward

    def step(wrapped: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda forward: forward) -> Call:
        forward = blocks(wrapped)
        return lambda: forward().sum().backward()  # type: ignore[no-untyped-call]

    def replayed() -> Call:
        """Replay a CUDA graph, without the host: only the device's time between small kernels is left."""
        x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(ADDITIONS):
                x = x + y
        return graph.replay

    yield Case("operator, forward", (BLOCKS,), "fp32", blocks, BLOCKS * Small.FORWARD)
    yield Case("operator", (BLOCKS,), "fp32", step, BLOCKS * (Small.FORWARD + Small.BACKWARD))
    watched = partial(checkpointed, keeps=lambda name, number: False)
    yield Case("operator, run again", (BLOCKS,), "fp32", partial(step, checkpointed), BLOCKS * Small.DISPATCHED)
    yield Case("operator, watched", (BLOCKS,), "fp32", partial(step, watched), BLOCKS * Small.DISPATCHED)
    if device.type == "cuda":
        yield Case("operator, replayed", (4,), "fp32", replayed, ADDITIONS)


def _sharded_units(device: torch.device) -> Iterator[Case]:
    """Yield the small blocks as units that FSDP2 shards: nothing is sent, so all that is left is its Python."""
    mesh = DeviceMesh.from_group(dist.new_group(backend=known_to_torch()), device.type)
    x = torch.randn(1, 4, Small.WIDTH, device=device)

    def step(gathers: bool, reduces: bool) -> Call:
        units: Any = nn.Sequential(*(Small() for _ in range(BLOCKS))).to(device)
        for each in (*units, units):
            fully_shard(each, mesh=mesh, reshard_after_forward=gathers)
        units.set_requires_gradient_sync(reduces)
        units.set_reshard_after_backward(gathers)
        return lambda: units(x).sum().backward()

    for what, does in (("hooks", (False, False)), ("gathered", (True, False)), ("reduced", (True, True))):
        yield Case(f"sharded unit, {what}", (BLOCKS,), "fp32", partial(step, *does), BLOCKS)


class Small(nn.Module):
    """A residual feed-forward block of four rows of eight numbers."""

    WIDTH = 8
    FORWARD, BACKWARD = 5, 13
    """Priced operators; the backward has 4 products, 6 sums of parameters' gradients, the norm, gelu, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)

    DISPATCHED = 11
    """Operators of the forward as torch dispatches them, with views."""

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


# ---- time ------------------------------------------------------------------------------------------------------


def seconds(call: Call, device: torch.device, budget_s: float) -> float:
    """Return the median of samples, each of several calls in a row, within about ``budget_s``."""
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for _ in range(2):
        call()
    once = timed(call, 1)
    calls = max(1, round(SAMPLE_S / max(once, 1e-7)))
    samples: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(samples) < LEAST_SAMPLES or time.perf_counter() < stop:
        samples.append(timed(call, calls) / calls)
    return sorted(samples)[len(samples) // 2]


def sustained(call: Call, device: torch.device, keep_s: float) -> float:
    """Return the median of samples over ``keep_s`` seconds without a pause: at the clock that a long step keeps, not that of a burst."""
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    call()
    calls = max(1, round(SUSTAINED_SAMPLE_S / max(timed(call, 1), 1e-7)))
    samples: list[float] = []
    stop = time.perf_counter() + keep_s
    while not samples or time.perf_counter() < stop:
        samples.append(timed(call, calls) / calls)
    return sorted(samples)[len(samples) // 2]


def _cpu_seconds(call: Call, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began


def _gpu_seconds(call: Call, calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# ---- one rank --------------------------------------------------------------------------------------------------


def measure(request: Request, ranks: Ranks, watch: Watch) -> list[Row]:
    """Measure all rows; every rank returns the same."""
    torch.manual_seed(0)
    rows = []
    shared = _sharded_units(ranks.device) if ranks.world_size > 1 else ()
    for case in itertools.chain(cases(ranks.device, request.quick), shared):
        torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"
        found: dict[int, list[float]] = {count: [] for count in request.at_once}
        for _ in range(case.places):
            call = case.make()
            for count in request.at_once:
                timed = partial(seconds, call, ranks.device, request.budget_s) if ranks.rank < count else _nothing
                found[count] += [
                    value / case.times for value in gather_objects(watch.undisturbed(timed)) if value is not None
                ]
        rows += [Row(case.what, case.shape, case.dtype, count, sum(each) / len(each)) for count, each in found.items()]
    if ranks.world_size > 1:
        gpu = ranks.device.type == "cuda"
        sizes = COLLECTIVES[::3] if request.quick else COLLECTIVES + (GPU_COLLECTIVES if gpu else ())
        for nbytes in sizes:
            rows += _collectives(nbytes, ranks, watch, request.budget_s)
        if not gpu:
            rows += _pipeline(ranks, watch, request.budget_s)
    return rows


def _nothing() -> None:
    """Do nothing: the call of ranks that are not measured."""


def _collectives(nbytes: int, ranks: Ranks, watch: Watch, budget_s: float) -> Iterator[Row]:
    """Yield collectives of ``nbytes`` of the whole tensor, and a transfer: half the time from the first rank to the second and back."""
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

    calls: dict[str, Call] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, piece),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
    }
    work = _work(ranks.device)
    alone = _together(work, ranks, watch, budget_s)
    for what, call in calls.items():
        taken = _together(lambda call=call: (work(), call()), ranks, watch, budget_s) - alone  # type: ignore[misc]
        yield Row(what, (whole.numel() * 4,), "fp32", ranks.world_size, max(taken, LEAST_S))
    taken = (
        _together(transfer, ranks, watch, budget_s) / 2
    )  # waiting for a computing neighbour is part of a pipeline's actions
    yield Row("transfer", (whole.numel() * 4,), "fp32", ranks.world_size, taken)


def _work(device: torch.device) -> Call:
    """Return the work of a CPU before each collective: after it ranks don't arrive at once, and must wake the threads that send."""
    if device.type != "cpu":
        return _nothing
    x, layers = torch.randn(*BETWEEN), [torch.randn(BETWEEN[1], BETWEEN[1]) for _ in range(LAYERS)]
    return lambda: [x @ weight for weight in layers]


def _pipeline(ranks: Ranks, watch: Watch, budget_s: float) -> Iterator[Row]:
    """Yield a short pipeline over the first two ranks, and its stage alone: the difference is the cost of actions and transfers."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    group = dist.new_group([0, 1])
    rows, width = BETWEEN
    shape = (MICROBATCHES, rows, width)
    modules = [nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(STAGES)]
    piece = torch.randn(rows, width)

    def backward() -> None:
        modules[0](piece.requires_grad_()).sum().backward()

    def stage(place: int, module: nn.Module) -> PipelineStage:
        received = (torch.ones(rows, width, requires_grad=place > 0),)
        sent = (torch.ones(rows, width, requires_grad=True),)
        return PipelineStage(
            module, place, 2 * STAGES, ranks.device, input_args=received, output_args=sent, group=group
        )

    step: Call = _nothing
    if ranks.rank < 2:
        stages: list[Any] = [stage(ranks.rank + 2 * place, module) for place, module in enumerate(modules)]
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss)
        whole = torch.randn(rows * MICROBATCHES, width)
        step = partial(schedule.step, whole) if ranks.rank == 0 else partial(schedule.step, target=whole)
    first_two = ranks.rank < 2
    for what, call in (
        ("pipeline, forward", lambda: modules[0](piece)),
        ("pipeline, both ways", backward),
        ("pipeline", step),
    ):
        taken = _together(call if first_two else _nothing, ranks, watch, 50 * budget_s)  # type: ignore[arg-type]
        yield Row(what, shape, "fp32", 2, taken)
    dist.destroy_process_group(group)


def _together(call: Call, ranks: Ranks, watch: Watch, budget_s: float) -> float:
    """Return the seconds of a call that all ranks make: a mean without the extremes, of the slowest rank."""

    def samples(count: int) -> float:
        taken = sorted(timed(call, 1) for _ in range(count))
        kept = taken[count // 10 : count - count // 10]
        return sum(kept) / len(kept)

    timed = _gpu_seconds if ranks.device.type == "cuda" else _cpu_seconds
    once = max(gather_objects(samples(3)))
    count = min(MOST_SAMPLES, max(LEAST_SAMPLES, round(budget_s / max(once, 1e-6))))
    return float(max(gather_objects(watch.undisturbed(partial(samples, count)))))


def main(arguments: Sequence[str]) -> None:
    """Run one rank of a launch: read ``request.json`` from the folder, and write ``rows.json`` there."""
    folder = Path(arguments[0])
    request = Request(**json.loads((folder / "request.json").read_text(encoding="utf-8")))
    with start(TIMEOUT_S + request.patience_s) as ranks:
        watch, rows = Watch(ranks, request.patience_s, request.gives_up), []
        with suppress(Disturbed):  # without rows
            rows = measure(request, ranks, watch)
        if ranks.rank == 0:
            found = {"disturbed": watch.disturbed / watch.measured, "rows": [asdict(row) for row in rows]}
            (folder / "rows.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
