"""The page: every priced plan is a point of it, it needs nothing but itself, and its script does what it says, in a browser."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import graphpar as gp
from graphpar.passes.planning.candidates import BOUNDED, COLUMNS, POINTS, Point, SearchResult
from graphpar.report.charts import left_of
from graphpar.report.memory_chart import (
    KINDS,
    PARTS,
    ROWS,
    Level,
    memory_over_time,
    memory_svg,
    memory_time_key,
    memory_time_svg,
    stacks_of,
)
from graphpar.report.phrases import device_bytes, fullest
from graphpar.report.report import html, timeline_of
from graphpar.report.search_chart import LISTED, bounded_of, plans_of, plans_rows, plans_svg
from graphpar.text import bytes_text, spread_text
from tests.tools.programs import example, example_file, traced_once

VOID = {"meta", "br", "rect", "path", "circle"}


class Checked(HTMLParser):
    """Tags are closed in their order, ids are unique, links lead to ids, and nothing is fetched."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert not self.open
        ids = [attributes["id"] for _, attributes in self.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {attributes["href"] for tag, attributes in self.found if tag == "a"} <= {f"#{name}" for name in ids}
        assert not [attributes for _, attributes in self.found if attributes.keys() & {"src", "srcset", "xlink:href"}]
        assert not {tag for tag, _ in self.found} & {"link", "img", "iframe", "object", "embed", "use", "image"}
        assert not re.search(r"https?:|//[\w.]+\.\w|@import|url\(|fetch\(|XMLHttp|import\(", page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID or (tag in ("rect", "path", "circle") and self.get_starttag_text()[-2] != "/"):  # type: ignore[index]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def classes(self, name: str) -> list[tuple[str, dict[str, str | None]]]:
        return [(tag, each) for tag, each in self.found if name in (each.get("class") or "").split()]


@pytest.fixture(scope="module")
def searched() -> tuple[gp.Parts, SearchResult]:
    program = example("gpt")
    plan = gp.plan(program, gp.Cluster.parse("2xA100"))
    assert plan.found is not None
    return gp.partition(program, plan), plan.found


def page_of(parts: gp.Parts) -> str:
    return parts.files["report.html"]


def test_every_priced_plan_is_a_point(searched: tuple[gp.Parts, SearchResult]) -> None:
    parts, found = searched
    search = json.loads(parts.files["search.json"])
    assert search == json.loads(json.dumps(found.to_json()))
    points = search["points"]
    assert len(points["rows"]) == found.priced == len(found.points) and points["left_out"] == 0
    plans = [dict(zip(points["columns"], row)) for row in points["rows"]]
    assert all(a["step_time_s"] <= b["step_time_s"] for a, b in pairwise(plans))
    chosen, predicted = plans[points["chosen"]], parts.report["predicted"]
    assert {axis: chosen[axis] for axis in parts.report["mesh"]} == parts.report["mesh"] and chosen["fits"]
    assert chosen["step_time_s"] == predicted["step_time_s"]
    assert chosen["peak_memory_bytes"] == max(predicted["peak_memory_bytes"])
    for other in search["alternatives"]:
        (same,) = [each for each in plans if all(each[name] == (other["mesh"] | other)[name] for name in COLUMNS[:6])
                   and each["step_time_s"] == other["step_time_s"] and each["schedule"] == other["schedule"]]  # fmt: skip
        assert same["peak_memory_bytes"] == max(other["peak_memory_bytes"])
    sizes = [(each["step_time_s"], each["peak_memory_bytes"]) for each in plans if each["fits"]]
    assert {place for place, each in enumerate(plans) if each["fits"]} >= set(points["front"])
    for place, each in enumerate(plans):
        own = each["step_time_s"], each["peak_memory_bytes"]
        dominated = any(a <= own[0] and b <= own[1] and (a, b) != own for a, b in sizes)
        assert not (place in points["front"] and dominated)
        assert place in points["front"] or dominated or not each["fits"] or sizes.count(own) > 1

    page = Checked(page_of(parts))
    assert len(page.classes("plan")) == len(plans) and len(page.classes("chosen")) == 1
    assert len(page.classes("misfit")) == sum(not each["fits"] for each in plans)
    text = f"{spread_text(chosen['step_time_s'], chosen['spread_s'])} · {bytes_text(chosen['peak_memory_bytes'])}"
    assert page_of(parts).count(text) == 1 and chosen["spread_s"] == predicted["spread_s"]


def test_every_point_says_why_it_was_not_taken(searched: tuple[gp.Parts, SearchResult]) -> None:
    """In the words of the runners-up; the table below the picture says it, too."""
    parts, found = searched
    points = json.loads(parts.files["search.json"])["points"]
    plans = [dict(zip(points["columns"], row)) for row in points["rows"]]
    assert [place for place, plan in enumerate(plans) if not plan["why_not"]] == [points["chosen"]]
    for other in (*found.alternatives, *found.misfits):
        (same,) = [plan for plan, point in zip(plans, found.points) if point.candidate == other.candidate]
        assert same["why_not"] == found.why_not(other) and same["spread_s"] == other.estimate.spread_s
    rows = plans_rows(plans_of({"points": points}))
    assert len(rows) == min(LISTED, len(plans)) and sum("Pareto" in row[0] for row in rows) == len(points["front"])
    assert [row for row in rows if "chosen" in row[0]] and all(row[-1] in page_of(parts) for row in rows)


def test_plans_that_a_bound_ruled_out_are_ticks(searched: tuple[gp.Parts, SearchResult]) -> None:
    """Of each mesh the one with the lowest bound, of which no plan was priced; no bound is below the plan that was taken."""
    parts, found = searched
    bounded = bounded_of(json.loads(parts.files["search.json"]))
    assert 0 < len(bounded) == len(found.bounded) <= BOUNDED
    assert len({each.candidate.mesh for each in found.bounded}) == len(found.bounded)
    assert not {each.candidate for each in found.bounded} & {point.candidate for point in found.points}
    assert all(a["bound_s"] <= b["bound_s"] for a, b in pairwise(bounded))
    assert found.best is not None and found.tried is not None
    assert all(each["bound_s"] >= found.best.estimate.step_time_s for each in bounded if each["fits"])
    assert len(found.bounded) <= found.tried.slower + found.tried.too_large + found.tried.no_faster
    slowest = max(point.step_time_s for point in found.points)
    drawn = Checked(page_of(parts)).classes("bounded")
    assert len(drawn) >= sum(each["bound_s"] <= slowest for each in bounded)


def test_all_plans_are_accounted_for(searched: tuple[gp.Parts, SearchResult]) -> None:
    found = searched[1]
    tried = found.tried
    assert tried is not None
    others = (tried.no_faster, tried.impossible, tried.too_large, tried.slower, tried.open)
    assert min(others) >= 0 and found.considered == found.priced + sum(others)
    assert found.best is not None and found.best.candidate.schedule in tried.values["schedule"]


def test_a_long_list_of_plans_is_bounded(searched: tuple[gp.Parts, SearchResult]) -> None:
    """The chosen plan and the Pareto front stay; the slowest go, and their number is said."""
    parts, found = searched
    assert found.best is not None
    best = next(point for point in found.points if point.candidate == found.best.candidate)

    def point(number: int, nbytes: int) -> Point:
        candidate = replace(best.candidate, microbatches=10_000 + number)
        return Point(candidate, "none", best.step_time_s * (2 + number), nbytes, True)

    large = [point(number, 2 * best.peak_memory_bytes) for number in range(POINTS + 500)]
    small = point(POINTS + 500, best.peak_memory_bytes // 2)
    search = replace(found, points=(best, *large, small), priced=POINTS + 502).to_json()
    points = search["points"]
    assert len(points["rows"]) == POINTS and points["left_out"] == 502
    rows = [row[:-1] for row in points["rows"]]  # but for why they were not taken
    assert rows[points["chosen"]] == best.row and rows[points["front"][-1]] == small.row
    page = html(parts.report | {"search": search})
    assert len(Checked(page).classes("plan")) == POINTS and "502 slower ones are not drawn" in page
    assert len(page) < 1_000_000 and len(json.dumps(points)) < 300_000


def test_a_plan_that_does_not_fit_is_drawn_so(searched: tuple[gp.Parts, SearchResult]) -> None:
    parts, found = searched
    small = replace(found.points[-1], fits=False, peak_memory_bytes=1)
    search = replace(found, points=(*found.points[:-1], small)).to_json()
    assert search["points"]["front"] and len(found.points) - 1 not in search["points"]["front"]
    points = (*found.points[:-1], replace(found.points[-1], fits=False, peak_memory_bytes=90 * 2**30, brief=None))
    page = html(parts.report | {"search": replace(found, points=points).to_json()})
    assert len(Checked(page).classes("misfit")) == 1 and "90.0 GiB: does not fit" in page


@pytest.mark.parametrize(("capacity", "near"), [(5.0, True), (19.0, True), (21.0, False)])
def test_the_key_names_the_memory_of_a_device_where_the_chart_draws_it(capacity: float, near: bool) -> None:
    rows = [[Level(0.0, (4.0,) + (0.0,) * (len(KINDS) - 1)), Level(0.5, (10.0,) + (0.0,) * (len(KINDS) - 1))]]

    assert ("line limit" in memory_time_svg(rows, ["rank 0"], [capacity], 1.0)) is near
    assert ("memory of a device" in memory_time_key(rows, [capacity])) is near


def test_each_rank_is_drawn_beside_the_memory_of_its_own_device() -> None:
    parts = dict.fromkeys(PARTS, 0)
    predicted = {
        "memory": [parts | {"activations": nbytes} for nbytes in (60, 30)], "peak_memory_bytes": [60, 30],
        "memory_bytes": 40, "headroom_bytes": 4, "rooms": [72, 36], "devices": ["large", "small"],
    }  # fmt: skip
    assert device_bytes(predicted) == [80, 40] and fullest(predicted) == 1
    rows = [[Level(0.0, (total,) + (0.0,) * (len(KINDS) - 1))] for total in (60.0, 30.0)]
    for chart in (memory_svg(predicted, ["pp 0", "pp 1"]), memory_time_svg(rows, ["pp 0", "pp 1"], [80, 40], 1.0)):
        assert len(set(re.findall(r'limit" d="M([\d.]+ [\d.]+)', chart))) == 2
    places = [float(x) for x in re.findall(r'limit" d="M([\d.]+)', memory_svg(predicted, ["", ""]))]
    assert places[0] - left_of([""]) == pytest.approx(2 * (places[1] - left_of([""])), abs=0.2)
    plan: dict[str, Any] = {"step_time_s": 1.0, "peak_memory_bytes": 60, "fits": True, "chosen": True, "best": True}
    named = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp", "stages_per_rank"), 1)
    plan |= named | {"schedule": "1F1B", "microbatches": 1, "microbatch_size": 1, "zero": 0}
    assert plans_svg([plan], device_bytes(predicted)).count("memory of a device") == 2


def test_of_many_pp_groups_some_are_stacks_the_fullest_among_them() -> None:
    empty = (0.0,) * (len(KINDS) - 1)
    rows = [[Level(0.0, (2.0 if rank == 40 else 1.0, *empty)), Level(1.0, (1.0, *empty))] for rank in range(128)]
    shown = stacks_of(rows)
    assert len(shown) == ROWS and {0, 40, 127} <= set(shown) and stacks_of(rows[:ROWS]) == list(range(ROWS))
    assert memory_time_svg(rows, [f"pp {rank}" for rank in range(128)], [3.0] * 128, 1.0).count("<title>") == ROWS


@pytest.mark.costly
def test_inference_keeps_no_activations() -> None:
    program = traced_once(example_file("head_first"), "infer", None)
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}))
    lines = memory_over_time(parts.report, timeline_of(parts.report))
    assert lines is not None
    for line, peak in zip(lines, parts.report["predicted"]["peak_memory_bytes"]):
        assert max(level.total for level in line) == pytest.approx(peak, abs=2)
    page = page_of(parts)
    Checked(page)
    sizes = re.findall(r'<text class="axis end" x="(\d+)"[^>]*>([^<]*)</text>', page)
    assert sizes and all(6 * len(size) <= int(x) for x, size in sizes), "a size is cut off at the left"


