"""``why_not``: why a plan is slower than another, in a few words with numbers.

Estimate, Estimate ──parts of the step, one by one──► the largest loss ──► "tp traffic 96 ms exposed, not 29 ms"
"""

from __future__ import annotations

from collections.abc import Mapping

from graphpar.cost_models.estimates import Estimate
from graphpar.text import bytes_text, seconds_text, share_text

_LEAST = 1e-4
"""Losses below this share of the step count as none."""


def why_not(best: Estimate | None, other: Estimate) -> str:
    """Return why ``other`` was not chosen: it does not fit, or which part of its step loses most against ``best``."""
    if other.missing_bytes > 0:
        return misfit(other)
    if best is None:
        return ""
    losses = _losses(best, other)
    part = max(losses, key=losses.__getitem__)
    if losses[part] <= _LEAST * other.step_time_s:
        return "as fast; the simpler of the two was taken"
    return _WORDS[part](best, other) if part in _WORDS else _part(best, other, part)


def misfit(estimate: Estimate) -> str:
    """Return ``does not fit: stage 0 needs 91.2 GiB of 77.6 GiB``."""
    rank, stages = estimate.fullest
    where = (
        f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        if len(estimate.stages) > 1
        else "a device"
    )
    need = "need" if len(stages) > 1 and len(estimate.stages) > 1 else "needs"
    return f"does not fit: {where} {need} {bytes_text(estimate.peak_memory_bytes[rank])} of {bytes_text(estimate.memory_bytes)}"


def _losses(best: Estimate, other: Estimate) -> Mapping[str, float]:
    """Return the seconds by which each part of ``other`` is longer; what uneven stages lose is one of the parts."""
    mine, theirs = _parts(other), _parts(best)
    return {part: mine.get(part, 0.0) - theirs.get(part, 0.0) for part in mine | theirs}


def _parts(estimate: Estimate) -> dict[str, float]:
    """Return the parts of the busiest rank's step; its work above the mean is ``uneven``."""
    even = _evenness(estimate)
    busy = ("bubble", "pp", "gradients", "optimizer")
    parts = {part: seconds if part in busy else even * seconds for part, seconds in estimate.parts_s.items()}
    return parts | {"uneven": estimate.step_time_s - sum(parts.values())}


def _evenness(estimate: Estimate) -> float:
    """Return the mean work of ranks divided by that of the busiest."""
    work = [0.0] * len(estimate.memory)
    for stage in estimate.stages:
        work[stage.rank] += stage.forward_s + stage.backward_s
    return sum(work) / len(work) / max(work) if max(work) else 1.0


def _rate(estimate: Estimate) -> float:
    """Return the share of the devices' peak that is reached while they compute."""
    return estimate.mfu * estimate.step_time_s / estimate.compute_s if estimate.compute_s else 0.0


def _compute(best: Estimate, other: Estimate) -> str:
    rates = (
        f": {share_text(_rate(other))} of the peak, not {share_text(_rate(best))}"
        if _rate(other) < 0.99 * _rate(best)
        else ""
    )
    return f"computes {seconds_text(other.compute_s)}, not {seconds_text(best.compute_s)}{rates}"


def _uneven(best: Estimate, other: Estimate) -> str:
    return f"uneven stages: the slowest rank has {1 / _evenness(other):.2f}x the mean to do, not {1 / _evenness(best):.2f}x"


def _bubble(best: Estimate, other: Estimate) -> str:
    shares = [estimate.parts_s.get("bubble", 0.0) / estimate.step_time_s for estimate in (other, best)]
    against = f", not {share_text(shares[1])}" if shares[1] else ""
    return f"bubble of {seconds_text(other.parts_s['bubble'])}: {share_text(shares[0])} of the step{against}"


def _part(best: Estimate, other: Estimate, part: str) -> str:
    """Return ``tp traffic 96 ms exposed, not 29 ms``, or what the part is called in ``_PHRASES``."""
    seconds = best.parts_s.get(part, 0.0)
    against = f", not {seconds_text(seconds)}" if seconds else ""
    return (
        _PHRASES.get(part, f"{part} traffic {{}} exposed").format(seconds_text(other.parts_s.get(part, 0.0))) + against
    )


_WORDS = {"compute": _compute, "uneven": _uneven, "bubble": _bubble}
_PHRASES = {
    "host": "devices wait {} for the host to start operators",
    "pp": "waits {} for transfers between stages",
    "gradients": "sums of gradients {} exposed",
    "optimizer": "optimizer step of {}",
}
