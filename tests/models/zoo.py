"""Small odd models: each is a corner of PyTorch that a compiler may get wrong. ``ZOO`` lists them by name.

Most are an operator between two parameterised modules (``between``), cut before the second; the others are modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.equality import Still


@dataclass(frozen=True)
class Toy:
    """How to export one model and how to cut it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    split: tuple[str, ...] = ("second",)
    loss: Callable[..., Tensor] | None = None
    targets: Callable[[], tuple[Any, ...]] = tuple
    plan: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    operator: bool = False  # operators between two modules, or layers one after the other

    @property
    def loss_fn(self) -> Callable[..., Tensor]:
        return self.loss or squares


ZOO: dict[str, Toy] = {}


def squares(output: Any) -> Tensor:
    """A loss for any output: the mean square of each tensor in it."""
    leaves = torch.utils._pytree.tree_leaves(output)
    total = sum(leaf.square().mean() for leaf in leaves if isinstance(leaf, Tensor))
    assert isinstance(total, Tensor)
    return total


def weighted(output: Tensor) -> Tensor:
    """A loss for normalised outputs, whose mean square is constant: gradients of :func:`squares` would be rounding alone."""
    return (output * torch.arange(output.shape[-1], device=output.device)).mean()


def toy(
    inputs: Callable[[], tuple[Any, ...]], *split: str, name: str = "", **options: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a module class: its inputs, and the modules that stages begin with."""

    def register(model: type[nn.Module]) -> type[nn.Module]:
        ZOO[name or model.__name__] = Toy(options.pop("build", model), inputs, split or ("second",), **options)
        return model

    return register


def real(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)


def ids(*shape: int, below: int = 16) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(1))


def features(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (real(*shape),)


class Scale(nn.Module):
    """A parameterised module for any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))
        self.bias = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Between(nn.Module):
    """Linear, then ``function``, then a scale: the boundary lies after the function."""

    def __init__(self, function: Callable[[Tensor], Any], width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = Scale()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        made = self.function(self.first(x))
        return self.second(made) if isinstance(made, Tensor) else [self.second(part) for part in made]


def between(name: str, function: Callable[[Tensor], Any], *shape: int) -> None:
    size = shape or (8, 6, 16)
    ZOO[name] = Toy(
        lambda: Between(function, size[-1]).double(), lambda: (real(*size, dtype=torch.float64),), operator=True
    )


# ---- operators -------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "softplus": lambda h: F.softplus(h, beta=2.0),
    "elu": lambda h: F.elu(h, alpha=0.5),
    "selu": F.selu,
    "celu": lambda h: F.celu(h, 0.7),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.2),
    "relu6": F.relu6,
    "glu": lambda h: F.glu(h, dim=1),
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda h: F.threshold(h, 0.1, 0.5),
    "softmin": lambda h: F.softmin(h, dim=-1),
    "relu_inplace": lambda h: F.relu(h, inplace=True),
}
for _name, _function in _ACTIVATIONS.items():
    between(_name, _function)

