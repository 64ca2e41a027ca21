"""Prices of blocks that ``torch.compile`` compiles: bytes by hand, and against what inductor counts of its own kernels."""

from __future__ import annotations

import importlib
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import graphpar as gp
from graphpar.cost_models.storage_tracker import storage_of
from graphpar.cost_models.work import Phase, Traffic, Work
from graphpar.cost_models.workload import Works
from graphpar.errors import GraphparError
from graphpar.ir.program import value_of
from graphpar.passes.planning.prices import pricing_of
from tests.tools.programs import example

WIDTH, INNER, LENGTH = 48, 112, 6


def moved(work: Work, phase: Phase, rows: int = 1) -> float:
    """Bytes of memory-bound kernels."""
    return sum(
        row.nbytes.at(rows) * times
        for row, times in work.rows.items()
        if isinstance(row, Traffic) and row.phase is phase
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        for norm in (self.first, self.second):
            norm.weight.requires_grad_(False)  # on the CPU inductor reads everything again for their gradients

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(torch.tanh(self.q(self.first(x))))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traced(dtype: str | None = None) -> gp.Program:
    return gp.export(Blocks(), (torch.randn(4, LENGTH, WIDTH),), loss_fn=lambda loss: loss, dtype=dtype)


def test_bytes_of_a_compiled_llama_block_are_those_by_hand() -> None:
    """Of d = 64, 2 of 4 heads for keys, f = 128, 16 tokens in fp32. Rotary embeddings are as without."""
    program = example("llama")
    (block,) = program.blocks.values()
    work, d, kv, f, token = Works(program, {}, compiled=True).block(block), 64, 32, 128, 16 * 4
    rotary = 5 * (d + kv)
    forward = 2 * d + rotary + 4 * d + 3 * f + 3 * d  # norm; add and norm, which write both; silu * up; add
    # From the end: nothing for the last sum. silu * up; norm and sum: gradients of the sum and of gate and up, two values that are added
    # again, one gradient for both; norm: gradients of q, k, v and the sum, its input, one gradient.
    backward = 5 * f + (3 + 2 + 1) * d + rotary + (4 + 1 + 1) * d
    assert moved(work, Phase.FORWARD) == forward * token
    assert moved(work, Phase.INPUT) == backward * token
    plain = Works(program, {}).block(block)
    assert moved(work, Phase.WEIGHT) == moved(plain, Phase.WEIGHT)  # sums of gradients are outside
    assert work.flops(3) == plain.flops(3)


def test_what_stands_between_blocks_is_fused() -> None:
    program = traced()
    fused, alone = (outside_of_blocks(Works(program, {}, compiled=compiled), program) for compiled in (True, False))
    # x.square().mean() reads twice, and writes once; beside it are a few numbers.
    assert moved(alone, Phase.FORWARD) == pytest.approx(3 * LENGTH * WIDTH * 4, rel=0.02)
    assert moved(fused, Phase.FORWARD) == pytest.approx(LENGTH * WIDTH * 4, rel=0.02)


class PassesItsValues(nn.Module):
    """A layer that returns what later ones read, too, as value residuals do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.values, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        values = self.values(self.norm(x))
        first = values if first is None else first
        return x + self.out(torch.tanh(values + first)), first


class ValueResiduals(nn.Module):
    """Gains between layers, and a loss with a term of the gains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassesItsValues() for _ in range(3))
        self.gains = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for layer, gain in zip(self.layers, self.gains):
            x, first = layer(x, first)
            x = x * gain
        return x.square().mean() + (self.gains - 1).square().sum() * 0.01


def test_blocks_with_several_results_and_terms_of_parameters_have_prices() -> None:
    program = gp.export(ValueResiduals(), (torch.randn(4, LENGTH, WIDTH),))
    assert program.blocks
    fused, plain = (Works(program, {}, compiled=compiled).of(program.graph) for compiled in (True, False))
    assert moved(fused, Phase.INPUT, 4) < moved(plain, Phase.INPUT, 4)


def outside_of_blocks(works: Works, program: gp.Program) -> Work:
    """The work of the root alone."""
    works._blocks = dict.fromkeys(((name, False, False) for name in program.blocks), Work())
    return works.of(program.graph)


def test_a_program_without_blocks_is_compiled_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0), nn.Sigmoid())
    program = gp.export(model, (torch.randn(3, 8),), loss_fn=lambda y: y.square().mean())
    assert not program.blocks
    work = Works(program, {}, compiled=True).of(program.graph)
    assert moved(work, Phase.FORWARD) < moved(Works(program, {}).of(program.graph), Phase.FORWARD)
    counts = Counter(row.phase for row in work.rows if isinstance(row, Traffic))
    assert counts[Phase.FORWARD] == 1 and counts[Phase.INPUT] == 1


def test_compiled_blocks_cast_parameters_for_each_microbatch() -> None:
    """Unless they are gathered as they are read; they keep the copies, and a step makes none."""
    program = traced("bf16")
    elements = 2 * WIDTH * WIDTH + 3 * WIDTH * INNER
    once, each = (Works(program, {}, compiled=True, recasts=recasts) for recasts in (False, True))
    (block,) = program.blocks.values()
    more = moved(each.block(block), Phase.FORWARD) - moved(once.block(block), Phase.FORWARD)
    assert more == 6 * elements
    assert moved(each.block(block), Phase.WEIGHT) == moved(once.block(block), Phase.WEIGHT)
    kept = {}
    for compile in (False, True):
        plan = gp.plan(program, mesh={"pp": 2}, global_batch=16, microbatch_size=4, compile=compile)
        pricing, layout = pricing_of(program, plan, gp.Cluster.parse("2xA100"))
        kept[compile] = pricing.estimate(layout).memory[0]
    assert kept[False].copies and not kept[True].copies
    in_flight = 2
    assert kept[True].activations - kept[False].activations == in_flight * 2 * elements  # the input has no gradient
    sharded = gp.plan(program, mesh={"dp_shard": 2}, zero=3, global_batch=16, microbatch_size=4, compile=True)
    pricing, _ = pricing_of(program, sharded, gp.Cluster.parse("2xA100"))
    assert pricing.execution.compiled and not pricing.execution.recasts


