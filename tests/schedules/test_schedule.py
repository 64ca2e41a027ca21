"""Schedules: legality against torch's constructors, tables against what torch runs, and what a bad table says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpar.errors import GraphparError
from graphpar.runtime.schedule_records import SCHEDULES, canonical_name
from graphpar.schedules.action_table import (
    Action,
    ActionTable,
    Cell,
    Pair,
    format_table,
    load_table,
    make_table,
    parse_table,
    validate_table,
)
from graphpar.schedules.order import check_deadlock
from graphpar.schedules.registry import action_table, bubble_warning, check_legal, legal_microbatches, stage_ranks
from graphpar.schedules.simulation import draw, simulate

NAMES = list(SCHEDULES)
RUNNABLE = [name for name in NAMES if SCHEDULES[name].torch_class is not None]
AUTOSPEC = mock.create_autospec
GRID = [(pp, per_rank, count) for pp in range(1, 5) for per_rank in range(1, 4) for count in range(1, 11)]


def legal(name: str, pp: int, per_rank: int, count: int) -> bool:
    try:
        check_legal(name, pp, per_rank, count)
    except GraphparError:
        return False
    return True


def legal_configurations(name: str, grid: list[tuple[int, int, int]] = GRID) -> list[tuple[int, int, int]]:
    return [point for point in grid if legal(name, *point)]


@pytest.fixture(scope="module", autouse=True)
def quick_stages() -> Iterator[None]:
    """torch lists a schedule around an autospec of its stage class, which is most of the time it takes."""
    with mock.patch("unittest.mock.create_autospec", lambda *args, **kwargs: SimpleNamespace()):
        yield


def torch_accepts(name: str, pp: int, per_rank: int, count: int) -> bool:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        get_schedule_ops(name, pp, count, per_rank)
    except (AssertionError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------- names


def test_the_module_imports_without_torch() -> None:
    program = "import sys, graphpar.schedules.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("interleaved-1f1b", "Interleaved1F1B"),
        ("LOOPED_BFS", "LoopedBFS"),
        ("ZBV", "ZBVZeroBubble"),
        ("zb-v", "ZBVZeroBubble"),
        ("dualpipe-v", "DualPipeV"),
        ("ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"),
    ],
)
def test_names_are_found_in_any_spelling(given_name: str, expected: str) -> None:
    assert canonical_name(given_name) == expected


@pytest.mark.parametrize("name", ["foo", "", "PipelineScheduleMulti", "PipelineScheduleSingle"])
def test_an_unknown_name_lists_all(name: str) -> None:
    with pytest.raises(GraphparError) as error:
        canonical_name(name)
    assert all(known in str(error.value) for known in NAMES)


def test_an_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(GraphparError, match="Did you mean 'DualPipeV'"):
        canonical_name("dual_pipe")


@pytest.mark.parametrize("name", RUNNABLE)
def test_names_and_classes_are_torchs(name: str) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert get_schedule_class(name).__name__ == SCHEDULES[name].torch_class


# -------------------------------------------------------------------------------------------- legality


@pytest.mark.parametrize("name", RUNNABLE)
def test_legality_is_that_of_torchs_constructors(name: str) -> None:
    ours = [legal(name, *point) for point in GRID]

    theirs = [torch_accepts(name, *point) for point in GRID]

    assert any(ours) and not all(ours)
    assert [point for point, a, b in zip(GRID, ours, theirs) if a != b] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_proposal_for_microbatches_is_legal(name: str) -> None:
    row = SCHEDULES[name]
    for pp in range(1, 6):
        for count in range(1, 20):
            try:
                check_legal(name, pp, row.default_stages, count)
            except GraphparError as error:
                proposed = re.search(r"Use (\d+)(?: or (\d+))? microbatches", str(error))
                assert proposed is not None
                for text in filter(None, proposed.groups()):
                    check_legal(name, pp, row.default_stages, int(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1F1B", 2, 2, 4),
            r"1F1B needs exactly 1 stage a rank, not 2: 4 stages on 2 ranks\. Use 1 a rank \(2 stages\)",
        ),
        (("Interleaved1F1B", 2, 1, 4), r"at least 2 stages a rank, not 1.* for 1 a rank, one of GPipe, 1F1B"),
        (("zbv", 2, 3, 4), r"ZBVZeroBubble needs exactly 2 stages a rank, not 3"),
        (("1F1B", 2, 1, 1), r"as many microbatches as stages.*1 microbatches for 2 stages.*Use 2 microbatches"),
        (("DualPipeV", 2, 2, 3), r"3 microbatches for 4 stages.*Use 4 microbatches"),
        (("Interleaved1F1B", 2, 2, 5), r"5 microbatches on 2 ranks are 2 rounds.*Use 4 or 6 microbatches"),
        (("InterleavedZeroBubble", 2, 2, 5), r"Use 4 or 6 microbatches"),
        (("GPipe", 0, 1, 4), r"pp must be a whole number of at least 1, not 0"),
        (("GPipe", 2, 1, 0), r"microbatches must be a whole number of at least 1, not 0"),
        (("GPipe", 2, True, 1), r"stages_per_rank must be a whole number"),
    ],
)
def test_an_illegal_choice_says_why_and_what_instead(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        check_legal(*arguments)


@pytest.mark.parametrize("name", RUNNABLE)
def test_legal_microbatches_cut_the_batch_evenly(name: str) -> None:
    per_rank = SCHEDULES[name].default_stages

    counts = legal_microbatches(name, 2, per_rank, batch=24)

    assert counts == [c for c in range(1, 25) if 24 % c == 0 and torch_accepts(name, 2, per_rank, c)]


def test_too_few_microbatches_to_fill_the_pipeline_is_a_warning() -> None:
    assert bubble_warning("gpipe", 4, 1, 4) is None
    assert "3 microbatches for 4 stages" in (bubble_warning("gpipe", 4, 1, 3) or "")


# ------------------------------------------------------------------------------------------- placement


def test_placements() -> None:
    assert stage_ranks("Interleaved1F1B", 3, 2) == [0, 1, 2, 0, 1, 2]
    assert stage_ranks("ZBVZeroBubble", 4, 2) == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_stages_run_where_stage_ranks_says(name: str) -> None:
    for pp, per_rank, count in legal_configurations(name):
        table = action_table(name, pp, per_rank, count)

        ranks = stage_ranks(name, pp, per_rank)

        assert {action.stage: rank for rank, _, _, action in table.actions()} == dict(enumerate(ranks))


# ---------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", NAMES)
def test_every_legal_table_is_valid_and_does_not_deadlock(name: str) -> None:
    for pp, per_rank, count in legal_configurations(name):
        table = action_table(name, pp, per_rank, count)

        validate_table(table, pp * per_rank, count)
        check_deadlock(table)

        assert (table.ranks, table.stages, table.microbatches) == (pp, pp * per_rank, count)
        assert parse_table(format_table(table)) == table
        split = any(action.kind == "W" for _, _, _, action in table.actions())
        assert split == SCHEDULES[name].splits_backward


def test_tables_come_from_torch_as_it_is() -> None:
    """Without this module's shortcut around autospec, and outside its grid, so that no table was kept."""
    with mock.patch("unittest.mock.create_autospec", AUTOSPEC):
        table = action_table("DualPipeV", 3, 2, 13)
    assert str(table).splitlines()[2].startswith("2F0,3F0,2F1,3F1,2F2,3F2,2F3,3B0,(3F3;2B0)OVERLAP_F_B,")


