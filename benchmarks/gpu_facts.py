"""Rows of the GPU benchmark about torch and one device: names, exactness, host synchronisations, messages, checkpoints."""

from __future__ import annotations

import ast
import importlib
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import graphpar
import graphpar as gp
from benchmarks import llama
from benchmarks.gpu_programs import Programs, Row, needs_gpu
from graphpar.cost_models import measure as timing
from graphpar.emitted import collectives, random_streams, ring_attention
from graphpar.operators.rank_threads import on_ranks
from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.rank_alone import draw_values
from graphpar.runtime.errors import LaunchError
from graphpar.runtime.launching.launch import torchrun

METHODS = (
    "torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms",
    "torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._prefetch_unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._init_mp_dtypes",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime.register_custom_function",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._prepare_schedule_with_comms",
    "torch.distributed.pipelining.stage._PipelineStageBase.backward_maybe_with_nosync",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops._c10d_functional.all_to_all_single",
    "torch.ops._c10d_functional.reduce_scatter_tensor",
)
"""What is called on objects of torch, whose classes no import of graphpar names."""
OTHER_PATHS = "runtime/torch_versions.py"
"""The file that asks for what a version lacks, and then does it in another way."""


# ---- A: does it run -------------------------------------------------------------------------------------------------


def names_of_torch(programs: Programs) -> Iterator[Row]:
    """Look up every name of torch that graphpar's files import or spell out, and the methods above."""
    used = {name: {"methods of objects"} for name in METHODS}
    for file in sorted(Path(graphpar.__file__).parent.rglob("*.py")):
        for name in _torch_names(ast.parse(file.read_text(encoding="utf-8"))):
            used.setdefault(name, set()).add(str(file))
    private = {name for name in used if any(part.startswith("_") for part in name.split("."))}
    lacking = {name for name in used if not _has(name)}
    elsewhere = {name for name in lacking if all(OTHER_PATHS in file for file in used[name])}
    for name in sorted(private | lacking) if programs.every_name else sorted(lacking):
        note = "here" if name not in lacking else "lacking, another path is taken" if name in elsewhere else "LACKING"
        where = ", ".join(sorted(file.rpartition("graphpar/")[2] for file in used[name])[:2]) if name in lacking else ""
        yield Row(name, note=f"{note} {where}".rstrip())
    yield Row(
        "names of torch that are lacking",
        len(lacking - elsewhere),
        most=0,
        note=f"of {len(used)}, {len(private)} private",
    )


def _torch_names(module: ast.Module) -> Iterator[str]:
    """Yield what a file imports of torch, and what it spells out with a private part, such as ``torch._C._current_graph_task_id``."""
    known: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _of_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and _of_torch(node.module or ""):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(module):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        private = any(part.startswith("_") for part in parts) and not any(part.startswith("__") for part in parts)
        if private and isinstance(inner, ast.Name) and inner.id in known:
            yield ".".join([known[inner.id], *parts])


def _of_torch(name: str) -> bool:
    """Whether a module is torch's own, and needs no other package."""
    return (name == "torch" or name.startswith("torch.")) and name != "torch.utils.tensorboard"


