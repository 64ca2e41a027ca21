"""Random numbers and dropout that depend on the example, not on how the program is split.

Every example of the global batch has a key, a function of (seed, step, index of the example), and so has the step. A
random operator draws from the key, its own stream number and the position in the example, by a counter-based hash
(SplitMix64). So the numbers are the same for any number of stages and microbatches, and when a block is recomputed.

With ``kernel=True`` attention takes torch's own kernel and generator, seeded from the same keys and from which shard a
rank has. Its masks are the same when a block is recomputed, but depend on how the program is split.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
BETWEEN_ROWS = 0x9E3779B1
"""By how much the keys of two rows of one example differ."""


def stream(keys: Tensor, number: int) -> Tensor:
    """Derive the keys of the random operator of this ``number``. keys [b] -> [b]"""
    return keys + number * 0x1F123BB5


def _hash(counter: Tensor) -> Tensor:
    """SplitMix64's finalizer, in ``counter``'s memory; int64 with wrap-around, right shifts made logical by a mask."""
    for bits, mask, factor in ((30, 0x3FFFFFFFF, _MIX_1), (27, 0x1FFFFFFFFF, _MIX_2)):
        counter ^= (counter >> bits).bitwise_and_(mask)
        counter *= factor
    counter ^= (counter >> 31).bitwise_and_(0x1FFFFFFFF)
    return counter


ShardedDim = tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]]
"""A sharded dim: (dim, this rank, ranks), and the parts of each run of elements that are sharded by themselves."""


def keep_mask(shape: list[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[ShardedDim] = ()) -> Tensor:
    """True with probability ``1 - p``, for a tensor of ``shape`` whose dim ``batch_dim`` has the examples of ``keys``.

    ``sharded``: the sharded dims, where the tensor is a rank's shard; every element is numbered as in the whole tensor.
    """
    return drawn(*_counters(shape, keys, batch_dim, sharded), round(p * 0x1000000))


def _counters(
    shape: list[int], keys: Tensor, batch_dim: int | None, sharded: Sequence[ShardedDim]
) -> tuple[Tensor, Tensor]:
    """Number the elements of a tensor of ``shape``: those of a row, as [..., 1], and of a column, as [..., n].

    ``sharded``: of axes that shard one dim, each divides the shards of those before it.
    """
    counters = []
    stride = 1
    for dim in reversed(range(len(shape))):
        if dim == batch_dim:
            counter = _hash(keys.clone())
        else:
            index, size = torch.arange(shape[dim], device=keys.device), shape[dim]
            for _, rank, ranks, *parts in (entry for entry in reversed(sharded) if entry[0] == dim):
                index, size = _whole_index(index, size, rank, ranks, parts[0] if parts else ()), size * ranks
            counter = index * stride * _GOLDEN
            stride *= size
        counters.append(counter.view([-1 if d == dim else 1 for d in range(len(shape))]))
    last, *others = counters
    return sum(others, torch.zeros_like(last[..., :1])), last


def drawn(rows: Tensor, columns: Tensor, least: int) -> Tensor:
    """Tell of each sum of a counter of a row and one of a column whether 24 bits of its hash are at least ``least``.

    rows int64 [..., 1], columns int64 [..., n] -> bool [..., n]. On a GPU the runtime puts one kernel in its place.
    """
    return (_hash(rows + columns) >> 40).bitwise_and_(0xFFFFFF) >= least


def random_bits(shape: list[int], keys: Tensor, batch_dim: int | None, sharded: Sequence[ShardedDim] = ()) -> Tensor:
    """Draw 64 random bits for each element of a tensor of ``shape``, numbered as in :func:`keep_mask`; int64.

    Without a ``batch_dim`` the one key of ``keys`` is that of all elements.
    """
    if batch_dim is None:
        places = [(dim + 1, *place) for dim, *place in sharded]
        return random_bits([1, *shape], keys, 0, places)[0]  # type: ignore[arg-type]
    rows, columns = _counters(shape, keys, batch_dim, sharded)
    return _hash(rows + columns)


def digits(dtype: torch.dtype) -> int:
    """The binary digits of a float's precision."""
    return round(1 - math.log2(torch.finfo(dtype).eps))


def _of_rows(keys: Tensor, size: Sequence[int], batch_dim: int | None) -> list[int]:
    """The shape of a tensor of rows of ``size``, one for each of ``keys``."""
    return list(size) if batch_dim is None else [*size[:batch_dim], keys.size(0), *size[batch_dim:]]


