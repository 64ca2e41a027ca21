"""Layers that compute in the dtype of what they are given, whatever dtype their parameters are stored in."""

import torch.nn.functional as F
from torch import Tensor, nn


def cast(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """The parameter, if there is one, in the dtype of ``x``."""
    return None if parameter is None else parameter.to(x.dtype)


class Linear(nn.Linear):
    """``nn.Linear``, its parameters cast. [..., n] -> [..., k]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), cast(self.bias, x))


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``, its parameters cast. [..., n] -> [..., n]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), cast(self.bias, x), self.eps)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm``, its parameter cast. [..., n] -> [..., n]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GroupNorm(nn.GroupNorm):
    """``nn.GroupNorm``, its parameters cast. [n, c, ...] -> [n, c, ...]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class PReLU(nn.PReLU):
    """``nn.PReLU``, its parameter cast. [n, c, ...] -> [n, c, ...]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.weight.to(x.dtype))


class Bilinear(nn.Bilinear):
    """``nn.Bilinear``, its parameters cast. [..., m], [..., n] -> [..., k]"""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.bilinear(x, y, self.weight.to(x.dtype), cast(self.bias, x))


class Conv1d(nn.Conv1d):
    """``nn.Conv1d``, its parameters cast. [n, c, l] -> [n, k, l]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(
            x, self.weight.to(x.dtype), cast(self.bias, x), self.stride, self.padding, self.dilation, self.groups
        )


class ConvTranspose1d(nn.ConvTranspose1d):
    """``nn.ConvTranspose1d``, its parameters cast. [n, c, l] -> [n, k, l]"""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert output_size is None
        padding = tuple(map(int, self.padding))
        return F.conv_transpose1d(
            x,
            self.weight.to(x.dtype),
            cast(self.bias, x),
            self.stride,
            padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )


class Conv2d(nn.Conv2d):
    """``nn.Conv2d``, its parameters cast. [n, c, h, w] -> [n, k, h, w]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x, self.weight.to(x.dtype), cast(self.bias, x), self.stride, self.padding, self.dilation, self.groups
        )


class ConvTranspose2d(nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``, its parameters cast. [n, c, h, w] -> [n, k, h, w]"""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert output_size is None
        padding = tuple(map(int, self.padding))
        return F.conv_transpose2d(
            x,
            self.weight.to(x.dtype),
            cast(self.bias, x),
            self.stride,
            padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )


class Conv3d(nn.Conv3d):
    """``nn.Conv3d``, its parameters cast. [n, c, d, h, w] -> [n, k, d, h, w]"""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv3d(
            x, self.weight.to(x.dtype), cast(self.bias, x), self.stride, self.padding, self.dilation, self.groups
        )


class ConvTranspose3d(nn.ConvTranspose3d):
    """``nn.ConvTranspose3d``, its parameters cast. [n, c, d, h, w] -> [n, k, d, h, w]"""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert output_size is None
        padding = tuple(map(int, self.padding))
        return F.conv_transpose3d(
            x,
            self.weight.to(x.dtype),
            cast(self.bias, x),
            self.stride,
            padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )
