"""Programs for generation: which models can be computed a window of positions at a time, and that windows give what the whole gives."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import operator_name
from graphpar.passes.normalize import causal_masks
from graphpar.passes.planning.plan_request import plan_request, planned
from graphpar.runtime import Pipeline, RuntimeProgramError, start
from graphpar.runtime.generation.prompts import Sampling
from tests.tools.programs import example_file

LENGTH, WIDTH, VOCABULARY = 24, 16, 50
SLIDING = 4
"""How many positions a sliding window has."""


BY_COLUMNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in a window": lambda row, column: (row >= column) & (column > row - SLIDING),
    "not out of a window": lambda row, column: ~(column > row) & ~(row - SLIDING >= column),
    "in a window or at its end": lambda row, column: (
        ((column <= row) & (column > row - SLIDING + 1)) | (column + SLIDING - 1 == row)
    ),
    "added to scores": lambda row, column: torch.where((row >= column) & (column > row - SLIDING), 0.0, -math.inf),
    "first and last": lambda row, column: (row == column) | ((column == 0) & (row >= 0)),
    "chunks": lambda row, column: (row >= column) & (row // SLIDING == column // SLIDING),
}
"""Masks by comparisons of rows [s, 1] with columns [1, s]."""


COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "counted": lambda ids: torch.ones_like(ids).cumsum(1) - 1,
    "counted in floats": lambda ids: (torch.ones(ids.shape).cumsum(-1) * torch.ones(ids.shape) - 1).long(),
    "counted down the columns": lambda ids: torch.ones(ids.size(1), 1).cumsum(0).long().flatten() - 1,
    "tokens": lambda ids: (ids != 1).cumsum(1) - 1,
    "twos": lambda ids: torch.full_like(ids, 2).cumsum(1) // 3,
    "counted from the end": lambda ids: torch.ones_like(ids).cumsum(1).flip(1) - 1,
    "counted and dropped": lambda ids: torch.ones_like(ids).cumsum(1).clamp(max=5),
}
"""Positions [batch, s] that are counted from a mask [batch, s]."""


class Block(nn.Module):
    def __init__(self, attention: str, mix: str) -> None:
        super().__init__()
        self.attention, self.mix = attention, mix
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        lower = torch.ones(LENGTH, LENGTH).tril_()
        self.register_buffer("lower", lower, persistent=attention == "saved")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = q.size(-2)
        places = torch.arange(steps)
        behind = places[:, None] - places
        if self.attention == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.attention == "triu":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.full((steps, steps), -math.inf).triu(1))
        if self.attention == "sliding, filled":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return scores.masked_fill((behind < 0) | ~(behind < SLIDING), -1e10).softmax(-1) @ v
        if self.attention in ("capped", "capped, in a window", "capped, and seen whole"):
            scores = 3.0 * torch.tanh(q @ k.transpose(-2, -1) / 5.0)
            if self.attention != "capped, and seen whole":
                scores = scores + torch.where(
                    (behind >= 0) & (behind < (SLIDING if "window" in self.attention else 99)), 0.0, -1e10
                )
            return scores.softmax(-1) @ v
        if self.attention in BY_COLUMNS:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=BY_COLUMNS[self.attention](places[:, None], places[None])
            )
        if self.attention in ("tril", "saved"):
            lower = self.get_buffer("lower")[:steps, :steps]
            scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(lower == 0, -math.inf)
            return scores.softmax(-1) @ v
        masks: dict[str, Any] = {
            "whole": None,
            "sliding": (behind >= 0) & (behind < SLIDING),
            "sliding, added": torch.where((behind >= 0) & (behind < SLIDING), 0.0, -math.inf),
            "sliding, as it grows": (behind >= 0) & (behind < 4 + steps // 9),
            "sliding, and what follows": (behind >= -1) & (behind < SLIDING),
            "holes": (behind >= 0) & (behind % 2 == 0),
            "alibi": torch.where(behind >= 0, -behind.float(), -math.inf),
        }
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[self.attention])

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        q, k, v = (each.view(batch, steps, 2, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).split(WIDTH, 2))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, steps, WIDTH))
        if self.mix == "convolution":
            x = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        elif self.mix == "mean":
            x = x + x.mean(1, keepdim=True)
        elif self.mix == "cumsum":
            x = x.cumsum(1)
        elif self.mix == "shift":
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        elif self.mix == "flip":
            x = x.flip(1)
        elif self.mix == "length":
            x = x / steps
        elif self.mix == "rows":
            x = x - x.mean(0)
        elif self.mix == "dropout":
            x = F.dropout(x, 0.5)
        return x + self.mlp(x)


class Writer(nn.Module):
    def __init__(self, attention: str = "causal", positions: str = "arange", mix: str = "") -> None:
        super().__init__()
        self.positions = positions
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.table = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.register_buffer("fixed", torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(attention, mix) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        batch, steps = ids.shape
        x = self.tokens(ids)
        if self.positions == "arange":
            x = x + self.places(torch.arange(0, steps, device=ids.device).unsqueeze(0).expand(batch, -1))
        elif self.positions == "parameter":
            x = x + self.table[:, :steps]
        elif self.positions == "buffer":
            x = x + self.get_buffer("fixed")[:steps]
        elif self.positions in COUNTED:
            x = x + self.places(COUNTED[self.positions](ids))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if self.positions == "last":
            logits = logits.transpose(1, 2)
        return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def writer(**options: str) -> Writer:
    torch.manual_seed(1)
    return Writer(**options).eval()


def program_of(model: nn.Module, rows: int = 2) -> gp.Program:
    ids = torch.randint(VOCABULARY, (rows, LENGTH))
    return gp.export(model, (ids,), {"targets": ids}, mode="generate")


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"attention": "causal"},
        {"attention": "triu"},
        {"attention": "tril"},
        {"attention": "sliding"},
        {"attention": "sliding, filled"},
        {"attention": "sliding, added"},
        {"attention": "capped"},
        {"attention": "capped, in a window"},
        {"positions": "parameter"},
        {"positions": "buffer"},
        {"positions": "counted"},
        {"positions": "counted in floats"},
        {"positions": "counted down the columns"},
        {"positions": "counted and dropped"},
    ],
    ids=str,
)
@pytest.mark.sampled(1 / 3)
def test_windows_give_what_the_whole_sequence_gives(options: dict[str, str], tmp_path: Path) -> None:
    model = writer(**options)
    gp.partition(program_of(model), gp.plan(program_of(model))).save(tmp_path / "out")
    save_file(model.state_dict(), str(tmp_path / "weights.safetensors"))
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    prompts = [[1, 2, 3], [7], [4, 4, 9, 9, 2]]
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline, torch.no_grad():
        pipeline.load_weights(tmp_path / "weights.safetensors", strict=False)
        outputs = pipeline.infer({"ids": ids})
        assert outputs is not None
        torch.testing.assert_close(outputs["output"], model(ids), rtol=1e-5, atol=1e-5)
        for prompt, found in zip(prompts, pipeline.generate(prompts, 8), strict=True):
            for token in found:
                assert token == int(model(torch.tensor([prompt]))[0, -1].argmax())
                prompt.append(token)
        tokens = [list(range(10)), list(range(5))]
        padded = torch.tensor([[0] * (10 - len(each)) + each for each in tokens])
        mask = torch.tensor([[0] * (10 - len(each)) + [1] * len(each) for each in tokens])
        assert pipeline.generate(padded, 5, attention_mask=mask) == pipeline.generate(tokens, 5)
        first = pipeline.generate([[1, 2, 3]], 8)[0]
        assert pipeline.generate([[1, 2, 3]], 8, eos_token_id=first[3]) == [first[: first.index(first[3]) + 1]]
        assert len(pipeline.generate([[1, 2, 3]])[0]) == LENGTH + 1 - 3
        with pytest.raises(RuntimeProgramError, match="prompt 0 has 3 tokens and 30 new ones need 32 positions"):
            pipeline.generate([[1, 2, 3]], 30)
        with pytest.raises(RuntimeProgramError, match="prompt 1 has the token 50"):
            pipeline.generate([[1], [50]], 3)
        with pytest.raises(RuntimeProgramError, match="prompt 0 is empty"):
            pipeline.generate([[]], 3)
        with pytest.raises(RuntimeProgramError, match="no option 'num_beams'"):
            pipeline.generate([[1]], 3, num_beams=2)
        for options, reason in (
            ({"temperature": 0}, "temperature is 0"),
            ({"do_sample": "no"}, "do_sample is 'no'"),
            ({"eos_token_id": "7"}, "eos_token_id is '7'"),
            ({"eos_token_id": VOCABULARY}, "eos_token_id is 50"),
        ):
            with pytest.raises(RuntimeProgramError, match=reason):
                pipeline.generate([[1]], 3, **options)  # type: ignore[arg-type]
        for wrong in ([1, 2], torch.ones(1, 2), torch.ones(2, 2, 2, dtype=torch.long)):
            with pytest.raises(RuntimeProgramError, match="prompts"):
                pipeline.generate(wrong, 3)  # type: ignore[arg-type]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "whole"}, "not provably causal"),
        ({"attention": "sliding, as it grows"}, "not provably causal"),
        ({"attention": "sliding, and what follows"}, "not provably causal"),
        ({"attention": "capped, and seen whole"}, "not provably causal"),
        ({"attention": "chunks"}, "not provably causal"),
        ({"attention": "holes"}, "not provably causal"),
        ({"attention": "alibi"}, "not provably causal"),
        ({"attention": "saved"}, "persistent=False"),
        ({"positions": "tokens"}, r"cumsum mixes positions \(test_windows.py"),
        ({"positions": "twos"}, "cumsum mixes positions"),
        ({"positions": "counted from the end"}, "flip mixes positions"),
        ({"mix": "mean"}, "mean mixes positions"),
        ({"mix": "cumsum"}, "cumsum mixes positions"),
        ({"mix": "flip"}, "flip mixes positions"),
        (
            {"mix": "convolution"},
            r"Writer can't generate a token at a time: \w+ \([\w.]+, test_windows.py:\d+\) makes a tensor .*n \+ \d",
        ),
        ({"mix": "shift"}, r"Writer can't generate .*\([\w.]+, test_windows.py:\d+\) makes a tensor .*n [+-] 1"),
        ({"mix": "length"}, "length"),
        ({"mix": "rows"}, "they would see each other: .*mean mixes examples"),
        ({"mix": "dropout"}, "it draws dropout"),
        ({"positions": "last"}, r"logits \[batch, positions, vocabulary\]"),
    ],
    ids=str,
)
@pytest.mark.sampled(1 / 3)
def test_models_whose_positions_depend_on_each_other_are_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(GraphparError, match=reason):
        program_of(writer(**options))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["bert", "t5", "vit", "resnet"])
@pytest.mark.sampled(1 / 2)
def test_models_of_other_kinds_are_refused(name: str) -> None:
    file = example_file(name)
    with pytest.raises(GraphparError, match="can't generate"):
        gp.export(file.model, file.args, file.kwargs, mode="generate")


@pytest.mark.costly
def test_what_a_plan_for_generation_leaves_out_is_said() -> None:
    program = program_of(writer())
    for options, reason in (
        ({"mesh": {"dp_shard": 2}}, "dp_shard=2 is for training"),
        ({"mesh": {"cp": 2}}, "cp=2 is for training"),
        ({"mesh": {"tp": 2}, "global_batch": 4}, "leave global_batch"),
    ):
        with pytest.raises(GraphparError, match=reason):
            planned(program, plan_request(**options))  # type: ignore[arg-type]
    assert gp.plan(program, 4).mesh.size == 4


@pytest.mark.costly
def test_a_generation_config_is_followed_or_refused() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    ids = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[3, 4])
    program = gp.export(model, kwargs=ids, mode="generate")
    assert program.generation == {"do_sample": True, "temperature": 0.7, "top_k": 50, "eos_token_id": [3, 4]}
    model.generation_config = GenerationConfig(eos_token_id=99, max_new_tokens=3)  # no token of the model
    program = gp.export(model, kwargs=ids, mode="generate")
    with tempfile.TemporaryDirectory() as folder:
        gp.partition(program, gp.plan(program)).save(f"{folder}/out", weights=model.state_dict())
        with start() as ranks, Pipeline(f"{folder}/out", ranks.device) as pipeline:
            pipeline.load_weights()
            found = pipeline.generate([[1, 2]])
    assert len(found[0]) == 3
    model.generation_config = GenerationConfig(num_beams=4)
    with pytest.raises(GraphparError, match="num_beams=4"):
        gp.export(model, kwargs=ids, mode="generate")


@pytest.mark.costly
@pytest.mark.parametrize("attention", BY_COLUMNS)
def test_masks_too_large_to_make_are_known_by_the_columns_of_their_rows(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_masks, "SMALL", 0)
    monkeypatch.setattr(causal_masks, "MOST_ELEMENTS", LENGTH)
    if attention in ("first and last", "chunks"):
        with pytest.raises(GraphparError, match="not provably causal"):
            program_of(writer(attention=attention))
        return
    program = program_of(writer(attention=attention))
    graphs = [program.graph, *(block.graph for block in program.blocks.values())]
    nodes = [node for graph in graphs for node in graph.nodes if operator_name(node) == "cached_attention"]
    assert nodes and {node.kwargs["sliding_window"] for node in nodes} == {SLIDING}


# ---- the next token ---------------------------------------------------------------------------------------------


def test_drawn_tokens_have_the_distribution_of_transformers() -> None:
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 12, generator=generator) * 2
    sequence = [3, 5, 3]
    wanted = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(6),
            TopPLogitsWarper(0.9),
        ]
    )(torch.tensor([sequence]), logits.clone()).softmax(-1)[0]
    sampling = Sampling(do_sample=True, temperature=0.7, top_k=6, top_p=0.9, repetition_penalty=1.3)
    draws = 4000
    tokens = sampling.tokens(logits.expand(draws, -1), [sequence] * draws, range(draws))
    shares = torch.bincount(tokens, minlength=12) / draws
    assert torch.equal(shares > 0, wanted > 0)
    torch.testing.assert_close(shares, wanted, atol=0.04, rtol=0)


def test_a_drawn_token_depends_on_seed_sequence_and_position_alone() -> None:
    logits = torch.randn(3, 30)
    sequences = [[1], [1, 2], [1, 2, 3]]
    together = Sampling(do_sample=True, seed=4).tokens(logits, sequences, [0, 1, 2]).tolist()
    alone = [int(Sampling(do_sample=True, seed=4).tokens(logits[[n]], sequences[n : n + 1], [n])) for n in range(3)]
    others = [
        Sampling(do_sample=True, seed=seed).tokens(logits, sequences, [0, 1, 2]).tolist() for seed in range(5, 15)
    ]
    assert together == alone
    assert any(other != together for other in others)


def test_rounding_of_nearly_equal_logits_draws_the_same() -> None:
    """Under another plan they differ by as much, and may be in another order; with every token of 50 as likely as the others or nearly."""
    rounding = 1e-6 * torch.randn(2, 64, 50, generator=torch.Generator().manual_seed(0))
    sequences, numbers = [[1]] * 64, range(64)
    for sampling in (
        Sampling(do_sample=True),
        Sampling(do_sample=True, top_k=60),
        Sampling(do_sample=True, top_p=0.9999),
    ):
        one, other = (sampling.tokens(each, sequences, numbers).tolist() for each in rounding)
        assert one == other and len(set(one)) > 20
