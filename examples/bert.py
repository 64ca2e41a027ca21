"""Hugging Face BERT with masked-language-model labels, most of which are ignored."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

SEQ, BATCH = 16, 8

config = BertConfig(
    vocab_size=211,
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=SEQ,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    use_cache=False,
)


def model() -> nn.Module:
    return BertForMaskedLM(config)


def example_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, config.vocab_size, (BATCH, SEQ), generator=generator)
    chosen = torch.rand(BATCH, SEQ, generator=generator) < 0.15
    chosen[:, 0] = True  # at least one in each row
    padding = torch.arange(SEQ) >= torch.tensor([16, 4, 9, 12, 2, 7, 14, 5])[:, None]
    segments = (torch.arange(SEQ) >= SEQ // 2).long().expand(BATCH, SEQ).contiguous()
    return {
        "input_ids": ids.masked_fill(chosen, 3).masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "token_type_ids": segments,
        "labels": ids.masked_fill(~chosen | padding, -100),
    }
