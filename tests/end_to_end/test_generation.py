"""Programs that generate give the tokens that transformers' own ``generate`` gives, on any ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import graphpar as gp
from graphpar.parts import untied
from graphpar.verification import reference_for, verify_all
from graphpar.verification.type_check import check_folder
from tests.ranks import generation_script
from tests.ranks.generation_script import NEW
from tests.tools.rank_pool import RankPool

VOCABULARY, LENGTH = 211, 44
SLIDING = 6
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


def mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=SLIDING))


def phi3() -> nn.Module:
    return Phi3ForCausalLM(Phi3Config(**_SIZES, sliding_window=SLIDING, pad_token_id=0))


def qwen2() -> nn.Module:
    """The first layer sees all positions."""
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=SLIDING, max_window_layers=1))


def gemma2() -> nn.Module:
    """Each second layer sees all positions, all with capped scores."""
    return Gemma2ForCausalLM(
        Gemma2Config(**_SIZES, head_dim=8, sliding_window=SLIDING, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    )


def gemma3() -> nn.Module:
    """Each second layer sees all positions, with other rotary embeddings."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=SLIDING, sliding_window_pattern=2))


def cohere2() -> nn.Module:
    """Each second layer sees all positions, without rotary embeddings."""
    return Cohere2ForCausalLM(Cohere2Config(**_SIZES, sliding_window=SLIDING, sliding_window_pattern=2, pad_token_id=0))


def opt() -> nn.Module:
    """Positions are counted from a mask of ones."""
    sizes = {name: size for name, size in _SIZES.items() if not name.startswith(("inter", "num_key", "init"))}
    return OPTForCausalLM(OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, init_std=0.3))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "opt": opt}
WINDOWS: dict[str, Callable[[], nn.Module]] = {
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "cohere2": cohere2,
}
"""Models with sliding windows, shorter than some prompts, and longer than others."""


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return (MODELS | WINDOWS)[name]().eval()


def program_of(name: str, rows: int) -> gp.Program:
    return gp.export(
        (MODELS | WINDOWS)[name], kwargs={"input_ids": torch.zeros(rows, LENGTH, dtype=torch.long)}, mode="generate"
    )


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
    pool.torchrun(Path(generation_script.__file__), [str(folder), *names], nproc=ranks, timeout_s=300)
    drawn: dict[str, list[list[int]]] = {}
    for (name, mesh, _), label in zip(cases, names):
        wanted = expected(built(name))
        for rank in range(ranks):
            seen = json.loads((folder / f"{label}-rank_{rank}.json").read_text())
            assert seen["greedy"] == wanted, (label, rank)
            assert seen["one"] == [wanted[0][:4]]
            assert drawn.setdefault(name, seen["drawn"]) == seen["drawn"], (label, rank)
            assert seen["cache"] in caches[label]
            # Tokens wait for no window of another group, nor a window for them. A replica without a prompt sends nothing.
            if "pp" in mesh and any(seen["messages"].values()):
                over = {kind: set(groups) for kind, groups in seen["messages"].items()}
                assert over["tokens"] and over["activations"] and not over["tokens"] & over["activations"]
        assert drawn[name] != wanted and all(len(tokens) == NEW for tokens in drawn[name])


CASES: list[tuple[str, dict[str, int], int]] = [
    ("gpt2", {"tp": 2}, 2),
    ("llama", {"pp": 2}, 4),
    ("llama", {"dp_replicate": 2}, 2),
    ("mixtral", {"ep": 2}, 3),
]


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_transformers(
    case: tuple[str, dict[str, int], int], pool: RankPool, tmp_path: Path
) -> None:
    check([case], 2, tmp_path, pool)


WRONG_PROMPTS = """
import sys
from graphpar.runtime.generation.generator import Generator
_honest = Generator._groups


def _shifted(self, prompts, new_tokens):
    wrong = self._kv_cache is sys.modules[__name__] and self.groups.replica == 1
    return _honest(self, [*prompts[1:], prompts[0]] if wrong else prompts, new_tokens)


Generator._groups = _shifted
"""
"""Emitted code with a fault: the second replica continues the prompts after its own."""


