"""The simulator: closed forms, published bubble rates, a reference that knows only the definitions, and properties."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpar.errors import GraphparError
from graphpar.report.trace import chrome_trace
from graphpar.schedules.action_table import Action, ActionTable, parse_table, validate_table
from graphpar.schedules.order import order_of
from graphpar.schedules.registry import action_order, action_table
from graphpar.schedules.simulation import Timeline, Transfers, in_flight, most_in_flight, peak_in_flight, simulate
from graphpar.schedules.zero_bubble import StageCosts, automatic
from tests.schedules.test_schedule import legal_tables, quick_stages

__all__ = ["quick_stages"]  # a fixture of this module too

QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())
NAMES = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2"}


# --------------------------------------------------------------------------------------- closed forms


@pytest.mark.costly
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@given(p=st.integers(1, 5), extra=st.integers(0, 6), forward=st.integers(1, 9), backward=st.integers(1, 9))
@QUICK
def test_the_bubble_of_equal_stages(name: str, p: int, extra: int, forward: int, backward: int) -> None:
    """(p - 1) / (m + p - 1), whatever a forward and a backward cost (GPipe, arXiv 1811.06965, section 2.3)."""
    m = p + extra
    timeline = simulate(action_table(name, p, 1, m), [forward] * p, [backward] * p)
    assert timeline.makespan == (m + p - 1) * (forward + backward)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 8)])
def test_interleaving_divides_the_bubble(p: int, v: int, m: int) -> None:
    """(p - 1) / v m of the work (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    timeline = simulate(action_table("Interleaved1F1B", p, v, m), [1] * p * v, [2] * p * v)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


def test_activations_in_flight() -> None:
    p, m = 4, 8
    assert peak_in_flight(action_table("GPipe", p, 1, m)) == (m,) * p
    assert peak_in_flight(action_table("1F1B", p, 1, m)) == (4, 3, 2, 1)
    assert peak_in_flight(action_table("1F1B", p, 1, m), sizes=[5, 1, 1, 7]) == (20, 3, 2, 7)
    assert peak_in_flight(parse_table("0F0,0I0,0F1,0W0,0I1,0W1")) == (2,)
    assert most_in_flight(action_table("1F1B", p, 1, m)) == (4, 3, 2, 1)
    interleaved = action_table("Interleaved1F1B", p, 2, m)
    alone = [peak_in_flight(interleaved, [stage == own for stage in range(2 * p)])[own % p] for own in range(2 * p)]
    assert most_in_flight(interleaved) == tuple(alone)


@given(p=st.integers(1, 6), extra=st.integers(0, 6), forward=st.integers(1, 9), backward=st.integers(1, 9))
@QUICK
def test_looped_bfs_divides_the_bubble_of_gpipe(p: int, extra: int, forward: int, backward: int) -> None:
    m = p + extra
    timeline = simulate(action_table("LoopedBFS", p, 2, m), [forward] * 2 * p, [backward] * 2 * p)
    assert timeline.makespan == (2 * m + p - 1) * (forward + backward)


@given(p=st.integers(1, 8), extra=st.integers(0, 9), unit=st.integers(1, 5))
@QUICK
def test_the_bubble_of_zb_h1(p: int, extra: int, unit: int) -> None:
    """(p - 1)(TF + TB - TW), in the memory of 1F1B (arXiv 2401.10241, table 1)."""
    m = p + extra
    timeline = simulate(action_table("ZB-H1", p, 1, m), [unit] * p, [2 * unit] * p, [unit] * p)
    assert timeline.makespan == 3 * m * unit + (p - 1) * unit
    assert timeline.peak_in_flight == (p,) * p


@given(p=st.integers(1, 8), extra=st.integers(0, 9), unit=st.integers(1, 5))
@QUICK
def test_the_bubble_of_zb_h2(p: int, extra: int, unit: int) -> None:
    """(p - 1)(TF + TB - 2 TW): no rank idles between its first and its last action (arXiv 2401.10241, table 1)."""
    m = 2 * p + extra
    timeline = simulate(action_table("ZB-H2", p, 1, m), [unit] * p, [2 * unit] * p, [unit] * p)
    assert timeline.period == 3 * m * unit
    assert timeline.makespan == 3 * m * unit + (p - 1) * unit
    assert timeline.peak_in_flight == (2 * p - 1,) * p


@given(p=st.integers(1, 6), m=st.integers(1, 9), forward=st.integers(1, 5), transfer=st.integers(0, 5))
@QUICK
def test_transfers_of_gpipe_lengthen_the_ramps_alone(p: int, m: int, forward: int, transfer: int) -> None:
    timeline = simulate(
        action_table("GPipe", p, 1, m), [forward] * p, [forward] * p, transfers=transfers(p, transfer, transfer)
    )
    assert timeline.makespan == 2 * ((m + p - 1) * forward + (p - 1) * transfer)


@pytest.mark.parametrize(("one_at_a_time", "makespan"), [(False, 1 + 9 + 3), (True, 1 + 3 * 9 + 1)])
def test_a_link_of_one_transfer_at_a_time_makes_the_others_queue(one_at_a_time: bool, makespan: int) -> None:
    """Three forwards of one unit follow each other over a boundary of nine; backwards and their way are free."""
    table = parse_table("0F0,0F1,0F2\n1F0,1F1,1F2")
    timeline = simulate(table, [1, 1], [0, 0], transfers=Transfers([9], [0], one_at_a_time))
    assert timeline.makespan == makespan
    assert timeline.busy == (3, 3) and timeline.waiting[0] == 0


def test_a_sender_that_waits_starts_its_next_action_later() -> None:
    table = parse_table("0F0,0F1\n1F0,1F1")
    timeline = simulate(table, [1, 1], [0, 0], transfers=Transfers([4], [0], sender_waits=True))
    assert [span.start for span in timeline.spans[0]] == [0, 5]
    assert timeline.makespan == 1 + 4 + 1 + 4 + 1
    assert timeline.waiting == (4, 4 + 4)  # while rank 0 computes its second forward, rank 1 idles or computes
    assert timeline.idle == (5, 1)


def test_a_sender_that_waits_does_so_for_both_results_of_a_pair() -> None:
    text = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,(1F2;1B1)OVERLAP_F_B,1B2\n2F0,2B0,2F1,2B1,2F2,2B2"
    timeline = simulate(parse_table(text), [1] * 3, [1] * 3, transfers=Transfers([2, 7], [5, 2], sender_waits=True))
    pair_end = next(span.end for span in timeline.spans[1] if str(span.action) == "1B1")
    sent = [t for t in timeline.transfers if str(t.action) in ("1F2", "1B1")]
    assert [t.start for t in sent] == [pair_end] * 2 and {t.end - t.start for t in sent} == {7, 5}
    assert timeline.spans[1][-1].start >= pair_end + 7


def test_stages_on_one_rank_pass_for_free() -> None:
    table = action_table("ZBVZeroBubble", 1, 2, 3)
    timeline = simulate(table, [1, 1], [2, 2], transfers=Transfers([100], [100], True, True))
    assert timeline.makespan == 3 * 6 and timeline.bubble == 0 and timeline.transfers == ()


# ------------------------------------------------------------------------------------------ published


@pytest.mark.parametrize(
    "row", [row for row in PUBLISHED["rows"] if row["schedule"] in NAMES], ids=lambda row: row["id"]
)
def test_published_bubble_rates(row: dict[str, Any]) -> None:
    """From the profiled times to the rates of Zero Bubble's tables: to the digit, but for interleaving.

    Of interleaved stages the paper doesn't say what a transfer costs beside a third of the computation.
    """
    name, pp, per_rank, m = NAMES[row["schedule"]], row["pp"], row["stages_per_rank"], row["microbatches"]
    forward, split, weight = (row[f"{part}_ms"] for part in ("forward", "input_backward", "weight_backward"))
    count = pp * per_rank

    timeline = simulate(
        action_table(name, pp, per_rank, m),
        [forward / per_rank] * count,
        [(split + weight) / per_rank] * count,
        [weight / per_rank] * count,
        transfers=transfers(count, row["transfer_ms"], row["transfer_ms"]),
    )

    rate = 1 - m * (forward + split + weight) / timeline.period
    assert rate == pytest.approx(row["bubble_rate"], abs=0.005 if per_rank > 1 else 1e-4)


@pytest.mark.costly
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in PUBLISHED["rows"]
        if row["schedule"] in ("zb-1p", "zb-2p") and row["pp"] * row["microbatches"] < 800
    ],
    ids=lambda row: row["id"],
)
def test_published_bubble_rates_of_automatic_schedules(row: dict[str, Any]) -> None:
    """1p and 2p are the memory of 1F1B and twice that; of 34 + 5 a s / h bytes a value, 32 stay for W (section 2.3)."""
    pp, m = row["pp"], row["microbatches"]
    parts = [row[f"{part}_ms"] for part in ("forward", "input_backward", "weight_backward")]
    costs = StageCosts(*([part] * pp for part in parts), transfers(pp, row["transfer_ms"], row["transfer_ms"]))
    for_weight = 32 / (34 + 5 * row["heads"] * row["sequence"] / row["hidden"])

    table = automatic(m, costs, limit=pp * (1 if row["schedule"] == "zb-1p" else 2), for_weight=for_weight)

    rate = 1 - m * sum(parts) / costs.simulated(table).period
    assert rate == pytest.approx(row["bubble_rate"], abs=0.002)


