"""What rounding a direction to few bits does to an estimate, on average."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from executors.randomness.families import QuantisedGaussian
from executors.randomness.quantisers import StochasticRounding
from executors.randomness.rng import generator_on
from proofs_checks.claims import Checks, conditioned, counterexample, printed
from proofs_checks.faults import clamped_too_far, nearest, no_zero_point, one_rounding
from proofs_checks.mutation import Mutant
from proofs_checks.oracles.estimates import quantised_estimate_factor
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.statistics import compare_means, compare_two_points

BITS = tuple(range(2, 9))
_NUM_ELEMENTS = 4
_CLAMPED, _WIDE = 2.0, 6.0
"""Largest levels, in standard deviations of the direction: one that clamps 5 % of it, and one that clamps nothing."""


def _direction(bits: int, highest_level: float) -> QuantisedGaussian:
    codes = 2 ** (bits - 1) - 1
    return QuantisedGaussian(StochasticRounding(bits, codes / highest_level, zero_point=codes))


def _rounding_pairs(direction: QuantisedGaussian, count: int, seed: int) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty((count, _NUM_ELEMENTS), dtype=torch.float64) for _ in range(2))
    direction.fill_pair(first, second, generator_on(torch.device("cpu"), seed))
    return first, second


def check_estimators(context: Context) -> Outcome:
    """Compare Q-RGE1 and Q-RGE2 of a linear loss with the gradient times moments in closed form.

    Notes
    -----
    ``E[(û₁·∇)û₂] = m·∇`` is asserted of its parts: ``E[q₁q₂]`` of one element, over all elements at once, and products of unlike
    elements, which vanish. Their variances do not grow with the dimension.
    """
    outcomes = []
    cases = [(bits, reach) for bits in BITS for reach in (_CLAMPED, _WIDE)]
    for number, (bits, reach) in enumerate(cases):
        direction = _direction(bits, reach)
        pair = _rounding_pairs(direction, context.samples(400_000, 100_000), context.seed + number)
        scale = direction.rounding.scale
        for kind, used, declared in (
            ("q-rge1", pair[0], direction.distribution.second_moment),
            ("q-rge2", pair[1], direction.cross_moment),
        ):
            moment = quantised_estimate_factor(kind, bits, scale)  # type: ignore[arg-type]
            if abs(declared / moment - 1) > 1e-9:
                return Outcome(math.inf, 0.0, f"{kind} declares {declared}, its closed form is {moment}")
            outcomes.append(
                compare_means(
                    f"{bits} bits up to ±{reach:g}, {kind} (expected {moment:.4f}·∇)",
                    (pair[0] * used).view(-1, 1),
                    torch.tensor([moment], dtype=torch.float64),
                )
            )
            apart = (pair[0] * used.roll(1, dims=1)).view(-1, 1)
            theory = torch.zeros(1, dtype=torch.float64)
            outcomes.append(
                compare_means(f"{bits} bits up to ±{reach:g}, {kind}, unlike elements", apart, theory)
            )
    return worst(outcomes)


_WITHIN = (0.0, 0.31, -0.77, 1.5, -1.999)
_BEYOND = (2.4, -5.0, 2.001, 100.0)


def check_rounding(numbers: tuple[float, ...], context: Context) -> Outcome:
    """Compare what given numbers are rounded to, and how often up, with the levels next to them and the clamped numbers.

    Notes
    -----
    Two values and their mean fix the variance, ``f(1 - f)/s²``.
    """
    outcomes = []
    generator = generator_on(torch.device("cpu"), context.seed)
    count = context.samples(400_000, 40_000)
    given = torch.tensor(numbers, dtype=torch.float64)
    for bits in BITS:
        rounding = _direction(bits, _CLAMPED).rounding
        kept = given.clamp(rounding.levels[0], rounding.levels[-1])
        cells = kept * rounding.scale
        levels = torch.stack([cells.floor(), cells.ceil()]) / rounding.scale
        rounded = rounding.rounded(given.expand(count, -1).contiguous(), generator)
        if not bool(((rounded - levels[0]).abs().lt(1e-12) | (rounded - levels[1]).abs().lt(1e-12)).all()):
            return Outcome(math.inf, 0.0, f"{bits} bits: a number is rounded to no neighbouring level")
        outcomes.append(compare_two_points(f"{bits} bits", rounded, kept))
    return worst(outcomes)


_TOWARDS_ZERO = Mutant(
    "cutting off towards zero before the chance is drawn",
    "executors.randomness.quantisers:rounded_at_random",
    "numbers.floor()",
    "numbers.trunc()",
)


CHECKS: Checks = {
    "stochastic-rounding-unbiased": (
        conditioned(
            partial(check_rounding, _WITHIN),
            nearest,
            _TOWARDS_ZERO,
            no_zero_point,
        ),
        counterexample(partial(check_rounding, _BEYOND), clamped_too_far),
    ),
    "quantised-rge": printed(
        check_estimators,
        nearest,
        _TOWARDS_ZERO,
        one_rounding,
        Mutant(
            "the second rounding rounds the first",
            "executors.randomness.families:QuantisedGaussian.fill_pair",
            "first.copy_(self.rounding.rounded(first, generator))",
            "first.copy_(self.rounding.rounded(second, generator))",
        ),
    ),
}
