"""What rounding a direction to few bits does to an estimate, on average."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from executors.randomness.families import QuantisedGaussian
from executors.randomness.quantisers import StochasticRounding
from executors.randomness.rng import generator_on
from proofs_checks.claims import Claim, conditioned, counterexample, printed
from proofs_checks.mutation import Mutant
from proofs_checks.outcomes import Context, Outcome, worst
from proofs_checks.statistics import compare_means

BITS = tuple(range(2, 9))
_GRADIENT = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
_CLAMPED, _WIDE = 2.0, 6.0
"""Largest levels, in standard deviations of the direction: one that clamps 5 % of it, and one that clamps nothing."""


def _direction(bits: int, highest_level: float) -> QuantisedGaussian:
    codes = 2 ** (bits - 1) - 1
    return QuantisedGaussian(StochasticRounding(bits, codes / highest_level, zero_point=codes))


def _rounding_pairs(direction: QuantisedGaussian, count: int, seed: int) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty((count, len(_GRADIENT)), dtype=torch.float64) for _ in range(2))
    direction.fill_pair(first, second, generator_on(torch.device("cpu"), seed))
    return first, second


def check_estimators(context: Context) -> Outcome:
    """Compare Q-RGE1 and Q-RGE2 of a linear loss with the gradient times the moments that the direction declares."""
    outcomes = []
    cases = [(bits, reach) for bits in BITS for reach in (_CLAMPED, _WIDE)]
    for number, (bits, reach) in enumerate(cases):
        direction = _direction(bits, reach)
        pair = _rounding_pairs(direction, context.samples(400_000, 40_000), context.seed + number)
        slope = pair[0] @ _GRADIENT
        for name, used, moment in (
            ("used twice", pair[0], direction.distribution.second_moment),
            ("two roundings", pair[1], direction.cross_moment),
        ):
            outcome = compare_means(
                f"{bits} bits up to ±{reach:g}, {name} (expected {moment:.4f}·∇)",
                slope[:, None] * used,
                moment * _GRADIENT,
            )
            outcomes.append(outcome)
    return worst(outcomes)


_WITHIN = (0.0, 0.31, -0.77, 1.5, -1.999)
_BEYOND = (2.4, -5.0, 2.001, 100.0)


def check_rounding(numbers: tuple[float, ...], context: Context) -> Outcome:
    """Compare the mean and the variance of rounding given numbers with those of the clamped numbers."""
    outcomes = []
    generator = generator_on(torch.device("cpu"), context.seed)
    count = context.samples(100_000, 5000)
    given = torch.tensor(numbers, dtype=torch.float64)
    for bits in BITS:
        rounding = _direction(bits, _CLAMPED).rounding
        kept = given.clamp(rounding.levels[0], rounding.levels[-1])
        cells = kept * rounding.scale
        fraction = cells - cells.floor()
        variance = fraction * (1 - fraction) / rounding.scale**2
        rounded = rounding.rounded(given.expand(count, -1).contiguous(), generator)
        columns = torch.cat([rounded, (rounded - kept) ** 2], dim=1)
        expected = torch.cat([kept, variance])
        outcomes.append(compare_means(f"{bits} bits", columns, expected))
    return worst(outcomes)


_NEAREST = Mutant(
    "rounding to the nearest",
    "executors.randomness.quantisers:rounded_at_random",
    "chance < numbers - below",
    "0.5 < numbers - below",
)
_TOWARDS_ZERO = Mutant(
    "cutting off towards zero before the chance is drawn",
    "executors.randomness.quantisers:rounded_at_random",
    "numbers.floor()",
    "numbers.trunc()",
)

_CLAMPED_FAR = Mutant(
    "codes clamped one too far",
    "executors.randomness.quantisers:StochasticRounding.codes",
    "clamp_(-self.highest, self.highest)",
    "clamp_(-self.highest - 1, self.highest)",
)

CLAIMS = (
    Claim(
        name="stochastic-rounding-unbiased",
        paper="quzo",
        where=("Eq. 5", "Eq. 6"),
        quotation="E[Q(x)] = x",
        statement=(
            "E[Q(x)] = clamp(x) and Var[Q(x)] = f(1 - f)/s², with f the fraction of s·x, at 2 to 8 bits; the zero "
            "point changes neither. Beyond the largest level the paper's E[Q(x)] = x does not hold."
        ),
        hypotheses=(
            "values measured after the zero point is taken off and the scale divided out; symmetric codes"
        ),
        references=("QuZO equations 5 and 6; Connolly, Higham and Mary (2021)"),
        checks=(
            conditioned(
                partial(check_rounding, _WITHIN),
                _NEAREST,
                _TOWARDS_ZERO,
                Mutant(
                    "a zero point that is forgotten",
                    "executors.randomness.quantisers:StochasticRounding.values",
                    "(codes - self.zero_point)",
                    "codes",
                ),
            ),
            counterexample(partial(check_rounding, _BEYOND), _CLAMPED_FAR),
        ),
        amendment="No number lies beyond the largest level.",
        breaks="Equation 5 clamps to the range of the format, and the mean of a clamped number is the clamped number.",
        consequence="Choose the scale so that directions are not clamped, or account for E[clamp(u)²] in the learning rate.",
    ),
    Claim(
        name="quantised-rge",
        paper="zosim",
        where=("executors.randomness.families",),
        quotation="Two independent roundings of one direction leave no bias of their own.",
        statement=(
            "With one rounding used twice (Q-RGE1) E[(û·∇)û] = E[Q(u)²]·∇, biased by the variance of the rounding; "
            "with two independent roundings of one direction (Q-RGE2) E[(û₁·∇)û₂] = E[clamp(u)²]·∇, which is ∇ where "
            "nothing is clamped, at any number of bits."
        ),
        hypotheses=("linear loss, standard normal directions, symmetric codes, 2 to 8 bits"),
        references=("QuZO equations 3, 4, 8 and 10"),
        checks=(
            printed(
                check_estimators,
                _NEAREST,
                _TOWARDS_ZERO,
                Mutant(
                    "one rounding where two are due",
                    "executors.randomness.families:QuantisedGaussian.fill_pair",
                    "second.copy_(self.rounding.rounded(first, generator))\n    first.copy_(self.rounding.rounded(first, generator))",
                    "first.copy_(self.rounding.rounded(first, generator))\n    second.copy_(first)",
                ),
                Mutant(
                    "the second rounding rounds the first",
                    "executors.randomness.families:QuantisedGaussian.fill_pair",
                    "first.copy_(self.rounding.rounded(first, generator))",
                    "first.copy_(self.rounding.rounded(second, generator))",
                ),
            ),
        ),
    ),
)
