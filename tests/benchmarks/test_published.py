"""The benchmark of published runs: scores against hand-computed cases, rows read, placements, and a file priced from end to end."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import published
from benchmarks.fit_devices import FIGURES, Array, changed, least_squares, samples
from benchmarks.published_folded import mesh_of, places
from benchmarks.published_models import Experts, Shape
from benchmarks.published_prices import few, layout_of, price_row, pricing_of, starts
from benchmarks.published_programs import (
    Build,
    Degrees,
    lowered,
    parts,
    with_casts,
    with_forwards_again,
    with_gathers_again,
    with_heads,
    with_kernels_of_loss,
    with_peak_of_loss,
    with_pieces_sent,
    with_scores_again,
    with_shards_kept,
    with_sums_apart,
)
from benchmarks.published_rows import Row, Unpriced, read, rows_of
from benchmarks.published_scores import Outcome, kendall, mean, regret, score
from benchmarks.published_sources import SOURCES, held_out, with_recipe
from graphpar.cost_models.work import Collective, Phase, Product, Size, Traffic, Work
from graphpar.ir.program import operator_name
from graphpar.operators.transitions import TABLE
from graphpar.schedules.action_table import validate_table
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import simulate

FILE = Path(__file__).parents[1] / "data" / "published.jsonl"
ROWS = {row["id"]: row for row in rows_of(FILE)}
MOVES = {row.function for row in TABLE}
SMALL = Shape(64, 4, 4, 16, 256, 512, 32)


# ---- scores ----------------------------------------------------------------------------------------------------


def test_kendall_by_hand() -> None:
    assert kendall([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall([(3, 10), (2, 20), (1, 30)]) == -1
    assert kendall([(1, 10), (3, 20), (2, 30)]) == pytest.approx((2 - 1) / 3)
    # a tie of predictions: of 3 pairs 2 agree, 2 are untied here and 3 there
    assert kendall([(1, 10), (1, 20), (2, 30)]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert kendall([(1, 10), (1, 20), (1, 30)]) == 0


def test_regret_by_hand() -> None:
    assert regret([(1, 12), (2, 10), (3, 30)]) == pytest.approx(0.2)
    assert regret([(2, 10), (3, 30)]) == 0
    assert regret([(1, 10), (1, 15), (2, 30)]) == pytest.approx(0.5)  # a tie is not luck


def test_means_are_weighted() -> None:
    assert mean([]) is None
    assert mean([1, 4]) == 2.5
    assert mean([1, 4], [3, 1]) == pytest.approx(1.75)


def test_scores_by_hand() -> None:
    scores = score([
        Outcome("a", "s", group="g", step_time_s=(1.1, 1.0), fits=True, ran=True),
        Outcome("b", "s", group="g", step_time_s=(1.8, 2.0), fits=False, ran=True),
        Outcome("c", "s", group="g", step_time_s=(1.0, 4.0), memory_bytes=(90, 100), fits=True, ran=False),
        Outcome("d", "s", group="alone", step_time_s=(3.0, 3.0)),
        Outcome("e", "s", fits=False, ran=False, bubble=(0.25, 0.24)),
    ])  # fmt: skip
    assert (scores.rows, scores.groups, scores.grouped, scores.outcomes, scores.memories, scores.bubbles) == (
        4,
        1,
        3,
        4,
        1,
        1,
    )
    assert scores.mape == pytest.approx((0.1 + 0.1 + 0.75 + 0) / 4)
    assert scores.bias == pytest.approx((0.1 - 0.1 - 0.75 + 0) / 4)
    assert scores.tau == pytest.approx((1 - 2) / 3)
    assert scores.regret == pytest.approx(3.0)
    assert scores.oom_accuracy == pytest.approx(2 / 4)
    assert scores.false_fit == pytest.approx(1 / 4)
    assert scores.memory == pytest.approx(0.1)
    assert scores.bubble == pytest.approx(1.0)


def test_groups_weigh_by_their_rows() -> None:
    right = [Outcome(str(n), "s", group="long", step_time_s=(n, n)) for n in range(1, 7)]
    wrong = [Outcome(str(n), "s", group="short", step_time_s=(n, 9 - n)) for n in range(1, 4)]
    assert score([*right, *wrong]).tau == pytest.approx((6 * 1 + 3 * -1) / 9)


# ---- rows ------------------------------------------------------------------------------------------------------


def altered(name: str, **parts: dict[str, Any]) -> dict[str, Any]:
    return {key: {**value, **parts[key]} if key in parts else value for key, value in ROWS[name].items()}


def test_a_row_is_read() -> None:
    row = read(ROWS["vtrain_multi:a"])
    assert row.cluster.nodes == 2 and row.cluster.inter_node.bytes_per_s == 12.5e9  # 800 Gb/s a node of 8
    assert (row.microbatches, row.replicas, row.degrees["tp"], row.degrees["pp"]) == (4, 2, 4, 2)
    assert row.shape.vocab == 1024 and row.shape.vocab % (128 * 4) == 0  # 1000, padded
    assert row.shape.attention == "softmax" and row.shape.dropout == 0.1 and row.dtype == "fp16"
    assert row.counted and not read({**ROWS["vtrain_multi:a"], "tags": ["repeat"]}).counted


def test_what_is_not_printed_is_not_guessed() -> None:
    for section, name in (("parallel", "pp"), ("batch", "global"), ("parallel", "dp")):
        with pytest.raises(Unpriced, match=f"{name} is not printed"):
            read(altered("vtrain_multi:a", **{section: {name: None}}))
    with pytest.raises(Unpriced, match="take 32 devices, but 16 are printed"):
        read(altered("vtrain_multi:a", parallel={"dp": 4}))
    with pytest.raises(Unpriced, match="no multiple of 2 replicas x 3 rows"):
        read(altered("vtrain_multi:a", batch={"micro": 3}))


def test_what_is_taken_for_granted_is_said() -> None:
    assert read(ROWS["megatron_bridge:a"]).assumed == ("nothing is recomputed",)
    assert read(ROWS["vtrain_multi:a"]).assumed == ()


def test_a_source_without_a_description_is_priced_by_a_stated_default_and_scored_apart() -> None:
    row = read({**ROWS["vtrain_multi:a"], "source": "elsewhere"})
    assert row.assumed == ("it ran as Megatron Core does",) and not row.described and not row.counted


@pytest.mark.costly
def test_memory_counts_only_where_it_is_printed_what_is_recomputed() -> None:
    found = [published.priced(ROWS[name]) for name in ("megatron_bridge:a", "vtrain_multi:a")]
    results = [each for each in found if isinstance(each, published.Priced)]
    assert [each.row.recompute_printed for each in results] == [False, True]
    tables = published.tables(results)
    assert tables["all"]["everything"].outcomes == 2 and tables["counted"]["everything"].outcomes == 1
    assert tables["recomputation not printed"]["everything"].outcomes == 1
    assert tables["counted"]["everything"].rows == 2


def test_how_a_source_ran_is_said_where_it_is_not_as_a_program_of_graphpars() -> None:
    found = [published.priced(ROWS[name]) for name in ("vtrain_multi:a",)]
    said = published.ran_as([each for each in found if isinstance(each, published.Priced)])
    assert said["vtrain_multi"]["overlap_gradients"] is False and said["vtrain_multi"]["wait_for_sends"] is True
    assert "optimizer" not in said["vtrain_multi"]


def test_step_times_come_from_what_is_printed_first() -> None:
    raw = {**ROWS["vtrain_multi:a"], "measured": {}, "derived": {"step_time_s_from_flops": 3.0}}
    assert read(raw).measured.step_time_s == 3.0
    assert read({**raw, "derived": {"step_time_s": 2.0, "step_time_s_from_flops": 3.0}}).measured.step_time_s == 2.0


def test_about_a_third_of_all_names_is_held_out() -> None:
    assert held_out("hagemann_layouts") and not held_out("vtrain_single")
    assert 0.25 < sum(held_out(f"source_{number}") for number in range(1000)) / 1000 < 0.42
    assert any(map(held_out, SOURCES)) and not all(map(held_out, SOURCES))


# ---- programs --------------------------------------------------------------------------------------------------


def build(cut: Degrees, kind: str = "none", fused: bool = True) -> Build:
    return Build(cut, "bf16", False, True, fused, 4, kind=kind)


def moved(cut: Degrees, shape: Shape = SMALL) -> Counter[str]:
    """How often each transition stands in a block."""
    (block,) = lowered(shape, cut, "bf16", False, True).blocks.values()
    return Counter(operator_name(node) for node in block.graph.nodes if operator_name(node) in MOVES)


@pytest.mark.costly
@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, gated=True, rotary=True, rms=True, biases=False, tied=False, kv_heads=2),
        replace(SMALL, attention="softmax", dropout=0.1),
    ],
    ids=["gpt", "llama", "scores"],
)
@pytest.mark.sampled(1 / 2)
def test_the_placement_is_megatrons(shape: Shape) -> None:
    assert moved(Degrees(1, False), shape) == {}
    assert moved(Degrees(2, False), shape) == {"all_reduce": 2, "sum_gradient": 2}
    assert moved(Degrees(2, True), shape) == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.costly
def test_each_rank_of_tp_norms_all_of_its_rows_unless_the_sequence_is_divided() -> None:
    """Placements that nothing pins: dividing a norm of single operators would be cheaper, but Megatron-LM's ranks do not."""
    shape = replace(SMALL, hidden=4096, heads=32, kv_heads=32, head_dim=128, seq=1024, composed_norm=True, rms=True)
    assert moved(Degrees(4, False), shape) == {"all_reduce": 2, "sum_gradient": 2}


