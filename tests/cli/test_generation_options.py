"""What ``graphpar run`` is asked to generate is checked before a process starts, and figures come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphpar.cli.main import main
from graphpar.runtime.launching.launch import LaunchResult
from tests.tools.rank_pool import RankPool

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


example_inputs = {"input_ids": torch.zeros(2, 12, dtype=torch.long)}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generation")
    (root / "model.py").write_text(MODEL)
    made = ["compile", str(root / "model.py"), "--mode", "generate", "--mesh", "dp_replicate=2"]
    assert main([*made, "--weights", "-o", str(root / "out"), "--json"]) == 0
    return root / "out"


def refused(options: list[str], out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence with which ``graphpar run`` ends, before anything starts."""

    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr("graphpar.cli.run_command.torchrun", start)
    capsys.readouterr()
    try:
        code = main(["run", str(out), *options])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    written = capsys.readouterr()
    assert (code, written.out.strip()) == (2, ""), written
    lines = [line for line in written.err.splitlines() if not line.startswith("(")]
    assert len(lines) == 1 and lines[0].startswith("error: "), written.err
    return lines[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "nothing to continue"),
        (["--tokens", "1,x"], "--tokens: it is '1,x'; it must be token ids"),
        (["--tokens", "1,50"], "prompt 0 has the token 50; the model knows 50 tokens"),
        (["--tokens", "1,2", "--tokens", "3,4,5", "--max-new-tokens", "11"], "prompt 1 has 3 tokens and 11 new ones need 13"),
        (["--tokens", "1", "--top-p", "1.5"], "top_p is 1.5; it must be at most 1"),
        (["--tokens", "1", "--temperature", "0"], "--temperature: it is 0; it must be above 0"),
        (["--tokens", "1", "--top-k", "-1"], "--top-k: it is -1; it must be a whole number"),
        (["--tokens", "1", "--weights", "nowhere"], "--weights: there is no nowhere"),
        (["--tokens", "1", "--weights", "{other}"], "has values of other shapes: lm_head.weight"),
        (["--tokens", "1", "--weights", "{less}"], "has no value for model.norm.weight"),
        (["--tokens", "1", "--weights", "{less}", "--checkpoint", "{out}"], "--checkpoint: not allowed with argument --weights"),
        (["--tokens", "1", "--checkpoint", "{out}"], "is neither a checkpoint"),
        (["--prompt", "a"], "--prompt needs a tokenizer: there is no tokenizer.json"),
        (["--prompt", "a", "--tokenizer", "{out}"], "out/tokenizer.json, the tokenizer of the prompts"),
        (["--prompt", "a", "--tokenizer", "{less}"], "less.safetensors is not a tokenizer"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_a_wrong_option_is_one_sentence_before_anything_starts(
    options: list[str],
    sentence: str,
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = load_file(out / "weights" / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(3, 16)}, str(tmp_path / "other.safetensors"))
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, str(tmp_path / "less.safetensors"))
    places = {"other": tmp_path / "other.safetensors", "less": tmp_path / "less.safetensors", "out": out}
    found = refused([option.format(**places) for option in options], out, capsys, monkeypatch)
    assert sentence in found


def test_a_tokenizer_that_is_named_is_used(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"of": 4, "man": 7, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    started: list[list[str]] = []

    def launched(script: Path, arguments: list[str], **options: Any) -> LaunchResult:
        started.append(arguments)
        Path(arguments[arguments.index("--json") + 1]).write_text("{}")
        return LaunchResult(seconds=1.0, stdout="", stderr="")

    monkeypatch.setattr("graphpar.cli.run_command.torchrun", launched)
    assert main(["run", str(out), "--prompt", "of man", "--tokenizer", str(tmp_path / "words.json"), "--json"]) == 0
    assert f"--tokenizer={tmp_path / 'words.json'}" in started[0] and "--prompt=of man" in started[0]


def test_json_has_prompts_tokens_and_their_rate(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pool: RankPool
) -> None:
    def launched(*given: Any, **options: Any) -> LaunchResult:
        pool.torchrun(*given, **options)
        return LaunchResult(seconds=1.0, stdout="", stderr="")

    monkeypatch.setattr("graphpar.cli.run_command.torchrun", launched)
    capsys.readouterr()
    tokens = ["--tokens", "3,5,8", "--tokens", "2", "--tokens", "4,4"]
    assert main(["run", str(out), *tokens, "--max-new-tokens", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    assert data["prompts"] == [[3, 5, 8], [2], [4, 4]]
    assert [len(each) for each in data["tokens"]] == [5, 5, 5]
    assert data["tokens_per_second"] == pytest.approx(15 / data["seconds"])
    assert {"out", "devices", "predicted", "texts"} <= set(data)