between("log_softmax_dtype", lambda h: F.log_softmax(h, dim=1, dtype=torch.float64).float())
between("chained_comparison", lambda h: h * ((h > 0) == (h.flip(-1) > 0)) + h * ((h < 0) != (h > 0.5)))
between("where", lambda h: torch.where(h > 0, h, h * 0.1))
between("where_scalar", lambda h: torch.where(h > 0, h, 0.5))
between("where_scalars", lambda h: h + torch.where(h > 0, 1.0, -1.0))
between("masked_fill", lambda h: h.masked_fill(h < 0, float("-inf")).softmax(-1))
between("masked_fill_min", lambda h: h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1))
between("clamp", lambda h: h.clamp(min=-0.5, max=0.5) + h.clamp(min=0.1) + h.clamp(max=0.2) + h.clamp_min(0.3))
between("clamp_tensor", lambda h: torch.clamp(h, min=h.mean(-1, keepdim=True)))
between("minimum_maximum", lambda h: torch.minimum(h, h.flip(1)) + torch.maximum(h, h * 2) + torch.max(h, -h))
between("max_dim", lambda h: h.max(dim=-1)[0])
between("max_dim_both", lambda h: (lambda r: r[0] + h.gather(1, r[1].unsqueeze(1)).squeeze(1))(h.max(dim=1)))
between("min_values", lambda h: h.min(dim=1).values)
between("sort", lambda h: h.sort(dim=-1, descending=True)[0])
between("argsort", lambda h: h.gather(-1, h.argsort(dim=-1)))
between("topk", lambda h: h.topk(3, dim=-1)[0])
between("topk_indices", lambda h: h.gather(-1, h.topk(3, dim=-1).indices))
between("kthvalue", lambda h: h.kthvalue(2, dim=-1)[0])
between("median", lambda h: h.median(dim=-1)[0])
between("cummax", lambda h: h.cummax(dim=1)[0])
between("logcumsumexp", lambda h: h.logcumsumexp(dim=1))
between("cumsum", lambda h: h.cumsum(1))
between("cumprod", lambda h: h.cumprod(dim=-1))
between("flip_roll", lambda h: h.flip(1) + h.roll(1, dims=1) + torch.roll(h, (1, 2), (1, 2)))
between("rot90", lambda h: torch.rot90(h, 1, (1, 2)))
between("logsumexp", lambda h: h.logsumexp(dim=-1) + torch.logsumexp(h, 1, keepdim=True).sum((1, 2)).unsqueeze(1))
between("var_std", lambda h: h.var(-1) + h.std(-1, unbiased=False) + torch.std(h, dim=2, correction=0))
between("var_mean", lambda h: sum(torch.var_mean(h, dim=-1)))
between("norms", lambda h: h.norm(dim=-1) + h.norm(p=1, dim=-1) + torch.linalg.norm(h, dim=-1))
between("vector_norm", lambda h: torch.linalg.vector_norm(h, 3, dim=-1))
between("normalize", lambda h: F.normalize(h, dim=-1))
between("cosine_similarity", lambda h: F.cosine_similarity(h, h.flip(1), dim=-1))
between("pairwise_distance", lambda h: F.pairwise_distance(h, h.roll(1, 1)))
between("cdist", lambda h: torch.cdist(h, h.flip(1)))
between("prod", lambda h: h.prod(dim=-1))
between(
    "floor_divide",
    lambda h: (
        h + (h.detach() * 4) // 2 + torch.div(h, 0.3, rounding_mode="trunc") + torch.floor_divide(h.detach(), 0.7)
    ),
)
between("remainder", lambda h: h % 0.5 + torch.fmod(h, 0.3) + torch.remainder(h, 0.2))
between("reversed_scalars", lambda h: 1 - h + 1.0 / (2 + h.square()) + 2**h)
between("addcmul", lambda h: torch.addcmul(h, h, h, value=0.5) + torch.addcdiv(h, h, h.square() + 1, value=0.1))
between("lerp", lambda h: torch.lerp(h, h.flip(-1), 0.3))
between("add_alpha", lambda h: torch.add(h, h.flip(1), alpha=2) - torch.sub(h, h * h, alpha=0.5))
between("hypot", lambda h: torch.hypot(h, h.flip(1)) + torch.atan2(h, h.flip(1).abs() + 1))
between("pointwise", lambda h: h.sin() + h.cos() * h.tan() + h.sinh() + h.cosh() + h.erf() + h.erfc() + h.expm1())
between(
    "pointwise_positive",
    lambda h: (lambda p: p.log() + p.log1p() + p.log2() + p.sqrt() + p.rsqrt() + p.reciprocal())(h.square() + 1),
)
between("rounding", lambda h: h + h.round() + h.floor() + h.ceil() + h.trunc() + h.frac() + h.sign())
between("nan_to_num", lambda h: torch.nan_to_num(h) + h.isnan() + torch.isfinite(h).float())
between(
    "logit_xlogy",
    lambda h: torch.logit(h.sigmoid(), eps=1e-3) + torch.xlogy(h, h.square() + 1) + torch.special.expit(h),
)
between("heaviside", lambda h: h * torch.heaviside(h.detach(), h.new_tensor(0.5)))
between("bucketize", lambda h: h + torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5])))
between("copysign", lambda h: torch.copysign(h, h.flip(1)) + torch.ldexp(h, torch.tensor(2)))
between("any_all", lambda h: h * (h > 0).any(-1, keepdim=True) * (h < 9).all(dim=1, keepdim=True))
between(
    "logical",
    lambda h: h * ((h > 0) & (h < 1) | ~(h > -1)) + h * torch.logical_xor(h > 0, h < 1) + h * (h > 0).logical_not(),
)
between("int_arithmetic", lambda h: h * ((h > 0).int() * 3 // 2 % 2 + (h > 0).long()) + ((h > 0).int() << 2))
between("broadcast_scalar", lambda h: h + torch.tensor(2.0) * torch.tensor([1.0, 2.0]).repeat(8))
between("amax_amin", lambda h: h.amax((1, 2)) + h.amin(dim=(1, 2)))
between("aminmax", lambda h: sum(torch.aminmax(h, dim=-1)))
between("count_nonzero", lambda h: h * torch.count_nonzero(h > 0, dim=-1).unsqueeze(-1))
between("tril_triu", lambda h: h.tril() + h.triu(1) + h[:, :4, :4].diagonal(dim1=1, dim2=2).sum(-1)[:, None, None])
between("diag_embed", lambda h: torch.diag_embed(h[:, 0]))
between("outer_kron", lambda h: torch.einsum("bi,bj->bij", h[:, 0], h[:, 1]))

# Shapes.
between("merge_batch_time", lambda h: F.layer_norm(h.reshape(-1, 16), (16,)).view(h.shape[0], h.shape[1], 16))
between(
    "merge_batch_heads",
    lambda h: h.unflatten(-1, (4, 4)).transpose(1, 2).reshape(-1, 6, 4).softmax(-1).view(-1, 4, 6, 4),
)
between("boundary_merged", lambda h: h.view(-1, 16))
between("merged_cumsum", lambda h: h.flatten(1).cumsum(-1).unflatten(1, (6, 16)))
between("batch_dim_one", lambda h: h.transpose(0, 1).contiguous())
between("batch_dim_last", lambda h: h.permute(2, 1, 0))
between(
    "expand_repeat",
    lambda h: h[:, :1].expand(-1, 6, -1) + h[:, :1].repeat(1, 6, 1) + h.mean(1, keepdim=True).expand_as(h),
)
between("repeat_interleave", lambda h: h.repeat_interleave(2, dim=1) + h.repeat(1, 2, 1))
between("repeat_interleave_batch", lambda h: h.repeat_interleave(2, dim=0))
between("tile", lambda h: torch.tile(h, (1, 2, 1)))
between(
    "einsum",
    lambda h: torch.einsum("btd,bsd->bts", h, h) + torch.einsum("b t d, e d -> b t e", h, torch.ones(6, 16).to(h)),
)
between("tensordot", lambda h: torch.tensordot(h, torch.ones(16, 3, dtype=h.dtype), dims=1))
between("baddbmm", lambda h: torch.baddbmm(h[:, :, :6], h, h.transpose(1, 2), beta=0.5, alpha=0.1))
between("chunk", lambda h: torch.cat([part * (i + 1) for i, part in enumerate(h.chunk(3, dim=1))], dim=1))
between("split_uneven", lambda h: torch.split(h, [4, 12], dim=-1))
between("split_sizes", lambda h: h.split(5, dim=-1)[3])
between("tensor_split", lambda h: torch.tensor_split(h, 3, dim=1))
between("hsplit", lambda h: torch.hsplit(h, 2)[1])
between("unbind", lambda h: h.unbind(1))
between("unbind_one", lambda h: h.unbind(1)[2])
between("stack", lambda h: torch.stack([h, h * 2], dim=1))
between("same_twice", lambda h: [h, h])
between("view_and_base", lambda h: [h, h.view(-1, 96), h[:, 0]])
between("cat_split", lambda h: torch.cat([h, h.flip(1)], dim=1).split(6, dim=1))
between("ellipsis", lambda h: h[..., 1:-1] + h[..., 2:])
between("step_slice", lambda h: h[:, ::2, 1::3])
between("new_axes", lambda h: h[:, None, :, None, 0])
between("negative_index", lambda h: h[:, -1] + h[:, -2, :])
between("fancy_index", lambda h: h[:, [0, 2, 4]])
between("fancy_last", lambda h: h[..., [1, 3]])
between("fancy_pairs", lambda h: h[:, [0, 1], [2, 3]])
between("arange_index", lambda h: h[torch.arange(h.shape[0]), h.argmax(dim=1)[:, 0]])
between("boolean_where", lambda h: h * (torch.arange(6)[None, :, None] < 3))
between(
    "index_select", lambda h: h.index_select(1, torch.tensor([0, 2])) + torch.index_select(h, 1, torch.tensor([1, 3]))
)
between("gather", lambda h: torch.gather(h, 1, (h > 0).long()))
between("take_along_dim", lambda h: torch.take_along_dim(h, h.argmax(-1, keepdim=True), dim=-1))
between("scatter", lambda h: torch.zeros_like(h).scatter(-1, h.argsort(-1), h))
between("scatter_value", lambda h: h * torch.zeros_like(h).scatter(-1, h.topk(2, -1).indices, 1.0))
between("scatter_add", lambda h: torch.zeros_like(h).scatter_add_(1, (h > 0).long(), h))
between("scatter_reduce", lambda h: torch.zeros_like(h).scatter_reduce(1, (h > 0).long(), h, "sum"))
between(
    "index_put", lambda h: (lambda c: c.index_put_((torch.arange(h.shape[0]), torch.tensor(1)), h[:, 0]))(h.clone())
)
between("index_add", lambda h: h.index_add(1, torch.tensor([0, 2]), h[:, :2]))
between("index_fill", lambda h: h.index_fill(1, torch.tensor([0, 2]), 0.5))
between("index_copy", lambda h: h.index_copy(1, torch.tensor([0, 2]), h[:, 3:5]))
between("slice_assign", lambda h: _assigned(h))
between("select_assign", lambda h: _rows_assigned(h))
between("masked_scatter", lambda h: _masked_assigned(h))
between("movedim", lambda h: h.movedim(1, 2).swapaxes(1, 2).swapdims(1, 2).mT)
between("squeeze", lambda h: h[:, :1].squeeze() + h.unsqueeze(1).squeeze(1)[:, 0])
between("squeeze_many", lambda h: h[:, None, None].squeeze((1, 2)))
between("atleast", lambda h: torch.atleast_3d(h[:, 0]))
between("meshgrid", lambda h: h + torch.meshgrid(torch.arange(6), torch.arange(16), indexing="ij")[0])
between("unfold_dim", lambda h: h.unfold(1, 3, 1))
between("as_strided_free", lambda h: h.flatten(1).unflatten(1, (2, 3, 4, 4)))
between("size_arithmetic", lambda h: h / h.shape[1] + h.size(-1) // 3 + h.numel() / h.shape[0])
between("batch_arithmetic", lambda h: h.reshape(h.shape[0] * 2, h.shape[1] // 2, 16).sum(1).view(h.shape[0], -1))
between("scalar_boundary", lambda h: [h, torch.tensor(3.0) * 1])
between(
    "pads",
    lambda h: (
        F.pad(h, (1, 1))
        + F.pad(h, (1, 1), value=2.0)
        + F.pad(h, (1, 1), mode="reflect")
        + F.pad(h, (1, 1), mode="replicate")
    ),
)
between("pad_circular", lambda h: F.pad(h, (2, 1), mode="circular"))
between(
    "zeros_ones",
    lambda h: (
        h
        + torch.zeros(6, 16)
        + torch.ones_like(h)
        + h.new_zeros(16)
        + torch.full((6, 1), 2.0)
        + torch.full_like(h, 0.1)
    ),
)
between(
    "new_full", lambda h: h + h.new_full((h.shape[0], 1, 1), 3.0) + h.new_ones(h.shape[0], 6, 16) + h.new_tensor([2.0])
)
between(
    "linspace",
    lambda h: h + torch.linspace(0, 1, 16) + torch.logspace(0, 1, 16) + torch.eye(6, 16) + torch.hann_window(16),
)
between(
    "arange_steps",
    lambda h: h + torch.arange(0, 32, 2) + torch.arange(16.0) + torch.arange(6, dtype=torch.float32)[:, None],
)
between("one_hot", lambda h: F.one_hot(h.argmax(-1), 16).float() * h)
between("eq_broadcast", lambda h: h * (torch.arange(16)[None] == torch.arange(6)[:, None]))
between(
    "dtype_methods",
    lambda h: h.double().float() + h.half().float() + h.to(torch.bfloat16).to(h) + h.type(torch.float64).type_as(h),
)
between("int_cast", lambda h: h * h.int() + h * h.to(torch.int8) + h * (h > 0).to(torch.uint8) + h.long().to(h.dtype))
between("detach", lambda h: h * h.detach())
between("data", lambda h: h * h.data)
between("stop_gradient_branch", lambda h: h + (h.sigmoid() - h).detach())
between("softmax_half", lambda h: h.softmax(-1, dtype=torch.float32))
between("cross", lambda h: torch.cross(h[..., :3], h[..., 3:6], dim=-1))
between(
    "matrix_power",
    lambda h: torch.linalg.matrix_power(h[:, :4, :4], 2) + torch.linalg.matrix_norm(h[:, :4, :4])[:, None, None],
)
between("inverse", lambda h: torch.linalg.inv(h[:, :4, :4] @ h[:, :4, :4].mT + torch.eye(4).to(h)))
between("solve", lambda h: torch.linalg.solve(h[:, :4, :4] @ h[:, :4, :4].mT + torch.eye(4).to(h), h[:, :4]))
between("fft", lambda h: torch.fft.rfft(h, dim=1).abs())
between("complex_assigned", lambda h: torch.fft.irfft(_low_frequencies(torch.fft.rfft(h, dim=-1)), dim=-1))
between(
    "complex_rotary",
    lambda h: torch.view_as_real(
        torch.view_as_complex(h.unflatten(-1, (8, 2))) * torch.polar(torch.ones(6, 8), torch.arange(48.0).view(6, 8))
    ).flatten(-2),
)
between("searchsorted", lambda h: h + torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5]), h.detach()))
between("trapezoid_diff", lambda h: h.diff(dim=1) + torch.trapezoid(h, dim=1)[:, None])
between("multi_reduce", lambda h: h.sum((1, 2)) + h.mean(dim=[1, 2]) + h.sum(dim=-1).sum(-1))
between("sum_dtype", lambda h: h.sum(-1, dtype=torch.float64).float())
between("local_response_norm", lambda h: F.local_response_norm(h, 3))
between(
    "layer_norm_plain",
    lambda h: F.layer_norm(h, (6, 16)) + F.layer_norm(h, h.shape[-1:], eps=1e-3) + F.rms_norm(h, (16,)),
)
between(
    "sdpa",
    lambda h: (
        F.scaled_dot_product_attention(h, h, h, is_causal=True) + F.scaled_dot_product_attention(h, h, h, scale=0.1)
    ),
)
between("sdpa_bool", lambda h: F.scaled_dot_product_attention(h, h, h, torch.ones(6, 6).tril().bool()))
between(
    "sdpa_gqa",
    lambda h: (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True))(
        h.unflatten(-1, (4, 4)).transpose(1, 2), h[..., :8].unflatten(-1, (2, 4)).transpose(1, 2)
    ),
)

# Images.
_IMAGE = (8, 3, 8, 8)


def image(name: str, function: Callable[[Tensor], Any]) -> None:
    between(name, function, *_IMAGE)


image("interpolate_nearest", lambda h: F.interpolate(h, scale_factor=2))
image("interpolate_size", lambda h: F.interpolate(h, size=(5, 7)))
image("interpolate_bilinear", lambda h: F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False))
image("interpolate_corners", lambda h: F.interpolate(h, size=(11, 12), mode="bilinear", align_corners=True))
image("interpolate_bicubic", lambda h: F.interpolate(h, size=12, mode="bicubic"))
image("interpolate_area", lambda h: F.interpolate(h, size=4, mode="area"))
image("interpolate_antialias", lambda h: F.interpolate(h, size=4, mode="bilinear", antialias=True))
image("interpolate_exact", lambda h: F.interpolate(h, scale_factor=1.5, mode="nearest-exact"))
between("interpolate_linear", lambda h: F.interpolate(h, scale_factor=2, mode="linear") + F.interpolate(h, size=32))
image("pixel_shuffle", lambda h: F.pixel_shuffle(torch.cat([h, h[:, :1]], 1), 2))
image("pixel_unshuffle", lambda h: F.pixel_unshuffle(h, 2))
image("channel_shuffle", lambda h: F.channel_shuffle(torch.cat([h, h[:, :1]], 1), 2))
image("avg_pool", lambda h: F.avg_pool2d(h, 3, stride=2, padding=1, count_include_pad=False, ceil_mode=True))
image("max_pool", lambda h: F.max_pool2d(h, 3, stride=1, padding=1, dilation=1) + F.max_pool2d(h, (3, 3), 1, 1))
image("max_pool_default", lambda h: F.max_pool2d(h, 2))
image("max_pool_indices", lambda h: (lambda r: r[0] + r[1] * 0.01)(F.max_pool2d(h, 2, return_indices=True)))
image("max_unpool", lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2))
image("adaptive_avg", lambda h: F.adaptive_avg_pool2d(h, (2, 3)) + F.adaptive_avg_pool2d(h, 1))
image("adaptive_max", lambda h: F.adaptive_max_pool2d(h, 2))
image("lp_pool", lambda h: F.lp_pool2d(h.abs() + 1, 2, 2))
between(
    "pools_1d",
    lambda h: F.max_pool1d(h, 2) + F.avg_pool1d(h, 2) + F.adaptive_avg_pool1d(h, 8) + F.adaptive_max_pool1d(h, 8),
)
image(
    "pools_3d",
    lambda h: (
        F.max_pool3d(h[:, None], (1, 2, 2))
        + F.avg_pool3d(h[:, None], (1, 2, 2))
        + F.adaptive_avg_pool3d(h[:, None], (3, 4, 4))
    ),
)
image("unfold_fold", lambda h: F.fold(F.unfold(h, 2, stride=2), (8, 8), 2, stride=2))
image(
    "grid_sample",
    lambda h: F.grid_sample(
        h,
        F.affine_grid(torch.eye(2, 3).to(h).expand(h.shape[0], 2, 3), list(h.shape), align_corners=False),
        align_corners=False,
    ),
)
image("pad_2d", lambda h: F.pad(h, (1, 2, 3, 0), mode="reflect") + F.pad(h, (1, 2, 3, 0)))
image(
    "channels_last", lambda h: h.to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last) * 2
)
image("clone_format", lambda h: h.clone(memory_format=torch.contiguous_format).permute(0, 2, 3, 1).contiguous())
image("conv_functional", lambda h: F.conv2d(h, h.new_ones(3, 1, 3, 3), padding="same", groups=3))