@pytest.mark.costly
def test_a_gathered_loss_is_of_all_logits_on_every_rank() -> None:
    shape = replace(SMALL, vocab=4096, tied=False, biases=False)
    whole, two = (parts(replace(shape, loss="gathered"), build(Degrees(tp, False))).last for tp in (1, 2))
    divided = parts(shape, build(Degrees(2, False))).last
    of_softmax = 4 * shape.seq * shape.vocab  # a row's, in 32 bits
    assert whole.kind.memory.inside.at(8) >= 8 * of_softmax
    assert two.kind.memory.inside.at(8) == pytest.approx(whole.kind.memory.inside.at(8), rel=0.01)
    assert divided.kind.memory.inside.at(8) < 0.6 * two.kind.memory.inside.at(8)


@pytest.mark.costly
def test_products_of_their_own_are_as_many_flops_as_merged_ones() -> None:
    shape = replace(SMALL, gated=True, rotary=True, rms=True, biases=False, tied=False, kv_heads=2)
    merged, single = (parts(replace(shape, merged=flag), build(Degrees(1, False))).other for flag in (True, False))
    assert merged is not None and single is not None
    assert merged.kind.work.flops(4) == single.kind.work.flops(4)
    assert moved(Degrees(2, True), replace(shape, merged=False)) == {"all_gather": 2, "reduce_scatter": 2}