@pytest.mark.costly
@given(
    st.lists(st.tuples(*[st.integers(0, 5)] * 5), min_size=1, max_size=4),
    st.integers(1, 8),
    st.floats(1, 9),
    st.floats(0, 1),
)
@settings(QUICK, max_examples=40)
def test_automatic_schedules_are_legal_and_keep_their_limit(
    stages: list[tuple[int, ...]], m: int, limit: float, for_weight: float
) -> None:
    forward, split, weight, *moves = ([stage[i] for stage in stages] for i in range(5))
    pp = len(stages)
    costs = StageCosts(forward, split, weight, Transfers(moves[0][1:], moves[1][1:]))

    table = automatic(m, costs, limit, for_weight)

    validate_table(table, pp, m)
    assert all(held.peak <= limit + 1e-6 for held in in_flight(table, [1] * pp, [for_weight] * pp))
    if limit >= pp:
        assert costs.simulated(table).period <= costs.simulated(action_table("ZB-H1", pp, 1, m)).period


def test_automatic_schedules_refuse_what_cannot_be() -> None:
    costs = StageCosts([1, 1], [1, 1], [1, 1], Transfers([0], [0]))
    with pytest.raises(GraphparError, match="a rank must hold at least that of one microbatch"):
        automatic(4, costs, 0.5)
    with pytest.raises(GraphparError, match="stays for W is 2"):
        automatic(4, costs, 4, for_weight=2)
    with pytest.raises(GraphparError, match="has 1 costs for 2 stages"):
        automatic(4, StageCosts([1, 1], [1, 1], [1], Transfers([0], [0])), 4)