def _low_frequencies(spectrum: Tensor) -> Tensor:
    kept = torch.zeros_like(spectrum)
    kept[..., :4] = spectrum[..., :4] * 1.5
    kept[..., 5] = spectrum[..., 1]
    kept.narrow(-1, 6, 2).copy_(spectrum[..., 6:8])
    return kept


def _assigned(h: Tensor) -> Tensor:
    copy = h.clone()
    copy[:, 1:3] = h[:, 3:5] * 2
    copy[..., 0] = 0.0
    copy[:, 4] += 1
    return copy


def _rows_assigned(h: Tensor) -> Tensor:
    copy = torch.zeros(h.shape[0], 6, 16)
    for row in range(6):
        copy[:, row] = h[:, row] * row
    return copy


def _masked_assigned(h: Tensor) -> Tensor:
    copy = h.clone()
    copy[copy < 0] = 0.25
    return copy


# ---- names -----------------------------------------------------------------------------------------------------


@toy(features(8, 16), "stream", "class", plan={"pp": 3})
class OddModuleNames(nn.Module):
    """Modules called like keywords, builtins, torch and what the emitted code defines."""

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "F",
            "torch",
            "lambda",
            "stream",
            "dropout",
            "keys",
            "values",
            "class",
            "nn",
            "print",
            "0",
            "tensor",
        ):
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = torch.tanh(child(x))
        return x


