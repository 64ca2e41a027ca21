"""Hugging Face T5: an encoder and a decoder joined by cross-attention, with one embedding used three times."""

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

SOURCE, TARGET, BATCH = 16, 12, 8

config = T5Config(
    vocab_size=211,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=4,
    num_decoder_layers=4,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    use_cache=False,
)


def model() -> nn.Module:
    return T5ForConditionalGeneration(config)


def example_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, config.vocab_size, (BATCH, SOURCE), generator=generator)
    labels = torch.randint(2, config.vocab_size, (BATCH, TARGET), generator=generator)
    padding = torch.arange(SOURCE) >= torch.tensor([16, 4, 9, 12, 2, 7, 14, 5])[:, None]
    ignored = torch.arange(TARGET) >= torch.tensor([3, 12, 7, 1, 10, 5, 2, 12])[:, None]
    return {
        "input_ids": ids.masked_fill(padding, config.pad_token_id),
        "attention_mask": (~padding).long(),
        "labels": labels.masked_fill(ignored, -100),
    }