def _has(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def resumed(programs: Programs) -> Iterator[Row]:
    """Train, save, and resume in another pipeline: the losses that follow are the same bits."""
    size, steps = programs.size, 3 if programs.toy else 10
    batch = llama.example_batch(size)
    with tempfile.TemporaryDirectory(prefix="graphpar_gpu_") as scratch, start() as ranks:
        losses: list[list[float]] = [[], []]
        for turn in range(2):
            with Pipeline(programs.folder("whole"), ranks.device) as pipeline:
                draw_values(pipeline)
                optimizer = pipeline.optimizer()
                if turn:
                    pipeline.resume(scratch, optimizer)
                for number in range(steps if turn else 2 * steps):
                    loss = pipeline.step(batch)
                    assert loss is not None
                    losses[turn].append(float(loss))
                    pipeline.clip_grad_norm_(1.0)
                    optimizer.step()
                    pipeline.zero_grad()
                    if not turn and number == steps - 1:
                        pipeline.save_checkpoint(Path(scratch) / str(steps), optimizer, step=steps)
        differing = sum(a != b for a, b in zip(losses[0][steps:], losses[1]))
        yield Row("losses after resuming that differ", differing, most=0, note=f"of {steps}, on {ranks.backend}")
        yield Row("last loss over the first", losses[0][-1], losses[0][0], most=1.0)


def against_eager(programs: Programs) -> Iterator[Row]:
    """Compare the emitted program with the model as it is, under autocast: seconds, memory and losses."""
    size, device = programs.size, programs.device
    found = programs.alone("whole")
    with torch.device(device):
        model = llama.Llama(size)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {name: value.to(device) for name, value in llama.example_batch(size).items()}
    pieces = size.batch // 2
    mixed = nullcontext() if programs.toy else torch.autocast(device.type, torch.bfloat16)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for ids, labels in zip(batch["ids"].chunk(pieces), batch["labels"].chunk(pieces)):
            with mixed:
                loss = model(ids, labels) / pieces
            loss.backward()
            total += loss.detach()
        return total

    def whole_step() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        whole_step()
    if not programs.toy:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timing._gpu_seconds(whole_step, 1) if not programs.toy else timing._cpu_seconds(whole_step, 1)
                                for _ in range(5))  # fmt: skip
    most = None if programs.toy else 1.0
    yield Row("step, emitted over eager", found.step_s, seconds, "s", most=most)
    if programs.toy:
        yield needs_gpu("memory, emitted over eager")
    else:
        peak = torch.cuda.max_memory_allocated()
        yield Row("memory, emitted over eager", found.allocated_bytes, peak, "B", most=0.95)
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    eager = float(step())
    with tempfile.TemporaryDirectory(prefix="graphpar_gpu_") as scratch, start() as ranks:
        from safetensors.torch import save_file

        save_file(state, f"{scratch}/model.safetensors")
        with Pipeline(programs.folder("whole"), ranks.device) as pipeline:
            pipeline.load_weights(f"{scratch}/model.safetensors")
            loss = pipeline.step(llama.example_batch(size))
        assert loss is not None
        share = abs(float(loss) - eager) / abs(eager)
        yield Row("loss, off from eager by", share, most=1e-5 if programs.toy else 0.01, note="as a share of it")


