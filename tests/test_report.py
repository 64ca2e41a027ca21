"""The report: its data, its text and its page agree with the program, and are the same every time."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import graphpar as gp
from graphpar.modelfile import load_model_file
from graphpar.report import compile_json, html, plan_text, render, report_data, timeline_of
from graphpar.report_text import bytes_text, compressed, count_text, flops_text, indices_text, seconds_text, short_names
from tests.programs import example, norms_pinned

EXAMPLES = Path(__file__).parent.parent / "examples"


def made(name: str, **pins: Any) -> gp.Parts:
    file = load_model_file(EXAMPLES / f"{name}.py")
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets, mode=pins.pop("mode", None))
    devices = pins.pop("devices")
    return gp.partition(program, gp.plan(program, mesh={"pp": devices}, **pins))


def text_of(data: dict[str, Any]) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        render(data, console, "out")
    return captured.get()


@pytest.fixture(scope="module")
def gpt() -> gp.Parts:
    return made("gpt", devices=4)


def test_data_adds_up(gpt: gp.Parts) -> None:
    data = report_data(gpt.program, gpt.plan, gpt.stages)
    tokens = gpt.program.parameters["tokens.weight"].numel
    assert sum(stage["parameters"] for stage in data["stages"]) == data["model"]["parameters"] + tokens  # on two stages
    assert data["ties"] == [{"names": ["tokens.weight", "head.weight"], "stages": [0, 3]}]
    assert data["model"]["blocks"] == [{"name": "Block", "count": 8}]
    (sent,) = data["stages"][0]["sends"]
    assert sent["shape"] == [gpt.plan.microbatch_size, 16, 64]
    assert sent["bytes"] == gpt.plan.microbatch_size * 16 * 64 * 4
    assert data["stages"][3]["sends"] == []
    assert 0 < data["bubble_fraction"] < 1 and data["bubble_fraction"] == round(timeline_of(data).bubble, 6)
    # blocks 2 and 3: 2 * (12 width^2) * tokens flops of linear layers each, and attention on top
    assert data["stages"][1]["flops"] == pytest.approx(2 * 24 * 64 * 64 * 16, rel=0.1)


def test_data_is_plain_and_deterministic(gpt: gp.Parts) -> None:
    data = report_data(gpt.program, gpt.plan, gpt.stages)
    assert json.loads(json.dumps(data)) == data
    again = gp.partition(gpt.program, gpt.plan)
    assert json.dumps(report_data(again.program, again.plan, again.stages)) == json.dumps(data)
    assert str(EXAMPLES) not in json.dumps(data)


def test_the_emitted_plan_holds_the_report(gpt: gp.Parts) -> None:
    record = json.loads(gpt.files["plan.json"])
    assert record["report"] == report_data(gpt.program, gpt.plan, gpt.stages)
    assert gpt.report == record["report"]
    assert gpt.files["report.html"] == html(record["report"])
    assert "search.json" not in gpt.files


def test_text(gpt: gp.Parts) -> None:
    text = text_of(report_data(gpt.program, gpt.plan, gpt.stages))
    assert max(map(len, text.splitlines())) <= 100
    assert "GPT · 415 K parameters · fp32 · train · 4 devices" in text
    assert "pp 4   1F1B, 8 microbatches of 1 (global batch 8)" in text
    assert "tokens, positions, blocks.0-1" in text and "blocks.6-7, norm, head" in text
    assert "tokens.weight = head.weight, on stages 0, 3" in text
    assert re.search(r"rank 3( +\.\.)+ F0( --)*( \.\.)* (B0|…)", text)
    assert "graphpar verify out" in text
    assert "\x1b" not in text


def test_recomputed_and_relayed_values_are_named() -> None:
    parts = made("t5", devices=2, schedule="zbv")
    data = report_data(parts.program, parts.plan, parts.stages)
    assert any(value["relayed"] for stage in data["stages"] for value in stage["sends"])
    assert any("attention_mask" in stage["recomputed"] for stage in data["stages"])
    text = text_of(data)
    assert "relayed" in text and "Recomputed" in text
    assert "T5BlockDecoder x 3" in text
    assert "0F0" in text  # several stages a rank: actions name theirs


def test_one_device_and_inference() -> None:
    alone = made("head_first", devices=1)
    text = text_of(report_data(alone.program, alone.plan, alone.stages))
    assert "1 device" in text and "bubble" not in text
    parts = made("head_first", devices=2, mode="infer")
    data = report_data(parts.program, parts.plan, parts.stages)
    assert not any("B" in row for row in data["actions"])
    assert "gradients" not in text_of(data) and "verify" not in text_of(data)
    assert data["stages"][0]["sends"][0]["requires_grad"] is False


def test_page_is_well_formed_and_self_contained(gpt: gp.Parts) -> None:
    data = report_data(gpt.program, gpt.plan, gpt.stages)
    data["warnings"] = ["<b>not bold</b>"]
    page = html(data)
    timeline, memory = (ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page))
    assert len(timeline.findall(".//rect")) == 2 * 4 * 8
    ticks = [text for node in timeline.findall("text") if (text := node.text or "").endswith("ms")]
    assert ticks[0] == "0 ms" and len(ticks) >= 5
    assert {node.text.partition(":")[0] for node in memory.iter("title") if node.text} >= {"parameters", "gradients", "activations"}
    assert "<script" not in page and "http" not in page and "<link" not in page
    assert "&lt;b&gt;not bold" in page
    data["actions"] = _gpipe(ranks=4, microbatches=1000)
    assert len(html(data)) < 400_000  # shapes, not boxes


def _gpipe(ranks: int, microbatches: int) -> list[str]:
    return [",".join(f"{rank}{kind}{m}" for kind in "FB" for m in range(microbatches)) for rank in range(ranks)]


def test_a_plan_prints_without_its_program(gpt: gp.Parts) -> None:
    text = str(gpt.plan)
    assert text == plan_text(gpt.plan)
    assert "1F1B, 8 microbatches of 1" in text and "blocks.2-3" in text


def test_compile_json_has_the_contract_s_keys(gpt: gp.Parts) -> None:
    data = compile_json(gpt.report, gpt.plan, {"total": 1.23456789}, "out")
    assert set(data) == {"graphpar", "torch", "out", "warnings", "model", "plan", "predicted", "search", "seconds"}
    assert data["plan"] == gpt.plan.to_json()
    assert data["seconds"] == {"total": 1.2346}
    json.dumps(data)


def test_spellings() -> None:
    assert [count_text(n) for n in (0, 999, 1000, 414_656, 1_980_000_000)] == ["0", "999", "1.00 K", "415 K", "1.98 B"]
    assert [bytes_text(n) for n in (12, 4096, 33_500_000)] == ["12 B", "4.10 kB", "33.5 MB"]
    assert flops_text(3.318e6) == "3.32 MFLOP"
    assert indices_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_modules_are_compressed() -> None:
    stages = [
        ["embed", "rotary", "down.0.conv1", "down.0.norm", "layers.0", "layers.1"],
        ["rotary", "layers.2", "layers.3", "up.0.conv1"],
        ["rotary", "layers.5", "up.0.norm", "norm", "head"],
    ]
    assert compressed(stages) == [
        ["embed", "rotary", "down", "layers.0-1"],
        ["rotary", "layers.2-3", "up.0.conv1"],
        ["rotary", "layers.5", "up.0.norm", "norm", "head"],
    ]


# ---- programs that are cut -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> gp.Parts:
    program = example("llama")
    norms = norms_pinned(program, "S(1)")
    return gp.partition(program, gp.plan(program, mesh={"tp": 2, "dp_replicate": 2}, shard_plan=norms))


def test_transitions_cost_what_the_search_said(llama: gp.Parts) -> None:
    """Read off the emitted program, priced anew, and added up over all instances of the block."""
    sharding = report_data(llama.program, llama.plan, llama.stages)["sharding"]
    assert sharding["transitions_s"] == pytest.approx(llama.plan.sharding.cost["transitions"])
    calls = "\n".join(text for name, text in llama.files.items() if name.startswith(("blocks", "stage")))
    printed = sum(calls.count(f"{name}(") for name in ("all_gather", "all_gather_invariant", "reduce_scatter", "shard"))
    block, root = sharding["scopes"]
    inside, outside = (sum(len(row["transitions"]) for row in scope["rows"]) for scope in (block, root))
    assert block["count"] == 8 and inside + outside == printed
    assert sharding["transitions"] == 8 * inside + outside


def test_a_transition_s_bytes(llama: gp.Parts) -> None:
    """A ring sends half of the whole tensor from each of two ranks."""
    data = report_data(llama.program, llama.plan, llama.stages)
    entries = [entry for row in data["sharding"]["scopes"][0]["rows"] for entry in row["transitions"]]
    assert entries and {entry["axis"] for entry in entries} == {"tp"}
    for entry in entries:
        assert entry["forward_bytes"] == llama.plan.microbatch_size * 16 * 64 * 4 / 2
        assert {entry["from"][0], entry["to"][0]} <= set("RISP") and entry["seconds"] > 0


def test_text_of_a_cut_program(llama: gp.Parts) -> None:
    data = report_data(llama.program, llama.plan, llama.stages)
    assert json.loads(json.dumps(data)) == data
    text = text_of(data)
    assert max(map(len, text.splitlines())) <= 100
    assert "dp_replicate 2 · tp 2" in text and "Simulated" not in text
    whole = sum(info.numel for info in made("llama", devices=1).program.parameters.values())
    assert data["model"]["parameters"] == whole
    assert "LlamaDecoderLayer x 8" in text and "Outside of blocks" in text and "under this model of costs" in text
    spec = llama.plan.parameters()["model.layers.0.self_attn.q_proj.weight"]["tp"]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("q, k, v ")]
    assert line.split()[-1] == f"{spec}@tp"
    assert "S(1) -> R" in text and "0-3" in text
    page = html(data)
    assert "How tensors are cut" in page and "S(1) -&gt; R" in page
    assert f"{spec}@tp:" in str(llama.plan) and "model.layers.*.self_attn.q_proj.weight" in str(llama.plan)


def test_logits_that_are_gathered_are_noted() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.up(x).relu())

    def notes(**options: float) -> list[str]:
        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, labels, **options)

        program = gp.export(Classifier(), (torch.randn(4, 16),), loss_fn=loss, targets=(torch.arange(4),))
        plan = gp.plan(program, mesh={"tp": 2}, shard_plan={"head.weight": "S(0)@tp"})
        parts = gp.partition(program, plan)
        return report_data(parts.program, plan, parts.stages)["sharding"]["notes"]  # type: ignore[no-any-return]

    why = "label smoothing needs every class's logit"
    assert notes(label_smoothing=0.1) == [f"The logits are cut over tp, but gathered before the loss: {why}."]
    assert all("priced" in note for note in notes())


def test_names_among_themselves() -> None:
    names = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert list(short_names([*names, "norm.weight"]).values()) == ["q", "k", "v", "o", "norm"]
    assert list(short_names(["mlp.0.weight", "mlp.2.weight", "gate"]).values()) == ["mlp.0", "mlp.2", "gate"]
    assert list(short_names(["a.q.weight", "b.q.weight"]).values()) == ["a.q", "b.q"]
    assert seconds_text(1.6e-5) == "16.0 us" and seconds_text(0) == "0 s"