@pytest.mark.costly
def test_a_plan_for_compiled_blocks_says_so_and_is_priced_so() -> None:
    program = example("llama")
    plain, plan = (gp.plan(program, "2xA100", mesh={"tp": 2}, global_batch=32, compile=c) for c in (False, True))
    assert plan.predicted is not None and plain.predicted is not None
    assert plan.predicted.compute_s < plain.predicted.compute_s
    again = gp.Plan.from_json(plan.to_json())
    assert again == plan and again.compile and not plain.compile
    assert gp.estimate(program, again).step_time_s == plan.predicted.step_time_s
    assert gp.estimate(program, replace(again, compile=False)).step_time_s > plan.predicted.step_time_s
    parts, others = gp.partition(program, plan), gp.partition(program, replace(plan, compile=False))
    said = "fused by torch.compile; memory as without it"
    assert [each.report["assumed"]["operators"] for each in (parts, others)] == [said, "not fused"]
    assert said in parts.files["report.html"]
    emitted = [{name: text for name, text in each.files.items() if name.endswith(".py")} for each in (parts, others)]
    assert emitted[0] == emitted[1]
    assert plan.alone is not None and plain.alone is not None and plan.alone.step_time_s < plain.alone.step_time_s


def test_a_plan_that_can_t_be_compiled_contradicts_itself() -> None:
    program = example("gpt")
    plan = gp.plan(program, mesh={"pp": 2}, schedule="InterleavedZeroBubble")
    with pytest.raises(GraphparError, match="compile: the schedule InterleavedZeroBubble splits backwards in two"):
        gp.partition(program, replace(plan, compile=True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_bytes_are_those_that_inductor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced()
    (block,) = program.blocks.values()
    work, rows = Works(program, {}, compiled=True).block(block), 5
    counted = inductor_bytes(Block(), torch.randn(rows, LENGTH, WIDTH, requires_grad=True), monkeypatch)
    for phase, nbytes in counted.items():
        assert moved(work, phase, rows) == pytest.approx(nbytes, rel=0.02), phase  # weights of norms, sums of rows
    plain = Works(program, {}).block(block)
    assert moved(plain, Phase.FORWARD, rows) > 1.2 * counted[Phase.FORWARD]
    assert moved(plain, Phase.INPUT, rows) > 1.2 * counted[Phase.INPUT]


def inductor_bytes(module: nn.Module, given: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[Phase, int]:
    """Bytes that inductor's own kernels, without products, read and write, by its account."""
    from torch._inductor import compile_fx, metrics

    before = compile_fx.inductor_metrics_log.level
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # loggers remember what they are enabled for
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "propagate", False)
    found: dict[Phase, int] = {}
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        metrics.reset()
        output = torch.compile(module, fullgraph=True)(given)
        found[Phase.FORWARD] = _own(metrics.nodes_num_elem)
        metrics.reset()
        output.sum().backward()
        found[Phase.INPUT] = _own(metrics.nodes_num_elem)
    compile_fx.inductor_metrics_log.setLevel(before)
    torch._dynamo.reset()
    return found


def _own(counts: list[tuple[Any, int]]) -> int:
    return sum(4 * number for node, number in counts if not node.is_extern())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_blocks_keep_copies_of_parameters_that_they_cast() -> None:
    weight, x = nn.Parameter(torch.randn(96, 96)), torch.randn(7, 96, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == weight.numel():
            saved.append(tensor.dtype)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        torch.compile(lambda x: F.silu(F.linear(x, weight.bfloat16())), fullgraph=True)(x)
    assert saved == [torch.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_compiled_blocks_keep_about_what_others_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is counted as without ``torch.compile``: its partitioner keeps no more, and of a Llama an eighth less."""
    program = example(name)
    gp.partition(program, gp.plan(program, devices=1, recompute="none")).save(tmp_path / f"kept_{name}")
    monkeypatch.syspath_prepend(str(tmp_path))
    emitted = importlib.import_module(f"kept_{name}.blocks")
    for kind, block in program.blocks.items():
        torch._dynamo.reset()
        values = [value_of(node) for node in block.graph.nodes if node.op == "placeholder"]
        inputs = [torch.rand([4, *value.shape[1:]]).requires_grad_(number == 0) for number, value in enumerate(values)]
        module = getattr(emitted, kind)()
        compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager_decomp_partition")
        plain, fused = (_kept(module, forward, inputs) for forward in (module.forward, compiled))
        assert 0.85 * plain < fused <= plain


def _kept(module: nn.Module, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> int:
    """The bytes that a forward keeps, without parameters and inputs that have no gradient."""
    saved: dict[int, Tensor] = {}
    held = {storage_of(each) for each in (*module.parameters(), *inputs) if each is not inputs[0]}

    def note(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        forward(*inputs)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in held)


def test_examples_move_less_compiled() -> None:
    for name in ("gpt", "llama", "mixtral"):
        program = example(name)
        for block in program.blocks.values():
            plain, fused = (Works(program, {}, compiled=compiled).block(block) for compiled in (False, True))
            assert moved(fused, Phase.FORWARD) < moved(plain, Phase.FORWARD), name
            assert moved(fused, Phase.INPUT) < moved(plain, Phase.INPUT), name