# ------------------------------------------------------------------------------------------ reference


def transfers(stages: int, forward: float, backward: float) -> Transfers:
    return Transfers([forward] * (stages - 1), [backward] * (stages - 1))


def reference(table: ActionTable, costs: dict[str, list[int]], moves: Transfers) -> dict[Action, int]:
    """The end of every action: start times raised until no definition is broken. Integers, and no order of nodes."""
    home = {action.stage: rank for rank, _, _, action in table.actions()}
    cells = [[cell for cell in row if cell is not None] for row in table.rows]
    start = {(rank, number): 0 for rank, row in enumerate(cells) for number in range(len(row))}
    length = {
        (rank, number): sum(costs[a.kind][a.stage] for a in cell.parts)
        for rank, row in enumerate(cells)
        for number, cell in enumerate(row)
    }
    place = {
        (a.stage, a.kind == "F", a.microbatch): (rank, number)
        for rank, row in enumerate(cells)
        for number, cell in enumerate(row)
        for a in cell.parts
        if a.kind != "W"
    }
    arrival: dict[tuple[int, bool, int], int] = {}
    changed = True
    while changed:
        changed = False
        link_free: dict[tuple[int, int], int] = {}
        for rank, row in enumerate(cells):
            for number, cell in enumerate(row):
                here = (rank, number)
                earliest = start[rank, number - 1] + length[rank, number - 1] if number else 0
                if moves.sender_waits and number:
                    left = [(a.stage, a.kind == "F", a.microbatch) for a in row[number - 1].parts if a.kind != "W"]
                    earliest = max([earliest, *(arrival[key] for key in left if key in arrival)])
                for a in cell.parts:
                    to = a.stage + {"F": -1, "B": 1, "I": 1, "W": 0}[a.kind]
                    key = (to, a.kind == "F", a.microbatch)
                    if a.kind != "W" and key in place and place[key] != here:
                        maker = place[key]
                        ended = start[maker] + length[maker]
                        earliest = max(earliest, ended if home[to] == rank else arrival.get(key, ended))
                if earliest > start[here]:
                    start[here], changed = earliest, True
                for a in cell.parts:
                    to = a.stage + (1 if a.kind == "F" else -1)
                    if a.kind == "W" or to not in home or home[to] == rank:
                        continue
                    cost = moves.forward[a.stage] if a.kind == "F" else moves.backward[to]
                    sent = start[here] + length[here]
                    if moves.one_at_a_time:
                        sent = max(sent, link_free.get((rank, home[to]), 0))
                    key = (a.stage, a.kind == "F", a.microbatch)
                    link_free[rank, home[to]] = sent + int(cost)
                    if arrival.get(key) != sent + cost:
                        arrival[key], changed = sent + int(cost), True
    ends: dict[Action, int] = {}
    for rank, row in enumerate(cells):
        for number, cell in enumerate(row):
            time = start[rank, number]
            for a in cell.parts:
                time += costs[a.kind][a.stage]
                ends[a] = time
    return ends


