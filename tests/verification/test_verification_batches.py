"""The batches of ``verify``'s steps: each is of its own, and as plausible as the example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.program import Input
from graphpar.verification import Reference, reference_for
from graphpar.verification.batches import IGNORED, VARIATIONS, constant_inputs, step_batches


def _entry(value: Tensor, name: str = "x", dim: int | None = 0) -> Input:
    return Input(name, tuple(value.shape), value.dtype, dim)


def _later(
    value: Tensor, *, rows: int | None = None, variation: int = 0, counted: tuple[str, ...] = ()
) -> list[Tensor]:
    """The batches after the first that are made of ``value``."""
    batches = step_batches([(_entry(value), value)], rows or len(value), 5, VARIATIONS[variation], counted, 0)
    assert torch.equal(batches[0]["x"][: len(value)], value[: len(batches[0]["x"])])
    return [batch["x"] for batch in batches[1:]]


def _ids(*shape: int, below: int = 50) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 6),
    further=st.lists(st.integers(1, 5), max_size=3),
    kind=st.sampled_from(["ids", "labels", "mask", "float", "half", "bool", "bytes", "complex", "infinite"]),
    wanted=st.integers(1, 9),
    variation=st.integers(0, len(VARIATIONS) - 1),
)
def test_batches_have_the_examples_shape_dtype_and_range(
    rows: int, further: list[int], kind: str, wanted: int, variation: int
) -> None:
    value: Tensor = {
        "ids": lambda: _ids(rows, *further),
        "labels": lambda: _ids(rows, *further).sub(10).clamp(min=-1),
        "mask": lambda: _ids(rows, *further, below=2),
        "float": lambda: torch.randn(rows, *further),
        "half": lambda: torch.randn(rows, *further).bfloat16(),
        "bool": lambda: _ids(rows, *further, below=2).bool(),
        "bytes": lambda: _ids(rows, *further, below=256).byte(),
        "complex": lambda: torch.randn(rows, *further, dtype=torch.complex64),
        "infinite": lambda: torch.zeros(rows, *further).masked_fill(_ids(rows, *further, below=2).bool(), -torch.inf),
    }[kind]()

    for made in _later(value, rows=wanted, variation=variation):
        assert made.shape == (wanted, *further) and made.dtype == value.dtype and made.is_contiguous()
        if kind in ("ids", "labels", "bytes"):
            assert set(made.unique().tolist()) <= set(value.unique().tolist())
        if kind == "float":
            assert made.abs().max() <= value.abs().max() + 1e-6


def test_every_step_has_other_values() -> None:
    for value in (_ids(8, 16), torch.randn(8, 16), _ids(8), torch.ones(8, 16, dtype=torch.long), torch.zeros(8, 16)):
        made = [value, *_later(value)]
        assert all(not torch.equal(first, second) for i, first in enumerate(made) for second in made[:i])


def test_ids_of_a_column_stay_in_their_column() -> None:
    columns = torch.tensor([3, 40, 500])
    value = (torch.rand(16, 3) * columns).long()
    assert all(bool((made.amax(0) <= value.amax(0)).all()) for made in _later(value))


@pytest.mark.parametrize("ignored", [-100, -1])
def test_ignored_labels_vary_in_position_and_number(ignored: int) -> None:
    value = _ids(8, 16)
    value[:, 12:] = ignored

    made = _later(value)
    counts = [int((labels == ignored).sum()) for labels in made]
    assert len(set(counts)) == len(counts) and all(0 < count < value.numel() for count in counts)
    assert all(bool((labels == ignored).all(1).any()) for labels in made)  # a row, and with it a microbatch, with none


def test_labels_that_the_loss_counts_get_ignored_places_even_if_the_example_has_none() -> None:
    assert all(IGNORED in labels for labels in _later(_ids(8, 16), counted=("x",)))
    assert all(IGNORED not in labels for labels in _later(_ids(8, 16)))
    assert all(IGNORED not in labels for labels in _later(_ids(8, 16), counted=("x",), variation=1))


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_mask_keeps_its_form(side: str) -> None:
    lengths = torch.tensor([16, 3, 9, 12])
    value = (torch.arange(16) < lengths[:, None]).long()
    value = value if side == "right" else value.flip(1)
    for made in _later(value):
        steps = made[:, 1:] - made[:, :-1]
        assert bool((steps <= 0).all() if side == "right" else (steps >= 0).all())
        assert bool((made.sum(1) >= 3).all())
    assert len({int(made.sum()) for made in _later(value)}) > 1


def test_a_mask_of_ones_is_padded_and_never_empty() -> None:
    for made in _later(torch.ones(8, 16, dtype=torch.bool)):
        assert bool(made[:, 0].all()) and not bool(made.all())


def test_one_hot_rows_stay_one_hot() -> None:
    value = F.one_hot(_ids(8, below=5), 5).float()
    assert all(bool((made.sum(1) == 1).all()) for made in _later(value))


def test_what_is_sorted_or_sums_to_one_stays_so() -> None:
    for made in _later(_ids(8, 6).sort(1).values):
        assert bool((made[:, 1:] >= made[:, :-1]).all())
    for made in _later(torch.randn(8, 6).softmax(1)):
        torch.testing.assert_close(made.sum(1), torch.ones(8))


def test_rows_are_drawn_together() -> None:
    ids, lengths = _ids(8, 5), _ids(8)
    examples = [
        (_entry(ids, "ids"), ids),
        (_entry(lengths, "lengths"), lengths),
        (_entry(ids.t(), "turned", 1), ids.t()),
    ]
    for batch in step_batches(examples, 12, 4, VARIATIONS[2], (), 0)[1:]:
        source = [int((ids == row).all(1).nonzero()[0]) for row in batch["ids"]]
        assert torch.equal(batch["lengths"], lengths[source])
        assert torch.equal(batch["turned"], batch["ids"].t())


def test_what_can_not_be_varied_is_named() -> None:
    table, offsets = torch.randn(3), torch.arange(4).expand(8, 4)
    examples = [(_entry(table, "table", None), table), (_entry(offsets, "offsets"), offsets)]
    batches = step_batches(examples, 8, 3, VARIATIONS[0], (), 0)
    assert constant_inputs(batches, [entry for entry, _ in examples]) == ["offsets"]


class _Picky(nn.Module):
    """Takes only values that the example has, whole rows of it, or anything."""

    def __init__(self, allowed: Any) -> None:
        super().__init__()
        self.linear, self.allowed = nn.Linear(3, 3), allowed

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and not self.allowed(x):
            raise ValueError("no such values")
        return self.linear(x)


_EXAMPLE = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (lambda x: True, "different rows and values"),
        (lambda x: all(any(torch.equal(row, own) for own in _EXAMPLE) for row in x), "resamples rows of the example"),
        (lambda x: torch.equal(x, _EXAMPLE), "all steps have the example's batch"),
    ],
)
def test_the_reference_takes_what_the_model_takes(allowed: Any, said: str) -> None:
    reference = _reference(_Picky(allowed), (_EXAMPLE,), loss_fn=lambda out: out.square().mean())
    assert said in reference.data and reference.finite


@pytest.mark.costly
def test_a_loss_that_is_nan_where_a_row_is_ignored_gets_other_batches() -> None:
    """A mean of each row: 0 / 0 where a row has no label."""
    labels = _ids(4, 6, below=3)
    labels[:, 4:] = IGNORED

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(out.transpose(1, 2), labels, reduction="none")
        return (each.sum(1) / (labels != IGNORED).sum(1)).mean()

    reference = _reference(nn.Linear(5, 3), (torch.randn(4, 6, 5),), loss_fn=loss, targets=(labels,))
    assert reference.finite
    assert not torch.equal(reference.batches[1]["labels"], labels)


def _reference(model: nn.Module, args: tuple[Any, ...], **options: Any) -> Reference:
    program = gp.export(model, args, **options)
    return reference_for(gp.partition(program, gp.plan(program, 1)), 2)
