"""What a step will take: the API, the command, what runners-up lose, and formulas."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from rich.console import Console

import graphpar as gp
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.memory import Memory
from graphpar.cost_models.timelines import Conditions, StageEstimate
from graphpar.hardware.cluster import HEADROOM
from graphpar.passes.planning.candidates import Brief, why_not
from graphpar.passes.planning.explain import B, S, in_sequence
from graphpar.report.report import render
from graphpar.text import bytes_text
from tests.cli.test_cli import GPT, HEAD_FIRST, compiled, folder, message, output
from tests.tools.programs import example, example_file

__all__ = ["folder"]  # a fixture
PREDICTED = {
    "step_time_s",
    "mfu",
    "bubble_fraction",
    "peak_memory_bytes",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
}
H100 = gp.Cluster.parse("4xH100")


def small(cluster: gp.Cluster, memory_bytes: int) -> gp.Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes, communicator_bytes=0))


@pytest.fixture(scope="module")
def searched() -> gp.Plan:
    return gp.plan(example("gpt"), H100, global_batch=16)


# ---- Python ----------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_a_searched_plan_says_what_it_takes(searched: gp.Plan) -> None:
    assert searched.predicted is not None
    assert gp.estimate(example("gpt"), searched) == searched.predicted
    assert gp.estimate(example("gpt"), gp.Plan.from_json(searched.to_json())) == searched.predicted


def test_a_pinned_plan_is_predicted_where_it_is_for() -> None:
    program = example("gpt")
    there = gp.plan(program, H100, mesh={"pp": 2, "tp": 2})
    assert there.predicted == gp.estimate(program, there) and there.found is not None
    alone = gp.plan(program, mesh={"pp": 2, "tp": 2})
    assert alone.predicted is None
    assert gp.estimate(program, alone) == gp.estimate(program, alone, gp.Cluster.of_this_machine(4))
    slower = gp.estimate(program, there, gp.Cluster.parse("2x2xV100"))
    assert slower.step_time_s > there.predicted.step_time_s
    assert slower.cluster == "2x2xV100-SXM2-16GB"


def test_parts_add_up() -> None:
    program = example("llama")
    for mesh in ({"pp": 4}, {"pp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}):
        estimate = gp.estimate(program, gp.plan(program, mesh=mesh), H100)
        assert sum(estimate.parts_s.values()) == pytest.approx(estimate.step_time_s)
        assert estimate.step_time_s == pytest.approx(estimate.pipeline_s + estimate.gradients_s + estimate.optimizer_s)
        assert set(estimate.communication_s) == set(mesh) == set(estimate.exposed_s)
        assert min(estimate.exposed_s.values()) >= 0
        assert estimate.exposed_communication_s == pytest.approx(sum(estimate.exposed_s.values()))
        data = estimate.to_json()
        assert set(data) >= PREDICTED and json.loads(json.dumps(data)) == data
        assert data["peak_memory_bytes"] == [sum(memory.values()) for memory in data["memory"]]
        rest = [
            sum(nbytes for part, nbytes in memory.items() if part not in ("slack", "communicators"))
            for memory in data["memory"]
        ]
        assert data["allocated_memory_bytes"] == rest and max(rest) < max(data["peak_memory_bytes"])
        assert [stage["index"] for stage in data["stages"]] == list(range(mesh.get("pp", 1)))


def test_what_is_sent_once_a_stage_is_in_its_stage() -> None:
    program = example("gpt")
    estimate = gp.estimate(program, gp.plan(program, mesh={"pp": 4}), H100)
    first, *_, last = estimate.stages
    assert first.sent_s == first.returned_s > 0 == last.sent_s == last.returned_s


@pytest.mark.costly
def test_inference_runs_forwards_alone() -> None:
    file = example_file("gpt")
    program = gp.export(file.model, file.args, file.kwargs, mode="infer")
    for schedule in ("GPipe", "1F1B"):
        plan = gp.plan(program, H100, mesh={"pp": 4, "dp_replicate": 1, "tp": 1}, schedule=schedule, microbatch_size=1)
        estimate = gp.estimate(program, plan)
        forward, sent = ([getattr(stage, name) for stage in estimate.stages] for name in ("forward_s", "sent_s"))
        assert all(memory.gradients == memory.optimizer == 0 for memory in estimate.memory)
        assert estimate.optimizer_s == 0 == sum(stage.backward_s + stage.returned_s for stage in estimate.stages)
        slowest = max(forward)
        before, after = forward[: forward.index(slowest)], forward[forward.index(slowest) + 1 :]
        once = sum(before) + sum(after) + sum(sent) + plan.microbatches * slowest
        assert estimate.step_time_s == pytest.approx(once, rel=1e-6)


def test_what_the_user_gets_wrong(searched: gp.Plan) -> None:
    with pytest.raises(gp.GraphparError, match="is for 4 devices, but the cluster 8xH100-SXM-80GB has 8"):
        gp.estimate(example("gpt"), searched, gp.Cluster.parse("8xH100"))
    with pytest.raises(gp.GraphparError) as other:
        gp.estimate(example("llama"), searched)
    said = str(other.value)
    assert "is for 'GPT', but the program is 'LlamaForCausalLM'" in said and "LlamaDecoderLayer x 8" in said
    assert "only the plan has blocks, head, norm" in said and "only the program has lm_head, model." in said
    shorter = json.loads(json.dumps(searched.to_json()))
    shorter["stages"][-1]["modules"] = [
        name for name in shorter["stages"][-1]["modules"] if not name.startswith("blocks.7")
    ]
    with pytest.raises(gp.GraphparError, match=r"is for another 'GPT': only the program has blocks\.7"):
        gp.partition(example("gpt"), gp.Plan.from_json(shorter))


# ---- what others lose ------------------------------------------------------------------------------------------


def made(stages: int = 1, work: tuple[float, ...] = (), memory: int = 10, room: int = 100, **parts: float) -> Estimate:
    """An estimate with these parts of its step; a flop takes a second of compute at the peak's half."""
    step = sum(parts.values())
    times = work or (1.0,) * stages
    return Estimate(
        step_time_s=step,
        mfu=0.5 * 6.0 / step,
        bubble_fraction=0.0,
        memory=tuple(Memory(parameters=memory - place) for place in range(stages)),
        compute_s=parts.get("compute", 0.0),
        communication_s={},
        exposed_s={},
        parts_s=parts,
        pipeline_s=step,
        gradients_s=0.0,
        optimizer_s=0.0,
        conditions=Conditions(),
        closings=(),
        stages=tuple(
            StageEstimate(place, place, (place, place + 1), time, 0.0, 0.0, 1, 0.0, 0.0)
            for place, time in enumerate(times)
        ),
        cluster="",
        device="",
        memory_bytes=room,
        figures="",
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (made(compute=8.0, tp=1.0), "computes 8.00 s, not 6.00 s: 37.5% of the peak, not 50%"),
        (made(compute=6.5, tp=4.0), "tp traffic 4.00 s exposed, not 1.00 s"),
        (made(compute=6.0, tp=1.0, gradients=3.0), "sums of gradients 3.00 s exposed"),
        (made(compute=6.0, tp=1.0, host=1.0, optimizer=0.5), "devices wait 1.00 s for the host to start operators"),
        (made(compute=6.0, optimizer=2.0), "optimizer step of 2.00 s"),
        (made(compute=6.0, ep=2.0), "ep traffic 2.00 s exposed"),
        (made(2, compute=6.0, bubble=2.0, pp=1.0), "bubble of 2.00 s: 22.2% of the step"),
        (made(2, compute=6.0, bubble=1.0, pp=3.0), "waits 3.00 s for transfers between stages"),
        (
            made(2, (1.0, 3.0), compute=7.5, bubble=1.0),
            "uneven stages: the slowest rank has 1.50x the mean to do, not 1.00x",
        ),
        (made(compute=6.0, tp=1.0), "as fast; the simpler of the two was taken"),
        (made(2, memory=912, room=776, compute=1.0), "does not fit: stage 0 needs 912 B of 776 B"),
        (made(1, memory=912, room=776, compute=1.0), "does not fit: a device needs 912 B of 776 B"),
    ],
)
def test_why_not(other: Estimate, said: str) -> None:
    assert why_not(Brief.of(made(compute=6.0, tp=1.0)), Brief.of(other)) == said