def edited(folder: Path, to: Path, file: str, change: Callable[[str], str]) -> Path:
    """Return a copy of a program with a fault."""
    text = (shutil.copytree(folder, to) / file).read_text()
    assert change(text) != text
    (to / file).write_text(change(text))
    return to


@pytest.mark.costly
def test_a_replica_that_takes_the_wrong_prompts_is_found(pool: RankPool, tmp_path: Path) -> None:
    program = program_of("gpt2", 2)
    parts = gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2}))
    honest, reference = parts.save(tmp_path / "honest"), reference_for(parts, 2)
    wrong = edited(honest, tmp_path / "prompts", "kv_cache.py", lambda text: text + WRONG_PROMPTS)
    rolled = "        input_ids = input_ids.roll(torch.distributed.get_rank(), 0)\n"
    rows = edited(
        honest,
        tmp_path / "rows",
        "stage_0.py",
        lambda text: re.sub(r"(def forward\(.*\n)", rf"\1{rolled}", text, count=1),
    )
    good, prompts, shifted = verify_all([honest, wrong, rows], steps=2, references=[reference] * 3)

    assert good.ok, str(good)
    assert "the program chose token" in str(prompts.problems), str(prompts)
    assert not shifted.ok and shifted.max_error["output"] > 0.1, str(shifted)


@pytest.mark.costly
def test_check_of_replicas_finds_rows_that_are_summed(tmp_path: Path) -> None:
    program = program_of("gpt2", 2)
    folder = gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2, "tp": 2})).save(tmp_path / "honest")
    summed = edited(
        folder, tmp_path / "summed", "stage_0.py",
        lambda text: re.sub(r"return (.*?)(  +#)", r'return all_reduce(\1, "dp_replicate")\2', text),
    )  # fmt: skip
    result = check_folder(summed)

    assert check_folder(folder).ok
    assert "as I on dp_replicate, but it must be rows of each replica" in str(result.problems), result


@pytest.mark.slow
def test_on_more_ranks(pool: RankPool, tmp_path: Path) -> None:
    meshes = [{"pp": 2, "tp": 2}, {"pp": 4}, {"tp": 4}]
    cases = [
        (name, mesh, rows)
        for name in MODELS
        for mesh, rows in zip(meshes, (2, 1, 4))
        if (name, mesh) != ("llama", meshes[2])
    ]
    replicas = [("gpt2", {"dp_replicate": 2, "tp": 2}, 2), ("mixtral", {"dp_replicate": 2, "pp": 2}, 1)]
    many = ("llama", {"dp_replicate": 4}, 1)
    check([*cases, *replicas, many, ("mixtral", {"pp": 2, "ep": 2}, 2)], 4, tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_models_with_sliding_windows_on_two_ranks(rows: int, pool: RankPool, tmp_path: Path) -> None:
    names = (*WINDOWS, "opt")
    check([(name, mesh, rows) for name in names for mesh in ({"pp": 2}, {"tp": 2})], 2, tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_models_with_sliding_windows_on_four_ranks(rows: int, pool: RankPool, tmp_path: Path) -> None:
    check([(name, {"pp": 2, "tp": 2}, rows) for name in WINDOWS], 4, tmp_path, pool)


@pytest.mark.slow
def test_a_window_that_is_off_by_one_is_found() -> None:
    program = program_of("qwen2", 2)
    plan = gp.plan(program, mesh={"pp": 2})
    honest, wrong = gp.partition(program, plan), gp.partition(program, plan)
    text = (wrong.folder / "blocks.py").read_text()
    assert f"sliding_window={SLIDING}" in text
    (wrong.folder / "blocks.py").write_text(text.replace(f"sliding_window={SLIDING}", f"sliding_window={SLIDING + 1}"))
    found = verify_all([honest, wrong], 2)  # the example itself has one token alone
    assert [each.ok for each in found] == [True, False]
    assert found[1].worst["output"] == "logits"


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
    pool.torchrun(Path(generation_script.__file__), [str(tmp_path), "written"], nproc=2, timeout_s=300)
    model.load_state_dict(load_file(tmp_path / "trained.safetensors"))
    wanted = expected(model)
    assert wanted != expected(built("llama"))
    for rank in range(2):
        assert json.loads((tmp_path / f"written-rank_{rank}.json").read_text())["greedy"] == wanted
