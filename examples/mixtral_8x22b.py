"""Mixtral-8x22B at its real size: 8 experts a layer, 2 of them active for each token, to plan for hundreds of devices.

Figures are those of ``config.json`` in https://huggingface.co/mistral-community/Mixtral-8x22B-v0.1; weights are never allocated.
"""

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

SEQ, BATCH = 4096, 8

config = MixtralConfig(
    vocab_size=32000,
    hidden_size=6144,
    intermediate_size=16384,
    num_hidden_layers=56,
    num_attention_heads=48,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=65536,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    sliding_window=None,
    tie_word_embeddings=False,
    use_cache=False,
)


def model() -> nn.Module:
    return MixtralForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