def test_the_search_says_why_not(searched: gp.Plan) -> None:
    assert searched.found is not None and searched.predicted is not None
    data = searched.found.to_json()
    assert data["considered"] >= data["priced"] > len(data["alternatives"]) > 1 and data["optimality_gap"] == 0.0
    for other in data["alternatives"]:
        assert other["fits"] and other["step_time_s"] >= searched.predicted.step_time_s
        assert set(other) >= {"mesh", "schedule", "microbatches", "microbatch_size", "step_time_s", "why_not"}
        assert re.search(r"\d", other["why_not"])


@pytest.mark.costly
def test_what_would_be_faster_but_does_not_fit() -> None:
    """With room for the chosen plan's rank alone the same plan is chosen; with less than that, it is told of."""
    program = example("gpt")
    best = gp.plan(program, small(H100, H100.device.memory_bytes), global_batch=16)
    assert best.predicted is not None
    tight = gp.plan(program, small(H100, max(best.predicted.peak_memory_bytes) - 1), global_batch=16)
    assert tight.predicted is not None and tight.found is not None
    assert max(tight.predicted.peak_memory_bytes) < max(best.predicted.peak_memory_bytes)
    assert tight.predicted.step_time_s > best.predicted.step_time_s
    for other in tight.found.misfits:
        assert other.candidate.mesh != tight.mesh and other.estimate.step_time_s < tight.predicted.step_time_s
        assert re.fullmatch(r"does not fit: (stages? [\d, ]+|a device) needs? .* of .*", tight.found.why_not(other))