# ---- in a browser ----------------------------------------------------------------------------------------------

BROWSER = os.environ.get("GRAPHPAR_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
_PROBE = """
const said = {}, chart = document.querySelector("svg.timeline").closest(".chart");
const box = () => document.querySelector("svg.timeline svg.zoom").getAttribute("viewBox").split(" ").map(Number);
const tip = () => document.getElementById("tip").textContent, at = (shape) => { const b = shape.getBoundingClientRect();
  return { clientX: b.left + b.width / 2, clientY: b.top + b.height / 2, bubbles: true, cancelable: true }; };
const plan = document.querySelector(".plan.chosen");
plan.dispatchEvent(new PointerEvent("pointermove", at(plan)));
said.plan = tip();
chart.focus();
for (const [name, key] of [["in", "+"], ["next", "ArrowRight"], ["all", "0"]]) {
  chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  said[name] = key === "ArrowRight" ? tip() : box();
}
const svg = document.querySelector("svg.timeline");
svg.dispatchEvent(new WheelEvent("wheel", { ...at(svg), deltaY: -300 }));
said.wheel = box();
said.memory = document.querySelector("svg.memory svg.zoom").getAttribute("viewBox").split(" ").map(Number);
said.background = getComputedStyle(document.body).backgroundColor;
said.fetched = performance.getEntriesByType("resource").map((each) => each.name);
JSON.stringify(said);
"""


class Browser:
    """A browser without a window, which is told what to do over its DevTools pipe; a page in it, and the errors of its scripts."""

    def __init__(self, path: str, folder: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (*os.pipe(), *os.pipe())]  # away from 3 and 4
        its_input, self.write, self.read, its_output = ends
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        moved = [(os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4)]
        self.pid = os.posix_spawn(path, [path, *flags], os.environ, file_actions=moved)
        self.number, self.session, self.left, self.errors = 0, "", b"", list[str]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(
            self.write, json.dumps({"id": self.number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        while True:
            while b"\0" not in self.left:
                ready, _, _ = select.select([self.read], [], [], 120)
                assert ready, f"the browser does not answer {method}"
                self.left += os.read(self.read, 1 << 16)
            line, _, self.left = self.left.partition(b"\0")
            message = json.loads(line)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]))
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def show(self, url: str) -> None:
        """Open a page and wait until its scripts have run."""
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page"):
            self.do(f"{domain}.enable")
        self.do("Page.navigate", url=url)
        self.value(
            "new Promise((on) => document.readyState === 'complete' ? on() : addEventListener('load', () => on()))"
        )

    def value(self, expression: str) -> Any:
        """Evaluate in the page."""
        found = self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@pytest.mark.skipif(not BROWSER, reason="no browser: GRAPHPAR_CHROMIUM names one")
def test_in_a_browser(searched: tuple[gp.Parts, SearchResult], tmp_path: Path) -> None:
    """Pointing at a plan describes it; keys and the wheel zoom both charts over time; nothing is fetched, and no script fails."""
    (tmp_path / "page.html").write_text(page_of(searched[0]))
    with Browser(str(BROWSER), tmp_path / "profile") as browser:
        backgrounds = set()
        for scheme in ("light", "dark"):
            browser.show((tmp_path / "page.html").as_uri())
            browser.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            said = json.loads(browser.value(f"{{{_PROBE}}}"))
            browser.session = ""
            assert said["plan"].startswith("CHOSEN · ") and "microbatch" in said["plan"]
            assert 0 < said["in"][2] < 100_000 and ", from " in said["next"] and said["all"][:3] == [0, 0, 100_000]
            assert said["wheel"][2] < 100_000 and said["memory"][:3] == said["wheel"][:3] and said["fetched"] == []
            backgrounds.add(said["background"])
        assert len(backgrounds) == 2 and browser.errors == []
