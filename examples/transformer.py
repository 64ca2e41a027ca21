"""nn.Transformer with dropout and the batch on dim 1, two sequence lengths, a tied projection, a buffer of integers, a sum loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, SOURCE, TARGET, BATCH = 23, 16, 4, 6, 4, 8


class Transformer(nn.Module):
    vocab_bias: Tensor
    long_buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, dim_feedforward=8, dropout=0.1
        )
        self.projection = nn.Linear(WIDTH, VOCAB)
        self.projection.weight = self.embedding.weight
        self.register_buffer("vocab_bias", torch.ones(WIDTH))
        self.register_buffer("long_buffer", torch.zeros(WIDTH, dtype=torch.long))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        source = self.embedding(src)
        source = source + self.vocab_bias + self.long_buffer.type_as(source)
        return self.projection(self.transformer(source, self.embedding(tgt)))


batch_dims = {"src": 1, "tgt": 1, "labels": 1}


def model() -> nn.Module:
    return Transformer()


def example_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(VOCAB, (SOURCE, BATCH), generator=generator)
    return {"src": src, "tgt": torch.randint(VOCAB, (TARGET, BATCH), generator=generator)}


def example_targets() -> Tensor:
    return torch.randint(VOCAB, (TARGET, BATCH), generator=torch.Generator().manual_seed(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum")