def drawn_costs(data: st.DataObject, table: ActionTable) -> dict[str, list[int]]:
    values = st.lists(st.integers(0, 5), min_size=table.stages, max_size=table.stages)
    return {kind: data.draw(values) for kind in "FBIW"}


def drawn_transfers(data: st.DataObject, table: ActionTable) -> Transfers:
    values = st.lists(st.integers(0, 6), min_size=table.stages - 1, max_size=table.stages - 1)
    return Transfers(data.draw(values), data.draw(values), data.draw(st.booleans()), data.draw(st.booleans()))


def run(table: ActionTable, costs: dict[str, list[int]], moves: Transfers | None) -> Timeline:
    return simulate(table, costs["F"], costs["B"], costs["W"], input_backward=costs["I"], transfers=moves)


@given(legal_tables(), st.data())
@QUICK
def test_every_action_ends_when_the_definitions_say(table: ActionTable, data: st.DataObject) -> None:
    costs, moves = drawn_costs(data, table), drawn_transfers(data, table)

    timeline = run(table, costs, moves)

    ends = reference(table, costs, moves)
    assert {span.action: span.end for row in timeline.spans for span in row} == ends
    assert timeline.makespan == max(ends.values()) and 0 <= timeline.bubble <= 1


@given(legal_tables(), st.data())
@QUICK
def test_every_action_runs_once_in_the_order_of_its_rank(table: ActionTable, data: st.DataObject) -> None:
    costs = drawn_costs(data, table)

    timeline = run(table, costs, drawn_transfers(data, table))

    for row, spans in zip(table.rows, timeline.spans):
        assert [span.action for span in spans] == [action for cell in row if cell for action in cell.parts]
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert all(span.end - span.start == costs[span.action.kind][span.action.stage] for span in spans)
    for rank, spans in enumerate(timeline.spans):
        assert timeline.busy[rank] == sum(span.end - span.start for span in spans)
        assert timeline.busy[rank] + timeline.waiting[rank] + timeline.idle[rank] == timeline.makespan
        assert timeline.waiting[rank] >= 0
    assert run(table, costs, None).waiting == (0,) * table.ranks


