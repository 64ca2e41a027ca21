"""Qwen3-235B-A22B at its real size: 128 experts a layer, 8 of them active for each token, to plan for hundreds of devices.

Figures are those of ``config.json`` in https://huggingface.co/Qwen/Qwen3-235B-A22B; weights are never allocated.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SEQ, BATCH = 4096, 8

config = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
    use_cache=False,
)


def model() -> nn.Module:
    return Qwen3MoeForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