@toy(features(8, 16), "last")
class OddParameterNames(nn.Module):
    """Parameters called likewise, at the root and in containers with odd keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(16))
                for name in ("dtype", "lambda", "a b", 'say "hi"', "back\\slash", "é", "module", "self", "shapes")
            }
        )
        self.listed = nn.ParameterList([torch.randn(16) for _ in range(3)])
        self.register_parameter("class", nn.Parameter(torch.randn(16)))
        self.register_parameter("0", nn.Parameter(torch.randn(16)))
        self.register_buffer("import", torch.ones(16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.last = nn.ModuleDict({"a-b": nn.Linear(16, 16), "for": nn.Linear(16, 16), "0": nn.Linear(16, 16)})

    def forward(self, x: Tensor) -> Tensor:
        for value in [*self.first.values(), *self.listed]:
            x = torch.tanh(x + value)
        x = x * getattr(self, "class") + getattr(self, "0") * getattr(self, "import")
        for child in self.last.values():
            x = child(x)
        return x * self.scale


@toy(features(8, 16), "layers.2")
class ListBesideParameters(nn.Module):
    """A list with parameters of its own and blocks, and root buffers."""

    class Layers(nn.ModuleList):
        def __init__(self) -> None:
            super().__init__(OneLayer(16) for _ in range(4))
            self.gain = nn.Parameter(torch.ones(16))

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.Layers()
        self.register_buffer("offset", torch.arange(16.0), persistent=False)
        self.register_buffer("kept", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offset * self.kept * 0.01
        for layer in self.layers:
            x = layer(x) * self.layers.gain
        return x


class OneLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


@toy(lambda: (real(8, 16), real(8, 16), real(8, 16)), "second")
class OddInputNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input: Tensor, batch: Tensor, like: Tensor) -> Tensor:
        rows = self.first(input) + batch
        hidden = rows * 2
        return self.second(hidden.relu()) + like + batch


@toy(lambda: (real(8, 16), real(8, 16), real(8, 16)), "second")
class InputNamesOfBuiltins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, len: Tensor, self_: Tensor, type: Tensor) -> Tensor:
        mean = self.first(len).mean(-1, keepdim=True)
        return self.second(self_ * mean + type) + len


@toy(features(8, 16), "1")
class SequentialRoot(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


@toy(features(8, 16), "2.0")
class NestedSequential(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            OneLayer(16), nn.Sequential(OneLayer(16), OneLayer(16)), nn.Sequential(OneLayer(16), nn.Tanh())
        )


# ---- ties ------------------------------------------------------------------------------------------------------


@toy(lambda: (ids(8, 6),), "layers.0", "layers.1", "head", plan={"pp": 4}, targets=lambda: (ids(8, 6),),
     loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))  # fmt: skip
class TiedThreeWays(nn.Module):
    """Embedding, a middle projection and the head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 16, bias=False)
        self.layers[1].weight = self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + hidden
        return self.head(hidden)


