"""Charts of bars and lines, as SVG without script: memory of ranks at their peaks, communication by axis, throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphpar.report.predicted import allocated_bytes
from graphpar.report.timeline_chart import WIDTH, left_of
from graphpar.text import bytes_text, rate_text, seconds_text, share_text

PARTS = {
    "parameters": "#3b82c4",
    "copies": "#7fb0dd",
    "gradients": "#e08a3c",
    "optimizer": "#5a9e6f",
    "main_copies": "#8fbf9f",
    "activations": "#a05195",
    "transient": "#d45087",
    "boundaries": "#c9a227",
    "buckets": "#7f8c9a",
    "buffers": "#6b6ecf",
    "inputs": "#9c9ede",
    "slack": "#b9c2cb",
}
"""Colors of the parts of a rank's memory, in the order in which they are drawn."""


def memory_chart(
    predicted: Mapping[str, Any], names: Sequence[str], width: int = WIDTH, height: int = 18, gap: int = 5
) -> str:
    """Draw a bar for a rank of each pp group: the parts of its memory at the peak, and a line at the device's memory if that is near."""
    peaks, capacity = predicted["peak_memory_bytes"], predicted["memory_bytes"]
    longest = max(max(peaks), 1)
    near, left = longest > capacity / 3, left_of(names)
    scale = (width - left - 90) / (max(longest, capacity) if near else longest)
    shapes = []
    for rank, (memory, peak) in enumerate(zip(predicted["memory"], peaks)):
        top, x = rank * (height + gap), left
        shapes.append(f'<text class="axis" x="0" y="{top + height - 5}">{names[rank]}</text>')
        for part in PARTS:
            wide = memory[part] * scale
            if wide >= 0.05:
                tip = f"{part.replace('_', ' ')}: {bytes_text(memory[part])}"
                shapes.append(
                    f'<g><title>{tip}</title><rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" fill="{PARTS[part]}"/></g>'
                )
            x += wide
        shapes.append(f'<text class="axis" x="{x + 5:.1f}" y="{top + height - 5}">{bytes_text(peak)}</text>')
    tall = len(peaks) * (height + gap)
    if near:
        x = left + capacity * scale
        shapes.append(f'<path class="limit" d="M{x:.1f} 0v{tall}"/>')
    used = [part for part in PARTS if any(memory[part] for memory in predicted["memory"])]
    key = "".join(
        f'<span class="entry"><span class="key" style="background:{PARTS[part]}"></span>{part.replace("_", " ")}</span>'
        for part in used
    )
    line = " (the line)" if near else ""
    allocated = bytes_text(allocated_bytes(predicted)[peaks.index(max(peaks))])
    return (
        f'<svg class="peaks" viewBox="0 0 {width} {tall}" role="img" aria-label="Memory at the peak">{"".join(shapes)}</svg></div>'
        f'<div class="soft">{key}</div>'
        f'<p class="soft">Of each rank at its peak. Slack is what the allocator reserves beyond what tensors take, {allocated} on '
        f"the fullest rank. A device has {bytes_text(capacity)}{line}.</p>"
    )


def axes_chart(predicted: Mapping[str, Any], height: int = 18, gap: int = 5) -> str:
    """Draw a bar for each axis of the mesh: what of its communication is exposed, and, fainter, what computation hides."""
    sent, exposed = predicted["communication_s"], predicted["exposed_s"]
    left = left_of(list(sent))
    scale = (WIDTH - left - 200) / (max(sent.values()) or 1.0)
    shapes = []
    for number, (axis, seconds) in enumerate(sent.items()):
        top, shown = number * (height + gap), exposed.get(axis, 0.0)
        tip = f"{axis}: {seconds_text(seconds)} a step, {seconds_text(shown)} exposed, {share_text(shown / predicted['step_time_s'])} of it"
        shapes.append(f'<text class="axis" x="0" y="{top + height - 5}">{axis}</text>')
        shapes.append(
            f'<g><title>{tip}</title><rect x="{left}" y="{top}" width="{seconds * scale:.1f}" height="{height}" fill="#b0305c55"/>'
            f'<rect x="{left}" y="{top}" width="{shown * scale:.1f}" height="{height}" fill="#b0305c"/></g>'
        )
        text = f"{seconds_text(seconds)}, {seconds_text(shown)} exposed"
        shapes.append(f'<text class="axis" x="{left + seconds * scale + 5:.1f}" y="{top + height - 5}">{text}</text>')
    tall = len(sent) * (height + gap)
    key = "".join(
        f'<span class="entry"><span class="key" style="background:{color}"></span>{name}</span>'
        for name, color in (("exposed", "#b0305c"), ("hidden behind computation", "#b0305c55"))
    )
    return (
        f'<svg class="axes" viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="Communication by mesh axis">{"".join(shapes)}</svg>'
        f'</div><div class="soft">{key}</div>'
    )


def throughput_svg(points: Sequence[tuple[str, int, float, str]], width: int = 700, height: int = 300) -> str:
    """Draw rows a second against devices, both from 0, as a line for each name.

    ``points``: name of the line, devices, rows a second, cluster.
    """
    colors = list(PARTS.values())
    left, foot = 70, 24
    most, fastest = max(point[1] for point in points), max(point[2] for point in points)
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for name, devices, rate, cluster in sorted(points, key=lambda point: point[1]):
        x, y = left + (width - left - 10) * devices / most, height - foot - (height - foot - 10) * rate / fastest
        tip = f"{name}, {cluster}: {rate_text(rate)} rows/s on {devices} devices"
        lines.setdefault(name, []).append((x, y, escape(tip)))
    shapes = [f'<path d="M{left} 10V{height - foot}H{width - 10}" fill="none" stroke="#98a5b2"/>']
    for devices in sorted({point[1] for point in points}):
        x = left + (width - left - 10) * devices / most
        shapes.append(f'<text class="axis" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{devices}</text>')
    for share in (0.5, 1.0):
        y = height - foot - (height - foot - 10) * share
        shapes.append(
            f'<text class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{rate_text(fastest * share, 3)}</text>'
        )
    key = ""
    for place, (name, line) in enumerate(lines.items()):
        color = colors[place % len(colors)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in line)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{tip}</title></circle>'
            for x, y, tip in line
        ]
        key += f'<span class="entry"><span class="key" style="background:{color}"></span>{escape(name)}</span>'
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(shapes)}'
        f'</svg></div><div class="soft">{key}</div>'
    )
