"""Heads and losses in chunks of tokens: the numbers of the unpartitioned model, whatever the loss, and what the planner makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.verification import verify_all
from tests.tools.programs import check_parts

A100 = DEVICES["A100-SXM-80GB"]
VOCABULARY, WIDTH, LENGTH, BATCH = 48, 16, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, bias: bool = False, tied: bool = False, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.float()[:, :-1].contiguous()
    return F.cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten())


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum() / (labels != -100).sum()


def softcap(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(5 * torch.tanh(logits / 5), labels)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, logits.size(-1))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight, label_smoothing=0.1)


def with_z(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + 0.01 * torch.logsumexp(logits, -1).square().mean()


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != -100
    chosen = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * counts).sum() / counts.sum()


def padded(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :40].flatten(0, 1), labels.clamp(max=39).flatten())


def masked_twice(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).float().unsqueeze(-1)
    each = F.cross_entropy((logits * mask).flatten(0, 1), labels.flatten(), reduction="none").view(-1, LENGTH, 1)
    return (each * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    each.__name__: each
    for each in (flat, shifted, classes_second, softcap, weighted, with_z, of_probabilities, padded, masked_twice)
}
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp": {"mesh": {"tp": 2}},
    "tp, vocabulary": {"mesh": {"tp": 2}, "shard_plan": {"head.weight": "S(0)@tp", "head": {"outputs": ["S(2)@tp"]}}},
    "pp": {"mesh": {"pp": 2}, "microbatch_size": 1},
    "pp, halves": {"mesh": {"pp": 2}, "microbatch_size": 1, "schedule": "ZBVZeroBubble"},
    "dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "cp": {"mesh": {"cp": 2}},
    "dp": {"mesh": {"dp_replicate": 2}, "microbatch_size": 1},
}


BY_POSITION = ("flat", "softcap", "weighted", "with_z")
"""Losses of which a sequence that is sharded needs nothing of its neighbours."""
CASES = [(loss, plan) for loss in LOSSES for plan in PLANS if plan != "cp" or loss in BY_POSITION]


@functools.cache
def program(loss: str, bias: bool = False, tied: bool = False, vocabulary: int = VOCABULARY) -> gp.Program:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(BATCH, LENGTH) < 0.3, -100)
    return gp.export(
        functools.partial(Language, bias, tied, vocabulary), (ids,), loss_fn=LOSSES[loss], targets=(labels,)
    )


def parts(loss: str, plan: str, **how: Any) -> gp.Parts:
    traced = program(loss, **how)
    made = gp.partition(traced, gp.plan(traced, loss_chunk=5, **PLANS[plan]))
    assert any("in_chunks(" in text for name, text in made.files.items() if name != "chunks.py"), (loss, plan)
    return made


def test_each_loss_trains_as_the_unpartitioned_model() -> None:
    check_parts([parts(loss, "tp, vocabulary" if loss in ("flat", "shifted") else "one device") for loss in LOSSES])


@pytest.mark.costly
def test_each_axis_trains_as_the_unpartitioned_model() -> None:
    check_parts([parts("flat", "pp", tied=True), parts("shifted", "dp_shard"), parts("with_z", "tp", bias=True)])


@pytest.mark.slow
@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("loss", "plan"), CASES)
def test_it_trains_as_the_unpartitioned_model(loss: str, plan: str, tied: bool) -> None:
    vocabulary = 65536 if plan == "cp" else VOCABULARY  # else gathering all logits is as cheap as a sum over ranks
    check_parts([parts(loss, plan, tied=tied, bias=not tied, vocabulary=vocabulary)])


def test_what_no_row_gives_alone_stays_whole() -> None:
    def of_the_batch(logits: Tensor, labels: Tensor) -> Tensor:  # each token beside the mean of all
        return flat(logits - logits.mean(1, keepdim=True), labels)

    def kept(logits: Tensor, labels: Tensor) -> Tensor:
        return flat(logits.detach() + 0 * logits, labels) + logits.flatten(0, 1).softmax(-1).amax(0).sum()

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def of_pairs(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each.view(-1, LENGTH, 1) - each.view(-1, 1, LENGTH)).square().sum() / 100

    for loss in (of_the_batch, kept, of_pairs):
        traced = gp.export(Language, (ids,), loss_fn=loss, targets=(ids,))
        with pytest.raises(gp.GraphparError, match=r"loss_chunk: Language has no head .*; leave it out"):
            gp.plan(traced, loss_chunk=5, allow_batch_coupling=True)


def test_a_square_of_a_sum_is_not_that_of_its_parts() -> None:
    def squared(logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total * total / 1000

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    traced = gp.export(Language, (ids,), loss_fn=squared, targets=(ids,))
    whole, chunked = (
        gp.partition(traced, gp.plan(traced, loss_chunk=each, allow_batch_coupling=True)) for each in (0, 5)
    )
    assert "in_chunks" in chunked.files["stage_0.py"] and "in_chunks" not in whole.files["stage_0.py"]
    for outcome in verify_all([chunked]):
        assert not isinstance(outcome, Exception) and outcome.ok, outcome


def test_a_value_cut_off_from_the_gradient_stays_so() -> None:
    def distilled(logits: Tensor, labels: Tensor) -> Tensor:
        return flat(logits, labels) + (logits.softmax(-1).detach() * logits).sum() / 100

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    traced = gp.export(Language, (ids,), loss_fn=distilled, targets=(ids,))
    made = gp.partition(traced, gp.plan(traced, loss_chunk=5, mesh={"dp_replicate": 2}))
    assert "in_chunks" in made.files["stage_0.py"]
    check_parts([made])


def test_chunks_are_taken_where_memory_is_short() -> None:
    ids = torch.randint(0, 50000, (8, 1024))
    traced = gp.export(functools.partial(Language, vocabulary=50000), (ids,), loss_fn=flat, targets=(ids,))

    def planned(memory: int, **pins: Any) -> gp.Plan:
        return gp.plan(traced, Cluster.of(replace(A100, memory_bytes=memory), 1, 1), **pins)

    whole = planned(A100.memory_bytes)
    (peak,) = whole.predicted.peak_memory_bytes
    tight = planned(int(0.7 * peak), microbatch_size=8)
    assert not whole.sharding.loss_chunk and tight.sharding.loss_chunk == 4096
    assert tight.predicted.peak_memory_bytes[0] < 0.7 * peak
    assert gp.Plan.from_json(tight.to_json()).sharding == tight.sharding
    pinned = planned(A100.memory_bytes, loss_chunk=1024, microbatch_size=8)
    assert pinned.sharding.loss_chunk == 1024
    assert pinned.predicted.peak_memory_bytes[0] < tight.predicted.peak_memory_bytes[0]
    assert gp.estimate(traced, pinned).peak_memory_bytes == pinned.predicted.peak_memory_bytes