class _Counted(TorchDispatchMode):
    """Counts operators that make something, and those that the host waits for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.launches, self.waits = device, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.waits += func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.device.type
        self.launches += not views and "empty" not in func.name() and func.name() != "aten::detach"
        return func(*args, **(kwargs or {}))


def synchronisations(programs: Programs) -> Iterator[Row]:
    """Count what the host waits for in a step, and operators by layer; how long the device is idle."""
    with start() as ranks, Pipeline(programs.folder("whole"), ranks.device) as pipeline:
        draw_values(pipeline)
        optimizer = pipeline.optimizer()
        batch = llama.example_batch(programs.size)

        def step(number: int) -> None:
            pipeline.step(batch, step=number)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            pipeline.zero_grad()

        for number in range(3):  # before step 3 ranks do not compare what they share
            step(number)
        with _Counted(programs.device) as passes:
            pipeline.step(batch, step=3)
            pipeline.clip_grad_norm_(1.0)
        with _Counted(programs.device) as update:
            optimizer.step()
        pipeline.zero_grad()
        most, waits = (
            (None, "with checks of the batch, which is on the host")
            if programs.toy
            else (1, "for tensors of the device")
        )
        yield Row("waits of the host in a step", passes.waits, most=most, note=waits)
        layers = programs.size.layers * pipeline.program.microbatches
        yield Row("operators by layer and microbatch", passes.launches / layers, note="forward, backward, clip")
        yield Row("operators of the optimizer", update.launches)
        if programs.toy:
            yield needs_gpu("idle share of the device")
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(5)
            torch.cuda.set_sync_debug_mode("default")
        syncs = sum("synchroniz" in str(each.message) for each in said)
        yield Row("synchronisations that CUDA saw", syncs, most=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(6)
            torch.cuda.synchronize()
        spans = sorted((each.time_range.start, each.time_range.end) for each in profile.events())
        busy, end = 0.0, spans[0][0]
        for first, last in spans:
            busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
        yield Row("idle share of the device", 1 - busy / (end - spans[0][0]), most=0.03)


_ENDINGS = {
    "SIGABRT": "import os; os.abort()",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "boom": "from graphpar.runtime import start\nwith start() as ranks:\n    raise ValueError('boom')",
}


def messages(programs: Programs) -> Iterator[Row]:
    """End a rank in several ways, and look whether the message names the way."""
    endings = dict(_ENDINGS)
    if not programs.toy:
        endings["out of memory"] = (
            "import torch\nfrom graphpar.runtime import start\nwith start() as ranks:\n"
            "    torch.empty(1 << 42, dtype=torch.uint8, device=ranks.device)"
        )
    with tempfile.TemporaryDirectory(prefix="graphpar_gpu_") as scratch:
        for word, text in endings.items():
            script = Path(scratch) / "ends.py"
            script.write_text(text, encoding="utf-8")
            said = "nothing"
            try:
                torchrun(script, nproc=1, timeout_s=120)
            except LaunchError as error:
                said = str(error)
            yield Row(
                f"a rank that ends by {word} is named", float(word in said), least=1, note=said.splitlines()[0][:60]
            )
    if programs.toy:
        yield needs_gpu("a rank that ends by out of memory is named")


# ---- C: tables and techniques ---------------------------------------------------------------------------------------

SUSTAINED_S = 2.0


def operators(programs: Programs) -> Iterator[Row]:
    """Time products, attention and traffic as the calibration does, in bursts, and over and over as a step does."""
    device = programs.device
    wanted = {"product", "attention", "attention, backward", "add", "operator, replayed", "operator"}
    shapes = {} if programs.toy else {"product": (8192, 8192, 8192), "attention": (1, 32, 8192, 128)}
    largest: dict[str, timing.Case] = {}
    for case in timing.cases(device, programs.toy):
        of = shapes.get(case.what.partition(",")[0], case.shape)
        if case.what in wanted and case.dtype in ("bf16", "fp32") and case.shape == of:
            largest[case.what] = case
    for case in largest.values():
        call = case.make()
        bursts = timing.seconds(call, device, 0.05) / case.times
        kept = timing.sustained(call, device, 0.1 if programs.toy else SUSTAINED_S) / case.times
        unit, amount = _amount(case)
        note = f"{case.dtype} {list(case.shape)}; predicted: in bursts"
        yield Row(f"{case.what}, sustained", amount / kept, amount / bursts, unit, note=note)
    if programs.toy:
        yield needs_gpu("copies between host and device")
        return
    for pinned in (True, False):
        host, there = (
            torch.empty(1 << 28, dtype=torch.uint8, pin_memory=pinned),
            torch.empty(1 << 28, dtype=torch.uint8, device=device),
        )
        taken = timing.seconds(partial(there.copy_, host, non_blocking=True), device, 0.3)
        least = 50.0 if pinned else None
        yield Row(
            f"host to device, {'pinned' if pinned else 'pageable'}",
            there.nbytes / taken / 1e9,
            unit="GB/s",
            least=least,
        )


def _amount(case: timing.Case) -> tuple[str, float]:
    """Return what a case's rate counts, and how much of it a call has."""
    sizes = [float(size) for size in case.shape]
    if case.what == "product":
        return "TFLOP/s", 2e-12 * sizes[0] * sizes[1] * sizes[2]
    if case.what.startswith("attention"):
        passes = 2.5 if "backward" in case.what else 1.0
        return "TFLOP/s", passes * 2e-12 * sizes[0] * sizes[1] * sizes[2] ** 2 * sizes[3]
    if case.what == "add":
        return "TB/s", 3e-12 * sizes[0] * sizes[1] * timing.DTYPES[case.dtype].itemsize
    return "M operators/s", 1e-6


def checkpoints(programs: Programs) -> Iterator[Row]:
    """Save and load weights and the optimizer's state: what training waits for, and bytes a second."""
    with (
        tempfile.TemporaryDirectory(prefix="graphpar_gpu_") as scratch,
        start() as ranks,
        Pipeline(programs.folder("whole"), ranks.device) as pipeline,
    ):
        draw_values(pipeline)
        optimizer = pipeline.optimizer()
        pipeline.step(llama.example_batch(programs.size))
        optimizer.step()
        for number, wait in enumerate((True, False)):
            folder = Path(scratch) / str(number)
            seconds = _waited(partial(pipeline.save_checkpoint, folder, optimizer, step=number, wait=wait), programs)
            if wait:
                nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                least = None if programs.toy else 1.5
                yield Row("save, waited for", seconds, unit="s")
                yield Row("save, bytes a second", nbytes / seconds / 1e9, unit="GB/s", least=least)
            else:
                yield Row("save beside training, stall", seconds, unit="s", most=0.5)
        load = _waited(partial(pipeline.load_checkpoint, Path(scratch) / "0", optimizer), programs)
        yield Row("load", load, unit="s", note=f"{nbytes / load / 1e9:.2f} GB/s")


def _waited(call: Callable[[], object], programs: Programs) -> float:
    if not programs.toy:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---- D: exactness ---------------------------------------------------------------------------------------------------