class Repeated(nn.Module):
    """ALBERT: one layer, many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layer = OneLayer(16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(self.first(x)))
        x = self.layer(self.layer(self.middle(x)))
        return self.last(self.layer(x))


toy(features(8, 16), "middle")(Repeated)
toy(features(8, 16), "middle", "last", name="RepeatedThree", plan={"pp": 3})(Repeated)


@toy(features(8, 16), "layers.2")
class TiedAcrossBlocks(nn.Module):
    """Blocks whose linears are one parameter, under four names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneLayer(16) for _ in range(4))
        for layer in self.layers[1:]:
            layer.linear.weight = self.layers[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@toy(features(8, 16), "layers.2")
class TiedPairs(nn.Module):
    """The same layer objects twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        pair = [OneLayer(16), OneLayer(16)]
        self.layers = nn.ModuleList([*pair, *pair])
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@toy(features(8, 16), "second")
class TiedTransposed(nn.Module):
    """A weight used transposed and in a loss term on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return F.linear(self.second(hidden), self.first.weight.t()) + self.first.weight.square().mean()


@toy(features(8, 16), "c")
class SharedModule(nn.Module):
    """A norm called on both stages, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a, self.b, self.c = nn.Linear(16, 16), self.norm, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.c(self.b(self.a(x)))) * x


# ---- one network, several inputs -------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(OneLayer(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@toy(lambda: (real(8, 16), real(8, 16).flip(0)), "encoder.layers.1", "encoder.layers.2", plan={"pp": 3})
class Siamese(nn.Module):
    """Both inputs go through the stages side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.encoder(x) - self.encoder(y)


@toy(features(8, 16), "encoder.layers.2")
class Recycled(Siamese):
    """A network on its own result."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.encoder(self.encoder(x) + x)


class Scaled(nn.Module):
    """A layer that computes something else by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


@toy(features(8, 16), "layers.2")
class CalledAgain(nn.Module):
    """The same layers twice, the second time with another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            x = layer(x, 2.0)
        return x


@toy(lambda: (real(8, 16), real(8, 16).flip(0)), "policy.layers.2")
class Preferences(nn.Module):
    """A policy and its frozen reference, each on a chosen and a rejected answer."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Encoder(), Encoder().requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        gained = (self.policy(chosen) - self.reference(chosen)).mean(-1)
        return F.logsigmoid(gained - (self.policy(rejected) - self.reference(rejected)).mean(-1))


# ---- frozen, unused --------------------------------------------------------------------------------------------


class Freezable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneLayer(16) for _ in range(4))
        self.head = nn.Linear(16, 4)
        self.unused = nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _frozen(*prefixes: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Freezable()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
        return model

    return build


_FOUR = ("layers.1", "layers.2", "head")
toy(features(8, 16), *_FOUR, name="FrozenFirst", plan={"pp": 4}, build=_frozen("layers.0"))(Freezable)
toy(features(8, 16), *_FOUR, name="FrozenMiddle", plan={"pp": 4}, build=_frozen("layers.1", "layers.2"))(Freezable)
toy(features(8, 16), *_FOUR, name="FrozenLast", plan={"pp": 4}, build=_frozen("head", "layers.3"))(Freezable)
toy(features(8, 16), "layers.2", name="FrozenOne", build=_frozen("layers.1.linear.weight", "layers.3.norm"))(Freezable)
toy(features(8, 16), "layers.2", name="FrozenHalf", build=_frozen("layers.0", "layers.1"))(Freezable)
toy(features(8, 16), "layers.2", name="FrozenNorms", build=_frozen(*(f"layers.{i}.norm" for i in range(4))))(Freezable)


# ---- buffers, constants ----------------------------------------------------------------------------------------


@toy(
    features(8, 16),
    "second",
    targets=lambda: (ids(8, below=4),),
    loss=lambda out, target: F.cross_entropy(out, target, weight=torch.linspace(0.5, 1.0, 4)),
)
class Buffers(nn.Module):
    """Buffers of every kind, constants in the forward, and class weights in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("integers", torch.tensor([0, 2, 1, 3]))
        self.register_buffer("flags", torch.tensor([True, False, True, True]))
        self.register_buffer("halves", torch.ones(4, dtype=torch.float16), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("shared", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[:, self.integers] * self.shared
        h = h.masked_fill(~self.flags, 0.1) * self.halves * torch.tensor([1.0, 2.0, 3.0, 4.0])
        out = self.second(F.pad(h, (0, 12))) * self.shared
        return out[:, self.integers] + torch.tensor(0.5)


@toy(features(8, 16), "second", plan={"schedule": "GPipe"})
class Counters(nn.Module):
    """Written buffers: a step counter, and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.second(h - self.mean)


# ---- what crosses boundaries -----------------------------------------------------------------------------------


@toy(lambda: (real(8, 6, 16), ids(8, 6)), "second", "third", "fourth", plan={"pp": 4})
class ManyCross(nn.Module):
    """Several tensors of every kind cross; some are used three stages later, some inputs only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(16, 16) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.first(x)
        positive, best = h > 0, h.argmax(-1)
        table = self.bias.softmax(-1)  # without batch
        scalar = self.bias.mean()
        skip = h
        h = self.second(table @ h)
        h = self.third(h.masked_fill(positive, 0.5) * scalar)
        h = self.fourth(h + skip)
        return h * (best + tokens).unsqueeze(-1) + table.sum() + positive


@toy(lambda: (real(8, 16),), "second", "third", plan={"pp": 3})
class InputEverywhere(nn.Module):
    """A stage sends an input on, and the same tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.first(x)
        b = a.view(-1, 16)
        c = self.second(x + a)
        return self.third(c + b + x), a, b, x


@toy(lambda: (real(8, 16),), "encoder.1", "decoder.0", "decoder.1", plan={"pp": 4})
class Skips(nn.Module):
    """U-Net: skip connections of three lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(OneLayer(16) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.encoder:
            x = layer(x)
            skips.append(x)
        for layer in self.decoder:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        return x


@toy(lambda: (real(8, 6, 16),), "second")
class PartsCross(nn.Module):
    """Results of split, chunk, unbind, topk, sort and max, all used on the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, dim=-1)
        one, *others = q.unbind(1)
        values, places = k.topk(4, dim=-1)
        ordered, order = v.sort(-1)
        top, where = v.max(dim=1)
        left, right = v.split([4, 12], dim=-1)
        h = self.second(q)
        total = (
            h.gather(-1, places).sum(-1)
            + values.sum(-1)
            + ordered[..., 0]
            + order[..., 0]
            + left.sum(-1) * right.mean(-1)
        )
        return total + (one + others[-1] + top).sum(-1, keepdim=True) + where.sum(-1, keepdim=True)


@toy(
    lambda: (real(8, 16), real(8, 16)),
    "second",
    targets=lambda: (real(8, 16), ids(8)),
    loss=lambda out, dense, label: F.mse_loss(out, dense) + 0.1 * (out[:, 0] * label).mean(),
)
class LateInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        return self.second(self.first(x)) * late


@toy(lambda: (real(8, 6, 16),), "second", loss=lambda out: out["main"].square().mean() + 0.1 * out["aux"])
class AuxiliaryLoss(nn.Module):
    """A loss term made on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        return {"aux": h.square().mean(), "main": self.second(h)}


@toy(lambda: (real(8, 16),), "second", loss=lambda out: out[0].square().mean() + out[1])
class Regularised(nn.Module):
    """Weight decay as part of the loss: parameters of every stage without any input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(self.first(x)), sum((p.square().sum() for p in self.parameters()), torch.zeros(())) * 0.01


