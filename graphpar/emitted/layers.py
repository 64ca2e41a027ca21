"""Layers that compute in the dtype of what they are given, whatever dtype their parameters are stored in."""

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear``, its parameters cast. [..., n] -> [..., k]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``, its parameters cast. [..., n] -> [..., n]"""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm``, its parameter cast. [..., n] -> [..., n]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