def ring(programs: Programs) -> Iterator[Row]:
    """Run attention over a sequence on 4 ranks, threads of this process, against the whole attention in float64."""
    device, count = programs.device, 4
    shape = (1, 4, 64, 16) if programs.toy else (1, 8, 4096, 128)
    dtypes = (torch.float32,) if programs.toy else (torch.bfloat16, torch.float16, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    given = [torch.randn(shape, generator=generator, device=device) for _ in range(4)]
    for dtype, causal in itertools.product(dtypes, (False, True)):
        operands = [tensor.to(dtype) for tensor in given]
        exact = _attention([tensor.double() for tensor in operands], causal)
        whole = _attention(operands, causal)

        def shard(rank: int, operands: list[Tensor] = operands, causal: bool = causal) -> list[Tensor]:
            own = [tensor.chunk(count, 2)[rank].clone().requires_grad_() for tensor in operands[:3]]
            result = ring_attention.ring_attention(own[0], own[1], own[2], "cp", is_causal=causal)
            return [result.detach(), *torch.autograd.grad(result, own, operands[3].chunk(count, 2)[rank])]

        parts = on_ranks(shard, count, [collectives, ring_attention])
        for what, place in (("result", 0), ("gradient of keys", 2)):
            joined = torch.cat([part[place] for part in parts], 2)
            error, own = (_error(each, exact[place]) for each in (joined, whole[place]))
            name = f"ring, {str(dtype).removeprefix('torch.')}{', causal' if causal else ''}: {what}"
            yield Row(
                name,
                error,
                max(own, 1e-9),
                most=2.0 if programs.toy else 1.5,
                note="over the error of the whole attention",
            )


def _attention(operands: list[Tensor], causal: bool) -> list[Tensor]:
    query, key, value = (tensor.clone().requires_grad_() for tensor in operands[:3])
    result = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return [result.detach(), *torch.autograd.grad(result, (query, key, value), operands[3])]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def verified(programs: Programs) -> Iterator[Row]:
    """Compare small programs on two CPU ranks with the model on one device: several ranks on one GPU would need another backend."""
    toy = programs.toy
    batch = llama.example_batch(llama.TOY)
    program = programs.program(llama.TOY) if toy else gp.export(lambda: llama.Llama(llama.TOY), kwargs=batch)
    for mesh in ({"tp": 2},) if toy else ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_shard": 2}):
        found = gp.verify(gp.partition(program, gp.plan(program, mesh=mesh)), steps=2)
        error = max(found.max_error.values())
        name = ", ".join(f"{axis}={degree}" for axis, degree in mesh.items())
        yield Row(f"verify {name}", error, most=1e-4, note="CPU ranks; largest error of loss, gradient, parameter")


def repeated(programs: Programs) -> Iterator[Row]:
    """Run the backward of attention twice on the same operands, and count gradients whose bits differ."""
    shape = (2, 3, 64, 16) if programs.toy else (2, 3, 4096, 128)
    dtype = torch.float32 if programs.toy else torch.bfloat16
    operands = [torch.randn(shape, device=programs.device).to(dtype) for _ in range(4)]
    first, second = (_attention(operands, True) for _ in range(2))
    differing = sum(int((a != b).sum()) for a, b in zip(first[1:], second[1:]))
    total = sum(each.numel() for each in first[1:])
    yield Row(
        "bits of gradients that differ in two runs", differing / total, note="0: ranks that compute the same stay equal"
    )


def dropout(programs: Programs) -> Iterator[Row]:
    """Compare exact masks with those of a CPU, bit for bit, and their time with torch's own dropout."""
    shape, device = ((2, 64, 64) if programs.toy else (4, 4096, 8192)), programs.device
    keys = torch.arange(shape[0], dtype=torch.int64)
    small = [shape[0], 64, 64]
    there = random_streams.keep_mask(small, 0.1, keys.to(device), 0).cpu()
    yield Row(
        "bits of masks that differ from a CPU's",
        float((there != random_streams.keep_mask(small, 0.1, keys, 0)).sum()),
        most=0,
    )
    x = torch.ones(shape, device=device, dtype=torch.float32 if programs.toy else torch.bfloat16)
    streams = SimpleNamespace(keys=keys.to(device))
    exact = timing.seconds(lambda: random_streams.dropout(x, 0.1, streams.keys), device, 0.2)
    own = timing.seconds(lambda: F.dropout(x, 0.1), device, 0.2)
    yield Row("exact dropout over torch's", exact, own, "s", most=None if programs.toy else 3.0)
