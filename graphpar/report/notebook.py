"""Plans, estimates and partitioned programs in notebooks: the report's page, or parts of it, in a separate frame.

Plan | Estimate | Parts ──_repr_html_──► <iframe srcdoc="a self-contained page">, whose style is not the notebook's
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from markupsafe import Markup

from graphpar.cost_models.estimates import Estimate
from graphpar.ir.plan import Plan
from graphpar.passes.planning.planned import Planned
from graphpar.report.page import html, sheet, table
from graphpar.report.phrases import mesh_text
from graphpar.report.report import plan_text
from graphpar.text import bytes_text, indices_text, seconds_text, share_text


def report_frame(data: Mapping[str, Any]) -> str:
    """Show the page of a report's data."""
    return _frame(html(data))


def plan_frame(plan: Plan) -> str:
    """Show the decisions of a plan and its prediction."""
    pairs: list[tuple[object, str]] = []
    if isinstance(plan, Planned) and plan.predicted is not None:
        pairs += _step_facts(plan.predicted)
    pairs += [
        (mesh_text(plan.mesh.degrees()), "mesh"),
        (plan.schedule, "schedule"),
        (f"{plan.microbatches} x {plan.microbatch_size}", "microbatches x rows"),
    ]
    return _frame(sheet(plan.model, [("", Markup("<pre>{}</pre>").format(plan_text(plan)))], pairs))


def estimate_frame(estimate: Estimate) -> str:
    """Show the time of a step, its parts, and the stages."""
    whole = estimate.step_time_s
    parts = [(name, seconds_text(took), share_text(took / whole)) for name, took in estimate.parts_s.items() if took]
    stages = [
        (stage.index, stage.rank, seconds_text(stage.forward_s), seconds_text(stage.backward_s))
        for stage in estimate.stages
    ]
    peaks = [(rank, bytes_text(each.total), bytes_text(each.allocated)) for rank, each in enumerate(estimate.memory)]
    sections = [
        ("Parts of a step", table(("Part", "Takes", "Share"), parts)),
        ("Stages, a microbatch", table(("Stage", "pp", "Forward", "Backward"), stages)),
        ("Memory", table(("pp", "Peak of a rank", "Allocated"), peaks)),
    ]
    return _frame(sheet(estimate.cluster, sections, _step_facts(estimate)))


def _step_facts(estimate: Estimate) -> list[tuple[object, str]]:
    rank, stages = estimate.fullest
    peak = f"{bytes_text(estimate.peak_memory_bytes[rank])} of {bytes_text(estimate.memory_bytes)}"
    return [
        (seconds_text(estimate.step_time_s), "a step"),
        (share_text(estimate.mfu), "MFU"),
        (share_text(estimate.bubble_fraction), "bubble"),
        (peak, f"peak, on stage {indices_text(stages)}"),
    ]


def _frame(text: str) -> str:
    return f'<iframe srcdoc="{escape(text)}" style="width: 100%; height: 36rem; border: 0"></iframe>'
