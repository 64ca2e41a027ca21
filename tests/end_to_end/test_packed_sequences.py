"""Documents that are packed into rows: no mask is made where its structure proves them, and the numbers are the model's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.emitted.packed_attention import document_starts, packed_attention
from tests.tools.programs import check_parts

LENGTH, BATCH, WIDTH, END = 16, 4, 16, 0
DOCUMENTS = ([5, 11], [16], [1, 2, 3, 10], [8, 8])


def of_transformers() -> tuple[Any, dict[str, Tensor]]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])
    ids = torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(positions == 0, -100)
    return functools.partial(LlamaForCausalLM, config), {"input_ids": ids, "position_ids": positions, "labels": labels}


class Attention(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.written = written

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        if self.written:
            scores = q @ k.mT * q.size(-1) ** -0.5 + torch.where(mask, 0.0, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """``kind``: how a model of one's own says which documents there are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList([Attention(written=kind == "shifted") for _ in range(2)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ends = ids == END
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        documents = ends.cumsum(-1)
        if self.kind == "shifted":  # the token that ends a document is its last
            documents = F.pad(documents[:, :-1], (1, 0))
        elif self.kind == "over the batch":
            documents = ends.flatten()[None].cumsum(-1).view(-1, LENGTH)
        elif self.kind == "any numbers":
            documents = ids // 8
        elif self.kind == "before itself":
            causal = causal.tril(-1) | torch.eye(LENGTH, dtype=torch.bool).logical_and(causal)
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        if self.kind == "window":
            mask = mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


KINDS = {
    "ends": True,
    "shifted": True,
    "before itself": True,
    "any numbers": False,
    "window": False,
    "over the batch": False,
}
"""Whether documents are proved."""
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "microbatch_size": 2},
    "dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "full"},
    "cp": {"mesh": {"cp": 2}},
    "budget": {"mesh": {"dp_replicate": 2}, "recompute": "budget:0.5"},
}


@functools.cache
def program(kind: str) -> gp.Program:
    torch.manual_seed(0)
    if kind == "transformers":
        model, inputs = of_transformers()
        return gp.export(model, kwargs=inputs)
    ids = torch.randint(0, 12, (BATCH, LENGTH))
    return gp.export(functools.partial(Packed, kind), (ids, ids.roll(-1, 1)))


def parts(kind: str, plan: str) -> gp.Parts:
    made = gp.partition(program(kind), gp.plan(program(kind), **PLANS[plan]))
    assert ("packed_attention(" in made.files["blocks.py"]) == KINDS.get(kind, True), kind
    return made


@pytest.mark.costly
def test_rows_of_documents_train_as_in_the_model() -> None:
    check_parts(
        [parts("transformers", "tp"), parts("ends", "pp"), parts("shifted", "dp_shard"), parts("before itself", "cp")]
    )


def test_other_masks_stay() -> None:
    check_parts(
        [parts("any numbers", "one device"), parts("window", "one device"), parts("over the batch", "one device")]
    )


@pytest.mark.slow
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["transformers", *(kind for kind in KINDS if kind != "over the batch")])
def test_each_kind_on_each_axis(kind: str, plan: str) -> None:
    check_parts([parts(kind, plan)])


def test_a_document_sees_nothing_of_another() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 9]])
    first, last = document_starts(documents), torch.arange(8)[None]
    assert first.tolist() == [[0, 0, 0, 3, 3, 5, 5, 5], [0] * 7 + [7]]
    query, key, value = torch.randn(3, 2, 2, 8, 4).unbind(0)
    whole = packed_attention(query, key, value, first, last)
    alone = [F.scaled_dot_product_attention(*(x[:1, :, 3:5] for x in (query, key, value)), is_causal=True)]
    torch.testing.assert_close(whole[:1, :, 3:5], alone[0])
    assert packed_attention(*(x.to("meta") for x in (query, key, value, first, last))).shape == whole.shape
    part = packed_attention(query[:, :, 4:], key, value, first[:, 4:], last[:, 4:])  # queries of another rank
    torch.testing.assert_close(part, whole[:, :, 4:])
