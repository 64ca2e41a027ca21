"""Llama of 8,192 tokens on four tensor-parallel ranks: nothing that a rank computes, keeps or writes is of the sequence squared."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.cost_models.pipeline_units import JoinedUnits
from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.choose import choose
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.prices import pricing_of

RANKS, TOKENS = 4, 8192
CLUSTER = f"{RANKS}xH100-SXM-80GB"


def _llama() -> LlamaForCausalLM:
    """No other size is the sequence's, or a shard's of it."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=768, use_cache=False))


@functools.cache
def _program(tokens: int = TOKENS, skip: tuple[str, ...] = ()) -> gp.Program:
    ids = torch.zeros(8, tokens, dtype=torch.long)
    return gp.export(_llama, kwargs={"input_ids": ids, "labels": ids}, dtype="bf16", skip=skip)


@functools.cache
def _parts(skip: tuple[str, ...] = ()) -> gp.Parts:
    program = _program(skip=skip)
    plan = gp.plan(program, CLUSTER, mesh={"tp": RANKS}, microbatch_size=1, global_batch=8, recompute="none")
    return gp.partition(program, plan)


def _graphs(parts: gp.Parts) -> Iterator[fx.Graph]:
    yield parts.program.graph
    yield from (block.graph for block in parts.program.blocks.values())
    for graph in [parts.program.graph, *(block.graph for block in parts.program.blocks.values())]:
        yield from (node.target.graph for node in graph.nodes if hasattr(node.target, "graph"))


def _squared(parts: gp.Parts) -> list[str]:
    """Return the values of a rank that have two dims of the sequence, each whole or divided."""
    found = []
    for node in (node for graph in _graphs(parts) for node in graph.nodes):
        for value in tree_leaves(node.meta.get("val")):
            if (
                isinstance(value, Tensor)
                and sum(str(size) in (str(TOKENS), str(TOKENS // RANKS)) for size in value.shape) > 1
            ):
                found.append(f"{node.name} {list(value.shape)}")
    return found


@pytest.mark.costly
def test_no_value_of_a_rank_is_of_the_sequence_squared() -> None:
    parts = _parts()
    assert not _squared(parts)
    attention = [node for graph in _graphs(parts) for node in graph.nodes if "dot_product" in str(node.target)]
    assert attention and all(node.args[3] is None and node.args[5] is True for node in attention)


def test_the_emitted_program_has_no_mask() -> None:
    texts = {name: text for name, text in _parts().files.items() if re.match(r"blocks|stage_", name)}
    assert "is_causal=True" in texts["blocks.py"]
    for text in texts.values():
        assert not re.search(r"mask|tril|triu|softmax", text)
        assert not re.search(rf"\b({TOKENS}|{TOKENS // RANKS})\b[^\]\n]*, ({TOKENS}|{TOKENS // RANKS})\b", text)


@pytest.mark.costly
def test_without_the_idioms_there_are_such_values() -> None:
    assert _squared(_parts(("idioms",)))


@functools.cache
def _memory(tokens: int) -> tuple[int, ...]:
    """Return the bytes that a row of a layer keeps, and those that its forward and its backward take on top."""
    program, cluster = _program(tokens), Cluster.parse(CLUSTER)
    plan = choose(program, gp.Mesh(tp=RANKS), PlanConstraints(cluster=cluster, recompute="none"))
    pricing, _ = pricing_of(program, plan, cluster)
    joined = JoinedUnits(pricing.units, 1).at[2]
    return joined.inside, joined.forward, joined.backward


@pytest.mark.costly
def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    for half, whole in zip(_memory(TOKENS // 2), _memory(TOKENS)):
        assert 0 < whole <= 2.05 * half  # linear, less the constant that is freed before the highest moment
