"""QuZO's statements: estimators of rounded perturbations, updates of quantized weights, and its algorithm as printed.

Training in low bits is judged on its formulas, and on the weights and perturbations in quantized values that runs take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from costmodel.formats.roundings import RoundedPerturbation
from executors.low_bits.grids import grid_of
from executors.randomness.rng import generator_on
from executors.randomness.rounded import Purpose
from executors.steps.arithmetic import projected_gradient
from executors.steps.micro_batches import accumulated
from proofs_checks.claims import Checks, conditioned, corrected, counterexample, printed, reading
from proofs_checks.exact import (
    Array,
    at_most,
    equal,
    exceeds,
    is_true,
    moments_of_estimate,
    normal_nodes,
    sign_nodes,
    within,
)
from proofs_checks.faults import (
    central_by_epsilon,
    forward_by_two_epsilon,
    losses_added,
    perturbations_summed,
)
from proofs_checks.oracles.statements import one_point_error, perturbation_error
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.planting import Fault, called_with, planted, returning
from proofs_checks.setups import quantized_weights as quantized
from proofs_checks.setups.executed import Case, against_literal, differences
from proofs_checks.setups.roundings import (
    NUM_UNIFORMS,
    Reaching,
    clamped_too_far,
    half_a_step_on,
    no_scale,
    no_unit,
    no_zero_point,
    qvalues_and_probabilities,
    qvalues_of,
    sampled_pair,
    uniforms_high,
    uniforms_of,
    weight_value,
    weights_at_random,
)
from proofs_checks.statistics import compare_means, fitted_slope

_CPU = torch.device("cpu")
_SLOPE = torch.tensor([0.8, -0.3, 0.5], dtype=torch.float64)

# -- roundings -------------------------------------------------------------------------------------------------------


_ZERO_POINT = 128
"""``z₀``, that of a weight of 8 bits."""


def check_scaled_outer_product(how: str, _context: Context) -> Outcome:
    """Compare ``E[u₁u₂ᵀ]`` of two roundings of a vector with theory: as printed in quantized values, or of shipped weights."""
    rounding = Reaching("gaussian", 8, limit=6.35)
    given = (0.3125, -0.765625, 1.5)  # multiples of 1/256, of quantized values
    outcomes = [
        [
            # What the print makes of a quantized value, never divided by the scale; and what a shipped weight makes of it.
            (
                float(qvalue + _ZERO_POINT) if how == "printed" else weight_value(qvalue, 20.0, _ZERO_POINT),
                probability,
            )
            for qvalue, probability in qvalues_and_probabilities(u, rounding)
        ]
        for u in given
    ]
    means = [sum(p * value for value, p in of_one) for of_one in outcomes]
    squares = [
        sum(p * q * a * b for (a, p), (b, q) in itertools.product(of_one, repeat=2)) for of_one in outcomes
    ]
    theory = [20 * u + _ZERO_POINT for u in given] if how == "printed" else list(given)
    return everything_holds(
        {
            # A weight's scale is a float32.
            "E[Q(u)|u]": equal(means, theory, what=how, tolerance=1e-6),
            "E[Q₁(u)Q₂(u)|u]": equal(squares, [t * t for t in theory], what=how, tolerance=1e-6),
        }
    )


def check_shipped_mean(context: Context) -> Outcome:
    """Compare means and products of two roundings of given numbers, as weights with a zero point take them, with numbers and squares."""
    given = torch.tensor([0.31, -0.77, 1.5], dtype=torch.float64)
    repeated = given.expand(context.samples(200_000, 20_000), -1)
    purposes: tuple[Purpose, ...] = ("perturbation", "second perturbation")
    pairs = [weights_at_random(repeated, 20.0, 8, context.seed, purpose) for purpose in purposes]
    columns = torch.cat([pairs[0], pairs[0] * pairs[1]], dim=1)
    return compare_means("two roundings", columns, torch.cat([given, given**2]))


def _agreement(values: Sequence[float], rounding: RoundedPerturbation) -> float:
    """Return the probability that two roundings of a vector are alike in every element."""
    probability = 1.0
    for value in values:
        outcomes = qvalues_and_probabilities(value, rounding)
        probability *= sum(p * q for (a, p), (b, q) in itertools.product(outcomes, repeat=2) if a == b)
    return probability


def check_roundings_agree(_context: Context) -> Outcome:
    """Show vectors of which two roundings are alike: always on the grid, half of the time in the middle of a cell."""
    rounding = Reaching("gaussian", 4, limit=3.5)
    on_grid = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64)
    shipped = [qvalues_of(on_grid, rounding, uniforms_of((3,), seed, "perturbation")) for seed in (1, 2)]
    return everything_holds(
        {
            "on the grid": equal(_agreement(on_grid.tolist(), rounding), 1.0, what="P(u₁ = u₂)"),
            "on the grid, shipped, two seeds": is_true(torch.equal(*shipped), what=str(shipped[0].tolist())),
            "one element, half a cell": equal(_agreement([0.25], rounding), 0.5, what="P(u₁ = u₂)"),
            "all clamped": equal(_agreement([99.0, -50.0], rounding), 1.0, what="P(u₁ = u₂)"),
        }
    )


def check_roundings_differ(_context: Context) -> Outcome:
    """Compare how often two roundings of d normals are alike with (2/3)^d, which is nothing for many elements."""
    rounding = Reaching("gaussian", 8, limit=6.35)
    samples = np.random.default_rng(0).normal(size=4000)
    each = np.mean([_agreement([u], rounding) for u in samples])
    many = samples[:400]
    return everything_holds(
        {
            "one normal, fine grid": equal(float(each), 2 / 3, what="P(alike)", tolerance=0.02),
            "400 normals": within(_agreement(many.tolist(), rounding), 1e-50, what="P(u₁ = u₂)"),
        }
    )


def enumerated_moments(rounding: RoundedPerturbation) -> tuple[float, float, float]:
    """Return ``E[Q²]``, ``E[Q₁Q₂]`` and ``E[Q₁²Q₂²]`` of roundings of a normal, value by value and by quadrature.

    >>> [round(moment, 3) for moment in enumerated_moments(Reaching("gaussian", 8, limit=6.35))]
    [1.0, 1.0, 3.001]
    """
    highest = rounding.highest
    # Cell by cell, as the integrand has corners at quantized values.
    edges = np.unique(np.concatenate([np.arange(-highest, highest + 1) / rounding.scale, [-9.0, 9.0]]))
    edges = edges[np.abs(edges) <= 9.0]
    once = product = squares = 0.0
    x, weights = np.polynomial.legendre.leggauss(12 if highest > 3 else 60)
    for low, high in pairwise(edges.tolist()):
        u = low + (high - low) * (x + 1) / 2
        probability = weights * (high - low) / 2 * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        scaled = u * rounding.scale
        below = np.floor(scaled)
        up = scaled - below
        ends = [np.clip(qvalue, -highest, highest) / rounding.scale for qvalue in (below, below + 1)]
        mean = (1 - up) * ends[0] + up * ends[1]
        square = (1 - up) * ends[0] ** 2 + up * ends[1] ** 2
        once += float(probability @ square)
        product += float(probability @ mean**2)
        squares += float(probability @ square**2)
    return once, product, squares


def _fourth_moment(rounding: RoundedPerturbation) -> float:
    """Return ``E[Q⁴]`` from how often each quantized value comes out."""
    total, highest = 0.0, rounding.highest
    x, weights = np.polynomial.legendre.leggauss(60)
    edges = [-9.0, *(qvalue / rounding.scale for qvalue in range(-highest, highest + 1)), 9.0]
    for low, high in pairwise(sorted(edge for edge in edges if abs(edge) <= 9.0)):
        u = low + (high - low) * (x + 1) / 2
        probability = weights * (high - low) / 2 * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        below = np.floor(u * rounding.scale)
        up = u * rounding.scale - below
        fourths = [
            (np.clip(qvalue, -highest, highest) / rounding.scale) ** 4 for qvalue in (below, below + 1)
        ]
        total += float(probability @ ((1 - up) * fourths[0] + up * fourths[1]))
    return total


def _second_moment(bits: int, highest_level: float) -> float:
    return Reaching("gaussian", bits, limit=highest_level).moments.second


def _balanced(bits: int) -> float:
    """Return the largest level at which ``E[Q(u)²] = 1``: what is clamped weighs what rounding adds."""
    return float(brentq(lambda level: _second_moment(bits, level) - 1, 0.8, 6.0))


def check_naive_is_biased(_context: Context) -> Outcome:
    """Compare ``E[ûûᵀ]`` with the shipped second moment by enumeration of quantized values, and it with 1 where nothing is clamped."""
    parts = {}
    for bits in (2, 3, 4, 8):
        moment = _second_moment(bits, 6.0)
        direct, _, _ = enumerated_moments(Reaching("gaussian", bits, limit=6.0))
        parts[f"{bits} bits up to ±6"] = equal(moment, direct, what="E[Q(u)²]", tolerance=1e-6)
        parts[f"{bits} bits up to ±6, biased"] = exceeds(moment, 1.0001, what="E[Q(u)²]")
    return everything_holds(parts)


def check_naive_can_be_right(_context: Context) -> Outcome:
    """Show, for each number of bits, a scale at which ``E[ûûᵀ] = I``, and perturbations on the grid."""
    parts = {}
    for bits in range(2, 9):
        level = _balanced(bits)
        parts[f"{bits} bits up to ±{level:.3f}"] = equal(
            _second_moment(bits, level), 1.0, what="E[Q(u)²]", tolerance=1e-8
        )
    signs, weights = sign_nodes(3)
    rounding = RoundedPerturbation("rademacher", 4)
    rounded = qvalues_of(torch.from_numpy(signs), rounding, None).double() * rounding.unit
    outer = torch.einsum("n,ni,nj->ij", torch.from_numpy(weights), rounded, rounded)
    parts["signs, which are grid values"] = equal(outer, torch.eye(3, dtype=torch.float64), what="E[ûûᵀ]")
    return everything_holds(parts)


def _mean_factors(bits: int, level: float) -> tuple[float, float]:
    """Return what multiplies the gradient in the means of Q-RGE1 and Q-RGE2."""
    rounding = Reaching("gaussian", bits, limit=level)
    return rounding.mean_of("q-rge1"), rounding.mean_of("q-rge2")


def _clamped_square(limit: float) -> float:
    """Return ``E[clamp(u)²]`` of a standard normal, by quadrature."""
    u, weights = np.polynomial.legendre.leggauss(200)
    inside = limit * u
    density = np.exp(-(inside**2) / 2) / math.sqrt(2 * math.pi)
    return float(limit * weights @ (density * inside**2)) + limit**2 * math.erfc(limit / math.sqrt(2))


def check_two_roundings_hold(_context: Context) -> Outcome:
    """Compare ``E[Q₁Q₂]`` with 1 where the range is six deviations."""
    return everything_holds(
        {
            f"{bits} bits up to ±6": equal(_mean_factors(bits, 6.0)[1], 1.0, what="E[Q₁Q₂]", tolerance=1e-6)
            for bits in range(2, 9)
        }
    )


def check_two_roundings_clamped(_context: Context) -> Outcome:
    """Compare ``E[Q₁Q₂]`` with ``E[clamp(u)²]``, and that with 1, at ranges of one and two deviations."""
    parts = {}
    for bits, level in itertools.product((2, 4, 8), (1.0, 2.0)):
        factor = _mean_factors(bits, level)[1]
        parts[f"{bits} bits up to ±{level:g}"] = equal(
            factor, _clamped_square(level), what="E[Q₁Q₂] against E[clamp(u)²]", tolerance=1e-6
        )
        parts[f"{bits} bits up to ±{level:g}, short"] = exceeds(0.95, factor, what="1 against E[Q₁Q₂]")
    return everything_holds(parts)


def check_second_is_nearer(_context: Context) -> Outcome:
    """Compare how far the means of both estimators are from the gradient where the range is 6 deviations."""
    parts = {}
    for bits in range(2, 9):
        once, twice = _mean_factors(bits, 6.0)
        parts[f"{bits} bits up to ±6"] = exceeds(
            abs(once - 1), abs(twice - 1), what="|E[Q²] - 1| against |E[Q₁Q₂] - 1|"
        )
    return everything_holds(parts)


def check_first_can_be_nearer(_context: Context) -> Outcome:
    """Show scales at which Q-RGE1's mean is nearer to the gradient, and that both are multiples of it.

    Both means are along the gradient, so a learning rate takes the factor in; relative to its mean, Q-RGE1 also has the
    smaller second moment in many dimensions: both have ``(d - 1)E[Q²]²`` and one divides by ``E[Q²]²``.
    """
    parts = {}
    for bits in (2, 3, 4):
        level = _balanced(bits)
        once, twice = _mean_factors(bits, level)
        parts[f"{bits} bits up to ±{level:.2f}"] = exceeds(
            abs(twice - 1), abs(once - 1), what="|E[Q₁Q₂] - 1| against |E[Q²] - 1|", factor=10
        )
    for bits, level in ((3, 6.0), (2, 1.5), (4, 2.0)):
        counted = enumerated_moments(Reaching("gaussian", bits, limit=level))[:2]
        parts[f"{bits} bits up to ±{level:g}, both factors"] = equal(
            _mean_factors(bits, level), counted, what="E[Q²], E[Q₁Q₂] as plans state them", tolerance=1e-6
        )
    once, _ = _mean_factors(3, 6.0)
    d = 10_000
    first, second = relative_squares(3, 6.0, d)
    parts["3 bits up to ±6, d = 10,000"] = equal(
        second / first, once**2, what="E|ĝ|²/|E ĝ|² of Q-RGE2 over Q-RGE1", tolerance=1e-3
    )
    return everything_holds(parts)


def relative_squares(bits: int, level: float, dimension: int) -> tuple[float, float]:
    """Return ``E|ĝ|²/|E ĝ|²`` of Q-RGE1 and of Q-RGE2 for a linear loss, perturbations of normals rounded up to `level`.

    ``(E[Q⁴] + (d - 1)m²)/m²`` with ``m = E[Q²]``, and ``(E[Q₁²Q₂²] + (d - 1)m²)/c²`` with ``c = E[Q₁Q₂]``.

    >>> round(relative_squares(8, 6.0, 100)[0], 2)
    102.0
    """
    rounding = Reaching("gaussian", bits, limit=level)
    once, twice, fourth = enumerated_moments(rounding)
    first = (_fourth_moment(rounding) + (dimension - 1) * once**2) / once**2
    return first, (fourth + (dimension - 1) * once**2) / twice**2


def check_relative_squares(context: Context) -> Outcome:
    """Compare second moments of both estimators with enumeration: as runs draw them, and as plans state them."""
    bits, level, d = 3, 3.0, 2
    rounding = Reaching("gaussian", bits, limit=level)
    pair = sampled_pair(rounding, (context.samples(400_000, 60_000), d), context.seed)
    along = pair[0] @ (torch.ones(d, dtype=torch.float64) / math.sqrt(d))
    once, twice, _ = enumerated_moments(rounding)
    first, second = relative_squares(bits, level, d)
    columns = torch.stack([along**2 * (pair[0] ** 2).sum(1), along**2 * (pair[1] ** 2).sum(1)], dim=1)
    theory = torch.tensor([first * once**2, second * twice**2], dtype=torch.float64)
    parts = {"drawn": compare_means("E|ĝ|²", columns, theory)}
    for width in range(2, 9):
        shipped = RoundedPerturbation("gaussian", width)
        declared = [shipped.relative_energy(name, 50) for name in ("q-rge1", "q-rge2")]
        parts[f"{width} bits up to ±{shipped.reach:g}, stated"] = equal(
            declared, relative_squares(width, shipped.reach, 50), what="E|ĝ|²/|E ĝ|², d = 50", tolerance=1e-6
        )
        parts[f"{width} bits up to ±{shipped.reach:g}, two roundings spread more"] = at_most(
            declared[0], declared[1], what="Q-RGE1 against Q-RGE2"
        )
    return everything_holds(parts)


# -- equations 1 and 2 ---------------------------------------------------------------------------------------------------


def check_unit_variance(mean: float, _context: Context) -> Outcome:
    """Compare ``E[g·u]`` of a linear loss for normals around a mean with ``(I + mmᵀ)∇L``."""
    nodes, weights = normal_nodes(3, 4)
    around = (nodes + mean, weights)
    slope = _SLOPE
    estimate, _ = moments_of_estimate(lambda x: slope @ x, [0.1, 0.2, -0.3], 1e-2, central=True, nodes=around)
    return equal(
        estimate, slope + mean**2 * float(slope.sum()), what=f"u = {mean:g} + N(0, 1)", tolerance=1e-7
    )


def contraction(rate: float, curvature: float, dimension: int) -> float:
    """Return ``1 - 2ηh + η²h²(d + 2)``, by which a step multiplies ``E‖θ‖²`` on ``h‖θ‖²/2`` with normals.

    >>> contraction(0.1, 1.0, 8)
    0.9
    """
    return 1 - 2 * rate * curvature + rate**2 * curvature**2 * (dimension + 2)


def check_unbiased_diverges(_context: Context) -> Outcome:
    """Show that an exactly unbiased estimate diverges at a learning rate above 2/(h(d + 2)), and converges below."""
    parts = {}
    at = [0.6, -0.2, 0.4]
    squared = sum(x * x for x in at)
    mean, square = moments_of_estimate(lambda x: (x @ x) / 2, at, 0.2, central=True)
    for rate in (0.1, 0.39, 0.41, 1.0):
        stepped = (
            squared - 2 * rate * sum(x * m for x, m in zip(at, mean.tolist(), strict=True)) + rate**2 * square
        )
        factor = contraction(rate, 1.0, 3)
        parts[f"η = {rate:g}"] = equal(stepped / squared, factor, what="E‖θ₁‖²/‖θ₀‖²", tolerance=1e-7)
        parts[f"η = {rate:g}, grows"] = is_true((factor > 1) == (rate > 0.4), what=f"factor {factor:.3f}")
    return everything_holds(parts)


def check_small_rates_converge(_context: Context) -> Outcome:
    """Show that ``E‖θ‖²`` falls to nothing at η = 1/(h(d + 2)), the best learning rate."""
    parts = {}
    for d in (1, 8, 100):
        best = 1 / (d + 2)
        factor = contraction(best, 1.0, d)
        parts[f"d = {d}"] = equal(factor, (d + 1) / (d + 2), what="factor of a step")
        parts[f"d = {d}, after 50(d + 2) steps"] = within(factor ** (50 * (d + 2)), 1e-20, what="E‖θ‖²/‖θ₀‖²")
    return everything_holds(parts)


# -- weights on a grid --------------------------------------------------------------------------------------------------


_WHOLE = Reaching("gaussian", 4, limit=7.0)
"""Quantized values of 4 bits, one a unit."""


def check_update_mean(how: str, _context: Context) -> Outcome:
    """Compare the mean of a rounded update with the update, within the range of quantized values or beyond it."""
    given = (0.3125, -1 / 256, 2.75, -6.1875) if how == "within" else (9.5, -30.0)
    means = [
        sum(probability * qvalue for qvalue, probability in qvalues_and_probabilities(u, _WHOLE))
        for u in given
    ]
    wanted = list(given) if how == "within" else [7.0, -7.0]
    return equal(means, wanted, what=f"E[Q(η∇)], {how} the range of 4 bits")


def check_range_end(_context: Context) -> Outcome:
    """Show that weights at the end of their range, kept in it, move by less than the update on average."""
    highest = 7
    outcomes = qvalues_and_probabilities(-0.375, _WHOLE)
    mean = sum(probability * (min(highest, highest - qvalue) - highest) for qvalue, probability in outcomes)
    beyond = sum(probability * (highest - qvalue > highest) for qvalue, probability in outcomes)
    return everything_holds(
        {
            "kept in the range": equal(mean, 0.0, what="E[w̄₁ - w̄₀] of an update of 0.375 upwards"),
            "not kept": equal(beyond, 0.375, what="probability of a quantized value that 4 bits have not"),
            "an update beyond the range": check_update_mean("beyond", _context),
        }
    )


def check_roundings_by_perturbation(_context: Context) -> Outcome:
    """Compare mean and variance of the update (13), rounded once, with (15), rounded for every perturbation, in rationals."""
    parts = {}
    pieces = (Fraction(19, 64), Fraction(-29, 64), Fraction(1, 8))

    def spread(value: Fraction) -> Fraction:
        part = value - math.floor(value)
        return part * (1 - part)

    total = sum(pieces, Fraction(0))

    def moments(value: Fraction) -> tuple[float, float]:
        outcomes = qvalues_and_probabilities(float(value), _WHOLE)
        mean = sum(v * p for v, p in outcomes)
        return mean, sum(v * v * p for v, p in outcomes) - mean**2

    once = moments(total)
    each = [moments(piece) for piece in pieces]
    parts["means"] = equal([once[0], sum(m for m, _ in each)], [float(total)] * 2, what="(13) and (15)")
    parts["variances"] = equal(
        [once[1], sum(v for _, v in each)],
        [float(spread(total)), float(sum(map(spread, pieces)))],
        what="f(1 - f) of the sum, and the sum of them",
    )
    return everything_holds(parts)


def check_scale_of_update(power: int, _context: Context) -> Outcome:
    """Compare a step of (12) on ``½h(w - w*)²``, its learning rate divided by a power of s_w, with the step (11)."""
    parts = {}
    for scale in (0.02, 0.1, 3.0):
        w, target, curvature, rate = 0.7, -0.4, 1.3, 0.05
        stepped = w - rate * curvature * (w - target)
        qvalue = w / scale
        gradient = curvature * (scale * qvalue - target) * scale  # ∂L(s_w·w̄)/∂w̄
        by_qvalues = scale * (qvalue - rate / scale**power * gradient)
        factor = scale ** (2 - power)
        parts[f"s_w = {scale:g}"] = equal(
            (by_qvalues - w) / (stepped - w), factor, what=f"(12) with η/s_w^{power} over (11)"
        )
        if power == 0:
            parts[f"s_w = {scale:g}, off"] = exceeds(abs(math.log(factor)), 0.5, what="|log| of the ratio")
    return everything_holds(parts)


# -- algorithm 1 ----------------------------------------------------------------------------------------------------------


def _loss(w: Array) -> float:
    return float(((w - np.array([1.3, -0.7])) ** 2 * np.array([1.0, 2.0])).sum()) / 2


def _sensitivity(w: Array, u: Array, epsilon: float) -> float:
    return (_loss(w + epsilon * u) - _loss(w - epsilon * u)) / (2 * epsilon)


def equation_15(w: Array, pairs: Sequence[tuple[Array, Array]], rate: float, epsilon: float) -> Array:
    """Return ``w - Σ_i (ημ_i/n)u_{i,2}``, every μ_i at the same weights, without the rounding of the update."""
    updated = np.zeros_like(w)
    for first, second in pairs:
        updated += rate * _sensitivity(w, first, epsilon) / len(pairs) * second
    return w - updated


def algorithm_1(
    w: Array, pairs: Sequence[tuple[Array, Array]], rate: float, epsilon: float, *, kept: bool
) -> Array:
    """Return the weights after lines 4 to 14 of QuZO's algorithm 1 read literally, without the rounding of the update.

    - `pairs`: the roundings ``(u_{i,1}, u_{i,2})`` of each perturbation.
    - `kept`: line 13 sets ``w_{t+1}`` from a ``w_t`` that stays as it was; else it changes the weights that the next perturbation
      sees.
    """
    now, after = w.copy(), w.copy()
    for first, second in pairs:
        now = now + epsilon * first
        plus = _loss(now)
        now = now - 2 * epsilon * first
        minus = _loss(now)
        gradient = (plus - minus) / (2 * epsilon)
        now = now + epsilon * first
        after = now - rate * gradient / len(pairs) * second
        if not kept:
            now = after
    return after


def _pairs() -> list[tuple[Array, Array]]:
    generator = np.random.default_rng(5)
    return [(generator.normal(size=2), generator.normal(size=2)) for _ in range(3)]


def check_update_within_loop(_context: Context) -> Outcome:
    """Show that neither reading of line 13 inside the loop is equation 15."""
    w, pairs = np.array([0.4, 0.2]), _pairs()
    wanted = equation_15(w, pairs, 0.3, 0.01) - w
    parts = {}
    for name, kept in (
        ("w_t stays: the last perturbation alone", True),
        ("w_t moves: perturbations at other weights", False),
    ):
        updated = algorithm_1(w, pairs, 0.3, 0.01, kept=kept) - w
        parts[name] = exceeds(
            float(np.linalg.norm(updated - wanted)),
            0.02 * float(np.linalg.norm(wanted)),
            what="‖update - (15)‖",
        )
    first, second = pairs[-1]
    last = -0.3 / len(pairs) * _sensitivity(w, first, 0.01) * second
    parts["the last perturbation alone, exactly"] = equal(
        torch.from_numpy(algorithm_1(w, pairs, 0.3, 0.01, kept=True) - w),
        torch.from_numpy(last),
        what="update",
    )
    return everything_holds(parts)


def check_update_behind_loop(_context: Context) -> Outcome:
    """Compare algorithm 1 with one perturbation, and with several whose updates wait for the loop's end, with equation 15."""
    w, pairs = np.array([0.4, 0.2]), _pairs()
    waited = w + sum(algorithm_1(w, [pair], 0.3 / len(pairs), 0.01, kept=True) - w for pair in pairs)
    single = algorithm_1(w, pairs[:1], 0.3, 0.01, kept=True)
    return everything_holds(
        {
            "updates behind the loop": equal(
                torch.from_numpy(waited), torch.from_numpy(equation_15(w, pairs, 0.3, 0.01)), what="w₁"
            ),
            "n = 1": equal(
                torch.from_numpy(single), torch.from_numpy(equation_15(w, pairs[:1], 0.3, 0.01)), what="w₁"
            ),
        }
    )


