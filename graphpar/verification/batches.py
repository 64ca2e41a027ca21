"""The batches of the steps: the first is the example, later ones have other data, made from the example's.

    rows      every batch draws rows of the example, the same ones for every input, so that corresponding rows stay together
    values    and then changes values in ways that are safe by the example's values:
                  integers          each element takes its value from any row (ids of a column stay in the column's range)
                  ... with one      such as -100: ignored elements vary in position and number, one row is ignored entirely
                  negative value
                  zeros and ones    a mask keeps its form: ones up to some length, or from there on, or as many as before
                  real numbers      a mixture of two rows: sums to one, order, signs and ranges are kept
              unchanged: inputs that rise along each row (offsets, positions), that have two other values (an additive mask), or
                  infinities, and inputs without a batch

A model may accept only values like the example's. Then ``values`` raises or gives nan, and the reference continues with ``rows``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from graphpar.ir.lengths import at_length
from graphpar.ir.program import Input

IGNORED = -100
"""The label that torch's losses ignore by default."""


@dataclass(frozen=True)
class Variation:
    """How the later batches are made.

    ``ignored``: one row is ignored entirely, and labels that the loss denominators depend on get ignored elements even if the example
    has none.
    """

    rows: bool
    values: bool
    ignored: bool
    description: str


VARIATIONS = (
    Variation(True, True, True, "each step has different rows and values, drawn from the example's"),
    Variation(True, True, False, "each step has different rows and values, drawn from the example's"),
    Variation(True, False, False, "each step resamples rows of the example; the model takes no other values"),
    Variation(False, False, False, "all steps have the example's batch; the model takes no other"),
)
"""In the order in which they are tried."""


@dataclass(frozen=True)
class _Ignored:
    """How an integer input is ignored in a step.

    ``bold``: as :attr:`Variation.ignored`; ``counted``: the loss denominators depend on the input.
    """

    step: int
    bold: bool
    counted: bool

    @property
    def share(self) -> float:
        """The share of elements that is ignored."""
        return (0.15, 0.4, 0.05)[self.step % 3]


def step_batches(
    examples: Sequence[tuple[Input, Tensor]],
    rows: int,
    count: int,
    variation: Variation,
    counted: Collection[str],
    seed: int,
    lengths: Sequence[int] = (),
) -> list[dict[str, Tensor]]:
    """Make ``count`` batches of ``rows`` rows, by input name; the first is the example, its rows repeated in order if needed.

    Args:
        counted: names of the inputs that the loss denominators depend on.
        lengths: of the sequences of each batch, where they vary.
    """
    if lengths:
        longest = [(entry, at_length(value, entry.positions, max(lengths))) for entry, value in examples]
        batches = step_batches(longest, rows, count, variation, counted, seed)
        places = {entry.name: entry.positions for entry, _ in examples}
        return [
            {name: at_length(value, places[name], length) for name, value in batch.items()}
            for batch, length in zip(batches, lengths, strict=True)
        ]
    batches = [{entry.name: resized(value, entry.batch_dim, rows) for entry, value in examples}]
    for step in range(1, count):
        generator = Generator().manual_seed(seed * 1_000_003 + step)
        drawn: dict[int, Tensor] = {}  # by the example's number of rows: one draw for all inputs
        batch = {}
        for entry, value in examples:
            if entry.batch_dim is None or not variation.rows or not value.numel():
                batch[entry.name] = batches[0][entry.name].clone()
                continue
            example = value.detach().movedim(entry.batch_dim, 0)
            if len(example) not in drawn:
                drawn[len(example)] = torch.randint(len(example), (rows,), generator=generator)
            chosen = drawn[len(example)]
            made = example[chosen]
            if variation.values:
                made = _varied(example, chosen, generator, _Ignored(step, variation.ignored, entry.name in counted))
            batch[entry.name] = made.movedim(0, entry.batch_dim).contiguous()
        batches.append(batch)
    return batches


def constant_inputs(batches: Sequence[dict[str, Tensor]], inputs: Sequence[Input]) -> list[str]:
    """Return the inputs with a batch dim that have the same values in all batches."""
    names = [entry.name for entry in inputs if entry.batch_dim is not None and entry.name in batches[0]]
    if len(batches) < 2:
        return []
    return [name for name in names if all(torch.equal(batch[name], batches[0][name]) for batch in batches[1:])]


def resized(value: Tensor, batch_dim: int | None, rows: int) -> Tensor:
    """Return ``value`` with ``rows`` rows, its own repeated in order if needed."""
    if batch_dim is None or value.shape[batch_dim] == rows:
        return value.detach().clone()
    return value.detach().index_select(batch_dim, torch.arange(rows) % value.shape[batch_dim])