def integers(
    keys: Tensor,
    size: Sequence[int],
    low: int,
    high: int,
    batch_dim: int | None = 0,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Draw as ``torch.randint``: keys [b] -> int64 [b, *size], from ``low`` to ``high - 1``; b is at ``batch_dim``."""
    bits = random_bits(_of_rows(keys, size, batch_dim), keys, batch_dim, sharded)
    return (bits >> 1).bitwise_and_(0x3FFFFFFFFFFFFFFF) % (high - low) + low


def uniform(
    keys: Tensor,
    size: Sequence[int],
    batch_dim: int | None = 0,
    dtype: torch.dtype = torch.float32,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Draw as ``torch.rand``, all multiples in [0, 1) of the dtype's precision: keys [b] -> [b, *size].

    b is at ``batch_dim``.
    """
    count = digits(dtype)
    bits = random_bits(_of_rows(keys, size, batch_dim), keys, batch_dim, sharded)
    return (bits >> (64 - count)).bitwise_and_((1 << count) - 1).to(dtype) * 0.5**count


def exponential(
    keys: Tensor,
    size: Sequence[int],
    batch_dim: int | None = 0,
    dtype: torch.dtype = torch.float32,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Draw as ``x.exponential_()``, never 0: keys [b] -> [b, *size]; b is at ``batch_dim``."""
    bits = random_bits(_of_rows(keys, size, batch_dim), keys, batch_dim, sharded)
    open_interval = ((bits >> 12).bitwise_and_(0xFFFFFFFFFFFFF).double() + 0.5) * 0.5**52
    return (-open_interval.log()).to(dtype).clamp(min=torch.finfo(dtype).tiny)


def normal(
    keys: Tensor,
    size: Sequence[int],
    batch_dim: int | None = 0,
    dtype: torch.dtype = torch.float32,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Draw as ``torch.randn``: keys [b] -> [b, *size]; b is at ``batch_dim``.

    By Box and Muller in float64, rounded once, so that shards and whole tensors have the same numbers.
    """
    bits = random_bits(_of_rows(keys, size, batch_dim), keys, batch_dim, sharded)
    distance = ((bits >> 32).bitwise_and_(0xFFFFFFFF) + 1).double() * 0.5**32
    angle = bits.bitwise_and_(0xFFFFFFFF).double() * (2 * math.pi * 0.5**32)
    return ((-2 * distance.log()).sqrt() * angle.cos()).to(dtype)


def _whole_index(index: Tensor, size: int, rank: int, ranks: int, parts: tuple[int, ...]) -> Tensor:
    """The indices in the whole dim (runs of ``parts``) of the elements ``index`` of a shard of ``size``."""
    if not parts:
        return index + rank * size
    begins = [sum(parts[:number]) for number in range(len(parts))]
    pieces = [
        begin + rank * (part // ranks) + torch.arange(part // ranks, device=index.device)
        for begin, part in zip(begins, parts)
    ]
    period = torch.cat(pieces)
    return index // len(period) * sum(parts) + period[index % len(period)]


def dropout(
    x: Tensor, p: float, keys: Tensor, batch_dim: int = 0, training: bool = True, sharded: Sequence[ShardedDim] = ()
) -> Tensor:
    """Compute ``F.dropout`` with masks from ``keys`` [b], one for each index of ``x``'s dim ``batch_dim``."""
    if not training or p == 0.0:
        return x
    keep = keep_mask(list(x.shape), p, keys.to(x.device), batch_dim, sharded)
    return torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def channel_dropout(
    x: Tensor, p: float, keys: Tensor, batch_dim: int = 0, training: bool = True, sharded: Sequence[ShardedDim] = ()
) -> Tensor:
    """Compute ``F.dropout1d``, ``2d`` or ``3d``: drop whole channels, for ``x`` [b, channels, ...]."""
    if not training or p == 0.0:
        return x
    keep = keep_mask(list(x.shape[:2]), p, keys.to(x.device), batch_dim, [c for c in sharded if c[0] < 2]).view(
        list(x.shape[:2]) + [1] * (x.ndim - 2)
    )
    return torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: bool = False,
    batch_dim: int = 0,
    training: bool = True,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` with dropout from ``keys``; by torch's own kernel if ``kernel``.

    query [..., h, q, e], key [..., h, k, e] -> [..., h, q, e]; ``keys``: one for each index of the dim
    ``batch_dim``, which is before q.
    """
    if kernel:
        seed = kernel_seed(keys, sharded)
        p = dropout_p if training else 0.0
        return kernel_attention(query, key, value, seed, attn_mask, p, is_causal, scale, enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        rows = torch.arange(query.size(-2), device=query.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(key.size(-2), device=query.device) > rows, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropout(scores.softmax(-1), dropout_p, keys, batch_dim, training, sharded) @ value


def kernel_seed(keys: Tensor, sharded: Sequence[ShardedDim] = ()) -> int:
    """Mix a seed from the first of ``keys`` and the place of this rank's shard.

    It differs between calls, steps, and ranks with other rows or another shard; ranks that hold the same have the same.
    The keys are best on the host: from elsewhere they are waited for.
    """
    if keys.is_meta or not keys.numel():
        return 0
    places = [number for dim, rank, ranks, *_ in sharded for number in (dim, rank, ranks)]
    seed = int(keys[:1].tolist()[0])
    for number in (0, *places):
        seed = ((seed ^ (seed >> 30 & 0x3FFFFFFFF)) + number) * 0x9E3779B97F4A7C15 % (1 << 64)
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (seed ^ seed >> 31) >> 1


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seed: int,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention``; torch's generator draws with ``seed``, then goes on as before."""
    generator = None if dropout_p == 0.0 else _generator(query.device)
    before = None if generator is None else generator.get_state()
    if generator is not None:
        generator.manual_seed(seed)
    try:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    finally:
        if generator is not None and before is not None:
            generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that kernels of ``device`` draw from; None where nothing is computed."""
    if device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    found: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return found
