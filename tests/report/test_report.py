"""The report: its data, its text and its page agree with the program, and are the same every time."""

from __future__ import annotations

import json
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.memory import Memory
from graphpar.cost_models.timelines import StageEstimate
from graphpar.hardware.cluster import HEADROOM
from graphpar.passes.compilation import priced
from graphpar.passes.planning.plan_request import on_one_device
from graphpar.report.memory_chart import KINDS, memory_over_time
from graphpar.report.phrases import equal_stages, parts_text, peak_text, stages_text
from graphpar.report.report import (
    compile_json,
    html,
    next_commands,
    plan_text,
    render,
    report_data,
    stage_table,
    timeline_of,
    trace,
    with_alone,
)
from graphpar.report.trace import lanes, step_spans
from graphpar.runtime.plan_record import decisions_of
from graphpar.runtime.records import packed, unpacked
from graphpar.schedules.action_table import COMPUTATIONS
from graphpar.schedules.registry import bubble_warning
from graphpar.schedules.simulation import Timeline
from graphpar.text import (
    bytes_text,
    compressed,
    count_text,
    flops_text,
    indices_text,
    is_at_or_below,
    is_below,
    joined,
    matching,
    numbered_runs,
    rate_text,
    seconds_text,
    short_names,
    shortened,
    wrapped,
)
from tests.tools.programs import example, example_file, norms_pinned, traced_once

EXAMPLES = Path(__file__).parents[2] / "examples"


def made(name: str, **pins: Any) -> gp.Parts:
    program = traced_once(example_file(name), pins.pop("mode", None), None)
    devices = pins.pop("devices")
    return gp.partition(program, gp.plan(program, mesh={"pp": devices}, **pins))


