"""examples/finetune: from a folder of transformers through a text and back into one, by the commands of its page."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphpar.cli.main import main
from graphpar.frontend import modelfile
from tests.tools.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "finetune" / "README.md"
TEXT = ROOT / "examples" / "texts" / "paradise_lost.txt"
LENGTH, STEPS = 32, 12


def _given(folder: Path) -> None:
    """A small model with random weights, and a tokenizer of pairs of bytes."""
    (folder / "my-text.txt").write_text(TEXT.read_text()[:30_000])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train([str(folder / "my-text.txt")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "my-model")
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "my-model")


def _held_out_loss(model: torch.nn.Module, folder: Path) -> float:
    """Of the first batch of the held-out tokens."""
    tokens = torch.from_numpy(np.load(folder / "tokens" / "val.npy").astype("int64"))[: 8 * LENGTH].view(8, LENGTH)
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.mark.costly
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: RankPool) -> None:
    _given(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LENGTH", str(LENGTH))
    monkeypatch.setenv("ADAPTERS", "")  # to be what it was afterwards
    monkeypatch.delenv("ADAPTERS")
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for words in map(shlex.split, block.splitlines()):
            if words[0] == "export" or "=" in words[0]:
                name, _, value = words[words[0] == "export"].partition("=")
                monkeypatch.setenv(name, value)
                words = words[1:] if words[0] != "export" else []
            if words[:1] == ["python"]:
                monkeypatch.setattr("sys.argv", words[1:])
                runpy.run_path(words[1], run_name="__main__")
            elif words[:1] == ["graphpar"]:
                monkeypatch.setattr(modelfile, "_loaded", {})  # as in a process of its own
                assert main(words[1:]) == 0, words
            elif words:
                paths = ("tokens", "ckpt", "adapters")  # ranks are in another folder
                script, options = Path(words[3]).resolve(), [str(tmp_path / w) if w in paths else w for w in words[4:]]
                options[options.index("--steps") + 1] = str(STEPS)
                options[options.index("--eval-every") + 1] = "4"
                log = tmp_path / f"{script.parent.name}.jsonl"
                pool.torchrun(script, [*options, "--log-file", str(log)], nproc=2, timeout_s=200)

    before = _held_out_loss(AutoModelForCausalLM.from_pretrained(tmp_path / "my-model"), tmp_path)
    for name, folder in (("full", "tuned"), ("adapted", "tuned-adapters")):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        best = min(each["held_out_loss"] for each in records if "held_out_loss" in each)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert _held_out_loss(loaded, tmp_path) == pytest.approx(best, rel=1e-4) and best < before - 0.02, name
        text = AutoTokenizer.from_pretrained(tmp_path / folder).decode([5, 70, 90])
        assert text == AutoTokenizer.from_pretrained(tmp_path / "my-model").decode([5, 70, 90])
    assert (tmp_path / "for-peft" / "adapter_config.json").is_file() and os.environ["ADAPTERS"]