def test_selective_checkpointing_keeps_every_second_product_and_attention() -> None:
    """By hand, in widths of a value of two bytes: the block's input, q, v (half as many heads), attention's output and the sums of its
    rows, the gate, and what the block adds at its end."""
    shape = Shape(64, 4, 2, 16, 256, 512, 32, gated=True, rotary=True, rms=True, biases=False, tied=False, merged=False)
    block = parts(shape, build(Degrees(1, False), "selective")).other
    assert block is not None
    width = 2 * 32 * 64
    given = block.kind.memory.received.at(8)
    assert given == 8 * width
    kept = block.kind.memory.inside.at(8) / (8 * width)
    assert kept == pytest.approx(1 + 0.5 + 1 + 4 + 1, abs=0.6)  # q, v, attention, gate, down, and small sums of rows
    assert {row.phase for row in block.kind.again.work.rows} == {Phase.FORWARD}
    products = sum(times for row, times in block.kind.again.work.rows.items() if isinstance(row, Product))
    assert products == 3  # k, out and up


def test_megatrons_ranks_keep_shards_of_the_sequence_in_no_more_time() -> None:
    cut = Degrees(2, True)
    plain, gathering = parts(SMALL, build(cut)), parts(SMALL, build(cut, "gathers"))
    kept = with_shards_kept(gathering, plain).other
    assert kept is not None and plain.other is not None and gathering.other is not None
    assert (
        kept.kind.memory.inside.at(8) == gathering.other.kind.memory.inside.at(8) < plain.other.kind.memory.inside.at(8)
    )
    assert kept.kind.work == plain.other.kind.work and not kept.kind.again.work.rows


