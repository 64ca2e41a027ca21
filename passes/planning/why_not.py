"""``why_not``: what a plan loses against a faster one, in a few words with numbers.

Estimate, Estimate ──parts of the step, one by one──► the largest loss ──► "tp traffic 96 ms exposed, not 29 ms"
"""

from __future__ import annotations

from collections.abc import Mapping

from graphpar.cost_models.estimates import Estimate
from graphpar.text import bytes_text, seconds_text, share_text

_LEAST = 1e-4
"""Less than this share of the step is no loss."""


def why_not(best: Estimate | None, other: Estimate) -> str:
    """Why ``other`` was not taken: it does not fit, or the part of its step that is longest beside the same part of ``best``."""
    if other.missing_bytes > 0:
        return misfit(other)
    if best is None:
        return ""
    losses = _losses(best, other)
    part = max(losses, key=losses.__getitem__)
    if losses[part] <= _LEAST * other.step_time_s:
        return "as fast; the simpler of the two was taken"
    return _WORDS.get(part, _traffic)(best, other, part)


def misfit(estimate: Estimate) -> str:
    """``does not fit: stage 0 needs 91.2 GiB of 77.6 GiB``."""
    rank, stages = estimate.fullest
    where = (
        f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        if len(estimate.stages) > 1
        else "a device"
    )
    need = "need" if len(stages) > 1 and len(estimate.stages) > 1 else "needs"
    return f"does not fit: {where} {need} {bytes_text(estimate.peak_memory_bytes[rank])} of {bytes_text(estimate.memory_bytes)}"


def _losses(best: Estimate, other: Estimate) -> Mapping[str, float]:
    """Seconds by which each part of ``other`` is longer. What is lost to uneven stages is a part of its own."""
    mine, theirs = _parts(other), _parts(best)
    return {part: mine.get(part, 0.0) - theirs.get(part, 0.0) for part in mine | theirs}


def _parts(estimate: Estimate) -> dict[str, float]:
    """Those of the busiest rank; what it has more to do than the mean is ``uneven``."""
    even = _evenness(estimate)
    busy = ("bubble", "pp", "gradients", "optimizer")
    parts = {part: seconds if part in busy else even * seconds for part, seconds in estimate.parts_s.items()}
    return parts | {"uneven": estimate.step_time_s - sum(parts.values())}


def _evenness(estimate: Estimate) -> float:
    """The mean of what ranks have to do over the most that one has."""
    work = [0.0] * len(estimate.memory)
    for stage in estimate.stages:
        work[stage.rank] += stage.forward_s + stage.backward_s
    return sum(work) / len(work) / max(work) if max(work) else 1.0


def _rate(estimate: Estimate) -> float:
    """The share of the devices' peak that is reached while they compute."""
    return estimate.mfu * estimate.step_time_s / estimate.compute_s if estimate.compute_s else 0.0


def _compute(best: Estimate, other: Estimate, part: str) -> str:
    rates = (
        f": {share_text(_rate(other))} of the peak, not {share_text(_rate(best))}"
        if _rate(other) < 0.99 * _rate(best)
        else ""
    )
    return f"computes {seconds_text(other.compute_s)}, not {seconds_text(best.compute_s)}{rates}"


def _host(best: Estimate, other: Estimate, part: str) -> str:
    return f"devices wait {_own(other, part)} for the host to start operators{_not(best, part)}"


def _uneven(best: Estimate, other: Estimate, part: str) -> str:
    return f"uneven stages: the slowest rank has {1 / _evenness(other):.2f}x the mean to do, not {1 / _evenness(best):.2f}x"


def _bubble(best: Estimate, other: Estimate, part: str) -> str:
    shares = [estimate.parts_s.get("bubble", 0.0) / estimate.step_time_s for estimate in (other, best)]
    against = f", not {share_text(shares[1])}" if shares[1] else ""
    return f"bubble of {seconds_text(other.parts_s['bubble'])}: {share_text(shares[0])} of the step{against}"


def _transfers(best: Estimate, other: Estimate, part: str) -> str:
    return f"waits {_own(other, part)} for transfers between stages{_not(best, part)}"


def _gradients(best: Estimate, other: Estimate, part: str) -> str:
    return f"sums of gradients {_own(other, part)} exposed{_not(best, part)}"


def _optimizer(best: Estimate, other: Estimate, part: str) -> str:
    return f"optimizer step of {_own(other, part)}{_not(best, part)}"


def _traffic(best: Estimate, other: Estimate, part: str) -> str:
    return f"{part} traffic {_own(other, part)} exposed{_not(best, part)}"


def _own(other: Estimate, part: str) -> str:
    return seconds_text(other.parts_s.get(part, 0.0))


def _not(best: Estimate, part: str) -> str:
    return f", not {seconds_text(seconds)}" if (seconds := best.parts_s.get(part, 0.0)) else ""


_WORDS = {
    "compute": _compute, "host": _host, "uneven": _uneven, "bubble": _bubble, "pp": _transfers, "gradients": _gradients,
    "optimizer": _optimizer,
}  # fmt: skip