# ---- reports ---------------------------------------------------------------------------------------------------


def text_of(data: Mapping[str, Any]) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        render(data, console, "out", 1.25)
    return captured.get()


def test_the_printed_report_leads_with_the_answer(searched: gp.Plan) -> None:
    parts = gp.partition(example("gpt"), searched)
    text = text_of(parts.report | {"search": json.loads(parts.files["search.json"])})
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    labels = [line.split()[0] for line in lines[2:8] if re.match(" [A-Z]", line)]
    assert labels[:2] == ["Plan", "Predicted"] and "Searched" in labels
    assert re.search(r"Predicted +[\d.]+ ± [\d.]+ [mu]?s a step · [\d.]+% MFU", text) and "of 77.6 GiB" in text
    assert re.search(r"Searched +[\d,]+ plans in 1\.2 s, \d+ priced", text)
    assert "Runners-up" in text and "Assumed    fp32, AdamW, recomputation none" in text
    assert "published figures" in " ".join(text.split())
    assert "Predicted" in str(searched) and "Runners-up" in str(searched)
    assert "Runners-up" in parts.files["report.html"]


def test_bars_are_relative_to_the_devices_memory() -> None:
    program = example("gpt")
    plan = gp.plan(program, mesh={"pp": 2})
    alone = small(gp.Cluster.parse("2xH100"), 2**30)
    half = small(alone, 2 * max(gp.estimate(program, plan, alone).peak_memory_bytes))
    parts = gp.partition(program, replace(plan, cluster=half))
    bars = [line.count("█") for line in text_of(parts.report).splitlines() if re.match(r" +[01] +[01]  ", line)]
    assert len(bars) == 2 and max(bars) == 6  # of 12 blocks