def check_shipped_perturbations(context: Context) -> Outcome:
    """Compare a run of three perturbations a step with a literal loop that updates behind the loop over perturbations, bit for bit."""
    unlike = differences(Case(num_perturbations=3), context.seed)
    return Outcome(float(len(unlike)), 0.0, "tensors and scalars that differ", tuple(unlike[:5]))


def _round_trip(qvalue: int, step: int, highest: int | None) -> int:
    """Return a quantized value after ``+s, -2s, +s``, kept within the range after each where there is one."""
    for change in (step, -2 * step, step):
        qvalue += change
        if highest is not None:
            qvalue = min(max(qvalue, -highest), highest)
    return qvalue


def check_recovery(highest: int | None, _context: Context) -> Outcome:
    """Count quantized values and steps of 4 bits that a round trip does not bring back."""
    lost = sum(
        _round_trip(qvalue, step, highest) != qvalue for qvalue in range(-7, 8) for step in range(-3, 4)
    )
    wanted = (
        0
        if highest is None
        else sum(
            not (-7 <= qvalue + step <= 7 and -7 <= qvalue - step <= 7)
            for qvalue in range(-7, 8)
            for step in range(-3, 4)
        )
    )
    off = _round_trip(7, 1, highest) - 7
    return everything_holds(
        {
            "grid values": equal(float(lost), float(wanted), what="of 105 not brought back"),
            "the highest quantized value, a step up": equal(
                float(off), 0.0 if highest is None else -1.0, what="w̄ - w̄₀"
            ),
        }
    )


