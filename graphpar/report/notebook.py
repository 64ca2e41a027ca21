"""Plans, estimates and partitioned programs in notebooks: the report's page, or parts of it, in a separate frame.

Plan | Estimate | Parts ──_repr_html_──► <iframe srcdoc="a self-contained page">, whose style is not the notebook's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from graphpar.report.page import facts, html, page
from graphpar.report.predicted import mesh_text
from graphpar.report.report import plan_text
from graphpar.text import bytes_text, indices_text, seconds_text, share_text

if TYPE_CHECKING:
    from graphpar.cost_models.estimates import Estimate
    from graphpar.ir.plan import Plan


def report_frame(data: Mapping[str, Any]) -> str:
    """Show the page of a report's data."""
    return _frame(html(data))


def plan_frame(plan: Plan) -> str:
    """Show the decisions of a plan and its prediction."""
    pairs: list[tuple[object, str]] = [] if plan.predicted is None else _step_facts(plan.predicted)
    pairs += [
        (mesh_text(plan.mesh.degrees()), "mesh"),
        (plan.schedule, "schedule"),
        (f"{plan.microbatches} x {plan.microbatch_size}", "microbatches x rows"),
    ]
    return _frame(
        page(plan.model, [f"<h1>{escape(plan.model)}</h1>", facts(pairs), f"<pre>{escape(plan_text(plan))}</pre>"])
    )


def estimate_frame(estimate: Estimate) -> str:
    """Show the time of a step, its parts, and the stages."""
    whole = estimate.step_time_s
    parts = [(name, seconds_text(took), share_text(took / whole)) for name, took in estimate.parts_s.items() if took]
    stages = [
        (str(stage.index), str(stage.rank), seconds_text(stage.forward_s), seconds_text(stage.backward_s))
        for stage in estimate.stages
    ]
    peaks = [
        (str(rank), bytes_text(each.total), bytes_text(each.allocated)) for rank, each in enumerate(estimate.memory)
    ]
    body = [
        f"<h1>{escape(estimate.cluster)}</h1>",
        facts(_step_facts(estimate)),
        "<h2>Parts of a step</h2>",
        _table(("Part", "Takes", "Share"), parts),
        "<h2>Stages, a microbatch</h2>",
        _table(("Stage", "pp", "Forward", "Backward"), stages),
        "<h2>Memory</h2>",
        _table(("pp", "Peak of a rank", "Allocated"), peaks),
    ]
    return _frame(page(estimate.cluster, body))


def _step_facts(estimate: Estimate) -> list[tuple[object, str]]:
    rank, stages = estimate.fullest
    peak = f"{bytes_text(estimate.peak_memory_bytes[rank])} of {bytes_text(estimate.memory_bytes)}"
    return [
        (seconds_text(estimate.step_time_s), "a step"),
        (share_text(estimate.mfu), "MFU"),
        (share_text(estimate.bubble_fraction), "bubble"),
        (peak, f"peak, on stage {indices_text(stages)}"),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    return f'<div class="scroll"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def _frame(text: str) -> str:
    return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 36rem; border: 0"></iframe>'