def text_of(data: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        render(data, console, "out")
    return captured.get()


@pytest.fixture(scope="module")
def gpt() -> gp.Parts:
    return made("gpt", devices=4)


def test_data_adds_up(gpt: gp.Parts) -> None:
    data = report_data(gpt.compilation)
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
    data = report_data(gpt.compilation)
    assert json.loads(json.dumps(data)) == data
    again = gp.partition(gpt.program, gpt.plan)
    assert json.dumps(report_data(again.compilation)) == json.dumps(data)
    assert str(EXAMPLES) not in json.dumps(data)


def test_the_report_lies_beside_the_plan_with_its_decisions(gpt: gp.Parts) -> None:
    record = json.loads(gpt.files["report.json"])
    assert "report" not in json.loads(gpt.files["plan.json"])
    assert record["decisions"] == decisions_of(json.loads(gpt.files["plan.json"]))
    assert record["report"] == report_data(gpt.compilation)
    assert gpt.report == record["report"]
    assert gpt.files["report.html"] == html(record["report"])
    assert "search.json" not in gpt.files


def test_text(gpt: gp.Parts) -> None:
    text = text_of(report_data(gpt.compilation))
    assert max(map(len, text.splitlines())) <= 100
    assert "GPT · 415 K parameters · fp32 · train · 4 devices" in text
    assert "pp 4   1F1B, 8 microbatches of 1 (global batch 8)" in text
    assert "tokens, positions, blocks.0-1" in text and "blocks.6-7, norm, head" in text
    assert "tokens.weight = head.weight, on stages 0, 3" in text
    assert re.search(r"rank 3( +\.\.)+ F0( --)*( \.\.)* (B0|…)", text)
    assert "graphpar verify out" in text
    assert "\x1b" not in text


@pytest.mark.costly
def test_recomputed_and_relayed_values_are_named() -> None:
    parts = made("t5", devices=2, schedule="zbv")
    data = report_data(parts.compilation)
    assert any(value["relayed"] for stage in data["stages"] for value in stage["sends"])
    assert any("attention_mask" in stage["recomputed"] for stage in data["stages"])
    text = text_of(data)
    assert "relayed" in text and "Recomputed" in text
    assert "T5BlockDecoder x 3" in text
    assert "0F0" in text  # several stages a rank: actions name theirs


def test_recomputed_blocks_are_listed_by_path() -> None:
    parts = made("gpt2_tiny", devices=2, recompute={"transformer.h.*": "full", "transformer.h.1": "none"})
    text = " ".join(text_of(report_data(parts.compilation)).split())
    assert " full (transformer.h.0, transformer.h.2-7), no collective is repeated" in text
    parts = made("gpt2_tiny", devices=1, recompute={"*.h.*": "full", "*.h.1": "pointwise"}, compile=True)
    text = " ".join(text_of(report_data(parts.compilation)).split())
    assert re.search(r"pointwise \(transformer.h.1\), [^·]* computed again, not compiled", text)
    assert text.count("not compiled") == 1


def test_versions_are_named_beside_the_plan(gpt: gp.Parts) -> None:
    assert json.loads(gpt.files["plan.json"])["torch"] == report_data(gpt.compilation)["torch"] == torch.__version__
    assert f"torch {torch.__version__} · plan.json 2" in text_of(report_data(gpt.compilation))


def test_one_device_and_inference() -> None:
    alone = made("head_first", devices=1)
    text = text_of(report_data(alone.compilation))
    assert "1 device" in text and "bubble" not in text
    parts = made("head_first", devices=2, mode="infer")
    data = report_data(parts.compilation)
    assert not any("B" in row for row in data["actions"])
    assert "gradients" not in text_of(data) and "verify" not in text_of(data)
    assert data["stages"][0]["sends"][0]["requires_grad"] is False


def test_page_is_well_formed_and_self_contained(gpt: gp.Parts) -> None:
    data = report_data(gpt.compilation)
    data["warnings"] = ["<b>not bold</b>"]
    page = html(data)
    drawn = {
        name: ElementTree.fromstring(svg)
        for name, svg in re.findall(r'(?s)<div class="chart[^>]*>(?=<svg class="(\w+)")(.*?)</div>', page)
    }
    assert list(drawn) == ["timeline", "memory", "peaks"]
    timeline = drawn["timeline"]
    titles = [node.text or "" for node in timeline.iter("title")]
    waits = sum(title.startswith(("idle", "waits for a transfer")) for title in titles)
    assert len(timeline.findall(".//rect")) == len(titles) == 2 * 4 * 8 + 4 + waits  # an optimizer a rank
    assert sum(title.startswith("optimizer: ") for title in titles) == 4
    ticks = [text for node in timeline.iter("text") if (text := node.text or "").endswith("ms")]
    assert ticks[0] == "0 ms" and len(ticks) >= 5
    assert {node.text.partition(":")[0] for node in drawn["peaks"].iter("title") if node.text} >= {
        "parameters",
        "gradients",
        "activations",
    }
    assert page.count("<script") == 1 and "http" not in page and "<link" not in page and "src=" not in page
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
    assert set(data) == {
        "graphpar",
        "torch",
        "out",
        "warnings",
        "model",
        "plan",
        "placements",
        "predicted",
        "search",
        "seconds",
    }
    assert data["plan"] == gpt.plan.to_json()
    assert data["seconds"] == {"total": 1.2346}
    json.dumps(data)


def test_spellings() -> None:
    assert [count_text(n) for n in (0, 999, 1000, 414_656, 1_980_000_000)] == ["0", "999", "1.00 K", "415 K", "1.98 B"]
    sizes = (0, 12, 1023, 1024, 4096, 33_500_000, 1023 * 2**20, 80 * 2**30)
    assert [bytes_text(n) for n in sizes] == [
        "0 B",
        "12 B",
        "1,023 B",
        "1.00 KiB",
        "4.00 KiB",
        "31.9 MiB",
        "1.00 GiB",
        "80.0 GiB",
    ]
    assert flops_text(3.318e6) == "3.32 MFLOP"
    assert [rate_text(n) for n in (0.072914, 463.13, 999.96, 18576.3)] == ["0.07291", "463.1", "1,000", "18,580"]
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


def test_equal_layers_are_joined() -> None:
    entries = [
        ("a.0.w", "x"),
        ("a.0.b", "y"),
        ("a.1.w", "x"),
        ("a.1.b", "z"),
        ("a.2.w", "x"),
        ("a.4.w", "x"),
        ("head", "x"),
    ]
    found = [("a.0-2.w", "x"), ("a.0.b", "y"), ("a.1.b", "z"), ("a.4.w", "x"), ("head", "x")]
    assert joined(entries) == found
    names = dict(entries)
    assert {path: kind for pattern, kind in packed(names).items() for path in matching(pattern, names)} == names
    assert matching("a.{1-11}", ["a.0", "a.1", "a.10", "a.11", "a.12", "a.x"]) == ["a.1", "a.10", "a.11"]
    assert numbered_runs(["a.0-1", "a.2", "a.3-5", "b"]) == ["a.0-5", "b"]


def test_stages_of_equal_layers_are_on_one_row() -> None:
    """But the first of each rank, whose row says what the rank holds, and stages whose backward is another."""
    program = example("gpt")
    plan = gp.plan(program, gp.Cluster.parse("2xH100"), mesh={"pp": 2}, schedule="Interleaved1F1B")
    data = gp.partition(program, plan).report
    assert len(equal_stages(data)) <= len(data["stages"])
    layers = [f"blocks.{place}" for place in range(8)]
    stages = [
        data["stages"][1] | {"index": place, "rank": place % 2, "modules": [name]} for place, name in enumerate(layers)
    ]
    priced = [data["predicted"]["stages"][1] | {"index": place, "rank": place % 2} for place in range(8)]
    data = data | {"stages": stages, "predicted": data["predicted"] | {"stages": priced}}
    assert equal_stages(data) == [[0], [1], [2, 3, 4, 5, 6, 7]]
    assert stages_text(data, [2, 3, 4, 5, 6, 7]) == ("2-7", "0-1", "blocks.2-7")
    assert len(stage_table(data, 100)) == 4
    priced[5] = priced[5] | {"backward_s": 2 * priced[5]["backward_s"]}
    assert equal_stages(data) == [[0], [1], [2, 3, 4], [5], [6, 7]]


def test_json_says_the_placements_of_equal_layers_once(llama: gp.Parts) -> None:
    placements, parameters = (
        compile_json(llama.report, llama.plan, {}, None)["placements"],
        llama.plan.to_json()["parameters"],
    )
    assert len(placements) < len(parameters) / 4
    assert unpacked(placements) == parameters


# ---- programs that are cut -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> gp.Parts:
    program = example("llama")
    norms = norms_pinned(program, "S(1)")
    return gp.partition(program, gp.plan(program, mesh={"tp": 2, "dp_replicate": 2}, shard_plan=norms))


def lines_by_axis(data: dict[str, Any]) -> dict[str, float]:
    """Seconds of all transitions of a microbatch, each counted for every instance of its block."""
    found: dict[str, float] = {}
    for scope in data["sharding"]["scopes"]:
        for entry in (entry for row in scope["rows"] for entry in row["transitions"]):
            found[entry["axis"]] = found.get(entry["axis"], 0.0) + scope["count"] * entry["seconds"]
    return found


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "mesh", "cluster"),
    [
        ("llama", {"tp": 2}, None),
        ("gpt", {"pp": 2, "tp": 2}, "2x2xH100"),
        ("bert", {"cp": 2, "tp": 2}, "4xCPU"),
        ("t5", {"pp": 2, "dp_replicate": 2, "tp": 2}, "8xA100"),
        ("mixtral", {"ep": 2}, None),
    ],
)
def test_lines_of_transitions_add_up_to_the_step(name: str, mesh: dict[str, int], cluster: str | None) -> None:
    """One price: the lines of all stages are what the stages' forwards and backwards have; on one stage, what the step says of an axis."""
    program = example(name)
    plan = gp.plan(program, None if cluster is None else gp.Cluster.parse(cluster), mesh=mesh)
    data = gp.partition(program, plan).report
    lines, predicted = lines_by_axis(data), data["predicted"]
    stages: dict[str, float] = {}
    for stage in predicted["stages"]:
        for axis, seconds in (*stage["forward_exposed_s"].items(), *stage["backward_exposed_s"].items()):
            stages[axis] = stages.get(axis, 0.0) + seconds
    assert lines == pytest.approx(stages) and sum(lines.values()) > 0
    assert data["sharding"]["transitions_s"] == pytest.approx(sum(lines.values()))
    if "pp" not in mesh:
        assert {axis: plan.microbatches * seconds for axis, seconds in lines.items()} == pytest.approx(
            {axis: predicted["parts_s"][axis] for axis in lines}
        )


