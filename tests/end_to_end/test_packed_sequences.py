"""Documents that are packed into rows: no mask is made where its structure proves them, and the numbers are the model's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import graphpar as gp
from graphpar.emitted import collectives
from graphpar.emitted import packed_attention as emitted
from graphpar.emitted.packed_attention import balanced_packed_attention, packed_attention
from graphpar.operators.rank_threads import on_ranks
from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError
from tests.tools.programs import check_parts

LENGTH, BATCH, WIDTH, END = 32, 4, 16, 0
DOCUMENTS = ([5, 27], [32], [1, 2, 3, 26], [16, 16])


def of_transformers(slides: bool) -> tuple[Any, dict[str, Tensor]]:
    """A Llama, or a Mistral, whose attention has a window."""
    config = (MistralConfig if slides else LlamaConfig)(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False, **({"sliding_window": 4} if slides else {}),
    )  # fmt: skip
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])
    ids = torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(positions == 0, -100)
    return functools.partial(MistralForCausalLM if slides else LlamaForCausalLM, config), {
        "input_ids": ids,
        "position_ids": positions,
        "labels": labels,
    }


class Attention(nn.Module):
    def __init__(self, written: bool, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.written, self.heads = written, heads

    def forward(self, x: Tensor, mask: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        if self.written:
            scores = q @ k.mT * q.size(-1) ** -0.5
            scores = scores + torch.where(mask, 0.0, float("-inf")) if isinstance(mask, Tensor) else mask(scores)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


HIDDEN, SMALLEST = float("-inf"), torch.finfo(torch.float32).min
LATER = torch.full((LENGTH, LENGTH), HIDDEN).triu(1)
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "neither": lambda same, causal: ~(~same | ~causal),
    "logical": lambda same, causal: same.logical_not().logical_or(~causal).logical_not(),
    "nested": lambda same, causal: torch.where(causal, torch.where(same, 0.0, HIDDEN), HIDDEN),
    "a sum": lambda same, causal: torch.where(same, 0.0, SMALLEST) + LATER.clamp(min=SMALLEST),
    "one minus": lambda same, causal: (1 - same.float()) * SMALLEST + (1.0 - torch.ones(LENGTH, LENGTH).tril()) * -1e9,
    "a product": lambda same, causal: (1 - same.float() * causal) * -1e9,
    "whole numbers": lambda same, causal: torch.zeros(same.shape).masked_fill((1 - (same & causal).long()).bool(), HIDDEN),
    "compared": lambda same, causal: (same.int() * causal.int()) == 1,
}  # fmt: skip
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "filled": lambda scores, same, causal: scores.masked_fill(~(same & causal), -1e9),
    "filled twice": lambda scores, same, causal: scores.masked_fill(~causal, HIDDEN).masked_fill(~same, torch.tensor(SMALLEST)),
    "added twice": lambda scores, same, causal: scores + LATER + torch.where(same, 0.0, HIDDEN),
    "where": lambda scores, same, causal: torch.where(~same | ~causal, SMALLEST, scores),
    "added and filled": lambda scores, same, causal: (scores + LATER).masked_fill(~same, HIDDEN),
}  # fmt: skip
"""Masks that are documents and causal, in other words; of attention that is written out, masked scores."""


class Spelled(nn.Module):
    """A layer for each way to write a mask."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList([Attention(name in SCORES, heads) for name in (*MASKS, *SCORES)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        documents = (ids == END).cumsum(-1)[:, None]
        same = ~(documents[..., None] != documents[..., None, :])
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.embed(ids)
        for name, block in zip((*MASKS, *SCORES), self.blocks):
            masked = (
                functools.partial(SCORES[name], same=same, causal=causal)
                if name in SCORES
                else MASKS[name](same, causal)
            )
            x = block(x, masked)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Packed(nn.Module):
    """``kind``: how a model of one's own says which documents there are."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.register_buffer("documents", torch.arange(LENGTH)[None] // 10)
        self.blocks = nn.ModuleList([Attention(kind == "shifted", heads) for _ in range(3)])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        ends = ids == END
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        documents = ends.cumsum(-1)
        if self.kind == "shifted":  # the token that ends a document is its last
            documents = F.pad(documents[:, :-1], (1, 0))
        elif self.kind == "of a buffer":
            documents = self.documents
        elif self.kind == "over the batch":
            documents = ends.flatten()[None].cumsum(-1).view(-1, LENGTH)
        elif self.kind in ("any numbers", "window over any"):
            documents = ids // 4
        elif self.kind == "before itself":
            causal = causal.tril(-1) | torch.eye(LENGTH, dtype=torch.bool).logical_and(causal)
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        if self.kind.startswith("window"):
            mask = mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)
        if self.kind == "padding":
            mask = mask & (ids != 5)[:, None]
        if self.kind == "filled":
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if self.kind == "of hidden values" and number == 1:  # a stage sends them to the next
                documents = x.argmax(-1) % 4
                mask = (documents[:, :, None] == documents[:, None, :]) & causal
            x = block(x, mask[:, None])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


KINDS = {
    "ends": True,
    "shifted": True,
    "before itself": True,
    "any numbers": True,
    "window": True,
    "window over any": True,
    "over the batch": True,
    "of a buffer": True,
    "filled": True,
    "of hidden values": True,
    "padding": False,
}
"""Whether documents are proved."""
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "microbatch_size": 2},
    "dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "full"},
    "cp": {"mesh": {"cp": 2}},
    "cp and tp": {"mesh": {"cp": 2, "tp": 2}},
    "budget": {"mesh": {"dp_replicate": 2}, "recompute": "budget:0.5"},
}


@functools.cache
def program(kind: str, heads: int) -> gp.Program:
    torch.manual_seed(0)
    if kind in ("transformers", "sliding"):
        model, inputs = of_transformers(kind == "sliding")
        return gp.export(model, kwargs=inputs)
    ids = torch.randint(0, 12, (BATCH, LENGTH))
    model = functools.partial(Spelled, heads) if kind == "spelled" else functools.partial(Packed, kind, heads)
    return gp.export(model, (ids, ids.roll(-1, 1)))


def parts(kind: str, plan: str) -> gp.Parts:
    traced = program(kind, 1 if "cp" in plan else 2)  # one that no axis divides
    chosen = {"split": ["blocks.2"]} if plan == "pp" and kind == "of hidden values" else {}
    made = gp.partition(traced, gp.plan(traced, **PLANS[plan], **chosen))
    called = "balanced_packed_attention(" if "cp" in plan else "packed_attention("
    text = "".join(text for name, text in made.files.items() if name.startswith(("blocks", "stage")))
    assert (called in text) == KINDS.get(kind, True), kind
    return made


@pytest.mark.costly
def test_rows_of_documents_train_as_in_the_model() -> None:
    check_parts(
        [
            parts("transformers", "tp"), parts("ends", "pp"), parts("shifted", "dp_shard"), parts("before itself", "cp"),
            parts("any numbers", "cp"), parts("window", "cp"), parts("sliding", "tp"), parts("of hidden values", "pp"),
        ]
    )  # fmt: skip


@pytest.mark.costly
def test_masks_in_other_words() -> None:
    assert program("spelled", 2).idioms == {"attention": len(SCORES), "packed": len(MASKS) + len(SCORES)}
    check_parts([parts("spelled", "tp"), parts("spelled", "pp"), parts("spelled", "cp")])


def test_other_masks_stay() -> None:
    check_parts(
        [
            parts("padding", "one device"),
            parts("window over any", "one device"),
            parts("filled", "one device"),
            parts("over the batch", "one device"),
        ]
    )


@pytest.mark.slow
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["transformers", "sliding", *(kind for kind in KINDS if kind != "over the batch")])
def test_each_kind_on_each_axis(kind: str, plan: str) -> None:
    check_parts([parts(kind, plan)])


def test_what_a_model_never_reads_may_differ_in_each_batch(tmp_path: Path) -> None:
    """transformers' collator gives the ends of the documents, of which each batch has another number, and the longest one."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batches = [
        dict(collate([{"input_ids": list(range(1, n + 1))} for n in lengths])) for lengths in ([5, 20, 7], [17, 15])
    ]
    traced = gp.export(of_transformers(False)[0], kwargs=batches[0])
    assert set(traced.unread) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert traced.idioms["packed"] == 2
    torch.manual_seed(0)
    model = of_transformers(False)[0]()
    gp.partition(traced, gp.plan(traced)).save(tmp_path / "out", weights=model.state_dict())
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline:
        pipeline.load_weights()
        for batch in batches:
            torch.testing.assert_close(pipeline.step(batch), model(**batch).loss)
        with pytest.raises(RuntimeProgramError, match="the input position_ids has shape"):
            pipeline.step({**batches[0], "position_ids": torch.arange(4)[None]})