class StageThatRecords:
    """Stands in for a pipeline stage whose neighbours answer at once."""

    is_last = False

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.actions: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: object) -> None:
        self.actions.append(Action(self.stage_index, "B", microbatch))

    def perform_reduce_grad(self, factor: int) -> None: ...

    def no_transfers(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_single_stage_tables_are_what_torch_steps_through(name: str) -> None:
    """Their classes run a loop, not the table that they list."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    for pp, per_rank, count in legal_configurations(name):
        table = action_table(name, pp, per_rank, count)
        for rank in range(pp):
            stage = StageThatRecords(rank, pp)
            schedule = get_schedule_class(name)(stage, count)
            with mock.patch.object(schedule, "_initialize_stage"):
                schedule._step_microbatches([()] * count, [{}] * count)
            assert stage.actions == [action for cell in table.rows[rank] if cell for action in cell.parts]


@pytest.mark.parametrize("name", [name for name in RUNNABLE if SCHEDULES[name].min_stages > 1])
def test_torch_reads_our_text_as_its_own_table(name: str) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _Action

    text = format_table(action_table(name, 4, 2, 8))

    read = [[_Action.from_str(token) for token in line.split(",")] for line in text.splitlines()]

    listed = get_schedule_ops(name, 4, 8, 2)
    assert [[a for a in row if a] for row in read] == [[a for a in row if a] for row in listed]


# ------------------------------------------------------------------------------------------------ text

actions = st.builds(Action, st.integers(0, 20), st.sampled_from(["F", "B", "I", "W"]), st.integers(0, 200))
cells: st.SearchStrategy[Cell] = st.one_of(st.none(), actions, st.builds(Pair, st.tuples(actions, actions)))


@pytest.mark.costly
@given(st.lists(st.lists(cells, max_size=6), max_size=4).filter(lambda rows: bool(rows) and any(rows[-1])))
def test_text_round_trip(rows: list[list[Cell]]) -> None:
    table = make_table(rows)
    assert parse_table(format_table(table)) == table


def test_text_may_have_spaces_and_blank_lines_at_the_end() -> None:
    assert parse_table(" 0F0 , 0B0\r\n,1F0, (1F1; 1B0)OVERLAP_F_B,\r\n\r\n") == make_table(
        [
            [Action(0, "F", 0), Action(0, "B", 0)],
            [None, Action(1, "F", 0), Pair((Action(1, "F", 1), Action(1, "B", 0)))],
        ]
    )


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("1X0", "isn't an action"),
        ("1F", "isn't an action"),
        ("F0", "isn't an action"),
        ("-1F0", "isn't an action"),
        ("1F0extra", "isn't an action"),
        ("(1F0;1B0)", "isn't an action"),
        ("(1F0)OVERLAP_F_B", "overlaps 1 action"),
        ("(1F0;)OVERLAP_F_B", "isn't an action"),
        ("1SEND_F0", "is communication"),
        ("1REDUCE_GRAD0", "is communication"),
    ],
)
def test_a_bad_token_is_named_with_rank_and_step(token: str, message: str) -> None:
    with pytest.raises(GraphparError, match=rf"rank 1, step 2: {re.escape(repr(token))} {message}"):
        parse_table(f"0F0,0B0\n1F0,,{token}\n")


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n,\n"])
def test_empty_text(text: str) -> None:
    with pytest.raises(GraphparError, match="schedule is empty"):
        parse_table(text)


def test_load_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n")
    assert load_table(file).rows == ((Action(0, "F", 0), Action(0, "B", 0)),)

    with pytest.raises(GraphparError, match=r"mime\.csv doesn't exist\. Did you mean 'mine\.csv'"):
        load_table(tmp_path / "mime.csv")
    with pytest.raises(GraphparError, match="can't be read"):
        load_table(tmp_path)
    file.write_text("0F0,0Q0\n")
    with pytest.raises(GraphparError, match=r"mine\.csv: rank 0, step 1: '0Q0'"):
        load_table(file)
    file.write_bytes(b"\xff\xfe0")
    with pytest.raises(GraphparError, match="can't be read"):
        load_table(file)


# ------------------------------------------------------------------------------------------ validation

# Two ranks, two stages, two microbatches; stage 0 splits its backward, stage 1 doesn't.
CORRUPTIONS = {
    "forward after full backward": ("0F0,0F1,0I0,0W0,0I1,0W1\n1B0,1F0,1F1,1B1", r"rank 1, step 0: 1B0 .* 1F0: full"),
    "forward after input backward": ("0F0,0I1,0F1,0I0,0W0,0W1\n1F0,1F1,1B0,1B1", r"rank 0, step 1: 0I1 .* 0F1: input"),
    "input after weight backward": ("0F0,0F1,0W0,0I0,0I1,0W1\n1F0,1F1,1B0,1B1", r"rank 0, step 2: 0W0 .* 0I0: weight"),
    "repeated": ("0F0,0F1,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1B1", r"rank 0, step 2: 0F1 repeats 0F1"),
    "two ranks": ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1B1,0F1", r"rank 1, step 4: 0F1 runs stage 0, .* rank 0"),
    "unknown stage": ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1B1,2F0", r"rank 1, step 4: 2F0 names stage 2; .* is 1"),
    "unknown microbatch": ("0F0,0F1,0F2,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1B1", r"rank 0, step 2: 0F2 names microbatch 2"),
    "both backwards": ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1I0,1B1", r"rank 1, step 3: 1I0 follows 1B0"),
    "no forward": ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0", r"rank 1, stage 1: 1 of 2 forwards; 1F1 is missing"),
    "no backward": ("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B1", r"rank 1, stage 1: 1 of 2 backwards; 1B0 \(or 1I0\)"),
    "no weight backward": ("0F0,0F1,0I0,0W0,0I1\n1F0,1F1,1B0,1B1", r"2 input backwards but 1 weight .* 0W1 is missing"),
    "no actions": ("0F0,0F1,0I0,0W0,0I1,0W1\n,\n1F0,1F1,1B0,1B1", r"rank 1 has no actions"),
    "no stage": ("0F0,0F1,0I0,0W0,0I1,0W1", r"stage 1 is on no rank"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_each_broken_rule_has_its_own_error(rule: str) -> None:
    text, message = CORRUPTIONS[rule]

    with pytest.raises(GraphparError) as error:
        validate_table(parse_table(text), stages=2, microbatches=2)

    assert [name for name, (_, other) in CORRUPTIONS.items() if re.search(other, str(error.value))] == [rule], message


def test_the_uncorrupted_table_is_valid() -> None:
    validate_table(parse_table("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1B0,1B1"), stages=2, microbatches=2)


def test_an_error_inside_a_pair_names_the_pair_and_the_part() -> None:
    table = parse_table("0F0,(0F1;0B1)OVERLAP_F_B,(0F1;0B0)OVERLAP_F_B")
    with pytest.raises(GraphparError, match=r"step 2: \(0F1;0B0\)OVERLAP_F_B, in it 0F1 repeats 0F1"):
        validate_table(table, stages=1, microbatches=2)


@st.composite
def legal_tables(draw: st.DrawFn, least_ranks: int = 1) -> ActionTable:
    name = draw(st.sampled_from(NAMES))
    grid = [point for point in GRID if point[0] >= least_ranks and point[2] <= 8]
    return action_table(name, *draw(st.sampled_from(legal_configurations(name, grid))))


def corrupted(table: ActionTable, data: st.DataObject) -> ActionTable:
    """One action removed, repeated, renamed or moved to another rank: never legal."""
    spots = [(rank, step, part) for rank, step, cell, action in table.actions() for part in [cell.parts.index(action)]]
    rank, step, part = data.draw(st.sampled_from(spots))
    rows = [list(row) for row in table.rows]
    cell = rows[rank][step]
    assert cell is not None
    action, others = cell.parts[part], cell.parts[:part] + cell.parts[part + 1 :]
    how = data.draw(st.sampled_from(["remove", "repeat", "move", "stage", "kind", "microbatch"]))
    if how == "repeat":
        rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), action)
        return make_table(rows)
    rows[rank][step : step + 1] = others
    if how == "move":
        other_rank = data.draw(st.sampled_from([r for r in range(table.ranks) if r != rank]))
        rows[other_rank].insert(data.draw(st.integers(0, len(rows[other_rank]))), action)
    elif how != "remove":
        kinds = [kind for kind in ("F", "B", "I", "W") if kind != action.kind]
        renamed = {
            "stage": st.builds(Action, st.integers(-1, table.stages).filter(lambda s: s != action.stage),
                               st.just(action.kind), st.just(action.microbatch)),
            "kind": st.builds(Action, st.just(action.stage), st.sampled_from(kinds), st.just(action.microbatch)),
            "microbatch": st.builds(Action, st.just(action.stage), st.just(action.kind),
                                    st.integers(-1, table.microbatches).filter(lambda m: m != action.microbatch)),
        }  # fmt: skip
        rows[rank].insert(step, data.draw(renamed[how]))
    return make_table(rows)


@pytest.mark.costly
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(legal_tables(least_ranks=2), st.data())
def test_any_corruption_of_a_legal_table_is_refused(table: ActionTable, data: st.DataObject) -> None:
    bad = corrupted(table, data)
    with pytest.raises(GraphparError):
        validate_table(bad, table.stages, table.microbatches)


# -------------------------------------------------------------------------------------------- deadlock


def test_a_circle_of_ranks_is_a_deadlock_and_says_who_waits_for_what() -> None:
    table = parse_table("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    validate_table(table, stages=2, microbatches=2)
    with pytest.raises(GraphparError) as error:
        check_deadlock(table)
    assert str(error.value).splitlines() == [
        "schedule deadlocks at",
        "  rank 0, step 1: 0B0 waits for 1B0, which rank 1 runs at step 2",
        "  rank 1, step 1: 1F1 waits for 0F1, which rank 0 runs at step 2",
    ]


def test_waiting_for_what_no_rank_runs_or_for_oneself() -> None:
    with pytest.raises(GraphparError, match="rank 1, step 0: 1F1 waits for 0F1, which no rank runs"):
        check_deadlock(parse_table("0F0\n1F1"))
    with pytest.raises(GraphparError, match="rank 0, step 0: 1F0 waits for 0F0, which rank 0 runs at step 1"):
        check_deadlock(parse_table("1F0,0F0,1B0,0B0"))
    with pytest.raises(GraphparError, match="waits for 0F0, which rank 0 runs at step 0 in the same pair"):
        check_deadlock(parse_table("(0F0;1F0)OVERLAP_F_B"))


def torch_deadlocks(table: ActionTable) -> bool:
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    rank_of = {action.stage: rank for rank, _, _, action in table.actions()}
    rows = {rank: [_Action.from_str(str(cell)) for cell in row if cell] for rank, row in enumerate(table.rows)}
    try:
        _add_send_recv(rows, rank_of.__getitem__, table.stages)
    except AssertionError as error:
        assert "can't schedule sends/recvs" in str(error)
        return True
    return False


def deadlocks(table: ActionTable) -> bool:
    try:
        check_deadlock(table)
    except GraphparError as error:
        assert str(error).startswith("schedule deadlocks at")
        return True
    return False


def swapped(table: ActionTable, swaps: list[tuple[int, int, int]]) -> ActionTable:
    """``table`` after exchanging pairs of cells in a row."""
    rows = [[cell for cell in row if cell] for row in table.rows]
    for rank, first, second in swaps:
        row = rows[rank % len(rows)]
        a, b = first % len(row), second % len(row)
        row[a], row[b] = row[b], row[a]
    return make_table(rows)


@pytest.mark.costly
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(legal_tables(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99)), max_size=3))
def test_a_reordered_table_deadlocks_when_torch_cannot_place_its_transfers(
    table: ActionTable, swaps: list[tuple[int, int, int]]
) -> None:
    reordered = swapped(table, swaps)
    try:
        validate_table(reordered, table.stages, table.microbatches)
    except GraphparError:
        return  # torch leaves a rank's own order to its validator
    assert deadlocks(reordered) == torch_deadlocks(reordered)


# --------------------------------------------------------------------------------------------- drawing


def test_drawing() -> None:
    timeline = simulate(action_table("1F1B", 2, 1, 3), [1, 1], [2, 2])
    assert draw(timeline) == [
        "rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --",
        "rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..",
    ]
    assert draw(timeline, width=27) == [
        "rank 0  F0 F1 .. …  B2 --",
        "rank 1  .. F0 B0 …  .. ..",
    ]


def test_drawing_several_stages_a_rank_names_them() -> None:
    table = parse_table("0F0,3F0,(0F1;3B0)OVERLAP_F_B,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2B0,1B0,2F1,2B1,1B1")
    validate_table(table, stages=4, microbatches=2)
    line = draw(simulate(table, [1] * 4, [1] * 4))[0]
    assert re.sub(r"[. ]+", " ", line) == "rank 0 0F0 3F0 0F1 3B0 0B0 3F1 3B1 0B1"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(legal_tables(), st.integers(30, 120), st.data())
def test_drawings_fit_and_lose_nothing_but_the_middle(table: ActionTable, width: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0, 10), min_size=table.stages, max_size=table.stages))
    timeline = simulate(table, costs, costs)

    lines = draw(timeline, width)

    assert len(lines) == table.ranks
    assert all(len(line) <= width for line in lines)
    whole = draw(timeline, 10**6)
    for rank, line in enumerate(whole):
        several = max(len({span.action.stage for span in row}) for row in timeline.spans) > 1
        names = [str(s.action) if several else str(s.action)[len(str(s.action.stage)) :] for s in timeline.spans[rank]]
        assert [token for token in line.split()[2:] if token not in ("..", "--")] == names
    if max(map(len, whole)) > width:
        assert any("…" in line for line in lines)