def test_the_step_says_whose_its_parts_are() -> None:
    """Sums of gradients and the optimizer end with the last rank, so they are not told as those of the busiest one."""
    data = gp.partition(example("gpt"), gp.plan(example("gpt"), mesh={"pp": 2, "dp_replicate": 2})).report
    timeline, parts = timeline_of(data), data["predicted"]["parts_s"]
    closing = [segment for row in timeline.closing for segment in row]
    summed = max(segment.end for segment in closing if segment.kind == "gradients")
    assert parts["gradients"] == pytest.approx(summed - timeline.makespan)
    assert parts["optimizer"] == pytest.approx(timeline.length - summed)
    assert parts_text(data["predicted"]).endswith(
        " (busiest rank; gradients and optimizer: until the last rank is done)"
    )

    alone = gp.partition(example("gpt"), gp.plan(example("gpt"), mesh={"dp_replicate": 2})).report
    assert "busiest" not in parts_text(alone["predicted"])


def check_spans(data: dict[str, Any], timeline: Timeline, slices: list[dict[str, Any]]) -> None:
    """The spans of a row fill the step, and those of the busiest one are the parts of the predicted step; the trace has the same; what
    a rank holds over time is at most its predicted peak, and reaches it."""
    rows, step, predicted = step_spans(timeline), data["predicted"]["step_time_s"], data["predicted"]
    for number, row in enumerate(rows):
        assert row[0].start == 0 and all(a.end == b.start for a, b in pairwise(row))
        assert math.fsum(span.length for span in row) == pytest.approx(step, rel=1e-9)
        traced = [(each["ts"], each["dur"], each["cat"] == "wait") for each in slices if each["tid"] == number]
        assert traced == [(1e6 * span.start, 1e6 * span.length, span.kind in ("idle", "transfer")) for span in row]
    busiest = rows[max(range(len(rows)), key=timeline.busy.__getitem__)]
    found: dict[str, float] = {}
    for span in busiest:
        of_step = "work" if span.kind in COMPUTATIONS else span.axis if span.kind == "collective" else span.kind
        found[of_step] = found.get(of_step, 0.0) + span.length
    parts = predicted["parts_s"]
    expected = {axis: parts[axis] for axis in data["mesh"] if axis in parts and axis in found}
    expected |= {"transfer": parts.get("pp", 0.0), "work": parts["compute"] + parts.get("host", 0.0)}
    if "turns" not in parts:
        assert {name: found.get(name, 0.0) for name in expected} == pytest.approx(expected, abs=1e-9 * step)
    sent: dict[str, float] = {}
    for span in lanes(timeline, [StageEstimate.from_json(stage) for stage in predicted["stages"]])[rows.index(busiest)]:
        sent[span.axis] = sent.get(span.axis, 0.0) + span.length
    expected = {axis: seconds for axis, seconds in predicted["communication_s"].items() if axis != "pp" and seconds}
    assert sent == pytest.approx(expected, rel=1e-6, abs=1e-9 * step)
    ranks = memory_over_time(data, timeline)
    assert ranks is not None
    for levels, parts_of_rank, peak in zip(ranks, predicted["memory"], predicted["peak_memory_bytes"], strict=True):
        assert max(level.total for level in levels) == pytest.approx(peak, abs=2)
        assert levels[0].start == 0 and levels[-1].start == pytest.approx(step)
        assert min(nbytes for level in levels for nbytes in level.bytes) >= 0
        fullest = max(levels, key=lambda level: level.total)
        sums = [sum(parts_of_rank[part] for part in parts) for parts in KINDS.values()]
        assert fullest.bytes == pytest.approx(sums, abs=2)
        assert levels[-1].total == pytest.approx(Memory(**parts_of_rank).between_steps().total)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", {"pp": 1}, {}),
        ("gpt", {"dp_replicate": 4}, {}),  # more ranks than cores
        ("llama", {"pp": 2, "tp": 2}, {"schedule": "Interleaved1F1B"}),
        ("t5", {"pp": 2}, {"schedule": "zbv"}),
        ("bert", {"cp": 2}, {"microbatch_size": 4}),
        ("gpt", {"pp": 2, "dp_shard": 2}, {"zero": 3}),
    ],
)
def test_the_timeline_is_as_long_as_the_step(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """With sums of gradients and optimizers, on a CPU and on GPUs; the trace and the chart are of the same timeline."""
    program = example(name)
    plan = gp.plan(program, mesh=mesh, **options)
    parts = gp.partition(program, plan)
    for cluster in (None, gp.Cluster.parse(f"{plan.mesh.size}xH100")):
        data = parts.report if cluster is None else report_data(priced(parts.compilation, cluster), cluster)
        timeline, step = timeline_of(data), data["predicted"]["step_time_s"]
        assert timeline.length == pytest.approx(step, rel=1e-9) and timeline.length > timeline.makespan
        slices = [event for event in trace(data)["traceEvents"] if event["ph"] == "X"]
        assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1e6 * step)
        check_spans(data, timeline, slices)
        actions = [span for row in timeline.spans for span in row if span.action.kind in COMPUTATIONS]
        inside = sum(seconds for span in actions for _, seconds in span.collectives)
        drawn = sum(event["dur"] for event in slices if event["cat"] == "collective")
        assert drawn == pytest.approx(1e6 * inside) and (inside > 0) == bool(plan.mesh.compute)
        for rank, row in enumerate(timeline.spans):
            assert all(
                sum(seconds for _, seconds in span.collectives) <= (span.end - span.start) * (1 + 1e-9) for span in row
            )
            assert [segment.kind for segment in timeline.closing[rank]][-1] == "optimizer"
        assert any(segment.kind == "gradients" for row in timeline.closing for segment in row) == (
            "dp_replicate" in mesh or "cp" in mesh
        )


