"""``formulas``: the work and memory of stages as polynomials in the rows of a microbatch (b) and the sequence length (s).

    units ──Work.formula, UnitMemory──► polynomials in b ──the same at four lengths──► polynomials in b and s, of degree 2 at most in s

A trace has one sequence length, so the dependence on s is fitted: the polynomial through three lengths is used where it also gives the
value at a fourth exactly; else the formula stays in b alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import sympy  # type: ignore[import-untyped]

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.pipeline_units import JoinedUnits, Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.work import Work

B, S = sympy.Symbol("b", positive=True), sympy.Symbol("s", positive=True)
KEPT = "kept bytes"
Formulas = Mapping[str, sympy.Expr]
PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 4))
"""The sequence lengths to sample, as fractions of the example's; the last one is the check."""
_ROWS = (2, 3, 5, 64)
"""Microbatch sizes at which kept bytes are sampled: a line through the first two, checked with the others."""


def formulas(pricing: Pricing, layout: Layout) -> list[Formulas]:
    """Return for each stage and one microbatch of b rows: flops, bytes moved by memory-bound kernels, bytes of collectives by axis,
    and bytes kept for the backward where those are linear in b."""
    found: list[Formulas] = []
    for first, after in pricing.stages_of(layout):
        units = pricing.units[first:after]
        work = sum((unit.kind.work for unit in units), Work())
        kept = _kept(units)
        found.append(work.formula(B) | ({} if kept is None else {KEPT: kept}))
    return found


def _kept(units: Sequence[Unit]) -> sympy.Expr | None:
    kept = {rows: JoinedUnits(units, rows).stage(0, len(units)).kept for rows in _ROWS}
    slope = kept[_ROWS[1]] - kept[_ROWS[0]]
    fixed = kept[_ROWS[0]] - _ROWS[0] * slope
    rounding = len(units)  # sizes of units are whole bytes
    linear = all(abs(fixed + slope * rows - nbytes) <= rounding for rows, nbytes in kept.items())
    return fixed + slope * B if linear else None


def in_sequence(samples: Mapping[int, Sequence[Formulas]]) -> list[Formulas] | None:
    """Fit formulas in b and s to those in b at several lengths; the last length checks, and a formula that fails is left out.

    Returns:
        None where the stages or the kinds of work differ between lengths.
    """
    *lengths, checked = samples
    if len({tuple(tuple(sorted(stage)) for stage in stages) for stages in samples.values()}) > 1:
        return None
    found: list[Formulas] = []
    for place, stage in enumerate(samples[checked]):
        fitted = {name: _fitted({length: samples[length][place][name] for length in lengths}) for name in stage}
        found.append(
            {name: fit for name, fit in fitted.items() if sympy.expand(fit.subs(S, checked) - stage[name]) == 0}
        )
    return found


def _fitted(samples: Mapping[int, sympy.Expr]) -> sympy.Expr:
    """Interpolate in s, for each coefficient of b."""
    powers = {power for sample in samples.values() for (power,) in sympy.Poly(sample, B).monoms()}
    terms = []
    for power in sorted(powers, reverse=True):
        points = [(length, sympy.Poly(sample, B).coeff_monomial(B**power)) for length, sample in samples.items()]
        terms.append(sympy.interpolate(points, S) * B**power)
    return sympy.expand(sum(terms))