def test_torchtitans_blocks_gather_again_what_selective_checkpointing_would_keep() -> None:
    cut = Degrees(2, True)
    plain, selective, gathering = (parts(SMALL, build(cut, kind)) for kind in ("none", "selective", "gathers"))
    found = with_gathers_again(selective, plain, gathering).other
    assert found is not None and selective.other is not None
    assert found.kind.memory.inside.at(8) < selective.other.kind.memory.inside.at(8)
    gathers = [row for row in found.kind.again.work.rows if isinstance(row, Collective) and row.kind == "all-gather"]
    assert gathers


def test_a_message_is_sent_in_pieces() -> None:
    made = parts(SMALL, build(Degrees(2, False)))
    assert made.other is not None
    ((whole, gradient),) = made.other.kind.sends
    split = with_pieces_sent(made, 2).other
    assert split is not None
    ((piece, same),) = split.kind.sends
    assert piece.at(4) == whole.at(4) / 2 and same == gradient
    assert split.kind.memory is made.other.kind.memory and split.kind.work == made.other.kind.work


def test_a_loss_needs_its_own_bytes_at_its_peak() -> None:
    made = parts(SMALL, build(Degrees(1, False)))
    kept, needed = made.last.kind.memory.inside.per_row, made.last.kind.memory.backward.per_row
    assert with_peak_of_loss(made, kept + needed / 2) is made
    more = with_peak_of_loss(made, kept + 2 * needed).last.kind.memory
    assert more.inside == made.last.kind.memory.inside
    assert more.inside.at(8) + more.backward.at(8) == pytest.approx(8 * (kept + 2 * needed), abs=1)


def test_casts_read_and_write_operands_once() -> None:
    plain = parts(SMALL, build(Degrees(1, False)))
    block, casting = plain.other, with_casts(plain, 3, hidden=0, pieces=1).other
    assert block is not None and casting is not None
    rows = [(row, times) for row, times in block.kind.work.rows.items() if isinstance(row, Product)]
    elements = {Phase.FORWARD: 0.0, Phase.INPUT: 0.0, Phase.WEIGHT: 0.0}
    for row, times in rows:
        m, n, k = (size.at(2) for size in (row.m, row.n, row.k))
        elements[row.phase] += times * (k * n if row.phase is Phase.WEIGHT else m * k + k * n)

    def traffic(work: Work, phase: Phase) -> float:
        return sum(
            t * row.nbytes.at(2) for row, t in work.rows.items() if isinstance(row, Traffic) and row.phase is phase
        )

    for phase, count in elements.items():
        more = traffic(casting.kind.work, phase) - traffic(block.kind.work, phase)
        assert more == pytest.approx(3 * count)


@pytest.mark.costly
def test_scores_that_are_made_again_are_not_kept() -> None:
    shape, cut = replace(SMALL, attention="softmax"), Degrees(1, False)
    kept, again = parts(shape, build(cut)).other, with_scores_again(shape, build(cut)).other
    assert kept is not None and again is not None
    scores = 2 * 4 * 32 * 32  # bytes of one row
    assert kept.kind.memory.inside.at(8) - again.kind.memory.inside.at(8) > 8 * scores / 2

    def products(unit: Any, phase: Phase) -> int:
        return sum(
            times for row, times in unit.kind.work.rows.items() if isinstance(row, Product) and row.phase is phase
        )

    assert products(again, Phase.FORWARD) == products(kept, Phase.FORWARD)
    assert products(again, Phase.INPUT) == products(kept, Phase.INPUT) + 2  # q @ k and shares @ v


# ---- context and expert parallelism ---


