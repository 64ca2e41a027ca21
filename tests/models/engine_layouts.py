"""Weights of small models by Hugging Face's names, and what a rank of vLLM or SGLang has of them, as documented there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    heads: int
    kv_heads: int
    width: int
    head: int
    hidden: int
    words: int
    experts: int = 0
    biases: bool = True
    layers: int = 2


def _attention(sizes: Sizes, draw: torch.Generator) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": torch.randn(sizes.words, sizes.width, generator=draw)}
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}"
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            found[f"{path}.self_attn.{name}_proj.weight"] = torch.randn(heads * sizes.head, sizes.width, generator=draw)
            found[f"{path}.self_attn.{name}_proj.bias"] = torch.randn(heads * sizes.head, generator=draw)
        found[f"{path}.self_attn.o_proj.weight"] = torch.randn(sizes.width, sizes.heads * sizes.head, generator=draw)
        found[f"{path}.input_layernorm.weight"] = torch.randn(sizes.width, generator=draw)
    found["model.norm.weight"] = torch.randn(sizes.width, generator=draw)
    return found


def llama(sizes: Sizes, tied: bool) -> dict[str, Tensor]:
    """A dense model with biases of q, k and v; its head may be the embedding."""
    draw = torch.Generator().manual_seed(0)
    found = _attention(sizes, draw)
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}.mlp"
        for name in ("gate", "up"):
            found[f"{path}.{name}_proj.weight"] = torch.randn(sizes.hidden, sizes.width, generator=draw)
        found[f"{path}.down_proj.weight"] = torch.randn(sizes.width, sizes.hidden, generator=draw)
    if not tied:
        found["lm_head.weight"] = torch.randn(sizes.words, sizes.width, generator=draw)
    return found


def mixture(sizes: Sizes, names: str) -> dict[str, Tensor]:
    """A mixture, whose experts are "stacked" in two tensors, or matrices w1, w2, w3 ("w") or gate, up and down ("proj")."""
    draw = torch.Generator().manual_seed(0)
    found = _attention(sizes, draw)
    for layer in range(sizes.layers):
        path = f"model.layers.{layer}.{'block_sparse_moe' if names == 'w' else 'mlp'}"
        found[f"{path}.gate.weight"] = torch.randn(sizes.experts, sizes.width, generator=draw)
        gate, up = (torch.randn(sizes.experts, sizes.hidden, sizes.width, generator=draw) for _ in range(2))
        down = torch.randn(sizes.experts, sizes.width, sizes.hidden, generator=draw)
        if names == "stacked":
            found[f"{path}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
            found[f"{path}.experts.down_proj"] = down
            continue
        called = ("w1", "w3", "w2") if names == "w" else ("gate_proj", "up_proj", "down_proj")
        for name, each in zip(called, (gate, up, down)):
            found |= {f"{path}.experts.{number}.{name}.weight": each[number] for number in range(sizes.experts)}
    return found


def engine_parameters(
    weights: Mapping[str, Tensor], sizes: Sizes, tp: tuple[int, int], ep: tuple[int, int] = (0, 1)
) -> dict[str, Tensor]:
    """Compute the parameters of one rank.

    QKVParallelLinear: this rank's heads of q, then of k, then of v; where there are more ranks than heads of k and v, each is on
    several neighbouring ranks. MergedColumnParallelLinear: this rank's rows of gate, then of up. RowParallelLinear: columns.
    VocabParallelEmbedding: rows, after padding with zeros to a multiple of 64. FusedMoE: of its experts w13 as the merged layer and w2 as
    the row-parallel one; with expert parallelism experts in order, the first ranks one more, and each undivided.
    """
    rank, ranks = tp
    found: dict[str, Tensor] = {}

    def heads_of(name: str, heads: int) -> Tensor:
        value = weights[name].unflatten(0, (heads, sizes.head))
        if heads >= ranks:
            each = heads // ranks
            return value[rank * each : (rank + 1) * each].flatten(0, 1)
        return value[rank // (ranks // heads)]

    def rows(value: Tensor) -> Tensor:
        return value.chunk(ranks)[rank]

    for layer in range(sizes.layers):
        path = f"model.layers.{layer}"
        for kind in ("weight", "bias") if sizes.biases else ("weight",):
            found[f"{path}.self_attn.qkv_proj.{kind}"] = torch.cat(
                [
                    heads_of(f"{path}.self_attn.{name}_proj.{kind}", heads)
                    for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
                ]
            )
        found[f"{path}.self_attn.o_proj.weight"] = weights[f"{path}.self_attn.o_proj.weight"].chunk(ranks, 1)[rank]
        found |= {name: value for name, value in weights.items() if name.startswith(path) and "norm" in name}
        if not sizes.experts:
            gate, up = (weights[f"{path}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
            found[f"{path}.mlp.gate_up_proj.weight"] = torch.cat([rows(gate), rows(up)])
            found[f"{path}.mlp.down_proj.weight"] = weights[f"{path}.mlp.down_proj.weight"].chunk(ranks, 1)[rank]
            continue
        where = "block_sparse_moe" if f"{path}.block_sparse_moe.gate.weight" in weights else "mlp"
        experts = _experts(weights, f"{path}.{where}.experts", sizes)
        each, more = divmod(sizes.experts, ep[1])
        begin = ep[0] * each + min(ep[0], more)
        own = experts[begin : begin + each + (ep[0] < more)]
        if ep[1] == 1:
            own = [(rows(gate), rows(up), down.chunk(ranks, 1)[rank]) for gate, up, down in own]
        name = f"{path}.{where}.experts{'.routed_experts' if rank % 2 else ''}"  # both are names of vLLM, of its time
        found[f"{name}.w13_weight"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in own])
        found[f"{name}.w2_weight"] = torch.stack([down for _, _, down in own])
        found[f"{path}.{where}.gate.weight"] = weights[f"{path}.{where}.gate.weight"]
    found["model.norm.weight"] = weights["model.norm.weight"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            padding = weights[name].new_zeros(-len(weights[name]) % 64, sizes.width)
            found[name] = rows(torch.cat([weights[name], padding]))
    return found


def _experts(weights: Mapping[str, Tensor], path: str, sizes: Sizes) -> list[tuple[Tensor, Tensor, Tensor]]:
    if f"{path}.gate_up_proj" in weights:
        gates, ups = weights[f"{path}.gate_up_proj"].chunk(2, 1)
        return list(zip(gates, ups, weights[f"{path}.down_proj"]))
    names = ("w1", "w3", "w2") if f"{path}.0.w1.weight" in weights else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([weights[f"{path}.{number}.{name}.weight"] for number in range(sizes.experts)] for name in names)
    return list(zip(gate, up, down))