def test_what_was_read_off_the_program_is_what_was_printed(llama: gp.Parts) -> None:
    sharding = report_data(llama.compilation)["sharding"]
    calls = "\n".join(text for name, text in llama.files.items() if name.startswith(("blocks", "stage")))
    alone = ("all_gather", "all_gather_invariant", "reduce_scatter", "shard")
    beside = ("gathered_product", "gathered_products", "scattered_product")
    printed = sum(calls.count(f"{name}(") for name in (*alone, *beside))
    block, root = sharding["scopes"]
    inside, outside = (sum(len(row["transitions"]) for row in scope["rows"]) for scope in (block, root))
    assert block["count"] == 8 and inside + outside == printed
    assert sharding["transitions"] == 8 * inside + outside


def test_a_transition_s_bytes(llama: gp.Parts) -> None:
    """A ring sends half of the whole tensor from each of two ranks."""
    data = report_data(llama.compilation)
    entries = [entry for row in data["sharding"]["scopes"][0]["rows"] for entry in row["transitions"]]
    assert entries and {entry["axis"] for entry in entries} == {"tp"}
    for entry in entries:
        assert entry["forward_bytes"] == llama.plan.microbatch_size * 16 * 64 * 4 / 2
        assert {entry["from"][0], entry["to"][0]} <= set("RISP") and entry["seconds"] > 0