@pytest.mark.costly
def test_ring_attention_has_all_keys_on_a_part_of_the_queries() -> None:
    raw = ROWS["nemo_longseq:a"]
    ring = read(raw)
    whole = read({**raw, "parallel": {**raw["parallel"], "cp": 1}, "gpus": raw["gpus"] // 2})
    assert ring.degrees["cp"] == 2

    def block(row: Row) -> Work:
        return pricing_of(row).units[1].kind.work

    assert 2 * block(ring).flops(1) == pytest.approx(block(whole).flops(1))
    sent = {row: times for row, times in block(ring).rows.items() if isinstance(row, Collective) and row.axis == "cp"}
    shape, tp = ring.shape, ring.degrees["tp"]
    own = (
        2 * shape.kv_heads // tp * shape.head_dim * shape.seq / 2 * 2
    )  # keys and values of half of the sequence, 2 bytes each
    assert {(row.phase, row.nbytes.at(1)): times for row, times in sent.items()} == {
        (Phase.FORWARD, own): 1, (Phase.INPUT, 2 * own): 1,
    }  # fmt: skip
    assert mesh_of(ring).size == ring.cluster.size


@pytest.mark.costly
def test_experts_are_divided_and_every_rank_has_its_tokens_share() -> None:
    shape = replace(SMALL, gated=True, biases=False, tied=False, experts=Experts(8, 2, 64))
    divided = replace(shape, experts=Experts(8, 2, 64, here=2))
    one, other = (parts(each, build(Degrees(1, False))).other for each in (shape, divided))
    assert one is not None and other is not None
    assert one.kind.work.flops(8) == pytest.approx(other.kind.work.flops(8))
    held = [sum(part.elements for part in unit.held) for unit in (one, other)]
    assert held[0] - held[1] == 6 * 3 * 64 * 64


def test_full_recomputation_is_of_blocks_and_early_stopping_leaves_out_their_last_product() -> None:
    plain, early = (parts(SMALL, build(Degrees(1, False), kind)) for kind in ("none", "full"))
    blocks, everything = (with_forwards_again(early, plain, ends) for ends in (False, True))
    forward = (Phase.FORWARD,)
    for made in (blocks, everything):
        assert made.other is not None and plain.other is not None
        assert made.other.kind.again.work.flops(4) == plain.other.kind.work.flops(4, forward)
    assert not blocks.last.kind.again.work.rows
    assert everything.last.kind.again.work.flops(4) == plain.last.kind.work.flops(4, forward) > 0
    assert early.other is not None and blocks.other is not None
    down = 2 * 4 * SMALL.seq * SMALL.ffn * SMALL.hidden
    assert blocks.other.kind.again.work.flops(4) - early.other.kind.again.work.flops(4) == down


def test_what_the_last_unit_does_more() -> None:
    made = parts(SMALL, build(Degrees(1, False)))
    elements = SMALL.seq * SMALL.vocab
    loss = with_kernels_of_loss(made, {Phase.FORWARD: 36}, elements).last.kind.work
    assert Counter(loss.rows) - Counter(made.last.kind.work.rows) == {
        Traffic(Phase.FORWARD, Size(36.0 * elements, 1)): 1
    }
    assert with_heads(made, 2).last.kind.work.flops(3) == 2 * made.last.kind.work.flops(3)
    assert with_heads(made, 2).first is made.first


def test_sums_of_gradients_apart_read_and_write_each_once_more() -> None:
    made = parts(SMALL, build(Degrees(1, False)))
    block, apart = made.other, with_sums_apart(made).other
    assert block is not None and apart is not None
    (added,) = (Counter(apart.kind.work.rows) - Counter(block.kind.work.rows)).items()
    assert added == (Traffic(Phase.WEIGHT, Size(4.0 * sum(part.elements for part in block.held), 0)), 1)


def test_recipes_say_how_tokens_are_exchanged() -> None:
    plain = SOURCES["megatron_bridge"]

    def told(model: str, device: str, container: str, drops: bool = False) -> tuple[bool, bool, bool]:
        habits = with_recipe(plain, model, device, container, drops)
        return habits.sends_once, habits.overlaps_ep, habits.loops_experts

    assert told("DeepSeek-V3", "GB200-NVL72", "25.11") == (False, False, True)
    assert told("DeepSeek-V3", "GB200-NVL72", "26.06") == (True, True, False)
    assert told("DeepSeek-V3", "B200-SXM-180GB", "26.04.01") == (True, True, True)
    assert told("Qwen3-235B-A22B", "B300-SXM", "26.02.01") == (False, False, True)
    assert told("Qwen3-30B-A3B", "B200-SXM-180GB", "25.09", drops=True) == (False, False, False)


# ---- layouts and prices ----------------------------------------------------------------------------------------


def test_layers_are_divided_as_the_frameworks_do() -> None:
    assert starts(8, 4) == (0, 3, 5, 7)  # embedding + 2, 2, 2, 2 + head
    assert starts(6, 4) == (0, 2, 4, 6)  # one, two, two, one
    assert starts(5, 2) == (0, 4)
    assert starts(3, 1) == (0,)
    # embedding, 60 layers, norm and head are 63 entries: 16, 16, 16 and 15
    assert starts(60, 4, entries=True) == (0, 16, 32, 48)
    assert starts(40, 8, entries=True) == (0, 6, 12, 18, 23, 28, 33, 38)
    assert starts(3, 1, entries=True) == (0,)
    # 61 layers in 16 stages of 4, and one more in the last
    assert starts(62, 16, up=61) == (0, *range(5, 62, 4))
    assert starts(7, 4, up=6) == (0, 3, 5, 7)
    assert starts(6, 4, up=5) == (0, 2, 4, 6)  # none would be left for the last


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 1), (4, 3), (3, 2)])
@pytest.mark.sampled(1 / 2)
def test_a_pipeline_of_few_microbatches(pp: int, microbatches: int) -> None:
    table = few(pp, microbatches)
    validate_table(table, pp, microbatches)
    assert simulate(table, [1] * pp, [2] * pp).makespan == 3 * (pp - 1 + microbatches)
    assert few(4, 4) == action_table("1F1B", 4, 1, 4)