def test_plans_leave_a_share_of_memory_free() -> None:
    program = example("gpt")
    peak = max(gp.plan(program, small(H100, 2**40), global_batch=16).predicted.peak_memory_bytes)
    full = small(H100, peak)
    taken = gp.plan(program, full, global_batch=16, memory_headroom=0)
    assert max(taken.predicted.peak_memory_bytes) == peak and taken.predicted.missing_bytes == 0
    other = gp.plan(program, full, global_batch=16)
    assert max(other.predicted.peak_memory_bytes) <= (1 - HEADROOM) * peak and other.cluster.headroom == HEADROOM
    pinned = gp.plan(program, full, mesh={**taken.mesh.degrees()}, schedule=taken.schedule, microbatch_size=taken.microbatch_size,
                     global_batch=16, recompute=taken.recompute, zero=taken.zero or None)  # fmt: skip
    assert pinned.predicted.missing_bytes > 0
    assert "stay free)" in " ".join(text_of(gp.partition(program, pinned).report).split())
    assert gp.plan(program, replace(H100, headroom=0.02), mesh={"tp": 4}).cluster.headroom == 0.02
    assert gp.plan(program, "2xCPU").cluster.headroom is None
    assert gp.plan(program, replace(H100, headroom=0.0), mesh={"tp": 4}).predicted.headroom_bytes == 0
    with pytest.raises(
        gp.GraphparError, match=r"memory_headroom is for a plan that is searched, or priced on a cluster"
    ):
        gp.plan(program, mesh={"tp": 2}, memory_headroom=0.5)
    with pytest.raises(gp.GraphparError, match=r"memory_headroom is 1; it must be a share from 0 to below 1"):
        gp.plan(program, "2xH100", memory_headroom=1)


def test_reserved_and_allocated_memory_are_two_numbers() -> None:
    parts = gp.partition(
        example("gpt"), gp.plan(example("gpt"), gp.Cluster.parse("2xH100"), mesh={"pp": 2}, schedule="1F1B")
    )
    predicted = parts.report["predicted"]
    fullest = max(range(2), key=predicted["peak_memory_bytes"].__getitem__)
    peak, allocated = (predicted[name][fullest] for name in ("peak_memory_bytes", "allocated_memory_bytes"))
    reserved = peak - predicted["memory"][fullest]["communicators"]
    assert allocated < reserved < peak
    said = (
        f"{bytes_text(peak)} of {bytes_text(predicted['memory_bytes'])} (stage {fullest}, {bytes_text(allocated)} allocated, "
        f"{bytes_text(reserved)} reserved, the rest NCCL's; {bytes_text(predicted['memory_bytes'] - peak)} free)"
    )
    assert f"peak {said}" in " ".join(text_of(parts.report).split()) and said in html.unescape(
        parts.files["report.html"]
    )


@pytest.mark.costly
def test_a_pinned_plan_that_does_not_fit_warns() -> None:
    program = example("gpt")
    plan = gp.plan(program, small(H100, 2**20), mesh={"pp": 4})
    parts = gp.partition(program, plan)
    first = parts.report["warnings"][0]
    room = r"973 KiB \(5% of 1\.00 MiB stay free\)"
    said = r"This plan does not fit: (stage \d needs|stages \d(, \d)* need) [\d.,]+ [KM]iB of "
    said += rf"{room} on 4xH100-SXM-80GB, [\d.,]+ [KM]?i?B too much"
    assert re.match(said, first)
    assert "IT DOES NOT FIT" in " ".join(text_of(parts.report).split()) and "does not fit" in parts.files["report.html"]
    assert "does not fit" in str(plan)


