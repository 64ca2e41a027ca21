"""The page's section on the search: every priced plan as a point, what was tried and left out and why, and the runners-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphpar.report.pareto import pareto_svg, plans_of
from graphpar.report.predicted import named, searched_text
from graphpar.text import plural, seconds_text

_OUTCOMES = {
    "priced": "priced: the points above",
    "slower": "not priced: a lower bound of the step time is above the plans that were found",
    "too_large": "not priced: a lower bound of the memory is above a device's",
    "open": "not priced: the time limit was over",
    "no_faster": "left out: a larger tp that makes microbatches no faster",
    "impossible": "not possible: the model can't be sharded so, or has fewer units than stages",
}
"""What becomes of a candidate, in the order of the table."""
_DECISIONS = {
    **{axis: axis for axis in ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")},
    "zero": "ZeRO", "reshard": "reshard", "schedule": "schedule", "stages_per_rank": "stages a rank", "microbatches": "microbatches",
    "microbatch_size": "rows of a microbatch",
}  # fmt: skip


def search_sections(data: Mapping[str, Any]) -> list[str]:
    """Write the chart of plans, what was tried, and the runners-up, as HTML; nothing where there was no search."""
    search = data.get("search")
    if not search:
        return []
    return [
        '<h2 id="plans">Plans</h2>',
        f'<p class="soft">{escape(searched_text(search))}.</p>',
        *_chart(data, search),
        '<h2 id="searched">What was tried</h2>',
        *_tried(data, search),
        "<h3>Runners-up</h3>",
        _runners_up(data, search),
    ]


def _chart(data: Mapping[str, Any], search: Mapping[str, Any]) -> list[str]:
    plans = plans_of(search)
    if not plans:
        return []
    left_out = search["points"]["left_out"]
    more = f" {left_out:,} slower ones are not drawn." if left_out else ""
    shown = {"chosen": "#e08a3c", "on the Pareto front: none is faster and smaller": "var(--accent)"}
    entries = "".join(
        f'<span class="entry"><span class="key dot" style="background:{color}"></span>{name}</span>'
        for name, color in shown.items()
    )
    entries += (
        '<span class="entry"><span class="key dot" style="background:var(--accent);opacity:.55"></span>other</span>'
    )
    if not all(plan["fits"] for plan in plans):
        entries += '<span class="entry" style="color:var(--warn)">× does not fit</span>'
    return [
        '<div class="chart plans" tabindex="0" role="group" aria-label="Priced plans: arrow keys go from one to the next">'
        f"{pareto_svg(plans, data['predicted']['memory_bytes'])}</div>",
        f'<div class="soft">{entries}</div>',
        f'<p class="soft">{plural(len(plans), "plan")}, each with its predicted step and the peak of its fullest rank.{more} '
        "Left and down is better. Point at one, or Tab to the chart and use the arrow keys, for its mesh and the rest.</p>",
    ]


def _tried(data: Mapping[str, Any], search: Mapping[str, Any]) -> list[str]:
    parts = []
    tried = search.get("tried")
    if tried:
        counts = {"priced": search["priced"]} | tried
        most = max(1, search["considered"])
        rows = "".join(
            f'<tr><td class="right">{counts[name]:,}</td><td class="no"><span class="bar{"" if name == "priced" else " faint"}" '
            f'style="width:{160 * counts[name] / most:.0f}px"></span></td><td>{text}</td></tr>'
            for name, text in _OUTCOMES.items()
            if counts[name]
        )
        head = f'<tr><th class="right">of {search["considered"]:,} plans</th><th></th><th>what became of them</th></tr>'
        parts.append(f'<div class="scroll"><table>{head}{rows}</table></div>')
        parts.append(_values(data, tried["values"]))
    reasons = [*(f"not tried: {text}" for text in search["left_out"]), *search["refused"]]
    if reasons:
        parts.append(f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>")
    return parts


def _values(data: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> str:
    """Write a table of the values of each decision that were tried, the chosen one in bold."""
    chosen = {**data["mesh"], **{name: data.get(name) for name in ("zero", "reshard", "schedule")}}
    chosen |= {"microbatches": data["microbatches"], "microbatch_size": data["microbatch_size"]}
    chosen["stages_per_rank"] = len(data["stages"]) // data["mesh"]["pp"]
    rows = []
    for name, label in _DECISIONS.items():
        found = values.get(name, ())
        texts = [f"<b>{escape(str(value))}</b>" if value == chosen.get(name) else escape(str(value)) for value in found]
        alone = ' <span class="soft">(the only one tried)</span>' if len(texts) == 1 else ""
        rows.append(f"<tr><td>{label}</td><td>{', '.join(texts)}{alone}</td></tr>")
    head = "<tr><th>decision</th><th>values tried, the chosen one in bold</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _runners_up(data: Mapping[str, Any], search: Mapping[str, Any]) -> str:
    step = data["predicted"]["step_time_s"]
    rows = []
    for other in search["alternatives"]:
        seconds = other["step_time_s"]
        texts = (*named(other), seconds_text(seconds), f"{seconds / step - 1:+.1%}", other["why_not"])
        rows.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    if not rows:
        return '<p class="soft">No plan on another mesh.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("mesh", "schedule", "a step", "", "why not"))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
