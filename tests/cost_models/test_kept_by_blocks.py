"""What a block of a tensor-parallel program keeps for its backward, against the formulas of Megatron-LM.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: with sequence parallelism a GPT layer of s
tokens, b rows and width h keeps 34 s b h / t bytes in 16 bits beside what attention keeps, of which 2 are dropout masks. Fused
attention keeps a statistic of each row. A gated feed-forward network of width f keeps 6 f instead of 4 x 4 h: the gate, what it scales, and
their product, as ``swiglu`` activates the gate again in the backward: with the 3.5 h of Llama-3-8B these are 34 again. Pointwise operators
that are computed again take away both norms, 4, and what the last product reads: the result of gelu, 8, or that product, 2 f.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.cost_models.pipeline_units import JoinedUnits
from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.choose import choose
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.prices import pricing_of
from graphpar.runtime.mesh import Mesh

RANKS, TOKENS, WIDTH, HIDDEN = 8, 1024, 2048, 7168


def _gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_head": 16, "n_layer": 3, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def _llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, use_cache=False, tie_word_embeddings=False))


FORMULAS: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "GPT-2": (_gpt2, 34 - 2, 34 - 2 - 4 - 8),
    # input and norm 2 each, q 2, k and v 1 together, attention 2, the second input and norm 2 each: 13; and 6 f / h
    "Llama": (_llama, 13 + 6 * HIDDEN / WIDTH, 13 - 4 + 4 * HIDDEN / WIDTH),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", FORMULAS)
def test_a_block_keeps_what_megatrons_formula_says(name: str) -> None:
    model, *units_of_width = FORMULAS[name]
    ids = torch.zeros(8, TOKENS, dtype=torch.long)
    program = gp.export(model, kwargs={"input_ids": ids, "labels": ids}, dtype="bf16")
    cluster = Cluster.parse(f"{RANKS}xH100-SXM-80GB")
    for kind, units in zip(("gathers", "gathers+pointwise"), units_of_width):
        plan = choose(program, Mesh(tp=RANKS), PlanConstraints(cluster=cluster, recompute=kind, compile=False))
        pricing, _ = pricing_of(program, plan, cluster)
        joined = JoinedUnits(pricing.units, 1)
        kept = joined.at[2].inside + joined.between[2]
        assert kept == pytest.approx(units * TOKENS * WIDTH / RANKS, rel=0.02), kind