def _kept_on_grid(values: Tensor, scale: float) -> Tensor:
    """Return values rounded to the nearest multiple of a weight's scale, as weights of few bits hold them."""
    return torch.round(values / scale) * scale


def check_vanishing_perturbation(_context: Context) -> Outcome:
    """Show that perturbed weights that are stored in their own few bits are the weights, at the paper's ε = 1e-5."""
    scale, epsilon = 0.02, 1e-5
    weights = _kept_on_grid(torch.linspace(-0.14, 0.14, 9, dtype=torch.float64), scale)
    z, _ = sampled_pair(Reaching("gaussian", 4, limit=3.0), (9,), 1)
    plus, minus = (_kept_on_grid(weights + sign * epsilon * z, scale) for sign in (1, -1))
    slope = torch.linspace(1, 2, 9, dtype=torch.float64)
    gradient = float(slope @ (plus - minus)) / (2 * epsilon)
    true = float(slope @ z)
    return everything_holds(
        {
            "μ_i of a linear loss": equal(gradient, 0.0, what="stored in 4 bits, s_w = 0.02"),
            "it is not 0": exceeds(abs(true), 0.5, what="|u·∇L|"),
            "least ε that is seen": equal(
                float((_kept_on_grid(weights + 0.51 * scale * torch.sign(z), scale) - weights).abs().max()), scale, what="ε|u| = 0.51 s_w moves a quantized value"
            ),
        }
    )  # fmt: skip


