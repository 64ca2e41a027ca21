"""What a run draws and what it leaves to the slow one are all the cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools import samples


class Item:
    """A test, or one case of it."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = nodeid, {each.name: each.mark for each in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def run(seed: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The names of the fast tests, and of the slow ones."""
    items: list[Any] = [
        *(Item(f"a.py::cases[{number}]", pytest.mark.sampled(1 / 3)) for number in range(6)),
        Item("a.py::cases[slow]", pytest.mark.sampled(1 / 3), pytest.mark.slow),
        Item("a.py::only", pytest.mark.sampled(1 / 3)),
        Item("a.py::other"),
    ]
    monkeypatch.setattr(samples, "SEED", seed)
    samples.set_aside(items)
    slow = [item.nodeid for item in items if "slow" in item.marks]
    return [item.nodeid for item in items if item.nodeid not in slow], slow


def test_a_share_of_cases_is_drawn_and_the_rest_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = run("a seed", monkeypatch)

    assert {"a.py::only", "a.py::other"} <= set(fast) and "a.py::cases[slow]" in slow
    assert sum("cases" in name for name in fast) == 2
    assert len(fast) + len(slow) == 9
    assert run("a seed", monkeypatch) == (fast, slow)


def test_other_runs_draw_others_and_all_of_them_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({tuple(run(str(seed), monkeypatch)[0]) for seed in range(20)}) > 10
    assert run("all", monkeypatch)[1] == ["a.py::cases[slow]"]


def test_a_share_of_the_slow_tests_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    items: list[Any] = [Item(f"{file}.py::{number}", pytest.mark.slow) for file in "ab" for number in range(8)]
    items += [Item(f"a.py::fast {number}") for number in range(3)]

    def names(seed: str) -> list[str]:
        monkeypatch.setattr(samples, "SEED", seed)
        return [item.nodeid for item in samples.drawn_slow(items)]

    found = names("a seed")
    assert len(found) == round(16 * samples.SLOW_SHARE) + 3
    assert found == names("a seed") and len({tuple(names(str(seed))) for seed in range(20)}) > 10
    assert {name for seed in range(100) for name in names(str(seed))} == {item.nodeid for item in items}
    assert names("all") == [item.nodeid for item in items]


def test_what_is_costly_runs_in_a_share_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def costly(seed: str, files: int = 20) -> set[str]:
        items: list[Any] = [Item(f"{file}.py::{n}", pytest.mark.costly) for file in range(files) for n in range(3)]
        monkeypatch.setattr(samples, "SEED", seed)
        samples.set_aside([*items, Item("1.py::cheap")])  # type: ignore[list-item]
        return {item.nodeid for item in items if "slow" not in item.marks}

    assert len(costly("a seed")) == 3 * round(20 * samples.COSTLY_SHARE)
    assert all({f"{name.partition('.')[0]}.py::{n}" for n in range(3)} <= costly("a seed") for name in costly("a seed"))
    assert len(set().union(*(costly(str(seed)) for seed in range(100)))) == 60 == len(costly("all"))
    assert len(costly("a seed", files=1)) == 3, "of a file that is named all of it runs"