@toy(lambda: ({"image": real(8, 16), "text": [real(8, 4), ids(8, 4)]},), "second")
class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        h = self.first(batch["image"]) + batch["text"][0]
        return {"a": self.second(h), "b": [batch["text"][1] * h]}


# ---- layers ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Modules one after the other; ``second`` is the last."""

    def __init__(self, *modules: nn.Module, function: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        *first, second = modules
        self.first, self.second = nn.Sequential(*first), second

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def chain(name: str, shape: tuple[int, ...], *build: Callable[[], nn.Module], **options: Any) -> None:
    ZOO[name] = Toy(lambda: Chain(*(make() for make in build)), features(*shape), operator=True, **options)


chain(
    "conv1d",
    (8, 4, 16),
    lambda: nn.Conv1d(4, 6, 3, padding="same"),
    nn.PReLU,
    lambda: nn.ConvTranspose1d(6, 4, 3, stride=2),
)
chain(
    "conv3d",
    (8, 2, 4, 6, 6),
    lambda: nn.Conv3d(2, 4, 3, padding=1),
    lambda: nn.PReLU(4),
    lambda: nn.ConvTranspose3d(4, 2, 2, output_padding=0),
)
chain(
    "conv_transpose",
    (8, 4, 6, 6),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=1),
    lambda: nn.Conv2d(6, 4, 3, padding_mode="circular", padding=1),
)
chain(
    "conv_reflect",
    (8, 4, 6, 6),
    lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    lambda: nn.Conv2d(6, 4, (3, 1), stride=(2, 1), padding=(1, 0), bias=False),
)
chain(
    "norms_2d",
    (8, 4, 6, 6),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.InstanceNorm2d(4, affine=True),
    lambda: nn.InstanceNorm2d(4),
    lambda: nn.LayerNorm((4, 6, 6)),
    Scale,
)
chain(
    "norms_eval",
    (8, 4, 6, 6),
    lambda: Still(nn.BatchNorm2d(4)),
    lambda: nn.Conv2d(4, 4, 1),
    lambda: Still(nn.BatchNorm2d(4, affine=False)),
)
chain(
    "rms_norm",
    (8, 4, 16),
    lambda: nn.RMSNorm(16),
    lambda: nn.RMSNorm((4, 16), eps=1e-4, elementwise_affine=False),
    lambda: nn.Linear(16, 4),
    lambda: nn.Linear(4, 4),
)
chain(
    "weight_norm", (8, 16), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), lambda: nn.Linear(16, 4)
)
chain(
    "spectral_norm",
    (8, 16),
    lambda: Still(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))),
    lambda: nn.Linear(16, 4),
)
chain(
    "modules_of_shape",
    (8, 4, 16),
    nn.Identity,
    lambda: nn.Linear(16, 16),
    nn.Flatten,
    lambda: nn.Unflatten(1, (4, 16)),
    lambda: nn.Linear(16, 4),
)
chain(
    "bias_free",
    (8, 16),
    lambda: nn.Linear(16, 16, bias=False),
    lambda: nn.LayerNorm(16, bias=False),
    lambda: nn.LayerNorm(16, elementwise_affine=False),
    lambda: nn.Linear(16, 16, bias=False),
)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first = cell(16, 8, batch_first=True, **options)
        self.second = nn.Linear(16 if options.get("bidirectional") else 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])


for _cell in (nn.LSTM, nn.GRU, nn.RNN):
    ZOO[_cell.__name__] = Toy(lambda cell=_cell: Recurrent(cell), features(8, 5, 16))
ZOO["LSTMTwoLayers"] = Toy(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), features(8, 5, 16))


@toy(lambda: (real(5, 8, 16),), "second", export={"batch_dims": {"x": 1}}, loss=weighted)
class SequenceFirst(nn.Module):
    """The batch on dim 1, for attention and recurrent layers of the old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4)
        self.second = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        h = x + self.first(x, x, x, attn_mask=mask)[0]
        return self.second(h, src_mask=mask)


@toy(lambda: (real(8, 5, 16), real(8, 5) > 5.0), "second")
class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, batch_first=True, bias=False, add_bias_kv=True)
        self.second = nn.MultiheadAttention(16, 2, batch_first=True, kdim=8, vdim=8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        h, weights = self.first(x, x, x, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
        return self.second(h, h[..., :8], h[..., 8:], need_weights=False)[0] + weights.mean((1, 2))[:, :5, None]


@toy(lambda: (ids(8, 6), torch.ones(8, 6)), "second")
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(16, 16, mode="sum")
        self.other = nn.Embedding(16, 16, padding_idx=3, scale_grad_by_freq=False)
        self.second = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        return self.second(self.first(tokens, per_sample_weights=weights) + self.other(tokens).mean(1))


@toy(lambda: (real(8, 16), real(8, 16)), "second")
class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Bilinear(16, 16, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x, y)
        return (
            self.second(h)
            + nn.CosineSimilarity()(h, h.flip(-1)).unsqueeze(-1)
            + nn.PairwiseDistance()(h, h * 2)[:, None]
        )


# ---- precision -------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.second = (
            nn.Linear(16, 16),
            nn.ModuleList(OneLayer(16) for _ in range(2)),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            h = layer(h)
        return self.second(h).float()


toy(features(8, 16), "layers.1", name="Bfloat16", export={"dtype": "bf16"})(Plain)
toy(features(8, 16), "layers.1", name="Float16", export={"dtype": "fp16"})(Plain)
toy(features(8, 16), "layers.1", name="Float64", build=lambda: Plain().double())(Plain)
toy(features(8, 16), "layers.1", name="Bfloat16Built", build=lambda: Plain().bfloat16())(Plain)


@toy(features(8, 16), "second")
class MixedDtypes(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, dtype=torch.float64)
        self.gain = nn.ParameterDict(
            {"a": nn.Parameter(torch.ones(16, dtype=torch.bfloat16)), "b": nn.Parameter(torch.ones(16))}
        )
        self.norm = nn.LayerNorm(16, dtype=torch.float64)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.double()))
        return self.second((h.bfloat16() * self.gain["a"]).float() * self.gain["b"])


@toy(features(8, 16), "second")
class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.softmax(self.first(x), -1) @ self.first.weight
        return self.second(h.float())


class MixedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(16, dim=-1)
        with torch.autocast("cpu", enabled=False):
            angles = torch.outer(torch.arange(x.shape[1]).float(), torch.ones(16))
        return x + self.out((q * angles.cos() @ k.transpose(1, 2)).softmax(-1) @ v)


@toy(lambda: (ids(8, 6),), "layers.1")
class MixedPrecision(nn.Module):
    """All of the forward under autocast, rotary tables out of it again, a tied weight on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.layers = nn.ModuleList(MixedLayer() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).float()