def check_wide_perturbation(_context: Context) -> Outcome:
    """Compare μ_i with u·∇L where perturbed weights are held in float32, their quantized values untouched."""
    scale, epsilon = 0.02, 1e-3
    weights = _kept_on_grid(torch.linspace(-0.14, 0.14, 9, dtype=torch.float64), scale)
    z, _ = sampled_pair(Reaching("gaussian", 4, limit=3.0), (9,), 1)
    plus, minus = ((weights + sign * epsilon * z).float().double() for sign in (1, -1))
    slope = torch.linspace(1, 2, 9, dtype=torch.float64)
    gradient = float(slope @ (plus - minus)) / (2 * epsilon)
    return equal(gradient, float(slope @ z), what="μ_i", tolerance=1e-4)


# -- appendices -----------------------------------------------------------------------------------------------------------


def check_nearest_is_best(context: Context) -> Outcome:
    """Compare squared errors of the nearest values of shipped grids with those of every other value, and of rounding at random."""
    generator = np.random.default_rng(context.seed)
    uneven, even = grid_of("float4_e2m1"), grid_of("int8")
    values = generator.normal(scale=3, size=500)
    off = (values[:, None] - np.array(quantized.literal_levels("float4_e2m1"))) ** 2
    nearest = uneven.nearest(torch.from_numpy(values)).numpy()
    places = torch.arange(2000, dtype=torch.float64) / 2000 - 0.499_75
    uniforms = (torch.arange(NUM_UNIFORMS, dtype=torch.float64) + 0.5) / NUM_UNIFORMS
    at_random = even.at_random(places[:, None].expand(-1, NUM_UNIFORMS), uniforms.repeat(2000, 1))
    return everything_holds(
        {
            "500 values, the 15 of e2m1": equal(
                float(((nearest - values) ** 2).sum()), float(off.min(1).sum()), what="squared errors"
            ),
            "rounding at random": equal(
                float(
                    (at_random - places[:, None]).square().mean()
                    / (even.nearest(places) - places).square().mean()
                ),
                2.0,
                what="MSE over that of the nearest",
                tolerance=1e-3,
            ),
        }
    )


