"""A checkpoint of a model of transformers becomes a folder that ``from_pretrained`` reads, and goes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli.main import main
from graphpar.runtime import Pipeline, start
from graphpar.runtime.checkpoints import conversion
from tests.tools.whole_values import whole_values

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1, "dtype": "bfloat16"}


class Wrapped(nn.Module):
    """A language model under a name of the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.lm(input_ids=input_ids, labels=labels)


def llama(tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)
    model: nn.Module = transformers.LlamaForCausalLM(config).float()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: llama(True),
    "wrapped": lambda: Wrapped(llama(False)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, num_local_experts=2)
    ).float(),
}
SLOW = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=32)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0
        )
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_from_pretrained_reads_what_is_exported(name: str, tmp_path: Path) -> None:
    model, ids = {**MODELS, **SLOW}[name](), torch.randint(32, (2, 6))
    program = gp.export(model, kwargs={"input_ids": ids, "labels": ids})
    gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=model.state_dict())
    (tmp_path / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / "tokenizer" / file).write_text("{}")
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline:
        pipeline.load_weights()
        pipeline.save_checkpoint(tmp_path / "ckpt" / "1", step=1)
    options = [
        "--to",
        "hf",
        "--max-shard-size",
        "6KB",
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "-o",
        str(tmp_path / "hf"),
    ]

    assert main(["checkpoint", "export", str(tmp_path / "ckpt"), *options]) == 0

    inner = model.lm if isinstance(model, Wrapped) else model
    loaded, info = type(inner).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32 and loaded.config.architectures == [type(inner).__name__]
    expected, found = inner.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(found[key], value) for key, value in expected.items())
    files = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        conversion.INDEX,
    } <= files
    assert (
        "notes.txt" not in files
        and len(set(json.loads((tmp_path / "hf" / conversion.INDEX).read_text())["weight_map"].values())) > 1
    )
    conversion.convert(tmp_path / "hf", tmp_path / "back" / "1", tmp_path / "out")
    saved, back = (whole_values(tmp_path / folder / "1") for folder in ("ckpt", "back"))
    assert saved.keys() == back.keys() and all(torch.equal(back[key], value) for key, value in saved.items())
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline:
        pipeline.load_weights(tmp_path / "hf")