@toy(features(8, 6, 16), "second")
class PositionsAsFeatures(nn.Module):
    """Dropout after a buffer of integers that takes its dtype from a value with the batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.2)
        self.register_buffer("positions", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(self.dropout(h + self.positions.type_as(h)[:, None] + self.positions.to(h)[:, None]))


# ---- batches ---------------------------------------------------------------------------------------------------

toy(features(1, 16), "layers.1", name="BatchOfOne", plan={"schedule": "GPipe"})(Plain)
toy(features(3, 16), "layers.1", name="BatchOfThree")(Plain)
toy(features(6, 16), "layers.1", name="BatchOfSix", plan={"microbatch_size": 3})(Plain)
toy(features(8, 16), "layers.1", name="RowsOfOne", plan={"microbatch_size": 1})(Plain)
toy(features(8, 16), "layers.1", name="LargerBatch", plan={"global_batch": 24, "microbatch_size": 3})(Plain)


@toy(features(8, 4, 16), "second")
class FixedBatch(nn.Module):
    """Control flow on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in range(x.shape[0]):
            rows.append(self.first(x[row]))
        return self.second(torch.stack(rows))


@toy(features(8, 4, 16), "second")
class IntBatch(nn.Module):
    """The batch size as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + torch.zeros(int(x.shape[0]), 4, 16)
        return self.second(h.reshape(int(x.size(0)) * 4, 16)).reshape(x.shape[0], 4, 16)


# ---- blocks ----------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers in a container, run by ``order``."""

    def __init__(self, layers: nn.Module, order: Sequence[str | int], after: int = 16) -> None:
        super().__init__()
        self.layers = layers
        self.order = list(order)
        self.head = nn.Linear(after, 4)

    def forward(self, x: Tensor) -> Tensor:
        for key in self.order:
            x = self.layers[key](x)  # type: ignore[index, operator]
        return self.head(x)


class OtherLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gains = nn.ParameterList([torch.ones(width), torch.ones(width)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gains[0] + self.down(F.gelu(self.up(x))) * self.gains[1]


class PositionLayer(nn.Module):
    """T5-like: returns a bias that the next layers take."""

    def __init__(self, width: int, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(6, 6)) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self.bias if self.bias is not None else bias
        assert bias is not None
        return x + bias.softmax(-1) @ self.linear(x), bias


class ScaledLayer(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(width, width), nn.Linear(width, width), scale
        self.register_buffer("table", torch.full((width,), scale), persistent=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.two(self.one(x))) * self.scale + self.table * torch.tensor([0.5])


class CountingLayer(OneLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def _list(kind: Callable[[int], nn.Module], count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(kind(16) for _ in range(count))


_INTERLEAVED = {"schedule": "Interleaved1F1B"}
_QUARTERS = ("layers.1", "layers.2", "layers.3")


def stack(name: str, build: Callable[[], nn.Module], *split: str, **plan: Any) -> None:
    ZOO[name] = Toy(build, features(8, 6, 16), split, plan=plan)


stack(
    "InterleavedBlocks", lambda: Stack(_list(OneLayer, 8), range(8)), "layers.2", "layers.4", "layers.6", **_INTERLEAVED
)
stack("ReversedBlocks", lambda: Stack(_list(OneLayer), (3, 2, 1, 0)), "layers.1")
stack("AlternatingBlocks", lambda: Stack(nn.ModuleList([OneLayer(16), OtherLayer(16)] * 2), range(4)), "layers.2")
stack(
    "AlternatingFresh",
    lambda: Stack(nn.ModuleList((OneLayer, OtherLayer)[i % 2](16) for i in range(8)), range(8)),
    "layers.3",
    "layers.4",
    "layers.7",
    pp=4,
)
stack(
    "NamedBlocks",
    lambda: Stack(
        nn.ModuleDict({name: OneLayer(16) for name in ("class", "a b", "c", "def")}), ("class", "a b", "c", "def")
    ),
    "layers.c",
)
stack("RepeatedBlocks", lambda: Stack(_list(OneLayer), (0, 1, 2, 3, 2, 3)), "layers.2")
stack("RepeatedInterleaved", lambda: Stack(_list(OneLayer), (0, 0, 1, 1, 2, 2, 3, 3)), *_QUARTERS, **_INTERLEAVED)
stack("SkippedBlocks", lambda: Stack(_list(OneLayer, 6), (0, 2, 4, 5)), "layers.4")
stack(
    "ScaledBlocks",
    lambda: Stack(nn.ModuleList(ScaledLayer(16, 0.1 * (i + 1)) for i in range(4)), range(4)),
    *_QUARTERS,
    pp=4,
)
stack("SameScaledBlocks", lambda: Stack(nn.ModuleList(ScaledLayer(16, 0.5) for _ in range(4)), range(4)), "layers.2")
stack("CountingBlocks", lambda: Stack(_list(CountingLayer), range(4)), "layers.2", microbatch_size=8, schedule="GPipe")
stack(
    "NestedBlocks",
    lambda: Stack(nn.ModuleList(nn.Sequential(OneLayer(16), OtherLayer(16)) for _ in range(4)), range(4)),
    "layers.2",
)
stack(
    "SequentialBlocks",
    lambda: nn.Sequential(*(OneLayer(16) for _ in range(6)), nn.Linear(16, 4)),
    "2",
    "4",
    "6",
    **_INTERLEAVED,
)


@toy(features(8, 6, 16), *_QUARTERS, plan={"pp": 4, "schedule": "GPipe"})
class CarriedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PositionLayer(16, index == 0) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


@toy(lambda: (real(8, 6, 16), ids(8, 6) > 3), "decoder.0", "decoder.2", plan={"pp": 3}, loss=weighted)
class EncoderDecoder(nn.Module):
    """Every decoder layer takes the encoder's result and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True) for _ in range(4)
        )

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=padding)
        for layer in self.decoder:
            x = layer(x, memory, memory_key_padding_mask=padding)
        return x


# ---- random ----------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self, width: int, p: float = 0.3) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.dropout(self.linear(x))))


stack("DropoutBlocks", lambda: Stack(_list(Dropped, 8), range(8)), "layers.2", "layers.4", "layers.6", **_INTERLEAVED)
stack("DropoutTied", lambda: Stack(nn.ModuleList([Dropped(16)] * 4), range(4)), "layers.2")
between("dropout_merged", lambda h: F.dropout(h.flatten(0, 1), 0.5).view(-1, 6, 16))
between("dropout_inner", lambda h: F.dropout(h.transpose(0, 1), 0.5).transpose(0, 1))
between("dropout_eval", lambda h: F.dropout(h, 0.5, training=False))
image("dropout_2d", lambda h: F.dropout2d(h, 0.5))
between("dropout_attention", lambda h: (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2))(h[:, None]))


# ---- writes ----------------------------------------------------------------------------------------------------


@toy(features(8, 16), "second", plan={"microbatch_size": 8, "schedule": "GPipe"})
class WrittenViews(nn.Module):
    """A write through a view of a buffer, read on the next line, and a buffer that is replaced as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(4, 16))
        self.register_buffer("last", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.cache[1] = h.detach().mean(0)
        self.cache[2:, :4].add_(1.0)
        self.last.copy_(self.cache.sum(0))
        return self.second(h + self.cache[1] + self.last * 0.01)


@toy(features(8, 16), "second", plan={"microbatch_size": 8, "schedule": "GPipe"})
class CounterCrosses(nn.Module):
    """A counter written on the first stage is read on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.first(x) * self.steps
        return self.second(h) / self.steps


class ReadLater(WrittenViews):
    """What was written through a view of a buffer is read on the next stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.cache[1] = h.detach().mean(0)
        return self.second(h) * self.cache[1]


toy(features(8, 16), "second", plan={"microbatch_size": 8, "schedule": "GPipe"})(ReadLater)


@toy(features(8, 16), "second", plan={"microbatch_size": 8, "schedule": "GPipe"})
class ReadBefore(nn.Module):
    """A buffer's old value is used after the buffer has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("cache", torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        old = self.cache.sum(0) * 2
        self.cache[1] += 1.0
        middle = self.cache.sum(0)
        self.cache.mul_(0.5)
        return self.second(self.first(x) * old) + middle + self.cache[0]


@toy(features(8, 16), "third", plan={"microbatch_size": 8, "schedule": "GPipe"})
class SharedStatistics(nn.Module):
    """A BatchNorm that is called on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.third(self.second(self.first(x))))


@toy(features(8, 16), "second")
class InPlace(nn.Module):
    """In-place operators on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += 1
        h.mul_(0.5).clamp_(min=-2)
        h[:, :4] *= 2
        h[:, 4:8].copy_(x[:, :4])
        h[x > 1] = 0.0
        mask = torch.zeros_like(h, dtype=torch.bool)
        mask[:, 3] = True
        h = self.second(h.masked_fill_(mask, 0.25))
        h[:, 1] += h[:, 0]
        return h


# ---- arguments, outputs, losses --------------------------------------------------------------------------------


@toy(
    lambda: (real(8, 16), None, 2, True, "gelu"),
    "second",
    export={"kwargs": {"scale": torch.tensor(0.5), "flags": {"shift": torch.ones(16)}}},
)
class ManyArguments(nn.Module):
    """Numbers, None, strings; tensors without a batch as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        times: int,
        flag: bool,
        kind: str,
        *,
        scale: Tensor,
        flags: dict[str, Tensor],
    ) -> Tensor:
        h = getattr(F, kind)(self.first(x)) * times if flag else x
        return self.second(h if mask is None else h * mask) * scale + flags["shift"]


@toy(
    lambda: (real(8, 6, 16),),
    "second",
    targets=lambda: (ids(8, 6), real(8)),
    loss=lambda out, label, weight: (
        (F.cross_entropy(out.transpose(1, 2), label, reduction="none").mean(1) * weight.abs()).sum()
        / weight.abs().sum()
    ),
)
class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def _masked_mean(out: Tensor, label: Tensor) -> Tensor:
    valid = (label > 3).float()
    return ((out - 1).abs().mean(-1) * valid).sum() / valid.sum().clamp(min=1)


_HALF = {"targets": lambda: (ids(8, 6),)}
toy(features(8, 6, 16), "second", name="MaskedLoss", loss=_masked_mean, **_HALF)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="IgnoredLabels",
    loss=lambda out, label: F.cross_entropy(
        out.flatten(0, 1), label.masked_fill(label < 8, -100).flatten(), label_smoothing=0.1
    ),
    **_HALF,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="SumLoss",
    loss=lambda out, label: F.cross_entropy(out.flatten(0, 1), label.flatten(), reduction="sum"),
    **_HALF,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="BinaryLoss",
    loss=lambda out, label: (
        F.binary_cross_entropy_with_logits(out[..., 0], (label > 4).float(), pos_weight=torch.tensor(2.0))
        + F.huber_loss(out[..., 1], label.float(), delta=0.5)
    ),
    **_HALF,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="DivergenceLoss",
    loss=lambda out, label: (
        F.kl_div(out.log_softmax(-1), torch.ones_like(out) / 16, reduction="batchmean")
        + F.l1_loss(out[..., 0], label * 1.0)
        + F.smooth_l1_loss(out[..., 1], label * 1.0)
    ),
    **_HALF,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="RankingLoss",
    loss=lambda out, label: (
        F.margin_ranking_loss(out[:, 0], out[:, 1], torch.ones_like(out[:, 0]), margin=0.5)
        + F.triplet_margin_loss(out[:, 0], out[:, 1], out[:, 2])
        + F.cosine_embedding_loss(out[:, 0], out[:, 1], torch.ones(out.shape[0]))
    ),
    **_HALF,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="OtherLosses",
    loss=lambda out, label: (
        F.poisson_nll_loss(out[..., 0], label * 1.0)
        + F.soft_margin_loss(out[..., 3], label.sign() * 2.0 - 1)
        + F.nll_loss(out.log_softmax(-1).flatten(0, 1), label.flatten())
        + F.hinge_embedding_loss(out[..., 0], label.sign() * 2.0 - 1)
    ),
    **_HALF,
)(WeightedLoss)


# ---- honest programs that fp32 leaves in doubt: gradients that are zero but for rounding, signs that flip ------


@toy(features(8, 4, 8, 8), "blocks.2", plan={"microbatch_size": 2})
class GroupNormResidual(nn.Module):
    """Deep and narrow, with ReLU: rounding turns units on and off, and later steps differ more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(4)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


@toy(features(8, 6, 16), "mixers.1", plan={"microbatch_size": 2})
class TokenMixer(nn.Module):
    """A bias of all tokens before a norm over them, and the bias of a key before softmax: neither has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.shifts = nn.Parameter(torch.ones(2, 1))
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for mixer, shift in zip(self.mixers, self.shifts):
            x = F.layer_norm(mixer(x.transpose(1, 2)).transpose(1, 2) + 30 * shift, (16,))
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.softmax(-1) @ x


# ---- rows chosen by a mask -------------------------------------------------------------------------------------


def _labels() -> Tensor:
    """Some labels ignored, and all of the first two examples'."""
    labels = ids(8, 6)
    return labels.masked_fill((labels < 6) | (torch.arange(8)[:, None] < 2), -100)


_UNEVEN = {"targets": lambda: (_labels(),)}
toy(
    features(8, 6, 16),
    "second",
    name="ChosenLabels",
    loss=lambda out, label: F.cross_entropy(out[label != -100], label[label != -100]),
    **_UNEVEN,
)(WeightedLoss)
toy(
    features(8, 6, 16),
    "second",
    name="ChosenRows",
    loss=lambda out, label: F.mse_loss(
        out[label[:, 0] != -100].flatten(0, 1)[:, 0], label[label[:, 0] != -100].flatten() * 0.1
    ),
    **_UNEVEN,
)(WeightedLoss)


@toy(
    features(8, 6, 16),
    "second",
    loss=lambda out, label: (out[label != -100].logsumexp(-1) - 1).abs().sum() / (label != -100).sum().item(),
    **_UNEVEN,
)
class ChosenInside(nn.Module):
    """Some positions go through a layer and back to their places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, far = self.first(x), x[..., 0] > 0.5
        h = h.clone()
        h[far] = torch.tanh(self.second(h[far]))
        return h