def test_text_of_a_cut_program(llama: gp.Parts) -> None:
    data = report_data(llama.compilation)
    assert json.loads(json.dumps(data)) == data
    text = text_of(data)
    assert max(map(len, text.splitlines())) <= 100
    assert "dp_replicate 2 · tp 2" in text and "Simulated" not in text
    whole = sum(info.numel for info in made("llama", devices=1).program.parameters.values())
    assert data["model"]["parameters"] == whole
    assert (
        "LlamaDecoderLayer x 8" in text
        and "Outside of blocks" in text
        and "optimal under the sharding cost model" in text
    )
    spec = llama.plan.parameters()["model.layers.0.self_attn.q_proj.weight"]["tp"]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("q, k, v ")]
    assert line.split()[-1] == f"{spec}@tp"
    assert "S(1) -> R" in text and "0-3" in text
    for letter in ("R", "I", "S(d)"):
        assert re.search(rf"^   {re.escape(letter)} +\w+: ", text, re.MULTILINE), letter
    page = html(data)
    assert "How tensors are sharded" in page and "S(1) -&gt; R" in page
    assert all(f"<dt>{name}</dt>" in page for name in ("I", "R", "P", "S(d)"))
    assert "pp 0: ranks 0-3" in page and "rank 0" not in page and "pp rank" not in page
    assert f"{spec}@tp:" in str(llama.plan) and "model.layers.0-7.self_attn.q_proj.weight" in str(llama.plan)


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
        return report_data(parts.compilation)["sharding"]["notes"]  # type: ignore[no-any-return]

    why = "label smoothing needs every class's logit"
    assert notes(label_smoothing=0.1) == [f"The logits are sharded over tp, but gathered before the loss: {why}."]
    assert all("cheaper" in note for note in notes())