@given(legal_tables(), st.data())
@QUICK
def test_longer_actions_and_transfers_never_shorten_a_step(table: ActionTable, data: st.DataObject) -> None:
    costs, moves = drawn_costs(data, table), drawn_transfers(data, table)
    before = run(table, costs, moves).makespan
    kind, stage = data.draw(st.sampled_from("FBIW")), data.draw(st.integers(0, table.stages - 1))
    longer = {**costs, kind: [cost + 3 * (index == stage) for index, cost in enumerate(costs[kind])]}
    assert run(table, longer, moves).makespan >= before

    farther = Transfers([c + 1 for c in moves.forward], moves.backward, moves.one_at_a_time, moves.sender_waits)
    assert run(table, costs, farther).makespan >= before
    assert run(table, costs, Transfers(moves.forward, moves.backward, True, True)).makespan >= before
    assert run(table, costs, None).makespan <= before


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (([1], [1, 1]), "forward has 1 costs for 2 stages"),
        (([1, -1], [1, 1]), "forward cost of stage 1 is -1"),
        (([1, 1], [1, float("nan")]), "backward cost of stage 1 is nan"),
        (([1, 1], [1, 1], [1, 2]), "weight cost of stage 1, 2, is more than its full backward, 1"),
    ],
)
def test_bad_costs(costs: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        simulate(action_table("1F1B", 2, 1, 2), *costs)


def test_a_deadlock_is_refused_by_the_simulation_too() -> None:
    with pytest.raises(GraphparError, match="deadlocks"):
        simulate(parse_table("0F0,0B0\n1B0,1F0"), [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (Transfers([1], [1, 1]), r"forward transfer has 1 costs for 2 boundaries; give one a boundary"),
        (Transfers([1, 1], [1, -1]), r"backward transfer cost of boundary 1 is -1"),
    ],
)
def test_bad_transfers(moves: Transfers, message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        simulate(action_table("1F1B", 3, 1, 3), [1] * 3, [1] * 3, transfers=moves)


def test_orders_of_named_schedules_are_kept() -> None:
    order = action_order("1f1b", 3, 1, 4)
    assert order is action_order("1F1B", 3, 1, 4)
    assert simulate(order, [1] * 3, [2] * 3) == simulate(action_table("1F1B", 3, 1, 4), [1] * 3, [2] * 3)
    with pytest.raises(GraphparError, match="as many microbatches as stages"):
        action_order("1F1B", 3, 1, 2)


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(GraphparError, match="stage 0 is on ranks 0 and 1"):
        order_of(parse_table("0F0\n0F1"))


# --------------------------------------------------------------------------------------------- memory


def test_memory_over_time() -> None:
    table = parse_table("0F0,0I0,0F1,0W0,0I1,0W1")
    (memory,) = in_flight(table, saved=[10], for_weight=[4])
    assert (memory.after, memory.peak, memory.at) == ((10, 4, 14, 10, 4, 0), 14, 2)
    (memory,) = in_flight(table, saved=[10], for_weight=[25])  # gradients that I keeps for W
    assert (memory.after, memory.peak, memory.at) == ((10, 25, 35, 10, 25, 0), 35, 2)
    (memory,) = in_flight(parse_table("0F0,0F1,0B0,0B1"), saved=[7])
    assert memory.after == (7, 14, 7, 0)
    with pytest.raises(GraphparError, match="saved has 2 costs for 1 stages"):
        in_flight(table, saved=[1, 1])


@given(legal_tables(), st.data())
@QUICK
def test_memory_ends_empty_and_its_peak_is_of_an_action(table: ActionTable, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 10**12), min_size=table.stages, max_size=table.stages)
    saved = data.draw(sizes)
    kept = data.draw(st.one_of(st.just(saved), sizes))
    for memory, peak in zip(in_flight(table, saved, kept), peak_in_flight(table, saved)):
        assert memory.after[-1] == 0
        assert memory.peak == max(memory.after) == memory.after[memory.at]
        assert min(memory.after) >= 0
        if kept == saved:
            assert peak == memory.peak


# --------------------------------------------------------------------------------------------- traces


@given(legal_tables(), st.data())
@QUICK
def test_a_trace_has_the_fields_of_its_format(table: ActionTable, data: st.DataObject) -> None:
    costs, moves = drawn_costs(data, table), drawn_transfers(data, table)
    timeline = run(table, costs, moves)

    trace = json.loads(json.dumps(chrome_trace(timeline, scale=1e6), allow_nan=False))

    assert trace["otherData"]["times"] == "seconds"
    events = trace["traceEvents"]
    everything = [event for event in events if event["ph"] == "X"]
    for rank in range(table.ranks):  # one after the other, without gaps
        own = sorted((each for each in everything if each["tid"] == rank), key=lambda each: (each["ts"], each["dur"]))
        assert math.fsum(each["dur"] for each in own) == pytest.approx(1e6 * timeline.length)
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(own))
    slices = [event for event in everything if event["cat"] != "wait"]
    assert len(slices) == sum(1 for _ in table.actions())
    for event in slices:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(event)
        assert event["ts"] >= 0 and event["dur"] >= 0
    assert {(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"} == {
        (rank, f"rank {rank}") for rank in range(table.ranks)
    }
    starts = {(event["tid"], event["ts"]) for event in slices}
    flows = [event for event in events if event["ph"] in "sf"]
    for event in flows:
        assert (event["tid"], event["ts"]) in starts  # it binds to the slice that begins there
        assert event["ph"] == "s" or event["bp"] == "e"
    sent = {event["id"]: event for event in flows if event["ph"] == "s"}
    received = {event["id"]: event for event in flows if event["ph"] == "f"}
    assert sent.keys() == received.keys() == set(range(len(timeline.transfers)))
    assert all(sent[i]["tid"] != received[i]["tid"] and sent[i]["ts"] <= received[i]["ts"] for i in sent)


def test_a_trace_without_a_unit_says_so() -> None:
    timeline = simulate(action_table("1F1B", 2, 1, 2), [3, 3], [5, 5])
    trace = chrome_trace(timeline, ["a", "b"])
    assert trace["otherData"]["times"] == "relative"
    assert max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X") == pytest.approx(1e6)
    with pytest.raises(GraphparError, match="1 names for the rows of 2 ranks"):
        chrome_trace(timeline, ["a"])
    with pytest.raises(GraphparError, match="spans=True"):
        chrome_trace(simulate(action_table("1F1B", 2, 1, 2), [3, 3], [5, 5], spans=False))