@pytest.mark.costly
def test_a_tokens_experts_are_on_fewer_places_than_there_are_experts() -> None:
    assert places(1, 8, 2) == 1
    assert places(8, 8, 2) == 2  # an expert a place
    assert places(2, 4, 2) == pytest.approx(2 * (1 - 1 / 6))  # of 6 pairs of experts one has none on this place
    raw = ROWS["megatron_bridge:a"]
    parallel = {**raw["parallel"], "tp": 1, "dp": 8, "ep": 8, "sp": False}
    model = {**raw["model"], "experts": 64, "topk": 8, "moe_ffn": 64}
    row = read({**raw, "gpus": 8, "model": model, "parallel": parallel})
    once, each = (
        pricing_of(replace(row, habits=replace(row.habits, sends_once=flag))).estimate(layout_of(row))
        for flag in (True, False)
    )
    assert 0 < once.parts_s["ep"] < each.parts_s["ep"]
    beside, looped = (
        pricing_of(replace(row, habits=replace(row.habits, overlaps_ep=flag, loops_experts=not flag))).estimate(
            layout_of(row)
        )
        for flag in (True, False)
    )
    assert beside.parts_s.get("ep", 0.0) < looped.parts_s["ep"]
    assert beside.step_time_s < looped.step_time_s


@pytest.mark.costly
@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.sampled(1 / 2)
def test_llama_405b_on_16384_devices_takes_what_was_published(stages: int) -> None:
    """Table 4 of "The Llama 3 Herd of Models" (arXiv 2407.21783) prints 400 TFLOP/s a device, which is 6.7 s a step; how many stages a
    rank had is not printed. The figures of H100 were fitted to other runs."""
    model = {
        "name": "Llama-3.1-405B",
        "layers": 126,
        "hidden": 16384,
        "heads": 128,
        "kv_heads": 8,
        "ffn": 53248,
        "vocab": 128256,
        "mlp": "swiglu",
    }
    row = {
        "id": "llama3:405b", "source": "llama3_herd", "hardware": "H100-SXM-80GB", "gpus": 16384, "model": model,
        "batch": {"global": 2048, "micro": 1, "seq": 8192}, "precision": "bf16", "recompute": "none", "schedule": "interleaved-1f1b",
        "parallel": {"tp": 8, "pp": 16, "vpp": stages, "dp": 128, "cp": 1, "ep": 1, "zero": 1, "sp": True},
        "measured": {"step_time_s": 6.7}, "tags": [],
    }  # fmt: skip
    assert price_row(read(row)).step_time_s == pytest.approx(6.7, rel=0.15)


