"""Programs that generate give the tokens that transformers' own ``generate`` gives, on any ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import graphpar as gp
from graphpar.parts import untied
from tests import generation_fixture
from tests.generation_fixture import NEW
from tests.rank_pool import RankPool

VOCABULARY, LENGTH = 211, 44
PROMPTS = [[3, 5, 7, 9, 11, 2, 8], [1, 2], [4] * 11, [10, 11, 12], [6]]
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "eos_token_id": None,
}


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().eval()


def program_of(name: str, rows: int) -> gp.Program:
    return gp.export(MODELS[name], kwargs={"input_ids": torch.zeros(rows, LENGTH, dtype=torch.long)}, mode="generate")


def expected(model: nn.Module) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        found.append(made[0, len(prompt) :].tolist())
    return found


def check(cases: list[tuple[str, dict[str, int], int]], ranks: int, folder: Path, pool: RankPool) -> None:
    """Generate with each (model, mesh, sequences at a time), all in one launch, and compare with transformers and with each other."""
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    names, caches = [], {}
    for number, (name, mesh, rows) in enumerate(cases):
        names.append(f"{name}_{number}")
        program = program_of(name, rows)
        plan = gp.plan(program, mesh=mesh)
        parts = gp.partition(program, plan)
        parts.save(folder / names[-1])
        assert plan.predicted is None and parts.compilation.estimate is not None
        memories = parts.compilation.estimate.memory
        caches[names[-1]] = {memory.cache // plan.microbatches for memory in memories}
        save_file(untied(built(name).state_dict()), str(folder / f"{names[-1]}.safetensors"))
    pool.torchrun(Path(generation_fixture.__file__), [str(folder), *names], nproc=ranks, timeout_s=300)
    drawn: dict[str, list[list[int]]] = {}
    for (name, _, _), label in zip(cases, names):
        wanted = expected(built(name))
        for rank in range(ranks):
            seen = json.loads((folder / f"{label}-rank_{rank}.json").read_text())
            assert seen["greedy"] == wanted, (label, rank)
            assert seen["one"] == [wanted[0][:4]]
            assert drawn.setdefault(name, seen["drawn"]) == seen["drawn"], (label, rank)
            assert seen["cache"] in caches[label]
        assert drawn[name] != wanted and all(len(tokens) == NEW for tokens in drawn[name])


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("case", [("gpt2", {"tp": 2}, 2), ("llama", {"pp": 2}, 4), ("mixtral", {"ep": 2}, 3)], ids=str)
def test_tokens_are_those_of_transformers(
    case: tuple[str, dict[str, int], int], pool: RankPool, tmp_path: Path
) -> None:
    check([case], 2, tmp_path, pool)


@pytest.mark.slow
def test_on_more_ranks(pool: RankPool, tmp_path: Path) -> None:
    meshes = [{"pp": 2, "tp": 2}, {"pp": 4}, {"tp": 4}]
    cases = [
        (name, mesh, rows)
        for name in MODELS
        for mesh, rows in zip(meshes, (2, 1, 4))
        if (name, mesh) != ("llama", meshes[2])
    ]
    check([*cases, ("mixtral", {"pp": 2, "ep": 2}, 2)], 4, tmp_path, pool)


@pytest.mark.slow
def test_weights_of_a_checkpoint_of_training_under_another_plan(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids.clone()}
    save_file(batch, str(tmp_path / "batch.safetensors"))
    model = built("llama")
    trained = gp.export(MODELS["llama"], kwargs=batch)
    plan = gp.plan(trained, mesh={"dp_shard": 2}, zero=3)
    gp.partition(trained, plan).save(tmp_path / "trained", weights=model.state_dict())
    program = program_of("llama", 4)
    gp.partition(program, gp.plan(program, mesh={"tp": 2})).save(tmp_path / "written")
    pool.torchrun(Path(generation_fixture.__file__), [str(tmp_path), "written"], nproc=2, timeout_s=300)
    model.load_state_dict(load_file(tmp_path / "trained.safetensors"))
    wanted = expected(model)
    assert wanted != expected(built("llama"))
    for rank in range(2):
        assert json.loads((tmp_path / f"written-rank_{rank}.json").read_text())["greedy"] == wanted
