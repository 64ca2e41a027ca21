"""Hand-made calls of every family of operators, odd arguments included, with sizes that two and four ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphpar.emitted import random_streams
from graphpar.emitted.fp8 import fp8_linear, mxfp8_linear, mxfp8_linear_with_gw_hp
from graphpar.emitted.gated import geglu, swiglu
from graphpar.emitted.rotary import apply_rotary
from graphpar.operators.prove import Call
from tests.tools.rule_calls import calls_of

Made = Callable[..., Any]
aten = torch.ops.aten


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def whole(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


# Each row: a function, and its tensors.
PRODUCTS: list[tuple[Made, ...]] = [
    (F.linear, real(4, 6, 8), real(12, 8), real(12)),
    (F.linear, real(8), real(12, 8)),
    (F.linear, real(4, 6, 8), real(8)),  # a number for each row
    (F.linear, real(4, 6, 8), real(8), real()),
    *(
        (
            lambda x, w, ends: F.grouped_mm(x, w, offs=ends),
            real(16, 16).float(),
            real(4, 16, 32).float(),
            torch.tensor(ends).int(),
        )
        for ends in ([3, 9, 9, 16], [0, 0, 16, 16])
    ),
    (F.linear, real(4, 8), real(7, 8), real(7)),  # uneven rows
    (torch.matmul, real(4, 6, 8), real(4, 8, 10)),
    (torch.matmul, real(2, 1, 6, 8), real(4, 8, 10)),
    (torch.matmul, real(8), real(4, 8, 6)),
    (torch.matmul, real(4, 6, 8), real(8)),
    (torch.matmul, real(8), real(8)),
    (torch.mm, real(4, 8), real(8, 6)),
    (torch.bmm, real(4, 6, 8), real(4, 8, 2)),
    (torch.addmm, real(12), real(4, 8), real(8, 12)),
    (torch.addmm, real(4, 12), real(4, 8), real(8, 12)),
    (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), real(4, 12), real(4, 8), real(8, 12)),
    (torch.baddbmm, real(4, 1, 6), real(4, 2, 8), real(4, 8, 6)),
    (torch.addmv, real(4), real(4, 8), real(8)),
    (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), real(2, 4, 6, 8), real(2, 4, 6, 8)),
    (lambda a, b: torch.einsum("bii,ij->bj", a, b), real(4, 6, 6), real(6, 8)),
    (lambda a, b: torch.einsum("ij,jk", a, b), real(4, 6), real(6, 8)),
    (lambda a, b, c: torch.einsum("bn,anm,bm->ba", a, b, c), real(4, 6), real(8, 6, 2), real(4, 2)),
    (lambda a, b: torch.einsum("ij,kj->ik", a, b), real(4, 1), real(6, 8)),
    (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), real(4, 2, 6, 8), real(2, 8, 10)),
    (lambda a, b: torch.einsum("...j,jk", a, b), real(4, 6, 8), real(8, 10)),
    (lambda a, b: torch.einsum("i...,i...->...", a, b), real(4, 6, 1), real(4, 8)),
    (lambda a: torch.einsum("...ii->...i", a), real(4, 6, 6)),
    (lambda a, b: torch.tensordot(a, b, ([1, 2], [0, 1])), real(4, 6, 8), real(6, 8, 2)),
    (F.bilinear, real(4, 6), real(4, 8), real(10, 6, 8), real(10)),
    (torch.outer, real(4), real(6)),
    (torch.cdist, real(2, 4, 6), real(2, 8, 6)),
]
ATTENTION: list[tuple[Made, ...]] = [
    (F.scaled_dot_product_attention, real(2, 4, 6, 8), real(2, 4, 10, 8), real(2, 4, 10, 2)),
    (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[real(2, 4, 6, 8)] * 3),
    (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        real(2, 8, 6, 4),
        real(2, 4, 6, 4),
        real(2, 4, 6, 4),
    ),
    (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        real(2, 4, 6, 4),
        real(2, 1, 6, 4),
        real(2, 1, 6, 4),
    ),
    (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(6, 6),
    ),
    (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 1, 1, 6),
    ),
    (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 8),
        real(2, 4, 6, 6),
    ),
    (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        real(2, 8, 6, 4),
        real(2, 4, 6, 4),
        real(2, 4, 6, 4),
        real(2, 8, 6, 6),
    ),
    (F.scaled_dot_product_attention, real(4, 6, 8), real(4, 6, 8), real(4, 6, 8)),
    (F.scaled_dot_product_attention, real(6, 8), real(6, 8), real(6, 8)),
    (F.scaled_dot_product_attention, real(2, 2, 4, 6, 8), real(2, 2, 4, 6, 8), real(2, 2, 4, 6, 8)),
    (F.scaled_dot_product_attention, real(2, 4, 6, 8), real(1, 4, 6, 8), real(1, 4, 6, 8)),
]
EMBEDDINGS: list[tuple[Made, ...]] = [
    (lambda w, i: F.embedding(i, w), real(12, 8), whole(12, 4, 6)),
    (lambda w, i: F.embedding(i, w), real(7, 8), whole(7, 4)),  # an uneven vocabulary
    (lambda w, i: F.embedding(i, w, padding_idx=0), real(12, 8), whole(3, 4, 6)),
    (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), real(4, 8), whole(4, 4, 6)),
    (lambda x, i: x[i], real(12, 8), whole(12, 4)),
    (lambda x, i: x[:, i], real(4, 12, 8), whole(12, 6)),
    (lambda x, i, j: x[i, :, j], real(4, 6, 8), whole(4, 4), whole(8, 4)),
    (lambda x, i, j: x[:, i, j], real(4, 6, 8), whole(6, 4, 1), whole(8, 2)),
    (lambda x, m: x[m], real(4, 8), torch.tensor([True, False, True, True])),
    (lambda x, i: torch.index_select(x, 1, i), real(4, 6, 8), whole(6, 10)),
    (lambda x, i: torch.gather(x, 1, i), real(4, 6, 8), whole(6, 4, 2, 8)),
    (lambda x, i: torch.gather(x, 1, i), real(4, 6, 8), whole(6, 2, 2, 8)),
    (lambda x, i: torch.take_along_dim(x, i, 1), real(4, 6, 8), whole(6, 4, 2, 1)),
    (
        lambda x, i, s: x.scatter(1, i, s),
        real(4, 6, 8),
        torch.arange(4).view(1, 4, 1).expand(4, 4, 8).clone(),
        real(4, 4, 8),
    ),
    (lambda x, i: x.scatter(1, i, 2.0), real(4, 6, 8), whole(6, 4, 2, 8)),
    (lambda x, i, s: x.scatter_add(0, i, s), real(4, 8), whole(4, 6, 8), real(6, 8)),
    (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), real(4, 8), whole(4, 6, 8), real(6, 8)),
    (lambda x, i, s: x.index_add(0, i, s), real(4, 8), whole(4, 6), real(6, 8)),
    (lambda x, i, s: x.index_copy(0, i, s), real(8, 4), torch.randperm(8)[:6], real(6, 4)),
    (lambda x, i: x.index_fill(0, i, 2.0), real(8, 4), whole(8, 2)),
    (lambda x, i, v: x.index_put((i,), v, accumulate=True), real(8, 4), whole(8, 6), real(6, 4)),
    (lambda x, i, v: x.index_put((i,), v, accumulate=True), real(8, 4), whole(8, 6), real(4)),
    (lambda x, i, v: x.index_put((i,), v, accumulate=True), real(8, 4), whole(8, 6), real(1)),
    (lambda x, i, v: x.index_put((i,), v), real(8, 4), torch.randperm(8)[:6], real(6, 4)),
    (lambda x, i, v: aten.index_put.default(x, [None, i, i], v), real(8, 4, 4), torch.arange(4), real(8, 4)),
    (lambda x, v: aten.slice_scatter(x, v, 1, 2, 4), real(4, 6), real(4, 2)),
    (lambda x, v: aten.select_scatter(x, v, 1, 2), real(4, 6, 8), real(4, 8)),
    (lambda i: F.one_hot(i, 6), whole(6, 4, 8)),
    (lambda x, b: torch.bucketize(x, b), real(4, 6), torch.arange(4, dtype=torch.float64)),
    (lambda x, m, v: x.masked_scatter(m, v), real(4, 6), torch.ones(4, 6, dtype=torch.bool), real(4, 6)),
]
SHAPES: list[tuple[Made, ...]] = [
    *[
        (lambda x, s=s: x.reshape(s), real(4, 6, 8))
        for s in (
            [4, 6, 2, 4],
            [4, 6, 8, 1],
            [24, 8],
            [4, 48],
            [192],
            [8, 24],
            [2, 2, 48],
            [4, 3, -1],
            [12, 16],
            [-1, 4],
        )
    ],
    (lambda x: x.view(torch.int64), real(4, 8)),
    (lambda x: x.flatten(1), real(4, 6, 8)),
    (lambda x: x.unflatten(2, (2, -1)), real(4, 6, 8)),
    (lambda x: x.unflatten(-1, (4, 2)), real(4, 6, 8)),
    (lambda x: x.squeeze(), real(4, 1, 2, 1)),
    (lambda x: x.squeeze(1), real(4, 1, 2)),
    (lambda x: x.squeeze((0, 1)), real(4, 1, 2)),
    (lambda x: x.squeeze(0), real(2, 4)),
    (lambda x: x.unsqueeze(-1), real(4, 6)),
    (lambda x: x.unsqueeze(0), real(4, 6)),
    (lambda x, y: x.view_as(y), real(4, 6), real(4, 2, 3)),
    (lambda x, y: x.reshape_as(y), real(8, 6), real(4, 12)),
    (lambda x, y: x.expand_as(y), real(4, 1, 6), real(4, 8, 6)),
    (lambda x: x.expand(8, 4, 6), real(1, 6)),
    (lambda x: x.expand(-1, 4, -1), real(4, 1, 6)),
    (lambda x: torch.broadcast_to(x, (4, 6)), real(6)),
    (lambda x: x.transpose(1, -1), real(4, 6, 8)),
    (lambda x: x.permute(2, 0, 1), real(4, 6, 8)),
    (lambda x: x.t(), real(4, 6)),
    (lambda x: x.t(), real(4)),
    (lambda x: x.transpose(0, -1), real()),
    (lambda x: x.movedim(0, 2), real(4, 6, 8)),
    (lambda x: x.movedim((0, 1), (2, 0)), real(4, 6, 8)),
    (lambda x: x.mT, real(4, 6, 8)),
    (lambda x, y: torch.cat([x, y], 1), real(4, 6), real(4, 8)),
    (lambda x, y: torch.cat([x, y, x], -1), real(4, 8), real(4, 4)),
    (lambda x, y: torch.stack([x, y], 1), real(4, 6), real(4, 6)),
    (lambda x: torch.cat([x, x], 0), real(4, 6)),
    (lambda x: x.split(4, 1), real(4, 12)),
    (lambda x: x.split([8, 4, 4], -1), real(2, 16)),
    (lambda x: x.chunk(2, -1), real(4, 16)),
    (lambda x: x.chunk(3, 0), real(8, 2)),
    (lambda x: x.tensor_split([4], 1), real(2, 12)),
    (lambda x: x.tensor_split(2), real(8, 2)),
    (lambda x: x.unbind(1), real(4, 2, 8)),
    (lambda x: x[:, 1], real(4, 6, 8)),
    (lambda x: x[..., :4], real(4, 8)),
    (lambda x: x[..., 4:], real(4, 8)),
    (lambda x: x[..., -4:], real(4, 8)),
    (lambda x: x[..., 4:8], real(4, 16)),
    (lambda x: x[:, ::2], real(4, 8)),
    (lambda x: aten.slice.Tensor(x, 1), real(4, 8)),
    (lambda x: x.narrow(1, 4, 4), real(4, 12)),
    (lambda x: aten.slice.Tensor(x, 1, 0, 99), real(4, 8)),
    (lambda x: x.repeat(1, 3), real(4, 6)),
    (lambda x: x.repeat(2, 1, 2), real(4, 6)),
    (lambda x: x.tile(2), real(4, 6)),
    (lambda x: x.repeat_interleave(4, 1), real(2, 4, 6)),
    (lambda x: x.repeat_interleave(2, 0, output_size=8), real(4, 6)),
    (lambda x: x.repeat_interleave(2), real(4, 6)),
    (lambda x, r: x.repeat_interleave(r, 0), real(4, 6), torch.tensor([1, 2, 1, 2])),
    (lambda x: x.roll(1, 1), real(4, 6)),
    (lambda x: x.roll(3), real(4, 6)),
    (lambda x: x.flip(0), real(4, 6)),
    (lambda x: x.unfold(1, 2, 2), real(4, 8)),
    (lambda x: x.tril(1), real(4, 6, 6)),
    (lambda x: x.diagonal(0, 1, 2), real(4, 6, 6)),
    (lambda x: F.pad(x, (1, 1)), real(4, 6)),
    (lambda x: F.pad(x, (0, 0, 1, 0), value=2.0), real(4, 6)),
    (lambda x: F.pad(x, (1, 1), mode="reflect"), real(4, 2, 6)),
    (lambda x: x.new_zeros(4, 2), real(4, 6)),
    (lambda x: torch.zeros_like(x), real(4, 6)),
    (lambda x, y: torch.broadcast_tensors(x, y), real(4, 1), real(4, 6)),
    (lambda x: torch.view_as_complex(x), real(4, 6, 2)),
    (lambda x: torch.view_as_real(torch.complex(x, x)), real(4, 6)),
    (lambda x: F.glu(x, 1), real(4, 8)),
    (lambda x: F.glu(x), real(4, 2, 16)),
]
TRANSFORMS: list[tuple[Made, ...]] = [
    (lambda x: torch.fft.fft(x), real(4, 6, 8)),
    (lambda x: torch.fft.fft(x, 4, 1), real(4, 6, 8)),
    (lambda x: torch.fft.ifft(x, 12, 0), real(4, 6)),
    (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), 6, 1), real(4, 6, 2)),
    (lambda x: torch.fft.hfft(torch.fft.ihfft(x), 8), real(4, 8)),
    (lambda x: torch.fft.fft2(x), real(2, 4, 6, 8)),
    (lambda x: torch.fft.fft2(x, (4, 4), (1, 2)), real(2, 4, 6, 8)),
    (lambda x: torch.fft.irfft2(torch.fft.rfft2(x), (6, 8)), real(4, 6, 8)),
    (lambda x: torch.fft.fftn(x), real(4, 6)),
    (lambda x: torch.fft.fftn(x, (4, 4)), real(4, 6, 8)),
    (lambda x: torch.fft.ifftn(x, (8,)), real(4, 6, 8)),
    (lambda x: torch.fft.irfftn(torch.fft.rfftn(x, (4, 8)), (4, 8)), real(4, 6, 8)),
    (lambda x: torch.fft.fftshift(x, 1), real(4, 6)),
]
REDUCTIONS: list[tuple[Made, ...]] = [
    (lambda x: x.sum(), real(4, 6)),
    (lambda x: x.sum(1), real(4, 6, 8)),
    (lambda x: x.sum((0, -1), keepdim=True), real(4, 6, 8)),
    (lambda x: x.sum(()), real(4, 6)),
    (lambda x: (x > 0).sum(0), real(4, 6)),
    (lambda x: x.mean(), real(4, 6)),
    (lambda x: x.mean(-1, keepdim=True), real(4, 6)),
    (lambda x: x.mean((0, 1)), real(4, 6, 8)),
    (lambda x: x.max(), real(4, 6)),
    (lambda x: x.max(1), real(4, 6)),
    (lambda x: x.max(1, keepdim=True), real(4, 6)),
    (lambda x: x.amax((0, 1)), real(4, 6, 8)),
    (lambda x: x.argmax(-1), real(4, 6)),
    (lambda x: x.argmax(), real(4, 6)),
    (lambda x, y: torch.maximum(x, y), real(4, 6), real(6)),
    (lambda x, y: torch.max(x, y), real(4, 6), real(6)),
    (lambda x: torch.var_mean(x, 1), real(4, 6)),
    (lambda x: x.std(0), real(4, 6)),
    (lambda x: x.var(), real(4, 6)),
    (lambda x: x.norm(), real(4, 6)),
    (lambda x: x.norm(dim=1), real(4, 6)),
    (lambda x: torch.linalg.vector_norm(x, 2, 1), real(4, 6)),
    (lambda x: x.logsumexp(1), real(4, 6)),
    (lambda x: x.prod(1), real(4, 6)),
    (lambda x: (x > 0).any(1), real(4, 6)),
    (lambda x: (x > 0).all(), real(4, 6)),
    (lambda x: x.count_nonzero(1), real(4, 6)),
    (lambda x: x.nansum(1), real(4, 6)),
    (lambda x: F.softmax(x, 1), real(4, 6, 8)),
    (lambda x: F.log_softmax(x, -1), real(4, 6)),
    (lambda x: x.cumsum(1), real(4, 6)),
    (lambda x: x.cumprod(0), real(4, 6)),
    (lambda x: x.sort(1), real(4, 6)),
    (lambda x: x.sort(stable=True, dim=0), real(4, 6)),
    (lambda x: x.topk(2), real(4, 6)),
    (lambda x: x.topk(2, 0), real(4, 6)),
    (lambda x: x.cummax(1), real(4, 6)),
    (lambda x: x.argsort(1), real(4, 6)),
    (lambda x: x.median(1), real(4, 6)),
    (torch.median, real(4, 6)),
    (lambda x: x.kthvalue(2, 1), real(4, 6)),
    (lambda x: x.diff(dim=1), real(4, 6)),
    (lambda x, y: F.cosine_similarity(x, y), real(4, 6), real(4, 6)),
    (lambda x, y: F.cosine_similarity(x, y, dim=-1), real(4, 1, 6), real(1, 8, 6)),
    (lambda x, w, b: F.layer_norm(x, (8,), w, b), real(4, 6, 8), real(8), real(8)),
    (lambda x: F.layer_norm(x, (6, 8)), real(4, 6, 8)),
    (lambda x, w: F.rms_norm(x, (8,), w), real(4, 6, 8), real(8)),
    (lambda x, w, b: F.group_norm(x, 4, w, b), real(2, 8, 6), real(8), real(8)),
    (lambda x: F.group_norm(x, 1), real(2, 8, 6, 6)),
    (lambda x: aten.native_layer_norm(x, [8], None, None, 1e-5), real(4, 6, 8)),
]
REDUCTIONS += [
    (lambda v, g: torch._weight_norm(v, g, 0), real(8, 6), real(8, 1)),
    (lambda v, g: torch._weight_norm(v, g, 1), real(8, 6, 2), real(1, 6, 1)),
    (lambda v, g: torch._weight_norm(v, g, -1), real(8, 6), real()),
]
SPATIAL: list[tuple[Made, ...]] = [
    (F.conv1d, real(2, 4, 10), real(6, 4, 3), real(6)),
    (F.conv2d, real(2, 4, 6, 6), real(8, 4, 3, 3), real(8)),
    (lambda x, w: F.conv2d(x, w, padding="same"), real(2, 4, 6, 6), real(8, 4, 3, 3)),
    (lambda x, w, b: F.conv2d(x, w, b, groups=4), real(2, 4, 6, 6), real(8, 1, 3, 3), real(8)),
    (lambda x, w: F.conv2d(x, w, groups=2), real(2, 4, 6, 6), real(8, 2, 3, 3)),
    (F.conv2d, real(4, 6, 6), real(8, 4, 1, 1), real(8)),
    (F.conv3d, real(2, 4, 4, 4, 4), real(2, 4, 2, 2, 2), real(2)),
    (F.conv_transpose2d, real(2, 4, 4, 4), real(4, 6, 2, 2), real(6)),
    (lambda x, w, b: F.conv_transpose1d(x, w, b, groups=4), real(2, 4, 6), real(4, 2, 2), real(8)),
    (lambda x, w: F.conv1d(x, w, groups=3), real(2, 6, 8), real(12, 2, 3)),
    (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, training=False),
        real(4, 6, 8),
        real(6),
        real(6).abs(),
        real(6),
        real(6),
    ),
    (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), real(4, 6, 8), real(6), real(6)),
    (lambda x: F.instance_norm(x), real(4, 6, 8)),
    (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), real(4, 6, 8), real(6), real(6)),
    (lambda x: F.max_pool2d(x, 2), real(2, 4, 6, 6)),
    (lambda x: F.max_pool2d(x, 2, return_indices=True), real(2, 4, 6, 6)),
    (lambda x: F.avg_pool1d(x, 2), real(4, 6)),
    (lambda x: F.adaptive_avg_pool2d(x, 1), real(2, 4, 6, 6)),
    (lambda x: F.adaptive_avg_pool2d(x, 3), real(2, 4, 6, 6)),
    (lambda x: F.adaptive_max_pool2d(x, 2), real(2, 4, 6, 6)),
    (lambda x: F.interpolate(x, scale_factor=2.0), real(2, 4, 6, 6)),
    (lambda x: F.interpolate(x, size=(8, 8), mode="bilinear"), real(2, 4, 6, 6)),
    (lambda x: F.interpolate(x, size=(8, 8), mode="bicubic", antialias=True), real(2, 4, 6, 6)),
    (lambda x: F.pixel_shuffle(x, 2), real(2, 16, 4, 4)),
    (lambda x: F.pixel_unshuffle(x, 2), real(2, 4, 4, 4)),
    (lambda x: F.unfold(x, 2), real(2, 4, 6, 6)),
    (lambda x: F.fold(x, (4, 4), 2), real(2, 8, 9)),
    (lambda x, g: F.grid_sample(x, g, align_corners=False), real(2, 4, 6, 6), real(2, 8, 2, 2).tanh()),
]
_CLASSES = [(reduction, smoothing) for reduction in ("none", "sum", "mean") for smoothing in (0.0, 0.1)]
LOSSES: list[tuple[Made, ...]] = [
    *[
        (lambda x, t, r=r, s=s: F.cross_entropy(x, t, reduction=r, label_smoothing=s), real(4, 8), whole(8, 4))
        for r, s in _CLASSES
    ],
    (lambda x, t, w: F.cross_entropy(x, t, w), real(4, 8), whole(8, 4), real(8).abs()),
    (lambda x, t, w: F.cross_entropy(x, t, w, reduction="sum"), real(4, 8), whole(8, 4), real(8).abs()),
    (lambda x, t: F.cross_entropy(x, t, ignore_index=1), real(4, 8), whole(3, 4)),
    (lambda x, t: F.cross_entropy(x, t, reduction="sum"), real(4, 8, 6), whole(8, 4, 6)),
    (lambda x, t: F.cross_entropy(x, t, reduction="none"), real(4, 8, 6), whole(8, 4, 6)),
    (lambda x, t: F.cross_entropy(x, t), real(8), torch.tensor(3)),
    (lambda x, t: F.cross_entropy(x, t, reduction="sum"), real(4, 8), real(4, 8).softmax(-1)),
    (lambda x, t: F.cross_entropy(x, t), real(4, 7), whole(7, 4)),
    *[(lambda x, t, r=r: F.nll_loss(x, t, reduction=r), real(4, 8), whole(8, 4)) for r in ("none", "sum", "mean")],
    (lambda x, t: F.nll_loss(x, t, reduction="sum"), real(4, 8, 6), whole(8, 4, 6)),
    *[
        (lambda x, t, f=f, r=r: f(x, t, reduction=r), real(4, 6), real(4, 6))
        for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss)
        for r in ("none", "sum", "mean")
    ],
    *[
        (lambda x, t, r=r: F.kl_div(x, t, reduction=r), real(4, 6), real(4, 6).softmax(-1))
        for r in ("none", "sum", "mean", "batchmean")
    ],
    *[
        (
            lambda x, t, w, r=r: F.binary_cross_entropy_with_logits(x, t, pos_weight=w, reduction=r),
            real(4, 6),
            real(4, 6).sigmoid(),
            real(6).abs(),
        )
        for r in ("none", "sum", "mean")
    ],
    *[
        (lambda x, t, r=r: F.binary_cross_entropy(x, t, reduction=r), real(4, 6).sigmoid(), real(4, 6).sigmoid())
        for r in ("none", "sum")
    ],
    (lambda x, y, t: F.margin_ranking_loss(x, y, t, reduction="sum"), real(4), real(4), real(4).sign()),
    (lambda x, y, t: F.cosine_embedding_loss(x, y, t, reduction="sum"), real(4, 6), real(4, 6), real(4).sign()),
    (lambda x, y: aten.mse_loss(x, y, 2), real(4, 1), real(4, 6)),
]
POINTWISE: list[tuple[Made, ...]] = [
    (torch.add, real(4, 6), real(6)),
    (lambda x, y: torch.add(x, y, alpha=2), real(4, 6), real(4, 1)),
    (lambda x: x + 1, real(4, 6)),
    (lambda x: 1 - x, real(4, 6)),
    (torch.mul, real(4, 1, 6), real(8, 1)),
    (torch.div, real(7, 6), real(7, 6)),
    (lambda x, y: torch.div(x, y, rounding_mode="floor"), real(4, 6), real(4, 6)),
    (lambda x: x / 2, real(4, 6)),
    (torch.where, real(4, 6) > 0, real(4, 6), real(6)),
    (lambda x, m: x.masked_fill(m, 0.0), real(4, 6), real(4, 1) > 0),
    (lambda x, m: x.masked_fill(m, -1.0), real(4, 6), real(6) > 0),
    (F.gelu, real(7, 6)),
    (F.silu, real(4, 6)),
    (lambda x: x.to(torch.float32), real(4, 6)),
    (lambda x: x.to(torch.int64), real(4, 6)),
    (lambda x: x.float().double(), real(4, 6)),
    (lambda x, y: x.type_as(y), real(4, 6), real(3, 8)),
    (torch.clamp, real(4, 6), real(6), real(4, 1) + 2),
    (lambda x: x**2, real(7, 6)),
    (lambda x: x.sqrt(), real(7, 6).abs()),
    (torch.lerp, real(4, 6), real(4, 6), real(1)),
    (torch.addcmul, real(4, 6), real(6), real(4, 1)),
    (F.prelu, real(4, 6, 8), real(6)),
    (lambda x: x * 2 > 1, real(4, 6)),
    (lambda x: F.dropout(x, 0.5, False), real(4, 6)),
    (torch.clone, real(4, 6)),
    (lambda x: x.detach(), real(4, 6)),
    (lambda i, x: i * x, whole(4, 4, 6), real(4, 6)),
    (lambda b, x: b * x, real(4, 6) > 0, real(4, 6)),
    (torch.polar, real(4, 6).abs(), real(6)),
    (lambda x: torch.complex(x, x).real, real(4, 6)),
]


def _keys(rows: int) -> Tensor:
    return torch.arange(rows) * 77 + 5


def streams() -> list[Call]:
    """graphpar's own functions. In random ones an element's number is that of its place in the whole tensor."""
    query = real(4, 4, 6, 8)
    return [
        Call(random_streams.dropout, (real(4, 6, 8), 0.5, _keys(4))),
        Call(random_streams.dropout, (real(6, 4, 8), 0.5, _keys(4), 1)),
        Call(random_streams.dropout, (real(4, 4), 0.5, _keys(4))),
        Call(random_streams.channel_dropout, (real(4, 6, 8), 0.5, _keys(4))),
        Call(random_streams.stream, (_keys(4), 3)),
        Call(random_streams.uniform, (_keys(4), [6, 8])),
        Call(random_streams.normal, (_keys(4), [6, 8]), {"batch_dim": 1, "dtype": torch.float64}),
        Call(random_streams.normal, (_keys(1), [6, 8]), {"batch_dim": None}),
        Call(random_streams.exponential, (_keys(4), [8])),
        Call(random_streams.integers, (_keys(4), [6], 0, 10)),
        Call(apply_rotary, (real(4, 2, 6, 8), real(1, 1, 6, 8), real(1, 1, 6, 8))),
        Call(apply_rotary, (real(4, 6, 2, 8), real(4, 6, 1, 4), real(4, 6, 1, 4), True)),
        *(
            Call(function, (real(*sizes, 8).sign(), real(columns, 8).sign()))  # what 8 bits don't round
            for function in (fp8_linear, mxfp8_linear, mxfp8_linear_with_gw_hp)
            for sizes, columns in (((4, 6), 12), ((4,), 7))
        ),
        Call(swiglu, (real(4, 6, 8), real(4, 6, 8))),
        Call(geglu, (real(4, 6, 8), real(4, 6, 8))),
        Call(geglu, (real(4, 8), real(4, 8)), {"approximate": "tanh"}),
        Call(random_streams.dropout_attention, (query, query, query, _keys(4), None, 0.5)),
        Call(random_streams.dropout_attention, (query, query, query, _keys(4), None, 0.5, True)),
        Call(random_streams.dropout_attention, (query, query, query, _keys(4), real(4, 1, 6, 6), 0.5)),
        Call(
            random_streams.dropout_attention,
            (query, query[:, :2], query[:, :2], _keys(4), None, 0.5, False, None, True),
        ),
    ]


FAMILIES = {
    "products": PRODUCTS,
    "attention": ATTENTION,
    "indices": EMBEDDINGS,
    "shapes": SHAPES,
    "transforms": TRANSFORMS,
    "reductions": REDUCTIONS,
    "spatial": SPATIAL,
    "losses": LOSSES,
    "pointwise": POINTWISE,
}


def family(name: str) -> list[Call]:
    """The calls of one family."""
    if name == "streams":
        return streams()
    return [call for function, *tensors in FAMILIES[name] for call in calls_of(function, *tensors)]