def test_names_among_themselves() -> None:
    names = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert list(short_names([*names, "norm.weight"]).values()) == ["q", "k", "v", "o", "norm"]
    assert list(short_names(["mlp.0.weight", "mlp.2.weight", "gate"]).values()) == ["mlp.0", "mlp.2", "gate"]
    assert list(short_names(["a.q.weight", "b.q.weight"]).values()) == ["a.q", "b.q"]
    assert seconds_text(1.6e-5) == "16.0 us" and seconds_text(0) == "0 s"


def test_a_module_of_two_digits_is_not_in_the_one_whose_name_it_begins_with() -> None:
    names = ["layers.1", "layers.1.q", "layers.1.q.weight", "layers.11", "layers.11.q", "layers"]

    assert [name for name in names if is_below(name, "layers.1")] == ["layers.1.q", "layers.1.q.weight"]
    assert [name for name in names if is_at_or_below(name, "layers.1")] == names[:3]


def test_the_stages_of_the_fullest_rank_are_its_own_also_beside_ranks_of_two_digits() -> None:
    peaks = [2**20, 2**30, *[2**20] * 10]
    stages = [{"index": rank, "rank": rank} for rank in range(len(peaks))]
    predicted = {
        "peak_memory_bytes": peaks, "memory": [{"slack": 0}] * len(peaks), "stages": stages, "memory_bytes": 2**31
    }  # fmt: skip

    assert peak_text(predicted) == "1.00 GiB of 2.00 GiB (stage 1, 1.00 GiB allocated)"


# ---- narrow terminals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100])
def test_nothing_is_broken_on_a_narrow_terminal(width: int, llama: gp.Parts, gpt: gp.Parts) -> None:
    """Lines are no longer than the terminal, names of modules are whole, and each price is on a line with its unit."""
    for parts in (llama, gpt):
        wide, narrow = (text_of(parts.report, size) for size in (1000, width))
        lines = narrow.splitlines()
        assert max(map(len, lines)) <= width
        units = r"(?:ns|us|ms|s|B|KiB|MiB|GiB|MFLOP|GFLOP)"
        prices = [re.findall(rf"[\d.,]+ {units}\b", text) for text in (wide, narrow)]
        assert sorted(prices[0]) == sorted(prices[1])
        for name in {name for stage in parts.report["stages"] for name in stage["modules"]}:
            assert name in narrow, name


def test_wrapping_keeps_words_and_prices() -> None:
    text = "compute 6.36 ms · tp 43.4 ms · optimizer 433 us of model.layers.0.self_attn.q_proj.weight (1.09 GiB)"
    for width in range(10, 60):
        lines = wrapped(text, width)
        assert " ".join(lines) == text
        assert all(part in "\n".join(lines) for part in ("tp 43.4 ms", "optimizer 433 us", "(1.09 GiB)"))
    assert shortened("model.layers.0.self_attn.q_proj", 13) == "model.…q_proj"
    assert shortened("short", 12) == "short"


def test_a_name_that_is_wider_than_its_column_stands_below() -> None:
    name = "encoder.transformer_layers_of_the_first_half.0"
    stage = {"index": 0, "rank": 0, "modules": [name], "parameters": 10, "flops": 1.0}
    data = {"stages": [stage, {**stage, "index": 1, "rank": 1}], "devices": 2, "mesh": {"pp": 2}}
    assert stage_table(data, 100)[1].split()[2] == name
    below = stage_table(data, 50)
    assert [line.strip() for line in below].count(name) == 2 and max(map(len, below)) <= 8 + len(name)


# ---- one device ------------------------------------------------------------------------------------------------


def test_one_device_is_the_baseline(gpt: gp.Parts) -> None:
    """Its time is that of a plan for one device; where more take longer a warning says so."""
    alone = on_one_device(example("gpt"), gpt.plan, gp.Cluster.parse("4xCPU")).to_json()
    single = gp.plan(example("gpt"), gp.Cluster.parse("CPU"), mesh={"pp": 1, "dp_replicate": 1, "tp": 1})
    sizes = (1, 2, 4, 8)
    each = [gp.estimate(example("gpt"), replace(single, microbatch_size=size)).step_time_s for size in sizes]
    assert alone["step_time_s"] == pytest.approx(min(each)) and alone["microbatch_size"] == sizes[each.index(min(each))]
    step = gpt.report["predicted"]["step_time_s"]
    for seconds, said in ((step / 2, "4 devices take 2 times as long as one"), (3 * step, "")):
        data = with_alone(gpt.report, alone | {"step_time_s": seconds})
        warned = [line for line in data["warnings"] if "times as long" in line]
        assert bool(warned) == bool(said) and all(said in line for line in warned)
        assert ("75% of 4" in text_of(data)) == (seconds > step) and "One device" in html(data)
    assert "4 devices take as long" in text_of(with_alone(gpt.report, alone | {"step_time_s": 1.001 * step}))
    tight = with_alone(gpt.report, alone | {"fits": False, "memory_bytes": 2**20})
    assert "One device does not fit: it needs" in text_of(tight) and not any(
        "times as long" in line for line in tight["warnings"]
    )