def test_a_bubble_that_is_predicted_is_not_warned_of(searched: gp.Plan) -> None:
    few = {"mesh": {"pp": 4}, "schedule": "GPipe", "global_batch": 16, "microbatch_size": 8}
    for cluster, warned in ((None, True), (H100, False)):
        plan = gp.plan(example("gpt"), cluster, **few)
        assert any("leaves ranks idle" in line for line in plan.warnings) == warned
    assert not any("leaves ranks idle" in line for line in searched.warnings)


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_compile_says_what_it_searched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [GPT, "--cluster", "4xH100", "--batch", "16"]
    data = compiled(capsys, *arguments, "-o", "out", "--top", "2")
    assert set(data["predicted"]) >= PREDICTED and len(data["search"]["alternatives"]) == 2
    assert data["search"] == json.loads((folder / "out" / "search.json").read_text())
    printed = output(capsys, "report", "out")
    assert "Runners-up" in printed and data["search"]["alternatives"][0]["why_not"][:20] in printed
    again = compiled(capsys, *arguments, "-o", "again", "--top", "0")
    assert again["plan"] == data["plan"] and again["search"]["alternatives"] == []
    for name in ("plan.json", "train.py", "stage_0.py"):
        assert (folder / "again" / name).read_bytes() == (folder / "out" / name).read_bytes()
    reused = compiled(capsys, GPT, "--plan", "out", "-o", "reused")
    assert reused["predicted"] == data["predicted"] and reused["search"]["optimality_gap"] is None
    assert (folder / "reused" / "plan.json").read_bytes() == (folder / "out" / "plan.json").read_bytes()
    assert "--top: it is -1" in message(capsys, "compile", GPT, "--top", "-1")


def test_estimate_is_what_compile_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = compiled(capsys, HEAD_FIRST, "--cluster", "2xA100", "--mesh", "pp=2", "-o", "out")
    for plan in ("out", "out/plan.json"):
        estimated = json.loads(output(capsys, "estimate", HEAD_FIRST, "--plan", plan, "--json"))
        assert set(estimated) == set(data) - {"search", "steps"}
        assert estimated["predicted"] == data["predicted"] and estimated["plan"] == data["plan"]
    printed = output(capsys, "estimate", HEAD_FIRST, "--plan", "out")
    assert "Predicted" in printed and " on 2x" not in printed
    elsewhere = output(capsys, "estimate", HEAD_FIRST, "--plan", "out", "--cluster", "2x1xV100")
    assert elsewhere.splitlines()[0].endswith("· 2x1xV100-SXM2-16GB") and "made for 2xA100-SXM-80GB" in " ".join(
        elsewhere.split()
    )
    assert "is for 2 devices" in message(capsys, "estimate", HEAD_FIRST, "--plan", "out", "--cluster", "4xA100")
    assert "is for 'HeadFirst', but the program is 'GPT'" in message(capsys, "estimate", GPT, "--plan", "out")


def test_memory_is_a_table_without_a_plan_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [HEAD_FIRST, "--mesh", "pp=2", "--cluster", "2xA100", "--batch", "8", "--microbatch-size", "2"]
    printed = output(capsys, "estimate", *given, "--memory")
    memory = json.loads(output(capsys, "estimate", *given, "--memory", "--json"))["predicted"]
    peaks, rows = memory["peak_memory_bytes"], [line.split() for line in printed.splitlines()]
    assert next(row for row in rows if row[:2] == ["A", "rank"])[-8:-6] == ["between", "steps"]
    together = next(row for row in rows if row[:1] == ["together"])
    assert " ".join(together[-2:]) == bytes_text(max(peaks))
    for rank, peak in enumerate(peaks):
        assert any(row[0] == str(rank) and " ".join(row[-2:]) == bytes_text(peak) for row in rows if row)
    parts = memory["memory"][peaks.index(max(peaks))]
    assert all(part.replace("_", " ") in printed for part, size in parts.items() if size)
    compiled(capsys, HEAD_FIRST, "--mesh", "pp=2", "-o", "out")
    tight = [*given, "--memory-headroom", "0.9999", "--memory"]
    assert "This plan does not fit: stage" in output(capsys, "estimate", *tight)
    assert "This plan" not in printed
    assert "--mesh is decided by the plan" in message(capsys, "estimate", HEAD_FIRST, "--plan", "out", "--mesh", "pp=2")


