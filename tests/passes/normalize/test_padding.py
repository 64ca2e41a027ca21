"""A batch may be padded only where the graph shows that nothing changes: each refusal is of a model that would change."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.passes.normalize.padding import fills_of

LENGTH, OTHER, WORDS = 13, 11, 16


class Model(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor], place: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.embed, self.positions, self.head = nn.Embedding(WORDS, 8), nn.Embedding(64, 8), nn.Linear(8, WORDS)
        self.mix, self.place = mix, place

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(self.place(ids.shape[1]))
        logits: Tensor = self.head(self.mix(x))
        return logits


def attention(**options: object) -> Callable[[Tensor], Tensor]:
    def mix(x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, **options).squeeze(1)  # type: ignore[arg-type]

    return mix


def masked(hides: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def mix(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        return attention(attn_mask=hides(place[:, None], place[None, :]))(x)

    return mix


causal = attention(is_causal=True)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)


def shifted_by_half(logits: Tensor, labels: Tensor) -> Tensor:
    half = labels.shape[1] // 2
    return F.cross_entropy(logits[:, : labels.shape[1] - half].flatten(0, 1), labels[:, half:].flatten())


def scored(shown: Callable[[Tensor], Tensor], hidden: float | None = None) -> Callable[[Tensor], Tensor]:
    """Attention to what is ``shown`` by scores, of the positions before; ``hidden`` is added to the others."""

    def mix(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        mask = ((place[None, :] <= place[:, None]) & shown(x @ x.mT))[:, None]
        return attention(attn_mask=mask if hidden is None else torch.where(mask, 0.0, hidden))(x)

    return mix


near = scored(lambda scores: scores > 0)
ranked = scored(lambda scores: scores.argsort(-1) < 4)
seen = scored(lambda scores: scores.softmax(-1) > 0.02)
counted = scored(lambda scores: (scores > 0).cumsum(-1)[:, :, -1:] > 3)


def shifted_back(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


def without_the_last(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, :-1].flatten())


def weighed(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).float()
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def regularised(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels) + 1e-3 * logits.square().mean()


def transposed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def of_all(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def fills(
    mix: Callable[[Tensor], Tensor] = causal,
    loss: Callable[[Tensor, Tensor], Tensor] = mean,
    place: Callable[[int], Tensor] = torch.arange,
) -> str | dict[str, int]:
    ids = torch.randint(WORDS, (4, 12))
    program = gp.export(Model(mix, place), (ids,), loss_fn=loss, targets=(ids.clone(),), seq="4..24")
    assert program.at_length is not None
    return fills_of(program.at_length(LENGTH, False), LENGTH, program.at_length(OTHER, False))


@pytest.mark.costly
def test_causal_models_whose_loss_ignores_labels() -> None:
    assert fills() == {"labels": -100}
    assert fills(loss=shifted) == {"labels": -1}
    assert fills(loss=transposed) == {"labels": -100}
    assert fills(loss=weighed) == {"labels": -100}
    assert fills(masked(lambda row, column: column <= row)) == {"labels": -100}
    assert fills(masked(lambda row, column: (column <= row) & (column > row - 3))) == {"labels": -100}
    assert fills(near) == {"labels": -100}
    assert fills(scored(lambda scores: scores > 0, -math.inf)) == {"labels": -100}
    assert fills(masked(lambda row, column: torch.where(column <= row, 0.0, -1e9))) == {"labels": -100}
    assert fills(lambda x: causal(x).cumsum(1)) == {"labels": -100}
    assert fills(lambda x: causal(x) + x[:, :1] + x[:, 0:2].mean(1, keepdim=True)) == {"labels": -100}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mix": attention()}, "not causal"),
        ({"mix": masked(lambda row, column: column >= row)}, "not causal"),
        ({"mix": masked(lambda row, column: column <= row + 1)}, "not causal"),
        ({"mix": scored(lambda scores: scores > 0, -1e9)}, "a row may see nothing"),
        ({"mix": lambda x: causal(x) + x.mean(1, keepdim=True)}, "several positions at once"),
        ({"mix": lambda x: causal(x) + x[:, -1:]}, "last positions"),
        ({"mix": lambda x: causal(x) + torch.full((x.shape[1], 1), x.shape[1] - 1)}, "it computes with the length"),
        ({"mix": lambda x: causal(x) * torch.full_like(x, x.shape[1])}, "it computes with the length"),
        (
            {
                "mix": masked(
                    lambda row, column: (column <= row) & (row - column < torch.full_like(row, row.shape[0] - 1))
                )
            },
            "it computes with the length",
        ),
        ({"mix": lambda x: causal(x.flip(1)).flip(1)}, "several positions at once"),
        ({"mix": lambda x: F.softmax(x, 1)}, "several positions at once"),
        ({"mix": lambda x: causal(x).roll(1, 1)}, "several positions at once"),
        ({"mix": lambda x: causal(x) / x.shape[1]}, "computes with the length"),
        ({"place": lambda n: n - 1 - torch.arange(n)}, "computes with the length"),
        ({"place": lambda n: torch.arange(n - 1, -1, -1)}, "as long as the sequence"),
        ({"place": lambda n: torch.arange(1, n + 1)}, "as long as the sequence"),
        ({"loss": shifted_back}, "sums over all positions"),
        ({"loss": shifted_by_half}, "follows the length"),
        ({"mix": lambda x: causal(x) + x[:, x.shape[1] - 1, None]}, "follows the length"),
        ({"mix": lambda x: causal(x) + x[:, x.shape[1] // 2, None]}, "follows the length"),
        ({"mix": lambda x: causal(x) + x.flatten(0, 1).cumsum(0).view_as(x)}, "several positions at once|flattened"),
        ({"mix": lambda x: causal(x) + x.diff(dim=1, append=x[:, :1])}, "positions"),
        ({"mix": masked(lambda row, column: (column <= row) & (column <= row).flip(0))}, "joins positions"),
        ({"mix": ranked}, "joins positions"),
        ({"mix": seen}, "joins positions"),
        ({"mix": counted}, "joins positions"),
        ({"loss": without_the_last}, "sums over all positions"),
        ({"loss": regularised}, "sums over all positions|computes with the length|follows the length"),
        ({"loss": of_all}, "follows the length|computes with the length"),
    ],
)
def test_models_that_would_change(change: dict[str, object], why: str) -> None:
    found = fills(**change)  # type: ignore[arg-type]
    assert isinstance(found, str)
    assert any(part in found for part in why.split("|")), found