def test_half_of_a_recomputation_is_half_way() -> None:
    row = read(ROWS["vtrain_multi:a"])
    none, half, full = (price_row(replace(row, recompute=kind)) for kind in ("none", "half", "full"))
    assert half.step_time_s == pytest.approx((none.step_time_s + full.step_time_s) / 2)
    assert none.step_time_s < full.step_time_s and none.memory_bytes > full.memory_bytes


def test_a_model_has_all_its_layers() -> None:
    row = read(ROWS["vtrain_multi:a"])
    pricing = pricing_of(row)
    assert len(pricing.units) == row.layers + 2
    parameters = sum(held.elements for unit in pricing.units for held in unit.held)
    hidden, vocab, tp = row.shape.hidden, row.shape.vocab, row.degrees["tp"]
    assert parameters * tp == pytest.approx(
        12 * hidden**2 * row.layers + 2 * vocab * hidden, rel=0.05
    )  # tied: a copy at each end


@pytest.mark.slow
def test_a_file_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    published.main([str(FILE), "--json", "--details"])
    report = json.loads(capsys.readouterr().out)
    assert report["all"]["vtrain_multi"]["rows"] == 3 and report["counted"]["vtrain_multi"]["rows"] == 3
    assert report["all"]["vtrain_multi"]["groups"] == 1 and report["all"]["vtrain_multi"]["held_out"]
    assert report["all"]["zero_bubble"]["bubble"] < 1e-9  # (p - 1)(F + B) of 1F1B, by hand
    assert report["all"]["everything"]["outcomes"] == 6 and len(report["rows"]) == 7
    assert report["all"]["A100, several nodes"]["rows"] == 3
    assert report["unpriced"] == []
    huge = next(row for row in report["rows"] if row["id"] == "hagemann_layouts:a")
    assert huge["fits"] is False and huge["ran"] is False


@pytest.mark.costly
def test_sources_and_limits_choose_rows(capsys: pytest.CaptureFixture[str]) -> None:
    published.main([str(FILE), "--source", "vtrain_multi", "--limit", "2", "--details"])
    printed = capsys.readouterr().out
    assert "vtrain_multi *" in printed and "vtrain_multi:a" in printed and "vtrain_multi:c" in printed
    assert "vtrain_multi:b" not in printed and "zero_bubble" not in printed


# ---- fitting ---------------------------------------------------------------------------------------------------


def test_least_squares_find_what_made_the_data_and_leave_what_does_not_matter() -> None:
    x = np.linspace(0, 1, 20)
    truth = 0.4 + 0.7 * x
    truth[3] += 5.0  # one slip
    found = least_squares(
        lambda p: p[0] + p[1] * x + 0 * p[2] - truth, np.zeros(3), np.ones(20), 0.1, rounds=30, pull=1e-6
    )
    assert found == pytest.approx([0.4, 0.7, 0.0], abs=0.03)


def test_held_out_sources_are_never_fitted() -> None:
    assert {
        sample.row.source for sample in samples(FILE, "A100", 1)
    } == set()  # zero_bubble's row has no time, the others are held out
    assert {sample.row.source for sample in samples(FILE, "H100", 1)} == {"megatron_bridge", "nemo_longseq"}


def test_figures_that_made_a_time_explain_it() -> None:
    sample = next(iter(samples(FILE, "H100", 1)))
    device = sample.row.cluster.device
    start = [float(getattr(device, name)) for name in FIGURES]
    slower: Array = np.array([0.0, 0.0, 0.0, 0.5])
    assert changed(start, slower)(device).dispatch_s == pytest.approx(device.dispatch_s * math.exp(0.5))
    assert changed(start, np.full(4, 9.0))(device).matrix_efficiency == 1.0
    assert sample.error(changed(start, slower)) > sample.error(lambda device: device)