def _varied(example: Tensor, chosen: Tensor, generator: Generator, ignored: _Ignored) -> Tensor:
    """Return other values of the example's kind; ``chosen`` are the rows that the batch has drawn."""
    if bool(((example == 0) | (example == 1)).all()):
        return _mask(example, chosen, generator)
    if example.is_floating_point() or example.is_complex():
        return _numbers(example, chosen, generator)
    return _integers(example, chosen, generator, ignored)


def _rand(shape: Sequence[int], generator: Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator)


def _same_rows(example: Tensor) -> bool:
    return bool((example == example[:1]).all())


def _columns(example: Tensor, chosen: Tensor, generator: Generator) -> Tensor:
    """Take each element from any row; where all rows are equal, from anywhere in the row."""
    shape = (len(chosen), *example.shape[1:])
    if not _same_rows(example):
        return example.gather(0, torch.randint(len(example), shape, generator=generator))
    pool = example[0].reshape(-1)
    return pool[torch.randint(len(pool), shape, generator=generator)]


def _numbers(example: Tensor, chosen: Tensor, generator: Generator) -> Tensor:
    """Mix real or complex numbers of two rows; scale them down where all rows are equal."""
    if not bool(example.isfinite().all()):
        return example[chosen]
    if not example.is_complex():
        if len(example.reshape(-1)[:4096].double().unique()) == 2:
            return example[chosen]
        if bool((example == example.round()).all()):
            return _columns(example, chosen, generator)
    share = (0.2 + 0.6 * _rand([len(chosen)] + [1] * (example.ndim - 1), generator)).to(example.dtype)
    if _same_rows(example):
        return example[chosen] * (1 - share / 2)
    other = torch.randint(len(example), chosen.shape, generator=generator)
    return example[chosen] * share + example[other] * (1 - share)


def _integers(example: Tensor, chosen: Tensor, generator: Generator, ignored: _Ignored) -> Tensor:
    flat = example.reshape(len(example), -1)
    rises = flat.shape[1] > 2 and bool((flat[:, 1:] >= flat[:, :-1]).all()) and not _same_rows(flat.t())
    if rises:
        return example[chosen]
    made = _columns(example, chosen, generator)
    negative = example[example < 0].unique()
    if len(negative) == 1 and bool((example >= 0).any()):
        return _with_ignored(made, int(negative), example[example >= 0], generator, ignored)
    if ignored.bold and ignored.counted and not len(negative) and torch.iinfo(example.dtype).min <= IGNORED:
        return _with_ignored(made, IGNORED, example.reshape(-1), generator, ignored)
    return made


def _with_ignored(made: Tensor, value: int, valid: Tensor, generator: Generator, ignored: _Ignored) -> Tensor:
    """Ignore more elements of ``made``, and all of one row if ``bold``; never all elements."""
    made = made.masked_fill(_rand(made.shape, generator) < ignored.share, value)
    if ignored.bold and len(made) > 1:
        made[int(torch.randint(1, len(made), (), generator=generator))] = value
    if bool((made == value).all()):
        made[0] = valid[0]
    return made


def _mask(example: Tensor, chosen: Tensor, generator: Generator) -> Tensor:
    """Vary a mask of zeros and ones over its last dim; rows are a run of one value and then of the other, or have no form."""
    length = example.shape[-1] if example.ndim > 1 else 1
    constant = bool((example == example.reshape(-1)[0]).all())
    if length == 1:  # one truth value an example
        if not constant:
            return example[torch.randint(len(example), chosen.shape, generator=generator)]
        made = example[chosen].bool() ^ (_rand((len(chosen), *example.shape[1:]), generator) < 0.4)
        made[0] = example[0].bool()
        return made.to(example.dtype)
    bits = example.bool()
    ones = bits.sum(-1)
    shape = (*chosen.shape, *example.shape[1:-1])
    if constant:
        kept = 1 + (_rand(shape, generator) * length).long()
        run = torch.arange(length) < kept[..., None]
        return (run if bool(bits.reshape(-1)[0]) else ~run).to(example.dtype)
    falls = bool((bits[..., 1:] <= bits[..., :-1]).all())
    if falls or bool((bits[..., 1:] >= bits[..., :-1]).all()):
        low, high = int(ones.min()), int(ones.max())
        if low == high:
            low, high = 1, max(length - 1, 1)
        count = low + (_rand(shape, generator) * (high - low + 1)).long()
        count = count if falls else length - count
        run = torch.arange(length) < count[..., None]
        return (run if falls else ~run).to(example.dtype)
    order = _rand((*shape, length), generator).argsort(-1)
    return example[chosen].gather(-1, order)