@pytest.mark.costly
def test_a_plan_of_a_smaller_model_is_priced_with_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(HEAD_FIRST).read_text()
    (folder / "model.py").write_text(source)
    compiled(capsys, "model.py", "--mesh", "pp=2", "-o", "out")
    kept = json.loads((folder / "out" / "report.json").read_text())
    kept["report"]["model"]["parameters"] = 1000
    (folder / "out" / "report.json").write_text(json.dumps(kept))
    assert "made for a model of 1.00 K parameters" in output(capsys, "estimate", "model.py", "--plan", "out")


# ---- formulas --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_formulas_of_a_transformer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products: 6 flops a weight and token, of 12 width^2 weights a block; causal attention: 2 width s^2 forward, 2.5 times that back."""
    compiled(capsys, GPT, "--mesh", "pp=4", "-o", "out")
    data = json.loads(output(capsys, "estimate", GPT, "--plan", "out", "--formula", "--json"))["formula"]
    assert set(data["variables"]) == {"b", "s"} and data["notes"] == []
    flops = sympy.sympify(data["stages"][1]["flops"], locals={"b": B, "s": S})
    assert sympy.expand(flops - 2 * (6 * 12 * 64**2 * B * S + 3.5 * 2 * 64 * B * S**2)) == 0
    assert set(data["stages"][1]) == {"flops", "memory bytes", "kept bytes"}
    printed = " ".join(output(capsys, "estimate", GPT, "--plan", "out", "--formula").split())
    assert "Stages 1-2" in printed and "s = the length of the sequence, 16 in the example" in printed


@pytest.mark.slow
def test_formulas_with_collectives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(capsys, str(Path(GPT).parent / "llama.py"), "--mesh", "tp=2", "-o", "out")
    arguments = ["estimate", str(Path(GPT).parent / "llama.py"), "--plan", "out", "--formula", "--json"]
    stage = json.loads(output(capsys, *arguments))["formula"]["stages"][0]
    assert sympy.degree(sympy.sympify(stage["tp bytes"], locals={"b": B, "s": S}), S) == 1


@pytest.mark.costly
def test_formulas_of_what_has_no_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(GPT).parent / "resnet.py")
    compiled(capsys, model, "--mesh", "pp=2", "-o", "out")
    data = json.loads(output(capsys, "estimate", model, "--plan", "out", "--formula", "--json"))["formula"]
    assert set(data["variables"]) == {"b"} and data["notes"][0].startswith("Not in the length of the sequence: ")
    assert "b" in data["stages"][0]["flops"] and "s" not in data["stages"][0]["flops"]


def test_a_formula_in_the_sequence_is_checked() -> None:
    def samples(value: sympy.Expr, *lengths: int) -> dict[int, list[dict[str, sympy.Expr]]]:
        return {length: [{"flops": sympy.expand(value.subs(S, length))}] for length in lengths}

    quadratic = 3 * B * S**2 + 7 * B * S + 5 * S + 11
    assert in_sequence(samples(quadratic, 4, 8, 16, 12)) == [{"flops": quadratic}]
    assert in_sequence(samples(B * S**3, 4, 8, 16, 12)) == [{}]
    assert in_sequence(samples(B * S, 4, 8) | {16: [{"other": B}], 12: [{"flops": 12 * B}]}) is None


def test_an_estimate_leaves_as_much_memory_free_as_the_plan() -> None:
    program, cluster = example("head_first"), gp.Cluster.parse("2xA100")
    plan = gp.plan(program, cluster, mesh={"tp": 2})
    assert plan.predicted is not None and gp.estimate(program, plan, cluster).to_json() == plan.predicted.to_json()
