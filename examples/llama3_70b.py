"""Llama-3-70B at its real size: to plan for, not to run on a laptop."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEQ, BATCH = 8192, 8

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    bos_token_id=128000,
    eos_token_id=128001,
    tie_word_embeddings=False,
    use_cache=False,
)


def model() -> nn.Module:
    return LlamaForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