@pytest.mark.costly
def test_a_search_says_what_one_device_takes() -> None:
    plan = gp.plan(example("gpt"), gp.Cluster.parse("2xA100"))
    assert plan.alone == on_one_device(example("gpt"), plan, replace(gp.Cluster.parse("2xA100"), headroom=HEADROOM))
    assert "One device" in str(plan)


# ---- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_fp32_on_a_device_with_faster_units_is_warned_of() -> None:
    """By about as much as a trace in bf16 says; not where the device has none, and not in bf16."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()).square().mean()

    def report(dtype: str, cluster: str) -> dict[str, Any]:
        torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        program = gp.export(Wide, (torch.randn(4096, 2048, dtype=torch_dtype),), dtype=dtype)
        return gp.partition(program, gp.plan(program, gp.Cluster.parse(cluster), mesh={"tp": 2})).report

    hinted = report("fp32", "2xH100")
    (line,) = [line for line in hinted["warnings"] if "--dtype bf16" in line]
    said = re.search(r"does 67 Tflop/s, not 989 as in bf16: .* would take about ([\d.]+) ms, not", line)
    assert said is not None
    half = report("bf16", "2xH100")
    assert float(said[1]) / 1e3 == pytest.approx(half["predicted"]["step_time_s"], rel=0.1)
    for other in (half, report("fp32", "2xCPU")):
        assert not any("--dtype bf16" in line for line in other["warnings"])


# ---- examples that depend on each other ------------------------------------------------------------------------


def test_operators_that_mix_examples_are_named_in_one_line() -> None:
    """With the batch whole, what keeps it whole, and no advice to cut it; where it is cut, what that does."""
    program = example("resnet_batchnorm")
    said = "batch_norm mixes examples (blocks.*.bn1, blocks.*.bn2: 12 modules, resnet_batchnorm.py:"
    whole = gp.plan(program, mesh={"pp": 2}, schedule="GPipe")
    cut = gp.plan(program, mesh={"pp": 2}, allow_batch_coupling=True)
    for plan, words in (
        (whole, "The batch is not split"),
        (cut, f"each of {cut.microbatches} microbatches is computed separately"),
    ):
        (line,) = [line for line in plan.warnings if "mixes examples" in line]
        assert said in line and words in line
    (idle,) = [line for line in whole.warnings if "leaves ranks idle" in line]
    assert "use" not in idle and "1 microbatch for 2 stages" in idle


def test_only_microbatches_that_may_be_are_advised() -> None:
    assert "; use 4 (--microbatch-size 2)" in (bubble_warning("gpipe", 4, 1, 2, rows=8) or "")
    assert "; use 3 (--microbatch-size 1)" in (bubble_warning("gpipe", 4, 1, 1, rows=3) or "")
    for rows in (1, None):
        assert "use" not in (bubble_warning("gpipe", 4, 1, 1, rows=rows) or "use")


def test_the_next_commands_can_be_pasted() -> None:
    commands = next_commands("my programs/out", "train")
    assert len(commands) == 3
    assert all("my programs/out" in shlex.split(line) for line in commands)


def test_a_written_buffer_that_checkpoints_leave_out_is_warned_of() -> None:
    class Counting(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()), persistent=persistent)
            self.register_buffer("scale", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.linear(x) * self.scale / self.seen

    for persistent in (True, False):
        program = gp.export(Counting(persistent), (torch.randn(4, 4),), loss_fn=lambda output: output.square().mean())
        warnings = gp.partition(program, gp.plan(program, 1)).report["warnings"]
        assert [line for line in warnings if line.startswith("The model writes seen, which")] == warnings
        assert len(warnings) == (not persistent)