def check_perturbations(_context: Context) -> Outcome:
    """Compare the squared error of a mean over perturbations with ``(d + 1)/n``, and fit its order."""
    slope = _SLOPE[:2]
    mean, square = moments_of_estimate(lambda x: slope @ x, [0.1, 0.2], 1e-2, central=True)
    single = square - float(mean @ mean)
    size = float(slope @ slope)
    counts = [1, 2, 5, 10]
    # Independent perturbations: variances add, the mean stays.
    errors = [single / n / size for n in counts]
    parts = {
        "mean": equal(mean, slope, what="E[g·u]", tolerance=1e-7),
        "errors": equal(errors, [perturbation_error(n, 2) for n in counts], what="(d + 1)/n", tolerance=1e-6),
        "order": equal(
            fitted_slope([float(n) for n in counts], errors), -1.0, what="exponent of n", tolerance=1e-6
        ),
    }
    return everything_holds(parts)


def _micro(num: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
    generator = generator_on(_CPU, 4)
    slopes = torch.randn((num, 3), generator=generator, dtype=torch.float64)
    return list(slopes), [slopes.mean(0)], [2] * num


def check_one_perturbation_for_all(_context: Context) -> Outcome:
    """Compare the accumulated projected gradient of micro-batches that share one z with that of the whole batch."""
    slopes, (whole,), counts = _micro(4)
    nodes, weights = normal_nodes(3, 3)
    mean = torch.zeros(3, dtype=torch.float64)
    for z, weight in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        plus, minus = (
            accumulated([slope @ (sign * 0.01 * z) for slope in slopes], counts) for sign in (1, -1)
        )
        mean += weight * float((plus - minus) / 0.02) * z
    return equal(mean, whole, what="E[(Σg_k/K)·z]", tolerance=1e-6)


def check_perturbation_of_each(_context: Context) -> Outcome:
    """Compare ``E[(Σ_k g_k/K)·z]`` with the whole batch's gradient where each micro-batch had a z_k of its own, the last used."""
    slopes, (whole,), _ = _micro(4)
    # E[g_k·z_K] = 0 for k < K, and slope_K for the last.
    nodes, weights = normal_nodes(3, 3)
    last = torch.zeros(3, dtype=torch.float64)
    for z, weight in zip(torch.from_numpy(nodes), weights.tolist(), strict=True):
        last += weight * float(slopes[-1] @ z) * z
    return equal(last / len(slopes), whole, what="E[(Σg_k/K)·z_K]", tolerance=1e-6)


def check_full_precision_update(context: Context) -> Outcome:
    """Compare steps of three perturbations at rates that change with a literal loop, bit for bit, for both differences."""
    return against_literal(
        [Case(num_perturbations=3), Case(num_perturbations=3, difference="forward", perturbation="copies")],
        context.seed,
    )


def check_one_point(_context: Context) -> Outcome:
    """Compare mean and squared error of the one-point estimator with those of two points: the loss's own size is noise."""
    level = 3.0
    slope = _SLOPE[:2]
    nodes, weights = normal_nodes(2, 5)
    parts = {}
    for epsilon in (0.5, 0.1):
        values = level + epsilon * (nodes @ slope.numpy())
        estimates = (values / epsilon)[:, None] * nodes
        mean = weights @ estimates
        error = float(weights @ (estimates**2).sum(1) - mean @ mean)
        parts[f"mean, ε = {epsilon:g}"] = equal(
            torch.from_numpy(mean), slope, what="E[L(w + εu)u/ε]", tolerance=1e-7
        )
        parts[f"squared error, ε = {epsilon:g}"] = equal(
            error, one_point_error(level, float(slope.norm()), 2, epsilon), what="measured", tolerance=1e-7
        )
        parts[f"larger than with two points, ε = {epsilon:g}"] = exceeds(
            error, 3 * float(slope @ slope), what="against (d + 1)‖∇L‖²", factor=10
        )
    small = [1e-2, 1e-3, 1e-4]
    errors = [float(weights @ ((level / e * nodes) ** 2).sum(1)) for e in small]
    declared = [one_point_error(level, float(slope.norm()), 2, e) for e in small]
    parts["order"] = equal(
        [fitted_slope(small, errors), fitted_slope(small, declared)],
        [-2.0] * 2,
        what="exponent of ε",
        tolerance=1e-4,
    )
    return everything_holds(parts)


def check_one_point_with_residual(_context: Context) -> Outcome:
    """Compare the estimator that takes the loss of the step before off with the gradient, and its squared error with (2d + 1)|∇L|².

    What is left of the loss's own size is `ε(u' - u)·∇L`, a level that is as large as a perturbation's.
    """
    slope, level, epsilon = _SLOPE[:2], 3.0, 0.1
    nodes, weights = normal_nodes(4, 4)
    now, before = (torch.from_numpy(np.ascontiguousarray(part)) for part in (nodes[:, :2], nodes[:, 2:]))
    loss, other = (level + epsilon * (u @ slope) for u in (now, before))
    estimates = projected_gradient(loss, other, epsilon, central=False)[:, None] * now
    probability = torch.from_numpy(weights)
    mean = probability @ estimates
    error = float(probability @ estimates.square().sum(1) - mean @ mean)
    norm = float(slope.norm())
    return everything_holds(
        {
            "mean": equal(mean, slope, what="E[(L(w + εu) - L(w + εu'))u/ε]", tolerance=1e-7),
            "squared error": equal(
                error,
                one_point_error(epsilon * norm, norm, 2, epsilon),
                what="of a level of ε|∇L|",
                tolerance=1e-7,
            ),
            "in |∇L|²": equal(error, 5 * norm**2, what="2d + 1, against d + 1 of two points", tolerance=1e-7),
        }
    )


def check_outlier_qvalue(_context: Context) -> Outcome:
    """Count quantized values of 8 bits that the shipped rounding makes, and that -128 is none of them."""
    numbers = torch.linspace(-50, 50, 40_001, dtype=torch.float64)
    uniforms = uniforms_of(tuple(numbers.shape), 0, "perturbation")
    qvalues = qvalues_of(numbers, Reaching("gaussian", 8, limit=6.35), uniforms)
    seen = set(qvalues.tolist())
    return everything_holds(
        {
            "values": equal(float(len(seen)), 255.0, what="grid values in use"),
            "the label": is_true(-128 not in seen, what="10000000₂ is free"),
        }
    )


def check_sampled_values(context: Context) -> Outcome:
    """Compare moments of two roundings of 3 bits, as runs draw them, with quadrature over normals."""
    rounding = RoundedPerturbation("gaussian", 3)
    first, second = sampled_pair(rounding, (context.samples(3_000_000, 800_000),), context.seed)
    columns = torch.stack([first**2, second**2, first * second, first**2 * second**2], 1)
    once, product, squares = enumerated_moments(rounding)
    expected = torch.tensor([once, once, product, squares], dtype=torch.float64)
    return compare_means("û₁², û₂², û₁û₂, û₁²û₂²", columns, expected)


# -- faults ---------------------------------------------------------------------------------------------------------------

_MOMENTS = "costmodel.formats.roundings:moments_of"


@planted(_MOMENTS, "a second moment that is 3 % high")
def second_high(shipped, *given):
    moments = shipped(*given)
    return moments._replace(second=1.03 * moments.second)


@planted(_MOMENTS, "a product of two roundings that is 3 % high")
def cross_high(shipped, *given):
    moments = shipped(*given)
    return moments._replace(cross=1.03 * moments.cross)


@planted(_MOMENTS, "a product of two roundings that loses what is clamped")
def clamped_lost(shipped, distribution, levels):
    moments, tail = shipped(distribution, levels), distribution.partial_moments(levels[-1], math.inf)[0]
    return moments._replace(cross=moments.cross - 2 * tail * levels[-1] ** 2)


@planted("costmodel.formats.roundings:RoundedPerturbation.relative_energy", "plans that leave out the clamp")
def clamp_left_out(shipped, self, estimator, *rest):
    factor = (self.moments.cross / self.moments.second) ** 2 if estimator == "q-rge2" else 1.0
    return factor * shipped(self, estimator, *rest)


@planted("executors.steps.frames:StepFrame.at", "the last perturbation's scalar for all")
def last_gradient(shipped, self, offset):
    source = shipped(self, offset)
    if source is None or not source.gradients:
        return source
    last = source.gradients[max(source.gradients)]
    return replace(source, gradients=dict.fromkeys(source.gradients, last))


def _contracting(name: str, dimension: Callable[[float], float]) -> Fault:
    """Return a fault by which the contraction is that of another dimension."""
    return Fault(
        name, f"{__name__}:contraction", lambda shipped, *given: shipped(*given[:2], dimension(given[2]))
    )


_ONE_ROUNDING = called_with(
    f"{__name__}:algorithm_1",
    "one rounding for both",
    pairs=lambda pairs: [(first, first) for first, _ in pairs],
)

CHECKS: Checks = {
    "quzo-full-precision-update": printed(check_full_precision_update, perturbations_summed),
    "quzo-unit-variance-is-not-enough": (
        conditioned(partial(check_unit_variance, 0.0), central_by_epsilon),
        counterexample(partial(check_unit_variance, 1.0), central_by_epsilon),
    ),
    "quzo-unbiased-does-not-converge": (
        conditioned(
            check_small_rates_converge,
            _contracting("d for d + 2", lambda dimension: dimension - 2),
        ),
        counterexample(
            check_unbiased_diverges,
            central_by_epsilon,
            _contracting("three percent", lambda dimension: 1.03 * (dimension + 2) - 2),
        ),
    ),
    "quzo-naive-rounding-bias": printed(check_naive_is_biased, second_high),
    "one-rounding-can-be-unbiased": printed(check_naive_can_be_right, no_unit),
    "quzo-two-roundings-need-a-range": (
        conditioned(check_two_roundings_hold, cross_high),
        counterexample(check_two_roundings_clamped, cross_high, clamped_lost),
    ),
    "quzo-scale-left-out": (
        corrected(partial(check_scaled_outer_product, "shipped"), no_scale, no_zero_point, uniforms_high),
        corrected(check_shipped_mean, no_scale, no_zero_point, quantized.UPDATE_NEAREST),
        counterexample(partial(check_scaled_outer_product, "printed"), uniforms_high),
    ),
    "quzo-two-roundings-may-be-alike": (
        conditioned(check_roundings_differ, quantized.SAMPLED_NEAREST),
        counterexample(check_roundings_agree, uniforms_high, half_a_step_on),
    ),
    "quzo-which-mean-is-nearer": (
        conditioned(check_second_is_nearer, cross_high),
        counterexample(check_first_can_be_nearer, second_high, clamped_lost),
    ),
    "quzo-second-moments": (
        printed(check_relative_squares, quantized.SAME_KEY, quantized.SAMPLED_NEAREST, clamp_left_out),
        printed(check_sampled_values, quantized.SAME_KEY, quantized.SAMPLED_LONG, quantized.SAMPLED_NEAREST),
    ),
    "quzo-lattice-keeps-a-gradient": counterexample(
        quantized.check_moves_on_a_lattice,
        quantized.UPDATE_NEAREST,
        quantized.UPDATE_UNIFORMS,
        quantized.MOVE_AWAY,
    ),
    "quzo-equation-12-scale": (
        corrected(partial(check_scale_of_update, 2)),
        corrected(
            quantized.check_step_by_weights,
            quantized.MOVE_AS_PRINTED,
            quantized.MOVE_LONG,
            quantized.UPDATE_NEAREST,
        ),
        counterexample(partial(check_scale_of_update, 0)),
    ),
    "quzo-update-bias-at-the-ends": (
        conditioned(partial(check_update_mean, "within"), uniforms_high),
        conditioned(
            quantized.check_moves_within,
            quantized.UPDATE_NEAREST,
            quantized.UPDATE_UNIFORMS,
            quantized.MOVE_AS_PRINTED,
        ),
        counterexample(quantized.check_moves_at_the_ends, quantized.CLAMP_WIDE, quantized.UPDATE_UNIFORMS),
        counterexample(check_range_end, clamped_too_far),
    ),
    "quzo-rounding-for-every-query": (
        printed(check_roundings_by_perturbation, uniforms_high),
        printed(
            quantized.check_moves_by_perturbation,
            quantized.ONE_UNIFORM,
            quantized.UPDATE_NEAREST,
            quantized.UPDATE_UNIFORMS,
        ),
    ),
    "quzo-algorithm-1-updates-in-the-loop": (
        corrected(check_update_behind_loop, _ONE_ROUNDING),
        corrected(check_shipped_perturbations, last_gradient, perturbations_summed),
        counterexample(check_update_within_loop, _ONE_ROUNDING),
    ),
    "quzo-recovery-at-the-ends": (
        conditioned(
            partial(check_recovery, None),
            returning(f"{__name__}:_round_trip", "a way back that is one value short", lambda it: it + 1),
        ),
        conditioned(quantized.check_side_path_quantized, quantized.STORED_BACK),
        counterexample(
            partial(check_recovery, 7),
            called_with(
                f"{__name__}:_round_trip", "a range one value wider", highest=lambda highest: highest + 1
            ),
        ),
    ),
    "quzo-perturbations-below-a-step": (
        conditioned(check_wide_perturbation),
        conditioned(quantized.check_side_path_quantized, quantized.STORED, quantized.SIDE_PATH_LONG),
        counterexample(check_vanishing_perturbation),
    ),
    "quzo-nearest-minimises-mse": printed(
        check_nearest_is_best,
        Fault(
            "the value below for the nearest",
            "executors.low_bits.grids:Grid.nearest",
            lambda _shipped, self, numbers: self.below(self.clamped(numbers)),
        ),
    ),
    "quzo-more-queries": printed(
        check_perturbations,
        central_by_epsilon,
        called_with(
            "proofs_checks.oracles.statements:perturbation_error",
            "d + 2 for d + 1",
            dimension=lambda dimension: dimension + 1,
        ),
    ),
    "quzo-accumulation": (
        reading("one perturbation for all micro-batches", check_one_perturbation_for_all, losses_added),
        reading("a perturbation for each, scalars accumulated", check_perturbation_of_each),
    ),
    "quzo-one-point-noise": (
        printed(
            check_one_point,
            Fault(
                "d + 1 in the first term",
                "proofs_checks.oracles.statements:one_point_error",
                lambda shipped, level, gradient_norm, dimension, epsilon: (
                    shipped(level, gradient_norm, dimension, epsilon) + (level / epsilon) ** 2
                ),
            ),
        ),
        printed(check_one_point_with_residual, forward_by_two_epsilon),
    ),
    "quzo-outlier-value-is-free": printed(check_outlier_qvalue, clamped_too_far),
}
