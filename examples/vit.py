"""Hugging Face ViT image classifier with a loss of our own on its logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

CLASSES, BATCH = 10, 8

config = ViTConfig(
    hidden_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    intermediate_size=128,
    image_size=32,
    patch_size=8,
    num_labels=CLASSES,
)


def model() -> nn.Module:
    return ViTForImageClassification(config)


def example_inputs() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def example_targets() -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def loss_fn(output: ImageClassifierOutput, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels)