def varlen(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest: int, longest_keys: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch documents of ``varlen_attn``, which runs on CUDA alone: the last query sees the last key."""
    results = []
    for (begin, end), (first, last) in zip(
        itertools.pairwise(query_ends.tolist()), itertools.pairwise(key_ends.tolist())
    ):
        assert end - begin <= longest and last - first <= longest_keys and window_size[1] == 0
        before = torch.arange(end - begin)[:, None] + (last - first) - (end - begin) - torch.arange(last - first)
        shown = (before >= 0) & (before <= window_size[0] if window_size[0] >= 0 else before >= 0)
        q, k, v = (x.transpose(0, 1) for x in (query[begin:end], key[first:last], value[first:last]))
        each = F.scaled_dot_product_attention(q[None], k[None], v[None], shown, scale=scale, enable_gqa=enable_gqa)
        results.append(each[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("kernel", [False, True], ids=["batches", "one call"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_document_sees_nothing_of_another(
    seed: int, ranks: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitted, "_takes_all", lambda query, value: kernel)
    monkeypatch.setattr(emitted, "_varlen", varlen)
    torch.manual_seed(seed)
    batch, length, groups = 1 + seed % 3, 12 * (1 + 2 * seed), 2
    documents = (torch.rand(1 if seed == 3 else batch, length) < 0.1).cumsum(1)
    documents = documents % 3 if seed % 2 else documents  # whose positions do not follow each other
    query = torch.randn(batch, 4, length, 6, requires_grad=True)
    key, value = (torch.randn(batch, groups, length, 6, requires_grad=True) for _ in range(2))
    weights = torch.randn_like(query)

    def own(rank: int, window: int | None) -> list[Tensor]:
        operands = [x.chunk(ranks, 2)[rank].detach().requires_grad_() for x in (query, key, value)]
        found = balanced_packed_attention(*operands, documents.clone(), "cp", window, 0.3, True)
        return [found, *torch.autograd.grad((found * weights.chunk(ranks, 2)[rank]).sum(), operands)]

    for window in (None, 1, 3, length):
        before = torch.arange(length)[:, None] - torch.arange(length)
        shown = (documents[:, :, None] == documents[:, None]) & (before >= 0) & (before < (window or length))
        expected = F.scaled_dot_product_attention(query, key, value, shown[:, None], scale=0.3, enable_gqa=True)
        gradients = torch.autograd.grad((expected * weights).sum(), (query, key, value))
        found = on_ranks(functools.partial(own, window=window), ranks, [emitted, collectives])
        for parts, whole in zip(zip(*found), (expected, *gradients)):
            torch.testing.assert_close(torch.cat(parts, 2), whole)


def test_documents_that_are_written_are_found_again() -> None:
    documents, x = torch.zeros(1, 8, dtype=torch.int64), torch.randn(1, 2, 8, 4)
    before = packed_attention(x, x, x, documents)
    documents.copy_(torch.arange(8) // 4)
    assert not torch.equal(before, packed_attention(x, x, x, documents))


def test_documents_of_a_buffer_are_read_in_each_forward() -> None:
    text = parts("of a buffer", "one device").files["stage_0.py"]
    assert "self.documents.clone()" in text


def test_ranks_have_queries_of_as_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = torch.cat([torch.zeros(96), torch.arange(1, 33)])[None].repeat(2, 1).long()

    def work(rank: int) -> int:
        pieces = emitted._Pieces(documents, None, "cp")
        return sum(int(torch.arange(len(k) - len(q), len(k)).sum()) + len(q) for q, k in pieces.pieces)

    found = on_ranks(work, 4, [emitted, collectives])
    assert sum(found) == 2 * (96 * 97 // 2 + 32)
    assert max(found) < 1.1 * sum(found) / 4  # 2.1 where each has its own


def test_numbers_of_documents_need_not_be_known() -> None:
    documents, x = torch.zeros(2, 8, dtype=torch.int64, device="meta"), torch.empty(2, 4, 8, 6, device="meta")
    assert packed_attention(x, x, x, documents).shape == x.shape
